"""Reading one picture: kinds of files, the orientation, how it is made to fit, damage."""

import numpy as np
import pytest
import torch
from helpers import raises
from PIL import Image

from learnerkit.images.reading import ImageReader


def ramp(height=40, width=60):
    """An array (H, W) that becomes lighter to the right and, less so, downwards."""
    y, x = np.mgrid[:height, :width]
    return (x * 200 / width + y * 50 / height).astype(np.uint8)


def as_kind(mode):
    """The ramp as a PIL picture of this mode, gray in all of them."""
    gray = Image.fromarray(ramp())
    if mode == "I;16":
        return Image.fromarray(ramp().astype(np.uint16) * 257)
    if mode == "P with transparency":
        picture = gray.convert("P")
        picture.info["transparency"] = bytes(range(256))
        return picture
    return gray.convert("RGB" if mode == "CMYK" else mode).convert(mode)


KINDS = [
    ("L", "png"), ("L", "jpg"), ("RGB", "png"), ("RGB", "jpg"), ("RGBA", "png"), ("LA", "png"), ("P", "png"),
    ("P", "gif"), ("P with transparency", "png"), ("CMYK", "jpg"), ("I;16", "png"), ("I;16", "tif"), ("RGB", "webp"),
    ("RGB", "bmp"),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "suffix"), KINDS)
def test_every_kind_of_file_has_the_channels_that_are_asked_for(mode, suffix, tmp_path):
    path = tmp_path / f"picture.{suffix}"
    as_kind(mode).save(path, **({"quality": 95} if suffix in ("jpg", "webp") else {}))
    for channels in (3, 1):
        x = ImageReader((40, 60), channels)(path)
        assert (x.shape, x.dtype) == ((channels, 40, 60), torch.uint8)
        assert (x.float() - torch.from_numpy(ramp()).float()).abs().mean() < 4


@pytest.mark.parametrize("method", ["crop", "pad", "squish"])
def test_a_picture_stands_upright_as_its_camera_says(method, tmp_path):
    upright = Image.fromarray(ramp()).convert("RGB")
    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }  # fmt: skip
    reader = ImageReader((24, 32), method=method)
    expected, place = reader.placed(upright)
    of_16_bits = Image.fromarray(ramp().astype(np.uint16) * 257)
    for tag, turn in turns.items():
        exif = Image.Exif()
        exif[0x0112] = tag
        for suffix, picture in (("png", upright), ("tif", upright), ("png", of_16_bits), ("tif", of_16_bits)):
            path = tmp_path / f"{tag}.{suffix}"
            # Pillow 12.3 turns an uncompressed TIFF of one channel wrongly.
            picture.transpose(turn).save(path, exif=exif, **({"compression": "tiff_lzw"} if suffix == "tif" else {}))
            x, found = reader.placed(path)
            assert torch.equal(x, expected), (tag, path, picture)
            assert found == place, (tag, path, picture)


def test_files_of_floats_are_from_0_to_1_and_whole_numbers_without_a_range_are_refused(tmp_path):
    path, reader = tmp_path / "picture.tif", ImageReader((40, 60), 1)
    floats = ramp().astype(np.float32) / 255
    Image.fromarray(floats).save(path)
    assert torch.equal(reader(path), reader(floats))
    for wrong in (floats * 1000, ramp().astype(np.int32)):
        Image.fromarray(wrong).save(path)
        with raises(OSError, "cannot be read (TypeError: got a picture of", "floats"):
            reader(path)


def marked(height, width):
    """A white picture with a black border of a tenth of its shorter side."""
    array, n = np.full((height, width), 255, np.uint8), min(height, width) // 10
    array[:n], array[-n:], array[:, :n], array[:, -n:] = 0, 0, 0, 0
    return array


