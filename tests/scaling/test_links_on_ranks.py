"""The measurement of a link: by collectives that take a known time, and by real ones."""

import fcntl
import math
import os
import time

import pytest
import torch
import torch.distributed as dist

from learnerkit import world
from learnerkit.scaling import links
from learnerkit.scaling.links import Link, all_reduce_seconds, measure_link, measure_pair

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
