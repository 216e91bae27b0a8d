"""Batches of nested tensors: moving, measuring, joining and gathering them."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from learnerkit import distributed
from learnerkit.marks import collective
from learnerkit.text import first_few
from learnerkit.utils import library_of
from learnerkit.values import describe, entries, is_nested, map_batch, tensors_in, with_entries


def to_device(batch: Any, device: torch.device) -> Any:
    """Move a nested batch to `device`: tensors (without blocking from pinned memory) and objects with a `to` method."""
    return map_batch(lambda t: _as_plain(t).to(device, non_blocking=True), batch, lambda x: _by_method(x, "to", device))


def pinned(batch: Any) -> Any:
    """Copy a nested batch to pinned memory, from which it goes to a GPU without blocking.

    Tensors that are on a device already stay there: torch's loader would refuse them.
    """
    return map_batch(
        lambda t: t.pin_memory() if t.device.type == "cpu" else t, batch, lambda x: _by_method(x, "pin_memory")
    )


def _by_method(x: Any, name: str, *args: Any) -> Any:
    """Return what a method of an object of another library returns, such as a batch of graphs; `x` if it has none."""
    method = getattr(x, name, None)
    return method(*args) if callable(method) and not isinstance(x, type) else x


def _as_plain(t: Tensor) -> Tensor:
    """Return a tensor of a fastai subclass as a plain tensor: torch's functions refuse operands of two such types."""
    return t.as_subclass(Tensor) if type(t) is not Tensor and library_of(t) == "fastai" else t


def on_host(batch: Any) -> Any:
    """Return a nested batch with detached copies of its tensors on the host; a host-device sync.

    They are copies on the CPU too, as a loader may refill the tensors of a batch for the next one.
    """
    return map_batch(lambda t: t.detach().to("cpu", copy=True), batch)


def in_float32(t: Tensor) -> Tensor:
    """Return a tensor of lower floating-point precision as float32, and any other as it is."""
    return t.float() if t.is_floating_point() and t.itemsize < 4 else t


def lengths_in(part: Any, place: tuple = (), within_lists: bool = False) -> Iterator[tuple[tuple, int]]:
    """Yield (place, length) of the tensors, arrays and lists in a batch; with `within_lists` look inside the lists.

    A list inside a batch may have an entry for each sample, or be several inputs.
    """
    if isinstance(part, PackedSequence):
        yield place, int(part.batch_sizes[0])
    elif isinstance(part, tuple | list) and place and not within_lists and not hasattr(part, "_fields"):
        yield place, len(part)
    # Images of PIL have no ndim.
    elif isinstance(part, Tensor) or (hasattr(part, "__array_interface__") and hasattr(part, "ndim")):
        if part.ndim:
            yield place, len(part)
    else:
        for key, value in entries(part):
            yield from lengths_in(value, (*place, key), within_lists)


def likely_sizes(batch: Any) -> set[int]:
    """Return the numbers of samples that agree with all parts of a batch; several or none if the parts do not tell."""
    readings = [{n for _, n in lengths_in(batch, within_lists=within)} for within in (False, True)]
    return {n for lengths in readings if len(lengths) == 1 for n in lengths}


def rows_of(batch: Any) -> int:
    """Return the length of the first tensor of a batch; 1 if there is none."""
    return next((len(t) for t in tensors_in(batch) if t.ndim), 1)


class Rows(list):
    """A list with an entry for each sample of a batch, rather than for each of several parts."""


def with_rows(part: Any, size: int, is_output: bool = False, is_whole: bool = True) -> Any:
    """Return part of a batch of `size` samples, with `Rows` for the lists that have an entry for each sample.

    Args:
        part: the part; a list of `size` mappings, as detectors take and return them, has one for each sample.
        size: the number of samples.
        is_output: a model has returned it; a tuple then has several outputs, of which some may be of the whole batch.
        is_whole: `part` is not inside another one.
    """
    if not is_nested(part) or isinstance(part, PackedSequence):
        return part
    if not isinstance(part, tuple | list) or hasattr(part, "_fields"):  # its entries have names
        return with_entries(part, {key: with_rows(value, size, is_output, False) for key, value in entries(part)})
    if is_whole and len(part) == size and all(isinstance(entry, Mapping) for entry in part):
        return Rows(part)
    have_rows = [t.ndim > 0 and len(t) == size for t in tensors_in(part)]
    are_parts = any(have_rows) if is_output and isinstance(part, tuple) else have_rows and all(have_rows)
    if len(part) == size and not are_parts:
        return Rows(part)
    return type(part)(with_rows(x, size, is_output, False) for x in part)


