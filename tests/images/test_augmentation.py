"""Augmentation of whole batches: each image has numbers of its own, within what was asked for."""

import math

import pytest
import torch
from helpers import raises

from learnerkit.images.augmentation import ImageAugmentation


def places(n=200, height=32, width=48):
    """Images whose channels say where a pixel is: its column and its row, in pixels, and nothing."""
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    return torch.stack([x, y, torch.zeros_like(x)]).repeat(n, 1, 1, 1)


def slopes(found):
    """The pixels of the original between two of the result, in the middle: (n, 2) to the right, (n, 2) downwards."""
    h, w = (side // 2 for side in found.shape[-2:])
    middle = found[:, :2, h - 1 : h + 2, w - 1 : w + 2]
    return (middle[:, :, 1, 2] - middle[:, :, 1, 0]) / 2, (middle[:, :, 2, 1] - middle[:, :, 0, 1]) / 2


@pytest.mark.parametrize("size", [None, (20, 30)])
def test_crops_are_within_the_image_and_of_the_area_and_proportions_asked_for(size):
    torch.manual_seed(0)
    n, height, width = 200, 32, 48
    found = ImageAugmentation((0.25, 0.64), (0.8, 1.25), flip=0.5, size=size)(places(n, height, width))
    assert found.shape == (n, 3, *(size or (height, width)))
    out_h, out_w = found.shape[-2:]
    right, down = slopes(found)
    assert right[:, 1].abs().max() < 1e-4  # not rotated
    assert down[:, 0].abs().max() < 1e-4
    w, h = right[:, 0].abs() * out_w / width, down[:, 1] * out_h / height  # shares of the sides
    area, ratio = w * h, w / h
    assert 0.249 < area.min() < 0.3
    assert 0.58 < area.max() < 0.641
    assert 0.799 < ratio.min() < 0.85
    assert 1.18 < ratio.max() < 1.251
    assert 0.35 < (right[:, 0] < 0).float().mean() < 0.65  # mirrored
    centres = found[:, :2].mean((2, 3))
    for centre, share, side in ((centres[:, 0], w, width), (centres[:, 1], h, height)):
        assert (centre - share * side / 2).min() > -0.5
        assert (centre + share * side / 2).max() < side + 0.5
        assert centre.std() > side / 15
    assert found[:, 2].abs().max() == 0


def test_nothing_asked_for_changes_nothing_and_a_mirror_is_one():
    images = torch.rand(4, 3, 9, 12)
    assert torch.allclose(ImageAugmentation((1, 1), (1, 1), flip=0)(images), images, atol=1e-5)
    assert torch.allclose(ImageAugmentation((1, 1), (1, 1), flip=1)(images), images.flip(-1), atol=1e-5)


def test_rotations_are_of_pixels():
    torch.manual_seed(0)
    right, down = slopes(ImageAugmentation((1, 1), (1, 1), flip=0, rotate=30)(places()))
    assert torch.allclose(right.norm(dim=1), torch.ones(200), atol=1e-3)
    assert torch.allclose(down.norm(dim=1), torch.ones(200), atol=1e-3)
    assert (right * down).sum(1).abs().max() < 1e-3
    angles = torch.atan2(right[:, 1], right[:, 0]) * 180 / math.pi
    assert 25 < angles.max() < 30.01
    assert -30.01 < angles.min() < -25


def test_light_changes_brightness_and_contrast_of_each_image():
    torch.manual_seed(0)
    images = torch.rand(1, 3, 16, 16).mul(0.2).add(0.4).repeat(100, 1, 1, 1)
    found = ImageAugmentation((1, 1), (1, 1), flip=0, light=0.1)(images)
    shift = found.mean((1, 2, 3)) - images[0].mean()
    factor = found.std((1, 2, 3)) / images[0].std()
    for each, least, largest in ((shift, -0.1, 0.1), (factor, 0.9, 1.1)):
        assert least - 1e-3 < each.min() < least + 0.02
        assert largest - 0.02 < each.max() < largest + 1e-3
    assert ImageAugmentation(light=1.0)(torch.rand(50, 1, 4, 4)).aminmax() >= (0, 0)


def test_what_is_refused():
    with raises(ValueError, "got scale=(0.5, 1.5); it is (least, largest), above 0 and up to 1"):
        ImageAugmentation(scale=(0.5, 1.5))
    with raises(ValueError, "got ratio=(2, 1)"):
        ImageAugmentation(ratio=(2, 1))
    assert "scale=(0.5, 1.0)" in repr(ImageAugmentation())
