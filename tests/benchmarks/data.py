"""Seconds for a shuffled epoch over rows in memory: a hand-written loop against DataLoaders; see run.py.

Of 60,000 images, and of a table with 13 columns as TabularData makes tensors of it. As in a training loop, a batch has
a name while the next one is read; without one, the allocator may or may not reuse its memory at once: up to 7 %.
"""

import json
import sys
import time

import pandas as pd
import torch
from run import take_turns
from torch.utils.data import TensorDataset

from learnerkit import DataLoaders, TabularData

BATCH = 128


def turns(rounds, tensors, loader):
    """The seconds of each; the tensors are those behind the loader."""

    def by_hand():
        start, seen = time.perf_counter(), 0
        for rows in torch.randperm(len(tensors[0])).split(BATCH):
            batch = [t.index_select(0, rows) for t in tensors]
            seen += len(batch[-1])
        return check(start, seen)

    def by_loader():
        start, seen = time.perf_counter(), 0
        for batch in loader:
            seen += len(batch[-1])
        return check(start, seen)

    def check(start, seen):
        took = time.perf_counter() - start
        assert seen == len(tensors[0])
        return took

    return take_turns(3 * rounds, by_hand, by_loader)


def main(rounds):
    torch.set_num_threads(1)
    images = torch.rand(60_000, 1, 28, 28), torch.randint(10, (60_000,))
    of_images = DataLoaders.from_datasets(TensorDataset(*images), bs=BATCH)
    names = [f"c{i}" for i in range(13)]
    frame = pd.DataFrame(torch.randint(10, (60_000, 13)).numpy(), columns=names).assign(y=images[1].numpy())
    table = TabularData.from_df(frame, "y", names[:8], names[8:], valid=None)
    found = turns(rounds, images, of_images.train)
    print(json.dumps([found, turns(rounds, table.train_ds.tensors, table.dataloaders(bs=BATCH).train)]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
