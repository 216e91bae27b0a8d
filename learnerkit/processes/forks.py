"""Forks of this process that act as ranks for a check before a run: functions from a cell need not be pickled."""

import gc
import math
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from learnerkit.endings import Ending, ExceptionReport, ending_of
from learnerkit.files import save_whole
from learnerkit.marks import collective
from learnerkit.processes.machine import LOOPBACK, LOOPBACK_INTERFACE
from learnerkit.processes.rank_main import kill_group, user_traceback


def run_in_forks(jobs: Sequence[Callable[[Path], dict]], end: float) -> list[Any]:
    """Run each job in a fork of this process; return their results, or the `ExceptionReport` of a job that failed.

    A job gets a temporary directory that all jobs share, and returns a value that `torch.load` accepts with
    `weights_only=True`. At `end`, on the monotonic clock, the processes that still run are killed.
    """
    processes: list[BaseProcess] = []
    running: dict[Any, BaseProcess] = {}
    with tempfile.TemporaryDirectory(prefix="learnerkit-") as name:
        folder = Path(name)
        try:
            for number, job in enumerate(jobs):
                process = multiprocessing.get_context("fork").Process(target=_child, args=(job, folder, number))
                with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
                    process.start()  # Python 3.12 warns of this process's threads; the children need none of them
                processes.append(process)
                running[process.sentinel] = process
            while running and (left := end - time.monotonic()) > 0:
                for sentinel in connection.wait(list(running), left):
                    ended = running.pop(sentinel)
                    _kill(ended)
                    if ended.exitcode:  # the others should notice the failure soon
                        end = min(end, time.monotonic() + 10)
        finally:
            for late in running.values():
                _kill(late)
        return [_read_result(folder, number, p, p.sentinel in running) for number, p in enumerate(processes)]


def cause(error: str) -> str:
    """Return the line of a job's traceback that names the error; notes may follow it."""
    _, header, frames = error.rstrip().rpartition("Traceback (most recent call last):\n")
    lines = [line for line in frames.splitlines() if not line.startswith(" ")]
    return lines[0 if header else -1]


def _kill(process: BaseProcess) -> None:
    if process.pid is None or not kill_group(process.pid):  # this kills its loader workers, too
        process.kill()  # it is too young to lead a process group
    process.join()


LATE = ExceptionReport(math.inf, ending=Ending(follows=True))
"""The report of a process that had not finished when time was up, without its output."""


def _read_result(folder: Path, number: int, process: BaseProcess, late: bool) -> Any:
    file, log = folder / f"{number}.pt", folder / f"{number}.log"
    if file.exists():
        result = torch.load(file, weights_only=True)
        return ExceptionReport.from_json(result) if isinstance(result, str) else result
    said = log.read_text(errors="replace").splitlines()[-20:] if log.exists() else []
    how = "it had not finished when time was up" if late else f"it ended with code {process.exitcode}"
    # A process that ends without an exception makes the others fail, so its report comes first.
    return replace(LATE if late else ExceptionReport(), traceback="\n".join([*said, how]))


def _child(job: Callable[[Path], dict], folder: Path, number: int) -> NoReturn:
    os.setsid()  # Ctrl-C goes to the parent, which ends this process group
    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.freeze()  # the parent's garbage may hold a loader's iterator, whose destructor would end the parent's workers
    torch.set_num_threads(1)  # the parent's threads do not exist here
    with open(folder / f"{number}.log", "w", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = log
        if len(str(folder)) <= 70:  # it holds sockets of loader workers, whose paths may have 103 characters
            tempfile.tempdir = str(folder)  # files that a killed process leaves there are removed with it
        try:
            result: dict | str = job(folder)
        except BaseException as e:
            result = ExceptionReport(time.monotonic(), traceback=user_traceback(e), ending=ending_of(e)).to_json()
        save_whole(result, folder / f"{number}.pt")
        for worker in multiprocessing.active_children():
            worker.terminate()
        os._exit(isinstance(result, str))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    kill_group(0)  # this process's own group


@collective
def join_forks(folder: Path, rank: int, n: int, wait: timedelta) -> None:
    """Make a fork one of `n` ranks on the CPU; every such fork must reach this.

    Args:
        folder: the directory of the job.
        rank: the rank of the fork.
        n: the number of ranks.
        wait: the time that a collective waits for the other ranks.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
    os.environ |= {"MASTER_ADDR": LOOPBACK, "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE}
    store = dist.FileStore(str(folder / "store"), n)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=wait)
