"""A callback of one's own: it puts the gradient's norm into the table, and ends the fit when it has stopped paying.

python examples/custom_callback.py
python -m learnerkit.launch --nproc 2 examples/custom_callback.py
"""

import argparse

import torch
from torch import nn

from learnerkit import Callback, CancelFitException, DataLoaders, Learner, accuracy, set_seed
from learnerkit.datasets import fashion_mnist_sample


class GradientNorm(Callback):
    """Log the norm of the gradient; the table shows its mean over the epoch."""

    def before_step(self):
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.learn.log_metric("grad_norm", torch.nn.utils.get_total_norm(grads))


class StopWhenStuck(Callback):
    """End the fit when the validation loss has not become better for `patience` epochs."""

    order = 70  # after the recorder, which has order 50

    def __init__(self, patience=2):
        super().__init__()
        self.patience = patience

    def before_fit(self):
        self.best, self.waited = float("inf"), 0

    def after_epoch(self):
        # The recorder's numbers are those of all ranks together, so all ranks stop at the same epoch.
        row = dict(zip(self.recorder.metric_names, self.recorder.log, strict=True))
        self.waited = 0 if row["valid_loss"] < self.best else self.waited + 1
        self.best = min(self.best, row["valid_loss"])
        if self.waited >= self.patience:
            raise CancelFitException


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="the most that are trained")
    parser.add_argument("--patience", type=int, default=2)
    args = parser.parse_args()

    set_seed(42)
    dls = DataLoaders.from_datasets(*fashion_mnist_sample(), bs=100)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    learn = Learner(dls, model, nn.CrossEntropyLoss(), lr=3e-3, metrics=accuracy, cbs=GradientNorm)
    with learn.distrib_ctx(split_batches=True):
        learn.fit(args.epochs, cbs=StopWhenStuck(args.patience))


if __name__ == "__main__":
    main()
