"""Small fits that are interrupted and go on in another learner, and what must be equal to a fit without a break."""

import random
import signal
from collections import OrderedDict
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW
from torch.optim.lr_scheduler import CyclicLR, MultiStepLR, OneCycleLR
from torch.optim.lr_scheduler import ReduceLROnPlateau as TorchPlateau
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from learnerkit import (
    EMA,
    SWA,
    AccumMetric,
    BatchTransform,
    Callback,
    CancelBatchException,
    CancelEpochException,
    CancelStepException,
    CancelTrainException,
    CheckpointCallback,
    DataLoaders,
    EarlyStoppingCallback,
    GradientAccumulation,
    GradientClip,
    Learner,
    MixedPrecision,
    MixUp,
    Recorder,
    ReduceLROnPlateau,
    SaveModelCallback,
    TorchScheduler,
    ValidateEvery,
    mae,
    rmse,
    set_seed,
)
from learnerkit.callbacks.lr_find import minimum
from learnerkit.callbacks.schedule import SchedCos
from learnerkit.callbacks.training import TrainEvalCallback

SAMPLES, BATCH, EPOCHS = 27, 4, 3
STEPS = -(-SAMPLES // BATCH) * EPOCHS


class Killed(BaseException):
    """Stands for the death of the process: nothing is written after it."""


class Kill(Callback):
    """Ends a fit after a training batch, when all callbacks have seen it; or in validation."""

    order = 20_000
    only_fit = True

    def __init__(self, at=0, valid=False):
        super().__init__()
        self._at, self._valid, self._seen = at, valid, 0

    def after_batch(self):
        self._seen += self.training != self._valid
        if self.training != self._valid and self._seen == self._at:
            raise Killed

    def state_dict(self):
        return {}  # it counts the batches of this process


class _KillBefore(Callback):  # of which a checkpoint takes no notice, as its name begins with an underscore
    """Ends a fit before a training batch."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def before_batch(self):
        if self.train_iter == self.at:
            raise Killed


class Send(Kill):
    """Sends a signal to this process, after a batch or before other callbacks see it, and lets the fit go on."""

    def __init__(self, at, signum, valid=False, order=1):
        super().__init__(at, valid)
        self._signum, self.order = signum, order

    def after_batch(self):
        try:
            super().after_batch()
        except Killed:
            signal.raise_signal(self._signum)


class Order(Callback):
    """Notes what is trained on."""

    order = 40
    only_fit = True
    run_valid = False

    def __init__(self):
        super().__init__()
        self.batches = []

    def after_batch(self):
        self.batches.append(self.xb[0].tolist())

    def state_dict(self):
        return {}  # it notes what this process trains on


class Noisy(Dataset):
    """Samples with an augmentation that draws from all three global generators."""

    def __init__(self, n, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 4, generator=generator)
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        noise = torch.rand(4) + random.random() + float(np.random.rand())
        return self.x[i] + noise / 10, self.y[i]


class Average(Callback):
    """An average of the weights, with which validation is done: it has a state of its own."""

    order = 30
    only_fit = True

    def before_fit(self):
        self.mean = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.kept = None

    def after_step(self):
        for name, p in self.model.named_parameters():
            self.mean[name].lerp_(p.detach(), 0.1)

    def before_validate(self):
        self.kept = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._put(self.mean)

    def cleanup_validate(self):
        self._put(self.kept)

    @torch.no_grad()
    def _put(self, values):
        for name, p in self.model.named_parameters():
            p.copy_(values[name])

    def state_dict(self):
        return {"mean": {name: value.clone() for name, value in self.mean.items()}}

    def load_state_dict(self, state):
        self.mean = {name: value.clone() for name, value in state["mean"].items()}


class Teacher(EMA):
    """Pulls the predictions to those of an average of the weights, which is a module outside of the model."""

    def __init__(self, module=None):
        super().__init__(SchedCos(0.5, 1.0), every=2, start=3, module=module or make_model(norm=True))

    def after_loss(self):
        with torch.no_grad():
            advice = self.module(self.x)  # its statistics move with it
        self.learn.loss_grad = self.loss_grad + (self.pred - advice).square().mean()


class Logs(Callback):
    """Logs a number for each batch, counts, and leaves out some batches and steps."""

    order = 20
    run_valid = False
    logs = ("logged",)

    def __init__(self):
        super().__init__()
        self.count = 0

    def before_backward(self):
        self.count += 1
        if self.count % 5 == 0:
            raise CancelBatchException

    def before_step(self):
        self.learn.log_metric("logged", self.loss * self.count)
        if self.count % 7 == 0:
            raise CancelStepException

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class WarmUp(Callback):
    """Adds something to the first five batches that it sees, and switches itself off."""

    run_valid = False

    def __init__(self):
        super().__init__()
        self.seen = 0

    def before_batch(self):
        self.seen += 1
        self.learn.xb = (self.xb[0] + self.seen,)
        self.run = self.seen < 5


class CutShort(Callback):
    """Ends the training of each epoch after its third batch."""

    def __init__(self, kind):
        super().__init__()
        self._kind = kind

    def after_batch(self):
        if self.training and self.iter == 2:
            raise self._kind


class Carries(Callback):
    """Adds something of the last batch to the next, as a recurrent network's state; each rank has its own alone."""

    carried = 0.0

    def before_batch(self):
        if self.training:
            self.learn.xb = (self.xb[0] + self.carried,)

    def after_batch(self):
        if self.training:
            self.carried = self.xb[0].mean().item()

    def state_dict(self):
        return {"own": {"carried": self.carried}}

    def load_state_dict(self, state):
        self.carried = state["own"]["carried"]


class ByHand(Callback):
    """Accumulates gradients over three batches by leaving steps out."""

    order = 5
    run_valid = False

    def __init__(self):
        super().__init__()
        self.count = 0

    def after_backward(self):
        self.count += 1
        if self.count % 3:
            raise CancelBatchException

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Unfreezes(Callback):
    """Unfreezes the first layer in mid-fit."""

    run_valid = False

    def before_fit(self):
        self.model[0].requires_grad_(False)

    def before_batch(self):
        if self.train_iter == 10:
            self.model[0].requires_grad_(True)


class Two(Learner):
    """Has an optimizer for each half of the model."""

    def create_opt(self):
        first, last = self.model[0].parameters(), self.model[-1].parameters()
        return {"first": SGD(first, self.lr, momentum=0.9), "last": Adam(last, self.lr)}


def make_model(norm=False, dropout=0.3):
    """A small network."""
    return nn.Sequential(OrderedDict(
        body=nn.Linear(4, 6), norm=nn.BatchNorm1d(6) if norm else nn.Identity(), act=nn.Tanh(),
        drop=nn.Dropout(dropout), head=nn.Linear(6, 1),
    ))  # fmt: skip


class Counting:
    """A sampler that counts its epochs by itself, as many do; it may draw only some of the samples."""

    def __init__(self, n, some=None):
        self.n, self.epoch = n, 0
        self.some = n if some is None else some

    def __len__(self):
        return self.some

    def __iter__(self):
        self.epoch += 1
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch))
        return iter(order[: self.some].tolist())

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


