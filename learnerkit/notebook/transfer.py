"""What travels between a notebook's kernel and its workers: a learner to train, and what has become of it.

There it goes by cloudpickle, which takes along what notebook cells define. The way back is another. While the kernel
pickles, it lists every object with an identity that it meets (`known`), and each worker gets the same list of its own
copies. So rank 0 can say which of them the run has changed, and how, and name the others rather than send them: the
live objects of the kernel get new contents, and stay the same objects, shared by whoever shares them.

The files lie in memory where the system allows it and are mapped, so all workers share one copy of every tensor until
they write to it. They are read by nobody but the kernel and the processes it has started.
"""

import hashlib
import importlib
import io
import linecache
import logging
import os
import pickle
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property, partial
from itertools import chain
from random import Random
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from numpy import ndarray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from learnerkit import world
from learnerkit.callbacks.recorder import TableLogger
from learnerkit.launch.environment import Topology, rank_environment, shared_file
from learnerkit.parallel.drift import digests
from learnerkit.utils import warn

if TYPE_CHECKING:
    from learnerkit.learner import Learner

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, type(...), ModuleType, torch.dtype, torch.device, torch.Size
)  # fmt: skip
_CONTAINERS = (dict, list, set, deque, ndarray, torch.Generator)
_NOT_SENT = ("logger", "_workers", "_agreement", "_dispatch")  # attributes of a learner
_HOOKS = [name for name in vars(nn.Module()) if "hook" in name]


# Pickling


class _Here:
    """Stands in a parcel where the objects begin that the sender remembers."""


