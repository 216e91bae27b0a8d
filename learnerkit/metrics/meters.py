"""Meters: one interface to metrics of all kinds, batch by batch, on any number of ranks."""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from inspect import signature
from typing import Any, get_origin

import torch
from torch import Tensor

from learnerkit import distributed
from learnerkit.data.batches import gather_nested, on_host, with_rows
from learnerkit.host_scalars import WeighedScalars
from learnerkit.losses import LossFacts
from learnerkit.marks import collective
from learnerkit.metrics import libraries
from learnerkit.metrics.by_name import OWN, OfTorchmetrics
from learnerkit.metrics.combining import combine_states, holders_of, known_torchmetrics, moved, needs_batches
from learnerkit.metrics.functions import SHARES
from learnerkit.metrics.objects import Dice, Metric, metric_name, perplexity
from learnerkit.state import State
from learnerkit.utils import add_note_once, library_of, listify, unbound
from learnerkit.values import describe, map_batch, tensors_in

DEPENDS_ON_CUT = "depends on how the samples are cut into batches"
"""The text of a warning about such a metric."""


def make_meters(metrics: Any, loss_func: Any = None, classes: Any = None, targets: str | None = None) -> list["Meter"]:
    """Make a meter for each metric.

    Args:
        metrics: a function, an object, a subclass of `Metric` or a partial of one, a torchmetrics collection, the name
            of a metric, a list of these, or a dict of them by name.
        loss_func: the learner's, which says how `accuracy`, `Dice` and their like decode predictions.
        classes: the names of the learner's classes, or `None`, for metrics by name.
        targets: the kind of its targets, as `DataLoaders.targets` has it, for these metrics.

    Raises:
        ImportError: the name of a metric of torchmetrics, which is not installed.
        TypeError: something that is not a metric.
        ValueError: two metrics with the same name; the name of no metric, or one of which loss and classes do not say
            what it must know.
    """
    meters = [_make_meter(metric, name, loss_func, classes, targets) for name, metric in _each(metrics)]
    check_columns(meters)
    return meters


def check_columns(meters: Iterable["Meter"]) -> None:
    """Refuse metrics with columns of the same name, or with those that the table has anyway."""
    names = [name for meter in meters for name in meter.columns]
    for name in ("epoch", "train_loss", "valid_loss", "time"):
        if name in names:
            raise ValueError(f"a metric is named {name!r}, a column of the table; name it: metrics={{'name': metric}}")
    repeated = {n for n in names if names.count(n) > 1}
    if repeated:
        raise ValueError(
            f"two metrics are named {sorted(repeated)}; name them by a dict: metrics={{'name': metric, ...}}"
        )


def _each(metrics: Any) -> Iterator[tuple[str | None, Any]]:
    """Yield each metric with the name it was given; those of a collection one by one."""
    for name, metric in metrics.items() if isinstance(metrics, Mapping) else ((None, m) for m in listify(metrics)):
        inner = libraries.members(metric)
        if inner is None:
            yield name, metric
        else:
            yield from (((f"{name}_{each}" if name else each), m) for each, m in inner)


def _make_meter(metric: Any, name: str | None, loss_func: Any, classes: Any, targets: str | None) -> "Meter":
    if isinstance(metric, str):
        if metric not in OWN:
            return NamedMeter(OfTorchmetrics(metric, loss_func, classes, targets), name or metric)
        metric = OWN[metric]
    if isinstance(kind := unbound(metric)[0], type):  # also with options, as in partial(perplexity, axis=1)
        if not issubclass(kind, Metric):
            name = kind.__name__
            raise TypeError(f"got the class {name} as a metric; pass an object of it: {name}(...)")
        metric = metric()
    if isinstance(metric, Metric):
        if type(metric).update is Metric.update or type(metric).compute is Metric.compute:
            raise TypeError(
                f"got the metric {name or metric_name(metric)!r}; a Metric has update(self, pred, *targets), which is "
                "called for each batch, and compute(self), which returns the number at the end (in fastai these are "
                "accumulate(self, learn) and the property `value`)"
            )
        metric.use_loss(loss_func)
    if library_of(type(metric)) == "ignite":  # whose objects have any attribute
        raise TypeError(
            f"got {type(metric).__name__} of ignite as a metric, whose update takes predictions and targets as one "
            "tuple, and whose compute adds up the ranks by itself: take a metric of torchmetrics, or one by its name"
        )
    if why := libraries.refusal(metric):
        raise TypeError(f"got the metric {name or metric_name(metric)!r}: torchmetrics' {why}")
    if libraries.is_torchmetrics(metric) or (isinstance(metric, Metric) and metric.__dict__.get("_states")):
        gathers = distributed.world_size() > 1 and needs_batches(metric, holders_of(metric))
        return GatheringMeter(metric, name) if gathers else StatesMeter(metric, name)
    if all(callable(getattr(metric, part, None)) for part in ("reset", "update", "compute")):
        gathers = libraries.is_torcheval(metric) and not libraries.merges_any_order(metric)
        merges = hasattr(metric, "merge_state") and not gathers
        return MergingMeter(metric, name) if merges else GatheringMeter(metric, name)
    if callable(metric):
        return MeanMeter(metric, name, loss_func)
    raise TypeError(
        f"got the metric {metric!r}; a metric is a function f(pred, *targets) that is a mean over samples, an "
        "AccumMetric, or an object with reset, update and compute"
    )


