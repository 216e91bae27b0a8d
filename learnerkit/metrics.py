"""Metrics: functions that are means over samples, and objects with states that ranks can combine.

Every metric counts each sample exactly once, for any batches and any number of ranks.
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
    """Share of samples whose class with the largest score is the target.

    Args:
        pred: scores of shape (n, classes, ...), or of a language model (n, t, vocabulary).
        target: classes of shape (n, ...) or (n, 1, ...).
        axis: the dimension of the classes; by default 1 or the last, whichever fits the shape of the targets.

    Raises:
        ValueError: no `axis`, and both dimension 1 and the last may be the classes.
    """
    axis = _class_axis(pred, target, "accuracy") if axis is None else axis
    return _wide(pred.argmax(dim=axis).flatten() == target.flatten()).mean()


def error_rate(pred: Tensor, target: Tensor, axis: int | None = None) -> Tensor:
    """1 - `accuracy`."""
    return 1 - accuracy(pred, target, axis)


def _class_axis(pred: Tensor, target: Tensor, metric: str) -> int:
    """Return the dimension of the classes in scores: 1 or -1."""
    axes = class_axes(pred, target)
    if len(axes) > 1 and pred.shape[1] > 1:
        raise ValueError(
            f"{metric} got scores of shape {tuple(pred.shape)} and targets of shape {tuple(target.shape)}: the classes "
            "may be dimension 1 or the last; say which by the argument axis, 1 or -1"
        )
    return axes[0] if axes else 1


def top_k_accuracy(pred: Tensor, target: Tensor, k: int = 5) -> Tensor:
    """Share of samples whose target is among the `k` largest scores.

    Args:
        pred: scores of shape (n, classes).
        target: classes of shape (n,).
        k: how many scores; for another number use `partial(top_k_accuracy, k=3)` as the metric.
    """
    best = pred.topk(min(k, pred.shape[1]), dim=1).indices
    return _wide((best == target.reshape(-1, 1)).any(dim=1)).mean()


def mse(pred: Tensor, target: Tensor) -> Tensor:
    """Mean squared error over all elements; both tensors must have the same number of elements."""
    return F.mse_loss(pred.flatten(), target.flatten().to(pred.dtype))


def mae(pred: Tensor, target: Tensor) -> Tensor:
    """Mean absolute error over all elements; both tensors must have the same number of elements."""
    return F.l1_loss(pred.flatten(), target.flatten().to(pred.dtype))


# Objects


class Metric:
    """Base of metrics with states: declare states with `add_state` in `__init__`; define `update` and `compute`.

    Attributes:
        name: the column; by default the class's name in lower case.
    """

    _REDUCTIONS = ("sum", "cat", "max", "min")

    def __init__(self, name: str | None = None) -> None:
        self.name = name or type(self).__name__.lower()

    def add_state(self, name: str, default: Tensor | float | list, reduce: str = "sum") -> None:
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
        """Keep a batch on the host."""
        self.batches.append(map_batch(lambda t: t.detach().cpu(), (pred, *targets)))

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
        self.total = self.total + _wide(total.detach())
        self.count = self.count + count


def _wide(x: Tensor) -> Tensor:
    "Convert to float64 (float32 on MPS, which has no float64), so that a mean does not depend on the batching."
    return x.float() if x.device.type == "mps" else x.double()


class rmse(_MeanOf):
    """Root of the mean squared error over all elements of all samples."""

    def update(self, pred: Tensor, target: Tensor) -> None:
        """Add a batch's squared errors."""
        self._add(F.mse_loss(pred.flatten(), target.flatten().to(pred.dtype), reduction="sum"), target.numel())

    def compute(self) -> Tensor:
        """Return the root of their mean."""
        return (self.total / self.count).sqrt()


class perplexity(_MeanOf):
    """Exponential of the mean cross-entropy over all targets that are not `ignore_index`.

    Args:
        ignore_index: targets with this value are ignored.
        name: the column; by default 'perplexity'.
        axis: the dimension of the classes, 1 (as in torch's losses) or -1 (as in language models); by default
            whichever fits the shape of the targets.
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
            ValueError: no `axis`, and both dimension 1 and the last may be the classes.
        """
        axis = _class_axis(pred, target, "perplexity") if self.axis is None else self.axis
        total = F.cross_entropy(pred.movedim(axis, 1), target, ignore_index=self.ignore_index, reduction="sum")
        self._add(total, (target != self.ignore_index).sum())

    def compute(self) -> Tensor:
        """Return the exponential of the mean."""
        return (self.total / self.count).exp()


# Meters: one interface to all kinds of metrics


def make_meters(metrics: Any) -> list["Meter"]:
    """Make a meter for each metric.

    Args:
        metrics: a function, an object, a subclass of `Metric`, a list of these, or a dict of them by name.

    Raises:
        TypeError: something that is not a metric.
        ValueError: two metrics with the same name.
    """
    named = metrics.items() if isinstance(metrics, Mapping) else [(None, m) for m in listify(metrics)]
    meters = [_make_meter(metric, name) for name, metric in named]
    names = [m.name for m in meters]
    repeated = {n for n in names if names.count(n) > 1}
    if repeated:
        raise ValueError(
            f"two metrics are named {sorted(repeated)}; name them by a dict: metrics={{'name': metric, ...}}"
        )
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
    """The columns of a Learner's metrics."""
    return list(metrics) if isinstance(metrics, Mapping) else list(map(metric_name, listify(metrics)))


