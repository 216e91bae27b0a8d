"""Metrics of users that derive from torchmetrics; tests import them where they need them, as that takes seconds."""

import torch
from torchmetrics import Metric


class Sums(Metric):
    """One state of each kind."""

    def __init__(self):
        super().__init__()
        for kind in ("sum", "max", "min", "mean", None):
            self.add_state(f"{kind}_of", torch.tensor(0.0), kind)
        self.add_state("joined", [], "cat")
        self.add_state("listed", [], None)
        self.add_state("own", [], lambda x: x)

    def update(self, x):
        self.sum_of += x

    def compute(self):
        return self.sum_of


class Listing(Metric):
    """With lists that ranks do not reduce."""

    def __init__(self):
        super().__init__()
        self.add_state("seen", [], dist_reduce_fx=None)
        self.add_state("n", torch.tensor(5), "sum")  # which does not begin at 0

    def update(self, pred, target):
        for p, t in zip(pred, target, strict=True):
            self.seen.append(p - t)
        self.n += len(pred)

    def compute(self):
        order = torch.arange(1, 1 + len(self.seen))
        return (torch.stack(self.seen) * order).sum() + self.n


class Careless(Metric):
    """Keeps something that it does not declare, and a mean whose reduction is its own."""

    def __init__(self):
        super().__init__()
        self.add_state("mean", torch.tensor(0.0, dtype=torch.float64), lambda x: x.mean(0))
        self.n, self.parts = 0, {"last": [0.0]}

    def reset(self):
        super().reset()
        self.n = 0

    def update(self, pred, target):
        self.mean = (self.mean * self.n + (pred - target).sum()) / (self.n + len(pred))
        self.n += len(pred)
        self.parts["last"][0] = float(pred[-1])

    def compute(self):
        return self.mean + self.n + self.parts["last"][0]


class Mean(Metric):
    """Says that the mean of the ranks' means is that of all samples."""

    def __init__(self):
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), "mean")

    def update(self, pred, target):
        self.mean = pred.mean().float()

    def compute(self):
        return self.mean


class Window(Metric):
    """Keeps the last items of a list that ranks join."""

    def __init__(self):
        super().__init__()
        self.add_state("last", [], "cat")

    def update(self, pred, target):
        self.last.append(pred)
        self.last = self.last[-1:] if len(self.last) > 2 else self.last

    def compute(self):
        return torch.cat(self.last).mean()


class Kept(Metric):
    def __init__(self):
        super().__init__()
        self.add_state("preds", [], "cat")

    def update(self, pred, target):
        self.preds.append(pred.double().sum(1))

    def compute(self):
        order = torch.arange(1, 1 + sum(map(len, self.preds)))
        return (torch.cat(self.preds) * order).sum()
