"""SLURM: what its environments mean, and batch scripts that run; with real daemons where SLURM is installed."""

import json
import os
import pty
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from learnerkit.clusters.slurm import advice, current_task, expand_nodes
from learnerkit.launch import cli
from learnerkit.launch.jobs import job_text

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "scripts" / "slurm_task.py"


def variables(text):
    """NAME=value ... with SLURM_ before each name but those of SLURM's daemon and of CUDA."""
    pairs = (pair.split("=", 1) for pair in text.split())
    return {name if name.startswith(("SLURMD_", "CUDA_")) else f"SLURM_{name}": value for name, value in pairs}


# Captured from SLURM 22.05; the names of the nodes are those of the test cluster.

# srun -N2 --ntasks-per-node=1 --gpus-per-node=4
ONE_PER_NODE = variables(
    "JOB_ID=1 STEP_ID=0 PROCID=1 LOCALID=0 NODEID=1 NTASKS=2 NNODES=2 JOB_NAME=bash JOB_NUM_NODES=2 GTIDS=1 "
    "JOB_NODELIST=gpu[01-02] STEP_NODELIST=gpu[01-02] STEP_NUM_NODES=2 STEP_NUM_TASKS=2 STEP_TASKS_PER_NODE=1(x2) "
    "TASKS_PER_NODE=1(x2) SLURMD_NODENAME=gpu02 GPUS_ON_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 TASK_PID=22507"
)
# srun -N2 --ntasks-per-node=4 --gpus-per-node=4
FOUR_PER_NODE = variables(
    "JOB_ID=2 STEP_ID=0 PROCID=5 LOCALID=1 NODEID=1 NTASKS=8 NNODES=2 JOB_NAME=bash JOB_NUM_NODES=2 GTIDS=4,5,6,7 "
    "JOB_NODELIST=gpu[01-02] STEP_NODELIST=gpu[01-02] STEP_NUM_NODES=2 STEP_NUM_TASKS=8 STEP_TASKS_PER_NODE=4(x2) "
    "TASKS_PER_NODE=4(x2) SLURMD_NODENAME=gpu02 GPUS_ON_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 TASK_PID=22564"
)
# srun -n3 --gpus-per-task=1
ONE_NODE = variables(
    "JOB_ID=3 STEP_ID=0 PROCID=2 LOCALID=2 NODEID=0 NTASKS=3 NNODES=1 JOB_NAME=bash JOB_NUM_NODES=1 GTIDS=0,1,2 "
    "JOB_NODELIST=gpu01 STEP_NODELIST=gpu01 STEP_NUM_NODES=1 STEP_NUM_TASKS=3 STEP_TASKS_PER_NODE=3 "
    "TASKS_PER_NODE=3 SLURMD_NODENAME=gpu01 GPUS_ON_NODE=3 CUDA_VISIBLE_DEVICES=2 TASK_PID=22616"
)
# salloc -N2 --gpus-per-node=4 bash: runs where salloc was called
SALLOC = variables(
    "JOB_ID=4 JOB_NAME=interactive JOB_NUM_NODES=2 NNODES=2 JOB_NODELIST=gpu[01-02] NODELIST=gpu[01-02] "
    "TASKS_PER_NODE=1(x2) GPUS_PER_NODE=4 JOB_CPUS_PER_NODE=1(x2)"
)
# salloc -N2 --ntasks-per-node=2, where LaunchParameters=use_interactive_step: a shell on the first node
INTERACTIVE = variables(
    "JOB_ID=5 STEP_ID=4294967290 PROCID=0 LOCALID=0 NODEID=0 NTASKS=4 NNODES=2 JOB_NAME=interactive JOB_NUM_NODES=2 "
    "GTIDS=0 JOB_NODELIST=gpu[01-02] STEP_NODELIST=gpu01 STEP_NUM_NODES=1 STEP_NUM_TASKS=1 STEP_TASKS_PER_NODE=1 "
    "TASKS_PER_NODE=2(x2) SLURMD_NODENAME=gpu01 TASK_PID=22693"
)
# sbatch -N2 --ntasks-per-node=1 --gpus-per-node=4: the shell of the script
BATCH = variables(
    "JOB_ID=6 PROCID=0 LOCALID=0 NODEID=0 NTASKS=2 NNODES=2 JOB_NAME=job.sh JOB_NUM_NODES=2 GTIDS=0 "
    "JOB_NODELIST=gpu[01-02] TASKS_PER_NODE=1(x2) SLURMD_NODENAME=gpu01 GPUS_ON_NODE=4 TASK_PID=22729"
)
# srun -N1 --pty bash
PTY_OF_ONE = variables(
    "JOB_ID=7 STEP_ID=0 PROCID=0 LOCALID=0 NODEID=0 NTASKS=1 NNODES=1 JOB_NAME=bash JOB_NUM_NODES=1 GTIDS=0 "
    "JOB_NODELIST=gpu01 STEP_NODELIST=gpu01 STEP_NUM_NODES=1 STEP_NUM_TASKS=1 STEP_TASKS_PER_NODE=1 "
    "TASKS_PER_NODE=1 SLURMD_NODENAME=gpu01 GPUS_ON_NODE=2 CUDA_VISIBLE_DEVICES=0,1 PTY_PORT=37515 TASK_PID=22954"
)
# srun -N2 -n4 --pty bash
PTY_OF_FOUR = variables(
    "JOB_ID=19 STEP_ID=0 PROCID=0 LOCALID=0 NODEID=0 NTASKS=4 NNODES=2 JOB_NAME=bash JOB_NUM_NODES=2 GTIDS=0,1,2 "
    "JOB_NODELIST=gpu[01-02] STEP_NODELIST=gpu[01-02] STEP_NUM_NODES=2 STEP_NUM_TASKS=4 STEP_TASKS_PER_NODE=3,1 "
    "TASKS_PER_NODE=3,1 SLURMD_NODENAME=gpu01 PTY_PORT=44425 TASK_PID=23005"
)
# sbatch -N1 -n1, called in a step of two tasks: the shell of the script
STALE = variables(
    "JOB_ID=18 STEP_ID=0 PROCID=0 NODEID=0 NTASKS=1 JOB_NAME=job.sh GTIDS=0 STEP_NODELIST=gpu[01-02] "
    "STEP_NUM_NODES=2 STEP_NUM_TASKS=2 STEP_TASKS_PER_NODE=1(x2) TASKS_PER_NODE=1 SLURMD_NODENAME=gpu01"
)
# srun -m arbitrary -n3, with a list of hosts which begins with gpu02: task 0 is there
ARBITRARY = variables(
    "JOB_ID=22 STEP_ID=0 PROCID=0 NODEID=1 NTASKS=3 GTIDS=0,2 STEP_NODELIST=gpu[01-02] STEP_NUM_NODES=2 "
    "STEP_NUM_TASKS=3 STEP_TASKS_PER_NODE=1,2 TASKS_PER_NODE=1,2 SLURMD_NODENAME=gpu02 DISTRIBUTION=arbitrary"
)
# salloc -n1 : -n2 srun --het-group=0,1: a step over two jobs
HETEROGENEOUS = variables(
    "JOB_ID=3 JOB_ID_HET_GROUP_0=3 JOB_ID_HET_GROUP_1=4 HET_SIZE=2 STEP_ID=0 PROCID=2 NODEID=1 NTASKS=3 GTIDS=1,2 "
    "JOB_NODELIST=gpu[01-02] STEP_NODELIST=gpu[01-02] STEP_NUM_NODES=2 STEP_NUM_TASKS=3 STEP_TASKS_PER_NODE=1,2 "
    "TASKS_PER_NODE=1,2 SLURMD_NODENAME=gpu02 DISTRIBUTION=block"
)


