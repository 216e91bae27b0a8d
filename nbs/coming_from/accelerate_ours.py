"""Fashion-MNIST with learnerkit, on one process or many.

python -m learnerkit.launch --nproc 2 accelerate_ours.py
"""

from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import (
    DataLoaders,
    GradientAccumulation,
    GradientClip,
    Learner,
    SaveModelCallback,
    TorchScheduler,
    accuracy,
    distributed,
    set_seed,
)
from learnerkit.datasets import fashion_mnist_sample

EPOCHS = 5


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


def main():
    set_seed(42)
    train_ds, valid_ds = map(in_float64, fashion_mnist_sample())
    order = torch.Generator().manual_seed(0)
    train_dl = DataLoader(
        train_ds, 60, shuffle=True, generator=order
    )
    valid_dl = DataLoader(valid_ds, 128)

    learn = Learner(
        DataLoaders(train_dl, valid_dl),
        make_model().double(),
        nn.CrossEntropyLoss(),
        opt_func=partial(torch.optim.AdamW, weight_decay=0.05),
        metrics=accuracy,
        cbs=[
            GradientAccumulation(n_batches=2),
            GradientClip(1.0),
        ],
    )
    steps = EPOCHS * len(train_dl) // 2
    cycle = TorchScheduler(
        lambda opt: OneCycleLR(opt, 3e-3, total_steps=steps)
    )
    with learn.distrib_ctx(split_batches=True):
        learn.fit(EPOCHS, cbs=[cycle, SaveModelCallback()])
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
