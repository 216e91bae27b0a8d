"""The loggers to TensorBoard, Weights & Biases, Comet and MLflow: each without a network, read back."""

import json
import struct
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
from helpers import make_dls, make_learner, raises, raising
from resume_jobs import Kill, Killed

from learnerkit import (
    Callback,
    CheckpointCallback,
    CometCallback,
    MLflowCallback,
    TensorBoardCallback,
    WandbCallback,
    mae,
)
from learnerkit.loggers.logger import flat

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
        dies = Callback() if resume else Kill(kill)
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
    ],
)
def test_a_missing_package_is_named_with_the_extra(kind, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with raises(ImportError, f"{kind.__name__} needs {package}: pip install 'learnerkit[{extra}]'"):
        kind()


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
    board = TensorBoardCallback("first", plots=True, config={"arch": "a|b"})
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
    assert found.pop("step/momentum", None) is None
    assert found == nearly(expected(learn))
    read = events(tmp_path / "runs" / "first")
    assert {*read.Tags()["images"]} == {"plots/loss", "plots/schedule", "mine"}
    (text,) = read.Tensors("hyper-parameters/text_summary")
    assert b"| parameters | 37 |" in text.tensor_proto.string_val[0]
    assert b"| arch | a\\|b |" in text.tensor_proto.string_val[0]
    with raises(ValueError, "a plain name inside learn.path/runs"):
        TensorBoardCallback("../x")


def test_tensorboard_goes_on_in_the_same_directory_without_doubles(tmp_path):
    pytest.importorskip("tensorboard")
    learn = killed_and_resumed(tmp_path, TensorBoardCallback)
    (folder,) = (tmp_path / "runs").iterdir()
    found = scalars(folder)
    del found["epoch"]
    assert found == nearly(expected(learn))
    learn.fit(1)
    assert scalars(folder)["mae"][2:] == nearly(expected(learn, before=6))["mae"]


# Weights & Biases


def wandb_records(folder):
    """The records of a run's file: a log as LevelDB has it, of blocks of 32 KiB with parts of 7 bytes and the data."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = Path(folder).glob("*.wandb")
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(whole)
            whole = b""


def wandb_content(folder):
    """(the id, the hyper-parameters, {name: (step, value) pairs}, the names with 'step' as their axis) of a run."""
    records = list(wandb_records(folder))
    config, history, run, axis = {}, {}, None, set()
    for record in records:
        run = record.run.run_id or run
        for update in (*record.run.config.update, *record.config.update):
            config[update.key or ".".join(update.nested_key)] = json.loads(update.value_json)
        axis |= {record.metric.name} if record.metric.step_metric == "step" else set()
        items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
        for name, value in items.items():
            if name[0] != "_" and name != "step" and "step" in items:
                history.setdefault(name, []).append((items["step"], value))
    return run, config, history, axis


@pytest.fixture
def at_home(tmp_path, monkeypatch):
    """A home of its own, and no network."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(home))
    return tmp_path


@pytest.fixture
def offline_wandb(at_home, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(at_home))
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield at_home / "wandb"
    wandb.teardown()


@pytest.mark.slow
def test_wandb_has_steps_rows_and_hyper_parameters(offline_wandb, plt):
    import wandb

    logger = WandbCallback(every=1, plots=True, config={"arch": "mlp"}, mode="offline", project="p")
    learn = learner(logger)
    learn.validate()
    assert wandb.run is None
    learn.fit(1)
    wanted = expected(learn)
    run, first = wandb.run, logger._id
    learn.fit(1)
    assert wandb.run is run
    logger.close()
    assert wandb.run is None
    (folder,) = offline_wandb.glob("offline-run-*")
    name, config, history, axis = wandb_content(folder)
    assert (name, config["arch"], config["parameters"]) == (first, "mlp", 37)
    both = {name: wanted[name] + pairs for name, pairs in expected(learn, before=3).items()}
    assert {name: history[name] for name in both} == nearly(both)
    assert {*both} <= axis
    assert len(list((folder / "files" / "media").rglob("*.png"))) == 4


@pytest.mark.slow
def test_wandb_uses_a_run_of_the_users_and_goes_on_with_its_own(offline_wandb):
    import wandb

    with wandb.init(mode="offline", config={"parameters": "mine"}) as run:
        logger = WandbCallback(every=1)
        learner(logger).fit(1)
        logger.close()
        assert wandb.run is run
        assert (logger._id, run.config["parameters"], run.config["model"]) == (None, "mine", "Sequential")
    killed_and_resumed(offline_wandb.parent, lambda: WandbCallback(every=1, mode="offline"))
    learner(WandbCallback(every=1, mode="offline")).fit(1)  # another run, without a word
    wandb.finish()
    folders = sorted(offline_wandb.glob("offline-run-*"), key=lambda path: path.stat().st_ctime)
    found = [wandb_content(folder) for folder in folders]
    assert len({run for run, *_ in found}) == 3
    steps = {run: [step for step, _ in history["step/lr"]] for run, _, history, _ in found}
    assert sorted(steps.values()) == [[1, 2, 3], [1, 2, 3], [1, 2, 3, 4, 5, 6]]


# Comet


@pytest.fixture
def offline_comet(at_home, monkeypatch):
    comet = pytest.importorskip("comet_ml")
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(at_home / "comet"))
    for name in ("COMET_LOGGING_CONSOLE", "COMET_DISPLAY_SUMMARY_LEVEL"):
        monkeypatch.setenv(name, {"COMET_LOGGING_CONSOLE": "critical"}.get(name, "0"))
    yield at_home / "comet"
    comet.end()


