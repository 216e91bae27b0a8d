"""ActivationCheckpointing on two ranks: under DDP, and inside units that FSDP2 shards."""

from contextlib import nullcontext

import pytest
import torch
from helpers import mostly_soak, step_gradient
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from learnerkit import ActivationCheckpointing, Callback, DataLoaders, GradientAccumulation, Learner, distributed
from learnerkit.large.units import units
from learnerkit.shards import gathered

pytestmark = pytest.mark.ranks(slow=[2], soak=[3])


class Block(nn.Module):
    """Counts its calls in training."""

    def __init__(self, dropout):
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(5, 7), nn.Linear(7, 5), nn.Dropout(dropout)
        self.norm, self.calls = nn.BatchNorm1d(7), 0

    def forward(self, x):
        self.calls += self.training and torch.is_grad_enabled()
        return x + self.last(self.drop(self.norm(self.first(x)).tanh()))


class Counted(Block):
    """Counts in a list, which is not put back after a recomputation."""

    def __init__(self, dropout):
        super().__init__(dropout)
        self.called = []

    def forward(self, x):
        self.called.append(self.training)
        return super().forward(x)


def make_model(dropout=0.2, n=3):
    torch.manual_seed(3)
    return nn.Sequential(*(Counted(dropout) for _ in range(n)), nn.Linear(5, 1)).double()


def trained(*cbs, n=30, **kwargs):
    """A learner after a fit, its weights and buffers, and how gradients were averaged."""
    torch.manual_seed(5 + distributed.rank())
    x = torch.randn(n, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    dls = DataLoaders.from_datasets(data, data, bs=8, shuffle=False, device="cpu")
    learn = Learner(dls, make_model(), nn.MSELoss(), opt_func=torch.optim.SGD, lr=0.05, cbs=[*cbs])
    ways = []

    def look(cb):
        ways.append(type(step_gradient(cb.learn)).__name__)

    with learn.no_logging(), learn.no_bar(), learn.distrib_ctx(**kwargs):
        learn.fit(2, cbs=Callback(before_step=look, order=1000))
    return learn, torch.cat([t.detach().double().reshape(-1) for t in learn.model.state_dict().values()]), ways


@pytest.mark.parametrize("n", [64, 57], ids=["", "a rank without data"])
@pytest.mark.parametrize("n_batches", mostly_soak([1, 3], 3))
def test_ddp_averages_the_same_gradients_during_the_same_pass(n, n_batches):
    def accumulation():
        return GradientAccumulation(n_batches=n_batches)

    plain, expected, ways = trained(accumulation(), n=n)
    learn, found, ways_with_it = trained(accumulation(), ActivationCheckpointing(), n=n)
    assert torch.equal(found, expected)
    assert plain.recorder.values == learn.recorder.values
    assert ways_with_it == ways
    assert ways[-1] == "Overlapped"
    counts = [[block.called.count(True) for block in each.model[:3]] for each in (plain, learn)]
    assert counts[1] == [2 * n for n in counts[0]]
    assert [block.calls for block in learn.model[:3]] == [block.calls for block in plain.model[:3]]
    assert not any("forward" in vars(m) for m in learn.model.modules())


@pytest.mark.parametrize("reshard", mostly_soak([True, False], True))
def test_a_sharded_model_computes_its_units_again_inside_of_them(reshard):
    def weights(cb):
        model = make_model()
        for unit in units(model).values():
            fully_shard(unit, reshard_after_forward=reshard)
        fully_shard(model)
        opt = torch.optim.SGD(model.parameters(), 0.05)
        torch.manual_seed(5 + distributed.rank())
        calls = 0
        with nullcontext() if cb is None else cb.recomputed(model):
            for _ in range(3):
                model(torch.randn(6, 5, dtype=torch.float64)).square().mean().backward()
                opt.step()
                opt.zero_grad()
                calls = [len(block.called) for block in model[:3]]
        buffers = torch.cat([b.double().reshape(-1) for b in model.buffers()])
        return torch.cat([gathered(p.detach()).reshape(-1) for p in model.parameters()]), buffers, calls

    (expected, buffers, calls), (found, found_buffers, found_calls) = weights(None), weights(ActivationCheckpointing())
    assert torch.equal(found, expected)
    assert torch.equal(found_buffers, buffers)
    assert (calls, found_calls) == ([3] * 3, [6] * 3)


def test_the_check_measures_on_every_rank():
    torch.manual_seed(1)
    x = torch.randn(32, 5, dtype=torch.float64)
    dls = DataLoaders.from_datasets(TensorDataset(x, x[:, :1]), bs=8, shuffle=False, device="cpu")
    learn = Learner(dls, make_model(), nn.MSELoss(), cbs=ActivationCheckpointing())
    with learn.distrib_ctx():
        assert learn.check()
        learn.fit(1)