class _Bytes:
    """What a storage holds, for one that the reader has already."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage


@cache
def _pickler() -> type:
    """The class of picklers that put the storages of tensors aside; made late, as cloudpickle is imported late."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        """Writes to a buffer; `storages` takes up those of tensors.

        Args:
            buffer: where it writes.
            places: what the reader has already: the places of objects by their id.
            kept: storages that the reader has already, by `_cdata`: the place of a tensor that has it.
            known: on the way there, takes up what is met.
            cells: on the way there, takes up the classes and functions that cells define.
            left_out: an object in whose place `None` travels.
        """

        def __init__(
            self,
            buffer: io.BytesIO,
            places: Mapping[int, int],
            kept: Mapping[int, int] | None = None,
            known: list | None = None,
            cells: dict | None = None,
            left_out: Any = None,
        ) -> None:
            super().__init__(buffer)
            self.places, self.kept, self.known, self.cells, self.left_out = places, kept or {}, known, cells, left_out
            self.storages: list = []
            self._stored: dict[int, int] = {}
            self._met: set[int] | None = None

        def persistent_id(self, obj: Any) -> Any:
            if torch.is_storage(obj):
                storage = obj._untyped_storage if isinstance(obj, torch.storage.TypedStorage) else obj
                dtype = getattr(obj, "dtype", None)
                if storage._cdata in self.kept:
                    return "storage of", self.kept[storage._cdata], dtype
                return "storage", self._put_aside(storage), dtype
            if isinstance(obj, _Bytes):
                return "storage", self._put_aside(obj.storage), None
            if id(obj) in self.places:
                return "known", self.places[id(obj)]
            if obj is _Here:
                self._met = {id(self.known), id(self.cells)}
            elif self._met is not None and id(obj) not in self._met and _has_identity(obj):
                self._met.add(id(obj))
                if not isinstance(obj, type):
                    self._met.add(id(getattr(obj, "__dict__", None)))  # the worker's object gets a copy of this one
                self.known.append(obj)
            return None

        def _put_aside(self, storage: torch.UntypedStorage) -> int:
            if storage._cdata not in self._stored:
                self._stored[storage._cdata] = len(self.storages)
                self.storages.append(storage)
            return self._stored[storage._cdata]

        def reducer_override(self, obj: Any) -> Any:
            if self._met is not None and isinstance(obj, nn.Parameter):
                # It travels as a tensor made for that. The worker's would keep the storage that a parameter had at
                # first, and what becomes of the two may differ.
                reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
                self._met.add(id(reduced[1][0]))
                return reduced
            if obj is self.left_out and obj is not None:
                return type(None), ()
            if isinstance(obj, ModuleType) and sys.modules.get(obj.__name__) is obj:  # torch.backends.cudnn, say
                return importlib.import_module, (obj.__name__,)
            if isinstance(obj, cached_property):  # has a lock in Python 3.11
                return cached_property, (obj.func,), {"attrname": obj.attrname}
            if isinstance(obj, DataLoader) and obj._iterator is not None:  # its persistent workers stay where they are
                return object.__new__, (type(obj),), vars(obj) | {"_iterator": None}
            if isinstance(obj, type | FunctionType) and obj.__module__ == "__main__" and "<" not in obj.__qualname__:
                there = self.cells is not None
                if there and "." not in obj.__qualname__:
                    self.cells[obj.__name__] = obj
                elif not there and isinstance(obj, type):
                    return _of_kernel, (obj.__qualname__,)  # cloudpickle would rewrite the user's own class
            return super().reducer_override(obj)

    return Pickler


def _pickled(obj: Any, places: Mapping[int, int], **how: Any) -> tuple[io.BytesIO, list[Tensor]]:
    """The pickle, and the bytes of the storages it has put aside."""
    buffer = io.BytesIO()
    pickler = _pickler()(buffer, places, **how)
    pickler.dump(obj)
    return buffer, [_bytes_of(storage) for storage in pickler.storages]


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _places(known: list) -> dict[int, int]:
    # In the place of what was left out there is a `None`, which is everywhere.
    return {id(x): place for place, x in enumerate(known) if x is not None}


def _has_identity(obj: Any) -> bool:
    """Whether it is one of those whose contents can be told, and replaced; others are replaced where they are held."""
    if isinstance(obj, (*_PLAIN, tuple, frozenset, Random)):
        return False
    if isinstance(obj, type):
        return obj.__module__ == "__main__"
    if isinstance(obj, FunctionType):
        return obj.__module__ == "__main__" or "<" in obj.__qualname__
    return hasattr(obj, "__dict__") or isinstance(obj, _CONTAINERS) or type(obj).__module__ == "__main__"


def _of_kernel(name: str) -> type:
    """A class that a cell of the notebook defines."""
    found: Any = sys.modules["__main__"]
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _write(obj: Any, places: Mapping[int, int], **how: Any) -> tuple[Any, str]:
    """The file, which lives as long as it is kept, and its path."""
    buffer, bytes_of = _pickled(obj, places, **how)
    file, path = shared_file()
    try:
        torch.save([torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8), *bytes_of], file)
        file.flush()
    except BaseException:
        file.close()
        raise
    return file, path


def _read(path: str, known: list) -> Any:
    # Mapped privately: pages are shared until a process writes to its own.
    data, *bytes_of = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    storages = [t.untyped_storage() for t in bytes_of]

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            kind, place, *about = pid
            if kind == "known":
                return known[place]
            (dtype,) = about
            storage = storages[place] if kind == "storage" else known[place].untyped_storage()
            if dtype is None:
                return storage
            return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)

    return Unpickler(io.BytesIO(data.numpy().tobytes())).load()


# The way there


class Job(SimpleNamespace):
    """A call of a verb: learn, verb, args, kwargs, options, seeds, rows, sources, settings; and known."""


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
    is_own = not isinstance(learn.logger, TableLogger) and learn.logger not in learn.cbs
    job = Job(
        learn=learn, verb=verb, args=args, kwargs=kwargs, options=options, rows=is_own,
        seeds=None if keep_seeds else _seeds(), sources=sources(), settings=_settings(),
    )  # fmt: skip
    # What datasets hold is not remembered: there can be a lot of it, and workers of loaders would change copies anyway.
    datasets = _datasets(learn)
    known: list = []
    cells: dict[str, Any] = {}
    how = {"known": known, "cells": cells, "left_out": learn.logger if is_own else None}
    try:
        # What is collected on the way comes last, when all of it has been met.
        file, path = _write((datasets, _Here, vars(job), known, cells), {}, **how)
    except Exception as e:
        where, culprit = _culprit(learn, args, kwargs, how["left_out"])
        raise TypeError(
            f"{where}, a {type(culprit).__name__}, cannot be sent to the workers ({e}); open files, connections, locks "
            "and the like cannot travel: make them when they are first used (in __getitem__ or before_fit, say), or "
            "leave them out of the pickle with __getstate__"
        ) from e
    job.known = known
    return file, path, job


def receive(path: str) -> Job:
    """Read a call, on a worker."""
    _, _, found, known, cells = _read(path, [])
    vars(sys.modules["__main__"]).update(cells)  # where what is pickled by its name is looked for, by loaders say
    job = Job(**found, known=known)
    linecache.cache.update(job.sources)  # for tracebacks that show the cells' lines
    _apply_settings(job.settings)
    dls = job.learn.dls
    if dls._device is not None and dls._device.type != "cpu":
        dls._device = None  # each worker has its own
    if job.seeds is not None:
        _set_seeds(job.seeds)
    if world.is_main():
        job.before = _states(job)
    return job


def _datasets(learn: "Learner") -> list:
    return [dl.dataset for dl in learn.dls.loaders if isinstance(dl, DataLoader)]


def _culprit(learn: "Learner", args: tuple, kwargs: dict, left_out: Any) -> tuple[str, Any]:
    """The innermost object that cannot be pickled, and how to get to it from the learner."""

    def fails(x: Any) -> bool:
        try:
            _pickled(x, {id(learn): 0}, cells={}, left_out=left_out)
        except Exception:
            return True
        return False

    where, found, seen = "the learner", learn, {id(learn)}
    parts: Any = [(f"learn.{k}", v) for k, v in vars(learn).items() if k not in (*_NOT_SENT, "cbs")]
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
        used = chain(_globals_of(x).items(), _closure_of(x).items())
        yield from ((f"{name} (used by {where})", v) for name, v in used)
    elif isinstance(x, type):
        yield from ((f"{x.__name__}.{k}", v) for k, v in vars(x).items())
    elif isinstance(x, partial):
        yield from ((where, part) for part in (x.func, x.args, x.keywords))
    elif isinstance(x, MethodType):
        yield from ((where, part) for part in (x.__func__, x.__self__))
    else:
        yield from ((f"{where}.{k}", v) for k, v in getattr(x, "__dict__", {}).items() if k != "learn")
        if type(x).__module__ == "__main__":
            yield type(x).__name__, type(x)


# The way back


def send_back(job: Job, result: Any) -> tuple[Any, str, Exception | None]:
    """Write what the run has changed, and what the call returned.

    Returns:
        (file, path, error): the error says that what the call returned cannot be sent; the rest is written.
    """
    changed, lost, kept, places = [], [], {}, _places(job.known)
    for place, after in _states(job).items():
        before, owner = job.before.get(place, {}), job.known[place]
        values = _contents(owner)
        new = {name: values[name] for name, mark in after.items() if mark and mark != before.get(name)}
        if isinstance(owner, Tensor):
            if "storage" in new:
                new.pop("data", None)  # goes along with it
            else:
                kept[owner.untyped_storage()._cdata] = place
        gone = [name for name in before if name not in after]
        closed = [name for name, mark in after.items() if not mark and before.get(name) != mark]
        lost += [f"{type(owner).__name__}.{name} (cannot be pickled)" for name in closed]
        if new or gone:
            changed.append((place, new, gone))
    back = {"changed": changed, "lost": lost, "seeds": _seeds(), "result": result}
    try:
        return *_write(back, places, kept=kept), None
    except Exception as e:
        e.add_note("what the call returned cannot be sent back to the notebook")
        return *_write(back | {"result": None}, places, kept=kept), e


def bring_back(path: str, job: Job) -> Any:
    """Take what the run has changed into the kernel's learner, and return what the call returned."""
    found = _read(path, job.known)
    lost = found["lost"]
    for place, new, gone in found["changed"]:
        for name, value in new.items():
            try:
                _set_contents(job.known[place], name, value)
            except Exception as e:
                lost.append(f"{type(job.known[place]).__name__}.{name} ({type(e).__name__}: {e})")
        for name in gone:
            vars(job.known[place]).pop(name, None)
    if lost:
        warn(f"could not come back from the workers, and stayed what they were: {', '.join(lost)}")
    _set_seeds(found["seeds"])
    return found["result"]


