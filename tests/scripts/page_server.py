"""Runs pages of the documentation, each in a fork of this process, which has imported what most of them need before.

A line on standard input is {"page": path, "folder": path, "results": path}. To that last file the page's process writes
a line of JSON for each fence that it has run. When the page has ended, a line on standard output says how:
{"status": 0, "left": [command lines of processes that it has left behind]}.
"""

import ast
import atexit
import ctypes
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

import pages
import torch

import learnerkit.learner  # noqa: F401 - so that no page has to wait for it

torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process imports torch's compiler, which takes a second
LIMIT = 300.0  # seconds for a page, on a busy machine
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: what a page leaves behind becomes a child of this process


def main() -> None:
    """Answer requests until there are no more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            answers.close()
            run_page(**request)
        print(json.dumps({"status": wait(child), "left": end_the_rest()}), file=answers, flush=True)


def wait(child: int) -> int:
    """Wait for a page's process, and end it if it takes too long."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


def end_the_rest() -> list[str]:
    """End the processes that a page has left behind, after some seconds in which they may end by themselves."""
    end = time.monotonic() + 5
    while (left := children()) and time.monotonic() < end:
        time.sleep(0.02)
    said = []
    for process in left:
        with suppress(psutil.Error):
            said.append(" ".join(process.cmdline()))
            process.kill()
            process.wait(10)
    return said


def children() -> list[psutil.Process]:
    """The processes below this one that are running."""
    found = psutil.Process().children(recursive=True)
    for process in found:
        with suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
    return [p for p in found if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def run_page(page: str, folder: str, results: str) -> None:
    """Run the fences of a page up to the first that fails, and end this process."""
    status = 1
    try:
        os.chdir(folder)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        text = Path(page).read_text(encoding="utf-8")
        if "examples/" in text:
            Path("examples").symlink_to(pages.ROOT / "examples")
        torch.manual_seed(0)
        main_module = sys.modules["__main__"] = ModuleType("__main__")
        sys.argv, sys.ps1 = [""], ">>> "  # as at a prompt, so that processes may be started from here
        sys.path.insert(0, "")
        output = redirected()
        with open(results, "w") as file:
            for fence in pages.fences(text):
                if fence.file:
                    Path(fence.file).parent.mkdir(parents=True, exist_ok=True)
                    Path(fence.file).write_text(fence.code)
                if not fence.runs:
                    continue
                error, line = (run_python if fence.language == "python" else run_commands)(fence, page, main_module)
                printed = output.read().decode("utf-8", "replace")
                print(json.dumps({"line": fence.line, "printed": printed, "error": error, "at": line}), file=file)
                file.flush()
                if error:
                    break
        status = 0
    except BaseException:
        Path(f"{results}.error").write_text(traceback.format_exc())
    finally:
        end_process(status)


def end_process(status: int) -> None:
    """End as Python does, with what is registered for it, but without the server's part of the program."""
    with suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
    os._exit(status)


def redirected() -> io.FileIO:
    """Lead all output of this process, and of those that it starts, to a file without a name; return its reader."""
    descriptor, path = tempfile.mkstemp()
    reader = io.FileIO(path)
    os.unlink(path)
    # Several processes write to it, each at its end.
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    return reader


def run_python(fence: pages.Fence, page: str, main_module: ModuleType) -> tuple[str, int]:
    """Run Python; lines in a traceback are those of the page."""
    padding = "\n" * (fence.line - 1)
    try:
        tree = ast.parse(padding + fence.code, page)
        exec(compile(tree, page, "exec"), vars(main_module))
    except BaseException as e:
        name, line = type(e).__name__, last_line(e, page, fence.line)
        if fence.raises == name:
            print("".join(traceback.format_exception_only(e)), file=sys.stderr)
            return "", line
        if fence.raises:
            return f"it should raise {fence.raises}\n{traceback.format_exc()}", line
        return traceback.format_exc(), line
    return (f"it should raise {fence.raises}" if fence.raises else ""), fence.line


def last_line(error: BaseException, page: str, otherwise: int) -> int:
    """The line of the page in which an error was raised."""
    if isinstance(error, SyntaxError) and error.filename == page:
        return error.lineno or otherwise
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == page]
    return (lines[-1] if lines else None) or otherwise


def run_commands(fence: pages.Fence, page: str, main_module: ModuleType) -> tuple[str, int]:
    """Run the commands of a fence, each with this interpreter; the last one may have to fail."""
    commands = fence.commands
    for line, command in commands:
        expected = fence.exit if (line, command) == commands[-1] else "0"
        command = command.replace("python ", f"{sys.executable} ", 1)
        code = subprocess.run(["bash", "-c", command], start_new_session=True).returncode
        if (code == 0) if expected == "fail" else (str(code) != expected):
            return f"{command!r} ended with {code}, not with {expected}", line
    return "", fence.line


if __name__ == "__main__":
    main()
