"""What travels between a notebook's kernel and its workers: a learner to train, and then what the call has changed.

The pickler lists the objects that it meets, so the kernel and each worker have the same list, of their own objects.
Rank 0 looks at them before and after the call. It sends back every attribute and item that is another object by then,
and the contents of lists, tensors, arrays and random generators. An object of the list is sent as its number. The
kernel puts all this into its own objects, so variables of the notebook show it.

The contents of datasets are not listed: they may be large, and loader workers change copies of them anyway.
"""

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from inspect import getclosurevars
from random import Random
from types import FunctionType, MethodType, ModuleType
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from learnerkit import world
from learnerkit.callbacks.recorder import TableLogger
from learnerkit.notebook.pickling import make_pickler, numbered, pickling_error, read
from learnerkit.notebook.settings import get_options, get_random_states, set_options, set_random_states
from learnerkit.torch_internals import add_typed_sources, loader_attributes, typed_sources
from learnerkit.utils import warn

if TYPE_CHECKING:
    from learnerkit.learner import Learner

_RANDOM_GENERATORS: tuple[Any, ...] = (torch.Generator, Random, np.random.BitGenerator)


@dataclass
class Call:
    """A call of a learner's method.

    Args:
        learn, method, args, kwargs: what to call.
        options: those of the `DistributedCallback`.
    """

    learn: "Learner"
    method: Callable
    args: tuple
    kwargs: dict[str, Any]
    options: dict[str, Any]


class Received(NamedTuple):
    """A call on a worker, the objects that the kernel has too, and on rank 0 their contents before the call."""

    call: Call
    objects: list[Any]
    before: list[dict[Any, Any]]


class Removed:
    """Is sent as the value of an attribute or item that no longer exists."""


# To the workers


def send(call: Call, random_states: tuple | None) -> tuple[IO[bytes], str, list[Any]]:
    """Write a call for the workers.

    Args:
        random_states: the kernel's; `None`: each worker goes on with its own.

    Returns:
        The file, to be closed when they have read it; its path; and the objects of which they then have copies.

    Raises:
        TypeError: something cannot be pickled; the message names it.
    """
    logger: Any = call.learn.logger
    # A logger of the user's own stays here: the workers read `None`, and send its rows.
    left_out = [] if isinstance(logger, TableLogger) or logger in call.learn.cbs else [logger]
    given = [*call.learn.dls.loaders, *call.args, *call.kwargs.values()]
    datasets = [x.dataset if isinstance(x, DataLoader) else x for x in given if isinstance(x, DataLoader | Dataset)]
    pickler = make_pickler(numbered(left_out))
    try:
        pickler.dump((datasets, random_states, get_options(), typed_sources()))
        pickler.lists = True
        pickler.dump(call)
        pickler.lists = False
        pickler.dump(pickler.met)
    except Exception as e:
        where, culprit = _find_culprit(call, left_out)
        raise TypeError(
            f"{where}, a {type(culprit).__name__}, cannot be sent to the workers ({e}); open files, connections, locks "
            "and the like cannot travel: make them when they are first used (in __getitem__ or before_fit, say), or "
            "leave them out of the pickle with __getstate__"
            " (errors.html#notebook-pickle)"
        ) from e
    return *pickler.save(), pickler.met


def receive(path: str, log_row: Callable[[list], None]) -> Received:
    """Read a call on a worker, and prepare this process for it.

    Args:
        log_row: sends a row to the user's own logger, if the kernel has one.
    """
    (_, random_states, options, sources), call, objects = read(path, [None], 3, mapped=True)
    cells = [x for x in objects if isinstance(x, type | FunctionType) and x.__module__ == "__main__"]
    # Loader workers pickle these by name.
    vars(sys.modules["__main__"]).update({x.__name__: x for x in cells if x.__name__ == x.__qualname__})
    add_typed_sources(sources)
    set_options(options)
    if random_states is not None:
        set_random_states(random_states)
    learn = call.learn
    if learn.logger is None:
        learn.logger = log_row
    if learn.dls._device is not None and learn.dls._device.type != "cpu":
        learn.dls._device = None  # each worker has its own
    return Received(call, objects, [_contents(x) for x in objects] if world.is_main() else [])


def _find_culprit(call: Call, left_out: list) -> tuple[str, Any]:
    """Return how to get from the learner to the innermost object that cannot be pickled, and that object."""
    known = numbered([call.learn, *left_out])
    where, culprit, seen = "the learner", call.learn, {id(call.learn), id(call.learn.cbs)}
    parts = [*_parts("learn", call.learn), *((f"learn.{cb.name}", cb) for cb in call.learn.cbs)]
    parts += [(f"argument {i + 1}", x) for i, x in enumerate(call.args)]
    parts += [(f"the argument {name}", x) for name, x in call.kwargs.items()]
    while found := next((part for part in parts if id(part[1]) not in seen and pickling_error(part[1], known)), None):
        where, culprit = found
        seen.add(id(culprit))
        parts = _parts(where, culprit)
    return where, culprit


