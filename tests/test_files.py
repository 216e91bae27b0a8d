"""Files: what `save` writes, what `load` takes, and what neither may do."""

import contextlib
import copy
import os
import pickle
import random
import zipfile
from collections import OrderedDict
from functools import partial
from io import BytesIO, StringIO
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from checkpoint_files import largest_file
from helpers import TwoOpts, halves, make_dls, make_learner, make_model, mostly_slow, raises, same_weights, spy, weights
from torch import nn
from torch.optim import SGD, AdamW

from learnerkit import Callback, CheckpointCallback, CheckpointError, CSVLogger, Learner, datasets, files, values
from learnerkit.files import save_whole
from learnerkit.stores.paths import local_folder


def trained(**kwargs):
    learn = make_learner(**{"opt_func": AdamW, "lr": 0.01} | kwargs)
    learn.fit(2)
    return learn


def opt_states(opt, model):
    """The optimizer's state by the parameter's name."""
    return {name: opt.state.get(p, {}) for name, p in model.named_parameters()}


def assert_same_opt(a, b):
    one, other = opt_states(a.opt, a.model), opt_states(b.opt, b.model)
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].keys() == other[name].keys() != set()
        for key, value in one[name].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[name][key])), (name, key)


# Round trips


@pytest.mark.parametrize("opt_func", [AdamW, lambda params, lr: SGD(params, lr, momentum=0.9)])
def test_a_loaded_learner_goes_on_bit_by_bit_as_the_saved_one(opt_func):
    learn = trained(opt_func=opt_func)
    path = learn.save("one")
    assert path == Path("models/one.pth")
    other = make_learner(model=make_model(seed=9), opt_func=opt_func, lr=0.01)
    assert other.load("one") is other
    assert same_weights(learn.model, other.model)
    assert_same_opt(learn, other)
    for each in (learn, other):
        each.fit(2)
    assert same_weights(learn.model, other.model)


def test_without_the_optimizer_the_file_is_a_bare_state_dict():
    learn = trained()
    state = torch.load(learn.save("bare", with_opt=False), weights_only=True)
    assert same_weights(state, weights(learn.model))
    other = make_learner(model=make_model(seed=9))
    other.load("bare", with_opt=False)
    assert same_weights(other.model, learn.model)
    assert other.opt is None
    plain = make_model(seed=8)
    plain.load_state_dict(state)


def test_a_file_without_the_optimizer_says_so_where_one_is_wanted():
    learn = trained()
    learn.save("bare", with_opt=False)
    before = copy.deepcopy(opt_states(learn.opt, learn.model))
    for each in (learn, make_learner(model=make_model(seed=9))):
        with pytest.warns(
            UserWarning, match=r"bare.pth has weights and no optimizer state.*with_opt=False\) says that"
        ) as e:
            each.load("bare")
        assert e[0].filename == __file__
        assert same_weights(each.model, learn.model)
    for name, state in opt_states(learn.opt, learn.model).items():
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(before[name][k])) for k, v in state.items())


def test_with_opt_false_leaves_the_optimizer_alone():
    learn = trained()
    learn.save("full")
    other = make_learner(model=make_model(seed=9))
    other.load("full", with_opt=False)
    assert same_weights(other.model, learn.model)
    assert other.opt is None


def test_a_file_loads_with_weights_only():
    learn = trained(wd=0.1)
    state = torch.load(learn.save("full"), weights_only=True)
    assert set(state) == {"model", "opt"}
    assert same_weights(state["model"], weights(learn.model))


def test_before_any_fit_there_is_no_optimizer_to_save():
    learn = make_learner()
    learn.save("fresh")
    other = make_learner(model=make_model(seed=9)).load("fresh", with_opt=False)
    assert same_weights(other.model, learn.model)
    assert other.opt is None


def test_the_directory_is_path_and_model_dir(tmp_path):
    learn = make_learner(path=tmp_path / "here", model_dir="there/deep")
    assert learn.save("one") == tmp_path / "here" / "there" / "deep" / "one.pth"
    assert learn.save("one.pth") == tmp_path / "here" / "there" / "deep" / "one.pth"
    assert [p.name for p in (tmp_path / "here" / "there" / "deep").iterdir()] == ["one.pth"]


def test_directories_that_are_set_as_text_are_used(tmp_path):
    learn = make_learner(cbs=CSVLogger())
    learn.path, learn.model_dir = str(tmp_path), "weights"
    learn.fit(1)
    assert learn.save("a").parent == learn.export("a").parent == tmp_path / "weights"
    assert (tmp_path / "history.csv").exists()


def test_a_path_is_taken_as_it_is(tmp_path):
    learn = make_learner()
    for path in (tmp_path / "a" / "b.bin", Path("relative.pt"), Path("..") / tmp_path.name / "up.pth"):
        assert learn.save(path) == path
        assert path.is_file()
        make_learner().load(path, with_opt=False)
    assert not Path("models").exists()


