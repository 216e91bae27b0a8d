r"""Fashion-MNIST with Accelerate, on one process or many.

accelerate launch --multi_gpu --num_processes 2 \
    accelerate_theirs.py

Without GPUs ACCELERATE_USE_CPU=true goes before it.
"""

import math

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from learnerkit.datasets import fashion_mnist_sample

EPOCHS = 5


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


@torch.no_grad()
def evaluate(accelerator, model, valid_dl):
    "The mean loss and the accuracy, each sample counted once."
    model.eval()
    losses, hits = [], []
    for x, y in valid_dl:
        scores = model(x)
        loss = F.cross_entropy(scores, y, reduction="none")
        hit = scores.argmax(1) == y
        # Leaves out what fills up the last batch.
        loss, hit = accelerator.gather_for_metrics((loss, hit))
        losses.append(loss)
        hits.append(hit)
    accuracy = torch.cat(hits).double().mean().item()
    return torch.cat(losses).mean().item(), accuracy


def main():
    set_seed(42)
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        # A batch is cut into a piece for each process, and the
        # schedule takes one step for each of the optimizer's.
        dataloader_config=DataLoaderConfiguration(
            split_batches=True
        ),
    )
    accelerator.print(accelerator.num_processes, "processes")
    train_ds, valid_ds = map(in_float64, fashion_mnist_sample())
    order = torch.Generator().manual_seed(0)
    train_dl = DataLoader(
        train_ds, 60, shuffle=True, generator=order
    )
    valid_dl = DataLoader(valid_ds, 128)

    model = make_model().double()
    optimizer = torch.optim.AdamW(
        model.parameters(), weight_decay=0.05
    )
    steps = EPOCHS * len(train_dl) // 2
    scheduler = OneCycleLR(optimizer, 3e-3, total_steps=steps)
    model, optimizer, train_dl, valid_dl, scheduler = (
        accelerator.prepare(
            model, optimizer, train_dl, valid_dl, scheduler
        )
    )

    train_losses, valid_losses, best = [], [], math.inf
    for epoch in range(EPOCHS):
        model.train()
        total = torch.zeros(
            (), device=accelerator.device
        ).double()
        for x, y in train_dl:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(
                        model.parameters(), 1.0
                    )
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += loss.detach() * len(x)
        total = accelerator.reduce(total, "sum").item()
        train_losses.append(total / len(train_ds))

        valid_loss, accuracy = evaluate(
            accelerator, model, valid_dl
        )
        valid_losses.append(valid_loss)
        accelerator.print(
            epoch, train_losses[-1], valid_loss, accuracy
        )
        if valid_loss < best:
            best = valid_loss
            weights = accelerator.unwrap_model(model).state_dict()
            # On the first process.
            accelerator.save(weights, "best.pt")

    accelerator.wait_for_everyone()
    weights = torch.load("best.pt", map_location="cpu")
    accelerator.unwrap_model(model).load_state_dict(weights)
    best_loss, accuracy = evaluate(accelerator, model, valid_dl)
    accelerator.print("the best model:", best_loss, accuracy)
    accelerator.end_training()
    return {
        "train_loss": train_losses,
        "valid_loss": valid_losses,
        "best": [best_loss],
    }, accelerator.is_main_process


if __name__ == "__main__":
    found, is_main = main()
    for name, losses in found.items() if is_main else ():
        print(name, *losses)
