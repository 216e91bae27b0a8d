"""State from batch to batch on several ranks: the rows of one process, resumed, and divided anew."""

import warnings

import carried_jobs
import pytest
import torch
from carried_jobs import Hidden, batches
from helpers import mostly_slow
from resume_jobs import Killed, _KillBefore
from torch.utils.data import DataLoader, IterableDataset

from learnerkit import Callback, CheckpointCallback, GradientAccumulation, distributed
from learnerkit.data.cuts import join_rows

pytestmark = pytest.mark.ranks(2, soak=[3])

RANK = distributed.rank()
ROWS = 7  # of which ranks have different numbers


def learner(train=None, valid=None, cbs=()):
    train = batches(5, ROWS) if train is None else train
    return carried_jobs.learner(train, valid or batches(3, 4, seed=1), [Hidden(dim=1), *cbs])


def fit(learn, epochs=2, **options):
    with learn.no_logging(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* processes each train a whole copy")
        warnings.filterwarnings("ignore", message="the data of rank")
        if options:
            with learn.distrib_ctx(**options):
                learn.fit(epochs)
        else:
            learn.fit(epochs)
    return torch.cat([p.detach().flatten() for p in learn.model.parameters()])


@pytest.mark.parametrize("accumulated", mostly_slow([False, True], True))
def test_two_processes_have_the_rows_of_one(accumulated):
    cbs = [GradientAccumulation(n_batches=2)] if accumulated else []
    alone, learn = (learner(cbs=cbs and [GradientAccumulation(n_batches=2)]) for _ in range(2))
    torch.testing.assert_close(fit(alone), fit(learn, split_batches=True), rtol=1e-9, atol=1e-12)
    one, several = (torch.tensor(each.recorder.values) for each in (alone, learn))
    torch.testing.assert_close(one, several, rtol=1e-9, atol=1e-12)
    with learn.no_logging(), learn.distrib_ctx(split_batches=True):
        together = learn.get_preds()[0]
    torch.testing.assert_close(alone.get_preds()[0], together, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("stop", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_same_weights(stop, tmp_path):
    def make(*cbs):
        return learner(cbs=[CheckpointCallback(tmp_path, every=3, resume=True), *cbs])

    whole = fit(learner(), split_batches=True)
    with pytest.raises(Killed):
        fit(make(_KillBefore(stop)), split_batches=True)
    again = fit(make(), split_batches=True)
    assert torch.equal(whole, again), (whole - again).abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("of_one", mostly_slow([True, False], False))
def test_states_are_divided_anew(of_one):
    """In the middle of an epoch each rank gets its rows again, of the states of one process or of as many."""
    done = []

    def divide(cb):
        carried = cb.learn.hidden
        if cb.training and cb.iter == 3:
            before = carried.state_dict()["own"]["state"]
            ranks = distributed.all_gather({"state": before})
            if of_one:
                ranks = [{"state": join_rows([rank["state"] for rank in ranks], 1)}]
            carried.load_state_dict({"ranks": ranks})
            done.append(all(map(torch.equal, before, carried.state_dict()["own"]["state"])))

    plain = fit(learner(), split_batches=True)
    assert torch.equal(plain, fit(learner(cbs=[Callback(before_batch=divide)]), split_batches=True))
    assert done == [True, True]


class Own(IterableDataset):
    """Batches of this rank alone."""

    def __iter__(self):
        return iter(batches(5, ROWS, RANK))


def test_each_rank_may_carry_the_state_of_its_own_data():
    stream = DataLoader(Own(), batch_size=None)
    learn = learner(stream, batches(3, 4, seed=1))
    with pytest.raises(ValueError, match="the processes take the batches in turn"):
        fit(learn, split_batches=False)
    seen = []
    note = Callback(before_step=lambda cb: seen.append(cb.learn.hidden.state_dict()["own"]["state"][0].clone()))
    learn = learner(stream, cbs=[note])
    learn.dls.loaders[1] = None
    fit(learn, 1, sharded=True)
    everyone = distributed.all_gather(seen)
    assert all(len(states) == 5 for states in everyone)
    assert not everyone[0][-1].equal(everyone[1][-1])


def test_a_rank_without_rows_takes_part():
    train = batches(4, 1)  # one row, so rank 0 alone has it
    alone, learn = learner(train, batches(2, 1)), learner(train, batches(2, 1))
    torch.testing.assert_close(fit(alone), fit(learn, split_batches=True), rtol=1e-9, atol=1e-12)


def test_rows_that_change_are_refused():
    refused = ValueError, distributed.PeerError  # a rank whose rows are none, before and after, is told of it
    with pytest.raises(refused, match=r"the state that is carried has \d rows, and the batch"):
        fit(learner([*batches(2, ROWS), *batches(1, 2)]), split_batches=True)
