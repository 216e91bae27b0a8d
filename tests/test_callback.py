"""Callbacks: their hooks, their attributes, their order, and how they come and go."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fastcore.foundation import L
from helpers import EPOCH, FIT, TRAIN_BATCH, make_dls, make_learner, make_model, notes, raising, spy, weights, words
from torch import nn
from torch.nn import functional as F

from learnerkit import (
    EMA,
    Callback,
    CancelFitException,
    CheckpointCallback,
    EarlyStoppingCallback,
    ProgressCallback,
    Recorder,
    SaveModelCallback,
    mae,
)
from learnerkit.callback import check_hooks, is_ours, running
from learnerkit.callbacks.schedule import ParamScheduler, SchedCos
from learnerkit.callbacks.tracking import TrackerCallback
from learnerkit.callbacks.training import TrainEvalCallback
from learnerkit.events import INNER_EVENTS, Event

# Hooks


@pytest.mark.parametrize("event", list(Event))
def test_every_event_can_be_heard_by_a_method_and_by_a_function(event):
    method = type("Own", (Callback,), {event: lambda self: None})
    make_learner(cbs=[method(), Callback(**{event: lambda cb: None})])


@pytest.mark.parametrize("name", ["after_bach", "before_epochs", "after_validation", "before_steps", "cleanup_fitt"])
def test_a_misspelled_hook_is_refused_with_the_near_match(name):
    near = {"after_bach": "after_batch", "before_epochs": "before_epoch", "after_validation": "after_validate"}
    near |= {"before_steps": "before_step", "cleanup_fitt": "cleanup_fit"}
    cb = type("Typo", (Callback,), {name: lambda self: None})
    with pytest.raises(TypeError, match=f"Typo.{name} is not an event; did you mean '{near[name]}'"):
        make_learner(cbs=cb())


class WithItems(Callback):
    """Has items, as the callbacks of miniai that keep hooks."""

    def __init__(self):
        self.items = []

    def __iter__(self):
        return iter(self.items)

    def __len__(self):
        return len(self.items)

    def after_batch(self):
        self.items.append(self.iter)


def test_a_callback_that_has_items_is_not_taken_for_a_list_of_callbacks():
    learn = make_learner(cbs=WithItems())
    learn.fit(1, cbs=(cb := WithItems()))
    assert len(cb) == len(learn.with_items) > 0


@pytest.mark.parametrize("name", ["befor_batch", "aftr_fit", "beforefit", "after_batches"])
def test_a_misspelled_prefix_is_refused_too(name):
    cb = type("Typo", (Callback,), {name: lambda self: None})
    with pytest.raises(TypeError, match="is not an event; did you mean"):
        make_learner(cbs=cb())


def test_a_refused_callback_leaves_the_learner_as_it_was():
    learn = make_learner()
    before = list(learn.cbs)
    with pytest.raises(TypeError):
        learn.add_cb(type("Typo", (Callback,), {"after_bach": lambda self: None}))
    assert learn.cbs == before
    assert not hasattr(learn, "typo")


@pytest.mark.parametrize(
    ("name", "now"),
    [("begin_fit", "before_fit"), ("begin_validate", "before_validate"), ("begin_batch", "before_batch"),
     ("on_epoch_end", "after_epoch"), ("on_train_begin", "before_fit"), ("after_fit_exception", "cleanup_fit")],
)  # fmt: skip
def test_events_that_fastai_had_once_are_refused_with_their_present_name(name, now):
    cb = type("Old", (Callback,), {name: lambda self, **kwargs: None})
    with pytest.raises(
        TypeError, match=f"Old.{name} is an event of an earlier fastai or of another library.*: use {now}"
    ):
        make_learner(cbs=cb())


def test_a_callback_that_can_be_called_is_refused():
    class Called(Callback):
        def __call__(self, event_name):
            return super().__call__(event_name)

    with pytest.raises(TypeError, match="Called defines __call__, which fastai calls at every event; here only the"):
        make_learner(cbs=Called)

    class Both(Callback, nn.Module):  # a module's `__call__` is not meant as a hook
        def __init__(self):
            nn.Module.__init__(self)

    make_learner(cbs=Both()).fit(1)


def test_helper_methods_are_no_hooks():
    class Fine(Callback):
        def step(self):
            return 1

        def _before_batch(self):
            return 2

        def batch_norms(self):
            return 3

        after_effect = "an attribute, not a method"

    make_learner(cbs=Fine()).fit(1)


def test_an_unknown_keyword_is_refused_with_the_near_match():
    with pytest.raises(TypeError, match="'after_bach', which is not an event; did you mean 'after_batch'"):
        Callback(after_bach=print)
    with pytest.raises(TypeError, match="'begin_fit', which is not an event; here it is before_fit"):
        Callback(begin_fit=print)
    with pytest.raises(TypeError, match="'ordr', which is not an event; did you mean 'order'"):
        Callback(ordr=1)


@pytest.mark.parametrize("hook", [5, lambda: None, lambda cb, batch: None, range])
def test_a_hook_that_does_not_take_the_callback_alone_is_refused_where_it_is_given(hook):
    with pytest.raises(TypeError, match="got after_batch=.*; it is a function that takes the callback, and no more"):
        Callback(after_batch=hook)


@pytest.mark.parametrize("event", ["after_create", "after_batch", "cleanup_fit"])
def test_a_hook_that_needs_arguments_is_refused(event):
    cb = type("Greedy", (Callback,), {event: lambda self, epoch: None})
    with pytest.raises(TypeError, match=rf"Greedy.{event}\(epoch\) takes arguments"):
        make_learner(cbs=cb())


def test_arguments_with_defaults_are_no_obstacle():
    heard = []

    class Fine(Callback):
        def after_fit(self, log=heard, *args, **kwargs):
            log.append(1)

    make_learner(cbs=Fine()).fit(1)
    assert heard == [1]


def test_one_off_callbacks_get_the_callback():
    seen = []

    @Callback.on("after_batch", order=3)
    def count(cb):
        seen.append((cb.training, cb.iter, cb.learn.iter))

    assert isinstance(count, Callback)
    assert count.order == 3
    cb = Callback(after_epoch=lambda cb: seen.append(cb), order=7)
    assert cb.order == 7
    make_learner(cbs=[count, cb]).fit(1)
    assert seen == [(True, 0, 0), (True, 1, 1), (False, 0, 0), cb]


# Attributes


def test_learner_attributes_are_read_by_their_bare_names():
    seen = {}

    class Reader(Callback):
        def after_batch(self):
            for name in words("model opt dls epoch n_epoch iter n_iter train_iter pct_train training dl xb yb x y"):
                seen[name] = getattr(self, name)
            seen["same"] = all(
                getattr(self, name) is getattr(self.learn, name)
                for name in ("pred", "loss", "loss_grad", "batch", "recorder")
            )

    learn = make_learner(cbs=Reader())
    learn.fit(1)
    assert seen["model"] is learn.model
    assert seen["opt"] is learn.opt
    assert seen["same"]
    assert learn.reader.model is learn.model


def test_an_unknown_attribute_names_the_callback_and_where_it_looked():
    cb = Callback()
    with pytest.raises(AttributeError, match=r"Callback has no attribute 'speed', and it is not added to a learner"):
        cb.speed  # noqa: B018
    make_learner(cbs=cb)
    with pytest.raises(AttributeError, match=r"Callback has no attribute 'speed', nor has its learner"):
        cb.speed  # noqa: B018


@pytest.mark.parametrize(
    "name",
    [
        "weights",
        "workers",
        "together",
        "around",
        "check",
        "n_ranks",
        "_told_outside",
        "_said_step",
        "batch_index",
        "_device",
    ],
)
def test_a_callback_may_use_words_for_its_own_that_no_run_reads(name):
    class Writer(Callback):
        def after_loss(self):
            setattr(self, name, "own")

    learn = make_learner(cbs=Writer())
    learn.fit(1)
    assert vars(learn.writer)[name] == "own"
    assert getattr(learn, name, None) != "own"


@pytest.mark.parametrize(
    "name", ["lr", "loss", "model", "opt", "xb", "x", "y", "pred", "epoch", "recorder", "cbs", "fit"]
)
def test_assigning_a_learners_name_says_how_to_write_it(name):
    class Writer(Callback):
        def after_loss(self):
            setattr(self, name, 1)

    learn = make_learner(cbs=Writer())
    to = rf"{name}b = \(\.\.\.,\)" if name in "xy" else rf"{name} = \.\.\."
    with pytest.raises(AttributeError, match=f"write `self.learn.{to}`") as e:
        learn.fit(1)
    assert notes(e.value) == ["raised in Writer.after_loss"]


def test_a_callbacks_own_attributes_are_its_own():
    class Owner(Callback):
        lr = 3

        def __init__(self):
            super().__init__()
            self.loss = "mine"

        def before_fit(self):
            self.lr, self.loss = 4, "still mine"
            self.fresh = 1

        def after_batch(self):
            self.fresh += 1

    cb = Owner()
    learn = make_learner(cbs=cb)
    cb.pred = "set outside a run, so the callback's own"
    learn.fit(1)
    assert (cb.lr, cb.loss, cb.fresh) == (4, "still mine", 4)
    assert cb.pred.startswith("set outside")
    assert learn.lr == 0.1
    assert not hasattr(learn, "fresh")


def test_writing_through_learn_changes_the_learner():
    class Doubler(Callback):
        def after_loss(self):
            self.learn.loss_grad = self.learn.loss_grad * 0

    learn = make_learner(cbs=Doubler())
    before = weights(learn.model)
    learn.fit(1)
    assert all(torch.equal(before[k], v) for k, v in learn.model.state_dict().items())


# Order


def test_callbacks_run_by_order_and_ties_as_added_cleanups_the_other_way_round():
    log = []
    orders = {"a": 5, "b": 0, "c": -20, "d": 0, "e": 100, "f": 5}
    learn = make_learner(cbs=[spy(log, label, order=order) for label, order in orders.items()])
    log.clear()
    learn.fit(1)
    up = ["c", "b", "d", "a", "f", "e"]
    groups = [log[i : i + len(up)] for i in range(0, len(log), len(up))]
    assert [group[0][1] for group in groups] == FIT
    for group in groups:
        assert len({event for _, event in group}) == 1
        down = group[0][1].startswith("cleanup_")
        assert [label for label, _ in group] == (up[::-1] if down else up)


def test_order_is_fastais_for_the_default_callbacks():
    assert [cb.order for cb in (TrainEvalCallback, Callback, Recorder, ProgressCallback)] == [-10, 0, 50, 60]
    assert {type(cb) for cb in make_learner().cbs} == {TrainEvalCallback, Recorder, ProgressCallback}
    assert make_learner(default_cbs=False).cbs == []


# Sitting out


def test_run_flags_select_phases():
    logs = {flag: [] for flag in ("run", "run_train", "run_valid")}
    cbs = [spy(log) for log in logs.values()]
    learn = make_learner(cbs=cbs)
    for cb, (flag, log) in zip(cbs, logs.items(), strict=True):
        setattr(cb, flag, False)
        log.clear()
    learn.fit(1)
    train = FIT[: FIT.index("after_train")]
    inner = set(INNER_EVENTS)
    assert logs["run"] == []
    assert logs["run_train"] == [e for e in train if e not in inner] + FIT[len(train) :]
    assert logs["run_valid"] == train + [e for e in FIT[len(train) :] if e not in inner]


def test_flags_on_the_class_count_too():
    log = []

    class Quiet(Callback):
        run_valid = False

        def after_batch(self):
            log.append(self.training)

        def after_cancel_step(self):
            log.append("cancelled")

    make_learner(cbs=Quiet()).fit(1)
    assert log == [True, True]


def test_after_a_skipped_step_run_train_is_honoured():
    from learnerkit import CancelStepException

    log = []
    quiet = Callback(after_cancel_step=lambda cb: log.append("heard"))
    quiet.run_train = False
    make_learner(cbs=[quiet, raising("before_step", CancelStepException)]).fit(1)
    assert log == []


@pytest.mark.parametrize("flag", ["run", "run_train"])
def test_a_flag_set_in_mid_fit_acts_at_once_and_is_put_back(flag):
    log = []

    class Once(Callback):
        def after_batch(self):
            log.append((self.epoch, self.iter))
            setattr(self, flag, False)

    cb = Once()
    learn = make_learner(make_dls(valid=None), cbs=cb)
    learn.fit(2)
    assert log == [(0, 0)]
    assert getattr(cb, flag) is True
    assert flag not in vars(cb)
    learn.fit(1)
    assert log == [(0, 0), (0, 0)]


def test_a_flag_set_before_the_fit_stays():
    cb = Callback(after_batch=lambda cb: setattr(cb, "run", True))
    learn = make_learner(cbs=cb)
    cb.run = False
    learn.fit(1)
    assert cb.run is False


def test_a_callback_can_switch_another_one_on_and_off():
    log = []
    heard = Callback(after_batch=lambda cb: log.append((cb.training, cb.iter)))
    heard.run = False
    switch = Callback(before_batch=lambda cb: setattr(heard, "run", cb.iter == 1))
    make_learner(cbs=[heard, switch]).fit(1)
    assert log == [(True, 1)]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_rank0_only_sits_out_on_other_ranks(rank, monkeypatch):
    log = []

    class Loud(Callback):
        rank0_only = True

        def after_create(self):
            log.append(self.learn)

    monkeypatch.setenv("RANK", rank)
    make_learner(cbs=Loud())
    assert len(log) == (rank == "0")


# Names


def test_a_callback_is_found_under_its_name_in_snake_case():
    class MyOwnThingCallback(Callback):
        pass

    class HTTPLogger(Callback):
        pass

    cbs = [MyOwnThingCallback(), HTTPLogger(), Callback()]
    learn = make_learner(cbs=cbs)
    assert learn.my_own_thing is cbs[0]
    assert learn.http_logger is cbs[1]
    assert learn.callback is cbs[2]
    assert isinstance(learn.recorder, Recorder)
    assert isinstance(learn.train_eval, TrainEvalCallback)
    assert isinstance(learn.progress, ProgressCallback)
    learn.remove_cbs(cbs)
    assert not any(hasattr(learn, name) for name in ("my_own_thing", "http_logger", "callback"))


@pytest.mark.parametrize("name", ["fit", "model", "opt", "path", "loss", "metrics", "save", "epoch", "x", "cbs", "lr"])
def test_a_name_that_would_hide_an_attribute_is_refused(name):
    cb = type(name.capitalize(), (Callback,), {})
    learn = make_learner()
    before = getattr(learn, name)
    with pytest.raises(ValueError, match=f"{name.capitalize()} would hide learn.{name}"):
        learn.add_cb(cb)
    assert getattr(learn, name) is before or getattr(learn, name) == before


def test_a_name_of_its_own_avoids_the_clash():
    class Metrics(Callback):
        name = "my_metrics"

    learn = make_learner(cbs=Metrics())
    assert isinstance(learn.my_metrics, Metrics)


def test_two_of_a_kind_share_a_name_and_the_last_one_has_it_as_long_as_it_is_there():
    first, second = Callback(), Callback()
    learn = make_learner(cbs=first)
    with learn.added_cbs(second):
        assert learn.callback is second
    assert learn.callback is first


def test_another_recorder_for_one_fit_leaves_the_first_in_its_place():
    learn = make_learner()
    own = learn.recorder
    learn.fit(1, cbs=Recorder(train_metrics=True))
    assert learn.recorder is own
    learn.fit(1)
    assert len(learn.recorder.values) == 1


# Coming and going


def test_classes_and_instances_can_be_added_and_removed():
    class Own(Callback):
        pass

    cb = Own()
    learn = make_learner(cbs=[Own, cb])
    assert [type(c) for c in learn.cbs[-2:]] == [Own, Own]
    assert learn.cbs[-1] is cb
    assert learn.remove_cb(cb) is learn
    assert cb not in learn.cbs
    assert cb.learn is None
    learn.remove_cb(Own)
    assert not any(isinstance(c, Own) for c in learn.cbs)
    learn.add_cb(cb).remove_cbs([Own]).add_cbs([cb]).remove_cbs(None).add_cbs(None)
    assert learn.cbs[-1] is cb


def test_a_class_removes_what_its_cell_defined_before_it_ran_again():
    first, again = (type("Cell", (Callback,), {}) for _ in range(2))
    local, other = (type("Local", (Callback,), {"__qualname__": "make.<locals>.Local"}) for _ in range(2))
    learn = make_learner(cbs=[first(), again(), local()])
    learn.remove_cbs([again, other])
    assert [type(cb).__name__ for cb in learn.cbs if isinstance(cb, first | again | local)] == ["Local"]


@pytest.mark.parametrize("wrong", [print, 3, "after_batch", nn.Linear, object()])
def test_what_is_no_callback_is_refused(wrong):
    with pytest.raises(TypeError, match=r"callback"):
        make_learner(cbs=[wrong])


def test_learners_may_share_callbacks_while_one_of_them_runs():
    seen = []
    cbs = [Callback(before_fit=lambda cb: seen.append(cb.learn)), Callback(before_epoch=lambda cb: seen.append(cb.dls))]
    one, other = make_learner(cbs=cbs), make_learner(cbs=cbs)
    for learn in (one, other, one):
        seen.clear()
        learn.fit(1)
        assert seen == [learn, learn.dls]
        assert all(cb.learn is learn for cb in cbs)
    other.remove_cbs(cbs)
    assert all(cb.learn is one for cb in cbs)
    one.remove_cbs(cbs)
    assert all(cb.learn is None for cb in cbs)


def test_a_callback_in_a_run_of_another_learner_is_refused():
    shared, errors = Callback(), []
    other = make_learner(cbs=shared)

    def share(cb):
        for use in (lambda: other.fit(1), lambda: make_learner(cbs=shared), lambda: make_learner().fit(1, cbs=shared)):
            with pytest.raises(ValueError, match="is used in 'fit' of another learner; make another one, or wait") as e:
                use()
            errors.append(e)

    owner = make_learner(cbs=[shared, Callback(before_epoch=share)])
    owner.fit(1)
    assert len(errors) == 3
    assert shared.learn is owner
    other.fit(1)
    assert shared.learn is other


def test_a_callback_added_twice_is_refused_and_stays():
    cb = Callback()
    learn = make_learner(cbs=cb)
    before = list(learn.cbs)
    for add in (learn.add_cb, lambda cb: learn.fit(1, cbs=cb)):
        with pytest.raises(ValueError, match="was added to this learner already"):
            add(cb)
        assert learn.cbs == before
        assert cb.learn is learn


def test_added_cbs_are_there_for_a_while():
    log = []
    learn = make_learner()
    before = list(learn.cbs)
    with learn.added_cbs([spy(log), Callback]) as same:
        assert same is learn
        learn.fit(1)
    assert log == FIT
    learn.fit(1)
    assert log == FIT
    assert learn.cbs == before


def test_added_cbs_go_also_after_an_error():
    cb, learn = Callback(), make_learner()
    before = list(learn.cbs)
    with pytest.raises(ZeroDivisionError), learn.added_cbs(cb):
        1 / 0  # noqa: B018
    assert learn.cbs == before
    assert cb.learn is None
    with pytest.raises(TypeError), learn.added_cbs([cb, 3]):
        pass
    assert learn.cbs == before
    assert cb.learn is None


def test_removed_cbs_come_back_in_their_places():
    logs, cbs = [], []
    for label in "abc":
        cbs.append(spy(logs, label))
    learn = make_learner(cbs=cbs)
    before = list(learn.cbs)
    with learn.removed_cbs([cbs[1], Recorder]) as same:
        assert same is learn
        assert [cb for cb in before if cb not in learn.cbs] == [before[1], cbs[1]]
        assert not hasattr(learn, "recorder")
        learn.fit(1)
    assert {label for label, event in logs if event == "after_fit"} == {"a", "c"}
    assert learn.cbs == before
    with pytest.raises(ZeroDivisionError), learn.removed_cbs([cbs[1], Recorder]):
        1 / 0  # noqa: B018
    assert learn.cbs == before
    assert learn.recorder is before[1]
    assert all(cb.learn is learn for cb in before)


def test_no_bar_keeps_the_table_and_no_logging_keeps_the_record(capsys):
    learn = make_learner()
    with learn.no_bar():
        assert not any(isinstance(cb, ProgressCallback) for cb in learn.cbs)
        learn.fit(1)
    assert capsys.readouterr().out.count("\n") == 2
    with learn.no_logging():
        learn.fit(1)
    assert capsys.readouterr().out.count("\n") == 0
    assert len(learn.recorder.values) == 1
    learn.fit(1)
    assert capsys.readouterr().out.count("\n") == 2


def test_a_callback_added_in_mid_fit_hears_what_follows():
    log = []

    class Adder(Callback):
        def before_validate(self):
            self.learn.add_cb(late)

    late = spy(log)
    learn = make_learner(cbs=Adder())
    learn.fit(1)
    following = EPOCH[EPOCH.index("before_validate") + 1 :] + ["after_fit"]
    # Levels that it did not enter it need not clean up.
    assert [e for e in log if e not in ("cleanup_validate", "cleanup_epoch", "cleanup_fit")] == [
        e for e in following if e not in ("cleanup_validate", "cleanup_epoch", "cleanup_fit")
    ]
    assert "cleanup_fit" not in log
    assert late in learn.cbs


def own_callbacks(kind=Callback):
    for each in kind.__subclasses__():
        if is_ours(each):
            yield each
        yield from own_callbacks(each)


def test_this_librarys_callbacks_are_as_those_of_users_have_to_be():
    kinds = set(own_callbacks())
    assert {EMA, Recorder, CheckpointCallback} <= kinds
    for kind in kinds:
        of_a_user = type(kind.__name__, (kind,), {})
        check_hooks(of_a_user.__new__(of_a_user))


def test_a_dataclass_may_have_cleanups():
    log = []

    @dataclass
    class Counts(Callback):
        every: int = 2

        def cleanup_fit(self):
            log.append(self.every)

    make_learner(cbs=[Counts(), Callback(before_fit=lambda cb: log.append("fit"), order=1)]).fit(1)
    assert log == ["fit", 2]


@pytest.mark.parametrize("cb", [EMA(), ParamScheduler({"lr": SchedCos(0.1, 0.0)}), CheckpointCallback("run", every=2)])
def test_a_callback_that_prepares_in_before_fit_is_refused_in_mid_fit(cb):
    learn = make_learner(cbs=Callback(after_batch=lambda own: own.learn.add_cb(cb)))
    with pytest.raises(RuntimeError, match=f"^{cb} was added in the middle of a fit, and it prepares in before_fit"):
        learn.fit(1)
    assert cb not in learn.cbs


def test_a_callback_removed_in_mid_fit_comes_back():
    ema = EMA()

    def leave_for_a_while(own):
        with own.learn.removed_cbs(ema):
            assert ema not in own.learn.cbs

    learn = make_learner(cbs=[ema, Callback(before_validate=leave_for_a_while)])
    learn.fit(1)
    assert ema in learn.cbs


def test_a_callback_removed_in_mid_fit_still_cleans_up_what_it_entered():
    log = []
    gone = spy(log)
    leaver = Callback(after_batch=lambda cb: gone in cb.learn.cbs and cb.learn.remove_cb(gone), order=1)
    learn = make_learner(cbs=[gone, leaver])
    log.clear()
    learn.fit(1)
    first = ["before_fit", "before_epoch", "before_train", *TRAIN_BATCH[:-1]]
    assert log == [*first, "cleanup_batch", "cleanup_train", "cleanup_epoch", "cleanup_fit"]
    assert gone.learn is None
    assert gone not in learn.cbs


# Errors


@pytest.mark.parametrize(
    "error", [ValueError("v"), KeyError("k"), KeyboardInterrupt(), SystemExit(3), OSError(2, "no")]
)
@pytest.mark.parametrize("event", ["before_fit", "after_pred", "before_step", "after_validate", "cleanup_epoch"])
def test_an_error_keeps_type_and_traceback_and_gains_one_note(error, event):
    def the_culprit(cb):
        raise error

    class Wrapping(Callback):
        "A callback around others, which must not add notes of its own."

    error.__notes__ = []
    learn = make_learner(cbs=[Callback(**{event: the_culprit}), Wrapping()])
    with pytest.raises(type(error)) as e:
        learn.fit(1)
    assert e.value is error
    assert any(entry.name == "the_culprit" for entry in e.traceback)
    assert notes(e.value) == [f"raised in Callback.{event}"]


def test_the_note_names_the_first_callback_only_when_runs_are_nested():
    class Inner(Callback):
        def before_validate(self):
            if self.task == "validate":
                raise RuntimeError("inside")

    outer = Callback(after_batch=lambda cb: cb.learn.validate(cbs=Inner()))
    with pytest.raises(RuntimeError, match="inside") as e:
        make_learner(cbs=outer).fit(1)
    assert notes(e.value) == ["raised in Inner.before_validate"]


def test_an_error_in_creation_has_a_note_too():
    with pytest.raises(ZeroDivisionError) as e:
        make_learner(cbs=Callback(after_create=lambda cb: 1 / 0))
    assert notes(e.value) == ["raised in Callback.after_create"]


def test_errors_of_models_and_losses_are_blamed_on_no_callback():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x):
            raise RuntimeError("the model's own")

    with pytest.raises(RuntimeError, match="the model's own") as e:
        make_learner(model=Broken(), cbs=spy([])).fit(1)
    assert notes(e.value) == []


# Collections of callbacks, and callbacks of others


@pytest.mark.filterwarnings("ignore:there is a single group")
@pytest.mark.parametrize("kind", [list, tuple, set, L, iter, lambda cbs: dict(enumerate(cbs)).values()])
def test_callbacks_come_in_any_collection(kind):
    heard = []
    first, second = (Callback(before_fit=lambda cb, name=name: heard.append(name)) for name in "ab")
    learn = make_learner(cbs=kind([first, EarlyStoppingCallback]))
    assert learn.cbs[-2:] in ([first, learn.early_stopping], [learn.early_stopping, first])
    learn.fit(1, cbs=kind([second]))
    learn.fit_one_cycle(1, cbs=kind([second]))
    assert heard == ["a", "b"] * 2
    learn.validate(cbs=kind([second]))
    learn.get_preds(cbs=kind([second]))
    learn.fine_tune(1, cbs=kind([second]))
    assert heard == ["a", "b"] * 6
    with learn.removed_cbs(kind([first])), learn.added_cbs(kind([second])):
        learn.fit(1)
    assert heard == ["a", "b"] * 6 + ["b"]
    learn.remove_cbs(kind([first, EarlyStoppingCallback]))
    learn.fit(1)
    assert heard == ["a", "b"] * 6 + ["b"]


def foreign(name, library="fastai", **attributes):
    """Something that another library has made."""
    return type(name, (), {"__module__": f"{library}.somewhere", **attributes})


def test_parts_of_other_libraries_are_named():
    with pytest.raises(TypeError, match=r"got the callback .*made for fastai, another library: derive its class from"):
        make_learner(cbs=foreign("MixUp")())
    with pytest.raises(TypeError, match=r"made for poutyne, another library: write its hooks as methods named"):
        make_learner(cbs=foreign("EarlyStopping", "poutyne")())
    with pytest.raises(TypeError, match=r"made for lightning, another library: write its hooks as methods named"):
        make_learner(cbs=type("Own", (foreign("Callback", "lightning"),), {}))
    with pytest.raises(TypeError, match=r"a DataLoaders of fastai, another library; pass learnerkit.DataLoaders\(dls"):
        make_learner(foreign("DataLoaders")())
    adam = lambda params, lr: None  # noqa: E731
    adam.__module__, adam.__name__ = "fastai.optimizer", "Adam"
    for opt_func in (adam, partial(adam, mom=0.9)):
        with pytest.raises(TypeError, match=r"opt_func is Adam of fastai, another library; pass a torch optimizer"):
            make_learner(opt_func=opt_func)
    with pytest.raises(TypeError, match=r"made for fastai, another library; it must be a torch optimizer"):
        make_learner(opt_func=lambda params, lr: foreign("Optimizer")()).fit(1)


def test_a_scheduler_in_place_of_a_callback_is_told_what_takes_it():
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), 1)
    with pytest.raises(TypeError, match=r"For a scheduler: TorchScheduler\(lambda opt: StepLR\(opt, ...\)\)$"):
        make_learner(cbs=scheduler)


def test_what_fastais_optimizers_have_is_explained_in_a_callback():
    learn = make_learner(cbs=Callback(before_batch=lambda cb: cb.opt.set_hyper("lr", 0.1)))
    with pytest.raises(AttributeError, match="set_hyper") as e:
        learn.fit(1)
    assert any("for group in self.opt.param_groups: group['lr'] = 0.1" in note for note in notes(e.value))
    with pytest.raises(AttributeError, match="another") as e:
        make_learner(cbs=Callback(before_batch=lambda cb: cb.opt.another)).fit(1)
    assert not any("param_groups" in note for note in notes(e.value))


@pytest.mark.parametrize(
    ("event", "use", "error", "advice"),
    [
        ("after_epoch", lambda cb: cb.dls.valid.one_batch(), AttributeError, "next(iter(learn.dls.valid))"),
        ("before_fit", lambda cb: cb.dls.bs, AttributeError, "learn.dls.train.batch_size"),
        ("after_epoch", lambda cb: cb.recorder.losses[-1].item(), AttributeError, "leave .item() out"),
        ("before_epoch", lambda cb: cb.learn.metrics[0].reset(), AttributeError, "learn.recorder.metric_names"),
        ("after_pred", lambda cb: cb.pred.loss, AttributeError, "self.output.loss"),
        ("before_batch", lambda cb: cb.learn("after_pred"), TypeError, "the loop fires the events by itself"),
        ("after_fit", lambda cb: cb("after_fit"), TypeError, "call the callback's method"),
        ("after_backward", lambda cb: cb.parameters(), AttributeError, "self.model.parameters"),
    ],
)
def test_what_a_callback_of_fastai_finds_elsewhere_is_named(event, use, error, advice):
    model = make_model()
    if advice == "self.output.loss":
        model.forward = lambda x, plain=model.forward: SimpleNamespace(logits=plain(x), loss=torch.zeros(()))
    learn = make_learner(model=model, loss_func=F.mse_loss, metrics=mae, cbs=Callback(**{event: use}))
    with pytest.raises(error) as e:
        learn.fit(1)
    assert any(advice in text for text in (str(e.value), *notes(e.value))), (str(e.value), notes(e.value))


class CSVLogger(Callback):
    """Writes rows to a file as fastai's does, which it lets alone where there is a `gather_preds`."""

    order = 60

    def __init__(self):
        self.file = None

    def before_fit(self):
        if hasattr(self, "gather_preds"):
            return
        self.file = open("history.csv", "w")  # noqa: SIM115
        self.file.write(",".join(self.recorder.metric_names) + "\n")
        self.old_logger, self.learn.logger = self.logger, self._write_line

    def _write_line(self, row):
        self.file.write(",".join(map(str, row)) + "\n")
        self.old_logger(row)

    def after_fit(self):
        if hasattr(self, "gather_preds"):
            return
        self.file.close()
        self.learn.logger = self.old_logger