def _parts(where: str, x: Any) -> list[tuple[str, Any]]:
    if isinstance(x, dict):
        return [(f"{where}[{k!r}]", v) for k, v in x.items()]
    if isinstance(x, list | tuple):
        return [(f"{where}[{i}]", v) for i, v in enumerate(x)]
    if isinstance(x, FunctionType):
        used = getclosurevars(x)
        return [(f"{name} (used by {where})", v) for name, v in {**used.globals, **used.nonlocals}.items()]
    if isinstance(x, partial | MethodType):
        inner = (x.func, x.args, x.keywords) if isinstance(x, partial) else (x.__func__, x.__self__)
        return [(where, part) for part in inner]
    owner = x.__name__ if isinstance(x, type) else where
    found = [(f"{owner}.{k}", v) for k, v in getattr(x, "__dict__", {}).items()]
    return [*found, (type(x).__name__, type(x))] if type(x).__module__ == "__main__" else found


# Back to the kernel


def send_back(received: Received, result: Any) -> tuple[IO[bytes], str, Exception | None]:
    """Write what a call has changed and what it returned.

    Returns:
        The file; its path; and the error if the result cannot be pickled, in which case only the changes are written.
    """
    objects, known, random_states = received.objects, numbered(received.objects), get_random_states()
    changes, error = list(_changes(objects, received.before)), None
    lost: list[str] = []
    pickler = make_pickler(known)
    try:
        pickler.dump((changes, lost, random_states, result))
    except Exception:
        if error := pickling_error(result, known):
            error.add_note("what the call returned cannot be sent back to the notebook")
        kept = []
        for number, name, value in changes:
            if pickling_error(value, known) is None:
                kept.append((number, name, value))
            else:
                lost.append(f"{_owner(objects[number])}.{name} (cannot be pickled)")
        pickler = make_pickler(known)
        pickler.dump((kept, lost, random_states, None if error else result))
    return *pickler.save(), error


def _changes(objects: list[Any], contents: list[dict[Any, Any]]) -> Iterator[tuple[int, Any, Any]]:
    """Iterate over (number of an object, name, new value) for all that differs from the former `contents`."""
    for number, (x, before) in enumerate(zip(objects, contents, strict=True)):
        after = _contents(x)
        for name in before | after:
            value = after.get(name, Removed)
            if name not in before or before[name] is not value:
                yield number, name, value


def bring_back(path: str, objects: list[Any]) -> Any:
    """Put what a call has changed into the kernel's objects, and return what the call returned."""
    ((changes, lost, random_states, result),) = read(path, objects, 1, mapped=False)
    users = Counter(_address(x) for x in objects if isinstance(x, Tensor))
    for number, name, value in changes:
        x = objects[number]
        try:
            if isinstance(x, Tensor):
                _set_data(x, value, alone=users[_address(x)] == 1)
            else:
                _change(x, name, value)
        except Exception as e:
            lost.append(f"{_owner(x)}.{name} ({type(e).__name__}: {e})")
    if lost:
        warn(f"could not come back from the workers, and stayed what they were: {', '.join(lost)}")
    set_random_states(random_states)
    return result


def _contents(x: Any) -> dict[Any, Any]:
    """Return what an object holds by name. What can change in place is a new object each time, so it always differs."""
    if isinstance(x, Tensor):
        return {"data": x.detach().requires_grad_(x.requires_grad)}
    if isinstance(x, np.ndarray):
        return {"data": x.view()} if x.flags.writeable else {}
    if isinstance(x, _RANDOM_GENERATORS):
        return {"state": x.__reduce__()[2]}
    if isinstance(x, list | set | deque):
        return {"items": list(x)}
    if isinstance(x, dict):
        return dict(x)
    if isinstance(x, type | FunctionType):
        names = vars(x) if isinstance(x, type) else x.__globals__
        return {k: v for k, v in names.items() if x.__module__ == "__main__" and not k.startswith("__")}
    if isinstance(x, DataLoader):
        return loader_attributes(x)
    return {} if isinstance(x, ModuleType | Dataset) else _attributes(x)


def _attributes(x: Any) -> dict[str, Any]:
    """Return the attributes of an object, in slots too, without those that its own `__getstate__` leaves out."""
    state = object.__getstate__(x)
    own, slots = state if isinstance(state, tuple) else (state, None)
    found = {**(own or {}), **(slots or {})}
    pickled = x.__getstate__() if found else None
    return {k: v for k, v in found.items() if k in pickled} if isinstance(pickled, dict) else found


def _change(x: Any, name: Any, value: Any) -> None:
    """Change one part of an object to what `_contents` has returned for it in the worker."""
    if isinstance(x, np.ndarray):
        x[...] = value
    elif isinstance(x, _RANDOM_GENERATORS):
        x.__setstate__(value)
    elif isinstance(x, list | set | deque):
        x.clear()
        (x.update if isinstance(x, set) else x.extend)(value)
    elif isinstance(x, dict | FunctionType):
        names = x if isinstance(x, dict) else x.__globals__
        names[name] = value
        if value is Removed:
            del names[name]
    elif value is Removed:
        if name in _contents(x):
            (delattr if isinstance(x, type) else object.__delattr__)(x, name)
    else:
        (setattr if isinstance(x, type) else object.__setattr__)(x, name, value)


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else 0


def _set_data(x: Tensor, value: Tensor, alone: bool) -> None:
    """Copy a value into the memory that a tensor has alone, as views in the notebook show that; else replace that."""
    if alone and x.shape == value.shape and x.dtype == value.dtype and x.is_contiguous():
        if not torch.equal(x.cpu(), value):  # else it may lie in memory that is read-only
            x.data.copy_(value)
    else:
        x.data = value.detach().to(x.device)
    x.requires_grad_(value.requires_grad)


def _owner(x: Any) -> str:
    return getattr(x, "__name__", type(x).__name__)
