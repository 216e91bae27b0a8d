"""The states of metrics on several ranks, combined into one."""

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from learnerkit import distributed
from learnerkit.data.batches import gather_nested, on_host
from learnerkit.marks import collective
from learnerkit.metrics import libraries
from learnerkit.metrics.objects import Metric
from learnerkit.values import map_batch, same, tensors_in


class Holder(NamedTuple):
    """An object with declared states.

    Attributes:
        object: the metric, or a metric inside it, that has the states.
        states: (default, how ranks combine it) by name; `None` as the latter: ranks cannot combine it.
    """

    object: Any
    states: dict[str, tuple[Any, str | None]]

    def read(self) -> dict[str, Any]:
        """Return the states, with copies of lists."""
        values = {name: getattr(self.object, name) for name in self.states}
        return {name: list(value) if isinstance(value, list) else value for name, value in values.items()}

    def device(self) -> torch.device:
        """Return the device of the tensors in its states, those in lists first; without any, that of the object."""
        values = list(self.read().values())
        tensors = tensors_in(sorted(values, key=lambda value: not isinstance(value, list)))
        named: Any = getattr(self.object, "device", torch.device("cpu"))
        return next((t.device for t in tensors), named)


def holders_of(metric: Any) -> list[Holder]:
    """Return the objects with declared states in a metric: itself, and for torchmetrics those inside it."""
    if isinstance(metric, Metric):
        return [Holder(metric, metric.__dict__.get("_states", {}))]
    inner = filter(libraries.is_torchmetrics, metric.modules())
    return [Holder(m, libraries.declared_states(m)) for m in inner]


def needs_batches(metric: Any, holders: list[Holder]) -> bool:
    """Tell by its class whether the states of a metric cannot be combined, so that it gets the batches of all ranks."""
    known = {id(holder.object) for holder in holders}
    return (
        any(id(inner) not in known for inner in libraries.torchmetrics_in(metric))
        or any(map(libraries.synchronizes_otherwise, known_torchmetrics(holders)))
        or any(how is None for holder in holders for _, how in holder.states.values())
    )


def known_torchmetrics(holders: list[Holder]) -> list[Any]:
    """Return the holders' objects that are metrics of torchmetrics."""
    return [h.object for h in holders if libraries.is_torchmetrics(h.object)]


# All ranks


@collective
def combine_states(holders: list[Holder], places: dict[tuple[int, str], list], has_seen: bool) -> None:
    """Give the objects the states of all ranks.

    Args:
        holders: the objects, in the same order on every rank.
        places: for each state that is a list, its items' places in the data, by the object's number and the state's
            name.
        has_seen: whether this rank has updated them.
    """
    states = [h.read() for h in holders]
    devices = [h.device() for h in holders]
    lists = {(i, name): states[i].pop(name) for i, name in _list_states(holders)}
    counts = [libraries.update_count(h.object) if libraries.is_torchmetrics(h.object) else 0 for h in holders]
    own = on_host(states), counts
    ranks = [rank for rank in distributed.all_gather(own if has_seen else None) if rank is not None]
    mine = (
        ((key, *place), item)
        for key, found in lists.items()
        for place, item in zip(places.get(key, []), found, strict=True)
    )
    items = gather_nested(mine) or []
    for i, holder in enumerate(holders):
        for name, (default, how) in holder.states.items():
            if how == "cat":
                found = [item for (key, *_), item in items if key == (i, name)]
                setattr(holder.object, name, moved(found, devices[i]))
                continue
            values = [of_rank[i][name] for of_rank, _ in ranks]
            if how != "same":
                present = getattr(holder.object, name)
                device = present.device if isinstance(present, Tensor) else torch.device("cpu")
                setattr(holder.object, name, moved(_combined(values, default, str(how)), device))
            elif not all(same(value, on_host(default)) for value in values):
                raise ValueError(
                    f"the state {name!r} of {type(holder.object).__name__} is a mean, and ranks with means of "
                    "other samples cannot combine them: declare a sum and a count, or take an AccumMetric"
                    " (errors.html#metric-ranks)"
                )
        if libraries.is_torchmetrics(holder.object):
            libraries.note_new_states(holder.object, sum(seen[i] for _, seen in ranks))


def _list_states(holders: list[Holder]) -> list[tuple[int, str]]:
    return [(i, name) for i, h in enumerate(holders) for name, (_, how) in h.states.items() if how == "cat"]


def moved(x: Any, device: torch.device) -> Any:
    """Move nested tensors to a device."""
    return map_batch(lambda t: t.to(device), x)


_TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


@collective
def _combined(values: list, default: Any, how: str) -> Any:
    """Combine the values that one state has on the ranks that have seen data."""
    if not values:
        return copy.deepcopy(default)
    tensors = [torch.as_tensor(value) for value in values]
    total = functools.reduce(_TWO[how], tensors)
    if how == "sum" and len(tensors) > 1 and torch.as_tensor(default).any():
        total = total - (len(tensors) - 1) * torch.as_tensor(default).cpu()  # Each rank has begun with the default.
    return total
