"""Groups of processes that run the tests marked `ranks`: one group for each world size, started by our launcher.

A test marked `@pytest.mark.ranks(2, slow=[3, "torchrun"])` runs on every rank of two processes, and under
`pytest -m slow` on three and on two that torchrun has started ("gpus": on two GPUs, where there are two). The processes
are started when the first such test needs them and stay until the session ends, so that torch is imported once per
rank. After a failure they are ended: the next test gets fresh ones. Run as a script, this file is a rank.
"""

import contextlib
import importlib.util
import inspect
import io
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from launching import WAYS, environment, hearing_ctrl_c, without_chatter

START_SECONDS = 300  # a busy machine may need long to import torch
FOLLOW_SECONDS = 5  # after the first failure: how long the other ranks may take to fail too, or to finish
END_SECONDS = 10


class Ranks(NamedTuple):
    """Which processes a test runs on."""

    n: int
    launcher: str = "launch"
    gpus: bool = False

    def __str__(self) -> str:
        """As it stands in the name of a test."""
        return f"{self.n}-{'gpus' if self.gpus else 'ranks'}{'' if self.launcher == 'launch' else '-' + self.launcher}"


class RankPools:
    """The groups of processes of a test session."""

    def __init__(self) -> None:
        self._pools: dict[Ranks, RankPool] = {}

    def run(
        self, ranks: Ranks, function: Callable, *, seconds: float = 300, filters: Sequence[str] = (), **kwargs: Any
    ):
        """Call a function of a test file on each rank.

        Args:
            ranks: which ones.
            function: of the top level of a test file, which every rank imports.
            seconds: it may take.
            filters: what `pytest.mark.filterwarnings` got; all other warnings are errors.
            kwargs: the function's arguments; they must be plain values.

        Returns:
            A list of what the function returned on each rank.
        """
        __tracebackhide__ = True
        pool = self._pools.get(ranks)
        if pool is None:
            pool = self._pools[ranks] = RankPool(ranks)
        try:
            return pool.run(function, kwargs, filters, seconds)
        except BaseException:
            del self._pools[ranks]
            pool.end(at_once=True)
            raise

    def processes(self) -> set[int]:
        """The process ids of the launchers."""
        return {pool.launcher.pid for pool in self._pools.values()}

    def end(self) -> None:
        """End them all."""
        while self._pools:
            self._pools.popitem()[1].end()


class Results(dict):
    """What a function returns on each of n ranks, by (n, name); it is called when first asked for.

    On one process it runs in that of the tests, so that all world sizes can be compared.
    """

    def __init__(self, pools: RankPools, function: Callable[[str], Any]) -> None:
        super().__init__()
        self.pools, self.function = pools, function
        self.printed: dict[tuple[int, str], str] = {}

    def __missing__(self, key: tuple[int, str]) -> list:
        n, name = key
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            if n == 1:
                self[key] = [self.function(name)]
            else:
                self[key] = self.pools.run(Ranks(n), self.function, name=name)
        self.printed[key] = printed.getvalue()
        return self[key]


