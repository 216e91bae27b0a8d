"""Cancels, Ctrl-C and errors on one rank: all ranks leave together, alike, soon, and the next fit works.

Arguments: the parts to check (cancels, numbers, others, late, errors, alone), by default each; `all` for more of them.
"""

import os
import signal
import sys
import time
import warnings

import torch
import torch.distributed as dist
from checking import leave, run
from torch import nn
from torch.utils.data import TensorDataset

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
    Event,
    GradientAccumulation,
    Learner,
    PeerError,
    world,
)
from learnerkit.events import INNER_EVENTS
from learnerkit.parallel.loaders import split_evenly

RANK, N = world.rank(), world.world_size()
LAST = N - 1
EVENTS = [e for e in Event if e.startswith(("before_", "after_")) and "cancel" not in e and e != "after_create"]
TRAINING_ONLY = ("before_backward", "after_backward", "before_step", "after_step")
OPTIONS = {"split_batches": True, "timeout": 20, "sync_bn": False}
SOON = 15  # seconds, where none waits for that timeout; a second on an idle machine


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


class Do(Callback):
    """Does something once, on some ranks, at an event: in the second batch of the first epoch if it is of a batch."""

    def __init__(self, event, action, ranks=(LAST,), training=True, order=0):
        super().__init__(order=order, **{event: lambda self: self.act()})
        self.event, self.action, self.ranks, self.in_training, self.done = event, action, ranks, training, False

    def act(self):
        learn = self.learn
        if self.done or RANK not in self.ranks:
            return
        if self.event in INNER_EVENTS and (learn.training, learn.epoch, learn.iter) != (self.in_training, 0, 1):
            return
        self.done = True
        self.action()


def throw(error):
    def action():
        raise error

    return action


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def weights(learn):
    return [p.detach().clone() for p in learn.model.parameters()]


def fit(learn, epochs=2, **options):
    """(error or None, seconds) of a fit."""
    start, error = time.monotonic(), None
    try:
        with learn.distrib_ctx(**OPTIONS | options), learn.no_logging():
            learn.fit(epochs)
    except (Exception, KeyboardInterrupt) as e:
        error = e
    return error, time.monotonic() - start


def check_after(learn, what, alike=True, took=0.0):
    """The ranks agree on everything, and can go on."""
    assert took < SOON, (what, took)
    assert learn._agreement is None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if alike:
        facts = (str(weights(learn)), learn.recorder.values, learn.recorder.losses, learn.recorder.iters)
        assert world.same_everywhere(facts), (what, facts)
        assert all(p.grad is None for p in learn.model.parameters()), what
    learn.remove_cbs(Do)
    error, _ = fit(learn, 1)
    assert error is None, (what, error)
    assert world.same_everywhere(str(weights(learn))), what
    assert len(learn.recorder.values) == 1


def check_cancels():
    """At any event of training and validation, whoever comes before or after."""
    kinds = [CancelFitException, CancelEpochException, CancelTrainException, CancelValidException, KeyboardInterrupt]
    for kind in kinds:
        for event in EVENTS:
            for training in (True, False) if event in INNER_EVENTS and event not in TRAINING_ONLY else (True,):
                for order in (0, 70) if "all" in sys.argv else (0,):
                    what = f"{kind.__name__} in {event} {'training' if training else 'validation'} order {order}"
                    action = interrupt if kind is KeyboardInterrupt else throw(kind())
                    learn = make_learner(Do(event, action, training=training, order=order))
                    error, took = fit(learn)
                    errors = world.all_gather(type(error).__name__)
                    assert len(set(errors)) == 1, (what, errors)
                    # What no level takes comes out, as on one process.
                    assert errors[0] in ("NoneType", kind.__name__), (what, errors)
                    if kind is CancelFitException:
                        assert error is None
                    check_after(learn, what, took=took, alike=error is None)


def assert_equals_alone(make, epochs):
    """The learner that `make` makes ends with the same weights on all ranks together and on one process."""
    found = []
    for way in (fit, lambda learn, epochs: learn.fit(epochs)):
        learn = make()
        with warnings.catch_warnings(), learn.no_logging():
            warnings.simplefilter("ignore")  # each process trains alone here, which is meant
            way(learn, epochs)
        found.append(weights(learn))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


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


