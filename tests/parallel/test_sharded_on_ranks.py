"""Training on shards of a model: N processes equal one, what cannot be is refused, and cancels and errors end all."""

import copy
import signal
import time
import warnings
from functools import partial

import pytest
import shard_jobs
import torch
import torch.distributed as dist
from shard_jobs import JOBS, Block, Net, learner
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import learnerkit
from learnerkit import Callback, DataLoaders, Event, GradientAccumulation, Learner, PeerError, world
from learnerkit.events import INNER_EVENTS

on_ranks = pytest.mark.ranks(2, slow=[3])
slow_on_ranks = pytest.mark.ranks(slow=[2], soak=[3])
pytestmark = pytest.mark.filterwarnings("ignore:find_unused_parameters=True was chosen")

RANK, N = world.rank(), world.world_size()
LAST = N - 1
OPTIONS = {"shard": True, "split_batches": True, "timeout": 60, "sync_bn": False}
SOON = 15  # seconds; a second on an idle machine


# Equality with one process

QUICK = ["optimizer AdamW", "plain", "tied weights and shared modules", "parts that one rank alone uses",
         "accumulated and clipped", "first unfrozen in before_epoch, by parameters that are held"]  # fmt: skip
GROUPS = [name for name in JOBS if name not in QUICK]


@on_ranks
def test_training_on_shards_equals_one_process():
    for name in QUICK:
        shard_jobs.check(name)


@slow_on_ranks
@pytest.mark.parametrize("name", GROUPS)
def test_a_job_on_shards_equals_one_process(name):
    shard_jobs.check(name)


def test_every_quick_job_is_there():
    assert set(QUICK) < set(JOBS)


# Cancels and errors on one rank: all leave together, and the next fit goes on

EVENTS = [str(e) for e in Event if e.startswith(("before_", "after_")) and "cancel" not in e and e != "after_create"]
TRAINING_ONLY = ("before_backward", "after_backward", "before_step", "after_step")
WHEN = [(event, True) for event in EVENTS] + [
    (event, False) for event in EVENTS if event in INNER_EVENTS and event not in TRAINING_ONLY
]


class Do(Callback):
    """Does something once, on some ranks, at an event: in the second batch of the first epoch if it is of a batch."""

    def __init__(self, event, action, ranks=(LAST,), training=True, at=1):
        super().__init__(order=0, **{event: lambda cb: cb.act()})
        self.event, self.action, self.ranks, self.in_training, self.at, self.done = (
            event, action, ranks, training, at, False
        )  # fmt: skip

    def act(self):
        learn = self.learn
        if self.done or RANK not in self.ranks:
            return
        if self.event in INNER_EVENTS and (learn.training, learn.epoch, learn.iter) != (self.in_training, 0, self.at):
            return
        self.done = True
        self.action()


def throw(error):
    def action():
        raise error

    return action


def fit(learn, epochs=2, **options):
    """(error or None, seconds) of a fit."""
    start, error = time.monotonic(), None
    try:
        with learn.distrib_ctx(**OPTIONS | options), learn.no_logging(), learn.no_bar():
            learn.fit(epochs)
    except (Exception, KeyboardInterrupt) as e:
        error = e
    return error, time.monotonic() - start


def weights(learn):
    return {k: v.clone() for k, v in learn.model.state_dict().items()}


def check_after(learn, took, where, alike=True):
    """The ranks agree on everything, and can go on."""
    assert took < SOON, (where, took)
    assert learn._agreement is None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if alike:
        assert learn.shards is None, where
        facts = (str(weights(learn)), learn.recorder.values, learn.recorder.losses, learn.train_iter)
        assert world.same_everywhere(facts), (where, facts)
    learn.remove_cbs(Do)
    error, _ = fit(learn, 1)
    assert error is None, (where, repr(error))
    assert learn.shards is None
    assert world.same_everywhere(str(weights(learn))), where
    assert all(p.isfinite().all() for p in weights(learn).values())


def cancel(kind, when, **options):
    kind = KeyboardInterrupt if kind == "KeyboardInterrupt" else getattr(learnerkit, kind)
    action = (lambda: signal.raise_signal(signal.SIGINT)) if kind is KeyboardInterrupt else throw(kind())
    for event, training in when:
        where = (kind.__name__, event, training)
        learn = learner(cbs=Do(event, action, training=training), opt_func=optim.AdamW)
        error, took = fit(learn, **options)
        errors = world.all_gather(type(error).__name__)
        assert len(set(errors)) == 1, (where, errors, error)
        assert errors[0] in ("NoneType", kind.__name__), (where, errors, error)
        check_after(learn, took, where)


