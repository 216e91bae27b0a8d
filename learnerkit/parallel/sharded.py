"""Training with parameters that are divided among the ranks by FSDP2: the model, and the gradient of a step."""

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Adam

from learnerkit import optim, world
from learnerkit.data.batches import map_batch, tensors_in
from learnerkit.gradient_mean import zero_loss
from learnerkit.shards import gathered, local, owners, rows_of
from learnerkit.text import first_few, in_units
from learnerkit.torch_internals import forget_forward_passes, undo_fully_shard

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from learnerkit.parallel.rank_step import RankStep


class Shards:
    """Divides the parameters of a model among the ranks, and makes it whole again.

    A unit of the model is gathered when its forward or backward pass begins, and freed at its end. Parameters without
    a dimension, or without elements, stay whole on every rank. `learn.shards` is this while a model is divided.

    The parameter objects that there are before come back when the model is whole; meanwhile they stand for the shards,
    so that who holds them can freeze them, or read their gradients.

    Args:
        model: of every rank, with the same values.
        units: the parts that are gathered at once, by name. What is in none of them makes a unit of its own, which
            stays gathered from the beginning of the forward pass to the end of the backward pass.
        opts: the optimizers, which get the new parameters.
        device: of the ranks' group.
        reshard_after_forward: free a unit after its forward pass; else it stays gathered for its backward pass.

    Attributes:
        steps: optimizer steps of this rank while the model is divided.

    Raises:
        ValueError: parameters that cannot be divided.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Mapping[str, nn.Module],
        opts: Iterable["Optimizer"],
        device: torch.device,
        reshard_after_forward: bool = True,
    ) -> None:
        self.model, self.units, self.opts = model, list(units.values()), list(opts)
        _check(model, units)
        before = dict(model.named_parameters())
        self.places = list(owners(model))
        self.named: dict[str, Tensor] = {}
        # Before FSDP's own hooks, which free the unit: the parameters are whole here.
        self._hooks: list[Any] = [m.register_forward_hook(_after_unit) for m in (*self.units, model)]
        options: Any = {"mesh": _mesh(device.type), "ignored_params": {p for p in before.values() if not _is_divisible(p)}}
        for unit in self.units:
            fully_shard(unit, reshard_after_forward=reshard_after_forward, **options)
        fully_shard(model, reshard_after_forward=False, **options)
        self.named = dict(model.named_parameters())
        self.pairs = [(before[name], p) for name, p in self.named.items() if p is not before[name]]
        kept = {p: before[name].grad for name, p in self.named.items() if before[name].grad is not None}
        for p, grad in kept.items():
            p.grad = rows_of(cast(Tensor, grad), p)
        # DTensor has the fused kernels of Adam and AdamW alone.
        unfused = [g for o in self.opts if not isinstance(o, Adam) for g in o.param_groups if g.get("fused")]
        self._unfused = [(group, group["fused"]) for group in unfused]
        for group in unfused:
            group["fused"] = False
        for opt in self.opts:
            optim.exchange(opt, dict(self.pairs))
        # Hooks of the parameters, which are for the gathered ones.
        self.tensor_hooks = {name: hooks for name, p in before.items() if (hooks := _hooks_of(p))}
        self._classes = [type(old) for old, _ in self.pairs]
        for old, p in self.pairs:
            old.grad, old.data = None, old.data.new_empty(0)
            old.shard, old.__class__ = p, _Divided
        self.steps = 0
        self._listening = [opt.register_step_post_hook(self._count) for opt in self.opts]
        self.evaluating = self._rest = False
        self._votes: list[Any] = []

    def text(self, units: Mapping[str, nn.Module]) -> str:
        """Say what the units are, and how many bytes of the parameters a rank has."""
        sizes = [sum(p.numel() * p.itemsize for p in unit.parameters()) for unit in units.values()]
        total = sum(p.numel() * p.itemsize for p in self.named.values())
        mine = sum(local(p).nbytes for p in self.named.values())
        return (
            f"sharded into {len(units)} units ({first_few(units)}; {in_units(max(sizes))} the largest) and the rest "
            f"({in_units(total - sum(sizes))}): {in_units(mine)} of {in_units(total)} parameters on this rank"
        )

    def _count(self, *_: Any) -> None:
        self.steps += 1

    def restore(self, gather: bool = True) -> None:
        """Make the model whole, with its own parameters; with `gather` every rank must reach this.

        Args:
            gather: take the values of all ranks. Else the parameters have memory, but no values as yet.
        """
        self.end_evaluation()
        for hook in (*self._hooks, *self._listening):
            hook.remove()
        undo_fully_shard([*self.units, self.model])
        new = dict[Tensor, Tensor]()
        for (old, p), kind in zip(self.pairs, self._classes, strict=True):
            new[p] = old
            old.__class__ = kind
            del old.shard
            old.data = gathered(p) if gather else torch.empty(p.shape, dtype=p.dtype, device=local(p).device)
            old.requires_grad_(p.requires_grad)
            old.grad = gathered(p.grad) if gather and p.grad is not None else None
        for _, owner, name, p in self.places:
            owner._parameters[name] = p
        for group, fused in self._unfused:
            group["fused"] = fused
        for opt in self.opts:
            optim.exchange(opt, new)

    # Evaluation: ranks may run the model any number of times, on different parts of it

    def begin_evaluation(self) -> None:
        """Let each rank run the model as often as it likes, until `end_evaluation`; every rank must reach this.

        Before a rank gathers a unit it says so, and those that do not need it help. What is in no unit is gathered
        at the first pass of any rank, and freed at the end.
        """
        if self.evaluating:
            return
        self.evaluating, self._rest = True, False
        self._votes = [
            unit.register_forward_pre_hook(lambda *_, i=i: self.help(i), prepend=True)
            for i, unit in enumerate([*self.units, self.model])
        ]

    def help(self, wanted: int = -1) -> None:
        """Gather what other ranks want, until it is the turn of what this rank wants, or no rank wants anything.

        Args:
            wanted: the index of a unit, which is gathered next; -1: none.
        """
        if not self.evaluating:
            return
        if not self._rest:
            self._rest = True
            cast(Any, self.model).unshard()
        while wanted < len(self.units):
            with world.before_collective(None):
                chosen = world.reduce(wanted, "max", among="votes")
            if chosen == wanted:
                return
            unit = cast(Any, self.units[chosen])
            unit.unshard()
            unit.reshard()

    def end_evaluation(self) -> None:
        """Train again, or not at all: ranks run the model together."""
        if self.evaluating:
            self.evaluating = False
            for hook in self._votes:
                hook.remove()
            cast(Any, self.model).reshard()
            forget_forward_passes([*self.units, self.model])


class _Divided(nn.Parameter):
    """A parameter of a model that is divided: whatever is done with it is done with its `shard`."""

    shard: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = map_batch(lambda t: t.shard if isinstance(t, _Divided) else t, (args, kwargs or {}), _same)
        return func(*args, **kwargs)


def _same(x: Any) -> Any:
    return x


def _hooks_of(p: Tensor) -> tuple[list[Any], list[Any]] | None:
    """The hooks of a parameter on its gradient, and those after the gradient is there."""
    found = [[*(hooks or {}).values()] for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)]
    return (found[0], found[1]) if any(found) else None


def _is_divisible(p: Tensor) -> bool:
    """Tell whether a parameter has rows."""
    return bool(p.ndim and p.numel())


def _mesh(kind: str) -> DeviceMesh:
    """Return all ranks of this run, on their devices of a type."""
    group: Any = world.group("gradients", kind) or dist.group.WORLD
    return DeviceMesh.from_group(group, kind)


def _after_unit(module: nn.Module, args: Any, output: Any) -> Any:
    """Copy views among the outputs of a unit: an operation in place on one would lose FSDP's hook."""
    return _without_views(output) if any(t.requires_grad and t._is_view() for t in tensors_in(output)) else None