# Lists of nodes


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu01", ["gpu01"]),
        ("gpu[01-03,07]", ["gpu01", "gpu02", "gpu03", "gpu07"]),
        ("a1,b[2-3]c[0-1]", ["a1", "b2c0", "b2c1", "b3c0", "b3c1"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[008-010]-ib0,login", ["n008-ib0", "n009-ib0", "n010-ib0", "login"]),
        ("rack[1,3]-[01-02].example.org", [f"rack{r}-0{n}.example.org" for r in (1, 3) for n in (1, 2)]),
        ("127.0.0.[1-2]", ["127.0.0.1", "127.0.0.2"]),
        ("[1-2],7", ["1", "2", "7"]),
    ],
)
def test_lists_of_nodes_are_expanded(text, names):
    assert expand_nodes(text) == names


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,", ",a", "a,,b", "a[", "a]", "a[]", "a[1-]", "a[1,]", "a[x]", "a[1-2", "a[[1]]", "a b", "a[4,3-1]"],
)
def test_malformed_lists_of_nodes_are_refused(text):
    with pytest.raises(ValueError, match=f"^{re.escape(repr(text))} is not a list of nodes"):
        expand_nodes(text)


# Tasks


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (ONE_PER_NODE, (1, 2, False, "gpu01")),
        (FOUR_PER_NODE, (5, 8, True, "gpu01")),
        (ONE_NODE, (2, 3, True, "gpu01")),
        (HETEROGENEOUS, (2, 3, True, "gpu01")),
        (PTY_OF_FOUR, (0, 4, True, "gpu01")),  # without a terminal: started by srun in such a shell
    ],
)
def test_tasks_of_srun_know_their_place(environ, expected):
    task = current_task(environ)
    assert (task.node, task.nodes, task.is_rank, task.address) == expected
    assert advice(environ) == ""


def test_each_job_step_has_a_port_of_its_own():
    ports = set()
    for job in range(123456, 123476):
        for step in range(4):
            tasks = [
                current_task(ONE_PER_NODE | variables(f"JOB_ID={job} STEP_ID={step} PROCID={number}"))
                for number in (0, 1)
            ]
            assert [(task.node, task.nodes, task.address) for task in tasks] == [(0, 2, "gpu01"), (1, 2, "gpu01")]
            assert tasks[0].port == tasks[1].port
            ports.add(tasks[0].port)
    assert len(ports) == 80
    assert 20000 <= min(ports) <= max(ports) < 30000


SRUN = "`srun python -m learnerkit.launch ...`"


