"""The recorder: columns, losses, logged values, history, the plot, the table."""

import contextlib
import io
import itertools
import math
import re
import sys
from functools import partial

import pytest
import torch
from helpers import make_classes, make_data, make_dls, make_learner, make_model, raises, raising
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import (
    EMA,
    AccumMetric,
    ActivationStats,
    BatchTransform,
    Callback,
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelTrainException,
    ChannelsLast,
    CheckpointCallback,
    DataLoaders,
    GradientClip,
    ImageAugmentation,
    Learner,
    MixedPrecision,
    Recorder,
    ValidateEvery,
    accuracy,
    mae,
    mse,
    rmse,
)
from learnerkit.callbacks import progress
from learnerkit.callbacks.recorder import format_row


def learner(metrics=(mae,), dls=None, cbs=(), recorder=None, **kwargs):
    learn = make_learner(dls, metrics=list(metrics), cbs=cbs, **kwargs)
    if recorder is not None:
        learn.remove_cb(Recorder).add_cb(recorder)
    return learn


def train_losses(batches, epochs, model=None, loss_func=F.mse_loss, lr=0.1):
    """The loss of every batch, by a loop written by hand."""
    model = model or make_model()
    opt = SGD(model.parameters(), lr=lr, fused=True)  # as the learner's
    losses = []
    for _ in range(epochs):
        for x, y in batches:
            loss = loss_func(model(x), y)
            losses.append(loss.item())
            loss.backward()
            opt.step()
            opt.zero_grad()
    return losses


def smoothed(losses, beta):
    """Exponential averages, corrected for their start."""
    found, average = [], 0.0
    for i, loss in enumerate(losses):
        average = beta * average + (1 - beta) * loss
        found.append(average / (1 - beta ** (i + 1)))
    return found


# Columns


@pytest.mark.parametrize("train_metrics", [True, False])
@pytest.mark.parametrize("valid_metrics", [True, False])
def test_columns_and_values_agree(train_metrics, valid_metrics):
    for add_time, valid, logged in itertools.product([True, False], [4, None], [True, False]):
        check_columns(add_time, train_metrics, valid_metrics, valid, logged)


def check_columns(add_time, train_metrics, valid_metrics, valid, logged):
    recorder = Recorder(add_time=add_time, train_metrics=train_metrics, valid_metrics=valid_metrics)
    log = Callback(after_batch=lambda cb: cb.learn.log_metric("extra", cb.iter))
    learn = learner([mae, mse], make_dls(valid=valid), [log] if logged else [], recorder)
    learn.fit(2)
    prefix = ("train_", "valid_") if train_metrics else ("", "")
    expected = ["epoch", "train_loss"]
    if train_metrics:
        expected += ["train_mae", "train_mse"]
    if valid:
        expected += ["valid_loss"]
        if valid_metrics:
            expected += [prefix[1] + "mae", prefix[1] + "mse"]
    if logged:
        expected += ["extra"]
    if add_time:
        expected += ["time"]
    if not valid and valid_metrics:
        expected = [name for name in expected if name not in ("valid_mae", "valid_mse")]
    assert recorder.metric_names == expected
    width = len(expected) - 1 - add_time
    assert [len(row) for row in recorder.values] == [width] * 2
    assert all(type(value) is float for row in recorder.values for value in row)
    assert recorder.final_record == recorder.values[-1]
    assert recorder.log[: 1 + width] == [1, *recorder.final_record]
    assert len(recorder.log) == len(expected)
    if add_time:
        assert re.fullmatch(r"\d\d:\d\d\.\d", recorder.log[-1])


def test_a_second_recorder_with_other_columns_is_refused():
    learn, other = make_learner(metrics=mae), Recorder(train_metrics=True)
    with raises(ValueError, "a second Recorder with other columns", "learn.recorder.train_metrics = True"):
        learn.fit(1, cbs=other)
    learn.add_cb(other)
    with raises(ValueError, "a second Recorder with other columns"):
        learn.fit(1)
    learn.remove_cb(other)
    learn.fit(1)


