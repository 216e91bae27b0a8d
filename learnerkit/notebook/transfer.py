"""The transfer between a notebook's kernel and its workers: of a learner to train, and of the changes that a call made.

The learner is pickled, since its classes and functions may be defined in cells. After the call rank 0 sends back
`learn.state_dict()`, which the kernel's learner loads. The rest comes back by value: attributes of the learner, its
callbacks, metrics, modules, optimizers and classes of cells, and their global variables. Objects that the kernel
already has (classes, functions, modules, parameters, optimizers, callbacks, datasets and loaders) are not copied back,
but sent as their indices in a list that was sent with the call.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import getclosurevars
from types import FunctionType, MethodType, ModuleType
from typing import IO, Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from learnerkit import run_state
from learnerkit.callback import Callback
from learnerkit.callbacks.recorder import TableLogger
from learnerkit.data.order import GENERATORS
from learnerkit.inspection.hooks import Hook
from learnerkit.notebook.pickling import SHARED, make_pickler, numbered, pickling_error, read, state_of
from learnerkit.notebook.settings import get_options, set_options, set_random_states
from learnerkit.state import Learner
from learnerkit.text import in_one_line
from learnerkit.torch_internals import add_typed_sources, hook_tables, own_tensors, typed_sources, unpickled_hooks
from learnerkit.utils import listify, warn

_CONTAINERS = (list, dict, set, deque, Tensor, np.ndarray, *GENERATORS)
"""Types of values that change in place, and are sent back although they are the same objects."""

_OWNERS: tuple = (nn.Module, Optimizer, Callback, Hook, Tensor)
"""Types of objects whose attributes are sent back, wherever the pickler meets them."""


@dataclass
class Call:
    """A call of a learner's method.

    Args:
        learn, method, args, kwargs: the learner, its method, and the arguments.
        options: the arguments of the `DistributedCallback`.
    """

    learn: "Learner"
    method: Callable
    args: tuple
    kwargs: dict[str, Any]
    options: dict[str, Any]


class Received(NamedTuple):
    """A call on a worker, the objects that the kernel has, too, and the attributes of each owner before the call."""

    call: Call
    owners: list[Any]
    others: list[Any]
    before: list[dict[str, Any]]


# The way to the workers


def send(call: Call, random_states: tuple | None) -> tuple[IO[bytes], str, list[Any]]:
    """Write a call for the workers.

    Args:
        random_states: the kernel's; `None`: each worker continues with its own.

    Returns:
        The file, to be closed when they have read it; its path; and the objects of which they then have copies.

    Raises:
        TypeError: an object cannot be pickled; the message names it.
    """
    logger: Any = call.learn.logger
    # A user's own logger is not sent: the workers read a function that sends its rows.
    left_out: list = [] if isinstance(logger, TableLogger) or logger in call.learn.cbs else [logger]
    pickler = make_pickler(numbered(left_out))
    try:
        pickler.dump((random_states, get_options(), typed_sources(), call, list(map(unpickled_hooks, _hooked(call)))))
        owners, others = _shared(call, list(pickler.met.values()))
        pickler.dump((owners, others))
    except Exception as e:
        where, kind = _path_to(pickler.last, call), type(pickler.last).__name__
        raise TypeError(
            f"{where}, a {kind}, cannot be sent to the workers ({e}); open files, connections, locks and the like "
            "cannot travel: make them when they are first used (in __getitem__ or before_fit, say), or leave them out "
            "of the pickle with __getstate__"
            " (errors.html#notebook-pickle)"
        ) from e
    return *pickler.save(), [*owners, *others]


def receive(path: str, log_row: Callable[[list], None]) -> Received:
    """Read a call on a worker, and prepare this process for it.

    Args:
        log_row: the function that sends a row to the user's own logger, if the kernel has one.
    """
    (random_states, options, sources, call, hooks), (owners, others) = read(path, [log_row], 2, mapped=True)
    for x, registered in zip(_hooked(call), hooks, strict=True):
        for name, hook in registered:
            getattr(x, name)(hook)
    # Loader workers pickle these objects by name.
    vars(sys.modules["__main__"]).update({x.__name__: x for x in _cells(others) if x.__name__ == x.__qualname__})
    add_typed_sources(sources)
    set_options(options)
    if random_states is not None:
        set_random_states(random_states)
    dls = call.learn.dls
    if dls._device is not None and dls._device.type != "cpu":
        dls._device = None  # each worker has its own device
    return Received(call, owners, others, list(map(_held, owners)))


def _cells(met: list) -> list:
    return [x for x in met if isinstance(x, type | FunctionType) and x.__module__ == "__main__"]


def _shared(call: Call, met: list) -> tuple[list, list]:
    """Return the objects that the pickler met: those whose attributes are sent back, and the other shared ones."""
    learn = call.learn
    cells, main = _cells(met), vars(sys.modules["__main__"])
    scope = [x for x in cells if isinstance(x, FunctionType) and x.__globals__ is main][:1]
    metrics = learn.metrics.values() if isinstance(learn.metrics, Mapping) else listify(learn.metrics)
    tensors = [t for x in met if isinstance(x, nn.Module) for t in own_tensors(x)]
    owners = [
        *scope, *(x for x in cells if isinstance(x, type)), learn,
        *(x for x in (*metrics, learn.loss_func) if hasattr(x, "__dict__") and not isinstance(x, SHARED)),
        *(x for x in (*met, *tensors) if isinstance(x, _OWNERS) and not is_lazy(x)),
    ]  # fmt: skip
    others = [x for x in (*met, learn.dls, *learn.dls.loaders, *_tables(met)) if not isinstance(x, Tensor)]
    return list({id(x): x for x in owners}.values()), others


def _hooked(call: Call) -> list[nn.Parameter | Optimizer]:
    """Return the parameters of the model and of the loss, and the optimizers: what may have hooks."""
    modules = [x for x in (call.learn.model, call.learn.loss_func) if isinstance(x, nn.Module)]
    return [*(p for module in modules for p in module.parameters() if not is_lazy(p)), *call.learn.opts]


def _tables(objects: list) -> list[dict]:
    """Return the modules' tables of hooks: the handles of hooks belong to these, whatever a call puts into them."""
    return [hooks for x in objects if isinstance(x, nn.Module) for hooks in hook_tables(x)]


