"""Servers on loopback, in threads of the test, that are not stores of torch's."""

import http.server
import socket
import struct
import threading
import time
from contextlib import contextmanager, suppress

from learnerkit.processes.machine import LOOPBACK


@contextmanager
def serving(serve):
    """Call `serve(connection)`, in a thread, for each connection; they stay open to the end. Gives the port."""
    listener = socket.create_server((LOOPBACK, 0))
    listener.settimeout(0.05)
    threads, connections, over = [], [], threading.Event()

    def run(connection):
        with suppress(OSError):  # the other side has left
            serve(connection)

    def accept():
        while not over.is_set():
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                connections.append(connection)
                threads.append(threading.Thread(target=run, args=(connection,)))
                threads[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield listener.getsockname()[1]
    finally:
        over.set()
        accepting.join()
        listener.close()
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # ends what waits for it
        for thread in threads:
            thread.join()
        for connection in connections:
            connection.close()


class Handler(http.server.BaseHTTPRequestHandler):
    """Speaks HTTP, and does not print what it is asked."""

    default_request_version = "HTTP/1.0"  # with a line of its status before the page

    def log_message(self, *words):
        pass


def reset(connection):
    """Break a connection off."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


FOREIGN = {
    "speaks first": (lambda c: c.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"), "it answers 'SSH-2.0-OpenSSH_9.2'"),
    "http": (lambda c: Handler(c, None, None), 'it answers "HTTP/1.0 400 Bad '),
    "silent": (lambda c: None, "no answer came within "),
    "closes": (lambda c: c.close(), "it closes every connection"),
    "resets": (reset, "it closes every connection"),
}
"""By name: what a server does with a connection, and what is said of it."""


def slowly(port, seconds):
    """Pass everything on to the server at another port, and its answers back, after some seconds."""

    def serve(connection):
        time.sleep(seconds)
        with socket.create_connection((LOOPBACK, port)) as server:
            there = threading.Thread(target=pump, args=(connection, server))
            there.start()
            pump(server, connection)
            there.join()

    return serve


def pump(source, target):
    """Pass on what comes from one socket to the other, until either end."""
    with suppress(OSError):
        while data := source.recv(4096):
            target.sendall(data)
    for one in (source, target):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
