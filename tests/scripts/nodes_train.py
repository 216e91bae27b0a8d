"""Train on whatever processes there are; rank 0 writes the losses and the weights to a file.

Arguments: the file; how many epochs, at most, if no file `enough` appears; seconds to sleep at each batch.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import Callback, CancelFitException, DataLoaders, Learner, distributed, on_rank0, set_seed

path, epochs, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


class Pace(Callback):
    def before_batch(self):
        time.sleep(pause)

    def after_epoch(self):
        if Path("enough").exists():
            raise CancelFitException


@on_rank0
def write(learn):
    facts = {
        "losses": learn.recorder.losses,
        "values": learn.recorder.values,
        "weights": [p.tolist() for p in learn.model.parameters()],
        "world": distributed.world_size(),
        "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
        "address": os.environ.get("MASTER_ADDR"),
    }
    path.write_text(json.dumps(facts))


set_seed(0)
x = torch.randn(51, 4, dtype=torch.float64)
dls = DataLoaders.from_datasets(TensorDataset(x[:34], x[:34].sum(1)), TensorDataset(x[34:], x[34:].sum(1)), bs=6)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0)).double()
learn = Learner(dls, model, nn.MSELoss(), opt_func=torch.optim.SGD, cbs=Pace)
if distributed.rank() == 0:
    print(f"{distributed.world_size()} ranks begin", flush=True)
    Path(f"begun-{distributed.world_size()}").touch()
with learn.distrib_ctx(split_batches=True):
    learn.fit(epochs, 1e-2)
write(learn)
