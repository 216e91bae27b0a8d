"""Start the ranks of one machine, watch them, stop them, and report which one failed first.

The file reads downwards, in that order. It uses the standard library only: a launcher does not import torch.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from learnerkit.launch.environment import Place, rank_environment
from learnerkit.launch.heartbeat import Heartbeat, where
from learnerkit.launch.nodes import End, SingleNode
from learnerkit.launch.processes import kill_group
from learnerkit.launch.report import Rank, echo, ending, failure, first_failure, log_errors, report, say
from learnerkit.text import signal_name

T = TypeVar("T")

WORKER = Path(__file__).with_name("rank_main.py")

POLL_SECONDS = 0.02
CAUSE_SECONDS = 5.0  # after what may be its echo: time for the first cause to clean up, end by itself and say why
SETTLE_SECONDS = 0.3  # after a failure: time for the other ranks to fail by themselves and say why
GRACE_SECONDS = 5.0  # after a failure or Ctrl-C
LONG_GRACE_SECONDS = 30.0  # after SIGTERM and the like, which a script may answer by saving a checkpoint
KILL_SECONDS = 5.0  # for the kernel to clear away what was killed

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
OTHER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)  # passed on, and nothing more

SignalQueue = Callable[[float], Sequence[int]]  # see received_signals


class Interrupted(Exception):
    """A signal asked for the end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@dataclass(frozen=True)
class Job:
    """What to run on this machine, how many times, on which GPUs, and where its output goes.

    Args:
        command: script.py args..., or -m module args...
        nproc: how many ranks.
        gpus: CUDA_VISIBLE_DEVICES for the ranks; `None`: as it is.
        grace: seconds that ranks have to stop in before they are killed.
        unbuffered: as with `python -u`.
        timeout: seconds after which a rank that waits for others counts as stuck.
        log_dir: a folder for one file per rank and attempt.
        tee: show the output of all ranks line by line, each with the rank's number.
        speaks: exit code 1 needs no words of the launcher's: what the ranks print says it all.
    """

    command: list[str]
    nproc: int
    gpus: str | None = None
    grace: float | None = None
    unbuffered: bool = False
    timeout: float | None = None
    log_dir: Path | None = None
    tee: bool = False
    speaks: bool = False


def run_attempt(job: Job, place: Place, others: SingleNode, signals: SignalQueue) -> End:
    """Run the job once, and return how it has ended for all nodes; no process of it is left here."""
    began = time.monotonic()
    ranks: list[Rank] = []
    with Output(job.log_dir, place, job.tee) as output:
        try:
            start(job, place, others, output, ranks)
            reason = watch(ranks, signals, others, alone=place.nodes == 1)
            if reason is None and (first := first_failure(ranks)):
                reason = others.tell(failure(first, place))  # at once, so that others need not wait
            stop(ranks, signals, reason, job.grace)
        finally:
            kill(ranks)
    log_errors(ranks)
    if reason is None:
        reason = aside(lambda: others.tell(End("done", place.node, 0)), signals)
    elif isinstance(reason, int):
        others.tell(End("stopped", place.node, 128 + reason, f"asked to end by {signal_name(reason)}"))
    if not (job.speaks and all(rank.code in (0, 1) and not rank.report.get("error") for rank in ranks)):
        report(ranks, reason, place, began)
    return ending(ranks, reason, place)


# Start


class Output:
    """Where the output of the ranks of an attempt goes: to the terminal as it is, to a file for each, or to both.

    Args:
        folder: for the files; `None`: no files.
        place: which attempt, and which ranks.
        tee: to the terminal line by line, each with the rank's number.
    """

    def __init__(self, folder: Path | None, place: Place, tee: bool) -> None:
        self.folder = folder and folder / f"attempt-{place.attempt}"
        self.tee = tee
        self._threads: list[threading.Thread] = []
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not tee:
                say(f"output goes to {self.log(place.first) if place.nproc == 1 else self.folder / 'rank-*.log'}")

    def log(self, number: int) -> Path | None:
        """The file of a rank."""
        return self.folder and self.folder / f"rank-{number}.log"

    @contextmanager
    def of(self, number: int) -> Iterator[dict]:
        """How a rank's process is to be started."""
        log = self.log(number)
        with log.open("wb", buffering=0) if log else nullcontext() as file:
            stream = subprocess.PIPE if self.tee else file
            yield {"stdout": stream, "stderr": stream and subprocess.STDOUT}

    def follow(self, number: int, process: subprocess.Popen) -> None:
        """Show what a rank prints, if that is wanted."""
        if self.tee:
            self._threads.append(threading.Thread(target=self._show, args=(number, process.stdout), daemon=True))
            self._threads[-1].start()

    def _show(self, number: int, lines: IO[bytes]) -> None:
        with lines, open(self.log(number) or os.devnull, "ab", buffering=0) as file:
            for line in lines:
                file.write(line)
                sys.stdout.buffer.write(f"[rank {number}] ".encode() + line.rstrip(b"\n") + b"\n")
                sys.stdout.buffer.flush()

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *error: object) -> None:
        for thread in self._threads:  # until the last line: the ranks have ended
            thread.join(KILL_SECONDS)


