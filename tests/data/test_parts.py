"""What is kept for validation."""

import numpy as np
import pytest
from helpers import raises

from learnerkit.data.parts import held_out


def test_a_share_takes_as_many_of_each_group_and_leaves_one_to_train_on():
    groups = np.array(["a"] * 60 + ["b"] * 40 + ["c"])
    mask = held_out(0.25, groups, seed=1)
    assert {group: int(mask[groups == group].sum()) for group in "abc"} == {"a": 15, "b": 10, "c": 0}
    assert (mask == held_out(0.25, groups, seed=1)).all()
    assert (mask != held_out(0.25, groups, seed=2)).any()
    assert mask[:15].sum() < 15  # not the first ones
    assert not held_out(0.9, groups, seed=1)[groups == "c"].any()


@pytest.mark.parametrize(
    "valid", [[1, 3], range(1, 4, 2), np.array([3, 1]), [False, True, False, True], np.array([False, True] * 2, object)]
)
def test_rows_are_held_out_by_number_or_mask(valid):
    assert held_out(valid, np.zeros(4), 0).tolist() == [False, True, False, True]


@pytest.mark.timeout(20)
def test_many_groups_take_no_longer_than_few():
    groups = np.char.add("class ", (np.arange(200_000) % 50_000).astype(str))
    assert held_out(0.25, groups, 0).sum() == 50_000


def test_valid_none_holds_out_no_row():
    assert not held_out(None, np.zeros(4), 0).any()


@pytest.mark.parametrize("valid", [1.5, 0.0, "test", [4], [-1], [0.5], [], [True, False], [0, 1, 0, 1], [3, 3]])
def test_a_valid_that_names_no_part_is_refused(valid):
    with raises(ValueError, "it is a share between 0 and 1, a mask of the 4 rows, a list of row numbers"):
        held_out(valid, np.zeros(4), 0)
    with raises(ValueError, "got valid=object array of shape (4,); it is a share"):
        held_out(np.array([True, None, False, False]), np.zeros(4), 0)
    with raises(ValueError, "leaves 0 rows to train on"):
        held_out(range(4), np.zeros(4), 0)
    with raises(ValueError, "leaves 4 rows to train on and 0 to validate on; it is a share of each of the 4 classes"):
        held_out(0.2, np.arange(4), 0)
