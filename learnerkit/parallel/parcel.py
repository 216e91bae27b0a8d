"""What travels between a notebook's kernel and its workers: a learner to train, and what it has learnt on the way back.

There it goes by cloudpickle, which takes along what notebook cells define. The way back is another: an object that
came from the kernel is named rather than sent (`_Known`), and so is a class of a cell, as cloudpickle would otherwise
rewrite the user's own. So the live learner gets its weights and plain data back, and stays the same object.

The files lie in memory where the system allows it and are mapped, so all workers share one copy of every tensor until
they write to it. They are read by nobody but the kernel and the processes it has started.
"""

import hashlib
import io
import linecache
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from types import FunctionType, MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from learnerkit import optim, world
from learnerkit.callback import Callback
from learnerkit.callbacks.recorder import TableLogger
from learnerkit.utils import listify, shared_file, warn

if TYPE_CHECKING:
    from learnerkit.learner import Learner

_OWN = ("dls", "model", "loss_func", "opt", "cbs", "logger", "workers", "together")
"""Attributes of the learner that travel in another way, or not at all."""


# Pickling


def _pickling(known: Iterable = (), cells: dict | None = None, left_out: Any = None) -> Any:
    """What `torch.save` takes for its `pickle_module`.

    Args:
        known: what the reader has already, by its place.
        cells: takes up the classes and functions that notebook cells define; `None` on the way back.
        left_out: an object in whose place `None` travels.
    """
    import cloudpickle

    places = {id(x): place for place, x in enumerate(known)}

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if id(obj) in places:
                return _known, (places[id(obj)],)
            if obj is left_out:
                return type(None), ()
            from_cell = isinstance(obj, type | FunctionType) and obj.__module__ == "__main__"
            if from_cell and "<" not in obj.__qualname__:
                if cells is None and isinstance(obj, type):
                    return _of_kernel, (obj.__qualname__,)
                if cells is not None and "." not in obj.__qualname__:
                    cells[obj.__name__] = obj
            if isinstance(obj, DataLoader) and obj._iterator is not None:  # its persistent workers stay where they are
                return object.__new__, (type(obj),), vars(obj) | {"_iterator": None}
            return super().reducer_override(obj)

    return SimpleNamespace(__name__="cloudpickle", Pickler=Pickler)


def _known(place: int) -> Any:
    """Stands for an object that the reader has."""
    raise LookupError(f"object {place} is known only to a reader that was told so")


