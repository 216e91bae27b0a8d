"""The targets of pictures: how each kind is read, and how it is transformed with its picture."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from learnerkit.data.weights import labels_of
from learnerkit.images.reading import ImageReader, Place
from learnerkit.text import did_you_mean, first_few
from learnerkit.values import describe, map_batch

TARGETS = ("class", "classes", "numbers", "points", "boxes", "masks")

IGNORED = -100
"""The number of pixels of a mask that count for nothing, as in torch's losses."""


class TargetReader:
    """Reads the targets of pictures as tensors.

    Args:
        kind: one of `TARGETS`, as for `ImageData`.
        classes: the names of the classes, where there are some.

    Raises:
        ValueError: another kind.
    """

    def __init__(self, kind: str = "class", classes: Sequence[str] | None = None) -> None:
        if kind not in TARGETS:
            raise ValueError(
                f"got targets={kind!r}{did_you_mean(kind, TARGETS)}; it is one of {', '.join(map(repr, TARGETS))}"
            )
        self.kind, self.classes = kind, classes
        self._numbers = {name: number for number, name in enumerate(classes or ())}

    def encoded(self, y: Any) -> Any:
        """Convert a target to a tensor, or to a dict of tensors; return a class, or a mask, as it is given.

        Args:
            y: the target, as `ImageData` takes it.

        Raises:
            ValueError: nothing of the kind.
        """
        if self.kind in ("class", "masks"):
            return y
        if self.kind == "classes" and isinstance(y, Tensor):
            return y.float()
        if self.kind == "classes":
            several = torch.zeros(len(self._numbers))
            several[self.numbers(map(str, listed(y)))] = 1
            return several
        if self.kind == "boxes":
            if not isinstance(y, Mapping) or set(y) != {"boxes", "labels"}:
                raise ValueError(f"got {describe(y)}; the boxes of a picture are a dict with 'boxes' and 'labels'")
            boxes, labels = self._floats(y["boxes"], 4), self.numbers(y["labels"])
            if len(boxes) != len(labels):
                raise ValueError(f"got {len(boxes)} boxes and {len(labels)} labels; each box has one")
            if turned := boxes[(boxes[:, 2:] < boxes[:, :2]).any(1)].tolist():
                raise ValueError(
                    f"got the box {turned[0]}, which ends before it begins; a box is its left, top, right and bottom in"
                    " pixels, not its width and height"
                )
            return {"boxes": boxes, "labels": labels}
        return self._floats(y, 2) if self.kind == "points" else self._floats(y).flatten()

    def _floats(self, y: Any, width: int = 0) -> Tensor:
        "Convert numbers to a tensor, of shape (n, width) if there is a width."
        try:
            numbers = torch.as_tensor(y, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError):
            numbers = torch.tensor(torch.nan)
        if not numbers.isfinite().all():
            raise ValueError(f"got the target {y!r}; targets={self.kind!r} are finite numbers")
        odd = numbers.shape[-1] != width if numbers.ndim > 1 else numbers.numel() % max(1, width)
        if width and numbers.numel() and odd:
            raise ValueError(f"got the target {y!r}; targets={self.kind!r} are {width} numbers each")
        return numbers.reshape(-1, width) if width else numbers

    def numbers(self, names: Any) -> Tensor:
        """Return the numbers of classes, int64, that are given by name or, of boxes, by number.

        Args:
            names: text, or whole numbers, which are names where those of the classes are whole numbers. A tensor has
                the numbers.

        Raises:
            ValueError: others.
        """
        if isinstance(names, Tensor):
            names = indices = names.tolist()
        else:
            names = list(names)
            are_names = any(map(str.isdecimal, self._numbers))
            indices = [self._numbers.get(str(name), None if are_names else name) for name in names]
        most = len(self._numbers)
        wrong = [
            name
            for name, x in zip(names, indices, strict=True)
            if not isinstance(x, int | np.integer) or x < 0 or (most and x >= most)
        ]
        if wrong:
            there = first_few(self._numbers, n=20) or "not given as classes=, so that labels are numbers"
            raise ValueError(f"got the labels {first_few(dict.fromkeys(wrong))}; the classes are: {there}")
        return torch.tensor(indices, dtype=torch.int64)

    def check(self, encoded: Iterable[Any]) -> None:
        """Look at all targets of a data set, without the files of masks.

        Raises:
            FileNotFoundError: masks whose files are not there.
            ValueError: more numbers or points for one picture than for another.
        """
        if self.kind == "masks":
            paths = [y for y in encoded if isinstance(y, str | os.PathLike)]
            if missing := [path for path in paths if not os.path.isfile(path)]:
                raise FileNotFoundError(
                    f"{len(missing):,} of {len(paths):,} masks are not there: {first_few(missing, n=3)}"
                )
        elif self.kind in ("numbers", "points") and len(lengths := {len(y) for y in encoded}) > 1:
            raise ValueError(
                f"the pictures have {min(lengths)} to {max(lengths)} {self.kind}; each has as many as the others"
            )

    def fitted(self, y: Any, place: Place) -> Any:
        """Return a target for the picture of another size.

        Args:
            y: the target of the picture as it is stored.
            place: where the picture's pixels have gone.

        Raises:
            ValueError: a mask of another size, or with numbers of no class.
        """
        y = self.encoded(y)
        if self.kind == "points":
            return place.moved(y)
        if self.kind == "boxes":
            return inside({**y, "boxes": place.moved(y["boxes"].reshape(-1, 2)).reshape(-1, 4)}, place.size)
        return self._mask(y, place) if self.kind == "masks" else y

    def _mask(self, y: Any, place: Place) -> Tensor:
        mask = _pixels(y)
        if mask.shape != place.stored:
            raise ValueError(
                f"the mask has {' x '.join(map(str, mask.shape))} pixels and its picture "
                f"{' x '.join(map(str, place.stored))}; they are (height, width), and equal"
            )
        mask = place.cut(mask, IGNORED)
        most = len(self.classes) if self.classes else torch.iinfo(mask.dtype).max
        wrong = mask[((mask < 0) | (mask >= most)) & (mask != IGNORED)]
        if len(wrong):
            raise ValueError(
                f"the mask has the numbers {first_few(wrong.unique().tolist())}; those of the classes are 0 to "
                f"{most - 1}, and {IGNORED} counts for nothing. A function of the path as label= may return an array "
                "with other numbers"
            )
        return mask


