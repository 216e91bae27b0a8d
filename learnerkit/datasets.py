"""Real images for examples: a sample of Fashion-MNIST that is part of the package, and the full dataset.

Fashion-MNIST is (c) 2017 Zalando SE, MIT licence; the notice is in `learnerkit/assets/FASHION_MNIST_LICENSE`.
"""

from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from learnerkit import world

FASHION_MNIST_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
"""The names of the labels 0 to 9."""


def fashion_mnist_sample() -> tuple[TensorDataset, TensorDataset]:
    """Return 6,000 training and 1,000 validation images of Fashion-MNIST from the package's files.

    They are the first 600 of each class of the training set and the first 100 of each class of the test set, shuffled.

    Returns:
        (train_ds, valid_ds) of (image, label): float images of shape (1, 28, 28) from 0 to 1, int64 labels.
    """
    import numpy as np

    asset = files("learnerkit") / "assets" / "fashion_mnist_sample.npz"
    with asset.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        train, valid = (
            _dataset(torch.from_numpy(arrays[f"{part}_images"]), torch.from_numpy(arrays[f"{part}_labels"]))
            for part in ("train", "valid")
        )
    return train, valid


def fashion_mnist(root: str | Path) -> tuple[TensorDataset, TensorDataset]:
    """Return all of Fashion-MNIST, 60,000 and 10,000 images; torchvision downloads it if necessary.

    With several processes rank 0 downloads and the others wait; every rank must reach this.

    Args:
        root: the files are in root/FashionMNIST/raw, or are put there.

    Returns:
        (train_ds, valid_ds) as from `fashion_mnist_sample`.

    Raises:
        RuntimeError: the files are not there and cannot be downloaded.
    """
    found: Any = world.rank0_first(_read_fashion_mnist, Path(root))
    return found


def _read_fashion_mnist(root: Path) -> tuple[TensorDataset, TensorDataset]:
    from torchvision.datasets import FashionMNIST

    try:
        train, valid = (FashionMNIST(root, train=train, download=True) for train in (True, False))
    except (OSError, RuntimeError) as e:  # torchvision's own error, or one of the connection
        raw, why = root / "FashionMNIST" / "raw", " ".join(str(e).split())
        raise RuntimeError(
            f"Fashion-MNIST is not in {raw} and could not be downloaded ({why}). Without a connection, put the four "
            "unpacked files there (train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, "
            "t10k-labels-idx1-ubyte), or use the sample that ships with learnerkit: fashion_mnist_sample()"
        ) from None
    return _dataset(train.data, train.targets), _dataset(valid.data, valid.targets)


def _dataset(images: Tensor, labels: Tensor) -> TensorDataset:
    return TensorDataset(images.unsqueeze(1).float().div_(255), labels.long())
