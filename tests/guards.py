"""The guard that no test leaves anything behind, in its own process or on a rank, and the seeds it starts with."""

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist


def seed() -> None:
    """Every test starts with the same random numbers."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    torch.default_generator.manual_seed(0)  # torch.manual_seed takes a hundred times as long
    random.seed(0)
    np.random.seed(0)


@contextmanager
def nothing_left_behind(allowed: Callable[[], set[int]] = set, has_group: bool = False) -> Iterator[None]:
    """Fail a test that leaves environment variables, processes, a process group or a global setting behind.

    Args:
        allowed: the ids of processes that may stay, with all that they have started.
        has_group: whether there is a process group before, which has to stay.
    """
    before, children = _globals(), _children()
    yield
    left = _children() - children - allowed()
    left = [process for pid in left for process in _with_descendants(pid) if _is_running(process)]
    names = [_command(process) for process in left]
    for process in left:
        process.kill()
    joined = dist.is_initialized()
    if joined and not has_group:
        dist.destroy_process_group()
    after = _globals()
    changed = {
        name: (before.get(name), after.get(name)) for name in before | after if before.get(name) != after.get(name)
    }
    if changed:
        _put_back(before)
    assert not changed, f"the test left these changed (before, after): {changed}"
    assert not names, f"the test left these processes: {names}"
    assert joined == has_group, "the test left a process group" if joined else "the test took the process group away"


def _children() -> set[int]:
    if sys.platform != "linux":
        return {process.pid for process in psutil.Process().children()}
    found = set()  # a hundred times sooner than psutil, which asks each process of the machine for its parent
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def _with_descendants(pid):
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


# torch notes places when a compiler is first asked for; scikit-learn sets two variables when it is imported.
_NOT_OURS = (
    "PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH", "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
)  # fmt: skip


def _globals():
    env = {f"${name}": value for name, value in os.environ.items() if name not in _NOT_OURS}
    return env | {
        "gradients": torch.is_grad_enabled(),
        "default type": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "Ctrl-C": signal.getsignal(signal.SIGINT),
    }


def _put_back(before):
    for name in list(os.environ):
        if f"${name}" not in before and name not in _NOT_OURS:
            del os.environ[name]
    os.environ.update({name[1:]: value for name, value in before.items() if name.startswith("$")})
    torch.set_grad_enabled(before["gradients"])
    torch.set_default_dtype(before["default type"])
    if torch.are_deterministic_algorithms_enabled() != before["deterministic"]:  # it takes seconds, to import a lot
        torch.use_deterministic_algorithms(before["deterministic"])
    if before["Ctrl-C"] is not None:
        signal.signal(signal.SIGINT, before["Ctrl-C"])


def _is_running(process):
    try:
        # Python's own helpers, for shared memory and for starting workers, live as long as the process that made them.
        command = _command(process)
        is_helper = "resource_tracker" in command or "multiprocessing.forkserver" in command
        return process.status() != psutil.STATUS_ZOMBIE and not is_helper
    except psutil.Error:
        return False


def _command(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
