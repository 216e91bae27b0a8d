"""N processes equal one: every job of scripts/parity.py, on 1, 2 and 3 processes."""

import pytest
import torch
from launching import run_script


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("parity")
    for n in (1, 2, 3):
        run_script("parity.py", out, nproc=n, way="python" if n == 1 else "launch")
    return {n: [torch.load(out / f"{n}-{rank}.pt", weights_only=True) for rank in range(n)] for n in (1, 2, 3)}


JOBS = [
    "plain", "one_cycle", "shuffled", "generator", "weighted", "batch_sampler", "drop_last", "workers", "sum",
    "class_weights", "ignore", "loss_weight", "regression", "mapping", "tiny", "dropout_order",
]  # fmt: skip


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("job", JOBS)
def test_ranks_together_see_the_batches_of_one_process(found, job, n):
    steps = [rank[job]["steps"] for rank in found[n]]
    together = [sum(step, []) for step in zip(*steps, strict=True)]
    assert together == found[1][0][job]["steps"]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("job", [job for job in JOBS if job != "dropout_order"])
def test_weights_losses_metrics_and_predictions_equal_one_process(found, job, n):
    alone = found[1][0][job]
    for rank in found[n]:
        for name in ("weights", "values", "losses", "lrs", "iters", "preds", "targets", "valid"):
            torch.testing.assert_close(rank[job][name], alone[name], rtol=1e-12, atol=1e-12, msg=f"{job}: {name}")


def test_every_job_is_checked(found):
    assert set(JOBS) == set(found[1][0])
    assert all(torch.isfinite(torch.tensor(job["losses"])).all() for job in found[1][0].values())


def test_dropout_differs_by_rank_but_not_the_order(found):
    # Had both ranks drawn the same masks, or one process's, the weights could still be equal by chance; not to 1e-6.
    alone, rank = found[1][0]["dropout_order"], found[2][0]["dropout_order"]
    assert any((alone["weights"][k] - rank["weights"][k]).abs().max() > 1e-6 for k in alone["weights"])
