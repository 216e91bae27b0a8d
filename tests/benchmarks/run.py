"""Measure learnerkit against plain PyTorch and torchrun: ratios within one run, contestants taking turns, medians.

    python tests/benchmarks/run.py               # everything, about a quarter of an hour on two idle cores
    python tests/benchmarks/run.py step data     # some of it
    python tests/benchmarks/run.py peers         # other libraries, those that are installed
    python tests/benchmarks/run.py gpu           # on a GPU, where there is one
    python tests/benchmarks/run.py --save        # also into the page of the site that shows them

Needs learnerkit installed, or on PYTHONPATH. Every process computes with one thread on the CPU, but for `gpu`. The
figures are ratios because they then depend little on the machine, but a busy machine still blurs those with several
processes.
"""

import argparse
import json
import os
import pty
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import saved

HERE = Path(__file__).parent
NOT_MEASURED = "not measured"
sys.path.append(str(HERE.parent))
LAUNCH = [sys.executable, "-m", "learnerkit.launch", "--nproc", "2"]
ROWS = "{:<58}{:>16}   {}"


def main() -> None:
    """Measure what the command line names, and print one row for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help=f"any of: {' '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=7, help="how often the contestants take turns (default 7)")
    parser.add_argument("--save", action="store_true", help="keep the figures in nbs/explanations, for the site")
    args = parser.parse_args()
    unknown = set(args.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"unknown: {' '.join(sorted(unknown))}; there are {' '.join(BENCHMARKS)}")
    print(ROWS.format("what", "figure", "goal"))
    for name in args.names or BENCHMARKS:
        rows = BENCHMARKS[name](args.rounds)
        for row in rows:
            print(ROWS.format(*row), flush=True)
        if args.save and rows[0][1] != NOT_MEASURED:
            saved.save(name, rows, args.rounds)


def step(rounds: int) -> list[tuple[str, str, str]]:
    """Steps and validations of a Learner, with its default callbacks and a live bar, against a hand-written loop."""
    rows, measured = [], measure_in_terminal([sys.executable, HERE / "step.py", rounds])
    for name, found in measured["steps"].items():
        extra, split = median(kit - raw for raw, kit, _ in found), median(more - kit for _, kit, more in found)
        what = f"Learner's step over a hand-written one, {name} ({median(raw for raw, *_ in found):.0f} us)"
        rows.append((what, f"{ratio(found):.3f}", ""))
        rows.append(("    extra time a step", f"{extra:+.1f} us", "10 us" if name == "MLP" else ""))
        rows.append(("    with SplitBatch(), extra over a Learner without", f"{split:+.1f} us", ""))
    found = measured["validations"]
    what = f"validation with accuracy over a hand-written one, MLP ({median(raw for raw, _ in found):.0f} us a batch)"
    return [*rows, (what, f"{ratio(found):.3f}", "")]


def imports(rounds: int) -> list[tuple[str, str, str]]:
    """Importing what a script needs against importing torch."""
    torch = [sys.executable, "-c", "import torch"]
    kit = [sys.executable, "-c", "from learnerkit import Learner, DataLoaders, accuracy"]
    found = take_turns(rounds, lambda: wall_time(torch), lambda: wall_time(kit))
    return [("from learnerkit import ... over import torch", f"{ratio(found):.3f}", "1.1")]


def launch(rounds: int) -> list[tuple[str, str, str]]:
    """Starting two processes that meet, by the launcher and by torchrun."""
    script = HERE / "meet.py"

    def torchrun() -> float:
        # Without --standalone, which takes longer.
        port = ["--master-port", str(free_port())]
        return wall_time([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *port, script])

    found = take_turns(rounds, torchrun, lambda: wall_time([*LAUNCH, script]))
    return [("launching 2 processes over torchrun", f"{ratio(found):.3f}", "0.8")]


def ddp(rounds: int) -> list[tuple[str, str, str]]:
    """Training steps of a Learner on two processes against a hand-written loop with DistributedDataParallel."""
    found = measure_in_terminal([*LAUNCH, HERE / "ddp.py", rounds])
    by_hand = median(raw for raw, _, _ in found)
    return [
        (f"2-process DDP step over a hand-written one ({by_hand:.0f} us)", f"{ratio(found):.3f}", "1.03"),
        ("    without the fused optimizer that the Learner chooses", f"{ratio([(a, c) for a, _, c in found]):.3f}", ""),
    ]


def sharded(rounds: int) -> list[tuple[str, str, str]]:
    """Training steps with shards on two processes, and the memory of a rank, against FSDP2 by hand and against DDP."""
    found = measure_in_terminal([*LAUNCH, HERE / "sharded.py", rounds])
    by_hand = median(raw for raw, _ in found["times"])

    def share(*kinds: str) -> tuple[float, float]:
        ours, ddp = (max(sum(rank[kind] for kind in kinds) for rank in found[way]) for way in ("sharded", "ddp"))
        return ours / 2**20, ours / ddp

    lasting, most = share("parameters", "gradients", "optimizer state"), share("most")
    return [
        (f"2-process sharded step over a hand-written one ({by_hand:.0f} us)", f"{ratio(found['times']):.3f}", "1.02"),
        ("    processor time of a step, likewise", f"{ratio(found['processor']):.3f}", ""),
        (f"    parameters, gradients, moments of a rank ({lasting[0]:.1f} MB), of DDP's", f"{lasting[1]:.3f}", "0.5"),
        (f"    most parameters at once, gathered ones too ({most[0]:.1f} MB), likewise", f"{most[1]:.3f}", ""),
    ]


def data(rounds: int) -> list[tuple[str, str, str]]:
    """A shuffled epoch over images, and over a table, against a hand-written `randperm` and `index_select`."""
    images, table = json.loads(output_of([sys.executable, HERE / "data.py", rounds]))
    return [
        ("shuffled epoch in memory, share of a raw loop's speed", f"{1 / ratio(images):.3f}", "0.67 (or more)"),
        ("    of a table", f"{1 / ratio(table):.3f}", "0.67 (or more)"),
    ]


def images(rounds: int, n: int = 20_000) -> list[tuple[str, str, str]]:
    """Reading JPEGs with two workers, and augmenting batches, against what one writes with torchvision."""
    found = json.loads(output_of([sys.executable, HERE / "images.py", rounds, n]))
    epoch = found.pop("reading")
    seconds = median(times[0] for times in epoch)
    rows = [
        (
            f"an epoch of {n:,} JPEGs, 2 workers, share of a torch loader's speed ({seconds:.1f} s)",
            f"{1 / ratio(epoch):.3f}",
            "0.95 (or more)",
        )
    ]
    for name, times in found.items():
        rows.append(
            (f"    augmenting whole batches, {name}, times as fast as each image", f"{1 / ratio(times):.1f}", "3")
        )
    return rows


def serve(rounds: int) -> list[tuple[str, str, str]]:
    """The example of a service, against one that is written by hand for the same model, with the same gathering."""
    found = json.loads(output_of([sys.executable, HERE / "serve.py", rounds]))
    by_hand, ours = found["processor"]
    per_second = 600 / median(times[1] for times in found["rounds"])
    return [
        (
            f"requests a second, share of a service by hand ({per_second:.0f})",
            f"{1 / ratio(found['rounds']):.3f}",
            "0.9",
        ),
        ("    processor time of a request, share", f"{ours / by_hand:.3f}", ""),
    ]


def notebook(rounds: int) -> list[tuple[str, str, str]]:
    """Training on two processes from a notebook's cell against the launcher: until it begins, and a second fit."""
    from kernel import Kernel

    source = (HERE / "cell.py").read_text().replace("*map(int, sys.argv[1:])", "2")
    fits = []

    def launched() -> float:
        start = time.time()
        found = json.loads(output_of([*LAUNCH, HERE / "cell.py"]).splitlines()[-1])
        fits.append([found["second"]])
        return found["begun"] - start

    def from_cell() -> float:
        found = json.loads(kernel.run(source).text.splitlines()[-1])
        fits[-1].append(found["second"])
        return found["begun"] - found["start"]

    with tempfile.TemporaryDirectory() as folder:
        kernel = Kernel(folder)
        try:
            # Not in turns: the times of the second fits are paired by their places.
            found = [(launched(), from_cell()) for _ in range(rounds + 1)][1:]
        finally:
            kernel.close()
    begin = median(a for a, _ in found)
    fit = median(a for a, _ in fits[1:])
    return [
        (f"until training begins, in a notebook over the launcher ({begin:.1f} s)", f"{ratio(found):.3f}", "1.5"),
        (f"a later fit of 1000 steps, likewise ({fit:.1f} s)", f"{ratio(fits[1:]):.3f}", ""),
    ]


