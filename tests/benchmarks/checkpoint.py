"""Saves the same 100 MB, weights and AdamW's moments, in several ways, and prints how long each held training up."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from run import take_turns

from learnerkit.checkpoints.storage import Storage


def make_run():
    """A model of 8.7 million parameters after a step of AdamW."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)], torch.nn.Linear(1024, 300))
    opt = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 1024)).sum().backward()
    opt.step()
    return model, opt


def main(rounds):
    torch.set_num_threads(1)
    model, opt = make_run()
    a = torch.randn(500, 500)
    # On the disk of this file, not in memory, where /tmp may be.
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as name:
        folder = Path(name)
        in_place, behind = Storage(folder / "one", keep=1), Storage(folder / "two", keep=1, background=True)

        def torchs(sync):
            start = time.perf_counter()
            with open(folder / "one.pth", "wb") as file:
                torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            took = time.perf_counter() - start
            os.sync()
            return took

        def ours(storage):
            start = time.perf_counter()
            storage.save("state", model.state_dict(), {"opt": opt.state_dict()}, {"rng": torch.get_rng_state()}, {})
            took = time.perf_counter() - start
            storage.wait()
            os.sync()
            return took

        def compute(disturbed):
            if disturbed:
                behind.save("state", model.state_dict(), {"opt": opt.state_dict()}, {}, {})
            start = time.perf_counter()
            for _ in range(100):
                a @ a
            took = time.perf_counter() - start
            behind.wait()
            return took

        ways = (
            lambda: torchs(False), lambda: torchs(True), lambda: ours(in_place), lambda: ours(behind),
            lambda: compute(False), lambda: compute(True),
        )  # fmt: skip
        print(json.dumps(take_turns(rounds, *ways)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
