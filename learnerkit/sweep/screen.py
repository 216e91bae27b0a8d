"""The display of a search: a line for each finished trial, and on a terminal one below them for the running ones."""

import os
import socket
import sys
import time
from collections import Counter
from typing import Any, TextIO

from tqdm import tqdm

from learnerkit.sweep.config import Config
from learnerkit.sweep.study import Row, best_of
from learnerkit.text import columns, escaped_line, format_time

SILENT_SECONDS = 300.0  # the time after which a log shows the counts again


class Screen:
    """Shows the trials of a search.

    Args:
        config: what is searched.
        with_gpus: whether there is a column for GPUs.
        stream: where to; if it is a terminal, a last line has the counts and the running trials.
    """

    def __init__(self, config: Config, with_gpus: bool = False, stream: TextIO | None = None) -> None:
        self.config = config
        self.with_gpus = with_gpus
        self.stream = stream or sys.stdout
        self._bar = tqdm(
            file=self.stream, bar_format="{desc}", leave=False, dynamic_ncols=True, disable=not self.stream.isatty()
        )
        self._said: dict[int, tuple[str, int]] = {}  # the state and the attempt of each trial that were shown last
        self._best: Row | None = None
        self._titles = ["", "trial", *config.parameters, "epoch", config.metric]
        self._widths = [1, 5, *(max(9, columns(name)) for name in config.parameters), 5, max(9, columns(config.metric))]
        self._began = self._printed = time.monotonic()
        self._header = True

    def say(self, text: str) -> None:
        """Print a line."""
        self._print([escaped_line(text)])

    def seen(self, rows: list[Row]) -> None:
        """Note trials of an earlier part of the search, which are not shown."""
        self._best = best_of(rows, self.config.maximize)
        self._said = {row.number: (row.state, row.attempt) for row in rows}

    def update(self, rows: list[Row]) -> None:
        """Print the trials that have ended, and show those that run."""
        lines = []
        for row in rows:
            before = self._said.get(row.number, ("", 0))
            now = (row.state, row.attempt)
            ended = row.state in ("complete", "pruned", "failed")
            if now == before or not (ended or row.attempt > before[1]):
                continue
            self._said[row.number] = now
            self._best = best_of([each for each in (self._best, row) if each is not None], self.config.maximize)
            lines.append(self._line(row, again=not ended))
        if lines and self._header:
            self._header = False
            lines.insert(0, self._join(self._titles, "GPU", "time", "state"))
        if self._bar.disable and not lines and time.monotonic() > self._printed + SILENT_SECONDS:
            lines = [self.summary(rows)]
        self._print(lines)
        running = [f"{row.number} epoch {row.epoch}: {number(row.value)}" for row in rows if row.state == "running"]
        self._bar.set_description_str("; ".join([self.summary(rows), *running]))

    def close(self) -> None:
        """Remove the line of the running trials."""
        self._bar.close()

    # The table

    def summary(self, rows: list[Row]) -> str:
        """Return the counts and the best, in a line."""
        counts = Counter(row.state for row in rows)
        of = f" of {self.config.total}" if self.config.total else ""
        parts = [f"{counts[state]} {state}" for state in ("complete", "pruned", "failed", "running") if counts[state]]
        best = best_of(rows, self.config.maximize)
        if best is not None:
            parts.append(f"best {self.config.metric} {number(best.value)} (trial {best.number})")
        done = counts["complete"] + counts["pruned"] + counts["failed"]
        took = format_time(time.monotonic() - self._began)
        return f"{done}{of} trials: {', '.join(parts) or 'none yet'}, {took}"

    def _line(self, row: Row, again: bool) -> str:
        values = [parameter(row.values[name]) if name in row.values else "" for name in self.config.parameters]
        mark = "*" if row is self._best else ""
        cells = [mark, str(row.number), *values, str(row.epoch or ""), number(row.value)]
        took = "" if row.seconds is None or again else format_time(row.seconds)
        host, _, gpus = row.place.partition(" GPU ")
        elsewhere = f" on {host}" if host not in ("", socket.gethostname()) else ""
        state = row.state + (f" (run {row.attempt + 1})" if row.attempt else "") + elsewhere
        if again:
            state = f"is run again: {row.cause}"
        elif row.state == "failed":
            state = row.cause if row.cause.startswith("failed") else f"failed: {row.cause}"
        return self._join(cells, gpus, took, escaped_line(state))

    def _join(self, cells: list[str], gpus: str, took: str, state: str) -> str:
        padded = [" " * (width - columns(cell)) + cell for cell, width in zip(cells, self._widths, strict=True)]
        return "  ".join([*padded, *([f"{gpus:>3}"] if self.with_gpus else []), f"{took:>7}", state]).rstrip()

    def _print(self, lines: list[str]) -> None:
        """Print lines above that of the running trials."""
        if not lines:
            return
        self._printed = time.monotonic()
        try:
            tqdm.write("\n".join(lines), file=self.stream)
            self.stream.flush()
        except OSError:  # the terminal is gone, or `tee` has got the Ctrl-C, too; the trials go on
            # What is still buffered would fail at the end of the process, and change its exit code.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)


def number(value: Any) -> str:
    """Return a value for a cell of the table."""
    if isinstance(value, float):
        return f"{value:.5g}"
    return "" if value is None else escaped_line(str(value))


def parameter(value: Any) -> str:
    """Return the value of a parameter for a cell, or for a line; a config's null is one."""
    return "None" if value is None else number(value)
