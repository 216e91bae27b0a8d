"""Checkpoints on disk: what is written, what is read, and what happens to them when something is wrong."""

import hashlib
import json
import os
import pickle
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoint_files import is_state, largest_file, resign, save, save_and_wait, spoil, state_of, three, write_manifest
from helpers import make_learner, make_model, mostly_slow, same_weights, weights
from launching import run_script
from torch import nn

from learnerkit import CheckpointError
from learnerkit.checkpoints import storage
from learnerkit.checkpoints.storage import Storage, read_checkpoint
from learnerkit.files import remove, tensor_file

FILES = ["model.safetensors", "state.json", "rank0.json", "rank0.safetensors", "manifest.json"]


def tree(path):
    """Everything in a directory: names and contents."""
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else None for p in path.rglob("*")}


def names(path, *storages):
    for found in storages:
        found.wait()  # until old checkpoints are gone
    return sorted(p.name for p in path.iterdir())


# Round trips


@pytest.mark.parametrize("background", [False, True])
def test_what_is_saved_is_read(tmp_path, background):
    found = Storage(tmp_path / "deep" / "run", background=background)
    assert found.newest() is None
    found.check_writable()
    assert names(found.path) == []
    save(found, 7)
    checkpoint = found.newest()
    assert is_state(checkpoint, 7)
    assert not is_state(checkpoint, 8)
    assert (checkpoint.path, checkpoint.n_ranks, checkpoint.own(1)) == (found.path / "step7", 1, None)
    assert names(checkpoint.path) == sorted(FILES)
    assert (found.path / "latest").read_text() == "step7\n"
    assert is_state(read_checkpoint(checkpoint.path), 7)


def test_the_newest_stay_and_older_ones_go(tmp_path):
    found = Storage(tmp_path, keep=2)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "text").write_text("the user's own")
    for number in range(1, 6):
        save(found, number, name=f"x{9 - number}")  # the names do not tell which is newer
    assert names(tmp_path, found) == ["latest", "notes", "x4", "x5"]
    assert is_state(found.newest(), 5)
    assert (tmp_path / "latest").read_text() == "x4\n"
    again = Storage(tmp_path, keep=1)
    save(again, 6)
    assert names(tmp_path, again) == ["latest", "notes", "step6"]


def test_a_name_that_is_taken_gets_a_number(tmp_path):
    found = Storage(tmp_path, keep=2)
    for number in (1, 2, 3):
        save(found, number, name="same")
    assert names(tmp_path, found) == ["latest", "same_2", "same_3"]
    assert is_state(found.newest(), 3)
    (tmp_path / "file").write_text("")
    save(found, 4, name="file")
    assert is_state(found.newest(), 4)


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.body = nn.Linear(3, 3)
        self.register_buffer("waves", torch.randn(2, 3, dtype=torch.complex128))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("none", torch.empty(0))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("turned", torch.randn(4, 3).t())
        self.register_buffer("tiny", torch.randn(2, 2).to(torch.float8_e5m2))
        self.extra = {"a": (1, torch.ones(2))}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_any_weights_are_kept(tmp_path):
    model, other = Odd(), Odd()
    other.extra = None
    found = Storage(tmp_path)
    found.save("one", model.state_dict(), {"a": torch.zeros(1)}, {"b": torch.zeros(1)}, {})
    read = found.newest().weights()
    assert read._metadata == {name: {"version": 1} for name, _ in model.named_modules()}
    other.load_state_dict(read)
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other.state_dict()[name]), name
            assert value.dtype == read[name].dtype
    assert other.extra["a"][0] == 1
    assert other.extra["a"][1].tolist() == [1.0, 1.0]
    assert other.head.weight is other.embedding.weight


