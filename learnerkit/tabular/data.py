"""Tables as tensors: which columns are used and how, learned from the training part of a frame."""

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fastcore.basics import groupby
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import distributed
from learnerkit.data.loaders import ONLY_INPUTS, DataLoaders
from learnerkit.data.parts import check_columns, held_out, sizes_of
from learnerkit.export.reading import NoData
from learnerkit.tabular import dates as date_parts
from learnerkit.tabular.choice import Seen, look, no_numbers
from learnerkit.tabular.columns import Categories, Numbers, distinct, holds_text, numbers_in
from learnerkit.tabular.dates import Dates
from learnerkit.text import first_few
from learnerkit.utils import listify

if TYPE_CHECKING:
    from pandas import DataFrame, Series

Rows = Any
"""A frame; or one row as a mapping or a Series, or a list of those."""


class TabularData:
    """The conversion of a table's columns to tensors, and the tensors of its training and validation part.

    Categories become numbers from 1 on, where 0 is for a missing value and for one that was not in training. Numbers
    are standardised; a missing one becomes the median, and a column of which some were missing in training gets a
    further column of 0 and 1 that says where. All of it is learned from the training part alone. `from_df` makes one.

    Args:
        cats: the columns of categories.
        conts: the columns of numbers.
        target: the column to be predicted: classes, or numbers.
        train_ds, valid_ds: of (cats, conts, target); see `encode`. The target is a class, int64 of shape (n,), or a
            number as it is in the frame, float32 of shape (n, 1).
        dates: the columns of dates, whose parts are among `cats` and `conts`.

    Attributes:
        classes: the classes of the target by their numbers; `None` if the target is a number.
    """

    def __init__(
        self,
        cats: Sequence[Categories],
        conts: Sequence[Numbers],
        target: Categories | Numbers,
        train_ds: TensorDataset | None = None,
        valid_ds: TensorDataset | None = None,
        dates: Sequence[Dates] = (),
    ) -> None:
        self.dates = tuple(dates)
        self.cats = tuple(cats)
        self.conts = tuple(conts)
        self.target = target
        self.train_ds, self.valid_ds = train_ds, valid_ds
        self.classes = list(target.values) if isinstance(target, Categories) else None
        self._flagged = [column for column in self.conts if column.flagged]

    @classmethod
    def from_df(
        cls,
        df: "DataFrame",
        y: Any,
        cats: Iterable[Any] | None = None,
        conts: Iterable[Any] | None = None,
        valid: Any = 0.2,
        *,
        dates: Iterable[Any] = (),
        seed: int = 42,
    ) -> "TabularData":
        """Learn from a frame how to read it, and make tensors of it.

        Columns that are named nowhere are used by their values, which is printed, if `cats` or `conts` is `None`: text,
        truth values and whole numbers of at most 20 different values as categories, other numbers as numbers. Text that
        is a number in nine of ten rows is read as numbers, too. Left out are dates, columns of one value, and text of
        which more than half is different, such as names. What somebody should look at is printed: text that is no
        number, ids, and categories in several spellings.

        Args:
            df: the frame; its index does not matter.
            y: the column to predict. Text, truth values, a categorical column and whole numbers of at most 20 different
                values are classes; floats are numbers. `astype` makes it the other.
            cats: the columns of categories.
            conts: the columns of numbers; of text, what is no number counts as missing.
            valid: what is validated on: a share of the rows, drawn at random, of each class as many; a mask; a list of
                row numbers; another frame; or `None` for nothing.
            dates: columns of timestamps, or of dates as text. Each becomes its parts, as categories (month, day of the
                week, and whether a month, quarter or year begins or ends) and numbers (year, week, day, day of the
                year, hour, and the days since 1970), without those that are the same in all rows.
            seed: of the draw.

        Raises:
            ValueError: columns that are not there or cannot be used, a target with missing values, or with a class that
                is in the validation part alone.
        """
        frame = _as_frame(df).reset_index(drop=True)  # Rows are then named by their numbers.
        frame.columns = frame.columns.astype(object)  # Names that are numbers are then int, which JSON knows.
        cats, conts = (names if names is None else listify(names) for names in (cats, conts))
        named = [*(cats or ()), *(conts or ()), *(dates := listify(dates))]
        _check_columns(frame, [y, *named])
        target = frame[y]
        kind = _kind_of_target(target, y)
        if hasattr(valid, "columns"):
            train, rest = frame, _as_frame(valid)
        else:
            mask = held_out(valid, distinct(target)[0] if kind is Categories else target.notna(), seed)
            train, rest = frame[~mask], frame[mask]
        decides = cats is None or conts is None
        roles = {name: look(train[name], frame[name]) for name in frame if name not in (y, *named)} if decides else {}
        told = {name: no_numbers(frame[name]) for name in conts or () if holds_text(frame[name])}
        if cats is None:
            cats = [name for name, seen in roles.items() if seen.role in ("cats", "few")]
        if conts is None:
            conts = [name for name, seen in roles.items() if seen.role in ("conts", "few") and name not in cats]
        learned = kind.of(train[y])
        if isinstance(learned, Categories) and len(learned.values) < 2:
            raise ValueError(
                f"all rows to train on have {y!r} = {learned.decode(len(learned.values))!r}; there is nothing to learn"
            )
        dated = [Dates.of(train[name]) for name in dates]
        more_cats, more_conts = _parts_that_differ(dated, train)
        data = cls(
            [*(Categories.of(train[name]) for name in cats), *more_cats],
            [*(Numbers.of(train[name]) for name in conts), *more_conts],
            learned,
            dates=dated,
        )
        left = {name: seen for name, seen in roles.items() if name not in (*cats, *conts)}
        if not (data.cats or data.conts):
            why = f"; left out: {'; '.join(_reasons(left))}" if left else ""
            raise ValueError(f"there is no column to predict {y!r} from: name some by cats= and conts={why}")
        data.train_ds, data.valid_ds = data._dataset(train), data._dataset(rest) if len(rest) else None
        told |= {name: seen.told for name, seen in roles.items() if name not in left}
        if distributed.is_main():
            if decides:
                print(data)
                print(_said("left out", _reasons(left), "; "))
            for line in _to_look_at(told):
                print(line)
        return data

    def __repr__(self) -> str:
        categories = (f"{column.name} ({len(column.values)})" for column in self.cats)
        numbers = (str(column.name) for column in self.conts)
        target = "a number" if self.classes is None else first_few(self.classes)
        return "\n".join([
            ", ".join([type(self).__name__, *sizes_of(self, "rows")]),
            _said("categories", categories), _said("numbers", numbers),
            *([_said("dates", (str(column.name) for column in self.dates))] if self.dates else []),
            _said("target", [f"{self.target.name}: {target}"]),
        ])  # fmt: skip

    @property
    def n_numbers(self) -> int:
        """The length of a row of numbers, with the marks of missing ones."""
        return len(self.conts) + len(self._flagged)

    # Rows and tensors

    def encode(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Turn rows, with or without the target, into the tensors for the network.

        Args:
            rows: a frame; or one row as a mapping or a Series, or a list of those. Further columns do not matter.

        Returns:
            The numbers of the categories, int64 of shape (n, columns of categories); and the standardised numbers with
            the marks of missing ones behind them, float32 of shape (n, columns of numbers + columns with marks).

        Raises:
            ValueError: a column that is missing, or has values of another kind than in training.
        """
        frame = _as_frame(rows)
        for column in self.conts:
            if column.name in frame:
                column.check(frame[column.name])
        return self._encoded(frame)

    def _encoded(self, frame: "DataFrame") -> tuple[Tensor, Tensor]:
        columns = list[Any]([*self.cats, *self.conts])
        _check_columns(frame, [column.name for column in self.dates])
        parts = {k: v for column in self.dates for k, v in column.parts(frame[column.name]).items()}
        _check_columns(frame, [column.name for column in columns if column.name not in parts])
        frame = frame.assign(**parts)
        cats = [column.encode(frame[column.name]) for column in self.cats]
        numbers = {column.name: column.encode(frame[column.name]) for column in self.conts}
        conts = [z for z, _ in numbers.values()] + [numbers[column.name][1] for column in self._flagged]
        return _stack(cats, len(frame), np.int64), _stack(conts, len(frame), np.float32)

    def decode(self, cats: Tensor, conts: Tensor) -> dict[str, Any]:
        """Turn the tensors of one row into values by column: `None` for what was missing, or not in training."""
        numbers, marks = conts[: len(self.conts)].tolist(), conts[len(self.conts) :].tolist()
        missing = {column.name for column, mark in zip(self._flagged, marks, strict=True) if mark}
        categories = {column.name: column.decode(i) for column, i in zip(self.cats, cats.tolist(), strict=True)}
        return categories | {
            column.name: None if column.name in missing else column.decode(z)
            for column, z in zip(self.conts, numbers, strict=True)
        }

    def _shown(self, cats: Tensor, conts: Tensor) -> dict[str, str]:
        return {str(name): "" if value is None else str(value) for name, value in self.decode(cats, conts).items()}

    def _dataset(self, frame: "DataFrame") -> TensorDataset:
        _check_columns(frame, [self.target.name])
        column = frame[self.target.name]
        if missing := int(column.isna().sum()):
            raise ValueError(f"{missing} values of {self.target.name!r} are missing; leave these rows out (df.dropna)")
        if isinstance(self.target, Numbers):
            with np.errstate(over="ignore"):
                values = numbers_in(column).astype(np.float32)
            if not np.isfinite(values).all():
                raise ValueError(
                    f"some values of {self.target.name!r} are infinite, or above the 3.4e38 of float32; leave these "
                    "rows out, or divide the column"
                )
            return TensorDataset(*self._encoded(frame), torch.from_numpy(values[:, None]))
        classes = self.target.encode(column) - 1
        if (classes < 0).any():
            unknown = first_few(map(repr, column[classes < 0].unique().tolist()))
            raise ValueError(
                f"no row of the training part has {self.target.name!r} = {unknown}, so none to validate on may; choose "
                "another valid="
            )
        return TensorDataset(*self._encoded(frame), torch.from_numpy(classes))

    def dataloaders(self, bs: int = 64, **kwargs: Any) -> "TabularDataLoaders":
        """Make loaders of the training and validation part, which read whole batches at once.

        What comes from `from_json` has no rows; its loaders have no batches, and predict for new rows.

        Args:
            bs: rows in a training batch.
            kwargs: those of `DataLoaders.from_datasets`; without rows, of `DataLoaders`.
        """
        kwargs = {"n_inp": 2, "classes": self.classes, "decode": self._shown} | kwargs
        dls: Any = (
            TabularDataLoaders(NoData(), NoData(), **kwargs)
            if self.train_ds is None
            else TabularDataLoaders.from_datasets(self.train_ds, self.valid_ds, bs=bs, **kwargs)
        )
        dls.data, dls.preprocessing = self, json.loads(self.to_json())
        return dls

    # Files

    def to_json(self) -> str:
        """Return all but the rows as JSON, which `from_json` reads; it has every category and every bit of a number."""
        y = self.target
        facts = {
            "cats": [column.as_json() for column in self.cats],
            "conts": [*map(asdict, self.conts)],
            "target": {"numbers": asdict(y)} if isinstance(y, Numbers) else {"classes": y.as_json()},
            "dates": [*map(asdict, self.dates)],
        }
        return json.dumps(facts, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "TabularData":
        """Read what `to_json` wrote: the same data without the rows."""
        facts = json.loads(text)
        cats, conts = map(Categories.from_json, facts["cats"]), [Numbers(**each) for each in facts["conts"]]
        ((kind, y),) = facts["target"].items()
        target = Categories.from_json(y) if kind == "classes" else Numbers(**y)
        return cls(list(cats), conts, target, dates=[Dates(**each) for each in facts.get("dates", ())])


class TabularDataLoaders(DataLoaders):
    """Loaders of a table, with its `data`; `test_dl` and `learn.predict` take rows."""

    data: TabularData
    inputs = {"cats": (), "conts": ()}

    def test_dl(self, items: Rows, bs: int | None = None, **loader_kwargs: Any) -> DataLoader[Any]:
        """A loader of rows as `TabularData.encode` takes them; a target among their columns is not read.

        Args:
            items: a frame, a row, or a list of rows.
            bs, loader_kwargs: as in `DataLoaders.test_dl`.
        """
        return super().test_dl(TensorDataset(*self.data.encode(items)), bs, **loader_kwargs)

    def input_batch(self, *items: Any) -> tuple[Any, Any]:
        """Return a batch of some rows, as `test_dl` gives it, and what stands for its loader."""

        def kinds(i: int) -> tuple | None:
            row = items[i]
            return tuple((name, type(value)) for name, value in row.items()) if hasattr(row, "items") else None

        # A frame of other rows could hide that one has no such column, or other types.
        alike = groupby(range(len(items)), kinds).values()
        parts = [self.data.encode([items[i] for i in rows]) for rows in alike]
        order = torch.tensor([i for rows in alike for i in rows]).argsort()
        return tuple(torch.cat(tensors)[order] for tensors in zip(*parts, strict=True)), ONLY_INPUTS


def _parts_that_differ(dates: Sequence[Dates], train: "DataFrame") -> tuple[list[Categories], list[Numbers]]:
    """Return the parts of dates that are not the same in all rows to train on."""
    cats, conts = [], []
    for column in dates:
        for name, values in column.parts(train[column.name]).items():
            if name in train:
                raise ValueError(f"column {name!r} has the name of a part of {column.name!r}; give it another one")
            part = str(name).removeprefix(f"{column.name}_")
            if values.nunique() < 2:
                continue
            if part in date_parts.CATEGORIES:
                cats.append(Categories.of(values))
            else:  # one mark of a missing date is enough
                numbers = Numbers.of(values)
                conts.append(replace(numbers, flagged=numbers.flagged and part == "elapsed"))
    return cats, conts


def _kind_of_target(column: "Series", name: Any) -> type[Categories | Numbers]:
    """Tell of which kind the column to be predicted is; refuse dates, and numbers as text."""
    if column.dtype.kind in "mM":
        raise ValueError(
            f"column {name!r}, which is to be predicted, holds dates or durations; make it one of numbers, such as "
            "days, or of classes by astype('category')"
        )
    holds_numbers = look(column, column).role == "conts"
    if holds_numbers and holds_text(column):
        raise ValueError(
            f"column {name!r}, which is to be predicted, holds numbers as text "
            f"({no_numbers(column) or 'all of it'}); make it one of numbers (pandas.to_numeric), or of classes "
            "by astype('category')"
        )
    return Numbers if holds_numbers or column.dtype.kind in "fc" else Categories


def _said(what: str, names: Iterable[str], joint: str = ", ") -> str:
    text = first_few(names, joint, n=40) or "none"
    return textwrap.fill(text, 100, initial_indent=f"  {what:<12}", subsequent_indent=" " * 14)


def _reasons(left: Mapping[Any, Seen]) -> list[str]:
    """Describe the columns that are left out, grouped by the reason."""
    columns = groupby(left, lambda name: left[name].why or "not named")
    return [f"{first_few(names, n=20)} ({why})" for why, names in columns.items()]


def _to_look_at(told: Mapping[Any, str]) -> list[str]:
    lines = [_said("look at", [f"{name}: {text}"]) for name, text in told.items() if text]
    return lines[:10] + ([_said("look at", [f"{len(lines) - 10} more columns"])] if len(lines) > 10 else [])


def _stack(columns: list[np.ndarray], n: int, dtype: Any) -> Tensor:
    stacked = np.empty((n, len(columns)), dtype)
    for i, column in enumerate(columns):
        stacked[:, i] = column
    return torch.from_numpy(stacked)


def _as_frame(rows: Rows) -> "DataFrame":
    import pandas as pd

    if isinstance(rows, str | Path):
        raise TypeError(f"got {str(rows)!r}; read the file first: pandas.read_csv({str(rows)!r})")
    if hasattr(rows, "to_pandas"):
        library = type(rows).__module__.partition(".")[0]
        raise TypeError(f"got a {type(rows).__name__} of {library}; pass a frame of pandas: frame.to_pandas()")
    if isinstance(rows, pd.DataFrame):
        names = zip(rows.columns.tolist(), rows.columns.duplicated(keep=False), strict=True)
        if wrong := [name for name, is_double in names if is_double or not isinstance(name, str | int)]:
            raise ValueError(
                f"the frame has columns {first_few(map(repr, wrong))}; each needs a name of its own, text or a number"
            )
        return _of_types(rows)
    rows = [rows] if isinstance(rows, Mapping | pd.Series) else list(rows)
    if not rows:
        raise ValueError("got no rows; pass at least one")
    if others := [row for row in rows if not isinstance(row, Mapping | pd.Series)]:
        raise TypeError(
            f"got a {type(others[0]).__name__} for a row; a row is a mapping by column, or a Series "
            "such as frame.iloc[0]"
        )
    frame = _of_types(pd.DataFrame([dict(row) for row in rows]))
    for name in frame.columns[frame.dtypes == np.float64]:
        # pandas makes floats, which have 53 bits, of whole numbers with a gap.
        if 2**53 <= frame[name].abs().max() < 2**63:
            values = [None if pd.isna(value := row.get(name)) else value for row in rows]
            if all(isinstance(value, Integral | None) for value in values):
                frame[name] = pd.array(values, "Int64")
    return frame


def _of_types(frame: "DataFrame") -> "DataFrame":
    """Return a frame whose columns of objects have the type of their values; decimals, as of a database, are floats."""
    import pandas as pd
    from pandas.api.types import infer_dtype, is_object_dtype

    frame = frame.infer_objects()
    for name, dtype in frame.dtypes.items():
        is_arrows = str(dtype).startswith("decimal")
        if is_arrows or (is_object_dtype(dtype) and infer_dtype(frame[name]) == "decimal"):
            frame[name] = pd.to_numeric(frame[name].astype(object))
    return frame


def _check_columns(frame: "DataFrame", names: list) -> None:
    """Refuse a frame without these columns, and a name that is there twice."""
    check_columns(frame, names)
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"column {name!r} is named twice; it is the target, or of categories, of numbers or of dates"
            )
