"""Microseconds a training step of other libraries, and of learnerkit, over a hand-written loop; see run.py.

Every contestant has a process of its own for the whole measurement, as importing one library may change what another
one runs, and they take turns. All train the same model on the same batches, which are ready-made, with torch's SGD
(fastai with its own); what they come to is compared. The clock runs from the first batch of an epoch to its last, so
that starting a fit, and what is done between epochs, does not count. The first epoch does not count either.
"""

import json
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from run import take_turns
from step import LOSS, conv, mlp
from torch import nn
from torch.optim import SGD

from learnerkit import __version__

EPOCHS = 3  # the first one warms up
NETS = {"MLP": (mlp, (32, 16), 4, 2000), "conv net": (conv, (32, 1, 28, 28), 10, 300)}
DEFAULTS, QUIET = "as it comes", "bar and logger off"


class Batches:
    """The same batches in every epoch, and the seconds between the first and the last time that one was asked for."""

    def __init__(self, batches: list) -> None:
        self.batches = batches
        self.epochs: list[float] = []

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator:
        last, start = len(self.batches) - 1, 0.0
        for i, batch in enumerate(self.batches):
            if i == 0:
                start = perf_counter()
            elif i == last:  # some libraries never ask whether there is one more
                self.epochs.append(perf_counter() - start)
            yield batch


def sgd(params: object, lr: float = 1e-3) -> SGD:
    """torch's SGD as it comes, which learnerkit would otherwise fuse."""
    return SGD(params, lr=lr, momentum=0.9)


# The contestants: each trains for `EPOCHS` epochs, and knows the loss of every step


def by_hand(model: nn.Module, batches: Batches, quiet: bool) -> None:
    """A loop that records the loss of every step on the device, and its mean over each epoch."""
    opt = sgd(model.parameters())
    model.train()
    for _ in range(EPOCHS):
        losses = []
        for x, y in batches:
            loss = LOSS(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.detach())
        torch.stack(losses).mean().item()


def by_learnerkit(model: nn.Module, batches: Batches, quiet: bool) -> None:
    """A Learner with the callbacks that every Learner has."""
    from learnerkit import DataLoaders, Learner

    learn = Learner(DataLoaders(batches), model, LOSS, opt_func=sgd)
    if not quiet:
        learn.fit(EPOCHS, 1e-3)
        return
    with learn.no_bar(), learn.no_logging():
        learn.fit(EPOCHS, 1e-3)


def by_fastai(model: nn.Module, batches: Batches, quiet: bool) -> None:
    """fastai's Learner with its default callbacks, and its own SGD."""
    import fastai.callback.progress  # noqa: F401 - the bar is a default once it is imported, as in vision.all
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import SGD

    # It validates in every epoch, on a batch that the clock does not see.
    dls = DataLoaders(batches, batches.batches[:1])
    learn = Learner(dls, model, loss_func=LOSS, opt_func=partial(SGD, mom=0.9))
    if not quiet:
        learn.fit(EPOCHS, 1e-3)
        return
    with learn.no_bar(), learn.no_logging():
        learn.fit(EPOCHS, 1e-3)


def by_lightning(model: nn.Module, batches: Batches, quiet: bool) -> None:
    """Lightning's Trainer, which is told the loss of each step by `self.log`."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: tuple, i: int) -> torch.Tensor:
            x, y = batch
            loss = LOSS(self.model(x), y)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> SGD:
            return sgd(self.model.parameters())

    off = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", devices=1, **(off if quiet else {}))
    trainer.fit(Module(), batches)


def by_accelerate(model: nn.Module, batches: Batches, quiet: bool) -> None:
    """The hand-written loop with Accelerate's calls in it."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, opt, loader = accelerator.prepare(model, sgd(model.parameters()), batches)
    model.train()
    for _ in range(EPOCHS):
        losses = []
        for x, y in loader:
            loss = LOSS(model(x), y)
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
            losses.append(loss.detach())
        torch.stack(losses).mean().item()


