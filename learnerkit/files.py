"""Files of weights: checked names, atomic writing, safe reading, and the check that a file fits a model.

A file is a model's state dict, or a dict of {'model': weights, 'opt': state of the optimizer, 'scaler': state of the
gradient scaler}, of which the last two may be missing. Files of plain PyTorch scripts, which use other keys for the
same content, can be read too.
"""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from learnerkit.text import first_few

File = str | Path | BinaryIO

_MODEL_NAMES = ("model", "state_dict", "model_state_dict")
_OPT_NAMES = ("opt", "optimizer", "optimizer_state_dict")
_WRAPPERS = ("module.", "_orig_mod.")  # DataParallel's and DDP's, torch.compile's


@dataclass(frozen=True)
class Saved:
    """The content of a file.

    Args:
        name: the file's name, for messages.
        weights: the model's state dict.
        opt: the state of the optimizer, or of several by name; `None` if the file has none.
        scaler: the state of the gradient scaler; `None` if the file has none, or something else under that key.
    """

    name: str
    weights: dict[str, Any]
    opt: dict | None = None
    scaler: dict | None = None


def plain_name(name: str) -> str:
    """Return `name` if it is a plain file name, which cannot lead out of a directory.

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


def path_or_file(file: Any) -> Path | BinaryIO:
    """Return a path or an open file as it is.

    Raises:
        TypeError: something else.
    """
    if isinstance(file, Path) or hasattr(file, "write") or hasattr(file, "read"):
        return file
    raise TypeError(f"got file={file!r}; it is a name, a pathlib.Path, or a file open in binary mode")


def save_whole(obj: Any, file: Path | BinaryIO) -> None:
    """Save like `torch.save`, but atomically: a killed process leaves either the whole new file or the old one.

    The file is written beside the target, synced, and renamed over it. An open file is just written to.
    """
    if not isinstance(file, Path):
        torch.save(obj, file)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as opened:
            torch.save(obj, opened)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    if hasattr(os, "O_DIRECTORY"):  # the rename itself must reach the disk too
        directory = os.open(file.parent, os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def read(file: Path | BinaryIO, device: Any) -> Saved:
    """Read a file onto a device.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, has other content, or is open and has been read to its end.
    """
    name = str(file) if isinstance(file, Path) else getattr(file, "name", None) or f"the {type(file).__name__}"
    if isinstance(file, Path) and not file.is_file():
        there = sorted(p.stem for p in file.parent.glob("*.pth")) if file.parent.is_dir() else []
        raise FileNotFoundError(f"there is no file {file}; saved there: {', '.join(there) or 'nothing'}")
    if not isinstance(file, Path) and getattr(file, "seekable", bool)() and _is_at_end(file):
        raise ValueError(f"{name} stands at its end, and an open file is read from where it stands: call file.seek(0)")
    try:
        with warnings.catch_warnings(action="ignore"):  # of a damaged file, for which there is an error
            state = torch.load(file, map_location=device, weights_only=True)
    except Exception as e:  # random bytes cause a dozen types of errors, from AssertionError to struct.error
        raise ValueError(
            f"{name} is damaged, or not made by Learner.save: {str(e).splitlines()[0] if str(e) else e!r}"
        ) from e
    if not isinstance(state, dict):
        raise ValueError(f"{name} holds a {type(state).__name__}, not the weights of a model")
    weights = _entry(state, _MODEL_NAMES)
    if weights is None:
        return Saved(name, state)
    scaler = _entry(state, ("scaler",)) or {}
    is_scaler = scaler.keys() >= {"scale", "_growth_tracker"}
    return Saved(name, weights, _entry(state, _OPT_NAMES), scaler if is_scaler else None)


def _is_at_end(file: BinaryIO) -> bool:
    at = file.tell()
    end = file.seek(0, os.SEEK_END)
    file.seek(at)
    return 0 < at == end


def _entry(state: dict, names: tuple[str, ...]) -> dict | None:
    return next((state[name] for name in names if isinstance(state.get(name), dict)), None)


def fitted(saved: Saved, model: nn.Module, strict: bool) -> Saved:
    """Check that a file fits a model, so that loading cannot fail half-way, and remove wrappers' prefixes from names.

    torch's `_metadata`, which has the versions of the modules, is kept.

    Args:
        strict: whether the file must have exactly the model's weights.

    Raises:
        ValueError: weights that do not fit; the message says which are missing and which are surplus.
    """
    own, weights = model.state_dict(), saved.weights
    for prefix in _WRAPPERS * 2:  # they may be nested
        if weights and all(k.startswith(prefix) for k in weights) and not all(k.startswith(prefix) for k in own):
            consume_prefix_in_state_dict_if_present(weights, prefix)
    shapes = [
        f"{k}: {tuple(v.shape)} in the file, {tuple(own[k].shape)} in the model"
        for k, v in weights.items()
        if isinstance(v, Tensor) and isinstance(own.get(k), Tensor) and v.shape != own[k].shape
    ]
    missing, surplus = [k for k in own if k not in weights], [k for k in weights if k not in own]
    none_fits = bool(own) and len(missing) == len(own)
    wrong = {
        "differ in shape": shapes,
        "are not in the file": missing if strict or none_fits else [],
        "are not in the model": surplus if strict or none_fits else [],
    }
    if any(wrong.values()):
        problems = ". These ".join(f"{what}: {first_few(names, '; ')}" for what, names in wrong.items() if names)
        raise ValueError(f"{saved.name} does not fit {type(model).__name__}: these {problems}")
    return saved
