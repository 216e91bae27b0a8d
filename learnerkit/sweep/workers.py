"""The processes of trials: as many at once as there are slots, each started and watched as a separate launch."""

import json
import math
import os
import queue
import re
import shlex
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from learnerkit.launch import supervise
from learnerkit.launch.nodes import begin_alone
from learnerkit.launch.report import Outcome
from learnerkit.launch.supervise import ENDING_SIGNALS, Interrupted, Job
from learnerkit.processes.machine import usable_cores
from learnerkit.sweep.script import PARAMS, TRIAL
from learnerkit.sweep.study import Run, Study
from learnerkit.text import signal_name

SHOW_SECONDS = 0.25  # between two looks at the trials
IDLE_SECONDS = 0.5  # between two looks for a trial, while there is none to run
KILLED = (128 + signal.SIGKILL, 128 + signal.SIGTERM)
"""Exit codes of trials that are run again: they were ended from outside. A crash would come again."""


@dataclass(frozen=True)
class Command:
    """The command that a trial runs.

    Args:
        words: the absolute path of a script, or -m and a module, and its arguments.
        nproc: the number of ranks.
        as_arguments: pass the values as arguments of the script, such as --lr 0.01.
        start: the folder in which the search was begun.
        here: trials run in that folder, rather than each in its own.
        search: an id of the search that is the same on all machines, wherever its directory is mounted.
    """

    words: list[str]
    nproc: int = 1
    as_arguments: bool = False
    start: str = "."
    here: bool = False
    search: str = ""

    def with_values(self, values: Mapping[str, Any]) -> list[str]:
        """Return the words for a trial."""
        given: list[str] = []
        for name, value in values.items():  # argparse takes `-1e-05` for an option.
            text = str(value)
            given += [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
        return [*self.words, *given] if self.as_arguments else self.words

    def line(self, values: Mapping[str, Any]) -> str:
        """Return the line that runs a trial again by hand."""
        python = ["python", *(["-m", "learnerkit.launch", "--nproc", str(self.nproc)] if self.nproc > 1 else [])]
        before = "" if self.as_arguments else f"{PARAMS}={shlex.quote(json.dumps(values))} "
        script, *rest = self.with_values(values)
        near = script.removeprefix(self.start.rstrip("/") + "/")  # the script as the user has named it
        return before + shlex.join([*python, near, *rest])


class Workers:
    """Runs the trials of a search on this machine.

    Args:
        study: the trials.
        command: what each runs.
        gpus: for each trial that runs at a time, the GPUs that it sees, as in CUDA_VISIBLE_DEVICES; `None`: all.
    """

    def __init__(self, study: Study, command: Command, gpus: Sequence[str | None]) -> None:
        self.study = study
        self.command = command
        self.gpus = gpus
        self.stopped_by = 0
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        # No SimpleQueue: on CPython 3.11 a signal during its `get` can make it wait without end.
        self._signals: list[queue.Queue[int]] = [queue.Queue() for _ in gpus]

    def run(self, show: Callable[[], None]) -> None:
        """Run trials until all have ended, or a signal stops them.

        Args:
            show: called several times a second.
        """
        threads = [threading.Thread(target=self._work, args=(slot,), daemon=True) for slot in range(len(self.gpus))]
        with supervise.received_signals() as signals:
            try:
                for thread in threads:
                    thread.start()
                while any(thread.is_alive() for thread in threads):
                    for signum in signals(SHOW_SECONDS):
                        self._hear(signum)
                    show()
            finally:
                self._stop()
                for thread in threads:
                    thread.join()
        show()
        if self._error is not None:
            raise self._error

    def _hear(self, signum: int) -> None:
        """Pass a signal on; the first that asks for the end lets trials save, and a second one kills them."""
        if signum not in ENDING_SIGNALS:
            self._tell(signum)
        elif self._stopping.is_set():
            self._tell(signal.SIGINT)
        else:
            self.stopped_by = signum
            self._stop()

    def _stop(self) -> None:
        if not self._stopping.is_set():
            self._stopping.set()
            self._tell(signal.SIGTERM)

    def _tell(self, signum: int) -> None:
        for each in self._signals:
            each.put(signum)

    # In the thread of a slot

    def _work(self, slot: int) -> None:
        gpus = self.gpus[slot]
        try:
            while not self._stopping.is_set():
                run = self.study.take(f"GPU {gpus}" if gpus else "")
                if run is not None:
                    outcome = self._launch(run, slot)
                    self.study.finish(run, *self._judge(run, outcome))
                elif self.study.is_over():
                    return
                else:  # Others still run some, which may be killed.
                    self._stopping.wait(IDLE_SECONDS)
        except BaseException as error:
            self._error = self._error or error
            self._stop()

    def _launch(self, run: Run, slot: int) -> Outcome:
        """Run a trial to its end."""
        self._signals[slot] = queue.Queue()  # a signal that came before was not for this trial
        if self._stopping.is_set():
            return Outcome("stopped")
        command, folder = self.command, self._folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        place = {
            "folder": str(self.study.folder), "trial": run.trial, "metric": self.study.config.metric,
            "as_arguments": command.as_arguments,
        }  # fmt: skip
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [command.start] if command.words[0] == "-m" else []
        paths += [os.path.join(command.start, path) for path in given if path]
        threads = max(1, usable_cores() // (len(self.gpus) * command.nproc))
        env = {
            TRIAL: json.dumps(place),
            PARAMS: json.dumps(run.values),
            "LEARNERKIT_LAUNCHER": f"{command.search} {run.number}",  # CheckpointCallback resumes only its own.
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(threads),
        }
        job = Job(
            command.with_values(run.values), command.nproc, self.gpus[slot], unbuffered=True, log_dir=folder,
            quiet=True, env=env, folder=Path(command.start) if command.here else folder,
        )  # fmt: skip
        attempt = begin_alone(run.attempt, command.nproc, run.attempt)
        try:
            return supervise.run_attempt(job, attempt, partial(self._next_signals, slot))
        except Interrupted:  # The signal came when all ranks had ended well.
            return Outcome("done", code=0)
        finally:
            attempt.leave()

    def _folder(self, run: Run) -> Path:
        return self.study.folder / "trials" / str(run.number)

    def _next_signals(self, slot: int, seconds: float) -> list[int]:
        """Wait up to some seconds for a signal to the trial of a slot."""
        try:
            return [self._signals[slot].get(timeout=seconds)]
        except queue.Empty:
            return []

    def _judge(self, run: Run, outcome: Outcome) -> tuple[str, float | None, str]:
        """Return how a trial has ended: the state, the value and the cause, for `Study.finish`."""
        value, pruned = self.study.reported(run)
        if pruned:
            return "pruned", None, ""
        if outcome.kind == "done":
            value = self._printed(run) if value is None else value
            metric = self.study.config.metric
            if value is None:
                return "failed", None, f"no {metric} was reported, neither by sweep.report nor in its output"
            return ("failed", None, f"{metric} is NaN") if math.isnan(value) else ("complete", value, "")
        if self._stopping.is_set() and outcome.kind == "stopped":
            return "stopped", None, f"was stopped by {signal_name(self.stopped_by or signal.SIGTERM)}"
        cause = outcome.text.rstrip(",")
        cause = cause.removeprefix("rank 0 ") if self.command.nproc == 1 else cause
        return "killed" if outcome.code in KILLED else "failed", None, cause

    def _printed(self, run: Run) -> float | None:
        """Return the last value that a trial has printed, or else logged as JSON in a file."""
        folder, metric = self._folder(run), self.study.config.metric
        attempts = [folder / f"attempt-{number}" / "rank-0.log" for number in range(run.attempt, -1, -1)]
        there = filter(Path.is_file, [*folder.glob("*.json"), *folder.rglob("*.jsonl")])  # a link may lead nowhere
        logged = sorted(there, key=lambda path: -path.stat().st_mtime)
        # A trial that was stopped after its fit prints the value no more when it is run again.
        logs = [attempts[0], *logged, *attempts[1:]]
        for path in filter(Path.is_file, logs):  # a script may remove its folder
            with path.open(encoding="utf-8", errors="replace") as lines:
                value = last_value(lines, metric)
            if value is not None:
                return value
        return None


# The quantifiers never give back what they have matched, or a long line would take minutes.
NUMBER = r"[-+]?(?:(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d++)?|nan|inf|NaN|Infinity|null)"


def last_value(lines: Iterable[str], metric: str) -> float | None:
    """Return the last value of a metric in a text: `accuracy: 0.9`, `accuracy=0.9`, JSON, or a column of a table.

    Numbers that it cannot read, such as 1,234.5 and 3/6, are passed over.
    """
    named = re.compile(rf"(?<![\w./-]){re.escape(metric)}[\"']?(?:\s*+[:=]\s*+|\s++)({NUMBER})(?!\w|[.,/]\d)")
    value = None
    headers: dict[int, list[str]] = {}  # headers of tables that have the metric, by the number of cells in a row
    for line in lines:
        cells = line.split()
        if found := named.findall(line):
            value = _number(found[-1])
        elif metric in cells:
            if not any(re.fullmatch(rf"{NUMBER}[:,.;%]?", cell) for cell in cells):  # such a line is a message
                headers[len(cells)] = cells
        elif header := headers.get(len(cells)):
            cell = cells[header.index(metric)]
            n_numbers = sum(bool(re.match(NUMBER, cell)) for cell in cells)
            if cells[0] == header[0] and not n_numbers:  # Another table begins, which does not have the metric.
                del headers[len(cells)]
            elif re.fullmatch(NUMBER, cell) and n_numbers > len(cells) / 2:  # 'saved in 0.5 s' has just one number
                value = _number(cell)
    return value


def _number(text: str) -> float:
    return float(text.replace("null", "nan"))  # JSON has no NaN


def share_out(names: list[str], trials: int | None, nproc: int) -> list[str | None]:
    """Return the GPUs of each trial that runs at a time.

    Args:
        names: the GPUs, as in CUDA_VISIBLE_DEVICES.
        trials: how many at a time; `None`: as many as the GPUs allow.
        nproc: how many GPUs each has.

    Raises:
        ValueError: there are too few.
    """
    if not names:
        return [None] * (trials or 1)
    n = trials or max(1, len(names) // nproc)
    if n * nproc > len(names):
        raise ValueError(
            f"-j {n} with --nproc {nproc}: each process needs a GPU of its own, and {len(names)} can be used; ask for "
            "fewer, or set CUDA_VISIBLE_DEVICES= (to nothing) to run on the CPU"
        )
    return [",".join(names[i * nproc : (i + 1) * nproc]) for i in range(n)]