def checkpoint(rounds: int) -> list[tuple[str, str, str]]:
    """How long training stands still for a checkpoint of 100 MB, against `torch.save` of the same state."""
    found = json.loads(output_of([sys.executable, HERE / "checkpoint.py", rounds]))
    base = median(times[0] for times in found)

    def over(of: int, by: int) -> str:
        return f"{median(times[of] / times[by] for times in found):.3f}"

    return [
        (f"checkpoint of 100 MB over torch.save ({1000 * base:.0f} ms), in place", over(2, 0), "1.3"),
        ("    over torch.save to a file that is then synced, as a checkpoint is", over(2, 1), ""),
        ("    in the background", over(3, 0), "0.3"),
        ("    in the background: a computation meanwhile, over one undisturbed", over(5, 4), ""),
    ]


def noise(rounds: int) -> list[tuple[str, str, str]]:
    """What GradientNoiseScale costs of a step, by what a measured step takes longer, spread over those between."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        for command in ([sys.executable], LAUNCH):
            output_of([*command, HERE / "noise.py", rounds, file])
            for name, found in json.loads(file.read_text()).items():
                share = median(extra / step for step, extra in found)
                what = f"noise scale, {name}: share of a step ({1000 * median(step for step, _ in found):.0f} ms)"
                rows.append((what, f"{100 * share:.2f} %", "1 %"))
    return rows


def monitor(rounds: int) -> list[tuple[str, str, str]]:
    """What ScalingMonitor() costs of a step of 10 ms on two processes, against the same step without it."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        output_of([*LAUNCH, HERE / "monitor.py", rounds, file])
        for name, found in json.loads(file.read_text()).items():
            what = (
                f"ScalingMonitor, 2-process step {name} ({1000 * median(each[0] for each in found):.1f} ms), over none"
            )
            rows.append((what, f"{ratio(found):.4f}", "1.01"))
            rows.append(("    none again, over none", f"{ratio([(a, c) for a, _, c in found]):.4f}", ""))
    return rows


