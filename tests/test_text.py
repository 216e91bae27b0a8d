"""Words for messages."""

import pytest

from learnerkit.text import columns, counted, did_you_mean, first_few, format_time, in_one_line, in_units, printable


def test_did_you_mean_names_the_nearest():
    assert did_you_mean("after_bach", ["before_fit", "after_batch"]) == "; did you mean 'after_batch'?"
    assert did_you_mean("zzz", ["before_fit"]) == ""
    assert did_you_mean("x", []) == ""


def test_did_you_mean_prefers_a_name_of_the_same_meaning_to_the_nearest():
    assert did_you_mean("acc", ["accuracy", "auc"]) == "; did you mean 'accuracy'?"
    assert did_you_mean("val_acc", ["train_loss", "valid_loss", "accuracy"]) == "; did you mean 'accuracy'?"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "00:00.0"),
        (0.04, "00:00.0"),
        (0.06, "00:00.1"),
        (9.96, "00:10.0"),
        (59.94, "00:59.9"),
        (59.96, "01:00"),
        (60, "01:00"),
        (61.9, "01:01"),
        (3599.9, "59:59"),
        (3600, "1:00:00"),
        (90061, "25:01:01"),
    ],
)
def test_times_are_written_as_minutes_and_seconds(seconds, expected):
    assert format_time(seconds) == expected


@pytest.mark.parametrize(
    ("text", "width"),
    [("", 0), ("abc", 3), ("naïve", 5), ("nai\u0308ve", 5), ("准确率", 6), ("정확도", 6), ("ｆｕ", 4)],
)
def test_columns_are_those_of_a_terminal(text, width):
    assert columns(text) == width


def test_the_first_few_are_named_and_the_rest_counted():
    assert first_few(["a"]) == "a"
    assert first_few(range(5)) == "0, 1, 2, 3, 4"
    assert first_few(range(7), "; ", n=2) == "0; 1 and 5 more"
    assert first_few(["a\x1b", "b" * 10**7], n=2).startswith("a\\x1b, bbb")
    assert len(first_few(["b" * 10**7])) < 1100


def test_an_error_is_told_in_one_line():
    assert in_one_line(ValueError("wrong\nat length")) == "ValueError: wrong"
    assert in_one_line(KeyError()) == "KeyError"
    assert in_one_line(OSError("\x1b[2Jforged")) == "OSError: \\x1b[2Jforged"
    assert in_one_line(ValueError("x" * 500)) == f"ValueError: {'x' * 388} ..."
    of_worker = (
        "Caught OSError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\nOSError: no\n"
    )
    assert in_one_line(OSError(of_worker)) == "OSError: no"


def test_text_that_is_safe_to_print():
    assert printable("model.0.weight") == "model.0.weight"
    assert printable("a\x1b[2J\nb\udcff") == "a\\x1b[2J\\nb\\udcff"
    assert printable("a" * 10**7 + "/file", 10) == "aaaaa ... (10000005 characters) ... /file"


def test_a_number_has_its_noun():
    assert [counted(n, "step") for n in (0, 1, 2, 1.0, 0.999, 1.5, 10**8)] == [
        "0 steps", "1 step", "2 steps", "1 step", "1 step", "1.5 steps", "100000000 steps",
    ]  # fmt: skip


def test_bytes_are_written_in_units():
    assert [in_units(n) for n in (5, 999, 2**12, 1020 * 2**10, 1.5 * 2**20, 2**36, 2**50)] == [
        "5 bytes", "999 bytes", "4 KB", "0.996 MB", "1.5 MB", "64 GB", "1.02e+03 TB",
    ]  # fmt: skip
