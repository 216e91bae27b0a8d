"""The parts of a step, and what those of all ranks say."""

import random
import time
from statistics import median

import pytest
import torch
from helpers import make_dls, make_learner
from torch.utils.data import BatchSampler, ChainDataset, DataLoader, SequentialSampler, TensorDataset

from learnerkit import Callback, DataLoaders, GradientAccumulation, Learner
from learnerkit.scaling.parts import (
    COPY,
    FORWARD,
    INPUT,
    OPTIMIZER,
    PARTS,
    REDUCE,
    Stopwatch,
    name_of,
    slowest,
    waiting,
)
from learnerkit.scaling.trials import run_trial, with_larger_batches, with_workers


def steps_of(n=20, seed=0, noise=0.05, **parts):
    """The same parts in each step, in milliseconds, more or less."""
    rng = random.Random(seed)
    return [{name: rng.gauss(ms, noise * ms) for name, ms in parts.items()} for _ in range(n)]


def two_ranks(n=20, noise=0.05, slow=None, seed=0):
    parts = {INPUT: 1.0, FORWARD: 4.0, "backward": 6.0, OPTIMIZER: 1.0}
    both = [steps_of(n, 2 * seed + r, noise, **(parts | (slow or {}) if r else parts)) for r in range(2)]
    for a, b in zip(*both, strict=True):
        end = max(sum(a.values()), sum(b.values())) + 2.0
        for step in (a, b):
            step[REDUCE] = end - sum(step.values())
    return both


@pytest.mark.parametrize("part", [INPUT, FORWARD, "backward", OPTIMIZER])
def test_the_slowest_rank_is_found_with_its_part(part):
    ms = {INPUT: 1.0, FORWARD: 4.0, "backward": 6.0, OPTIMIZER: 1.0}[part]
    ranks = two_ranks(slow={part: ms + 5.0})
    found = slowest(ranks)
    assert (found.rank, found.part) == (1, part)
    assert found.seconds == pytest.approx(5.0, rel=0.1)
    waits, communication = waiting(ranks)
    assert waits[1] == 0
    assert waits[0] == pytest.approx(5.0, rel=0.15)
    assert communication == pytest.approx(2.0, rel=0.05)


def test_a_slower_device_is_no_single_part():
    found = slowest(two_ranks(slow={FORWARD: 8.0, "backward": 12.0, OPTIMIZER: 2.0}))
    assert (found.rank, found.part) == (1, "")
    assert found.seconds == pytest.approx(11.0, rel=0.1)


def test_chance_is_no_slow_rank():
    assert [slowest(two_ranks(noise=noise, seed=s)) for s in range(100) for noise in (0.05, 0.3)] == [None] * 200
    ranks = two_ranks()
    ranks[1][7][FORWARD] += 100  # another program, for a moment
    assert slowest(ranks) is None
    assert slowest(ranks[:1]) is None


# On one process


def trial(learn, n=5, **kwargs):
    watch = Stopwatch(learn, n)
    with learn.no_logging():
        run_trial(learn, watch, **kwargs)
    return watch


def medians(watch):
    """Of each part, as another program may take a step's time."""
    return {name: median(step.get(name, 0.0) for step in watch.parts) for name in watch.parts[0]}


class Sleepy(Callback):
    def __init__(self, **seconds):
        super().__init__()
        self.times = []
        for event, each in seconds.items():
            setattr(self, event, lambda each=each: time.sleep(each))

    def before_batch(self):
        self.times.append(time.perf_counter())


def test_the_parts_add_up_to_the_wall_time():
    watch = trial(make_learner(make_dls(train=80), cbs=[Sleepy(after_batch=0.01)]), n=8)
    assert len(watch.parts) == len(watch.seconds) >= 4
    for parts, seconds in zip(watch.parts, watch.seconds, strict=True):
        assert sum(parts.values()) == pytest.approx(seconds, rel=1e-6)
        assert parts["callback Sleepy"] >= 0.01
        assert {INPUT, COPY, FORWARD, "backward", OPTIMIZER} <= parts.keys()
        assert parts.get(REDUCE, 0) == 0


EVENTS = {
    "before_batch": "callback Sleepy", "after_pred": "callback Sleepy", "after_loss": "callback Sleepy",
    "before_backward": "callback Sleepy", "after_backward": "callback Sleepy", "before_step": "callback Sleepy",
    "after_step": "callback Sleepy", "after_batch": "callback Sleepy",
}  # fmt: skip


@pytest.mark.parametrize("event", EVENTS)
def test_a_callback_is_timed_at_each_event(event):
    watch = trial(make_learner(cbs=[Sleepy(**{event: 0.005})]), n=8)
    usual = medians(watch)
    assert 0.005 <= usual["callback Sleepy"] == max(usual.values())


SEAMS = {
    "_forward": FORWARD, "_loss": FORWARD, "_backward": "backward", "_step": OPTIMIZER, "_zero_grad": OPTIMIZER
}  # fmt: skip


@pytest.mark.parametrize("seam", SEAMS)
def test_each_part_has_its_own_time(seam):
    def slow(self):
        time.sleep(0.005)
        getattr(Learner, seam)(self)

    watch = trial(make_learner(cls=type("Slow", (Learner,), {seam: slow})), n=8)
    usual = medians(watch)
    assert 0.005 <= usual[SEAMS[seam]] == max(usual.values())


def test_a_step_of_several_batches_is_one_step():
    cbs = [GradientAccumulation(n_batches=2), Sleepy(after_pred=0.004)]
    watch = trial(make_learner(make_dls(train=40), cbs=cbs), n=6)
    assert set(watch.samples) == {8}
    assert all(parts["callback Sleepy"] >= 0.008 for parts in watch.parts)


def test_callbacks_are_named_by_class_or_function():
    def shout(cb):
        pass

    assert name_of(Callback(after_batch=shout), "after_batch") == "Callback(shout)"
    assert name_of(Sleepy(), "before_batch") == "Sleepy"
    assert len(set(PARTS)) == 7


def test_a_trial_leaves_the_learner_as_it_was(monkeypatch):
    learn = make_learner(cbs=[Sleepy()])
    torch.manual_seed(3)
    before = {k: v.clone() for k, v in learn.model.state_dict().items()}
    trial(learn)
    assert all(torch.equal(before[k], v) for k, v in learn.model.state_dict().items())
    assert learn.sleepy.times == []
    assert learn.opt is None
    assert torch.initial_seed() == 3


class OneLength(BatchSampler):
    """Its arguments are others than torch's."""

    def __init__(self, n, size):
        super().__init__(SequentialSampler(range(n)), size, False)


def test_only_batches_that_are_plain_are_made_larger():
    data = TensorDataset(torch.zeros(8, 1))
    for plain in (DataLoader(data, 2), DataLoaders.from_datasets(data, bs=2, device="cpu").train):
        larger = with_larger_batches(plain)
        assert larger.batch_size == 4
        assert [len(rows) for (rows,) in larger] == [4, 4]
    assert with_larger_batches(DataLoader(data, batch_sampler=OneLength(8, 2))) is None


@pytest.mark.parametrize(("workers", "tried"), [(0, False), (1, False), (2, True)])
def test_workers_are_tried_on_a_stream_if_it_has_several(workers, tried):
    stream = DataLoader(ChainDataset([]), 2, num_workers=workers)
    assert (with_workers(stream, 4) is not None) is tried
