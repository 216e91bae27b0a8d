"""The gradient of a step that several batches make together: the mean over everything they count."""

from collections.abc import Collection, Iterable
from typing import Protocol

import torch
from torch import Tensor

from learnerkit.data.batches import tensors_in
from learnerkit.shards import local
from learnerkit.torch_internals import scale_together


class StepGradient(Protocol):
    """The interface of what makes the gradient of an optimizer step of several batches, or of several ranks.

    The learner has one while it trains so; where it has none the gradient of a batch is that of the step.
    """

    @property
    def mean(self) -> "GradientMean":
        """The mean that weighs the batches of a step."""

    def backward(self) -> None:
        """Compute the gradients of the batch, and finish those of the step after its last batch."""

    def detach(self) -> None:
        """Leave model and learner as they were."""


class GradientMean:
    """Weighs the batches of a step so that its gradient is the mean over everything they count.

    The gradient is sum(count_i * g_i) / sum(count_i), g_i being that of the mean loss of batch i. The sum of the
    counts is known only after the last batch. So every backward pass takes its loss times count_i / expected, and the
    gradients are multiplied once by expected / counted at the end, before anyone clips or uses them. A loss that sums
    needs neither; it is multiplied by the number of ranks, whose gradients are then averaged.

    Args:
        sums: the loss is a sum rather than a mean.
        ranks: how many take the step together.

    Attributes:
        begun: whether gradients of batches wait for their step.
        expected: what the step was expected to count when it began.
        counted: what its batches have counted so far; of several ranks, once they have told each other, the mean.
    """

    def __init__(self, sums: bool, ranks: int = 1) -> None:
        self.sums, self.ranks = sums, ranks
        self.begun = False
        self.expected = 1.0
        self.counted: float | Tensor = 0.0

    def begin(self, expected: float) -> None:
        """Begin a step; `expected` is roughly what it will count."""
        self.begun, self.expected, self.counted = True, expected, 0.0

    @property
    def to_sum(self) -> float:
        """The factor that makes the gradients of a weighed loss those of the sum over what the batch counts."""
        return 1 / self.ranks if self.sums else self.expected

    def weight(self, count: float | Tensor, total: float) -> float | Tensor:
        """Return what the loss or the gradients of a batch are multiplied by; 0.0 for a batch that counts nothing.

        Args:
            count: what the batch counts; a tensor on a device is not read.
            total: what the step counts, as a mean over the ranks.
        """
        if not counts_something(count):
            return 0.0
        return self.ranks if self.sums else count / total

    def weigh(self, loss: Tensor, count: float | Tensor, output: object) -> Tensor:
        """Return the loss to differentiate.

        Args:
            loss: the batch's.
            count: what it averages over; a tensor on a device is not read.
            output: the model's, of which the loss was made.
        """
        weight = self.weight(count, self.expected)
        if isinstance(weight, Tensor):
            return torch.where(weight > 0, loss * weight, 0.0).to(loss.dtype)
        if not weight:  # the loss may be the mean of nothing, a NaN, and so would its gradient times 0 be
            return zero_loss(loss if output is None else output)  # nobody reads what SplitBatch has left out
        return loss if weight == 1 else loss * weight

    def correction(self, tolerance: float = 0.0) -> float | Tensor:
        """Return what the step's gradients are to be multiplied by: 1.0 where they are right, or nothing was counted.

        Args:
            tolerance: the share of what was expected that counts as rounding.
        """
        counted = self.counted
        if self.sums:
            return 1.0
        if isinstance(counted, Tensor):
            return torch.where(counted > 0, self.expected / counted, 1.0)
        if not counted or abs(counted - self.expected) <= tolerance * self.expected:
            return 1.0  # where nothing was counted, a callback may have kept gradients of earlier steps
        return self.expected / counted


def counts_something(count: float | Tensor) -> bool:
    """Tell whether a batch may count something; a tensor is not read."""
    return isinstance(count, Tensor) or count != 0


def host_count(count: float | Tensor) -> float | Tensor:
    """Return a count as a number where reading it costs nothing; one on a device stays there."""
    return count.item() if isinstance(count, Tensor) and count.is_cpu else count


def zero_loss(output: object) -> Tensor:
    """Return a loss of 0 that depends on all of the model's output, and whose gradients are zero."""
    # The sum of no elements: times 0, numbers too large for float16 would make a NaN.
    return sum((t.flatten()[:0].sum() for t in tensors_in(output) if t.requires_grad), torch.zeros(()))


def scale_gradients(params: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply the gradients of some parameters, in place."""
    if isinstance(factor, float) and factor == 1:
        return
    scale_each([local(p.grad) for p in params if p.grad is not None], factor)


def scale_each(grads: Collection[Tensor], factor: float | Tensor) -> None:
    """Multiply gradients, in place."""
    for kind in {(g.device, g.dtype) for g in grads}:
        alike = [g for g in grads if (g.device, g.dtype) == kind]
        scale_together(alike, factor.to(*kind) if isinstance(factor, Tensor) else factor)