def _of_kernel(name: str) -> type:
    """Stands for a class that a cell of the notebook defines."""
    found: Any = sys.modules["__main__"]
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _unpickling(known: list) -> Any:
    """What `torch.load` takes for its `pickle_module`; `known` is what `_known` stands for."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return known.__getitem__ if (module, name) == (__name__, "_known") else super().find_class(module, name)

    return SimpleNamespace(__name__="pickle", Unpickler=Unpickler)


def _write(obj: Any, pickling: Any) -> tuple[Any, str]:
    """The file, which lives as long as it is kept, and its path."""
    file, path = shared_file()
    try:
        torch.save(obj, file, pickle_module=pickling)
        file.flush()
    except BaseException:
        file.close()
        raise
    return file, path


def _read(path: str, known: list) -> Any:
    # Mapped privately: pages are shared until a process writes to its own. The file is from the kernel or its worker.
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False, pickle_module=_unpickling(known))


# The way there


class Job(SimpleNamespace):
    """A call of a verb as a worker gets it: learn, verb, args, kwargs, options, known, owners, seeds, sources, rows."""


def send(learn: "Learner", verb: Callable, args: tuple, kwargs: dict, options: dict, keep_seeds: bool) -> tuple:
    """Write a call for the workers.

    Args:
        learn: the learner, with everything that belongs to it.
        verb, args, kwargs: what to call.
        options: of the `DistributedCallback`.
        keep_seeds: the random streams of the workers go on where they are, as this process's have not moved since.

    Returns:
        (file, path, job): the file is to be kept until the workers have read it, the job until they have answered.

    Raises:
        TypeError: something cannot be pickled; the message names it.
    """
    cbs = [cb for x in chain(args, kwargs.values()) for cb in listify(x) if isinstance(cb, Callback)]
    own_logger = None if isinstance(learn.logger, TableLogger) else learn.logger
    job = Job(
        learn=learn, verb=verb, args=args, kwargs=kwargs, options=options, owners=[learn, *learn.cbs, *cbs],
        known=_landmarks(learn, cbs), seeds=None if keep_seeds else _seeds(), rows=own_logger is not None,
        sources=sources(),
    )  # fmt: skip
    cells: dict[str, Any] = {}
    try:
        # What the cells define comes last, when all of it has been met.
        file, path = _write((vars(job), cells), _pickling(cells=cells, left_out=own_logger))
    except Exception as e:
        where, culprit = _culprit(learn, args, kwargs, own_logger)
        raise TypeError(
            f"{where}, a {type(culprit).__name__}, cannot be sent to the workers ({e}); open files, connections, locks "
            "and the like cannot travel: make them when they are first used (in __getitem__ or before_fit, say), or "
            "leave them out of the pickle with __getstate__"
        ) from e
    return file, path, job


def receive(path: str) -> Job:
    """Read a call, on a worker."""
    found, cells = _read(path, [])
    vars(sys.modules["__main__"]).update(cells)  # where what is pickled by its name is looked for, by loaders say
    job = Job(**found)
    linecache.cache.update(job.sources)  # for tracebacks that show the cells' lines
    dls = job.learn.dls
    if dls._device is not None and dls._device.type != "cpu":
        dls._device = None  # each worker has its own
    if job.seeds is not None:
        _set_seeds(job.seeds)
    job.before = [_as_they_are(owner, job.known) for owner in job.owners]
    return job


def _landmarks(learn: "Learner", cbs: list[Callback]) -> list:
    """What the workers may name on the way back."""
    modules = [m for m in (learn.model, learn.loss_func) if isinstance(m, nn.Module)]
    parts = [part for m in modules for part in (*m.modules(), *m.parameters(), *m.buffers())]
    loaders = [dl for dl in learn.dls.loaders if dl is not None]
    datasets = [ds for ds in (getattr(dl, "dataset", None) for dl in loaders) if ds is not None]
    metrics = [*learn.metrics.values()] if isinstance(learn.metrics, dict) else listify(learn.metrics)
    things = [learn, learn.dls, *learn.cbs, *cbs, *parts, *learn.opts, *loaders, *datasets, *metrics]
    return [*things, *{type(x): None for x in things}]


def _culprit(learn: "Learner", args: tuple, kwargs: dict, own_logger: Any) -> tuple[str, Any]:
    """The innermost object that cannot be pickled, and how to get to it from the learner."""
    pickling = _pickling(cells={}, left_out=own_logger)

    def fails(x: Any) -> bool:
        class Pickler(pickling.Pickler):
            def persistent_id(self, obj: Any) -> Any:
                return "" if obj is learn and x is not learn or torch.is_storage(obj) else None

        try:
            Pickler(io.BytesIO()).dump(x)
        except Exception:
            return True
        return False

    where, found, seen = "the learner", learn, set()
    parts: Any = [(f"learn.{k}", v) for k, v in vars(learn).items() if k not in ("cbs", "workers")]
    parts += [(f"learn.{cb.name}", cb) for cb in learn.cbs]
    parts += [(f"argument {i + 1}", v) for i, v in enumerate(args)]
    parts += [(f"the argument {k}", v) for k, v in kwargs.items()]
    while parts:
        culprit = next((part for part in parts if id(part[1]) not in seen and fails(part[1])), None)
        if culprit is None:
            break
        where, found = culprit
        seen.add(id(found))
        parts = list(_parts(where, found))
    return where, found


def _parts(where: str, x: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(x, dict):
        yield from ((f"{where}[{k!r}]", v) for k, v in x.items())
    elif isinstance(x, list | tuple):
        yield from ((f"{where}[{i}]", v) for i, v in enumerate(x))
    elif isinstance(x, FunctionType):
        names = x.__code__.co_freevars
        cells = zip(names, x.__closure__ or (), strict=True)
        yield from ((f"{name} (used by {where})", cell.cell_contents) for name, cell in cells)
        used = (name for name in x.__code__.co_names if name in x.__globals__)
        yield from ((f"{name} (used by {where})", x.__globals__[name]) for name in used)
    elif isinstance(x, type):
        yield from ((f"{x.__name__}.{k}", v) for k, v in vars(x).items())
    elif isinstance(x, partial):
        yield from ((where, part) for part in (x.func, x.args, x.keywords))
    elif isinstance(x, MethodType):
        yield from ((where, part) for part in (x.__func__, x.__self__))
    else:
        yield from ((f"{where}.{k}", v) for k, v in getattr(x, "__dict__", {}).items())
        if type(x).__module__ == "__main__":
            yield type(x).__name__, type(x)


def sources() -> dict[str, tuple]:
    """What was typed rather than read from a file: linecache's entries of the notebook's cells."""
    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}


# The way back


def send_back(job: Job, result: Any) -> tuple[Any, str]:
    """Write what rank 0 has learnt, and what the call returned."""
    learn, known = job.learn, job.known
    changed = []
    for owner, before in zip(job.owners, job.before, strict=True):
        after = {}
        for name, value in _attributes(owner):
            old, print_of_old = before.get(name, (None, ""))
            data = _dump(value, known)
            if _print(data) != print_of_old:
                after[name] = data, value is old
        changed.append(after)
    opts = learn.opt if learn.opt is None or isinstance(learn.opt, dict) else {"": learn.opt}
    found = {
        "tensors": {name: t.detach() for name, t in _tensors(learn)},
        "trainable": {name: t.requires_grad for name, t in _tensors(learn)},
        "opts": opts and {name: opt.state_dict() for name, opt in opts.items()},
        "attributes": changed,
        "seeds": _seeds(),
        "result": result,
    }
    return _write(found, _pickling(known))


def bring_back(path: str, job: Job) -> Any:
    """Take what rank 0 has learnt into the kernel's learner, and return what the call returned."""
    learn = job.learn
    found = _read(path, job.known)
    mine = dict(_tensors(learn))
    strange = [name for name, t in found["tensors"].items() if name not in mine or mine[name].shape != t.shape]
    if strange or len(mine) > len(found["tensors"]):
        names = ", ".join(strange or sorted(mine.keys() - found["tensors"].keys()))
        warn(f"the run has changed the model's structure, which stays as it is here; not taken back: {names}")
    with torch.no_grad():
        for name, t in found["tensors"].items():
            if name not in strange:
                mine[name].copy_(t)
                if mine[name].requires_grad != found["trainable"][name]:
                    mine[name].requires_grad_(found["trainable"][name])
    if found["opts"] is not None:
        learn._make_opt()
        opts = found["opts"]
        optim.load_state(learn.opt, opts if isinstance(learn.opt, dict) else opts[""], learn.model)
    lost = []
    for owner, attributes in zip(job.owners, found["attributes"], strict=True):
        for name, (data, same) in attributes.items():
            try:
                _put(owner, name, _unpickling(job.known).Unpickler(io.BytesIO(data)).load(), same)
            except Exception as e:
                lost.append(f"{type(owner).__name__}.{name} ({type(e).__name__ if data else 'cannot be pickled'})")
    if lost:
        warn(f"could not come back from the workers, and stayed what they were: {', '.join(lost)}")
    _set_seeds(found["seeds"])
    return found["result"]


