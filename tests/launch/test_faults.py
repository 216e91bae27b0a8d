"""The scorecard of faults, R01 to R40 (the rows that concern launching), each with its criterion and its time limit.

Every run must also be over in time, and no process of it may be alive 5 seconds after its launcher.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest
from helpers import ROOT
from launching import SCRIPTS, environment, in_time, without_chatter

LIMIT = 400  # seconds for a run that has no shorter limit of its own
EVIL = "\n\x1b[2Jlearnerkit.launch: rank 0 forged this"


class Run:
    """A command in a folder of its own; a mark in the environment tells what it has started."""

    def __init__(self, folder: Path, *command: object, **env: object):
        folder.mkdir(parents=True)
        self.folder, self.mark = folder, uuid.uuid4().hex
        mine = environment() | {"FAULT_TEST": self.mark} | {name: str(value) for name, value in env.items()}
        with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, command)], cwd=folder, env=mine, stdout=out, stderr=err, process_group=0
            )
        self.ended = 0.0

    def __repr__(self):
        return f"--- stdout\n{self.out}\n--- stderr\n{self.err}"

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def says(self) -> list[str]:
        """The launcher's messages, with their further lines."""
        return re.findall(r"^learnerkit\.launch: .*(?:\n  .*)*", self.err, re.MULTILINE)

    def wait_for(self, name: str, limit: float = LIMIT) -> None:
        """Wait until the run has left a file."""
        end = time.monotonic() + limit
        while not (self.folder / name).exists():
            assert self.process.poll() is None, self
            assert time.monotonic() < end, self
            time.sleep(0.01)

    def finish(self, limit: float = LIMIT) -> int:
        """Wait for the end, see that nothing is left, and return the exit code."""
        try:
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not over after {limit} s\n{self}") from None
        self.ended = time.monotonic()
        assert self.orphans(5) == [], self
        return code

    @property
    def after(self) -> float:
        """Seconds from the (last) fault to the end."""
        return self.ended - float((self.folder / "fault").read_text())

    def orphans(self, seconds: float) -> list[psutil.Process]:
        """What is still alive of the run after so many seconds."""
        end = time.monotonic() + seconds
        while (left := self.alive()) and time.monotonic() < end:
            time.sleep(0.05)
        return left

    def alive(self) -> list[psutil.Process]:
        """The living processes of the run."""
        return marked(self.mark)

    def digests(self, opt: str) -> list[str]:
        """What each rank has come to."""
        return [(self.folder / f"digest-{opt}-{rank}").read_text() for rank in range(2)]

    def files(self, pattern: str) -> list[str]:
        """The names of files that it has left."""
        return sorted(path.name for path in self.folder.glob(pattern))


def marked(*marks: str) -> list[psutil.Process]:
    """The living processes with one of these marks."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("FAULT_TEST") in marks:
                found.append(process)
        except psutil.Error:
            pass
    return found


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Start runs; what they leave running does not outlive this file."""
    runs = []

    def start(*command: object, **env: object) -> Run:
        runs.append(Run(tmp_path_factory.mktemp("run") / "here", *command, **env))
        return runs[-1]

    yield start
    for process in marked(*(run.mark for run in runs)):
        process.kill()
    for run in runs:
        run.process.wait()


@pytest.fixture(scope="module")
def faulty(launch):
    """Start the reference run on two ranks: launcher's options, the script's after '--', and the faults."""

    def start(*options: object, fault: str = "none:0:0") -> Run:
        cut = options.index("--") if "--" in options else len(options)
        script = [SCRIPTS / "faulty.py", *options[cut + 1 :]]
        return launch("-m", "learnerkit.launch", "--nproc", 2, *options[:cut], *script, FAULT=fault)

    return start


@pytest.fixture(scope="module")
def uninterrupted(faulty):
    """The digests of a run that nothing happens to, for each optimizer."""
    run = faulty("--", "--opt", "sgd", "adamw")
    assert run.finish() == 0, run
    found = {opt: run.digests(opt) for opt in ("sgd", "adamw")}
    assert len({digest for digests in found.values() for digest in digests}) == 4  # each rank has streams of its own
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


# Restarts


