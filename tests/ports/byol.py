"""BYOL: a network predicts what its own moving average makes of another view (Grill et al. arXiv:2006.07733).

No negative samples are needed. The momentum of the average grows to 1 along a cosine, and biases have no weight decay.
"""

import copy
import math
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import EMA, DataLoaders, Learner, linear_warmup
from learnerkit.callbacks.schedule import SchedCos

EPOCHS, BATCH, RATE, WARMUP, MOMENTUM, DECAY = 3, 12, 0.2, 0.25, 0.9, 1e-3


def batches():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(110, 1, 8, dtype=torch.float64, generator=generator)
    views = x + 0.3 * torch.randn(110, 2, 8, dtype=torch.float64, generator=generator)
    return DataLoader(TensorDataset(views), BATCH, shuffle=True, generator=generator)


def mlp(*sizes):
    return nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.ReLU(), nn.Linear(sizes[1], sizes[2])).double()


class BYOL(nn.Module):
    """Online network, predictor and target; returns the loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.online, self.predictor = mlp(8, 16, 6), mlp(6, 12, 6)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, views):
        with torch.no_grad():
            wanted = self.target(views.flip(1))
        return (2 - 2 * F.cosine_similarity(self.predictor(self.online(views)), wanted, dim=2)).sum(1).mean()


# The loop


def cosine(start, end, share):
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def loop():
    model = BYOL()
    train = batches()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in trained if not name.endswith("bias")], "weight_decay": DECAY},
        {"params": [p for name, p in trained if name.endswith("bias")], "weight_decay": 0.0},
    ]
    opt = torch.optim.SGD(groups, lr=RATE, momentum=0.9)
    losses, steps = [], EPOCHS * len(train)
    for epoch in range(EPOCHS):
        model.train()
        for (views,) in train:
            share = len(losses) / steps
            late = (share - WARMUP) / (1 - WARMUP)
            for group in opt.param_groups:
                group["lr"] = RATE * share / WARMUP if late < 0 else cosine(RATE, 0.0, late)
            loss = model(views)
            opt.zero_grad()
            loss.backward()
            opt.step()
            momentum = cosine(MOMENTUM, 1.0, share)
            with torch.no_grad():
                for average, p in zip(model.target.parameters(), model.online.parameters(), strict=True):
                    average.mul_(momentum).add_(p, alpha=1 - momentum)
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {sum(losses[-len(train) :]) / len(train):.4f}")
    return model, losses


# The Learner


def learner(*cbs):
    model = BYOL()
    target = EMA(SchedCos(MOMENTUM, 1.0), module=model.target, of=model.online)
    dls, sgd = DataLoaders(batches(), device="cpu"), partial(torch.optim.SGD, momentum=0.9)
    return Learner(dls, model, opt_func=sgd, wd=DECAY, loss_weight="samples", cbs=[*cbs, target])


def fit(learn):
    learn.fit(EPOCHS, linear_warmup(WARMUP, SchedCos(RATE, 0.0)))
