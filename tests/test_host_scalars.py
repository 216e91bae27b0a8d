"""Scalars on their way from the device to the host."""

from types import SimpleNamespace

import pytest
import torch
from helpers import BlockingCopies
from torch._subclasses.fake_tensor import FakeTensorMode

from learnerkit import host_scalars
from learnerkit.host_scalars import HostCopy, HostScalars


def values(n):
    return [float(i) for i in range(n)]


@pytest.mark.parametrize("n", [0, 1, 5, 1023, 1024, 1025, 3000])
@pytest.mark.parametrize("kind", [float, torch.tensor, None])
def test_everything_comes_out_in_order(n, kind):
    row, expected = HostScalars(), values(n)
    for i, value in enumerate(expected):
        row.append(value if kind is float or (kind is None and i % 3) else torch.tensor(value))
        assert len(row) == i + 1
    assert row.all() == expected
    assert len(row) == n
    assert all(type(value) is float for value in row.all())


def test_more_can_follow_after_reading():
    row = HostScalars()
    for i in range(10):
        row.append(torch.tensor(float(i)))
        if i % 3 == 0:
            assert row.poll() == values(i + 1)
        if i % 4 == 0:
            assert row.all() == values(i + 1)
    assert row.all() == values(10)


def test_numbers_of_all_types_come_out_as_floats():
    row = HostScalars()
    for value in (1, True, 2.5, torch.tensor(3), torch.tensor(True), torch.tensor(4.5, dtype=torch.float64)):
        row.append(value)
    assert row.all() == [1.0, 1.0, 2.5, 3.0, 1.0, 4.5]
    assert all(type(value) is float for value in row.all())


@pytest.mark.parametrize("dtypes", [(torch.int64, torch.float32), (torch.bfloat16, torch.float64), (torch.int64,) * 2])
def test_tensors_of_different_types_meet(dtypes):
    row = HostScalars()
    for dtype in dtypes:
        row.append(torch.tensor(3, dtype=dtype))
    assert row.all() == [3.0, 3.0]


def test_large_counts_stay_exact():
    row = HostScalars()
    for value in (2**24 + 1, 2**40 + 1):
        row.append(torch.tensor(value))
        row.append(value)
    assert row.all() == [2**24 + 1, 2**24 + 1, 2**40 + 1, 2**40 + 1]


def test_appending_reads_no_tensor(monkeypatch):
    def refuse(self, *args):
        raise AssertionError("a tensor was read")

    row, tensor = HostScalars(), torch.tensor(1.0)
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__float__", "cpu", "__bool__"):
            patch.setattr(torch.Tensor, name, refuse)
        for _ in range(1000):
            row.append(tensor)
        assert len(row) == 1000
    assert row.all() == [1.0] * 1000


class Copy:
    """A copy from an accelerator that is done when told so."""

    def __init__(self, values, done=False):
        self.values, self.done = values, done

    def __len__(self):
        return len(self.values)

    def is_done(self):
        return self.done

    def numbers(self):
        return self.values


def test_poll_takes_what_has_arrived_and_waits_for_nothing():
    row, copy = HostScalars(), Copy([1.0, 2.0])
    row._copy = copy
    row.append(3.0)
    assert row.poll() == []
    assert len(row) == 3
    copy.done = True
    assert row.poll() == [1.0, 2.0, 3.0]
    row._copy = Copy([4.0])
    row.append(torch.tensor(5.0))
    assert row.all() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_what_is_on_the_host_need_not_be_copied():
    copy = HostCopy(torch.tensor([1.0, 2.0]))
    assert copy.is_done()
    assert len(copy) == 2
    assert copy.numbers() == [1.0, 2.0]


def test_a_copy_is_over_when_its_own_device_has_made_it(monkeypatch):
    """Which need not be the current one."""

    class Values(list):
        device, is_cuda, dtype = torch.device("cuda", 1), False, torch.float32

    class Event:
        def __init__(self, device):
            self.device = device

        def record(self, stream):
            self.stream = stream

    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: SimpleNamespace(copy_=lambda *args, **kwargs: None))
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"stream of {device}")
    assert HostCopy(Values([1.0]))._done.stream == "stream of cuda:1"


def test_numbers_beside_tensors_of_a_device_are_not_copied_there(monkeypatch):
    """Such a copy waits for the device. The tensors have shapes and devices, and no values."""
    monkeypatch.setattr(host_scalars, "HostCopy", lambda values: values)
    row = HostScalars([0.0])
    with FakeTensorMode(), BlockingCopies() as copies:
        for value in (1, 2.5, True, torch.zeros((), device="cuda"), torch.zeros((), device="cuda", dtype=torch.int64)):
            row.append(value)
        row.poll()
    assert (row._copy.shape, row._copy.dtype, row._copy.device.type) == ((5,), torch.float32, "cuda")
    assert copies.found == []


@pytest.mark.gpu
def test_values_of_an_accelerator_come_over():
    row = HostScalars()
    for i in range(2000):
        row.append(torch.tensor(float(i), device="cuda"))
        if i % 700 == 0:
            assert row.poll() == values(len(row.poll()))
    assert row.all() == values(2000)
