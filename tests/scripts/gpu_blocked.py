"""Rank 1 fails while rank 0 waits for it in a collective of NCCL, whose first one it is. Both share a GPU."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import Callback, DataLoaders, Learner, distributed


class Block(Callback):
    def before_batch(self):
        if self.training and self.train_iter == 5:
            if distributed.rank() == 1:
                raise ZeroDivisionError("meant")
            ones = torch.ones(3, device="cuda")
            dist.all_reduce(ones)
            torch.cuda.synchronize()
            print("the collective has returned", file=sys.stderr, flush=True)


torch.cuda.set_device(0)
dist.init_process_group("cpu:gloo,cuda:nccl")
x = torch.randn(80, 4)
dls = DataLoaders.from_datasets(TensorDataset(x, (x.sum(1) > 0).long()), bs=4, device="cpu")
learn = Learner(dls, nn.Linear(4, 2), nn.CrossEntropyLoss(), cbs=Block())
with learn.distrib_ctx(timeout=60):
    learn.fit(3)
