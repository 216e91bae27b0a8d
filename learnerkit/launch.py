"""Start one process per GPU of this machine, watch them, and say which one failed first.

``python -m learnerkit.launch train.py`` needs the standard library only; torch is imported by the processes
that it starts. The file reads downwards: the command line, then the steps start, watch, stop and report.
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

from learnerkit.environment import LOOPBACK, killed_by, rank_environment, signal_name

__all__ = ["main"]

WORKER = Path(__file__).with_name("_worker.py")
GPU_DEVICE_FILES = ("/dev/nvidia0", "/dev/kfd")  # NVIDIA, AMD

POLL_SECONDS = 0.02
CAUSE_SECONDS = 5.0  # after what may be its echo: time for the first cause to clean up, end by itself and say why
SETTLE_SECONDS = 0.3  # after a failure: time for the other ranks to fail by themselves and say why
GRACE_SECONDS = 5.0  # after a failure or Ctrl-C
LONG_GRACE_SECONDS = 30.0  # after SIGTERM and the like, which a script may answer by saving a checkpoint
KILL_SECONDS = 5.0  # for the kernel to clear away what was killed

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
OTHER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)  # passed on, and nothing more

# What torch raises in a collective, also because another rank has gone.
COLLECTIVE_ERROR = re.compile(
    r"Dist(Backend|Network|Store)?Error\b|RuntimeError: .*(?i:gloo|nccl|connection (closed|reset) by peer)"
)
MAY_FOLLOW, FOLLOWS = 1, 2  # see echo

SignalQueue = Callable[[float], Sequence[int]]  # see received_signals


@dataclass(frozen=True)
class Job:
    """What to run, how many times, and on which GPUs."""

    command: list[str]  # script.py args..., or -m module args...
    nproc: int
    gpus: str | None = None  # CUDA_VISIBLE_DEVICES for the processes; None: as it is
    grace: float | None = None
    unbuffered: bool = False


@dataclass
class Rank:
    """One process of the run."""

    number: int
    process: subprocess.Popen
    report_file: IO[bytes]
    ended: float  # on the monotonic clock; while the process runs, when it was last seen alive
    code: int | None = None  # as in Popen: minus the number of the signal that ended it
    report: dict = field(default_factory=dict)
    stop_signals: list[int] = field(default_factory=list)  # what the launcher sent to end it


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    try:
        return run_attempt(parse(argv))
    except KeyboardInterrupt:  # only before run_attempt watches the signals
        return 128 + signal.SIGINT


def run_attempt(job: Job) -> int:
    """Run the job once, with a store of its own, and return the exit code; no process of it is left."""
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
    """Turn the command line into a Job; what follows the script or module belongs to it, untouched."""
    parser = Parser(
        usage="python -m learnerkit.launch [options] script.py [arguments of the script]\n"
        "       python -m learnerkit.launch [options] -m package.module [arguments of the module]",
        description="Run a training script once per GPU of this machine; on a machine without GPUs, once.",
        epilog="examples:\n"
        "  python -m learnerkit.launch train.py --epochs 5        every GPU\n"
        "  python -m learnerkit.launch --gpus 0,2 train.py        two of them\n"
        "  python -m learnerkit.launch --nproc 2 -m pkg.train     two processes, also without a GPU\n\n"
        "The exit code is the script's, or 128 + n if signal n ended it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    grace = f"{GRACE_SECONDS:.0f} after a failure or Ctrl-C, {LONG_GRACE_SECONDS:.0f} after SIGTERM"
    add = parser.add_argument
    add(
        "--nproc",
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="number of processes (default: one per GPU)",
    )
    add("--gpus", metavar="0,1", help="the GPUs to use, by index, with one process each")
    add("--grace", type=float, metavar="S", help=f"seconds to stop in before being killed (default: {grace})")
    add("-u", dest="unbuffered", action="store_true", help="do not buffer the output of the processes")
    add("-m", dest="module", action="store_true", help="run a module, as python -m does")
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    try:
        command = choose_command(options.module, options.command)
        nproc, gpus = choose_processes(options.nproc, options.gpus, os.environ)
        if options.grace is not None and not 0 <= options.grace < float("inf"):
            raise ValueError(f"--grace {options.grace}: give seconds, 0 or more")
    except ValueError as error:
        parser.error(str(error))
    return Job(command, nproc, gpus, options.grace, options.unbuffered)


def choose_command(module: bool, command: list[str]) -> list[str]:
    """Return what each process is to run: a script or ``-m`` and a module, with its arguments."""
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise ValueError("nothing to run: name a script (train.py) or a module (-m package.module)")
    if module:
        return ["-m", *command]
    if not os.path.isfile(command[0]):
        raise ValueError(f"{command[0]!r} is no file (seen from {os.getcwd()}); name a Python script, or use -m")
    return command


# GPUs, found without torch


def choose_processes(nproc: int | None, gpus: str | None, environ: Mapping[str, str]) -> tuple[int, str | None]:
    """Return the number of processes and, if `gpus` picks some, the CUDA_VISIBLE_DEVICES for them."""
    if nproc is not None and gpus is not None:
        raise ValueError("--nproc does not go with --gpus, which starts one process per GPU; leave one of them out")
    if nproc is not None and nproc < 1:
        raise ValueError(f"--nproc {nproc}: give the number of processes, 1 or more")
    names = gpu_names(environ)
    if gpus is not None:
        chosen = choose_gpus(gpus, names)
        return len(chosen), ",".join(chosen)
    if nproc and nproc > len(names) > 0:
        raise ValueError(
            f"--nproc {nproc}: every process needs a GPU of its own, and {len(names)} can be used; "
            "ask for fewer, or set CUDA_VISIBLE_DEVICES= (to nothing) to run on the CPU"
        )
    return nproc or max(len(names), 1), None


def choose_gpus(gpus: str, names: list[str]) -> list[str]:
    """Return the names of the GPUs whose indices are listed in `gpus`."""
    indices = [int(part) if part.strip().isdecimal() else -1 for part in gpus.split(",")]
    if len(set(indices)) < len(indices) or not all(0 <= index < len(names) for index in indices):
        allowed = f"give indices from 0 to {len(names) - 1}, each once" if names else "no GPU can be used here"
        raise ValueError(f"--gpus {gpus}: {allowed}")
    return [names[index] for index in indices]


def gpu_names(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that a process of this environment sees, named as in CUDA_VISIBLE_DEVICES."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        return listed_gpus(environ["CUDA_VISIBLE_DEVICES"])
    count = count_with_nvml()
    if count is None:
        count = count_with_torch() if any(map(os.path.exists, GPU_DEVICE_FILES)) else 0
    return [str(index) for index in range(count)]


def listed_gpus(visible: str) -> list[str]:
    """Return the indices, GPU and MIG names in a CUDA_VISIBLE_DEVICES, up to the first bad one like CUDA."""
    names = []
    for name in map(str.strip, visible.split(",")):
        if not re.fullmatch(r"\d+|(GPU|MIG)-.+", name):
            break
        names.append(name)
    return names


def count_with_nvml() -> int | None:
    """Ask the driver's management library; None if there is none or it does not answer."""
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
    """Ask torch, in a process of its own: slow, but it knows the GPUs of every maker."""
    question = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    answer = subprocess.run(question, stdout=subprocess.PIPE, text=True).stdout.strip()
    return int(answer) if answer.isdecimal() else 0


