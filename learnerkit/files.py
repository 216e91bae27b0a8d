"""Files of weights and tensors: checked names, atomic writing, safe reading, and the check that a file fits a model.

A file of weights is a model's state dict, or a dict of {'model': weights, 'opt': state of the optimizer, 'scaler':
state of the gradient scaler}, of which the last two may be missing. Files of plain PyTorch scripts, which use other
keys for the same content, can be read too. A file whose name ends in '.safetensors' has the weights alone.

That format is short: the length of the header in 8 bytes, the header as JSON (type, shape and place of each tensor),
and the tensors' bytes in a row. The safetensors library reads such files here, but does not write them: what it writes
could be hashed only from a second copy in memory, or read back.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import threading
import time
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import TextIOBase
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parameter import is_lazy

from learnerkit.marks import collective
from learnerkit.shards import gathered, is_shard, storage_of
from learnerkit.state import Learner
from learnerkit.stores.paths import AnyPath, StorePath, any_path
from learnerkit.text import first_few, printable
from learnerkit.torch_internals import loads_itself
from learnerkit.values import in_a_row

T = TypeVar("T")

File = str | AnyPath | BinaryIO
Buffer = bytes | memoryview


class CheckpointError(ValueError, RuntimeError):
    """An error of a checkpoint or a file of weights that is damaged, does not fit, or cannot be written; it says why.

    The text is safe to print, whatever the names in a file are.
    """

    def __init__(self, text: str = "") -> None:
        super().__init__(printable(str(text), 4000))


MANIFEST = "manifest.json"
"""The name of the file in a checkpoint that lists the other files."""

SAFETENSORS = ".safetensors"
_STARTED = time.time()

_MODEL_NAMES = ("model", "state_dict", "model_state_dict")
_OPT_NAMES = ("opt", "optimizer", "optimizer_state_dict")
_WRAPPERS = ("module.", "_orig_mod.")  # the prefixes of DataParallel and DDP, and of torch.compile


@dataclass(frozen=True)
class Saved:
    """The content of a file.

    Args:
        name: the file's name, for messages.
        weights: the model's state dict.
        opt: the state of the optimizer, or of several by name; `None` if the file has none.
        scaler: the state of the gradient scaler; `None` if the file has none.

    Raises:
        CheckpointError: the state of the gradient scaler is invalid.
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
    """Return `name` if it is a plain file name, which cannot lead out of `directory`, a description for the error.

    Raises:
        ValueError: the name has separators, `..`, control characters, a leading `-` or more than 200 characters.
    """
    bad = not name or name in (".", "..") or name.startswith("-") or len(name) > 200
    if bad or any(c in "/\\" or ord(c) < 32 or ord(c) == 127 for c in name):
        raise ValueError(
            f"got the file name {name[:80]!r}; a plain name inside {directory} has no separators, no control "
            "characters and no leading '-'; for another place give a path"
        )
    return name


def local_path(name: str, path: str | Path) -> Path:
    """Return a path as a `Path`; refuse the URL of an object store as the argument `name`."""
    found = any_path(path)
    if isinstance(found, StorePath):
        raise ValueError(
            f"got {name}={path!r}; it is a local folder: give URLs to learn.save, learn.export and CheckpointCallback"
        )
    return found


def name_or_path(name: str | Path, directory: str) -> str | Path:
    """Return a plain name inside `directory`, a description for the error, unchanged, and a path as a `Path`.

    A str with a separator is a path. A str with `..` is refused, as it may be composed of untrusted names.

    Raises:
        ValueError: it is neither a name nor a path, or a str with `..` in it.
    """
    found = name_or_any_path(name, directory)
    if isinstance(found, StorePath):
        raise ValueError(f"got the URL {str(found)!r}; this is written bit by bit, to a local path or a name alone")
    return found


