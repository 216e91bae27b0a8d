"""How an exception ends a run: the one form in which this is known, on the exception, in messages and in reports.

It is made of plain values, and needs the standard library alone, as the launcher does. `processes/rank_main.py`, which
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
        agreed: all ranks raise it at the same place, so they need not tell each other of it.
        follows: another rank has caused it; the launcher reports the first cause before its followers.
        standstill: the ranks came to a standstill, and no other error will come.
        signal: which it answers, for the launcher to report; 0: none.
        rank: which has told the others of it; -1: none.
        event, callback, epoch, step: where it was raised; outside of a hook there is no callback.
        cause: its class and what it says, in one line.
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

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Ending":
        """Make one of the facts that it has a place for: others may be of another version's, or of a heartbeat."""
        return cls(**_known(cls, facts))

    @property
    def note(self) -> str:
        """The note of an error that a hook has raised."""
        return f"raised in {self.callback}.{self.event}"


@dataclass(frozen=True)
class ExceptionReport:
    """The report of a process on the exception that has ended it, or a call in it.

    Args:
        time: when, on the monotonic clock, which is the same for all processes of a machine.
        code: the exit code.
        error: the class and what it says.
        traceback: of a process that the launcher has started, the whole one.
        brief: the traceback in brief.
        ending: how it ends the run.
    """

    time: float | None = None
    code: int | None = None
    error: str = ""
    traceback: str = ""
    brief: str = ""
    ending: Ending = Ending()

    @classmethod
    def from_json(cls, text: str | bytes) -> "ExceptionReport":
        """Read one.

        Raises:
            ValueError: the text is not JSON, as that of a process which was killed before it could write any.
        """
        facts = json.loads(text)
        return cls(**_known(cls, facts) | {"ending": Ending.of(facts.get("ending", {}))})

    def to_json(self) -> str:
        """Write it."""
        return json.dumps(vars(self) | {"ending": vars(self.ending)})

    @property
    def order(self) -> tuple[bool, float]:
        """The place among the reports of several processes: the first cause first, its followers last."""
        return self.ending.follows, self.time or 0.0


def _known(kind: Any, facts: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: facts[field.name] for field in fields(kind) if field.name in facts}


def ending_of(error: BaseException | None) -> Ending:
    """Return what is known of how an exception ends a run."""
    return getattr(error, _ATTRIBUTE, Ending())


def mark(error: E, **facts: Any) -> E:
    """Note facts of an `Ending` on an exception, beside those that it has, and return it."""
    vars(error)[_ATTRIBUTE] = replace(ending_of(error), **facts)  # also where the class refuses assignments
    return error


def raised_in(error: BaseException, event: str, callback: str) -> None:
    """Note on an error which hook has raised it, unless another one inside that hook has."""
    if ending_of(error).note not in getattr(error, "__notes__", ()):
        error.add_note(ending_of(mark(error, event=event, callback=callback)).note)


def may_follow(error: BaseException) -> bool:
    """Tell whether another rank's failure may have caused an error."""
    return ending_of(error).follows or is_collective_error(f"{type(error).__name__}: {error}")


def is_collective_error(error: str) -> bool:
    """Tell whether an error, given as 'ClassName: message', is one that torch raises when another rank has gone.

    These are torch.distributed's own classes, and RuntimeErrors whose message names a backend, a lost connection,
    or the barrier before which torch compares what the ranks call.
    """
    by_message = r"RuntimeError: (?is:.*(gloo|nccl|monitoredBarrier|connection (closed|reset) by peer))"
    return bool(re.match(rf"Dist(Backend|Network|QueueEmpty|Store)?Error\b|{by_message}", error))


def where(facts: Mapping[str, Any]) -> str:
    """Say where in a run a rank is; outside of a batch the step is that of the batches read last, and left out."""
    by = f" of {facts['callback']}" if facts["callback"] else ""
    outside = facts["event"].endswith(("_fit", "_epoch", "_train", "_validate"))
    step = "" if outside else f", step {facts['step']}"
    return f"{facts['event']}{by} (epoch {facts['epoch']}{step})"
