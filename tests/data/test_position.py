"""The place in the data: a fit that goes on in mid-epoch reads what an uninterrupted one would have read."""

import json
import random
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from learnerkit import Callback, CancelFitException, DataLoaders, Learner, set_seed, world
from learnerkit.checkpoints import encoding

N = 22


class Noisy(Dataset):
    """Each sample is its number and a random number of each generator; `read` has what this process has fetched."""

    def __init__(self, n=N):
        self.n, self.read = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.read.append(int(i))
        noise = torch.rand(()).item(), random.random(), np.random.rand()
        return torch.tensor([float(i), *noise], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)


class Drawing(Sampler):
    """Draws from torch's, python's and numpy's global generators, one index at a time."""

    def __len__(self):
        return N

    def __iter__(self):
        for i in torch.randperm(N).tolist():
            yield (i + random.randrange(3) + np.random.randint(3) + int(torch.randint(3, ()))) % N


class Buckets(Sampler):
    """A batch sampler of its own, with a generator of python's and one of numpy's; its batches differ in size."""

    def __init__(self):
        self.random, self.generator_of_sizes = random.Random(5), np.random.default_rng(6)

    def __len__(self):
        return 6

    def __iter__(self):
        order = list(range(N))
        self.random.shuffle(order)
        for _ in range(6):
            size = int(self.generator_of_sizes.integers(1, 4))
            yield order[:size]
            order = order[size:]


def own_generator(seed=3):
    return torch.Generator().manual_seed(seed)


# name -> arguments of the training loader
SAMPLERS = {
    "shuffled": lambda data: {"batch_size": 4, "shuffle": True},
    "drop_last": lambda data: {"batch_size": 4, "shuffle": True, "drop_last": True},
    "own generator": lambda data: {"batch_size": 4, "shuffle": True, "generator": own_generator()},
    "weighted": lambda data: {"batch_size": 4, "sampler": WeightedRandomSampler(torch.arange(1.0, N + 1), N)},
    "subset": lambda data: {"batch_size": 4, "sampler": SubsetRandomSampler(range(3, N))},
    "replacement": lambda data: {"batch_size": 4, "sampler": RandomSampler(data, True, 17, own_generator())},
    "global": lambda data: {"batch_size": 4, "sampler": Drawing()},
    "global batches": lambda data: {"batch_sampler": BatchSampler(Drawing(), 4, False)},
    "buckets": lambda data: {"batch_sampler": Buckets()},
    "batches of the dataset": lambda data: {
        "batch_size": None, "sampler": RandomSampler(data), "collate_fn": lambda x: [t[None] for t in x],
    },
}  # fmt: skip
WORKERS = {
    "no workers": {},
    "workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}


def rows(batch):
    return len(batch[0])


def make_dls(sampler, workers, valid=True):
    data = Noisy()
    train = DataLoader(data, **SAMPLERS[sampler](data), **WORKERS[workers])
    other = DataLoader(Noisy(5), 2, shuffle=True, **WORKERS[workers]) if valid else None
    return DataLoaders(train, other, device="cpu", batch_size=rows if sampler == "batches of the dataset" else None)


def through_a_file(state):
    """A state as it comes back from a checkpoint."""
    tensors = []
    text = json.dumps(encoding.encode(state, tensors))
    return encoding.decode(json.loads(text), [t.clone() for t in tensors])


class Log(Callback):
    """Notes what a fit reads, and what the model draws meanwhile; takes a state at a place and stops there."""

    order = 2000

    def __init__(self, stop=None):
        super().__init__()
        self.stop, self.seen, self.state = stop, [], None

    def before_batch(self):
        learn = self.learn
        noise = (torch.rand(()).item(), random.random(), np.random.rand()) if learn.training else ()  # as dropout would
        self.seen.append((learn.training, learn.epoch, learn.iter, learn.n_iter, learn.xb[0].tolist(), noise))

    def _look(self, *place):
        learn = self.learn
        if place == self.stop:
            self.state = learn._position.state_dict(), world.seed_states(), (learn.train_iter, learn.pct_train)
            self.state = through_a_file(self.state)
            self.count = len(self.seen)
            raise CancelFitException

    def after_batch(self):
        if self.learn.training:
            self._look(self.learn.epoch, self.learn.iter + 1)

    def after_train(self):
        self._look(self.learn.epoch, "trained")

    def after_epoch(self):
        self._look(self.learn.epoch, "ended")


class Resume(Callback):
    """What the callback for checkpoints does, for the data alone."""

    order = 1999

    def __init__(self, state, own=None):
        super().__init__()
        self.state, self.seeds, self.counters = deepcopy(state)
        self.own = own
        self.waits = self.state["batches"] > 0 or self.state["over"]

    def before_fit(self):
        learn = self.learn
        learn._position.load_state_dict(self.state)
        learn._position.load_own_state_dict(self.own)
        learn._start_epoch = self.state["epoch"]
        self._restore()

    def before_train(self):
        if self.waits and not self.state["over"]:
            self._restore()

    def after_train(self):
        if self.waits and self.state["over"]:
            self._restore()
        self.waits = False

    def _restore(self):
        world.set_seed_states(self.seeds)
        self.learn.train_iter, self.learn.pct_train = self.counters


def fit(dls, *cbs, epochs=3, seed=1):
    set_seed(seed)
    torch.set_default_dtype(torch.float64)
    try:
        learn = Learner(dls, nn.Linear(4, 1), nn.MSELoss())
        set_seed(seed)
        with learn.no_logging(), learn.no_bar():
            learn.fit(epochs, cbs=cbs)
    finally:
        torch.set_default_dtype(torch.float32)
        dls._twins.clear()  # ends persistent workers
    return learn


PLACES = [(0, 1), (1, 1), (1, 3), (1, "last"), (1, "trained"), (0, "ended"), (2, 2)]


def check_all_places(make, places=PLACES):
    whole = Log()
    fit(make(), whole)
    n_iter = whole.seen[0][3] or 1 + max(seen[2] for seen in whole.seen if seen[0])
    for epoch, where in places:
        first = Log((epoch, n_iter if where == "last" else where))
        fit(make(), first)
        assert first.state is not None
        assert first.seen == whole.seen[: first.count]
        second = Log()
        dls = make()
        fit(dls, Resume(first.state), second, seed=99)
        assert second.seen == whole.seen[first.count :], (epoch, where)
    return whole


@pytest.mark.parametrize("workers", [*WORKERS])
@pytest.mark.parametrize("sampler", [*SAMPLERS])
def test_a_resumed_fit_reads_on_where_it_was(sampler, workers):
    check_all_places(lambda: make_dls(sampler, workers))
