"""Seconds of an epoch of reading JPEGs, and of an augmentation, by hand and by `ImageData`, as JSON; see run.py."""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from PIL import Image
from run import take_turns
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from learnerkit import ImageAugmentation, ImageData
from learnerkit.datasets import fashion_mnist_sample
from learnerkit.images.reading import ImageReader

WORKERS, BATCH, SIDE, SIZE = 2, 64, 256, 224


def mosaics(n):
    """Yield mosaics of 16 of the shipped images, in colours: (112, 112, 3), 8 bits a channel."""
    images = fashion_mnist_sample()[0].tensors[0].mul(255).byte().squeeze(1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(n):
        tiles = images[torch.randint(len(images), (4, 4, 3), generator=generator)]
        yield tiles.permute(0, 3, 1, 4, 2).reshape(4 * 28, 4 * 28, 3)


def augmentations(size, everything):
    """torchvision's for one image of 8 bits, and that of whole batches of floats, of the same kind."""
    transforms = [v2.RandomResizedCrop(size, (0.5, 1)), v2.RandomHorizontalFlip()]
    if everything:
        transforms += [v2.RandomRotation(10, v2.InterpolationMode.BILINEAR), v2.ColorJitter(0.2, 0.2)]
    more = {"rotate": 10, "light": 0.2} if everything else {}
    return v2.Compose([*transforms, v2.ToDtype(torch.float32, scale=True)]), ImageAugmentation(size=size, **more)


def write_pictures(folder, n):
    """Write mosaics as JPEGs of about 15 KB."""
    paths = []
    for i, mosaic in enumerate(mosaics(n)):
        paths.append(folder / f"{i}.jpg")
        Image.fromarray(mosaic.numpy()).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(paths[-1], quality=90)
    return list(map(str, paths))


class ByHand(Dataset):
    """What one writes with PIL, as torchvision's own datasets do, and torchvision's transforms."""

    def __init__(self, paths, labels, transform):
        self.paths, self.labels, self.transform = paths, labels, transform

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        with Image.open(self.paths[i]) as image:
            return self.transform(image.convert("RGB")), self.labels[i]


def reading(paths, rounds):
    """Seconds of an epoch: by hand, by `ImageData`."""
    labels = [i % 10 for i in range(len(paths))]
    fit = v2.Compose([v2.PILToTensor(), v2.Resize(SIZE), v2.CenterCrop(SIZE)])
    loader = DataLoader(ByHand(paths, labels, fit), BATCH, shuffle=True, num_workers=WORKERS)
    dls = ImageData.from_items(paths, labels, None, size=SIZE).dataloaders(BATCH, num_workers=WORKERS, device="cpu")

    def epoch(batches):
        start, seen = time.perf_counter(), 0
        for x, _ in batches:
            seen += len(x)
        assert seen == len(paths)
        return time.perf_counter() - start

    return take_turns(rounds, lambda: epoch(loader), lambda: epoch(dls.train))


def augmenting(paths, rounds, size, everything):
    """Seconds for a batch: image by image with torchvision's transforms, and the whole batch."""
    read = ImageReader(size)
    batch = torch.stack([read(path) for path in paths[:BATCH]])
    each, whole = augmentations(size, everything)

    def timed(function):
        start = time.perf_counter()
        for _ in range(5):
            function()
        return time.perf_counter() - start

    return take_turns(
        rounds, lambda: timed(lambda: torch.stack(list(map(each, batch)))), lambda: timed(lambda: whole(batch / 255))
    )


def main(rounds, n):
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        paths = write_pictures(Path(folder), n)
        found = {"reading": reading(paths, rounds)}
        for size in (32, 64, 128, 224):
            for everything in (False, True):
                found[f"{size}{', rotated, in another light' * everything}"] = augmenting(
                    paths, rounds, size, everything
                )
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
