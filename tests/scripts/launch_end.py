"""End in the way the first argument says, on rank 1 unless stated otherwise; the other ranks wait for it."""

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

how, rank = sys.argv[1], int(os.environ["RANK"])
other_is_ready = Path("the other rank is ready")


def wait_to_be_stopped():
    time.sleep(60)


def wait_for_the_other():
    while not other_is_ready.exists():
        time.sleep(0.01)


if how == "early":  # rank 1 is done while rank 0 goes on
    if rank == 0:
        wait_for_the_other()
        time.sleep(0.5)
    os.write(1, f"rank {rank} done\n".encode())
    other_is_ready.touch()
elif how == "lingers":  # done, but for a thread
    threading.Thread(target=wait_to_be_stopped).start()
    os.write(1, b"waits for a thread\n")
elif how == "straggler":  # every rank leaves a program behind, and one a forked child which fails
    subprocess.Popen(["sleep", "60"])
    if os.fork() == 0:
        raise RuntimeError("only a forked child")
    os.wait()
elif how == "stubborn":
    if rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        other_is_ready.touch()
        wait_to_be_stopped()
    wait_for_the_other()
    sys.exit(3)
elif rank == 0:
    wait_to_be_stopped()
elif how == "exit":
    atexit.register(lambda: print("exit hook ran after", sys.modules["__main__"].how))
    log = open("log.txt", "w")  # noqa: SIM115  (left open, as scripts do)
    log.write("last line")
    sys.exit(3)
elif how == "text":
    sys.exit("a last word")
elif how == "abrupt":
    print("printed before the end")
    os._exit(5)
elif how == "crash":
    ctypes.string_at(0)
elif how == "interrupted":
    os.kill(os.getpid(), signal.SIGINT)
    wait_to_be_stopped()
elif how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif how == "stuck":  # a thread that nobody can join must not hold up the end
    print("printed before the end")
    sys.stderr = SimpleNamespace(write=sys.stderr.write, flush=sys.stderr.flush)  # no file, like many a logger
    threading.Thread(target=wait_to_be_stopped).start()
    raise KeyError("stuck")
elif how == "syntax":
    compile("a = = 1", "typo.py", "exec")
