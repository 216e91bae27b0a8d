"""Losses on two ranks: those that ask the learner, need no targets, come from the model, or have several parts."""

import pytest
import torch
from helpers import OwnBackward, alone_and_together, mostly_slow, raises
from model_jobs import penalise
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import Callback, CancelBackwardException, CancelBatchException, DataLoaders, Learner, distributed

pytestmark = pytest.mark.ranks(2)

N = 19  # in batches of 3: in the last step of an epoch one rank has no data


def make_learner(model, loss_func=None, n_inp=1, bs=3, kind=Learner, **kwargs):
    torch.manual_seed(3)
    x = torch.randn(N + 8, 4, dtype=torch.float64)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    train, valid = torch.utils.data.random_split(data, [N, 8], torch.Generator().manual_seed(1))
    names = {} if loss_func is None else {"n_inp": n_inp}
    dls = DataLoaders.from_datasets(train, valid, bs=bs, device="cpu", **names)
    model = model().double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.4)
    return kind(dls, model, loss_func, opt_func=torch.optim.SGD, lr=0.1, **kwargs)


def both(*args, use=lambda learn: learn.fit(2), **kwargs):
    return [learn for learn, _ in alone_and_together(lambda: make_learner(*args, **kwargs), use)]


def facts(learn):
    return [p.detach() for p in learn.model.parameters()], learn.recorder.values, learn.recorder.losses


def check_equal(*args, **kwargs):
    alone, together = both(*args, **kwargs)
    torch.testing.assert_close(facts(together), facts(alone), rtol=1e-9, atol=1e-12)
    assert together.recorder.metric_names == alone.recorder.metric_names
    return alone


def near_inputs(pred, target, *, x, model, batch, reduction="mean"):
    assert len(x) == len(pred) == len(batch[0])
    losses = (pred - target).square() + 0.1 * (model(x) - x[:, :1]).square()
    return losses.mean() if reduction == "mean" else losses


def net():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def test_a_loss_that_asks_the_learner():
    def predict(learn):
        learn.fit(2)
        *_, losses = learn.get_preds(with_loss=True)
        assert losses.mean().item() == pytest.approx(learn.validate()[0], rel=1e-9)

    check_equal(net, near_inputs, use=predict)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 2), nn.Linear(1, 2)

    def forward(self, x, y):
        return self.a(x), self.b(y)


def test_a_loss_without_targets_equals_that_on_one_process():
    check_equal(Two, lambda pred: (pred[0] - pred[1]).square().mean(), n_inp=2)


class ByPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 1)

    def forward(self, x, targets=None):
        pred = self.body(x)
        return pred, None if targets is None else F.mse_loss(pred, targets)


class Bare(ByPlace):
    def forward(self, x, targets=None):
        return super().forward(x, targets)[1]


@pytest.mark.parametrize("model", mostly_slow([ByPlace, Bare], ByPlace))
def test_a_loss_that_the_model_returns(model):
    check_equal(model, loss_weight="samples")


class Parts(nn.Module):
    """Three losses: means over the positives, over the samples and over other weights, and the sum of another one."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.body = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(4, 3)

    def forward(self, x, targets=None):
        hidden, there, weights = self.body(x).tanh(), x[:, 0] > 0.4, x[:, 1].abs()
        return {
            "boxes": (self.first(hidden) - x[:, :1]).square()[there].mean(),  # of nothing a NaN
            "classes": (self.second(hidden) - targets).square().mean(),
            "weighted": (self.first(hidden)[:, 0].square() * weights).sum() / weights.sum(),
            "total": 0.01 * hidden.square().sum(),
            "positives": there.sum(),
        }


WEIGHTS = {"boxes": "positives", "classes": "samples", "weighted": lambda out, y: WEIGHT_OF[0], "total": "sum"}
WEIGHT_OF = [0.0]


def note_weights(cb):
    WEIGHT_OF[0] = cb.xb[0][:, 1].abs().sum()


class NotesWeights(Callback):
    before_batch = note_weights


@pytest.mark.parametrize("extra", [[], [Callback(after_loss=penalise)]], ids=["plain", "penalty"])
def test_several_losses_each_with_a_count_of_its_own(extra):
    learn = check_equal(Parts, loss_weight=WEIGHTS, cbs=[NotesWeights, *extra])
    assert learn.recorder.metric_names[1:-1] == ["train_loss", "valid_loss", "boxes", "classes", "weighted", "total"]
    assert all(p.isfinite().all() for p in learn.model.parameters())


@pytest.mark.slow
def test_an_evaluation_inside_a_batch_leaves_its_losses_alone():
    def validate(cb):
        if cb.training:
            cb.learn.validate()

    plain = check_equal(Parts, loss_weight=WEIGHTS, cbs=NotesWeights)
    found = check_equal(Parts, loss_weight=WEIGHTS, cbs=[NotesWeights, Callback(after_loss=validate)])
    assert str(facts(found)) == str(facts(plain))


def test_the_guess_that_all_are_means_over_samples_is_wrong_here():
    alone, together = both(Parts, loss_weight=dict.fromkeys(WEIGHTS, "samples") | {"boxes": "positives"})
    gap = [(a - b).abs().max() for a, b in zip(facts(alone)[0], facts(together)[0], strict=True)]
    assert max(gap) > 1e-6


@pytest.mark.slow
def test_several_losses_with_steps_after_the_backward_pass():
    check_equal(Parts, kind=OwnBackward, loss_weight=WEIGHTS, cbs=NotesWeights)


@pytest.mark.parametrize("event", mostly_slow(["before_batch", "after_pred", "before_backward"], "after_pred"))
def test_a_rank_that_leaves_a_batch_counts_nothing(event):
    """Rank 1 leaves each batch: the steps are those of rank 0's samples."""

    def leave(cb):
        if cb.training and distributed.rank() == 1:
            raise CancelBackwardException if event == "before_backward" else CancelBatchException

    learn = make_learner(Parts, bs=4, loss_weight=WEIGHTS, cbs=[NotesWeights, Callback(**{event: leave}, order=5)])
    seen = []
    with learn.no_logging(), learn.distrib_ctx(split_batches=True):
        learn.fit(1, cbs=Callback(before_batch=lambda cb: seen.append(cb.batch) if cb.training else None, order=-5))
    batches = distributed.broadcast(seen)
    model = make_learner(Parts).model
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        losses = model(x, y)
        del losses["positives"]
        sum(loss for loss in losses.values() if not loss.isnan()).backward()
        opt.step()
        opt.zero_grad()
    torch.testing.assert_close(facts(learn)[0], [p.detach() for p in model.parameters()], rtol=1e-9, atol=1e-12)


