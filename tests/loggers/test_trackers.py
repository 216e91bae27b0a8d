"""The loggers to TensorBoard, Weights & Biases, Comet, MLflow and Trackio: each on this machine, read back."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from urllib.request import urlopen

import pytest
from helpers import ROOT, make_dls, make_learner, raises
from launching import SCRIPTS, environment
from resume_jobs import Kill, Killed

from learnerkit import (
    Callback,
    CheckpointCallback,
    CometCallback,
    MLflowCallback,
    TensorBoardCallback,
    TrackioCallback,
    WandbCallback,
    mae,
)
from learnerkit.loggers.logger import flat
from learnerkit.loggers.trackers import _allowed
from learnerkit.processes.machine import LOOPBACK

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of the trackers' own code


class Square(Callback):
    """Logs a number at every step."""

    def before_step(self):
        self.learn.log_metric("square", self.iter**2)


def learner(*cbs, **kwargs):
    return make_learner(make_dls(12), metrics=mae, cbs=[*cbs, Square], **kwargs)


def expected(learn, before=0):
    """What a tracker has of a fit: (step, value) pairs by name."""
    recorder = learn.recorder
    steps = range(before + 1, before + len(recorder.lrs) + 1)
    found = {
        "step/loss": recorder.losses,
        "step/lr": recorder.lrs,
        "step/square": [0.0, 1.0, 4.0] * len(recorder.iters),
    }
    found = {name: list(zip(steps, values, strict=True)) for name, values in found.items()}
    for i, name in enumerate(recorder.metric_names[1:-1]):
        found[name] = [(before + step, values[i]) for step, values in zip(recorder.iters, recorder.values, strict=True)]
    return found


def nearly(found):
    """Equal up to the float32 of event files."""
    return {name: [(step, pytest.approx(value, rel=1e-6)) for step, value in pairs] for name, pairs in found.items()}


def killed_and_resumed(tmp_path, make, kill=5):
    """A run that dies two steps after a checkpoint, and goes on in another process; and its last learner."""
    for resume in (False, True):
        dies = Kill(0 if resume else kill)
        learn = learner(make(), CheckpointCallback(tmp_path / "run", every=3, resume=resume), dies, path=tmp_path)
        with suppress(Killed), learn.no_logging():
            learn.fit(2)
    return learn


@pytest.mark.parametrize(
    ("kind", "package", "extra"),
    [
        (TensorBoardCallback, "tensorboard", "tensorboard"),
        (WandbCallback, "wandb", "wandb"),
        (CometCallback, "comet_ml", "comet"),
        (MLflowCallback, "mlflow", "mlflow"),
        (partial(TrackioCallback, "mine"), "trackio", "trackio"),
    ],
)
def test_a_missing_package_is_named_with_the_extra(kind, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    name = getattr(kind, "func", kind).__name__
    with raises(ImportError, f"{name} needs {package}: pip install 'learnerkit[{extra}]'"):
        kind()


def test_a_fit_whose_status_mlflow_cannot_take_ends_well(monkeypatch):
    class Gone(Exception):
        pass

    def end_run(status):
        raise Gone(f"no server for {status}")

    active = SimpleNamespace(info=SimpleNamespace(run_id="1"))
    monkeypatch.setitem(
        sys.modules, "mlflow", SimpleNamespace(active_run=lambda: active, end_run=end_run, MlflowException=Gone)
    )
    monkeypatch.setattr("learnerkit.loggers.logger.find_spec", lambda name: SimpleNamespace(origin=name))
    logger = MLflowCallback()
    vars(logger).update(_is_own=True, _id="1")
    with pytest.warns(UserWarning, match="the run has no status, FINISHED could not be sent: Gone: no server"):
        logger._leave()


def test_an_experiment_that_another_process_makes_at_the_same_time_is_used(monkeypatch):
    class There(Exception):
        pass

    def create_experiment(name):
        raise There(f"{name} exists")

    found = iter([None, SimpleNamespace(experiment_id="7")])
    client = SimpleNamespace(get_experiment_by_name=lambda name: next(found), create_experiment=create_experiment)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowException=There))
    monkeypatch.setattr("learnerkit.loggers.logger.find_spec", lambda name: SimpleNamespace(origin=name))
    assert MLflowCallback("clothes")._experiment_id(client) == "7"


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("step//grad_norm", "step/grad_norm"), ("../x", "x"), ("a/../b", "a/b"), ("a//b", "a/b"), ("a:b*c", "a_b_c"),
        ("..", "_"), ("x" * 300, "x" * 250), ("valid loss", "valid loss"),
    ],
)  # fmt: skip
def test_names_are_such_as_mlflow_takes(name, allowed):
    assert _allowed(name) == allowed


def test_nested_values_get_one_name():
    assert flat({"a": {"b": [{"c": 1}, {"c": [2, 3]}]}, "d": None}) == {"a.b.0.c": 1, "a.b.1.c": [2, 3], "d": None}


# TensorBoard


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, TENSORS: 0})
    found.Reload()
    return found


def scalars(folder):
    found = events(folder)
    return {name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]}


def test_tensorboard_has_steps_rows_text_and_plots(tmp_path, plt):
    pytest.importorskip("tensorboard")
    board = TensorBoardCallback("first", plots=True, config={"arch": "a|b", "a|c": "one\ntwo"})
    learn = learner(board, path=tmp_path)
    learn.validate()
    assert list(tmp_path.iterdir()) == []
    with raises(RuntimeError, "TensorBoardCallback has no run yet"):
        board.log_figure("early", plt.figure())
    learn.fit_one_cycle(2, 0.1)
    plt.close("all")
    board.log_figure("mine", plt.figure())
    assert len(plt.get_fignums()) == 1
    found = scalars(tmp_path / "runs" / "first")
    assert found.pop("epoch") == [(3, 0), (6, 1)]
    assert [step for step, _ in found.pop("step/momentum")] == list(range(1, 7))
    assert found == nearly(expected(learn))
    read = events(tmp_path / "runs" / "first")
    assert {*read.Tags()["images"]} == {"plots/loss", "plots/schedule", "mine"}
    (text,) = read.Tensors("hyper-parameters/text_summary")
    assert b"| parameters | 37 |" in text.tensor_proto.string_val[0]
    assert b"| arch | a\\|b |\n| a\\|c | one\\ntwo |" in text.tensor_proto.string_val[0]
    with raises(ValueError, "a plain name inside learn.path/runs"):
        TensorBoardCallback("..")
    with raises(ValueError, "has no '..'"):
        TensorBoardCallback("../x")


@pytest.mark.slow
def test_tensorboard_reads_the_files_of_several_processes_in_the_order_of_their_making(tmp_path):
    pytest.importorskip("torch.utils.tensorboard")
    learn = make_learner(make_dls(), cbs=TensorBoardCallback(tmp_path))
    others = tmp_path / f"events.out.tfevents.{int(time.time()) + 1:010d}.zebra.1.0"
    others.touch()
    learn.fit(1, 0.01)
    assert sorted(path.name for path in tmp_path.iterdir())[0] == others.name


@pytest.mark.slow
def test_fits_of_one_second_are_read_in_order_when_the_number_of_a_file_gets_a_digit(tmp_path, monkeypatch):
    writers = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(writers, "_global_uid", writers.AtomicCounter(8))
    learn = make_learner(make_dls(8), cbs=TensorBoardCallback(tmp_path))
    for _ in range(3):
        learn.fit(1)
    assert [step for step, _ in scalars(tmp_path)["train_loss"]] == [2, 4, 6]


def test_tensorboard_goes_on_in_the_same_directory_without_doubles(tmp_path):
    pytest.importorskip("tensorboard")
    learn = killed_and_resumed(tmp_path, TensorBoardCallback)
    (folder,) = (tmp_path / "runs").iterdir()
    found = scalars(folder)
    del found["epoch"]
    assert found == nearly(expected(learn))
    learn.fit(1)
    assert scalars(folder)["mae"][2:] == nearly(expected(learn, before=6))["mae"]


# The others: in processes of their own, as they leave threads, sockets and settings behind


@contextmanager
def mlflow_server(folder, env):
    """A server of MLflow with a database of SQLite; gives its address."""
    address = f"http://{LOOPBACK}:{free_port()}"
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    command += ["--artifacts-destination", str(folder / "artifacts"), "--workers", "1"]
    command += ["--host", LOOPBACK, "--port", address.rpartition(":")[2]]
    with open(folder / "server.txt", "w") as said:
        server = subprocess.Popen(command, env=env, stdout=said, stderr=said, start_new_session=True)
    try:
        end = time.monotonic() + 300
        while True:
            with suppress(OSError), urlopen(f"{address}/health", timeout=5):
                break
            assert server.poll() is None, (folder / "server.txt").read_text()
            assert time.monotonic() < end, (folder / "server.txt").read_text()
            time.sleep(0.2)
        yield address
    finally:
        os.killpg(server.pid, signal.SIGTERM)  # the server and its worker
        server.wait(60)


def free_port():
    with socket.create_server((LOOPBACK, 0)) as taken:
        return taken.getsockname()[1]


def apart(folder):
    """The environment of a process that leaves the trackers' files in this folder."""
    home, temporary = folder / "home", folder / "tmp"
    home.mkdir()
    temporary.mkdir()
    env = {name: value for name, value in environment().items() if not name.startswith(("WANDB_", "COMET_", "MLFLOW_"))}
    return env | {
        "HOME": str(home), "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "COMET_OFFLINE_DIRECTORY": "comet", "TRACKIO_DIR": str(folder / "trackio"),
        "MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false", "WANDB_DATA_DIR": str(folder / "staged"),
        "COMET_DISABLE_AUTO_LOGGING": "1",  # of what is given to MLflow
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }  # fmt: skip


