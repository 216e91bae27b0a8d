"""The forecast: arithmetic on made-up measurements, its words, and measurements by forks and on real ranks."""

import contextlib
import fcntl
import io
import itertools
import json
import math
import os
import time
from statistics import median

import pytest
import torch
import torch.distributed as dist
from helpers import raises
from rank_pool import Ranks
from scaling_jobs import make_learner
from torch import nn

from learnerkit import Callback, DataLoaders, Learner, ScalingReport, distributed
from learnerkit.scaling import forecast
from learnerkit.scaling.forecast import StepCost, all_reduce_seconds, cost_in_forks, cost_on_ranks
from learnerkit.scaling.trials import Pace, pace

SOME = (1, 2, 4, 8, 16)


def cost(**kwargs):
    facts = {"ranks": 2, "batch": 8.0, "single": 1.0, "compute": 1.0, "step": 1.0, "message": 0.0, "gradients": 0.0}
    return StepCost(**facts | kwargs)


def test_an_all_reduce_is_that_of_a_ring():
    found = cost(message=0.5, gradients=2.0)
    assert found.all_reduce_on(2) == 2.0
    assert found.all_reduce_on(4) == pytest.approx(3 * 0.5 + (3 / 4) / (1 / 2) * 1.5)
    assert cost(ranks=4, message=0.5, gradients=2.0).all_reduce_on(2) == pytest.approx(0.5 / 3 + 2 / 3 * 1.5)


def test_ranks_beyond_the_cores_wait_for_a_core():
    found = cost(single=1.0, compute=2.0, at_once=4.0)
    assert [found.compute_on(n) for n in (1, 2, 4, 8)] == [1, 2, 2, 4]
    assert cost(ranks=8, compute=2.0, at_once=4.0).compute_on(2) == 1
    assert cost(compute=2.0).compute_on(64) == 2  # each has its own device


@pytest.mark.parametrize("step", [3.0, 2.5, 2.0])  # gradients are sent longer than measured, or are hidden in part
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_the_ranks_that_were_measured_the_forecast_is_the_measurement(step, ranks):
    found = cost(ranks=ranks, step=step, message=0.1, gradients=1.5).forecast([ranks], None)
    assert [row.ranks for row in found.rows] == [1, ranks]
    assert found.rows[1].step == pytest.approx(step)
    assert found.rows[1].samples == pytest.approx(ranks * 8 / step)
    assert found.rows[1].efficiency == pytest.approx(1 / step)
    assert found.rows[0][1:] == (1, 0, 1, 8, 1)


def test_the_time_to_a_loss_is_steps_by_the_noise_scale_times_their_length():
    for noise in (1e-6, 100, 1e9):
        for row in cost(step=1.5).forecast(SOME, noise).rows:
            expected = row.step * (1 + noise / (row.ranks * 8)) / (1 + noise / 8)
            assert row.time == pytest.approx(expected, rel=1e-9)
    plain = cost(step=1.5).forecast(SOME, None)
    assert cost(step=1.5).forecast(SOME, math.inf) == plain
    assert [row.time for row in plain.rows] == [row.step / row.ranks for row in plain.rows]


def test_ranks_are_worth_it_while_each_that_is_added_brings_half_of_the_first():
    # With free sending and batch = noise scale, n ranks are 2 n / (n + 1) times as fast.
    assert cost().forecast(SOME, None).best == 16
    assert [cost(batch=10.0).forecast(SOME, noise).best for noise in (10, 20, 100, 200)] == [1, 2, 4, 8]


def test_a_forecast_is_words_and_a_table():
    found = cost(step=1.3, message=0.5, gradients=0.5).forecast(SOME, None)
    words, table = str(found).split("\n\n")
    assert words == (
        "2 ranks are worth it: 1.5 times as fast for the same samples as one, at an efficiency of 77%.\n"
        "With 4 each added rank would bring less than 50% of what one rank does alone: 1.7 times as fast as one."
    )
    assert table.split("\n")[0].split() == ["ranks", "step", "ms", "waiting", "efficiency", "samples/s", "time"]
    assert len({len(line) for line in table.split("\n")}) == 1
    assert len(table.split("\n")) == 6
    assert str(cost(step=9.0).forecast(SOME, 4)).startswith("More than one rank is not worth it.\nWith 2 each")


@pytest.mark.parametrize(
    ("ranks", "noise", "match"),
    [
        ([0], None, "ranks=0; it is the number of ranks, 1 or more"),
        ([2, 4.0], None, r"ranks=4\.0"),
        (8, None, r"ranks=8; it is a sequence of numbers of ranks, such as \[2, 8\]"),
        ([2], -5, "noise=-5"),
        ([2], math.nan, "noise=nan"),
    ],
)
def test_numbers_out_of_range_are_refused(ranks, noise, match):
    with pytest.raises(ValueError, match=match):
        cost().forecast(ranks, noise)


def test_numbers_of_ranks_may_come_from_an_iterator():
    assert cost().forecast(iter([4, 2]), None).rows == cost().forecast([4, 2], None).rows


def test_an_all_reduce_as_large_as_ddps_buckets_is_measured(monkeypatch):
    learn = make_learner()
    learn.model = nn.Linear(5000, 5000, bias=False)
    asked = []
    monkeypatch.setattr(forecast, "all_reduce_seconds", lambda device, n: asked.append(n) or 1e-9 * n)
    monkeypatch.setattr("learnerkit.scaling.forecast.distributed.world_size", lambda: 5)
    monkeypatch.setattr("learnerkit.scaling.forecast.distributed.broadcast", lambda value: value)
    found = cost_on_ranks(learn, Pace(0.3, 40), 0.05, Pace(0.04, 8))
    assert asked == [1 << 10, 25 * 2**20]
    assert found.gradients == pytest.approx(0.1, rel=1e-4)  # 100 MB at as many bytes a second
    assert (found.ranks, found.batch, found.single, found.compute, found.step) == (5, 8, 0.04, 0.05, 0.3)
    assert cost_on_ranks(learn, Pace(0.3, 40), 0.05, Pace(0.04, 40)).single == 0.05  # it had the batch of all ranks


