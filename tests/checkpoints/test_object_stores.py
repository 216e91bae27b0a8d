"""Checkpoints in object stores: torn uploads, pruning, and two runs that write to one directory."""

import os
import random
import re
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from math import inf
from pathlib import Path

import fsspec
import pytest
import torch
from checkpoint_files import is_state, save_and_wait, state_of
from fsspec.implementations.memory import MemoryFileSystem
from helpers import make_learner, mostly_slow, same_weights
from launching import SCRIPTS, environment

from learnerkit import Callback, CheckpointCallback, CheckpointError, load_learner
from learnerkit.checkpoints import storage
from learnerkit.checkpoints.storage import Storage, StoreLock, StoreUnreachable, read_checkpoint
from learnerkit.stores.paths import StorePath

SIZE = 2000


class Faulty(MemoryFileSystem):
    """A store that takes some more bytes, and then fails: it 'refuses' the rest, 'cuts' it off, or is 'down'.

    Unlike S3 it keeps the beginning of an object that it refuses or cuts off.
    """

    protocol = "faulty"
    store, pseudo_dirs = {}, [""]
    left, way, is_down = inf, "refuses", False
    calls = []
    lock = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("faulty://"))

    @classmethod
    def fails(cls, left, way):
        """Fail after so many bytes, in this way."""
        cls.left, cls.way, cls.is_down = left, way, False

    def pipe_file(self, path, value, **kwargs):
        self.check()
        with self.lock:
            taken = value[: min(len(value), max(0, int(min(self.left, 2**40))))]
            Faulty.left -= len(value)
        if len(taken) == len(value) or self.way != "down":
            super().pipe_file(path, taken)
        if len(taken) < len(value) and self.way != "cuts":
            Faulty.is_down = self.way == "down"
            raise ConnectionError("the connection is lost")

    def put_file(self, lpath, rpath, **kwargs):
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def check(self):
        if self.is_down:
            raise ConnectionError("the store is down")

    def info(self, path, **kwargs):
        self.check()
        return super().info(path, **kwargs)

    def ls(self, path, detail=True, **kwargs):
        self.check()
        return super().ls(path, detail, **kwargs)

    def cat_file(self, path, **kwargs):
        self.check()
        return super().cat_file(path, **kwargs)

    def get_file(self, rpath, lpath, **kwargs):
        self.check()
        return super().get_file(rpath, lpath, **kwargs)

    def rm_file(self, path):
        self.check()
        self.calls.append(path)
        return super().rm_file(path)


@pytest.fixture
def run():
    """The place of a run in a store that can fail."""
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    Faulty.fails(inf, "refuses")
    Faulty.store.clear()
    Faulty.pseudo_dirs[:] = [""]
    Faulty.calls.clear()
    yield StorePath("faulty://bucket/run")
    Faulty.fails(inf, "refuses")
    Faulty.store.clear()


def locked(run, **kwargs):
    """The storage of a run that holds the lock."""
    lock = StoreLock(run)
    lock.acquire()
    return Storage(run, lock=lock, **kwargs)


def names(run):
    """The names of the checkpoints, without what makes each unique, and those of all that is not complete."""
    sizes = {key.removeprefix("/bucket/run/"): len(value.getvalue()) for key, value in Faulty.store.items()}
    folders = {key.partition("/")[0] for key in sizes if "/" in key}
    return sorted(re.sub(r"\.id-[0-9a-f]{8}$", "" if f"{name}/manifest.json" in sizes else " torn", name)
                  for name in folders)  # fmt: skip


def total(run):
    """The bytes that a save takes."""
    before = Faulty.left = 10**9
    save_and_wait(Storage(run / "measured"), 1, size=SIZE)
    return before - Faulty.left


