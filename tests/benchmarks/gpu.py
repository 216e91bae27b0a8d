"""Training steps on a GPU over a hand-written loop, and the memory they take: learnerkit and the peers; see run.py.

    python tests/benchmarks/gpu.py                              # three networks on the GPU, about a quarter of an hour
    python tests/benchmarks/gpu.py --nets small --peers Lightning
    python tests/benchmarks/gpu.py --device cpu                 # tries the script without a GPU, on the small network
    python tests/benchmarks/gpu.py --device cpu --tiny          # and on tiny relatives of the others

Every contestant has a process of its own, and trains once: each epoch is a round, and at its start the loader waits for
the contestant's turn. So they take turns, and nothing is compiled or allocated anew. The first epoch does not count.
The clock runs from an epoch's first batch to its last, and waits for the device at both. Batches are ready-made on the
device. All train the same model with the same fused optimizer of torch, record the loss of each step, and have their
bar and table as they come; what they come to is compared. Memory is the peak of what torch has allocated on the device
in the rounds that count. GPT-2 makes its own loss, as it often does, so that nobody need keep its logits.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from run import ROWS, measure_in_terminal, take_turns
from step import conv
from torch import Tensor, nn
from torch.nn import functional as F

Optimizer = Callable[..., torch.optim.Optimizer]


# The networks


class GptBlock(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    """GPT-2 with its own loss (Radford et al. 2019); by default the one of 124 million parameters."""

    def __init__(
        self, layers: int = 12, width: int = 768, heads: int = 12, tokens: int = 50257, length: int = 1024
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.blocks = nn.Sequential(*(GptBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.tokens(input_ids) + self.places.weight[: input_ids.shape[1]]
        logits = F.linear(self.norm(self.blocks(x)), self.tokens.weight)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def resnet(name: str) -> nn.Module:
    """A network of torchvision."""
    import torchvision

    made: nn.Module = getattr(torchvision.models, name)()
    return made


def images(n: int, channels: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    """A batch of noise."""
    return torch.randn(n, channels, size, size), torch.randint(classes, (n,))


def texts(n: int, length: int, tokens: int) -> dict[str, Tensor]:
    """A batch of random tokens."""
    ids = torch.randint(tokens, (n, length + 1))
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


@dataclass(frozen=True)
class Net:
    """What is trained.

    Args:
        title: how it is called in the table.
        make: makes the model.
        batch: makes a batch on the host, a pair or, for a model that makes its own loss, a mapping.
        optimizer: of parameters.
        steps: in each round.
        goal: the most that a step may take, over the hand-written loop's.
        bf16, channels_last, compiled: how it is trained.
        backend: of the compiler.
    """

    title: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    optimizer: Optimizer
    steps: int
    goal: str
    bf16: bool = False
    channels_last: bool = False
    compiled: bool = False
    backend: str = "inductor"


SGD: Optimizer = partial(torch.optim.SGD, lr=1e-3, momentum=0.9, fused=True)
ADAMW: Optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)
LARGE = {"steps": 25, "goal": "1.01", "bf16": True}
SMALL = Net("small net (float32, batch 32)", conv, partial(images, 32, 1, 28, 10), SGD, steps=500, goal="1.05")
NETS = {
    "small": SMALL,
    "resnet50": Net(
        "ResNet-50 (bf16, channels-last, batch 128)", partial(resnet, "resnet50"), partial(images, 128, 3, 224, 1000),
        SGD, channels_last=True, **LARGE,
    ),
    "gpt2": Net(
        "GPT-2 124M (bf16, compiled, 8 x 1024 tokens)", Gpt, partial(texts, 8, 1024, 50257), ADAMW, compiled=True,
        **LARGE,
    ),
}  # fmt: skip
TINY = {
    "small": replace(SMALL, steps=50),
    "resnet50": Net(
        "ResNet-18 (bf16, channels-last, batch 2)", partial(resnet, "resnet18"), partial(images, 2, 3, 64, 1000), SGD,
        steps=3, goal="", bf16=True, channels_last=True,
    ),
    "gpt2": Net(
        "a tiny GPT (bf16, compiled, 2 x 32 tokens)", partial(Gpt, 2, 32, 2, 100, 32), partial(texts, 2, 32, 100),
        ADAMW, steps=20, goal="", bf16=True, compiled=True, backend="aot_eager",
    ),
}  # fmt: skip


# The contestants: each trains for `data.epochs` epochs, and knows the loss of every step


class Rounds:
    """The batches of an epoch; before each it waits for its turn, and afterwards tells what the epoch took.

    Args:
        net: what is trained.
        epochs: how many rounds there are, with the one that does not count.
        device: 'cuda' or 'cpu'.
        line: to the process that measures.
    """

    def __init__(self, net: Net, epochs: int, device: str, line: Connection) -> None:
        torch.manual_seed(0)
        made = [net.batch() for _ in range(4)]
        self.batches = [
            {k: t.to(device) for k, t in b.items()} if isinstance(b, dict) else tuple(t.to(device) for t in b)
            for b in made
        ]
        if net.channels_last:
            self.batches = [(x.contiguous(memory_format=torch.channels_last), y) for x, y in self.batches]
        self.net, self.epochs, self.device, self.line = net, epochs, device, line
        self.begun, self.seconds = 0, 0.0

    def __len__(self) -> int:
        return self.net.steps

    def __iter__(self) -> Iterator[Any]:
        self.tell()
        self.line.recv()
        self.begun += 1
        if self.device == "cuda" and self.begun == 2:
            torch.cuda.reset_peak_memory_stats()
        start = self.wait()
        for i in range(self.net.steps):
            if i == self.net.steps - 1:  # some libraries never ask whether there is one more
                self.seconds = self.wait() - start
            yield self.batches[i % len(self.batches)]

    def tell(self, **more: float) -> None:
        """Say that the contestant rests, and what it has taken; the device has nothing left to do."""
        self.wait()
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else 0
        self.line.send({"seconds": self.seconds / (self.net.steps - 1), "peak": peak} | more)

    def wait(self) -> float:
        """Wait for the device, and return the time."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return perf_counter()


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a batch."""
    if isinstance(batch, dict):
        found: Tensor = model(**batch)["loss"]
        return found
    x, y = batch
    return F.cross_entropy(model(x), y)


def autocast(data: Rounds) -> AbstractContextManager:
    """A context for the forward pass."""
    return torch.autocast(data.device, torch.bfloat16, enabled=data.net.bf16)


def by_hand(model: nn.Module, data: Rounds) -> None:
    """A loop that keeps the loss of every step on the device, and reads their mean after each epoch."""
    opt = data.net.optimizer(model.parameters())
    model.train()
    for _ in range(data.epochs):
        losses = []
        for batch in data:
            with autocast(data):
                loss = loss_of(model, batch)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.detach())
        torch.stack(losses).mean().item()


def by_learnerkit(model: nn.Module, data: Rounds) -> None:
    """A Learner with the callbacks that every Learner has."""
    from learnerkit import ChannelsLast, DataLoaders, Learner

    own_loss = isinstance(data.batches[0], dict)
    dls = DataLoaders(data, device=data.device)
    learn = Learner(dls, model, None if own_loss else nn.CrossEntropyLoss(), opt_func=data.net.optimizer)
    if data.net.bf16:
        learn.to_bf16()
    if data.net.channels_last:
        learn.add_cb(ChannelsLast())
    learn.fit(data.epochs)


class _WithTargets(nn.Module):
    "For fastai, which gives a model no keywords."

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=input_ids, labels=labels)["loss"]
        return loss


def by_fastai(model: nn.Module, data: Rounds) -> None:
    """fastai's Learner with its default callbacks."""
    import fastai.callback.fp16
    import fastai.callback.progress  # noqa: F401 - the bar is a default once it is imported
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper

    loss: Callable = nn.CrossEntropyLoss()
    if isinstance(data.batches[0], dict):
        # The targets go to the model; the last entry is there because fastai wants one for the loss.
        data.batches = [(b["input_ids"], b["labels"], b["labels"]) for b in data.batches]
        model, loss = _WithTargets(model), lambda pred, _: pred
    dls = DataLoaders(data, data.batches[:1], device=torch.device(data.device))  # it validates in every epoch
    rate = data.net.optimizer.keywords["lr"]  # type: ignore[attr-defined]
    learn = Learner(dls, model, loss_func=loss, opt_func=partial(OptimWrapper, opt=data.net.optimizer), lr=rate)
    if data.net.bf16:
        learn.to_bf16()
    learn.fit(data.epochs, rate, wd=data.net.optimizer([nn.Parameter(torch.ones(1))]).defaults["weight_decay"])