def test_other_tools_read_the_weights(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    plain, file = model.state_dict(), tmp_path / "one" / "model.safetensors"
    Storage(tmp_path).save("one", plain, {}, {}, {})
    found = safetensors.torch.load_file(file)
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    model[2].weight = model[0].weight
    Storage(tmp_path).save("tied", model.state_dict(), {}, {}, {})
    other = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    other[2].weight = other[0].weight
    safetensors.torch.load_model(other, tmp_path / "tied" / "model.safetensors")
    assert same_weights(model, other)
    with safetensors.safe_open(tmp_path / "tied" / "model.safetensors", "pt") as opened:
        assert (opened.metadata()["2.weight"], opened.metadata()["format"]) == ("0.weight", "pt")


def test_the_hash_is_of_the_bytes_that_were_written(tmp_path):
    found = storage.write_new(tmp_path / "a", tensor_file(state_of(1)[0]))
    content = (tmp_path / "a").read_bytes()
    assert found == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    with pytest.raises(FileExistsError):
        storage.write_new(tmp_path / "a", [b""])


def test_what_was_read_is_no_part_of_the_files(tmp_path):
    found = Storage(tmp_path)
    save(found, 1)
    checkpoint = found.newest()
    read, state = checkpoint.weights(), checkpoint.state()["opt"]["state"][0]
    for name in ("model.safetensors", "rank0.safetensors"):
        with open(checkpoint.path / name, "r+b") as file:
            file.write(bytes((checkpoint.path / name).stat().st_size))
    assert torch.equal(read["a"], state_of(1)[0]["a"])
    assert torch.equal(state["exp_avg"], state_of(1)[1]["opt"]["state"][0]["exp_avg"])


def test_a_value_that_cannot_be_kept_is_named_and_nothing_is_left(tmp_path):
    found = three(tmp_path)
    before = tree(tmp_path)
    weights, state, own, info = state_of(4)
    for changed, says in (
        ((weights, {"callbacks": {"Mine": {"x": {1}}}}, own, info), "callbacks.Mine.x is a set"),
        ((weights, state, {"x": [b""]}, info), "own.x.0 is a bytes"),
        ((weights, state, own, {"x": torch.ones(1)}), "not JSON serializable"),
        (({"w": torch.empty(1, device="meta")}, state, own, info), "the weight w is a tensor without memory"),
        (({"w": {1}}, state, own, info), "the model.w is a set"),
    ):
        with pytest.raises(CheckpointError, match=says):
            found.save("bad", *changed)
    assert tree(tmp_path) == before


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel for the names of open files")
def test_all_is_synced_before_it_is_renamed_and_old_ones_go_last(tmp_path, monkeypatch):
    found = Storage(tmp_path, keep=1)
    save(found, 1)
    log = []

    def watch(name, call):
        def run(*args, **kwargs):
            what = os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else str(args[-1])
            log.append((name, re.sub(r"\.[0-9a-f]{8}\.tmp", ".tmp", os.path.relpath(what, tmp_path))))
            return call(*args, **kwargs)

        monkeypatch.setattr(os, name, run)

    for name in ("fsync", "rename", "replace"):
        watch(name, getattr(os, name))
    save(found, 2)
    files = [("fsync", f".step2.tmp/{name}") for name in FILES]
    assert sorted(log[:4]) == sorted(files[:4])
    assert log[4:] == [
        files[4], ("fsync", ".step2.tmp"), ("rename", "step2"), ("fsync", "."),
        ("fsync", ".latest.tmp"), ("replace", "latest"), ("fsync", "."), ("rename", ".step1.tmp"),
    ]  # fmt: skip


# In the background


@pytest.fixture
def held(monkeypatch):
    """Hold all writing until the event is set."""
    event, write = threading.Event(), storage.write_new

    def wait(path, pieces):
        assert event.wait(60)
        return write(path, pieces)

    monkeypatch.setattr(storage, "write_new", wait)
    yield event
    event.set()


def test_in_the_background_the_values_are_those_of_the_call(tmp_path, held):
    found = Storage(tmp_path, background=True)
    weights, state, own, info = state_of(1)
    found.save("one", weights, state, own, info)
    assert not (tmp_path / "one").exists()
    for tensor in (*weights.values(), state["opt"]["state"][0]["exp_avg"], own["random"]):
        tensor.zero_()
    state["name"], info["number"] = "changed", 0
    held.set()
    checkpoint = found.newest()
    assert is_state(checkpoint, 1)
    assert checkpoint.state()["name"] == "run 1"


def test_a_second_save_waits_for_the_first(tmp_path, held):
    found, order = Storage(tmp_path, background=True), []
    save(found, 1)
    threading.Thread(target=lambda: (time.sleep(0.1), order.append("free"), held.set())).start()
    save(found, 2)
    order.append("second")
    assert order == ["free", "second"]
    assert (tmp_path / "step1").exists()
    assert is_state(found.newest(), 2)


def test_an_error_in_the_background_is_raised_once_by_the_next_call(tmp_path):
    found = three(tmp_path, background=True)
    for call in (lambda: save(found, 5), found.wait, found.newest):
        with largest_file(100):
            save(found, 4)
            while not found._writing.done():
                time.sleep(0.001)
        with pytest.raises(CheckpointError, match="a checkpoint cannot be saved: .*File too large.*step4"):
            call()
        assert is_state(found.newest(), 3)
    assert names(tmp_path) == ["latest", "step1", "step2", "step3"]
    save(found, 6)
    assert is_state(found.newest(), 6)


# Damage


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("file", FILES)
def test_r24_a_truncated_file_is_found_and_the_checkpoint_before_is_taken(tmp_path, file, share):
    found = three(tmp_path)
    path = tmp_path / "step3" / file
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.warns(UserWarning, match=f"a checkpoint is passed over: .*step3/{file} is damaged") as caught:
        assert is_state(found.newest(), 2)
    assert caught[0].filename == __file__
    with pytest.raises(CheckpointError, match=f"step3/{file} is damaged"):
        read_checkpoint(tmp_path / "step3")


@pytest.mark.parametrize("file", FILES)
def test_r24_a_file_that_is_missing_is_damage(tmp_path, file):
    found = three(tmp_path)
    (tmp_path / "step3" / file).unlink()
    with pytest.warns(UserWarning, match=f"step3/{file} is missing"):
        assert is_state(found.newest(), 2)


@pytest.mark.parametrize("file", mostly_slow(FILES, "model.safetensors", "manifest.json"))
def test_r25_a_flipped_bit_anywhere_is_found(tmp_path, file):
    found = three(tmp_path)
    path = tmp_path / "step3" / file
    content = path.read_bytes()
    for place in [0, len(content) - 1, *random.sample(range(len(content)), min(14, len(content) - 2))]:
        spoil(path, place)
        with pytest.warns(UserWarning, match=f"step3/{file}"):
            assert is_state(found.newest(), 2), place
        path.write_bytes(content)
    assert is_state(found.newest(), 3)


def test_r25_a_flipped_bit_in_latest_does_no_harm(tmp_path):
    found = three(tmp_path)
    for content in (b"step1\n", b"", b"../x\n", b"\xff", b"step2" * 1000):
        (tmp_path / "latest").write_bytes(content)
        assert is_state(found.newest(), 3)
    save(found, 4)
    assert (tmp_path / "latest").read_text() == "step4\n"


def test_two_damaged_ones_are_passed_over_and_leave_when_enough_are_whole(tmp_path):
    found = three(tmp_path)
    for number in (2, 3):
        spoil(tmp_path / f"step{number}" / "model.safetensors", -1)
    with pytest.warns(UserWarning, match="passed over") as caught:
        assert is_state(found.newest(), 1)
    assert len(caught) == 2
    save(found, 3)
    assert names(tmp_path) == ["latest", "step1", "step2", "step3", "step3_2"]  # step1 counts, the damaged do not
    for number in (4, 5):
        save(found, number)
    assert names(tmp_path, found) == ["latest", "step3_2", "step4", "step5"]


def test_a_damaged_one_that_is_removed_by_hand_may_come_again(tmp_path):
    found = three(tmp_path, keep=1)
    spoil(tmp_path / "step3" / "state.json", 5)
    with pytest.warns(UserWarning, match="passed over"), pytest.raises(CheckpointError):
        found.newest()
    remove(tmp_path / "step3")
    save(found, 3)
    assert is_state(found.newest(), 3)


def test_where_all_are_damaged_there_is_an_error(tmp_path):
    found = three(tmp_path)
    for number in (1, 2, 3):
        spoil(tmp_path / f"step{number}" / "state.json", 5)
    with (
        pytest.warns(UserWarning, match="passed over"),
        pytest.raises(CheckpointError, match="no checkpoint in .* is whole .*begin anew"),
    ):
        found.newest()


def test_a_link_is_not_followed(tmp_path):
    found = three(tmp_path / "run")
    file = tmp_path / "run" / "step3" / "model.safetensors"
    os.rename(file, tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="model.safetensors is damaged: it is not a regular file"):
        assert is_state(found.newest(), 2)
    (tmp_path / "run" / "step9").symlink_to(tmp_path / "run" / "step2", target_is_directory=True)
    with pytest.warns(UserWarning, match="passed over"):
        assert found.newest().path.name == "step2"


def test_files_that_are_not_its_own_are_let_alone(tmp_path):
    found = three(tmp_path)
    (tmp_path / "step3" / "notes.txt").write_text("mine")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "manifest.json").write_text("")
    (tmp_path / "empty").mkdir()
    assert is_state(found.newest(), 3)


