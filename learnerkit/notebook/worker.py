"""What a notebook's worker does: wait for calls, carry them out as one rank, and let rank 0's output be seen.

A worker is a fresh interpreter, in a session of its own: the Stop button, which signals the kernel's processes, does
not reach it, and with the kernel it goes, loader workers included. Between two calls it has nothing but its place in
the process group; the learner lives in the kernel.
"""

import atexit
import faulthandler
import gc
import io
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from learnerkit import world
from learnerkit.notebook import transfer

_PACKAGE = os.path.dirname(world.__file__) + os.sep


def serve(fd: int, front: str) -> None:
    """Serve the kernel until it says that this is the end, or is gone.

    Args:
        fd: of the connection to the kernel.
        front: 'notebook' or 'prompt'.
    """
    sys.argv = [""]
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "fork" in multiprocessing.get_all_start_methods():
        # A dataset from a cell cannot be pickled by name for loader workers that start in another way.
        multiprocessing.set_start_method("fork", force=True)
    worker = Worker(Connection(fd))
    if front == "notebook" and world.rank() == 0:
        sys.stdout, sys.stderr = worker.stream("stdout"), worker.stream("stderr")
        worker.make_shell()
    worker.run()


class Worker:
    """One rank of the workers.

    Args:
        kernel: the connection to the kernel.
    """

    def __init__(self, kernel: Connection) -> None:
        self.kernel = kernel
        self.shell: Any = None
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._kept: Any = None  # the file that the kernel is to read
        threading.Thread(target=self._listen, name="learnerkit_kernel", daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                self._inbox.put(self.kernel.recv())
            except (EOFError, OSError):  # the kernel has gone
                os.killpg(0, signal.SIGKILL)

    def send(self, *message: Any) -> None:
        """Send a message to the kernel."""
        with self._sending:
            self.kernel.send(message)

    def run(self) -> None:
        """Carry out what the kernel wants, call after call."""
        job = None
        while True:
            wish, *about = self._inbox.get()
            if wish == "load":
                job = self._load(*about)
            elif wish == "end":
                leave()
            else:
                if wish == "go":  # or 'drop'
                    self._go(job)
                job = None
                self._clear_up()

    def _load(self, path: str, *surroundings: Any) -> transfer.Job | None:
        self._kept = None
        try:
            transfer.go_where(*surroundings)
            job = transfer.receive(path)
        except Exception as e:
            self.send("done", self._failure(e), None)
            return None
        self.send("loaded")
        return job

    def _go(self, job: transfer.Job) -> None:
        failure, result, path = None, None, None
        if job.rows:
            job.learn.logger = lambda row: self.send("row", row)
        try:
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                self.send("running")
                with job.learn.distrib_ctx(**job.options):
                    result = job.verb(job.learn, *job.args, **job.kwargs)
            finally:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                self._show_figures()
        except BaseException as e:
            failure = self._failure(e)
        if world.rank() == 0:
            try:
                self._kept, path, error = transfer.send_back(job, result)
                if error is not None:
                    failure = failure or self._failure(error)
            except Exception as e:
                failure = failure or self._failure(e)
        self.send("done", failure, path)

    def _failure(self, error: BaseException) -> dict:
        found = {
            "error": transfer.dump_error(error),
            "name": f"{type(error).__name__}: {error}",
            "text": _user_traceback(error),
            "follows": bool(getattr(error, "follows_another", False)),
            "when": time.monotonic(),
        }
        # Frames hold the iterators of loaders, which then end by themselves and at once.
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__
        return found

    def _clear_up(self) -> None:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # Output

    def stream(self, name: str) -> io.TextIOWrapper:
        """A stream whose lines appear in the notebook's cell as they are written."""
        lines = io.BufferedWriter(_Stream(self, name))
        return io.TextIOWrapper(lines, encoding="utf-8", errors="replace", line_buffering=True)

    def make_shell(self) -> None:
        """Make an IPython shell whose displays appear in the notebook's cell."""
        from IPython.core.displaypub import DisplayPublisher
        from IPython.core.interactiveshell import InteractiveShell
        from traitlets.config import Config

        send = self.send

        class Publisher(DisplayPublisher):
            def publish(self, data: dict, metadata: dict | None = None, **how: Any) -> None:
                how = {name: how[name] for name in ("transient", "update") if name in how}
                send("shown", {"data": data, "metadata": metadata, **how})

            def clear_output(self, wait: bool = False) -> None:
                send("cleared", wait)

        config = Config()
        config.HistoryManager.enabled = False
        main = sys.modules["__main__"]
        self.shell = InteractiveShell.instance(config=config, display_pub_class=Publisher, user_module=main)
        self.shell.kernel = self  # what asks whether this is a notebook looks for one

    def _show_figures(self) -> None:
        if self.shell is not None:
            self.shell.events.trigger("post_execute")  # as at the end of a cell
        sys.stdout.flush()
        sys.stderr.flush()


class _Stream(io.RawIOBase):
    """Bytes to the kernel; a loader's workers, which must not use its connection, write to the file descriptor."""

    def __init__(self, worker: Worker, name: str) -> None:
        self.worker, self.name, self.process = worker, name, os.getpid()
        self.number = {"stdout": 1, "stderr": 2}[name]

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.number

    def write(self, data: Any) -> int:
        data = bytes(data)
        if os.getpid() == self.process:
            self.worker.send("printed", self.name, data)
        else:
            os.write(self.number, data)
        return len(data)


def leave() -> None:
    """End this process as the launcher's end: exit hooks run, but nothing is destroyed (it could wait for others)."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        threading._shutdown()
        atexit._run_exitfuncs()
    finally:
        os._exit(0)


def _user_traceback(error: BaseException) -> str:
    """The traceback without this package's frames, unless the error is its own."""
    found = traceback.TracebackException.from_exception(error)
    *others, last = found.stack or [None]
    kept = [frame for frame in others if not frame.filename.startswith(_PACKAGE)]
    found.stack = traceback.StackSummary.from_list([*kept, *([last] if last else [])])
    return "".join(found.format())
