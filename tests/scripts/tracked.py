"""A training that is logged to W&B, Comet, MLflow and Trackio, on this machine: it dies, and another process goes on.

The first one dies in its second fit, two steps after a checkpoint. The other one goes on, ends the runs, and logs two
fits to runs that it has opened itself. It prints what it has trained and what the trackers have, as JSON. With the
argument "wandb" it does so for one fit, and W&B alone.
"""

import glob
import json
import os
import socket
import struct
import sys
import time
import zipfile
from pathlib import Path

import matplotlib
import torch
from helpers import make_dls, make_learner, same_weights
from safetensors.torch import load_file

from learnerkit import Callback, CheckpointCallback, CometCallback, MLflowCallback, TrackioCallback, WandbCallback, mae

matplotlib.use("Agg")
connect = socket.socket.connect


def refuse(self, address):
    """No network but the sockets by which the trackers talk to processes of their own."""
    assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost"), address
    return connect(self, address)


socket.socket.connect = refuse


def make_trackers():
    kwargs = {"every": 1, "plots": True, "config": {"arch": "mlp"}}
    kwargs |= {"log_model": "model.safetensors", "log_files": ["configs/*.txt"]}
    return [
        WandbCallback(mode="offline", project="p", **kwargs),
        CometCallback(online=False, **kwargs),
        MLflowCallback("mine", "one", **kwargs),
        TrackioCallback("mine", name="two", **kwargs),
    ]


def die(cb):
    if sys.argv[1] == "die" and cb.training and cb.learn.n_fits == 1 and cb.train_iter == 5:
        time.sleep(1.5)  # Trackio writes twice a second
        os._exit(9)


def learner(*cbs):
    log = Callback(before_step=lambda cb: cb.learn.log_metric("square", cb.iter**2))
    return make_learner(make_dls(12), metrics=mae, cbs=[*cbs, log])


# What the trackers have


def wandb_records(path):
    """The records of a run's file: a log as LevelDB has it, of blocks of 32 KiB, with 7 bytes before each part."""
    from wandb.proto.wandb_internal_pb2 import Record

    with open(path, "rb") as file:
        data = file.read()
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole one, or the last part
            yield Record.FromString(whole)
            whole = b""


def wandb_runs():
    """[id, hyper-parameters, {name: [[step, value], ...]}, names that have 'step' as their axis] of each directory."""
    for path in sorted(glob.glob("wandb/offline-run-*/*.wandb"), key=os.path.getctime):
        config, metrics, axis = {}, {}, []
        for record in wandb_records(path):
            for update in (*record.run.config.update, *record.config.update):
                config[update.key or ".".join(update.nested_key)] = json.loads(update.value_json)
            axis += [record.metric.name] if record.metric.step_metric == "step" else []
            items = {i.key or ".".join(i.nested_key): i.value_json for i in record.history.item}
            for name in items.keys() - {"step"} if "step" in items else ():
                if name[0] != "_" and not name.startswith("plots"):
                    metrics.setdefault(name, []).append([int(items["step"]), json.loads(items[name])])
        yield path.removesuffix(".wandb").rpartition("run-")[2], config, metrics, axis


def comet_archives():
    """[key, hyper-parameters, {name: [[step, value], ...]}, names of figures] of each archive."""
    for path in sorted(glob.glob("comet/*.zip"), key=os.path.getctime):
        params, metrics, figures = {}, {}, []
        with zipfile.ZipFile(path) as archive:
            if not archive.namelist():
                continue  # of a process that was killed
            key = json.loads(archive.read("experiment.json"))["offline_id"]
            for line in archive.read("messages.json").splitlines():
                payload = json.loads(line)["payload"]
                if "param" in payload:
                    params[payload["param"]["paramName"]] = payload["param"]["paramValue"]
                elif "metric" in payload:
                    metric = payload["metric"]
                    found = metrics.setdefault(metric["metricName"], [])
                    found.append([metric["step"], float(metric["metricValue"])])
                elif payload.get("upload_type") == "visualization":
                    figures.append(payload["additional_params"]["figName"])
        yield key, params, metrics, figures


def mlflow_run(run):
    """[status, name, hyper-parameters, {name: [[step, value], ...]}, figures] of a run."""
    from mlflow import MlflowClient

    client = MlflowClient()
    found = client.get_run(run)
    metrics = {
        name: [[at.step, at.value] for at in client.get_metric_history(run, name)] for name in found.data.metrics
    }
    folders = ("plots", "model", "files/configs", "later")
    figures = [item.path for folder in folders for item in client.list_artifacts(run, folder)]
    return found.info.status, found.info.run_name, found.data.params, metrics, figures


