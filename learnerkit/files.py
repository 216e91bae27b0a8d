"""Files of weights: names that stay in their directory, whole writing, safe reading, and what fits a model.

A file is a model's state dict, or a dict of {'model': weights, 'opt': state of the optimizer, 'scaler': state of the
gradient scaler}, of which the last two may be missing. Those of plain PyTorch scripts, which use other names for the
same, are read too.
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
_SCALER_NAMES = {"scale", "_growth_tracker"}
_WRAPPERS = ("module.", "_orig_mod.")  # DataParallel's and DDP's, torch.compile's


@dataclass(frozen=True)
class Saved:
    """What a file holds.

    Args:
        name: of the file, for messages.
        weights: the model's.
        opt: the state of the optimizer, or of several by name; `None` where the file has none.
        scaler: the state of the gradient scaler; `None` where the file has none, or something else by that name.
    """

    name: str
    weights: dict[str, Any]
    opt: dict | None = None
    scaler: dict | None = None


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


def place(file: Any) -> Path | BinaryIO:
    """A path or an open file as it is.

    Raises:
        TypeError: something else.
    """
    if isinstance(file, Path) or hasattr(file, "write") or hasattr(file, "read"):
        return file
    raise TypeError(f"got file={file!r}; it is a name, a pathlib.Path, or a file open in binary mode")


def save_whole(obj: Any, file: Path | BinaryIO) -> None:
    """`torch.save` that leaves either the whole new file or the old one, also when the process is killed.

    Written beside the target, synced, then renamed over it. An open file is just written to.
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
        ValueError: it is damaged, or holds something else, or is open and has been read to its end.
    """
    name = str(file) if isinstance(file, Path) else getattr(file, "name", None) or f"the {type(file).__name__}"
    if isinstance(file, Path) and not file.is_file():
        there = sorted(p.stem for p in file.parent.glob("*.pth")) if file.parent.is_dir() else []
        raise FileNotFoundError(f"there is no file {file}; saved there: {', '.join(there) or 'nothing'}")
    if not isinstance(file, Path) and getattr(file, "seekable", bool)() and _is_at_end(file):
        raise ValueError(f"{name} stands at its end, and an open file is read from where it stands: call file.seek(0)")
    try:
        with warnings.catch_warnings(action="ignore"):  # what is odd about a damaged file is not news
            state = torch.load(file, map_location=device, weights_only=True)
    except Exception as e:  # random bytes bring out a dozen types, from AssertionError to struct.error
        raise ValueError(
            f"{name} is damaged, or not made by Learner.save: {str(e).splitlines()[0] if str(e) else e!r}"
        ) from e
    if not isinstance(state, dict):
        raise ValueError(f"{name} holds a {type(state).__name__}, not the weights of a model")
    weights = _entry(state, _MODEL_NAMES)
    if weights is None:
        return Saved(name, state)
    scaler = _entry(state, ("scaler",))
    if scaler is not None and not scaler.keys() >= _SCALER_NAMES:
        scaler = None
    return Saved(name, weights, _entry(state, _OPT_NAMES), scaler)


def _is_at_end(file: BinaryIO) -> bool:
    at = file.tell()
    end = file.seek(0, os.SEEK_END)
    file.seek(at)
    return 0 < at == end


def _entry(state: dict, names: tuple[str, ...]) -> dict | None:
    return next((state[name] for name in names if isinstance(state.get(name), dict)), None)


def fitted(saved: Saved, model: nn.Module, strict: bool) -> Saved:
    """What a file holds with the model's names for its weights, so that loading them cannot fail half-way.

    Keeps torch's `_metadata`, by which modules know the version of their weights.

    Args:
        saved: the content.
        model: what the weights are for.
        strict: whether the file must have exactly the model's weights.

    Raises:
        ValueError: weights that do not fit; the message has what the file has and the model lacks, and the reverse.
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
        found = ". These ".join(f"{what}: {first_few(names, '; ')}" for what, names in wrong.items() if names)
        raise ValueError(f"{saved.name} does not fit {type(model).__name__}: these {found}")
    return saved