@pytest.mark.parametrize(
    ("count", "background"), mostly_slow([(12, False), (50, False), (50, True)], (12, False), slow=[(50, True)])
)
def test_of_many_torn_uploads_none_is_chosen_and_none_stays(run, count, background):
    draw, n_bytes, torn = random.Random(0), total(run), 0
    Faulty.store.clear()
    Faulty.fails(inf, "refuses")
    save_and_wait(locked(run, keep=1), 1, size=SIZE)
    number = 1
    for attempt in range(count):
        found = locked(run, keep=1, background=background)
        way = ("refuses", "cuts", "down")[attempt % 3]
        Faulty.fails(draw.randrange(n_bytes), way)
        try:
            save_and_wait(found, number + 1, size=SIZE)
            failed = False
        except CheckpointError:
            failed = True
        Faulty.fails(inf, way)
        newest = Storage(run).newest()
        done = newest.info["number"]
        assert is_state(newest, done, SIZE)
        assert done == number if failed and names(run) == [f"step{number}"] else done in (number, number + 1)
        torn += done == number
        number = done + 1
        save_and_wait(locked(run, keep=1), number, size=SIZE)
        assert names(run) == [f"step{number}"]
        assert (run / "latest").read_bytes().decode().startswith(f"step{number}.id-")
    assert torn >= 0.9 * count, "the others were complete but for the file `latest`"


def test_a_store_that_fails_while_it_is_read_is_an_error_and_no_reason_to_take_an_older_checkpoint(run):
    found = locked(run)
    for number in (1, 2):
        save_and_wait(found, number)
    Faulty.is_down = True
    with pytest.raises(StoreUnreachable, match=r"faulty://bucket/run.*: ConnectionError: the store is down"):
        found.newest()
    Faulty.is_down = False
    assert is_state(found.newest(), 2)


def test_a_damaged_checkpoint_is_passed_over(run):
    found = locked(run)
    for number in (1, 2):
        save_and_wait(found, number)
    (key,) = (key for key in Faulty.store if "step2" in key and key.endswith("rank0.safetensors"))
    content = bytearray(Faulty.store[key].getvalue())
    content[-1] ^= 1
    MemoryFileSystem.pipe_file(fsspec.filesystem("faulty"), key, bytes(content))
    with pytest.warns(UserWarning, match=r"is passed over: faulty://bucket/run/step2.*/rank0.safetensors is damaged"):
        newest = found.newest()
    assert is_state(newest, 1)
    with pytest.raises(CheckpointError, match=r"step2.*rank0.safetensors is damaged: its content is not what was"):
        read_checkpoint(StorePath(f"faulty://{key}").parent)


def test_a_manifest_is_written_last_and_removed_first(run):
    found, order = locked(run, keep=1), []
    pipe_file = Faulty.pipe_file

    def noted(self, path, value, **kwargs):
        order.append(path.rpartition("/")[2])
        pipe_file(self, path, value, **kwargs)

    Faulty.pipe_file = noted
    try:
        save_and_wait(found, 1)
    finally:
        Faulty.pipe_file = pipe_file
    assert order[-2:] == ["manifest.json", "latest"]
    save_and_wait(found, 2)
    assert Faulty.calls[0].endswith("/manifest.json")
    assert len(Faulty.calls) == 5
    assert names(run) == ["step2"]


def test_what_latest_names_is_not_removed(run):
    found = locked(run, keep=1)
    save_and_wait(found, 1)
    (first,) = found.path.rglob("manifest.json")
    write = StorePath.upload

    def point_to_the_first(self, file):
        write(self, file)
        if self.name == "latest":
            self.write_bytes(first.parent.name.encode())

    StorePath.upload = point_to_the_first
    try:
        save_and_wait(found, 2)
    finally:
        StorePath.upload = write
    assert names(run) == ["step1", "step2"]