def _states(job: Job) -> dict[int, dict[str, Any]]:
    """Of every known object that can change, what tells whether each part of it has; nothing if it cannot be sent."""
    datasets = set(map(id, _datasets(job.learn)))
    places = _places(job.known)
    watched = {p: x for p, x in enumerate(job.known) if id(x) not in datasets and not isinstance(x, Dataset)}
    found: dict[int, dict[str, Any]] = {}
    for place, x in watched.items():
        if not isinstance(x, Tensor):
            states = {name: _mark(value, places) for name, value in _contents(x).items()}
            if states:
                found[place] = states
    tensors = {p: x for p, x in watched.items() if isinstance(x, Tensor)}
    sharers: dict[int, list[int]] = {}
    for place, t in tensors.items():
        sharers.setdefault(t.untyped_storage()._cdata, []).append(place)
    for (place, t), digest in zip(tensors.items(), digests(list(tensors.values())), strict=True):
        storage = t.untyped_storage()
        # Whose storage it shares, rather than which it has: those of another device are others, and tensors that have
        # exchanged theirs are as before but for what they hold. What holds other bytes alone is written in its place.
        layout = (storage.nbytes(), t.storage_offset(), t.shape, t.stride(), t.dtype, sharers[storage._cdata])
        found[place] = {"data": (digest,), "storage": layout, "requires_grad": (t.requires_grad,)}
    return found


