"""The page of errors: its addresses are those in messages, what it quotes is in the code, and the search finds it."""

import ast
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "nbs/_ext"))

from errors import address, entries, index_script, normal  # noqa: E402

BY_SEARCH = {"batch-entries", "files", "launch-report", "notes"}
"""Families of notes and short messages, to which no address leads."""


@cache  # not when the file is imported, which each of pytest's processes does
def in_the_source():
    "The texts in the package, with {} for each value of an f-string, and the addresses at their ends."
    nodes = [node for file in (ROOT / "learnerkit").rglob("*.py") for node in ast.walk(ast.parse(file.read_bytes()))]
    inner = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    texts = [
        "".join(getattr(part, "value", "") if isinstance(part, ast.Constant) else "{}" for part in node.values)
        if isinstance(node, ast.JoinedStr)
        else node.value
        for node in nodes
        if isinstance(node, ast.JoinedStr)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner)
    ]
    return {(normal(text), address(text)) for text in texts}


def linked(*folders, kinds):
    "The anchors of the page in files of some kinds, with the place of one link to each."
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.suffix in kinds]
    pattern = re.compile(r'errors\.(?:html|md)#([\w-]+)|entry(?:=|: str = )"([\w-]+)"')
    return {one or other: file for file in files for one, other in pattern.findall(file.read_text(encoding="utf-8"))}


def test_each_link_leads_to_an_entry_and_each_entry_has_one_or_is_found_by_search():
    slugs = {entry.slug for entry in entries()}
    there = linked("learnerkit", "nbs", "examples", kinds={".py", ".md", ".ipynb"})
    assert not {slug: file for slug, file in there.items() if slug not in slugs}
    assert slugs - set(linked("learnerkit", kinds={".py"})) == BY_SEARCH


@pytest.mark.slow
def test_what_an_entry_quotes_is_in_the_source_with_its_address_or_none():
    for entry in entries():
        for quoted in map(normal, entry.templates):
            found = {slug for text, slug in in_the_source() if quoted in text}
            assert found, f"{entry.slug}: {quoted}"
            assert found <= {None, entry.slug}, f"{entry.slug}: {quoted}"


def test_an_entry_is_there_once_and_says_more_than_its_messages():
    slugs = re.findall(r"^\((.+)\)=$", (ROOT / "nbs/errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert slugs == [entry.slug for entry in entries()]  # so all were understood
    quoted = [normal(template) for entry in entries() for template in entry.templates]
    assert not [each for each, n in Counter([*slugs, *quoted]).items() if n > 1]
    assert not [entry.slug for entry in entries() if len(entry.text) < 200]


SEARCH = """
const fs = require("fs"), vm = require("vm"), [index, script, queries] = JSON.parse(fs.readFileSync(0));
const element = () => ({ items: [], appendChild(x) { this.items.push(x); return x; } });
let run, list;
globalThis.location = { search: "" };
globalThis.document = {
  addEventListener: (_, f) => { run = f; }, createElement: element,
  getElementById: () => ({ before: (...added) => { list = added.at(-1); } }),
};
vm.runInThisContext(index + script);
const found = queries.map((query) => {
  list = element();
  location.search = "?q=" + encodeURIComponent(query);
  run();
  return list.items.map((item) => item.items[0].href);
});
console.log(JSON.stringify(found));
"""


def search(*queries):
    "What the search page shows above its own results, for each query: addresses of entries."
    if shutil.which("node") is None:
        pytest.skip("runs the page's script by node")
    given = index_script(), (ROOT / "nbs/_static/errors.js").read_text(encoding="utf-8"), queries
    ran = subprocess.run(["node", "-e", SEARCH], input=json.dumps(given), capture_output=True, text=True, check=True)
    return json.loads(ran.stdout)


def first_of(shown):
    return [each[0].partition("#")[2] if each else None for each in shown]


@pytest.mark.slow
def test_a_quoted_message_with_values_finds_its_entry():
    values = ["0.01", "'valid_los'", "Sequential", "(64, 10)", "/tmp/some where/model.pth", "rank 1, rank 2"]
    asked = [
        (entry.slug, "ValueError: " + values[len(quoted) % 6].join(quoted.split("{}")) + ", and more: give another one")
        for entry in entries()
        for quoted in map(normal, entry.templates)
        if len(re.findall(r"[A-Za-z]{2,}", quoted)) > 5
    ]
    shown = first_of(search(*(text for _, text in asked)))
    assert not [(*each, first) for each, first in zip(asked, shown, strict=True) if each[0] != first]


def test_a_message_with_an_address_finds_its_entry_though_it_is_not_quoted():
    quoted = [normal(template) for entry in entries() for template in entry.templates]
    asked = [(text, slug) for text, slug in in_the_source() if slug and not any(each in text for each in quoted)]
    assert first_of(search(*(f"{text} (errors.html#{slug})" for text, slug in asked))) == [slug for _, slug in asked]


def test_a_message_is_found_without_its_end_or_with_broken_lines_and_other_queries_find_nothing():
    text = (
        "RuntimeError: DriftCheck: ranks differ after step 3 (epoch 0): learning rate of group 0 is 0.001 on rank 0 "
        "and 0.1 on rank 1; 1 of 12 entries differ. Ranks drift apart when something changes state on one rank alone"
    )
    whole = (
        f"{text}, such as a callback or code under `if distributed.is_main()`: do it on every rank, or give all ranks "
        "rank 0's value with distributed.broadcast (errors.html#drift)"
    )
    broken = "\n".join(whole[i : i + 37] for i in range(0, len(whole), 37))
    shown = search(text, broken, "distributed training on several gpus", "accuracy", "")
    assert first_of(shown) == ["drift", "drift", None, None, None]
