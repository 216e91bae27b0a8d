"""Ranks that do not make the same calls, each case in a fit that fails everywhere; and the next fit works."""

import gc
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers import mostly_slow, step_gradient
from torch import nn
from torch.utils.data import Dataset, get_worker_info

from learnerkit import Callback, CancelFitException, DataLoaders, Learner, distributed
from learnerkit.distributed import PeerError
from learnerkit.events import INNER_EVENTS

on_ranks = pytest.mark.ranks(2, soak=[3])
SLOW, SOAK = pytest.mark.slow, pytest.mark.soak

RANK, N = distributed.rank(), distributed.world_size()
LAST = N - 1
SOON = 15  # seconds, where no rank waits for a timeout
SAME = "every rank must make the same calls"


class Samples(Dataset):
    """Sums; they say whether the process that reads them is a worker whose garbage is not to be collected."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        x = torch.linspace(-1, 1, 4) * (i - 20)
        frozen = get_worker_info() is not None and gc.get_freeze_count() > 0
        return x, torch.tensor(float(frozen))


def make_learner(cbs=None, model=None, workers=0):
    dls = DataLoaders.from_datasets(Samples(), Samples(), bs=8, num_workers=workers, device="cpu")
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))
    learn = Learner(dls, model, nn.MSELoss(), cbs=cbs)
    learn.create_opt()
    return learn


def run(learn, call=lambda learn: learn.fit(1), timeout=60.0):
    """(error or None, seconds) of a call in the context."""
    start, error = time.monotonic(), None
    try:
        with learn.distrib_ctx(split_batches=True, timeout=timeout), learn.no_logging(), learn.no_bar():
            call(learn)
    except Exception as e:
        error = e
    try:
        return error, time.monotonic() - start
    finally:
        del error  # its traceback has this frame


def once(event, action, training=True, ranks=(LAST,)):
    """A callback that does something at an event, once: of a batch's in the third one."""

    def hook(cb):
        here = (cb.training, cb.iter) == (training, 2) or event not in INNER_EVENTS
        if here and RANK in ranks and not done:
            done.append(True)
            action(cb.learn)

    done = []
    return Callback(**{event: hook})


def goes_on():
    """All ranks can train together afterwards."""
    error, _ = run(make_learner())
    assert error is None, error


# Collectives that differ


def objects():
    dist.all_gather_object([None] * N, "text")


DIFFERENT = {
    "sizes": lambda: dist.all_reduce(torch.ones(3 + RANK)),
    "a large size": lambda: dist.all_reduce(torch.ones(3 + 100_000 * RANK)),
    "types": lambda: dist.all_reduce(torch.ones(3, dtype=torch.float32 if RANK else torch.float64)),
    "calls": lambda: dist.all_reduce(torch.ones(3)) if RANK else dist.barrier(),
    "pieces": lambda: dist.all_gather([torch.empty(2 + RANK) for _ in range(N)], torch.ones(2 + RANK)),
    "an object": lambda: objects() if RANK else dist.all_reduce(torch.ones(1)),
    "ours": lambda: distributed.reduce(torch.ones(3 + RANK)),
    "ours, calls": lambda: distributed.all_gather("a") if RANK else distributed.reduce(1.0),
}


@on_ranks
@pytest.mark.parametrize("event", ["after_batch", pytest.param("after_epoch", marks=SOAK)])
@pytest.mark.parametrize("name", mostly_slow(DIFFERENT, "sizes", "calls", "ours"))
def test_collectives_that_differ_are_an_error_on_every_rank(name, event):
    error, took = run(make_learner(once(event, lambda learn: DIFFERENT[name](), ranks=range(N))))
    assert took < SOON
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    assert isinstance(error, RuntimeError), repr(error)
    assert SAME in text or isinstance(error, PeerError), text
    assert "mismatch between collectives" in text or isinstance(error, PeerError), text
    goes_on()


MISSED = {
    "all_reduce": lambda learn: dist.all_reduce(torch.ones(3)),
    "one number": lambda learn: dist.all_reduce(torch.ones(1, dtype=torch.float64)),
    "many numbers": lambda learn: dist.all_reduce(torch.ones(100_000)),
    "objects": lambda learn: objects(),
    "barrier": lambda learn: dist.barrier(),
    "broadcast": lambda learn: dist.broadcast(torch.ones(5), 0),
    "no wait": lambda learn: dist.all_reduce(torch.ones(3), async_op=True),
    "distributed.reduce": lambda learn: distributed.reduce(1.0),
    "distributed.all_gather": lambda learn: distributed.all_gather("a"),
    "validate": lambda learn: learn.validate(),
}
PLACES = [
    ("before_fit", True), ("before_train", True), ("before_batch", True), ("after_loss", True), ("after_batch", True),
    ("after_batch", False), ("before_validate", False), ("after_epoch", True), ("after_fit", True),
]  # fmt: skip
QUICK = [("distributed.reduce", "after_epoch", True)]
LATER = [("all_reduce", "after_batch", True), ("validate", "before_fit", True), ("objects", "after_loss", True)]


@on_ranks
@pytest.mark.parametrize(
    ("name", "event", "training"),
    [
        pytest.param(
            *case,
            marks=() if case in QUICK else SLOW if case in LATER else SOAK,  # all take a quarter of an hour
        )
        for case in ((name, *place) for name in MISSED for place in PLACES)
        if case[:2] != ("validate", "before_validate")
    ],
)
def test_a_call_that_the_other_ranks_do_not_make_ends_the_run_everywhere(name, event, training):
    error, took = run(make_learner(once(event, MISSED[name], training)), timeout=2)
    assert isinstance(error, RuntimeError), repr(error)
    assert took < 2 + SOON
    goes_on()


