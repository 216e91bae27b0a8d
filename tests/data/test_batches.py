"""Batches of any structure: moved, measured, split, joined."""

import re
from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_sequence

from learnerkit import DataLoaders
from learnerkit.data.batches import Rows, concat, gather_batches, likely_sizes, to_device, with_rows
from learnerkit.data.loaders import Unpacker
from learnerkit.values import map_batch, tensors_in

Pair = namedtuple("Pair", "a b")


def test_nested_batches_move_whole():
    batch = {"a": [torch.ones(2), (torch.ones(3), "text")], "b": Pair(torch.ones(1), None)}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert moved["a"][1][0].is_meta
    assert moved["a"][1][1] == "text"
    assert isinstance(moved["b"], Pair)
    assert moved["b"].a.is_meta
    here = torch.ones(2)
    assert to_device(here, torch.device("cpu")) is here
    assert set(to_device(UserDict(x=here), torch.device("meta"))) == {"x"}


@dataclass(frozen=True)
class Parts:
    x: torch.Tensor
    name: str = "a"


class Moving:
    """A batch of another library, which moves itself."""

    def to(self, device):
        return f"on {device}"


def test_dataclasses_packed_sequences_and_objects_that_move_themselves():
    packed = pack_sequence([torch.ones(3), torch.ones(1)])
    moved = to_device([Parts(torch.ones(2)), packed, Moving(), Moving], torch.device("meta"))
    assert moved[0].x.is_meta
    assert moved[0].name == "a"
    assert moved[1].data.is_meta
    assert not moved[1].batch_sizes.is_meta
    assert moved[2:] == ["on meta", Moving]
    assert [len(t) for t in tensors_in((Parts(torch.ones(2)), packed))] == [2, 4]
    with pytest.raises(ValueError, match="pad them"):
        concat([packed, packed])


rows = torch.ones(3, 2)


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        ((rows, rows[:, 0]), {3}),
        (({"x": torch.ones(4)},), {4}),
        ((torch.tensor(1.0), rows), {3}),
        (Parts(rows), {3}),
        ((Pair(rows, rows),), {3}),
        (rows.numpy(), {3}),
        ((["a", "b"], torch.ones(2)), {2}),
        (pack_sequence([torch.ones(3), torch.ones(1)]), {2}),
        (([rows, rows], rows), {3}),  # two inputs
        (([rows[:2], rows[:1]], [{"boxes": rows}, {"boxes": rows}]), {2}),  # two samples
        (([rows, rows],), {2, 3}),  # either
        ((torch.ones(5), rows), set()),
        ((torch.tensor(1.0),), set()),
    ],
)
def test_the_lengths_of_a_batch_tell_its_size_if_they_agree(batch, sizes):
    assert likely_sizes(batch) == sizes


def test_a_batch_is_split_into_inputs_and_targets():
    dls = DataLoaders([1], target_keys=("y", "z"))
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    assert dls.split((a, b)) == ((a,), (b,))
    assert dls.split([a, b, c]) == ((a, b), (c,))
    assert dls.split((a,)) == ((a,), ())
    assert dls.split(a) == ((a,), ())
    assert dls.split({"x": a, "y": b, "z": c}) == (({"x": a},), (b, c))
    assert dls.split({"x": a, "y": b}, []) == (({"x": a, "y": b},), (b,))
    assert dls.split((a, b), ["x", "y"]) == ((a, b), (b,))
    assert dls.split((a, b, c), ["x", "w", "y"]) == ((a, b, c), (c,))
    assert dls.split((a, b, c), ["x", "y", "w"]) == ((a, b), (c,))
    assert dls.split((a, b), ["x"]) == dls.split((a, b), ["x", "w"]) == ((a,), (b,))
    assert DataLoaders([1], n_inp=1, target_keys="y").split((a, b), ["x", "y"]) == ((a,), (b,))
    assert DataLoaders([1], n_inp=1).split((a, b, c)) == ((a,), (b, c))
    assert DataLoaders([1], target_keys="x").split({"x": a, "w": b}) == (({"w": b},), (a,))
    with pytest.raises(ValueError, match="n_inp=3"):
        DataLoaders([1], n_inp=3).split((a, b))
    with pytest.raises(ValueError, match="n_inp=0"):
        DataLoaders([1], n_inp=0)


def unpacked(dls, batch, device, arguments=None):
    return Unpacker(dls, None, torch.device(device), arguments, sharded=False)(batch, 0)


def test_batches_that_are_on_cuda_already_are_known():
    """Their tensors name 'cuda:0'; what is elsewhere takes the longer way."""
    with FakeTensorMode():
        there = torch.ones(3, device="cuda").device
        assert Unpacker(DataLoaders([1]), None, torch.device("cuda"), None, sharded=False).device == there


