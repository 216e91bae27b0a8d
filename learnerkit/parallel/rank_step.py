"""Optimizer steps that several ranks take together: what each counts, and what travels beside the gradients.

A small vector is summed over the ranks together with the gradients: what each rank's loss counts, so that the gradient
becomes the mean over all of it, and flags for leaving. It rides in DDP's own reduction as the gradient of one more
parameter, so that it costs no collective of its own.
"""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from learnerkit import world
from learnerkit.gradient_mean import GradientMean, nothing_of
from learnerkit.parallel.agreement import LEAVING, Agreement, flags_of
from learnerkit.parallel.loaders import emptied

_USED = 1 + len(LEAVING) + 1  # the count, a flag for each reason to leave, and whether the rank's data have ended
_SLOTS = 8  # so many that the gradients that follow in DDP's bucket stay aligned for vector instructions


class Steps(GradientMean):
    """Weighs the batches of all ranks, and keeps the others company where this rank leaves a batch before its end.

    Args:
        learn: the learner.
        agreement: of the run.

    Attributes:
        carrier: the parameter whose gradient is the vector; `None` where it travels by itself.
        reads_late: read the flags of a step after the next one, at the same place on every rank, so that the host need
            not wait for the device.
        takes_nothing: the model can run on a batch without samples.
        by_bucket: weigh the gradients on their way rather than the loss, for learners that differentiate losses of
            their own making. What all ranks count is then made known before the backward pass, so that the gradients
            are right as soon as they are reduced: such a learner may step in its own `_backward`.
    """

    def __init__(self, learn: Any, agreement: Agreement) -> None:
        super().__init__(learn)
        self.agreement = agreement
        self.ranks = world.world_size()
        self.device = learn.dls.device
        self.wrappers: list[DistributedDataParallel] = []
        self.carrier: nn.Parameter | None = None
        self.by_bucket = False
        self.takes_nothing = True
        self.reads_late = self.device.type != "cpu"
        self.number = -1
        self._bucket_factor: float | Tensor = 1.0
        self._met: Tensor | None = None
        self._witness: nn.Parameter | None = None  # a parameter whose gradient tells whether they were cleared
        self._counted_all: float | Tensor = 0.0
        self._flying: tuple[Tensor, torch.Event | None] | None = None
        self._values: dict[int, Tensor] = {}
        self._settled, self._stepped, self._skipped = True, True, False

    # Wrapping

    def make_carrier(self, module: nn.Module) -> nn.Parameter:
        """A parameter for the vector, which DDP will reduce in a bucket of `module` where its type is fit."""
        kinds = {p.dtype for p in module.parameters() if p.requires_grad}
        kind = kinds.pop() if len(kinds) == 1 else None
        if kind not in (torch.float32, torch.float64):
            kind = torch.float32  # counts need more digits than half precision has
        return nn.Parameter(torch.zeros(_SLOTS, dtype=kind, device=self.device))

    def weigh_buckets(self, wrapper: DistributedDataParallel, comm_hook: Any, state: Any) -> None:
        """Reduce the gradients of `wrapper` with `comm_hook`, weighed by what this rank counts."""

        def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            buffer, factor = bucket.buffer(), self._bucket_factor
            if isinstance(factor, Tensor):
                buffer.copy_(torch.where(factor > 0, buffer * factor, 0.0))  # of nothing there may be a NaN
            elif factor == 0:
                buffer.zero_()
            elif factor != 1:
                buffer.mul_(factor)
            if bucket.is_last() and not find_unused:
                # Once DDP, which asks for this after us, has finished with the pass.
                call_after_backward(lambda: call_after_backward(get_ready_again))
            return comm_hook(state, bucket)

        def get_ready_again() -> None:
            # DDP reduces in one backward pass after each forward pass. Of two losses' passes that reach this network
            # it would leave out the second, and ranks would part.
            reducer = this().reducer
            reducer._rebuild_buckets()
            reducer.prepare_for_backward([])

        this, find_unused = weakref.ref(wrapper), wrapper.find_unused_parameters  # the wrapper itself holds the hook
        call_after_backward = torch.autograd.Variable._execution_engine.queue_callback
        wrapper.register_comm_hook(state, hook)

    def unwrap(self) -> None:
        """Take DDP off the parameters: a wrapper that lives on, in a traceback say, would go on reducing."""
        for wrapper in self.wrappers:
            wrapper._remove_autograd_hooks()
        self.wrappers.clear()

    # A batch

    def start(self) -> None:
        """Training begins, perhaps after one that was cut short."""
        self.begun, self._flying = False, None
        if self.carrier is not None:
            self.carrier.grad = None

    def begin(self) -> None:
        """A batch begins."""
        self.number += 1
        self._settled = self._stepped = self._skipped = False
        self._met = None
        self.learn.pred = self.learn.output = None  # those of the batch before say nothing of this one
        self.learn._dispatch.begin()

    def synchronise(self) -> None:
        """Have DDP reduce in this batch if a step follows it; without a step the gradients stay on their ranks."""
        for wrapper in self.wrappers:
            if wrapper.require_backward_grad_sync != self.learn.step_due:  # microseconds, in a module
                wrapper.require_backward_grad_sync = self.learn.step_due

    def stepped(self, *_: Any) -> None:
        """This rank's optimizer has stepped."""
        self._stepped = True
        self.agreement.watch.stepped = self.number
        self.agreement.watch.answer()

    def weigh(self, loss: Tensor) -> Tensor:
        """The loss to differentiate."""
        count = self._note(self._count())
        if self.by_bucket:
            self._meet(count)
            return loss
        return loss * self.ranks if self.sums else self._weighted(loss, count)

    def _meet(self, count: float | Tensor) -> None:
        "Tell the other ranks what this one counts, and hear from them."
        self._met = self._reduced()
        mean = self._met[0] if self._met.device.type != "cpu" else self._met[0].item()
        if not isinstance(count, Tensor) and not count:
            self._bucket_factor = 0.0
        else:
            self._bucket_factor = self.ranks if self.sums else count / mean

    def _count(self) -> float | Tensor:
        if not self.learn.batch_size:
            self.learn.loss_count = 0  # whatever sample there is keeps the others company
        return super()._count()

    def _expect(self, count: float | Tensor) -> float:
        kept = self._witness is not None and self._witness.grad is not None
        if kept and not self.by_bucket and not self.sums:
            # A callback accumulates gradients by leaving steps out: those that are there have their scale already, so
            # this batch's must be right before it joins them. A collective and a host-device sync of its own.
            return world.reduce(float(count), "mean") or 1.0
        dl = self.learn.dl
        total = dl.share.total or dl.usual_total or self.ranks  # the same on every rank, as this must be
        return total / self.ranks * self.learn.step_batches

    def _differentiate(self, count: float | Tensor) -> None:
        if self.carrier is None:
            super()._differentiate(count)
            return
        # The carrier is a root of its own, whose gradient is given: that needs no further operations.
        vector = self._vector(count, self.carrier.dtype, self.carrier.device)
        torch.autograd.backward((self.learn.loss_grad, self.carrier), (None, vector))

    def _vector(self, count: float | Tensor, kind: torch.dtype, device: torch.device) -> Tensor:
        # Flags are read as a mean over the ranks, of the step's last batch alone.
        leaving, ended = self.agreement.pending, self.learn.dl.ended
        flagged = self.learn.step_due and (leaving is not None or ended)
        usual = not flagged and isinstance(count, int)
        if usual and count in self._values:
            return self._values[count]
        vector = torch.zeros(_SLOTS, dtype=kind, device=device)
        vector[0] = count  # filled on the device, without a sync
        if flagged:
            for i, flag in enumerate([*flags_of(leaving), float(ended)]):
                if flag:
                    vector[1 + i] = flag
        if usual:
            self._values[count] = vector
        return vector

    def settle(self) -> None:
        """Correct the gradients once they are reduced, and leave if the flags say so."""
        self._settled = True
        if not self.learn.step_due:
            return
        self.begun = False
        if self._witness is None:
            self._witness = next((p for p in self.learn.model.parameters() if p.grad is not None), None)
        vector = self._reduced() if self._met is None else self._met
        if not self.reads_late:
            self._counted_all, *flags = vector.tolist()[:_USED]
            if self._counted_all != self.expected:
                self._correct(self._counted_all, tolerance=8 * torch.finfo(vector.dtype).eps)
            if any(flags):
                self._heed(flags)
            return
        self._counted_all = vector[0]
        self._correct(self._counted_all)
        last, self._flying = self._flying, _take_off(vector)
        if last is not None:
            flags = _land(last)
            self.agreement.check()  # of a reduction that was broken off they would mean nothing
            self._heed(flags)

    def _reduced(self) -> Tensor:
        "The vector's mean over the ranks."
        if self.carrier is not None:
            vector, self.carrier.grad = self.carrier.grad, None
            return vector.clone() if self.reads_late else vector  # it may be a piece of DDP's bucket
        # By the same way on all ranks, also on one that counts nothing and so has nothing on the device.
        return world.reduce(self._vector(self._counted, torch.float64, self.device), "mean")

    def _correct(self, counted: float | Tensor, tolerance: float = 0.0) -> None:
        if not self.by_bucket:
            super()._correct(counted, tolerance)

    def _heed(self, flags: list[float]) -> None:
        *leaving, ended = flags
        self.learn.dl.heard(ended)
        if any(leaving):
            self._flying = None
            self.learn._zero_grad()
            self.agreement.leave(leaving)

    def last_flags(self) -> list[float]:
        """The flags of the last step of an epoch, which no later step has read."""
        if self._flying is None:
            return [0.0] * len(LEAVING)
        last, self._flying = self._flying, None
        return _land(last)[:-1]

    # A batch that this rank does not finish by itself

    def complete(self) -> None:
        """Do with weight 0 what the other ranks wait for in this batch, if this rank has not done it."""
        self.backward_cancelled()
        if self.learn.step_due and not self._stepped:
            self._step_along()
        elif self.learn._dispatch.stopped_in("after_step"):
            self.learn._dispatch.resume("after_step")
            self.learn._zero_grad()  # as the others do

    def backward_cancelled(self) -> None:
        """This rank has left out its backward pass."""
        if not self._settled:
            self.keep_company()

    def keep_company(self) -> None:
        """Take part in the reduction of the gradients without data."""
        learn, dispatch = self.learn, self.learn._dispatch
        if dispatch.to_come("before_batch"):
            dispatch.resume("before_batch")  # schedules, for one: the step will be taken here, too
        self.synchronise()
        batch = {name: getattr(learn, name) for name in ("xb", "pred", "output", "loss", "loss_grad", "batch_size")}
        learn.batch_size = 0
        clean = all(p.grad is None for p in learn.model.parameters())
        try:
            with torch.enable_grad():
                if self.by_bucket:
                    self._repeat()
                else:
                    self._run_empty()
        finally:
            for name, value in batch.items():
                setattr(learn, name, value)
        self.settle()
        if learn.step_due and clean and float(self._counted_all) == 0:  # no rank had data: as if it had not been
            learn._zero_grad()

    def _run_empty(self) -> None:
        learn = self.learn
        if learn.pred is None or not any(isinstance(m, nn.SyncBatchNorm) for m in learn.model.modules()):
            # Anew also after a forward pass of its own, whose NaN times 0 would be NaN; the buffers were sent in that.
            for wrapper in self.wrappers:
                wrapper.require_forward_param_sync &= learn.pred is None
            if self.takes_nothing:
                learn.xb = emptied(learn.xb)
            learn._forward()
        self._note(0)
        if learn.step_due:
            learn.loss_grad = nothing_of(learn)
            self._differentiate(0)

    def _repeat(self) -> None:
        "The whole batch, whose gradients are then left out."
        learn = self.learn
        for wrapper in self.wrappers:
            wrapper.require_forward_param_sync &= learn.pred is None
        learn._forward()
        learn._loss()
        if self._met is None:
            self._meet(self._note(0))
        self._bucket_factor = 0.0
        learn._backward()

    def step_unless_all_skip(self) -> bool:
        """Take the optimizer step that this rank would have left out, unless all ranks leave it out."""
        if self._stepped or self._skipped:
            return False
        self._skipped = self.agreement.watch.all_skip(self.number)
        if self._skipped:
            return False
        for event in ("after_backward", "before_step"):
            if self.learn._dispatch.to_come(event):
                self.learn._dispatch.resume(event)  # what clips here has clipped there
        self.learn._step()
        return True

    def _step_along(self) -> None:
        if float(self._counted_all) == 0:  # a host-device sync; only where a rank has left a batch
            return
        if self.step_unless_all_skip():
            self.learn._dispatch.resume("after_step")
            self.learn._zero_grad()

    # Errors

    def explain(self, error: BaseException) -> None:
        """Add the names of unused parameters to DDP's error about them."""
        text = str(error)
        if "finished reduction in the prior iteration" not in text and "did not receive grad" not in text:
            return
        words = text.rpartition("for rank")[2].rpartition(":")[2].split()
        numbers = [int(word) for word in words if word.isdigit()]
        # Of several networks there is no telling which of them DDP has numbered.
        module = self.wrappers[0].module if len(self.wrappers) == 1 else nn.Module()
        names = [n for n, p in module.named_parameters() if p.requires_grad]
        if self.carrier is not None:  # it came after the module's own parameters, and before those of sub-modules
            names.insert(sum(p.requires_grad for p in module.parameters(recurse=False)), "")
        found = [names[i] for i in numbers if i < len(names) and names[i]]
        error.add_note(
            f"parameters that took no part in the loss: {', '.join(found) or 'see above'}; freeze them, use them, or "
            "pass find_unused_parameters=True to DistributedCallback"
        )


def _take_off(vector: Tensor) -> tuple[Tensor, torch.Event | None]:
    """Start a vector's copy to the host."""
    if vector.device.type == "cpu":
        return vector, None
    landing = torch.empty(len(vector), dtype=vector.dtype, pin_memory=vector.is_cuda)
    landing.copy_(vector, non_blocking=vector.is_cuda)
    arrived = torch.Event(vector.device)
    arrived.record()
    return landing, arrived


def _land(flying: tuple[Tensor, torch.Event | None]) -> list[float]:
    """The flags, once they are here: a host-device sync, but with an earlier step; the device has work meanwhile."""
    landing, arrived = flying
    if arrived is not None:
        arrived.synchronize()
    return landing[1:_USED].tolist()
