"""The loggers that write files, and what all loggers share: which numbers, when, and how a run goes on."""

import csv
import json
import os
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import make_data, make_dls, make_learner, mostly_slow, raises, raising
from resume_jobs import Kill, Killed

from learnerkit import (
    Callback,
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CheckpointCallback,
    CheckpointError,
    CSVLogger,
    JSONLogger,
    Recorder,
    ValidateEvery,
    mae,
)
from learnerkit.host_scalars import HostScalars
from learnerkit.sweep.workers import last_value


class Norm(Callback):
    """Logs a tensor at every step, and a number after some epochs."""

    def before_step(self):
        self.learn.log_metric("norm", self.model[0].weight.grad.norm())

    def after_train(self):
        if self.epoch % 2:
            self.learn.log_metric("odd", self.epoch)


def learner(*cbs, train=20, **kwargs):
    return make_learner(make_dls(train), metrics=mae, cbs=[*cbs], **kwargs)


def lines(name="history.jsonl"):
    """(the hyper-parameters, the records of steps, the rows) of a file."""
    first, *rest = map(json.loads, Path(name).read_text().splitlines())
    steps = [record for record in rest if "epoch" not in record]
    rows = [record for record in rest if "epoch" in record]
    assert [record["step"] for record in rest] == sorted(record["step"] for record in rest)
    return first["config"], steps, rows


def table(name="history.csv"):
    with Path(name).open(newline="") as file:
        return list(csv.DictReader(file))


def test_json_has_each_step_and_each_row():
    seen = []
    note = Callback(before_step=lambda cb: seen.append(cb.model[0].weight.grad.norm().item()))
    learn = learner(JSONLogger(), Norm, note)
    learn.fit_one_cycle(2, 0.1)
    recorder, (_, steps, rows) = learn.recorder, lines()
    assert [record["step"] for record in steps] == list(range(1, 11))
    for name, values in {"loss": recorder.losses, "lr": recorder.lrs, **recorder.hps, "norm": seen}.items():
        assert [record[name] for record in steps] == pytest.approx(values), name
    assert [record["step"] for record in rows] == recorder.iters == [5, 10]
    assert [[row[name] for name in ("train_loss", "valid_loss", "mae", "norm")] for row in rows] == [
        values[:4] for values in recorder.values
    ]
    assert list(rows[1]) == ["step", *recorder.metric_names]
    assert [row["epoch"] for row in rows] == [0, 1]


def test_every_few_steps_means_of_logged_values_and_the_epochs_end():
    learn = learner(JSONLogger(every=3), Callback(before_step=lambda cb: cb.learn.log_metric("n", cb.iter)))
    learn.fit(2)
    steps = lines()[1]
    assert [(record["step"], record["n"]) for record in steps] == [(3, 1), (5, 3.5), (6, 0), (9, 2), (10, 4)]
    assert [record["loss"] for record in steps] == [learn.recorder.losses[i - 1] for i in (3, 5, 6, 9, 10)]


def test_the_mean_of_logged_values_over_an_epoch_is_that_of_the_table():
    def log(cb):
        if cb.iter == 1:
            cb.learn.loss_count = 0  # of such a batch the loss may be NaN
        cb.learn.log_metric("n", cb.iter if cb.iter != 1 else float("nan"))

    learner(JSONLogger(every=100), Callback(after_loss=lambda cb: cb.training and log(cb)), train=18).fit(1)
    _, (step,), (row,) = lines()
    assert step["n"] == row["n"] == pytest.approx((4 * (0 + 2 + 3) + 2 * 4) / 14)


def test_nothing_waits_for_the_device_in_an_epoch(monkeypatch):
    waits, done = [], []
    monkeypatch.setattr("learnerkit.loggers.logger._SECONDS", 0)
    everything = HostScalars.all
    monkeypatch.setattr(HostScalars, "poll", lambda values: values._host[: max(0, len(values) - 2)])
    monkeypatch.setattr(HostScalars, "all", lambda values: waits.append(len(done)) or everything(values))
    learn = learner(JSONLogger(), Norm, Callback(after_train=lambda cb: done.append(cb.epoch), order=49))
    learn.fit(1)
    assert {*waits} == {1}
    assert [(record["step"], "norm" in record) for record in lines()[1]] == [(step, True) for step in range(1, 6)]


