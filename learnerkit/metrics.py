"""Metrics: functions that are means over samples, and objects with states that ranks can combine.

Every metric counts each sample exactly once, whatever the batches and the number of ranks.
"""

import copy
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from learnerkit import world
from learnerkit.data.batches import concat, gather_batches, map_batch
from learnerkit.host_scalars import HostScalars
from learnerkit.losses import class_axes, unwrap_partial
from learnerkit.utils import describe, listify

# Functions: f(pred, *targets) -> 0-dim tensor, a mean over samples


def accuracy(pred: Tensor, target: Tensor, axis: int | None = None) -> Tensor:
    """Share of samples whose largest score is the target's class.

    Args:
        pred: scores of shape (n, classes, ...), or of a language model (n, t, vocabulary).
        target: classes of shape (n, ...) or (n, 1, ...).
        axis: the dimension of the classes; by default 1, or the last one, whichever fits the targets.

    Raises:
        ValueError: scores of which both dimension 1 and the last may be the classes, and no `axis`.
    """
    axis = _class_axis(pred, target, "accuracy") if axis is None else axis
    return _wide(pred.argmax(dim=axis).flatten() == target.flatten()).mean()


def error_rate(pred: Tensor, target: Tensor, axis: int | None = None) -> Tensor:
    """1 - `accuracy`."""
    return 1 - accuracy(pred, target, axis)


def _class_axis(pred: Tensor, target: Tensor, metric: str) -> int:
    """Which dimension of scores the classes are: 1 or -1."""
    axes = class_axes(pred, target)
    if len(axes) > 1 and pred.shape[1] > 1:
        raise ValueError(
            f"{metric} got scores of shape {tuple(pred.shape)} and targets of shape {tuple(target.shape)}: the classes "
            "may be dimension 1 or the last; say which by its argument axis, 1 or -1"
        )
    return axes[0] if axes else 1


def top_k_accuracy(pred: Tensor, target: Tensor, k: int = 5) -> Tensor:
    """Share of samples whose target is among the `k` largest scores.

    Args:
        pred: scores of shape (n, classes).
        target: classes of shape (n,).
        k: how many; `partial(top_k_accuracy, k=3)` as a metric.
    """
    best = pred.topk(min(k, pred.shape[1]), dim=1).indices
    return _wide((best == target.reshape(-1, 1)).any(dim=1)).mean()


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

    def __init__(self, name: str | None = None) -> None:
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
            raise ValueError(
                f"add_state({name!r}) got reduce={reduce!r}; it takes {', '.join(map(repr, self._REDUCTIONS))}"
            )
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

    def __init__(self, func: Callable[..., Any], name: str | None = None) -> None:
        super().__init__(name or metric_name(func))
        self.func = func
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self.batches: list[tuple] = []

    def update(self, pred: Any, *targets: Any) -> None:
        """Keep a batch, on the host."""
        self.batches.append(map_batch(lambda t: t.detach().cpu(), (pred, *targets)))

    def compute(self) -> Any:
        """`func` of everything kept."""
        return self.func(*concat(self.batches))


class _MeanOf(Metric):
    """A function of the mean of something over all samples."""

    total: Tensor
    count: int | Tensor

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.add_state("total", 0.0)
        self.add_state("count", 0)

    def _add(self, total: Tensor, count: int | Tensor) -> None:
        self.total = self.total + _wide(total.detach())
        self.count = self.count + count


def _wide(x: Tensor) -> Tensor:
    "In digits enough that the mean over batches does not depend on how samples are put into batches."
    return x.float() if x.device.type == "mps" else x.double()  # MPS has no float64


class rmse(_MeanOf):
    """Root of the mean squared error over all elements of all samples."""

    def update(self, pred: Tensor, target: Tensor) -> None:
        """Add a batch's squared errors."""
        self._add(F.mse_loss(pred.flatten(), target.flatten().to(pred.dtype), reduction="sum"), target.numel())

    def compute(self) -> Tensor:
        """The root of their mean."""
        return (self.total / self.count).sqrt()


