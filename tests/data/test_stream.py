"""The random numbers of those who fetch samples: loader workers, and each sample by itself."""

import gc
import multiprocessing
import pickle
import random
import signal
import time
import weakref

import numpy as np
import pytest
import torch
from data.test_position import Noisy, Shuffled, Stream, fit
from helpers import end_workers, make_learner, raising
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info
from torch.utils.data import _utils as data_utils
from torch.utils.data._utils import worker

from learnerkit import Callback, CancelTrainException, DataLoaders, Learner, set_seed
from learnerkit.data.stream import PerSample, SampleStream, Seeded
from learnerkit.distributed import seeds


class Seen(Callback):
    """The batches of training and validation, by epoch."""

    order = 2000

    def __init__(self):
        super().__init__()
        self.train, self.valid = [], []

    def before_batch(self):
        (self.train if self.learn.training else self.valid).append((self.learn.epoch, self.learn.xb[0].tolist()))


def read(data, epochs=2, valid=None, seed=1, **kwargs):
    """What a fit reads in training and validation."""
    kwargs = {"batch_size": 4, "shuffle": not isinstance(data, Stream)} | kwargs
    dls = DataLoaders(DataLoader(data, **kwargs), None if valid is None else DataLoader(valid, 2), device="cpu")
    seen = Seen()
    fit(dls, seen, epochs=epochs, seed=seed)
    return seen


def as_batch(sample):
    return [t[None] for t in sample]


def noise(batches):
    return [tuple(x[1:]) for _, batch in batches for x in batch]


@pytest.fixture
def reproducible():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def test_what_arrives_is_a_plain_item_and_seeds_all_three_generators():
    states = seeds.seed_states()
    found = []
    for _ in range(2):
        assert pickle.loads(pickle.dumps(Seeded(7, [3, 1]))) == [3, 1]
        found.append((torch.rand(()).item(), random.random(), np.random.rand()))
    assert found[0] == found[1]
    seeds.set_seed_states(states)
    Seeded(7, [3, 1])
    assert torch.equal(torch.get_rng_state(), states[0])


@pytest.mark.parametrize("batch_size", [4, pytest.param(None, marks=pytest.mark.slow)])
def test_workers_streams_do_not_depend_on_their_number(batch_size):
    kwargs = {"batch_size": batch_size} | ({"collate_fn": as_batch} if batch_size is None else {})
    one = read(Noisy(), num_workers=1, **kwargs).train
    for other in ({"num_workers": 2}, {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 1}):
        assert read(Noisy(), **kwargs, **other).train == one
    assert len({*noise(one)}) == len(noise(one))  # no stream comes twice, in the second epoch neither
    assert read(Noisy(), num_workers=1, seed=2, **kwargs).train != one


def test_what_a_stream_draws_before_its_first_sample_differs_by_epoch():
    batches = read(Shuffled(), num_workers=1).train
    first, second = ([x[0] for e, batch in batches if e == epoch for x in batch] for epoch in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second) == [float(i) for i in range(22)]


def test_validation_has_one_stream_in_an_epoch_which_does_not_change_training():
    train, valid = Noisy(), Noisy(6)

    class Again(Seen):
        def after_batch(self):
            if self.learn.training and self.learn.iter == 2:
                self.learn.validate()

    found = []
    for cb in (Again(), Seen()):
        dls = DataLoaders(
            DataLoader(train, 4, shuffle=True, num_workers=1), DataLoader(valid, 2, num_workers=1), device="cpu"
        )
        fit(dls, cb, epochs=2)
        found.append(cb)
    assert found[0].train == found[1].train
    for epoch in (0, 1):
        batches = [batch for e, batch in found[0].valid if e == epoch]
        assert batches[:3] == batches[3:] == [batch for e, batch in found[1].valid if e == epoch]
    first, second = ([batch for e, batch in found[1].valid if e == epoch] for epoch in (0, 1))
    assert first != second


def test_readings_outside_a_fit_differ():
    for persistent in (False, True):
        dls = DataLoaders([1], DataLoader(Noisy(6), 3, num_workers=1, persistent_workers=persistent), device="cpu")
        learn = Learner(dls, torch.nn.Identity(), torch.nn.MSELoss())
        set_seed(3)
        readings = [learn.get_preds(1)[0] for _ in range(2)]
        again = learn.get_preds(dl=dls.valid)[0], learn.get_preds(dl=dls.valid)[0]
        numbers = [reading[:, 1:].flatten().tolist() for reading in (*readings, *again)]
        assert len({*map(tuple, numbers)}) == 4
        end_workers(dls)


def test_workers_that_stay_end_at_once_with_their_learner(monkeypatch):
    for module in (data_utils, worker):  # for so long torch would wait for them
        monkeypatch.setattr(module, "MP_STATUS_CHECK_INTERVAL", 60.0)
    samples = [(torch.tensor([1.0, 2.0]), torch.ones(2))] * 4
    dls = DataLoaders(DataLoader(samples, 2, num_workers=1, persistent_workers=True), device="cpu")
    learn = Learner(dls, torch.nn.Linear(2, 2), torch.nn.MSELoss())
    with learn.no_logging():
        learn.fit(1)
    there = weakref.ref(learn)
    del learn, dls
    assert there() is not None  # it is part of a cycle
    began = time.monotonic()
    gc.collect()
    assert there() is None
    assert time.monotonic() - began < 55


def test_workers_leave_signals_to_a_process_that_handles_them_by_now():
    dls = DataLoaders(DataLoader(Noisy(), num_workers=1), device="cpu")
    told = [dls.twin(dls.train, training=True).worker_init_fn.args[2]]
    before = signal.signal(signal.SIGTERM, lambda signum, frame: None)
    try:
        told.append(dls.twin(dls.train, training=True).worker_init_fn.args[2])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == [False, True]


