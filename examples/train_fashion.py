"""Train a small convolutional network on Fashion-MNIST; the script is the same on any number of processes.

    python -m learnerkit.launch --nproc 2 examples/train_fashion.py     # two processes of this machine
    torchrun --nproc-per-node 2 examples/train_fashion.py               # the same
    python examples/train_fashion.py                                    # one process
    python -m learnerkit.launch --nproc 2 --max-restarts 3 examples/train_fashion.py --resume  # restarts

Each batch of `--bs` images is cut into one piece per process, so all of these come to the same numbers, up to rounding.
"""

import argparse
from pathlib import Path

from torch import nn

from learnerkit import CheckpointCallback, DataLoaders, Learner, accuracy, distributed, set_seed
from learnerkit.datasets import fashion_mnist, fashion_mnist_sample


def make_model():
    return nn.Sequential(
        *[nn.Conv2d(1, 32, 5, stride=2, padding=2), nn.ReLU()],  # 14 x 14
        *[nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()],  # 7 x 7
        *[nn.Flatten(), nn.Linear(64 * 7 * 7, 10)],
    )


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--bs", type=int, default=64, help="images in a batch of all processes together")
    parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--data", choices=["sample", "full"], default="sample", help="7,000 shipped images, or 70,000")
    parser.add_argument("--root", type=Path, default=Path("data"), help="where the full set is, or is downloaded to")
    parser.add_argument("--out", type=Path, default=Path("models"), help="directory of the saved model")
    parser.add_argument("--resume", action="store_true", help="save the run in OUT/run, and go on from what is there")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def main():
    args = parse_args()
    set_seed(args.seed)
    train_ds, valid_ds = fashion_mnist_sample() if args.data == "sample" else fashion_mnist(args.root)
    dls = DataLoaders.from_datasets(train_ds, valid_ds, bs=args.bs)
    learn = Learner(dls, make_model(), nn.CrossEntropyLoss(), metrics=accuracy, model_dir=args.out)
    saving = CheckpointCallback(args.out / "run", every=50, resume=True) if args.resume else None
    with learn.distrib_ctx(split_batches=True):
        learn.fit_one_cycle(args.epochs, args.lr, cbs=saving)
    path = learn.save("fashion")  # written once, by rank 0
    if distributed.is_main():
        print(f"saved {path}")


if __name__ == "__main__":
    main()