def test_a_csv_logger_written_for_fastai_keeps_its_file_in_get_preds():
    learn = make_learner(cbs=CSVLogger())
    learn.fit(2)
    before = Path("history.csv").read_text()
    assert len(before.splitlines()) == 3
    learn.get_preds()
    learn.tta(n=2, batch_tfms=lambda x: x)
    assert Path("history.csv").read_text() == before
    assert not hasattr(learn, "gather_preds")


def test_in_the_rate_finder_there_is_the_name_that_others_ask_for():
    seen = []
    learn = make_learner(cbs=Callback(before_fit=lambda cb: seen.append(hasattr(cb, "lr_finder"))))
    learn.lr_find(num_it=10, show_plot=False, stop_div=False)
    learn.fit(1)
    assert seen == [True, False]


# A callback written for fastai, unchanged but for the import


class GradientNorm(Callback):
    order, run_valid = 12, False

    def __init__(self, limit=1e9):
        self.limit = limit  # fastai does not ask for super().__init__()

    def before_fit(self):
        self.norms, self.best = [], float("inf")

    def before_batch(self):
        self.learn.xb = tuple(x * 1.0 for x in self.xb)

    def after_loss(self):
        if self.y is not None:
            self.learn.loss_grad = self.learn.loss_grad + 0.01 * self.pred.pow(2).mean()

    def before_step(self):
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.limit)
        self.norms.append(float(norm))
        if norm > self.limit:
            raise CancelFitException()

    def after_epoch(self):
        self.best = min(self.best, self.recorder.values[-1][1]) if self.recorder.values else self.best


