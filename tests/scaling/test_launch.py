"""`python -m learnerkit.launch --report script.py`: the report of the first fit, in its place."""

import subprocess

import pytest
from helpers import ROOT, python

from learnerkit.launch import cli


@pytest.mark.soak
def test_the_first_fit_is_reported_and_the_script_ends(script_env):
    command = [
        python(),
        "-m",
        "learnerkit.launch",
        "--nproc",
        "2",
        "--report",
        str(ROOT / "tests/scripts/report_job.py"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=script_env, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 processes on cpu") == 1, done.stdout
    assert "rank 1 is the slowest" in done.stdout
    assert "trained" not in done.stdout


@pytest.mark.parametrize("end", ["", "import sys; sys.exit(0)"])
def test_a_script_without_a_fit_has_no_report(script_env, tmp_path, end):
    (tmp_path / "hello.py").write_text(f"print('hello')\n{end}")
    command = [python(), "-m", "learnerkit.launch", "--nproc", "2", "--report", str(tmp_path / "hello.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=script_env, timeout=120)
    # Without a buffer a rank may write between the text and the end of the line of the other one.
    assert (done.returncode, sorted(done.stdout)) == (1, sorted("hello\nhello\n"))
    assert done.stderr.count("there is no report: the script has ended, and no Learner has called fit") == 1


@pytest.mark.slow
def test_a_program_that_the_script_starts_gives_no_report_of_its_own(script_env, tmp_path):
    (tmp_path / "inner.py").write_text(
        "import torch\n"
        "from learnerkit import DataLoaders, Learner\n"
        "data = torch.utils.data.TensorDataset(torch.ones(4, 1), torch.ones(4, 1))\n"
        "Learner(DataLoaders.from_datasets(data, data, bs=2), torch.nn.Linear(1, 1), torch.nn.MSELoss()).fit(1)\n"
        "print('trained')\n"
    )
    (tmp_path / "outer.py").write_text(
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, 'inner.py'], check=True)\n"
        "subprocess.run([sys.executable, '-m', 'learnerkit.launch', 'inner.py'], check=True)\n"
    )
    command = [python(), "-m", "learnerkit.launch", "--report", "outer.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=script_env, timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stdout.count("trained")) == (1, 2), done.stderr
    assert done.stderr.count("there is no report") == 1


def test_the_ranks_are_told(capsys):
    plan = cli.parse(["--nproc", "2", "--report", __file__])
    assert plan.job.reports
    assert not cli.parse(["--nproc", "2", __file__]).job.reports
    with pytest.raises(SystemExit):
        cli.parse(["--check", "--report", __file__])
    assert "--check does not go with --report" in capsys.readouterr().err