# Start


def start(job: Job, ranks: list[Rank]) -> None:
    """Start the processes; each joins `ranks` as soon as it runs.

    The store in which they meet listens on loopback only. Its socket is bound here, to a port that the kernel
    picks, and handed to rank 0: no port is fixed, and none can be taken by others in between.
    """
    interpreter = [sys.executable, "-u"] if job.unbuffered else [sys.executable]
    with socket.create_server((LOOPBACK, 0)) as listener:
        for number in range(job.nproc):
            report_file = tempfile.TemporaryFile()  # noqa: SIM115  (without a name: nothing is left to remove)
            store_fd = listener.fileno() if number == 0 else None
            setup = {"launcher": os.getpid(), "report_fd": report_file.fileno(), "store_fd": store_fd}
            env = rank_environment(os.environ, number, job.nproc, listener.getsockname()[1], job.gpus)
            process = subprocess.Popen(
                [*interpreter, str(WORKER), *job.command],
                env=env | {"LEARNERKIT_WORKER": json.dumps(setup)},
                stdin=subprocess.DEVNULL,
                pass_fds=[fd for fd in (report_file.fileno(), store_fd) if fd is not None],
                process_group=0,  # what the rank starts can be ended together with it
            )
            ranks.append(Rank(number, process, report_file, ended=time.monotonic()))


