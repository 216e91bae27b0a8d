"""Checkpoints on disk: they are complete or absent, written and hashed by all ranks, and verified before they are read.

    <path>/<name>/model.safetensors    the model's weights, for any tool
                  state.json           all else that is alike on all ranks
                  rank0.json           what rank 0 has of its own, such as random states
                  rank0.safetensors    the tensors of rank0.json, and rank 0's share of those of state.json
                  rank1.json ...       the same of the other ranks
                  manifest.json        the sizes and sha256 of these files, and its own; written last
    <path>/latest                      the name of the newest, for people and scripts
    <path>/.learnerkit.lock            held by the process that trains, for the length of a fit

A checkpoint is written under a temporary name beside its final place, synced and renamed; then `latest` is replaced,
and only then old ones are removed. So a crash at any moment leaves the previous checkpoint. A number in each manifest
says which checkpoint is the newest. All ranks write into one directory, so all machines must see it.

An object store renames nothing. There a checkpoint has its final name from the start, one that was never used; it
becomes a checkpoint by its manifest, which is written last, and ends by it, as the manifest is removed first. The files
are read from a copy on each machine.

`torch.save` cannot be used for the state: its files hold a pickle, its safe reader refuses numpy's arrays and numbers,
and ranks could not share the tensors of one file.
"""

import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import socket
import stat
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from fastcore.basics import groupby
from torch import Tensor

from learnerkit import distributed
from learnerkit.files import (
    MANIFEST,
    Buffer,
    CheckpointError,
    HostMemory,
    in_thread,
    in_threads,
    on_host,
    plain_name,
    read_tensors,
    remove,
    remove_left_over,
    replacing,
    sync_directory,
    temporary_name,
    tensor_file,
    tied_names,
    why_not,
    without_tied,
    write_new,
)
from learnerkit.marks import collective
from learnerkit.processes.event_file import EventFile, facts_of_launch
from learnerkit.shards import gathered, is_shard
from learnerkit.state import State
from learnerkit.stores.paths import AnyPath, StoreError, StorePath
from learnerkit.text import first_few, in_one_line, printable
from learnerkit.utils import warn

T = TypeVar("T")

_FORMAT = 3
_MODEL, _STATE = "model.safetensors", "state.json"
_LATEST = "latest"
# The index of a sharded model, of which each rank writes some tensors, in the format of transformers.
_INDEX = f"{_MODEL}.index.json"
_SIGNS = (MANIFEST, _MODEL, _STATE)  # a checkpoint's directory has one of these, even if it is damaged
_LOCK = ".learnerkit.lock"
_IN_STORE = r".+\.id-[0-9a-f]{8}"  # the names of checkpoints in an object store, where each is used once
_DYING = 5.0  # seconds until the memory of a killed process, and with it its lock, is freed
_MANIFEST_BYTES = 2**26  # more than any manifest has
_SHARED_BYTES = 2**16  # the least size of a tensor that another rank than 0 may write
_PATIENCE = 600.0  # seconds that a rank may need longer than another for its part


class StoreUnreachable(CheckpointError):
    """An object store cannot be reached while its checkpoints are looked for; they may be whole."""


