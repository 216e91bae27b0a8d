"""DataLoaders: what they hold, and what they are made of."""

from collections import namedtuple
from functools import partial

import numpy as np
import pytest
import torch
from helpers import Seen, make_dls, make_learner
from random_jobs import StreamWithState
from resume_jobs import Counting
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from learnerkit import Callback, DataLoaders
from learnerkit.callbacks.debugging import ShortEpochCallback
from learnerkit.data.rows import RowsLoader

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


def test_what_is_no_loader_is_refused():
    with pytest.raises(TypeError, match="training loader is a int"):
        DataLoaders(3)
    with pytest.raises(TypeError, match="validation loader is a dataset"):
        DataLoaders([1], numbers(3))
    with pytest.raises(TypeError, match=r"training loader is a dataset \(ndarray\); use DataLoaders.from_datasets"):
        DataLoaders(np.zeros((6, 4), "float32"), np.zeros(6))


def test_loaders_are_found_by_name_and_number():
    train, valid, test = [1], [2], [3]
    with pytest.raises(ValueError, match="got device='gpu'; torch has 'cpu', 'cuda'"):
        DataLoaders(train, valid, device="gpu")
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


def test_other_loaders_need_another_object():
    learn, other = make_learner(make_dls(8)), make_dls(16)
    for name in ("train", "valid"):
        with pytest.raises(AttributeError, match=r"stay as they are; for others write learn.dls = DataLoaders\("):
            setattr(learn.dls, name, other.train)
    swap = Callback(before_epoch=lambda cb: setattr(cb.learn, "dls", other) if cb.epoch else None)
    seen = Seen()
    learn.fit(2, cbs=[swap, seen])
    assert [n for training, n in seen.lengths if training] == [2, 4]


def test_assigned_loaders_exchange_their_callbacks_when_a_run_begins():
    calls, own = [], Callback(before_fit=lambda cb: calls.append("own"))

    def loaders(name):
        dls = make_dls(8)
        dls.cbs = [Callback(before_fit=lambda cb: calls.append(name))]
        return dls

    first, second = loaders("first"), loaders("second")
    learn = make_learner(first, cbs=own)
    for dls, expected in ((first, {"first", "own"}), (second, {"second", "own"}), (make_dls(8), {"own"})):
        learn.dls = dls
        for run in (learn.fit, lambda n: learn.validate()):
            calls.clear()
            run(1)
            assert sorted(calls) == sorted(expected)
    learn.dls = second
    learn.fit(1, cbs=Callback(before_epoch=lambda cb: setattr(cb.learn, "dls", first)))
    learn.fit(0)
    assert [cb for cb in learn.cbs if cb in (*first.cbs, *second.cbs)] == first.cbs


def test_one_batch_leaves_the_generators_alone():
    dls = DataLoaders.from_datasets(numbers(10), bs=4, device="cpu")
    state = torch.get_rng_state()
    assert len(dls.one_batch()[0]) == 4
    assert torch.equal(state, torch.get_rng_state())


class Around:
    """A loader of another kind, whose state is that of the data inside it."""

    def __init__(self, data):
        self.state_dict, self.load_state_dict = data.state_dict, data.load_state_dict
        self.inner = DataLoader(data, 4)

    def __iter__(self):
        return iter(self.inner)


@pytest.mark.parametrize("make", [partial(DataLoader, batch_size=4), Around], ids=["loader", "own"])
def test_one_batch_takes_no_batch_from_data_with_a_state(make):
    dls = DataLoaders(make(StreamWithState(torch.arange(6), torch.zeros(6))), device="cpu")
    first, *rest = dls.train
    expected = [first[0].tolist(), *(batch[0].tolist() for batch in rest)]
    dls = DataLoaders(make(StreamWithState(torch.arange(6), torch.zeros(6))), device="cpu")
    assert dls.one_batch()[0].tolist() == expected[0]
    assert [batch[0].tolist() for batch in dls.train] == expected


