"""Pictures for training: found in folders or given, with classes, and the loaders that read them."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from learnerkit import world
from learnerkit.callbacks.augmentation import BatchTransform
from learnerkit.data.loaders import ONLY_INPUTS, DataLoaders
from learnerkit.data.order import keep_seeds
from learnerkit.data.parts import held_out
from learnerkit.export.reading import NoData
from learnerkit.images.augmentation import ImageAugmentation
from learnerkit.images.reading import ImageReader, ReadImages
from learnerkit.launch.environment import usable_cores
from learnerkit.text import first_few

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".pgm", ".ppm", ".tif", ".tiff", ".webp")
"""The ends of the names that `from_folder` takes for pictures."""

_MOST_WORKERS = 8  # of a loader, where nothing is said


class ImageData:
    """Pictures with their classes: how they are read, and which are there to train and to validate on.

    `from_folder` and `from_items` make one of files; a dataset that yields pictures is given as it is.

    Args:
        train_ds: pairs of a picture and the number of its class: a list, or a dataset such as torchvision's. Pictures
            are paths, PIL's, arrays (H, W) or (H, W, C), or tensors (H, W) or (C, H, W).
        valid_ds: the same for validation.
        classes: the names of the classes; by default `train_ds.classes`.
        size: pixels of height and width, or (height, width), to which all pictures are resized.
        channels: 3 for colours, 1 for gray; each picture is converted.
        method: how a picture of other proportions is made to fit: 'crop', 'pad' or 'squish', as for `ImageReader`.

    Attributes:
        reader: the `ImageReader`.
    """

    def __init__(
        self,
        train_ds: Any = None,
        valid_ds: Any = None,
        classes: Iterable[str] | None = None,
        *,
        size: int | tuple[int, int] = 224,
        channels: int = 3,
        method: str = "crop",
    ) -> None:
        self.reader = ImageReader(size, channels, method)  # type: ignore[arg-type]  # which makes two of one number
        found = getattr(train_ds, "classes", None) if classes is None else classes
        self.classes = None if found is None else list(map(str, found))
        self.train_ds, self.valid_ds = (
            None if ds is None else ReadImages(ds, self.reader, self.classes) for ds in (train_ds, valid_ds)
        )

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        valid: float | str | None = 0.2,
        *,
        train: str = "train",
        label: Callable[[Path], str] | None = None,
        seed: int = 42,
        skip_damaged: bool = False,
        **reading: Any,
    ) -> "ImageData":
        """Find the pictures in a folder and those within it.

        Args:
            path: the folder.
            valid: what is validated on: a share of the pictures, drawn at random, of each class as many; the name of a
                folder in `path`; or `None` for nothing.
            train: where `valid` is a folder, the one beside it to train on.
            label: a function of a picture's path that returns its class; by default the name of its folder.
            seed: of the draw.
            skip_damaged: read every file once, and leave out those that cannot be read. Without it they are an error
                when their turn comes.
            reading: `size`, `channels` and `method`, as for `ImageData`.

        Raises:
            FileNotFoundError: there is no such folder, or no picture in it.
            ValueError: a single class, a class that is validated on alone, or pictures without a class.
        """
        path = Path(path)
        if isinstance(valid, str):
            folders = [path / train, path / valid]
        else:
            _check_undivided(path, train)
            folders = [path]
        found = [(folder, _pictures_in(folder)) for folder in folders]
        if skip_damaged:
            found = [(folder, _readable(paths)) for folder, paths in found]
        stray = [p for folder, paths in found for p in paths if os.path.dirname(p) == str(folder)]
        if label is None and stray:
            raise ValueError(
                f"{len(stray):,} pictures lie in no folder of a class, such as {stray[0]}; put them into one, or say "
                "label=, a function of the path"
            )
        label = label or _folder_name
        parts = [(paths, [label(Path(p)) for p in paths]) for _, paths in found]
        if isinstance(valid, str):
            return cls._numbered(parts, reading)
        return cls.from_items(*parts[0], valid, seed=seed, **reading)

    @classmethod
    def from_items(
        cls, items: Iterable, labels: Iterable, valid: float | None = 0.2, *, seed: int = 42, **reading: Any
    ) -> "ImageData":
        """Take pictures and their classes from two lists.

        Args:
            items: paths, or pictures as for `ImageData`.
            labels: the class of each.
            valid: the share that is validated on, drawn at random, of each class as many; or `None` for nothing.
            seed: of the draw.
            reading: `size`, `channels` and `method`, as for `ImageData`.

        Raises:
            ValueError: lists of other lengths, a single class, or another share.
        """
        items, labels = list(items), list(labels)  # a column of a frame has indices of its own
        if len(items) != len(labels):
            raise ValueError(f"got {len(items):,} pictures and {len(labels):,} labels; each picture has one")
        if valid is None:
            return cls._numbered([(items, labels)], reading)
        if not isinstance(valid, float) or not 0 < valid < 1:
            raise ValueError(f"got valid={valid!r}; it is a share between 0 and 1, such as 0.2, or None")
        out = held_out(valid, labels, seed)
        rows = [[i for i, is_out in enumerate(out) if is_out == is_valid] for is_valid in (False, True)]
        return cls._numbered([([items[i] for i in part], [labels[i] for i in part]) for part in rows], reading)

    @classmethod
    def _numbered(cls, parts: Sequence[tuple[Sequence, list]], reading: dict[str, Any]) -> "ImageData":
        "Make it of pictures and labels to train on and to validate on, with numbers for the labels."
        classes = sorted(set(parts[0][1]))
        if len(classes) < 2 or isinstance(classes[0], float):
            raise ValueError(
                f"the classes to train on are: {first_few(classes) or 'none'}; there have to be two, and labels are "
                "text or whole numbers"
            )
        numbers = {name: number for number, name in enumerate(classes)}
        if unknown := {str(name) for _, labels in parts for name in labels if name not in numbers}:
            raise ValueError(f"validated on, but not trained on: the classes {first_few(sorted(unknown))}")
        datasets = [
            [(item, numbers[name]) for item, name in zip(items, labels, strict=True)] for items, labels in parts
        ]
        return cls(datasets[0], datasets[1] if len(datasets) > 1 else None, classes, **reading)

    def __repr__(self) -> str:
        parts = ((self.train_ds, "train on"), (self.valid_ds, "validate on"))
        (height, width), channels = self.reader.size, "gray" if self.reader.channels == 1 else "colours"
        lines = [
            ", ".join([type(self).__name__, *(f"{len(ds):,} pictures to {what}" for ds, what in parts if ds)]),
            f"  size        {height} x {width}, {channels}, {self.reader.method}",
            *([f"  classes     {first_few(self.classes)}"] if self.classes else []),
        ]
        return "\n".join(lines)

    def dataloaders(
        self,
        bs: int = 64,
        *,
        augment: bool | Callable[[Tensor], Tensor] = False,
        num_workers: int | None = None,
        **kwargs: Any,
    ) -> "ImageDataLoaders":
        """Make loaders of the training and validation part. Pictures are read in workers, as uint8.

        On the device each batch becomes floats from 0 to 1, and in training it is augmented there. What comes from
        `from_json` has no pictures; its loaders have no batches, and predict for new ones.

        Args:
            bs: pictures in a training batch.
            augment: a function of a batch (n, channels, height, width) in training, such as `ImageAugmentation(...)`
                with other values, or transforms of `torchvision.transforms.v2`; `True`: `ImageAugmentation()`.
            num_workers: processes that read; by default the cores of the machine over its ranks, up to 8, for files,
                and none for pictures in memory.
            kwargs: those of `DataLoaders.from_datasets`.
        """
        if self.train_ds is None:
            return self._with_loaders(ImageDataLoaders(NoData(), NoData(), classes=self.classes, **kwargs))
        if num_workers is None:
            first = self.train_ds.samples[0][0] if len(self.train_ds) else None
            cores = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            num_workers = min(_MOST_WORKERS, cores) if isinstance(first, str | os.PathLike) else 0
        kwargs |= {"bs": bs, "num_workers": num_workers}
        dls = self._with_loaders(ImageDataLoaders.from_datasets(self.train_ds, self.valid_ds, **kwargs))
        if augment:
            dls.augment = ImageAugmentation() if augment is True else augment
            dls.cbs = [BatchTransform(dls.augment)]
        return dls

    def _with_loaders(self, dls: Any) -> "ImageDataLoaders":
        dls.data, dls.preprocessing = self, json.loads(self.to_json())
        return dls

    # Files

    def to_json(self) -> str:
        """The classes and how pictures are read as JSON, which `from_json` reads."""
        return json.dumps({**asdict(self.reader), "classes": self.classes})

    @classmethod
    def from_json(cls, text: str) -> "ImageData":
        """Read what `to_json` wrote: the same but for the pictures."""
        return cls(**json.loads(text))


class ImageDataLoaders(DataLoaders):
    """Loaders of pictures, with their `data`. Their batches become floats from 0 to 1 on the device.

    Attributes:
        augment: the function that changes batches in training, or `None`.
    """

    data: ImageData
    augment: Callable[[Tensor], Tensor] | None = None
    _shows_augmented = False

    def split(self, batch: Any, arguments: Sequence[str] | None = None) -> tuple[tuple, tuple]:
        """Split a batch as `DataLoaders` do, with images as floats."""
        (images, *others), targets = super().split(batch, arguments)
        images = images / 255 if images.dtype == torch.uint8 else images
        return (self.augment(images) if self.augment and self._shows_augmented else images, *others), targets

    def test_dl(self, items: Any, bs: int | None = None, **loader_kwargs: Any) -> DataLoader:
        """A loader over pictures without classes, in their order, for `learn.get_preds(dl=...)`.

        Args:
            items: pictures as for `ImageData`, in a list or another iterable: paths, or PIL pictures, arrays or
                tensors.
            bs, loader_kwargs: as for `DataLoaders.test_dl`.

        Raises:
            TypeError: a single path or picture.
        """
        if isinstance(items, str | os.PathLike | Mapping) or hasattr(items, "convert") or hasattr(items, "columns"):
            raise TypeError(
                f"got a {type(items).__name__}; test_dl takes a list of pictures, or of their paths "
                "(learn.predict takes one picture)"
            )
        if not hasattr(items, "__getitem__") or hasattr(items, "iloc"):  # what Path.glob returns, a column of a frame
            items = list(items)
        return super().test_dl(ReadImages(items, self.data.reader), bs, **loader_kwargs)

    def input_batch(self, item: Any) -> tuple[Any, Any]:
        """Return a batch of one picture, as `test_dl` gives it, and what stands for its loader."""
        join = self._joins_inputs(self.train if self.valid is None else self.valid)
        return join([ReadImages([item], self.data.reader)[0]]), ONLY_INPUTS

    def show_batch(self, n: int = 9, ds_idx: int = 0) -> Any:
        """Show pictures of the first batch of a loader with their classes; those of training are augmented."""
        self._shows_augmented = ds_idx == 0
        try:
            with keep_seeds():
                return super().show_batch(n, ds_idx)
        finally:
            self._shows_augmented = False


def _folder_name(path: Path) -> str:
    return path.parent.name


def _check_undivided(path: Path, train: str) -> None:
    beside = [name for name in ("valid", "val", "test") if (path / train).is_dir() and (path / name).is_dir()]
    if beside:
        raise ValueError(
            f"{path} has the folders {train!r} and {', '.join(map(repr, beside))}: say which to validate on, such as "
            f"valid={beside[0]!r}; a share would be drawn from all of them"
        )


def _pictures_in(folder: Path) -> list[str]:
    "The paths of the pictures in a folder and those within it, sorted; not as objects, as there may be millions."
    if not folder.is_dir():
        beside = sorted(p.name for p in folder.parent.iterdir() if p.is_dir()) if folder.parent.is_dir() else []
        raise FileNotFoundError(f"there is no folder {folder}; beside it there are: {first_few(beside) or 'none'}")
    found = [
        os.path.join(place, name)
        for place, _, names in os.walk(folder, followlinks=True)
        for name in names
        if name.lower().endswith(SUFFIXES) and not name.startswith(".")
    ]
    if not found:
        raise FileNotFoundError(f"there are no pictures in {folder}; their names end in {', '.join(SUFFIXES)}")
    return sorted(found)


def _readable(paths: list[str]) -> list[str]:
    "Leave out what cannot be read, and say so on rank 0."
    reader = ImageReader((1, 1))

    def fails(path: str) -> bool:
        try:
            reader(path)
        except OSError:
            return True
        return False

    with ThreadPoolExecutor(usable_cores()) as threads:  # decoding does not hold Python's lock
        marked = list(zip(paths, threads.map(fails, paths), strict=True))
    damaged = [path for path, wrong in marked if wrong]
    if damaged and world.is_main():
        print(f"left out as damaged: {len(damaged):,} of {len(paths):,} pictures, such as {first_few(damaged, n=3)}")
    return [path for path, wrong in marked if not wrong]
