"""Fashion-MNIST with learnerkit, down to its best epoch."""

from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Sampler, TensorDataset

from learnerkit import (
    DataLoaders,
    EarlyStoppingCallback,
    GradientAccumulation,
    GradientClip,
    Learner,
    SaveModelCallback,
    TorchScheduler,
    accuracy,
    set_seed,
)
from learnerkit.datasets import fashion_mnist_sample


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 10),
    )


def in_float64(ds):
    images, labels = ds.tensors
    return TensorDataset(images.double(), labels)


class Shuffle(Sampler):
    "A random order that depends on the seed and the epoch alone."

    def __init__(self, n, seed):
        self.n, self.seed, self.epoch = n, seed, 0

    def __len__(self):
        return self.n

    def __iter__(self):
        order = torch.Generator().manual_seed(
            self.seed + self.epoch
        )
        self.epoch += 1
        return iter(
            torch.randperm(self.n, generator=order).tolist()
        )


def main():
    set_seed(42)
    train_ds, valid_ds = map(in_float64, fashion_mnist_sample())
    order = Shuffle(len(train_ds), seed=42)
    train_dl = DataLoader(train_ds, 60, sampler=order)
    valid_dl = DataLoader(valid_ds, 128)

    learn = Learner(
        DataLoaders(train_dl, valid_dl, device="cpu"),
        make_model().double(),
        nn.CrossEntropyLoss(),
        opt_func=partial(torch.optim.AdamW, weight_decay=0.05),
        metrics=accuracy,
        cbs=[
            GradientClip(1.0),
            GradientAccumulation(n_batches=2),
        ],
    )
    steps = 5 * len(train_dl) // 2
    cycle = TorchScheduler(
        lambda opt: OneCycleLR(opt, 3e-3, total_steps=steps)
    )
    best = SaveModelCallback("valid_loss", fname="best")
    stop = EarlyStoppingCallback("valid_loss", patience=2)
    learn.fit(5, cbs=[cycle, best, stop])

    best_loss, best_accuracy = learn.validate()
    return {
        "train_loss": [row[0] for row in learn.recorder.values],
        "valid_loss": [row[1] for row in learn.recorder.values],
        "best": [best_loss],
    }


if __name__ == "__main__":
    for name, losses in main().items():
        print(name, *losses)
