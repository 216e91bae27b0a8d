"""The averaging of gradients after a backward pass, where ranks may have gradients of different parameters."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import proxy

import torch
from torch import Tensor

from learnerkit import distributed
from learnerkit.gradient_mean import scale_gradients
from learnerkit.marks import collective, not_collective
from learnerkit.shards import is_shard
from learnerkit.torch_internals import call_after_backward, remove_hooks

if TYPE_CHECKING:
    from learnerkit.parallel.rank_step import RankStep

_NONE, _DENSE, _SPARSE = 0, 1, 2  # kinds of gradients; of the ranks' kinds the greatest is used


class Passes:
    """Averages, at its end, each backward pass that DDP does not average: of a `_backward`, a `_step` or a callback.

    Gradients that are averaged already stay unchanged when they are averaged again, since they are the same on all
    ranks, whose weights have a mean of 1. The gradients of shards are left to FSDP.

    Args:
        step: the step of the ranks, whose parameters these are.
        watches: the learner or a callback may make such passes.

    Attributes:
        averaged: the averaged gradients, by their parameters.
        is_open: passes are averaged now.
    """

    def __init__(self, step: "RankStep", watches: bool) -> None:
        self.step = proxy(step)  # the step holds this object: a proxy avoids a reference cycle
        self.watches, self.params = watches, [p for p in step.params.values() if not is_shard(p)]
        self.averaged: dict[Tensor, Tensor] = {}
        self.is_open = self._running = False
        heard = self.params if watches else []
        self._hooks = [p.register_post_accumulate_grad_hook(self._note) for p in heard]
        if step.mean.sums:
            self._hooks += [p.register_hook(self._weigh) for p in heard]

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        remove_hooks(self._hooks, self.params)
        self.close()

    def open_now(self) -> None:
        """Average the backward passes from here on; the present gradients count as averaged."""
        self.is_open = True
        if self.step.reduced:
            self.averaged = {p: p.grad for p in self.params if p.grad is not None}

    def close(self) -> None:
        """Stop averaging backward passes."""
        self.is_open = self._running = False
        self.averaged.clear()

    def _weigh(self, grad: Tensor) -> Tensor | None:
        # The gradient is weighed at once, not when it is averaged: the earlier part of a step's sum must keep its
        # scale.
        return grad * self.step.weight(1.0) if self.is_open else None

    @not_collective("it has `_average` called after the backward pass, of which each rank has one")
    def _note(self, p: Tensor) -> None:
        if self.is_open:
            self.averaged.pop(p, None)
            if not self._running:
                self._running = True
                call_after_backward(self._average)

    @collective
    def weight(self) -> float:
        """Return the weight of this rank's batch among those of all."""
        step = self.step
        # Host-device syncs
        return step.weight(1.0 if step.mean.sums else distributed.reduce(float(step.count), "mean"))

    @collective
    def _average(self) -> None:
        self._running = False
        self.average(1.0 if self.step.mean.sums else self.weight())

    @collective
    def before_optimizer(self, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Average the gradients in `p.grad`, and let a closure return the loss of all ranks.

        This is a hook of the `step` of the optimizers of a learner that overrides `_backward` or `_step`.
        """
        # This comes first: a rank that has left asks if any rank has come here, and then comes, too.
        self.step.note_optimizer_step()
        if not self.is_open:
            return None
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._together(args[1]), *args[2:]), kwargs
        if closure := kwargs.get("closure"):
            return args, kwargs | {"closure": self._together(closure)}
        self._average()
        return None

    @collective
    def _together(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that returns the loss of all ranks, so that they all continue alike."""

        def together() -> Any:
            loss = closure()
            if loss is None:
                return None
            loss, weight = torch.as_tensor(loss), self.weight()
            # This is a host-device sync; the optimizer reads the loss, too. A loss of weight 0 may be NaN.
            return loss.new_tensor(distributed.reduce(loss.item() * weight if weight else 0.0, "mean"))

        return together

    @torch.no_grad()
    @collective
    def average(self, factor: float, among: str = "") -> None:
        """Replace the gradients that are not averaged by their mean over the ranks.

        Ranks may have gradients of different parameters. A parameter without a gradient on any rank is left alone. A
        host-device sync.

        Args:
            factor: the factor of this rank's gradients; with 0 they count nothing, and are left out.
            among: as in `distributed.reduce`.
        """
        kinds = []
        for p in self.params:
            grad = None if self.averaged.get(p) is p.grad else p.grad
            if grad is not None and not factor:
                # It may be the gradient of an empty mean, NaN. The gradient of samples that count nothing is 0.
                grad = p.grad = torch.zeros_like(grad) if self.step.learn.batch_size else None
            if grad is None:
                kinds.append(_NONE)
            else:
                kinds.append(_DENSE if grad.layout is torch.strided else _SPARSE)
        kinds = distributed.reduce(torch.tensor(kinds), "max", among).tolist()
        given = {p: kind for p, kind in zip(self.params, kinds, strict=True) if kind}
        scale_gradients(given, factor)
        for p, kind in given.items():
            if kind == _SPARSE:
                grad = p.new_zeros(1).expand_as(p) if p.grad is None else p.grad
                grad = grad.to_sparse(1) if grad.layout is torch.strided else grad
                # NCCL has no sparse reduction, and gloo reduces on the host.
                p.grad = distributed.reduce(grad.coalesce().cpu(), "mean", among).to(p.device).coalesce()
            elif p.grad is None:
                p.grad = torch.zeros_like(p)
            self.averaged[p] = p.grad
        distributed.mean_into([self.averaged[p] for p, kind in given.items() if kind == _DENSE], among)
