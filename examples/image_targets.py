"""Train on pictures with several labels, numbers or points; the same on any number of processes.

    python examples/image_targets.py classes                              # which shapes are in a picture
    python examples/image_targets.py numbers                              # how many they are
    python examples/image_targets.py points                               # where the largest one is
    python examples/image_targets.py points --net resnet18 --size 64      # a network of torchvision or timm
    python -m learnerkit.launch --nproc 2 examples/image_targets.py points

The pictures are drawn first; the table of what is in them is data/shapes/shapes.csv. Leaves OUT/TARGETS.pt2, from which
`load_learner(path, data=ImageData)` predicts for files, and prints what it predicts for one.
"""

import argparse
from pathlib import Path

import pandas as pd
import torch
from torch import nn
from torchvision.transforms import v2

from learnerkit import ImageData, distributed, load_learner, set_seed, vision_learner
from learnerkit.datasets import drawn_shapes

COLUMNS = {"classes": "shapes", "numbers": "n", "points": ["cx", "cy"]}


def small_network():
    "Convolutions without statistics of batches; the last three layers are cut off."
    widths = [3, 16, 32, 64]
    layers = [
        nn.Sequential(nn.Conv2d(n_in, n_out, 3, stride=2, padding=1), nn.ReLU())
        for n_in, n_out in zip(widths, widths[1:], strict=False)
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", choices=COLUMNS)
    parser.add_argument("--net", help="a classifier of torchvision or timm (default: a small one)")
    parser.add_argument("--weights", help="such as DEFAULT, to fine-tune; they are downloaded (default: a new network)")
    parser.add_argument("--pictures", type=int, default=400)
    parser.add_argument("--size", type=int, default=32, help="pixels of height and width")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--bs", type=int, default=16, help="pictures in a batch of all processes together")
    parser.add_argument("--lr", type=float, default=1e-2, help="the highest learning rate")
    parser.add_argument("--out", type=Path, default=Path("models"))
    args = parser.parse_args()
    set_seed(42)
    folder = drawn_shapes("data/shapes", args.pictures)
    options = {"targets": args.targets, "delim": " ", "path": folder, "size": args.size}
    data = ImageData.from_df(pd.read_csv(folder / "shapes.csv"), "image", COLUMNS[args.targets], 0.2, **options)
    dls = data.dataloaders(args.bs, transform=v2.RandomHorizontalFlip())
    learn = vision_learner(dls, args.net or small_network, weights=args.weights, model_dir=args.out)
    with learn.distrib_ctx(split_batches=True, sync_bn=torch.cuda.is_available()):
        fit = learn.fine_tune if args.weights else learn.fit_one_cycle
        fit(args.epochs, args.lr)
    path = learn.export(f"{args.targets}.pt2")
    if distributed.is_main():
        picture = data.valid_ds.samples[0][0]
        print(f"saved {path}; {picture.name}: {load_learner(path, data=ImageData).predict(picture).label}")


if __name__ == "__main__":
    main()
