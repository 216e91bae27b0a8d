"""The rendezvous of the launchers of several machines, in a torch store at an address that all are given.

Either the nodes know their numbers, and the launcher of node 0 serves the store; or torch's elastic rendezvous numbers
them, and nodes may join and leave. Whoever reaches the store can read and change what is in it, and torch's rendezvous
unpickles it: like all of torch.distributed, this is for networks whose machines trust each other.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from learnerkit.launch.addresses import NodeError, family_of, is_own, own_address, resolves
from learnerkit.processes.sockets import ANSWER_SECONDS, NotAStore, store_answers
from learnerkit.text import in_one_line

STORE_SECONDS = 10.0  # the time for an answer of the store
MORE_NODES_SECONDS = 10  # elastic: how long to wait for more nodes when there are enough


@dataclass(frozen=True)
class Static:
    """Nodes that know their numbers, and the address of node 0."""

    node: int
    nodes: int
    address: str
    port: int


@dataclass(frozen=True)
class Elastic:
    """Nodes that meet at an address, from `least` to `most`; the machine that has the address serves the store."""

    least: int
    most: int
    address: str
    port: int


class Rendezvous:
    """The place in which nodes find each other before every attempt.

    Args:
        spec: how they find each other.
        patience: seconds to wait for other nodes.
        say: how to tell the user something.
    """

    def __init__(self, spec: Static | Elastic, patience: float, say: Callable[[str], None]) -> None:
        self.spec = spec
        self.patience = patience
        self.say = say
        self.endpoint = f"{spec.address}:{spec.port}"
        self._store: Any = None  # static: of all attempts
        self._handler: Any = None  # elastic: torch's
        self._deadline = 0.0
        self._stays_open = False

    def join(self, attempt: int) -> tuple[int, int, int, Any]:
        """Wait until it is known which nodes take part in the next attempt.

        Returns:
            The number of this node, of how many, the number of the attempt, and the store that they share in it.

        Raises:
            NodeError: the others do not come in time.
        """
        self._deadline = time.monotonic() + self.patience
        spec = self.spec
        self.wait(lambda: f"an address for the name {spec.address!r}", lambda: resolves(spec.address))
        return self._join_static(spec, attempt) if isinstance(spec, Static) else self._join_elastic(spec, attempt)

    def _join_static(self, spec: Static, attempt: int) -> tuple[int, int, int, Any]:
        if self._store is None:
            self._store = self._serve() if self.serves() else self._connect()
        from torch.distributed import PrefixStore  # `_connect` must look before this import.

        def current() -> int:
            return int(self._store.get("attempt")) if self._store.check(["attempt"]) else -1

        launcher = f"{socket.gethostname()} {os.getpid()}"  # tells two apart that were given the same number
        what = f"node 0 at {self.endpoint}"
        while True:
            # Node 0 says which attempt it is, as a node that was lost, and is restarted, does not know.
            if self.serves():
                self._store.set("attempt", str(attempt))
            self.wait(lambda: what, lambda: current() >= attempt)  # noqa: B023 - it is over before the next one
            attempt = current()
            store = PrefixStore(f"attempt {attempt}", self._store)
            if store.compare_set(f"launcher {spec.node}", "", launcher).decode() == launcher:
                return spec.node, spec.nodes, attempt, store
            attempt += 1
            what = (
                f"attempt {attempt + 1} (this one has a node {spec.node} already: is there another launcher with "
                f"--node-rank {spec.node}?)"
            )

    def _serve(self) -> Any:
        from learnerkit.torch_internals import host_store  # It imports torch, which only this node needs now.

        try:
            address = own_address(self.spec.address, self.spec.port)
            listener = socket.create_server((address, self.spec.port), family=family_of(address))
        except OSError as error:
            raise NodeError(
                f"node 0 cannot listen at {self.endpoint} ({error.strerror or error}); give an address of this machine "
                "as --master-addr, and a free --master-port"
            ) from error
        return host_store(listener, seconds=STORE_SECONDS)

    def _connect(self) -> Any:
        self._store_answers()  # An error is told at once, before torch is imported, which takes seconds.
        from torch.distributed import TCPStore

        self.wait(lambda: f"node 0 at {self.endpoint}", self._store_answers)
        return TCPStore(self.spec.address, self.spec.port, timeout=timedelta(seconds=STORE_SECONDS))

    def _join_elastic(self, spec: Elastic, attempt: int) -> tuple[int, int, int, Any]:
        if self._handler is None:
            self._store_answers()  # An error is told before torch is imported.
        from torch.distributed.elastic.rendezvous.api import RendezvousError

        # A store shared over all rounds would give a later attempt the addresses of an earlier one's ranks.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        found_all = threading.Event()
        try:
            if self._handler is None:
                self._handler = self._find_or_serve(spec)
            threading.Thread(target=self._remind, args=(spec, found_all), daemon=True).start()
            result = self._handler.next_rendezvous()
        except RendezvousError as error:
            raise NodeError(f"the nodes did not meet at {self.endpoint} ({in_one_line(error)})") from error
        finally:
            found_all.set()
        return result.rank, result.world_size, attempt, result.store

    def _remind(self, spec: Elastic, found_all: threading.Event) -> None:
        """Say what is waited for after three seconds, and then ever less often."""
        wanted = f"{spec.least} to {spec.most}" if spec.least < spec.most else f"{spec.least}"
        pause = 3.0
        while not found_all.wait(pause):
            self.say(f"waiting at {self.endpoint} for {wanted} nodes")
            pause *= 2

    def _find_or_serve(self, spec: Elastic) -> Any:
        from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters, registry

        def handler(serves: bool) -> Any:
            return registry.get_rendezvous_handler(
                RendezvousParameters(
                    "c10d", self.endpoint, "learnerkit", spec.least, spec.most,
                    local_addr=own_address(spec.address, spec.port), is_host=serves, join_timeout=self.patience,
                    last_call_timeout=MORE_NODES_SECONDS, keep_alive_interval=2,
                )
            )  # fmt: skip

        if self.serves():
            with suppress(RendezvousConnectionError):  # another launcher of this machine serves already
                return handler(serves=True)
        self.wait(lambda: f"the rendezvous at {self.endpoint}", self._store_answers)
        return handler(serves=False)

    def serves(self) -> bool:
        """Tell whether the store is served here: by node 0, or on the machine that has the address."""
        return self.spec.node == 0 if isinstance(self.spec, Static) else is_own(self.spec.address)

    def more_nodes_wait(self) -> bool:
        """Tell whether further nodes want to join."""
        return self._handler is not None and self._handler.num_nodes_waiting() > 0

    def can_spare_one(self, nodes: int) -> bool:
        """Tell whether the others can go on without this node; then it does not close the rendezvous when it leaves."""
        self._stays_open = isinstance(self.spec, Elastic) and nodes > self.spec.least and not self.serves()
        return self._stays_open

    def leave(self) -> None:
        """Leave the rendezvous for good."""
        if self._handler is not None and not self._stays_open:
            self._handler.shutdown()

    def wait(self, what: Callable[[], str], arrived: Callable[[], bool]) -> None:
        """Wait until `arrived` returns true, and say from time to time what is waited for.

        Raises:
            NodeError: it does not come in time.
        """
        began = time.monotonic()
        remind = began + 3
        while not arrived():
            now = time.monotonic()
            if now > began + self.patience:
                raise NodeError(
                    f"{what()} did not come within {self.patience:.0f} s (--timeout); is the launcher running there, "
                    "with the same address and port, and does a firewall let it through?"
                )
            if now > remind:
                self.say(f"waiting for {what()} ({now - began:.0f} s)")
                remind = now + max(10, now - began)
            time.sleep(0.1)

    def _store_answers(self) -> bool:
        """Tell whether a store answers at the endpoint.

        Raises:
            NodeError: something else listens there.
        """
        left = self._deadline - time.monotonic()
        try:
            return store_answers(self.spec.address, self.spec.port, min(ANSWER_SECONDS, left))
        except NotAStore as error:
            expected, advice = "a launcher", "give an --rdzv-endpoint with a port that no other program uses there"
            if isinstance(self.spec, Static):
                expected = "the launcher of node 0"
                advice = "give the --master-addr of node 0, and a --master-port that no other program uses there"
            raise NodeError(
                f"what listens at {self.endpoint} does not answer like {expected} ({error}); {advice}"
            ) from error
