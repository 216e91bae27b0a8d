"""The command `learnerkit`: what it prints, and that it hands on to the launcher, the search and the doctor."""

import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version

import pytest

import learnerkit
from learnerkit import __main__ as command
from learnerkit.processes.machine import usable_cores


def test_by_itself_it_prints_versions_the_machine_and_the_commands(capsys):
    assert command.main([]) == 0
    printed = capsys.readouterr().out
    first, second, third, *_ = printed.splitlines()
    assert first == f"learnerkit {learnerkit.__version__}"
    assert second.endswith(f", torch {version('torch')}")
    assert f"{usable_cores()} CPU cores, " in third
    assert re.findall(r"^  learnerkit (\w+)", printed, re.MULTILINE) == list(command.COMMANDS)


def test_it_counts_the_gpus_of_this_process(monkeypatch):
    for visible, text in (("", "no GPU of NVIDIA or AMD"), ("0", "1 GPU"), ("2,3", "2 GPUs")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert command.machine().endswith(f", {text}")


def test_it_tells_its_version(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"learnerkit {learnerkit.__version__}\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lunch", "train.py"], "there is no command 'lunch'; did you mean 'launch'?"),
        (["train.py"], "there is no command 'train.py'; the commands are launch, sweep, doctor"),
        (["--verson"], "unrecognized arguments: --verson; did you mean '--version'?"),
        (["launch", "--nprocs", "2", "train.py"], "unrecognized arguments: --nprocs; did you mean '--nproc'?"),
        (["doctor", "--gpu", "0"], "learnerkit.doctor: error: unrecognized arguments: --gpu; did you mean '--gpus'?"),
        (["sweep", "--asarguments"], "unrecognized arguments: --asarguments; did you mean '--as-arguments'?"),
    ],
)
def test_what_it_does_not_know_leads_to_what_it_does(words, says, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("name", command.COMMANDS)
def test_a_command_gets_its_arguments_untouched(name, monkeypatch):
    got = []
    monkeypatch.setattr(f"{command.COMMANDS[name]}.main", lambda argv: got.append(argv) or 7)
    assert command.main([name, "--version", "launch", "--", "-h", ""]) == 7
    assert got == [["--version", "launch", "--", "-h", ""]]


def test_the_launcher_keeps_exit_codes_and_signals(tmp_path, script_env):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time; print(sys.argv[1:], flush=True); time.sleep(600 * (len(sys.argv) < 3)); sys.exit(3)"
    )
    start = [sys.executable, "-m", "learnerkit", "launch", str(script), "--version"]
    with subprocess.Popen([*start, "--nproc"], stdout=subprocess.PIPE, text=True, env=script_env) as done:
        assert (done.communicate()[0], done.returncode) == ("['--version', '--nproc']\n", 3)
    with subprocess.Popen(start, stdout=subprocess.PIPE, text=True, env=script_env) as stopped:
        assert stopped.stdout.readline() == "['--version']\n"
        os.kill(stopped.pid, signal.SIGTERM)
    assert stopped.returncode == 128 + signal.SIGTERM
