"""The record of a fit: losses, metrics, rates, the rows of the table, and plots of them."""

import copy
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress, zip_longest
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learnerkit import arguments, distributed
from learnerkit.callback import Callback
from learnerkit.data.batches import in_float32
from learnerkit.data.show import label_steps, panels, pyplot
from learnerkit.explain import explain_metric
from learnerkit.host_scalars import WeighedScalars
from learnerkit.losses import check_predictions, counted_parts, weighting_of
from learnerkit.marks import collective
from learnerkit.metrics import DEPENDS_ON_CUT, AccumMetric, Meter, check_columns, make_meters, weighted_mean
from learnerkit.metrics.meters import is_number
from learnerkit.state import Learner, State
from learnerkit.text import columns, did_you_mean, escaped_line, format_time
from learnerkit.utils import listify
from learnerkit.values import describe, map_batch


class LossMeter(WeighedScalars):
    """The losses of batches, weighed by their counts.

    Args:
        parts: the names of the losses that have a separate count.
    """

    def __init__(self, parts: Iterable[str] = ()) -> None:
        super().__init__()
        self.parts = {name: WeighedScalars() for name in parts}
        # Whether each batch was cancelled before its loss, or is an empty one at the end of a loader without length.
        self.cancelled: list[bool] = []
        self.n_cancelled = 0  # how many of these are True; a logger asks in each step
        self.steps = 0  # up to the last step in which this rank had samples

    def update(self, learn: "Learner") -> None:
        """Add a batch's loss; a batch without one (cancelled before it) counts nothing."""
        loss, count = learn.loss, learn.loss_count
        if cancelled := loss is None or getattr(learn.dl, "is_last", False):
            loss, count = 0.0, 0
        self.cancelled.append(cancelled)
        self.n_cancelled += cancelled
        # On the CPU the number is read at once, which is faster than keeping the tensor.
        self.append(loss.item() if type(loss) is Tensor and loss.is_cpu else loss, count)
        if learn.batch_size:
            self.steps = len(self.cancelled)
        if self.parts:
            for name, (value, n) in counted_parts(learn).items():
                self.parts[name].append(value, n)

    def on_host(self) -> list[float | None]:
        """Return the losses that have arrived on the host, `None` where nothing was counted; never waits."""
        return [loss if n else None for loss, n in zip(self.values.poll(), self.weights.poll(), strict=False)]

    @collective
    def totals(self, sums: bool, sharded: bool) -> list[list[float]]:
        """Return total losses, counts, and how many were not cancelled, of each batch; if `sharded`, of each step."""
        pairs = self.pairs()
        counts = [n for _, n in pairs]
        # Where the count is 0 the loss may be the mean of nothing, a NaN.
        totals = [(loss if sums else loss * n) if n else 0.0 for loss, n in pairs]
        begun: list[float] = [not cancelled for cancelled in self.cancelled]
        if sharded:
            # A rank that has left training early, or whose data have ended, lacks the last steps. Where those of all
            # have ended, an accumulated step may have gone on. Every rank must reach this.
            n = distributed.reduce(self.steps, "max")
            steps = torch.zeros(3, n, dtype=torch.float64)
            steps[:, : len(counts)] = torch.tensor([totals, counts, begun], dtype=torch.float64)[:, :n]
            return distributed.reduce(steps).tolist()
        return [totals, counts, begun]

    def state_dict(self) -> State:
        """Return the losses and counts of this rank. A host-device sync."""
        return {
            "losses": super().state_dict(), "cancelled": list(self.cancelled), "steps": self.steps,
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
        }  # fmt: skip

    def load_ranks(self, ranks: list[State], sums: bool, counted: bool) -> None:
        """Restore the state of one rank, or the sums over the states of several.

        Args:
            ranks: the states; this meter is new.
            sums: the losses are sums.
            counted: this rank counts them; otherwise it has the same steps, with counts of 0.
        """
        self.steps = max(rank["steps"] for rank in ranks)
        self.cancelled = [all(each) for each in zip_longest(*(rank["cancelled"] for rank in ranks), fillvalue=True)]
        self.n_cancelled = sum(self.cancelled)
        states = [rank["losses"] for rank in ranks]
        pairs = (zip(state["values"], state["weights"], strict=True) for state in states)
        for step in zip_longest(*pairs, fillvalue=(0.0, 0.0)):
            (loss, count), *others = step
            if others:
                count = sum(n for _, n in step)
                total = sum(each if sums else each * n for each, n in step if n)  # A mean of nothing may be NaN.
                loss = total if sums or not count else total / count
            self.append(float(loss), float(count) if counted else 0.0)
        for name, part in self.parts.items():
            for rank in ranks if counted else ():
                part.extend(**rank["parts"][name])

    @collective
    def mean(self, sums: bool, sharded: bool) -> float:
        """Return the mean over everything counted, on all ranks if `sharded`; with parts, the sum of their means."""
        if self.parts:
            rows = torch.tensor([part.sums() for part in self.parts.values()], dtype=torch.float64)
            rows = distributed.reduce(rows) if sharded else rows
            total, count = rows[rows[:, 1] != 0].T  # Parts that counted nothing have no mean.
            return (total / count).sum().item() if len(count) else math.nan
        totals, counts, _ = self.totals(sums, sharded=False)
        return weighted_mean(sum(totals), sum(counts), sharded)


