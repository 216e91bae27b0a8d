"""Files of weights: checked names, atomic writing, safe reading, and the check that a file fits a model.

A file is a model's state dict, or a dict of {'model': weights, 'opt': state of the optimizer, 'scaler': state of the
gradient scaler}, of which the last two may be missing. Files of plain PyTorch scripts, which use other keys for the
same content, can be read too. A file whose name ends in '.safetensors' has the weights alone.
"""

import errno
import os
import re
import secrets
import shutil
import time
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from learnerkit import tensor_files
from learnerkit.text import first_few, printable

File = str | Path | BinaryIO


class CheckpointError(ValueError, RuntimeError):
    """A checkpoint or a file of weights is damaged, does not fit, or cannot be written; the text says which and why.

    The text is safe to print, whatever names a file has.
    """

    def __init__(self, text: str = "") -> None:
        super().__init__(printable(str(text), 4000))


SAFETENSORS = ".safetensors"
_STARTED = time.time()

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

    Raises:
        CheckpointError: the state of the gradient scaler is not one.
    """

    name: str
    weights: dict[str, Any]
    opt: dict | None = None
    scaler: dict | None = None

    def __post_init__(self) -> None:
        scaler = {} if self.scaler is None else self.scaler
        if not isinstance(scaler, dict) or not all(type(value) in (int, float) for value in scaler.values()):
            raise CheckpointError(f"{self.name} is damaged: the state of its gradient scaler is not one of numbers")


def plain_name(name: str, directory: str = "the model directory") -> str:
    """Return `name` if it is a plain file name, which cannot lead out of a directory (so called in the error).

    Raises:
        ValueError: separators, `..`, control characters, a leading `-` or more than 200 characters.
    """
    bad = not name or name in (".", "..") or name.startswith("-") or len(name) > 200
    if bad or any(c in "/\\" or ord(c) < 32 or ord(c) == 127 for c in name):
        raise ValueError(
            f"got the file name {name[:80]!r}; a plain name inside {directory} has no separators, no control "
            "characters and no leading '-'; for another place give a path"
        )
    return name


def name_or_path(name: str | Path, directory: str = "the model directory") -> str | Path:
    """Return a plain name inside a directory (so called in the error) as it is, and a path as a `Path`.

    A str with a separator is a path. One with `..` is refused: it may have been put together of names from elsewhere.

    Raises:
        ValueError: neither, or a str with `..` in it.
    """
    if isinstance(name, Path) or not {"/", os.sep} & set(name):
        return name if isinstance(name, Path) else plain_name(name, directory)
    path = Path(name).expanduser()
    if ".." in path.parts or not name.isprintable():
        raise ValueError(
            f"got the path {name[:80]!r}; one that is given as a str has no '..' and no control characters, so that no "
            "part of it leads elsewhere; pass a pathlib.Path if it is meant"
        )
    return path


def path_or_file(file: Any) -> Path | BinaryIO:
    """Return a path or an open file as it is.

    Raises:
        TypeError: something else.
    """
    if isinstance(file, Path) or hasattr(file, "write") or hasattr(file, "read"):
        return file
    raise TypeError(f"got file={file!r}; it is a name, a path, or a file open in binary mode")


def save_whole(obj: Any, file: Path | BinaryIO) -> None:
    """Save like `torch.save`, but atomically: a killed process leaves either the whole new file or the old one.

    The file is written beside the target, synced, and renamed over it. An open file is just written to.

    Raises:
        CheckpointError: the file cannot be written, for want of space or rights; the old one is as it was.
    """
    if not isinstance(file, Path):
        torch.save(obj, file)
        return
    with replacing(file) as temporary, open(temporary, "xb") as opened:
        torch.save(obj, opened)
        opened.flush()
        os.fsync(opened.fileno())


def save_weights(weights: Mapping[str, Any], file: Path, notes: Mapping[str, str] | None = None) -> None:
    """Save weights in the safetensors format, which other tools read, as atomically as `save_whole`.

    Tied weights are in the file once, as `safetensors.torch.save_model` has them.

    Args:
        weights: a state dict.
        file: where to.
        notes: more for the file's header.

    Raises:
        CheckpointError: the file cannot be written, or there is more than tensors.
    """
    for name, value in weights.items():
        if why := tensor_files.why_not(value):
            raise CheckpointError(
                f"{name} is {why}, and a .safetensors file has plain tensors alone: save to a name that ends in .pth"
            )
    kept, own_notes = tensor_files.without_tied(weights, getattr(weights, "_metadata", None) or {})
    tensors = {name: tensor_files.on_host(value) for name, value in kept.items()}
    pieces = tensor_files.content(tensors, own_notes | dict(notes or {}))
    with replacing(file) as temporary:
        tensor_files.write(temporary, pieces)


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A name beside `file` to write to, which then replaces it."""
    temporary = temporary_name(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        remove_left_over(file.parent, _STARTED, file.name)
        yield temporary
        os.replace(temporary, file)
        sync_directory(file.parent)
    except OSError as e:
        raise CheckpointError(f"{file} cannot be written: {e}") from e
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync(file: Path) -> None:
    """Wait until a file is on disk."""
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())


