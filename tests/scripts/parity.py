"""Trains, validates and predicts in many ways and saves what came out: the same script on any number of processes."""

import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from learnerkit import (
    AccumMetric,
    Callback,
    DataLoaders,
    Learner,
    Metric,
    accuracy,
    mae,
    perplexity,
    rmse,
    set_seed,
    world,
)

CLASSES = 3


def make_data(n: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x[:, :CLASSES] + 0.3).argmax(1))


def make_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(5, 7), nn.Tanh(), *([nn.Dropout(dropout)] if dropout else []), nn.Linear(7, CLASSES)]
    return nn.Sequential(*layers).double()


class Mapped(Dataset):
    """A map-style dataset that is no TensorDataset, with mapping batches."""

    def __init__(self, data: TensorDataset):
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> dict:
        x, y = self.data[i]
        return {"x": x, "labels": y}


class OwnLoss(nn.Module):
    """A model that returns its own loss, as transformers do."""

    def __init__(self):
        super().__init__()
        self.body = make_model()

    def forward(self, x, labels=None):
        logits = self.body(x)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return {"logits": logits, "loss": loss}


class Seen(Callback):
    """Which samples this rank trained on, step by step."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def before_batch(self):
        if self.training:
            x = self.xb[0]["x"] if isinstance(self.xb[0], dict) else self.xb[0]
            self.steps.append(x[:, 0].tolist())


class MaxScore(Metric):
    """States of every kind."""

    def __init__(self):
        super().__init__("max_score")
        self.add_state("best", float("-inf"), "max")
        self.add_state("least", float("inf"), "min")
        self.add_state("kept", [], "cat")
        self.add_state("count", 0, "sum")

    def update(self, pred, target):
        self.best = torch.maximum(self.best.to(pred.dtype), pred.max())
        self.least = torch.minimum(self.least.to(pred.dtype), pred.min())
        self.kept.append(pred[:, 0])
        self.count = self.count + len(pred)

    def compute(self):
        kept = torch.cat(self.kept)
        place = torch.arange(1, len(kept) + 1, dtype=kept.dtype)  # depends on the order
        return self.best + self.least + (kept * place).sum() / self.count


class Plain:
    """An object that can neither be merged nor synchronised."""

    def reset(self):
        self.preds = []

    def update(self, pred, target):
        self.preds.append(pred)

    def compute(self):
        return torch.cat(self.preds).median()


def spread(pred, target):
    return (pred.max(1).values.sort().values.diff() ** 2).sum()


METRICS = {
    "accuracy": accuracy,
    "top": lambda pred, target: pred.max(1).values.mean(),
    "rmse": AccumMetric(lambda pred, target: ((pred.argmax(1) - target).double() ** 2).mean().sqrt()),
    "spread": AccumMetric(spread),
    "max_score": MaxScore(),
    "perplexity": perplexity,
    "plain": Plain(),
}


def all_metrics() -> dict:
    """Also those of the two metric libraries, whose objects bring their own ways to combine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it scripts its functions, which torch advises against
        import torcheval.metrics
    import torchmetrics.classification

    return METRICS | {
        "torchmetrics": torchmetrics.classification.MulticlassF1Score(CLASSES),
        "torcheval": torcheval.metrics.MulticlassAccuracy(),
    }


def train(name: str, learn: Learner, epochs: int, fit: str = "fit", **distributed) -> dict:
    """Train and report; every rank reports its own."""
    seen = Seen()
    with learn.distrib_ctx(split_batches=True, sync_bn=False, **distributed):
        getattr(learn, fit)(epochs, 0.05, cbs=seen)
        preds, targets = learn.get_preds()
        valid = learn.validate()
    recorder = learn.recorder
    return {
        "weights": {k: v.clone() for k, v in learn.model.state_dict().items()},
        "values": recorder.values,
        "losses": recorder.losses,
        "lrs": recorder.lrs,
        "iters": recorder.iters,
        "steps": seen.steps,
        "preds": preds,
        "targets": targets,
        "valid": valid,
    }


def sgd(groups, lr):
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


def jobs() -> dict:
    data, valid = make_data(103), make_data(17, seed=2)
    tiny = make_data(5, seed=3)

    def learner(loss=None, dls=None, model=None, **kwargs):
        dls = dls or DataLoaders.from_datasets(data, valid, bs=16, valid_bs=4)
        return Learner(dls, model or make_model(), loss or nn.CrossEntropyLoss(), opt_func=sgd, **kwargs)

    def loaders(**kwargs):
        return DataLoaders(DataLoader(data, **kwargs), DataLoader(valid, batch_size=4))

    weights = torch.linspace(0.1, 2, 103).double()
    custom = BatchSampler(SubsetRandomSampler(range(0, 103, 2)), 7, False)
    regression = TensorDataset(data.tensors[0], data.tensors[0][:, :CLASSES] * 2)
    keyed = DataLoaders(
        DataLoader(Mapped(data), batch_size=16, shuffle=True),
        DataLoader(Mapped(valid), batch_size=4),
        target_keys="labels",
    )
    return {
        "plain": lambda: train("plain", learner(metrics=all_metrics()), 3),
        "one_cycle": lambda: train("one_cycle", learner(), 2, "fit_one_cycle"),
        "shuffled": lambda: train("shuffled", learner(dls=loaders(batch_size=16, shuffle=True)), 2),
        "generator": lambda: train(
            "generator",
            learner(dls=loaders(batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(7))),
            2,
        ),
        "weighted": lambda: train(
            "weighted", learner(dls=loaders(batch_size=10, sampler=WeightedRandomSampler(weights, 45))), 2
        ),
        "batch_sampler": lambda: train("batch_sampler", learner(dls=loaders(batch_sampler=custom)), 2),
        "drop_last": lambda: train("drop_last", learner(dls=loaders(batch_size=16, drop_last=True)), 2),
        "workers": lambda: train("workers", learner(dls=loaders(batch_size=16, shuffle=True, num_workers=1)), 1),
        "sum": lambda: train("sum", learner(nn.CrossEntropyLoss(reduction="sum"), lr=0.001), 1),
        "class_weights": lambda: train(
            "class_weights", learner(nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]).double())), 2
        ),
        "ignore": lambda: train("ignore", learner(nn.CrossEntropyLoss(ignore_index=1)), 2),
        "loss_weight": lambda: train(
            "loss_weight",
            learner(
                lambda pred, y: F.cross_entropy(pred, y, reduction="none")[y > 0].mean(),
                loss_weight=lambda y: (y > 0).sum(),
            ),
            2,
        ),
        "regression": lambda: train(
            "regression",
            learner(nn.MSELoss(), DataLoaders.from_datasets(regression, regression, bs=16), metrics=[mae, rmse]),
            2,
        ),
        "mapping": lambda: train("mapping", Learner(keyed, OwnLoss(), None, opt_func=sgd, metrics=accuracy), 2),
        "tiny": lambda: train(
            "tiny", learner(dls=DataLoaders.from_datasets(tiny, make_data(1, seed=4), bs=2), metrics=METRICS), 2
        ),
        "dropout_order": lambda: train("dropout_order", learner(model=make_model(0.5)), 2),
    }


if __name__ == "__main__":
    warnings.simplefilter("error")
    out, names = Path(sys.argv[1]), sys.argv[2:]
    found = {}
    for name, job in jobs().items():
        if not names or name in names:
            set_seed(42)
            found[name] = job()
    torch.save(found, out / f"{world.world_size()}-{world.rank()}.pt")
