"""The course of training: train and eval mode, counters, sample order, and an end after a number of steps."""

import sys
from collections.abc import Set
from contextlib import ExitStack

import torch
from torch import nn

from learnerkit import distributed
from learnerkit.callback import Callback
from learnerkit.data.order import set_epoch
from learnerkit.data.position import Position
from learnerkit.endings import ending_of
from learnerkit.events import CancelTrainException
from learnerkit.run_state import in_eval
from learnerkit.state import Learner, State
from learnerkit.torch_internals import BatchNorm, Dropout
from learnerkit.utils import accepts, unwrap


class TrainEvalCallback(Callback):
    """Puts the model into train or eval mode, counts batches, and keeps the place in the training data.

    At the start of an epoch, samplers and datasets that have `set_epoch` are told its number in the fit, from 0.

    A run that ends without an error leaves the model in eval mode. If the user puts some modules of a model in train
    mode into eval mode, they stay in eval mode in this and later fits. To change that after a fit, call
    `model.train()`, and then `eval()` on the modules that shall stay in eval mode. If the model has a `reset` method
    (for its hidden state), it is called at the start of a run.
    """

    order = -10
    run_valid = False

    _model: nn.Module | None = None  # the model of the current run, before callbacks wrap it
    _in_eval: Set[str] = frozenset()  # names of its modules that the user has put into eval mode
    _place: Position | None = None  # the place of the current fit in the data

    def note_modes(self, model: nn.Module | None) -> None:
        """Note, as a run begins, which modules the user has put into eval mode, and at its end where in the data it is.

        Args:
            model: the model of the run that begins; `None` at its end.
        """
        self._model = model
        if model is not None:
            names = {*in_eval(model)}
            # After a run the whole model is in eval mode: then only modules that were noted before still count.
            self._in_eval = names if model.training else names & self._in_eval
        elif (place := self._place) is not None:
            self._place = None
            if place.is_unread:
                self.learn.dls.unread = self.learn.dls.train, place.state_dict(), place.own_state_dict()

    def before_fit(self) -> None:
        learn = self.learn
        reset = getattr(unwrap(learn.model), "reset", None)
        if callable(reset) and accepts(reset) is not False:
            reset()
        if learn.task not in ("validate", "predict"):
            if self._model is not None:
                _warn_of_dropout(self._model, self._in_eval)
            learn.train_iter = 0
            self._place = learn._position = Position()
            unread, learn.dls.unread = learn.dls.unread, None
            if unread is not None and unread[0] is learn.dls.train:
                learn._position.follow(*unread[1:])

    def before_epoch(self) -> None:
        if self.learn._position is not None:  # a run that trains
            set_epoch(self.learn.dls.train, self.learn.epoch)

    def before_train(self) -> None:
        learn = self.learn
        learn.model.train()
        for name, module in self._model.named_modules() if self._model is not None and self._in_eval else ():
            if name in self._in_eval:
                module.training = False
        if learn.n_epoch:
            learn.pct_train = learn.epoch / learn.n_epoch
        position = learn._position
        learn.dl = position.begin(learn.dl, learn.epoch, learn.dls, learn.n_ranks)
        learn.first_iter = position.first_step

    def after_cancel_batch(self) -> None:
        if ending_of(sys.exception()).event == "after_step":
            self.learn._zero_grad()  # The step has been taken, so these gradients are not for the next one.

    def after_batch(self) -> None:
        learn, position = self.learn, self.learn._position
        learn.train_iter += 1
        position.steps = learn.iter + 1
        position.samples += learn.batch_size if learn.n_ranks == 1 else position.of_all_ranks(learn)
        if learn.n_iter and learn.n_epoch:  # if the loader has no length, pct_train changes once an epoch
            # With several workers a stream may have more batches than its loader says.
            learn.pct_train = (learn.epoch + min(1.0, (learn.iter + 1) / learn.n_iter)) / learn.n_epoch

    def after_train(self) -> None:
        self.learn._position.over = True

    def after_epoch(self) -> None:
        if (position := self.learn._position) is not None:  # An evaluation has none.
            position.end_epoch()

    def before_validate(self) -> None:
        self.learn.model.eval()


def _warn_of_dropout(model: nn.Module, evaluated: Set[str]) -> None:
    """Warn of modules in eval mode that have trainable parameters and dropout: that is rarely intended."""
    for name in sorted(evaluated):
        if name.rpartition(".")[0] in evaluated:
            continue  # the warning names the module around it
        part = model.get_submodule(name)
        trained = any(p.requires_grad for p in part.parameters())
        if trained and any(isinstance(m, Dropout) and m.p > 0 for m in part.modules()):
            distributed.warn_once(
                f"{name} ({type(part).__name__}) is in eval mode and stays so while it is trained: its dropout is off. "
                "Models loaded with from_pretrained of transformers are in eval mode: call .train() on the model "
                "before the fit. If this is intended, freeze its parameters, or filter this warning"
            )


