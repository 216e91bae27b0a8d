"""Distillation of a network into a smaller one, after Hinton, Vinyals and Dean (arXiv:1503.02531).

The loss is the cross-entropy with the labels, and that with the softened scores of a teacher.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import DataLoaders, GradientClip, Learner
from learnerkit.callbacks.schedule import SchedLin

EPOCHS, BATCH, HEAT, SHARE = 2, 16, 3.0, 0.7


def dataset():
    x = torch.randn(120, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x[:, :3] * x[:, 3:6]).argmax(1))


def networks():
    torch.manual_seed(2)
    sizes = {"teacher": 32, "student": 6}
    return [nn.Sequential(nn.Linear(10, n), nn.Tanh(), nn.Linear(n, 3)).double() for n in sizes.values()]


def soft_loss(pred, scores):
    softened = F.kl_div(F.log_softmax(pred / HEAT, 1), F.softmax(scores / HEAT, 1), reduction="batchmean")
    return HEAT**2 * softened


# The loop


def loop():
    teacher, student = networks()
    teacher.eval()
    opt = torch.optim.AdamW(student.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, EPOCHS * 8)
    losses = []
    for _ in range(EPOCHS):
        student.train()
        for x, y in DataLoader(dataset(), BATCH):
            with torch.no_grad():
                scores = teacher(x)
            pred = student(x)
            loss = SHARE * soft_loss(pred, scores) + (1 - SHARE) * F.cross_entropy(pred, y)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            opt.step()
            scheduler.step()
            losses.append(loss.item())
    return student, losses


# The Learner


def learner(*cbs):
    teacher, student = networks()

    def loss(pred, y, *, x):
        with torch.no_grad():
            scores = teacher.eval()(x)
        return SHARE * soft_loss(pred, scores) + (1 - SHARE) * F.cross_entropy(pred, y)

    dls = DataLoaders(DataLoader(dataset(), BATCH), device="cpu")
    return Learner(dls, student, loss, cbs=[*cbs, GradientClip(1.0)])


def fit(learn):
    learn.fit(EPOCHS, SchedLin(1e-2, 0.0))