def test_the_last_row_is_not_read_in_place_of_the_one_to_come():
    rows = []
    early = Callback(after_epoch=lambda cb: cb.recorder.log)

    def note(cb):
        rows.append(cb.recorder.log)

    learn = make_learner(cbs=[early, Callback(order=51, before_train=note, after_epoch=note)])
    with raises(RuntimeError, "has the row of epoch 0", "`order = 51`"):
        learn.fit(2)
    assert rows == [[]]
    assert learn.recorder.log == []  # it is no error after the fit
    learn.remove_cb(early)
    learn.fit(2)
    assert [row[:1] for row in rows] == [[], [], [0], [0], [1]]
    stop = raising("before_batch", CancelFitException, lambda cb: cb.training and cb.train_iter == 3)
    learn.fit(2, cbs=[stop, Callback(after_fit=note)])
    assert rows[-1][0] == 0  # that epoch has no row
    with pytest.raises(KeyboardInterrupt):
        learn.fit(2, cbs=raising("before_batch", KeyboardInterrupt, lambda cb: cb.training and cb.train_iter == 3))
    recorder = learn.recorder
    learn.remove_cb(recorder)
    assert recorder.log[0] == 0


def test_metrics_are_named_by_keys_names_and_functions():
    metrics = {"a": mae, "b": AccumMetric(lambda p, t: 1.0, name="c")}
    learn = make_learner(metrics=metrics)
    learn.fit(1)
    assert learn.recorder.metric_names == ["epoch", "train_loss", "valid_loss", "a", "b", "time"]
    learn = make_learner(metrics=[rmse, partial(mse), AccumMetric(lambda p, t: 1.0, name="own")])
    learn.fit(1)
    assert learn.recorder.metric_names[3:] == ["rmse", "mse", "own", "time"]


# Values


@pytest.mark.parametrize("bs", [4, 3])
@pytest.mark.parametrize("epochs", [1, 3])
def test_train_loss_is_the_epochs_mean_and_losses_are_smoothed(bs, epochs):
    data = make_data(10)
    batches = list(DataLoader(data, bs))
    learn = learner(dls=DataLoaders(DataLoader(data, bs), device="cpu"))
    learn.fit(epochs)
    raw = train_losses(batches, epochs)
    sizes = [len(x) for x, _ in batches] * epochs
    n = len(batches)
    for epoch in range(epochs):
        part = slice(epoch * n, (epoch + 1) * n)
        mean = sum(a * b for a, b in zip(raw[part], sizes[part], strict=True)) / 10
        assert learn.recorder.values[epoch][0] == pytest.approx(mean, rel=1e-6)
    assert learn.recorder.losses == pytest.approx(smoothed(raw, 0.98), rel=1e-6)
    assert learn.recorder.step_losses == pytest.approx(raw, rel=1e-6)
    assert learn.recorder.smooth_loss == learn.recorder.losses[-1] == learn.smooth_loss
    assert learn.recorder.iters == [n * (e + 1) for e in range(epochs)]
    assert learn.recorder.lrs == [0.1] * n * epochs


def test_rates_are_those_of_the_optimizer_after_a_load_in_mid_epoch(tmp_path):
    def load(cb):
        if cb.training and cb.iter == 1:
            cb.learn.load("before")
            cb.learn.opt.param_groups[-1]["lr"] = 0.02

    learn = learner(dls=make_dls(16, bs=4), path=tmp_path)
    learn.fit(1, 0.1)
    learn.save("before")
    learn.fit(1, 0.1, cbs=Callback(after_batch=load, order=60))
    assert learn.recorder.lrs == [0.1, 0.1, 0.02, 0.02]


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_beta_smooths(beta):
    learn = learner(recorder=Recorder(beta=beta))
    learn.fit(3)
    raw = train_losses(list(DataLoader(make_data(), 4)), 3)
    assert learn.recorder.losses == pytest.approx(smoothed(raw, beta), rel=1e-6)


@pytest.mark.parametrize("beta", [1, -0.1, 1.5, float("nan")])
def test_beta_is_less_than_1(beta):
    with pytest.raises(ValueError, match="got beta="):
        Recorder(beta=beta)


def test_the_losses_known_in_mid_epoch_are_those_of_the_end():
    seen, raw = [], []

    def look(cb):
        if cb.training:
            raw.append(cb.recorder.step_losses[-1])
            seen.append(cb.smooth_loss)
            assert len(cb.recorder.step_losses) == len(cb.recorder.lrs)

    learn = learner(cbs=Callback(after_batch=look, order=99))
    learn.fit(2)
    assert seen == learn.recorder.losses
    assert raw == learn.recorder.step_losses
    learn.fit(1)
    assert learn.recorder.history[0].step_losses == raw[:4]


def test_a_batch_that_counts_nothing_leaves_the_smoothed_loss_as_it_is():
    seen = []
    data = make_classes(16)
    data.tensors[1][4:8] = -100
    dls = DataLoaders(DataLoader(data, 4), device="cpu")
    look = Callback(after_batch=lambda cb: seen.append(cb.smooth_loss), order=99)
    learn = make_learner(dls, make_model(n_out=3), nn.CrossEntropyLoss(), cbs=look)
    learn.fit(1)
    assert seen == learn.recorder.losses
    assert seen[1] == seen[0] < seen[0] + abs(seen[2]) < float("inf")


