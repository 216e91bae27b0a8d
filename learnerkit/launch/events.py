"""The states of a launch in files, for the programs that follow it: a file of events, and a heartbeat file."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from learnerkit.launch.environment import Topology
from learnerkit.launch.report import Outcome, Rank, say
from learnerkit.processes.event_file import EventFile
from learnerkit.text import printable, signal_name

VERSION = 1  # the version of the contract in nbs/reference/launch_events.md
EVERY = 10.0  # seconds between two looks at the ranks

OTHER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)  # they are passed on, and do not end the run
SignalQueue = Callable[[float], Sequence[int]]  # see supervise.received_signals


class LaunchEvents(EventFile):
    """The file of events and the heartbeat file of a launcher; by default it has neither.

    Args:
        path: the file of events.
        heartbeat: the heartbeat file.
    """

    def __init__(self, path: str | None = None, heartbeat: str | None = None) -> None:
        super().__init__(say, path, node=None, attempt=0)
        self.heartbeat = heartbeat
        self._began = time.monotonic()
        self._due = 0.0  # when to look at the ranks, on the monotonic clock

    def started(self, topology: Topology, command: list[str]) -> None:
        """Write that an attempt begins."""
        self.common = {"node": topology.node, "attempt": topology.attempt}
        self._due = 0.0
        self.write(
            "started", version=VERSION, pid=os.getpid(), command=command, world_size=topology.world_size,
            nproc=topology.nproc, nodes=topology.nodes,
        )  # fmt: skip

    def for_ranks(self) -> dict[str, Any] | None:
        """Return the path and the common facts of the ranks' `EventFile`; `None` if nobody follows the launch."""
        return {"path": self.path} | self.common if self.path or self.heartbeat else None

    def hearing(self, signals: SignalQueue, ranks: Sequence[Rank] = ()) -> SignalQueue:
        """Return a queue of the same signals that writes each of them, and looks at the ranks at intervals."""
        if self.for_ranks() is None:
            return signals

        def wait(seconds: float) -> Sequence[int]:
            if time.monotonic() >= self._due:
                self._look(ranks)
            received = signals(seconds)
            for signum in received:
                self.signal(signum)
            return received

        return wait

    def signal(self, signum: int) -> None:
        """Write that a signal was received."""
        self.write("signal", name=signal_name(signum), ends=signum not in OTHER_SIGNALS)

    def outcome(self, outcome: Outcome) -> None:
        """Write the failure that has ended an attempt, if one has."""
        if outcome.kind in ("failed", "lost"):
            cause = printable(outcome.cause or outcome.text, 1000)
            self.write("failed", rank=outcome.rank, code=outcome.code, cause=cause, place=outcome.place)

    def ended(self, code: int) -> int:
        """Write that the launcher ends, and return its exit code."""
        self.write("ended", code=code, seconds=round(time.monotonic() - self._began, 3))
        return code

    def _look(self, ranks: Sequence[Rank]) -> None:
        """Write where the rank is that has not moved for the longest time, among those that read data."""
        self._due = time.monotonic() + EVERY
        moved, line = time.time(), ""
        seen = [rank.heartbeat.read() | {"rank": rank.number} for rank in ranks if rank.heartbeat and rank.code is None]
        if passing := [each for each in seen if each["phase"]]:
            last = max(passing, key=lambda each: each["since"])
            facts = {name: last[name] for name in ("rank", "phase", "epoch")}
            line = self.write("step", **facts, batch=last["step"], idle=round(last["since"], 3))
            moved -= last["since"]
        if self.heartbeat is not None:
            try:
                Path(self.heartbeat).write_text(line, encoding="utf-8")
                os.utime(self.heartbeat, (moved, moved))
            except OSError as error:
                self.complain(self.heartbeat, error)
