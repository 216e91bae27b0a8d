"""Jobs that are drawn from a seed, for test_random_jobs.py: data, model, loss, optimizers, callbacks, fits and a stop.

A job is a mapping from names of OPTIONS to one of their values; about half of its values are the first, the plain one.
"""

import csv
import json
import random
from contextlib import nullcontext, suppress
from copy import deepcopy
from functools import partial
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import torch
from resume_jobs import Placed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, NAdam, RMSprop
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import IterableDataset, Sampler, Subset, TensorDataset, WeightedRandomSampler

from learnerkit import (
    EMA,
    SWA,
    AccumMetric,
    ActivationCheckpointing,
    ActivationStats,
    BatchTransform,
    Callback,
    CancelBackwardException,
    CancelBatchException,
    CancelEpochException,
    CancelStepException,
    CancelTrainException,
    CarriedState,
    CheckpointCallback,
    CSVLogger,
    DataLoaders,
    EarlyStoppingCallback,
    GradientAccumulation,
    GradientClip,
    GradientNoiseScale,
    JSONLogger,
    Learner,
    Metric,
    MixedPrecision,
    MixUp,
    ParamScheduler,
    Recorder,
    ReduceLROnPlateau,
    SaveModelCallback,
    ScalingMonitor,
    ShortEpochCallback,
    SplitBatch,
    TorchScheduler,
    ValidateEvery,
    accuracy,
    distributed,
    mse,
    rmse,
    set_seed,
)
from learnerkit.callbacks.schedule import SchedCos
from learnerkit.callbacks.training import BnFreeze
from learnerkit.parallel import DriftCheck

CLASSES = 3
CONSTANT = ("fit", "steps", "frozen", "torch's schedule", "lr_find")
FITS = (*CONSTANT, "reset", "later start", "list", "by steps", "one cycle", "flat cos", "sgdr", "fine tune", "slice")

OPTIONS = {
    "samples": (24, 13, 37, 50),
    "valid": (17, 0, 5),
    "batch": (12, 6),
    "data": ("tensors", "rows", "mappings", "subset", "stream", "stream with a state"),
    "order": (
        "shuffled", "in order", "weighted", "generator", "by a state", "by the epoch", "by a place", "own batches",
    ),
    "workers": (0, 2),
    "split_batches": (True, False),
    "drop_last": (False, True),
    "loss": (
        "classes", "weighted classes", "ignored", "smoothed", "numbers", "sum", "sample weights", "the model's",
        "several", "trained", "reads the inputs", "yes or no", "not missing", "plain mean",
    ),
    "carried": (False, True),
    "norm": (False, True, "batch"),
    "tied": (False, True),
    "frozen": (False, True),
    "unused": (False, True),
    "dropout": (0.0, 0.2),
    "opt": (
        "adam", "momentum", "nesterov", "adamw", "rmsprop", "lbfgs", "sgd", "amsgrad", "adagrad", "nadam", "foreach",
    ),
    "groups": ("one", "two", "two optimizers"),
    "wd": (None, 0.1, {"a.*": 0.3, "*bias": 0.0, "*": 0.05}),
    "accumulate": (None, {"n_batches": 2}, {"n_batches": 3}, {"n_samples": 20}),
    "clip": (None, {"max_norm": 0.5}, {"max_norm": 0.3, "each": True}, {"max_value": 0.02}),
    "average": (None, "ema", "swa", "a layer's"),
    "precision": (None, "fp16", "bf16"),
    "overflow": (None, 1, 2),
    "short": (None, 0.7, 2),
    "parts": (None, 2),
    "tracker": (None, "save", "early stop", "plateau", "each epoch", "both"),
    "validate": (None, 2),
    "penalty": (False, True),
    "cancel": (None, "batch", "backward", "step", "train", "epoch"),
    "cancel_at": (2, 0, 1),
    "mix": (None, "mixup", "noise"),
    "train_metrics": (False, True),
    "inside": (None, "after_epoch", "after_step", "before_batch"),
    "own": (False, True),
    "act": (None, "rate", "layer", "optimizer", "gradients", "batch", "off"),
    "schedule": (False, True),
    "backward": ("the library's", "its own"),
    "watch": (None, "noise", "monitor", "recompute", "drift", "frozen norms", "stats"),
    "after": (
        None, "validate", "predictions", "saved", "other data", "other batches", "thawed", "reset", "looks", "state",
        "all loaders",
    ),
    "context": ("of all fits", "of each"),
    "fits": (1, 2, 3),
    "first": FITS, "second": FITS, "third": FITS,
    "every": (1, 2, 3, "epoch"),
    "async_save": (False, True),
    "stop": (
        "after_batch", "before_batch", "after_step", "after_backward", "before_validate", "after_epoch", "after_fit",
    ),
    "stop_at": tuple(range(2, 12)),
    "measure": (None, "names", "torchmetrics", "own"),
    "drawn": (None, "torch", "numpy", "python"),
    "between": (None, "loss", "metrics", "callback", "rate", "model", "loaders"),
    "partner": (None, "nothing", "data", "model"),
    "stops": ("the job", "its partner"),
}  # fmt: skip


