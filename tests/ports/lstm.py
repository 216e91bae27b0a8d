"""A recurrent language model, after Zaremba, Sutskever and Vinyals (arXiv:1409.2329), in its form without dropout.

It is trained by truncated backpropagation through time (Williams and Peng 1990, doi:10.1162/neco.1990.2.4.490): a text
is read in pieces, and the state of the network goes on from piece to piece, while the gradient ends. Batches are
time-major, as torch's recurrent networks take them.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from learnerkit import CarriedState, DataLoaders, GradientClip, Learner, TorchScheduler, perplexity
from learnerkit.datasets import chat_lines

EPOCHS, ROWS, STEPS, WIDTH, LAYERS, RATE, NORM = 4, 8, 10, 12, 2, 2.0, 0.3


def pieces(content):
    """Batches (steps, rows) of letters and of those that follow; a row goes on where it ended in the batch before."""
    length = (len(content) - 1) // ROWS // STEPS * STEPS
    x, y = (content[i : i + ROWS * length].view(ROWS, length).T for i in (0, 1))
    return list(zip(x.split(STEPS), y.split(STEPS), strict=True))


def loaders():
    """The batches of the text to train on, and of that to validate on."""
    lines, languages = chat_lines()
    english = "\n".join(line for line, language in zip(lines, languages, strict=True) if language == "en")[:1_150]
    content = torch.tensor([ord(letter) % 128 for letter in english])
    return [DataLoader(pieces(part), batch_size=None) for part in content.split(800)]


class Letters(nn.Module):
    """Scores of shape (steps, letters, rows), and the state behind the last step."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(128, WIDTH), nn.Linear(WIDTH, 128)
        self.lstm = nn.LSTM(WIDTH, WIDTH, LAYERS)

    def forward(self, x, state):
        found, state = self.lstm(self.embed(x), state)
        return self.head(found).transpose(1, 2), state


def start(n):
    """The state of rows that begin."""
    return torch.zeros(LAYERS, n, WIDTH, dtype=torch.float64), torch.zeros(LAYERS, n, WIDTH, dtype=torch.float64)


def network():
    torch.manual_seed(2)
    return Letters().double()


def share(epoch):
    """The part of the rate that is left in an epoch."""
    return 1.5 ** -max(0, epoch - 1)


# The loop


@torch.no_grad()
def validate(model, batches):
    model.eval()
    state, total, count = start(ROWS), 0.0, 0
    for x, y in batches:
        pred, state = model(x, state)
        total += F.cross_entropy(pred, y, reduction="sum").item()
        count += y.numel()
    return total / count


def loop():
    model = network()
    train, valid = loaders()
    opt = SGD(model.parameters(), lr=RATE)
    scheduler = LambdaLR(opt, share)
    losses = []
    for epoch in range(EPOCHS):
        model.train()
        state = start(ROWS)
        for x, y in train:
            state = tuple(part.detach() for part in state)
            pred, state = model(x, state)
            loss = F.cross_entropy(pred, y)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), NORM)
            opt.step()
            losses.append(loss.item())
        scheduler.step()
        mean = sum(losses[-len(train) :]) / len(train)
        found = torch.tensor(validate(model, valid))
        print(f"epoch {epoch}: train {mean:.4f}, valid {found:.4f}, perplexity {found.exp():.2f}")
    return model, losses


# The Learner


class Hidden(CarriedState):
    def start(self, n):
        return start(n)


def learner(*cbs):
    dls = DataLoaders(*loaders(), batch_dim=1, device="cpu")
    cbs = [*cbs, Hidden(dim=1), GradientClip(NORM), TorchScheduler(lambda opt: LambdaLR(opt, share), step="epoch")]
    return Learner(dls, network(), nn.CrossEntropyLoss(), opt_func=SGD, lr=RATE, metrics=perplexity, cbs=cbs)


def fit(learn):
    learn.fit(EPOCHS)
