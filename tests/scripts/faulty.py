"""The reference run of the scorecard R01 to R40: 100 steps in 10 epochs, which fail where they are told to.

After each epoch rank 0 saves all that the rest of the run depends on, and a run that finds such a file goes on from it.
`FAULT=kind:rank:step,...` has one fault for each attempt; it strikes that rank before that step (a loader's worker: at
that sample of an epoch). In the working directory a rank leaves `rank-<attempt>-<rank>` when it begins, `fault` with
the time when a fault strikes, and at its end `digest-<optimizer>-<rank>` of the weights, the optimizer's state and the
random streams.
"""

import argparse
import ctypes
import hashlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset, get_worker_info

from learnerkit import Callback, CancelFitException, DataLoaders, Learner, distributed, mae, set_seed
from learnerkit.utils import unwrap
from learnerkit.values import tensors_in

EPOCHS, STEPS, BATCH = 10, 10, 8  # a batch for each of two ranks
OPTIMIZERS = {"sgd": lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9), "adamw": torch.optim.AdamW}
RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
SAVED = Path("saved.pth")

parser = argparse.ArgumentParser()
parser.add_argument("--opt", nargs="+", default=["sgd"], choices=OPTIMIZERS, help="one run with each")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--metric", default="mae", help="its name")
parser.add_argument("--message", default="a bad sample", help="of the exceptions")
parser.add_argument("--handle", action="store_true", help="on SIGUSR1 save, on SIGTERM save and leave with 143")
OPTIONS = parser.parse_args()

heard: list[int] = []


def my_fault() -> tuple[str, int]:
    """What is to strike this rank in this attempt, and when."""
    kind, rank, step = [*os.environ.get("FAULT", "none:0:0").split(","), *["none:0:0"] * 9][ATTEMPT].split(":")
    return (kind, int(step)) if int(rank) == RANK else ("none", 0)


def strike(kind: str) -> None:
    """Fail in this way; the test counts the seconds from here."""
    Path("fault").write_text(str(time.monotonic()))
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "segv":
        ctypes.string_at(0)
    elif kind == "raise":
        raise ValueError(OPTIONS.message)
    elif kind == "quit":
        os._exit(0)
    elif kind == "sleep":
        time.sleep(60)
    elif kind == "wait":  # for any signal, while the others wait for this rank
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end)
        os.read(read_end, 1)
        signal.set_wakeup_fd(-1)
    else:
        sys.exit(int(kind.removeprefix("exit")))


class Samples(Dataset):
    """Noisy sums; those that a loader's worker fetches may fail."""

    def __init__(self, n: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 8, generator=generator)
        self.y = self.x.sum(1, keepdim=True).sin() + torch.randn(n, 1, generator=generator) / 10
        self.fetched = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i: int):
        kind, step = my_fault()
        if get_worker_info() is not None and kind.startswith("loader-") and self.fetched == step:
            strike(kind.removeprefix("loader-"))
        self.fetched += 1
        return self.x[i], self.y[i]


class Faults(Callback):
    """Lets the fault strike, and does what signals ask for."""

    run_valid = False
    only_fit = True

    def before_batch(self):
        (kind, due), step = my_fault(), self.epoch * STEPS + self.iter
        if kind == "slow" and due <= step < due + 3:
            time.sleep(3)
        elif kind not in ("none", "slow") and not kind.startswith("loader-") and step == due:
            strike(kind)

    def after_batch(self):
        if signal.SIGTERM in heard:
            raise CancelFitException
        if signal.SIGUSR1 in heard:
            heard.remove(signal.SIGUSR1)
            self.learn.save(Path(f"usr1-{self.train_iter}.pth"))


class Saves(Callback):
    """Writes after each epoch what the rest of the run depends on, and begins with the random streams it was given."""

    order = 90
    only_fit = True

    def __init__(self, streams: list | None):
        super().__init__()
        self.streams = streams

    def before_epoch(self):
        if self.streams is not None:  # not earlier: the samples' order hangs on the seed that a fit begins with
            torch_state, python_state = self.streams[distributed.rank()]
            torch.set_rng_state(torch_state)
            random.setstate(python_state)
            self.streams = None

    def after_epoch(self):
        streams = distributed.all_gather((torch.get_rng_state(), random.getstate()))  # every rank must reach this
        if distributed.is_main():
            model, opt = unwrap(self.model).state_dict(), self.opt.state_dict()
            torch.save({"model": model, "opt": opt, "streams": streams, "epochs": self.epoch + 1}, "saving.pth")
            os.replace("saving.pth", SAVED)


def digest(learn: Learner) -> str:
    """Of all that must be equal bit by bit."""
    found = hashlib.sha256()
    state = [unwrap(learn.model).state_dict(), learn.opt.state_dict(), torch.get_rng_state()]
    for tensor in tensors_in(state):
        found.update(tensor.numpy().tobytes())
    found.update(repr(random.getstate()).encode())
    return found.hexdigest()


def train(opt: str) -> Learner:
    """The run with this optimizer, from its beginning or from what was saved."""
    set_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    data = Samples(2 * BATCH * STEPS, 0), Samples(24, 1)
    dls = DataLoaders.from_datasets(*data, bs=BATCH, num_workers=OPTIONS.workers, device="cpu")
    learn = Learner(dls, model, nn.MSELoss(), opt_func=OPTIMIZERS[opt], lr=0.01, metrics={OPTIONS.metric: mae})
    saved = torch.load(SAVED, weights_only=True) if SAVED.exists() else {"epochs": 0, "streams": None}
    learn.create_opt()  # with the first optimizer torch imports its compiler
    if saved["epochs"]:
        model.load_state_dict(saved["model"])
        learn.opt.load_state_dict(saved["opt"])
    distributed.barrier()  # so that no rank is late for the fit, however long the imports have taken on a busy machine
    with learn.distrib_ctx():
        learn.fit(EPOCHS, cbs=[Faults(), Saves(saved["streams"])], start_epoch=saved["epochs"])
    return learn


def main() -> None:
    """Train with one optimizer after the other."""
    Path(f"rank-{ATTEMPT}-{RANK}").touch()
    if OPTIONS.handle:
        for signum in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(signum, lambda number, frame: heard.append(number))
    for opt in OPTIONS.opt:
        learn = train(opt)
        if signal.SIGTERM in heard:
            learn.save(Path(f"term-{learn.train_iter}.pth"))
            sys.exit(143)
        Path(f"digest-{opt}-{RANK}").write_text(digest(learn))
        SAVED.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
