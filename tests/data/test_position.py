"""The place in the data: a fit that goes on in mid-epoch reads what an uninterrupted one would have read."""

import json
import random
import subprocess
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from helpers import ROOT, end_workers, mostly_slow, python
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from learnerkit import Callback, CancelFitException, DataLoaders, Learner, OverfitBatch, ShortEpochCallback, set_seed
from learnerkit.checkpoints import storage
from learnerkit.data.iterable import LoaderView
from learnerkit.distributed import seeds

N = 22


class Noisy(Dataset):
    """Each sample is its number and a random number of each generator; `read` has what this process has fetched."""

    def __init__(self, n=N):
        self.n, self.read = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.read.append(int(i))
        noise = torch.rand((), dtype=torch.float64).item(), random.random(), np.random.rand()
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
    text = json.dumps(storage.encode(state, tensors))
    return storage.decode(json.loads(text), [t.clone() for t in tensors])


class Log(Callback):
    """Notes what a fit reads, and what the model draws meanwhile; takes a state at a place and stops there."""

    order = 2000

    numbers_only = False  # of the samples, not what was drawn for them
    draws = True  # as dropout would

    def __init__(self, stop=None):
        super().__init__()
        self.stop, self.seen, self.state = stop, [], None

    def before_batch(self):
        learn = self.learn
        noise = (torch.rand(()).item(), random.random(), np.random.rand()) if learn.training and self.draws else ()
        x = learn.xb[0][:, :1] if self.numbers_only else learn.xb[0]
        self.seen.append((learn.training, learn.epoch, learn.iter, learn.n_iter, x.tolist(), noise))

    def _look(self, *place):
        learn = self.learn
        if place == self.stop:
            states = [cb.state_dict() for cb in learn.cbs if isinstance(cb, OverfitBatch)]
            position = learn._position
            self.state = position.state_dict(), seeds.seed_states(), (learn.train_iter, learn.pct_train), states
            self.state = through_a_file(self.state)
            self.own = through_a_file(position.own_state_dict())
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
        self.state, self.seeds, self.counters, self.states = deepcopy(state)
        self.own = own
        self.waits = self.state["batches"] > 0 or self.state["over"]

    def before_fit(self):
        learn = self.learn
        position = learn._position
        position.load_state_dict(self.state)
        position.load_own_state_dict(self.own)
        learn.start_epoch = self.state["epoch"]
        self._restore()

    def before_train(self):
        if self.waits and not self.state["over"]:
            self._restore()

    def after_train(self):
        if self.waits and self.state["over"]:
            self._restore()
        self.waits = False

    def _restore(self):
        seeds.set_seed_states(self.seeds)
        self.learn.train_iter, self.learn.pct_train = self.counters
        for cb, state in zip([cb for cb in self.learn.cbs if isinstance(cb, OverfitBatch)], self.states, strict=True):
            cb.load_state_dict(state)


def fit(dls, *cbs, epochs=3, seed=1):
    """A fit of a learner of its own."""
    set_seed(seed)
    torch.set_default_dtype(torch.float64)
    try:
        learn = Learner(dls, nn.Linear(4, 1), nn.MSELoss())
        set_seed(seed)
        with learn.no_logging(), learn.no_bar():
            learn.fit(epochs, cbs=cbs)
    finally:
        torch.set_default_dtype(torch.float32)
        end_workers(dls)  # ends persistent workers
    return learn


FEW = [(1, 2), (1, "trained")]
PLACES = [(0, 1), (1, 1), (1, 3), (1, "last"), (1, "trained"), (0, "ended"), (2, 2)]


def check_all_places(make, places=PLACES, cbs=tuple, Log=Log):
    """Compare fits that stop and go on with one that does not; return what that one has seen.

    Args:
        make: the loaders, anew for each fit.
        places: where to stop.
        cbs: makes further callbacks.
        Log: notes what is seen.
    """
    whole = Log()
    fit(make(), whole, *cbs())
    n_iter = whole.seen[0][3] or 1 + max(seen[2] for seen in whole.seen if seen[0])
    for epoch, where in places:
        first = Log((epoch, n_iter if where == "last" else where))
        fit(make(), first, *cbs())
        assert first.state is not None
        assert first.seen == whole.seen[: first.count]
        second = Log()
        dls = make()
        fit(dls, Resume(first.state), second, *cbs(), seed=99)
        assert second.seen == whole.seen[first.count :], (epoch, where)
    return whole


