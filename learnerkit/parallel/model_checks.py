"""What a model must be to be trained by several ranks, and SyncBatchNorm in the place of its BatchNorms."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from learnerkit.text import first_few
from learnerkit.torch_internals import BatchNorm
from learnerkit.utils import digests


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


def buffer_marks(model: nn.Module, loss_func: Any) -> dict[str, str]:
    """Return fingerprints of buffers by name, without those of BatchNorm. A host-device sync."""
    named: dict[str, Tensor] = {}
    for prefix, module in (
        ("", model),
        ("the loss's ", loss_func if isinstance(loss_func, nn.Module) else nn.Module()),
    ):
        norms = {id(b) for m in module.modules() if isinstance(m, BatchNorm) for b in m.buffers()}
        named |= {prefix + name: b for name, b in module.named_buffers() if id(b) not in norms}
    return dict(zip(named, map(str, digests(named.values())), strict=True))


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