def metric_names(metrics: Any) -> list[str]:
    """Return the columns of a Learner's metrics."""
    return [name or metric_name(metric) for name, metric in _each(metrics)]


class Meter:
    """Updates one metric batch by batch, and computes its value at the end.

    Args:
        metric: the metric as the user gave it.
        name: its column; by default the metric's own name.

    Attributes:
        columns: the names of its columns: one, or of a metric that computes a dict one for each number in it, which are
            known once it has computed them.
        is_of_tokens: it compares scores with the targets at the same places, and knows of no loss that shifts them.
    """

    def __init__(self, metric: Any, name: str | None = None) -> None:
        self.metric, self.name = metric, name or metric_name(metric)
        inner = unbound(metric)[0]
        self.is_of_tokens = isinstance(inner, perplexity | Dice) or any(inner is known for known in SHARES)
        self.columns, self._prefix = [self.name], f"{name}_" if name else ""

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

    def depends_on_cut(self, size: int, pred: Any, targets: tuple) -> bool:
        """Tell whether the metric would have another value if this batch were cut in two: a host-device sync.

        Args:
            size, pred, targets: as in `update`.
        """
        return False

    @collective
    def row(self, sharded: bool) -> list[float]:
        """Return the value of each column, as `result` computes them."""
        value = self.result(sharded)
        if not isinstance(value, dict):
            return [value] * len(self.columns)  # It is NaN if there are several.
        self.columns = list(value)
        return list(value.values())

    def may_have(self, column: str) -> bool:
        """Tell whether this may be a column of a dict or a vector that the metric has not computed yet."""
        if self.columns != [self.name] or not hasattr(self.metric, "compute"):
            return False
        made = signature(self.metric.compute).return_annotation
        name, _, index = column.rpartition("_")
        return (get_origin(made) or made) is dict or (name == self.name and index.isdecimal())

    def result(self, sharded: bool) -> float | dict[str, float]:
        """Return the metric over all batches; if `sharded`, over all ranks, each of which must reach this.

        The object has the states of all ranks then, until it is reset or updated.
        """
        return self.value(sharded)

    def value(self, sharded: bool) -> float | dict[str, float]:
        """Compute the metric from the states that the object has: if `sharded`, those of all ranks.

        Raises:
            RuntimeError: it communicates by itself.
            ValueError: it is not a single number.
        """
        if distributed.world_size() > 1:
            libraries.hold_the_whole(libraries.torchmetrics_in(self.metric))
        why = "it has the states of all ranks then; leave the communication out"
        alone = distributed.no_collectives(f"compute of the metric {self.name!r}", why) if sharded else nullcontext()
        with alone, warnings.catch_warnings():
            # torchmetrics warns if there was no batch, which is allowed here.
            warnings.filterwarnings("ignore", message="The ``compute`` method of metric", category=UserWarning)
            try:
                made = self.metric.compute()
            except Exception as e:
                add_note_once(e, f"raised by the metric {self.name!r}")
                raise
            return self.numbers(made)

    def state_dict(self) -> State:
        """Return this rank's state of the metric, for a checkpoint in mid-epoch."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restore this rank's state, after a reset."""

    def numbers(self, value: Any) -> float | dict[str, float]:
        """Return `value` as a float, or several numbers by column.

        Those of a dict have its keys, and it may have other entries, such as lists; those of a tensor have their index.

        Raises:
            ValueError: it is neither a single number nor a dict or a tensor (n,).
        """
        if getattr(value, "ndim", 0) == 1 and len(value) > 1:  # also a vector of scikit-learn
            return {f"{self.name}_{i}": each for i, each in enumerate(value.tolist())}
        if not isinstance(value, Mapping):
            return self.scalar(value)
        return {f"{self._prefix}{key}": float(each) for key, each in value.items() if is_number(each)}

    def scalar(self, value: Any) -> float:
        """Return `value` as a float.

        Raises:
            ValueError: it is not a single number.
        """
        value = torch.as_tensor(value) if hasattr(value, "__array__") else value
        if is_number(value):
            return float(value)
        raise ValueError(
            f"metric {self.name!r} returned {describe(value)}; a metric returns a number or a tensor with one element "
            "(take the mean inside it, or give one metric for each value)"
        )