def test_wrappers_leave_no_trace_in_the_file():
    class Wrap(Callback):
        def before_fit(self):
            self.plain = self.learn.model
            self.learn.model = nn.DataParallel(self.learn.model)

        def after_epoch(self):
            self.learn.save("inside")

        def cleanup_fit(self):
            self.learn.model = self.plain

        def __init__(self):
            super().__init__()
            self.plain = None

    learn = make_learner(cbs=Wrap())
    learn.fit(1)
    state = torch.load("models/inside.pth", weights_only=True)
    assert list(state["model"]) == list(make_model().state_dict())
    assert same_weights(state["model"], weights(learn.model))


@pytest.mark.parametrize("rank", ["0", "1"])
def test_rank_0_alone_writes(rank, monkeypatch):
    learn = make_learner()
    monkeypatch.setenv("RANK", rank)
    path = learn.save("one")
    assert path.exists() is (rank == "0")


def test_a_dict_of_optimizers_is_saved_by_name():
    learn = make_learner(cls=TwoOpts, lr=0.01)
    learn.fit(1)
    state = torch.load(learn.save("two"), weights_only=True)
    assert set(state["opt"]) == {"first", "last"}
    other = make_learner(cls=TwoOpts, model=make_model(seed=9), lr=0.01).load("two")
    for each in (learn, other):
        each.fit(2)
    assert same_weights(learn.model, other.model)


def test_a_file_of_other_optimizers_is_refused_and_changes_nothing():
    class Two(Learner):
        def create_opt(self):
            self.opt = {"a": SGD(self.model[0].parameters(), lr=0.1), "b": SGD(self.model[3].parameters(), lr=0.1)}

    class Renamed(Learner):
        def create_opt(self):
            self.opt = {"a": SGD(self.model[0].parameters(), lr=0.1), "c": SGD(self.model[3].parameters(), lr=0.1)}

    two = make_learner(cls=Two)
    two.fit(1)
    two.save("two")
    trained().save("one")
    for cls, file in ((Renamed, "two"), (Two, "one"), (Learner, "two")):
        other = make_learner(cls=cls, model=make_model(seed=9))
        other.fit(1)
        before = weights(other.model)
        with pytest.raises(ValueError, match=rf"{file}.pth"):
            other.load(file)
        assert same_weights(other.model, before)


def test_of_several_optimizers_none_is_loaded_if_one_does_not_fit():
    def two(*parts):
        class Two(Learner):
            def create_opt(self):
                groups = [[{"params": p} for p in part(self.model)] for part in parts]
                self.opt = {"a": AdamW(groups[0], lr=0.1), "b": AdamW(groups[1], lr=0.1)}

        return make_learner(cls=Two)

    saved = two(lambda m: [list(m[0].parameters())], lambda m: [[m[3].weight], [m[3].bias]])
    saved.fit(1)
    saved.save("two")
    other = two(lambda m: [list(m[0].parameters())], lambda m: [list(m[3].parameters())])
    other.fit(3)
    with pytest.raises(ValueError, match=r"two.pth does not fit: its optimizer has groups of \[1, 1\] parameters"):
        other.load("two")
    assert {float(s["step"]) for s in other.opt["a"].state.values()} == {6.0}


# Files that others have made, and files that are open


@pytest.mark.parametrize(
    "names", [("state_dict", "optimizer"), ("model_state_dict", "optimizer_state_dict"), ("model", "opt")]
)
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_a_checkpoint_of_plain_pytorch_is_loaded(names, prefix, tmp_path):
    learn = trained()
    state = {f"{prefix}{k}": v for k, v in learn.model.state_dict().items()}
    opt = AdamW(learn.model.parameters(), lr=0.01)
    opt.load_state_dict({**opt.state_dict(), "state": learn.opt.state_dict()["state"]})
    torch.save({names[0]: state, names[1]: opt.state_dict(), "epoch": 3, "best": 0.5}, tmp_path / "theirs.pt")
    other = make_learner(model=make_model(seed=9), opt_func=AdamW, lr=0.01).load(tmp_path / "theirs.pt")
    assert same_weights(learn.model, other.model)
    assert_same_opt(learn, other)
    torch.save(state, tmp_path / "weights.pt")
    other = make_learner(model=make_model(seed=9)).load(tmp_path / "weights.pt", with_opt=False)
    assert same_weights(learn.model, other.model)


def test_a_model_with_a_part_named_module_keeps_its_names(tmp_path):
    own = nn.Module()
    own.module = make_model()
    own.forward = own.module.forward
    learn = make_learner(model=own)
    learn.save("own")
    other = make_learner(model=nn.Sequential(OrderedDict(module=make_model(seed=9)))).load("own", with_opt=False)
    assert same_weights(other.model, own)


def test_a_foreign_state_of_the_optimizer_keeps_the_splitters_groups(tmp_path):
    model = make_model()
    opt = SGD([{"params": group} for group in halves(model)], lr=0.5, momentum=0.9)
    torch.save({"state_dict": model.state_dict(), "optimizer": opt.state_dict()}, tmp_path / "theirs.pt")
    learn = make_learner(splitter=halves, opt_func=partial(SGD, momentum=0.9)).load(tmp_path / "theirs.pt")
    learn.fit(1, [0.1, 0.2], wd=0.1)
    assert [(g["splitter_group"], g["lr"]) for g in learn.opt.param_groups] == [(0, 0.1), (0, 0.1), (1, 0.2), (1, 0.2)]


