"""What GradientNoiseScale costs of a step, on one process or, under a launcher, on several; see run.py.

Processor time, which a busy machine blurs less; of several ranks it leaves out the time in which they wait.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path

import torch
from run import take_turns
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import DataLoaders, GradientAccumulation, GradientNoiseScale, Learner, distributed

BATCH, STEPS = 96, 60  # samples of a step on each rank; some 10 ms


def train(dataset, n_batches, norm, measures):
    """Seconds a step: of a model with 1.06 million parameters, the gradient of each step measured or of none."""
    torch.manual_seed(0)
    extra = [nn.BatchNorm1d(800), nn.Dropout()] if norm else []
    model = nn.Sequential(nn.Linear(784, 800), *extra, nn.ReLU(), nn.Linear(800, 512), nn.ReLU(), nn.Linear(512, 40))
    cbs = [GradientNoiseScale(every=1)] if measures else []
    cbs += [GradientAccumulation(n_batches=n_batches)] if n_batches > 1 else []
    dls = DataLoaders.from_datasets(dataset, bs=BATCH // n_batches, shuffle=False, device="cpu")
    learn = Learner(dls, model, nn.CrossEntropyLoss(), opt_func=torch.optim.SGD, cbs=cbs)
    with learn.no_logging(), learn.no_bar(), learn.distrib_ctx():
        start = time.process_time()
        learn.fit(1, 1e-3)
        return (time.process_time() - start) / STEPS


def main(rounds, file):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    n = BATCH * STEPS * distributed.world_size()
    dataset = TensorDataset(torch.randn(n, 784), torch.randint(40, (n,)))
    # (batches of a step, steps between two that are measured): the defaults
    jobs = {"a batch in quarters": (1, 200), "a batch in quarters, BatchNorm": (1, 200), "accumulation": (2, 20)}
    jobs = {"2 ranks": (1, 20)} if distributed.world_size() > 1 else jobs
    found = {}
    for name, (n_batches, every) in jobs.items():
        run = partial(train, dataset, n_batches, "Norm" in name)
        times = take_turns(rounds, partial(run, False), partial(run, True))
        found[name] = [(plain, (measured - plain) / every) for plain, measured in times]
    if distributed.is_main():
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
