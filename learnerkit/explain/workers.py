"""The reason for which a loader's worker has ended, or has not begun."""

import multiprocessing
import re
import signal
import time
from collections.abc import Iterable, Sequence
from types import FrameType

from learnerkit.state import Learner
from learnerkit.text import killed_by
from learnerkit.torch_internals import workers_of

_LOST = "DataLoader worker"  # the beginning of torch's message
_KILLED = re.compile(r"is killed by signal: ([^.]+)\.")


def lost_worker(error: Exception, frames: Iterable[FrameType]) -> str:
    """Name the signal that killed a loader's worker, if that is what the error with these frames is about.

    torch's error may have the signal's name, or only say that the worker is gone. If the worker was killed while it
    sent a tensor, the error is only that of the broken connection.
    """
    if not isinstance(error, RuntimeError | OSError | EOFError):
        return ""
    if isinstance(error, RuntimeError) and not str(error).startswith(_LOST):
        return ""
    named = _KILLED.search(str(error))
    signals: list[int] = [s for s in signal.valid_signals() if named and signal.strsignal(s) == named[1]]
    for frame in frames:  # the workers of a loader among them are asked if the error does not tell
        signals = signals or _killing_signals(workers_of(frame.f_locals.get("self")))
    return f"the loader worker {killed_by(signals[0]).rstrip(',')}" if signals else ""


def worker_without_fork(learn: "Learner", error: Exception, frames: Iterable[FrameType]) -> str:
    """Say what workers need that are not forked, if one of the learner's loader cannot start or has ended by itself."""
    method = (getattr(learn.dl, "multiprocessing_context", None) or multiprocessing).get_start_method()
    starts = any(frame.f_globals.get("__name__") == "multiprocessing.process" for frame in frames)
    if method == "fork" or not (starts or str(error).startswith(_LOST)):
        return ""
    return (
        f"the workers of this loader start by {method!r}, so each of them imports the script, and gets a pickled copy "
        "of the dataset and of the loader's functions. Their classes and functions must stand in a module, or at the "
        "top level of the script (not in a notebook's cell), and the script's work below `if __name__ == '__main__':`. "
        "DataLoader(..., multiprocessing_context='fork') needs none of this, nor do loaders of "
        "DataLoaders.from_datasets on Linux"
    )


def _killing_signals(workers: Sequence) -> list[int]:
    """Return the signals that killed workers; an exit code may be known only a moment after the error."""
    end = time.monotonic() + 0.5
    while True:
        signals = [-worker.exitcode for worker in workers if (worker.exitcode or 0) < 0]
        if signals or not workers or time.monotonic() > end:
            return signals
        time.sleep(0.01)