def comet_content(path):
    """(the key, the parameters, {name: (step, value) pairs}, the figures) of an archive."""
    with zipfile.ZipFile(path) as archive:
        key = json.loads(archive.read("experiment.json"))["offline_id"]
        messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
    params, metrics, figures = {}, {}, []
    for message in messages:
        payload = message["payload"]
        if message["type"] == "parameter_msg":
            params[payload["param"]["paramName"]] = payload["param"]["paramValue"]
        elif message["type"] == "metric_msg":
            metric = payload["metric"]
            metrics.setdefault(metric["metricName"], []).append((metric["step"], float(metric["metricValue"])))
        elif message["type"] == "file_upload":
            figures.append(payload.get("additional_params", {}).get("fileName"))
    return key, params, metrics, figures


@pytest.mark.slow
def test_comet_has_steps_rows_and_hyper_parameters_and_goes_on(offline_comet, plt):
    import comet_ml

    logger = CometCallback(every=1, plots=True, config={"arch": "mlp"}, online=False)
    learn = learner(logger)
    learn.fit(1)
    key, wanted = logger._id, expected(learn)
    learn.fit(1)
    logger.close()
    (path,) = offline_comet.glob("*.zip")
    found, params, metrics, figures = comet_content(path)
    assert (found, params["arch"], params["parameters"]) == (key, "mlp", "37")
    both = {name: wanted[name] + pairs for name, pairs in expected(learn, before=3).items()}
    assert {name: metrics[name] for name in both} == nearly(both)
    assert sum("plots" in str(name) for name in figures) == 4
    killed_and_resumed(offline_comet.parent, lambda: CometCallback(every=1, online=False))
    comet_ml.end()
    assert len(list(offline_comet.glob("*.zip"))) >= 2


# MLflow


@pytest.fixture
def local_mlflow(at_home, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{at_home}/mlflow.db")
    monkeypatch.setenv("MLFLOW_ENABLE_ASYNC_LOGGING", "false")
    return mlflow.MlflowClient()


def history(client, run, name):
    return [(at.step, at.value) for at in client.get_metric_history(run, name)]


@pytest.mark.slow
def test_mlflow_has_steps_rows_and_hyper_parameters_and_goes_on(local_mlflow, tmp_path, plt):
    import mlflow

    logger = MLflowCallback("mine", "one", every=1, plots=True, config={"arch": "mlp"})
    learn = learner(logger)
    assert learn.mlflow is logger
    learn.fit(1)
    assert mlflow.active_run() is None
    wanted, run = expected(learn), logger._id
    fails = raising("after_step", RuntimeError("no"), lambda cb: cb.iter == 1)
    with pytest.raises(RuntimeError, match="no"):
        learn.fit(1, cbs=fails)
    found = local_mlflow.get_run(run)
    assert (found.info.status, found.info.run_name) == ("FAILED", "one")
    assert (found.data.params["arch"], found.data.params["parameters"]) == ("mlp", "37")
    for name, pairs in wanted.items():
        assert history(local_mlflow, run, name)[: len(pairs)] == pairs
    assert len(history(local_mlflow, run, "step/lr")) == 4
    assert len(local_mlflow.list_artifacts(run, "plots")) == 2
    learn = killed_and_resumed(tmp_path, lambda: MLflowCallback("mine", every=1))
    found = local_mlflow.get_run(learn.mlflow._id)
    assert (found.info.run_id != run, found.info.status) == (True, "FINISHED")
    for name, pairs in expected(learn).items():
        assert history(local_mlflow, found.info.run_id, name) == pairs


@pytest.mark.slow
def test_mlflow_uses_the_active_run(local_mlflow):
    import mlflow

    with mlflow.start_run() as run:
        mlflow.log_param("model", "mine")
        learner(MLflowCallback(every=1)).fit(1)
        assert mlflow.active_run() is not None
    found = local_mlflow.get_run(run.info.run_id).data
    assert (found.params["model"], found.params["ranks"]) == ("mine", "1")
    assert len(history(local_mlflow, run.info.run_id, "valid_loss")) == 1
