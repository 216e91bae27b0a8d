"""Searches in processes of their own."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from launching import SCRIPTS, environment
from sweep_searches import LIMIT, Search, runs, states, wait_for, write_config

from learnerkit import sweep
from learnerkit.sweep.cli import main
from learnerkit.sweep.workers import share_out


@pytest.fixture
def search():
    """Start searches; none outlives the test."""
    with ExitStack() as started:
        yield lambda *options, **more: started.enter_context(Search(*options, **more))


@pytest.mark.soak
def test_kills_and_errors_cost_one_trial_each(search):
    write_config(maxCombo=14, retryLimit=1)
    fates = {2: "kill", 5: "kill", 7: "kills", 3: "raise", 4: "exit", 6: "silent"}
    code, printed = search("-j", 3, FATES=fates).end()
    assert code == 0, printed
    found = states(printed)
    assert found.keys() == set(range(14)), printed
    assert found[3] == "failed (exit code 1): MemoryError: no more memory"
    assert found[4] == "failed (exit code 3)"
    assert found[6] == "failed: no loss was reported, neither by sweep.report nor in its output"
    assert found[7].startswith("failed: was killed by signal 9")
    assert [len(runs(number)) for number in range(14)] == [1, 1, 2, 1, 1, 2, 1, 2, 1, 1, 1, 1, 1, 1]
    assert [found[number] for number in (2, 5)] == ["complete (run 2)"] * 2
    assert [found[number] for number in (0, 1, *range(8, 14))] == ["complete"] * 8
    assert printed.count("is run again: was killed by signal 9 (SIGKILL)") == 3
    values = {number: abs(runs(number)[0]["x"]) for number in range(14) if "complete" in found[number]}
    best = min(values, key=values.get)
    assert f"14 of 14 trials: 10 complete, 4 failed, best loss {values[best] ** 2:.5g} (trial {best})" in printed
    line = rf"LEARNERKIT_PARAMS='(.*)' (python .*sweep_trial.py)\n  its files: sweeps/c/trials/{best}\n"
    ((given, command),) = re.findall(line, printed)
    done = subprocess.run(
        [sys.executable, *command.split()[1:]], env=environment() | {"LEARNERKIT_PARAMS": given}, capture_output=True,
        text=True, timeout=LIMIT,
    )  # fmt: skip
    assert float(done.stdout.split()[1]) == values[best] ** 2
    assert "importance: x 100%" in printed
    assert len(re.findall(r"\n  its output: sweeps/c/trials/[346]/attempt-0/rank-0.log\n|ends with: ", printed)) == 1
    assert "MemoryError" in Path("sweeps/c/trials/3/attempt-0/rank-0.log").read_text()
    # Started again, it has nothing to do; with more trials it goes on, and with other parameters it is refused.
    code, printed = search("-j", 3).end()
    assert (code, states(printed)) == (0, {})
    assert "going on: 14 of 14 trials" in printed
    write_config(maxCombo=16, retryLimit=1)
    code, printed = search("-j", 3).end()
    assert (code, states(printed)) == (0, {14: "complete", 15: "complete"})
    write_config(maxCombo=16, seed=4)
    code, printed = search().end()
    assert (code, printed.count("\n")) == (2, 1)
    assert "sweeps/c has a search in which seed was different: give --dir for a new one" in printed
    assert os.listdir("sweeps/c/running") == []


@pytest.mark.soak
def test_a_search_that_is_killed_goes_on_also_on_a_machine_that_joins(search):
    write_config(maxCombo=8, retryLimit=1)
    first = search("-j", 2, FATES={1: "wait", 2: "wait"})
    wait_for(lambda: runs(1) and runs(2))
    children = [runs(number)[0]["pid"] for number in (1, 2)]
    first.process.kill()
    wait_for(lambda: not any(map(psutil.pid_exists, children)))  # they die with it
    first.end()
    both = [search("-j", 1), search("--join", "sweeps/c", "-j", 1, script=None)]
    ended = [each.end() for each in both]
    for code, printed in ended:
        assert code == 0, printed
        assert "8 of 8 trials: 8 complete" in printed
    assert any("is run again: was killed with the process that had started it" in printed for _, printed in ended)
    assert [len(runs(number)) for number in range(8)] == [1, 2, 2, 1, 1, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.soak)]
)
def test_ctrl_c_stops_all_and_keeps_everything(search, signum, code):
    write_config(maxCombo=4, retryLimit=0)
    first = search("-j", 2, FATES={1: "wait", 2: "wait"})
    wait_for(lambda: runs(0) and runs(1) and runs(2))
    first.process.send_signal(signum)
    found, printed = first.end()
    assert found == code, printed
    assert not any(psutil.pid_exists(runs(number)[0]["pid"]) for number in (0, 1, 2))
    assert "1 of 4 trials: 1 complete" in printed
    assert printed.count(f"{signal.Signals(signum).name} received, waiting for the trials to stop") == 1
    assert "stopped; the same command goes on with the search" in printed
    found, printed = search("-j", 2).end()
    assert found == 0, printed
    assert states(printed) == {1: "complete (run 2)", 2: "complete (run 2)", 3: "complete"}


@pytest.mark.soak
def test_it_goes_on_when_nobody_reads_what_it_prints(search):
    write_config(maxCombo=2)
    running = search("-j", 1, PYTHONUNBUFFERED="")
    running.process.stdout.close()
    assert running.process.wait(LIMIT) == 0
    running.process.stdout = None
    assert [row.state for row in sweep.load("sweeps/c").trials] == ["complete"] * 2


@pytest.mark.soak
def test_standard_files_that_are_closed_are_no_obstacle():
    write_config(maxCombo=1)
    command = 'exec "$0" -m learnerkit.sweep c.json "$1" <&- >&- 2>&-'
    words = [sys.executable, SCRIPTS / "sweep_trial.py"]
    assert subprocess.run(["sh", "-c", command, *words], env=environment(), timeout=LIMIT).returncode == 0
    assert [row.state for row in sweep.load("sweeps/c").trials] == ["complete"]


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["trials", "search"])
@pytest.mark.parametrize("time", range(5))
def test_64_trials_with_3_kills_end_with_64_results(search, victim, time):
    write_config(maxCombo=64, seed=time)
    pick = random.Random(time)
    running = search("-j", 3, SLEEP="0.1")
    for kill in range(3):
        begun = 16 * (kill + 1) + pick.randrange(8)
        wait_for(lambda: Path(f"sweeps/c/trials/{begun}/runs").exists())  # noqa: B023
        if victim == "search":
            running.process.kill()
            running.end()
            running = search("-j", 3, SLEEP="0.1")
        else:
            process = psutil.Process(running.process.pid)
            with suppress(psutil.NoSuchProcess):
                pick.choice(wait_for(process.children)).kill()
    code, printed = running.end()
    assert code == 0, printed
    assert "64 of 64 trials: 64 complete" in printed
    found = sweep.load("sweeps/c")
    assert [trial.state.name for trial in found.study.trials].count("COMPLETE") == 64
    frame = found.frame()
    assert list(frame.index) == list(range(64))
    assert frame["x"].nunique() == 64
    assert (frame["loss"] == frame["x"] ** 2).all()
    assert all(frame["attempts"][number] >= len(runs(number)) > 0 for number in range(64))  # or killed before its note
    assert 64 < frame["attempts"].sum() <= 64 + 9


@pytest.mark.soak
def test_each_trial_has_gpus_and_threads_of_its_own(search):
    write_config(maxCombo=4)
    env = {"CUDA_VISIBLE_DEVICES": "3,5,GPU-a,7,8", "OMP_NUM_THREADS": ""}
    code, printed = search("-j", 2, "--nproc", 2, FATES={0: "kill"}, **env).end()
    assert code == 0, printed
    seen = [{run["CUDA_VISIBLE_DEVICES"] for run in runs(number)} for number in range(4)]
    assert {gpus for each in seen[1:] for gpus in each} <= {"3,5", "GPU-a,7"}
    assert [len(each) for each in seen[1:]] == [1, 1, 1]  # both ranks of a trial
    assert {(run["RANK"], run["WORLD_SIZE"]) for run in runs(3)} == {("0", "2"), ("1", "2")}
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    assert runs(3)[0]["OMP_NUM_THREADS"] == str(max(1, cores // 4))
    assert re.search(r" (3,5|GPU-a,7) +00:.* complete\n", printed)
    assert "-m learnerkit.launch --nproc 2 " in printed
    code, printed = search("-j", 3, "--nproc", 2, **env).end()
    assert (code, printed.count("\n")) == (2, 1)
    assert "-j 3 with --nproc 2: each process needs a GPU of its own, and 5 can be used" in printed


OWN = """
import json, sys
assert sys.argv[1:4] == ["--quick", "yes", "--x"] and sys.argv[5] == "--n-layers", sys.argv
x, n = float(sys.argv[4]), int(sys.argv[6])
with open("log.jsonl", "w") as file:
    for i in range(3):
        print(json.dumps({"step": i, "score": x * i}), file=file)