def test_the_run_that_began_last_holds_the_directory_and_the_other_one_stops(run):
    first = locked(run, keep=1)
    save_and_wait(first, 1)
    second = locked(run, keep=1)
    with pytest.raises(CheckpointError, match=r"run was taken over by process \d+ on .* since 20.*: one run at a time"):
        save_and_wait(first, 2)
    save_and_wait(second, 3)
    assert names(run) == ["step3"]
    first.lock.release()
    second.lock.check()
    second.lock.release()
    with pytest.raises(CheckpointError, match="was taken over by a run that has ended"):
        save_and_wait(first, 4)


def test_a_run_that_loses_the_directory_while_it_writes_completes_nothing_and_removes_nothing(run):
    first = locked(run, keep=1)
    save_and_wait(first, 1)
    write = StorePath.upload

    def taken_over(self, file):
        write(self, file)
        if self.name == at:
            StoreLock(run).acquire()

    for at, left in (("state.json", ["step1"]), ("latest", ["step1", "step3"])):
        first.lock.acquire()
        StorePath.upload = taken_over
        try:
            if at == "latest":
                with pytest.warns(UserWarning, match="old checkpoints stay: .* was taken over by"):
                    save_and_wait(first, 3)
            else:
                with pytest.raises(CheckpointError, match="was taken over by"):
                    save_and_wait(first, 2)
        finally:
            StorePath.upload = write
        assert names(run) == left


@contextmanager
def held_by(run, host, pid, began):
    """The directory has the lock of such a process."""
    text = f"process {pid} on {host} since 2026-01-01 00:00:00\n{host} {pid} {began}\n0123"
    (run / ".learnerkit.lock").write_bytes(text.encode())
    yield make_learner(cbs=CheckpointCallback(str(run)))


def test_a_holder_that_runs_on_this_machine_is_not_replaced(run, monkeypatch):
    monkeypatch.setattr(storage, "_DYING", 0.2)
    parent = os.getppid()
    said = rf"faulty://bucket/run is in use by process {parent} on {socket.gethostname()} since 2026"
    with held_by(run, socket.gethostname(), parent, storage.began(parent)) as learn, learn.no_logging():
        with pytest.raises(CheckpointError, match=said):
            learn.fit(1)
        assert names(run) == []


@pytest.mark.parametrize("pid", ["1", "999999999", "not a number"])
def test_a_holder_that_has_ended_on_this_machine_is_replaced_in_silence(run, pid):
    with held_by(run, socket.gethostname(), pid, "0") as learn, learn.no_logging():
        learn.fit(1)
    assert "fit0-epoch0-step2-done" in names(run)
    assert not (run / ".learnerkit.lock").is_file()


def test_a_holder_on_another_machine_is_replaced_with_a_warning(run):
    told = pytest.warns(UserWarning, match="was in use by process 1 on elsewhere since .* takes it over")
    with held_by(run, "elsewhere", 1, "1") as learn, learn.no_logging(), told:
        learn.fit(1)


class FailsAt(Callback):
    order = 20_000

    def __init__(self, at):
        super().__init__()
        self._at = at

    def after_batch(self):
        if self.training and self.train_iter == self._at:
            raise OSError("the machine is gone")


@pytest.mark.parametrize("background", [False, True])
def test_a_run_goes_on_from_a_store_bit_by_bit(run, background):
    def weights(fails_at=0):
        torch.manual_seed(0)
        cbs = [CheckpointCallback(str(run), every=4, resume=True, async_save=background), FailsAt(fails_at)]
        learn = make_learner(opt_func=torch.optim.Adam)
        with learn.no_logging():
            learn.fit(3, cbs=cbs)
        return learn.model.state_dict()

    whole = make_learner(opt_func=torch.optim.Adam)
    whole.fit(3)
    with pytest.raises(OSError, match="the machine is gone"):
        weights(4)
    for _ in range(2):  # from the fourth step, and from the end
        assert same_weights(whole.model.state_dict(), weights())


