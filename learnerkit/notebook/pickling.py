"""The pickling of objects between a notebook's kernel and its workers, by cloudpickle, with tensors stored separately.

The files are in memory where the system allows it. Workers map them, so they share one copy of every tensor until they
write to it. Only the kernel and the processes that it has started read these files.
"""

import importlib
import io
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from torch.utils.hooks import RemovableHandle
from torch.utils.serialization import config

from learnerkit.callback import Callback
from learnerkit.inspection.hooks import Hook
from learnerkit.processes.machine import shared_file
from learnerkit.torch_internals import loader_attributes, optimizer_attributes, parametrized
from learnerkit.utils import replaced

_VALUES = frozenset({type(None), bool, int, float, complex, str, bytes, tuple, frozenset})
"""Types of objects whose identity does not matter."""

SHARED = (type, FunctionType, nn.Module, Optimizer, Callback, Dataset, DataLoader, Hook, RemovableHandle)
"""Types of objects that the kernel and its workers list, so that they are not copied on the way back."""


def numbered(objects: Sequence[Any]) -> dict[int, int]:
    """Return the indices of objects by `id`."""
    return {id(x): i for i, x in enumerate(objects)}


def make_pickler(known: Mapping[int, int]) -> Any:
    """Make a pickler for a reader that has the objects `known`, as `numbered`: these are pickled as their numbers."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        """Pickles objects one after the other, and saves them with the tensors among them."""

        def __init__(self) -> None:
            self._buffer = io.BytesIO()
            super().__init__(self._buffer)
            self.met: dict[int, Any] = {}  # objects of `SHARED` types and trained tensors, by id, in order
            self._tensors: dict[int, tuple[int, Tensor]] = {}  # (number, tensor) by id

        def persistent_id(self, obj: Any) -> int | None:
            self.last = obj  # after an error, this is the object that cannot be pickled
            if type(obj) in _VALUES:
                return None
            if id(obj) in known:
                return known[id(obj)]
            if obj.requires_grad if isinstance(obj, Tensor) else isinstance(obj, SHARED):
                self.met.setdefault(id(obj), obj)  # this also keeps its id from being reused
            if type(obj) not in (Tensor, nn.Parameter) or vars(obj):
                return None
            # Negative numbers stand for tensors.
            return ~self._tensors.setdefault(id(obj), (len(self._tensors), obj))[0]

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, ModuleType) and sys.modules.get(obj.__name__) is obj:  # for example torch.backends.cudnn
                return importlib.import_module, (obj.__name__,)
            if isinstance(obj, CodeType):  # cloudpickle 3.1.3 forgets the code's file, that is, the cell
                return _code_of_file, (*self.dispatch_table[CodeType](obj), obj.co_filename)
            if isinstance(obj, _CACHED) and obj.__module__ == "__main__":  # it pickles itself by its name
                return _cached, (obj.__wrapped__, obj.cache_parameters())
            if isinstance(obj, cached_property):  # it has a lock in Python 3.11
                return cached_property, (obj.func,), {"attrname": obj.attrname}
            if isinstance(obj, RemovableHandle):  # torch cannot read one whose tables of hooks are gone
                hooks, number, others = obj.__getstate__()
                return object.__new__, (type(obj),), (hooks, number, tuple(x for x in others if x is not None))
            if is_lazy(obj):  # torch forgets the type of a parameter without a shape
                return type(obj), (obj.requires_grad, None, obj.data.dtype)
            if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
                names = list[str](vars(obj)["_modules"]["parametrizations"])
                return parametrized, (parametrize.type_before_parametrizations(obj), names), state_of(obj)
            if isinstance(obj, DataLoader) and type(obj).__getstate__ is object.__getstate__:
                return object.__new__, (type(obj),), loader_attributes(obj)
            if isinstance(obj, Optimizer):
                return object.__new__, (type(obj),), state_of(obj)
            return super().reducer_override(obj)

        def save(self) -> tuple[IO[bytes], str]:
            """Save all that has been pickled in a file that exists until it is closed; return the file and its path."""
            file, path = shared_file()
            try:
                tensors = [tensor for _, tensor in self._tensors.values()]
                with replaced(config.save, compute_crc32=False):  # checksums take half of the time
                    torch.save([torch.frombuffer(self._buffer.getbuffer(), dtype=torch.uint8), *tensors], file)
                file.flush()
            except BaseException:
                file.close()
                raise
            return file, path

    return Pickler()


def state_of(obj: Any) -> Any:
    """Return what an object gives to be pickled; of a parametrized module, which refuses, what its own class gives.

    Of an optimizer these are its attributes.
    """
    if isinstance(obj, Optimizer) and type(obj).__getstate__ is Optimizer.__getstate__:
        return optimizer_attributes(obj)
    is_parametrized = isinstance(obj, nn.Module) and parametrize.is_parametrized(obj)
    kind: Any = parametrize.type_before_parametrizations(obj) if is_parametrized else type(obj)
    return kind.__getstate__(obj)


_CACHED = type(lru_cache(len))


def _cached(function: Callable, parameters: dict[str, Any]) -> Any:
    return lru_cache(**parameters)(function)


def _code_of_file(make: Callable[..., CodeType], args: tuple, file: str) -> CodeType:
    "Make a code object whose tracebacks name the file that it comes from."
    return make(*args).replace(co_filename=file)


def pickling_error(obj: Any, known: Mapping[int, int]) -> Exception | None:
    """Return the error that keeps an object from being pickled, if there is one."""
    try:
        make_pickler(known).dump(obj)
    except Exception as e:
        return e
    return None


def read(path: str, known: Sequence[Any], count: int, mapped: bool) -> list[Any]:
    """Read the first `count` objects of the file at `path`.

    Args:
        known: the objects that the pickler knew, in this process.
        mapped: leave the tensors in the file, which then exists as long as they do.
    """
    pickled, *tensors = torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, number: int) -> Any:
            return known[number] if number >= 0 else tensors[~number]

    unpickler = Unpickler(io.BytesIO(pickled.numpy()))
    return [unpickler.load() for _ in range(count)]


def dump_error(error: BaseException) -> bytes:
    """Return the pickled exception, or its parts if its `__init__` takes other arguments; b"" if both fail."""
    for whole in (error, (type(error), error.args, vars(error))):
        with suppress(Exception):
            data = pickle.dumps(whole)  # classes of cells by name: cloudpickle would change the kernel's own
            if str(load_error(data)) == str(error):  # an `__init__` may put its text around the finished one
                return data
    return b""


def load_error(data: bytes) -> BaseException | None:
    """Return the unpickled exception, or `None` if that fails in this process."""
    try:
        error = pickle.loads(data)  # noqa: S301 - from a worker that this process has started
        if isinstance(error, tuple):
            kind, args, attributes = error
            error = kind.__new__(kind, *args)
            vars(error).update(attributes)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None
