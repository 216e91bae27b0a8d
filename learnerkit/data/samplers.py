"""What a loader and its samplers carry from one epoch to the next."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from learnerkit.data.lengths import LengthBatches
from learnerkit.data.order import samplers_of
from learnerkit.data.rows import IndexBatches
from learnerkit.data.streams import Numbered

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_WITHOUT = (  # they keep nothing from epoch to epoch but their generators
    BatchSampler, IndexBatches, LengthBatches, RandomSampler, SequentialSampler, SubsetRandomSampler,
    WeightedRandomSampler,
)  # fmt: skip
_SCALARS = (bool, int, float, str, type(None))


class SamplerStates:
    """The random generators of a loader and its samplers, and what samplers of the user's own count or shuffle.

    Of those the attributes are kept that have changed since they were seen first: numbers, texts, and lists and arrays
    of numbers. So what a script sets anew, such as a batch size, stays as it is there.

    Args:
        dl: the user's loader, or a copy of it.
        first: the samplers that were seen before, by id, each with its attributes of then; those of `dl` are added.
    """

    def __init__(self, dl: Any, first: dict[int, tuple[Any, dict[str, Any]]]) -> None:
        self._dataset = getattr(dl, "dataset", None)
        samplers = [s for s in samplers_of(dl) if not isinstance(s, Numbered)]
        values = [getattr(dl, "generator", None), *(x for s in samplers for x in getattr(s, "__dict__", {}).values())]
        self.generators = list({id(x): x for x in values if isinstance(x, GENERATORS)}.values())
        self._samplers = []
        for sampler in samplers:
            if type(sampler) not in _WITHOUT and hasattr(sampler, "__dict__"):
                self._samplers.append(first.setdefault(id(sampler), (sampler, _attributes(sampler, self._dataset))))

    def state(self) -> dict[str, list]:
        """What `load` takes: plain values, tensors and arrays."""
        changed = []
        for sampler, first in self._samplers:
            now = _attributes(sampler, self._dataset)
            changed.append({k: v for k, v in now.items() if k not in first or not _equal(v, first[k])})
        return {"generators": [generator_state(g) for g in self.generators], "attributes": changed}

    def load(self, state: dict[str, list]) -> None:
        """Go on from a state.

        Raises:
            ValueError: it is of a loader with other generators or samplers.
        """
        for name, here, then in (
            ("random generators", self.generators, state["generators"]),
            ("samplers of other classes than torch's", self._samplers, state["attributes"]),
        ):
            if len(here) != len(then):
                raise ValueError(
                    f"the training loader and its samplers have {len(here)} {name} and had {len(then)} when the state "
                    "was saved; give them the same ones"
                )
        for generator, found in zip(self.generators, state["generators"], strict=True):
            set_generator_state(generator, found)
        for (sampler, first), changed in zip(self._samplers, state["attributes"], strict=True):
            for name, value in _copies(first | changed).items():
                _put(sampler, name, value)


def _attributes(sampler: Any, dataset: Any) -> dict[str, Any]:
    """Copies of the attributes that can be kept; a dataset may be a list of numbers too, but it is no state."""
    return _copies({name: x for name, x in vars(sampler).items() if x is not dataset and _is_plain(x)})


def _copies(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _copied(x) for name, x in values.items()}


def _is_plain(x: Any) -> bool:
    if isinstance(x, np.ndarray | Tensor):
        return x.ndim == 1 and x.dtype != object
    if type(x) in (list, tuple):
        parts = x if set(map(type, x)) <= {list, tuple} else [x]
        return all(set(map(type, part)) <= {*_SCALARS} for part in parts)
    if type(x) is dict:
        return all(type(key) in _SCALARS and _is_plain(value) for key, value in x.items())
    return type(x) in _SCALARS


def _copied(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.detach().to("cpu", copy=True)
    if isinstance(x, np.ndarray):
        return x.copy()
    if type(x) in (list, tuple):
        return type(x)(_copied(part) for part in x) if x and type(x[0]) in (list, tuple) else type(x)(x)
    return {key: _copied(value) for key, value in x.items()} if type(x) is dict else x


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray | Tensor) or isinstance(b, np.ndarray | Tensor):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if type(a) is type(b) is dict:
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


def _put(sampler: Any, name: str, value: Any) -> None:
    """Set an attribute, in place where it is a list or an array, as others may have a reference to it."""
    here: Any = getattr(sampler, name, None)
    same_shape = getattr(here, "shape", ()) == getattr(value, "shape", 0)
    if type(here) is type(value) and (same_shape or isinstance(here, list)):
        here[:] = value
    else:
        setattr(sampler, name, value)


def generator_state(generator: Any) -> Any:
    """The state of a random generator, one of `GENERATORS`."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()  # torch's and numpy's old one


def set_generator_state(generator: Any, state: Any) -> None:
    """Put a random generator into a state of `generator_state`."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
