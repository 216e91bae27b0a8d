"""Batches of similar length: the budget, the order, and what stays the same from epoch to epoch."""

import pytest
import torch
from helpers import raises
from torch.utils.data import DataLoader

from learnerkit.data.lengths import LengthBatches
from learnerkit.data.order import in_order
from learnerkit.data.stream import SampleStream, distribute


def lengths(n=500, seed=0):
    return torch.randint(1, 300, (n,), generator=torch.Generator().manual_seed(seed))


def padded(batch, of):
    """The tokens of a batch, with padding."""
    return len(batch) * int(of[batch].max())


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("tokens", [100, 1000])  # some samples are longer than 100
def test_each_sample_comes_once_within_the_budget_and_little_is_padding(shuffle, tokens):
    found = lengths()
    batches = list(LengthBatches(found, tokens, shuffle))
    assert sorted(sum(batches, [])) == list(range(500))
    assert all(padded(batch, found) <= tokens or len(batch) == 1 for batch in batches)
    assert sum(padded(batch, found) for batch in batches) < 1.1 * found.sum()
    assert padded(batches[0], found) >= 0.8 * min(tokens, found.max())
    assert max(found[batches[0]]) >= 0.9 * found.max()  # the longest first


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.float32])
def test_lengths_of_any_type_make_the_same_batches(dtype):
    found = lengths() % 200 + 1
    assert list(LengthBatches(found.to(dtype), 1000)) == list(LengthBatches(found, 1000))


def test_epochs_differ_in_samples_but_not_in_the_number_of_batches_or_their_sizes():
    sampler = LengthBatches(lengths(), 1000, shuffle=True, generator=torch.Generator().manual_seed(1))
    first, second = list(sampler), list(sampler)
    assert first != second
    assert len(first) == len(second) == len(sampler)
    assert sorted(map(len, first)) == sorted(map(len, second))
    sampler.generator.manual_seed(1)
    assert list(sampler) == first
    alike = {frozenset(batch) for batch in first} & {frozenset(batch) for batch in second}
    assert len(alike) < len(first) / 3
    longest = [int(lengths()[batch].max()) for batch in first[1:]]
    assert min(longest[:20]) < max(longest[-20:])  # in no order


def test_without_a_generator_the_global_one_decides():
    sampler = LengthBatches(lengths(), 1000, shuffle=True)
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(list(sampler))
    assert found[0] == found[1] != list(sampler)


def test_in_the_order_of_the_dataset_the_budget_holds_too():
    found = lengths()
    dl = DataLoader(range(500), batch_sampler=LengthBatches(found, 1000, shuffle=True))
    batches = in_order(dl, "1").batch_sampler
    assert sum(batches, []) == list(range(500))
    assert all(padded(batch, found) <= 1000 for batch in batches)
    assert len(batches) < 500 * 300 / 1000


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("split", [False, True])
def test_ranks_together_have_each_sample_once_and_no_rank_exceeds_the_budget(ranks, split):
    found = lengths(101)
    sampler = LengthBatches(found, 1000, shuffle=True, generator=torch.Generator())
    mine = []
    for rank in range(ranks):
        sampler.generator.manual_seed(1)
        batches = SampleStream(sampler, rank, ranks, split=split)
        taken = list(batches)
        mine.append([batch for share, batch in zip(batches.shares, taken, strict=True) if share.size])
    assert sorted(i for rank in mine for batch in rank for i in batch) == list(range(101))
    assert all(padded(batch, found) <= 1000 for rank in mine for batch in rank)


def test_batches_of_other_samplers_are_joined_in_an_uneven_step():
    assert list(distribute([[0, 1, 2], [3]], 2, False, 1, n=2)) == [[[0, 1], [2, 3]]]
    assert list(distribute([[0, 1, 2], [3]], 2, False, 1, join=False, n=2)) == [[[0, 1, 2], [3]]]


def test_length_batches_need_samples_and_a_budget():
    with raises(ValueError, "got 0 samples and tokens=5"):
        LengthBatches([], 5)
    with raises(ValueError, "got 2 samples and tokens=0"):
        LengthBatches([1, 2], 0)


@pytest.mark.parametrize("tokens", [100, 1000])
def test_weighted_draws_are_of_the_expected_number_within_the_budget(tokens):
    found, weights = lengths(), torch.rand(500, generator=torch.Generator().manual_seed(2)) ** 2
    weights[:40] = 0
    sampler = LengthBatches(found, tokens, True, torch.Generator().manual_seed(1), weights)
    counts, sizes, epochs = torch.zeros(500), set(), 60
    for _ in range(epochs):
        batches = list(sampler)
        assert all(padded(batch, found) <= tokens or len(batch) == 1 for batch in batches)
        sizes.add(tuple(sorted(map(len, batches))))
        counts += torch.tensor(sum(batches, [])).bincount(minlength=500)
    assert len(sizes) == 1  # the same number of batches, of the same sizes, in each epoch
    assert len(batches) == len(sampler)
    assert sum(map(len, batches)) == 500
    expected = weights / weights.sum() * 500
    assert counts[:40].sum() == 0
    # A sample's draws in an epoch are its whole part and at most two that are drawn or not: a variance below 1/2.
    assert ((counts / epochs - expected).abs() < 5 * (0.5 / epochs) ** 0.5).all()


def test_a_rare_sample_that_is_drawn_often_is_in_many_batches():
    weights = torch.ones(500)
    weights[7] = 100
    sampler = LengthBatches(torch.full((500,), 10), 100, True, torch.Generator().manual_seed(1), weights)
    times = [batch.count(7) for batch in sampler]
    assert sum(times) in (83, 84, 85)
    assert max(times) < 8