def by_lightning(model: nn.Module, data: Rounds) -> None:
    """Lightning's Trainer, which is told the loss of each step by `self.log`."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, i: int) -> Tensor:
            loss = loss_of(self.model, batch)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return data.net.optimizer(self.model.parameters())

    lightning.Trainer(
        max_epochs=data.epochs, accelerator="gpu" if data.device == "cuda" else "cpu", devices=1,
        precision="bf16-mixed" if data.net.bf16 else "32-true",
    ).fit(Module(), data)  # fmt: skip


def by_accelerate(model: nn.Module, data: Rounds) -> None:
    """The hand-written loop with Accelerate's calls in it."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=data.device == "cpu", mixed_precision="bf16" if data.net.bf16 else "no")
    model, opt, loader = accelerator.prepare(model, data.net.optimizer(model.parameters()), data)
    model.train()
    for _ in range(data.epochs):
        losses = []
        for batch in loader:
            with accelerator.autocast():
                loss = loss_of(model, batch)
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
            losses.append(loss.detach())
        torch.stack(losses).mean().item()


CONTESTANTS: dict[str, tuple[Callable[[nn.Module, Rounds], None], str]] = {
    "by hand": (by_hand, "torch"),
    "learnerkit": (by_learnerkit, "learnerkit"),
    "fastai": (by_fastai, "fastai"),
    "Lightning": (by_lightning, "lightning"),
    "Accelerate": (by_accelerate, "accelerate"),
}
"""By name: what trains, and its package."""
PEERS = [*CONTESTANTS][2:]


