"""airbench's own training loop against the same training as a Learner, on Fashion-MNIST; needs a GPU and airbench.

    pip install airbench                                          # 0.1.8, with torchvision
    python tests/benchmarks/airbench_duel.py --root data          # 25 seeds: some minutes
    python tests/benchmarks/airbench_duel.py --root data --ours --seeds 2        # one side alone; or --theirs

Both train airbench94's network for its 9.9 epochs on the same file, in airbench's format (32 x 32 pixels, three equal
colours), taking turns at beginning. For each seed the accuracy on the test images is printed (with airbench's test time
augmentation), and the seconds of training with that test. airbench's are what it measures itself, without what comes
before; the Learner's are those of the whole fit: the network, the optimizer, the progress bar and the table too.
"""

import argparse
import os
import time
from pathlib import Path
from statistics import mean, median, stdev

import torch
from airbench_learner import Images, train
from torch.nn import functional as F

from learnerkit.datasets import FASHION_MNIST_CLASSES, fashion_mnist

NAMES = {"theirs": "airbench's loop", "ours": "Learner"}


def write_files(root: Path, folder: Path) -> None:
    """Write folder/train.pt and folder/test.pt as airbench keeps CIFAR-10, if they are not there."""
    if (folder / "test.pt").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, ds in zip(("train", "test"), fashion_mnist(root), strict=True):
        images, labels = ds.tensors
        images = F.pad(images.mul(255).round().to(torch.uint8), (2, 2, 2, 2)).permute(0, 2, 3, 1).repeat(1, 1, 1, 3)
        found = {"images": images, "labels": labels, "classes": list(FASHION_MNIST_CLASSES)}
        torch.save(found, folder / f"{name}.pt")


class Theirs:
    """airbench's loop, unchanged; it reads 'cifar10/test.pt' in the working directory, and tells the time by printing.

    Args:
        folder: has the files.
    """

    def __init__(self, folder: Path) -> None:
        import airbench.utils

        os.chdir(folder.parent)
        self.airbench, self.told = airbench, dict[str, float]()
        airbench.utils.print_training_details = self.note
        hyp = airbench.lib_airbench94.hyp
        self.images = airbench.CifarLoader(
            folder.name, train=True, batch_size=hyp["opt"]["batch_size"], aug=hyp["aug"], altflip=True
        )

    def note(self, found: dict, is_final_entry: bool) -> None:
        """Take what airbench would print; only its last line has the accuracy of the whole."""
        self.told = {name: found[name] for name in ("tta_val_acc", "total_time_seconds") if name in found}

    def __call__(self, seed: int) -> tuple[float, float]:
        """Train, and return the accuracy and the seconds."""
        torch.manual_seed(seed)
        self.airbench.train94(self.images, run=1)
        return self.told["tta_val_acc"], self.told["total_time_seconds"]


class Ours:
    """The Learner; its network is tested as airbench's is.

    Args:
        folder: has the files.
    """

    def __init__(self, folder: Path) -> None:
        import airbench

        self.evaluate = airbench.evaluate
        self.images = Images(folder / "train.pt", "cuda")
        self.test = airbench.CifarLoader(str(folder), train=False, batch_size=2000)

    def __call__(self, seed: int) -> tuple[float, float]:
        """Train, and return the accuracy and the seconds."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        learn = train(self.images, seed)
        accuracy = self.evaluate(learn.model, self.test, tta_level=2)  # a number on the host: nothing is left to do
        return accuracy, time.perf_counter() - start


def main() -> None:
    """Train with each seed, and print what both come to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("data"), help="where Fashion-MNIST is, or is downloaded to")
    parser.add_argument("--seeds", type=int, default=25)
    parser.add_argument("--ours", action="store_true", help="the Learner alone")
    parser.add_argument("--theirs", action="store_true", help="airbench's loop alone")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("airbench's loop needs a GPU; tests/test_gpu_benchmarks.py compares both on the CPU")
    torch.backends.cudnn.benchmark = True
    folder = (args.root / "airbench" / "cifar10").resolve()
    write_files(args.root, folder)
    chosen = {"theirs": Theirs, "ours": Ours}
    if args.ours != args.theirs:
        chosen = {"ours": Ours} if args.ours else {"theirs": Theirs}
    sides = {name: make(folder) for name, make in chosen.items()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for side in sides.values():
        side(-1)  # the first training chooses kernels
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for seed in range(args.seeds):
        for name in sorted(sides, reverse=bool(seed % 2)):
            found[name].append(sides[name](seed))
        told = (f"{NAMES[name]} {each[-1][0]:.4f} in {each[-1][1]:.3f} s" for name, each in found.items())
        print(f"seed {seed}:", ", ".join(told), flush=True)
    for name, runs in found.items():
        accuracies, seconds = zip(*runs, strict=True)
        error = stdev(accuracies) / len(runs) ** 0.5 if len(runs) > 1 else 0.0
        print(f"{NAMES[name]}: accuracy {mean(accuracies):.4f}, standard error {error:.4f}; {median(seconds):.3f} s")
    if len(found) == 2:
        ratios = [ours[1] / theirs[1] for theirs, ours in zip(found["theirs"], found["ours"], strict=True)]
        print(f"the Learner's time over airbench's: {median(ratios):.3f}; goal 1.03")


if __name__ == "__main__":
    main()