@pytest.mark.parametrize(
    ("environ", "advised"),
    [
        ({}, ""),
        ({"SLURM_CONF": "/etc/slurm.conf"}, ""),
        (SALLOC, f"this allocation has 2 nodes; {SRUN} uses them all"),
        (SALLOC | {"SLURM_JOB_NUM_NODES": "1"}, f"this shell is not on the node of its allocation; {SRUN} runs there"),
        (INTERACTIVE, f"this allocation has 2 nodes; {SRUN} uses them all"),
        (BATCH, f"this allocation has 2 nodes; {SRUN} uses them all"),
        (BATCH | {"SLURM_JOB_NUM_NODES": "1"}, ""),  # all of its GPUs can be used from here
        (BATCH | {"SLURM_STEP_ID": "4294967291", "SLURM_JOB_NUM_NODES": "1"}, ""),
        (INTERACTIVE | {"SLURM_JOB_NUM_NODES": "1"}, f"this allocation has 4 tasks; {SRUN} starts a process for each"),
        (PTY_OF_ONE, ""),
        (ONE_PER_NODE | {"SLURM_STEP_NUM_TASKS": "1"}, ""),
    ],
)
def test_tasks_of_other_launchers_are_not_taken_for_ours(environ, advised):
    assert current_task(environ) is None
    assert advice(environ) == advised


def test_a_shell_in_a_step_is_no_task(monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda fd: fd == 0)
    assert current_task(PTY_OF_FOUR) is None
    assert advice(PTY_OF_FOUR) == (
        "this allocation has 2 nodes; `srun --overlap python -m learnerkit.launch ...` uses them all"
    )
    started_by_srun = PTY_OF_FOUR | {"SLURM_TASK_PID": str(os.getpid())}
    assert current_task(started_by_srun).nodes == 4
    assert advice(started_by_srun) == ""
    assert current_task(FOUR_PER_NODE).nodes == 8


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        *[
            ({name: value for name, value in ONE_PER_NODE.items() if name != missing}, f"{missing} is not set")
            for missing in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
        ],
        (ONE_PER_NODE | variables("PROCID=one"), "SLURM_PROCID=one: this must be a number"),
        (ONE_PER_NODE | variables("STEP_ID=-1"), "SLURM_STEP_ID=-1: this must be a number"),
        (ONE_PER_NODE | variables("STEP_TASKS_PER_NODE=1(2)"), r"SLURM_STEP_TASKS_PER_NODE=1\(2\): .* 2\(x3\),1"),
        (ONE_PER_NODE | variables("STEP_NODELIST=gpu[01-"), "'gpu.01-' is not a list of nodes"),
        (STALE, r"not belong to one job step: .*_STEP_TASKS_PER_NODE=1\(x2\), SLURM_TASKS_PER_NODE=1, .*SLURM_STEP_ID"),
        (ONE_PER_NODE | variables("PROCID=2"), "not belong to one job step: .*SLURM_PROCID=2"),
        (ONE_PER_NODE | variables("STEP_NUM_TASKS=3"), "not belong to one job step"),
        (ONE_PER_NODE | variables("STEP_NODELIST=gpu[01-03]"), "not belong to one job step"),
        (ONE_PER_NODE | variables("SLURMD_NODENAME=gpu09"), "not belong to one job step: .*SLURMD_NODENAME=gpu09"),
        (ARBITRARY, "--distribution=arbitrary nothing says"),
    ],
)
def test_environments_that_cannot_be_right_are_refused(environ, message):
    with pytest.raises(ValueError, match=message):
        current_task(environ)


# Batch scripts

USUAL = {"nodes": 2, "gpus_per_node": "4", "time": "08:00:00"}


def batch_script(command, launcher=(), **options):
    return job_text("slurm", command, {"job_name": "train"} | options, launcher)


def directives(script):
    return re.findall("^#SBATCH --(.*)$", script, re.MULTILINE)


