"""The processes in which tests marked `ranks` run: what fails there fails here, and harms no later test."""

import os
import time

import pytest
import rank_pool
from rank_pool import RankPools, Ranks, RanksFailed

from learnerkit import distributed

pytestmark = pytest.mark.slow  # each failure costs new processes


@pytest.fixture
def pools():
    """Processes of this test alone."""
    found = RankPools()
    yield found
    found.end()


def rank_and_process():
    return distributed.rank(), os.getpid()


def fail_on_rank_1():
    assert distributed.rank() == 0, "rank 1 cannot"
    distributed.barrier()


def die_on_rank_1():
    if distributed.rank() == 1:
        os._exit(3)
    distributed.barrier()


def hang():
    time.sleep(600)


def leave_a_variable():
    os.environ["LEFT"] = "here"


@pytest.mark.parametrize(
    ("function", "seconds", "said"),
    [
        (fail_on_rank_1, 60, ["rank 1 of 2: Traceback", "Error: rank 1 cannot", "rank 0 of 2: is still running"]),
        pytest.param(die_on_rank_1, 60, ["rank 1 of 2: the process has ended"], marks=pytest.mark.soak),
        pytest.param(hang, 1, ["rank 0 of 2: took over 1 s", "in hang"], marks=pytest.mark.soak),
        pytest.param(leave_a_variable, 60, ["the test left these changed", "$LEFT"], marks=pytest.mark.soak),
    ],
)
@pytest.mark.soak
def test_a_failure_is_shown_and_the_next_test_gets_fresh_processes(pools, monkeypatch, function, seconds, said):
    monkeypatch.setattr(rank_pool, "FOLLOW_SECONDS", 1)
    before = pools.run(Ranks(2), rank_and_process)
    with pytest.raises(RanksFailed) as caught:
        pools.run(Ranks(2), function, seconds=seconds)
    assert all(text in str(caught.value) for text in said), str(caught.value)
    after = pools.run(Ranks(2), rank_and_process)
    assert [rank for rank, _ in after] == [0, 1]
    assert not {process for _, process in after} & {process for _, process in before}
