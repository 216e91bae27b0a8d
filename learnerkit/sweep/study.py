"""The trials of a search in files that its processes and machines share, and which process has which.

The directory of a search has

- sweep.json: what is searched, and the command of the trials;
- journal.log: Optuna's journal, to which every process appends; the only record of trials and values;
- lock: held by whoever takes or ends a trial;
- running/N: a lock that is held while the trial N of the journal runs. The system frees it however its process ends.
  Optuna's own heartbeats and retries need a database, and beat inside its `optimize`, where no launch can run.
- trials/N: the folder in which the trial N runs, with its output. One that is run again goes on there.
"""

import fcntl
import math
import os
import socket
import threading
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from learnerkit.sweep.config import Config, ConfigError, Section, make_config, optuna, read_json
from learnerkit.text import in_one_line

NAME = "sweep"  # the name of the study in the journal
_MOST_FAILED = 10  # so many failed trials, and no other, end a search without a number of trials


class JournalError(ValueError):
    """The journal has lines that Optuna has not written."""


class FileLock:
    """A lock among threads, processes and machines, which the system frees when the process ends.

    Args:
        path: the file that is locked.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._among_threads = threading.Lock()  # On NFS a lock belongs to the whole process.
        self._opened = -1

    def acquire(self) -> bool:
        """Wait for the lock."""
        self._among_threads.acquire()
        try:
            self._opened = try_lock(self.path)
        except BaseException:
            self._among_threads.release()
            raise
        return True

    def release(self) -> None:
        """Free the lock."""
        os.close(self._opened)
        self._among_threads.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class JournalLock(FileLock):
    """The lock of Optuna's journal. Optuna's own stays behind where a process is killed, and holds up all others.

    Args:
        journal: the journal.
    """

    def __init__(self, journal: Path) -> None:
        super().__init__(journal.with_suffix(".lock"))
        self._journal = journal

    def acquire(self) -> bool:
        """Wait for the lock, and remove an incomplete line, left by a process that was killed while it wrote."""
        super().acquire()
        try:
            with self._journal.open("r+b") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(0, end - 1))
                if file.read(1) not in (b"", b"\n"):
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
        except BaseException:
            self.release()
            raise
        return True


def open_study(folder: Path, config: Config, sampler: Any = None, create: bool = False) -> Any:
    """Open the study of a search.

    Args:
        folder: the search's directory.
        config: what is searched.
        sampler: of new trials.
        create: create it if it is not there; call it with the search's lock.

    Raises:
        FileNotFoundError: it is not there.
        JournalError: the journal is damaged.
    """
    module, journal = optuna(), folder / "journal.log"
    lock: Any = JournalLock(journal)
    try:
        file = module.storages.journal.JournalFileBackend(str(journal), lock_obj=lock)
        storage = module.storages.JournalStorage(file)
        names = [study.study_name for study in storage.get_all_studies()]
    except OSError:
        raise
    except Exception as error:  # It may be of any class, as Optuna does not check the lines.
        raise JournalError(
            f"{journal} is damaged ({in_one_line(error)}); remove the lines that are no JSON objects, or the search's "
            "directory"
        ) from error
    options = {"storage": storage, "study_name": NAME, "pruner": config.pruner(), "sampler": sampler}
    if NAME in names:
        return module.load_study(**options)
    if not create:
        raise FileNotFoundError(f"the search in {folder} has no trials yet")
    return module.create_study(**options, direction="maximize" if config.maximize else "minimize")


@dataclass
class Run:
    """A trial that this process is to run.

    Args:
        number: of the trial.
        key, trial: this run of it in the journal: the number that Optuna shows, and its key.
        attempt: how often it was begun before.
        values: for the script.
        lock: the descriptor of its lock.
    """

    number: int
    key: int
    trial: int
    attempt: int
    values: dict[str, Any]
    lock: int


@dataclass
class Row:
    """A trial, with the state of its last run.

    Args:
        number: of the trial.
        state: 'waiting', 'running', 'complete', 'pruned' or 'failed'.
        values: of its parameters; empty while it waits.
        value: the metric's last value.
        epoch: how many values were reported.
        attempt: how often it was run before.
        cause: why it has failed, or the last time, if it is to be run again.
        place: the machine and its GPUs.
        seconds: from its beginning to its end, or until now.
    """

    number: int
    state: str
    values: dict[str, Any] = field(default_factory=dict)
    value: float | None = None
    epoch: int = 0
    attempt: int = 0
    cause: str = ""
    place: str = ""
    seconds: float | None = None


class Study:
    """The trials of a search.

    Args:
        folder: the search's directory.
        config: what is searched.
    """

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder, self.config = folder, config
        (folder / "running").mkdir(parents=True, exist_ok=True)
        optuna().logging.set_verbosity(optuna().logging.WARNING)
        self._lock = FileLock(folder / "lock")
        with self._lock:
            self.study = open_study(folder, config, config.sampler(0), create=True)
        self._own: set[int] = set()  # the trials whose locks this process holds
        self._grid = config.combinations()
        self._states = optuna().trial.TrialState

    def take(self, place: str = "") -> Run | None:
        """Return the next trial to run, which from now on is this process's; `None`: there is none at present."""
        with self._lock:
            self._find_lost()
            trials = self._trials()
            if not any(trial.state == self._states.WAITING for trial in trials):
                firsts = [trial for trial in trials if "again" not in trial.user_attrs]
                if 0 < self.config.total <= len(firsts):
                    return None
                rows = [] if self.config.total else self.rows()
                ended = [row.state for row in rows if row.state not in ("running", "waiting")]
                if ended.count("failed") == len(ended) >= _MOST_FAILED:
                    raise ConfigError(
                        f"the first {len(ended)} trials have failed, and without maxCombo nothing ends it: mend "
                        "the script, or give maxCombo, and take another --dir"
                    )
                self._plan_next(firsts)
                if self.config.seed is not None:  # values do not depend on how many trials were run again
                    self.study.sampler = self.config.sampler(len(firsts))
            try:
                trial = self.study.ask(self.config.parameters)
            except Exception as error:  # It may be of any class: Optuna checks some options late.
                raise ConfigError(f"sampler: it cannot draw values ({in_one_line(error)})") from error
            lock = try_lock(self._running(trial.number))
            self._own.add(trial.number)
            number = numbers_of(self._trials())[trial.number]
            attempt = trial.user_attrs.get("again", {}).get("attempt", 0)
            trial.set_user_attr("place", f"{socket.gethostname()} {place}".strip())
            return Run(number, trial.number, trial._trial_id, attempt, trial.params, lock)

    def _plan_next(self, firsts: list) -> None:
        """Enqueue the values of the next trial if they come from the grid, or repeat others; else the sampler draws."""
        n, repeats = len(firsts), self.config.repeats
        if self._grid:
            self.study.enqueue_trial(self._grid[n // repeats])
        elif n % repeats:
            self.study.enqueue_trial(firsts[n - n % repeats].params)

    def finish(self, run: Run, state: str, value: float | None = None, cause: str = "") -> None:
        """Record how a trial has ended, and free its lock.

        Args:
            run: the trial.
            state: 'complete', 'pruned', 'failed', 'killed' (it is run again, a few times), 'stopped' (again, always).
            value: of the metric, if it is complete.
            cause: why it has failed.
        """
        with self._lock:
            self._end(run.key, state, value, cause)
            self._own.discard(run.key)
            self._running(run.key).unlink(missing_ok=True)
            os.close(run.lock)

    def _end(self, key: int, state: str, value: float | None, cause: str) -> None:
        trial = self._trials()[key]
        if trial.state != self._states.RUNNING:  # It was taken for lost, as a file system may free locks by mistake.
            return
        if state == "complete":
            self.study.tell(key, value)
        elif state == "pruned":
            self.study.tell(key, state=self._states.PRUNED)
        else:
            if cause:
                self.study._storage.set_trial_user_attr(trial._trial_id, "cause", cause)
            if state != "failed":
                self._run_again(trial, kills=state == "killed")
            self.study.tell(key, state=self._states.FAIL)

    def _run_again(self, trial: Any, kills: bool) -> None:
        """Plan to run the values of a trial again, unless this is planned already, or it was killed too often."""
        numbers = numbers_of(self._trials())
        number, before = numbers[trial.number], trial.user_attrs.get("again", {})
        again = {"number": number, "attempt": before.get("attempt", 0) + 1, "kills": before.get("kills", 0) + kills}
        if number not in numbers[trial.number + 1 :] and again["kills"] <= self.config.retries:
            fixed = trial.system_attrs.get("fixed_params", {})  # A killed trial may lack some of its own values.
            self.study.enqueue_trial(fixed | trial.params, user_attrs={"again": again})

    def _find_lost(self) -> None:
        """End the trials whose process is gone."""
        for trial in self._trials():
            # On NFS this process would get, and lose, a lock that it has already.
            if trial.state != self._states.RUNNING or trial.number in self._own:
                continue
            lock = try_lock(self._running(trial.number), wait=False)
            if lock >= 0:
                state = "pruned" if "pruned" in trial.user_attrs else "killed"
                self._end(trial.number, state, None, "was killed with the process that had started it")
                self._running(trial.number).unlink(missing_ok=True)
                os.close(lock)

    def _running(self, key: int) -> Path:
        return self.folder / "running" / str(key)

    def _trials(self) -> list:
        trials: list = self.study.get_trials(deepcopy=False)
        return trials

    def reported(self, run: Run) -> tuple[float | None, bool]:
        """Return what a trial has reported last, and whether it was pruned."""
        trial = self._trials()[run.key]
        values = trial.intermediate_values
        return (values[max(values)] if values else None), "pruned" in trial.user_attrs

    def rows(self) -> list[Row]:
        """Return all trials."""
        return rows_of(self.study)

    def is_over(self) -> bool:
        """Tell whether all trials have ended."""
        rows = self.rows()
        return 0 < self.config.total <= len(rows) and all(row.state not in ("running", "waiting") for row in rows)


def numbers_of(trials: list[Any]) -> list[int]:
    """Return the numbers by which Optuna's trials are shown: one that is run again keeps its number."""
    numbers, count = [], 0
    for trial in trials:
        again = trial.user_attrs.get("again")
        numbers.append(again["number"] if again else count)
        count += not again
    return numbers


def try_lock(path: Path, wait: bool = True) -> int:
    """Lock a file and return its descriptor; without `wait`, -1 if another process has the lock."""
    opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(opened)
        return -1
    return opened


_STATES = {"WAITING": "waiting", "RUNNING": "running", "COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}


def rows_of(study: Any) -> list[Row]:
    """Return the trials of an Optuna study, those that were run again as one."""
    rows: dict[int, Row] = {}
    trials = study.get_trials(deepcopy=False)
    for number, trial in zip(numbers_of(trials), trials, strict=True):
        before = rows.get(number)
        notes = trial.user_attrs
        reported = trial.intermediate_values
        row = rows[number] = Row(
            number, _STATES[trial.state.name], trial.params, epoch=len(reported), cause=notes.get("cause", ""),
            attempt=notes.get("again", {}).get("attempt", 0), place=notes.get("place", ""),
        )  # fmt: skip
        if before and row.state in ("waiting", "running"):
            row.values, row.cause = row.values or before.values, before.cause
        if row.state == "complete":
            row.value = trial.value
        elif reported:
            row.value = reported[max(reported)]
        if trial.datetime_start and row.state != "waiting":
            ended = trial.datetime_complete or datetime.now()  # Another machine's clock may differ.
            row.seconds = max(0.0, (ended - trial.datetime_start).total_seconds())
    return list(rows.values())


def best_of(rows: list[Row], maximize: bool) -> Row | None:
    """Return the complete trial with the best value."""
    complete = [row for row in rows if row.state == "complete" and row.value is not None and not math.isnan(row.value)]
    return (max if maximize else min)(complete, key=lambda row: row.value or 0.0, default=None)


def read_plan(folder: Path) -> tuple[Config, dict[str, Any]]:
    """Read what a search was begun with: the config, and the arguments of `workers.Command`.

    Raises:
        FileNotFoundError: there is no search.
        ConfigError: the file was changed, and cannot be used.
    """
    path = folder / "sweep.json"
    if not path.exists():
        raise FileNotFoundError(f"{folder} is not the directory of a search: it has no sweep.json")
    data = read_json(path)
    try:
        plan = Section(data)
        config = make_config(Section(plan.take("config"), "config: ").entries)
        command = Section(plan.take("command", default={}), "command: ").entries
        plan.end()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return config, command