def test_the_script_has_a_directive_for_each_option():
    least = batch_script(["train.py"])
    assert directives(least) == [
        "ntasks-per-node=1", "job-name=train", "nodes=1", "output=%x-%j.out", "signal=B:USR1@120", "requeue",
        "open-mode=append",
    ]  # fmt: skip
    more = batch_script(["train.py"], **USUAL, cpus_per_task="8", mem="64G", partition="a,b", account="me@lab")
    assert set(directives(more)) - set(directives(least)) == {
        "nodes=2", "gpus-per-node=4", "time=08:00:00", "cpus-per-task=8", "mem=64G", "partition=a,b", "account=me@lab",
    }  # fmt: skip
    assert "output=%x-%j.out" in directives(more)
    files = batch_script(["train.py"], **USUAL, output="logs/%x-%j.out", error="my logs/%j.err", mem_per_cpu="4G")
    assert {"output=logs/%x-%j.out", "error='my logs/%j.err'", "mem-per-cpu=4G"} <= set(directives(files))
    assert "output=%x-%j.out" not in directives(files)
    assert "gpus-per-node=v100:4" in directives(batch_script(["train.py"], **USUAL | {"gpus_per_node": "v100:4"}))
    lines = more.splitlines()
    first_command = next(number for number, line in enumerate(lines) if line and line[0] != "#")
    assert not any("#SBATCH" in line for line in lines[first_command:])  # sbatch would not read it
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("time", ["5", "5:00", "08:00:00", "1-0", "0-0:05", "2-03:04:05", "UNLIMITED", "infinite"])
def test_limits_of_time_stand_in_the_script(time):
    assert f"#SBATCH --time={time}\n" in batch_script(["train.py"], **USUAL | {"time": time})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        *[({"time": bad}, "--time .*: give minutes") for bad in ("8h", "1:2:3:4", "1-2-3", "1-", "-5", "x-1", "::")],
        *[({"time": bad}, "--time .*: give 5 minutes or more") for bad in ("0", "4", "4:59", "00:04:59", "0-0")],
        *[
            ({name: bad}, f"--{name} {re.escape(repr(bad))}: give a text without line breaks")
            for name in ("output", "error", "partition")
            for bad in ("", " ", "a\n#SBATCH --nodes=99", "a\x00b")
        ],
        ({"sbatch": ["a\n#SBATCH --nodes=9"]}, "--sbatch .*: give a text without line breaks"),
        ({"job_name": "a\n#SBATCH --nodes=99"}, "--job_name|--job-name .*: give a text without line breaks"),
        *[
            ({"sbatch": [bad]}, f"--sbatch {bad!r}: leave --{name} out, the script relies on its own --{relied}")
            for bad, name, relied in (
                ("--signal=TERM@60", "signal", "signal=B:USR1@120"),
                ("sig=TERM", "signal", "signal=B:USR1@120"),
                ("--requeue", "requeue", "requeue"),
                ("no-requeue", "no-requeue", "requeue"),
                ("--open-mode=truncate", "open-mode", "open-mode=append"),
                ("-n 4", "ntasks", "ntasks-per-node=1"),
                ("-n4", "ntasks", "ntasks-per-node=1"),
                ("--exclusive --signal=TERM", "signal", "signal=B:USR1@120"),
                ("--ntasks=4", "ntasks", "ntasks-per-node=1"),
                ("--ntasks-per-node=4", "ntasks-per-node", "ntasks-per"),
            )
        ],
        *[
            ({"env": [bad]}, f"--env {re.escape(repr(bad))}: give NAME=VALUE")
            for bad in ("A", "=1", "1A=1", "A-B=1", "A B=1", "A =1", "É=1", "A;x=1")
        ],
        *[({"env": [bad]}, "--env .*: give a text without line breaks") for bad in ("", "A=1\nB=2", "A=\x1b")],
        *[({"setup": [bad]}, "--setup .*: give a text") for bad in ("", " ", "true\nfalse", "a\tb")],
        *[
            ({"setup": [bad]}, f"--setup: give whole shell commands; bash says .*{why}")
            for bad, why in (
                ("echo 'a", "matching `''"),
                ("if true; then", "end of file"),
                ("true \\", "near unexpected token `exit'"),
                ("cat <<E", "here-document"),
                ("a )", "near unexpected token"),
            )
        ],
    ],
)
def test_bad_values_of_script_options_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        batch_script(["train.py"], **USUAL | values)


def test_a_locale_that_is_not_installed_is_no_bad_command(monkeypatch):
    monkeypatch.setenv("LC_ALL", "xx_YY.UTF-8")  # as ssh passes it on
    assert "\nsource é\n" in batch_script(["train.py"], **USUAL, setup=["source é"])


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("--exclusive", "exclusive"),
        ("exclusive", "exclusive"),
        ("--constraint=a100|h100", "constraint=a100|h100"),
        ("--comment='run #3'", "comment='run #3'"),
        ("nodelist gpu[01-02]", "nodelist gpu[01-02]"),
        ("--mail-type=FAIL,END", "mail-type=FAIL,END"),
        ("--gpus=8", "gpus=8"),
        ("mem-bind=local", "mem-bind=local"),
    ],
)
def test_other_options_of_sbatch_stand_in_the_script(given, written):
    assert written in directives(batch_script(["train.py"], **USUAL, sbatch=["nice=3", given]))
    assert "nice=3" in directives(batch_script(["train.py"], **USUAL, sbatch=["nice=3", given]))


def test_options_of_one_letter_stand_in_the_script():
    script = batch_script(["train.py"], **USUAL, sbatch=["-C a100", "-x gpu01", "-H", "-s"])
    assert "#SBATCH -C a100\n#SBATCH -x gpu01\n#SBATCH -H\n#SBATCH -s\n" in script


SRUN_STANDIN = """\
#!/bin/bash
trap 'stopped=yes' URG
env -0 > environment
printf '%s\\0' "$SRUN_CPUS_PER_TASK" "$@" > srun
echo $$ > begun.new && mv begun.new begun
until [ "$stopped" ] || [ "$UNTIL" = end ]; do sleep 0.02; done
if [ "$stopped" ]; then sleep "$SLOW"; fi
exit "$CODE"
"""


