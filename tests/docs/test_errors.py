"""Every message of the library has an entry in the error index, and the search finds the entry by the message."""

import json
import re
import shutil
import subprocess
from collections import Counter
from functools import cache

import pytest
from error_messages import ENDS, MAKERS, ROOT, literal, messages, needs_address, raised

from errors import address, entries, index_script, normal  # isort: skip  # nbs/_ext is put on the path by `error_messages`

PASSED_ON = {  # places where a text of elsewhere is passed on, which is collected there or comes from another library
    "learnerkit/__main__.py": 1,  # an exit code
    "learnerkit/arguments.py": 2,  # lone_last_batch
    "learnerkit/checkpoints/storage.py": 4,  # the errors of all ranks
    "learnerkit/data/loaders.py": 1,  # _say
    "learnerkit/doctor.py": 1,  # an exit code, as in the other __main__ modules
    "learnerkit/endings.py": 1,  # raised in {callback}.{event}
    "learnerkit/explain/__init__.py": 1,  # Explanation
    "learnerkit/export/programs.py": 1,  # _refused
    "learnerkit/launch/__main__.py": 1,
    "learnerkit/launch/cli.py": 5,  # outcomes, NodeErrors and advice; the name of a signal
    "learnerkit/launch/rank_main.py": 2,  # what the script exits with, and its traceback
    "learnerkit/launch/report.py": 4,  # how_it_ended
    "learnerkit/notebook/kernel.py": 3,  # _describe_death, and what the workers print and raise
    "learnerkit/parallel/distributed.py": 1,  # how a model is divided
    "learnerkit/parallel/watch.py": 2,  # the ranks' calls, and _describe
    "learnerkit/preflight/facts.py": 1,  # an exit code
    "learnerkit/preflight/local_checks.py": 1,  # free memory
    "learnerkit/preflight/machines.py": 2,  # an exit code, and errors of checks
    "learnerkit/preflight/ranks.py": 2,  # _likely_reason and _compare_samples
    "learnerkit/preflight/step.py": 9,  # errors of model, loss, its count, metrics; lone_last_batch; out_of_range
    "learnerkit/scaling/batch_size.py": 1,  # the bytes of a try that ends
    "learnerkit/scaling/cost.py": 1,  # the error of a forked process
    "learnerkit/sweep/__main__.py": 1,
    "learnerkit/sweep/config.py": 3,  # refuse, and errors with the entry before them
    "learnerkit/sweep/study.py": 1,  # the same of a search's own file
    "learnerkit/utils.py": 2,  # warn and add_note_once
    "learnerkit/distributed/facts.py": 1,  # warn_once
}


@cache  # not when the file is imported, which each of pytest's processes does
def found():
    return messages()


@cache
def by_template():
    return {normal(template): entry for entry in entries() for template in entry.templates}


def words(text):
    return re.findall(r"[A-Za-z]{2,}", literal(text))


def test_every_message_has_an_entry():
    missing = {
        f"{m.place}: {m.text}" for m in found() if len(words(m.text)) > 1 and normal(m.text) not in by_template()
    }
    assert not missing, "\n".join(sorted(missing))


def test_whatever_is_raised_is_collected():
    silent = {"SystemExit", "FitDone", "Interrupted", "mark"}  # without a text, as what cancels
    names = {name for _, name in raised() if not name.endswith("Error") and not name.startswith("Cancel")}
    assert names <= {*ENDS, *MAKERS} | silent


def test_no_entry_has_a_message_that_is_in_the_source_no_more():
    there = {normal(m.text) for m in found()}
    assert not [template for template in by_template() if template not in there]


def test_messages_without_words_are_those_of_other_errors():
    bare = Counter(m.place.partition(":")[0] for m in found() if len(words(m.text)) < 2)
    assert bare == PASSED_ON


def test_a_message_is_in_one_entry_and_an_entry_says_what_to_do():
    templates = Counter(normal(template) for entry in entries() for template in entry.templates)
    assert not [template for template, n in templates.items() if n > 1]
    slugs = Counter(re.findall(r"^\((.+)\)=$", (ROOT / "nbs/errors.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert slugs == Counter(entry.slug for entry in entries())  # so all were understood, and each is there once
    assert not [entry.slug for entry in entries() if len(entry.text) < 80]


def test_long_messages_end_with_the_address_of_their_entry():
    without = {f"{m.place}: {m.text}" for m in found() if needs_address(m) and address(m.text) is None}
    assert not without, "\n".join(sorted(without))
    assert not [m for m in found() if (slug := address(m.text)) and by_template()[normal(m.text)].slug != slug]
    assert not [m for m in found() if "errors.html" in normal(m.text)]  # only at the end


def test_addresses_in_the_source_are_entries():
    slugs = {entry.slug for entry in entries()}
    for file in (ROOT / "learnerkit").rglob("*.py"):
        assert not set(re.findall(r"errors\.html#([\w-]+)", file.read_text(encoding="utf-8"))) - slugs, file


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


def test_a_message_with_values_finds_its_entry():
    values = ["0.01", "'valid_los'", "Sequential", "(64, 10)", "/tmp/some where/model.pth", "rank 1, rank 2"]
    asked = [
        (t, entry.slug)
        for i, (t, entry) in enumerate(sorted(by_template().items()))
        if i % 14 == 0 and len(words(t)) > 5
    ]
    texts = ["ValueError: " + values[len(t) % 6].join(t.split("{}")) for t, _ in asked]
    shown = search(*texts)
    wrong = [(text, slug, first) for text, (_, slug), first in zip(texts, asked, shown, strict=True)
             if f"errors.html#{slug}" not in first[:1]]  # fmt: skip
    assert not wrong


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
    assert [each[:1] for each in shown] == [["errors.html#drift"], ["errors.html#drift"], [], [], []]
