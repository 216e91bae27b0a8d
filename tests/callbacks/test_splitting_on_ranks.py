"""SplitBatch on several ranks: whichever of them runs out of memory, all take as many parts, and none waits in vain."""

import time
from functools import partial

import pytest
import torch
from helpers import mostly_slow
from memory_limits import FAILURE, Cancels, Limit, check_parts, far, fit
from torch import nn
from torch.nn import functional as F

from learnerkit import (
    Callback,
    CancelBatchException,
    CancelStepException,
    GradientAccumulation,
    GradientClip,
    SplitBatch,
    distributed,
)

pytestmark = pytest.mark.ranks(2, soak=[3])

RANK = distributed.rank()


def make_net():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


fitted = partial(fit, model=make_net)


def on(rank, rows, *args, **kwargs):
    """A limit on one rank, or with -1 on all; on the others there is none."""
    return Limit(rows if rank in (-1, RANK) else 1000, *args, **kwargs)


QUICK = [(1, "forward", 3), (0, "backward", 3)]
SLOW = [(-1, "forward", 3), (-1, "backward", 1), (0, "forward", 1)]


@pytest.mark.parametrize(
    ("which", "where", "rows"),
    mostly_slow(
        [(which, where, rows) for rows in (3, 1) for which in (-1, 0, 1) for where in ("forward", "backward")],
        *QUICK,
        slow=SLOW,
    ),
)
def test_all_ranks_take_the_parts_that_one_of_them_needs(which, where, rows):
    check_parts(fitted, on(which, rows, where), which)


def test_a_rank_with_fewer_samples_than_parts_takes_one_of_each():
    assert far(fitted(together=False, n=3), fitted(cbs=[SplitBatch(2)], n=3)) < 1e-9


@pytest.mark.ranks(2, soak=[3])
def test_ranks_without_data_take_part_in_steps_of_several_batches():
    # 49 samples in batches of 12: the last has one sample, so that all ranks but one have none
    for cbs in ((), (lambda: GradientAccumulation(n_batches=2), lambda: GradientClip(0.1))):
        limit = on(1, 2)
        split = fitted(limit, [SplitBatch(), *(cb() for cb in cbs)], n=49)
        assert far(fitted(cbs=[cb() for cb in cbs], together=False, n=49), split) < 1e-9


CASES = [
    (0, "before_batch", CancelBatchException, 0),
    (0, "before_batch", CancelBatchException, 1),
    (0, "after_pred", CancelBatchException, 0),
    (1, "after_loss", CancelBatchException, 1),
    (1, "before_step", CancelStepException, 0),
]


@pytest.mark.parametrize(("at", "event", "error", "which"), mostly_slow(CASES, CASES[1]))
def test_a_cancel_on_one_rank_in_the_first_batches_leaves_no_rank_waiting(at, event, error, which):
    whole = fitted(cbs=[Cancels(event, error, at, 0)], epochs=1)
    limit = on(which, 3)
    assert far(whole, fitted(limit, [SplitBatch(), Cancels(event, error, at, 0)], epochs=1)) < 1e-9


def test_a_larger_batch_late_in_an_epoch_is_cut_on_its_rank_and_all_agree_in_the_next():
    class Grows(Callback):
        def before_batch(self):
            if self.learn.training and self.learn.iter == 5:
                self.learn.xb = (torch.cat([self.learn.x, self.learn.x], 1),)

    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = make_net()

        def forward(self, x):
            return self.body(x[:, :4] if x.shape[1] == 4 else x[:, :4] - x[:, 4:] / 2)

    class Wide(Limit):
        def put_on(self, model):
            super().put_on(model.body)
            model.register_forward_pre_hook(lambda _, given: setattr(self, "wide", given[0].shape[1] > 4))

        def _check(self, module, rows):
            if self.wide:
                super()._check(module, rows)

    for where in ("forward", "backward"):
        whole = fitted(cbs=[Grows()], model=Sums, together=False)
        limit = Wide(3 if RANK == 1 else 1000, where)
        split = fitted(limit, [Grows(), SplitBatch()], model=Sums)
        assert bool(limit.failures) == (RANK == 1)
        assert far(whole, split) < 1e-9
        assert len({*distributed.all_gather(split.split_batch.parts)}) == 1


