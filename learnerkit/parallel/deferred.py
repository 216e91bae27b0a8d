"""A step whose gradients are averaged after its backward passes: its first batch, and what DDP cannot average."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from learnerkit import world
from learnerkit.gradient_mean import StepState, counts_something
from learnerkit.parallel.passes import average_gradients, not_averaged
from learnerkit.torch_internals import remove_hooks

if TYPE_CHECKING:
    from learnerkit.parallel.rank_step import RankStep


class First(NamedTuple):
    """What the first batch of a rank has shown.

    Attributes:
        unused: names of the parameters to which the backward pass gave no gradient.
        reasons: why DDP cannot average the gradients during the pass.
    """

    unused: list[str]
    reasons: list[str]


class Deferred:
    """Averages the gradients after the backward passes, whichever there are.

    Args:
        step: of the ranks.
        own: the learner's `_backward` is its own. It may make any number of passes, of losses that nobody else sees, so
            its gradients are weighed rather than its loss, and averaged at the end of each pass.
        settle: called once, by every rank, with what its first batch has shown; `None`: without data.
    """

    def __init__(self, step: "RankStep", own: bool, settle: Callable[[First | None], bool] | None = None) -> None:
        self.step, self.own, self._settle = step, own, settle

    def attach(self) -> None:
        """Put nothing on the parameters."""

    def begin(self) -> None:
        """Begin a batch."""
        self.step.begin()

    def backward(self) -> None:
        """Compute the batch's gradients with their weight; a batch that counts nothing has none."""
        step, learn = self.step, self.step.learn
        if step.is_changed():
            step.take_parameters(step.named, step.passes.watches)
        something = counts_something(step.take_count() if self.own else step.weigh())
        if self.own:
            step.passes.open_now()
        with _pieces(step.params if self._settle else {}) as pieces:
            if self.own or something:
                learn._backward()
        if self._settle is not None and self._settle(self._first(pieces) if something else None):
            self._settle = None
        self.finish()

    def _first(self, pieces: Counter[str]) -> First:
        params, reasons = self.step.params, list[str]()
        if any(p.grad is not None and p.grad.layout is not torch.strided for p in params.values()):
            reasons.append("gradients are sparse")
        if any(number > 1 for number in pieces.values()):
            reasons.append("gradients come in pieces, as those of a checkpoint with use_reentrant=True")
        return First([name for name in params if name not in pieces], reasons)

    def finish(self) -> None:
        """Average the gradients of a step that is due, but for those that are averaged already."""
        step = self.step
        step.progress.reduced = True
        if not step.learn._step_due:
            return
        params = list(step.params.values())
        vector = world.reduce(step.vector(), "mean", among="gradients")
        factor = step.factor(vector[0].item()) if self.own else 1.0  # a host-device sync
        average_gradients(params, not_averaged(params, step.passes.averaged), factor, among="gradients")
        step.complete(vector, corrects=not self.own)

    def detach(self) -> None:
        """Leave the parameters as they are."""

    def state(self) -> StepState:
        """Return how far the step has come."""
        mean, count = self.step.mean, self.step.count
        if self.own:
            return StepState(mean.begun, 1.0 if mean.sums else count)
        return StepState(mean.begun, 1 / world.world_size() if mean.sums else mean.expected)


@contextmanager
def _pieces(params: dict[str, nn.Parameter]) -> Iterator[Counter[str]]:
    """Count, by name, in how many pieces the gradient of each parameter comes; one without a gradient has none."""
    found: Counter[str] = Counter()

    def listen(name: str, p: nn.Parameter) -> Any:
        return p.register_post_accumulate_grad_hook(lambda _: found.update([name]))

    hooks = [listen(name, p) for name, p in params.items()]
    try:
        yield found
    finally:
        remove_hooks(hooks, params.values())
