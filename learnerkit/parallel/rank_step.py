"""An optimizer step that several ranks take together: the batches on this rank, from `before_batch` to the step."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from learnerkit import world
from learnerkit.callback import is_ours
from learnerkit.gradient_mean import GradientMean, host_count, scale_gradients
from learnerkit.parallel.agreement import Agreement, RankDispatch, flags_of, packed, unpacked
from learnerkit.parallel.buckets import BucketWeights
from learnerkit.parallel.carrier import FLAGS, Carrier
from learnerkit.parallel.first_batch import Trial, runs_on_nothing, try_batch
from learnerkit.parallel.passes import LaterPasses, averaged, reduce_gradients
from learnerkit.parallel.transparent import Transparent
from learnerkit.text import first_few
from learnerkit.torch_internals import begin_batch, expect_another_backward, remove_ddp_hooks

if TYPE_CHECKING:
    from learnerkit.learner import Learner


_POINTS = ("step", "after_batch", "next batch")  # of a batch, in order, which all ranks may leave out

CARRIER = "_learnerkit_carrier"  # the beginning of the names of parameters that a wrapper is lent

_LATER = ("after_backward", "before_step")  # where a callback may make a backward pass that counts


class RankStep:
    """Makes the gradients of a step the mean over what all ranks count.

    Args:
        learn: the learner, whose model has no DDP yet.
        agreement: of the run.
        note_trial: called with what a trial of the first batch has shown, on every rank; `None`: it need not be known.
        by_bucket: weigh the gradients on their way rather than the loss, for learners that differentiate losses of
            their own making. What all ranks count is then made known before the backward pass, so that the gradients
            are right as soon as they are reduced: such a learner may step in its own `_backward`.

    Attributes:
        wrappers: DDP's, around the model or its parts.
        params: the trainable parameters of the model, and those beside it that are trained with it.
        beside: those beside it.
        foreign: those of optimizers that a callback or a subclass holds, with the optimizer's name.
        late: the gradients are averaged after the backward passes rather than by DDP during one.
        later: averages further backward passes of a step; `None`: there are none.
        sends_buffers: give all ranks rank 0's buffers before each step.
        factor: what this rank's gradients are multiplied by before a mean over the ranks is taken.
        first: whether the next batch is the first of a wrapped model.
        takes_nothing: the model can run on a batch without samples.
        entered: the model has been called in this batch.
        prepared: DDP waits for the gradients of a backward pass.
        kept: gradients of an earlier batch, which a callback accumulates, are there when the batch begins.
        number: of the batch, the same on every rank.
        reduced: this rank has taken part in the reduction of the batch's gradients, or has none to take part in.
        left_out: this rank has left its backward pass of the batch out.
        stepped: this rank's optimizer has stepped after the batch.
        skipped: all ranks have left the optimizer's step after the batch out.
        counted: what all ranks have counted in the step, as a mean over the ranks.
        vector: the carrier's of this batch, once it is reduced before the backward pass.
    """

    def __init__(
        self, learn: "Learner", agreement: Agreement, note_trial: Callable[[Trial], None] | None, by_bucket: bool
    ) -> None:
        self.learn, self.agreement, self._plain = learn, agreement, learn.model
        self.note_trial, self.by_bucket = note_trial, by_bucket
        self.device = learn.dls.device
        self.own_step, self.compresses = learn._overrides("_step"), False
        self.ranks = world.world_size()
        self.mean = GradientMean(learn._loss_weighting.sums)
        self.carrier = Carrier(learn.dls.device)
        self.buckets = BucketWeights()
        self.wrappers: list[Wrapper] = []
        self.params: list[nn.Parameter] = []
        self.beside: list[nn.Parameter] = []
        self.foreign: list[tuple[str, nn.Parameter]] = []
        self.late = self.sends_buffers = self.static = self.parts = False
        self.later: LaterPasses | None = None
        self.factor: float | Tensor = 1.0
        self._later_factor: float | Tensor | None = None
        self.first = self.takes_nothing = True
        self.number = self._point = -1
        self._dispatch: RankDispatch | None = None
        agreement.watch.passed = self._passed
        self.reduced = self.stepped = self.skipped = self.entered = self.prepared = True
        self.left_out = False
        self.counted: float | Tensor = 0.0
        self.vector: Tensor | None = None
        self.kept = False
        self._all: list[nn.Parameter] = []
        self._trainable: list[bool] = []
        self._reductions = 0  # since the model was wrapped
        self._witness: nn.Parameter | None = None  # a parameter whose gradient tells whether they were cleared

    # A batch

    def start(self) -> None:
        """Begin training, perhaps after one that was cut short."""
        self.mean.begun = False
        self.carrier.clear()

    def begin(self) -> None:
        """Begin a batch."""
        self._point = self._number_of("next batch")
        self._dispatch = self.agreement.dispatch
        self._dispatch.begin()
        self.number += 1
        self.left_out = self.reduced = self.stepped = self.skipped = self.entered = self.prepared = False
        if self.later is not None:
            self.later.open = False
        self.vector = None
        self.learn.pred = self.learn.output = None  # those of the batch before say nothing of this one

    def take_parameters(self, model: nn.Module, beside: list[nn.Parameter]) -> None:
        """Take the parameters whose gradients are to be averaged.

        Args:
            model: without DDP.
            beside: those that are trained with it; the same on every rank.
        """
        self._all, self.beside = [*model.parameters(), *beside], beside
        self._trainable, self._reductions = [p.requires_grad for p in self._all], 0
        self.params = [p for p in self._all if p.requires_grad]

    def replace_model(self, model: nn.Module) -> nn.Module:
        """Train another model from here on."""
        self._plain, self._witness = model, None
        return model

    @property
    def by_pass(self) -> bool:
        """Whether each backward pass is averaged at its end: those of a `_backward` of the learner's."""
        return self.by_bucket and not (self.parts or self.compresses or self.static)

    @property
    def needs_output(self) -> bool:
        """Whether DDP must see the model's output in each pass: a rank without data then differentiates that."""
        return self.static or self.compresses

    @property
    def can_be_late(self) -> bool:
        """Whether the gradients may be averaged after the backward passes: nothing else is said of how."""
        return not (self.by_bucket or self.static or self.compresses)

    def watch_later_passes(self) -> None:
        """Average the backward passes after that of the loss, where a `_step` or a callback may make some."""
        self.ignore_later_passes()
        table = self.learn._dispatch.table
        theirs = any(not (is_ours(hook) or cb.rank0_only) for event in _LATER for cb, hook, *_ in table[event])
        if self.by_pass or ((theirs or self.own_step) and not (self.by_bucket or self.static)):
            self.later = LaterPasses(self, self.params)

    def ignore_later_passes(self) -> None:
        """Undo `watch_later_passes`."""
        if self.later is not None:
            self.later.remove()
            self.later = None

    def own_hooks(self) -> dict[str, Any]:
        """Hooks by event for learners with a `_step` of their own, which may step without the optimizer's `step`."""
        return {"after_step": self._note_own_step} if self.own_step else {}

    def _note_own_step(self, *cb: Any) -> None:
        if not self.skipped:
            self.note_optimizer_step()

    def share_closure(self, opt: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Let the closure that an optimizer gets return the loss of all ranks: a hook of its `step`."""
        if len(args) > 1 and callable(args[1]):
            return (args[0], averaged(args[1], self), *args[2:]), kwargs
        closure = kwargs.get("closure")
        return None if closure is None else (args, {**kwargs, "closure": averaged(closure, self)})

    def average_late(self) -> None:
        """From this batch on, average the gradients after the backward passes; every rank must reach this."""
        self.late, self.carrier.parameter = True, None
        for wrapper in self.wrappers:
            remove_ddp_hooks(wrapper)
        self._switch(False)
        self.take_parameters(self._plain, self.beside)
        if self.later is not None:
            self.watch_later_passes()

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
        self.kept = self._witness is not None and self._witness.grad is not None
        if first:
            self.takes_nothing = not self.by_bucket and runs_on_nothing(learn, self._plain)
        if learn.dl.share.size == 0:
            learn.batch_size = 0
            if not self.takes_nothing:
                learn.batch, learn.xb, learn.yb = learn._unpack.split(learn.dl.sample)
        if first and self.note_trial and not self.by_bucket:  # on all ranks alike
            self.note_trial(try_batch(learn, self._plain, self.beside))
        self.synchronise()
        for wrapper in self.wrappers:
            sends = self.sends_buffers and not self.mean.begun and bool(wrapper.modules_buffers)
            if sends or self._reductions < 2:  # DDP arranges its buckets after the first one, all ranks together
                begin_batch(wrapper, sends)

    def synchronise(self) -> None:
        """Have DDP reduce in this batch if a step follows it; without a step the gradients stay on their ranks."""
        self._switch(self.learn._step_due and not (self.late or self.by_pass))

    def _switch(self, reduces: bool) -> None:
        for wrapper in self.wrappers:
            if wrapper.require_backward_grad_sync != reduces:  # microseconds, in a module
                wrapper.require_backward_grad_sync = reduces

    def backward(self) -> None:
        """Compute the batch's gradients with their weight, and correct those of the step after its last batch."""
        learn = self.learn
        if not self.by_bucket and [p.requires_grad for p in self._all] != self._trainable:
            self.average_late()  # a callback has frozen or unfrozen some since the model was wrapped
        if not learn.batch_size:
            learn._loss_count = 0  # the samples that this rank has stand for shapes and types only
        count = self.take_count(host_count(learn._loss_count))
        if self.by_bucket:
            self.reduce_counts(count)
        else:
            self._weigh(count)
        self.differentiate(count)
        self.finish_reduction()

    def _weigh(self, count: float | Tensor) -> None:
        """Weigh the loss, or later the gradients: callbacks may have added some by a backward pass of their own."""
        learn, mean = self.learn, self.mean
        if self._weighs_gradients():
            nothing = not isinstance(count, Tensor) and not count
            self.factor = 0.0 if nothing else self.ranks if mean.sums else count / mean.expected
            return
        self.factor = 1.0
        if mean.sums:
            learn.loss_grad = learn.loss_grad * self.ranks
        else:
            learn.loss_grad = mean.weigh(learn.loss_grad, count, learn._model_output)

    def _weighs_gradients(self) -> bool:
        """Whether the gradients are this batch's alone, so that they can be weighed rather than its loss."""
        return self.late and self.learn._step_due and self.learn._step_batches == 1 and not self.kept

    @property
    def is_begun(self) -> bool:
        """Whether the step has batches already."""
        return self.mean.begun

    def factor_to_sum(self, count: float | Tensor) -> float | Tensor:
        """Return what this rank's own gradients of a batch, as they are in the backward pass, are to be multiplied by
        to be those of the sum over what the batch counts; after the pass, too."""
        if self._weighs_gradients():
            return 1.0 if self.mean.sums else count
        return 1 / self.ranks if self.mean.sums else self.mean.expected

    def leave_out(self) -> None:
        """Leave this rank's gradients of the batch out, but not those of earlier batches of the step."""
        self.factor = 0.0 if self._weighs_gradients() else 1.0

    def take_count(self, count: float | Tensor) -> float | Tensor:
        """Take what a batch counts into its step, and return it."""
        if not self.mean.begun:
            self.mean.begin(self._expected(count))
        self.mean.counted = self.mean.counted + count
        return count

    def _expected(self, count: float | Tensor) -> float:
        if self.kept and not self.by_bucket and not self.mean.sums:
            # A callback accumulates gradients by leaving steps out: those that are there have their scale already, so
            # this batch's must be right before it joins them. A collective and a host-device sync of its own.
            return world.reduce(float(count), "mean", among="gradients") * self.learn._step_batches or 1.0
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
        """Compute the gradients of `learn.loss_grad`, or of nothing."""
        parameter, due = self.carrier.parameter, self.learn._step_due
        nothing = not (self.by_bucket or self.needs_output or isinstance(count, Tensor) or count)
        if self.by_pass and self.later is not None:
            self.later.begin()
        if due and not (self.prepared or self.late or self.by_bucket or self.static):
            for wrapper in self.wrappers:  # the model was called by its parts, or not at all
                expect_another_backward(wrapper)
        if nothing:
            self._differentiate_nothing()
        elif parameter is None:
            self.learn._backward()
            self._reduce_assigned()
        else:
            # The parameter is a root of its own, whose gradient is given: that needs no further operations.
            vector = self.carrier.vector(count, self._flags())
            torch.autograd.backward((self.learn.loss_grad, parameter), (None, vector))

    def _reduce_assigned(self) -> None:
        """Average gradients that a `_backward` has put into `p.grad` by itself, which DDP does not see."""
        if not self.by_bucket or self.compresses:
            return
        if self.later is not None:  # by pass
            if not self.later.seen and any(p.grad is not None for p in self.params):
                zero = torch.zeros(1, dtype=torch.float64, device=self.device)
                reduce_gradients(self.params, self.buckets.factor, zero)
            return
        for wrapper in self.wrappers:
            params = [p for p in wrapper.module.parameters() if p.requires_grad]
            if wrapper not in self.buckets.seen and any(p.grad is not None for p in params):
                zero = torch.zeros(1, dtype=torch.float64, device=self.device)
                reduce_gradients(params, self.buckets.factor, zero)
        self.buckets.seen.clear()

    def _differentiate_nothing(self) -> None:
        """Take part in DDP's reduction with gradients of zero, without a loss, which might be a NaN."""
        if self.late or not self.learn._step_due:
            return
        roots = [p for p in self.params if p.requires_grad]
        zeros: list[Tensor] = [torch.zeros_like(p) for p in roots]
        if self.carrier.parameter is not None:
            roots.append(self.carrier.parameter)
            zeros.append(self.carrier.vector(0, self._flags()))
        torch.autograd.backward(roots, zeros)

    def _flags(self) -> list[float] | None:
        "This rank's flags, which concern the last batch of a step alone; `None`: there are none."
        leaving, request = self.agreement.pending, self.agreement.request.mine
        flagged = self.learn._step_due and (leaving is not None or request)
        return [*flags_of(leaving), packed(request, self.ranks)] if flagged else None

    def finish_reduction(self) -> None:
        """Correct the gradients once they are reduced, and leave if the flags say so."""
        self.reduced = True
        if not self.learn._step_due:
            return
        mean, carrier = self.mean, self.carrier
        self._reductions += 1
        if self._reductions == 1:
            self._check_foreign()
        if self.late:
            found = self.carrier.vector(mean.counted, self._flags())
            self.vector = reduce_gradients(self.params, self.factor, found)
        elif not (self.by_bucket or self.static):
            self._check_reduced()
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
        if self.later is not None or self.own_step:
            self._begin_later()

    def _begin_later(self) -> None:
        """Have the backward passes that follow averaged, too."""
        self._later_factor = None
        if self.later is not None:
            self._switch(False)
            self.later.begin()

    def later_factor(self) -> float | Tensor:
        """Return what this rank's gradients of a further backward pass are weighed by; every rank must reach this."""
        if self.by_bucket:
            return self.buckets.factor
        if self._later_factor is None:
            learn = self.learn
            count = host_count(learn._loss_count) if learn.batch_size else 0
            if learn._step_batches == 1 and not self.kept:
                mean = self.counted
            else:  # of this batch alone, rather than of the step
                mean = world.reduce(torch.as_tensor(count, dtype=torch.float64, device=self.device), "mean")
                mean = mean if self.carrier.reads_late else mean.item()
            nothing = not isinstance(count, Tensor) and not count
            self._later_factor = 0.0 if nothing else self.ranks if self.mean.sums else count / mean
        return self._later_factor

    def _check_foreign(self) -> None:
        """Refuse parameters of an optimizer that this package does not know, if they get gradients of the loss."""
        owner = next((name for name, p in self.foreign if p.grad is not None), None)
        if owner is not None:
            raise ValueError(
                f"{owner} trains parameters that are neither the model's nor in learn.opt, and the loss depends on "
                "them, so each rank would train its own: put them into the model, or into learn.opt (add_param_group)"
                " (errors.html#foreign-parameters)"
            )

    def _check_reduced(self) -> None:
        """Refuse a loss that has not reached all parameters, on which the others' reduction would wait."""
        names = [name for wrapper in self.wrappers for name in wrapper.unreached()]
        if names:
            raise RuntimeError(
                f"parameters that took no part in the loss of batch {self.learn.iter} on rank {world.rank()}, although "
                f"they did in the first batch: {first_few(names)}. Freeze them, use them in every batch, or pass "
                "find_unused_parameters=True to DistributedCallback, which then averages the gradients after the "
                "backward pass, whichever there are"
                " (errors.html#unused-parameters)"
            )

    def _correct(self, tolerance: float = 0.0) -> None:
        if not self.by_bucket:
            scale_gradients(self.params, self.mean.correction(self.counted, tolerance))

    def _obey(self, flags: list[float]) -> None:
        *leaving, request = flags
        self.agreement.request.agreed = max(self.agreement.request.agreed, unpacked(request, self.ranks))
        if any(leaving):
            self.carrier.clear()
            self.learn._zero_grad()
            self.agreement.leave(leaving)

    def note_optimizer_step(self, *_: Any) -> None:
        """Note that this rank's optimizer has stepped."""
        self.stepped = True
        self._point = self._number_of("step")

    def end(self) -> None:
        """Note that this rank leaves nothing of the batch out any more."""
        self._point = self._number_of("next batch")

    def count_ranks(self, with_data: bool) -> int:
        """Return how many ranks have data for another batch; every rank must reach this.

        What a rank leaves for is told with the gradients, or after the last batch.
        """
        self.end()  # no rank waits in `all_skip` for this one, which waits for all here
        with world.before_collective(None):
            return world.reduce(int(with_data), among="votes")

    def all_skip(self, point: str) -> bool:
        """Tell whether every rank leaves a point of the batch out; ranks that come to it never call this."""
        return self.agreement.watch.all_skip(self._number_of(point))

    def _number_of(self, point: str) -> int:
        return len(_POINTS) * self.number + _POINTS.index(point)

    def _passed(self) -> int:
        """The number of the last point that this rank has come to; the watch reads it in a thread of its own."""
        if self._dispatch is None or self._dispatch.last != "after_batch":
            return self._point
        has_stepped = self.stepped or self.skipped or not self.learn._step_due
        return max(self._point, self._number_of("after_batch")) if has_stepped else self._point


class Wrapper(Transparent, DistributedDataParallel):
    """DDP that notes whether it was called, and leaves the buffers to `begin_batch`, which every rank reaches."""

    _rank_step: RankStep
    _check_all_reduced: Callable[[], None]
    _parameter_names: list[str]  # of the trainable parameters, in the order in which DDP numbers them

    def __setattr__(self, name: str, value: Any) -> None:
        attributes = vars(self)
        if name in attributes:  # those that DDP sets in each pass, quickly
            attributes[name] = value
        else:
            super().__setattr__(name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module inside."""
        step = self._rank_step
        step.entered = True
        output = super().forward(*args, **kwargs)
        step.prepared = step.prepared or (self.require_backward_grad_sync and torch.is_grad_enabled())
        return output

    def register_comm_hook(self, state: object, hook: Callable) -> None:
        """Register a communication hook, which a scaling report may time."""
        timed = self._rank_step.agreement.timed
        super().register_comm_hook(state, hook if timed is None else timed(hook))

    def will_sync_module_buffers(self) -> bool:
        """Tell that no buffers are sent in a forward pass: a rank may leave it early, or run it twice."""
        return False

    def unreached(self) -> list[str]:
        """The names of the parameters that the last backward pass has not reached."""
        try:
            self._check_all_reduced()
        except RuntimeError as error:  # its text ends with their numbers
            words = str(error).rpartition("for rank")[2].rpartition(":")[2].split()
            found = [self._parameter_names[int(word)] for word in words if word.isdigit()]
            return [name for name in found if CARRIER not in name] or ["unknown"]
        return []