def metric_name(metric: Any) -> str:
    """The column of a metric: its `name`, or the name of its function or class."""
    inner = unwrap_partial(metric)
    name: Any = getattr(inner, "name", None)
    return name or getattr(inner, "__name__", type(inner).__name__.lower())


class Meter:
    """Updates one metric batch by batch, and computes its value at the end.

    Args:
        metric: the metric as the user gave it.
        name: its column; by default the metric's own name.
    """

    def __init__(self, metric: Any, name: str | None = None) -> None:
        self.metric, self.name = metric, name or metric_name(metric)

    def reset(self) -> None:
        """Forget everything."""
        self.metric.reset()

    def update(self, place: int, size: int, pred: Any, targets: tuple) -> None:
        """Add a batch.

        Args:
            place: its place in the order of the data.
            size: its number of samples.
            pred, targets: its predictions and targets.
        """
        self.metric.update(_detached(pred), *targets)

    def result(self, sharded: bool) -> float:
        """Return the metric over all batches; if `sharded`, over all ranks, each of which must reach this."""
        if sharded:
            self.combine()
        with warnings.catch_warnings():
            # torchmetrics warns if a rank had no batch, which is allowed here.
            warnings.filterwarnings("ignore", message="The ``compute`` method of metric", category=UserWarning)
            return self.scalar(self.metric.compute())

    def combine(self) -> None:
        """Combine the metric's state with that of the other ranks; every rank must reach this."""

    def scalar(self, value: Any) -> float:
        """Return `value` as a float.

        Raises:
            ValueError: it is not a single number.
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
    """For a function that is a mean over samples: averages its values, weighted by batch size."""

    def reset(self) -> None:
        self.values = HostScalars()
        self.sizes: list[int] = []

    def update(self, place: int, size: int, pred: Any, targets: tuple) -> None:
        """Add the mean of a batch; it stays on the device."""
        value = self.metric(_detached(pred), *targets)
        is_scalar = isinstance(value, Tensor) and value.ndim == 0
        self.values.append(value.detach() if is_scalar else self.scalar(value))
        self.sizes.append(size)
        if not len(self.sizes) % 1024:
            self.values.poll()

    def result(self, sharded: bool) -> float:
        total = sum(value * size for value, size in zip(self.values.all(), self.sizes, strict=True))
        return weighted_mean(total, sum(self.sizes), sharded)


def weighted_mean(total: float, count: float, sharded: bool) -> float:
    """Return total / count, over all ranks if `sharded`; NaN if nothing was counted."""
    if sharded:
        total, count = world.reduce(torch.tensor([total, count], dtype=torch.float64)).tolist()
    return total / count if count else float("nan")


class StatesMeter(Meter):
    """For a `Metric` with declared states: combines them over the ranks."""

    def reset(self) -> None:
        super().reset()
        self.places: dict[str, list] = {}

    def update(self, place: int, size: int, pred: Any, targets: tuple) -> None:
        """Update the metric, and note the place of each new tensor of a 'cat' state."""
        super().update(place, size, pred, targets)
        for name, (_, reduce) in self.metric._states.items():
            if reduce == "cat":
                places = self.places.setdefault(name, [])
                places += [(place, i) for i in range(len(places), len(getattr(self.metric, name)))]

    def combine(self) -> None:
        for name, (_, reduce) in self.metric._states.items():
            value = getattr(self.metric, name)
            if reduce == "cat":
                combined: Any = world.gather_pieces(list(zip(self.places.get(name, []), value, strict=True)))
            else:
                combined = world.reduce(_to_common_shape(torch.as_tensor(value).detach().cpu()), reduce)
            setattr(self.metric, name, combined)


def _to_common_shape(value: Tensor) -> Tensor:
    """Give a state the type and shape it has on the other ranks: a rank without data still has the default."""
    ranks = world.all_gather((value.shape, value.dtype))
    dtype = functools.reduce(torch.promote_types, (dtype for _, dtype in ranks))
    shape = torch.broadcast_shapes(*(shape for shape, _ in ranks))
    return value.to(dtype).expand(shape).contiguous()


class GatheringMeter(Meter):
    """For an object whose states cannot be combined: updates it with the batches of all ranks, in order."""

    def reset(self) -> None:
        self.metric.reset()
        self.batches: list[tuple] = []

    def update(self, place: int, size: int, pred: Any, targets: tuple) -> None:
        self.batches.append((place, map_batch(lambda t: t.detach().cpu(), (pred, *targets))))

    def result(self, sharded: bool) -> float:
        batches = gather_batches(self.batches, sharded=sharded) or []
        for batch in batches:
            self.metric.update(*batch)
        return self.scalar(self.metric.compute()) if batches else float("nan")


class MergingMeter(Meter):
    """For an object that can merge the states of others (torcheval's `merge_state`)."""

    def combine(self) -> None:
        first, *rest = world.all_gather(self.metric)
        self.metric = first.merge_state(rest)


class TorchmetricsMeter(Meter):
    """For a torchmetrics object, whose `compute` communicates by itself."""

    def result(self, sharded: bool) -> float:
        """Return the metric; its states are combined over the ranks only if the data are sharded."""
        if not sharded:
            self.metric.sync_on_compute = False
        try:
            return super().result(sharded)
        finally:
            self.metric.sync_on_compute = True
