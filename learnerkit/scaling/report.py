"""The scaling report: why N processes are not N times as fast, and what was tried about it."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, cast

from learnerkit import arguments, parallel, world
from learnerkit.callbacks.accumulation import GradientAccumulation
from learnerkit.callbacks.recorder import pyplot
from learnerkit.data.loaders import DataLoaders
from learnerkit.parallel.distributed import member_of
from learnerkit.scaling.parts import (
    ALARM,
    BACKWARD,
    COPY,
    FORWARD,
    INPUT,
    OPTIMIZER,
    PARTS,
    Slowest,
    Stopwatch,
    mean_parts,
    slowest,
    waiting,
)
from learnerkit.scaling.trials import (
    Pace,
    attempt,
    pace,
    pace_alone,
    replaced,
    run_trial,
    with_larger_batches,
    with_workers,
)
from learnerkit.text import first_few
from learnerkit.utils import unwrap

if TYPE_CHECKING:
    from learnerkit.learner import Learner

GAIN = 0.05
"""The share of samples per second above which something that was tried counts as a help."""


@dataclass
class ScalingReport:
    """Where the time of a training step goes, on each rank, and what changes it; all times are seconds of one step.

    `str(report)` says it in words, with a table; `report.compare(other)` shows two reports side by side.

    Attributes:
        ranks: processes that train together.
        device: where.
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
        helps: what was tried and gave more samples per second: (what, the gain as a share).
        tried: everything that was tried.
        notes: what could not be measured, and why.
        gradient_bytes: what each rank sends in a step.
        forecast: of other numbers of ranks, if it was made.
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
    helps: list[tuple[str, float]] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    gradient_bytes: int = 0
    forecast: Any = None

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
        text = "\n".join([*self._words(), "", *self._lines()])
        return text if self.forecast is None else f"{text}\n\n{self.forecast}"

    # In words

    def _words(self) -> Iterator[str]:
        yield (
            f"{_processes(self.ranks)} on {self.device}: a step of {self.samples:g} samples takes {_ms(self.seconds)}, "
            f"{self.rate:,.0f} samples per second"
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
        yield (
            f"one process alone takes {_ms(seconds)} for {samples:g} samples, so {self.ranks} are {times:.2f} times as "
            f"fast (efficiency {self.efficiency:.0%})"
        )
        if times < 1 + GAIN and self.slowest is None:
            yield "so one process does as well: a step is too short for what its gradients cost to exchange"

    def _slowest_rank(self) -> Iterator[str]:
        found = self.slowest
        if found is None:
            return
        others = "the other waits" if self.ranks == 2 else "the others wait"
        yield (
            f"rank {found.rank} is the slowest: {others} for it, which costs {_ms(found.cost)} of each step "
            f"({found.cost / max(self.walls):.0%})"
        )
        if found.part:
            yield f"    its '{found.part}' takes {_ms(found.seconds)} longer than elsewhere: {_advice(found.part)}"
        else:
            yield (
                f"    all that it computes takes longer, {_ms(found.seconds)} in all: a slower device, or other "
                "programs on it"
            )

    def _savings(self) -> Iterator[str]:
        names = {"network": "a free network", "input": "free input", "both": "both"}
        saved = {k: max(0.0, 1 - self.without[k] / self.seconds) for k in names if k in self.without}
        if saved:
            yield (
                "measured: "
                + ", ".join(f"{names[k]} would save {share:.0%}" for k, share in saved.items())
                + (" of each step")
            )
        share = self.communication / max(self.walls)
        if share > ALARM:
            yield (
                f"gradients travel for {_ms(self.communication)} of each step while all ranks wait ({share:.0%}), "
                f"{self.gradient_bytes / 1e6:.3g} MB of them"
            )
        whole = max(self.walls)
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
        colors = dict(zip(PARTS, ("C1", "C5", "C0", "C9", "C3", "C2", "0.8"), strict=True))
        others = iter(("C4", "C6", "C8", "C7"))
        whole = sum(self.walls)
        for name, found in self.parts.items():
            if sum(found) < 0.005 * whole:
                continue
            values = [1e3 * x for x in found]
            ax.barh(names, values, left=left, label=name, color=colors.get(name) or next(others, "0.5"))
            left = [a + b for a, b in zip(left, values, strict=True)]
        ax.invert_yaxis()
        ax.set(xlabel="milliseconds of a step", title=f"{self.rate:,.0f} samples per second")
        ax.legend(bbox_to_anchor=(1.01, 1), loc="upper left", frameon=False)
        return ax

    def to_json(self) -> str:
        """The report as JSON, which `from_json` reads."""
        facts = asdict(self) | {"slowest": self.slowest and self.slowest._asdict()}
        if self.forecast is not None:
            facts["forecast"] = json.loads(self.forecast.to_json())
        return json.dumps(facts, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ScalingReport":
        """Read what `to_json` wrote; a forecast is plain data then."""
        facts = json.loads(text)
        facts["slowest"] = facts["slowest"] and Slowest(**facts["slowest"])
        facts["alone"] = facts["alone"] and tuple(facts["alone"])
        facts["helps"] = [tuple(each) for each in facts["helps"]]
        return cls(**facts)

    def compare(self, other: "ScalingReport") -> str:
        """Return a table of this report and another one, such as that of an earlier version of the script."""
        pairs = [("samples per second", other.rate, self.rate)]
        names = dict.fromkeys([*self.parts, *other.parts])
        pairs += [(f"ms: {name}", 1e3 * other._mean(name), 1e3 * self._mean(name)) for name in names]
        pairs.append(("ms: a step", 1e3 * other.seconds, 1e3 * self.seconds))
        width = max(len(name) for name, _, _ in pairs)
        lines = [f"{'mean of the ranks':<{width}}  {'before':>10}  {'now':>10}  change"]
        for name, before, now in pairs:
            change = f"{now / before - 1:+6.0%}" if before > 0 else "     -"
            lines.append(f"{name:<{width}}  {before:10,.2f}  {now:10,.2f}  {change}")
        return "\n".join(lines)

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


# Making it


def scaling_report(
    learn: "Learner", n_steps: int = 20, *, advice: bool = True, seconds: float = 120.0, show: bool = True
) -> ScalingReport:
    """Do what `Learner.scaling_report` says; every rank must reach this.

    Raises:
        RuntimeError: called while something runs.
        ValueError: `n_steps` below 2, or a loader that can be read only once.
    """
    arguments.check_fit(learn, n_epoch=None, n_steps=n_steps, who="scaling_report")
    arguments.check_count("n_steps", n_steps, "a number of steps", least=2)
    arguments.check_positive("seconds", seconds)
    if hasattr(learn.dls.train, "__next__"):
        raise ValueError(
            f"the training loader is an iterator ({type(learn.dls.train).__name__}), which can be read only once, so "
            "that the report would take its batches from the fit; pass a DataLoader or a class with __iter__"
        )
    parallel.warn_outside_context(learn)
    together = world.world_size() > 1 and member_of(learn.cbs) is not None
    with nullcontext() if together else world.alone():
        report = _Making(learn, n_steps, seconds).run(advice)
    if show and world.is_main():
        print(report, flush=True)
    return report


class _Making:
    """Runs the trials of a report.

    Args:
        learn: the learner.
        n_steps: of each trial.
        seconds: after which nothing new is tried.
    """

    def __init__(self, learn: "Learner", n_steps: int, seconds: float) -> None:
        self.learn, self.n_steps, self.ranks = learn, n_steps, world.world_size()
        self.seconds, self._end = seconds, time.monotonic() + seconds
        self._base: list[Pace] = []

    def run(self, advice: bool) -> ScalingReport:
        report = self.measure_parts()
        self.run_without(report)
        if advice:
            self.try_advice(report)
        return report

    def measure_parts(self) -> ScalingReport:
        """Measure the parts of steps, and the pace of steps without that."""
        learn = self.learn
        steps, walls = self._timed_steps(quiet=False)
        base = pace(learn, self.n_steps)
        self._base.append(base)
        slow = slowest(steps)
        if slow is not None:  # if it was another program, for a moment, it will not be the same again
            again = slowest(self._timed_steps()[0])
            slow = slow if again is not None and again[:2] == slow[:2] else None
        means = [mean_parts(each) for each in steps]
        names = dict.fromkeys(name for each in means for name in each)
        waits, communication = waiting(steps)
        params = [p for p in unwrap(learn.model).parameters() if p.requires_grad]
        left_out = [repr(cb) for cb in learn.cbs if cb.only_fit]
        notes = [f"not timed, as they run in a fit only: {first_few(dict.fromkeys(left_out))}"] if left_out else []
        return ScalingReport(
            ranks=self.ranks, device=str(learn.dls.device.type), seconds=base.seconds, samples=base.samples,
            parts={name: [each.get(name, 0.0) for each in means] for name in names},
            walls=walls, slowest=slow, waits=waits,
            communication=communication, gradient_bytes=sum(p.numel() * p.itemsize for p in params), notes=notes,
        )  # fmt: skip

    def _timed_steps(self, quiet: bool = True) -> tuple[list[list[dict[str, float]]], list[float]]:
        "For each rank the parts of its steps, and the mean seconds of one."
        watch = Stopwatch(self.learn, self.n_steps)
        run_trial(self.learn, watch, quiet=quiet)
        return world.all_gather(watch.parts), world.all_gather(sum(watch.seconds) / len(watch.seconds))

    def run_without(self, report: ScalingReport) -> None:
        """Run steps without what costs time."""
        trials: dict[str, dict[str, bool]] = {"input": {"loader": False}}
        if self.ranks > 1:
            trials |= {"network": {"network": False}, "both": {"network": False, "loader": False}}
        for name, options in trials.items():
            found, reason = attempt(lambda options=options: pace(self.learn, self.n_steps, **options))  # type: ignore
            if found is None:
                report.notes.append(f"steps without {name} could not be run: {reason}")
            else:
                report.without[name] = found.seconds
        if self.ranks > 1:
            alone = pace_alone(self.learn, self.n_steps, 600.0)
            if isinstance(alone, str):
                report.notes.append(f"steps in one process alone could not be run: {alone}")
            else:
                report.alone = (alone.seconds, alone.samples)

    def try_advice(self, report: ScalingReport) -> None:
        """Try what may help, and note what does: twice, as chance may help once."""
        for what, change in self._advice(report):
            # Every rank must come to the same end.
            if world.broadcast(time.monotonic() > self._end):
                report.notes.append(
                    f"not tried any more after {self.seconds:g} s: {what}, and what would have followed"
                )
                break
            found, reason = attempt(lambda change=change: self._changed(change))  # type: ignore[misc]
            if found is None:
                report.notes.append(f"{what} could not be tried: {reason}")
                continue
            report.tried.append(what)
            if found.rate > (1 + GAIN) * self._base_rate():
                self._base.append(pace(self.learn, self.n_steps))
                again, _ = attempt(lambda change=change: self._changed(change))  # type: ignore[misc]
                gain = min(found.rate, again.rate if again else 0.0) / self._base_rate() - 1
                if gain > GAIN:
                    report.helps.append((what, gain))
        report.helps.sort(key=lambda each: -each[1])

    def _base_rate(self) -> float:
        "The best of the runs as things are: what is tried must be better."
        return max(found.rate for found in self._base)

    def _changed(self, change: Callable[[], tuple[AbstractContextManager, int]]) -> Pace:
        context, batches = change()
        with context:
            return pace(self.learn, max(2, self.n_steps // batches))

    def _advice(self, report: ScalingReport) -> Iterator[tuple[str, Callable]]:
        """(what, how) to try: `how` returns a context in which it is so, and the batches of a step by then."""
        dls = self.learn.dls
        # All ranks have the same report, so they try the same.
        saves = {name: 1 - seconds / report.seconds for name, seconds in report.without.items()}
        if saves.get("input", 0.0) > GAIN:
            cores = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
            for n in (2, 4, 8):
                new = n != getattr(dls.train, "num_workers", n) and n <= max(2, cores)
                if new and (dl := with_workers(dls.train, n)) is not None:
                    yield f"num_workers={n}", lambda dl=dl: (_training_on(dls, dl), 1)
        if self.ranks > 1 and saves.get("network", 0.0) > GAIN:
            yield from self._network_advice(report)
        if (dl := with_larger_batches(dls.train, 2)) is not None:
            yield f"batches of {dl.batch_size}", lambda dl=dl: (_training_on(dls, dl), 1)

    def _network_advice(self, report: ScalingReport) -> Iterator[tuple[str, Callable]]:
        learn, member = self.learn, cast(parallel.DistributedCallback, member_of(self.learn.cbs))
        if not hasattr(learn, "gradient_accumulation"):
            for n in (2, 4):
                added = GradientAccumulation(n_batches=n)
                yield f"GradientAccumulation(n_batches={n})", lambda n=n, cb=added: (learn.added_cbs(cb), n)
        if member.comm_hook is None:
            yield "comm_hook='bf16'", lambda: (replaced(member, comm_hook="bf16"), 1)
        for size in (5, 100):
            if "bucket_cap_mb" not in member.ddp_kwargs and report.gradient_bytes > min(size, 25) * 2**20:
                options = {**member.ddp_kwargs, "bucket_cap_mb": size}
                yield f"bucket_cap_mb={size}", lambda options=options: (replaced(member, ddp_kwargs=options), 1)


@contextmanager
def _training_on(dls: DataLoaders, dl: Any) -> Iterator[None]:
    """Put another training loader in the place of the learner's."""
    before, dls.loaders[0] = dls.loaders[0], dl
    try:
        yield
    finally:
        dls.loaders[0] = before
