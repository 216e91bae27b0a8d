"""The loop: cancels, what is put back whatever happens, seams, attributes, data of all shapes, bad input."""

import contextlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from fastcore.foundation import L
from helpers import (
    EPOCH,
    FIT,
    TRAIN_BATCH,
    VALID_BATCH,
    VALIDATE,
    make_classes,
    make_data,
    make_dls,
    make_learner,
    make_model,
    notes,
    raising,
    same_weights,
    spy,
    weights,
    words,
)
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

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
    OverfitBatch,
    ShortEpochCallback,
    accuracy,
    mae,
    mse,
    perplexity,
    rmse,
    world,
)
from learnerkit.events import CancelException, Event

CANCELS = [
    CancelBatchException,
    CancelBackwardException,
    CancelStepException,
    CancelTrainException,
    CancelValidException,
    CancelEpochException,
    CancelFitException,
]
LEVEL_OF = dict(zip(CANCELS, words("batch backward step train validate epoch fit"), strict=True))

# Cancels: the table of fastai, with our cleanups

UPTO_BACKWARD = words("before_batch after_pred after_loss before_backward")
VALID_ON = [*VALIDATE, "after_epoch", "cleanup_epoch"]
START, END = words("before_fit before_epoch before_train"), words("after_fit cleanup_fit")

TABLE = {
    # (the cancel, the event that raises it in the first batch): the events of an epoch of two batches and one
    (CancelBackwardException, "before_backward"): [
        *START,
        *UPTO_BACKWARD,
        *words("after_cancel_backward after_backward before_step after_step after_batch cleanup_batch"),
        *TRAIN_BATCH,
        *words("after_train cleanup_train"),
        *VALID_ON,
        *END,
    ],
    (CancelStepException, "before_step"): [
        *START,
        *UPTO_BACKWARD,
        *words("after_backward before_step after_cancel_step after_step after_batch cleanup_batch"),
        *TRAIN_BATCH,
        *words("after_train cleanup_train"),
        *VALID_ON,
        *END,
    ],
    (CancelBatchException, "after_pred"): [
        *START,
        *words("before_batch after_pred after_cancel_batch after_batch cleanup_batch"),
        *TRAIN_BATCH,
        *words("after_train cleanup_train"),
        *VALID_ON,
        *END,
    ],
    (CancelBatchException, "before_step"): [
        *START,
        *UPTO_BACKWARD,
        *words("after_backward before_step after_cancel_batch after_batch cleanup_batch"),
        *TRAIN_BATCH,
        *words("after_train cleanup_train"),
        *VALID_ON,
        *END,
    ],
    (CancelTrainException, "after_loss"): [
        *START,
        *words("before_batch after_pred after_loss cleanup_batch after_cancel_train after_train cleanup_train"),
        *VALID_ON,
        *END,
    ],
    (CancelValidException, "before_validate"): [
        *FIT[: FIT.index("before_validate") + 1],
        *words("after_cancel_validate after_validate cleanup_validate after_epoch cleanup_epoch"),
        *END,
    ],
    (CancelEpochException, "before_step"): [
        *START,
        *UPTO_BACKWARD,
        *words("after_backward before_step cleanup_batch cleanup_train after_cancel_epoch after_epoch cleanup_epoch"),
        *END,
    ],
    (CancelFitException, "after_backward"): [
        *START,
        *UPTO_BACKWARD,
        *words("after_backward cleanup_batch cleanup_train cleanup_epoch after_cancel_fit after_fit cleanup_fit"),
    ],
}


@pytest.mark.parametrize(("cancel", "event"), TABLE)
def test_what_follows_a_cancel(cancel, event):
    log = []
    learn = make_learner(cbs=[spy(log), raising(event, cancel, order=1)])
    log.clear()
    learn.fit(1)
    assert log == TABLE[cancel, event]


def test_a_cancelled_epoch_is_followed_by_the_next():
    log = []
    learn = make_learner(cbs=[spy(log), raising("before_train", CancelEpochException, order=1)])
    log.clear()
    learn.fit(2)
    cut = words("before_epoch before_train cleanup_train after_cancel_epoch after_epoch cleanup_epoch")
    assert log == ["before_fit", *cut, *EPOCH, *END]


def test_validation_batches_can_be_cancelled_and_validation_ended():
    log = []
    learn = make_learner(
        make_dls(valid=12),
        cbs=[
            spy(log),
            raising("after_pred", CancelBatchException, lambda cb: not cb.training and cb.iter == 0, order=1),
            raising("after_loss", CancelValidException, lambda cb: not cb.training and cb.iter == 1, order=1),
        ],
    )
    log.clear()
    learn.fit(1)
    assert log[log.index("before_validate") : -4] == words("""
        before_validate before_batch after_pred after_cancel_batch after_batch cleanup_batch
        before_batch after_pred after_loss cleanup_batch after_cancel_validate after_validate cleanup_validate
    """)


class Facts(Callback):
    "Notes, at the end of each training batch, whether a step was taken and whether gradients are left."

    order = 1000
    run_valid = False

    def __init__(self):
        super().__init__()
        self.steps, self.grads = [], []

    def before_train(self):
        self._weight = self.model[0].weight.detach().clone()

    def cleanup_batch(self):
        weight = self.model[0].weight
        self.steps.append(not torch.equal(weight, self._weight))
        self.grads.append(weight.grad is not None and bool(weight.grad.any()))
        self._weight = weight.detach().clone()


@pytest.mark.parametrize(
    ("cancel", "event", "stepped", "kept"),
    [
        (None, None, True, False),
        (CancelBackwardException, "before_backward", False, False),  # a step is taken, with no gradients to step along
        (CancelStepException, "before_step", False, False),
        (CancelBatchException, "before_step", False, True),  # that is how gradients accumulate
        (CancelBatchException, "after_backward", False, True),
        (CancelBatchException, "before_backward", False, False),
        (CancelBatchException, "after_step", True, True),
        (CancelBatchException, "after_batch", True, False),
        (CancelTrainException, "before_step", False, True),
        (CancelTrainException, "after_batch", True, False),
        (CancelEpochException, "before_step", False, True),
        (CancelFitException, "before_step", False, True),
        (CancelFitException, "after_step", True, True),
    ],
)
def test_what_a_cancel_leaves_of_step_and_gradients(cancel, event, stepped, kept):
    facts = Facts()
    learn = make_learner(cbs=[facts] + ([raising(event, cancel)] if cancel else []))
    learn.fit(1)
    assert facts.steps[0] is stepped
    assert facts.grads[0] is kept


