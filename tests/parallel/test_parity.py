"""N processes equal one: the jobs of scripts/parity.py on 1, 2, 3 and 4 processes."""

import pytest
import torch
from launching import run_script

TRAINING = [
    "plain", "one_cycle", "shuffled", "generator", "weighted", "batch_sampler", "drop_last", "workers", "regression",
    "mapping", "tiny", "dropout_order",
]  # fmt: skip
LOSSES = ["mean", "sum", "class weights", "ignore_index", "tokens", "own tokens", "own shifted"]
WAYS = ["whole", "micro-batches", "batches per rank", "samples"]
GANS = ["Both", "BothByInputs", "OneByOne", "InTurn"]
OTHERS = ["lengths", "predictions", "batch_norm"]

ALL = [
    *TRAINING, *OTHERS, *(f"{loss}: {way}" for loss in LOSSES for way in WAYS), *(f"GAN: {name}" for name in GANS),
]  # fmt: skip
# With more processes than cores every collective takes milliseconds, so three and four of them do what is telling.
ON_THREE = [
    "batch_sampler", "mapping", "tiny", "dropout_order", *OTHERS, *(f"GAN: {name}" for name in GANS),
    *(f"{loss}: micro-batches" for loss in LOSSES), *(f"{loss}: whole" for loss in LOSSES),
    "mean: batches per rank", "mean: samples",
]  # fmt: skip
ON_FOUR = [
    "tiny", *OTHERS, *(f"{loss}: micro-batches" for loss in LOSSES), "mean: whole", "sum: whole", "GAN: Both",
    "mean: batches per rank",
]  # fmt: skip
JOBS = {1: ALL, 2: ALL, 3: ON_THREE, 4: ON_FOUR}


def on_ranks(jobs):
    found = [(n, job) for n, done in JOBS.items() for job in done if n > 1 and job in jobs]
    return pytest.mark.parametrize(("n", "job"), found)


class Found(dict):
    """What the ranks of each number of processes report; they run when first asked for."""

    def __init__(self, out):
        super().__init__()
        self.out = out

    def __missing__(self, n):
        run_script("parity.py", self.out, *JOBS[n], nproc=n, way="python" if n == 1 else "launch")
        self[n] = [torch.load(self.out / f"{n}-{rank}.pt", weights_only=True) for rank in range(n)]
        return self[n]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return Found(tmp_path_factory.mktemp("parity"))


def same(found, expected, msg):
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12, equal_nan=True, msg=msg)


@on_ranks(TRAINING)
def test_ranks_together_see_the_batches_of_one_process(found, n, job):
    steps = [rank[job]["steps"] for rank in found[n]]
    together = [sum(step, []) for step in zip(*steps, strict=True)]
    assert together == found[1][0][job]["steps"]


@on_ranks([job for job in TRAINING if job != "dropout_order"])
def test_weights_losses_metrics_and_predictions_equal_one_process(found, n, job):
    alone = found[1][0][job]
    for rank in found[n]:
        for name in ("weights", "values", "losses", "lrs", "iters", "preds", "targets", "valid"):
            same(rank[job][name], alone[name], f"{job}: {name}")


def test_every_job_is_done(found):
    assert set(ALL) == set(found[1][0])
    assert all(torch.isfinite(torch.tensor(found[1][0][job]["losses"])).all() for job in TRAINING)


def test_dropout_differs_by_rank_but_not_the_order(found):
    # Had both ranks drawn the same masks, or one process's, the weights could still be equal by chance; not to 1e-6.
    alone, rank = found[1][0]["dropout_order"], found[2][0]["dropout_order"]
    assert any((alone["weights"][k] - rank["weights"][k]).abs().max() > 1e-6 for k in alone["weights"])


# Steps of several batches


@pytest.mark.parametrize(
    ("n", "loss", "way"),
    [(n, *job.split(": ")) for n, jobs in JOBS.items() for job in jobs if job.split(": ")[0] in LOSSES],
)
def test_a_step_is_the_same_in_one_batch_or_several_and_on_any_number_of_ranks(found, n, loss, way):
    whole = found[1][0][f"{loss}: whole"]
    assert len(whole["steps"]) == 2 * 9
    assert len(whole["steps"][-1][0]) == 7
    for rank in found[n]:
        rank = rank[f"{loss}: {way}"]
        same(rank["weights"], whole["weights"], "weights")
        same(rank["values"], whole["values"], "losses")
        same([step[1:] for step in rank["steps"]], [step[1:] for step in whole["steps"]], "rates and momenta")
    steps = zip(*(rank[f"{loss}: {way}"]["steps"] for rank in found[n]), strict=True)
    samples = [sorted(sum((rank[0] for rank in step), [])) for step in steps]
    assert samples == [sorted(step[0]) for step in whole["steps"]]


def test_all_losses_are_tried_on_tails_and_padding(found):
    whole = {loss: found[1][0][f"{loss}: whole"] for loss in LOSSES}
    rounded = {loss: str([[round(v, 9) for v in row] for row in w["values"]]) for loss, w in whole.items()}
    assert rounded.pop("own tokens") == rounded["tokens"]
    assert len(set(rounded.values())) == len(rounded)
    assert all(torch.isfinite(torch.tensor(w["values"])).all() for w in whole.values())


# Evaluation


def test_a_loss_of_the_models_own_over_tokens_is_that_of_a_loss_function(found):
    for way in WAYS:
        own, given = found[2][0][f"own tokens: {way}"], found[1][0][f"tokens: {way}"]
        same(own["weights"], {f"body.{k}": v for k, v in given["weights"].items()}, way)
        same(own["values"], given["values"], way)


@on_ranks(["lengths"])
def test_loss_and_metrics_of_one_to_forty_samples(found, n, job):
    alone = found[1][0][job]
    assert [len(values) for values in alone] == [6] * 6 + [2] * 34
    for rank in found[n]:
        for i, (values, expected) in enumerate(zip(rank[job], alone, strict=True)):
            same(values, expected, f"{i + 1} samples: {values}, on one process {expected}")


@on_ranks(["predictions"])
def test_predictions_inputs_targets_and_losses_equal_one_process(found, n, job):
    alone = found[1][0][job]
    for i, rank in enumerate(found[n]):
        for got, expected in zip(rank[job], alone, strict=True):
            same(got["all"], expected["all"], f"{len(expected['all'][2])} samples")
            same(got["rank0"], tuple(x if i == 0 else None for x in expected["all"]), "on rank 0")


# Training


@on_ranks(["batch_norm"])
def test_batch_norm_never_sees_a_single_sample(found, n, job):
    sizes = [rank[job] for rank in found[n]]
    assert all(size != 1 for rank in sizes for fit in rank for size in fit)
    for fit in zip(*sizes, strict=True):
        assert sum(map(sum, fit)) == 22


@on_ranks([f"GAN: {name}" for name in GANS])
def test_several_networks_equal_one_process(found, n, job):
    alone = found[1][0][job]
    assert len(alone["losses"]) == 2 * 8
    for rank in found[n]:
        for name in ("weights", "values", "losses"):
            same(rank[job][name], alone[name], f"{job}: {name}")