def test_metrics_are_means_over_all_samples():
    data, valid = make_data(8), make_data(7, seed=1)
    dls = DataLoaders(DataLoader(data, 4), DataLoader(valid, 3), device="cpu")
    learn = learner([mae, rmse, AccumMetric(lambda p, t: (p - t).max())], dls)
    learn.fit(1)
    x, y = valid.tensors
    with torch.no_grad():
        pred = learn.model(x)
    expected = [F.mse_loss(pred, y), mae(pred, y), F.mse_loss(pred, y).sqrt(), (pred - y).max()]
    assert learn.recorder.final_record[1:] == pytest.approx([v.item() for v in expected], rel=1e-5)
    assert learn.validate() == pytest.approx(learn.recorder.final_record[1:], rel=1e-6)


def test_train_metrics_are_of_the_predictions_made_in_training():
    learn = learner([mae], recorder=Recorder(train_metrics=True))
    seen = []
    learn.add_cb(Callback(after_loss=lambda cb: cb.training and seen.append(mae(cb.pred, cb.y).item())))
    learn.fit(1)
    assert learn.recorder.values[0][1] == pytest.approx(sum(seen) / 2)


def test_train_metrics_of_an_epoch_that_other_processes_have_begun_are_nan(capsys):
    def go_on(cb):
        if cb.training and (cb.epoch, cb.iter) == (0, 0):
            state = cb.learn.recorder.state_dict()
            cb.learn.recorder.load_state_dict(state | {"ranks": [state.pop("own")] * 2})
            cb.learn.recorder.load_state_dict(cb.learn.recorder.state_dict())

    learn = learner([mae, rmse], recorder=Recorder(train_metrics=True))
    learn.fit(2, cbs=Callback(after_batch=go_on, order=100))
    (loss, *values, _, _, _), after = (row[:-1] for row in learn.recorder.values)
    assert math.isfinite(loss)
    assert all(map(math.isnan, values))
    assert all(map(math.isfinite, after))
    assert "training metrics of epoch 0 are nan" in capsys.readouterr().out


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_that_sum_are_averaged_over_samples(reduction):
    data = make_data(10)
    loss_func = nn.MSELoss(reduction=reduction)
    learn = learner(
        dls=DataLoaders(DataLoader(data, 4), DataLoader(data, 4), device="cpu"), loss_func=loss_func, lr=0.01
    )
    learn.fit(1)
    with torch.no_grad():
        expected = F.mse_loss(learn.model(data.tensors[0]), data.tensors[1]).item()
    assert learn.recorder.values[0][1] == pytest.approx(expected, rel=1e-5)
    raw = train_losses(list(DataLoader(data, 4)), 1, loss_func=loss_func, lr=0.01)
    total = sum(raw) / 10 if reduction == "sum" else sum(a * b for a, b in zip(raw, (4, 4, 2), strict=True)) / 10
    assert learn.recorder.values[0][0] == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("given", ["weight", "ignore_index", "both", "partial"])
def test_losses_that_average_over_other_items_are_weighted_by_them(given):
    x, y = make_classes(11).tensors
    weight = torch.tensor([0.2, 1.0, 3.0])
    options = {} if given == "ignore_index" else {"weight": weight}
    if given != "weight":
        options["ignore_index"] = 1
    loss_func = partial(F.cross_entropy, **options) if given == "partial" else nn.CrossEntropyLoss(**options)
    dls = DataLoaders(DataLoader(TensorDataset(x, y), 4), DataLoader(TensorDataset(x, y), 4), device="cpu")
    learn = learner([accuracy], dls, model=make_model(n_out=3), loss_func=loss_func)
    learn.fit(1, 0.0)
    with torch.no_grad():
        expected = F.cross_entropy(learn.model(x), y, **options).item()
    assert learn.recorder.values[0][:2] == pytest.approx([expected, expected], rel=1e-5)
    assert learn.validate()[0] == pytest.approx(expected, rel=1e-5)


def test_padded_tokens_do_not_count():
    x = torch.randn(6, 4, 5)
    y = torch.randint(3, (6, 5))
    y[:2, 1:] = -100
    y[5] = -100
    model = nn.Conv1d(4, 3, 1)
    dls = DataLoaders(DataLoader(TensorDataset(x, y), 2), DataLoader(TensorDataset(x, y), 4), device="cpu")
    learn = learner([], dls, model=model, loss_func=nn.CrossEntropyLoss())
    learn.fit(1, 0.0)
    with torch.no_grad():
        expected = F.cross_entropy(model(x), y).item()
    assert learn.recorder.values[0] == pytest.approx([expected, expected], rel=1e-5)


