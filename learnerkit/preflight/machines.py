"""Look at the machines of a run before it: ``python -m learnerkit.doctor``, or the launcher's ``--check``.

The launcher starts this module on every rank, on the same machines and in the same processes as the real run. Each
rank collects facts by itself and leaves them in the store where all meet, which needs no connections between ranks: so
those that cannot connect are reported, too. Then they try together what a run needs. Rank 0 prints what is right, what
is wrong, and what to do.
"""

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from learnerkit.launch import cli
from learnerkit.preflight.facts import Board, Facts, Judge, Ranks, by_machine, open_board, places
from learnerkit.preflight.report import NOTHING, WRONG, Finding, Report, fine, problem, unchecked
from learnerkit.text import first_few, in_one_line


def make_parser() -> argparse.ArgumentParser:
    """Return the parser with the options that the help shows."""
    parser = argparse.ArgumentParser(
        "learnerkit.doctor",
        usage="python -m learnerkit.doctor [options of the launcher]",
        description="Look at the machines and processes of a run before it: versions, devices, network, shared\n"
        "memory, limits, files, clocks, and how fast gradients travel. Start it as you would start the run.",
        epilog="examples:\n"
        "  python -m learnerkit.doctor                 every GPU of this machine\n"
        "  python -m learnerkit.doctor --nproc 2       two processes, also without a GPU\n"
        "  srun python -m learnerkit.doctor            the machines of a SLURM job\n\n"
        "Lines begin with ok, ?? (it may be intended), !! (a problem) or -- (not checked).\n"
        "The exit code is 0 if there is no problem, and 1 if there is one.\n"
        "All options: python -m learnerkit.launch --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--nproc", metavar="N", help="number of processes (default: one per GPU)")
    parser.add_argument("--gpus", metavar="0,1", help="the GPUs to use, by index, with one process each")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0 if there is no problem, 1 if there is one."""
    argv = sys.argv[1:] if argv is None else list(argv)
    # The first is how the launcher starts its ranks; the second is what torchrun sets.
    if argv == cli.DOCTOR[2:] or "TORCHELASTIC_RUN_ID" in os.environ:
        return examine()
    parser = make_parser()
    parser.parse_known_args(argv)  # This answers --help; the launcher reads the options.
    return cli.main(["--check", *argv], prog=parser.prog)


def examine() -> int:
    """Run all checks on one rank; every rank returns the same exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # An exit removes files.
    if os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR") == "ERROR":  # the launcher's default
        os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # the report has the errors, without the stacks of C++
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    report = Report(shown=rank == 0, entry="doctor")
    try:
        import torch  # noqa: F401 - first, as no check works without it; it may take long from a slow disk
    except Exception as error:
        sys.exit(
            f"learnerkit.doctor: rank {rank} ({socket.gethostname()}) cannot import torch with {sys.executable}:\n"
            f"    {in_one_line(error)}\n    install torch there, or start the launcher with the Python that has it"
            " (errors.html#doctor)"
        )
    from learnerkit.preflight.joint_checks import JOINT
    from learnerkit.preflight.local_checks import LOCAL

    with time_limit(report, rank, "ranks", "does the disk that torch is on, or the name server, answer?"):
        facts = introduce(rank) | {topic: attempt(look) for topic, (look, _) in LOCAL.items()}
        board = open_board(rank, size)
    everyone = board.gather("facts", facts)
    missing = [number for number, found in enumerate(everyone) if found is None]
    if everyone := [found for found in everyone if found is not None]:  # This is rank 0.
        report.add("ranks", judge_ranks(everyone, missing))
    for topic, (_, judge) in LOCAL.items():
        report.add(topic, judged(topic, judge, everyone))
    stop = board.announce("stop", bool(missing))
    for topic, (check, judge, advice) in JOINT.items():
        if stop or (size == 1 and topic != "file system"):
            break
        with time_limit(report, rank, topic, advice, board):
            note = attempt(check, board)
            if "error" in note:
                board.store.set(f"{topic} error", json.dumps(f"failed on {places([facts])}: {note['error']}"))
        for found, note in zip(everyone, board.gather(topic, note), strict=True):
            found[topic] = {"error": f"no answer in {board.seconds:.0f} s"} if note is None else note
        report.add(topic, judged(topic, judge, everyone, advice))
        stop = board.announce(f"{topic} failed", any("error" in found[topic] for found in everyone))
    well = board.announce("well", report.close())
    board.gather("read", True, seconds=5)  # rank 0 leaves last: the store may go with it
    return 0 if well else 1


def introduce(rank: int) -> Facts:
    """Return the rank and its machine."""
    host = socket.gethostname()
    boot = Path("/proc/sys/kernel/random/boot_id")  # two machines may have one name
    return {"rank": rank, "host": host, "machine": f"{host} {boot.read_text().strip() if boot.exists() else ''}"}


def attempt(look: Callable[..., Facts], *args: Any) -> Facts:
    """Return the facts that `look` returns, or its error: a check that fails is a finding."""
    try:
        return look(*args)
    except Exception as error:
        return {"error": in_one_line(error)}


@contextmanager
def time_limit(report: Report, rank: int, topic: str, advice: str, board: Board | None = None) -> Iterator[None]:
    """Report a problem and end the process if the body hangs: no exception can end a call of NCCL or the kernel.

    It may hang because another rank has failed, which leaves a note on the board.
    """
    over = threading.Event()

    def watch() -> None:
        # The others wait a little longer, so that rank 0 can report before their end becomes its error.
        deadline, error = time.monotonic() + Board.seconds + (5 if rank else 0), None
        while time.monotonic() < deadline and not error:
            if over.wait(0.2):
                return
            error = board.read(f"{topic} error") if board and rank == 0 else None
        if over.wait(1):
            return
        report.add(topic, [problem(error or f"has not ended after {Board.seconds:.0f} s", advice)])
        report.close()
        if board and rank == 0:
            board.store.set("end", "")
            time.sleep(0.5)  # The others need time to read it.
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def judge_ranks(everyone: Ranks, missing: Sequence[int]) -> list[Finding]:
    """Name the ranks that have come, and those that have not."""
    total, groups = len(everyone) + len(missing), by_machine(everyone)
    where = first_few(f"{group[0]['host']} ({len(group)})" for group in groups)
    if missing:
        who = f"rank{'s' * (len(missing) > 1)} {first_few(missing)}"
        text = f"{who} of {total} did not come within {Board.seconds:.0f} s; here are {where}"
        return [problem(text, "does every launcher run, and what have those ranks printed?")]
    if total == 1:
        return [unchecked(f"1 on {groups[0][0]['host']}: nothing between processes could be checked (--nproc 2)")]
    return [fine(f"{total} on {len(groups)} machine{'s' * (len(groups) > 1)}: {where}")]


def judged(topic: str, judge: Judge, everyone: Ranks, advice: str = "") -> list[Finding]:
    """Return the findings about a topic, or one that says why there are none: a problem if there is advice for it."""
    failed = [f for f in everyone if "error" in f[topic]]
    try:
        if not failed:
            return judge(everyone) if everyone else []
        where, error = places(failed), failed[0][topic]["error"]
    except Exception as e:
        where, error = "rank 0", in_one_line(e)
    mark, what = (WRONG, "failed") if advice else (NOTHING, "could not be checked")
    return [Finding(mark, f"{what} on {where}: {error}", advice)]
