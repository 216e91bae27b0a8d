"""check_distributed on a learner whose parts are all defined here: 'trained' trains it first, 'stuck' hangs."""

import sys
import time

import torch
from torch import nn
from torch.utils.data import Dataset

from learnerkit import Callback, DataLoaders, Learner
from learnerkit.preflight.ranks import check_distributed


class Squares(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        x = torch.tensor([i / 40, 1.0])
        return x, x[:1] ** 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x)


class Sleeper(Callback):
    def after_step(self):
        print("never seen")
        time.sleep(600)


dls = DataLoaders.from_datasets(Squares(), Squares(), bs=8, num_workers=1, device="cpu")
learn = Learner(dls, Net(), lambda pred, target: ((pred - target) ** 2).mean())
if sys.argv[1] == "trained":
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
    print("equal" if check_distributed(learn) else "not equal")
else:
    learn.add_cb(Sleeper())
    print("ready", flush=True)
    check_distributed(learn)
