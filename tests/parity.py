"""Jobs that train, validate and predict in many ways, for test_parity.py: the same ones on any number of ranks."""

import warnings
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from learnerkit import (
    AccumMetric,
    Callback,
    CancelTrainException,
    DataLoaders,
    GradientAccumulation,
    Learner,
    Metric,
    accuracy,
    distributed,
    mae,
    perplexity,
    rmse,
    set_seed,
)

CLASSES = 3
SHARDING: dict[str, bool] = {}
"""Options of the context with which the jobs train on shards."""


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


class OwnTokens(nn.Module):
    """Makes its own loss over the tokens that are not padding, whose count it takes."""

    def __init__(self):
        super().__init__()
        self.body = make_model()

    def forward(self, x, labels=None, num_items_in_batch=None):
        logits = self.body(x)
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"logits": logits, "loss": total / num_items_in_batch}


class OwnShifted(OwnTokens):
    """The same, but each token predicts the next one, -1 is padding, and the count is for `loss_weight` to say."""

    def forward(self, x, labels=None):
        logits = self.body(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-1)
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
        # It scripts its functions, of which torch 2.10 warns by a DeprecationWarning, torch 2.15 by a FutureWarning.
        warnings.filterwarnings("ignore", message="`torch.jit.script` is")
        import torcheval.metrics
    import torchmetrics.classification

    return METRICS | {
        "torchmetrics": torchmetrics.classification.MulticlassF1Score(CLASSES),
        "torcheval": torcheval.metrics.MulticlassAccuracy(),
    }


def train(learn: Learner, epochs: int, fit: str = "fit") -> dict:
    """Train and report; every rank reports its own."""
    seen = Seen()
    with learn.distrib_ctx(split_batches=True, sync_bn=False, **SHARDING):
        getattr(learn, fit)(epochs, 0.05, cbs=seen)
        preds, targets = learn.get_preds()
        valid = learn.validate()
    recorder = learn.recorder
    return {
        "weights": weights(learn),
        "values": recorder.values,
        "losses": recorder.losses,
        "lrs": recorder.lrs,
        "iters": recorder.iters,
        "steps": seen.steps,
        "preds": preds,
        "targets": targets,
        "valid": valid,
    }


def weights(learn: Learner) -> dict:
    assert all(p.grad is None for p in learn.model.parameters())  # a fit leaves no gradients behind
    return {k: v.clone() for k, v in learn.model.state_dict().items()}


class NoLength:
    """Batches of consecutive samples, of nobody knows how many."""

    def __init__(self, n: int, size: int):
        self.n, self.size = n, size

    def __iter__(self):
        return (list(range(i, min(i + self.size, self.n))) for i in range(0, self.n, self.size))


def stop_after_three(cb) -> None:
    if cb.training and cb.epoch < 2 and cb.iter == 2:
        raise CancelTrainException


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

    sample_weights = torch.linspace(0.1, 2, 103).double()
    custom = BatchSampler(SubsetRandomSampler(range(0, 103, 2)), 7, False)
    regression = TensorDataset(data.tensors[0], data.tensors[0][:, :CLASSES] * 2)
    keyed = DataLoaders(
        DataLoader(Mapped(data), batch_size=16, shuffle=True),
        DataLoader(Mapped(valid), batch_size=4),
        target_keys="labels",
    )
    found = {
        "plain": lambda: train(learner(metrics=all_metrics()), 3),
        "one_cycle": lambda: train(learner(), 2, "fit_one_cycle"),
        "shuffled": lambda: train(learner(dls=loaders(batch_size=16, shuffle=True)), 2),
        "generator": lambda: train(
            learner(dls=loaders(batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(7))), 2
        ),
        "weighted": lambda: train(
            learner(dls=loaders(batch_size=10, sampler=WeightedRandomSampler(sample_weights, 45))), 2
        ),
        "batch_sampler": lambda: train(learner(dls=loaders(batch_sampler=custom)), 2),
        "drop_last": lambda: train(learner(dls=loaders(batch_size=16, drop_last=True)), 2),
        "workers": lambda: train(learner(dls=loaders(batch_size=16, shuffle=True, num_workers=1)), 1),
        "regression": lambda: train(
            learner(nn.MSELoss(), DataLoaders.from_datasets(regression, regression, bs=16), metrics=[mae, rmse]), 2
        ),
        "no_length": lambda: train(
            learner(dls=loaders(batch_sampler=NoLength(103, 16)), cbs=GradientAccumulation(n_batches=3)), 2
        ),
        "cut_short": lambda: train(
            learner(dls=loaders(batch_size=16, shuffle=True), cbs=Callback(after_batch=stop_after_three)), 3
        ),
        "mapping": lambda: train(Learner(keyed, OwnLoss(), None, opt_func=sgd, metrics=accuracy), 2),
        "tiny": lambda: train(
            learner(dls=DataLoaders.from_datasets(tiny, make_data(1, seed=4), bs=2), metrics=accuracy), 2
        ),
        "dropout_order": lambda: train(learner(model=make_model(0.5)), 2),
        "lengths": evaluate_lengths,
        "predictions": predict,
        "batch_norm": fit_batch_norm,
    }
    found |= {f"{loss}: {way}": partial(fit_in, way, loss) for loss in LOSSES for way in WAYS}
    return found | {f"GAN: {gan.__name__}": partial(fit_gan, gan) for gan in (Both, BothByInputs, OneByOne, InTurn)}


