"""The columns of a frame, and the split of a dataset's rows into training and validation."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from learnerkit.text import did_you_mean, first_few
from learnerkit.values import describe


def check_columns(frame: Any, names: Iterable[Any]) -> None:
    """Refuse names that are not those of columns of a frame.

    Raises:
        TypeError: a list in place of a name.
        ValueError: a column that is not there.
    """
    for name in names:
        if isinstance(name, list):
            raise TypeError(f"got {name!r} as a column; it is the name of one column")
        if name not in frame.columns:
            near = did_you_mean(name, map(str, frame.columns))
            raise ValueError(f"there is no column {name!r}; the frame has {first_few(frame.columns, n=20)}{near}")


def sizes_of(data: Any, unit: str) -> list[str]:
    """Describe how many samples there are to train and to validate on, such as '80 rows to train on'."""
    parts = ((data.train_ds, "train on"), (data.valid_ds, "validate on"))
    return [f"{len(ds):,} {unit} to {what}" for ds, what in parts if ds is not None]


def _array(valid: Any) -> np.ndarray:
    """Return an array, of truth values if these are objects, as in a frame that was joined with another."""
    rows = np.asarray(valid)
    return np.array(rows.tolist()) if rows.dtype == object and {*map(type, rows.flat)} == {bool} else rows


def _told(valid: Any) -> str:
    """Return a text of one line for messages: of a Series or an array, its shape and type."""
    return describe(np.asarray(valid)) if hasattr(valid, "dtype") else repr(valid)


def held_out(valid: Any, groups: Any, seed: int) -> np.ndarray:
    """Return a mask of the rows to validate on.

    Args:
        valid: a share between 0 and 1, drawn at random from each group separately; a mask; a list of row indices; or
            `None` for no rows.
        groups: the group of each row, such as its class; at least one row of a group is left to train on.
        seed: the seed of the draw.

    Raises:
        ValueError: another `valid`, or one that leaves no row to train on or to validate on.
    """
    groups = np.asarray(groups)
    n = len(groups)
    mask, rows = np.zeros(n, bool), _array([] if valid is None else valid)
    is_mask = rows.dtype == bool and rows.shape == (n,)
    are_places = rows.dtype.kind in "iu" and rows.ndim == 1 and len(rows) and -1 < min(rows) <= max(rows) < n
    are_places = are_places and len({*rows.tolist()}) == len(rows)  # a mask of 0 and 1 would name two rows alone
    if isinstance(valid, float) and 0 < valid < 1:
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).numpy()
        numbers = np.unique(groups, return_inverse=True)[1]
        together = order[numbers[order].argsort(kind="stable")]  # a search for each group's rows would be quadratic
        for rows in np.split(together, np.bincount(numbers).cumsum()[:-1]):
            mask[rows[: min(round(len(rows) * valid), len(rows) - 1)]] = True
    elif is_mask:
        mask = rows
    elif are_places:
        mask[rows] = True
    elif valid is not None:
        raise ValueError(
            f"got valid={_told(valid)}; it is a share between 0 and 1, a mask of the {n:,} rows, a list of row numbers "
            "from 0 to the last, each once, or None (a mask is of True and False: astype(bool) makes it of 0 and 1)"
        )
    if mask.all() or (valid is not None and not mask.any()):
        several = isinstance(valid, float) and len(np.unique(groups)) > 1
        raise ValueError(
            f"valid={_told(valid)} leaves {n - mask.sum()} rows to train on and {mask.sum()} to validate on"
            + f"; it is a share of each of the {len(np.unique(groups)):,} classes" * several
        )
    return mask
