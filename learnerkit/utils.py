"""Small helpers that do not depend on the rest of the library."""

import copy
import os
import resource
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from inspect import ismethod, signature
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from learnerkit.shards import is_shard, own_class
from learnerkit.state import Learner
from learnerkit.text import did_you_mean, escaped
from learnerkit.torch_internals import caller, own_tensors, without_compiler
from learnerkit.values import TensorFunction


def itself(x: Any) -> Any:
    """Return the argument."""
    return x


def listify(x: Any) -> list:
    """Return a list: empty for `None`, of the items of a collection or a generator, or with the argument as one item.

    A str, a mapping, a tensor and a callable (a class, a function, a module) are single items. So is an object that has
    `__iter__` and is neither a collection nor an iterator, as a callback with items of its own may be.
    """
    if x is None:
        return []
    is_item = isinstance(x, str | bytes | Mapping | Tensor) or callable(x) or not isinstance(x, Collection | Iterator)
    return [x] if is_item else list(x)


def unbound(function: Any) -> tuple[Any, dict[str, Any]]:
    """Return the function or module inside partials and compiled wrappers, and the keywords that partials bind."""
    keywords: dict[str, Any] = {}
    while isinstance(function := without_compiler(function), partial):
        keywords = function.keywords | keywords
        function = function.func
    return function, keywords


def owner_of(function: Any) -> Any:
    """Return the object behind a loss: the function or module inside wrappers, or the object whose method this is."""
    inner = unbound(function)[0]
    return inner.__self__ if ismethod(inner) else inner


_P = ParamSpec("_P")
_R = TypeVar("_R")


def accepts(function: Any, *args: Any) -> bool | None:
    """Tell whether a function can be called with these arguments; `None` for one in C that has no signature."""
    try:
        signature(function).bind(*args)
    except TypeError:
        return False
    except ValueError:
        return None
    return True


