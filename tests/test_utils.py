"""The small helpers."""

import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import make_model
from torch import nn

from learnerkit import utils


@pytest.mark.parametrize(
    ("x", "expected"),
    [(None, []), ([], []), ((), []), ([1, 2], [1, 2]), ((1, 2), [1, 2]), (0, [0]), ("ab", ["ab"]), ({}, [{}])],
)
def test_listify(x, expected):
    assert utils.listify(x) == expected


def test_listify_copies():
    x = [1]
    assert utils.listify(x) is not x


def test_did_you_mean():
    assert utils.did_you_mean("after_bach", ["before_fit", "after_batch"]) == "; did you mean 'after_batch'?"
    assert utils.did_you_mean("zzz", ["before_fit"]) == ""
    assert utils.did_you_mean("x", []) == ""


def test_a_note_of_a_kind_is_added_once():
    error = ValueError("x")
    utils.add_note_once(error, "raised in A.fit")
    utils.add_note_once(error, "raised in B.fit")
    utils.add_note_once(error, "another kind of note")
    assert error.__notes__ == ["raised in A.fit", "another kind of note"]


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (torch.ones(2, 3), "float32 tensor of shape (2, 3)"),
        (torch.tensor(1), "int64 tensor of shape ()"),
        ((torch.ones(1), [3]), "(float32 tensor of shape (1,), (int))"),
        ({"a": torch.ones(1)}, "{'a': float32 tensor of shape (1,)}"),
        ("text", "str"),
        (None, "NoneType"),
    ],
)
def test_describe(x, expected):
    assert utils.describe(x) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "00:00"),
        (0.99, "00:00"),
        (59.9, "00:59"),
        (60, "01:00"),
        (3599, "59:59"),
        (3600, "1:00:00"),
        (90061, "25:01:01"),
    ],
)
def test_format_time(seconds, expected):
    assert utils.format_time(seconds) == expected


def test_unwrap_reaches_the_users_module():
    model = make_model()
    assert utils.unwrap(model) is model
    assert utils.unwrap(nn.DataParallel(model)) is model
    assert utils.unwrap(nn.DataParallel(nn.DataParallel(model))) is model
    compiled = torch.compile(model, backend="eager")
    assert utils.unwrap(compiled) is model
    assert utils.unwrap(nn.DataParallel(compiled)) is model


def test_a_users_module_with_a_module_inside_is_no_wrapper():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(1, 1)

    own = Own()
    assert utils.unwrap(own) is own


def test_training_modes_come_back_also_after_an_error():
    model = make_model()
    model.train()
    model[2].eval()
    before = [m.training for m in model.modules()]
    with utils.training_modes(model):
        model.eval().append(nn.Dropout())
    assert [m.training for m in list(model.modules())[: len(before)]] == before
    with pytest.raises(ZeroDivisionError), utils.training_modes(model):
        model.train(1 / 0)
    assert [m.training for m in list(model.modules())[: len(before)]] == before


@pytest.mark.parametrize("name", ["a", "model.pth", "a b", "ä", "..x", "x" * 200])
def test_plain_names_pass(name):
    assert utils.plain_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/a", "a\\b", "-a", "a\n", "\r", "a\0b", "\x1b[0m", "\x7f", "x" * 201]
)
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="a str is a plain name inside the model directory"):
        utils.plain_name(name)


def test_where_a_person_types(monkeypatch):
    import IPython

    assert utils.front_end() == ""
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=object()))
    assert utils.front_end() == "notebook"
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace())
    assert utils.front_end() == "prompt"
    monkeypatch.delitem(sys.modules, "IPython")
    assert utils.front_end() == ""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert utils.front_end() == "prompt"
