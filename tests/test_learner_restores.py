"""Whatever happens in a run, things are put back, by every callback that was entered."""

import pytest
import torch
from helpers import (
    CANCELS,
    FIT,
    LEVEL_OF,
    assert_same_state,
    make_data,
    make_learner,
    make_model,
    mostly_soak,
    notes,
    raising,
    spy,
    state_of,
    words,
)
from torch import nn
from torch.utils.data import DataLoader

from learnerkit import Callback, CancelFitException, DataLoaders, distributed, mae
from learnerkit.events import CancelException, Event


class Meddler(Callback):
    "Changes what a callback may change, at every level, and puts its own changes back in its cleanups."

    order = 5

    class Wrapped(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *xb):
            return self.module(*xb)

    def before_fit(self):
        learn = self.learn
        self.model, self.loaders, self.logger = learn.model, list(learn.dls.loaders), learn.logger
        learn.model = self.Wrapped(learn.model)
        learn.dls.loaders[:] = [list(dl) for dl in learn.dls.loaders]
        learn.logger = lambda row: None

    def cleanup_fit(self):
        learn = self.learn
        learn.model, learn.dls.loaders[:], learn.logger = self.model, self.loaders, self.logger

    def before_batch(self):
        self.run_valid = not self.run_valid
        first = next(m for m in self.learn.model.modules() if isinstance(m, nn.Linear))
        first.train(not first.training)

    def __init__(self):
        super().__init__()
        self.model = self.loaders = self.logger = None


def a_learner_at_rest(cbs=()):
    """A learner after a fit, with shuffled data, some modules in eval mode."""
    data, valid = make_data(8), make_data(4, seed=1)
    dls = DataLoaders(DataLoader(data, 4, shuffle=True), DataLoader(valid, 4), device="cpu")
    learn = make_learner(dls, make_model(dropout=0.5), metrics=mae, cbs=cbs)
    learn.fit(1)
    learn.model.train()
    learn.model[2].eval()
    return learn


def trigger(event):
    """A callback that makes an `after_cancel_x` event happen."""
    if not event.startswith("after_cancel_"):
        return []
    level = event.removeprefix("after_cancel_")
    cancel = next(c for c, name in LEVEL_OF.items() if name == level)
    return [raising(f"before_{level}", cancel)]


HEARD = [event for event in Event if event != "after_create"]


ERRORS = {
    "errors": [ValueError("x"), KeyboardInterrupt(), *CANCELS[::3]],
    "other cancels": [cancel for i, cancel in enumerate(CANCELS) if i % 3],
}


@pytest.mark.parametrize("errors", mostly_soak(ERRORS, "errors"))
@pytest.mark.parametrize("event", HEARD)
def test_everything_is_put_back_wherever_a_fit_ends(event, errors):
    learn = a_learner_at_rest()
    for error in ERRORS[errors]:
        check_what_is_put_back(learn, event, error)


def check_what_is_put_back(learn, event, error):
    before = state_of(learn)
    log, seen = [], []
    culprit = raising(event, error, lambda cb: seen.append(cb.task) or True, order=20)
    escaped = None
    try:
        learn.fit(
            2, cbs=[spy(log, "first", order=-99), Meddler(), culprit, *trigger(event), spy(log, "last", order=99)]
        )
    except (ValueError, KeyboardInterrupt, CancelException) as e:
        escaped = e
    assert seen[0] == "fit"
    assert_same_state(learn, before, ended_well=escaped is None)
    assert learn.task is None
    if not (isinstance(error, type) and issubclass(error, CancelException)):
        assert escaped is error
        error.__notes__ = []
    # What was entered was cleaned up, in reverse order.
    for label in ("first", "last"):
        mine = [e for name, e in log if name == label]
        depth = []
        for e in mine:
            if e.startswith("before_") and f"cleanup_{e[7:]}" in list(Event):
                depth.append(e[7:])
            elif e.startswith("cleanup_"):
                assert depth.pop() == e[8:]
        assert depth == []
    ends = [name for name, e in log if e == "cleanup_fit"]
    assert ends in (["last", "first"], ["first"])  # the last one is not entered if the culprit raised before it
    # The next fit works, as if nothing had been.
    learn.fit(1)
    assert len(learn.recorder.values) == 1
    assert_same_state(learn, before, ended_well=True)


@pytest.mark.parametrize("event", [e for e in HEARD if "backward" not in e and "step" not in e and "train" not in e])
def test_everything_is_put_back_wherever_an_evaluation_ends(event):
    learn = a_learner_at_rest()
    before, history = state_of(learn), (learn.recorder.values, list(learn.recorder.losses))
    for evaluate in (learn.validate, learn.get_preds):
        culprit = raising(event, KeyError("x"), order=20)
        with pytest.raises(KeyError):
            evaluate(cbs=[Meddler(), culprit, *trigger(event)])
        assert_same_state(learn, before)
        assert (learn.recorder.values, learn.recorder.losses) == history
    learn.fit(1)


