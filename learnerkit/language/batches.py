"""Datasets of token ids, and the batches of their samples."""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

IGNORED = -100
"""The target that torch's losses and transformers' models leave out."""


class EncodedTexts(Dataset):
    """Texts as token ids: each sample is a mapping with `input_ids` and, if there are any, `labels`.

    Args:
        ids: of all texts, one after the other.
        lengths: how many each text has.
        labels: the class of each text, or `None`.
    """

    def __init__(self, ids: Tensor, lengths: Tensor, labels: Tensor | None = None) -> None:
        self.ids = ids
        self.lengths = lengths
        self.labels = labels
        self._ends = lengths.cumsum(0).tolist()

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        i = range(len(self))[i]
        sample = {"input_ids": self.ids[self._ends[i - 1] if i else 0 : self._ends[i]]}
        return sample if self.labels is None else {**sample, "labels": self.labels[i]}


class TokenBlocks(Dataset):
    """A long text in contiguous blocks, of which each token is predicted once, from those before it in its block.

    Args:
        ids: of the text.
        seq_len: predictions in a block, which has one token more; the last block may be shorter.

    Raises:
        ValueError: fewer than two tokens, or `seq_len` below 1.
    """

    def __init__(self, ids: Tensor, seq_len: int) -> None:
        if len(ids) < 2 or seq_len < 1:
            raise ValueError(
                f"got {len(ids)} tokens and seq_len={seq_len}; there must be two tokens, and seq_len is 1 or more"
            )
        self.ids, self.seq_len = ids, seq_len

    def __len__(self) -> int:
        return -(-(len(self.ids) - 1) // self.seq_len)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        start = range(len(self))[i] * self.seq_len
        block = self.ids[start : start + self.seq_len + 1]
        return {"input_ids": block, "labels": block}


class Padded:
    """Makes a batch of samples by padding them at the end to the longest.

    Args:
        pad: the id of the padding.
        masked: say by an `attention_mask` (n, t) what is padding: 0, and 1 for tokens. Causal models need none, as they
            do not look ahead.
    """

    def __init__(self, pad: int, masked: bool = True) -> None:
        self.pad, self.masked = pad, masked

    def __call__(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return `input_ids` (n, t) of int64, and `labels` (n,) or (n, t), which are -100 for padding."""
        ids = [sample["input_ids"] for sample in samples]
        batch = {"input_ids": pad_sequence(ids, True, self.pad).long()}
        if self.masked:
            lengths = torch.tensor([len(each) for each in ids])
            batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]).long()
        labels = [sample["labels"] for sample in samples if "labels" in sample]
        if labels:
            batch["labels"] = pad_sequence(labels, True, IGNORED).long() if labels[0].ndim else torch.stack(labels)
        return batch