def test_one_batch_leaves_samplers_alone():
    dls = DataLoaders(DataLoader(numbers(20), 4, sampler=Counting(20)), device="cpu")
    first, other = dls.one_batch(), dls.one_batch()
    assert torch.equal(first[0], other[0])


def test_other_datasets_go_through_torch():
    dl = DataLoaders.from_datasets(Squares(5), bs=2, shuffle=False).train
    assert [b[1].tolist() for b in dl] == [[0, 1], [4, 9], [16]]
    doubled = RowsLoader(numbers(4), batch_size=2, collate_fn=lambda samples: len(samples))
    assert list(doubled) == [2, 2]


def test_options_of_from_datasets_reach_the_loaders():
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


def test_a_loader_that_does_not_implement_its_length_is_read_as_one_without():
    class Unknown(list):
        def __len__(self):
            raise NotImplementedError

    learn = make_learner(dls=DataLoaders(Unknown([(torch.randn(2, 4), torch.randn(2, 1))] * 3), device="cpu"))
    learn.fit(1)
    assert learn.train_iter == 3


def test_names_of_classes_from_a_generator_are_there_to_draw_and_to_show():
    data = TensorDataset(torch.zeros(4), torch.tensor([0, 1, 0, 1]))
    dls = DataLoaders.from_datasets(data, weights={"no": 1, "yes": 2}, classes=(name for name in ("no", "yes")))
    assert dls.classes == ["no", "yes"]


def test_inputs_are_not_read_in_batches_of_another_size_than_was_asked_for():
    dls = DataLoaders.from_datasets(numbers(4), bs=2)
    with pytest.raises(ValueError, match="batch_size=0"):
        dls.test_dl(torch.zeros(3), bs=0)


class Graph:
    """An object of another library with no length, whose samples only the loader knows, such as a batch of graphs."""

    def __init__(self, samples):
        self.x, self.y = (torch.stack(column) for column in zip(*samples, strict=True))


class OfGraphs(DataLoaders):
    def split(self, batch, arguments=None):
        return (batch,), (batch.y,)


class FromGraph(torch.nn.Linear):
    def forward(self, graph):
        return super().forward(graph.x)


def test_a_view_of_a_loader_has_the_numbers_of_samples_that_the_loader_draws():
    loader = DataLoader(TensorDataset(torch.randn(10, 4), torch.randn(10, 1)), 4, collate_fn=Graph)
    learn = make_learner(OfGraphs(loader, device="cpu"), FromGraph(4, 1))
    sizes = []
    note = Callback(after_batch=lambda cb: sizes.append(cb.batch_size))
    learn.fit(1, cbs=note)
    learn.fit(1, cbs=[note, ShortEpochCallback(n=3)])
    assert sizes == [4, 4, 2] * 2


class OfPictures(torch.nn.Linear):
    """A score for each sample, which is several pictures with a text."""

    def forward(self, pictures, bounds, texts):
        scores = super().forward(pictures)
        return torch.stack([scores[i:j].mean() for i, j in bounds.unfold(0, 2, 1)])


def test_a_list_of_texts_says_how_many_samples_a_batch_has():
    counts = [3, 1, 2, 1]  # the last batch has three pictures and three bounds, but two samples

    def collate(places):
        few = [counts[i] for i in places]
        bounds = torch.tensor([0, *few]).cumsum(0)
        return {"pictures": torch.ones(sum(few), 4), "bounds": bounds, "texts": [f"no. {i}" for i in places]}

    dls = DataLoaders(DataLoader(range(len(counts)), 2, collate_fn=collate), device="cpu")
    learn, sizes = make_learner(dls, OfPictures(4, 1), loss_func=lambda pred: pred.mean()), []
    learn.fit(1, cbs=Callback(after_batch=lambda cb: sizes.append(cb.batch_size)))
    assert sizes == [2, 2]
