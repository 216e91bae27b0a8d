"""Fashion-MNIST with fastai, fine-tuned on darker images."""

import torch
from fastai.vision.all import *
from torch.utils.data import TensorDataset

from learnerkit.datasets import fashion_mnist_sample


class LogitPenalty(Callback):
    "Keep the scores of the classes small."

    run_valid = False

    def after_loss(self):
        penalty = 1e-3 * self.pred.square().mean()
        self.learn.loss_grad = self.loss_grad + penalty


class SmoothLossInFloat64(AvgSmoothLoss):
    "fastai begins its running loss in float32."

    def reset(self):
        self.count = 0
        self.val = torch.zeros((), dtype=torch.float64)


def make_dls(brightness=1.0):
    train_ds, valid_ds = (
        TensorDataset(x.double() * brightness, y)
        for x, y in (ds.tensors for ds in fashion_mnist_sample())
    )
    order = torch.Generator().manual_seed(0)
    torch_dl = torch.utils.data.DataLoader
    return DataLoaders(
        torch_dl(train_ds, 64, shuffle=True, generator=order),
        torch_dl(valid_ds, 200),
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
    return [params(model[0]), params(model[1])]


def main():
    set_seed(42)
    learn = Learner(
        make_dls(),
        make_model(),
        nn.CrossEntropyLoss(),
        splitter=body_and_head,
        metrics=accuracy,
        wd=0.01,
        cbs=[GradientClip(1.0), LogitPenalty()],
    )
    learn.recorder.smooth_loss = SmoothLossInFloat64()
    best = SaveModelCallback("accuracy", fname="best")
    learn.fit_one_cycle(3, 3e-3, cbs=best)
    rows = list(learn.recorder.values)
    smooth = [learn.recorder.losses[-1]]

    learn.dls = make_dls(brightness=0.5)
    # Else weight decay would go on acting on frozen weights,
    # whose gradients fastai leaves at zero.
    learn.model.zero_grad()
    learn.fine_tune(2, 3e-3)
    rows += learn.recorder.values
    smooth += [learn.recorder.losses[-1]]

    preds, targets = learn.get_preds(dl=learn.dls.valid)
    score = F.cross_entropy(preds, targets)
    return {
        "valid_loss": [row[1] for row in rows],
        "smooth_loss": [float(loss) for loss in smooth],
        "predictions": [float(score)],
    }


if __name__ == "__main__":
    for name, losses in main().items():
        print(name, *losses)