def name_or_any_path(name: str | AnyPath, directory: str = "the model directory") -> str | AnyPath:
    """Return what `name_or_path` returns, or the place in an object store that a URL names.

    Raises:
        ImportError, ValueError: as `name_or_path`, and as `stores.paths.any_path`.
    """
    if isinstance(name, StorePath):
        return name
    if isinstance(name, str) and not {"/", os.sep} & set(name):
        return plain_name(name, directory)
    path = any_path(name)
    if isinstance(name, Path) or isinstance(path, StorePath):
        return path
    if ".." in path.parts or not name.isprintable():
        raise ValueError(
            f"got the path {name[:80]!r}; one that is given as a str has no '..' and no control characters, so that no "
            "part of it leads elsewhere; pass a pathlib.Path if it is meant"
        )
    return path


def followed(path: Path) -> Path:
    """Return the absolute path to which symbolic links lead.

    Raises:
        CheckpointError: the links lead back to themselves.
    """
    try:
        path.stat()
    except OSError as e:  # `resolve` tells it in Python before 3.13 alone
        if e.errno == errno.ELOOP:
            raise CheckpointError(
                f"{path} is, or lies below, a symbolic link that leads back to itself; remove it, or give another path"
            ) from e
    return path.resolve()


def place_of(learn: "Learner", file: File) -> AnyPath | BinaryIO:
    """Return the place at which a learner saves and loads a file: a plain name lies in its model directory.

    Raises:
        TypeError, ValueError: it is neither a name, a path, a URL, nor an open file.
    """
    name = name_or_any_path(file) if isinstance(file, str | Path | StorePath) else file
    if not isinstance(name, str):
        is_open = (hasattr(name, "write") or hasattr(name, "read")) and not isinstance(name, TextIOBase)
        if is_open or isinstance(name, Path | StorePath):
            return name
        raise TypeError(f"got file={file!r}; it is a name, a path, or a file open in binary mode")
    if not name.endswith(SAFETENSORS):
        name = f"{name.removesuffix('.pth')}.pth"
    return Path(learn.path) / learn.model_dir / name  # a user may have assigned a str


def save_whole(obj: Any, file: AnyPath | BinaryIO) -> None:
    """Save like `torch.save`, but atomically: a killed process leaves either the whole new file or the old one.

    The file is written beside the target, synced, and renamed over it. An open file is just written to.

    Raises:
        CheckpointError: the file cannot be written, for lack of space or permissions; the old one is unchanged.
    """
    if not isinstance(file, Path | StorePath):
        _save(obj, file)
        return
    with replacing(file) as temporary, _new_file(temporary) as opened:
        _save(obj, opened)


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file to write to, and sync it at the end."""
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _save(obj: Any, file: BinaryIO) -> None:
    """Save an object by torch, and raise the first error of a write, which torch would hide behind one of its own."""
    errors: list[OSError] = []

    def write(data: Any) -> int:
        try:
            if not errors:
                file.write(data)
        except OSError as e:
            errors.append(e)
        return len(data)

    out: Any = SimpleNamespace(write=write, flush=getattr(file, "flush", bool))  # a user's own may have none
    torch.save(obj, out)
    if errors:
        raise errors[0]


@collective
def save_weights(
    weights: Mapping[str, Any], file: AnyPath, notes: Mapping[str, str] | None = None, writes: bool = True
) -> None:
    """Save weights in the safetensors format, which other tools read, as atomically as `save_whole`.

    Tied weights are written once, as by `safetensors.torch.save_model`. Shards are gathered one after the other; in
    that case every rank must reach this.

    Args:
        weights: a state dict.
        file: the path of the file.
        notes: more entries for the file's header.
        writes: this rank writes the file; other ranks help to gather shards.

    Raises:
        CheckpointError: the file cannot be written, or `weights` has values that are not tensors.
    """
    kept, own_notes = without_tied(weights)
    header, names = file_header(kept, own_notes | dict(notes or {}))
    tensors = (gathered(kept[name], keep=writes) for name in names)
    try:
        if writes:
            with replacing(file) as temporary, _new_file(temporary) as opened:
                opened.write(header)
                for tensor in tensors:
                    opened.writelines(_memory(on_host(tensor)))
    finally:
        for _ in tensors:  # What is left is gathered on all ranks: on those that do not write, and after an error.
            pass


@contextmanager
def replacing(file: AnyPath) -> Iterator[Path]:
    """Yield a path beside `file` to write to, which then replaces it; for an object store, one of this machine."""
    if isinstance(file, StorePath):
        try:
            with TemporaryDirectory() as folder:
                yield Path(folder, file.name)
                file.upload(Path(folder, file.name))
        except OSError as e:
            raise CheckpointError(f"{file} cannot be written: {e}") from e
        return
    file = followed(file)  # A symbolic link stays, and leads to what is written.
    if file.exists() and not (file.is_file() or file.is_dir()):
        raise CheckpointError(
            f"{file} is no regular file (a device, a pipe, or the like), and a new file would take its place: give "
            "another path, or the file open for writing in binary mode"
        )
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
    """Return a new name beside `path`, for a file that is not complete yet."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def remove_left_over(folder: Path, before: float, name: str = "") -> None:
    """Remove the files that killed runs have left under temporary names.

    Args:
        folder: the directory to search.
        before: the start of this run; younger files may belong to another run that is still active.
        name: the name of the file that was to be written; by default any.
    """
    for path in folder.iterdir():
        match = re.fullmatch(r"\.(.+)\.[0-9a-f]{8}\.tmp", path.name)
        if not match or name not in ("", match[1]):
            continue
        with suppress(OSError):
            is_folder = path.is_dir() and not path.is_symlink()
            if max(p.lstat().st_mtime for p in (path, *(path.iterdir() if is_folder else ()))) < before:
                remove(path)


