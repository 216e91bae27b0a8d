"""Fits whose gradients are known exactly, for the tests of GradientNoiseScale."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import Callback, DataLoaders, Learner, distributed, set_seed
from learnerkit.scaling.noise import Measured

WEIGHTS = torch.tensor([0.5, 1.0, 3.0])
LOSSES = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "ignored": {"ignore_index": 1},
    "weighted": {"weight": WEIGHTS.double()},
}


def make_data(n=256, kind=torch.float64):
    """Inputs and noisy classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 5, generator=generator, dtype=kind)
    scores = x[:, :3] + torch.randn(n, 3, generator=generator, dtype=kind)
    return TensorDataset(x, scores.argmax(1))


def make_model(kind=torch.float64, dropout=0.0, norm=False):
    torch.manual_seed(1)
    layers = [nn.Linear(5, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)]
    with torch.no_grad():
        layers[-1].bias += torch.tensor([1.5, -1.0, 0.0])  # so that the mean gradient stands out of the noise
    return nn.Sequential(*layers).to(kind)


def make_learner(cbs=(), loss="mean", data=None, model=None, cls=Learner, seed=0, **loader):
    """A learner whose weights stay as they are in a fit with the rate 0."""
    set_seed(seed)
    data = make_data() if data is None else data
    model = make_model(data.tensors[0].dtype) if model is None else model
    kwargs = LOSSES[loss]
    if "weight" in kwargs:
        kwargs = {"weight": kwargs["weight"].to(data.tensors[0].dtype)}
    dls = DataLoaders(DataLoader(data, **loader), device="cpu")
    return cls(dls, model, nn.CrossEntropyLoss(**kwargs), opt_func=torch.optim.SGD, lr=0.0, cbs=[*cbs])


class Mixed:
    """Batches of several sizes, drawn with replacement."""

    def __init__(self, n, sizes, batches):
        self.n, self.sizes, self.batches = n, sizes, batches

    def __len__(self):
        return self.batches

    def __iter__(self):
        for i in range(self.batches):
            yield torch.randint(self.n, (self.sizes[i % len(self.sizes)],)).tolist()


def per_sample(model, loss, x, y):
    """The gradient (n, parameters) of each sample's summed loss, and what each counts (n,)."""
    options = {name: value for name, value in LOSSES[loss].items() if name != "reduction"}
    if "weight" in options:
        options["weight"] = options["weight"].to(x.dtype)

    def one(params, x, y):
        return F.cross_entropy(functional_call(model, params, (x[None],)), y[None], reduction="sum", **options)

    params = {name: p.detach() for name, p in model.named_parameters()}
    grads = vmap(grad(one), (None, 0, 0))(params, x, y)
    counts = WEIGHTS.to(x.dtype)[y] if loss == "weighted" else (y != 1 if loss == "ignored" else y >= 0).to(x.dtype)
    return torch.cat([g.flatten(1) for g in grads.values()], 1), counts


def exact(model, loss, data):
    """The simple noise scale of samples that are drawn from `data` with replacement."""
    sums, counts = per_sample(model, loss, *data.tensors)
    mean, each = sums.sum(0) / counts.sum(), counts.mean()
    noise = (sums - mean * counts[:, None]).square().sum(1).mean() / each**2
    return (noise / mean.square().sum()).item()


class Batches(Callback):
    """Notes the batches of each step on this rank."""

    order = 20
    run_valid = False

    def __init__(self):
        super().__init__()
        self.steps, self.open = [], False

    def after_pred(self):
        if not self.open:
            self.steps.append([])
        if self.batch_size:
            self.steps[-1].append((self.xb[0].clone(), self.yb[0].clone()))
        self.open = not self.learn.step_due


def recomputed(model, loss, batches):
    """(spread, parts, count, samples, squared norm) of each step, from the batches of all ranks."""
    found = []
    for ranks in zip(*distributed.all_gather(batches.steps), strict=True):
        parts = [batch for rank in ranks for batch in rank]
        sums, counts = zip(*((s.sum(0), c.sum()) for s, c in (per_sample(model, loss, *p) for p in parts)), strict=True)
        count, mean = sum(counts), sum(sums) / sum(counts)
        spread = sum(c * (s / c - mean).square().sum() for s, c in zip(sums, counts, strict=True) if c)
        samples = sum(len(x) for x, _ in parts)
        found.append([spread.item(), sum(c > 0 for c in counts), count.item(), samples, mean.square().sum().item()])
    return torch.tensor([[float(x) for x in row] for row in found if row[1] > 1], dtype=torch.float64)


def rows_of(scale):
    """What a GradientNoiseScale has measured, a row for each step."""
    return [Measured(*row) for row in scale.state_dict()["rows"]]


def shown(scale):
    """The same of what a GradientNoiseScale has measured."""
    rows = [[row.spread, row.parts, row.counted, row.samples, row.whole] for row in rows_of(scale)]
    return torch.tensor(rows, dtype=torch.float64)
