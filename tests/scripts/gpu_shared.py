"""Two ranks that share a GPU, by gloo, as NCCL refuses that; prints as JSON how far they are from one process."""

import json
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import (
    Callback,
    CancelFitException,
    DataLoaders,
    GradientAccumulation,
    GradientClip,
    Learner,
    TerminateOnNaNCallback,
    accuracy,
    distributed,
    set_seed,
)

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda:0"


class Images(nn.Module):
    """Has norms, which see all samples of a step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class Viewed(Images):
    """Cannot run on an empty batch."""

    def forward(self, x):
        return super().forward(x.view(len(x), 1, 6, -1))


def data(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, 6, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.flatten(1)[:, :3].argmax(1))


def plain():
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3))


def learner(model=None, cbs=(), loss=None, **kwargs):
    """17 samples of training, so that the last batch has but one."""
    set_seed(3)
    dls = DataLoaders.from_datasets(data(17, 0), data(7, 1), bs=8, device=DEVICE)
    made = (plain() if model is None else model).double()
    return Learner(dls, made, loss or nn.CrossEntropyLoss(), metrics=accuracy, lr=0.05, cbs=list(cbs), **kwargs)


def result(learn, options):
    """The losses and weights of two epochs, and predictions."""
    context = learn.distrib_ctx(split_batches=True, **options)
    with learn.no_bar(), learn.no_logging(), context:
        learn.fit(2)
        preds = learn.get_preds()[0].to(DEVICE)
    row = [torch.tensor(learn.recorder.losses), torch.tensor(learn.recorder.values).flatten()]
    values = [p.detach().flatten() for p in learn.model.parameters()]
    return torch.cat([t.double().to(DEVICE) for t in (*row, *values, preds.flatten())])


JOBS = {
    "plain": ({}, dict),
    "norms": ({}, lambda: {"model": Images()}),
    "norms and a view": ({}, lambda: {"model": Viewed()}),
    "accumulated": ({}, lambda: {"cbs": [GradientAccumulation(n_batches=2), GradientClip(0.5)]}),
    "a loss by sums": ({}, lambda: {"loss": nn.CrossEntropyLoss(reduction="sum"), "loss_weight": "sum"}),
    "unused parameters": ({"find_unused_parameters": True}, dict),
    "shards": ({"shard": True}, dict),
}


class Spoil(Callback):
    def after_pred(self):
        if self.training and (self.epoch, self.iter) == (2, 0) and distributed.rank() == 1:
            self.learn.pred = self.pred * float("nan")


class Leave(Callback):
    def after_batch(self):
        if self.training and self.train_iter == 5 and distributed.rank() == 1:
            raise CancelFitException


if DEVICE != "cpu":
    torch.cuda.set_device(0)
dist.init_process_group("gloo")
apart = {}
for name, (options, make) in JOBS.items():
    several = result(learner(**make()), options)
    with distributed.alone(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = result(learner(**make()), {})
    apart[name] = (several - one).abs().max().item()
found = {"ranks": dist.get_world_size(), "apart": apart, "ends": {}}
for name, cbs in {"nan": [Spoil(), TerminateOnNaNCallback()], "cancel": [Leave()]}.items():
    learn = learner(cbs=cbs)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx():
        learn.fit(50)
    all_ranks = [None, None]
    dist.all_gather_object(all_ranks, learn.train_iter < 20)
    found["ends"][name] = all_ranks
if dist.get_rank() == 0:
    os.write(1, json.dumps(found).encode() + b"\n")
dist.destroy_process_group()
