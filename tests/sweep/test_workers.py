"""The slots of a search, in this process: what a signal does between two trials."""

import argparse
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from learnerkit.launch.supervise import Attempt
from learnerkit.sweep.config import make_config
from learnerkit.sweep.study import Study
from learnerkit.sweep.workers import Command, Workers


@pytest.fixture
def workers(tmp_path):
    """One slot, for two trials of a script that ends at once."""
    script = tmp_path / "trial.py"
    script.write_text("print('loss: 1')")
    x = {"type": "float", "min": 0, "max": 1}
    study = Study(tmp_path / "search", make_config({"algorithm": "random", "maxCombo": 2, "parameters": {"x": x}}))
    return Workers(study, Command([str(script)], start=str(tmp_path)), [None])


def states(workers):
    return [(row.state, row.attempt, row.cause) for row in workers.study.rows()]


def test_a_signal_between_two_trials_is_not_for_the_next(workers):
    workers._tell(signal.SIGUSR1)  # which kills a process that does not expect it
    workers.run(lambda: None)
    assert states(workers) == [("complete", 0, "")] * 2


def test_a_trial_that_has_ended_before_the_signal_counts(workers, monkeypatch):
    def agree_on_end(attempt, outcome):
        workers._hear(signal.SIGINT)
        time.sleep(0.2)
        return outcome

    monkeypatch.setattr(Attempt, "agree_on_end", agree_on_end)
    workers.run(lambda: None)
    assert workers.stopped_by == signal.SIGINT
    assert states(workers) == [("complete", 0, "")]


def test_a_trial_that_is_taken_while_the_search_stops_is_not_begun(workers):
    run = workers.study.take()
    workers._stopping.set()
    outcome = workers._launch(run, 0)
    workers.study.finish(run, *workers._judge(run, outcome))
    assert states(workers) == [("waiting", 1, "was stopped by SIGTERM")]
    assert not Path(workers.study.folder, "trials").exists()


def test_a_trial_that_removes_its_folder_fails_alone(workers):
    Path(workers.command.words[0]).write_text("import os, shutil\nshutil.rmtree(os.getcwd())\nraise ValueError")
    workers.run(lambda: None)
    assert states(workers) == [("failed", 0, "failed (exit code 1): ValueError")] * 2


def test_a_trial_without_a_folder_has_printed_nothing(workers):
    assert workers._printed(workers.study.take()) is None


def test_a_trial_that_prints_no_value_when_it_is_run_again_has_that_of_the_run_before(workers):
    run = replace(workers.study.take(), attempt=2)
    folder = workers._folder(run)
    for attempt, text in enumerate(("loss: 1", "loss: 0.5", "nothing is trained")):
        log = folder / f"attempt-{attempt}" / "rank-0.log"
        log.parent.mkdir(parents=True)
        log.write_text(text)
    assert workers._printed(run) == 0.5
    (folder / "latest.json").symlink_to("removed.json")
    (folder / "log.jsonl").write_text('{"loss": 0.25}')
    assert workers._printed(run) == 0.25


def test_arguments_can_be_parsed():
    values = {"x": -1e-05, "y": -0.5, "n-layers": 3, "act": "relu"}
    words = Command(["t.py"], as_arguments=True).with_values(values)
    assert words == ["t.py", "--x=-1e-05", "--y=-0.5", "--n-layers", "3", "--act", "relu"]
    parser = argparse.ArgumentParser()
    for name, value in values.items():
        parser.add_argument(f"--{name}", type=type(value))
    assert vars(parser.parse_args(words[1:])) == {"x": -1e-05, "y": -0.5, "n_layers": 3, "act": "relu"}
