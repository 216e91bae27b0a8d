"""The place in the run where a rank is, in memory that the launcher and other local ranks can read even if it hangs."""

import mmap
import os
import struct
import time
from functools import partial
from typing import Any

from learnerkit.processes.machine import shared_file


class Heartbeat:
    """The memory of one rank.

    Args:
        path: a file of `Heartbeat.SIZE` bytes.
        file: the open file, if this is to keep it.

    Attributes:
        beat: writes where the main thread is: beat(time.monotonic(), epoch, step, b'event/callback').

    Raises:
        OSError, ValueError: the file cannot be mapped.
    """

    SIZE = 256
    _LIVE, _BEAT = struct.Struct("<d?"), struct.Struct("<dqq216s")  # at 0, and at 16; see `live` and `beat`
    _PHASES = ("", "evaluation", "training")  # the index is at 9; see `phase`

    def __init__(self, path: str, file: Any = None) -> None:
        self.path, self._file = path, file
        with open(path, "r+b") as shared:
            self._shared = mmap.mmap(shared.fileno(), self.SIZE)
        # It is no method, since it is called at every event of a batch. It cuts a long text.
        self.beat = partial(self._BEAT.pack_into, self._shared, 16)

    @classmethod
    def new(cls) -> "Heartbeat":
        """Create a heartbeat which others find by its path, and which is removed with this process."""
        file, path = shared_file(cls.SIZE)
        return cls(path, file)

    @classmethod
    def own(cls) -> "Heartbeat":
        """Return the heartbeat that the launcher has made for this process and reads, or else a new one."""
        # The variable names the process, because the programs that a rank starts inherit it.
        process, _, path = os.environ.get("LEARNERKIT_HEARTBEAT", "").partition(" ")
        return cls(path) if process == str(os.getpid()) else cls.new()

    def live(self, waits: bool) -> None:
        """Record that this process runs, and whether its main thread waits for other ranks."""
        self._LIVE.pack_into(self._shared, 0, time.monotonic(), waits)

    def phase(self, number: int) -> None:
        """Record which pass over the data has begun: 1 evaluation, 2 training; 0: none has, or the run has ended."""
        self._shared[9] = number

    def read(self) -> dict[str, Any]:
        """Return where the main thread is, and the seconds since the last `beat` and `live`."""
        lived, waits = self._LIVE.unpack_from(self._shared, 0)
        moved, epoch, step, place = self._BEAT.unpack_from(self._shared, 16)
        event, _, callback = place.rstrip(b"\0").decode(errors="replace").partition("/")
        now = time.monotonic()  # one clock for all processes of the machine
        return {
            "event": event, "callback": callback, "epoch": epoch, "step": max(step, 0),
            "since": now - moved, "alive": now - lived, "waits": waits, "phase": self._PHASES[self._shared[9]],
        }  # fmt: skip

    def close(self) -> None:
        """Free the memory."""
        self._shared.close()
        if self._file is not None:
            self._file.close()