def test_loss_weight_counts_what_a_loss_of_ones_own_averages_over():
    def masked(pred, y):
        keep = y > 0
        return (pred - y)[keep].pow(2).sum() / keep.sum()

    data = make_data(10)
    dls = DataLoaders(DataLoader(data, 4), DataLoader(data, 4), device="cpu")
    learn = learner([], dls, loss_func=masked, loss_weight=lambda y: (y > 0).sum())
    learn.fit(1, 0.0)
    with torch.no_grad():
        expected = masked(learn.model(data.tensors[0]), data.tensors[1]).item()
    assert learn.recorder.values[0] == pytest.approx([expected, expected], rel=1e-5)
    with pytest.raises(ValueError, match="got loss_weight='mean'; it takes None, 'sum', or a function"):
        learner([], dls, loss_weight="mean")


def test_a_loss_changed_in_place_for_the_gradient_is_recorded_as_it_was():
    def penalise(cb):
        cb.learn.loss_grad += 100 * cb.pred.pow(2).mean()

    for event in ("after_loss", "before_backward"):
        learn = learner(cbs=Callback(**{event: lambda cb: cb.training and penalise(cb)}), dls=make_dls(train=4))
        learn.fit(1)
        assert learn.recorder.values[0][0] == pytest.approx(train_losses([make_data(4).tensors], 1)[0])


# Runs that end early


def test_a_cancelled_batch_counts_for_nothing():
    learn = learner(cbs=raising("after_pred", CancelBatchException))
    learn.fit(1)
    x, y = make_data().tensors
    assert learn.recorder.values[0][0] == pytest.approx(train_losses([(x[4:], y[4:])], 1)[0])
    assert len(learn.recorder.losses) == 1
    assert learn.recorder.iters == [1]


@pytest.mark.parametrize("order", [0, 99])
@pytest.mark.parametrize("error", [CancelBatchException, CancelEpochException])
def test_the_rates_of_a_schedule_are_those_of_the_batches_that_count(error, order):
    cancel = raising("before_batch", error, lambda cb: cb.training and cb.iter == 1, order=order)
    learn = learner(cbs=cancel)
    learn.fit_one_cycle(2, 0.1)
    assert learn.recorder.hps["lr"] == learn.recorder.lrs
    assert {len(values) for values in learn.recorder.hps.values()} == {len(learn.recorder.losses)}


def test_metrics_leave_out_a_batch_that_was_cancelled_before_its_prediction():
    cancel = raising("before_batch", CancelBatchException, lambda cb: not cb.training)
    learn = learner(dls=make_dls(valid=8), cbs=cancel)
    learn.fit(1)
    x, y = make_data(8, seed=1)[4:]
    pred = learn.model(x)
    assert learn.recorder.final_record[1:] == pytest.approx([F.mse_loss(pred, y).item(), mae(pred, y).item()])


def test_a_cut_epoch_has_a_row_of_what_was_seen():
    learn = learner(cbs=raising("before_batch", CancelTrainException, lambda cb: cb.iter == 1))
    learn.fit(2)
    raw = train_losses(list(DataLoader(make_data(), 4))[:1], 1)
    assert learn.recorder.values[0][0] == pytest.approx(raw[0])
    assert learn.recorder.iters == [1, 3]
    assert len(learn.recorder.values) == 2


def test_a_cancelled_epoch_without_validation_has_no_numbers_for_it():
    learn = learner(cbs=raising("before_step", CancelEpochException))
    learn.fit(2)
    assert len(learn.recorder.values) == 2
    assert str(learn.recorder.values[0][1:]) == "[nan, nan]"
    assert str(learn.recorder.values[1][1:]) != "[nan, nan]"


@pytest.mark.parametrize("error", [CancelFitException, KeyboardInterrupt, ValueError])
def test_a_fit_that_ends_in_mid_epoch_keeps_its_losses(error):
    learn = learner(cbs=raising("before_batch", error, lambda cb: cb.training and cb.train_iter == 3))
    with contextlib.suppress(KeyboardInterrupt, ValueError):
        learn.fit(3)
    raw = train_losses(list(DataLoader(make_data(), 4)), 2)[:3]
    assert learn.recorder.losses == pytest.approx(smoothed(raw, 0.98), rel=1e-6)
    assert len(learn.recorder.values) == 1
    assert len(learn.recorder.lrs) == 3
    learn.plot_loss() if hasattr(learn, "plot_loss") else None
    learn.fit(1)
    assert len(learn.recorder.history) == 1
    assert learn.recorder.history[0].losses == pytest.approx(smoothed(raw, 0.98), rel=1e-6)


