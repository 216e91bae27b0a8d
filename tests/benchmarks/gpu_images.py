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
from images import augmentations, mosaics
from run import take_turns
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision.transforms import v2

from learnerkit import DataLoaders

SIDE, SIZE, BATCH = 256, 224, 128


class Each(Dataset):
    """The images, each by torchvision's transforms."""

    def __init__(self, images: torch.Tensor, transform: v2.Transform) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.transform(self.images[i])


def compare(images: torch.Tensor, everything: bool, args: argparse.Namespace) -> list[tuple[float, ...]]:
    """The seconds of an epoch: each image in workers, and whole batches."""
    device, on_gpu = torch.device(args.device), args.device == "cuda"
    each, whole = augmentations(SIZE, everything)
    loader = DataLoader(
        Each(images, each), BATCH, shuffle=True, num_workers=args.workers, pin_memory=on_gpu, persistent_workers=True
    )
    data = TensorDataset(images, torch.zeros(len(images), dtype=torch.long))
    dls = DataLoaders.from_datasets(data, bs=BATCH, device=device)
    assert dls.device == device  # from then on its batches are pinned

    def timed(batches, augment) -> float:
        if on_gpu:
            torch.cuda.synchronize()
        start, seen = time.perf_counter(), 0
        for x in batches:
            seen += len(augment(x.to(device, non_blocking=True)))
        if on_gpu:
            torch.cuda.synchronize()
        assert seen == len(images)
        return time.perf_counter() - start

    return take_turns(
        args.rounds,
        lambda: timed(loader, lambda x: x),
        lambda: timed((x for x, _ in dls.train), lambda x: whole(x.float().div_(255))),
    )


def main() -> None:
    """Measure both, with crops alone and with all that the augmentation does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    images = torch.stack([v2.functional.resize(x.permute(2, 0, 1), [SIDE, SIDE]) for x in mosaics(args.images)])
    kinds = {"crops, mirrored": False, "rotated, in another light, too": True}
    found = {name: compare(images, everything, args) for name, everything in kinds.items()}
    print(json.dumps({"images": args.images, "workers": args.workers, "seconds": found}))


if __name__ == "__main__":
    main()
