"""Seconds for a shuffled epoch over 60,000 images in memory: a hand-written loop against DataLoaders; see run.py."""

import json
import sys
import time

import torch
from run import take_turns
from torch.utils.data import TensorDataset

from learnerkit import DataLoaders

BATCH = 128


def main(rounds):
    torch.set_num_threads(1)
    images, labels = torch.rand(60_000, 1, 28, 28), torch.randint(10, (60_000,))
    dls = DataLoaders.from_datasets(TensorDataset(images, labels), bs=BATCH)

    def by_hand():
        start, seen = time.perf_counter(), 0
        for rows in torch.randperm(len(images)).split(BATCH):
            x, _ = images.index_select(0, rows), labels.index_select(0, rows)
            seen += len(x)
        return check(start, seen)

    def by_loaders():
        start, seen = time.perf_counter(), 0
        for x, _ in dls.train:
            seen += len(x)
        return check(start, seen)

    def check(start, seen):
        took = time.perf_counter() - start
        assert seen == len(images)
        return took

    print(json.dumps(take_turns(3 * rounds, by_hand, by_loaders)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