def test_a_run_of_a_tracker_is_found_below(run):
    for name, number in (("one", 1), ("two/ends/0", 2)):
        weights, state, own, info = state_of(number)
        Storage(run / name).save("step", weights, state, own, info | {"runs": [f"id{number}"]})
    assert CheckpointCallback(str(run), resume="run:id1").path == run / "one"
    assert CheckpointCallback(str(run), resume="run:id2").path == run / "two"
    with pytest.raises(CheckpointError, match="the runs of the checkpoints there: id1, id2"):
        CheckpointCallback(str(run), resume="run:id3")


def test_a_model_is_saved_exported_and_loaded(run):
    learn, other = make_learner(), make_learner()
    with learn.no_logging():
        learn.fit(1)
    expected = learn.model.state_dict()
    for name in ("best.pth", "best.safetensors"):
        assert str(learn.save(f"{run}/{name}")) == f"{run}/{name}"
        other.load(f"{run}/{name}", with_opt=name.endswith(".pth"))
        assert all(torch.equal(expected[key], value) for key, value in other.model.state_dict().items())
    learn.export(f"{run}/model.pt2")
    loaded = load_learner(f"{run}/model.pt2")
    x = learn.dls.one_batch()[0]
    assert torch.allclose(loaded.model(x), learn.model.eval()(x))
    with pytest.raises(FileNotFoundError, match="faulty://bucket/run/none.pth: there is no such object"):
        learn.load(f"{run}/none.pth")
    Faulty.fails(100, "refuses")
    with pytest.raises(CheckpointError, match=r"best2.pth cannot be written: .*ConnectionError: the conn"):
        learn.save(f"{run}/best2.pth")


def test_a_store_that_cannot_be_written_is_told_before_the_first_step(run):
    learn = make_learner(cbs=CheckpointCallback(str(run)))
    Faulty.fails(0, "refuses")
    with learn.no_logging(), pytest.raises(CheckpointError, match=r"run/.learnerkit.lock: ConnectionError: the conn"):
        learn.fit(1)
    assert learn.train_iter == 0


# A server of S3


@pytest.fixture
def s3(monkeypatch):
    """The URL of a bucket on a server of this machine."""
    command = [sys.executable, str(SCRIPTS / "s3_server.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        port = server.stdout.readline().strip()
        assert port.isdecimal()
        named = {"ENDPOINT_URL": f"http://127.0.0.1:{port}", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}
        for name, value in (named | {"DEFAULT_REGION": "us-east-1"}).items():
            monkeypatch.setenv(f"AWS_{name}", value)
        yield "s3://bucket"
        server.stdin.close()
        server.wait(60)


def launched(ranks, *args):
    """What such a run of store_run.py prints."""
    command = [sys.executable, "-m", "learnerkit.launch", "--nproc", str(ranks), "--max-restarts", "1"]
    done = subprocess.run(
        [*command, str(SCRIPTS / "store_run.py"), *map(str, args)],
        env=environment(), capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def printed(text, what):
    """The words of the line that begins with this one."""
    (line,) = re.findall(rf"^{what} (.*)$", text, re.M)
    return line.split()


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("option", [(), ("--async",)])
def test_ranks_killed_in_an_upload_to_s3_go_on_bit_by_bit_and_on_another_number_of_ranks(s3, option):
    whole = launched(2, f"{s3}/whole", 2, 0, *option)
    broken = launched(2, f"{s3}/broken", 2, 4, *option)  # in the second save
    assert "resumed fit 0 in epoch 0, step 3" in broken
    assert printed(whole, "digest")[0] == printed(broken, "digest")[0]
    three = launched(3, f"{s3}/broken", 3, 0, *option)
    assert "it had 2 ranks and has 3" in three
    for text in (whole, broken, three):
        keys = [key.split("/") for key in printed(text, "objects")]
        folders = {tuple(key[:-1]) for key in keys if ".id-" in "".join(key[-2:-1])}
        assert all([*folder, "manifest.json"] in keys for folder in folders), "nothing torn stays"
        assert ["run", ".learnerkit.lock"] not in keys
