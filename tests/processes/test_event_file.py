"""The file of events: whole lines of several writers, and a file that cannot be written."""

import json
import os
from datetime import UTC, datetime
from threading import Thread

import pytest

from learnerkit.processes.event_file import EventFile, check_file, facts_of_launch


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_the_time_the_event_the_node_and_the_attempt(tmp_path):
    path = tmp_path / "events.jsonl"
    EventFile(print, str(path), node=1, attempt=2).write("saved", path="a\nb\ud800", step=3)
    (line,) = lines(path)
    age = datetime.now(UTC) - datetime.fromisoformat(line.pop("time"))
    assert 0 <= age.total_seconds() < 60
    assert line == {"event": "saved", "node": 1, "attempt": 2, "path": "a\nb\ud800", "step": 3}


def test_lines_of_several_writers_are_whole(tmp_path):
    path = tmp_path / "events.jsonl"
    writers = [EventFile(print, str(path), node=node) for node in range(4)]
    threads = [Thread(target=lambda w=w: [w.write("step", text="x" * 9999) for _ in range(50)]) for w in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(line["node"] for line in lines(path)) == [0] * 50 + [1] * 50 + [2] * 50 + [3] * 50


def test_a_file_that_others_have_moved_away_begins_again(tmp_path):
    path, moved = tmp_path / "events.jsonl", tmp_path / "moved"
    file = EventFile(print, str(path))
    for _ in range(2):
        file.write("step")
        os.replace(path, moved)
    assert len(lines(moved)) == 1


def test_a_line_that_cannot_be_written_is_told_once(tmp_path):
    said = []
    path = tmp_path / "gone" / "events.jsonl"
    file = EventFile(said.append, str(path))
    for _ in range(3):
        file.write("step")
    assert said == [
        f"{path} cannot be written (No such file or directory), so that it is not complete; training goes on"
    ]


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert json.loads(EventFile(print).write("step"))["event"] == "step"
    assert list(tmp_path.iterdir()) == []


def test_only_the_process_that_is_named_takes_part(monkeypatch):
    facts = {"path": "events.jsonl", "node": 0, "attempt": 1}
    for process, expected in ((os.getpid(), facts), (os.getppid(), {})):
        monkeypatch.setenv("LEARNERKIT_EVENTS", json.dumps({"process": process} | facts))
        assert facts_of_launch() == expected
    monkeypatch.delenv("LEARNERKIT_EVENTS")
    assert facts_of_launch() == {}


def test_a_file_is_made_and_an_old_one_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_file("--events", "new") == str(tmp_path / "new")
    (tmp_path / "old").write_text("a line\n")
    check_file("--events", "old")
    assert [(tmp_path / name).read_text() for name in ("new", "old")] == ["", "a line\n"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing/file", "No such file or directory"),
        (".", "it is not a regular file"),
        ("pipe", "it is not a regular file"),  # which nobody reads, so that to open it would wait
        ("/dev/null", "it is not a regular file"),
    ],
)
def test_what_is_no_regular_file_is_refused(tmp_path, monkeypatch, name, why):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(ValueError, match=f"^--events {name}: {why}; name a regular file that can be written$"):
        check_file("--events", name)
