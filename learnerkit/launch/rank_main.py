"""What every rank runs: tie itself to the launcher, run the script as ``__main__``, report how it failed.

`learnerkit.launch` starts this file by its path. It uses the standard library only and gives the script the
interpreter that ``python script.py`` or ``python -m module`` would have given it.
"""

import atexit
import ctypes
import faulthandler
import gc
import importlib.util
import io
import json
import os
import runpy
import signal
import sys
import threading
import time
from importlib.machinery import SourceFileLoader
from types import ModuleType

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
LEAVE_SECONDS = 3.0  # after an error: how long threads and exit hooks may take before their stacks are printed

_libc = ctypes.CDLL(None)


def main() -> None:
    """Run the command line; if that fails, tell the launcher when and why."""
    setup = json.loads(os.environ.pop("LEARNERKIT_RANK_SETUP"))
    report_fd, store_fd, process_id = setup["report_fd"], setup["store_fd"], os.getpid()
    die_with(setup["launcher"])
    tie_forked_children()
    faulthandler.enable()
    os.set_inheritable(report_fd, False)
    os.environ["LEARNERKIT_HEARTBEAT"] = f"{process_id} {setup['heartbeat']}"
    if store_fd is not None:
        os.set_inheritable(store_fd, False)
        sys.meta_path.insert(0, StoreHost(store_fd))
    code = 0
    try:
        run_as_main(sys.argv[1:])
    except BaseException as error:
        if os.getpid() != process_id:  # a child that the script has forked speaks for itself
            raise
        code = exit_code(error)
        if code:
            write_report(report_fd, code, error)
        if not isinstance(error, SystemExit):
            faulthandler.dump_traceback_later(LEAVE_SECONDS, exit=True, file=2)  # sys.stderr may be no file
    leave(code)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies (on Linux); leave if it has died already."""
    if sys.platform == "linux":
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def tie_forked_children() -> None:
    """Let forked children, such as DataLoader workers, die with this process.

    A rank that is killed cannot end its loader workers, and they look for it only every few seconds. Until
    then they hold copies of its sockets, so that the other ranks do not notice that it is gone.
    """
    parent = 0

    def before() -> None:
        # The death signal comes when the thread that forked ends, not its process. So only children of the
        # main thread get it: those of a helper thread would be killed while the rank still needs them.
        nonlocal parent
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0

    def after_in_child() -> None:
        if parent:
            die_with(parent)

    os.register_at_fork(before=before, after_in_child=after_in_child)


class StoreHost:
    """Import hook of rank 0: serves the store in which the ranks meet once torch.distributed is imported.

    Importing torch here, before the script, would be simpler, but rank 0 would then differ from the others: a
    script may first set variables that torch reads at import (OMP_NUM_THREADS, TORCH_DISTRIBUTED_DEBUG).
    Ranks that connect before the store is served wait, as the socket listens from the beginning.
    """

    def __init__(self, store_fd: int) -> None:
        self.store_fd, self.process_id, self.store = store_fd, os.getpid(), None

    def find_spec(self, name: str, path: object = None, target: object = None):
        """Leave the search to the other finders, and add the store to the end of the import."""
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
        """Host the store on the launcher's socket for as long as this process lives."""
        host, port, size = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))
        self.store = store_class(
            host, int(port), int(size), is_master=True, master_listen_fd=self.store_fd, wait_for_workers=False
        )


def run_as_main(arguments: list[str]) -> None:
    """Run ``script.py args...`` or ``-m module args...`` in a fresh ``__main__``, as the interpreter would.

    `runpy.run_path` would take ``__main__`` away after the script's last line, when exit hooks and threads
    may still pickle its classes or spawn processes.
    """
    main_module = sys.modules["__main__"] = ModuleType("__main__")
    if arguments[0] == "-m":
        _, name, *rest = arguments
        sys.argv = ["-m", *rest]
        replace_first_path(os.getcwd())
        runpy._run_module_as_main(name)  # what `python -m` calls
        return
    script, sys.argv = arguments[0], arguments
    replace_first_path(os.path.dirname(os.path.realpath(script)))
    path = os.path.abspath(script)
    loader = SourceFileLoader("__main__", path)
    vars(main_module).update(__file__=path, __loader__=loader, __cached__=None)
    exec(compile(loader.get_data(path), path, "exec", dont_inherit=True), vars(main_module))


def replace_first_path(folder: str) -> None:
    """Put the script's folder where the interpreter has put this file's."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def exit_code(error: BaseException) -> int:
    """Return the exit code for an exception that nobody caught."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if not isinstance(error, SystemExit):
        return 1
    return 0 if error.code is None else error.code & 0xFF if isinstance(error.code, int) else 1


def write_report(report_fd: int, code: int, error: BaseException) -> None:
    """Tell the launcher when this rank failed, and why."""
    # The monotonic clock is the same for all processes of the machine, and nobody sets it.
    report = {"time": time.monotonic(), "code": code}
    if isinstance(error, SystemExit):
        if not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        report["error"] = "KeyboardInterrupt"
    else:
        report |= format_error(error)
        # What the launcher asks of any exception; learnerkit.PeerError has them.
        report |= {name: bool(getattr(error, name, False)) for name in ("follows_another", "standstill")}
    try:
        with open(report_fd, "w") as file:
            json.dump(report, file)
    except OSError:  # the disk is full
        print(report.get("traceback", ""), file=sys.stderr)


def format_error(error: BaseException) -> dict[str, str]:
    """Return a one-line summary, and the traceback from the script's first frame on: whole, and in brief."""
    from traceback import StackSummary, TracebackException  # costs some milliseconds, and most scripts do not fail

    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    own_files = {__file__, runpy.run_module.__code__.co_filename}
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename in own_files:
        frames = frames.tb_next
    formatted = TracebackException(type(error), error, frames)
    name = type(error).__name__
    message = str(formatted).partition("\n")[0]  # safe even if the exception's own __str__ fails
    whole = "".join(formatted.format())
    found: list[TracebackException | None] = [formatted]
    while found:
        each = found.pop()
        if each is not None:
            last = len(each.stack) - 1  # of this package's frames only the innermost is kept: the error may be its own
            kept = [f for i, f in enumerate(each.stack) if i == last or not f.filename.startswith(package)]
            each.stack = StackSummary.from_list(kept)
            found += each.__cause__, each.__context__, *(each.exceptions or ())
    return {
        "error": f"{name}: {message}" if message else name,
        "traceback": whole,
        "brief": "".join(formatted.format()),
    }


def leave(code: int) -> None:
    """End as the interpreter does, with threads joined, exit hooks run and files flushed, but destroy no objects.

    To destroy a process group, or a DDP model that holds one, is not safe while other ranks fail or leave: it can
    wait for them without end, or abort this process although the script has succeeded.
    """
    flush_files()  # first, since the next lines may take too long
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
    except KeyboardInterrupt:  # Ctrl-C: do not wait for them
        pass
    flush_files()
    os._exit(code)


def flush_files() -> None:
    """Flush all files that are open in this process, of Python and of C."""
    base = io.IOBase.__base__  # in C; io.IOBase asks an abstract class of every type, for seconds with torch loaded
    for file in gc.get_objects():
        if issubclass(type(file), base):
            try:
                file.flush()
            except Exception:  # closed, or nobody reads it any more
                pass
    _libc.fflush(None)


if __name__ == "__main__":
    main()
