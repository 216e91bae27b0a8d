"""Train with checkpoints until the file `end` is there; rank 1 of the first attempt fails when the file `fail` is."""

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import Callback, CheckpointCallback, DataLoaders, Learner, set_seed

FIRST = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


class Slowly(Callback):
    """Takes a little time for each batch, and fails where it is told to."""

    def before_batch(self):
        time.sleep(0.02)
        if FIRST and os.environ["RANK"] == "1" and Path("fail").exists():
            raise OSError("the disk is gone\x1b[2J\nand this is a second line")


Path(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
set_seed(1)
x = torch.randn(64, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
dls = DataLoaders.from_datasets(data, data, bs=8, device="cpu")
learn = Learner(dls, nn.Linear(4, 1), nn.MSELoss(), lr=0.01, cbs=[Slowly(), CheckpointCallback("runs", every=10**6)])
with learn.distrib_ctx(), learn.no_logging():
    learn.fit(10**6)
