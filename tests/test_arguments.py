"""Checks at the rim, one by one; `test_learner.py` has them as a user meets them."""

import re
from types import SimpleNamespace

import pytest
import torch
from helpers import make_data, make_dls, make_learner, make_model
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from learnerkit import Callback, DataLoaders, Learner, arguments


def test_broadcasting_is_refused_in_validation_too():
    dls = DataLoaders(DataLoader(make_data(4), 4), [(torch.zeros(4, 4), torch.zeros(4))], device="cpu")
    with pytest.raises(ValueError, match=r"the targets \(4,\)"):
        make_learner(dls).validate()


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        ([], ": it has no batches"),
        (DataLoader(make_data(3), 4, drop_last=True), ": 3 samples are less than a batch of 4, and drop_last=True"),
        (DataLoader(make_data(0), 4), ": its dataset has 0 samples"),
    ],
)
def test_why_a_loader_is_empty(loader, said):
    with pytest.raises(ValueError, match=re.escape("the loader is empty" + said)):
        arguments.check_not_empty(loader, "the loader")


@pytest.mark.parametrize("loader", [[1], iter([]), (x for x in []), DataLoader(make_data(4), 4, drop_last=True)])
def test_what_has_batches_or_does_not_say_passes(loader):
    arguments.check_not_empty(loader, "the loader")


def test_length_where_it_is_needed():
    assert arguments.check_length([1, 2], "a schedule") == 2
    with pytest.raises(
        ValueError, match=r"a schedule needs to know .* \(list_iterator\) has no length; give it a __len__"
    ):
        arguments.check_length(iter([]), "a schedule")


def test_every_message_names_what_was_got():
    cases = [
        (lambda: Learner("data", make_model()), "str"),
        (lambda: Learner(make_dls(), "model"), "'model'"),
        (lambda: Learner(make_dls(), make_model(), 7), "7"),
        (lambda: Learner(make_dls(), make_model(), opt_func=7), "7"),
        (lambda: make_learner(cbs=7), "7"),
        (lambda: make_learner().fit("two"), "'two'"),
        (lambda: make_learner().fit(1, start_epoch=-3), "-3"),
        (lambda: make_learner().save("a/b"), "'a/b'"),
        (lambda: make_learner().get_preds(on="rank1"), "'rank1'"),
        (lambda: make_learner(loss_weight="mean"), "'mean'"),
        (lambda: Callback(befor_fit=print), "'befor_fit'"),
    ]
    for bad, got in cases:
        with pytest.raises((TypeError, ValueError)) as e:
            bad()
        assert got in str(e.value)
        assert len(str(e.value)) > 30


def test_a_validation_iterator_that_is_exhausted():
    valid = iter(list(DataLoader(make_data(4), 4)))
    learn = make_learner(DataLoaders(DataLoader(make_data(), 4), valid, device="cpu"))
    with pytest.raises(
        ValueError, match="the validation loader gave no batches in epoch 1; an iterator can be read only"
    ):
        learn.fit(2)


def test_an_unsized_loader_without_batches_is_noticed():
    class Nothing:
        def __iter__(self):
            return iter(())

    with pytest.raises(ValueError, match="the training loader gave no batches in epoch 0$"):
        make_learner(DataLoaders(Nothing(), device="cpu")).fit(1)


def test_a_killed_loader_worker_is_explained():
    class Late:
        exitcodes = iter([None, None, -9])  # the news of its death may be late

        @property
        def exitcode(self):
            return next(self.exitcodes, -9)

    class Loader(_MultiProcessingDataLoaderIter):
        def __init__(self):
            pass

        def __del__(self):
            pass

        _workers = (SimpleNamespace(exitcode=0), Late())

        def fail(self, error):
            raise error

    gone = RuntimeError("DataLoader worker (pid(s) 5) exited unexpectedly")
    cut = ConnectionResetError(104, "Connection reset by peer")
    for error in (cut, gone):
        with pytest.raises(type(error)):
            Loader().fail(error)
    crashed = RuntimeError("DataLoader worker (pid 5) is killed by signal: Segmentation fault. ")
    killed = "9 (SIGKILL)"
    for error, signal in ((cut, killed), (gone, killed), (gone, killed), (crashed, "11 (SIGSEGV)")):
        arguments.explain_lost_worker(error)
        (note,) = error.__notes__  # one, also if runs lie within each other
        assert note.startswith(f"the loader worker was killed by signal {signal}")
    for other in (RuntimeError("a DataLoader worker"), FileNotFoundError(2, "No such file")):
        arguments.explain_lost_worker(other)
        assert not hasattr(other, "__notes__")
