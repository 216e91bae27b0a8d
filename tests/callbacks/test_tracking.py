"""Trackers and TerminateOnNaNCallback; on two processes: scripts/tracking.py."""

import inspect
import math
import operator
import pickle
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    Wrapped,
    halves,
    make_classes,
    make_data,
    make_dls,
    make_learner,
    make_model,
    raising,
    same_weights,
    weights,
)
from torch import nn
from torch.utils.data import DataLoader

from learnerkit import (
    Callback,
    CheckpointCallback,
    DataLoaders,
    GradientAccumulation,
    ParamScheduler,
    Recorder,
    distributed,
    mae,
)
from learnerkit.callbacks import tracking
from learnerkit.callbacks.schedule import combined_cos
from learnerkit.callbacks.tracking import (
    EarlyStoppingCallback,
    ReduceLROnPlateau,
    SaveModelCallback,
    TerminateOnNaNCallback,
    TrackerCallback,
)
from learnerkit.events import (
    CancelBackwardException,
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelTrainException,
)

nan, inf = math.nan, math.inf


class Script(Callback):
    """Gives the table a column whose values are prescribed, row by row; `None` is a row without it."""

    def __init__(self, values, name="score"):
        super().__init__()
        self.values, self.column, self.logs = list(values), name, (name,)

    def after_train(self):
        value = self.values.pop(0)
        if value is not None:
            self.learn.log_metric(self.column, value)


class Follow(Callback):
    """What a tracker has decided after each epoch, and the weights and rates then."""

    order = 70

    def __init__(self, tracker):
        super().__init__()
        self.tracker, self.news, self.bests, self.weights, self.rates, self.epochs = tracker, [], [], [], [], []

    def after_epoch(self):
        self.news.append(self.tracker.new_best)
        self.bests.append(self.tracker.best)
        self.epochs.append(self.epoch)
        self.weights.append(weights(self.model))
        self.rates.append([float(g["lr"]) for opt in self.learn.opts for g in opt.param_groups])


def follow(tracker, values, name="score", learn=None, lr=None, **kwargs):
    """A fit with one row for each value; returns what happened, and the learner."""
    learn = learn or make_learner()
    seen = Follow(tracker)
    with learn.no_logging():
        learn.fit(len(values) + kwargs.get("start_epoch", 0), lr, cbs=[Script(values, name), tracker, seen], **kwargs)
    return seen, learn


def news(values, *args, **kwargs):
    """At which of the values the tracker had a new best, as a string of + and -."""
    found = follow(TrackerCallback("score", *args, **kwargs), values)[0].news
    return "".join("-+"[new] for new in found)


# What is better


def test_trackers_have_fastais_names_defaults_and_orders():
    tracked = {"monitor": "valid_loss", "comp": None, "min_delta": 0.0}
    expected = {
        TrackerCallback: (60, tracked | {"reset_on_fit": True}),
        SaveModelCallback: (
            61,
            tracked
            | {"fname": "model", "every_epoch": False, "at_end": False, "with_opt": False, "reset_on_fit": True},
        ),
        ReduceLROnPlateau: (62, tracked | {"patience": 1, "factor": 10.0, "min_lr": 0, "reset_on_fit": True}),
        EarlyStoppingCallback: (63, tracked | {"patience": 1, "reset_on_fit": True}),
        TerminateOnNaNCallback: (-9, {}),
    }
    for cls, (order, parameters) in expected.items():
        found = {name: p.default for name, p in inspect.signature(cls).parameters.items()}
        assert list(found.items()) == list(parameters.items()), cls
        assert (cls.order, cls.only_fit) == (order, True)


@pytest.mark.parametrize(
    "name",
    ["train_loss", "valid_loss", "Loss", "error_rate", "MeanSquaredError", "mse", "rmse", "mae", "perplexity"]
    + [
        "valid_rmse",
        "train_mae",
        "MSE",
        "val-mse",
        "nll",
        "WER",
        "ce",
        "valid_bce",
        "cross_entropy",
        "brier_score",
        "ece",
        "fid",
    ],
)
def test_less_is_better_for_losses_and_errors(name):
    assert TrackerCallback(name).best == inf


@pytest.mark.parametrize(
    "name", ["accuracy", "valid_accuracy", "f1", "maestro", "tmae2", "answer", "top_5_accuracy", "spruce", "precision"]
)
def test_more_is_better_for_all_other_columns(name):
    assert TrackerCallback(name).best == -inf


