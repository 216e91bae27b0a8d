import json
import os
import threading

import pytest
from optuna.trial import Trial

from learnerkit.sweep.config import ConfigError, make_config
from learnerkit.sweep.study import JournalError, JournalLock, Study, best_of, open_study, read_plan

X = {"x": {"type": "float", "min": 0, "max": 1}}


def study_of(tmp_path, **entries):
    entries = {"algorithm": "random", "maxCombo": 4, "seed": 1, "parameters": X} | entries
    return Study(tmp_path / "search", make_config(entries))


def end(study, state="complete"):
    """Run all trials that are left, and return their numbers, with how often each was begun."""
    found = []
    while (run := study.take()) is not None:
        study.finish(run, state, run.values["x"] if state == "complete" else None)
        found.append((run.number, run.attempt))
    return found


def states(study):
    return [(row.number, row.state, row.attempt) for row in study.rows()]


def test_two_processes_share_the_trials(tmp_path):
    one, other = study_of(tmp_path), study_of(tmp_path)
    runs = [(each, each.take()) for each in (one, other, other, one)]
    assert [run.number for _, run in runs] == [0, 1, 2, 3]
    assert len({run.values["x"] for _, run in runs}) == 4  # with the same seed
    assert one.take() is other.take() is None
    assert not other.is_over()
    for study, run in runs:
        study.finish(run, "complete", run.values["x"])
    assert one.is_over()
    assert one.rows() == other.rows()
    best = min(run.values["x"] for _, run in runs)
    assert best_of(one.rows(), maximize=False).value == best
    assert os.listdir(tmp_path / "search/running") == []


@pytest.mark.parametrize("dies", ["killed", "lost"])
def test_a_trial_that_was_killed_is_run_again_with_its_values(tmp_path, dies):
    one, other = study_of(tmp_path, retryLimit=1), study_of(tmp_path, retryLimit=1)

    def die(run):
        if dies == "killed":
            one.finish(run, "killed", None, "was killed")
        else:
            os.close(run.lock)  # as the system does when the process ends

    first = one.take()
    die(first)
    one = study_of(tmp_path, retryLimit=1)  # of a process that begins
    again = other.take()
    assert (again.number, again.attempt, again.values) == (0, 1, first.values)
    assert again.key != first.key
    other.finish(again, "complete", 0.5)
    assert [run for run in end(one) if run[0] == 0] == []
    assert states(one) == [(number, "complete", int(number == 0)) for number in range(4)]


def test_a_trial_that_is_killed_too_often_has_failed(tmp_path):
    study = study_of(tmp_path, retryLimit=1)
    for _ in range(2):
        study.finish(study.take(), "killed", None, "was killed")
    for _ in range(2):
        study.finish(study.take(), "stopped", None, "was stopped")  # which does not count
    assert end(study) == [(1, 2), (2, 0), (3, 0)]
    assert study.is_over()
    assert states(study)[0] == (0, "failed", 1)
    assert study.rows()[0].cause == "was killed"


def test_a_trial_that_two_processes_find_lost_is_run_again_once(tmp_path):
    one, other = study_of(tmp_path), study_of(tmp_path)
    run = one.take()
    trial = one.study.trials[run.key]
    other._run_again(trial, kills=True)  # the process that plans it is killed before it has said so
    os.close(run.lock)
    one = study_of(tmp_path)  # of a process that begins
    assert end(one) == [(0, 1), (1, 0), (2, 0), (3, 0)]


def test_one_that_was_lost_before_it_had_its_values_keeps_those_of_the_grid(tmp_path):
    study = study_of(tmp_path, algorithm="grid", gridSize=3)
    study._plan_next([])
    study.study.ask()  # and killed
    assert [run.values["x"] for run in iter(study.take, None)] == [0.0, 0.5, 1.0]


def test_each_set_of_values_is_repeated(tmp_path):
    study = study_of(tmp_path, trials=2, maxCombo=2)
    values = [run.values["x"] for run in iter(study.take, None)]
    assert values[0] == values[1] != values[2] == values[3]


