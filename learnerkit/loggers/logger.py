"""The base of all loggers: which numbers are written, when, and how a run goes on in the next fit or after a kill."""

import os
from collections.abc import Callable, Iterable, Mapping
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, NamedTuple

import torch

from learnerkit import __version__, arguments, distributed
from learnerkit.callbacks.training import NamedState
from learnerkit.checkpoints.state import configuration
from learnerkit.data.show import pyplot
from learnerkit.files import plain_name
from learnerkit.host_scalars import HostScalars, WeighedScalars
from learnerkit.loggers.facts import code, fingerprint
from learnerkit.marks import not_collective
from learnerkit.state import Learner, State
from learnerkit.text import in_one_line
from learnerkit.utils import unwrap, warn

_SECONDS = 1.0  # between two writes in an epoch


Files = str | Path | Iterable[str | Path]
"""Paths of files, or patterns."""


class Record(NamedTuple):
    """The values to write for one step.

    Attributes:
        step: training batches since the run began.
        values: numbers by name; in a row of the table also texts.
        is_row: whether it is a row of the table.
    """

    step: int
    values: dict[str, Any]
    is_row: bool

    def numbers(self) -> dict[str, float]:
        """Return the numbers by the names that trackers have for them: 'step/loss' of a step, 'valid_loss' of a row."""
        before = "" if self.is_row else "step/"
        return {f"{before}{name}": value for name, value in self.values.items() if isinstance(value, int | float)}


class _Note(NamedTuple):
    """A record that waits to be written, as its loss and logged values may not be on the host yet.

    Attributes:
        record: what is known of it.
        losses: how many losses of the fit there are up to it; 0 for a row of the table.
        logged: for each name, the range of the epoch's logged values whose mean is taken.
    """

    record: Record
    losses: int = 0
    logged: dict[str, tuple[int, int]] = {}


