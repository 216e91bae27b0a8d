"""Start the ranks of one machine, watch them, stop them, and report which one failed first, in this order."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from learnerkit.endings import ExceptionReport, where
from learnerkit.launch.environment import Topology, rank_environment
from learnerkit.launch.events import OTHER_SIGNALS, LaunchEvents, SignalQueue
from learnerkit.launch.report import (
    Outcome,
    Rank,
    failure,
    first_failure,
    follows,
    log_errors,
    outcome_of,
    report,
    say,
    stopped_by,
)
from learnerkit.processes.heartbeat import Heartbeat
from learnerkit.processes.rank_main import kill_group
from learnerkit.text import signal_name

T = TypeVar("T")

PROGRAMS = Path(__file__).parent.with_name("processes")
RANK_MAIN, GUARD = PROGRAMS / "rank_main.py", PROGRAMS / "guard.py"

POLL_SECONDS = 0.02
CAUSE_SECONDS = 5.0  # after a failure that another rank may have caused: time for that one to end and say why
SETTLE_SECONDS = 0.3  # after a failure: time for the other ranks to fail by themselves and say why
GRACE_SECONDS = 5.0  # after a failure or Ctrl-C
LONG_GRACE_SECONDS = 30.0  # after SIGTERM and the like, which a script may answer by saving a checkpoint
KILL_SECONDS = 5.0  # the time for the kernel to remove the processes that were killed

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Interrupted(Exception):
    """A signal asked for the end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@dataclass(frozen=True)
class Job:
    """A script or module to run on this machine, in how many processes, on which GPUs, and where its output goes.

    Args:
        command: script.py args..., or -m module args...
        nproc: how many ranks.
        gpus: CUDA_VISIBLE_DEVICES for the ranks; `None`: as it is.
        grace: seconds in which ranks may stop by themselves before they are killed.
        unbuffered: as with `python -u`.
        timeout: seconds after which a rank that waits for others counts as stuck.
        log_dir: a folder for one file per rank and attempt.
        tee: show the output of all ranks line by line, each with the rank's number.
        reports: the script's first fit gives a scaling report, and ends the script.
        explains_failure: the ranks print why they end with exit code 1, so the launcher does not report it.
        quiet: print nothing about the run; its outcome says how it has ended.
        env: variables for the ranks, beside those of this process.
        folder: where the ranks run; `None`: here.
        events, heartbeat: the absolute paths of the files that tell other programs of the run; see `LaunchEvents`.
    """

    command: list[str]
    nproc: int
    gpus: str | None = None
    grace: float | None = None
    unbuffered: bool = False
    timeout: float | None = None
    log_dir: Path | None = None
    tee: bool = False
    explains_failure: bool = False
    reports: bool = False
    quiet: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    events: str | None = None
    heartbeat: str | None = None


class Attempt:
    """An attempt to run the job, by a launcher that is alone.

    The launcher binds the socket of the ranks' store and hands it to rank 0, so nobody can take the port in between.

    Args:
        topology: the ranks of this launcher among all.
        listener: the socket, in the launcher that starts rank 0.

    Attributes:
        ended_elsewhere: what has ended the attempt on another node, if anything has.
        may_have_lost_a_node: a node has given no sign of life for a while, but not for long enough to count as lost.
        asked: the last signal that has asked for the end while the ranks were being stopped; `None`: none has.
        events: where the launcher writes what happens, for other programs.
    """

    def __init__(self, topology: Topology, listener: socket.socket | None) -> None:
        self.topology, self.listener = topology, listener
        self.ended_elsewhere: Outcome | None = None
        self.may_have_lost_a_node = False
        self.asked: int | None = None
        self.events = LaunchEvents()

    def close_listener(self) -> None:
        """Close the socket, once rank 0 has it."""
        if self.listener is not None:
            self.listener.close()

    def agree_on_end(self, outcome: Outcome) -> Outcome:
        """Tell the other nodes how the attempt has ended here, and return how it has ended for all."""
        return outcome

    def let_others_go_on(self) -> None:
        """Tell the other nodes to go on without this one, if they can; otherwise its end is the end of all."""

    def stop(self) -> None:
        """End what runs in the background."""

    def leave(self) -> None:
        """Say that this node takes no part in further attempts."""
        self.close_listener()