QUICK = ["shuffled", "weighted", "global batches", "buckets", "batches of the dataset"]


def later(sampler, workers):
    """The mark of a job; with workers most are for `-m soak`."""
    if workers == "no workers":
        return () if sampler in QUICK else pytest.mark.slow
    return pytest.mark.slow if (sampler, workers) == ("shuffled", "workers") else pytest.mark.soak


@pytest.mark.parametrize(
    ("sampler", "workers"), [pytest.param(s, w, marks=later(s, w)) for s in SAMPLERS for w in WORKERS]
)
def test_t1_a_resumed_fit_reads_on_where_it_was(sampler, workers):
    check_all_places(lambda: make_dls(sampler, workers), PLACES if workers == "no workers" else FEW)


@pytest.mark.soak
@pytest.mark.parametrize("workers", ["workers", "persistent"])
@pytest.mark.parametrize("sampler", [*SAMPLERS])
def test_t1_with_workers_it_may_stop_anywhere(sampler, workers):
    check_all_places(lambda: make_dls(sampler, workers), [place for place in PLACES if place not in FEW])


def test_t4_t5_skipped_samples_are_not_loaded_and_what_was_fetched_ahead_is_read_again():
    stopped = Log((1, 2))
    fit(make_dls("shuffled", "no workers"), stopped)
    dls = make_dls("shuffled", "no workers")
    dls.train_ds.read.clear()
    again = Log()
    fit(dls, Resume(stopped.state), again, epochs=2)
    assert dls.train_ds.read == [int(x[0]) for seen in again.seen if seen[0] for x in seen[4]]
    assert len(dls.train_ds.read) == N - stopped.state[0]["samples"] == N - 8
    assert [seen[2:4] for seen in again.seen if seen[0]] == [(2, 6), (3, 6), (4, 6), (5, 6)]


def test_t7_the_resumed_loader_has_all_that_the_users_had():
    stopped = Log((0, 2))
    kwargs = {"batch_size": 4, "shuffle": True, "drop_last": True, "num_workers": 1, "prefetch_factor": 3}
    kwargs |= {
        "timeout": 60,
        "worker_init_fn": print_nothing,
        "collate_fn": together,
        "multiprocessing_context": "fork",
    }
    fit(DataLoaders(DataLoader(Noisy(), **kwargs), device="cpu"), stopped)
    dl = DataLoader(Noisy(), **kwargs)
    dl.pin_memory = "only a mark"  # which torch's loader takes for no without an accelerator
    found = []
    look = Callback(before_batch=lambda cb: found.append((cb.dl, cb.n_iter, len(cb.xb[0]))))
    with pytest.warns(UserWarning, match="pin_memory"):
        fit(DataLoaders(dl, device="cpu"), Resume(stopped.state), look, epochs=1)
    assert [size for _, _, size in found] == [4] * 3  # the last two samples are dropped
    assert {n_iter for _, n_iter, _ in found} == {5}
    names = [*kwargs, "pin_memory", "dataset", "sampler", "persistent_workers", "in_order", "generator"]
    for name in {*names} - {"shuffle", "worker_init_fn"}:
        assert getattr(found[0][0], name) is getattr(dl, name), name
    assert found[0][0].worker_init_fn.args[0] is print_nothing


def print_nothing(worker):
    pass


def together(samples):
    return [torch.stack(column) for column in zip(*samples, strict=True)]


@pytest.mark.soak
@pytest.mark.parametrize(
    "sampler", ["shuffled", *(pytest.param(s, marks=pytest.mark.soak) for s in ("global", "own generator", "weighted"))]
)
def test_t3_the_order_goes_on_in_a_new_process(sampler, tmp_path, script_env):
    whole, stopped = Log(), Log((1, 2))
    fit(make_dls(sampler, "workers"), whole)
    fit(make_dls(sampler, "workers"), stopped)
    tensors = []
    text = json.dumps(storage.encode(stopped.state, tensors))
    torch.save((text, tensors), tmp_path / "state")
    code = f"""
import json, sys, torch
sys.path.insert(0, {str(ROOT / "tests")!r})
from data.test_position import Log, Resume, fit, make_dls, storage
text, tensors = torch.load({str(tmp_path / "state")!r}, weights_only=True)
log = Log()
fit(make_dls({sampler!r}, "workers"), Resume(storage.decode(json.loads(text), tensors)), log, seed=99)
print(json.dumps(log.seen))
"""
    done = subprocess.run([python(), "-c", code], capture_output=True, text=True, env=script_env, timeout=120)
    assert not done.returncode, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == json.loads(json.dumps(whole.seen[stopped.count :]))


