"""Small pure helpers that know nothing of the rest of the library."""

import difflib
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def listify(x: Any) -> list:
    """`None` as an empty list, a list or tuple as a list, anything else as its only item."""
    if x is None:
        return []
    return list(x) if isinstance(x, list | tuple) else [x]


def did_you_mean(name: str, allowed: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean 'x'?` for the nearest allowed name, or nothing."""
    near = difflib.get_close_matches(name, list(map(str, allowed)), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


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


def format_time(seconds: float) -> str:
    """Seconds as `mm:ss`, or `h:mm:ss` from one hour on."""
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60:02d}:{rest % 60:02d}"


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


def plain_name(name: str) -> str:
    """`name` if it is a plain file name, so that it cannot leave the directory it is put in.

    Raises:
        ValueError: separators, `..`, control characters, a leading `-` or more than 200 characters.
    """
    bad = not name or name in (".", "..") or name.startswith("-") or len(name) > 200
    if bad or any(c in "/\\" or ord(c) < 32 or ord(c) == 127 for c in name):
        raise ValueError(
            f"got the file name {name[:80]!r}; a str is a plain name inside the model directory "
            "(no separators, no control characters, no leading '-'); for another place pass a pathlib.Path"
        )
    return name


def save_whole(obj: Any, path: Path) -> None:
    """`torch.save` that leaves either the whole new file or the old one, also when the process is killed.

    Written beside the target, synced, then renamed over it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(obj, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if hasattr(os, "O_DIRECTORY"):  # the rename itself must reach the disk too
        directory = os.open(path.parent, os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


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
