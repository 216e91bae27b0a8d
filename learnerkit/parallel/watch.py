"""Messages and signs of life that the ranks of a run exchange beside the collectives.

A rank that waits in a collective cannot be told anything by another one, and waits for ever if a peer has failed or is
stuck. So every rank has two threads while it trains. One reads the messages that other ranks put into the store, and
can end the rank's waiting: on gloo by shutting down the connections between the ranks (gloo's own `abort` does
nothing), on NCCL by aborting the group. The other looks for a rank that has come to a standstill, with the help of a
small piece of memory that the ranks of a machine share and that can also be read when a process is stopped
(`Heartbeat`).
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from inspect import isfunction
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from learnerkit import world
from learnerkit.endings import Ending, where
from learnerkit.host_scalars import HostCopy
from learnerkit.launch.heartbeat import Heartbeat
from learnerkit.launch.ping import open_sockets
from learnerkit.torch_internals import abort_nccl, frame_of_thread, waits_for_ranks
from learnerkit.world import PeerError

GRACE_SECONDS = 0.5
"""How long after a failure the others may still run into the same error by themselves, and so report it as theirs."""

ANSWER_SECONDS = 3.0
"""How long a rank that does not answer is waited for before it counts as silent."""


class Watch:
    """Listens for messages of other ranks, and looks for a standstill; enter it for a run, on every rank.

    Args:
        name: of the run, the same on every rank and of this run alone.
        what: the call that this rank makes; the same on every rank.
        timeout: seconds after which a rank that waits without anything moving counts as stuck.

    Attributes:
        failure: what is known of the first failure of any rank.
        met: every rank has come to this run, if only for another call.
        called: before which vote another rank has left validation and waits for all to do so.
        passed: tells, in another thread, to which point of its batches this rank has come; points are numbered.
    """

    def __init__(self, name: str, what: str, timeout: float) -> None:
        self.what, self.timeout = what, timeout
        self.rank, self.ranks = world.rank(), world.world_size()
        self.store = dist.PrefixStore(f"learnerkit/watch/{name}", world.store())
        self.failure: Ending | None = None
        self.met, self.called = False, -1
        self.passed: Callable[[], int] = lambda: -1
        self._main = threading.get_ident()
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> "Watch":
        """Every rank must reach this.

        Raises:
            PeerError: some did not, or made another call.
        """
        calls = world.await_all(self.store, self.what, self.timeout)
        self.met = True
        if any(call != calls[0] for call in calls):
            raise world.not_together(", ".join(f"rank {rank} called {call}" for rank, call in enumerate(calls)))
        self.heartbeat = Heartbeat.own()
        here = _machine()
        everyone = world.all_gather((here, self.heartbeat.path, [pair for pair, _ in open_sockets()]))
        self.heartbeats = {self.rank: self.heartbeat}
        for rank, (machine, path, _) in enumerate(everyone):
            if machine != here or rank == self.rank:
                continue
            with suppress(OSError, ValueError):
                self.heartbeats[rank] = Heartbeat(path)
        others = {pair for rank, (_, _, pairs) in enumerate(everyone) if rank != self.rank for pair in pairs}
        store = world.store_port(self.store)
        # The connections whose other end another rank has; those of the store must stay.
        self._lines = {
            pair for pair in everyone[self.rank][2] if pair[::-1] in others and store not in (pair[0][1], pair[1][1])
        }
        self.heartbeat.live(waits=False)
        self.heartbeat.beat(time.monotonic(), 0, 0, b"before_fit/")
        self._inbox = self.store.clone()  # a client of its own: it waits while the main thread uses the other one
        for work in (self._listen, self._look):
            self._threads.append(threading.Thread(target=work, name=f"learnerkit{work.__name__}", daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self.failure is not None and self.failure.standstill and not self._store_answers():
            return  # this run is over anyway
        try:
            _put(self.store, self.rank, "stop")
            if self.failure is not None:
                self._leave_last()
        except RuntimeError:  # the store has gone with rank 0; then the listener has noticed, too
            pass
        for thread in self._threads:
            thread.join(timeout=ANSWER_SECONDS)
        # Now rather than when the garbage is collected, so that fits in a row do not gather descriptors.
        del self._inbox
        self.passed = lambda: -1
        for heartbeat in self.heartbeats.values():
            heartbeat.close()

    def _store_answers(self) -> bool:
        # It may be in the process of rank 0, which may be stopped.
        host = self.heartbeats.get(0)
        return self.rank == 0 or (host is not None and host.read()["alive"] < ANSWER_SECONDS)

    def _leave_last(self) -> None:
        # Rank 0, which may host the store: torch would print long messages on the others if it went first.
        left, end = self.store.add("left", 1), time.monotonic() + ANSWER_SECONDS
        while self.rank == 0 and left < self.ranks and time.monotonic() < end:
            time.sleep(0.01)
            left = self.store.add("left", 0)

    # Messages

    def tell_others(self, kind: str, about: Any = None) -> None:
        """Put a message into the inbox of every other rank."""
        for rank in range(self.ranks):
            if rank != self.rank:
                _put(self.store, rank, kind, about)

    def _listen(self) -> None:
        number = 0
        while True:
            number += 1
            try:
                self._inbox.wait([f"inbox/{self.rank}/{number}"], timedelta(days=7))
                kind, about = json.loads(self._inbox.get(f"inbox/{self.rank}/{number}"))
            except RuntimeError:  # the store has gone: so has rank 0, and the collectives will say so
                return
            if kind == "stop":
                return
            if kind == "failed":
                self._over.wait(GRACE_SECONDS)
                self.failure = self.failure or Ending.of(about)
                self.hang_up()
            elif kind == "leaving":
                self.called = about
            elif kind == "passed?":
                if about <= self.passed():
                    self._inbox.set(f"passed/{about}", "yes")
            elif kind == "report?":
                self._inbox.set(f"report/{self.rank}", json.dumps(self.report()))

    # A failure

    def fail(self, mine: Ending) -> None:
        """Report to the others that this rank has failed, and end their waits for it."""
        self.failure = mine
        try:
            self.failure = Ending.of(json.loads(self.store.compare_set("failure", "", json.dumps(vars(mine)))))
            if self.failure.rank == self.rank:
                self.tell_others("failed", vars(mine))
            end = time.monotonic() + GRACE_SECONDS
            failed = self.store.add("failed", 1)
            while failed < self.ranks and time.monotonic() < end:
                time.sleep(0.01)
                failed = self.store.add("failed", 0)
        except RuntimeError:  # the store has gone, with rank 0: the others will see that their connections have, too
            pass
        self.hang_up()

    def first_failure(self, patience: float) -> Ending | None:
        """Return the first failure, if one becomes known within `patience` seconds."""
        end = time.monotonic() + patience
        while self.failure is None and time.monotonic() < end:
            time.sleep(0.01)
        return self.failure

    def hang_up(self) -> None:
        """End every wait in a collective, of this process and of others for it. The process group is dead then."""
        world.group_is_dead = True
        for pair, line in open_sockets():
            if pair in self._lines:
                try:
                    line.shutdown(socket.SHUT_RDWR)
                except OSError:  # the peer was quicker
                    pass
        _abort_device_groups()

    # A question: has any rank come to a point of the batch that this one would leave out?

    def all_skip(self, point: int) -> bool:
        """Tell whether every rank leaves a point out; ranks that have come to it never call this."""
        skipping, pause, asked = self.store.add(f"skipped/{point}", 1), 0.0005, -1.0
        while skipping < self.ranks:
            if self.failure is not None:
                raise self.peer_error()
            if self.store.check([f"passed/{point}"]):
                return False
            now = time.monotonic()
            if now - asked > pause:  # again and again, as those who are not there yet do not answer
                self.tell_others("passed?", point)
                asked, pause = now, min(2 * pause, 0.25)
            time.sleep(0.0005)
            skipping = self.store.add(f"skipped/{point}", 0)
        return True

    # A standstill

    def _look(self) -> None:
        every = min(1.0, self.timeout / 4)
        began = time.monotonic()  # of the wait that the main thread is in
        while not self._over.wait(every):
            waits = _waits(frame_of_thread(self._main))
            self.heartbeat.live(waits)
            now = time.monotonic()
            if not waits or self.heartbeat.read()["since"] < now - began:  # it works, or has worked since
                began = now
            if self.failure is None and now - began > self.timeout:
                self._diagnose()
                return

    def report(self) -> dict:
        """Describe where this rank is, whether it waits for others, and its main thread's stack."""
        frame = frame_of_thread(self._main)
        stack = "".join(traceback.format_stack(frame)[-6:]) if frame else ""
        return self.heartbeat.read() | {"waits": _waits(frame), "stack": stack}

    def _diagnose(self) -> None:
        """Say who waits and who has not come, and end the run."""
        answers: dict[int, dict] = {}
        # In a thread of its own: if rank 0 is the one that is stopped, the store does not answer.
        self._aside(self._ask, answers)
        reports = {rank: heartbeat.read() | {"stack": ""} for rank, heartbeat in self.heartbeats.items()}
        reports = {rank: found for rank, found in reports.items() if found["alive"] < ANSWER_SECONDS}
        reports |= answers | {self.rank: self.report() | {"waits": True}}
        waiting = [rank for rank in reports if reports[rank]["waits"]]
        failure = self._standstill(reports)
        if min(waiting) == self.rank:  # one rank prints for all
            print(self._describe(reports), file=sys.stderr, flush=True)
            self._aside(self.tell_others, "failed", vars(failure))
        else:
            self.first_failure(2 * ANSWER_SECONDS)
        self.failure = self.failure or failure
        self.hang_up()
        if not self._over.wait(10):  # nothing could free the main thread, and the run must end
            print(f"[rank {self.rank}] could not be freed from its wait; leaving", file=sys.stderr, flush=True)
            os._exit(1)

    def _aside(self, work: Callable, *args: Any) -> None:
        """Do something with the store in a thread, wait for it a little, and give signs of life meanwhile."""
        thread = threading.Thread(target=work, args=args, daemon=True)
        thread.start()
        end = time.monotonic() + ANSWER_SECONDS
        while thread.is_alive() and time.monotonic() < end:
            thread.join(0.2)
            self.heartbeat.live(waits=True)

    def _standstill(self, reports: dict[int, dict]) -> Ending:
        """The facts that the ranks' errors will tell."""
        late = _late(self.ranks, reports)
        culprit = late[0] if late else self.rank
        if late:
            state = "is slow" if culprit in reports else "is silent"
            cause = f"it {state}, and rank {self.rank} has waited for it for {self.timeout:.0f} s"
        else:
            places = ", ".join(f"rank {rank} in {where(reports[rank])}" for rank in sorted(reports))
            cause = f"all ranks wait, in different calls ({places})"
        return Ending.of(self._known(culprit, reports) | {"rank": culprit, "cause": cause, "standstill": True})

    def _ask(self, answers: dict[int, dict]) -> None:
        store = self.store.clone()
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        for rank in others:
            _put(store, rank, "report?")
        end = time.monotonic() + ANSWER_SECONDS
        while len(answers) < len(others) and time.monotonic() < end:
            for rank in others:
                if rank not in answers and store.check([f"report/{rank}"]):
                    answers[rank] = json.loads(store.get(f"report/{rank}"))
            time.sleep(0.05)

    def _known(self, rank: int, reports: dict[int, dict]) -> dict:
        if rank in reports:
            return reports[rank]
        if rank in self.heartbeats:
            return self.heartbeats[rank].read()
        return {"event": "an unknown event", "callback": "", "epoch": -1, "step": -1, "since": float("nan")}

    def _describe(self, reports: dict[int, dict]) -> str:
        lines = [f"learnerkit: no rank has moved on for {self.timeout:.0f} s (errors.html#hang-report)"]
        late = _late(self.ranks, reports)
        for rank in range(self.ranks):
            known = self._known(rank, reports)
            state = "silent" if rank not in reports else "waits" if rank not in late else "slow"
            about = {
                "silent": "does not answer: stopped, killed, or held up outside Python",
                "slow": "runs, but has not come to where the others wait",
                "waits": "waits for the others",
            }[state]
            lines.append(f"  rank {rank} {state:<6}  {known['since']:.0f} s since {where(known)}; {about}")
        names = ", ".join(f"rank {r}" for r in late)
        lines.append(f"not arrived: {names or 'none; the ranks wait in different calls'}")
        for rank in sorted(reports, key=lambda r: r not in late):
            lines.append(f"rank {rank}'s stack:\n{reports[rank]['stack'].rstrip()}")
        return "\n".join(lines)

    def peer_error(self) -> PeerError:
        """The error of a rank that leaves because another one failed."""
        first = self.failure or Ending()
        verb = "came to a standstill" if first.standstill else "failed"
        return PeerError(
            f"rank {first.rank} {verb} in {where(vars(first))}: {first.cause}\n"
            f"(rank {self.rank} left with it, from {where(self.heartbeat.read())}; "
            "the next fit begins with rank 0's weights) (errors.html#peers)",
            standstill=first.standstill,
        )


