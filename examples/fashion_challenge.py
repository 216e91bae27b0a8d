"""Fashion-MNIST from random weights in 5, 20 or 50 epochs, over several seeds.

    python examples/fashion_challenge.py                    # on a GPU; a part of it by --seeds 2 --first 8
    python examples/fashion_challenge.py --data sample --epochs 5 --seeds 2 --width 1    # a few minutes on a CPU

Jeremy Howard asked for it in his course of 2022, and had an accuracy of 0.932, 0.938 and 0.946. Prints the accuracy on
the test images for each seed, and the mean: plain, and as the mean over each image and its mirror image. The network is
a wide residual one. All else is callbacks: crops and mirror images, erased rectangles, an average of the weights and,
on a GPU, bf16 and channels-last. The more epochs, the stronger the augmentation.
"""

import argparse
import time
from functools import partial
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from learnerkit import EMA, BatchTransform, ChannelsLast, DataLoaders, ImageAugmentation, Learner, set_seed
from learnerkit.datasets import fashion_mnist, fashion_mnist_sample


def norm_relu(n):
    return [nn.BatchNorm2d(n), nn.ReLU(inplace=True)]


class Block(nn.Module):
    "Two convolutions beside a shortcut (Zagoruyko and Komodakis, 'Wide Residual Networks', arXiv:1605.07146)."

    def __init__(self, n_in, n_out, stride):
        super().__init__()
        conv = partial(nn.Conv2d, bias=False)
        self.norm = nn.Sequential(*norm_relu(n_in))
        self.convs = nn.Sequential(conv(n_in, n_out, 3, stride, 1), *norm_relu(n_out), conv(n_out, n_out, 3, 1, 1))
        self.shortcut = conv(n_in, n_out, 1, stride) if n_in != n_out else None

    def forward(self, x):
        y = self.norm(x)
        return self.convs(y) + (x if self.shortcut is None else self.shortcut(y))


def make_model(width):
    "16 layers: three stages of two blocks, with `width` times 16, 32 and 64 channels."
    sizes = [16, 16 * width, 32 * width, 64 * width]
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False))
    for i, (n_in, n_out) in enumerate(zip(sizes, sizes[1:], strict=False)):
        model += nn.Sequential(Block(n_in, n_out, 2 if i else 1), Block(n_out, n_out, 1))
    model += nn.Sequential(*norm_relu(sizes[-1]), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], 10))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def erase(images: Tensor, share: float, most: float = 0.4) -> Tensor:
    "Put noise over a rectangle of a share of the images (Zhong et al., 'Random Erasing', arXiv:1708.04896)."

    def inside(size):
        "Which of `size` rows or columns are in a range that is drawn for each image."
        length, start = torch.rand(2, len(images), 1, device=images.device).unbind()
        length = length * most
        start = start * (1 - length)
        places = (torch.arange(size, device=images.device) + 0.5) / size
        return (places >= start) & (places < start + length)

    _, _, height, width = images.shape
    hidden = inside(height)[:, None, :, None] & inside(width)[:, None, None, :]
    hidden &= torch.rand(len(images), 1, 1, 1, device=images.device) < share
    return torch.where(hidden, torch.rand_like(images), images)


def run(data, epochs, seed, args):
    "Train once, and return the accuracy without and with test time augmentation."
    set_seed(seed)
    dls = DataLoaders.from_datasets(*data, bs=args.bs, valid_bs=1000, device=args.device)
    strength = min(1.0, max(0.0, (epochs - 5) / 45))  # 0 for 5 epochs, 1 for 50
    last_steps = 0.02 * epochs * len(dls.train)  # the average is over these, roughly
    cbs = [
        BatchTransform(ImageAugmentation(scale=(0.9 - 0.15 * strength, 1), ratio=(0.9, 1.1))),
        BatchTransform(partial(erase, share=0.5 * strength)),
        EMA(max(0.0, 1 - 1 / last_steps)),
    ]
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    learn = Learner(dls, make_model(args.width), loss, wd=args.wd, cbs=cbs)
    if dls.device.type == "cuda":
        learn.to_bf16().add_cbs(ChannelsLast())
    with learn.no_bar(), learn.no_logging():
        learn.fit_one_cycle(epochs, args.lr)
        both, targets = learn.tta(
            n=1, batch_tfms=partial(torch.flip, dims=[-1]), beta=None, act=partial(torch.softmax, dim=1)
        )
    mirrored, plain = both
    return [(preds.argmax(1) == targets).float().mean().item() for preds in (plain, mirrored + plain)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=["full", "sample"], default="full", help="70,000 images, or 7,000 that ship")
    parser.add_argument("--root", type=Path, default=Path("data"), help="where the full set is, or is downloaded to")
    parser.add_argument("--images", type=int, help="train on the first so many (default: all)")
    parser.add_argument("--epochs", type=int, nargs="+", default=[5, 20, 50])
    parser.add_argument("--seeds", type=int, default=10, help="how many trainings for each number of epochs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--width", type=int, default=6, help="times 16, 32 and 64 channels")
    parser.add_argument("--bs", type=int, default=128)
    parser.add_argument("--lr", type=float, default=4e-3, help="the highest learning rate")
    parser.add_argument("--wd", type=float, default=0.05)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    train, valid = fashion_mnist_sample() if args.data == "sample" else fashion_mnist(args.root)
    data = TensorDataset(*(t[: args.images] for t in train.tensors)), valid
    print("epochs  seed  accuracy  with mirror images  seconds")
    for epochs in args.epochs:
        found = []
        for seed in range(args.first, args.first + args.seeds):
            start = time.perf_counter()
            found.append(run(data, epochs, seed, args))
            plain, mirrored = found[-1]
            print(
                f"{epochs:>6}  {seed:>4}  {plain:.4f}    {mirrored:.4f}  {time.perf_counter() - start:>18.1f}",
                flush=True,
            )
        if len(found) > 1:
            means = "    ".join(f"{mean(each):.4f} +- {stdev(each):.4f}" for each in zip(*found, strict=True))
            print(f"{epochs:>6}  mean  {means}", flush=True)


if __name__ == "__main__":
    main()
