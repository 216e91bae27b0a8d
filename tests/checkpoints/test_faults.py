"""Runs on several processes that are killed, stopped or told to save, and go on: rows of the scorecard of faults."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import psutil
import pytest
from checkpoint_files import spoil
from launching import SCRIPTS, environment, in_time, without_chatter

from learnerkit.checkpoints.storage import Storage

LIMIT = 300


class Run:
    """A run of `checkpoint_run.py` by the launcher, in a folder of its own."""

    def __init__(self, folder, *args, fault="", nproc=2, restarts=0):
        folder.mkdir(exist_ok=True, parents=True)
        self.folder = folder
        command = [sys.executable, "-m", "learnerkit.launch", "--nproc", nproc, "--max-restarts", restarts]
        env = environment() | ({"FAULT": fault} if fault else {})
        with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
            self.process = subprocess.Popen(
                [*map(str, command), str(SCRIPTS / "checkpoint_run.py"), *args],
                cwd=folder, env=env, stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip

    def __repr__(self):
        return f"{self.read('out')}\n--- stderr\n{without_chatter(self.read('err'))}"

    def read(self, name):
        return (self.folder / name).read_text()

    def wait_for(self, *names):
        end = time.monotonic() + LIMIT
        while not all((self.folder / name).exists() for name in names):
            assert self.process.poll() is None, self
            assert time.monotonic() < end, self
            time.sleep(0.01)

    def send(self, signum, *ranks):
        """Send a signal to the launcher, or to some ranks."""
        children = psutil.Process(self.process.pid).children()
        for process in [c for c in children if int(c.environ().get("RANK", -1)) in ranks] or [self.process]:
            process.send_signal(signum)

    def finish(self, code=0):
        try:
            found = self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"not over after {LIMIT} s\n{self}") from None
        assert found == code, self
        return self

    def ends(self, n=2):
        """The digest of each rank, and what it has trained on."""
        digests = [json.loads(self.read(f"end-{rank}"))["digest"] for rank in range(n)]
        return digests, [self.order(rank) for rank in range(n)]

    def order(self, rank):
        return {step: (epoch, rows) for step, epoch, rows in map(json.loads, self.read(f"order-{rank}").splitlines())}

    def saved(self):
        return sorted(p.name for p in (self.folder / "runs").glob("fit*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a run without a break comes to, by its options."""
    found = {}

    def of(*args, nproc=2):
        key = (*args, nproc)
        if key not in found:
            found[key] = Run(tmp_path_factory.mktemp("whole") / "run", *args, nproc=nproc).finish()
        return found[key]

    return of


def stop(run, signum, waits, ranks=()):
    """Send a signal to a run that waits for it, and return how long it has taken to end."""
    run.wait_for(*waits)
    began = time.monotonic()
    run.send(signum, *ranks)
    run.finish(143)
    return time.monotonic() - began


@pytest.mark.soak
def test_r01_r14_a_run_is_killed_and_restarted_then_a_rank_gets_term_and_it_goes_on_exactly(tmp_path, whole):
    run = Run(tmp_path, fault="kill:1:17,await:0:24", restarts=2)
    assert in_time(stop(run, signal.SIGTERM, ["waits-0"], [0]), 10)
    assert run.saved() == ["fit0-epoch0-step10", "fit0-epoch1-step20", "fit0-epoch2-step25"]
    assert "learnerkit.launch: a rank got SIGTERM, and all have stopped" in run.read("err"), run
    assert "attempt 2 of 3" in run.read("err")
    assert "attempt 3 of 3" not in run.read("err")
    assert Run(tmp_path, "--resume").finish().ends() == whole().ends()


@pytest.mark.slow
def test_r01_r02_killed_ranks_are_restarted_and_the_run_ends_as_it_would_have(tmp_path, whole):
    run = Run(tmp_path, "--async", fault="kill:1:27,kill:0:34", restarts=2)
    expected = whole().ends()  # at the same time
    assert run.finish().ends() == expected, run
    assert run.read("out").count("resumed fit 0") == 2, run


