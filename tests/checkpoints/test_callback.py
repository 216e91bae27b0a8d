"""`CheckpointCallback` on one process: a fit that is interrupted anywhere ends as one that is not."""

import errno
import fcntl
import io
import itertools
import os
import random
import shutil
import signal
import socket
import stat
import threading
import warnings
from collections import Counter, defaultdict, deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import numpy as np
import pytest
import torch
from helpers import (
    KeepsGradients,
    NoFloat64,
    make_data,
    make_dls,
    make_learner,
    make_model,
    mostly_slow,
    mostly_soak,
    raises,
    raising,
    weights,
)
from random_jobs import StreamWithState
from resume_jobs import (
    CARRIED,
    EPOCHS,
    ONE_FIT,
    STEPS,
    Average,
    Kill,
    Killed,
    Logs,
    Order,
    Send,
    _KillBefore,
    different,
    make,
    outcome,
    run,
)
from torch import nn
from torch.utils.data import DataLoader

from learnerkit import (
    Callback,
    CheckpointCallback,
    CheckpointError,
    DataLoaders,
    GradientClip,
    Learner,
    ParamScheduler,
    TerminateOnNaNCallback,
    accuracy,
    mae,
    set_seed,
)
from learnerkit import learner as learner_module
from learnerkit.callbacks.recorder import PastFit
from learnerkit.callbacks.schedule import SchedLin
from learnerkit.checkpoints import storage
from learnerkit.checkpoints.callback import _not_finite

EPOCH = STEPS // EPOCHS


def finished(learn, name, batches=()):
    """The outcome of a job, and the end of its learner."""
    with suppress(Killed):
        run(name, learn)
    own = learn.order.batches
    before = learn.train_iter - len(own) if len(batches) else 0  # what the process that died has trained on
    found = outcome(learn, [*batches[:before], *own])
    vars(learn).clear()  # persistent workers end with their loader
    return found


def stopped(learn, name):
    """What a job has trained on that a signal ends."""
    with pytest.raises(SystemExit) as caught:
        run(name, learn)
    assert caught.value.code == 143
    return learn.order.batches


@pytest.fixture(scope="module")
def whole():
    """The outcome of each job without a break."""
    found = {}

    def of(name):
        if name not in found:
            found[name] = finished(make(name), name)
        return found[name]

    return of


QUICK = (EPOCH, EPOCH + 5)
SLOW = ("accumulation", "EMA", "fp16", "several optimizers")
SOAK = (
    "workers", "LBFGS", "torch's schedulers", "early stopping", "counting sampler", "batch norm", "cancels",
    "augmentation", "budget",
)  # fmt: skip
STEPS_OF = [
    pytest.param("one cycle", QUICK, id="one cycle"),
    pytest.param("counting sampler of validation", QUICK, id="counting sampler of validation"),
    pytest.param("switched off", QUICK, id="switched off"),
    *(pytest.param(name, (EPOCH, EPOCH + 3), id=name, marks=pytest.mark.slow) for name in SLOW),
    *(pytest.param(name, (EPOCH, EPOCH + 3), id=name, marks=pytest.mark.soak) for name in SOAK),
    *(pytest.param(name, range(1, STEPS + 1), id=f"{name}, all", marks=pytest.mark.soak) for name in ONE_FIT),
]


@pytest.mark.filterwarnings("ignore:mixed precision with float16")
@pytest.mark.parametrize(("name", "steps"), STEPS_OF)
def test_r23_a_fit_that_dies_after_any_step_ends_as_one_that_does_not(name, steps, tmp_path, whole):
    for at in steps:
        folder = tmp_path / str(at)
        every = at if steps == QUICK else 1  # the last checkpoint is then the only one
        died = finished(make(name, folder, Kill(at), every=every), name)
        ended = finished(make(name, folder, resume=True, every=every), name, died["order"])
        assert different(whole(name), ended) == [], at


def test_t1_a_second_resume_within_an_epoch_does_not_shift_the_data(tmp_path, whole):
    order = []
    for at, step in ((9, 9), (2, 11), (1, 12)):
        learn = make("augmentation", tmp_path, Kill(at), resume=bool(order), every=step)
        order = finished(learn, "augmentation", order)["order"]
    ended = finished(make("augmentation", tmp_path, resume=True, every=12), "augmentation", order)
    assert len(order) == 12
    assert different(whole("augmentation"), ended) == []


def test_t2_a_state_from_the_very_end_of_an_epoch_neither_skips_nor_repeats_one(tmp_path, whole):
    died = finished(make("plain", tmp_path, Kill(EPOCH + 1), every="epoch"), "plain")
    ended = finished(make("plain", tmp_path, resume=True), "plain", died["order"])
    assert different(whole("plain"), ended) == []


def test_t6_a_schedule_that_asks_for_the_number_of_steps_does_not_keep_the_place_from_being_loaded(tmp_path, whole):
    died = finished(make("torch's schedulers", tmp_path, Kill(10), every=10), "torch's schedulers")
    ended = finished(make("torch's schedulers", tmp_path, resume=True, every=10), "torch's schedulers", died["order"])
    assert different(whole("torch's schedulers"), ended) == []


@pytest.mark.parametrize("name", mostly_slow(["accumulation", "accumulation by hand"], "accumulation"))
def test_t10_inside_an_accumulated_step_nothing_is_saved(name, tmp_path, whole):
    for at in (2, EPOCH + 5):  # the second batch of three, in the first epoch and in the second
        folder = tmp_path / str(at)
        died = finished(make(name, folder, Kill(at)), name)
        ended = finished(make(name, folder, resume=True, every=1000), name, died["order"])
        assert different(whole(name), ended) == []


@pytest.mark.parametrize("name", ["cut short", "cut short, no validation"])
def test_after_the_batch_that_ends_the_training_of_an_epoch_nothing_is_saved_in_it(name, tmp_path, whole):
    died = finished(make(name, tmp_path, _KillBefore(3), every=3), name)
    ended = finished(make(name, tmp_path, resume=True, every=3), name, died["order"])
    assert len(died["order"]) == 3
    assert different(whole(name), ended) == []


class Means(Callback):
    """Divides by its counts at the ends of epochs, keeps what it has by itself, and notes who gives it back."""

    run_valid = False

    def __init__(self):
        super().__init__()
        self.epochs, self.total, self.n, self.means = 0, 0.0, 0, []
        self.random = random.Random(1)

    def before_train(self):
        self.total, self.n = 0.0, 0

    def after_step(self):
        self.total += float(self.loss) + self.random.random()
        self.n += 1

    def after_train(self):
        self.means.append(self.total / self.n)
        self.epochs += 1

    def after_epoch(self):
        self.means.append(-self.total / self.n)


class Told(Means):
    """The same, with methods for its state."""

    loaded = 0

    def state_dict(self):
        return {"state": [self.epochs, self.total, self.n, list(self.means), self.random.getstate()]}

    def load_state_dict(self, state):
        self.epochs, self.total, self.n, self.means, generator = state["state"]
        self.random.setstate(generator)
        self.loaded += 1


PLACES = {
    "": lambda: Kill(EPOCH + 3), "-done": lambda: Kill(EPOCH + 1), "-end": lambda: Callback(),
    "-trained": lambda: Send(3, signal.SIGTERM, valid=True),
}  # fmt: skip


