"""The gradient of a step with FSDP2, which gives each rank its rows, for one backward pass or several."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from learnerkit import distributed
from learnerkit.gradient_mean import zero_loss
from learnerkit.losses import weighting_of
from learnerkit.marks import collective
from learnerkit.parallel.sharded import Shards
from learnerkit.shards import owners
from learnerkit.text import first_few
from learnerkit.torch_internals import begin_backward_at, is_backward_pass, leaves_of, make_outermost
from learnerkit.values import tensors_in

if TYPE_CHECKING:
    from learnerkit.parallel.rank_step import RankStep


class Sharded:
    """Averages gradients by FSDP2, which gives each rank its rows of the mean, during every backward pass.

    The loss is weighed before the pass, as for DDP; the small vector has its own collective, which runs meanwhile. In
    passes that the learner or a callback makes by itself, hooks weigh the gradients before they are averaged. `Passes`
    then averages the gradients of the parameters that every rank has whole.

    Args:
        step: the step that the ranks take together.
        shards: the shards of the model.
        own: the learner overrides `_backward`, and makes passes of losses that only it knows.
        settle: called once, by every rank, with the names of the parameters on which the loss of its first batch does
            not depend. `None` stands for a rank without data. It tells whether later losses may leave parameters out,
            or returns `None` if no rank had data.
        check: called after the first backward pass.
        votes: ranks vote in each forward pass which unit is gathered, so that an error says where they call different
            ones; by default they do so in the first pass only.
        sync: reduce the gradients in each batch of a step, instead of all at its last batch.

    Attributes:
        sync: as above.
        is_inside: a forward pass of the model has begun, and not ended.
        compares: compare, in the first batch, which units the ranks call.
        silent: the names of parameters whose gradients in own passes are weighed, and which have got no gradient so
            far.
    """

    @collective
    def __init__(
        self,
        step: "RankStep",
        shards: Shards,
        own: bool,
        settle: Callable[[list[str] | None], bool | None],
        check: Callable[[], None],
        votes: bool,
        sync: bool,
    ) -> None:
        self.step, self.mean = step, step.mean
        self.shards, self._own = shards, own
        self._settle, self._votes = settle, votes and not own
        self._check = check
        self._weight: float | None = None  # the weight of the gradients in the learner's own passes, once it is known
        self._without_grad = set[nn.Module]()  # units that were called without gradients
        self._settled, self.sync = False, sync
        self._looks = True  # look for parameters on which the loss of a batch does not depend
        mine = {p for _, p in shards.pairs}
        self._replicated = {name: p for name, p in step.params.items() if p not in mine}
        self._used = set[str]()  # parameters on which the losses of the batches that are reduced together depend
        self._before = set[str]()  # parameters that had gradients before these batches
        self._left_out = set[str]()  # parameters on which the loss of this batch does not depend on any rank
        # While a unit is gathered, its parameters are other objects, which stay the same. Parameters beside the model
        # are never replaced.
        of_model = dict(shards.model.named_parameters())
        self._gathered: dict[str, Tensor] = {name: p for name, p in step.params.items() if name not in of_model}
        first = {p: name for name, p in reversed(of_model.items())}
        self._owned = {}
        for unit in shards.divided:
            self._owned[unit] = [(first[p], owner, name) for _, owner, name, p in owners(unit) if p in first]
            for p in unit.parameters():
                first.pop(p, None)
        self._later = set[str]()  # parameters that a later pass was the first to gather, and that may serve it alone
        self._outputs: list[Tensor] = []  # the outputs of all units in this batch
        self._calls: list[str] = []  # the names of the units that were called in this batch
        self.is_inside = self._is_backward = False
        self.compares = True
        self._weighed = set(self._replicated)  # the parameters that need no further hook for their weight
        self.silent = step.params.keys() - self._weighed
        make_outermost(shards.model)
        # torch's compiler leaves these hooks out, as it does FSDP's own.
        begin, note, note_output, begin_part, note_part = map(
            torch.compiler.disable, (self._begin, self._note, self._note_output, self._begin_part, self._note_part)
        )
        self._hooks = [
            shards.model.register_forward_pre_hook(begin, prepend=True),
            *(unit.register_forward_hook(note, prepend=True) for unit, owned in self._owned.items() if owned),
            *(unit.register_forward_hook(note_output) for unit in self._owned),
        ]
        for part in shards.parts:
            if part is not shards.model:
                self._hooks += [
                    part.register_forward_pre_hook(begin_part, prepend=True),
                    part.register_forward_hook(note_part),
                ]

    def _begin_part(self, *_: Any) -> None:
        """Gather the parameters that are in no unit, for a module with some of them that is called directly."""
        if torch.is_grad_enabled() and not self.is_inside and not self.shards.voting:
            cast(Any, self.shards.model).unshard()

    def _note_part(self, module: nn.Module, args: Any, output: Any) -> None:
        # A second backward pass may reach the module by another way than the model's output.
        if (not self.is_inside or self.step.passes.watches) and torch.is_grad_enabled() and not is_backward_pass():
            self._note(self.shards.model)
            begin_backward_at(self.shards.model, self._watched(output))

    def _watched(self, output: Any) -> list[Tensor]:
        """Return the tensors of an output that require gradients, each with a hook that refuses an early pass."""
        tensors = [t for t in tensors_in(output) if t.requires_grad]
        for t in tensors:
            t.register_hook(self._check_pass)
        return tensors

    def _note(self, module: nn.Module, *_: Any) -> None:
        watches = self.step.passes.watches
        if (self._looks or watches) and torch.is_grad_enabled() and not is_backward_pass():
            for name, owner, attribute in self._owned[module]:
                p: Any = owner._parameters[attribute]
                if name not in self._gathered and self.step.passes.is_open:
                    self._later.add(name)
                self._gathered[name] = self.shards.gathered[self.shards.named[name]] = p
                for i, hooks in enumerate(self.shards.tensor_hooks.pop(name, ())):
                    for hook in hooks:
                        (p.register_post_accumulate_grad_hook if i else p.register_hook)(hook)
                if watches and p.requires_grad and name not in self._weighed:
                    self._weighed.add(name)
                    self._hooks.append(p.register_hook(partial(self._weigh, name)))

    def _weigh(self, name: str, grad: Tensor) -> Tensor | None:
        self.silent.discard(name)
        if not self.step.passes.is_open:
            return None
        if self._weight is None:
            self._weight = self.step.passes.weight()
        return grad * self._weight if self._weight else torch.zeros_like(grad)  # 0 times a NaN would be NaN

    def _note_output(self, module: nn.Module, args: Any, output: Any) -> None:
        # This hook runs after FSDP's own hooks, to whose part of the backward pass the output belongs.
        if module is self.shards.model:
            self.is_inside = False
        if not torch.is_grad_enabled():
            if self.is_inside:
                self._without_grad.add(module)
            return
        if is_backward_pass():
            if module in self._without_grad:
                raise ValueError(
                    f"{self.shards.names.get(module) or 'the model'} is computed again in the backward pass with "
                    "gradients that its forward pass did not have (a reentrant checkpoint), which a sharded model "
                    "cannot: write use_reentrant=False, or use ActivationCheckpointing (errors.html#sharded)"
                )
            return
        tensors = self._watched(output)
        is_later = self.step.passes.is_open  # the learner's own passes have begun
        if module is not self.shards.model and not is_later and (self._looks or not self.step.learn.batch_size):
            self._outputs += tensors
            self._calls.append(self.shards.names[module])

    def _check_pass(self, grad: Tensor) -> None:
        if not (self._is_backward or self.step.passes.is_open) and self.step.learn.training:
            raise RuntimeError(
                "a backward pass, or torch.autograd.grad, goes through a sharded model before the backward pass of "
                "learn.loss_grad, and its gradients have no weight as yet: add the loss to learn.loss_grad in "
                "after_loss, make the pass in after_backward or in a _backward of your own, or leave shard= out"
                " (errors.html#sharded)"
            )

    @collective
    def _begin(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not is_backward_pass():
            self.is_inside = True
            if self.compares and (self._votes or not self._settled) and not self.shards.voting:
                self.shards.begin_votes()  # if ranks call different units, votes turn a hang into an error

    @collective
    def _check_calls(self) -> None:
        """Refuse ranks that call different units: they may have gathered the rows of one unit for those of another."""
        everyone = distributed.all_gather(self._calls)
        for rank, calls in enumerate(everyone):
            if calls != everyone[0]:
                raise ValueError(
                    f"in a batch rank 0 calls the units {first_few(everyone[0])}, and rank {rank} calls "
                    f"{first_few(calls)}; all ranks gather a unit together, so each must call the same: say by "
                    "shard=[...] which modules are units, such as those that have these in them (errors.html#sharded)"
                )

    @collective
    def backward(self) -> None:
        """Compute the gradients of the weighted loss; those of a batch that counts nothing are zeros."""
        step, learn = self.step, self.step.learn
        if self.shards.voting:
            self.shards.help()
            self.shards.end_votes(frees=False)
            self._check_calls()
        if self._own:
            self._make_own_passes()
            return
        loss = learn.loss_grad
        if self.sync or not self.mean.begun:
            self._used.clear()
            self._left_out.clear()
            self._before = {name for name, p in step.params.items() if p.grad is not None} if self._looks else set()
        if not self.sync:
            if not self.mean.begun:
                for name in self._gathered.keys() - self._replicated.keys():  # they are of an unfinished step
                    self._gathered[name].grad = None
            cast(Any, self.shards.model).set_requires_gradient_sync(learn.step_due)
        something = step.weigh()
        vector, work = step.vector(), None
        if learn.step_due:
            # The reduction runs during the backward pass.
            work = dist.all_reduce(vector, group=distributed.group("gradients", vector.device.type), async_op=True)
        zeros = []
        # From a loss that gathers, the other ranks would get gradients, too; there it stays the weighed one.
        if not (something or self._looks or weighting_of(learn).gathers) and loss is not None and loss.requires_grad:
            # The batch is a stand-in sample, or one that this rank has left: its loss has the same graph as on the
            # other ranks.
            learn.loss_grad = loss
            trained = {p for p in (*self._gathered.values(), *self._replicated.values()) if p.requires_grad}
            zeros = [p.register_hook(torch.zeros_like) for p in trained]
        unused = self._unused(learn.loss_grad)
        if self._looks or not (something or zeros):
            # All units take part in the backward pass, in the order in which they were called.
            learn.loss_grad = learn.loss_grad + zero_loss(self._outputs)
        elif unused:
            raise step.no_part(unused)
        if not self._settled:
            looks = self._settle(unused if something else None)
            self._settled, self._looks = looks is not None, looks is not False
        if unused:
            learn.loss_grad = self.with_all(learn.loss_grad)
        self._is_backward = True
        try:
            learn._backward()
        finally:
            self._is_backward = False
            for hook in zeros:
                hook.remove()
        learn.loss_grad = loss
        self._note_reduced()
        if self._looks:
            self._used |= step.params.keys() - set(unused) if learn.batch_size else set()
            if self.sync or learn.step_due:
                self._share_use()
        self.forget_calls()
        if work is not None:
            self._average_replicated()
            work.wait()
            self._weight = None
            step.complete(vector / step.mean.ranks)

    @collective
    def _make_own_passes(self) -> None:
        """Let the learner make its backward passes, whose gradients are weighed."""
        step = self.step
        something = step.take_count()
        if not self._settled:
            self._settled = self._settle([] if something else None) is not None
        step.passes.open_now()
        self._weight = None
        step.learn._backward()
        self._note_reduced()
        self.forget_calls()
        step.average_rest(own=True)

    def _note_reduced(self) -> None:
        self.step.reduced = True
        self._check()
        self._check = lambda: None

    def forget_calls(self) -> None:
        """Forget the calls and outputs of this batch's forward passes."""
        for calls in (self._outputs, self._calls, self._without_grad):
            calls.clear()

    def _unused(self, loss: Tensor) -> list[str]:
        """Return the trainable parameters on which a loss does not depend, by a walk through its graph."""
        used = leaves_of([loss])
        trained = {name: p for name, p in self._gathered.items() if p.requires_grad and name not in self._later}
        return [name for name, p in trained.items() if p not in used]

    def with_all(self, loss: Tensor) -> Tensor:
        """Return a loss that depends on all parameters, with zero gradients if need be: ranks reduce the same ones."""
        left = self._unused(loss)
        return loss + zero_loss([self._gathered[name] for name in left]) if left else loss

    @collective
    def _share_use(self) -> None:
        """Remove gradients that no rank has in this step; every rank must reach this. A host-device sync."""
        params, taken = self.step.params, self._used | self._before
        flags = [name in taken for name in params]
        calls = crc32("\n".join(self._calls).encode()) & 0x7FFFFFFF
        mine = torch.tensor([*flags, calls, -calls], dtype=torch.int32)
        *used, most, least = distributed.reduce(mine, "max", among="gradients").tolist()
        if most != -least:
            self._check_calls()
        self._left_out = {name for name, is_used in zip(params, used, strict=True) if not is_used}
        for name in self._left_out:
            params[name].grad = None

    @collective
    def _average_replicated(self) -> None:
        """Average the gradients of the parameters that every rank has whole."""
        trained = [p for name, p in self._replicated.items() if name not in self._left_out]
        for p in trained:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        distributed.mean_into([cast(Tensor, p.grad) for p in trained], among="gradients")

    def detach(self) -> None:
        """Remove the hooks from the units."""
        for hook in self._hooks:
            hook.remove()
