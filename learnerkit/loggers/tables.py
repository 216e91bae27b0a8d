"""Loggers that write files: the table as CSV, and every record as a line of JSON."""

import csv
import json
import math
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from learnerkit.callback import running
from learnerkit.files import followed, name_or_path, replacing
from learnerkit.loggers.logger import Logger, Record


class _FileLogger(Logger):
    """A logger into a file.

    Args:
        fname: a name inside `learn.path`, or a path.
        every, config: as in `Logger`.
    """

    def __init__(self, fname: str | Path, every: int | None, config: Any = None) -> None:
        super().__init__(every, config)
        if not isinstance(fname, str | Path):
            raise TypeError(f"got fname={fname!r}; it is a name inside learn.path, or a path")
        self.fname = name_or_path(fname, "learn.path")

    def before_fit(self) -> None:
        super().before_fit()
        others = [cb for cb in running(self.learn.cbs, _FileLogger) if cb is not self and cb._place() == self._place()]
        if others:
            raise ValueError(f"{self!r} and {others[0]!r} write to the same file, {self._place()}; give each its own")

    def _place(self) -> Path:
        """Return the path of the file, to which links have led."""
        return followed(Path(self.learn.path) / self.fname if isinstance(self.fname, str) else self.fname)

    def _path(self) -> Path:
        """Return the path of the file, and make its folder; the script may leave its own."""
        path = self._place()
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


class CSVLogger(_FileLogger):
    """Writes the rows of the table to a CSV file, also those that `ValidateEvery` adds.

    Every row is on disk at once. The fits of a run (`fine_tune` is two) follow each other in one file; a new run writes
    over it unless `append` is set. A column that appears later is empty in the rows before it.

    Args:
        fname: a name inside `learn.path`; or a path (a `pathlib.Path`, or a str with a separator), taken as it is.
        append: add to the rows that are in the file.

    Raises:
        TypeError, ValueError: no plain name and no path; in `before_fit` another logger that writes to the same file.
    """

    order = 102  # after ValidateEvery has added its row

    def __init__(self, fname: str | Path = "history.csv", append: bool = False) -> None:
        super().__init__(fname, every=None)
        self.append = append
        self._names: list[str] = []

    def _open(self) -> Path:
        path = self._path()
        _check_regular(path)
        rows = _read(path) if self._id is not None or self.append else []
        if self._goes_back:
            rows = rows[: 1 + self._written]
        self._id, self._written = "file", max(0, len(rows) - 1)
        self._names = rows[0] if rows else []
        _replace(path, rows)
        return path

    def _write(self, records: list[Record]) -> None:
        path: Path = self._handle
        for values in (record.values for record in records):
            if not {*values} <= {*self._names}:
                names, end = list(values), len(values) - ("time" in values)
                names[end:end] = [name for name in self._names if name not in values]
                rows = [dict(zip(self._names, row, strict=False)) for row in _read(path)[1:]]
                _replace(path, [names, *([row.get(name, "") for name in names] for row in rows)])
                self._names = names
            with path.open("a", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow([values.get(name, "") for name in self._names])
            self._written += 1


def _read(path: Path) -> list[list[str]]:
    if not path.exists():
        return []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # Excel puts a mark before UTF-8
            return list(filter(None, csv.reader(file)))  # without empty lines
    except (ValueError, csv.Error) as e:  # no UTF-8, or a field of more than 131,072 characters
        raise ValueError(f"{path} is not a table that can be continued ({e}); remove it, or give another name") from e


def _check_regular(path: Path) -> None:
    """Refuse what is there and no file: reading from a pipe may never end, and a device must not be replaced."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} cannot be continued or replaced, as it is no regular file; give another name")


def _replace(path: Path, rows: list[list[str]]) -> None:
    """Rewrite a file, so that a killed process leaves either the new one or the old one."""
    with replacing(path) as temporary, temporary.open("x", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


class JSONLogger(_FileLogger):
    """Writes JSON lines: the hyper-parameters, then the record of each step, and the rows of the table.

    A record has its `step`, which counts the training batches of the run from 1. That of a step has the smoothed
    `loss`, `lr` and other scheduled hyper-parameters (of several groups the last one's), and what was given to
    `log_metric` (the mean since the record before); on several ranks what rank 0 has. Records with an `epoch` are rows
    of the table, whose values are those of all ranks. NaN and infinity are null.

    `pandas.read_json(path, lines=True)` reads it. A new run writes over the file.

    Args:
        fname: a name inside `learn.path`; or a path (a `pathlib.Path`, or a str with a separator), taken as it is.
        every: training batches between two records of steps.
        config: values of your own for the first record, such as `vars(args)`.

    Raises:
        TypeError, ValueError: arguments that cannot work; a column of the table that is named 'step'; in `before_fit`
            another logger that writes to the same file.
    """

    def __init__(self, fname: str | Path = "history.jsonl", every: int = 1, config: Any = None) -> None:
        super().__init__(fname, every, config)

    def before_fit(self) -> None:
        super().before_fit()
        self._check_names(self.learn.recorder.metric_names)

    def _check_names(self, names: Iterable[str]) -> None:
        if "step" in names:
            raise ValueError(
                f"a column of the table is named 'step', which {self!r} writes for each record itself; give the metric "
                "another name: metrics={'name': metric}"
            )

    def _open(self) -> Any:
        path = self._path()
        if self._goes_back and path.exists():
            _check_regular(path)
            with path.open("r+b") as file:
                lines = [line for line in islice(file, self._written) if line.endswith(b"\n")]  # the last may be cut
                file.truncate(sum(map(len, lines)))
                self._written = len(lines)
        mode, self._id = "w" if self._id is None else "a", "file"
        return path.open(mode, encoding="utf-8")

    def _write_config(self, config: dict[str, Any]) -> None:
        self._write_lines([{"config": config}])

    def _write(self, records: list[Record]) -> None:
        for record in records:
            self._check_names(record.values)  # `log_metric` adds columns.
        self._write_lines([{"step": record.step, **record.values} for record in records])

    def _write_lines(self, lines: list[dict[str, Any]]) -> None:
        self._handle.writelines(f"{json.dumps(_plain(line), default=str, allow_nan=False)}\n" for line in lines)
        self._handle.flush()
        self._written += len(lines)

    def _leave(self) -> None:
        self._handle.close()


def _plain(x: Any) -> Any:
    """Convert values to those of JSON."""
    if isinstance(x, Mapping):
        return {str(name): _plain(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return list(map(_plain, x))
    if isinstance(x, np.generic) or (isinstance(x, Tensor) and x.numel() == 1):
        x = x.item()
    return None if isinstance(x, float) and not math.isfinite(x) else x