@pytest.mark.parametrize("opened", [BytesIO, lambda: open("file.bin", "w+b")])  # noqa: SIM115
def test_open_files_are_written_and_read_where_they_stand(opened):
    learn, other = trained(), make_learner(model=make_model(seed=9), opt_func=AdamW)
    with opened() as file:
        file.write(b"before")
        assert learn.save(file) is file
        file.seek(6)
        other.load(file)
    assert same_weights(learn.model, other.model)
    assert_same_opt(learn, other)
    with opened() as file, pytest.raises(ValueError, match="is damaged, or not made by Learner.save"):
        other.load(file)


def test_what_was_saved_to_an_open_file_can_be_read_by_its_name():
    learn, other = trained(), make_learner(model=make_model(seed=9), opt_func=AdamW)
    with open("file.pth", "wb") as file:
        learn.save(file)
        other.load(Path(file.name))
    assert same_weights(learn.model, other.model)


def test_an_open_file_at_its_end_is_told_to_go_back():
    learn, file = trained(), BytesIO()
    learn.save(file)
    with pytest.raises(ValueError, match=r"the BytesIO stands at its end.*call file.seek\(0\)"):
        learn.load(file)
    file.seek(0)
    learn.load(file)


@pytest.mark.parametrize("file", [None, 3, b"name", StringIO()])
def test_what_is_no_file_is_refused(file):
    learn = make_learner()
    for method in (learn.save, learn.load):
        with pytest.raises(TypeError, match="it is a name, a path, or a file open in binary mode"):
            method(file)


def test_what_is_no_regular_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "pipe.safetensors"):
        (tmp_path / "pipe").rename(tmp_path / name)
        with raises(CheckpointError, f"{name} is no regular file", "give another path, or the file open"):
            make_learner().save(tmp_path / name)
        assert (tmp_path / name).is_fifo()
        (tmp_path / name).rename(tmp_path / "pipe")


@pytest.mark.parametrize("scaler", [{}, {"mean": 1.0, "scale": 2.0}, 3.0])  # {}: of a scaler that was switched off
def test_something_else_by_the_name_of_scaler_is_passed_over(tmp_path, scaler):
    learn, other = trained(), make_learner(model=make_model(seed=9), opt_func=AdamW)
    state = {"model": learn.model.state_dict(), "opt": learn.opt.state_dict(), "scaler": scaler}
    torch.save(state, tmp_path / "odd.pth")
    other.load(tmp_path / "odd.pth")
    assert same_weights(learn.model, other.model)
    assert other.state_dict()["scaler"] == {}