# A contestant's process


def serve(name: str, net: Net, epochs: int, device: str, fd: int) -> None:
    """Train, and tell what each epoch takes, and at the end what it has come to."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.backends.cudnn.benchmark = True
    with Connection(fd) as line:
        try:
            torch.manual_seed(0)
            model, data = net.make().to(device), Rounds(net, epochs, device, line)
            if net.channels_last:
                model = model.to(memory_format=torch.channels_last)
            if net.compiled:
                model.compile(backend=net.backend)
            CONTESTANTS[name][0](model, data)
            if data.begun != epochs:
                raise RuntimeError(f"it read {data.begun} epochs of {epochs}")
            model.to(device).train()  # Lightning leaves it on the host
            with torch.no_grad(), autocast(data):
                batch = data.batches[0]
                given = dict(zip(("input_ids", "labels"), batch, strict=False)) if len(batch) == 3 else batch
                loss = float(loss_of(model, given))
            data.tell(loss=loss, size=float(sum(p.double().square().sum() for p in model.parameters())))
        except Exception:
            line.send({"error": traceback.format_exc()})


# The process that measures


class Contestant:
    """The process of a contestant; the first that it tells is that it is ready for its first round.

    Args:
        name: its own.
        args: those of the measurement.
        net: the name of what it trains.
        folder: where it runs.

    Attributes:
        error: why it has failed; the others go on.
    """

    def __init__(self, name: str, args: argparse.Namespace, net: str, folder: str) -> None:
        self.name, self.error = name, ""
        self.line, theirs = Pipe()
        with theirs:
            what = ["--device", args.device, "--rounds", args.rounds, *(["--tiny"] if args.tiny else [])]
            command = [sys.executable, Path(__file__).resolve(), *what, "--nets", net, "--serve", name, theirs.fileno()]
            self.process = subprocess.Popen(list(map(str, command)), pass_fds=[theirs.fileno()], cwd=folder)
        self.last: dict[str, float] = {}

    def listen(self) -> None:
        """Take what it says next."""
        try:
            found: dict = {} if self.error else self.line.recv()
        except EOFError:
            found = {"error": f"its process has ended with {self.process.wait()}"}
        if "error" in found:
            self.error = found["error"].strip().splitlines()[-1]
        self.last = found

    def round(self) -> float:
        """Have it train for an epoch, and return the seconds of a step."""
        if not self.error:
            self.line.send("your turn")
        self.listen()
        return self.last.get("seconds", math.nan)

    def close(self) -> None:
        """Wait for its end."""
        self.line.close()
        self.process.wait()


def compare(args: argparse.Namespace, key: str, net: Net, names: list[str]) -> list[tuple[str, str, str]]:
    """Let all train one network, and return the rows of the table."""
    with tempfile.TemporaryDirectory() as folder:
        everyone = [Contestant(name, args, key, folder) for name in names]
        for contestant in everyone:
            contestant.listen()
        found = take_turns(args.rounds, *(contestant.round for contestant in everyone))
        for contestant in everyone:
            contestant.close()
    base, tolerance = everyone[0].last, 0.05 if net.bf16 else 1e-3
    if everyone[0].error:
        return [(f"{net.title}: a step by hand", "failed", everyone[0].error)]
    rows = [(f"{net.title}: a step by hand", f"{1e3 * median(times[0] for times in found):.3f} ms", "")]
    if base["peak"]:
        rows.append(("    peak memory by hand", f"{base['peak'] / 2**20:.1f} MiB", ""))
    for i, contestant in list(enumerate(everyone))[1:]:
        name, last = label(contestant.name), contestant.last
        if contestant.error:
            rows.append((f"    {name}", "failed", contestant.error))
            continue
        if other := [what for what in ("loss", "size") if abs(last[what] - base[what]) > tolerance * abs(base[what])]:
            told = ", ".join(f"{what} {last[what]:.6g}, by hand {base[what]:.6g}" for what in other)
            rows.append((f"    {name}", "trained otherwise", told))
            continue
        ours = contestant.name == "learnerkit"
        over = median(times[i] / times[0] for times in found)
        extra = 1e6 * median(times[i] - times[0] for times in found)
        rows.append((f"    {name}", f"x {over:.3f}, {extra:+.0f} us", net.goal if ours else ""))
        if base["peak"]:
            rows.append(("    its peak memory", f"x {last['peak'] / base['peak']:.4f}", "0.99 to 1.01" if ours else ""))
    return rows


def label(name: str) -> str:
    """A contestant's name and version."""
    from learnerkit import __version__

    return f"{name} {__version__ if name == 'learnerkit' else version(CONTESTANTS[name][1])}"