def test_random_values_depend_on_the_seed_and_the_number_alone(tmp_path):
    found = [[run.values["x"] for run in iter(study_of(tmp_path / name).take, None)] for name in ("a", "b")]
    assert found[0] == found[1]
    again = study_of(tmp_path / "c")
    runs = [again.take() for _ in range(2)]
    again.finish(runs[1], "killed", None, "was killed")
    values = {run.number: run.values["x"] for run in [*runs, *iter(again.take, None)]}
    assert [values[number] for number in range(4)] == found[0]


def test_a_search_without_an_end_whose_first_trials_all_fail_ends(tmp_path):
    study = study_of(tmp_path, maxCombo=0)
    assert study.take() is not None  # by another worker, which goes on
    with pytest.raises(ConfigError, match="the first 10 trials have failed, and without maxCombo nothing ends it"):
        end(study, "failed")


def test_half_a_line_of_a_writer_that_was_killed_is_removed(tmp_path):
    study = study_of(tmp_path)
    study.finish(study.take(), "complete", 0.5)
    journal = tmp_path / "search/journal.log"
    whole = journal.read_bytes()
    with journal.open("ab") as file:
        file.write(b'{"op_code":5,"wor')
    assert study.rows()[0].state == "complete"  # readers pass over it
    lock = JournalLock(journal)
    lock.acquire()
    lock.release()
    assert journal.read_bytes() == whole
    assert end(study) == [(1, 0), (2, 0), (3, 0)]


def test_a_lock_is_freed_where_its_journal_is_gone(tmp_path):
    lock = JournalLock(tmp_path / "journal.log")
    with pytest.raises(FileNotFoundError):
        lock.acquire()
    (tmp_path / "journal.log").touch()
    taken = threading.Thread(target=lock.acquire, daemon=True)
    taken.start()
    taken.join(10)
    assert not taken.is_alive()
    lock.release()


PLAN = {"config": {"algorithm": "random", "parameters": X}, "command": {"words": ["t.py"]}}


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ([], r"got \[\]; it is a JSON object"),
        ({"command": PLAN["command"]}, "config: got null; it is a JSON object"),
        (PLAN | {"command": []}, r"command: got \[\]; it is a JSON object"),
        (PLAN | {"more": 1}, "more: there is no such entry; allowed are config, command"),
        (None, "it is nested too deeply"),
    ],
)
def test_a_file_of_a_search_that_was_changed_is_named(tmp_path, plan, said):
    (tmp_path / "sweep.json").write_text("[" * 200_000 if plan is None else json.dumps(plan))
    with pytest.raises(ConfigError, match=f"sweep.json: {said}"):
        read_plan(tmp_path)


@pytest.mark.parametrize("line", ["garbage", "[1]", "5", '{"a": 1}', '{"op_code": 99, "worker_id": "x"}'])
def test_a_damaged_journal_is_named(tmp_path, line):
    study = study_of(tmp_path)
    journal = tmp_path / "search/journal.log"
    journal.write_text(f"{line}\n{journal.read_text()}")
    with pytest.raises(JournalError, match=r"search/journal.log is damaged \("):
        open_study(tmp_path / "search", study.config)


def test_a_sampler_that_fails_when_it_draws_is_named(tmp_path):
    study = study_of(tmp_path, algorithm=None, sampler={"name": "TPE", "n_startup_trials": 1, "n_ei_candidates": -1})
    study.finish(study.take(), "complete", 1.0)
    with pytest.raises(ConfigError, match=r"sampler: it cannot draw values \(ValueError: negative dimensions"):
        study.take()


def test_the_values_of_pruned_and_failed_trials_are_not_the_best(tmp_path):
    study = study_of(tmp_path)
    for state, reported in (("pruned", 0.1), ("failed", 0.2), ("complete", 0.3)):
        run = study.take()
        Trial(study.study, run.trial).report(reported, 0)
        assert study.reported(run) == (reported, False)
        study.finish(run, state, reported if state == "complete" else None, "")
    assert [(row.state, row.value, row.epoch) for row in study.rows()] == [
        ("pruned", 0.1, 1), ("failed", 0.2, 1), ("complete", 0.3, 1),
    ]  # fmt: skip
    assert best_of(study.rows(), maximize=False).number == 2
    assert open_study(tmp_path / "search", study.config).best_value == 0.3
