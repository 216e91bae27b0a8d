import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from helpers import make_learner
from sweep_searches import Search, states, write_config

from learnerkit import CheckpointCallback, distributed, sweep
from learnerkit.sweep.callback import Pruned
from learnerkit.sweep.config import make_config
from learnerkit.sweep.script import PARAMS, TRIAL
from learnerkit.sweep.study import Study

CONFIG = {
    "algorithm": "random", "metric": "valid_loss", "seed": 0, "pruner": {"name": "Threshold", "upper": 1e6},
    "parameters": {"x": {"type": "float", "min": 0, "max": 1}},
}  # fmt: skip


@pytest.fixture
def trial(monkeypatch, tmp_path):
    """Make this process that of a trial; yields the study and the run."""

    def begin(**entries):
        folder = tmp_path / "search"
        config = make_config(CONFIG | entries)
        study = Study(folder, config)
        (folder / "sweep.json").write_text(json.dumps({"config": config.data}))
        run = study.take()
        place = {"folder": str(folder), "trial": run.trial, "metric": "valid_loss"}
        monkeypatch.setenv(TRIAL, json.dumps(place))
        monkeypatch.setenv(PARAMS, json.dumps(run.values))
        runs.append(run)
        return study, run

    runs = []
    yield begin
    for run in runs:
        os.close(run.lock)


def test_it_does_nothing_in_a_script_that_runs_by_itself():
    learn = make_learner(cbs=sweep.report("valid_loss"))
    learn.fit(2)
    assert len(learn.recorder.values) == 2
    with pytest.raises(ValueError, match="got monitor='valid_los'; this fit's columns are train_loss, valid_loss"):
        make_learner(cbs=sweep.report("valid_los")).fit(1)


def test_epochs_of_all_fits_are_reported_in_order(trial):
    study, run = trial()
    learn = make_learner(cbs=sweep.report("valid_loss"))
    learn.fit(2)
    learn.fit(1)
    values = study.study.trials[0].intermediate_values
    recorder = learn.recorder
    rows = [*recorder.history[0].values, *recorder.values]
    assert values == {step: row[1] for step, row in enumerate(rows)}
    assert study.reported(run) == (rows[-1][1], False)
    assert study.rows()[0].epoch == 3


def test_a_pruned_trial_leaves_the_process_and_what_it_changed_is_restored(trial):
    study, run = trial(pruner={"name": "Threshold", "upper": 0.0, "n_warmup_steps": 1})
    learn = make_learner(cbs=sweep.report("valid_loss"))
    model = learn.model
    with pytest.raises(Pruned) as left:
        learn.fit(4)
    assert left.value.code is None
    assert len(learn.recorder.values) == 2
    assert (learn.task, learn.model) == (None, model)
    assert study.reported(run)[1]


def test_a_trial_that_goes_on_from_a_checkpoint_reports_the_epochs_before(trial):
    def learner():
        return make_learner(cbs=[sweep.report("valid_loss"), CheckpointCallback("run", resume=True)])

    study, first = trial()
    learn = learner()
    learn.fit(2)
    before = study.study.trials[0].intermediate_values
    study.finish(first, "killed", None, "was killed")
    os.dup2(os.open(os.devnull, os.O_RDONLY), first.lock)  # for the fixture to close
    study, run = trial()
    learn = learner()
    learn.fit(3)
    values = study.study.trials[run.key].intermediate_values
    assert list(values) == [0, 1, 2]
    assert {step: values[step] for step in before} == before
    # Killed after its fit, which is not done again.
    study.finish(run, "killed", None, "was killed")
    os.dup2(os.open(os.devnull, os.O_RDONLY), run.lock)
    study, run = trial()
    learn = learner()
    learn.fit(3)
    assert study.study.trials[run.key].intermediate_values == values
    assert study.reported(run) == (values[2], False)


