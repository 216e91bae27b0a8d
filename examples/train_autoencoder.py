"""Train a dense autoencoder on Fashion-MNIST, on any number of processes; go on training it later.

    python -m learnerkit.launch --nproc 2 examples/train_autoencoder.py
    python examples/train_autoencoder.py --resume                 # some more epochs, from the saved file

Leaves OUT/autoencoder.pth (weights and the optimizer's state) and OUT/reconstructions.png: images above what the
network makes of them.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import DataLoaders, Learner, SaveModelCallback, on_rank0, set_seed, world
from learnerkit.datasets import fashion_mnist_sample


class Autoencoder(nn.Module):
    """784 - 128 - 128 - 128 - 784."""

    def __init__(self, pixels=784, hidden=128):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.decoder = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, pixels), nn.Sigmoid())

    def forward(self, images):
        return self.decoder(self.encoder(images.flatten(1))).view_as(images)


def to_itself(dataset):
    """The images as inputs and as targets."""
    images = dataset.tensors[0]
    return TensorDataset(images, images)


@on_rank0
def draw(images, made, path):
    """Save a picture of `images` above what was `made` of them."""
    import matplotlib

    matplotlib.use("Agg")  # draws without a display
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(2, len(images), figsize=(len(images), 2.4), layout="constrained")
    for row, title, pictures in zip(axes, ("originals", "reconstructions"), (images, made), strict=True):
        for ax, picture in zip(row, pictures, strict=True):
            ax.imshow(picture.squeeze(), cmap="gray_r", vmin=0, vmax=1)
            ax.axis("off")
        row[0].set_title(title, loc="left", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=100)
    plt.close(fig)
    print(f"drew {path}")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--bs", type=int, default=64, help="images in a batch of all processes together")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--resume", action="store_true", help="go on from OUT/autoencoder.pth if it is there")
    parser.add_argument("--out", type=Path, default=Path("models"), help="directory of the saved model and the picture")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def main():
    args = parse_args()
    set_seed(args.seed)
    train_ds, valid_ds = map(to_itself, fashion_mnist_sample())
    dls = DataLoaders.from_datasets(train_ds, valid_ds, bs=args.bs)
    learn = Learner(dls, Autoencoder(), nn.MSELoss(), lr=args.lr, model_dir=args.out)
    if args.resume and (args.out / "autoencoder.pth").is_file():
        learn.load("autoencoder")  # on every rank; weights and optimizer state go where the model is
        valid_loss = learn.validate()[0]
        if world.is_main():
            print(f"resumed with a validation loss of {valid_loss:.6f}")
    with learn.distrib_ctx(split_batches=True):
        learn.fit(args.epochs, cbs=SaveModelCallback(fname="autoencoder", with_opt=True))
    path = learn.save("autoencoder")  # written by rank 0
    if world.is_main():
        print(f"saved {path}")
    some = torch.utils.data.Subset(valid_ds, range(10))
    made, images = learn.get_preds(dl=torch.utils.data.DataLoader(some, 10))
    draw(images, made, args.out / "reconstructions.png")


if __name__ == "__main__":
    main()