def suggests_keywords(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function that, for an unknown keyword argument, raises an error with the nearest known one.

    Of arguments that can only be given by name, an error for those that are given without it says so.
    """
    parameters = signature(function).parameters
    takes = list(parameters)
    by_name = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    most = len(takes) - len(by_name)
    bounded = bool(by_name) and not any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return function  # it checks the keywords that it passes on itself

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        check_keywords(function.__qualname__, kwargs, takes)
        if bounded and len(args) > most:
            raise TypeError(
                f"{function.__qualname__}() takes {most} positional argument{'s' * (most > 1)} but {len(args)} were "
                f"given; these are given by name: {'=, '.join(by_name)}="
            )
        return function(*args, **kwargs)

    return call


def check_keywords(who: str, given: Iterable[str], takes: Sequence[str]) -> None:
    """Refuse keywords that `who` does not take, with Python's message and the nearest keyword that it takes."""
    for name in given:
        if name not in takes:
            names = ", ".join(each for each in takes if each != "self") or "none"
            raise TypeError(
                f"{who}() got an unexpected keyword argument {name!r}"
                + (
                    "; class_weights= is an argument of vision_learner, text_learner and tabular_learner; elsewhere "
                    "the loss takes the weights: nn.CrossEntropyLoss(weight=...) (errors.html#class-weights)"
                    if name in ("class_weights", "class_weight") and "class_weights" not in takes
                    else did_you_mean(name, takes) or f"; it takes {names}"
                )
            )


def add_note_once(error: BaseException, note: str) -> None:
    """Add `note` to `error`, unless it has a note of the same kind (with the same first two words)."""
    kind = " ".join(note.split()[:2])
    if not any(n.startswith(kind) for n in getattr(error, "__notes__", ())):
        error.add_note(note)


def warn(message: str) -> None:
    """Warn, with the line outside this package that led here; control characters are escaped."""
    level, ours = 1, ("learnerkit.", "contextlib")  # a context manager of ours is left by the latter
    while (frame := caller(level)).f_back is not None and frame.f_globals.get("__name__", "").startswith(ours):
        level += 1
    warnings.warn(escaped(message), stacklevel=level + 1)


def count_parameters(model: nn.Module) -> str:
    """Describe a model by its class and the number of its parameters."""
    sizes = [(0 if is_lazy(p) else p.numel(), p.requires_grad) for p in model.parameters()]
    total, frozen = sum(size for size, _ in sizes), sum(size for size, trained in sizes if not trained)
    return f"{own_class(model).__name__}, {total:,} parameters" + (f", {frozen:,} of them frozen" if frozen else "")


_OTHERS = (
    "fastai", "lightning", "pytorch_lightning", "lightning_fabric", "transformers", "accelerate", "keras", "ignite",
    "composer", "poutyne", "skorch", "torchtnt",
)  # fmt: skip


def library_of(x: Any) -> str:
    """Return the name of the other training library that an object, a class or a function was made for, or ''."""
    named = x if isinstance(x, type) or hasattr(x, "__qualname__") else type(x)
    packages = [(kind.__module__ or "").partition(".")[0] for kind in getattr(named, "__mro__", [named])]
    return next((package for package in packages if package in _OTHERS), "")


def synced_norms(model: nn.Module) -> list[nn.Module]:
    """Return the norms of a model in training whose passes wait for those of the other ranks."""
    return [m for m in model.modules() if isinstance(m, nn.SyncBatchNorm) and m.training]


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own module inside DataParallel, DistributedDataParallel and compiled wrappers."""
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif (inner := without_compiler(model)) is not model:
            model = inner
        else:
            return model


def overrides(learn: "Learner", *seams: str) -> bool:
    """Tell whether a learner's class, or the present run, replaces one of these methods of the Learner.

    The present run may replace `_step`, if an optimizer needs a closure, and a user may assign `_backward`.
    """
    given = vars(learn).keys() & {"_backward", "_step"}  # other methods may be replaced by `DataParallelCallback`
    for seam in seams:
        versions = [vars(kind)[seam] for kind in type(learn).__mro__ if seam in vars(kind)]
        if seam in given or versions[0] is not versions[-1]:  # the last one is the Learner's
            return True
    return False


def own_loss_arguments(loss_func: Any, model: nn.Module) -> list[str] | None:
    """Return the names of the positional arguments of a model with its own loss; `None` if there is a `loss_func`."""
    if loss_func is not None:
        return None
    try:
        parameters = signature(unwrap(model).forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def spanned_devices(model: nn.Module) -> list[torch.device]:
    """Return the devices of a model that must stay on several, accelerators first; an empty list for other models.

    Such a model was placed by transformers or accelerate, which leave an `hf_device_map`, or has parameters on several
    accelerators.
    """
    maps = [getattr(m, "hf_device_map", None) for m in model.modules()]
    places = [str(place) for each in maps if isinstance(each, Mapping) for place in each.values()]
    names = dict.fromkeys("meta" if place == "disk" else place for place in places)
    devices = [torch.device(int(name) if name.isdigit() else name) for name in names]
    devices = devices or list(dict.fromkeys(p.device for p in model.parameters() if p.device.type not in _HOST))
    return sorted(devices, key=lambda device: device.type in _HOST) if len(devices) > 1 else []


_HOST = ("cpu", "meta")


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of an object, and restore them at the end."""
    before = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def training_modes(model: nn.Module) -> Iterator[None]:
    """Restore the train or eval mode of every module in `model` at the end of the context."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def with_index(device: torch.device) -> torch.device:
    """Return a device as its tensors name it: that of 'cuda' is 'cuda:0', or another that is the current one."""
    return device if device.type == "cpu" or device.index is not None else torch.empty(0, device=device).device


def is_placed(modules: Iterable[nn.Module], device: torch.device) -> bool:
    """Tell whether all tensors of these modules are on this device and have shapes."""
    device = with_index(device)
    for module in modules:
        for t in own_tensors(module):
            if t.device != device or is_lazy(t):
                return False
    return True


def host_copy(t: Tensor) -> Tensor:
    """Return a copy of a tensor on the host. A host-device sync."""
    whole: Any = t.detach()
    if hasattr(whole, "__tensor_flatten__") and not (t.is_nested or is_shard(t)):
        # It is made of other tensors, which the `to` of torchao's 8-bit optimizer states shares with its result.
        names, settings = whole.__tensor_flatten__()
        parts = {name: host_copy(getattr(whole, name)) for name in names}
        return type(whole).__tensor_unflatten__(parts, settings, whole.shape, whole.stride())
    return whole.to("cpu", copy=True)


def restorer(x: Any, keep: TensorFunction = host_copy) -> Callable[[], Any]:
    """Return a function that restores the present values of the tensors in `x`, in place, and returns `x` as it is now.

    Args:
        x: nested containers of tensors and other values.
        keep: the function that copies a tensor.
    """
    if isinstance(x, Tensor):
        values = keep(unexpanded(x))

        def put_back() -> Tensor:
            with torch.no_grad():
                unexpanded(x).copy_(values)
            return x

        return put_back
    if isinstance(x, dict):
        entries = {k: restorer(v, keep) for k, v in x.items()}
        return lambda: {k: entry() for k, entry in entries.items()}
    if type(x) in (list, tuple):
        items = [restorer(v, keep) for v in x]
        return lambda: type(x)(item() for item in items)
    value = copy.deepcopy(x)
    return lambda: value


def unexpanded(x: Tensor) -> Tensor:
    """Return `x` without its expanded (stride 0) dimensions, so that it can be written in place."""
    if x.layout is torch.strided:
        for dim in range(x.ndim):
            if x.stride(dim) == 0 and x.shape[dim] > 1:
                x = x.narrow(dim, 0, 1)
    return x


class PlainLock:
    """A lock that a thread may acquire repeatedly. A copy, also in another process, is a separate lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple:
        return PlainLock, ()


def memory_of(device: torch.device) -> int:
    """Return the bytes of memory of a device; for the host, the bytes that each training process on it may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits, groups = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")], ""
    with suppress(OSError):  # only Linux has control groups
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8")
    for line in groups.splitlines():
        _, kinds, path = line.split(":", 2)
        root, name = ("memory", "memory.limit_in_bytes") if kinds else ("", "memory.max")
        group = Path("/sys/fs/cgroup", root, path.lstrip("/"))
        for folder in (group, *group.parents) if kinds in ("", "memory") else ():
            with suppress(OSError, ValueError):  # the limit may be 'max'
                limits.append(int((folder / name).read_text(encoding="utf-8")))
    shared = min(limits) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)  # the limit of a process, as set by `ulimit -v`
    return shared if limit == resource.RLIM_INFINITY else min(shared, limit)


def free_memory(device: torch.device) -> int:
    """Return the free bytes of memory of a device; for the host, the bytes that this process may still take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        with suppress(OSError):  # only Linux has this file
            taken = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
            limits.append(max(0, limit - taken))
    return min(limits)


def ipython_shell() -> Any:
    """Return IPython's shell, if this process runs in one."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def front_end() -> str:
    """Return what runs this code: 'notebook' (a Jupyter kernel), 'prompt' (python's or IPython's), or '' (a script)."""
    shell = ipython_shell()
    if shell is not None:
        return "notebook" if getattr(shell, "kernel", None) is not None else "prompt"
    return "prompt" if hasattr(sys, "ps1") or sys.flags.interactive else ""
