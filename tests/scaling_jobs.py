"""Learners with a fault put in on purpose: one rank sleeps somewhere, or what all of them send takes long."""

import time

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, Dataset

from learnerkit import Callback, DataLoaders, Learner, world

SECONDS = 0.03
BYTES_PER_SECOND = 1e7


class Rows(Dataset):
    """Random rows; on the faulty rank a batch of eight takes `seconds`."""

    def __init__(self, seconds=0.0, n=512):
        self.x, self.seconds = torch.randn(n, 64, generator=torch.Generator().manual_seed(0)), seconds

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        if self.seconds:
            time.sleep(self.seconds / 8)
        return self.x[i], self.x[i, :1]


class Device(torch.autograd.Function):
    """Takes a time in the forward pass, and twice that in the backward pass, whatever else runs on this machine."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(2 * ctx.seconds)
        return grad, None


class Net(nn.Module):
    """Three layers on a device that takes `work` seconds for them; `forward` may sleep besides."""

    def __init__(self, seconds=0.0, work=0.0):
        super().__init__()
        self.seconds, self.work = seconds, work
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, x):
        if self.seconds:
            time.sleep(self.seconds)
        x = self.layers(x)
        return Device.apply(x, self.work) if self.work else x


class SleepyCallback(Callback):
    """Sleeps after each batch."""

    def after_batch(self):
        time.sleep(SECONDS)


class SlowLinks(Callback):
    """Has DDP use a hook that sleeps by the bytes it reduces."""

    order = 12
    known = None

    def before_train(self):
        if world.world_size() == 1 or self.model is self.known:
            return
        self.known = self.model

        def hook(state, bucket):
            time.sleep(bucket.buffer().nbytes / BYTES_PER_SECOND)
            return default_hooks.allreduce_hook(state, bucket)

        self.model.register_comm_hook(world.group("gradients"), hook)


PART_OF = {
    "dataset": "waiting for input", "forward": "forward", "backward": "backward", "optimizer": "optimizer",
    "callback": "callback SleepyCallback", "twice": "", "links": None, "none": None,
}  # fmt: skip


def make_learner(fault="none", rank=1, workers=0, work=0.0, n=512, **kwargs):
    """A learner with a fault of `PART_OF` on one rank; 'links' is one of all ranks."""
    mine = fault if world.rank() == rank or fault == "links" else "none"
    torch.manual_seed(0)
    data = Rows(SECONDS if mine == "dataset" else 0.0, n)
    dls = DataLoaders(DataLoader(data, 8, shuffle=True, num_workers=workers), DataLoader(data, 8), device="cpu")
    model = Net(SECONDS if mine == "forward" else 0.0, work * (2 if mine == "twice" else 1))
    if mine == "backward":
        model.layers[2].weight.register_hook(lambda grad: time.sleep(SECONDS))
    cbs = [SleepyCallback()] if mine == "callback" else [SlowLinks()] if mine == "links" else []
    learn = Learner(dls, model, nn.MSELoss(), opt_func=torch.optim.SGD, lr=1e-3, cbs=cbs, **kwargs)
    if mine == "optimizer":
        learn._prepare_opt()
        learn.opt.register_step_pre_hook(lambda *_: time.sleep(SECONDS))
    return learn
