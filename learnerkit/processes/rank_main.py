"""The program of every rank: run the script as ``__main__``, die with the launcher, and report a failure to it.

The launcher starts this file by its path. The script gets the interpreter that ``python script.py`` or ``python -m
module`` would have given it: no module of this package is in `sys.modules` unless the script imports it.
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib.util
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, NoReturn

LEAVE_SECONDS = 3.0  # after an error: how long threads and exit hooks may take before their stacks are printed
END_SECONDS = 1.0  # how long ranks that wait for this one may take to hear that it ends
PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
HIDDEN = PACKAGE, contextlib.__file__
CALLS = ("_wrapped_call_impl", "_call_impl")  # the methods of nn.Module that call `forward`


def main() -> None:
    """Run the command line; if that fails, tell the launcher when and why."""
    setup = json.loads(os.environ.pop("LEARNERKIT_RANK_SETUP"))
    report_fd = setup["report_fd"]
    store_fd = setup["store_fd"]
    process_id = os.getpid()
    die_with_parent(setup["launcher"])
    tie_forked_children()
    # The terminal is the launcher's: a rank that asks there, as getpass does, gets an error, rather than being halted.
    for signum in (signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(signum, signal.SIG_IGN)
    faulthandler.enable()
    os.set_inheritable(report_fd, False)
    os.environ["LEARNERKIT_HEARTBEAT"] = f"{process_id} {setup['heartbeat']}"
    if "LEARNERKIT_REPORT" in os.environ:  # It names the process, because the programs that a rank starts inherit it.
        os.environ["LEARNERKIT_REPORT"] = str(process_id)
    if setup["events"] is not None:
        os.environ["LEARNERKIT_EVENTS"] = json.dumps({"process": process_id} | setup["events"])
    host = None
    if store_fd is not None:
        os.set_inheritable(store_fd, False)
        sys.meta_path.insert(0, host := StoreHost(store_fd))
    code = 0
    try:
        run_as_main(sys.argv[1:])
    except BaseException as error:
        if os.getpid() != process_id:  # a child that the script has forked reports its error by itself
            raise
        code = exit_code(error)
        if code:
            write_report(report_fd, code, error)
        if not isinstance(error, SystemExit):
            faulthandler.dump_traceback_later(LEAVE_SECONDS, exit=True, file=2)  # sys.stderr may not be a file
            # A tracker may have replaced this hook. What is printed is dropped, as the launcher prints the error.
            with contextlib.suppress(BaseException), contextlib.redirect_stderr(io.StringIO()):
                sys.excepthook(type(error), error, error.__traceback__)
        if code:
            # An error of a loader's worker refers to itself and to the loader's iterator, which as garbage in an exit
            # hook would wait for each worker for seconds.
            forget_frames(error)
    # The first fit takes the variable away.
    if code == 0 and os.environ.get("LEARNERKIT_REPORT") == str(os.getpid()) and os.environ["RANK"] == "0":
        code = 1
        text = "there is no report: the script has ended, and no Learner has called fit (or fit_one_cycle, ...)"
        write_report(report_fd, code, SystemExit(text))
    end_process(code, host.announce_end if host else None)


class StoreHost:
    """Import hook of rank 0, which serves the store of all ranks once the script has imported torch.distributed.

    An import of torch before the script would be simpler, but would make rank 0 differ from the others: a script may
    first set variables that torch reads at import (OMP_NUM_THREADS, TORCH_DISTRIBUTED_DEBUG). Ranks that connect before
    the store is served wait, as the socket listens from the beginning.
    """

    def __init__(self, store_fd: int) -> None:
        self.store_fd, self.process_id = store_fd, os.getpid()
        self.store: Any = None

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Let the other finders find torch.distributed, and serve the store at the end of its import."""
        if name != "torch.distributed" or os.getpid() != self.process_id:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec and spec.loader
        execute = loader.exec_module

        def execute_and_serve(module: ModuleType) -> None:
            execute(module)
            if module.is_available():
                host, port, size = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))
                options = {"is_master": True, "master_listen_fd": self.store_fd, "wait_for_workers": False}
                self.store = module.TCPStore(host, int(port), int(size), **options)  # it serves while it is kept

        loader.exec_module = execute_and_serve
        return spec

    def announce_end(self) -> None:
        """Let ranks that wait for this one, in learnerkit.distributed, know that it ends, and the store with it.

        If the store were just gone, torch would print many lines on each of them.
        """
        if self.store is None or os.getpid() != self.process_id:
            return
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store.set(f"learnerkit/ended/{attempt}", "")
        end = time.monotonic() + END_SECONDS
        while self.store.add(f"learnerkit/waiting/{attempt}", 0) > 0 and time.monotonic() < end:
            time.sleep(0.01)


