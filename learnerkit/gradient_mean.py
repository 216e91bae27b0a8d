"""The gradient of a step of several batches: the mean over everything that they count, and its norm."""

import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from learnerkit import distributed
from learnerkit.marks import collective
from learnerkit.shards import is_shard, local, local_or_zero
from learnerkit.torch_internals import scale_together
from learnerkit.values import tensors_in


class StepGradient(Protocol):
    """The interface of objects that compute the gradient of an optimizer step of several batches, or of several ranks.

    The learner has one while it trains so; without one the gradient of a batch is that of the step.
    """

    @property
    def mean(self) -> "GradientMean":
        """The mean that weighs the batches of a step."""

    def backward(self) -> None:
        """Compute the gradients of the batch, and finish those of the step after its last batch."""

    def detach(self) -> None:
        """Restore the model and the learner."""


class GradientMean:
    """Weighs the batches of a step so that its gradient is the mean over everything they count.

    The gradient is sum(count_i * g_i) / sum(count_i), where g_i is the gradient of the mean loss of batch i. The sum of
    the counts is known only after the last batch. So every backward pass multiplies its loss by count_i / expected, and
    the gradients are multiplied once by expected / counted at the end, before they are clipped or used. A loss that
    sums needs neither; it is multiplied by the number of ranks, whose gradients are then averaged.

    Args:
        sums: the loss is a sum rather than a mean.
        ranks: the number of ranks that take the step together.

    Attributes:
        begun: gradients of batches wait for their step.
        expected: the count that was expected at the beginning of the step.
        counted: the count of its batches so far; on several ranks, once they have exchanged their counts, the mean.
    """

    def __init__(self, sums: bool, ranks: int = 1) -> None:
        self.sums, self.ranks = sums, ranks
        self.begun = False
        self.expected = 1.0
        self.counted: float | Tensor = 0.0

    def begin(self, expected: float) -> None:
        """Begin a step; `expected` is approximately what it will count."""
        self.begun, self.expected = True, expected
        self.counted = 0.0

    @property
    def to_sum(self) -> float:
        """The factor that turns the gradients of a weighted loss into those of the sum over what the batch counts."""
        return 1 / self.ranks if self.sums else self.expected

    def weight(self, count: float | Tensor, total: float) -> float | Tensor:
        """Return the factor of the loss or the gradients of a batch; 0.0 for a batch that counts nothing.

        Args:
            count: the count of the batch; a tensor on a device is not read.
            total: the count of the step, as a mean over the ranks.
        """
        if not counts_something(count):
            return 0.0
        return self.ranks if self.sums else count / total

    def weigh(self, loss: Tensor, count: float | Tensor, output: object) -> Tensor:
        """Return the loss to differentiate.

        Args:
            loss: the batch's loss.
            count: the number of items in its mean; a tensor on a device is not read.
            output: the model's output, from which the loss was computed.
        """
        weight = self.weight(count, self.expected)
        if isinstance(weight, Tensor):
            return torch.where(weight > 0, loss * weight, 0.0).to(loss.dtype)
        if not weight:  # an empty mean is NaN, and so is its gradient times 0
            # The predictions that SplitBatch has left out are not needed.
            return zero_loss(loss if output is None else output)
        return loss if weight == 1 else loss * weight

    def correction(self, tolerance: float = 0.0) -> float | Tensor:
        """Return the factor that corrects the step's gradients: 1.0 if they are right, or if nothing was counted.

        Args:
            tolerance: the relative difference to the expected count that is ignored as rounding.
        """
        counted = self.counted
        if self.sums:
            return 1.0
        if isinstance(counted, Tensor):
            return torch.where(counted > 0, self.expected / counted, 1.0)
        if not counted or abs(counted - self.expected) <= tolerance * self.expected:
            return 1.0  # if nothing was counted, a callback may have kept gradients of earlier steps
        return self.expected / counted


def counts_something(count: float | Tensor) -> bool:
    """Tell whether a batch may count something; a tensor is not read."""
    return isinstance(count, Tensor) or count != 0


def host_count(count: float | Tensor) -> float | Tensor:
    """Return a count as a number if it is on the host; a count on a device stays there."""
    return count.item() if isinstance(count, Tensor) and count.is_cpu else count


def zero_loss(output: object) -> Tensor:
    """Return a loss of 0 that depends on all of the model's output, with zero gradients."""
    # This is the sum of no elements, as 0 times a number that overflows float16 would be NaN.
    return sum((t.flatten()[:0].sum() for t in tensors_in(output) if t.requires_grad), torch.zeros(()))


@contextmanager
def gradients_aside(params: Collection[Tensor]) -> Iterator[None]:
    """Return a context in which some parameters begin without gradients; theirs come back at its end."""
    aside = [p.grad for p in params]
    for p in params:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(params, aside, strict=True):
            p.grad = grad


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


@collective
def over_ranks(norms: Tensor, norm_type: float) -> Tensor:
    """Return norms over the rows of all ranks, from those over this rank's rows."""
    if norm_type == math.inf:
        return distributed.reduce(norms, "max")
    return distributed.reduce(norms**norm_type) ** (1 / norm_type)


@collective
def total_norm(grads: Iterable[Tensor], norm_type: float) -> Tensor:
    """Return the norm over some gradients, which may be shards; every rank must reach this with its rows of them.

    It equals `torch.nn.utils.get_total_norm`, which cannot mix shards and whole tensors.
    """
    kinds: dict[bool, list[Tensor]] = {}
    for grad in grads:
        kinds.setdefault(is_shard(grad), []).append(local_or_zero(grad))
    norms = []
    for are_shards, alike in kinds.items():
        norm = torch.nn.utils.get_total_norm(alike, norm_type)
        norms.append(over_ranks(norm, norm_type) if are_shards else norm)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
