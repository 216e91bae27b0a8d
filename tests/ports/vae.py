"""A variational autoencoder, after Kingma and Welling, "Auto-Encoding Variational Bayes" (arXiv:1312.6114).

The loss needs the inputs. The noise comes with the data: each image has its own.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import DataLoaders, Learner

EPOCHS, BATCH, SIDE, HIDDEN, LATENT, RATE = 4, 16, 6, 16, 3, 1e-2


def dataset(n, seed):
    """Images with a bright rectangle, and noise."""
    generator = torch.Generator().manual_seed(seed)
    low, high = torch.randint(SIDE, (2, n, 2, 1), generator=generator).sort(0).values
    rows, columns = ((low <= torch.arange(SIDE)) & (torch.arange(SIDE) <= high)).unbind(1)
    images = (rows[:, :, None] & columns[:, None, :]).flatten(1).double()
    return TensorDataset(images, torch.randn(n, LATENT, dtype=torch.float64, generator=generator))


def loaders():
    order = torch.Generator().manual_seed(3)
    return DataLoader(dataset(150, 1), BATCH, shuffle=True, generator=order), DataLoader(dataset(50, 2), BATCH)


class VAE(nn.Module):
    """Returns an image as logits, and the mean and the logarithm of the variance of its code."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(SIDE**2, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, SIDE**2))

    def forward(self, x, noise):
        mean, log_var = self.encoder(x).chunk(2, dim=1)
        return self.decoder(mean + (log_var / 2).exp() * noise), mean, log_var


def network():
    torch.manual_seed(4)
    return VAE().double()


def likelihood(image, x):
    """The negative logarithm of the likelihood, in nats, of each sample."""
    return F.binary_cross_entropy_with_logits(image, x, reduction="none").sum(1)


def divergence(mean, log_var):
    """The divergence of the code's distribution from the normal one, in nats, of each sample."""
    return 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1)


# The loop


def loop():
    model = network()
    train, valid = loaders()
    opt = Adam(model.parameters(), lr=RATE)
    losses = []
    for epoch in range(EPOCHS):
        model.train()
        for x, noise in train:
            image, mean, log_var = model(x, noise)
            loss = (likelihood(image, x) + divergence(mean, log_var)).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        model.eval()
        total, of_codes = 0.0, 0.0
        with torch.no_grad():
            for x, noise in valid:
                image, mean, log_var = model(x, noise)
                found = divergence(mean, log_var)
                total += (likelihood(image, x) + found).sum().item()
                of_codes += found.sum().item()
        n = len(valid.dataset)
        print(f"epoch {epoch}: train {losses[-1]:.4f}, valid {total / n:.4f}, divergence {of_codes / n:.4f}")
    return model, losses


# The Learner


def loss(pred, *, x):
    image, mean, log_var = pred
    return (likelihood(image, x[0]) + divergence(mean, log_var)).mean()


def kl(pred):
    return divergence(*pred[1:]).mean()


def learner(*cbs):
    dls = DataLoaders(*loaders(), n_inp=2, device="cpu")
    return Learner(dls, network(), loss, opt_func=Adam, lr=RATE, metrics=kl, cbs=cbs)


def fit(learn):
    learn.fit(EPOCHS)
