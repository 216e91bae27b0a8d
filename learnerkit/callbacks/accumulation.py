"""Optimizer steps of several batches."""

from typing import Any

from torch import Tensor

from learnerkit import arguments, optim
from learnerkit.callback import Callback, running
from learnerkit.callbacks.training import at_last_batch
from learnerkit.events import CancelBatchException, CancelStepException
from learnerkit.gradient_mean import GradientMean, counts_something, host_count, scale_gradients
from learnerkit.losses import loss_sums, output_of, weighting_of
from learnerkit.state import State
from learnerkit.utils import suggests_keywords


class GradientAccumulation(Callback):
    """Takes one optimizer step for several batches, as if they had been one batch.

    The step's gradient is the exact mean over all samples of its batches (or over what `loss_weight` counts), also if
    the batches differ in size, and in the last step of an epoch, which may have fewer batches. Under DDP the gradients
    are reduced once a step. Batches without a step end by `CancelBatchException`, so `before_step` and `after_step` do
    not run for them. Schedules advance by steps.

    The loss of each batch is weighted for this after `before_backward`. A backward pass that a callback makes itself,
    as in adversarial training, is not: its gradients are added as they are.

    Args:
        n_batches: batches of a step, on each rank.
        n_samples: samples of a step over all ranks; the step is taken as soon as its batches have as many.

    Raises:
        TypeError, ValueError: neither or both of them, or a number below 1; when a fit begins, a second callback of
            this kind, or a `loss_weight` for each of several losses.
    """

    order = 6
    run_valid = False
    mean: Any = None  # the mean that weights the batches, on one process; on several ranks their step has it

    @suggests_keywords
    def __init__(self, *, n_batches: int | None = None, n_samples: int | None = None) -> None:
        if (n_batches is None) == (n_samples is None):
            raise TypeError(f"got n_batches={n_batches} and n_samples={n_samples}; give one of them")
        for name, value in (("n_batches", n_batches), ("n_samples", n_samples)):
            if value is not None:
                arguments.check_count(name, value)
        self.n_batches, self.n_samples = n_batches, n_samples
        self._batches = self._samples = self._steps = 0

    def before_train(self) -> None:
        learn = self.learn
        if weighting_of(learn).parts:
            raise ValueError(
                "GradientAccumulation cannot weigh the parts of a loss each by itself, as loss_weight= says: what a "
                "step counts of each is known only after its last batch. Take larger batches or more processes, or one "
                "loss_weight for the whole loss (errors.html#loss-weight)"
            )
        if len(running(learn.cbs, GradientAccumulation)) > 1:
            raise ValueError(
                "two GradientAccumulation callbacks in one fit, which differ in the batches of a step: leave one out"
            )
        if learn.n_ranks == 1:  # on several ranks their step weights the gradients
            self.mean, learn._gradient = GradientMean(loss_sums(learn)), self
        self._batches = self._samples = self._steps = 0
        learn.step_batches = self.n_batches or 1
        self._counted = False  # True once `_batches` has the current batch

    def before_batch(self) -> None:
        "Count a batch into its step, and decide if the step is due after it."
        learn = self.learn
        self._counted = True
        self._batches += 1
        self._samples += self._global_size()
        full = self._batches == self.n_batches or (self.n_samples and self._samples >= self.n_samples)
        if self._batches == 1 and self.n_samples:
            learn.step_batches = -(-self.n_samples // max(1, self._samples))
        learn.step_due = bool(full or at_last_batch(learn))
        if learn.step_due:
            self._batches = self._samples = 0

    def _global_size(self) -> int:
        if self.learn.n_ranks == 1:
            return self.learn.batch_size
        total = self.learn.dl.share.total
        if total is None and self.n_samples:
            raise ValueError(
                "GradientAccumulation(n_samples=...) needs to know how many samples the batches of all ranks have, and "
                "the dataset makes this rank's alone; use split_batches=True, a list of batches, or n_batches"
            )
        return total or 0

    def backward(self) -> None:
        """Compute the weighted gradients of the batch, and after the step's last batch correct them."""
        learn, mean = self.learn, self.mean
        count = host_count(learn.loss_count)
        if not (mean.begun and counts_something(mean.counted)):
            # A count on the device is not read, to avoid a host-device sync.
            mean.begin((learn.batch_size if isinstance(count, Tensor) else count) * learn.step_batches or 1.0)
        mean.counted = mean.counted + count
        learn.loss_grad = mean.weigh(learn.loss_grad, count, output_of(learn))
        learn._backward()
        self.finish()

    def finish(self) -> None:
        """Correct the gradients after the step's last backward pass, or after its cancel."""
        learn, mean = self.learn, self.mean
        if mean is None or not (learn.step_due and mean.begun):
            return
        mean.begun = False
        factor = mean.correction()
        if isinstance(factor, Tensor) or factor != 1:  # A factor of 1 needs no parameters.
            beside = optim.parameters_beside(learn.model, learn.loss_func, learn.opts)
            scale_gradients([*learn.model.parameters(), *beside], factor)

    def detach(self) -> None:
        """Stop weighting batches, and drop a step that is not complete."""
        if self.mean is not None:
            self.learn._gradient = self.mean = None

    after_cancel_backward, after_cancel_train = finish, detach

    def after_backward(self) -> None:
        if not self.learn.step_due:
            raise CancelBatchException(agreed=True)

    before_step = after_backward  # an earlier callback may have cancelled the rest of that event

    def after_cancel_batch(self) -> None:
        if self.mean is None:  # On several ranks their Agreement does all this.
            return
        if not self._counted:  # a callback before this one cancelled the batch, which is still one of its step
            self.before_batch()
        self._step_if_due()

    def after_batch(self) -> None:
        learn = self.learn
        self._counted = False
        self._steps += learn.step_due
        if learn.n_iter and learn.n_epoch:  # progress counts steps that have been taken
            steps = -(-learn.n_iter // learn.step_batches)
            learn.pct_train = (learn.epoch + min(1.0, self._steps / steps)) / learn.n_epoch

    def after_train(self) -> None:
        if self.mean is not None:
            self.learn.step_due = True  # a loader without length has ended: the batch before was the last
            self._step_if_due()

    def state_dict(self) -> State:
        """Return the steps of the epoch so far: a checkpoint is taken between two steps, never inside one."""
        return {"steps": self._steps, "step_batches": self.learn.step_batches}

    def load_state_dict(self, state: State) -> None:
        """Continue with the saved count of steps, which `before_train` has set to 0."""
        self._steps, self.learn.step_batches = state["steps"], self.n_batches or state["step_batches"]

    def _step_if_due(self) -> None:
        "Take the step if the step's last batch has not taken it."
        learn = self.learn
        if learn.step_due and self.mean.begun:
            self.finish()
            learn._events("step", learn._step, CancelStepException)
            learn._zero_grad()

    def cleanup_train(self) -> None:
        learn = self.learn
        learn._zero_grad()
        learn.step_batches, learn.step_due = 1, True
        self.detach()
