"""The forward-forward algorithm, after Hinton 2022 (arXiv:2212.13345), with labels as a part of the inputs.

Each layer learns by itself: the squares of its outputs shall be large for a sample with its right label, and small for
one with a wrong label. No gradient goes from layer to layer. The wrong labels come with the data.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import Callback, DataLoaders, Learner

EPOCHS, BATCH, FEATURES, CLASSES, WIDTH, RATE, THRESHOLD = 4, 16, 8, 4, 32, 4e-2, 1.0


def labelled(x, y):
    """The features, and behind them the label."""
    return torch.cat([x, F.one_hot(y, CLASSES).to(x)], 1)


def samples(n, seed):
    """Features around a centre for each class, and the classes."""
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=generator)
    return centres[y] + 0.3 * torch.randn(n, FEATURES, generator=generator, dtype=torch.float64), y


def pairs(n, seed):
    """Samples with the right label, and with a wrong one."""
    x, y = samples(n, seed)
    other = torch.randint(1, CLASSES, (n,), generator=torch.Generator().manual_seed(seed + 1))
    return TensorDataset(labelled(x, y), labelled(x, (y + other) % CLASSES))


def loaders():
    order = torch.Generator().manual_seed(5)
    return DataLoader(pairs(150, 1), BATCH, shuffle=True, generator=order), DataLoader(pairs(50, 3), BATCH)


class Layer(nn.Linear):
    """Takes the direction of its inputs alone, so that their length tells it nothing; stops the gradient there."""

    def forward(self, x):
        return super().forward(F.rms_norm(x.detach(), x.shape[1:], eps=1e-6)).relu()


class Layers(nn.ModuleList):
    """Returns the outputs of each layer for the samples with a right label, and for those with a wrong one."""

    def forward(self, right, wrong):
        found = []
        for layer in self:
            right, wrong = layer(right), layer(wrong)
            found.append((right, wrong))
        return found

    @torch.no_grad()
    def classify(self, x):
        """The label with which the outputs of all layers but the first are largest."""
        scores = []
        for label in range(CLASSES):
            found = self(*[labelled(x, torch.full((len(x),), label))] * 2)
            scores.append(sum(right.square().mean(1) for right, _ in found[1:]))
        return torch.stack(scores, 1).argmax(1)


def network():
    torch.manual_seed(6)
    return Layers([Layer(FEATURES + CLASSES, WIDTH), Layer(WIDTH, WIDTH), Layer(WIDTH, WIDTH)]).double()


def goodness_loss(right, wrong):
    """The loss of a layer."""
    over = [right.square().mean(1) - THRESHOLD, THRESHOLD - wrong.square().mean(1)]
    return F.softplus(-torch.cat(over)).mean()


# The loop


@torch.no_grad()
def validate(model, batches):
    model.eval()
    total = 0.0
    for right, wrong in batches:
        total += sum(goodness_loss(*outputs).item() for outputs in model(right, wrong)) * len(right)
    return total / len(batches.dataset)


def loop():
    model = network()
    train, valid = loaders()
    x, y = samples(50, 3)
    opts = [Adam(layer.parameters(), lr=RATE) for layer in model]
    losses = []
    for epoch in range(EPOCHS):
        model.train()
        for right, wrong in train:
            total = 0.0
            for layer, opt in zip(model, opts, strict=True):
                right, wrong = layer(right), layer(wrong)
                loss = goodness_loss(right, wrong)
                opt.zero_grad()
                loss.backward()
                opt.step()
                total += loss.item()
            losses.append(total)
        accuracy = (model.classify(x) == y).double().mean()
        print(f"epoch {epoch}: train {losses[-1]:.4f}, valid {validate(model, valid):.4f}, accuracy {accuracy:.4f}")
    return model, losses


# The Learner


def loss(pred):
    return sum(goodness_loss(*outputs) for outputs in pred)


def learner(*cbs):
    model, (x, y) = network(), samples(50, 3)

    @Callback.on("after_train")
    def classify(cb):
        cb.learn.log_metric("accuracy", (model.classify(x) == y).double().mean())

    dls = DataLoaders(*loaders(), n_inp=2, device="cpu")
    return Learner(dls, model, loss, opt_func=Adam, lr=RATE, cbs=[*cbs, classify])


def fit(learn):
    learn.fit(EPOCHS)