class Scale(nn.Module):
    """Multiplies by weights of which its first version kept the logarithms."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x):
        return (x * self.weight)[:, :1]

    def _load_from_state_dict(self, state, prefix, metadata, *args):
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].exp()
        super()._load_from_state_dict(state, prefix, metadata, *args)


@pytest.mark.parametrize("with_opt", [True, False])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_module_learns_by_which_version_its_weights_were_saved(tmp_path, with_opt, prefix):
    learn = make_learner(model=Scale())
    learn.fit(1, lr=0.0)
    file = learn.save("one", with_opt=with_opt)
    if prefix:
        wrapped = nn.Sequential(OrderedDict(module=learn.model)).state_dict()
        torch.save({"model": wrapped, "opt": learn.opt.state_dict()} if with_opt else wrapped, file)
    learn.load("one", with_opt=with_opt)
    assert learn.model.weight.tolist() == [2.0] * 4


# Weight decay parts the groups; a file may come from either side


@pytest.mark.parametrize("saved_wd", [None, 0.1])
@pytest.mark.parametrize("own_wd", [None, 0.1])
@pytest.mark.parametrize("fitted", mostly_slow([False, True], True))
@pytest.mark.parametrize("splitter", [None, lambda m: [list(m[0].parameters()), list(m[3].parameters())]])
def test_files_with_and_without_parted_groups_load_into_each_other(saved_wd, own_wd, fitted, splitter):
    learn = trained(wd=saved_wd, splitter=splitter)
    learn.save("one")
    other = make_learner(model=make_model(seed=9), opt_func=AdamW, lr=0.01, wd=own_wd, splitter=splitter)
    if fitted:
        other.fit(1)
    other.load("one")
    assert same_weights(learn.model, other.model)
    assert_same_opt(learn, other)
    for each in (learn, other):
        each.fit(1, wd=0.2)
    assert same_weights(learn.model, other.model)


def test_a_state_of_other_groups_is_refused_and_changes_nothing():
    two = trained(splitter=lambda m: [list(m[0].parameters()), list(m[3].parameters())])
    two.save("two")
    one = trained(model=make_model(seed=9))
    before, opt_before = weights(one.model), {k: dict(v) for k, v in opt_states(one.opt, one.model).items()}
    with pytest.raises(ValueError, match=r"two.pth"):
        one.load("two")
    assert same_weights(one.model, before)
    for name, state in opt_states(one.opt, one.model).items():
        assert all(state[key] is value for key, value in opt_before[name].items())
    fresh = make_learner(opt_func=AdamW)
    with pytest.raises(ValueError, match=r"two.pth"):
        fresh.load("two")
    assert fresh.opt is None
    one.load("two", with_opt=False)
    assert same_weights(one.model, two.model)


# Names


BAD_NAMES = ["a\x00b", "-x", "a\rb", "n" * 201, "", ".", "..", "a\\b", "\x1b[0m", "\x7f", "\n"]
BAD_PATHS = ["../x", "a/../b", "a/..", "/tmp/../x", "a/\x1b[0m", "a/b\n", "a/\0"]


@pytest.mark.parametrize("name", [*BAD_NAMES, *BAD_PATHS])
@pytest.mark.parametrize("verb", ["save", "load"])
def test_names_that_could_leave_the_directory_are_refused(name, verb, tmp_path):
    learn = make_learner()
    words = "one that is given as a str has no '..'" if "/" in name else "a plain name inside the model directory"
    with pytest.raises(ValueError, match=words):
        getattr(learn, verb)(name)
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("name", ["w", "w.pth", "w.safetensors"])
def test_a_path_as_text_is_taken_wherever_a_path_is(name, tmp_path):
    learn = make_learner()
    path = learn.save(name, with_opt=False)
    before = weights(learn.model)
    assert "/" in str(path)
    nn.utils.vector_to_parameters(
        torch.zeros(sum(p.numel() for p in learn.model.parameters())), learn.model.parameters()
    )
    learn.load(str(path), with_opt=False)
    assert same_weights(learn.model, before)
    assert learn.save(f"{tmp_path}/a/b.pth") == tmp_path / "a" / "b.pth"
    assert learn.load(f"{tmp_path}/a/b.pth", with_opt=False) is learn
    assert learn.save("here/b.pth") == Path("here/b.pth")  # beside the script, not in the model directory
    assert (tmp_path / "here" / "b.pth").is_file()


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_what_a_link_leads_to_is_written(ending, tmp_path):
    learn, link, file = trained(), tmp_path / f"model.{ending}", tmp_path / "large disk" / f"model.{ending}"
    link.symlink_to(file)
    learn.save(link)  # the file is not there yet
    learn.fit(1)
    learn.save(link)
    assert link.is_symlink()
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert same_weights(make_learner().load(file, with_opt=False).model, learn.model)


def test_a_path_as_text_may_begin_with_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert make_learner().save("~/w.pth") == tmp_path / "home" / "w.pth"
    assert make_learner(path="~/run").save("w") == tmp_path / "home" / "run" / "models" / "w.pth"
    assert local_folder("~/pictures") == tmp_path / "home" / "pictures"
    assert datasets.drawn_shapes("~/shapes", n=1) == tmp_path / "home" / "shapes"
    assert make_learner().save(Path("~/w.pth")) == Path("~/w.pth")  # which is taken as it is


@pytest.mark.parametrize("name", ["a b", "ä", "a.b", "x..y", "..x", "résumé-3", "n" * 200, "con", "a:b", ".hidden"])
def test_plain_names_stay_inside(name, tmp_path):
    learn = make_learner()
    learn.save(name)
    assert [p.parent for p in tmp_path.rglob("*.pth")] == [tmp_path / "models"]
    learn.load(name, with_opt=False)


# Whole files


class Crash(Exception):
    pass


def test_a_crash_while_writing_leaves_the_old_file_and_nothing_else(monkeypatch):
    learn = make_learner()
    path = learn.save("one")
    before = path.read_bytes()

    def crash(obj, file, *args, **kwargs):
        file.write(b"half a file")
        raise Crash

    learn.fit(1)
    monkeypatch.setattr(torch, "save", crash)
    with pytest.raises(Crash):
        learn.save("one")
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["one.pth"]
    with pytest.raises(Crash):
        learn.save("two")
    assert [p.name for p in path.parent.iterdir()] == ["one.pth"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_crash_before_the_rename_leaves_the_old_file(step, monkeypatch, tmp_path):
    path = tmp_path / "one.pth"
    save_whole({"a": 1}, path)

    def crash(*args):
        raise Crash

    monkeypatch.setattr(os, step, crash)
    with pytest.raises(Crash):
        save_whole({"a": 2}, path)
    assert torch.load(path, weights_only=True) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["one.pth"]


def test_the_target_is_never_seen_half_written(monkeypatch, tmp_path):
    path, seen = tmp_path / "one.pth", []
    real = torch.save
    monkeypatch.setattr(torch, "save", lambda obj, file: (seen.append(path.exists()), real(obj, file)))
    save_whole({"a": 1}, path)
    assert seen == [False]
    assert torch.load(path, weights_only=True) == {"a": 1}


def refuses(learn, name, match):
    before = weights(learn.model)
    opt = learn.opt
    with pytest.raises(ValueError, match=match) as e:
        learn.load(name)
    assert f"{name}.pth" in str(e.value)
    assert same_weights(learn.model, before)
    assert learn.opt is opt
    return e


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.6, 0.9, 0.999])
def test_a_truncated_file_is_damaged(share):
    learn = trained()
    path = learn.save("one")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    refuses(learn, "one", "is damaged")


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"\x80\x04", b"PK\x03\x04" + b"\0" * 200, bytes(range(256)) * 4, b"\0" * 64]
)
def test_garbage_is_damaged(content):
    learn = trained()
    learn.save("one").write_bytes(content)
    refuses(learn, "one", "is damaged")


def test_a_file_with_flipped_bytes_never_half_loads():
    learn = trained()
    path = learn.save("one")
    whole = path.read_bytes()
    other = make_learner(model=make_model(seed=9), opt_func=AdamW)
    for place in range(0, len(whole), max(1, len(whole) // 25)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        before = weights(other.model)
        try:
            other.load("one")
        except ValueError as e:
            assert "one.pth" in str(e)  # noqa: PT017 - a flipped byte may also pass unseen
            assert same_weights(other.model, before)


def test_noise_in_a_file_is_damage_whatever_torch_makes_of_it():
    path, generator = trained().save("one"), random.Random(0)
    learn, whole = make_learner(), path.read_bytes()
    for _ in range(150):
        noisy = bytearray(whole[: generator.choice([len(whole), len(whole) // 2])])
        for _ in range(generator.choice([1, 3, 30])):
            noisy[generator.randrange(len(noisy))] = generator.randrange(256)
        path.write_bytes(noisy)
        with contextlib.suppress(ValueError):
            learn.load("one")


@pytest.mark.parametrize("content", [[1, 2], torch.ones(3), "text", 5])
def test_a_file_of_something_else_is_refused(content):
    learn = trained()
    torch.save(content, learn.save("one"))
    refuses(learn, "one", "not the weights of a model")


def test_a_missing_file_is_an_error_that_lists_those_there():
    learn = make_learner()
    with pytest.raises(FileNotFoundError, match="there is no file models/none.pth; saved there: nothing"):
        learn.load("none")
    learn.save("b")
    learn.save("a")
    with pytest.raises(FileNotFoundError, match="saved there: a.pth, b.pth"):
        learn.load("none")


class Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (Path(self.marker),))


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_nothing_in_a_file_is_executed(forced, plain, monkeypatch, tmp_path):
    marker = tmp_path / "executed"
    learn = make_learner()
    path = learn.save("evil")
    if plain:
        path.write_bytes(pickle.dumps({"model": Malicious(marker), "opt": {}}))
    else:
        torch.save({**learn.model.state_dict(), "more": Malicious(marker)}, path)
    if forced:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    refuses(learn, "evil", "is damaged, or not made by Learner.save")
    assert not marker.exists()


# Files of other models


def test_other_shapes_change_nothing():
    learn = trained()
    learn.save("one")
    other = trained(model=nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.0), nn.Linear(6, 2), nn.Linear(2, 1)))
    e = refuses(other, "one", r"3.weight: \(1, 6\) in the file, \(2, 6\) in the model")
    assert "does not fit Sequential" in str(e.value)
    before = weights(other.model)
    with pytest.raises(ValueError, match="differ in shape"):
        other.load("one", strict=False)
    assert same_weights(other.model, before)


def test_missing_and_surplus_keys_are_named():
    small = trained(model=make_model()[:1], dls=make_dls(data=lambda n, seed=0: _wide(n)))
    small.save("small")
    whole = trained()
    whole.save("whole")
    refuses(whole, "small", r"are not in the file: 3.weight; 3.bias$")
    refuses(small, "whole", r"are not in the model: 3.weight; 3.bias$")
    named = trained(model=nn.Sequential(OrderedDict(zip("abcd", make_model(), strict=True))))
    refuses(named, "small", r"are not in the file: a.weight; .*. These are not in the model: 0.weight; 0.bias$")
    with pytest.raises(ValueError, match=r"are not in the file: a.weight"):  # strict=False, and none of them fits
        named.load("small", strict=False)
    fresh = make_learner(model=make_model(seed=9))
    fresh.load("small", with_opt=False, strict=False)
    assert torch.equal(fresh.model[0].weight, small.model[0].weight)


def _wide(n):
    from helpers import make_data

    return make_data(n, n_out=6)


def test_many_differences_are_cut_short():
    deep = make_learner(model=nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)), nn.Linear(4, 1)))
    deep.save("deep")
    other = make_learner(model=nn.Sequential(*(nn.Linear(5, 5) for _ in range(6)), nn.Linear(5, 1)))
    refuses(other, "deep", "and 8 more")


def test_loading_fires_no_events():
    log = []
    learn = make_learner(cbs=spy(log))
    log.clear()
    learn.save("one")
    learn.load("one", with_opt=False)
    assert log == []


def test_load_goes_where_the_model_is():
    learn = trained()
    learn.save("one")
    other = make_learner(model=make_model(seed=9), opt_func=AdamW).load("one", device="cpu")
    assert {p.device.type for p in other.model.parameters()} == {"cpu"}
    with pytest.raises(RuntimeError, match="device") as caught:  # torch's own words
        other.load("one", device="gpu")
    assert not isinstance(caught.value, CheckpointError)


# The safetensors format


def test_weights_go_to_safetensors_for_other_tools_and_back():
    learn = trained(model=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 1)))
    path = learn.save("one.safetensors")
    assert path == Path("models/one.safetensors")
    assert learn.save(Path("there/two.safetensors")) == Path("there/two.safetensors")
    found = safetensors.torch.load_file(path)
    assert same_weights(found, weights(learn.model))
    for file in ("one.safetensors", Path("there/two.safetensors")):
        other = make_learner(model=copy.deepcopy(learn.model))
        nn.init.zeros_(other.model[0].weight)
        with pytest.warns(UserWarning, match=r"\w+.safetensors has weights and no optimizer state"):
            other.load(file)
        assert same_weights(other.model, learn.model)
    assert [p.name for p in path.parent.iterdir()] == ["one.safetensors"]
    with pytest.raises(FileNotFoundError, match="saved there: one.safetensors"):
        learn.load("two.safetensors")


@pytest.mark.parametrize("prefix", ["", "module."])
def test_safetensors_of_other_tools_are_read(tmp_path, prefix):
    learn = trained()
    state = {f"{prefix}{name}": value for name, value in learn.model.state_dict().items()}
    safetensors.torch.save_file(state, tmp_path / "theirs.safetensors")
    other = make_learner(model=make_model(seed=9)).load(tmp_path / "theirs.safetensors", with_opt=False)
    assert same_weights(other.model, learn.model)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 1)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.head(self.two(self.one(x)))


@pytest.mark.parametrize("by", ["us", "them", "pth"])
def test_tied_weights_stay_tied(tmp_path, by):
    learn = make_learner(model=Tied())
    learn.fit(1)
    path = tmp_path / ("tied.pth" if by == "pth" else "tied.safetensors")
    if by == "them":
        safetensors.torch.save_model(learn.model, path)
    else:
        learn.save(path)
    if by == "us":
        plain = Tied()
        safetensors.torch.load_model(plain, path)
        assert same_weights(plain, learn.model)
        assert path.stat().st_size < 1000
    other = make_learner(model=Tied()).load(path, with_opt=False)
    assert same_weights(other.model, learn.model)
    assert other.model.two.weight is other.model.one.weight


class Named(nn.Module):
    """Its parameter has the name that safetensors' notes have for torch, and one buffer is another, conjugated."""

    def __init__(self):
        super().__init__()
        self.pt = nn.Parameter(torch.ones(3))
        self.register_buffer("z", torch.tensor([1 + 2j, 3 - 1j]))
        self.register_buffer("conj", self.z.conj())
        self.register_buffer("imag", self.z.conj().imag)

    def forward(self, x):
        return x * self.pt[0]