@pytest.mark.parametrize("place", mostly_slow(PLACES, "", "-trained"))
def test_what_a_callback_has_comes_back_once_and_exactly_at_every_place(place, tmp_path):
    every = {"": EPOCH + 3, "-done": "epoch"}.get(place, 1000)

    def train(ends, folder=None, resume=False):
        learn = make("plain", folder, Means(), Told(), ends, resume=resume, every=every)
        with suppress(Killed, SystemExit):
            run("plain", learn)
        return learn

    whole = train(Kill())
    train(PLACES[place](), tmp_path)
    assert any(p.name.partition("step")[2].lstrip("0123456789") == place for p in tmp_path.rglob("fit*"))
    again = train({"-end": Callback, "-trained": partial(Send, 0, 15)}.get(place, Kill)(), tmp_path, resume=True)
    assert again.told.loaded == 1
    for cb in ("means", "told"):
        then, now = vars(getattr(whole, cb)), vars(getattr(again, cb))
        assert [then[name] for name in ("epochs", "n", "means")] == [now[name] for name in ("epochs", "n", "means")]
        assert then["random"].getstate() == now["random"].getstate()
    assert again.means.epochs == EPOCHS


class Bounds(Callback):
    """Has a bound that its script sets, a text of this process, and a count."""

    def __init__(self, n):
        super().__init__()
        self.bound, self.count, self.text = 2 * n, 0, ""

    def before_fit(self):
        self.text = f"of {self.bound}"

    def after_step(self):
        self.count += 1


def test_attributes_that_have_not_changed_since_the_fit_began_are_those_of_the_script(tmp_path):
    found = []
    for n in (1, 3):
        learn = make_learner(cbs=[Bounds(n), Kill(2 - n), CheckpointCallback(tmp_path, every=1, resume=n == 3)])
        with learn.no_logging(), suppress(Killed):
            learn.fit(2)
        found.append((learn.bounds.bound, learn.bounds.text, learn.bounds.count))
    assert found == [(2, "of 2", 1), (6, "of 6", 4)]


class Anneals(Callback):
    """Changes its argument, and keeps what is no list or dict."""

    def __init__(self, factor=1.0):
        self.factor, self.last, self.seen, self.counts = factor, deque(maxlen=2), {"none"}, Counter()
        self.drawn, self.fixed = None, frozenset()
        self.text, self.phase = b"", 0j
        self.by_step, self.by_pair = defaultdict(list), {}

    def before_batch(self):
        if self.drawn is None:
            self.drawn = set()  # it is not there when a run resumes
        self.drawn.add(self.train_iter)

    def after_step(self):
        self.factor *= 0.5
        self.text, self.phase = self.text + bytes([self.train_iter]), self.phase * 1j + 1
        self.last.append(self.opt.param_groups[0]["params"][0].detach().sum())
        self.seen.add(self.train_iter)
        self.fixed |= {self.train_iter}
        self.counts[self.train_iter % 3] += 1
        self.by_step[self.train_iter].append(self.factor)
        self.by_pair[self.train_iter, None] = self.factor


class Tallies(Callback):
    """Counts in its argument."""

    def __init__(self, counts):
        self.counts = counts

    def after_step(self):
        self.counts[self.train_iter] += 1


@pytest.mark.slow
@pytest.mark.parametrize("make_counts", [torch.zeros, np.zeros, lambda n: [0] * n], ids=["tensor", "array", "list"])
def test_a_large_argument_that_a_fit_changes_comes_back(make_counts, tmp_path):
    def run(*cbs):
        counts = make_counts(20_000)
        learn = make_learner(make_dls(20), cbs=[Tallies(counts), *cbs])
        with learn.no_logging(), suppress(Killed):
            learn.fit(2)
        return sum(counts)

    run(Kill(7), CheckpointCallback(tmp_path, every=7))
    assert run(Kill(), CheckpointCallback(tmp_path, every=7, resume=True)) == run(Kill()) > 7


@pytest.mark.parametrize("changed", [{}, {"factor": 7.0}], ids=["", "another argument"])
def test_arguments_that_a_fit_changes_and_containers_of_all_kinds_come_back(changed, tmp_path):
    def run(*cbs, **kwargs):
        learn = make_learner(make_dls(20), cbs=[Anneals(**kwargs), *cbs])
        with learn.no_logging(), suppress(Killed):
            learn.fit(2)
        cb = learn.anneals
        return cb.factor, cb.last, cb.seen, cb.counts, cb.by_step, cb.by_pair, cb.drawn, cb.text, cb.phase, cb.fixed

    run(Kill(7), CheckpointCallback(tmp_path, every=7))
    told = pytest.warns(UserWarning, match="factor: 1.0, now 7.0") if changed else nullcontext()
    with told:
        found = run(Kill(), CheckpointCallback(tmp_path, every=7, resume=True), **changed)
    assert found == run(Kill())
    kinds = [float, deque, set, Counter, defaultdict, dict, set, bytes, complex, frozenset]
    assert [type(x) for x in found] == kinds
    assert found[1].maxlen == 2


# Signals


@pytest.mark.parametrize("name", ["augmentation", "average"])
def test_r13_term_saves_once_after_the_step_and_leaves_with_143(name, tmp_path, whole, capsys):
    before = signal.getsignal(signal.SIGTERM)
    order = stopped(make(name, tmp_path, Send(9, signal.SIGTERM), every=1000), name)
    assert [p.name for p in tmp_path.glob("fit*")] == ["fit0-epoch1-step9"]
    assert "saved after step 9 in .; resume=True goes on there\n" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is before
    again = make(name, tmp_path, Send(0, 15), resume=True, every=1000)
    assert different(whole(name), finished(again, name, order)) == []


@pytest.mark.parametrize("name", mostly_soak(["augmentation", "EMA", "SWA", "metrics in training", "budget"], "EMA"))
def test_r15_term_in_validation_saves_what_was_before_it(name, tmp_path, whole):
    batches = 1 if name == "budget" else 2
    for k, at in enumerate((1, 2 * batches + 1)):  # the last one is in the last epoch
        folder = tmp_path / str(k)
        order = stopped(make(name, folder, Send(at, signal.SIGTERM, valid=True), every=1000), name)
        (saved,) = folder.glob("fit*")
        assert saved.name.endswith("-trained")
        ended = finished(make(name, folder, Send(0, 15), resume=True, every=1000), name, order)
        assert different(whole(name), ended) == []


def test_term_at_the_end_of_a_fit_ends_the_process_too(tmp_path, whole):
    sends = Callback(after_fit=lambda cb: signal.raise_signal(signal.SIGTERM))
    stopped(make("plain", tmp_path, sends, every=1000), "plain")
    assert [p.name for p in tmp_path.glob("ends/0/fit*")] == ["fit0-epoch2-step21-end"]
    ended = finished(make("plain", tmp_path, Callback(), resume=True), "plain")
    assert different(whole("plain") | {"order": []}, ended) == []


def test_r17_usr1_saves_and_training_goes_on(tmp_path, whole):
    learn = make("plain", tmp_path, Send(9, signal.SIGUSR1), every=1000)
    ended = finished(learn, "plain")
    assert {p.name for p in tmp_path.glob("fit*")} == {"fit0-epoch1-step9", "fit0-epoch2-step21-done"}
    assert different(whole("plain"), ended) == []