class Checkpoint:
    """A checkpoint whose files were verified.

    Args:
        path: the directory of the checkpoint.
        manifest: the content of the manifest.

    Attributes:
        in_place: read tensors only when they are needed; the files must not change until then.
    """

    def __init__(self, path: AnyPath, manifest: dict[str, Any]) -> None:
        self.path = path
        # The files are read in this folder; those of an object store are copied there when they are verified.
        self._folder = path if isinstance(path, Path) else None
        self._remove_copy: Callable[[], Any] = lambda: None
        self.info: dict[str, Any] = manifest["info"]
        self.n_ranks: int = manifest["n_ranks"]
        self._files: dict[str, dict] = manifest["files"]
        self.in_place = False

    def weights(self) -> dict[str, Tensor]:
        """Return the model's state dict, on the host.

        Raises:
            CheckpointError: `Storage.save` has not written the file.
        """
        weights: Any = OrderedDict()
        names = [name for name in self._files if name.startswith("model") and name != _INDEX]
        for name in names:
            tensors: Any = self._read(name, partial(read_tensors, in_place=self.in_place))
            weights.update(tensors)
            weights._metadata = tensors._metadata
        # Tied names may be in any of the files.
        weights.update(self._read(names[0], lambda path: tied_names(path, weights)))
        weights.update(self._decoded(_STATE, "extra", [0]))
        return weights

    def state(self) -> State:
        """Return the part of the state that is the same on all ranks, with its tensors on the host.

        Raises:
            CheckpointError: `Storage.save` has not written the files.
        """
        return self._decoded(_STATE, "state", range(self.n_ranks))

    def own(self, rank: int) -> State | None:
        """Return a rank's own part of the state; `None` if there were fewer ranks.

        Raises:
            CheckpointError: `Storage.save` has not written the files.
        """
        return self._decoded(f"rank{rank}.json", "own", [rank]) if rank < self.n_ranks else None

    def _decoded(self, file: str, part: str, ranks: Iterable[int]) -> State:
        tensors: dict[str, Tensor] = {}
        for rank in ranks:
            wanted = partial(read_tensors, wanted=lambda name: name.startswith(f"{part}."), in_place=self.in_place)
            tensors |= self._read(f"rank{rank}.safetensors", wanted)
        numbered = {int(name.partition(".")[2]): tensor for name, tensor in tensors.items()}
        value = self._read(file, lambda path: decode(json.loads(path.read_bytes())[part], numbered))
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.path / file} is damaged: it has a {type(value).__name__}")
        return value

    def _read(self, name: str, read: Callable[[Path], T]) -> T:
        try:
            return read(self._local(name))
        except Exception as e:  # reading fails in many ways if the manifest was made for other content
            raise CheckpointError(f"{self.path / name} is damaged: {e or type(e).__name__}") from e

    def verify(self, rank: int = 0, n: int = 1) -> None:
        """Compare all sizes with the manifest's, and a share of the hashes; the content is not parsed.

        Args:
            rank, n: the share to verify, and the number of shares, which take about the same time.

        Raises:
            CheckpointError: a file is missing or differs.
        """
        self.check_sizes()
        names = sorted(self._files, key=lambda name: self._files[name]["size"])[rank::n]
        if self._folder is None:
            self._copy_to(Path(mkdtemp()))
        with ThreadPoolExecutor(4) as threads:
            for name, digest in zip(names, threads.map(self._digest, names), strict=True):
                if digest != self._files[name]["sha256"]:
                    raise CheckpointError(f"{self.path / name} is damaged: its content is not what was written")

    @collective
    def verify_together(self) -> str:
        """Verify the files, a share on each rank; return the damage that the ranks have found, or ''.

        The ranks of a machine copy the files of an object store into one directory.

        Raises:
            CheckpointError: on all ranks: one could not read the files for another reason.
        """
        rank, n = distributed.rank(), distributed.world_size()
        if isinstance(self.path, StorePath):
            made = _agree(mkdtemp)
            folder = next(each for each in made if os.path.isdir(each))
            chosen = distributed.all_gather(folder)
            if folder == made[rank]:
                self._copy_to(Path(folder))
            else:
                os.rmdir(made[rank])
                self._folder = Path(folder)
            rank, n = chosen[:rank].count(folder), chosen.count(folder)

        def damage() -> str:
            try:
                self.verify(rank, n)
            except CheckpointError as e:
                return str(e)
            return ""

        return _joined(_agree(damage))

    @collective
    def drop_copy(self) -> None:
        """Remove the copy of a checkpoint in an object store, once all ranks have read it."""
        if isinstance(self.path, StorePath):
            _agree(lambda: None)
            self._remove_copy()

    def _copy_to(self, folder: Path) -> None:
        self._folder = folder
        self._remove_copy = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def _local(self, name: str) -> Path:
        return Path(self._folder or "", name)

    def _digest(self, name: str) -> str:
        if isinstance(self.path, StorePath):
            try:
                (self.path / name).download(self._local(name))
            except FileNotFoundError as e:
                raise CheckpointError(f"{self.path / name} is missing: {e}") from e
        return _sha256(self._local(name))

    def check_sizes(self) -> None:
        """Compare sizes with the manifest's.

        Raises:
            CheckpointError: a file is missing or of another size.
        """
        in_store = self.path.sizes() if isinstance(self.path, StorePath) else {}
        for name, file in self._files.items():
            size = _size(self.path / name) if isinstance(self.path, Path) else in_store.get(name, 0)
            if size != file["size"]:
                raise CheckpointError(f"{self.path / name} is damaged: it has {size} bytes of {file['size']}")


