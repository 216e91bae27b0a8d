"""The link between ranks, and what they take from each other on one machine: measured, and as a model of a few numbers.

It knows no learner. An all-reduce takes the time of the ring (Patarasuk and Yuan 2009): 2 (N - 1) messages one after
the other, and 2 (N - 1) / N of the bytes through the slowest part.
"""

import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from learnerkit import world
from learnerkit.parallel.forks import join_forks, run_in_forks

SIZES = (1 << 10, 1 << 18, 1 << 23)
"""Bytes of the all-reduces that are timed, unless others are asked for."""

WARM, LEAST, MOST, SECONDS = 3, 7, 100, 1.0
"""Repetitions before a measurement; in it at least and at most; and seconds that it takes if these allow it."""


class Link(NamedTuple):
    """How fast messages are between two ranks.

    Attributes:
        latency: seconds until a message of no length is there.
        bandwidth: bytes a second.
        error: how well this fits what was measured: the largest difference, as a share of the measured time.
    """

    latency: float
    bandwidth: float
    error: float = 0.0


class Shared(NamedTuple):
    """What a rank's own work takes if several ranks share the cores of one machine.

    Attributes:
        single: seconds in a process without other ranks, with all its threads.
        alone: seconds on a rank, which has one thread, while the others wait.
        together: seconds on each of two ranks at the same time.
        cores: of this machine.
    """

    single: float
    alone: float
    together: float
    cores: int

    def seconds(self, ranks: int) -> float:
        """Seconds on each of so many ranks of one machine.

        Each other rank is taken to slow it by what one does; and no more ranks than cores compute at a time.
        """
        if ranks == 1:
            return self.single
        slowed = self.alone + (self.together - self.alone) * (ranks - 1)
        return max(slowed, self.alone, self.alone * ranks / self.cores)


# The model


def fitted(sizes: Sequence[float], seconds: Sequence[float], ranks: int) -> Link:
    """Fit latency and bandwidth to all-reduces over a ring: least squares of the relative errors, never negative.

    Args:
        sizes: bytes of each all-reduce, of two sizes at least.
        seconds: that each took, above 0.
        ranks: how many took part, 2 or more.

    Raises:
        ValueError: less than two sizes or ranks, or a time that is not above 0.
    """
    if ranks < 2 or len(set(sizes)) < 2 or len(sizes) != len(seconds) or not min(seconds) > 0:
        raise ValueError(
            f"got sizes={list(sizes)}, seconds={list(seconds)} and ranks={ranks}; a link is fitted to as many times "
            "above 0 as sizes, of two different sizes and two ranks at least"
        )
    # Each row says: (steps * latency + carried / bandwidth) / seconds = 1. Large sizes must not outweigh the small.
    rows = [(2 * (ranks - 1) / t, 2 * (ranks - 1) / ranks * size / t) for size, t in zip(sizes, seconds, strict=True)]
    a, b = sum(x for x, _ in rows), sum(y for _, y in rows)
    aa, ab, bb = sum(x * x for x, _ in rows), sum(x * y for x, y in rows), sum(y * y for _, y in rows)
    determinant = aa * bb - ab * ab
    latency, per_byte = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if latency < 0:
        latency, per_byte = 0.0, b / bb
    elif per_byte <= 0:
        latency, per_byte = a / aa, 0.0
    error = max(abs(x * latency + y * per_byte - 1) for x, y in rows)
    return Link(latency, 1 / per_byte if per_byte else math.inf, error)


def all_reduce_seconds(
    size: float, ranks: int, link: Link, *, topology: str = "ring", machines: int = 1, inter: Link | None = None
) -> float:
    """Seconds that an all-reduce takes.

    'ring' is the model of this module. 'tree' is two binary trees, each for half of the bytes, as NCCL has them
    (Sanders, Speck and Träff 2009): as many messages as the trees are high, and all bytes up and down. As NCCL reckons
    (src/graph/tuning.cc), a ring over several machines goes from one to another 2 times their number.

    Args:
        size: bytes.
        ranks: that take part, spread evenly.
        link: between ranks of a machine.
        topology: 'ring' or 'tree'.
        machines: how many.
        inter: between machines; `None`: the same link.
    """
    if ranks == 1:
        return 0.0
    inter = inter or link
    between = link.bandwidth if machines == 1 else inter.bandwidth if ranks == machines else None
    slowest = min(link.bandwidth, inter.bandwidth) if between is None else between
    if topology == "ring" or ranks == 2:  # of two ranks a tree is a ring
        far = 0 if machines == 1 else min(2 * machines, 2 * (ranks - 1))
        near, carried = 2 * (ranks - 1) - far, 2 * (ranks - 1) / ranks * size
    else:
        far = 2 * math.ceil(math.log2(machines))
        near, carried = 2 * math.ceil(math.log2(math.ceil(ranks / machines))), 2 * size
    return near * link.latency + far * inter.latency + carried / slowest