def test_other_losses_than_there_are_are_refused_on_all_ranks():
    learn = make_learner(Parts, loss_weight={"boxes": "positives"})
    with learn.distrib_ctx(split_batches=True), raises(ValueError, "loss_weight= has a weight for each of boxes"):
        learn.fit(1)


def test_the_rate_finder_sees_the_losses_of_one_process():
    alone, together = both(
        Parts, loss_weight=WEIGHTS, cbs=NotesWeights, use=lambda learn: learn.lr_find(num_it=12, show_plot=False)
    )
    torch.testing.assert_close(together.recorder.lr_find_curve[1], alone.recorder.lr_find_curve[1], rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("event", mostly_slow(["before_fit", "before_epoch"], "before_epoch"))
def test_a_loss_that_a_callback_puts_in_place_of_another(event, reduction):
    first = {"mean": "sum", "sum": "mean"}[reduction]

    def replace(cb):
        if cb.epoch or event == "before_fit":
            cb.learn.loss_func = nn.MSELoss(reduction=reduction)

    check_equal(net, nn.MSELoss(reduction=first), cbs=Callback(**{event: replace}))


@pytest.mark.parametrize("empty", [slice(0, 3), slice(3, 6)], ids=["first", "later"])
@pytest.mark.parametrize("unused", [None, True])
def test_a_batch_that_counts_nothing_on_any_rank(empty, unused):
    x, y = torch.randn(9, 4, dtype=torch.float64), torch.randint(0, 3, (9,))
    y[empty] = -100

    def make():
        torch.manual_seed(1)
        dls = DataLoaders(DataLoader(TensorDataset(x, y), 3), device="cpu")
        return Learner(dls, nn.Linear(4, 3).double(), nn.CrossEntropyLoss(), lr=0.1)

    def use(learn):
        learn.fit(2)
        state = learn.opt.state[learn.model.weight]
        return [p.detach() for p in learn.model.parameters()], state["exp_avg"], state["step"]

    (_, alone), (_, together) = alone_and_together(make, use, find_unused_parameters=unused)
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-12)


def test_the_sample_that_stands_in_on_a_shard_without_data_counts_nothing_in_a_batch_that_is_cancelled():
    x, y = torch.randn(13, 4, dtype=torch.float64), torch.arange(13) % 3
    weight = torch.tensor([1.0, 2.0, 0.3], dtype=torch.float64)

    def leave(cb):
        if cb.iter == 2:  # the last batch, with one sample
            raise CancelBackwardException

    def make():
        torch.manual_seed(1)
        dls = DataLoaders(DataLoader(TensorDataset(x, y), 6), device="cpu")
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        return Learner(dls, model, nn.CrossEntropyLoss(weight), lr=0.1, cbs=Callback(before_backward=leave))

    (alone, _), (together, _) = alone_and_together(make, lambda learn: learn.fit(2), shard=True)
    torch.testing.assert_close(together.recorder.values, alone.recorder.values, rtol=1e-9, atol=1e-12)
