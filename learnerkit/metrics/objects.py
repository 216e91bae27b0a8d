"""Metrics that are objects, with states that ranks can combine."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from learnerkit.data.batches import concat, in_float32, on_host
from learnerkit.losses import LossFacts, class_numbers, has_classes_in_dim_1, loss_option
from learnerkit.metrics.functions import class_axis, counts, decoded_pair, numbers, wide
from learnerkit.utils import listify, unbound
from learnerkit.values import describe


class Metric:
    """Base of metrics with states: declare states with `add_state` in `__init__`; define `update` and `compute`.

    Attributes:
        name: the column; by default the class's name in lower case.
    """

    _REDUCTIONS = ("sum", "cat", "max", "min")

    def __init__(self, name: str | None = None) -> None:
        if name or not getattr(type(self), "name", None):  # a class may have a name, or a property that makes it
            self.name = name or type(self).__name__.lower()

    def add_state(self, name: str, default: Tensor | float | list[Any], reduce: str = "sum") -> None:
        """Declare a state that `reset` sets to `default` and that ranks combine by `reduce`.

        Args:
            name: the attribute for the state.
            default: a tensor or number; for 'cat' an empty list, to which `update` appends tensors.
            reduce: 'sum', 'max', 'min', or 'cat': the tensors of all ranks in the order of the data.

        Raises:
            ValueError: another `reduce`.
        """
        if reduce not in self._REDUCTIONS:
            raise ValueError(
                f"add_state({name!r}) got reduce={reduce!r}; it takes {', '.join(map(repr, self._REDUCTIONS))}"
            )
        default = [] if reduce == "cat" else torch.as_tensor(default)
        self.__dict__.setdefault("_states", {})[name] = (default, reduce)
        setattr(self, name, copy.deepcopy(default))

    def use_loss(self, loss_func: Any) -> None:
        """Take the learner's loss, which says how predictions are decoded; a metric that needs none does nothing."""

    def reset(self) -> None:
        """Set every state to its default."""
        for name, (default, _) in self.__dict__.get("_states", {}).items():
            setattr(self, name, copy.deepcopy(default))

    def update(self, pred: Any, *targets: Any) -> None:
        """Update the states with a batch."""
        raise NotImplementedError(f"{type(self).__name__} must define update(self, pred, *targets)")

    def compute(self) -> Tensor | float:
        """Compute the metric from the states."""
        raise NotImplementedError(f"{type(self).__name__} must define compute(self)")


class AccumMetric(Metric):
    """A metric that is not a mean over samples: `func` gets all predictions and targets at once, in dataset order.

    Args:
        func: f(preds, *targets) -> number or 0-dim tensor; it gets tensors on the host, joined over the batches.
            Where batches differ in length, as padded texts do, it gets lists with a tensor for each sample.
        name: the column; by default the function's name.
    """

    def __init__(self, func: Callable[..., Any], name: str | None = None) -> None:
        if not callable(func):
            raise TypeError(f"got AccumMetric({func!r}); pass a function of all predictions and targets")
        super().__init__(name or metric_name(func))
        self.func = func
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self.batches: list[tuple[Any, ...]] = []

    def update(self, pred: Any, *targets: Any) -> None:
        """Keep a batch on the host."""
        self.batches.append(on_host((pred, *targets)))

    def compute(self) -> Any:
        """Call `func` with all batches."""
        return self.func(*concat(self.batches))


class _MeanOf(Metric):
    """A metric that is a function of a mean over all samples."""

    total: Tensor
    count: int | Tensor

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.add_state("total", 0.0)
        self.add_state("count", 0)

    def _add(self, total: Tensor, count: int | Tensor) -> None:
        self.total = self.total + wide(total.detach())
        self.count = self.count + count


class rmse(_MeanOf):
    """The root of the mean squared error over all elements of all samples."""

    def update(self, pred: Tensor, target: Tensor) -> None:
        """Add a batch's squared errors."""
        self._add(F.mse_loss(*numbers(pred, target), reduction="sum"), target.numel())

    def compute(self) -> Tensor:
        """Return the root of their mean."""
        return (self.total / self.count).sqrt()


