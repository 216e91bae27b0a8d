"""Gradients that are averaged after a backward pass, whichever of them a rank has."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import proxy

import torch
from torch import Tensor

from learnerkit import distributed
from learnerkit.gradient_mean import scale_gradients
from learnerkit.shards import is_shard
from learnerkit.torch_internals import call_after_backward, remove_hooks

if TYPE_CHECKING:
    from learnerkit.parallel.rank_step import RankStep

_NONE, _DENSE, _SPARSE = 0, 1, 2  # of the gradients that ranks give the greatest counts


class Passes:
    """Averages, at its end, each backward pass that DDP does not: those of a `_backward`, a `_step` or a callback.

    What is averaged already stays what it is, since it is the same on all ranks, and their weights have a mean of 1.
    The gradients of shards are left to FSDP.

    Args:
        step: of the ranks, whose parameters these are.
        watches: something may make such passes.

    Attributes:
        averaged: the gradients that are averaged, by their parameters.
        is_open: passes are averaged.
    """

    def __init__(self, step: "RankStep", watches: bool) -> None:
        self.step = proxy(step)  # which holds this one: nothing of a run is left to garbage collection
        self.watches, self.params = watches, [p for p in step.params.values() if not is_shard(p)]
        self.averaged: dict[Tensor, Tensor] = {}
        self.is_open = self._running = False
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
        self.is_open = True
        if self.step.reduced:
            self.averaged = {p: p.grad for p in self.params if p.grad is not None}

    def close(self) -> None:
        """Leave the passes alone from here on."""
        self.is_open = self._running = False
        self.averaged.clear()

    def _weigh(self, grad: Tensor) -> Tensor | None:
        # At once, and not when it is averaged: what there is of a step's sum already must keep its scale.
        return grad * self.step.weight(1.0) if self.is_open else None

    def _note(self, p: Tensor) -> None:
        if self.is_open:
            self.averaged.pop(p, None)
            if not self._running:
                self._running = True
                call_after_backward(self._average)

    def weight(self) -> float:
        """Return the weight of this rank's batch among those of all; every rank must reach this."""
        step = self.step
        return step.weight(
            1.0 if step.mean.sums else distributed.reduce(float(step.count), "mean")
        )  # host-device syncs

    def _average(self) -> None:
        self._running = False
        self.average(1.0 if self.step.mean.sums else self.weight())

    def before_optimizer(self, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Average what has been put into `p.grad`, and let a closure return the loss of all ranks.

        It is a hook of the `step` of the optimizers of a learner that overrides `_backward` or `_step`.
        """
        self.step.note_optimizer_step()  # first: a rank that has left asks if any has come here, and then comes, too
        if not self.is_open:
            return None
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._together(args[1]), *args[2:]), kwargs
        if closure := kwargs.get("closure"):
            return args, kwargs | {"closure": self._together(closure)}
        self._average()
        return None

    def _together(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that returns the loss of all ranks, so that they all go on alike."""

        def together() -> Any:
            loss = closure()
            if loss is None:
                return None
            loss, weight = torch.as_tensor(loss), self.weight()
            # A host-device sync; the optimizer looks at the loss, too. What weighs nothing may be a NaN.
            return loss.new_tensor(distributed.reduce(loss.item() * weight if weight else 0.0, "mean"))

        return together

    @torch.no_grad()
    def average(self, factor: float, among: str = "") -> None:
        """Put the mean over the ranks into the gradients that are not averaged; every rank must reach this.

        Each rank may have others. A parameter to which no rank gives a gradient keeps what it has. A host-device sync.

        Args:
            factor: what this rank's gradients are multiplied by; 0: they count nothing, and are left out.
            among: as in `distributed.reduce`.
        """
        kinds = []
        for p in self.params:
            grad = None if self.averaged.get(p) is p.grad else p.grad
            if grad is not None and not factor:
                grad = p.grad = None  # it may be that of the mean of nothing, a NaN
            kinds.append(_NONE if grad is None else _DENSE if grad.layout is torch.strided else _SPARSE)
        kinds = distributed.reduce(torch.tensor(kinds), "max", among).tolist()
        given = {p: kind for p, kind in zip(self.params, kinds, strict=True) if kind}
        scale_gradients(given, factor)
        for p, kind in given.items():
            if kind == _SPARSE:
                grad = p.new_zeros(1).expand_as(p) if p.grad is None else p.grad
                grad = grad.to_sparse(1) if grad.layout is torch.strided else grad
                p.grad = distributed.reduce(grad.coalesce(), "mean", among).coalesce()
            elif p.grad is None:
                p.grad = torch.zeros_like(p)
            self.averaged[p] = p.grad
        distributed.mean_into([self.averaged[p] for p, kind in given.items() if kind == _DENSE], among)