@pytest.mark.parametrize(
    ("values", "kwargs", "expected"),
    [
        ([1, 2, 2, 3, 1, 4], {}, "++-+-+"),
        ([1, 2, 2, 3, 1, 4], {"comp": operator.ge}, "++++-+"),
        ([4, 3, 3, 2, 5, 1], {"comp": operator.lt}, "++-+-+"),
        ([4, 3, 3, 2, 5, 1], {"comp": np.less}, "++-+-+"),
        ([4, 3, 3, 2, 5, 1], {"comp": np.less_equal}, "++++-+"),
        ([4, 3, 3, 2, 5, 1], {"comp": np.greater}, "+---+-"),
        ([1, 1.5, 1.75, 3, 3.5, 5], {"min_delta": 0.5}, "+-++-+"),
        ([5, 4.5, 4.25, 3, 2.5, 1], {"min_delta": 0.5, "comp": np.less}, "+-++-+"),
        ([5, 4.5, 4.25, 3, 2.5, 1], {"min_delta": 0.5, "comp": operator.lt}, "+-++-+"),
        ([-1, -1.5, -3, -2, -4], {"min_delta": 0.5, "comp": lambda value, best: value < best}, "+-+-+"),
        ([nan, 1, nan, 2, nan], {}, "-+-+-"),
        ([nan, 2, nan, 1, nan], {"comp": lambda value, best: not value >= best}, "-+-+-"),
        ([-inf, 1, inf, 2], {}, "-++-"),
        ([inf, 1, -inf], {"comp": np.less}, "-++"),
    ],
)
def test_a_new_best_is_better_by_more_than_min_delta(values, kwargs, expected):
    assert news(values, **kwargs) == expected


def test_best_follows_the_column_and_passes_over_nan():
    seen, _ = follow(TrackerCallback("score"), [1, 3, nan, 2, 4])
    assert seen.bests == [1, 3, 3, 3, 4]


def test_a_best_for_each_fit_or_for_all():
    for reset, expected in ((True, [True, False]), (False, [False, False])):
        tracker, learn = TrackerCallback("score", reset_on_fit=reset), make_learner()
        assert follow(tracker, [1, 5], learn=learn)[0].news == [True, True]
        assert follow(tracker, [4, 4], learn=learn)[0].news == expected
        assert tracker.best == (4 if reset else 5)


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"monitor": max}, TypeError, "the name of a column"),
        ({"min_delta": -0.1}, ValueError, "min_delta=-0.1; it is 0 or more, also where less is better"),
        ({"min_delta": nan}, ValueError, "min_delta=nan"),
        ({"min_delta": None}, ValueError, "min_delta=None; it is 0 or more"),
        ({"comp": operator.ne}, ValueError, r"a function of \(value, best\)"),
        ({"comp": operator.eq}, ValueError, r"a function of \(value, best\)"),
    ],
)
def test_bad_arguments_of_trackers_are_refused(kwargs, error, match):
    with pytest.raises(error, match=match):
        TrackerCallback(**kwargs)
    with pytest.raises(error, match=match):
        SaveModelCallback(**kwargs)


# The columns


def test_the_values_are_those_of_the_table():
    learn = make_learner(metrics=[mae], loss_func=nn.MSELoss())
    for monitor in ("train_loss", "valid_loss", "mae"):
        tracker = TrackerCallback(monitor)
        seen = Follow(tracker)
        learn.fit(3, cbs=[tracker, seen])
        column = learn.recorder.metric_names.index(monitor) - 1
        found = [row[column] for row in learn.recorder.values]
        assert seen.bests == np.minimum.accumulate(found).tolist()


def test_an_unknown_column_is_refused_before_the_fit():
    learn = make_learner(metrics=mae)
    before = weights(learn.model)
    for cls in (TrackerCallback, EarlyStoppingCallback, SaveModelCallback, ReduceLROnPlateau):
        with pytest.raises(
            ValueError, match=r"'valid_los'; .* train_loss, valid_loss, mae; did you mean 'valid_loss'\?.*logs = \('"
        ):
            learn.fit(1, cbs=cls("valid_los"))
    for name in ("time", "epoch"):
        with pytest.raises(ValueError, match=f"monitor={name!r}"):
            learn.fit(1, cbs=TrackerCallback(name))
    assert same_weights(learn.model, before)


def test_trackers_follow_recorders_of_other_columns():
    learn = make_learner(metrics=mae, default_cbs=False, cbs=Recorder(add_time=False, train_metrics=True))
    tracker = TrackerCallback("valid_mae")
    learn.fit(2, cbs=tracker)
    assert tracker.best == min(row[-1] for row in learn.recorder.values)
    with pytest.raises(ValueError, match="train_loss, train_mae, valid_loss, valid_mae; did you mean 'valid_mae'"):
        learn.fit(1, cbs=TrackerCallback("mae"))


def test_trackers_ask_for_a_recorder():
    with pytest.raises(ValueError, match=r"no Recorder \(default_cbs=False\): add Recorder\(\)"):
        make_learner(default_cbs=False).fit(1, cbs=TrackerCallback())


def test_trackers_without_a_validation_loader_follow_the_training():
    learn = make_learner(make_dls(valid=None))
    with pytest.raises(ValueError, match="columns are train_loss and, without a validation loader, none of validation"):
        learn.fit(1, cbs=SaveModelCallback())
    tracker = TrackerCallback("train_loss")
    learn.fit(2, cbs=[tracker, SaveModelCallback(every_epoch=True)])
    assert tracker.best == min(row[0] for row in learn.recorder.values)


def test_a_logged_column_must_be_declared():
    log = Callback(after_train=lambda cb: cb.learn.log_metric("norm", 1.0))
    with pytest.raises(ValueError, match=r"train_loss, valid_loss\. .*`logs = \('norm',\)` in its class"):
        make_learner().fit(1, cbs=[log, TrackerCallback("norm")])
    log.logs = ("norm",)
    make_learner().fit(1, cbs=[log, TrackerCallback("norm")])


