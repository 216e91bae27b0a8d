"""Small texts, and models for them, for the tests of learnerkit.language."""

import torch
from torch import nn
from torch.nn import functional as F

from learnerkit.language.data import TextData

WORDS = {"animal": "cat dog bird fish horse", "food": "bread soup apple rice cheese"}


def make_texts(n=60, seed=0):
    """Texts of 1 to 12 words of one kind each, and their kinds."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda high: int(torch.randint(high, (), generator=generator))  # noqa: E731
    labels = [list(WORDS)[i % 2] for i in range(n)]
    return [" ".join(WORDS[kind].split()[draw(5)] for _ in range(1 + draw(12))) for kind in labels], labels


def make_data(**kwargs):
    return TextData.from_texts(*make_texts(), **{"vocab_size": 300, **kwargs})


class Bag(nn.Module):
    """Classifies by the mean of the embeddings."""

    def __init__(self, n, n_out=2):
        super().__init__()
        self.embedding, self.head = nn.Embedding(n, 8), nn.Linear(8, n_out)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask.unsqueeze(-1)
        return self.head((self.embedding(input_ids) * mask).sum(1) / mask.sum(1))


class Next(nn.Module):
    """Predicts the next token from the present one: a language model of its own, for torch's cross-entropy."""

    def __init__(self, n):
        super().__init__()
        self.table = nn.Embedding(n, n)

    def forward(self, input_ids):
        return self.table(input_ids).mT


class OwnNext(nn.Module):
    """The same as transformers' causal models have it: it makes its own loss, and shifts the labels."""

    def __init__(self, n):
        super().__init__()
        self.inner = Next(n)

    def forward(self, input_ids, labels=None):
        logits = self.inner.table(input_ids)
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].mT, labels[:, 1:])
        return {"logits": logits, "loss": loss}


def count_next(targets):
    """What the loss of `OwnNext` averages over; the loaders have the targets in the places of the predictions."""
    return (targets != -100).sum()


def make_stream(**kwargs):
    return TextData.from_texts(make_texts()[0], vocab_size=300, **kwargs)
