"""Start one process per GPU of this machine, watch them, and say which one failed first.

``python -m learnerkit.launch train.py`` needs the standard library only: torch is imported by the processes it
starts, never here. Reads from top to bottom: the command line, then the steps start, watch, stop and report.
"""

import argparse
import ctypes
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NoReturn

__all__ = ["main"]

WORKER = Path(__file__).with_name("_worker.py")
LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
GPU_DEVICE_FILES = ("/dev/nvidia0", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, either under WSL

POLL_SECONDS = 0.02
SETTLE_SECONDS = 0.3  # after a failure: time for the other ranks to fail by themselves and say why
GRACE_SECONDS = 5.0  # after a failure or Ctrl-C
LONG_GRACE_SECONDS = 30.0  # after SIGTERM and the like, which a script may answer by saving a checkpoint

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
OTHER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Job:
    """What to run, how many times, and on which GPUs."""

    command: list[str]  # script.py args..., or -m module args...
    nproc: int
    gpus: str | None = None  # CUDA_VISIBLE_DEVICES of the processes; None leaves it as it is
    grace: float | None = None
    unbuffered: bool = False


@dataclass
class Rank:
    """One process of the run."""

    number: int
    process: subprocess.Popen
    report_file: IO[bytes]
    ended: float  # on the monotonic clock; while the process runs, when it was last seen alive
    code: int | None = None  # as in Popen: minus the signal's number if a signal ended it
    report: dict = field(default_factory=dict)
    stop_signals: list[int] = field(default_factory=list)  # what the launcher sent to end it


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    try:
        return run_attempt(parse(argv))
    except KeyboardInterrupt:  # before the signals are watched
        return 128 + signal.SIGINT


def run_attempt(job: Job) -> int:
    """Run the job once, from a fresh store to the report; nothing of it stays behind."""
    began = time.monotonic()
    ranks: list[Rank] = []
    with received_signals() as signals:
        try:
            start(job, ranks)
            signum = watch(ranks, signals)
            stop(ranks, signals, signum, job.grace)
        finally:
            kill(ranks)
    return report(ranks, signum, began)


# The command line


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and leave with code 2."""
        self.exit(2, f"learnerkit.launch: error: {message}\n")


def parse(argv: Sequence[str] | None) -> Job:
    """Turn the command line into a Job; everything after the script or module belongs to it, untouched."""
    parser = Parser(
        prog="python -m learnerkit.launch",
        usage="python -m learnerkit.launch [options] script.py [arguments of the script]\n"
        "       python -m learnerkit.launch [options] -m package.module [arguments of the module]",
        description="Run a training script once per GPU of this machine; on a machine without GPUs, once.",
        epilog="examples:\n"
        "  python -m learnerkit.launch train.py --epochs 5        every GPU\n"
        "  python -m learnerkit.launch --gpus 0,2 train.py        two of them\n"
        "  python -m learnerkit.launch --nproc 2 -m pkg.train     two processes, also without a GPU\n\n"
        "The exit code is the script's; 128 + n if signal n ended it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    number = parser.add_mutually_exclusive_group()
    number.add_argument(
        "--nproc", "--nproc-per-node", type=positive, metavar="N", help="number of processes (default: one per GPU)"
    )
    number.add_argument("--gpus", metavar="0,1", help="use these GPUs, one process each")
    parser.add_argument(
        "--grace",
        type=seconds,
        metavar="S",
        help="seconds a process gets to stop before it is killed (default: "
        f"{GRACE_SECONDS:.0f} after a failure or Ctrl-C, {LONG_GRACE_SECONDS:.0f} after SIGTERM)",
    )
    parser.add_argument("-u", dest="unbuffered", action="store_true", help="do not buffer the script's output")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="...", help="run a module, as python -m")
    parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    try:
        command = target(options.module, options.script)
        nproc, gpus = choose_processes(options.nproc, options.gpus, os.environ)
    except ValueError as error:
        parser.error(str(error))
    return Job(command, nproc, gpus, options.grace, options.unbuffered)


def positive(text: str) -> int:
    """Read a number of processes."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """Read a time."""
    if not re.fullmatch(r"\d+(\.\d*)?|\.\d+", text):
        raise argparse.ArgumentTypeError(f"expected seconds, such as 5 or 0.5, got {text!r}")
    return float(text)


def target(module: list[str] | None, script: list[str]) -> list[str]:
    """Return what the workers are to run, after a look whether it is there."""
    if module:
        return ["-m", *module]
    if script[:1] == ["--"]:
        script = script[1:]
    if not script:
        raise ValueError("nothing to run: name a script (train.py) or a module (-m package.module)")
    if not os.path.isfile(script[0]):
        raise ValueError(f"there is no script {script[0]!r} (looked in {os.getcwd()})")
    return script


# The GPUs, without torch


def choose_processes(nproc: int | None, gpus: str | None, environ: Mapping[str, str]) -> tuple[int, str | None]:
    """Return the number of processes and, where `gpus` names some, their CUDA_VISIBLE_DEVICES."""
    names = gpu_names(environ)
    if gpus is not None:
        chosen = choose_gpus(gpus, names)
        return len(chosen), ",".join(chosen)
    if nproc and names and nproc > len(names):
        raise ValueError(
            f"--nproc {nproc}, but there are {len(names)} GPUs to use and each process needs its own. "
            "Ask for fewer, or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
        )
    return nproc or max(len(names), 1), None


def choose_gpus(gpus: str, names: list[str]) -> list[str]:
    """Return the names of the GPUs listed by index in `gpus`."""
    indices = [int(part) if part.strip().isdecimal() else -1 for part in gpus.split(",")]
    if len(set(indices)) < len(indices) or not all(0 <= index < len(names) for index in indices):
        allowed = f"indices from 0 to {len(names) - 1}, each once" if names else "nothing here: no GPU was found"
        raise ValueError(f"--gpus {gpus!r}: allowed are {allowed}")
    return [names[index] for index in indices]


def gpu_names(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs a process of this environment sees, each as CUDA_VISIBLE_DEVICES would name it."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        return listed_gpus(environ["CUDA_VISIBLE_DEVICES"])
    count = count_with_nvml()
    if count is None:
        count = count_with_torch() if any(map(os.path.exists, GPU_DEVICE_FILES)) else 0
    return [str(index) for index in range(count)]


def listed_gpus(visible: str) -> list[str]:
    """Return the entries of a CUDA_VISIBLE_DEVICES: indices, GPU or MIG names. CUDA stops at the first bad one."""
    names = []
    for name in map(str.strip, visible.split(",")):
        if not re.fullmatch(r"\d+|(GPU|MIG)-.+", name):
            break
        names.append(name)
    return names


def count_with_nvml() -> int | None:
    """Ask the driver's management library; None if it is missing or does not answer."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() != 0:
        return None
    answered = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    nvml.nvmlShutdown()
    return count.value if answered else None


def count_with_torch() -> int:
    """Ask torch in another process: slow, but it knows the GPUs of every maker."""
    question = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    answer = subprocess.run(question, stdout=subprocess.PIPE, text=True).stdout.strip()
    return int(answer) if answer.isdecimal() else 0


# Start


def start(job: Job, ranks: list[Rank]) -> None:
    """Start the processes, adding each to `ranks` as soon as it runs.

    The store in which they meet listens on loopback only. Its socket is bound here, where the kernel picks a free
    port, and handed over to rank 0, so no port is fixed and none can be taken in between.
    """
    with socket.create_server((LOOPBACK, 0)) as listener:
        for number in range(job.nproc):
            store_fd = listener.fileno() if number == 0 else None
            # Without a name in the file system nobody has to remove the file, whatever happens to the launcher.
            report_file = tempfile.TemporaryFile()  # noqa: SIM115
            setup = {"launcher": os.getpid(), "report_fd": report_file.fileno(), "store_fd": store_fd}
            process = subprocess.Popen(
                [sys.executable, *(["-u"] if job.unbuffered else []), str(WORKER), *job.command],
                env=rank_environment(os.environ, job, number, listener.getsockname()[1])
                | {"LEARNERKIT_WORKER": json.dumps(setup)},
                stdin=subprocess.DEVNULL,
                pass_fds=[descriptor for descriptor in (report_file.fileno(), store_fd) if descriptor],
                process_group=0,  # so that what the rank starts can be ended with it
            )
            ranks.append(Rank(number, process, report_file, ended=time.monotonic()))


def rank_environment(environ: Mapping[str, str], job: Job, number: int, port: int) -> dict[str, str]:
    """Return the environment of one rank: a copy, in which nothing of another launcher is left."""
    stale = re.compile("TORCHELASTIC_|GROUP_|ROLE_|NODE_RANK$")
    env = {name: value for name, value in environ.items() if not stale.match(name)}
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        env.setdefault(name, LOOPBACK_INTERFACE)
    if job.nproc > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    if job.gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = job.gpus
    return env | {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(job.nproc),
        "LOCAL_WORLD_SIZE": str(job.nproc),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is served already: every rank connects to it
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


# Watch


@contextmanager
def received_signals() -> Iterator[Callable[[float], Sequence[int]]]:
    """Collect the signals sent to the launcher; gives a function that waits some seconds for the next ones.

    The end of a process is a signal too (SIGCHLD), so waiting ends at once when a rank does.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    # What was ignored when the launcher was started (SIGHUP under nohup) stays ignored, here and in the ranks.
    # Not so SIGCHLD: without it the exit codes are lost.
    heard = [s for s in (*ENDING_SIGNALS, *OTHER_SIGNALS) if signal.getsignal(s) is not signal.SIG_IGN]
    old_descriptor = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    old_handlers = {s: signal.signal(s, lambda *_: None) for s in (*heard, signal.SIGCHLD)}

    def wait(seconds: float) -> Sequence[int]:
        if not select.select([read_end], [], [], seconds)[0]:
            return []
        return [signum for signum in os.read(read_end, 4096) if signum != signal.SIGCHLD]

    try:
        yield wait
    finally:
        for signum, handler in old_handlers.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(old_descriptor)
        os.close(read_end)
        os.close(write_end)


def watch(ranks: list[Rank], signals: Callable[[float], Sequence[int]]) -> int | None:
    """Wait until every rank has ended or one has failed, or for a signal that ends the run, which is returned."""
    while running(ranks) and not any(rank.code for rank in ranks):
        for signum in signals(POLL_SECONDS):
            if signum in ENDING_SIGNALS:
                return signum
            send(ranks, signum)
    return None


def running(ranks: list[Rank]) -> list[Rank]:
    """Return the ranks that still run, and take note of those that ended."""
    for rank in ranks:
        if rank.code is not None:
            continue
        now = time.monotonic()
        code = rank.process.poll()
        if code is None:
            rank.ended = now
        else:
            take_note(rank, code)
    return [rank for rank in ranks if rank.code is None]


def take_note(rank: Rank, code: int) -> None:
    """Record how a rank ended, and kill what it left running: loader workers, programs it started.

    A rank that could not write a report (a signal, os._exit) ended when it was last seen alive at the earliest, so
    that an error this caused in another rank counts as the later one.
    """
    kill_group(rank)
    rank.report_file.seek(0)
    rank.report = json.loads(rank.report_file.read() or "{}")
    rank.report_file.close()
    rank.code = rank.report.get("code", code)
    rank.ended = rank.report.get("time", rank.ended)


def send(ranks: list[Rank], signum: int) -> None:
    """Send a signal to the ranks that run: to them alone, since loader workers must live until a rank has saved."""
    for rank in ranks:
        if rank.code is None:
            rank.process.send_signal(signum)


# Stop


def stop(ranks: list[Rank], signals: Signals, signum: int | None, grace: float | None) -> None:
    """Ask the ranks that still run to end, with `signum` or after a failure SIGTERM, and give them some time."""
    if signum is None:
        wait_for_end(ranks, signals, SETTLE_SECONDS)
        signum, default = signal.SIGTERM, GRACE_SECONDS
    else:
        say(f"{signal.Signals(signum).name} received, waiting for the ranks to stop (Ctrl-C kills them)")
        default = GRACE_SECONDS if signum == signal.SIGINT else LONG_GRACE_SECONDS
    for rank in running(ranks):
        rank.stop_signals.append(signum)
    send(ranks, signum)
    wait_for_end(ranks, signals, default if grace is None else grace)


def wait_for_end(ranks: list[Rank], signals: Signals, seconds: float) -> None:
    """Wait until no rank runs, for at most `seconds`; Ctrl-C ends the wait, other signals are passed on."""
    deadline = time.monotonic() + seconds
    while running(ranks) and time.monotonic() < deadline:
        for signum in signals(POLL_SECONDS):
            if signum == signal.SIGINT:
                return
            send(ranks, signum)


def kill(ranks: list[Rank]) -> None:
    """Kill the ranks that still run, and return when nothing of the run is left."""
    for rank in running(ranks):
        rank.stop_signals.append(signal.SIGKILL)
        kill_group(rank)
    deadline = time.monotonic() + KILL_SECONDS
    while (running(ranks) or any(map(group_exists, ranks))) and time.monotonic() < deadline:
        time.sleep(0.005)


def kill_group(rank: Rank) -> None:
    """Kill a rank and what it has started."""
    try:
        os.killpg(rank.process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # nothing is left, or (on macOS) only dead processes
        pass


def group_exists(rank: Rank) -> bool:
    """Tell whether a rank, or something it has started, is left."""
    try:
        os.killpg(rank.process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


# Report


def report(ranks: list[Rank], signum: int | None, began: float) -> int:
    """Say what went wrong, the first failure first, and return the exit code of the run."""
    failures = sorted(filter(failed, ranks), key=lambda rank: rank.ended)
    if failures:
        say(first_failure(failures[0], began, with_traceback=signum != signal.SIGINT))
    for rank in failures[1:]:
        say(f"rank {rank.number} then {rank.report.get('error') and 'failed: ' + rank.report['error'] or fate(rank)}")
    for rank in ranks:
        if rank not in failures and (failures or signal.SIGKILL in rank.stop_signals):
            say(f"rank {rank.number} {fate(rank)}")
    if signum is not None:
        return 128 + signum
    return shell_code(failures[0].code) if failures else 0
