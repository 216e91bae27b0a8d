"""Saves are killed at any place; after each, a whole checkpoint must be there. Also: no rights, and a process's end.

    checkpoint_crashes.py FOLDER SEED COUNT

torch is imported once: each save that is killed runs in a fork of this process. Prints what it found, as JSON.
"""

import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from checkpoint_files import is_state, save, save_and_wait

from learnerkit import CheckpointError
from learnerkit.checkpoints.storage import Storage

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir")
SIZE = 20_000


def in_child(call) -> int:
    """Run a function in a fork of this process; return how that ended."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = call() or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def save_there(folder, number, background) -> None:
    save_and_wait(Storage(folder, keep=1, background=background), number, size=SIZE)


def killed_at_event(k, *args) -> None:
    """Save, with kill -9 at the k-th system call that opens, makes, renames or removes something."""
    left = k

    def watch(event, _):
        nonlocal left
        left -= event in EVENTS
        if left < 0 and event in EVENTS:  # to kill is an event, too
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    save_there(*args)


def killed_at_byte(k, *args) -> None:
    """Save, and be killed when any file is to get more than k bytes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (k, k))
    save_there(*args)


def crashes(folder: Path, kill, places) -> dict[str, int]:
    """Kill a save at each of these places, until one is not reached."""
    tried = ended = 0
    number = 0
    for background in (False, True):
        number += 1
        save_there(folder, number, background)
        for k in places(1 + 3 * background):  # most of what is done is the same in the background
            time.sleep(0.005)  # the clock of the file system ticks that seldom
            code = in_child(lambda args=(k, folder, number + 1, background): kill(*args))
            assert code in (0, -signal.SIGKILL, -signal.SIGXFSZ), code
            newest = Storage(folder).newest()
            done = newest.info["number"]
            assert is_state(newest, done, SIZE), "a checkpoint is not whole"
            assert done in (number, number + 1), (done, number)
            assert code or done == number + 1
            number = done + 1
            save_there(folder, number, background)
            names = sorted(os.listdir(folder))
            assert names == ["latest", f"step{number}"], names
            tried += 1
            ended += code == 0
            if code == 0 and kill is killed_at_event:
                break
    return {"tried": tried, "ended": ended}


def refused(folder: Path) -> str:
    """What a process without the right to write is told before it begins."""
    folder.mkdir()
    folder.chmod(0o555)
    if os.getuid() == 0:
        os.setuid(65534)
    try:
        Storage(folder / "run").check_writable()
    except CheckpointError as e:
        (told := os.fdopen(int(os.environ["TOLD"]), "w")).write(str(e))
        told.flush()
        return 3
    return 0


def main() -> None:
    """Do it all."""
    torch.set_num_threads(1)
    folder, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    draw = random.Random(seed)
    found = {
        "events": crashes(folder / "events", killed_at_event, lambda step: range(0, 1000, step)),
        "bytes": crashes(folder / "bytes", killed_at_byte, lambda _: [draw.randrange(5 * SIZE) for _ in range(count)]),
    }
    read, write = os.pipe()
    os.environ["TOLD"] = str(write)
    found["refused"] = [in_child(lambda: refused(folder / "closed")), os.read(read, 1000).decode()]
    print(json.dumps(found))
    save(Storage(folder / "last", background=True), 1, size=3_000_000)  # which the end of this process waits for


main()