def run_as_main(arguments: list[str]) -> None:
    """Run ``script.py args...`` or ``-m module args...`` in a fresh ``__main__``, as the interpreter would.

    `runpy` would take ``__main__`` away after the script's last line, when exit hooks and threads may still pickle its
    classes or spawn processes.
    """
    main_module = sys.modules["__main__"] = ModuleType("__main__")
    if arguments[0] == "-m":
        _, name, *rest = arguments
        sys.argv = ["-m", *rest]
        replace_first_path(os.getcwd())
        spec, code = find_main(name)
        sys.argv[0] = path = str(spec.origin)
        attributes = {
            "__spec__": spec,
            "__loader__": spec.loader,
            "__package__": spec.parent,
            "__cached__": spec.cached,
        }
    else:
        sys.argv = arguments
        replace_first_path(os.path.dirname(os.path.realpath(arguments[0])))
        path = os.path.abspath(arguments[0])
        loader = SourceFileLoader("__main__", path)
        code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
        attributes = {"__loader__": loader, "__cached__": None}
    if sys.version_info >= (3, 15):  # From there on Python does not set it.
        del attributes["__cached__"]
    vars(main_module).update(attributes, __file__=path)
    exec(code, vars(main_module))


def find_main(name: str) -> tuple[ModuleSpec, CodeType]:
    """Find what ``-m name`` runs: a module, or the ``__main__`` of a package."""
    try:
        spec = None if name.startswith(".") else importlib.util.find_spec(name)  # a path, such as ./train.py
        if spec and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # a package that it is part of imports what is missing
            raise
        spec = None
    loader: Any = spec and spec.loader
    code = loader.get_code(spec.name) if spec and loader else None
    if spec is None or code is None:
        hint = f"; try {name[:-3]} instead of {name}" if name.endswith(".py") else ""
        sys.exit(f"{sys.executable}: -m {name}: there is no such module, or it is a package without __main__{hint}")
    return spec, code


def replace_first_path(folder: str) -> None:
    """Replace this file's folder, which the interpreter has put into `sys.path`, by the script's."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def exit_code(error: BaseException) -> int:
    """Return the exit code for an exception that nobody caught."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    if not isinstance(error.code, int):
        return 1
    return error.code & 0xFF if abs(error.code) < 2**63 else 255  # Python turns a larger number into -1


def write_report(report_fd: int, code: int, error: BaseException) -> None:
    """Tell the launcher when this rank failed, and why."""
    # The monotonic clock is the same for all processes of the machine, and nobody sets it.
    # It has the fields of learnerkit.endings.ExceptionReport; any exception may have such an ending.
    report: dict[str, Any] = {"time": time.monotonic(), "code": code}
    if ending := getattr(error, "learnerkit_ending", None):
        report["ending"] = vars(ending)
    if isinstance(error, SystemExit):
        if not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        report["error"] = "KeyboardInterrupt"
    else:
        report |= format_error(error)
    try:
        with open(report_fd, "w") as file:
            json.dump(report, file)
    except OSError:  # the disk is full
        print(report.get("traceback", ""), file=sys.stderr)


def format_error(error: BaseException) -> dict[str, str]:
    """Return a one-line summary, and the traceback from the script's first frame on: whole, and in brief."""
    from traceback import TracebackException  # costs some milliseconds, and most scripts do not fail

    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    whole = TracebackException.from_exception(error.with_traceback(frames))
    shorten(error)
    name = type(error).__name__
    message = str(whole).partition("\n")[0]  # safe even if the exception's own __str__ fails
    return {
        "error": two_ends(f"{name}: {message}" if message else name, 1000),
        "traceback": two_ends("".join(whole.format()), 1_000_000),
        "brief": two_ends("".join(TracebackException.from_exception(error).format()), 10_000),
    }


def forget_frames(error: BaseException | None) -> None:
    """Clear the local variables in the frames of an error and of its causes; frames that still run keep theirs."""
    from traceback import walk_tb

    for each in _with_causes(error):
        for frame, _ in walk_tb(each.__traceback__):
            with contextlib.suppress(RuntimeError):  # it still runs
                frame.clear()
            frame.f_locals.keys()  # before Python 3.13 this updates a copy of them, which `explain` may have made


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and all its causes, each once: `raise error from error` makes an error its own cause."""
    chain, seen = [error], set[int]()
    for each in chain:  # The loop appends to the list.
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        chain += each.__cause__, each.__context__, *(each.exceptions if isinstance(each, BaseExceptionGroup) else ())


def two_ends(text: str, limit: int) -> str:
    """Return a text; if it has more than `limit` characters, its beginning and its end."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} ... ({len(text)} characters) ... {text[-half:]}"


