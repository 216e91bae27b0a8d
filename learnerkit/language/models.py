"""A small classifier of texts, and the Learner that trains it or another model."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from learnerkit.data.weights import class_loss
from learnerkit.language.data import TextDataLoaders
from learnerkit.learner import Learner


class TextClassifier(nn.Module):
    """Classifies texts by the mean of the embeddings of their tokens, and of their pairs of neighbouring tokens.

    The method is fastText's (Joulin et al., https://arxiv.org/abs/1607.01759): quick, and on long texts hard to beat
    without pretraining. Pairs share a fixed number of embeddings by a hash.

    Args:
        vocab_size: different tokens, as `TextData.vocab_size`.
        n_out: outputs, one for each class.
        size: of an embedding.
        pairs: embeddings of pairs; 0: tokens alone.
        dropout: of embeddings, and of their mean.
    """

    def __init__(self, vocab_size: int, n_out: int, size: int = 50, pairs: int = 2**16, dropout: float = 0.5) -> None:
        super().__init__()
        self.tokens, self.pairs = nn.Embedding(vocab_size, size), nn.Embedding(pairs, size) if pairs else None
        for table in (self.tokens, self.pairs):
            if table is not None:
                nn.init.normal_(table.weight, std=0.1)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(size, n_out)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the scores of the classes, of shape (n, n_out).

        Args:
            input_ids: token ids (n, t).
            attention_mask: 0 for padding, else 1 (n, t).
        """
        mask = attention_mask.unsqueeze(-1).to(self.tokens.weight.dtype)
        total, count = (self.dropout(self.tokens(input_ids)) * mask).sum(1), mask.sum(1)
        if self.pairs is not None:
            # A dimension of t - 1 would bar a program of `torch.export` from texts of two tokens.
            mixed = (input_ids * _PRIME + input_ids.roll(-1, 1)) % self.pairs.num_embeddings
            has_next = torch.arange(input_ids.shape[1], device=mask.device) < input_ids.shape[1] - 1
            both = mask * mask.roll(-1, 1) * has_next.unsqueeze(-1)
            total, count = total + (self.dropout(self.pairs(mixed)) * both).sum(1), count + both.sum(1)
        return self.head(self.dropout(total / count.clamp(min=1)))


_PRIME = 1_000_003  # spreads neighbouring ids over the embeddings


def text_learner(
    dls: TextDataLoaders,
    model: nn.Module | None = None,
    metrics: Any = None,
    *,
    loss_func: Callable[..., Tensor] | None = None,
    size: int = 50,
    pairs: int = 2**16,
    dropout: float = 0.5,
    class_weights: Any = None,
    **learner_kwargs: Any,
) -> Learner:
    """Make a Learner for texts.

    Args:
        dls: from `TextData.dataloaders`.
        model: any module that takes their batches by keyword, such as one of transformers; by default a
            `TextClassifier` for their classes.
        metrics: as for `Learner`.
        loss_func: default `nn.CrossEntropyLoss()` for classes; for a language model the loss that `model` makes itself.
        size, pairs, dropout: of the `TextClassifier`.
        class_weights: as for `tabular_learner`.
        learner_kwargs: for `Learner`, such as `splitter`.

    Raises:
        TypeError, ValueError: other loaders, a language model without `model`, or `class_weights` that do not fit.
    """
    if not isinstance(dls, TextDataLoaders):
        raise TypeError(
            f"got a {type(dls).__name__}; text_learner takes what TextData's dataloaders() returns; for others there "
            "is Learner(dls, TextClassifier(vocab_size, n_out), loss_func)"
        )
    data = dls.data
    if model is None:
        if data.classes is None:
            raise ValueError("the texts have no classes; give model= the language model that predicts the next token")
        model = TextClassifier(data.vocab_size, len(data.classes), size, pairs, dropout)
    if data.classes is not None or class_weights is not None:
        loss_func = class_loss(dls, loss_func, nn.CrossEntropyLoss(), class_weights)
    return Learner(dls, model, loss_func, metrics=metrics, **learner_kwargs)