class Evaluation:
    """The loss and the metrics over one pass through a loader.

    Args:
        meters: one for each metric.
        learn: the learner, whose data may be divided among the ranks.

    Attributes:
        is_whole: the metrics have all samples: the pass was not begun on another number of ranks.
    """

    is_whole = True

    def __init__(self, meters: list[Meter], learn: "Learner") -> None:
        self.meters = meters
        self.sharded = learn.n_ranks > 1
        self.weighting = weighting_of(learn)
        self.loss, self.batches = LossMeter(self.weighting.parts), 0
        self._is_fresh = True

    def _begin(self) -> None:
        """Reset the meters at the first batch, so that until then the user can read the metrics of the last pass."""
        if self._is_fresh:
            self._is_fresh = False
            for meter in self.meters:
                meter.reset()

    def update(self, learn: "Learner") -> None:
        """Add the current batch."""
        self._begin()
        self.batches += 1
        self.loss.update(learn)
        if not self.meters or not learn.batch_size:
            return
        check_predictions(learn)
        if learn.pred is None:  # the batch was cancelled
            return
        pred = map_batch(in_float32, learn.pred) if learn.training else learn.pred  # see MixedPrecision
        weighting = self.weighting
        for meter in self.meters:
            try:
                given, yb = pred, learn.yb
                if meter.is_of_tokens and weighting.own is not None:
                    given, yb = weighting.own.paired(given, yb)
                if not weighting.by_rows and isinstance(meter.metric, AccumMetric):  # it joins batches
                    given, _, yb = learn.dls.samples_first(pred, (), yb, learn.batch_size)
                rows = weighting.rows(given, yb, learn.batch_size)
                update = meter.update
                if self.sharded and self.batches == 1:  # at every batch the checks would take time
                    update = partial(self._checked_update, meter)
                update(learn._batch_index, rows, given, yb)
            except Exception as e:
                explain_metric(e, meter.name, pred, learn.yb)
                raise

    def _checked_update(self, meter: Meter, place: int, *batch: Any) -> None:
        """Add a batch to a metric; refuse collectives, and warn if the metric depends on how samples are cut."""
        why = "ranks may have different numbers of batches; update with the batch alone, all ranks are combined later"
        with distributed.no_collectives(f"the metric {meter.name!r}", why):
            meter.update(place, *batch)
            if self.weighting.by_rows and distributed.is_main() and meter.depends_on_cut(*batch):
                distributed.warn_once(
                    f"metric {meter.name!r} {DEPENDS_ON_CUT}, and several ranks cut them otherwise than one process "
                    "does: let it be a mean over samples, count samples rather than batches, or take AccumMetric, "
                    "which gets all predictions at once (errors.html#metric-ranks)"
                )

    @collective
    def mean_loss(self) -> float:
        """Return the mean loss; every rank must reach this if the data are sharded."""
        return self.loss.mean(self.weighting.sums, self.sharded)

    @collective
    def metrics(self) -> list[float]:
        """Return the value of each metric; every rank must reach this if the data are sharded."""
        if not self.meters:
            return []
        if not (self.is_whole and (distributed.reduce(self.batches) if self.sharded else self.batches)):
            return [math.nan] * sum(len(meter.columns) for meter in self.meters)
        self._begin()  # This rank may have no data.
        values = [value for meter in self.meters for value in meter.row(self.sharded)]
        check_columns(self.meters)
        return values

    def state_dict(self) -> State:
        """Return this rank's losses and the states of its metrics. A host-device sync."""
        meters = [] if self._is_fresh else [meter.state_dict() for meter in self.meters]
        return self.loss.state_dict() | {"batches": self.batches, "meters": meters if self.is_whole else None}

    def load_ranks(self, ranks: list[State], counted: bool) -> None:
        """Restore the state of one rank; from the states of several ranks, only the losses, as `LossMeter` does."""
        self.loss = LossMeter(self.weighting.parts)
        self.loss.load_ranks(ranks, self.weighting.sums, counted)
        self._is_fresh = True
        self.batches = max(rank["batches"] for rank in ranks)  # not 0 on one rank alone
        if not (self.meters and self.batches):
            return
        self._begin()
        meters = ranks[0]["meters"]
        # One process and several have meters of other kinds for some metrics.
        kinds = [meter.state_dict().keys() for meter in self.meters]
        self.is_whole = len(ranks) == 1 and meters is not None and [state.keys() for state in meters] == kinds
        if self.is_whole and counted:
            for meter, state in zip(self.meters, meters, strict=True):
                meter.load_state_dict(state)


