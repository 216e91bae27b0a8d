"""A network that solves a differential equation (physics-informed: Raissi, Perdikaris and Karniadakis 2019).

The equation is u'' = -pi^2 sin(pi x) with u(0) = u(1) = 0, of which u = sin(pi x) is the solution. The first steps are
Adam's, on a part of the points each; the last ones L-BFGS's, on all points.
https://doi.org/10.1016/j.jcp.2018.10.045
"""

import math
from functools import partial

import torch
from torch import nn
from torch.autograd import grad
from torch.nn import functional as F
from torch.optim import LBFGS, Adam
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import DataLoaders, Learner

EPOCHS, LAST, POINTS, BATCH = 3, 10, 60, 12


def points(batch):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(POINTS, 1, dtype=torch.float64, generator=generator)
    return DataLoader(TensorDataset(x), batch, shuffle=True, generator=generator)


def solution():
    x = torch.linspace(0, 1, 25, dtype=torch.float64)[:, None]
    return DataLoader(TensorDataset(x, (math.pi * x).sin()), 10)


class Solver(nn.Module):
    """Returns u, or in training how far it is from the equation, and from 0 at the ends."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.u = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).double()
        self.register_buffer("ends", torch.tensor([[0.0], [1.0]], dtype=torch.float64))

    def forward(self, x):
        if not self.training:
            return self.u(x)
        x = x.detach().requires_grad_()
        (slope,) = grad(self.u(x).sum(), x, create_graph=True)
        (bend,) = grad(slope.sum(), x, create_graph=True)
        return bend + math.pi**2 * (math.pi * x).sin(), self.u(self.ends)


# The loop


def validate(model):
    model.eval()
    total = 0.0
    with torch.no_grad():
        for x, u in solution():
            total += F.mse_loss(model(x), u, reduction="sum").item()
    return total / len(solution().dataset)


def physics_loss(model, x):
    residual, ends = model(x)
    return residual.square().mean() + ends.square().mean()


def loop():
    model = Solver()
    opt = Adam(model.parameters(), lr=1e-2)
    train = points(BATCH)
    losses = []
    for epoch in range(EPOCHS):
        model.train()
        for (x,) in train:
            loss = physics_loss(model, x)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {losses[-1]:.4f}, error {validate(model):.2e}")

    opt = LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    for epoch in range(LAST):
        model.train()
        for (x,) in points(POINTS):

            def closure(x=x):
                opt.zero_grad()
                loss = physics_loss(model, x)
                loss.backward()
                return loss

            losses.append(opt.step(closure).item())
        print(f"epoch {epoch} of L-BFGS: loss {losses[-1]:.4f}, error {validate(model):.2e}")
    return model, losses


# The Learner


def physics_or_error(pred, u=None):
    if u is not None:
        return F.mse_loss(pred, u)
    residual, ends = pred
    return residual.square().mean() + ends.square().mean()


def learner(*cbs):
    dls = DataLoaders(points(BATCH), solution(), device="cpu")
    return Learner(dls, Solver(), physics_or_error, opt_func=Adam, cbs=cbs)


def fit(learn):
    learn.fit(EPOCHS, 1e-2)
    learn.dls = DataLoaders(points(POINTS), solution(), device="cpu")
    learn.opt_func = partial(LBFGS, max_iter=5, line_search_fn="strong_wolfe")
    learn.fit(LAST, 1.0, reset_opt=True)
