"""What a larger batch does: 8 to 512 images a step, with one rate for all, and with the rate scaled to the batch.

    python examples/batch_and_rate.py                                   # half a minute
    python examples/batch_and_rate.py --opt adam                        # the square-root rule instead of the linear one
    python -m learnerkit.launch --nproc 2 examples/batch_and_rate.py    # each process takes half of every batch

All runs see the same images equally often, so a larger batch means fewer steps. The rate is right at `--at` images.
"""

import argparse
import time
from functools import partial

from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.data import Subset

from learnerkit import DataLoaders, Learner, accuracy, distributed, linear_warmup, scaled_lr, set_seed
from learnerkit.datasets import fashion_mnist_sample

OPTIMIZERS = {"sgd": (partial(SGD, momentum=0.9), 0.01), "adam": (AdamW, 1e-3)}  # with rates for 64 images


def make_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))


def train(data, bs, lr, args):
    """Train at `bs` images a step; return the rate after the warm-up, the accuracy, and the seconds it took."""
    set_seed(args.seed)
    dls = DataLoaders.from_datasets(*data, bs=bs, valid_bs=500)
    opt_func, _ = OPTIMIZERS[args.opt]
    learn = Learner(dls, make_model(), nn.CrossEntropyLoss(), opt_func=opt_func, metrics=accuracy)
    with learn.distrib_ctx(split_batches=True), learn.no_logging(), learn.no_bar():
        start = time.perf_counter()
        learn.fit(args.epochs, linear_warmup(0.1, lr))
        seconds = time.perf_counter() - start
    return learn.recorder.lrs[-1], learn.final_record[-1], seconds


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--opt", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--at", type=int, default=64, help="images a step at which the rate is right")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--quick", action="store_true", help="fewer images and sizes, to see that it runs")
    return parser.parse_args()


def main():
    args = parse_args()
    data, sizes = fashion_mnist_sample(), (8, 16, 32, 64, 128, 256, 512)
    if args.quick:
        data, sizes, args.epochs = (Subset(data[0], range(2000)), data[1]), (8, 64, 512), 2
    _, lr = OPTIMIZERS[args.opt]
    rows = []
    for bs in sizes:
        rows.append([*train(data, bs, lr, args), *train(data, bs, scaled_lr(lr, at=args.at), args)])
    if distributed.is_main():
        columns = f"{'rate':>10}{'accuracy':>10}{'time':>8}"
        print(f"\n{'':>5}{'the rate as it is':>28}{'scaled to the batch':>28}\n{'batch':>5}{columns}{columns}")
        for bs, row in zip(sizes, rows, strict=True):
            cells = [f"{lr:>10.4f}{right:>10.3f}{seconds:>6.1f} s" for lr, right, seconds in (row[:3], row[3:])]
            print(f"{bs:>5}{''.join(cells)}")


if __name__ == "__main__":
    main()
