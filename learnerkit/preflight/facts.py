"""The facts that the ranks of a run collect, their exchange through a store, and the words for findings."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from learnerkit.preflight.report import Finding, notable
from learnerkit.text import first_few, in_one_line

REACH_SECONDS = 25.0  # the time for a rank to reach the store

Facts = dict[str, Any]
"""The facts of one rank: 'rank', 'host', 'machine', and by topic what it has seen, or its 'error'."""

Ranks = list[Facts]
"""The facts of some ranks, or of all of them."""

Judge = Callable[[Ranks], list[Finding]]
"""Concludes from the facts of all ranks what to report about a topic."""


@dataclass(eq=False)
class Board:
    """Notes that the ranks leave each other in a store, which needs no connections between them.

    Args:
        store: holds the notes.
        rank, size: this rank, and the number of ranks.

    Attributes:
        seconds: how long to wait for all ranks to come, and for each thing that they do together.
    """

    seconds = 30.0

    store: Any
    rank: int
    size: int

    def gather(self, topic: str, note: Any, seconds: float | None = None) -> list:
        """Publish this rank's note; on rank 0 return the notes of all ranks, `None` for those that come too late."""
        self.store.set(f"{topic}/{self.rank}", json.dumps(note))
        if self.rank != 0:
            return []
        deadline = time.monotonic() + (self.seconds if seconds is None else seconds)
        return [self.read(f"{topic}/{rank}", deadline - time.monotonic()) for rank in range(self.size)]

    def announce(self, topic: str, note: Any = None) -> Any:
        """Publish rank 0's note in the store, and return it on every rank."""
        if self.rank == 0:
            self.store.set(topic, json.dumps(note))
            return note
        answer = self.read(topic, 2 * self.seconds)
        if answer is None:  # rank 0 has given up and said why, or its process has ended
            sys.exit(1)
        return answer

    def read(self, key: str, seconds: float = 0) -> Any:
        """Return a note, or `None` if it does not come in time."""
        deadline = time.monotonic() + seconds
        # The store is polled, because Python handles signals only between calls of torch.
        while not self.store.check([key]):
            if time.monotonic() >= deadline or (self.rank != 0 and self.store.check(["end"])):
                return None
            time.sleep(0.005)
        return json.loads(self.store.get(key))


def open_board(rank: int, size: int) -> Board:
    """Connect to the store of the run; this waits for no other rank."""
    from torch.distributed import HashStore, PrefixStore, TCPStore

    if size == 1:
        return Board(HashStore(), rank, size)
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        # multi_tenant: the process group of rank 0 will serve a store at the same port.
        store = TCPStore(
            address, int(port), size, serves, timedelta(seconds=REACH_SECONDS), wait_for_workers=False,
            multi_tenant=True,
        )  # fmt: skip
        return Board(PrefixStore("learnerkit/doctor", store), rank, size)
    except Exception as error:
        sys.exit(
            f"learnerkit.doctor: rank {rank} ({socket.gethostname()}) could not reach the others at {address}:{port}:\n"
            f"    {in_one_line(error)}\n    rank 0's machine must have that address, rank 0 must run, and no firewall "
            f"may close the port;\n    from here, try: nc -vz {address} {port}\n"
            "    (errors.html#launch-meet)"
        )


# Words


def by_machine(everyone: Ranks) -> list[Ranks]:
    """Group the ranks by their machines."""
    machines: dict[str, Ranks] = {}
    for facts in everyone:
        machines.setdefault(facts["machine"], []).append(facts)
    return list(machines.values())


def hosts(ranks: Ranks) -> str:
    """Return the names of the machines of some ranks."""
    return first_few(group[0]["host"] for group in by_machine(ranks))


def places(ranks: Ranks) -> str:
    """Name some ranks and their machines."""
    return f"rank{'s' * (len(ranks) > 1)} {first_few(f['rank'] for f in ranks)} ({hosts(ranks)})"


def per_machine(judge: Callable[[Ranks, Ranks], Finding]) -> Judge:
    """Turn a judge of one machine's ranks, which gets all ranks as its second argument, into a judge of all machines.

    Where the machines differ, it names those with a hint or a problem; if all are fine, it shows the first one.
    """

    def judge_all(everyone: Ranks) -> list[Finding]:
        by_finding: dict[Finding, Ranks] = {}
        for group in by_machine(everyone):
            by_finding.setdefault(judge(group, everyone), []).append(group[0])
        if len(by_finding) == 1:
            return list(by_finding)
        return [
            finding._replace(text=f"{finding.text} (on {hosts(by_finding[finding])})")
            for finding in notable(by_finding)
        ]

    return judge_all
