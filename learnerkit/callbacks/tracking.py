"""Callbacks that monitor the table or the loss: save the best model, lower the rate, stop; and more validations."""

import math
import operator
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from learnerkit import arguments, distributed
from learnerkit.callback import Callback, running
from learnerkit.callbacks.recorder import check_monitor, monitored
from learnerkit.callbacks.schedule import check_nobody_schedules
from learnerkit.callbacks.training import NamedState, StepBudget, StepCounter, at_last_batch
from learnerkit.data.batches import on_host
from learnerkit.endings import mark
from learnerkit.events import CancelException, CancelFitException
from learnerkit.files import name_or_any_path, place_of
from learnerkit.host_scalars import HostScalars
from learnerkit.marks import collective
from learnerkit.state import State
from learnerkit.stores.paths import AnyPath
from learnerkit.utils import owner_of, suggests_keywords

_LESS_IS_BETTER = re.compile(
    r"loss|error|perplexity|cross.?entropy|(?<![a-z0-9])(mse|rmse|mae|mape|nll|b?ce|ppl|wer|cer|brier|ece|fid)(?![a-z0-9])",
    re.IGNORECASE,
)
Better = Callable[[Any, Any], Any]
"""A function of (value, best) that says whether the value is better."""

_COMP = "it is a function of (value, best) that says whether the value is better, such as operator.lt or numpy.greater"


class TrackerCallback(NamedState):
    """Keeps the best value of one column of the table: the base of the callbacks that act on it.

    A NaN is never the best. Rows without the column are ignored, since a callback may log only from time to time; if
    no row of a fit has it, the fit ends with a warning.

    Args:
        monitor: the column: 'train_loss', 'valid_loss', a metric, or what a callback logs and declares in its `logs`.
        comp: f(value, best) says whether the value is better: `operator.lt`, `numpy.greater`. By default less is
            better if the name contains 'loss', 'error', 'perplexity' or 'cross_entropy', or if one of its words is
            'mse', 'rmse', 'mae', 'mape', 'nll', 'ce', 'bce', 'ppl', 'wer', 'cer', 'brier', 'ece' or 'fid' (as in
            'valid_rmse'); else more is.
        min_delta: a new best must be better than the last one by more than this; 0 or more in either direction.
        reset_on_fit: forget the best of the earlier fits when a fit starts.

    Attributes:
        best: the best value so far; before there is one, inf or -inf, whichever is the worst.
        new_best: whether the last row had a new best.

    Raises:
        TypeError, ValueError: arguments that cannot work; in `before_fit` a column that no row will have.
    """

    order = 60
    only_fit = True
    _state_names: tuple[str, ...] = ("best", "new_best", "_rows", "_rows_with_column")

    @suggests_keywords
    def __init__(
        self, monitor: str = "valid_loss", comp: Better | None = None, min_delta: float = 0.0, reset_on_fit: bool = True
    ) -> None:
        if not isinstance(monitor, str):
            raise TypeError(f"got monitor={monitor!r}; it is the name of a column of the table, such as 'valid_loss'")
        arguments.check_number("min_delta", min_delta, lambda d: d >= 0, "0 or more, also where less is better")
        if comp is not None and not callable(comp):
            raise TypeError(f"got comp={comp!r}; {_COMP}")
        self.monitor = monitor
        self.min_delta = min_delta
        self.reset_on_fit = reset_on_fit
        self.comp = comp or (operator.lt if _LESS_IS_BETTER.search(monitor) else operator.gt)
        less, more = bool(self.comp(0.0, 1.0)), bool(self.comp(1.0, 0.0))
        if less == more:
            raise ValueError(f"got comp={comp!r}, which prefers neither 0 to 1 nor 1 to 0, or both; {_COMP}")
        self._sign = -1 if less else 1
        self._worst = -self._sign * math.inf
        self.best, self.new_best = self._worst, False
        self._rows = self._rows_with_column = 0

    def before_fit(self) -> None:
        check_monitor(self.learn, self.monitor)
        if self.reset_on_fit:
            self.best = self._worst
        self.new_best = False
        self._rows = self._rows_with_column = 0

    @collective
    def after_epoch(self) -> None:
        self.take_row()

    @collective
    def take_row(self) -> bool:
        """Act on the newest row of the recorder; every rank must reach this.

        It is called at the end of an epoch, and by `ValidateEvery` after each row that it adds. Rows are equal on all
        ranks, so all ranks decide the same.

        Returns:
            Whether the row has the column.
        """
        value = monitored(self.learn, self.monitor)
        self._rows += 1
        self.new_best = False
        if value is None:
            return False
        self._rows_with_column += 1
        if not math.isnan(value) and self.comp(value - self._sign * self.min_delta, self.best):
            self.best, self.new_best = value, True
        return True

    def after_fit(self) -> None:
        if self._rows and not self._rows_with_column:
            distributed.warn(f"{self!r} did nothing: none of the fit's {self._rows} rows has a column {self.monitor!r}")


