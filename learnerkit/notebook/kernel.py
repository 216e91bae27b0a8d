"""DDP from a notebook cell or a Python prompt: worker processes train, and the trained learner comes back.

The kernel is no rank. It sends the learner with each call to workers that live as long as the context, shows what rank
0 prints and displays, and takes its weights and data back into the live learner. Workers are fresh interpreters, so it
does not matter what the kernel has done with CUDA before.
"""

import codecs
import functools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import connection
from types import GeneratorType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from learnerkit import world
from learnerkit.launch.environment import LOOPBACK, Topology, rank_environment
from learnerkit.notebook import transfer
from learnerkit.parallel.distributed import OWN_DEVICE, DistributedCallback
from learnerkit.text import killed_by
from learnerkit.utils import front_end, ipython_shell, warn

if TYPE_CHECKING:
    from learnerkit.learner import Learner

FOLLOW_SECONDS = 15.0
"""How long after the first failure of a worker the others may take to leave by themselves."""

LEAVE_SECONDS = 5.0
"""How long workers may take to end when the context is left."""

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from learnerkit.notebook.worker import serve; serve(int(sys.argv[2]), sys.argv[3])"
)


class WorkerTraceback(Exception):
    """The cause of an error that a worker raised: the traceback it had there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def on_workers(verb: Callable) -> Callable:
    """Have a verb of the learner carried out by the workers of a notebook, where there are any."""

    @functools.wraps(verb)
    def run(learn: "Learner", *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if learn._workers is None:
            return verb(learn, *args, **kwargs)
        result, error = learn._workers.call(run, args, kwargs)
        if error is not None:
            raise error  # the worker's own traceback stands above
        return result

    return run


def distrib_ctx(learn: "Learner", nproc: int | None = None, **kwargs: Any) -> Any:
    """What `Learner.distrib_ctx` returns.

    Raises:
        TypeError, ValueError: an argument that `DistributedCallback` does not take; `nproc` where a launcher starts the
            processes; or the learner is distributed already.
    """
    if learn._workers is not None or any(isinstance(cb, DistributedCallback) for cb in learn.cbs):
        raise ValueError("the learner is distributed already (to_distributed or an outer distrib_ctx)")
    callback = DistributedCallback(**kwargs)
    if nproc == 0:
        raise ValueError(f"got nproc=0; it is the number of processes. If a device was meant: {OWN_DEVICE}")
    if world.world_size() == 1:
        workers = _workers_for(learn, nproc, kwargs)
        if workers is None:
            _warn_of_a_model_of_its_own()
        return workers or nullcontext(learn)
    if nproc is not None:
        raise ValueError(
            f"got nproc={nproc} in one of {world.world_size()} processes of a launcher, which is told how many "
            f"(`python -m learnerkit.launch --nproc {nproc} script.py`): write distrib_ctx() without nproc. If a "
            f"device was meant: {OWN_DEVICE}"
        )
    return learn.added_cbs(callback)


def _warn_of_a_model_of_its_own() -> None:
    """Warn in a process that somebody's multiprocessing has started without a way to meet the others."""
    if multiprocessing.parent_process() is not None and not world.is_joined() and "RANK" not in os.environ:
        warn(
            "distrib_ctx() in a process that multiprocessing has started, without a process group and without RANK in "
            "its environment: this process trains a model of its own, whatever others do. Start the script with "
            "`python -m learnerkit.launch --nproc N script.py`, or call torch.distributed.init_process_group first"
        )