# For other processes that are started here, too: those of a notebook, and of check_distributed


@functools.cache
def _libc() -> Any:
    """Load the C library at its first use: the launcher imports this file before its standard files are open."""
    import ctypes  # On some machines it opens a file, which stays open.

    return ctypes.CDLL(None)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the process `parent` dies (on Linux); end if it has died already."""
    if sys.platform == "linux":
        _libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def tie_forked_children() -> None:
    """Have the kernel kill the children that the main thread forks, such as DataLoader workers, when this process dies.

    A process that is killed cannot end its loader workers, and they look for it only every few seconds. Until
    then they hold copies of its sockets, so that the other ranks do not notice that it is gone.
    """
    parent, group = 0, os.getpgrp()

    def before() -> None:
        # The kernel sends the signal when the thread that forked ends, not its process. So children of a helper
        # thread must not get it: they would be killed while this process still needs them. Neither must those of a
        # process that has left the group, as a daemon's parent does, which ends at once.
        nonlocal parent
        tied = threading.current_thread() is threading.main_thread() and os.getpgrp() == group
        parent = os.getpid() if tied else 0

    def after_in_child() -> None:
        if parent:
            die_with_parent(parent)

    os.register_at_fork(before=before, after_in_child=after_in_child)


def end_process(code: int, at_last: Callable[[], None] | None = None) -> NoReturn:
    """End as the interpreter does, with threads joined, exit hooks run and files flushed, but destroy no objects.

    To destroy a process group, or a DDP model that holds one, is not safe while other ranks fail or leave: it can
    wait for them without end, or abort this process although the script has succeeded. The two private names have no
    public counterpart that runs the hooks of a sitecustomize, too, such as coverage's.

    Args:
        code: the exit code.
        at_last: called when all else is done.
    """
    flush_files()  # first, because threads and exit hooks may take too long
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except KeyboardInterrupt:  # Ctrl-C: do not wait for them
        pass
    flush_files()
    if at_last is not None:
        at_last()
    os._exit(code)


def kill_group(group: int, signum: int = signal.SIGKILL) -> bool:
    """Send a signal to all processes of a group; tell whether there were any. Signal 0 only looks."""
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):  # macOS does not permit it if only dead processes are left
        return False
    return True


def end_at_once() -> None:
    """End this process as SIGTERM does without a handler."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def flush_files() -> None:
    """Flush all files that are open in this process, of Python and of C."""
    # The base class written in C. io.IOBase itself asks an abstract class about every type: seconds with torch loaded.
    base = io.IOBase.__mro__[1]
    for file in gc.get_objects():
        if issubclass(type(file), base):
            try:
                file.flush()
            except Exception:  # It is closed, or not read any more.
                pass
    _libc().fflush(None)


def shorten(error: BaseException) -> None:
    """Take this package's frames out of the tracebacks of an error and its causes, except the innermost of each.

    The innermost frame stays because the error may be the package's own. The frames in which torch only calls a
    module's `forward`, and those of `contextlib`, go, too.
    """
    for each in _with_causes(error):
        kept, trace = [], each.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            if trace.tb_next is None or not (code.co_filename.startswith(HIDDEN) or code.co_name in CALLS):
                kept.append(trace)
            trace = trace.tb_next
        for outer, inner in zip(kept, kept[1:], strict=False):
            outer.tb_next = inner
        each.__traceback__ = kept[0] if kept else None


def wants_short() -> bool:
    """Tell whether the user wants short tracebacks; LEARNERKIT_TRACEBACK=full asks for whole ones."""
    return os.environ.get("LEARNERKIT_TRACEBACK") != "full"


def user_traceback(error: BaseException) -> str:
    """Return the traceback of an error and its causes as the user wants it: short, or whole.

    A long text is cut in its middle.
    """
    from traceback import TracebackException  # costs some milliseconds, and most scripts do not fail

    if wants_short():
        shorten(error)
    return two_ends("".join(TracebackException.from_exception(error).format()), 10_000 if wants_short() else 1_000_000)


if __name__ == "__main__":
    main()