def test_names_of_notes_and_conjugated_views_are_no_tied_weights(tmp_path):
    learn = make_learner(model=Named())
    learn.save(tmp_path / "one.safetensors")
    with torch.no_grad():
        learn.model.pt.zero_()
        learn.model.z.zero_()
    learn.load(tmp_path / "one.safetensors", with_opt=False)
    found, expected = learn.model.state_dict(), Named().state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_module_learns_from_safetensors_by_which_version_its_weights_were_saved(tmp_path):
    learn = make_learner(model=Scale())
    learn.save(tmp_path / "one.safetensors")
    learn.load(tmp_path / "one.safetensors", with_opt=False)
    assert learn.model.weight.tolist() == [2.0] * 4


class Noted(nn.Module):
    """Has more than tensors in its state, and refuses some of it."""

    def __init__(self, note="a"):
        super().__init__()
        self.body, self.note = nn.Linear(4, 1), note

    def forward(self, x):
        return self.body(x)

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        if state["note"] == "bad":
            raise OverflowError("too bad")
        self.note = state["note"]


def test_more_than_tensors_is_refused_by_safetensors():
    learn = make_learner(model=Noted())
    with pytest.raises(CheckpointError, match="_extra_state is a dict, and a .safetensors file has plain tensors"):
        learn.save("one.safetensors")
    assert not Path("models").exists()


