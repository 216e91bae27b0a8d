"""Fashion-MNIST with learnerkit, on one process or many.

python -m learnerkit.launch --nproc 2 pytorch_ours.py
"""

from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from learnerkit import (
    DataLoaders,
    EarlyStoppingCallback,
    GradientClip,
    Learner,
    SaveModelCallback,
    accuracy,
    distributed,
    linear_warmup,
    set_seed,
)
from learnerkit.callbacks.schedule import SchedCos
from learnerkit.datasets import fashion_mnist_sample

EPOCHS, BATCH, WARM_UP, PATIENCE = 5, 64, 0.1, 2


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


class OrderOfDistributedSampler(Sampler):
    "For this comparison alone; elsewhere shuffle=True will do."

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
    sampler = OrderOfDistributedSampler(len(train_ds), seed=42)
    train_dl = DataLoader(train_ds, BATCH, sampler=sampler)
    valid_dl = DataLoader(valid_ds, 200)

    learn = Learner(
        DataLoaders(train_dl, valid_dl),
        make_model().double(),
        nn.CrossEntropyLoss(),
        opt_func=partial(torch.optim.AdamW, weight_decay=0.05),
        metrics=accuracy,
        cbs=GradientClip(1.0),
    )
    stop = EarlyStoppingCallback(patience=PATIENCE)
    with learn.distrib_ctx(split_batches=True):
        rate = linear_warmup(WARM_UP, SchedCos(3e-3, 0.0))
        learn.fit(EPOCHS, rate, cbs=[SaveModelCallback(), stop])
        # Of the best model.
        best_loss, best_accuracy = learn.validate()
    return {
        "train_loss": [row[0] for row in learn.recorder.values],
        "valid_loss": [row[1] for row in learn.recorder.values],
        "best": [best_loss],
    }


if __name__ == "__main__":
    found = main()
    for name, losses in (
        found.items() if distributed.is_main() else ()
    ):
        print(name, *losses)
