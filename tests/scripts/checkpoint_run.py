"""A run of 2 ranks that is killed, asked to end, or asked to save where `FAULT` says, and goes on from its checkpoints.

`FAULT=kind:rank:step,...` has one fault for each attempt; it strikes that rank (-1: each) before that step: 'kill';
'term' and 'usr1', sent to itself; 'group', TERM to its loader workers too; 'await', until a signal from outside has
come: `waits-<rank>` tells that it may be sent; 'nan'; 'raise'; in the validation after it 'term-valid'; while a
loader's first batch is fetched 'term-fetch'; 'save' kills it at such an access to the files of the checkpoints, counted
from the second save on, and leaves `saving-<rank>`. In the working directory each rank leaves `order-<rank>` with what
it has trained on, and at its end `end-<rank>` with a digest of all that must be equal bit by bit.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset, get_worker_info

from learnerkit import Callback, CheckpointCallback, DataLoaders, Learner, TerminateOnNaNCallback, mae, set_seed
from learnerkit.processes.requests import END
from learnerkit.values import tensors_in

EPOCHS, STEPS, BATCH = 4, 10, 8
RANK, ATTEMPT = int(os.environ.get("RANK", 0)), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
KIND, WHOM, WHEN = [*os.environ.get("FAULT", "none:0:0").split(","), *["none:0:0"] * 9][ATTEMPT].split(":")
MINE, DUE = int(WHOM) in (RANK, -1), int(WHEN)

parser = argparse.ArgumentParser()
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--every", type=int, default=10)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--split", action="store_true")
parser.add_argument("--shard", action="store_true")
parser.add_argument("--async", action="store_true", dest="background")
parser.add_argument("--late", action="store_true", help="flags are read one step later, as on an accelerator")
parser.add_argument("--exact", action="store_true", help="float64, no dropout, no augmentation")
OPTIONS = parser.parse_args()


class Samples(Dataset):
    """Noisy sums, with an augmentation."""

    def __init__(self, n: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 8, generator=generator, dtype=torch.float64 if OPTIONS.exact else torch.float32)
        self.y = self.x.sum(1, keepdim=True).sin()
        self.fetched = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i: int):
        worker = get_worker_info()
        if KIND == "term-fetch" and MINE and worker is not None and worker.id == 0 and not self.fetched:
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(0.2)  # so that the rank waits for this batch
        self.fetched += 1
        noise = 0 if OPTIONS.exact else torch.rand(8) / 10 + random.random() / 10
        return self.x[i] + noise, self.y[i]


class Faults(Callback):
    """Lets the fault strike."""

    only_fit = True
    order = 20  # after the DistributedCallback

    def before_train(self):
        if OPTIONS.late:
            self.learn._gradient.step.reads_late = True

    def before_batch(self):
        global left
        if KIND == "save" and MINE and self.train_iter == OPTIONS.every + 2:
            left = DUE
        if not (MINE and self.train_iter == DUE) or (KIND == "term-valid") == self.training:
            return
        if KIND == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif KIND in ("term", "term-valid"):
            signal.raise_signal(signal.SIGTERM)
        elif KIND == "group":  # the loader's workers, too
            os.killpg(0, signal.SIGTERM)
        elif KIND == "usr1":
            signal.raise_signal(signal.SIGUSR1)
        elif KIND == "raise":
            raise ValueError("a bad sample")
        elif KIND == "await":
            Path(f"waits-{RANK}").touch()
            while not self.checkpoint._request.mine:
                time.sleep(0.01)
        if KIND == "term-valid":
            assert self.checkpoint._request.mine == END

    def after_loss(self):
        if KIND == "nan" and MINE and self.training and self.train_iter == DUE:
            self.learn.loss_grad = self.loss_grad * float("nan")
            self.learn.loss = self.learn.loss_grad.detach()


def kill_in_save(event: str, args: tuple) -> None:
    """Count an access to a file of the checkpoints; before the one that is due, kill this process."""
    global left
    if left is None or event not in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir"):
        return
    if not any("runs" in str(arg).split(os.sep) for arg in args):
        return
    left -= 1
    if left < 0:
        left = None  # to leave a file is an event, too
        Path(f"saving-{RANK}").write_text(f"{event} {args}")
        os.kill(os.getpid(), signal.SIGKILL)


left: int | None = None  # such accesses
sys.addaudithook(kill_in_save)


class Order(Callback):
    """Writes down what this rank trains on, at each step; the last word on a step counts."""

    run_valid = False
    only_fit = True

    def after_batch(self):
        rows = self.xb[0][: self.batch_size]
        with open(f"order-{RANK}", "a") as file:
            file.write(json.dumps([self.train_iter, self.epoch, rows.sum(1).tolist()]) + "\n")


def digest(learn: Learner) -> str:
    """Of all that must be equal bit by bit."""
    found = hashlib.sha256()
    recorder = learn.recorder
    for tensor in tensors_in([learn.model.state_dict(), learn.opt.state_dict(), torch.get_rng_state()]):
        found.update(tensor.numpy().tobytes())
    found.update(repr([random.getstate(), recorder.values, recorder.losses, recorder.lrs, recorder.hps]).encode())
    return found.hexdigest()


set_seed(0, reproducible=OPTIONS.exact)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0 if OPTIONS.exact else 0.2), nn.Linear(32, 1))
# Two ranks take two batches a step, or share one.
data = Samples((1 if OPTIONS.split else 2) * BATCH * STEPS - 3, 0), Samples(24, 1)
dls = DataLoaders.from_datasets(*data, bs=BATCH, num_workers=OPTIONS.workers, device="cpu")
checkpoint = CheckpointCallback("runs", OPTIONS.every, resume=OPTIONS.resume, async_save=OPTIONS.background)
learn = Learner(
    dls, model.double() if OPTIONS.exact else model, nn.MSELoss(), lr=0.01, metrics=mae,
    cbs=[Faults(), Order(), TerminateOnNaNCallback(), checkpoint],
)  # fmt: skip
with learn.distrib_ctx(split_batches=OPTIONS.split, shard=OPTIONS.shard):
    learn.fit_one_cycle(EPOCHS)
    if KIND == "nan":
        newest = max(Path("runs").glob("fit*"), key=os.path.getmtime)
        learn.load(newest / "model.safetensors", with_opt=False)
        assert all(p.isfinite().all() for p in model.parameters())
end = {"digest": digest(learn), "steps": learn.train_iter, "weights": [p.tolist() for p in model.parameters()]}
Path(f"end-{RANK}").write_text(json.dumps(end))