def test_the_first_record_has_the_hyper_parameters_and_what_the_user_adds():
    learn = learner(JSONLogger(config=Namespace(arch="mlp", path=Path("x"), bad=float("nan"))), Norm)
    learn.fit(3, 0.25)
    config = lines()[0]
    assert config["model"] == "Sequential"
    assert config["parameters"] == 4 * 6 + 6 + 6 + 1
    assert (config["optimizer"], config["groups"][0]["lr"]) == (["SGD"], 0.25)
    assert (config["train"]["batch_size"], config["effective_batch_size"], config["ranks"]) == (4, 4, 1)
    assert config["fit"]["n_epoch"] == 3
    assert {"Norm", "JSONLogger"} <= config["callbacks"].keys()
    assert {"python", "torch", "learnerkit"} == config["versions"].keys()
    assert (config["arch"], config["path"], config["bad"]) == ("mlp", "x", None)
    own = {"width": np.int64(3), "bias": np.True_, "rate": np.float32(0.5), "share": torch.tensor([0.25])}
    learner(JSONLogger("own.jsonl", config=own)).fit(1)
    config = lines("own.jsonl")[0]
    assert {name: config[name] for name in own} == {"width": 3, "bias": True, "rate": 0.5, "share": 0.25}
    assert JSONLogger(config=SimpleNamespace(lr=1)).config == JSONLogger(config={"lr": 1}).config
    with raises(TypeError, "got config=3"):
        JSONLogger(config=3)


def test_csv_has_the_table_in_full_precision_and_columns_that_come_later():
    learn = learner(CSVLogger(), Norm, ValidateEvery(3))
    learn.fit(2)
    rows = table()
    assert [row["epoch"] for row in rows] == ["0 60%", "0", "1 20%", "1 80%", "1"]
    assert list(rows[0]) == ["epoch", "train_loss", "valid_loss", "mae", "norm", "odd", "time"]
    assert [row["odd"] for row in rows] == ["", "", "", "", "1.0"]
    found = [[float(value) for name, value in row.items() if name not in ("epoch", "time") and value] for row in rows]
    assert found == learn.recorder.values
    assert rows[-1]["time"] == learn.recorder.log[-1]


def test_the_fits_of_a_run_follow_each_other_until_it_is_closed():
    sheet, record = CSVLogger(), JSONLogger()
    learn = learner(sheet, record)
    learn.fit(1)
    learn.fit(2)
    assert [row["epoch"] for row in table()] == ["0", "0", "1"]
    assert [step["step"] for step in lines()[1]] == list(range(1, 16))
    record.close()
    learn.fit(1)
    assert [step["step"] for step in lines()[1]] == list(range(1, 6))
    assert len(table()) == 4
    learner(CSVLogger(append=True), Norm).fit(1)
    assert [(row["epoch"], row["norm"] != "") for row in table()][3:] == [("0", False), ("0", True)]
    learner(CSVLogger()).fit(1)
    assert len(table()) == 1


@pytest.mark.parametrize("step", [3, 5])
@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
def test_what_a_fit_has_written_stays_whatever_ends_it(step, error):
    fails = raising("after_batch", error, lambda cb: cb.training and cb.train_iter == 5 + step, order=90)
    learn = learner(CSVLogger(), JSONLogger(), fails)
    with pytest.raises(type(error)):
        learn.fit(2)
    assert (len(table()), len(lines()[1]), len(lines()[2])) == (1, 5 + step, 1)
    learn.fit(1)
    assert [record["step"] for record in lines()[1]] == list(range(1, 5 + step + 6))


def test_cancels_leave_no_gap_and_no_double():
    cancels = [
        raising("after_loss", CancelBatchException(), lambda cb: cb.training and cb.iter == 1),
        raising("before_step", CancelEpochException(), lambda cb: cb.epoch == 1 and cb.iter == 3),
        raising("before_step", CancelFitException(), lambda cb: cb.epoch == 2 and cb.iter == 2),
    ]
    learn = learner(JSONLogger(), Norm, *cancels)
    learn.fit(4)
    _, steps, rows = lines()
    assert [record["step"] for record in steps] == list(range(1, len(learn.recorder.lrs) + 1))
    assert [row["step"] for row in rows] == learn.recorder.iters


def test_evaluation_and_lr_find_write_nothing():
    learn = learner(CSVLogger(), JSONLogger())
    learn.validate()
    learn.get_preds()
    learn.lr_find(num_it=12, show_plot=False)
    assert list(Path().iterdir()) == []
    learn.fit(1, cbs=Callback(after_epoch=lambda cb: cb.learn.validate()))
    assert (len(lines()[1]), len(table())) == (5, 1)


def test_no_handle_is_in_the_state():
    logger, states = JSONLogger(), []
    learn = learner(logger, Callback(after_batch=lambda cb: states.append(logger.__getstate__())))
    learn.fit(1)
    assert all("_handle" not in state for state in states)
    assert logger._handle is None