def _workers_for(learn: "Learner", nproc: int | None, options: dict) -> "Workers | None":
    """The workers that `distrib_ctx` starts here, if it starts any.

    Args:
        learn: the learner.
        nproc: how many are asked for; by default one for each accelerator.
        options: of the `DistributedCallback`.

    Raises:
        ValueError: workers are asked for in a script, or more than there are accelerators.
    """
    front = front_end()
    if not front:
        if nproc is None:
            return None
        raise ValueError(
            f"got nproc={nproc}: distrib_ctx starts processes only in a notebook or at a Python prompt; a script's are "
            f"started by `python -m learnerkit.launch --nproc {nproc} script.py`, and it says distrib_ctx() without "
            "nproc"
        )
    on_cpu = learn.dls.device.type == "cpu"
    count = 0 if on_cpu else torch.accelerator.device_count()
    if nproc is not None and (not isinstance(nproc, int) or nproc < 1):
        raise ValueError(f"got nproc={nproc!r}; it is the number of processes, 1 or more")
    if nproc is not None and not on_cpu and nproc > count:
        raise ValueError(
            f"got nproc={nproc}, and there are {count} accelerators, of which each process needs one; for processes on "
            "the CPU make the DataLoaders with device='cpu'"
        )
    nproc = count if nproc is None else nproc
    return Workers(learn, nproc, options, front) if nproc > 1 else None


