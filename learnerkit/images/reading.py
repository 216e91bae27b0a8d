"""Reading one picture: a file, or one that is in memory already, as a tensor of a fixed size."""

import os
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from learnerkit.data.batches import in_float32

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
        size = (size, size) if isinstance(size, Real) else tuple(size)
        if len(size) != 2 or not all(isinstance(side, Integral) and int(side) > 0 for side in size):
            raise ValueError(f"got size={self.size!r}; it is a number of pixels, or (height, width)")
        object.__setattr__(self, "size", tuple(map(int, size)))  # numpy's are no numbers for JSON
        if self.channels not in (1, 3):
            raise ValueError(f"got channels={self.channels!r}; 3 are colours, 1 is gray")
        if self.method not in METHODS:
            raise ValueError(f"got method={self.method!r}; there are {', '.join(METHODS)}")

    def __call__(self, picture: Any) -> Tensor:
        """Return a picture as a tensor of shape (channels, height, width), uint8.

        Args:
            picture: as for `placed`.
        """
        return self.placed(picture)[0]

    def placed(self, picture: Any) -> tuple[Tensor, "Place"]:
        """Return a picture as a tensor of shape (channels, height, width), uint8, and where its pixels have gone.

        Args:
            picture: the path of a file, a PIL picture, an array of shape (H, W) or (H, W, C), or a tensor of shape
                (H, W) or (C, H, W). Arrays, tensors and files of floats (TIFF) have floats from 0 to 1; otherwise
                arrays and tensors are uint8.

        Raises:
            FileNotFoundError: there is no such file.
            OSError: a file that is damaged, or no picture; the message has its name.
            TypeError: nothing of the above.
        """
        from PIL import Image

        if isinstance(picture, str | os.PathLike):
            try:
                with Image.open(picture) as image:
                    whole = image.size
                    # JPEG: decodes no more than is needed
                    is_part = image.draft(self._mode, (max(self.size), max(self.size))) is not None
                    image.load()  # This turns a TIFF by itself.
                    w, h = whole if is_part else image.size
                    lies = image.getexif().get(_ORIENTATION) in (5, 6, 7, 8)  # The picture lies on its side.
                    return self._fit(self._pixels(image)), self.place(*((w, h) if lies else (h, w)))
            except FileNotFoundError:
                raise FileNotFoundError(f"there is no picture {os.fspath(picture)}") from None
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
        pixels = self._pixels(picture)
        return self._fit(pixels), self.place(*pixels.shape[1:])

    def place(self, h: int, w: int) -> "Place":
        """Return where the pixels of a picture of height `h` and width `w` go."""
        stored = h, w
        kept = _largest(stored, self.size) if self.method == "crop" else stored
        inner = _largest(self.size, stored) if self.method == "pad" else self.size
        return Place(stored, kept, inner, self.size)

    @property
    def _mode(self) -> str:
        return "RGB" if self.channels == 3 else "L"

    def _pixels(self, image: Any) -> Tensor:
        "Return the pixels of a PIL picture, of shape (channels, H, W)."
        from PIL import Image, ImageOps

        turned = image if image.getexif().get(_ORIENTATION, 1) == 1 else ImageOps.exif_transpose(image)
        if turned.mode.startswith("I;16") or (turned.mode == "I" and image.format in _OF_16_BITS):
            # PIL would cut off what is above 255.
            turned = Image.fromarray((np.asarray(turned) // 256).clip(0, 255).astype(np.uint8))
        elif turned.mode in ("I", "F"):
            turned = Image.fromarray(_as_bytes(np.asarray(turned)))
        if turned.mode == "P" and "transparency" in turned.info:  # PIL warns otherwise.
            turned = turned.convert("RGBA")
        if turned.mode != self._mode:
            turned = turned.convert(self._mode)
        pixels = torch.from_numpy(np.array(turned))
        return pixels.reshape(turned.height, turned.width, self.channels).permute(2, 0, 1)

    def _fit(self, pixels: Tensor) -> Tensor:
        place = self.place(*pixels.shape[1:])
        (top, left), (kept_h, kept_w) = place.corner, place.kept
        pixels = pixels[:, top : top + kept_h, left : left + kept_w]
        if pixels.shape[1:] != place.inner:
            pixels = F.interpolate(pixels[None], place.inner, mode="bilinear", antialias=True)[0]
        return F.pad(pixels, place.border)


class Place(NamedTuple):
    """The mapping of a picture's pixels: a part in its middle is resized, and put in the middle of the new picture.

    Args:
        stored: (height, width) of the picture as it is stored, turned as its EXIF data say.
        kept: (height, width) of the part.
        inner: (height, width) of the part after it is resized.
        size: (height, width) of the new picture.
    """

    stored: tuple[int, int]
    kept: tuple[int, int]
    inner: tuple[int, int]
    size: tuple[int, int]

    @property
    def corner(self) -> tuple[int, int]:
        """The row and column where the part begins."""
        return (self.stored[0] - self.kept[0]) // 2, (self.stored[1] - self.kept[1]) // 2

    @property
    def border(self) -> tuple[int, int, int, int]:
        """The pixels to add at the left, right, top and bottom."""
        down, across = self.size[0] - self.inner[0], self.size[1] - self.inner[1]
        return across // 2, across - across // 2, down // 2, down - down // 2

    def moved(self, points: Tensor) -> Tensor:
        """Return points (k, 2), x and y in pixels of the stored picture, in pixels of the new one."""
        (top, left), border = self.corner, self.border
        scale = points.new_tensor([self.inner[1] / self.kept[1], self.inner[0] / self.kept[0]])
        return (points - points.new_tensor([left, top])) * scale + points.new_tensor([border[0], border[2]])

    def cut(self, mask: Tensor, outside: int) -> Tensor:
        """Return a mask (H, W) for the new picture by its nearest pixels, with the number `outside` where none are."""
        rows, columns = (
            begin + ((torch.arange(n) + 0.5) * (of / n)).long()
            for begin, of, n in zip(self.corner, self.kept, self.inner, strict=True)
        )
        return F.pad(mask[rows[:, None], columns], self.border, value=outside)


_ORIENTATION = 0x0112  # the number of the EXIF tag

_OF_16_BITS = ("PNG", "PPM")  # formats whose 16 bits PIL may read as whole numbers of 32 bits


def _largest(within: tuple[int, int], like: tuple[int, int]) -> tuple[int, int]:
    "Return the largest (height, width) within one size that has the proportions of another."
    (h, w), (height, width) = within, like
    return min(h, max(1, round(w * height / width))), min(w, max(1, round(h * width / height)))


def _as_bytes(picture: Tensor | np.ndarray) -> np.ndarray:
    "Convert a picture to uint8 pixels of shape (H, W) or (H, W, C)."
    shape = tuple(picture.shape)
    if isinstance(picture, Tensor):
        picture = in_float32(picture.detach())
        picture = (picture.movedim(0, -1) if picture.ndim == 3 else picture).cpu().numpy()
    if picture.dtype.kind == "f":
        least, most = float(picture.min()), float(picture.max())
        if not (least > -1 and most < 2):  # Interpolation goes a little beyond 0 and 1.
            raise TypeError(
                f"got a picture of {picture.dtype} from {least:g} to {most:g}; floats are from 0 to 1, and bytes "
                "(uint8) from 0 to 255"
            )
        picture = (picture * 255).round().clip(0, 255).astype(np.uint8)
    if picture.dtype != np.uint8 or picture.ndim not in (2, 3) or picture.shape[2:] > (4,):
        raise TypeError(
            f"got a picture of {picture.dtype} and shape {shape}; it is uint8, or floats from 0 to 1, and an array has "
            "the shape (H, W) or (H, W, C), a tensor (H, W) or (C, H, W), with at most 4 channels"
        )
    return picture[..., 0] if picture.shape[2:] == (1,) else np.ascontiguousarray(picture)