def read_checkpoint(path: AnyPath) -> Checkpoint:
    """Return the checkpoint in a directory, verified.

    Raises:
        FileNotFoundError: there is no such directory.
        CheckpointError: it is damaged, or not a checkpoint.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"there is no checkpoint {printable(str(path), 1000)}")
    if not (os.path.lexists(path / MANIFEST) if isinstance(path, Path) else (path / MANIFEST).is_file()):
        names = sorted(p.name for p in candidates(path))
        there = f"; the checkpoints in it are {first_few(names)}" if names else ""
        raise CheckpointError(f"{path} is not a whole checkpoint: it has no {MANIFEST}{there}")
    checkpoint = Checkpoint(path, manifest_of(path))
    checkpoint.verify()
    return checkpoint


class Storage:
    """The directory of a run's checkpoints.

    Under DDP all ranks write their parts into it, so all machines must share it.

    Args:
        path: the directory; it is made when needed.
        keep: the number of newest whole checkpoints that are kept.
        background: copy the values to memory of the host, and write them while training continues.
        lock: the lock that the run holds on it.
    """

    def __init__(self, path: AnyPath, keep: int = 3, background: bool = False, lock: "Lock | None" = None) -> None:
        self.path, self.keep = path, keep
        self.background, self.lock = background, lock
        self._since = time.time()
        self._memory = HostMemory()
        self._writing: Future | None = None
        self._removing: Future | None = None
        self._damaged = set[str]()

    @collective
    def check_values(self, weights: Mapping[str, Any], state: State, own: State) -> None:
        """Check that values can be saved.

        Args:
            weights, state, own: as for `save`.

        Raises:
            CheckpointError: on all ranks: a rank has a value that cannot be saved.
        """
        _agree(lambda: _Content(weights, state, own).plan)

    @collective
    def check_writable(self) -> None:
        """Check that all ranks can write into the directory, by writing.

        Raises:
            CheckpointError: on all ranks: one of them cannot write, or sees another directory.
        """
        folder = self.path / _agree(lambda: self._make_temporary("probe"))[0]

        def probe() -> None:
            if isinstance(folder, Path) and not folder.is_dir():
                raise CheckpointError(
                    f"{self.path} on {socket.gethostname()} is not the directory that rank 0 sees under this name; "
                    "all ranks write their part of a checkpoint, so it must be on a file system that all machines share"
                )
            write_new(folder / f"rank{distributed.rank()}", [b"probe"])

        try:
            _agree(probe)
        finally:
            if distributed.is_main():
                with suppress(OSError):
                    remove(folder)

    @collective
    def save(self, name: str, weights: Mapping[str, Any], state: State, own: State, info: dict[str, Any]) -> None:
        """Write a checkpoint.

        In the background the values are copied before this returns. A second save waits for the first.

        Args:
            name: the name of its directory; a number is added if there is one of that name.
            weights: the model's state dict, the same on all ranks.
            state: the rest that is the same on all ranks, of values that `encode` takes.
            own: this rank's own part, of such values.
            info: a small part of plain values, which can be read without the rest.

        Raises:
            CheckpointError: on all ranks, if a rank could not write its part, or has a value that cannot be saved; no
                file is left. After a save in the background, the next `save`, `wait` or `newest` raises it.
        """
        self.wait()
        content: Any = None
        part = _Part()
        files: dict[str, list[Buffer]] = {}

        def encode_all() -> str:
            nonlocal content
            if plain_name(name).startswith(".") or name == _LATEST:
                raise CheckpointError(f"a checkpoint cannot have the name {name!r}")
            content = _Content(weights, state, own)
            return content.plan

        alike = len(set(_agree(encode_all))) == 1

        def take() -> str:
            memory = self._memory if self.background else None
            files.update(content.files(part.rank, part.n if alike else 1, memory))  # otherwise rank 0 writes the whole
            made = self._make_temporary(name)
            if made:
                part.folder = self.path / made
            return made

        try:
            part.folder = self.path / _agree(take)[0]
        except BaseException:
            part.clear()
            raise
        finish = partial(self._commit, part.folder, name, dict(info))
        if self.background:
            self._writing = in_thread(partial(part.write, files, finish))
        else:
            part.write(files, finish)

    def wait(self) -> None:
        """Wait until the save in the background is on disk and old checkpoints are gone; other ranks need not come.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        error = None if self._writing is None else self._writing.exception()
        self._writing = None
        if self._removing is not None and (stays := self._removing.exception()):
            warn(f"old checkpoints stay: {stays}")
        self._removing = None
        if error is not None:
            raise error

    @collective
    def newest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint, verified by all ranks together.

        It warns of each damaged checkpoint that it skips.

        Returns:
            The same checkpoint on all ranks; `None` if there is none.

        Raises:
            CheckpointError: on all ranks: there are checkpoints, and all are damaged.
        """
        self.wait()
        listed, problems = _agree(lambda: self._list() if distributed.is_main() else ([], []))[0]
        for problem in problems:
            self._pass_over(problem)
        for name, manifest in listed:
            checkpoint = Checkpoint(self.path / name, manifest)
            damage = checkpoint.verify_together()
            if not damage:
                return checkpoint
            problems.append(damage)
            self._pass_over(damage)
            self._damaged.add(name)
        if problems:
            raise CheckpointError(
                f"no checkpoint in {self.path} is whole ({first_few(problems, '; ')}); remove them, or the directory, "
                "to begin anew"
            )
        return None

    def _pass_over(self, problem: str) -> None:
        distributed.warn(f"a checkpoint is passed over: {problem}")

    def _make_temporary(self, name: str) -> str:
        """Make, on rank 0, the directory in which all ranks will write; remove the files that killed runs have left."""
        if not distributed.is_main():
            return ""
        if isinstance(self.path, StorePath):
            if self.lock is not None:
                self.lock.check()
                self._remove_torn()
            return f"{name}.id-{secrets.token_hex(4)}"
        folder = temporary_name(self.path / name)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            remove_left_over(self.path, self._since)
            folder.mkdir()
        except OSError as e:
            raise CheckpointError(f"{self.path} is no directory that can be written to: {e}") from e
        return folder.name

    def _remove_torn(self) -> None:
        """Remove what killed runs have left in an object store, without a manifest."""
        there = [*self.path.iterdir()]  # before the manifests, so that what is completed later is not removed
        whole = candidates(self.path)
        for path in there:
            if path not in whole and re.fullmatch(_IN_STORE, path.name):
                remove(path)

    def _list(self) -> tuple[list[tuple[str, dict]], list[str]]:
        """Return names and manifests of the checkpoints, the newest first, and the errors of damaged ones."""
        whole, problems = [], []
        for path in candidates(self.path):
            try:
                manifest = manifest_of(path)
                Checkpoint(path, manifest).check_sizes()
                whole.append((path.name, manifest))
            except StoreError:  # the checkpoint may be whole
                raise
            except (OSError, CheckpointError) as e:
                problems.append(str(e))
        return sorted(whole, key=lambda item: (-item[1]["number"], (self.path / item[0]).is_symlink())), problems

    def _commit(self, folder: AnyPath, name: str, info: dict[str, Any], files: dict[str, dict]) -> None:
        """Turn a directory in which all files are on disk into a checkpoint; on rank 0."""
        before, _ = self._list()
        manifest = {
            "format": _FORMAT,
            "number": before[0][1]["number"] + 1 if before else 1,
            "n_ranks": distributed.world_size(),
            "info": info,
            "files": files,
        }
        if isinstance(folder, StorePath):
            Checkpoint(folder, manifest).check_sizes()  # the sizes of the files of all ranks that have arrived
            if self.lock is not None:
                self.lock.check()
        write_new(folder / MANIFEST, [_signed(manifest)])
        if isinstance(folder, StorePath):
            manifest_of(folder)  # as it has arrived, before another checkpoint is removed
            done: AnyPath = folder
        else:
            done = _renamed(folder, name)
        with replacing(self.path / _LATEST) as pointer:
            write_new(pointer, [f"{done.name}\n".encode()])
        place = {name: info.get(name) for name in ("fit", "epoch", "step")}
        EventFile(warn, **facts_of_launch()).write("saved", path=str(done), **place)
        self._damaged.discard(done.name)
        try:
            self._remove_old([done.name, *(name for name, _ in before)])
        except (OSError, CheckpointError) as e:
            warn(f"old checkpoints stay: {e}")

    def _remove_old(self, names: list[str]) -> None:
        """Remove all but the newest, by the names of the checkpoints, the newest first."""
        # A link leads to a checkpoint that a user has moved away: it does not count, and is kept.
        names = [name for name in names if not (self.path / name).is_symlink()]
        last = [name for name in names if name not in self._damaged][: self.keep][-1]
        latest = (self.path / _LATEST).read_bytes().decode().strip()  # by another run, perhaps
        old = []
        for path in (self.path / name for name in names[names.index(last) + 1 :] if name != latest):
            if isinstance(path, Path):
                # Renamed first, so that a crash does not leave half a checkpoint.
                path = path.rename(temporary_name(path))
            old.append(path)
        if old and self.lock is not None:
            self.lock.check()
        # Removing takes about a third of the time of writing: training does not wait for it.
        self._removing = in_thread(lambda: in_threads([partial(remove, path) for path in old]))


def _renamed(folder: Path, name: str) -> Path:
    """Give a written directory its name, or one with a number."""
    path, k = folder.with_name(name), 1
    while os.path.lexists(path):
        path, k = folder.with_name(f"{name}_{k + 1}"), k + 1
    sync_directory(folder)
    os.rename(folder, path)
    sync_directory(folder.parent)
    return path


class Lock:
    """The lock on a run's directory, which one run holds at a time, among those of all machines that see it.

    It is a POSIX record lock, which the system frees when the process ends, however it ends. A lock of `flock` would
    stay with loader workers that outlive a killed process, as forks share it. Without locks in the file system, or
    without write access, the directory is not locked.

    Args:
        folder: the directory.
    """

    # The files that this process has locked. The system does not keep its threads apart, and would take a lock away
    # when another thread closes the same file.
    _held: ClassVar[set[tuple[int, int]]] = set()

    def __init__(self, folder: Path) -> None:
        self._path: Any = folder / _LOCK
        self._opened = -1

    @collective
    def acquire(self) -> None:
        """Acquire the lock, for all ranks.

        Raises:
            CheckpointError: on all ranks: another run holds it.
        """
        _agree(self._acquire if distributed.is_main() else lambda: None)

    def _acquire(self) -> None:
        end = time.monotonic() + _DYING
        while not self._try():
            if time.monotonic() > end:
                raise CheckpointError(
                    f"{self._path.parent} is in use by {self._holder() or 'another process'}, and one run at a time "
                    f"writes to a directory; if the machine of that one is gone, remove {self._path}"
                    " (errors.html#checkpoint-directory)"
                )
            time.sleep(0.1)

    def _holder(self) -> str:
        """Return the first line of the file, which says who holds the lock; '' if there is none."""
        with suppress(OSError):
            return self._path.read_bytes()[:400].decode(errors="replace").partition("\n")[0]
        return ""

    def check(self) -> None:
        """Check that this run still holds the lock; one of the system stays with its process."""

    def _try(self) -> bool:
        """Try to acquire the lock; return False if another run holds it."""
        opened = -1
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists() and _identity(self._path.stat()) in self._held:
                return False
            opened = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(opened).st_nlink:  # the process that held the lock has removed the file in the meantime
                raise BlockingIOError
            self._opened = opened
            self._held.add(_identity(os.fstat(opened)))
            os.ftruncate(opened, 0)
            os.write(opened, _who().encode())
        except OSError as e:
            if opened >= 0 and opened != self._opened:
                os.close(opened)
                return not isinstance(e, BlockingIOError | PermissionError)
        return True

    def release(self) -> None:
        """Release the lock."""
        if self._opened >= 0:
            with suppress(OSError):
                if os.fstat(self._opened).st_nlink:
                    self._path.unlink()
            self._held.discard(_identity(os.fstat(self._opened)))
            os.close(self._opened)
            self._opened = -1


class StoreLock(Lock):
    """The lock on a run's directory in an object store: an object that names its holder, the run that began last.

    A store cannot tell whether the holder still runs, and a killed run must be resumed without waiting. So a run that
    begins takes the lock, unless it sees that the holder runs, on its own machine. The holder of before notices at its
    next save, before the manifest is written, and stops; what it has saved is what the new run continues.

    Args:
        folder: the directory.
    """

    def __init__(self, folder: StorePath) -> None:
        self._path = folder / _LOCK
        here = f"{socket.gethostname()} {os.getpid()} {began(os.getpid())}"
        self._mine = f"{_who()}\n{here}\n{secrets.token_hex(8)}"

    def _read(self) -> str:
        try:
            return self._path.read_bytes().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def _try(self) -> bool:
        who, _, then = self._read().partition("\n")
        host, pid, since = [*then.partition("\n")[0].split(), "", "", ""][:3]
        is_here = host == socket.gethostname()
        if is_here and pid.isdecimal() and int(pid) != os.getpid() and since == began(int(pid)) != "":
            return False
        if then and not is_here:
            warn(
                f"{self._path.parent} was in use by {printable(who)}, which has not left it: this run takes "
                "it over, and if that one still runs, its next save is refused (errors.html#checkpoint-directory)"
            )
        self._path.write_bytes(self._mine.encode())
        return True

    def check(self) -> None:
        """Check that this run still holds the lock.

        Raises:
            CheckpointError: another run has taken it, or has taken and released it.
        """
        there = self._read()
        if there != self._mine:
            who = printable(there.partition("\n")[0]) or "a run that has ended"
            raise CheckpointError(
                f"{self._path.parent} was taken over by {who}: one run at a time writes to a directory, and the one "
                "that began last holds it; this one writes no more there (errors.html#checkpoint-directory)"
            )

    def release(self) -> None:
        """Release the lock."""
        with suppress(OSError):
            if self._read() == self._mine:
                remove(self._path)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _who() -> str:
    return f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"


def began(pid: int) -> str:
    """Return when a process of this machine began, in ticks since its boot; '' if it has ended, or is not known."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    return ""