def check_numbers():
    """What weighs nothing, what is stepped: equal to a loop by hand."""
    steps = seen_steps()
    plain = by_hand(steps)
    without = [list(rows) for rows in steps]
    pieces = split_evenly(steps[1], N, 1)
    without[1] = sum(pieces[:LAST], [])  # the last rank's part of the second step weighs nothing
    cases = [
        (CancelBatchException, event, by_hand(without))
        for event in ("before_batch", "after_pred", "after_loss", "before_backward")
    ]
    cases += [(CancelBackwardException, "before_backward", by_hand(without))]
    # Reduced before the cancel: the others have this rank's part already, and go on with it.
    cases += [(CancelBatchException, event, plain) for event in ("after_backward", "before_step", "after_step")]
    cases += [(CancelStepException, "before_step", plain)]
    cases += [(CancelFitException, event, by_hand(steps[:1])) for event in ("before_batch", "after_loss")]
    cases += [(CancelFitException, event, by_hand(steps[:2])) for event in ("before_step", "after_step", "after_batch")]
    for kind, event, expected in cases:
        for order in (0, 70):
            learn = make_learner(Do(event, throw(kind()), order=order))
            error, _ = fit(learn, 1)
            assert error is None, (kind, event, error)
            for a, b in zip(weights(learn), expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=f"{kind.__name__} {event} {order}")
    # All ranks alike: as on one process.
    everyone = tuple(range(N))
    skipped = [rows for i, rows in enumerate(steps) if i != 1]
    for kind, event, expected in (
        (CancelBatchException, "before_batch", by_hand(skipped)),
        (CancelStepException, "before_step", by_hand(skipped)),
        (CancelFitException, "before_step", by_hand(steps[:1])),
    ):
        learn = make_learner(Do(event, throw(kind()), ranks=everyone))
        error, _ = fit(learn, 1)
        assert error is None, (kind, event, error)
        for a, b in zip(weights(learn), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=f"{kind.__name__} {event} on all ranks")

    class Accumulate(Callback):
        """Accumulation as users write it: no step after every other batch."""

        def after_backward(self):
            if self.iter % 2 == 0:
                raise CancelBatchException

    for weight in (None, torch.tensor([0.2, 0.9], dtype=torch.float64)):

        def accumulating(weight=weight):
            learn = make_learner(Accumulate())
            learn.loss_func = nn.CrossEntropyLoss(weight=weight)
            return learn

        assert_equals_alone(accumulating, epochs=1)
    # A cancel in the middle of a group.
    for event in ("before_batch", "after_pred", "after_backward", "after_batch"):
        learn = make_learner([Do(event, throw(CancelTrainException())), GradientAccumulation(n_batches=4)])
        error, took = fit(learn)
        assert error is None, (event, error)
        check_after(learn, f"CancelTrain in {event} of a group", took=took)


class Clip(Callback):
    """Changes gradients late in `before_step`."""

    order = 60

    def before_step(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)


class Meets(Callback):
    """Talks to the other ranks after each training batch, and validates in the middle of training."""

    order = 20

    def after_batch(self):
        if self.training:
            world.reduce(1)
            if self.iter == 1:
                self.learn.validate()


class Flat(nn.Module):
    """A model that cannot run on a batch without samples."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2).double()

    def forward(self, x):
        return self.linear(x.view(x.size(0), 2, -1).view(x.size(0), -1))


def check_others():
    """Other callbacks go on with what a cancel on one rank has stopped there; cleanups; awkward models."""
    everyone = tuple(range(N))
    for kind, event in ((CancelStepException, "before_step"), (CancelBatchException, "after_backward")):
        learn = make_learner([Do(event, throw(kind())), Clip()])
        error, took = fit(learn)
        assert error is None, (kind, error)
        check_after(learn, f"{kind.__name__} before a clip", took=took)

        def cancelled(event=event, kind=kind):
            return make_learner([Do(event, throw(kind()), ranks=everyone), Clip()])

        assert_equals_alone(cancelled, epochs=2)
    for kind in (CancelFitException, CancelTrainException, CancelBatchException, KeyboardInterrupt):
        for event in ("after_batch", "after_step", "before_step"):
            for late in ([], [Late()]):
                action = interrupt if kind is KeyboardInterrupt else throw(kind())
                learn = make_learner([Do(event, action, order=5), Meets(), *late])
                error, took = fit(learn)
                assert type(error) in (type(None), KeyboardInterrupt), (kind, event, error)
                check_after(learn, f"{kind.__name__} in {event} before a meeting", took=took, alike=error is None)
    learn = make_learner(Do("cleanup_train", throw(CancelFitException())))
    error, took = fit(learn)
    assert error is None, error
    check_after(learn, "a cancel in a cleanup", took=took)

    def flat():
        torch.manual_seed(0)
        dls = DataLoaders.from_datasets(make_data(8 * N + 1), bs=8)
        return Learner(dls, Flat(), nn.CrossEntropyLoss(), opt_func=torch.optim.SGD, lr=0.1)

    assert_equals_alone(flat, epochs=2)


class Late(Callback):
    """Flags are read a step later, as on an accelerator."""

    order = 12  # after the DistributedCallback

    def before_train(self):
        self.learn._gradient.reads_late = True


def check_late():
    """The same where the host must not wait for the device: all ranks leave at the same step, a step later."""
    kinds = [CancelFitException, CancelEpochException, CancelTrainException, KeyboardInterrupt]
    for kind in [*kinds, CancelBatchException]:
        for event in [e for e in EVENTS if e in INNER_EVENTS]:
            what = f"{kind.__name__} in {event}, flags read late"
            action = interrupt if kind is KeyboardInterrupt else throw(kind())
            learn = make_learner([Do(event, action), Late()])
            error, took = fit(learn)
            errors = world.all_gather(type(error).__name__)
            assert set(errors) <= {"NoneType", "KeyboardInterrupt"}, (what, errors)
            assert len(set(errors)) == 1, (what, errors)
            check_after(learn, what, took=took, alike=error is None)
    learn = make_learner(Late())
    error, _ = fit(learn, 1)
    assert error is None, error
    for a, b in zip(weights(learn), by_hand(seen_steps()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class Waits(Callback):
    """Meets the other ranks in a collective of the user's own."""

    order = 5

    def before_batch(self):
        if self.training:
            dist.all_reduce(torch.ones(1))


