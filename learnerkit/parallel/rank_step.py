"""An optimizer step that several ranks take together: its counts, its flags, and DDP's averaging during the pass."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from learnerkit import distributed
from learnerkit.gradient_mean import (
    GradientMean,
    StepGradient,
    counts_something,
    gradients_aside,
    host_count,
    scale_gradients,
)
from learnerkit.host_scalars import HostCopy
from learnerkit.losses import loss_sums, output_of, weighting_of
from learnerkit.marks import collective
from learnerkit.parallel.agreement import AFTER_BATCH, BACKWARD, NEXT_BATCH, STEP, TOLD, Agreement, RankDispatch
from learnerkit.parallel.passes import Passes
from learnerkit.state import Learner
from learnerkit.text import first_few
from learnerkit.torch_internals import build_buckets, check_reduced, nodes_of
from learnerkit.utils import synced_norms
from learnerkit.values import tensors_in

_DOUBLE = torch.float64, torch.complex128
_SLOTS = 16  # the length of the vector keeps the gradients after it in DDP's bucket aligned for vector instructions


class RankStep:
    """The counts and flags that ranks exchange in an optimizer step, and the weights of their gradients.

    Before the backward pass, a rank's loss is weighed by the expected count of the step, so that a plain mean over the
    ranks is right. A small vector then carries the actual count, and the gradients are rescaled once if it differs.

    Args:
        learn: the learner.
        agreement: the agreement of the run.

    Attributes:
        dispatch: the dispatch of the run.
        named: the parameters by name: the model's, and those trained beside it.
        params: those of them that are trainable.
        passes: averages the backward passes that come after the gradients of the step are finished.
        sends: the module whose buffers rank 0 sends to all ranks before each step, if it has any.
        mean: computes the weights of the batches.
        count: the count of this rank's batch, or of a part of it.
        of_batch: the count of the whole batch, if it is computed in parts.
        has_data: this rank has data, and has not left it, in a batch of the step so far.
        kept: `.grad` already holds an earlier batch's gradients, because a callback skipped the step.
        number: grows with each batch, the same on every rank, once this rank has skipped nothing more of the last
            batch.
        point: the last point before the optimizer step that this rank has reached, as the other ranks may ask.
        hooks_skipped: all ranks have skipped the rest of the hooks of `after_backward`.
        reduced: this rank has taken part in the reduction of the batch's gradients.
        stepped: the optimizer has stepped after the batch; False: all ranks skip the step; `None`: neither so far.
        clears: a rank has cleared the gradients of the last step, which all have skipped: so do the others.
        agree: called before the gradients of each batch, on every rank; the ranks may agree on something in it.
        joined: in a batch without data, what undoes the changes of the norms that wait for other ranks.
        reads_late: read the flags of a step after the next one, at the same place on every rank, so that the host need
            not wait for the device.
    """

    def __init__(self, learn: "Learner", agreement: Agreement) -> None:
        self.learn, self.agreement = learn, agreement
        self.dispatch = cast(RankDispatch, learn._dispatch)
        self.mean = GradientMean(loss_sums(learn), distributed.world_size())
        self.named: dict[str, nn.Parameter] = {}
        self.params: dict[str, nn.Parameter] = {}
        self.precision = torch.float32
        self.passes = Passes(self, watches=False)
        self.sends: nn.Module | None = None
        self.kept = self.reduced = self.waits = self.clears = False
        self.point, self.hooks_skipped = 0, False
        self.joined = ExitStack()
        self.agree: Callable[[], None] = lambda: None
        self.stepped: bool | None = None
        self.count: float | Tensor = 0
        self.of_batch: float | Tensor | None = None
        self.has_data = False
        self.number = 0
        self.reads_late = learn.dls.device.type != "cpu"
        self._last_flags: HostCopy | None = None
        self._witness: nn.Parameter | None = None  # a parameter whose gradient tells whether the gradients were cleared
        agreement.watch.passed = self._passed

    def take_parameters(self, named: dict[str, nn.Parameter], watches: bool) -> None:
        """Set the parameters whose gradients are averaged.

        Args:
            named: all of them by name, the same on every rank.
            watches: the learner or a callback may make backward passes after that of the loss.
        """
        self.passes.remove()
        self.named, kept = named, self._are_kept()
        self.params = {name: p for name, p in named.items() if p.requires_grad}
        is_double = any(p.dtype in _DOUBLE for p in self.params.values())
        self.precision = torch.float64 if is_double else torch.float32  # in which the ranks' vectors are averaged
        # Before the first step, ranks may differ in the gradients that they have kept; only a sum needs no collective
        # for them.
        self._witness = self._find_witness() if kept or self.mean.sums else None
        self.passes = Passes(self, watches)

    def _find_witness(self) -> nn.Parameter | None:
        return next((p for p in self.params.values() if p.grad is not None), None)

    def _are_kept(self) -> bool:
        return self._witness is not None and self._witness.grad is not None

    def is_changed(self) -> bool:
        """Tell whether parameters have been frozen or unfrozen since `take_parameters`.

        Raises:
            RuntimeError: they have on this rank, and not on all ranks.
        """
        changed = [name for name, p in self.named.items() if p.requires_grad is not (name in self.params)]
        if changed and not self.all_skip(BACKWARD):
            raise RuntimeError(
                f"rank {distributed.rank()} has frozen or unfrozen {first_few(changed)}, and another rank has not: "
                "freeze the same parameters on every rank, at the same step (errors.html#unused-parameters)"
            )
        self.point = BACKWARD
        return bool(changed)

    def start(self) -> None:
        """Begin training, possibly after an epoch that was cut short."""
        self.mean.begun, self._last_flags = False, None
        self.mean.sums = loss_sums(self.learn)  # a callback may have replaced the loss

    # A batch

    def begin(self) -> None:
        """Begin a batch, or the training, with new points for which other ranks may wait."""
        self.dispatch.begin()
        self.reduced, self.stepped = False, None
        self.point, self.hooks_skipped = 0, False
        self.number += 1
        if self.passes.watches:
            self.passes.close()

    @collective
    def before_batch(self) -> None:
        """Prepare the batch, after the callbacks that may still change it: the hook of `before_batch`."""
        if self.clears:  # not before, as callbacks look at the gradients in `after_batch`
            self.clear()
        self.kept = self._are_kept()
        if self.learn.dl.share.size == 0:
            self.agreement.left_batch.begin()
        if self.sends is not None and not self.mean.begun:
            distributed.broadcast_into(list(self.sends.buffers()), among="gradients")

    def clear(self) -> None:
        """Clear the gradients."""
        self.learn._zero_grad()
        self.clears = False

    @collective
    def take_count(self) -> bool:
        """Add the batch's count to the step, and tell whether it may be other than 0."""
        learn, mean = self.learn, self.mean
        self.agree()
        if not learn.batch_size:
            learn.loss_count = 0  # the sample stands only for shapes and types
        self.count = host_count(learn.loss_count)
        if not mean.begun:
            total = learn.dl.share.total or learn.dl.step_size or mean.ranks  # it is the same on every rank
            expected = total / mean.ranks
            if self.kept and not mean.sums:
                # A callback accumulates gradients by skipping steps. The earlier gradients already have their scale, so
                # this batch's gradients must have it before they are added. This takes a collective and a host-device
                # sync.
                count = self.count if self.of_batch is None else self.of_batch
                expected = distributed.reduce(float(count), "mean", among="gradients")
            mean.begin(expected * learn.step_batches or 1.0)
            self.has_data = False
        mean.counted = mean.counted + self.count
        self.has_data |= bool(learn.batch_size)
        if (weighting := learn._loss_weighting).parts:
            weighting.share(learn)
        return counts_something(self.count)

    @collective
    def weigh(self) -> bool:
        """Add the batch's count to the step, weigh its loss by it, and tell whether the count may be other than 0."""
        learn, mean = self.learn, self.mean
        something = self.take_count()
        loss, output = learn.loss_grad, output_of(learn)
        gathers = weighting_of(learn).gathers
        self.waits = not something and (gathers or bool(synced_norms(learn.model)))
        if self.waits and loss is not None and output is not None:
            results = tensors_in(output)
            if gathers:
                # The pass goes through the whole loss, and a gradient that is NaN ends at the model's output.
                output = loss
                for t in results:
                    if t.grad_fn is not None:
                        t.register_hook(torch.zeros_like)
            else:
                # Norms on which the loss does not depend wait for nobody.
                nodes = nodes_of([loss])
                output = [t for t in results if t.grad_fn in nodes]
        learn.loss_grad = mean.weigh(loss, self.count, output)
        if learn.shards is None and learn.step_due and learn.step_batches == 1 and not self.kept:
            # A callback's own backward pass may have left gradients, which have the weight of the loss.
            if something:
                scale_gradients(self.params.values(), mean.weight(self.count, mean.expected))
            else:
                for p in self.params.values():
                    p.grad = None
        return something

    def makes_pass(self, something: bool) -> bool:
        """Tell whether this rank makes its backward pass: the batch counts something, or other ranks wait in theirs."""
        return something or (self.waits and self.learn.loss_grad.requires_grad)

    def weight(self, total: float) -> float:
        """Return `GradientMean.weight` of this rank's batch. A host-device sync."""
        return float(self.mean.weight(float(self.count), total))

    def vector(self) -> Tensor:
        """Return this rank's vector of a step that is due: the count of its batches, the flags, and `not has_data`."""
        vector = torch.zeros(_SLOTS, dtype=torch.float64, device=self.learn.dls.device)  # counts need many digits
        # The numbers are written on the device, without a sync.
        for place, number in enumerate([self.mean.counted, *self.agreement.flags(), not self.has_data]):
            if counts_something(number):
                vector[place] = number
        return vector

    @collective
    def mean_vector(self) -> Tensor:
        """Return the mean of the ranks' vectors, rounded as by DDP."""
        vector = self.vector().to(self.precision)
        distributed.mean_into([vector], among="gradients")
        return vector

    @collective
    def average_rest(self, own: bool) -> None:
        """Average the gradients of a step that is due, except those that are already averaged."""
        vector, factor = self.mean_vector(), 1.0
        if own:
            self.mean.expected = vector[0].item()  # a host-device sync
            factor = self.weight(self.mean.expected)
        self.passes.average(factor, among="gradients")
        self.passes.averaged.clear()
        self.complete(vector)

    def complete(self, vector: Tensor) -> None:
        """Rescale the averaged gradients of the step to the exact mean, and leave if a flag says so.

        The zeros of a step in which no rank had data are cleared, as one process that leaves its batches has none.

        This is a host-device sync. Where the flags are read late, the host waits only for an earlier step, and the
        device has work meanwhile.

        Args:
            vector: the mean of the ranks' vectors.
        """
        mean, flags = self.mean, vector[1 : 1 + len(TOLD)]
        mean.begun = False
        if self._witness is None:
            self._witness = self._find_witness()
        mean.counted = vector[0] if self.reads_late else vector[0].item()
        rounding = 8 * torch.finfo(vector.dtype).eps
        scale_gradients(self.params.values(), mean.correction(rounding))
        if not (self.learn.batch_size or self.kept) and vector[1 + len(TOLD)].item() > 1 - 0.5 / mean.ranks:
            self.clear()  # all ranks have said so; this was a host-device sync
        if self.reads_late:
            last, self._last_flags = self._last_flags, HostCopy(flags)
            told = last.numbers() if last else []
        else:
            told = flags.tolist()
        if any(told):
            self.agreement.watch.check()  # the flags of an aborted reduction mean nothing
            self.agreement.obey(told)
        if self.passes.watches:
            self.passes.open_now()

    def no_part(self, names: Iterable[str]) -> RuntimeError:
        """Return the error for parameters that a later batch of this rank leaves out."""
        now = dict(self.learn.model.named_parameters())
        new = [name for name, p in self.named.items() if now.get(name, p) is not p]
        if new and self.learn.shards is None:  # a sharded unit registers others while it is gathered
            return RuntimeError(
                f"the model has got new parameters in the middle of an epoch, {first_few(new)}, and the ranks average "
                "those that it has at the start of one: replace them in after_epoch (errors.html#unused-parameters)"
            )
        return RuntimeError(
            f"parameters that took no part in the loss of batch {self.learn.iter} on rank {distributed.rank()}, "
            f"although they did in the first batch: {first_few(list(names) or ['unknown'])}. Freeze them, use them in "
            "every batch, or pass find_unused_parameters=True to DistributedCallback, for losses that may leave any out"
            " (errors.html#unused-parameters)"
        )

    # Points for which other ranks may wait

    def is_open(self) -> bool:
        """Tell whether this rank has skipped a part of the batch for which other ranks may wait."""
        dispatch = self.dispatch
        if self.learn.step_due:
            is_left = self.stepped is None
        else:
            is_left = "after_backward" in dispatch.stopped or not dispatch.has_passed("after_backward")
        return is_left or not self.reduced or "after_step" in dispatch.stopped

    def note_optimizer_step(self, *_: Any) -> None:
        """Record that this rank's optimizer has stepped."""
        self.stepped = True

    @collective
    def count_ranks(self, with_data: bool) -> int:
        """Return the number of ranks that have data for another batch.

        A rank's reasons to leave are not exchanged here, but with the gradients or after the last batch.
        """
        self.number += 1  # no rank waits in `all_skip` for this rank, which waits for all here
        with distributed.before_collective(None):
            return distributed.reduce(int(with_data), among="votes")

    def come_to_collective(self, event: str) -> None:
        """Record that this rank has come to another collective before the step, or to one of the step itself."""
        in_step = event == "before_step" and not self.dispatch.calls
        self.point = STEP if in_step else max(self.point, BACKWARD) + 1

    def all_skip(self, point: int) -> bool:
        """Tell whether every rank skips a point of the batch; ranks that reach the point never call this."""
        return self.agreement.watch.all_skip(NEXT_BATCH * self.number + point)

    def _passed(self) -> int:
        """Return the number of the last point that this rank has reached; the watch calls this in its own thread."""
        begin = NEXT_BATCH * self.number  # read first: the attributes below may soon be those of the next batch
        if self.dispatch.has_passed("after_batch") and (self.stepped is not None or not self.learn.step_due):
            return begin + AFTER_BATCH
        return begin + (STEP if self.stepped else self.point)


