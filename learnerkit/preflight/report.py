"""Findings and their printed form, the same in `learn.check()`, `learn.check_distributed()` and the doctor.

It imports no torch, as the launcher's side of the doctor needs it.
"""

import textwrap
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from learnerkit.text import escaped

OK, HINT, WRONG, NOTHING = "ok", "??", "!!", "--"
"""The marks: all is right, it may be intended, a problem, not checked."""

WIDTH, INDENT = 98, 16


class Finding(NamedTuple):
    """The result of a check of a topic.

    Attributes:
        mark: `OK`, `HINT`, `WRONG` or `NOTHING`.
        text: what was found.
        advice: what to do.
    """

    mark: str
    text: str
    advice: str = ""


fine, doubtful, problem, unchecked = (partial(Finding, mark) for mark in (OK, HINT, WRONG, NOTHING))
"""These make the findings with these marks, from their text and advice."""


def notable(findings: Iterable[Finding]) -> list[Finding]:
    """Return the hints and problems; if there are none, the first finding."""
    found = list(findings)
    return [finding for finding in found if finding.mark in (HINT, WRONG)] or found[:1]


class Report:
    """Prints findings as they come and counts the problems among them.

    Args:
        shown: whether to print; False on ranks other than 0.
        entry: the entry of the page of errors about these findings.

    Attributes:
        problems: how many findings are problems.
    """

    def __init__(self, shown: bool = True, entry: str = "check-findings") -> None:
        self.shown = shown
        self.entry = entry
        self.problems = 0

    def add(self, topic: str, findings: Iterable[Finding]) -> None:
        """Print the findings about a topic."""
        for finding in findings:
            self.problems += finding.mark == WRONG
            self._print("\n".join(lines(topic, finding)))

    def close(self) -> bool:
        """Print the verdict. Return whether there is no problem."""
        verdict = f"{self.problems} problem{'s' * (self.problems > 1)} (errors.html#{self.entry})"
        self._print(verdict if self.problems else "all is well")
        return not self.problems

    def _print(self, text: str) -> None:
        if self.shown:
            print(text, flush=True)


def lines(topic: str, finding: Finding) -> list[str]:
    """Format a finding for printing: wrapped, with control characters escaped, and the advice on separate lines."""
    text, advice = (
        textwrap.wrap(escaped(" ".join(part.split())), WIDTH - indent, break_on_hyphens=False)
        for part, indent in ((finding.text, INDENT), (finding.advice, INDENT + 3))
    )
    rest = text[1:] + [("   " if i else "-> ") + line for i, line in enumerate(advice)]
    return [f"{finding.mark}  {topic:<{INDENT - 4}}{text[0]}", *(" " * INDENT + line for line in rest)]
