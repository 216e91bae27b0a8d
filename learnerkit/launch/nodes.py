"""How the launchers of several machines find each other, and tell each other how it goes; one launcher is alone.

A launcher on each machine (node) starts and watches its own ranks. Here they meet before every attempt, in a store of
torch's: at a static address, where the launcher of node 0 serves it, or by torch's elastic rendezvous, which nodes may
join and leave. Each puts its card there (who it is, how many ranks it starts, which versions and which script it has);
from the cards each works out its place. While the ranks run, each gives signs of life, and the first failure of any
node ends the attempt on all.

Nothing of torch is imported for one machine. Whoever reaches the store can read and change what is in it, and torch's
rendezvous unpickles it: like all of torch.distributed, this is for networks whose machines trust each other.
"""

import hashlib
import json
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from learnerkit.launch.addresses import NodeError, family_of, interface_of, is_own, own_address
from learnerkit.launch.environment import LOOPBACK, Place
from learnerkit.launch.ping import ANSWER_SECONDS, NotAStore, store_answers

BEAT_SECONDS = 0.5
DOUBT_SECONDS, LOST_SECONDS = 3.0, 10.0  # without a sign of life, a node may be, and counts as, lost
LEAVE_SECONDS = 5.0  # node 0 waits so long for the others to read how it ended
LAST_CALL_SECONDS = 10  # elastic: how long more nodes are waited for when there are enough


@dataclass(frozen=True)
class Static:
    """Nodes that know their numbers, and where node 0 is."""

    node: int
    nodes: int
    address: str
    port: int


@dataclass(frozen=True)
class Elastic:
    """Nodes that meet at an address, at least and at most so many; the machine that has the address serves."""

    least: int
    most: int
    address: str
    port: int


@dataclass(frozen=True)
class End:
    """How an attempt ended for all nodes.

    Args:
        kind: 'done', 'failed', 'stopped' (a launcher got a signal), 'lost' (a node is), 'joined' (a node wants to be).
        node: whose news it is.
        code: the exit code of the failure.
        text: what to tell the user.
    """

    kind: str
    node: int = 0
    code: int = 1
    text: str = ""


class SingleNode:
    """One launcher, one machine: the ranks meet on loopback, in a store of their own for every attempt.

    Its socket is bound here and handed to rank 0, so that nobody can take the port in between.

    Args:
        nproc: how many ranks this launcher starts.
        restarts: how often the ranks may be started anew.
        port: where the store listens; 0: the kernel picks a free one.

    Attributes:
        listener: the socket, in the launcher that starts rank 0.
    """

    def __init__(self, nproc: int, restarts: int = 0, port: int = 0) -> None:
        self.nproc, self.restarts, self.port = nproc, restarts, port
        self.listener: socket.socket | None = None

    def meet(self, attempt: int) -> Place:
        """The place of this launcher's ranks in the next attempt."""
        self.listener = socket.create_server((LOOPBACK, self.port))
        return Place(self.nproc, self.listener.getsockname()[1], attempt=attempt, restarts=self.restarts)

    def close_listener(self) -> None:
        """Let go of the socket, once rank 0 has it."""
        if self.listener is not None:
            self.listener.close()
            self.listener = None

    def news(self) -> End | None:
        """What has ended the attempt on another node."""
        return None

    def in_doubt(self) -> bool:
        """Whether a node may be lost: there is no sign of life of it, but not for long enough to say so."""
        return False

    def tell(self, end: End) -> End:
        """Say how the attempt has ended here; how it has ended for all."""
        return end

    def close(self) -> None:
        """Leave the others."""
        self.close_listener()


