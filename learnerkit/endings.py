"""The facts about how an exception ends a run, in one form for exceptions, messages and reports.

They are plain values, and need only the standard library, as does the launcher. `processes/rank_main.py`, which
imports nothing of this package, reads the attribute `learnerkit_ending` of any exception.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)

_ATTRIBUTE = "learnerkit_ending"


@dataclass(frozen=True)
class Ending:
    """The facts about an exception that ends a run: how it ends it, and where it was raised.

    Args:
        agreed: all ranks raise it at the same place, so they need not tell each other.
        follows: another rank has caused it; the launcher reports the first cause before the exceptions that follow from
            it.
        standstill: the ranks came to a standstill, and no other error will come.
        signal: the signal that caused it, for the launcher to report; 0: none.
        rank: the rank that has told the others of it; -1: none.
        event, callback, epoch, step: the place where it was raised; outside of a hook there is no callback.
        cause: its class and message, in one line.
        phase: 'training' or 'evaluation'; before the first batch empty.
    """

    agreed: bool = False
    follows: bool = False
    standstill: bool = False
    signal: int = 0
    rank: int = -1
    event: str = ""
    callback: str = ""
    epoch: int = -1
    step: int = -1
    cause: str = ""
    phase: str = ""

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Ending":
        """Make an ending from the facts that it has fields for, and drop others, such as those of a heartbeat."""
        return cls(**_known(cls, facts))

    @property
    def note(self) -> str:
        """The note that is added to an error of a hook."""
        return f"raised in {self.callback}.{self.event}"


@dataclass(frozen=True)
class ExceptionReport:
    """The report of a process on the exception that has ended it, or a call in it.

    Args:
        time: the time of the exception on the monotonic clock, which is the same for all processes of a machine.
        code: the exit code.
        error: the class and the message.
        traceback: the whole traceback, for a process that the launcher has started.
        brief: a short traceback.
        ending: the facts about how it ends the run.
    """

    time: float | None = None
    code: int | None = None
    error: str = ""
    traceback: str = ""
    brief: str = ""
    ending: Ending = Ending()

    @classmethod
    def from_json(cls, text: str | bytes) -> "ExceptionReport":
        """Read a report from JSON.

        Raises:
            ValueError: the text is not JSON, as after a process was killed before it could write.
        """
        facts = json.loads(text)
        return cls(**_known(cls, facts) | {"ending": Ending.of(facts.get("ending", {}))})

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(vars(self) | {"ending": vars(self.ending)})

    @property
    def order(self) -> tuple[bool, float]:
        """The sort key among the reports of several processes: the first cause comes first, its followers last."""
        return self.ending.follows, self.time or 0.0


def _known(kind: Any, facts: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: facts[field.name] for field in fields(kind) if field.name in facts}


def ending_of(error: BaseException | None) -> Ending:
    """Return the facts about how an exception ends a run."""
    return getattr(error, _ATTRIBUTE, Ending())


def mark(error: E, **facts: Any) -> E:
    """Set facts of an `Ending` on an exception, and return it; its other facts are kept."""
    vars(error)[_ATTRIBUTE] = replace(ending_of(error), **facts)  # this works even if the class refuses assignments
    return error


def raised_in(error: BaseException, event: str, callback: str) -> None:
    """Add a note with the hook that has raised an error, unless a hook called inside it has added one."""
    if ending_of(error).note not in getattr(error, "__notes__", ()):
        error.add_note(ending_of(mark(error, event=event, callback=callback)).note)


def may_follow(error: BaseException) -> bool:
    """Tell whether another rank's failure may have caused an error."""
    return ending_of(error).follows or is_collective_error(f"{type(error).__name__}: {error}")


def is_collective_error(error: str) -> bool:
    """Tell whether an error, given as 'ClassName: message', is one that torch raises when another rank has gone.

    These errors are of torch.distributed's own classes, or a RuntimeError whose message names a backend, a lost
    connection, or the barrier before which torch compares the ranks' calls.
    """
    by_message = r"RuntimeError: (?is:.*(gloo|nccl|monitoredBarrier|connection (closed|reset) by peer))"
    return bool(re.match(rf"Dist(Backend|Network|QueueEmpty|Store)?Error\b|{by_message}", error))


def where(facts: Mapping[str, Any]) -> str:
    """Describe where in a run a rank is; outside of a batch the step is left out, as it is that of the last one."""
    by = f" of {facts['callback']}" if facts["callback"] else ""
    outside = facts["event"].endswith(("_fit", "_epoch", "_train", "_validate"))
    batch = "evaluation batch" if facts.get("phase") == "evaluation" else "step"
    step = "" if outside else f", {batch} {facts['step']}"
    return f"{facts['event']}{by} (epoch {facts['epoch']}{step})"