def _contents(x: Any) -> dict[str, Any]:
    """The parts of an object that may change, by name."""
    if isinstance(x, Tensor):
        return {"data": _Bytes(x.untyped_storage()), "storage": x.detach(), "requires_grad": x.requires_grad}
    if isinstance(x, torch.Generator):
        return {"state": x.get_state()}
    if isinstance(x, dict):
        return {"items": list(x.items())}
    if isinstance(x, list | set | deque):
        return {"items": list(x)}
    if isinstance(x, ndarray):
        return {"items": x.view()}
    if isinstance(x, FunctionType):
        return {k: v for k, v in _globals_of(x).items() if not isinstance(v, ModuleType)}
    if isinstance(x, type):
        plain = {k: v for k, v in vars(x).items() if not k.startswith(("__", "_abc"))}
        return {k: v for k, v in plain.items() if not callable(v) and not hasattr(v, "__get__")}
    names = getattr(x, "__dict__", {})
    if isinstance(x, Optimizer):
        return {name: names[name] for name in ("state", "param_groups", "defaults")}
    if isinstance(x, nn.Module):
        return {k: v for k, v in names.items() if k not in _HOOKS}
    if isinstance(x, DataLoader):
        return {k: v for k, v in names.items() if k != "_iterator"}
    return {k: v for k, v in names.items() if not ("cbs" in names and k in _NOT_SENT)}