def run_attempt(job: Job, attempt: Attempt, signals: SignalQueue) -> Outcome:
    """Run the job once, and return how it has ended for all nodes; no process of it is left on this one."""
    began, topology = time.monotonic(), attempt.topology
    ranks: list[Rank] = []
    signals = attempt.events.hearing(signals, ranks)
    output = Output(job.log_dir, topology, job.tee, job.quiet)
    with ExitStack() as guard:
        try:
            start(job, attempt, output, ranks)
            guard.enter_context(guarded(ranks))
            reason = watch(ranks, signals, attempt)
            if reason is None and (first := first_failure(ranks)):
                reason = attempt.agree_on_end(failure(first, topology))  # The others need not wait.
            if reason == signal.SIGTERM:  # as a scheduler sends it to the node that it takes away
                attempt.let_others_go_on()
            attempt.asked = stop(ranks, signals, reason, job.grace, job.quiet)
        finally:
            kill(ranks)
    attempt.asked = output.finish(signals) or attempt.asked
    reason = attempt.asked if reason is None else reason
    log_errors(ranks)
    if isinstance(reason, int):
        attempt.agree_on_end(outcome_of(ranks, reason, topology))
    elif reason is None and (signum := next(filter(None, map(stopped_by, ranks)), None)):
        # A single rank may have got a signal, and told the others.
        attempt.events.signal(signum)
        if not job.quiet:
            say(f"a rank got {signal_name(signum)}, and all have stopped")
        agreed = attempt.agree_on_end(outcome_of(ranks, signum, topology))
        reason = agreed if agreed.kind == "left" else signum
    elif reason is None:
        done = Outcome("done", topology.node, 0)
        reason = wait_interruptibly(lambda: attempt.agree_on_end(done), signals)
    explained = job.explains_failure and all(rank.code in (0, 1) and not rank.report.error for rank in ranks)
    if not (explained or job.quiet):
        report(ranks, reason, topology, began)
    return outcome_of(ranks, reason, topology)


# Start


