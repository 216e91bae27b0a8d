"""Files of tensors in the safetensors format: written from memory and hashed on the way, read by the library.

The library can write such files too, but not hash what it writes. The format is short: the length of the header in 8
bytes, the header as JSON (type, shape and place of each tensor), and the tensors' bytes in a row.
"""

import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

Buffer = bytes | memoryview

_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip

# Other types are written as bytes, and named in the file by what stands here.
_ALL_TYPES = {str(t).removeprefix("torch."): t for t in vars(torch).values() if isinstance(t, torch.dtype)}

_NOTES = ("format", "learnerkit.versions", "learnerkit.types", "learnerkit.export")


def why_not(x: Any) -> str:
    """What keeps a value from being written as a tensor, such as 'a str', or ''."""
    if type(x) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return f"a {type(x).__name__}"
    if x.is_quantized or x.layout != torch.strided:
        return f"a {'quantized' if x.is_quantized else str(x.layout).removeprefix('torch.')} tensor"
    return "a tensor without memory (on the meta device)" if x.is_meta else ""


def on_host(tensor: Tensor) -> Tensor:
    """A tensor's values in a row on the host: no copy if they are there already."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()  # waits for an accelerator


class HostMemory:
    """Memory of the host that tensors are copied to, the same each time."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def copies(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the tensors, which the next call overwrites."""
        starts, end = [], 0
        for tensor in tensors.values():
            starts.append(end)
            end += -(-tensor.nbytes // 16) * 16
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}
        if end > len(self._bytes):
            pinned = any(device.type == "cuda" for device in devices)
            self._bytes = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
        found = {}
        for start, (name, tensor) in zip(starts, tensors.items(), strict=True):
            memory = self._bytes[start : start + tensor.nbytes]
            found[name] = memory.view(tensor.dtype).view(tensor.shape)
            found[name].copy_(tensor.detach(), non_blocking=True)
        for device in devices:
            torch.accelerator.synchronize(device)
        return found


def without_tied(weights: Mapping[str, Tensor], modules: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The weights without those that are others by a second name, and notes for the file.

    The notes are those of `safetensors.torch.save_model`, whose `load_model` reads such a file: of tied weights the
    first name in the alphabet is in the file, and the notes say for each other name which that is.

    Args:
        weights: by their names.
        modules: the `_metadata` of a state dict, which has the versions of the modules.
    """
    first: dict[tuple, str] = {}
    kept, notes = {}, {"format": "pt"}
    for name in sorted(weights):
        tensor = weights[name]
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and name not in _NOTES and first.setdefault(place, name) != name:
            notes[name] = first[place]
        else:
            kept[name] = tensor
    notes["learnerkit.versions"] = json.dumps({name: found.get("version") for name, found in modules.items()})
    return kept, notes


def content(tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None) -> list[Buffer]:
    """What a file of tensors consists of: its header, and the memory of each tensor, which must not change.

    Args:
        tensors: by their names; each with its values in a row on the host.
        notes: more for the header.
    """
    header: dict[str, Any] = {}
    pieces: list[Buffer] = []
    types, end = {}, 0
    # The widest first: so each stands at a multiple of its own width.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        kind, shape = _TYPES.get(tensor.dtype), list(tensor.shape)
        if kind is None:
            types[name] = [str(tensor.dtype).removeprefix("torch."), shape]
            kind, shape = "U8", [tensor.nbytes]
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
        if tensor.nbytes:
            memory: Any = tensor.reshape(-1).view(torch.uint8).numpy()
            pieces.append(memoryview(memory))
    header["__metadata__"] = {**(notes or {}), **({"learnerkit.types": json.dumps(types)} if types else {})}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *pieces]


def write(path: Path, pieces: Sequence[Buffer]) -> dict[str, Any]:
    """Write a new file and sync it; return its size and sha256.

    The hash is of the memory that is written, and computed at the same time.
    """
    digest = in_thread(lambda: _sha256(pieces))
    try:
        with open(path, "xb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        e.filename = e.filename or str(path)
        raise
    finally:
        wait([digest])
    return {"size": sum(len(piece) for piece in pieces), "sha256": digest.result()}


def in_thread(call: Callable[[], T]) -> "Future[T]":
    """Run a function in a thread of its own, for which a process that ends waits: a pool takes no work by then."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=run).start()
    return future


def in_threads(calls: Iterable[Callable[[], T]]) -> list[T]:
    """What functions return that run at the same time; the first error, once all have ended."""
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
    """The notes in a file's header.

    Raises:
        Exception: of many types, if the file is damaged.
    """
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}


def read(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> OrderedDict[str, Tensor]:
    """The tensors of a file on the host, tied ones by all their names; `wanted` tells by the name which to read.

    Raises:
        Exception: of many types, if the file is damaged.
    """
    from safetensors import safe_open

    found: OrderedDict[str, Tensor] = OrderedDict()
    with safe_open(path, framework="pt") as file:
        notes, names = file.metadata() or {}, set(file.keys())
        for name in filter(wanted, names):
            found[name] = file.get_tensor(name).clone()  # the library's own is part of the file, read when needed
    for name, (kind, shape) in json.loads(notes.get("learnerkit.types", "{}")).items():
        if name in found:
            found[name] = found[name].view(_ALL_TYPES[kind]).reshape(shape)
    for name, other in notes.items():
        if name not in names and other in found:
            found[name] = found[other]
    versions = json.loads(notes.get("learnerkit.versions", "{}"))
    found._metadata = OrderedDict((name, {"version": version}) for name, version in versions.items())  # type: ignore[attr-defined]
    return found
