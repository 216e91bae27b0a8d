"""Fashion-MNIST with learnerkit, fine-tuned on darker images."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import (
    Callback,
    DataLoaders,
    GradientClip,
    Learner,
    SaveModelCallback,
    accuracy,
    set_seed,
)
from learnerkit.datasets import fashion_mnist_sample


class LogitPenalty(Callback):
    "Keep the scores of the classes small."

    run_valid = False

    def after_loss(self):
        penalty = 1e-3 * self.pred.square().mean()
        self.learn.loss_grad = self.loss_grad + penalty


def make_dls(brightness=1.0):
    train_ds, valid_ds = (
        TensorDataset(x.double() * brightness, y)
        for x, y in (ds.tensors for ds in fashion_mnist_sample())
    )
    order = torch.Generator().manual_seed(0)
    return DataLoaders(
        DataLoader(train_ds, 64, shuffle=True, generator=order),
        DataLoader(valid_ds, 200),
    )


def make_model():
    body = nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
    )
    head = nn.Linear(16 * 7 * 7, 10)
    return nn.Sequential(body, head).double()


def body_and_head(model):
    return [list(part.parameters()) for part in model]


def main():
    set_seed(42)
    learn = Learner(
        make_dls(),
        make_model(),
        nn.CrossEntropyLoss(),
        opt_func=partial(AdamW, betas=(0.9, 0.99), eps=1e-5),
        splitter=body_and_head,
        metrics=accuracy,
        wd=0.01,
        cbs=[GradientClip(1.0), LogitPenalty()],
    )
    best = SaveModelCallback("accuracy", fname="best")
    learn.fit_one_cycle(3, 3e-3, cbs=best)
    rows = list(learn.recorder.values)
    smooth = [learn.recorder.losses[-1]]

    learn.dls = make_dls(brightness=0.5)
    learn.fine_tune(2, 3e-3)
    rows += learn.recorder.values
    smooth += [learn.recorder.losses[-1]]

    preds, targets = learn.get_preds()
    score = F.cross_entropy(preds, targets)
    return {
        "valid_loss": [row[1] for row in rows],
        "smooth_loss": smooth,
        "predictions": [float(score)],
    }


if __name__ == "__main__":
    for name, losses in main().items():
        print(name, *losses)
