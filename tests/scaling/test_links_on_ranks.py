"""The measurement of a link: by collectives that take a known time, and by real ones."""

import itertools
import math
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from learnerkit import distributed
from learnerkit.scaling import links
from learnerkit.scaling.links import Link, all_reduce_seconds, ddp_buckets, measure_link

CPU = torch.device("cpu")


@pytest.mark.ranks(2, soak=[4])
def test_a_known_link_is_found(monkeypatch):
    n, true = distributed.world_size(), Link(2e-3 / distributed.world_size(), 1e8)
    sizes, group, real, asked = (1 << 10, 1 << 17, 1 << 20), distributed.group("gradients"), dist.all_reduce, []

    def slow(x, *args, **kwargs):
        if kwargs.get("group") is not group:
            return real(x, *args, **kwargs)
        asked.append(x.numel() * 4)
        time.sleep(all_reduce_seconds(asked[-1], n, true))

    monkeypatch.setattr(dist, "all_reduce", slow)
    monkeypatch.setattr(links, "SECONDS", 0.1)
    found = measure_link(CPU, sizes)
    assert found[:2] == pytest.approx(true[:2], rel=0.3)
    assert distributed.same_everywhere(found)
    assert asked == [*sizes] * (links.WARM + links.LEAST)


@pytest.mark.ranks(slow=[2], soak=[4])
def test_the_real_link_is_measured_in_a_second_or_two():
    start = time.monotonic()
    found = measure_link(CPU)
    assert time.monotonic() - start < 60  # on an idle machine 1.5
    assert distributed.same_everywhere(found)
    assert 1e-6 < found.latency < 1
    assert 1e6 < found.bandwidth <= math.inf
    assert found.error < 5


def test_one_process_alone_has_no_link():
    with pytest.raises(ValueError, match="no link to measure"):
        measure_link(CPU)


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
        step, ddp = training_step(widths, bucket_cap_mb=cap, process_group=distributed.group("gradients"))
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
