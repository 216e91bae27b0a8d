"""An optimizer step that several ranks take together: what each counts, when all leave, and DDP during the pass."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from learnerkit import distributed
from learnerkit.gradient_mean import GradientMean, StepGradient, counts_something, host_count, scale_gradients
from learnerkit.host_scalars import HostCopy
from learnerkit.losses import output_of
from learnerkit.parallel.agreement import AFTER_BATCH, NEXT_BATCH, STEP, TOLD, Agreement, RankDispatch
from learnerkit.parallel.passes import Passes
from learnerkit.text import first_few
from learnerkit.torch_internals import check_reduced

if TYPE_CHECKING:
    from learnerkit.learner import Learner


_SLOTS = 16  # of the vector: so many that the gradients after it in DDP's bucket stay aligned for vector instructions


class RankStep:
    """The facts that ranks tell each other of a step, and the weights of their gradients.

    The loss of a rank is weighed before the backward pass by what the step is expected to count, so that a plain mean
    over the ranks is right. A small vector then tells what was counted, and the gradients are corrected once if that
    is something else.

    Args:
        learn: the learner.
        agreement: of the run.

    Attributes:
        dispatch: of the run.
        named: the parameters by name: the model's, and those beside it that are trained with it.
        params: those of them that are trainable.
        passes: averages the backward passes that come after the gradients of the step are finished.
        sends: the module of which rank 0's buffers are given to all ranks before each step, if there are any.
        mean: weighs the batches.
        count: what this rank's batch counts.
        kept: gradients of an earlier batch, which a callback accumulates, are there when the batch begins.
        number: grows with each batch, the same on every rank, as soon as this rank leaves nothing more of the one
            before out.
        reduced: this rank has taken part in the reduction of the batch's gradients.
        stepped: its optimizer has stepped after the batch; False: all ranks leave that out; `None`: neither as yet.
        agree: called before the gradients of each batch, on every rank; something that the ranks agree on before them.
        reads_late: read the flags of a step after the next one, at the same place on every rank, so that the host need
            not wait for the device.
    """

    def __init__(self, learn: "Learner", agreement: Agreement) -> None:
        self.learn, self.agreement, self.dispatch = learn, agreement, cast(RankDispatch, learn._dispatch)
        self.mean = GradientMean(learn._loss_weighting.sums, distributed.world_size())
        self.named: dict[str, nn.Parameter] = {}
        self.params: dict[str, nn.Parameter] = {}
        self.passes = Passes(self, watches=False)
        self.sends: nn.Module | None = None
        self.kept = self.reduced = False
        self.agree: Callable[[], None] = lambda: None
        self.stepped: bool | None = None
        self.count: float | Tensor = 0
        self.number = 0
        self.reads_late = learn.dls.device.type != "cpu"
        self._last_flags: HostCopy | None = None
        self._witness: nn.Parameter | None = None  # a parameter whose gradient tells whether they were cleared
        agreement.watch.passed = self._passed

    def take_parameters(self, named: dict[str, nn.Parameter], watches: bool) -> None:
        """Take the parameters whose gradients are averaged.

        Args:
            named: all of them by name, the same on every rank.
            watches: something may make backward passes after that of the loss.
        """
        self.passes.remove()
        self.named, kept = named, self._are_kept()
        self.params = {name: p for name, p in named.items() if p.requires_grad}
        # Before the first step ranks may differ in what they have kept, and only a sum needs no collective for it.
        self._witness = self._find_witness() if kept or self.mean.sums else None
        self.passes = Passes(self, watches)

    def _find_witness(self) -> nn.Parameter | None:
        return next((p for p in self.params.values() if p.grad is not None), None)

    def _are_kept(self) -> bool:
        return self._witness is not None and self._witness.grad is not None

    def is_changed(self) -> bool:
        """Tell whether parameters have been frozen or unfrozen since they were taken."""
        return any(p.requires_grad is not (name in self.params) for name, p in self.named.items())

    def start(self) -> None:
        """Begin training, perhaps after one that was cut short."""
        self.mean.begun, self._last_flags = False, None

    # A batch

    def begin(self) -> None:
        """Begin a batch."""
        self.dispatch.begin()
        self.reduced, self.stepped = False, None
        self.number += 1
        if self.passes.watches:
            self.passes.close()

    def before_batch(self) -> None:
        """Prepare the batch, after the callbacks that may still change it: the hook of that event."""
        self.kept = self._are_kept()
        if self.learn.dl.share.size == 0:
            self.agreement.left_batch.begin()
        if self.sends is not None and not self.mean.begun:
            distributed.broadcast_into(list(self.sends.buffers()), among="gradients")

    def take_count(self) -> bool:
        """Take what the batch counts into its step, and tell whether that may be anything."""
        learn, mean = self.learn, self.mean
        self.agree()
        if not learn.batch_size:
            learn.loss_count = 0  # that of a sample which stands for shapes and types only
        self.count = host_count(learn.loss_count)
        if not mean.begun:
            total = learn.dl.share.total or learn.dl.usual_total or mean.ranks  # the same on every rank
            expected = total / mean.ranks
            if self.kept and not mean.sums:
                # A callback accumulates gradients by leaving steps out: those that are there have their scale already,
                # so this batch's must be right before it joins them. A collective and a host-device sync of its own.
                expected = distributed.reduce(float(self.count), "mean", among="gradients")
            mean.begin(expected * learn.step_batches or 1.0)
        mean.counted = mean.counted + self.count
        if (weighting := learn._loss_weighting).parts:
            weighting.share(learn)
        return counts_something(self.count)

    def weigh(self) -> bool:
        """Take the batch's count, weigh its loss by it, and tell whether it may count anything."""
        learn, mean, something = self.learn, self.mean, self.take_count()
        learn.loss_grad = mean.weigh(learn.loss_grad, self.count, output_of(learn))
        if learn.shards is None and learn.step_due and learn.step_batches == 1 and not self.kept:
            # There may be gradients of a callback's own backward pass, which has the weight of the loss.
            if something:
                scale_gradients(self.params.values(), mean.weight(self.count, mean.expected))
            else:
                for p in self.params.values():
                    p.grad = None
        return something

    def weight(self, total: float) -> float:
        """Return `GradientMean.weight` of this rank's batch. A host-device sync."""
        return float(self.mean.weight(float(self.count), total))

    def vector(self) -> Tensor:
        """Return this rank's vector of a step that is due: what its batches count, and the flags of `TOLD`."""
        vector = torch.zeros(_SLOTS, dtype=torch.float64, device=self.learn.dls.device)  # counts need many digits
        # Numbers are filled in on the device, without a sync.
        for place, number in enumerate([self.mean.counted, *self.agreement.flags()]):
            if counts_something(number):
                vector[place] = number
        return vector

    def complete(self, vector: Tensor) -> None:
        """Correct the gradients of the step, which are averaged, and leave if the ranks say so.

        A host-device sync; where the flags are read late it is one with an earlier step, and the device has work
        meanwhile.

        Args:
            vector: the mean of those of all ranks.
        """
        mean, flags = self.mean, vector[1 : 1 + len(TOLD)]
        mean.begun = False
        if self._witness is None:
            self._witness = self._find_witness()
        mean.counted = vector[0] if self.reads_late else vector[0].item()
        rounding = 8 * torch.finfo(vector.dtype).eps
        scale_gradients(self.params.values(), mean.correction(rounding))
        if self.reads_late:
            last, self._last_flags = self._last_flags, HostCopy(flags)
            told = last.numbers() if last else []
        else:
            told = flags.tolist()
        if any(told):
            self.agreement.watch.check()  # of a reduction that was broken off they would mean nothing
            self.agreement.obey(told)
        if self.passes.watches:
            self.passes.open_now()

    def no_part(self, names: Iterable[str]) -> RuntimeError:
        """Return the error for parameters that a later batch of this rank leaves out."""
        return RuntimeError(
            f"parameters that took no part in the loss of batch {self.learn.iter} on rank {distributed.rank()}, "
            f"although they did in the first batch: {first_few(list(names) or ['unknown'])}. Freeze them, use them in "
            "every batch, or pass find_unused_parameters=True to DistributedCallback, for losses that may leave any out"
            " (errors.html#unused-parameters)"
        )

    # What other ranks may wait for

    def is_open(self) -> bool:
        """Tell whether this rank has left out something of the batch that other ranks may wait for."""
        is_left = self.learn.step_due and self.stepped is None
        return is_left or not self.reduced or "after_step" in self.dispatch.stopped

    def note_optimizer_step(self, *_: Any) -> None:
        """Note that this rank's optimizer has stepped."""
        self.stepped = True

    def count_ranks(self, with_data: bool) -> int:
        """Return how many ranks have data for another batch; every rank must reach this.

        What a rank leaves for is told with the gradients, or after the last batch.
        """
        self.number += 1  # no rank waits in `all_skip` for this one, which waits for all here
        with distributed.before_collective(None):
            return distributed.reduce(int(with_data), among="votes")

    def all_skip(self, point: int) -> bool:
        """Tell whether every rank leaves a point of the batch out; ranks that come to it never call this."""
        return self.agreement.watch.all_skip(NEXT_BATCH * self.number + point)

    def _passed(self) -> int:
        """The number of the last point that this rank has come to; the watch reads it in a thread of its own."""
        begin = NEXT_BATCH * self.number  # first: what follows may soon be of the next batch
        if self.dispatch.has_passed("after_batch") and (self.stepped is not None or not self.learn.step_due):
            return begin + AFTER_BATCH
        return begin + STEP if self.stepped else begin


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
        give_up: called, on all ranks alike, where parameters are frozen or unfrozen from here on; it puts a `Deferred`
            in this one's place.

    Attributes:
        ddp: made by all ranks together.
    """

    def __init__(
        self, step: RankStep, comm_hook: str | None, options: dict[str, Any], give_up: Callable[[], StepGradient]
    ) -> None:
        self.step, self.mean, self._give_up = step, step.mean, give_up
        self._carrier: nn.Parameter | None = None  # its gradient is the vector, which then needs no collective
        device, params = step.learn.dls.device, list(step.params.values())
        held = nn.Identity()  # returns the loss that it is called with
        if comm_hook is None:  # which would round the vector
            dtype = torch.float64 if {p.dtype for p in params} == {torch.float64} else torch.float32
            self._carrier = nn.Parameter(torch.zeros(_SLOTS, dtype=dtype, device=device))
            params.append(self._carrier)
        held.params = nn.ParameterList(params)
        group = distributed.group("gradients", device.type)
        self.ddp = DistributedDataParallel(held, **{"process_group": group, "init_sync": False} | options)
        if comm_hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=10)
            self.ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif comm_hook is not None:
            self.ddp.register_comm_hook(group, getattr(default_hooks, f"{comm_hook}_compress_hook"))

    def backward(self) -> None:
        """Compute the batch's gradients with their weight; of a batch that counts nothing, zeros."""
        step, learn, carrier = self.step, self.step.learn, self._carrier
        if step.is_changed():
            self._give_up().backward()
            return
        something = step.weigh()
        if not learn.step_due:
            if something:
                learn._backward()
            step.reduced = True
            return
        roots = self.ddp([learn.loss_grad] if something else list(step.params.values()))
        gradients = [None if something else torch.zeros_like(root) for root in roots]
        if carrier is not None:
            # A root of its own, whose gradient is given: that needs no further operations.
            roots.append(carrier)
            gradients.append(step.vector().to(carrier.dtype))
        torch.autograd.backward(roots, gradients)
        step.reduced = True
        try:
            check_reduced(self.ddp)
        except RuntimeError:
            raise step.no_part(name for name, p in step.params.items() if p.grad is None) from None
        if carrier is None:
            vector = distributed.reduce(step.vector(), "mean", among="gradients")
        else:
            vector, carrier.grad = cast(Tensor, carrier.grad).clone(), None  # it may be a piece of DDP's bucket
        step.complete(vector)

    def detach(self) -> None:
        """Take DDP off the parameters."""
        # Its hooks go with its reducer; a DDP that lives on, in a traceback say, would go on reducing.
        for name in ("reducer", "logger"):
            vars(self.ddp).pop(name, None)