EVALUATIONS = {"validate": lambda learn: learn.validate(), "get_preds": lambda learn: learn.get_preds()}


@on_ranks
@pytest.mark.parametrize("name", mostly_slow(EVALUATIONS, "validate"))
@pytest.mark.parametrize("event", mostly_slow(["before_fit", "after_train", "after_epoch", "after_fit"], "after_train"))
def test_an_evaluation_on_one_rank_alone_is_noticed_at_once(event, name):
    error, took = run(make_learner(once(event, EVALUATIONS[name])))
    assert took < SOON
    assert type(error) is PeerError, repr(error)
    assert f"rank {LAST} is at" in str(error)
    assert f"{event} (fit)" in str(error)
    assert SAME in str(error)
    goes_on()


# Runs that differ


@on_ranks
@pytest.mark.parametrize(
    ("first", "second"),
    mostly_slow(
        [("fit", "validate"), ("validate", "get_preds"), ("lr_find", "fit"), ("get_preds", "lr_find")],
        ("fit", "validate"), ("lr_find", "fit"),
    ),
)  # fmt: skip
def test_ranks_that_make_different_runs_are_told_which(first, second):
    calls = EVALUATIONS | {"fit": lambda learn: learn.fit(1), "lr_find": lambda learn: learn.lr_find(show_plot=False)}
    error, took = run(make_learner(), calls[second if RANK == LAST else first])
    assert took < SOON
    assert type(error) is PeerError, repr(error)
    called = ", ".join(f"rank {rank} called {second if rank == LAST else first}" for rank in range(N))
    assert str(error).startswith(f"{called}; {SAME}"), error
    goes_on()


@on_ranks
@pytest.mark.parametrize("who", [0, pytest.param(LAST, marks=SLOW)])
@pytest.mark.parametrize("name", ["fit", pytest.param("get_preds", marks=SOAK), pytest.param("validate", marks=SLOW)])
def test_a_run_of_one_rank_alone_ends_within_its_timeout(name, who):
    key = f"test/{distributed.all_gather(time.monotonic_ns())[0]}"
    if who == RANK:
        error, took = run(make_learner(), lambda learn: getattr(learn, name)(*[1] * (name == "fit")), timeout=1)
        distributed.store().set(key, "")
        others = [str(rank) for rank in range(N) if rank != who]
        ranks = f"rank{'s' if N > 2 else ''} {', '.join(others)}"
        assert type(error) is PeerError, repr(error)
        assert str(error).startswith(f"rank {who} called {name} and waited 1 s for {ranks}; {SAME}")
        assert took < 1 + SOON
    else:
        distributed.store().wait([key], timedelta(seconds=60))
    goes_on()


# What is left of a run


class Broken(Exception):
    """An error that can be referred to weakly."""


class BrokenModel(nn.Linear):
    """Fails on the last rank in the third batch."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if RANK == LAST and self.calls == 3:
            raise Broken
        return super().forward(x)[:, 0]


def throw(kind):
    def action(learn):
        raise kind

    return action


ENDINGS = {
    "well": lambda: (None, None),
    "in a batch": lambda: (once("after_batch", throw(Broken)), None),
    "in validation": lambda: (once("after_validate", throw(Broken)), None),
    "in a cleanup": lambda: (once("cleanup_train", throw(Broken)), None),
    "in the model": lambda: (None, BrokenModel(4, 1)),
    "by a cancel": lambda: (once("after_batch", throw(CancelFitException)), None),
}


@on_ranks
@pytest.mark.parametrize("how", [pytest.param(how, marks=SOAK) for how in ENDINGS])
def test_nothing_of_a_run_is_left_to_the_garbage_collector(how):
    check_nothing_is_left(how)


@pytest.mark.soak
@pytest.mark.parametrize("how", [how if i < 2 else pytest.param(how, marks=SOAK) for i, how in enumerate(ENDINGS)])
def test_nothing_of_a_run_on_one_process_is_left_to_the_garbage_collector(how):
    check_nothing_is_left(how)


def check_nothing_is_left(how):
    cb, model = ENDINGS[how]()
    learn = make_learner(cb, model, workers=1)
    seen = {}

    def note(cb):
        run = cb.learn
        for name, x in (("dispatch", run._dispatch), ("agreement", run._agreement), ("step", step_gradient(run))):
            if x is not None:
                seen[name] = weakref.ref(x)
        if N > 1 and run.training:
            seen["ranks"], seen["loader"] = weakref.ref(step_gradient(run).step), weakref.ref(run.dl)
            if ddp := getattr(step_gradient(run), "ddp", None):
                seen["ddp"] = weakref.ref(ddp)

    learn.add_cb(Callback(before_batch=note, order=50))
    gc.collect()
    gc.disable()
    try:
        error, _ = run(learn)
        assert (error is None) == (how in ("well", "by a cancel")), repr(error)
        if isinstance(error, Broken | PeerError):
            seen["error"] = weakref.ref(error)
        del error
        left = [name for name, find in seen.items() if find() is not None]
        assert not left, left
        assert len(seen) >= (5 if N > 1 else 1)
    finally:
        gc.enable()


@pytest.mark.soak
@on_ranks
def test_a_loaders_workers_do_not_collect_the_garbage_of_their_parent():
    learn = make_learner(workers=1)
    found = []
    learn.add_cb(Callback(before_batch=lambda cb: found.extend(cb.yb[0].tolist())))
    error, _ = run(learn)
    assert error is None, error
    assert found
    assert all(found)