@pytest.mark.soak  # tests/checkpoints has the same with checkpoints
def test_r01_r02_kill9_restart(faulty, uninterrupted):
    """Rank 1 is killed, then rank 0, which writes the files and hosts the store; also with a port that was chosen."""
    faults = "kill:1:37,kill:0:62"
    run = faulty("--max-restarts", 2, "--master-port", free_port(), "--", "--opt", "adamw", fault=faults)
    assert run.finish() == 0, run
    assert run.files("rank-*") == ["rank-0-0", "rank-0-1", "rank-1-0", "rank-1-1", "rank-2-0", "rank-2-1"]
    assert run.digests("adamw") == uninterrupted["adamw"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("rank", "opt", "times"), [(1, "sgd", 20), (0, "sgd", 3), (1, "adamw", 3)])
def test_r01_r02_kill9_restart_every_time(faulty, uninterrupted, rank, opt, times):
    for _ in range(times):
        run = faulty("--max-restarts", 1, "--", "--opt", opt, fault=f"kill:{rank}:37")
        assert run.finish() == 0, run
        assert run.digests(opt) == uninterrupted[opt]


@pytest.mark.soak
def test_r03_kill9_no_restart(faulty):
    run = faulty(fault="kill:1:37")
    assert run.finish() == 137, run
    assert in_time(run.after, 10)
    assert run.says[0].startswith("learnerkit.launch: rank 1 was killed by signal 9 (SIGKILL)"), run
    assert "(epoch 3, step 7)" in run.says[0]  # of 10 steps each
    assert "attempt" not in run.err


def test_r04_restart_budget(launch):
    run = launch(
        "-m", "learnerkit.launch", "--nproc", 2, "--max-restarts", 2, "--log-dir", "logs",
        SCRIPTS / "launch_end.py", "killed",
    )  # fmt: skip
    assert run.finish() == 137, run
    assert run.says.count("learnerkit.launch: attempt 2 of 3") == 1, run
    assert run.says.count("learnerkit.launch: attempt 3 of 3") == 1
    assert sum("rank 1 was killed by signal 9" in line for line in run.says) == 3
    assert run.files("logs/*") == ["attempt-0", "attempt-1", "attempt-2"]
    assert run.files("logs/attempt-2/*") == ["rank-0.log", "rank-1.log"]


@pytest.mark.soak
def test_r04_restart_budget_of_a_training(faulty):
    run = faulty("--max-restarts", 2, fault="kill:1:37,kill:0:37,kill:1:37,none:0:0")
    assert run.finish() == 137, run
    assert run.files("rank-*-1") == ["rank-0-1", "rank-1-1", "rank-2-1"]


# Failures


@pytest.fixture(scope="module")
def raised(faulty):
    """A run in which rank 1 raises; the exception's text and a metric's name would like to forge lines."""
    options = ("--log-dir", "logs", "--tee", "--", "--metric", f"error{EVIL}", "--message", f"a bad sample{EVIL}")
    run = faulty(*options, fault="raise:1:37")
    run.code = run.finish()
    return run


@pytest.mark.soak
def test_r07_exc_one_rank(raised):
    assert raised.code == 1, raised
    assert in_time(raised.after, 10)
    assert raised.err.startswith("learnerkit.launch: rank 1 failed (exit code 1) in before_batch of Faults"), raised
    first, second = raised.says
    head, traceback, *lines = map(str.strip, first.splitlines())
    assert "(epoch 3, step 7)" in head
    assert traceback == "Traceback (most recent call last):"
    assert any(line.startswith(f'File "{SCRIPTS / "faulty.py"}", line ') for line in lines)
    assert "ValueError: a bad sample" in lines
    assert "gloo" not in first
    loop = f'File "{ROOT / "learnerkit" / "learner.py"}", line '  # between the script's call and its callback
    assert loop not in first
    assert loop in (raised.folder / "logs" / "attempt-0" / "rank-1.log").read_text()
    assert second.startswith("learnerkit.launch: rank 0 then failed: PeerError: rank 1 failed"), raised


