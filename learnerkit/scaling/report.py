"""The scaling report: why N processes are not N times as fast, and what was tried about it."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from learnerkit.data.show import Table, pyplot
from learnerkit.scaling.forecast import Forecast, StepCost
from learnerkit.scaling.parts import ALARM, BACKWARD, COPY, FORWARD, INPUT, OPTIMIZER, PARTS, REDUCE, REST, Slowest
from learnerkit.text import counted, first_few

GAIN = 0.05
"""The share of samples per second above which something that was tried counts as a help."""

_WAITS, _TRAVEL = "waiting for a slower rank", "gradients on their way"
_COLORS = {
    INPUT: "C1", COPY: "C5", FORWARD: "C0", BACKWARD: "C9", _WAITS: "#f4c7c3", _TRAVEL: "C3", OPTIMIZER: "C2",
    REST: "0.8",
}  # fmt: skip


@dataclass
class ScalingReport:
    """A report of where the time of a training step goes on each rank, and what helps; times are seconds of one step.

    `str(report)` says it in words, with a table; `report.compare(other)` shows two reports side by side.

    Attributes:
        ranks: processes that train together.
        device: the type of their devices.
        seconds: a step on the slowest rank, measured without the parts.
        samples: of a step, on all ranks together.
        parts: each part of a step on each rank; they add up to `walls`.
        walls: a step on each rank while its parts were measured.
        slowest: the rank that the others wait for, if there is one.
        waits: for each rank, how long it waits for the slowest one.
        communication: how long gradients travel after the last rank was ready: not hidden behind the backward pass.
        without: a step without 'network' (gradients stay on their ranks), without 'input' (one batch is repeated) and
            without 'both'; measured.
        alone: (seconds, samples) of a step in rank 0's process alone; `None`: not measured.
        threads: of that process; where ranks have one each, it is tried with all cores, and the faster counts.
        helps: what was tried and gave more samples per second: (what, the gain as a share).
        tried: everything that was tried.
        notes: what could not be measured, and why.
        gradient_bytes: what each rank sends in a step.
        cost: what the forecast of other numbers of ranks is made from; `None`: not measured.
        noise: the noise scale in samples, if a `GradientNoiseScale` of the learner knows it.
    """

    ranks: int
    device: str
    seconds: float
    samples: float
    parts: dict[str, list[float]]
    walls: list[float]
    slowest: Slowest | None
    waits: list[float]
    communication: float
    without: dict[str, float] = field(default_factory=dict)
    alone: tuple[float, float] | None = None
    threads: int = 1
    helps: list[tuple[str, float]] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    gradient_bytes: int = 0
    cost: StepCost | None = None
    noise: float | None = None

    @property
    def rate(self) -> float:
        """Samples per second, of all ranks together."""
        return self.samples / self.seconds

    @property
    def efficiency(self) -> float | None:
        """Samples per second of each rank, as a share of those of one process alone."""
        return self.alone and self.rate / self.ranks / (self.alone[1] / self.alone[0])

    @property
    def table(self) -> list[dict[str, Any]]:
        """A row for each part: its name, milliseconds on each rank, and its share of a step on all ranks."""
        whole = sum(self.walls)
        return [
            {"part": name, **{f"rank {r}": 1e3 * x for r, x in enumerate(found)}, "share": sum(found) / whole}
            for name, found in [*self.parts.items(), ("a step", self.walls)]
        ]

    def __repr__(self) -> str:
        return f"ScalingReport({_processes(self.ranks)}, {_ms(self.seconds)} a step)"

    def __str__(self) -> str:
        return "\n".join([*self._words(), "", *self._lines(), *self._forecast_lines()])

    def forecast(self, ranks: Sequence[int] | None = None, noise: float | None = None) -> Forecast:
        """Forecast a step on other numbers of ranks of this machine, and how many are worth it.

        Each rank has a batch as large as now. A step takes what a rank computes, and the all-reduce of the gradients as
        far as the backward pass does not hide it; both were measured. The way to a loss takes 1 + B_noise / B times as
        many steps as with endless batches (McCandlish et al. 2018), so speed is samples a second times the share of
        each that counts, as in Pollux (Qiao et al., OSDI 2021).

        Args:
            ranks: the numbers of ranks; by default 1, 2, 4, 8, 16 and that of the report. 1 is always among them.
            noise: the noise scale, in samples; by default that of the report.

        Raises:
            ValueError: the report has no measurement to forecast from, or a number out of range.
        """
        if self.cost is None:
            raise ValueError(
                "this report has nothing to forecast from: make it with forecast=True; if that was so, its notes say "
                "why there is no forecast"
            )
        return self.cost.forecast(ranks or (1, 2, 4, 8, 16, self.ranks), self.noise if noise is None else noise)

    def _forecast_lines(self) -> Iterator[str]:
        if self.cost is None:
            return
        yield ""
        if self.slowest is not None:
            yield f"no forecast while rank {self.slowest.rank} is slow; report.forecast() makes one of it as it is"
            return
        where = "" if self.ranks > 1 else ", between two processes that were started here"
        yield "forecast for other numbers of processes, each with a batch of its own as large as now:"
        yield str(self.forecast())
        yield (
            f"(an all-reduce of {self.gradient_bytes / 1e6:.3g} MB of gradients takes {_ms(self.cost.gradients)}, of "
            f"almost nothing {_ms(self.cost.message)}{where})"
        )

    # In words

    def _words(self) -> Iterator[str]:
        yield (
            f"{_processes(self.ranks)} on {self.device}: a step of {counted(self.samples, 'sample')} takes "
            f"{_ms(self.seconds)}, {self.rate:,.0f} samples per second"
        )
        yield from self._against_one()
        yield from self._slowest_rank()
        yield from self._savings()
        yield from self._callbacks()
        yield from (f"tried: {what} gives {gain:.0%} more samples per second" for what, gain in self.helps)
        if self.tried and not self.helps:
            yield f"nothing that was tried helps by {GAIN:.0%} or more ({first_few(self.tried, n=20)})"
        yield from self.notes

    def _against_one(self) -> Iterator[str]:
        if self.alone is None or self.efficiency is None:
            return
        seconds, samples = self.alone
        times = self.efficiency * self.ranks
        with_threads = f" with {self.threads} threads" if self.threads > 1 else ""
        yield (
            f"one process alone takes {_ms(seconds)} for {counted(samples, 'sample')}{with_threads}, so "
            f"{self.ranks} are {times:.2f} times as fast (efficiency {self.efficiency:.0%})"
        )
        if times < 1 + GAIN and self.slowest is None:
            yield "so one process does as well: a step is too short for what its gradients cost to exchange"

    def _slowest_rank(self) -> Iterator[str]:
        slow = self.slowest
        if slow is None:
            return
        others = "the other waits" if self.ranks == 2 else "the others wait"
        yield (
            f"rank {slow.rank} is the slowest: {others} for it, which costs {_ms(slow.cost)} of each step "
            f"({slow.cost / max(self.walls):.0%})"
        )
        if slow.part:
            yield f"    its '{slow.part}' takes {_ms(slow.seconds)} longer than elsewhere: {_advice(slow.part)}"
        else:
            yield (
                f"    all that it computes takes longer, {_ms(slow.seconds)} in all: a slower device, or other "
                "programs on it"
            )

    def _savings(self) -> Iterator[str]:
        names = {"network": "a free network", "input": "free input", "both": "both"}
        saved = [
            f"{what} would save {max(0.0, 1 - self.without[name] / self.seconds):.0%}"
            for name, what in names.items()
            if name in self.without
        ]
        if saved:
            yield f"measured: {', '.join(saved)} of each step"
        whole = max(self.walls)
        share = self.communication / whole
        if share > ALARM:
            yield (
                f"gradients travel for {_ms(self.communication)} of each step while all ranks wait ({share:.0%}), "
                f"{self.gradient_bytes / 1e6:.3g} MB of them"
            )
        part = min(self.parts.get(INPUT, [0.0]))
        if part > ALARM * whole:
            yield f"every rank waits for input, {_ms(part)} of each step ({part / whole:.0%})"

    def _callbacks(self) -> Iterator[str]:
        for name, found in self.parts.items():
            if name not in PARTS and min(found) > GAIN * max(self.walls):
                yield f"{name} takes {_ms(min(found))} of each step ({min(found) / max(self.walls):.0%})"

    def _lines(self) -> Iterator[str]:
        rows = [row for row in self.table if row["part"] in (*PARTS, "a step") or row["share"] >= 0.001]
        width = max(len(row["part"]) for row in rows)
        yield "  ".join([f"{'ms of a step':<{width}}", *(f"rank {r}".rjust(9) for r in range(self.ranks)), "share"])
        for row in rows:
            cells = [f"{row[f'rank {r}']:9.3f}" for r in range(self.ranks)]
            yield "  ".join([f"{row['part']:<{width}}", *cells, f"{row['share']:5.0%}"])

    # Elsewhere

    def plot(self, ax: Any = None) -> Any:
        """Draw a bar for each rank, divided into the parts of its step.

        Args:
            ax: where to draw; by default a new figure.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is not installed.
        """
        if ax is None:
            ax = pyplot("plot").subplots(figsize=(8, 1.5 + 0.4 * self.ranks), layout="constrained")[1]
        names, left = [f"rank {r}" for r in range(self.ranks)], [0.0] * self.ranks
        others, whole = iter(("C4", "C6", "C8", "C7")), sum(self.walls)
        for name, found in self._bars():
            if sum(found) < 0.005 * whole:
                continue
            values = [1e3 * x for x in found]
            ax.barh(names, values, left=left, label=name, color=_COLORS.get(name) or next(others, "0.5"))
            left = [a + b for a, b in zip(left, values, strict=True)]
        ax.invert_yaxis()
        ax.set(xlabel="milliseconds of a step", title=f"{self.rate:,.0f} samples per second")
        ax.legend(bbox_to_anchor=(1.01, 1), loc="upper left", frameon=False)
        return ax

    def _bars(self) -> Iterator[tuple[str, list[float]]]:
        """Return the parts of a step on each rank, with the exposed all-reduce in two."""
        for name, found in self.parts.items():
            if name == REDUCE and self.ranks > 1:
                yield _WAITS, self.waits
                yield _TRAVEL, [max(0.0, x - wait) for x, wait in zip(found, self.waits, strict=True)]
            else:
                yield name, found

    def to_json(self) -> str:
        """Return the report as JSON, which `from_json` reads."""
        facts = asdict(self) | {
            "slowest": self.slowest and self.slowest._asdict(),
            "cost": self.cost and self.cost._asdict(),
            "forecast": [] if self.cost is None else [row._asdict() for row in self.forecast().rows],
        }
        return json.dumps(facts, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ScalingReport":
        """Read what `to_json` wrote."""
        facts = json.loads(text)
        del facts["forecast"]  # it follows from the rest
        facts["slowest"] = facts["slowest"] and Slowest(**facts["slowest"])
        facts["cost"] = facts["cost"] and StepCost(**facts["cost"])
        facts["alone"] = facts["alone"] and tuple(facts["alone"])
        facts["helps"] = [tuple(each) for each in facts["helps"]]
        return cls(**facts)

    def compare(self, other: "ScalingReport") -> str:
        """Return a table of this report and another one, such as that of an earlier version of the script."""
        pairs = [("samples per second", other.rate, self.rate)]
        names = dict.fromkeys([*self.parts, *other.parts])
        pairs += [(f"ms: {name}", 1e3 * other._mean(name), 1e3 * self._mean(name)) for name in names]
        pairs.append(("ms: a step", 1e3 * other.seconds, 1e3 * self.seconds))
        rows = [
            [name, f"{before:,.2f}", f"{now:,.2f}", f"{now / before - 1:+.0%}" if before > 0 else "-"]
            for name, before, now in pairs
        ]
        return repr(Table(["mean of the ranks", "before", "now", "change"], rows))

    def _mean(self, part: str) -> float:
        return sum(self.parts.get(part, [0.0])) / self.ranks


def _processes(n: int) -> str:
    return f"{n} process{'es' if n > 1 else ''}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _advice(part: str) -> str:
    known = {
        INPUT: "look at its dataset, its loader's workers and its disk",
        COPY: "pinned memory, or smaller batches on its link",
        FORWARD: "does its model, or a hook in it, do what the others' do not?",
        BACKWARD: "does a hook of a gradient, or a function of its own, do what the others' do not?",
        OPTIMIZER: "does its optimizer, or a hook of it, do what the others' do not?",
    }
    return known.get(part, "it should do the same on all ranks" if part not in PARTS else "look at what else it does")
