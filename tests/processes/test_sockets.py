"""Whether what listens is a store of torch's: real stores, and servers of other kinds."""

import math
import socket
import threading
import time
from functools import partial

import pytest
from helpers import mostly_soak
from servers import FOREIGN, serving, slowly
from torch.distributed import TCPStore

from learnerkit.processes import sockets
from learnerkit.processes.machine import LOOPBACK
from learnerkit.processes.sockets import NotAStore, own_store_answers, ping_is_known, store_answers, torch_is_tested


@pytest.fixture
def own_store():
    """What is remembered of this process's own store is forgotten before and after."""
    own_store_answers.cache_clear()
    yield own_store_answers
    own_store_answers.cache_clear()


def store_at(port=0, **options):
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, **options)


def test_the_store_of_this_torch_answers_the_ping(own_store):
    "If this fails, torch's protocol has changed: see what TCPStore.cpp sends in `ping`. If not, `TESTED` may grow."
    assert own_store()
    for modern in (True, False):
        store = store_at(use_libuv=modern)
        with socket.create_connection((LOOPBACK, store.port), timeout=5) as connection:
            connection.sendall(sockets.PING)
            assert connection.recv(64) == sockets.ECHO
        assert store_answers(LOOPBACK, store.port, 0.0)
        store.set("as", "ever")
        assert store.get("as") == b"ever"


def test_a_store_where_nobody_listens_does_not_answer():
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
    assert not store_answers(LOOPBACK, port, 5.0)
    assert not store_answers("no.such.host.invalid", port, 5.0)


def test_a_connection_to_itself_is_nobody(monkeypatch):
    with socket.create_server((LOOPBACK, 0)) as listener:
        own = listener.getsockname()
    connect = partial(socket.create_connection, source_address=own)
    monkeypatch.setattr(socket, "create_connection", connect)
    assert not store_answers(*own, 5.0)


@pytest.mark.parametrize("name", mostly_soak(FOREIGN, "silent"))
def test_something_else_is_told_by_its_answer(name):
    serve, answer = FOREIGN[name]
    began = time.monotonic()
    with serving(serve) as port, pytest.raises(NotAStore, match=f"^{answer}"):
        store_answers(LOOPBACK, port, 1.0)
    assert time.monotonic() - began < 1.0 + 10  # the machine may be busy


def test_a_connection_that_is_reset_while_it_is_made_has_met_something(monkeypatch):
    def reset(*args, **kwargs):
        raise ConnectionResetError

    monkeypatch.setattr(socket, "create_connection", reset)
    with pytest.raises(NotAStore, match="it closes every connection"):
        store_answers(LOOPBACK, 1, 0.1)


def test_a_strange_answer_is_shown_in_one_line():
    with serving(lambda c: c.sendall(b"\r\n\x1b[2J\x00 'a'\nb")) as port, pytest.raises(NotAStore) as caught:
        store_answers(LOOPBACK, port, 1.0)
    assert str(caught.value) == "it answers \"\\x1b[2J\\x00 'a'\""


def test_what_always_closes_is_given_up_even_by_the_patient(monkeypatch):
    monkeypatch.setattr(sockets, "ANSWER_SECONDS", 0.5)
    with serving(FOREIGN["closes"][0]) as port, pytest.raises(NotAStore, match="it closes every connection"):
        store_answers(LOOPBACK, port, math.inf)


def test_a_store_may_be_slow(monkeypatch):
    monkeypatch.setattr(sockets, "PROMPT_SECONDS", 0.05)
    store = store_at()
    with serving(slowly(store.port, 0.5)) as port:
        assert store_answers(LOOPBACK, port, 60.0)
        assert store_answers(LOOPBACK, port, math.inf)


def test_a_store_may_come_after_what_closed_the_connection(monkeypatch):
    monkeypatch.setattr(sockets, "RETRY_SECONDS", 0.1)
    store, closed = store_at(), []

    def serve(connection):
        if len(closed) < 2:
            closed.append(connection.close())
        else:
            slowly(store.port, 0.0)(connection)

    with serving(serve) as port:
        assert store_answers(LOOPBACK, port, 60.0)


@pytest.mark.parametrize(
    ("release", "tested"),
    [("2.10.0", True), ("2.15.1+cu132", True), ("2.16.0", False), ("3.0.0", False), ("git", False)],
)
def test_which_torch_need_not_be_asked(monkeypatch, release, tested):
    monkeypatch.setattr(sockets, "TESTED", (2, 15))
    monkeypatch.setattr("importlib.metadata.version", lambda name: release)
    assert torch_is_tested() is tested


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_soak(FOREIGN, "http", "closes"))
def test_if_the_protocol_has_changed_nothing_counts_as_something_else(own_store, monkeypatch, name):
    monkeypatch.setattr(sockets, "TESTED", (2, 9))
    assert ping_is_known()
    own_store.cache_clear()
    monkeypatch.setattr(sockets, "PING", b"\x00another\x00")
    monkeypatch.setattr(sockets, "OWN_SECONDS", 0.5)
    assert not ping_is_known()
    with serving(FOREIGN[name][0]) as port:
        assert store_answers(LOOPBACK, port, 60.0)
    assert store_answers(LOOPBACK, store_at().port, 60.0)


def test_a_store_on_its_way_is_waited_for_by_the_patient(monkeypatch):
    "As the socket of a launcher's listens before rank 0 has imported torch."
    listener = socket.create_server((LOOPBACK, 0))
    port, stores = listener.getsockname()[1], []
    timer = threading.Timer(1.0, lambda: stores.append(store_at(port, master_listen_fd=listener.detach())))
    timer.start()
    assert store_answers(LOOPBACK, port, math.inf)
    timer.join()
    assert stores