def test_rows_without_the_column_are_passed_over():
    stop = EarlyStoppingCallback("score", patience=2)
    seen, _ = follow(stop, [None, 1, None, None, 0, None, 0, 5])
    assert seen.epochs == [0, 1, 2, 3, 4, 5]
    assert seen.bests == [-inf, 1, 1, 1, 1, 1]


def test_a_column_that_never_comes_is_told_of():
    with pytest.warns(UserWarning, match=r"TrackerCallback .*none of the fit's 3 rows has a column 'score'"):
        follow(TrackerCallback("score"), [None] * 3)


# Where it acts


def test_trackers_begin_at_the_start_epoch():
    stop, save, seen = EarlyStoppingCallback("score", patience=2), SaveModelCallback("score"), []
    found, learn = follow(stop, [1, 0, 0, 9], learn=make_learner(cbs=[save]), start_epoch=3)
    assert found.epochs == [3, 4]
    assert found.news == [True, False]
    assert same_weights(learn.model, found.weights[0])
    assert seen == []


def test_other_runs_in_mid_fit_do_not_disturb():
    def look(cb):
        cb.learn.validate()
        cb.learn.get_preds()

    def trackers():
        return [EarlyStoppingCallback("score", patience=2), SaveModelCallback("score"), ReduceLROnPlateau("score")]

    values, found = [1, 2, 0, 1, 3], []
    for others in (
        [],
        [Callback(after_batch=lambda cb: cb.training and look(cb), before_epoch=look, after_epoch=look)],
    ):
        learn = make_learner(cbs=[*others, *trackers(), TerminateOnNaNCallback()])
        seen, _ = follow(TrackerCallback("score"), values, learn=learn)
        learn.validate()
        found.append((seen.news, seen.bests, seen.rates, weights(learn.model)))
    assert found[0][:3] == found[1][:3]
    assert same_weights(found[0][3], found[1][3])
    assert found[0][0] == [True, True, False]  # and then it has stopped


def test_trackers_take_rows_in_mid_epoch():
    """Whoever adds a row calls `take_row` of the trackers, in order."""

    class Middle(Callback):
        order = 80
        run_valid = False

        def after_batch(self):
            if self.iter == 0:
                recorder = self.learn.recorder
                recorder.final_record = [0.0, self.values.pop(0)]
                for cb in sorted(self.learn.cbs, key=lambda cb: cb.order):
                    if isinstance(cb, TrackerCallback):
                        cb.take_row()

    middle = Middle()
    middle.values = [0.5, 9.0, 0.25, 9.0, 9.0]
    stop, save, every = (
        EarlyStoppingCallback(patience=4),
        SaveModelCallback(fname="best"),
        SaveModelCallback(every_epoch=2),
    )
    learn, at = make_learner(loss_func=lambda pred, y: (pred - y).square().mean() + 1.0), []
    note = Callback(after_batch=lambda cb: cb.training and at.append(weights(cb.model)), order=79)
    learn.fit(5, cbs=[middle, stop, save, every, note])
    assert stop.best == save.best == 0.25
    assert learn.epoch == 4  # 0.25 at the middle of epoch 2; patience ends at the middle of epoch 4
    assert len(at) == 2 * 4 + 1
    assert same_weights(learn.model, at[2 * 2])
    assert sorted(p.name for p in (learn.path / "models").iterdir()) == ["best.pth", "model_0.pth", "model_2.pth"]


# EarlyStoppingCallback


@pytest.mark.parametrize(
    ("values", "kwargs", "epochs"),
    [
        ([1, 2, 3, 3, 9, 9], {}, 4),
        ([1, 2, 3, 3, 9, 9], {"patience": 2}, 6),
        ([1, 0, 0, 2, 0, 0, 0, 3], {"patience": 3}, 7),
        ([1, 1.2, 1.4, 2, 3], {"min_delta": 0.5, "patience": 3}, 5),
        ([1, 1.2, 1.4, 2, 3], {"min_delta": 0.5, "patience": 2}, 3),
        ([1, nan, nan, 3], {"patience": 2}, 3),
        ([nan, nan, 3], {"patience": 2}, 2),
        ([3, 2, 2, 1], {"comp": operator.lt}, 3),
    ],
)
def test_early_stopping_stops_after_its_patience(values, kwargs, epochs):
    seen, learn = follow(EarlyStoppingCallback("score", **kwargs), values)
    assert seen.epochs == list(range(epochs))[: len(seen.epochs)]
    assert len(learn.recorder.values) == epochs


def test_patience_starts_anew_with_each_fit():
    for reset, epochs in ((True, 3), (False, 2)):
        stop, learn = EarlyStoppingCallback("score", patience=2, reset_on_fit=reset), make_learner()
        follow(stop, [5, 4], learn=learn)
        follow(stop, [3, 3, 3, 9], learn=learn)
        assert len(learn.recorder.values) == epochs