def test_what_is_no_checkpoint_says_so(tmp_path):
    three(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="there is no checkpoint .*nowhere"):
        read_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="run is not a whole checkpoint.*in it are step1, step2, step3"):
        read_checkpoint(tmp_path / "run")


def test_another_format_says_so(tmp_path):
    three(tmp_path)
    path = tmp_path / "step3" / "manifest.json"
    manifest = json.loads(path.read_text()) | {"format": 1}
    write_manifest(path.parent, manifest)
    with pytest.raises(CheckpointError, match="is of format 1; this version reads 3"):
        read_checkpoint(path.parent)


# What somebody else has made, with a manifest that fits


def reads(folder):
    """Each way to read a checkpoint; what it raises, or what it returns."""
    for read in (
        lambda: Storage(folder.parent).newest(),
        lambda: read_checkpoint(folder).weights(),
        lambda: read_checkpoint(folder).state(),
        lambda: read_checkpoint(folder).own(0),
        lambda: make_learner().load(folder),
    ):
        with warnings.catch_warnings(action="ignore"):
            try:
                yield read()
            except CheckpointError as e:
                yield e


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (Path(self.marker),))


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("file", FILES)
def test_r26_nothing_in_a_checkpoint_is_executed(tmp_path, file, forced, monkeypatch):
    if forced:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    found, marker = Storage(tmp_path), tmp_path / "executed"
    save(found, 1)
    for payload in (pickle.dumps({"state": Evil(marker)}), None):
        if payload is None:
            torch.save({"model": Evil(marker), "state": Evil(marker)}, tmp_path / "step1" / file)
        else:
            (tmp_path / "step1" / file).write_bytes(payload)
        if file != "manifest.json":
            resign(tmp_path / "step1")
        assert any(isinstance(result, CheckpointError) for result in reads(tmp_path / "step1"))
        assert not marker.exists()


