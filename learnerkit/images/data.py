"""Pictures for training: found in folders or given, with classes, and the loaders that read them."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import chain, compress
from numbers import Integral
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from learnerkit import distributed
from learnerkit.callbacks.augmentation import BatchTransform
from learnerkit.data.loaders import ONLY_INPUTS, DataLoaders, check_classes, class_names
from learnerkit.data.order import keep_seeds
from learnerkit.data.parts import check_columns, held_out, sizes_of
from learnerkit.data.show import DRAWN
from learnerkit.export.reading import NoData
from learnerkit.images.augmentation import ImageAugmentation
from learnerkit.images.reading import ImageReader
from learnerkit.images.targets import ReadImages, TargetReader, listed, transformed
from learnerkit.processes.machine import usable_cores
from learnerkit.stores.paths import files_within, local_folder
from learnerkit.text import first_few
from learnerkit.utils import replaced, suggests_keywords
from learnerkit.values import describe

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".pgm", ".ppm", ".tif", ".tiff", ".webp")
"""The ends of the names that `from_folder` takes for pictures."""

_MOST_WORKERS = 8  # the most workers of a loader by default


class ImageData:
    """Pictures with their targets: how they are read, and which are there to train and to validate on.

    `from_folder`, `from_df`, `from_func` and `from_items` make one of files; a dataset that yields pictures is given as
    it is.

    Args:
        train_ds: pairs of a picture and its target: a list, or a dataset such as torchvision's. Pictures are paths,
            PIL's, arrays (H, W) or (H, W, C), or tensors (H, W) or (C, H, W).
        valid_ds: the same for validation.
        classes: the names of the classes; by default `train_ds.classes`.
        targets: what a target is, and what the loaders make of it:
            'class': the number of a class (the methods that are named above take its name).
            'classes': several classes, a list or a set of their names; floats (n_classes,), 1 for those.
            'numbers': a number or several; floats (n,).
            'points': k points (k, 2), x and y in pixels of the picture in its file; floats (k, 2), in pixels of the
            resized picture. 0, 0 is the upper left corner, and 0.5, 0.5 the middle of the first pixel.
            'boxes': a dict of 'boxes' (k, 4), x0, y0, x1, y1 in pixels, and their 'labels', by name or number: what
            torchvision's detectors take, in lists of one for each picture. Boxes are cut at the picture's borders.
            'masks': the number of a class for each pixel (H, W): a file, PIL's, an array or a tensor; int64 (H, W),
            the nearest pixels of the resized picture. Number -100 counts for nothing, as what 'pad' adds.
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
        targets: str = "class",
        size: int | tuple[int, int] = 224,
        channels: int = 3,
        method: str = "crop",
    ) -> None:
        self.reader = ImageReader(size, channels, method)  # type: ignore[arg-type]  # which makes two of one number
        names = class_names(train_ds, classes)
        if classes is None:
            check_classes(train_ds, valid_ds)
        self.classes = None if names is None else list(map(str, names))
        self.targets, of_targets = targets, TargetReader(targets, self.classes)
        self.train_ds, self.valid_ds = (
            None if ds is None else ReadImages(ds, self.reader, of_targets) for ds in (train_ds, valid_ds)
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
            path: the folder; of a URL a copy is made, in `~/.cache/learnerkit`.
            valid: what is validated on: a share of the pictures, drawn at random, of each class as many; the name of a
                folder in `path`; or `None` for nothing.
            train: where `valid` is a folder, the one beside it to train on.
            label: a function of a picture's path that returns its target; by default the name of its folder.
            seed: of the draw.
            skip_damaged: read every file once, and leave out those that cannot be read. Without it they are an error
                when their turn comes.
            reading: `classes`, `targets`, `size`, `channels` and `method`, as for `ImageData`, and `delim`, as for
                `from_items`.

        Raises:
            FileNotFoundError: there is no such folder, or no picture in it.
            ValueError: a single class, a class that is validated on alone, or pictures without a class.
        """
        path = local_folder(path)
        if isinstance(valid, str):
            folders = [path / train, path / valid]
        else:
            _check_undivided(path, train)
            folders = [path]
        pictures = [(folder, _pictures_in(folder)) for folder in folders]
        if skip_damaged:
            pictures = [(folder, _readable(paths)) for folder, paths in pictures]
        stray = [p for folder, paths in pictures for p in paths if os.path.dirname(p) == str(folder)]
        if label is None and stray:
            raise ValueError(
                f"{len(stray):,} pictures lie in no folder of a class, such as {stray[0]}; put them into one, or say "
                "label=, a function of the path"
            )
        label = label or attrgetter("parent.name")
        parts = [(paths, [label(Path(p)) for p in paths]) for _, paths in pictures]
        if isinstance(valid, str):
            return cls._of_parts(parts, **reading)
        return cls.from_items(*parts[0], valid, seed=seed, **reading)

    @classmethod
    def from_df(
        cls, df: Any, image: Any, label: Any, valid: Any = 0.2, *, path: str | Path = ".", **reading: Any
    ) -> "ImageData":
        """Take pictures and their targets from the columns of a frame of pandas.

        Args:
            df: the frame.
            image: the column of the pictures' files.
            label: the column of the targets, or several. Of 'numbers' each has one, of 'points' each two have an x and
                a y. Of 'classes' each is named after a class, and has 1 or 0. Of 'boxes' five have x0, y0, x1, y1 and
                the label of one box; the rows of one picture belong together, and a row with five missing values stands
                for no box.
            valid: as for `from_items`, where of 'boxes' a place is that of a picture, not of a row; a mask of the rows;
                or the name of a column that is true in the rows to validate on.
            path: the folder in which the files are, those of masks too; or a URL, as for `from_folder`.
            reading: `seed`, `delim` and others, as for `from_items`.

        Raises:
            ValueError: a column that is not there, or a file that is missing in it; and as `from_items`.
        """
        path, several = local_folder(path), not isinstance(label, str | int)
        check_columns(df, [image, *(label if several else [label]), *([valid] if isinstance(valid, str) else [])])
        kind = reading.get("targets", "class")
        if several and kind in ("class", "masks"):
            raise ValueError(f"got label={label!r}; targets={kind!r} are in one column")
        for column in (image, label) if kind == "masks" else (image,):
            if (gaps := df[column].isna()).any():
                where = first_few(df.index[gaps])
                raise ValueError(f"the column {column!r} names no file in the rows {where}; take them out: df.dropna()")
        if isinstance(valid, str):
            if not (flags := set(df[valid].tolist())) <= {True, False}:
                raise ValueError(
                    f"the column {valid!r} has {first_few(map(repr, flags))}; it is true or false in each row"
                )
            valid = list(map(bool, df[valid]))
        rows = list(df[[*label]].itertuples(index=False, name=None) if several else df[label])
        if kind == "classes" and several:
            if wrong := {x for row in rows for x in row} - {0, 1}:
                raise ValueError(
                    f"the columns of classes have {first_few(map(repr, wrong))}; each has 1 (or True) for the pictures "
                    "of its class, and 0 (or False) for others. Names of classes are in one column, with delim="
                )
            rows = [[name for name, is_one in zip(label, row, strict=True) if is_one] for row in rows]
            reading.setdefault("classes", label)
        elif kind == "boxes" and several:
            if len(label) != 5:
                raise ValueError(f"got {len(label)} columns of boxes; they are five: x0, y0, x1, y1 and the label")
            rows = _boxes_by_picture(df[image], rows, df[[*label]].notna().any(axis=1))
            if np.shape(valid) == (len(df),) and {*map(type, valid)} <= {bool, np.bool_}:  # a mask of the rows
                valid = _by_picture(df[image], valid)
            df = df.drop_duplicates(image)
        elif kind == "masks":
            rows = [Path(path, row) for row in rows]
        return cls.from_items([Path(path, item) for item in df[image]], rows, valid, **reading)

    @classmethod
    def from_func(
        cls, items: Iterable[Any], label: Callable[[Path], Any], valid: Any = 0.2, **reading: Any
    ) -> "ImageData":
        """Take pictures whose targets are what a function of their paths returns.

        Args:
            items: paths.
            label: the function.
            valid, reading: as for `from_items`.
        """
        items = _listed(items)
        return cls.from_items(items, [label(Path(item)) for item in items], valid, **reading)

    @classmethod
    def from_items(
        cls, items: Iterable[Any], labels: Iterable, valid: Any = 0.2, *, seed: int = 42, **reading: Any
    ) -> "ImageData":
        """Take pictures and their targets from two lists.

        Args:
            items: paths, or pictures as for `ImageData`.
            labels: the target of each, as for `ImageData`; a class by its name, which is text or a whole number.
            valid: what is validated on: a share, drawn at random, of each class as many; a list with true or false for
                each picture, or of their places; or `None` for nothing.
            seed: of the draw.
            reading: `targets`, `size`, `channels` and `method`, as for `ImageData`; `classes`, by default those of the
                labels to train on; and `delim`, which says where to cut a text with several classes, such as ' '.

        Raises:
            TypeError: one path in place of a list of them.
            ValueError: lists of other lengths, a single class, another `valid`, or labels that are no such targets.
            FileNotFoundError: masks whose files are not there.
        """
        items, labels = _listed(items), list(labels)  # A column of a frame has other indices.
        labels = [y.item() if isinstance(y, torch.Tensor) and not y.ndim else y for y in labels]
        if len(items) != len(labels):
            raise ValueError(f"got {len(items):,} pictures and {len(labels):,} labels; each picture has one")
        parts = [(items, labels)]
        if valid is not None:
            by_class = reading.get("targets", "class") == "class"
            if by_class:
                _check_names(labels)
            out = held_out(valid, labels if by_class else [0] * len(labels), seed)
            parts = [(list(compress(items, part)), list(compress(labels, part))) for part in (~out, out)]
        return cls._of_parts(parts, **reading)

    @classmethod
    def _of_parts(
        cls,
        parts: Sequence[tuple[Sequence, list]],
        *,
        targets: str = "class",
        classes: Iterable | None = None,
        delim: str | None = None,
        **reading: Any,
    ) -> "ImageData":
        "Make an `ImageData` of pictures and labels to train on and to validate on."
        if targets == "classes":
            parts = [(items, [listed(label, delim) for label in labels]) for items, labels in parts]
        names = None if classes is None else list(map(str, classes))
        if targets in ("class", "classes"):
            known = set(parts[0][1] if targets == "class" else chain.from_iterable(parts[0][1]))
            _check_names(known)
            names = list(map(str, sorted(known))) if names is None else names
            if len(names) < 2:
                raise ValueError(f"the classes to train on are: {first_few(names) or 'none'}; there have to be two")
        reader = TargetReader(targets, names)
        if targets == "class":
            unknown = {str(name) for _, labels in parts for name in labels} - {*(names or ())}
            if unknown and classes is None:
                raise ValueError(f"validated on, but not trained on: the classes {first_few(sorted(unknown))}")
            parts = [(items, reader.numbers(map(str, labels)).tolist()) for items, labels in parts]
        datasets = [list(zip(items, map(reader.encoded, labels), strict=True)) for items, labels in parts]
        reader.check(y for _, y in chain.from_iterable(datasets))
        return cls(datasets[0], datasets[1] if len(datasets) > 1 else None, names, targets=targets, **reading)

    def __repr__(self) -> str:
        (height, width), channels = self.reader.size, "gray" if self.reader.channels == 1 else "colours"
        lines = [
            ", ".join([type(self).__name__, *sizes_of(self, "pictures")]),
            f"  size        {height} x {width}, {channels}, {self.reader.method}",
            *([f"  classes     {first_few(self.classes)}"] if self.classes else []),
        ]
        return "\n".join(lines)

    def dataloaders(
        self,
        bs: int = 64,
        *,
        augment: bool | Callable[..., Any] = False,
        transform: Callable[..., Any] | None = None,
        num_workers: int | None = None,
        **kwargs: Any,
    ) -> "ImageDataLoaders":
        """Make loaders of the training and validation part. Pictures are read in workers, as uint8.

        On the device each batch becomes floats from 0 to 1, and in training it is augmented there. What comes from
        `from_json` has no pictures; its loaders have no batches, and predict for new ones.

        Args:
            bs: pictures in a training batch.
            augment: a function of a batch (n, channels, height, width) in training, such as `ImageAugmentation(...)`
                with other values, or transforms of `torchvision.transforms.v2`; `True`: `ImageAugmentation()`. Where
                the targets are masks, points or boxes, it is f(pictures, targets) and returns both, as `transform`,
                with a batch of each: a `Mask` (n, height, width), `KeyPoints` (n, k, 2), or a list of dicts.
            transform: a transform of `torchvision.transforms.v2` for each picture of the training set, in the workers;
                or a function f(picture, target) that returns both. It gets the resized picture (channels, height,
                width), uint8, and its target as `tv_tensors`: `Image`, and `Mask`, `KeyPoints` or `BoundingBoxes`, so
                that a target follows its picture. Pictures that it returns have one size. Points are one pixel off
                after a flip of torchvision, which counts from the middle of the first pixel, unlike `augment=True`.
            num_workers: processes that read; by default the cores of the machine over its ranks, up to 8, for files,
                and none for pictures in memory.
            kwargs: those of `DataLoaders.from_datasets`.
        """
        if self.train_ds is None:
            return self._with_loaders(ImageDataLoaders(NoData(), NoData(), classes=self.classes, **kwargs))
        if num_workers is None:
            sample = self.train_ds.samples[0] if len(self.train_ds) else None
            first = sample[0] if isinstance(sample, tuple) else sample
            cores = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            num_workers = min(_MOST_WORKERS, cores) if isinstance(first, str | os.PathLike) else 0
        if self.targets == "boxes":
            kwargs.setdefault("collate_fn", _in_lists)
        train_ds = self.train_ds
        if transform is not None:
            train_ds = ReadImages(train_ds.samples, self.reader, train_ds.targets, transform)
        dls = self._with_loaders(
            ImageDataLoaders.from_datasets(train_ds, self.valid_ds, bs=bs, num_workers=num_workers, **kwargs)
        )
        if augment:
            dls.augment = ImageAugmentation() if augment is True else augment
            moves = self.targets in DRAWN
            fn = partial(transformed, dls.augment, self.targets) if moves else dls.augment
            dls.cbs = [BatchTransform(fn, with_targets=moves)]
        return dls

    def _with_loaders(self, dls: Any) -> "ImageDataLoaders":
        dls.data = self
        dls.targets = self.targets
        dls.preprocessing = json.loads(self.to_json())
        return dls

    # Files

    def to_json(self) -> str:
        """Return the classes, and how pictures are read, as JSON, which `from_json` reads."""
        return json.dumps({**asdict(self.reader), "classes": self.classes, "targets": self.targets})

    @classmethod
    def from_json(cls, text: str) -> "ImageData":
        """Read what `to_json` wrote: the same data without the pictures."""
        return cls(**json.loads(text))


class ImageDataLoaders(DataLoaders):
    """Loaders of pictures, with their `data`. Their batches become floats from 0 to 1 on the device.

    Attributes:
        augment: the function that changes batches in training, or `None`; of masks and points it takes and returns
            pictures and targets.
    """

    data: ImageData
    inputs = {"images": ("channels", "height", "width")}
    augment: Callable[..., Any] | None = None
    _shows_augmented = False

    def split(self, batch: Any, arguments: Sequence[str] | None = None) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Split a batch as `DataLoaders` do, with images as floats."""
        (images, *others), (*targets,) = super().split(batch, arguments)
        if images.dtype == torch.uint8:
            images = images.to(torch.get_default_dtype()).div_(255)  # on a CPU half the time of `images / 255`
        if self.augment and self._shows_augmented:
            if self.targets in DRAWN:
                images, *targets = transformed(self.augment, self.targets, images, *targets)
            else:
                images = self.augment(images)
        return (images, *others), tuple(targets)

    def test_dl(self, items: Any, bs: int | None = None, **loader_kwargs: Any) -> DataLoader[Any]:
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
        if getattr(items, "shape", ())[2:] in ((1,), (3,), (4,)):
            raise TypeError(
                f"got {describe(items)}, a picture with its channels; test_dl takes a list of pictures: [picture] "
                "(learn.predict takes one picture)"
            )
        if isinstance(items, ReadImages) or (isinstance(items, list) and items and isinstance(items[0], tuple)):
            raise TypeError(
                "got pairs of a picture and its target; test_dl takes pictures alone, and "
                "learn.get_preds(ds_idx=1) predicts for the validation set"
            )
        if not hasattr(items, "__getitem__") or hasattr(items, "iloc"):  # such as Path.glob's, or a column of a frame
            items = list(items)
        return super().test_dl(ReadImages(items, self.data.reader), bs, **loader_kwargs)

    def input_batch(self, *items: Any) -> tuple[Any, Any]:
        """Return a batch of some pictures, as `test_dl` gives it, and what stands for its loader."""
        join = self._joins_inputs(self.train if self.valid is None else self.valid)
        pictures = ReadImages(items, self.data.reader)
        return join([pictures[i] for i in range(len(items))]), ONLY_INPUTS

    @suggests_keywords
    def show_batch(self, n: int = 9, ds_idx: int = 0) -> Any:
        """Show pictures of the first batch of a loader with their classes; those of training are augmented."""
        with replaced(self, _shows_augmented=ds_idx == 0), keep_seeds():
            return super().show_batch(n, ds_idx)


def _listed(items: Iterable) -> list:
    """Return pictures as a list; one path is refused, whose letters would be taken for paths."""
    if isinstance(items, (str, Path)):
        raise TypeError(f"got {str(items)!r} for the pictures; they are a list, such as Path('pics').rglob('*.jpg')")
    return list(items)


def _check_names(labels: Iterable) -> None:
    if wrong := {str(label) for label in labels if not isinstance(label, str | Integral | np.bool_)}:
        raise ValueError(f"got the labels {first_few(sorted(wrong))}; labels are text or whole numbers")
    if len({isinstance(label, str) for label in labels}) > 1:
        raise ValueError("got labels of text and of numbers; all of them are text, or all are whole numbers")


def _boxes_by_picture(pictures: Iterable, rows: Iterable[tuple], are_boxes: Iterable) -> list[dict[str, list]]:
    """Return the boxes and labels of each picture, of rows that name their picture and have one box or none."""
    targets: dict[Any, dict[str, list]] = {item: {"boxes": [], "labels": []} for item in pictures}
    for item, (*box, label), is_box in zip(pictures, rows, are_boxes, strict=True):
        if is_box:
            targets[item]["boxes"].append(box)
            # A gap makes floats of a column of whole numbers.
            is_number = isinstance(label, float) and label.is_integer()
            targets[item]["labels"].append(int(label) if is_number else label)
    return list(targets.values())


def _by_picture(rows: Iterable, flags: Iterable) -> list[bool]:
    """Return a flag for each picture, of flags for the rows of boxes, each of which names its picture."""
    pairs = list(zip(rows, flags, strict=True))
    found = dict(pairs)
    if both := [item for item, flag in pairs if found[item] != flag]:
        raise ValueError(f"valid= is true for some rows of {both[0]!r} and false for others; a picture is in one part")
    return list(map(bool, found.values()))


def _in_lists(samples: list[tuple]) -> tuple:
    "Make a batch of samples that differ in the number of targets."
    pictures, *targets = zip(*samples, strict=True)
    return torch.stack(pictures), *map(list, targets)


def _check_undivided(path: Path, train: str) -> None:
    beside = [name for name in ("valid", "val", "test") if (path / train).is_dir() and (path / name).is_dir()]
    if beside:
        raise ValueError(
            f"{path} has the folders {train!r} and {', '.join(map(repr, beside))}: say which to validate on, such as "
            f"valid={beside[0]!r}; a share would be drawn from all of them"
        )


def _pictures_in(folder: Path) -> list[str]:
    "Return the sorted paths of the pictures in a folder and those within it."
    if not folder.is_dir():
        beside = sorted(p.name for p in folder.parent.iterdir() if p.is_dir()) if folder.parent.is_dir() else []
        raise FileNotFoundError(f"there is no folder {folder}; beside it there are: {first_few(beside) or 'none'}")
    paths = files_within(folder, SUFFIXES)
    if not paths:
        raise FileNotFoundError(f"there are no pictures in {folder}; their names end in {', '.join(SUFFIXES)}")
    return paths


def _readable(paths: list[str]) -> list[str]:
    "Return the paths of the files that can be read, and print on rank 0 how many cannot."
    reader = ImageReader((1, 1))

    def can_read(path: str) -> bool:
        try:
            reader(path)
        except OSError:
            return False
        return True

    with ThreadPoolExecutor(usable_cores()) as threads:  # decoding does not hold Python's lock
        whole = list(compress(paths, threads.map(can_read, paths)))
    damaged = sorted({*paths}.difference(whole))
    if damaged and distributed.is_main():
        print(f"left out as damaged: {len(damaged):,} of {len(paths):,} pictures, such as {first_few(damaged, n=3)}")
    return whole