def test_it_says_so_on_rank_0_in_one_line(capsys, monkeypatch):
    follow(EarlyStoppingCallback("score", patience=2), [0.5, 0.25, 0.25, 1])
    assert capsys.readouterr().out == "epoch 2: no better score than 0.5 in 2 rows: stopping\n"
    follow(EarlyStoppingCallback("score", min_delta=0.25), [0.5, 0.75, 1])  # a better one, but not by enough
    assert capsys.readouterr().out == (
        "epoch 1: no better score than 0.5 (by more than min_delta=0.25) in 1 row: stopping\n"
    )
    monkeypatch.setattr(distributed, "is_main", lambda: False)
    follow(EarlyStoppingCallback("score"), [0.5, 0.25, 1])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("patience", [0, -1, 1.5, None, True])
def test_bad_patience_is_refused(patience):
    with pytest.raises(TypeError, match=r"got comp='min'; it is a function of \(value, best\)"):
        SaveModelCallback(comp="min")
    for cls in (EarlyStoppingCallback, ReduceLROnPlateau):
        with pytest.raises(ValueError, match=f"patience={patience}; it is a number of rows"):
            cls(patience=patience)


# SaveModelCallback


def saved(learn, name="model"):
    return torch.load(learn.path / "models" / f"{name}.pth", weights_only=True)


def test_the_best_is_saved_and_loaded_at_the_end(capsys):
    save = SaveModelCallback("score")
    seen, learn = follow(save, [1, 3, 2, 0])
    assert same_weights(learn.model, seen.weights[1])
    assert not same_weights(seen.weights[1], seen.weights[3])
    assert same_weights(saved(learn), seen.weights[1])
    assert save.last_saved_path == learn.path / "models" / "model.pth"
    assert capsys.readouterr().out == "loaded the best model (score 3) from models/model.pth\n"


