"""Trains where the address space of the process is limited, so that torch's allocator has no memory for a batch.

For each place in which it runs out a line says how: the number of failed allocations, the numbers of parts of training
and of evaluation, and how far weights and table are from those of a run without a limit.
"""

import resource
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import DataLoaders, Learner, SplitBatch, accuracy, set_seed

MB = 2**20
ROOM = 300 * MB
ROWS = 64


class Scratch(torch.autograd.Function):
    """Takes 8 MB for each sample for a moment, in the forward or in the backward pass."""

    failures = 0

    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        if where == "forward":
            Scratch.take(len(x))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if ctx.where == "backward":
            Scratch.take(len(grad))
        return grad, None

    @staticmethod
    def take(rows):
        try:
            torch.empty(rows * 8 * MB, dtype=torch.uint8)
        except RuntimeError:
            Scratch.failures += 1
            raise


class Net(nn.Module):
    """A network whose activations take 8 MB a sample, or with something that takes as much in another place."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        self.first, self.norm, self.last = nn.Linear(64, 256), nn.GroupNorm(8, 256), nn.Linear(256, 10)

    def forward(self, x):
        x = self.norm(self.first(x))
        if self.where == "activations" and self.training:
            wide = x.unsqueeze(-1).expand(-1, -1, 512)
            for _ in range(8):
                wide = nn.functional.gelu(wide)
            x = x + wide.mean(-1)
        if (self.where == "evaluation") != self.training:
            x = Scratch.apply(x, {"evaluation": "forward"}.get(self.where, self.where))
        return self.last(nn.functional.gelu(x))


def fitted(where, cbs=()):
    """A learner after a fit."""
    set_seed(1)
    n = 2 * ROWS + ROWS // 2
    x, y = torch.randn(n, 64, dtype=torch.float64), torch.randint(0, 10, (n,))
    data = TensorDataset(x, y)
    dls = DataLoaders(DataLoader(data, ROWS, shuffle=True), DataLoader(data, ROWS), device="cpu")
    learn = Learner(dls, Net(where).double(), nn.CrossEntropyLoss(), lr=1e-2, metrics=accuracy, cbs=list(cbs))
    with learn.no_bar():
        learn.fit(2)
    return learn


@contextmanager
def limited():
    """In here the process gets a certain size more and no further byte."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def numbers(learn):
    """All weights, and the numbers of the table."""
    rows = [[float(value) for value in row] for row in learn.recorder.values]
    return torch.cat([*(p.detach().flatten() for p in learn.model.parameters()), torch.tensor(rows).double().flatten()])


def main():
    for where in ("activations", "forward", "backward", "evaluation"):
        whole = fitted(where)
        Scratch.failures = 0
        with limited():
            split = fitted(where, [SplitBatch()])
            parts, failures = split.split_batch.state_dict()["own"], Scratch.failures
            far = (numbers(whole) - numbers(split)).abs().max().item()
            try:
                fitted(where)
                error = None
            except RuntimeError as e:
                error = e
        told = "without SplitBatch nothing failed" if error is None else str(error.__notes__[-1])
        print(
            f"{where}: {failures} failures, parts {parts['train'][0]} and {parts['evaluation'][0]}, {far:.0e} | {told}"
        )


if __name__ == "__main__":
    main()
