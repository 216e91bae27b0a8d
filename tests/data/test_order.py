"""The order in which samples are drawn, and the random numbers that draw it."""

import random
from collections import namedtuple
from contextlib import suppress

import numpy as np
import pytest
import torch
from helpers import make_learner, raises, raising
from resume_jobs import Counting, Placed, Shuffling
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SubsetRandomSampler, TensorDataset

from learnerkit import Callback, CheckpointCallback, DataLoaders, Learner, set_seed
from learnerkit.data.order import epoch_seed, in_order, keep_seeds, order_sources, put_states, states_of, with_batches
from learnerkit.data.rows import RowsLoader
from learnerkit.data.stream import seeded_samplers

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
        # A dataset that reads several rows at once, as torch's documentation has it.
        DataLoader(data, batch_size=None, sampler=BatchSampler(SubsetRandomSampler([3, 5]), 4, True)),
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


def test_dropout_does_not_change_the_order_and_a_second_fit_has_another():
    orders = []
    for p in (0.0, 0.5):
        set_seed(11)
        model = torch.nn.Sequential(torch.nn.Dropout(p), torch.nn.Linear(4, 1))
        set_seed(11)
        orders.append(epochs_of(DataLoader(rows(), 5, shuffle=True), 2, model))
    assert orders[0] == orders[1]
    assert epochs_of(DataLoader(rows(), 5, shuffle=True), 2) != orders[0]


def test_sample_order_depends_on_the_epoch_alone():
    torch.manual_seed(3)
    start = torch.get_rng_state()
    drawn = [int(torch.empty((), dtype=torch.int64).random_()) for _ in range(6)]  # by torch's loader and its sampler
    assert [epoch_seed(start, epoch) for epoch in (2, 0, 1)] == [drawn[5], drawn[1], drawn[3]]


def test_seeded_samplers_give_back_what_they_lent():
    own = torch.Generator()
    for generator in (None, own):
        dl = DataLoader(rows(), 4, shuffle=True, generator=generator)
        with seeded_samplers(dl, 3):
            assert (dl.sampler.generator is own) == (generator is own)
            assert dl.sampler.generator is not None
        assert dl.sampler.generator is generator


def test_keep_seeds_gives_random_streams_back():
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


def test_what_others_draw_does_not_change_the_order_of_a_sampler_that_uses_the_global_generators():
    quiet = orders(noise=0)
    assert quiet == orders(noise=5)
    by_epoch = [sum(quiet[i : i + 3], []) for i in (0, 3, 6)]
    assert [sorted(order) for order in by_epoch] == [list(range(9))] * 3
    assert by_epoch[0] != by_epoch[1] != by_epoch[2]


def test_a_second_fit_has_another_order_also_where_the_loader_has_a_generator_of_its_own():
    data = TensorDataset(torch.arange(9.0)[:, None], torch.zeros(9, 1))
    dl = DataLoader(data, 9, sampler=Drawing(), generator=torch.Generator())
    seen = []
    look = Callback(before_batch=lambda cb: seen.append(cb.xb[0].flatten().tolist()))
    learn = Learner(DataLoaders(dl, device="cpu"), nn.Linear(1, 1), nn.MSELoss())
    torch.manual_seed(3)
    with learn.no_logging(), learn.no_bar():
        learn.fit(1, cbs=look)
        learn.fit(1, cbs=look)
    assert seen[0] != seen[1]


# What decides the order of the next epoch


@pytest.mark.parametrize("kind", [Counting, Shuffling, Placed])
def test_the_next_epoch_is_the_one_that_would_have_followed(kind):
    dl, other = (DataLoader(range(12), 4, sampler=kind(12)) for _ in range(2))
    list(dl)
    state = states_of(order_sources(dl))
    before, expected = repr(state), [batch.tolist() for batch in dl]
    for _ in range(2):  # the second time from elsewhere
        put_states(order_sources(other), state)
        assert [batch.tolist() for batch in other] == expected
    assert repr(state) == before


@pytest.mark.parametrize(
    "generator", [random.Random(1), np.random.default_rng(1), np.random.RandomState(1), torch.Generator()]
)
def test_generators_of_all_kinds_are_kept(generator):
    def draw():
        return torch.rand((), generator=generator) if isinstance(generator, torch.Generator) else generator.random()

    sampler = SubsetRandomSampler(range(12))
    sampler.own = generator
    own = generator if isinstance(generator, torch.Generator) else None
    sources = order_sources(DataLoader(range(12), 4, sampler=sampler, generator=own))
    assert sources == [generator]
    state = states_of(sources)
    expected = draw()
    put_states(sources, state)
    assert draw() == expected
    put_states(sources, state)
    with keep_seeds(DataLoader(range(12), 4, sampler=sampler, generator=own)):
        draw()
    assert draw() == expected


def test_other_generators_or_samplers_are_refused():
    found, other = (order_sources(DataLoader(range(12), sampler=s)) for s in (Counting(12), range(12)))
    with raises(ValueError, "have 0 random generators and states, and had 1", "give them the same"):
        put_states(other, states_of(found))


class ByEpoch(Sampler):
    """Draws another order in each epoch that it is told of."""

    def __init__(self, n):
        self.n, self.epoch = n, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.n

    def __iter__(self):
        yield from torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch)).tolist()


class StreamByEpoch(IterableDataset):
    set_epoch = ByEpoch.set_epoch

    def __iter__(self):
        yield from [(torch.tensor(float(i)), torch.tensor(0.0)) for i in ByEpoch.__iter__(self)]

    n = 12


@pytest.mark.parametrize("make", [
    lambda: DataLoader(numbers(12), 4, sampler=ByEpoch(12)),
    lambda: DataLoader(numbers(12), batch_sampler=BatchSampler(ByEpoch(12), 4, False)),
    lambda: DataLoader(StreamByEpoch(), 4),
], ids=["sampler", "batch sampler", "dataset"])  # fmt: skip
def test_samplers_and_datasets_are_told_the_epoch_also_of_a_resumed_run(make, tmp_path):
    def read(*cbs):
        seen = []
        look = Callback(before_batch=lambda cb: seen.append((cb.epoch, cb.learn.x.int().tolist())))
        learn = Learner(DataLoaders(make(), device="cpu"), Scaled(), F.mse_loss, lr=0.0, cbs=[look, *cbs])
        with suppress(ZeroDivisionError):
            learn.fit(3)
        return seen

    expected = [(epoch, batch.tolist()) for epoch in range(3) for batch in order_of(epoch).split(4)]
    assert read() == expected
    stop = raising("after_step", ZeroDivisionError(), lambda cb: cb.train_iter == 5)
    assert read(CheckpointCallback(tmp_path, every=4), stop) == expected[:6]
    with pytest.warns(match="Callback|are read again"):
        assert read(CheckpointCallback(tmp_path, every=4, resume=True)) == expected[4:]


def order_of(epoch):
    return torch.randperm(12, generator=torch.Generator().manual_seed(epoch))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.factor


class Prepared(DataLoader):
    """Reads another loader, as those do that accelerate has prepared."""

    def __init__(self, base):
        super().__init__(base.dataset, batch_sampler=base.batch_sampler)
        self.base_dataloader = base

    def __iter__(self):
        return iter(self.base_dataloader)


def test_a_copy_of_a_loader_that_reads_another_one_draws_from_the_sampler_that_it_is_given():
    prepared = Prepared(DataLoader(range(10), 2))
    assert [batch.tolist() for batch in with_batches(prepared, batch_sampler=[[7, 1], [4]])] == [[7, 1], [4]]
    assert len(list(prepared)) == 5
