"""ScalingMonitor: its columns, on one process and on two ranks, and how often ranks exchange them."""

import subprocess
import time

import pytest
from helpers import ROOT, python, raises
from scaling_jobs import make_learner as job

from learnerkit import Callback, ScalingMonitor, distributed


def rows_of(learn, **kwargs):
    """The last row's columns."""
    learn.dls.loaders[1] = None
    with learn.no_logging():
        learn.fit(1, cbs=ScalingMonitor(**kwargs))
    names = learn.recorder.metric_names[1:-1]
    return dict(zip(names, learn.recorder.values[-1], strict=True))


@pytest.mark.parametrize("every", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 500))])
def test_the_columns_on_one_process_name_it_the_slowest(every):
    learn = job("dataset", rank=0, n=64)
    learn.add_cb(Callback(after_batch=lambda cb: time.sleep(0.03)))
    row = rows_of(learn, every=every)
    assert 0.2 < row["samples_per_second"] / (8 / 0.06) < 1.01  # others may use this machine
    assert row["waiting"] == pytest.approx(0.5, abs=0.2)
    assert row["slowest_rank"] == 0


def test_the_columns_are_of_all_steps_of_an_epoch():
    """Of the last ones, too, after which no exchange is due."""
    learn = job(n=8 * 5)
    learn.add_cb(Callback(after_batch=lambda cb: time.sleep(0.1 * (cb.iter > 2))))
    assert rows_of(learn, every=3)["samples_per_second"] < 8 * 5 / 0.2


def test_it_is_refused_without_a_number_of_steps():
    with raises(ValueError, "every=0"):
        ScalingMonitor(every=0)


@pytest.mark.ranks(2, soak=[4])
def test_the_slowest_rank_is_a_column():
    slow = distributed.world_size() - 1
    learn = job("backward", rank=slow, n=64 * distributed.world_size())
    with learn.distrib_ctx():
        row = rows_of(learn, every=4)
    assert row["slowest_rank"] == slow
    assert row["waiting"] == pytest.approx(slow / distributed.world_size(), abs=0.25)  # all but that one
    assert 0.1 < row["samples_per_second"] / (8 * distributed.world_size() / 0.03) < 1.01
    assert distributed.same_everywhere(row)


@pytest.mark.soak
@pytest.mark.ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["dataset", "forward", "backward", "callback", "optimizer"])
def test_wherever_a_rank_is_slow_it_is_the_slowest(fault, rank):
    learn = job(fault, rank, n=256)
    with learn.distrib_ctx():
        row = rows_of(learn, every=4)
    assert row["slowest_rank"] == rank
    assert row["waiting"] == pytest.approx(1.0 if fault == "dataset" else 0.5, abs=0.2)  # for its input, too


@pytest.mark.ranks(2)
def test_the_ranks_exchange_once_in_so_many_steps_and_at_the_end():
    """The time that this takes is measured by tests/benchmarks/run.py monitor."""
    logged = []
    count = Callback(after_train=lambda cb: logged.append(len(cb.recorder.logged["waiting"].values)), order=14)
    learn = job(n=15 * 16)
    with learn.no_logging(), learn.distrib_ctx():
        learn.fit(2, cbs=[ScalingMonitor(every=4), count])
    assert learn.recorder.iters == [15, 30]
    assert logged == [4, 4]


@pytest.mark.soak
def test_a_fit_that_does_not_measure_has_nothing_of_it(script_env):
    code = (
        "import sys\nfrom scaling_jobs import make_learner\n"
        "with make_learner(n=16).no_logging() as learn: learn.fit(1)\n"
        "print([name for name in sys.modules if name.startswith('learnerkit.scaling')])"
    )
    done = subprocess.run([python(), "-c", code], capture_output=True, text=True, env=script_env, cwd=ROOT / "tests")
    assert done.stdout == "[]\n", done.stdout + done.stderr
