"""What fits on several ranks see, step by step, against what a fit on one process sees."""

import random
import warnings
from contextlib import nullcontext

import pytest
import torch
from helpers import mostly_soak
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from learnerkit import Callback, DataLoaders, GradientAccumulation, Learner, distributed, set_seed

pytestmark = pytest.mark.ranks(2, soak=[3])

N = distributed.world_size()
EPOCHS = 2


class Seen(Callback):
    """The indices of each optimizer step, by micro-batch, and of each validation batch, by its place."""

    def before_fit(self):
        self.steps, self.evaluated, self._open = [], [], []

    def before_batch(self):
        if self.training:
            self._open.append(self.indices())

    def before_step(self):
        self.steps.append(self._open)
        self._open = []

    def after_pred(self):
        if not self.training:
            self.evaluated.append((self.epoch, self._batch_index, self.indices()))

    def indices(self):
        return self.xb[0][:, 0].int().tolist()

    def after_train(self):
        assert not self._open, f"no step was taken with {self._open}"


def rows(n):
    return TensorDataset(torch.arange(n).float()[:, None], torch.zeros(n, 1))


class Batches(Dataset):
    """Every item is a whole batch of its own size."""

    def __len__(self):
        return 11

    def __getitem__(self, i):
        x = 10.0 * i + torch.arange(i % 4 + 1)[:, None]
        return x, torch.zeros_like(x)


class Buckets:
    """A batch sampler of many sizes; it draws from its own generator, which a fit lends it, or from python's."""

    def __init__(self, n, lent):
        self.n = n
        if lent:
            self.generator = None

    def __len__(self):
        return len(list(self.cuts()))

    def cuts(self):
        start, size = 0, 1
        while start < self.n:
            yield start, size
            start, size = start + size, size % 5 + 1

    def __iter__(self):
        if hasattr(self, "generator"):
            order = torch.randperm(self.n, generator=self.generator).tolist()
        else:
            order = random.sample(range(self.n), self.n)
        return iter([order[start : start + size] for start, size in self.cuts()])


def fit(loaders, accumulated=1, batch_norm=False, distributed=None):
    """What this process sees in a fit, distributed or all by itself."""
    set_seed(42)
    model = nn.Sequential(nn.Linear(1, 3), *([nn.BatchNorm1d(3)] if batch_norm else []), nn.Linear(3, 1))
    learn, seen = Learner(loaders(), model, nn.MSELoss(), lr=1e-6), Seen()
    cbs = [seen, *([GradientAccumulation(n_batches=accumulated)] if accumulated > 1 else [])]
    if distributed is not None:
        learn.to_distributed(sync_bn=False, **distributed)
    with learn.no_logging(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* processes each train a whole copy")  # here that is meant
        learn.fit(EPOCHS, cbs=cbs)
    return seen


def joined(micro_batches):
    return [i for batch in micro_batches for i in batch]


DATA, VALID = rows(50), rows(17)


def loaders(dataset=DATA, **kwargs):
    return lambda: DataLoaders(DataLoader(dataset, **kwargs), DataLoader(VALID, batch_size=3), device="cpu")


CASES = {  # (the loaders, split_batches, how many batches a step has)
    "random": (loaders(batch_size=7, shuffle=True), True, 1),
    "random, with a worker": (loaders(batch_size=7, shuffle=True, num_workers=1), False, 1),
    "rows, drop_last": (lambda: DataLoaders.from_datasets(DATA, VALID, bs=5, drop_last=True, device="cpu"), True, 3),
    "weighted": (loaders(batch_size=4, sampler=WeightedRandomSampler(torch.linspace(0.1, 2, 50), 44)), True, 2),
    "subset": (loaders(batch_size=2, sampler=SubsetRandomSampler(range(0, 50, 2))), False, 2),
    "batch sampler": (lambda: loaders(batch_sampler=Buckets(50, lent=True))(), False, 1),
    "batch_size=None": (loaders(Batches(), batch_size=None, shuffle=True), False, 1),
    "BatchNorm": (loaders(batch_size=4, shuffle=True), True, 4),
    "python's generator": (loaders(batch_sampler=Buckets(50, lent=False)), True, 1),
}


@pytest.mark.parametrize("case", mostly_soak(CASES, "random", "rows, drop_last", "python's generator"))
def test_ranks_together_see_the_steps_and_the_evaluation_of_one_process(case):
    made, split, accumulated = CASES[case]
    of_one = accumulated if split else accumulated * N  # without splitting N batches make up a global one
    alone = fit(made, of_one)
    mine = fit(made, accumulated, batch_norm=case == "BatchNorm", distributed={"split_batches": split})
    ranks = distributed.all_gather(mine.steps)
    # In the order of one process: the first micro-batch of every rank, then the second of every rank, ...
    together = [
        joined(batch for micro in zip(*step, strict=True) for batch in micro) for step in zip(*ranks, strict=True)
    ]
    expected = [joined(step) for step in alone.steps]
    assert len(expected) >= 2 * EPOCHS
    half = len(expected) // EPOCHS
    assert together[:half] != together[half:]  # each epoch is drawn anew
    assert together == expected, f"ranks {together}, one process {expected}"
    evaluated = sorted(joined(distributed.all_gather(mine.evaluated)))
    if split:  # the pieces of a batch lie next to each other
        evaluated = [(epoch, i) for epoch, _, batch in evaluated for i in batch]
        expected = [(epoch, i) for epoch, _, batch in alone.evaluated for i in batch]
    else:
        expected = alone.evaluated
    assert evaluated == expected, f"evaluation on ranks {evaluated}, on one process {expected}"


@pytest.mark.slow
@pytest.mark.parametrize("of_loader", [True, False])
def test_generators_that_differ_between_ranks_draw_the_order_of_rank_0s(of_loader):
    generator = torch.Generator().manual_seed(distributed.rank())
    if of_loader:
        make = loaders(batch_size=5, shuffle=True, generator=generator)
    else:
        make = loaders(batch_size=5, sampler=RandomSampler(DATA, generator=generator))
    mine = [i for step in fit(make, distributed={}).steps for i in joined(step)]
    assert sorted(joined(distributed.all_gather(mine))) == sorted([*range(50)] * EPOCHS)


@pytest.mark.parametrize("sampler", [RandomSampler(VALID), Buckets(17, lent=False)])
def test_an_evaluation_by_itself_reads_in_the_order_of_one_process(sampler):
    """Not in a fit, whose seeds all ranks share."""
    batches = BatchSampler(sampler, 3, False) if isinstance(sampler, RandomSampler) else sampler
    learn = Learner(loaders()(), nn.Identity(), nn.MSELoss())
    orders = []
    for context in (nullcontext(), learn.distrib_ctx()):
        set_seed(42)
        with context:
            readings = [learn.get_preds(dl=DataLoader(VALID, batch_sampler=batches))[0].flatten() for _ in range(2)]
        orders.append([reading.int().tolist() for reading in readings])
    assert [sorted(order) for order in orders[0]] == [[*range(17)]] * 2
    assert orders[0][0] != orders[0][1]
    assert orders[1][0] == orders[0][0]
    assert sorted(orders[1][1]) == [*range(17)]
