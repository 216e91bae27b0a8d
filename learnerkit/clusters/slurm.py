"""SLURM: which task of a job step this process is, from the environment alone.

The variables are those of the manuals of srun, sbatch and salloc (https://slurm.schedmd.com/srun.html), and were
checked with version 22.05.
"""

import os
import re
from collections.abc import Mapping
from itertools import product

from learnerkit.clusters.place import PORTS, Place, integer, variable

FIRST_SPECIAL_STEP = 0xFFFFFFF0  # steps from here on are the shell of a batch script, an interactive shell and so on

_RANGES = r"\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\]"
_NODE = rf"(?:[^][,\s]|{_RANGES})+"


def current_task(environ: Mapping[str, str]) -> Place | None:
    """Return the place of this process among the tasks of its job step; None if there are no others.

    If some node has several tasks, each is a rank; else each is a node.

    There are none without SLURM, in the shell of a batch script or of an interactive allocation, and in a step of one
    task.

    Raises:
        ValueError: the environment is incomplete, or parts of it belong to different steps.
    """
    step = _step(environ)
    if step is None or (count := integer(environ, "SLURM_STEP_NUM_TASKS")) == 1:
        return None
    number, job = integer(environ, "SLURM_PROCID"), integer(environ, "SLURM_JOB_ID")
    nodes, tasks = expand_nodes(variable(environ, "SLURM_STEP_NODELIST")), _tasks_per_node(environ)
    here = environ.get("SLURMD_NODENAME", nodes[0])
    step_shape = environ["SLURM_STEP_TASKS_PER_NODE"]
    # If sbatch is called in a step, the new job's batch script inherits the variables of that step.
    stale = environ.get("SLURM_TASKS_PER_NODE", step_shape) != step_shape or here not in nodes
    if stale or not number < count == sum(tasks) or len(tasks) != len(nodes):
        names = ("JOB_ID", "STEP_ID", "PROCID", "STEP_NUM_TASKS", "STEP_TASKS_PER_NODE", "TASKS_PER_NODE",
                 "STEP_NODELIST")  # fmt: skip
        values = ", ".join(f"SLURM_{name}={environ[f'SLURM_{name}']}" for name in names if f"SLURM_{name}" in environ)
        raise ValueError(
            f"these variables do not belong to one job step: {values}, SLURMD_NODENAME={here}; start the process by "
            "srun, or unset SLURM_STEP_ID to run on this machine alone"
        )
    if environ.get("SLURM_DISTRIBUTION") == "arbitrary":
        raise ValueError("with srun --distribution=arbitrary nothing says on which node task 0 is; leave it out")
    port = PORTS[(job + 1009 * step) % len(PORTS)]  # Consecutive jobs and steps get different ports.
    is_rank = max(tasks) > 1
    return Place(
        "SLURM", "SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST", number, count, nodes[0], port,
        nproc=1 if is_rank else None, is_rank=is_rank, local_rank=integer(environ, "SLURM_LOCALID", 0),
        local_world_size=tasks[nodes.index(here)],
    )  # fmt: skip


def advice(environ: Mapping[str, str]) -> str:
    """Return a hint if the launcher would not use the whole allocation of this shell, else an empty string."""
    if "SLURM_JOB_ID" not in environ or _step(environ) is not None:
        return ""
    overlap = " --overlap" if "SLURM_PTY_PORT" in environ else ""  # Otherwise it waits for the step of this shell.
    srun = f"`srun{overlap} python -m learnerkit.launch ...`"
    nodes, tasks = (integer(environ, f"SLURM_{name}", 1) for name in ("JOB_NUM_NODES", "NTASKS"))
    if nodes > 1:
        return f"this allocation has {nodes} nodes; {srun} uses them all"
    if "SLURMD_NODENAME" not in environ:
        return f"this shell is not on the node of its allocation; {srun} runs there"
    if tasks > 1 and "SLURM_GPUS_ON_NODE" not in environ:
        return f"this allocation has {tasks} tasks; {srun} starts a process for each"
    return ""


def _step(environ: Mapping[str, str]) -> int | None:
    """Return the number of the step in which srun has started this process; None in a shell."""
    if not {"SLURM_JOB_ID", "SLURM_STEP_ID"} <= environ.keys() or _in_pty_shell(environ):
        return None
    step = integer(environ, "SLURM_STEP_ID")
    return step if step < FIRST_SPECIAL_STEP else None


def _in_pty_shell(environ: Mapping[str, str]) -> bool:
    """Tell whether this launcher was started from the shell of ``srun --pty bash``, rather than by srun.

    The shell may be one of many tasks, and the others start no launcher. A launcher that srun itself has started is
    the task's process, or has no terminal.
    """
    is_task = environ.get("SLURM_TASK_PID") == str(os.getpid())
    return "SLURM_PTY_PORT" in environ and not is_task and os.isatty(0)


def _tasks_per_node(environ: Mapping[str, str]) -> list[int]:
    """Turn '2(x3),1' into [2, 2, 2, 1]."""
    text = variable(environ, "SLURM_STEP_TASKS_PER_NODE")
    tasks = []
    for part in text.split(","):
        if not (match := re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)):
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={text}: this must be like 2(x3),1")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def expand_nodes(text: str) -> list[str]:
    """Turn 'gpu[01-03,07],login' into the names of the nodes, in SLURM's order.

    Raises:
        ValueError: the text is not such a list.
    """
    if not re.fullmatch(f"{_NODE}(?:,{_NODE})*", text):
        raise ValueError(f"{text!r} is not a list of nodes, such as gpu[01-03,07],login")
    names = []
    for node in re.findall(_NODE, text):
        parts = re.findall(rf"{_RANGES}|[^][]+", node)
        choices = [_numbers(part[1:-1]) if part.startswith("[") else [part] for part in parts]
        if not all(choices):
            raise ValueError(f"{text!r} is not a list of nodes: a range in it runs backwards")
        names += ["".join(choice) for choice in product(*choices)]
    return names


def _numbers(ranges: str) -> list[str]:
    """Turn '08-10,3' into ['08', '09', '10', '3']; return an empty list if a range runs backwards."""
    numbers = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        count = range(int(first), int(last or first) + 1)
        if not count:
            return []
        numbers += [f"{number:0{len(first)}}" for number in count]
    return numbers
