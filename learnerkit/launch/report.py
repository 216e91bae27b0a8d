"""The report of an attempt: which rank failed first, and how each has ended, in words."""

import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from learnerkit.endings import ExceptionReport, is_collective_error
from learnerkit.launch.environment import Topology
from learnerkit.processes.heartbeat import Heartbeat
from learnerkit.processes.rank_main import wants_short
from learnerkit.text import escaped, first_few, killed_by, signal_name

MAY_FOLLOW, FOLLOWS = 1, 2  # see follows


@dataclass(frozen=True)
class Outcome:
    """The end of an attempt, for all nodes.

    Args:
        kind: 'done', 'failed', 'stopped' (a launcher got a signal), 'lost' (a node is), 'joined' (a node wants to be),
            'left' (a node was asked to end, and the others go on).
        node: the first node on which it ended.
        code: the exit code of the failure.
        text: what to tell the user.
        rank, cause, place: which rank failed, why, and in which place of the run; `None` or empty if that is not known.
    """

    kind: str
    node: int = 0
    code: int = 1
    text: str = ""
    rank: int | None = None
    cause: str = ""
    place: str = ""


@dataclass
class Rank:
    """A process of the run."""

    number: int
    process: subprocess.Popen[bytes]
    report_file: IO[bytes]
    ended: float  # on the monotonic clock; while the process runs, when it was last seen alive
    code: int | None = None  # as in Popen: minus the number of the signal that ended it
    report: ExceptionReport = ExceptionReport()
    stop_signals: list[int] = field(default_factory=list)  # the signals that the launcher sent to end it
    heartbeat: Heartbeat | None = None
    location: str = ""  # the place in the run where it ended
    log: Path | None = None
    guard: IO[bytes] | None = None  # The guard is told that the rank has ended; see guard.py.


def failure(rank: Rank, topology: Topology) -> Outcome:
    """Return the outcome of an attempt that this rank's failure ends, in words for the other nodes."""
    error, code = rank.report.error, rank.code or 0
    how = how_it_ended(rank).rstrip(",")
    text = f"rank {rank.number} {how}" + (f": {error}" if error else "")
    cause = error or how
    return Outcome("failed", topology.node, code if code >= 0 else 128 - code, text, rank.number, cause, rank.location)


def log_errors(ranks: list[Rank]) -> None:
    """Put the traceback of each rank that failed at the end of its file, after all that it has printed."""
    for rank in ranks:
        if rank.log and rank.report.traceback:
            # The disk may be full, or the script may have removed the folder.
            with suppress(OSError), rank.log.open("a", encoding="utf-8") as file:
                file.write(escaped(rank.report.traceback))


def outcome_of(ranks: list[Rank], reason: int | Outcome, topology: Topology) -> Outcome:
    """Return how the attempt has ended; of several failures on this node, the first cause counts."""
    if isinstance(reason, int):
        return Outcome("stopped", topology.node, 128 + reason, text=f"asked to end by {signal_name(reason)}")
    first = first_failure(ranks)
    return failure(first, topology) if first and not ended_by_another_node(reason, topology) else reason


def ended_by_another_node(reason: int | Outcome, topology: Topology) -> bool:
    """Tell whether another node has ended the attempt: it has failed, or wants to join."""
    if not isinstance(reason, Outcome) or reason.kind == "done":
        return False
    return reason.kind == "joined" or reason.node != topology.node


