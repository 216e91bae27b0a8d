"""Fashion-MNIST with Lightning, down to its best epoch."""

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
)
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Sampler
from torchmetrics.classification import MulticlassAccuracy

from learnerkit.datasets import fashion_mnist_sample


class Classifier(L.LightningModule):
    def __init__(self, max_lr=3e-3, weight_decay=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 7 * 7, 10),
        )
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        scores = self(x)
        self.accuracy(scores, y)
        self.log(
            "valid_loss",
            F.cross_entropy(scores, y),
            prog_bar=True,
        )
        self.log("accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(
            self.parameters(),
            lr=self.hparams.max_lr,
            weight_decay=self.hparams.weight_decay,
        )
        scheduler = OneCycleLR(
            optimizer,
            self.hparams.max_lr,
            total_steps=self.trainer.estimated_stepping_batches,
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": scheduler,
                "interval": "step",
            },
        }


class History(L.Callback):
    "Keep what is logged, epoch by epoch."

    def __init__(self):
        self.rows = []

    def on_train_epoch_end(self, trainer, module):
        found = trainer.callback_metrics
        self.rows.append(
            {name: x.item() for name, x in found.items()}
        )


class Shuffle(Sampler):
    "A random order that depends on the seed and the epoch alone."

    def __init__(self, n, seed):
        self.n, self.seed, self.epoch = n, seed, 0

    def __len__(self):
        return self.n

    def __iter__(self):
        order = torch.Generator().manual_seed(
            self.seed + self.epoch
        )
        self.epoch += 1
        return iter(
            torch.randperm(self.n, generator=order).tolist()
        )


def main():
    L.seed_everything(42, workers=True)
    train_ds, valid_ds = fashion_mnist_sample()
    order = Shuffle(len(train_ds), seed=42)
    train_dl = DataLoader(train_ds, 60, sampler=order)
    valid_dl = DataLoader(valid_ds, 128)

    best = ModelCheckpoint(monitor="valid_loss", filename="best")
    history = History()
    trainer = L.Trainer(
        max_epochs=5,
        accelerator="cpu",
        precision="64-true",
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        callbacks=[
            best,
            EarlyStopping("valid_loss", patience=2),
            history,
        ],
        logger=False,
    )
    trainer.fit(Classifier(), train_dl, valid_dl)
    (found,) = trainer.validate(
        dataloaders=valid_dl, ckpt_path="best"
    )
    return {
        "train_loss": [row["train_loss"] for row in history.rows],
        "valid_loss": [row["valid_loss"] for row in history.rows],
        "best": [found["valid_loss"]],
    }


if __name__ == "__main__":
    for name, losses in main().items():
        print(name, *losses)
