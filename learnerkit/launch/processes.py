"""How processes end: with their parent, with all that they have started, and without waiting for other ranks.

It uses the standard library only. `rank_main.py` loads it by its path, so it imports nothing of this package.
"""

import atexit
import ctypes
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_libc = ctypes.CDLL(None if sys.platform != "win32" else "msvcrt")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the process `parent` dies (on Linux); end if it has died already."""
    if sys.platform == "linux":
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def tie_forked_children() -> None:
    """Have the kernel kill the children that the main thread forks, such as DataLoader workers, when this process dies.

    A process that is killed cannot end its loader workers, and they look for it only every few seconds. Until
    then they hold copies of its sockets, so that the other ranks do not notice that it is gone.
    """
    parent = 0

    def before() -> None:
        # The kernel sends the signal when the thread that forked ends, not its process. So children of a helper
        # thread must not get it: they would be killed while this process still needs them.
        nonlocal parent
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0

    def after_in_child() -> None:
        if parent:
            die_with_parent(parent)

    os.register_at_fork(before=before, after_in_child=after_in_child)


def kill_group(group: int, signum: int = signal.SIGKILL) -> bool:
    """Send a signal to all processes of a group; tell whether there were any. Signal 0 only looks."""
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):  # macOS does not permit it if only dead processes are left
        return False
    return True


def make_exit() -> Callable[[int], NoReturn]:
    """Return a `sys.exit` that destroys no objects: threads are joined, exit hooks run and files flushed as usual.

    To destroy a process group, or a DDP model that holds one, is not safe while other ranks fail or leave: it can
    wait for them without end, or abort this process although the script has succeeded.

    Call this before importing what registers exit hooks (`multiprocessing`, `logging`, torch): the last hook registered
    runs first, and the one that is registered here ends the process. A sitecustomize's hooks, which come earlier still,
    do not run.
    """
    exit_code: int | None = None

    def end_process() -> None:
        if exit_code is not None:  # else this is a forked child that ends in a way of its own
            flush_files()
            os._exit(exit_code)

    def exit_without_destructors(code: int) -> NoReturn:
        nonlocal exit_code
        exit_code = code
        flush_files()  # now, because threads and exit hooks may take too long
        sys.exit(code)

    atexit.register(end_process)
    return exit_without_destructors


def flush_files() -> None:
    """Flush all files that are open in this process, of Python and of C."""
    # The base class written in C. io.IOBase itself asks an abstract class about every type: seconds with torch loaded.
    base = io.IOBase.__mro__[1]
    for file in gc.get_objects():
        if issubclass(type(file), base):
            try:
                file.flush()
            except Exception:  # closed, or nobody reads it any more
                pass
    _libc.fflush(None)


def user_traceback(error: BaseException) -> str:
    """Return the traceback of an error and its causes, where only the innermost frame of each may be this package's.

    The innermost frame stays because the error may be the package's own.
    """
    from traceback import StackSummary, TracebackException  # costs some milliseconds, and most scripts do not fail

    formatted = TracebackException.from_exception(error)
    chain: list[TracebackException | None] = [formatted]
    while chain:
        each = chain.pop()
        if each is not None:
            last = len(each.stack) - 1
            kept = [f for i, f in enumerate(each.stack) if i == last or not f.filename.startswith(PACKAGE)]
            each.stack = StackSummary.from_list(kept)
            chain += each.__cause__, each.__context__, *(each.exceptions or ())
    return "".join(formatted.format())
