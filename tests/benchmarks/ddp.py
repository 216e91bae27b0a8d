"""Microseconds a training step on two processes: a hand-written DDP loop against a Learner; see run.py."""

import json
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from run import take_turns
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from learnerkit import DataLoaders, Learner, distributed

BATCH, STEPS, EPOCHS = 16, 500, 2  # enough steps for the start of a fit, some tens of ms, to weigh little
LOSS = nn.CrossEntropyLoss()


def make_model():
    "1.06 million parameters."
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 800), nn.ReLU(), nn.Linear(800, 512), nn.ReLU(), nn.Linear(512, 40))


def by_hand(dataset, group):
    "A loop with a process group of its own, as a plain script has: on learnerkit's default one calls are compared."
    model = make_model()
    wrapped = DistributedDataParallel(model, process_group=group)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images, labels = dataset.tensors
    mine = slice(distributed.rank(), None, distributed.world_size())  # every rank takes its own of the row of batches
    for _ in range(EPOCHS):
        losses = []
        for x, y in list(zip(images.split(BATCH), labels.split(BATCH), strict=True))[mine]:
            loss = LOSS(wrapped(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.detach())
        torch.stack(losses).mean().item()
    return model


def by_learner(dataset, **options):
    dls = DataLoaders.from_datasets(dataset, bs=BATCH, shuffle=False)
    learn = Learner(dls, make_model(), LOSS, opt_func=partial(torch.optim.SGD, momentum=0.9, **options))
    with learn.distrib_ctx():
        learn.fit(EPOCHS, 1e-3)
    return learn.model


def without_fusing(dataset):
    "With the implementation of SGD that the hand-written loop has: what the loop alone costs."
    return by_learner(dataset, fused=False)


def main(rounds, file):
    torch.set_num_threads(1)
    distributed.join()
    torch.manual_seed(0)
    n = BATCH * STEPS * distributed.world_size()
    dataset = TensorDataset(torch.randn(n, 784), torch.randint(40, (n,)))
    trained = {}

    def timed(train):
        dist.barrier()
        start = time.perf_counter()
        trained[train] = train(dataset)
        dist.barrier()
        return (time.perf_counter() - start) / EPOCHS / STEPS * 1e6

    plain = partial(by_hand, group=dist.new_group())
    found = take_turns(rounds, *(partial(timed, train) for train in (plain, by_learner, without_fusing)))
    for tensors in zip(*(model.parameters() for model in trained.values()), strict=True):
        assert all(torch.allclose(tensors[0], t, atol=1e-6) for t in tensors), "they did not do the same"
    if distributed.is_main():
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