class _Process:
    """A worker as the kernel sees it.

    Args:
        rank: its number.
        process: itself.
        line: the connection to it.
    """

    def __init__(self, rank: int, process: subprocess.Popen, line: connection.Connection) -> None:
        self.rank, self.process, self.line = rank, process, line
        self.state = "idle"
        self.failure: dict | None = None
        self.path: str | None = None
        self.late = False
        self.text = codecs.getincrementaldecoder("utf-8")("replace")
        self.tail: deque[str] = deque(maxlen=30)
        if process.stdout is not None:
            os.set_blocking(process.stdout.fileno(), False)

    def send(self, *message: Any) -> None:
        """Send a message; one that is dead does not hear it."""
        try:
            self.line.send(message)
        except OSError:
            pass

    def messages(self) -> Iterator[tuple]:
        """What it has sent since."""
        try:
            while self.line.poll():
                yield self.line.recv()
        except (EOFError, OSError):  # it has ended
            pass

    def read(self) -> str:
        """What it has written to its file descriptors since."""
        found = b""
        try:
            while chunk := self.process.stdout.read(1 << 16):
                found += chunk
        except (AttributeError, ValueError):  # it writes to the terminal, or is over
            pass
        return self.text.decode(found)

    def kill(self) -> None:
        """End it at once, with the loader workers it has."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def give_up(self) -> None:
        """End it because it does not end by itself."""
        self.kill()
        self.state, self.late = "dead", True


class Workers:
    """The processes that train for a learner; they live as long as this context.

    Args:
        learn: the learner, whose verbs they carry out.
        nproc: how many, one for each rank.
        options: of the `DistributedCallback`.
        front: 'notebook' or 'prompt'.
    """

    def __init__(self, learn: "Learner", nproc: int, options: dict, front: str) -> None:
        self.learn, self.nproc, self.options, self.front = learn, nproc, options, front
        self._processes: list[_Process] = []
        self._store: dist.Store | None = None
        self._seeds_left = ""
        self._presses, self._presses_told = 0, False
        self._late = float("inf")  # when the patience with those that have not left ends

    def __reduce__(self) -> tuple:
        return type(None), ()  # the learner that a worker gets has none

    def __enter__(self) -> "Learner":
        if self.learn._workers is not None:
            raise ValueError("the learner is distributed already (an outer distrib_ctx)")
        self._start()
        self.learn._workers = self
        return self.learn

    def __exit__(self, *error: object) -> None:
        self.learn._workers = None
        self._end()

    # Start and end

    def _start(self) -> None:
        with socket.create_server((LOOPBACK, 0)) as listener:
            port = listener.getsockname()[1]
            # Here rather than in rank 0: it outlives each of the workers. On loopback only, at a port of the kernel's.
            self._store = dist.TCPStore(
                LOOPBACK, port, self.nproc, is_master=True, master_listen_fd=listener.detach(), wait_for_workers=False
            )
        self._seeds_left = ""
        try:
            with self._heard_presses():
                for rank in range(self.nproc):
                    self._processes.append(self._start_one(rank, port))
            if self._presses:
                raise KeyboardInterrupt
        except BaseException:  # or too many open files
            self._end()
            raise

    def _start_one(self, rank: int, port: int) -> _Process:
        gpus = "" if self.learn.dls.device.type == "cpu" else None
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        if rank == 0 and self.front == "prompt":  # straight to the terminal
            pipe = {}
        _, path, environ = transfer.surroundings()
        mine, theirs = multiprocessing.Pipe()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(path), str(theirs.fileno()), self.front],
                env=rank_environment(environ, Topology(self.nproc, port), rank, gpus),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                bufsize=0,
                start_new_session=True,  # the Stop button signals the kernel's process group
                **pipe,
            )
        return _Process(rank, process, mine)

    def _end(self) -> None:
        with self._heard_presses():  # which must not keep it from ending them all
            for p in self._processes:
                p.send("end")
            end = time.monotonic() + LEAVE_SECONDS
            try:
                while any(p.state != "dead" for p in self._processes) and time.monotonic() < end and not self._presses:
                    self._take_messages(0.05)  # what exit hooks print
            finally:
                for p in self._processes:
                    p.kill()
                    p.line.close()
                    if p.process.stdout is not None:
                        p.process.stdout.close()
                self._processes.clear()
                self._store = None

    # A call

    def call(self, verb: Callable, args: tuple, kwargs: dict) -> tuple[Any, BaseException | None]:
        """Have the workers carry out a verb, and bring back what has become of the learner.

        Returns:
            What the verb returned, and what it raised: on the worker where it was first, or `KeyboardInterrupt`.

        Raises:
            TypeError: something cannot be sent.
        """
        __tracebackhide__ = True
        if not self._processes:
            self._start()
        keep_seeds = self._seeds_left == transfer.seeds_fingerprint()
        self.learn._take_callbacks()  # else one that is shared would take another learner along
        args = tuple(map(_listed, args))
        kwargs = {name: _listed(value) for name, value in kwargs.items()}
        file, path, job = transfer.send(self.learn, verb, args, kwargs, self.options, keep_seeds)
        with self._heard_presses(), self._ended_by_errors():
            with file:
                for p in self._processes:
                    p.failure = p.path = None
                self._tell("load", path, *transfer.surroundings())
                loaded = self._gather("loaded")
            if not loaded or self._presses:
                self._tell("drop")  # they answer nothing
            else:
                self._tell("go")
                self._gather("done")
            back = self._processes[0].path
            result = transfer.bring_back(back, job) if back is not None else None
        self._seeds_left = transfer.seeds_fingerprint()
        return result, self._what_went_wrong()

    @contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        """After an error of the kernel's own (the user's logger, say) the workers' answers would go to other calls."""
        try:
            yield
        except BaseException:
            self._end()
            raise

    def _tell(self, *message: Any) -> None:
        for p in self._processes:
            p.send(*message)
            p.state = "told" if p.state != "dead" else p.state

    def _gather(self, state: str) -> bool:
        """Wait until every worker has come to `state`, or has ended otherwise; whether all have."""
        self._late, self._presses_told = float("inf"), False
        while any(p.state not in (state, "done", "dead") for p in self._processes):
            self._take_messages(0.2)
            self._heed_presses()
            if time.monotonic() > self._late:
                for p in self._processes:
                    if p.state not in (state, "done", "dead"):
                        p.give_up()
        self._take_messages(0)
        return all(p.state == state for p in self._processes)

    def _take_messages(self, seconds: float) -> None:
        living = [p for p in self._processes if p.state != "dead"]
        connection.wait([f for p in living for f in (p.line, p.process.stdout) if f is not None], seconds)
        for p in living:
            # Asked first, so that nothing it has said is missed. The connection tells less: a loader's worker may hold
            # it open still.
            over = p.process.poll() is not None
            for message in p.messages():
                self._take(p, *message)
            self._show(p, p.read())
            if over:
                p.kill()
                p.state = "dead"
                self._hurry()

    def _take(self, p: _Process, kind: str, *about: Any) -> None:
        if kind == "printed":
            name, data = about
            stream = sys.stdout if name == "stdout" else sys.stderr
            stream.write(data.decode(errors="replace"))
            stream.flush()
        elif kind == "shown":
            ipython_shell().display_pub.publish(**about[0])
        elif kind == "cleared":
            ipython_shell().display_pub.clear_output(*about)
        elif kind == "row":
            self.learn.logger(*about)
        else:
            p.state = kind
            if kind == "done":
                p.failure, p.path = about
                if p.failure is not None:
                    self._hurry()

    def _show(self, p: _Process, text: str) -> None:
        if text and p.rank == 0:
            sys.stderr.write(text)
            sys.stderr.flush()
        elif text:  # kept for the case that it dies
            p.tail.extend(text.splitlines())

    def _hurry(self) -> None:
        self._late = min(self._late, time.monotonic() + FOLLOW_SECONDS)

    # The Stop button

    @contextmanager
    def _heard_presses(self) -> Iterator[None]:
        """Count them rather than be torn out of the middle of something."""
        self._presses = 0
        last = 0.0

        def press(*_: object) -> None:
            nonlocal last
            now = time.monotonic()
            self._presses += now - last > 0.3  # a button pressed in anger is pressed once
            last = now

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, press)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _heed_presses(self) -> None:
        if self._presses > 1:
            for p in self._processes:
                p.give_up()
        elif (
            self._presses
            and not self._presses_told
            and all(p.state in ("running", "done", "dead") for p in self._processes)
        ):
            self._presses_told = True
            for p in self._processes:
                if p.state == "running":
                    os.kill(p.process.pid, signal.SIGINT)

    # What went wrong

    def _what_went_wrong(self) -> BaseException | None:
        dead = [p for p in self._processes if p.state == "dead"]
        failed = [p for p in self._processes if p not in dead and p.failure is not None]
        died, pressed = [self._describe(p) for p in dead if not p.late], self._presses
        if dead:  # the others are of no use without them; the next call starts new ones
            self._end()
        if pressed:
            return KeyboardInterrupt()
        if died:
            return RuntimeError("\n".join(died))
        if failed:
            first = min(failed, key=lambda p: (p.failure["follows"], p.failure["when"]))
            error = transfer.load_error(first.failure["error"]) or RuntimeError(first.failure["name"])
            text = _name_cells(first.failure["text"])
            error.__cause__ = WorkerTraceback(f"on rank {first.rank} of {self.nproc}:\n{text}")
            return error
        late = ", ".join(str(p.rank) for p in dead)
        return RuntimeError(f"rank {late} did not leave with the others, and was killed") if dead else None

    def _describe(self, p: _Process) -> str:
        code = p.process.returncode
        how = killed_by(-code) if code < 0 else f"ended with exit code {code}"
        tail = "".join(f"\n  {line}" for line in p.tail)
        return f"the worker of rank {p.rank} {how}; the next call starts new workers" + (
            tail and f"; its last words:{tail}"
        )


def _listed(x: Any) -> Any:
    """`x`, or the list of what it generates, as a generator cannot be sent."""
    return list(x) if isinstance(x, GeneratorType) else x


def _name_cells(text: str) -> str:
    """A traceback in which cells are called as in the notebook."""
    name_of = getattr(getattr(ipython_shell(), "compile", None), "format_code_name", None)  # not in IPython 7
    if name_of is not None:
        for name in transfer.sources():
            found = name_of(name)
            if found:
                text = text.replace(f'File "{name}"', " ".join(found))
    return text
