"""Metrics: functions that are means over samples, and objects with states that ranks can combine.

Every metric counts each sample exactly once, whatever the batches and the number of ranks.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from learnerkit import world
from learnerkit.data import batch_size, tensors_in
from learnerkit.losses import kernel
from learnerkit.utils import describe

# Functions: f(pred, *targets) -> 0-dim tensor, a mean over samples


def accuracy(pred: Tensor, target: Tensor) -> Tensor:
    """Share of samples whose largest score is the target's class.

    Args:
        pred: scores of shape (n, classes, ...).
        target: classes of shape (n, ...) or (n, 1, ...).
    """
    return (pred.argmax(dim=1).flatten() == target.flatten()).float().mean()


def error_rate(pred: Tensor, target: Tensor) -> Tensor:
    """1 - `accuracy`."""
    return 1 - accuracy(pred, target)


def top_k_accuracy(pred: Tensor, target: Tensor, k: int = 5) -> Tensor:
    """Share of samples whose target is among the `k` largest scores.

    Args:
        pred: scores of shape (n, classes).
        target: classes of shape (n,).
        k: how many; `partial(top_k_accuracy, k=3)` as a metric.
    """
    best = pred.topk(min(k, pred.shape[1]), dim=1).indices
    return (best == target.reshape(-1, 1)).any(dim=1).float().mean()


def mse(pred: Tensor, target: Tensor) -> Tensor:
    """Mean squared error over all elements; shapes must agree in the number of elements."""
    return F.mse_loss(pred.flatten(), target.flatten().to(pred.dtype))


def mae(pred: Tensor, target: Tensor) -> Tensor:
    """Mean absolute error over all elements; shapes must agree in the number of elements."""
    return F.l1_loss(pred.flatten(), target.flatten().to(pred.dtype))


# Objects


class Metric:
    """A metric with states: override `update` and `compute`, declare states with `add_state` in `__init__`.

    Attributes:
        name: the column; by default the class's name in lower case.
    """

    _REDUCTIONS = ("sum", "cat", "max", "min")

    def __init__(self, name: str | None = None):
        self.name = name or type(self).__name__.lower()

    def add_state(self, name: str, default: Tensor | float | list, reduce: str = "sum") -> None:
        """Declare a state that `reset` sets back to `default` and that ranks combine by `reduce`.

        Args:
            name: the attribute that holds it.
            default: a tensor or number; for 'cat' an empty list, to which `update` appends tensors.
            reduce: 'sum', 'max', 'min', or 'cat': the tensors of all ranks in the order of the data.

        Raises:
            ValueError: another `reduce`.
        """
        if reduce not in self._REDUCTIONS:
            raise ValueError(f"add_state({name!r}) got reduce={reduce!r}; it takes {', '.join(map(repr, self._REDUCTIONS))}")
        default = [] if reduce == "cat" else torch.as_tensor(default)
        self.__dict__.setdefault("_states", {})[name] = (default, reduce)
        setattr(self, name, copy.deepcopy(default))

    def reset(self) -> None:
        """Set every state back to its default."""
        for name, (default, _) in self.__dict__.get("_states", {}).items():
            setattr(self, name, copy.deepcopy(default))

    def update(self, pred: Any, *targets: Any) -> None:
        """Take a batch into the states."""
        raise NotImplementedError(f"{type(self).__name__} must define update(self, pred, *targets)")

    def compute(self) -> Tensor | float:
        """The metric from the states."""
        raise NotImplementedError(f"{type(self).__name__} must define compute(self)")


class AccumMetric(Metric):
    """A metric that is no mean over samples: `func` gets all predictions and targets at once, in dataset order.

    Args:
        func: f(preds, *targets) -> number or 0-dim tensor; inputs are on the host, concatenated over the batches.
        name: the column; by default the function's name.
    """

    def __init__(self, func: Callable[..., Any], name: str | None = None):
        super().__init__(name or _name_of(func))
        self.func = func
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self.batches: list[tuple] = []

    def update(self, pred: Any, *targets: Any) -> None:
        """Keep a batch, on the host."""
        self.batches.append((pred, *targets))

    def compute(self) -> Any:
        """`func` of everything kept."""
        return self.func(*(torch.cat(column) for column in zip(*self.batches, strict=True)))


class _RootMetric(Metric):
    def __init__(self, name: str | None = None):
        super().__init__(name)
        self.add_state("total", torch.zeros((), dtype=torch.float64))
        self.add_state("count", torch.zeros((), dtype=torch.float64))

    def _add(self, total: Tensor, count: int | Tensor) -> None:
        # float64 does not exist on every accelerator, so the sums are kept on the host's side of `total`.
        self.total = self.total.to(total.device) + total.detach()
        self.count = self.count + count


class rmse(_RootMetric):  # noqa: N801 - named like the function metrics beside it
    """Root of the mean squared error over all elements of all samples."""

    def update(self, pred: Tensor, target: Tensor) -> None:
        """Add a batch's squared errors."""
        self._add(F.mse_loss(pred.flatten(), target.flatten().to(pred.dtype), reduction="sum"), target.numel())

    def compute(self) -> Tensor:
        """The root of their mean."""
        return (self.total / self.count).sqrt()


class perplexity(_RootMetric):  # noqa: N801
    """Exponential of the mean cross-entropy over all targets that are not `ignore_index`.

    Args:
        ignore_index: targets that do not count.
    """

    def __init__(self, ignore_index: int = -100, name: str | None = None):
        super().__init__(name)
        self.ignore_index = ignore_index

    def update(self, pred: Tensor, target: Tensor) -> None:
        """Add a batch: scores of shape (n, classes, ...), classes of shape (n, ...)."""
        total = F.cross_entropy(pred, target, ignore_index=self.ignore_index, reduction="sum")
        self._add(total, (target != self.ignore_index).sum())

    def compute(self) -> Tensor:
        """The exponential of the mean."""
        return (self.total / self.count).exp()
