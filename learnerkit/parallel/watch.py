"""Messages and signs of life that the ranks of a run exchange beside the collectives.

A rank that waits in a collective cannot be told anything by another one, and waits for ever if a peer has failed or is
stuck. So every rank has two threads while it trains. One reads the messages that other ranks put into the store, and
can end the rank's waiting: on gloo by shutting down the connections between the ranks (gloo's own `abort` does
nothing), on NCCL by aborting the group. The other looks for a rank that has come to a standstill, with the help of a
small piece of memory that the ranks of a machine share and that can also be read when a process is stopped
(`Heartbeat`).
"""

import json
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from inspect import isfunction
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from learnerkit import distributed
from learnerkit.distributed import PeerError, collectives, meeting
from learnerkit.endings import Ending, where
from learnerkit.host_scalars import HostCopy
from learnerkit.processes.heartbeat import Heartbeat
from learnerkit.processes.sockets import open_sockets
from learnerkit.torch_internals import abort_nccl, frame_of_thread, waits_for_ranks

GRACE_SECONDS = 0.5
"""How long after a failure the others may still run into the same error by themselves, and so report it as theirs."""

ANSWER_SECONDS = 3.0
"""How long a rank that does not answer is waited for before it counts as silent."""


_runs = [0]  # how many all ranks have met for: every rank makes the same