class perplexity(_MeanOf):
    """Exponential of the mean cross-entropy over all targets that are not `ignore_index`.

    Args:
        ignore_index: targets that do not count.
        axis: the dimension of the classes, 1 (as torch's losses have it) or -1 (as language models do); by default
            the one that fits the shape of the targets.
    """

    def __init__(self, ignore_index: int = -100, name: str | None = None, axis: int | None = None) -> None:
        super().__init__(name)
        self.ignore_index, self.axis = ignore_index, axis

    def update(self, pred: Tensor, target: Tensor) -> None:
        """Add a batch.

        Args:
            pred: scores of shape (n, classes, ...) or (n, t, vocabulary).
            target: classes of shape (n, ...) or (n, t).

        Raises:
            ValueError: scores of which both dimension 1 and the last may be the classes, and no `axis`.
        """
        axis = _class_axis(pred, target, "perplexity") if self.axis is None else self.axis
        total = F.cross_entropy(pred.movedim(axis, 1), target, ignore_index=self.ignore_index, reduction="sum")
        self._add(total, (target != self.ignore_index).sum())

    def compute(self) -> Tensor:
        """The exponential of the mean."""
        return (self.total / self.count).exp()


# Meters: one interface for every kind of metric


def make_meters(metrics: Any) -> list["Meter"]:
    """A meter for each metric: a function, an object, a class of ours, a list of them, or a dict with their names.

    Raises:
        TypeError: something that is no metric.
        ValueError: two metrics of one name.
    """
    named = metrics.items() if isinstance(metrics, Mapping) else [(None, m) for m in listify(metrics)]
    meters = [_make_meter(metric, name) for name, metric in named]
    names = [m.name for m in meters]
    twice = {n for n in names if names.count(n) > 1}
    if twice:
        raise ValueError(f"two metrics are named {sorted(twice)}; name them by a dict: metrics={{'name': metric, ...}}")
    return meters


def _make_meter(metric: Any, name: str | None) -> "Meter":
    if isinstance(metric, type) and issubclass(metric, Metric):
        metric = metric()
    if isinstance(metric, Metric):
        return StatesMeter(metric, name) if metric.__dict__.get("_states") else GatheringMeter(metric, name)
    if all(callable(getattr(metric, part, None)) for part in ("reset", "update", "compute")):
        if hasattr(metric, "sync_on_compute"):
            return TorchmetricsMeter(metric, name)
        return MergingMeter(metric, name) if hasattr(metric, "merge_state") else GatheringMeter(metric, name)
    if callable(metric):
        return MeanMeter(metric, name)
    raise TypeError(
        f"got the metric {metric!r}; a metric is a function f(pred, *targets) that is a mean over samples, an "
        "AccumMetric, or an object with reset, update and compute"
    )


def metric_names(metrics: Any) -> list[str]:
    """The columns of metrics, as a Learner takes them."""
    return list(metrics) if isinstance(metrics, Mapping) else list(map(metric_name, listify(metrics)))


def metric_name(metric: Any) -> str:
    """The column of a metric: its `name`, or the name of its function or class."""
    found = unwrap_partial(metric)
    own: Any = getattr(found, "name", None)
    return own or getattr(found, "__name__", type(found).__name__.lower())


class Meter:
    """Feeds one metric, batch by batch, and reads it at the end.

    Args:
        metric: what the user gave.
        name: its column; by default the metric's own name.
    """

    def __init__(self, metric: Any, name: str | None = None) -> None:
        self.metric, self.name = metric, name or metric_name(metric)

    def reset(self) -> None:
        """Forget everything."""
        self.metric.reset()

    def update(self, place: int, size: int, pred: Any, targets: tuple) -> None:
        """Take a batch: its place in the order of the data, its number of samples, its predictions and targets."""
        self.metric.update(_detached(pred), *targets)

    def result(self, sharded: bool) -> float:
        """The metric over everything; if `sharded`, over all ranks, each of which must reach this."""
        if sharded:
            self.combine()
        with warnings.catch_warnings():
            # torchmetrics warns where a rank had no batch of its own, which is fine here.
            warnings.filterwarnings("ignore", message="The ``compute`` method of metric", category=UserWarning)
            return self.scalar(self.metric.compute())

    def combine(self) -> None:
        """Bring the other ranks' samples into the metric."""

    def scalar(self, value: Any) -> float:
        """`value` as a number.

        Raises:
            ValueError: it is none.
        """
        if value.numel() == 1 if isinstance(value, Tensor) else hasattr(value, "__float__"):
            return float(value)
        raise ValueError(
            f"metric {self.name!r} returned {describe(value)}; a metric returns a number or a tensor with one element "
            "(take the mean inside it, or give one metric for each value)"
        )


