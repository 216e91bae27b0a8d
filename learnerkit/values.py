"""Functions that map, describe, compare and hash nested values: tensors in tuples, lists, mappings and dataclasses."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from learnerkit.text import first_few

TensorFunction = Callable[[Tensor], Tensor]
"""A function of one tensor that returns another, such as the activation of a loss."""


def map_batch(f: Callable[[Tensor], Any], batch: Any, others: Callable[[Any], Any] | None = None) -> Any:
    """Apply `f` to every tensor in nested tuples, lists, named tuples, mappings and dataclasses.

    Args:
        f: the function; for a packed sequence it gets only the data.
        batch: the nested batch.
        others: applied to all other objects in the batch, and to packed sequences.
    """
    if isinstance(batch, Tensor):
        return f(batch)
    if isinstance(batch, PackedSequence):
        return batch._replace(data=f(batch.data)) if others is None else others(batch)
    if isinstance(batch, tuple | list):
        mapped = [f(b) if isinstance(b, Tensor) else map_batch(f, b, others) for b in batch]
        return type(batch)(*mapped) if hasattr(batch, "_fields") else type(batch)(mapped)
    if is_nested(batch):
        return with_entries(batch, {key: map_batch(f, part, others) for key, part in entries(batch)})
    return batch if others is None else others(batch)


def is_nested(part: Any) -> bool:
    """Tell whether part of a batch is a tuple, a list, a mapping or a dataclass object; `entries` takes these."""
    return isinstance(part, tuple | list | Mapping) or (is_dataclass(part) and not isinstance(part, type))


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield every tensor in a nested batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, PackedSequence):
        yield batch.data
    else:
        for _, part in entries(batch):
            yield from tensors_in(part)


def entries(part: Any) -> Iterable[tuple[Any, Any]]:
    """Return the (key, value) pairs of a mapping, a dataclass, a tuple or a list."""
    if isinstance(part, Mapping):
        return part.items()
    if isinstance(part, tuple | list):
        return enumerate(part)
    return [(field.name, getattr(part, field.name)) for field in fields(part)] if is_nested(part) else ()


def with_entries(part: Any, values: Mapping[Any, Any]) -> Any:
    """Return a copy of `part` with other values for its `entries`."""
    if isinstance(part, Mapping):
        return dict(values)
    if isinstance(part, tuple | list):
        return type(part)(*values.values()) if hasattr(part, "_fields") else type(part)(values.values())
    twin = copy(part)
    for name, value in values.items():
        object.__setattr__(twin, name, value)  # the dataclass may be frozen
    return twin


def get_field(output: Any, name: str, default: Any = None) -> Any:
    """Return an entry of a model's output, by key from a mapping, otherwise by attribute."""
    if isinstance(output, Mapping):
        return output.get(name, default)
    return getattr(output, name, default)


def describe(x: Any) -> str:
    """Describe a value's type and shape in a few words, for error messages."""
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} tensor of shape {tuple(x.shape)}"
    if isinstance(x, np.ndarray):
        return f"{x.dtype} array of shape {x.shape}"
    if isinstance(x, Mapping):
        return "{" + first_few((f"{k!r}: {describe(v)}" for k, v in x.items()), n=20) + "}"
    if isinstance(x, list | tuple):
        each = [describe(entry) for entry in x[:6]]
        is_long = len(each) == 6 or (len(each) > 2 and len({*each}) == 1)
        return f"({len(x)} entries such as {each[0]})" if is_long else f"({', '.join(each)})"
    return type(x).__name__


def same(a: Any, b: Any, depth: int = 8) -> bool:
    """Tell whether two nested values are equal; for tensors on a device this is a host-device sync.

    Args:
        a, b: the values. NaNs are equal in tensors; objects without an `__eq__` are compared by their attributes.
        depth: the depth of the comparison; deeper values count as equal.
    """
    if a is b or not depth:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[k], b[k], depth - 1) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y, depth - 1) for x, y in zip(a, b, strict=True))
    if hasattr(a, "__array__"):
        return bool(a.shape == b.shape and (a == b).all())
    has_no_eq = not any("__eq__" in vars(cls) for cls in type(a).__mro__[:-1])
    if has_no_eq:
        return same(getattr(a, "__dict__", {}), getattr(b, "__dict__", {}), depth - 1)
    return bool(a == b)


_WEIGHTS = 2**16


@torch.no_grad()
def digests(tensors: Iterable[Tensor]) -> list[int]:
    """Return a 64-bit digest of the bits of each tensor, so that equal NaNs are equal and 0.0 and -0.0 are not.

    The method is multilinear hashing (Lemire and Kaser, https://arxiv.org/abs/1202.4961): a sum of words of up to 32
    bits, each times a random odd 64-bit number of its place, modulo 2**64. Integer sums are the same in any order. A
    change in one word always shows, others with a chance of about 1 - 2**-32. It waits for each device once.

    Args:
        tensors: of any shapes and types, on any devices; shapes and types themselves are not in the digest.
    """
    tensors = list(tensors)
    drawn = torch.randint(-(2**63), 2**63 - 1, (_WEIGHTS,), generator=torch.Generator().manual_seed(0)) | 1
    weights = {device: drawn.to(device) for device in {t.device for t in tensors}}
    sums = [reduce(torch.add, (_weighted_sum(_words(x), weights[t.device]) for x in dense_parts(t))) for t in tensors]
    numbers = {device: iter(torch.stack([s for s in sums if s.device == device]).tolist()) for device in weights}
    return [next(numbers[t.device]) % 2**64 for t in tensors]


def dense_parts(t: Tensor) -> list[Tensor]:
    """Return the dense tensors whose memory has the values of a tensor: itself, or those of a sparse one."""
    if t.layout is torch.sparse_coo:
        return [t._indices(), t._values()]
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [t.crow_indices(), t.col_indices(), t.values()]
    if t.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [t.ccol_indices(), t.row_indices(), t.values()]
    return [t]


def n_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors; of sparse ones those of their parts."""
    return sum(part.nbytes for t in tensors for part in dense_parts(t))


def in_a_row(t: Tensor) -> Tensor:
    """Return a tensor's values as a row without gaps, so that it can be viewed as bytes; a copy only if it has gaps."""
    return t.contiguous().as_strided((t.numel(),), (1,))  # a single value is "contiguous" with any stride


def _words(t: Tensor) -> Tensor:
    """Return the bits of a tensor as a row of integers of at most 32 bits."""
    return in_a_row(t.resolve_conj().resolve_neg()).view({1: torch.uint8, 2: torch.int16}.get(t.itemsize, torch.int32))


def _weighted_sum(words: Tensor, weights: Tensor) -> Tensor:
    size = len(weights)
    if len(words) <= size:
        return (words * weights[: len(words)]).sum()
    whole = len(words) // size * size
    # The products take 8 bytes each: the cache of a CPU holds one row, an accelerator needs many at once (32 MiB).
    rows = words[:whole].view(-1, size).split(1 if words.device.type == "cpu" else 64)
    sums = [(block * weights).sum(1) for block in rows]
    return _weighted_sum(torch.cat([*sums, _weighted_sum(words[whole:], weights)[None]]), weights)
