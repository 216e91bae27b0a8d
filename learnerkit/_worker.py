"""What each process of a launch runs: tie it to the launcher, run the script as ``__main__``, report how it failed.

`learnerkit.launch` starts this file by its path. It needs the standard library only and leaves the interpreter as
``python script.py`` (or ``python -m module``) would have left it.
"""

import atexit
import ctypes
import faulthandler
import importlib.util
import json
import os
import runpy
import signal
import sys
import threading
import time
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
EXIT_HOOK_SECONDS = 3.0

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def main() -> None:
    """Run the script named on the command line; a failure goes to the launcher's report file."""
    setup = json.loads(os.environ.pop("LEARNERKIT_WORKER"))
    die_with_parent(setup["launcher"])
    tie_forked_children()
    faulthandler.enable()
    for descriptor in filter(None, (setup["report_fd"], setup["store_fd"])):
        os.set_inheritable(descriptor, False)  # programs the script starts get neither of them
    store = StoreHost(setup["store_fd"])
    if setup["store_fd"]:
        sys.meta_path.insert(0, store)
    try:
        run_as_main(sys.argv[1:])
    except SystemExit as error:
        code = exit_code(error)
        if code:
            write_report(setup["report_fd"], code, error)
            leave(code)
        raise
    except KeyboardInterrupt as error:
        write_report(setup["report_fd"], 130, error)
        leave(130, EXIT_HOOK_SECONDS)
    except BaseException as error:
        write_report(setup["report_fd"], 1, error, traceback_text(error))
        leave(1, EXIT_HOOK_SECONDS)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies (Linux only); leave if it is dead already."""
    if _libc:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def tie_forked_children() -> None:
    """Make forked children, such as DataLoader workers, die with this process.

    A killed rank cannot end its loader workers, and they look for their parent only every few seconds. Until then
    they also hold copies of its sockets, so the other ranks would not notice that it is gone.
    """
    forking: list[int] = []  # the parent's process id, if its main thread forks

    def before() -> None:
        # The death signal follows the thread that forked, not its process: a child of a helper thread would be
        # killed as soon as that thread ends, so such children are left alone.
        forking[:] = [os.getpid()] if threading.current_thread() is threading.main_thread() else []

    def after_in_child() -> None:
        if forking:
            die_with_parent(forking[0])

    os.register_at_fork(before=before, after_in_child=after_in_child)


class StoreHost:
    """Import hook of rank 0: serves the store in which the ranks meet, once torch.distributed is imported.

    This file must not import torch by itself: a script may first set variables that torch reads while it is
    imported (OMP_NUM_THREADS, TORCH_DISTRIBUTED_DEBUG), and they have to act on rank 0 as on every other rank.
    Ranks that connect earlier wait in the backlog of the socket, on which the launcher listens already.
    """

    def __init__(self, store_fd: int | None):
        self.store_fd, self.process_id, self.store = store_fd, os.getpid(), None

    def find_spec(self, name: str, path: object = None, target: object = None):
        """Find torch.distributed the usual way, and serve the store at the end of its import."""
        if name != "torch.distributed" or os.getpid() != self.process_id:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_serve(module: ModuleType) -> None:
            execute(module)
            if module.is_available():
                self.serve(module.TCPStore)

        spec.loader.exec_module = execute_and_serve
        return spec

    def serve(self, store_class: type) -> None:
        """Host the store on the launcher's socket, bound to loopback, for the life of this process."""
        host, port, size = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))
        self.store = store_class(
            host, int(port), int(size), is_master=True, master_listen_fd=self.store_fd, wait_for_workers=False
        )


def run_as_main(arguments: list[str]) -> None:
    """Run ``script.py args...`` or ``-m module args...`` in a new ``__main__``, as the interpreter would.

    Unlike `runpy.run_path` this leaves ``__main__`` in place at the end: exit hooks and threads that outlive the
    script's last line may still pickle its classes or start processes.
    """
    main_module = sys.modules["__main__"] = ModuleType("__main__")
    if arguments[0] == "-m":
        _, name, *rest = arguments
        sys.argv = ["-m", *rest]
        set_first_path(os.getcwd())
        runpy._run_module_as_main(name)  # the very function behind `python -m`
        return
    script, sys.argv = arguments[0], arguments
    path = os.path.abspath(script)
    set_first_path(os.path.dirname(os.path.realpath(script)))
    loader = SourceFileLoader("__main__", path)
    main_module.__dict__.update(__file__=path, __loader__=loader, __cached__=None)
    exec(compile(loader.get_data(path), path, "exec", dont_inherit=True), main_module.__dict__)


def set_first_path(folder: str) -> None:
    """Put the script's folder where Python has put this file's."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def exit_code(error: SystemExit) -> int:
    """Return the process exit code that Python gives to a SystemExit; its message, if any, goes to stderr."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def write_report(descriptor: int, code: int, error: BaseException, traceback: str = "") -> None:
    """Tell the launcher when and how this rank failed, or print the traceback where that is impossible."""
    report = {
        "time": time.monotonic(),  # one clock for all processes of a machine, and nobody sets it back
        "code": code,
        "error": summary(error) if traceback else "",
        "traceback": traceback,
    }
    try:
        os.pwrite(descriptor, json.dumps(report).encode(), 0)
    except OSError:
        print(traceback, file=sys.stderr)


def summary(error: BaseException) -> str:
    """Return the type and the first line of the message."""
    try:
        message = str(error)
    except Exception:
        message = ""
    return f"{type(error).__name__}: {message}".partition("\n")[0]


def traceback_text(error: BaseException) -> str:
    """Format the exception with its causes and notes, starting at the first frame of the script."""
    from traceback import format_exception

    own_files = {__file__, runpy.run_module.__code__.co_filename}
    frame: TracebackType | None = error.__traceback__
    while frame and frame.tb_frame.f_code.co_filename in own_files:
        frame = frame.tb_next
    return "".join(format_exception(error.with_traceback(frame)))


def leave(code: int, seconds: float | None = None) -> None:
    """End the process as the interpreter does, threads joined and exit hooks run, but destroy no objects.

    Destroying a process group, or a DDP model that holds one, can wait for peers which will never answer, and the
    peers wait for this process to end. After an error nothing may hold it up: hooks and threads that
    take longer than `seconds` are abandoned, and their stacks printed.
    """
    if seconds:
        faulthandler.dump_traceback_later(seconds, exit=True)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # replaced, broken or closed by the script
            pass
    os._exit(code)


if __name__ == "__main__":
    main()