class Shifted(nn.MSELoss):
    """A loss with a parameter, which falls with each step."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.ones(()))

    def forward(self, pred, y):
        return super().forward(pred, y) + self.shift


@pytest.mark.parametrize("resumed", [False, True])
def test_the_best_model_has_the_parameters_of_the_loss_with_it(tmp_path, resumed):
    seen = []
    for dies in (True, False) if resumed else (False,):
        loss = Shifted()
        learn = make_learner(
            loss_func=loss,
            splitter=lambda model, loss=loss: [[*model.parameters(), *loss.parameters()]],
            cbs=[
                CheckpointCallback(tmp_path, resume=resumed and not dies),
                raising("before_train", ZeroDivisionError, lambda cb, dies=dies: dies and cb.epoch == 2),
                Callback(after_epoch=lambda cb: seen.append(cb.learn.loss_func.shift.item())),
            ],
        )
        with suppress(ZeroDivisionError), learn.no_logging():
            learn.fit(3, 0.1, cbs=[Script([1, 3, 2]), SaveModelCallback("score")])
    assert len(set(seen)) == 3
    assert loss.shift.item() == seen[1]


def test_the_best_is_loaded_also_after_an_early_stop():
    stop, save = EarlyStoppingCallback("score", patience=2), SaveModelCallback("score", fname="best.pth")
    seen, learn = follow(save, [1, 3, 2, 0, 9], learn=make_learner(cbs=stop))
    assert len(learn.recorder.values) == 4
    assert same_weights(learn.model, seen.weights[1])
    assert same_weights(saved(learn, "best"), seen.weights[1])


@pytest.mark.parametrize("one", [{}, {"at_end": True}, {"every_epoch": 2, "at_end": True}])
@pytest.mark.parametrize("two", [{"monitor": "train_loss"}, {"at_end": True}, {"every_epoch": True, "at_end": True}])
def test_two_that_would_overwrite_each_others_file_are_refused(one, two):
    learn = make_learner(cbs=[SaveModelCallback(**one), SaveModelCallback(fname="model.pth", **two)])
    with pytest.raises(ValueError, match="two callbacks SaveModelCallback save to .*model.pth.* different `fname`s"):
        learn.fit(1)
    off = SaveModelCallback()
    off.run = False
    others = [SaveModelCallback(fname="other"), SaveModelCallback(every_epoch=2), SaveModelCallback(every_epoch=True)]
    learn = make_learner(cbs=[SaveModelCallback(), off, *others])
    learn.fit(1)
    learn.fit(1)


def test_a_fit_that_was_done_before_tells_its_best_file():
    paths = []
    for _ in range(2):
        save = SaveModelCallback("score")
        make_learner(cbs=[Script([3, 1]), save, CheckpointCallback("run", resume=True)]).fit(2)
        paths.append(save.last_saved_path)
    assert paths[0] == paths[1] == Path("models/model.pth")


def test_a_best_whose_file_is_gone_is_forgotten_when_a_run_is_resumed(capsys):
    def run(n_epoch):
        cbs = [Script([3, 1, 2, 0]), SaveModelCallback("score"), CheckpointCallback("run", resume=True)]
        learn = make_learner(cbs=cbs)
        learn.fit(n_epoch)

    run(1)
    Path("models/model.pth").unlink()
    with pytest.warns(UserWarning, match=r"model.pth is not there any more, with the best model .*score 3"):
        run(4)
    assert "loaded the best model (score 2)" in capsys.readouterr().out


@pytest.mark.parametrize("values", [[nan, nan], [], [-inf]])
def test_without_a_best_no_stale_file_is_loaded(values, capsys):
    seen, learn = follow(save := SaveModelCallback("score"), [1])
    capsys.readouterr()
    trained = Follow(TrackerCallback())
    with learn.no_logging():
        learn.fit(len(values), cbs=[Script(values), save, trained])
    assert same_weights(learn.model, trained.weights[-1] if values else seen.weights[0])
    assert same_weights(saved(learn), seen.weights[0])
    said = "no model was saved: no row has a score better than -inf, and NaN never is\n"
    assert capsys.readouterr().out == (said if values else "")


def test_the_best_of_an_earlier_fit():
    for reset, values, expected in ((False, [3, 4], 0), (False, [], 0), (False, [3, 9], 2), (True, [3, 4], 2)):
        save, learn = SaveModelCallback("score", reset_on_fit=reset), make_learner()
        seen = follow(save, [5, 4], learn=learn)[0].weights[:1]
        last = follow(save, values, learn=learn)[0].weights
        assert same_weights(learn.model, [*seen, *last][expected]), (reset, values)


def test_every_epoch_saves_a_file_for_each():
    for every, epochs in ((True, [0, 1, 2, 3]), (1, [0, 1, 2, 3]), (2, [0, 2]), (3, [0, 3])):
        save = SaveModelCallback(fname=f"by{every}", every_epoch=every, monitor="of no interest")
        seen, learn = follow(save, [1, 3, 2, 0])
        files = sorted((learn.path / "models").glob(f"by{every}_*.pth"))
        assert [p.stem for p in files] == [f"by{every}_{epoch}" for epoch in epochs]
        assert all(same_weights(saved(learn, f"by{every}_{epoch}"), seen.weights[epoch]) for epoch in epochs)
        assert same_weights(learn.model, seen.weights[3])
        assert save.last_saved_path == files[-1]


def test_at_end_saves_the_last_weights():
    save = SaveModelCallback("score", at_end=True)
    seen, learn = follow(save, [1, 3, 2, 0])
    assert same_weights(learn.model, seen.weights[3])
    assert same_weights(saved(learn), seen.weights[3])
    assert save.best == 3
    save = SaveModelCallback(fname="end", every_epoch=True, at_end=True)
    seen, learn = follow(save, [1, 2])
    assert {p.stem for p in (learn.path / "models").glob("end*")} == {"end", "end_0", "end_1"}
    assert save.last_saved_path.stem == "end"


def test_with_opt_saves_the_optimizer_too():
    def learner():
        return make_learner(opt_func=torch.optim.Adam, lr=0.01)

    step = {}
    for with_opt in (False, True):
        _, learn = follow(SaveModelCallback("score", with_opt=with_opt), [1, 3, 2, 0], learn=learner())
        step[with_opt] = int(next(iter(learn.opt.state.values()))["step"])
        assert set(saved(learn)) == ({"model", "opt"} if with_opt else set(learn.model.state_dict()))
    assert step == {False: 8, True: 4}


def test_saved_files_have_the_names_that_are_given(tmp_path):
    save = SaveModelCallback("score", fname=tmp_path / "there" / "best.pt")
    seen, learn = follow(save, [3, 1])
    assert same_weights(learn.model, seen.weights[0])
    assert save.last_saved_path == tmp_path / "there" / "best.pt"
    follow(SaveModelCallback(fname=tmp_path / "there" / "best.pt", every_epoch=True), [3, 1])
    assert {p.name for p in (tmp_path / "there").iterdir()} == {"best.pt", "best_0.pt", "best_1.pt"}
    with pytest.raises(ValueError, match=r"'\.\./x'"):
        SaveModelCallback(fname="../x")
    for name in ("net", "net.pth", "net.safetensors"):
        follow(SaveModelCallback(fname=name, every_epoch=True), [3])
    assert {p.name for p in (tmp_path / "models").iterdir() if p.name.startswith("net")} == {
        "net_0.pth",
        "net_0.safetensors",
    }
    for every in (-1, 0.5, "2"):
        with pytest.raises(ValueError, match=f"every_epoch={every!r}; it is True, False or a number"):
            SaveModelCallback(every_epoch=every)


def test_an_error_leaves_the_model_as_it_is():
    seen = Follow(TrackerCallback())
    learn, save = make_learner(), SaveModelCallback("score")
    with pytest.raises(ZeroDivisionError):
        learn.fit(
            3,
            cbs=[Script([3, 1, 2]), save, seen, raising("before_epoch", ZeroDivisionError(), lambda cb: cb.epoch == 2)],
        )
    assert same_weights(learn.model, seen.weights[1])


# ReduceLROnPlateau


def rates(values, lr=1.0, learn=None, **kwargs):
    """The rates after each row."""
    seen, _ = follow(ReduceLROnPlateau("score", **kwargs), values, learn=learn, lr=lr)
    return [rate[0] if len(set(rate)) == 1 else rate for rate in seen.rates]


@pytest.mark.parametrize(
    ("values", "kwargs", "expected"),
    [
        ([1, 2, 2, 3, 1], {}, [1, 1, 0.1, 0.1, 0.01]),
        ([1, 0, 0, 0, 0, 0], {"patience": 2, "factor": 2}, [1, 1, 0.5, 0.5, 0.25, 0.25]),
        ([1, 0, 2, 0, 0], {"patience": 2}, [1, 1, 1, 1, 0.1]),
        ([1, 0, 0, 0], {"factor": 4, "min_lr": 0.1}, [1, 0.25, 0.1, 0.1]),
        ([1, 0], {"min_lr": 2}, [1, 1]),
        ([2, 1, 0.9], {"comp": np.less, "min_delta": 0.5, "factor": 2}, [1, 1, 0.5]),
        ([1, nan, nan], {}, [1, 0.1, 0.01]),
        ([1, None, 1, None, 1], {"patience": 2}, [1, 1, 1, 1, 0.1]),
    ],
)
def test_the_rate_is_reduced_after_its_patience(values, kwargs, expected):
    assert rates(values, **kwargs) == pytest.approx(expected)


def test_the_reduced_rate_is_the_one_used():
    learn = make_learner()
    follow(ReduceLROnPlateau("score", factor=2), [1, 0, 0], learn=learn, lr=0.5)
    assert learn.recorder.lrs == [0.5, 0.5, 0.5, 0.5, 0.25, 0.25]
    learn.fit(1, 0.5)
    assert learn.recorder.lrs == [0.5, 0.5]


def test_every_group_is_reduced(capsys):
    learn = make_learner(splitter=halves)
    found = rates([1, 0, 0], lr=[0.1, 1.0], learn=learn, factor=2, min_lr=0.04)
    assert sum(found, []) == pytest.approx([0.1, 1, 0.05, 0.5, 0.04, 0.25])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "epoch 1: no better score than 1 in 1 row: learning rate 0.1, 1 -> 0.05, 0.5"
    assert len(lines) == 2
    learn = make_learner(splitter=halves, wd=0.1)  # parted further, for weight decay
    found = rates([1, 0], lr=[0.1, 1.0], learn=learn)
    assert sum(found, []) == pytest.approx([0.1, 0.1, 1, 1, 0.01, 0.01, 0.1, 0.1])


def test_the_rates_of_several_optimizers_are_reduced():
    class Two(type(make_learner())):
        def create_opt(self):
            self.opt = {str(i): self.opt_func(group, lr=self.lr) for i, group in enumerate(halves(self.model))}

    assert rates([1, 0], learn=make_learner(cls=Two)) == pytest.approx([1, 0.1])


def test_rates_that_are_tensors_are_reduced_and_stay_tensors():
    def sgd(groups, lr):
        return torch.optim.SGD(groups, lr=torch.tensor(lr))

    learn = make_learner(opt_func=sgd)
    assert rates([1, 0, 0], learn=learn) == pytest.approx([1, 0.1, 0.01])
    assert isinstance(learn.opt.param_groups[0]["lr"], torch.Tensor)


def test_at_the_lowest_rate_it_is_quiet(capsys):
    rates([1, 0, 0, 0], min_lr=0.1)
    assert capsys.readouterr().out.count("\n") == 1


def test_a_schedule_of_the_rate_is_refused():
    learn = make_learner()
    for train in (lambda cb: learn.fit_one_cycle(1, cbs=cb), lambda cb: learn.fit(1, cbs=[sched({"lr": half}), cb])):
        with pytest.raises(ValueError, match="ReduceLROnPlateau cannot be combined with a schedule of 'lr'"):
            train(ReduceLROnPlateau())
    learn.opt_func, learn.opt = (lambda groups, lr: torch.optim.SGD(groups, lr, 0.9)), None
    learn.fit(1, cbs=[sched({"momentum": half}), ReduceLROnPlateau()])
    learn.fit_one_cycle(1, cbs=[SaveModelCallback(), EarlyStoppingCallback()])


sched, half = ParamScheduler, combined_cos(0.5, 0.1, 0.5, 0.1)


@pytest.mark.parametrize("kwargs", [{"factor": 1}, {"factor": nan}, {"factor": None}, {"min_lr": -1}])
def test_bad_factors_are_refused(kwargs):
    with pytest.raises(ValueError, match=f"got {next(iter(kwargs))}="):
        ReduceLROnPlateau(**kwargs)


# TerminateOnNaNCallback


class Spoil(Callback):
    """Makes the loss of one step what it should not be."""

    run_valid = False

    def __init__(self, value=nan, epoch=1, step=1, what=("loss", "loss_grad")):
        super().__init__()
        self.value, self.at, self.what = value, (epoch, step), what
        self.weights = None

    def after_loss(self):
        if (self.epoch, self.iter) == self.at:
            self.weights = weights(self.model)
            for name in self.what:
                setattr(self.learn, name, getattr(self.learn, name) * 0 + self.value)


@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("what", [["loss", "loss_grad"], ["loss"], ["loss_grad"]])
def test_a_loss_that_is_no_number_ends_the_fit_at_that_batch(value, what, capsys):
    learn, spoil = make_learner(), Spoil(value, what=what)
    with learn.no_logging():
        learn.fit(5, cbs=[spoil, TerminateOnNaNCallback()])
    assert (learn.epoch, len(learn.recorder.values), learn.train_iter) == (1, 1, 3)
    assert same_weights(learn.model, spoil.weights)
    assert all(p.grad is None for p in learn.model.parameters())
    assert capsys.readouterr().out == f"epoch 1: the training loss of step 1 is {value}: stopping\n"


def test_the_next_fit_begins_anew(capsys):
    learn = make_learner(cbs=(end := TerminateOnNaNCallback()))
    with learn.no_logging():
        learn.fit(2, cbs=Spoil())
        capsys.readouterr()
        learn.fit(2, cbs=raising("before_epoch", CancelFitException(), lambda cb: cb.epoch == 1))
    assert len(learn.recorder.values) == 1
    assert capsys.readouterr().out == ""
    assert pickle.loads(pickle.dumps(vars(end) | {"learn": None}))


def test_it_hears_of_other_cancels_without_a_word(capsys):
    learn = make_learner(cbs=TerminateOnNaNCallback())
    follow(EarlyStoppingCallback("score"), [1, 0, 1], learn=learn)
    assert capsys.readouterr().out.count("\n") == 1


def test_batches_without_a_loss_and_a_validation_that_is_no_number():
    class Cancel(Callback):
        def before_batch(self):
            if self.training and self.iter == 0:
                raise CancelBatchException

        def before_backward(self):
            if self.iter == 1:
                raise CancelBackwardException

        def after_loss(self):
            if not self.training:
                self.learn.loss = self.loss * nan

    learn = make_learner(cbs=[Cancel(), TerminateOnNaNCallback()])
    with learn.no_logging():
        learn.fit(2)
    assert len(learn.recorder.values) == 2


def test_the_mean_of_nothing_counts_nothing_where_batches_are_weighed():
    learn = make_ignoring(GradientAccumulation(n_batches=2), TerminateOnNaNCallback())
    learn.fit(2)
    assert len(learn.recorder.values) == 2
    assert all(p.isfinite().all() for p in learn.model.parameters())
    learn = make_ignoring(TerminateOnNaNCallback())
    before = Callback(after_step=lambda cb: setattr(cb, "found", weights(cb.model)))
    learn.fit(2, cbs=before)
    assert (learn.epoch, learn.train_iter) == (0, 1)
    assert same_weights(learn.model, before.found)


def make_ignoring(*cbs):
    """Four batches, of whose second no target counts."""
    data = make_classes(16)
    data.tensors[1][4:8] = 7
    dls = DataLoaders(DataLoader(data, 4), device="cpu")
    return make_learner(dls, make_model(n_out=3), nn.CrossEntropyLoss(ignore_index=7), cbs=list(cbs))


@pytest.mark.parametrize("value", [nan, inf])
def test_without_it_the_first_loss_that_is_no_number_is_told_once_in_a_fit(value, capsys):
    learn = make_learner()
    told = f"epoch 1: the training loss of step 1 is {value}, the first that is not finite: try a lower learning rate"
    with learn.no_logging(), learn.no_bar():
        for _ in range(2):
            learn.fit(4, cbs=Spoil(value, what=["loss"]))
            out = capsys.readouterr().out
            assert out.startswith(told)
            assert out.count("\n") == 1
        learn.fit(2)
        assert capsys.readouterr().out == ""
        with pytest.raises(ZeroDivisionError):  # an error has its own text
            learn.fit(1, cbs=[Spoil(epoch=0, step=0), Callback(after_train=lambda cb: 1 / 0)])
        learn.fit(1, cbs=[Spoil(epoch=0, step=0, what=["loss"]), raising("after_batch", CancelFitException())])
        assert "the training loss of step 0" in capsys.readouterr().out
    quiet = make_learner(DataLoaders(make_ignoring().dls.train, device="cpu"), make_model(n_out=3))
    quiet.loss_func = nn.CrossEntropyLoss(ignore_index=7)
    with quiet.no_logging(), quiet.no_bar():
        quiet.fit(1, lr=0.0, cbs=GradientAccumulation(n_batches=2))  # the mean of nothing
    assert "finite" not in capsys.readouterr().out


def test_it_is_told_in_mid_epoch_where_losses_are_read(capsys):
    def look(cb):
        if cb.training:
            cb.learn.recorder.recent_losses()
            said.append("the training loss of step 2 is nan" in capsys.readouterr().out)

    said = []
    learn = make_learner(make_dls(24))
    with learn.no_logging(), learn.no_bar():
        learn.fit(1, cbs=[Spoil(epoch=0, step=2, what=["loss"]), Callback(after_batch=look, order=90)])
    assert said == [False, False, True, False, False, False]
    assert capsys.readouterr().out == ""


@pytest.fixture
def far_away(monkeypatch):
    """As if losses and counts were on an accelerator; what has been copied arrives at the next look."""

    class Slow(tracking.HostScalars):
        def poll(self):
            now = list(self._host)
            super().poll()
            return now

    monkeypatch.setattr(tracking, "_is_on_host", lambda x: not isinstance(x, torch.Tensor))
    monkeypatch.setattr(tracking, "HostScalars", Slow)


def test_on_an_accelerator_it_ends_some_steps_later_and_names_the_step(far_away, capsys):
    learn = make_learner(make_dls(train=32, bs=1), cbs=[Spoil(step=5, what=["loss"]), TerminateOnNaNCallback()])
    with learn.no_logging():
        learn.fit(3)
    assert (learn.epoch, learn.train_iter) == (1, 32 + 12)
    assert capsys.readouterr().out == "epoch 1: the training loss of step 5 is nan: stopping\n"


@pytest.mark.parametrize("end", [None, CancelTrainException, CancelEpochException])
def test_on_an_accelerator_the_last_losses_of_an_epoch_are_looked_at(far_away, capsys, end):
    cbs = [Spoil(epoch=0, what=["loss"]), TerminateOnNaNCallback()]
    cbs += [raising("after_batch", end(), lambda cb: cb.iter == 1)] if end else []
    learn = make_learner(make_dls(train=16), cbs=cbs)
    with learn.no_logging():
        learn.fit(3)
    assert learn.epoch == (1 if end is CancelEpochException else 0)
    assert capsys.readouterr().out == "epoch 0: the training loss of step 1 is nan: stopping\n"
    assert len(learn.recorder.values) == learn.epoch


def test_on_an_accelerator_the_mean_of_nothing_counts_nothing(far_away):
    learn = make_ignoring(GradientAccumulation(n_batches=2), TerminateOnNaNCallback())
    learn.fit(2)
    assert len(learn.recorder.values) == 2


# Together with the rest


def test_what_is_said_stands_between_rows(capsys):
    learn = make_learner()
    learn.fit(5, cbs=[Script([1, 2, 0, 0]), EarlyStoppingCallback("score", patience=2), ReduceLROnPlateau("score")])
    lines = capsys.readouterr().out.splitlines()
    starts = [line.split()[0] for line in lines]
    assert starts == ["epoch", "0", "1", "2", "epoch", "3", "epoch", "epoch"]
    assert lines[-1].endswith("stopping")


def test_trackers_decide_the_same_with_data_parallel(two_gpus):
    learn, seen = make_learner(cbs=TerminateOnNaNCallback()), []
    look = Callback(
        after_epoch=lambda cb: seen.append((isinstance(cb.model, Wrapped), weights(cb.learn.model.module))), order=70
    )
    with learn.parallel_ctx(), learn.no_logging():
        cbs = [look, EarlyStoppingCallback("score", patience=2), SaveModelCallback("score")]
        learn.fit(5, cbs=[Script([1, 3, 2, 2, 9]), *cbs, ReduceLROnPlateau("score", patience=2)])
    assert len(learn.recorder.values) == 4
    assert all(wrapped for wrapped, _ in seen)
    assert same_weights(learn.model, seen[1][1])
    assert same_weights(saved(learn), seen[1][1])
    before = weights(learn.model)
    with learn.parallel_ctx(), learn.no_logging():
        learn.fit(2, cbs=Spoil(epoch=0, step=0))
    assert same_weights(learn.model, before)


@pytest.mark.parametrize(
    ("make", "given", "hint"),
    [
        (EarlyStoppingCallback, "mode", "did you mean 'comp'"),
        (ReduceLROnPlateau, "delta", "did you mean 'min_delta'"),
        (SaveModelCallback, "filename", "did you mean 'fname'"),
        (SaveModelCallback, "save_top_k", "it takes monitor, comp, "),
        (GradientAccumulation, "accumulation_steps", "did you mean 'n_batches'"),
    ],
)
def test_a_keyword_of_other_libraries_is_refused_with_the_one_of_this(make, given, hint):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{given}'; {hint}"):
        make(**{given: 1})


# On a GPU


@pytest.mark.gpu
def test_on_a_gpu_a_nan_ends_the_fit_without_a_sync_per_step(capsys):
    def learner(*cbs):
        data = make_data(256)
        dls = DataLoaders(DataLoader(data, 1), DataLoader(make_data(4), 4), device="cuda")
        return make_learner(dls, cbs=list(cbs))

    learn = learner(Spoil(epoch=0, step=20), TerminateOnNaNCallback())
    with learn.no_logging():
        learn.fit(2)
    assert (learn.epoch, 20 < learn.train_iter < 256) == (0, True)
    assert "epoch 0: the training loss of step 20 is nan" in capsys.readouterr().out

    def strictly(cb):
        torch.cuda.set_sync_debug_mode(2 if cb.training and 1 < cb.iter < 250 else 0)

    learn = learner(
        TerminateOnNaNCallback(), Callback(before_backward=strictly, order=-20), Callback(after_loss=strictly)
    )
    try:
        learn.fit(1)
    finally:
        torch.cuda.set_sync_debug_mode(0)


@pytest.mark.gpu
def test_trackers_save_the_best_weights_on_a_gpu():
    learn = make_learner(DataLoaders(DataLoader(make_data(8), 4), DataLoader(make_data(4), 4), device="cuda"))
    seen, _ = follow(SaveModelCallback("score"), [1, 3, 2, 0], learn=learn)
    assert same_weights(learn.model, seen.weights[1])
