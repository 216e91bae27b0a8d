"""Batches of samples of similar length, limited by a number of padded tokens."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from learnerkit.data.rows import draw_seed


class InOrder(list[list[int]]):
    """Batches of the indices of a dataset, in its order."""


class LengthBatches(Sampler[list[int]]):
    """A batch sampler that puts samples of similar length together, for little padding and batches of equal work.

    Lengths are rounded up to bounds that are 8 apart, and beyond 64 an eighth apart or less. In each epoch, samples of
    one bound are drawn into batches at random, and the batches are shuffled. The number of batches and their sizes stay
    the same. The longest batch comes first, so that a lack of memory shows at once.

    Args:
        lengths: the length of each sample.
        tokens: the most tokens in a batch, padding included: its samples times the length of the longest. A longer
            sample forms its own batch.
        shuffle: draw in random order; otherwise the longest samples come first.
        weights: the weight of each sample in a random draw with replacement, of as many samples as there are. The draw
            is stratified by length: the samples lie side by side on a line, each as long as it is expected to be drawn,
            and a point is drawn from each unit of that line (Kitagawa 1996; compared with other ways by Douc and Cappé,
            https://arxiv.org/abs/cs/0507025). So the expected number of draws is exact for each sample, and the batch
            sizes stay the same, too.
        generator: the generator of the random order. A fit lends one if it is `None`; outside of a fit it is seeded
            from torch's global generator.

    Raises:
        ValueError: there are no samples, or `tokens` is below 1.
    """

    def __init__(
        self, lengths: Sequence[int] | Tensor, tokens: int, shuffle: bool = False,
        generator: torch.Generator | None = None, weights: Tensor | None = None,
    ) -> None:  # fmt: skip
        if tokens < 1 or not len(lengths):
            raise ValueError(f"got {len(lengths)} samples and tokens={tokens}; there must be at least one of each")
        self.lengths, self.tokens = torch.as_tensor(lengths).long(), tokens  # unsigned ones have no negative
        self.shuffle, self.generator = shuffle, generator
        self.weights, self._bounds = weights, _bounds(self.lengths)
        if weights is not None:
            self._by_length = self._bounds.argsort(descending=True, stable=True)
            ends = weights.double()[self._by_length].cumsum(0)
            self._ends = ends / ends[-1] * len(ends)
            first = torch.searchsorted(self._ends, torch.arange(len(ends)).double(), right=True)
            self._bounds = self._bounds[self._by_length][first]  # from here on, the bounds of the draws
        self._sizes: list[int] = []
        longest, start = self._bounds.sort(descending=True).values.tolist(), 0
        while start < len(longest):
            self._sizes.append(min(max(1, tokens // longest[start]), len(longest) - start))
            start += self._sizes[-1]

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[list[int]]:
        if not self.shuffle and self.weights is None:
            order = self.lengths.argsort(descending=True, stable=True)
            yield from (batch.tolist() for batch in order.split(self._sizes))
            return
        generator = self.generator
        if generator is None:
            generator = torch.Generator().manual_seed(draw_seed())
        order = torch.randperm(len(self.lengths), generator=generator)
        order = order[self._bounds[order].argsort(descending=True, stable=True)]
        if self.weights is not None:
            points = torch.arange(1, len(order) + 1) - torch.rand(len(order), generator=generator, dtype=torch.float64)
            order = self._by_length[torch.searchsorted(self._ends, points)][order]
        batches = order.split(self._sizes)
        turns = torch.randperm(len(batches) - 1, generator=generator) + 1
        yield from (batches[turn].tolist() for turn in (0, *turns.tolist()))

    def in_order(self) -> "InOrder":
        """Return batches of all samples in the order of the dataset, within the same number of tokens."""
        batches = InOrder()
        longest = 0
        for i, length in enumerate(self.lengths.tolist()):
            longest = max(longest, length)
            if not batches or (len(batches[-1]) + 1) * longest > self.tokens:
                batches.append([])
                longest = length
            batches[-1].append(i)
        return batches


def _bounds(lengths: Tensor) -> Tensor:
    """Return each length, rounded up, but not above the greatest length."""
    values = np.maximum(lengths.numpy(), 1)
    step = (2 ** np.floor(np.log2(np.maximum(values - 1, 64))) / 8).astype(np.int64)
    return torch.from_numpy(np.minimum(-(-values // step) * step, values.max(initial=1)))
