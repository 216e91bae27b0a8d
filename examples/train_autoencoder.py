"""Train a dense autoencoder on Fashion-MNIST, on any number of processes; it may be stopped, and goes on later.

    python -m learnerkit.launch --nproc 2 examples/train_autoencoder.py
    python examples/train_autoencoder.py --resume                 # the epochs that are left, if it was stopped

All that is needed to go on is saved after each epoch. On SIGTERM, with which the launcher passes on that the time of a
SLURM job is nearly over (see examples/slurm), all processes leave at the same step, with exit code 143.

Leaves OUT/autoencoder.pth (the weights), OUT/autoencoder-8.pth (with the optimizer's state, after 8 epochs), and
OUT/reconstructions.png: images above what the network makes of them.
"""

import argparse
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import Callback, CancelFitException, DataLoaders, Learner, distributed, on_rank0, set_seed
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


def saved_epochs(folder):
    """The files that `SaveAndStop` has left, by the number of finished epochs, which their names tell."""
    return {int(path.stem.split("-")[1]): path for path in folder.glob("autoencoder-[0-9]*.pth")}


class SaveAndStop(Callback):
    """Saves after each epoch; ends the fit on SIGTERM, and leaves it to the next run to train that epoch anew."""

    order = 70  # after the recorder, which has order 50
    run_valid = False  # no stop in validation: that epoch is nearly over, and worth saving

    def before_fit(self):
        self.asked = self.stopped = False
        self.handler = signal.signal(signal.SIGTERM, self.ask)

    def ask(self, *_):
        self.asked = True  # no more than that here: the process may be in the middle of anything

    def after_batch(self):
        if self.asked:
            raise CancelFitException  # on one rank, it ends the fit of all of them at the same step

    def after_cancel_fit(self):
        self.stopped = True

    def after_epoch(self):
        newest = self.learn.save(f"autoencoder-{self.epoch + 1}")  # by rank 0; the file is whole, or not there at all
        if distributed.is_main():
            for path in set(saved_epochs(newest.parent).values()) - {newest}:
                path.unlink()

    def cleanup_fit(self):
        signal.signal(signal.SIGTERM, self.handler)


@on_rank0
def draw(images, made, path):
    """Save a picture of `images` above what was `made` of them."""
    import matplotlib

    matplotlib.use("Agg")  # draws without a display
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(2, len(images), figsize=(len(images), 2.4), layout="constrained")
    for row, title, pictures in zip(axes, ("originals", "reconstructions"), (images, made), strict=True):
        for ax, picture in zip(row, pictures, strict=True):
            ax.imshow(picture.squeeze().numpy(), cmap="gray_r", vmin=0, vmax=1)
            ax.axis("off")
        row[0].set_title(title, loc="left", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=100)
    plt.close(fig)
    print(f"drew {path}")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8, help="in all, however often it is stopped")
    parser.add_argument("--bs", type=int, default=64, help="images in a batch of all processes together")
    parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--resume", action="store_true", help="go on from the last epoch saved in OUT, if there is one")
    parser.add_argument("--out", type=Path, default=Path("models"), help="directory of the saved files and the picture")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def main():
    args = parse_args()
    set_seed(args.seed)
    train_ds, valid_ds = map(to_itself, fashion_mnist_sample())
    dls = DataLoaders.from_datasets(train_ds, valid_ds, bs=args.bs)
    learn = Learner(dls, Autoencoder(), nn.MSELoss(), model_dir=args.out)
    done = max(saved_epochs(args.out), default=0) if args.resume else 0
    if done:
        learn.load(f"autoencoder-{done}")  # on every rank; weights and optimizer state go where the model is
        if distributed.is_main():
            print(f"{'going on after' if done < args.epochs else 'finished already:'} {done} of {args.epochs} epochs")
    if done < args.epochs:
        saving = SaveAndStop()
        with learn.distrib_ctx(split_batches=True):
            # Of all the epochs, these are the last: the learning rate and the table go on where they were.
            learn.fit_one_cycle(args.epochs, args.lr, start_epoch=done, cbs=saving)
        if saving.stopped:
            sys.exit(128 + signal.SIGTERM)
    path = learn.save("autoencoder", with_opt=False)  # written by rank 0
    if distributed.is_main():
        print(f"saved {path}")
    some = torch.utils.data.Subset(valid_ds, range(10))
    made, images = learn.get_preds(dl=torch.utils.data.DataLoader(some, 10))
    draw(images, made, args.out / "reconstructions.png")


if __name__ == "__main__":
    main()
