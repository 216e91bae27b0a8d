"""Messages and heartbeats that the ranks of a run exchange beside the collectives.

A rank that waits in a collective cannot receive messages by one, and waits for ever if a peer has failed or is stuck.
So every rank has two threads while it trains. One reads the messages that other ranks put into the store, and can end
the rank's waiting: on gloo by shutting down the connections between the ranks (gloo's own `abort` does nothing), on
NCCL by aborting the group. The other looks for a rank that has come to a standstill. It reads a small piece of memory
that the ranks of a machine share, and that can be read even when a process is stopped (`Heartbeat`).
"""

import json
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from inspect import isfunction
from itertools import count
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from learnerkit import distributed
from learnerkit.distributed import PeerError, collectives, meeting
from learnerkit.endings import Ending, where
from learnerkit.host_scalars import HostCopy
from learnerkit.marks import collective
from learnerkit.processes.heartbeat import Heartbeat
from learnerkit.processes.sockets import open_sockets
from learnerkit.state import Learner
from learnerkit.torch_internals import abort_nccl, frame_of_thread, waits_for_ranks

GRACE_SECONDS = 0.5
"""Seconds that the other ranks get to fail with, and report, their own error before their waits are ended."""

ANSWER_SECONDS = 3.0
"""Seconds to wait for a rank's answer before it counts as silent."""

LOOK_SECONDS = 0.5
"""Seconds between two looks at where a single process is."""


_runs = [0]  # the number of runs for which all ranks have met, the same on every rank


