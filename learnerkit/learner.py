"""The Learner: the training loop, and the methods that its users call."""

from __future__ import annotations  # so that `help` and editors show `Callbacks` rather than its definition

import copy
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from inspect import signature
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import AdamW, Optimizer
from torch.serialization import get_unsafe_globals_in_checkpoint

from learnerkit import arguments, distributed, files, optim, parallel, run_state
from learnerkit.callback import Callback, Dispatch, acts_in_evaluation, describe_loop, is_of, kept_flags, running
from learnerkit.callbacks.accumulation import GradientAccumulation
from learnerkit.callbacks.augmentation import BatchTransform
from learnerkit.callbacks.lr_find import SUGGESTIONS, LRFinder, choice
from learnerkit.callbacks.precision import MixedPrecision
from learnerkit.callbacks.prediction import (
    GatherPredictions,
    KeepPredictions,
    Prediction,
    activation_for,
    averaged,
    predicted,
    whole_dataset,
)
from learnerkit.callbacks.progress import ProgressCallback, print_above
from learnerkit.callbacks.recorder import Recorder, TableLogger, Validation
from learnerkit.callbacks.schedule import ParamScheduler, SchedCos, Schedule, combine_scheds, combined_cos
from learnerkit.callbacks.training import StepBudget, TrainEvalCallback
from learnerkit.checkpoints.callback import CheckpointCallback
from learnerkit.checkpoints.storage import read_checkpoint
from learnerkit.data.batches import loader_len
from learnerkit.data.loaders import DataLoaders, Unpacker, check_loader, named_inputs
from learnerkit.data.order import keep_seeds
from learnerkit.data.show import DRAWN
from learnerkit.data.stream import reading
from learnerkit.events import (
    CancelBackwardException,
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelStepException,
    CancelTrainException,
    CancelValidException,
    Event,
    FitDone,
)
from learnerkit.explain import explain, is_out_of_memory
from learnerkit.files import CheckpointError, File, Saved, fitted, save_whole
from learnerkit.inspection.undoing import give_shapes, move_to_device, unchanged
from learnerkit.large.mapped import fill_buffers, made_model
from learnerkit.losses import (
    LossWeight,
    Weight,
    accept_no_loss,
    check_shapes,
    count_passed,
    evaluate_again,
    fire_after_loss,
    found_loss,
    loss_name,
    loss_without_targets,
    makes_loss,
    new_weighting,
    no_loss,
    pred_of,
    take_loss,
)
from learnerkit.marks import collective, not_collective
from learnerkit.metrics import metric_names
from learnerkit.notebook.kernel import distrib_ctx
from learnerkit.preflight.memory import explain_memory
from learnerkit.preflight.ranks import check_distributed
from learnerkit.preflight.step import check
from learnerkit.processes.rank_main import shorten, wants_short
from learnerkit.shards import Gatherer, rows_for
from learnerkit.state import COUNTERS, TRANSIENT, RunState, State
from learnerkit.stores.paths import AnyPath, StorePath
from learnerkit.text import first_few
from learnerkit.utils import (
    PlainLock,
    check_keywords,
    count_parameters,
    is_placed,
    listify,
    overrides,
    own_loss_arguments,
    replaced,
    restorer,
    suggests_keywords,
    training_modes,
    unwrap,
)
from learnerkit.values import TensorFunction, map_batch, same

if TYPE_CHECKING:
    import learnerkit as lk
    from learnerkit.callbacks.lr_find import SuggestedLRs
    from learnerkit.callbacks.tracking import TrackerCallback
    from learnerkit.callbacks.training import BnFreeze
    from learnerkit.inspection.summary import Summary
    from learnerkit.parallel import DriftCheck
    from learnerkit.scaling.batch_size import BatchSize
    from learnerkit.scaling.report import ScalingReport

_EVENTS = {
    level: (f"before_{level}", f"after_cancel_{level}", f"after_{level}")
    for level in ("fit", "epoch", "train", "validate", "batch", "backward", "step")
}

_made = count()
"""A counter that numbers the learners of this process, in the order in which they are made."""

_in_runs = list[nn.Module]()
"""The models of the runs that go on now, of all learners of this process."""

# Switched off in `Learner.predict`.
_SWITCHED_OFF = (ProgressCallback, parallel.DistributedCallback, parallel.DataParallelCallback)
_LEFT_OUT = (*_SWITCHED_OFF, TrainEvalCallback)

Rates = float | slice | Iterable[float] | dict[str, Any] | optim.Later | Schedule
"""Learning rates in the form that `fit` takes."""

Shard = bool | Iterable[str | type[nn.Module]]
"""The units of a sharded model: those that its structure suggests, or names and classes of modules."""

Callbacks = Callback | type[Callback] | Iterable[Callback | type[Callback]] | None
"""Callbacks in the form that `fit` takes."""


def _is_in_run(model: nn.Module) -> bool:
    """Tell whether a run goes on whose model has a part of this one, as where a callback runs another learner."""
    return not {*model.modules()}.isdisjoint(module for each in [*_in_runs] for module in each.modules())


def scaling_rate() -> Any:
    """Return the module `learnerkit.scaling.rate`, imported at the first call."""
    from learnerkit.scaling import rate

    return rate


_P = ParamSpec("_P")
_R = TypeVar("_R")


