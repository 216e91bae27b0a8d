"""The order in which samples are drawn, and the random numbers that draw it."""

import random
from collections import namedtuple

import pytest
import torch
from helpers import make_learner
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SubsetRandomSampler, TensorDataset

from learnerkit import Callback, DataLoaders, Learner, set_seed
from learnerkit.data.order import SampleOrder, in_order, keep_seeds, seeded_samplers
from learnerkit.data.rows import RowsLoader

Pair = namedtuple("Pair", "a b")


def numbers(n):
    return TensorDataset(torch.arange(n), torch.arange(n) * 2.0)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(5))


def test_in_order_reads_the_whole_dataset_whatever_the_sampler():
    data = numbers(11)
    for dl in (
        DataLoader(data, batch_size=4, shuffle=True, drop_last=True),
        DataLoader(data, batch_size=4, sampler=SubsetRandomSampler([1, 2])),
        DataLoader(data, batch_sampler=BatchSampler(SubsetRandomSampler([3]), 2, True)),
        RowsLoader(data, batch_size=4, shuffle=True, drop_last=True),
        DataLoader(data, batch_size=None, shuffle=True),
    ):
        ordered = in_order(dl, "0")
        assert torch.cat([b[0].reshape(-1) for b in ordered]).tolist() == list(range(11))
    stream = DataLoader(Stream())
    assert in_order(stream, "0") is stream
    with pytest.raises(ValueError, match="batch_size=None"):
        in_order(DataLoader(data, batch_size=None, sampler=SubsetRandomSampler([1])), "0")


def epochs_of(dl, n, model=None, **kwargs):
    seen = []
    dls = DataLoaders(dl, device="cpu")
    learn = make_learner(dls, model, torch.nn.MSELoss(), **kwargs)
    look = Callback(before_batch=lambda cb: seen.append(cb.xb[0][:, 0].tolist()))
    with learn.no_logging():
        learn.fit(n, cbs=look)
    return seen


def rows(n=12, seed=0):
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(n, 4, generator=g), torch.randn(n, 1, generator=g))


def test_a_fit_has_the_order_of_a_plain_loop_with_the_same_seed():
    set_seed(11)
    plain = [b[0][:, 0].tolist() for dl in [DataLoader(rows(), 5, shuffle=True)] for _ in range(3) for b in dl]
    set_seed(11)
    assert epochs_of(DataLoader(rows(), 5, shuffle=True), 3) == plain


def test_dropout_does_not_change_the_order_and_a_second_fit_has_another():
    orders = []
    for p in (0.0, 0.5):
        set_seed(11)
        model = torch.nn.Sequential(torch.nn.Dropout(p), torch.nn.Linear(4, 1))
        set_seed(11)
        orders.append(epochs_of(DataLoader(rows(), 5, shuffle=True), 2, model))
    assert orders[0] == orders[1]
    assert epochs_of(DataLoader(rows(), 5, shuffle=True), 2) != orders[0]


def test_validation_does_not_change_training():
    losses = []
    for valid in (None, DataLoader(rows(6, 1), 2, shuffle=True)):
        set_seed(5)
        model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        learn = make_learner(DataLoaders(DataLoader(rows(), 5, shuffle=True), valid, device="cpu"), model)
        learn.fit(3)
        losses.append(learn.recorder.losses)
    assert losses[0] == losses[1]


def test_sample_order_depends_on_the_epoch_alone():
    torch.manual_seed(3)
    order, again = SampleOrder(), SampleOrder()
    assert order.seed(2) == [again.seed(i) for i in range(3)][2]
    assert order.seed(0) != order.seed(1)


def test_seeded_samplers_give_back_what_they_lent():
    own = torch.Generator()
    for generator in (None, own):
        dl = DataLoader(rows(), 4, shuffle=True, generator=generator)
        with seeded_samplers(dl, 3):
            assert (dl.sampler.generator is own) == (generator is own)
            assert dl.sampler.generator is not None
        assert dl.sampler.generator is generator


def test_keep_seeds():
    with keep_seeds():
        first = torch.rand(1)
    assert torch.equal(first, torch.rand(1))


class Drawing(Sampler):
    """A sampler that draws from the global generators."""

    def __len__(self):
        return 9

    def __iter__(self):
        for i in torch.randperm(9).tolist():
            yield i if random.random() < 2 else 0


def orders(noise, epochs=3):
    """The samples of each epoch of a fit whose callback draws `noise` random numbers in each batch."""
    found = []

    class Look(Callback):
        def before_batch(self):
            found.append(self.xb[0].flatten().tolist())
            torch.rand(noise), random.random() if noise else None

    dl = DataLoader(TensorDataset(torch.arange(9.0)[:, None], torch.zeros(9, 1)), batch_size=4, sampler=Drawing())
    learn = Learner(DataLoaders(dl), nn.Linear(1, 1), nn.MSELoss(), cbs=Look())
    torch.manual_seed(3), random.seed(3)
    with learn.no_logging(), learn.no_bar():
        learn.fit(epochs)
    assert dl.sampler.__class__ is Drawing
    return found


def test_a_sampler_that_uses_the_global_generators_draws_as_in_a_plain_loop():
    dl = DataLoader(TensorDataset(torch.arange(9.0)[:, None], torch.zeros(9, 1)), batch_size=4, sampler=Drawing())
    torch.manual_seed(3), random.seed(3)
    plain = [batch[0].flatten().tolist() for _ in range(3) for batch in dl]
    assert orders(noise=0) == plain


def test_what_others_draw_does_not_change_the_order_within_an_epoch():
    quiet, noisy = orders(noise=0, epochs=1), orders(noise=5, epochs=1)
    assert quiet == noisy
    first, second = orders(noise=5, epochs=2)[:3], orders(noise=5, epochs=2)[3:]
    assert first != second
    assert sorted(sum(second, [])) == list(range(9))
