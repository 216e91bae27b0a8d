"""What ranks have seen, and findings about it in words: which ranks, on which machines, how many bytes."""

from collections.abc import Callable
from typing import Any

from learnerkit.preflight.report import Finding, notable
from learnerkit.text import first_few

Facts = dict[str, Any]
"""Of one rank: 'rank', 'host', 'machine', and by topic what it has seen, or its 'error'."""

Judge = Callable[[list[Facts]], list[Finding]]
"""Concludes from the facts of all ranks what to report about a topic."""


def by_machine(everyone: list[Facts]) -> list[list[Facts]]:
    """The ranks of each machine."""
    found: dict[str, list[Facts]] = {}
    for facts in everyone:
        found.setdefault(facts["machine"], []).append(facts)
    return list(found.values())


def hosts(ranks: list[Facts]) -> str:
    """The names of the machines of some ranks."""
    return first_few(group[0]["host"] for group in by_machine(ranks))


def places(ranks: list[Facts]) -> str:
    """Some ranks and their machines."""
    return f"rank{'s' * (len(ranks) > 1)} {first_few(f['rank'] for f in ranks)} ({hosts(ranks)})"


def in_units(n_bytes: float) -> str:
    """Bytes as a person reads them, such as 64 MB."""
    power = next((power for power in (4, 3, 2, 1) if n_bytes >= 1024**power), 0)
    return f"{n_bytes / 1024**power:.3g} {('bytes', 'KB', 'MB', 'GB', 'TB')[power]}"


def per_machine(judge: Callable[[list[Facts], list[Facts]], Finding]) -> Judge:
    """Turn a judge of one machine's ranks, which gets all ranks as its second argument, into a judge of all machines.

    Where the machines differ, it names those with a hint or a problem; if all are fine, it shows the first one.
    """

    def judge_all(everyone: list[Facts]) -> list[Finding]:
        found: dict[Finding, list[Facts]] = {}
        for group in by_machine(everyone):
            found.setdefault(judge(group, everyone), []).append(group[0])
        if len(found) == 1:
            return list(found)
        return [finding._replace(text=f"{finding.text} (on {hosts(found[finding])})") for finding in notable(found)]

    return judge_all
