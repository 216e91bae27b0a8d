"""Loggers for TensorBoard, Weights & Biases, Comet, MLflow and Trackio.

Each writes the records of steps as 'step/loss', 'step/lr' and so on, and the rows of the table under their columns.
"""

import os
import re
import secrets
import sys
import time
from importlib import import_module
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

from learnerkit import distributed
from learnerkit.files import name_or_path
from learnerkit.loggers.logger import Files, Record, Tracker, flat
from learnerkit.text import escaped_line, in_one_line
from learnerkit.utils import itself
from learnerkit.values import map_batch

_begun_here: set[str] = set()
"""The runs of services that loggers of this process have begun, which are open until they are closed or it ends."""

_EVENTS = "events.out.tfevents.*"
"""The pattern of the names of TensorBoard's files."""


class TensorBoardCallback(Tracker):
    """Writes event files for TensorBoard: `tensorboard --logdir runs` shows them.

    The smoothed loss, the rates and what `log_metric` is given are curves of the group 'step', the columns of the table
    curves of their own; hyper-parameters are a text. The step counts the training batches of the run. On several ranks
    steps have the values of rank 0, rows those of all.

    Files are closed at the end of each fit. A run that begins in a directory that has been used hides what was there,
    and one that goes on from a checkpoint what was written after that.

    Args:
        log_dir: a name inside `learn.path`/runs, by default the time; or a path, taken as it is.
        every: training batches between two records of steps.
        plots: give the recorder's plots to the tracker at the end of each fit.
        config: values of your own that are written with the hyper-parameters, such as `vars(args)`.
        log_model, log_files: other trackers take these; TensorBoard keeps no files, and refuses them.

    Raises:
        ImportError: tensorboard is not installed.
        TypeError, ValueError: arguments that cannot work.
    """

    def __init__(
        self, log_dir: str | Path | None = None, every: int = 1, plots: bool = False, config: Any = None,
        log_model: None = None, log_files: tuple[()] = (),
    ) -> None:  # fmt: skip
        super().__init__("tensorboard", "tensorboard", every, plots, config)
        if log_model or log_files:
            raise ValueError(
                "TensorBoardCallback takes no log_model and no log_files, as TensorBoard shows no files; learn.export "
                "writes the model"
            )
        if not isinstance(log_dir, str | Path | None):
            raise TypeError(f"got log_dir={log_dir!r}; it is a name inside learn.path/runs, or a path")
        self.log_dir = None if log_dir is None else name_or_path(log_dir, "learn.path/runs")

    def _open(self) -> Any:
        hidden_from = self._newest + 1 if self._goes_back else None
        if self._id is None:
            name = self.log_dir or f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(2)}"
            self._id = str(name if isinstance(name, Path) else self.learn.path / "runs" / name)
            hidden_from = 0
        elif self._goes_back and _has_row(self._id, self._newest):
            self._there = -1, self._newest  # the row of an epoch may come after a checkpoint of its last step
        self._native = _writer_of_last_file(self._id, hidden_from)
        return self._native

    def _write_config(self, config: dict[str, Any]) -> None:
        rows = [("name", "value"), ("---", "---"), *flat(config).items()]
        cells = ([escaped_line(str(cell)).replace("|", "\\|") for cell in row] for row in rows)
        table = [f"| {name} | {value} |" for name, value in cells]
        self._handle.add_text("hyper-parameters", "\n".join(table), 0)

    def _write(self, records: list[Record]) -> None:
        for record in records:
            for name, value in record.numbers().items():
                self._handle.add_scalar(name, value, record.step)
        self._handle.flush()

    def _write_figure(self, name: str, figure: Any) -> None:
        self._handle.add_figure(name, figure, self._newest, close=False)

    def _leave(self) -> None:
        self._handle.close()