def test_a_row_is_in_the_csv_file_before_the_next_batch():
    seen = []
    note = Callback(before_batch=lambda cb: cb.training and seen.append(Path("history.csv").read_text().count("\n")))
    learner(CSVLogger(), ValidateEvery(2), note).fit(1)
    assert seen == [0, 0, 2, 2, 3]


@pytest.mark.parametrize("at", mostly_slow([5, 6], 5))
def test_the_last_record_of_an_epoch_is_there_if_the_run_goes_on_from_that_step(at, tmp_path):
    def steps(*cbs, resume=False):
        checkpoints = CheckpointCallback(tmp_path / "run", every=1, resume=resume)
        learn = learner(JSONLogger(every=2), checkpoints, *(cbs or [Kill()]), path=tmp_path)
        with suppress(Killed), learn.no_logging():
            learn.fit(2)
        return [record["step"] for record in lines(tmp_path / "history.jsonl")[1]]

    steps(Kill(at))
    assert steps(resume=True) == [2, 4, 5, 6, 8, 10]


def without_time(found):
    return [{name: value for name, value in row.items() if name != "time"} for row in found]


def run(folder, *cbs, resume=False):
    """Two fits in a row, perhaps cut short, with loggers of which one leaves most steps out."""
    folder.mkdir(exist_ok=True)
    loggers = [CSVLogger(), JSONLogger(), JSONLogger("few.jsonl", every=4)]
    checkpoints = [CheckpointCallback(folder / "run", every=3, resume=resume)] if cbs or resume else []
    learn = learner(*loggers, Norm, ValidateEvery(4), *checkpoints, *cbs, path=folder)
    with suppress(Killed), learn.no_logging():
        learn.fit_one_cycle(2, 0.1)
        learn.fit(2)


def content(folder):
    found = [lines(folder / name)[1:] for name in ("history.jsonl", "few.jsonl")]
    return [without_time(part) for part in (*found[0], *found[1], table(folder / "history.csv"))]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:not as in the checkpoint")
@pytest.mark.parametrize(
    "steps", [pytest.param((5, 12), id="few"), pytest.param(range(1, 21, 2), id="many", marks=pytest.mark.soak)]
)
def test_a_run_that_was_killed_goes_on_without_doubles(steps, tmp_path):
    run(tmp_path / "whole")
    for at in steps:
        folder = tmp_path / str(at)
        run(folder, Kill(at))
        if at > 3:
            run(folder, Kill(4), resume=True)
        run(folder, resume=True)
        assert content(folder) == content(tmp_path / "whole"), at


def test_a_fit_that_failed_and_is_tried_again_from_a_checkpoint_has_no_doubles(tmp_path):
    fails = raising("after_batch", RuntimeError("no"), lambda cb: cb.training and cb.train_iter == 8, order=90)
    learn = learner(CSVLogger(), JSONLogger(), CheckpointCallback(tmp_path / "run", every=3, resume=True), fails)
    with pytest.raises(RuntimeError):
        learn.fit(2)
    assert len(lines()[1]) == 8
    learn.fit(2)
    assert [record["step"] for record in lines()[1]] == list(range(1, 11))
    assert [row["epoch"] for row in table()] == ["0", "1"]


def test_two_loggers_of_one_file_are_refused():
    for other in (CSVLogger(Path("a.csv").absolute(), append=True), JSONLogger("a.csv")):
        with raises(ValueError, "write to the same file,", "a.csv; give each its own"):
            learner(CSVLogger("a.csv"), other).fit(1)
    learner(CSVLogger("a.csv"), CSVLogger("b.csv")).fit(1)


def test_a_metric_with_the_name_that_each_record_has_for_its_step_is_refused():
    learn = learner(JSONLogger())
    learn.metrics = {"step": mae}
    with raises(ValueError, "named 'step', which JSONLogger", "writes for each record itself; give the metric another"):
        learn.fit(1)
    learn.metrics = []
    log = Callback(after_validate=lambda cb: cb.learn.log_metric("step", -7))  # after the steps' own records
    with raises(ValueError, "named 'step', which JSONLogger"):
        learn.fit(2, cbs=log)
    assert "-7" not in Path("history.jsonl").read_text()


def test_a_name_that_a_record_of_a_step_has_already_is_refused():
    for name in ("loss", "lr", "step", "momentum"):
        log = Callback(after_step=lambda cb, name=name: cb.learn.log_metric(name, -7))
        with raises(ValueError, f"log_metric got {name!r}, which JSONLogger", "choose another name"):
            learner(JSONLogger(), log).fit_one_cycle(1)
        learner(CSVLogger(), log).fit(1)
        assert table()[0][name] == "-7.0"