@pytest.mark.soak
def test_r40_log_escape(raised):
    logs = {path.name: without_chatter(path.read_text()) for path in (raised.folder / "logs" / "attempt-0").iterdir()}
    assert sorted(logs) == ["rank-0.log", "rank-1.log"]
    for text in (*logs.values(), raised.out, raised.err):
        assert "\x1b" not in text, raised
        assert not re.search(r"^(\[rank \d\] )?learnerkit.launch: rank 0 forged", text, re.MULTILINE), raised
    _, header, *rows = logs["rank-0.log"].splitlines()[:5]  # the first says what a step sees
    assert header.split()[:3] == ["epoch", "train_loss", "valid_loss"]
    assert [row.split()[0] for row in rows] == ["0", "1", "2"]
    assert "ValueError: a bad sample" in logs["rank-1.log"]
    assert all(line.startswith("[rank ") for line in raised.out.splitlines())


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "code", "how"),
    [("exit3", 3, "exit code 3"), pytest.param("segv", 139, "signal 11", marks=pytest.mark.soak)],
)
def test_r08_exit_code(faulty, kind, code, how):
    run = faulty(fault=f"{kind}:1:37")
    assert run.finish() == code, run
    assert run.says[0].startswith("learnerkit.launch: rank 1 "), run
    assert how in run.says[0]


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["exit0", pytest.param("quit", marks=pytest.mark.soak)])
def test_r09_early_exit0(faulty, kind):
    run = faulty(fault=f"{kind}:1:37")
    assert run.finish() not in (0, None), run
    assert re.search(r"rank 1 (failed|left|ended) .*\(epoch 3, step 7\)", run.says[0]), run


@pytest.mark.slow
def test_r10_hang(faulty):
    run = faulty("--timeout", 8, fault="stop:1:20")
    assert run.finish() == 1, run
    assert in_time(run.after, 20)
    assert "not arrived: rank 1" in run.err, run
    assert "rank 1 came to a standstill in before_batch of Faults (epoch 2, step 0): it is silent" in run.err
    assert run.says[0].startswith("learnerkit.launch: rank 0 failed (exit code 1), following another rank,"), run
    assert run.says[1].startswith("learnerkit.launch: rank 1 "), run


@pytest.mark.soak
def test_r11_straggler(faulty, uninterrupted):
    run = faulty("--timeout", 8, fault="slow:1:20")  # together for longer than that
    assert (run.finish(), run.err) == (0, ""), run
    assert run.digests("sgd") == uninterrupted["sgd"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        pytest.param("raise", r"ValueError: a bad sample", id="raise", marks=pytest.mark.soak),
        pytest.param("kill", r"(?i)loader worker\b.* signal 9", id="kill"),
    ],
)
def test_r36_loader(faulty, kind, message):
    run = faulty("--", "--workers", 1, fault=f"loader-{kind}:1:37")
    assert run.finish() == 1, run
    assert in_time(run.after, 10)
    first, second = run.says
    assert first.startswith("learnerkit.launch: rank 1 failed (exit code 1)"), run
    assert re.search(message, first), run
    assert "in DataLoader worker process" not in second  # but what was wrong
    assert "gloo" not in first


# Signals


@pytest.mark.soak
def test_r13_term_launcher(faulty):
    run = faulty("--", "--handle", fault="wait:1:37")
    run.wait_for("fault")
    run.process.terminate()
    assert run.finish() == 143, run
    assert in_time(run.after, 10)
    assert run.files("term-*") in (["term-37.pth"], ["term-38.pth"]), run
    assert run.says == ["learnerkit.launch: SIGTERM received, waiting for the ranks to stop (Ctrl-C kills them)"]


@pytest.mark.soak
def test_r17_usr1(faulty, uninterrupted):
    run = faulty("--", "--handle", fault="wait:1:37")
    run.wait_for("fault")
    run.process.send_signal(signal.SIGUSR1)
    assert (run.finish(), run.err) == (0, ""), run
    assert len(run.files("usr1-*")) == 1, run
    assert run.digests("sgd") == uninterrupted["sgd"]


@pytest.mark.soak
@pytest.mark.usefixtures("ctrl_c")  # where SIGINT is ignored, the processes of the test would ignore it, too
def test_r16_int(faulty):
    run = faulty(fault="wait:1:37")
    run.wait_for("fault")
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.finish() == 130, run
    assert in_time(run.after, 10)
    assert "Traceback" not in run.err


@pytest.mark.soak
@pytest.mark.usefixtures("ctrl_c")
def test_r16_int_twice(faulty):
    run = faulty(fault="sleep:1:37")  # which does not let the others leave together
    run.wait_for("fault")
    os.killpg(run.process.pid, signal.SIGINT)
    time.sleep(1)
    assert run.process.poll() is None, run
    again = time.monotonic()
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.finish() == 130, run
    assert in_time(run.ended - again, 2)
    assert "Traceback" not in run.err


