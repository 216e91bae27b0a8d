"""The columns of a table: statistics of each, and the conversion of its values to numbers and back."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timezone, tzinfo
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import numpy as np

from learnerkit.text import first_few

if TYPE_CHECKING:
    from pandas import Series

FEW = 20
"""A column of whole numbers with at most so many different ones holds categories."""

_TRUTH = {"true": True, "false": False}
_NUMERIC = int | float | Decimal | np.number | np.bool_
_KINDS = {bool: "numbers", int: "numbers", float: "numbers", str: "text"}


@dataclass(frozen=True)
class Categories:
    """A column of categories. Category i has the number i + 1: 0 is for a missing value, and for one not among them.

    Args:
        name: the column's.
        values: the categories: text, numbers, truth values or timestamps.
    """

    name: Any
    values: tuple

    @classmethod
    def of(cls, column: "Series") -> "Categories":
        """Find the categories of a column: its values, sorted, or in the order of a categorical column."""
        _, values = distinct(column)
        if column.dtype == "category":
            there = set(values)
            return cls(column.name, tuple(value for value in column.cat.categories.tolist() if value in there))
        return cls(column.name, tuple(sorted(values, key=lambda value: (_kind(value), value))))

    def encode(self, column: "Series") -> np.ndarray:
        """Return the number of each value, int64.

        If the column held only numbers in training, numbers that are written as text are read; in the same way True and
        False, in any case.

        Raises:
            ValueError: none of the values is of a kind (text, numbers, timestamps with or without a time zone) that was
                there in training.
        """
        before = {_kind(value) for value in self.values}
        is_truth = {*map(type, self.values)} == {bool}
        if is_truth:
            column = column.map(lambda value: _TRUTH.get(str(value).strip().lower(), value))
        codes, values = distinct(with_numbers(column) if before == {"numbers"} else column)
        now = {_kind(value) for value in values}
        if before and now and before.isdisjoint(now):
            held = "truth values" if is_truth else " and ".join(before)
            raise ValueError(
                f"column {self.name!r} held {held} in training, such as {self.values[0]!r}, and now "
                f"{' and '.join(now)}, such as {values[0]!r}; give it the type that it had"
            )
        numbers = {value: i for i, value in enumerate(self.values, 1)}
        with np.errstate(over="ignore"):
            for value, i in list(numbers.items()):
                if type(value) is float and (single := np.float32(value)) == value:
                    numbers.setdefault(float(str(single)), i)  # 0.1 in single precision is 0.10000000149011612
        return np.array([*(numbers.get(value, 0) for value in values), 0], np.int64)[codes]  # a missing one has code -1

    def decode(self, number: int) -> Any:
        """Return the value of a number; `None` for 0."""
        return self.values[number - 1] if number else None

    def as_json(self) -> dict[str, Any]:
        """Return the column as plain values for JSON, which `from_json` reads."""
        return {"name": self.name, "values": [_value_as_json(value) for value in self.values]}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "Categories":
        """Read what `as_json` has returned."""
        return cls(facts["name"], tuple(_value_from_json(value) for value in facts["values"]))


@dataclass(frozen=True)
class Numbers:
    """A column of numbers, which are standardised: (x - mean) / std. A missing one, or an infinite one, is the median.

    Args:
        name: the column's.
        median, mean, std: of the training part; `std` is 1 if all of its values are equal.
        flagged: some were missing there, so that the network gets a further number, which is 1 where one is missing.
        whole: they are whole numbers.
        from_text: they were read from text, of which what is no number is missing.
    """

    name: Any
    median: float
    mean: float
    std: float
    flagged: bool
    whole: bool
    from_text: bool = False

    @classmethod
    def of(cls, column: "Series") -> "Numbers":
        """Find the statistics of a column; of text those of the numbers in it, if there is one.

        Raises:
            ValueError: values that are no numbers, or no number at all.
        """
        from_text = holds_text(column) and bool(np.isfinite(read_numbers(column)).any())
        values = read_numbers(column) if from_text else numbers_in(column)
        there = values[np.isfinite(values)]
        if not len(there):
            raise ValueError(f"column {column.name!r} has no number in the training part; leave it out")
        equal = there.min() == there.max()
        mean, std = (there[0], 1.0) if equal else (there.mean(), there.std())
        if not 0 < std < math.inf:  # the squares of very small or large numbers are 0 or infinite
            most = np.abs(there - mean).max()
            std = ((there - mean) / most).std() * most
        flagged, whole = len(there) < len(values), bool((there == np.round(there)).all())
        return cls(column.name, float(np.median(there)), float(mean), float(std), flagged, whole, from_text)

    def encode(self, column: "Series") -> tuple[np.ndarray, np.ndarray]:
        """Return the standardised numbers, float64, and which were missing; those written as text are read."""
        values = read_numbers(column) if self.from_text and holds_text(column) else numbers_in(with_numbers(column))
        missing = ~np.isfinite(values)
        return (np.where(missing, self.median, values) - self.mean) / self.std, missing

    def check(self, column: "Series") -> None:
        """Refuse text that has a digit and is no number, where text without one, such as 'n/a', is missing.

        Raises:
            ValueError: such text, as '1,234.50' is.
        """
        if not self.from_text or not holds_text(column):
            return
        unread = column[np.isnan(read_numbers(column))]
        if wrong := [x for x in unread.tolist() if isinstance(x, str) and re.search(r"\d", x)]:
            raise ValueError(
                f"column {self.name!r} is one of numbers, and has {first_few(map(repr, wrong), n=3)}; write a number "
                "as 1234.5 (in files: pandas.read_csv(..., thousands=',')), and None for a missing one"
            )

    def decode(self, number: float) -> float | int:
        """Return the value of a standardised number, to six digits."""
        value = number * self.std + self.mean
        return round(value) if self.whole and math.isfinite(value) else float(f"{value:.6g}")


def distinct(column: "Series") -> tuple[np.ndarray, list]:
    """Return the place of each value in a list of the different ones, -1 for a missing one, and that list.

    Raises:
        ValueError: a value that cannot be a category.
    """
    import pandas as pd

    try:
        codes, uniques = pd.factorize(column)
        values = [value.item() if isinstance(value, np.generic) else value for value in uniques.tolist()]
    except (TypeError, NotImplementedError):  # values that cannot be compared, such as lists; the latter is of Arrow
        codes, values = np.zeros(0), column.dropna().tolist()
    for value in values:
        if type(value) not in (*_KINDS, pd.Timestamp):
            raise ValueError(
                f"column {column.name!r} has values of type {type(value).__name__}; categories are text, numbers, "
                "truth values or timestamps. Turn them into text by astype(str), or leave the column out"
            )
    return codes, values


_NUMBER = re.compile(r"[+-]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][+-]?\d+)?")  # 0123 is none, but a code


def holds_text(column: "Series") -> bool:
    """Tell whether there is text among the values."""
    from pandas.api.types import is_object_dtype, is_string_dtype

    if is_object_dtype(column.dtype):
        return any(isinstance(value, str) for value in column)
    return is_string_dtype(column.dtype)


def read_numbers(column: "Series") -> np.ndarray:
    """Return the numbers of a column with text as float64, with NaN for what is none."""

    def number(value: Any) -> float:
        if isinstance(value, str):
            return float(value) if _NUMBER.fullmatch(value.strip()) else math.nan
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan

    codes, values = distinct(column)
    return np.array([*map(number, values), math.nan])[codes]  # a missing one has code -1


def with_numbers(column: "Series") -> "Series":
    """Convert text to a number where Python's `float` can, and empty text to `None`."""
    import pandas as pd

    def number(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            read = float(value) if value.strip() else None
        except ValueError:
            return value
        # A float has 53 bits.
        is_large = read is not None and 2**53 <= abs(read) < math.inf
        return int(value) if is_large and re.fullmatch(r"\s*[+-]?\d+\s*", value) else read

    return pd.Series(map(number, column), column.index, object, column.name) if holds_text(column) else column


def numbers_in(column: "Series") -> np.ndarray:
    """Return the values of a column as float64, with NaN for those that are missing.

    Raises:
        ValueError: values that are no numbers.
    """
    from pandas.api.types import is_any_real_numeric_dtype

    if not is_any_real_numeric_dtype(column.dtype):
        if others := [x for x in column.dropna().tolist() if not isinstance(x, _NUMERIC)]:
            raise ValueError(
                f"column {column.name!r} is one of numbers, and has {first_few(map(repr, others), n=3)} of type "
                f"{type(others[0]).__name__}; turn it into numbers (pandas.to_numeric), or make it one of categories"
            )
        column = column.astype(object).where(column.notna(), np.nan)
    return column.to_numpy(np.float64, na_value=np.nan)


def _kind(value: Any) -> str:
    times = "timestamps" if getattr(value, "tz", None) is None else "timestamps with a time zone"
    return _KINDS.get(type(value), times)


def _value_as_json(value: Any) -> Any:
    if type(value) in _KINDS:
        return value
    return {"time": value.isoformat(), "zone": zone_name(value.tz)}


def zone_name(zone: tzinfo | None) -> str | None:
    """Return a name by which pandas finds a time zone again.

    Raises:
        ValueError: a zone without one.
    """
    if zone is None:
        return None
    offset = zone.utcoffset(None)  # `None` unless it is the same all year
    name = str(zone if offset is None else timezone(offset))
    if offset is None and name != "tzlocal()":  # which pandas finds
        try:
            ZoneInfo(name)  # cached
        except (KeyError, ValueError, OSError) as e:
            raise ValueError(
                f"got times of the zone {name}, which has no name that pandas finds: give them one by "
                "df[column].dt.tz_convert('Europe/Berlin')"
            ) from e
    return name


def _value_from_json(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    import pandas as pd

    time = pd.Timestamp(value["time"])
    return time if value["zone"] is None else time.tz_convert(value["zone"])