# Watch


@contextmanager
def received_signals() -> Iterator[SignalQueue]:
    """Collect the signals sent to the launcher; gives a function that waits some seconds for the next ones.

    A rank that ends sends SIGCHLD, which ends such a wait at once.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    # What was ignored when the launcher started stays so, here and in the ranks, such as SIGHUP under nohup.
    # SIGCHLD must not, or exit codes would be lost.
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


def watch(ranks: list[Rank], signals: SignalQueue) -> int | None:
    """Wait until all ranks have ended, one has failed, or a signal asks for the end; return that signal.

    If what has failed may be an echo of another rank's failure, that one gets the time to end by itself.
    """
    while running(ranks):
        first = next(iter(failures(ranks)), None)
        if first and time.monotonic() >= first.ended + (CAUSE_SECONDS if echo(first) else 0):
            break
        for signum in signals(POLL_SECONDS):
            if signum in ENDING_SIGNALS:
                return signum
            send(ranks, signum)
    return None


def running(ranks: list[Rank]) -> list[Rank]:
    """Return the ranks that still run; what ended since the last call is noted."""
    for rank in ranks:
        now = time.monotonic()
        if rank.code is None and rank.process.poll() is None:
            rank.ended = now
        elif rank.code is None:
            note_end(rank)
    return [rank for rank in ranks if rank.code is None]


def note_end(rank: Rank) -> None:
    """Note how a rank ended, and kill what it left running (loader workers, other programs).

    A rank that was killed wrote no report. It counts as ended when it was last seen alive, so that the error
    which its end caused in another rank comes after it.
    """
    signal_group(rank, signal.SIGKILL)
    with rank.report_file as file:
        file.seek(0)
        try:
            rank.report = json.load(file)
        except ValueError:
            rank.report = {}
    rank.code = rank.report.get("code", rank.process.returncode)
    rank.ended = rank.report.get("time", rank.ended)


def send(ranks: list[Rank], signum: int) -> None:
    """Send a signal to the ranks, and not to their loader workers, which they may need in order to save."""
    for rank in running(ranks):
        rank.process.send_signal(signum)


# Stop


def stop(ranks: list[Rank], signals: SignalQueue, signum: int | None, grace: float | None) -> None:
    """Ask the ranks that still run to end, by `signum` (SIGTERM after a failure), and give them some time."""
    default_grace = GRACE_SECONDS if signum in (None, signal.SIGINT) else LONG_GRACE_SECONDS
    if signum is None:
        wait_for_end(ranks, signals, SETTLE_SECONDS)
        signum = signal.SIGTERM
    else:
        say(f"{signal_name(signum)} received, waiting for the ranks to stop (Ctrl-C kills them)")
    for rank in running(ranks):
        rank.stop_signals.append(signum)
    send(ranks, signum)
    wait_for_end(ranks, signals, default_grace if grace is None else grace)


def wait_for_end(ranks: list[Rank], signals: SignalQueue, seconds: float) -> None:
    """Wait until no rank runs, at most `seconds`; Ctrl-C ends the wait, other signals are passed on."""
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
        signal_group(rank, signal.SIGKILL)
    deadline = time.monotonic() + KILL_SECONDS
    while (running(ranks) or any(signal_group(rank, 0) for rank in ranks)) and time.monotonic() < deadline:
        time.sleep(0.005)


def signal_group(rank: Rank, signum: int) -> bool:
    """Send a signal to a rank and all that it has started; tell whether anything of them was left."""
    try:
        os.killpg(rank.process.pid, signum)
    except (ProcessLookupError, PermissionError):  # macOS does not permit it if only dead processes are left
        return False
    return True


# Report


def report(ranks: list[Rank], signum: int | None, began: float) -> int:
    """Say what went wrong, the first failure first, and return the exit code of the run."""
    failed = failures(ranks)
    for rank in failed[:1]:
        one_line = signum == signal.SIGINT or echo(rank) == FOLLOWS  # whose message names the cause
        details = rank.report.get("error" if one_line else "traceback")
        say(f"rank {rank.number} {fate(rank)} after {rank.ended - began:.1f} s" + (f":\n{details}" if details else ""))
    for rank in failed[1:]:
        error = rank.report.get("error")
        say(f"rank {rank.number} then " + (f"failed: {error}" if error else fate(rank)))
    for rank in ranks:
        if rank not in failed and (failed or signal.SIGKILL in rank.stop_signals):
            say(f"rank {rank.number} {fate(rank)} after {rank.ended - began:.1f} s")
    if signum is not None:
        return 128 + signum
    code = failed[0].code if failed else 0
    return code if code >= 0 else 128 - code


def failures(ranks: list[Rank]) -> list[Rank]:
    """Return the ranks that ended badly, other than by being stopped: the first cause first, then its echoes."""
    failed = [rank for rank in ranks if rank.code not in (None, 0) and not stopped(rank)]
    return sorted(failed, key=lambda rank: (echo(rank), rank.ended))


def echo(rank: Rank) -> int:
    """Tell whether a failure comes of another rank's: 0 (it does not), MAY_FOLLOW or FOLLOWS.

    The time alone does not tell: a rank that failed first may clean up for longer than those that follow it, and
    the peers of a killed rank see its connections close before the kernel has cleared it away.
    """
    if rank.report.get("follows_another"):
        return FOLLOWS
    aborted = rank.code == -signal.SIGABRT  # torch does so, too, when it loses its peers on NCCL
    return MAY_FOLLOW if aborted or COLLECTIVE_ERROR.match(rank.report.get("error", "")) else 0


def stopped(rank: Rank) -> bool:
    """Tell whether a rank ended by a signal of the launcher, or with the exit code that stands for it."""
    return any(rank.code in (-signum, 128 + signum) for signum in rank.stop_signals)


def fate(rank: Rank) -> str:
    """Say in a few words how a rank ended."""
    if rank.code is None:
        return f"does not die: process {rank.process.pid} hangs in the kernel"
    if stopped(rank):
        return "did not stop in time and was killed" if rank.code == -signal.SIGKILL else "was stopped by the launcher"
    if rank.code < 0:
        return killed_by(-rank.code)
    if rank.code == 0:
        return "ended with exit code 0"
    return f"failed (exit code {rank.code})" + (", following another rank," if echo(rank) == FOLLOWS else "")


def say(text: str) -> None:
    """Print to stderr, with control characters escaped: they could forge lines or steer the terminal."""
    controls = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
    text = re.sub(controls, lambda match: match[0].encode("unicode_escape").decode(), text.rstrip())
    try:
        print(f"learnerkit.launch: {text}", file=sys.stderr, flush=True)
    except OSError:  # the terminal is gone (SIGHUP), but the ranks are still to be stopped
        pass


if __name__ == "__main__":
    sys.exit(main())
