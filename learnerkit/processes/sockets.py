"""A check that a store of torch's listens at an address, before torch connects to it.

torch's client waits without limit for an answer, and prints many lines about a wrong one. So this module first sends
the ping with which that client begins, which needs no import of torch. The store's protocol is not public and may
change: what does not answer the ping counts as something else only if a store of the installed torch does answer it.
"""

import functools
import math
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from learnerkit.processes.machine import LOOPBACK

ECHO = b"\r\n\r\n"  # The store sends this back; a server that reads lines takes it for the end of a bad request.
PING = struct.pack("=BIB", 0, 0x3C85F7CE, 13) + ECHO  # VALIDATE with its number, PING with a number to return
TESTED = (2, 15)  # stores of torch up to this release answer the ping; one of a later release is asked first
CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 20.0  # the time for the answer of a store, whose machine may be busy
PROMPT_SECONDS = 0.5  # the least to wait: a store takes milliseconds on a machine that is not busy
OWN_SECONDS = 5.0  # the time for a store in this process
RETRY_SECONDS = 1.0  # between two connections to a port that closes them


class NotAStore(Exception):
    """Something else listens at the address; the message says how it answers."""


def store_answers(host: str, port: int, patience: float) -> bool:
    """Tell whether a store of torch's answers at a port; `False`: nothing listens there.

    Args:
        host: a name or an address.
        port: the port.
        patience: seconds to wait for the answer of what listens; `math.inf`: without limit.

    Raises:
        NotAStore: it does not answer, answers something else, or closes every connection for `ANSWER_SECONDS`.
    """
    began = time.monotonic()
    while True:
        answer: bytes | None = b""
        try:
            with socket.create_connection((host, port), timeout=CONNECT_SECONDS) as connection:
                # Where nothing listens, the kernel may choose that port for this end, too, and connect it to itself.
                if connection.getsockname()[1] == port:
                    return False
                answer = _answer(connection, PROMPT_SECONDS, PING)
                if _is_echo(answer) or not ping_is_known():
                    return True
                if answer is None:
                    answer = _answer(connection, began + patience - time.monotonic())
        except ConnectionResetError:
            pass  # something listens, and was quicker to close than this end to see that it was connected
        except OSError:
            return False
        if _is_echo(answer):
            return True
        if answer is None:
            raise NotAStore(f"no answer came within {time.monotonic() - began:.1f} s")
        if answer:
            first, *_ = answer.strip().splitlines() or [answer]
            raise NotAStore(f"it answers {repr(first)[1:]}")
        # A store that ends closes connections, and so does a proxy whose store has not started yet.
        left = began + min(patience, ANSWER_SECONDS) - time.monotonic()
        if left <= 0:
            raise NotAStore("it closes every connection")
        time.sleep(min(RETRY_SECONDS, left))


def ping_is_known() -> bool:
    """Tell whether a store of the installed torch answers the ping."""
    return torch_is_tested() or own_store_answers()


def torch_is_tested() -> bool:
    """Tell whether the installed torch is of a release that is known to answer the ping."""
    from importlib.metadata import PackageNotFoundError, version  # A launcher that is alone does not need it.

    with suppress(PackageNotFoundError, ValueError):  # torch may run from its sources
        return tuple(map(int, version("torch").split(".")[:2])) <= TESTED
    return False


@functools.cache
def own_store_answers() -> bool:
    """Start a store on loopback, and tell whether it answers the ping."""
    from learnerkit.torch_internals import host_store

    try:
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        _store = host_store(listener, seconds=OWN_SECONDS)  # it serves while it is kept
        with socket.create_connection((LOOPBACK, port), timeout=CONNECT_SECONDS) as connection:
            return _is_echo(_answer(connection, OWN_SECONDS, PING))
    except (RuntimeError, OSError):
        return False


def _answer(connection: socket.socket, seconds: float, question: bytes = b"") -> bytes | None:
    """Return the first bytes that come; `b""`: the connection is closed; `None`: none come in time."""
    connection.settimeout(None if seconds == math.inf else max(seconds, 0.01))
    try:
        connection.sendall(question)
        return connection.recv(64)
    except TimeoutError:
        return None
    except OSError:
        return b""


def _is_echo(answer: bytes | None) -> bool:
    return ECHO.startswith(answer[: len(ECHO)]) if answer else False


def open_sockets() -> Iterator[tuple[tuple[Any, Any], socket.socket]]:
    """Yield ((own address, other address), duplicate) for this process's TCP connections; it is open until the next."""
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    for name in os.listdir(folder):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as line:
                if line.family in (socket.AF_INET, socket.AF_INET6) and line.type == socket.SOCK_STREAM:
                    yield (line.getsockname()[:2], line.getpeername()[:2]), line
        except OSError:  # It is closed by now, as the listing's own one, or not connected.
            continue


def has_closed(port: int) -> bool:
    """Tell whether the server at a port has closed a connection of this process to it."""
    for (_, other), line in open_sockets():
        try:
            if other[1] == port and not line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                return True
        except BlockingIOError:
            pass
        except OSError:
            return True
    return False
