"""A model whose parameters are divided among the ranks by FSDP2."""

import re
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Adam

from learnerkit import distributed, optim
from learnerkit.marks import collective
from learnerkit.shards import gathered, is_shard, local, owners, rows_of
from learnerkit.text import first_few, in_units
from learnerkit.torch_internals import (
    forget_forward_passes,
    gradient_hooks,
    is_gathered,
    make_outermost,
    reset_passes,
    undo_fully_shard,
)
from learnerkit.utils import add_note_once, itself
from learnerkit.values import map_batch, tensors_in

if TYPE_CHECKING:
    from torch.optim import Optimizer


class Shards:
    """Divides the parameters of a model among the ranks, and makes it whole again.

    A unit of the model is gathered when its forward or backward pass begins, and freed at its end. Parameters without a
    dimension, or without elements, stay whole on every rank. `learn.shards` holds this object while a model is divided.

    The original parameter objects come back when the model is whole again; meanwhile they stand for the shards, so that
    whoever holds them can freeze them, or read their gradients.

    Args:
        model: the model, with the same values on every rank.
        units: the parts that are gathered at once, by name. The parameters outside them form a unit that stays gathered
            from the beginning of the forward pass to the end of the backward pass.
        opts: the optimizers, which get the new parameters.
        device: the device of the ranks' group.
        reshard_after_forward: free a unit after its forward pass; otherwise it stays gathered for its backward pass.
        offload: keep the shards on the host.
        stays: the model stays divided from fit to fit, as it is too large to be whole.

    Attributes:
        named: the parameters by name, each with the rows of this rank.
        steps: the number of optimizer steps of this rank while the model is divided.
        failed: a rank has failed, and the process group of the shards is lost.
        gathered: the gathered parameter of each shard, which exists while its unit is gathered. It stays the same
            object, and is entered when its unit is first called in training.

    Raises:
        ValueError: parameters that cannot be divided.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Mapping[str, nn.Module],
        opts: Iterable["Optimizer"],
        device: torch.device,
        reshard_after_forward: bool,
        offload: bool,
        stays: bool,
    ) -> None:
        self.model, self.units = model, list(units.values())
        self.divided: list[Any] = [*self.units, model]  # the modules that FSDP2 divides
        self.device, self.stays = device, stays
        self.names = {unit: name for name, unit in units.items()}
        self._reshard = reshard_after_forward
        # A model on the host needs no offloading.
        self._policy = CPUOffloadPolicy() if offload and device.type != "cpu" else OffloadPolicy()
        _check(model, units)
        before = dict(model.named_parameters())
        self.places = list(owners(model))
        self._fully_shard(free=True)
        self.pairs = [(before[name], p) for name, p in self.named.items() if p is not before[name]]
        # These are hooks of the divided parameters, to be moved to the gathered ones.
        apart = {name: p for name, p in before.items() if p is not self.named[name]}
        self.tensor_hooks = {
            name: [list((hooks or {}).values()) for hooks in gradient_hooks(p)] for name, p in apart.items()
        }
        self._classes = [type(old) for old, _ in self.pairs]
        for old, p in self.pairs:
            if old.grad is not None:
                p.grad, old.grad = rows_of(old.grad, p), None
            vars(old)["shard"], old.__class__ = p, _Divided
        self.steps, self.failed = 0, False
        # For each optimizer that trains the shards: its hook, and the earlier kernel options of its groups.
        self._taken = dict["Optimizer", tuple[Any, list[tuple[dict, str, Any]]]]()
        self.take_optimizers(opts)
        self._n_voting = 0
        self._votes: list = []
        self._kept = set[int]()  # indices, in `divided`, of what stays gathered

    def _fully_shard(self, free: bool = False) -> None:
        """Let FSDP2 divide the parameters of the modules; with `free` the originals are emptied."""
        # This hook runs before FSDP's own hooks, which free the unit: the parameters are whole here.
        copy_views = torch.compiler.disable(_after_unit)
        self._hooks = [m.register_forward_hook(copy_views) for m in self.divided]
        group: Any = distributed.group("gradients", self.device.type) or dist.group.WORLD
        self._mesh = DeviceMesh.from_group(group, self.device.type)
        whole = {p for p in self.model.parameters() if not _is_divisible(p)}
        for module in self.divided:
            mine = [p for p in module.parameters() if p not in whole and not is_shard(p)]
            fully_shard(
                module, mesh=self._mesh, reshard_after_forward=self._reshard and module is not self.model,
                ignored_params=whole, offload_policy=self._policy,
            )  # fmt: skip
            for p in mine if free else ():
                p.data = p.data.new_empty(0)  # freed at once, so that no two units of a very large model are in memory
        self._note_parameters()

    def _note_parameters(self) -> None:
        self.named, self._divided = dict(self.model.named_parameters()), list(owners(self.model))
        self.gathered = dict[Tensor, Tensor]()
        inside = {part for unit in self.units for part in unit.modules()}
        # Modules that have parameters and are in no unit; each may be called directly.
        self.parts = list(dict.fromkeys(owner for _, owner, _, p in self._divided if owner not in inside))

    def take_optimizers(self, opts: Iterable["Optimizer"]) -> None:
        """Let optimizers train the shards; those that already do are skipped.

        If the model stays divided, earlier optimizers are released: each has as much state as the model has parameters.
        """
        opts = list(opts)
        for opt in [opt for opt in self._taken if self.stays and opt not in opts]:
            self._leave(opt)
        for opt in opts:
            if opt not in self._taken:
                optim.exchange(opt, dict(self.pairs))
                ways = [way for group in opt.param_groups for way in _choose_way(group, isinstance(opt, Adam))]
                self._taken[opt] = opt.register_step_post_hook(self._count), ways

    def _leave(self, opt: "Optimizer") -> None:
        hook, ways = self._taken.pop(opt)
        hook.remove()
        for group, way, value in ways:
            group[way] = value

    def text(self, units: Mapping[str, nn.Module]) -> str:
        """Describe the units, and the bytes of the parameters that a rank has."""
        sizes = [sum(p.nbytes for p in unit.parameters()) for unit in units.values()]
        total = sum(p.nbytes for p in self.named.values())
        mine = sum(local(p).nbytes for p in self.named.values())
        return (
            f"sharded into {len(units)} units ({first_few(units)}; {in_units(max(sizes))} the largest) and the rest "
            f"({in_units(total - sum(sizes))}): {in_units(mine)} of {in_units(total)} parameters on this rank"
        )

    def _count(self, *_: Any) -> None:
        self.steps += 1

    def check_parameters(self) -> None:
        """Refuse a model that has other parameters than when it was divided."""
        if new := [name for name, p in self.model.named_parameters() if p is not self.named.get(name)]:
            raise ValueError(
                f"the model has other parameters than when it was divided among the ranks ({first_few(new)}): replace "
                "parts of a sharded model between two fits (errors.html#sharded)"
            )

    def explain(self, error: BaseException) -> None:
        """Add a note to an error of torch's that the sharding has caused."""
        text = f"{type(error).__name__}: {error}"
        for signs, advice in _EXPLAINED.items():
            if re.search(signs, text, re.DOTALL):
                add_note_once(error, advice)

    def put_away(self) -> None:
        """Put the shards back into the model, in which a failed pass may have left gathered parameters."""
        self._n_voting = min(self._n_voting, 1)  # evaluations inside another one have ended with it
        self.end_votes()
        for _, owner, name, p in self._divided:
            setattr(owner, name, p)

    def reset(self) -> None:
        """Forget a pass of this rank that an error has ended, and free what it has gathered."""
        reset_passes(self.divided, [self.divided[i] for i in self._kept if self.voting])

    def _undo(self) -> None:
        """Take FSDP2 off the model, in which the shards stay."""
        self.put_away()
        for hook in self._hooks:
            hook.remove()
        undo_fully_shard(self.divided)

    @collective
    def restore(self, gather: bool = True) -> None:
        """Make the model whole, with its original parameters; with `gather` every rank must reach this.

        Args:
            gather: take the values of all ranks. Otherwise the parameters get memory without values.
        """
        self._undo()
        whole = gathered if gather else _without_values
        new = dict[Tensor, Tensor]()
        for (old, p), kind in zip(self.pairs, self._classes, strict=True):
            new[p] = old
            old.__class__ = kind
            del vars(old)["shard"]
            old.data = whole(p).to(self.device)
            old.requires_grad_(p.requires_grad)
            old.grad = None if p.grad is None else whole(p.grad).to(self.device)
        for _, owner, name, p in self.places:
            setattr(owner, name, p)
        for opt in list(self._taken):
            self._leave(opt)
            for state in opt.state.values():
                state.update({name: whole(value) for name, value in state.items() if is_shard(value)})
            optim.exchange(opt, new)

    @collective
    def renew(self) -> None:
        """Divide the model again in the same way, for a new process group.

        The last group is lost when a rank has failed. Values are not sent.
        """
        self._undo()
        self.steps, self.failed = 0, False
        old, empty = self.named, dict[Tensor, nn.Parameter]()
        for _, owner, name, p in self._divided:
            if is_shard(p):
                made = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad)
                setattr(owner, name, empty.setdefault(p, made))
        self._fully_shard()
        new = {p: old[name] for name, p in self.named.items()}
        rows = {p: nn.Parameter(self._of_rows(other), other.requires_grad) for p, other in new.items() if is_shard(p)}
        for _, owner, name, p in self._divided:
            setattr(owner, name, rows.get(p, p))
        self._note_parameters()
        exchanged: dict[Tensor, nn.Parameter] = {old[name]: p for name, p in self.named.items() if p is not old[name]}
        self.pairs = [(first, exchanged[p]) for first, p in self.pairs]
        for first, p in self.pairs:
            vars(first)["shard"] = p
        for opt in self._taken:
            for state in opt.state.values():
                state.update({name: self._of_rows(value) for name, value in state.items() if is_shard(value)})
            optim.exchange(opt, exchanged)

    def _of_rows(self, t: Tensor) -> Tensor:
        """Return a shard of the present group with the rows of a shard of another group."""
        return DTensor.from_local(
            local(t), self._mesh, [Shard(0)], run_check=False, shape=t.shape, stride=t.stride()
        ).detach()

    # Votes: ranks may run the model any number of times, on different parts of it

    @property
    def voting(self) -> bool:
        """The state of voting: True while ranks vote which unit is gathered next."""
        return self._n_voting > 0

    @collective
    def begin_votes(self) -> None:
        """Let each rank run the model as often as it likes, until `end_votes`.

        Before a rank gathers a unit it says so, and ranks that do not need it help. Parameters in no unit are gathered
        at the first pass of any rank, and freed at the end. An evaluation may be inside another.
        """
        self._n_voting += 1
        if self._n_voting > 1:
            return
        self._kept.clear()
        make_outermost(self.model)
        rest = len(self.units)
        wanted = [*enumerate(self.units), *((rest, part) for part in dict.fromkeys([self.model, *self.parts]))]
        self._votes = [
            part.register_forward_pre_hook(torch.compiler.disable(lambda *_, i=i: self.help(i)), prepend=True)
            for i, part in wanted
        ]

    @collective
    def help(self, wanted: int = -1) -> None:
        """Gather the units that other ranks want, until this rank's unit is next, or no rank wants any.

        Args:
            wanted: the index of the unit that this rank wants; -1: none.
        """
        rest = len(self.units)
        if not self.voting:
            return
        # One rank's `model.to` or `model.state_dict` may have freed a unit that was kept.
        if wanted in self._kept and is_gathered(self.divided[wanted]):
            return
        while True:
            # A vote is no collective of a loss that calls a part of the model.
            with distributed.before_collective(None), distributed.around_collectives(nullcontext):
                chosen = distributed.reduce(wanted, "max", among="votes")
            if chosen < 0:
                return
            if chosen == rest or rest not in self._kept:
                self._kept.add(rest)
                _gather_anew(self.model)
            if chosen < rest and not self._reshard:
                self._kept.add(chosen)
            if chosen == wanted:
                return
            if chosen < rest:
                unit = self.divided[chosen]
                _gather_anew(unit)
                if self._reshard:
                    unit.reshard()

    def free(self) -> None:
        """Free the gathered parameters, where no rank runs the model, so that callbacks see the shards.

        All ranks do so at the same places. The next pass gathers the parameters again.
        """
        for i in sorted(self._kept):
            self.divided[i].reshard()
        self._kept.clear()

    def end_votes(self, frees: bool = True) -> None:
        """End the votes: ranks run the model together again, or not at all.

        Args:
            frees: free what is gathered; otherwise a backward pass frees it.
        """
        if not self.voting:
            return
        self._n_voting -= 1
        if frees:
            self.free()
            forget_forward_passes(self.divided)
        if self.voting:
            return
        for hook in self._votes:
            hook.remove()
        self._kept &= {len(self.units)}  # a backward pass frees the units


