"""What SLURM says about a job: which launcher of how many this is, and a batch script for a new one.

All is read from the environment; ``scontrol`` need not be there. The variables and options are those of the manuals
of srun, sbatch and salloc (https://slurm.schedmd.com/srun.html), and were checked with version 22.05.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

FIRST_SPECIAL_STEP = 0xFFFFFFF0  # from here on: a batch script's shell, an interactive shell and the like
PORTS = range(20000, 30000)  # below those that the kernel picks
NOTICE_SECONDS = 120  # between the signal to a batch script and the time limit
LEAST_SECONDS = 300  # of a time limit: a job that was signalled as it began would be requeued for ever

_RANGES = r"\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\]"
_NODE = rf"(?:[^][,\s]|{_RANGES})+"


@dataclass(frozen=True)
class Task:
    """Where srun has put this process.

    Args:
        number, count: which launcher of how many of the job step.
        one_gpu: each launcher is to start exactly one rank, as there are several on some node; else one per GPU.
        addr: the first node of the step, where task 0 runs.
        port: the same for all launchers of the step, and another one for other steps and jobs of these days.
    """

    number: int
    count: int
    one_gpu: bool
    addr: str
    port: int


# Where am I?


def current_task(environ: Mapping[str, str]) -> Task | None:
    """Return which launcher of how many this is; None if there are no others.

    There are none without SLURM, in the shell of a batch script or of an interactive allocation, and in a step of one
    task.

    Raises:
        ValueError: the environment is incomplete, or parts of it belong to different steps.
    """
    step = _step(environ)
    if step is None or (count := _integer(environ, "SLURM_STEP_NUM_TASKS")) == 1:
        return None
    number, job = _integer(environ, "SLURM_PROCID"), _integer(environ, "SLURM_JOB_ID")
    nodes, tasks = expand_nodes(_variable(environ, "SLURM_STEP_NODELIST")), _tasks_per_node(environ)
    here = environ.get("SLURMD_NODENAME", nodes[0])
    step_shape = environ["SLURM_STEP_TASKS_PER_NODE"]
    # sbatch hands the variables of the step in which it is called to the new job's batch script.
    stale = environ.get("SLURM_TASKS_PER_NODE", step_shape) != step_shape or here not in nodes
    if stale or not number < count == sum(tasks) or len(tasks) != len(nodes):
        names = ("JOB_ID", "STEP_ID", "PROCID", "STEP_NUM_TASKS", "STEP_TASKS_PER_NODE", "TASKS_PER_NODE",
                 "STEP_NODELIST")  # fmt: skip
        found = ", ".join(f"SLURM_{name}={environ[f'SLURM_{name}']}" for name in names if f"SLURM_{name}" in environ)
        raise ValueError(
            f"these variables are not of one job step: {found}, SLURMD_NODENAME={here}; start the launcher by srun, or "
            "unset SLURM_STEP_ID if it is to run on this machine alone"
        )
    if environ.get("SLURM_DISTRIBUTION") == "arbitrary":
        raise ValueError("with srun --distribution=arbitrary nothing says on which node task 0 is; leave it out")
    port = PORTS[(job + 1009 * step) % len(PORTS)]  # jobs in a row, and the steps of one, get different ones
    return Task(number, count, max(tasks) > 1, nodes[0], port)


def advice(environ: Mapping[str, str]) -> str:
    """Return a line for a shell in an allocation which leaves some of it unused, else an empty one."""
    if "SLURM_JOB_ID" not in environ or _step(environ) is not None:
        return ""
    overlap = " --overlap" if "SLURM_PTY_PORT" in environ else ""  # else it waits for the step of this very shell
    srun = f"`srun{overlap} python -m learnerkit.launch ...`"
    nodes, tasks = (_integer(environ, f"SLURM_{name}", "1") for name in ("JOB_NUM_NODES", "NTASKS"))
    if nodes > 1:
        return f"this allocation has {nodes} nodes; {srun} uses them all"
    if "SLURMD_NODENAME" not in environ:
        return f"this shell is not on the node of its allocation; {srun} runs there"
    if tasks > 1 and "SLURM_GPUS_ON_NODE" not in environ:
        return f"this allocation has {tasks} tasks; {srun} starts a process for each"
    return ""


def _step(environ: Mapping[str, str]) -> int | None:
    """Return the number of the step in which srun has started this process; None in a shell."""
    if not {"SLURM_JOB_ID", "SLURM_STEP_ID"} <= environ.keys() or _is_typed(environ):
        return None
    step = _integer(environ, "SLURM_STEP_ID")
    return step if step < FIRST_SPECIAL_STEP else None


def _is_typed(environ: Mapping[str, str]) -> bool:
    """Tell whether this was started from a shell that runs by ``srun --pty bash``, rather than by srun.

    The shell may be one of many tasks, of which the others start no launcher. A launcher that srun itself has started
    is the task's process, or has no terminal.
    """
    is_task = environ.get("SLURM_TASK_PID") == str(os.getpid())
    return "SLURM_PTY_PORT" in environ and not is_task and os.isatty(0)


def _variable(environ: Mapping[str, str], name: str) -> str:
    if name not in environ:
        raise ValueError(f"{name} is not set, though SLURM_STEP_ID is; start the launcher by srun, or unset that too")
    return environ[name]


def _integer(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = _variable(environ, name) if default is None else environ.get(name, default)
    if not re.fullmatch("[0-9]+", text):
        raise ValueError(f"{name}={text}: this is to be a number")
    return int(text)


def _tasks_per_node(environ: Mapping[str, str]) -> list[int]:
    """Turn '2(x3),1' into [2, 2, 2, 1]."""
    text = _variable(environ, "SLURM_STEP_TASKS_PER_NODE")
    tasks = []
    for part in text.split(","):
        if not (match := re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)):
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={text}: this is to be like 2(x3),1")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def expand_nodes(text: str) -> list[str]:
    """Turn 'gpu[01-03,07],login' into the names of the nodes, in SLURM's order.

    Raises:
        ValueError: the text is no such list.
    """
    if not re.fullmatch(f"{_NODE}(?:,{_NODE})*", text):
        raise ValueError(f"{text!r} is no list of nodes, such as gpu[01-03,07],login")
    names = []
    for node in re.findall(_NODE, text):
        parts = re.findall(rf"{_RANGES}|[^][]+", node)
        choices = [_numbers(part[1:-1]) if part.startswith("[") else [part] for part in parts]
        if not all(choices):
            raise ValueError(f"{text!r} is no list of nodes: a range in it runs backwards")
        names += ["".join(choice) for choice in product(*choices)]
    return names


def _numbers(ranges: str) -> list[str]:
    """Turn '08-10,3' into ['08', '09', '10', '3']; a range that runs backwards has none, and so the whole."""
    numbers = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        count = range(int(first), int(last or first) + 1)
        if not count:
            return []
        numbers += [f"{number:0{len(first)}}" for number in count]
    return numbers


# A batch script


def batch_script(
    command: Sequence[str],
    *,
    nodes: int,
    gpus_per_node: int | None,
    time: str | None,
    job_name: str,
    cpus_per_task: int | None = None,
    mem: str | None = None,
    partition: str | None = None,
    account: str | None = None,
    launcher_options: Sequence[str] = (),
    python: str = "python",
) -> str:
    """Return a batch script for sbatch: a launcher on every node, put back into the queue at the time limit.

    Args:
        command: script.py args..., or -m module args...
        nodes, gpus_per_node: how many; without GPUs `None`.
        time: the limit as sbatch takes it, such as 08:00:00; `None`: the cluster's.
        job_name: also begins the name of the file of what is printed.
        cpus_per_task: CPU cores of each node; `None`: the cluster's default.
        mem: memory of each node, such as 64G; `None`: the cluster's default.
        partition, account: as the cluster has them.
        launcher_options: go before `command`.
        python: the interpreter.

    Raises:
        ValueError: what is wrong with a value.
    """
    for name, number in (("nodes", nodes), ("gpus-per-node", gpus_per_node), ("cpus-per-task", cpus_per_task)):
        if number is not None and number < 1:
            raise ValueError(f"--{name} {number}: give a number, 1 or more")
    if time is not None:
        _check_time(time)
    if mem is not None and not re.fullmatch("[0-9]+[KMGT]?", mem):
        raise ValueError(f"--mem {mem!r}: give a size such as 64G (of each node; 0 is all of it)")
    for name, text in (("job-name", job_name), ("partition", partition), ("account", account)):
        if text is not None and not re.fullmatch(r"[\w.,:@+][\w.,:@+-]*", text, re.ASCII):
            raise ValueError(f"--{name} {text!r}: give a name of letters, digits and . , : @ + - _")
    launcher = shlex.join([python, "-m", "learnerkit.launch", *launcher_options])
    choices = {"partition": partition, "account": account, "gpus-per-node": gpus_per_node,
               "cpus-per-task": cpus_per_task, "mem": mem}  # fmt: skip
    return _SCRIPT.format(
        job_name=job_name,
        nodes=nodes,
        choices="".join(f"#SBATCH --{name}={value}\n" for name, value in choices.items() if value is not None),
        time="" if time is None else f"#SBATCH --time={time}\n",
        notice=NOTICE_SECONDS,
        cpus="" if cpus_per_task is None else _CPUS,
        launcher=launcher,
        command=shlex.join(command),
    )


def _check_time(text: str) -> None:
    """Raise a ValueError if this is no time limit of sbatch, or too short a one."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return
    with_days = re.fullmatch("([0-9]+)-([0-9]+)(?::([0-9]+))?(?::([0-9]+))?", text)  # days-hours[:minutes[:seconds]]
    without = re.fullmatch("(?:([0-9]+):(?=[0-9]+:))?([0-9]+)(?::([0-9]+))?", text)  # [hours:]minutes[:seconds]
    if not (match := with_days or without):
        raise ValueError(f"--time {text!r}: give minutes, hours:minutes:seconds or days-hours, such as 08:00:00")
    units = (86400, 3600, 60, 1) if with_days else (3600, 60, 1)
    if sum(int(number or 0) * unit for number, unit in zip(match.groups(), units, strict=True)) < LEAST_SECONDS:
        raise ValueError(f"--time {text!r}: give {LEAST_SECONDS // 60} minutes or more, {NOTICE_SECONDS} s are to save")