def _without_views(output: Any) -> Any:
    if isinstance(output, MutableMapping):  # of a class of its own, as a model of transformers returns
        for key, value in output.items():
            output[key] = _without_views(value)
        return output
    return map_batch(lambda t: t.clone() if t.requires_grad and t._is_view() else t, output)


def _check(model: nn.Module, units: Mapping[str, nn.Module]) -> None:
    for name, p in model.named_parameters():
        if _is_divisible(p) and not p.is_contiguous():
            raise ValueError(
                f"the parameter {name} has the strides {p.stride()}, and only contiguous ones can be sharded: leave "
                "ChannelsLast out, or write p.data = p.data.contiguous()"
                " (errors.html#sharded)"
            )
    inside: dict[int, str] = {}
    for unit, module in units.items():
        for p in module.parameters():
            inside[id(p)] = unit
    kinds: dict[str, set[torch.dtype]] = {}
    for _, p in model.named_parameters():
        if _is_divisible(p) and p.requires_grad:
            kinds.setdefault(inside.get(id(p), "(the rest)"), set()).add(p.dtype)
    for unit, found in kinds.items():
        if len(found) > 1:
            raise ValueError(
                f"the unit {unit} has trained parameters of {len(found)} types ({', '.join(map(str, found))}), "
                "and one unit has one: name units of one type each by shard=[...], or give the model one type"
                " (errors.html#sharded)"
            )


