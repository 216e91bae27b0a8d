"""Seconds a training step on two processes, with ScalingMonitor and without; see run.py.

A step takes 10 ms, of which the device sleeps most, so that what the monitor adds to it can be seen on a busy machine
too; or else the processor computes all the time.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from run import take_turns
from scaling_jobs import Net, multiply, sleep
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import DataLoaders, Learner, ScalingMonitor, distributed

BATCH, STEPS = 8, 300  # enough steps for the start of a fit, some tens of ms, to weigh little


def train(dataset, work, spend, monitored):
    """Seconds a step."""
    torch.manual_seed(0)
    dls = DataLoaders.from_datasets(dataset, bs=BATCH, shuffle=False, device="cpu")
    cbs = [ScalingMonitor()] if monitored else []
    learn = Learner(dls, Net(work=work, spend=spend), nn.MSELoss(), opt_func=torch.optim.SGD, cbs=cbs)
    with learn.no_logging(), learn.no_bar(), learn.distrib_ctx():
        dist.barrier()
        start = time.perf_counter()
        learn.fit(1, 1e-3)
        return (time.perf_counter() - start) / STEPS


def products_in(seconds):
    """How many matrix products take this time; the same number on all ranks."""
    multiply(20)
    start = time.perf_counter()
    multiply(100)
    return distributed.broadcast(max(1, round(seconds / (time.perf_counter() - start) * 100)))


def main(rounds, file):
    torch.set_num_threads(1)
    distributed.join()
    n = BATCH * STEPS * distributed.world_size()
    dataset = TensorDataset(torch.randn(n, 64), torch.randn(n, 1))
    # A third of the work is in the forward pass.
    found = {}
    for name, work, spend in (("asleep", 0.003, sleep), ("computing", products_in(0.003), multiply)):
        run = partial(train, dataset, work, spend)
        found[name] = take_turns(rounds, partial(run, False), partial(run, True), partial(run, False))
    if distributed.is_main():
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