def start(job: Job, place: Place, others: SingleNode, output: Output, ranks: list[Rank]) -> None:
    """Start the ranks; each joins `ranks` as soon as it runs.

    The launcher has bound the socket of the store in which they meet; it goes to the first rank of the run.
    """
    interpreter = [sys.executable, "-u"] if job.unbuffered else [sys.executable]
    for number in range(job.nproc):
        rank_number = place.first + number
        report_file = tempfile.TemporaryFile()  # noqa: SIM115  (without a name: nothing is left to remove)
        heartbeat = Heartbeat.new()
        store_fd = others.listener.fileno() if rank_number == 0 else None
        setup = {
            "launcher": os.getpid(), "heartbeat": heartbeat.path,
            "report_fd": report_file.fileno(), "store_fd": store_fd,
        }  # fmt: skip
        env = rank_environment(os.environ, place, number, job.gpus) | {"LEARNERKIT_RANK_SETUP": json.dumps(setup)}
        if job.timeout is not None:
            env["LEARNERKIT_TIMEOUT"] = str(job.timeout)
        with output.of(rank_number) as streams:
            process = subprocess.Popen(
                [*interpreter, str(WORKER), *job.command],
                env=env,
                stdin=subprocess.DEVNULL,
                pass_fds=[fd for fd in (report_file.fileno(), store_fd) if fd is not None],
                process_group=0,  # what the rank starts can be ended together with it
                **streams,
            )
        log = output.log(rank_number)
        ranks.append(Rank(rank_number, process, report_file, time.monotonic(), heartbeat=heartbeat, log=log))
        output.follow(rank_number, process)
    others.close_listener()


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
    # URG, of which no process dies, is how a batch script of SLURM's says TERM to the launchers alone.
    wanted = (*ENDING_SIGNALS, *OTHER_SIGNALS, signal.SIGURG)
    heard = [s for s in wanted if signal.getsignal(s) is not signal.SIG_IGN]
    old_descriptor = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    old_handlers = {s: signal.signal(s, lambda *_: None) for s in (*heard, signal.SIGCHLD)}

    def wait(seconds: float) -> Sequence[int]:
        if not select.select([read_end], [], [], seconds)[0]:
            return []
        received = [signum for signum in os.read(read_end, 4096) if signum != signal.SIGCHLD]
        return [signal.SIGTERM if signum == signal.SIGURG else signum for signum in received]

    try:
        yield wait
    finally:
        for signum, handler in old_handlers.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(old_descriptor)
        os.close(read_end)
        os.close(write_end)


def aside(wait: Callable[[], T], signals: SignalQueue) -> T:
    """Wait for other nodes, and hear signals meanwhile.

    Raises:
        Interrupted: one of them asks for the end.
    """
    found: list = []

    def work() -> None:
        try:
            found.append((wait(), None))
        except Exception as error:
            found.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive():
        for signum in signals(POLL_SECONDS):
            if signum in ENDING_SIGNALS:
                raise Interrupted(signum)
    value, error = found[0]
    if error is not None:
        raise error
    return value


def watch(ranks: list[Rank], signals: SignalQueue, others: SingleNode, alone: bool) -> int | End | None:
    """Wait until all ranks have ended, or one has failed (then return nothing), or until something else asks for the
    end: return the signal, or the news of other nodes.

    If what has failed may be an echo of another rank's failure, that one gets the time to end by itself, and another
    node the time to tell of it.
    """
    while True:
        some_run, first = running(ranks), first_failure(ranks)
        if not some_run and (alone or first is None):
            break
        if first and time.monotonic() >= first.ended + cause_seconds(first) and not (echo(first) and others.in_doubt()):
            break
        for signum in signals(POLL_SECONDS):
            if signum in ENDING_SIGNALS:
                return signum
            send(ranks, signum)
        if news := others.news():
            return news
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
    """Note how and where a rank ended, and kill what it left running (loader workers, other programs).

    A rank that was killed wrote no report. It counts as ended when it was last seen alive, so that the error
    which its end caused in another rank comes after it.
    """
    kill_group(rank.process.pid)
    with rank.report_file as file:
        file.seek(0)
        try:
            rank.report = json.load(file)
        except ValueError:
            rank.report = {}
    if rank.heartbeat is not None:
        facts = rank.heartbeat.read()
        rank.place = where(facts) if facts["event"] else ""
        rank.heartbeat.close()
    rank.code = rank.report.get("code", rank.process.returncode)
    rank.ended = rank.report.get("time", rank.ended)


def send(ranks: list[Rank], signum: int) -> None:
    """Send a signal to the ranks, and not to their loader workers, which they may need in order to save."""
    for rank in running(ranks):
        rank.process.send_signal(signum)


# Stop


def stop(ranks: list[Rank], signals: SignalQueue, reason: int | End | None, grace: float | None) -> None:
    """Ask the ranks that still run to end, by the signal that was received or else SIGTERM, and give them some time."""
    signum = reason if isinstance(reason, int) else signal.SIGTERM
    if isinstance(reason, int):
        say(f"{signal_name(signum)} received, waiting for the ranks to stop (Ctrl-C kills them)")
    else:
        wait_for_end(ranks, signals, SETTLE_SECONDS)
    for rank in running(ranks):
        rank.stop_signals.append(signum)
    send(ranks, signum)
    send(ranks, signal.SIGCONT)  # a process that was halted hears nothing else
    default_grace = LONG_GRACE_SECONDS if isinstance(reason, int) and signum != signal.SIGINT else GRACE_SECONDS
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
        kill_group(rank.process.pid)
    deadline = time.monotonic() + KILL_SECONDS
    while (running(ranks) or any(kill_group(rank.process.pid, 0) for rank in ranks)) and time.monotonic() < deadline:
        time.sleep(0.005)


def cause_seconds(rank: Rank) -> float:
    """How long after a rank's failure another one may still turn out to be the cause, by ending."""
    return CAUSE_SECONDS if echo(rank) and not rank.report.get("standstill") else 0.0