class Sharded:
    """Averages gradients by FSDP2, which gives each rank its rows of the mean, during every backward pass.

    The loss is weighed before, as for DDP; the small vector has a collective of its own, which runs meanwhile.

    Args:
        step: of the ranks.
        shards: the model.
        settle: called once, by every rank, with what its first batch has shown: the names of the parameters on which
            the loss does not depend. `None` stands for a rank without data. It tells whether there may be such ones, or
            returns `None` if no rank had data.
    """

    def __init__(self, step: "RankStep", shards: Shards, settle: Callable[[list[str] | None], bool | None]) -> None:
        self.step, self.mean, self.shards, self._settle = step, step.mean, shards, settle
        self._settled = False
        self._looks = True  # for parameters on which the loss of a batch does not depend
        self._used: dict[str, bool] = {}  # in this step, on any rank
        mine = {id(p) for _, p in shards.pairs}
        self._replicated = [p for p in step.params.values() if id(p) not in mine]
        # While a unit is gathered its parameters are other objects, which stay the same.
        self._gathered: dict[str, Tensor] = {}
        first = {id(p): name for name, p in reversed([*shards.model.named_parameters()])}
        self._owned: dict[nn.Module, list[tuple[str, nn.Module, str]]] = {}
        for unit in (*shards.units, shards.model):
            self._owned[unit] = [(first[id(p)], owner, name) for _, owner, name, p in owners(unit) if id(p) in first]
            for _, _, _, p in owners(unit):
                first.pop(id(p), None)
        self._outputs: list[Tensor] = []  # of all units, in this batch
        self._calls: list[str] = []  # of units, in this batch
        self._hooks: list[Any] = [
            *(unit.register_forward_hook(self._note, prepend=True) for unit, owned in self._owned.items() if owned),
            *(unit.register_forward_hook(self._note_output) for unit in self._owned),
            shards.model.register_forward_pre_hook(self._begin, prepend=True),
        ]
        self._begin_batch()

    def _note(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._looks and torch.is_grad_enabled():
            for name, owner, attribute in self._owned[module]:
                p = self._gathered[name] = cast(Tensor, owner._parameters[attribute])
                for i, hooks in enumerate(self.shards.tensor_hooks.pop(name, ())):
                    for hook in hooks:
                        (p.register_post_accumulate_grad_hook if i else p.register_hook)(hook)

    def _note_output(self, module: nn.Module, args: Any, output: Any) -> None:
        # After FSDP's own hooks, whose part of the backward pass the output belongs to.
        if self._looks and torch.is_grad_enabled():
            self._outputs += [t for t in tensors_in(output) if t.requires_grad]
            self._calls.append(self.shards.names[module])

    def _begin(self, *_: Any) -> None:
        self._calls.clear()  # a batch that a rank leaves in its forward pass has another one

    def _begin_batch(self) -> None:
        """Get ready for the next batch: its forward pass is one of votes if ranks may call different units."""
        self._outputs.clear()
        self._calls.clear()
        if not self._settled or self._votes:
            self.shards.begin_evaluation()

    def backward(self) -> None:
        """Compute the batch's gradients with their weight; of a batch that counts nothing, zeros."""
        step, learn = self.step, self.step.learn
        loss = learn.loss_grad
        something = step.weigh()
        vector, work = step.vector(), None
        if learn.step_due:
            # It runs during the backward pass.
            work = dist.all_reduce(vector, group=world.group("gradients", vector.device.type), async_op=True)
        unused: list[str] = []
        if self.shards.evaluating:
            self.shards.help()
            self.shards.end_evaluation(frees=False)
            self._check_calls()
        if self._looks:
            # All units take part in the backward pass, in the order in which they were called.
            learn.loss_grad = learn.loss_grad + zero_loss(self._outputs)
            unused = self._unused(loss)
        if not self._settled:
            looks = self._settle(unused if something else None)
            self._settled, self._looks = looks is not None, looks is not False
        before = {name: p.grad is not None for name, p in step.params.items()} if self._looks else {}
        if unused:
            # Ranks reduce the gradients of the same parameters: here these are zeros.
            learn.loss_grad = learn.loss_grad + zero_loss([self._gathered[name] for name in unused])
        learn._backward()
        learn.loss_grad = loss
        step.reduced = True
        if self._looks:
            self._share_use(set(unused) if something else step.params.keys(), before)
        if work is not None:
            self._average_replicated()
            work.wait()
            step.complete(vector / step.mean.ranks)

    def _unused(self) -> list[str]:
        """Return the trainable parameters of which the loss is no function, by a walk through its graph."""
        seen, found, open_ = set[Any](), set[int](), [self.step.learn.loss_grad.grad_fn]
        while open_:
            node = open_.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if (variable := getattr(node, "variable", None)) is not None:
                found.add(id(variable))
            open_ += [other for other, _ in node.next_functions]
        trained = {name: p for name, p in self._gathered.items() if p.requires_grad}
        return [name for name, p in trained.items() if id(p) not in found]

    def _share_use(self, unused: Iterable[str], before: Mapping[str, bool]) -> None:
        """Leave no gradient where no rank has one in this step; every rank must reach this. A host-device sync."""
        params, left_out = self.step.params, set(unused)
        mine = torch.tensor([name not in left_out for name in params], dtype=torch.int32)
        used = world.reduce(mine, "max", among="gradients").tolist()
        for (name, p), is_used in zip(params.items(), used, strict=True):
            if not is_used and not before.get(name):
                p.grad = None

    def _average_replicated(self) -> None:
        """Put the mean over the ranks into the gradients of what every rank has whole; every rank must reach this."""
        for p in self._replicated:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        world.mean_into([cast(Tensor, p.grad) for p in self._replicated], among="gradients")

    def detach(self) -> None:
        """Take the hooks off the units."""
        for hook in self._hooks:
            hook.remove()