_REFUSED = "a checkpoint cannot be saved: "


class _Content:
    """The encoded content of a checkpoint on a rank: its own part, and the part that is the same on all ranks.

    Args:
        weights, state, own: as in `Storage.save`.
    """

    def __init__(self, weights: Mapping[str, Any], state: State, own: State) -> None:
        extra = {name: value for name, value in weights.items() if not isinstance(value, Tensor)}
        plain = OrderedDict((name, value) for name, value in weights.items() if name not in extra)
        plain._metadata = getattr(weights, "_metadata", None)  # type: ignore[attr-defined]
        model, self._notes = without_tied(plain)
        self._tensors = {f"model.{name}": tensor for name, tensor in model.items()}
        self._json = {}
        for part, values, place in (("state", state, ""), ("extra", extra, "the model"), ("own", own, "own")):
            tensors: list[Tensor] = []
            self._json[part] = encode(values, tensors, place)
            self._tensors |= {f"{part}.{i}": tensor for i, tensor in enumerate(tensors)}
        plan = repr([(name, t.dtype, t.shape) for name, t in self._tensors.items() if name.startswith("state.")])
        self.plan = hashlib.sha256(plan.encode()).hexdigest()

    @collective
    def files(self, rank: int, n: int, memory: HostMemory | None) -> dict[str, list[Buffer]]:
        """Return the files that this rank writes, by name.

        Args:
            rank: this rank; from n on it writes only its own part.
            n: the number of ranks that share the large tensors; rank 0 writes the others, and the weights.
            memory: the memory to copy the values to; without it they must not change before they are written.
        """
        sizes = {name: tensor.nbytes for name, tensor in self._tensors.items()}
        of_model = [name for name in sizes if name.startswith("model.")]
        size = sum(sizes[name] for name in of_model)
        is_divided = any(is_shard(self._tensors[name]) for name in of_model)
        shared = [name for name in sizes if name.startswith(("state.", "model.") if is_divided else "state.")]
        loads = [0 if is_divided else size, *[0] * (n - 1)]
        owners = {name: rank if name.startswith("own.") else 0 for name in sizes}
        # Large tensors go to the rank with the least load.
        for name in sorted(shared, key=lambda name: (-sizes[name], name)):
            if sizes[name] >= _SHARED_BYTES:
                owners[name] = loads.index(min(loads))
                loads[owners[name]] += sizes[name]
        # Shards are gathered one by one, in one order on all ranks, and the rank that writes a tensor keeps it.
        mine = {}
        for name, tensor in self._tensors.items():
            whole = gathered(tensor, keep=owners[name] == rank)
            if owners[name] == rank:
                mine[name] = whole
        taken = {name: on_host(t) for name, t in mine.items()} if memory is None else memory.copies(mine)
        model = {name.removeprefix("model."): taken.pop(name) for name in of_model if name in mine}
        pieces: dict[str, list[Buffer]] = {
            f"rank{rank}.safetensors": tensor_file(taken),
            f"rank{rank}.json": [json.dumps({"own": self._json.pop("own")}).encode()],
        }
        if rank < (n if is_divided else 1):
            pieces[_model_part(rank, n) if is_divided else _MODEL] = tensor_file(model, self._notes)
        if rank == 0:
            pieces[_STATE] = [json.dumps(self._json).encode()]
            if is_divided:
                weight_map = {name.removeprefix("model."): _model_part(owners[name], n) for name in of_model}
                index = {"metadata": {"total_size": size}, "weight_map": weight_map}
                pieces[_INDEX] = [json.dumps(index).encode()]
        return pieces


