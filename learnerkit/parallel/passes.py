"""Gradients that are averaged after a backward pass, where DDP cannot do it in the pass itself."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from learnerkit import world
from learnerkit.torch_internals import call_after_backward, forget_removed_hooks

if TYPE_CHECKING:
    from learnerkit.parallel.rank_step import RankStep

_DENSE, _SPARSE = 1, 1000  # what a rank that has a gradient adds: so many ranks can be told apart


@torch.no_grad()
def reduce_gradients(params: Sequence[nn.Parameter], factor: float | Tensor, vector: Tensor) -> Tensor:
    """Put the mean over the ranks into the gradients, whichever of them this rank has; every rank must reach this.

    A parameter to which no rank has a gradient is left without one, as on one process. A host-device sync.

    Args:
        params: the same on every rank.
        factor: what this rank's gradients are multiplied by; 0 leaves them out.
        vector: reduced on the way.

    Returns:
        The mean of `vector`.
    """
    nothing = not isinstance(factor, Tensor) and factor == 0
    found = [0 if nothing or p.grad is None else _DENSE if p.grad.layout is torch.strided else _SPARSE for p in params]
    kinds = torch.tensor(found, dtype=torch.float64, device=vector.device)
    total = world.reduce(torch.cat([vector.double(), kinds]), "mean")
    counts = [round(x * world.world_size()) for x in total[len(vector) :].tolist()]
    dense: dict[Any, list[tuple[nn.Parameter, Tensor]]] = {}
    for p, count, mine in zip(params, counts, found, strict=True):
        if not count:
            p.grad = None
            continue
        grad = _scaled(p.grad, factor) if mine else None
        if count >= _SPARSE:
            p.grad = _reduce_sparse(p, grad)
        else:
            dense.setdefault((p.dtype, p.device), []).append((p, torch.zeros_like(p) if grad is None else grad))
    for pairs in dense.values():
        mean = world.reduce(torch.cat([grad.reshape(-1) for _, grad in pairs]), "mean")
        for (p, _), piece in zip(pairs, mean.split([p.numel() for p, _ in pairs]), strict=True):
            if p.grad is None or p.grad.layout is not torch.strided:
                p.grad = piece.view_as(p).clone()
            else:
                p.grad.copy_(piece.view_as(p))
    return total[: len(vector)].to(vector.dtype)


def _scaled(grad: Tensor | None, factor: float | Tensor) -> Tensor | None:
    if grad is None or (not isinstance(factor, Tensor) and factor == 1):
        return grad
    if isinstance(factor, Tensor) and grad.layout is torch.strided:
        return torch.where(factor > 0, grad * factor, 0.0).to(grad.dtype)  # of nothing there may be a NaN
    return grad * factor


def _reduce_sparse(p: nn.Parameter, grad: Tensor | None) -> Tensor:
    if grad is None:
        size = (0, *p.shape[1:])
        grad = torch.sparse_coo_tensor(
            torch.zeros(1, 0, dtype=torch.long), p.new_zeros(size), p.shape, device=p.device,
            check_invariants=False,
        )  # fmt: skip
    grad = (grad if grad.layout is torch.sparse_coo else grad.to_sparse(1)).coalesce().clone()
    dist.all_reduce(grad, group=world.group("gradients", grad.device.type))
    return (grad / world.world_size()).coalesce()


class LaterPasses:
    """Averages, at its end, each backward pass that follows the one of the loss: those of a `_step` or a callback.

    Args:
        step: whose factor weighs them.
        params: the same on every rank.

    Attributes:
        open: passes are averaged: those after the loss's in a step, or all.
        seen: there has been one since it was opened.
    """

    def __init__(self, step: "RankStep", params: Sequence[nn.Parameter]) -> None:
        self.step, self.params = step, params
        self.open = self.seen = False
        self._queued = False
        self._before: dict[nn.Parameter, Tensor] | None = None  # what the pass of a sum adds to
        self._hooks = [p.register_post_accumulate_grad_hook(self._note) for p in params]
        if step.mean.sums:
            self._hooks += [p.register_hook(self._keep) for p in params]

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        for p in self.params:
            forget_removed_hooks(p)

    def begin(self) -> None:
        """Average the passes from here on."""
        self.open, self.seen, self._before = True, False, None

    def _keep(self, grad: Tensor) -> None:
        if self.open and self._before is None:  # the first gradient of a pass, of which none is in its place yet
            self._before = {p: p.grad.clone() for p in self.params if p.grad is not None}

    def _note(self, p: nn.Parameter) -> None:
        if self.open and not self._queued:
            self._queued = True
            call_after_backward(self._reduce)

    def _reduce(self) -> None:
        self._queued, self.seen = False, True
        before, self._before = self._before or {}, None
        for p, grad in before.items():
            if p.grad is not None:
                p.grad -= grad
        nothing = torch.zeros(1, dtype=torch.float64, device=self.step.device)
        reduce_gradients(self.params, self.step.later_factor(), nothing)
        for p, grad in before.items():
            p.grad = grad if p.grad is None else p.grad + grad


def averaged(closure: Callable[[], Any], step: "RankStep") -> Callable[[], Any]:
    """Return a closure for an optimizer that returns the loss of all ranks, so that they all go on alike."""

    def together() -> Any:
        with torch.enable_grad():
            loss = closure()
        if loss is None:
            return None
        factor, loss = step.later_factor(), torch.as_tensor(loss).detach()
        if isinstance(factor, Tensor):
            mine = torch.where(factor > 0, loss.double() * factor, 0.0)
        else:
            mine = loss.double() * factor if factor else torch.zeros_like(loss, dtype=torch.float64)
        return world.reduce(mine.to(step.device), "mean").to(loss)

    return together
