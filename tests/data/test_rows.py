"""Whole batches read at once are what torch's own loader reads."""

import sys
from collections import namedtuple

import pytest
import torch
from helpers import BlockingCopies, make_learner
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from learnerkit import Callback, DataLoaders
from learnerkit.data.rows import IndexBatches, RowsLoader

Pair = namedtuple("Pair", "a b")


def numbers(n):
    return TensorDataset(torch.arange(n), torch.arange(n) * 2.0)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    "data",
    [
        numbers(23),
        Subset(numbers(40), range(3, 30)),
        Subset(Subset(numbers(50), range(5, 45)), [7, 3, 3, 9, 20]),
        Subset(numbers(40), range(-9, 0)),
        Subset(Subset(numbers(50), range(-5, 45)), [7, -1, 3, -50, 20]),
    ],
)
def test_whole_batches_are_what_torch_reads(data, shuffle, drop_last):
    """Values, types, order, and the draws from the generators, are those of torch's own loader."""
    found = []
    for make in (DataLoader, RowsLoader):
        torch.manual_seed(1)
        dl = make(data, batch_size=4, shuffle=shuffle, drop_last=drop_last)
        found.append([*dl, *dl, torch.rand(1)])
        assert len(dl) == (len(data) // 4 if drop_last else -(-len(data) // 4))
    assert len(found[0]) == len(found[1])
    for theirs, ours in zip(*found, strict=True):
        assert type(theirs) is type(ours)
        for a, b in zip(theirs, ours, strict=True):
            assert torch.equal(a, b)
            assert a.dtype == b.dtype


def test_whole_batches_keep_a_generator_and_samplers_of_ones_own():
    data = numbers(20)
    for make_kwargs in (
        lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
        lambda: {"sampler": SubsetRandomSampler(range(4, 12), torch.Generator().manual_seed(3))},
        lambda: {"sampler": SubsetRandomSampler(range(-20, -7), torch.Generator().manual_seed(3))},
        lambda: {"sampler": RandomSampler(data, replacement=True, generator=torch.Generator().manual_seed(3))},
    ):
        theirs, ours = (
            [b[0].tolist() for dl in [make(data, batch_size=3, **make_kwargs())] for _ in range(2) for b in dl]
            for make in (DataLoader, RowsLoader)
        )
        assert theirs == ours
    batches = BatchSampler(SequentialSampler(data), 6, False)
    assert [len(b[0]) for b in RowsLoader(data, batch_sampler=batches)] == [6, 6, 6, 2]
    assert [int(b[0]) for b in RowsLoader(data, batch_size=None)] == list(range(20))


def test_index_batches_fall_back_to_torch_for_other_samplers():
    sampler = RandomSampler(range(10), num_samples=4, generator=torch.Generator().manual_seed(1))
    again = RandomSampler(range(10), num_samples=4, generator=torch.Generator().manual_seed(1))
    assert list(IndexBatches(sampler, 3, False)) == list(BatchSampler(again, 3, False))


@pytest.mark.parametrize("data", [lambda ds: ds, lambda ds: Subset(ds, [4, 1, -1])])
def test_rows_that_are_on_an_accelerator_already_are_read_there(data, monkeypatch):
    """And no batch waits for it. The tensors have shapes and devices, and no values: this needs no accelerator."""
    monkeypatch.setattr("learnerkit.data.rows.draw_seed", lambda generator=None: 0)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    with FakeTensorMode(), BlockingCopies() as copies:
        there = data(TensorDataset(torch.zeros(5, 2, device="cuda"), torch.zeros(5, device="cuda")))
        for sampler in (SequentialSampler(there), [2, 0]):
            for x, y in RowsLoader(there, batch_size=2, sampler=sampler, pin_memory=True):
                assert (x.device.type, y.device.type) == ("cuda", "cuda")
    assert copies.found == []


@pytest.fixture
def with_accelerator(monkeypatch):
    """As if there were an accelerator; tensors say which of them were pinned."""
    pins = []
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.Tensor.pin_memory", lambda t: pins.append(t.device.type) or t)
    return pins


@pytest.mark.parametrize("collate", [None, lambda items: tuple(torch.stack(part) for part in zip(*items, strict=True))])
def test_what_is_on_an_accelerator_already_is_not_pinned(collate, with_accelerator):
    data = [(torch.zeros(2, device="meta"), torch.tensor(i)) for i in range(5)]
    loader = RowsLoader(data, batch_size=2, pin_memory=True, collate_fn=collate)
    for _ in range(2):
        assert [(x.device.type, y.tolist()) for x, y in loader] == [("meta", [0, 1]), ("meta", [2, 3]), ("meta", [4])]
    assert with_accelerator == ["cpu"] * 6
    assert loader.pin_memory


def test_memory_is_not_pinned_for_mps(monkeypatch, with_accelerator):
    """Torch's loader warns that it does not do it there."""
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda *args: torch.device("mps"))
    assert len([*RowsLoader(numbers(5), batch_size=2, pin_memory=True)]) == 3
    with pytest.warns(UserWarning, match="not supported on MPS"):
        assert len([*RowsLoader(list(range(5)), batch_size=2, pin_memory=True)]) == 3
    assert with_accelerator == []


def test_rows_that_are_not_there_are_refused():
    for ds, sampler in ((numbers(5), [5]), (numbers(5), [-6]), (Subset(numbers(5), [5]), [0])):
        with pytest.raises(IndexError):
            list(RowsLoader(ds, sampler=sampler))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not fork workers")
def test_workers_are_forked_with_any_python_unless_asked_otherwise():
    class OfThisTest(Dataset):  # which another start method could not pickle
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return i

    loader = RowsLoader(OfThisTest(), batch_size=2, num_workers=1)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    asked = RowsLoader(OfThisTest(), num_workers=1, multiprocessing_context="spawn")
    assert asked.multiprocessing_context.get_start_method() == "spawn"
    assert RowsLoader(OfThisTest(), batch_size=2).multiprocessing_context is None


class Backwards(Sampler):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(range(len(self.data) - 1, -1, -1))

    def __len__(self):
        return len(self.data)


def doubled(rows):
    return [2 * x for x in default_collate(rows)]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"sampler": Backwards}])
@pytest.mark.parametrize("kind", [RowsLoader, DataLoader])
def test_a_collate_fn_that_is_set_between_fits_is_called(kind, options):
    data = TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
    options = {name: x(data) if name == "sampler" else x for name, x in options.items()}
    dls, read = DataLoaders(kind(data, batch_size=4, **options), device="cpu"), []
    learn = make_learner(dls, cbs=Callback(before_batch=lambda cb: read.append(cb.x.clone())))
    learn.fit(1)
    dls.train.collate_fn = doubled
    learn.fit(1)
    assert all(map(torch.equal, read[2:], [2 * x for x in read[:2]]))
