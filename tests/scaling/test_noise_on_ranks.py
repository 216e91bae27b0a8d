"""GradientNoiseScale where several ranks take a step together."""

import contextlib

import pytest
import torch
from helpers import mostly_slow
from noise_jobs import Batches, exact, make_data, make_learner, make_model, recomputed, rows_of, shown
from torch import nn
from torch.utils.data import RandomSampler

from learnerkit import (
    Callback,
    CancelBatchException,
    GradientAccumulation,
    GradientNoiseScale,
    MixedPrecision,
    SplitBatch,
    distributed,
)

pytestmark = [
    pytest.mark.ranks(2, soak=[4]),
    pytest.mark.filterwarnings("ignore:.*each train a whole copy"),  # that is what is compared with
    pytest.mark.filterwarnings("ignore:mixed precision with float16 is some 30 times slower on a CPU"),
    pytest.mark.filterwarnings("ignore:find_unused_parameters=True was chosen"),
    pytest.mark.filterwarnings("ignore:comm_hook='bf16' rounds the gradients"),
]


def measured(cbs=(), alone=False, epochs=2, every=1, context=(), **kwargs):
    """A learner after a fit with the rate 0, and its GradientNoiseScale."""
    learn = make_learner(cbs, **kwargs)
    options = {"split_batches": True} | dict(context)
    with learn.no_logging(), contextlib.nullcontext() if alone else learn.distrib_ctx(**options):
        learn.fit(epochs, cbs=(scale := GradientNoiseScale(every=every)))
    return learn, scale