class Logger(NamedState):
    """The base of all loggers: a subclass says how a run is opened, written to and left.

    A run begins in the first fit and goes on in the next ones, until `close`. A run that `CheckpointCallback` continues
    goes on in the same run of the logger; what was written after the checkpoint is not there twice.

    Args:
        every: training batches between two records; `None`: only rows of the table.
        config: a mapping with values of your own that are written beside the hyper-parameters, or an object with
            attributes, such as `argparse` and `sweep.params` make.

    Raises:
        TypeError, ValueError: arguments that cannot work; in `before_fit`, there is no Recorder.
    """

    order = 51
    only_fit = True
    rank0_only = True
    run_valid = False
    _may_lose_config = False  # if the process is killed: then it is written again
    _state_names: tuple[str, ...] = ("_id", "_before", "_newest", "_written", "_seen", "_rows", "_noted")
    _handle: Any = None  # the result of `_open`; never in the state, as files and connections cannot be sent

    def __init__(self, every: int | None, config: Any = None) -> None:
        if every is not None:
            arguments.check_count("every", every, "a number of training batches")
        self.every, self.config = every, _as_dict(config)
        self._pending: list[_Note] = []
        self._rows = self._noted = 0  # the rows and batches of this fit that are noted
        self._next = 0.0  # the time of the next write
        self._forget()

    def _forget(self) -> None:
        self._id: str | None = None  # the id of the run; `None` before it begins
        self._before = 0  # training batches of the run's earlier fits
        self._newest = self._written = 0  # the last step, and the number of records
        self._there = -1, -1  # the last step, and the last row, that cannot be dropped
        self._goes_back = False  # there may be records after `_newest`, of a process that was killed
        self._seen: dict[str, int] = {}  # how many of the epoch's logged values there are notes of

    # What a subclass defines

    def _open(self) -> Any:
        """Begin the run if `_id` is `None`, and set it; else go on with that run. Return what is needed to write."""
        raise NotImplementedError

    def _write_config(self, config: dict[str, Any]) -> None:
        """Write the hyper-parameters of a run that begins."""

    def _write(self, records: list[Record]) -> None:
        """Write records, so that they stay if this process is killed."""
        raise NotImplementedError

    def _leave(self) -> None:
        """Release what `_open` returned, at the end of each fit. The run may go on in the next one."""

    # The hooks

    def before_fit(self) -> None:
        if not hasattr(self.learn, "recorder"):
            raise ValueError(
                f"{self!r} writes what the Recorder records, and this learner has none (default_cbs=False): add "
                "Recorder() to its callbacks"
            )

    def before_epoch(self) -> None:
        learn = self.learn
        self._rows, self._noted = len(learn.recorder.values), len(learn.recorder.lrs)
        self._next = 0.0
        if learn.train_iter == 0 or learn.epoch > learn.start_epoch:
            self._use()  # Otherwise the first batch does, since a checkpoint may be loaded before it.

    def before_train(self) -> None:
        self._seen = {}

    def after_batch(self) -> None:
        self._note_row()
        if self.every and not self._steps() % self.every:
            self._note_step()
        if monotonic() >= self._next:
            self._write_notes()

    def after_train(self) -> None:
        """Write all of this epoch's steps. A host-device sync, once an epoch."""
        self._note_row()
        if self.every:
            self._note_step()
        self._write_notes(wait=True)

    after_cancel_epoch = after_cancel_fit = after_train

    def after_epoch(self) -> None:
        self._note_row()
        self._write_notes()

    def cleanup_fit(self) -> None:
        try:
            if self._handle is not None:
                self._note_row()
                self._write_notes()  # After an error this does not wait for the device.
        finally:
            self._pending.clear()
            if hasattr(self.learn, "recorder"):  # else `before_fit` has refused
                self._before += len(self.learn.recorder.lrs)
            self._release()

    # Notes, and records made of them

    def _note_row(self) -> None:
        """Note the newest row of the table, if it is new."""
        recorder = self.learn.recorder
        if len(recorder.values) > self._rows:
            self._rows, self._next = len(recorder.values), 0.0
            row = dict(zip(recorder.metric_names, recorder.log, strict=True))
            self._pending.append(_Note(Record(self._before + recorder.iters[-1], row, is_row=True)))

    def _steps(self) -> int:
        """Return the steps of this fit; on several ranks without those of the epoch that may not stay in the recorder.

        These are what this rank has cancelled, and an empty batch at the end of a loader without length.
        """
        recorder = self.learn.recorder
        return len(recorder.lrs) - recorder._train.loss.n_cancelled

    def _note_step(self) -> None:
        """Note the rates of the last step, and the numbers of losses and logged values, if they are new.

        It never waits for the device.
        """
        recorder, seen = self.learn.recorder, self._seen
        step, at = self._steps(), len(recorder.lrs)
        if step <= self._noted:
            return
        rates = {"lr": recorder.lrs[-1]}
        rates |= {name: values[at - 1] for name, values in recorder.hps.items() if len(values) >= at}
        now = {name: len(logged.values) for name, logged in recorder.logged.items()}
        if taken := now.keys() & {"step", "loss", *rates}:
            raise ValueError(
                f"log_metric got {min(taken)!r}, which {self!r} writes for each step itself; choose another name"
            )
        logged = {name: (seen.get(name, 0), end) for name, end in now.items() if end > seen.get(name, 0)}
        self._pending.append(_Note(Record(self._before + step, rates, is_row=False), at, logged))
        self._seen, self._noted = now, step

    def _write_notes(self, wait: bool = False) -> None:
        """Write the notes whose values are on the host; `wait`: all of them, which is a host-device sync."""
        self._next = monotonic() + _SECONDS
        self._use()
        if not self._pending:
            return
        recorder = self.learn.recorder
        losses = recorder.losses if wait else recorder.recent_losses()
        read = HostScalars.all if wait else HostScalars.poll
        logged = {name: (read(each.values), read(each.weights)) for name, each in recorder.logged.items()}
        records = []
        for record, n_losses, spans in self._pending:
            have_come = [end <= min(map(len, logged.get(name, ((),)))) for name, (_, end) in spans.items()]
            if not (wait or (n_losses <= len(losses) and all(have_come))):
                break
            means = {name: _mean(logged.get(name, ([], [])), *span) for name, span in spans.items()}
            loss = {"loss": losses[n_losses - 1]} if 0 < n_losses <= len(losses) else {}
            records.append(record._replace(values={**loss, **record.values, **means}))
        del self._pending[: len(records)]
        new = [record for record in records if record.step > self._there[record.is_row]]
        if new:
            self._write(new)
            self._newest = new[-1].step

    # The run

    def _use(self) -> None:
        """Open the run if it is not open."""
        if self._handle is None:
            before, goes_on = self._id, self._goes_back
            self._handle = self._open()
            self._goes_back = False
            writes = type(self)._write_config is not Logger._write_config  # git and the fingerprints may take seconds
            if writes and (self._id != before or (goes_on and self._may_lose_config)):
                self._write_config(_hyper_parameters(self.learn) | self.config)

    def _release(self) -> None:
        if self._handle is not None:
            try:
                self._leave()
            finally:
                self._handle = None

    def close(self) -> None:
        """End the run: the next fit begins another one. It need not be called at the end of a script."""
        self._release()
        self._forget()

    def state_dict(self) -> State:
        """Return the run, if it has begun, and the last step, once all up to it is written. A host-device sync."""
        if self._handle is not None:  # In `before_fit` it is not open, and there are no new values.
            self._note_row()
            self._write_notes(wait=True)
        return super().state_dict()

    def load_state_dict(self, state: State) -> None:
        """Go on in the run after the last step that was written before the checkpoint."""
        if state["_id"] is None:
            return  # it had not begun
        if self._handle is None or self._newest > state["_newest"]:
            self._release()
            self._goes_back = True
        super().load_state_dict(state)

    def __getstate__(self) -> State:
        return {name: value for name, value in vars(self).items() if name != "_handle"}