class Watch:
    """Listens for messages of other ranks, and looks for a standstill; every rank enters it for a run.

    Args:
        what: the call that this rank makes; the same on every rank.
        timeout: seconds without progress after which a rank that waits counts as stuck.

    Attributes:
        failure: the first failure of any rank, if one is known.
        called: by the number of a vote, the index of the batch of validation after which a rank calls the others to it.
        passed: returns the number of the last point of its batches that this rank has reached; called in another
            thread.
    """

    def __init__(self, what: str, timeout: float) -> None:
        self.what, self.timeout = what, timeout
        self.rank, self.ranks = distributed.rank(), distributed.world_size()
        self.others = set(range(self.ranks)) - {self.rank}
        self.store: dist.Store = dist.PrefixStore(f"learnerkit/watch/run-{_runs[0]}", distributed.store())
        self.failure: Ending | None = None
        self.called: dict[int, int] = {}
        self.passed: Callable[[], int] = lambda: -1
        self.heartbeats: dict[int, Heartbeat] = {}  # the heartbeats of the ranks of this machine
        self._main = threading.get_ident()
        self._over = threading.Event()

    @collective
    def __enter__(self) -> "Watch":
        """Meet the other ranks, and start the threads; every rank must reach this.

        Raises:
            PeerError: some ranks did not come, or made another call.
        """
        calls = distributed.await_all(self.store, self.what, self.timeout)
        _runs[0] += 1
        if len(set(calls)) > 1:
            raise distributed.not_together(", ".join(f"rank {rank} called {call}" for rank, call in enumerate(calls)))
        self.heartbeat = Heartbeat.own()
        here, mine = _machine(), {pair for pair, _ in open_sockets()}
        everyone = distributed.all_gather((here, self.heartbeat.path, mine))
        for rank, (machine, path, _) in enumerate(everyone):
            if machine == here:
                with suppress(OSError, ValueError):
                    self.heartbeats[rank] = Heartbeat(path)
        theirs = {pair for _, _, pairs in everyone for pair in pairs} - mine
        port = distributed.store_port(self.store)
        # These are the connections to other ranks; those to the store must stay.
        self._lines = {pair for pair in mine if pair[::-1] in theirs and port not in (pair[0][1], pair[1][1])}
        self.heartbeat.live(waits=False)
        self.heartbeat.beat(time.monotonic(), 0, 0, b"before_fit/")
        # Each thread needs its own client of the store, as a client that waits serves no other thread.
        self.store, self._inbox = self.store.clone(), self.store.clone()
        self._inbox.set_timeout(timedelta(days=7))
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._listen, self._look)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self.passed = lambda: -1
        self._aside(self._leave)
        for thread in self._threads:
            thread.join(timeout=ANSWER_SECONDS)
        self.heartbeat.phase(0)
        if error[0] is None:  # an error that comes later is not one of this run
            self.heartbeat.beat(time.monotonic(), 0, 0, b"")
        self.heartbeat.close()

    def _leave(self) -> None:
        with suppress(RuntimeError):  # the store has gone with rank 0, as the listener has noticed, too
            self.tell("stop", ranks=[self.rank])
            if self.failure is not None:
                # Rank 0, which may host the store, leaves last: torch would print long messages on the others.
                self._meet("left", 0 if self.rank else ANSWER_SECONDS)

    def _meet(self, where: str, patience: float) -> None:
        """Wait until all ranks have come here, but at most `patience` seconds."""
        end, come = time.monotonic() + patience, 1
        while self.store.add(where, come) < self.ranks and time.monotonic() < end:
            come = 0  # this rank counts once
            time.sleep(0.01)

    def _aside(self, work: Callable, *args: Any) -> Any:
        """Run a function that uses the store in a thread, keep the heartbeat alive meanwhile, and return its result.

        Return `None` if the store does not answer soon: the process that hosts it, often rank 0's, may be stopped.
        """
        results: list = []
        thread = threading.Thread(target=lambda: results.append(work(*args)), daemon=True)
        thread.start()
        for _ in range(round(6 * ANSWER_SECONDS)):  # a little longer than the function itself waits
            thread.join(0.2)
            if results:
                return results[0]
            self.heartbeat.live(waits=True)
        return None

    # Messages

    def tell(self, kind: str, about: Any = None, ranks: Iterable[int] = ()) -> None:
        """Put a message into the inboxes of ranks; by default those of all others."""
        for rank in ranks or self.others:
            number = self.store.add(f"inbox/{rank}/length", 1)
            self.store.set(f"inbox/{rank}/{number}", json.dumps([kind, about]))

    def _listen(self) -> None:
        for number in count(1):
            try:
                kind, about = json.loads(self._inbox.get(f"inbox/{self.rank}/{number}"))
            except RuntimeError:  # the store has gone with rank 0, and the collectives will fail, too
                return
            match kind:
                case "stop":
                    return
                case "failed":
                    self._over.wait(GRACE_SECONDS)
                    self.hang_up(Ending.of(about))
                case "leaving":
                    vote, batch = about
                    self.called[vote] = min(batch, self.called.get(vote, batch))
                case "report?":
                    self._inbox.set(f"{about}/{self.rank}", json.dumps(self.report()))

    def report(self) -> dict:
        """Describe the position of this rank, whether it waits for others, and its main thread's stack."""
        frame = frame_of_thread(self._main)
        return self.heartbeat.read() | {
            "alive": 0.0, "waits": waits_for_ranks(frame, _WAITING), "passed": self.passed(),
            "stack": _stack(frame),
        }  # fmt: skip

    def _ask(self) -> dict[int, dict]:
        """Collect the reports of the ranks that answer soon."""
        question = f"report/{self.rank}/{time.monotonic_ns()}"
        self.tell("report?", question)
        keys = {rank: f"{question}/{rank}" for rank in self.others}
        with suppress(dist.DistStoreError):  # the time is over
            self.store.wait(list(keys.values()), timedelta(seconds=ANSWER_SECONDS))
        return {rank: json.loads(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}

    # A failure

    def fail(self, mine: Ending) -> None:
        """Report this rank's failure to the others, and end their waits for it."""
        # The store has gone with rank 0; the others see that their connections have gone, too.
        with suppress(RuntimeError):
            self.tell("failed", vars(mine))
            self._meet("failed", GRACE_SECONDS)
        self.hang_up(mine)

    def first_failure(self, patience: float) -> Ending | None:
        """Return the first failure, if one becomes known within `patience` seconds."""
        end = time.monotonic() + patience
        while self.failure is None and time.monotonic() < end:
            time.sleep(0.01)
        return self.failure

    def hang_up(self, failure: Ending) -> None:
        """Shut down the connections between ranks, so that every pending collective fails.

        The process group is unusable afterwards.

        Args:
            failure: the reason, if no earlier one is known.
        """
        self.failure = self.failure or failure
        meeting.group_is_dead = True
        for pair, line in open_sockets():
            if pair in self._lines:
                with suppress(OSError):  # the peer was quicker
                    line.shutdown(socket.SHUT_RDWR)
        if "nccl" in dist.get_backend_config() and torch.cuda.is_available():
            abort_nccl()

    def check(self) -> None:
        """Raise an error if another rank has failed.

        Raises:
            PeerError: another rank has failed.
        """
        first = self.failure
        if first is None:
            return
        verb = "came to a standstill" if first.standstill else "failed"
        raise PeerError(
            f"rank {first.rank} {verb} in {where(vars(first))}: {first.cause}\n"
            f"(rank {self.rank} left with it, from {where(self.heartbeat.read())}; "
            "the next fit begins with rank 0's weights) (errors.html#peers)",
            standstill=first.standstill,
        ) from None

    # The question whether any rank has reached a point of the batch that this rank would skip

    def all_skip(self, point: int) -> bool:
        """Tell whether every rank skips a point; ranks that have reached it never call this."""
        skipping = self.store.add(f"skipped/{point}", 1)
        while skipping < self.ranks:
            answers = self._ask()  # asked repeatedly, as some ranks may not be there yet
            self.check()
            # Read after the answers: once all ranks skip it, they go on.
            skipping = self.store.add(f"skipped/{point}", 0)
            if skipping < self.ranks and any(answer["passed"] >= point for answer in answers.values()):
                return False
        return True

    # A standstill

    def none_moves(self) -> bool:
        """Tell whether all other ranks have waited for others for a second."""
        answers = self._ask()
        return len(answers) == len(self.others) and all(a["waits"] and a["since"] > 1 for a in answers.values())

    def _look(self) -> None:
        every, waited = min(1.0, self.timeout / 4), 0.0
        while not self._over.wait(every):
            waits = waits_for_ranks(frame_of_thread(self._main), _WAITING)
            self.heartbeat.live(waits)
            stands = waits and self.heartbeat.read()["since"] > every  # otherwise the rank works, or has worked since
            waited = waited + every if stands else 0.0
            if waited > self.timeout and self.failure is None:
                self._diagnose()
                return

    def _diagnose(self) -> None:
        """Report which ranks wait and which have not come, and end the run."""
        reports = self._survey()
        states = [known["state"] for known in reports]
        late = [rank for rank, state in enumerate(states) if state != "waits"]
        failure = self._standstill(reports, late)
        if self.rank == states.index("waits"):  # one rank prints for all
            print(self._describe(reports, late), file=sys.stderr, flush=True)
            self._aside(self.tell, "failed", vars(failure))
        else:
            self.first_failure(2 * ANSWER_SECONDS)
        self.hang_up(failure)
        if not self._over.wait(10):  # the main thread could not be freed, and the run must end
            print(f"[rank {self.rank}] could not be freed from its wait; leaving", file=sys.stderr, flush=True)
            os._exit(1)

    def _survey(self) -> list[dict]:
        """Collect the position and state of each rank: it waits, is slow or is silent."""
        answers = self._aside(self._ask) or {}
        answers[self.rank] = self.report() | {"waits": True}
        unknown = vars(Ending(event="an unknown event")) | {"since": math.nan, "alive": math.inf, "stack": ""}
        reports = []
        for rank in range(self.ranks):
            seen = self.heartbeats[rank].read() if rank in self.heartbeats else {}
            known = unknown | seen | answers.get(rank, {})
            state = "waits" if known["waits"] else "slow"
            state = "silent" if known["alive"] > ANSWER_SECONDS else state
            reports.append(known | {"state": state})
        return reports

    def _standstill(self, reports: list[dict], late: list[int]) -> Ending:
        """Return the failure for the ranks' errors; `late`: the ranks that have not come to where the others wait."""
        culprit = late[0] if late else self.rank
        if late:
            cause = (
                f"it is {reports[culprit]['state']}, and rank {self.rank} has waited for it for {self.timeout:.0f} s"
            )
        else:
            places = ", ".join(f"rank {rank} in {where(known)}" for rank, known in enumerate(reports))
            cause = f"all ranks wait, in different calls ({places})"
        return Ending.of(reports[culprit] | {"rank": culprit, "cause": cause, "standstill": True})

    def _describe(self, reports: list[dict], late: list[int]) -> str:
        lines = [f"learnerkit: no rank has moved on for {self.timeout:.0f} s (errors.html#hang-report)"]
        states = {
            "silent": "does not answer: stopped, killed, or held up outside Python",
            "slow": "runs, but has not come to where the others wait",
            "waits": "waits for the others",
        }
        for rank, known in enumerate(reports):
            since = f"{known['since']:.0f} s since {where(known)}"
            lines.append(f"  rank {rank} {known['state']:<6}  {since}; {states[known['state']]}")
        names = ", ".join(f"rank {rank}" for rank in late)
        lines.append(f"not arrived: {names or 'none; the ranks wait in different calls'}")
        for rank in sorted(range(self.ranks), key=lambda rank: rank not in late):
            if reports[rank]["state"] != "silent":
                lines.append(f"rank {rank}'s stack:\n{reports[rank]['stack'].rstrip()}")
        return "\n".join(lines)


@contextmanager
def followed(learn: "Learner") -> Iterator[None]:
    """Write the heartbeat of a run on one process, for its launcher; a thread reads where the learner is."""
    heartbeat, over = Heartbeat.own(), threading.Event()
    before = learn.training, learn.epoch, learn.iter  # as the run before has left them, until the first pass begins

    def look() -> None:
        nonlocal before
        while not over.wait(LOOK_SECONDS):
            place = learn.training, learn.epoch, learn.iter
            if place != before:
                before = place
                heartbeat.phase(1 + learn.training)
                heartbeat.beat(time.monotonic(), learn.epoch, learn.iter, b"")

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        heartbeat.phase(0)
        heartbeat.close()


def _stack(frame: FrameType | None) -> str:
    """Return the last frames of a stack, and before them the last ones of the user's code."""
    lines = traceback.extract_stack(frame)
    users = [line for line in lines[:-6] if not line.filename.startswith(_LIBRARIES)]
    return "".join(traceback.format_list(users[-4:] + lines[-6:]))


_LIBRARIES = torch.__path__[0], os.path.dirname(os.path.dirname(__file__)), "<frozen"


def _machine() -> tuple[str, str]:
    """Return an id of this machine: containers may share its name, but do not see each other's processes."""
    processes = "/proc/self/ns/pid"
    return socket.gethostname(), os.readlink(processes) if os.path.exists(processes) else ""


_WAITS = *vars(collectives).values(), *vars(meeting).values(), Watch.all_skip, HostCopy.numbers
_WAITING = {f.__code__ for f in _WAITS if isfunction(f)}
"""The code of this package's functions in which a rank may wait for others."""
