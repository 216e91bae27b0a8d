"""Augmentation of whole batches: each image has numbers of its own, within what was asked for."""

import math

import numpy as np
import pytest
import torch
from helpers import raises
from torch.nn import functional as F
from torchvision.transforms import v2

from learnerkit.images import augmentation
from learnerkit.images.augmentation import ImageAugmentation
from learnerkit.images.targets import transformed


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


# What moves with the images


KINDS = {
    "crops": ImageAugmentation(scale=(0.3, 0.9), flip=0.5),
    "rotates": ImageAugmentation((0.5, 1), rotate=40, size=(40, 52)),
    "a processor's parts": ImageAugmentation((0.5, 1), rotate=10),
}


@pytest.mark.parametrize("name", KINDS)
def test_masks_and_points_move_with_their_images(name, monkeypatch):
    if name == "a processor's parts":
        monkeypatch.setattr(augmentation, "_IN_CACHE", 3 * 32 * 48 * 2)
    torch.manual_seed(0)
    images = places(5)
    number = (images[:, 0] // 1 + 48 * (images[:, 1] // 1)).long()
    points = torch.rand(5, 7, 2) * torch.tensor([48.0, 32])
    found = {}
    for kind, y in (("masks", number), ("points", points)):
        torch.manual_seed(1)
        found[kind] = transformed(KINDS[name], kind, images, y)
    torch.manual_seed(1)
    alone = KINDS[name](images)
    assert all(type(pair[0]) is type(pair[1]) is torch.Tensor for pair in found.values())
    assert all(torch.equal(pair[0], alone) for pair in found.values())
    mask = found["masks"][1]
    assert mask.dtype == torch.int64
    # In the middle of the result, the pixel of the mask is the one whose column and row the image has.
    column, row = (alone[:, i, 10:22, 14:34] for i in (0, 1))
    inner = mask[:, 10:22, 14:34]
    assert ((inner % 48 + 0.5 - column).abs() < 0.51).all()
    assert ((inner // 48 + 0.5 - row).abs() < 0.51).all()
    height, width = alone.shape[-2:]
    for i in range(5):
        moved = found["points"][1][i]
        inside = ((moved > 1) & (moved < torch.tensor([width - 1.0, height - 1.0]))).all(1)
        at = moved[inside] * 2 / torch.tensor([width, height]) - 1
        shown = F.grid_sample(alone[i : i + 1, :2], at[None, None], align_corners=False)[0, :, 0].T
        assert inside.any()
        torch.testing.assert_close(shown, points[i][inside], atol=0.02, rtol=0)


def test_boxes_are_those_around_what_they_had():
    torch.manual_seed(0)
    images = torch.zeros(20, 3, 32, 48)
    images[:, :, 8:20, 10:30] = 1
    names = torch.tensor([3, 4])
    boxes = [{"boxes": torch.tensor([[10.0, 8, 30, 20], [43, 27, 48, 32]]), "labels": names}] * 20
    found, moved = transformed(ImageAugmentation((0.4, 0.9)), "boxes", images, boxes)
    assert {len(each["boxes"]) for each in moved} == {1, 2}  # the small one is often outside
    for image, each in zip(found, moved, strict=True):
        assert len(each["labels"]) == len(each["boxes"])
        assert each["labels"][0] == 3
        rows, columns = ((image[0] > 0.5).any(1 - i).nonzero() for i in (0, 1))
        shown = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert (each["boxes"][0] - torch.tensor(shown)).abs().max() < 1.01
        assert (each["boxes"] >= 0).all()
        assert (each["boxes"] <= torch.tensor([48, 32, 48, 32])).all()
    assert torch.equal(boxes[0]["boxes"], torch.tensor([[10.0, 8, 30, 20], [43, 27, 48, 32]]))


def test_transforms_of_torchvision_get_images_and_targets():
    images, mask = torch.rand(3, 3, 20, 30), torch.randint(4, (3, 20, 30))
    boxes = [{"boxes": torch.tensor([[2.0, 3, 10, 9]]), "labels": torch.tensor([1])}] * 3
    for kind, y in (("masks", mask), ("boxes", boxes)):
        ours, theirs = (
            transformed(fn, kind, images, y)
            for fn in (ImageAugmentation((1, 1), (1, 1), flip=1), v2.RandomHorizontalFlip(1))
        )
        torch.testing.assert_close(ours, theirs)
        assert type(theirs[0]) is torch.Tensor
    torch.manual_seed(0)
    found, moved = transformed(v2.RandomResizedCrop(10), "masks", images, mask)
    assert (found.shape, moved.shape) == ((3, 3, 10, 10), (3, 10, 10))


def test_bad_scales_and_ratios_are_refused():
    with raises(ValueError, "got scale=(0.5, 1.5); it is (least, largest), above 0 and up to 1"):
        ImageAugmentation(scale=(0.5, 1.5))
    with raises(ValueError, "got ratio=(2, 1)"):
        ImageAugmentation(ratio=(2, 1))
    for name, value in (("rotate", (-10, 10)), ("light", -0.1)):
        with raises(ValueError, f"got {name}={value}; it is the largest change to both sides, 0 or more"):
            ImageAugmentation(**{name: value})
    assert ImageAugmentation(size=np.int64(4))(torch.zeros(1, 1, 8, 8)).shape == (1, 1, 4, 4)
    assert "scale=(0.5, 1.0)" in repr(ImageAugmentation())


@pytest.mark.parametrize(
    ("images", "what"),
    [
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "uint8 tensor of shape (2, 3, 8, 8)"),
        (torch.zeros(3, 8, 8), "float32 tensor of shape (3, 8, 8)"),
    ],
)
def test_what_is_no_batch_of_floats_is_refused(images, what):
    with raises(TypeError, f"got {what}; ImageAugmentation takes a batch of images", "as images / 255 makes of uint8"):
        ImageAugmentation()(images)