@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_a_state_that_no_load_would_read_is_told_where_it_is_written(kind, capsys):
    learn = trained(model=Noted())
    learn.save("plain")
    assert "more than tensors" not in capsys.readouterr().out
    if kind == "model":
        learn.model.note = np.float64(1)
    else:
        next(iter(learn.opt.state.values()))["seen"] = np.float64(1)
    learn.save("more")
    said = capsys.readouterr().out
    assert "more.pth has more than tensors, numbers and text in it: " in said
    assert "numpy" in said
    with pytest.raises(CheckpointError, match="it holds objects of other classes than tensors"):
        learn.load("more")


# Failures


def same_parameters(before, model):
    return all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_a_load_that_fails_half_way_changes_nothing():
    learn = trained(model=Noted("bad"))
    learn.save("one")
    learn.save("bare", with_opt=False)
    other = trained(model=Noted("good"))
    before = {name: p.detach().clone() for name, p in other.model.named_parameters()}
    opt = copy.deepcopy(opt_states(other.opt, other.model))
    for file in ("one", "bare"):
        with pytest.raises(CheckpointError, match=f"{file}.pth does not fit Noted: .*too bad"):
            other.load(file)
        assert same_parameters(before, other.model)
    for name, state in opt_states(other.opt, other.model).items():
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(opt[name][k])) for k, v in state.items())