def remove(path: AnyPath) -> None:
    """Remove a file, or a directory with all that is in it; in an object store manifests before the rest."""
    if isinstance(path, StorePath):
        path.remove(first=MANIFEST)
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sync_directory(folder: Path) -> None:
    """Wait until the names in a directory are on disk, if the file system supports it."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    opened = os.open(folder, os.O_DIRECTORY)
    try:
        os.fsync(opened)
    except OSError as e:
        # CIFS and FUSE answer so; renames are atomic there, too.
        if e.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(opened)


# Files of tensors

_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip

# Other types are written as bytes, with their names from this table in the header.
_ALL_TYPES = {str(t).removeprefix("torch."): t for t in vars(torch).values() if isinstance(t, torch.dtype)}

_NOTES = ("format", "learnerkit.versions", "learnerkit.types", "learnerkit.export")


def why_not(x: Any) -> str:
    """Return the reason why a value cannot be written as a tensor, such as 'a str'; '' if there is none."""
    if type(x) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and not is_shard(x):
        return f"a {type(x).__name__}"
    if x.is_quantized or x.layout != torch.strided:
        return f"a {'quantized' if x.is_quantized else str(x.layout).removeprefix('torch.')} tensor"
    return "a tensor without memory (on the meta device)" if x.is_meta else ""


def on_host(tensor: Tensor) -> Tensor:
    """Return a tensor's values in a row on the host, without a copy if they are there already."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()  # waits for an accelerator


