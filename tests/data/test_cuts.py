"""Batches that are made already: where their samples are, and their pieces."""

from collections import UserList
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from learnerkit import DataLoaders
from learnerkit.data.cuts import cut_rows, cut_share, even_spans, join_rows, no_rows, row_counts, rows_first

N, T = 7, 5


@dataclass
class Part:
    x: torch.Tensor
    names: list


def numbers(*shape):
    return torch.arange(float(np.prod(shape))).view(shape)


BATCHES = {  # (a batch of 7 samples, batch_dim)
    "a tensor": (numbers(N, 2), 0),
    "a pair": ((numbers(N, 2), numbers(N)), 0),
    "time-major": ((numbers(T, N, 2), numbers(T, N)), 1),
    "time-major, a target for each sample": ((numbers(T, N), numbers(N)), (1, 0)),
    "one part belongs to the whole batch": ((numbers(N), numbers(3, 3), numbers(N)), (0, None, 0)),
    "a mapping": ({"tokens": numbers(T, N), "label": numbers(N), "table": numbers(2)}, {"tokens": 1, "table": None}),
    "nested": ([(numbers(N), {"a": numbers(N, 1, 2)}), [numbers(N, 3), numbers(N)]], 0),
    "values of the whole batch": ((numbers(N), 3, torch.tensor(2.0), None, "text", True), 0),
    "arrays, and texts of each sample": ({"x": np.arange(N), "name": [str(i) for i in range(N)]}, 0),
    "time-major, texts of each sample": ((numbers(T, N), tuple(map(str, range(N)))), 1),
    "a dataclass": (Part(numbers(N, 2), list("abcdefg")), 0),
}


def leaves(part):
    """Everything in a batch that can be compared."""
    if isinstance(part, Part):
        return leaves([part.x, part.names])
    if isinstance(part, dict):
        return [x for value in part.values() for x in leaves(value)]
    if isinstance(part, list | tuple):
        return [x for value in part for x in leaves(value)]
    return [np.asarray(part).tolist()]


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("ranks", "least"), [(1, 1), (2, 1), (3, 2), (9, 1)])
def test_the_pieces_of_a_batch_are_the_batch(name, ranks, least):
    batch, dims = BATCHES[name]
    assert set(row_counts(batch, dims).values()) == {N}
    end = 0
    for rank, (start, stop) in enumerate(even_spans(N, ranks, least)):
        size = stop - start
        assert start == end
        _, mine, total, piece = cut_share(batch, rank, ranks, dims, least, "the loader")
        assert (mine, total) == (size, N)
        assert type(piece) is type(batch)
        shown = leaves(piece)  # without samples, a real one
        assert shown == leaves(cut_rows(batch, dims, *((start, start + size) if size else (0, least))))
        assert set(row_counts(piece, dims).values()) == {size or least}
        end = stop
    assert end == N
    assert leaves(cut_rows(batch, dims, 0, N)) == leaves(batch)


def test_a_batch_with_a_part_that_cannot_be_cut_is_not_emptied():
    packed, sparse = (pack_sequence([numbers(3), numbers(2)]), numbers(2)), (numbers(2), torch.eye(2).to_sparse())
    assert all(no_rows(batch, 0) is batch for batch in (packed, sparse))
    assert [len(x) for x in no_rows((numbers(N, 2), numbers(N)), 0)] == [0, 0]


@pytest.mark.parametrize("dim", [0, 1])
def test_pieces_joined_again_are_the_whole(dim):
    whole = {"h": numbers(N, N, 2), "c": (numbers(N, N), torch.tensor(1.0))}
    pieces = [cut_rows(whole, dim, 0, 4), cut_rows(whole, dim, 4, N)]
    assert leaves(join_rows(pieces, dim)) == leaves(whole)
    assert rows_first(whole, dim)["h"].equal(whole["h"].movedim(dim, 0))


@pytest.mark.parametrize(
    ("batch", "dims", "message"),
    [
        ((numbers(N), numbers(5)), 0, r"it has|different lengths .* \(0: 7, 1: 5\); say the dimension"),
        ((numbers(T, N), numbers(N)), 1, r"samples of float32 tensor of shape \(7,\) are with batch_dim=1"),
        ((3, "text"), 0, "different lengths along the dimension of the samples, or none"),
        ((pack_sequence([numbers(3)]), numbers(1)), 0, "not known where the samples of"),
        ((numbers(3, 3).to_sparse(), numbers(3)), 0, "not known where the samples of"),
        ((object(), numbers(3)), 0, "not known where the samples of object are"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch, dims, message):
    with pytest.raises(ValueError, match=message):
        cut_share(batch, 0, 2, dims, 1, "the loader")


@pytest.mark.parametrize("dims", [None, -1, True, "1", 1.0, (1, -1), {"x": "1"}])
def test_a_batch_dim_is_a_dimension_or_several(dims):
    with pytest.raises(ValueError, match="it is the dimension of the samples"):
        DataLoaders([1], batch_dim=dims)


def test_loaders_count_along_the_dimension():
    dls = DataLoaders([1], batch_dim=(1, 0))
    assert dls.count((numbers(T, N), numbers(N))) == N
    assert DataLoaders([1], batch_dim=UserList([1, 0])).count((numbers(T, N), numbers(N))) == N
    assert dls.count((numbers(T, N), numbers(T))) is None
    assert DataLoaders([1], batch_dim=1, batch_size=lambda batch: 3).count(numbers(T, N)) == 3