def concat(batches: list) -> Any:
    """Join batches of one structure along their first dimension.

    If the other dimensions of a tensor differ between batches, the result is a list with a tensor for each sample.
    Entries of mappings that some batches lack are left out, with a warning.
    What is `None` in all batches stays `None`.

    Raises:
        ValueError: packed sequences, or tensors of which some have no axis of samples.
    """
    first = batches[0]
    if all(batch is None for batch in batches):
        return None
    if isinstance(first, Tensor):
        other = next((t for t in batches if not isinstance(t, Tensor) or t.ndim != first.ndim), first)
        if other is not first:
            raise ValueError(
                f"batches with {describe(first)} and {describe(other)} cannot be joined: each has a tensor that keeps "
                "the axis of its samples, also with a single one (.squeeze(1) rather than .squeeze())"
            )
        if len({t.shape[1:] for t in batches}) > 1:
            return [row for t in batches for row in t]
        return torch.cat(batches) if first.ndim else torch.stack(batches)
    if isinstance(first, PackedSequence):
        raise ValueError("packed sequences of several batches cannot be joined; pad them (pad_packed_sequence)")
    if any(isinstance(batch, Rows) for batch in batches):
        return list(chain.from_iterable(batches))
    if isinstance(first, tuple | list):
        columns = [concat(list(column)) for column in zip(*batches, strict=True)]
        return with_entries(first, dict(enumerate(columns)))
    if is_nested(first):
        parts = [dict(entries(batch)) for batch in batches]
        kept = [key for key in parts[0] if all(key in part for part in parts)]
        if rest := [key for key in dict.fromkeys(chain.from_iterable(parts)) if key not in kept]:
            distributed.warn_once(f"some batches have no entry {first_few(rest)}: it is left out where they are joined")
        return with_entries(first, {key: concat([part[key] for part in parts]) for key in kept})
    return list(batches)


@collective
def gather_batches(batches: list[tuple[Any, Any]], sharded: bool, on: str = "all") -> list | None:
    """Return the batches of all ranks in the order of their places; every rank must reach this if `sharded`.

    Args:
        batches: (place, batch) pairs; the tensors of a batch may be nested.
        sharded: whether ranks hold different batches; if not, this rank's batches are returned.
        on: 'all', or 'rank0': the other ranks get `None`.
    """
    if not sharded:
        return [batch for _, batch in batches]
    pairs = gather_nested(batches, on)
    return None if pairs is None else [batch for _, batch in pairs]


@collective
def gather_nested(pieces: Iterable[tuple[Any, Any]], on: str = "all") -> list[tuple[Any, Any]] | None:
    """Return the (place, nested tensors) pairs of all ranks, on the host, in the order of their places.

    Each batch may have its own structure. Every rank must reach this.

    Args:
        pieces: the pairs of this rank.
        on: as in `gather_batches`.
    """
    pieces = list(pieces)
    layouts = [
        (place, None if type(x) is Tensor and _is_dense(x) else map_batch(lambda t: _HOLE if _is_dense(t) else t, x))
        for place, x in pieces
    ]
    tensors = distributed.gather_pieces(
        (((place, i), t) for place, x in pieces for i, t in enumerate(filter(_is_dense, tensors_in(x)))), on
    )
    everyone = sorted(chain.from_iterable(distributed.all_gather(layouts)), key=lambda pair: pair[0])
    if tensors is None:
        return None
    gathered = iter(tensors)

    def filled(t: Tensor) -> Tensor:
        return next(gathered) if _is_dense(t) else t

    return [(place, next(gathered) if layout is None else map_batch(filled, layout)) for place, layout in everyone]


def _is_dense(t: Tensor) -> bool:
    """Tell whether a tensor can be sent as its bytes; a sparse or a nested one is sent as an object."""
    return t.layout is torch.strided and not t.is_nested


_HOLE = torch.empty(0)  # the placeholder of a tensor; one object, which is sent once


def loader_len(dl: Any) -> int | None:
    """Return the length of a loader, dataset or sampler; `None` if it has no length."""
    try:
        return len(dl)
    except (TypeError, NotImplementedError):  # streams of other libraries raise the latter
        return None
