"""N processes equal one: the jobs of parity.py on 1, 2, 3 and 4 processes."""

import pytest
import torch
from helpers import results_of
from parity import do, do_sharded, jobs

TRAINING = [
    "plain", "one_cycle", "shuffled", "generator", "weighted", "batch_sampler", "drop_last", "workers", "regression",
    "mapping", "tiny", "dropout_order", "no_length", "cut_short",
]  # fmt: skip
LOSSES = ["mean", "sum", "class weights", "ignore_index", "tokens", "own tokens", "own shifted"]
WAYS = ["whole", "micro-batches", "batches per rank", "samples"]
GANS = ["Both", "BothByInputs", "OneByOne", "InTurn"]
SLOW_ON_TWO = [
    *(f"{loss}: {way}" for loss in LOSSES[1:] for way in WAYS[2:]), *(f"{loss}: micro-batches" for loss in LOSSES[4:]),
    "no_length", "cut_short", "GAN: BothByInputs", "GAN: OneByOne", "lengths", "class weights: whole",
    "sum: micro-batches", "tokens: whole", "workers", "batch_sampler", "dropout_order",
]  # fmt: skip
# Combinations of a loss and a way of which others stand for the same
SOAK_ON_TWO = [
    *(f"{loss}: {way}" for loss in ("class weights", "ignore_index", "own tokens") for way in WAYS[2:]),
    *(f"{loss}: {way}" for loss in ("tokens", "sum", "own shifted") for way in WAYS[2:]),
    "tokens: micro-batches", "own tokens: micro-batches", "generator", "regression", "drop_last", "weighted",
    "one_cycle", "mapping", "shuffled", "GAN: InTurn", "class weights: micro-batches",
]  # fmt: skip
OTHERS = ["lengths", "predictions", "batch_norm"]

ALL = [
    *TRAINING, *OTHERS, *(f"{loss}: {way}" for loss in LOSSES for way in WAYS), *(f"GAN: {name}" for name in GANS),
]  # fmt: skip
# With more processes than cores every collective takes milliseconds, so three and four of them do what is telling.
ON_THREE = [
    "batch_sampler", "mapping", "tiny", "dropout_order", *OTHERS[1:], *(f"GAN: {name}" for name in GANS),
    *(f"{loss}: micro-batches" for loss in LOSSES), *(f"{loss}: whole" for loss in LOSSES),
    "mean: batches per rank", "mean: samples",
]  # fmt: skip
SLOW_ON_THREE = ["tiny", "batch_norm", "mean: batches per rank", "ignore_index: micro-batches"]
ON_FOUR = [
    "tiny", *OTHERS, *(f"{loss}: micro-batches" for loss in LOSSES), "mean: whole", "sum: whole", "GAN: Both",
    "mean: batches per rank",
]  # fmt: skip
JOBS = {1: ALL, 2: ALL, 3: ON_THREE, 4: ON_FOUR}


def later(n, job):
    """The marks of a job on so many processes."""
    if n == 4 or (n == 3 and job not in SLOW_ON_THREE) or (n < 3 and job in SOAK_ON_TWO):
        return [pytest.mark.soak]
    return [pytest.mark.slow] if n == 3 or job in SLOW_ON_TWO else []


def on_ranks(jobs, alone=False):
    """Parametrize by the number of processes and the job; some three are for `pytest -m slow`, four for `-m soak`."""
    found = []
    for n, done in JOBS.items():
        for job in done:
            if job in jobs and (n > 1 or alone):
                found.append(pytest.param(n, job, marks=later(n, job), id=f"{n}-ranks-{job}"))
    return pytest.mark.parametrize(("n", "job"), found)


found = results_of(do)


def same(found, expected, msg):
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12, equal_nan=True, msg=msg)


# Several ranks begin one more batch after a cancel, which they drop together.
@on_ranks([job for job in TRAINING if job != "cut_short"])
def test_ranks_together_see_the_batches_of_one_process(found, n, job):
    steps = [rank["steps"] for rank in found[n, job]]
    together = [sum(step, []) for step in zip(*steps, strict=True)]
    if job == "no_length":  # nobody knows the last batch: an empty one ends an open step of several batches
        together = [step for step in together if step]
    assert together == found[1, job][0]["steps"]


@on_ranks([job for job in TRAINING if job != "dropout_order"])
def test_weights_losses_metrics_and_predictions_equal_one_process(found, n, job):
    (alone,) = found[1, job]
    assert torch.isfinite(torch.tensor(alone["losses"])).all()
    for rank in found[n, job]:
        for name in ("weights", "values", "losses", "lrs", "iters", "preds", "targets", "valid"):
            same(rank[name], alone[name], f"{job}: {name}")