@pytest.mark.soak
def test_t9_a_second_resume_within_an_epoch_and_one_in_the_next():
    for sampler, workers in (("shuffled", "no workers"), ("own generator", "persistent"), ("global", "workers")):
        whole = check_all_places(lambda s=sampler, w=workers: make_dls(s, w), places=[])
        seen, state = [], None
        for place in ((0, 1), (0, 3), (0, "last"), (1, 2), (1, "trained"), (1, "ended"), (2, 4), None):
            log = Log((0, 6) if place == (0, "last") else place)
            cbs = [log] if state is None else [Resume(state), log]
            fit(make_dls(sampler, workers), *cbs, seed=1 if state is None else 90 + len(seen))
            seen, state = seen + log.seen, log.state
        assert seen == whole.seen


def test_rows_read_at_once_and_a_second_fit():
    """In the second fit the order is another one; what came before it does not matter."""
    data = TensorDataset(torch.arange(4.0 * N, dtype=torch.float64).reshape(N, 4), torch.zeros(N, 1).double())

    def make():
        return DataLoaders.from_datasets(data, bs=4, device="cpu")

    whole = check_all_places(make)
    second = Log()
    fit(make(), second, seed=5)
    assert second.seen[0] != whole.seen[0]


class Stream(IterableDataset):
    """Numbers with noise, shared out among the workers."""

    def __init__(self, n=N):
        self.n = n

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for i in range(first, self.n, step):
            yield sample(i)


def sample(i):
    noise = torch.rand((), dtype=torch.float64).item(), random.random(), np.random.rand()
    return torch.tensor([float(i), *noise], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)


class Shuffled(Stream):
    """Draws its order from a global generator."""

    def __iter__(self):
        return map(sample, torch.randperm(self.n).tolist())


class Remembering(Stream):
    """A shuffled stream with a state; `read` has the samples that it has made."""

    def __init__(self, empties):
        super().__init__()
        self.order, self.place, self.random, self.read = [], 0, random.Random(3), []
        self.empties = empties  # at its end, rather than begin anew unless it was loaded
        self.loaded = False

    def __iter__(self):
        if not (self.order if self.empties else self.loaded):
            self.order, self.place = self.random.sample(range(self.n), self.n), 0
        self.loaded = False
        while self.place < len(self.order):
            self.place += 1
            self.read.append(self.order[self.place - 1])
            yield sample(self.order[self.place - 1])
        if self.empties:
            self.order = []

    def state_dict(self):
        return {"order": self.order, "place": self.place, "random": self.random.getstate()}

    def load_state_dict(self, state):
        self.order, self.place = list(state["order"]), state["place"]
        self.random.setstate(state["random"])
        self.loaded = True


class Batches:
    """A loader of another kind, with a state; it says how many batches it has."""

    def __init__(self):
        self.data = Remembering(empties=False)

    def __len__(self):
        return 6

    def __iter__(self):
        return iter(DataLoader(self.data, 4))

    def state_dict(self):
        return self.data.state_dict()

    def load_state_dict(self, state):
        self.data.load_state_dict(state)


class Generator:
    """An iterable of batches without a length."""

    def __iter__(self):
        yield from DataLoader(Noisy(), 4)


@pytest.mark.parametrize("workers", mostly_slow(WORKERS, "no workers", slow=["persistent"]))
def test_a_stream_without_a_state_is_read_forward_and_it_says_so(workers):
    def make():
        return DataLoaders(DataLoader(Stream(), 4, **WORKERS[workers]), device="cpu")

    with pytest.warns(UserWarning, match="batches of this epoch are read again and dropped.*give the Stream"):
        check_all_places(make, PLACES if workers == "no workers" else [(1, 1), (1, "last")])


