"""Momentum contrast: an encoder learns to find the other view of a sample among old ones (He et al. arXiv:1911.05722).

A second encoder, a moving average of the first, makes keys of the other views. The keys of the last batches wait in a
queue, as wrong answers for the next ones.
"""

import copy
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import EMA, Callback, DataLoaders, Learner, distributed
from learnerkit.callbacks.schedule import SchedCos

EPOCHS, BATCH, QUEUE, MOMENTUM, HEAT, RATE = 4, 12, 48, 0.9, 0.2, 0.3


def batches():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(125, 8, dtype=torch.float64, generator=generator)
    views = [x + 0.3 * torch.randn(x.shape, dtype=x.dtype, generator=generator) for _ in range(2)]
    return DataLoader(TensorDataset(*views), BATCH, shuffle=True, drop_last=True, generator=generator)


class MoCo(nn.Module):
    """Two encoders and the queue; returns the scores of the right key and of those in the queue, and the new keys."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.query = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6)).double()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(QUEUE, 6, dtype=torch.float64), dim=1))

    def forward(self, one, other):
        queries = F.normalize(self.query(one), dim=1)
        with torch.no_grad():
            keys = F.normalize(self.key(other), dim=1)
        right = (queries * keys).sum(1, keepdim=True)
        return torch.cat([right, queries @ self.queue.T], 1) / HEAT, keys


# The loop


def loop():
    model = MoCo()
    train = batches()
    opt = torch.optim.SGD(model.query.parameters(), lr=RATE, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, EPOCHS * len(train))
    losses = []
    for epoch in range(EPOCHS):
        model.train()
        for one, other in train:
            scores, keys = model(one, other)
            loss = F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))
            opt.zero_grad()
            loss.backward()
            opt.step()
            scheduler.step()
            with torch.no_grad():
                for average, p in zip(model.key.parameters(), model.query.parameters(), strict=True):
                    average.mul_(MOMENTUM).add_(p, alpha=1 - MOMENTUM)
                model.queue.copy_(torch.cat([keys, model.queue])[:QUEUE])
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {sum(losses[-len(train) :]) / len(train):.4f}")
    return model, losses


# The Learner


def contrast(pred):
    scores, _ = pred
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))


def enqueue(cb):
    queue, (_, keys) = cb.model.queue, cb.pred
    queue.copy_(torch.cat([*distributed.all_gather(keys), queue])[:QUEUE])


def learner(*cbs):
    model = MoCo()
    average = EMA(MOMENTUM, module=model.key, of=model.query)
    sgd = partial(torch.optim.SGD, momentum=0.9, weight_decay=1e-4)
    dls = DataLoaders(batches(), device="cpu", n_inp=2)
    return Learner(dls, model, contrast, opt_func=sgd, cbs=[*cbs, average, Callback(after_step=enqueue)])


def fit(learn):
    learn.fit(EPOCHS, SchedCos(RATE, 0.0))