class Stopped(Exception):
    """Ends a job in mid-fit."""


def draw(seed, ranks=(1,), shard=False):
    """Draw a job.

    Args:
        seed: of the job; the same seed makes the same job.
        ranks: the numbers of ranks on which it is to come to the same. It leaves out what the documentation says is
            different on them.
        shard: whether its model is sharded.
    """
    rng = random.Random(seed)
    job = {name: options[0] if rng.random() < 0.5 else rng.choice(options) for name, options in OPTIONS.items()}
    plain = {name: options[0] for name, options in OPTIONS.items()}

    def leave(*names):
        job.update({name: plain[name] for name in names})

    job["seed"] = seed
    if len(ranks) > 1:
        leave("dropout", "mix", "drawn")  # each rank draws by itself
        job["norm"] = bool(job["norm"])  # a rank has statistics of its own part
    if len(ranks) > 2:
        leave("split_batches")  # the batches of a rank would change their size
    if shard:
        leave("penalty")  # it is of whole weights
        job["opt"] = "adam" if job["opt"] == "lbfgs" else job["opt"]
        job["average"] = "ema" if job["average"] == "a layer's" else job["average"]
        job["watch"] = None if job["parts"] else job["watch"]
    if not job["split_batches"]:
        # A short epoch has so many steps of a rank; the last batch of one process may be a whole one of the ranks.
        leave("short", "drop_last")
    if job["after"] == "other batches" and job["samples"] < 2 * job["batch"]:
        leave("drop_last")
    if job["data"].startswith("stream"):
        leave("drawn", "split_batches", "workers", "order", "drop_last", "schedule")
        job["short"] = job["short"] and 2
    if job["data"] == "stream with a state" and (job["short"] or job["cancel"] in ("epoch", "train")):
        leave("data")  # a pass that is left goes on in the next epoch, which may have no batches then
    if job["order"] == "by a place" and (job["short"] or job["cancel"] in ("epoch", "train")):
        leave("order")  # a pass that is left goes on where it was, but only in a resumed run
    if job["order"] in ("weighted", "by a state", "by the epoch", "by a place", "own batches"):
        leave("after")  # its sampler is for this data
    if job["order"] == "own batches":
        leave("split_batches", "drop_last", "carried")
        job["norm"] = bool(job["norm"])
    if len(ranks) > 1 and job["precision"]:
        job["precision"] = "fp16"  # with numbers of 64 bits it is exact
    if job["precision"] != "fp16" or job["parts"]:
        leave("overflow")
    if job["opt"] == "lbfgs":
        leave("accumulate", "parts", "precision", "overflow", "wd", "groups", "backward", "own", "cancel", "schedule")
        leave("clip", "act")
        job["loss"] = "the model's" if job["loss"] == "several" else job["loss"]
        job["watch"] = None if job["watch"] == "noise" else job["watch"]
    if job["loss"] in ("the model's", "several"):
        job["data"] = "mappings"
    elif job["data"] == "mappings" and job["loss"] in ("sample weights", "reads the inputs"):
        leave("data")
    if job["loss"] in ("sum", "sample weights"):
        leave("penalty", "mix", "backward")  # a penalty counts beside a mean
    if job["data"] == "mappings":
        leave("mix")
    if job["act"] == "batch" and (job["data"] == "mappings" or job["parts"]):
        leave("act")  # the model gets the mapping, and the parts are cut of it
    if job["loss"] in ("ignored", "sample weights") or job["parts"]:
        leave("mix", "penalty", "backward")
    if job["groups"] == "two optimizers":
        leave("wd", "tracker", "backward")
    if job["backward"] != "the library's":
        leave("accumulate", "parts")
        job["watch"] = None if job["watch"] == "noise" else job["watch"]
    for name in ("first", "second", "third"):
        if job["data"].startswith("stream") or job["tracker"] == "plateau":
            job[name] = job[name] if job[name] in CONSTANT else "fit"
        if job["cancel"] in ("train", "epoch") or job["order"] == "by a place":
            job[name] = job[name] if job[name] not in ("steps", "lr_find", "by steps") else "fit"
    if job["cancel"] in ("train", "epoch"):
        leave("validate")
    if job["loss"] == "several":
        leave("accumulate", "parts", "penalty", "mix", "backward", "inside")
        job["after"] = None if job["after"] in ("predictions", "all loaders") else job["after"]
        job["watch"] = None if job["watch"] == "noise" else job["watch"]
    if job["loss"] in ("trained", "reads the inputs"):
        leave("mix", "parts", "backward")
    if job["loss"] == "trained" and job["groups"] == "two optimizers":
        leave("groups")
    if job["carried"]:
        leave("split_batches", "parts", "mix", "short")
        job["watch"] = None if job["watch"] == "noise" else job["watch"]
        job["valid"] = 2 * job["batch"] if job["valid"] else 0
        if job["after"] in ("other batches", "all loaders"):
            leave("after")
    if job["between"] == "loaders" and job["order"] not in ("shuffled", "in order", "generator"):
        leave("between")  # its sampler is for this data
    if job["between"] == "model" and job["average"] == "a layer's":
        leave("between")
    if job["loss"] not in ("classes", "numbers"):
        leave("measure")
        job["between"] = None if job["between"] in ("loss", "metrics") else job["between"]
    if job["carried"] or job["norm"] == "batch":
        job["drop_last"] = True  # batches of other sizes, or of one sample, are refused
        job["data"] = "rows" if job["data"].startswith("stream") else job["data"]
    if job["stop"] == "after_fit":
        job["stop_at"] = job["stop_at"] % 3 + 1
    if not job["partner"]:
        leave("stops")
    if not job["valid"]:
        leave("tracker", "validate", "inside")
        job["after"] = None if job["after"] in ("validate", "predictions", "all loaders") else job["after"]
    return job


