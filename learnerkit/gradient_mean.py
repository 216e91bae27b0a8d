"""How much each batch counts in the gradient of an optimizer step that several batches make together."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from learnerkit.data.batches import tensors_in

if TYPE_CHECKING:
    from learnerkit.learner import Learner


class GradientMean:
    """Makes the gradient of a step the mean over everything its batches count, whatever there turns out to be.

    The gradient is sum(count_i * g_i) / sum(count_i), g_i being that of the mean loss of batch i. The sum of the
    counts is known only after the last batch. So every backward pass takes its loss times count_i / expected, and the
    gradients are multiplied once by expected / counted at the end, before anyone clips or uses them. A loss that sums
    needs neither.

    Args:
        learn: the learner.
    """

    def __init__(self, learn: "Learner") -> None:
        self.learn, self.sums = learn, learn.loss_weighting.sums
        self.expected = 1.0  # what the step is expected to count
        self._counted: float | Tensor = 0.0  # what this step has counted so far
        self.begun = False  # whether gradients of batches wait for their step

    # The backward pass of the loop

    def backward(self) -> None:
        """Compute the batch's gradients with their weight, and correct those of the step after its last batch."""
        self.learn.loss_grad = self.weigh(self.learn.loss_grad)
        self._differentiate(self._count())
        self.settle()

    def weigh(self, loss: Tensor) -> Tensor:
        """The loss to differentiate."""
        count = self._note(self._count())
        return loss if self.sums else self._weighted(loss, count)

    def settle(self) -> None:
        """Correct the gradients once the step's last backward pass is over."""
        if self.learn.step_due and self.begun:
            self.begun = False
            self._correct(self._counted)

    def backward_cancelled(self) -> None:
        """The backward pass of this batch was left out; the step's others count."""
        self.settle()

    # Parts

    def _note(self, count: float | Tensor) -> float | Tensor:
        "Take a batch's count into its step."
        if not self.begun:
            self.begun, self._counted = True, 0.0
            self.expected = self._expect(count)
        self._counted = self._counted + count
        return count

    def _differentiate(self, count: float | Tensor) -> None:
        "Compute the gradients of `loss_grad`."
        self.learn._backward()

    def _count(self) -> float | Tensor:
        """What this batch counts; a number where reading it costs nothing."""
        count = self.learn.loss_count
        return count if not isinstance(count, Tensor) or count.device.type != "cpu" else count.item()

    def _weighted(self, loss: Tensor, count: float | Tensor) -> Tensor:
        "The loss times count / expected."
        if isinstance(count, Tensor):
            return torch.where(count > 0, loss * (count / self.expected), 0.0).to(loss.dtype)
        if not count:  # the loss may be the mean of nothing, a NaN, and so would its gradient times 0 be
            return nothing_of(self.learn)
        return loss if count == self.expected else loss * (count / self.expected)

    def _expect(self, count: float | Tensor) -> float:
        "What a step will count, roughly; counts on the device are not read."
        return (self.learn.batch_size if isinstance(count, Tensor) else count) * self.learn.step_batches or 1.0

    def _correct(self, counted: float | Tensor, tolerance: float = 0.0) -> None:
        if self.sums:
            return
        if isinstance(counted, Tensor):
            factor = torch.where(counted > 0, self.expected / counted, 0.0)
        elif abs(counted - self.expected) <= tolerance * self.expected:
            return
        else:
            factor = self.expected / counted if counted else 0.0
        scale_gradients(self.learn, factor)


def nothing_of(learn: "Learner") -> Tensor:
    """A loss that depends on all of the model's output and whose gradients are zero."""
    output = learn.pred if learn.output is None else learn.output
    # The sum of no elements: times 0, numbers too large for float16 would make a NaN.
    return sum(t.flatten()[:0].sum() for t in tensors_in(output) if t.requires_grad)


def scale_gradients(learn: "Learner", factor: float | Tensor) -> None:
    """Multiply all gradients."""
    grads = [p.grad for p in learn.model.parameters() if p.grad is not None]
    for kind in {(g.device, g.dtype, g.layout) for g in grads}:
        alike = [g for g in grads if (g.device, g.dtype, g.layout) == kind]
        if kind[2] is not torch.strided:
            for grad in alike:
                grad.mul_(factor)
        else:
            torch._foreach_mul_(alike, factor.to(kind[1]) if isinstance(factor, Tensor) else factor)