def listed(names: Any, delim: str | None = None) -> Collection[Any]:
    """Return the classes of a picture, of which a text is divided at each `delim`; spaces around a name do not count.

    Raises:
        ValueError: a text and no `delim`, or something else than a collection.
    """
    if isinstance(names, str) and delim is not None:
        return [name for name in map(str.strip, names.split(delim)) if name]
    if isinstance(names, str) or not isinstance(names, Collection):
        raise ValueError(
            f"got {names!r} as the classes of a picture; they are a list or a set of names, or a text with delim=, "
            "which says where to divide it, such as delim=' '; a picture without classes has an empty text or list: "
            "fillna('') in a frame"
        )
    return names


def _pixels(mask: Any) -> Tensor:
    "Return the numbers of a mask that is a file, a PIL picture, an array or a tensor."
    from PIL import Image

    if isinstance(mask, str | os.PathLike):
        with Image.open(mask) as image:
            mask = np.array(image)
    if not isinstance(mask, Tensor):
        array = np.array(mask)
        mask = torch.as_tensor(array.astype(array.dtype.newbyteorder("=")))  # ImageJ's files may have another order.
    if mask.ndim != 2 or mask.is_floating_point():
        raise ValueError(f"got {describe(mask)} as a mask; it has the whole number of a class for each pixel, (H, W)")
    return mask.long()


def inside(y: dict[str, Tensor], size: Sequence[int]) -> dict[str, Tensor]:
    """Cut boxes at the borders of a picture of this (height, width), and leave out those of which nothing is left."""
    boxes = y["boxes"].reshape(-1, 2, 2)
    boxes = boxes.minimum(boxes.new_tensor(size[::-1])).clamp_min(0)
    kept = (boxes[:, 1] > boxes[:, 0]).all(1)
    return {"boxes": boxes[kept].reshape(-1, 4), "labels": y["labels"][kept]}