# What the machine sees of a run


@pytest.fixture(scope="module")
def looked_at(faulty):
    """A run with loader workers: where it listens in the middle, and who is left 5 s after its launcher is killed."""
    run = faulty("--", "--workers", 1, fault="sleep:1:37")
    run.wait_for("fault")
    family = run.alive()
    run.sockets = [
        connection for process in family for connection in process.net_connections("inet") if connection.laddr
    ]
    run.open_ports = [
        (host, each.laddr.port)
        for each in run.sockets
        for host in other_addresses()
        if each.status == psutil.CONN_LISTEN and answers(host, each.laddr.port)
    ]
    run.family = len(family)
    run.process.kill()
    run.process.wait()
    run.left = run.orphans(5)
    return run


def other_addresses() -> list[str]:
    """The addresses of this machine that others can reach."""
    found = [address for addresses in psutil.net_if_addrs().values() for address in addresses]
    return [a.address for a in found if a.family == socket.AF_INET and not a.address.startswith("127.")]


def answers(host: str, port: int) -> bool:
    """Whether something accepts connections there."""
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False


@pytest.mark.slow
def test_r32_listen(looked_at):
    own = {ip_address(s.laddr.ip) for s in looked_at.sockets}
    assert [ip for ip in own if not (getattr(ip, "ipv4_mapped", None) or ip).is_loopback] == []
    assert sum(s.status == psutil.CONN_LISTEN for s in looked_at.sockets) >= 3  # the store, and gloo on each rank
    assert looked_at.open_ports == []


@pytest.mark.soak
def test_r18_launcher_kill9(looked_at):
    assert looked_at.family >= 5  # the launcher, two ranks, a loader worker of each
    assert looked_at.left == []


# Ports and variables


@pytest.mark.soak
def test_r20_port_busy(launch):
    """A port that was asked for and is taken is refused; that 29500 is taken does not matter where none was."""
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        began = time.monotonic()
        run = launch(
            "-m", "learnerkit.launch", "--nproc", 2, "--master-port", port, SCRIPTS / "launch_wait.py", "brief"
        )
        assert run.finish() == 2, run
        assert in_time(run.ended - began, 5)
    assert (run.out, run.err.count("\n")) == ("", 1), run
    assert str(port) in run.err
    try:
        taken = socket.create_server(("127.0.0.1", 29500))
    except OSError:  # by somebody else
        taken = socket.socket()
    with taken:
        run = launch("-m", "learnerkit.launch", "--nproc", 2, SCRIPTS / "launch_group.py", MASTER_PORT=29500)
        assert run.finish() == 0, run


WHOLE = f"import runpy; runpy.run_path(r'{SCRIPTS / 'faulty.py'}', {{}}, '__main__')"


@pytest.mark.slow
@pytest.mark.parametrize("agent_store", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "program",
    [
        "from learnerkit.distributed import meeting; meeting.JOIN_SECONDS = 2; meeting.join()",
        pytest.param(WHOLE, marks=pytest.mark.soak),
    ],
    ids=["short", "whole"],
)
def test_r21_stale_env(launch, program, agent_store):
    """Plain Python among the variables of a launcher that has gone: all of a training, or the first meeting alone."""
    stale = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    run = launch("-c", program, **stale, **({"TORCHELASTIC_USE_AGENT_STORE": "True"} if agent_store else {}))
    assert run.finish() == 1, run
    last = run.err.splitlines()[-1]
    for name in ("RANK", "WORLD_SIZE=2", "MASTER_ADDR", "MASTER_PORT"):
        assert name in last, run


# Data


@pytest.mark.soak
def test_r33_tiny_dataset(launch):
    run = launch("-m", "learnerkit.launch", "--nproc", 2, SCRIPTS / "fault_tiny.py")
    assert run.finish() == 0, run
    trials = list(map(json.loads, re.findall(r"\{.*\}", run.out)))  # torch 2.10's gloo writes among them
    assert len(trials) == 8
    for trial in trials:
        assert in_time(trial["told after"], 5), trial
        if trial["bs"] == 4 and trial["drop_last"]:
            assert "the training loader is empty" in trial["error"], trial
            continue
        assert (trial["error"], trial["counted"], trial["exact"]) == ("", 1, True), trial
        if trial["rank"] == "0":
            assert any("sample" in warning and "rank" in warning for warning in trial["warnings"]), trial
