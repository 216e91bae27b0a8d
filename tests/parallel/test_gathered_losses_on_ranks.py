"""A loss that compares the samples of all ranks, which it gathers, trains as on one process."""

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from helpers import mostly_soak
from memory_limits import far
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from learnerkit import Callback, DataLoaders, GradientAccumulation, Learner, distributed
from learnerkit.processes.heartbeat import Heartbeat

pytestmark = pytest.mark.ranks(2, soak=[3])

RANK, RANKS = distributed.rank(), distributed.world_size()


class Encoder(nn.Module):
    """Two views and a temperature, which is a parameter that the loss uses behind the gathering."""

    def __init__(self):
        super().__init__()
        self.body, self.scale = nn.Linear(6, 4), nn.Parameter(torch.tensor(2.0))

    def forward(self, one, other):
        return self.body(one), self.body(other), self.scale


def contrastive(pred):
    one, other, scale = pred
    if torch.is_grad_enabled():
        one, other = (torch.cat(distributed.all_gather(x)) for x in (one, other))
    return alone((one, other, scale))


def alone(pred):
    one, other, scale = pred
    scores = F.normalize(one, dim=1) @ F.normalize(other, dim=1).T * scale
    return F.cross_entropy(scores, torch.arange(len(scores))) + 1e-3 * one.square().mean()