def test_after_a_cancelled_backward_the_step_is_taken_with_the_gradients_there_are():
    def seed_gradients(cb):
        for p in cb.model.parameters():
            p.grad = torch.ones_like(p)
        raise CancelBackwardException

    learn = make_learner(make_dls(train=4), cbs=Callback(before_backward=seed_gradients))
    before = weights(learn.model)
    learn.fit(1)
    for name, value in learn.model.state_dict().items():
        torch.testing.assert_close(value, before[name] - 0.1)


def test_gradients_kept_by_a_cancelled_batch_join_those_of_the_next():
    whole = make_learner(make_dls(train=8, bs=8), loss_func=nn.MSELoss(reduction="sum"), lr=0.01)
    halves = make_learner(
        make_dls(train=8, bs=4),
        loss_func=nn.MSELoss(reduction="sum"),
        lr=0.01,
        cbs=raising("before_step", CancelBatchException),
    )
    whole.fit(1)
    halves.fit(1)
    for a, b in zip(whole.model.parameters(), halves.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("cancel", CANCELS)
def test_a_cancel_in_its_own_levels_last_event_just_ends_the_level(cancel):
    log = []
    event = f"after_{LEVEL_OF[cancel]}"
    learn = make_learner(cbs=[spy(log), raising(event, cancel, order=1)])
    log.clear()
    learn.fit(1)
    assert log == FIT


@pytest.mark.parametrize(
    ("cancel", "event"),
    [
        (CancelBatchException, "before_train"),
        (CancelBatchException, "after_epoch"),
        (CancelStepException, "after_loss"),
        (CancelStepException, "before_backward"),
        (CancelBackwardException, "before_step"),
        (CancelTrainException, "before_epoch"),
        (CancelTrainException, "after_validate"),
        (CancelValidException, "after_train"),
        (CancelValidException, "before_batch"),
        (CancelEpochException, "before_fit"),
        (CancelEpochException, "after_fit"),
    ],
)
def test_a_cancel_outside_its_level_escapes(cancel, event):
    log = []
    learn = make_learner(cbs=[spy(log), raising(event, cancel, order=1)])
    log.clear()
    with pytest.raises(cancel) as e:
        learn.fit(1)
    assert type(e.value) is cancel
    assert notes(e.value) == [f"raised in Callback.{event}"]
    assert log[-1] == "cleanup_fit"


def test_evaluation_is_cancelled_like_a_fit():
    for cancel, event in [(CancelValidException, "after_loss"), (CancelBatchException, "after_pred")]:
        learn = make_learner(make_dls(valid=8))
        expected = learn.validate()
        assert learn.validate(cbs=raising(event, cancel, lambda cb: cb.iter == 1)) != expected
        assert learn.validate() == expected


# Whatever happens, things are put back


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


COUNTERS = {"epoch", "n_epoch", "train_iter", "pct_train"}  # how far the last fit came: kept, as in fastai


def state_of(learn):
    """Everything that a run must leave as it was."""
    modules = list(learn.model.modules())
    samplers = [dl.sampler for dl in learn.dls.loaders if isinstance(dl, DataLoader)]
    return {
        "attributes": {k: v for k, v in vars(learn).items() if not k.startswith("_") and k not in COUNTERS | {"cbs"}}
        | {"loss_weighting": None},
        "model": learn.model,
        "modules": modules,
        "types": [type(m) for m in modules],
        "modes": [m.training for m in modules],
        "loaders": list(learn.dls.loaders),
        "samplers": samplers,
        "generators": [getattr(s, "generator", None) for s in samplers],
        "cbs": list(learn.cbs),
        "flags": [(cb.run, cb.run_train, cb.run_valid, set(vars(cb)) & {"run"}) for cb in learn.cbs],
        "owners": [cb.learn for cb in learn.cbs],
        "gradients": torch.is_grad_enabled(),
    }


def assert_same_state(learn, before, ended_well=False):
    """A run that ended well leaves the model in eval mode; all else is as it was."""
    now = state_of(learn)
    if ended_well:
        assert set(now.pop("modes")) == {False}
        before = {key: value for key, value in before.items() if key != "modes"}
    for key, value in before.items():
        if isinstance(value, dict):
            assert value.keys() == now[key].keys(), key
            assert [k for k in value if value[k] is not now[key][k] and value[k] != now[key][k]] == []
        else:
            assert value is now[key] or value == now[key], key


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


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyboardInterrupt(), *CANCELS], ids=lambda e: str(e) or type(e).__name__
)
@pytest.mark.parametrize("event", HEARD)
def test_everything_is_put_back_wherever_a_fit_ends(event, error):
    learn = a_learner_at_rest()
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


@pytest.mark.parametrize("verb", ["validate", "get_preds"])
@pytest.mark.parametrize("event", [e for e in HEARD if "backward" not in e and "step" not in e and "train" not in e])
def test_everything_is_put_back_wherever_an_evaluation_ends(event, verb):
    learn = a_learner_at_rest()
    before, history = state_of(learn), (learn.recorder.values, list(learn.recorder.losses))
    culprit = raising(event, KeyError("x"), order=20)
    with pytest.raises(KeyError):
        getattr(learn, verb)(cbs=[Meddler(), culprit, *trigger(event)])
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
    learn = make_learner(cbs=Callback(cleanup_fit=lambda cb: world.barrier()))
    learn.fit(1)  # on one process there is nobody to wait for
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"Callback.cleanup_fit called world.barrier"):
        learn.validate(cbs=raising("before_fit", CancelFitException, order=99))


def test_fit_does_not_run_inside_fit():
    learn = make_learner(cbs=Callback(after_batch=lambda cb: cb.learn.fit(1)))
    before = state_of(learn)
    with pytest.raises(RuntimeError, match="fit was called during 'fit'"):
        learn.fit(1)
    assert_same_state(learn, before | {"attributes": before["attributes"] | {"opt": learn.opt}})
    learn.remove_cb(Callback)
    make_learner().fit(1)


# Attributes during a fit