# Logged values


def test_logged_values_are_means_over_the_epoch():
    def log(cb):
        if cb.training:
            cb.learn.log_metric("number", 10 * cb.epoch + cb.iter)
            cb.learn.log_metric("tensor", torch.tensor([float(cb.iter)], requires_grad=True))
        else:
            cb.learn.log_metric("valid", cb.loss)

    learn = learner(cbs=[Callback(after_batch=log), Callback(after_train=lambda cb: cb.learn.log_metric("once", True))])
    learn.fit(2)
    names = learn.recorder.metric_names
    assert names == ["epoch", "train_loss", "valid_loss", "mae", "number", "tensor", "once", "valid", "time"]
    for epoch, row in enumerate(learn.recorder.values):
        assert row[3:6] == [10 * epoch + 0.5, 0.5, 1.0]
        assert row[6] == pytest.approx(row[1])


def test_logged_parts_of_a_loss_add_up_to_it():
    def log(cb):
        if cb.training:
            cb.learn.log_metric("first", cb.loss / 4)
            cb.learn.log_metric("second", cb.loss * 3 / 4)

    for kwargs in ({}, {"loss_func": nn.MSELoss(), "loss_weight": lambda y: y.abs().sum()}):
        learn = learner([], make_dls(7), [Callback(after_loss=log)], **kwargs)  # the last batch is smaller
        learn.fit(2)
        for row in learn.recorder.values:
            assert row[2] + row[3] == pytest.approx(row[0], rel=1e-6)


def test_a_logged_weight_is_what_it_was_then():
    seen = []

    def log(cb):
        if cb.training:
            cb.learn.log_metric("weight", cb.model[0].weight[0, 0])
            seen.append(cb.model[0].weight[0, 0].item())

    learn = learner([], cbs=Callback(before_step=log))
    learn.fit(1)
    assert learn.recorder.values[0][-1] == pytest.approx(sum(seen) / 2)
    assert seen[0] != seen[1]


def test_a_column_that_comes_later_stands_in_the_rows_from_then_on(capsys):
    learn = learner([], cbs=Callback(after_train=lambda cb: cb.epoch == 1 and cb.learn.log_metric("late", 5)))
    learn.fit(3)
    assert [len(row) for row in learn.recorder.values] == [2, 3, 2]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if "epoch" in line] == [
        ["epoch", "train_loss", "valid_loss", "time"],
        ["epoch", "train_loss", "valid_loss", "late", "time"],
        ["epoch", "train_loss", "valid_loss", "time"],
    ]


def test_columns_that_callbacks_declare_are_known_before_there_is_a_row():
    seen = []
    look = Callback(before_train=lambda cb: seen.append(list(cb.recorder.metric_names)))
    learn = learner([], cbs=[GradientClip(1.0, log=True), look])
    learn.fit(1)
    assert seen == [learn.recorder.metric_names]
    assert "grad_norm" in seen[0]


def test_columns_keep_the_order_of_the_row_before():
    def log(cb):
        for name in ("a", "b") if cb.epoch == 0 else ("b", "c", "a"):
            cb.learn.log_metric(name, ord(name))

    learn = learner([], cbs=Callback(after_train=log))
    learn.fit(2)
    assert learn.recorder.metric_names[3:-1] == ["a", "b", "c"]
    assert [row[2:] for row in learn.recorder.values] == [[97, 98], [97, 98, 99]]


@pytest.mark.parametrize("name", ["train_loss", "valid_loss", "mae", "epoch", "time"])
def test_a_logged_name_that_is_taken_is_refused(name):
    learn = learner(cbs=Callback(after_batch=lambda cb: cb.learn.log_metric(name, 1)))
    with pytest.raises(ValueError, match=f"log_metric got '{name}', which is a column already"):
        learn.fit(1)


@pytest.mark.parametrize("value", ["a", None, [1]])
def test_a_logged_value_that_is_no_number_is_refused_where_it_is_logged(value):
    learn = learner(cbs=Callback(after_batch=lambda cb: cb.learn.log_metric("q", value)))
    with pytest.raises(ValueError, match=r"log_metric\('q'\) got .*; it takes one number") as caught:
        learn.fit(1)
    assert "after_batch" in caught.value.__notes__[0]


@pytest.mark.parametrize("value", [torch.ones(2), torch.ones(0), torch.ones(2, 2)])
def test_a_logged_value_is_one_number(value):
    learn = learner(cbs=Callback(after_batch=lambda cb: cb.learn.log_metric("x", value)))
    with pytest.raises(ValueError, match=r"log_metric\('x'\) got float32 tensor of shape"):
        learn.fit(1)