"""


@pytest.mark.soak
def test_a_script_that_knows_nothing_of_it(search):
    parameters = {"x": {"type": "float", "min": 0, "max": 1}, "n-layers": {"type": "int", "min": 1, "max": 3}}
    write_config(maxCombo=3, metric="score", objective="maximize", parameters=parameters)
    Path("own.py").write_text(OWN)
    code, printed = search("--as-arguments", "c.json", "own.py", "--quick", "yes", script=None).end()
    assert code == 0, printed
    logged = [json.loads(line) for line in Path("sweeps/c/trials/0/log.jsonl").read_text().splitlines()]
    assert re.search(rf" +0 .* {logged[-1]['score']:.5g} .* complete\n", printed)
    assert re.search(r"  python own.py --quick yes --x [\d.e-]+ --n-layers \d\n", printed)


def test_where_the_first_failure_is_told_of_and_what_it_said_last(search):
    write_config(maxCombo=2)
    Path("own.py").write_text("import sys\nprint('it began')\nsys.exit('conf.yaml is\\x1b[2J not there')")
    code, printed = search("-j", "1", "c.json", "own.py", script=None).end()
    assert code == 1, printed
    said = "  sweeps/c/trials/0/attempt-0/rank-0.log ends with: conf.yaml is\\x1b[2J not there\n"
    assert printed.count(" ends with: ") == printed.count(said) == 1, printed


@pytest.mark.slow
def test_where_options_stand_is_said_if_the_script_has_got_one(search):
    write_config(maxCombo=1)
    Path("own.py").write_text("print('loss: 1')")
    code, printed = search("-j", "1", "c.json", "own.py", "-j", "2", "--nproc=2", script=None).end()
    assert code == 0, printed
    assert printed.startswith(
        "learnerkit.sweep: --nproc stands behind the script, so the script has got it; "
        "options of the search stand before it: --nproc ... c.json own.py\n"
    ), printed


def test_a_script_that_does_not_ask_for_the_values_is_told_once(search):
    write_config(maxCombo=2)
    Path("own.py").write_text("print('loss: 1')")
    said = "the script has not called sweep.params: unless it reads LEARNERKIT_PARAMS itself, all trials have the same"
    code, printed = search("-j", "1", "c.json", "own.py", script=None).end()
    assert (code, printed.count(said)) == (0, 1), printed
    Path("own.py").write_text("from learnerkit import sweep\nprint('loss:', sweep.params(x=1).x)")
    code, printed = search("-j", "1", "--dir", "asks", "c.json", "own.py", script=None).end()
    assert (code, printed.count(said)) == (0, 0), printed


@pytest.mark.soak
def test_a_module_that_runs_in_the_present_folder(search):
    write_config(maxCombo=2)
    Path("own.py").write_text(
        "import os\nfrom learnerkit import sweep\nopen('seen', 'a').write('x')\nprint('loss =', sweep.params(x=1).x)\n"
    )
    code, printed = search("--here", "--dir", "found", "c.json", "-m", "own", script=None).end()
    assert code == 0, printed
    assert Path("seen").read_text() == "xx"
    assert re.search(r"  LEARNERKIT_PARAMS='.*' python -m own\n", printed)
    code, printed = search("--dir", "found", "c.json", "-m", "own", script=None).end()
    assert (code, "has a search in which --here was different" in printed) == (2, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["c.json"], "name a config and a script"),
        (["c.json", "none.py"], "'none.py' is not a file"),
        (["none.json", "t.py"], "none.json cannot be read"),
        (["-j", "0", "c.json", "t.py"], "-j 0: give a number, 1 or more"),
        (["--join", "nowhere"], "nowhere is not the directory of a search: it has no sweep.json"),
        (["--join", "nowhere", "--nproc", "2"], "--join goes with -j and --gpus alone"),
        (["--join", "."], "sweep.json: there is no command to run"),
        (["--dir", ".", "c.json", "t.py"], "has a search in which command was different"),
        (["--as_arguments", "c.json"], "name a config and a script"),
        (["--gpus", "0", "c.json", "t.py"], "--gpus 0: no GPU can be used here"),
    ],
)
def test_a_command_that_cannot_be_used_is_one_line(words, said, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    write_config()
    Path("t.py").touch()
    Path("sweep.json").write_text(f'{{"config": {Path("c.json").read_text()}}}')
    monkeypatch.setattr(sys, "argv", ["learnerkit.sweep", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert said in printed.err
    assert not Path("sweeps").exists()  # else the right command would be refused, as it is another one


def test_a_search_of_another_version_is_gone_on_with_or_refused_in_one_line(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    write_config(maxCombo=1)
    Path("t.py").write_text("print('loss: 1')")
    assert main(["--dir", "there", "c.json", "t.py"]) == 0
    plan = json.loads(Path("there/sweep.json").read_text())
    del plan["command"]["search"]
    Path("there/sweep.json").write_text(json.dumps(plan))
    assert main(["--dir", "there", "c.json", "t.py"]) == 0
    plan["command"]["later"] = True
    Path("there/sweep.json").write_text(json.dumps(plan))
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["--join", "there"])
    printed = capsys.readouterr().err
    assert "sweep.json: another version of learnerkit has begun this" in printed
    assert "'later'" in printed


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("os.remove('../../journal.log')", "a file of the search cannot be used: [Errno 2]"),
        pytest.param(
            "open('../../journal.log', 'a').write('x\\n')", "journal.log is damaged (JSONDecodeError",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_trial_that_damages_the_search_ends_it_in_one_line(line, said, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    write_config(maxCombo=2)
    Path("t.py").write_text(f"import os\n{line}\nprint('loss: 1')")
    with pytest.raises(SystemExit) as ended:
        main(["c.json", "t.py"])
    err = capsys.readouterr().err
    assert (ended.value.code, err.count("\n")) == (1, 1)
    assert said in err


def test_gpus_are_shared_out():
    assert share_out([], None, 2) == [None]
    assert share_out([], 3, 1) == [None] * 3
    assert share_out(["0", "1", "2"], None, 1) == ["0", "1", "2"]
    assert share_out(["0", "1", "2"], None, 2) == ["0,1"]
    assert share_out(["0", "1", "2", "3"], 2, 1) == ["0", "1"]
