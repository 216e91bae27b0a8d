"""Ranks that leave together, on real processes: cancels, Ctrl-C, errors, standstills; and the next fit works."""

import os
import re
import signal
import subprocess
import sys
import time
import warnings
from functools import partial

import one_rank
import pytest
import torch
import torch.distributed as dist
from helpers import mostly_slow, mostly_soak, step_gradient
from launching import SCRIPTS, environment, in_time
from one_rank import Do, throw
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import learnerkit
from learnerkit import (
    Callback,
    CancelBackwardException,
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelStepException,
    CancelTrainException,
    CancelValidException,
    DataLoaders,
    GradientAccumulation,
    Learner,
    distributed,
)
from learnerkit.distributed import PeerError
from learnerkit.events import INNER_EVENTS, Event
from learnerkit.parallel.agreement import Agreement
from learnerkit.parallel.loaders import split_evenly
from learnerkit.parallel.watch import Watch
from learnerkit.processes.requests import END

on_ranks = pytest.mark.ranks(2, slow=["gpus"], soak=[3])  # two GPUs: NCCL has not been tried so far

RANK, N = distributed.rank(), distributed.world_size()
LAST = N - 1
EVENTS = [str(e) for e in Event if e.startswith(("before_", "after_")) and "cancel" not in e and e != "after_create"]
TRAINING_ONLY = ("before_backward", "after_backward", "before_step", "after_step")
OPTIONS = {"split_batches": True, "timeout": 60, "sync_bn": False}
fit = partial(one_rank.fit, **OPTIONS)
SOON = 15  # seconds, where none waits for that timeout; a second on an idle machine


@pytest.mark.parametrize("ranks", [1, 2, 3, 64, 1000])
def test_the_mean_of_requests_tells_the_greatest(ranks):
    for greatest in range(END + 1):
        for count in {1, ranks}:  # of the ranks that ask for it; the others ask for less
            for other in range(greatest + 1):
                flags = torch.tensor([flags_of(greatest)] * count + [flags_of(other)] * (ranks - count)).mean(0)
                one = Agreement(None)
                one.obey(flags.tolist())
                assert one.request.agreed == greatest


def flags_of(request):
    one = Agreement(None)
    one.request.ask(request)
    return list(map(float, one.flags()))


def make_data(n):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long())


def make_learner(cbs=None, norm=False, **kwargs):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Tanh(), *([nn.BatchNorm1d(8)] if norm else []), nn.Linear(8, 2)]
    dls = DataLoaders.from_datasets(make_data(40), make_data(11), bs=8)
    options = {"opt_func": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9), "lr": 0.1} | kwargs
    return Learner(dls, nn.Sequential(*layers).double(), nn.CrossEntropyLoss(), cbs=cbs, **options)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def weights(learn):
    return [p.detach().clone() for p in learn.model.parameters()]


def check_after(learn, alike=True, took=0.0):
    """The ranks agree on everything, and can go on."""
    assert took < SOON, took
    assert learn.n_ranks == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if alike:
        recorder = learn.recorder
        facts = (str(weights(learn)), recorder.values, recorder.losses, recorder.iters, learn.train_iter)
        assert distributed.same_everywhere(facts), facts
        assert all(p.grad is None for p in learn.model.parameters())
    learn.remove_cbs(Do)
    error, _ = fit(learn, 1)
    assert error is None, error
    assert distributed.same_everywhere(str(weights(learn)))
    assert len(learn.recorder.values) == 1


# Cancels


CANCELS = [CancelFitException, CancelEpochException, CancelTrainException, CancelValidException, KeyboardInterrupt]
QUICK = ["before_fit", "before_batch", "after_step", "before_validate", "after_epoch"]
WHEN = [(event, True) for event in EVENTS] + [
    (event, False) for event in EVENTS if event in INNER_EVENTS and event not in TRAINING_ONLY
]


def kinds(*classes, slow=()):
    """Parametrize by the names of exceptions."""
    slow = [pytest.param(kind.__name__, marks=pytest.mark.slow) for kind in slow]
    return pytest.mark.parametrize("kind", [*(kind.__name__ for kind in classes), *slow])


def exception(name):
    return KeyboardInterrupt if name == "KeyboardInterrupt" else getattr(learnerkit, name)


def action_of(kind):
    return interrupt if kind is KeyboardInterrupt else throw(kind())


