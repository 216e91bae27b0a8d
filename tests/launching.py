"""Starting scripts on several processes from a test."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"

WAYS = {
    "python": lambda n: [sys.executable],
    "launch": lambda n: [sys.executable, "-m", "learnerkit.launch", "--nproc", str(n)],
    "torchrun": lambda n: [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)],
}


def environment(gpus: bool = False) -> dict[str, str]:
    """One thread, this package, no GPU unless they are wanted."""
    mine = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS.parents[1])}
    return mine if gpus else mine | {"CUDA_VISIBLE_DEVICES": ""}


def run_script(
    script: str, *args: object, nproc: int = 1, way: str = "launch", timeout: float = 600, gpus: bool = False
) -> str:
    """Run a script of tests/scripts to its end and return what it printed; a failure shows its output."""
    command = [*WAYS[way](nproc), str(SCRIPTS / script), *map(str, args)]
    try:
        with hearing_ctrl_c():
            done = subprocess.run(command, env=environment(gpus), capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as late:
        printed = [text.decode() for text in (late.stdout, late.stderr) if text]
        raise AssertionError("\n".join([f"{script} on {nproc} processes took over {timeout} s", *printed])) from None
    assert done.returncode == 0, (
        f"{script} on {nproc} processes ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    return without_chatter(done.stdout) + without_chatter(done.stderr)


@contextmanager
def hearing_ctrl_c() -> Iterator[None]:
    """Start processes in here that do not ignore SIGINT, as they would where a shell runs the tests in background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


CHATTER = (
    r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\.",  # on stdout; of ranks that share one, piece by piece
    r"\[rank\d+\]:\[W.* ProcessGroup\.hpp:\d+\] Warning: No backend of type 0 found for Process Group",
)


def without_chatter(text: str) -> str:
    """What was printed without the lines that torch 2.10 prints of its own accord, and torch 2.15 does not."""
    return "".join(line for line in text.splitlines(keepends=True) if not re.match("|".join(CHATTER), line))


def in_time(seconds: float, limit: float) -> bool:
    """Whether that is within a limit which is meant for an idle machine: a busy one may take longer as it is slower."""
    return seconds < limit or seconds < limit * slowness()


def slowness() -> float:
    """How many times slower this machine is at present, by the import of torch, for which an idle one needs 3 s."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], env=environment(), check=True)
    return (time.monotonic() - start) / 3
