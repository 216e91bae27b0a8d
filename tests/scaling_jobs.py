"""Learners with a fault put in on purpose: one rank is slow somewhere, or what all of them send takes long."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from helpers import step_gradient
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, Dataset

from learnerkit import Callback, DataLoaders, Learner, distributed

SECONDS = 0.03
BYTES_PER_SECOND = 1e7


class Took:
    """The seconds that everything put in here has really taken by now: a sleep lasts longer than it is told to."""

    seconds = 0.0


@contextmanager
def noted():
    """Note what the block takes."""
    start = time.perf_counter()
    yield
    Took.seconds += time.perf_counter() - start


def sleep(seconds):
    """Take a time, whatever else runs on this machine."""
    with noted():
        time.sleep(seconds)


class Counts(Callback):
    """Counts batches, and fails after so many."""

    def __init__(self):
        super().__init__()
        self.batches, self.seen, self.limit = 0, [], 10**9

    def after_batch(self):
        self.batches += 1
        self.seen.append(self.batches)
        if self.batches > self.limit:
            raise OSError("the disk is full")


MATRIX = torch.ones(256, 256)


def multiply(products):
    """Really compute: so many products of matrices."""
    with noted():
        for _ in range(products):
            MATRIX @ MATRIX


class Rows(Dataset):
    """Random rows; on the faulty rank a batch of eight takes `seconds`."""

    def __init__(self, seconds=0.0, n=512):
        self.x, self.seconds = torch.randn(n, 64, generator=torch.Generator().manual_seed(0)), seconds

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        if self.seconds:
            sleep(self.seconds / 8)
        return self.x[i], self.x[i, :1]


class Device(torch.autograd.Function):
    """Spends something in the forward pass, and twice that in the backward pass."""

    @staticmethod
    def forward(ctx, x, work, spend):
        ctx.work, ctx.spend = work, spend
        spend(work)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.spend(2 * ctx.work)
        return grad, None, None


class Net(nn.Module):
    """Three layers on a device that takes `work` seconds or products for them; `forward` may sleep besides."""

    def __init__(self, seconds=0.0, work=0, spend=sleep, width=256):
        super().__init__()
        self.seconds, self.work, self.spend = seconds, work, spend
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, x):
        if self.seconds:
            sleep(self.seconds)
        x = self.layers(x)
        return Device.apply(x, self.work, self.spend) if self.work else x


class SleepyCallback(Callback):
    """Sleeps after each batch."""

    def after_batch(self):
        sleep(SECONDS)


class SlowLinks(Callback):
    """Has DDP use a hook that takes a time by the bytes it reduces."""

    order = 12
    known = None

    def __init__(self, speed=BYTES_PER_SECOND):
        super().__init__()
        self.speed = speed

    def before_batch(self):
        ddp = getattr(step_gradient(self.learn), "ddp", None)  # from the second batch on
        if ddp is None or ddp is self.known:
            return
        self.known = ddp

        link = ThreadPoolExecutor(1)  # beside the backward pass, as a network; one bucket after the other

        def send(state, bucket, done):
            with noted():
                time.sleep(bucket.buffer().nbytes / self.speed)
                done.set_result(default_hooks.allreduce_hook(state, bucket).wait())

        def hook(state, bucket):
            done = torch.futures.Future()
            link.submit(send, state, bucket, done)
            return done

        ddp.register_comm_hook(distributed.group("gradients"), hook)


PART_OF = {
    "dataset": "waiting for input", "forward": "forward", "backward": "backward", "optimizer": "optimizer",
    "callback": "callback SleepyCallback", "twice": "", "products": "", "links": None, "none": None,
}  # fmt: skip


def make_learner(
    fault="none", rank=1, workers=0, work=0, n=512, *, seed=0, width=256, speed=BYTES_PER_SECOND, times=2, **kwargs
):
    """A learner with a fault of `PART_OF` on one rank; 'links' is one of all ranks.

    Args:
        fault, rank: what, and where.
        workers: of the loader.
        work: of a forward pass, on all ranks: seconds of sleep, or a whole number of matrix products.
        n: samples.
        seed: of the weights and the order of the samples.
        width: of the model.
        speed: of the links, in bytes per second.
        times: as much work on the faulty rank, where that is the fault.
        kwargs: the Learner's.
    """
    mine = fault if distributed.rank() == rank or fault == "links" else "none"
    torch.manual_seed(seed)
    data = Rows(SECONDS if mine == "dataset" else 0.0, n)
    dls = DataLoaders(DataLoader(data, 8, shuffle=True, num_workers=workers), DataLoader(data, 8), device="cpu")
    work, spend = work * (times if mine in ("twice", "products") else 1), multiply if isinstance(work, int) else sleep
    model = Net(SECONDS if mine == "forward" else 0.0, work, spend, width)
    if mine == "backward":
        model.layers[2].weight.register_hook(lambda grad: sleep(SECONDS))
    cbs = [SleepyCallback()] if mine == "callback" else [SlowLinks(speed)] if mine == "links" else []
    learn = Learner(dls, model, nn.MSELoss(), opt_func=torch.optim.SGD, lr=1e-3, cbs=cbs, **kwargs)
    if mine == "optimizer":
        learn._prepare_opt()
        learn.opt.register_step_pre_hook(lambda *_: sleep(SECONDS))
    return learn
