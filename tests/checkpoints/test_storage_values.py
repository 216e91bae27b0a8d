"""Values as JSON and tensors, and back."""

import json
import math
from collections import Counter, OrderedDict, deque
from pathlib import Path

import numpy as np
import pytest
import torch

from learnerkit import CheckpointError
from learnerkit.checkpoints.storage import decode, encode


def round_trip(value):
    tensors = []
    text = json.dumps(encode(value, tensors), allow_nan=False)
    return decode(json.loads(text), tensors)


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return repr(a) == repr(b)
    return a == b


PLAIN = [
    None, True, False, 0, -3, 2**200, 0.1, -0.0, 1e-320, math.nan, math.inf, -math.inf, "", "ü\n\0\ud800", [], (), {},
    [1, [2.5, (3, None)], ("a",)], {"a": {"b": [1]}, "": 2}, {1: "a", (2, "b"): {3: ()}, None: 1, 0.5: 2, False: 3},
    {"!tensor": 0}, {"!dict": [], "x": 1}, {"kind": "dict", "type": "<f4", "shape": [], "order": [1]},
    OrderedDict(b=1, a=(2,)), Counter({5: 2, 3: -1}), {0: {"step": 1}, 1: {}}, [0.1] * 1500, [math.nan] * 1500,
    [1.0, 2] * 800, (0.5,) * 1500,
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: repr(value)[:40])
def test_plain_values_come_back_as_they_were(value):
    assert same(round_trip(value), value)


TYPES = [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint16, torch.bool, torch.complex128]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4, 5)])
def test_tensors_come_back(dtype, shape):
    tensor = (torch.randn(shape) * 3).to(dtype)
    found = round_trip([{"x": tensor}])[0]["x"]
    assert (found.dtype, found.shape) == (dtype, shape)
    assert torch.equal(found, tensor)


@pytest.mark.parametrize("make", [
    lambda x: x.to(memory_format=torch.channels_last), lambda x: x.transpose(0, 3), lambda x: x.permute(3, 1, 0, 2),
])  # fmt: skip
def test_the_order_in_memory_is_kept(make):
    tensor = make(torch.randn(2, 3, 4, 5))
    tensors = []
    found = decode(encode(tensor, tensors), tensors)
    assert tensors[0].is_contiguous()
    assert found.stride() == tensor.stride()
    assert torch.equal(found, tensor)


def test_views_with_holes_come_back_by_value():
    x = torch.randn(4, 6)
    for view in (x[:, ::2], x[1], x[0, :1].expand(5), torch.randn(3, dtype=torch.complex64).conj(), x.t()[1:3]):
        assert torch.equal(round_trip(view), view)


def test_a_tensor_that_comes_twice_is_kept_once_and_stays_one():
    x, tensors = torch.randn(3), []
    found = decode(encode({"a": x, "b": [x], "c": x[:2]}, tensors), tensors)
    assert len(tensors) == 2
    assert found["a"] is found["b"][0]
    assert torch.equal(found["c"], x[:2])


ARRAYS = [
    np.arange(6).reshape(2, 3), np.array(2.5), np.zeros((0, 2), np.float32), np.array([1 + 2j]), np.array([True]),
    np.random.default_rng(0).random((3, 4)).T, np.arange(5, dtype=np.uint32)[::2], np.float32(0.1), np.bool_(True),
    np.int64(-5), np.float64(math.nan), np.complex64(1j), np.longdouble(0.1), np.array([np.longdouble(1) / 3]),
    np.array([1.5, -2], ">f4"), np.array([258], ">i8"),
]  # fmt: skip


@pytest.mark.parametrize("value", ARRAYS, ids=repr)
def test_numpys_values_come_back(value):
    found = round_trip(value)
    assert (type(found), found.dtype, found.shape) == (type(value), value.dtype, value.shape)
    assert found.tobytes() == value.tobytes()


def test_a_generators_states_come_back():
    for state in (np.random.default_rng(1).bit_generator.state, np.random.RandomState(3).get_state(legacy=False)):
        found = round_trip(state)
        np.testing.assert_equal(found, state)


OTHERS = [
    ({"callbacks": {"Mine": {"queue": deque()}}}, "callbacks.Mine.queue is a deque"),
    ([1, {2}], "^1 is a set"),
    ({"a": ({"b": print},)}, "a.0.b is a builtin_function_or_method"),
    (Path("x"), "the state is a PosixPath"),
    (b"bytes", "the state is a bytes"),
    ({"x": 1j}, "x is a complex"),
    ({"x": torch.ones(2).to_sparse()}, "x is a sparse_coo tensor"),
    ({"x": torch.empty(2, device="meta")}, "x is a tensor without memory"),
    ({"x": np.array(["a"])}, "x is a ndarray of type <U1"),
    ({"x": np.array([None])}, "x is a ndarray of type object"),
    ({"x": {b"key": 1}}, "x.key b'key' is a bytes"),
    ({"x": {(1, b"key"): 1}}, "x.key .*1 is a bytes"),
    ({"x": torch.float32}, "x is a dtype"),
    ({"x": type("Sub", (dict,), {})()}, "x is a Sub"),
]


@pytest.mark.parametrize(("value", "says"), OTHERS, ids=[says for _, says in OTHERS])
def test_what_cannot_be_kept_is_named_by_its_place(value, says):
    with pytest.raises(CheckpointError, match=says):
        encode(value, [])


def test_a_value_that_contains_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(CheckpointError, match="contains itself"):
        encode(value, [])


@pytest.mark.parametrize("found", [
    {"!import": "os"}, {"!tensor": 7}, {"!tensor": "x"}, {"!scalar": "zz", "type": "<f4"},
    {"!scalar": "00", "type": "|O"},
    {"!array": 0, "type": "torch.float32", "shape": [1]}, {"!array": 0, "type": "<f4", "shape": [10**12]},
    {"!tensor": 0, "order": [5, 6]}, {"!dict": [[1]]}, {"!dict": [], "kind": "os.system"}, {"!float": "1"},
])  # fmt: skip
def test_what_was_not_encoded_here_is_refused(found):
    with pytest.raises((KeyError, ValueError, IndexError, TypeError, RuntimeError)):
        decode(found, [torch.zeros(4)])
