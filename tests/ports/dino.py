"""DINO: a student learns what its own moving average says of other views (Caron et al. arXiv:2104.14294).

The teacher sees two large views of a sample, the student these and two small ones. A centre, the running mean of the
teacher's scores, keeps all samples from getting the same answer. In the first epoch the last layer stands still. The
temperature of the teacher's scores rises, and the loss with it.
"""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import EMA, Callback, DataLoaders, GradientClip, Learner, ParamScheduler, distributed, linear_warmup
from learnerkit.callbacks.schedule import SchedCos

EPOCHS, BATCH, RATE, WARMUP = 4, 12, 2e-2, 0.2
HEATS = 0.04, 0.05, 0.06, 0.07  # the teacher's temperature in each epoch


def batches():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(100, 1, 10, dtype=torch.float64, generator=generator)
    views = x + 0.3 * torch.randn(100, 4, 10, dtype=torch.float64, generator=generator)
    views[:, 2:, 5:] = 0
    return DataLoader(TensorDataset(views), BATCH, shuffle=True, drop_last=True, generator=generator)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8))
        self.last = nn.Linear(8, 12, bias=False)

    def forward(self, x):
        return self.last(F.normalize(self.body(x), dim=-1))


class DINO(nn.Module):
    """Student, teacher and centre; returns the scores of both, (samples, views, classes)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.student = Network().double()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(12, dtype=torch.float64))

    def forward(self, views):
        with torch.no_grad():
            advice = self.teacher(views[:, :2])
        return self.student(views), advice


def cross_entropy(scores, advice, centre, heat):
    """The mean over samples, and over pairs of different views."""
    wanted, found = ((advice - centre) / heat).softmax(-1), (scores / 0.1).log_softmax(-1)
    pairs = -torch.einsum("btc,bsc->ts", wanted, found) / len(scores)
    return (pairs.sum() - pairs.diagonal().sum()) / 6


# The loop


def cosine(start, end, share):
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def loop():
    model = DINO()
    train = batches()
    params = list(model.student.parameters())
    groups = [{"params": [p for p in params if p.ndim > 1]}, {"params": [p for p in params if p.ndim == 1]}]
    opt = torch.optim.AdamW(groups, weight_decay=0.0)
    losses, steps = [], EPOCHS * len(train)
    for epoch in range(EPOCHS):
        model.train()
        for (views,) in train:
            share = len(losses) / steps
            late = (share - WARMUP) / (1 - WARMUP)
            rate = RATE * share / WARMUP if late < 0 else cosine(RATE, 1e-5, late)
            for group in opt.param_groups:
                group["lr"] = rate
            opt.param_groups[0]["weight_decay"] = cosine(0.04, 0.4, share)
            scores, advice = model(views)
            loss = cross_entropy(scores, advice, model.centre, HEATS[epoch])
            opt.zero_grad()
            loss.backward()
            for p in params:
                nn.utils.clip_grad_norm_(p, 0.3)
            if epoch == 0:
                model.student.last.weight.grad = None
            opt.step()
            with torch.no_grad():
                momentum = cosine(0.9, 1.0, share)
                for average, p in zip(model.teacher.parameters(), params, strict=True):
                    average.mul_(momentum).add_(p, alpha=1 - momentum)
                model.centre.mul_(0.9).add_(advice.mean((0, 1)), alpha=0.1)
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {sum(losses[-len(train) :]) / len(train):.4f}")
    return model, losses


# The Learner


def loss(pred, *, epoch, model):
    return cross_entropy(*pred, model.centre, HEATS[epoch])


def hold_last_layer(cb):
    if cb.epoch == 0:
        cb.model.student.last.weight.grad = None


def move_centre(cb):
    _, advice = cb.pred
    cb.model.centre.lerp_(distributed.reduce(advice.mean((0, 1)), "mean"), 0.1)


def learner(*cbs):
    model = DINO()
    teacher = EMA(SchedCos(0.9, 1.0), module=model.teacher, of=model.student)
    steps = Callback(before_step=hold_last_layer, after_step=move_centre)
    decay = ParamScheduler({"weight_decay": SchedCos(0.04, 0.4)})
    cbs = [*cbs, teacher, steps, decay, GradientClip(0.3, each=True)]
    return Learner(DataLoaders(batches(), device="cpu"), model, loss, wd=0.04, cbs=cbs)


def fit(learn):
    learn.fit(EPOCHS, linear_warmup(WARMUP, SchedCos(RATE, 1e-5)))