def check_errors():
    """An error at any event; the others may be waiting in the gradients' reduction, a broadcast or anything else."""
    for event in EVENTS:
        check_error(event, make_learner(Do(event, throw(ValueError("boom")))))
    check_error("before_batch", make_learner(Do("before_batch", throw(ValueError("boom")), training=False)))
    check_error("before_batch", make_learner(Do("before_batch", throw(ValueError("boom"))), norm=True))  # buffers
    check_error("before_batch", make_learner([Do("before_batch", throw(ValueError("boom"))), Waits()]))
    check_error("before_train", make_learner(Do("before_train", throw(ValueError("boom")))))

    class Broken(nn.Linear):
        def forward(self, x):
            if self.training and RANK == LAST and self.calls == 3:
                raise ZeroDivisionError("in the model")
            self.calls += 1
            return super().forward(x)

    learn = make_learner()
    learn.model[0] = Broken(4, 8).double()
    learn.model[0].calls = 0
    error, took = fit(learn)
    assert took < SOON
    assert type(error) is (ZeroDivisionError if RANK == LAST else PeerError), error
    assert RANK == LAST or f"rank {LAST} failed" in str(error)
    assert RANK == LAST or "ZeroDivisionError: in the model" in str(error)

    # In a cleanup, when the others are through with everything but theirs.
    for event in ("cleanup_fit", "cleanup_train"):
        learn = make_learner(Do(event, throw(ValueError("boom"))))
        error, took = fit(learn)
        assert type(error) is (ValueError if RANK == LAST else PeerError), (event, error)
        check_after(learn, f"an error in {event}", took=took, alike=False)

    # The same error on all ranks is every rank's own.
    learn = make_learner(Do("after_loss", throw(ValueError("boom")), ranks=tuple(range(N))))
    error, took = fit(learn)
    assert (type(error), took < SOON) == (ValueError, True), error
    check_after(learn, "an error on all ranks", alike=False)


def check_error(event, learn):
    error, took = fit(learn)
    what = f"an error in {event}"
    if RANK == LAST:
        assert type(error) is ValueError, (what, error)
    else:
        assert type(error) is PeerError, (what, repr(error))
        step = 1 if event in INNER_EVENTS else 0
        text = str(error)
        assert text.startswith(f"rank {LAST} failed in {event} of Do (epoch "), text
        assert "): ValueError: boom\n" in text, text
        assert event not in INNER_EVENTS or f"(epoch 0, step {step})" in text, text
    check_after(learn, what, took=took, alike=False)


def check_alone():
    """A callback of rank 0 alone: it runs there, and may not communicate, by whatever name."""
    ran = []

    class Alone(Callback):
        rank0_only = True

        def __init__(self, call=None):
            super().__init__()
            self.call = call

        def before_fit(self):
            ran.append(RANK)

        def after_step(self):
            if self.call is not None:
                self.call()

    learn = make_learner(Alone())
    error, _ = fit(learn)
    assert error is None, error
    assert ran == ([0] if RANK == 0 else [])
    calls = {
        "world.barrier": world.barrier,
        "torch.distributed (allreduce_)": lambda: dist.all_reduce(torch.ones(1)),
        "torch.distributed (barrier)": dist.barrier,
    }
    for name, call in calls.items():
        learn = make_learner(Alone(call))
        error, took = fit(learn)
        assert took < SOON
        assert f"Alone.after_step called {name}" in str(error), error
        assert type(error) is (RuntimeError if RANK == 0 else PeerError)


if __name__ == "__main__":
    fit(make_learner(), 1)  # the first one imports a lot, which takes seconds
    parts = ("cancels", "numbers", "others", "late", "errors", "alone")
    run(globals()[f"check_{part}"] for part in parts if part in sys.argv or not {*parts} & {*sys.argv})
    leave()