@pytest.mark.timeout(60)
def test_workers_need_a_temporary_directory_with_a_short_path(monkeypatch):
    # The socket of a worker would have more than the 108 bytes that the system has for its path.
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", f"/tmp/{'a' * 100}/pymp-12345678")
    with pytest.raises(ValueError, match=r"too long for the sockets .* by \d+ bytes .* let TMPDIR name"):
        read(Noisy(), num_workers=1)
    assert read(Noisy(), num_workers=0).train


class Editable(Dataset):
    """A dataset that a worker edits, and that is fetched in whole lists."""

    def __init__(self):
        self.offset = 0.0

    def __len__(self):
        return 8

    def __getitems__(self, indices):
        assert type(indices) is list
        assert get_worker_info() is None or get_worker_info().dataset is self
        return [self[i] for i in indices]

    def __getitem__(self, i):
        return torch.tensor([i + self.offset, torch.rand(()), 0, 0], dtype=torch.float64), torch.zeros(1).double()


def edit(worker):
    get_worker_info().dataset.offset = 100.0


def test_worker_init_fn_edits_the_users_dataset(reproducible):
    for flag in (False, True):
        torch.use_deterministic_algorithms(flag, warn_only=True)
        data = Editable()
        seen = read(data, num_workers=2, worker_init_fn=edit, shuffle=False)
        assert [x[0] for _, batch in seen.train for x in batch] == [100.0 + i for i in range(8)] * 2
        assert data.offset == 0


@pytest.mark.slow
@pytest.mark.usefixtures("reproducible")
def test_reproducible_augmentation_depends_on_seed_epoch_and_sample_alone():
    def by_sample(seen, epoch):
        return {x[0]: x[1:] for e, batch in seen.train if e == epoch for x in batch}

    one = read(Noisy(), valid=Noisy(3))
    assert by_sample(one, 0).keys() == by_sample(one, 1).keys() == {*map(float, range(22))}
    assert all(by_sample(one, 1)[i] != by_sample(one, 0)[i] for i in by_sample(one, 0))
    for other in ({"num_workers": 2}, {"batch_size": 5}, {"num_workers": 2, "persistent_workers": True}):
        again = read(Noisy(), **other)
        assert [by_sample(again, epoch) for epoch in (0, 1)] == [by_sample(one, epoch) for epoch in (0, 1)]
    alone = read(Noisy(), batch_size=None, collate_fn=as_batch)
    assert by_sample(alone, 0) == by_sample(one, 0)
    assert by_sample(read(Noisy(), seed=2), 0) != by_sample(one, 0)
    some = read(Subset(Noisy(), range(22)))
    assert by_sample(some, 0) == by_sample(one, 0)


@pytest.mark.usefixtures("reproducible")
def test_reproducible_fetching_leaves_the_generators_of_the_process_alone():
    data = PerSample(Noisy())
    before = seeds.seed_states()
    first = data.__getitems__(Seeded(3, [2, 5, 2], True))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert torch.equal(first[0][0], first[2][0])
    assert torch.equal(data[Seeded(3, 5, True)][0], first[1][0])
    assert not torch.equal(data[Seeded(4, 5, True)][0], first[1][0])
    assert len(pickle.loads(pickle.dumps(data))) == len(data) == 22
    arrived = pickle.loads(pickle.dumps(Seeded(3, [5], True)))
    assert torch.equal(data.__getitems__(arrived)[0][0], first[1][0])


def test_a_skipped_stream_is_drawn_but_not_given():
    drawn = []

    def batches():
        for i in range(5):
            drawn.append(i)
            yield [i] * (i + 1)

    class Sampler:
        def __iter__(self):
            return batches()

    stream = SampleStream(Sampler())
    stream.place = 2
    assert list(stream) == [[2] * 3, [3] * 4, [4] * 5]
    assert [share.size for share in stream.shares] == [3, 4, 5]
    assert drawn == [0, 1, 2, 3, 4]
    stream.place = float("inf")
    assert list(stream) == []
    assert drawn == [0, 1, 2, 3, 4]


class Listed:
    """A loader of a number of batches, which says that they are another one."""

    def __init__(self, n, length):
        self.n, self.length = n, length

    def __len__(self):
        return self.length

    def __iter__(self):
        for _ in range(self.n):
            yield torch.eye(4), torch.rand(4, 1)


class Ends(Dataset):
    """A dataset with an iterator inside, which ends too soon."""

    def __len__(self):
        return 16

    def __getitem__(self, i):
        return next(iter([(torch.rand(4), torch.rand(1))][i // 8 :]))


@pytest.mark.parametrize(
    ("train", "got", "length"), [(Listed(2, 4), 2, 4), (Listed(4, 2), 4, 2), (DataLoader(Ends(), 4), 2, 4)]
)
def test_a_loader_with_another_number_of_batches_than_its_length_is_told_of_once(train, got, length, capsys):
    learn = make_learner(DataLoaders(train, Listed(1, 3), device="cpu"))
    learn.fit_one_cycle(2)
    lines = [line for line in capsys.readouterr().out.splitlines() if "loader gave" in line]
    assert [line.partition(", by which")[0] for line in lines] == [
        f"the training loader gave {got} batches, and its length",
        "the validation loader gave 1 batches, and its length",
    ]
    learn.validate()
    assert "the validation loader gave 1 batches" in capsys.readouterr().out


def test_a_loader_that_is_not_read_to_its_end_has_no_wrong_length(capsys):
    learn = make_learner(DataLoaders(Listed(4, 4), device="cpu"), default_cbs=True)
    learn.fit(n_steps=6)
    learn.fit(1, cbs=raising("after_batch", CancelTrainException()))
    assert "loader gave" not in capsys.readouterr().out