def test_nothing_is_logged_outside_a_fit():
    learn = learner(cbs=Callback(after_batch=lambda cb: cb.learn.log_metric("x", 1)))
    learn.log_metric("x", 1)
    assert len(learn.validate()) == 2
    learn.fit(1)
    names = list(learn.recorder.metric_names)
    learn.validate()
    assert learn.recorder.metric_names == names


@pytest.mark.parametrize("order", [0, 70])
def test_what_is_logged_before_an_epoch_is_in_its_row(order):
    log = {
        "before_fit": lambda cb: cb.learn.log_metric("of the fit", 7),
        "before_epoch": lambda cb: cb.learn.log_metric("of the epoch", cb.epoch),
    }
    learn = learner((), cbs=Callback(**log, order=order))
    for _ in range(2):
        learn.fit(2)
        first, second = learn.recorder.values
        assert (first[2:], second[2:]) == ([7, 0], [1])


@pytest.mark.parametrize(("event", "order"), [("after_epoch", 60), ("after_fit", 0)])
def test_what_is_logged_after_the_row_is_told_and_in_no_other_row(event, order):
    learn = learner((), cbs=Callback(**{event: lambda cb: cb.learn.log_metric(event, 1)}, order=order))
    with pytest.warns(UserWarning, match=rf"log_metric\('{event}'\) came after the row .* with an order below 50"):
        learn.fit(2)
    assert [len(row) for row in learn.recorder.values] == [2, 2]


@pytest.mark.parametrize(
    ("event", "error", "epochs"),
    [("after_batch", ValueError, 1), ("after_batch", CancelFitException, 1), ("after_epoch", CancelEpochException, 2)],
)
def test_what_was_logged_before_a_cancel_is_in_no_later_row(event, error, epochs):
    def log(cb):
        first = not done
        cb.learn.log_metric("x", 100 if first else 1)
        done.append(True)
        if first:
            raise error

    done = []
    learn = learner((), cbs=Callback(**{event: log}))
    with contextlib.suppress(ValueError):
        learn.fit(epochs)
    if epochs == 1:
        learn.fit(1)
    assert learn.recorder.values[-1][2:] == [1]


class OwnRecorder(Recorder):
    """A recorder that adds nothing."""


@pytest.mark.parametrize("kind", [Recorder, OwnRecorder])
def test_a_recorder_of_ones_own_is_in_place_of_the_default(kind):
    learn = learner((mae,), cbs=kind(train_metrics=True))
    learn.fit(1)
    assert [cb for cb in learn.cbs if isinstance(cb, Recorder)] == [learn.recorder]
    assert learn.recorder.metric_names[1:3] == ["train_loss", "train_mae"]


# History and plot


def test_the_table_comes_as_a_frame(tmp_path):
    def log(cb):
        if cb.epoch == 1:
            cb.learn.log_metric("norm", 2.0)

    rows = []
    learn = learner(cbs=[ValidateEvery(1), Callback(after_pred=log)])
    assert learn.recorder.to_frame().empty
    learn.logger = rows.append
    learn.fit(2, cbs=CheckpointCallback(tmp_path))
    frame = learn.recorder.to_frame()
    assert list(frame.columns) == ["epoch", "train_loss", "valid_loss", "mae", "norm", "time"]
    assert list(frame.epoch) == ["0 50%", 0, "1 50%", 1]
    assert frame.norm.isna().tolist() == [True, True, False, False]
    assert [list(row.dropna()) for _, row in frame.iterrows()] == rows
    learn.fit(1)
    assert list(learn.recorder.to_frame().epoch) == ["0 50%", 0]
    again = learner(cbs=[ValidateEvery(1), Callback(after_pred=log)])
    again.fit(2, cbs=CheckpointCallback(tmp_path, resume=True))
    assert again.recorder.to_frame().equals(frame)


def test_earlier_fits_are_history():
    learn = learner()
    learn.fit(2)
    first = {n: getattr(learn.recorder, n) for n in ("values", "losses", "lrs", "iters", "metric_names", "log", "hps")}
    learn.fit(0)
    learn.fit(1)
    assert len(learn.recorder.history) == 1
    kept = learn.recorder.history[0]
    assert {name: getattr(kept, name) for name in first} == first
    assert kept.final_record == first["values"][-1]
    assert len(learn.recorder.values) == 1
    assert len(learn.recorder.losses) == 2


def curves(ax):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines}


