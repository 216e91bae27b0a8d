"""The choice of a column's role by its values, and hints about columns that the user should look at."""

import re
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from learnerkit.tabular.columns import FEW, distinct, numbers_in, read_numbers
from learnerkit.tabular.dates import NEARLY_ALL, texts_in, ways_to_read
from learnerkit.text import first_few

if TYPE_CHECKING:
    from pandas import Series

_YES_OR_NO = {"true", "false", "t", "f", "yes", "no", "y", "n"}


class Seen(NamedTuple):
    """The role of a column, by its values.

    Attributes:
        role: 'cats', 'conts', 'few' (whole numbers, which may be either), or '' for one that is left out.
        why: the reason for which it is left out.
        told: a hint for the user about the column.
    """

    role: str
    why: str = ""
    told: str = ""


def look(column: "Series", whole: "Series") -> Seen:
    """Choose the role of a column by its values.

    Args:
        column: the rows to train on.
        whole: all rows, in which cells that are no numbers are looked for.
    """
    from pandas.api.types import is_any_real_numeric_dtype

    if is_any_real_numeric_dtype(column.dtype):
        return _look_at_numbers(column)
    try:
        _, values = distinct(column)
    except ValueError:
        return Seen("", "neither text, numbers, truth values nor timestamps")
    if len(values) < 2 and (not values or column.notna().all()):
        return Seen("", "one value" if values else "no values")
    if column.dtype.kind == "M":
        return Seen("cats") if len(values) <= FEW else _DATES
    texts = texts_in(column)
    if column.dtype != "category" and len(texts):
        numbers = read_numbers(texts)
        there = numbers[np.isfinite(numbers)]
        is_few = len(values) <= FEW and (there == np.round(there)).all()
        has_codes = any(re.match(r"\s*0\d", str(value)) for value in values)  # such as 02134
        if len(there) >= NEARLY_ALL * len(texts) and not is_few and not has_codes:
            cells = no_numbers(whole)
            return Seen("conts", told=f"text, read as numbers; {cells}{'; ' * bool(cells)}conts= or cats= settles it")
        if len(values) > FEW and not len(there) and ways_to_read(texts):
            return _DATES
    if len(values) > max(FEW, len(column) / 2):
        if column.dtype == "category":
            return Seen("", "categories that differ in most rows")
        share = float(np.isfinite(read_numbers(texts)).mean()) if len(texts) else 0.0
        cells = f", and {share:.0%} of it is numbers; {no_numbers(whole)}" if share > 0.5 else ""
        return Seen("", f"text that differs in most rows{cells}")
    return Seen("cats", told=_spellings(values))


_DATES = Seen("", "dates: dates=[...] takes their parts")


def _look_at_numbers(column: "Series") -> Seen:
    values, different = numbers_in(column), column.nunique()
    values = values[np.isfinite(values)]
    if not len(values) or (different == 1 and column.notna().all()):
        return Seen("", "one value" if len(values) else "no values")
    is_whole = bool((values == np.round(values)).all())
    if different <= FEW and is_whole:
        return Seen("few")
    is_id = is_whole and different == len(column)
    text = f"a different whole number in each row: an id? df.drop(columns={[column.name]}) leaves it out"
    return Seen("conts", told=text if is_id else "")


def no_numbers(column: "Series") -> str:
    """Describe the cells of a column of text that are no numbers; '' if all are."""
    wrong = column[np.isnan(read_numbers(column)) & column.notna().to_numpy()]
    if not len(wrong):
        return ""
    counts = Counter(repr(str(value)[:20]) for value in wrong)
    grouped = np.isfinite(read_numbers(wrong.astype(str).str.replace(",", ""))).any()
    mend = "; pandas.read_csv(..., thousands=',') reads numbers such as 1,234.5" if grouped else ""
    texts = first_few((f"{text} ({n})" for text, n in counts.most_common()), n=4)
    return (
        f"{len(wrong):,} of {len(column):,} cells are no numbers, and count as missing: {texts}; rows "
        f"{first_few(wrong.index)}{mend}"
    )


def _spellings(found: list) -> str:
    texts = sorted(value for value in found if isinstance(value, str))
    counts = Counter(text.strip().casefold() for text in texts)
    alike = [repr(text[:20]) for text in texts if counts[text.strip().casefold()] > 1]
    if len(counts) > 2 and counts.keys() <= _YES_OR_NO:
        return f"yes and no are spelled in {len(texts)} ways: {first_few(map(repr, texts), n=8)}"
    return f"{first_few(alike, n=8)} differ by case and spaces alone, and are categories of their own" if alike else ""
