"""An optimizer step that several ranks take together: what each counts, when all leave, and DDP during the pass."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from learnerkit import world
from learnerkit.gradient_mean import (
    GradientMean,
    StepGradient,
    StepState,
    counts_something,
    host_count,
    scale_gradients,
)
from learnerkit.host_scalars import HostCopy
from learnerkit.parallel.agreement import LEAVING, TOLD, Agreement, RankDispatch
from learnerkit.parallel.passes import Passes
from learnerkit.text import first_few
from learnerkit.torch_internals import remove_ddp_hooks

if TYPE_CHECKING:
    from learnerkit.learner import Learner


_POINTS = ("step", "after_batch", "next batch")  # of a batch, in order, which all ranks may leave out


@dataclass
class Progress:
    """How far this rank has come in a batch.

    Attributes:
        reduced: it has taken part in the reduction of the batch's gradients, or has none to take part in.
        stepped: its optimizer has stepped after the batch.
        skipped: all ranks have left the optimizer's step after the batch out.
    """

    reduced: bool = True
    stepped: bool = True
    skipped: bool = True


class RankStep:
    """What the ranks tell each other of a step, and what their gradients are weighed by.

    The loss of a rank is weighed before the backward pass by what the step is expected to count, so that a plain mean
    over the ranks is right. A small vector then tells what was counted, and the gradients are corrected once if that
    is something else.

    Args:
        learn: the learner.
        agreement: of the run.

    Attributes:
        progress: of this rank in the present batch.
        named: the parameters by name: the model's, and those beside it that are trained with it.
        params: those of them that are trainable.
        passes: averages the backward passes that come after the gradients of the step are finished.
        sends_buffers: give all ranks rank 0's buffers before each step.
        mean: weighs the batches.
        message: makes the small vector.
        count: what this rank's batch counts.
        counted: what all ranks have counted in the step, as a mean over the ranks.
        kept: gradients of an earlier batch, which a callback accumulates, are there when the batch begins.
        number: of the batch, the same on every rank.
    """

    def __init__(self, learn: "Learner", agreement: Agreement) -> None:
        self.learn, self.agreement = learn, agreement
        self.mean = GradientMean(learn._loss_weighting.sums)
        self.message = Message(learn.dls.device, world.rank(), world.world_size())
        self.progress = Progress()
        self.named: dict[str, nn.Parameter] = {}
        self.params: dict[str, nn.Parameter] = {}
        self.passes = Passes(self, watches=False)
        self.sends_buffers = self.kept = False
        self.count: float | Tensor = 0
        self.counted: float | Tensor = 0.0
        self.number = self._point = -1
        self._dispatch: RankDispatch | None = None
        self._witness: nn.Parameter | None = None  # a parameter whose gradient tells whether they were cleared
        agreement.watch.passed = self._passed

    def take_parameters(self, named: dict[str, nn.Parameter], watches: bool) -> None:
        """Take the parameters whose gradients are averaged.

        Args:
            named: all of them by name, the same on every rank.
            watches: something may make backward passes after that of the loss.
        """
        self.passes.remove()
        self.named, self._witness = named, None
        self.params = {name: p for name, p in named.items() if p.requires_grad}
        self.passes = Passes(self, watches)

    def is_changed(self) -> bool:
        """Tell whether parameters have been frozen or unfrozen since they were taken."""
        return any(p.requires_grad is not (name in self.params) for name, p in self.named.items())

    def start(self) -> None:
        """Begin training, perhaps after one that was cut short."""
        self.mean.begun = False
        self.message.forget()

    # A batch

    def begin(self) -> None:
        """Begin a batch."""
        self._point = self._number_of("next batch")
        self._dispatch = self.agreement.dispatch
        self._dispatch.begin()
        self.number += 1
        progress = self.progress
        progress.reduced = progress.stepped = progress.skipped = False
        if self.passes.watches:
            self.passes.close()
        self.learn.pred = self.learn.output = None  # those of the batch before say nothing of this one

    def before_batch(self, *cb: Any) -> None:
        """Prepare the batch, after the callbacks that may still change it: the hook of that event."""
        learn, witness = self.learn, self._witness
        self.kept = witness is not None and witness.grad is not None
        if learn.dl.share.size == 0:
            self.agreement.left_batch.begin()
        if self.sends_buffers and not self.mean.begun:
            world.broadcast_into(list(learn.model.buffers()), among="gradients")

    def take_count(self) -> float | Tensor:
        """Take what the batch counts into its step, and return it."""
        learn, mean = self.learn, self.mean
        if not learn.batch_size:
            learn._loss_count = 0  # that of a sample which stands for shapes and types only
        count = self.count = host_count(learn._loss_count)
        if not mean.begun:
            mean.begin(self._expected(count))
        mean.counted = mean.counted + count
        return count

    def _expected(self, count: float | Tensor) -> float:
        steps, dl = self.learn._step_batches, self.learn.dl
        if self.kept and not self.mean.sums:
            # A callback accumulates gradients by leaving steps out: those that are there have their scale already, so
            # this batch's must be right before it joins them. A collective and a host-device sync of its own.
            return world.reduce(float(count), "mean", among="gradients") * steps or 1.0
        total = dl.share.total or dl.usual_total or self.message.ranks  # the same on every rank, as this must be
        return total / self.message.ranks * steps

    def weigh(self) -> float | Tensor:
        """Take the batch's count, weigh its loss by it, and return it."""
        learn, mean, count = self.learn, self.mean, self.take_count()
        something = counts_something(count)
        if something:
            weighed = mean.weigh(learn.loss_grad, count, learn._model_output)
            learn.loss_grad = weighed * self.message.ranks if mean.sums else weighed
        if learn._step_due and learn._step_batches == 1 and not self.kept:
            weight = self.message.ranks if mean.sums else count / mean.expected
            for p in self.params.values():
                if p.grad is not None:  # of a callback's own backward pass, which has the weight of the loss
                    p.grad = p.grad * weight if something else None
        return count

    def factor(self, counted: float) -> float | Tensor | None:
        """Return what this rank's gradients of the batch are multiplied by before a plain mean, if its loss was not.

        Args:
            counted: the mean over the ranks of what their batches count.

        Returns:
            `None` for a batch that counts nothing.
        """
        if not counts_something(self.count):
            return None
        return self.message.ranks if self.mean.sums else self.count / counted

    def vector(self) -> Tensor:
        """Return this rank's vector of a step that is due, with its reasons to leave."""
        agreement = self.agreement
        tells = agreement.pending is not None or agreement.request.mine
        return self.message.vector(self.mean.counted, agreement.flags() if tells else [])

    def complete(self, vector: Tensor, corrects: bool) -> None:
        """Correct the gradients of the step, which are averaged, and leave if the ranks say so.

        Args:
            vector: the mean of those of all ranks.
            corrects: the gradients are weighed by what was expected.
        """
        mean, message = self.mean, self.message
        mean.begun = False
        if self._witness is None:
            self._witness = next((p for p in self.params.values() if p.grad is not None), None)
        flags: list[float] | None
        if message.reads_late:
            self.counted, tolerance = vector[0], 0.0
        else:
            self.counted, *flags = vector.tolist()[: 1 + FLAGS]
            tolerance = 8 * torch.finfo(vector.dtype).eps
        if corrects:
            scale_gradients(self.params.values(), mean.correction(self.counted, tolerance))
        if message.reads_late:
            flags = message.exchange_flags(vector)
            if flags is not None:
                self.agreement.watch.check()  # of a reduction that was broken off they would mean nothing
        if flags is not None and any(flags):
            self._obey(flags)
        if self.passes.watches:
            self.passes.open_now()

    def _obey(self, flags: list[float]) -> None:
        try:
            self.agreement.obey(flags)
        except LEAVING:
            self.message.forget()
            self.learn._zero_grad()
            raise

    # What other ranks may wait for

    def is_open(self) -> bool:
        """Tell whether this rank has left out something of the batch that other ranks may wait for."""
        progress, due = self.progress, self.learn._step_due
        left = not progress.reduced or (due and not progress.stepped)
        return left or self.agreement.dispatch.stopped_in("after_step")

    def note_optimizer_step(self, *_: Any) -> None:
        """Note that this rank's optimizer has stepped."""
        if not self.progress.skipped:
            self.progress.stepped = True
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
        has_stepped = self.progress.stepped or self.progress.skipped or not self.learn._step_due
        return max(self._point, self._number_of("after_batch")) if has_stepped else self._point