# Data and model


def dtype_of(job):
    """The type of a job's numbers; autocast leaves those of 64 bits as they are."""
    return torch.float32 if job["precision"] == "bf16" else torch.float64


class Rows(torch.utils.data.Dataset):
    """Samples one by one, as tuples or mappings."""

    def __init__(self, *tensors, names=None):
        self.tensors, self.names = tensors, names

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, i):
        row = tuple(tensor[i] for tensor in self.tensors)
        return row if self.names is None else dict(zip(self.names, row, strict=True))


DRAWS = {"torch": lambda: float(torch.rand(())), "numpy": np.random.random, "python": random.random}


class Drawn(torch.utils.data.Dataset):
    """Samples whose inputs are moved by a number that is drawn."""

    def __init__(self, rows, draws):
        self.rows, self.draws = rows, draws

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row, shift = self.rows[i], DRAWS[self.draws]()
        return row | {"x": row["x"] + shift} if isinstance(row, dict) else (row[0] + shift, *row[1:])


class Stream(IterableDataset):
    """The rows one after another."""

    def __init__(self, *tensors):
        self.tensors = tensors

    def __iter__(self):
        return iter(Rows(*self.tensors))


class StreamWithState(IterableDataset):
    """The rows in another order in each pass; a pass that was left goes on."""

    def __init__(self, *tensors):
        self.tensors, self.passes, self.place = tensors, 0, 0

    def __iter__(self):
        rows = Rows(*self.tensors)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.passes)).tolist()
        while self.place < len(rows):
            self.place += 1
            yield rows[order[self.place - 1]]
        self.passes, self.place = self.passes + 1, 0

    def state_dict(self):
        return {"passes": self.passes, "place": self.place}

    def load_state_dict(self, state):
        self.passes, self.place = state["passes"], state["place"]


class Permuted(Sampler):
    """Another permutation in each iteration."""

    def __init__(self, n):
        self.n, self.seed = n, 0

    def __len__(self):
        return self.n

    def __iter__(self):
        seed, self.seed = self.seed, self.seed + 1
        return iter(torch.randperm(self.n, generator=torch.Generator().manual_seed(seed)).tolist())


class PermutedWithState(Permuted):
    """One that says how often it was iterated."""

    def state_dict(self):
        return self.seed

    def load_state_dict(self, seed):
        self.seed = seed


class PermutedByEpoch(Permuted):
    """One whose permutation is that of the epoch."""

    def set_epoch(self, epoch):
        self.seed = epoch