def public(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a public method that raises errors with a short traceback, and suggests names for unknown keywords."""
    checked = suggests_keywords(method)

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return checked(*args, **kwargs)
        except BaseException as e:
            if wants_short():
                shorten(e)
            raise

    return call


def on_workers(method: Callable[Concatenate[Learner, _P], _R]) -> Callable[Concatenate[Learner, _P], _R]:
    """Return a public method that the notebook workers carry out, if the learner has any."""

    @functools.wraps(method)
    def run(learn: Learner, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if learn._workers is None:
            return method(learn, *args, **kwargs)
        learn._take_callbacks()  # a shared callback would take another learner along
        return learn._workers.call(call, args, kwargs)

    call = public(run)
    return call


class Learner(RunState):
    """Trains a model on data, with callbacks that can read and change everything on the way.

    Args:
        dls: the loaders.
        model: any module; it moves to the loaders' device at first use and stays there. A model that spans several
            devices (`device_map=` of transformers, or parameters on several GPUs) stays where it is, and gets its
            inputs on its first device. For a model that is too large for the memory of one process, give a function
            that makes it, or a model on the meta device that `load` fills: with `shard=True` each of several ranks then
            keeps only its rows, also from fit to fit.
        loss_func: f(pred, *targets) -> scalar, or f(pred) where batches have no targets. Keyword-only parameters
            without a default get the attributes of the learner that have their names, and `learn` the learner itself.
            `None` is for a model that computes its own loss: `output.loss`, or, if the output is a dict of scalars,
            their sum, where each of them gets a column of the table. In a tuple or list the loss is the one 0-dim
            tensor, and the first other entry is the prediction; a 0-dim tensor is only the loss. A model that computes
            none in evaluation, such as a detector, is validated by its metrics alone.
        opt_func: called as `opt_func(param_groups, lr=lr)`: any torch optimizer class, or a function, which may make
            other groups.
        lr: the learning rate of `fit` if it gets none; by default the one that is bound in `opt_func` (`partial(SGD,
            lr=0.1)`), else those with which the optimizer's groups are made (0.001).
        splitter: f(model) -> groups of parameters: each a list, or a dict of the list as `params` and of options of the
            optimizer, such as `lr` and `weight_decay`; `lr_scale` multiplies the group's rate. `layer_decay` is a
            splitter.
        cbs: callbacks beside the default ones.
        metrics: functions, `Metric` objects, torchmetrics or torcheval objects; a dict gives them names.
        path, model_dir: `save` and `load` use the directory path/model_dir.
        wd: weight decay of weights, but not of norms, biases and the parameters that the model names in a method
            `no_weight_decay`, and not of groups for which the splitter gives a decay. Or decays by patterns of
            parameter names, of which the first that matches counts: `{"*bias": 0, "*pos_embed*": 0, "*": 0.05}`;
            parameters that match none keep the optimizer's decay. `None` leaves all decays to the optimizer.
        wd_bn_bias: apply a single weight decay to norms, biases and the other exempt parameters, too.
        train_bn: keep norm layers of frozen groups trainable.
        moms: momenta at the start, peak and end of `fit_one_cycle`.
        loss_weight: the items in the loss's mean, if they are not samples: 'sum', or a function that counts them. It is
            called as f(*targets) if it takes that many arguments, else as f(pred, *targets), where `pred` is the whole
            output of a model that computes its own loss. 'samples' says that such a loss is a mean over samples, and
            any other str is the name of an entry of the output that has the count. For a model that returns a dict of
            losses, give a dict with one of these for each.
        default_cbs: start with `TrainEvalCallback`, `Recorder` and `ProgressCallback`, except those among `cbs`,
            as such or as subclasses.

    Raises:
        TypeError, ValueError: an invalid argument; the message says what is allowed.
    """

    # These attributes last from run to run. `RunState` has those that a run sets; the arguments above are attributes,
    # too.
    dls: DataLoaders  # the loaders
    model: nn.Module  # the model, wrapped while a callback wraps it
    opt: Any  # a torch optimizer, or a dict of several by name; `None` until it is needed
    cbs: list[Callback]  # the callbacks, as they were added
    logger: Callable[[list[Any]], None]  # called with each row of the table
    lr_finds: list[dict[str, float]]  # the suggestions of each call of `lr_find`, by name
    recorder: Recorder  # present if it is among the callbacks; other callbacks are attributes by their names, too

    if TYPE_CHECKING:  # the library's own callbacks, by their names
        activation_checkpointing: lk.ActivationCheckpointing
        activation_stats: lk.ActivationStats
        batch_transform: lk.BatchTransform
        bn_freeze: BnFreeze
        carried_state: lk.CarriedState
        channels_last: lk.ChannelsLast
        checkpoint: lk.CheckpointCallback
        comet: lk.CometCallback
        compile: lk.Compile
        csv_logger: lk.CSVLogger
        cut_mix: lk.CutMix
        distributed: lk.DistributedCallback
        drift_check: DriftCheck
        early_stopping: lk.EarlyStoppingCallback
        ema: lk.EMA
        gradient_accumulation: lk.GradientAccumulation
        gradient_clip: lk.GradientClip
        gradient_noise_scale: lk.GradientNoiseScale
        json_logger: lk.JSONLogger
        mc_dropout: lk.MCDropout
        mix_up: lk.MixUp
        mixed_precision: lk.MixedPrecision
        mlflow: lk.MLflowCallback
        overfit_batch: lk.OverfitBatch
        parallel: lk.DataParallelCallback
        param_scheduler: lk.ParamScheduler
        profiler: lk.Profiler
        progress: lk.ProgressCallback
        reduce_lr_on_plateau: lk.ReduceLROnPlateau
        save_model: lk.SaveModelCallback
        scaling_monitor: lk.ScalingMonitor
        short_epoch: lk.ShortEpochCallback
        show_graph: lk.ShowGraphCallback
        split_batch: lk.SplitBatch
        swa: lk.SWA
        tensor_board: lk.TensorBoardCallback
        terminate_on_na_n: lk.TerminateOnNaNCallback
        torch_scheduler: lk.TorchScheduler
        tracker: TrackerCallback
        trackio: lk.TrackioCallback
        train_eval: TrainEvalCallback
        validate_every: lk.ValidateEvery
        wandb: lk.WandbCallback

    @suggests_keywords
    def __init__(
        self,
        dls: DataLoaders,
        model: nn.Module | Callable[[], nn.Module],
        loss_func: Callable[..., Tensor] | None = None,
        *,
        opt_func: Callable[..., Optimizer] = AdamW,
        lr: Rates | None = None,
        splitter: Callable[[nn.Module], Iterable[Any]] | None = None,
        cbs: Callbacks = None,
        metrics: Any = None,
        path: str | Path = ".",
        model_dir: str | Path = "models",
        wd: float | Mapping[str, float] | None = None,
        wd_bn_bias: bool = False,
        train_bn: bool = True,
        moms: tuple[float, float, float] = (0.95, 0.85, 0.95),
        loss_weight: Weight | None = None,
        default_cbs: bool = True,
    ) -> None:
        super().__init__()
        arguments.check_subclass(type(self), Learner)
        made, self.mapped = made_model(model)
        arguments.check_learner(dls, made, loss_func, opt_func, splitter)
        self.dls, self.model = dls, made
        self.loss_func = loss_func
        self.opt_func, self.splitter = opt_func, splitter
        self.lr = lr
        self.metrics = metrics if isinstance(metrics, Mapping) else listify(metrics)
        self.path, self.model_dir = files.local_path("path", path), files.local_path("model_dir", model_dir)
        self.wd, self.wd_bn_bias = wd, wd_bn_bias
        self.train_bn = train_bn
        self.moms = arguments.momenta(moms)
        self.loss_weight = loss_weight
        self._loss_weighting = LossWeight(loss_func, loss_weight)  # checks its arguments before a fit
        self._device, self._loss_without_targets = torch.device("cpu"), False  # both are set for each run
        self.opt, self.logger, self.cbs = None, TableLogger(self), []
        self._removed_cbs: list[Callback] = []
        self._scaler_state = {}
        self._left_out: tuple[Any, list[nn.Parameter]] = None, []  # an optimizer, and what it leaves out of the model
        self._said_step = ""  # the last printed line about the batches of a step, to print it once
        self._number = next(_made)
        self._resumes: Mapping[str, Any] | None = None  # a state from inside a fit, from which the next fit continues
        self.lr_finds = []
        self.shards = self._agreement = self._workers = None
        self._lock = PlainLock()  # held while a run begins, and during a prediction
        self._thread: int | None = None  # the thread in which a run goes on
        self._dls_cbs = dls.cbs  # those of the loaders that are among the callbacks
        given = [*dls.cbs, *listify(cbs)]
        kinds = [cb if isinstance(cb, type) else type(cb) for cb in given]
        # A Recorder with other options, or a subclass, is in place of the default.
        defaults = (TrainEvalCallback, Recorder, ProgressCallback) if default_cbs else ()
        self.add_cbs([kind() for kind in defaults if not any(issubclass(own, kind) for own in kinds)])
        self.add_cbs(given)
        arguments.check_loss(self)
        with replaced(self, _dispatch=Dispatch(self.cbs, fitting=True)):
            self._dispatch.fire(Event.after_create)

    def __repr__(self) -> str:
        opts, rates = ", ".join(type(opt).__name__ for opt in self.opts), self.lr
        if not opts and overrides(self, "create_opt"):
            opts, rates = "of create_opt", self._named_lr
        elif opts and isinstance(rates, int | float):
            rates = optim.rates_text(sum(optim.group_rates(self.opt, None, self._named_lr, lambda given: given), []))
        decays = optim.decays_text(self.opts) if opts else f", weight decay {self.wd}" * (self.wd is not None)
        opts = (opts or loss_name(self.opt_func)) + (f", lr {rates}" if rates is not None else "") + decays
        lines = {
            "model": count_parameters(self.model), "data": self.dls,
            "loss": "the model's own" if self.loss_func is None else loss_name(self.loss_func),
            "optimizer": opts, "metrics": ", ".join(metric_names(self.metrics)) or "none",
            "callbacks": ", ".join(map(repr, self.cbs)) or "none",
        }  # fmt: skip
        return "\n".join([type(self).__name__, *(f"  {name:<11}{text}" for name, text in lines.items())])

    # The loop, from the outside in. It fits on one screen; everything beside the loop itself is a callback.

    @collective
    def _fit(self) -> None:
        if self.n_steps is None:
            epochs: Iterable[int] = range(self.start_epoch, self.n_epoch or 0)
        else:
            epochs = takewhile(lambda _: self.pct_train < 1, count(self.start_epoch))
        for self.epoch in epochs:
            self._level("epoch", self._one_epoch, CancelEpochException)

    @collective
    def _train(self, n_epoch: int | None, n_steps: int | None, start_epoch: int = 0) -> None:
        """Train and validate, for the given numbers of epochs or steps."""
        self.n_epoch, self.n_steps = n_epoch, n_steps
        self.start_epoch, self.pct_train = start_epoch, 0.0
        self._level("fit", self._fit, CancelFitException)

    @collective
    def _one_epoch(self) -> None:
        self._read(self.dls.train, training=True)
        if self.dls.valid is not None:
            self._read(self.dls.valid, training=False)

    @collective
    def _read(self, dl: Iterable, training: bool) -> None:
        """Train on a loader, or validate on it."""
        self.dl, self.training = self.dls.twin(dl, training), training
        self.iter, self.first_iter = -1, 0
        self._dispatch.phase(training)
        if training:
            self._level("train", self._all_batches, CancelTrainException)
        else:
            with torch.no_grad(), keep_seeds(dl, self._device) if self._in_fit else nullcontext():
                self._level("validate", self._all_batches, CancelValidException)

    @collective
    def _all_batches(self) -> None:
        self.n_iter, self.iter = loader_len(self.dl), self.first_iter - 1
        agreement = self._agreement
        arguments_taken = own_loss_arguments(self.loss_func, self.model)
        with arguments.pass_checked(self, self._left_out), optim.no_gradients_left(self), reading(self):
            self._unpack = Unpacker(self.dls, self.dl, self._device, arguments_taken, agreement is not None)
            for self.iter, self.batch in enumerate(self._unpack.dl, self.first_iter):
                self._batch_index = self.iter
                self._one_batch() if agreement is None else agreement.run_batch(self._one_batch)
        if agreement is not None:
            agreement.end_batches()

    def _one_batch(self) -> None:
        self.batch, self.xb, self.yb, self.batch_size = self._unpack(self.batch, self.iter)
        self.pred = self.output = self.loss = self.loss_grad = None
        self.loss_count = self.batch_size  # of a loss that a callback sets; that of the loop counts by itself
        bracket = self._level if self._dispatch.table["batch"] else self._events
        bracket("batch", self._do_batch, CancelBatchException)

    def _do_batch(self) -> None:
        dispatch = self._dispatch
        self._forward()
        if dispatch.table["after_pred"]:  # checked here, so that an event without hooks costs nothing
            dispatch.fire("after_pred")
        if (self.yb or self._loss_without_targets) and self.task != "predict":
            take_loss(self)
        if dispatch.table["after_loss"]:
            fire_after_loss(self)
        if self.training:
            self._events("backward", self._weighted_backward, CancelBackwardException)
            self._events("step", self._step, CancelStepException)
            self._zero_grad()
        elif self.loss is None and self.task != "predict":
            accept_no_loss(self)

    def _weighted_backward(self) -> None:
        if self.loss_grad is None:
            raise no_loss(self)
        if self._gradient is None:
            self._backward()
        else:
            self._gradient.backward()

    def _level(self, name: str, body: Callable[[], None], cancel: type[Exception]) -> None:
        """Run a level of the loop, with the cleanups of callbacks at its end, however it ends."""
        with self._dispatch:
            self._events(name, body, cancel)

    def _events(self, name: str, body: Callable[[], None], cancel: type[Exception]) -> None:
        """Fire `before_x`, run the body, fire `after_cancel_x` if it was cancelled, and fire `after_x`."""
        dispatch, (before, after_cancel, after) = self._dispatch, _EVENTS[name]
        try:
            try:
                if dispatch.table[before]:
                    dispatch.fire(before)
                body()
            except cancel:
                dispatch.fire(after_cancel)
            if dispatch.table[after]:
                dispatch.fire(after)
        except cancel:
            pass  # the cancel came when the level was over

    # Methods that a subclass may override, called inside the events above.

    def _forward(self) -> None:
        """Set `output` and `pred` from the model."""
        named = None if type(self.batch) in (tuple, list) else named_inputs(self.batch, self.xb)
        self.output = out = self.model(*(self.xb if named is None else ()), **count_passed(self), **(named or {}))
        self.pred = out if isinstance(out, Tensor) and out.ndim else pred_of(out, makes_loss(self))

    def _loss(self) -> None:
        """Set `loss_grad`, which is differentiated, and `loss`, which is recorded."""
        if not self.iter:
            check_shapes(self.loss_func, self.pred, self.yb)
        loss_func = None if self._loss_weighting.asks else self.loss_func
        loss = found_loss(self) if loss_func is None else loss_func(self.pred, *self.yb)
        self.loss_grad, self.loss = loss, loss.detach() if isinstance(loss, Tensor) else loss

    def _backward(self) -> None:
        """Compute the gradients."""
        self.loss_grad.backward()

    def _step(self) -> None:
        """Take a step of the optimizer, or of each of several."""
        self.opt.step()

    def _zero_grad(self) -> None:
        """Clear the gradients."""
        optim.clear_gradients(self.opt)

    def create_opt(self) -> Any:
        """Set `opt`: by default one optimizer of the splitter's groups; a subclass may make a dict of them."""
        first = max(optim.rates(self.lr, len(self.lr) if isinstance(self.lr, list) else 2))
        self.opt = optim.make_optimizer(self.opt_func, optim.make_groups(self.model, self.splitter), first, self.model)
        self._note_opt()  # also where a user has called this

    @collective
    def closure(self, reuse: bool = False) -> Callable[[], Tensor]:
        """Return a function for an optimizer that evaluates the loss several times in a step, such as LBFGS or SAM.

        It is for a subclass with `def _step(self): self.opt.step(self.closure())`. An optimizer whose `step` requires a
        closure, such as torch's LBFGS, gets `closure(reuse=True)` from the Learner itself.

        Each call of the function clears the gradients, computes the loss of the present batch and its gradients again,
        and returns the loss. The events from `after_pred` to `after_backward` take place in each call, so that a
        callback changes the loss as in the loop. The batch counts once; `pred`, `output` and `loss` stay those of the
        loop's own pass, also for the recorder and metrics. On several ranks the gradients are averaged, and the
        optimizer gets the loss of all ranks; every rank must reach this.

        Args:
            reuse: let the first call return the loss of the pass that the loop has just made, whose gradients are
                there. It is for optimizers that evaluate the loss first at the present weights.

        Raises:
            RuntimeError: called outside of an optimizer step.
            ValueError: a callback does not allow an exact result: accumulation, clipping, or fp16.
        """
        arguments.check_in_step(self)
        arguments.check_closure(self)
        known = [self.loss_grad] if reuse else []

        def evaluate() -> Tensor:
            loss = known.pop() if known else evaluate_again(self)
            return torch.zeros(()) if loss is None else loss.detach()  # a rank may have left its batch before the loss

        return evaluate

    @collective
    def _step_by_closure(self) -> None:
        """Take a step of an optimizer that needs a closure; replaces `_step` in a run."""
        self.opt.step(self.closure(reuse=True))

    @property
    @not_collective("it compares a method, and does not call it")
    def _by_closure(self) -> bool:
        """True if `_step_by_closure` replaces `_step`."""
        return vars(self).get("_step") == self._step_by_closure

    # Runs

    @on_workers
    @collective
    def fit(
        self,
        n_epoch: int | None = None,
        lr: Rates | None = None,
        wd: float | Mapping[str, float] | None = None,
        cbs: Callbacks = None,
        reset_opt: bool = False,
        start_epoch: int = 0,
        *,
        n_steps: int | None = None,
    ) -> None:
        """Train for `n_epoch` epochs at a constant learning rate, validating after each.

        After the fit, however it ends, model, loaders, logger and callbacks are restored. The model is in eval mode
        after a successful fit; after an error all modules have their earlier modes.

        Args:
            n_epoch: the number of epochs, with those before `start_epoch`.
            lr: one rate; `slice(hi)` or `slice(lo, hi)` over the parameter groups; or a list; default the Learner's.
                For several optimizers it may be a dict of these by name. A schedule, such as `linear_warmup(0.1,
                1e-2)`, or one for each group, is the rate over this fit. Groups that were made with different rates, by
                the splitter, `opt_func` or `create_opt`, keep them if no rate is named. A single rate, schedule or
                `slice(hi)` is that of the groups for which the splitter gives none, or else of the group with the
                highest rate, and the others keep their ratio to it; a list has a rate for each group.
            wd: weight decay, or decays by patterns of names, as the Learner takes them; default the Learner's.
            cbs: callbacks for this fit alone.
            reset_opt: start with a new optimizer instead of the last fit's.
            start_epoch: skip the epochs before this one.
            n_steps: train for this number of optimizer steps instead, over as many epochs as they take.

        Raises:
            ValueError: invalid data, loss, metrics or arguments, found before anything is changed where possible.
        """
        arguments.check_fit(self, n_epoch, start_epoch, n_steps)
        parallel.warn_outside_context(self)
        if os.environ.get("LEARNERKIT_REPORT") == str(os.getpid()):  # `python -m learnerkit.launch --report` sets it
            del os.environ["LEARNERKIT_REPORT"]
            with self.added_cbs(cbs):
                self.scaling_report()
            raise SystemExit(0)
        cbs, lr = listify(cbs), optim.listed(lr)
        if optim.has_schedule(lr):
            scheds: Any = {"lr": lr}
            cbs, lr = [ParamScheduler(scheds), *cbs], None
        budget = [] if n_steps is None else [StepBudget(n_steps)]
        with self._running("fit", [*budget, *cbs, *run_state.going_on(self._resumes)]):
            self._say_step()
            self._prepare_opt(lr, wd, reset_opt)
            with suppress(FitDone):
                self._train(n_epoch, n_steps, start_epoch)
        self.n_fits += 1

    @public
    @collective
    def fit_one_cycle(
        self,
        n_epoch: int | None = None,
        lr_max: Rates | None = None,
        div: float = 25.0,
        div_final: float = 1e5,
        pct_start: float = 0.25,
        wd: float | Mapping[str, float] | None = None,
        moms: tuple[float, float, float] | None = None,
        cbs: Callbacks = None,
        reset_opt: bool = False,
        start_epoch: int = 0,
        *,
        n_steps: int | None = None,
    ) -> None:
        """Train with the 1cycle policy (Smith, https://arxiv.org/abs/1803.09820): rates go up and down along cosines.

        Arguments that are not named here are those of `fit`.

        Args:
            lr_max: the peak rate; default the Learner's `lr`.
            div: the first rate is lr_max / div.
            div_final: the rate at the end is lr_max / div_final; the last step is one step before it.
            pct_start: the share of the steps on the way up.
            moms: momentum at the start, the peak and the end; default the Learner's. Optimizers without momentum are
                left alone.

        Raises:
            ValueError: the training loader has no length, so that the progress of training is unknown.
        """
        cycle, momentum = self._one_cycle(div, div_final, pct_start, moms)
        self._fit_scheduled(cycle, momentum, n_epoch, lr_max, wd, cbs, reset_opt, start_epoch, n_steps)

    def _one_cycle(
        self, div: float = 25.0, div_final: float = 1e5, pct_start: float = 0.25, moms: tuple | None = None
    ) -> tuple[Callable[[float], Schedule], Schedule]:
        """Return the function that makes a rate's schedule from its peak, and the schedule of the momentum."""
        arguments.check_positive("div", div)
        arguments.check_positive("div_final", div_final)
        momentum = combined_cos(pct_start, *arguments.momenta(self.moms if moms is None else moms))
        return lambda peak: combined_cos(pct_start, peak / div, peak, peak / div_final), momentum

    @public
    @collective
    def fit_flat_cos(
        self,
        n_epoch: int | None = None,
        lr: Rates | None = None,
        div_final: float = 1e5,
        pct_start: float = 0.75,
        wd: float | Mapping[str, float] | None = None,
        cbs: Callbacks = None,
        reset_opt: bool = False,
        start_epoch: int = 0,
        *,
        n_steps: int | None = None,
    ) -> None:
        """Train at a constant rate, and then let it fall along a cosine.

        Arguments that are not named here are those of `fit`.

        Args:
            div_final: the rate at the end is lr / div_final; the last step is one step before it.
            pct_start: the share of the steps at the constant rate.

        Raises:
            ValueError: the training loader has no length, so that the progress of training is unknown.
        """
        arguments.check_positive("div_final", div_final)

        def flat_cos(rate: float) -> Schedule:
            return combined_cos(pct_start, rate, rate, rate / div_final)

        self._fit_scheduled(flat_cos, None, n_epoch, lr, wd, cbs, reset_opt, start_epoch, n_steps)

    @public
    @collective
    def fit_sgdr(
        self,
        n_cycles: int,
        cycle_len: int,
        lr_max: Rates | None = None,
        cycle_mult: int = 2,
        cbs: Callbacks = None,
        reset_opt: bool = False,
        wd: float | Mapping[str, float] | None = None,
        start_epoch: int = 0,
    ) -> None:
        """Train with warm restarts (SGDR; Loshchilov and Hutter, https://arxiv.org/abs/1608.03983).

        In each cycle the rate falls from `lr_max` to 0 along a cosine. Arguments that are not named here are those
        of `fit`.

        Args:
            n_cycles: the number of cycles.
            cycle_len: the number of epochs of the first cycle.
            lr_max: the rate at the start of each cycle; default the Learner's `lr`.
            cycle_mult: the factor by which each cycle is longer than the last.

        Raises:
            ValueError: the training loader has no length, or the cycles are not given by whole numbers of 1 or more.
        """
        for name, value in (("n_cycles", n_cycles), ("cycle_len", cycle_len), ("cycle_mult", cycle_mult)):
            arguments.check_count(name, value)
        lengths = [cycle_len * cycle_mult**i for i in range(n_cycles)]
        shares = [length / sum(lengths) for length in lengths]

        def cycles(peak: float) -> Schedule:
            return combine_scheds(shares, [SchedCos(peak, 0.0)] * n_cycles)

        self._fit_scheduled(cycles, None, sum(lengths), lr_max, wd, cbs, reset_opt, start_epoch)

    @on_workers
    @collective
    def _fit_scheduled(
        self,
        schedule: Callable[[float], Schedule],
        momentum: Schedule | None,
        n_epoch: int | None,
        lr: Rates | None,
        wd: float | Mapping[str, float] | None,
        cbs: Callbacks,
        reset_opt: bool,
        start_epoch: int,
        n_steps: int | None = None,
    ) -> None:
        """Fit with a schedule for each group's rate, and one of the momentum for optimizers that have it."""
        arguments.check_fit(self, n_epoch, start_epoch, n_steps)
        cbs = listify(cbs)
        self._make_opt(reset_opt)
        peaks = optim.group_rates(self.opt, lr, self._named_lr, functools.partial(optim.settled, self, cbs=cbs))
        scheds = {"lr": optim.named(self.opt, [list(map(schedule, each)) for each in peaks])}
        if momentum is not None and any(map(optim.has_momentum, self.opts)):
            momenta = [momentum if optim.has_momentum(opt) else None for opt in self.opts]
            scheds["momentum"] = optim.named(self.opt, momenta)
        cbs = [ParamScheduler(scheds), *cbs]
        # A subclass may override fit without this argument.
        more: dict[str, Any] = {} if n_steps is None else {"n_steps": n_steps}
        self.fit(n_epoch, optim.named(self.opt, peaks), wd, cbs, start_epoch=start_epoch, **more)

    @public
    @collective
    def fine_tune(
        self,
        epochs: int | None = None,
        base_lr: float = 2e-3,
        freeze_epochs: int = 1,
        lr_mult: float = 100.0,
        pct_start: float = 0.3,
        div: float = 5.0,
        *,
        n_steps: int | None = None,
        freeze_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Train only the last parameter group, then the whole model with lower rates for its first groups.

        The method is ULMFiT's gradual unfreezing and discriminative rates (Howard and Ruder,
        https://arxiv.org/abs/1801.06146), with a 1cycle fit for each of the two parts.

        Args:
            epochs: the epochs of the second part.
            base_lr: the head's peak rate in the first part, and twice that of the second.
            freeze_epochs: the epochs of the first part.
            lr_mult: the ratio of the head's rate to the first group's, in the second part, if there is a splitter and
                it gives no rates itself.
            pct_start, div: options of the second part, as in `fit_one_cycle`.
            n_steps: optimizer steps of the second part, instead of `epochs`.
            freeze_steps: optimizer steps of the first part, instead of `freeze_epochs`.
            kwargs: arguments of `fit_one_cycle`, for both parts.

        Raises:
            TypeError, ValueError: arguments that `fit_one_cycle` does not take; nothing is frozen then.
        """
        arguments.check_positive("lr_mult", lr_mult)
        if isinstance(base_lr, slice | str) or optim.is_row(base_lr):
            raise TypeError(f"got base_lr={base_lr!r}; it is one rate, from which lr_mult makes those of the groups")
        kwargs["cbs"] = listify(kwargs.get("cbs"))  # a list, as both parts read it
        high = base_lr / 2
        groups = optim.split(unwrap(self.model), self.splitter)
        are_alike = not any(group.keys() & {"lr", "lr_scale"} for group in groups)  # other groups keep their ratio
        rates = slice(high / lr_mult, high) if len(groups) > 1 and are_alike else high
        first = freeze_epochs if freeze_steps is None else None
        head = dict(n_epoch=first, n_steps=freeze_steps, lr_max=slice(base_lr), pct_start=0.99, **kwargs)
        whole = dict(n_epoch=epochs, n_steps=n_steps, lr_max=rates, pct_start=pct_start, div=div, **kwargs)
        takes = {*signature(self.fine_tune).parameters, *signature(self.fit_one_cycle).parameters}
        check_keywords("Learner.fine_tune", kwargs, sorted(takes - {"kwargs", "n_epoch", "lr_max"}))
        for part in (head, whole):
            arguments.check_fit(self, part["n_epoch"], part.get("start_epoch", 0), part["n_steps"])
            optim.rates(part["lr_max"], 2)
            self._one_cycle(**{name: part[name] for name in ("div", "div_final", "pct_start", "moms") if name in part})
        if n_steps is None or freeze_steps is None:
            arguments.check_length(self.dls.train, "fine_tune")
        self.freeze()
        self.fit_one_cycle(**head)
        self.unfreeze()
        self.fit_one_cycle(**whole)

    @on_workers
    @collective
    def lr_find(
        self,
        start_lr: float = 1e-7,
        end_lr: float = 10.0,
        num_it: int = 100,
        stop_div: bool = True,
        show_plot: bool = True,
        suggest_funcs: Callable[..., Any] | Iterable[Callable[..., Any]] = SUGGESTIONS,
    ) -> SuggestedLRs:
        """Train while the learning rate grows, and suggest rates from the course of the loss: `learn.lr_find().valley`.

        The method is the learning rate range test (Smith, https://arxiv.org/abs/1506.01186). A printed line says which
        rate to take: `valley`, unless the loss hardly fell, or was lowest at a rate below it.

        Afterwards weights, optimizer, random streams and data order are exactly restored, also after an error, and so
        is the rest that `check` restores, and the recorder, except the curve for its `plot_lr_find`. If groups were
        made with different rates, they keep their ratio meanwhile, and the rates are those of the group with the
        highest. Under DDP every rank must reach this; the losses are those of the global batches, and all ranks get the
        same suggestions.

        Args:
            start_lr: the first rate.
            end_lr: the last rate; in between it grows by the same factor at every step.
            num_it: the number of optimizer steps.
            stop_div: stop when the smoothed loss is four times its lowest value, or no longer finite.
            show_plot: plot the losses over the rates on rank 0, if matplotlib is installed.
            suggest_funcs: `valley`, `slide`, `minimum`, `steep` by default; or your own functions of (rates, losses,
                num_it), of which the first two are tensors on the host.

        Returns:
            A named tuple with a rate for each of the functions, under its name.

        Raises:
            RuntimeError: called during a fit; call it before.
            ValueError: invalid arguments, or too few losses for a suggestion.
        """
        finder = LRFinder(start_lr, end_lr, num_it, stop_div, listify(suggest_funcs))
        arguments.check_fit(self, n_epoch=None, n_steps=num_it, who="lr_find")
        parallel.warn_outside_context(self)
        if (recorded := self._recorded_lr_find(finder)) is not None:
            return recorded
        with self._trying("lr_find", [finder]) as train:
            train(n_steps=num_it)
        suggested: Any = finder.suggest(show_plot)
        if hasattr(self, "recorder"):
            self.recorder.lr_find_curve = finder.curve
        if finder.curve is not None and (line := choice(*finder.curve)):
            self.say(line)
        scaling_rate().say_held(self)
        self.lr_finds.append(suggested._asdict())
        return suggested

    @collective
    def _recorded_lr_find(self, finder: LRFinder) -> Any:
        """Return the result of this call in an earlier process whose run a CheckpointCallback continues, or `None`."""
        for cb in running(self.cbs, CheckpointCallback):
            rates = cb.recorded_lr_find(len(self.lr_finds))
            if rates is not None and (suggested := finder.recorded(rates)) is not None:
                self.lr_finds.append(rates)
                return suggested
        return None

    @on_workers
    @collective
    def validate(self, ds_idx: int = 1, dl: Iterable[Any] | None = None, cbs: Callbacks = None) -> list[float]:
        """Return the loss and each metric on a loader: `[valid_loss, *metrics]`; NaN if the model computes no loss.

        It can be called from a callback in mid-fit, whose random streams it restores. Under DDP every rank must reach
        this; each sample counts once.

        Args:
            ds_idx: the index of the loader.
            dl: a loader to use instead.
            cbs: callbacks for this run alone.
        """
        meter = Validation(inside=self._dispatch is not None)
        self._evaluate("validate", self.dls[ds_idx] if dl is None else dl, [meter, *listify(cbs)])
        return meter.values

    @on_workers
    @collective
    def get_preds(
        self,
        ds_idx: int = 1,
        dl: Iterable[Any] | None = None,
        *,
        with_input: bool = False,
        with_loss: bool = False,
        with_decoded: bool = False,
        act: TensorFunction | None = None,
        probs: bool = False,
        on: str = "all",
        cbs: Callbacks = None,
    ) -> tuple[Any, ...]:
        """Return predictions for every sample once, in order, on the host: `(preds, targets)` and the requested items.

        Under DDP every rank must reach this and gets all predictions. They are the model's raw outputs, unless `act` or
        `probs` is given.

        Args:
            ds_idx: the index of the loader of the dataset, which is read in its own order, not its sampler's.
            dl: a loader to use instead, read in its own order.
            with_input: put the inputs first.
            with_loss: put the loss of each sample last; needs a loss that takes `reduction`.
            with_decoded: add the decoded predictions, by `loss_func.decode` (or fastai's `decodes`), else argmax for a
                cross-entropy, yes or no for a binary one (likelier than not), and numbers unchanged.
            act: a function of the predictions, such as `torch.sigmoid`.
            probs: turn the predictions into probabilities, as the loss implies: softmax for a cross-entropy, sigmoid
                for a binary one with logits, or the loss's own `activation`. A model's own loss over `dls.classes` is
                taken for a cross-entropy.
            on: 'all', or 'rank0': the other ranks get `None` for each item.
            cbs: callbacks for this run alone.

        Returns:
            (inputs?, preds, targets, decoded?, losses?); targets are `None` if the data have none. Where batches differ
            in length, as padded texts do, an item is a list with a tensor for each sample.

        Raises:
            ValueError: the loss or the data do not allow the requested items.
        """
        gather = GatherPredictions(with_input, with_loss, with_decoded, activation_for(self, act, probs), on)
        dl = whole_dataset(self, ds_idx) if dl is None else dl
        self._evaluate("predict", dl, [gather, *listify(cbs)])
        return gather.items

    @public
    def predict(self, item: Any, act: TensorFunction | None = None, probs: bool = False) -> Prediction:
        """Return the prediction for one input: `label, decoded, pred = learn.predict(x)`.

        The callbacks see it as a batch of one sample. Modes and records are not changed, and neither are random
        streams, unless the model itself draws from them outside of a run. Other ranks need not call it. Several threads
        may call it: they wait for each other.

        Args:
            item: an input as the dataset yields it, without targets: one input, a tuple of several, or a mapping.
            act: a function of the predictions, such as `torch.sigmoid` or `partial(torch.softmax, dim=1)`.
            probs: return probabilities instead of the raw output, as in `get_preds`.

        Returns:
            The class's name, or its index if `dls.classes` has no names, or the predicted number; the decoded
            prediction, such as the class's index, or `None` if it is unknown how to decode; and the raw output. The
            last two are on the host, and have no batch axis. The result always has the probabilities in its attribute
            `probs`.

        Raises:
            RuntimeError: a fit or an evaluation of this learner goes on in another thread.
            ValueError: the loader's `collate_fn` needs targets, or it is unknown how to turn predictions into
                probabilities.
        """
        return self.predict_many([item], act, probs)[0]

    @public
    def predict_many(
        self, items: list[Any], act: TensorFunction | None = None, probs: bool = False
    ) -> list[Prediction]:
        """Return the predictions for several inputs, as `predict` does, from one batch: for a service.

        It is faster than `predict` for each, and than `get_preds`, which reads any number of inputs with a loader.

        Args:
            items: the inputs, each as for `predict`. They must fit into the memory together.
            act, probs: as for `predict`.

        Raises:
            RuntimeError, ValueError: as for `predict`.
            TypeError: `items` is not a list.
        """
        if not isinstance(items, list):
            raise TypeError(f"got a {type(items).__name__}; predict_many takes a list of inputs, and predict one input")
        if not items:
            return []
        act = activation_for(self, act, probs)
        arguments.check_whole(self, "learn.predict")
        with self._lock, distributed.alone():
            arguments.check_thread(self, self._thread, "predict")
            heard = any(type(cb) not in _LEFT_OUT and acts_in_evaluation(cb) for cb in self.cbs)
            return (self._predict_in_loop if heard or overrides(self, "_forward") else self._predict_alone)(items, act)

    def _predict_alone(self, items: list, act: TensorFunction | None) -> list[Prediction]:
        """Predict like the loop on a batch for which no callback has a hook; this learner does not change."""
        model, nested = unwrap(self.model), self._dispatch is not None
        device = self.dls.device
        modules = list(model.modules())
        resets = not nested and callable(getattr(model, "reset", None))
        if resets or not is_placed(modules, device):
            return self._predict_in_loop(items, act)
        one = copy.copy(self)
        one.model, one.task = model, "predict"
        one.training, one._agreement = False, None
        sets_modes = any(type(cb) is TrainEvalCallback and cb.run for cb in self.cbs)
        changes = sets_modes and any(module.training for module in modules)
        streams = keep_seeds(device=device) if nested else nullcontext()
        with torch.no_grad(), streams, training_modes(model) if changes else nullcontext():
            if changes:
                model.eval()
            try:
                batch, one.dl = self.dls.input_batch(*items)
                unpack = Unpacker(self.dls, one.dl, device, own_loss_arguments(self.loss_func, model), False)
                one.batch, one.xb, one.yb = unpack.split(batch)
                one._forward()
                return predicted(one, len(items), act)
            except Exception as e:
                explain(one, e)
                raise

    @not_collective("it runs in `distributed.alone()`")
    def _predict_in_loop(self, items: list, act: TensorFunction | None) -> list[Prediction]:
        kept, dl = KeepPredictions(len(items), act), self.dls.test_dl(items, bs=len(items), num_workers=0)
        with self._by_itself():
            self._evaluate("predict", dl, kept)
        if kept.found is None:
            raise ValueError("a callback has cancelled the prediction, so there is none")
        return kept.found

    @contextmanager
    def _by_itself(self) -> Iterator[None]:
        """Evaluate without other ranks, also in the middle of a fit; streams and modes are restored."""
        plain = unwrap(self.model)
        try:
            # As in a fit, so that streams are restored.
            alone = replaced(self, _agreement=None, model=plain, _in_fit=True)
            with alone, kept_flags(self.cbs), training_modes(plain):
                for cb in self.cbs:
                    if isinstance(cb, _SWITCHED_OFF):
                        cb.run = False
                yield
        finally:
            if self._dispatch is not None:
                self._dispatch.changed()

    @on_workers
    @collective
    def tta(
        self,
        ds_idx: int = 1,
        dl: Iterable[Any] | None = None,
        n: int = 4,
        batch_tfms: Callable[..., Any] | None = None,
        beta: float | None = 0.25,
        use_max: bool = False,
        act: TensorFunction | None = None,
        probs: bool = False,
    ) -> tuple[Any, ...]:
        """Return predictions averaged over a plain and `n` augmented readings of a dataset: `(preds, targets)`.

        This is test time augmentation (Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural
        Networks", 2012). Under DDP every rank must reach this.

        Args:
            ds_idx: the index of the dataset, which is read in its own order.
            dl: the loader that is predicted in place of the dataset, such as `dls.test_dl(files)`; without `batch_tfms`
                a loader that augments the samples of the dataset, in the same order.
            n: the number of augmented readings.
            batch_tfms: an augmentation of a batch of inputs on the device, such as those of
                `torchvision.transforms.v2`.
            beta: the share of the plain predictions; `None`: preds is a pair, the mean of the augmented ones and the
                plain ones.
            use_max: take the largest predictions instead of an average.
            act: a function of the predictions, such as `partial(torch.softmax, dim=1)`, before they are averaged.
            probs: average probabilities, as in `get_preds`.

        Raises:
            ValueError: there is no augmentation or no augmented reading, `beta` is no share, predictions are not
                tensors, or a loader reads its samples in another order each time.
        """
        arguments.check_count("n", n, "a number of augmented readings")
        if beta is not None:
            arguments.check_number("beta", beta, lambda share: 0 <= share <= 1, "a share from 0 to 1, or None")
        if dl is None and batch_tfms is None:
            raise ValueError(
                "got neither batch_tfms= nor dl=; tta takes one of them, a loader that augments or an augmentation of "
                "the inputs"
            )
        if self.dls.targets in DRAWN:
            raise ValueError(
                f"tta averages predictions of changed pictures, in which {self.dls.targets} lie in other places; take "
                "get_preds"
            )
        act = activation_for(self, act, probs)
        plain, targets = self.get_preds(ds_idx, None if batch_tfms is None else dl, act=act)
        cbs = None if batch_tfms is None else BatchTransform(batch_tfms, train=False, valid=True)
        # In a fit, random streams are restored once, after all readings: restored after each, all readings would be
        # alike.
        streams = keep_seeds(dl, self.dls.device) if self._in_fit else nullcontext()
        with replaced(self, _in_fit=False), streams:
            readings = [self.get_preds(ds_idx, dl, act=act, cbs=cbs) for _ in range(n)]
        if batch_tfms is None and all(same(plain, preds) for preds, _ in readings):
            self.say("tta: dl= reads the samples as they are, so nothing is augmented; batch_tfms= augments them")
        return averaged((plain, targets), readings, beta, use_max), targets

    @collective
    def _evaluate(self, task: str, dl: Iterable, cbs: Callbacks) -> None:
        """Run without training; inside another run without the events of its outer levels."""
        # If this one runs inside another evaluation, callbacks that collect the other's results take no part.
        others = [cb for cb in self.cbs if getattr(cb, "of_one_evaluation", False)]
        with self.removed_cbs(others) if others else nullcontext(), self._running(task, cbs) as nested:
            check_loader(dl, "given")
            arguments.check_not_empty(dl, "the loader")
            read = functools.partial(self._read, dl, training=False)
            if nested:
                read()
            else:
                self._level("fit", lambda: self._level("epoch", read, CancelEpochException), CancelFitException)

    @contextmanager
    @collective
    def _trying(self, task: str, cbs: list[Callback]) -> Iterator[Callable[..., None]]:
        """Run without a trace except in the given callbacks; yield a function that trains for epochs or steps."""

        def train(n_epoch: int | None = None, n_steps: int | None = None) -> None:
            self._prepare_opt()
            self._train(n_epoch, n_steps)

        with self._running(task, cbs), unchanged(self, but=cbs):
            yield train

    @contextmanager
    @collective
    def _running(self, task: str, cbs: Callbacks = None) -> Iterator[bool]:
        """Start a run, and refuse it while another thread has one; see `_run`."""
        with self._lock:  # it waits for a prediction in another thread
            arguments.check_thread(self, self._thread, "get_preds" if task == "predict" else task)
            outer, self._thread = self._thread, threading.get_ident()
        try:
            with self._run(task, cbs) as nested:
                yield nested
        finally:
            self._thread = outer

    @contextmanager
    @collective
    def _run(self, task: str, cbs: Callbacks = None) -> Iterator[bool]:
        """Run, and restore the learner at the end; yield whether the run is inside another."""
        self._take_callbacks()
        if not parallel.will_shard(self):
            arguments.check_whole(
                self, f"such a {task}", "call it inside `with learn.distrib_ctx(shard=True):`, as the fit"
            )
        give_shapes(self)
        self._device = self.dls.device
        fitting, nested = task == "fit", self._dispatch is not None
        if not nested:
            self._loss_weighting = new_weighting(self)
            arguments.check_loss(self)
        self._loss_without_targets = loss_without_targets(self)
        outer = {name: getattr(self, name) for name in (TRANSIENT if fitting else (*TRANSIENT, *COUNTERS))}
        # Those of the batch in which a callback evaluates are needed again.
        parts_kept = replaced(self._loss_weighting, counted={}, factors={})
        agreement, model = parallel.agreement_for(self, task), unwrap(self.model)
        with parts_kept, self.added_cbs(cbs), training_modes(self.model), kept_flags(self.cbs), agreement:
            sets_modes = [cb for cb in self.cbs if isinstance(cb, TrainEvalCallback) and not nested]
            for cb in sets_modes:
                cb.note_modes(model)
            self.task, self._dispatch = task, parallel.dispatch(self, fitting)
            self._in_fit = self._in_fit or task not in ("validate", "predict")
            _in_runs.append(model)
            try:
                yield nested
            except Exception as e:
                explain(self, e)
                if is_out_of_memory(e):
                    explain_memory(self, e)
                raise
            finally:
                _in_runs.remove(model)
                self._dispatch.close()
                for name, value in outer.items():
                    setattr(self, name, value)
                if nested:
                    self._dispatch.changed()
                else:
                    if self._by_closure:
                        del vars(self)["_step"]
                    self._part()
                for cb in sets_modes:
                    cb.note_modes(None)
        if sets_modes and task in ("fit", "validate", "predict") and not _is_in_run(model):  # others leave no trace
            self.model.eval()

    def _make_opt(self, reset: bool = False) -> None:
        """Make an optimizer, if there is none, if `reset` is set, or if the model has got other parameters."""
        if self.opt is not None:
            self.opt = optim.as_one(self.opt)  # A user may have assigned a dict.
        (opt, left_out), new = self._left_out, dict[str, nn.Parameter]()
        if self.opt is not None and self.opt is opt and not reset and self.shards is None:
            held = {*optim.parameters_of(self.opts), *left_out} - {*optim.resized(self.opts)}
            new = {name: p for name, p in optim.not_among(held, self.model).items() if p.requires_grad}
        if self.opt is None or reset or new:
            give_shapes(self)
            self._new_opt()
        if new and not {*map(id, new.values())} & {*map(id, optim.parameters_of(self.opts))}:  # create_opt omits them
            self.opt, self._left_out = opt, (opt, [*left_out, *new.values()])
        elif new:
            self.say(
                f"the model has new parameters ({first_few(new)}): a new optimizer is made, without the state of the "
                "old one"
            )
        for opt in self.opts:
            optim.keep_base_rates(opt)
            optim.mend_kernels(opt)  # which a copy of this learner has without them

    def _new_opt(self) -> None:
        """Make an optimizer by `create_opt`."""
        self._left_out = None, []  # which may have the last reference to an optimizer
        made = self.create_opt()
        self.opt = self.opt if made is None else made
        self._note_opt()

    def _note_opt(self) -> None:
        """Note the optimizer as one that the learner has made, and what it leaves out."""
        self.opt = optim.as_one(self.opt)
        self._left_out = self.opt, [*optim.not_among(optim.parameters_of(self.opts), self.model).values()]

    @not_collective("it puts a method in place, which a step calls")
    def _prepare_opt(self, lr: Any = None, wd: float | Mapping | None = None, reset: bool = False) -> None:
        """Set up an optimizer with these hyper-parameters, or the Learner's own."""
        self._make_opt(reset)
        # A backward pass that the user has tried before is not part of the first step, and moves no frozen weights.
        self.model.zero_grad()
        if not overrides(self, "_step") and arguments.needs_closure(self.opts):
            arguments.check_closure(self)
            vars(self)["_step"] = self._step_by_closure
        by_opt = optim.group_rates(self.opt, lr, self._named_lr, functools.partial(optim.settled, self))
        for opt, rates in zip(self.opts, by_opt, strict=True):
            optim.set_rates(opt, rates)
            optim.restore_decay(opt)
            for decay in (self.wd, wd):  # patterns for one fit leave the other parameters the Learner's
                if decay is not None:
                    optim.set_decay(opt, unwrap(self.model), decay, self.wd_bn_bias)

    def _say_step(self) -> None:
        """Print once the number of samples in a step of several batches."""
        if self.n_ranks > 1 or any(isinstance(cb, GradientAccumulation) for cb in self.cbs):
            step = scaling_rate().step_of(self)
            if step.combined and str(step) != self._said_step:
                self._said_step = str(step)
                self.say(self._said_step)

    @property
    def lr(self) -> Any:
        """The learning rate of `fit` if it gets none: the given one, or the optimizers' default of 0.001."""
        return optim.DEFAULT_RATE if self._named_lr is None else self._named_lr

    @lr.setter
    def lr(self, lr: Rates | None) -> None:
        self._own_lr = optim.listed(lr)

    @property
    def _named_lr(self) -> Any:
        return optim.bound_rate(self.opt_func) if self._own_lr is None else self._own_lr

    @property
    def effective_batch_size(self) -> int | None:
        """The number of samples of a full optimizer step, of all ranks and all accumulated batches.

        `None` if the training loader does not tell the number of a batch's samples, by an attribute `batch_size`, its
        own or its batch sampler's. Ranks and accumulation count while the learner has them: inside `distrib_ctx`, and
        if `GradientAccumulation` is among its callbacks, or those of the present fit.
        """
        return scaling_rate().step_of(self).samples

    @property
    def opts(self) -> list[Optimizer]:
        """The optimizers as a list, whether there are none, one or a dict of them."""
        if isinstance(self.opt, Optimizer):
            return [self.opt]
        return list(self.opt.values()) if self.opt else []

    @property
    def n_ranks(self) -> int:
        """The number of processes that share the data of the present run; 1 if this process has all of them."""
        return 1 if self._agreement is None else distributed.world_size()

    @property
    def x(self) -> Any:
        """The inputs: `xb`, or its only entry."""
        return self.xb[0] if len(self.xb) == 1 else self.xb

    @property
    def y(self) -> Any:
        """The targets: `yb`, or its only entry."""
        return self.yb[0] if len(self.yb) == 1 else self.yb

    @property
    def final_record(self) -> list[float]:
        """The last row of the table, without epoch and time."""
        return self.recorder.final_record

    @property
    def smooth_loss(self) -> float | None:
        """The training loss, smoothed; reading it in mid-epoch waits for the device."""
        return self.recorder.smooth_loss

    # Parameter groups

    def freeze_to(self, n: int) -> None:
        """Train the groups of the splitter from the `n`-th on; freeze the groups before it.

        Norm layers of frozen groups stay trainable if the Learner has `train_bn`. The state of the optimizers is
        cleared, as it belongs to the parameters that were trained before.

        Args:
            n: the index of the first group to train; a negative index counts from the last.

        Raises:
            ValueError: there is no such group.
        """
        model = unwrap(self.model)
        optim.freeze_to(optim.split(model, self.splitter), n, optim.norms(model) if self.train_bn else ())
        for opt in self.opts:
            opt.state.clear()

    def freeze(self) -> None:
        """Train only the last of the splitter's groups. If there is a single group, warn that nothing is frozen."""
        if len(optim.split(unwrap(self.model), self.splitter)) == 1:
            distributed.warn(
                "there is a single group of parameters, so freezing leaves all of them to be trained; give the Learner "
                "splitter=, a function of the model that returns lists of parameters (errors.html#parameter-groups)"
            )
        self.freeze_to(-1)

    def unfreeze(self) -> None:
        """Train every group."""
        self.freeze_to(0)

    # Precision

    def to_fp16(self, **kwargs: Any) -> Learner:
        """Train in mixed precision with float16; `kwargs` are those of `torch.amp.GradScaler`."""
        cb = MixedPrecision("fp16", **kwargs)  # made first: invalid arguments must change nothing
        return self.to_fp32().add_cb(cb)

    def to_bf16(self) -> Learner:
        """Train in mixed precision with bfloat16."""
        return self.to_fp32().add_cb(MixedPrecision("bf16"))

    def to_fp32(self) -> Learner:
        """Undo `to_fp16` and `to_bf16`."""
        return self.remove_cb(MixedPrecision)

    # Callbacks

    def add_cb(self, cb: Callback | type[Callback]) -> Learner:
        """Add a callback. Several learners may share it, as long as one of them runs at a time.

        Raises:
            TypeError: it is not a callback, or has a misspelled hook.
            ValueError: another learner's run is using the callback, or its name would hide an attribute of the learner.
            RuntimeError: it is a callback of this library that prepares in before_fit, and a fit is under way.
        """
        cb = cb() if isinstance(cb, type) and issubclass(cb, Callback) else cb
        arguments.check_callback(self, cb)
        cb.learn = self
        self.cbs.append(cb)
        setattr(self, cb.name, cb)
        if self._dispatch is not None:
            self._dispatch.changed()
        return self

    def remove_cb(self, cb: Callback | type[Callback]) -> Learner:
        """Remove a callback, or every one of a class; in a notebook also those of a class whose cell has run again."""
        for gone in [c for c in self.cbs if c is cb or (isinstance(cb, type) and is_of(c, cb))]:
            self.cbs.remove(gone)
            if getattr(self, gone.name, None) is gone:
                delattr(self, gone.name)
                for other in (c for c in self.cbs if c.name == gone.name):
                    setattr(self, other.name, other)
            self._removed_cbs.append(gone)
        if self._dispatch is None:
            self._part()
        else:
            self._dispatch.changed()
        return self

    def add_cbs(self, cbs: Callbacks) -> Learner:
        """Add several callbacks."""
        for cb in listify(cbs):
            self.add_cb(cb)
        return self

    def remove_cbs(self, cbs: Callbacks) -> Learner:
        """Remove several callbacks."""
        for cb in listify(cbs):
            self.remove_cb(cb)
        return self

    def _part(self) -> None:
        # This waits for the end of a run: a callback that is removed in one may still owe a cleanup.
        for cb in self._removed_cbs:
            if cb not in self.cbs and cb.learn is self:
                cb.learn = Callback.learn
        self._removed_cbs.clear()

    def _take_callbacks(self) -> None:
        """Take the callbacks of loaders that a user has assigned, and for a run those shared with other learners."""
        if self._dispatch is None and self.dls.cbs is not self._dls_cbs:
            self.remove_cbs(self._dls_cbs)
            self._dls_cbs = self.dls.cbs
            self.add_cbs([cb for cb in self.dls.cbs if cb not in self.cbs])
        for cb in self.cbs:
            if cb.learn is not self:
                arguments.check_free(self, cb)
                cb.learn = self

    @contextmanager
    def added_cbs(self, cbs: Callbacks) -> Iterator[Learner]:
        """Add some callbacks within a context."""
        added = []
        try:
            for cb in listify(cbs):
                self.add_cb(cb)
                added.append(self.cbs[-1])
            yield self
        finally:
            self.remove_cbs(added)

    @contextmanager
    def removed_cbs(self, cbs: Callbacks) -> Iterator[Learner]:
        """Remove some callbacks (or classes of them) within a context; they return to their places at its end."""
        before = list(self.cbs)
        self.remove_cbs(cbs)
        try:
            yield self
        finally:
            self.add_cbs([cb for cb in before if cb not in self.cbs])
            self.cbs.sort(key=lambda cb: before.index(cb) if cb in before else len(before))

    def no_bar(self) -> AbstractContextManager[Learner]:
        """Return a context without progress bar; the table is still printed."""
        return self.removed_cbs(ProgressCallback)

    @contextmanager
    def no_logging(self) -> Iterator[Learner]:
        """Print no table within this context."""
        with replaced(self, logger=lambda row: None):
            yield self

    def say(self, text: str) -> None:
        """Print a line above the progress bar, on rank 0; in a notebook among the rows of the table.

        Args:
            text: one line; it is printed unchanged.
        """
        if distributed.is_main():
            getattr(self.logger, "say", print_above)(str(text))

    def log_metric(self, name: str, value: float | Tensor) -> None:
        """Add a value to a column of the table: its mean over the epoch and all ranks. Tensors stay on the device.

        In a batch a value has the weight of the batch's loss in `train_loss`, which is its number of samples, or of
        what `loss_weight` counts. So parts of a loss that is a mean add up to it, and several ranks give what one
        process gives. What is logged before an epoch is in its row; there is a warning if its row is already written.
        Outside of a fit, and in `validate` and `get_preds`, also where a fit calls them, it does nothing.

        Args:
            name: the name of the column.
            value: a number or a tensor with one element.
        """
        if self.task == "fit" and hasattr(self, "recorder"):
            weight: float | Tensor = 1
            if self._batch_index >= 0:
                weight = self.batch_size if self.loss is None else self.loss_count
            if getattr(self.dl, "is_last", False):  # a step that one process takes after the last batch
                weight = 1 / self.n_ranks
            self.recorder.log_metric(name, value, weight)

    @on_workers
    @collective
    def check(self, memory: str | int | None = None) -> bool:
        """Take one step of training and one of validation, and print what is right and what is wrong with them.

        It checks shapes, types, devices, the range of targets, gradients, the optimizer and metrics, which one would
        like to know before a long run. It also predicts how much memory a step needs, and how many samples fit, from
        steps on tensors without values, also on a machine without the device that the fit is meant for. Afterwards
        everything is restored: the state of the run, as `state_dict` returns it, and with it gradients and the
        attributes of callbacks, of the model's and of the loss's modules. Samplers and streams of data without
        `state_dict` and `load_state_dict` have seen one more step. Under DDP every rank must reach this.

        Args:
            memory: the memory of the device that the fit is meant for, such as "24GiB" (also GB, MiB, MB), or its bytes
                as an int; a batch that does not fit is then reported as a problem. With `None` the loaders' device is
                used, and a batch that does not fit is a hint.

        Returns:
            Whether nothing is wrong, on any rank.

        Raises:
            RuntimeError: a run goes on.
            TypeError, ValueError: an invalid `memory`.
        """
        return check(self, memory)

    @on_workers
    @collective
    def scaling_report(
        self, n_steps: int = 20, *, advice: bool = True, forecast: bool = True, seconds: float = 120.0,
        show: bool = True,
    ) -> ScalingReport:  # fmt: skip
        """Run some training steps, and report where their time goes on each rank, and what would make them faster.

        The parts of a step are measured. Then steps are run without the network, without input, in one process alone,
        and with changes that may help: only those that do are reported, with their gain. Afterwards all that `check`
        restores is exactly restored, also after an error. Callbacks that are `only_fit` take no part. Under DDP every
        rank must reach this.

        Args:
            n_steps: the number of steps of each trial, after a few that do not count.
            advice: try changes that may help.
            forecast: measure an all-reduce, and forecast a step on other numbers of ranks of this machine. One process
                on the CPU forks two processes for it; one with a GPU has no forecast.
            seconds: the time after which no further trial begins.
            show: print the report on rank 0.

        Returns:
            The report, the same on every rank.

        Raises:
            RuntimeError: a run goes on.
            ValueError: `n_steps` is below 2, or the loader can be read only once.
        """
        from learnerkit.scaling.making import scaling_report  # imported here, as most fits never need it

        return scaling_report(self, n_steps, advice=advice, forecast=forecast, seconds=seconds, show=show)

    @on_workers
    @collective
    def find_batch_size(self, share: float = 0.9, bs: int | None = None) -> BatchSize:
        """Find the largest batch that fits into the memory, with the accumulation and the rate that go with it.

        A size is that of a batch of one process. The search begins with the loader's size, doubles it while it fits,
        and then bisects. For each size, two optimizer steps are taken, and a batch of the validation loader is read,
        whose size is scaled alike; if it cannot be scaled, its first batch is read. All batches have the largest
        samples: the longest, if the batch sampler, or an attribute `lengths` of the dataset, tells lengths; else the
        largest of 256 that are read from all over the dataset. With `bs`, or `GradientAccumulation` among the
        callbacks, the steps have two batches. Sizes with which a step would have more samples than the training set, or
        than `bs`, are not tried.

        On a CUDA device the memory of its allocator is measured. Elsewhere the tensors of the steps are measured and
        compared with the memory of the host for this process, or of its control group; the data, the program itself,
        and the memory of running kernels are not measured, and `share` leaves room for them. On several processes each
        tries a size by itself, and it fits if it fits on all of them; the buckets of DDP are added.

        Afterwards all that `check` restores is exactly restored, also after an error. Callbacks that are `only_fit`
        take no part. Under DDP every rank must reach this. A printed line has the result.

        Args:
            share: the share of the memory that a step may take; above 0 and at most 1.
            bs: the wanted number of samples of an optimizer step, of all processes together. The size is then the one
                that reaches it with the fewest batches, or exceeds it slightly if it cannot be divided evenly.

        Returns:
            The size, the measurements, and the settings that go with it; the same on every rank.

        Raises:
            RuntimeError: a run goes on, or (torch.OutOfMemoryError) not even one sample fits.
            ValueError: a loader whose batches cannot have another size, a sharded model, `share` out of range, or `bs`
                below 1.
        """
        from learnerkit.scaling.batch_size import find_batch_size  # imported here, as most fits never need it

        return find_batch_size(self, share, bs)

    @on_workers
    def summary(self) -> Summary:
        """Run the model on a batch, and list its layers: output shapes, parameters, and their memory.

        The batch is the first one of training. The model is in eval mode meanwhile, and is restored afterwards.

        Returns:
            A `Summary`; print it, or let it be the last line of a cell.

        Raises:
            ValueError: the training loader can be read only once.
        """
        from learnerkit.inspection.summary import summary  # imported here, as most scripts never need it

        arguments.check_whole(self, "learn.summary")
        return summary(self)

    @public
    @collective
    def show_results(self, n: int = 9, ds_idx: int = 1) -> Any:
        """Predict some samples, and show them with their targets and predictions.

        The samples are taken from all over the dataset, at equal distances. Under DDP every rank must reach this, and
        rank 0 shows them.

        Args:
            n: the number of samples.
            ds_idx: the index of the loader.

        Returns:
            The result of `DataLoaders.show_batch`.

        Raises:
            ImportError: the samples are images, and matplotlib is not installed.
        """
        from learnerkit.inspection.interpretation import show_results

        return show_results(self, n, ds_idx)

    def show_training_loop(self) -> None:
        """Print the loop, and at each event the callbacks that run there, in order."""
        print(describe_loop(self.cbs))

    # Files

    @public
    @collective
    def save(self, file: File, with_opt: bool = True) -> AnyPath | BinaryIO:
        """Write the model's weights, and the optimizer's state, on rank 0; the other ranks need not call it.

        The file is complete or absent, and loads with `torch.load(..., weights_only=True)`; a line says so if the model
        or the optimizer has a state that does not. No key begins with 'module.', even if the model is wrapped. A name
        that ends in '.safetensors' gets a file of the weights in that format, which other tools read.

        Args:
            file: a name inside path/model_dir ('.pth' is added unless it ends in '.safetensors'); a path, used
                unchanged: a `pathlib.Path`, or a str with a separator; the URL of an object in a store that fsspec
                knows, such as 's3://bucket/best.pth'; or a file that is open for writing in binary mode.
            with_opt: save {'model': ..., 'opt': ...} rather than only the weights, and 'scaler' after a fit in fp16.

        Returns:
            The path, a `stores.paths.StorePath` for a URL, or the open file.

        Raises:
            CheckpointError: the file cannot be written; the old one is unchanged.
        """
        target = files.place_of(self, file)
        if self.shards is not None:
            distributed.meet("learn.save")  # rank 0 has only some of the rows
        elif not distributed.is_main():
            return target
        with self.as_validated():
            weights: Any = unwrap(self.model).state_dict()
            if isinstance(target, Path | StorePath) and target.suffix == files.SAFETENSORS:
                files.save_weights(weights, target, writes=distributed.is_main())
                return target
            state = self._gathered(weights)
            if with_opt and self.opt is not None:
                opt = self._gathered(optim.state_dict_of(self.opt))
                states = [cb.scaler.state_dict() for cb in self.cbs if isinstance(cb, MixedPrecision) and cb.scaler]
                scaler = states[0] if states else self._scaler_state
                state = {"model": state, "opt": opt} | ({"scaler": scaler} if scaler else {})
            if distributed.is_main():
                save_whole(state, target)
                if isinstance(target, Path) and (foreign := get_unsafe_globals_in_checkpoint(target)):
                    self.say(
                        f"{target} has more than tensors, numbers and text in it: {first_few(sorted(foreign))}, "
                        "which learn.load refuses: let the model's get_extra_state, or the optimizer's state, leave it "
                        "out"
                    )
        return target

    @collective
    def _gathered(self, state: Any) -> Any:
        """Return a state with shards gathered on rank 0; if there are shards, every rank must reach this."""
        return state if self.shards is None else map_batch(Gatherer(keep=distributed.is_main()), state, lambda x: x)

    @public
    @collective
    def load(
        self, file: File, with_opt: bool = True, strict: bool = True, device: torch.device | str | int | None = None
    ) -> Learner:
        """Read a file that `save` wrote, on every rank, once rank 0's last save is on disk.

        Files of plain PyTorch are read, too: {'state_dict': ..., 'optimizer': ...}, and weights whose names begin with
        'module.' or '_orig_mod.', also in safetensors; and the directory of a checkpoint, whose files are verified
        first. If a file does not fit, nothing is changed. A file of which nothing fits is refused also without
        `strict`.

        Args:
            file: as in `save`, or the path or URL of a checkpoint; an open file is read from its present position.
            with_opt: also load the optimizer's state, and that of the gradient scaler; warns if the file has none.
            strict: whether the file must have exactly the model's keys.
            device: the device to read the file to; by default the host.

        Raises:
            FileNotFoundError: there is no such file.
            TypeError, ValueError: `file` is not a name, a path or an open file.
            CheckpointError: the file is damaged, or of another model.
        """
        distributed.follow_rank0("learn.load")
        model, place = unwrap(self.model), files.place_of(self, file)
        if self.mapped is not None and isinstance(place, Path) and files.is_mappable(place):
            weights = fitted(files.read_mapped(place), model, strict).weights
            self.mapped.fill(model, weights)
            fill_buffers(model, weights)
            return self
        saved = fitted(self._read_saved(place, "cpu" if device is None else device), model, strict)
        move_to_device(self)
        put_back = restorer({k: v for k, v in model.state_dict().items() if isinstance(v, Tensor) and not is_lazy(v)})
        try:
            model.load_state_dict(rows_for(saved.weights, model), strict=strict)
            if with_opt and saved.opt is not None:
                self._load_opt(saved, saved.opt)
        except Exception as e:  # a module's own loading may raise anything, half-way
            put_back()
            if isinstance(e, CheckpointError):
                raise
            raise CheckpointError(f"{saved.name} does not fit {type(model).__name__}: {e}") from e
        if with_opt and saved.opt is None:
            distributed.warn(
                f"{saved.name} has weights and no optimizer state, so the optimizer stays as it is, or begins anew; "
                "load(..., with_opt=False) says that this is meant"
            )
        return self

    @public
    @collective
    def export(self, fname: str | Path) -> AnyPath:
        """Write the trained model for prediction, on rank 0 alone; `load_learner` reads it.

        The suffix of the name decides the format:

        - '.safetensors', or none: the weights. Loading them needs the model's code. This format always works.
        - '.pt2': a program of `torch.export`, which needs no code, for batches of any size: the simplest to load, also
          for pictures and texts.
        - '.onnx': a file for onnxruntime and the like, by torch's exporter; needs the extra `learnerkit[onnx]`. Its
          inputs have the names of `dls.inputs`, or of the arguments of the model's `forward`.

        The file includes the names of the classes, the decoding of predictions, and the split of batches, but not the
        data, the optimizer and the callbacks. No pickle is written. Programs and ONNX are traced from the first batch
        of validation (else of training), which is not stored, and a file is written only if it then predicts the same
        as the model.

        Args:
            fname: a name inside path/model_dir, or a path (a `pathlib.Path`, or a str with a separator) or a URL, used
                unchanged.

        Returns:
            The path, or a `stores.paths.StorePath` for a URL.

        Raises:
            CheckpointError: torch cannot export the model, or the file cannot be written; an old one is unchanged.
            ImportError: the packages for ONNX are missing.
            TypeError, ValueError: the suffix is not one of these, or there is no batch to trace from.
        """
        from learnerkit.export.writing import export  # imported here, as most fits never need it

        return export(self, fname)

    @collective
    def state_dict(self) -> State:
        """Return the state on which the rest of a run depends, as torch's `Stateful` objects do.

        It can be called between fits, and in a fit at the events between two optimizer steps, in a callback after all
        others (order=1000), whose states would lack this event: then the next `fit` after `load_state_dict`, of this
        learner or of an equal one in another process, continues from there. On several ranks every rank must reach
        this.

        Returns:
            A dict of plain values, tensors and arrays, which `torch.save` writes. As in torch, tensors are those of the
            run and not copies: `copy.deepcopy` keeps them. All entries except 'rank' are the same on all ranks:

            - 'model': the state dict of the model, with its names without wrappers;
            - 'opt': the state dict of the optimizer, or of several by their names; `None` before there is one;
            - 'scaler': the state of fp16's gradient scaler, or an empty dict;
            - 'beside': parameters that are trained beside the model's, and buffers of the loss;
            - 'eval', 'frozen': the names of modules in eval mode, and of parameters that are not trained;
            - 'callbacks': the result of each callback's `state_dict`, by class name, with schedules and the recorder's
              history;
            - 'order': the names of the callbacks, in order;
            - 'flags': in a fit, the flags `run`, `run_train` and `run_valid` of callbacks that it has changed;
            - 'counters': the progress of the last fit;
            - 'place': the place in a fit where it was taken: 'train', 'trained', 'epoch', or `None` between fits;
            - 'position': in a fit, the position in the training data;
            - 'loaders': between fits, the states of each loader, its samplers and its dataset; in a fit, those of the
              samplers that validations read;
            - 'rank': this rank's own part: random states ('random'), the state of its part of the data ('position'),
              and the own part of its callbacks' states ('callbacks', and 'alone' for those that run on rank 0 alone).
              For a user's callback without `state_dict` this consists of its attributes that can be saved, except those
              with the name of an argument of its class.

        Raises:
            RuntimeError: called during a validation, in a batch, or in a step of several batches.
            CheckpointError: a callback's `state_dict` does not return a dict.
        """
        run_state.check_moment(self)
        if self._position is not None:
            self._position.note_loader(self.dls.train)
        return map_batch(Gatherer(), run_state.state_dict(self), lambda x: x)

    @public
    @collective
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned.

        A state that was taken in a fit is restored between fits, and the next `fit` continues from it: in the same
        epoch, after the batches that were read. Called inside a fit, it restores everything except the position in the
        data, which are read on. On several ranks each gives the state that it has taken itself; every rank must reach
        this.

        Args:
            state: the result of `state_dict`.

        Raises:
            CheckpointError: parts are missing, or the weights are of another model; in this case nothing is changed.
            ValueError: the state is of other optimizers; in this case nothing is changed.
        """
        run_state.check_parts(state)
        if state["opt"] is not None:
            self._make_opt()
        self._resumes = run_state.load_state_dict(self, state)
        if state["opt"] is None and self.task is None:  # it was taken before the first fit, which makes the optimizer
            self.opt, self._left_out = None, (None, [])

    @staticmethod
    def _read_saved(file: AnyPath | BinaryIO, device: Any) -> Saved:
        if not isinstance(file, Path | StorePath) or not file.is_dir():
            return files.read(file, device)
        if isinstance(file, Path) and files.is_mappable(file):
            return files.read_mapped(file)
        checkpoint = read_checkpoint(file)
        state = checkpoint.state()
        return Saved(str(file), checkpoint.weights(), state.get("opt"), state.get("scaler") or None)

    def _load_opt(self, saved: Saved, state: dict[str, Any]) -> None:
        before = {"opt": self.opt, "_left_out": self._left_out}
        self._make_opt()
        try:
            optim.load_state(self.opt, state, optim.has_types(unwrap(self.model), saved.weights))
        except Exception as e:
            vars(self).update(before)
            raise CheckpointError(
                f"{saved.name} does not fit: {e}; load(..., with_opt=False) takes the weights alone"
            ) from e
        if saved.scaler is not None:
            self._scaler_state = dict(saved.scaler)
            for cb in self.cbs:
                if isinstance(cb, MixedPrecision):
                    cb.take_scale()

    # Several devices and processes (learnerkit.parallel)

    def to_parallel(self, device_ids: list[int] | None = None, loss_on_replicas: bool = True) -> Learner:
        """Train on several GPUs of this process with `nn.DataParallel`; arguments as for `DataParallelCallback`."""
        return self.add_cb(parallel.DataParallelCallback(device_ids, loss_on_replicas))

    def detach_parallel(self) -> Learner:
        """Undo `to_parallel`."""
        return self.remove_cb(parallel.DataParallelCallback)

    def parallel_ctx(
        self, device_ids: list[int] | None = None, loss_on_replicas: bool = True
    ) -> AbstractContextManager[Learner]:
        """Return a context with `to_parallel`."""
        return self.added_cbs(parallel.DataParallelCallback(device_ids, loss_on_replicas))

    def to_distributed(
        self, *, sync_bn: bool | None = None, split_batches: bool = False, find_unused_parameters: bool | None = None,
        timeout: float | timedelta | None = None, wrap: tuple[str, ...] | None = None, sharded: bool = False,
        uneven: str = "stop", comm_hook: str | None = None, shard: Shard = False, reshard_after_forward: bool = True,
        offload: bool = False, sync: bool = True, **ddp_kwargs: Any,
    ) -> Learner:  # fmt: skip
        """Train with DistributedDataParallel; the arguments are those of `DistributedCallback`."""
        return self.add_cb(
            parallel.DistributedCallback(
                sync_bn, split_batches, find_unused_parameters, timeout, wrap, sharded=sharded, uneven=uneven,
                comm_hook=comm_hook, shard=shard, reshard_after_forward=reshard_after_forward, offload=offload,
                sync=sync, **ddp_kwargs,
            )
        )  # fmt: skip

    def detach_distributed(self) -> Learner:
        """Undo `to_distributed`; the process group stays."""
        return self.remove_cb(parallel.DistributedCallback)

    @public
    def distrib_ctx(
        self, nproc: int | None = None, *, sync_bn: bool | None = None, split_batches: bool = False,
        find_unused_parameters: bool | None = None, timeout: float | timedelta | None = None,
        wrap: tuple[str, ...] | None = None, sharded: bool = False, uneven: str = "stop",
        comm_hook: str | None = None, shard: Shard = False, reshard_after_forward: bool = True,
        offload: bool = False, sync: bool = True, **ddp_kwargs: Any,
    ) -> AbstractContextManager[Learner]:  # fmt: skip
        """Return a context in which this learner trains, validates and predicts with DistributedDataParallel.

        In a script that a launcher has started in several processes, they train together; in one process it does
        nothing. In a notebook or at a Python prompt it starts worker processes, which carry out `fit`, `validate`,
        `get_preds` and the like one call after the other. After each call, rank 0's `state_dict` is loaded here, and
        the attributes of callbacks, metrics, modules and the learner get their values from there.

        Args:
            nproc: in a notebook or at a prompt, the number of processes; by default one for each GPU.
            sync_bn, split_batches, find_unused_parameters, timeout, wrap, sharded, uneven, comm_hook, ddp_kwargs: as in
                `DistributedCallback`.
            shard, reshard_after_forward, offload, sync: as in `DistributedCallback`.

        Raises:
            ValueError: `nproc` is given in a script, whose processes are started by `python -m learnerkit.launch`.
        """
        return distrib_ctx(
            self, nproc, sync_bn=sync_bn, split_batches=split_batches, find_unused_parameters=find_unused_parameters,
            timeout=timeout, wrap=wrap, sharded=sharded, uneven=uneven, comm_hook=comm_hook, shard=shard,
            reshard_after_forward=reshard_after_forward, offload=offload, sync=sync, **ddp_kwargs,
        )  # fmt: skip

    @public
    def check_distributed(self, n: int = 2, **kwargs: Any) -> bool:
        """Prove, on CPU processes, that this learner trains on `n` ranks as on one, and print a verdict.

        Args:
            n: the number of processes.
            kwargs: those of `learnerkit.preflight.ranks.check_distributed`, and of `DistributedCallback`.

        Returns:
            Whether everything compared was equal.
        """
        return check_distributed(self, n, **kwargs)


@suggests_keywords
@collective
def load_learner(
    fname: str | Path,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    *,
    dls: DataLoaders | None = None,
    data: Any = None,
    loss_func: Callable[..., Tensor] | None = None,
    device: torch.device | str | int | None = None,
    path: str | Path = ".",
    model_dir: str | Path = "models",
) -> Learner:
    """Return a learner from a file of `Learner.export`, for `predict` and `get_preds(dl=learn.dls.test_dl(items))`.

    Nothing in the file is unpickled, and no module is imported because the file names it. Weights (.safetensors) are
    safe to load from any source. A program (.pt2) that has more than tensors and operations on them is refused, but
    torch's reader is not made for hostile files: load programs only from people whom you trust.

    Args:
        fname: a name inside path/model_dir, a path or a URL; the default suffix is '.safetensors'.
        model: for weights, the module, or the function or class that makes it; a program needs none. A function whose
            first argument is called `dls`, such as `tabular_learner` or `lambda dls: vision_learner(dls, "resnet18")`,
            gets the loaders, without batches but with classes, and may return a learner with the model.
        dls: the loaders, if it is to train or validate.
        data: the class that made its inputs, such as `TabularData`, `TextData` or `ImageData`: with its preprocessing
            from the file, `predict` and `test_dl` take raw inputs again.
        loss_func: the loss, if it is to train or validate. Without it, predictions are decoded as at the export.
        device: the device of the model; by default the accelerator, else the CPU.
        path, model_dir: as for `Learner`.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is damaged or could run code, or the weights are of another model.
        TypeError, ValueError: there is no model for weights, or the file is of another kind.
    """
    from learnerkit.export.reading import load

    return load(Learner, fname, model, dls, data, loss_func, device, path, model_dir)


@collective
def from_hub(
    repo_id: str,
    model: Any = None,
    fname: str = "model.safetensors",
    *,
    revision: str | None = None,
    token: str | None = None,
    **kwargs: Any,
) -> Learner:
    """Return a learner that predicts, from an export on the Hugging Face Hub; see `load_learner`, which reads the file.

    The file is downloaded once and kept in the cache of huggingface_hub; the rest of the repository is not read.

    Args:
        repo_id: "user/name".
        model: as for `load_learner`.
        fname: the name of the file in the repository. Weights are safe to load from any source, programs (.pt2) are
            not.
        revision: a branch, a tag or a commit; by default the newest version.
        token: the token of a user of the Hub, for a private repository; by default that of `hf auth login`.
        kwargs: those of `load_learner`.

    Raises:
        ImportError: the extra `learnerkit[hub]` is missing.
        OSError: there is no such file or repository, or no connection.
        CheckpointError, TypeError, ValueError: as for `load_learner`.
    """
    from learnerkit.export.hub import download

    return load_learner(download(repo_id, fname, revision, token), model, **kwargs)