_EXPLAINED = {
    "mixed torch.Tensor and DTensor|Sharding propagation failed": (
        "the model is sharded: its parameters are whole only while the model itself or a unit of it runs its "
        "forward. Name the modules that are called by themselves in shard=[...]; values of parameters, outside of "
        "forward, are those of p.full_tensor() on every rank (errors.html#sharded)"
    ),
    "Expected out tensor to have dtype": (
        "the model is sharded, and its parameters have another type than when it was divided: convert it before the "
        "fit, or use MixedPrecision (errors.html#sharded)"
    ),
    "not support deepcopy|^PicklingError.*FSDP": (
        "the model is sharded, and a copy of it would have the rows of this rank: let every rank call learn.save, or "
        "p.full_tensor() of its parameters, or copy the model after the fit (errors.html#sharded)"
    ),
    "not have been used in the graph": (
        "the model is sharded, and a loss depends on the gathered parameters instead of those of model.parameters(): "
        "their gradients are in p.grad after loss.backward() (errors.html#sharded)"
    ),
    "setStorage.*for storage of size 0": (
        "the model is sharded, and a backward pass needs parameters that an earlier one has freed, as that of a "
        "gradient's gradient does (create_graph=True): leave that out, or leave shard= out (errors.html#sharded)"
    ),
}
"""The advice on errors of torch's that the sharding has caused, by patterns of their texts."""