class SaveModelCallback(TrackerCallback):
    """Saves the best model and loads it at the end of the fit; or saves the model of every epoch, or the last one.

    Rank 0 writes, all ranks load; machines that do not share the file get its content from rank 0. If the fit has no
    best value (all NaN, or no epoch), nothing is loaded. With `reset_on_fit=False` the best model of an earlier fit is
    loaded if no row of this fit is better.

    Args:
        monitor, comp, min_delta, reset_on_fit: as in `TrackerCallback`.
        fname: the file, as in `Learner.save`.
        every_epoch: save `fname_<epoch>` after each epoch instead (with a number n, after epochs 0, n, 2n, ...),
            whatever is monitored, and load nothing.
        at_end: save the last model as `fname` at the end of the fit, over the best one, and load nothing.
        with_opt: save and load the optimizer's state too.

    Attributes:
        last_saved_path: the file that was written last.

    Raises:
        ValueError: in `before_fit`, another callback of this kind saves to the same file.
    """

    order = 61

    @suggests_keywords
    def __init__(
        self,
        monitor: str = "valid_loss",
        comp: Better | None = None,
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
        file = name_or_any_path(fname)
        self.fname = file.removesuffix(".pth") if isinstance(file, str) else file
        self.every_epoch = every_epoch
        self.at_end = at_end
        self.with_opt = with_opt
        self.last_saved_path: AnyPath | None = None
        self._best_path: AnyPath | None = None  # the file of `best`
        self._loss: dict[str, Tensor] = {}  # the parameters of the loss, and its buffers, with `best`

    def before_fit(self) -> None:
        if not self.every_epoch:
            super().before_fit()
        if self.reset_on_fit:
            self._best_path = None
        own, savers = self._overwrites(), running(self.learn.cbs, SaveModelCallback)
        if own and any(cb is not self and cb._overwrites() == own for cb in savers):
            raise ValueError(
                f"two callbacks {self!r} save to {own}, and would overwrite each other's models; give them different "
                "`fname`s"
            )

    def _overwrites(self) -> object:
        "Return the file that it writes more than once or at the end; `None` if there is none."
        return place_of(self.learn, self.fname) if self.at_end or not self.every_epoch else None

    @collective
    def after_epoch(self) -> None:
        if not self.every_epoch:
            self.take_row()
        elif self.learn.epoch % self.every_epoch == 0:
            file: Any = place_of(self.learn, self.fname)
            self._save(file.with_stem(f"{file.stem}_{self.learn.epoch}"))

    @collective
    def take_row(self) -> bool:
        """Save the model if the newest row is the best."""
        has_column = not self.every_epoch and super().take_row()
        if has_column and self.new_best:
            self._best_path = self._save(self.fname)
            self._loss = _trained_in(self.learn.loss_func)
        return has_column

    @collective
    def after_fit(self) -> None:
        super().after_fit()
        if self.at_end:
            self._save(self.fname)
            self._best_path = None
        elif self.every_epoch:
            return
        elif self._best_path is not None:
            self._load_best(self._best_path)
            self.learn.say(f"loaded the best model ({self.monitor} {self.best:.6g}) from {self._best_path}")
        elif self._rows_with_column:
            self.learn.say(f"no model was saved: no row has a {self.monitor} better than {self.best}, and NaN never is")

    def state_dict(self) -> State:
        """Return the best value, the rows so far, and whether the best model is in its file."""
        return super().state_dict() | {"saved": self._best_path is not None, "loss": self._loss}

    @collective
    def load_state_dict(self, state: State) -> None:
        """Load the best model at the end, if there is one; its place is this callback's, not what a file says."""
        super().load_state_dict(state)
        file: Any = place_of(self.learn, self.fname)
        self._best_path = file if state["saved"] else None
        self._loss = state.get("loss", {})
        if state["saved"] and not distributed.broadcast(distributed.is_main() and file.is_file()):
            distributed.warn(
                f"{file} is not there any more, with the best model of before ({self.monitor} {self.best:.6g}): "
                "the best is that of the rows to come"
            )
            self._best_path, self.best = None, self._worst
        self.last_saved_path = self._best_path or self.last_saved_path

    @collective
    def _load_best(self, path: AnyPath) -> None:
        "Load a file that rank 0 has written."
        versions = distributed.all_gather(_version(path)) if self.learn.n_ranks > 1 else []
        with ExitStack() as stack:
            if len(set(versions)) > 1:  # a machine does not have this file, or has an older one
                content = distributed.broadcast(path.read_bytes() if distributed.is_main() else b"")
                if versions[distributed.rank()] != versions[0]:
                    path = Path(stack.enter_context(TemporaryDirectory())) / path.name
                    path.write_bytes(content)
            self.learn.load(path, with_opt=self.with_opt)
        if self._loss:
            owner_of(self.learn.loss_func).load_state_dict(self._loss, strict=False)

    @collective
    def _save(self, file: str | AnyPath) -> AnyPath:
        saved: Any = self.learn.save(file, with_opt=self.with_opt)  # It is never an open file.
        self.last_saved_path = saved
        return saved


def _version(path: AnyPath) -> tuple[int, int] | None:
    """Return the size and time of a file, by which it differs from an older one; `None` if it does not exist.

    All machines see the same object of a store: it has no version.
    """
    if not isinstance(path, Path):
        return None
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _trained_in(loss_func: Any) -> dict[str, Tensor]:
    """Return copies of the parameters that a loss trains, and of its buffers, by name. A host-device sync."""
    loss = owner_of(loss_func)
    if not isinstance(loss, nn.Module):
        return {}
    named = dict(loss.named_buffers()) | {name: p for name, p in loss.named_parameters() if p.requires_grad}
    return on_host(named)


class _Patient(TrackerCallback):
    """A tracker that acts after `patience` rows without a new best."""

    _state_names = (*TrackerCallback._state_names, "wait")

    @suggests_keywords
    def __init__(
        self,
        monitor: str = "valid_loss",
        comp: Better | None = None,
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

    @collective
    def take_row(self) -> bool:
        """Count the rows without a new best, and act after `patience` of them."""
        has_column = super().take_row()
        if has_column:
            self.wait = 0 if self.new_best else self.wait + 1
        if self.wait >= self.patience:
            self.wait, rows = 0, f"{self.wait} row{'s' if self.wait > 1 else ''}"
            epoch = self.learn.recorder.log[0]
            by = f" (by more than min_delta={self.min_delta:g})" if self.min_delta else ""
            self._out_of_patience(f"epoch {epoch}: no better {self.monitor} than {self.best:.6g}{by} in {rows}")
        return has_column

    def _out_of_patience(self, why: str) -> None:
        raise NotImplementedError


class EarlyStoppingCallback(_Patient):
    """Ends the fit after `patience` rows without a new best, and says so.

    Args:
        monitor, comp, min_delta, reset_on_fit: as in `TrackerCallback`.
        patience: a number of rows (one for each epoch, and those that `ValidateEvery` adds).
    """

    order = 63

    def _out_of_patience(self, why: str) -> None:
        self.learn.say(f"{why}: stopping")
        raise CancelFitException


class ReduceLROnPlateau(_Patient):
    """Divides the learning rate of every group after each `patience` rows without a new best, and says so.

    The next fit starts with the rates it is given.

    Args:
        monitor, comp, min_delta, reset_on_fit: as in `TrackerCallback`.
        patience: a number of rows (one for each epoch, and those that `ValidateEvery` adds).
        factor: the number to divide by.
        min_lr: no rate is lowered below this.

    Raises:
        ValueError: arguments that cannot work; in `before_fit` also a schedule of the rate.
    """

    order = 62

    @suggests_keywords
    def __init__(
        self,
        monitor: str = "valid_loss",
        comp: Better | None = None,
        min_delta: float = 0.0,
        patience: int = 1,
        factor: float = 10.0,
        min_lr: float = 0.0,
        reset_on_fit: bool = True,
    ) -> None:
        super().__init__(monitor, comp, min_delta, patience, reset_on_fit)
        arguments.check_number("factor", factor, lambda f: f > 1, "more than 1, as rates are divided by it")
        arguments.check_number("min_lr", min_lr, lambda rate: rate >= 0, "a rate, 0 or more")
        self.factor, self.min_lr = factor, min_lr

    def before_fit(self) -> None:
        super().before_fit()
        check_nobody_schedules(self.learn, "ReduceLROnPlateau")

    def _out_of_patience(self, why: str) -> None:
        before, after = dict[str, None](), dict[str, None]()  # each rate once, in order
        for opt in self.learn.opts:
            for group in opt.param_groups:
                lr = float(group["lr"])  # a host-device sync if it is a tensor on a device, but a rare one
                lower = max(lr / self.factor, min(lr, self.min_lr))  # a rate below the limit is not raised to it
                before[f"{lr:.4g}"] = after[f"{lower:.4g}"] = None
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lower)
                else:
                    group["lr"] = lower
        if list(before) != list(after):
            self.learn.say(f"{why}: learning rate {', '.join(before)} -> {', '.join(after)}")


class ValidateEvery(StepCounter):
    """Validates also after every `n` optimizer steps, and adds a row to the table.

    The row shows the epoch with the share of it that is done, if that is known, and the epoch's training loss so far.
    Trackers such as `SaveModelCallback` treat it like the row of a whole epoch.

    Args:
        n: optimizer steps between two validations, counted over the whole fit.

    Raises:
        ValueError: `n` below 1.
    """

    order = StepBudget.order + 1  # not called after the last step of a budget, which the epoch's validation follows
    only_fit = True

    def __init__(self, n: int) -> None:
        arguments.check_count("n", n, "a number of optimizer steps")
        self.n = n

    def before_fit(self) -> None:
        super().before_fit()
        if self.learn.dls.valid is None:
            raise ValueError("ValidateEvery needs a validation loader: DataLoaders(train, valid)")

    @collective
    def after_batch(self) -> None:
        super().after_batch()
        learn = self.learn
        # After the last batch the epoch's validation follows.
        if not learn.step_due or self._steps % self.n or at_last_batch(learn):
            return
        values = learn.validate()  # every rank must reach this, and does: all ranks count the same steps
        if hasattr(learn, "recorder"):
            learn.recorder.add_row(values)
        try:
            for cb in sorted(running(learn.cbs, TrackerCallback), key=lambda cb: cb.order):
                cb.take_row()
        except CancelException as cancel:
            mark(cancel, agreed=True)
            raise


_POLL_EVERY = 4  # batches; how often losses that have arrived from an accelerator are checked


class TerminateOnNaNCallback(Callback):
    """Ends the fit when a training loss is NaN or infinite, and prints its epoch and step.

    On CPU it does so before the backward pass, so the weights are those of the last good step. On an accelerator it
    does so some steps later, when the loss has arrived on the host, which waits for it only at the end of an epoch's
    training. Under DDP all ranks end together, and rank 0 names the rank that had the loss.
    """

    order = -9
    run_valid = False
    only_fit = True
    tells_not_finite = True  # Then the recorder does not say it.

    def __init__(self) -> None:  # without the order and the hooks that its base takes
        super().__init__()

    def before_fit(self) -> None:
        self._bad: tuple[int, int, int, float] | None = None  # epoch, step, rank and loss
        self._forget()

    def _forget(self) -> None:
        self._losses, self._checked = HostScalars(), 0
        self._steps: list[tuple[int, int]] = []  # epoch and step of each loss

    def before_backward(self) -> None:
        learn, count = self.learn, self.learn.loss_count
        weighed, on_host = learn._gradient is not None, _is_on_host(count)
        if weighed and on_host and not count:
            return  # the mean of nothing may be NaN; its weight in the step is 0
        step = learn.epoch, learn.iter
        for loss in (learn.loss, learn.loss_grad):  # recorded and differentiated: a callback may change either
            if loss is None:
                continue
            if _is_on_host(loss):
                self._check(loss.item() if isinstance(loss, Tensor) else loss, step)
            else:
                loss = loss.detach()
                if weighed and isinstance(count, Tensor) and not on_host:
                    loss = torch.where(count > 0, loss, 0.0)
                self._losses.append(loss)
                self._steps.append(step)
        if self._steps and not learn.iter % _POLL_EVERY:
            self._check_new(self._losses.poll())

    def after_train(self) -> None:
        self._check_new(self._losses.all())  # a host-device sync, once an epoch
        self._forget()

    @collective
    def after_cancel_fit(self) -> None:
        learn = self.learn
        # Every rank must reach this, and does: a cancel of the fit is agreed between them.
        bad = distributed.all_gather(self._bad) if learn.n_ranks > 1 else [self._bad]
        epoch, step, rank, loss = min(filter(None, bad), default=(None,) * 4)
        if loss is not None:
            where = f" on rank {rank}" if learn.n_ranks > 1 else ""
            learn.say(f"epoch {epoch}: the training loss of step {step}{where} is {loss}: stopping")

    def cleanup_fit(self) -> None:
        self._forget()  # tensors on a device cannot be sent to another process

    def _check_new(self, losses: list[float]) -> None:
        "Check the losses that have arrived since the last call; `losses` has all of the epoch."
        first, self._checked = self._checked, len(losses)
        for loss, step in zip(losses[first:], self._steps[first:], strict=False):
            self._check(loss, step)

    def _check(self, loss: float, step: tuple[int, int]) -> None:
        if not math.isfinite(loss):
            self._bad = (*step, distributed.rank(), loss)
            raise CancelFitException


def _is_on_host(x: float | Tensor) -> bool:
    """Tell whether a number can be read without a host-device sync."""
    return not isinstance(x, Tensor) or x.device.type == "cpu"
