"""The launchers of several machines (nodes): make an attempt to run the job together, and agree on how it ended.

A launcher on each machine starts and watches its own ranks. Before every attempt it finds the others (`rendezvous.py`),
and they exchange what they must know of each other (`node_info.py`). While the ranks run, each gives signs of life, and
the first failure on any node ends the attempt on all. A launcher that is alone needs none of this, and no torch.
"""

import json
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from learnerkit.launch.addresses import NodeError, family_of, own_address
from learnerkit.launch.environment import Topology
from learnerkit.launch.node_info import check_that_nodes_match, name_of, node_info, topology_of
from learnerkit.launch.rendezvous import Rendezvous
from learnerkit.launch.report import Outcome
from learnerkit.launch.supervise import Attempt
from learnerkit.processes.machine import LOOPBACK
from learnerkit.text import first_few, in_one_line

SIGN_SECONDS = 0.5  # between two signs of life
DOUBT_SECONDS, LOST_SECONDS = 3.0, 10.0  # without a sign of life, a node may be, and counts as, lost
LEAVE_SECONDS = 5.0  # the launcher that serves the store waits so long for the others to read how the attempt ended


class GroupAttempt(Attempt):
    """An attempt of several nodes; a thread gives signs of life, and looks for those of the others.

    Args:
        topology, listener: as for `Attempt`.
        names: the nodes, for messages.
        store: the store that the nodes share.
        rendezvous: where they have found each other.
    """

    def __init__(
        self, topology: Topology, listener: socket.socket | None, names: list[str], store: Any, rendezvous: Rendezvous
    ) -> None:
        super().__init__(topology, listener)
        self.names = names
        self.store = store
        self.rendezvous = rendezvous
        self._signs: dict[int, tuple[bytes, float]] = {}  # the last sign of life of each node, and when it came
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Give signs of life, and look for those of others, for an end, and for nodes that want to join."""
        node, count = self.topology.node, 0
        try:
            store = self.store.clone()  # The main thread uses the other client.
            while not self._stopped.wait(SIGN_SECONDS):
                count += 1
                store.set(f"alive {node}", str(count))
                if store.check(["end"]):
                    self.ended_elsewhere = Outcome(**json.loads(store.get("end")))
                    return
                silent = {n: self._silence(n, store) for n in range(self.topology.nodes) if n != node}
                self.may_have_lost_a_node = any(seconds > DOUBT_SECONDS for seconds in silent.values())
                for other, seconds in silent.items():
                    if seconds > LOST_SECONDS:
                        text = f"{self.names[other]} gives no sign of life for {LOST_SECONDS:.0f} s"
                        publish(Outcome("lost", other, text=text), store)
                if node == 0 and self.rendezvous.more_nodes_wait():
                    publish(Outcome("joined", text="another node wants to join: restarting with it"), store)
        except RuntimeError:  # torch raises it if the store does not answer
            if not self._stopped.is_set():
                self.ended_elsewhere = self._store_lost()

    def _silence(self, node: int, store: Any) -> float:
        """Return the seconds since a node's last sign of life; 0 if it has left."""
        now = time.monotonic()
        sign = store.get(f"alive {node}") if store.check([f"alive {node}"]) else b""
        if node not in self._signs or self._signs[node][0] != sign or sign == b"left":
            self._signs[node] = sign, now
        return now - self._signs[node][1]

    def _store_lost(self) -> Outcome:
        return Outcome("lost", text=f"lost the store at {self.rendezvous.endpoint}, and so {self.names[0]}")

    def agree_on_end(self, outcome: Outcome) -> Outcome:
        """Tell the other nodes how the attempt has ended here; wait until it is done on all, or has failed on one."""
        if self.ended_elsewhere is not None and self.ended_elsewhere.kind == "lost":
            return self.ended_elsewhere
        try:
            if outcome.kind != "done":
                return publish(replace(outcome, text=f"{self.names[outcome.node]}: {outcome.text}"), self.store)
            done = [f"done {node}" for node in range(self.topology.nodes)]
            self.store.set(done[self.topology.node], "")
            while self.ended_elsewhere is None:
                if self.store.check(done):
                    return publish(outcome, self.store)
                time.sleep(0.1)
        except RuntimeError:
            return self.ended_elsewhere or self._store_lost()
        return self.ended_elsewhere

    def let_others_go_on(self) -> None:
        if self.rendezvous.can_spare_one(self.topology.nodes):
            text = f"{self.names[self.topology.node]} was asked to end: restarting without it"
            with suppress(RuntimeError):
                publish(Outcome("left", self.topology.node, text=text), self.store)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(LOST_SECONDS)

    def leave(self) -> None:
        """Say that this node takes no part in further attempts; the node that serves the store waits for all others."""
        self.stop()
        left = [f"left {node}" for node in range(self.topology.nodes)]
        deadline = time.monotonic() + LEAVE_SECONDS
        with suppress(RuntimeError):  # torch raises it if the store has gone
            self.store.set(f"alive {self.topology.node}", "left")
            self.store.set(left[self.topology.node], "")
            while self.rendezvous.serves() and not self.store.check(left) and time.monotonic() < deadline:
                time.sleep(0.05)
        super().leave()


def publish(outcome: Outcome, store: Any) -> Outcome:
    """Publish how an attempt ends, unless another node has; return the outcome that was published first."""
    return Outcome(**json.loads(store.compare_set("end", "", json.dumps(vars(outcome)))))


def begin_alone(number: int, nproc: int, restarts: int, port: int = 0) -> Attempt:
    """Begin an attempt on this machine alone, with a store at `port`; 0: any free port."""
    listener = socket.create_server((LOOPBACK, port))
    return Attempt(Topology(nproc, listener.getsockname()[1], attempt=number, restarts=restarts), listener)


def begin_with_others(number: int, nproc: int, restarts: int, rendezvous: Rendezvous, command: list[str]) -> Attempt:
    """Wait for the other nodes, and begin an attempt with them.

    Args:
        number: which attempt it is, from 0.
        nproc: how many ranks this launcher starts.
        restarts: how often the ranks may be restarted.
        rendezvous: where the nodes find each other.
        command: what the ranks run, which must be the same on all nodes.

    Raises:
        NodeError: the others do not come in time, or do not fit together.
    """
    listener = None
    try:
        node, nodes, number, store = rendezvous.join(number)
        address = own_address(rendezvous.spec.address, rendezvous.spec.port)
        info = node_info(node, address, nproc, number, restarts, command)
        if node == 0:
            listener = socket.create_server((address, 0), family=family_of(address))
            info["port"] = listener.getsockname()[1]
        store.set(f"node {node}", json.dumps(info))

        def missing() -> list[int]:
            return [n for n in range(nodes) if not store.check([f"node {n}"])]

        rendezvous.wait(
            lambda: f"node{'s' * (len(missing()) > 1)} {first_few(missing(), n=8)} of {nodes}", lambda: not missing()
        )
        infos = [json.loads(store.get(f"node {n}")) for n in range(nodes)]
    except RuntimeError as error:  # torch raises it if the store has gone
        raise NodeError(f"lost the connection to {rendezvous.endpoint} ({in_one_line(error)})") from error
    check_that_nodes_match(infos)
    return GroupAttempt(topology_of(node, infos), listener, list(map(name_of, infos)), store, rendezvous)