def uneven_batches(n, batch):
    """Batches of several sizes, a shuffled one after another."""
    sizes = [batch, batch // 2, batch + 3, 1]
    cuts = [sum(sizes[i % 4] for i in range(k)) for k in range(n)]
    return [list(range(start, min(stop, n))) for start, stop in pairwise(cuts) if start < n]


KINDS = {
    "tensors": TensorDataset,
    "rows": Rows,
    "mappings": partial(Rows, names=("x", "labels")),
    "subset": lambda *tensors: Subset(TensorDataset(*tensors), range(len(tensors[0]) - 1, -1, -1)),
    "stream": Stream,
    "stream with a state": StreamWithState,
}


def make_samples(job, n, seed):
    """A dataset of n samples."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=rng, dtype=torch.float64)
    y = x[:, :CLASSES].argmax(1)
    if job["loss"] == "ignored":
        y[torch.arange(n) % 3 == 1] = -100
    if job["loss"] in ("numbers", "sum", "sample weights", "not missing", "plain mean"):
        y = x[:, :CLASSES].sin()
    if job["loss"] == "not missing":
        y[torch.arange(n) % 5 == 1, 0] = torch.nan
        y[torch.arange(n) % 7 == 1] = torch.nan
    if job["loss"] == "yes or no":
        y = (x[:, :CLASSES] > 0).to(torch.float64)
    weights = [torch.rand(n, generator=rng, dtype=torch.float64)] if job["loss"] == "sample weights" else []
    return [t.to(dtype_of(job)) if t.is_floating_point() else t for t in (x, y, *weights)]


def make_loaders(job, batch):
    """The loaders of a job, with batches of a size."""
    n, seed = job["samples"], job["seed"]
    options = {"n_inp": 1} if job["loss"] == "sample weights" else {}
    options |= {"classes": ["a", "b", "c"]} if job["measure"] == "names" and job["loss"] == "classes" else {}
    if not job["data"].startswith("stream"):
        rng = torch.Generator().manual_seed(seed)
        options |= {
            "shuffled": {},
            "in order": {"shuffle": False},
            "weighted": {"sampler": WeightedRandomSampler(torch.arange(1.0, n + 1), n, generator=rng)},
            "generator": {"generator": rng},
            "by a state": {"sampler": PermutedWithState(n)},
            "by the epoch": {"sampler": PermutedByEpoch(n)},
            "by a place": {"sampler": Placed(n)},
            "own batches": {"batch_sampler": uneven_batches(n, batch)},
        }[job["order"]]
        options |= {"drop_last": True} if job["drop_last"] else {}
        options["num_workers"] = job["workers"]
    kind = KINDS[job["data"].removesuffix(" with a state")]
    valid = [kind(*make_samples(job, job["valid"], seed + 1))] if job["valid"] else []
    if job["after"] == "all loaders":
        valid.append(kind(*make_samples(job, job["valid"] + 1, seed + 2)))
    train = KINDS[job["data"]](*make_samples(job, n, seed))
    train = Drawn(train, job["drawn"]) if job["drawn"] else train
    return DataLoaders.from_datasets(train, *valid, bs=batch, valid_bs=batch, device="cpu", **options)


class Net(nn.Module):
    """Three layers; the second may be used twice, be frozen, or have a norm before it."""

    def __init__(self, job):
        super().__init__()
        self.a = nn.Linear(5, 8)
        self.norm = {False: nn.Identity, True: nn.LayerNorm, "batch": nn.BatchNorm1d}[job["norm"]](8)
        self.b = nn.Linear(8, 8)
        self.drop = nn.Dropout(job["dropout"])
        self.c = nn.Linear(8, CLASSES)
        self.unused = nn.Linear(2, 2) if job["unused"] else None
        self.b.requires_grad_(not job["frozen"])
        self.tied, self.loss = job["tied"], job["loss"]
        self.to(dtype_of(job))

    def forward(self, x, *carried, labels=None, state=None):
        h = torch.tanh(self.b(F.gelu(self.norm(self.a(x)))))
        state = carried[0] if carried else state
        h = h if state is None else h + 0.5 * state
        out = self.c(self.drop(torch.tanh(self.b(h)) if self.tied else h))
        if labels is not None and self.loss == "the model's":
            out = {"loss": F.cross_entropy(out, labels), "logits": out}
        elif labels is not None:
            high = labels > 0
            each = F.cross_entropy(out, labels, reduction="none")
            out = {"all": each.mean(), "high": (each[high] ** 2).sum() / high.sum().clamp(min=1), "n": high.sum()}
        return out if state is None else (out, h)


def by_sample(pred, y, weights):
    """A mean by the weights of the samples."""
    return ((pred - y).pow(2).mean(1) * weights).sum() / weights.sum()


def not_missing(pred, y):
    """A mean over targets that are there."""
    there = ~y.isnan()
    return F.mse_loss(pred[there], y[there]) if there.any() else pred.sum() * 0


class Trained(nn.Module):
    """A loss with a temperature that is trained."""

    def __init__(self, dtype):
        super().__init__()
        self.log_t = nn.Parameter(torch.zeros(CLASSES, dtype=dtype))

    def forward(self, pred, y):
        return F.cross_entropy(pred * self.log_t.exp(), y)


def with_inputs(pred, y, *, x, learn):
    """A loss that compares the predictions with the inputs, too, more in later epochs."""
    return F.cross_entropy(pred, y) + 0.1 * (learn.epoch + 1) * F.mse_loss(pred, x[:, :CLASSES])


def make_loss(job):
    """(the loss, its weight)."""
    return {
        "classes": (nn.CrossEntropyLoss(), None),
        "weighted classes": (nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.3], dtype=dtype_of(job))), None),
        "ignored": (nn.CrossEntropyLoss(), None),
        "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), None),
        "numbers": (nn.MSELoss(), None),
        "sum": (nn.MSELoss(reduction="sum"), "sum"),
        "sample weights": (by_sample, lambda y, weights: weights.sum()),
        "the model's": (None, None),
        "several": (None, {"all": "samples", "high": "n"}),
        "trained": (Trained(dtype_of(job)), None),
        "reads the inputs": (with_inputs, "samples"),
        "yes or no": (nn.BCEWithLogitsLoss(), None),
        "not missing": (not_missing, lambda y: (~y.isnan()).sum()),
        "plain mean": (lambda pred, y: (pred - y).abs().mean(), None),
    }[job["loss"]]


# Callbacks


CANCELS = {
    "batch": ("before_batch", CancelBatchException),
    "backward": ("before_backward", CancelBackwardException),
    "step": ("before_step", CancelStepException),
    "train": ("after_batch", CancelTrainException),
    "epoch": ("before_batch", CancelEpochException),
}


def raise_at(event, error, at=None, batch=None):
    """A callback that raises an error at a batch of each epoch, or at some call of an event."""
    seen = count(1)

    def leave(cb):
        if cb.training and cb.iter == batch:
            raise error
        whole = event in ("before_validate", "after_epoch", "after_fit")
        if at is not None and (cb.training or whole) and next(seen) == at:
            raise error

    return Callback(**{event: leave}, order=-70 if event == "after_fit" else 70)


def penalise(cb):
    """Add a penalty of the weights."""
    if cb.training:
        cb.learn.loss_grad = cb.loss_grad + 0.01 * sum(p.pow(2).sum() for p in cb.model.parameters())


def log_loss(cb):
    """Log what a batch has come to."""
    if cb.training and cb.batch_size and cb.loss is not None:
        cb.learn.log_metric("logged", cb.loss * 2)


def evaluate(cb):
    """Evaluate in mid-fit."""
    if cb.training and (cb.train_iter == 3 or cb.iter == cb.n_iter):
        cb.learn.log_metric("inside", float(cb.learn.get_preds()[0].abs().mean()))


def halve_rates(cb):
    """Halve the learning rates."""
    for group in (group for opt in cb.learn.opts for group in opt.param_groups):
        group["lr"] /= 2


def begin_layer_anew(cb):
    """Begin the last layer anew."""
    torch.nn.init.zeros_(cb.model.c.weight)  # equal rows would give the other layers gradients of rounding alone


def forget_moments(cb):
    """Clear the optimizers' state."""
    for opt in cb.learn.opts:
        opt.state.clear()


def clamp_gradients(cb):
    """Clamp the gradients."""
    for p in cb.model.parameters():
        if p.grad is not None:
            p.grad = p.grad.clamp(-0.01, 0.01)


def scale_inputs(cb):
    """Train on other inputs."""
    if cb.training:
        cb.learn.xb = tuple(1.05 * x for x in cb.xb)


def switch_off(cb):
    """Scale the gradient of a fit's first batch, and of no other."""
    if cb.training:
        cb.learn.loss_grad = cb.loss_grad * 0.9
        cb.run = False


ACTS = {
    "rate": {"before_epoch": halve_rates},
    "layer": {"before_train": begin_layer_anew},
    "optimizer": {"before_epoch": forget_moments},
    "gradients": {"before_step": clamp_gradients},
    "batch": {"before_batch": scale_inputs},
    "off": {"after_loss": switch_off},
}


class Hidden(CarriedState):
    """A hidden layer that the next batch begins with."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def start(self, n):
        return torch.zeros(n, 8, dtype=self.dtype)


class Steady(Callback):
    """Keeps the gradients small, where a user adds it between two fits."""

    def before_step(self):
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.clamp_(-0.03, 0.03)


class Anneals(Callback):
    """Divides the gradient by a number that grows with the batches, which is kept in plain attributes."""

    def __init__(self):
        self.steps, self.past = 0, []

    def before_step(self):
        self.steps += 1
        self.past.append(self.steps)
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad /= 1 + 0.01 * sum(self.past[-3:])


WATCHES = {
    None: None, "noise": GradientNoiseScale, "monitor": ScalingMonitor, "recompute": ActivationCheckpointing,
    "drift": partial(DriftCheck, every=2), "frozen norms": BnFreeze, "stats": ActivationStats,
}  # fmt: skip


SCALER = {"fp16": {"init_scale": 2.0**8, "growth_interval": 3}}


def overflow(cb, at):
    """Let the gradients of a batch overflow."""
    if cb.training and cb.iter == at:
        cb.learn.loss_grad = cb.loss_grad * torch.inf


def make_callbacks(job, folder, model):
    """The callbacks of a job."""
    found = [
        job["accumulate"] and GradientAccumulation(**job["accumulate"]),
        job["clip"] and GradientClip(**job["clip"]),
        {"ema": EMA(0.9), "swa": SWA(start=0.3)}.get(job["average"]),
        job["average"] == "a layer's" and EMA(0.9, module=deepcopy(model.a), of=model.a, every=2),
        job["precision"] and MixedPrecision(job["precision"], **SCALER.get(job["precision"], {})),
        job["overflow"] and Callback(after_loss=partial(overflow, at=job["overflow"])),
        job["short"] and ShortEpochCallback(**{"n" if job["short"] > 1 else "pct": job["short"]}),
        job["parts"] and SplitBatch(parts=job["parts"]),
        job["validate"] and ValidateEvery(n=job["validate"]),
        job["penalty"] and Callback(after_loss=penalise),
        job["cancel"] and raise_at(*CANCELS[job["cancel"]], batch=job["cancel_at"]),
        job["mix"] == "mixup" and MixUp(),
        job["mix"] == "noise" and BatchTransform(lambda x: x + 0.1 * torch.randn_like(x)),
        job["train_metrics"] and Recorder(train_metrics=True),
        WATCHES[job["watch"]] and WATCHES[job["watch"]](),
        job["carried"] and Hidden(dtype_of(job)),
        job["own"] and Anneals(),
        job["act"] and Callback(**ACTS[job["act"]]),
        job["schedule"] and ParamScheduler({"weight_decay": SchedCos(0.1, 0.0)}),
        CSVLogger(Path(folder, "log.csv")),
        JSONLogger(Path(folder, "log.jsonl")),
        job["inside"] and Callback(**{job["inside"]: evaluate}),
        job["tracker"] == "save" and SaveModelCallback(fname=Path(folder, "best")),
        job["tracker"] in ("each epoch", "both") and SaveModelCallback(fname=Path(folder, "each"), every_epoch=True),
        job["tracker"] == "both" and SaveModelCallback(fname=Path(folder, "best"), with_opt=True, monitor="train_loss"),
        job["tracker"] == "early stop" and EarlyStoppingCallback(patience=1),
        job["tracker"] == "plateau" and ReduceLROnPlateau(patience=1, factor=2.0),
        job["loss"] not in ("sum", "several") and Callback(after_batch=log_loss),
    ]
    return [cb() if isinstance(cb, type) else cb for cb in found if cb]


# The job


class TwoBackwards(Learner):
    """A backward pass in two halves."""

    def _backward(self):
        (self.loss_grad * 0.5).backward(retain_graph=True)
        (self.loss_grad * 0.5).backward()


OPTS = {
    "adam": Adam,
    "momentum": partial(SGD, momentum=0.9),
    "nesterov": partial(SGD, momentum=0.8, nesterov=True),
    "adamw": AdamW,
    "rmsprop": partial(RMSprop, momentum=0.5),
    "lbfgs": partial(LBFGS, max_iter=3),
    "sgd": SGD,
    "amsgrad": partial(Adam, amsgrad=True),
    "adagrad": Adagrad,
    "nadam": NAdam,
    "foreach": partial(AdamW, foreach=True),
}


class TwoKinds(Learner):
    """A learner with an optimizer for the first layer and one for all others."""

    def create_opt(self):
        first = [p for name, p in self.model.named_parameters() if name.startswith("a.")]
        rest = [p for name, p in self.model.named_parameters() if not name.startswith("a.") and p.requires_grad]
        return {"first": SGD(first, lr=self.lr), "rest": Adam(rest, lr=self.lr)}


def halves(model):
    """Split the parameters in two groups."""
    return [[*model.a.parameters()], [p for name, p in model.named_parameters() if not name.startswith("a.")]]


def with_loss(splitter, loss, model):
    """Add the parameters of a loss to the last group."""
    *others, last = splitter(model)
    return [*others, [*last, *loss.parameters()]]


def fit(learn, job, how):
    """Train once."""
    grouped = job["groups"] == "two"
    lr = 2e-2
    if how == "one cycle":
        learn.fit_one_cycle(2, lr)
    elif how == "flat cos":
        learn.fit_flat_cos(2, lr)
    elif how == "sgdr":
        learn.fit_sgdr(1, 2, lr)
    elif how == "fine tune" and grouped:
        learn.fine_tune(1, lr)
    elif how == "frozen" and grouped:
        learn.freeze()
        learn.fit(1, lr)
        learn.unfreeze()
    elif how == "slice" and grouped:
        learn.fit_one_cycle(1, slice(1e-3, 1e-2))
    elif how == "reset":
        learn.fit(2, lr, reset_opt=True)
    elif how == "later start":
        learn.fit_one_cycle(3, lr, start_epoch=1)
    elif how == "list" and grouped:
        learn.fit_flat_cos(2, [lr / 3, lr])
    elif how == "by steps":
        learn.fit_one_cycle(n_steps=7, lr_max=lr)
    elif how == "steps":
        learn.fit(n_steps=5, lr=lr)
    elif how == "torch's schedule" and job["groups"] != "two optimizers" and job["tracker"] != "plateau":
        learn.fit(2, lr, cbs=TorchScheduler(lambda opt: StepLR(opt, 2, 0.5)))
    elif how == "lr_find":
        learn.lr_find(num_it=12, show_plot=False)
        learn.fit(1, lr)
    else:
        learn.fit(2, None if job["between"] == "rate" else lr)


def do_after(learn, job, batch, folder):
    """Do what users do between two fits; return numbers."""
    after = job["after"]
    if after == "validate":
        return learn.validate()
    if after == "looks":
        learn.dls.one_batch()
        learn.summary()
        learn.state_dict()
    if after == "state":
        learn.load_state_dict(deepcopy(learn.state_dict()))
    if after == "all loaders":
        return [x for i in (1, 2) for x in (*learn.validate(i), *learn.get_preds(i)[0].flatten().tolist())]
    if after == "predictions":
        return learn.get_preds()[0].flatten().tolist()
    if after == "other data":
        learn.dls = make_loaders(job | {"seed": job["seed"] + 5}, batch)
    if after == "other batches":
        learn.dls = make_loaders(job, 2 * batch)
    if after == "saved":
        learn.save(Path(folder, "model"))
        learn.load(Path(folder, "model"))
    if after == "reset":
        learn.create_opt()
    if after == "thawed":
        learn.model.b.requires_grad_(not learn.model.b.weight.requires_grad)
    return []


def change(learn, job, batch):
    """Change the learner between two fits."""
    between, numbers = job["between"], job["loss"] == "numbers"
    if between == "loss":
        learn.loss_func = nn.L1Loss() if numbers else nn.CrossEntropyLoss(label_smoothing=0.2)
    if between == "metrics":
        learn.metrics = [mse] if numbers else [AccumMetric(right, name="right")]
    if between == "callback":
        found = [cb for cb in learn.cbs if isinstance(cb, Steady)]
        learn.remove_cbs(found) if found else learn.add_cb(Steady())
    if between == "rate":
        learn.lr = 5e-3
    if between == "model":
        torch.default_generator.manual_seed(job["seed"] + 9)
        learn.model = Net(job)
        learn.create_opt()
    if between == "loaders":
        learn.dls = make_loaders(job | {"seed": job["seed"] + 5}, batch)


def make_partner(job, learn, folder, cbs, batch):
    """A learner that trains before each fit of another one, and may share its data or its model."""
    dls = learn.dls if job["partner"] == "data" else make_loaders(job | {"seed": job["seed"] + 3}, batch)
    torch.default_generator.manual_seed(job["seed"] + 7)
    model = learn.model if job["partner"] == "model" else Net(job)
    loss, weight = make_loss(job)
    cls = TwoKinds if job["groups"] == "two optimizers" else Learner
    if job["carried"]:
        cbs = [*cbs, Hidden(dtype_of(job))]
    splitter = partial(with_loss, lambda model: [[*model.parameters()]], loss) if job["loss"] == "trained" else None
    return cls(dls, model, loss, loss_weight=weight, opt_func=OPTS["momentum"], lr=1e-2, cbs=cbs, splitter=splitter)


class Biggest(Metric):
    """The largest prediction, and the mean of the largest of each sample."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64))
        self.add_state("n", 0)
        self.add_state("most", torch.tensor(-torch.inf, dtype=torch.float64), reduce="max")

    def update(self, pred, *targets):
        largest = pred.double().max(1).values
        self.total += largest.sum()
        self.n += len(pred)
        self.most = torch.maximum(self.most, largest.max())

    def compute(self):
        return self.total / self.n + self.most


def of_torchmetrics(loss):
    from torchmetrics import classification, regression  # here, as their import takes seconds

    if loss == "classes":
        return [classification.MulticlassF1Score(CLASSES)]
    return [regression.MeanAbsoluteError().set_dtype(torch.float64)]


MEASURES = {
    "names": lambda loss: ["f1" if loss == "classes" else "mae"],
    "torchmetrics": of_torchmetrics,
    "own": lambda loss: [Biggest()],
}


def make(job, folder, cbs, batch):
    """The learner of a job."""
    classes = job["loss"] in ("classes", "weighted classes", "smoothed", "the model's", "trained", "reads the inputs")
    metrics = [AccumMetric(right, name="right")] if classes or job["loss"] == "ignored" else []
    metrics += [accuracy] if classes else [mse, rmse] if job["loss"] in ("numbers", "sum") else []
    metrics += MEASURES[job["measure"]](job["loss"]) if job["measure"] else []
    loss, weight = make_loss(job)
    cls = TwoBackwards if job["backward"] == "its own" else TwoKinds if job["groups"] == "two optimizers" else Learner
    dls = make_loaders(job, batch)
    torch.default_generator.manual_seed(job["seed"])  # the weights are those of one process
    splitter = halves if job["groups"] == "two" else None
    if job["loss"] == "trained":
        splitter = partial(with_loss, splitter or (lambda model: [[*model.parameters()]]), loss)
    model = Net(job)
    return cls(
        dls, model, loss, loss_weight=weight, metrics=metrics, opt_func=OPTS[job["opt"]], lr=1e-2, wd=job["wd"],
        splitter=splitter, cbs=[*make_callbacks(job, folder, model), *cbs],
    )  # fmt: skip


def right(pred, y):
    """The share of right classes."""
    return (pred.argmax(1) == y).double().mean()


COLUMNS = {
    *("loss", "right", "accuracy", "mse", "rmse", "logged", "inside", "all", "high"),
    *("f1", "mae", "multiclassf1score", "meanabsoluteerror", "biggest"),
}


def is_compared(name):
    """Tell whether a column is neither a time nor measured."""
    return name.removeprefix("train_").removeprefix("valid_") in COLUMNS


def rows_of(recorder):
    """The columns of a fit, without times and what else is measured."""
    frame = recorder.to_frame()
    names = [name for name in frame if is_compared(name)]
    return {name: frame[name].tolist() for name in names}


def logged(path):
    """The rows of a CSV file, without times and what else is measured."""
    with path.open(newline="") as file:
        return [[float(v or "nan") for name, v in row.items() if is_compared(name)] for row in csv.DictReader(file)]


def records(path, recorder):
    """The records of a JSON file: of steps, whose losses are a rank's, the rates; of rows what is compared.

    Each step of all fits has one, and its rate is the recorder's.
    """
    found = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    lrs = [lr for fit in (*recorder.history, recorder) for lr in fit.lrs]
    steps = [record for record in found if "epoch" not in record]
    assert [(record["step"], record["lr"]) for record in steps] == list(enumerate(lrs, 1))
    rates = {"step", "lr", "momentum", "weight_decay"}
    return [
        {k: v for k, v in record.items() if k in rates or ("epoch" in record and is_compared(k))} for record in found
    ]


def run(job, folder, how="whole", shard=False, nproc=None):
    """Train and evaluate; return what a job comes to on this rank.

    Args:
        job: as `draw` makes it.
        folder: for its files.
        how: "whole"; "stopped": a checkpoint is left in the folder; or "resumed": from this checkpoint.
        shard: whether its model is sharded.
        nproc: the number of workers of a notebook, in which this runs.
    """
    set_seed(job["seed"])
    cbs, partner_cbs = [], []
    if how != "whole":
        cbs, partner_cbs = (
            [CheckpointCallback(Path(folder, name), every=job["every"], resume=True)] for name in ("checkpoints", "of")
        )
    if how == "stopped":
        stops = cbs if job["stops"] == "the job" else partner_cbs
        stops.append(raise_at(job["stop"], Stopped, at=job["stop_at"]))
    batch = job["batch"] // (1 if job["split_batches"] else nproc or distributed.world_size())
    learn = make(job, folder, cbs, batch)
    partner = make_partner(job, learn, folder, partner_cbs, batch) if job["partner"] else None
    rows, evaluations = [], []
    options = {"split_batches": job["split_batches"], "shard": shard} | ({"nproc": nproc} if nproc else {})
    context = partial(learn.distrib_ctx, **options)
    outer, inner = (nullcontext, context) if job["context"] == "of each" else (context, nullcontext)
    with learn.no_bar(), learn.no_logging(), suppress(Stopped), outer():
        for name in ("first", "second", "third")[: job["fits"]]:
            if partner is not None:
                with partner.no_bar(), partner.no_logging(), partner.distrib_ctx(**options):
                    partner.fit(1)
                    evaluations += partner.recorder.losses
            with inner():
                fit(learn, job, job[name])
                rows.append(rows_of(learn.recorder))
                evaluations += do_after(learn, job, batch, folder)
            change(learn, job, batch)
    is_read = distributed.is_main() and how != "stopped"
    states = [s for opt in learn.opts for _, s in sorted(opt.state_dict()["state"].items())]
    return {
        "weights": {name: value.clone() for name, value in learn.model.state_dict().items()},
        "opt": [value.clone() for state in states for _, value in sorted(state.items()) if isinstance(value, Tensor)],
        "rows": rows,
        "losses": learn.recorder.losses,
        "lrs": learn.recorder.lrs,
        "evaluations": evaluations,
        "logged": logged(Path(folder, "log.csv")) if is_read else [],
        "records": records(Path(folder, "log.jsonl"), learn.recorder) if is_read else [],
        "drawn": torch.rand(2),
    }