class RankPool:
    """One launcher and its ranks; each rank is connected to this process by a socket."""

    def __init__(self, ranks: Ranks) -> None:
        self.n, self._ranks = ranks.n, []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        address, self._output = (Path(self._folder.name, name) for name in ("socket", "output.txt"))
        grace = ["--grace", "1"] if ranks.launcher == "launch" else []
        command = [*WAYS[ranks.launcher](ranks.n), *grace, __file__, str(address)]
        with socket.socket(socket.AF_UNIX) as listener, hearing_ctrl_c(), self._output.open("w") as output:
            listener.bind(str(address))
            listener.listen(self.n)
            listener.settimeout(1)
            self.launcher = subprocess.Popen(
                command, env=environment(ranks.gpus), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
            try:
                found = dict(self._accept(listener) for _ in range(self.n))
            except BaseException:
                self.end(at_once=True)
                raise
        self._ranks = [found[rank] for rank in range(self.n)]

    def _accept(self, listener: socket.socket) -> tuple[int, Any]:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.launcher.poll() is None:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            connection.settimeout(None)
            peer = Peer(connection)
            rank, peer.pid = peer.receive()
            return rank, peer
        raise RuntimeError(f"the {self.n} ranks did not start\n{self._printed(0)}")

    def run(self, function: Callable, kwargs: dict, filters: Sequence[str], seconds: float) -> list:
        """Call the function on all ranks and return what it returned on each; raise `RanksFailed` if one failed."""
        __tracebackhide__ = True
        before = self._output.stat().st_size
        file, folder = inspect.getfile(function), os.getcwd()
        for peer in self._ranks:
            peer.send((file, function.__module__, function.__qualname__, kwargs, folder, filters))
        found, failures = {}, {}
        end = time.monotonic() + seconds
        while waiting := [rank for rank in range(self.n) if rank not in found | failures]:
            peers = {self._ranks[rank]: rank for rank in waiting}
            ready = select.select(peers, [], [], max(0, end - time.monotonic()))[0]
            for peer in ready:
                rank = peers[peer]
                try:
                    error, value = peer.receive()
                except EOFError:
                    error, value = "the process has ended\n", None
                if error is None:
                    found[rank] = value
                else:
                    end = min(end, time.monotonic() + FOLLOW_SECONDS)
                    failures[rank] = error
            if not ready:
                late = "is still running; the stack is in the output below" if failures else f"took over {seconds} s"
                failures |= dict.fromkeys(waiting, late + "\n")
                for peer in peers:
                    os.kill(peer.pid, SHOW_STACKS)
                    time.sleep(0.5)
        printed = self._printed(before)
        if failures:
            texts = [f"rank {rank} of {self.n}: {text}" for rank, text in failures.items()]
            raise RanksFailed("\n".join([*texts, *([f"output of the ranks:\n{printed}"] if printed else [])]))
        print(printed, end="")
        return [found[rank] for rank in range(self.n)]

    def _printed(self, start: int) -> str:
        with self._output.open("rb") as file:
            file.seek(start)
            return without_chatter(file.read().decode(errors="replace"))

    def end(self, at_once: bool = False) -> None:
        """End the ranks: those that wait for work leave by themselves; `at_once`: some may be at work."""
        for peer in self._ranks:
            peer.close()
        try:
            self.launcher.wait(0.5 if at_once else END_SECONDS)
        except subprocess.TimeoutExpired:
            self.launcher.terminate()
            try:
                self.launcher.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self.launcher.kill()
                self.launcher.wait()
        self._folder.cleanup()


class RanksFailed(AssertionError):
    """A test failed on some rank; the text says how, first things first."""


class Peer:
    """The other end of a socket, to which Python objects are sent; it must be trusted."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._stream = connection, connection.makefile("rwb")

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Write a message."""
        pickle.dump(message, self._stream)
        self._stream.flush()

    def receive(self) -> Any:
        """Read a message; raise EOFError if the other end has gone."""
        try:
            return pickle.load(self._stream)
        except ConnectionError as e:
            raise EOFError from e

    def close(self) -> None:
        """Hang up."""
        self._stream.close()
        self._socket.close()


# A rank

SHOW_STACKS = signal.SIGUSR2


def main(address: str) -> None:
    """Run what the tests send until they close the connection."""
    import faulthandler
    import gc

    gc.disable()  # while torch is imported, which takes a tenth less
    import torch

    from learnerkit import distributed

    faulthandler.register(SHOW_STACKS, all_threads=True)
    torch.set_num_threads(1)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    tests = Peer(connection)
    tests.send((distributed.rank(), os.getpid()))
    distributed.join(timeout=120)
    gc.enable()
    while True:
        try:
            work = tests.receive()
        except EOFError:
            os._exit(0)  # torch 2.15 now and then aborts in the teardown of a process that used DDP
        tests.send(run(*work))


def run(file: str, module: str, name: str, kwargs: dict, folder: str, filters: Sequence[str]) -> tuple[str | None, Any]:
    """Call a function of a test file; return its error as text, and its value."""
    import gc
    import warnings

    from guards import nothing_left_behind, seed

    from learnerkit.distributed import facts

    os.chdir(folder)
    facts._warned.clear()
    seed()
    try:
        function = getattr(load(file, module), name)
        gc.collect()
        gc.freeze()  # a collection of garbage in the test takes a second if it looks through older objects, too
        with warnings.catch_warnings(), nothing_left_behind(has_group=True):
            warnings.simplefilter("error")
            for each in ("ignore:Guards may run slower on Python 3.13.0", *filters):
                action, _, message = each.partition(":")
                warnings.filterwarnings(action, message)
            value = function(**kwargs)
        return None, value
    except BaseException as error:
        shown = error.with_traceback(error.__traceback__.tb_next)
        return "".join(traceback.format_exception(shown)), None
    finally:
        for value in kwargs.values():
            if hasattr(value, "undo"):  # a MonkeyPatch, which is here a copy of the fixture's
                value.undo()
        sys.stdout.flush()
        sys.stderr.flush()


def load(file: str, name: str) -> ModuleType:
    """A test file as the module that it is in the tests' process."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


if __name__ == "__main__":
    main(sys.argv[1])
