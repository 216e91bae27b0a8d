"""The page of faults has all rows; the tests that it names exist, have the marks that it says, and none is missing."""

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "nbs" / "explanations" / "faults.md"
ROWS = [f"R{number:02}" for number in range(1, 42)]
LATER = {"slow", "soak"}

NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`(?: \((\w+)\))?")


def rows():
    """The text of each row, by its number."""
    parts = re.split(r"^### (R\d\d) .*$|^## .*$", PAGE.read_text(), flags=re.MULTILINE)
    return {name: text for name, text in zip(parts[1::2], parts[2::2], strict=True) if name}


def marks(decorators):
    """Which of the marks for later stand among decorators."""
    return {ast.unparse(d).removeprefix("pytest.mark.") for d in decorators} & LATER


@functools.cache
def found():
    """The marks of every test, by file and name; those of all of a file stand in `pytestmark`."""
    tests = {}
    for path in TESTS.rglob("test_*.py"):
        tree, of_all = ast.parse(path.read_text()), set()
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
                of_all = marks(node.value.elts if isinstance(node.value, ast.List) else [node.value])
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                tests[path.relative_to(TESTS).as_posix(), node.name] = of_all | marks(node.decorator_list)
    return tests


def test_the_page_has_all_rows_in_their_order():
    assert list(rows()) == ROWS


@pytest.mark.slow
def test_each_row_says_what_is_done_and_names_tests_that_there_are():
    for row, text in rows().items():
        assert text.count("- **learnerkit**: ") == 1, row
        named = NAMED.findall(text)
        assert named, f"{row} names no test"
        for file, name, mark in named:
            assert (file, name) in found(), f"{row}: there is no {file}::{name}"
            there = found()[file, name]
            assert there == ({mark} if mark else set()), f"{row}: {file}::{name} is marked {there or 'for every run'}"


def test_no_test_that_bears_the_number_of_a_row_is_missing_there():
    for row, text in rows().items():
        there = {(file, name) for file, name, _ in NAMED.findall(text)}
        own = {test for test in found() if f"_{row.lower()}_" in f"{test[1]}_"}
        assert own <= there, f"{row} does not name {sorted(own - there)}"