def search(rounds: int) -> list[tuple[str, str, str]]:
    """A search of 8 trials that compute with one thread, two at a time and one by one."""
    config = {"algorithm": "random", "n_trials": 8, "parameters": {"x": {"type": "float", "min": 0, "max": 1}}}

    def at_once(n: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "config.json"
            file.write_text(json.dumps(config))
            options = ["-j", str(n), "--dir", f"{folder}/search"]
            return wall_time([sys.executable, "-m", "learnerkit.sweep", *options, file, HERE / "sweep_trial.py"])

    found = take_turns(rounds, lambda: at_once(1), lambda: at_once(2))
    one = median(times[0] for times in found)
    return [(f"a search of 8 trials, two at a time over one by one ({one:.0f} s)", f"{ratio(found):.3f}", "0.55")]


IMPORTS = {
    "learnerkit": "from learnerkit import Learner, DataLoaders, accuracy",
    "fastai": "from fastai.basics import *",
    "lightning": "import lightning",
    "accelerate": "from accelerate import Accelerator",
    "transformers": "from transformers import Trainer, TrainingArguments",
}
"""What a script begins with, by package."""


def peers(rounds: int) -> list[tuple[str, str, str]]:
    """Training steps and imports of the other libraries that are installed, against a hand-written loop and torch."""
    rows = []
    steps = measure_in_terminal([sys.executable, HERE / "peers.py", rounds])
    for net, times in steps["times"].items():
        (_, by_hand), *others = times.items()
        rows.append((f"a step by hand, {net}", f"{median(by_hand):.0f} us", ""))
        for label, found in others:
            extra = median(theirs - mine for mine, theirs in zip(by_hand, found, strict=True))
            over = ratio(list(zip(by_hand, found, strict=True)))
            rows.append((f"    {label}", f"{extra:+.1f} us, x {over:.2f}", ""))
    lines = {package: line for package, line in IMPORTS.items() if find_spec(package) is not None}
    commands = [[sys.executable, "-c", line] for line in ("import torch", *lines.values())]
    found = take_turns(rounds, *(lambda command=command: wall_time(command) for command in commands))
    rows.append(("import torch", f"{median(times[0] for times in found):.2f} s", ""))
    for i, line in enumerate(lines.values(), 1):
        rows.append((f"    {line}", f"x {ratio([(times[0], times[i]) for times in found]):.2f}", ""))
    return rows + [(name, "not installed", "") for name in steps["missing"]]


def gpu(rounds: int) -> list[tuple[str, str, str]]:
    """Training steps on a GPU, and their peak memory: learnerkit and other libraries over a hand-written loop."""
    look = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    if subprocess.run(look, env=environment(gpu=True), check=False).returncode:
        return [("training steps on a GPU, of which there is none here", NOT_MEASURED, "")]
    command = [sys.executable, HERE / "gpu.py", "--rounds", rounds, "--file"]
    rows = [(what, figure, goal) for what, figure, goal in measure_in_terminal(command, gpu=True)]
    augmented = json.loads(output_of([sys.executable, HERE / "gpu_images.py", "--rounds", rounds], gpu=True))
    for name, times in augmented["seconds"].items():
        what = f"augmenting whole batches at 224 pixels, {name}, times as fast as {augmented['workers']} workers"
        rows.append((what, f"{1 / ratio(times):.1f}", "3"))
    return rows


BENCHMARKS: dict[str, Callable[[int], list[tuple[str, str, str]]]] = {
    "step": step,
    "import": imports,
    "launch": launch,
    "ddp": ddp,
    "sharded": sharded,
    "data": data,
    "images": images,
    "serve": serve,
    "notebook": notebook,
    "checkpoint": checkpoint,
    "noise": noise,
    "monitor": monitor,
    "search": search,
    "peers": peers,
    "gpu": gpu,
}


def take_turns(rounds: int, *contestants: Callable[[], float]) -> list[tuple[float, ...]]:
    """The contestants' times in each round, after one round that does not count; they take turns at beginning."""
    for contestant in contestants:
        contestant()
    found = []
    for i in range(rounds):
        order = [(i + k) % len(contestants) for k in range(len(contestants))]
        times = {k: contestants[k]() for k in order}
        found.append(tuple(times[k] for k in sorted(times)))
    return found


def ratio(found: list[tuple[float, ...]]) -> float:
    """The second's time over the first's: the median over the rounds, whose times had the same conditions."""
    return median(times[1] / times[0] for times in found)


def environment(gpu: bool = False) -> dict[str, str]:
    """One thread a process, on the CPU unless `gpu`; modules are compiled once, as for users, not at each import."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"OMP_NUM_THREADS": "1"} | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})


def wall_time(command: list) -> float:
    """The seconds a command takes."""
    start = time.perf_counter()
    output_of(command)
    return time.perf_counter() - start


def output_of(command: list, gpu: bool = False) -> str:
    """What a command prints."""
    done = subprocess.run(list(map(str, command)), env=environment(gpu), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed\n{done.stdout}{done.stderr}")
    return done.stdout


def measure_in_terminal(command: list, gpu: bool = False) -> dict | list:
    """What a command writes as JSON into a file (its last argument), with a terminal for its output: bars are live."""
    terminal, inside = pty.openpty()
    termios.tcsetwinsize(inside, (24, 100))
    seen: list[bytes] = []
    reader = threading.Thread(target=_drain, args=(terminal, seen))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        process = subprocess.Popen(
            [*map(str, command), str(file)],
            env=environment(gpu),
            stdin=subprocess.DEVNULL,
            stdout=inside,
            stderr=inside,
        )
        os.close(inside)
        reader.start()
        code = process.wait()
        reader.join()
        shown = b"".join(seen).decode(errors="replace")
        if code:
            raise SystemExit(f"{' '.join(map(str, command))} failed\n{shown}")
        if "it/s" not in shown:
            raise SystemExit(f"{' '.join(map(str, command))} showed no progress bar, which is to be measured too")
        return json.loads(file.read_text())


def _drain(terminal: int, seen: list[bytes]) -> None:
    try:
        while part := os.read(terminal, 65536):
            seen.append(part)
    except OSError:  # the last process closed it
        pass
    os.close(terminal)


def free_port() -> int:
    """A port nobody uses at the moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    main()
