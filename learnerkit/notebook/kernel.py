"""DDP from a notebook cell or a Python prompt: worker processes train, and the trained learner comes back.

The kernel is not a rank. With each call it sends the learner to workers that live as long as the context, shows the
output of rank 0, and copies rank 0's weights and attributes into its own learner. Workers are fresh interpreters, so
the kernel may have used CUDA before.
"""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from learnerkit import arguments, distributed, torch_internals
from learnerkit.endings import ExceptionReport
from learnerkit.launch.environment import Topology, rank_environment
from learnerkit.notebook import settings, transfer
from learnerkit.notebook.pickling import load_error
from learnerkit.parallel.distributed import OWN_DEVICE, DistributedCallback, member_of
from learnerkit.processes.machine import LOOPBACK
from learnerkit.processes.rank_main import kill_group
from learnerkit.state import Learner
from learnerkit.text import killed_by
from learnerkit.utils import front_end, ipython_shell, warn
from learnerkit.values import same

FOLLOW_SECONDS = 15.0  # seconds that the other workers get to end the call after one has failed
LEAVE_SECONDS = 5.0  # seconds that workers get to end when the context is left

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from learnerkit.processes.rank_main import end_process; from learnerkit.notebook.worker import serve; "
    "serve(int(sys.argv[2]), sys.argv[3]); end_process(0)"
)


class WorkerTraceback(Exception):
    """The traceback of an error in its worker, as the cause of the error in the kernel."""


def distrib_ctx(learn: "Learner", nproc: int | None = None, **kwargs: Any) -> AbstractContextManager["Learner"]:
    """Return the context for `Learner.distrib_ctx`.

    Raises:
        TypeError: an argument that `DistributedCallback` does not take.
        ValueError: the learner is distributed already; or `nproc` is not a number of processes, is more than there are
            accelerators, or is given in a script, whose processes a launcher starts.
    """
    if learn._workers is not None or member_of(learn.cbs) is not None:
        raise ValueError("the learner is distributed already (to_distributed or an outer distrib_ctx)")
    callback = DistributedCallback(**kwargs)
    if nproc is not None and (not isinstance(nproc, int) or nproc < 1):
        raise ValueError(
            f"got nproc={nproc!r}; it is the number of processes, 1 or more. If a device was meant: {OWN_DEVICE}"
        )
    if distributed.world_size() > 1:
        if nproc is None:
            return learn.added_cbs(callback)
        raise ValueError(
            f"got nproc={nproc} in one of {distributed.world_size()} processes of a launcher, which is told how many "
            f"(`python -m learnerkit.launch --nproc {nproc} script.py`): write distrib_ctx() without nproc. If a "
            f"device was meant: {OWN_DEVICE}"
            " (errors.html#processes)"
        )
    front = front_end()
    if not front and nproc is not None:
        raise ValueError(
            f"got nproc={nproc}: distrib_ctx starts processes only in a notebook or at a Python prompt; a script's are "
            f"started by `python -m learnerkit.launch --nproc {nproc} script.py`, and it says distrib_ctx() without "
            "nproc"
            " (errors.html#processes)"
        )
    if front:
        on_cpu = learn.dls.device.type == "cpu"
        count = 0 if on_cpu else torch.accelerator.device_count()
        nproc = count if nproc is None else nproc
        if not on_cpu and nproc > count:
            raise ValueError(
                f"got nproc={nproc}, and there are {count} accelerators, of which each process needs one; for "
                "processes on the CPU make the DataLoaders with device='cpu'"
            )
        if nproc > 1:
            return Workers(learn, nproc, kwargs, front)
    if multiprocessing.parent_process() is not None and not distributed.is_joined() and "RANK" not in os.environ:
        warn(
            "distrib_ctx() in a process that multiprocessing has started, without a process group and without RANK in "
            "its environment: this process trains a model of its own, whatever others do. Start the script with "
            "`python -m learnerkit.launch --nproc N script.py`, or call torch.distributed.init_process_group first"
            " (errors.html#processes)"
        )
    return nullcontext(learn)


