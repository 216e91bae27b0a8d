"""A loader that reads whole batches of a `TensorDataset` at once."""

import multiprocessing
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from learnerkit.data.batches import pinned


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Draw a seed as torch's loaders and samplers do, from the global generator or another."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def _rows(dataset: Dataset) -> tuple[tuple[Tensor, ...], Tensor | None] | None:
    """Return (tensors, index into them or `None`) of a TensorDataset, or of nested Subsets of one; else `None`."""
    if type(dataset) is TensorDataset:
        return dataset.tensors, None
    if type(dataset) is Subset:
        inner = _rows(dataset.dataset)
        if inner is not None:
            tensors, index = inner
            chosen = torch.as_tensor(dataset.indices, dtype=torch.long)
            index = torch.arange(len(tensors[0])) if index is None else index
            return tensors, index[chosen]  # negative ones count from the end
    return None


def _as_rows(n: int, indices: Any) -> Tensor:
    """Return the indices of a batch of a dataset with `n` samples as an int64 tensor without negative ones."""
    if type(indices) is Tensor and indices.dtype == torch.long:
        return indices
    rows = torch.as_tensor(indices, dtype=torch.long)
    return rows.where(rows >= 0, rows + n)


# How Python starts processes, unless the program says otherwise.
_FORKSERVER_BY_DEFAULT = sys.platform == "linux" and sys.version_info >= (3, 14)


class RowsLoader(DataLoader):
    """A torch `DataLoader` that reads a batch of a `TensorDataset` by one `index_select` for each tensor.

    This is about eight times as fast as fetching and collating samples one by one; workers could not make it faster,
    so none are started. For other datasets, or with another `collate_fn`, it is torch's loader, whose workers are
    forked on Linux also from Python 3.14 on, unless the program has chosen 'spawn'.

    Attributes:
        only_inputs: the batches have no targets: all entries of a tuple are inputs.
    """

    only_inputs = False

    def __init__(self, dataset: Dataset, **kwargs: Any) -> None:
        leaves_it_open = kwargs.get("num_workers") and kwargs.get("multiprocessing_context") is None
        if leaves_it_open and _FORKSERVER_BY_DEFAULT and multiprocessing.get_start_method(allow_none=True) != "spawn":
            # Other workers would import the script again, and could not load classes of a notebook's cells.
            kwargs["multiprocessing_context"] = "fork"
        super().__init__(dataset, **kwargs)
        batched = self.batch_sampler is not None and self.collate_fn is default_collate
        self.reads_rows = batched and _rows(dataset) is not None
        if self.reads_rows and self.batch_size is not None:  # the user has given no batch sampler
            # Assignment would fail, as torch's loader forbids it to protect invariants that hold here.
            self.__dict__["batch_sampler"] = IndexBatches(self.sampler, self.batch_size, self.drop_last)

    def __iter__(self) -> Any:  # torch's return type is a private class
        # Another `collate_fn` may have been set meanwhile, as torch's loader allows.
        rows = _rows(self.dataset) if self.reads_rows and self.collate_fn is default_collate else None
        if rows is not None:
            return self._read_rows(self.batch_sampler, *rows)
        if self.num_workers or not self._can_pin():
            return super().__iter__()
        try:
            self.pin_memory = False  # torch's iterator, which looks at it once, cannot pin what is on the GPU already
            batches = super().__iter__()
        finally:
            self.pin_memory = True
        return map(pinned, batches)

    def _can_pin(self) -> bool:
        """Tell whether batches are to be pinned and can be: MPS has no pinned memory, as torch's loader warns."""
        return self.pin_memory and torch.accelerator.is_available() and not torch.backends.mps.is_available()

    def _read_rows(self, batches: Any, tensors: tuple[Tensor, ...], index: Tensor | None) -> Iterator[list[Tensor]]:
        on_host = all(t.device.type == "cpu" for t in tensors)
        pin = on_host and self._can_pin()
        # torch's loader draws a seed for its workers here; the same draw keeps the random streams equal.
        draw_seed(self.generator)
        if type(batches) is not IndexBatches or not batches.in_one_tensor:
            batches = map(partial(_as_rows, len(tensors[0] if index is None else index)), batches)
        # This runs at every batch. No name refers to a batch that is yielded, so that its memory is free for reuse as
        # soon as the reader drops it.
        for rows in batches:
            if index is not None:
                rows = index.index_select(0, rows)
            if pin:
                yield [t.index_select(0, rows).pin_memory() for t in tensors]
            elif on_host:
                yield [t.index_select(0, rows) for t in tensors]
            else:
                yield [t.index_select(0, rows.to(t.device, non_blocking=True)) for t in tensors]


class IndexBatches(BatchSampler):
    """A `BatchSampler` whose batches of a plain random or sequential sampler are slices of one index tensor."""

    @property
    def in_one_tensor(self) -> bool:
        """Tell whether the sampler is plain, and the batches are slices."""
        sampler: Any = self.sampler
        if type(sampler) is RandomSampler:
            return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
        return type(sampler) is SequentialSampler

    def __iter__(self) -> Iterator:
        if not self.in_one_tensor:
            yield from super().__iter__()
            return
        order = self._order()
        whole = len(order) // self.batch_size * self.batch_size
        for some in order[:whole].view(-1, self.batch_size).split(4096):  # all at once would take 0.5 kB each
            yield from some.unbind()  # this takes less time than `split`
        if whole < len(order) and not self.drop_last:
            yield order[whole:]
        generator = getattr(self.sampler, "generator", None)
        if generator is not None:  # at its end torch's RandomSampler draws another permutation and ignores it
            torch.randperm(len(order), generator=generator)

    def _order(self) -> Tensor:
        sampler: Any = self.sampler
        if type(sampler) is SequentialSampler:
            return torch.arange(len(sampler.data_source))
        generator = sampler.generator
        if generator is None:  # torch's RandomSampler does the same
            generator = torch.Generator().manual_seed(draw_seed())
        return torch.randperm(sampler.num_samples, generator=generator)
