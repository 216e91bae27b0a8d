"""Batches of nested tensors: moving, counting, joining and gathering them."""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from learnerkit import world
from learnerkit.utils import library_of


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor in a nested batch to `device`; copies from pinned memory do not block."""
    return map_batch(lambda t: _as_plain(t).to(device, non_blocking=True), batch)


def _as_plain(t: Tensor) -> Tensor:
    """Return fastai's tensor subclasses as plain tensors: torch's functions refuse operands of two such types."""
    return t.as_subclass(Tensor) if type(t) is not Tensor and library_of(t) == "fastai" else t


def map_batch(f: Callable[[Tensor], Any], batch: Any) -> Any:
    """Apply `f` to every tensor in nested tuples, lists, named tuples and mappings."""
    if isinstance(batch, Tensor):
        return f(batch)
    if isinstance(batch, tuple | list):
        mapped = [f(b) if isinstance(b, Tensor) else map_batch(f, b) for b in batch]
        return type(batch)(*mapped) if hasattr(batch, "_fields") else type(batch)(mapped)
    if isinstance(batch, Mapping):
        return {k: map_batch(f, v) for k, v in batch.items()}
    return batch


def in_float32(t: Tensor) -> Tensor:
    """Return a tensor of lower floating-point precision as float32, and any other as it is."""
    return t.float() if t.is_floating_point() and t.itemsize < 4 else t


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield every tensor in a nested batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        yield from chain.from_iterable(map(tensors_in, batch.values()))
    elif isinstance(batch, tuple | list):
        yield from chain.from_iterable(map(tensors_in, batch))


def get_field(output: Any, name: str, default: Any = None) -> Any:
    """Return an entry of a model's output, by key from a mapping, otherwise by attribute."""
    if isinstance(output, Mapping):
        return output.get(name, default)
    return getattr(output, name, default)


def batch_size(batch: Any) -> int:
    """The number of samples in a batch: the length of its first tensor."""
    first = batch[0] if isinstance(batch, tuple) and batch else batch
    if not isinstance(first, Tensor):
        first = next(tensors_in(batch), first)
    if isinstance(first, Tensor):
        return first.shape[0] if first.ndim else 1
    try:
        return len(first)
    except TypeError:
        return 1


def concat(batches: list) -> Any:
    """Join batches of one structure along their first dimension.

    If the other dimensions of a tensor differ between batches, the result is a list with a tensor for each sample.
    """
    first = batches[0]
    if isinstance(first, Tensor):
        if len({(t.shape[1:], t.ndim) for t in batches}) > 1:
            return [row for t in batches for row in t]
        return torch.cat(batches) if first.ndim else torch.stack(batches)
    if isinstance(first, Mapping):
        return {k: concat([b[k] for b in batches]) for k in first}
    if isinstance(first, tuple | list):
        columns = [concat(list(column)) for column in zip(*batches, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    return list(chain.from_iterable(batches)) if isinstance(first, list) else list(batches)


def gather_batches(batches: list[tuple[Any, Any]], sharded: bool, on: str = "all") -> list | None:
    """Return the batches of all ranks in the order of their places; every rank must reach this if `sharded`.

    Args:
        batches: (place, batch) pairs; the tensors of a batch may be nested, all batches have one structure.
        sharded: whether ranks hold different batches; if not, this rank's batches are returned.
        on: 'all', or 'rank0': the other ranks get `None`.
    """
    if not sharded:
        return [batch for _, batch in batches]
    # A rank without data gets the structure from the others.
    own = map_batch(lambda t: torch.empty(0), batches[0][1]) if batches else None
    structure = next((s for s in world.all_gather(own) if s is not None), None)
    pieces = [((place, i), t) for place, batch in batches for i, t in enumerate(tensors_in(batch))]
    tensors = world.gather_pieces(pieces, on)
    if tensors is None or structure is None:
        return None if tensors is None else []
    gathered = iter(tensors)
    count = len(tensors) // max(1, sum(1 for _ in tensors_in(structure)))
    return [map_batch(lambda _: next(gathered), structure) for _ in range(count)]


def loader_len(dl: Any) -> int | None:
    """The length of a loader, dataset or sampler; `None` if it has no length."""
    try:
        return len(dl)
    except TypeError:
        return None
