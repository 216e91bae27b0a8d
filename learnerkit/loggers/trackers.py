"""Loggers for TensorBoard, Weights & Biases, Comet and MLflow.

Each writes the records of steps as 'step/loss', 'step/lr' and so on, and the rows of the table under their columns.
"""

import os
import re
import secrets
import sys
import time
from pathlib import Path
from typing import Any

from learnerkit import world
from learnerkit.files import name_or_path
from learnerkit.loggers.logger import Record, Tracker, flat
from learnerkit.text import in_one_line

_begun_here: set[str] = set()
"""The runs of services that loggers of this process have begun, which are open until they are closed or it ends."""


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

    Raises:
        ImportError: tensorboard is not installed.
        TypeError, ValueError: arguments that cannot work.
    """

    _guarded = False

    def __init__(
        self, log_dir: str | Path | None = None, every: int = 1, plots: bool = False, config: Any = None
    ) -> None:
        super().__init__("tensorboard", "tensorboard", every, plots, config)
        if not isinstance(log_dir, str | Path | None):
            raise TypeError(f"got log_dir={log_dir!r}; it is a name inside learn.path/runs, or a path")
        self.log_dir = None if log_dir is None else name_or_path(log_dir, "learn.path/runs")

    def _open(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        hidden_from = self._newest + 1 if self._goes_back else None
        if self._id is None:
            name = self.log_dir or f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(2)}"
            self._id = str(name if isinstance(name, Path) else self.learn.path / "runs" / name)
            hidden_from = 0
        elif self._goes_back and _has_row(self._id, self._newest):
            self._there = -1, self._newest  # the row of an epoch may come after a checkpoint of its last step
        _wait_for_a_later_name(self._id)
        return SummaryWriter(self._id, purge_step=hidden_from)

    def _write_config(self, config: dict[str, Any]) -> None:
        rows = [(name, str(value).replace("|", "\\|")) for name, value in flat(config).items()]
        table = [f"| {name} | {value} |" for name, value in (("name", "value"), ("---", "---"), *rows)]
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


def _wait_for_a_later_name(folder: str) -> None:
    """Wait until a new event file's name sorts after those of other processes: TensorBoard reads them in that order.

    Names begin with the second in which a file was made, and go on with the process's number.
    """
    parts = [path.name.split(".") for path in Path(folder).glob("events.out.tfevents.*")]
    seconds = [int(second) for _, _, _, second, *rest in parts if second.isdigit() and str(os.getpid()) not in rest]
    while seconds and 0 <= max(seconds) - int(time.time()) < 2:  # none of a clock that was set back
        time.sleep(0.02)


def _has_row(folder: str, step: int) -> bool:
    """Tell whether event files have the row of a step."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    return any(
        event.step == step and any(value.tag == "train_loss" for value in event.summary.value)
        for path in Path(folder).glob("events.out.tfevents.*")
        for event in EventFileLoader(str(path)).Load()
    )


class WandbCallback(Tracker):
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
        init: for `wandb.init`: `project="digits"`, `mode="offline"`.

    Raises:
        ImportError: wandb is not installed.
        TypeError, ValueError: arguments that cannot work.
    """

    _guarded = False
    _may_lose_config = True

    def __init__(self, every: int = 10, plots: bool = False, config: Any = None, **init: Any) -> None:
        super().__init__("wandb", "wandb", every, plots, config)
        self.init = init
        self._charted: set[str] = set()

    def _open(self) -> Any:
        import wandb

        run = wandb.run
        if run is not None and run.id in _begun_here and run.id != self._id:
            run.finish()
            run = None
        if run is None:
            known = {} if self._id is None else {"id": self._id, "resume": "allow"}
            run = wandb.init(**self.init | known)
            _begun_here.add(run.id)
        if self._goes_back and run.id == self._id:
            last = int(run.summary.get("step") or 0)
            self._there = last, last - 1  # the row of that step may not be there
        self._id = run.id
        run.define_metric("step", hidden=True)
        self._charted = set()
        return run

    def _write_config(self, config: dict[str, Any]) -> None:
        own = self._handle.config
        own.update({name: value for name, value in config.items() if name not in own})

    def _write(self, records: list[Record]) -> None:
        for record in records:
            numbers = record.numbers()
            for name in numbers.keys() - self._charted:
                self._handle.define_metric(name, step_metric="step")
            self._charted |= numbers.keys()
            self._handle.log({**numbers, "step": record.step})

    def _write_figure(self, name: str, figure: Any) -> None:
        import wandb

        self._handle.log({name: wandb.Image(figure), "step": self._newest})

    def close(self) -> None:
        """End the run, unless it is yours: the next fit begins another one."""
        if self._id in _begun_here:
            import wandb

            if wandb.run is not None and wandb.run.id == self._id:
                wandb.run.finish()
        super().close()


class CometCallback(Tracker):
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
        start: for `comet_ml.start`: `project_name="digits"`, `online=False`.

    Raises:
        ImportError: comet_ml is not installed.
        TypeError, ValueError: arguments that cannot work.
    """

    _guarded = False
    _may_lose_config = True

    def __init__(self, every: int = 10, plots: bool = False, config: Any = None, **start: Any) -> None:
        super().__init__("comet_ml", "comet", every, plots, config)
        self.start = start

    def _open(self) -> Any:
        import comet_ml

        running = comet_ml.get_running_experiment()
        if running is not None and running.get_key() in _begun_here and running.get_key() != self._id:
            running.end()
            running = None
        if running is None:
            known = {} if self._id is None else {"experiment_key": self._id, "mode": "get_or_create"}
            running = comet_ml.start(**self.start | known)
            _begun_here.add(running.get_key())
        self._id = running.get_key()
        return running

    def _write_config(self, config: dict[str, Any]) -> None:
        self._handle.log_parameters(flat(config))

    def _write(self, records: list[Record]) -> None:
        for record in records:
            self._handle.log_metrics(record.numbers(), step=record.step)

    def _write_figure(self, name: str, figure: Any) -> None:
        self._handle.log_figure(name, figure, step=self._newest)

    def close(self) -> None:
        """End the experiment, unless it is yours: the next fit begins another one."""
        if self._id in _begun_here:
            import comet_ml

            running = comet_ml.get_running_experiment()
            if running is not None and running.get_key() == self._id:
                running.end()
        super().close()


