"""The process of a notebook worker: it waits for calls, carries them out as one rank, and sends rank 0's output.

A worker is a fresh interpreter in its own session, so the Stop button, which signals the kernel's process group, does
not reach it. It ends with the kernel, and its loader workers with it. Between two calls it keeps only its place in the
process group: the learner lives in the kernel.
"""

import bdb
import builtins
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
from multiprocessing.connection import Connection
from typing import IO, Any

import torch

from learnerkit import distributed, torch_internals
from learnerkit.endings import ExceptionReport, ending_of
from learnerkit.notebook import pickling, settings, transfer
from learnerkit.processes.rank_main import forget_frames, kill_group, user_traceback


def serve(fd: int, front: str) -> None:
    """Carry out the kernel's calls until it sends 'end'.

    Args:
        fd: the file descriptor of the connection to the kernel.
        front: 'notebook' or 'prompt'.
    """
    sys.argv = [""]
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Loader workers that start in another way cannot unpickle a dataset that is defined in a cell.
    multiprocessing.set_start_method("fork", force=True)
    server = CallServer(Connection(fd))
    if front == "notebook" and distributed.rank() == 0:
        sys.stdout, sys.stderr = server.make_stream("stdout"), server.make_stream("stderr")
        server.make_shell()
    elif front == "notebook":
        builtins.display = lambda *args, **kwargs: None  # type: ignore[attr-defined]  # these ranks show nothing
    server.run()


class CallServer:
    """Carries out, in a notebook worker, the calls that come through a connection to the kernel."""

    def __init__(self, kernel: Connection) -> None:
        self.kernel = kernel
        self.shell: Any = None
        self._messages: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._file: IO[bytes] | None = None  # open until the kernel has read it
        threading.Thread(target=self._listen, name="learnerkit_kernel", daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                self._messages.put(self.kernel.recv())
            except (EOFError, OSError):  # the kernel is dead
                kill_group(0)

    def send(self, *message: Any) -> None:
        """Send a message to the kernel."""
        with self._sending:
            self.kernel.send(message)

    def run(self) -> None:
        """Carry out the kernel's requests until it sends 'end'."""
        received: Any = None
        while True:
            kind, *values = self._messages.get()
            if kind == "end":
                return
            if kind == "load":
                received = self._load(*values)
                continue
            if kind == "go":  # otherwise it is 'drop'
                self._carry_out(received)
            received = None
            gc.collect()
            torch.cuda.empty_cache()  # does nothing where CUDA has not been used

    def _load(self, path: str, *surroundings: Any) -> transfer.Received | None:
        self._file = None
        try:
            settings.set_surroundings(*surroundings)
            received = transfer.receive(path, lambda row: self.send("row", row))
        except Exception as e:
            self.send("done", _describe_failure(e), None)
            return None
        self.send("loaded")
        return received

    def _carry_out(self, received: transfer.Received) -> None:
        call, failure = received.call, None
        result, path = None, None
        try:
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                self.send("running")
                with call.learn.distrib_ctx(**call.options):
                    result = call.method(call.learn, *call.args, **call.kwargs)
            finally:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                if self.shell is not None:
                    self.shell.events.trigger("post_execute")  # shows figures, as at the end of a cell
                sys.stdout.flush()
                sys.stderr.flush()
        except BaseException as e:
            failure = _describe_failure(e)
        if distributed.is_main():
            try:
                self._file, path, error = transfer.send_back(received, result)
                if error is not None:
                    raise error
            except Exception as e:
                failure = failure or _describe_failure(e)
        self.send("done", failure, path)

    # Output

    def make_stream(self, name: str) -> io.TextIOWrapper:
        """Make a stream whose lines appear in the notebook's cell as they are written."""
        lines = io.BufferedWriter(_CellStream(self, name))
        return io.TextIOWrapper(lines, encoding="utf-8", errors="replace", line_buffering=True)

    def make_shell(self) -> None:
        """Make an IPython shell whose displays appear in the notebook's cell."""
        from IPython.core.displaypub import DisplayPublisher
        from IPython.core.interactiveshell import InteractiveShell
        from traitlets.config import Config

        send = self.send

        class CellPublisher(DisplayPublisher):
            def publish(
                self, data: Any, metadata: Any = None, source: Any = None, *, transient: Any = None,
                update: Any = False, **kwargs: Any
            ) -> None:  # fmt: skip
                send("shown", {"data": data, "metadata": metadata, "transient": transient, "update": update})

            def clear_output(self, wait: bool = False) -> None:
                send("cleared", wait)

        config = Config()
        config.HistoryManager.enabled = False
        main = sys.modules["__main__"]
        self.shell = InteractiveShell.instance(config=config, display_pub_class=CellPublisher, user_module=main)
        torch_internals.show_as_notebook(self.shell, self)


class _CellStream(io.RawIOBase):
    """A stream that sends bytes to the kernel; loader workers must not do so, and write to the file descriptor."""

    def __init__(self, server: CallServer, name: str) -> None:
        self.server, self.name = server, name
        self.process_id = os.getpid()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1 if self.name == "stdout" else 2

    def write(self, data: Any) -> int:
        data = bytes(data)
        if os.getpid() == self.process_id:
            self.server.send("printed", self.name, data)
        else:
            os.write(self.fileno(), data)
        return len(data)


def _describe_failure(error: BaseException) -> tuple[ExceptionReport, bytes]:
    if isinstance(error, bdb.BdbQuit):  # IPython would end the cell without a word
        told = RuntimeError("breakpoint() finds no input in a notebook's process: debug outside of distrib_ctx")
        error = told.with_traceback(error.__traceback__)
    text, pickled = f"{type(error).__name__}: {error}", pickling.dump_error(error)
    report = ExceptionReport(time.monotonic(), None, text, user_traceback(error), ending=ending_of(error))
    # Frames hold the iterators of loaders. Without them, the loaders' processes end at once.
    forget_frames(error)
    return report, pickled
