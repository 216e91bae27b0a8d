"""Loaders, batches and the order of samples."""

import random
import re
from collections import UserDict, namedtuple

import pytest
import torch
from helpers import make_learner
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from learnerkit import Callback, DataLoaders, Learner, set_seed
from learnerkit.data.batches import batch_size, concat, gather_batches, map_batch, to_device
from learnerkit.data.order import SampleOrder, in_order, keep_seeds, seeded_samplers
from learnerkit.data.rows import IndexBatches, RowsLoader

Pair = namedtuple("Pair", "a b")


def numbers(n):
    return TensorDataset(torch.arange(n), torch.arange(n) * 2.0)


class Squares(Dataset):
    """Map-style, and no TensorDataset."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        assert isinstance(i, int), f"asked for {i!r}"
        return torch.tensor(i), torch.tensor(i * i)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(5))


# Batches


def test_nested_batches_move_whole():
    batch = {"a": [torch.ones(2), (torch.ones(3), "text")], "b": Pair(torch.ones(1), None)}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert moved["a"][1][0].is_meta
    assert moved["a"][1][1] == "text"
    assert isinstance(moved["b"], Pair)
    assert moved["b"].a.is_meta
    here = torch.ones(2)
    assert to_device(here, torch.device("cpu")) is here
    assert set(to_device(UserDict(x=here), torch.device("meta"))) == {"x"}


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        ((torch.ones(3, 2), torch.ones(3)), 3),
        (({"x": torch.ones(4)},), 4),
        ([["a", "b"]], 1),
        ((["a", "b"],), 2),
        ((torch.tensor(1.0),), 1),
        (torch.ones(5), 5),
    ],
)
def test_batch_size(batch, size):
    assert batch_size(batch) == size


def test_split():
    dls = DataLoaders([1], target_keys=("y", "z"))
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    assert dls.split((a, b)) == ((a,), (b,))
    assert dls.split([a, b, c]) == ((a, b), (c,))
    assert dls.split((a,)) == ((a,), ())
    assert dls.split(a) == ((a,), ())
    assert dls.split({"x": a, "y": b, "z": c}) == (({"x": a},), (b, c))
    assert dls.split({"x": a, "y": b}, keep_targets=True) == (({"x": a, "y": b},), (b,))
    assert DataLoaders([1], n_inp=1).split((a, b, c)) == ((a,), (b, c))
    assert DataLoaders([1], target_keys="x").split({"x": a, "w": b}) == (({"w": b},), (a,))
    with pytest.raises(ValueError, match="n_inp=3"):
        DataLoaders([1], n_inp=3).split((a, b))
    with pytest.raises(ValueError, match="n_inp=0"):
        DataLoaders([1], n_inp=0)


def test_unpack_is_split_of_a_batch_on_the_device():
    a, b, c, scalar = torch.ones(3), torch.ones(3, 2), torch.ones(3), torch.tensor(1.0)
    rows = [(a, b), [a, b], (a,), a, (a, b, c), ("text", a), (scalar, a), ([a, b], c), {"x": a, "y": b}, (None, a)]
    cpu = torch.device("cpu")
    for keep_targets in (False, True):
        for n_inp in (None, 1, 2, 3):
            dls = DataLoaders([1], n_inp=n_inp, target_keys="y")
            for batch in rows:
                try:
                    expected = dls.split(batch, keep_targets)
                except ValueError as e:
                    with pytest.raises(ValueError, match=re.escape(str(e))):
                        dls.unpack(batch, cpu, keep_targets)
                    continue
                there, xb, yb, size = dls.unpack(batch, cpu, keep_targets)
                assert type(there) is type(batch)
                assert same((xb, yb), expected), (batch, n_inp)
                assert size == batch_size(xb)
    found = DataLoaders([1]).unpack((a, b), torch.device("meta"), False)
    assert all(t.device.type == "meta" for t in (*found[0], *found[1], *found[2]))


def same(one, other):
    """Whether two nested batches hold the very same things."""
    if isinstance(one, tuple | list | dict):
        pairs = zip(one.items(), other.items(), strict=True) if isinstance(one, dict) else zip(one, other, strict=True)
        return type(one) is type(other) and all(same(x, y) for x, y in pairs)
    return one is other or one == other


def test_concat():
    batches = [{"p": torch.full((n, 2), n), "q": (torch.ones(n),)} for n in (2, 3)]
    whole = concat(batches)
    assert whole["p"].shape == (5, 2)
    assert whole["q"][0].shape == (5,)
    ragged = concat([torch.ones(2, 3), torch.ones(1, 4)])
    assert [tuple(row.shape) for row in ragged] == [(3,), (3,), (4,)]
    assert concat([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]
    assert gather_batches([(1, "b"), (0, "a")], sharded=False) == ["b", "a"]
    assert map_batch(lambda t: t + 1, [torch.tensor(1)]) == [torch.tensor(2)]


# Loaders


def test_what_is_no_loader_is_refused():
    with pytest.raises(TypeError, match="training loader is a int"):
        DataLoaders(3)
    with pytest.raises(TypeError, match="validation loader is a dataset"):
        DataLoaders([1], numbers(3))


def test_access():
    train, valid, test = [1], [2], [3]
    dls = DataLoaders(train, valid, test, device="cpu")
    assert dls.train is train
    assert dls.valid is valid
    assert dls[2] is test
    assert dls.train_ds is None
    with pytest.raises(IndexError, match="no loader 3"):
        dls[3]
    with pytest.raises(IndexError, match="no loader 1"):
        DataLoaders(train)[1]
    assert dls.device == torch.device("cpu")


def test_one_batch_leaves_the_generators_alone():
    dls = DataLoaders.from_datasets(numbers(10), bs=4, device="cpu")
    state = torch.get_rng_state()
    assert len(dls.one_batch()[0]) == 4
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    "data",
    [numbers(23), Subset(numbers(40), range(3, 30)), Subset(Subset(numbers(50), range(5, 45)), [7, 3, 3, 9, 20])],
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


def test_whole_batches_with_a_generator_and_samplers_of_ones_own():
    data = numbers(20)
    for make_kwargs in (
        lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
        lambda: {"sampler": SubsetRandomSampler(range(4, 12), torch.Generator().manual_seed(3))},
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


def test_other_datasets_go_through_torch():
    dl = DataLoaders.from_datasets(Squares(5), bs=2, shuffle=False).train
    assert [b[1].tolist() for b in dl] == [[0, 1], [4, 9], [16]]
    doubled = RowsLoader(numbers(4), batch_size=2, collate_fn=lambda samples: len(samples))
    assert list(doubled) == [2, 2]


def test_from_datasets_options():
    dls = DataLoaders.from_datasets(
        numbers(10), numbers(5), numbers(6), bs=4, valid_bs=3, drop_last=True, num_workers=0, device="cpu"
    )
    assert [len(dls.train), len(dls.valid), len(dls[2])] == [2, 2, 2]
    assert isinstance(dls.train.sampler, RandomSampler)
    assert isinstance(dls.valid.sampler, SequentialSampler)
    assert dls.train.batch_size == 4
    assert dls.valid_ds.tensors[0].shape == (5,)
    assert DataLoaders.from_datasets(numbers(4)).valid is None
    assert sum(len(b) for b in DataLoaders.from_datasets(Stream(), bs=2).train) == 5
    with pytest.raises(TypeError, match="batchsize"):
        DataLoaders.from_datasets(numbers(4), batchsize=3)


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


def test_index_batches_fall_back_to_torch_for_other_samplers():
    sampler = RandomSampler(range(10), num_samples=4, generator=torch.Generator().manual_seed(1))
    again = RandomSampler(range(10), num_samples=4, generator=torch.Generator().manual_seed(1))
    assert list(IndexBatches(sampler, 3, False)) == list(BatchSampler(again, 3, False))


# The order of samples


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


def test_typed_tensors_of_fastai_become_plain_ones():
    kind = type("TensorImage", (torch.Tensor,), {"__module__": "fastai.torch_core"})
    own = type("Own", (torch.Tensor,), {})
    image, mine = torch.ones(2, 3).as_subclass(kind), torch.ones(2).as_subclass(own)
    moved = to_device({"a": (image, [image]), "b": mine}, torch.device("cpu"))
    assert type(moved["a"][0]) is type(moved["a"][1][0]) is torch.Tensor
    assert type(moved["b"]) is own
    assert torch.equal(moved["a"][0], torch.ones(2, 3))
    assert moved["a"][0].data_ptr() == image.data_ptr()  # not copied


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
