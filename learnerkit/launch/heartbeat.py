"""Where a rank is, in a piece of memory that other processes of its machine can read whatever state it is in.

It uses the standard library only: the launcher, which does not import torch, reads it too.
"""

import mmap
import os
import struct
import time
from functools import partial
from typing import Any

from learnerkit.launch.environment import shared_file


def where(facts: dict) -> str:
    """A place in a run, in words."""
    by = f" of {facts['callback']}" if facts["callback"] else ""
    return f"{facts['event']}{by} (epoch {facts['epoch']}, step {facts['step']})"


class Heartbeat:
    """The memory of one rank.

    Args:
        path: of a file of `Heartbeat.SIZE` bytes.
        file: the file, if it is to live as long as this.

    Attributes:
        beat: writes where the main thread is: beat(time.monotonic(), epoch, step, b'event/callback').

    Raises:
        OSError, ValueError: it cannot be mapped.
    """

    SIZE = 256
    _LOOK, _MOVE = struct.Struct("<d?"), struct.Struct("<dqq216s")  # at 0, and at 16

    def __init__(self, path: str, file: Any = None) -> None:
        self.path, self._file = path, file
        with open(path, "r+b") as shared:
            self._shared = mmap.mmap(shared.fileno(), self.SIZE)
        # Without a function of its own, since it is called at every event of a batch. It cuts a long text.
        self.beat = partial(self._MOVE.pack_into, self._shared, 16)

    @classmethod
    def new(cls) -> "Heartbeat":
        """One in memory that is found by its path, and goes with this process."""
        file, path = shared_file(cls.SIZE)
        return cls(path, file)

    @classmethod
    def own(cls) -> "Heartbeat":
        """That of this process: the one which the launcher has made for it and reads, or a new one."""
        # A process that this one has started inherits the variable, too.
        process, _, path = os.environ.get("LEARNERKIT_HEARTBEAT", "").partition(" ")
        return cls(path) if process == str(os.getpid()) else cls.new()

    def live(self, waits: bool) -> None:
        """The watching thread runs, so this process does; whether the main thread waits for others."""
        self._LOOK.pack_into(self._shared, 0, time.monotonic(), waits)

    def read(self) -> dict:
        """The place, and how many seconds ago each thread gave its last sign."""
        lived, waits = self._LOOK.unpack_from(self._shared, 0)
        moved, epoch, step, place = self._MOVE.unpack_from(self._shared, 16)
        event, _, callback = place.rstrip(b"\0").decode(errors="replace").partition("/")
        now = time.monotonic()  # one clock for all processes of the machine
        return {
            "event": event, "callback": callback, "epoch": epoch, "step": max(step, 0),
            "since": now - moved, "alive": now - lived, "waits": waits,
        }  # fmt: skip

    def close(self) -> None:
        """Let the memory go."""
        self._shared.close()
        if self._file is not None:
            self._file.close()
