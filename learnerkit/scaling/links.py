"""The link between ranks: measured, and as a model of two numbers.

It needs no learner. An all-reduce takes the time of the ring (Patarasuk and Yuan 2009): 2 (N - 1) messages one after
the other, and 2 (N - 1) / N of the bytes through the slowest part.
"""

import math
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from learnerkit import distributed
from learnerkit.marks import collective

SIZES = (1 << 10, 1 << 18, 1 << 23)
"""Bytes of the all-reduces that are timed, unless others are asked for."""

WARM, LEAST, MOST, SECONDS = 3, 7, 100, 1.0
"""Repetitions before a measurement; in it at least and at most; and seconds that it takes if these allow it."""


class Link(NamedTuple):
    """The speed of messages between two ranks.

    Attributes:
        latency: seconds that an empty message takes.
        bandwidth: bytes a second.
        error: the largest error of the fit, as a share of the measured time.
    """

    latency: float
    bandwidth: float
    error: float = 0.0

    def as_json(self) -> dict[str, float | None]:
        """Return it as plain data; a bandwidth without limit is `None`."""
        return self._asdict() | {"bandwidth": self.bandwidth if math.isfinite(self.bandwidth) else None}

    @classmethod
    def from_json(cls, facts: dict[str, float | None]) -> "Link":
        """Read what `as_json` has returned."""
        known = {name: x for name, x in facts.items() if x is not None}
        return cls(**{"bandwidth": math.inf} | known)


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
    aa = sum(x * x for x, _ in rows)
    ab = sum(x * y for x, y in rows)
    bb = sum(y * y for _, y in rows)
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
    """Return the seconds that an all-reduce takes.

    'ring' is the model of this module. 'tree' is two binary trees, each for half of the bytes, as NCCL has them
    (Sanders, Speck and Träff 2009): as many messages as the trees are high, and all bytes up and down. As NCCL reckons
    (src/graph/tuning.cc), a ring over several machines goes from one to another 2 times their number.

    Args:
        size: bytes.
        ranks: how many take part, spread evenly.
        link: the link between ranks of a machine.
        topology: 'ring' or 'tree'.
        machines: how many.
        inter: the link between machines; `None`: the same link.
    """
    if ranks == 1:
        return 0.0
    inter = inter or link
    if machines == 1:
        slowest = link.bandwidth
    elif ranks == machines:
        slowest = inter.bandwidth
    else:
        slowest = min(link.bandwidth, inter.bandwidth)
    if topology == "ring" or ranks == 2:  # A tree of two ranks is a ring.
        far = 0 if machines == 1 else min(2 * machines, 2 * (ranks - 1))
        near, carried = 2 * (ranks - 1) - far, 2 * (ranks - 1) / ranks * size
    else:
        far = 2 * math.ceil(math.log2(machines))
        near, carried = 2 * math.ceil(math.log2(math.ceil(ranks / machines))), 2 * size
    return near * link.latency + far * inter.latency + carried / slowest


def ddp_buckets(gradients: Iterable[int], cap_mb: float | None = None) -> list[int]:
    """Return the bytes of the buckets in which DDP averages gradients, in the order in which they are sent.

    Args:
        gradients: bytes of each, in the order of the parameters; backward comes to the last ones first.
        cap_mb: DDP's `bucket_cap_mb`; `None`: 1 MB for the first bucket, and 25 for the others.
    """
    buckets, cap = [0], cap_mb or 1.0
    for size in reversed(list(gradients)):
        if buckets[-1] >= cap * 2**20:
            buckets.append(0)
            cap = cap_mb or 25.0
        buckets[-1] += size
    return buckets


# The measurement


@collective
def measure_link(device: torch.device, sizes: Sequence[int] = SIZES) -> Link:
    """Measure the link of this group, as DDP averages the gradients.

    What is timed is an all-reduce, with the copies into its bucket and back. In a group of several machines this is the
    slowest link. On an accelerator the latency includes a short wait for the device.

    Args:
        device: of the gradients.
        sizes: bytes of the all-reduces that are timed; best with those of the gradients among them.

    Raises:
        ValueError: this is the only process of the run.
    """
    n = distributed.world_size()
    if n == 1:
        raise ValueError("one process has no link to measure: start several, or give one as Link(latency, bandwidth)")
    distributed.join(what="measure_link")
    group = distributed.group("gradients", device.type)
    pairs = [torch.zeros(2, max(1, size // 4), device=device) for size in sizes]

    def seconds_of(gradients: Tensor, bucket: Tensor) -> float:  # as DDP averages them
        start = time.perf_counter()
        bucket.copy_(gradients).div_(n)
        dist.all_reduce(bucket, group=group)
        gradients.copy_(bucket)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)  # A host-device sync: otherwise this would time the launch.
        return time.perf_counter() - start

    def measure() -> list[float]:
        return [seconds_of(*pair) for pair in pairs]

    shortest = min(sum(measure()) for _ in range(WARM))
    times = int(distributed.reduce(float(max(LEAST, min(MOST, SECONDS / shortest))), "min"))
    seconds = torch.tensor(distributed.all_gather([measure() for _ in range(times)]), dtype=torch.float64)
    # The shape is (ranks, times, sizes). The rank that comes last has waited for no other, so its time counts.
    return fitted(sizes, seconds.amin(0).quantile(0.5, 0).tolist(), n)
