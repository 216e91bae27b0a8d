"""The averaging after the backward passes, for the first batch and for gradients that DDP cannot average."""

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from learnerkit.marks import collective
from learnerkit.torch_internals import hooks_left_out, remove_hooks

if TYPE_CHECKING:
    from learnerkit.parallel.rank_step import Overlapped, RankStep


class Deferred:
    """Averages the gradients after the backward passes, however many the learner runs.

    Args:
        step: the step that the ranks take together.
        own: the learner overrides `_backward`. It may run any number of passes, of losses that only it knows, so its
            gradients are weighed rather than its loss, and averaged at the end of each pass.
        settle: called once, by every rank, with the facts about its first batch: the names of the parameters to which
            the backward pass gave no gradient, and why DDP cannot average the gradients during the pass. `None` stands
            for a rank without data.
    """

    def __init__(
        self, step: "RankStep", own: bool, settle: Callable[[tuple[list[str], list[str]] | None], bool] | None = None
    ) -> None:
        self.step, self.mean = step, step.mean
        self.own, self._settle = own, settle

    @collective
    def backward(self) -> None:
        """Compute the gradients of the weighted loss.

        Those of samples that count nothing are zeros, as on one process. Without samples there are none, and there is a
        pass only where other ranks wait in theirs for this rank.
        """
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
        pieces: list[Tensor] = []  # a parameter occurs once for each piece of its gradient
        hooks = [p.register_post_accumulate_grad_hook(pieces.append) for p in heard]
        try:
            if self.own or step.makes_pass(something or (learn.batch_size > 0 and learn.loss_grad.requires_grad)):
                learn._backward()
        finally:
            remove_hooks(hooks, heard)
        if self._settle is not None and self._settle(self._first(pieces) if something else None):
            self._settle = None
        learn.loss_grad = loss  # an optimizer's closure returns the unweighted loss, as on one process
        step.reduced = True
        if learn.step_due:
            with hooks_left_out(heard):  # they have had these gradients
                cast("Deferred | Overlapped", learn._gradient).finish()

    @collective
    def finish(self) -> None:
        """Average the gradients of a step that is due, and complete the step."""
        self.step.average_rest(self.own)

    def _first(self, pieces: list[Tensor]) -> tuple[list[str], list[str]]:
        params, reached = self.step.params, set(pieces)
        reasons = list[str]()
        if any(p.grad is not None and p.grad.layout is not torch.strided for p in params.values()):
            reasons.append("gradients are sparse")
        if len(reached) < len(pieces):
            reasons.append("gradients come in pieces, as those of a checkpoint with use_reentrant=True")
        return [name for name, p in params.items() if p not in reached], reasons

    def detach(self) -> None:
        """Do nothing: the parameters have no hooks of this object."""