@pytest.fixture
def run_job(tmp_path):
    """Run a batch script, with programs in SLURM's place that note down what they get."""
    programs = {
        "srun": SRUN_STANDIN,
        "scancel": '#!/bin/bash\necho "$@" >> scancel; kill -URG "$(cat begun)"\n',
        "scontrol": '#!/bin/bash\necho "$@" >> scontrol\nexit "$REFUSED"\n',
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def run(script, signals=0, code=0, slow=0, refused=0, **variables):
        (tmp_path / "job.sh").write_text(script)
        subprocess.run(["bash", "-n", "job.sh"], cwd=tmp_path, check=True)
        env = os.environ | {
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "UNTIL": "signal" if signals else "end", "CODE": str(code),
            "SLOW": str(slow), "REFUSED": str(refused), "SLURM_JOB_ID": "77", "SLURM_CPUS_PER_TASK": "8",
        } | variables  # fmt: skip
        printed = (tmp_path / "printed").open("w")
        with (
            printed,
            subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=env, stdout=printed, stderr=printed) as job,
        ):
            wait_until(lambda: (tmp_path / "begun").exists() or job.poll() is not None)
            for _ in range(signals):
                job.send_signal(signal.SIGUSR1)
                time.sleep(0.15)
            job.wait(60)
        told = {name: read(tmp_path / name) for name in ("srun", "scancel", "scontrol", "printed")}
        told["environment"] = dict(line.split("=", 1) for line in read(tmp_path / "environment").split("\0")[:-1])
        return job.returncode, told

    return run


def read(path):
    return path.read_text() if path.exists() else ""


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "this took too long"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("signals", "code", "requeued"),
    [
        (0, 0, False),
        (0, 3, False),
        (0, 143, False),  # cancelled
        (1, 143, True),  # saved
        (1, 137, True),  # killed: it was too slow to save
        (1, 0, False),  # had come to its end
        (1, 3, False),  # failed: it would again
    ],
)
def test_the_job_goes_back_into_the_queue_if_it_was_stopped(run_job, signals, code, requeued):
    ended, told = run_job(batch_script(["train.py"], **USUAL), signals, code)
    assert ended == code
    assert told["scancel"] == "--signal=URG 77\n" * signals
    assert told["scontrol"] == ("requeue 77\n" if requeued else "")


def test_several_signals_while_the_training_stops(run_job):
    ended, told = run_job(batch_script(["train.py"], **USUAL), signals=3, code=143, slow=0.8)
    assert (ended, told["scontrol"]) == (143, "requeue 77\n")


def test_a_cluster_that_does_not_requeue(run_job):
    assert run_job(batch_script(["train.py"], **USUAL), signals=1, code=143, refused=1)[0] == 143


def test_arguments_arrive_as_they_were_given(run_job):
    own = ["-m", "pkg.mod", "a b", "$HOME", "it's", '"', "x;y", "*", "", "two\nlines", "<<nodes>>", "\\", "é"]
    _, told = run_job(batch_script(own, ["--log-dir", "my logs"], **USUAL))
    launcher = ["python", "-m", "learnerkit.launch", "--log-dir", "my logs"]
    assert told["srun"].split("\0")[:-1] == ["8", "--kill-on-bad-exit=1", "--export=ALL", *launcher, *own]


MODULE = {"BASH_FUNC_module%%": '() { echo "$@" >> modules; [ "$2" != missing ]; }'}
"""As environment modules hand their function on to a job."""


def test_the_environment_is_made_before_the_training(run_job, tmp_path):
    (tmp_path / "env.sh").write_text('export FROM_FILE="$(cat modules)" HIDDEN=before\n')
    setup = ["module use here", "module load gcc/12", "source ./env.sh # mine", "cd .; true", "sleep 0 &"]
    values = {"HIDDEN": "a b", "QUOTED": 'it\'s "$HOME" `x` \\ !', "EMPTY": "", "_e9": "é=1", "BRACES": "{nodes}"}
    env = [f"{name}={value}" for name, value in values.items()]
    script = batch_script(["train.py"], **USUAL, setup=setup, env=env)
    code, told = run_job(script, **MODULE)
    assert (code, told["printed"]) == (0, "")
    assert told["environment"]["FROM_FILE"] == "use here\nload gcc/12"
    assert values.items() <= told["environment"].items()
    assert not re.search("type module|conda shell", batch_script(["train.py"], **USUAL, setup=["true"]))


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("module load missing", 1),
        ("source nowhere/bin/activate", 1),
        ("cd /nowhere && true", 1),
        ("true; (exit 7) # that is wrong", 7),
        ("no_such_command", 127),
        ("set -e; false", 1),
        ("set -u; echo $NO_SUCH_VARIABLE", 1),
    ],
)
def test_a_command_that_fails_ends_the_job(run_job, command, code):
    script = batch_script(["train.py"], **USUAL, setup=["true", command, "touch later"])
    ended, told = run_job(script, **MODULE)
    assert (ended, told["srun"]) == (code, "")
    assert not Path("later").exists()


def test_what_commands_set_does_not_keep_the_job_from_coming_back(run_job):
    script = batch_script(["train.py"], **USUAL, setup=["set -eu"])
    ended, told = run_job(script, signals=1, code=143)
    assert (ended, told["scontrol"]) == (143, "requeue 77\n")


def test_a_shell_that_does_not_know_modules_reads_the_profile(run_job, tmp_path):
    (tmp_path / "profile").write_text(f"module() {MODULE['BASH_FUNC_module%%'][3:]}\nPATH=/usr/bin:/bin\n")
    script = batch_script(["train.py"], **USUAL, setup=["true", "module load a/1", "module load b"])
    assert script.count(". /etc/profile;") == 1
    ended, told = run_job(script.replace(". /etc/profile;", ". ./profile;"))
    assert (ended, read(tmp_path / "modules")) == (0, "load a/1\nload b\n")
    assert told["environment"]["PATH"].startswith(f"{tmp_path}/bin:")  # such as that of an active venv
    (tmp_path / "begun").unlink()
    ended, told = run_job(script.replace(". /etc/profile;", ". ./nowhere;"))
    assert ended == 127
    assert "module: command not found" in told["printed"]


