"""Strangers' models, losses and optimizers on shards: equal to one process, or refused with what to do."""

import pytest
import torch
from model_jobs import JOBS, do, do_sharded
from rank_pool import Ranks

REFUSED = {
    "got mixed torch.Tensor and DTensor": [
        "callback's loss of a parameter",
        "callback's loss of the model's weights",
        "a callback's average of the weights",
        "torch's AveragedModel",
    ],
    "before the backward pass of": [
        "callback's own backward pass before the loss's",
        "callback's own backward pass of the whole model before the loss's",
        "callback's own backward pass of the whole model, said before",
        "gradient penalty of the input",
    ],
    "neither the model's nor": ["callback with an optimizer of its own", "learner with a second optimizer"],
    "cannot step on shards": [
        "LBFGS",
        "LBFGS with a line search",
        "LBFGS with a sum",
        "a closure with _backward",
        "a closure with a _backward of its own",
        "LBFGS by itself",
        "LBFGS by itself, with a line search",
        "LBFGS by itself, with a penalty",
        "a closure of the learner's, with a _backward of its own",
    ],
    "are in p.grad after loss.backward()": ["gradient penalty of the weights", "backward with create_graph"],
    "wrap is for Distr": ["wrapped parts, and a loss with parameters"],
    "computed again in the backward pass": [
        "reentrant checkpoint",
        "reentrant checkpoint of a shared module",
        "reentrant checkpoint with unused parameters",
    ],
    "gave a gradient to": ["a _backward of its own, with unused parameters"],  # a warning
    "makes sparse gradients": ["sparse gradients", "sparse gradients and unused parameters"],
    "calls the units": [
        "a _backward of its own, of experts",
        "experts",
        "experts of which one is never asked",
        "experts, with weight decay and momentum",
        "experts, accumulated",
        "experts, accumulated, and a batch that one rank leaves",
    ],
    "took no part in the loss of batch": [
        "a part left out in mid-training",
        "a part left out in the last batch of one rank",
    ],
    "a cancel in the middle": [
        "cancel in a forward hook",
        "cancel in a forward hook, with buffers",
        "cancel in a forward hook, on one rank",
        "cancel in a forward hook, on one rank, with buffers",
    ],
    "of its own samples": ["a buffer of features"],
    "(buffers that change": ["a loss with a buffer of its own"],
    "raised in Look.before_batch": ["a Sequential's items"],
}
"""The jobs that are refused on shards, by a piece of the message. The last one sees the class of a unit."""

PIECES = {name: piece for piece, names in REFUSED.items() for name in names}

PIECES_OF_THREE = {"callback's own backward pass of the data, accumulated": "are those of p.full_tensor()"}
"""Where a parameter has fewer rows than there are ranks, torch cannot add a gradient of all of it to that of rows."""

REPRESENTATIVE = ["lazy layers, one cycle", "forward by parts", "a _backward of its own, in two passes"]
"""The others are for `pytest -m soak`."""


def later(n, job):
    return pytest.mark.slow if n == 2 and job in REPRESENTATIVE else pytest.mark.soak


@pytest.mark.parametrize(
    ("n", "job"), [pytest.param(n, job, marks=later(n, job), id=f"{n}-ranks-{job}") for n in (2, 3) for job in JOBS]
)
def test_a_job_on_shards_equals_one_process_or_is_refused(rank_pools, n, job):
    ranks = rank_pools.run(Ranks(n), do_sharded, name=job)
    if piece := PIECES.get(job) or (n > 2 and PIECES_OF_THREE.get(job)):
        for rank in ranks:
            assert piece in rank["error"]
        return
    alone = do(job)
    for rank in ranks:
        assert "error" not in rank, rank["error"]
        if "one rank" not in job:  # what one rank alone does, one process cannot do
            for name in alone:
                torch.testing.assert_close(rank[name], alone[name], rtol=1e-9, atol=1e-10, equal_nan=True)
        torch.testing.assert_close(rank, ranks[0], rtol=0, atol=0, equal_nan=True)


def test_every_job_in_a_list_is_there():
    assert set(PIECES) | set(REPRESENTATIVE) <= set(JOBS)