def test_attributes_during_a_fit():
    rows = []

    class Look(Callback):
        order = 1000

        def after_batch(self):
            learn = self.learn
            rows.append(
                (learn.task, learn.training, learn.n_epoch, learn.epoch, learn.n_iter, learn.iter, learn.batch_size)
            )
            assert learn.dl is learn.dls.loaders[0 if learn.training else 1]
            assert learn.xb == (learn.x,)
            assert learn.yb == (learn.y,)
            assert [t is b for t, b in zip((*learn.xb, *learn.yb), learn.batch, strict=True)] == [True, True]
            assert learn.output is learn.pred
            assert torch.equal(learn.loss, learn.loss_grad.detach())
            assert not learn.loss.requires_grad
            assert learn.loss_grad.requires_grad is learn.training
            assert learn.model.training is learn.training
            if learn.training:
                done = learn.epoch * 3 + learn.iter + 1
                assert learn.train_iter == done
                assert learn.pct_train == pytest.approx(done / 6)
                assert learn.smooth_loss == learn.recorder.losses[-1]

    learn = make_learner(make_dls(train=10, valid=4), cbs=Look())
    learn.fit(2)
    train = [("fit", True, 2, e, 3, i, size) for e in range(2) for i, size in enumerate((4, 4, 2))]
    valid = [("fit", False, 2, e, 1, 0, 4) for e in range(2)]
    assert rows == [*train[:3], valid[0], *train[3:], valid[1]]
    for name in ("dl", "batch", "pred", "output", "loss", "loss_grad", "task"):
        assert getattr(learn, name) is None
    assert (learn.xb, learn.yb) == ((), ())


def test_the_final_record():
    learn = make_learner(metrics=mae)
    assert learn.final_record == []
    learn.fit(2)
    assert learn.final_record == learn.recorder.values[-1]
    assert len(learn.final_record) == 3


def test_a_learner_and_its_data_tell_what_is_in_them():
    learn = make_learner(make_dls(train=10), metrics=[mae, perplexity], opt_func=partial(AdamW, lr=0.5), lr=None)
    learn.model[0].requires_grad_(False)
    data = "train: 10 samples in 3 batches of 4, valid: 4 samples in 1 batch of 4, device: cpu"
    assert repr(learn.dls) == f"DataLoaders({data})"
    assert repr(learn).splitlines() == [
        "Learner",
        "  model      Sequential, 37 parameters, 30 of them frozen",
        f"  data       DataLoaders({data})",
        "  loss       MSELoss",
        "  optimizer  AdamW, lr 0.5",
        "  metrics    mae, perplexity",
        "  callbacks  TrainEvalCallback, Recorder, ProgressCallback",
    ]


def test_what_tells_little_of_itself_is_told_too():
    class Own(nn.Module):
        pass

    class Unsized:
        def __iter__(self):
            return iter([])

    learn = Learner(DataLoaders(Unsized(), None, [1, 2]), Own(), opt_func=lambda params, lr: None, default_cbs=False)
    assert repr(learn.dls) == "DataLoaders(train: Unsized, 2: 2 batches, device: chosen at first use)"
    assert "loss       the model's own" in repr(learn)
    assert "optimizer  <lambda>, lr 0.001" in repr(learn)
    assert "metrics    none" in repr(learn)
    assert "callbacks  none" in repr(learn)
    assert "metrics    a, b" in repr(make_learner(metrics={"a": mae, "b": mae}))
    assert "loss       function" not in repr(make_learner(loss_func=F.mse_loss))


def test_metrics_come_in_any_collection():
    for kind in (list, tuple, L, iter):
        learn = make_learner(metrics=kind([mae, mse]))
        for _ in range(2):
            learn.fit(1)
            assert learn.recorder.metric_names[3:5] == ["mae", "mse"]
        assert len(learn.validate()) == 3
    learn = make_learner(metrics=mae)
    learn.metrics.append(mse)
    assert len(learn.validate()) == 3
    learn.metrics = rmse
    assert len(learn.validate()) == 2
    assert "metrics    rmse" in repr(learn)


def test_tasks_have_names():
    tasks = set()
    learn = make_learner(cbs=Callback(after_pred=lambda cb: tasks.add(cb.task)))
    learn.fit(1)
    learn.validate()
    learn.get_preds()
    assert tasks == {"fit", "validate", "predict"}


def test_several_inputs_and_targets():
    seen = []

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, a, b):
            return self.linear(a + b)

    data = TensorDataset(*(torch.randn(8, 4) for _ in range(2)), *(torch.randn(8, 1) for _ in range(2)))
    dls = DataLoaders(DataLoader(data, 4), n_inp=2, device="cpu")
    look = Callback(after_pred=lambda cb: seen.append((len(cb.x), len(cb.y), cb.x is cb.xb, cb.y is cb.yb)))
    learn = make_learner(dls, Two(), lambda pred, a, b: F.mse_loss(pred, a) + F.mse_loss(pred, b), cbs=look)
    learn.fit(1)
    assert seen == [(2, 2, True, True)] * 2


# Evaluation in mid-fit


NAMES = words("dl batch batch_size xb yb pred output loss loss_grad iter n_iter training task epoch n_epoch train_iter")


@pytest.mark.parametrize("verb", ["validate", "get_preds"])
@pytest.mark.parametrize(
    ("event", "training"),
    [("before_batch", True), ("after_pred", True), ("before_step", True), ("after_batch", True), ("after_pred", False),
     ("after_batch", False), ("before_validate", None), ("after_epoch", None), ("before_train", None)],
)  # fmt: skip
def test_evaluation_in_mid_fit_changes_nothing(verb, event, training):
    def run(ask):
        def hook(cb):
            if cb.task == "fit" and training in (None, cb.training):
                learn = cb.learn
                before = {name: getattr(learn, name) for name in NAMES}
                modes = [m.training for m in learn.model.modules()]
                for ds_idx in (0, 1):
                    if ask:
                        getattr(learn, verb)(ds_idx)
                assert [name for name in NAMES if getattr(learn, name) is not before[name]] == []
                assert [m.training for m in learn.model.modules()] == modes

        torch.manual_seed(1)
        data, valid = make_data(12), make_data(4, seed=1)
        dls = DataLoaders(
            DataLoader(data, 4, shuffle=True), DataLoader(valid, 2, shuffle=verb == "validate"), device="cpu"
        )
        learn = make_learner(dls, make_model(dropout=0.3), metrics=mae, opt_func=AdamW, cbs=Callback(**{event: hook}))
        learn.fit(2)
        return learn

    asked, plain = run(True), run(False)
    assert same_weights(asked.model, plain.model)
    assert asked.recorder.values == plain.recorder.values
    assert asked.recorder.losses == plain.recorder.losses
    assert asked.recorder.lrs == plain.recorder.lrs


def test_evaluation_in_mid_fit_is_what_it_is_outside():
    found = {}

    def hook(cb):
        found["validate"], found["preds"] = cb.learn.validate(), cb.learn.get_preds()[0]

    learn = make_learner(make_dls(train=4), metrics=mae, cbs=Callback(after_step=hook))
    learn.fit(1)
    assert found["validate"] == learn.validate() == pytest.approx(learn.recorder.final_record[1:])
    assert torch.equal(found["preds"], learn.get_preds()[0])