_CPUS = """\
# From version 22.05 on, srun does not take this number from the job by itself.
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

"""

_SCRIPT = """\
#!/bin/bash
# Written by `python -m learnerkit.launch --write-sbatch`; submit it with `sbatch`, and watch it with `squeue --me`.
# The job gets the folder and the environment (modules, conda, venv) of the shell that submits it.

# What the job asks for. One task on each node: the launcher, which starts one process per GPU.
#SBATCH --job-name={job_name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{choices}
# When its time is over, SLURM ends the job; {notice} s before, it sends USR1 to this script alone (B:).
{time}#SBATCH --signal=B:USR1@{notice}

# The script may then put the job back into the queue. What all its runs print goes to the end of one file.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

# On USR1 the training is to save and stop. SLURM gives a signal to every process of the step, and of TERM or USR1 those
# would die that load the data, too. URG harms none; the launchers take it for TERM, and hand that to the ranks alone.
stopping=no
stop() {{
    echo "$(date): the time is nearly over: stopping the training, to go on with it later"
    stopping=yes
    scancel --signal=URG "$SLURM_JOB_ID"
}}
trap stop USR1

{cpus}# In the background, since bash runs no trap before a command in the foreground has ended.
# If the launcher of one node fails, SLURM ends the others.
srun --kill-on-bad-exit=1 \\
    {launcher} \\
    {command} &
srun=$!

# USR1 interrupts `wait`, so wait until srun has ended; the last `wait` gives its exit code.
while kill -0 "$srun" 2>/dev/null; do
    wait "$srun"
done
wait "$srun"
code=$?

# Above 128 it was stopped by a signal. With 0 the training is complete, and an error of its own would only come again.
# In its next run the training script starts anew, and goes on from the checkpoint that it finds.
if [ "$stopping" = yes ] && [ "$code" -gt 128 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