def _set_contents(x: Any, name: str, value: Any) -> None:
    if isinstance(x, Tensor) and name == "data":
        _bytes_of(x.untyped_storage()).copy_(_bytes_of(value))
    elif isinstance(x, Tensor) and name == "storage":
        x.data = value.to(x.device)
    elif isinstance(x, Tensor):
        x.requires_grad_(value)
    elif isinstance(x, torch.Generator):
        x.set_state(value)
    elif isinstance(x, dict | set):
        x.clear()
        x.update(dict(value) if isinstance(x, dict) else value)  # a Counter would count pairs
    elif isinstance(x, ndarray):
        x[...] = value
    elif isinstance(x, list):
        x[:] = value
    elif isinstance(x, deque):
        x.clear()
        x.extend(value)
    elif isinstance(x, FunctionType):
        x.__globals__[name] = value
    elif isinstance(x, type):
        setattr(x, name, value)
    else:
        vars(x)[name] = value


def _mark(value: Any, places: Mapping[int, int]) -> str:
    """What tells whether a value has changed; nothing if it cannot be pickled."""
    if type(value) in (bool, int, float, str, type(None)):
        return f"{type(value).__name__} {value!r}"
    if id(value) in places:
        return f"known {places[id(value)]}"
    if type(value) is list and not value:  # hooks of modules, say, of which there are thousands
        return "[]"
    try:
        buffer, bytes_of = _pickled(value, places)
    except Exception:
        return ""
    return hashlib.sha256(buffer.getvalue()).hexdigest() + (repr(digests(bytes_of)) if bytes_of else "")


def _names_in(code: CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _globals_of(f: FunctionType) -> dict[str, Any]:
    """The globals that a function of a cell uses, by name."""
    if f.__module__ != "__main__":
        return {}
    return {name: f.__globals__[name] for name in sorted(_names_in(f.__code__)) if name in f.__globals__}


def _closure_of(f: FunctionType) -> dict[str, Any]:
    return {n: cell.cell_contents for n, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)}


# Errors and their sources


def sources() -> dict[str, tuple]:
    """What was typed rather than read from a file: linecache's entries of the notebook's cells."""
    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}


def dump_error(error: BaseException) -> bytes:
    """The pickled exception; nothing if it cannot be pickled."""
    try:
        buffer, _ = _pickled(error, {})
    except Exception:
        return b""
    return buffer.getvalue()


def load_error(data: bytes) -> BaseException | None:
    """The exception, if it can be had here."""
    try:
        found = pickle.loads(data)  # noqa: S301 - from a worker that this process has started
    except Exception:
        return None
    return found if isinstance(found, BaseException) else None


# What is the process's


def _settings() -> dict[str, Any]:
    """What a notebook sets for the whole process and training heeds."""
    return {
        "warnings": list(warnings.filters),
        "logging": logging.getLogger().level,
        "dtype": torch.get_default_dtype(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        ),
        "matmul": torch.get_float32_matmul_precision(),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32),
    }  # fmt: skip


def surroundings() -> tuple[str, list[str], dict[str, str]]:
    """Where the kernel is: its folder, its path of modules and its environment."""
    return os.getcwd(), [p for p in sys.path if isinstance(p, str)], dict(os.environ)


def go_where(folder: str, path: list[str], environ: dict[str, str]) -> None:
    """Have a worker be where the kernel is."""
    os.chdir(folder)
    sys.path[:] = path
    topology = Topology(world.world_size(), int(os.environ["MASTER_PORT"]))
    os.environ.update(rank_environment(environ, topology, world.rank(), os.environ.get("CUDA_VISIBLE_DEVICES")))


def _apply_settings(found: Mapping[str, Any]) -> None:
    warnings.filters[:] = found["warnings"]
    logging.getLogger().setLevel(found["logging"])
    torch.set_default_dtype(found["dtype"])
    enabled, warn_only = found["deterministic"]
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    torch.set_float32_matmul_precision(found["matmul"])
    enabled, check_nan = found["anomaly"]
    torch.set_anomaly_enabled(enabled, check_nan)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = found["cudnn"]


def seeds_fingerprint() -> str:
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
    world.set_seed_states(host)
    if torch.cuda.is_available():
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        else:
            torch.cuda.manual_seed(torch.initial_seed())
