"""Models, losses and optimizers of many kinds: N processes equal one, or refuse the job and say what to do."""

import pytest
import torch
from helpers import results_of
from model_jobs import JOBS, do

REFUSED = {
    "callback with an optimizer of its own": "put them into the model, or into learn.opt",
    "learner with a second optimizer": "critic_opt trains parameters that are neither the model",
    "wrapped parts, and a loss with parameters": "put them into the model, in one of these parts",
    "a part left out in mid-training": "pass find_unused_parameters=True to DistributedCallback",
    "a part left out in the last batch of one rank": "took no part in the loss of batch 2 on rank 0",
    "a buffer of features": "each rank makes queue (buffers that change in the forward pass) of its own samples",
    "a loss with a buffer of its own": "each rank makes the loss's mean (buffers that change",
}
"""The jobs that are refused on several ranks, with a piece of the message; a warning is an error in these tests."""

QUICK = [
    "loss with parameters, in the splitter", "callback's own backward pass before the loss's",
    "SAM that needs a closure", "a _backward of its own, of experts", "cancel in a forward hook, on one rank",
    "a buffer of features", "a _backward of its own, and a batch that counts nothing",
]  # fmt: skip
"""Of the others every sixteenth is for `pytest -m slow`; the rest is for `pytest -m soak`."""

LEAVES = "cancel in a forward hook"
"""Steps that all ranks leave out have a place in the recorder's losses on several ranks alone."""


found = results_of(do)


def on_ranks(*numbers):
    """Parametrize by the number of processes and the job."""
    found = []
    for n in numbers:
        for i, job in enumerate(JOBS):
            marks = pytest.mark.slow if n == 2 and i % 16 == 1 else pytest.mark.soak
            found.append(pytest.param(n, job, marks=() if n == 2 and job in QUICK else marks, id=f"{n}-ranks-{job}"))
    return pytest.mark.parametrize(("n", "job"), found)


@on_ranks(2, 3)
def test_a_job_equals_one_process_or_is_refused(found, n, job):
    (alone,), ranks = found[1, job], found[n, job]
    if job in REFUSED:
        for rank in ranks:
            assert REFUSED[job] in rank["error"]
        return
    for rank in ranks:
        assert "error" not in rank, rank["error"]
        if "one rank" not in job:  # what one rank alone does, one process cannot do
            for name in alone.keys() - ({"losses"} if job.startswith(LEAVES) else set()):
                torch.testing.assert_close(rank[name], alone[name], rtol=1e-9, atol=1e-10, equal_nan=True)
        torch.testing.assert_close(rank, ranks[0], rtol=0, atol=0, equal_nan=True)


# The others are compared above, where a job that fails on one process fails, too.
ALONE = [job for i, job in enumerate(JOBS) if job in REFUSED or "one rank" in job or (i % 16 != 1 and job not in QUICK)]


@pytest.mark.parametrize("job", [pytest.param(j, marks=[] if j in QUICK else [pytest.mark.soak]) for j in ALONE])
def test_every_job_works_on_one_process(found, job):
    assert "error" not in found[1, job][0], found[1, job][0]["error"]


def test_every_job_in_a_list_is_there():
    assert set(REFUSED) | set(QUICK) <= set(JOBS)