def evil_strings(value):
    """The same JSON with another text in the place of each."""
    if isinstance(value, dict):
        return {key: evil_strings(item) for key, item in value.items()}
    if isinstance(value, list):
        return [evil_strings(item) for item in value]
    return "antigravity.Flying" if isinstance(value, str) else value


_imports = None
sys.addaudithook(lambda event, args: _imports.append(args[0]) if event == "import" and _imports is not None else None)


def test_r27_no_text_in_a_checkpoint_is_imported(tmp_path):
    global _imports
    found = Storage(tmp_path)
    weights, state, own, info = state_of(1)
    state |= {"_instantiator": "antigravity.fly", "kind": "antigravity", "n": torch.ones(2).numpy(), "o": {1: 2}}
    weights |= {"antigravity.fly": torch.ones(2, dtype=torch.complex128)}
    found.save("one", weights, state, own, info)
    list(reads(tmp_path / "one"))  # imports what reading needs
    loaded = set(sys.modules)
    for file in ("state.json", "rank0.json", "manifest.json"):
        path = tmp_path / "one" / file
        content = path.read_bytes()
        path.write_text(json.dumps(evil_strings(json.loads(content))))
        if file != "manifest.json":
            resign(path.parent)
        _imports = []
        try:
            list(reads(path.parent))
            assert not any("antigravity" in name for name in _imports)
            assert set(sys.modules) == loaded
        finally:
            _imports = None
        path.write_bytes(content)
        resign(path.parent)


