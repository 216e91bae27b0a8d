"""Two fits on two processes, in a script that the launcher starts or in the cell of a notebook; see run.py."""

import json
import sys
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import Callback, DataLoaders, Learner, distributed


class Begins(Callback):
    """When rank 0 first began to train."""

    order = -100

    def __init__(self):
        super().__init__()
        self.moment = None

    def before_fit(self):
        self.moment = self.moment or time.time()


def main(nproc=None):
    """Print when the first fit began and how many seconds the second took."""
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(32_000, 784), torch.randint(40, (32_000,)))  # 100 MB
    model = nn.Sequential(nn.Linear(784, 800), nn.ReLU(), nn.Linear(800, 512), nn.ReLU(), nn.Linear(512, 40))
    begins = Begins()
    learn = Learner(DataLoaders.from_datasets(dataset, bs=16), model, nn.CrossEntropyLoss(), lr=1e-3, cbs=begins)
    start = time.time()
    with learn.distrib_ctx(nproc), learn.no_bar(), learn.no_logging():
        learn.fit(1)
        second = time.time()
        learn.fit(1)
        took = time.time() - second
    if distributed.is_main():
        print(json.dumps({"start": start, "begun": begins.moment, "second": took}), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