def is_number(value: Any) -> bool:
    """Tell whether a value is a real number, or a tensor with one of them."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return hasattr(value, "__float__")


def _detached(pred: Any) -> Any:
    return pred.detach() if isinstance(pred, Tensor) else map_batch(Tensor.detach, pred)


def _differs(joined: Callable[[list], float], size: int, batch: tuple) -> bool:
    """Tell whether a metric's value for a batch changes if the batch is cut in two.

    Args:
        joined: the metric of a list of (size, batch) pairs.
        size: samples of the batch.
        batch: predictions and targets.
    """
    tensors = list(tensors_in(batch))
    if size < 2 or any(not t.ndim or len(t) != size for t in tensors):
        return False
    at = max(1, size // 3)  # two halves would not show that batches are counted rather than samples
    cut = [(at, map_batch(lambda t: t[:at], batch)), (size - at, map_batch(lambda t: t[at:], batch))]
    try:
        whole, parts = joined([(size, batch)]), joined(cut)
    except Exception:  # it may need more samples than a part has
        return False
    if any(t.is_floating_point() and t.itemsize < 4 for t in tensors) or not math.isfinite(whole + parts):
        return False  # Rounding in half precision hides a difference.
    return not math.isclose(whole, parts, rel_tol=1e-5, abs_tol=1e-6)


class MeanMeter(Meter):
    """A meter of a function that is a mean over samples: averages its values, weighted by batch size.

    The values of `accuracy`, `error_rate` and `top_k_accuracy` are weighted by the number of targets that they count.

    Args:
        metric, name: as in `Meter`.
        loss_func: as in `make_meters`.
    """

    def __init__(self, metric: Any, name: str | None, loss_func: Any) -> None:
        super().__init__(metric, name)
        inner, options = unbound(metric)
        share = next((share for known, share in SHARES.items() if known is inner), None)
        if share is not None:
            share = partial(share, facts=LossFacts(options.pop("loss_func", loss_func)), **options)
        self._share = share

    def reset(self) -> None:
        self._means = WeighedScalars()

    def _weighed(self, size: int, pred: Any, targets: tuple) -> tuple[Any, int | Tensor]:
        "Return the mean of a batch, and its weight."
        if self._share is None:
            return self.metric(pred, *targets), size
        if len(targets) > 1:
            raise ValueError(
                f"{self.name} takes one target, and the batch has {len(targets)}: choose one in a function of your "
                "own, such as `lambda pred, y, z: accuracy(pred, y)`"
            )
        return self._share(pred, *targets)

    def update(self, place: int, size: int, pred: Any, targets: tuple) -> None:
        """Add the mean of a batch; it stays on the device."""
        value, weight = self._weighed(size, _detached(pred), targets)
        is_scalar = isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex()
        self._means.append(value.detach() if is_scalar else self.scalar(value), weight)

    def depends_on_cut(self, size: int, pred: Any, targets: tuple) -> bool:
        def mean(batches: list) -> float:
            pairs = [self._weighed(n, batch[0], batch[1:]) for n, batch in batches]
            return sum(float(value) * float(n) for value, n in pairs if n) / sum(float(n) for _, n in pairs)

        return _differs(mean, size, (_detached(pred), *targets))

    def state_dict(self) -> State:
        return self._means.state_dict()

    def load_state_dict(self, state: State) -> None:
        self._means.extend(**state)

    @collective
    def result(self, sharded: bool) -> float:
        return weighted_mean(*self._means.sums(), sharded)


@collective
def weighted_mean(total: float, count: float, sharded: bool) -> float:
    """Return total / count, over all ranks if `sharded`; NaN if nothing was counted."""
    if sharded:
        total, count = distributed.reduce(torch.tensor([total, count], dtype=torch.float64)).tolist()
    return total / count if count else float("nan")


class GatheringMeter(Meter):
    """A meter of an object whose states cannot be combined: updates it with the batches of all ranks, in order."""

    def reset(self) -> None:
        super().reset()
        self.batches: list[tuple] = []

    def update(self, place: int, size: int, pred: Any, targets: tuple) -> None:
        """Keep a batch on the host."""
        self.batches.append((place, on_host((with_rows(pred, size, True), *(with_rows(y, size) for y in targets)))))

    def state_dict(self) -> State:
        return {"batches": list(self.batches)}

    def load_state_dict(self, state: State) -> None:
        self.batches = list(state["batches"])

    @collective
    def result(self, sharded: bool) -> float | dict[str, float]:
        batches = gather_nested(self.batches) or [] if sharded else self.batches
        self.metric.reset()
        device = getattr(self.metric, "device", None)
        for _, batch in batches:
            if isinstance(device, torch.device):
                batch = moved(batch, device)
            self.metric.update(*batch)
        return self.value(sharded) if batches else float("nan")


class _CombiningMeter(Meter):
    """The base of meters of objects that get the states of all ranks, and those of this rank for further updates."""

    def reset(self) -> None:
        super().reset()
        self._has_seen = False
        self._own: Any = None  # this rank's states, while the object has those of all

    def update(self, place: int, size: int, pred: Any, targets: tuple) -> None:
        """Update the metric."""
        self._put_back()
        super().update(place, size, pred, targets)
        self._has_seen = True

    def state_dict(self) -> State:
        return {"state": self._read(), "seen": self._has_seen}

    def load_state_dict(self, state: State) -> None:
        self._has_seen = state["seen"]
        self._restore(state["state"])

    @collective
    def result(self, sharded: bool) -> float | dict[str, float]:
        self._put_back()
        if sharded and distributed.world_size() > 1:
            self._own = self._read()
            self._combine()
        return self.value(sharded)

    def _put_back(self) -> None:
        if self._own is not None:
            self._restore(self._own)
            self._own = None

    def _read(self) -> Any:
        """Return the object's states."""
        raise NotImplementedError

    def _restore(self, state: Any) -> None:
        """Give the object states that `_read` has returned."""
        raise NotImplementedError

    @collective
    def _combine(self) -> None:
        """Give the object the states of all ranks."""
        raise NotImplementedError