def _model_part(rank: int, n: int) -> str:
    return f"model-{rank + 1:05d}-of-{n:05d}.safetensors"


class _Part:
    """A rank's part in writing a checkpoint; it may run in a thread, as ranks communicate by the store."""

    def __init__(self) -> None:
        self.rank, self.n = distributed.rank(), distributed.world_size()
        self.folder: AnyPath = Path()

    def write(self, files: dict[str, list[Buffer]], finish: Callable[[dict[str, dict]], None]) -> None:
        """Write this rank's files; rank 0 then finishes the checkpoint, if all have written theirs.

        Args:
            files: the content of each file by its name.
            finish: called with the sizes and hashes of all ranks' files.

        Raises:
            CheckpointError: on all ranks, if a rank has failed.
        """
        error, written = None, {}
        key = f"checkpoint{self.folder.name}/"  # the directory has a new name each time
        try:
            calls = [partial(write_new, self.folder / name, content) for name, content in files.items()]
            written = dict(zip(files, in_threads(calls), strict=True))
        except BaseException as e:
            error = e
        if self.rank:
            distributed.tell(f"{key}{self.rank}", json.dumps([written, _said(error)]))
            failure = distributed.hear(f"{key}end", 2 * _PATIENCE)
        else:
            failure = "rank 0 has left"
            try:
                texts = [_said(error)]
                for rank in range(1, self.n):
                    theirs, text = json.loads(distributed.hear(f"{key}{rank}", _PATIENCE))
                    written |= theirs
                    texts.append(text)
                failure = _REFUSED + _joined(texts)
                if failure == _REFUSED:
                    finish(written)
                    failure = ""
            except Exception as e:
                failure, error = str(e) if isinstance(e, CheckpointError) else _REFUSED + _said(e), error or e
            finally:
                self.clear()
                if self.n > 1:
                    distributed.tell(f"{key}end", failure)
        if error is not None and not isinstance(error, Exception):
            raise error
        if failure:
            raise CheckpointError(failure) from error

    def clear(self) -> None:
        """Remove what was written, if it has not become a checkpoint; on rank 0."""
        if self.rank == 0 and self.folder.name:
            with suppress(OSError):
                if isinstance(self.folder, StorePath):
                    with suppress(CheckpointError):
                        manifest_of(self.folder)
                        return
                remove(self.folder)


