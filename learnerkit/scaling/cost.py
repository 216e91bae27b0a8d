"""The cost of a training step on several ranks of a machine, measured as the input of the forecast."""

import os
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from learnerkit import distributed
from learnerkit.endings import ExceptionReport
from learnerkit.marks import collective, not_collective
from learnerkit.parallel.data_parallel import DataParallelCallback
from learnerkit.parallel.distributed import DistributedCallback, member_of
from learnerkit.processes.forks import cause, join_forks, run_in_forks
from learnerkit.processes.machine import usable_cores
from learnerkit.scaling.forecast import Forecast, forecast
from learnerkit.scaling.links import Link, all_reduce_seconds, ddp_buckets, measure_link
from learnerkit.scaling.trials import Pace, pace, pace_alone
from learnerkit.utils import unwrap

if TYPE_CHECKING:
    from learnerkit.learner import Learner


class StepCost(NamedTuple):
    """The seconds that a step takes on each number of ranks, and the bytes that it sends.

    Attributes:
        ranks: the number of ranks on each machine when this was measured.
        machines: how many machines there were.
        single: seconds of a step in a process that is the only one, with the threads that it has or could have.
        alone: seconds on one rank, with a rank's threads, while the others wait.
        together: seconds when all ranks compute at the same time and send no gradients.
        at_once: how many ranks can compute at a time: the machine's cores by a rank's threads; `None`: each rank has
            its own device.
        batch: samples of a rank's step.
        sent: bytes of each bucket of gradients, in the order in which they are sent.
        link: the link between ranks; `None`: there was one process only, and no second could be started.
        beyond: seconds of a step beyond computing and all-reduce; negative if part of the all-reduce is hidden behind
            the backward pass.
    """

    ranks: int
    machines: int
    single: float
    alone: float
    together: float
    at_once: float | None
    batch: float
    sent: list[int]
    link: Link | None
    beyond: float

    def compute(self, ranks: int) -> float:
        """Return the seconds of a step on this many ranks of one machine, without sending gradients.

        Each further rank is assumed to slow a rank equally, and only `at_once` of them compute at a time.
        """
        if ranks == 1:
            return self.single
        slowed = (self.together - self.alone) / max(1, self.ranks - 1)
        waits = 1.0 if self.at_once is None else ranks / self.at_once
        return max(self.alone + slowed * (ranks - 1), self.alone * max(1.0, waits))

    def forecast(self, **options: Any) -> Forecast:
        """Forecast other numbers of ranks; the options are those of `learnerkit.scaling.forecast.forecast`.

        Raises:
            ValueError: no link was measured, and none is given.
        """
        measured = {"link": self.link, "batch": self.batch, "per_machine": self.ranks if self.machines > 1 else None}
        given = measured | {"hidden": max(0.0, -self.beyond), "fixed": max(0.0, self.beyond)} | options
        if given["link"] is None:
            raise ValueError(
                "one process has measured no link to others; give one, such as forecast(link=Link(latency=10e-6, "
                "bandwidth=200e9)) in seconds and bytes a second, from learnerkit.scaling.links"
            )
        return forecast(self.compute, self.sent, **given)

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data, which `from_json` reads."""
        return self._asdict() | {"link": self.link and self.link.as_json()}

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> "StepCost":
        """Read what `as_json` has returned."""
        return cls(**facts | {"link": facts["link"] and Link.from_json(facts["link"])})


def cost_of_one(learn: "Learner", step: Pace, backward: float) -> StepCost:
    """Return the cost of a step as one process knows it: gradients could be sent during its `backward` seconds."""
    seconds = step.seconds
    return StepCost(1, 1, seconds, seconds, seconds, None, step.samples, _sent(learn), None, -backward)


@collective
def cost_on_ranks(learn: "Learner", step: Pace, offline: float, alone: Pace | None, single: Pace | None) -> StepCost:
    """Measure the link of these ranks, and the seconds of a step that it does not explain.

    Args:
        learn: a learner that these ranks train together.
        step: the pace at which they do.
        offline: seconds of a step in which gradients do not travel.
        alone: a step in rank 0's process alone; `None`: not known.
        single: the same with as many threads as are best for it; `None`: not known.
    """
    sent = _sent(learn)
    n = distributed.world_size()
    device = learn.dls.device
    largest = max(sent)  # A large model may leave no memory for the sum.
    link = measure_link(device, sizes=(1 << 10, max(1 << 14, largest // 4), max(1 << 16, largest)))
    batch = step.samples / n
    if alone is None or abs(alone.samples - batch) > 0.1 * batch:  # Ranks may share one batch.
        alone, single = Pace(offline, batch), None
    here = min(n, int(os.environ.get("LOCAL_WORLD_SIZE", n)))
    beyond = step.seconds - offline - sum(all_reduce_seconds(size, n, link) for size in sent)
    at_once = None
    if device.type == "cpu":
        at_once = distributed.broadcast(max(1.0, usable_cores() / torch.get_num_threads()))
    return StepCost(
        here, -(-n // here), (single or alone).seconds, alone.seconds, offline, at_once, batch, sent, link, beyond
    )


@not_collective("the ranks are forks of this process")
def cost_in_forks(learn: "Learner", n_steps: int, step: Pace, timeout: float = 120.0) -> StepCost:
    """Measure the cost of a step on two ranks, by two forks of this process that train together on the CPU.

    Args:
        learn: the learner; the forks have copies.
        n_steps: the least number of steps in each trial; short steps need more.
        step: the pace in this process.
        timeout: seconds for all of it.

    Raises:
        RuntimeError: it failed in a fork; with the cause in a line.
    """
    n = max(n_steps, min(200, int(0.5 / step.seconds)))
    jobs = [partial(_measure_as_rank, learn, n, timeout, rank) for rank in range(2)]
    results = run_in_forks(jobs, time.monotonic() + timeout)
    if failed := [each for each in results if isinstance(each, ExceptionReport)]:
        raise RuntimeError(cause(min(failed, key=lambda each: each.order).traceback))
    return StepCost.from_json(results[0])._replace(single=step.seconds)


@collective
def _measure_as_rank(learn: "Learner", n_steps: int, timeout: float, rank: int, folder: Path) -> dict[str, Any]:
    join_forks(folder, rank, 2, timedelta(seconds=timeout))
    learn.remove_cbs([cb for cb in learn.cbs if isinstance(cb, DataParallelCallback)])
    with learn.added_cbs([] if member_of(learn.cbs) else DistributedCallback()):
        step, offline = pace(learn, n_steps), pace(learn, n_steps, network=False)
        alone = pace_alone(learn, n_steps, timeout)
        return cost_on_ranks(learn, step, offline.seconds, None if isinstance(alone, str) else alone, None).as_json()


def _sent(learn: "Learner") -> list[int]:
    """Return the bytes of each bucket that DDP sends in a step."""
    member = member_of(learn.cbs)
    halved = member is not None and member.comm_hook in ("bf16", "fp16")
    cap = None if member is None else member.ddp_kwargs.get("bucket_cap_mb")
    sizes = (p.numel() * p.itemsize for p in unwrap(learn.model).parameters() if p.requires_grad)
    return [size // 2 if halved else size for size in ddp_buckets(sizes, cap)]