def test_modules_that_get_their_shapes_from_data_or_from_a_file_are_loaded():
    def lazy():
        return nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(1))

    learn = trained(model=lazy())
    learn.save("lazy")
    other = make_learner(model=lazy(), opt_func=AdamW, lr=0.01)
    other.load("lazy")
    assert same_weights(learn.model, other.model)
    assert_same_opt(learn, other)

    class Resized(nn.Module):  # as the observers of torch.ao.quantization
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.empty(0))

        def forward(self, x):
            if self.training:
                self.seen.resize_(x.shape[1]).copy_(x.detach()[0])
            return x

        def _load_from_state_dict(self, state, prefix, *args):
            self.seen.resize_(state[f"{prefix}seen"].shape)
            super()._load_from_state_dict(state, prefix, *args)

    def resized():
        return nn.Sequential(nn.Linear(4, 2), Resized(), nn.Linear(2, 1))

    learn = trained(model=resized())
    learn.save("resized")
    other = make_learner(model=resized(), opt_func=AdamW, lr=0.01)
    other.lr_find(num_it=10, show_plot=False)
    assert other.model[1].seen.shape == (0,)
    other.load("resized")
    assert torch.equal(other.model[1].seen, learn.model[1].seen)


@pytest.mark.parametrize("wrong", ["text", 3, [1.0], None])
def test_weights_that_are_no_tensors_are_refused(wrong):
    learn = trained()
    state = learn.model.state_dict()
    torch.save({**state, "3.bias": wrong}, learn.save("one"))
    refuses(learn, "one", rf"are no tensors in the file: 3.bias \(a {type(wrong).__name__}\)")


@pytest.mark.parametrize(
    "wrong", [{}, {"state": {}}, {"state": {}, "param_groups": [{}]}, {"state": 3, "param_groups": 4}]
)
def test_a_state_of_the_optimizer_that_is_none_is_refused(wrong):
    learn = trained()
    torch.save({"model": learn.model.state_dict(), "opt": wrong}, learn.save("one"))
    refuses(learn, "one", "one.pth does not fit")


def test_names_that_are_no_texts_and_a_damaged_index_are_refused(tmp_path):
    torch.save({0: torch.zeros(1)}, tmp_path / "numbers.pth")
    with pytest.raises(CheckpointError, match=r"numbers.pth has the entry 0, and the names of weights are texts"):
        make_learner().load(tmp_path / "numbers.pth")
    (tmp_path / "model.safetensors.index.json").write_text("{no")
    with pytest.raises(CheckpointError, match="cannot be read as safetensors: JSONDecodeError"):
        make_learner().load(tmp_path)


def test_a_state_that_a_fused_step_would_write_beyond_is_refused():
    learn = trained()
    state = torch.load(learn.save("one"), weights_only=True)
    for name in ("exp_avg", "exp_avg_sq"):
        state["opt"]["state"][0][name] = torch.zeros(1)
    torch.save(state, "models/one.pth")
    refuses(learn, "one", r"keeps as 'exp_avg' for parameter 0 a torch.float32 tensor of shape \(1,\), and AdamW keeps")
    torch.save(
        state | {"opt": learn.opt.state_dict(), "scaler": {"scale": "2", "_growth_tracker": 0}}, "models/one.pth"
    )
    refuses(learn, "one", "the state of its gradient scaler is not one of numbers")


def test_names_in_errors_are_safe_to_print_and_cut(tmp_path):
    learn = make_learner()
    torch.save({**learn.model.state_dict(), "a\x1b[2Jb\n" + "c" * 10**6: torch.ones(1)}, learn.save("one"))
    text = str(refuses(learn, "one", r"a\\x1b\[2Jb\\nccc").value)
    assert len(text) < 1500
    folder = tmp_path / "\x1b[2J"
    for wrong in (folder / "none", folder):
        with pytest.raises(FileNotFoundError, match=r"\\x1b\[2J") as e:
            learn.load(wrong)
        assert "\x1b" not in str(e.value)


@pytest.mark.parametrize("name", ["one", "one.safetensors"])
def test_r29_a_full_disk_is_an_error_with_the_path(name):
    learn = trained()
    path = learn.save(name)
    before = path.read_bytes()
    for limit in (0, 100, 1000):
        with (
            largest_file(min(limit, len(before) - 1)),
            pytest.raises(CheckpointError, match=rf"{path} cannot be written"),
        ):
            learn.save(name)
        assert path.read_bytes() == before
        assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_disk_that_is_full_in_the_middle_of_a_tensor_is_told_as_such(tmp_path):
    (tmp_path / "one.pth").write_bytes(b"old")
    for file in (tmp_path / "one.pth", (tmp_path / "open.pth").open("wb", buffering=0)):
        with largest_file(100_000), pytest.raises((CheckpointError, OSError), match="File too large"):
            save_whole({"a": torch.zeros(100_000)}, file)
    file.close()
    assert (tmp_path / "one.pth").read_bytes() == b"old"