class StatesMeter(_CombiningMeter):
    """A meter of an object with declared states, ours or torchmetrics': combines them over the ranks."""

    def reset(self) -> None:
        super().reset()
        self._holders = holders_of(self.metric)
        self._places: dict[tuple[int, str], list] = {}  # the places of the items of list states
        self._newest: dict[tuple[int, str], Any] = {}  # the last of these items, if it was added in this process
        self._loaded: list[list[str]] = []  # the names of each holder's loaded states that were on an accelerator
        self._device: torch.device | None = None  # of the predictions, to which all this has been moved
        self._of_this_rank()

    def _of_this_rank(self) -> None:
        libraries.hold_the_whole(known_torchmetrics(self._holders), False)

    def update(self, place: int, size: int, pred: Any, targets: tuple) -> None:
        """Update the metric, and note the place of each new item of a list."""
        device = next((t.device for t in tensors_in((pred, targets))), None)
        if device is not None and device != self._device:
            self._follow(device)
        super().update(place, size, pred, targets)
        if distributed.world_size() > 1:
            self._note_places(place)

    def _follow(self, device: torch.device) -> None:
        """Move objects of torchmetrics, which are made on the CPU, and loaded states of an accelerator to a device."""
        for holder, names in zip(self._holders, self._loaded or [[]] * len(self._holders), strict=True):
            if libraries.is_torchmetrics(holder.object) and holder.object.device != device:
                holder.object.to(device)
            for name in names:
                setattr(holder.object, name, moved(getattr(holder.object, name), device))
        self._device = device

    def _note_places(self, place: int) -> None:
        for i, holder in enumerate(self._holders):
            for name in (name for name, (_, how) in holder.states.items() if how == "cat"):
                places, value = self._places.setdefault((i, name), []), getattr(holder.object, name)
                new, newest = len(value) - len(places), self._newest.get((i, name))
                is_list = new >= 0 and isinstance(value, list)
                # torchmetrics moves the items of its lists between devices.
                is_ours = is_list and newest is not None and isinstance(holder.object, Metric)
                if not is_list or (is_ours and value[len(places) - 1] is not newest):
                    raise ValueError(
                        f"metric {self.name!r} cannot be combined over the ranks: an update takes items from {name!r} "
                        f"of {type(holder.object).__name__}, a list that ranks join in the order of the data, or "
                        "replaces them: let it append items alone, or take an AccumMetric (errors.html#metric-ranks)"
                    )
                places += [(place, k) for k in range(new)]
                self._newest[i, name] = value[-1] if value else None

    def depends_on_cut(self, size: int, pred: Any, targets: tuple) -> bool:
        def value(batches: list) -> float:
            twin = copy.deepcopy(self.metric)
            twin.reset()
            for _, batch in batches:
                twin.update(*batch)
            return float(twin.compute())

        return isinstance(self.metric, Metric) and _differs(value, size, (_detached(pred), *targets))

    def state_dict(self) -> State:
        return super().state_dict() | {"places": self._places}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._places, self._newest = state["places"], {}

    def _read(self) -> Any:
        counts = [libraries.update_count(metric) for metric in known_torchmetrics(self._holders)]
        states = [holder.read() for holder in self._holders]
        loaded = [[name for name, x in of.items() if any(not t.is_cpu for t in tensors_in(x))] for of in states]
        return states, counts, loaded

    def _restore(self, state: Any) -> None:
        self._loaded, self._device = state[2] if len(state) > 2 else [], None  # earlier versions wrote two parts
        for holder, states in zip(self._holders, state[0], strict=True):
            for name, value in states.items():
                setattr(holder.object, name, value)
        for metric, count in zip(known_torchmetrics(self._holders), state[1], strict=True):
            libraries.note_new_states(metric, count)
        self._of_this_rank()

    @collective
    def _combine(self) -> None:
        combine_states(self._holders, self._places, self._has_seen)


