"""What all trackers do beside numbers: the run's id and object, the model and files, and the checkpoint of a run."""

import pickle
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from helpers import make_data, make_dls, make_learner, raises, same_weights
from resume_jobs import Kill, Killed
from safetensors.torch import load_file
from torch import nn

from learnerkit import (
    CheckpointCallback,
    CheckpointError,
    DataLoaders,
    Learner,
    SaveModelCallback,
    TensorBoardCallback,
    distributed,
    load_learner,
)
from learnerkit.loggers.logger import Tracker, _matching


class Kept(Tracker):
    """A tracker that keeps a run in a folder."""

    order = 51

    def __init__(self, folder, **kwargs):
        super().__init__("json", "json", 1, False, None, **kwargs)
        self.folder = Path(folder)

    def _open(self):
        self._id, self._native = "first run", object()
        return self._native

    def _write(self, records):
        pass

    def _write_files(self, kind, files):
        for name, path in files.items():
            target = self.folder / kind / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def test_the_run_and_its_id_are_there_from_the_first_fit_to_close(tmp_path):
    kept = Kept(tmp_path)
    learn = make_learner(make_dls(12), cbs=kept)
    assert (kept.run_id, kept.run) == (None, True)
    kept.run = False
    with learn.no_logging():
        learn.fit(1)
        assert (kept.run_id, kept.run) == (None, False)
        kept.run = True
        learn.fit(1)
    assert (learn.kept.run_id, learn.kept.run) == ("first run", kept._native)
    again = pickle.loads(pickle.dumps(vars(kept) | kept.__getstate__() | {"learn": None}))
    assert again["_native"] is None
    learn.validate()
    assert kept.run is kept._native is not None
    kept.close()
    assert (kept.run_id, kept.run) == (None, True)


def test_the_run_of_tensorboard_is_its_folder_and_writer(tmp_path):
    pytest.importorskip("tensorboard")
    board = TensorBoardCallback("one")
    learn = make_learner(make_dls(12), cbs=board, path=tmp_path)
    with learn.no_logging():
        learn.fit(1)
    assert board.run_id == str(tmp_path / "runs" / "one") == str(board.run.log_dir)
    with raises(ValueError, "TensorBoardCallback takes no log_model and no log_files"):
        TensorBoardCallback(log_model="model.pt2")


@pytest.mark.parametrize("suffix", ["safetensors", "pt2"])
def test_the_model_that_is_logged_is_the_one_that_the_fit_ends_with(suffix, tmp_path):
    saving = SaveModelCallback("train_loss", comp=lambda value, best: value > best)
    kept = Kept(tmp_path, log_model=f"model.{suffix}")
    learn = make_learner(make_dls(12), cbs=[kept, saving], path=tmp_path)
    with learn.no_logging():
        learn.fit(2)
    path = tmp_path / "model" / f"model.{suffix}"
    if suffix == "safetensors":
        assert same_weights(load_file(path), learn.model)
    else:
        x = make_data(4).tensors[0]
        learn.model.eval()
        with torch.no_grad():
            assert torch.allclose(load_learner(path).model(x), learn.model(x))
    last = learn.model.state_dict()
    learn.load(saving.fname, with_opt=False)
    assert same_weights(last, learn.model), "the worst weights, which are not the last ones"


def test_files_are_logged_by_their_paths_below_the_current_directory(tmp_path, monkeypatch):
    work, away = tmp_path / "work", tmp_path / "away" / "b.txt"
    for path in (work / "configs" / "deep" / "a.yaml", work / "configs" / "c.yaml", away):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    monkeypatch.chdir(work)
    kept = Kept(tmp_path, log_files=["configs/**/*.yaml", "../away/b.txt", away, "none.*"])
    learn = make_learner(make_dls(12), cbs=kept)
    with learn.no_logging(), pytest.warns(match="log_files: there is no file 'none.\\*'"):
        learn.fit(1)
    found = {str(path.relative_to(tmp_path / "files")) for path in (tmp_path / "files").rglob("*") if path.is_file()}
    assert found == {"configs/deep/a.yaml", "configs/c.yaml", "b.txt"}
    assert Kept(tmp_path, log_files="one.txt").log_files == ["one.txt"]


def test_a_file_in_a_folder_with_brackets_is_found_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "lr=[1,2]" / "a.yaml"
    path.parent.mkdir()
    path.touch()
    assert _matching([path]) == _matching(["lr=[1,2]/a.yaml"]) == {"lr=[1,2]/a.yaml": path}