# The vector

FLAGS = len(TOLD)
_SLOTS = 16  # so many that the gradients that follow in DDP's bucket stay aligned for vector instructions


class Message:
    """Makes the small vector of this rank: what its batches count, flags, and a number whose mean over the ranks is 1.

    Args:
        device: of the gradients.
        rank, ranks: of this process, and how many there are.

    Attributes:
        dtype: of the vectors; counts need more digits than half precision has.
        reads_late: read the flags of a step after the next one, at the same place on every rank, so that the host need
            not wait for the device.
    """

    def __init__(self, device: torch.device, rank: int, ranks: int) -> None:
        self.device, self.rank, self.ranks, self.dtype = device, rank, ranks, torch.float64
        self.reads_late = device.type != "cpu"
        self._last_flags: HostCopy | None = None

    def forget(self) -> None:
        """Forget the flags of the last step."""
        self._last_flags = None

    def vector(self, count: float | Tensor, flags: list[float]) -> Tensor:
        """Return this rank's vector.

        Args:
            count: what its batches count.
            flags: of `TOLD`, each 1 or 0; none: all are 0.
        """
        vector = torch.zeros(_SLOTS, dtype=self.dtype, device=self.device)
        # Numbers are filled in on the device, without a sync.
        for place, number in ((0, count), *enumerate(flags, 1), (-1, self.ranks * (self.rank == 0))):
            if isinstance(number, Tensor) or number:
                vector[place] = number
        return vector

    def exchange_flags(self, vector: Tensor | None) -> list[float] | None:
        """Start to copy the flags of this step, and return those of the last; `None`: there are none.

        A host-device sync, but with an earlier step: the device has work meanwhile.

        Args:
            vector: of this step; `None` after the last step of an epoch.
        """
        last, self._last_flags = self._last_flags, None if vector is None else HostCopy(vector[1 : 1 + FLAGS])
        return None if last is None else last.numbers()


