import json

import pytest
import torch
from optuna.trial import Trial

from learnerkit import sweep
from learnerkit.sweep.config import make_config
from learnerkit.sweep.study import Study

CONFIG = {
    "algorithm": "random", "metric": "loss", "maxCombo": 12, "seed": 0, "retryLimit": 1,
    "parameters": {
        "lr": {"type": "float", "scalingType": "loguniform", "min": 1e-3, "max": 1},
        "act": {"type": "categorical", "values": ["relu", "tanh"]},
    },
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """The directory of a search: trial 1 was killed once, 2 pruned, 3 has failed, the last two are missing."""
    folder = tmp_path / "search"
    config = make_config(CONFIG)
    study = Study(folder, config)
    command = {"words": ["/a/train.py"], "nproc": 1, "as_arguments": True, "start": "/b", "here": False}
    (folder / "sweep.json").write_text(json.dumps({"config": config.data, "command": command}))
    ends = {1: ("killed", None, "was killed"), 2: ("pruned", None, ""), 3: ("failed", None, "an error")}
    for _ in range(11):
        run = study.take()
        state, value, cause = ends.get(run.number, ("complete", run.values["lr"], ""))
        if run.attempt:
            state, value, cause = "complete", run.values["lr"], ""
        Trial(study.study, run.trial).report(1.0, 0)
        study.finish(run, state, value, cause)
    return folder


def test_the_frame_has_a_row_for_each_trial(folder):
    found = sweep.load(folder)
    frame = found.frame()
    assert list(frame.index) == list(range(10))
    assert list(frame.columns) == ["lr", "act", "loss", "epochs", "state", "seconds", "attempts", "place", "cause"]
    assert list(frame["state"][:4]) == ["complete", "complete", "pruned", "failed"]
    assert list(frame["attempts"][:3]) == [1, 2, 1]
    assert frame["cause"][3] == "an error"
    done = frame[frame["state"] == "complete"]
    assert (done["loss"] == done["lr"]).all()
    assert found.best.number == done["loss"].idxmin()
    assert found.best.value == done["loss"].min()
    assert found.command == f"python /a/train.py --lr {found.best.values['lr']} --act {found.best.values['act']}"
    assert len(found.study.trials) == 11


def test_the_best_trials_weights_are_found(folder):
    found = sweep.load(folder)
    with pytest.raises(FileNotFoundError, match="the best trial has saved no weights in .*trials/"):
        found.weights()
    trial = folder / "trials" / str(found.best.number)
    (trial / "run/checkpoint").mkdir(parents=True)
    (trial / "models").mkdir()
    torch.save({}, trial / "models/net.pth")
    for name in ("model.safetensors", "manifest.json", "rank0.safetensors"):
        (trial / "run/checkpoint" / name).touch()
    (trial / "models/latest.pth").symlink_to("removed.pth")
    assert found.weights() == trial / "models/net.pth"
    (trial / "models/net.pth").rename(trial / "models/net.pt")
    assert found.weights() == trial / "models/net.pt"
    (trial / "models/net.pt").unlink()
    assert found.weights() == trial / "run/checkpoint/model.safetensors"


def test_a_parameter_and_the_metric_may_have_the_names_of_other_columns(tmp_path):
    parameters = {"epochs": {"type": "int", "min": 5, "max": 5}}
    config = make_config(CONFIG | {"metric": "seconds", "objective": "minimize", "parameters": parameters})
    study = Study(tmp_path, config)
    study.finish(study.take(), "complete", 0.5)
    (tmp_path / "sweep.json").write_text(json.dumps({"config": config.data, "command": {}}))
    frame = sweep.load(tmp_path).frame()
    assert (frame["param_epochs"][0], frame["epochs"][0], frame["seconds"][0]) == (5, 0, 0.5)


def test_the_plot_shows_trials_importance_and_parameters(folder, plt):
    found = sweep.load(folder)
    figure = found.plot()
    titles = [(ax.get_title(), ax.get_xlabel(), ax.get_xscale()) for ax in figure.axes]
    assert titles == [
        ("Trials", "trial", "linear"), ("Importance", "", "linear"), ("", "lr", "log"), ("", "act", "linear"),
    ]  # fmt: skip
    assert {label.get_text() for label in figure.axes[3].get_xticklabels()} == {"relu", "tanh"}
    assert next(iter(found.importances())) == "lr"


def test_a_folder_without_a_search_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not the directory of a search: it has no sweep.json"):
        sweep.load(tmp_path)


def test_a_search_without_results_says_so(folder, tmp_path):
    config = make_config(CONFIG)
    (tmp_path / "new").mkdir()
    (tmp_path / "new/sweep.json").write_text((folder / "sweep.json").read_text())
    with pytest.raises(FileNotFoundError, match="the search in .*new has no trials yet"):
        sweep.load(tmp_path / "new")
    Study(tmp_path / "new", config)
    found = sweep.load(tmp_path / "new")
    assert len(found.frame()) == 0
    assert found.importances() == {}
    with pytest.raises(ValueError, match="no trial in .*new is complete"):
        found.best  # noqa: B018