@collective
def _agree(call: Callable[[], T]) -> list[T]:
    """Return the results of a call on all ranks; raise on all if it fails on one."""
    value: Any = None
    error = None
    try:
        value = call()
    except Exception as e:
        error = e
    told = distributed.all_gather((value, _said(error), isinstance(error, StoreError)))
    if isinstance(error, CheckpointError) and len(told) == 1:
        raise error
    if failure := _joined([text for _, text, _ in told]):
        kind = StoreUnreachable if any(by_store for _, _, by_store in told) else CheckpointError
        raise kind(failure) from error
    return [value for value, _, _ in told]


def _said(error: BaseException | None) -> str:
    if error is None:
        return ""
    # These errors describe themselves.
    return str(error) if isinstance(error, ValueError | OSError) else in_one_line(error)


def _joined(texts: Sequence[str]) -> str:
    """Return the errors of all ranks, in rank order, as one text; '' if there is none."""
    if len(texts) == 1:
        return texts[0]
    ranks = groupby([rank for rank, text in enumerate(texts) if text], texts.__getitem__)
    return "; ".join(f"rank {first_few(numbers)}: {text}" for text, numbers in ranks.items())


# Reading


def candidates(folder: AnyPath) -> Sequence[AnyPath]:
    """Return the directories in a folder, and links to some, that look like checkpoints."""
    if isinstance(folder, StorePath):
        return [path for path in (manifest.parent for manifest in folder.rglob(MANIFEST)) if path.parent == folder]
    return [
        path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if os.path.isdir(path) and path.name[0] != "." and any(os.path.lexists(path / name) for name in _SIGNS)
    ]