# The same optimizer steps, of twelve samples and at last of seven, made in several ways

LOSSES = {
    "mean": {"loss_func": nn.CrossEntropyLoss()},
    "sum": {"loss_func": nn.CrossEntropyLoss(reduction="sum")},
    "class weights": {"loss_func": nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]).double())},
    "ignore_index": {"loss_func": nn.CrossEntropyLoss(ignore_index=1)},
    "tokens": {"loss_func": lambda pred, y: F.cross_entropy(pred.mT, y), "loss_weight": lambda y: (y >= 0).sum()},
    "own tokens": {"model": OwnTokens},
    "own shifted": {"model": OwnShifted, "loss_weight": lambda y: (y[:, 1:] >= 0).sum()},
}

WAYS = {  # by the number of processes: (batch size, what the split and the accumulation are)
    "whole": lambda n: (12, True, None),
    "micro-batches": lambda n: (4, True, GradientAccumulation(n_batches=3)),
    "batches per rank": lambda n: ([4, 2, 2, 1][n - 1], False, GradientAccumulation(n_batches=[3, 3, 2, 3][n - 1])),
    "samples": lambda n: (4, True, GradientAccumulation(n_samples=9)),
}


class AtSteps(Callback):
    """What each optimizer step is made of: this rank's samples, the rate and the momentum."""

    order = 70  # after the schedule

    def before_fit(self):
        self.steps, self.samples = [], []

    def before_batch(self):
        if self.training and self.batch_size:
            x = self.xb[0]["x"] if isinstance(self.xb[0], dict) else self.xb[0]
            self.samples += x.flatten(1)[:, 0].tolist()

    def before_step(self):
        group = self.opt.param_groups[0]
        self.steps.append((self.samples, group["lr"], group["momentum"]))
        self.samples = []


def token_data(n: int, seed: int = 0) -> TensorDataset:
    """Sequences with padding; whole micro-batches, and a whole step, have nothing else."""
    x, y = make_data(n * 6, seed).tensors
    y = y.reshape(n, 6).masked_fill(torch.arange(6) >= torch.arange(n)[:, None] % 7, -100)
    y[24:28] = y[48:60] = -100
    return TensorDataset(x.reshape(n, 6, 5), y)


def fit_in(way: str, loss: str) -> dict:
    kwargs, tokens = dict(LOSSES[loss]), loss in ("tokens", "own tokens", "own shifted")
    make = token_data if tokens else make_data
    train, valid = make(103), make(17, seed=2)
    if loss == "own shifted":
        train, valid = (TensorDataset(x, y.clamp(min=-1)) for x, y in (train.tensors, valid.tensors))
    if "model" in kwargs:
        train, valid = Mapped(train), Mapped(valid)
    bs, split, accumulation = WAYS[way](distributed.world_size())
    dls = DataLoaders.from_datasets(train, valid, bs=bs, valid_bs=4, shuffle=not tokens)
    learn, seen = Learner(dls, kwargs.pop("model", make_model)(), opt_func=sgd, **kwargs), AtSteps()
    with learn.distrib_ctx(split_batches=split, **SHARDING):
        learn.fit_one_cycle(2, 0.004 if loss == "sum" else 0.05, cbs=[seen, accumulation] if accumulation else seen)
    return {"weights": weights(learn), "values": learn.recorder.values, "steps": seen.steps}


# Evaluation of any length


def evaluate_lengths() -> list:
    """Every kind of metric on few samples; on more, where ranks differ less, the kinds in turn."""
    data, metrics = make_data(40, seed=5), all_metrics()
    kinds = ["accuracy", "max_score", "spread", "torchmetrics", "torcheval"]
    found = []
    for n in range(1, 41):
        learn = Learner(DataLoaders.from_datasets(data), make_model(), nn.CrossEntropyLoss())
        learn.metrics = {kind: metrics[kind] for i, kind in enumerate(kinds) if n <= 6 or n % 5 == i}
        with learn.distrib_ctx(split_batches=n % 2 == 0, **SHARDING):
            found.append(learn.validate(dl=DataLoader(Subset(data, range(n)), batch_size=3)))
    return found


class Several(nn.Module):
    """Predictions as a nested structure, a part of which is longer or shorter from batch to batch."""

    def __init__(self):
        super().__init__()
        self.body = make_model()

    def forward(self, x):
        return {"scores": self.body(x), "more": (x[:, :1], x.sum(1)[:, None].expand(-1, 1 + int(x[0, 0] > 0)))}