def _detached(pred: Any) -> Any:
    return pred.detach() if isinstance(pred, Tensor) else map_batch(Tensor.detach, pred)


class MeanMeter(Meter):
    """A function that is a mean over samples: its values, weighted by batch size."""

    def reset(self) -> None:
        """Forget everything."""
        self.values = HostScalars()
        self.sizes: list[int] = []

    def update(self, place: int, size: int, pred: Any, targets: tuple) -> None:
        """Take the mean of a batch; it stays on the device."""
        value = self.metric(_detached(pred), *targets)
        is_scalar = isinstance(value, Tensor) and value.ndim == 0
        self.values.append(value.detach() if is_scalar else self.scalar(value))
        self.sizes.append(size)
        if not len(self.sizes) % 1024:
            self.values.poll()

    def result(self, sharded: bool) -> float:
        """The mean over all samples."""
        total = sum(value * size for value, size in zip(self.values.all(), self.sizes, strict=True))
        return weighted_mean(total, sum(self.sizes), sharded)


def weighted_mean(total: float, count: float, sharded: bool) -> float:
    """total / count over all ranks if `sharded`, NaN where nothing was counted."""
    if sharded:
        total, count = world.reduce(torch.tensor([total, count], dtype=torch.float64)).tolist()
    return total / count if count else float("nan")


class StatesMeter(Meter):
    """A `Metric`: its states are combined as they were declared."""

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.places: dict[str, list] = {}

    def update(self, place: int, size: int, pred: Any, targets: tuple) -> None:
        """Update the metric, noting where in the order each new piece of a 'cat' state belongs."""
        super().update(place, size, pred, targets)
        for name, (_, reduce) in self.metric._states.items():
            if reduce == "cat":
                places = self.places.setdefault(name, [])
                places += [(place, i) for i in range(len(places), len(getattr(self.metric, name)))]

    def combine(self) -> None:
        """Combine every declared state over the ranks."""
        for name, (_, reduce) in self.metric._states.items():
            value = getattr(self.metric, name)
            if reduce == "cat":
                whole: Any = world.gather_pieces(list(zip(self.places.get(name, []), value, strict=True)))
            else:
                whole = world.reduce(_alike(torch.as_tensor(value).detach().cpu()), reduce)
            setattr(self.metric, name, whole)


def _alike(value: Tensor) -> Tensor:
    """A state in the type and shape it has on the ranks that updated it; a rank without data still has the default."""
    everyone = world.all_gather((value.shape, value.dtype))
    dtype = functools.reduce(torch.promote_types, (dtype for _, dtype in everyone))
    shape = torch.broadcast_shapes(*(shape for shape, _ in everyone))
    return value.to(dtype).expand(shape).contiguous()


class GatheringMeter(Meter):
    """An object whose states cannot be combined: it gets everything, from all ranks, in order."""

    def reset(self) -> None:
        """Forget everything."""
        self.metric.reset()
        self.batches: list[tuple] = []

    def update(self, place: int, size: int, pred: Any, targets: tuple) -> None:
        """Keep a batch on the host."""
        self.batches.append((place, map_batch(lambda t: t.detach().cpu(), (pred, *targets))))

    def result(self, sharded: bool) -> float:
        """Let the metric see all batches, and read it."""
        batches = gather_batches(self.batches, sharded=sharded) or []
        for batch in batches:
            self.metric.update(*batch)
        return self.scalar(self.metric.compute()) if batches else float("nan")


class MergingMeter(Meter):
    """An object that merges the states of others (torcheval's `merge_state`)."""

    def combine(self) -> None:
        """Merge the other ranks' metrics into this one, in rank order."""
        first, *rest = world.all_gather(self.metric)
        self.metric = first.merge_state(rest)


class TorchmetricsMeter(Meter):
    """A torchmetrics object, which communicates by itself when asked to compute."""

    def result(self, sharded: bool) -> float:
        """Compute, with the ranks' states combined if the data are sharded and only then."""
        if not sharded:
            self.metric.sync_on_compute = False
        try:
            return super().result(sharded)
        finally:
            self.metric.sync_on_compute = True
