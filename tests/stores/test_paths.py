"""Places in object stores, told from paths by their URLs."""

import os
from pathlib import Path

import fsspec
import pytest
import torch
from helpers import make_learner
from PIL import Image

from learnerkit import CheckpointCallback, CSVLogger, ImageData, TextData
from learnerkit.stores.paths import StoreError, StorePath, any_path, is_hidden, local_folder


@pytest.fixture
def store():
    """The memory's store, which is empty before and after."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    yield memory
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def test_a_url_is_told_from_a_path():
    assert any_path("memory://bucket/run/") == StorePath("memory://bucket/run")
    assert any_path("file:///tmp/run") == Path("/tmp/run")
    for path in ("run", "/a/run", "./s3:/a", "s3:a", "run:1/a", "C:/run", "c://run", Path("exp:1/run")):
        assert any_path(path) == Path(path)


def test_a_place_has_the_parts_of_a_path():
    there = StorePath("s3://bucket/run/best.v1.pth")
    assert (there.name, there.stem, there.suffix) == ("best.v1.pth", "best.v1", ".pth")
    assert there.parent / "other" == there.with_name("other") == StorePath("s3://bucket/run/other")
    assert str(there.with_stem("a")) == "s3://bucket/run/a.pth"


def test_a_url_that_became_a_path_is_refused():
    with pytest.raises(ValueError, match=r"made one slash of two: give a URL as a str, 's3://bucket/run'"):
        CheckpointCallback(Path("s3://bucket/run"))
    with pytest.raises(TypeError, match="got the path 3; it is a str or a pathlib.Path"):
        any_path(3)


@pytest.mark.parametrize("url", ["memory://user:word@host/run", "memory://a/../b", "memory://a\n/b"])
def test_a_url_with_a_password_or_dots_is_refused_and_not_shown(url):
    with pytest.raises(ValueError, match=r"got the URL memory://\.\.\.; it has no '\.\.'"):
        CheckpointCallback(url)


def test_a_missing_package_is_named_by_its_extra(monkeypatch):
    def missing(protocol):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(ImportError, match=r"s3://bucket/run needs a package .*: pip install 'learnerkit\[s3\]'"):
        CheckpointCallback("s3://bucket/run")


@pytest.mark.parametrize("url", ["memory:/bucket/run", "simplecache::memory://run", "file://here/run", "file:/run"])
def test_what_is_nearly_a_url_is_refused_and_makes_no_folder(url):
    with pytest.raises(ValueError, match=r"a URL has two slashes, as s3://bucket/run, or three, as file:///folder"):
        CheckpointCallback(url)


@pytest.mark.parametrize("name", ["path", "model_dir"])
def test_the_folder_of_a_learner_is_no_url(name):
    with pytest.raises(ValueError, match=f"got {name}='memory://run'; it is a local folder: give URLs to learn.save"):
        make_learner(**{name: "memory://run"})


def test_an_unknown_kind_of_store_is_refused():
    with pytest.raises(ValueError, match=r"got 'nosuch://bucket/run': Protocol not known: nosuch"):
        CheckpointCallback("nosuch://bucket/run")


def test_a_file_that_is_written_bit_by_bit_takes_no_url():
    with pytest.raises(ValueError, match="this is written bit by bit, to a local path or a name alone"):
        CSVLogger("memory://run/history.csv")


def test_a_folder_of_pictures_is_copied_once_and_again_when_it_has_changed(store, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("cat", "dog"):
        for i in range(5):
            Image.new("RGB", (8, 8), (i, 0, 0)).save(tmp_path / "one.png")
            store.put_file(str(tmp_path / "one.png"), f"/pictures/{name}/{i}.png")
    data = ImageData.from_folder("memory://pictures", size=8)
    assert data.classes == ["cat", "dog"]
    assert isinstance(data.dataloaders(bs=2, device="cpu").one_batch()[0], torch.Tensor)
    first = local_folder("memory://pictures")
    calls, get_file = [], type(store).get_file
    monkeypatch.setattr(type(store), "get_file", lambda *args: calls.append(args) or get_file(*args))
    assert local_folder("memory://pictures") == first
    assert calls == []
    store.pipe_file("/pictures/cat/new.png", b"more")
    second = local_folder("memory://pictures")
    assert second != first
    assert (second / "cat/new.png").read_bytes() == b"more"
    assert len(calls) == 11


def test_the_object_that_stands_for_a_folder_is_not_in_it(store, monkeypatch):
    store.pipe_file("/run/a.txt", b"1")
    listed = [{"name": "/run/", "size": 0, "type": "file"}, *store.ls("/run", detail=True)]  # as s3fs lists them
    monkeypatch.setattr(type(store), "ls", lambda *_, **__: listed)
    run = StorePath("memory://run")
    assert (list(run.iterdir()), run.sizes()) == ([run / "a.txt"], {"a.txt": 1})


@pytest.mark.parametrize("sign", ["ETag", "etag"])
def test_an_object_that_has_changed_and_kept_its_size_is_copied_again(store, tmp_path, monkeypatch, sign):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for content in (b"1", b"2"):
        store.pipe_file("/texts/a.txt", content)
        monkeypatch.setattr(type(store), "find", lambda *_, c=content, **__: {"/texts/a.txt": {"size": 1, sign: c}})
        assert (local_folder("memory://texts") / "a.txt").read_bytes() == content


def test_a_folder_of_texts_is_copied(store, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("bad", "good"):
        for i in range(4):
            store.pipe_file(f"/texts/{name}/{i}.txt", f"it is {name} {i}".encode())
    assert TextData.from_folder("memory://texts").classes == ["bad", "good"]


def test_a_folder_that_is_empty_or_has_a_name_that_leads_out_is_refused(store, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="memory://none: there is no such object or bucket"):
        local_folder("memory://none")
    store.pipe_file("/texts/../../x.txt", b"")
    store.pipe_file("/slashes//etc/x.txt", b"")
    for url in ("memory://texts", "memory://slashes"):
        with pytest.raises(StoreError, match="the name of an object leads out of the folder"):
            local_folder(url)
    store.pipe_file("/single.txt", b"")
    with pytest.raises(StoreError, match=r"single\.txt: .*it is an object, and no folder"):
        local_folder("memory://single.txt")
    assert [*tmp_path.rglob("*")] == []


@pytest.mark.parametrize("folder", ["/", "/data", ".", "..", ".data"])
def test_a_file_is_hidden_within_its_folder_alone(folder):
    for name, hidden in ((".a.txt", True), (".b/a.txt", True), ("b/.a.txt", True), ("b/a.b.txt", False), ("a", False)):
        assert is_hidden(Path(folder, name), Path(folder)) is hidden
        assert is_hidden(os.path.join(folder, name), Path(folder)) is hidden
