"""An optimizer step that several ranks take together: the batches on this rank, from `before_batch` to the step."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from learnerkit import world
from learnerkit.gradient_mean import GradientMean, host_count, scale_gradients
from learnerkit.parallel.agreement import Agreement, flags_of
from learnerkit.parallel.buckets import BucketWeights
from learnerkit.parallel.carrier import FLAGS, Carrier
from learnerkit.parallel.first_batch import runs_on_nothing, try_batch

if TYPE_CHECKING:
    from learnerkit.learner import Learner


class RankStep:
    """Makes the gradients of a step the mean over what all ranks count.

    Args:
        learn: the learner, whose model has no DDP yet.
        agreement: of the run.
        note_unused: called with the names of the parameters that the first batch's loss does not depend on, on every
            rank; `None`: they need not be known.
        by_bucket: weigh the gradients on their way rather than the loss, for learners that differentiate losses of
            their own making. What all ranks count is then made known before the backward pass, so that the gradients
            are right as soon as they are reduced: such a learner may step in its own `_backward`.

    Attributes:
        wrappers: DDP's, around the model or its parts.
        first: whether the next batch is the first of a wrapped model.
        takes_nothing: the model can run on a batch without samples.
        number: of the batch, the same on every rank.
        reduced: this rank has taken part in the reduction of the batch's gradients, or has none to take part in.
        stepped: this rank's optimizer has stepped after the batch.
        skipped: all ranks have left the optimizer's step after the batch out.
        counted: what all ranks have counted in the step, as a mean over the ranks.
        vector: the carrier's of this batch, once it is reduced before the backward pass.
    """

    def __init__(
        self, learn: "Learner", agreement: Agreement, note_unused: Callable[[list[str]], None] | None, by_bucket: bool
    ) -> None:
        self.learn, self.agreement, self._plain = learn, agreement, learn.model
        self.note_unused, self.by_bucket = note_unused, by_bucket
        self.ranks = world.world_size()
        self.mean = GradientMean(learn._loss_weighting.sums)
        self.carrier = Carrier(learn.dls.device)
        self.buckets = BucketWeights()
        self.wrappers: list[DistributedDataParallel] = []
        self.first = self.takes_nothing = True
        self.number = -1
        self.reduced = self.stepped = self.skipped = True
        self.counted: float | Tensor = 0.0
        self.vector: Tensor | None = None
        self._witness: nn.Parameter | None = None  # a parameter whose gradient tells whether they were cleared

    # A batch

    def start(self) -> None:
        """Begin training, perhaps after one that was cut short."""
        self.mean.begun = False
        self.carrier.clear()

    def begin(self) -> None:
        """Begin a batch."""
        self.number += 1
        self.reduced = self.stepped = self.skipped = False
        self.vector = None
        self.learn.pred = self.learn.output = None  # those of the batch before say nothing of this one
        self.agreement.dispatch.begin()

    def is_open(self) -> bool:
        """Tell whether this rank has left out something of the batch that other ranks may wait for."""
        learn = self.learn
        return (
            not self.reduced
            or (learn._step_due and not self.stepped)
            or self.agreement.dispatch.stopped_in("after_step")
        )

    def before_batch(self, *cb: Any) -> None:
        """Prepare the batch, after the callbacks that may still change it: the hook of that event."""
        learn = self.learn
        first, self.first = self.first, False
        if first:
            self.takes_nothing = not self.by_bucket and runs_on_nothing(learn, self._plain)
        if not learn.dl.share.size:
            learn.batch_size = 0
            if not self.takes_nothing:
                unpacked = learn.dls.unpack(learn.dl.sample, learn.dls.device, learn.loss_func is None)
                learn.batch, learn.xb, learn.yb, _ = unpacked
        votes, note_unused = learn._loss_weighting.votes, self.note_unused if first else None
        if (votes or note_unused) and not self.by_bucket:  # on all ranks alike
            unused, means = try_batch(learn, self._plain)
            if votes:
                learn._loss_weighting.agree(world.all_gather(means))
            if note_unused:
                note_unused(unused)
        self.synchronise()

    def synchronise(self) -> None:
        """Have DDP reduce in this batch if a step follows it; without a step the gradients stay on their ranks."""
        for wrapper in self.wrappers:
            if wrapper.require_backward_grad_sync != self.learn._step_due:  # microseconds, in a module
                wrapper.require_backward_grad_sync = self.learn._step_due

    def backward(self) -> None:
        """Compute the batch's gradients with their weight, and correct those of the step after its last batch."""
        learn = self.learn
        if not learn.batch_size:
            learn._loss_count = 0  # the samples that this rank has stand for shapes and types only
        count = self.take_count(host_count(learn._loss_count))
        if self.by_bucket:
            self.reduce_counts(count)
        elif self.mean.sums:
            learn.loss_grad = learn.loss_grad * self.ranks
        else:
            learn.loss_grad = self.mean.weigh(learn.loss_grad, count, learn._model_output)
        self.differentiate(count)
        self.finish_reduction()

    def take_count(self, count: float | Tensor) -> float | Tensor:
        """Take what a batch counts into its step, and return it."""
        if not self.mean.begun:
            self.mean.begin(self._expected(count))
        self.mean.counted = self.mean.counted + count
        return count

    def _expected(self, count: float | Tensor) -> float:
        kept = self._witness is not None and self._witness.grad is not None
        if kept and not self.by_bucket and not self.mean.sums:
            # A callback accumulates gradients by leaving steps out: those that are there have their scale already, so
            # this batch's must be right before it joins them. A collective and a host-device sync of its own.
            return world.reduce(float(count), "mean", among="gradients") or 1.0
        dl = self.learn.dl
        total = dl.share.total or dl.usual_total or self.ranks  # the same on every rank, as this must be
        return total / self.ranks * self.learn._step_batches

    def reduce_counts(self, count: float | Tensor) -> None:
        """Exchange what the ranks count before the backward pass; every rank must reach this."""
        self.vector = self.carrier.reduced(self.mean.counted, self._flags())
        mean = self.vector[0] if self.vector.device.type != "cpu" else self.vector[0].item()
        if not isinstance(count, Tensor) and not count:
            self.buckets.factor = 0.0
        else:
            self.buckets.factor = self.ranks if self.mean.sums else count / mean

    def differentiate(self, count: float | Tensor) -> None:
        """Compute the gradients of `learn.loss_grad`."""
        parameter = self.carrier.parameter
        if parameter is None:
            self.learn._backward()
        else:
            # The parameter is a root of its own, whose gradient is given: that needs no further operations.
            vector = self.carrier.vector(count, self._flags())
            torch.autograd.backward((self.learn.loss_grad, parameter), (None, vector))

    def _flags(self) -> list[float] | None:
        "This rank's flags, which concern the last batch of a step alone; `None`: there are none."
        leaving, ended = self.agreement.pending, self.learn.dl.ended
        flagged = self.learn._step_due and (leaving is not None or ended)
        return [*flags_of(leaving), float(ended)] if flagged else None

    def finish_reduction(self) -> None:
        """Correct the gradients once they are reduced, and leave if the flags say so."""
        self.reduced = True
        if not self.learn._step_due:
            return
        mean, carrier = self.mean, self.carrier
        mean.begun = False
        if self._witness is None:
            self._witness = next((p for p in self.learn.model.parameters() if p.grad is not None), None)
        vector = carrier.reduced(mean.counted, self._flags()) if self.vector is None else self.vector
        flags: list[float] | None
        if carrier.reads_late:
            self.counted = vector[0]
            self._correct()
            flags = carrier.exchange_flags(vector)
            if flags is not None:
                self.agreement.check()  # of a reduction that was broken off they would mean nothing
        else:
            self.counted, *flags = vector.tolist()[: 1 + FLAGS]
            self._correct(8 * torch.finfo(vector.dtype).eps)
        if flags is not None and any(flags):
            self._obey(flags)

    def _correct(self, tolerance: float = 0.0) -> None:
        if not self.by_bucket:
            scale_gradients(self.learn.model, self.mean.correction(self.counted, tolerance))

    def _obey(self, flags: list[float]) -> None:
        *leaving, ended = flags
        self.learn.dl.note_ended(ended)
        if any(leaving):
            self.carrier.clear()
            self.learn._zero_grad()
            self.agreement.leave(leaving)

    def note_optimizer_step(self, *_: Any) -> None:
        """Note that this rank's optimizer has stepped."""
        self.stepped = True
        self.agreement.watch.stepped = self.number
        self.agreement.watch.answer()