def test_a_table_that_excel_has_saved_is_continued():
    learner(CSVLogger()).fit(1)
    Path("history.csv").write_bytes(b"\xef\xbb\xbf" + Path("history.csv").read_bytes())
    learner(CSVLogger(append=True)).fit(1)
    assert [row["epoch"] for row in table()] == ["0", "0"]


def test_empty_lines_of_a_table_that_is_continued_are_no_rows():
    Path("history.csv").write_text("\nepoch,train_loss\n7,0.5\n\n")
    learner(CSVLogger(append=True)).fit(1)
    assert [(row["epoch"], row["train_loss"] == "0.5") for row in table()] == [("7", True), ("0", False)]


def test_without_a_recorder_a_logger_refuses_and_nothing_else_fails():
    learn = make_learner(cbs=CSVLogger(), default_cbs=False)
    with pytest.raises(ValueError, match=r"this learner has none.*add Recorder\(\) to its callbacks") as found:
        learn.fit(1)
    assert found.value.__notes__ == ["raised in CSVLogger.before_fit"]


@pytest.mark.parametrize("content", [b"epoch\n\xff\n", b"epoch\n" + b"1" * 200_000 + b"\n", None])
def test_a_table_that_cannot_be_continued_is_named(content):
    path = Path("history.csv")
    path.write_bytes(content) if content else os.mkfifo(path)
    with raises(ValueError, "history.csv", "continued", "another name"):
        learner(CSVLogger(append=True)).fit(1)


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:not as in the checkpoint")
def test_lines_that_were_cut_are_written_again_and_a_pipe_is_refused(tmp_path):
    run(tmp_path, Kill(8))
    path = tmp_path / "history.jsonl"
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:3]) + whole[3][:9])
    run(tmp_path, resume=True)
    assert [record["step"] for record in lines(path)[1]] == [1, 2, *range(7, 21)]
    run(tmp_path / "other", Kill(8))
    path = tmp_path / "other" / "history.jsonl"
    path.unlink()
    os.mkfifo(path)
    with raises(ValueError, "history.jsonl cannot be continued or replaced", "no regular file"):
        run(tmp_path / "other", resume=True)


def test_a_name_stays_in_its_folder_and_a_path_is_taken_as_it_is(tmp_path):
    for kind in (CSVLogger, JSONLogger):
        with raises(ValueError, "'../x'", "has no '..'"):
            kind("../x")
        with raises(ValueError, "'-x'", "a plain name inside learn.path"):
            kind("-x")
        with raises(TypeError, "got fname=3"):
            kind(3)
    learner(CSVLogger(), JSONLogger(tmp_path / "a" / "b.jsonl"), path=tmp_path / "c").fit(1)
    assert (tmp_path / "a" / "b.jsonl").exists()
    learner(CSVLogger(f"{tmp_path}/a/b.csv"), path=tmp_path / "c").fit(1)
    assert (tmp_path / "a" / "b.csv").exists()
    assert len(table(tmp_path / "c" / "history.csv")) == 1
    with raises(ValueError, "got every=0"):
        JSONLogger(every=0)


def test_a_table_goes_where_a_link_leads_and_stays_there(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link.csv").symlink_to(tmp_path / "disk" / "table.csv")
    there = Callback(before_train=lambda cb: os.chdir(tmp_path / "disk"))
    learner(CSVLogger(Path("link.csv")), there).fit(2)
    assert (tmp_path / "link.csv").is_symlink()
    assert len(table(tmp_path / "disk" / "table.csv")) == 2
    assert [p.name for p in (tmp_path / "disk").iterdir()] == ["table.csv"]
    if os.path.isdir("/proc"):  # where not even root can write
        with raises(CheckpointError, "/proc/table.csv cannot be written"):
            learner(CSVLogger("/proc/table.csv")).fit(1)
    os.mkfifo(tmp_path / "pipe")
    for name in ("disk", "pipe"):
        with raises(ValueError, f"{tmp_path / name} cannot be continued or replaced, as it is no regular file"):
            learner(CSVLogger(tmp_path / name)).fit(1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["disk", "link.csv", "pipe"]


def test_without_a_recorder_it_is_refused():
    learn = learner(JSONLogger())
    learn.remove_cb(Recorder)
    with raises(ValueError, "JSONLogger writes what the Recorder records", "add Recorder()"):
        learn.fit(1)


def test_nan_is_null_and_a_search_reads_the_last_value():
    data = make_data(8)
    data.tensors[1][0] = torch.nan
    learn = make_learner(make_dls(data=lambda n, seed=0: data), metrics=mae, cbs=JSONLogger())
    learn.fit(1)
    assert lines()[2][0]["train_loss"] is None
    learn = learner(JSONLogger())
    learn.fit(2)
    assert last_value(Path("history.jsonl").read_text().splitlines(), "mae") == learn.final_record[-1]