def ddp_buckets(gradients: Iterable[int], cap_mb: float | None = None) -> list[int]:
    """Bytes of the buckets in which DDP averages gradients, in the order in which they leave.

    Args:
        gradients: bytes of each, in the order of the parameters; backward comes to the last ones first.
        cap_mb: DDP's `bucket_cap_mb`; `None`: 1 MB for the first bucket, and 25 for the others.
    """
    found, cap = [0], cap_mb or 1.0
    for size in reversed(list(gradients)):
        if found[-1] >= cap * 2**20:
            found.append(0)
            cap = cap_mb or 25.0
        found[-1] += size
    return found


# The measurement


def measure_link(device: torch.device, sizes: Sequence[int] = SIZES) -> Link:
    """Measure the link of this group, as DDP averages the gradients; every rank must reach this.

    That is an all-reduce, and to copy its bytes into a bucket and back. On a group of several machines this is the
    slowest link in it. On an accelerator a short wait for it is in the latency.

    Args:
        device: of the gradients.
        sizes: bytes of the all-reduces that are timed; best with those of the gradients among them.

    Raises:
        ValueError: this is the only process of the run.
    """
    if world.world_size() == 1:
        raise ValueError("one process has no link to measure; measure_pair starts two, or give one as Link(...)")
    world.join(what="measure_link")
    seconds, _ = _measure(device, sizes, lambda: None)
    return fitted(sizes, seconds, world.world_size())


def measure_pair(
    load: Callable[[], object], sizes: Sequence[int] = SIZES, timeout: float = 120.0
) -> tuple[Link, Shared]:
    """Measure on one process what two would find here: on the CPU, by two forks of this process.

    The forks do their work and reduce, in turns, so that each finds the machine as a training step leaves it.

    Args:
        load: the work of a step without communication. It is called here, so what it changes is to be put back
            (`snapshot.unchanged`), and in the forks.
        sizes: as in `measure_link`.
        timeout: seconds for all of it.

    Raises:
        RuntimeError: this process is one of several already or cannot be forked, or the measurement failed.
    """
    if world.world_size() > 1:
        raise RuntimeError("measure_pair was called on one of several ranks; call measure_link on each of them")
    if "fork" not in multiprocessing.get_all_start_methods():
        raise RuntimeError(f"measure_pair forks processes, which {sys.platform} cannot; give a link as Link(...)")
    end = time.monotonic() + timeout
    single = median(_repeated(load, _repetitions(load)))
    found = run_in_forks([partial(_as_one_of_two, load, sizes, timeout, rank) for rank in range(2)], end)
    if failed := sorted((each["when"], each["error"]) for each in found if "error" in each):
        raise RuntimeError(f"measure_pair: one of its two processes failed:\n{failed[0][1].rstrip()}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shared = Shared(single, found[0]["alone"], found[0]["together"], cores)
    return fitted(sizes, found[0]["seconds"], 2), shared


def _as_one_of_two(load: Callable[[], object], sizes: Sequence[int], timeout: float, rank: int, folder: Path) -> dict:
    join_forks(folder, rank, 2, timedelta(seconds=timeout))
    n = world.reduce(_repetitions(load), "min")
    alone = world.broadcast(median(_repeated(load, n)) if rank == 0 else 0.0)  # rank 1 waits, and uses no core
    seconds, together = _measure(torch.device("cpu"), sizes, load)
    return {"alone": alone, "together": together, "seconds": seconds}


def _measure(device: torch.device, sizes: Sequence[int], load: Callable[[], object]) -> tuple[list[float], float]:
    """Seconds of an all-reduce of each size, and of the load that comes before each; every rank must reach this.

    All ranks leave an all-reduce together. So of each turn the largest load over the ranks counts, and the smallest
    all-reduce: that of the last rank to come, in which there is no waiting for others.
    """
    group, n = world.group("gradients", device.type), world.world_size()
    pairs = [torch.zeros(2, max(1, size // 4), device=device) for size in sizes]

    def average(gradients: Tensor, bucket: Tensor) -> None:  # what DDP does
        bucket.copy_(gradients).div_(n)
        dist.all_reduce(bucket, group=group)
        gradients.copy_(bucket)

    def timed(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)  # a host-device sync, without which this is the time of a launch
        return time.perf_counter() - start

    def turn() -> list[tuple[float, float]]:
        return [(timed(load), timed(partial(average, *pair))) for pair in pairs]

    turns = [turn() for _ in range(int(world.reduce(_repetitions(turn), "min")))]
    found = torch.tensor(world.all_gather(turns), dtype=torch.float64)  # ranks, turns, sizes, (load, all-reduce)
    return found[..., 1].amin(0).quantile(0.5, 0).tolist(), float(found[..., 0].amax(0).quantile(0.5))


def _repetitions(call: Callable[[], object]) -> int:
    """How often to repeat a measurement; the calls that tell warm it up."""
    return max(LEAST, min(MOST, int(SECONDS / min(_repeated(call, WARM)))))


def _repeated(call: Callable[[], object], n: int) -> list[float]:
    """Seconds of each of `n` calls."""
    found = []
    for _ in range(n):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found
