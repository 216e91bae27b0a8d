"""The forecast of a step on other numbers of ranks of this machine: arithmetic on what was measured on these.

torch and its profiler measure the ranks that there are, and predict no others.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from learnerkit import distributed
from learnerkit.arguments import check_count
from learnerkit.data.show import Table
from learnerkit.endings import ExceptionReport
from learnerkit.marks import collective, not_collective
from learnerkit.parallel.data_parallel import DataParallelCallback
from learnerkit.parallel.distributed import DistributedCallback, member_of
from learnerkit.processes.forks import cause, join_forks, run_in_forks
from learnerkit.processes.machine import usable_cores
from learnerkit.scaling.parts import waiter
from learnerkit.scaling.trials import Pace, pace
from learnerkit.state import Learner
from learnerkit.utils import unwrap

WORTH = 0.5
"""The least gain of an added rank that is worth it, as a share of the work that one rank does alone."""

WARM, TIMES = 3, 15
"""The all-reduces of each size that are run before those that are timed, and the number of these."""

_SECONDS = 120.0  # for two forks
LARGEST = 25 * 2**20
"""Bytes of the largest all-reduce that is timed: as many as DDP sends at once."""


class Row(NamedTuple):
    """The forecast for a number of ranks.

    Attributes:
        ranks: how many.
        step: seconds of a step.
        waiting: seconds of it beyond computing: the averaging of gradients that the backward pass does not hide.
        efficiency: how much of its time a rank uses as one rank alone does: the step of one rank over this one.
        samples: a second, on all ranks.
        time: the time to the same loss, as a share of what one rank takes; without a noise scale, for the same samples.
    """

    ranks: int
    step: float
    waiting: float
    efficiency: float
    samples: float
    time: float

    @property
    def speed(self) -> float:
        """The speedup over one rank."""
        return 1 / self.time


@dataclass(frozen=True)
class Forecast:
    """A forecast, made by `ScalingReport.forecast`; `print` shows it in words and as a table.

    Attributes:
        rows: by the number of ranks.
        best: the largest number of ranks that is worth it: those it adds to a smaller number that is worth it bring, on
            average, at least half of what one rank does alone.
        noise: the noise scale in samples; `None`: not known, so each sample counts the same.
    """

    rows: list[Row]
    best: int
    noise: float | None

    def __str__(self) -> str:
        """Return what it comes to in a few sentences, each on a line, and the table."""
        best = next(row for row in self.rows if row.ranks == self.best)
        more = next((row for row in self.rows if row.ranks > self.best), None)
        goal = "for the same samples" if self.noise is None else "to the same loss"
        said = ["More than one rank is not worth it."]
        if self.best > 1:
            said = [
                f"{self.best} ranks are worth it: {best.speed:.1f} times as fast {goal} as one, at an efficiency of "
                f"{best.efficiency:.0%}."
            ]
        if more is not None:
            said.append(
                f"With {more.ranks} each added rank would bring less than {WORTH:.0%} of what one rank does alone: "
                f"{more.speed:.1f} times as fast as one."
            )
        return "\n".join([*said, "", self.table()])

    def table(self) -> str:
        """Return the rows as text."""
        names = ["ranks", "step ms", "waiting", "efficiency", "samples/s"]
        names.append("time" if self.noise is None else "time to loss")
        rows = [
            [
                row.ranks, f"{row.step * 1e3:.4g}", f"{row.waiting / row.step:.0%}", f"{row.efficiency:.0%}",
                f"{row.samples:,.0f}", f"{row.time:.3g}",
            ]
            for row in self.rows
        ]  # fmt: skip
        return repr(Table(names, rows))


class StepCost(NamedTuple):
    """The measured seconds of a step, and of the all-reduces in it, from which other numbers of ranks are forecast.

    Attributes:
        ranks: how many ranks there were when this was measured, 2 or more.
        batch: samples of a rank's step.
        single: seconds of a step in a process that is the only one.
        compute: seconds when all ranks compute at the same time and send no gradients.
        step: seconds when they send them.
        message: seconds of an all-reduce of almost no bytes.
        gradients: seconds of an all-reduce of the gradients.
        at_once: how many ranks can compute at a time: the machine's cores by a rank's threads; `None`: each rank has
            its own device.
    """

    ranks: int
    batch: float
    single: float
    compute: float
    step: float
    message: float
    gradients: float
    at_once: float | None = None

    def compute_on(self, ranks: int) -> float:
        """Return the seconds of a step on this many ranks without sending; those beyond the cores wait for a core."""
        if ranks == 1:
            return self.single
        turns = 1.0 if self.at_once is None else max(ranks, self.at_once) / max(self.ranks, self.at_once)
        return self.compute * turns

    def all_reduce_on(self, ranks: int) -> float:
        """Return the seconds of the all-reduce of the gradients on this many ranks.

        It is that of a ring (Patarasuk and Yuan 2009): 2 (N - 1) messages one after the other, and 2 (N - 1) / N of the
        bytes through the slowest part.
        """
        messages = (ranks - 1) / (self.ranks - 1)
        carried = messages * self.ranks / ranks
        return self.message * messages + max(0.0, self.gradients - self.message) * carried

    def forecast(self, ranks: Sequence[int], noise: float | None) -> Forecast:
        """Make a forecast, as `ScalingReport.forecast` says."""
        if not isinstance(ranks, Iterable):
            raise ValueError(f"got ranks={ranks!r}; it is a sequence of numbers of ranks, such as [2, 8]")
        ranks = [*ranks]  # it may be an iterator
        for n in ranks:
            check_count("ranks", n, "the number of ranks")
        if noise is not None and not noise >= 0:
            raise ValueError(f"got noise={noise!r}; it is a noise scale, a number of samples, 0 or more")
        if noise == math.inf:  # Each sample counts the same.
            noise = None
        # What sending takes beyond an all-reduce of all gradients; below 0 if the backward pass hides a part.
        beyond = self.step - self.compute - self.all_reduce_on(self.ranks)
        rows = []
        for n in sorted({1, *ranks}):
            waiting = max(0.0, self.all_reduce_on(n) + beyond) if n > 1 else 0.0
            step = self.compute_on(n) + waiting
            fewer = float(n)  # the factor by which the steps are fewer
            if noise is not None:
                fewer = n * (self.batch + noise) / (n * self.batch + noise)
            time_to_loss = step / (self.single * fewer)
            rows.append(Row(n, step, waiting, self.single / step, n * self.batch / step, time_to_loss))
        best = rows[0]
        for row in rows[1:]:
            if row.speed - best.speed >= WORTH * (row.ranks - best.ranks):
                best = row
        return Forecast(rows, best.ranks, noise)


@collective
def cost_on_ranks(learn: "Learner", step: Pace, compute: float, alone: Pace | None) -> StepCost:
    """Measure the all-reduces of these ranks, which train together.

    Args:
        learn: the learner.
        step: the pace at which they train.
        compute: seconds of a step in which gradients do not travel.
        alone: a step in one process alone; `None`: not known.
    """
    n = distributed.world_size()
    batch = step.samples / n
    single = compute
    if alone is not None and abs(alone.samples - batch) <= 0.1 * batch:  # Ranks may share one batch.
        single = alone.seconds
    size = sent_bytes(learn)
    timed = min(size, LARGEST)
    message, gradients = (all_reduce_seconds(learn.dls.device, n_bytes) for n_bytes in (1 << 10, timed))
    gradients = message + max(0.0, gradients - message) * size / max(1, timed)
    at_once = None
    if learn.dls.device.type == "cpu":
        at_once = distributed.broadcast(max(1.0, usable_cores() / torch.get_num_threads()))
    return StepCost(n, batch, single, compute, step.seconds, message, gradients, at_once)


def sent_bytes(learn: "Learner") -> int:
    """Return the bytes of the gradients on their way; of those that comm_hook='powersgd' compresses, before it does."""
    member = member_of(learn.cbs)
    half = member is not None and member.comm_hook in ("bf16", "fp16")
    params = (p for p in unwrap(learn.model).parameters() if p.requires_grad)
    return sum(p.numel() * (2 if half else p.itemsize) for p in params)


@collective
def all_reduce_seconds(device: torch.device, n_bytes: int) -> float:
    """Measure the seconds of an all-reduce among all ranks; the same on every rank."""
    group = distributed.group("gradients", device.type)
    values = torch.zeros(max(1, n_bytes // 4), device=device)
    seconds, wait = [], waiter(device)
    for _ in range(WARM + TIMES):
        start = time.perf_counter()
        dist.all_reduce(values, group=group)
        wait()  # a host-device sync: otherwise this would time the launch
        seconds.append(time.perf_counter() - start)
    # The rank that comes last has waited for no other, so its time counts.
    everyone = torch.tensor(distributed.all_gather(seconds[WARM:]), dtype=torch.float64)
    return everyone.amin(0).median().item()


@not_collective("the ranks are forks of this process")
def cost_in_forks(learn: "Learner", n_steps: int, step: Pace) -> StepCost:
    """Measure the cost of a step on two ranks, by two forks of this process that train together on the CPU.

    Args:
        learn: the learner; the forks have copies.
        n_steps: the least number of steps in each trial; short steps need more.
        step: the pace in this process.

    Raises:
        RuntimeError: it failed in a fork; with the cause in a line.
    """
    n = max(n_steps, min(200, int(0.5 / step.seconds)))
    jobs = [partial(_measure_as_rank, learn, n, rank) for rank in range(2)]
    results = run_in_forks(jobs, time.monotonic() + _SECONDS)
    if failed := [each for each in results if isinstance(each, ExceptionReport)]:
        raise RuntimeError(cause(min(failed, key=lambda each: each.order).traceback))
    # The forks divide the epoch, so more of their batches are last ones, with fewer samples.
    return StepCost(**results[0])._replace(single=step.seconds, batch=step.samples)


@collective
def _measure_as_rank(learn: "Learner", n_steps: int, rank: int, folder: Path) -> dict[str, Any]:
    join_forks(folder, rank, 2, timedelta(seconds=_SECONDS))
    learn.remove_cb(DataParallelCallback)
    with learn.added_cbs([] if member_of(learn.cbs) else DistributedCallback()):
        step, offline = pace(learn, n_steps), pace(learn, n_steps, network=False)
        return cost_on_ranks(learn, step, offline.seconds, None)._asdict()