def test_conda_gets_its_functions(run_job, tmp_path):
    (tmp_path / "bin" / "conda").write_text(
        "#!/bin/bash\n"
        'test "$*" = "shell.bash hook" || exit 9\n'
        """echo 'conda() { export CONDA_DEFAULT_ENV="$2"; test "$2" = mine; }'\n"""
    )
    (tmp_path / "bin" / "conda").chmod(0o755)
    ended, told = run_job(batch_script(["train.py"], **USUAL, setup=["conda activate mine"]))
    assert (ended, told["environment"]["CONDA_DEFAULT_ENV"]) == (0, "mine")
    assert run_job(batch_script(["train.py"], **USUAL, setup=["conda activate other"]))[0] == 1


def readme_commands():
    """What the README of the SLURM example has one write."""
    text = (ROOT / "examples" / "slurm" / "README.md").read_text()
    found = re.findall(r"^python -m learnerkit.launch (.*?[^\\])$", text, re.MULTILINE | re.DOTALL)
    return [shlex.split(words.replace("\\\n", " ")) for words in found]


def test_the_example_is_what_is_written(tmp_path, monkeypatch, capsys):
    option, example, *words = readme_commands()[0]
    assert option == "--write-sbatch"
    monkeypatch.chdir(ROOT)
    assert cli.main([option, str(tmp_path / "job.sh"), *words]) == 0
    assert (tmp_path / "job.sh").read_text() == (ROOT / example).read_text()


def test_the_readme_shows_options_that_clusters_ask_for(tmp_path, capsys):
    Path("train.py").touch()
    assert cli.main(readme_commands()[1]) == 0
    assert "first make the folder logs: " in capsys.readouterr().out
    subprocess.run(["bash", "-n", "job.sh"], check=True)
    script = Path("job.sh").read_text()
    assert {"gpus-per-node=v100:4", "exclusive", "mail-type=FAIL", "error=logs/%x-%j.err"} <= set(directives(script))
    order = ["module load gcc/12.2", "module load cuda/12.4", "source ~/venv/bin/activate", "export OMP_NUM_THREADS=4"]
    assert [line for line in script.split("\n") if line in order] == order


# SLURM itself

DAEMONS_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
MISSING = [name for name in ("srun", "slurmctld", "slurmd", "munged") if not shutil.which(name, path=DAEMONS_PATH)]

needs_slurm = pytest.mark.skipif(
    bool(MISSING) or not hasattr(os, "geteuid") or os.geteuid() != 0,
    reason=f"not installed: {', '.join(MISSING)}" if MISSING else "SLURM's daemons need root",
)

CONFIGURATION = """\
ClusterName=scratch
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
AuthType=auth/munge
AuthInfo=socket={folder}/munge,cred_expire=15
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
LaunchParameters=use_interactive_step
SlurmdParameters=config_overrides
KillWait=2
NodeName=127.0.0.[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=8
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """SLURM on two nodes, both of them this machine, reached over loopback only."""

    def __init__(self, folder):
        self.folder = folder
        outside = {name: value for name, value in os.environ.items() if not re.match("S(LURM|RUN|BATCH|ALLOC)_", name)}
        self.env = outside | {
            "SLURM_CONF": str(folder / "slurm.conf"), "PATH": DAEMONS_PATH, "PYTHONPATH": str(ROOT),
        }  # fmt: skip

    def __call__(self, *command):
        """What a command prints."""
        done = subprocess.run([*map(str, command)], env=self.env, capture_output=True, text=True, timeout=60,
                              cwd=self.folder, stdin=subprocess.DEVNULL)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def on_terminal(self, *command):
        """What a command prints in a terminal."""
        ours, theirs = pty.openpty()
        printed = b""
        with subprocess.Popen(command, env=self.env, stdin=theirs, stdout=theirs, stderr=theirs) as process:
            os.close(theirs)
            try:
                while chunk := os.read(ours, 4096):
                    printed += chunk
            except OSError:  # the terminal's other end is closed
                pass
            os.close(ours)
            process.wait(60)
        return printed.decode()

    def is_idle(self):
        return self("sinfo", "-h", "-N", "-o", "%T").split() == ["idle", "idle"] and not self("squeue", "-h")


@contextmanager
def daemon(*command, env):
    """A daemon, for as long as this lasts; with all that it has started."""
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=env, **options) as process:
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture
def cluster(short_path):
    """Start SLURM's daemons, and end them."""
    first = free_ports()
    host = socket.gethostname().partition(".")[0]
    configuration = CONFIGURATION.format(folder=short_path, host=host, ports=range(first, first + 3))
    (short_path / "slurm.conf").write_text(configuration)
    (short_path / "key").write_bytes(os.urandom(64))
    (short_path / "key").chmod(0o600)
    for folder in ("state", "spool-127.0.0.1", "spool-127.0.0.2"):
        (short_path / folder).mkdir()
    found = Cluster(short_path)
    with ExitStack() as daemons:
        files = [f"--{name}={short_path}/munge{end}" for name, end in
                 (("socket", ""), ("pid-file", ".pid"), ("log-file", ".log"), ("seed-file", ".seed"))]  # fmt: skip
        daemons.enter_context(
            daemon("munged", "--foreground", "--force", f"--key-file={short_path}/key", *files, env=found.env)
        )
        wait_until((short_path / "munge").exists)
        daemons.enter_context(daemon("slurmctld", "-D", env=found.env))
        for node in ("127.0.0.1", "127.0.0.2"):
            daemons.enter_context(daemon("slurmd", "-D", "-N", node, env=found.env))
        wait_until(lambda: subprocess.run(["scontrol", "ping"], env=found.env, capture_output=True).returncode == 0)
        wait_until(found.is_idle)
        yield found
        found("scancel", "--full", "--user=root", "--signal=KILL")
        found("scancel", "--user=root")
        wait_until(found.is_idle)


