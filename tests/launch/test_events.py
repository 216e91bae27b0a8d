"""The files by which other programs follow a launch."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest
from launching import SCRIPTS, environment, hearing_ctrl_c

from learnerkit.launch import cli
from learnerkit.launch.environment import Topology
from learnerkit.launch.events import LaunchEvents
from learnerkit.launch.report import Outcome, Rank, failure
from learnerkit.processes.heartbeat import Heartbeat

LIMIT = 200  # seconds for any one step of a test
OFTEN = "import sys; from learnerkit.launch import cli, events; events.EVERY = 0.1; sys.exit(cli.main())"
ALWAYS = {"time", "event", "node", "attempt"}
FIELDS = {
    "started": {"version", "pid", "command", "world_size", "nproc", "nodes"},
    "step": {"rank", "phase", "epoch", "batch", "idle"},
    "saved": {"path", "fit", "epoch", "step"},
    "signal": {"name", "ends"},
    "failed": {"rank", "code", "cause", "place"},
    "ended": {"code", "seconds"},
}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def short(line):
    """Return a line without what is the same for all, or differs from run to run."""
    return {name: value for name, value in line.items() if name not in {"time", "node", "pid", "seconds"}}


@pytest.fixture
def files(tmp_path):
    return tmp_path / "events.jsonl", tmp_path / "heartbeat"


@pytest.fixture
def beating():
    """Make ranks that have begun a pass, and moved some seconds ago; without seconds they have not begun one."""
    made = []

    def rank(number, ago=None):
        heartbeat = Heartbeat.new()
        made.append(heartbeat)
        if ago is not None:
            heartbeat.phase(1 + number % 2)
            heartbeat.beat(time.monotonic() - ago, 3, 10 + number, b"before_batch/Slow")
        return Rank(number, None, None, 0.0, heartbeat=heartbeat)

    yield rank
    for heartbeat in made:
        heartbeat.close()


def look(events, *ranks):
    """Wait for a signal that does not come."""
    events.hearing(lambda seconds: [], ranks)(0.0)


# Without processes


def test_the_rank_that_has_not_moved_for_the_longest_time_is_written(files, beating):
    look(LaunchEvents(*map(str, files)), beating(0), beating(1, ago=50), beating(2, ago=500), beating(3, ago=5))
    (line,) = lines(files[0])
    assert line.pop("idle") == pytest.approx(500, abs=60)
    assert short(line) == {
        "event": "step", "attempt": 0, "rank": 2, "phase": "evaluation", "epoch": 3, "batch": 12
    }  # fmt: skip
    assert time.time() - files[1].stat().st_mtime == pytest.approx(500, abs=60)
    assert files[1].read_text() == files[0].read_text()


def test_ranks_of_which_none_reads_data_count_as_alive(files, beating):
    ended = beating(1, ago=500)
    ended.code = 0
    look(LaunchEvents(*map(str, files)), beating(0), ended)
    assert not files[0].exists()
    assert time.time() - files[1].stat().st_mtime < 60
    assert files[1].read_text() == ""


def test_the_ranks_are_looked_at_in_intervals_and_once_when_an_attempt_begins(files, beating):
    events = LaunchEvents(*map(str, files))
    for _ in range(3):
        look(events, beating(0, ago=1))
    events.started(Topology(2, 1, node=1, nodes=2, world_size=4, attempt=5), ["train.py"])
    look(events, beating(0, ago=1))
    assert [line["event"] for line in lines(files[0])] == ["step", "started", "step"]
    assert [(line["node"], line["attempt"]) for line in lines(files[0])] == [(None, 0), (1, 5), (1, 5)]


def test_each_signal_is_written_with_what_it_asks_for(files):
    events = LaunchEvents(str(files[0]))
    signals = [signal.SIGUSR1, signal.SIGTERM]
    assert events.hearing(lambda seconds: signals)(0.0) == signals
    assert [(line["name"], line["ends"]) for line in lines(files[0])] == [("SIGUSR1", False), ("SIGTERM", True)]


def test_a_failure_is_written_in_one_printable_line_and_no_other_end_is(files):
    events = LaunchEvents(str(files[0]))
    killed = Rank(7, None, None, 0.0, code=-9, location="before_batch of Slow (epoch 0, step 3)")
    for outcome in (
        failure(killed, Topology(8, 1)),
        Outcome("lost", 1, text="node 1 gives no sign\x1b[2J\nof life"),
        *(Outcome(kind) for kind in ("done", "stopped", "joined")),
    ):
        events.outcome(outcome)
    assert list(map(short, lines(files[0]))) == [
        {
            "event": "failed", "attempt": 0, "rank": 7, "code": 137, "place": killed.location,
            "cause": "was killed by signal 9 (SIGKILL), as the kernel does when memory runs out (see dmesg)",
        },
        {
            "event": "failed", "attempt": 0, "rank": None, "code": 1, "place": "",
            "cause": r"node 1 gives no sign\x1b[2J\nof life",
        },
    ]  # fmt: skip


def test_files_that_are_not_wanted_are_not_written_and_the_ranks_are_not_told(tmp_path, monkeypatch, beating):
    monkeypatch.chdir(tmp_path)
    look(events := LaunchEvents(), beating(0, ago=1))
    assert events.for_ranks() is None
    assert events.ended(3) == 3
    assert list(tmp_path.iterdir()) == []
    only = LaunchEvents(heartbeat="beats")
    look(only, beating(0, ago=1))
    assert only.for_ranks() == {"path": None, "node": None, "attempt": 0}
    assert [path.name for path in tmp_path.iterdir()] == ["beats"]


def test_a_heartbeat_file_that_cannot_be_written_is_told_once(tmp_path, capsys):
    events = LaunchEvents(heartbeat=str(tmp_path / "gone" / "heartbeat"))
    for _ in range(2):
        events._due = 0.0
        look(events)
    assert capsys.readouterr().err.count("learnerkit.launch: ") == 1


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for option in ("--events", "--heartbeat"):
        with pytest.raises(SystemExit) as left:
            cli.parse([option, str(tmp_path), __file__])
        assert left.value.code == 2
        assert f"error: {option} {tmp_path}: it is not a regular file" in capsys.readouterr().err


def test_a_job_file_gets_both_options(capsys):
    job = ["--write-job", "slurm", "--job-file", "-"]
    assert cli.main([*job, "--events", "a", "--heartbeat", "b", __file__]) == 0
    assert "-m learnerkit.launch --events a --heartbeat b" in capsys.readouterr().out


# With processes


class Launch:
    """A launcher with two ranks that looks at them ten times a second."""

    def __init__(self, folder: Path, *arguments: object, **env: str):
        self.events, self.heartbeat = folder / "events.jsonl", folder / "heartbeat"
        self.folder = folder
        options = ("--nproc", "2", "--events", "events.jsonl", "--heartbeat", "heartbeat")
        with hearing_ctrl_c():
            self.process = subprocess.Popen(
                [sys.executable, "-c", OFTEN, *options, *map(str, arguments)],
                cwd=folder, env=environment() | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip

    def wait_for(self, event: str, times: int = 1, **facts: object) -> None:
        """Wait until so many lines of this event have these facts."""
        end = time.monotonic() + LIMIT
        while sum({"event": event, **facts}.items() <= flat(line).items() for line in self.lines()) < times:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < end, self.lines()
            time.sleep(0.05)

    def lines(self) -> list[dict]:
        """Return the lines so far."""
        return lines(self.events) if self.events.exists() else []

    def touched(self) -> float:
        """Return the time of the heartbeat file."""
        return self.heartbeat.stat().st_mtime

    def finish(self) -> int:
        """Wait for the end, and return the exit code."""
        self.printed = self.process.communicate(timeout=LIMIT)[0]
        return self.process.returncode


def flat(line):
    return {name: value for name, value in line.items() if not isinstance(value, list)}


@pytest.fixture
def launched(tmp_path):
    """Start launchers, which do not outlive the test."""
    runs = []

    def start(*arguments, **env):
        runs.append(Launch(tmp_path, *arguments, **env))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.communicate()


@pytest.mark.soak
@pytest.mark.timeout(1000)
def test_a_training_is_followed_through_signals_a_failure_and_a_restart(launched):
    run = launched("--max-restarts", 1, SCRIPTS / "launch_follow.py")
    run.wait_for("step", phase="training", epoch=1)
    run.wait_for("step", phase="evaluation")

    # A rank that is halted holds up all, and the time of the heartbeat file stands still.
    halted = int((run.folder / "pid-1").read_text())
    os.kill(halted, signal.SIGSTOP)
    time.sleep(1)
    before, n_lines = run.touched(), len(run.lines())
    time.sleep(2)
    assert run.touched() == pytest.approx(before, abs=0.01)
    assert run.lines()[-1]["idle"] > 1.5
    assert len(run.lines()) > n_lines
    os.kill(halted, signal.SIGCONT)
    end = time.monotonic() + LIMIT
    while run.touched() < before + 1:
        assert time.monotonic() < end
        time.sleep(0.05)

    run.process.send_signal(signal.SIGUSR1)
    run.wait_for("saved", attempt=0)
    (run.folder / "fail").touch()
    run.wait_for("step", attempt=1)
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 143, run.printed

    found = run.lines()
    assert all(line.keys() == ALWAYS | FIELDS[line["event"]] for line in found)
    assert {line["node"] for line in found} == {0}
    times = [datetime.fromisoformat(line["time"]) for line in found if line["event"] != "saved"]
    assert times == sorted(times)
    started = {"event": "started", "version": 1, "command": [str(SCRIPTS / "launch_follow.py")]}
    started |= {"world_size": 2, "nproc": 2, "nodes": 1}
    others = [short(line) for line in found if line["event"] != "step"]
    saved = [line for line in others if line["event"] == "saved"]
    assert [line for line in others if line["event"] != "saved"] == [
        started | {"attempt": 0},
        {"event": "signal", "attempt": 0, "name": "SIGUSR1", "ends": False},
        {
            "event": "failed", "attempt": 0, "rank": 1, "code": 1, "cause": r"OSError: the disk is gone\x1b[2J",
            "place": failed_in(others),
        },
        started | {"attempt": 1},
        {"event": "signal", "attempt": 1, "name": "SIGTERM", "ends": True},
        {"event": "ended", "attempt": 1, "code": 143},
    ]  # fmt: skip
    assert [line["attempt"] for line in saved] == [0, 1]
    assert saved[0]["step"] < saved[1]["step"]
    for line in saved:
        path = Path(line["path"])
        assert path.parent == run.folder / "runs"
        assert path.name.startswith(f"fit0-epoch{line['epoch']}-step{line['step']}")
    assert (Path(saved[-1]["path"]) / "manifest.json").exists()
    assert not run.printed.count("cannot be written")


def failed_in(others):
    """Return the place of the failure, which must be in the callback that fails."""
    (place,) = (line["place"] for line in others if line["event"] == "failed")
    assert place.startswith("before_batch of Slowly (epoch ")
    return place


def test_a_script_that_does_not_train_has_no_steps(launched):
    run = launched("--max-restarts", 1, SCRIPTS / "launch_end.py", "killed")
    assert run.finish() == 137, run.printed
    found = run.lines()
    assert [line["event"] for line in found] == ["started", "failed", "started", "failed", "ended"]
    assert [line["attempt"] for line in found] == [0, 0, 1, 1, 1]
    assert [(line["rank"], line["code"]) for line in found if line["event"] == "failed"] == [(1, 137)] * 2
    assert found[1]["cause"].startswith("was killed by signal 9 (SIGKILL)")
    assert found[-1]["code"] == 137
    assert time.time() - run.touched() < LIMIT
