"""Augmentation of whole batches of images, and of their masks, points and boxes; each image is drawn for itself."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from learnerkit.arguments import check_number
from learnerkit.values import describe


class ImageAugmentation:
    """Shows each image of a batch in a random crop, mirrored or not, and if wanted rotated or in another light.

    Every image gets different random numbers, and a batch takes a few operations on the device. The transforms of
    `torchvision.transforms.v2` draw once for all that they get: on a batch `RandomResizedCrop`, `RandomHorizontalFlip`,
    `RandomRotation`, `ColorJitter`, `RandAugment` and the like do the same to each of its images, which teaches less.
    `lambda x: torch.stack([transform(image) for image in x])` draws for each of them, and takes longer.

    Crops are as in Szegedy et al., "Going Deeper with Convolutions", https://arxiv.org/abs/1409.4842, cut out and
    resized by one bilinear interpolation. What a rotation brings in from outside is a reflection.

    Args:
        scale: (least, largest) share of the image's area that a crop has.
        ratio: (least, largest) proportion of a crop's width to its height, relative to the image's.
        flip: the probability of mirroring left and right.
        rotate: largest angle, in degrees, to both sides.
        light: largest change of brightness, as a share of white, and of contrast, as a share of what it is.
        size: (height, width) or one number for both, in pixels; by default that of the images.

    Raises:
        ValueError: a range whose ends are not 0 < least <= largest, a share of the area above 1, or another
            `rotate` or `light` than a number from 0 on.
    """

    def __init__(
        self,
        scale: tuple[float, float] = (0.5, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: float = 0.5,
        rotate: float = 0.0,
        light: float = 0.0,
        size: int | tuple[int, int] | None = None,
    ) -> None:
        for name, (least, largest), most in (("scale", scale, 1), ("ratio", ratio, math.inf)):
            if not 0 < least <= largest <= most:
                raise ValueError(f"got {name}=({least}, {largest}); it is (least, largest), above 0 and up to {most}")
        for name, value in (("rotate", rotate), ("light", light)):
            check_number(name, value, lambda x: x >= 0, "the largest change to both sides, 0 or more")
        self.scale = scale
        self.ratio = ratio
        self.flip = flip
        self.rotate = rotate
        self.light = light
        self.size = size if size is None or isinstance(size, Sequence) else (int(size), int(size))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in vars(self).items())})"

    def __call__(self, images: Tensor, targets: Any = None) -> Any:
        """Return images augmented, and with targets the pair of both.

        Masks, points and boxes move with their image: masks by the nearest pixel, boxes to those around their corners.
        Points and boxes may leave the image.

        Args:
            images: (n, channels, height, width), floats from 0 to 1.
            targets: torchvision's `tv_tensors`: a `Mask` (n, height, width), `KeyPoints` (n, k, 2), or a list of
                dicts with `BoundingBoxes` (k, 4).

        Raises:
            TypeError: other images.
        """
        if images.ndim != 4 or not images.is_floating_point():
            raise TypeError(
                f"got {describe(images)}; ImageAugmentation takes a batch of images (n, channels, height, width), "
                "floats from 0 to 1, as images / 255 makes of uint8"
            )
        # A processor is quicker with few at a time.
        some = max(1, _IN_CACHE // max(1, images[:1].numel())) if images.device.type == "cpu" else max(1, len(images))
        parts = [self._changed(part) for part in images.split(some)]
        augmented = torch.cat([part for part, _, _ in parts])
        if targets is None:
            return augmented
        grid, forth = (torch.cat([part[i] for part in parts]) for i in (1, 2))
        return augmented, _moved(targets, grid, forth, augmented.shape[-2:])

    def _changed(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return augmented images, the places of their pixels in the originals, and the affine maps (n, 2, 3) to these.

        Places and maps count from -1 to 1, between the edges of an image.
        """
        n, channels, height, width = images.shape

        def draw(least: float, largest: float) -> Tensor:
            return images.new_empty(n, 1, 1).uniform_(least, largest)

        root, stretch = draw(*self.scale).sqrt(), draw(*map(math.log, self.ratio)).div(2).exp()
        w, h = (root * stretch).clamp(max=1), (root / stretch).clamp(max=1)
        x, y = (1 - w) * draw(-1, 1), (1 - h) * draw(-1, 1)  # the image reaches from -1 to 1
        mirrored = w * torch.where(draw(0, 1) < self.flip, -1, 1)
        angle = draw(-self.rotate, self.rotate).deg2rad() if self.rotate else torch.zeros_like(x)
        cos, sin = angle.cos(), angle.sin()
        # From a place in the crop to one in the image. An angle is one of pixels, whatever the image's proportions.
        across = [mirrored * cos, -h * sin * (height / width), x]
        along = [mirrored * sin * (width / height), h * cos, y]
        right, down = (
            torch.arange(1 - side, side, 2, device=images.device, dtype=images.dtype) / side
            for side in reversed(self.size or (height, width))
        )
        grid = torch.stack([to_x * right + to_y * down[:, None] + by for to_x, to_y, by in (across, along)], -1)
        images = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
        if self.light:
            contrast, brightness = 1 + draw(-self.light, self.light), draw(-self.light, self.light)
            shift = images.mean((1, 2, 3)).view(-1, 1, 1) * (1 - contrast) + brightness
            images = torch.addcmul(shift[:, None], images, contrast[:, None]).clamp_(0, 1)
        return images, grid, torch.stack([torch.cat(row, 2)[:, 0] for row in (across, along)], 1)


_IN_CACHE = 1 << 20  # numbers


def _moved(targets: Any, grid: Tensor, forth: Tensor, size: Sequence[int]) -> Any:
    "Move masks, points or boxes with the pixels of their images."
    from torchvision import tv_tensors

    if isinstance(targets, tv_tensors.Mask):
        masks = targets.as_subclass(Tensor)[:, None]
        exact = torch.promote_types(grid.dtype, torch.float32)  # every number of a class is one of these, too
        moved = F.grid_sample(masks.to(exact), grid.to(exact), "nearest", "reflection", align_corners=False)
        return moved[:, 0].round().to(masks.dtype)
    if isinstance(targets, tv_tensors.KeyPoints):
        return _placed(targets.as_subclass(Tensor), forth, targets.canvas_size, size)
    return [_boxes_moved(each, affine[None], size) for each, affine in zip(targets, forth, strict=True)]


def _placed(points: Tensor, forth: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
    "Move points (n, k, 2), in pixels, from images of the size `before` to augmented ones of the size `after`."
    old, new = (points.new_tensor(side[::-1]) for side in (before, after))
    places = (points * 2 / old - 1 - forth[:, None, :, 2].to(points)) @ forth[:, :, :2].to(points).inverse().mT
    return (places + 1) * new / 2


def _boxes_moved(target: dict, affine: Tensor, size: Sequence[int]) -> dict:
    boxes, old = target["boxes"].as_subclass(Tensor), target["boxes"].canvas_size
    corners = _placed(boxes[:, [0, 1, 2, 1, 0, 3, 2, 3]].reshape(1, -1, 2), affine, old, size).view(-1, 4, 2)
    return target | {"boxes": torch.cat([corners.amin(1), corners.amax(1)], 1)}