def anywhere():
    """Parametrize by every cancel at every event; quick are some of them, and slow one at every other event."""
    found = []
    for kind in CANCELS:
        for i, (event, training) in enumerate(WHEN):
            quick = training and event in (QUICK[:2] if kind is CancelFitException else QUICK[1:2])
            seldom = not (training and event in QUICK[1:3]) and (i % 2 or kind is not CANCELS[(0, 3)[i // 2 % 2]])
            name = f"{kind.__name__}-{event}{'' if training else ' of validation'}"
            marks = () if quick else pytest.mark.soak if seldom else pytest.mark.slow
            found.append(pytest.param(kind.__name__, event, training, id=name, marks=marks))
    return pytest.mark.parametrize(("kind", "event", "training"), found)


@on_ranks
@anywhere()
@pytest.mark.parametrize("order", [0, pytest.param(70, marks=pytest.mark.soak)], ids="order {}".format)
def test_a_cancel_at_any_event_ends_all_ranks_alike(kind, event, training, order):
    kind = exception(kind)
    learn = make_learner(Do(event, action_of(kind), training=training, order=order))
    error, took = fit(learn)
    errors = distributed.all_gather(type(error).__name__)
    assert len(set(errors)) == 1, errors
    # What no level takes comes out, as on one process.
    assert errors[0] in ("NoneType", kind.__name__), errors
    if kind is CancelFitException:
        assert error is None
    check_after(learn, took=took, alike=error is None)


@on_ranks
def test_a_cancel_in_a_cleanup_is_no_error():
    learn = make_learner(Do("cleanup_train", throw(CancelFitException())))
    error, took = fit(learn)
    assert error is None, error
    check_after(learn, took=took)


@on_ranks
def test_of_two_cancels_of_a_rank_the_stronger_one_counts():
    epochs, cancels = [], [("before_step", CancelFitException()), ("after_batch", CancelEpochException())]
    cbs = [Do(event, throw(error)) for event, error in cancels]
    learn = make_learner([*cbs, Callback(before_epoch=lambda cb: epochs.append(cb.epoch))])
    error, took = fit(learn)
    assert error is None, error
    assert epochs == [0]
    check_after(learn, took=took)


@pytest.mark.slow
@on_ranks
@pytest.mark.parametrize(
    "event",
    mostly_slow(["before_batch", "after_pred", "after_backward", "after_batch"], "after_pred", slow=["after_batch"]),
)
def test_a_cancel_in_the_middle_of_a_group_of_batches_ends_well(event):
    learn = make_learner([Do(event, throw(CancelTrainException())), GradientAccumulation(n_batches=4)])
    error, took = fit(learn)
    assert error is None, error
    check_after(learn, took=took)


class Late(Callback):
    """Flags are read a step later, as on an accelerator."""

    order = 12  # after the DistributedCallback

    def before_train(self):
        step_gradient(self.learn).step.reads_late = True


@on_ranks
@kinds(CancelFitException, slow=[CancelBatchException, KeyboardInterrupt])
@pytest.mark.parametrize(
    "event", mostly_slow([e for e in EVENTS if e in INNER_EVENTS], "after_loss", slow=["before_batch", "after_batch"])
)
def test_where_the_host_must_not_wait_for_the_device_all_leave_a_step_later(kind, event):
    learn = make_learner([Do(event, action_of(exception(kind))), Late()])
    error, took = fit(learn)
    errors = distributed.all_gather(type(error).__name__)
    assert set(errors) <= {"NoneType", "KeyboardInterrupt"}, errors
    assert len(set(errors)) == 1, errors
    check_after(learn, took=took, alike=error is None)


class Meets(Callback):
    """Talks to the other ranks after each training step and batch, and validates in the middle of training."""

    order = 20

    def after_step(self):
        distributed.reduce(1)

    def after_batch(self):
        if self.training:
            distributed.reduce(1)
            if self.iter == 1:
                self.learn.validate()


@on_ranks
@kinds(CancelFitException, slow=[CancelBatchException, CancelTrainException, KeyboardInterrupt])
@pytest.mark.parametrize("event", mostly_soak(["after_batch", "after_step", "before_step"], "after_step"))
@pytest.mark.parametrize("late", mostly_soak([False, True], True), ids=["read at once", "read late"])
def test_a_cancel_before_a_collective_of_the_users_own_ends_well(kind, event, late):
    learn = make_learner([Do(event, action_of(exception(kind)), order=5), Meets(), *([Late()] if late else [])])
    error, took = fit(learn)
    assert type(error) in (type(None), KeyboardInterrupt), error
    check_after(learn, took=took, alike=error is None)


@pytest.mark.slow
@on_ranks
@pytest.mark.parametrize("training", mostly_slow([True, False], True), ids=["in a group of batches", "in validation"])
def test_a_cancel_before_a_collective_ends_well_after_a_batch_without_a_step(training):
    error = CancelTrainException() if training else CancelValidException()
    meet = Callback(after_batch=lambda cb: distributed.reduce(1), order=20)
    learn = make_learner([Do("after_pred", throw(error), training=training), meet, GradientAccumulation(n_batches=4)])
    error, took = fit(learn)
    assert error is None, error
    check_after(learn, took=took)


@on_ranks
def test_ranks_that_are_separated_train_by_themselves():
    seen = []
    separate = Callback(before_train=lambda cb: setattr(cb.learn._agreement, "alone_from", 2))
    count = Callback(before_batch=lambda cb: cb.training and seen.append(distributed.world_size()))
    error, _ = fit(make_learner([separate, count]), 1)
    assert error is None, error
    assert seen == [N, N, 1, 1, 1]


# What is stepped


def assert_equals_alone(make, epochs, fits=1, **options):
    """The learner that `make` makes ends with the same weights and record on all ranks together and on one process."""
    found, records = [], []
    for way in (partial(fit, **options), lambda learn, epochs: learn.fit(epochs)):
        learn = make()
        with warnings.catch_warnings(), learn.no_logging():
            warnings.simplefilter("ignore")  # each process trains alone here, which is meant
            for _ in range(fits):
                way(learn, epochs)
        found.append(weights(learn))
        recorder = learn.recorder
        records.append([recorder.losses, recorder.lrs, recorder.iters, recorder.values, learn.train_iter])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for a, b in zip(*records, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)


def by_hand(steps):
    """The weights after SGD steps with the given samples each; an empty step is not taken."""
    learn = make_learner()
    opt = torch.optim.SGD(learn.model.parameters(), lr=0.1, momentum=0.9)
    x, y = learn.dls.train_ds.tensors
    for rows in steps:
        if len(rows):
            nn.functional.cross_entropy(learn.model(x[rows]), y[rows]).backward()
            opt.step()
            opt.zero_grad()
    return weights(learn)


def seen_steps():
    """The samples of each step, as one process sees them."""
    rows = []
    x = make_data(40).tensors[0]

    class Seen(Callback):
        def before_batch(self):
            if self.training:
                rows.append([(x == row).all(1).nonzero().item() for row in self.xb[0]])

    learn = make_learner(Seen())
    with learn.no_logging(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each process trains alone here, which is meant
        learn.fit(1)
    return rows


def leaves(kind, event, expected, order=0, ranks=(LAST,)):
    """One epoch in which `ranks` raise at that event ends with the expected weights."""
    learn = make_learner(Do(event, throw(exception(kind)()), order=order, ranks=ranks))
    error, _ = fit(learn, 1)
    assert error is None, error
    for a, b in zip(weights(learn), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def cases(*found):
    """Parametrize by (exception, event), and by the callback's order; of each exception the last event is quick."""
    names = [(kind.__name__, event) for kind, events in found for event in events]
    quick = [(kind.__name__, events[-1]) for kind, events in found]

    def mark(test):
        ids = [" in ".join(pair) for pair in names]
        test = pytest.mark.parametrize(("kind", "event"), mostly_slow(names, *quick), ids=ids)(test)
        orders = [0, pytest.param(70, marks=pytest.mark.soak)]
        return pytest.mark.parametrize("order", orders, ids="order {}".format)(test)

    return mark


@on_ranks
@cases(
    (CancelBatchException, ["before_batch", "after_pred", "after_loss", "before_backward"]),
    (CancelBackwardException, ["before_backward"]),
)
def test_the_part_of_a_rank_that_leaves_its_batch_weighs_nothing(kind, event, order):
    steps = seen_steps()
    steps[1] = sum(split_evenly(steps[1], N, 1)[:LAST], [])
    leaves(kind, event, by_hand(steps), order)


@pytest.mark.slow
@on_ranks
@cases((CancelBatchException, ["after_backward", "before_step", "after_step"]), (CancelStepException, ["before_step"]))
def test_gradients_that_are_reduced_before_the_cancel_are_stepped(kind, event, order):
    leaves(kind, event, by_hand(seen_steps()), order)


@on_ranks
def test_a_pass_of_a_callback_in_place_of_the_loops_is_refused_as_its_gradients_would_be_lost():
    def own():
        (2 * learn.loss_grad).backward()
        raise CancelBackwardException

    learn = make_learner(Do("before_backward", own, ranks=tuple(range(N))))
    error, _ = fit(learn, epochs=1)
    assert str(error).startswith("a callback made a backward pass of its own and raised CancelBackwardException")


@on_ranks
@cases((CancelFitException, ["before_batch", "after_loss", "before_step", "after_step", "after_batch"]))
def test_a_cancelled_fit_has_made_its_whole_steps(kind, event, order):
    done = 1 if event in ("before_batch", "after_loss") else 2
    leaves(kind, event, by_hand(seen_steps()[:done]), order)


@on_ranks
@kinds(CancelFitException, CancelBatchException)
@pytest.mark.parametrize(
    "event", mostly_slow([e for e in EVENTS if e in INNER_EVENTS], "after_pred", slow=["before_batch", "after_step"])
)
@pytest.mark.parametrize("order", [0, pytest.param(70, marks=pytest.mark.soak)], ids="order {}".format)
@pytest.mark.parametrize(
    "batches", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.soak)],
    ids="{} in a step".format,
)  # fmt: skip
def test_what_all_ranks_cancel_is_as_on_one_process(kind, event, order, batches):
    def cancelled():
        do = Do(event, throw(exception(kind)()), ranks=tuple(range(N)), order=order)
        return make_learner([do, *([GradientAccumulation(n_batches=batches)] if batches > 1 else [])])

    assert_equals_alone(cancelled, epochs=2)


@on_ranks
def test_a_backward_pass_that_all_ranks_cancel_is_left_out_of_a_step_of_several_batches():
    def cancelled():
        do = Do("before_backward", throw(CancelBackwardException()), ranks=tuple(range(N)))
        return make_learner([do, GradientAccumulation(n_batches=2)])

    assert_equals_alone(cancelled, epochs=2)


@on_ranks
def test_hooks_that_a_cancel_of_training_has_stopped_are_not_called_in_validation():
    everyone, leave = tuple(range(N)), throw(CancelTrainException(agreed=True))
    assert_equals_alone(lambda: make_learner(Do("after_batch", leave, everyone)), epochs=1)


@on_ranks
def test_all_callbacks_hear_of_a_batch_of_validation_that_is_cancelled_after_its_end():
    everyone, leave = tuple(range(N)), throw(CancelBatchException())
    assert_equals_alone(lambda: make_learner(Do("after_batch", leave, everyone, training=False)), epochs=1)


@pytest.mark.slow
@on_ranks
@pytest.mark.parametrize(("event", "rows"), [("after_batch", 12), ("before_batch", 8)])
def test_a_validation_that_all_ranks_cut_short_has_read_the_same_batches(event, rows):
    def limit(cb):
        if not cb.training and cb.iter == 2:
            raise CancelValidException

    learn = make_learner()
    learn.dls = DataLoaders(learn.dls.train, DataLoader(make_data(40), 4))
    with learn.distrib_ctx(**OPTIONS), learn.no_logging():
        for slow in range(N):  # it hears of the others' end before it comes to its own
            waits = Callback(after_pred=lambda cb, slow=slow: slow == RANK and time.sleep(0.1))
            cbs = [Callback(**{event: limit}), waits]
            assert len(learn.get_preds(cbs=cbs)[0]) == rows
            losses = learn.validate(cbs=cbs)
            x, y = make_data(40)[:rows]
            expected = nn.functional.cross_entropy(learn.model(x), y).item()
            torch.testing.assert_close(losses[0], expected, rtol=1e-9, atol=1e-9)


@on_ranks
def test_a_group_in_which_all_ranks_leave_training_is_as_on_one_process():
    everyone, leave = tuple(range(N)), throw(CancelTrainException())
    cbs = GradientAccumulation(n_batches=4)
    assert_equals_alone(lambda: make_learner([Do("after_batch", leave, everyone, order=70), cbs]), epochs=2)


@on_ranks
def test_a_fit_that_all_ranks_leave_after_a_batch_begins_no_other_one():
    begun = []
    leave = Do("after_batch", throw(CancelFitException()), tuple(range(N)))
    learn = make_learner([leave, Callback(before_batch=lambda cb: begun.append(cb.iter))])
    error, _ = fit(learn)
    assert error is None, error
    assert begun == [0, 1]


def double(cb):
    for p in cb.model.parameters():
        p.grad.mul_(2)


@on_ranks
def test_the_last_batch_of_a_group_that_all_ranks_leave_ends_no_backward_pass():
    everyone, leave = tuple(range(N)), throw(CancelBatchException())
    cbs = [GradientAccumulation(n_batches=2), Callback(after_backward=double, order=5)]
    assert_equals_alone(lambda: make_learner([Do("before_batch", leave, everyone), *cbs]), epochs=1)


@on_ranks
def test_a_step_that_all_ranks_cancel_is_as_on_one_process():
    everyone = tuple(range(N))
    assert_equals_alone(lambda: make_learner(Do("before_step", throw(CancelStepException()), everyone)), epochs=2)


def count_nothing(cb):
    if cb.training and cb.iter == 1:
        cb.learn.yb = (torch.full_like(cb.yb[0], -100),)  # the loss ignores these targets


@on_ranks
def test_a_step_that_all_ranks_cancel_is_not_taken_when_its_last_batch_counts_nothing():
    everyone, cancel = tuple(range(N)), throw(CancelStepException())
    cbs = [GradientAccumulation(n_batches=2), Callback(before_batch=count_nothing)]
    assert_equals_alone(lambda: make_learner([Do("before_step", cancel, everyone), *cbs]), 1, split_batches=True)


@on_ranks
def test_flags_that_are_read_late_change_no_number():
    learn = make_learner(Late())
    error, _ = fit(learn, 1)
    assert error is None, error
    for a, b in zip(weights(learn), by_hand(seen_steps()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@on_ranks
def test_flags_that_are_read_late_end_one_training_alone():
    last = []
    look = Callback(after_train=lambda cb: last.append(cb.iter))
    error, _ = fit(make_learner([Do("before_step", throw(CancelTrainException())), Late(), look]), 3)
    assert error is None, error
    assert last == [3, 4, 4]


class Accumulate(Callback):
    """Accumulation as users write it: no step after every other batch."""

    def after_backward(self):
        if self.iter % 2 == 0:
            raise CancelBatchException


@pytest.mark.slow
@on_ranks
@pytest.mark.parametrize(
    "options", [
        {}, pytest.param({"weight": torch.tensor((0.2, 0.9), dtype=torch.float64)}, marks=pytest.mark.slow),
        pytest.param({"reduction": "sum"}, marks=pytest.mark.slow),
    ],
    ids=["mean", "class weights", "sum"],
)  # fmt: skip
def test_accumulation_by_cancels_is_that_of_one_process(options):
    """Also where parameters are frozen on the way, and where gradients are averaged after the pass."""

    def accumulating():
        freeze = Callback(before_epoch=lambda cb: cb.model[0].requires_grad_(cb.epoch == 0))
        learn = make_learner([Accumulate(), freeze])
        learn.loss_func = nn.CrossEntropyLoss(**options)
        return learn

    for unused in (None, True):
        assert_equals_alone(accumulating, epochs=2, find_unused_parameters=unused)


class Keep(Callback):
    """Keeps the gradients of the first batch, and leaves the second one."""

    def before_batch(self):
        if self.training and self.iter == 1:
            raise CancelBatchException

    def after_backward(self):
        if self.iter == 0:
            raise CancelBatchException


@on_ranks
def test_gradients_that_are_kept_outlast_a_batch_that_all_ranks_leave():
    assert_equals_alone(lambda: make_learner(Keep()), epochs=1)


def keep_last(cb):
    if not cb.n_fits and cb.iter == cb.n_iter - 1:
        raise CancelBatchException


@on_ranks
@pytest.mark.parametrize("reduction", mostly_slow(["mean", "sum"], "sum"))
def test_gradients_that_one_rank_alone_has_before_a_fit_keep_no_other_rank_waiting(reduction):
    learn = make_learner()
    learn.loss_func = nn.CrossEntropyLoss(reduction=reduction)
    learn.create_opt()  # A fit that makes the optimizer begins without gradients.
    if RANK == LAST:
        learn.model(learn.dls.train_ds.tensors[0]).sum().backward()
    error, took = fit(learn, 1)
    assert error is None, error
    check_after(learn, took=took)


@pytest.mark.slow
@on_ranks
@pytest.mark.parametrize("unused", mostly_slow([None, True], None))
def test_gradients_that_are_kept_from_one_fit_to_the_next_count_once(unused):
    def keeping():
        learn = make_learner(Callback(after_backward=keep_last), lr=0.01)
        learn.loss_func = nn.CrossEntropyLoss(reduction="sum")
        return learn

    assert_equals_alone(keeping, epochs=1, fits=2, find_unused_parameters=unused)


class Clip(Callback):
    """Changes gradients late in `before_step`."""

    order = 60

    def before_step(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)


before_the_step = pytest.mark.parametrize(
    ("kind", "event"),
    [
        ("CancelStepException", "before_step"),
        pytest.param("CancelBatchException", "after_backward", marks=pytest.mark.slow),
    ],
)


@pytest.mark.slow
@on_ranks
@before_the_step
def test_other_callbacks_go_on_with_what_a_cancel_has_stopped_on_one_rank(kind, event):
    kind = exception(kind)
    learn = make_learner([Do(event, throw(kind())), Clip()])
    error, took = fit(learn)
    assert error is None, error
    check_after(learn, took=took)
    everyone = tuple(range(N))
    assert_equals_alone(lambda: make_learner([Do(event, throw(kind()), ranks=everyone), Clip()]), epochs=2)


@pytest.mark.slow
@on_ranks
@before_the_step
def test_a_rank_that_cancels_before_a_step_comes_to_the_collectives_before_it(kind, event):
    leave, everyone = throw(exception(kind)()), tuple(range(N))
    meet, again = (Callback(before_step=lambda cb: distributed.reduce(1), order=order) for order in (20, 60))
    learn = make_learner([Do(event, leave), meet, again])
    error, took = fit(learn)
    assert error is None, error
    check_after(learn, took=took)
    # The others cancel the step between the two collectives, so that all ranks do.
    all_cancel = make_learner([Do(event, leave), meet, Do("before_step", leave, everyone[:-1], order=40), again])
    error, _ = fit(all_cancel)
    assert error is None, error
    alone = make_learner(Do(event, leave, everyone))
    with distributed.alone(), alone.no_logging():
        alone.fit(2)
    for a, b in zip(weights(all_cancel), weights(alone), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@on_ranks
def test_ranks_that_cancel_a_step_in_other_ways_go_on_together():
    cbs = [Do("before_step", throw(CancelStepException())), Do("after_backward", throw(CancelBatchException()), (0,))]
    learn = make_learner(cbs)
    error, took = fit(learn)
    assert error is None, error
    check_after(learn, took=took)


class StepsTogether(Learner):
    """Talks to the other ranks in its step."""

    def _step(self):
        distributed.reduce(1)
        super()._step()


@pytest.mark.slow
@on_ranks
def test_a_rank_that_cancels_a_step_comes_to_the_collectives_in_it():
    learn = make_learner(Do("before_step", throw(CancelStepException())))
    learn = StepsTogether(learn.dls, learn.model, learn.loss_func, opt_func=learn.opt_func, lr=0.1, cbs=learn.do)
    error, took = fit(learn)
    assert error is None, error
    check_after(learn, took=took)


@on_ranks
@kinds(CancelBatchException, CancelBackwardException, slow=[CancelStepException])
def test_a_batch_that_all_ranks_with_data_cancel_trains_a_rank_without_data_alike(kind):
    def leave(cb):
        if cb.training and cb.batch_size and cb.iter == cb.n_iter - 1:
            raise exception(kind)

    events = {"CancelBatchException": ["before_batch", "after_loss"], "CancelBackwardException": ["before_backward"]}
    for event in events.get(kind, ["before_step"]):
        learn = make_learner(Callback(**{event: leave}))
        learn.dls = DataLoaders.from_datasets(make_data(8 * N + 1), make_data(11), bs=8)
        error, took = fit(learn)
        assert error is None, error
        check_after(learn, took=took)


@pytest.mark.slow
@on_ranks
def test_a_rank_that_cancels_its_backward_pass_beside_others_that_count_nothing_steps_as_they_do():
    leave, ignore = Do("before_backward", throw(CancelBackwardException())), Callback(before_batch=count_nothing)
    learn = make_learner([leave, ignore])
    error, took = fit(learn)
    assert error is None, error
    alone = make_learner(ignore)
    with distributed.alone(), alone.no_logging():
        alone.fit(2)
    for a, b in zip(weights(learn), weights(alone), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    check_after(learn, took=took)


def meet_now(cb):
    distributed.reduce(1)


@pytest.mark.slow
@on_ranks
def test_a_rank_that_cancels_in_after_backward_comes_to_the_collectives_there():
    for kind in (CancelBatchException, CancelBackwardException):
        learn = make_learner([Do("after_backward", throw(kind())), Callback(after_backward=meet_now, order=5), Clip()])
        error, took = fit(learn)
        assert error is None, error
        check_after(learn, took=took)


@pytest.mark.slow
@on_ranks
def test_a_rank_that_cancels_in_after_backward_takes_its_step_beside_others_that_leave_the_batch():
    for more in ([], [Callback(before_step=meet_now)], [Do("before_step", throw(CancelStepException()))]):
        leave = Do("after_loss", throw(CancelBatchException()), tuple(range(LAST)))
        learn = make_learner([leave, Do("after_backward", throw(CancelBackwardException())), *more])
        error, took = fit(learn)
        assert error is None, error
        check_after(learn, took=took)


class Rows(IterableDataset):
    """The rows of a dataset, of which nobody knows the number."""

    def __iter__(self):
        return iter(make_data(32))


@on_ranks
@kinds(CancelEpochException, slow=[CancelFitException])
def test_a_rank_that_leaves_the_last_step_of_a_stream_keeps_no_other_rank_waiting(kind):
    for uneven in ("join", "stop"):
        accumulate = GradientAccumulation(n_batches=3)  # the last of five steps has no batch
        learn = make_learner([Do("after_step", throw(exception(kind)()), (0,), order=12, at=4), accumulate])
        learn.dls = DataLoaders(DataLoader(Rows(), 8))
        error, took = fit(learn, uneven=uneven)
        assert (error, learn.do.done) == (None, RANK == 0)
        check_after(learn, took=took)


@pytest.mark.slow
@on_ranks
@kinds(CancelTrainException, CancelEpochException)
def test_a_rank_that_leaves_before_the_others_have_begun_to_train_trains_the_next_epoch_with_them(kind):
    def skip(cb):
        if cb.training and cb.epoch == 1 and cb.iter == 1 and RANK == 0:
            raise CancelBatchException

    learn = make_learner([Do("before_train", throw(exception(kind)())), Callback(before_backward=skip)], norm=True)
    error, took = fit(learn)
    assert error is None, error
    check_after(learn, took=took)


@pytest.mark.slow
@on_ranks
@kinds(CancelFitException, CancelEpochException)
@pytest.mark.parametrize("event", mostly_slow(["after_train", "before_epoch", "after_epoch"], "after_train"))
def test_hooks_that_other_ranks_have_called_are_called_where_a_cancel_has_stopped_them(kind, event):
    def change(cb):
        with torch.no_grad():
            cb.model[0].bias.add_(1)

    changes = [Callback(**{event: change}, order=order) for order in (5, 15)]
    for between in ([], [Callback(**{event: meet_now}, order=10)]):
        learn = make_learner([Do(event, throw(exception(kind)())), *changes, *between])
        error, took = fit(learn)
        assert error is None, error
        check_after(learn, took=took)


@pytest.mark.slow
@on_ranks
def test_a_second_cancel_at_an_event_changes_nothing():
    heard = []
    hear = Callback(after_cancel_fit=lambda cb: heard.append("cancelled"), after_fit=lambda cb: heard.append("ended"))
    for kind, event in [(CancelFitException, "after_epoch"), (CancelTrainException, "after_train")]:
        heard.clear()
        learn = make_learner([Do(event, throw(kind())), Do(event, throw(kind()), order=5), hear])
        error, took = fit(learn)
        assert error is None, error
        assert heard == (["cancelled"] if kind is CancelFitException else []) + ["ended"]
        check_after(learn, took=took)


@on_ranks
def test_hooks_are_not_called_for_the_cancel_of_an_earlier_epoch():
    calls = []

    def leave(cb):
        if cb.epoch == 0 or (cb.epoch == 1 and RANK == LAST):
            raise CancelEpochException

    hear = Callback(before_epoch=lambda cb: calls.append(cb.epoch), order=5)
    error, _ = fit(make_learner([Callback(before_epoch=leave), hear]), 3)
    assert (error, calls) == (None, [1, 2])


@on_ranks
def test_hooks_that_a_cancel_has_stopped_on_all_ranks_are_not_called():
    calls = []
    leave = Do("after_train", throw(CancelFitException()), tuple(range(N)))
    error, _ = fit(make_learner([leave, Callback(after_train=lambda cb: calls.append(cb.epoch), order=5)]))
    assert (error, calls) == (None, [])


@on_ranks
def test_batches_without_a_step_ask_no_other_rank(monkeypatch):
    asked = []
    monkeypatch.setattr(Watch, "all_skip", lambda self, point: asked.append(point))
    error, _ = fit(make_learner(GradientAccumulation(n_batches=2)))
    assert (error, asked) == (None, [])


@pytest.mark.soak
@on_ranks
def test_a_rank_that_cancels_before_the_end_of_after_backward_takes_no_step_that_is_not_due():
    accumulate, everyone = GradientAccumulation(n_batches=2), tuple(range(N))
    meet = Callback(after_backward=meet_now, order=5)
    leave = partial(Do, "after_backward", at=0)
    for kind in (CancelBatchException, CancelBackwardException):
        for more in ([meet], [meet, leave(throw(kind()), order=2)], [Callback(before_step=meet_now)]):
            learn = make_learner([leave(throw(kind())), *more, accumulate])
            error, took = fit(learn)
            assert error is None, error
            check_after(learn, took=took)
        assert_equals_alone(lambda kind=kind: make_learner([leave(throw(kind()), ranks=everyone), accumulate]), 1)


@on_ranks
def test_a_hook_that_has_cancelled_is_not_called_again():
    calls = []

    def leave(cb):
        if RANK == LAST and cb.iter == 1:
            calls.append(cb.epoch)
            raise CancelBatchException

    error, _ = fit(make_learner(Callback(after_backward=leave)))
    assert error is None, error
    assert calls == ([0, 1] if RANK == LAST else [])


class Flat(nn.Module):
    """A model that cannot run on a batch without samples."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2).double()

    def forward(self, x):
        return self.linear(x.view(x.size(0), 2, -1).view(x.size(0), -1))


@on_ranks
def test_a_model_that_cannot_run_without_samples_is_trained_as_on_one_process():
    def flat():
        torch.manual_seed(0)
        dls = DataLoaders.from_datasets(make_data(8 * N + 1), bs=8)
        return Learner(dls, Flat(), nn.CrossEntropyLoss(), opt_func=torch.optim.SGD, lr=0.1)

    assert_equals_alone(flat, epochs=2)


class OfSequences(Flat):
    """A model of a packed sequence, or of a nested tensor, which cannot be cut as their targets can."""

    def forward(self, x):
        rows = unpack_sequence(x) if isinstance(x, PackedSequence) else x.unbind()
        return self.linear(torch.stack([row.sum(0) for row in rows]))


@on_ranks
@pytest.mark.parametrize("join", [pack_sequence, partial(torch.nested.nested_tensor, layout=torch.jagged)])
def test_a_rank_without_data_runs_inputs_that_cannot_be_cut_with_their_targets(join):
    def collate(samples):
        rows, labels = zip(*samples, strict=True)
        return join([x.expand(2, -1) for x in rows]), torch.stack(labels)

    def sequences():
        torch.manual_seed(0)
        dls = DataLoaders.from_datasets(list(make_data(8 * N + 1)), bs=8, collate_fn=collate)
        return Learner(dls, OfSequences(), nn.CrossEntropyLoss(), opt_func=torch.optim.SGD, lr=0.1)

    assert_equals_alone(sequences, epochs=2)


@on_ranks
def test_a_rank_without_data_takes_part_in_sparse_gradients():
    def embedding():
        torch.manual_seed(0)
        tokens, model = torch.arange(8 * N + 1) % 5, nn.Embedding(5, 2, sparse=True, dtype=torch.float64)
        dls = DataLoaders.from_datasets(TensorDataset(tokens, tokens % 2), bs=8)
        return Learner(dls, model, nn.CrossEntropyLoss(), opt_func=torch.optim.SGD, lr=0.1)

    assert_equals_alone(embedding, epochs=2)


# Errors


class Waits(Callback):
    """Meets the other ranks in a collective of the user's own."""

    order = 5

    def before_batch(self):
        if self.training:
            dist.all_reduce(torch.ones(1))


def ends_in_boom(event, learn, batch="step"):
    """All ranks end soon: the last one with its own error, the others with one that says where and why."""
    error, took = fit(learn)
    if RANK == LAST:
        assert type(error) is ValueError, error
    else:
        assert type(error) is PeerError, repr(error)
        step = 1 if event in INNER_EVENTS else 0
        text = str(error)
        assert text.startswith(f"rank {LAST} failed in {event} of Do (epoch "), text
        assert "): ValueError: boom\n" in text, text
        assert (f"(epoch 0, {batch} {step})" in text.partition("\n")[0]) == (event in INNER_EVENTS), text
    check_after(learn, took=took, alike=False)


@on_ranks
@pytest.mark.parametrize("event", mostly_slow(EVENTS, *QUICK[:2], slow=["after_loss", "before_step", "after_epoch"]))
def test_an_error_at_any_event_ends_all_ranks(event):
    ends_in_boom(event, make_learner(Do(event, throw(ValueError("boom")))))


@pytest.mark.slow
@on_ranks
def test_an_error_in_validation_ends_all_ranks():
    learn = make_learner(Do("before_batch", throw(ValueError("boom")), training=False))
    ends_in_boom("before_batch", learn, "evaluation batch")


@pytest.mark.slow
@on_ranks
def test_an_error_ends_ranks_that_wait_for_buffers():
    ends_in_boom("before_batch", make_learner(Do("before_batch", throw(ValueError("boom"))), norm=True))


@on_ranks
def test_an_error_ends_ranks_that_wait_in_a_collective_of_the_users_own():
    ends_in_boom("before_batch", make_learner([Do("before_batch", throw(ValueError("boom"))), Waits()]))


class Broken(nn.Linear):
    """Fails on the last rank in the fourth batch."""

    calls = 0

    def forward(self, x):
        if self.training and RANK == LAST and self.calls == 3:
            raise ZeroDivisionError("in the model")
        self.calls += 1
        return super().forward(x)


@on_ranks
def test_an_error_in_the_model_ends_all_ranks():
    learn = make_learner()
    learn.model[0] = Broken(4, 8).double()
    error, took = fit(learn)
    assert took < SOON
    assert type(error) is (ZeroDivisionError if RANK == LAST else PeerError), error
    assert RANK == LAST or f"rank {LAST} failed" in str(error)
    assert RANK == LAST or "ZeroDivisionError: in the model" in str(error)


@on_ranks
@pytest.mark.parametrize("event", mostly_slow(["cleanup_fit", "cleanup_train"], "cleanup_train"))
@pytest.mark.slow
def test_an_error_in_a_cleanup_ends_ranks_that_are_through_with_everything_else(event):
    learn = make_learner(Do(event, throw(ValueError("boom"))))
    error, took = fit(learn)
    assert type(error) is (ValueError if RANK == LAST else PeerError), error
    check_after(learn, took=took, alike=False)


@on_ranks
def test_the_same_error_on_all_ranks_is_every_ranks_own():
    learn = make_learner(Do("after_loss", throw(ValueError("boom")), ranks=tuple(range(N))))
    error, took = fit(learn)
    assert (type(error), took < SOON) == (ValueError, True), error
    check_after(learn, alike=False)


# Callbacks of rank 0 alone


class Alone(Callback):
    """Runs on rank 0 alone, where it makes a call after each step."""

    rank0_only = True

    def __init__(self, call=None):
        super().__init__()
        self.call, self.ran = call, []

    def before_fit(self):
        self.ran.append(RANK)

    def after_step(self):
        if self.call is not None:
            self.call()


COLLECTIVES = {
    "distributed.barrier": distributed.barrier,
    "torch.distributed (allreduce_)": lambda: dist.all_reduce(torch.ones(1)),
    "torch.distributed (barrier)": dist.barrier,
}


@on_ranks
def test_a_callback_of_rank_0_alone_runs_there_only():
    learn = make_learner(alone := Alone())
    error, _ = fit(learn)
    assert error is None, error
    assert alone.ran == ([0] if RANK == 0 else [])


@on_ranks
@pytest.mark.parametrize(
    "name", mostly_slow(COLLECTIVES, "torch.distributed (allreduce_)", slow=["distributed.barrier"])
)
def test_a_callback_of_rank_0_alone_may_not_communicate_by_whatever_name(name):
    learn = make_learner(Alone(COLLECTIVES[name]))
    error, took = fit(learn)
    assert took < SOON
    assert f"Alone.after_step called {name}" in str(error), error
    assert type(error) is (RuntimeError if RANK == 0 else PeerError)


# Standstills, each in processes of its own


STANDSTILLS = {
    "stop": ("silent", "rank 1 came to a standstill in before_batch of Standstill (epoch 0, step 5): it is silent"),
    "slow": ("slow", "rank 1 came to a standstill in before_batch of Standstill (epoch 0, step 5): it is slow"),
    "wait": ("waits", "all ranks wait, in different calls"),
}


@pytest.mark.soak
@pytest.mark.parametrize("how", STANDSTILLS)
def test_a_standstill_is_explained_and_ends_the_run(how):
    state, error = STANDSTILLS[how]
    text = standstill(how, 1)
    assert re.search(r"rank 0 waits +\d+ s since before_batch of \w+ \(epoch 0, step 5\)", text), text
    assert re.search(rf"rank 1 {state} +\d+ s since before_batch of Standstill \(epoch 0, step 5\)", text), text
    assert ("not arrived: rank 1" in text) == (how != "wait"), text
    assert "rank 0's stack:" in text
    assert ("rank 1's stack:" in text) == (how != "stop"), text
    assert "time.sleep(600)" in text or how != "slow"
    assert text.count("no rank has moved on for 4 s") == 1
    assert error in text


@pytest.mark.soak
def test_a_standstill_of_the_rank_that_hosts_the_store_is_told():
    text = standstill("stop", 0)
    assert re.search(r"rank 0 silent +\d+ s since before_batch of Standstill \(epoch 0, step 5\)", text), text
    assert "rank 0 came to a standstill in before_batch of Standstill (epoch 0, step 5): it is silent" in text


def standstill(how, who):
    """What the launcher prints of such a run, which must fail, and end soon."""
    command = [sys.executable, "-m", "learnerkit.launch", "--nproc", "2", "--grace", "0.5"]
    start = time.monotonic()
    done = subprocess.run(
        [*command, str(SCRIPTS / "standstill.py"), how, str(who)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    assert in_time(time.monotonic() - start, 40)
    return done.stderr


def test_a_device_without_a_number_is_that_of_the_local_rank(monkeypatch):
    class Stop(Exception):
        pass

    def stop(*args, **kwargs):
        raise Stop

    learn, chosen = make_learner(), []
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(distributed, "default_device", lambda: torch.device("cuda", 3))
    monkeypatch.setattr(distributed, "join", stop)
    for device in ("cuda", "cuda:1"):
        learn.dls._device = torch.device(device)
        with pytest.raises(Stop), Agreement(learn).run("fit", 5):
            pass
    assert chosen == [3, 1]
