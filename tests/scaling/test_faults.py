"""Faults of known sizes, put in on purpose on two ranks: what the scaling report finds, and how exactly."""

import os
import time

import pytest
from scaling_jobs import PART_OF, Took, make_learner

from learnerkit import Callback, distributed
from learnerkit.scaling.making import Making
from learnerkit.scaling.parts import REDUCE, SKIPPED

STEPS = 20
DUE = STEPS + SKIPPED + 1  # of each trial
ON_ONE_RANK = ("dataset", "forward", "backward", "callback", "optimizer")

# (fault, rank, options): `work` is of each step on both ranks, seconds of sleep or a whole number of matrix products.
FAULTS = [
    *((fault, rank, {}) for fault in ON_ONE_RANK for rank in (0, 1)),
    *((fault, rank, {"work": 0.005, "seed": 1}) for fault in ON_ONE_RANK for rank in (0, 1)),
    ("twice", 1, {"work": 0.01}),
    ("twice", 0, {"work": 0.02, "seed": 1}),
    ("products", 1, {"work": 30}),
    ("products", 0, {"work": 40, "seed": 1}),
    *(("links", None, {"speed": speed, "seed": seed}) for seed, speed in enumerate((5e6, 1e7, 2e7))),
    *(("small", None, {"width": width, "seed": seed}) for seed, width in enumerate((8, 16, 32))),
]
KINDS = ({}, {"work": 0.002}, {"work": 0.01}, {"work": 4}, {"width": 1024})
CLEAN = [{"seed": seed, **kind} for seed in range(4) for kind in KINDS]


@pytest.fixture(scope="module")
def idle():
    """Skip what compares times where others compute."""
    if os.getloadavg()[0] > 1.5:
        pytest.skip("sizes are compared with times, for which the machine must be idle")


def named(value):
    return ",".join(f"{k}={v:g}" for k, v in value.items()) or "plain" if isinstance(value, dict) else str(value)


class Notes(list):
    """After each batch of a learner's trials: (time, seconds that the faults have taken by then)."""

    def __init__(self, learn):
        learn.add_cb(Callback(order=-100, after_batch=lambda cb: self.append((time.perf_counter(), Took.seconds))))

    def of(self, begin):
        """Seconds of a step of the trial whose first batch has this index, and those that faults took of it."""
        steps = self[begin:][:DUE]
        (start, before), (end, after) = steps[SKIPPED], steps[-1]
        return (end - start) / STEPS, (after - before) / STEPS


def measured(fault, rank=None, **options):
    """The report of the parts; what the faults took of a step on each rank; by how much parts miss the wall time."""
    learn = make_learner(fault, rank, **options)
    notes = Notes(learn)
    with learn.distrib_ctx():
        report = Making(learn, STEPS, 60.0).measure_parts()
    walls, took = zip(*distributed.all_gather(notes.of(0)), strict=True)
    misses = [sum(part[r] for part in report.parts.values()) / wall - 1 for r, wall in enumerate(walls)]
    return report, took, max(misses, key=abs)


def show(*columns):
    """Print a line."""
    if distributed.is_main():
        print("  ".join(columns), flush=True)


def check_fault(fault, rank, **options):
    """Have the report find a fault; return the size that it finds over the true one, and what the parts miss."""
    report, took, missed = measured(fault, rank, **options)
    found = report.slowest
    if fault == "links":
        right = found is None and max(report.parts, key=lambda name: report.parts[name]) == REDUCE
        size, put_in = report.communication, min(took)
    else:
        right = found is not None and (found.rank, found.part) == (rank, PART_OF[fault])
        size, put_in = found.seconds if found else 0.0, took[rank] - took[1 - rank]
    show(
        f"{fault:9} rank {rank!s:4} {named(options):17}",
        f"put in {1e3 * put_in:6.2f} ms, found {1e3 * size:6.2f} ({size / put_in - 1:+6.1%})",
        f"parts over wall time {missed:+.2%}",
        f"rank {found.rank} in '{found.part}', cost {1e3 * found.cost:.2f} ms" if found else "no slow rank",
    )
    assert right
    return size / put_in, missed


@pytest.mark.soak
@pytest.mark.usefixtures("idle")
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("fault", "rank", "options"), [each for each in FAULTS if each[0] != "small"], ids=named)
def test_a_fault_is_found_with_its_size(fault, rank, options):
    size, missed = check_fault(fault, rank, **options)
    assert size == pytest.approx(1, abs=0.1)
    assert abs(missed) < 0.02


@pytest.mark.soak
@pytest.mark.ranks(2)
def test_a_rank_that_computes_more_is_found():
    for left in (2, 1, 0):  # others may use this machine: all ranks see the same report, and measure again
        try:
            size, missed = check_fault("products", 1, work=4, times=5)
            assert 0.5 < size < 2
            assert abs(missed) < 0.1
            return
        except AssertionError:
            if not left:
                raise


@pytest.mark.soak
@pytest.mark.usefixtures("idle")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [options for fault, _, options in FAULTS if fault == "small"], ids=named)
def test_a_model_too_small_to_be_worth_it_is_told(options):
    learn = make_learner(**options)
    notes = Notes(learn)
    with learn.distrib_ctx():
        report = learn.scaling_report(STEPS, advice=False, show=False)
    # The last two trials but for a step that is tried: alone with one thread, and with one for each core.
    alone = distributed.broadcast(min(notes.of(begin)[0] for begin in (-2 * DUE - SKIPPED - 2, -DUE)))
    pair = max(seconds for seconds, _ in distributed.all_gather(notes.of(DUE)))
    show(f"small {named(options)}: efficiency {report.efficiency:.1%}, by the test's clock {alone / pair:.1%}")
    assert report.slowest is None
    assert "one process does as well" in str(report)
    assert report.efficiency == pytest.approx(alone / pair, rel=0.1)


@pytest.mark.soak
@pytest.mark.usefixtures("idle")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", CLEAN, ids=named)
def test_no_alarm_is_given_without_a_fault(options):
    report, _, missed = measured("none", **options)
    step = 1e3 * max(report.walls)
    show(f"none {named(options):17} a step {step:6.2f} ms, parts over wall time {missed:+.2%}, found {report.slowest}")
    assert report.slowest is None
    assert abs(missed) < 0.02