def meters_of(metrics: Any, learn: "Learner") -> list[Meter]:
    "Make the meters of metrics for a learner's loss, its classes, and the kind of its targets."
    loss_func = weighting_of(learn).own if learn.loss_func is None else learn.loss_func
    return make_meters(metrics, loss_func, learn.dls.classes, learn.dls.targets)


class Validation(Callback):
    """Computes the loss and the metrics of one validation, in `values`, for `Learner.validate`.

    Args:
        inside: a fit or another evaluation goes on, which may use the metrics themselves: this one copies them.
    """

    order = 50
    run_train = False
    of_one_evaluation = True

    def __init__(self, inside: bool) -> None:
        self.inside, self.values = inside, list[float]()

    def before_validate(self) -> None:
        learn = self.learn
        metrics = copy.deepcopy(learn.metrics) if self.inside else learn.metrics
        self._evaluation = Evaluation(meters_of(metrics, learn), learn)

    def after_batch(self) -> None:
        self._evaluation.update(self.learn)

    @collective
    def after_validate(self) -> None:
        evaluation = self._evaluation
        with distributed.grouped_collectives():
            self.values = [evaluation.mean_loss(), *evaluation.metrics()]
        if hasattr(self.learn, "recorder"):
            self.learn.recorder.note_columns(evaluation.meters)


class Smoother:
    """An exponential average with Adam's bias correction (Kingma and Ba, https://arxiv.org/abs/1412.6980).

    During an epoch it averages this rank's losses; `close` replaces them by those of all ranks.

    Args:
        beta: the weight of the past in each value.
    """

    def __init__(self, beta: float) -> None:
        self.beta = beta
        self.values: list[float] = []
        self.given: list[float] = []  # the raw losses; NaN where nothing counted
        self._average, self._count = 0.0, 0
        self._epoch_start = (0, 0.0, 0)

    def extend(self, losses: list[float], counts: list[float]) -> None:
        """Add the new losses of the current epoch; the lists have all of them, and what each counts."""
        seen = len(self.values) - self._epoch_start[0]
        for loss, count in zip(losses[seen:], counts[seen:], strict=False):  # a count may come later
            self.add(loss if count else None)

    def close(self, losses: list[float | None]) -> None:
        """End the epoch with its final losses; `None` is a step in which nothing counted."""
        length, self._average, self._count = self._epoch_start
        del self.values[length:], self.given[length:]
        for loss in losses:
            self.add(loss)
        self._epoch_start = (len(self.values), self._average, self._count)

    def state_dict(self) -> State:
        """Return the values of finished epochs, without the current one."""
        length, *average = self._epoch_start
        return {"values": self.values[:length], "given": self.given[:length], "average": average}

    def load_state_dict(self, state: State) -> None:
        """Restore the values of finished epochs."""
        self.values = list(state["values"])
        self.given = list(state["given"])
        self._average, self._count = state["average"]
        self._epoch_start = (len(self.values), self._average, self._count)

    def add(self, loss: float | None) -> None:
        """Add a loss; `None` is a step in which nothing counted."""
        if loss is not None:
            self._average = self.beta * self._average + (1 - self.beta) * loss
            self._count += 1
        self.values.append(self._average / (1 - self.beta**self._count) if self._count else math.nan)
        self.given.append(math.nan if loss is None else loss)


class PastFit(SimpleNamespace):
    """An earlier fit, with the recorder's attributes for it."""

    __slots__ = ("_saved",)

    def saved(self) -> str | State:
        """Return what a checkpoint keeps of the fit, as JSON, since a script may have hundreds of fits; cached.

        A fit of 1000 batches or more stays a dict, whose long lists a checkpoint stores as tensors; so does a fit with
        values that JSON cannot hold.
        """
        if not hasattr(self, "_saved"):
            self._saved: str | State = vars(self)
            if len(self.lrs) < 1000:
                with suppress(TypeError):
                    self._saved = json.dumps(vars(self))
        return self._saved