def test_every_job_is_asked_for():
    assert set(ALL) == set(jobs())


@pytest.mark.slow
def test_dropout_differs_by_rank_but_not_the_order(found):
    # Had both ranks drawn the same masks, or one process's, the weights could still be equal by chance; not to 1e-6.
    (alone,), (rank, _) = found[1, "dropout_order"], found[2, "dropout_order"]
    assert any((alone["weights"][k] - rank["weights"][k]).abs().max() > 1e-6 for k in alone["weights"])


# Steps of several batches


@on_ranks([f"{loss}: {way}" for loss in LOSSES for way in WAYS], alone=True)
def test_a_step_is_the_same_in_one_batch_or_several_and_on_any_number_of_ranks(found, n, job):
    (whole,) = found[1, f"{job.split(':')[0]}: whole"]
    assert len(whole["steps"]) == 2 * 9
    assert len(whole["steps"][-1][0]) == 7
    for rank in found[n, job]:
        same(rank["weights"], whole["weights"], "weights")
        same(rank["values"], whole["values"], "losses")
        same([step[1:] for step in rank["steps"]], [step[1:] for step in whole["steps"]], "rates and momenta")
    steps = zip(*(rank["steps"] for rank in found[n, job]), strict=True)
    samples = [sorted(sum((rank[0] for rank in step), [])) for step in steps]
    assert samples == [sorted(step[0]) for step in whole["steps"]]


def test_all_losses_are_tried_on_tails_and_padding(found):
    whole = {loss: found[1, f"{loss}: whole"][0] for loss in LOSSES}
    rounded = {loss: str([[round(v, 9) for v in row] for row in w["values"]]) for loss, w in whole.items()}
    assert rounded.pop("own tokens") == rounded["tokens"]
    assert len(set(rounded.values())) == len(rounded)
    assert all(torch.isfinite(torch.tensor(w["values"])).all() for w in whole.values())


# Evaluation


@on_ranks(["lengths"])
def test_loss_and_metrics_of_one_to_forty_samples_equal_one_process(found, n, job):
    (alone,) = found[1, job]
    assert [len(values) for values in alone] == [6] * 6 + [2] * 34
    for rank in found[n, job]:
        for i, (values, expected) in enumerate(zip(rank, alone, strict=True)):
            same(values, expected, f"{i + 1} samples: {values}, on one process {expected}")


@on_ranks(["predictions"])
def test_predictions_inputs_targets_and_losses_equal_one_process(found, n, job):
    (alone,) = found[1, job]
    for i, rank in enumerate(found[n, job]):
        for got, expected in zip(rank, alone, strict=True):
            same(got["all"], expected["all"], f"{len(expected['all'][2])} samples")
            same(got["rank0"], tuple(x if i == 0 else None for x in expected["all"]), "on rank 0")


# Training


@on_ranks(["batch_norm"])
def test_batch_norm_never_sees_a_single_sample(found, n, job):
    sizes = found[n, job]
    assert all(size != 1 for rank in sizes for fit in rank for size in fit)
    for fit in zip(*sizes, strict=True):
        assert sum(map(sum, fit)) == 22


@on_ranks([f"GAN: {name}" for name in GANS])
def test_several_networks_equal_one_process(found, n, job):
    (alone,) = found[1, job]
    assert len(alone["losses"]) == 2 * 8
    for rank in found[n, job]:
        for name in ("weights", "values", "losses"):
            same(rank[name], alone[name], f"{job}: {name}")


# Shards


on_shards = results_of(do_sharded)


# Masks are those of a rank; and parameters as inputs of backward are told of.
APART = ("dropout_order", "GAN: BothByInputs")


@pytest.mark.soak
@pytest.mark.parametrize("job", [job for job in ALL if job not in APART])
@pytest.mark.parametrize("n", [2, 3])
def test_shards_equal_one_process(found, on_shards, n, job):
    (alone,) = found[1, f"{job.split(':')[0]}: whole" if ": " in job and "GAN" not in job else job]
    for rank in on_shards[n, job]:
        if job == "predictions":
            rank, expected = [got["all"] for got in rank], [got["all"] for got in alone]
        elif isinstance(alone, dict):
            names = alone.keys() & {"weights", "values", "losses", "lrs", "iters", "preds", "targets", "valid"}
            rank, expected = {name: rank[name] for name in names}, {name: alone[name] for name in names}
        else:
            expected = alone
        if job != "batch_norm":  # whose results are sizes of batches
            torch.testing.assert_close(rank, expected, rtol=1e-9, atol=1e-10, equal_nan=True)
