"""SplitBatch on sharded models: all ranks make as many passes, also if one runs out of memory in the middle of one."""

import random
import time
from functools import partial

import pytest
import torch
from helpers import mostly_slow, mostly_soak
from memory_limits import FAILURE, Cancels, Limit, check_parts, far, fit
from torch import nn
from torch.nn import functional as F

from learnerkit import (
    Callback,
    CancelBatchException,
    CancelStepException,
    GradientAccumulation,
    GradientClip,
    MixedPrecision,
    MixUp,
    SplitBatch,
    distributed,
)

pytestmark = pytest.mark.ranks(2, soak=[3])

RANK = distributed.rank()


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.b(self.drop(torch.tanh(self.a(x))))


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.inp, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class InPasses(Limit):
    """A limit in the middle of a pass with gradients: other ranks gather the next unit."""

    def put_on(self, model):
        model.register_forward_pre_hook(lambda _, given: self.seen.append(len(given[0])))
        place = model.blocks[1].a
        if self.where == "forward":
            place.register_forward_pre_hook(lambda m, x: self._check(m, x[0]) if torch.is_grad_enabled() else None)
        elif self.where == "without gradients":
            place.register_forward_pre_hook(lambda m, x: None if torch.is_grad_enabled() else self._check(m, x[0]))
        else:
            place.register_full_backward_hook(lambda m, _, grads: self._check(m, grads[0]))


fitted = partial(fit, model=Net, shard=True)


def on(rank, rows, where="forward", **kwargs):
    """A limit on one rank, or with -1 on all."""
    return InPasses(rows if rank in (-1, RANK) else 1000, where, **kwargs)


@pytest.mark.parametrize("where", mostly_soak(["forward", "backward", "without gradients"], "backward"))
@pytest.mark.parametrize("which", mostly_soak([-1, 0, 1], 1))
@pytest.mark.soak
def test_a_rank_that_runs_out_of_memory_in_a_pass_leaves_no_rank_waiting(which, where):
    check_parts(fitted, on(which, 2, where), which)


class Penalty(Callback):
    """Makes the loss depend on the predictions in another way, too."""

    def after_loss(self):
        if self.learn.training and self.learn.batch_size:
            self.learn.loss_grad = self.loss_grad + 0.1 * self.learn.pred.square().mean()


class KeepsGradients(Callback):
    """Takes every other step, with the gradients of two batches."""

    order = 5
    run_valid = False

    def after_backward(self):
        if self.learn.iter % 2 == 0:
            raise CancelBatchException


def tokens(pred, y):
    return F.cross_entropy(pred, y.masked_fill(y == 2, -100))


JOBS = {
    "a rank without data": {"n": 49},
    "accumulated": {
        "cbs": [lambda: GradientAccumulation(n_batches=2), lambda: GradientClip(0.1)],
        "loss": tokens,
        "loss_weight": lambda y: (y != 2).sum(),
        "model": lambda: Scaled(),
        "shard": [Block, nn.Linear],  # of one inside another the outer is a unit
    },
    "kept gradients": {"cbs": [KeepsGradients], "parts": 2},
    "classes with weights, a rank without data": {
        "n": 13, "loss": nn.CrossEntropyLoss(torch.tensor([0.2, 1, 3]).double()), "parts": 2,
    },
    "reduced once": {"cbs": [lambda: GradientAccumulation(n_batches=2)], "options": {"sync": False}, "parts": 3},
    "gathered for both passes": {"options": {"reshard_after_forward": False}},
    "penalty": {"cbs": [Penalty]},
    "counted": {"loss": tokens, "loss_weight": lambda y: (y != 2).sum()},
    "sum": {"loss": nn.CrossEntropyLoss(reduction="sum")},
    "unused parameters": {"model": lambda: WithUnused()},
}  # fmt: skip


