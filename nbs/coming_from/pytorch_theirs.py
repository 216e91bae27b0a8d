"""Fashion-MNIST with PyTorch and DistributedDataParallel.

torchrun --nproc-per-node 2 pytorch_theirs.py
"""

import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    Subset,
    TensorDataset,
)

from learnerkit.datasets import fashion_mnist_sample

EPOCHS, BATCH, WARM_UP, PATIENCE = 5, 64, 0.1, 2


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 10),
    )


def in_float64(ds):
    images, labels = ds.tensors
    return TensorDataset(images.double(), labels)


def all_sums(*values, device):
    "Each value summed over the processes."
    sums = torch.tensor(
        values, dtype=torch.float64, device=device
    )
    dist.all_reduce(sums)
    return sums.tolist()


@torch.no_grad()
def evaluate(model, valid_dl, device):
    "The mean loss and the accuracy, each sample counted once."
    model.eval()
    loss = hits = count = 0
    for x, y in valid_dl:
        x, y = x.to(device), y.to(device)
        scores = model(x)
        loss += F.cross_entropy(scores, y, reduction="sum").item()
        hits += (scores.argmax(1) == y).sum().item()
        count += len(y)
    loss, hits, count = all_sums(loss, hits, count, device=device)
    return loss / count, hits / count


def main():
    on_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device(
            "cuda", int(os.environ["LOCAL_RANK"])
        )
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(world_size, "processes")

    torch.manual_seed(42)
    train_ds, valid_ds = map(in_float64, fashion_mnist_sample())
    sampler = DistributedSampler(train_ds, seed=42)
    train_dl = DataLoader(
        train_ds, BATCH // world_size, sampler=sampler
    )
    # Not by a DistributedSampler, which repeats samples so that
    # all processes have as many.
    mine = Subset(
        valid_ds, range(rank, len(valid_ds), world_size)
    )
    valid_dl = DataLoader(mine, 200)

    model = make_model().double().to(device)
    wrapped = DistributedDataParallel(
        model, [device.index] if on_gpu else None
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-3, weight_decay=0.05
    )

    def warm_up_and_cosine(step):
        done = step / (EPOCHS * len(train_dl))
        if done < WARM_UP:
            return done / WARM_UP
        return (
            1
            + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP))
        ) / 2

    scheduler = LambdaLR(optimizer, warm_up_and_cosine)

    train_losses, valid_losses = [], []
    best, worse = math.inf, 0
    for epoch in range(EPOCHS):
        # Else every epoch has the same order.
        sampler.set_epoch(epoch)
        wrapped.train()
        total = count = 0
        for x, y in train_dl:
            x, y = x.to(device), y.to(device)
            loss = F.cross_entropy(wrapped(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total += loss.item() * len(y)
            count += len(y)
        total, count = all_sums(total, count, device=device)
        train_losses.append(total / count)

        # On the model itself, as the processes may have different
        # numbers of batches here.
        valid_loss, accuracy = evaluate(model, valid_dl, device)
        valid_losses.append(valid_loss)
        if rank == 0:
            print(
                epoch,
                train_losses[-1],
                valid_loss,
                accuracy,
                flush=True,
            )
        if valid_loss < best:
            best, worse = valid_loss, 0
            if rank == 0:
                torch.save(model.state_dict(), "best.pt")
        else:
            worse += 1
            if worse == PATIENCE:  # on all processes alike
                break

    dist.barrier()  # until the file is written
    model.load_state_dict(
        torch.load("best.pt", map_location=device)
    )
    best_loss, accuracy = evaluate(model, valid_dl, device)
    dist.destroy_process_group()
    return {
        "train_loss": train_losses,
        "valid_loss": valid_losses,
        "best": [best_loss],
    }, rank == 0


if __name__ == "__main__":
    found, is_main = main()
    for name, losses in found.items() if is_main else ():
        print(name, *losses)
