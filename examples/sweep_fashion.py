"""Search for the rate, the size and the dropout of a small network on Fashion-MNIST.

    python -m learnerkit.sweep -j 2 examples/sweep.json examples/sweep_fashion.py              # two trials at a time
    python -m learnerkit.sweep --nproc 2 examples/sweep.json examples/sweep_fashion.py         # each on two processes
    python examples/sweep_fashion.py                                                           # no search: the defaults

The search is in sweeps/sweep; the same command goes on with it if it was stopped. Without a search the run is saved in
the folder `run`. Afterwards, in a notebook:

    from learnerkit import sweep
    found = sweep.load("sweeps/sweep")
    found.frame(), found.plot(), found.best, found.weights()
"""

import argparse

from torch import nn
from torch.utils.data import Subset

from learnerkit import CheckpointCallback, DataLoaders, Learner, accuracy, set_seed, sweep
from learnerkit.datasets import fashion_mnist_sample


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--images", type=int, help="train on so many alone (default: all)")
    args = parser.parse_args()

    p = sweep.params(lr=3e-3, hidden=128, dropout=0.2)
    set_seed(42)
    train_ds, valid_ds = fashion_mnist_sample()
    if args.images:
        train_ds = Subset(train_ds, range(args.images))
    dls = DataLoaders.from_datasets(train_ds, valid_ds, bs=64)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, p.hidden), nn.ReLU(), nn.Dropout(p.dropout), nn.Linear(p.hidden, 10)
    )
    # A trial runs in a folder of its own. One that was killed goes on from its checkpoint there. Outside of a search
    # the name of the folder keeps runs with other values apart.
    run = f"run/{p.hidden}-{p.dropout:g}-{p.lr:g}"
    cbs = [sweep.report("valid_loss"), CheckpointCallback(run, resume=True)]
    learn = Learner(dls, model, nn.CrossEntropyLoss(), metrics=accuracy, cbs=cbs)
    with learn.distrib_ctx(split_batches=True):
        learn.fit_one_cycle(args.epochs, p.lr)
    learn.save("fashion")


if __name__ == "__main__":
    main()