# DDP

COMM_HOOKS = ("bf16", "fp16", "powersgd")


class Overlapped:
    """Lets DDP average the gradients of a step during its last backward pass; the small vector travels with them.

    DDP is told of each such pass by a call with its loss, right before it. It holds the parameters and does not run the
    model, so that everybody sees the model itself.

    Args:
        step: of the ranks.
        comm_hook: one of `COMM_HOOKS`, or `None`.
        options: of `DistributedDataParallel`.
        give_up: called, on all ranks alike, where parameters are frozen or unfrozen after `attach`; it puts a
            `Deferred` in this one's place.
    """

    def __init__(
        self, step: RankStep, comm_hook: str | None, options: dict[str, Any], give_up: Callable[[], StepGradient]
    ) -> None:
        self.step, self.comm_hook, self.options, self._give_up = step, comm_hook, options, give_up
        self.ddp: DistributedDataParallel | None = None
        self._carrier: nn.Parameter | None = None  # its gradient is the vector, which then needs no collective
        self._trainable: list[nn.Parameter] = []

    def attach(self) -> None:
        """Make DDP; every rank must reach this."""
        step, message = self.step, self.step.message
        device, self._trainable = message.device, list(step.params.values())
        extra: list[nn.Parameter] = []
        if self.comm_hook is None:  # which would round the vector
            message.dtype = torch.float64 if {p.dtype for p in self._trainable} == {torch.float64} else torch.float32
            extra = [nn.Parameter(torch.zeros(_SLOTS, dtype=message.dtype, device=device))]
            self._carrier = extra[0]
        group = world.group("gradients", device.type)
        own = {"process_group": group, "init_sync": False}
        self.ddp = DistributedDataParallel(_Held([*self._trainable, *extra]), **own | self.options)
        if self.comm_hook is not None:
            self.ddp.register_comm_hook(*_comm_hook(self.comm_hook, group))

    def begin(self) -> None:
        """Begin a batch."""
        self.step.begin()

    def backward(self) -> None:
        """Compute the batch's gradients with their weight; of a batch that counts nothing, zeros."""
        step, learn = self.step, self.step.learn
        if step.is_changed():
            self._give_up().backward()
            return
        something = counts_something(step.weigh())
        if not learn._step_due:
            if something:
                learn._backward()
            step.progress.reduced = True
            return
        zeros = [] if something else self._trainable
        loss = learn.loss_grad if something else torch.zeros((), device=step.message.device, requires_grad=True) * 1
        roots = [cast(DistributedDataParallel, self.ddp)(loss), *zeros]
        gradients: list[Tensor | None] = [None, *map(torch.zeros_like, zeros)]
        if self._carrier is not None:
            # A root of its own, whose gradient is given: that needs no further operations.
            roots.append(self._carrier)
            gradients.append(step.vector())
        torch.autograd.backward(roots, gradients)
        self.finish()

    def finish(self) -> None:
        """Take what has come with the gradients, and correct them."""
        step, message, carrier = self.step, self.step.message, self._carrier
        step.progress.reduced = True
        if carrier is None:
            vector = world.reduce(step.vector(), "mean", among="gradients")
        else:
            vector, carrier.grad = cast(Tensor, carrier.grad), None
            vector = vector.clone() if message.reads_late else vector  # it may be a piece of DDP's bucket
        # Where the loss has not reached all parameters, DDP waits for them, and has put nothing back into gradients.
        reads = carrier is not None and not message.reads_late
        self._check_reached(reads, reads and abs(vector[-1].item() - 1) > 0.01)
        step.complete(vector, corrects=True)

    def _check_reached(self, is_known: bool, cut_short: bool) -> None:
        """Refuse a loss that has not reached all parameters, on which the others' reduction would wait.

        Args:
            is_known: the vector tells.
            cut_short: DDP has not put anything back into the gradients.
        """
        step, ddp = self.step, cast(DistributedDataParallel, self.ddp)
        tells = is_known and not ddp.gradient_as_bucket_view  # with which a rank's own gradients look like the mean
        if not cut_short and (tells or ddp.static_graph):
            return
        names = [name for name, p in step.params.items() if p.grad is None]
        if cut_short or names:
            raise RuntimeError(
                f"parameters that took no part in the loss of batch {step.learn.iter} on rank {world.rank()}, although "
                f"they did in the first batch: {first_few(names or ['unknown'])}. Freeze them, use them in every "
                "batch, or pass find_unused_parameters=True to DistributedCallback, which then averages the gradients "
                "after the backward pass, whichever there are"
                " (errors.html#unused-parameters)"
            )

    def detach(self) -> None:
        """Take DDP off the parameters."""
        if self.ddp is not None:
            remove_ddp_hooks(self.ddp)
        self.ddp = self._carrier = None
        self.step.message.dtype = torch.float64

    def state(self) -> StepState:
        """Return how far the step has come."""
        mean = self.step.mean
        return StepState(mean.begun, 1 / self.step.message.ranks if mean.sums else mean.expected)


class _Held(nn.Module):
    """Holds the parameters of which DDP averages the gradients, and returns the loss that it is called with."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        self.params = nn.ParameterList(params)

    def forward(self, loss: Tensor) -> Tensor:
        return loss


def _comm_hook(name: str, group: Any) -> tuple[Any, Callable]:
    """The state of one of torch's communication hooks, and the hook."""
    if name == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        return powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=10), powerSGD_hook.powerSGD_hook
    return group, getattr(default_hooks, f"{name}_compress_hook")