@pytest.mark.soak
@pytest.mark.parametrize(
    "args", [("--workers=2", "--async"), ("--workers=2",), ("--split", "--every=3"), ("--every=1000",)]
)
def test_r01_with_other_options(args, tmp_path, whole):
    run = Run(tmp_path, *args, fault="kill:1:27,kill:0:35", restarts=2).finish()
    same = [arg for arg in args if arg in ("--workers=2", "--split")]
    assert run.ends() == whole(*same).ends(), run


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("time", range(20))
def test_r01_r02_twenty_times(rank, time, tmp_path, whole):
    assert Run(tmp_path, fault=f"kill:{rank}:{11 + time}", restarts=1).finish().ends() == whole().ends()


@pytest.mark.soak
@pytest.mark.parametrize("nproc", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_r13_term_to_the_launcher_saves_at_the_step_and_the_run_goes_on_exactly(nproc, tmp_path, whole):
    run = Run(tmp_path, fault="await:-1:17", restarts=1, nproc=nproc)
    assert in_time(stop(run, signal.SIGTERM, [f"waits-{rank}" for rank in range(nproc)]), 10)
    assert run.saved()[-1].endswith("-step18")
    assert len(run.saved()) == 2
    assert "attempt" not in run.read("err")
    assert Run(tmp_path, "--resume", nproc=nproc).finish().ends(nproc) == whole(nproc=nproc).ends(nproc)


@pytest.mark.soak
def test_r14_term_to_the_other_rank(tmp_path, whole):
    run = Run(tmp_path, fault="await:1:17", restarts=1)
    assert in_time(stop(run, signal.SIGTERM, ["waits-1"], [1]), 10)
    assert Run(tmp_path, "--resume").finish().ends() == whole().ends()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("fault", "saved", "options"),
    [
        ("term-valid:1:20", "fit0-epoch1-step20-trained", []),
        *(
            pytest.param(*case, ["--workers=2"], marks=pytest.mark.soak)
            for case in (
                ("term-valid:1:20", "fit0-epoch1-step20-trained"),
                ("term-fetch:1:0", "fit0-epoch0-step1"),
                ("term-valid:0:40", "fit0-epoch3-step40-trained"),
                ("term-valid:-1:20", "fit0-epoch1-step20-trained"),
            )
        ),
    ],
)
def test_r15_term_in_validation_and_in_the_first_fetch(fault, saved, options, tmp_path, whole):
    run = Run(tmp_path, *options, "--every=1000", fault=fault).finish(143)
    assert run.saved() == [saved], run
    assert Run(tmp_path, *options, "--resume").finish().ends() == whole(*options).ends()


@pytest.mark.soak
def test_f32_loader_workers_leave_signals_to_their_rank(tmp_path):
    run = Run(tmp_path, "--workers=2", "--every=1000", fault="group:1:17").finish(143)
    assert run.saved() == ["fit0-epoch1-step18"]
    assert "is killed by signal" not in run.read("err")


@pytest.mark.soak
def test_r17_usr1_saves_and_the_run_goes_on(tmp_path, whole):
    run = Run(tmp_path, "--every=1000", fault="await:-1:17")
    run.wait_for("waits-0", "waits-1")
    run.send(signal.SIGUSR1)
    assert run.finish().ends() == whole().ends()
    assert run.saved() == ["fit0-epoch1-step18", "fit0-epoch3-step40-done"]


@pytest.mark.soak
@pytest.mark.parametrize(("fault", "step"), [("usr1:1:17", 19), ("term:0:17", 19), ("term:1:19", 20)])
def test_where_flags_are_read_late_it_is_one_step_later_on_all_ranks(fault, step, tmp_path, whole):
    run = Run(tmp_path, "--late", "--every=1000", fault=fault).finish(0 if "usr1" in fault else 143)
    names = [f"fit0-epoch1-step{step}" + ("-trained" if step == 20 else "")]
    assert run.saved() == names + (["fit0-epoch3-step40-done"] if "usr1" in fault else []), run
    if "term" in fault:
        run = Run(tmp_path, "--late", "--resume").finish()
    assert run.ends() == whole().ends()


@pytest.mark.soak
def test_r19_a_peer_that_dies_makes_nobody_save(tmp_path):
    run = Run(tmp_path, "--every=1000", fault="kill:1:17").finish(137)
    assert run.saved() == []
    assert "rank 0 was stopped by the launcher" in run.read("err")  # at once, not after its time of grace