@on_ranks
def test_a_cancel_on_one_rank_ends_all():
    cancel("CancelFitException", [("before_batch", True), ("after_pred", False)])


CANCELS = ["CancelFitException", "CancelEpochException", "CancelTrainException", "CancelValidException",
           "KeyboardInterrupt"]  # fmt: skip


@slow_on_ranks
@pytest.mark.parametrize("kind", CANCELS)
@pytest.mark.parametrize("reshard", [True, False])
def test_a_cancel_at_any_event_ends_all(kind, reshard):
    cancel(kind, WHEN, reshard_after_forward=reshard)


def fail(when, error=ValueError, make=learner, **kwargs):
    for event, training in when:
        where = (event, training)
        learn = make(cbs=[Do(event, throw(error("boom")), training=training)], **kwargs)
        found, took = fit(learn)
        assert type(found) is (error if RANK == LAST else PeerError), (where, repr(found))
        assert RANK == LAST or f"{error.__name__}: boom" in str(found), (where, found)
        check_after(learn, took, where, alike=False)


@on_ranks
def test_an_error_on_one_rank_ends_all():
    fail([("after_loss", True)])


@slow_on_ranks
@pytest.mark.parametrize("half", [0, 1])
def test_an_error_at_any_event_ends_all(half):
    fail(WHEN[half::2])


class Broken(nn.Module):
    """Fails on the last rank in the forward or backward pass."""

    def __init__(self, inner, what, training=True):
        super().__init__()
        self.inner, self.what, self.mode, self.calls = inner, what, training, 0

    def forward(self, x):
        y = self.inner(x)
        if self.training is self.mode and RANK == LAST:
            self.calls += 1
            if self.calls == 2 and self.what == "forward":
                raise ZeroDivisionError("boom")
            if self.calls == 2 and self.what == "backward":
                y.register_hook(lambda grad: throw(ZeroDivisionError("boom"))())
        return y


class BrokenStep(optim.AdamW):
    def step(self, closure=None):
        if RANK == LAST and not getattr(self, "done", False) and self.state:
            self.done = True
            raise ZeroDivisionError("boom")
        return super().step(closure)


@slow_on_ranks
@pytest.mark.parametrize("what", ["forward", "backward", "validation", "optimizer", "hook"])
@pytest.mark.filterwarnings("ignore:the last fit failed when the ranks had taken")
def test_an_error_inside_the_model_or_the_optimizer_ends_all(what):
    model = Net(n=3)
    if what in ("forward", "backward"):
        model.blocks[1] = Broken(model.blocks[1], what)
    elif what == "validation":
        model.blocks[1] = Broken(model.blocks[1], "forward", training=False)
    elif what == "hook":
        calls = []
        model.blocks[1].register_forward_hook(
            lambda *_: calls.append(1) or (RANK == LAST and len(calls) == 2 and throw(ZeroDivisionError("boom"))())
        )
    learn = learner(model, opt_func=BrokenStep if what == "optimizer" else optim.AdamW)
    found, took = fit(learn)
    assert type(found) is (ZeroDivisionError if RANK == LAST else PeerError), repr(found)
    check_after(learn, took, what, alike=False)


@slow_on_ranks
@pytest.mark.parametrize("accumulated", [False, True])
def test_a_batch_that_one_rank_leaves_weighs_nothing_of_it(accumulated):
    """Its gradients are those of the other ranks' samples, also if it leaves the first batch."""
    for event in ("before_batch", "after_pred", "after_loss", "before_backward"):
        for at in (0, 1):

            def make(event=event, at=at):
                cbs = [Do(event, throw(learnerkit.CancelBatchException()), at=at)]
                return learner(cbs=[*cbs, *([GradientAccumulation(n_batches=2)] if accumulated else [])], n=24)

            found = []
            for shard in (False, True):
                learn = make()
                error, took = fit(learn, shard=shard)
                assert error is None, (event, at, error)
                found.append((weights(learn), learn.recorder.values))
                check_after(learn, took, (event, at))
            torch.testing.assert_close(*found, rtol=1e-9, atol=1e-10)


@slow_on_ranks
def test_a_cancel_in_the_middle_of_the_forward_pass_is_refused():
    model = Net()
    calls = []

    def leave(*_):
        calls.append(1)
        if len(calls) == 2 and RANK == LAST:
            raise learnerkit.CancelBatchException

    model.blocks[0].register_forward_hook(leave)
    learn = learner(model)
    error, took = fit(learn)
    assert took < SOON
    assert "a cancel in the middle of the model's forward pass" in str(error)
    check_after(learn, took, "", alike=False)