def _gather_anew(module: Any) -> None:
    module.reshard()
    module.unshard()


def _choose_way(group: dict[str, Any], can_fuse: bool) -> list[tuple[dict, str, Any]]:
    """Let a group of an optimizer step with kernels that DTensor has, and return the options that were replaced.

    Args:
        group: the group, with its new parameters.
        can_fuse: DTensor has the fused kernel of this optimizer, as it has that of Adam.
    """
    # Neither fused nor foreach kernels take both kinds.
    is_mixed, before = len(set(map(is_shard, group["params"]))) > 1, []
    for way, refused in (("fused", is_mixed or not can_fuse), ("foreach", is_mixed)):
        if refused and way in group and group[way] is not False:
            before.append((group, way, group[way]))
            group[way] = False
    return before


class _Divided(nn.Parameter):
    """A parameter of a divided model: operations on it use its `shard` instead."""

    shard: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = map_batch(lambda t: t.shard if isinstance(t, _Divided) else t, (args, kwargs or {}), itself)
        return func(*args, **kwargs)


def _is_divisible(p: Tensor) -> bool:
    """Tell whether a parameter has rows to divide."""
    return bool(p.ndim and p.numel())


def _without_values(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=local(t).device)


def _after_unit(module: nn.Module, args: Any, output: Any) -> Any:
    """Copy views among the outputs of a unit: an operation in place on a view would lose FSDP's hook."""
    return _without_views(output) if any(t.requires_grad and t._is_view() for t in tensors_in(output)) else None