@pytest.mark.soak
def test_wandb_has_a_run(tmp_path):
    pytest.importorskip("wandb")
    command = [sys.executable, str(SCRIPTS / "tracked.py"), "wandb"]
    done = subprocess.run(command, cwd=tmp_path, env=apart(tmp_path), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    recorded, [(_, config, metrics, axis)] = json.loads(done.stdout.splitlines()[-1])
    assert (config["arch"], config["parameters"]) == ("mlp", 37)
    assert {name: metrics[name] for name in recorded} == recorded
    assert {*recorded} <= {*axis}
    assert len(list(tmp_path.glob("wandb/offline-*/files/media/**/*.png"))) == 2


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """What a training in two processes has given the trackers, of which the first one was killed; and its folder."""
    for package in ("wandb", "comet_ml", "mlflow", "trackio"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("tracked")
    env = apart(folder)
    done = []
    with mlflow_server(folder, env) as address:
        for mode in ("die", "go"):
            command = [sys.executable, str(SCRIPTS / "tracked.py"), mode]
            their = env | {"MLFLOW_TRACKING_URI": address}
            done.append(subprocess.run(command, cwd=folder, env=their, capture_output=True, text=True, timeout=600))
    assert [each.returncode for each in done] == [9, 0], "\n".join(each.stdout + each.stderr for each in done)
    return json.loads(done[1].stdout.splitlines()[-1]), folder


def wanted(found):
    """What a tracker should have of both fits."""
    second = {name: [[step + 3, value] for step, value in pairs] for name, pairs in found["second"].items()}
    return {name: [*pairs, *second[name]] for name, pairs in found["first"].items()}


@pytest.mark.soak
def test_wandb_has_all_of_a_run_that_was_killed_and_uses_the_users_run(tracked):
    found, folder = tracked
    (died, _, before, _), (ended, config, after, axis), (users, _, logged, _) = found["wandb"]
    assert died == ended == found["ids"][0]
    assert (config["arch"], config["parameters"]) == ("mlp", 37)
    for name, pairs in wanted(found).items():
        assert after[name] == [pair for pair in pairs if pair[0] > 6 - (name[:5] != "step/")], name
        assert before.get(name, []) == pairs[: len(before.get(name, []))]  # W&B writes what it has in blocks
        assert name in axis
    assert users == found["users"][0]
    assert [step for step, _ in logged["step/lr"]] == [1, 2, 3] * 2
    assert len(list(folder.glob("wandb/offline-*/files/media/**/*.png"))) == 2 * 4  # of four fits
    assert config["seed"] == found["seed"]


@pytest.mark.soak
def test_comet_goes_on_in_the_same_experiment_and_uses_the_users(tracked):
    found, _ = tracked
    (ended, _, after, figures), (users, params, logged, _) = found["comet"]
    assert [ended, users] == [found["ids"][1], found["users"][1]]
    assert (params["arch"], params["parameters"]) == ("mlp", 37)
    for name, pairs in wanted(found).items():
        assert after[name] == [pair for pair in pairs if pair[0] > 6 - (name[:5] != "step/")], name
    assert figures == ["plots/loss", "plots/schedule"]
    assert [step for step, _ in logged["step/lr"]] == [1, 2, 3] * 2


@pytest.mark.soak
def test_mlflow_goes_on_without_doubles_and_uses_the_active_run(tracked):
    found, _ = tracked
    (status, name, params, metrics, figures), (_, _, theirs, logged, _) = found["mlflow"]
    assert (status, name, params["arch"], params["parameters"]) == ("FINISHED", "one", "mlp", "37")
    assert {name: metrics[name] for name in metrics.keys() - {"epoch"}} == wanted(found)
    assert [each.startswith("plots/") for each in figures[:-3]] == [True] * 4
    assert figures[-3:] == ["model/model.safetensors", "files/configs/a.txt", "later/a.txt"]
    assert found["mlflow files"] == [True, "a file"]
    assert found["objects"] == found["ids"]
    assert params["code.command"].endswith("tracked.py die")
    assert params["train.data"].startswith("TensorDataset, 12 items, sha256 ")
    assert params["seed"] == str(found["seed"])
    assert (theirs["parameters"], theirs["arch"]) == ("mine", "mlp")
    assert [step for step, _ in logged["step/lr"]] == [1, 2, 3] * 2


def test_trackio_gets_numbers_beyond_64_bits_as_text():
    pytest.importorskip("trackio")
    tracker = TrackioCallback("mine")
    tracker._handle = SimpleNamespace(config={})
    tracker._write_config({"n": 2**70, "seed": 2**64 - 1, "inner": [{"n": -(2**64), "flag": True}]})
    assert tracker._handle.config == {"n": str(2**70), "seed": 2**64 - 1, "inner": [{"n": str(-(2**64)), "flag": True}]}


@pytest.mark.soak
def test_trackio_goes_on_in_the_same_run_without_doubles_and_uses_the_users_run(tracked):
    found, _ = tracked
    (run, name, config, metrics, figures, artifacts, same), *others = found["trackio"]
    assert (run, name, config["arch"], config["parameters"]) == (found["ids"][3], "two", "mlp", 37)
    assert {name: metrics[name] for name in metrics.keys() - {"epoch"}} == wanted(found)
    assert sorted(figures) == ["plots/loss"] * 2 + ["plots/schedule"] * 2
    assert (artifacts.keys(), same) == ({f"model-{run}", f"files-{run}"}, True)
    assert others == []


@pytest.mark.soak
def test_nothing_is_left_in_the_home_directory(tracked):
    home = tracked[1] / "home"
    found = {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}
    assert [name for name in found if not name.startswith((".cache/", ".config/matplotlib"))] == []