def test_of_two_files_with_one_name_the_second_is_left_out_with_a_warning(tmp_path, monkeypatch):
    first, second, work = tmp_path / "a" / "c.yaml", tmp_path / "b" / "c.yaml", tmp_path / "work"
    for folder in (first.parent, second.parent, work):
        folder.mkdir()
    first.touch()
    second.touch()
    monkeypatch.chdir(work)
    with pytest.warns(match=f"{second} is not logged, as {first} has the name 'c.yaml'"):
        assert _matching([first, second]) == {"c.yaml": first}


def test_what_cannot_be_logged_is_a_warning_and_the_rest_is_logged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").touch()
    kept = Kept(tmp_path / "kept", log_model="model.pt2", log_files="a.txt")
    learn = make_learner(make_dls(12), cbs=kept)

    def fails(path):
        raise CheckpointError("torch cannot export the model")

    monkeypatch.setattr(learn, "export", fails)
    with learn.no_logging(), pytest.warns(match="Kept has not logged the model: .*torch cannot export"):
        learn.fit(1)
    assert (tmp_path / "kept" / "files" / "a.txt").exists()


def test_after_an_error_nothing_is_logged(tmp_path):
    kept = Kept(tmp_path, log_model="model.safetensors")
    learn = make_learner(make_dls(12), cbs=[kept, Kill(2)])
    with learn.no_logging(), pytest.raises(Killed):
        learn.fit(1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [True, "model", "model.pkl", "a/model.pt2"])
def test_a_model_needs_a_name_with_a_format(name, tmp_path):
    with raises(ValueError, "got log_model=" if name != "a/model.pt2" else "a plain name inside the tracker's run"):
        Kept(tmp_path, log_model=name)


@pytest.mark.ranks(2)
def test_on_ranks_the_first_one_logs_the_model_of_all(tmp_path):
    dls = DataLoaders.from_datasets(make_data(16), make_data(8, seed=1), bs=4, device="cpu")
    kept = Kept(tmp_path / str(distributed.rank()), log_model="model.safetensors")
    learn = make_learner(dls, cbs=kept)
    with learn.distrib_ctx():
        learn.fit(2)
    distributed.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert same_weights(load_file(tmp_path / "0" / "model" / "model.safetensors"), learn.model)
    assert kept.run_id == (None if distributed.rank() else "first run")


@pytest.mark.ranks(slow=[2])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_tracker_says_at_once_that_it_has_not_logged_a_model_that_stays_divided(tmp_path):
    dls = DataLoaders.from_datasets(make_data(16), make_data(8, seed=1), bs=4, device="cpu")
    kept = Kept(tmp_path, log_model="model.safetensors")
    learn = Learner(dls, lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1)), nn.MSELoss(), cbs=kept)
    with learn.distrib_ctx(shard=[nn.Linear]), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learn.fit(1)
    said = [str(w.message) for w in caught if "has not logged the model" in str(w.message)]
    assert len(said) == (distributed.rank() == 0)
    assert all("let all call learn.export" in text for text in said)


# The checkpoint of a run


def train(tmp_path, resume=False, kill=0, name="one"):
    saving = CheckpointCallback(tmp_path / name, every=2, resume=resume)
    learn = make_learner(make_dls(12), cbs=[Kept(tmp_path), saving, Kill(kill)])
    with learn.no_logging():
        learn.fit(2)
    return learn, saving


def test_a_run_goes_on_by_its_id(tmp_path):
    whole, _ = train(tmp_path, name="whole")
    shutil.rmtree(tmp_path / "whole")
    with pytest.raises(Killed):
        train(tmp_path, kill=5, name="a/one")
    again, saving = train(tmp_path, "run:first run", name=".")
    assert saving.path == tmp_path / "a" / "one"
    assert same_weights(again.model, whole.model)
    assert CheckpointCallback(tmp_path / "a" / "one", resume="run:first run").path == saving.path
    (tmp_path / "a" / "one" / "latest").unlink()
    for path in saving.path.glob("fit0-*"):
        (path / "manifest.json").write_text("damaged")
    assert CheckpointCallback(tmp_path, resume="run:first run").path == saving.path, "by the ends of fits"


def test_a_run_that_is_not_there_or_in_two_directories_is_an_error(tmp_path):
    with raises(CheckpointError, "'run:x': one directory in ", "the runs of the checkpoints there: none"):
        CheckpointCallback(tmp_path, resume="run:x")
    train(tmp_path, name="one")
    with raises(CheckpointError, "the runs of the checkpoints there: first run"):
        CheckpointCallback(tmp_path, resume="run:x")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with raises(CheckpointError, "these do: ", str(tmp_path / "one"), str(tmp_path / "two")):
        CheckpointCallback(tmp_path, resume="run:first run")
    with raises(ValueError, "got resume='newest'; it is True, False, or 'run:ID'"):
        CheckpointCallback(tmp_path, resume="newest")