class Output:
    """The output of the ranks of an attempt: it goes to the terminal as it is, to a file for each rank, or to both.

    Args:
        folder: for the files; `None`: no files.
        topology: which attempt, and which ranks.
        tee: to the terminal line by line, each with the rank's number.
        quiet: do not say where the files are.
    """

    def __init__(self, folder: Path | None, topology: Topology, tee: bool, quiet: bool = False) -> None:
        self.folder = folder and folder / f"attempt-{topology.attempt}"
        self.tee = tee
        self._threads: list[threading.Thread] = []
        self._terminal, self._ended = threading.Lock(), threading.Event()
        self._shown = 0.0  # when the last line was
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not tee and not quiet:
                say(f"output goes to {self.log(topology.first_rank if topology.nproc == 1 else '*')}")

    def log(self, number: int | str) -> Path | None:
        """Return the file of a rank, or for '*' the pattern of all files."""
        return self.folder and self.folder / f"rank-{number}.log"

    def start(self, number: int, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start the process of a rank with this output, in a new process group, to be ended with all that it starts."""
        log = self.log(number)
        # What an earlier run has written there stays. The process itself writes, whatever becomes of the terminal.
        with log.open("ab", buffering=0) if log else nullcontext() as file:
            before = file.tell() if file else 0
            stream: Any = subprocess.PIPE if self.tee and file is None else file
            options |= {"stdin": subprocess.DEVNULL, "stdout": stream, "stderr": stream and subprocess.STDOUT}
            process: subprocess.Popen[bytes] = subprocess.Popen(command, process_group=0, **options)
        if self.tee:
            lines: IO[bytes] = process.stdout or open(log, "rb")  # type: ignore[arg-type]  # noqa: SIM115
            if log is not None:
                lines.seek(before)
            self._threads.append(threading.Thread(target=self._show, args=(number, lines), daemon=True))
            self._threads[-1].start()
        return process

    def _show(self, number: int, lines: IO[bytes]) -> None:
        with lines:
            before = time.monotonic()
            for line in lines if self.folder is None else self._followed(lines):
                waited = time.monotonic() > before + POLL_SECONDS
                try:
                    with self._terminal:
                        write_all(sys.stdout.fileno(), f"[rank {number}] ".encode() + line.rstrip(b"\n") + b"\n")
                except OSError as e:
                    say(f"the output of the ranks is shown no more: {e.strerror}")
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                    return  # without a log, a rank that prints fails, as it does without `tee`
                before = time.monotonic()
                # A line that comes after the ranks have ended is of a process that they have left: nobody waits for it.
                if not (waited and self._ended.is_set()):
                    self._shown = before

    def _followed(self, file: IO[bytes]) -> Iterator[bytes]:
        """Yield the lines of a file that grows until the ranks have ended."""
        part, over = b"", False
        while not over:
            over = self._ended.is_set()
            while (part := part + file.readline()).endswith(b"\n"):
                yield part
                part = b""
            self._ended.wait(POLL_SECONDS)
        if part:
            yield part

    def finish(self, signals: SignalQueue) -> int | None:
        """Wait, once the ranks have ended, until all is shown; return the signal that has ended this, if one has.

        A process that has left its rank's group may keep a pipe open: it is waited for some seconds.
        """
        self._ended.set()
        self._shown = time.monotonic()
        while any(thread.is_alive() for thread in self._threads):
            for signum in signals(POLL_SECONDS):
                if signum in ENDING_SIGNALS:
                    return signum
            if not self._terminal.locked() and time.monotonic() > self._shown + KILL_SECONDS:
                break
        return None


def write_all(fd: int, text: bytes) -> None:
    """Write the whole text, also where another program has made the terminal or pipe return at once when it is full."""
    while text:
        try:
            text = text[os.write(fd, text) :]
        except BlockingIOError:
            select.select([], [fd], [])


def start(job: Job, attempt: Attempt, output: Output, ranks: list[Rank]) -> None:
    """Start the ranks, and add each to `ranks` as soon as it runs; rank 0 gets the socket of the store."""
    # The options of this interpreter, such as -O and -W error, are those of the ranks, as with multiprocessing.
    own = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    interpreter = [sys.executable, *own, *(["-u"] if job.unbuffered else [])]
    for number in range(job.nproc):
        rank_number = attempt.topology.first_rank + number
        report_file = tempfile.TemporaryFile()  # noqa: SIM115  (without a name: nothing is left to remove)
        heartbeat = Heartbeat.new()
        report_fd = report_file.fileno()
        store_fd = attempt.listener.fileno() if attempt.listener and number == 0 else None
        setup = {
            "launcher": os.getpid(), "heartbeat": heartbeat.path, "report_fd": report_fd, "store_fd": store_fd,
            "events": attempt.events.for_ranks(),
        }  # fmt: skip
        env = rank_environment({**os.environ, **job.env}, attempt.topology, number, job.gpus)
        env["LEARNERKIT_RANK_SETUP"] = json.dumps(setup)
        if job.timeout is not None:
            env["LEARNERKIT_TIMEOUT"] = str(job.timeout)
        if job.reports:
            env["LEARNERKIT_REPORT"] = "1"
        if job.log_dir is not None:
            env["LEARNERKIT_TRACEBACK"] = "full"  # The files have whole tracebacks; the launcher shows short ones.
        command = [*interpreter, str(RANK_MAIN), *job.command]
        shared = [fd for fd in (report_fd, store_fd) if fd is not None]
        process = output.start(rank_number, command, env=env, pass_fds=shared, cwd=job.folder)
        log = output.log(rank_number)
        ranks.append(Rank(rank_number, process, report_file, time.monotonic(), heartbeat=heartbeat, log=log))
    attempt.close_listener()


@contextmanager
def guarded(ranks: list[Rank]) -> Iterator[None]:
    """Have the guard kill what the ranks have started if this process is killed in the meantime; see guard.py."""
    command = [sys.executable, "-IS", str(GUARD), *(str(rank.process.pid) for rank in ranks)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, bufsize=0,
        start_new_session=True,
    ) as process:  # fmt: skip
        for rank in ranks:
            rank.guard = process.stdin
        try:
            yield
        finally:
            try:
                process.communicate(timeout=KILL_SECONDS)  # This closes its input, at which it ends.
            except subprocess.TimeoutExpired:  # somebody has halted it
                process.kill()


# Watch


@contextmanager
def received_signals() -> Iterator[SignalQueue]:
    """Collect the signals sent to the launcher; yield a function that waits some seconds for the next ones.

    A rank that ends sends SIGCHLD, which ends such a wait at once.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    # A signal that was ignored when the launcher started, such as SIGHUP under nohup, stays ignored here and in the
    # ranks. SIGCHLD must not, or exit codes would be lost.
    # A SLURM batch script sends URG, of which no process dies, when it means TERM for the launchers alone.
    wanted = (*ENDING_SIGNALS, *OTHER_SIGNALS, signal.SIGURG)
    handled = [s for s in wanted if signal.getsignal(s) is not signal.SIG_IGN]
    old_descriptor = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    old_handlers = {s: signal.signal(s, lambda *_: None) for s in (*handled, signal.SIGCHLD)}

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


def wait_interruptibly(wait: Callable[[], T], signals: SignalQueue) -> T:
    """Wait for other nodes in a thread, and look for signals meanwhile.

    Raises:
        Interrupted: a signal asks for the end.
    """
    results: list[T | Exception] = []

    def work() -> None:
        try:
            results.append(wait())
        except Exception as error:
            results.append(error)

    threading.Thread(target=work, daemon=True).start()
    while not results:
        for signum in signals(POLL_SECONDS):
            if signum in ENDING_SIGNALS:
                raise Interrupted(signum)
    result = results[0]
    if isinstance(result, Exception):
        raise result
    return result


def watch(ranks: list[Rank], signals: SignalQueue, attempt: Attempt) -> int | Outcome | None:
    """Wait until all ranks have ended or one has failed, or return what else ends the attempt: a signal, another node.

    If another rank may have caused a failure, that one gets time to end by itself, and its node time to tell of it.
    """
    while True:
        some_run, first = running(ranks), first_failure(ranks)
        if not some_run and (first is None or attempt.topology.nodes == 1):
            return None
        if first:
            patience = CAUSE_SECONDS if follows(first) and not first.report.ending.standstill else 0.0
            cause_may_come = follows(first) and attempt.may_have_lost_a_node
            if time.monotonic() >= first.ended + patience and not cause_may_come:
                return None
        for signum in signals(POLL_SECONDS):
            if signum in ENDING_SIGNALS:
                return signum
            send_signal(ranks, signum)
        if attempt.ended_elsewhere:
            return attempt.ended_elsewhere


def running(ranks: list[Rank]) -> list[Rank]:
    """Return the ranks that still run, and record the end of those that have ended since the last call."""
    for rank in ranks:
        now = time.monotonic()
        if rank.code is None and rank.process.poll() is None:
            rank.ended = now
        elif rank.code is None:
            record_end(rank)
    return [rank for rank in ranks if rank.code is None]


def record_end(rank: Rank) -> None:
    """Record how and where a rank ended, and kill what it left running (loader workers, other programs).

    A rank that was killed wrote no report. It counts as ended when it was last seen alive, so that the error
    which its end caused in another rank comes after it.
    """
    kill_group(rank.process.pid)
    if rank.guard is not None:
        with suppress(OSError):  # somebody has killed the guard
            rank.guard.write(b"%d\n" % rank.process.pid)
    with rank.report_file as file:
        file.seek(0)
        with suppress(ValueError):  # it was killed
            rank.report = ExceptionReport.from_json(file.read())
    told = rank.report
    if rank.heartbeat is not None:
        facts = vars(told.ending) if told.ending.rank >= 0 else rank.heartbeat.read()
        rank.location = where(facts) if facts["event"] else ""
        rank.heartbeat.close()
    rank.code = rank.process.returncode if told.code is None else told.code
    rank.ended = rank.ended if told.time is None else told.time


def send_signal(ranks: list[Rank], signum: int) -> None:
    """Send a signal to the ranks, but not to their loader workers, which they may need in order to save."""
    for rank in running(ranks):
        rank.process.send_signal(signum)


# Stop


def stop(
    ranks: list[Rank], signals: SignalQueue, reason: int | Outcome | None, grace: float | None, quiet: bool = False
) -> int | None:
    """Ask the ranks that still run to end, by the signal that was received or else SIGTERM, and give them some time.

    Returns:
        The last signal that has asked for the end in this time; `None`: none has.
    """
    signum, default_grace, asked = signal.SIGTERM, GRACE_SECONDS, None
    if isinstance(reason, int):
        signum = signal.Signals(reason)
        default_grace = GRACE_SECONDS if signum == signal.SIGINT else LONG_GRACE_SECONDS
        if not quiet:
            say(f"{signum.name} received, waiting for the ranks to stop (Ctrl-C kills them)")
    else:
        if isinstance(reason, Outcome) and reason.kind == "left":  # The ranks of all nodes save together.
            default_grace = LONG_GRACE_SECONDS
        asked = wait_for_end(ranks, signals, SETTLE_SECONDS)
    for rank in running(ranks):
        rank.stop_signals.append(signum)
    send_signal(ranks, signum)
    send_signal(ranks, signal.SIGCONT)  # a process that was halted handles no other signal
    return wait_for_end(ranks, signals, default_grace if grace is None else grace) or asked


def wait_for_end(ranks: list[Rank], signals: SignalQueue, seconds: float) -> int | None:
    """Wait until no rank runs, at most `seconds`; Ctrl-C ends the wait, other signals are passed on.

    Returns:
        The last signal that has asked for the end; `None`: none has.
    """
    deadline, asked = time.monotonic() + seconds, None
    while running(ranks) and time.monotonic() < deadline:
        for signum in signals(POLL_SECONDS):
            if signum == signal.SIGINT:
                return signum
            asked = signum if signum in ENDING_SIGNALS else asked
            send_signal(ranks, signum)
    return asked


def kill(ranks: list[Rank]) -> None:
    """Kill the ranks that still run, and return when nothing of the run is left."""
    for rank in running(ranks):
        rank.stop_signals.append(signal.SIGKILL)
        kill_group(rank.process.pid)
    deadline = time.monotonic() + KILL_SECONDS
    while (running(ranks) or any(is_left(rank.process.pid) for rank in ranks)) and time.monotonic() < deadline:
        time.sleep(0.005)


def is_left(group: int) -> bool:
    """Tell whether anything is left of the group of a rank that has ended.

    In a container this may be the first process: the processes whose parent has ended become its children, and stay
    until it waits for them.
    """
    with suppress(ChildProcessError):  # It has no child in this group.
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    return kill_group(group, 0)