@pytest.mark.soak
def test_r12_a_loss_that_is_not_finite_on_one_rank_leaves_good_checkpoints_alone(tmp_path):
    run = Run(tmp_path, "--every=1", fault="nan:1:17").finish()
    assert "epoch 1: the training loss of step 7 on rank 1 is nan: stopping" in run.read("out")
    assert {json.loads(run.read(f"end-{rank}"))["steps"] for rank in range(2)} <= {17, 18}


@pytest.mark.soak
@pytest.mark.parametrize(
    "runs", [
        [(2, ""), (1, ""), (3, "")], [(2, "--shard"), (1, ""), (3, "--shard")],
        [(3, "--shard"), (2, ""), (3, "--shard")],
    ],
    ids=["whole", "shards", "shards and DDP"],
)  # fmt: skip
def test_r22_another_number_of_ranks_sees_each_sample_once(runs, tmp_path, whole):
    options, seen = ("--split", "--exact", "--every=1"), Counter()
    for (ranks, shard), fault in zip(runs, ("raise:0:15", "raise:0:27", ""), strict=True):
        more = [*(["--resume"] if seen else []), *([shard] if shard else [])]
        run = Run(tmp_path, *options, *more, fault=fault, nproc=ranks)
        run.finish(1 if fault else 0)
        for rank in range(ranks):
            for line in run.read(f"order-{rank}").splitlines():
                _, epoch, rows = json.loads(line)
                seen.update((epoch, round(row, 9)) for row in rows)
            os.remove(tmp_path / f"order-{rank}")
    assert len(seen) == 4 * 77
    assert {*seen.values()} == {1}
    ends = [json.loads(run.read(f"end-{rank}"))["weights"] for rank in range(3)]
    assert ends[1:] == ends[:1] * 2
    assert close(ends[0], json.loads(whole("--split", "--exact", nproc=1).read("end-0"))["weights"])
    before = runs[-2][0]
    had = f"it had {before} rank{'s' * (before > 1)} and has 3, of which the new ones have fresh random streams"
    assert had in run.read("out")


def close(a, b):
    return abs(a - b) < 1e-9 if isinstance(a, float) else all(map(close, a, b))


# Shards


@pytest.mark.soak
def test_r01_a_sharded_run_is_killed_and_ends_as_it_would_have(tmp_path, whole):
    run = Run(tmp_path, "--shard", fault="kill:1:27", restarts=1)
    expected = whole("--shard").ends()  # at the same time
    assert run.finish().ends() == expected, run
    assert run.read("out").count("resumed fit 0") == 1, run


# A save has some 34 accesses of rank 0, which makes the directory, and 4 of the other.
PLACES = [(0, 3 * i) for i in range(12)] + [(1, i) for i in range(8)]


@pytest.mark.soak
@pytest.mark.parametrize(("rank", "place"), PLACES)
def test_r05_a_sharded_save_that_is_killed_leaves_a_whole_checkpoint(rank, place, tmp_path, whole):
    args = ["--shard", *(["--async"] if place % 2 else [])]
    run = Run(tmp_path, *args, fault=f"save:{rank}:{place}", restarts=1).finish()
    assert run.read("out").count("resumed fit 0") == 1, run
    assert (tmp_path / f"saving-{rank}").exists(), run
    assert run.ends() == whole("--shard").ends(), run


@pytest.mark.soak
def test_r25_a_flipped_bit_in_any_file_of_a_sharded_checkpoint_is_found(tmp_path, whole):
    shutil.copytree(whole("--shard").folder / "runs", tmp_path / "runs")
    found = Storage(tmp_path / "runs")
    newest = found.newest()
    files = sorted(path for path in newest.path.iterdir() if path.is_file())
    assert {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"} < {path.name for path in files}
    for path in files:
        content = path.read_bytes()
        for place in {0, len(content) - 1, *random.sample(range(len(content)), min(8, len(content)))}:
            spoil(path, place)
            with pytest.warns(UserWarning, match=path.name):
                assert found.newest().path != newest.path, (path, place)
            path.write_bytes(content)
    assert found.newest().path == newest.path
