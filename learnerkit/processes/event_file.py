"""The file of events: a line of JSON for each state of a launch, from launchers and from the ranks that save.

The page nbs/reference/launch_events.md documents the lines for those who read them.
"""

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any


class EventFile:
    """A file to which several processes append whole lines.

    Args:
        say: called with a message when a file cannot be written.
        path: the file; `None`: nothing is written.
        common: the facts that are in each line: the number of the launcher's node, and of the attempt.
    """

    def __init__(self, say: Callable[[str], None], path: str | None = None, **common: int | None) -> None:
        self.say, self.path = say, path
        self.common = common
        self._told: set[str] = set()

    def write(self, event: str, **facts: Any) -> str:
        """Append a line, and return it."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "event": event} | self.common | facts) + "\n"
        if self.path is not None:
            try:
                # It is opened for each line, so that others may move it away, and not buffered: a line is one write,
                # and no other process writes into it.
                with open(self.path, "ab", buffering=0) as file:
                    file.write(line.encode())
            except OSError as error:
                self.complain(self.path, error)
        return line

    def complain(self, path: str, error: OSError) -> None:
        """Say once that a file cannot be written."""
        if path not in self._told:
            self._told.add(path)
            self.say(f"{path} cannot be written ({error.strerror}), so that it is not complete; training goes on")


def facts_of_launch() -> dict[str, Any]:
    """Return the path and the common facts of this process's `EventFile`, if others follow its launch, or else {}."""
    # The variable names the process, because the programs that a rank starts inherit it.
    facts = json.loads(os.environ.get("LEARNERKIT_EVENTS", "{}"))
    return facts if facts.pop("process", 0) == os.getpid() else {}


def check_file(option: str, path: str) -> str:
    """Return the absolute path of a file to write, which is made if there is none.

    Raises:
        ValueError: it cannot be written, or is not a regular file: a pipe could make the launcher wait for its reader.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise OSError(0, "it is not a regular file")
        open(path, "ab").close()
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}; name a regular file that can be written") from error
    return os.path.abspath(path)