def test_evaluation_leaves_the_recorder_alone():
    learn = make_learner(metrics=mae)
    learn.fit(2)
    kept = [list(getattr(learn.recorder, n)) for n in ("values", "losses", "lrs", "iters", "log", "history")]
    learn.validate()
    learn.get_preds()
    learn.validate(0)
    assert [list(getattr(learn.recorder, n)) for n in ("values", "losses", "lrs", "iters", "log", "history")] == kept


# Seams


def test_seams_are_called_inside_their_events():
    log = []

    class Seams(Learner):
        def _forward(self):
            log.append("_forward")
            super()._forward()

        def _loss(self):
            log.append("_loss")
            super()._loss()

        def _backward(self):
            log.append("_backward")
            super()._backward()

        def _step(self):
            log.append("_step")
            super()._step()

        def _zero_grad(self):
            log.append("_zero_grad")
            super()._zero_grad()

        def create_opt(self):
            log.append("create_opt")
            super().create_opt()

    learn = make_learner(make_dls(train=4), cls=Seams, cbs=spy(log))
    log.clear()
    learn.fit(1)
    batch = words("""
        before_batch _forward after_pred _loss after_loss before_backward _backward after_backward before_step _step
        after_step _zero_grad after_batch cleanup_batch
    """)
    assert log[: 4 + len(batch)] == ["create_opt", "before_fit", "before_epoch", "before_train", *batch]
    assert [s for s in log[4 + len(batch) :] if s.startswith("_") or "opt" in s] == ["_forward", "_loss"]


@pytest.mark.parametrize(
    ("name", "seam"),
    [("one_batch", "_forward, _loss, _backward"), ("_do_one_batch", "_forward"), ("_do_grad_opt", "_step"),
     ("all_batches", "before_train"), ("_do_epoch_train", "before_epoch"), ("_split", "n_inp"),
     ("__call__", "callback"), ("_end_cleanup", "cleanup_fit"), ("_set_device", "device=")],
)  # fmt: skip
def test_methods_that_fastai_would_call_are_refused_with_what_does_it_here(name, seam):
    class Mixin:
        pass

    setattr(Mixin, name, lambda self, *args: None)
    kind = type("Own", (Mixin, Learner), {})
    with fails(TypeError, rf"Mixin.{name} would never be called: it is a method of fastai's Learner. Here") as e:
        make_learner(cls=kind)
    assert seam in str(e.value)


def test_each_seam_replaces_what_it_names():
    class Own(Learner):
        def _forward(self):
            self.output = self.pred = self.model(self.x) * 2

        def _loss(self):
            self.loss_grad = self.pred.abs().mean()
            self.loss = self.loss_grad.detach() + 100

        def _backward(self):
            (self.loss_grad * 3).backward()

        def _step(self):
            for p in self.model.parameters():
                p.data -= 0.5 * p.grad

        def _zero_grad(self):
            for p in self.model.parameters():
                p.grad = None

    learn, model = make_learner(cls=Own), make_model()
    learn.fit(1)
    losses = []
    for x, _ in DataLoader(make_data(), 4):
        loss = (model(x) * 2).abs().mean()
        losses.append(loss.item() + 100)
        (loss * 3).backward()
        for p in model.parameters():
            p.data -= 0.5 * p.grad
            p.grad = None
    assert same_weights(learn.model, model)
    assert learn.recorder.values[0][0] == pytest.approx(sum(losses) / 2)


def test_a_loss_of_ones_own_needs_no_targets():
    class Own(Learner):
        def _loss(self):
            self.loss_grad = self.pred.pow(2).mean()
            self.loss = self.loss_grad.detach()

    learn = make_learner(DataLoaders(list(make_data().tensors[0].split(4)), device="cpu"), cls=Own)
    before = learn.validate(0)
    learn.fit(3)
    assert learn.validate(0)[0] < before[0]


class TwoOpts(Learner):
    def create_opt(self):
        self.opt = {
            "first": SGD(self.model[0].parameters(), lr=self.lr, momentum=0.9),
            "last": AdamW(self.model[3].parameters(), lr=self.lr),
        }


@pytest.mark.parametrize("returned", [False, True])
def test_a_dict_of_optimizers(returned):
    class Returning(TwoOpts):
        def create_opt(self):
            super().create_opt()
            opt, self.opt = self.opt, None
            return opt

    learn, model = make_learner(cls=Returning if returned else TwoOpts, lr=0.01), make_model()
    learn.fit(2)
    opts = SGD(model[0].parameters(), lr=0.01, momentum=0.9), AdamW(model[3].parameters(), lr=0.01)
    for _ in range(2):
        for x, y in DataLoader(make_data(), 4):
            F.mse_loss(model(x), y).backward()
            for opt in opts:
                opt.step()
                opt.zero_grad()
    assert same_weights(learn.model, model)
    assert list(learn.opt) == ["first", "last"]
    assert type(learn.opt["first"]) is SGD
    seen = []

    def look(cb):
        first, last = (opt.param_groups[0] for opt in cb.opt.values())
        assert first["lr"] == last["lr"]
        assert first["momentum"] == last["betas"][0]
        seen.append(first["lr"])

    learn.fit_one_cycle(1, 0.02, cbs=Callback(before_step=look))
    assert seen[0] == pytest.approx(0.02 / 25)


@pytest.mark.parametrize("made", [3, {}, {"a": 3}, None])
def test_create_opt_must_make_an_optimizer(made):
    with pytest.raises(TypeError, match="must be a torch optimizer, or a dict of them"):
        make_learner(opt_func=lambda groups, lr: made).fit(1)


def test_two_networks_trained_by_turns():
    class Adversarial(TwoOpts):
        "As in a GAN: the optimizers step by turns."

        def _step(self):
            self.opt["first" if self.iter % 2 else "last"].step()

    learn = make_learner(cls=Adversarial)
    before = weights(learn.model)
    learn.fit(1, cbs=raising("after_batch", CancelTrainException))
    now = learn.model.state_dict()
    assert torch.equal(now["0.weight"], before["0.weight"])
    assert not torch.equal(now["3.weight"], before["3.weight"])


# Against a loop written by hand: bit by bit

# As the learner makes it; torch's other implementations round differently, on one processor or another.
fused_sgd = partial(SGD, fused=True)