def temporary_name(path: Path) -> Path:
    """A new name beside `path`, for what is not whole yet."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def remove_left_over(folder: Path, before: float, name: str = "") -> None:
    """Remove what runs that were killed have left under temporary names.

    Args:
        folder: where to look.
        before: when this run has started; what is younger may belong to another one, which is at work.
        name: of the file in whose place it was to come; by default any.
    """
    for path in folder.iterdir():
        found = re.fullmatch(r"\.(.+)\.[0-9a-f]{8}\.tmp", path.name)
        if not found or name not in ("", found[1]):
            continue
        with suppress(OSError):
            is_folder = path.is_dir() and not path.is_symlink()
            if max(p.lstat().st_mtime for p in (path, *(path.iterdir() if is_folder else ()))) < before:
                remove(path)


def remove(path: Path) -> None:
    """Remove a file, or a directory with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sync_directory(folder: Path) -> None:
    """Wait until the names in a directory are on disk, where the file system can be asked to."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    opened = os.open(folder, os.O_DIRECTORY)
    try:
        os.fsync(opened)
    except OSError as e:
        if e.errno not in (
            errno.EINVAL,
            errno.ENOTSUP,
            errno.ENOSYS,
        ):  # as CIFS and FUSE say; renames are whole there too
            raise
    finally:
        os.close(opened)


def read(file: Path | BinaryIO, device: Any) -> Saved:
    """Read a file onto a device.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is damaged, or has other content.
        ValueError: it is open and has been read to its end.
    """
    name = str(file) if isinstance(file, Path) else getattr(file, "name", None) or f"the {type(file).__name__}"
    if isinstance(file, Path) and not file.is_file():
        found = (p for p in file.parent.iterdir() if p.suffix in (".pth", SAFETENSORS)) if file.parent.is_dir() else ()
        there, name = sorted(p.name for p in found), printable(str(file), 1000)
        raise FileNotFoundError(f"there is no file {name}; saved there: {first_few(there, n=20) or 'nothing'}")
    if not isinstance(file, Path) and getattr(file, "seekable", bool)() and _is_at_end(file):
        raise ValueError(f"{name} stands at its end, and an open file is read from where it stands: call file.seek(0)")
    try:
        if isinstance(file, Path) and file.suffix == SAFETENSORS:
            tensors = tensor_files.read(file)
            for key, value in tensors.items():
                tensors[key] = value.to(device)
            return Saved(name, tensors)
        with warnings.catch_warnings(action="ignore"):  # of a damaged file, for which there is an error
            refuse_compressed(file)
            state = torch.load(file, map_location=device, weights_only=True)
    except Exception as e:  # random bytes cause a dozen types of errors, from AssertionError to struct.error
        raise CheckpointError(
            f"{name} is damaged, or not made by Learner.save: {str(e).splitlines()[0] if str(e) else e!r}"
        ) from e
    if not isinstance(state, dict):
        raise CheckpointError(f"{name} holds a {type(state).__name__}, not the weights of a model")
    weights = _entry(state, _MODEL_NAMES)
    if weights is None:
        return Saved(name, state)
    scaler = _entry(state, ("scaler",)) or {}
    is_scaler = scaler.keys() >= {"scale", "_growth_tracker"}
    return Saved(name, weights, _entry(state, _OPT_NAMES), scaler if is_scaler else None)


def refuse_compressed(file: Path | BinaryIO) -> None:
    """Refuse what torch never writes: a small file that would fill the memory."""
    start = 0 if isinstance(file, Path) else file.tell()
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise ValueError("its parts are compressed, which torch.save never does")
    if not isinstance(file, Path):
        file.seek(start)


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
        CheckpointError: weights that do not fit; the message says which are missing and which are surplus.
    """
    own, weights = model.state_dict(), saved.weights
    for prefix in _WRAPPERS * 2:  # they may be nested
        if weights and all(k.startswith(prefix) for k in weights) and not all(k.startswith(prefix) for k in own):
            consume_prefix_in_state_dict_if_present(weights, prefix)
    kinds = [
        f"{k} (a {type(v).__name__})"
        for k, v in weights.items()
        if isinstance(own.get(k), Tensor) and not isinstance(v, Tensor)
    ]
    shapes = [
        f"{k}: {tuple(v.shape)} in the file, {tuple(own[k].shape)} in the model"
        for k, v in weights.items()
        if isinstance(v, Tensor) and isinstance(own.get(k), Tensor) and v.shape != own[k].shape
    ]
    missing, surplus = [k for k in own if k not in weights], [k for k in weights if k not in own]
    none_fits = bool(own) and len(missing) == len(own)
    wrong = {
        "are no tensors in the file": kinds,
        "differ in shape": shapes,
        "are not in the file": missing if strict or none_fits else [],
        "are not in the model": surplus if strict or none_fits else [],
    }
    if any(wrong.values()):
        problems = ". These ".join(f"{what}: {first_few(names, '; ')}" for what, names in wrong.items() if names)
        raise CheckpointError(f"{saved.name} does not fit {type(model).__name__}: these {problems}")
    return saved
