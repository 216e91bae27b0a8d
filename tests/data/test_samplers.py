"""What a loader and its samplers carry from one epoch to the next."""

import random

import numpy as np
import pytest
import torch
from helpers import raises
from resume_jobs import Counting, Shuffling
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from learnerkit import DataLoaders

DATA = list(range(12))


class Holds(Counting):
    """Has attributes of all kinds that can be kept, and some that cannot."""

    def __init__(self, n, size=4):
        super().__init__(n)
        self.size, self.name, self.none, self.ratio = size, "a", None, 0.5
        self.list, self.tuple, self.dict = [1, 2], (3, 4), {"a": [5], 6: {"b": 7}}
        self.array, self.tensor, self.table = np.arange(3), torch.arange(3), torch.ones(2, 2)
        self.data, self.objects, self.function = DATA, [object()], print

    def __iter__(self):
        self.epoch += 1
        self.list += [self.epoch]
        self.dict["a"][0] += 1
        self.tuple = (*self.tuple, self.epoch)
        self.array += 1
        self.tensor += 1
        self.ratio /= 2
        self.none = self.name = str(self.epoch)
        self.table += 1
        return iter(range(self.n))


def states(sampler, **kwargs):
    dl = DataLoader(DATA, 4, sampler=sampler, **kwargs)
    return dl, DataLoaders(dl, device="cpu").sampler_states(dl)


def test_what_moves_is_put_back_and_what_a_script_has_set_stays():
    dl, found = states(Holds(12))
    for _ in range(3):
        list(dl)
    state = found.state()
    kept = {"epoch", "list", "dict", "tuple", "array", "tensor", "ratio", "none", "name"}
    assert [set(changed) for changed in state["attributes"]] == [kept]
    other = Holds(12, size=6)
    lists = other.list, other.array, other.tensor
    states(other)[1].load(state)
    assert other.size == 6
    assert all(np.array_equal(getattr(other, name), getattr(dl.sampler, name)) for name in kept - {"dict"})
    assert other.dict == dl.sampler.dict
    assert all(a is b for a, b in zip(lists, (other.list, other.array, other.tensor), strict=True))  # in place


@pytest.mark.parametrize("kind", [Counting, Shuffling])
def test_the_next_epoch_is_the_one_that_would_have_followed(kind):
    dl, found = states(kind(12))
    list(dl)
    state = found.state()
    expected = [batch.tolist() for batch in dl]
    other, fresh = states(kind(12))
    fresh.load(state)
    assert [batch.tolist() for batch in other] == expected
    list(other)
    fresh.load(state)  # once more, from elsewhere
    assert [batch.tolist() for batch in other] == expected


def test_a_state_is_not_changed_by_what_follows():
    dl, found = states(Shuffling(12))
    list(dl)
    state = found.state()
    before = repr(state)
    found.load(state)
    list(dl)
    assert repr(state) == before


@pytest.mark.parametrize(
    "generator", [random.Random(1), np.random.default_rng(1), np.random.RandomState(1), torch.Generator()]
)
def test_generators_of_all_kinds_are_kept(generator):
    def draw():
        return torch.rand((), generator=generator) if isinstance(generator, torch.Generator) else generator.random()

    sampler = Counting(12)
    sampler.own = generator
    _, found = states(sampler, generator=generator if isinstance(generator, torch.Generator) else None)
    assert len(found.generators) == 1
    state = found.state()
    expected = draw()
    found.load(state)
    assert draw() == expected


def test_torchs_samplers_have_nothing_but_generators():
    dl = DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA, generator=torch.Generator()), 4, False))
    state = DataLoaders(dl, device="cpu").sampler_states(dl).state()
    assert (len(state["generators"]), state["attributes"]) == (1, [])


def test_other_generators_or_samplers_are_refused():
    _, found = states(Counting(12))
    for other, words in ((None, "had 1"), (Counting(12), "1 random generators and had 0")):
        with raises(ValueError, words, "give them the same"):
            states(other, **({"generator": torch.Generator()} if other else {}))[1].load(found.state())


def test_a_sampler_that_is_gone_is_not_held():
    dl, other = (DataLoader(DATA, 4, sampler=Counting(12)) for _ in range(2))
    dls = DataLoaders(dl, device="cpu")
    dls.sampler_states(dl)
    dls.loaders[0] = other
    dls.sampler_states(other)
    assert [sampler for sampler, _ in dls._samplers.values()] == [other.sampler]