def _without_views(output: Any) -> Any:
    if isinstance(output, MutableMapping):  # its class may be a special one, such as transformers' outputs
        for key, value in output.items():
            output[key] = _without_views(value)
        return output
    return map_batch(lambda t: t.clone() if t.requires_grad and t._is_view() else t, output)


def _check(model: nn.Module, units: Mapping[str, nn.Module]) -> None:
    for name, p in model.named_parameters():
        if _is_divisible(p) and not p.is_contiguous():
            raise ValueError(
                f"the parameter {name} has the strides {p.stride()}, and only contiguous ones can be sharded: leave "
                "ChannelsLast out, or write p.data = p.data.contiguous() (errors.html#sharded)"
            )
    inside = {p: unit for unit, module in units.items() for p in module.parameters()}
    kinds: dict[str, set[torch.dtype]] = {}
    for _, p in model.named_parameters():
        if _is_divisible(p) and p.requires_grad:
            kinds.setdefault(inside.get(p, "(the rest)"), set()).add(p.dtype)
    for unit, types in kinds.items():
        if len(types) > 1:
            raise ValueError(
                f"the unit {unit} has trained parameters of {len(types)} types ({', '.join(map(str, types))}), "
                "and one unit has one: name units of one type each by shard=[...], or give the model one type"
                " (errors.html#sharded)"
            )
