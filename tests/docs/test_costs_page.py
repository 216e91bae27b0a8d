"""The page of costs shows what was measured, and all of it."""

import importlib.util
import re
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def saved():
    """The module that keeps the figures; its folder is for scripts, and on no path."""
    spec = importlib.util.spec_from_file_location("saved", BENCHMARKS / "saved.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_file(saved):
    page = saved.PAGE.read_text()
    assert saved.with_tables(page, saved.read()) == page, "run tests/benchmarks/run.py --save, and edit no table"


def test_every_benchmark_is_measured_and_shown_once(saved):
    text = (BENCHMARKS / "run.py").read_text()
    names = re.findall(r'^    "(\w+)": \w+,$', text[text.index("\nBENCHMARKS") :], re.MULTILINE)
    assert len(names) > 10
    shown = [name for _, listed, _ in saved.TABLES.findall(saved.PAGE.read_text()) for name in listed.split()]
    assert sorted(shown) == sorted(names)
    assert sorted(saved.read().keys() | saved.ON_GPU) == sorted(names)


def test_figures_carry_machine_date_versions_and_command(saved):
    for name, found in saved.read().items():
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"]), name
        assert re.match(r"\d+ cores? of \S+", found["machine"]), name
        assert re.fullmatch(r"Python \S+, torch \S+, learnerkit \S+", found["versions"]), name
        assert found["command"].startswith(f"python tests/benchmarks/run.py {name} "), name
        assert all(len(row) == 3 for row in found["rows"]), name
        assert found["rows"], name


def test_a_table_is_made_of_what_was_measured_in_one_place(saved):
    def measured(date):
        rows = [["a step", "1.05", "1.1"], ["    extra", "+2 us", ""]]
        return {"command": "python x", "date": date, "machine": "2 cores of X", "versions": "torch 2", "rows": rows}

    page = "before\n<!-- measured: one two -->\nold\n<!-- end -->\nafter\n"
    made = saved.with_tables(page, {"one": measured("2026-01-01"), "two": measured("2026-01-02")})
    assert "| a step | 1.05 | 1.1 |" in made
    assert "| &emsp;extra | +2&nbsp;us |  |" in made
    assert made.count("| what | figure | goal |") == 2
    assert "2026-01-01; 2 cores of X; torch 2:" in made
    assert "old" not in made
    assert saved.with_tables(made, {}) == page.replace("old\n", "")