def _signed(manifest: dict) -> bytes:
    """Return the text of a manifest, which begins with the sha256 of the rest of it."""
    rest = json.dumps(manifest).encode()[1:]
    return b'{"sha256": "%s", ' % hashlib.sha256(rest).hexdigest().encode() + rest


def manifest_of(folder: AnyPath) -> dict[str, Any]:
    """Return the content of a checkpoint's manifest.

    Raises:
        CheckpointError: the manifest is missing, damaged, or of another format.
        StoreError: the object store cannot be read.
    """
    path = folder / MANIFEST
    if isinstance(path, Path) and _size(path) > _MANIFEST_BYTES:
        raise CheckpointError(f"{path} is damaged: it is too long")
    try:
        text = path.read_bytes()
        manifest = json.loads(text)
        del manifest["sha256"]
        if _signed(manifest) == text:
            if manifest["format"] != _FORMAT:
                raise CheckpointError(f"{path} is of format {manifest['format']!r}; this version reads {_FORMAT}")
            if _is_manifest(path, manifest):
                return manifest
    except (CheckpointError, StoreError):
        raise
    except Exception as e:
        raise CheckpointError(f"{path} is damaged: {e}") from e
    raise CheckpointError(f"{path} is damaged: its content is not what was written")


def _is_manifest(path: AnyPath, manifest: dict) -> bool:
    n, files = manifest["n_ranks"], manifest["files"]
    if len(files) not in (2 + 2 * n, 2 + 3 * n):
        return False
    model = {_INDEX, *(_model_part(rank, n) for rank in range(n))} if _INDEX in files else {_MODEL}
    names = {_STATE} | model | {f"rank{rank}.{kind}" for rank in range(n) for kind in ("json", "safetensors")}
    expected = {"number": 0, "info": {}, "files": dict.fromkeys(names, {"size": 0, "sha256": ""})}
    check_types(manifest, expected, str(path))
    return files.keys() == names


def _size(path: Path) -> int:
    """Return the size of a file; refuse a link, which may lead anywhere."""
    try:
        status = os.lstat(path)
    except OSError as e:
        raise CheckpointError(f"{path} is missing or cannot be read: {e.strerror}") from e
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is damaged: it is not a regular file")
    return status.st_size


def _sha256(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e}") from e


# Values are stored as JSON and a list of tensors. The files name no code, so reading them runs none. A value that JSON
# does not have becomes an object with one of these marks among its keys:
#   {"!tensor": number}, with "order": its dimensions as they lie in memory, if not the usual way
#   {"!array": number, "type": ..., "shape": [...]}, {"!scalar": bytes in hex, "type": ...}: numpy's
#   {"!float": "nan"}, {"!list": number}: a long one of floats
#   {"!tuple": [...]}, {"!dict": [[key, value], ...], "kind": ...}

_DICTS = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_NATIVE = [kind for kind in map(np.dtype, np.typecodes["All"]) if kind.kind in "biufc"]
_ARRAYS = {kind.str: kind for native in _NATIVE for kind in (native, native.newbyteorder())}
_LONG = 1000