def nested_loss(pred, y, reduction="mean"):
    return F.cross_entropy(pred["scores"], y, reduction=reduction)


def predict() -> list:
    found = []
    for n in (1, 2, 3, 11, 40):
        data = make_data(n, seed=6)
        dls = DataLoaders.from_datasets(data, data, bs=3, drop_last=True, shuffle=True)
        with Learner(dls, Several(), nested_loss).distrib_ctx(**SHARDING) as learn:
            found.append({on: learn.get_preds(ds_idx=0, with_input=True, with_loss=True, on=on) for on in ON})
    return found


ON = ("all", "rank0")


# BatchNorm with statistics per rank


def fit_batch_norm() -> list:
    """The sizes of the batches in training."""
    data, found = make_data(22), []
    for bs, split in ((5, True), (5, False), (3, False))[: None if distributed.world_size() > 1 else 2]:
        model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)).double()
        sizes = []
        look = Callback(before_backward=lambda cb, sizes=sizes: sizes.append(cb.batch_size))
        learn = Learner(DataLoaders.from_datasets(data, bs=bs), model, nn.CrossEntropyLoss(), opt_func=sgd, cbs=look)
        with learn.distrib_ctx(split_batches=split, sync_bn=False, **SHARDING):
            learn.fit(1)
        assert all(distributed.same_everywhere(w.tolist()) for w in weights(learn).values())
        found.append(sizes)
    return found


# Several networks with an optimizer each


class GAN(nn.Module):
    """Makes points of noise, and tells them from those of the data."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.g = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        self.d = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()

    def forward(self, noise):
        return self.g(noise)


def judged(score, real, reduction="mean"):
    return F.binary_cross_entropy_with_logits(score, torch.full_like(score, float(real)), reduction=reduction)


class Both(Learner):
    """Trains both networks in every step, each by a loss of its own."""

    def create_opt(self):
        return {name: self.opt_func(getattr(self.model, name).parameters(), lr=self.lr) for name in ("g", "d")}

    def _forward(self):
        self.pred = self.model.g(*self.xb)

    def _loss(self):
        self.loss_d = judged(self.model.d(self.y), True) + judged(self.model.d(self.pred.detach()), False)
        self.loss_g = judged(self.model.d(self.pred), True)
        self.loss_grad = self.loss_d + self.loss_g
        self.loss = self.loss_grad.detach()

    def _backward(self):
        self.loss_g.backward()
        self.opt["d"].zero_grad()  # what the generator's loss wants of the other network
        self.loss_d.backward()


class BothByInputs(Both):
    """The same, without the gradients that nobody wants."""

    def _backward(self):
        self.loss_d.backward()
        self.loss_g.backward(inputs=list(self.model.g.parameters()))


class OneByOne(Both):
    """The generator is judged by what the other network has just become."""

    def _loss(self):
        real, fake = self.model.d(self.y), self.model.d(self.pred.detach())
        self.loss_grad = judged(real, True) + judged(fake, False)
        self.loss = self.loss_grad.detach()

    def _backward(self):
        self.loss_grad.backward()
        self.opt["d"].step()
        for p in self.model.d.parameters():
            p.requires_grad_(False)
        judged(self.model.d(self.pred), True).backward()
        for p in self.model.d.parameters():
            p.requires_grad_(True)

    def _step(self):
        self.opt["g"].step()


class InTurn(Both):
    """Trains one network in a step and the other in the next; by sums, which no rank may weigh."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, loss_weight="sum", **kwargs)

    def _loss(self):
        self.turn = "dg"[self.train_iter % 2]
        if self.turn == "d":
            real, fake = self.model.d(self.y), self.model.d(self.pred.detach())
            self.loss_grad = judged(real, True, "sum") + judged(fake, False, "sum")
        else:
            self.loss_grad = judged(self.model.d(self.pred), True, "sum")
        self.loss = self.loss_grad.detach()

    def _backward(self):
        self.loss_grad.backward()

    def _step(self):
        self.opt[self.turn].step()


def fit_gan(gan: type[Learner]) -> dict:
    generator = torch.Generator().manual_seed(8)
    noise, real = (torch.randn(43, n, generator=generator, dtype=torch.float64) for n in (2, 3))
    data = TensorDataset(noise, real + 2)
    dls = DataLoaders.from_datasets(data, data, bs=6, valid_bs=4)  # at last a batch of one sample
    learn = gan(dls, GAN(), opt_func=sgd)
    with learn.distrib_ctx(split_batches=True, **SHARDING or {"wrap": ("g", "d")}):
        learn.fit_one_cycle(2, 0.02)
    return {"weights": weights(learn), "values": learn.recorder.values, "losses": learn.recorder.losses}


def do(name: str) -> dict | list:
    """What a job comes to on this rank."""
    set_seed(42)
    return jobs()[name]()


def do_sharded(name: str) -> dict | list:
    """The same on shards of the model."""
    SHARDING["shard"] = True
    try:
        return do(name)
    finally:
        SHARDING.clear()
