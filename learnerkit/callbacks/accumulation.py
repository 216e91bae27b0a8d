"""Optimizer steps of several batches."""

from learnerkit import arguments
from learnerkit.callback import Callback
from learnerkit.events import CancelBatchException, CancelStepException
from learnerkit.gradient_mean import GradientMean


class GradientAccumulation(Callback):
    """Takes an optimizer step after several batches, as if they had been one.

    The step's gradient is the exact mean over all samples of its batches (or over what `loss_weight` counts), also
    where they differ in size and in the last group of an epoch, which may be incomplete. Under DDP the gradients are
    reduced once for each step. Batches without a step end by `CancelBatchException`, so their `before_step` and
    `after_step` do not take place; schedules advance by steps.

    Args:
        n_batches: batches of a step, on each rank.
        n_samples: samples of a step over all ranks: a step is taken once there are as many.

    Raises:
        TypeError, ValueError: neither or both of them, or a number below 1.
    """

    order = 6
    run_valid = False

    def __init__(self, *, n_batches: int | None = None, n_samples: int | None = None) -> None:
        super().__init__()
        if (n_batches is None) == (n_samples is None):
            raise TypeError(f"got n_batches={n_batches} and n_samples={n_samples}; give one of them")
        for name, value in (("n_batches", n_batches), ("n_samples", n_samples)):
            if value is not None:
                arguments.check_count(name, value)
        self.n_batches, self.n_samples = n_batches, n_samples
        self._weights: GradientMean | None = None

    def before_train(self) -> None:
        learn = self.learn
        if not learn.sharded:  # with several ranks DDP's weights count those of a group as well
            self._weights = learn.weights = GradientMean(learn)
        self._batches = self._samples = self._steps = 0
        learn.step_batches = self.n_batches or 1
        self._placed = False

    def before_batch(self) -> None:
        learn = self.learn
        self._placed = True
        self._batches += 1
        self._samples += self._global_size()
        last = learn.n_iter is not None and learn.iter + 1 == learn.n_iter
        full = self._batches == self.n_batches if self.n_batches else self._samples >= self.n_samples
        if self._batches == 1 and self.n_samples:
            learn.step_batches = -(-self.n_samples // max(1, self._samples))
        learn.step_due = full or last
        if learn.step_due:
            self._batches = self._samples = 0

    def _global_size(self) -> int:
        if not self.learn.sharded:
            return self.learn.batch_size
        total = self.learn.dl.share.total
        if total is None and self.n_samples:
            raise ValueError(
                "GradientAccumulation(n_samples=...) needs a loader whose sampler tells the sizes of batches on all "
                "ranks; with batches made by the dataset use n_batches"
            )
        return total or 0

    def after_cancel_backward(self) -> None:
        if self.learn.weights is self._weights:
            self._weights.backward_cancelled()

    def after_backward(self) -> None:
        if not self.learn.step_due:
            raise CancelBatchException

    def after_cancel_batch(self) -> None:
        if self._weights is None:  # the ranks' own agreement does all this
            return
        if not self._placed:  # a callback before this one cancelled the batch, which has its place in a group still
            self.before_batch()
        self._step_if_due()

    def after_batch(self) -> None:
        learn = self.learn
        self._placed = False
        self._steps += learn.step_due
        if learn.n_iter and learn.n_epoch:  # a group counts as begun only when its step is taken
            steps = -(-learn.n_iter // learn.step_batches)
            learn.pct_train = (learn.epoch + min(1.0, self._steps / steps)) / learn.n_epoch

    def after_cancel_train(self) -> None:
        if self._weights is not None:
            self.learn.weights = self._weights = None  # the open group is left out

    def after_train(self) -> None:
        if self._weights is not None:
            self.learn.step_due = True  # of a loader without length: that its last batch was the last is known now
            self._step_if_due()

    def _step_if_due(self) -> None:
        "Take the step of a group whose last batch has not taken it."
        learn = self.learn
        if learn.step_due and self._weights.begun:
            self._weights.settle()
            learn._events("step", learn._step, CancelStepException)
            learn._zero_grad()

    def cleanup_train(self) -> None:
        learn = self.learn
        learn._zero_grad()
        learn.step_batches, learn.step_due = 1, True
        if learn.weights is self._weights:
            learn.weights = self._weights = None