# By forks


class Turns(nn.Module):
    """A layer that one process of a machine can run at a time, for 15 ms."""

    def __init__(self, path):
        super().__init__()
        self.layer, self.path = nn.Linear(64, 1), path

    def forward(self, x):
        with open(self.path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(15e-3)
        return self.layer(x)


@pytest.mark.slow
def test_two_processes_are_started_to_measure_what_they_share(tmp_path):
    learn = make_learner()
    learn.model = Turns(tmp_path / "lock")
    before = [p.clone() for p in learn.model.parameters()]
    found = cost_in_forks(learn, 10, Pace(5e-2, 8))
    assert (found.ranks, found.single, found.batch) == (2, 5e-2, 8)
    assert found.compute > 20e-3  # on an idle machine 30
    assert 1e-6 < found.message < 1
    assert not dist.is_initialized()
    assert all(torch.equal(p, q) for p, q in zip(before, learn.model.parameters(), strict=True))
    # Of 8, 8 and 2 samples a step, two processes have 8 and 1.
    assert cost_in_forks(make_learner(n=18), 4, Pace(5e-2, 8)).batch == 8


def test_what_fails_in_a_fork_is_a_note(capsys):
    here = os.getpid()

    def fail(cb):
        if os.getpid() != here:
            raise KeyError("no such thing")

    learn = make_learner()
    learn.add_cb(Callback(after_pred=fail))
    report = learn.scaling_report(2, advice=False)
    assert report.cost is None
    assert "no forecast, as two processes could not be tried: KeyError: 'no such thing'" in capsys.readouterr().out
    with raises(ValueError, "forecast=True"):
        report.forecast()
    assert ScalingReport.from_json(report.to_json()) == report


# On real ranks

WIDTHS = {"small": (32, 64, 10), "million": (784, 800, 512, 40), "wide": (784, 2048, 2048, 10)}


def job(widths):
    torch.manual_seed(0)
    layers = [layer for i, o in itertools.pairwise(widths) for layer in (nn.Linear(i, o), nn.ReLU())]
    data = torch.utils.data.TensorDataset(torch.randn(6400, widths[0]), torch.randint(widths[-1], (6400,)))
    dls = DataLoaders.from_datasets(data, data, bs=32, device="cpu")
    return Learner(dls, nn.Sequential(*layers[:-1]), nn.CrossEntropyLoss(), lr=1e-3)


def seconds_of_a_step(widths, n):
    learn = job(widths)
    with learn.distrib_ctx():
        return pace(learn, n).seconds


@pytest.fixture(scope="module")
def idle():
    """Skip what compares times of two moments where others compute."""
    if os.getloadavg()[0] > 1.5:
        pytest.skip("times of two moments are compared, for which the machine must be idle")


@pytest.mark.soak
@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("name", WIDTHS)
def test_the_step_of_two_ranks_is_forecast_from_one(rank_pools, name):
    ratios = []
    for _ in range(9):
        with contextlib.redirect_stdout(io.StringIO()):
            report = job(WIDTHS[name]).scaling_report(100, advice=False)
        expected = next(row.step for row in report.forecast().rows if row.ranks == 2)
        ratios.append(expected / max(rank_pools.run(Ranks(2), seconds_of_a_step, widths=WIDTHS[name], n=200)))
    print(f"forecast over measured, {name}: {sorted(round(ratio, 2) for ratio in ratios)}")
    assert median(ratios) == pytest.approx(1, abs=0.15)


@pytest.mark.ranks(slow=[2])
def test_ranks_measure_it_themselves():
    with contextlib.redirect_stdout(io.StringIO()), (learn := make_learner()).distrib_ctx():
        report = learn.scaling_report(5, advice=False)
    found = report.cost
    assert (found.ranks, found.batch) == (2, 8)
    assert distributed.same_everywhere(report.to_json())
    assert report.forecast([2]).rows[1].step == pytest.approx(max(found.compute, report.seconds))
    assert f"{'ranks':>5}  step ms" in str(report)
    assert ScalingReport.from_json(report.to_json()) == report
    rows = [row._asdict() for row in report.forecast().rows]
    assert json.loads(report.to_json())["forecast"] == rows


@pytest.mark.ranks(slow=[2])
def test_ranks_on_several_machines_have_no_forecast(monkeypatch):
    with monkeypatch.context() as changed, (learn := make_learner()).distrib_ctx():
        changed.setenv("LOCAL_WORLD_SIZE", "1")
        report = learn.scaling_report(2, advice=False, show=False)
    assert report.cost is None
    assert "no forecast: the processes are on several machines, and it is for one" in report.notes


@pytest.mark.ranks(2, soak=[4])
def test_the_rank_that_comes_last_says_how_long_an_all_reduce_takes(monkeypatch):
    group, real, asked = distributed.group("gradients"), dist.all_reduce, []

    def slow(x, *args, **kwargs):
        if kwargs.get("group") is not group:
            return real(x, *args, **kwargs)
        asked.append(x.numel() * 4)
        time.sleep(0.01 * (1 + distributed.rank()))

    monkeypatch.setattr(dist, "all_reduce", slow)
    found = all_reduce_seconds(torch.device("cpu"), 1 << 12)
    assert found == pytest.approx(0.01, rel=0.5)
    assert distributed.same_everywhere(found)
    assert asked == [1 << 12] * (forecast.WARM + forecast.TIMES)