def test_each_fit_may_have_a_callback_of_its_own(trial):
    study, run = trial()
    learn = make_learner()
    learn.fit(2, cbs=sweep.report("valid_loss"))
    learn.fit(1, cbs=sweep.report("valid_loss"))
    rows = [*learn.recorder.history[0].values, *learn.recorder.values]
    assert study.study.trials[0].intermediate_values == {step: row[1] for step, row in enumerate(rows)}


@pytest.mark.ranks(2)
def test_all_ranks_leave_at_the_same_epoch(tmp_path):
    folder = tmp_path / "search"
    config = make_config(CONFIG | {"pruner": {"name": "Threshold", "upper": 0.0, "n_warmup_steps": 1}})
    run = None
    if distributed.is_main():
        study = Study(folder, config)
        (folder / "sweep.json").write_text(json.dumps({"config": config.data}))
        run = study.take()
    place = distributed.broadcast(run and {"folder": str(folder), "trial": run.trial, "metric": "valid_loss"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TRIAL, json.dumps(place))
        learn = make_learner(cbs=sweep.report("valid_loss"))
    model = learn.model
    with learn.distrib_ctx(), pytest.raises(Pruned):
        learn.fit(4)
    assert learn.model is model
    assert distributed.all_gather((len(learn.recorder.values), learn.train_iter)) == [(2, learn.train_iter)] * 2
    if run is not None:
        assert study.reported(run)[1]
        assert list(study.study.trials[0].intermediate_values) == [0, 1]
        os.close(run.lock)
    learn.remove_cb(sweep.callback.Report)
    with learn.distrib_ctx():  # the ranks are still together
        learn.fit(1)


@pytest.mark.soak
def test_the_pruned_trials_on_two_processes_are_those_on_one():
    rates = {"type": "discrete", "values": [0.03, 1e-5, 1e-4, 0.02]}
    pruner = {"name": "MedianPruner", "n_startup_trials": 2}
    write_config(algorithm="grid", metric="valid_loss", pruner=pruner, parameters={"lr": rates}, seed=None)
    found = []
    for nproc in (1, 2):
        with Search("--nproc", nproc, "--dir", f"on-{nproc}", script="sweep_train.py") as search:
            code, printed = search.end()
        assert code == 0, printed
        found.append(sweep.load(f"on-{nproc}").frame())
    one, two = found
    assert list(one["state"]) == list(two["state"])
    assert set(one["state"]) == {"complete", "pruned"}
    assert list(one["epochs"]) == list(two["epochs"])
    assert list(one["valid_loss"]) == pytest.approx(list(two["valid_loss"]), rel=1e-4)
    # The best trial's weights can be loaded, and its numbers are those of the study.
    loaded = sweep.load("on-2")
    assert loaded.weights().name == "net.pth"
    assert loaded.weights().parent.parent.name == str(loaded.best.number)


@pytest.mark.soak
@pytest.mark.parametrize("how", ["trial", "search"])
def test_a_killed_training_goes_on_from_its_checkpoint(how):
    write_config(metric="valid_loss", maxCombo=1, parameters={"lr": {"type": "float", "min": 0.01, "max": 0.02}})
    log = Path("sweeps/c/trials/0/attempt-0/rank-0.log")
    with Search(script="sweep_train.py", SLEEP="1") as search:
        while not (log.exists() and "    1  " in log.read_text()):
            assert search.process.poll() is None
            time.sleep(0.02)
        if how == "search":
            search.process.kill()
            search.end()
        else:
            os.kill(int(Path("sweeps/c/trials/0/pid").read_text()), signal.SIGKILL)
            code, printed = search.end()
    folder = "sweeps/c"
    if how == "search":
        folder = "elsewhere"  # as another machine may see the directory
        Path("sweeps/c").rename(folder)
        with Search("--dir", folder, script="sweep_train.py", SLEEP="0") as search:
            code, printed = search.end()
    assert code == 0, printed
    assert states(printed) == {0: "complete (run 2)"}
    again = Path(folder, "trials/0/attempt-1/rank-0.log").read_text()
    assert re.search(r"resumed fit 0 after epoch [012]", again), again
    (row,) = sweep.load(folder).trials
    assert (row.epoch, row.attempt) == (4, 1)
