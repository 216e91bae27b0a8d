"""Trains in workers of Ray Train, of which one is killed, and others fail; or, without "ray", in the present processes.

    on_ray.py FOLDER [ray]

Writes what was seen into the folder: numbers.json, and for Ray ray.json and a file for each rank.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import Callback, CancelFitException, CheckpointCallback, DataLoaders, Learner, distributed, set_seed

EPOCHS, KILLED_AT = 3, 37  # of 78 steps, in the second epoch


def make_learner(num_workers=0):
    set_seed(1)
    x = torch.randn(203, 6).double()
    y = 2 * x[:, :1] + x[:, 1:2].sin()
    dls = DataLoaders.from_datasets(
        TensorDataset(x, y), TensorDataset(x[:51], y[:51]), bs=8, device="cpu", num_workers=num_workers
    )
    return Learner(dls, nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double(), nn.MSELoss())


class Report(Callback):
    """Reports to Ray, as the example does."""

    order = 60
    run_valid = False

    def after_epoch(self):
        import ray.train

        with distributed.grouped_collectives():
            ray.train.report({"epoch": self.epoch, "valid_loss": self.recorder.final_record[1]})


class On(Callback):
    """Does something on rank 1 in one event, at the n-th step."""

    order = 55  # before the report

    def __init__(self, event, n, act):
        super().__init__(**{event: self.do})
        self.n, self.act = n, act

    def do(self, *_):
        if distributed.rank() == 1 and self.learn.train_iter == self.n:
            self.act()


def kill_once(folder):
    if not (folder / "killed").exists():
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise ValueError("the first cause")


def cancel():
    raise CancelFitException


def train(config):
    """Train once, with the processes that are there, and write the numbers."""
    folder, on_ray = Path(config["folder"]), config["ray"]
    learn = make_learner(num_workers=1 if on_ray else 0)
    cbs = [CheckpointCallback(folder / "run", every=5, resume=True, save_on_signal=False)]
    if on_ray:
        cbs += [On("before_batch", KILLED_AT, lambda: kill_once(folder)), Report()]
    with learn.distrib_ctx(split_batches=True), learn.no_bar():
        learn.fit_one_cycle(EPOCHS, 0.02, cbs=cbs)
    numbers = {
        "values": learn.recorder.values,
        "losses": learn.recorder.losses,
        "weights": [p.flatten().tolist() for p in learn.model.parameters()],
        "predictions": learn.get_preds()[0].flatten().tolist(),
    }
    if distributed.is_main():
        (folder / "numbers.json").write_text(json.dumps(numbers))
    return learn.recorder.values[-1]


def go_wrong(config):
    """Leave fits on one rank in all ways, and train on; the last error ends both."""
    seen, learn = {}, make_learner()
    with learn.distrib_ctx(split_batches=True, timeout=60), learn.no_bar(), learn.no_logging():
        learn.fit(2, cbs=[On("after_epoch", 26, cancel), Report()])
        seen["steps"] = learn.train_iter
        try:
            learn.fit(2, cbs=On("before_batch", 5, fail))
        except Exception as error:
            seen["failed"] = [type(error).__name__, str(error)]
        learn.fit(1)
        seen["ranks"] = distributed.all_gather(distributed.rank())
        seen["same"] = distributed.same_everywhere([p.tolist() for p in learn.model.parameters()])
        try:
            learn.fit(2, cbs=On("before_batch", 5, fail))
        finally:
            seen["ended"] = time.monotonic()  # one clock for all processes of the machine
            Path(config["folder"], f"rank{distributed.rank()}.json").write_text(json.dumps(seen))


def on_ray(folder):
    import psutil
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback, WorkerGroupError
    from ray.train.torch import TorchTrainer

    class Hear(UserCallback):
        """Notes what the workers report."""

        def after_report(self, run_context, metrics, checkpoint):
            with (folder / "reported").open("a") as file:
                print(json.dumps(metrics), file=file)

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, _temp_dir=str(folder / "ray"))

    def trainer(function, failures):
        return TorchTrainer(
            function, train_loop_config={"folder": str(folder), "ray": True},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                name=function.__name__, storage_path=str(folder / "results"),
                failure_config=FailureConfig(max_failures=failures), callbacks=[Hear()],
            ),
        )  # fmt: skip

    seen = {"returned": trainer(train, 1).fit().return_value}
    try:
        trainer(go_wrong, 0).fit()
    except WorkerGroupError as error:
        seen["failures"] = {rank: str(failure) for rank, failure in error.worker_failures.items()}
    seen["processes"] = [process.pid for process in psutil.Process().children(recursive=True)]
    ray.shutdown()
    (folder / "ray.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    where = Path(sys.argv[1]).absolute()
    if sys.argv[2:] == ["ray"]:
        on_ray(where)
    else:
        train({"folder": str(where), "ray": False})