def test_a_second_term_ends_the_process_at_once(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr("learnerkit.checkpoints.callback._AGAIN", 0)
    monkeypatch.setattr("learnerkit.checkpoints.callback.end_at_once", lambda: sent.append(signal.SIGTERM))
    learn = make("plain", tmp_path, Callback(after_pred=lambda cb: signal.raise_signal(signal.SIGTERM)), every=1000)
    learn.add_cb(Callback(before_step=lambda cb: signal.raise_signal(signal.SIGTERM)))
    stopped(learn, "plain")
    assert sent == [signal.SIGTERM]


def test_without_save_on_signal_handlers_stay_as_they_are(tmp_path):
    seen = []
    learn = make_learner(cbs=[
        CheckpointCallback(tmp_path, save_on_signal=False),
        Callback(before_batch=lambda cb: seen.append(signal.getsignal(signal.SIGTERM))),
    ])  # fmt: skip
    with learn.no_logging():
        learn.fit(1)
    assert {*seen} == {signal.getsignal(signal.SIGTERM)}


def test_outside_the_main_thread_it_says_that_signals_are_not_seen(tmp_path):
    found = []

    def work():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            learn = make_learner(cbs=CheckpointCallback(tmp_path))
            with learn.no_logging():
                learn.fit(1)
                learn.fit(1)
        found.extend(str(w.message) for w in caught)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len([text for text in found if "does not run in the main thread" in text]) == 1


# Several fits


@pytest.mark.parametrize(("at", "step"), mostly_slow([(3, 3), (9, 2), (16, 9), (23, 2)], (9, 2), slow=[(16, 9)]))
def test_the_fits_before_return_at_once_with_what_they_were(at, step, tmp_path, whole, capsys):
    died = finished(make("fine-tuned", tmp_path, Kill(at), every=step), "fine-tuned")
    ended = finished(make("fine-tuned", tmp_path, resume=True, every=1000), "fine-tuned")
    assert different(whole("fine-tuned") | {"order": ended["order"]}, ended) == []
    assert [*died["order"][:at], *ended["order"]] == whole("fine-tuned")["order"]
    done = (at - 1) // EPOCH if at <= EPOCH else 1 + (at > 3 * EPOCH)
    assert capsys.readouterr().out.count("was done before") == done


@pytest.mark.parametrize("name", mostly_slow(CARRIED, "counting sampler", slow=["persistent workers", "own generator"]))
@pytest.mark.parametrize(
    "at", mostly_slow([0, 2 * EPOCH, EPOCH + 2, 2 * EPOCH + 1, STEPS - 1], 2 * EPOCH, slow=[EPOCH + 2])
)
def test_a_second_fit_finds_the_loader_as_the_first_one_has_left_it(name, at, tmp_path, whole):
    name, step = f"{name}, twice", (at - 1) % (2 * EPOCH) + 1
    learn = make(name, tmp_path, Kill(at), every=step)
    if at:
        died = finished(learn, name)["order"]
    else:  # the process ends between the fits
        with learn.no_logging():
            learn.fit(2, 0.05)
        died = learn.order.batches
        vars(learn).clear()
    ended = finished(make(name, tmp_path, resume=True, every=1000), name)
    assert [*died, *ended["order"]] == whole(name)["order"]
    assert different(whole(name) | {"order": ended["order"]}, ended) == []


def test_a_finished_run_returns_at_once(tmp_path, whole):
    finished(make("fine-tuned", tmp_path, every=1000), "fine-tuned")
    again = make("fine-tuned", tmp_path, resume=True)
    assert different(whole("fine-tuned") | {"order": []}, finished(again, "fine-tuned")) == []


def test_more_epochs_go_on_from_the_last_one(tmp_path, capsys):
    learn = make_learner(cbs=CheckpointCallback(tmp_path))
    with learn.no_logging():
        learn.fit(2)
    again = make_learner(cbs=CheckpointCallback(tmp_path, resume=True))
    with again.no_logging():
        again.fit(4)
    whole = make_learner()
    with whole.no_logging():
        whole.fit(4)
    said = capsys.readouterr().out
    assert "n_epoch was 2 and is 4: schedules" in said
    assert "resumed fit 0 after epoch 1, step 4" in said
    assert different(weights(whole.model), weights(again.model)) == []
    assert again.recorder.values == whole.recorder.values


def test_a_fit_that_another_has_followed_is_not_trained_for_longer(tmp_path, capsys):
    for n_epoch in (2, 4):
        learn = make_learner(cbs=CheckpointCallback(tmp_path, resume=True))
        with learn.no_logging():
            learn.fit(n_epoch)
            learn.fit(1)
    said = capsys.readouterr().out
    assert "n_epoch was 2 and is 4: this fit was done before, and is not trained any further" in said
    assert "schedules" not in said


def test_the_optimizer_keeps_its_options_except_those_of_a_schedule(tmp_path):
    found = []
    for i, lr, wd in ((1, 0.1, 0.01), (2, 0.2, 0.02)):
        for name in ("fit", "fit_one_cycle"):
            learn = make_learner(cbs=CheckpointCallback(tmp_path / name, resume=True))
            with learn.no_logging(), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                getattr(learn, name)(i, lr, wd=wd)
            text = " ".join(str(w.message) for w in caught)
            found.append((max(learn.recorder.lrs), learn.opt.param_groups[0]["weight_decay"], text))
    (plain, wd, text), (cycle, cycle_wd, cycle_text) = found[2:]
    assert (plain, wd, cycle_wd) == (0.1, 0.01, 0.01)
    assert cycle > 0.1
    kept = "the optimizer keeps its saved options, and a callback may set others in before_train: groups.0."
    assert kept + "lr: 0.1, now 0.2; groups.0.weight_decay: 0.01, now 0.02" in text
    assert kept + "weight_decay: 0.01, now 0.02" in cycle_text
    assert "callbacks.ParamScheduler.lr" in cycle_text


class Mode(IntEnum):
    FAST = 1


class HasMode(Callback):
    def __init__(self, mode):
        self.mode = mode


def test_arguments_that_are_enums_are_left_out(tmp_path):
    make_learner(cbs=[HasMode(Mode.FAST), HasMode([Mode.FAST]), CheckpointCallback(tmp_path)]).fit(1)
    with raises(TypeError, "got path=''"):
        CheckpointCallback("")


def test_a_fit_that_is_shorter_than_what_was_done_has_the_record_of_it(tmp_path):
    for kill, n_epoch in ((3, 2), (0, 1)):
        learn = make_learner(cbs=[Kill(kill), CheckpointCallback(tmp_path, every=1, resume=not kill)])
        with learn.no_logging(), suppress(Killed):
            learn.fit(n_epoch)
    assert learn.train_iter == 3
    assert len(learn.recorder.values) == 1
    assert len(learn.recorder.losses) == 3


def test_a_length_in_another_unit_goes_on_from_what_was_done(tmp_path):
    """Two epochs of two steps, then 7 steps, then 5 epochs: each is more than there was."""
    found = []
    for length in ({"n_epoch": 2}, {"n_steps": 7}, {"n_steps": 5}, {"n_epoch": 5}):
        learn = make_learner(cbs=[CheckpointCallback(tmp_path, resume=bool(found)), Steps()])
        with learn.no_logging():
            learn.fit(**length)
        found.append((learn.steps.taken, learn.pct_train))
    assert found == [(4, 1.0), (3, 1.0), (0, 1.0), (2, 1.0)]


@pytest.mark.parametrize(
    ("workers", "term"),  # a signal comes in the first validation
    [(0, False), (0, True), pytest.param(2, False, marks=pytest.mark.slow)],
)
def test_a_fit_of_more_steps_continues_inside_the_epoch(tmp_path, workers, term):
    found = []
    for budgets in ((11,), (3, 3, 7, 11)):
        for i, n in enumerate(budgets):
            set_seed(1)
            sends = Send(int(term and i == 0 and n == 3), signal.SIGTERM, valid=True)
            parts = make_data(20), make_data(4, seed=1)
            dls = DataLoaders.from_datasets(*parts, bs=4, device="cpu", num_workers=workers)  # five steps in an epoch
            model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 1))
            checkpoint = CheckpointCallback(tmp_path / str(len(budgets)), every=4, resume=True)
            learn = make_learner(dls, model, cbs=[checkpoint, sends])
            with learn.no_logging(), suppress(SystemExit):
                learn.fit(n_steps=n)
        found.append((learn.epoch, learn.train_iter, weights(learn.model)))
    (*counts, whole), (*others, again) = found
    assert counts == others == [2, 11]
    assert different(whole, again) == []