class Tracker(Logger):
    """A logger that shows numbers in a viewer or at a service, and takes figures and files too.

    Args:
        package: the package that it needs.
        extra: the extra of learnerkit that installs the package.
        every, config: as in `Logger`.
        plots: give the recorder's plots to the tracker at the end of each fit.
        log_model: the name for `learn.export` of the model that the tracker gets at the end of each fit; its suffix is
            the format.
        log_files: paths, or patterns such as 'configs/*.yaml', of files that the tracker gets at the end of each fit.

    Raises:
        ImportError: the package is not installed.
        TypeError, ValueError: arguments that cannot work.
    """

    def __init__(
        self, package: str, extra: str, every: int, plots: bool, config: Any, log_model: str | None = None,
        log_files: Files = (),
    ) -> None:  # fmt: skip
        super().__init__(every, config)
        self.plots = plots
        if log_model is not None and not (isinstance(log_model, str) and log_model.endswith(_FORMATS)):
            raise ValueError(
                f"got log_model={log_model!r}; it is a name for learn.export, with a suffix: 'model.safetensors', "
                "'model.pt2' or 'model.onnx'"
            )
        self.log_model = log_model and plain_name(log_model, "the tracker's run")
        self.log_files = [log_files] if isinstance(log_files, str | Path) else list(log_files)
        self._has_ended = False
        if getattr(find_spec(package), "origin", None) is None:  # A folder, such as W&B makes, is no package.
            raise ImportError(f"{self!r} needs {package}: pip install 'learnerkit[{extra}]'")
        if plots:
            pyplot(f"{self!r}(plots=True)")

    def _forget(self) -> None:
        super()._forget()
        self._native: Any = None  # the tracker's object of the run

    @property
    def run_id(self) -> str | None:
        """The tracker's name of the run, on rank 0, from the first fit to `close`; else `None`."""
        return self._id

    @property
    def run(self) -> Any:
        """The tracker's own object of the run, on rank 0 and in this process, once it has begun; else, as in every
        callback, whether this one acts."""
        return vars(self).get("run", True) and (self._native or True)

    @run.setter
    def run(self, acts: bool) -> None:
        vars(self)["run"] = acts

    def after_fit(self) -> None:
        self._has_ended = True
        recorder = self.learn.recorder
        if self.plots and recorder.lrs:
            self._log_plot("plots/loss", recorder.plot_loss())
            self._log_plot("plots/schedule", recorder.plot_sched()[0])

    def cleanup_fit(self) -> None:
        try:
            if self._has_ended and self._handle is not None:  # now other callbacks have put the last weights in place
                self._send_files()
        finally:
            self._has_ended = False
            super().cleanup_fit()

    @not_collective("rank 0 alone has a run of the tracker's")
    def _send_files(self) -> None:
        """Give the tracker the model and the files. What fails is a warning, as the training is done."""
        with TemporaryDirectory() as folder:
            if self.log_model is not None and self.learn.shards is not None:
                warn(f"{self!r} has not logged the model, which is divided among the ranks: let all call learn.export")
            elif self.log_model is not None:
                path = Path(folder, self.log_model)
                self._try_to_send("model", lambda: {path.name: Path(str(self.learn.export(path)))})
            if self.log_files:
                self._try_to_send("files", lambda: _matching(self.log_files))

    def _try_to_send(self, kind: str, files: Callable[[], dict[str, Path]]) -> None:
        try:
            self._write_files(kind, files())
        except Exception as e:
            warn(f"{self!r} has not logged the {kind}: {in_one_line(e)}")

    def _log_plot(self, name: str, ax: Any) -> None:
        try:
            self.log_figure(name, ax.figure)
        finally:
            pyplot("plots").close(ax.figure)

    @distributed.on_rank0
    def log_figure(self, name: str, figure: Any) -> None:
        """Give a figure of matplotlib to the tracker, as one of the last step. Other ranks than 0 do nothing.

        Args:
            name: the name under which it is shown.
            figure: it stays open.

        Raises:
            RuntimeError: the run has not begun; it does in the first fit.
        """
        if self._id is None:
            raise RuntimeError(f"{self!r} has no run yet: one begins in the first fit; log the figure there or later")
        in_fit = self._handle is not None
        self._use()
        try:
            self._write_figure(name, figure)
        finally:
            if not in_fit:
                self._release()

    def _write_figure(self, name: str, figure: Any) -> None:
        """Write a figure."""
        raise NotImplementedError

    def _write_files(self, kind: str, files: dict[str, Path]) -> None:
        """Write files, by the names that they get; they may be gone afterwards. `kind` is 'model' or 'files'."""
        raise NotImplementedError

    def __getstate__(self) -> State:
        return super().__getstate__() | {"_native": None}