class MLflowCallback(Tracker):
    """Logs to a run of MLflow, at `mlflow.get_tracking_uri()`.

    A run that is active (`mlflow.start_run`) is used, and stays so. Otherwise one begins in the first fit and is active
    in the fits alone, after each of which its status says how that ended: FINISHED, FAILED after an exception, KILLED
    after Ctrl-C or a signal. A process that is killed leaves it RUNNING.

    Names and steps are as in TensorBoard, but for characters that MLflow does not take, which become underscores. In a
    run that goes on from a checkpoint, MLflow cannot drop what was logged after that: steps that it has are not written
    again. If the server does not answer in mid-fit, training goes on with a warning, without those records.

    Args:
        experiment: its name; by default MLflow's own choice (`mlflow.set_experiment`, MLFLOW_EXPERIMENT_NAME).
        run_name: of a new run.
        every: training batches between two records of steps.
        plots: give the recorder's plots to the tracker at the end of each fit.
        config: values of your own that are written with the hyper-parameters, such as `vars(args)`.

    Raises:
        ImportError: mlflow is not installed.
        TypeError, ValueError: arguments that cannot work.
    """

    _guarded = False

    def __init__(
        self, experiment: str | None = None, run_name: str | None = None, every: int = 10, plots: bool = False,
        config: Any = None,
    ) -> None:  # fmt: skip
        super().__init__("mlflow", "mlflow", every, plots, config)
        self.experiment, self.run_name = experiment, run_name
        self._is_own = False

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
        self._id = run.info.run_id
        return client

    def _experiment_id(self, client: Any) -> str | None:
        if self.experiment is None or self._id is not None:
            return None
        found = client.get_experiment_by_name(self.experiment)
        return str(client.create_experiment(self.experiment) if found is None else found.experiment_id)

    def _write_config(self, config: dict[str, Any]) -> None:
        from mlflow.entities import Param

        there = self._handle.get_run(self._id).data.params
        params = {_allowed(name): str(value)[:_LONGEST] for name, value in flat(config).items()}
        new = [Param(name, value) for name, value in params.items() if name not in there]  # they cannot be changed
        for i in range(0, len(new), _PARAMS):
            self._handle.log_batch(self._id, params=new[i : i + _PARAMS])

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
            for i in range(0, len(metrics), _METRICS):
                self._handle.log_batch(self._id, metrics[i : i + _METRICS])
        except MlflowException as e:
            world.warn_once(f"{self!r}: records up to step {records[-1].step} are lost: {in_one_line(e)}")

    def _write_figure(self, name: str, figure: Any) -> None:
        self._handle.log_figure(self._id, figure, f"{_allowed(name)}-{self._newest}.png")

    def _leave(self) -> None:
        import mlflow

        active = mlflow.active_run()
        if self._is_own and active is not None and active.info.run_id == self._id:
            error = sys.exception()
            mlflow.end_run("FINISHED" if error is None else "FAILED" if isinstance(error, Exception) else "KILLED")


def _last_step(client: Any, run: Any, name: str) -> int:
    return max((at.step for at in client.get_metric_history(run, name)), default=-1)


_METRICS, _PARAMS, _LONGEST = 1000, 100, 6000
"""MLflow takes so many metrics and parameters at a time, and so many characters of a parameter."""


def _allowed(name: str) -> str:
    """A name as MLflow allows it."""
    return re.sub(r"[^\w\-. /]", "_", name).strip("/. ") or "_"
