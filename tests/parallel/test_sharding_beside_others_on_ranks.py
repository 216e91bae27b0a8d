"""The jobs of the page on sharding beside others: two sharded ranks give the weights and metrics of one process."""

from functools import partial

import pytest
import torch
from helpers import mostly_soak
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import DataLoaders, GradientAccumulation, GradientClip, Learner, accuracy, distributed

JOBS = ("plain", "uneven", "tied", "clipped", "accumulated", "frozen", "unfrozen", "not called", "called by some")


class Block(nn.Module):
    """No dimension of it is divided by 2 or 3."""

    def __init__(self, width, hidden=29):
        super().__init__()
        self.a, self.b = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.b(self.a(x).tanh())


class Net(nn.Module):
    """Blocks between two layers, and a part that is called for marked samples alone, if there is one."""

    def __init__(self, extra=None):
        super().__init__()
        self.inp, self.extra = nn.Linear(13, 37), extra
        self.blocks = nn.ModuleList(Block(37) for _ in range(3))
        self.head = nn.Linear(37, 5)

    def forward(self, x):
        marked = x[:, :1] > 50
        x = self.inp(torch.where(x > 50, x - 100, x))
        for block in self.blocks:
            x = block(x)
        if marked.any():
            x = torch.where(marked, self.extra(x), x)
        return self.head(x)


class Tokens(nn.Module):
    """Its head has the weight of its embedding."""

    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(37, 13), nn.Linear(13, 37, bias=False)
        self.blocks = nn.ModuleList(Block(13) for _ in range(3))
        self.head.weight = self.emb.weight

    def forward(self, x):
        x = self.emb(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).transpose(1, 2)


def samples(job, n, seed):
    generator = torch.Generator().manual_seed(seed)
    if job == "tied":
        rows = torch.randint(37, (n, 7), generator=generator)
        return TensorDataset(rows[:, :-1], rows[:, 1:])
    x = torch.randn(n, 13, generator=generator, dtype=torch.float64)
    y = x[:, :5].argmax(1)
    if job == "called by some":  # by the last rank, which has the ends of all batches
        x[7::8, 0] += 100
    return TensorDataset(x, y)


def trained(job):
    """Weights, validation loss and accuracy after a fit on however many ranks there are."""
    torch.manual_seed(0)
    extra = {"not called": Block(37), "called by some": nn.Linear(37, 37)}
    model = (Tokens() if job == "tied" else Net(extra.get(job))).double()
    n = {"uneven": 19, "accumulated": 40}.get(job, 24)
    train, valid = samples(job, n, 0), samples(job, 21, 1)
    cbs = {"clipped": [GradientClip(0.1)], "accumulated": [GradientAccumulation(n_batches=2)]}
    learn = Learner(
        DataLoaders(DataLoader(train, batch_size=8), DataLoader(valid, batch_size=8)), model, nn.CrossEntropyLoss(),
        opt_func=partial(SGD, momentum=0.9, weight_decay=0.01), lr=0.1, cbs=cbs.get(job), metrics=accuracy,
        splitter=lambda m: [[p for p in m.parameters() if p is not m.head.weight], [m.head.weight]],
    )  # fmt: skip
    if job == "frozen":
        model.blocks[1].requires_grad_(False)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(shard=["blocks.*"], split_batches=True):
        if job == "unfrozen":
            learn.freeze()
            learn.fit(1)
            learn.unfreeze()
        learn.fit(2)
    return {name: p.detach() for name, p in model.named_parameters()}, learn.recorder.values[-1]


@pytest.mark.ranks(slow=[2], soak=[3])
@pytest.mark.filterwarnings("ignore:.*the loss does not depend on")
@pytest.mark.parametrize("job", mostly_soak(JOBS, "uneven", "tied"))
def test_sharded_ranks_equal_one_process(job):
    weights, values = trained(job)
    with distributed.alone():
        expected, expected_values = trained(job)
    assert values == pytest.approx(expected_values, abs=1e-12)
    for name, p in weights.items():
        torch.testing.assert_close(p, expected[name], rtol=0, atol=1e-12)
