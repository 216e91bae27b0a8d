"""The facts about the code and the data of a run that can be known without reading the data."""

import hashlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from learnerkit.data.batches import loader_len
from learnerkit.files import on_host
from learnerkit.text import escaped
from learnerkit.values import in_a_row

_BYTES = 2**24  # the most bytes of a tensor or an array
_ITEMS = 1000  # the most items of a list
_PARTS = 20_000  # the most items and tensors of a dataset
_DEPTH = 12  # the most lists and datasets inside each other
_SECONDS = 5.0  # the time that git may take


def code() -> dict[str, Any]:
    """Return the command line, and the git commit of the script's folder, or in a notebook of the current one.

    Returns:
        'command'; 'commit', and 'changed': whether files that git tracks differ from it. Without git, or in a folder
        that it does not track, 'command' alone.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    folder = Path.cwd() if script is None else Path(script).absolute().parent
    facts: dict[str, Any] = {"command": escaped(shlex.join(sys.argv))}  # not every tracker takes all bytes
    status = ["status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *status],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, check=True,
        )  # fmt: skip
    except (OSError, ValueError, subprocess.SubprocessError):
        return facts
    lines = done.stdout.splitlines()
    commits = [line.split()[-1] for line in lines if line.startswith("# branch.oid")]
    return facts | {"commit": commits[0], "changed": not all(line.startswith("#") for line in lines)}


def fingerprint(data: Any) -> str:
    """Return a text that changes with a dataset: its type, its length, and a SHA-256 of its content in memory.

    The digest covers the tensors, arrays, lists and dicts that the dataset and the datasets inside it have as
    attributes: names, types and shapes, and of values at most 16 MiB of a tensor and 1,000 items of a list, at equal
    distances, and the first 20,000 items of all. A file named in a list counts by the last two parts of its path and
    its size. The content of files, and code that changes samples, are not covered. It is the same in every process that
    has the same data.

    Args:
        data: a dataset, or a list of batches.

    Returns:
        Without the digest if nothing is held in memory.
    """
    digest, is_held = hashlib.sha256(), False
    for part in islice(_parts(data) if isinstance(data, list | tuple) else _attributes(data), _PARTS):
        digest.update(b"%d " % len(part))  # part by part: those of a list of large tensors are gigabytes
        digest.update(part)
        is_held = True
    n, kind = loader_len(data), type(data).__name__
    size = "no length" if n is None else f"{n} items"
    return f"{kind}, {size}, sha256 {digest.hexdigest()[:16]}" if is_held else f"{kind}, {size}"


def _attributes(data: Any, depth: int = 0) -> Iterator[bytes]:
    for name, value in getattr(data, "__dict__", {}).items():
        if isinstance(value, Tensor | np.ndarray | list | tuple | dict | Dataset):
            yield from _parts((name, value), depth)


def _parts(value: Any, depth: int = 0) -> Iterator[bytes]:
    """Yield the bytes that tell a value apart from others; `depth`: the number of containers around it."""
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, np.ndarray) and value.dtype.hasobject:  # its bytes are addresses
        value = value.tolist()
    if depth > _DEPTH:
        return
    if isinstance(value, Tensor) and _has_no_bytes(value):
        yield f"{value.dtype} {value.layout}".encode()
    elif isinstance(value, Tensor | np.ndarray):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield _some_bytes(value)
    elif isinstance(value, Dataset):
        yield from _attributes(value, depth + 1)
    elif isinstance(value, list | tuple):
        yield b"%d items" % len(value)
        for item in value[:: len(value) // _ITEMS + 1]:
            yield from _parts(item, depth + 1)
    elif isinstance(value, str | os.PathLike) and os.path.isfile(value):
        yield f"{'/'.join(Path(value).parts[-2:])} {os.path.getsize(value)}".encode()
    elif isinstance(value, str | bytes | int | float | np.generic | None):
        yield repr(value).encode()


def _has_no_bytes(t: Tensor) -> bool:
    return t.layout != torch.strided or t.is_meta or t.is_quantized or t.is_nested


def _some_bytes(value: Tensor | np.ndarray) -> bytes:
    """Return the bytes of rows at equal distances. A host-device sync, for tensors elsewhere."""
    rows: Any = value[:: value.nbytes // _BYTES + 1] if value.ndim else value
    flat = rows.reshape(-1)
    flat = flat[:: flat.nbytes // _BYTES + 1]
    if isinstance(flat, Tensor):
        flat = in_a_row(on_host(flat)).view(torch.uint8).numpy()
    return flat.tobytes()
