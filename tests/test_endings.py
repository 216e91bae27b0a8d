"""How an exception ends a run: the typed form, and the way of an error from a rank to what the launcher prints."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass

import pytest
from launching import SCRIPTS, environment

from learnerkit import CancelFitException
from learnerkit.checkpoints.callback import Stopped
from learnerkit.distributed import PeerError
from learnerkit.endings import Ending, ExceptionReport, ending_of, mark, may_follow, raised_in
from learnerkit.processes import rank_main

FULL = Ending(True, True, True, 15, 1, "before_batch", "Fails", 2, 3, "ValueError: the cause", "training")


def test_every_field_goes_through_json_and_back():
    assert all(value != default for value, default in zip(vars(FULL).values(), vars(Ending()).values(), strict=True))
    assert Ending.of(json.loads(json.dumps(vars(FULL)))) == FULL
    report = ExceptionReport(1.5, 3, "ValueError: x", "whole", "brief", FULL)
    assert ExceptionReport.from_json(report.to_json()) == report
    assert ExceptionReport.from_json(ExceptionReport().to_json()) == ExceptionReport()


def test_what_another_version_writes_is_read_as_far_as_it_is_known():
    assert Ending.of({"rank": 1, "colour": "red"}) == Ending(rank=1)
    text = json.dumps({"code": 2, "size": 3, "ending": {"follows": True, "since": 0.1}})
    assert ExceptionReport.from_json(text) == ExceptionReport(code=2, ending=Ending(follows=True))
    assert ExceptionReport.from_json("{}") == ExceptionReport()
    with pytest.raises(ValueError, match="Expecting value"):  # of a process that was killed
        ExceptionReport.from_json(b"")


def test_an_exception_is_marked_bit_by_bit():
    error = ValueError("x")
    assert ending_of(error) == ending_of(None) == Ending()
    assert mark(error, rank=1) is error
    mark(error, agreed=True)
    assert ending_of(error) == Ending(agreed=True, rank=1)
    assert ending_of(ValueError("x")) == Ending()
    with pytest.raises(TypeError, match="'colour'"):
        mark(error, colour="red")


def test_an_exception_that_refuses_assignments_is_marked_too():
    @dataclass(frozen=True)
    class Frozen(Exception):
        code: int = 1

    assert ending_of(mark(Frozen(), rank=1)) == Ending(rank=1)


def test_the_innermost_hook_has_raised_it():
    error = ValueError("x")
    for callback in ("Inner", "Outer"):
        raised_in(error, "after_batch", callback)
    assert (ending_of(error).event, ending_of(error).callback) == ("after_batch", "Inner")
    assert error.__notes__ == ["raised in Inner.after_batch"]


def test_the_packages_own_exceptions_say_how_they_end_a_run():
    assert ending_of(CancelFitException("x")) == Ending()
    assert ending_of(CancelFitException(agreed=True)) == Ending(agreed=True)
    assert ending_of(PeerError("x")) == Ending(follows=True)
    error = pickle.loads(pickle.dumps(PeerError("x", standstill=True)))
    assert (str(error), ending_of(error)) == ("x", Ending(follows=True, standstill=True))
    assert ending_of(Stopped()) == Ending(agreed=True, signal=15)


def test_what_may_follow_another_ranks_failure():
    assert may_follow(PeerError("x"))
    assert may_follow(mark(ValueError("x"), follows=True))
    assert may_follow(RuntimeError("Connection closed by peer"))
    assert not may_follow(ValueError("x"))


def test_the_first_cause_comes_first():
    first, second = ExceptionReport(1.0), ExceptionReport(2.0)
    follower, ended = ExceptionReport(0.5, ending=Ending(follows=True)), ExceptionReport()
    assert sorted([follower, second, first, ended], key=lambda r: r.order) == [ended, first, second, follower]


def test_a_rank_reports_what_is_known_of_its_error(tmp_path):
    errors = {ValueError("x"): "ValueError: x", SystemExit(3): "", KeyboardInterrupt(): "KeyboardInterrupt"}
    for error, text in [*errors.items(), *((mark(error, **vars(FULL)), text) for error, text in errors.items())]:
        rank_main.write_report(os.open(tmp_path / "report", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 3, error)
        report = ExceptionReport.from_json((tmp_path / "report").read_bytes())
        assert (report.code, report.error, report.ending) == (3, text, ending_of(error))


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["ValueError", "RuntimeError"])
@pytest.mark.parametrize("place", ["hook", "model"])
def test_an_error_passes_ten_files_up_to_the_launchers_print(place, kind):
    """The script says which files count: cleanups and what else puts things back are left out."""
    command = [sys.executable, str(SCRIPTS / "error_way.py"), place, kind]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    where = "before_batch of Fails" if place == "hook" else "the loop, after before_batch"
    assert f"rank 1 failed (exit code 1) in {where} (epoch 0, step 2)" in done.stderr
    on_rank, in_launcher = (
        set(json.loads(line[8:])) for line in done.stdout.splitlines() if line.startswith("passed: ")
    )
    assert {"endings.py", "parallel/agreement.py", "parallel/watch.py", "processes/rank_main.py"} <= on_rank
    assert {"endings.py", "launch/supervise.py", "launch/report.py"} <= in_launcher
    passed = on_rank | in_launcher | {"learner.py"}  # the learner calls what explains the error
    assert len(passed) <= 10, sorted(passed)