def free_ports():
    """The first of three ports in a row that nobody listens on."""
    for first in range(40000, 60000, 3):
        try:
            with ExitStack() as sockets:
                for port in range(first, first + 3):
                    sockets.enter_context(socket.create_server(("127.0.0.1", port)))
        except OSError:
            continue
        return first
    pytest.skip("no three free ports in a row")


NODES = ["127.0.0.1", "127.0.0.2"]
SELF = [sys.executable, str(SCRIPT)]
AS_CHILD = ["bash", "-c", f"{sys.executable} {SCRIPT}; true"]


def facts(printed):
    """What the script has printed on each task: (number, count, one_gpu, addr) or None or an error; advice."""
    lines = sorted(json.loads(line) for line in re.findall(r"^\[.*\]$", printed.replace("\r", ""), re.MULTILINE))
    assert all(nodes == NODES for _, _, nodes in lines)
    assert len({task[4] for task, _, _ in lines if isinstance(task, list)}) <= 1  # the port
    return [(tuple(task[:4]) if isinstance(task, list) else task, advised) for task, advised, _ in lines]


@pytest.mark.slow
@needs_slurm
def test_tasks_of_a_real_cluster_know_their_place(cluster):
    def tasks(count, one_gpu):
        return [((number, count, one_gpu, NODES[0]), "") for number in range(count)]

    assert facts(cluster("srun", "-N2", "--ntasks-per-node=1", *SELF)) == tasks(2, False)
    assert facts(cluster("srun", "-N2", "--ntasks-per-node=2", *AS_CHILD)) == tasks(4, True)
    assert facts(cluster("srun", "-N2", "-n3", *SELF)) == tasks(3, True)
    assert facts(cluster("salloc", "-N2", "srun", *SELF)) == tasks(2, False)
    assert facts(cluster("salloc", "-N2", "srun", "-n1", "-N1", *SELF)) == [(None, "")]
    uses_all = "this allocation has 2 nodes; `srun{} python -m learnerkit.launch ...` uses them all"
    assert facts(cluster("salloc", "-N2", *SELF)) == [(None, uses_all.format(""))]
    in_shell = facts(cluster.on_terminal("srun", "-N2", "-n4", "--pty", *AS_CHILD))
    assert (None, uses_all.format(" --overlap")) in in_shell  # task 0, which has the terminal
    # a job that a step submits
    ((task, advised),) = facts(
        cluster("srun", "-N2", "bash", "-c",
                f"test $SLURM_PROCID = 1 || exit 0; sbatch -W -N2 -n4 -o out --wrap '{' '.join(SELF)}' >&2; cat out")
    )  # fmt: skip
    assert task.startswith("these variables do not belong to one job step")


@needs_slurm
@pytest.mark.soak
def test_a_training_under_srun_is_that_of_one_process(cluster):
    train = [SCRIPT.with_name("nodes_train.py")]
    launcher = [sys.executable, "-m", "learnerkit.launch"]
    cluster.env["OMP_NUM_THREADS"] = "1"
    cluster(sys.executable, *train, "alone", 2, 0)
    cluster("srun", "-N2", "--ntasks-per-node=1", *launcher, "--nproc", 2, *train, "four", 2, 0)  # one task a node
    cluster("srun", "-N2", "-n3", *launcher, *train, "three", 2, 0)  # one a GPU, if there were any
    alone, four, three = (json.loads((cluster.folder / name).read_text()) for name in ("alone", "four", "three"))
    assert (four["world"], three["world"]) == (4, 3)
    for found in (four, three):
        assert found["address"] == NODES[0]
        assert found["losses"] == pytest.approx(alone["losses"], abs=1e-9)
        weights = [np.array(p) for p in alone["weights"]]
        assert all(np.allclose(p, q, rtol=0, atol=1e-9) for p, q in zip(found["weights"], weights, strict=True))


PYTHON_STANDIN = """\
#!/bin/bash
# A launcher, and something that its ranks have started, which would die of other signals.
sleep 60 & worker=$!
trap 'kill "$worker" && exit 143' URG
echo "begun with $SLURM_CPUS_PER_TASK cores: $*"
wait "$worker"
exit 9
"""


