"""The small helpers."""

import sys
from types import SimpleNamespace

import pytest
import torch
from fastcore.foundation import L
from helpers import make_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from learnerkit import utils
from learnerkit.explain import is_out_of_memory


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (None, []),
        ([], []),
        ((), []),
        ([1, 2], [1, 2]),
        ((1, 2), [1, 2]),
        (L(1, 2), [1, 2]),
        ({1}, [1]),
        (frozenset([1]), [1]),
        ({1: "a", 2: "b"}.values(), ["a", "b"]),
        (range(2), [0, 1]),
        (0, [0]),
        ("ab", ["ab"]),
        (b"ab", [b"ab"]),
        ({}, [{}]),
        ({"a": 1}, [{"a": 1}]),
        (list, [list]),
        (len, [len]),
    ],
)
def test_listify_makes_a_list_of_anything(x, expected):
    assert utils.listify(x) == expected


def test_listify_reads_a_generator_and_takes_tensors_and_modules_as_items():
    assert utils.listify(i for i in range(3)) == [0, 1, 2]
    tensor, module = torch.zeros(3), nn.Sequential(nn.Linear(1, 1))
    assert utils.listify(tensor)[0] is tensor
    assert utils.listify(module) == [module]


def test_listify_copies():
    x = [1]
    assert utils.listify(x) is not x


OUT_OF_MEMORY = [
    (torch.OutOfMemoryError("CUDA out of memory"), True),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
    (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"), True),
    (RuntimeError("the queue is out of memory"), False),
    (MemoryError("DefaultCPUAllocator: not enough memory"), False),
]


@pytest.mark.parametrize(("error", "is_one"), OUT_OF_MEMORY)
def test_only_what_an_allocator_says_of_full_memory_counts(error, is_one):
    assert is_out_of_memory(error) is is_one


def test_the_hosts_allocator_says_so_itself():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_a_note_of_a_kind_is_added_once():
    error = ValueError("x")
    utils.add_note_once(error, "raised in A.fit")
    utils.add_note_once(error, "raised in B.fit")
    utils.add_note_once(error, "another kind of note")
    assert error.__notes__ == ["raised in A.fit", "another kind of note"]


def test_parameters_are_counted_for_a_person():
    model = nn.Sequential(nn.Linear(99, 100), nn.Linear(100, 1))
    assert utils.count_parameters(model) == "Sequential, 10,101 parameters"
    model[0].requires_grad_(False)
    assert utils.count_parameters(model) == "Sequential, 10,101 parameters, 10,000 of them frozen"
    assert utils.count_parameters(nn.LazyLinear(3)) == "LazyLinear, 0 parameters"


def test_parts_of_other_libraries_are_told():
    foreign = type("Callback", (), {"__module__": "fastai.callback.core"})
    assert utils.library_of(foreign) == "fastai"
    assert utils.library_of(foreign()) == "fastai"
    assert utils.library_of(type("Own", (foreign,), {})()) == "fastai"
    assert utils.library_of(len) == utils.library_of(nn.Linear(1, 1)) == utils.library_of(None) == ""
    function = lambda params, lr: None  # noqa: E731
    function.__module__ = "fastai.optimizer"
    assert utils.library_of(function) == "fastai"


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


def on(*devices):
    """What stands for a model with a parameter on each of these devices; this machine may have none of them."""
    places = [SimpleNamespace(device=torch.device(device)) for device in devices]
    return SimpleNamespace(modules=lambda: [], parameters=lambda: places)


@pytest.mark.parametrize(
    ("devices", "found"),
    [
        ([], []),
        (["cpu", "cpu"], []),
        (["cuda:1", "cuda:1"], []),
        (["cpu", "cuda:1"], []),  # half-way there: it moves as a whole
        (["meta", "cpu"], []),
        (["cuda:1", "cpu", "cuda:0", "cuda:1"], ["cuda:1", "cuda:0"]),
    ],
)
def test_a_model_spans_devices_by_its_parameters(devices, found):
    assert utils.spanned_devices(on(*devices)) == list(map(torch.device, found))


def test_a_model_on_a_device_without_a_number_is_placed():
    """It is on 'cuda:0' when it was moved to 'cuda'. These tensors have a device and no values."""
    with FakeTensorMode():
        model = nn.Linear(2, 2, device="cuda")
        for named, is_there in (("cuda", True), ("cuda:0", True), ("cuda:1", False), ("cpu", False)):
            assert utils.is_placed(model.modules(), torch.device(named)) == is_there


@pytest.mark.parametrize(
    ("placed", "found"),
    [
        ({"": 0}, []),
        ({"": "cpu"}, []),
        ({"embed": torch.device("cuda", 1), "head": "cuda:1"}, []),
        ({"embed": "cpu", "head": "disk"}, ["cpu", "meta"]),
        ({"embed": "cpu", "body": "cuda:1", "head": torch.device("cuda", 2)}, ["cuda:1", "cuda:2", "cpu"]),
    ],
)
def test_a_model_spans_devices_by_the_map_that_placed_it(placed, found):
    model = make_model()
    model[0].hf_device_map = placed  # of a part of a larger model
    assert utils.spanned_devices(model) == list(map(torch.device, found))


def test_a_number_in_that_map_is_an_accelerator():
    model = make_model()
    model.hf_device_map = {"embed": 1, "head": 0}
    assert [(device.type != "cpu", device.index) for device in utils.spanned_devices(model)] == [(True, 1), (True, 0)]


def test_front_end_tells_where_a_person_types(monkeypatch):
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