class Placed:
    """A sampler whose state is a place in its pass, as that of torchdata's StatefulDistributedSampler."""

    def __init__(self, n):
        self.n, self.epoch, self.place, self.next_place = n, 0, 0, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.n

    def __iter__(self):
        self.place, self.next_place = self.next_place or 0, None
        for i in torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch))[self.place :].tolist():
            self.place += 1
            yield i

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.next_place = state["place"]


class Shuffling(Counting):
    """Shuffles its lists and arrays in place, each epoch from the order of the one before."""

    def __init__(self, n):
        super().__init__(n)
        self.random, self.array = random.Random(1), np.arange(n)
        self.buckets = [[*range(n // 2)], [*range(n // 2, n)]]

    def __iter__(self):
        for bucket in self.buckets:
            self.random.shuffle(bucket)
        self.random.shuffle(self.buckets)
        self.array[:] = self.array[[*self.buckets[0], *self.buckets[1]]]
        return iter(self.array.tolist())

    def state_dict(self):
        return {"array": self.array, "buckets": self.buckets}

    def load_state_dict(self, state):
        self.array, self.buckets = state["array"], state["buckets"]


class Stream(IterableDataset):
    """Samples that are others in each epoch, with a state."""

    def __init__(self, data):
        self.data, self.epoch, self.place = data, 0, 0

    def __iter__(self):
        while self.place < len(self.data):
            self.place += 1
            x, y = self.data[self.place - 1]
            yield x + self.epoch, y
        self.epoch, self.place = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state):
        self.epoch, self.place = state["epoch"], state["place"]


def loaders(data="tensors", **kwargs):
    """The loaders of a job; a sampler is made anew in each process."""
    valid = Noisy(8, seed=1)
    valid = TensorDataset(valid.x, valid.y)
    train = Noisy(SAMPLES)
    if data == "tensors":
        train = TensorDataset(train.x, train.y)
    if data == "weighted":
        sampler = WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), SAMPLES)
        return DataLoaders(DataLoader(train, BATCH, sampler=sampler), DataLoader(valid, 4), device="cpu")
    if data in SOURCES:
        return DataLoaders(SOURCES[data](train), DataLoader(valid, 4), device="cpu")
    if data == "counting validation":
        plain = TensorDataset(train.x, train.y)
        return DataLoaders(DataLoader(plain, BATCH), DataLoader(valid, 4, sampler=Counting(8, 5)), device="cpu")
    if data == "generator":
        own = torch.Generator().manual_seed(5)  # of both loaders, as `from_datasets` gives it
        first = DataLoader(train, BATCH, shuffle=True, generator=own)
        return DataLoaders(first, DataLoader(valid, 4, generator=own), device="cpu")
    return DataLoaders.from_datasets(train, valid, bs=BATCH, device="cpu", **kwargs)