def by_transformers(model: nn.Module, batches: Batches, quiet: bool) -> None:
    """Hugging Face's Trainer; what would change the numbers (clipping, the schedule), and saving, is off."""
    from transformers import Trainer, TrainingArguments

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.model(x)
            return {"loss": LOSS(logits, labels), "logits": logits}

    class WithBatches(Trainer):
        def get_train_dataloader(self) -> Batches:
            return batches

    off = {"disable_tqdm": True, "logging_strategy": "no", "report_to": []}
    same = {"save_strategy": "no", "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "learning_rate": 1e-3}
    args = TrainingArguments("out", num_train_epochs=EPOCHS, use_cpu=True, **same, **(off if quiet else {}))
    batches.batches = [{"x": x, "labels": y} for x, y in batches.batches]
    WithBatches(WithLoss(), args, optimizers=(sgd(model.parameters()), None)).train()


CONTESTANTS: dict[str, tuple[Callable[[nn.Module, Batches, bool], None], str, tuple[str, ...]]] = {
    "learnerkit": (by_learnerkit, "learnerkit", (DEFAULTS, QUIET)),
    "fastai": (by_fastai, "fastai", (DEFAULTS, QUIET)),
    "Lightning": (by_lightning, "lightning", (DEFAULTS, QUIET)),
    "Accelerate": (by_accelerate, "accelerate", ("it has no bar and no logger",)),
    "HF Trainer": (by_transformers, "transformers", (DEFAULTS, QUIET)),
}
"""By name: what trains, its package, and in which ways."""


# A contestant's process


def serve(name: str, fd: int) -> None:
    """Train whenever the other process says so: a net, and whether to be quiet; answer with what it took."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    train = by_hand if name == "by hand" else CONTESTANTS[name][0]
    with Connection(fd) as measuring:
        while True:
            try:
                asked = measuring.recv()
            except EOFError:
                return
            try:
                answer = measure(train, *asked)
            except Exception:
                answer = {"error": traceback.format_exc()}
            measuring.send(answer)


def measure(train: Callable[[nn.Module, Batches, bool], None], net: str, quiet: bool) -> dict:
    """Microseconds a step, and what the training has come to."""
    make, shape, classes, steps = NETS[net]
    torch.manual_seed(0)
    made = [(torch.randn(shape), torch.randint(classes, shape[:1])) for _ in range(steps)]
    model, batches = make(), Batches(list(made))
    train(model, batches, quiet)
    if len(batches.epochs) != EPOCHS:
        raise RuntimeError(f"it read {len(batches.epochs)} epochs of {EPOCHS}")
    model.eval()
    with torch.no_grad():
        loss = float(LOSS(model(made[0][0]), made[0][1]))
        size = float(sum(p.double().square().sum() for p in model.parameters()))
    return {"us": median(batches.epochs[1:]) / (steps - 1) * 1e6, "loss": loss, "size": size}


# The process that measures


class Contestant:
    """The process of a contestant.

    Args:
        name: its own.
        folder: where it runs.
    """

    def __init__(self, name: str, folder: str) -> None:
        self.name = name
        self.line, theirs = Pipe()
        with theirs:
            command = [sys.executable, str(Path(__file__).resolve()), "--serve", name, str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=folder)

    def train(self, net: str, quiet: bool) -> dict:
        """Have it train, and return what `measure` returns there."""
        self.line.send((net, quiet))
        try:
            found = self.line.recv()
        except EOFError:
            raise SystemExit(f"the process of {self.name} has ended with {self.process.wait()}") from None
        if "error" in found:
            raise SystemExit(f"{self.name} failed\n{found['error']}")
        return found

    def close(self) -> None:
        """End it."""
        self.line.close()
        self.process.wait()


def compare(rounds: int, net: str, everyone: list[tuple[str, Contestant, bool]]) -> dict[str, list[float]]:
    """Microseconds a step of each in each round; the first is the hand-written loop, to which all are compared."""
    outcomes: dict[str, dict] = {}

    def timed(label: str, contestant: Contestant, quiet: bool) -> float:
        outcomes[label] = contestant.train(net, quiet)
        return outcomes[label]["us"]

    found = take_turns(rounds, *(partial(timed, *each) for each in everyone))
    first = outcomes[everyone[0][0]]
    for label, outcome in outcomes.items():
        for what in ("loss", "size"):
            if abs(outcome[what] - first[what]) > 1e-4 * abs(first[what]):
                raise SystemExit(f"{label} did not do the same: {what} {outcome[what]}, by hand {first[what]}")
    return {label: [times[i] for times in found] for i, (label, *_) in enumerate(everyone)}


def main(rounds: int, file: str) -> None:
    """Measure all that are installed, and write what was found."""
    missing = [name for name, (_, package, _) in CONTESTANTS.items() if find_spec(package) is None]
    with tempfile.TemporaryDirectory() as folder:
        running = [Contestant("by hand", folder)]
        everyone = [("by hand", running[0], True)]
        for name, (_, package, ways) in CONTESTANTS.items():
            if name not in missing:
                running.append(Contestant(name, folder))
                label = f"{name} {__version__ if name == 'learnerkit' else version(package)}"
                everyone += [(f"{label}, {way}", running[-1], way == QUIET) for way in ways]
        times = {net: compare(rounds, net, everyone) for net in NETS}
        for contestant in running:
            contestant.close()
    Path(file).write_text(json.dumps({"times": times, "missing": missing}))


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        main(int(sys.argv[1]), sys.argv[2])
