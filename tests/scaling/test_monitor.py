"""ScalingMonitor: its columns, on one process and on two ranks, and what it costs."""

import time

import pytest
from helpers import make_learner, raises
from scaling_jobs import make_learner as job

from learnerkit import Callback, ScalingMonitor, world

COLUMNS = ("samples_per_second", "waiting", "slowest_rank")


def rows_of(learn, **kwargs):
    """The last row's columns."""
    with learn.no_logging():
        learn.fit(1, cbs=ScalingMonitor(**kwargs))
    names = learn.recorder.metric_names[1:-1]
    return dict(zip(names, learn.recorder.values[-1], strict=True))


@pytest.mark.parametrize("every", [1, 3, 500])
def test_the_columns_on_one_process(every):
    learn = job("dataset", rank=0)
    learn.add_cb(Callback(after_batch=lambda cb: time.sleep(0.03)))
    learn.dls.train.dataset.x = learn.dls.train.dataset.x[:64]
    row = rows_of(learn, every=every)
    assert row["samples_per_second"] == pytest.approx(8 / 0.06, rel=0.15)
    assert row["waiting"] == pytest.approx(0.5, abs=0.1)
    assert row["slowest_rank"] == 0


def test_it_is_refused_without_a_number_of_steps():
    with raises(ValueError, "every=0"):
        ScalingMonitor(every=0)


@pytest.mark.ranks(2, slow=[4])
def test_the_slowest_rank_is_a_column():
    slow = world.world_size() - 1
    learn = job("backward", rank=slow)
    learn.dls.train.dataset.x = learn.dls.train.dataset.x[: 80 * world.world_size()]
    with learn.distrib_ctx():
        row = rows_of(learn, every=4)
    assert row["slowest_rank"] == slow
    assert row["waiting"] == pytest.approx(slow / world.world_size(), abs=0.25)  # all but that one
    assert row["samples_per_second"] == pytest.approx(8 * world.world_size() / 0.033, rel=0.4)
    assert world.same_everywhere(row)


@pytest.mark.ranks(2)
@pytest.mark.slow
def test_it_costs_less_than_a_hundredth_of_a_step():
    """Of 10 ms: the difference between the busy times of fits with it and without it, of each the least."""
    found = {}
    for _ in range(5):
        for every in (None, 50):
            learn = make_learner(dls=job().dls, model=job().model)
            with learn.no_logging(), learn.no_bar(), learn.distrib_ctx():
                learn.fit(1)
                start = time.process_time()
                learn.fit(4, cbs=[ScalingMonitor()] if every else [])
                taken = (time.process_time() - start) / (4 * 32)
            found[every] = min(found.get(every, 1.0), taken)
    assert found[50] - found[None] < 1e-4, found
