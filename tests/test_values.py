"""What describes and hashes nested values; `tests/data/test_batches.py` has what maps them."""

import pytest
import torch
from torch import nn

from learnerkit import values


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (torch.ones(2, 3), "float32 tensor of shape (2, 3)"),
        (torch.tensor(1), "int64 tensor of shape ()"),
        ((torch.ones(1), [3]), "(float32 tensor of shape (1,), (int))"),
        (["a", "b", "c"], "(3 entries such as str)"),
        ({"a": torch.ones(1)}, "{'a': float32 tensor of shape (1,)}"),
        ("text", "str"),
        (None, "NoneType"),
    ],
)
def test_describe_says_type_and_shape(x, expected):
    assert values.describe(x) == expected


# The digest of a tensor


def digest(t):
    return values.digests([t])[0]


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("dtype", [torch.bool, *INTEGERS, *FLOATS, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), pytest.param((3, 5), marks=pytest.mark.soak)], ids=str)
def test_every_single_bit_counts(dtype, shape):
    t = torch.randint(0, 2, shape).to(dtype)
    before = digest(t)
    bits = t.reshape(-1).view(torch.uint8)
    seen = set()
    for i in range(len(bits)):
        for bit in range(1 if dtype is torch.bool else 8):
            bits[i] ^= 1 << bit
            seen.add(digest(t))
            bits[i] ^= 1 << bit
    assert digest(t) == before
    assert before not in seen
    assert len(seen) == len(bits) * (1 if dtype is torch.bool else 8)


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
def test_the_order_of_values_counts(dtype):
    t = torch.arange(12).to(dtype)
    swapped = t.clone()
    swapped[[3, 8]] = swapped[[8, 3]]
    opposite = torch.tensor([1, 2, -1, -2]).to(dtype)
    assert len(set(values.digests([t, swapped, t.flip(0), t.roll(1)]))) == 4
    assert digest(opposite) != digest(opposite[[2, 1, 0, 3]])


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
def test_where_the_values_lie_does_not_count(dtype):
    table = torch.arange(12).reshape(4, 3).to(dtype)
    for t in (table[:, 0], table[:1, 1], table.t(), table[0, :1].expand(5)):
        assert digest(t) == digest(t.clone(memory_format=torch.contiguous_format))


def test_changes_that_a_sum_with_rising_weights_would_miss():
    t = torch.zeros(64, dtype=torch.int32)
    changed = t.clone()
    changed[10], changed[11], changed[12] = 1, -2, 1
    signs = torch.zeros(64, dtype=torch.float64)
    signs[[4, 6]] = -0.0
    assert digest(changed) != digest(t)
    assert digest(signs) != digest(torch.zeros(64, dtype=torch.float64))


def test_nan_is_equal_to_itself_and_zeros_are_told_apart():
    t = torch.tensor([float("nan"), 1.0])
    assert digest(t) == digest(t.clone())
    assert digest(t) != digest(torch.tensor([1.0, float("nan")]))
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))


@pytest.mark.parametrize("size", [2**16, 2**16 + 1, 3 * 2**16, 200_001])
def test_places_in_large_tensors_count(size):
    """Rows of 2**16 words are told apart, and so are places in them and in the incomplete last one."""
    t = torch.randint(2**31, (size,), dtype=torch.int32)
    rolled = t.roll(2**16)
    found = {digest(t)} | ({digest(rolled)} if size > 2**16 else set())
    for place in (0, 2**16 - 1, size // 2, size - 1):
        changed = t.clone()
        changed[place] ^= 1
        found.add(digest(changed))
    assert len(found) == (6 if size > 2**16 else 1 + len({0, 2**16 - 1, size // 2}))


def test_the_layout_does_not_count():
    t = torch.randn(2, 3, 4, 5)
    assert digest(t.to(memory_format=torch.channels_last)) == digest(t)
    assert digest(t.transpose(0, 1)) == digest(t.transpose(0, 1).contiguous())
    assert digest(torch.zeros(1).expand(7)) == digest(torch.zeros(7))
    z = torch.randn(3, dtype=torch.complex64)
    assert digest(z.conj()) == digest(z.conj().resolve_conj()) != digest(z)


def test_nothing_is_changed_and_nothing_is_drawn():
    p, before = nn.Parameter(torch.randn(4)), torch.get_rng_state()
    values.digests([p, torch.empty(0), torch.tensor(3)])
    assert torch.equal(torch.get_rng_state(), before)
    assert values.digests([]) == []
    assert values.digests([torch.empty(0), torch.empty(0, 3).bool()]) == [0, 0]