def header(name, shape, end, kind="F32"):
    text = json.dumps({name: {"dtype": kind, "shape": shape, "data_offsets": [0, end]}}).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize("content", [
    header("a", [2**38], 2**40) + bytes(64), header("a", [2**38], 64) + bytes(64), (2**40).to_bytes(8, "little"),
    header("a", [16], 64, kind="X") + bytes(64), header("a", [-16], 64) + bytes(64),
], ids=["1 TB", "1 TB in 64 bytes", "header of 1 TB", "type", "negative"])  # fmt: skip
def test_r28_a_file_that_claims_a_terabyte_is_refused(tmp_path, content):
    learn = make_learner()
    before = weights(learn.model)
    found = Storage(tmp_path)
    save(found, 1)
    (tmp_path / "step1" / "model.safetensors").write_bytes(content)
    resign(tmp_path / "step1")
    (tmp_path / "plain.safetensors").write_bytes(content)
    for path, name in ((tmp_path / "step1", "model.safetensors"), (tmp_path / "plain.safetensors",) * 2):
        with pytest.raises(CheckpointError, match=f"{name} is damaged"):
            learn.load(path)
    assert same_weights(learn.model, before)


def test_r28_a_size_that_is_not_the_files_is_found_before_anything_is_read(tmp_path, monkeypatch):
    found = three(tmp_path)
    path = tmp_path / "step3" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["state.json"]["size"] = 2**40
    write_manifest(path.parent, manifest)
    monkeypatch.setattr(storage, "_sha256", lambda path: pytest.fail("read") if "step3" in str(path) else None)
    with pytest.raises(CheckpointError, match="state.json is damaged: it has .* bytes of 1099511627776"):
        read_checkpoint(tmp_path / "step3")
    assert found.path == tmp_path


@pytest.mark.parametrize("change", [
    {"files": {"../x": {"size": 1, "sha256": ""}}}, {"files": []}, {"n_ranks": 10**15}, {"n_ranks": -1},
    {"n_ranks": None}, {"number": "x"}, {"info": []}, {"files": {"model.safetensors": 3}}, {"format": []},
])  # fmt: skip
def test_a_manifest_of_another_form_is_damage(tmp_path, change):
    found = three(tmp_path)
    path = tmp_path / "step3" / "manifest.json"
    manifest = json.loads(path.read_text()) | change
    write_manifest(path.parent, manifest)
    with pytest.warns(UserWarning, match=r"manifest.json[.\w]* is"):
        assert is_state(found.newest(), 2)
    path.write_bytes(b"[" * 10**5)
    with pytest.warns(UserWarning, match="manifest.json is damaged"):
        assert is_state(found.newest(), 2)


# Disks and names


@pytest.mark.parametrize("limit", [0, 50, 300, 700])
def test_r29_a_full_disk_leaves_what_was_there(tmp_path, limit):
    found = three(tmp_path)
    before = tree(tmp_path)
    with largest_file(limit), pytest.raises(CheckpointError, match="cannot be saved: .*File too large: '.*step4") as e:
        save(found, 4)
    assert isinstance(e.value.__cause__, OSError)
    assert tree(tmp_path) == before
    assert is_state(found.newest(), 3)


