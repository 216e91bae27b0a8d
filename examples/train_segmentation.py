"""Train a U-Net that finds circles and squares in pictures; the same on any number of processes.

    python examples/train_segmentation.py                                    # drawn pictures, a small encoder
    python examples/train_segmentation.py --data scans --classes cell wall   # yours: scans/images and scans/masks
    python examples/train_segmentation.py --data scans --classes cell wall --net resnet34 --weights DEFAULT --size 256
    python -m learnerkit.launch --nproc 2 examples/train_segmentation.py     # or torchrun --nproc-per-node 2

A mask has the name of its picture, ends in .png, and has the number of a class for each pixel: 0 is the background.
Leaves OUT/segmentation.pt2, from which `load_learner(path, data=ImageData)` predicts masks for files.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from learnerkit import Dice, ImageData, IoU, accuracy, distributed, set_seed, unet_learner
from learnerkit.datasets import SHAPES, drawn_shapes


def small_encoder():
    "A chain of convolutions, three of which halve the size, without statistics of batches; the classifier is cut off."
    widths = [3, 16, 32, 64]
    layers = [
        nn.Sequential(nn.Conv2d(n_in, n_out, 3, stride=2, padding=1), nn.ReLU())
        for n_in, n_out in zip(widths, widths[1:], strict=False)
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 1))


def mask_of(path):
    return path.parent.parent / "masks" / f"{path.stem}.png"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with pictures in images/ and masks in masks/")
    parser.add_argument("--classes", nargs="+", help="the names of the classes of your masks, from number 1 on")
    parser.add_argument("--net", help="a classifier of torchvision for the encoder (default: a small one)")
    parser.add_argument("--weights", help="such as DEFAULT, to fine-tune; they are downloaded (default: a new network)")
    parser.add_argument("--augment", action="store_true", help="crop and mirror pictures with their masks")
    parser.add_argument("--size", type=int, default=32, help="pixels of height and width")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--bs", type=int, default=8, help="pictures in a batch of all processes together")
    parser.add_argument("--lr", type=float, default=1e-2, help="the highest learning rate")
    parser.add_argument("--out", type=Path, default=Path("models"))
    args = parser.parse_args()
    set_seed(42)
    folder = args.data or drawn_shapes("data/shapes", 200)
    classes = ["background", *args.classes] if args.classes else SHAPES
    files = sorted((folder / "images").iterdir())
    data = ImageData.from_func(files, mask_of, 0.2, targets="masks", classes=classes, size=args.size)
    dls = data.dataloaders(args.bs, augment=args.augment)
    net, norm = (args.net, nn.BatchNorm2d) if args.net else (small_encoder, None)
    metrics = [accuracy, Dice, IoU]
    learn = unet_learner(dls, net, weights=args.weights, metrics=metrics, norm=norm, model_dir=args.out)
    with learn.distrib_ctx(split_batches=True, sync_bn=torch.cuda.is_available()):
        fit = learn.fine_tune if args.weights else learn.fit_one_cycle
        fit(args.epochs, args.lr)
    path = learn.export("segmentation.pt2")
    if distributed.is_main():
        picture, _ = data.valid_ds.samples[0]
        numbers, pixels = learn.predict(picture).label.unique(return_counts=True)
        found = ", ".join(f"{n} of {classes[i]}" for i, n in zip(numbers.tolist(), pixels.tolist(), strict=True))
        print(f"saved {path}; pixels of {picture.name}: {found}")


if __name__ == "__main__":
    main()