class NodeGroup(SingleNode):
    """A launcher among those of other machines; `meet` and `tell` wait for them.

    Args:
        nproc, restarts: as above.
        spec: how the nodes meet.
        command: what the ranks run, which must be the same on all nodes.
        patience: seconds to wait for other nodes.
        say: how to tell the user something.
    """

    def __init__(
        self,
        nproc: int,
        restarts: int,
        spec: Static | Elastic,
        command: list[str],
        patience: float,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(nproc, restarts)
        self.spec, self.command, self.patience, self.say = spec, command, patience, say
        self.place: Place | None = None
        self.cards: list[dict] = []
        self._base: Any = None  # static: the store of the whole run
        self._rendezvous: Any = None  # elastic: torch's
        self._store: Any = None  # of this attempt
        self._news: End | None = None
        self._doubt = False
        self._began = 0.0  # when this meeting began, on the monotonic clock
        self._quiet = threading.Event()  # ends the thread that gives signs of life
        self._beating: threading.Thread | None = None

    # Meeting

    def meet(self, attempt: int) -> Place:
        """Wait for the other nodes, and work out this one's place.

        Raises:
            NodeError: they do not come in time, or do not fit together.
        """
        self._stop_beating()
        self._news, self._doubt, self._began = None, False, time.monotonic()
        join = self._join_static if isinstance(self.spec, Static) else self._join_elastic
        try:
            self.cards, node = join(attempt)
        except RuntimeError as error:  # torch's, of a store that has gone
            raise NodeError(f"lost the connection to {self._meeting_point()} ({_first_line(error)})") from error
        check_cards(self.cards)
        self.place = place_of(node, self.cards, self.restarts)
        self._beating = threading.Thread(target=self._beat, args=(self.place, self._store), daemon=True)
        self._beating.start()
        return self.place

    def _meeting_point(self) -> str:
        return f"{self.spec.address}:{self.spec.port}"

    def _join_static(self, attempt: int) -> tuple[list[dict], int]:
        node, nodes = self.spec.node, self.spec.nodes
        if self._base is None:
            self._base = self._serve() if node == 0 else self._connect()
        base = self._base
        from torch.distributed import PrefixStore  # not before `_connect` has looked

        def current() -> int:
            return int(base.get("attempt")) if base.check(["attempt"]) else -1

        while True:
            # Node 0 says which attempt it is, as a node that was lost, and is started again, does not know.
            if node == 0:
                base.set("attempt", str(attempt))
            self._wait(self._node0(), lambda: current() >= attempt)  # noqa: B023 - it is over before the next one
            attempt = current()
            self._store = PrefixStore(f"attempt {attempt}", base)
            card = self._card(node, attempt)
            if self._store.compare_set(f"card {node}", "", card).decode() == card:
                return self._all_cards(nodes), node
            attempt += 1
            self._wait(
                f"attempt {attempt + 1} (this one has a node {node} already: is there another launcher with "
                f"--node-rank {node}?)",
                lambda: current() >= attempt,  # noqa: B023
            )

    def _node0(self) -> str:
        return f"node 0 at {self._meeting_point()}"

    def _serve(self) -> Any:
        from torch.distributed import TCPStore

        spec = self.spec
        try:
            address = own_address(spec.address, spec.port)
            listener = socket.create_server((address, spec.port), family=family_of(address))
        except OSError as error:
            raise NodeError(
                f"node 0 cannot listen at {self._meeting_point()} ({error.strerror or error}); give an address of "
                "this machine as --master-addr, and a free --master-port"
            ) from error
        # The store closes the descriptor.
        return TCPStore(
            spec.address, spec.port, is_master=True, master_listen_fd=listener.detach(), wait_for_workers=False,
            timeout=timedelta(seconds=LOST_SECONDS),
        )  # fmt: skip

    def _connect(self) -> Any:
        self._store_answers()  # an error is told at once, before torch is imported, which takes seconds
        from torch.distributed import TCPStore

        self._wait(self._node0(), self._store_answers)
        return TCPStore(self.spec.address, self.spec.port, timeout=timedelta(seconds=LOST_SECONDS))

    def _join_elastic(self, attempt: int) -> tuple[list[dict], int]:
        if self._rendezvous is None:
            self._store_answers()  # here, too, before torch is imported
        from torch.distributed.elastic.rendezvous.api import RendezvousError

        spec = self.spec
        some = f"{spec.least} to {spec.most}" if spec.least < spec.most else f"{spec.least}"
        # A store shared over all rounds would give a later attempt the addresses of an earlier one's ranks.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        try:
            if self._rendezvous is None:
                self._rendezvous = self._make_rendezvous()
            with reminded(lambda: self.say(f"waiting at {self._meeting_point()} for {some} nodes")):
                found = self._rendezvous.next_rendezvous()
        except RendezvousError as error:
            raise NodeError(
                f"the nodes did not meet at {self._meeting_point()} ({type(error).__name__} {_first_line(error)})"
            ) from error
        self._store = found.store
        self._store.set(f"card {found.rank}", self._card(found.rank, attempt))
        return self._all_cards(found.world_size), found.rank

    def _make_rendezvous(self) -> Any:
        from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters, registry

        spec = self.spec

        def handler(serves: bool) -> Any:
            return registry.get_rendezvous_handler(
                RendezvousParameters(
                    "c10d", self._meeting_point(), "learnerkit", spec.least, spec.most,
                    local_addr=own_address(spec.address, spec.port), is_host=serves, join_timeout=self.patience,
                    last_call_timeout=LAST_CALL_SECONDS, keep_alive_interval=2,
                )
            )  # fmt: skip

        if is_own(spec.address):
            try:
                return handler(serves=True)
            except RendezvousConnectionError:  # another launcher of this machine serves already
                pass
        self._wait(f"the rendezvous at {self._meeting_point()}", self._store_answers)
        return handler(serves=False)

    def _store_answers(self) -> bool:
        """Whether a store answers where the nodes meet.

        Raises:
            NodeError: something else listens there.
        """
        left = self._began + self.patience - time.monotonic()
        try:
            return store_answers(self.spec.address, self.spec.port, min(ANSWER_SECONDS, left))
        except NotAStore as error:
            expected, advice = "a launcher", "give an --rdzv-endpoint with a port that no other program uses there"
            if isinstance(self.spec, Static):
                expected = "the launcher of node 0"
                advice = "give the --master-addr of node 0, and a --master-port that no other program uses there"
            raise NodeError(
                f"what listens at {self._meeting_point()} does not answer like {expected} ({error}); {advice}"
            ) from error

    def _card(self, node: int, attempt: int) -> str:
        """What the other nodes are to know of this one."""
        address = own_address(self.spec.address, self.spec.port)
        card = {
            "node": node, "host": socket.gethostname(), "address": address, "nproc": self.nproc, "attempt": attempt,
            "process": os.getpid(),  # tells two launchers apart that were given the same number
            "versions": versions(), "script": fingerprint(self.command),
        }  # fmt: skip
        if node == 0:
            self.close_listener()
            self.listener = socket.create_server((address, 0), family=family_of(address))
            card["port"] = self.listener.getsockname()[1]
        return json.dumps(card)

    def _all_cards(self, nodes: int) -> list[dict]:
        """Every node's card, by its number."""

        def missing() -> list[int]:
            return [n for n in range(nodes) if not self._store.check([f"card {n}"])]

        self._wait(lambda: f"{_numbered('node', missing())} of {nodes}", lambda: not missing())
        return [json.loads(self._store.get(f"card {n}")) for n in range(nodes)]

    def _wait(self, what: str | Callable[[], str], arrived: Callable[[], bool]) -> None:
        """Wait until something is there, and say now and then what is waited for."""
        began = time.monotonic()
        remind = began + 3
        while not arrived():
            now = time.monotonic()
            name = what if isinstance(what, str) else ""
            if now > began + self.patience:
                raise NodeError(
                    f"{name or what()} did not come within {self.patience:.0f} s (--timeout); is the launcher running "
                    "there, with the same address and port, and does a firewall let it through?"
                )
            if now > remind:
                self.say(f"waiting for {name or what()} ({now - began:.0f} s)")
                remind = now + max(10, now - began)
            time.sleep(0.1)

    # While the ranks run

    def _beat(self, place: Place, store: Any) -> None:
        """Give signs of life, and look for those of others, for a failure, and for nodes that want to join."""
        quiet = self._quiet
        seen: dict[int, tuple[bytes, float]] = {}
        count = 0
        try:
            store = store.clone()  # a client of its own: the main thread uses the other one
            while not quiet.wait(BEAT_SECONDS):
                count += 1
                store.set(f"alive {place.node}", str(count))
                if store.check(["end"]):
                    self._news = End(**json.loads(store.get("end")))
                    return
                now, silent = time.monotonic(), {}
                for node in set(range(place.nodes)) - {place.node}:
                    sign = store.get(f"alive {node}") if store.check([f"alive {node}"]) else b""
                    if node not in seen or seen[node][0] != sign or sign == b"left":
                        seen[node] = sign, now
                    silent[node] = now - seen[node][1]
                self._doubt = any(seconds > DOUBT_SECONDS for seconds in silent.values())
                for node, seconds in silent.items():
                    if seconds > LOST_SECONDS:
                        text = f"{self.name(node)} gives no sign of life for {LOST_SECONDS:.0f} s"
                        self._put(store, End("lost", node, text=text))
                if self._rendezvous is not None and place.node == 0 and self._rendezvous.num_nodes_waiting():
                    self._put(store, End("joined", text="another node wants to join: starting anew with it"))
        except RuntimeError:  # torch's, of a store that does not answer
            if not quiet.is_set():
                self._news = self._store_lost()

    @staticmethod
    def _put(store: Any, end: End) -> End:
        """Say how the attempt ends, unless another node was first; what was said first."""
        return End(**json.loads(store.compare_set("end", "", json.dumps(vars(end)))))

    def name(self, node: int) -> str:
        """A node for messages."""
        return named(self.cards[node])

    def news(self) -> End | None:
        """What has ended the attempt on other nodes."""
        return self._news

    def in_doubt(self) -> bool:
        """Whether a node may be lost: there is no sign of life of it, but not for long enough to say so."""
        return self._doubt and self._news is None

    def tell(self, end: End) -> End:
        """Say how the attempt has ended here, and wait for how it has ended for all: done on all, or failed on one."""
        if self._news is not None and self._news.kind == "lost":
            return self._news
        try:
            if end.kind != "done":
                return self._put(self._store, replace(end, text=f"{self.name(end.node)}: {end.text}"))
            done = [f"done {node}" for node in range(self.place.nodes)]
            self._store.set(done[self.place.node], "")
            while self._news is None:
                if self._store.check(done):
                    return self._put(self._store, end)
                time.sleep(0.1)
        except RuntimeError:
            return self._news or self._store_lost()
        return self._news

    def _store_lost(self) -> End:
        return End("lost", text=f"lost the store at {self._meeting_point()}, and so {self.name(0)}")

    def close(self) -> None:
        """Leave the others; node 0, which may serve the store, goes last."""
        self._stop_beating()
        if self._store is not None and self.place is not None:
            left = [f"left {node}" for node in range(self.place.nodes)]
            deadline = time.monotonic() + LEAVE_SECONDS
            try:
                self._store.set(f"alive {self.place.node}", "left")
                self._store.set(left[self.place.node], "")
                while self._serves() and not self._store.check(left) and time.monotonic() < deadline:
                    time.sleep(0.05)
            except RuntimeError:
                pass
        if self._rendezvous is not None:
            self._rendezvous.shutdown()
        self.close_listener()

    def _serves(self) -> bool:
        return self.spec.node == 0 if isinstance(self.spec, Static) else is_own(self.spec.address)

    def _stop_beating(self) -> None:
        if self._beating is not None:
            self._quiet.set()
            self._beating.join(LOST_SECONDS)
            self._quiet, self._beating = threading.Event(), None


# Cards


def versions() -> dict[str, str]:
    """What must be the same on all nodes."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for package in ("torch", "learnerkit"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from its sources
            found[package] = "none"
    return found


def fingerprint(command: list[str]) -> str:
    """What tells one script from another: its name and a digest of what is in it; of a module its name."""
    path = Path(command[0])
    if command[0] == "-m" or not path.is_file():
        return " ".join(command[:2])
    return f"{path.name} ({hashlib.sha256(path.read_bytes()).hexdigest()[:8]})"


def named(card: dict) -> str:
    """A node for messages."""
    return f"node {card['node']} ({card['host']}, {card['address']})"


def check_cards(cards: list[dict]) -> None:
    """Refuse nodes that do not fit together.

    Raises:
        NodeError: which differ, and in what.
    """

    first = cards[0]
    for card in cards[1:]:
        for package, there in card["versions"].items():
            here = first["versions"][package]
            if there != here:
                raise NodeError(
                    f"{named(card)} has {package} {there}, {named(first)} has {here}; install the same on all nodes"
                )
        if card["script"] != first["script"]:
            raise NodeError(
                f"{named(card)} runs {card['script']}, {named(first)} {first['script']}; the scripts must be the same"
            )


def place_of(node: int, cards: list[dict], restarts: int) -> Place:
    """The place of a node's ranks among all, node by node."""
    machines = list(dict.fromkeys(_machine(card) for card in cards))
    card = cards[node]
    here = [c for c in cards if _machine(c) == _machine(card)]
    return Place(
        card["nproc"],
        cards[0]["port"],
        cards[0]["address"],
        interface_of(card["address"]),
        first=sum(c["nproc"] for c in cards[:node]),
        world_size=sum(c["nproc"] for c in cards),
        local_first=sum(c["nproc"] for c in here if c["node"] < node),
        local_world_size=sum(c["nproc"] for c in here),
        node=node,
        nodes=len(cards),
        machine=machines.index(_machine(card)),
        machines=len(machines),
        attempt=max(c["attempt"] for c in cards),
        restarts=restarts,
    )


def _machine(card: dict) -> tuple[str, str]:
    return card["host"], card["address"]


# Words


def _numbered(name: str, numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"{name}{'s' if len(numbers) > 1 else ''} {shown}"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


@contextmanager
def reminded(remind: Callable[[], None]) -> Iterator[None]:
    """Call `remind` after three seconds, and then ever less often."""
    over = threading.Event()

    def run() -> None:
        pause = 3.0
        while not over.wait(pause):
            remind()
            pause *= 2

    threading.Thread(target=run, daemon=True).start()
    try:
        yield
    finally:
        over.set()