def transformed(transform: Callable[..., Any], kind: str, picture: Tensor, *targets: Any) -> tuple:
    """Apply a transform of `torchvision.transforms.v2` to a picture, or to a batch, and its targets together.

    Boxes are cut at the picture's borders.

    Args:
        transform: f(picture, target) -> (picture, target), such as an `ImageAugmentation` for a batch.
        kind: one of `TARGETS`.
        picture: of shape (C, H, W), or a batch (n, C, H, W).
        targets: as `TargetReader.fitted` returns them, or a batch of them: boxes in a list.

    Raises:
        ValueError: something else is returned.
    """
    from torchvision import tv_tensors
    from torchvision.transforms.v2.functional import convert_bounding_box_format

    canvas: Any = tuple(picture.shape[-2:])

    def wrapped(y: Any) -> Any:
        if isinstance(y, list):
            return list(map(wrapped, y))
        if kind == "masks":
            return tv_tensors.Mask(y)
        if kind == "points":
            return tv_tensors.KeyPoints(y, canvas_size=canvas)
        if kind == "boxes":
            return {**y, "boxes": tv_tensors.BoundingBoxes(y["boxes"], format="XYXY", canvas_size=canvas)}
        return y

    def plain(t: Tensor) -> Tensor:
        if isinstance(t, tv_tensors.BoundingBoxes) and t.format is not tv_tensors.BoundingBoxFormat.XYXY:
            t = convert_bounding_box_format(t, new_format="XYXY")
        return t.as_subclass(Tensor)

    result = transform(tv_tensors.Image(picture), *map(wrapped, targets))
    if not isinstance(result, tuple) or len(result) != 1 + len(targets) or not isinstance(result[0], Tensor):
        raise ValueError(f"{transform} returned {describe(result)}; a transform returns (picture, target), as tensors")
    picture, *moved = map_batch(plain, result)
    if kind == "boxes":
        size = picture.shape[-2:]
        moved = [[inside(each, size) for each in y] if isinstance(y, list) else inside(y, size) for y in moved]
    return picture, *moved


class ReadImages(Dataset):
    """The samples of a dataset, with their pictures read.

    Args:
        samples: pictures as `ImageReader` takes them, or pairs of one and a target.
        reader: of the pictures.
        targets: reader of the targets.
        transform: as for `ImageData.dataloaders`.
    """

    def __init__(
        self,
        samples: Any,
        reader: ImageReader,
        targets: TargetReader | None = None,
        transform: Callable[..., Any] | None = None,
    ) -> None:
        self.samples = samples
        self.reader = reader
        self.targets = targets or TargetReader()
        self.transform = transform

    @property
    def classes(self) -> Sequence[str] | None:
        """The names of the classes, where there are some."""
        return self.targets.classes

    @property
    def labels(self) -> Tensor | None:
        """The number of each picture's class, where it has one and they are listed; no picture is read."""
        return labels_of(self.samples) if self.targets.kind == "class" else None

    def scale(self) -> tuple[Tensor, Tensor]:
        """Return the mean and the standard deviation with which predictions of numbers and points begin.

        For points these are the middle of the picture and half its size. For numbers they are those of the targets, if
        these are in a list, so that no picture is read; otherwise they are 0 and 1.
        """
        first = self.targets.encoded(self.samples[0][1])
        if self.targets.kind == "points":
            middle = first.new_tensor(self.reader.size[::-1]).div(2).expand_as(first)
            return middle, middle
        if not isinstance(self.samples, list):
            return torch.zeros_like(first), torch.ones_like(first)
        numbers = torch.stack([self.targets.encoded(y) for _, y in self.samples])
        spread = numbers.std(0, correction=0)
        return numbers.mean(0), spread.where(spread > 0, 1.0)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Any:
        sample = self.samples[i]
        if isinstance(sample, Mapping | list):
            raise TypeError(f"got {describe(sample)} as a sample; it is a picture, or a pair (picture, target)")
        if not isinstance(sample, tuple):
            return self.reader(sample)
        picture, place = self.reader.placed(sample[0])
        try:
            result = (picture, *(self.targets.fitted(y, place) for y in sample[1:]))
        except ValueError as e:
            name = sample[0] if isinstance(sample[0], str | os.PathLike) else describe(sample[0])
            raise ValueError(f"the target of picture {i}, {name}: {e}") from e
        return result if self.transform is None else transformed(self.transform, self.targets.kind, *result)