class NamedState(Callback):
    """A callback whose state is some of its attributes, which are replaced rather than changed in place.

    Attributes:
        _state_names: their names.
    """

    _state_names: tuple[str, ...]

    def state_dict(self) -> State:
        """Return the attributes that are the state, by name."""
        return {name: getattr(self, name) for name in self._state_names}

    def load_state_dict(self, state: State) -> None:
        """Restore the attributes that are the state."""
        for name in self._state_names:
            setattr(self, name, state[name])


def at_last_batch(learn: Learner) -> bool:
    """Tell whether the present batch is the last of its loader, as far as that is known.

    Of a loader without length several ranks know it: they read an empty batch there, if a step is still to be taken.
    """
    return learn.iter + 1 == learn.n_iter or getattr(learn.dl, "is_last", False)


class StepCounter(NamedState):
    """Counts the optimizer steps of a fit, including skipped and cancelled ones, so that all ranks count the same."""

    run_valid = False
    _state_names = ("_steps", "_step_open")

    _steps, _step_open = 0, False

    def before_fit(self) -> None:
        self._steps = 0

    def before_train(self) -> None:
        self._step_open = False

    def after_batch(self) -> None:
        self._steps += self.learn.step_due
        self._step_open = not self.learn.step_due

    def after_cancel_train(self) -> None:
        self._step_open = False  # gradient accumulation drops an incomplete step here

    def after_train(self) -> None:
        # A loader without length ended within an accumulated step, and GradientAccumulation has taken that step.
        self._steps += self._step_open


class StepBudget(StepCounter):
    """Ends training after a number of optimizer steps; the epoch's validation still follows."""

    order = 100  # after the other callbacks, which must see the last step too

    def __init__(self, n_steps: int) -> None:
        self.n_steps = n_steps
        self._last = 0  # the steps at the end of the epoch before

    def before_fit(self) -> None:
        super().before_fit()
        if not self.n_steps:
            self.learn.pct_train = 1.0

    def after_batch(self) -> None:
        super().after_batch()
        self._advance()
        if self._steps >= self.n_steps:
            raise CancelTrainException(agreed=True)

    def after_train(self) -> None:
        super().after_train()
        self._advance()

    def after_epoch(self) -> None:
        if self._steps == self._last and self.learn.epoch > self.learn.start_epoch:  # the first may only validate
            distributed.warn_once(
                f"epoch {self.learn.epoch} took no step: fit(n_steps={self.n_steps}) goes on until it has taken all"
            )
        self._last = self._steps

    def load_state_dict(self, state: State) -> None:
        """Restore the count of steps; the budget may be larger than it was."""
        super().load_state_dict(state)
        self._advance()

    def _advance(self) -> None:
        self.learn.pct_train = min(1.0, self._steps / self.n_steps)


class MCDropout(Callback):
    """Leaves dropout on in evaluation, so that predictions differ from pass to pass, by how uncertain the model is.

    Monte Carlo dropout (Gal and Ghahramani, https://arxiv.org/abs/1506.02142). Stack what several passes of
    `get_preds(probs=True, cbs=MCDropout())` return: the mean over them is the prediction, and their standard deviation
    a measure of its uncertainty. It acts on the modules `nn.Dropout`, `nn.Dropout2d` and the like. `Learner.predict`
    restores the random generators, so that its passes are alike.

    Raises:
        ValueError: the model has none of them, in a run.
    """

    run_train = False

    def __init__(self) -> None:
        self._open: list[ExitStack] = []  # what is put back after each evaluation in progress

    def before_validate(self) -> None:
        modules = [m for m in self.learn.model.modules() if isinstance(m, Dropout)]
        undo = ExitStack()
        self._open.append(undo)
        if not modules:
            raise ValueError(
                f"MCDropout found no module of dropout in {type(unwrap(self.learn.model)).__name__}: predictions would "
                "be alike in each pass; it acts on nn.Dropout and the like, not on functions of dropout"
            )
        mha = torch.backends.mha
        undo.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)  # The fast path of a transformer's layer leaves out its dropout.
        for module in modules:
            if not module.training:
                module.train()
                undo.callback(module.eval)

    def cleanup_validate(self) -> None:
        self._open.pop().close()


class BnFreeze(Callback):
    """Keeps BatchNorm layers with frozen parameters in eval mode, so that their statistics do not change."""

    run_valid = False

    def before_train(self) -> None:
        for module in self.learn.model.modules():
            if isinstance(module, BatchNorm) and module.affine and not module.weight.requires_grad:
                module.eval()