def test_a_shuffled_stream_without_a_state_is_read_forward_in_the_same_order():
    with pytest.warns(UserWarning, match="batches of this epoch are read again and dropped.*give the Shuffled"):
        check_all_places(lambda: DataLoaders(DataLoader(Shuffled(), 4), device="cpu"), PLACES)


def test_iterables_that_are_no_loaders_are_read_forward():
    batches = [(torch.arange(8.0).view(2, 4).double() + i, torch.zeros(2, 1).double()) for i in range(6)]
    with pytest.warns(UserWarning, match="read again and dropped.*give the Generator"):
        check_all_places(lambda: DataLoaders(Generator(), device="cpu"))
    check_all_places(lambda: DataLoaders(batches, device="cpu"))  # nothing is read, so nothing is said


class ForItsLoader(Shuffled):
    """A stream whose state is for a loader of its own, which says how much has been read, as litdata's."""

    def state_dict(self, num_samples_yielded, num_workers=0):
        return {"read": num_samples_yielded}

    def load_state_dict(self, state):
        raise AssertionError("its state is not saved")


def test_a_state_that_needs_arguments_is_not_one_for_a_checkpoint():
    dls = DataLoaders(DataLoader(ForItsLoader(), 4), device="cpu")
    assert len(dls.one_batch()[0]) == 4
    with pytest.warns(UserWarning, match="read again and dropped"):
        check_all_places(lambda: DataLoaders(DataLoader(ForItsLoader(), 4), device="cpu"), [(1, 2)])


@pytest.mark.parametrize("empties", [False, True])
def test_a_dataset_or_a_loader_with_a_state_goes_on_by_it(empties):
    check_all_places(lambda: DataLoaders(DataLoader(Remembering(empties), 4), device="cpu"))
    check_all_places(lambda: DataLoaders(Batches(), device="cpu"))
    stopped, data = Log((1, 3)), Remembering(empties)
    fit(DataLoaders(DataLoader(Remembering(empties), 4), device="cpu"), stopped)
    fit(DataLoaders(DataLoader(data, 4), device="cpu"), Resume(stopped.state), epochs=2)
    assert len(data.read) == N - 12  # nothing was read again


class Restorable(DataLoader):
    """A loader with workers and a state, as torchdata's StatefulDataLoader."""

    count = skip = 0

    def __iter__(self):
        skip, self.skip = self.skip, 0
        for i, batch in enumerate(super().__iter__(), 1):
            if i > skip:
                self.count = i  # not of what the workers have fetched
                yield batch
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = self.skip = state["count"]


def test_a_loader_that_replaces_another_one_can_be_copied():
    view = deepcopy(LoaderView(DataLoader(Noisy(), 4)))
    assert len(view) == 6
    assert view.batch_size == 4


@pytest.mark.soak
def test_t4_a_loader_with_workers_and_a_state_of_its_own():
    class Numbers(Log):
        numbers_only = True

    places = [(0, 1), (1, "last"), (0, "ended")]
    check_all_places(lambda: DataLoaders(Restorable(Stream(), 4, num_workers=2), device="cpu"), places, Log=Numbers)


class Larger(Callback):
    """Reads other batches than those of the loader, and larger ones in each epoch."""

    def before_train(self):
        dl = self.learn.dls.train
        self.learn.dl = DataLoader(dl.dataset, 4 * (self.learn.epoch + 1), shuffle=True)


def test_a_loader_that_a_callback_puts_in_place_goes_on():
    places = [(0, 1), (1, 1), (1, 2), (1, "trained"), (0, "ended")]
    check_all_places(lambda: make_dls("shuffled", "no workers"), places, lambda: [Larger()])


@pytest.mark.soak
def test_shortened_epochs_go_on():
    for cb in (partial(ShortEpochCallback, n=4), partial(ShortEpochCallback, 0.7), partial(OverfitBatch, 2)):
        places = [(0, 1), (1, 1), (1, 3), (1, 4), (1, "trained"), (0, "ended")]
        check_all_places(lambda: make_dls("shuffled", "no workers"), places, lambda cb=cb: [cb()])
        check_all_places(lambda: make_dls("buckets", "workers", valid=False), [(1, 1)], lambda cb=cb: [cb()])