def _path_to(culprit: Any, call: Call) -> str:
    """Return the expression that leads from the learner or an argument to an object in it."""
    args = [(f"argument {i + 1}", x) for i, x in enumerate(call.args)]
    paths = [("learn", call.learn), *args, *((f"the argument {name}", x) for name, x in call.kwargs.items())]
    seen = set()
    for where, x in paths:  # the list grows during the loop
        if x is culprit:
            return where
        if id(x) not in seen:
            seen.add(id(x))
            paths += _parts(where, x)
    return "the learner"


def _parts(where: str, x: Any) -> list[tuple[str, Any]]:
    if isinstance(x, dict | list | tuple):
        items = x.items() if isinstance(x, dict) else enumerate(x)
        return [(f"{where}[{k!r}]", v) for k, v in items]
    if isinstance(x, partial):
        return [(where, part) for part in (x.func, x.args, x.keywords)]
    if isinstance(x, MethodType):
        return [(where, x.__func__), (where, x.__self__)]
    is_code = isinstance(x, type | FunctionType)
    if isinstance(x, ModuleType) or (is_code and x.__module__ != "__main__" and "<" not in x.__qualname__):
        return []  # it is pickled by its name
    if isinstance(x, FunctionType):
        used = getclosurevars(x)
        return [(f"{name} (used by {where})", v) for name, v in {**used.globals, **used.nonlocals}.items()]
    owner = x.__name__ if isinstance(x, type) else where
    return [(type(x).__name__, type(x)), *((f"{owner}.{k}", v) for k, v in getattr(x, "__dict__", {}).items())]


