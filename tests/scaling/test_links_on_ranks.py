"""The measurement of a link: by collectives that take a known time, and by real ones."""

import fcntl
import itertools
import math
import os
import time
from statistics import median

import pytest
import torch
import torch.distributed as dist
from rank_pool import Ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from learnerkit import world
from learnerkit.scaling import links
from learnerkit.scaling.forecast import forecast
from learnerkit.scaling.links import Link, all_reduce_seconds, ddp_buckets, measure_link, measure_pair

CPU = torch.device("cpu")


@pytest.mark.ranks(2, slow=[4])
def test_a_known_link_is_found(monkeypatch):
    n, true = world.world_size(), Link(2e-3 / world.world_size(), 1e8)
    sizes, group, real, asked = (1 << 10, 1 << 17, 1 << 20), world.group("gradients"), dist.all_reduce, []

    def slow(x, *args, **kwargs):
        if kwargs.get("group") is not group:
            return real(x, *args, **kwargs)
        asked.append(x.numel() * 4)
        time.sleep(all_reduce_seconds(asked[-1], n, true))

    monkeypatch.setattr(dist, "all_reduce", slow)
    monkeypatch.setattr(links, "SECONDS", 0.1)
    found = measure_link(CPU, sizes)
    assert found[:2] == pytest.approx(true[:2], rel=0.3)
    assert world.same_everywhere(found)
    assert asked == [*sizes] * (links.WARM + links.LEAST)


@pytest.mark.ranks(2, slow=[4])
def test_the_real_link_is_measured_in_a_second_or_two():
    start = time.monotonic()
    found = measure_link(CPU)
    assert time.monotonic() - start < 60  # on an idle machine 1.5
    assert world.same_everywhere(found)
    assert 1e-6 < found.latency < 1
    assert 1e6 < found.bandwidth <= math.inf
    assert found.error < 5


def test_one_process_alone_has_no_link():
    with pytest.raises(ValueError, match="measure_pair"):
        measure_link(CPU)


def held(path, seconds):
    """Work that one process can do at a time."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        time.sleep(seconds)


def test_two_processes_are_started_to_measure_what_they_share(tmp_path, monkeypatch):
    monkeypatch.setattr(links, "SECONDS", 0.1)
    found, shared = measure_pair(lambda: held(tmp_path / "lock", 0.004))
    assert shared.single == pytest.approx(0.004, rel=0.5)
    assert shared.alone == pytest.approx(0.004, rel=0.5)
    assert shared.together > 1.7 * shared.alone
    assert shared.cores == len(os.sched_getaffinity(0))
    assert 1e-6 < found.latency < 0.5 * shared.alone  # the wait for the other is not in it
    assert not dist.is_initialized()


def test_what_fails_in_one_of_them_is_told():
    here = os.getpid()

    def fails():
        time.sleep(1e-3)
        if os.getpid() != here:
            raise KeyError("no such thing")

    with pytest.raises(RuntimeError, match=r"(?s)one of its two processes failed.*no such thing"):
        measure_pair(fails)


@pytest.mark.ranks(2)
def test_on_several_ranks_the_other_measurement_is_named():
    with pytest.raises(RuntimeError, match="measure_link"):
        measure_pair(lambda: None)


# The forecast against what happens


WIDTHS = {"small": (32, 64, 10), "million": (784, 800, 512, 40)}


def training_step(widths, **options):
    """One step of a hand-written loop, with DDP if there are options for it; and the model inside."""
    torch.manual_seed(0)
    layers = [layer for i, o in itertools.pairwise(widths) for layer in (nn.Linear(i, o), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    outer = DistributedDataParallel(model, **options) if options else model
    opt = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x, y = torch.randn(32, widths[0]), torch.randint(widths[-1], (32,))

    def step():
        nn.functional.cross_entropy(outer(x), y).backward()
        opt.step()
        opt.zero_grad()

    return step, outer


def buckets(model, **options):
    return ddp_buckets((p.numel() * p.element_size() for p in model.parameters()), **options)


@pytest.mark.ranks(2)
def test_gradients_are_cut_into_buckets_as_ddp_cuts_them():
    for widths, cap in (((784, 800, 512, 40), None), ((784, 800, 512, 40), 2), ((600,) * 9, 3), ((32, 64, 10), None)):
        step, ddp = training_step(widths, bucket_cap_mb=cap, process_group=world.group("gradients"))
        seen = []

        def hook(state, bucket, seen=seen):
            seen.append(4 * bucket.buffer().numel())
            return default_hooks.allreduce_hook(None, bucket)

        ddp.register_comm_hook(None, hook)
        step()  # DDP makes the buckets again after the first step
        seen.clear()
        step()
        # Of a layer's weight and bias either may be ready first.
        assert seen == pytest.approx(buckets(ddp.module, cap_mb=cap), abs=4 * max(widths))


def seconds_of_a_step(widths, n):
    step, _ = training_step(widths, process_group=world.group("gradients"))
    took = []
    for _ in range(10 + n):
        start = time.perf_counter()
        step()
        took.append(time.perf_counter() - start)
    return median(took[10:])


@pytest.mark.soak
@pytest.mark.parametrize("name", WIDTHS)
def test_the_step_of_two_ranks_is_forecast_from_one(rank_pools, name):
    if os.getloadavg()[0] > 1.5:
        pytest.skip("times of two moments are compared, for which the machine must be idle")
    ratios = []
    for _ in range(9):
        step, model = training_step(WIDTHS[name])
        sent = buckets(model)
        link, shared = measure_pair(step, (1024, sum(sent) // 4, sum(sent)))
        expected = forecast(shared.seconds, sent, link, ranks=[2]).rows[1].step
        found = rank_pools.run(Ranks(2), seconds_of_a_step, widths=WIDTHS[name], n=100)
        ratios.append(expected / max(found))
    print(f"forecast over measured, {name}: {sorted(round(ratio, 2) for ratio in ratios)}")
    assert median(ratios) == pytest.approx(1, abs=0.15)