@pytest.mark.parametrize("training", [True, False])
def test_ctrl_c_in_the_model_ends_a_fit_cleanly(training, ctrl_c):
    class Interrupted(nn.Linear):
        armed = False

        def forward(self, x):
            if self.armed and torch.is_grad_enabled() is training:
                ctrl_c()
            return super().forward(x)

    log = []
    learn = make_learner(model=Interrupted(4, 1), cbs=spy(log))
    learn.fit(1)
    before = state_of(learn)
    Interrupted.armed = True
    log.clear()
    with pytest.raises(KeyboardInterrupt) as e:
        learn.fit(1, cbs=Meddler())
    assert notes(e.value) == []
    cut = FIT[: FIT.index("before_train" if training else "before_validate") + 2]
    level = "train" if training else "validate"
    assert log == [*cut, "cleanup_batch", f"cleanup_{level}", "cleanup_epoch", "cleanup_fit"]
    assert_same_state(learn, before)
    Interrupted.armed = False
    learn.fit(1)
    assert len(learn.recorder.values) == 1


def test_an_error_of_the_loader_ends_a_fit_cleanly():
    class Loader(list):
        def __iter__(self):
            yield from super().__iter__()
            raise OSError("the disk")

    batches = Loader(list(DataLoader(make_data(), 4)))
    learn = make_learner(DataLoaders(batches, device="cpu"))
    before = state_of(learn)
    with pytest.raises(OSError, match="the disk"):
        learn.fit(1)
    assert_same_state(learn, before | {"attributes": before["attributes"] | {"opt": learn.opt}})


def test_every_cleanup_runs_in_reverse_order_even_if_others_fail():
    log = []

    def fail(label, error):
        def hook(cb):
            log.append(label)
            raise error

        return Callback(cleanup_fit=hook, cleanup_batch=lambda cb: None)

    first, second = ValueError("first to fail"), KeyError("second to fail")
    cbs = [spy(log, "a", ["cleanup_fit"]), fail("b", second), spy(log, "c", ["cleanup_fit"]), fail("d", first)]
    cbs.append(spy(log, "e", ["cleanup_fit"]))
    learn = a_learner_at_rest()
    before = state_of(learn)
    with pytest.raises(ValueError, match="first to fail") as e:
        learn.fit(1, cbs=cbs)
    assert log == [("e", "cleanup_fit"), "d", ("c", "cleanup_fit"), "b", ("a", "cleanup_fit")]
    assert notes(e.value) == [
        "raised in Callback.cleanup_fit",
        "then Callback.cleanup_fit failed too: KeyError: 'second to fail'",
    ]
    assert_same_state(learn, before)


def test_a_failing_cleanup_does_not_hide_the_error_that_came_before():
    log = []
    cbs = [
        spy(log, "a"),
        raising("after_loss", OSError("the cause")),
        raising("cleanup_train", ValueError("then this")),
    ]
    learn = a_learner_at_rest()
    before = state_of(learn)
    with pytest.raises(OSError, match="the cause") as e:
        learn.fit(1, cbs=cbs)
    assert notes(e.value) == [
        "raised in Callback.after_loss",
        "then Callback.cleanup_train failed too: ValueError: then this",
    ]
    assert [event for _, event in log][-4:] == words("cleanup_batch cleanup_train cleanup_epoch cleanup_fit")
    assert_same_state(learn, before)


def test_a_cancelled_level_with_a_failing_cleanup_is_an_error():
    cbs = [raising("after_loss", CancelFitException), raising("cleanup_epoch", ValueError("lost file"))]
    with pytest.raises(ValueError, match="lost file") as e:
        make_learner(cbs=cbs).fit(1)
    assert notes(e.value) == ["raised in Callback.cleanup_epoch"]


def test_only_callbacks_that_were_entered_clean_up():
    log = []
    cbs = [
        spy(log, "entered", ["before_fit", "cleanup_fit"]),
        spy(log, "has no before", ["cleanup_fit"]),
        raising("before_fit", ValueError("stop")),
        spy(log, "after it", ["before_fit", "cleanup_fit"]),
        spy(log, "after it, without before", ["cleanup_fit"]),
    ]
    learn = make_learner(cbs=cbs)
    with pytest.raises(ValueError, match="stop"):
        learn.fit(1)
    assert log == [("entered", "before_fit"), ("has no before", "cleanup_fit"), ("entered", "cleanup_fit")]


def test_a_callback_whose_before_failed_half_way_cleans_up_too():
    class Half(Callback):
        def before_fit(self):
            self.opened = True
            raise ValueError("half-way")

        def cleanup_fit(self):
            self.opened = False

    cb = Half()
    learn = make_learner(cbs=cb)
    with pytest.raises(ValueError, match="half-way"):
        learn.fit(1)
    assert cb.opened is False


def test_a_cleanup_may_not_communicate(monkeypatch):
    learn = make_learner(cbs=Callback(cleanup_fit=lambda cb: distributed.barrier()))
    learn.fit(1)  # on one process there is nobody to wait for
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"Callback.cleanup_fit called distributed.barrier"):
        learn.validate(cbs=raising("before_fit", CancelFitException, order=99))


def test_fit_does_not_run_inside_fit():
    learn = make_learner(cbs=Callback(after_batch=lambda cb: cb.learn.fit(1)))
    before = state_of(learn)
    with pytest.raises(RuntimeError, match="fit was called during 'fit'"):
        learn.fit(1)
    assert_same_state(learn, before | {"attributes": before["attributes"] | {"opt": learn.opt}})
    learn.remove_cb(Callback)
    make_learner().fit(1)