class Steps(Callback):
    """Counts the steps of this process."""

    run_valid = False
    taken = 0

    def after_step(self):
        self.taken += 1

    def state_dict(self):
        return {}


def test_a_longer_schedule_has_its_own_rates_from_the_first_batch_on(tmp_path):
    for n, resume in ((2, False), (4, True)):
        fails = raising(
            "after_batch", ZeroDivisionError, lambda cb: cb.train_iter == 3 and cb.n_epoch == 2, order=20_000
        )
        learn = make_learner(cbs=[CheckpointCallback(tmp_path, every=3, resume=resume), fails])
        with learn.no_logging(), suppress(ZeroDivisionError), warnings.catch_warnings(action="ignore"):
            learn.fit(n, cbs=ParamScheduler({"lr": SchedLin(0.1, 0.0)}))
    assert learn.recorder.lrs[3:] == pytest.approx([0.1 * (1 - k / 8) for k in range(3, 8)])


@pytest.mark.parametrize("length", [{"n_epoch": 2}, {"n_steps": 5}], ids=["epochs", "steps"])
@pytest.mark.parametrize("data", ["a generator's order", "a stream with a state"])
def test_a_fit_that_dies_before_its_end_is_saved_leaves_the_next_one_its_place_in_the_data(data, length, tmp_path):
    def losses(*cbs, dies=False):
        rows = make_data(12)
        if data == "a stream with a state":
            train = DataLoader(StreamWithState(*rows.tensors), 4)
        else:
            train = DataLoader(rows, 4, shuffle=True, generator=torch.Generator().manual_seed(3))
        fails = raising("after_fit", Killed, lambda cb: dies, order=9_999)
        learn = make_learner(DataLoaders(train, device="cpu"), cbs=[fails, *cbs])
        with learn.no_logging(), suppress(Killed):
            learn.fit(**length)
            learn.fit(1)
        return learn.recorder.losses

    whole = losses()
    losses(CheckpointCallback(tmp_path), dies=True)
    assert losses(CheckpointCallback(tmp_path, resume=True)) == whole


def test_a_fit_on_other_data_begins_at_their_start_also_after_one_that_was_done_before(tmp_path):
    def losses(*cbs, dies=False):
        one, other = (DataLoader(StreamWithState(*make_data(12, seed=i).tensors), 4) for i in range(2))
        fails = raising("before_train", Killed, lambda cb: dies and cb.learn.n_fits)
        learn = make_learner(DataLoaders(one, device="cpu"), cbs=[fails, *cbs])
        with learn.no_logging(), suppress(Killed):
            learn.fit(1)
            learn.dls = DataLoaders(other, device="cpu")
            learn.fit(1)
        return learn.recorder.losses

    whole = losses()
    losses(CheckpointCallback(tmp_path), dies=True)
    assert losses(CheckpointCallback(tmp_path, resume=True)) == whole


@pytest.mark.parametrize("stops", [5, 8])
def test_learners_that_read_one_stream_go_on_with_each_others_place(stops, tmp_path):
    def read(*, resume=False, stops=None):
        seen, batches = [], itertools.count(1)
        stop = raising("after_batch", Killed, lambda cb: next(batches) == stops)
        look = Callback(before_batch=lambda cb: seen.append(cb.x.clone()))
        dls = DataLoaders(DataLoader(StreamWithState(*make_data(12).tensors), 4), device="cpu")
        kept = [CheckpointCallback(tmp_path / name, every=1, resume=resume) for name in "ab"]
        one, other = (make_learner(dls, cbs=[look, stop, cb]) for cb in kept)
        with one.no_logging(), other.no_logging(), suppress(Killed):
            for _ in range(2):
                one.fit(1)
                other.fit(1)
        return seen

    whole = read()
    assert len(whole) == 12
    for name in "ab":
        shutil.rmtree(tmp_path / name)
    read(stops=stops)
    rest = read(resume=True)
    assert all(map(torch.equal, rest, whole[-len(rest) :]))


def test_ends_of_many_fits_are_not_all_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("learnerkit.checkpoints.callback._FITS", 3)
    learn = make_learner(cbs=CheckpointCallback(tmp_path, keep=1))
    with learn.no_logging():
        for _ in range(5):
            learn.fit(1)
    assert sorted(int(p.name) for p in (tmp_path / "ends").iterdir()) == [2, 3, 4]
    again = make_learner(cbs=CheckpointCallback(tmp_path, keep=1, resume=True))
    with (
        again.no_logging(),
        pytest.warns(UserWarning, match="fit 0 of this script was done before, and its end is not"),
    ):
        again.fit(1)
    with again.no_logging(), pytest.warns(UserWarning, match="fit 1 of"):
        again.fit(1)
    with again.no_logging():
        again.fit(1)
    assert again.recorder.values == learn.recorder.history[2].values


def test_earlier_fits_are_made_into_text_once_and_come_back_exactly(tmp_path):
    odd = [PastFit(lrs=[0.1] * 1000), PastFit(lrs=[np.float32(0.1)]), PastFit(lrs=[float("nan"), 0.1])]

    def train(resume, at=None):
        checkpoints = CheckpointCallback(tmp_path, every=1, resume=resume)
        learn = make_learner(cbs=[checkpoints, Kill(at)])
        with learn.no_logging(), suppress(Killed):
            learn.fit(1)
            learn.recorder.history += odd
            learn.fit(1)
        return learn.recorder

    recorder = train(resume=False, at=3)
    saved = recorder.state_dict()["history"]
    assert list(map(type, saved)) == [dict, dict, str, str]
    assert all(fit.saved() is kept for fit, kept in zip(recorder.history, saved, strict=True))
    assert list(map(repr, train(resume=True).history)) == list(map(repr, recorder.history))


def test_a_fit_that_failed_goes_on_in_the_same_process(tmp_path, whole):
    fails = raising("after_batch", ZeroDivisionError, lambda cb: cb.train_iter == 9)
    learn = make("plain", tmp_path, fails, resume=True, every=8)
    with pytest.raises(ZeroDivisionError):
        run("plain", learn)
    assert different(whole("plain")["weights"], finished(learn, "plain")["weights"]) == []


# What has changed


