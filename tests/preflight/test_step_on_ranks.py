"""learn.check() on two ranks: all have one verdict, and rank 0 says why."""

import contextlib
import io

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import Callback, DataLoaders, GradientAccumulation, Learner, accuracy, distributed

pytestmark = pytest.mark.ranks(2)


def learner(model=None, targets=None, cbs=None, **kwargs):
    torch.manual_seed(3)
    x, y = torch.randn(40, 4), torch.randint(3, (40,)) if targets is None else targets
    dls = DataLoaders.from_datasets(TensorDataset(x, y), TensorDataset(x, y), bs=4, device="cpu")
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 3)) if model is None else model
    return Learner(dls, model, nn.CrossEntropyLoss(), metrics=accuracy, cbs=cbs, **kwargs)


def checked(learn, well, *words):
    """Every rank has this verdict; rank 0 says why."""
    with contextlib.redirect_stdout(io.StringIO()) as text, learn.distrib_ctx():
        found = learn.check()
    assert distributed.all_gather(found) == [well] * 2, text.getvalue()
    texts = distributed.all_gather(text.getvalue())
    assert texts[1] == ""
    assert all(word in texts[0] for word in words), texts[0]
    assert type(learn.model) is nn.Sequential
    assert learn.n_ranks == 1


def test_a_healthy_learner_is_well():
    checked(learner(), True, "all is well", "accuracy", "guessing")


def test_a_rank_without_a_batch_of_validation_is_well():
    few = learner()
    few.dls.loaders[1] = DataLoader(few.dls.valid.dataset, 40)
    checked(few, True, "all is well")


def test_with_accumulation_all_is_well():
    checked(learner(cbs=GradientAccumulation(n_batches=3)), True, "all is well", "4 of 4 trainable")


def on_rank_1(right, wrong):
    return wrong if distributed.rank() == 1 else right


class Picky(nn.Module):
    """Fails on one rank."""

    def __init__(self, fails):
        super().__init__()
        self.fails = fails

    def forward(self, x):
        if self.fails:
            raise ValueError("this input is not for me")
        return x


class Fails(Callback):
    def after_loss(self):
        if distributed.rank() == 1:
            raise KeyError("gone")


def fits(learn):
    """The ranks work together afterwards."""
    with learn.no_logging(), learn.distrib_ctx():
        learn.fit(1)
    assert distributed.same_everywhere([p.sum().item() for p in learn.model.parameters()])


def classes():
    return torch.randint(3, (40,), generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the datasets are not the same on all ranks")
def test_targets_that_are_wrong_on_one_rank():
    checked(
        learner(targets=on_rank_1(classes(), classes() + 5)),
        False,
        "classes 0 .. 2",
        "(rank 1)",
        "1 problem (errors.html#check-findings)\n",
    )
    learn = learner(targets=classes())
    checked(learn, True)
    fits(learn)


def test_a_metric_that_fails_on_one_rank():
    def broken(pred, target):
        if distributed.rank() == 1:
            raise IndexError("no such thing")
        return accuracy(pred, target)

    learn = learner()
    learn.metrics = broken
    checked(learn, False, "broken: IndexError", "(rank 1)", "1 problem (errors.html#check-findings)\n")


@pytest.mark.filterwarnings("ignore:the datasets are not the same on all ranks")
def test_inputs_that_are_nan_on_one_rank():
    x = torch.full((40, 4), on_rank_1(1.0, float("nan")))
    learn = learner()
    learn.dls = DataLoaders.from_datasets(TensorDataset(x, classes()), bs=4, device="cpu")
    checked(learn, False, "NaN", "(rank 1)")


def test_a_callback_that_fails_on_one_rank():
    checked(
        learner(cbs=Fails()),
        False,
        "KeyError",
        "Fails.after_loss",
        "(rank 1)",
        "1 problem (errors.html#check-findings)\n",
    )


def test_a_model_that_fails_on_one_rank():
    learn = learner(nn.Sequential(nn.Linear(4, 3), Picky(distributed.rank() == 1)))
    checked(learn, False, "this input is not for me", "(rank 1)", "1 problem (errors.html#check-findings)\n")
    learn.model[1].fails = False
    checked(learn, True, "all is well")
    fits(learn)


@pytest.mark.slow
def test_a_problem_of_all_ranks_is_said_once():
    checked(
        learner(nn.Sequential(nn.Linear(5, 3))),
        False,
        "cannot be multiplied",
        "the model got",
        "1 problem (errors.html#check-findings)\n",
    )
    checked(learner(nn.Sequential(nn.Linear(4, 2))), False, "classes 0 .. 1")


@pytest.mark.slow
def test_a_check_leaves_nothing_behind_that_changes_a_fit():
    found = []
    for first in (False, True):
        torch.manual_seed(distributed.rank())
        learn = learner()
        if first:
            checked(learn, True)
            assert learn.opt is None
        with learn.no_logging(), learn.distrib_ctx():
            learn.fit(2)
        found.append([p.detach().clone() for p in learn.model.parameters()])
    assert all(map(torch.equal, *found))
