"""Reading one picture: a file, or one that is in memory already, as a tensor of a fixed size."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

METHODS = ("crop", "pad", "squish")


@dataclass(frozen=True)
class ImageReader:
    """Reads pictures as uint8 tensors of one shape, with the orientation that cameras note in their files (EXIF).

    Args:
        size: (height, width) of what comes out, in pixels.
        channels: 3 for colours, 1 for gray. Palettes, gray and CMYK are converted; transparency is left out.
        method: how a picture of other proportions is made to fit: 'crop' cuts off what is too much on both sides, 'pad'
            adds black there, 'squish' changes the proportions.

    Raises:
        ValueError: other values.
    """

    size: tuple[int, int]
    channels: int = 3
    method: str = "crop"

    def __post_init__(self) -> None:
        size: Any = self.size
        size = (size, size) if isinstance(size, int) else tuple(size)
        if len(size) != 2 or not all(isinstance(side, int) and side > 0 for side in size):
            raise ValueError(f"got size={self.size!r}; it is a number of pixels, or (height, width)")
        object.__setattr__(self, "size", size)
        if self.channels not in (1, 3):
            raise ValueError(f"got channels={self.channels!r}; 3 are colours, 1 is gray")
        if self.method not in METHODS:
            raise ValueError(f"got method={self.method!r}; there are {', '.join(METHODS)}")

    def __call__(self, picture: Any) -> Tensor:
        """Return a picture as a tensor of shape (channels, height, width), uint8.

        Args:
            picture: the path of a file, a PIL picture, an array of shape (H, W) or (H, W, C), or a tensor of shape
                (H, W) or (C, H, W); arrays and tensors are uint8, or floats from 0 to 1.

        Raises:
            OSError: a file that is damaged, no picture, or not there; the message has its name.
            TypeError: nothing of the above.
        """
        from PIL import Image

        if isinstance(picture, str | os.PathLike):
            try:
                with Image.open(picture) as image:
                    image.draft(self._mode, (max(self.size), max(self.size)))  # JPEG: decodes no more than is needed
                    return self._fit(self._pixels(image))
            except Exception as e:  # PIL raises many types for damaged files
                raise OSError(
                    f"the picture {os.fspath(picture)} cannot be read ({type(e).__name__}: {e}). Replace or remove it; "
                    "ImageData.from_folder(..., skip_damaged=True) leaves out files that are damaged"
                ) from e
        if isinstance(picture, Tensor | np.ndarray):
            picture = Image.fromarray(_as_bytes(picture))
        if not isinstance(picture, Image.Image):
            raise TypeError(
                f"got a {type(picture).__name__} for a picture; it is a path, a PIL picture, an array (H, W[, C]) or a "
                "tensor ([C, ]H, W)"
            )
        return self._fit(self._pixels(picture))

    @property
    def _mode(self) -> str:
        return "RGB" if self.channels == 3 else "L"

    def _pixels(self, image: Any) -> Tensor:
        "The pixels of a PIL picture, of shape (channels, H, W)."
        from PIL import Image, ImageOps

        if image.mode.startswith("I"):  # 16 bits; PIL would cut off what is above 255
            image = Image.fromarray((np.asarray(image) // 256).clip(0, 255).astype(np.uint8))
        if image.mode == "P" and "transparency" in image.info:  # which PIL warns of otherwise
            image = image.convert("RGBA")
        turned = image if image.getexif().get(_ORIENTATION, 1) == 1 else ImageOps.exif_transpose(image)
        if turned.mode != self._mode:
            turned = turned.convert(self._mode)
        pixels = torch.from_numpy(np.array(turned))
        return pixels.reshape(turned.height, turned.width, self.channels).permute(2, 0, 1)

    def _fit(self, pixels: Tensor) -> Tensor:
        (_, h, w), (height, width) = pixels.shape, self.size
        if self.method == "crop":
            kept = min(h, max(1, round(w * height / width))), min(w, max(1, round(h * width / height)))
            top, left = (h - kept[0]) // 2, (w - kept[1]) // 2
            return _resized(pixels[:, top : top + kept[0], left : left + kept[1]], self.size)
        if self.method == "squish":
            return _resized(pixels, self.size)
        inner = min(height, max(1, round(h * width / w))), min(width, max(1, round(w * height / h)))
        top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
        around = (left, width - inner[1] - left, top, height - inner[0] - top)
        return F.pad(_resized(pixels, inner), around)


_ORIENTATION = 0x0112  # the number of the EXIF tag


def _resized(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    if pixels.shape[1:] == size:
        return pixels
    return F.interpolate(pixels[None], size, mode="bilinear", antialias=True)[0]


def _as_bytes(picture: Tensor | np.ndarray) -> np.ndarray:
    "Uint8 pixels of shape (H, W) or (H, W, C)."
    if isinstance(picture, Tensor):
        picture = (picture.movedim(0, -1) if picture.ndim == 3 else picture).cpu().numpy()
    if picture.dtype.kind == "f":
        picture = (picture * 255).round().clip(0, 255).astype(np.uint8)
    if picture.dtype != np.uint8 or picture.ndim not in (2, 3):
        raise TypeError(
            f"got a picture of {picture.dtype} and shape {picture.shape}; it is uint8, or floats from 0 to 1, and has "
            "two or three dimensions"
        )
    return picture[..., 0] if picture.shape[2:] == (1,) else np.ascontiguousarray(picture)


class ReadImages(Dataset):
    """The samples of a dataset, with their pictures read.

    Args:
        samples: pictures as `ImageReader` takes them, or pairs of one and a target.
        reader: the reader.
        classes: the names of the targets, where they are classes.
    """

    def __init__(self, samples: Any, reader: ImageReader, classes: list[str] | None = None) -> None:
        self.samples, self.reader, self.classes = samples, reader, classes

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Any:
        sample = self.samples[i]
        return (self.reader(sample[0]), *sample[1:]) if isinstance(sample, tuple) else self.reader(sample)
