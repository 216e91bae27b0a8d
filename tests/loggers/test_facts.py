"""What a logger writes of the code and the data: the commit, the command, and a fingerprint that changes with data."""

import json
import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from helpers import make_dls, make_learner
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from learnerkit import CSVLogger, JSONLogger, set_seed
from learnerkit.loggers.facts import code, fingerprint


class Items(Dataset):
    def __init__(self, items, **others):
        self.items, self.root = items, "/somewhere"
        vars(self).update(others)

    def __len__(self):
        return len(self.items)


def test_the_fingerprint_is_the_same_in_every_process():
    found = fingerprint(TensorDataset(torch.arange(4), torch.ones(4, 2, dtype=torch.bfloat16)))
    assert found == "TensorDataset, 4 items, sha256 73ff13a65b7304db"
    assert (
        fingerprint(Items(["a", "b"], table=np.array([1.5, "x"], dtype=object)))
        == "Items, 2 items, sha256 6416dad7e1c14320"
    )


def test_tensors_that_are_no_row_of_bytes_count_by_their_kind():
    sparse, empty = torch.eye(4).to_sparse(), torch.empty(4, device="meta")
    found = {fingerprint(Items("ab", table=t)) for t in (torch.eye(4), sparse, empty, torch.eye(4, dtype=torch.cfloat))}
    assert len(found) == 4
    turned = torch.complex(torch.ones(2), torch.ones(2)).conj()
    assert fingerprint(Items("ab", table=turned)) == fingerprint(Items("ab", table=turned.resolve_conj()))
    one = torch.ones(3, 2)[:1, 0]
    assert fingerprint(Items("ab", table=one)) == fingerprint(Items("ab", table=torch.ones(1)))


def changed(change):
    x, names = torch.zeros(40, 3), [f"name {i}" for i in range(40)]
    data = Subset(ConcatDataset([Items(names, table=x.numpy().copy()), TensorDataset(x)]), [3, 1, 2])
    change(data)
    return fingerprint(data)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.dataset.datasets[1].tensors[0].__setitem__((39, 2), 1),
        lambda data: data.dataset.datasets[0].items.__setitem__(39, "another"),
        lambda data: data.dataset.datasets[0].table.__setitem__((0, 0), 1),
        lambda data: data.indices.__setitem__(0, 4),
        lambda data: vars(data.dataset.datasets[0]).update(labels={"cat": 1}),
    ],
)
def test_a_change_of_what_is_held_in_memory_changes_it(change):
    assert changed(change) != changed(lambda data: None)
    assert changed(change) == changed(change)


@pytest.mark.parametrize(
    "make",
    [
        lambda i: list(np.array([1, i])),
        lambda i: np.array([f"a long text that is not in the array itself, {i}"], np.dtypes.StringDType()),
        lambda i: np.array([(f"cat {i}", 1)], [("name", object), ("number", int)]),
    ],
)
def test_labels_of_numpy_count_by_their_values(make):
    first, again, other = (Items("a", labels=make(i)) for i in (2, 2, 3))
    assert fingerprint(first) == fingerprint(again) != fingerprint(other)


def test_files_count_by_name_and_size_wherever_they_are(tmp_path):
    def dataset(root, text="some"):
        for name in ("cat", "dog"):
            (tmp_path / root / name).mkdir(parents=True)
            (tmp_path / root / name / "1.jpg").write_text(text)
        return Items([(str(path), 0) for path in sorted((tmp_path / root).rglob("*.jpg"))])

    here, there, larger = dataset("here"), dataset("there"), dataset("larger", "some more")
    assert fingerprint(here) == fingerprint(there) != fingerprint(larger)


def test_what_holds_nothing_in_memory_has_no_digest():
    class Stream(IterableDataset):
        def __iter__(self):
            yield 1

    assert fingerprint(Stream()) == "Stream, no length"
    assert fingerprint(iter([1])) == "list_iterator, no length"
    knot = []
    knot.append(knot)
    assert fingerprint(Items(knot)).startswith("Items, 1 items, sha256 ")


def test_only_some_of_a_large_dataset_is_read(monkeypatch):
    monkeypatch.setattr("learnerkit.loggers.facts._BYTES", 64)
    x = torch.zeros(1000, 4)
    before = fingerprint(TensorDataset(x))
    x[1] = 1
    assert fingerprint(TensorDataset(x)) == before
    x[0] = 1
    assert fingerprint(TensorDataset(x)) != before


def test_a_list_of_large_tensors_takes_no_memory_for_all_of_them():
    data = Items([torch.zeros(1).expand(2**18) for _ in range(40)])  # 40 MiB
    tracemalloc.start()
    try:
        fingerprint(data)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


def git(folder, *words):
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_is_that_of_the_scripts_folder(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("first")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py", "--name", "two words"])
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    command = {"command": "train.py --name 'two words'"}
    assert code() == command
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", os.fsdecode(b"caf\xe9")])  # bytes that are no UTF-8
        assert code() == {"command": "train.py 'caf\\udce9'"}
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    (tmp_path / "history.csv").touch()
    assert code() == command | {"commit": git(tmp_path, "rev-parse", "HEAD"), "changed": False}
    script.write_text("second")
    assert code()["changed"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code() == command


def test_they_are_among_the_parameters(tmp_path):
    learn = make_learner(make_dls(12), cbs=JSONLogger(every=None), path=tmp_path)
    set_seed(7)
    with learn.no_logging():
        learn.fit(1)
    config = json.loads((tmp_path / "history.jsonl").read_text().splitlines()[0])["config"]
    assert config["seed"] == 7
    assert config["train"]["data"] == fingerprint(learn.dls.train_ds) != config["valid"]["data"]
    assert config["code"]["command"]


def test_a_logger_that_writes_no_parameters_does_not_ask_for_them(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("learnerkit.loggers.logger.fingerprint", lambda data: asked.append(data) or "")
    for cb, n in ((CSVLogger(), 0), (JSONLogger(), 2)):
        learn = make_learner(make_dls(12), cbs=cb, path=tmp_path)
        with learn.no_logging():
            learn.fit(1)
        assert len(asked) == n
