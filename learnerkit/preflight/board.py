"""Notes that the ranks of a run leave each other in a store, which needs no connections between them."""

import json
import os
import socket
import sys
import time
from datetime import timedelta
from typing import Any

from learnerkit.text import in_one_line

REACH_SECONDS = 25.0  # for a rank to reach the store


class Board:
    """The notes of all ranks, seen by one of them.

    Args:
        store: holds the notes.
        rank, size: of this rank, and how many there are.

    Attributes:
        seconds: how long to wait for all ranks to come, and for each thing that they do together.
    """

    seconds = 30.0

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size

    def gather(self, topic: str, note: Any, seconds: float | None = None) -> list:
        """On rank 0 the notes of all ranks, `None` for one that has not come in time; elsewhere nothing."""
        self.store.set(f"{topic}/{self.rank}", json.dumps(note))
        if self.rank != 0:
            return []
        deadline = time.monotonic() + (self.seconds if seconds is None else seconds)
        return [self.read(f"{topic}/{rank}", deadline - time.monotonic()) for rank in range(self.size)]

    def announce(self, topic: str, note: Any = None) -> Any:
        """Rank 0's note, on every rank."""
        if self.rank == 0:
            self.store.set(topic, json.dumps(note))
            return note
        found = self.read(topic, 2 * self.seconds)
        if found is None:  # rank 0 has given up and said why, or its process has ended
            sys.exit(1)
        return found

    def read(self, key: str, seconds: float = 0) -> Any:
        """A note, or `None` if it is not there in time."""
        deadline = time.monotonic() + seconds
        # Polled, because Python handles signals only between calls of torch.
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
    patience = timedelta(seconds=REACH_SECONDS)
    try:
        # multi_tenant: the process group of rank 0 will serve a store at the same port.
        store = TCPStore(address, int(port), size, serves, patience, wait_for_workers=False, multi_tenant=True)
        return Board(PrefixStore("learnerkit/doctor", store), rank, size)
    except Exception as error:
        sys.exit(
            f"learnerkit.doctor: rank {rank} ({socket.gethostname()}) could not reach the others at {address}:{port}:\n"
            f"    {in_one_line(error)}\n    rank 0's machine must have that address, rank 0 must run, and no firewall "
            f"may close the port;\n    from here, try: nc -vz {address} {port}"
        )
