"""An LSTM whose state is carried from batch to batch, and batches for it."""

import torch
from torch import nn

from learnerkit import CarriedState, DataLoaders, Learner

ROWS, SIZE = 6, 5


class Net(nn.Module):
    """An LSTM that returns (predictions, state)."""

    def __init__(self, batch_first=False):
        super().__init__()
        self.lstm = nn.LSTM(2, SIZE, num_layers=2, batch_first=batch_first)
        self.head = nn.Linear(SIZE, 1)

    def forward(self, x, state):
        found, state = self.lstm(x, state)
        return self.head(found), state


class Hidden(CarriedState):
    def start(self, n):
        return tuple(torch.zeros(2, n, SIZE, dtype=torch.float64) for _ in range(2))


def batches(n, rows=ROWS, seed=0, time_first=True):
    generator = torch.Generator().manual_seed(seed)
    shape = (4, rows) if time_first else (rows, 4)
    draw = lambda last: torch.randn(*shape, last, generator=generator, dtype=torch.float64)  # noqa: E731
    return [(draw(2), draw(1)) for _ in range(n)]


def learner(train=None, valid=None, cbs=None, time_first=True, **kwargs):
    torch.manual_seed(1)
    train = batches(5, time_first=time_first) if train is None else train
    dls = DataLoaders(train, valid, device="cpu", batch_dim=int(time_first), **kwargs)
    model = Net(not time_first).double()
    cbs = [Hidden(dim=1)] if cbs is None else cbs
    return Learner(dls, model, nn.MSELoss(), opt_func=torch.optim.SGD, lr=0.1, cbs=cbs)
