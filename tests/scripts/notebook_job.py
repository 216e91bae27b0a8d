"""A job for a notebook's cell and for the launcher; it writes its numbers into a file."""

import json
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import Callback, DataLoaders, Learner, accuracy, distributed, set_seed


class Draws(Callback):
    """Records a random number of each rank after every fit."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def after_fit(self):
        self.drawn.append([round(x, 9) for x in distributed.all_gather(float(torch.rand(())))])


set_seed(3)
data = torch.randn(150, 8)
train = TensorDataset(data, (data.sum(1) > 0).long())
valid = TensorDataset(data[:37], (data[:37].sum(1) > 0).long())
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 2))
draws = Draws()
learn = Learner(
    DataLoaders.from_datasets(train, valid, bs=16), model, nn.CrossEntropyLoss(), metrics=accuracy, cbs=draws
)
facts = []
with learn.distrib_ctx(*map(int, sys.argv[2:])):
    for _ in range(2):
        learn.fit_one_cycle(2, 1e-2)
        facts.append([learn.recorder.values, learn.recorder.losses, learn.recorder.lrs])
    set_seed(4)
    learn.fit(1, 1e-3, cbs=[])
    facts.append(learn.recorder.values)
    facts.append(learn.validate())
    facts.append([x.tolist() for x in learn.get_preds()])
    if distributed.is_main():
        facts += [p.tolist() for p in learn.model.parameters()]
        facts += [draws.drawn, float(torch.rand(()))]
        with open(sys.argv[1], "w") as file:
            json.dump(facts, file)
