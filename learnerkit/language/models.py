"""A small classifier of texts."""

from torch import Tensor, nn


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
            mixed = (input_ids[:, :-1] * _PRIME + input_ids[:, 1:]) % self.pairs.num_embeddings
            both = mask[:, :-1] * mask[:, 1:]
            total, count = total + (self.dropout(self.pairs(mixed)) * both).sum(1), count + both.sum(1)
        return self.head(self.dropout(total / count.clamp(min=1)))


_PRIME = 1_000_003  # spreads neighbouring ids over the embeddings
