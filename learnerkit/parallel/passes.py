"""Gradients that are averaged after a backward pass, by one function, whichever of them a rank has."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from learnerkit import world
from learnerkit.torch_internals import call_after_backward, remove_hooks

if TYPE_CHECKING:
    from learnerkit.parallel.rank_step import RankStep

_DENSE, _SPARSE = 1, 1000  # what a rank that gives a gradient adds: so many ranks can be told apart


class Passes:
    """Averages, at its end, each backward pass that DDP does not: those of a `_backward`, a `_step` or a callback.

    What is averaged already stays what it is, since it is the same on all ranks, and their weights have a mean of 1.

    Args:
        step: of the ranks, whose parameters these are.
        watches: something may make such passes.

    Attributes:
        averaged: the gradients that are averaged, by their parameters.
    """

    def __init__(self, step: "RankStep", watches: bool) -> None:
        self.step, self.watches, self.params = step, watches, list(step.params.values())
        self.averaged: dict[nn.Parameter, Tensor] = {}
        self._open = False
        self._touched: set[nn.Parameter] = set()  # in the pass that is running
        self._before: dict[nn.Parameter, Tensor] = {}  # what there was before the pass of a loss that sums
        self._hooks = list[Any]()
        if watches:
            self._hooks = [p.register_post_accumulate_grad_hook(self._note) for p in self.params]
        if watches and step.mean.sums:
            self._hooks += [p.register_hook(self._keep) for p in self.params]

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        remove_hooks(self._hooks, self.params)
        self.close()

    def open_now(self) -> None:
        """Average the passes from here on; the gradients that are there are averaged."""
        self._open = True
        if self.step.progress.reduced:
            self.averaged = {p: p.grad for p in self.params if p.grad is not None}

    def close(self) -> None:
        """Leave the passes alone from here on."""
        self._open = False
        self.averaged.clear()

    def _keep(self, grad: Tensor) -> None:
        if self._open and not self._touched and not self._before:  # the first gradient of a pass is not in its place
            self._before = {p: p.grad for p in self.params if p.grad is not None}
            for p in self._before:
                p.grad = None

    def _note(self, p: Tensor) -> None:
        if self._open:
            if not self._touched:
                call_after_backward(self._end)
            self._touched.add(p)  # type: ignore[arg-type]

    def _end(self) -> None:
        touched, before = self._touched, self._before
        self._touched, self._before = set(), {}
        self._average([p in touched for p in self.params])
        for p, grad in before.items():
            self.averaged[p] = p.grad = grad if p.grad is None else p.grad + grad

    def _average(self, new: list[bool]) -> None:
        step = self.step
        counted = world.reduce(step.message.vector(step.count, []), "mean")[0].item()  # a host-device sync
        self.averaged |= average_gradients(self.params, new, step.factor(counted))

    def before_optimizer(self, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Average what has been put into `p.grad`, and let a closure return the loss of all ranks.

        It is a hook of the `step` of the optimizers of a learner that overrides `_backward` or `_step`.
        """
        if not self._open:
            return None
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._together(args[1]), *args[2:]), kwargs
        closure = kwargs.get("closure")
        if closure is not None:
            return args, {**kwargs, "closure": self._together(closure)}
        if not self.step.mean.sums:  # of a sum it could not be told what is averaged in it
            self._average(not_averaged(self.params, self.averaged))
        return None

    def _together(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that returns the loss of all ranks, so that they all go on alike."""

        def together() -> Any:
            with torch.enable_grad():
                loss = closure()
            if loss is None:
                return None
            step, loss = self.step, torch.as_tensor(loss).detach()
            count = torch.as_tensor(step.count, dtype=torch.float64, device=loss.device)
            # A host-device sync comes with the optimizer's own look at the loss.
            weighed = torch.where(count > 0, loss.double() * (1.0 if step.mean.sums else count), 0.0)  # not a NaN
            total, counted = world.reduce(torch.stack([weighed, count])).unbind()
            return (total if step.mean.sums else total / counted).to(loss)

        return together


def not_averaged(params: Sequence[nn.Parameter], averaged: dict[nn.Parameter, Tensor]) -> list[bool]:
    """Tell of each parameter whether it has a gradient that is not the one that was averaged."""
    return [p.grad is not None and averaged.get(p) is not p.grad for p in params]


@torch.no_grad()
def average_gradients(
    params: Sequence[nn.Parameter], new: Sequence[bool], factor: float | Tensor | None, among: str = ""
) -> dict[nn.Parameter, Tensor]:
    """Put the mean over the ranks into gradients, whichever of them each rank has; every rank must reach this.

    A parameter to which no rank gives a gradient keeps what it has. A host-device sync.

    Args:
        params: the same on every rank.
        new: of which of them this rank has a gradient that is not averaged yet.
        factor: what this rank's gradients are multiplied by; `None`: they count nothing, and are left out.
        among: as in `world.reduce`.

    Returns:
        The gradients that are averaged, by their parameters.
    """
    kinds = [0 if factor is None or not is_new else _mark(p.grad) for p, is_new in zip(params, new, strict=True)]
    marks = world.reduce(torch.tensor(kinds, device=params[0].device if params else None), among=among).tolist()
    dense = list[Tensor]()
    averaged = dict[nn.Parameter, Tensor]()
    for p, is_new, mark in zip(params, new, marks, strict=True):
        if not mark:
            p.grad = None if is_new else p.grad  # left out, and nobody else has any
            continue
        if p.grad is not None:
            _weigh(p.grad, factor or 0.0)
        if mark >= _SPARSE:
            p.grad = _mean_of_sparse(p, among)
        else:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dense.append(p.grad)
        averaged[p] = p.grad
    world.mean_into(dense, among)
    return averaged


def _mark(grad: Tensor | None) -> int:
    return 0 if grad is None else _DENSE if grad.layout is torch.strided else _SPARSE


def _weigh(grad: Tensor, factor: float | Tensor) -> None:
    """Multiply a gradient in place; times 0 it is 0, also where it is the mean of nothing, a NaN."""
    if not isinstance(factor, Tensor):
        grad.mul_(factor) if factor else grad.zero_()
    elif grad.layout is torch.strided:
        grad.copy_(torch.where(factor > 0, grad * factor, 0.0))
    else:
        grad.mul_(factor)


def _mean_of_sparse(p: nn.Parameter, among: str) -> Tensor:
    grad = p.grad
    if grad is None:
        none = torch.zeros(1, 0, dtype=torch.long), p.new_zeros((0, *p.shape[1:]))
        grad = torch.sparse_coo_tensor(*none, p.shape, device=p.device, check_invariants=False)
    grad = (grad if grad.layout is torch.sparse_coo else grad.to_sparse(1)).coalesce().clone()
    dist.all_reduce(grad, group=world.group(among, grad.device.type))
    return (grad / world.world_size()).coalesce()