class NamedMeter(StatesMeter):
    """A meter of a torchmetrics metric that the user has named.

    Args:
        found: the metric, with the function that prepares its inputs.
        name: as in `Meter`.
    """

    def __init__(self, found: OfTorchmetrics, name: str) -> None:
        super().__init__(found.metric, name)
        self._given, self.is_of_tokens = found.given, True

    def update(self, place: int, size: int, pred: Any, targets: tuple) -> None:
        """Update the metric with what it takes."""
        super().update(place, size, *self._given(pred, *targets))


class MergingMeter(_CombiningMeter):
    """A meter of an object that can merge the states of others (torcheval's `merge_state`).

    Its state is that of torcheval, or else its attributes.
    """

    def _read(self) -> Any:
        return self.metric.state_dict() if libraries.is_torcheval(self.metric) else dict(vars(self.metric))

    def _restore(self, state: Any) -> None:
        if libraries.is_torcheval(self.metric):
            _loaded(self.metric, state)
        else:
            vars(self.metric).update(state)

    @collective
    def _combine(self) -> None:
        is_known = libraries.is_torcheval(self.metric)
        mine = on_host(self._own) if is_known else self.metric
        try:
            everyone = distributed.all_gather((self._has_seen, mine))
        except Exception as e:
            if not isinstance(e, RuntimeError):  # which another rank would have caused
                add_note_once(
                    e,
                    f"the metric {self.name!r} goes from rank to rank by pickle, with all its attributes: define its "
                    "class at the top of a module, and keep in it what pickle takes",
                )
            raise
        first, *rest = [state for has_seen, state in everyone if has_seen] or [mine]
        if is_known:
            others = [_loaded(copy.deepcopy(self.metric), state) for state in rest]
            _loaded(self.metric, first).merge_state(others)
        else:
            first = copy.deepcopy(first)
            self._restore(vars(first.merge_state(rest) or first))


def _loaded(metric: Any, state: dict) -> Any:
    """Load states into a torcheval object, on its device, and return it."""
    metric.load_state_dict(moved(state, metric.device))
    return metric