class HostMemory:
    """Memory of the host to which tensors are copied, the same each time."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def copies(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the tensors, which the next call overwrites."""
        sizes = [-(-tensor.nbytes // 16) * 16 for tensor in tensors.values()]
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}
        if sum(sizes) > len(self._bytes):
            pinned = any(device.type == "cuda" for device in devices)
            self._bytes = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        copied, rows = {}, self._bytes[: sum(sizes)].split(sizes)
        for row, (name, tensor) in zip(rows, tensors.items(), strict=True):
            copied[name] = row[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copied[name].copy_(tensor.detach(), non_blocking=True)
        for device in devices:
            torch.accelerator.synchronize(device)
        return copied


def without_tied(weights: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the weights without second names of tied ones, and notes for the file.

    The notes are those of `safetensors.torch.save_model`, and `load_model` can read the file: of tied weights the first
    name in the alphabet is in the file, and the notes map each other name to it.

    Args:
        weights: a state dict, whose `_metadata` has the versions of the modules.

    Raises:
        CheckpointError: `weights` has values that are not tensors.
    """
    first: dict[tuple, str] = {}
    kept, notes = {}, {"format": "pt"}
    modules = getattr(weights, "_metadata", None) or {}
    for name in sorted(weights):
        tensor = weights[name]
        if why := why_not(tensor):
            raise CheckpointError(
                f"the weight {name} is {why}, and a .safetensors file has plain tensors alone, in checkpoints too: "
                "save to a name that ends in .pth"
            )
        start = storage_of(tensor) if is_shard(tensor) else tensor.data_ptr()
        place = (
            tensor.device, start, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
        )  # fmt: skip
        if tensor.numel() and name not in _NOTES and first.setdefault(place, name) != name:
            notes[name] = first[place]
        else:
            kept[name] = tensor
    notes["learnerkit.versions"] = json.dumps({name: details.get("version") for name, details in modules.items()})
    return kept, notes


def file_header(tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None) -> tuple[bytes, list[str]]:
    """Return the header of a file of tensors, and their names in the order in which they are stored.

    Args:
        tensors: the tensors by name; only their shapes and types are read.
        notes: more entries for the header.
    """
    header: dict[str, Any] = {}
    types, end = {}, 0
    # The widest types come first, so that each tensor is aligned to its own width.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        kind, shape = _TYPES.get(tensor.dtype), list(tensor.shape)
        size = tensor.numel() * tensor.itemsize
        if kind is None:
            types[name] = [str(tensor.dtype).removeprefix("torch."), shape]
            kind, shape = "U8", [size]
        start, end = end, end + size
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    names = list(header)
    header["__metadata__"] = {**(notes or {}), **({"learnerkit.types": json.dumps(types)} if types else {})}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, names


def tensor_file(tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None) -> list[Buffer]:
    """Return the pieces of a file of tensors: its header, and the memory of each tensor, which must not change.

    Args:
        tensors: the tensors by name; each with its values in a row on the host.
        notes: more entries for the header.
    """
    header, names = file_header(tensors, notes)
    return [header, *(piece for name in names for piece in _memory(tensors[name]))]


def _memory(tensor: Tensor) -> list[Buffer]:
    """Return the memory of a tensor, or nothing if it is empty."""
    memory: Any = in_a_row(tensor).view(torch.uint8).numpy() if tensor.nbytes else None
    return [] if memory is None else [memoryview(memory)]


def write_new(path: AnyPath, pieces: Sequence[Buffer]) -> dict[str, Any]:
    """Write a new file and sync it; return its size and sha256.

    The hash is computed from the memory that is written, at the same time. To an object store a temporary file is
    uploaded, as stores take parts of a file at the same time, and put it together only if all have come.
    """
    if isinstance(path, StorePath):
        with replacing(path) as temporary:
            return write_new(temporary, pieces)
    digest = in_thread(lambda: _sha256(pieces))
    try:
        with _new_file(path) as file:
            file.writelines(pieces)
    except OSError as e:
        e.filename = e.filename or str(path)
        raise
    finally:
        wait([digest])
    return {"size": sum(len(piece) for piece in pieces), "sha256": digest.result()}


def in_thread(call: Callable[[], T]) -> "Future[T]":
    """Run a function in a new thread, which keeps the process alive; a pool accepts no work while the process ends."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=run).start()
    return future


def in_threads(calls: Iterable[Callable[[], T]]) -> list[T]:
    """Run functions at the same time; return their results, or raise the first error once all have ended."""
    futures = [in_thread(call) for call in calls]
    try:
        wait(futures)
    finally:
        wait(futures)  # after Ctrl-C
    return [future.result() for future in futures]


def _sha256(pieces: Iterable[Buffer]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def notes_of(path: Path) -> dict[str, str]:
    """Return the notes in a file's header.

    Raises:
        Exception: of many types, if the file is damaged.
    """
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}


def read_tensors(
    path: Path, wanted: Callable[[str], bool] = lambda name: True, in_place: bool = False
) -> OrderedDict[str, Tensor]:
    """Return the tensors of a file on the host, tied ones by all their names.

    Args:
        path: the file.
        wanted: tells by its name whether to read a tensor.
        in_place: map the tensors to the file, which must not change; values are read only when they are needed.

    Raises:
        Exception: of many types, if the file is damaged.
    """
    from safetensors import safe_open

    tensors: OrderedDict[str, Tensor] = OrderedDict()
    with safe_open(path, framework="pt") as file:
        notes, names = file.metadata() or {}, set(file.keys())
        for name in filter(wanted, names):
            tensor = file.get_tensor(name)  # the tensor is mapped to the file, and read when needed
            tensors[name] = tensor if in_place else tensor.clone()
    for name, (kind, shape) in json.loads(notes.get("learnerkit.types", "{}")).items():
        if name in tensors:
            tensors[name] = tensors[name].view(_ALL_TYPES[kind]).reshape(shape)
    tensors.update(tied_names(path, tensors))
    versions = json.loads(notes.get("learnerkit.versions", "{}"))
    tensors._metadata = OrderedDict((name, {"version": version}) for name, version in versions.items())  # type: ignore[attr-defined]
    return tensors


def tied_names(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tied tensors by their additional names, from the notes of a file."""
    second = {name: other for name, other in notes_of(path).items() if name not in (*_NOTES, *tensors)}
    return {name: tensors[other] for name, other in second.items() if other in tensors}


_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"  # the names in a directory of transformers


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files in a directory of transformers; an empty list if it is not such a directory."""
    index = folder / _INDEX
    if index.is_file():
        names = dict.fromkeys(json.loads(index.read_text())["weight_map"].values())
        return [folder / plain_name(name, "the directory of its index") for name in names]
    whole = folder / _WHOLE
    return [whole] if whole.is_file() else []


def is_mappable(path: Path) -> bool:
    """Tell whether the values of a file, or of a directory of transformers, can be read when they are needed.

    A checkpoint of this library is refused: it has files of the same names, and a manifest to verify them.
    """
    if path.is_dir():
        return any((path / name).is_file() for name in (_WHOLE, _INDEX)) and not (path / MANIFEST).exists()
    return path.suffix == SAFETENSORS


# Files of weights


def read(file: AnyPath | BinaryIO, device: Any, name: str = "") -> Saved:
    """Read a file onto a device.

    Args:
        file: the file.
        device: the device.
        name: the file's name, for messages; by default its own.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is damaged, or has other content.
        RuntimeError: there is no such device.
        ValueError: it is open, and its position is at its end.
    """
    if isinstance(file, StorePath):
        with file.copied() as copy:
            return read(copy, device, str(file))
    if isinstance(file, Path):
        name = name or str(file)
        if not file.is_file():
            there = sorted(p.name for p in file.parent.glob("*") if p.suffix in (".pth", SAFETENSORS))
            raise FileNotFoundError(
                f"there is no file {printable(str(file), 1000)}; saved there: {first_few(there, n=20) or 'nothing'}"
            )
    else:
        name = name or getattr(file, "name", None) or f"the {type(file).__name__}"
        if getattr(file, "seekable", bool)() and _is_at_end(file):
            raise ValueError(
                f"{name} stands at its end, and an open file is read from where it stands: call file.seek(0)"
            )
    torch.empty(0, device=device)  # A device that does not exist is no fault of the file.
    try:
        if isinstance(file, Path) and file.suffix == SAFETENSORS:
            tensors = read_tensors(file)
            for key, value in tensors.items():
                tensors[key] = value.to(device)
            return Saved(name, tensors)
        with warnings.catch_warnings(action="ignore"):  # torch warns about a damaged file, for which there is an error
            refuse_compressed(file)
            state = torch.load(file, map_location=device, weights_only=True)
    except Exception as e:  # random bytes cause a dozen types of errors, from AssertionError to struct.error
        said = str(e).splitlines()[0] if str(e) else repr(e)
        if "Unsupported global" in str(e):
            said = "it holds objects of other classes than tensors; save weights: torch.save(model.state_dict(), file)"
        raise CheckpointError(f"{name} is damaged, or not made by Learner.save: {printable(said)}") from e
    if not isinstance(state, dict):
        raise CheckpointError(f"{name} holds a {type(state).__name__}, not the weights of a model")
    weights = _entry(state, _MODEL_NAMES)
    if others := [key for key in (state if weights is None else weights) if not isinstance(key, str)]:
        raise CheckpointError(f"{name} has the entry {others[0]!r}, and the names of weights are texts")
    if weights is None:
        return Saved(name, state)
    scaler = _entry(state, ("scaler",)) or {}
    is_scaler = scaler.keys() >= {"scale", "_growth_tracker"}
    return Saved(name, weights, _entry(state, _OPT_NAMES), scaler if is_scaler else None)


def read_mapped(path: Path) -> Saved:
    """Read the names, shapes and types of the weights in a safetensors file, or a directory of transformers.

    Their values are mapped to the files, which must not change meanwhile.

    Args:
        path: a file; or a directory with one, or with several and an index, as written by transformers.

    Raises:
        CheckpointError: a file is damaged, or missing.
    """
    weights: OrderedDict[str, Tensor] = OrderedDict()
    try:
        for file in weight_files(path) if path.is_dir() else [path]:
            weights.update(read_tensors(file, in_place=True))
        return Saved(str(path), weights)
    except Exception as e:
        raise CheckpointError(f"{path} cannot be read as safetensors: {type(e).__name__}: {e}") from e


def refuse_compressed(file: Path | BinaryIO) -> None:
    """Refuse compressed files, which torch never writes: a small one could fill the memory."""
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


def _take_own_names(weights: dict[str, Any], model: nn.Module, own: Mapping[str, Any]) -> None:
    """Give weights their names in the model: without wrappers' prefixes, and all the names of those that are tied."""
    for prefix in _WRAPPERS * 2:  # prefixes may be nested
        if weights and all(k.startswith(prefix) for k in weights) and not all(k.startswith(prefix) for k in own):
            consume_prefix_in_state_dict_if_present(weights, prefix)
    tied: dict[Any, list[str]] = {}  # a file of transformers has tied weights by one of their names
    for name, p in model.named_parameters(remove_duplicate=False):
        tied.setdefault(p, []).append(name)
    for names in tied.values():
        if there := next((name for name in names if name in weights), None):
            weights |= {name: weights[there] for name in names if name not in weights}


def fitted(saved: Saved, model: nn.Module, strict: bool) -> Saved:
    """Check that a file fits a model, so that loading cannot fail half-way, and remove wrappers' prefixes from names.

    torch's `_metadata`, which has the versions of the modules, is kept.

    Args:
        strict: whether the file must have exactly the model's weights.

    Raises:
        CheckpointError: the weights do not fit; the message lists the missing and the surplus ones.
    """
    own, weights = model.state_dict(), saved.weights
    _take_own_names(weights, model, own)
    both = [(k, v, own[k]) for k, v in weights.items() if isinstance(own.get(k), Tensor)]
    kinds = [f"{k} (a {type(v).__name__})" for k, v, _ in both if not isinstance(v, Tensor)]
    shapes = [
        f"{k}: {tuple(v.shape)} in the file, {tuple(t.shape)} in the model"
        for k, v, t in both
        if isinstance(v, Tensor) and not is_lazy(t) and v.shape != t.shape and not loads_itself(model, k)
    ]
    missing, surplus = [k for k in own if k not in weights], [k for k in weights if k not in own]
    exact = strict or (bool(own) and len(missing) == len(own))  # Where none fits, the file is another model's.
    wrong = {
        "are no tensors in the file": kinds,
        "differ in shape": shapes,
        "are not in the file": missing if exact else [],
        "are not in the model": surplus if exact else [],
    }
    if any(wrong.values()):
        problems = ". These ".join(f"{what}: {first_few(names, '; ')}" for what, names in wrong.items() if names)
        raise CheckpointError(f"{saved.name} does not fit {type(model).__name__}: these {problems}")
    return saved
