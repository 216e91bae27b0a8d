import io
import re

from learnerkit.sweep.config import make_config
from learnerkit.sweep.screen import Screen, number
from learnerkit.sweep.study import Row, best_of

CONFIG = make_config(
    {
        "metric": "acc",
        "objective": "maximize",
        "n_trials": 9,
        "parameters": {"lr": {"type": "float", "min": 0, "max": 1}},
    }
)


class Terminal(io.StringIO):
    """A terminal: it shows what is left of all that was written."""

    def isatty(self):
        return True

    def shown(self):
        return [line.rpartition("\r")[2].rstrip() for line in self.getvalue().split("\n")]


def row(number, state, value=None, **more):
    return Row(number, state, {"lr": 0.125}, value, place="", **more)


def steps():
    """What one sees of a search, one look after another."""
    yield [row(0, "running"), row(1, "running", 0.25, epoch=1, seconds=1.5)]
    yield [
        row(0, "complete", 0.5, epoch=2, seconds=3.0),
        row(1, "running", 0.5, epoch=2, attempt=1, cause="was killed"),
    ]
    yield [
        row(0, "complete", 0.5, epoch=2, seconds=3.0),
        row(1, "complete", 0.75, epoch=2, attempt=1, seconds=2.0),
        row(2, "failed", cause="failed (exit code 1): ValueError: a\x1b[2Jb"),
        row(3, "pruned", 0.875, epoch=1, seconds=61.0),
        row(4, "running", 0.125, epoch=1, seconds=1.0),
    ]


LINES = """\
   trial         lr  epoch        acc     time  state
*      0      0.125      2        0.5  00:03.0  complete
       1      0.125      2        0.5           is run again: was killed
*      1      0.125      2       0.75  00:02.0  complete (run 2)
       2      0.125                             failed (exit code 1): ValueError: a\\x1b[2Jb
       3      0.125      1      0.875    01:01  pruned
"""


def test_a_log_has_plain_lines():
    stream = io.StringIO()
    screen = Screen(CONFIG, stream=stream)
    for rows in steps():
        for _ in range(2):
            screen.update(rows)
    screen.close()
    assert stream.getvalue() == LINES
    assert screen.summary(rows).startswith(
        "4 of 9 trials: 2 complete, 1 pruned, 1 failed, 1 running, best acc 0.75 (trial 1), 00:0"
    )


def test_a_log_has_the_counts_now_and_then(monkeypatch):
    screen = Screen(CONFIG, stream=io.StringIO())
    rows = [row(0, "running")]
    screen.update(rows)
    assert screen.stream.getvalue() == ""
    monkeypatch.setattr("learnerkit.sweep.screen.SILENT_SECONDS", -1.0)
    screen.update(rows)
    assert screen.stream.getvalue().startswith("0 of 9 trials: 1 running, 00:0")


def test_a_terminal_has_a_last_line_for_what_runs():
    screen = Screen(CONFIG, stream=Terminal())
    seen = []
    for rows in steps():
        screen.update(rows)
        seen.append(screen.stream.shown())
    assert re.fullmatch(r"0 of 9 trials: 2 running, 00:0.*; 0 epoch 0: ; 1 epoch 1: 0.25", seen[0][-1])
    assert seen[1][:-1] == LINES.splitlines()[:3]
    assert seen[2][:-1] == LINES.splitlines()
    assert seen[2][-1].startswith("4 of 9 trials: 2 complete, 1 pruned, 1 failed, 1 running, best acc 0.75 (trial 1)")
    assert seen[2][-1].endswith("; 4 epoch 1: 0.125")
    screen.close()
    assert screen.stream.shown() == [*LINES.splitlines(), ""]


def test_trials_that_ended_before_are_not_told_again():
    *_, rows = steps()
    screen = Screen(CONFIG, stream=io.StringIO())
    screen.seen(rows)
    screen.update([*rows, row(5, "complete", 0.625, seconds=1.0), row(6, "complete", 1.0, seconds=1.0)])
    lines = screen.stream.getvalue().splitlines()
    assert [(line[0], line.split()[-1]) for line in lines[1:]] == [(" ", "complete"), ("*", "complete")]


def test_of_two_that_are_as_good_the_first_is_the_best_in_all_lines():
    screen, rows = Screen(CONFIG, stream=io.StringIO()), [row(0, "complete", 0.5), row(1, "complete", 0.5)]
    screen.update(rows[:1])
    screen.update(rows)
    assert [line[0] for line in screen.stream.getvalue().splitlines()[1:]] == ["*", " "]
    assert "best acc 0.5 (trial 0)" in screen.summary(rows)
    screen = Screen(CONFIG, stream=io.StringIO())
    screen.update([row(0, "running"), rows[1]])
    screen.update(rows)  # the first has ended last
    assert f"(trial {best_of(rows, maximize=True).number})" in screen.summary(rows)


def test_gpus_have_a_column_and_other_machines_a_name(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    screen = Screen(CONFIG, with_gpus=True, stream=io.StringIO())
    rows = [Row(i, "complete", {"lr": 0.5}, 0.5, place=f"{host} GPU {i}") for i, host in enumerate(("here", "there"))]
    screen.update(rows)
    header, *lines = screen.stream.getvalue().splitlines()
    assert header.split()[4:] == ["GPU", "time", "state"]
    assert [line.replace("*", "").split()[3:] for line in lines] == [
        ["0", "complete"],
        ["1", "complete", "on", "there"],
    ]


def test_numbers_are_short():
    assert [number(x) for x in (1e-5, 0.123456789, 64, None, True, "a\nb")] == [
        "1e-05", "0.12346", "64", "", "True", "a\\nb",
    ]  # fmt: skip


def test_null_is_a_value_and_a_trial_without_values_has_none():
    choices = {"lr": {"type": "categorical", "values": [None, 0.5]}}
    screen = Screen(make_config({"metric": "loss", "parameters": choices}), stream=io.StringIO())
    screen.update([Row(0, "complete", {"lr": None}, 0.5), Row(1, "failed", cause="was killed")])
    assert [line.split()[-3:] for line in screen.stream.getvalue().splitlines()[1:]] == [
        ["None", "0.5", "complete"],
        ["failed:", "was", "killed"],
    ]
    assert "None" not in screen.stream.getvalue().splitlines()[2]
