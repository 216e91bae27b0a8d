"""DDP around a model or its parts: how it is put on, and taken off."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from learnerkit import world
from learnerkit.parallel.first_batch import name_beside
from learnerkit.parallel.rank_step import CARRIER, RankStep, Wrapper
from learnerkit.parallel.transparent import wrapped
from learnerkit.text import first_few
from learnerkit.torch_internals import BatchNorm, reduction_check, remove_ddp_hooks, without_compiler
from learnerkit.utils import spanned_devices

COMM_HOOKS = ("bf16", "fp16", "powersgd")


def wrap_module(
    module: nn.Module, step: RankStep, device: torch.device, comm_hook: str | None, options: dict[str, Any]
) -> Wrapper:
    """Wrap a module in DDP, which sends rank 0's parameters and buffers to the others; every rank must reach this.

    Args:
        module: the model, or a part of it.
        step: what weighs the gradients; the parameter of its carrier is a part of `module` for this moment only.
        device: of the module.
        comm_hook: one of `COMM_HOOKS`.
        options: of `DistributedDataParallel`.
    """
    find_unused, step.static = options["find_unused_parameters"], bool(options.get("static_graph"))
    step.compresses = comm_hook is not None
    sends = options.get("forward_sync_buffers")
    step.sends_buffers = bool(options.get("broadcast_buffers", True) if sends is None else sends)
    # In DDP's search for unused parameters the carrier would count as one of them.
    rides = not (step.by_bucket or find_unused or comm_hook)
    step.carrier.parameter = None
    # If DDP's search finds no unused parameter, torch warns on each rank. This one is never used, so it finds one.
    extra = _unused_like(module, device) if find_unused else step.carrier.make_parameter(module) if rides else None
    # A module that torch.compile has made keeps its parameters in the one inside.
    inner, added = without_compiler(module), [*step.beside, *([] if extra is None else [extra])]
    for i, p in enumerate(added):
        inner.register_parameter(f"{CARRIER}{i}", p)
    group = world.group("gradients", device.type)
    options = {"process_group": group} | options
    try:
        alone = device.type != "cpu" and not spanned_devices(module)  # else DDP takes each parameter where it is
        wrapper = wrapped(Wrapper, module, [device] if alone else None, **options)
        beside = {id(p): name_beside(p) for p in step.beside}
        names = [beside.get(id(p), name) for name, p in inner.named_parameters() if p.requires_grad]
    finally:
        for i in range(len(added)):
            delattr(inner, f"{CARRIER}{i}")
    check = reduction_check(wrapper)
    vars(wrapper).update(_rank_step=step, _check_all_reduced=check, _parameter_names=names)  # not the module's
    hook, state = _comm_hook(comm_hook, group)
    if step.by_bucket and not step.by_pass:
        step.buckets.attach(wrapper, hook or default_hooks.allreduce_hook, state)
    elif hook is not None:
        wrapper.register_comm_hook(state, hook)
    return wrapper


def unwrap_all(step: RankStep) -> None:
    """Take DDP off the parameters of everything that it was put around."""
    for wrapper in step.wrappers:
        remove_ddp_hooks(wrapper)
    step.wrappers.clear()


def check_parts(model: nn.Module, names: tuple[str, ...]) -> None:
    """Refuse names of sub-modules to wrap that are not there, or that leave trainable parameters out.

    Raises:
        ValueError: with the names that there are, or with what is left out.
    """
    for name in names:
        if not isinstance(getattr(model, name, None), nn.Module):
            there = [n for n, _ in model.named_children()]
            raise ValueError(f"wrap={names} names {name!r}; {type(model).__name__} has {there}")
    inside = {id(p) for name in names for p in getattr(model, name).parameters()}
    outside = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in inside]
    if outside:
        raise ValueError(
            f"wrap={names} leaves out {first_few(outside)}, which each rank would train by itself; name their modules "
            "too, or freeze them"
        )


def check_devices(placed: list[tuple[str, list[str]]]) -> None:
    """Refuse models that span several devices of which two ranks use the same.

    Args:
        placed: of each rank, its machine and the devices of its model, if that spans several.

    Raises:
        ValueError: with the ranks and the device.
    """
    users: dict[tuple[str, str], int] = {}
    for rank, (machine, devices) in enumerate(placed):
        for device in devices:
            other = users.setdefault((machine, device), rank)
            if other != rank and device not in ("cpu", "meta"):
                raise ValueError(
                    f"the models of ranks {other} and {rank} both span {device} of {machine}; under DDP each process "
                    "needs devices of its own: start fewer processes, and give each a device_map of its GPUs, or show "
                    "it those alone (CUDA_VISIBLE_DEVICES)"
                    " (errors.html#local-rank-device)"
                )


def _unused_like(module: nn.Module, device: torch.device) -> nn.Parameter:
    """A parameter of the module's type, so that it shares a bucket with others, in which no loss takes part."""
    kind = next((p.dtype for p in module.parameters() if p.requires_grad), None)
    return nn.Parameter(torch.zeros(1, dtype=kind, device=device))


def _comm_hook(name: str | None, group: Any) -> tuple[Callable | None, Any]:
    """One of torch's communication hooks and its state."""
    if name is None:
        return None, group
    if name == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        return powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=10)
    return getattr(default_hooks, f"{name}_compress_hook"), group


# BatchNorm


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Return the BatchNorms of a model."""
    return [m for m in model.modules() if isinstance(m, BatchNorm)]


def synchronise_batch_norms(model: nn.Module) -> Callable[[], None]:
    """Put `SyncBatchNorm` in the place of each BatchNorm, sharing its parameters; return what undoes it."""
    swapped = []
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if isinstance(norm, BatchNorm) and not isinstance(norm, nn.SyncBatchNorm):
                synced = nn.SyncBatchNorm.convert_sync_batchnorm(norm)
                setattr(parent, name, synced)
                swapped.append((parent, name, norm, synced))

    def undo() -> None:
        for parent, name, norm, synced in swapped:
            norm.load_state_dict(synced.state_dict())
            setattr(parent, name, norm)

    return undo


# Errors


def explain(error: RuntimeError) -> None:
    """Add to DDP's error about parameters what the user can do."""
    text = str(error)
    if "mark a variable ready only once" in text or "finished reduction in the prior iteration" in text:
        error.add_note(
            "a parameter got its gradient twice in a step, or not at all: by a backward pass of a callback, a "
            "checkpoint with use_reentrant=True, or a loss that leaves it out. Add a callback's own loss to "
            "learn.loss_grad, so that there is one backward pass; or pass find_unused_parameters=True to "
            "DistributedCallback, which then averages the gradients after the backward passes"
            " (errors.html#unused-parameters)"
        )