def artifacts_of(run, learn):
    """Whether the model that MLflow has of a run is the learner's, and the text of the file."""
    from mlflow.artifacts import download_artifacts, load_text

    model = load_file(download_artifacts(run_id=run, artifact_path="model/model.safetensors"))
    text = load_text(download_artifacts(run_id=run, artifact_path="files/configs/a.txt"))
    return same_weights(model, learn.model), text


def trackio_runs(learn):
    """[id, name, hyper-parameters, {name: [[step, value], ...]}, figures, artifacts, same weights] of each run."""
    import trackio

    for run in trackio.Api().runs("mine"):
        metrics, figures = {}, []
        for log in trackio.SQLiteStorage.get_logs("mine", run.name, run_id=run.id):
            for name in log.keys() - {"step", "timestamp"}:
                if name.startswith("plots/"):
                    figures.append(name)
                else:
                    metrics.setdefault(name, []).append([log["step"], log[name]])
        names, same = {}, None
        for version in trackio.SQLiteStorage.get_run_artifacts("mine", run.name, run.id)["output"]:
            names[version["name"]] = version["version"]
        with_model = trackio.init("mine", "reader", embed=False, auto_log_cpu=False)
        if names:
            folder = Path(with_model.use_artifact(f"model-{run.id}:latest").download("downloaded"))
            same = same_weights(load_file(folder / "model.safetensors"), learn.model)
        trackio.finish()
        yield run.id, run.name, run.config, metrics, figures, names, same


def recorded(learn):
    """What a tracker has of the last fit: [[step, value], ...] by name; steps begin with 1."""
    recorder = learn.recorder
    steps = {"loss": recorder.losses, "lr": recorder.lrs, "square": [0.0, 1.0, 4.0] * len(recorder.values)}
    found = {f"step/{name}": [[i + 1, value] for i, value in enumerate(values)] for name, values in steps.items()}
    for i, name in enumerate(recorder.metric_names[1:-1]):
        found[name] = [[step, values[i]] for step, values in zip(recorder.iters, recorder.values, strict=True)]
    return found


def main():
    Path("configs").mkdir(exist_ok=True)
    Path("configs/a.txt").write_text("a file")
    trackers = make_trackers()
    dies = Callback(after_batch=die, order=20_000)
    learn = learner(*trackers, CheckpointCallback("run", every=3, resume=True), dies)
    learn.validate()
    if sys.argv[1] == "die":
        assert not any(map(os.path.exists, ("wandb", "comet", os.environ["TRACKIO_DIR"])))
    learn.fit(1)
    found = {"first": recorded(learn), "ids": [tracker.run_id for tracker in trackers]}
    learn.fit(2)
    found["second"] = recorded(learn)
    objects = [tracker.run for tracker in trackers]
    found["objects"] = [objects[0].id, objects[1].get_key(), objects[2].info.run_id, objects[3].id]
    found["mlflow files"] = artifacts_of(learn.mlflow.run_id, learn)
    found["seed"] = torch.initial_seed()
    for tracker in trackers:
        tracker.close()

    import comet_ml
    import mlflow
    import trackio
    import wandb

    found["trackio"] = [*trackio_runs(learn)]
    mlflow.log_artifact("configs/a.txt", "later", run_id=found["ids"][2])
    mine = trackio.init("theirs", embed=False, auto_log_cpu=False)
    with wandb.init(mode="offline", config={"parameters": "mine"}) as run, mlflow.start_run() as active:
        mlflow.log_param("parameters", "mine")
        experiment = comet_ml.start(online=False)
        for _ in range(2):
            theirs = make_trackers()
            learner(*theirs).fit(1)
            for tracker in theirs:
                tracker.close()
        assert wandb.run is run
        assert (run.config["parameters"], run.config["arch"]) == ("mine", "mlp")
        assert mlflow.active_run() is not None
        assert not experiment.ended
        assert trackio.context_vars.current_run.get() is mine
        trackio.finish()
        (run_of_theirs,) = trackio.Api().runs("theirs")
        assert run_of_theirs.config["arch"] == "mlp"
        found["users"] = [run.id, experiment.get_key(), active.info.run_id]
        experiment.end()
    wandb.teardown()  # waits for its service, which writes the files
    found |= {"wandb": [*wandb_runs()], "comet": [*comet_archives()]}
    found["mlflow"] = [mlflow_run(ids[2]) for ids in (found["ids"], found["users"])]
    print(json.dumps(found))


def track_by_wandb():
    import wandb

    tracker = WandbCallback(mode="offline", project="p", every=1, plots=True, config={"arch": "mlp"})
    learn = learner(tracker)
    learn.fit(2)
    tracker.close()
    wandb.teardown()
    print(json.dumps([recorded(learn), [*wandb_runs()]]))


if __name__ == "__main__":
    track_by_wandb() if sys.argv[1] == "wandb" else main()
