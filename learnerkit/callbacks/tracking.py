"""Callbacks that watch a column of the table, or the loss: keep the best model, lower the rate, stop the fit."""

import math
import operator
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from learnerkit import arguments, world
from learnerkit.callback import Callback
from learnerkit.callbacks.recorder import check_monitor, monitored
from learnerkit.callbacks.schedule import check_nobody_schedules
from learnerkit.callbacks.training import StepBudget, StepCounter
from learnerkit.events import CancelException, CancelFitException
from learnerkit.files import plain_name
from learnerkit.host_scalars import HostScalars
from learnerkit.utils import warn

_LESS_IS_BETTER = re.compile(
    r"loss|error|perplexity|(?<![a-z0-9])(mse|rmse|mae|mape|nll|ppl|wer|cer)(?![a-z0-9])", re.IGNORECASE
)


_COMPARES = (
    "it is a function of (value, best) that says whether the value is better, such as operator.lt or numpy.greater"
)


class TrackerCallback(Callback):
    """Follows one column of the table and knows its best value: the base of the callbacks that act on it.

    A NaN is never the best. A row without the column is passed over, as a callback may log only now and then; a fit
    whose rows all lack it ends with a warning.

    Args:
        monitor: the column: 'train_loss', 'valid_loss', a metric, or what a callback logs and declares in its `logs`.
        comp: f(value, best) says whether the value is better: `operator.lt`, `numpy.greater`. By default less is
            better if the name contains 'loss', 'error' or 'perplexity', or if one of its words is 'mse', 'rmse',
            'mae', 'mape', 'nll', 'ppl', 'wer' or 'cer' (as in 'valid_rmse'); else more is.
        min_delta: only what is better than the best by more than this is a new best; positive in either direction.
        reset_on_fit: whether each fit has a best of its own; otherwise it goes on from one fit to the next.

    Attributes:
        best: the best value so far, and before there is one, infinity: with the sign that makes any number better.
        new_best: whether the last row had it.

    Raises:
        TypeError, ValueError: arguments that cannot work; in `before_fit` a column that no row will have.
    """

    order = 60
    only_fit = True

    def __init__(
        self,
        monitor: str = "valid_loss",
        comp: Callable[[Any, Any], Any] | None = None,
        min_delta: float = 0.0,
        reset_on_fit: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(monitor, str):
            raise TypeError(f"got monitor={monitor!r}; it is the name of a column of the table, such as 'valid_loss'")
        if not min_delta >= 0:
            raise ValueError(f"got min_delta={min_delta}; it is 0 or more, also where less is better")
        if comp is not None and not callable(comp):
            raise TypeError(f"got comp={comp!r}; {_COMPARES}")
        self.monitor, self.min_delta, self.reset_on_fit = monitor, min_delta, reset_on_fit
        self.comp = comp or (operator.lt if _LESS_IS_BETTER.search(monitor) else operator.gt)
        less, more = bool(self.comp(0.0, 1.0)), bool(self.comp(1.0, 0.0))
        if less == more:
            raise ValueError(f"got comp={comp!r}, which prefers neither 0 to 1 nor 1 to 0, or both; {_COMPARES}")
        self._sign = -1 if less else 1
        self.best, self.new_best = -self._sign * math.inf, False
        self._rows = self._heeded = 0

    def before_fit(self) -> None:
        check_monitor(self.learn, self.monitor)
        if self.reset_on_fit:
            self.best = -self._sign * math.inf
        self.new_best, self._rows, self._heeded = False, 0, 0

    def after_epoch(self) -> None:
        self.take_row()

    def take_row(self) -> bool:
        """Heed the newest row of the recorder; all that a tracker does about a row, it does here.

        Called at the end of an epoch, and by whoever adds a row in mid-epoch. Rows are alike on all ranks, so that all
        ranks decide alike.

        Returns:
            Whether the row has the column.
        """
        value = monitored(self.learn, self.monitor)
        self._rows += 1
        self.new_best = False
        if value is None:
            return False
        self._heeded += 1
        if not math.isnan(value) and self.comp(value - self._sign * self.min_delta, self.best):
            self.best, self.new_best = value, True
        return True

    def after_fit(self) -> None:
        if self._rows and not self._heeded and world.is_main():
            warn(f"{self!r} had nothing to go by: none of the fit's {self._rows} rows has a column {self.monitor!r}")


class SaveModelCallback(TrackerCallback):
    """Saves the best model, and loads it at the end of the fit; or saves every epoch's, or the last.

    Rank 0 writes, all ranks load; those on machines that do not see the file get it from rank 0. If the fit had no
    best (all NaN, or no epoch) nothing is loaded. With `reset_on_fit=False` the best of an earlier fit is loaded if no
    row of this one is better.

    Args:
        monitor, comp, min_delta, reset_on_fit: as in `TrackerCallback`.
        fname: the file, as in `Learner.save`.
        every_epoch: save `fname_<epoch>` after each epoch instead (of a number n, after each n-th, the first one
            included), whatever is monitored, and load nothing.
        at_end: save `fname` at the end, in the place of the best, and load nothing.
        with_opt: save, and load, the optimizer's state too.

    Attributes:
        last_saved_path: the file that was written last.

    Raises:
        ValueError: in `before_fit`, another one of the learner writes to the same file.
    """

    order = 61

    def __init__(
        self,
        monitor: str = "valid_loss",
        comp: Callable[[Any, Any], Any] | None = None,
        min_delta: float = 0.0,
        fname: str | Path = "model",
        every_epoch: bool | int = False,
        at_end: bool = False,
        with_opt: bool = False,
        reset_on_fit: bool = True,
    ) -> None:
        super().__init__(monitor, comp, min_delta, reset_on_fit)
        if not isinstance(every_epoch, int) or every_epoch < 0:
            raise ValueError(f"got every_epoch={every_epoch!r}; it is True, False or a number of epochs")
        self.fname = fname if isinstance(fname, Path) else plain_name(fname).removesuffix(".pth")
        self.every_epoch, self.at_end, self.with_opt = every_epoch, at_end, with_opt
        self.last_saved_path: Path | None = None
        self._best_path: Path | None = None  # the file of `best`

    def before_fit(self) -> None:
        if not self.every_epoch:
            super().before_fit()
        if self.reset_on_fit:
            self._best_path = None
        mine, others = self._overwrites(), [cb for cb in self.learn.cbs if isinstance(cb, SaveModelCallback)]
        if mine and any(cb is not self and cb._overwrites() == mine for cb in others):
            raise ValueError(
                f"two callbacks {self!r} save to {mine}, and would overwrite each other's models; give them different "
                "`fname`s"
            )

    def _overwrites(self) -> object:
        "The file that it writes more than once or at the end, if it takes part."
        return self.learn._file(self.fname) if self.run and (self.at_end or not self.every_epoch) else None

    def after_epoch(self) -> None:
        if not self.every_epoch:
            self.take_row()
        elif self.learn.epoch % self.every_epoch == 0:
            file, end = self.fname, f"_{self.learn.epoch}"
            self._save(file.with_stem(file.stem + end) if isinstance(file, Path) else file + end)

    def take_row(self) -> bool:
        """Save the model if the newest row is the best."""
        found = not self.every_epoch and super().take_row()
        if found and self.new_best:
            self._best_path = self._save(self.fname)
        return found

    def after_fit(self) -> None:
        super().after_fit()
        if self.at_end:
            self._save(self.fname)
            self._best_path = None
        elif self._best_path is not None and not self.every_epoch:
            self._load_best(self._best_path)
            self.learn.say(f"loaded the best model ({self.monitor} {self.best:.6g}) from {self._best_path}")

    def _load_best(self, path: Path) -> None:
        "Every rank must reach this."
        seen = world.all_gather(_version(path)) if self.learn._sharded else []
        with ExitStack() as stack:
            if len(set(seen)) > 1:  # a machine has no such file, or one of its own
                content = world.broadcast(path.read_bytes() if world.is_main() else b"")
                if seen[world.rank()] != seen[0]:
                    path = Path(stack.enter_context(TemporaryDirectory())) / path.name
                    path.write_bytes(content)
            self.learn.load(path, with_opt=self.with_opt)

    def _save(self, file: str | Path) -> Path:
        saved: Any = self.learn.save(file, with_opt=self.with_opt)  # never an open file
        self.last_saved_path = saved
        return saved


def _version(path: Path) -> tuple[int, int] | None:
    """What tells a file from an older one of the same name."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_size, facts.st_mtime_ns


class _PatientCallback(TrackerCallback):
    """A tracker that loses patience after some rows without a new best."""

    def __init__(
        self,
        monitor: str = "valid_loss",
        comp: Callable[[Any, Any], Any] | None = None,
        min_delta: float = 0.0,
        patience: int = 1,
        reset_on_fit: bool = True,
    ) -> None:
        super().__init__(monitor, comp, min_delta, reset_on_fit)
        arguments.check_count("patience", patience, "a number of rows without a new best")
        self.patience, self.wait = patience, 0

    def before_fit(self) -> None:
        super().before_fit()
        self.wait = 0

    def take_row(self) -> bool:
        """Count the rows without a new best, and act after `patience` of them."""
        found = super().take_row()
        if found:
            self.wait = 0 if self.new_best else self.wait + 1
        if self.wait >= self.patience:
            self.wait, rows = 0, f"{self.wait} row{'s' if self.wait > 1 else ''}"
            epoch = self.learn.recorder.log[0]
            self._give_up(f"epoch {epoch}: no better {self.monitor} than {self.best:.6g} in {rows}")
        return found

    def _give_up(self, why: str) -> None:
        raise NotImplementedError


class EarlyStoppingCallback(_PatientCallback):
    """Ends the fit after `patience` rows without a new best, and says so.

    Args:
        monitor, comp, min_delta, reset_on_fit: as in `TrackerCallback`.
        patience: rows: epochs, and what `ValidateEvery` adds.
    """

    order = 63

    def _give_up(self, why: str) -> None:
        self.learn.say(f"{why}: stopping")
        raise CancelFitException


class ReduceLROnPlateau(_PatientCallback):
    """Divides the learning rate of every group after each `patience` rows without a new best, and says so.

    The next fit sets its own rates at its start.

    Args:
        monitor, comp, min_delta, reset_on_fit: as in `TrackerCallback`.
        patience: rows: epochs, and what `ValidateEvery` adds.
        factor: what rates are divided by.
        min_lr: no rate is made less than this.

    Raises:
        ValueError: arguments that cannot work; in `before_fit` also a schedule of the rate.
    """

    order = 62

    def __init__(
        self,
        monitor: str = "valid_loss",
        comp: Callable[[Any, Any], Any] | None = None,
        min_delta: float = 0.0,
        patience: int = 1,
        factor: float = 10.0,
        min_lr: float = 0.0,
        reset_on_fit: bool = True,
    ) -> None:
        super().__init__(monitor, comp, min_delta, patience, reset_on_fit)
        if not factor > 1:
            raise ValueError(f"got factor={factor}; rates are divided by it, so it is more than 1")
        if not min_lr >= 0:
            raise ValueError(f"got min_lr={min_lr}; it is 0 or more")
        self.factor, self.min_lr = factor, min_lr

    def before_fit(self) -> None:
        super().before_fit()
        check_nobody_schedules(self.learn, "ReduceLROnPlateau")

    def _give_up(self, why: str) -> None:
        before, after = dict[str, None](), dict[str, None]()
        for group in (group for opt in self.learn.opts for group in opt.param_groups):
            lr = float(group["lr"])  # of a tensor on a device a sync, but seldom
            lower = max(lr / self.factor, min(lr, self.min_lr))  # a rate below the limit is not raised to it
            before[f"{lr:.4g}"] = after[f"{lower:.4g}"] = None  # each once, in order
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lower)
            else:
                group["lr"] = lower
        if list(before) != list(after):
            self.learn.say(f"{why}: learning rate {', '.join(before)} -> {', '.join(after)}")


# By the loss

_POLL = 4  # batches between two looks at what has arrived from an accelerator


class TerminateOnNaNCallback(Callback):
    """Ends the fit when a training loss is NaN or infinite, and says which.

    On CPU that is before the backward pass, so that the weights are still those of the step before. On an accelerator
    it is some steps later, once the loss has arrived on the host, which does not wait for it except at the end of an
    epoch's training. Under DDP all ranks leave together, and rank 0 names the rank whose loss it was.
    """

    order = -9
    run_valid = False
    only_fit = True

    def __init__(self) -> None:
        super().__init__()
        self._begin()

    def _begin(self) -> None:
        self._found: tuple[int, int, int, float] | None = None  # epoch, step, rank, loss
        self._forget()

    def _forget(self) -> None:
        self._losses, self._looked = HostScalars(), 0
        self._places: list[tuple[int, int]] = []  # epoch and step of each loss

    def before_fit(self) -> None:
        self._begin()

    def before_backward(self) -> None:
        learn, count = self.learn, self.learn._loss_count
        weighed, on_host = learn._gradient is not None, _is_on_host(count)
        if weighed and on_host and not count:
            return  # the mean of nothing may be a NaN, and counts nothing; unweighed it would spoil the weights
        place = learn.epoch, learn.iter
        for loss in (learn.loss, learn.loss_grad):  # recorded and differentiated: a callback may change either
            if loss is None:
                continue
            if _is_on_host(loss):
                self._check(loss.item() if isinstance(loss, Tensor) else loss, place)
            else:
                loss = loss.detach()
                if weighed and isinstance(count, Tensor) and not on_host:
                    loss = torch.where(count > 0, loss, 0.0)
                self._losses.append(loss)
                self._places.append(place)
        if self._places and not learn.iter % _POLL:
            self._look(self._losses.poll())

    def after_train(self) -> None:
        self._look(self._losses.all())  # a host-device sync, once an epoch
        self._forget()

    def after_cancel_fit(self) -> None:
        learn = self.learn
        # Every rank must reach this, and does: a fit that is cancelled is so on all of them.
        found = world.all_gather(self._found) if learn._sharded else [self._found]
        epoch, step, rank, loss = min(filter(None, found), default=(None,) * 4)
        if loss is not None:
            where = f" on rank {rank}" if learn._sharded else ""
            learn.say(f"epoch {epoch}: the training loss of step {step}{where} is {loss}: stopping")

    def cleanup_fit(self) -> None:
        self._forget()  # what is on a device cannot travel to another process

    def _look(self, losses: list[float]) -> None:
        "Check those that are new."
        first, self._looked = self._looked, len(losses)
        for loss, place in zip(losses[first:], self._places[first:], strict=False):
            self._check(loss, place)

    def _check(self, loss: float, place: tuple[int, int]) -> None:
        if not math.isfinite(loss):
            self._found = (*place, world.rank(), loss)
            raise CancelFitException


def _is_on_host(x: float | Tensor) -> bool:
    """Whether reading a number makes nobody wait."""
    return not isinstance(x, Tensor) or x.device.type == "cpu"


class ValidateEvery(StepCounter):
    """Validates in mid-epoch too: after every `n` optimizer steps, with a row of its own in the table.

    Such a row shows the epoch with the share of it that is done, and the training loss so far in the epoch. Trackers
    (`SaveModelCallback` and the like) heed it as they do the row of a whole epoch.

    Args:
        n: optimizer steps from one validation to the next, counted over the whole fit.

    Raises:
        ValueError: `n` below 1.
    """

    order = StepBudget.order + 1  # after the last step of a budget it is not heard: the epoch's validation follows
    only_fit = True

    def __init__(self, n: int) -> None:
        super().__init__()
        arguments.check_count("n", n, "a number of optimizer steps")
        self.n = n

    def before_fit(self) -> None:
        super().before_fit()
        if self.learn.dls.valid is None:
            raise ValueError("ValidateEvery needs a validation loader: DataLoaders(train, valid)")

    def after_batch(self) -> None:
        super().after_batch()
        learn = self.learn
        at_end = learn.iter + 1 == learn.n_iter  # the epoch's validation follows
        if not learn._step_due or self._taken % self.n or at_end:
            return
        found = learn.validate()  # every rank must reach this, and does: it counts steps that all take
        if hasattr(learn, "recorder"):
            learn.recorder.add_row(found)
        try:
            for cb in sorted(learn.cbs, key=lambda cb: cb.order):
                if isinstance(cb, TrackerCallback) and cb.run:
                    cb.take_row()
        except CancelException as cancel:
            cancel.agreed = True
            raise