def encode(value: Any, tensors: list[Tensor], place: str = "") -> Any:
    """Return a value as JSON, with the indices of tensors, which are appended to a list.

    The tensors are those of the value, without a copy. A tensor that occurs twice is appended once, and is shared again
    when it is decoded. A long list of floats becomes a tensor, too.

    Args:
        value: a value made of None, bool, int, float, str, lists, tuples, dicts, tensors, numpy arrays and scalars.
        tensors: the list.
        place: the place of the value in the state, for the error.

    Raises:
        CheckpointError: it contains another type; the text names its place.
    """
    numbers: dict[tuple, int] = {}

    def number(tensor: Tensor) -> int:
        tensors.append(tensor)
        return len(tensors) - 1

    def of_tensor(x: Tensor) -> dict[str, Any]:
        # The order in memory is kept: some kernels expect a parameter and its optimizer's state to have the same.
        if is_shard(x):
            return {"!tensor": number(x)}
        strides = x.stride()
        order = sorted(range(x.dim()), key=lambda d: (-strides[d], d))
        turned = x.permute(order)
        usual = x.is_contiguous() or not turned.is_contiguous()
        row = x if usual else turned
        key = (row.device, row.data_ptr(), row.dtype, row.shape, row.stride(), row.is_conj(), row.is_neg())
        if key not in numbers or not row.numel():
            numbers[key] = number(row)
        return {"!tensor": numbers[key]} | ({} if usual else {"order": order})

    def of(x: Any, place: str) -> Any:
        kind = type(x)
        if x is None or kind in (bool, int, str) or (kind is float and math.isfinite(x)):
            return x
        if kind is float:
            return {"!float": str(x)}
        if not (why := why_not(x)):
            return of_tensor(x.detach())
        types = {*map(type, x)} if kind is list else {None}
        if types == {float} and len(x) >= _LONG:
            return {"!list": number(torch.tensor(x, dtype=torch.float64))}
        if types <= {bool, int, str}:
            return list(x)  # as they are: one for each step may be a million
        if kind in (list, tuple, torch.Size):
            items = [of(item, f"{place}.{i}") for i, item in enumerate(x)]
            return items if kind is list else {"!tuple": items}
        if kind is dict and all(type(key) is str and not key.startswith("!") for key in x):
            return {key: of(value, f"{place}.{key}") for key, value in x.items()}
        if kind in _DICTS.values():
            pairs = [[of(key, f"{place}.key {key!r}"), of(value, f"{place}.{key}")] for key, value in x.items()]
            return {"!dict": pairs, "kind": kind.__name__}
        if isinstance(x, np.ndarray | np.generic):
            if x.dtype.str not in _ARRAYS:
                why += f" of type {x.dtype}"
            elif kind is not np.ndarray:
                return {"!scalar": x.tobytes().hex(), "type": x.dtype.str}
            else:
                row = torch.from_numpy(np.array(x, order="C").reshape(-1).view(np.uint8))
                return {"!array": number(row), "type": x.dtype.str, "shape": list(x.shape)}
        raise CheckpointError(
            f"{place.removeprefix('.') or 'the state'} is {why}; a checkpoint keeps None, bool, int, float, str, "
            "lists, tuples, dicts, tensors and numpy arrays: turn it into those"
        )

    try:
        return of(value, place)
    except RecursionError:
        raise CheckpointError(f"{place or 'the state'} is nested too deeply, or contains itself") from None


def decode(encoded: Any, tensors: Mapping[int, Tensor] | Sequence[Tensor]) -> Any:
    """Return the value that `encode` has encoded.

    Raises:
        Exception: of several types, if `encode` has not made it.
    """
    if isinstance(encoded, list):
        return [decode(item, tensors) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    mark = next((key for key in encoded if key.startswith("!")), None)
    if mark is None:
        return {key: decode(value, tensors) for key, value in encoded.items()}
    value = encoded[mark]
    kinds = {"!tuple": list, "!dict": list, "!scalar": str, "!float": str}
    kind = type(value)
    if kind is not kinds.get(mark, int):
        raise ValueError(f"it has the mark {mark!r} with a {kind.__name__}")
    match mark:
        case "!tensor":
            order = encoded.get("order")
            return tensors[value] if order is None else tensors[value].permute([order.index(d) for d in sorted(order)])
        case "!array":
            return tensors[value].numpy().view(_ARRAYS[encoded["type"]]).reshape(encoded["shape"]).copy()
        case "!scalar":
            return np.frombuffer(bytes.fromhex(value), _ARRAYS[encoded["type"]])[0]
        case "!float":
            return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[value]
        case "!list":
            return tensors[value].tolist()
        case "!tuple":
            return tuple(decode(value, tensors))
        case "!dict":
            return _DICTS[encoded["kind"]](dict(decode(value, tensors)))
    raise ValueError(f"it has the unknown mark {mark!r}")


def check_types(found: Any, now: Any, name: str) -> None:
    """Refuse values of other types than those of another value; where that is `None`, any value is allowed.

    Numbers count as one type, and tensors must have one shape; lists are compared as far as both go.

    Args:
        found: the value to check.
        now: the other value.
        name: the name of the value, for the error.

    Raises:
        CheckpointError: the text names the value.
    """
    if now is None:
        return
    kind: Any = Tensor if isinstance(now, Tensor) else type(now)
    if kind in (int, float):
        kind = (int, float)
    is_kind = isinstance(found, kind) and isinstance(found, bool) == isinstance(now, bool)
    if is_kind and isinstance(now, Tensor | np.ndarray):
        is_kind = (found.shape, found.dtype) == (now.shape, now.dtype)
    if not is_kind or (isinstance(now, tuple) and len(found) != len(now)):
        raise CheckpointError(
            f"{name} is damaged: {printable(repr(found))} is not of the type of {printable(repr(now))}"
        )
    both: Iterable = ()
    if isinstance(now, dict):
        both = [key for key in now if key in found]
    elif isinstance(now, list | tuple):
        both = range(min(len(found), len(now)))
    for key in both:
        check_types(found[key], now[key], f"{name}.{key}")