SOURCES = {
    "counting": lambda train: DataLoader(train, BATCH, sampler=Counting(SAMPLES)),
    "shuffling": lambda train: DataLoader(train, BATCH, sampler=Shuffling(SAMPLES)),
    "stream": lambda train: DataLoader(Stream(train), BATCH),
}


def fit(learn):
    learn.fit(EPOCHS, 0.05)


def fit_twice(learn):
    learn.fit(2, 0.05)
    learn.between = torch.rand(2).tolist()
    learn.fit(1, 0.05)


def fine_tune(learn):
    """Four runs: a search for a rate, two fits, and a third one."""
    learn.found = learn.lr_find(num_it=12, show_plot=False, suggest_funcs=minimum)
    learn.fine_tune(2, learn.found.minimum, freeze_epochs=1)
    learn.between = learn.final_record, float(learn.model[0].weight.detach().sum()), torch.rand(2).tolist()
    learn.fit(1, 0.01)


def halves(model):
    return [list(model[0].parameters()), list(model[-1].parameters())]


def one_cycle(learn):
    learn.fit_one_cycle(EPOCHS, 0.05)


def job(data=None, cbs=list, fit=fit, cls=Learner, model=make_model, **kwargs):
    """What a job is made of."""
    return {"data": data or {}, "cbs": cbs, "fit": fit, "cls": cls, "model": model, "learner": kwargs}


def noise(x):
    return x + torch.rand_like(x) / 10


def sgd(params, lr):
    return SGD(params, lr, momentum=0.9)


JOBS = {
    "plain": job(opt_func=sgd),
    "one cycle": job(fit=one_cycle, wd=0.1),
    "workers": job({"data": "noisy", "num_workers": 2}),
    "persistent workers": job({"data": "noisy", "num_workers": 2, "persistent_workers": True}),
    "augmentation": job({"data": "noisy"}, fit=one_cycle),
    "weighted sampler": job({"data": "weighted"}),
    "own generator": job({"data": "generator"}),
    "counting sampler": job({"data": "counting"}),
    "shuffling sampler": job({"data": "shuffling"}),
    "counting sampler of validation": job({"data": "counting validation"}),
    "in order, last dropped": job({"shuffle": False, "drop_last": True}),
    "accumulation": job(cbs=lambda: [GradientAccumulation(n_batches=3)], fit=one_cycle),
    "accumulation of samples": job(cbs=lambda: [GradientAccumulation(n_samples=10)], fit=one_cycle),
    "accumulation by hand": job(cbs=lambda: [ByHand()]),
    "bf16": job(cbs=lambda: [MixedPrecision("bf16"), GradientClip(0.5)]),
    "fp16": job(cbs=lambda: [MixedPrecision("fp16", init_scale=2.0**40, growth_interval=4)]),
    "fine-tuned": job(fit=fine_tune, splitter=halves, opt_func=sgd, cbs=lambda: [EarlyStoppingCallback(patience=5)]),
    "early stopping": job(cbs=lambda: [EarlyStoppingCallback(patience=1, min_delta=0.5), SaveModelCallback()]),
    "plateau": job(cbs=lambda: [ReduceLROnPlateau(min_delta=0.5)]),
    "average": job(cbs=lambda: [Average(), SaveModelCallback()]),
    "EMA": job(cbs=lambda: [EMA(0.8), Logs(), SaveModelCallback()], model=lambda: make_model(norm=True)),
    "a teacher": job(cbs=lambda: [Teacher(), EMA(0.8, every=2)], model=lambda: make_model(norm=True)),
    "LBFGS": job(opt_func=partial(LBFGS, max_iter=3, line_search_fn="strong_wolfe")),
    "SWA": job(cbs=lambda: [SWA(1), ValidateEvery(3)], model=lambda: make_model(norm=True)),
    "SWA, budget": job(
        cbs=lambda: [SWA(0.4)], fit=lambda learn: learn.fit(n_steps=17), model=lambda: make_model(norm=True)
    ),
    "mixing": job(cbs=lambda: [BatchTransform(noise, valid=True), MixUp(), MixUp(1.0)]),
    "cancels": job(cbs=lambda: [Logs()]),
    "switched off": job(cbs=lambda: [WarmUp()]),
    "cut short": job(cbs=lambda: [CutShort(CancelTrainException)]),
    "cut short, no validation": job(cbs=lambda: [CutShort(CancelEpochException)]),
    "carried": job(cbs=lambda: [Carries()]),
    "several optimizers": job(cls=Two, lr=0.05, fit=lambda learn: learn.fit_one_cycle(EPOCHS)),
    "torch's schedulers": job(cbs=lambda: [
        TorchScheduler(lambda opt: OneCycleLR(opt, 0.1, total_steps=STEPS), step="batch")
    ]),
    "cyclic": job(cbs=lambda: [TorchScheduler(lambda opt: CyclicLR(opt, 0.01, 0.1, step_size_up=3, mode="exp_range",
                                                                   cycle_momentum=False))]),
    "torch's steps": job(cbs=lambda: [TorchScheduler(lambda opt: MultiStepLR(opt, [1, 2]), step="epoch")]),
    "torch's plateau": job(cbs=lambda: [
        TorchScheduler(lambda opt: TorchPlateau(opt, patience=0, threshold=0.9), step="epoch", monitor="valid_loss")
    ]),
    "budget": job(fit=lambda learn: learn.fit_one_cycle(n_steps=17, lr_max=0.05)),
    "restarts": job(fit=lambda learn: learn.fit_sgdr(2, 1, 0.05)),
    "validate often": job(cbs=lambda: [ValidateEvery(3), EarlyStoppingCallback(patience=9), SaveModelCallback()]),
    "batch norm": job(model=lambda: make_model(norm=True)),
    "unfreezing": job(cbs=lambda: [Unfreezes()]),
    "metrics in training": job(metrics=lambda: [mae, rmse(), AccumMetric(lambda p, t: (p - t).abs().max(), "worst")],
                               default_cbs=False, train_metrics=True),
}  # fmt: skip
"""What a resumed fit must not disturb."""

