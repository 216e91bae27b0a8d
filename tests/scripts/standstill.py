"""A rank that stops, or is slow, in the middle of a fit. Arguments: how (stop, slow, wait) and which rank."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import Callback, DataLoaders, Learner, distributed

HOW, WHO = sys.argv[1], int(sys.argv[2])


class Standstill(Callback):
    def before_batch(self):
        if self.training and self.train_iter == 5 and distributed.rank() == WHO:
            if HOW == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif HOW == "slow":
                time.sleep(600)
            else:  # a collective that nobody else comes to
                dist.barrier()


torch.set_num_threads(1)
x = torch.randn(80, 4)
learn = Learner(
    DataLoaders.from_datasets(TensorDataset(x, (x.sum(1) > 0).long()), bs=4),
    nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)),  # with buffers, which DDP sends before each forward pass
    nn.CrossEntropyLoss(),
    cbs=Standstill(),
)
learn.create_opt()  # with the first optimizer torch imports its compiler, on a busy machine for more than 4 s
distributed.barrier()  # so that no rank is late for the fit
with learn.distrib_ctx(timeout=4, split_batches=True, sync_bn=False):
    learn.fit(3)