@pytest.mark.slow
def test_after_a_rank_alone_has_cut_a_batch_late_in_a_fit_another_fit_begins():
    class Late(Limit):
        def _check(self, module, rows):
            if split.epoch == 1 and split.iter == 5:
                super()._check(module, rows)

    split = fitted(cbs=[SplitBatch()])
    Late(3 if RANK == 1 else 1000).put_on(split.model)
    with split.no_logging(), split.no_bar(), split.distrib_ctx(split_batches=True):
        split.fit(2)
        has_cut = split.split_batch.parts > 1
        assert distributed.all_gather(has_cut) == [rank == 1 for rank in range(distributed.world_size())]
        split.fit(1)
    assert len({*distributed.all_gather(split.split_batch.parts)}) == 1


class Penalty(Callback):
    """Adds something to the loss that depends on the predictions."""

    def after_loss(self):
        if self.training:
            self.learn.loss_grad = self.loss_grad + 0.1 * self.learn.pred.square().mean()


@pytest.mark.parametrize("accumulates", mostly_slow([False, True], False))
@pytest.mark.slow
def test_a_loss_that_a_callback_changes_while_ddp_averages_or_other_ranks_need_more_parts(accumulates):
    def cbs():
        return [Penalty(), *[GradientAccumulation(n_batches=2)] * accumulates]

    whole = fitted(cbs=cbs(), together=False)
    assert far(whole, fitted(cbs=[*cbs(), SplitBatch(parts=2)])) < 1e-9
    for which in (0, 1):
        assert far(whole, fitted(on(which, 2), [*cbs(), SplitBatch()])) < 1e-9


@pytest.mark.slow
def test_a_rank_that_begins_again_since_others_need_more_parts_has_its_random_states_and_buffers_back():
    def model():
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3)).double()

    split = fitted(on(1, 2), [SplitBatch()], model=model)
    beforehand = fitted(cbs=[SplitBatch(parts=split.split_batch.parts)], model=model)
    assert far(beforehand, split) == 0
    assert all(map(torch.equal, beforehand.model.buffers(), split.model.buffers()))


def test_a_loss_over_tokens_is_the_same_in_parts():
    def loss(pred, y):
        return F.cross_entropy(pred, y.masked_fill(y == 2, -100))

    weight = {"loss": loss, "loss_weight": lambda y: (y != 2).sum()}
    for limit in (on(1, 2), on(0, 2, trains=False)):
        assert far(fitted(together=False, **weight), fitted(limit, [SplitBatch()], **weight)) < 1e-9


def test_a_rank_that_cannot_hold_one_sample_ends_all_in_seconds():
    start = time.monotonic()
    with pytest.raises((torch.OutOfMemoryError, distributed.PeerError)) as caught:
        fitted(on(1, 0), [SplitBatch()])
    assert time.monotonic() - start < 30
    assert f"one sample alone does not fit: {FAILURE}" in str(caught.value)


def test_static_graph_is_refused_in_words():
    with pytest.raises(ValueError, match="static_graph=True DDP counts backward passes"):
        fitted(cbs=[SplitBatch()], options={"static_graph": True})


def test_a_state_of_another_number_of_ranks_has_the_most_parts():
    cb = SplitBatch()
    states = [{"train": (3, 8), "evaluation": (1, 9)}, {"train": (5, 6), "evaluation": (1, 7)}]
    cb.load_state_dict({"ranks": states})
    assert cb.state_dict() == {"own": {"train": (5, 6), "evaluation": (1, 7)}}
