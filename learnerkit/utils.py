"""Small pure helpers that know nothing of the rest of the library."""

import difflib
import sys
import warnings
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from typing import Any
from unicodedata import combining, east_asian_width

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter


def listify(x: Any) -> list:
    """`None` as an empty list, a collection or a generator as a list, anything else as its only item.

    A str, a mapping, a tensor and whatever can be called (a class, a function, a module) are items.
    """
    if x is None:
        return []
    is_item = isinstance(x, str | bytes | Mapping | Tensor) or callable(x) or not isinstance(x, Iterable)
    return [x] if is_item else list(x)


def did_you_mean(name: str, allowed: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean 'x'?` for the nearest allowed name, or nothing."""
    near = difflib.get_close_matches(name, list(map(str, allowed)), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def first_few(names: Iterable[Any], joint: str = ", ", n: int = 5) -> str:
    """The first few of some names, and how many more there are."""
    names = list(map(str, names))
    return joint.join(names[:n]) + (f" and {len(names) - n} more" if len(names) > n else "")


def add_note_once(error: BaseException, note: str) -> None:
    """Add `note` to `error` unless a note of the same kind (the same first two words) is there already."""
    kind = " ".join(note.split()[:2])
    if not any(n.startswith(kind) for n in getattr(error, "__notes__", ())):
        error.add_note(note)


def warn(message: str) -> None:
    """Warn, and name the line outside of this package that led here rather than one of its own."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("learnerkit."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def describe(x: Any) -> str:
    """A value's type and shape in a few words, for error messages."""
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} tensor of shape {tuple(x.shape)}"
    if isinstance(x, Mapping):
        return "{" + ", ".join(f"{k!r}: {describe(v)}" for k, v in x.items()) + "}"
    if isinstance(x, list | tuple):
        return "(" + ", ".join(map(describe, x)) + ")"
    return type(x).__name__


def count_parameters(model: nn.Module) -> str:
    """A model's class and the number of its parameters, for a person."""
    sizes = [(0 if isinstance(p, UninitializedParameter) else p.numel(), p.requires_grad) for p in model.parameters()]
    frozen = sum(size for size, trained in sizes if not trained)
    return f"{type(model).__name__}, {sum(size for size, _ in sizes):,} parameters" + (
        f", {frozen:,} of them frozen" if frozen else ""
    )


_OTHERS = (
    "fastai", "lightning", "pytorch_lightning", "lightning_fabric", "transformers", "accelerate", "keras", "ignite",
    "composer", "skorch", "torchtnt",
)  # fmt: skip


def library_of(x: Any) -> str:
    """The training library that an object, a class or a function was made for, if it is not this one; else ''."""
    known = x if isinstance(x, type) or hasattr(x, "__qualname__") else type(x)
    modules = [kind.__module__ for kind in getattr(known, "__mro__", [known])]
    found = [module.partition(".")[0] for module in modules if module]
    return next((name for name in found if name in _OTHERS), "")


def format_time(seconds: float) -> str:
    """Seconds as `mm:ss`; below a minute with tenths, `00:ss.t`; from one hour on `h:mm:ss`."""
    tenths = round(seconds * 10)
    if tenths < 600:
        return f"00:{tenths // 10:02d}.{tenths % 10}"
    hours, rest = divmod(tenths // 10, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60:02d}:{rest % 60:02d}"


def columns(text: str) -> int:
    """How many columns of a terminal a text takes: wide characters (Chinese, Japanese, Korean) take two."""
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside DataParallel, DistributedDataParallel and compiled wrappers."""
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):  # torch.compile
            model = model._orig_mod
        else:
            return model


@contextmanager
def training_modes(model: nn.Module):
    """Give every sub-module of `model` its train or eval mode back at the end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def ipython_shell() -> Any:
    """IPython's shell, if this process runs in one."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def front_end() -> str:
    """Where a person types: 'notebook' (a Jupyter kernel), 'prompt' (python's or IPython's), or '' in a script."""
    shell = ipython_shell()
    if shell is not None:
        return "notebook" if getattr(shell, "kernel", None) is not None else "prompt"
    return "prompt" if hasattr(sys, "ps1") or sys.flags.interactive else ""