def _matching(patterns: list[str | Path]) -> dict[str, Path]:
    """Return the files that paths and patterns name, by their paths below the current directory, or by their names."""
    by_name: dict[str, Path] = {}
    here = Path.cwd()
    for pattern in patterns:
        # A path may have brackets, which are signs of a pattern, too.
        names = [str(pattern)] if os.path.isfile(pattern) else glob(str(pattern), recursive=True)
        paths = [Path(os.path.abspath(name)) for name in names]  # without '..'
        files = [path for path in paths if path.is_file()]
        if not files:
            warn(f"log_files: there is no file {str(pattern)!r}")
        for path in files:
            name = path.relative_to(here).as_posix() if path.is_relative_to(here) else path.name
            if by_name.setdefault(name, path) != path:
                warn(f"log_files: {path} is not logged, as {by_name[name]} has the name {name!r}; give it another name")
    return by_name


_FORMATS = (".safetensors", ".pt2", ".onnx")
"""The suffixes of `learn.export`."""


def _mean(logged: tuple[list[float], list[float]], start: int, end: int) -> float:
    """Return the mean of a range of values with their weights, as the table has it of a whole epoch."""
    some = WeighedScalars()
    some.extend(*(part[start:end] for part in logged))
    total, count = some.sums()
    return total / count if count else float("nan")


def _as_dict(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        if isinstance(config, type) or not hasattr(config, "__dict__"):
            raise TypeError(
                f"got config={config!r}; it is a mapping, or an object with attributes such as argparse makes"
            )
        config = vars(config)
    return {str(name): value for name, value in config.items()}


def _hyper_parameters(learn: "Learner") -> dict[str, Any]:
    """Return the settings with which a fit was started, as nested plain values. Needs no communication."""
    values = configuration(learn)
    for name, dl in zip(("train", "valid"), learn.dls.loaders[:2], strict=True):
        if dl is not None:
            values[name]["data"] = fingerprint(getattr(dl, "dataset", dl))
    return values | {
        "parameters": sum(p.numel() for p in unwrap(learn.model).parameters()),
        "ranks": learn.n_ranks,
        "effective_batch_size": learn.effective_batch_size,
        "versions": values["versions"] | {"learnerkit": __version__},
        "seed": torch.initial_seed(),
        "code": code(),
    }


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Flatten nested values, with names such as 'groups.0.lr'."""
    flattened: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            value = {str(i): item for i, item in enumerate(value)}
        inner = isinstance(value, Mapping)
        flattened |= flat(value, f"{before}{name}.") if inner else {f"{before}{name}": value}
    return flattened
