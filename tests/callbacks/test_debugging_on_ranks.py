"""ShortEpochCallback and OverfitBatch: two ranks train as one process does."""

import contextlib

import pytest
import torch
from helpers import mostly_slow
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from learnerkit import Callback, DataLoaders, GradientAccumulation, Learner, distributed
from learnerkit.callbacks.debugging import OverfitBatch, ShortEpochCallback
from learnerkit.metrics import AccumMetric

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.filterwarnings("ignore:.*each train a whole copy"),  # that is what is compared with
]


class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(4)
        for _ in range(24):
            yield torch.randn(4, generator=generator, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)


def loaders(stream=False):
    torch.manual_seed(3)
    if stream:
        return DataLoaders(DataLoader(Stream(), 6), DataLoader(Stream(), 6), device="cpu")
    x = torch.randn(45, 4, dtype=torch.float64)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    return DataLoaders.from_datasets(data, data, bs=7, device="cpu")


def trained(cbs, alone, epochs=2, verb="fit", stream=False, **kwargs):
    """What a fit came to: weights, values, and what its training steps saw of the first input."""
    dls = loaders(stream)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    learn = Learner(dls, model, nn.MSELoss(), opt_func=lambda p, lr: torch.optim.SGD(p, lr, 0.9), lr=0.05, **kwargs)
    context = contextlib.nullcontext() if alone else learn.distrib_ctx(split_batches=True)
    with learn.no_logging(), context:
        getattr(learn, verb)(epochs, cbs=cbs)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return flat, torch.tensor(learn.recorder.values, dtype=torch.float64), torch.tensor(learn.recorder.losses)


def equals_one_process(make_cbs, **kwargs):
    together = trained(make_cbs(), alone=False, **kwargs)
    alone = trained(make_cbs(), alone=True, **kwargs)
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


SHORT = {
    "batches": lambda: [ShortEpochCallback(n=3)],
    "batches of groups": lambda: [ShortEpochCallback(n=5), GradientAccumulation(n_batches=2)],
    "more than there are": lambda: [ShortEpochCallback(n=99)],
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow) if c != "batches of groups" else c for c in SHORT]
)
def test_short_epochs_are_those_of_one_process(case):
    equals_one_process(SHORT[case])


def test_a_part_of_an_epoch_is_that_of_one_process():
    equals_one_process(lambda: [ShortEpochCallback(0.5)], verb="fit_one_cycle")


def test_short_epochs_of_a_stream_are_those_of_one_process():
    equals_one_process(lambda: [ShortEpochCallback(n=2)], stream=True)


ONE_BATCH = {
    "a batch": lambda: [OverfitBatch()],
    "a group": lambda: [OverfitBatch(3), GradientAccumulation(n_batches=2)],
    "the last": lambda: [OverfitBatch(7)],  # it has 3 samples, 2 and 1 on the ranks
    "the last by samples": lambda: [OverfitBatch(7), GradientAccumulation(n_samples=12)],  # by the shares' totals
    "short epochs": lambda: [OverfitBatch(), ShortEpochCallback(n=4)],
}


@pytest.mark.parametrize("case", mostly_slow(ONE_BATCH, "a group", "the last by samples"))
def test_one_batch_is_overfitted_as_on_one_process(case):
    equals_one_process(ONE_BATCH[case])


def test_one_batch_of_a_schedule_is_overfitted_as_on_one_process():
    equals_one_process(lambda: [OverfitBatch(2)], verb="fit_one_cycle")


def test_one_batch_of_a_stream_is_overfitted_as_on_one_process():
    equals_one_process(lambda: [OverfitBatch()], stream=True)


def test_a_metric_gets_each_repeated_batch_in_order():
    """A metric of training batches gets predictions and targets in order, though a batch comes again and again."""
    found = []

    def take(pred, target):
        found.append(target)
        return 0.0

    for alone in (True, False):
        learn = Learner(loaders(), nn.Linear(4, 1).double(), nn.MSELoss(), metrics=AccumMetric(take))
        learn.recorder.train_metrics = True
        torch.manual_seed(5)
        with learn.no_logging(), contextlib.nullcontext() if alone else learn.distrib_ctx(split_batches=True):
            learn.fit(1, cbs=OverfitBatch())
    assert torch.equal(found[0], found[2]), (found[0].shape, found[2].shape)


def test_ranks_keep_their_shares_of_the_batch():
    seen = []
    note = Callback(before_batch=lambda cb: seen.append(cb.xb[0].clone()) if cb.training else None, order=20)
    trained([OverfitBatch(), note], alone=False)
    assert all(torch.equal(x, seen[0]) for x in seen)
    assert len(seen) == 14
    a, b = distributed.all_gather([x.tolist() for x in seen])
    assert len(a[0]) + len(b[0]) == 7
    assert a[0] != b[0]