# The way back to the kernel


def send_back(received: Received, result: Any) -> tuple[IO[bytes], str, Exception | None]:
    """Write the changes and the result of a call.

    Returns:
        The file; its path; and the error if the result cannot be pickled, in which case only the changes are written.
    """
    learn, known = received.call.learn, numbered([*received.owners, *received.others])
    cbs, learn.cbs = learn.cbs, []  # they come back by their attributes; other ranks may be needed for their states
    state = run_state.state_dict(learn)
    learn.cbs = cbs
    changes, lost = list(_changes(received)), list[str]()
    error = None
    pickler = make_pickler(known)
    try:
        pickler.dump((state, changes, lost, result))
    except Exception:
        if error := pickling_error(result, known):
            error.add_note("what the call returned cannot be sent back to the notebook")
        for x, _, values in changes:
            for name in [name for name, value in values.items() if pickling_error(value, known)]:
                del values[name]
                lost.append(f"{_name(x)}.{name} (cannot be pickled)")
        pickler = make_pickler(known)
        pickler.dump((state, changes, lost, None if error else result))
    return *pickler.save(), error


def _changes(received: Received) -> Iterator[tuple[Any, list[str], dict[str, tuple[bool, Any]]]]:
    """Yield each owner, the names of its removed attributes, and the values that are sent back.

    For callbacks these are all values; for other owners, the values that are another object now, and containers. Each
    value comes with a flag that tells whether it is the same object.
    """
    tables = numbered(_tables(received.owners))
    for x, before in zip(received.owners, received.before, strict=True):
        after = _held(x)
        values = {
            name: (same, {**value} if id(value) in tables else value)  # the table itself would come back by its number
            for name, value in after.items()
            if not (same := value is before.get(name, before))
            or isinstance(x, Callback)
            or isinstance(value, _CONTAINERS)
        }
        yield x, [*before.keys() - after.keys()], values


def bring_back(path: str, learn: "Learner", shared: list[Any]) -> Any:
    """Copy the changes of a call into the kernel's objects, and return the result of the call."""
    ((state, changes, lost, result),) = read(path, shared, 1, mapped=False)
    for x, gone, values in changes:
        owner = sys.modules["__main__"] if isinstance(x, FunctionType) else x
        put, remove = (setattr, delattr) if isinstance(x, type) else (object.__setattr__, object.__delattr__)
        for name in gone:
            with suppress(AttributeError):
                remove(owner, name)
        for name, (same, value) in values.items():
            here = getattr(x, name) if isinstance(x, Tensor) else same and vars(owner).get(name)
            try:
                put(owner, name, run_state.filled(here, value))
            except Exception as e:
                lost.append(f"{_name(x)}.{name} ({in_one_line(e)})")
    try:
        run_state.load_state_dict(learn, state)
    except Exception as e:
        lost.append(f"the state of the run ({in_one_line(e)})")
    if lost:
        warn(f"could not come back from the workers, and stayed what they were: {', '.join(lost)}")
    return result


def _held(x: Any) -> dict[str, Any]:
    """Return the values of an owner that are sent back, by name; for a function, its global variables.

    Values that the object's own `__getstate__` leaves out are left out.
    """
    if isinstance(x, Tensor):
        return {"data": x.detach(), "requires_grad": x.requires_grad}
    if isinstance(x, FunctionType):
        return {k: v for k, v in x.__globals__.items() if not k.startswith("__")}
    if isinstance(x, type):
        return {k: v for k, v in vars(x).items() if not (k.startswith("__") or hasattr(v, "__get__"))}
    state = state_of(x)
    names = {k: v for k, v in getattr(x, "__dict__", {}).items() if not isinstance(state, dict) or k in state}
    return {**names, "__class__": type(x)} if isinstance(x, nn.Module) else names  # a lazy module changes its class


def _name(x: Any) -> str:
    return getattr(x, "__name__", type(x).__name__)
