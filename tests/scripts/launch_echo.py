"""Rank 0 fails because of rank 1, and ends before it; the first argument says how rank 1 ends."""

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

how, rank = sys.argv[1], int(os.environ["RANK"])
waits, began = Path("rank 0 waits"), Path("rank 1 has begun to fail")


class Follower(Exception):
    """What a rank raises that leaves because another one failed."""

    learnerkit_ending = SimpleNamespace(follows=True)


def wait_for(path):
    while not path.exists():
        time.sleep(0.01)


if rank == 0:
    waits.touch()
    wait_for(began)
    if how == "killed":
        raise RuntimeError("Connection closed by peer")
    raise Follower("rank 1 failed in before_step\n(rank 0 left with it)")

if how == "stuck":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
wait_for(waits)
try:
    began.touch()
    if how == "raises":
        raise ValueError("the cause")
    if how == "exits":
        sys.exit(3)
finally:
    time.sleep(60 if how == "stuck" else 1.5)  # cleans up; or, if killed, waits for the kernel to clear its memory away
os.kill(os.getpid(), signal.SIGKILL)
