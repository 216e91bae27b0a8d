"""Gradients that are averaged after a backward pass, whichever of them a rank has."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import proxy

import torch
from torch import Tensor, nn

from learnerkit import world
from learnerkit.gradient_mean import scale_gradients
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
        self.step = proxy(step)  # which holds this one: nothing of a run is left to garbage collection
        self.watches, self.params = watches, list(step.params.values())
        self.averaged: dict[Tensor, Tensor] = {}
        self._open = self._running = False
        heard = self.params if watches else []
        self._hooks: list[Any] = [p.register_post_accumulate_grad_hook(self._note) for p in heard]
        if step.mean.sums:
            self._hooks += [p.register_hook(self._weigh) for p in heard]

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        remove_hooks(self._hooks, self.params)
        self.close()

    def open_now(self) -> None:
        """Average the passes from here on; the gradients that are there are averaged."""
        self._open = True
        if self.step.reduced:
            self.averaged = {p: p.grad for p in self.params if p.grad is not None}

    def close(self) -> None:
        """Leave the passes alone from here on."""
        self._open = self._running = False
        self.averaged.clear()

    def _weigh(self, grad: Tensor) -> Tensor | None:
        # At once, and not when it is averaged: what there is of a step's sum already must keep its scale.
        return grad * self.step.weight(1.0) if self._open else None

    def _note(self, p: Tensor) -> None:
        if self._open:
            self.averaged.pop(p, None)
            if not self._running:
                self._running = True
                call_after_backward(self._average)

    def _average(self) -> None:
        step, self._running = self.step, False
        counted = world.reduce(float(step.count), "mean")  # host-device syncs
        self.average(1.0 if step.mean.sums else step.weight(counted))

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
        self._average()
        return None

    def _together(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that returns the loss of all ranks, so that they all go on alike."""

        def together() -> Any:
            with torch.enable_grad():
                loss = closure()
            if loss is None:
                return None
            # Host-device syncs; the optimizer looks at the loss, too.
            loss, count, sums = torch.as_tensor(loss).detach(), float(self.step.count), self.step.mean.sums
            weighed = loss.item() * (1.0 if sums else count) if count else 0.0  # not a NaN
            total, counted = world.reduce(torch.tensor([weighed, count], dtype=torch.float64)).tolist()
            return loss.new_tensor(total if sums else total / counted)

        return together

    @torch.no_grad()
    def average(self, factor: float, among: str = "") -> None:
        """Put the mean over the ranks into the gradients that are not averaged; every rank must reach this.

        Each rank may have others. A parameter to which no rank gives a gradient keeps what it has. A host-device sync.

        Args:
            factor: what this rank's gradients are multiplied by; 0: they count nothing, and are left out.
            among: as in `world.reduce`.
        """
        kinds = []
        for p in self.params:
            grad = None if self.averaged.get(p) is p.grad else p.grad
            if grad is not None and not factor:
                grad = p.grad = None  # it may be that of the mean of nothing, a NaN
            kinds.append(0 if grad is None else _DENSE if grad.layout is torch.strided else _SPARSE)
        marks = world.reduce(torch.tensor(kinds), among=among).tolist()
        given = {p: mark for p, mark in zip(self.params, marks, strict=True) if mark}
        scale_gradients(given, factor)
        for p, mark in given.items():
            if mark >= _SPARSE:
                p.grad = _mean_of_sparse(p, among)
            elif p.grad is None:
                p.grad = torch.zeros_like(p)
            self.averaged[p] = p.grad
        world.mean_into([self.averaged[p] for p, mark in given.items() if mark < _SPARSE], among)


def _mean_of_sparse(p: nn.Parameter, among: str) -> Tensor:
    grad = p.grad
    if grad is None:
        none = torch.zeros(1, 0, dtype=torch.long), p.new_zeros((0, *p.shape[1:]))
        grad = torch.sparse_coo_tensor(*none, p.shape, device=p.device, check_invariants=False)
    grad = grad if grad.layout is torch.sparse_coo else grad.to_sparse(1)
    return world.reduce(grad.coalesce(), "mean", among).coalesce()