def by_hand(model, loader, epochs, opt, loss_func=F.mse_loss):
    """Train as anyone would without a library."""
    losses = []
    for _ in range(epochs):
        model.train()
        for x, y in loader:
            loss = loss_func(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
    return losses


OPTS = {
    "momentum": lambda params, lr: SGD(params, lr=lr, momentum=0.9),
    "AdamW": partial(AdamW, fused=True),  # which is what the learner chooses
    "AdamW with decay": lambda params, lr: AdamW(params, lr=lr, weight_decay=0.3),
}


@pytest.mark.parametrize("opt_func", OPTS.values(), ids=OPTS)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("bs", [4, 3])  # 3 leaves a short batch at the end
@pytest.mark.parametrize("with_valid", [False, True])
def test_a_fit_is_a_loop_by_hand(opt_func, dropout, bs, with_valid):
    data = make_data(8)
    valid = [DataLoader(make_data(4, seed=1), 2)] if with_valid else []
    learn = make_learner(
        DataLoaders(DataLoader(data, bs), *valid, device="cpu"),
        make_model(dropout=dropout),
        opt_func=opt_func,
        lr=0.02,
        metrics=mae,
    )
    model = make_model(dropout=dropout)
    opt = opt_func(model.parameters(), lr=0.02)
    torch.manual_seed(5)
    learn.fit(2)
    learn.fit(1)
    torch.manual_seed(5)
    losses = by_hand(model, DataLoader(data, bs), 3, opt) if dropout == 0 else by_hand_fits(model, data, bs, opt)
    assert same_weights(learn.model, model)
    sizes = [len(x) for x, _ in DataLoader(data, bs)]
    mean = sum(loss * n for loss, n in zip(losses[-len(sizes) :], sizes, strict=True)) / 8
    assert learn.recorder.values[-1][0] == pytest.approx(mean, rel=1e-6)


def by_hand_fits(model, data, bs, opt):
    return by_hand(model, DataLoader(data, bs), 2, opt) + by_hand(model, DataLoader(data, bs), 1, opt)


@pytest.mark.parametrize("from_datasets", [False, True])
@pytest.mark.parametrize("epochs", [(3,), (1, 2), (2, 1, 1)])
@pytest.mark.parametrize("bs", [4, 5])
def test_a_shuffled_fit_sees_the_order_of_a_loop_by_hand(from_datasets, bs, epochs):
    data, valid = make_data(13), make_data(6, seed=1)
    if from_datasets:
        dls = DataLoaders.from_datasets(data, valid, bs=bs, device="cpu")
    else:
        dls = DataLoaders(DataLoader(data, bs, shuffle=True), DataLoader(valid, bs), device="cpu")
    learn, model = make_learner(dls, lr=0.05), make_model()
    torch.manual_seed(7)
    for n_epoch in epochs:
        learn.fit(n_epoch)
    torch.manual_seed(7)
    by_hand(model, DataLoader(data, bs, shuffle=True), sum(epochs), fused_sgd(model.parameters(), lr=0.05))
    assert same_weights(learn.model, model)


def test_one_shuffled_epoch_with_dropout_is_a_loop_by_hand():
    learn, model = (
        make_learner(DataLoaders.from_datasets(make_data(12), bs=4), make_model(dropout=0.5)),
        make_model(dropout=0.5),
    )
    torch.manual_seed(7)
    learn.fit(1)
    torch.manual_seed(7)
    by_hand(model, DataLoader(make_data(12), 4, shuffle=True), 1, fused_sgd(model.parameters(), lr=0.1))
    assert same_weights(learn.model, model)


@pytest.mark.parametrize("from_datasets", [False, True])
def test_a_generator_of_ones_own_is_used_and_moves_on(from_datasets):
    data = make_data(12)

    def generator():
        return torch.Generator().manual_seed(11)

    if from_datasets:
        dls = DataLoaders.from_datasets(data, bs=4, device="cpu", generator=generator())
    else:
        dls = DataLoaders(DataLoader(data, 4, shuffle=True, generator=generator()), device="cpu")
    learn, model = make_learner(dls), make_model()
    learn.fit(2)
    torch.manual_seed(99)  # of no importance
    learn.fit(1)
    by_hand(model, DataLoader(data, 4, shuffle=True, generator=generator()), 3, fused_sgd(model.parameters(), lr=0.1))
    assert same_weights(learn.model, model)


def test_one_seed_one_run():
    def run(seed):
        torch.manual_seed(seed)
        dls = DataLoaders.from_datasets(make_data(12), bs=4, device="cpu")
        learn = make_learner(dls, make_model(dropout=0.5))
        learn.fit(2)
        return learn.model

    assert same_weights(run(3), run(3))
    assert not same_weights(run(3), run(4))


def test_two_fits_in_a_row_draw_different_orders():
    orders = []
    learn = make_learner(
        DataLoaders.from_datasets(make_data(64), bs=64, device="cpu"),
        cbs=Callback(before_batch=lambda cb: orders.append(cb.y.clone())),
    )
    learn.fit(2)
    learn.fit(1)
    assert not any(torch.equal(orders[a], orders[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


# Batches of all shapes


def test_nested_batches_reach_the_model_whole():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, parts):
            return self.linear(parts["a"][0] + parts["a"][1] + parts["b"])

    class Nesting(Dataset):
        def __init__(self):
            self.x, self.y = torch.randn(8, 3, 4), torch.randn(8, 1)

        def __len__(self):
            return 8

        def __getitem__(self, i):
            return {"a": (self.x[i, 0], self.x[i, 1]), "b": self.x[i, 2]}, self.y[i]

    sizes, data = [], Nesting()
    dls = DataLoaders(DataLoader(data, 3), DataLoader(data, 3), device="cpu")
    torch.manual_seed(1)
    learn = make_learner(dls, Nested(), metrics=mae, cbs=Callback(after_batch=lambda cb: sizes.append(cb.batch_size)))
    learn.fit(1)
    torch.manual_seed(1)
    model = Nested()
    by_hand(model, DataLoader(data, 3), 1, fused_sgd(model.parameters(), lr=0.1))
    assert same_weights(learn.model, model)
    assert sizes == [3, 3, 2] * 2
    preds, targets = learn.get_preds()
    assert preds.shape == (8, 1)
    assert torch.equal(targets, data.y)


def mapping_batches(n=8, bs=4):
    x, y = make_classes(n).tensors
    return [{"inputs": a, "labels": b} for a, b in zip(x.split(bs), y.split(bs), strict=True)]


class Transformer(nn.Module):
    "A model in the manner of transformers: keywords in, an object with logits and a loss out."

    def __init__(self, as_dict=False):
        super().__init__()
        self.as_dict = as_dict
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs, labels=None):
        logits = self.linear(inputs)
        found = {"logits": logits}
        if labels is not None:
            found["loss"] = F.cross_entropy(logits, labels) * 2
        return found if self.as_dict else SimpleNamespace(**found)


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("own_loss", [False, True])
def test_mapping_batches_go_to_the_model_as_keywords(as_dict, own_loss):
    seen = []

    def look(cb):
        seen.append((cb.batch_size, isinstance(cb.output, dict), tuple(cb.pred.shape), len(cb.yb), "labels" in cb.x))

    batches = mapping_batches()
    learn = Learner(
        DataLoaders(batches, batches, device="cpu"),
        Transformer(as_dict),
        None if own_loss else F.cross_entropy,
        opt_func=SGD,
        lr=0.1,
        metrics=accuracy,
        cbs=Callback(after_loss=look),
    )
    learn.fit(1)
    model = Transformer()
    opt = fused_sgd(model.parameters(), lr=0.1)
    for batch in batches:
        loss = F.cross_entropy(model.linear(batch["inputs"]), batch["labels"]) * (2 if own_loss else 1)
        loss.backward()
        opt.step()
        opt.zero_grad()
    assert same_weights(learn.model, model)
    assert seen == [(4, as_dict, (4, 3), 1, own_loss)] * 4
    preds, targets = learn.get_preds()
    assert torch.equal(targets, make_classes().tensors[1])
    torch.testing.assert_close(preds, model.linear(make_classes().tensors[0]).detach())
    assert learn.validate()[1] == pytest.approx(accuracy(preds, targets).item())


def test_target_keys_say_which_entries_are_targets():
    batches = [{"x": b["inputs"], "cls": b["labels"]} for b in mapping_batches()]

    class Keyed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            return self.linear(x)

    for keys in ("cls", ("cls",)):
        dls = DataLoaders(batches, batches, target_keys=keys, device="cpu")
        learn = Learner(dls, Keyed(), nn.CrossEntropyLoss())
        learn.fit(1)
        assert torch.equal(learn.get_preds()[1], make_classes().tensors[1])


def test_single_tensors_get_their_target_from_a_callback():
    class SelfSupervised(Callback):
        def before_batch(self):
            self.learn.yb = (self.x[:, :1],)

    x = make_data().tensors[0]
    dls = DataLoaders(DataLoader(x, 4), DataLoader(x, 4), device="cpu")
    learn = make_learner(dls, cbs=SelfSupervised(), metrics=mae)
    learn.fit(1)
    model = make_model()
    by_hand(model, [(b, b[:, :1]) for b in x.split(4)], 1, fused_sgd(model.parameters(), lr=0.1))
    assert same_weights(learn.model, model)


def test_single_tensors_can_be_predicted():
    x = make_data().tensors[0]
    learn = make_learner(DataLoaders(DataLoader(x, 4), DataLoader(x, 3), device="cpu"))
    preds, targets = learn.get_preds()
    torch.testing.assert_close(preds, learn.model(x).detach())
    assert targets is None


def test_a_callback_may_change_inputs_predictions_and_loss():
    class Change(Callback):
        run_valid = False

        def before_batch(self):
            self.learn.xb = (self.x + 1,)

        def after_pred(self):
            self.learn.pred = self.pred * 2

        def after_loss(self):
            self.learn.loss_grad = self.learn.loss_grad * 3
            self.learn.loss = self.learn.loss + 7

    learn, model = make_learner(make_dls(valid=None), cbs=Change()), make_model()
    learn.fit(1)
    losses = by_hand(
        model,
        [(x + 1, y) for x, y in DataLoader(make_data(), 4)],
        1,
        fused_sgd(model.parameters(), lr=0.1),
        lambda pred, y: F.mse_loss(pred * 2, y) * 3,
    )
    assert same_weights(learn.model, model)
    assert learn.recorder.values[0][0] == pytest.approx(sum(losses) / 6 + 7)


class Unsized:
    "A loader without length."

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def test_loaders_may_be_any_iterables():
    batches = [tuple(b) for b in DataLoader(make_data(), 4)]

    class Streaming(IterableDataset):
        def __iter__(self):
            return iter(make_data())

    expected = make_model()
    by_hand(expected, batches, 2, fused_sgd(expected.parameters(), lr=0.1))
    for loader in (batches, tuple(batches), Unsized(batches), DataLoader(Streaming(), 4)):
        learn = make_learner(DataLoaders(loader, device="cpu"))
        seen = []
        learn.fit(2, cbs=Callback(after_batch=lambda cb, seen=seen: seen.append((cb.n_iter, cb.pct_train)), order=1))
        assert same_weights(learn.model, expected)
        sized = hasattr(loader, "__len__") and not isinstance(loader, DataLoader)
        assert [pct for _, pct in seen] == ([0.25, 0.5, 0.75, 1.0] if sized else [0.0, 0.0, 0.5, 0.5])
        assert {n for n, _ in seen} == {2 if sized else None}


def test_start_epoch_runs_the_later_epochs_alone():
    whole = make_learner(DataLoaders.from_datasets(make_data(12), make_data(4, seed=1), bs=4, device="cpu"))
    torch.manual_seed(3)
    whole.fit(2)
    orders = {}

    def note(cb):
        orders.setdefault(cb.n_epoch, []).append((cb.epoch, cb.pct_train, cb.y.clone()))

    learn = make_learner(
        DataLoaders.from_datasets(make_data(12), make_data(4, seed=1), bs=4, device="cpu"),
        cbs=Callback(before_batch=lambda cb: cb.training and note(cb)),
    )
    torch.manual_seed(3)
    learn.fit(4)
    torch.manual_seed(3)
    full = orders.pop(4)
    learn.fit(4, start_epoch=2)
    part = orders.pop(4)
    assert [row[:2] for row in part] == [row[:2] for row in full[6:]]
    assert all(torch.equal(a[2], b[2]) for a, b in zip(part, full[6:], strict=True))
    assert [row for row in learn.recorder.values if len(row) == 2] == learn.recorder.values
    assert len(learn.recorder.values) == 2
    assert learn.recorder.log[0] == 3


def test_start_epoch_beyond_the_end_trains_nothing():
    learn = make_learner()
    before = weights(learn.model)
    learn.fit(2, start_epoch=2)
    assert same_weights(before, weights(learn.model))
    assert learn.recorder.values == []


# Bad input


def fails(error, match):
    return pytest.raises(error, match=match)


@pytest.mark.parametrize("wrong", [None, 3, make_data(), [1, 2]])
def test_learner_refuses_what_are_no_dataloaders(wrong):
    with fails(TypeError, r"dls is a \w+; pass DataLoaders\(train, valid\)"):
        Learner(wrong, make_model())


@pytest.mark.parametrize("wrong", [nn.Linear, None, "model", torch.sin])
def test_learner_refuses_what_is_no_model(wrong):
    with fails(TypeError, "pass an nn.Module"):
        Learner(make_dls(), wrong)
    if isinstance(wrong, type):
        with fails(TypeError, "not the class"):
            Learner(make_dls(), wrong)


@pytest.mark.parametrize("wrong", [nn.MSELoss, "mse", 3])
def test_learner_refuses_what_is_no_loss(wrong):
    with fails(TypeError, r"loss_func is .*; pass a function or a module"):
        Learner(make_dls(), make_model(), wrong)


@pytest.mark.parametrize("wrong", ["adam", None, 1e-3])
def test_learner_refuses_what_makes_no_optimizer(wrong):
    with fails(TypeError, "opt_func is .*; pass an optimizer class"):
        Learner(make_dls(), make_model(), nn.MSELoss(), opt_func=wrong)


@pytest.mark.parametrize("wrong", [3, object(), torch.sin])
def test_dataloaders_refuse_what_cannot_be_read(wrong):
    with fails(TypeError, "the training loader is a .*; pass a DataLoader or another iterable") as e:
        DataLoaders(wrong)
    assert type(wrong).__name__ in str(e.value)
    with fails(TypeError, "the validation loader is a "):
        DataLoaders([], wrong)


def test_dataloaders_refuse_a_dataset():
    with fails(TypeError, r"the training loader is a dataset \(TensorDataset\); use DataLoaders.from_datasets"):
        DataLoaders(make_data())


def norm_model():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def lone(n=9, bs=4, model=None, **kwargs):
    """A learner whose last training batch has a single sample."""
    dls = DataLoaders(DataLoader(make_data(n), bs, **kwargs), DataLoader(make_data(4), 4), device="cpu")
    return make_learner(dls, model or norm_model())


LONE = r"the training loader: its last batch has 1 of its 9 samples \(batches of 4\), .* drop_last=True"


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_last_batch_too_small_for_batch_norm_is_found_before_training(shuffle):
    learn = lone(shuffle=shuffle)
    before, state, log = weights(learn.model), torch.get_rng_state(), []
    with pytest.raises(ValueError, match=LONE):
        learn.fit(1, cbs=spy(log, events=["after_pred"]))
    assert log == []  # within the first forward pass
    assert same_weights(before, learn.model)  # statistics too
    assert learn.model.training
    with pytest.raises(ValueError, match=LONE):
        learn.lr_find(num_it=10, show_plot=False)
    with pytest.raises(ValueError, match=LONE):
        learn.fit(n_steps=3)
    with pytest.raises(ValueError, match=r"each of its batches has 1 sample.* larger batch size"):
        lone(bs=1).fit(1)
    torch.set_rng_state(state)
    with pytest.raises(ValueError, match=LONE):
        lone(shuffle=shuffle).fit(1, cbs=GradientAccumulation(n_batches=2))


class Pooled(nn.Module):
    """BatchNorm of images, and behind their pooling of single values."""

    def __init__(self, pooled):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3), nn.Linear(3, 1)
        self.pooled = nn.BatchNorm2d(3) if pooled else nn.Identity()

    def forward(self, x):
        return self.head(self.pooled(self.norm(self.conv(x[:, None, None])).mean((2, 3), keepdim=True)).flatten(1))


def test_a_batch_norm_of_images_takes_a_single_one():
    lone(model=Pooled(pooled=False)).fit(1)
    learn = lone(model=Pooled(pooled=True))
    before = weights(learn.model)
    with pytest.raises(ValueError, match=LONE):
        learn.fit(1)
    assert same_weights(before, learn.model)


@pytest.mark.parametrize(
    "fit",
    [
        lambda learn: learn.fit(n_steps=2),
        lambda learn: learn.fit(2, cbs=ShortEpochCallback(n=2)),
        lambda learn: learn.fit(2, cbs=OverfitBatch()),
        lambda learn: learn.fit(n_steps=1, cbs=GradientAccumulation(n_batches=2)),
        lambda learn: (learn.model[1].eval(), learn.fit(2)),
        lambda learn: learn.get_preds(0),
    ],
)
def test_a_last_batch_that_is_not_trained_on_does_no_harm(fit):
    fit(lone())


def test_a_batch_too_small_for_batch_norm_says_what_to_do_where_its_size_is_not_known():
    batches = [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    learn = make_learner(DataLoaders(DataLoader(make_data(9), batch_sampler=batches), device="cpu"), norm_model())
    with pytest.raises(ValueError, match="Expected more than 1 value") as caught:
        learn.fit(1)
    assert "batch 2 of the training loader has one sample" in str(notes(caught.value))
    assert "drop_last=True" in str(notes(caught.value))


def test_a_last_batch_too_small_is_found_in_inputs_that_callbacks_convert():
    learn = lone(n=9, model=norm_model().double())
    model = learn.model

    def convert(cb):
        cb.learn.xb = (cb.x.double(),)

    with pytest.raises(ValueError, match=LONE):
        learn.fit(1, cbs=Callback(before_batch=convert))
    assert not model[1]._forward_pre_hooks
    lone(n=10).fit(1)


def test_a_loss_without_reduction_is_refused_at_once():
    with fails(ValueError, "reduction='none'"):
        make_learner(loss_func=nn.MSELoss(reduction="none"))


@pytest.mark.parametrize("n_epoch", [-1, 1.5, "3"])
def test_n_epoch_must_be_a_whole_number(n_epoch):
    learn = make_learner()
    for fit in (learn.fit, learn.fit_one_cycle, learn.fit_flat_cos):
        with fails(ValueError, "got n_steps=.*; it is a whole number, 0 or more"):
            fit(n_steps=n_epoch)
    for fit in (learn.fit, learn.fit_one_cycle):
        with fails(ValueError, "got n_epoch=.*; it is a whole number, 0 or more"):
            fit(n_epoch)
    with fails(ValueError, "got start_epoch="):
        learn.fit(1, start_epoch=n_epoch)


def empty(**kwargs):
    return DataLoader(make_data(3), 4, **kwargs)


@pytest.mark.parametrize(
    ("loader", "match"),
    [
        ([], "the training loader is empty: it has no batches"),
        (DataLoader(make_data(0), 4), "the training loader is empty: its dataset has 0 samples"),
        (empty(drop_last=True), "3 samples are less than a batch of 4, and drop_last=True; use a smaller batch size"),
    ],
)
def test_an_empty_training_loader(loader, match):
    learn = make_learner(DataLoaders(loader, device="cpu"))
    with fails(ValueError, match):
        learn.fit(1)
    assert learn.opt is None


def test_an_empty_validation_loader():
    learn = make_learner(DataLoaders(DataLoader(make_data(), 4), empty(drop_last=True), device="cpu"))
    with fails(ValueError, "the validation loader is empty: 3 samples are less"):
        learn.fit(1)
    for verb in (learn.validate,):
        with fails(ValueError, "the loader is empty"):
            verb()
    with fails(ValueError, "the loader is empty"):
        learn.get_preds(dl=[])


def test_no_validation_loader():
    learn = make_learner(make_dls(valid=None))
    for verb in (learn.validate, learn.get_preds):
        with fails(IndexError, r"there is no loader 1; there are \[0\]"):
            verb()


def test_a_generator_is_exhausted_after_an_epoch():
    learn = make_learner(DataLoaders((b for b in list(DataLoader(make_data(), 4))), device="cpu"))
    with fails(ValueError, "the training loader gave no batches in epoch 1; an iterator can be read only once"):
        learn.fit(2)


@pytest.mark.parametrize("made", [lambda p, y: (p - y).pow(2), lambda p, y: 3.0, lambda p, y: (p.sum(), y.sum())])
def test_a_loss_must_be_a_scalar(made):
    with fails(ValueError, "the loss is not a scalar: loss_func returned .*; return a 0-dim tensor"):
        make_learner(loss_func=made).fit(1)


def test_no_targets_and_no_loss():
    single = DataLoaders(DataLoader(make_data().tensors[0], 4), device="cpu")
    with fails(ValueError, r"there is no loss: the batch .* has no targets; let the dataset return"):
        make_learner(single).fit(1)
    with fails(ValueError, "there is no loss: loss_func is None and the model returned float32 tensor of shape"):
        Learner(make_dls(), make_model()).fit(1)
    with fails(ValueError, "there is no loss"):
        make_learner(single).validate(0)


def test_no_trainable_parameters():
    model = make_model()
    model.requires_grad_(False)
    with fails(ValueError, r"Sequential has no trainable parameters \(4 parameters, all frozen\)"):
        make_learner(model=model).fit(1)
    with fails(ValueError, "no trainable parameters"):
        make_learner(model=nn.Flatten()).fit(1)


def vector(pred, target):
    return (pred - target).abs().mean(1)


def test_a_metric_must_return_a_number():
    learn = make_learner(metrics=vector)
    with fails(ValueError, "metric 'vector' returned float32 tensor of shape .*; a metric returns a number") as e:
        learn.fit(1)
    assert any(n.startswith("metric 'vector' got predictions: float32 tensor of shape (4, 1)") for n in notes(e.value))


def test_a_failing_metric_says_what_it_got():
    learn = make_learner(metrics=lambda pred, target: pred.missing)
    with fails(AttributeError, "missing") as e:
        learn.fit(1)
    assert any("predictions: float32 tensor of shape (4, 1); targets: (float32" in n for n in notes(e.value))


def test_a_metric_that_is_none_is_refused():
    with fails(TypeError, "metric"):
        make_learner(metrics=3).fit(1)
    with fails(ValueError, r"two metrics are named \['mae'\]"):
        make_learner(metrics=[mae, mae]).fit(1)


def test_a_loader_without_length_has_no_one_cycle():
    learn = make_learner(DataLoaders(Unsized(list(DataLoader(make_data(), 4))), device="cpu"))
    with fails(ValueError, r"a schedule needs to know how many batches .* \(Unsized\) has no length"):
        learn.fit_one_cycle(1)


@pytest.mark.parametrize(
    "loss_func", [nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), F.mse_loss, F.l1_loss, F.huber_loss]
)
def test_elementwise_losses_do_not_broadcast_in_silence(loss_func):
    x, y = make_data(32).tensors
    dls = DataLoaders(DataLoader(TensorDataset(x, y[:, 0]), 32), device="cpu")
    with fails(ValueError, r"predictions have the shape \(32, 1\), the targets \(32,\)") as e:
        make_learner(dls, loss_func=loss_func).fit(1)
    assert "squeeze" in str(e.value)


def test_a_failing_loss_says_what_it_got():
    dls = make_dls(data=lambda n, seed=0: make_classes(n, seed=seed))
    with pytest.raises((ValueError, RuntimeError, IndexError)) as e:
        make_learner(dls, make_model(n_out=2)[:2], nn.CrossEntropyLoss(), cbs=Callback(after_pred=cut)).fit(1)
    assert notes(e.value)[0].startswith("the loss got predictions: float32 tensor of shape (3, 6); targets: (int64")


def cut(cb):
    cb.learn.pred = cb.pred[:3]


@pytest.mark.parametrize("lr", [[0.1, 0.2], [], (0.1, 0.2, 0.3)])
def test_a_list_of_rates_has_one_for_each_group(lr):
    learn = make_learner()
    for fit in (learn.fit, learn.fit_one_cycle):
        with fails(ValueError, f"got {len(lr)} learning rates for 1 parameter groups"):
            fit(1, lr)
    assert learn.task is None
    learn.fit(1)


def test_a_bad_batch_is_refused():
    with fails(ValueError, "n_inp=3 asks for that many inputs"):
        make_learner(make_dls(n_inp=3)).fit(1)
    with fails(ValueError, "got n_inp=0"):
        make_dls(n_inp=0)
    with fails(ValueError, "a batch of 0 entries"):
        make_learner(DataLoaders([()], device="cpu")).fit(1)


def test_errors_leave_the_learner_fit_to_go_on():
    learn = make_learner(make_dls(valid=8))
    for bad in (
        lambda: learn.fit(-1),
        lambda: learn.fit(1, cbs=3),
        lambda: learn.fit(1, lr="fast"),
        lambda: learn.validate(7),
    ):
        before = state_of(learn)
        with pytest.raises((ValueError, TypeError, IndexError)):
            bad()
        assert_same_state(learn, before | {"attributes": before["attributes"] | {"opt": learn.opt}})
    learn.fit(1)
    with contextlib.suppress(IndexError):
        learn.validate(5)
    assert VALID_BATCH
    learn.validate()
