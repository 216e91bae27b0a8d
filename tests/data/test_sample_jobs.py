"""What a sample is: jobs whose batches do not begin with a tensor of samples, on 1, 2 and 3 processes."""

import pytest
import torch
from helpers import results_of
from sample_jobs import JOBS, REFUSED, do

QUICK = ["dataclass", "graphs, accumulated"]
SLOW = ["mapping, stream", "detection", "positions first, sizes of the sampler", "packed", "nodes, stream"]
"""The others are for `pytest -m soak`."""


found = results_of(do)


def on_ranks(jobs):
    def later(n, job):
        if n == 2 and job in QUICK:
            return []
        return pytest.mark.slow if n == 2 and (job in SLOW or job in REFUSED) else pytest.mark.soak

    return pytest.mark.parametrize(
        ("n", "job"), [pytest.param(n, job, id=f"{n}-ranks-{job}", marks=later(n, job)) for n in (2, 3) for job in jobs]
    )


@on_ranks(JOBS)
def test_a_sample_job_on_ranks_equals_one_process(found, n, job):
    alone = {name: value for name, value in found[1, job][0].items() if name != "said"}
    assert torch.isfinite(torch.tensor(alone["losses"])).all()
    for i, rank in enumerate(found[n, job]):
        said = [JOBS[job].warns] if JOBS[job].warns and not i else []
        assert [said[0] in message for message in rank.pop("said")] == [True] * len(said)
        for name, expected in alone.items():
            torch.testing.assert_close(rank[name], expected, rtol=1e-11, atol=1e-12, msg=lambda m, k=name: f"{k}: {m}")


@on_ranks(REFUSED)
def test_a_sample_job_that_cannot_be_right_is_refused(found, n, job):
    for rank in found[n, job]:
        assert REFUSED[job][1] in (rank["refused"] or "nothing")