def _writer_of_last_file(folder: str, purge_step: int | None) -> Any:
    """Return a writer of an event file whose name sorts after all others: TensorBoard reads them in that order.

    Names begin with the second in which a file was made, and go on with the process's number, and that of its file.
    """
    from torch.utils.tensorboard import SummaryWriter

    before = {*Path(folder).glob(_EVENTS)}
    parts = [path.name.split(".") for path in before]
    seconds = [int(second) for _, _, _, second, *rest in parts if second.isdigit() and str(os.getpid()) not in rest]
    _wait_until_after(seconds)
    writer = SummaryWriter(folder, purge_step=purge_step)
    new = {*Path(folder).glob(_EVENTS)} - before
    if before and max(new) < max(before):  # The file's number has another digit, and '10' sorts before '9'.
        writer.close()
        for path in new:
            path.unlink()
        _wait_until_after([int(time.time())])
        writer = SummaryWriter(folder, purge_step=purge_step)
    return writer


def _wait_until_after(seconds: list[int]) -> None:
    while seconds and 0 <= max(seconds) - int(time.time()) < 2:  # A clock may have been set back.
        time.sleep(0.02)


def _has_row(folder: str, step: int) -> bool:
    """Tell whether event files have the row of a step."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    return any(
        event.step == step and any(value.tag == "train_loss" for value in event.summary.value)
        for path in Path(folder).glob(_EVENTS)
        for event in EventFileLoader(str(path)).Load()
    )


class _Service(Tracker):
    """A tracker whose run stays open between fits; one that the user has opened is used, and not closed.

    Configs and files are written by the functions of Weights & Biases, which Trackio has, too.

    Args:
        every, plots, config, log_model, log_files: as in `Tracker`.
        init: for the function that begins a run.
    """

    _may_lose_config = True
    _package: str
    _extra: str

    def __init__(
        self, every: int = 10, plots: bool = False, config: Any = None, log_model: str | None = None,
        log_files: Files = (), **init: Any,
    ) -> None:  # fmt: skip
        super().__init__(self._package, self._extra, every, plots, config, log_model, log_files)
        self.init = init

    def _active(self) -> Any:
        """Return the run that is open in this process, or `None`."""
        raise NotImplementedError

    def _begin(self) -> Any:
        """Go on with the run `_id`; if that is `None`, begin one."""
        raise NotImplementedError

    def _end(self, run: Any) -> None:
        run.finish()

    def _there_of(self, run: Any) -> tuple[int, int]:
        """Return the last step and the last row of a run that goes on."""
        return -1, -1

    def _open(self) -> Any:
        run = self._active()
        if run is not None and run.id in _begun_here and run.id != self._id:
            self._end(run)
            run = None
        if run is None:
            run = self._begin()
            _begun_here.add(run.id)
        if self._goes_back and run.id == self._id:
            self._there = self._there_of(run)
        self._id, self._native = run.id, run
        return run

    def _write_config(self, config: dict[str, Any]) -> None:
        own = self._handle.config
        own.update({name: value for name, value in config.items() if name not in own})

    def _write_files(self, kind: str, files: dict[str, Path]) -> None:
        artifact = import_module(self._package).Artifact(f"{kind}-{self._id}", kind)
        for name, path in files.items():
            artifact.add_file(str(path), name)  # W&B copies the file now, and Trackio in the next line.
        self._handle.log_artifact(artifact)

    def close(self) -> None:
        """End the run, unless it is yours: the next fit begins another one."""
        if self._id in _begun_here and (run := self._active()) is not None and run.id == self._id:
            self._end(run)
        super().close()


class WandbCallback(_Service):
    """Logs to a run of Weights & Biases.

    A run that you have opened yourself (`wandb.init`) is used, and stays open. Otherwise one begins in the first fit,
    and goes on in the next ones. It ends by `close`, by the first fit of another `WandbCallback`, or with the process,
    of which W&B notes whether it has failed. After an error in a notebook it stays open, for the next fit.

    The metrics have 'step' as their axis, which counts the training batches of the run; names are as in TensorBoard.
    In a run that goes on from a checkpoint, W&B cannot drop what was logged after that: steps that it has are not sent
    again. In offline mode what it has is not known; both directories have these steps.

    Args:
        every: training batches between two records of steps.
        plots: give the recorder's plots to the tracker at the end of each fit.
        config: values of your own that are written with the hyper-parameters, such as `vars(args)`.
        log_model: the name for `learn.export` of the model that is logged at the end of each fit, whose suffix is the
            format: "model.safetensors", "model.pt2", "model.onnx".
        log_files: paths, or patterns such as "configs/*.yaml", of files that are logged at the end of each fit.
        init: for `wandb.init`: `project="digits"`, `mode="offline"`.

    Raises:
        ImportError: wandb is not installed.
        TypeError, ValueError: arguments that cannot work.
    """

    _package = _extra = "wandb"

    def _active(self) -> Any:
        import wandb

        return wandb.run

    def _begin(self) -> Any:
        import wandb

        known = {} if self._id is None else {"id": self._id, "resume": "allow"}
        return wandb.init(**self.init | known)

    def _there_of(self, run: Any) -> tuple[int, int]:
        last = int(run.summary.get("step") or 0)
        return last, last - 1  # the row of that step may not be there

    def _open(self) -> Any:
        run = super()._open()
        run.define_metric("step", hidden=True)
        self._charted = set[str]()
        return run

    def _write(self, records: list[Record]) -> None:
        for record in records:
            numbers = {name.replace("*", "_"): value for name, value in record.numbers().items()}  # * is a pattern
            for name in numbers.keys() - self._charted:
                self._handle.define_metric(name, step_metric="step")
            self._charted |= numbers.keys()
            self._handle.log({**numbers, "step": record.step})

    def _write_figure(self, name: str, figure: Any) -> None:
        import wandb

        self._handle.log({name: wandb.Image(figure), "step": self._newest})


class CometCallback(_Service):
    """Logs to an experiment of Comet.

    An experiment that you have started yourself (`comet_ml.start`) is used, and stays open. Otherwise one begins in the
    first fit, and goes on in the next ones. It ends by `close`, by the first fit of another `CometCallback`, or with
    the process. After an error in a notebook it stays open, for the next fit.

    Names and steps are as in TensorBoard. A run that goes on from a checkpoint goes on in the same experiment; offline
    in another archive with its key, while a process that was killed leaves its part in Comet's temporary folder. Comet
    cannot drop what was logged after the checkpoint, and has it twice.

    Args:
        every: training batches between two records of steps.
        plots: give the recorder's plots to the tracker at the end of each fit.
        config: values of your own that are written with the hyper-parameters, such as `vars(args)`.
        log_model: the name for `learn.export` of the model that is logged at the end of each fit, whose suffix is the
            format: "model.safetensors", "model.pt2", "model.onnx".
        log_files: paths, or patterns such as "configs/*.yaml", of files that are logged at the end of each fit.
        init: for `comet_ml.start`: `project_name="digits"`, `online=False`.

    Raises:
        ImportError: comet_ml is not installed.
        TypeError, ValueError: arguments that cannot work.
    """

    _package, _extra = "comet_ml", "comet"

    def _active(self) -> Any:
        import comet_ml

        return comet_ml.get_running_experiment()

    def _begin(self) -> Any:
        import comet_ml

        known = {} if self._id is None else {"experiment_key": self._id, "mode": "get_or_create"}
        return comet_ml.start(**self.init | known)

    def _end(self, run: Any) -> None:
        run.end()

    def _write_config(self, config: dict[str, Any]) -> None:
        self._handle.log_parameters(flat(config))

    def _write(self, records: list[Record]) -> None:
        for record in records:
            self._handle.log_metrics(record.numbers(), step=record.step)

    def _write_figure(self, name: str, figure: Any) -> None:
        self._handle.log_figure(name, figure, step=self._newest)

    def _write_files(self, kind: str, files: dict[str, Path]) -> None:
        for name, path in files.items():
            with path.open("rb") as file:  # Comet copies an open file, and uploads the copy later.
                if kind == "model":
                    self._handle.log_model(kind, file, file_name=name)
                else:
                    self._handle.log_asset(file, file_name=name)


class MLflowCallback(Tracker):
    """Logs to a run of MLflow, at `mlflow.get_tracking_uri()`.

    A run that is active (`mlflow.start_run`) is used, and stays so. Otherwise one begins in the first fit and is active
    in the fits alone, after each of which its status says how that ended: FINISHED, FAILED after an exception, KILLED
    after Ctrl-C or a signal. A process that is killed leaves it RUNNING.

    Names and steps are as in TensorBoard; characters that MLflow does not take become underscores. In a
    run that goes on from a checkpoint, MLflow cannot drop what was logged after that: steps that it has are not written
    again. If the server does not answer in mid-fit, training goes on with a warning, without those records.

    Args:
        experiment: its name; by default MLflow's own choice (`mlflow.set_experiment`, MLFLOW_EXPERIMENT_NAME).
        run_name: of a new run.
        every: training batches between two records of steps.
        plots: give the recorder's plots to the tracker at the end of each fit.
        config: values of your own that are written with the hyper-parameters, such as `vars(args)`.
        log_model: the name for `learn.export` of the model that is logged at the end of each fit, whose suffix is the
            format: "model.safetensors", "model.pt2", "model.onnx".
        log_files: paths, or patterns such as "configs/*.yaml", of files that are logged at the end of each fit.

    Raises:
        ImportError: mlflow is not installed.
        TypeError, ValueError: arguments that cannot work.
    """

    def __init__(
        self, experiment: str | None = None, run_name: str | None = None, every: int = 10, plots: bool = False,
        config: Any = None, log_model: str | None = None, log_files: Files = (),
    ) -> None:  # fmt: skip
        super().__init__("mlflow", "mlflow", every, plots, config, log_model, log_files)
        self.experiment, self.run_name = experiment, run_name

    @property
    def name(self) -> str:
        """The attribute of the learner: `learn.mlflow`."""
        return "mlflow"

    def _open(self) -> Any:
        import mlflow

        client, run = mlflow.MlflowClient(), mlflow.active_run()
        self._is_own = run is None
        if run is None:
            run = mlflow.start_run(self._id, self._experiment_id(client), None if self._id else self.run_name)
        if self._goes_back and self._id == run.info.run_id:
            self._there = _last_step(client, self._id, "step/lr"), _last_step(client, self._id, "train_loss")
        self._id, self._native = run.info.run_id, run
        return client

    def _experiment_id(self, client: Any) -> str | None:
        import mlflow

        if self.experiment is None or self._id is not None:
            return None
        experiment = client.get_experiment_by_name(self.experiment)
        if experiment is None:
            try:
                return str(client.create_experiment(self.experiment))
            except mlflow.MlflowException:  # Another process, such as a trial of a search, may have made it just now.
                experiment = client.get_experiment_by_name(self.experiment)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def _write_config(self, config: dict[str, Any]) -> None:
        from mlflow.entities import Param

        there = self._handle.get_run(self._id).data.params
        params = {_allowed(name): str(value)[:_LONGEST] for name, value in flat(config).items()}
        new = [Param(name, value) for name, value in params.items() if name not in there]  # they cannot be changed
        self._handle.log_batch(self._id, params=new)

    def _write(self, records: list[Record]) -> None:
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        now = round(1000 * time.time())
        metrics = [
            Metric(_allowed(name), float(value), now, record.step)
            for record in records
            for name, value in record.numbers().items()
        ]
        try:
            self._handle.log_batch(self._id, metrics)
        except MlflowException as e:
            distributed.warn_once(f"{self!r}: records are lost: {in_one_line(e)}")

    def _write_figure(self, name: str, figure: Any) -> None:
        self._handle.log_figure(self._id, figure, f"{_allowed(name)}-{self._newest}.png")

    def _write_files(self, kind: str, files: dict[str, Path]) -> None:
        for name, path in files.items():
            self._handle.log_artifact(self._id, str(path), PurePosixPath(kind, name).parent.as_posix())

    def _leave(self) -> None:
        import mlflow

        active = mlflow.active_run()
        if self._is_own and active is not None and active.info.run_id == self._id:
            error, status = sys.exception(), "FINISHED"
            if error is not None:
                status = "FAILED" if isinstance(error, Exception) else "KILLED"
            try:
                mlflow.end_run(status)
            except mlflow.MlflowException as e:
                distributed.warn_once(f"{self!r}: the run has no status, {status} could not be sent: {in_one_line(e)}")


class TrackioCallback(_Service):
    """Logs to a run of Trackio, which keeps it in a database of this machine: `trackio show` shows it.

    A run that you have opened yourself (`trackio.init`) is used, and stays open; it gets the hyper-parameters if
    nothing was logged to it before. Otherwise one begins in the first fit, and goes on in the next ones. It ends by
    `close`, by the first fit of another `TrackioCallback`, or with the process.

    Names and steps are as in TensorBoard. In a run that goes on from a checkpoint, Trackio cannot drop what was logged
    after that: steps that are in the database of this machine are not written again, those on a server are. Trackio
    writes twice a second: a process that is killed loses the last half second.

    Args:
        project: its name.
        every: training batches between two records of steps.
        plots: give the recorder's plots to the tracker at the end of each fit.
        config: values of your own that are written with the hyper-parameters, such as `vars(args)`.
        log_model: the name for `learn.export` of the model that is logged at the end of each fit, whose suffix is the
            format: "model.safetensors", "model.pt2", "model.onnx".
        log_files: paths, or patterns such as "configs/*.yaml", of files that are logged at the end of each fit.
        init: for `trackio.init`: `name="first"`, `group="small"`.

    Raises:
        ImportError: trackio is not installed.
        TypeError, ValueError: arguments that cannot work.
    """

    _package = _extra = "trackio"
    _state_names = (*_Service._state_names, "_named")

    def __init__(
        self, project: str, every: int = 10, plots: bool = False, config: Any = None, log_model: str | None = None,
        log_files: Files = (), **init: Any,
    ) -> None:  # fmt: skip
        super().__init__(every, plots, config, log_model, log_files, **{"project": project, "embed": False} | init)

    def _forget(self) -> None:
        super()._forget()
        self._named: dict[str, str] = {}  # project and name, by which Trackio finds a run

    def _active(self) -> Any:
        import trackio

        return trackio.context_vars.current_run.get()

    def _begin(self) -> Any:
        import trackio

        run = trackio.init(**self.init | (self._named | {"resume": "must"} if self._id else {}))
        if self._id not in (None, run.id):
            self._end(run)
            raise RuntimeError(
                f"{self!r}: the run {self._id} cannot go on, as {run.project} has a newer one of its name, "
                f"{run.name!r}, and Trackio finds a run by its name: rename that one"
            )
        return run

    def _end(self, run: Any) -> None:
        import trackio

        trackio.finish()

    def _there_of(self, run: Any) -> tuple[int, int]:
        from trackio.sqlite_storage import SQLiteStorage

        logs = SQLiteStorage.get_logs(run.project, run.name, run_id=run.id)
        step, row = (
            max((log["step"] for log in logs if name in log), default=-1) for name in ("step/lr", "train_loss")
        )
        return step, row

    def _open(self) -> Any:
        run = super()._open()
        self._named = {"project": run.project, "name": run.name}
        return run

    def _write_config(self, config: dict[str, Any]) -> None:
        def allowed(x: Any) -> Any:
            return str(x) if isinstance(x, int) and not -(2**63) <= x < 2**64 else x

        # Trackio's JSON has numbers of 64 bits, and a larger one would lose the whole run.
        super()._write_config({name: map_batch(itself, value, allowed) for name, value in config.items()})

    def _write(self, records: list[Record]) -> None:
        for record in records:
            self._handle.log(record.numbers(), step=record.step)

    def _write_figure(self, name: str, figure: Any) -> None:
        import trackio
        from PIL import Image

        with BytesIO() as file:
            figure.savefig(file, format="png")
            self._handle.log({name: trackio.Image(Image.open(file))}, step=self._newest)


def _last_step(client: Any, run: Any, name: str) -> int:
    return max((at.step for at in client.get_metric_history(run, name)), default=-1)


_LONGEST = 6000
"""The most characters of a parameter that MLflow takes."""


def _allowed(name: str) -> str:
    """Replace the characters of a name that MLflow does not allow, and leave out what is no path of at most 250."""
    parts = re.sub(r"[^\w\-. /]", "_", name).strip("/. ").split("/")
    return "/".join(part for part in parts if part.strip(". "))[:250] or "_"