def report(ranks: list[Rank], reason: int | Outcome, topology: Topology, began: float) -> None:
    """Say what went wrong, the first failure first and then a line for every rank."""
    failed, by_others = failures(ranks), ended_by_another_node(reason, topology)
    if isinstance(reason, Outcome) and by_others:
        say(reason.text)
    # If all that failed only followed another rank, one that has ended well left too early. Where that is not certain,
    # it has ended before the first of them.
    certainty = min(map(follows, failed), default=0)
    well = [rank for rank in ranks if certainty and rank.code == 0]
    early = [rank for rank in well if certainty == FOLLOWS or rank.ended < failed[0].ended][:1]
    for rank in early:
        say(f"rank {rank.number} left before the others: it {how_where_and_when(rank, began)}")
    for rank in failed[: 0 if by_others else 1]:
        # One line if the user asked for the end, or the message names the cause.
        if reason == signal.SIGINT or follows(rank) == FOLLOWS:
            details = rank.report.error
        else:
            details = rank.report.brief if wants_short() else rank.report.traceback
        say(f"rank {rank.number} {how_where_and_when(rank, began)}" + (f":\n{details}" if details else ""))
    alike: dict[str, list[int]] = {}
    for rank in failed[0 if by_others else 1 :]:
        error = rank.report.error
        how = f"failed: {error}" if error else how_it_ended(rank).rstrip(",")
        alike.setdefault(how, []).append(rank.number)
    for how, numbers in alike.items():
        if len(numbers) == 1:
            say(f"rank {numbers[0]} then {how}")
        else:
            say(f"ranks {first_few(sorted(numbers))} then {re.sub('^was ', 'were ', how)}")
    for rank in ranks:
        if rank not in (*failed, *early) and (failed or by_others or signal.SIGKILL in rank.stop_signals):
            say(f"rank {rank.number} {how_where_and_when(rank, began)}")


def failures(ranks: list[Rank]) -> list[Rank]:
    """Return the ranks that ended badly, except those that were stopped: the first cause first, its followers last."""
    failed = [rank for rank in ranks if rank.code not in (None, 0) and not stopped(rank)]
    return sorted(failed, key=lambda rank: (follows(rank), rank.ended))


def first_failure(ranks: list[Rank]) -> Rank | None:
    """Return the rank whose failure caused the others, so far as is known."""
    return next(iter(failures(ranks)), None)


def follows(rank: Rank) -> int:
    """Tell whether another rank has caused a failure: 0 (no), MAY_FOLLOW or FOLLOWS.

    The time alone does not tell: a rank that failed first may clean up for longer than those that follow it, and
    the peers of a killed rank see its connections close before the kernel has removed it.
    """
    if rank.report.ending.follows:
        return FOLLOWS
    aborted = rank.code == -signal.SIGABRT  # torch does so, too, when it loses its peers on NCCL
    return MAY_FOLLOW if aborted or is_collective_error(rank.report.error) else 0


def stopped(rank: Rank) -> bool:
    """Tell whether a rank ended by a signal of the launcher, or with the exit code that stands for it."""
    return stopped_by(rank) > 0 or any(rank.code in (-signum, 128 + signum) for signum in rank.stop_signals)


def stopped_by(rank: Rank) -> int:
    """Return the signal that asked a rank to end, if the rank reports that it ended as it should; else 0."""
    return rank.report.ending.signal


def how_it_ended(rank: Rank) -> str:
    """Say in a few words how a rank ended."""
    if rank.code is None:
        return f"does not die: process {rank.process.pid} hangs in the kernel"
    if stopped(rank):
        if rank.code == -signal.SIGKILL:
            return "did not stop in time and was killed"
        return f"was stopped by {'the launcher' if rank.stop_signals else signal_name(stopped_by(rank))}"
    if rank.code < 0:
        return killed_by(-rank.code)
    if rank.code == 0:
        return "ended with exit code 0"
    return f"failed (exit code {rank.code})" + (", following another rank," if follows(rank) == FOLLOWS else "")


def how_where_and_when(rank: Rank, began: float) -> str:
    """Say how a rank ended, where in the run, and after how many seconds."""
    where = f" in {rank.location}" if rank.location else ""
    return f"{how_it_ended(rank)}{where} after {rank.ended - began:.1f} s" + (f" ({rank.log})" if rank.log else "")


def say(text: str) -> None:
    """Print to stderr, with control characters escaped and all lines but the first indented: none can be forged."""
    first, *rest = escaped(text.rstrip()).split("\n")
    try:
        print("\n".join([f"learnerkit.launch: {first}", *(f"  {line}" for line in rest)]), file=sys.stderr, flush=True)
    except OSError:  # the terminal is gone (SIGHUP), but the ranks are still to be stopped
        pass
