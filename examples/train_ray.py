"""Train on Fashion-MNIST in the workers of Ray Train; a worker that dies is replaced, and the run resumes.

    python examples/train_ray.py --workers 2
    python -m learnerkit.launch --nproc 2 examples/train_ray.py --workers 0     # the same numbers without Ray

It needs `pip install 'ray[train]'`. The workers find the checkpoints in OUT/run, so on several machines OUT is a folder
that all of them see. Leaves OUT/fashion.pth, the weights.
"""

import argparse
import os
from pathlib import Path

from torch import nn

from learnerkit import Callback, CheckpointCallback, DataLoaders, Learner, accuracy, distributed, set_seed
from learnerkit.datasets import fashion_mnist_sample


def numbers(learn):
    """The losses and metrics of the last epoch, by their names."""
    names = learn.recorder.metric_names[1:-1]  # without the epoch and its time
    return dict(zip(names, learn.recorder.final_record, strict=True))


class ReportToRay(Callback):
    """Reports the numbers of each epoch to Ray, for its dashboard and for Tune."""

    order = 60  # after the recorder, which has order 50
    run_valid = False

    def after_epoch(self):
        import ray.train

        with distributed.grouped_collectives():  # Ray waits for all workers, so they first agree that all of them come
            ray.train.report({"epoch": self.epoch, **numbers(self.learn)})


def train(config):
    """Train with the processes that are there: each worker of Ray, or each process of the launcher, runs this."""
    set_seed(config["seed"])
    dls = DataLoaders.from_datasets(*fashion_mnist_sample(), bs=64, num_workers=config["loaders"])
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    learn = Learner(dls, model, nn.CrossEntropyLoss(), metrics=accuracy, model_dir=config["out"])
    # Ray runs this in a thread, where Python sees no signals, so checkpoints are saved by the number of steps alone.
    saving = CheckpointCallback(Path(config["out"], "run"), every=20, resume=True, save_on_signal=False)
    reporting = [ReportToRay] if config["workers"] else []
    with learn.distrib_ctx(split_batches=True):
        learn.fit_one_cycle(config["epochs"], config["lr"], cbs=[saving, *reporting])
    learn.save("fashion", with_opt=False)  # written by rank 0
    return numbers(learn)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workers", type=int, default=2, help="workers of Ray; 0: train in the processes of a launcher"
    )
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--loaders", type=int, default=0, help="processes that load data, for each worker")
    parser.add_argument("--failures", type=int, default=3, help="how often Ray replaces workers that have died")
    parser.add_argument("--out", type=Path, default=Path("models/ray"), help="folder that all workers see")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def main():
    args = parse_args()
    config = vars(args) | {"out": str(args.out.absolute())}  # a worker has its own working directory
    if not args.workers:
        train(config)
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if args.gpu else "gloo"),
        run_config=RunConfig(
            name="fashion",
            storage_path=str(args.out.absolute() / "ray"),
            failure_config=FailureConfig(max_failures=args.failures),
        ),
    )
    result = trainer.fit()
    print(f"saved {args.out / 'fashion.pth'}; accuracy {result.return_value['accuracy']:.3f}")


if __name__ == "__main__":
    main()
