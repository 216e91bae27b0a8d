"""A trial that trains, on any number of processes, with a checkpoint after each epoch."""

import os
import time
from pathlib import Path

from torch import nn
from torch.utils.data import Subset

from learnerkit import Callback, CheckpointCallback, DataLoaders, Learner, set_seed, sweep
from learnerkit.datasets import fashion_mnist_sample

p = sweep.params(lr=3e-3)
Path("pid").write_text(str(os.getpid()))
set_seed(0)
train, valid = fashion_mnist_sample()
dls = DataLoaders.from_datasets(Subset(train, range(512)), Subset(valid, range(256)), bs=64)
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
learn = Learner(dls, model, nn.CrossEntropyLoss(), cbs=[sweep.report("valid_loss"), CheckpointCallback("run")])
if "SLEEP" in os.environ:
    learn.add_cb(Callback(before_train=lambda cb: time.sleep(float(os.environ["SLEEP"]))))
with learn.distrib_ctx(split_batches=True):
    learn.fit(4, p.lr)
learn.save("net")