def test_unpack_is_split_of_a_batch_on_the_device():
    a, b, c, scalar = torch.ones(3), torch.ones(3, 2), torch.ones(3), torch.tensor(1.0)
    batches = [(a, b), [a, b], (a,), a, (a, b, c), ("text", a), (scalar, a), ([a, b], c), {"x": a, "y": b}, (None, a)]
    for arguments in (None, ["x", "z"], ["x", "y"]):
        for n_inp in (None, 1, 2, 3):
            dls = DataLoaders([1], n_inp=n_inp, target_keys="y")
            for batch in batches:
                try:
                    expected = dls.split(batch, arguments)
                except ValueError as e:
                    with pytest.raises(ValueError, match=re.escape(str(e))):
                        unpacked(dls, batch, "cpu", arguments)
                    continue
                there, xb, yb, size = unpacked(dls, batch, "cpu", arguments)
                assert type(there) is type(batch)
                assert same((xb, yb), expected), (batch, n_inp)
                assert size == 3
    found = unpacked(DataLoaders([1]), (a, b), "meta")
    assert all(t.device.type == "meta" for t in (*found[0], *found[1], *found[2]))


def same(one, other):
    """Whether two nested batches hold the very same things."""
    if isinstance(one, tuple | list | dict):
        pairs = zip(one.items(), other.items(), strict=True) if isinstance(one, dict) else zip(one, other, strict=True)
        return type(one) is type(other) and all(same(x, y) for x, y in pairs)
    return one is other or one == other


@dataclass(frozen=True)
class Boxes:
    boxes: torch.Tensor
    names: list


def test_a_batch_that_lacks_a_part_is_refused_in_words():
    with pytest.raises(ValueError, match="float32 tensor of shape .3, 1. and NoneType cannot be joined"):
        concat([torch.ones(3, 1), None])


def test_what_no_batch_has_is_none_for_all_of_them():
    joined = concat([{"y": None, "z": (None, torch.ones(n))} for n in (2, 3)])
    assert joined["y"] is None
    assert joined["z"][0] is None
    assert len(joined["z"][1]) == 5


@pytest.mark.parametrize("last", [torch.tensor(1.0), torch.ones(2)])
def test_a_batch_that_has_lost_the_axis_of_its_one_sample_is_refused_in_words(last):
    with pytest.raises(ValueError, match=r"cannot be joined: .*\.squeeze\(1\) rather than"):
        concat([torch.ones(3, *last.shape), last])


def test_entries_that_some_batches_lack_are_left_out_of_the_joined_batch_with_a_warning():
    with pytest.warns(UserWarning, match="some batches have no entry a, b: it is left out where they are joined"):
        joined = concat([{"a": torch.ones(1), "x": torch.ones(1)}, {"x": torch.zeros(1), "b": torch.ones(1)}])
    assert joined.keys() == {"x"}
    assert joined["x"].tolist() == [1, 0]


def test_batches_are_joined_by_their_parts():
    batches = [{"p": torch.full((n, 2), n), "q": (torch.ones(n),)} for n in (2, 3)]
    whole = concat(batches)
    assert whole["p"].shape == (5, 2)
    assert whole["q"][0].shape == (5,)
    ragged = concat([torch.ones(2, 3), torch.ones(1, 4)])
    assert [tuple(row.shape) for row in ragged] == [(3,), (3,), (4,)]
    assert concat([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]
    joined = concat([Boxes(torch.ones(n, 4), [n]) for n in (2, 1)])
    assert joined.boxes.shape == (3, 4)
    pair = concat([Pair(torch.ones(n), torch.ones(n, 2)) for n in (2, 1)])
    assert [tuple(t.shape) for t in (pair.a, pair.b)] == [(3,), (3, 2)]
    assert gather_batches([(1, "b"), (0, "a")], sharded=False) == ["b", "a"]
    assert map_batch(lambda t: t + 1, [torch.tensor(1)]) == [torch.tensor(2)]


def test_typed_tensors_of_fastai_become_plain_ones():
    kind = type("TensorImage", (torch.Tensor,), {"__module__": "fastai.torch_core"})
    own = type("Own", (torch.Tensor,), {})
    image, mine = torch.ones(2, 3).as_subclass(kind), torch.ones(2).as_subclass(own)
    moved = to_device({"a": (image, [image]), "b": mine}, torch.device("cpu"))
    assert type(moved["a"][0]) is type(moved["a"][1][0]) is torch.Tensor
    assert type(moved["b"]) is own
    assert torch.equal(moved["a"][0], torch.ones(2, 3))
    assert moved["a"][0].data_ptr() == image.data_ptr()  # not copied


def test_a_list_of_mappings_has_one_for_each_sample_whatever_their_lengths():
    detections = [{"boxes": torch.ones(2, 4)}, {"boxes": torch.zeros(2, 4)}]
    assert isinstance(with_rows(detections, 2), Rows)
    assert not isinstance(with_rows({"of each layer": detections}, 2)["of each layer"], Rows)
    assert not isinstance(with_rows([torch.ones(2), torch.ones(2)], 2), Rows)  # two outputs
    assert not isinstance(with_rows(detections, 3), Rows)
    assert not isinstance(with_rows(["a"], 2), Rows)


def test_some_outputs_in_a_tuple_may_be_of_the_whole_batch_and_samples_may_have_any_length():
    parts = torch.ones(2), torch.ones(5)
    assert not isinstance(with_rows(parts, 2, is_output=True), Rows)
    assert not isinstance(with_rows((torch.tensor(1.0), parts[0]), 2, is_output=True), Rows)
    for samples in (with_rows(parts, 2), with_rows([*parts], 2, is_output=True)):
        assert isinstance(samples, Rows)