def _late(ranks: int, reports: dict[int, dict]) -> list[int]:
    """The ranks that have not come to where the others wait."""
    return [rank for rank in range(ranks) if not reports.get(rank, {}).get("waits")]


def _machine() -> tuple[str, str]:
    """Identify this machine: containers may share its name, but then they do not see each other's processes."""
    processes = "/proc/self/ns/pid"
    return socket.gethostname(), os.readlink(processes) if os.path.exists(processes) else ""


def _put(store: dist.Store, rank: int, kind: str, about: Any = None) -> None:
    """Put a message into a rank's inbox."""
    number = store.add(f"inbox/{rank}/length", 1)
    store.set(f"inbox/{rank}/{number}", json.dumps([kind, about]))


_WAITING = {f.__code__ for f in (*vars(world).values(), Watch.all_skip, HostCopy.numbers) if isfunction(f)}
"""The code of this package's functions in which a rank may wait for others."""


def _waits(frame: FrameType | None) -> bool:
    """Tell whether a thread waits for other ranks."""
    return waits_for_ranks(frame, _WAITING)


def _abort_device_groups() -> None:
    for device in dist.get_backend_config().split(","):
        kind, _, backend = device.partition(":")
        if backend == "nccl" and kind in ("cuda", "") and torch.cuda.is_available():
            abort_nccl()
