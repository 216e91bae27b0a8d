"""Forecasts of the time of a training step, and of training to a given loss, on other numbers of ranks.

They are arithmetic on measured numbers: torch and its profiler measure the ranks that there are, and predict no others.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from learnerkit.arguments import check_count, check_positive
from learnerkit.data.show import pyplot
from learnerkit.scaling.links import Link, all_reduce_seconds

WORTH = 0.5
"""The least gain of an added rank that is worth it, as a share of the work that one rank does alone."""


class Row(NamedTuple):
    """The forecast for a number of ranks.

    Attributes:
        ranks: how many.
        machines: how many machines they are on.
        step: seconds of a step.
        waiting: seconds of it that the averaging of gradients takes longer than the backward pass.
        efficiency: how much of its time a rank uses as one rank alone does: the step of one rank over this one.
        samples: a second, on all ranks; `None` if the batch is not known.
        time: the time to the same loss, as a share of what one rank takes; without a noise scale, for the same samples.
    """

    ranks: int
    machines: int
    step: float
    waiting: float
    efficiency: float
    samples: float | None
    time: float

    @property
    def speed(self) -> float:
        """The speedup over one rank."""
        return 1 / self.time


@dataclass(frozen=True)
class Forecast:
    """A forecast, made by `forecast`; `print` shows it in words and as a table.

    Attributes:
        rows: by the number of ranks.
        best: the largest number of ranks that is worth it: those it adds to a smaller number that is worth it bring, on
            average, at least `worth` of what one rank does alone.
        worth: that share.
        link, inter: the links that were assumed: on a machine, and between machines.
        topology: 'ring' or 'tree'.
        noise: the noise scale in samples; `None`: not known, so each sample counts the same.
    """

    rows: list[Row]
    best: int
    worth: float
    link: Link
    inter: Link | None
    topology: str
    noise: float | None

    def __str__(self) -> str:
        return f"{self.in_words()}\n\n{self.table()}"

    def in_words(self) -> str:
        """Return what it comes to in a few sentences, each on a line."""
        goal = self._goal
        best = next(row for row in self.rows if row.ranks == self.best)
        more = next((row for row in self.rows if row.ranks > self.best), None)
        rule = f"each added rank would bring less than {self.worth:.0%} of what one rank does alone"
        if self.best == 1:
            said = ["More than one rank is not worth it."]
        else:
            said = [
                f"{self.best} ranks are worth it: {best.speed:.1f} times as fast {goal} as one, at an efficiency of "
                f"{best.efficiency:.0%}."
            ]
        if more is not None and more.speed < best.speed:
            times = best.speed / more.speed
            than = "one" if self.best == 1 else f"{self.best}"
            said.append(f"{more.ranks} would take {times:.1f} times as long {goal} as {than}.")
        elif more is not None:
            said.append(f"With {more.ranks} {rule}: {more.speed:.1f} times as fast as one.")
        if more is not None and more.waiting > more.step / 2:
            said.append(f"Of a step on {more.ranks} ranks {more.waiting / more.step:.0%} is waiting for the network.")
        return "\n".join(said)

    def table(self) -> str:
        """Return the rows as text."""
        goal = "time" if self.noise is None else "time to loss"
        lines = [["ranks", "machines", "step ms", "waiting", "efficiency", "samples/s", goal]]
        for row in self.rows:
            samples = "-" if row.samples is None else f"{row.samples:,.0f}"
            lines.append([
                str(row.ranks), str(row.machines), f"{row.step * 1e3:.4g}", f"{row.waiting / row.step:.0%}",
                f"{row.efficiency:.0%}", samples, f"{row.time:.3g}",
            ])  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)

    def to_json(self) -> str:
        """Return all of it as JSON; the keys are the attributes' names, what is unlimited is null."""
        links = {"link": self.link.as_json(), "inter": self.inter and self.inter.as_json()}
        noise = None if self.noise is None or math.isinf(self.noise) else self.noise
        return json.dumps(vars(self) | links | {"rows": [row._asdict() for row in self.rows], "noise": noise})

    def plot(self, ax: Any = None) -> Any:
        """Draw how many times as fast as one rank each number of ranks is, and which number is worth it.

        Args:
            ax: where to draw; by default a new figure.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is not installed.
        """
        if ax is None:
            ax = pyplot("plot").subplots(figsize=(5, 3.2), layout="constrained")[1]
        ranks = [row.ranks for row in self.rows]
        ax.plot(ranks, ranks, color="0.7", linestyle=":", label="each rank counts as one")
        ax.plot(ranks, [row.speed for row in self.rows], "o-", label="forecast")
        ax.axvline(self.best, color="C2", linestyle="--", linewidth=0.8, label=f"worth it: {self.best}")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.set_xticks(ranks, map(str, ranks))
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        ax.set(xlabel="ranks", ylabel=f"times as fast {self._goal}")
        ax.legend(frameon=False)
        return ax

    @property
    def _goal(self) -> str:
        return "to the same loss" if self.noise is not None else "for the same samples"