def test_r28_a_compressed_file_is_refused_before_it_fills_the_memory(tmp_path):
    torch.save({"0.weight": torch.zeros(2**20)}, tmp_path / "large.pth")  # 4 MB
    with zipfile.ZipFile(tmp_path / "large.pth") as plain, zipfile.ZipFile(tmp_path / "bomb.pth", "w") as bomb:
        for part in plain.infolist():
            bomb.writestr(part.filename, plain.read(part), zipfile.ZIP_DEFLATED)
    assert (tmp_path / "bomb.pth").stat().st_size < 2**14
    for file in (tmp_path / "bomb.pth", BytesIO((tmp_path / "bomb.pth").read_bytes())):
        with pytest.raises(CheckpointError, match="its parts are compressed, which torch.save never does"):
            make_learner().load(file)


def test_a_home_of_nobody_and_a_link_to_itself_are_refused_in_words(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for make in (make_learner().save, CheckpointCallback, CSVLogger):
        there = tmp_path / "~no_such_user" / "x"
        with raises(ValueError, "got the path '~no_such_user/x'", "is no home directory", f"or '{there}' if a folder"):
            make("~no_such_user/x")
        make(str(there))
    for make in (make_learner().save, CheckpointCallback, lambda file: make_learner(cbs=CSVLogger(file)).fit(1)):
        with raises(CheckpointError, f"{tmp_path}/loop is, or lies below, a symbolic link that leads back to itself"):
            make(f"{tmp_path}/loop")


def test_what_killed_saves_have_left_is_removed(tmp_path):
    learn = make_learner(path=tmp_path, model_dir=".")
    left = [".one.pth.01234567.tmp", ".two.pth.01234567.tmp", ".one.pth.tmp"]
    for name in left:
        (tmp_path / name).write_text("half")
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / ".one.pth.76543210.tmp").write_text("of a run that is at work")
    learn.save("one")
    found = sorted(p.name for p in tmp_path.iterdir())
    assert found == [".one.pth.76543210.tmp", ".one.pth.tmp", ".two.pth.01234567.tmp", "one.pth"]


def test_damage_has_one_type():
    assert issubclass(CheckpointError, ValueError)  # as it was
    assert issubclass(CheckpointError, RuntimeError)


# Files of tensors


def test_a_file_is_as_the_library_writes_it(tmp_path):
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.tensor(True), "d": torch.zeros(0, 2).half()}
    safetensors.torch.save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    files.write_new(tmp_path / "ours", files.tensor_file(tensors, {"format": "pt"}))
    theirs, ours = (safetensors.torch.load_file(tmp_path / name) for name in ("theirs", "ours"))
    assert all(torch.equal(theirs[name], ours[name]) for name in tensors)
    assert (tmp_path / "ours").stat().st_size <= (tmp_path / "theirs").stat().st_size + 16


def test_nothing_is_copied_that_is_in_a_row_on_the_host():
    tensor = torch.randn(8)
    assert files.on_host(tensor).data_ptr() == tensor.data_ptr()
    piece = files.tensor_file({"a": files.on_host(tensor)})[1]
    tensor[0] = 7.0
    assert bytes(piece[:4]) == torch.tensor(7.0).numpy().tobytes()


def test_memory_is_used_again_and_copies_have_the_values():
    memory, places = files.HostMemory(), set()
    for factor in (1, 2, 1):
        tensors = {
            "a": factor * torch.ones(3, dtype=torch.int8), "b": factor * torch.randn(4, 5).t(), "c": torch.zeros(0),
            "d": torch.tensor(factor), "e": torch.randn(2, dtype=torch.complex128).conj(),
        }  # fmt: skip
        found = memory.copies(tensors)
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)
        assert all(tensor.is_contiguous() for tensor in found.values())
        places.add(found["a"].data_ptr())
    assert len(places) == 1


def test_all_the_types_of_torch_are_kept(tmp_path):
    types = [t for t in vars(torch).values() if isinstance(t, torch.dtype) and t.itemsize and "bits" not in str(t)]
    tensors = {}
    for dtype in dict.fromkeys(types):
        try:
            tensors[str(dtype)] = torch.randint(0, 2, (16,), dtype=torch.uint8).view(dtype)
            if dtype.itemsize < 16:  # with a stride that is none of a row
                tensors[f"one {dtype}"] = tensors[str(dtype)].reshape(-1, 2)[:1, 0]
        except (RuntimeError, TypeError, ValueError):  # a type that has no values
            continue
    assert {"torch.complex32", "torch.float8_e4m3fnuz", "torch.uint64", "torch.bfloat16"} <= tensors.keys()
    files.write_new(tmp_path / "all", files.tensor_file(tensors))
    found = files.read_tensors(tmp_path / "all")
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].view(torch.uint8), values.in_a_row(tensor).view(torch.uint8))