class Recorder(Callback):
    """Records a fit: losses, metrics and rates; gives the rows of the table to `learn.logger`.

    Args:
        add_time: add a last column with the duration of the epoch.
        train_metrics: compute the metrics on training batches too.
        valid_metrics: compute the metrics in validation.
        beta: smoothing of `losses`: the weight of the past in an exponential average with bias correction.

    Attributes:
        metric_names: the columns.
        values: a list for each row (one for each epoch, and those that `ValidateEvery` adds), without epoch and time.
        log: the last row; `final_record`: the last of `values`.
        losses: the smoothed training loss at every batch; of finished epochs over all ranks.
        step_losses: the training loss at every batch as it was, with which `losses` are made.
        lrs: the last group's learning rate at every batch.
        iters: for each row, the number of training batches so far.
        hps: scheduled hyper-parameters at every batch, by name.
        logged: the values that `log_metric` was given in this epoch, by name.
        history: the earlier fits, each with these attributes.
        lr_find_curve: (rates, losses, suggestions by name) of the last `lr_find`, which leaves all else as it was.

    Raises:
        ValueError: `beta` below 0, or not below 1.
    """

    order = 50
    only_fit = True

    def __init__(
        self, add_time: bool = True, train_metrics: bool = False, valid_metrics: bool = True, beta: float = 0.98
    ) -> None:
        arguments.check_number("beta", beta, lambda b: 0 <= b < 1, "the smoothing, 0 (none) or more and less than 1")
        self.add_time, self.beta = add_time, beta
        self.train_metrics, self.valid_metrics = train_metrics, valid_metrics
        self.history: list[PastFit] = []
        self.lr_find_curve: tuple[list[float], list[float], dict[str, float]] | None = None
        self.logged: dict[str, WeighedScalars] = {}
        self._written: tuple[int, int] | None = None  # the fit and the epoch of the last row at the end of an epoch
        self._start()

    @property
    def name(self) -> str:
        """The name 'recorder', also of a subclass: it is `learn.recorder`."""
        return "recorder"

    def _start(self) -> None:
        self.values: list[list[float]] = []
        self.lrs: list[float] = []
        self.iters: list[int] = []
        self.hps: dict[str, list[float]] = {}
        self._log: list = []
        self._table: list[dict[str, Any]] = []  # the rows by column
        self.final_record: list[float] = []
        self.metric_names: list[str] = []
        self._has_valid_loss = True  # False once the model makes none
        self._train_meters: list[Meter] = []
        self._valid_meters: list[Meter] = []
        self._smooth = Smoother(self.beta)
        self._in_epoch = False  # the smoothed losses of the epoch are not final yet
        self._told = False  # whether a loss that is not finite was reported

    @property
    def log(self) -> list:
        """The last row of the table.

        Raises:
            RuntimeError: it is read in `after_epoch` before the row of the epoch is there.
        """
        learn = self.learn
        if (
            self._in_epoch
            and learn  # the recorder of a fit that was stopped may have been removed
            and learn.task == "fit"
            and learn._dispatch.at_epoch
            and len(self.lrs) > self._first_batch
        ):
            raise RuntimeError(
                f"recorder.log was read before it has the row of epoch {learn.epoch}, which is made in after_epoch at "
                f"order {self.order}: give the callback a higher order (`order = {self.order + 1}` in its class)"
            )
        return self._log

    @property
    def losses(self) -> list[float]:
        """The smoothed training loss at every step. Reading it during an epoch is a host-device sync."""
        return self._smoothed().values

    @property
    def step_losses(self) -> list[float]:
        """The training loss at every step, not smoothed; NaN where nothing counted. A sync as in `losses`."""
        return self._smoothed().given

    def _smoothed(self) -> Smoother:
        if self._in_epoch:
            losses = self._train.loss
            self._smooth.extend(losses.values.all(), losses.weights.all())
        return self._smooth

    @property
    def smooth_loss(self) -> float | None:
        """The last of `losses`."""
        return self.losses[-1] if self.losses else None

    def recent_losses(self) -> list[float]:
        """Return the smoothed losses that have arrived on the host; never waits for the device."""
        if self._in_epoch:
            losses = self._train.loss
            self._smooth.extend(losses.values.poll(), losses.weights.poll())
            is_fine = not self._smooth.values or math.isfinite(self._smooth.values[-1])
            if not (is_fine or self._told or self._train.sharded):  # Several ranks share their losses later.
                self._tell_not_finite(losses.on_host())
        return self._smooth.values

    def log_metric(self, name: str, value: float | Tensor, weight: float | Tensor = 1) -> None:
        """Add a value to the column `name` of this epoch's row, which has the mean of its values.

        Args:
            name: the column.
            value: a number or a tensor with one element.
            weight: the weight of the value in the mean.

        Raises:
            ValueError: a value that is not a single number, or the name of another column.
        """
        if not is_number(value):
            raise ValueError(f"log_metric({name!r}) got {describe(value)}; it takes one number")
        if isinstance(value, Tensor):
            value = value.detach().clone().reshape(())  # a copy: it is read later, when the tensor may have changed
        if self._written == (self.learn.n_fits, self.learn.epoch):
            distributed.warn_once(
                f"log_metric({name!r}) came after the row of the epoch was written, and is in no row: call it before "
                f"after_fit, and in after_epoch from a callback with an order below {self.order}"
            )
            return
        if name not in self.logged:
            if name in (*self._names(), "time"):
                raise ValueError(f"log_metric got {name!r}, which is a column already; choose another name")
            self.logged[name] = WeighedScalars()
        self.logged[name].append(value, weight)

    def before_fit(self) -> None:
        if self.values or self.lrs:
            kept = ("metric_names", "values", "losses", "step_losses", "lrs", "iters", "hps", "final_record", "log")
            self.history.append(PastFit(**{name: getattr(self, name) for name in kept}))
        if self._in_epoch:
            self.logged = {}  # values of an epoch that was cut short; callbacks may have logged for this fit already
        self._written = None
        self._start()
        metrics = self.learn.metrics
        # Copies in training, because validation needs the metrics' states for itself.
        self._train_meters = meters_of(copy.deepcopy(metrics), self.learn) if self.train_metrics else []
        self._valid_meters = meters_of(metrics, self.learn) if self.valid_metrics else []
        declared = dict.fromkeys(name for cb in self.learn.cbs for name in cb.logs)
        self.metric_names = self._names(declared)
        self._start_epoch()  # here too: an epoch may be cancelled before this callback's `before_epoch`

    def note_columns(self, meters: list[Meter]) -> None:
        """Copy the columns of metrics that compute dicts from an evaluation in mid-fit, for the next row."""
        for own, other in zip(self._valid_meters, meters, strict=False):
            own.columns = other.columns

    def _names(self, logged: Iterable[str] = ()) -> list[str]:
        "Return the columns of the table, with those of the logged values."
        train = [name for meter in self._train_meters for name in meter.columns]
        valid = [name for meter in self._valid_meters for name in meter.columns]
        if self.train_metrics:
            train, valid = [f"train_{name}" for name in train], [f"valid_{name}" for name in valid]
        valid = ["valid_loss", *valid] if self._has_valid_loss else valid
        if self.learn.dls.valid is None:
            valid = []
        return ["epoch", "train_loss", *train, *valid, *logged, *(["time"] if self.add_time else [])]

    def before_epoch(self) -> None:
        first = getattr(self.learn, "recorder", self)
        if first.metric_names != self.metric_names:
            raise ValueError(
                f"got a second Recorder with other columns ({', '.join(self.metric_names)}) than the first: set the "
                "options of that one, such as learn.recorder.train_metrics = True, or give the second to "
                "Learner(cbs=...), where it takes the place of the first"
            )
        if self._in_epoch:
            self.logged = {}  # the last epoch was cancelled before its row
        self._start_epoch()
        self._in_epoch = True

    def _start_epoch(self) -> None:
        self._start_time = time.perf_counter()
        meters = self._train_meters, self._valid_meters
        self._train, self._valid = (Evaluation(m, self.learn) for m in meters)
        self._first_batch = len(self.lrs)
        self._last_opt = self.learn.opts[-1]

    def after_batch(self) -> None:
        learn = self.learn
        if not learn.training:
            self._valid.update(learn)
        elif learn.loss is not None or learn.n_ranks > 1:  # ranks must agree on the number of steps
            self._train.update(learn)
            for name, (part, n) in counted_parts(learn).items() if learn.loss_func is None else ():
                self.log_metric(name, part, n)
            lr = self._last_opt.param_groups[-1]["lr"]
            # If the rate is a tensor, which only user code makes it, this is a host-device sync.
            self.lrs.append(lr if type(lr) is float else float(lr))
        else:
            for values in self.hps.values():  # A schedule has set those of this batch, which was cancelled.
                del values[len(self.lrs) :]

    @collective
    def after_epoch(self) -> None:
        with distributed.grouped_collectives():
            values = [self._train_loss(), *self._train.metrics()]
            if self.learn.dls.valid is not None:
                values += self._columns([self._valid.mean_loss(), *self._valid.metrics()])
            logged = self._logged_means()
        self._write(self.learn.epoch, values, logged, len(self.lrs))
        self._written = self.learn.n_fits, self.learn.epoch
        self.logged = {}
        self._start_epoch()

    @collective
    def add_row(self, validation: list[float]) -> None:
        """Write a row during an epoch, with the epoch's values so far; every rank must reach this.

        Args:
            validation: what `Learner.validate` returned.
        """
        learn = self.learn
        with distributed.grouped_collectives():
            values = [self._train.mean_loss(), *self._train.metrics()]
            values += self._columns(validation if self._valid_meters else validation[:1])
            logged = self._logged_means()
            begun = self._train.loss.totals(self._train.weighting.sums, self._train.sharded)[2]
        epoch = f"{learn.epoch} {(learn.iter + 1) / learn.n_iter:.0%}" if learn.n_iter else learn.epoch
        self._write(epoch, values, logged, self._first_batch + sum(map(bool, begun)))

    @collective
    def _columns(self, validation: list[float]) -> list[float]:
        """Return the values of a validation, without the loss if the model makes none."""
        if not math.isnan(validation[0]):  # The values are equal on all ranks.
            return validation
        absent = int(self._valid.weighting.absent)
        self._has_valid_loss = not (distributed.reduce(absent, "max") if self.learn.n_ranks > 1 else absent)
        return validation if self._has_valid_loss else validation[1:]

    def _write(self, epoch: int | str, values: list[float], logged: dict[str, float], n_batches: int) -> None:
        # Columns keep the order of the last row.
        logged = {name: logged[name] for name in (*self.metric_names, *logged) if name in logged}
        self.metric_names = self._names(logged)
        self.final_record = [*values, *logged.values()]
        self.values.append(self.final_record)
        self.iters.append(n_batches)
        duration = [format_time(time.perf_counter() - self._start_time)] if self.add_time else []
        self._log = [epoch, *self.final_record, *duration]
        self._table.append(dict(zip(self.metric_names, self._log, strict=True)))
        self.learn.logger(self._log)

    @collective
    def after_fit(self) -> None:
        # The fit may have been cancelled during an epoch, at different events on the ranks.
        if distributed.reduce(int(self._in_epoch), "max") if self.learn.n_ranks > 1 else self._in_epoch:
            self._train_loss()
        self.logged = {}

    @collective
    def _train_loss(self) -> float:
        """Replace this epoch's values in `losses` by those of all ranks, and return their mean."""
        sums = self._train.weighting.sums
        totals, counts, begun = self._train.loss.totals(sums, self._train.sharded)
        steps = [(total if sums else total / n) if n else None for total, n in zip(totals, counts, strict=True)]
        self._tell_not_finite(steps)
        self._smooth.close(list(compress(steps, begun)))  # Steps that all ranks have cancelled are not recorded.
        for values in (self.lrs, *self.hps.values()):
            of_epoch = values[self._first_batch :]
            of_epoch += values[-1:] * (len(steps) - len(of_epoch))  # This rank may have left early, or late.
            values[self._first_batch :] = compress(of_epoch, begun)
        self._in_epoch = False
        if self._train.loss.parts:
            return self._train.mean_loss()
        return weighted_mean(sum(totals), sum(counts), sharded=False)

    def _tell_not_finite(self, losses: Sequence[float | None]) -> None:
        """Say once in a fit which loss was the first that is not finite; `losses` are those of this epoch."""
        step = next((i for i, loss in enumerate(losses) if loss is not None and not math.isfinite(loss)), None)
        if self._told or step is None:
            return
        self._told = True
        if not any(getattr(cb, "tells_not_finite", False) for cb in self.learn.cbs if cb.run):
            self.learn.say(
                f"epoch {self.learn.epoch}: the training loss of step {step} is {losses[step]}, the first that is not "
                "finite: try a lower learning rate, and learn.check(); TerminateOnNaNCallback() ends a fit there"
            )

    @collective
    def _logged_means(self) -> dict[str, float]:
        own = {name: values.sums() for name, values in self.logged.items()}
        totals, counts = defaultdict[str, float](float), defaultdict[str, float](float)
        # A callback may log on some ranks only, so the names travel with their sums.
        for rank in distributed.all_gather(own) if self._train.sharded else [own]:
            for name, (total, count) in rank.items():
                totals[name] += total
                counts[name] += count
        return {name: total / counts[name] if counts[name] else math.nan for name, total in totals.items()}

    def state_dict(self) -> State:
        """Return the record of this fit and the earlier ones, and in 'own' this rank's part of the current epoch."""
        logged = {name: values.state_dict() for name, values in self.logged.items()}
        return {
            **{name: list(getattr(self, name)) for name in _LISTS},
            "log": list(self._log),
            "smooth": self._smooth.state_dict(),
            "history": [fit.saved() for fit in self.history],
            "has_valid_loss": self._has_valid_loss,
            "epoch": (self._in_epoch, self._first_batch, time.perf_counter() - self._start_time),
            "own": {"train": self._train.state_dict(), "logged": logged},
        }

    def load_state_dict(self, state: State) -> None:
        """Restore the record. On another number of ranks, rank 0 gets the parts of the epoch of all ranks."""
        for name in _LISTS:
            setattr(self, name, list(state[name]))
        self._log = list(state["log"])
        self._smooth.load_state_dict(state["smooth"])
        self.history[:] = [PastFit(**(json.loads(fit) if isinstance(fit, str) else fit)) for fit in state["history"]]
        self._has_valid_loss = state["has_valid_loss"]
        self._in_epoch, self._first_batch, seconds = state["epoch"]
        self._start_time = time.perf_counter() - seconds
        ranks = [state["own"]] if "own" in state else state["ranks"]
        counted = "own" in state or distributed.is_main()
        if "_train" in vars(self):  # Otherwise nothing has run here, and no epoch goes on.
            self._train.load_ranks([rank["train"] for rank in ranks], counted)
            if not self._train.is_whole:
                epoch = self.learn.epoch
                self.learn.say(f"training metrics of epoch {epoch} are nan: it began on another number of processes")
        self.logged = {}
        for rank in ranks if counted else ():
            for name, values in rank["logged"].items():
                self.logged.setdefault(name, WeighedScalars()).extend(**values)

    def to_frame(self) -> Any:
        """Return the table of the last fit as a pandas frame: its columns, and a row for each of its rows.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            from pandas import DataFrame
        except ImportError as e:
            raise ImportError("to_frame needs pandas: pip install pandas") from e
        frame = DataFrame(self._table)
        last = [name for name in frame if name == "time"]  # after metrics that were logged later
        return frame[[*frame.columns.drop(last), *last]]

    def plot_loss(
        self, skip_start: int = 5, with_valid: bool = True, all_fits: bool = False, log: bool = False, ax: Any = None
    ) -> Any:
        """Plot the smoothed training loss at every step, and the validation loss at the end of each epoch.

        Args:
            skip_start: how many steps to leave out at the start; their large losses would flatten the rest.
            with_valid: show the validation loss.
            all_fits: show the earlier fits (`history`) before the last one.
            log: use a logarithmic axis for the loss.
            ax: the matplotlib axes to draw on; by default new ones.

        Returns:
            The axes; `None` on ranks other than 0.

        Raises:
            ImportError: matplotlib is not installed.
        """
        if ax is None:
            ax = pyplot("plot_loss").subplots()[1]
        losses: list[float] = []
        valid = []
        ends = []
        fits: list = [*(self.history if all_fits else []), self]
        for fit in fits:
            if "valid_loss" in fit.metric_names:
                column = fit.metric_names.index("valid_loss") - 1
                valid += [row[column] for row in fit.values]
                ends += [len(losses) + i for i in fit.iters]
            losses += fit.losses
        skip = min(skip_start, max(0, len(losses) - 2))
        ax.plot(range(skip + 1, len(losses) + 1), losses[skip:], label="train (smoothed)")
        if with_valid and valid:
            ax.plot(ends, valid, "o-", label="valid")
        label_steps(ax, ylabel="loss", title="Training loss")
        if log:
            ax.set_yscale("log")
        ax.legend()
        return ax

    def plot_sched(self, keys: str | list[str] | None = None) -> Any:
        """Plot the scheduled hyper-parameters of the last fit at every step (of several groups, the last one's).

        Args:
            keys: names in `hps`; by default all of them, or the learning rate if nothing was scheduled.

        Returns:
            An array of axes, one for each name; `None` on ranks other than 0.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: a name that was not scheduled.
        """
        hps = self.hps or {"lr": self.lrs}
        keys = listify(keys) or list(hps)
        for key in keys:
            if key not in hps:
                raise ValueError(f"got {key!r}; the last fit has {list(hps)}{did_you_mean(key, hps)}")
        plt = pyplot("plot_sched")
        _, axes = plt.subplots(1, len(keys), figsize=(5 * len(keys), 3.5), squeeze=False, layout="constrained")
        for ax, key in zip(axes[0], keys, strict=True):
            ax.plot(range(1, len(hps[key]) + 1), hps[key])
            label_steps(ax, ylabel=key, title=_TITLES.get(key, key))
        return axes[0]

    def plot_metrics(self) -> Any:
        """Plot each column of the last fit's table, with a point for each row; training and validation in one panel.

        Returns:
            An array of axes, one for each panel; `None` on ranks other than 0.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: there is no row yet.
        """
        if not self._table:
            raise ValueError("the table has no rows yet: plot_metrics shows those of the last fit")
        by_title = defaultdict[str, list[str]](list)
        for name in dict.fromkeys(name for row in self._table for name in row if name not in ("epoch", "time")):
            by_title[name.removeprefix("train_").removeprefix("valid_")].append(name)
        axes = panels("plot_metrics", len(by_title), height=3)
        for ax, (title, curves) in zip(axes, by_title.items(), strict=True):
            for name in curves:
                points = [(n, row[name]) for n, row in zip(self.iters, self._table, strict=True) if name in row]
                ax.plot(*zip(*points, strict=True), "o-", markersize=4, label=name)
            label_steps(ax, title=title)
            if len(curves) > 1:
                ax.legend()
        return axes

    def plot_lr_find(self, ax: Any = None) -> Any:
        """Plot the losses of the last `lr_find` over the rates, with a mark for each suggestion.

        Args:
            ax: the matplotlib axes to draw on; by default new ones.

        Returns:
            The axes; `None` on ranks other than 0.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: `lr_find` has not run.
        """
        if self.lr_find_curve is None:
            raise ValueError("there is no curve to plot: call learn.lr_find() first")
        return plot_lr_find(*self.lr_find_curve, ax=ax)


_LISTS = ("values", "_table", "iters", "lrs", "final_record", "metric_names")


def plot_lr_find(lrs: Sequence[float], losses: Sequence[float], suggestions: dict[str, float], ax: Any = None) -> Any:
    """Plot the losses over the rates, with a mark for each suggestion.

    Args:
        lrs, losses: the curve.
        suggestions: rates by name.
        ax: the matplotlib axes to draw on; by default new ones.

    Returns:
        The axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    ax = pyplot("plot_lr_find").subplots()[1] if ax is None else ax
    ax.plot(lrs, losses, color="0.5")
    for name, rate in suggestions.items():
        height = np.interp(np.log(rate), np.log(lrs), losses)
        ax.plot(rate, height, "o", label=f"{name} {rate:.1e}")
    ax.set(xscale="log", xlabel="learning rate", ylabel="loss (smoothed)", title="Learning rate finder")
    if suggestions:
        ax.legend()
    return ax


_TITLES = {"lr": "Learning rate", "momentum": "Momentum", "weight_decay": "Weight decay"}


# Monitored columns of the table


def check_monitor(learn: "Learner", name: str) -> None:
    """Refuse to monitor a column that the starting fit will not have; call it in `before_fit`.

    Raises:
        ValueError: there is no such column, or no Recorder.
    """
    if not hasattr(learn, "recorder"):
        raise ValueError(
            f"monitor={name!r} is read from the Recorder's rows, and this learner has no Recorder (default_cbs=False): "
            "add Recorder() to its callbacks"
        )
    recorder = learn.recorder
    columns = recorder.metric_names[1 : -1 if recorder.add_time else None]
    if name not in columns and not any(meter.may_have(name) for meter in recorder._valid_meters):
        missing = " and, without a validation loader, none of validation" if learn.dls.valid is None else ""
        near = did_you_mean(name, columns, cutoff=0.5)  # low enough to find 'valid_mae' for 'mae'
        raise ValueError(
            f"got monitor={name!r}; this fit's columns are {', '.join(columns)}{missing}{near or '.'} For a column of "
            f"its own a callback declares what it gives to log_metric: `logs = ({name!r},)` in its class"
        )


def monitored(learn: "Learner", name: str) -> float | None:
    """Return the value of a column in the newest row, the same on all ranks; `None` if that row has no such column."""
    recorder = learn.recorder
    # Not strict: the names may end with the time, which the record does not have.
    return dict(zip(recorder.metric_names[1:], recorder.final_record, strict=False)).get(name)


# The table


class TableLogger:
    """The default logger of a Learner: prints a header and the rows as plain lines, one by one with `write`."""

    def __init__(self, learn: "Learner", write: Callable[[str], None] = print) -> None:
        self.learn, self.write = learn, write
        self._names: list[str] = []
        self._rows = 0

    def __call__(self, row: list) -> None:
        """Print a row, and the header before it if a new fit has begun or the columns have changed."""
        recorder = self.learn.recorder
        if recorder.metric_names != self._names or (self._rows and len(recorder.values) == 1):
            self.header()
        self._rows += 1
        self.write(format_row(self._names, row))

    def header(self) -> None:
        self._names, self._rows = list(self.learn.recorder.metric_names), 0
        self.write(format_row(self._names, self._names))


def format_value(value: Any) -> str:
    """Return the text of a cell, in one line: numbers with six decimals, large and tiny ones with four digits."""
    if not isinstance(value, float):
        return escaped_line(str(value))
    is_tiny = 0 < abs(value) < 1e-5  # six decimals would leave one digit or none
    return f"{value:.6f}" if abs(value) < 1e5 and not is_tiny else f"{value:.4g}"


def format_row(names: list[str], row: list) -> str:
    """Return a line of the table, its cells right-aligned under the names; a wider one takes space of the next."""
    widths = {"epoch": 5, "time": 7}
    line, end = "", -2
    for name, cell in zip(names, map(format_value, row), strict=True):
        end += 2 + max(widths.get(name, 9), columns(format_value(name)))
        line += " " * max(bool(line), end - columns(line) - columns(cell)) + cell
    return line
