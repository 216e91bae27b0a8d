"""The internals of torchmetrics and torcheval that we rely on: look here when a release of theirs breaks something.

Neither is imported here: an object of theirs exists only if the user has imported the library.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

_REFUSED = {
    "BootStrapper": "draws its samples by chance, others on each process; give the metric inside it",
    "MetricTracker": "holds a metric for each epoch; give the metric inside it: `learn.recorder.values` has its value "
    "in each epoch",
}

_UNDECLARED = ("RootMeanSquaredErrorUsingSlidingWindow", "MemorizationInformedFrechetInceptionDistance")
"""Classes of torchmetrics whose updates set more than the states that they declare, as those of its wrappers do."""


# torchmetrics


def is_torchmetrics(x: Any) -> bool:
    """Tell whether `x` is a `torchmetrics.Metric`."""
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(x, library.Metric)


def refusal(metric: Any) -> str | None:
    """Return why an object of torchmetrics, or one inside it, cannot be a metric of a Learner; `None` if it can be."""
    modules = metric.modules() if isinstance(metric, nn.Module) else ()
    for cls in (cls for module in modules for cls in type(module).__mro__ if _is_own(cls)):
        if cls.__name__ in _REFUSED:
            return f"{cls.__name__} {_REFUSED[cls.__name__]}"
    return None


def members(metric: Any) -> list[tuple[str, Any]] | None:
    """Return the metrics of a torchmetrics collection by their names in it, with its prefix; `None` of anything else.

    Each is updated by itself. The collection would decide by its first batch which metrics share states, and so decide
    otherwise on another rank.
    """
    library = sys.modules.get("torchmetrics")
    is_one = library is not None and isinstance(metric, library.MetricCollection)
    return list(metric.items()) if is_one else None  # Their states are not shared.


def _is_own(cls: type) -> bool:
    return cls.__module__.split(".")[0] == "torchmetrics"


def torchmetrics_in(x: Any) -> list[Any]:
    """Return the torchmetrics objects in an object: itself, in its attributes, in containers."""
    return list({id(metric): metric for metric in _torchmetrics_in(x, depth=4)}.values())


def _torchmetrics_in(x: Any, depth: int) -> Iterator:
    if "torchmetrics" not in sys.modules or not depth:
        return
    if isinstance(x, nn.Module):
        yield from filter(is_torchmetrics, x.modules())
    if isinstance(x, Mapping | list | tuple | set):
        parts = list(x.values()) if isinstance(x, Mapping) else list(x)
    else:
        parts = [] if isinstance(x, Tensor | type | str) else list(getattr(x, "__dict__", {}).values())
    for part in parts[:1000]:
        yield from _torchmetrics_in(part, depth - 1)


def declared_states(metric: Any) -> dict[str, tuple[Any, str | None]]:
    """Return the states of a torchmetrics object: (default, how ranks combine it) by name.

    It is 'sum', 'max', 'min', 'cat' (a list, whose items keep their order), 'same' (a mean, which ranks can combine
    only where no update changes it, as the `data_range` of an image metric), or `None`, which needs the batches.
    """
    from torchmetrics.utilities import dim_zero_cat, dim_zero_mean, dim_zero_sum
    from torchmetrics.utilities.data import dim_zero_max, dim_zero_min

    of_tensors = {dim_zero_sum: "sum", dim_zero_max: "max", dim_zero_min: "min", dim_zero_mean: "same"}
    states: dict[str, tuple[Any, str | None]] = {}
    for name, default in metric._defaults.items():
        reduction = metric._reductions[name]
        if isinstance(default, list):
            states[name] = default, "cat" if reduction in (None, dim_zero_cat) else None
        else:
            states[name] = default, of_tensors.get(reduction)
    return states


def synchronizes_otherwise(metric: Any) -> bool:
    """Tell whether a class combines ranks in another way than its states say: the user's own, or a wrapper."""
    for cls in type(metric).__mro__:
        if cls.__module__.startswith("torchmetrics.wrappers") or (_is_own(cls) and cls.__name__ in _UNDECLARED):
            return True
        if "_sync_dist" in vars(cls) or "sync" in vars(cls):
            return not _is_own(cls)
    return False


def update_count(metric: Any) -> int:
    """Return how many batches a torchmetrics object has seen."""
    return metric._update_count


def note_new_states(metric: Any, updates: int) -> None:
    """Drop a torchmetrics object's cached value, and set its count of updates, after its states were replaced."""
    metric._computed, metric._update_count = None, updates


class HoldsTheWhole:
    """Stands in for `distributed_available_fn` once the states are those of all ranks, so `compute` won't sync again.

    A `reset` of the object, or of a wrapper that keeps its states (`Running`), ends this.

    Args:
        metric: the torchmetrics object.
        owner: the object that holds the states of `metric`, mostly `metric` itself.
        asked: the `distributed_available_fn` that this object replaces.
    """

    def __init__(self, metric: Any, owner: Any, asked: Callable[[], bool]) -> None:
        self.metric = metric
        self.owner = owner
        self.asked = asked
        self.updates = update_count(metric)
        owner._cache = {}  # `reset` sets it to None.

    def __call__(self) -> bool:
        if self.owner._cache is None:
            return self.asked()
        if self.owner is self.metric and update_count(self.metric) != self.updates:
            raise RuntimeError(
                f"{type(self.metric).__name__} holds what all ranks have seen in the last evaluation, and was updated "
                "after it on this one; call its reset() before its first update"
            )
        return False


def hold_the_whole(metrics: list[Any], whole: bool = True) -> None:
    """Keep `compute` of torchmetrics objects from syncing until `reset`; without `whole`, let it sync again."""
    for metric in metrics:
        asked = metric.distributed_available_fn
        if isinstance(asked, HoldsTheWhole):
            asked.owner._cache = None
            metric.distributed_available_fn = asked.asked
    for metric in metrics if whole else ():
        around = (m for m in metrics if m is not metric and m._defaults and any(x is metric for x in m.modules()))
        metric.distributed_available_fn = HoldsTheWhole(metric, next(around, metric), metric.distributed_available_fn)


# torcheval


def is_torcheval(x: Any) -> bool:
    """Tell whether `x` is a `torcheval.metrics.Metric`."""
    library = sys.modules.get("torcheval.metrics")
    return library is not None and isinstance(x, library.Metric)


def merges_any_order(metric: Any) -> bool:
    """Tell whether a torcheval object's `merge_state` gives what one process computes.

    It appends lists in the order of the ranks rather than of the data, and a window is of each rank's last batches.
    """
    defaults = metric._state_name_to_default.values()
    has_window = any(name.startswith("max_num_") for name in vars(metric))
    return all(isinstance(d, Tensor | int | float) for d in defaults) and not has_window