def trained(n, loss, options=None, cbs=(), together=True):
    """A learner that all ranks have trained, or each by itself, in batches of 12."""
    torch.manual_seed(3)
    one = torch.randn(n, 6).double()
    data = TensorDataset(one, one + 0.5 * torch.randn(n, 6).double())
    learn = Learner(
        DataLoaders.from_datasets(data, bs=12, n_inp=2, device="cpu"), Encoder().double(), loss, lr=0.01, cbs=cbs
    )
    with learn.no_logging(), learn.no_bar(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* processes each train a whole copy")
        if together:
            with learn.distrib_ctx(split_batches=True, **(options or {})):
                learn.fit(3)
        else:
            learn.fit(3)
    return learn


@pytest.mark.ranks(2, slow=[3])
@pytest.mark.parametrize("n", mostly_soak([36, 43, 37], 37))  # of 37 samples the last batch has one, and a rank none
@pytest.mark.parametrize("options", [{}, {"shard": True}], ids=["whole", "shards"])
def test_a_loss_over_the_samples_of_all_ranks_trains_as_on_one_process(n, options):
    learn = trained(n, contrastive, options)
    expected = trained(n, alone, together=False)
    assert far(expected, learn) < 1e-9
    assert learn.recorder.values[-1][0] == pytest.approx(expected.recorder.values[-1][0], rel=1e-9)


@pytest.mark.slow
def test_steps_of_several_batches_gather_in_each():
    def steps():
        return [GradientAccumulation(n_batches=2)]

    assert far(trained(37, alone, cbs=steps(), together=False), trained(37, contrastive, cbs=steps())) < 1e-9


class Centred(nn.Module):
    """A loss whose buffer follows the mean over the samples of all ranks, which has no gradient."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(4).double())

    def forward(self, pred):
        one, other, _ = pred
        loss = (one - other).square().mean() + (one - self.center).abs().mean()
        if torch.is_grad_enabled():
            everyone = torch.cat([part for [part] in distributed.all_gather([one.detach()])])
            self.center = 0.9 * self.center + 0.1 * everyone.mean(0)
        return loss


@pytest.mark.slow
@pytest.mark.ranks(2, slow=[3])
@pytest.mark.parametrize("options", [{}, {"shard": True}, {"find_unused_parameters": True}], ids=str)
def test_a_rank_without_samples_takes_part_in_what_a_loss_gathers_without_gradients(options):
    torch.manual_seed(0)
    one = Encoder().double()
    one.scale.requires_grad_(False)
    data = TensorDataset(torch.randn(37, 6).double(), torch.randn(37, 6).double())  # the last batch has one sample

    model, center = copy.deepcopy(one), torch.zeros(4).double()
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(2):
        for x, y in zip(*(t.split(12) for t in data.tensors), strict=True):
            a, b, _ = model(x, y)
            opt.zero_grad()
            ((a - b).square().mean() + (a - center).abs().mean()).backward()
            opt.step()
            center = 0.9 * center + 0.1 * a.detach().mean(0)
    dls = DataLoaders.from_datasets(data, bs=12, n_inp=2, shuffle=False, device="cpu")
    learn = Learner(dls, one, Centred(), lr=0.01)
    with learn.no_logging(), learn.no_bar(), learn.distrib_ctx(split_batches=True, **options):
        learn.fit(2)
    torch.testing.assert_close(learn.model.state_dict(), model.state_dict(), rtol=0, atol=1e-9)
    torch.testing.assert_close(learn.loss_func.center, center, rtol=0, atol=1e-9)


class Aided(Learner):
    """Adds a loss of a part of the model, which the loss alone calls."""

    def _loss(self):
        super()._loss()
        if self.training:
            self.loss_grad = self.loss_grad + self.model.aid(self.pred[0]).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"shard": True}, {"find_unused_parameters": True}], ids=str)
def test_a_rank_without_samples_takes_part_in_a_loss_that_gathers_and_calls_a_part_of_the_model(options):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(37, 6).double(), torch.randn(37, 6).double())
    model = Encoder()
    model.aid = nn.Linear(4, 3)
    model.scale.requires_grad_(False)

    def fitted(kept):
        dls = DataLoaders.from_datasets(data, bs=12, n_inp=2, shuffle=False, device="cpu")
        learn = Aided(dls, copy.deepcopy(model).double(), Centred(), lr=0.01)
        with learn.no_logging(), learn.no_bar(), kept(learn):
            learn.fit(2)
        return learn

    learn = fitted(lambda learn: learn.distrib_ctx(split_batches=True, **options))
    with distributed.alone():
        expected = fitted(lambda learn: nullcontext())
    torch.testing.assert_close(learn.model.state_dict(), expected.model.state_dict(), rtol=0, atol=1e-9)
    torch.testing.assert_close(learn.loss_func.center, expected.loss_func.center, rtol=0, atol=1e-9)


@pytest.mark.ranks(2, slow=[3])
def test_a_gathered_tensor_gets_the_gradients_of_all_ranks():
    mine = torch.arange(2.0 * (RANK + 1)).reshape(RANK + 1, 2).requires_grad_()  # rank 0 has one row, rank 1 two, ...
    parts = distributed.all_gather(mine)
    assert [len(part) for part in parts] == [*range(1, RANKS + 1)]
    (torch.cat(parts).square().sum() * (RANK + 1)).backward()
    assert torch.equal(mine.grad, 2 * mine.detach() * sum(range(1, RANKS + 1)))
    number = torch.tensor(float(RANK), requires_grad=True)
    numbers = distributed.all_gather(number)
    assert [each.item() for each in numbers] == [*map(float, range(RANKS))]
    torch.stack(numbers).sum().backward()
    assert float(number.grad) == RANKS
    with torch.no_grad():
        assert not any(part.requires_grad for part in distributed.all_gather(number))


class Logs(Callback):
    """Logs the loss, and a number once in each epoch."""

    def after_loss(self):
        if self.learn.training:
            self.learn.log_metric("same", self.loss)

    def after_train(self):
        self.learn.log_metric("once", float(RANK))


def test_a_logged_part_of_the_loss_has_the_mean_that_the_loss_has():
    learn = trained(37, alone, cbs=Logs)
    for row in learn.recorder.values:
        assert row[1] == pytest.approx(row[0], rel=1e-6)
        assert row[2] == pytest.approx((RANKS - 1) / 2)


def test_an_error_after_a_run_has_no_place_in_it():
    trained(36, alone)
    heartbeat = Heartbeat.own()
    assert heartbeat.read()["event"] == ""
    heartbeat.close()