def main() -> None:
    """Measure, or be one of the contestants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny relatives of the large networks")
    parser.add_argument("--nets", nargs="+", choices=[*NETS], help="default: all; on the CPU small, unless --tiny")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS, help="other libraries (default: all)")
    parser.add_argument("--rounds", type=int, default=7, help="how often the contestants take turns (default 7)")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    nets = TINY if args.tiny else NETS
    if args.serve:
        name, fd = args.serve
        serve(name, nets[args.nets[0]], args.rounds + 1, args.device, int(fd))
        return
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; --device cpu tries the script without one")
    if args.file is None:  # in a terminal of its own, so that bars are drawn
        command = [sys.executable, Path(__file__).resolve(), *sys.argv[1:], "--file"]
        found = measure_in_terminal(command, gpu=args.device == "cuda")
        for row in [("what", "figure", "goal"), *found]:
            print(ROWS.format(*row))
        return
    chosen = ["by hand", "learnerkit", *args.peers]
    missing = [name for name in chosen if find_spec(CONTESTANTS[name][1]) is None]
    names = [name for name in chosen if name not in missing]
    keys = args.nets or (["small"] if args.device == "cpu" and not args.tiny else [*nets])
    rows = [row for key in keys for row in compare(args, key, nets[key], names)]
    args.file.write_text(json.dumps(rows + [(name, "not installed", "") for name in missing]))


if __name__ == "__main__":
    main()
