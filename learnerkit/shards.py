"""Tensors that are divided among the ranks: each rank has some rows of them, as torch's `DTensor`.

Only sharded training has such tensors (`parallel/sharded.py`). DTensors are recognised by their methods, since
importing their class takes half a second.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from learnerkit.marks import collective


def is_shard(x: object) -> bool:
    """Tell whether this is a tensor of which each rank has some rows."""
    return isinstance(x, Tensor) and hasattr(x, "full_tensor")


def local(t: Tensor) -> Tensor:
    """Return this rank's rows, which share the memory of `t`; a whole tensor is returned unchanged."""
    if not is_shard(t):
        return t
    with torch.no_grad():
        return t.to_local()  # type: ignore[attr-defined]


def local_or_zero(t: Tensor) -> Tensor:
    """Return this rank's rows, or a single zero if it has none, as a largest value needs at least one number."""
    rows = local(t)
    return rows if rows.numel() else rows.new_zeros(1)


@torch.no_grad()
@collective
def gathered(t: Any, keep: bool = True) -> Any:
    """Return a tensor with the rows of all ranks; every rank must reach this. Other values are returned unchanged.

    The default group gathers them, because the group of the shards is lost if a rank has failed.

    Args:
        t: the tensor.
        keep: this rank needs the values; with False it gets a tensor without memory, on the meta device.
    """
    if not is_shard(t):
        return t
    mine, ranks = local(t), dist.get_world_size()
    rows = -(-t.shape[0] // ranks)  # `torch.chunk` divides in the same way
    padded = mine.new_zeros((rows, *t.shape[1:]))
    padded[: len(mine)] = mine
    # The rows are sent as bytes, since gloo does not support all types.
    parts = torch.empty((ranks, padded.nbytes), dtype=torch.uint8, device=mine.device)
    dist.all_gather(list(parts.unbind()), padded.view(-1).view(torch.uint8))
    if not keep:
        return torch.empty(t.shape, dtype=t.dtype, device="meta")
    full = parts.view(-1).view(t.dtype).view(ranks * rows, *t.shape[1:])[: t.shape[0]]
    return full.clone() if rows * ranks > t.shape[0] else full


class Gatherer:
    """Gathers shards one after the other; tied shards become one tensor.

    Args:
        keep: as in `gathered`.
    """

    def __init__(self, keep: bool = True) -> None:
        self.keep = keep
        self._found: dict[int, Tensor] = {}

    @collective
    def __call__(self, t: Tensor) -> Tensor:
        if not is_shard(t):
            return t
        key = storage_of(t)
        if not key:  # this is state without rows on this rank, and not a parameter, so it is not tied
            return gathered(t, self.keep)
        if key not in self._found:
            self._found[key] = gathered(t, self.keep)
        return self._found[key]


def storage_of(t: Tensor) -> int:
    """Return the address of a shard's memory, which a parameter has even on a rank without rows of it.

    For other shards without rows, such as the state of an optimizer, it is 0.
    """
    return local(t).untyped_storage().data_ptr()


def rows_of(t: Tensor, like: Tensor) -> Tensor:
    """Return this rank's rows of a whole tensor, as a shard divided like `like`. No communication."""
    from torch.distributed.tensor import distribute_tensor

    if is_shard(t) or not is_shard(like):
        return t
    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    with torch.no_grad():
        # Without a source, each rank takes its rows from its own tensor.
        return distribute_tensor(t.to(local(like).device), mesh, placements, src_data_rank=None)


@torch.no_grad()
def put(target: Tensor, value: Tensor) -> None:
    """Copy values into a tensor; either may be a shard. No communication.

    Raises:
        ValueError: the target is whole, and the value is a shard, which has only some rows.
    """
    if is_shard(value) and not is_shard(target):
        raise ValueError("rows of a tensor cannot be copied into a whole one")
    value = rows_of(value.view_as(target) if not is_shard(value) else value, target)
    local(target).copy_(local(value))


def rows_for(named: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """Return values by name, reduced to this rank's rows for the parameters of a sharded module. No communication."""
    params = dict(module.named_parameters(remove_duplicate=False))
    if not any(map(is_shard, params.values())):
        return named
    return {
        name: rows_of(value, params[name])
        if name in params and isinstance(value, Tensor) and value.shape == params[name].shape
        else value
        for name, value in named.items()
    }


def owners(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield each place of a parameter: its full name, the module that has it, its name there, and the parameter."""
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name, p in owner._parameters.items():
            if p is not None:
                yield f"{prefix}.{name}" if prefix else name, owner, name, p


def own_class(module: nn.Module) -> type:
    """Return the class of a module, even while it is sharded and torch has put a class in front of it."""
    is_divided = hasattr(module, "unshard") and hasattr(module, "reshard")
    return type(module).__mro__[2 if is_divided else 0]