class Watch:
    """Listens for messages of other ranks, and looks for a standstill; enter it for a run, on every rank.

    Args:
        what: the call that this rank makes; the same on every rank.
        timeout: seconds after which a rank that waits without anything moving counts as stuck.

    Attributes:
        failure: what is known of the first failure of any rank.
        called: before which vote another rank has left validation and waits for all to do so.
        passed: tells, in another thread, to which point of its batches this rank has come; points are numbered.
    """

    def __init__(self, what: str, timeout: float) -> None:
        self.what, self.timeout = what, timeout
        self.rank, self.ranks = distributed.rank(), distributed.world_size()
        self.others = set(range(self.ranks)) - {self.rank}
        self.store: dist.Store = dist.PrefixStore(f"learnerkit/watch/run-{_runs[0]}", distributed.store())
        self.failure: Ending | None = None
        self.called = -1
        self.passed: Callable[[], int] = lambda: -1
        self.heartbeats: dict[int, Heartbeat] = {}  # of the ranks of this machine
        self._main = threading.get_ident()
        self._over = threading.Event()

    def __enter__(self) -> "Watch":
        """Every rank must reach this.

        Raises:
            PeerError: some did not, or made another call.
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
        # The connections whose other end another rank has; those of the store must stay.
        self._lines = {pair for pair in mine if pair[::-1] in theirs and port not in (pair[0][1], pair[1][1])}
        self.heartbeat.live(waits=False)
        self.heartbeat.beat(time.monotonic(), 0, 0, b"before_fit/")
        # Clients of its own, as one that waits serves no other thread: the listener's does, and so may the user's.
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
        self.heartbeat.close()

    def _leave(self) -> None:
        with suppress(RuntimeError):  # the store has gone with rank 0; then the listener has noticed, too
            self.tell("stop", ranks=[self.rank])
            if self.failure is not None:
                # Rank 0, which may host the store, last: torch would print long messages on the others.
                self._meet("left", 0 if self.rank else ANSWER_SECONDS)

    def _meet(self, where: str, patience: float) -> None:
        """Wait until all ranks have come here, but not longer than so many seconds."""
        end, come = time.monotonic() + patience, 1
        while self.store.add(where, come) < self.ranks and time.monotonic() < end:
            come = 0  # this rank counts once
            time.sleep(0.01)

    def _aside(self, work: Callable, *args: Any) -> Any:
        """Do something with the store in a thread, with signs of life meanwhile, and return what it returns.

        It is `None` if the store does not answer soon: the process that hosts it, often that of rank 0, may be stopped.
        """
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(work(*args)), daemon=True)
        thread.start()
        for _ in range(round(6 * ANSWER_SECONDS)):  # a little longer than the work waits by itself
            thread.join(0.2)
            if found:
                return found[0]
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
            except RuntimeError:  # the store has gone: so has rank 0, and the collectives will say so
                return
            match kind:
                case "stop":
                    return
                case "failed":
                    self._over.wait(GRACE_SECONDS)
                    self.hang_up(Ending.of(about))
                case "leaving":
                    self.called = about
                case "report?":
                    self._inbox.set(f"{about}/{self.rank}", json.dumps(self.report()))

    def report(self) -> dict:
        """Describe where this rank is, whether it waits for others, and its main thread's stack."""
        frame = frame_of_thread(self._main)
        return self.heartbeat.read() | {
            "alive": 0.0, "waits": waits_for_ranks(frame, _WAITING), "passed": self.passed(),
            "stack": "".join(traceback.format_stack(frame, 6)),
        }  # fmt: skip

    def _ask(self) -> dict[int, dict]:
        """Collect the reports of the other ranks, as far as they answer soon."""
        question = f"report/{self.rank}/{time.monotonic_ns()}"
        self.tell("report?", question)
        keys = {rank: f"{question}/{rank}" for rank in self.others}
        with suppress(dist.DistStoreError):  # the time is over
            self.store.wait(list(keys.values()), timedelta(seconds=ANSWER_SECONDS))
        return {rank: json.loads(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}

    # A failure

    def fail(self, mine: Ending) -> None:
        """Report to the others that this rank has failed, and end their waits for it."""
        with suppress(RuntimeError):  # the store has gone with rank 0: the others see that their connections have, too
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
        """End every wait in a collective, of this process and of others for it. The process group is dead then.

        Args:
            failure: the reason, if no earlier one is known.
        """
        self.failure = self.failure or failure
        distributed.give_group_up()
        for pair, line in open_sockets():
            if pair in self._lines:
                with suppress(OSError):  # the peer was quicker
                    line.shutdown(socket.SHUT_RDWR)
        if "nccl" in dist.get_backend_config() and torch.cuda.is_available():
            abort_nccl()

    def check(self) -> None:
        """Leave if another rank has failed.

        Raises:
            PeerError: it has.
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

    # A question: has any rank come to a point of the batch that this one would leave out?

    def all_skip(self, point: int) -> bool:
        """Tell whether every rank leaves a point out; ranks that have come to it never call this."""
        skipping = self.store.add(f"skipped/{point}", 1)
        while skipping < self.ranks:
            answers = self._ask()  # again and again, as some may not be there yet
            self.check()
            skipping = self.store.add(f"skipped/{point}", 0)  # after the answers: once all skip it, they go on
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
            stands = waits and self.heartbeat.read()["since"] > every  # else it works, or has worked since
            waited = waited + every if stands else 0.0
            if waited > self.timeout and self.failure is None:
                self._diagnose()
                return

    def _diagnose(self) -> None:
        """Say who waits and who has not come, and end the run."""
        found = self._survey()
        states = [known["state"] for known in found]
        late = [rank for rank, state in enumerate(states) if state != "waits"]
        failure = self._standstill(found, late)
        if self.rank == states.index("waits"):  # one rank prints for all
            print(self._describe(found, late), file=sys.stderr, flush=True)
            self._aside(self.tell, "failed", vars(failure))
        else:
            self.first_failure(2 * ANSWER_SECONDS)
        self.hang_up(failure)
        if not self._over.wait(10):  # nothing could free the main thread, and the run must end
            print(f"[rank {self.rank}] could not be freed from its wait; leaving", file=sys.stderr, flush=True)
            os._exit(1)

    def _survey(self) -> list[dict]:
        """Find where each rank is, and whether it waits, is slow or silent."""
        answers = self._aside(self._ask) or {}
        answers[self.rank] = self.report() | {"waits": True}
        unknown = vars(Ending(event="an unknown event")) | {"since": math.nan, "alive": math.inf, "stack": ""}
        found = []
        for rank in range(self.ranks):
            seen = self.heartbeats[rank].read() if rank in self.heartbeats else {}
            known = unknown | seen | answers.get(rank, {})
            state = "silent" if known["alive"] > ANSWER_SECONDS else "waits" if known["waits"] else "slow"
            found.append(known | {"state": state})
        return found

    def _standstill(self, found: list[dict], late: list[int]) -> Ending:
        """The facts that the ranks' errors will tell; `late` are those that have not come to where the others wait."""
        culprit = late[0] if late else self.rank
        if late:
            state = found[culprit]["state"]
            cause = f"it is {state}, and rank {self.rank} has waited for it for {self.timeout:.0f} s"
        else:
            places = ", ".join(f"rank {rank} in {where(known)}" for rank, known in enumerate(found))
            cause = f"all ranks wait, in different calls ({places})"
        return Ending.of(found[culprit] | {"rank": culprit, "cause": cause, "standstill": True})

    def _describe(self, found: list[dict], late: list[int]) -> str:
        lines = [f"learnerkit: no rank has moved on for {self.timeout:.0f} s (errors.html#hang-report)"]
        states = {
            "silent": "does not answer: stopped, killed, or held up outside Python",
            "slow": "runs, but has not come to where the others wait",
            "waits": "waits for the others",
        }
        for rank, known in enumerate(found):
            since = f"{known['since']:.0f} s since {where(known)}"
            lines.append(f"  rank {rank} {known['state']:<6}  {since}; {states[known['state']]}")
        names = ", ".join(f"rank {rank}" for rank in late)
        lines.append(f"not arrived: {names or 'none; the ranks wait in different calls'}")
        for rank in sorted(range(self.ranks), key=lambda rank: rank not in late):
            if found[rank]["state"] != "silent":
                lines.append(f"rank {rank}'s stack:\n{found[rank]['stack'].rstrip()}")
        return "\n".join(lines)


def _machine() -> tuple[str, str]:
    """Identify this machine: containers may share its name, but then they do not see each other's processes."""
    processes = "/proc/self/ns/pid"
    return socket.gethostname(), os.readlink(processes) if os.path.exists(processes) else ""


_WAITS = *vars(collectives).values(), *vars(meeting).values(), Watch.all_skip, HostCopy.numbers
_WAITING = {f.__code__ for f in _WAITS if isfunction(f)}
"""The code of this package's functions in which a rank may wait for others."""
