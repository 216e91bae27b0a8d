"""Train a network of torchvision on pictures in folders; the same on any number of processes.

    python examples/train_images.py                                   # 7,000 small pictures, which it first writes
    python examples/train_images.py --data photos --size 160          # your own: a folder for each class
    python examples/train_images.py --data full                       # all 70,000 of Fashion-MNIST
    python -m learnerkit.launch --nproc 2 examples/train_images.py    # or torchrun --nproc-per-node 2

Leaves OUT/images.safetensors, from which `load_learner(path, model, data=ImageData)` predicts for files, and prints
what it predicts for one.
"""

import argparse
from pathlib import Path

import torch

from learnerkit import ImageAugmentation, ImageData, MixUp, accuracy, distributed, set_seed, vision_learner
from learnerkit.datasets import FASHION_MNIST_CLASSES, fashion_mnist, fashion_mnist_files


def find_pictures(data, root, size):
    if data == "full":
        return ImageData(*fashion_mnist(root), FASHION_MNIST_CLASSES, size=size)
    folder = fashion_mnist_files(root / "fashion") if data == "sample" else Path(data)
    valid = "valid" if (folder / "valid").is_dir() else 0.2
    return ImageData.from_folder(folder, valid, size=size)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="sample", help="'sample' (shipped), 'full', or a folder of pictures")
    parser.add_argument("--root", type=Path, default=Path("data"), help="where the first two are, or are written to")
    parser.add_argument("--net", default="resnet18", help="a classifier of torchvision")
    parser.add_argument("--weights", help="such as DEFAULT, to fine-tune; they are downloaded (default: a new network)")
    parser.add_argument("--size", type=int, default=28, help="pixels of height and width")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--bs", type=int, default=64, help="pictures in a batch of all processes together")
    parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--mixup", action="store_true", help="train on means of two pictures, for many epochs")
    parser.add_argument("--out", type=Path, default=Path("models"))
    args = parser.parse_args()
    set_seed(42)
    data = find_pictures(args.data, args.root, args.size)
    dls = data.dataloaders(args.bs, augment=ImageAugmentation(scale=(0.7, 1)))
    cbs = MixUp() if args.mixup else None
    learn = vision_learner(dls, args.net, weights=args.weights, metrics=accuracy, model_dir=args.out, cbs=cbs)
    with learn.distrib_ctx(split_batches=True, sync_bn=torch.cuda.is_available()):
        fit = learn.fine_tune if args.weights else learn.fit_one_cycle
        fit(args.epochs, args.lr)
    path = learn.export("images")
    if distributed.is_main():
        picture, number = data.valid_ds.samples[0]
        print(f"saved {path}; {data.classes[number]}: predicted {learn.predict(picture).label}")


if __name__ == "__main__":
    main()
