"""Denoising diffusion: a network learns the noise that was added to points (Ho, Jain and Abbeel, arXiv:2006.11239).

Each point comes with a time and its noise; the model adds this noise and returns its loss. A step takes two batches.
A moving average of the weights is validated after each epoch, and the best one is kept.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import EMA, DataLoaders, GradientAccumulation, GradientClip, Learner, SaveModelCallback, linear_warmup

EPOCHS, BATCH, TIMES, DECAY, RATE = 4, 12, 50, 0.8, 6e-2


def batches():
    generator = torch.Generator().manual_seed(1)

    def dataset(n):
        x = torch.randn(n, 2, dtype=torch.float64, generator=generator).sign() * torch.tensor([2.0, 0.5])
        times = torch.randint(TIMES, (n,), generator=generator)
        return TensorDataset(x, times, torch.randn(n, 2, dtype=torch.float64, generator=generator))

    return DataLoader(dataset(120), BATCH, shuffle=True, generator=generator), DataLoader(dataset(50), 20)


class Diffusion(nn.Module):
    """Adds noise as of a time, guesses it, and returns the mean squared error."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.time = nn.Embedding(TIMES, 8)
        self.body = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 2))
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-3, 0.2, TIMES), 0))
        self.double()

    def forward(self, x, times, noise):
        kept = self.kept[times][:, None]
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        return F.mse_loss(self.body(torch.cat([noisy, self.time(times)], 1)), noise)


# The loop


def loop():
    model = Diffusion()
    average = copy.deepcopy(model).requires_grad_(False)
    train, valid = batches()
    opt = torch.optim.Adam(model.parameters(), lr=RATE)
    steps = EPOCHS * len(train) // 2
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, step / (0.25 * steps)))
    losses, best = [], float("inf")
    for epoch in range(EPOCHS):
        model.train()
        for i, (x, times, noise) in enumerate(train):
            loss = model(x, times, noise)
            (loss / 2).backward()
            losses.append(loss.item())
            if i % 2 == 1:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
                scheduler.step()
                with torch.no_grad():
                    for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                        mean.mul_(DECAY).add_(p, alpha=1 - DECAY)
        average.eval()
        total = 0.0
        with torch.no_grad():
            for x, times, noise in valid:
                total += average(x, times, noise).item() * len(x)
        valid_loss = total / len(valid.dataset)
        print(f"epoch {epoch}: loss {sum(losses[-len(train) :]) / len(train):.4f}, valid {valid_loss:.4f}")
        if valid_loss < best:
            best, best_weights = valid_loss, copy.deepcopy(average.state_dict())
    average.load_state_dict(best_weights)
    return average, losses


# The Learner


def learner(*cbs):
    cbs = [*cbs, EMA(DECAY, warmup=False), SaveModelCallback(), GradientAccumulation(n_batches=2), GradientClip(1.0)]
    dls = DataLoaders(*batches(), device="cpu", n_inp=3)
    return Learner(dls, Diffusion(), opt_func=torch.optim.Adam, loss_weight="samples", cbs=cbs)


def fit(learn):
    learn.fit(EPOCHS, linear_warmup(0.25, RATE))