def test_r39_callbacks_that_were_removed_added_or_moved_are_named(tmp_path):
    finished(make("plain", tmp_path, GradientClip(1.0), Average(), Kill(9), every=9), "plain")
    expected = ("Order removed", "Logs, Renamed added", "Average", "reordered")

    def changed(**kwargs):
        learn = make("plain", tmp_path, Average(), GradientClip(1.0), Logs(), resume=True, every=1000, **kwargs)
        learn.remove_cb(Order)
        learn.add_cb(Renamed())
        with learn.no_logging():
            learn.fit(EPOCHS, 0.05)

    with raises(CheckpointError, "strict=True", *expected):
        changed(strict=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        changed()
    texts = " ".join(str(w.message) for w in caught)
    assert all(words in texts for words in expected), texts


class Renamed(Order):
    """Has another name than its state."""


def test_r39_callbacks_that_stay_are_restored_exactly(tmp_path):
    finished(make("average", tmp_path, Kill(9), every=9), "average")
    found = []
    for more in ([], [Logs()]):
        watch = Callback(before_batch=lambda cb: found.append(weights_of(cb.learn.average.mean)))
        learn = make("average", tmp_path, *more, watch, Kill(1), resume=True, every=1000)
        with warnings.catch_warnings(action="ignore"):
            finished(learn, "average")
    assert different(*found) == []


def weights_of(tensors):
    return {name: value.clone() for name, value in tensors.items()}


def test_a_changed_configuration_is_listed(tmp_path):
    def learner(resume, bs=4, lr=0.1, momentum=0.9, peak=1.0, **kwargs):
        cbs = [GradientClip(peak), CheckpointCallback(tmp_path, every=1, resume=resume, **kwargs)]
        opt = lambda params, lr: torch.optim.SGD(params, lr, momentum=momentum)  # noqa: E731
        return make_learner(make_dls(8, bs=bs), opt_func=opt, lr=lr, cbs=cbs)

    with learner(False).no_logging() as learn, suppress(ZeroDivisionError):
        learn.add_cb(raising("after_step", ZeroDivisionError, lambda cb: cb.train_iter == 1))
        learn.fit(2)
    other = {"bs": 2, "lr": 0.2, "momentum": 0.8, "peak": 2.0}
    expected = (
        "groups.0.momentum: 0.9, now 0.8", "groups.0.lr: 0.1, now 0.2", "train.batch_size: 4, now 2",
        "train.batches: 2, now 4", "callbacks.GradientClip.max_norm: 1.0, now 2.0",
    )  # fmt: skip
    with raises(CheckpointError, "strict=True", *expected), learner(True, strict=True, **other).no_logging() as learn:
        learn.fit(2)
    with warnings.catch_warnings(record=True) as caught, learner(True, **other).no_logging() as learn:
        warnings.simplefilter("always")
        learn.fit(2)
    texts = " ".join(str(w.message) for w in caught)
    assert all(text in texts for text in expected), texts


def test_changed_data_order_metrics_and_frozen_layers_are_listed(tmp_path):
    def learner(resume=False, n=8, shuffle=True, metrics=mae, frozen=(), **kwargs):
        dls = DataLoaders.from_datasets(make_data(n), bs=4, shuffle=shuffle, device="cpu")
        checkpoints = CheckpointCallback(tmp_path, every=1, keep=9, resume=resume, **kwargs)
        learn = make_learner(dls, metrics=metrics, cbs=[Kill(0 if resume else 1), checkpoints])
        for i in frozen:
            learn.model[i].requires_grad_(False)
        with learn.no_logging(), suppress(Killed):
            learn.fit(1)

    learner()
    expected = (
        "train.samples: 8, now 7", "train.sampler: 'RandomSampler', now 'SequentialSampler'",
        "metrics: ['mae'], now ['accuracy']", "parameters.0.bias: '[6] float32', now '[6] float32, frozen'",
    )  # fmt: skip
    other = {"n": 7, "shuffle": False, "metrics": accuracy, "frozen": [0]}
    with raises(CheckpointError, "strict=True", *expected):
        learner(True, strict=True, **other)
    with pytest.warns(UserWarning, match="not as in the checkpoint") as caught:
        learner(True, **other)
    [text] = [str(w.message) for w in caught]
    assert all(words in text for words in expected), text


class Forgets(Callback):
    """Has a tensor and a module of its own, and no state."""

    def before_fit(self):
        self.mean, self.net, self.count = {"w": torch.zeros(1)}, [make_model(1, 1)], 3
        self.place, self.more, self.file, self.kind = Place(), iter([1, 2]), io.StringIO(), Place
        self.rows, self.seen, self.hooks, self.itself = [], defaultdict(set), [], []

    def after_batch(self):
        self.rows.append(Place(self.iter))
        self.seen["batch"].add(self.iter)
        self.hooks.append(self.model.register_forward_hook(lambda *_: None))
        self.itself.append(self.itself)


@dataclass
class Place:
    n: int = 0


class Rows(Callback):
    """Has dicts of other classes inside of another one, and a named tuple."""

    def __init__(self):
        super().__init__()
        self.best, self.counts, self.plain = Best(0, 1.0), {"step": Counter()}, {"step": {}}
        self.marks = [b"mark"]


Best = namedtuple("Best", "epoch loss")


class Borrows(Callback):
    """Has a part of the model's."""

    def before_fit(self):
        self.net, self.weight = self.model[0], [self.model[0].weight]


class Nothing(Forgets):
    """Says that it has nothing to keep."""

    def state_dict(self):
        return {}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Forgets, "Forgets.net, Forgets.place, Forgets.more, Forgets.rows, Forgets.seen"),
        (Rows, "Rows.best, Rows.counts, Rows.marks"),
    ],
)
def test_callbacks_that_hold_tensors_or_modules_and_have_no_state_are_named(kind, names, tmp_path):
    for resume in (False, True):
        cbs = [Forgets(), Borrows(), Nothing()] if kind is Forgets else [kind()]
        learn = make_learner(cbs=[*cbs, Kill(0 if resume else 1), CheckpointCallback(tmp_path, every=1, resume=resume)])
        told = pytest.warns(UserWarning, match=f"^attributes of callbacks .* begin anew: {names};")
        with learn.no_logging(), told if resume else suppress(Killed):
            learn.fit(1)


def test_a_path_of_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with raises(CheckpointError, f"{path} is no directory that can be written to"):
            make_learner(cbs=CheckpointCallback(path)).fit(1)


def test_to_dcp_says_which_directory_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    learn = make_learner(cbs=CheckpointCallback(tmp_path / "run"))
    learn.fit(1)
    for to in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=f"^{to} is no directory that can be written to: "):
            learn.checkpoint.to_dcp(to)


def test_a_checkpoint_that_was_moved_and_linked_is_used_and_stays(tmp_path, whole):
    died = finished(make("plain", tmp_path / "run", Kill(9), keep=1, every=9), "plain")
    [newest] = (tmp_path / "run").glob("fit*")
    moved = newest.rename(tmp_path / "moved")
    newest.symlink_to(moved, target_is_directory=True)
    (tmp_path / "run" / "fit9").symlink_to(tmp_path / "nowhere")
    with raises(CheckpointError, "has checkpoints of another run"):
        finished(make("plain", tmp_path / "run", Kill(), keep=1), "plain")
    ended = finished(make("plain", tmp_path / "run", resume=True, keep=1, every=5), "plain", died["order"])
    assert different(whole("plain"), ended) == []
    assert newest.is_symlink()
    assert sorted(path.name for path in moved.iterdir()) == sorted(path.name for path in newest.iterdir()) != []
    assert len([path for path in (tmp_path / "run").glob("fit*") if not path.is_symlink()]) == 1


def test_a_changed_schedule_is_listed(tmp_path):
    for end in (0.0, 1.0):
        learn = make_learner(cbs=CheckpointCallback(tmp_path, resume=bool(end)))
        with learn.no_logging(), suppress(ZeroDivisionError), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fails = raising(
                "after_batch",
                ZeroDivisionError,
                lambda cb: cb.train_iter == 3 and not cb.checkpoint.resume,
                order=20_000,
            )
            learn.fit(2, cbs=[ParamScheduler({"lr": SchedLin(0.1, end)}), fails])
    assert any("callbacks.ParamScheduler.lr.0: [0.1, 0.07500000000000001" in str(w.message) for w in caught)