def test_plot_loss_shows_both_curves(plt):
    learn = learner(dls=make_dls(train=20))
    learn.fit(3)
    ax = learn.recorder.plot_loss()
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "loss")
    assert ax.get_title()
    found = curves(ax)
    assert found["train (smoothed)"] == (list(range(6, 16)), learn.recorder.losses[5:])
    assert found["valid"] == ([5, 10, 15], [row[1] for row in learn.recorder.values])
    assert {text.get_text() for text in ax.get_legend().get_texts()} == set(found)
    whole = learn.recorder.plot_loss(skip_start=0, with_valid=False, log=True)
    assert curves(whole) == {"train (smoothed)": (list(range(1, 16)), learn.recorder.losses)}
    assert whole.get_yscale() == "log"


def test_plot_loss_can_show_all_fits_and_draw_on_given_axes(plt):
    learn = learner()
    learn.fit(2)
    learn.fit(1)
    axes = plt.subplots()[1]
    assert learn.recorder.plot_loss(skip_start=0, all_fits=True, ax=axes) is axes
    found = curves(axes)
    assert found["train (smoothed)"] == (
        [1, 2, 3, 4, 5, 6], learn.recorder.history[0].losses + learn.recorder.losses
    )  # fmt: skip
    rows = learn.recorder.history[0].values + learn.recorder.values
    assert found["valid"] == ([2, 4, 6], [row[1] for row in rows])
    last = curves(learn.recorder.plot_loss(skip_start=0))
    assert last["train (smoothed)"] == ([1, 2], learn.recorder.losses)
    assert last["valid"][0] == [2]


def test_the_steps_of_a_plot_are_whole_numbers(plt):
    learn = learner(dls=make_dls(train=12, valid=None))
    learn.fit(1)
    axes = [learn.recorder.plot_loss(), *learn.recorder.plot_sched(), *learn.recorder.plot_metrics()]
    assert all(tick == int(tick) for ax in axes for tick in ax.get_xticks())


def test_plot_loss_shows_little_or_nothing_too(plt):
    learn = learner(dls=make_dls(train=4, valid=None))
    assert learn.recorder.plot_loss() is not None
    learn.fit(1)
    found = curves(learn.recorder.plot_loss())
    assert found == {"train (smoothed)": ([1], learn.recorder.losses)}


def test_plot_metrics_has_a_panel_for_each_column(plt):
    log = Callback(before_backward=lambda cb: cb.learn.log_metric("extra", 1.0) if cb.epoch else None)
    learn = learner(cbs=[log], recorder=Recorder(train_metrics=True))
    with pytest.raises(ValueError, match="no rows yet"):
        learn.recorder.plot_metrics()
    with learn.no_logging():
        learn.fit(3)
    axes = learn.recorder.plot_metrics()
    assert [ax.get_title() for ax in axes] == ["loss", "mae", "extra"]
    assert {ax.get_xlabel() for ax in axes} == {"step"}
    columns = list(zip(*learn.recorder.values[1:], strict=True))
    for ax, names in zip(axes, (("train_loss", "valid_loss"), ("train_mae", "valid_mae"), ("extra",)), strict=True):
        found = curves(ax)
        assert found.keys() == set(names)
        assert (ax.get_legend() is None) == (len(names) == 1)
        for name in names:
            steps, values = found[name]
            assert steps == ([4, 6] if name == "extra" else [2, 4, 6])
            assert values[-2:] == list(columns[learn.recorder.metric_names.index(name) - 1])


def test_plot_lr_find_shows_the_last_curve(plt):
    learn = learner()
    with pytest.raises(ValueError, match=r"call learn\.lr_find\(\) first"):
        learn.recorder.plot_lr_find()
    found = learn.lr_find(num_it=20)
    learn.fit(1)
    shown, again = plt.gca(), learn.recorder.plot_lr_find()
    assert [line.get_xydata().tolist() for line in again.lines] == [line.get_xydata().tolist() for line in shown.lines]
    assert [line.get_xdata()[0] for line in again.lines[1:]] == list(found)
    assert again.get_xscale() == "log"
    assert len(learn.recorder.losses) == 2


# The table


