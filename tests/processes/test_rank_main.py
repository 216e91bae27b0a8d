"""How processes end."""

import os
import signal
import subprocess
import sys
import time
import traceback
import weakref
from contextlib import contextmanager

import pytest

from learnerkit.launch import supervise
from learnerkit.processes import rank_main

ENDING = """
import atexit, os, sys, threading, time
from learnerkit.processes.rank_main import end_process as end

class Loud:
    def __del__(self, write=os.write):
        write(1, b"destroyed ")

kept = Loud()
file = open(sys.argv[1], "w")
file.write("whole")
threading.Thread(target=lambda: time.sleep(0.2) or os.write(1, b"thread ")).start()
atexit.register(lambda: os.write(1, b"hook "))
"""


def run(code, *args):
    """Run a program, and return its exit code and output."""
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_a_process_ends_as_usual_but_destroys_nothing(tmp_path):
    assert run(ENDING + "end(3)", tmp_path / "file") == (3, "thread hook ", "")
    assert (tmp_path / "file").read_text() == "whole"
    assert run(ENDING, tmp_path / "file") == (0, "thread hook destroyed ", "")  # it has not ended by that function


def test_the_hooks_of_a_sitecustomize_run_too(tmp_path, monkeypatch):
    """Those of coverage, for one."""
    (tmp_path / "sitecustomize.py").write_text("import atexit\natexit.register(print, 'site')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert run(ENDING + "end(3)", tmp_path / "file") == (3, "thread hook site\n", "")


def test_a_hook_that_fails_does_not_change_the_exit_code(tmp_path):
    code, out, err = run(ENDING + "atexit.register(lambda: 1 / 0)\nend(3)", tmp_path / "file")
    assert (code, out) == (3, "thread hook ")
    assert "ZeroDivisionError" in err


@pytest.mark.parametrize("code", [None, 3, -1, 256 + 3, True, 2**70, -(2**70), "a text"])
def test_the_exit_code_is_that_of_python(code):
    done = subprocess.run([sys.executable, "-c", f"raise SystemExit({code!r})"], capture_output=True, timeout=100)
    assert rank_main.exit_code(SystemExit(code)) == done.returncode


def test_a_forked_child_may_end_in_its_own_way(tmp_path):
    child = "import warnings; warnings.simplefilter('ignore')\n"  # of a fork beside a thread
    child += "if os.fork() == 0:\n    sys.exit(5)\nassert os.waitstatus_to_exitcode(os.wait()[1]) == 5\nend(0)"
    assert run(ENDING + child, tmp_path / "file") == (0, "hook thread hook ", "")  # the hooks of both


@pytest.mark.slow
def test_a_group_is_killed_with_all_that_it_has_started():
    sleeps = "import subprocess, time; subprocess.Popen(['sleep', '60']); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", sleeps], stdout=subprocess.PIPE, process_group=0) as process:
        process.stdout.readline()
        assert supervise.kill_group(process.pid, 0)
        assert supervise.kill_group(process.pid)
        assert process.stdout.read() == b""  # nobody holds the pipe any more
    assert process.returncode == -signal.SIGKILL
    while supervise.kill_group(process.pid, 0):  # until somebody has asked how the other one ended
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills with the parent")
def test_a_process_dies_with_its_parent_and_takes_its_forked_children_along():
    child = (
        "import os, sys, time; from learnerkit.processes.rank_main import die_with_parent, tie_forked_children\n"
        "die_with_parent(int(sys.argv[1])); tie_forked_children(); os.fork(); print(flush=True); time.sleep(60)"
    )
    parent = f"import os, subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())])"
    with subprocess.Popen([sys.executable, "-c", f"{parent}; time.sleep(60)"], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() + process.stdout.readline() == b"\n\n"  # of both
        process.kill()
        assert process.stdout.read() == b""
    assert run(child, 1)[0] == 1  # the parent has died already


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills with the parent")
def test_a_daemon_outlives_the_process_that_has_forked_it():
    code = (
        "import os, time; from learnerkit.processes.rank_main import tie_forked_children\n"
        "tie_forked_children()\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(0.5)\n"
        "        print('lives', flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()"
    )
    assert run(code) == (0, "lives\n", "")


def test_a_whole_traceback_is_kept_on_request(monkeypatch):
    package = {}
    exec(compile("def call(f):\n    f()", rank_main.__file__, "exec"), package)
    monkeypatch.setenv("LEARNERKIT_TRACEBACK", "full")
    with pytest.raises(ZeroDivisionError) as e:
        package["call"](lambda: 1 / 0)
    assert "in call" in rank_main.user_traceback(e.value)
    monkeypatch.delenv("LEARNERKIT_TRACEBACK")
    e.value.__cause__ = e.value.__context__ = e.value  # what refers to itself ends, too
    assert "in call" not in rank_main.user_traceback(e.value)


class Iterator:
    """Raises an error that refers to itself, as those of a loader's workers do."""

    def __next__(self):
        error = ValueError("of a worker")
        raise error


def fails():
    next(Iterator())


def test_what_the_frames_of_an_error_hold_is_freed_at_once():
    with pytest.raises(ValueError, match="of a worker") as caught:
        fails()
    frame = caught.traceback[-1].frame.raw
    held = weakref.ref(frame.f_locals["self"])  # before Python 3.13 this makes a copy that holds it, too
    error, caught = caught.value, None
    assert held() is not None
    rank_main.forget_frames(error)
    assert held() is None


@contextmanager
def managed():
    yield


@managed()
def decorated():
    fails()


def test_a_short_traceback_has_no_frames_of_contextlib():
    with pytest.raises(ValueError, match="of a worker") as caught:
        decorated()
    rank_main.shorten(caught.value)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[1:] == ["decorated", "fails", "__next__"]


def test_an_error_that_is_its_own_cause_is_gone_through_once():
    with pytest.raises(ValueError, match="of a worker") as caught:
        fails()
    caught.value.__cause__ = caught.value
    rank_main.forget_frames(caught.value)
    rank_main.shorten(caught.value)