@pytest.mark.slow
@needs_slurm
def test_a_real_batch_script_is_requeued(cluster):
    (cluster.folder / "python").write_text(PYTHON_STANDIN)
    (cluster.folder / "python").chmod(0o755)
    cluster.env["PATH"] = f"{cluster.folder}:{DAEMONS_PATH}"
    script = batch_script(["train.py", "a b"], nodes=2, time="5", job_name="try", cpus_per_task="3")
    (cluster.folder / "job.sh").write_text(script)
    job = cluster("sbatch", "--parsable", "job.sh").strip()
    output = cluster.folder / f"try-{job}.out"
    wait_until(lambda: read(output).count("begun with 3 cores: -m learnerkit.launch train.py a b\n") == 2)
    cluster("scancel", "--signal=USR1", "--batch", job)
    wait_until(lambda: {"JobState=PENDING", "Restarts=1"} <= set(cluster("scontrol", "show", "job", job).split()))
    assert "the time is nearly over" in read(output)


@pytest.mark.slow
@needs_slurm
def test_a_real_job_has_the_environment_on_all_nodes(cluster):
    (cluster.folder / "venv").mkdir()
    program = cluster.folder / "venv" / "python"
    program.write_text('#!/bin/bash\necho "$SLURMD_NODENAME: $GREETING in $PLACE"; echo "$*" >&2\n')
    program.chmod(0o755)
    (cluster.folder / "activate").write_text(f'export PATH="{program.parent}:$PATH" PLACE=unknown\n')
    options = {"nodes": 2, "time": "5", "job_name": "try", "sbatch": ["--export=NONE"]}
    files = {"output": "my logs/%x-%j.out", "error": "my logs/%x-%j.err"}
    more = {"mem_per_cpu": "1M", "setup": ["source ./activate"], "env": ["GREETING=it's $HOME", "PLACE=a  b"]}
    (cluster.folder / "my logs").mkdir()
    (cluster.folder / "job.sh").write_text(batch_script(["train.py"], **options, **files, **more))
    job = cluster("sbatch", "--parsable", "job.sh").strip()
    wait_until(lambda: "JobState=COMPLETED" in cluster("scontrol", "show", "job", job).split())
    outputs = [cluster.folder / "my logs" / f"try-{job}.{end}" for end in ("out", "err")]
    wait_until(lambda: all(len(read(output).splitlines()) == 2 for output in outputs))  # the last lines may come late
    printed = read(outputs[0])
    assert sorted(printed.splitlines()) == [f"{node}: it's $HOME in a  b" for node in NODES]
    assert read(cluster.folder / "my logs" / f"try-{job}.err") == "-m learnerkit.launch train.py\n" * 2
    more["setup"] = ["module load no-such-module"]
    (cluster.folder / "job.sh").write_text(batch_script(["train.py"], **options, **files, **more))
    job = cluster("sbatch", "--parsable", "job.sh").strip()
    wait_until(lambda: "JobState=FAILED" in cluster("scontrol", "show", "job", job).split())
    assert read(cluster.folder / "my logs" / f"try-{job}.out") == ""


@needs_slurm
@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_example_goes_on_after_its_time_limit(cluster):
    folder = cluster.folder
    script = (ROOT / "examples" / "slurm" / "train_autoencoder.sh").read_text()
    for asked, to_be_had in (("--gpus-per-node=4", "--nodes=2"), ("--cpus-per-task=32", "--cpus-per-task=2")):
        assert f"#SBATCH {asked}\n" in script
        script = script.replace(asked, to_be_had)
    (folder / "job.sh").write_text(script)
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "bin").mkdir()
    (folder / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "bin" / "python").chmod(0o755)
    cluster.env |= {"PATH": f"{folder}/bin:{DAEMONS_PATH}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    job = cluster("sbatch", "--parsable", "job.sh").strip()
    output = folder / f"train_autoencoder-{job}.out"

    def state():
        return set(cluster("scontrol", "show", "job", job).split())

    def wait_for(condition, seconds):
        try:
            wait_until(condition, seconds)
        except AssertionError:
            pytest.fail(f"this took too long: {state()}\n{read(output)}")

    saved = folder / "models"
    wait_for(lambda: list(saved.glob("autoencoder-*.pth")) and rows(read(output)), 120)
    cluster("scancel", "--signal=USR1", "--batch", job)  # as sbatch's --signal does, two minutes before the end
    wait_for(lambda: {"JobState=PENDING", "Restarts=1"} <= state(), 120)
    first = read(output)
    assert "the time is nearly over" in first
    done = len(rows(first))
    assert 0 < done < 40
    assert [path.name for path in saved.iterdir()] == [f"autoencoder-{done}.pth"]
    wait_for(lambda: {"JobState=COMPLETED", "JobState=FAILED"} & state(), 240)  # it begins after AuthInfo's cred_expire
    assert "JobState=COMPLETED" in state(), read(output)
    second = read(output).removeprefix(first)
    assert f"going on after {done} of 40 epochs\n" in second
    epochs, losses = zip(*rows(first + second), strict=True)
    assert epochs == tuple(range(40))
    assert losses[done] < 1.1 * losses[done - 1]
    assert losses[-1] < 0.02
    assert sorted(path.name for path in saved.iterdir()) == [
        "autoencoder-40.pth", "autoencoder.pth", "reconstructions.png"
    ]  # fmt: skip


def rows(printed):
    """The epoch and the validation loss of each row of the tables in what was printed."""
    found = re.findall(r"^ +([0-9]+) +[0-9.]+ +([0-9.]+) +[0-9:.]+$", printed, re.MULTILINE)
    return [(int(epoch), float(loss)) for epoch, loss in found]
