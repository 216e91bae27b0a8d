"""A Wasserstein GAN with gradient penalty (Gulrajani et al. arXiv:1704.00028).

The critic takes a step with each batch, the generator with every third. The noise, and the numbers that mix true and
made samples for the penalty, come with the data.
"""

import torch
from torch import nn
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import DataLoaders, Learner
from learnerkit.callbacks.schedule import SchedLin

EPOCHS, BATCH, RATIO, PENALTY, RATE = 4, 12, 3, 10.0, 5e-3


def batches():
    generator = torch.Generator().manual_seed(1)
    angle, share = torch.rand(2, 120, 1, dtype=torch.float64, generator=generator)
    noise = torch.randn(120, 3, dtype=torch.float64, generator=generator)
    ring = torch.cat([angle.mul(6.28).cos(), angle.mul(6.28).sin()], 1)
    return DataLoader(TensorDataset(ring, noise, share), BATCH, shuffle=True, generator=generator)


class WGAN(nn.Module):
    """Generator and critic; returns the critic's loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.generator = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2)).double()
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)).double()

    def forward(self, real, noise, share):
        made = self.generator(noise).detach()
        mixed = torch.lerp(made, real, share).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        penalty = PENALTY * (slope.norm(dim=1) - 1).square().mean()
        return self.critic(made).mean() - self.critic(real).mean() + penalty


# The loop


def loop():
    model = WGAN()
    train = batches()
    critic_opt = Adam(model.critic.parameters(), lr=RATE, betas=(0.0, 0.9))
    generator_opt = Adam(model.generator.parameters(), lr=RATE, betas=(0.0, 0.9))
    losses, steps = [], EPOCHS * len(train)
    for epoch in range(EPOCHS):
        model.train()
        for i, (real, noise, share) in enumerate(train):
            for group in critic_opt.param_groups + generator_opt.param_groups:
                group["lr"] = RATE * (1 - len(losses) / steps)
            loss = model(real, noise, share)
            critic_opt.zero_grad()
            loss.backward()
            critic_opt.step()
            if i % RATIO == RATIO - 1:
                generator_loss = -model.critic(model.generator(noise)).mean()
                generator_opt.zero_grad()
                generator_loss.backward()
                generator_opt.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: critic {sum(losses[-len(train) :]) / len(train):.4f}")
    return model, losses


# The Learner


class WGANLearner(Learner):
    def create_opt(self):
        return {name: Adam(part.parameters(), betas=(0.0, 0.9)) for name, part in self.model.named_children()}

    def _step(self):
        self.opt["critic"].step()
        if self.iter % RATIO == RATIO - 1:
            _, noise, _ = self.xb
            (-self.model.critic(self.model.generator(noise)).mean()).backward()
            self.opt["generator"].step()


def learner(*cbs):
    dls = DataLoaders(batches(), device="cpu", n_inp=3)
    return WGANLearner(dls, WGAN(), loss_weight="samples", cbs=cbs)


def fit(learn):
    learn.fit(EPOCHS, SchedLin(RATE, 0.0))