ONE_FIT = [name for name in JOBS if name != "fine-tuned"]

CARRIED = {
    "own generator": {"data": "generator"},
    "counting sampler": {"data": "counting"},
    "shuffling sampler": {"data": "shuffling"},
    "stream with a state": {"data": "stream"},
    "persistent workers": {"data": "noisy", "num_workers": 2, "persistent_workers": True},
}
JOBS |= {f"{name}, twice": job(data, fit=fit_twice) for name, data in CARRIED.items()}
"""Two fits, of which the second begins with loaders as the first one has left them."""


def make(name, folder=None, *more, resume=False, **checkpoint):
    """The learner of a job, with its checkpoints in a folder."""
    spec = JOBS[name]
    set_seed(3)
    kwargs = dict(spec["learner"])
    train_metrics = kwargs.pop("train_metrics", None)
    metrics = kwargs.pop("metrics", lambda: [mae])()
    cbs = [Order(), *spec["cbs"](), *more]
    if train_metrics:
        cbs = [TrainEvalCallback(), Recorder(train_metrics=True), *cbs]
    if folder is not None:
        cbs += [] if any(isinstance(cb, Kill) for cb in cbs) else [Kill()]  # callbacks that come and go are warned of
        cbs.append(CheckpointCallback(folder, resume=resume, **({"every": 1} | checkpoint)))
    kwargs = {"opt_func": AdamW, "lr": 0.05, "path": folder or "."} | kwargs
    return spec["cls"](loaders(**spec["data"]), spec["model"](), nn.MSELoss(), metrics=metrics, cbs=cbs, **kwargs)


def run(name, learn):
    """Train, without the table."""
    with learn.no_logging():
        JOBS[name]["fit"](learn)
    return learn


def outcome(learn, batches=None):
    """All that must be equal, bit by bit."""
    recorder = learn.recorder
    return {
        "weights": learn.model.state_dict(),
        "optimizer": [opt.state_dict() for opt in learn.opts],
        "table": recorder.values,
        "losses": [recorder.losses, recorder.step_losses],
        "rates": recorder.lrs,
        "schedules": recorder.hps,
        "rows": recorder.iters,
        "columns": recorder.metric_names,
        "earlier fits": [vars(fit) | {"log": fit.log[:-1]} for fit in recorder.history],  # without the time
        "order": learn.order.batches if batches is None else batches,
        "modes": [module.training for module in learn.model.modules()],
        "frozen": [p.requires_grad for p in learn.model.parameters()],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "steps": learn.train_iter,
        "done": learn.pct_train,
        "between fits": [getattr(learn, name, None) for name in ("found", "between")],
    }


def different(a, b, where=""):
    """The places at which two nested values differ."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [place for key in a for place in different(a[key], b[key], f"{where}.{key}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [place for i, pair in enumerate(zip(a, b, strict=True)) for place in different(*pair, f"{where}.{i}")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        equal = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    elif isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        equal = np.array_equal(a, b)
    else:
        equal = type(a) is type(b) and (a == b or (a != a and b != b))
    return [] if equal else [f"{where}: {a!r:.80} / {b!r:.80}"]