def test_the_same_parts_give_the_same_as_on_one_process():
    ranks = distributed.world_size()
    loader = {"shuffle": True, "drop_last": True}
    _, one = measured([GradientAccumulation(n_batches=8)], alone=True, batch_size=8, **loader)
    cbs = [GradientAccumulation(n_batches=8 // ranks)]
    _, several = measured(cbs, batch_size=8 * ranks, **loader)
    assert len(rows_of(one)) == 8
    torch.testing.assert_close(shown(several), shown(one), rtol=1e-9, atol=1e-12)
    assert several.value == pytest.approx(one.value, rel=1e-9)
    assert several.error == pytest.approx(one.error, rel=1e-6)
    assert len(set(distributed.all_gather(several.value))) == 1


@pytest.mark.slow
def test_it_is_that_of_single_samples():
    sampler = RandomSampler(make_data(), replacement=True, num_samples=64 * 400)
    learn, scale = measured(batch_size=64, sampler=sampler, epochs=1)
    assert scale.value == pytest.approx(exact(learn.model, "mean", make_data()), rel=0.1)


class Unused(nn.Module):
    """Leaves a layer out in every second batch."""

    def __init__(self):
        super().__init__()
        self.body, self.more, self.calls = make_model(), nn.Linear(5, 3).double(), 0

    def forward(self, x):
        return self.body(x) + 0 * self.more(x)[:, :1].detach()


JOBS = {
    "uneven": {"data": 37, "batch_size": 8},
    "own batches": {"data": 37, "batch_size": 4, "context": {"split_batches": False}},
    "accumulated": {"data": 50, "batch_size": 4, "n_batches": 3},
    "sum": {"data": 37, "batch_size": 8, "loss": "sum", "n_batches": 2},
    "ignored": {"data": 37, "batch_size": 8, "loss": "ignored"},
    "weighted": {"data": 37, "batch_size": 8, "loss": "weighted", "n_batches": 2},
    "unused": {"data": 37, "batch_size": 8, "model": Unused},
    "late": {"data": 37, "batch_size": 8, "context": {"find_unused_parameters": True}},
    "late sum": {"data": 37, "batch_size": 8, "loss": "sum", "context": {"find_unused_parameters": True}},
    "late, accumulated": {
        "data": 37, "batch_size": 8, "n_batches": 2, "context": {"find_unused_parameters": True}
    },
    "views": {"data": 37, "batch_size": 8, "context": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}},
    "static": {"data": 37, "batch_size": 8, "context": {"static_graph": True}},
    "shards": {"data": 37, "batch_size": 8, "context": {"shard": True}},
    "shards, accumulated, sum": {
        "data": 37, "batch_size": 8, "loss": "sum", "n_batches": 2, "context": {"shard": True, "sync": False}
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    mostly_slow(
        JOBS, "uneven", "accumulated", slow=["own batches", "weighted", "late sum", "views", "shards", "unused"]
    ),
)
def test_each_part_counts_by_what_it_had(job):
    """Tails over which the ranks have unequal shares, or none; weights; gradients that are averaged in other ways."""
    options = dict(JOBS[job])
    n_batches, data, model = (options.pop(name, None) for name in ("n_batches", "data", "model"))
    cbs = [batches := Batches(), *([GradientAccumulation(n_batches=n_batches)] if n_batches else [])]
    learn, scale = measured(cbs, data=make_data(data), model=model and model(), **options)
    expected = recomputed(getattr(learn.model, "body", learn.model), options.get("loss", "mean"), batches)
    assert len(expected) >= 4
    torch.testing.assert_close(shown(scale), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", mostly_slow(["bf16", "fp16", "comm_hook"], "fp16"))
def test_half_precision_measures_about_the_same(mode):
    context = {"comm_hook": "bf16"} if mode == "comm_hook" else {}
    cbs = [batches := Batches(), *([] if context else [MixedPrecision(mode)])]
    learn, scale = measured(cbs, data=make_data(61, torch.float32), batch_size=16, context=context)
    found, expected = shown(scale), recomputed(learn.model, "mean", batches)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=2e-3)


def test_a_batch_that_one_rank_leaves_is_no_part():
    class Leave(Callback):
        def after_loss(self):
            if distributed.rank() == 1 and self.iter % 3 == 1:
                raise CancelBatchException

    ranks = distributed.world_size()
    _, scale = measured([Leave()], data=make_data(24 * ranks), batch_size=4 * ranks)
    parts = {row.step: (row.parts, row.samples) for row in rows_of(scale)}
    whole, less = (ranks, 4 * ranks), (ranks - 1, 4 * ranks - 4)
    assert parts == {i: less if i % 3 == 1 else whole for i in range(12) if ranks > 2 or i % 3 != 1}


@pytest.mark.slow
def test_training_goes_on_as_without():
    def trained(cbs):
        learn = make_learner(
            [GradientAccumulation(n_batches=2)], model=make_model(dropout=0.5), batch_size=12, shuffle=True
        )
        with learn.no_logging(), learn.distrib_ctx():
            learn.fit(2, 0.3, cbs=cbs)
        return torch.cat([p.detach().flatten() for p in learn.model.parameters()])

    assert torch.equal(trained([]), trained([GradientNoiseScale(every=1)]))


@pytest.mark.slow
def test_options_that_change_gradients_are_refused():
    for context, cbs, match in (
        ({"wrap": ("0",)}, [], "has wrap="),
        ({"comm_hook": "powersgd"}, [], "comm_hook='powersgd'"),
        ({"shard": True}, [SplitBatch(2)], "SplitBatch computes that of a sharded model in several passes"),
    ):
        with pytest.raises(ValueError, match=match):
            measured(cbs, batch_size=8, context=context)
    off = SplitBatch(2)
    off.run = False
    _, scale = measured([off], batch_size=8, epochs=1, context={"shard": True})
    assert scale.value > 0


def test_the_state_of_other_ranks_is_taken_over():
    _, scale = measured([GradientAccumulation(n_batches=2)], batch_size=8, epochs=1)
    mine = [[0, 2.0, 1, 4, 4, 4, 0.5 if distributed.rank() else float("nan")]]
    state = {
        "steps": 9,
        "value": 1.0,
        "error": 0.1,
        "rows": [],
        "ranks": distributed.all_gather(mine) + [[[0, 1.0, 1, 2, 2, 2, 0.5]]],
    }
    scale.load_state_dict(state)
    own = distributed.all_gather(scale.state_dict()["own"])
    assert [len(rows) for rows in own] == [distributed.world_size() + 1] + [0] * (distributed.world_size() - 1)