class perplexity(_MeanOf):
    """The exponential of the mean cross-entropy over all targets that are not `ignore_index`.

    Args:
        ignore_index: targets with this value are ignored; by default those that the loss ignores, or else -100.
        name: the column; by default 'perplexity'.
        axis: the dimension of the classes, 1 (as in torch's losses) or -1 (as in language models); by default
            whichever fits the shape of the targets.
    """

    def __init__(self, ignore_index: int | None = None, name: str | None = None, axis: int | None = None) -> None:
        super().__init__(name)
        self.ignore_index, self.axis = ignore_index, axis
        self._loss_func: Any = None

    def use_loss(self, loss_func: Any) -> None:
        """Take the learner's loss."""
        self._loss_func = loss_func

    def update(self, pred: Tensor, target: Tensor) -> None:
        """Add a batch.

        Args:
            pred: scores of shape (n, classes, ...) or (n, t, vocabulary).
            target: classes of shape (n, ...) or (n, t).

        Raises:
            ValueError: no `axis`, and both dimension 1 and the last may be the classes.
        """
        axis, pred, target = self.axis, in_float32(pred), in_float32(class_numbers(target))
        if axis is None:  # torch's loss has taken these predictions, with the classes in dimension 1
            axis = 1 if has_classes_in_dim_1(self._loss_func) else class_axis(pred, target, "perplexity")
        ignored = self.ignore_index
        if ignored is None:
            ignored = loss_option(self._loss_func, "ignore_index", -100)
        total = F.cross_entropy(pred.movedim(axis, 1), target, ignore_index=ignored, reduction="sum")
        is_probability = target.is_floating_point()  # each target is then a vector, along the axis of the classes
        self._add(total, target.numel() // pred.shape[axis] if is_probability else (target != ignored).sum())

    def compute(self) -> Tensor:
        """Return the exponential of the mean."""
        return (self.total / self.count).exp()


class Dice(Metric):
    """The Dice coefficient: the mean over classes of 2 |A and B| / (|A| + |B|), where A is predicted and B the target.

    A and B are pixels (or samples, or tokens) of all samples together, so that batches and ranks change nothing. The
    mean is over the classes that are in the targets or the predictions. Predictions are decoded as the loss says, as in
    `accuracy`, and targets that the loss ignores do not count. A binary cross-entropy with one logit for each pixel has
    one class. L. R. Dice, Ecology 26 (1945), https://doi.org/10.2307/1932409.

    Args:
        classes: the numbers of the classes whose mean it is, such as `[1, 2]` to leave out a background 0; by default
            all. With one logit for each pixel there is one class, 0.
        ignore_index: pixels whose target has this number do not count.
        name: the column; by default the class's name in lower case.

    Raises:
        ValueError: `classes` that are no such numbers.
    """

    tallies: Tensor

    def __init__(
        self, classes: Sequence[int] | None = None, ignore_index: int | None = None, name: str | None = None
    ) -> None:
        super().__init__(name)
        self.classes = None if classes is None else listify(classes)
        if not all(isinstance(number, int | np.integer) and number >= 0 for number in self.classes or ()):
            raise ValueError(f"got classes={classes!r}; they are the numbers of classes, from 0, such as [1, 2]")
        self.ignore_index = ignore_index
        self._loss_func: Any = None
        self.add_state("tallies", 0)

    def use_loss(self, loss_func: Any) -> None:
        """Take the learner's loss."""
        self._loss_func = loss_func

    def update(self, pred: Tensor, target: Tensor) -> None:
        """Count the pixels of each class in a batch: true positives, those predicted, and those in the targets.

        Args:
            pred: scores (n, classes, ...), or for a binary cross-entropy one for each target.
            target: numbers of classes (n, ...), or for a binary cross-entropy 0 and 1.

        Raises:
            ValueError: predictions that are no tensor, that have no classes, or not those that were named.
        """
        if not isinstance(pred, Tensor):
            raise ValueError(
                f"{self.name} takes scores in one tensor, and got predictions: {describe(pred)}; an AccumMetric takes "
                "any predictions"
            )
        target = class_numbers(target)
        facts = LossFacts(self._loss_func)
        counted = counts(target, facts.ignored)
        if self.ignore_index is not None:
            counted = counted & (target != self.ignore_index)
        predicted, actual = decoded_pair(pred, target, None, facts, self.name)
        first, n = (1, 2) if predicted.dtype == torch.bool else (0, pred.numel() // max(1, target.numel()))
        if self.classes and max(self.classes) >= n - first:
            raise ValueError(f"{self.name} is of the classes {self.classes}, and the predictions have {n - first}")
        predicted, actual = predicted.flatten().long(), actual.flatten().long()
        counted = counted.flatten()

        def tally(numbers: Tensor, among: Tensor) -> Tensor:
            # What does not count goes to place 0, which is left out: to select would wait for the device.
            places = torch.where(among, numbers + 1, 0)
            return places.new_zeros(n + 1).scatter_add_(0, places, torch.ones_like(places))[first + 1 :]

        met = tally(predicted, counted & (predicted == actual))
        self.tallies = self.tallies + torch.stack([met, tally(predicted, counted), tally(actual, counted)])

    def compute(self) -> Tensor | float:
        """Return the mean over the classes; NaN where there is none."""
        if not self.tallies.ndim:
            return math.nan
        met, predicted, actual = wide(self.tallies if self.classes is None else self.tallies[:, self.classes])
        both = predicted + actual
        return self._shares(met, both)[both > 0].mean()

    def _shares(self, met: Tensor, both: Tensor) -> Tensor:
        return 2 * met / both


class IoU(Dice):
    """The intersection over union, or Jaccard index: the mean over classes of |A and B| / |A or B|, as in `Dice`.

    P. Jaccard, New Phytologist 11 (1912), https://doi.org/10.1111/j.1469-8137.1912.tb05611.x.

    Args:
        classes, ignore_index, name: as in `Dice`.
    """

    def _shares(self, met: Tensor, both: Tensor) -> Tensor:
        return met / (both - met)


def metric_name(metric: Any) -> str:
    """Return the column of a metric: its `name`, or the name of its function or class; a name is its own."""
    if isinstance(metric, str):
        return metric
    inner, options = unbound(metric)
    name: Any = options.get("name") if isinstance(inner, type) else getattr(inner, "name", None)
    return name or getattr(inner, "__name__", type(inner).__name__.lower())