@pytest.mark.parametrize(("height", "width"), [(100, 400), (400, 100), (1000, 240), (30, 18)])
def test_a_picture_is_made_to_fit(height, width, tmp_path):
    path = tmp_path / "picture.jpg"  # large ones are decoded at a lower resolution
    Image.fromarray(marked(height, width)).save(path, quality=95)
    short = 50 // 10
    found = {method: ImageReader(50, 1, method)(path)[0].float() / 255 for method in ("crop", "pad", "squish")}
    crop = found["crop"] if width > height else found["crop"].T  # as if it were a wide one
    assert crop[0].max() < 0.3  # the long sides' border is there, the others' is cut off
    assert crop[-1].max() < 0.3
    if max(height, width) > 1.5 * min(height, width):
        assert crop[short + 1 : -short - 1].min() > 0.7
    squished = found["squish"]
    for border in (squished[0], squished[-1], squished[:, 0], squished[:, -1]):
        assert border.max() < 0.3
    assert squished[20:30, 20:30].min() > 0.9
    share = min(height, width) / max(height, width)
    assert float(found["pad"].mean()) == pytest.approx(float(squished.mean()) * share, abs=0.04)
    for pad in (found["pad"], found["pad"].flip(0), found["pad"].flip(1)):
        assert torch.allclose(pad, found["pad"], atol=0.1)  # in the middle


def test_what_is_in_memory_is_read_like_a_file():
    gray = torch.from_numpy(ramp())
    colours = torch.stack([gray, 255 - gray, gray // 2])
    reader = ImageReader(20)
    expected = reader(Image.fromarray(colours.permute(1, 2, 0).numpy()))
    for wrong in (colours.float(), colours.float() / 255 - 3, colours / torch.nan):
        with pytest.raises(TypeError, match="got a picture of float32 from .* to .*; floats are from 0 to 1"):
            ImageReader(8)(wrong)
    for picture in (colours, colours.float() / 255, colours.permute(1, 2, 0).numpy()):
        assert torch.equal(reader(picture), expected)
    for picture in (gray, gray[None], gray[..., None].numpy(), gray.numpy().astype(np.float32) / 255):
        assert torch.equal(reader(picture), reader(Image.fromarray(gray.numpy())))
    assert torch.equal(ImageReader((40, 60))(colours), colours)
    made = (colours.bfloat16() / 255).requires_grad_()
    assert torch.equal(ImageReader((40, 60))(made), (made.detach().double() * 255).round().byte())
    with raises(TypeError, "got a picture of int64 and shape (40, 60); it is uint8"):
        reader(gray.long())
    for wrong in (colours.numpy(), colours.permute(1, 2, 0)):
        with raises(TypeError, f"got a picture of uint8 and shape {tuple(wrong.shape)}; ", "at most 4 channels"):
            reader(wrong)
    with raises(TypeError, "got a list for a picture"):
        reader([1, 2])


def test_a_damaged_file_is_named(tmp_path):
    whole = tmp_path / "whole.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(whole)
    data = whole.read_bytes()
    for name, found in {"short.jpg": data[: len(data) // 2], "text.png": b"no picture", "empty.jpg": b""}.items():
        (tmp_path / name).write_bytes(found)
        with raises(OSError, f"the picture {tmp_path / name} cannot be read (", "skip_damaged=True"):
            ImageReader(32)(tmp_path / name)
    with raises(FileNotFoundError, "there is no picture nowhere.jpg"):
        ImageReader(32)("nowhere.jpg")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"size": 0}, "got size=0; it is a number of pixels"),
        ({"size": (1, 2, 3)}, "got size=(1, 2, 3)"),
        ({"size": 8.0}, "got size=8.0; it is a number of pixels"),
        ({"size": 8, "channels": 4}, "got channels=4; 3 are colours"),
        ({"size": 8, "method": "zoom"}, "got method='zoom'; there are crop, pad, squish"),
    ],
)
def test_what_a_reader_refuses(kwargs, message):
    with raises(ValueError, message):
        ImageReader(**kwargs)


def test_sizes_of_numpy_are_plain_numbers():
    for size in (np.int64(8), (np.int64(8), 8)):
        assert ImageReader(size) == ImageReader(8)
        assert all(type(side) is int for side in ImageReader(size).size)