class Scaled(Net):
    """Has a parameter that every rank has whole."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return super().forward(x) * self.scale


class WithUnused(Net):
    def __init__(self):
        super().__init__()
        self.blocks[1].c = nn.Linear(6, 6)
        self.more = nn.Linear(3, 3)


SOME = "accumulated", "kept gradients", "classes with weights, a rank without data"


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was chosen")
@pytest.mark.parametrize("where", mostly_soak(["forward", "backward"], "backward"))
@pytest.mark.parametrize("job", mostly_slow(JOBS, *SOME, slow=["a rank without data"]))
def test_a_job_in_parts_equals_one_process(job, where):
    given = dict(JOBS[job])
    cbs, options, parts = given.pop("cbs", []), given.pop("options", None), given.pop("parts", None)
    limit = None if parts else on(1, 2, where)
    split = fitted(limit, [*(cb() for cb in cbs), SplitBatch(parts=parts)], options=options, **given)
    assert limit is None or distributed.reduce(limit.failures) > 0
    assert far(fitted(cbs=[cb() for cb in cbs], together=False, **given), split) < 1e-9


@pytest.mark.soak
def test_samples_are_mixed_and_precision_is_lowered_as_without_parts():
    for cbs in ([MixUp], [lambda: MixedPrecision("bf16")]):
        limit = on(0, 3)
        split = fitted(limit, [*(cb() for cb in cbs), SplitBatch()])
        assert distributed.reduce(limit.failures) > 0
        assert far(fitted(cbs=[cb() for cb in cbs]), split) < (1e-9 if cbs == [MixUp] else 5e-2)


@pytest.mark.soak
def test_random_numbers_are_those_of_as_many_parts_beforehand():
    limit = on(1, 2, "backward")
    split = fitted(limit, [SplitBatch()], model=lambda: Net(0.5))
    assert far(fitted(cbs=[SplitBatch(parts=split.split_batch.parts)], model=lambda: Net(0.5)), split) == 0


CANCELS = {
    "first batch, on the rank that is cut": (0, "before_batch", CancelBatchException, 0),
    "first batch": (0, "before_batch", CancelBatchException, 1),
    "after the forward pass": (0, "after_pred", CancelBatchException, 0),
    "after the loss": (1, "after_loss", CancelBatchException, 1),
    "later batch": (3, "before_batch", CancelBatchException, 0),
    "step": (1, "before_step", CancelStepException, 0),
}


@pytest.mark.soak
@pytest.mark.parametrize("where", mostly_slow(CANCELS, slow=["step", "after the loss"]))
def test_a_cancel_on_one_rank_leaves_no_rank_waiting(where):
    at, event, error, which = CANCELS[where]
    whole = fitted(cbs=[Cancels(event, error, at, 0)], epochs=1)
    split = fitted(on(which, 3), [SplitBatch(), Cancels(event, error, at, 0)], epochs=1)
    assert far(whole, split) < 1e-9


@pytest.mark.slow
def test_evaluation_is_cut_on_the_rank_that_needs_it():
    limit = on(1, 3, "without gradients", trains=False)
    split = fitted(limit, [SplitBatch()])
    assert distributed.reduce(limit.failures) > 0
    assert far(fitted(together=False), split) < 1e-9


def test_a_rank_that_cannot_hold_one_sample_ends_all_in_seconds():
    start = time.monotonic()
    limit = on(1, 0)
    with pytest.raises((torch.OutOfMemoryError, distributed.PeerError)) as caught:
        fitted(limit, [SplitBatch()])
    assert time.monotonic() - start < 30
    assert FAILURE in str(caught.value)


def test_what_would_lose_gradients_is_an_error():
    limit = on(1, 2, begins=5)
    cbs = [GradientAccumulation(n_batches=4), SplitBatch()]
    with pytest.raises((torch.OutOfMemoryError, distributed.PeerError), match="sync=False"):
        fitted(limit, cbs, options={"sync": False})


@pytest.mark.soak
def test_no_rank_waits_in_forty_runs():
    draw = random.Random(0)  # alike on all ranks
    for run in range(40):
        shard, which, rows = draw.random() < 0.7, draw.choice([-1, 0, 1]), draw.choice([1, 2, 3])
        where = draw.choice(["forward", "backward", *["without gradients"] * shard])
        n, begins = draw.choice([49, 61, 100]), draw.choice([0, 0, *[3] * shard])
        limit = on(which, rows, where, begins=begins)
        split = fitted(limit, [SplitBatch()], n=n, epochs=1, options={"shard": shard})
        assert far(fitted(together=False, n=n, epochs=1), split) < 1e-9, (run, shard, which, rows, where, n)
