"""Checks of a model that several ranks are to train, and what its BatchNorms do there."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from learnerkit.data.batches import in_float32
from learnerkit.state import Learner
from learnerkit.text import first_few
from learnerkit.torch_internals import BatchNorm
from learnerkit.utils import spanned_devices, synced_norms
from learnerkit.values import TensorFunction, digests

_NOT_ELEMENTWISE = {"LBFGS", "Adafactor", "Muon", "Shampoo", "SparseAdam", "Rprop", "LARS", "Lamb", "LAMB"}
"""Optimizers whose step of an element depends on others, or uses operations that shards do not support."""

_WHOLE = {"ChannelsLast", "DataParallelCallback"}
"""Callbacks that need the whole model."""


def check_parts(model: nn.Module, names: tuple[str, ...], beside: list[nn.Parameter]) -> None:
    """Refuse names of sub-modules to wrap that do not exist, or that leave trainable parameters out.

    Args:
        beside: trained parameters that are not the model's.

    Raises:
        ValueError: the message lists the existing names, or what is left out.
    """
    for name in names:
        if not isinstance(getattr(model, name, None), nn.Module):
            there = list(dict(model.named_children()))
            raise ValueError(f"wrap={names} names {name!r}; {type(model).__name__} has {there}")
    inside = {p for name in names for p in getattr(model, name).parameters()}
    if outside := [name for name, p in model.named_parameters() if p.requires_grad and p not in inside]:
        raise ValueError(
            f"wrap={names} leaves out {first_few(outside)}, which each rank would train by itself; name their modules "
            "too, or freeze them"
        )
    if beside:
        raise ValueError(
            f"the loss or the optimizer has {len(beside)} trainable parameters that are not the model's, and "
            f"wrap={names} leaves them out: put them into the model, in one of these parts"
        )


def check_shardable(learn: "Learner", offload: bool) -> None:
    """Refuse a learner whose optimizer, callbacks or model cannot work on shards.

    Args:
        learn: the learner.
        offload: the shards are kept on the host.

    Raises:
        ValueError: the message says what is refused, and what to do.
    """
    for opt in learn.opts:
        if kinds := _NOT_ELEMENTWISE & {kind.__name__ for kind in type(opt).__mro__}:
            raise ValueError(
                f"{type(opt).__name__} cannot step on shards of a parameter, as a step of {min(kinds)} needs whole "
                "parameters: take an elementwise optimizer, such as AdamW or SGD, or leave shard= out"
                " (errors.html#sharded)"
            )
    for cb in learn.cbs:
        scales = cb.run and cb.name == "mixed_precision" and getattr(cb, "mode", None) == "fp16"
        if offload and scales and learn.dls.device.type != "cpu":
            raise ValueError(
                "offload=True keeps the gradients on the host, and the scale of float16 is on the device: take "
                "learn.to_bf16(), which needs no scale, or leave offload out"
            )
        if cb.run and (kinds := _WHOLE & {kind.__name__ for kind in type(cb).__mro__}):
            raise ValueError(
                f"{min(kinds)} needs the whole model on each rank, and shard= divides it among the ranks: leave one of "
                "the two out"
            )
    if len(spanned_devices(learn.model)) > 1 or isinstance(learn.model, nn.DataParallel):
        raise ValueError(
            f"{type(learn.model).__name__} spans several devices of this process (a device_map, or nn.DataParallel), "
            "and shard= divides a model among ranks of one device each: load it without device_map, or leave shard= out"
            " (errors.html#sharded)"
        )
    if sparse := [name for name, m in learn.model.named_modules() if getattr(m, "sparse", False) is True]:
        raise ValueError(
            f"{first_few(sparse)} makes sparse gradients, which cannot be divided among ranks: write sparse=False, or "
            "leave shard= out"
        )
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    if changed := [name for name, m in learn.model.named_modules() if isinstance(m, embeddings) and m.max_norm]:
        raise ValueError(
            f"{first_few(changed)} has a max_norm, by which its forward pass changes the weights, and those of a "
            "sharded model are copies then, so that the change would be lost: leave max_norm out, or leave shard= out"
            " (errors.html#sharded)"
        )


def check_devices(placed: Sequence[tuple[str, list[str]]]) -> None:
    """Refuse models that span several devices if two ranks share one of these.

    Args:
        placed: for each rank, its machine and the devices of its model, if that spans several.

    Raises:
        ValueError: the message names the ranks and the device.
    """
    users: dict[tuple[str, str], int] = {}
    for rank, (machine, devices) in enumerate(placed):
        for device in {*devices} - {"cpu", "meta"}:
            other = users.setdefault((machine, device), rank)
            if other != rank:
                raise ValueError(
                    f"the models of ranks {other} and {rank} both span {device} of {machine}; under DDP each process "
                    "needs devices of its own: start fewer processes, and give each a device_map of its GPUs, or show "
                    "it those alone (CUDA_VISIBLE_DEVICES) (errors.html#processes)"
                )


def buffer_marks(model: nn.Module, loss_func: Any) -> dict[str, int]:
    """Return fingerprints of buffers by name, except those of BatchNorm. A host-device sync."""
    named = {
        whose + name: buffer
        for whose, root in (("", model), ("the loss's ", loss_func))
        if isinstance(root, nn.Module)
        for prefix, module in root.named_modules()
        if not isinstance(module, BatchNorm)
        for name, buffer in module.named_buffers(prefix, recurse=False)
    }
    return dict(zip(named, digests(named.values()), strict=True))


# BatchNorm


def rank_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return by name the BatchNorms of a model that see only the samples of their own rank."""
    modules = model.named_modules(remove_duplicate=False)
    return {name: m for name, m in modules if isinstance(m, BatchNorm) and not isinstance(m, nn.SyncBatchNorm)}


