"""What is measured on a GPU runs without one: the scripts on small networks, and airbench's training in float32."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT
from launching import environment

BENCHMARKS = ROOT / "tests" / "benchmarks"


def load(name, monkeypatch):
    "A script of that folder, which is on no path."
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_images(folder, n, seed=0):
    "Coloured noise in airbench's format, in which a class has a brighter half."
    folder.mkdir(exist_ok=True)
    for i, part in enumerate(("train", "test")):
        random = torch.Generator().manual_seed(seed + i)
        labels = torch.randint(2, (n,), generator=random)
        images = torch.randint(0, 200, (n, 32, 32, 3), dtype=torch.uint8, generator=random)
        images[labels == 1, :16] += 50
        torch.save({"images": images, "labels": labels, "classes": ["a", "b"]}, folder / f"{part}.pt")
    return folder


@pytest.mark.soak
def test_the_steps_on_a_gpu_are_measured_on_the_cpu_too():
    options = ["--device", "cpu", "--tiny", "--rounds", "1", "--peers"]
    command = [sys.executable, BENCHMARKS / "gpu.py", *options]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines if "by hand" in line] == [
        "small net (float32, batch 32)", "ResNet-18 (bf16, channels-last, batch 2)",
        "a tiny GPT (bf16, compiled, 2 x 32 tokens)",
    ]  # fmt: skip
    assert sum(line.startswith("    learnerkit ") for line in lines) == 3


@pytest.mark.slow
def test_the_airbench_learner_is_short_and_learns(monkeypatch):
    duel = load("airbench_learner", monkeypatch)
    assert len((BENCHMARKS / "airbench_learner.py").read_text().splitlines()) <= 120
    folder = write_images(Path("images"), 96)
    images = duel.Images(folder / "train.pt", "cpu", torch.float32, bs=16)
    learn = duel.train(images, seed=0, epochs=1.5)
    assert len(learn.recorder.iters) == 2
    assert learn.recorder.iters[-1] == 9
    assert learn.recorder.losses[-1] < learn.recorder.losses[0]
    assert learn.model[0].bias.requires_grad


@pytest.mark.peers
@pytest.mark.parametrize("seed", [1, 2])
def test_the_airbench_learner_comes_to_what_airbenchs_own_loop_comes_to(monkeypatch, seed):
    """On the CPU in float32: airbench's package is unchanged, and what it asks of torch for a GPU is replaced."""
    airbench = pytest.importorskip("airbench")
    ours = load("airbench_learner", monkeypatch)
    folder = write_images(Path("cifar10"), 80, seed)

    class Clock:
        "Stands for torch.cuda.Event."

        def __init__(self, enable_timing):
            pass

        def record(self):
            pass

        def elapsed_time(self, other):
            return 1.0

    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.nn.Module, "half", lambda self: self)
    monkeypatch.setattr(torch.nn.Module, "cuda", lambda self: self)
    monkeypatch.setattr(torch.Tensor, "half", torch.Tensor.float)

    class Loader(airbench.utils.CifarLoader):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs, gpu="cpu")

    monkeypatch.setattr(airbench.utils, "CifarLoader", Loader)

    def make_net():
        "Its network; then the generator begins where ours does."
        made = airbench.make_net94()
        torch.manual_seed(seed)
        return made

    hyp = airbench.lib_airbench94.hyp
    loader = Loader("cifar10", train=True, batch_size=16, aug=hyp["aug"], altflip=True)
    torch.manual_seed(seed)
    theirs = airbench.train94(loader, epochs=3.6, make_net=make_net, verbose=False)  # the bias is trained for 3
    images = ours.Images(folder / "train.pt", "cpu", torch.float32, bs=16)
    learn = ours.train(images, seed, epochs=3.6)
    assert len(learn.recorder.losses) == 18
    pairs = list(zip(theirs.state_dict().items(), learn.model.state_dict().items(), strict=True))
    for (name, a), (_, b) in pairs:
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    torch.manual_seed(seed)
    begun = airbench.make_net94()
    moved = [float((a - b).detach().abs().max()) for a, b in zip(begun.parameters(), theirs.parameters(), strict=True)]
    assert sum(each > 1e-3 for each in moved) > 8  # so much for weights that were not trained
