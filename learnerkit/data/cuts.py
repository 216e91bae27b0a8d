"""The cutting of ready-made batches along the dimension of their samples."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from learnerkit.utils import itself
from learnerkit.values import describe, entries, is_nested, with_entries

Dims = int | None | Sequence[int | None] | Mapping[str, int | None]
"""The dimension of the samples in the parts of a batch, as `DataLoaders(batch_dim=)` takes it."""

BatchCount = Callable[[Any], int | None]
"""A function that returns the number of samples of a ready-made batch, where it is known."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes)  # values that belong to the whole batch
_ADVICE = (
    "say the dimension of the samples by DataLoaders(batch_dim=...), for each part where they differ: (1, 0), or None "
    "for what belongs to the whole batch; give all parts an entry for each sample, by a collate_fn of your own; or use "
    "split_batches=False"
    " (errors.html#batch-samples)"
)


def even_spans(n: int, parts: int, least: int) -> list[tuple[int, int]]:
    """Return (start, stop) of `parts` pieces of `n` samples, as even as possible; the last are empty if `n` is small.

    Args:
        n: the number of samples.
        parts: the number of pieces.
        least: the least size of a piece; other pieces become empty to reach it.
    """
    used = max(1, min(parts, n // least))
    sizes = [n // used + (i < n % used) for i in range(used)] + [0] * (parts - used)
    return list(pairwise(accumulate(sizes, initial=0)))


def check_dims(dims: Any) -> None:
    """Refuse a `batch_dim` that is not a dimension.

    Raises:
        ValueError: it is neither a number of 0 or more, nor a sequence or mapping of such numbers and `None`.
    """
    if isinstance(dims, Mapping | Sequence) and not isinstance(dims, str):  # as omegaconf's lists are
        several = dims.values() if isinstance(dims, Mapping) else dims
        is_valid = all(d is None or _is_dim(d) for d in several)
    else:
        is_valid = _is_dim(dims)
    if not is_valid:
        raise ValueError(
            f"got batch_dim={dims!r}; it is the dimension of the samples: 0, 1, ..., or such a number for each entry "
            "of a batch, (1, 0) or {'tokens': 1}, with None for an entry that belongs to the whole batch"
            " (errors.html#batch-samples)"
        )


def _is_dim(x: Any) -> bool:
    return type(x) is int and x >= 0


def parted(dims: Dims, target_keys: Sequence[str], n_inputs: int, n_targets: int) -> tuple[Any, Any, int | None]:
    """Return the parts of a `batch_dim` for inputs and targets, and for predictions that of the last target."""
    if isinstance(dims, Mapping):
        targets = [dims.get(key, 0) for key in target_keys]
        return [dims], targets, targets[-1] if targets else 0
    if isinstance(dims, Sequence):
        return dims[:n_inputs], dims[len(dims) - n_targets :], dims[-1]
    return dims, dims, dims


def map_rows(
    f: Callable[[Any, int, tuple], Any], part: Any, dims: Dims, others: Callable[[Any], Any], place: tuple = ()
) -> Any:
    """Apply `f(rows, dim, place)` to the parts of a nested batch that have an entry for each sample.

    These parts are tensors and arrays, and lists inside the batch that hold only texts or numbers. Single numbers,
    texts and tensors without a dimension belong to the whole batch, and are returned unchanged.

    Args:
        f: the function.
        part: the batch, or a part of it.
        dims: the dimension of its samples.
        others: applied to parts whose samples cannot be located: other objects, sparse tensors, and tensors without the
            dimension.
        place: the place of the part in the batch.
    """
    if dims is None or isinstance(part, _PLAIN):
        return part
    if isinstance(part, Tensor) or (hasattr(part, "__array_interface__") and hasattr(part, "ndim")):
        if not part.ndim:
            return part
        strided = getattr(part, "layout", torch.strided) is torch.strided
        return f(part, dims, place) if strided and isinstance(dims, int) and dims < part.ndim else others(part)
    if isinstance(part, PackedSequence):
        return others(part)
    if isinstance(part, tuple | list) and part and place and all(isinstance(x, _PLAIN) for x in part):
        return f(part, 0, place)
    if is_nested(part):
        mapped = {key: map_rows(f, x, _dims_at(dims, key), others, (*place, key)) for key, x in entries(part)}
        return with_entries(part, mapped)
    return others(part)


def _dims_at(dims: Dims, key: Any) -> Dims:
    if isinstance(dims, Mapping):
        return dims.get(key, 0)
    if isinstance(dims, Sequence):
        return dims[key] if isinstance(key, int) and key < len(dims) else 0
    return dims


def row_counts(batch: Any, dims: Dims, others: Callable[[Any], Any] | None = None) -> dict[tuple, int]:
    """Return the number of samples of each part of a batch, by its place; `others`: as in `map_rows`."""
    counts: dict[tuple, int] = {}

    def note(rows: Any, dim: int, place: tuple) -> None:
        counts[place] = rows.shape[dim] if hasattr(rows, "shape") else len(rows)

    map_rows(note, batch, dims, others or itself)
    return counts


def cut_rows(batch: Any, dims: Dims, start: int, stop: int) -> Any:
    """Return the samples from `start` to `stop` of a batch; tensors are views."""

    def piece(rows: Any, dim: int, place: tuple) -> Any:
        return rows[start:stop] if not dim else rows[(slice(None),) * dim + (slice(start, stop),)]

    return map_rows(piece, batch, dims, itself)


def no_rows(batch: Any, dims: Dims) -> Any:
    """Return a batch without samples, or the whole batch if a part of it cannot be cut, as all parts must agree."""
    whole: list = []
    row_counts(batch, dims, whole.append)
    return batch if whole else cut_rows(batch, dims, 0, 0)


def rows_first(part: Any, dims: Dims) -> Any:
    """Return part of a batch with the dimension of the samples in the first place."""
    return map_rows(lambda rows, dim, place: rows.movedim(dim, 0) if dim else rows, part, dims, itself)


def join_rows(pieces: Sequence[Any], dim: int) -> Any:
    """Join nested tensors of one structure along a dimension; parts without it are taken from the first."""
    columns = zip(*(rows_in(piece, dim) for piece in pieces), strict=True)
    return map_rows(lambda *_: torch.cat(next(columns), dim), pieces[0], dim, itself)


def rows_in(part: Any, dims: Dims) -> list[Any]:
    """Return the parts of a nested batch that have an entry for each sample, in order."""
    parts: list = []
    map_rows(lambda rows, *_: parts.append(rows), part, dims, itself)
    return parts


class Share(NamedTuple):
    """The share of a rank in the batches of a step.

    Attributes:
        place: the place of its batch in the order of all ranks' batches; 0 until it is known.
        size: the number of its samples that count; 0 for a rank that only takes part in the others' collectives; `None`
            where only the data tell.
        total: the number of samples of all ranks in this step; `None` where only the data tell.
        batch: its samples, joined or still to be joined, if they come with these numbers; `None`: there are none, or
            they come separately.
    """

    place: int
    size: int | None
    total: int | None
    batch: Any = None


def cut_share(
    batch: Any, rank: int, ranks: int, dims: Dims, least: int, name: str,
    count: BatchCount | None = None,
) -> Share:  # fmt: skip
    """Cut a rank's share out of a ready-made batch; a rank without samples gets a piece to be emptied.

    Args:
        batch: the batch of all ranks.
        rank, ranks: the rank, and the number of ranks.
        dims: the dimension of the samples.
        least: as in `even_spans`.
        name: the loader's name in errors.
        count: returns the number of samples of a batch, as `DataLoaders.count`; by default its rows are counted.

    Raises:
        ValueError: the parts of the batch have different numbers of samples, or unknown ones.
    """

    def refuse(part: Any) -> None:
        raise ValueError(
            f"a batch of {name} cannot be cut: it is not known where the samples of {describe(part)} are with "
            f"batch_dim={dims!r}; {_ADVICE}"
        )

    counts = row_counts(batch, dims, refuse)
    if len(set(counts.values())) != 1:
        lengths = ", ".join(f"{'.'.join(map(str, place)) or 'it'}: {n}" for place, n in counts.items())
        raise ValueError(
            f"a batch of {name} cannot be cut for {ranks} ranks, as its parts have different lengths along the "
            f"dimension of the samples, or none ({lengths or describe(batch)}); {_ADVICE}"
        )
    rows = next(iter(counts.values()))
    start, stop = even_spans(rows, ranks, least)[rank]
    total = None if count is None else count(batch)
    piece = cut_rows(batch, dims, start, stop) if start < stop else cut_rows(batch, dims, 0, least)
    return Share(0, stop - start, rows if total is None else total, piece)
