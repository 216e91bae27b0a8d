"""A step whose gradients are averaged after its backward passes: its first batch, and what DDP cannot average."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from learnerkit import distributed
from learnerkit.torch_internals import remove_hooks

if TYPE_CHECKING:
    from learnerkit.parallel.rank_step import RankStep


class Deferred:
    """Averages the gradients after the backward passes, whichever there are.

    Args:
        step: of the ranks.
        own: the learner's `_backward` is its own. It may make any number of passes, of losses that nobody else sees, so
            its gradients are weighed rather than its loss, and averaged at the end of each pass.
        settle: called once, by every rank, with what its first batch has shown: the names of the parameters to which
            the backward pass gave no gradient, and why DDP cannot average the gradients during the pass. `None` stands
            for a rank without data.
    """

    def __init__(
        self, step: "RankStep", own: bool, settle: Callable[[tuple[list[str], list[str]] | None], bool] | None = None
    ) -> None:
        self.step, self.mean, self.own, self._settle = step, step.mean, own, settle

    def backward(self) -> None:
        """Compute the batch's gradients with their weight; a batch that counts nothing has none."""
        step, learn = self.step, self.step.learn
        loss = learn.loss_grad
        if step.is_changed():
            step.take_parameters(step.named, step.passes.watches)
        if self.own:
            something = step.take_count()
            step.passes.open_now()
        else:
            something = step.weigh()
        heard = list(step.params.values()) if self._settle else []
        pieces: list[Tensor] = []  # the parameters, each as often as a piece of its gradient has come
        hooks = [p.register_post_accumulate_grad_hook(pieces.append) for p in heard]
        try:
            if self.own or something:
                learn._backward()
        finally:
            remove_hooks(hooks, heard)
        if self._settle is not None and self._settle(self._first(pieces) if something else None):
            self._settle = None
        learn.loss_grad = loss  # without its weight, as on one process: a closure gives it to the optimizer
        step.reduced = True
        if learn.step_due:
            self._finish()

    def _first(self, pieces: list[Tensor]) -> tuple[list[str], list[str]]:
        params, found, reasons = self.step.params, set(pieces), list[str]()
        if any(p.grad is not None and p.grad.layout is not torch.strided for p in params.values()):
            reasons.append("gradients are sparse")
        if len(found) < len(pieces):
            reasons.append("gradients come in pieces, as those of a checkpoint with use_reentrant=True")
        return [name for name, p in params.items() if p not in found], reasons

    def _finish(self) -> None:
        """Average the gradients of a step that is due, but for those that are averaged already."""
        step, factor = self.step, 1.0
        vector = distributed.reduce(step.vector(), "mean", among="gradients")
        if self.own:
            self.mean.expected = vector[0].item()  # a host-device sync
            factor = step.weight(self.mean.expected)
        step.passes.average(factor, among="gradients")
        step.passes.averaged.clear()
        step.complete(vector)

    def detach(self) -> None:
        """Leave the parameters as they are."""