class Outer(torch.optim.SGD):
    """Has the optimizer that takes its steps inside it, as SAM has."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.inner = torch.optim.AdamW(self.param_groups, lr=lr)

    def step(self, closure=None):
        return self.inner.step()


class Both(Outer):
    def state_dict(self):
        return super().state_dict() | {"inner": self.inner.state_dict()}


def test_an_optimizer_inside_another_one_that_is_not_saved_is_told(tmp_path):
    fit = lambda kind: make_learner(opt_func=kind, cbs=CheckpointCallback(tmp_path / kind.__name__)).fit(1)  # noqa: E731
    with pytest.warns(UserWarning, match=r"begins with a new state of Outer\.inner, as checkpoints have what the"):
        fit(Outer)
    fit(Both)


class OfItsOwnForm(Outer):
    def state_dict(self):
        return {"own": {}, "inner": self.inner.state_dict()}


class WithTwoStates(Outer):
    def state_dict(self):
        return {"slow": {}, "fast": self.inner.state, "param_groups": []}


@pytest.mark.parametrize(
    ("kind", "has"),
    [(OfItsOwnForm, "'own', 'inner', but no 'param_groups'"),
     (WithTwoStates, "'slow', 'fast', 'param_groups', but no 'state'")],
)  # fmt: skip
def test_an_optimizer_whose_state_could_not_be_loaded_is_refused(kind, has, tmp_path):
    learn = make_learner(opt_func=kind, cbs=CheckpointCallback(tmp_path / "run"))
    with pytest.raises(ValueError, match=f"has {has}, so a run could not go on from its checkpoints"):
        learn.fit(1)
    assert not (tmp_path / "run").exists()


def test_another_optimizer_begins_anew(tmp_path):
    finished(make("plain", tmp_path, Kill(9), every=9), "plain")
    learn = make("plain", tmp_path, resume=True, every=1000)
    learn.opt_func = torch.optim.AdamW
    with pytest.warns(UserWarning, match=r"optimizer: \['SGD'\], now \['AdamW'\]; groups.0.momentum"):
        run("plain", learn)


def test_another_model_is_refused_and_stays_what_it_was(tmp_path):
    learn = make_learner(cbs=CheckpointCallback(tmp_path))
    with learn.no_logging():
        learn.fit(1)
    other = make_learner(model=make_model(4, 1), cbs=CheckpointCallback(tmp_path, resume=True))
    other.model[0] = torch.nn.Linear(4, 7)
    other.model[3] = torch.nn.Linear(7, 1)
    before = weights(other.model)
    with pytest.warns(UserWarning, match="parameters.0.weight"), raises(CheckpointError, "does not fit"):
        other.fit(1)
    assert different(before, weights(other.model)) == []


def test_a_used_directory_is_refused_unless_it_is_to_be_resumed(tmp_path):
    for resume in (True, False):
        learn = make_learner(cbs=CheckpointCallback(tmp_path, resume=resume))
        if resume:
            with learn.no_logging():
                learn.fit(1)
                learn.fit(1)
        else:
            with raises(CheckpointError, str(tmp_path), "resume=True) continues it", "another directory"):
                learn.fit(1)


def test_a_run_whose_first_fit_has_no_epoch_is_resumed(tmp_path):
    def splitter(model):
        return [list(part.parameters()) for part in model if list(part.parameters())]

    def run():
        learn = make_learner(splitter=splitter, cbs=CheckpointCallback(tmp_path, resume=True))
        with learn.no_logging():
            learn.fine_tune(1, freeze_epochs=0)
        return learn

    first, again = run(), run()
    assert different(weights(first.model), weights(again.model)) == []
    assert (again.n_fits, again.epoch) == (first.n_fits, first.epoch)


def test_the_epoch_is_the_last_one_after_a_resume_from_its_end(tmp_path):
    seen = []

    def note(cb):
        seen.append(cb.learn.epoch)
        if len(seen) == 1:
            raise KeyError

    for _ in range(2):
        learn = make_learner(cbs=[CheckpointCallback(tmp_path, resume=True), Callback(after_fit=note, order=-50)])
        with learn.no_logging(), suppress(KeyError):
            learn.fit(3)
    assert seen == [2, 2]


def test_a_second_learner_does_not_silently_take_the_weights_of_the_first(tmp_path, capsys):
    callback = CheckpointCallback(tmp_path)
    first, second, third = make_learner(), make_learner(), make_learner()
    with first.no_logging():
        first.fit(1, cbs=callback)
    with second.no_logging(), raises(CheckpointError, "has checkpoints of another run"):
        second.fit(1, cbs=callback)
    with third.no_logging():
        third.fit(1, cbs=CheckpointCallback(tmp_path, resume=True))
    assert "was done before, by another Learner of this process" in capsys.readouterr().out


def test_each_fit_may_have_a_callback_of_its_own(tmp_path):
    learn = make_learner()
    with learn.no_logging():
        for _ in range(2):
            learn.fit(1, cbs=CheckpointCallback(tmp_path))
    assert learn.train_iter == 2
    assert {p.name for p in (tmp_path / "ends").iterdir()} == {"0", "1"}


def test_a_restart_by_the_launcher_resumes_its_own_run_alone(tmp_path, monkeypatch):
    learn = make_learner(cbs=[CheckpointCallback(tmp_path, every=1), raising("after_fit", ZeroDivisionError)])
    with learn.no_logging(), pytest.raises(ZeroDivisionError):
        learn.fit(1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    learn = make_learner(cbs=[CheckpointCallback(tmp_path), raising("after_fit", ZeroDivisionError, lambda cb: False)])
    with learn.no_logging():
        learn.fit(1)
    assert len(learn.recorder.values) == 1
    monkeypatch.setattr("learnerkit.checkpoints.callback._launcher", lambda: "another")
    with raises(CheckpointError, "another run"):
        make_learner(cbs=CheckpointCallback(tmp_path)).fit(1)


def test_a_trial_of_a_search_resumes_its_own_run_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LEARNERKIT_TRIAL", "{}")

    def train(trial, n_epoch=1, **options):
        monkeypatch.setenv("LEARNERKIT_LAUNCHER", f"search {trial}")
        learn = make_learner(cbs=CheckpointCallback(tmp_path, **options))
        learn.fit(n_epoch)

    train(0, resume=True)
    for options in ({"resume": True}, {}):
        with raises(CheckpointError, str(tmp_path), "another trial or run", "leave --here out"):
            train(1, **options)
    train(0, n_epoch=2, resume=True)  # after it was killed
    assert "resumed fit 0 after epoch 0" in capsys.readouterr().out


# When, and what not


@pytest.mark.parametrize(
    ("every", "names"),
    [
        (3, ["fit0-epoch1-step3", "fit0-epoch2-step6", "fit0-epoch2-step6-done"]),
        ("epoch", ["fit0-epoch0-step2-done", "fit0-epoch1-step4-done", "fit0-epoch2-step6-done"]),
        ("0.0000001min", ["fit0-epoch2-step5", "fit0-epoch2-step6", "fit0-epoch2-step6-done"]),
    ],
)
def test_checkpoints_are_saved_as_often_as_every_says(every, names, tmp_path):
    learn = make_learner(cbs=CheckpointCallback(tmp_path, every))
    with learn.no_logging():
        learn.fit(3)
    assert sorted(p.name for p in tmp_path.glob("fit*")) == names


@pytest.mark.parametrize("every", [0, True, "1", "min", "0min", "10s", 2.5, None])
def test_a_bad_every_of_checkpoints_is_refused(every):
    with raises(ValueError, f"got every={every!r}", "'epoch', a number of optimizer steps"):
        CheckpointCallback("x", every)


def test_in_the_background_the_same_is_saved(tmp_path, whole):
    options = {"every": 3, "async_save": True}
    died = finished(make("augmentation", tmp_path, Kill(9), **options), "augmentation")
    ended = finished(make("augmentation", tmp_path, resume=True, **options), "augmentation", died["order"])
    assert different(whole("augmentation"), ended) == []


@pytest.mark.parametrize("ends", [False, True])
def test_r12_weights_that_are_not_finite_are_not_saved(ends, tmp_path):
    cbs = [Spoils(), CheckpointCallback(tmp_path, every=1), *([TerminateOnNaNCallback()] if ends else [])]
    learn = make_learner(cbs=cbs)
    with learn.no_logging(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learn.fit(3)
    refused = [str(w.message) for w in caught if "are not finite; the last one stays" in str(w.message)]
    assert bool(refused) == (not ends)
    for path in tmp_path.glob("**/model.safetensors"):
        fresh = make_learner()
        fresh.load(path, with_opt=False)
        assert all(p.isfinite().all() for p in fresh.model.parameters())
    assert max(int(p.name.split("step")[1].split("-")[0]) for p in tmp_path.glob("fit*")) == 3


def test_a_frozen_parameter_may_be_infinite(tmp_path):
    model = make_model()
    model.mask = torch.nn.Parameter(torch.full((3,), -torch.inf), requires_grad=False)
    learn = make_learner(model=model, cbs=CheckpointCallback(tmp_path))
    with learn.no_logging():
        learn.fit(1)
    assert [p.name for p in tmp_path.glob("fit*")] == ["fit0-epoch0-step2-done"]


def test_what_is_not_finite_is_found_without_float64():
    """MPS has none."""
    fine = {"a": torch.ones(3), "b": torch.full((9,), 60_000.0).half(), "c": torch.ones(2, dtype=torch.complex64)}
    bad = {"d": torch.tensor([1.0, torch.inf]), "e": torch.tensor([torch.nan, 1.0]).bfloat16()}
    large = {"f": torch.full((2,), 3e38), "g": torch.tensor([True])}
    with NoFloat64():
        masks = _not_finite(fine | bad | large | {"h": 3})
    found = {name: mask.tolist() for name, mask in masks.items() if mask.any()}
    assert found == {"d": [False, True], "e": [True, False]}
    assert not _not_finite({"wide": torch.ones(2, dtype=torch.float64)})


class OneBadSample(Callback):
    """Gives BatchNorm an infinite input at the second step, without a gradient."""

    run_valid = False

    def before_batch(self):
        if self.train_iter == 1:
            with torch.no_grad():
                self.model.norm(torch.full((2, 1), torch.inf))


def test_buffers_that_became_nan_or_infinite_are_not_saved(tmp_path):
    model = make_model()
    model.norm = torch.nn.BatchNorm1d(1)
    learn = make_learner(model=model, cbs=[OneBadSample(), CheckpointCallback(tmp_path, every=1)])
    with learn.no_logging(), pytest.warns(UserWarning, match="norm.running_mean, norm.running_var are not finite"):
        learn.fit(2)
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.glob("**/fit0*")] == ["fit0-epoch0-step1"]


def test_a_mask_that_was_infinite_when_the_fit_began_is_saved_unless_it_changes(tmp_path):
    class Model(torch.nn.Linear):
        def __init__(self):
            super().__init__(4, 1)
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    learn = make_learner(model=Model(), cbs=CheckpointCallback(tmp_path))
    with learn.no_logging():
        learn.fit(1)
        learn.add_cb(Callback(after_train=lambda cb: cb.model.mask.fill_(torch.inf)))
        with pytest.warns(UserWarning, match="mask are not finite"):
            learn.fit(1)
    assert [p.name for p in tmp_path.glob("fit*")] == ["fit0-epoch0-step2-done"]


def test_all_checkpoints_are_in_one_place_wherever_the_script_goes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "elsewhere").mkdir()
    for path in ("run", "~/run"):
        leaves = Callback(after_batch=lambda cb: monkeypatch.chdir(tmp_path / "elsewhere"))
        learn = make_learner(cbs=[leaves, CheckpointCallback(path, every=1)])
        with learn.no_logging():
            learn.fit(1)
        monkeypatch.chdir(tmp_path)
    found = {str(p.parent.relative_to(tmp_path)) for p in tmp_path.glob("**/fit0-epoch0-step*")}
    assert found == {"run", "run/ends/0", "home/run", "home/run/ends/0"}


def test_a_run_is_resumed_where_the_present_directory_was_removed(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    for kill in (1, 0):
        learn = make_learner(cbs=[Kill(kill), CheckpointCallback(tmp_path / "run", every=1, resume=not kill)])
        monkeypatch.chdir(tmp_path / "gone")
        if not kill:
            (tmp_path / "gone").rmdir()
        with learn.no_logging(), suppress(Killed):
            learn.fit(1)
    assert learn.train_iter == 2


class Spoils(Callback):
    """Makes the fourth loss a NaN."""

    run_valid = False

    def after_loss(self):
        if self.train_iter == 3:
            self.learn.loss_grad = self.loss_grad * float("nan")
            self.learn.loss = self.learn.loss_grad.detach()


def test_a_directory_is_for_one_process_until_that_ends_whatever_it_leaves_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_DYING", 0.2)
    heard, tells = os.pipe()
    holder = os.fork()
    if not holder:
        with suppress(BaseException):
            storage.Lock(tmp_path)._acquire()
            left = os.fork()  # as a loader worker
            if left:
                os.write(tells, str(left).encode())
            signal.pause()
        os._exit(1)
    try:
        left = int(os.read(heard, 20))
        learn = make_learner(cbs=CheckpointCallback(tmp_path))
        said = rf"{tmp_path} is in use by process {holder} on {socket.gethostname()} since 20\d\d-"
        with learn.no_logging(), pytest.raises(CheckpointError, match=said) as caught:
            learn.fit(1)
        assert "\n" not in str(caught.value)
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        os.close(heard)
        os.close(tells)
    try:
        with learn.no_logging():
            learn.fit(1)
    finally:
        os.kill(left, signal.SIGKILL)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ends", "fit0-epoch0-step2-done", "latest"]


def test_a_directory_is_for_one_run_of_a_process_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_DYING", 0.2)
    said = f"{tmp_path} is in use by process {os.getpid()} on"

    def fit(cb):
        other = make_learner(cbs=CheckpointCallback(tmp_path, resume=True, save_on_signal=False))
        with other.no_logging(), pytest.raises(CheckpointError, match=said):
            other.fit(1)

    def fit_in_a_thread(cb):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(fit, cb).result(timeout=60)
        assert len(list(tmp_path.glob(".learnerkit.lock"))) == 1

    learn = make_learner(cbs=CheckpointCallback(tmp_path, every=1, resume=True))
    with learn.no_logging():
        learn.fit(1, cbs=Callback(before_train=fit_in_a_thread, after_train=fit))
        learn.fit(1)
    assert list(tmp_path.glob(".learnerkit.lock")) == []


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_the_file_system_has_no_locks_there_is_none(code, tmp_path, monkeypatch):
    def refuses(*args):
        raise OSError(code, "no locks")

    monkeypatch.setattr(fcntl, "lockf", refuses)
    learn = make_learner(cbs=CheckpointCallback(tmp_path))
    with learn.no_logging():
        learn.fit(1)
    assert len(list(tmp_path.glob("fit*"))) == 1


def test_a_lock_whose_file_was_removed_is_another_one(tmp_path):
    first, second = storage.Lock(tmp_path), storage.Lock(tmp_path)
    first.acquire()
    (file,) = tmp_path.iterdir()
    file.unlink()
    second.acquire()
    first.release()
    assert list(tmp_path.iterdir()) == [file]
    second.release()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_read_again_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"run\\udcff is no UTF-8"):
        CheckpointCallback(tmp_path / os.fsdecode(b"run\xff"))


def test_a_file_system_that_does_not_sync_directories_can_hold_checkpoints(tmp_path, monkeypatch):
    def refuses(descriptor, code=errno.EINVAL):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuses)
    learn = make_learner(cbs=CheckpointCallback(tmp_path))
    with learn.no_logging():
        learn.fit(1)
        assert len(list(tmp_path.glob("fit*"))) == 1
        monkeypatch.setattr(os, "fsync", partial(refuses, code=errno.EIO))
        with raises(CheckpointError, "Input/output error"):
            learn.fit(1)


def test_two_checkpoint_callbacks_are_refused(tmp_path):
    learn = make_learner(cbs=[CheckpointCallback(tmp_path / "a"), CheckpointCallback(tmp_path / "b")])
    with raises(ValueError, "two callbacks CheckpointCallback"):
        learn.fit(1)
    learn.cbs[-1].run = False
    learn.fit(1)
    assert (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()


def test_a_state_that_cannot_be_written_is_named(tmp_path):
    class Holds(Callback):
        def state_dict(self):
            return {"inner": [1, {2, 3}]}

    learn = make_learner(cbs=[Holds(), CheckpointCallback(tmp_path)])
    with learn.no_logging(), raises(CheckpointError, "callbacks.Holds.inner.1 is a set"):
        learn.fit(1)

    assert learn.train_iter == 0  # before anything was trained


def test_a_state_that_is_not_taken_is_named(tmp_path):
    class Strict(Callback):
        def state_dict(self):
            return {"a": 1}

        def load_state_dict(self, state):
            raise KeyError("b")

    for resume in (False, True):
        learn = make_learner(cbs=[Strict(), CheckpointCallback(tmp_path, resume=resume)])
        with (
            learn.no_logging(),
            raises(CheckpointError, "Strict", "KeyError: 'b'", "fit0") if resume else nullcontext(),
        ):
            learn.fit(1 + resume)


def test_a_state_that_is_no_dict_is_named(tmp_path):
    class Forgets(Callback):
        def state_dict(self):
            self.kept = 1

    learn = make_learner(cbs=[Forgets(), CheckpointCallback(tmp_path)])
    with learn.no_logging(), raises(CheckpointError, "Forgets.state_dict() returned a NoneType"):
        learn.fit(1)


def test_a_state_that_no_method_takes_back_is_told(tmp_path, capsys):
    class Gives(Callback):
        def state_dict(self):
            return {"a": 1}

    class Empty(Callback):
        def state_dict(self):
            return {}

    for resume in (False, True):
        assert "begins anew" not in capsys.readouterr().out
        learn = make_learner(cbs=[Gives(), Empty(), CheckpointCallback(tmp_path, resume=resume)])
        with learn.no_logging():
            learn.fit(1 + resume)
    told = [line for line in capsys.readouterr().out.splitlines() if "begins anew" in line]
    assert told == [f"{learn.gives!r} begins anew: it has state_dict, and no load_state_dict that takes its state back"]


@pytest.mark.parametrize(
    ("kind", "splitter"), [(KeepsGradients, None), (Learner, lambda model: [list(model.parameters())[-1:]])]
)
def test_gradients_that_no_step_waits_for_do_not_keep_it_from_saving(kind, splitter, tmp_path):
    learn = make_learner(cls=kind, splitter=splitter, cbs=CheckpointCallback(tmp_path, every=1))
    with learn.no_logging():
        learn.fit(1)
    assert {p.name for p in tmp_path.glob("fit0-epoch0-step*")} == {
        "fit0-epoch0-step1", "fit0-epoch0-step2", "fit0-epoch0-step2-done"
    }  # fmt: skip


def test_gradients_that_are_kept_beyond_the_end_of_an_epoch_are_told(tmp_path):
    with pytest.warns(UserWarning, match="keeps gradients beyond the end .* checkpoints do not have them"):
        run("accumulation by hand", make("accumulation by hand", tmp_path, every="epoch"))


def harm(checkpoint, file):
    """Damage a checkpoint: remove its manifest, or change a byte of another file."""
    path = checkpoint / file
    if file == "manifest.json":
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"!")


@pytest.mark.slow
@pytest.mark.parametrize("file", ["manifest.json", "model.safetensors"])
def test_where_all_checkpoints_of_a_fit_are_damaged_it_goes_on_from_the_end_of_the_one_before(file, tmp_path):
    def train(resume=False, at=0):
        learn = make_learner(cbs=CheckpointCallback(tmp_path / "run", every=1, keep=1, resume=resume))
        with learn.no_logging(), suppress(ZeroDivisionError):
            learn.fit(1)
            learn.fit(1, cbs=raising("after_batch", ZeroDivisionError, lambda cb: cb.train_iter == at))
        return learn

    whole = make_learner()
    with whole.no_logging():
        whole.fit(1)
        whole.fit(1)
    train(at=2)
    [newest] = (tmp_path / "run").glob("fit1-*")
    harm(newest, file)
    with pytest.warns(UserWarning, match=f"passed over.*{file}"):
        again = train(resume=True)
    assert different(weights(whole.model), weights(again.model)) == []
    for checkpoint in (tmp_path / "run").glob("**/fit1-*"):
        harm(checkpoint, file)
    with pytest.warns(UserWarning, match=f"passed over.*{file}"):
        again = train(resume=True)  # from the end of the fit before
    assert different(weights(whole.model), weights(again.model)) == []


@pytest.mark.parametrize("file", ["manifest.json", "model.safetensors"])
def test_where_nothing_is_whole_it_does_not_begin_anew(file, tmp_path):
    learn = make_learner(cbs=CheckpointCallback(tmp_path))
    with learn.no_logging():
        learn.fit(1)
    for manifest in [*tmp_path.glob("**/manifest.json")]:
        harm(manifest.parent, file)
    for resume in (True, False):
        again = make_learner(cbs=CheckpointCallback(tmp_path, resume=resume))
        with (
            again.no_logging(),
            warnings.catch_warnings(action="ignore"),
            raises(CheckpointError, "is whole" if resume else "another run"),
        ):
            again.fit(1)


def test_start_epoch_fills_the_recorder_rightly(tmp_path):
    whole = make("one cycle")
    run("one cycle", whole)
    part = make("one cycle")
    with part.no_logging():
        part.fit_one_cycle(EPOCHS, 0.05, start_epoch=1, wd=0.1)
    assert [len(part.recorder.values), len(part.recorder.losses)] == [EPOCHS - 1, STEPS - EPOCH]
    assert part.recorder.iters == [EPOCH, 2 * EPOCH]
    assert part.recorder.lrs == whole.recorder.lrs[EPOCH:]
    assert part.recorder.hps["lr"] == whole.recorder.hps["lr"][EPOCH:]
    assert part.recorder.log[0] == EPOCHS - 1
    assert part.order.batches == whole.order.batches[EPOCH:]


def script_of_two(folder, monkeypatch, kill=0, **checkpoint):
    """Train two learners in turn, as a process of its own does; return their weights and records."""
    monkeypatch.setattr(learner_module, "_made", itertools.count())
    set_seed(7)
    learners = []
    for i in range(2):
        saved = [CheckpointCallback(folder, every=1, **checkpoint)] if folder else []
        learners.append(make_learner(cbs=[*saved, Kill(kill if i else 0)]))
    for _ in range(2):
        for learn in learners:
            with learn.no_logging():
                learn.fit(1, 0.05)
    return [(weights(learn.model), learn.recorder.values) for learn in learners]


@pytest.mark.parametrize("kill", mostly_slow([1, 3], 3))
def test_several_learners_share_a_directory(kill, tmp_path, monkeypatch):
    whole = script_of_two(None, monkeypatch)
    with pytest.raises(Killed):
        script_of_two(tmp_path, monkeypatch, kill, per_learner=True)
    again = script_of_two(tmp_path, monkeypatch, per_learner=True, resume=True)
    assert different(again, whole) == []
    assert {p.name for p in tmp_path.iterdir()} == {"learner0", "learner1"}


def test_one_callback_may_serve_several_learners(tmp_path, monkeypatch):
    shared = CheckpointCallback(tmp_path, per_learner=True)
    monkeypatch.setattr(learner_module, "_made", itertools.count())
    first, second = make_learner(), make_learner()
    for learn in (first, second, first):
        with learn.no_logging():
            learn.fit(1, cbs=shared)
    ends = {p.name: sorted(end.name for end in (p / "ends").iterdir()) for p in tmp_path.iterdir()}
    assert ends == {"learner0": ["0", "1"], "learner1": ["0"]}


def test_a_run_of_a_tracker_is_that_of_one_learner(tmp_path):
    with raises(ValueError, "resume='run:x'", "per_learner=True; give one"):
        CheckpointCallback(tmp_path, resume="run:x", per_learner=True)
