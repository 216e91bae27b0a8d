"""The facts about this machine: its loopback address, its cores, and memory that its processes share."""

import os
import sys
import tempfile
from typing import Any

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


def shared_file(size: int = 0) -> tuple[Any, str]:
    """Create a file of `size` bytes for other processes of this machine; return it, and the path by which they open it.

    It is removed with this process, and is in memory where the system allows it.
    """
    file: Any = None
    path = ""
    if hasattr(os, "memfd_create"):
        file = os.fdopen(os.memfd_create("learnerkit"), "r+b")
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        # In a chroot /proc may be missing, and in a new PID namespace it may show the processes of another one.
        if not (os.path.exists(path) and os.path.samefile(path, file.fileno())):
            file.close()
            file = None
    if file is None:
        file = tempfile.NamedTemporaryFile(prefix="learnerkit-")  # noqa: SIM115 - it stays open while it is wanted
        path = file.name
    file.truncate(size)
    return file, path


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
