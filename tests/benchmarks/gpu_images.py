"""Images a second on their way into a GPU, in random crops and mirrored: by torchvision in workers, and whole batches.

    python tests/benchmarks/gpu_images.py             # 224 pixels, 8 workers
    python tests/benchmarks/gpu_images.py --device cpu --images 512 --workers 2     # tries the script without a GPU

Both begin with 8-bit images in memory, a little larger than the crops, as after decoding, and end with float batches on
the device. By hand each worker transforms its images one by one and collates them; the batches are pinned, and copied
without blocking. The Learner's way is `DataLoaders.from_datasets` without workers, and `ImageAugmentation` on the
device. Prints JSON: the seconds of an epoch of each in each round, by the kind of augmentation.
"""

import argparse
import json
import time

import torch
from run import take_turns
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision.transforms import v2

from learnerkit import DataLoaders, ImageAugmentation
from learnerkit.datasets import fashion_mnist_sample

SIDE, SIZE, BATCH = 256, 224, 128


def make_images(n: int) -> torch.Tensor:
    """Coloured mosaics of the shipped images, 8 bits a channel."""
    own = fashion_mnist_sample()[0].tensors[0].mul(255).byte().squeeze(1)
    tiles = own[torch.randint(len(own), (n, 3, 4, 4), generator=torch.Generator().manual_seed(0))]
    mosaics = tiles.permute(0, 1, 2, 4, 3, 5).reshape(n, 3, 4 * 28, 4 * 28)
    return v2.functional.resize(mosaics, [SIDE, SIDE])


class Each(Dataset):
    """The images, each by torchvision's transforms."""

    def __init__(self, images: torch.Tensor, transform: v2.Transform) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.transform(self.images[i])


def main() -> None:
    """Measure both, with crops alone and with all that the augmentation does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    images = make_images(args.images)

    def seconds(batches) -> float:
        if args.device == "cuda":
            torch.cuda.synchronize()
        start, seen = time.perf_counter(), 0
        for x in batches:
            assert x.shape[1:] == (3, SIZE, SIZE)
            seen += len(x)
        if args.device == "cuda":
            torch.cuda.synchronize()
        assert seen == args.images
        return time.perf_counter() - start

    found = {}
    for name, everything in (("crops, mirrored", False), ("rotated, in another light, too", True)):
        transforms = [v2.RandomResizedCrop(SIZE, (0.5, 1)), v2.RandomHorizontalFlip()]
        if everything:
            transforms += [v2.RandomRotation(10, v2.InterpolationMode.BILINEAR), v2.ColorJitter(0.2, 0.2)]
        each = v2.Compose([*transforms, v2.ToDtype(torch.float32, scale=True)])
        loader = DataLoader(
            Each(images, each), BATCH, shuffle=True, num_workers=args.workers, pin_memory=args.device == "cuda",
            persistent_workers=True,
        )  # fmt: skip
        options = {"rotate": 10, "light": 0.2} if everything else {}
        whole = ImageAugmentation(size=SIZE, **options)
        labels = torch.zeros(len(images), dtype=torch.long)
        dls = DataLoaders.from_datasets(TensorDataset(images, labels), bs=BATCH, drop_last=False, device=args.device)
        device = dls.device

        def ours(dls=dls, whole=whole, device=device):
            for x, _ in dls.train:
                yield whole(x.to(device, non_blocking=True).float().div_(255))

        def by_hand(loader=loader):
            for x in loader:
                yield x.to(args.device, non_blocking=True)

        found[name] = take_turns(
            args.rounds, lambda by_hand=by_hand: seconds(by_hand()), lambda ours=ours: seconds(ours())
        )
        del loader
    print(json.dumps({"images": args.images, "workers": args.workers, "seconds": found}))


if __name__ == "__main__":
    main()
