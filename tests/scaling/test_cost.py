"""What a step costs on more ranks: as arithmetic, by forks of this process, and against real ranks."""

import contextlib
import fcntl
import io
import itertools
import json
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
from learnerkit.scaling.cost import StepCost, cost_in_forks, cost_of_one, cost_on_ranks
from learnerkit.scaling.links import Link, all_reduce_seconds
from learnerkit.scaling.trials import Pace, pace

LINK = Link(1e-4, 1e9)


def cost(**kwargs):
    facts = {
        "ranks": 2, "machines": 1, "single": 0.01, "alone": 0.012, "together": 0.014, "at_once": 4.0, "batch": 8.0,
        "sent": [10**6, 4 * 10**6], "link": LINK, "beyond": 0.001,
    }  # fmt: skip
    return StepCost(**facts | kwargs)


def test_ranks_slow_each_other_and_share_cores():
    found = cost()
    assert [found.compute(n) for n in (1, 2, 3, 4)] == pytest.approx([0.01, 0.014, 0.016, 0.018])
    assert found.compute(16) == pytest.approx(max(0.012 + 15 * 0.002, 0.012 * 16 / 4))
    assert cost(together=0.012).compute(8) == pytest.approx(0.024)  # two after each other on each core
    assert cost(together=0.011).compute(4) == pytest.approx(0.012)  # chance
    assert cost(at_once=None, together=0.012).compute(64) == pytest.approx(0.012)
    assert cost(ranks=4, together=0.018).compute(2) == pytest.approx(0.014)


@pytest.mark.parametrize("beyond", [0.001, 0.0, -0.001])
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_the_ranks_that_were_measured_the_forecast_is_the_measurement(beyond, ranks):
    found = cost(ranks=ranks, beyond=beyond)
    travels = sum(all_reduce_seconds(size, ranks, LINK) for size in found.sent)
    row = next(row for row in found.forecast(ranks=[ranks]).rows if row.ranks == ranks)
    assert row.step == pytest.approx(found.together + travels + beyond)
    assert row.samples == pytest.approx(ranks * 8 / row.step)


def test_other_links_can_be_given():
    gpus = cost_of_one(make_learner(), Pace(0.1, 64), backward=0.06)
    with raises(ValueError, "no link to others", "forecast(link=Link("):
        gpus.forecast()
    rows = gpus.forecast(link=Link(1e-5, 2e11), inter=Link(3e-5, 1e10), per_machine=8, ranks=[8, 16]).rows
    assert [(row.ranks, row.machines) for row in rows] == [(1, 1), (8, 1), (16, 2)]
    assert all(row.step == pytest.approx(0.1, rel=0.05) for row in rows)
    assert cost(machines=2).forecast(ranks=[4]).rows[-1].machines == 2


def test_it_can_be_read_again():
    for each in (cost(), cost(link=None, at_once=None), cost(link=Link(1.0, float("inf")))):
        assert StepCost.from_json(json.loads(json.dumps(each.as_json(), allow_nan=False))) == each


def test_the_link_is_measured_with_the_largest_bucket_on_all_machines(monkeypatch):
    learn = make_learner()
    learn.model = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(10)))
    asked = []
    monkeypatch.setattr("learnerkit.scaling.cost.measure_link", lambda device, sizes: asked.append(sizes) or LINK)
    monkeypatch.setattr("learnerkit.scaling.cost.distributed.world_size", lambda: 5)
    monkeypatch.setattr("learnerkit.scaling.cost.distributed.broadcast", lambda value: value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")  # and 2 on the other machine
    found = cost_on_ranks(learn, Pace(0.1, 40), 0.05, None, None)
    assert asked == [(1 << 10, max(found.sent) // 4, max(found.sent))]
    assert max(found.sent) < sum(found.sent) == 40e6
    assert (found.ranks, found.machines) == (3, 2)


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
    assert (found.ranks, found.single, found.batch, found.sent) == (2, 5e-2, 8, [65 * 4])
    assert found.alone > 15e-3
    assert found.together > 1.3 * found.alone  # on an idle machine 2
    assert 1e-6 < found.link.latency < 1
    assert not dist.is_initialized()
    assert all(torch.equal(p, q) for p, q in zip(before, learn.model.parameters(), strict=True))


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


# Against real ranks

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
    assert (found.ranks, found.machines, found.batch) == (2, 1, 8)
    assert distributed.same_everywhere(report.to_json())
    travels = sum(all_reduce_seconds(size, 2, found.link) for size in found.sent)
    assert found.together + travels + found.beyond == pytest.approx(report.seconds)
    assert sum(found.sent) == report.gradient_bytes
    assert f"{'ranks':>5}  machines" in str(report)