def test_a_callback_in_the_manner_of_fastai_runs_unchanged():
    learn = make_learner(cbs=GradientNorm())
    learn.fit(2)
    assert len(learn.gradient_norm.norms) == 4
    assert learn.gradient_norm.best == learn.recorder.values[0][1]
    learn.gradient_norm.limit = 0.0
    learn.fit(2)
    assert learn.train_iter == 0
    assert learn.recorder.values == []


# The loop, shown


def test_the_shown_loop_has_every_callback_at_its_events_in_order(capsys):
    class Early(Callback):
        order = -50

        def after_batch(self):
            pass

        def cleanup_fit(self):
            pass

    class TrainOnly(Callback):
        run_valid = False

        def before_batch(self):
            pass

    make_learner(cbs=[TrainOnly(), Early()]).show_training_loop()
    lines = capsys.readouterr().out.splitlines()
    assert all(line == line.rstrip() for line in lines)
    found = [(line.split()[0], line.split()[1:]) for line in lines if line.split()[0] in list(Event)]
    after_batch = [names for event, names in found if event == "after_batch"]
    assert after_batch == [
        ["Early,", "TrainEvalCallback,", "Recorder,", "ProgressCallback"],
        ["Early,", "Recorder,", "ProgressCallback"],
    ]
    assert [names for event, names in found if event == "before_batch"] == [["TrainOnly"], []]
    (cleanup,) = [names for event, names in found if event == "cleanup_fit"]
    assert {name.rstrip(",") for name in cleanup} == {"Early", "ProgressCallback"}


def test_the_running_callbacks_of_a_class_are_those_that_are_not_switched_off():
    cbs = [EarlyStoppingCallback(), ProgressCallback(), SaveModelCallback(), EarlyStoppingCallback()]
    cbs[0].run = False
    assert running(cbs, TrackerCallback) == cbs[2:]
    assert running(iter(cbs), EarlyStoppingCallback) == cbs[3:]


def test_a_callback_may_set_an_attribute_of_its_own_name():
    class Average(Callback):
        def before_fit(self):
            self.average = 3

    learn = make_learner(cbs=Average())
    learn.fit(1)
    assert (learn.average.average, learn.average) == (3, learn.cbs[-1])
