"""Augmentation of whole batches of images, with random numbers of its own for each image."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


class ImageAugmentation:
    """Shows each image of a batch in a random crop, mirrored or not, and if wanted rotated or in another light.

    Every image has random numbers of its own, and a batch takes a few operations on the device. The transforms of
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
        ValueError: a range whose ends are not 0 < least <= largest, or a share of the area above 1.
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
        self.scale, self.ratio, self.flip, self.rotate, self.light = scale, ratio, flip, rotate, light
        self.size = (size, size) if isinstance(size, int) else size

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in vars(self).items())})"

    def __call__(self, images: Tensor) -> Tensor:
        """Return the images (n, channels, height, width), floats from 0 to 1, augmented."""
        if images.device.type != "cpu":
            return self._changed(images)
        some = max(1, _IN_CACHE // max(1, images[:1].numel()))  # a processor is quicker with few at a time
        return torch.cat([self._changed(part) for part in images.split(some)])

    def _changed(self, images: Tensor) -> Tensor:
        n, channels, height, width = images.shape

        def draw(least: float, largest: float) -> Tensor:
            return images.new_empty(n, 1, 1).uniform_(least, largest)

        root, stretch = draw(*self.scale).sqrt(), draw(*map(math.log, self.ratio)).div(2).exp()
        w, h = (root * stretch).clamp(max=1), (root / stretch).clamp(max=1)
        x, y = (1 - w) * draw(-1, 1), (1 - h) * draw(-1, 1)  # the image reaches from -1 to 1
        mirrored = w * torch.where(draw(0, 1) < self.flip, -1, 1)
        out_height, out_width = self.size or (height, width)
        right, down = (
            torch.arange(1 - side, side, 2, device=images.device, dtype=images.dtype) / side
            for side in (out_width, out_height)
        )
        # From a place in the crop to one in the image: across = x + mirrored * right, and so on.
        across, along = (
            (x + mirrored * right).expand(n, out_height, -1),
            (y + h * down[:, None]).expand(-1, -1, out_width),
        )
        if self.rotate:
            angle = draw(-self.rotate, self.rotate).deg2rad()
            cos, sin = angle.cos(), angle.sin()
            # An angle is one of pixels, whatever the image's proportions.
            across, along = (
                x + mirrored * cos * right - h * sin * (height / width) * down[:, None],
                y + mirrored * sin * (width / height) * right + h * cos * down[:, None],
            )
        grid = torch.stack([across, along], -1)
        images = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
        if self.light:
            contrast, brightness = 1 + draw(-self.light, self.light), draw(-self.light, self.light)
            shift = images.mean((1, 2, 3)).view(-1, 1, 1) * (1 - contrast) + brightness
            images = torch.addcmul(shift[:, None], images, contrast[:, None]).clamp_(0, 1)
        return images


_IN_CACHE = 1 << 20  # numbers