def _tensors(learn: "Learner") -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of the model and the loss by name."""
    for owner in ("model", "loss_func"):
        module = getattr(learn, owner)
        if isinstance(module, nn.Module):
            for name, t in chain(module.named_parameters(), module.named_buffers()):
                yield f"{owner}.{name}", t


def _attributes(owner: Any) -> list[tuple[str, Any]]:
    own = (*_OWN, *(cb.name for cb in owner.cbs)) if "cbs" in vars(owner) else ("learn",)
    return [(name, value) for name, value in vars(owner).items() if name not in own]


def _dump(value: Any, known: list) -> bytes:
    """The pickled value; nothing if it cannot be pickled."""
    buffer = io.BytesIO()
    try:
        _pickling(known).Pickler(buffer).dump(value)
    except Exception:
        return b""
    return buffer.getvalue()


def _as_they_are(owner: Any, known: list) -> dict[str, tuple[Any, str]]:
    return {name: (value, _print(_dump(value, known))) for name, value in _attributes(owner)}


def _print(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _put(owner: Any, name: str, value: Any, same: bool) -> None:
    """Set an attribute; a list or dictionary that was changed in its place is so here, as cells may hold it too."""
    mine = vars(owner).get(name)
    if same and type(mine) is type(value) is list:
        mine[:] = value
    elif same and type(mine) is type(value) is dict:
        mine.clear()
        mine.update(value)
    else:
        vars(owner)[name] = value


def dump_error(error: BaseException) -> bytes:
    """The pickled exception; nothing if it cannot be pickled."""
    return _dump(error, [])


def load_error(data: bytes) -> BaseException | None:
    """The exception, if it can be had here."""
    try:
        found = _unpickling([]).Unpickler(io.BytesIO(data)).load()
    except Exception:
        return None
    return found if isinstance(found, BaseException) else None


# Random streams


def print_of_seeds() -> str:
    """What tells whether this process's random streams have moved."""
    (torch_state, python, numpy), cuda = _seeds()
    parts = [torch_state.numpy().tobytes(), repr(python), repr(numpy and (numpy[1].tolist(), *numpy[2:]))]
    parts += [b"" if cuda is None else cuda.numpy().tobytes()]
    return hashlib.sha256(b"".join(p if isinstance(p, bytes) else p.encode() for p in parts)).hexdigest()


def _seeds() -> tuple:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return world.seed_states(), cuda


def _set_seeds(seeds: tuple) -> None:
    host, cuda = seeds
    torch.set_rng_state(host[0])
    if torch.cuda.is_available():
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        else:
            torch.cuda.manual_seed(torch.initial_seed())
    world.set_seed_states(host)