@pytest.mark.slow
def test_r29_a_disk_that_is_really_full(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        found = Storage(tmp_path)
        save(found, 1, size=600_000)  # 5 MB
        for background in (False, True):
            again = Storage(tmp_path, background=background)
            with pytest.raises(CheckpointError, match=r"No space left on device: '.*step2.*'"):
                save_and_wait(again, 2, size=600_000)
            assert names(tmp_path) == ["latest", "step1"]
            assert is_state(again.newest(), 1, size=600_000)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


BAD_NAMES = ["../x", "/abs", "a/b", "a\x00b", "-x", "a\r\nb", "n" * 300, "", ".", "..", ".x", "latest", "a\\b"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_r31_a_name_stays_in_its_directory(tmp_path, name):
    found = three(tmp_path / "run")
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="name"):
        found.save(name, *state_of(4))
    assert tree(tmp_path) == before


def test_what_runs_that_were_killed_have_left_is_removed_by_the_next(tmp_path):
    for name in (".step1.01234567.tmp", ".probe.abcdef01.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    (tmp_path / ".latest.01234567.tmp").write_text("half")
    (tmp_path / ".mine.tmp").write_text("the user's own")
    time.sleep(0.02)
    found = Storage(tmp_path)
    time.sleep(0.02)
    (tmp_path / ".step1.76543210.tmp").mkdir()  # of a run that is at work
    save(found, 1)
    assert names(tmp_path) == [".mine.tmp", ".step1.76543210.tmp", "latest", "step1"]


# learn.load


def trained(**kwargs):
    learn = make_learner(**{"opt_func": torch.optim.AdamW, "lr": 0.01} | kwargs)
    learn.fit(2)
    return learn


def test_a_learner_loads_a_checkpoint(tmp_path):
    learn = trained()
    state = {"opt": learn.opt.state_dict(), "scaler": {}}
    Storage(tmp_path).save("one", learn.model.state_dict(), state, {}, {})
    other = make_learner(model=make_model(seed=9), opt_func=torch.optim.AdamW, lr=0.01)
    assert other.load(tmp_path / "one") is other
    for each in (learn, other):
        each.fit(1)
    assert same_weights(learn.model, other.model)
    spoil(tmp_path / "one" / "rank0.safetensors", -1)
    with pytest.raises(CheckpointError, match="rank0.safetensors is damaged"):
        other.load(tmp_path / "one", with_opt=False)


# Crashes


def crashes(count, seed, monkeypatch):
    elsewhere = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)  # also for the user without rights
        found = json.loads(run_script("checkpoint_crashes.py", folder, seed, count, way="python"))
        assert is_state(Storage(Path(folder, "last")).newest(), 1, 3_000_000)
        assert names(Path(folder, "last")) == ["latest", "step1"]
    assert list(elsewhere.iterdir()) == []
    elsewhere.rmdir()
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="files that may not grow, and the exit by their signal")
def test_r05_r06_r30_a_save_killed_anywhere_leaves_a_whole_checkpoint(monkeypatch):
    found = crashes(5, 0, monkeypatch)
    assert found["events"]["tried"] > 30  # each place between two files
    assert found["events"]["ended"] == 2
    assert found["bytes"]["tried"] == 10
    assert found["bytes"]["ended"] < 5
    assert found["refused"][0] == 3
    assert "Permission denied" in found["refused"][1]
    assert "closed" in found["refused"][1]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 6))
def test_r05_r06_often(monkeypatch, seed):
    assert crashes(100, seed, monkeypatch)["bytes"]["tried"] == 200


@pytest.mark.soak
@pytest.mark.parametrize("way", ["launch", "torchrun"])
def test_the_end_of_all_ranks_waits_for_what_is_written(tmp_path, way):
    assert run_script("checkpoint_end.py", tmp_path, nproc=2, way=way) == ""
    checkpoint = Storage(tmp_path).newest()
    assert checkpoint.n_ranks == 2
    assert is_state(checkpoint, 1, 3_000_000)
