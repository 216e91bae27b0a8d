"""Jobs drawn from a seed: several processes equal one, and a run that is stopped and resumed equals one that is not.

A test that fails prints the job: what OPTIONS of random_jobs.py have other values than their first.
"""

import pytest
import torch
from helpers import ROOT
from kernel import Kernel
from random_jobs import OPTIONS, draw, run
from rank_pool import Ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # some jobs are doubtful, and say so

seeds = pytest.mark.parametrize(
    "seed", [pytest.param(i, marks=pytest.mark.slow if i < 2 else pytest.mark.soak) for i in range(200)]
)


@pytest.fixture
def on(rank_pools, tmp_path):
    """Runs a job on a number of ranks, and returns what it comes to on rank 0."""

    def on(n, job, **kwargs):
        kwargs = {"job": job, "folder": str(tmp_path)} | kwargs
        return run(**kwargs) if n == 1 else rank_pools.run(Ranks(n), run, filters=["ignore"], **kwargs)[0]

    return on


def drawn(seed, **kwargs):
    """A job, which is printed."""
    job = draw(seed, **kwargs)
    print({name: value for name, value in job.items() if value != OPTIONS.get(name, [None])[0]})
    return job


def assert_near(found, expected):
    """The numbers differ by rounding at most."""
    del found["drawn"], expected["drawn"]  # each number of ranks draws by itself
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8, equal_nan=True)


@seeds
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)], ids="{}-ranks".format)
def test_a_job_equals_one_process(on, seed, n, shard):
    job = drawn(seed, ranks=(1, n), shard=shard)
    assert_near(on(n, job, shard=shard), on(1, job))


@seeds
@pytest.mark.parametrize("n", [1, 2], ids="{}-ranks".format)
def test_a_stopped_job_goes_on_as_if_it_had_not_been(on, seed, n):
    job = drawn(seed, ranks=(n,))
    whole = on(n, job)
    on(n, job, how="stopped")
    torch.testing.assert_close(on(n, job, how="resumed"), whole, rtol=0, atol=0, equal_nan=True)


@seeds
@pytest.mark.parametrize("shard", [False, True])
def test_a_job_of_two_ranks_goes_on_on_three_ranks(on, seed, shard):
    job = drawn(seed, ranks=(1, 2, 3), shard=shard)
    job["train_metrics"] = False  # those of the epoch in which it stopped are nan
    on(2, job, how="stopped", shard=shard)
    assert_near(on(3, job, how="resumed", shard=shard), on(1, job))


CELL = """
import sys
sys.path.insert(0, {tests!r})
import torch
from random_jobs import run
torch.set_num_threads(1)
torch.save(run({job!r}, {folder!r}, nproc=2), {file!r})
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    kernel = Kernel(tmp_path_factory.mktemp("kernel"))
    yield kernel
    kernel.close()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(30))
def test_a_job_of_a_notebook_equals_one_of_two_ranks(on, kernel, tmp_path, seed):
    job = drawn(seed, ranks=(1, 2))
    (tmp_path / "there").mkdir()
    file = str(tmp_path / "result")
    cell = CELL.format(tests=str(ROOT / "tests"), job=job, folder=str(tmp_path / "there"), file=file)
    shown = kernel.run(cell)
    assert shown.error == "", shown.traceback
    assert_near(torch.load(file, weights_only=False), on(2, job))