class _WorkerProcess:
    """A notebook worker, as the kernel sees it."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], connection: Connection) -> None:
        self.rank, self.process = rank, process
        self.connection = connection
        # 'idle', 'called', the messages 'loaded', 'running' and 'done' of its `CallServer`, or 'dead'.
        self.state = "idle"
        # The report of an error in this call, and the pickled error.
        self.failure: tuple[ExceptionReport, bytes] | None = None
        self.path: str | None = None  # the file with the changes of the call, from rank 0
        self.killed = False  # it was killed because it did not end the call
        self.last_lines: deque[str] = deque(maxlen=30)  # the last lines that it has printed
        self._decoder = getincrementaldecoder("utf-8")("replace")
        if process.stdout is not None:
            os.set_blocking(process.stdout.fileno(), False)

    def send(self, *message: Any) -> None:
        """Send a message, unless the worker is dead."""
        with suppress(OSError):
            self.connection.send(message)

    def receive(self) -> Iterator[tuple]:
        """Iterate over the messages that have come."""
        with suppress(EOFError, OSError):  # it has ended
            while self.connection.poll():
                yield self.connection.recv()

    def read_output(self) -> str:
        """Read the output on its file descriptors, if that does not go to the terminal."""
        output = b""
        while self.process.stdout is not None and (chunk := self.process.stdout.read(1 << 16)):
            output += chunk
        return self._decoder.decode(output)

    def kill(self) -> None:
        """Kill it and its loader workers."""
        kill_group(self.process.pid)
        self.process.wait()
        self.state = "dead"


class Workers:
    """The processes that train for a learner; as a context it starts and ends them.

    Args:
        learn: the learner whose methods they carry out.
        nproc: the number of processes, one for each rank.
        options: the arguments of the `DistributedCallback`.
        front: 'notebook' or 'prompt'.
    """

    def __init__(self, learn: "Learner", nproc: int, options: dict, front: str) -> None:
        self.learn, self.nproc = learn, nproc
        self.options, self.front = options, front
        self._processes: list[_WorkerProcess] = []
        self._store: dist.Store | None = None
        self._random_states: tuple | None = None  # the random states that the last call has left
        self._stops, self._stop_sent = 0, False
        self._thread: int | None = None  # the thread whose call goes on
        self._deadline = float("inf")  # the time at which workers that have not ended the call are killed

    def __reduce__(self) -> tuple:
        return type(None), ()  # a worker's learner has no workers

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
            # The kernel hosts it, as it must outlive any worker.
            self._store = torch_internals.host_store(listener, self.nproc)
        self._random_states = None
        try:
            with self._counted_stops():
                for rank in range(self.nproc):
                    self._processes.append(self._start_one(rank, port))
            if self._stops:
                raise KeyboardInterrupt
        except BaseException:  # for example, there are too many open files
            self._end()
            raise

    def _start_one(self, rank: int, port: int) -> _WorkerProcess:
        gpus = "" if self.learn.dls.device.type == "cpu" else None
        to_terminal = rank == 0 and self.front == "prompt"
        _, path, environ = settings.get_surroundings()
        mine, theirs = multiprocessing.Pipe()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(path), str(theirs.fileno()), self.front],
                env=rank_environment(environ, Topology(self.nproc, port), rank, gpus),
                stdin=subprocess.DEVNULL,
                stdout=None if to_terminal else subprocess.PIPE,
                stderr=None if to_terminal else subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                bufsize=0,
                start_new_session=True,  # the Stop button signals the kernel's process group
            )
        return _WorkerProcess(rank, process, mine)

    def _end(self) -> None:
        with self._counted_stops():  # a stop must not prevent the end of all workers
            self._send("end")
            end = time.monotonic() + LEAVE_SECONDS
            try:
                while self._living() and time.monotonic() < end and not self._stops:
                    self._take_messages(0.05)  # exit hooks may print
            finally:
                for p in self._processes:
                    p.kill()
                    p.connection.close()
                    if p.process.stdout is not None:
                        p.process.stdout.close()
                self._processes.clear()
                self._store = None

    # A call

    def call(self, method: Callable, args: tuple, kwargs: dict) -> Any:
        """Let the workers carry out a method of the learner, copy its changes back, and return its result.

        Raises:
            TypeError: an object cannot be sent.
            Exception: the first error of a worker; its cause shows the traceback there.
            RuntimeError: a worker died, or did not end the call; or another thread's call goes on.
            KeyboardInterrupt: Ctrl-C or the Stop button.
        """
        __tracebackhide__ = True
        arguments.check_thread(self.learn, self._thread, method.__name__)
        self._thread = threading.get_ident()
        try:
            return self._call(method, args, kwargs)
        finally:
            self._thread = None

    def _call(self, method: Callable, args: tuple, kwargs: dict) -> Any:
        __tracebackhide__ = True
        if not self._processes:
            self._start()
        # If the kernel's generators have not moved since the last call, each worker continues with its own.
        states = settings.get_random_states()
        moved = not same(states, self._random_states)
        call = transfer.Call(self.learn, method, args, kwargs, self.options)
        file, path, shared = transfer.send(call, states if moved else None)
        try:
            with self._counted_stops():
                with file:
                    for p in self._processes:
                        p.failure = p.path = None
                    self._send("load", path, *settings.get_surroundings())
                    loaded = self._wait_for("loaded")
                if not loaded or self._stops:
                    self._send("drop")  # they do not answer this
                else:
                    self._send("go")
                    self._wait_for("done")
                back = self._processes[0].path
                result = transfer.bring_back(back, self.learn, shared) if back is not None else None
        # An error in the kernel, such as its logger's; the next call would get these workers' answers.
        except BaseException:
            self._end()
            raise
        self._random_states = settings.get_random_states()
        error = self._find_error()
        if error is not None:
            raise error  # its cause, above, shows the worker's own traceback
        return result

    def _living(self) -> list[_WorkerProcess]:
        return [p for p in self._processes if p.state != "dead"]

    def _send(self, *message: Any) -> None:
        for p in self._living():
            p.send(*message)
            p.state = "called"

    def _wait_for(self, state: str) -> bool:
        """Wait until every worker is in `state`, or has ended the call; tell whether all are in `state`."""
        self._deadline, self._stop_sent = float("inf"), False
        while waiting := [p for p in self._processes if p.state not in (state, "done", "dead")]:
            self._take_messages(0.2)
            self._pass_stops_on()
            if time.monotonic() > self._deadline:
                self._kill(waiting)
        self._take_messages(0)
        return all(p.state == state for p in self._processes)

    def _take_messages(self, seconds: float) -> None:
        living = self._living()
        sources: list = [f for p in living for f in (p.connection, p.process.stdout) if f is not None]
        connection.wait(sources, seconds)
        for p in living:
            # The process is polled first, so that no message is missed. The connection does not show its end: a loader
            # worker may still have it open.
            ended = p.process.poll() is not None
            for message in p.receive():
                self._handle(p, *message)
            text = p.read_output()
            if p.rank:
                p.last_lines.extend(text.splitlines())  # kept for the error message if the worker dies
            elif text:
                print(text, end="", file=sys.stderr, flush=True)
            if ended:
                p.kill()
                self._limit_wait()

    def _handle(self, p: _WorkerProcess, kind: str, *values: Any) -> None:
        if kind == "printed":
            name, data = values
            print(data.decode(errors="replace"), end="", file=getattr(sys, name), flush=True)
        elif kind == "shown":
            ipython_shell().display_pub.publish(**values[0])
        elif kind == "cleared":
            ipython_shell().display_pub.clear_output(*values)
        elif kind == "row":
            self.learn.logger(*values)
        else:
            p.state = kind
            if kind == "done":
                p.failure, p.path = values
                if p.failure is not None:
                    self._limit_wait()

    def _limit_wait(self) -> None:
        self._deadline = min(self._deadline, time.monotonic() + FOLLOW_SECONDS)

    def _kill(self, processes: list[_WorkerProcess]) -> None:
        for p in processes:
            p.kill()
            p.killed = True

    # The Stop button

    @contextmanager
    def _counted_stops(self) -> Iterator[None]:
        """Count stops (Ctrl-C, the Stop button), each of which would raise KeyboardInterrupt at any point."""
        self._stops = 0
        last = 0.0

        def count(*_: object) -> None:
            nonlocal last
            now = time.monotonic()
            self._stops += now - last > 0.3  # several stops in a moment count as one
            last = now

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, count)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _pass_stops_on(self) -> None:
        """Interrupt the workers at the first stop, once all have begun, and kill them at the second."""
        if self._stops > 1:
            self._kill(self._processes)
        elif self._stops and not self._stop_sent and not {p.state for p in self._processes} & {"called", "loaded"}:
            self._stop_sent = True
            for p in self._processes:
                if p.state == "running":
                    os.kill(p.process.pid, signal.SIGINT)

    # Errors

    def _find_error(self) -> BaseException | None:
        """Return the error that the call raises: KeyboardInterrupt, a worker's death, or a worker's first error."""
        dead = [p for p in self._processes if p.state == "dead"]
        failed = [(p, p.failure) for p in self._living() if p.failure is not None]
        died, stopped = [_describe_death(p) for p in dead if not p.killed], self._stops
        if dead:  # the other workers are useless without them; the next call starts new ones
            self._end()
        if stopped:
            return KeyboardInterrupt()
        if died:
            return RuntimeError("\n".join(died))
        if failed:
            p, (report, pickled) = min(failed, key=lambda each: each[1][0].order)
            error = load_error(pickled) or RuntimeError(report.error)
            text = _name_cells(report.traceback)
            error.__cause__ = WorkerTraceback(f"\non rank {p.rank} of {self.nproc}:\n{text}")
            return error
        killed = ", ".join(str(p.rank) for p in dead)
        return RuntimeError(f"rank {killed} did not end the call with the others, and was killed") if dead else None


def _describe_death(p: _WorkerProcess) -> str:
    code = p.process.returncode
    how = killed_by(-code).rstrip(",") if code < 0 else f"ended with exit code {code}"
    last = "".join(f"\n  {line}" for line in p.last_lines)
    printed = last and f"; it printed last:{last}"
    return f"the worker of rank {p.rank} {how}; the next call starts new workers{printed}"


def _name_cells(text: str) -> str:
    """Return a traceback in which cells have the titles that the notebook shows."""
    for name in torch_internals.typed_sources():
        if title := torch_internals.cell_title(ipython_shell(), name):
            text = text.replace(f'File "{name}"', title)
    return text
