"""Columns of dates, and their parts."""

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from learnerkit.tabular.columns import zone_name
from learnerkit.text import first_few

if TYPE_CHECKING:
    from pandas import DataFrame, Series

CATEGORIES = (
    "month", "day_of_week", "is_month_start", "is_month_end", "is_quarter_start", "is_quarter_end", "is_year_start",
    "is_year_end",
)  # fmt: skip
"""The parts of a date that are categories."""
NUMBERS = ("year", "week", "day", "day_of_year", "hour", "elapsed")
"""The parts of a date that are numbers; `elapsed` is in days."""
NEARLY_ALL = 0.9
"""The least share of a column's values that must be numbers, or dates, for the column to be of that kind."""

_ISO = "ISO8601"
_DAYS = (
    "%Y/%m/%d", "%Y.%m.%d", "%d %b %Y", "%d-%b-%Y", "%b %d, %Y", "%d %B %Y", "%B %d, %Y",
    *(f"{day}{mark}{year}" for mark in "./-" for year in ("%Y", "%y") for day in (f"%d{mark}%m", f"%m{mark}%d")),
)  # fmt: skip
_WAYS = (_ISO, *(day + time for day in _DAYS for time in ("", " %H:%M", " %H:%M:%S")))
_OFFSET = r"(?:Z|[+-]\d\d:?\d\d)$"  # the end of a time with a zone


@dataclass(frozen=True)
class Dates:
    """A column of dates, of which a network gets the parts.

    Args:
        name: the column's.
        written: how they are written as text, 'ISO8601' or as `strptime` has it.
        zone: the time zone in which their parts are taken, if they have one.
    """

    name: Any
    written: str = _ISO
    zone: str | None = None

    @classmethod
    def of(cls, column: "Series") -> "Dates":
        """Find out how dates are written.

        Raises:
            ValueError: values that are no dates, or that may be read in two ways.
        """
        column = _with_times(column)
        if column.dtype.kind == "M":
            return cls(column.name, zone=zone_name(column.dt.tz))
        texts = texts_in(column)
        ways = ways_to_read(texts)
        read = {way: _read(texts, way) for way in ways}
        if other := next((way for way in ways if not read[way].equals(read[ways[0]])), None):
            raise ValueError(
                f"column {column.name!r} has dates such as {str(texts.iloc[0])[:40]!r}, which may be {ways[0]} or "
                f"{other}; make timestamps of it: pandas.to_datetime(df[{column.name!r}], format={ways[0]!r})"
            )
        return cls(column.name, ways[0], zone_name(read[ways[0]].dt.tz)) if ways else cls(column.name)

    def parts(self, column: "Series") -> "DataFrame":
        """Return a column for each part, such as 'signup_month', with a gap where the date is missing.

        Raises:
            ValueError: values that are no dates.
        """
        import pandas as pd

        index, column = column.index, _with_times(column).reset_index(drop=True)  # it may have names twice
        times = column
        if column.dtype.kind != "M":
            texts = texts_in(column)
            read = _read(texts, self.written, several_zones=self.zone is not None)
            if len(wrong := texts[read.isna()]):
                raise ValueError(
                    f"column {self.name!r} is one of dates ({self.written}), and has "
                    f"{first_few((repr(x)[:40] for x in wrong.unique().tolist()), n=3)}; make timestamps of it: "
                    f"pandas.to_datetime(df[{self.name!r}], errors='coerce', format=...), with utc=True for several "
                    "time zones"
                )
            times = read.reindex(column.index)
        if self.zone is not None and times.dt.tz is not None:
            times = times.dt.tz_convert(self.zone)
        columns: dict[str, Any] = {part: getattr(times.dt, part, None) for part in (*CATEGORIES, *NUMBERS)}
        columns["week"] = times.dt.isocalendar().week
        # `pd.Timestamp(0)` counts nanoseconds, and days such as 9999-12-31 are beyond their range.
        first = pd.Timestamp("1970-01-01", tz=None if times.dt.tz is None else "UTC")
        columns["elapsed"] = (times - first) / pd.Timedelta(days=1)
        return pd.DataFrame(
            {f"{self.name}_{part}": values.convert_dtypes().mask(times.isna()) for part, values in columns.items()}
        ).set_axis(index)


def _with_times(column: "Series") -> "Series":
    """Convert days of Arrow to timestamps, as they have neither hours nor a zone; return others as they are."""
    return column.astype("datetime64[s]") if str(column.dtype).startswith(("date32[", "date64[")) else column


def texts_in(column: "Series") -> "Series":
    """Return the values that are not missing; empty text is missing."""
    return column[column.notna() & (column != "")]


def ways_to_read(texts: "Series") -> list[str]:
    """Return the ways in which most of these texts are dates; none unless nearly all of them are."""
    likely = [way for way in _WAYS if _read(texts[:20], way).notna().mean() > 0.5]
    counts = {way: int(_read(texts, way).notna().sum()) for way in likely}
    most = max(counts.values(), default=0)
    return [way for way, n in counts.items() if n == most >= NEARLY_ALL * len(texts)]


def _read(texts: "Series", way: str, several_zones: bool = False) -> "Series":
    import pandas as pd
    from pandas.api.types import is_numeric_dtype

    if not is_numeric_dtype(texts.dtype):
        utc = several_zones and bool(texts.astype(str).str.contains(_OFFSET).all())
        with suppress(ValueError):  # The texts may have several time zones.
            return pd.to_datetime(texts, format=way, errors="coerce", utc=utc)
    return pd.Series(pd.NaT, texts.index)