# DDP

COMM_HOOKS = ("bf16", "fp16", "powersgd")


class Overlapped:
    """Lets DDP average the gradients of a step during its last backward pass; the small vector travels with them.

    DDP learns of each such pass by a call with its loss, right before the pass. It holds the parameters and does not
    run the model, so that callbacks see the model itself.

    Args:
        step: the step that the ranks take together.
        comm_hook: one of `COMM_HOOKS`, or `None`.
        options: arguments of `DistributedDataParallel`.
        give_up: called, on all ranks alike, when parameters are frozen or unfrozen; it replaces this object by a
            `Deferred`.

    Attributes:
        ddp: the DDP module, which all ranks make together.
    """

    def __init__(
        self, step: RankStep, comm_hook: str | None, options: dict[str, Any], give_up: Callable[[], StepGradient]
    ) -> None:
        self.step, self.mean = step, step.mean
        self._give_up = give_up
        self._carrier: nn.Parameter | None = None  # its gradient is the vector, which then needs no collective
        device, params = step.learn.dls.device, list(step.params.values())[::-1]  # the usual order of their gradients
        held = nn.Identity()  # returns the loss that it is called with
        if comm_hook is None:  # a hook would round the vector
            self._carrier = nn.Parameter(torch.zeros(_SLOTS, dtype=step.precision, device=device))
            params.insert(0, self._carrier)
        held.params = nn.ParameterList(params)
        group = distributed.group("gradients", device.type)
        # With views of buckets, DDP would divide gradients that are there in another way than those of later batches.
        with gradients_aside(params):
            self.ddp = DistributedDataParallel(held, **{"process_group": group, "init_sync": False} | options)
            # The order in which gloo adds the numbers of three ranks or more depends on their places in the buckets.
            build_buckets(self.ddp)
        if comm_hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=10)
            self.ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif comm_hook is not None:
            self.ddp.register_comm_hook(group, getattr(default_hooks, f"{comm_hook}_compress_hook"))

    @collective
    def backward(self) -> None:
        """Compute the gradients of the weighted loss; those of a batch that counts nothing are zeros."""
        step, learn = self.step, self.step.learn
        if step.is_changed():
            self._give_up().backward()
            return
        something = step.weigh()
        passes = step.makes_pass(something)
        if learn.step_due:
            self._last_pass([learn.loss_grad] * passes, counts=something)
            return
        if passes:
            learn._backward()
        step.reduced = True

    @collective
    def finish(self) -> None:
        """Average the gradients of the first batch, whose backward pass is over, and complete the step."""
        if self.ddp.static_graph:  # DDP records its first pass, which must be that of a loss
            self.step.average_rest(own=False)
        else:
            self._last_pass([], counts=False)

    @collective
    def _last_pass(self, losses: list[Tensor], counts: bool) -> None:
        """Run the last backward pass of a step, in which DDP averages the gradients, and complete the step.

        Args:
            losses: the weighted loss, if there is a pass of it.
            counts: that pass reaches all parameters. Otherwise zeros are added to their gradients, as DDP waits for
                all of them.
        """
        step, carrier = self.step, self._carrier
        silent = [] if counts else list(step.params.values())
        roots = self.ddp(losses + silent)
        gradients = [None] * len(losses) + [root.new_zeros(()).expand_as(root) for root in silent]
        if carrier is not None:
            # The carrier is a root of the backward pass with a given gradient, so it needs no further operations.
            roots.append(carrier)
            gradients.append(step.vector().to(carrier.dtype))
        torch.autograd.backward(roots, gradients)
        step.reduced = True
        try:
            check_reduced(self.ddp)
        except RuntimeError:
            raise step.no_part(name for name, p in step.params.items() if p.grad is None) from None
        if carrier is None:
            vector = step.mean_vector()
        else:
            # The gradient may be a view of DDP's bucket.
            vector, carrier.grad = cast(Tensor, carrier.grad).clone(), None
        step.complete(vector)

    def detach(self) -> None:
        """Remove DDP from the parameters."""
        # DDP's hooks go with its reducer; a DDP that lives on, in a traceback for example, would go on reducing.
        for name in ("reducer", "logger"):
            vars(self.ddp).pop(name, None)