@contextmanager
def joined_norms(model: nn.Module, moves: bool) -> Iterator[None]:
    """Let a model run on a sample that counts nothing, and its norms take part in those of the other ranks.

    Args:
        model: the model.
        moves: let the norms update their running statistics; some rank has samples.
    """
    before = [(norm, vars(norm).get("forward")) for norm in synced_norms(model)]
    for norm, _ in before:
        norm.forward = partial(_join, norm, norm.forward, moves)
    try:
        yield
    finally:
        for norm, own in before:
            vars(norm).pop("forward")
            if own is not None:
                norm.forward = own


def _join(norm: Any, forward: TensorFunction, moves: bool, x: Tensor) -> Tensor:
    """Normalize by the running statistics, and join the collectives of the norm without a sample."""
    if not norm.training:  # the model validates meanwhile
        return forward(x)
    tracked, mean, var = norm.track_running_stats, norm.running_mean, norm.running_var
    momentum, seen = norm.momentum, norm.num_batches_tracked
    if not moves:
        norm.momentum = 0.0
        norm.num_batches_tracked = None if seen is None else seen.clone()
    try:
        # In half precision, too, the other ranks send float32.
        nothing = forward(in_float32(x[:0]))
    finally:
        norm.momentum, norm.num_batches_tracked = momentum, seen
    if tracked:
        x = F.batch_norm(x, mean.clone(), var.clone(), norm.weight, norm.bias, eps=norm.eps)
    return x + nothing.sum().to(x.dtype)


@contextmanager
def synchronised(model: nn.Module) -> Iterator[None]:
    """Replace each BatchNorm inside a model by `SyncBatchNorm` within a context; it shares the parameters."""
    norms = rank_norms(model)
    norms.pop("", None)  # a model that is itself a BatchNorm cannot be replaced
    for name, norm in norms.items():
        model.set_submodule(name, nn.SyncBatchNorm.convert_sync_batchnorm(norm))
    yield
    for name, norm in norms.items():
        norm.load_state_dict(model.get_submodule(name).state_dict())
        model.set_submodule(name, norm)