def test_the_table_has_a_header_and_a_row_for_each_epoch(capsys):
    learn = learner()
    learn.fit(2)
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].split() == ["epoch", "train_loss", "valid_loss", "mae", "time"]
    assert len({len(line) for line in lines}) == 1
    for epoch, line in enumerate(lines[1:]):
        cells = line.split()
        assert cells[0] == str(epoch)
        assert [float(cell) for cell in cells[1:4]] == pytest.approx(learn.recorder.values[epoch], abs=1e-6)
    learn.fit(1)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_wide_cells_leave_the_others_under_their_names_and_tiny_numbers_have_digits():
    names = ["epoch", "train_loss", "valid_loss", "mse", "tiny", "time"]
    rows = [["1000 67%", 0.5, 1.0, -12345.678, 0.0, "00:00.1"], [7, -1.2e8, 123456.0, 1e-5, 3.21e-7, "10:00:00"]]
    assert [format_row(names, row) for row in (names, *rows)] == [
        "epoch  train_loss  valid_loss        mse       tiny     time",
        "1000 67% 0.500000    1.000000 -12345.678000 0.000000 00:00.1",
        "    7    -1.2e+08   1.235e+05   0.000010   3.21e-07 10:00:00",
    ]


def test_a_logger_of_ones_own_gets_the_rows():
    rows = []
    learn = learner()
    learn.logger = rows.append
    learn.fit(2)
    assert [row[0] for row in rows] == [0, 1]
    assert rows[1] == learn.recorder.log
    assert learn.logger == rows.append


# No step waits for the device


class Lazy(Tensor):
    "A tensor that cannot be read without being noticed."

    reads = 0
    READS = ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy", "nonzero")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in cls.READS:
            Lazy.reads += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(
    "loss_func", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=torch.ones(3), ignore_index=1)]
)
def test_training_steps_read_nothing_from_the_device(loss_func):
    reads = []
    x, y = make_classes(32).tensors
    batches = [(a.as_subclass(Lazy), b) for a, b in zip(x.split(4), y.split(4), strict=True)]
    dls = DataLoaders(batches, batches, device="cpu")
    learn = Learner(
        dls,
        make_model(n_out=3),
        loss_func,
        metrics=accuracy,
        cbs=[
            ActivationStats(with_hist=True),
            Callback(before_fit=lambda cb: setattr(Lazy, "reads", 0)),
            Callback(after_batch=lambda cb: cb.learn.log_metric("logged", cb.loss * 2), order=49),
            Callback(after_batch=lambda cb: reads.append((cb.training, Lazy.reads)), order=1000),
        ],
    )
    learn.fit_one_cycle(1)
    assert type(learn.model(batches[0][0])) is Lazy
    assert len(reads) == 16
    for phase in (True, False):
        # What has arrived is fetched at a phase's first batch, and then every thousandth.
        assert len({count for training, count in reads if training is phase}) == 1
    Lazy.reads = 0
    float(batches[0][0].sum())
    assert Lazy.reads  # the instrument works


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.gpu
def test_on_a_gpu_no_batch_waits_for_the_device(monkeypatch):
    "With the defaults, and the bar drawn at every step; what the table needs is read after a phase's last batch."
    monkeypatch.setattr(progress, "_REFRESH", 0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    images = TensorDataset(torch.rand(96, 1, 8, 8), torch.arange(96) % 3)

    def watch(cb):
        torch.cuda.set_sync_debug_mode("error" if cb.iter + 1 < cb.n_iter else "default")

    def learner(*cbs):
        dls = DataLoaders.from_datasets(images, images, bs=8, device="cuda")
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
        watching = Callback(after_batch=watch, order=1000)
        return Learner(dls, model, nn.CrossEntropyLoss(), metrics=accuracy, cbs=[*cbs, watching])

    try:
        for cbs in ([], [BatchTransform(ImageAugmentation()), MixedPrecision("bf16"), ChannelsLast(), EMA()]):
            learn, drawn = learner(*cbs), terminal.getvalue().count("loss ")
            learn.fit(1)
            learn.fit_one_cycle(2)
            assert len(learn.recorder.losses) == 24
            assert terminal.getvalue().count("loss ") >= drawn + 36
        for training in (True, False):  # the instrument works
            reads = Callback(after_loss=lambda cb: cb.loss.item())
            reads.run_train, reads.run_valid = training, not training
            with pytest.raises(RuntimeError, match="synchroniz"):
                learner(reads).fit(1)
            torch.cuda.set_sync_debug_mode("default")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_logged_values_do_not_pile_up_on_the_device(monkeypatch):
    from learnerkit.host_scalars import HostScalars

    polled, poll = [], HostScalars.poll
    monkeypatch.setattr(HostScalars, "poll", lambda self: polled.append(len(self)) or poll(self))
    seen = []

    def log(cb):
        for i in range(2500 if cb.iter == 0 else 0):
            cb.learn.log_metric("mine", torch.tensor(float(i)))
        seen.append(max(polled, default=0))

    learn = make_learner(cbs=Callback(before_step=log))
    learn.fit(1)
    assert seen[0] == 2048
    assert learn.recorder.values[0][-1] == pytest.approx(sum(range(2500)) / 2500)