def forecast(
    compute: float | Callable[[int], float],
    size: float | Sequence[float],
    link: Link,
    *,
    ranks: Sequence[int] = (1, 2, 4, 8, 16),
    hidden: float = 0.0,
    fixed: float = 0.0,
    batch: float | None = None,
    noise: float | None = None,
    per_machine: int | None = None,
    inter: Link | None = None,
    topology: str = "ring",
    worth: float = WORTH,
) -> Forecast:
    """Forecast steps on other numbers of ranks, each with a batch as large as now.

    A step takes what a rank computes, and the all-reduces that the backward pass does not hide: of several buckets all
    but the last can go on their way during it. The way to a loss takes 1 + B_noise / B times as many steps as with
    endless batches (McCandlish et al. 2018), so speed is samples a second times the share of each that counts, as in
    Pollux (Qiao et al., OSDI 2021).

    Args:
        compute: seconds of a rank's step without communication; or a function of the number of ranks on its machine,
            such as `StepCost.compute`.
        size: bytes that are averaged in a step, or those of each bucket in the order in which they leave.
        link: between the ranks of a machine.
        ranks: the numbers of ranks; 1 is always among them.
        hidden: seconds of the backward pass in which buckets are on their way already.
        fixed: seconds that a step takes longer on two ranks or more, whatever they send.
        batch: samples of a rank's step.
        noise: the noise scale, in samples.
        per_machine: ranks on each machine; `None`: all are on one.
        inter: the link between machines; `None`: as `link`.
        topology: 'ring' or 'tree'; see `all_reduce_seconds`.
        worth: see `Forecast.best`.

    Raises:
        ValueError: a number that cannot be, an unknown topology, or a noise scale without a batch.
    """
    counts = sorted({1, *ranks})
    sizes = list(size) if isinstance(size, Sequence) else [size]
    first = compute(1) if callable(compute) else compute
    _check(counts, first, sizes, {"hidden": hidden, "fixed": fixed}, batch, noise, per_machine, topology)

    def row(n: int) -> Row:
        machines = math.ceil(n / (per_machine or n))
        here = min(n, per_machine or n)
        took = [all_reduce_seconds(s, n, link, topology=topology, machines=machines, inter=inter) for s in sizes]
        waiting = max(took[-1], sum(took) - hidden) + (fixed if n > 1 else 0.0)
        step = (compute(here) if callable(compute) else compute) + waiting
        samples = None if batch is None else n * batch / step
        fewer = float(n)  # the factor by which the steps are fewer
        if noise is not None and batch is not None and math.isfinite(noise):
            fewer = n * (batch + noise) / (n * batch + noise)
        return Row(n, machines, step, waiting, first / step, samples, step / (first * fewer))

    rows = [row(n) for n in counts]
    best = rows[0]
    for each in rows[1:]:
        if each.speed - best.speed >= worth * (each.ranks - best.ranks):
            best = each
    return Forecast(rows, best.ranks, worth, link, inter, topology, noise)


def _check(
    ranks: Sequence[int], compute: float, sizes: Sequence[float], seconds: dict[str, float],
    batch: float | None, noise: float | None, per_machine: int | None, topology: str,
) -> None:  # fmt: skip
    """Refuse numbers that are out of range, and an unknown topology."""
    for n in ranks:
        check_count("ranks", n, "the number of ranks")
    check_positive("compute", compute)
    if per_machine is not None:
        check_count("per_machine", per_machine, "the number of ranks on a machine")
    if not sizes or not all(size >= 0 for size in sizes):
        raise ValueError(f"got size={sizes}; it is the bytes that are averaged in a step, or those of each bucket")
    for name, value in seconds.items():
        if not value >= 0:
            raise ValueError(f"got {name}={value!r}; it is seconds, 0 or more")
    if batch is not None:
        check_positive("batch", batch)
    if noise is not None and (batch is None or not noise >= 0):
        raise ValueError(
            f"got noise={noise!r} and batch={batch!r}; a noise scale is a number of samples, 0 or more, and is "
            "compared with the samples of a rank's step: give both, or no noise"
        )
    if topology not in ("ring", "tree"):
        raise ValueError(f"got topology={topology!r}; it is 'ring' or 'tree'")
