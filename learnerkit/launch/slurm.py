"""A batch script for a new SLURM job.

The options are those of the manual of sbatch (https://slurm.schedmd.com/sbatch.html), and were checked with version
22.05. They are checked when the script is written: SLURM finds a mistake only when the job starts, which may be hours
later.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Sequence

NOTICE_SECONDS = 120  # between the signal to a batch script and the time limit
LEAST_SECONDS = 300  # the least time limit: a job that is signalled as soon as it begins would be requeued for ever


def batch_script(
    command: Sequence[str], *, nodes: int, gpus_per_node: int | str | None, time: str | None, job_name: str,
    cpus_per_task: int | None = None, mem: str | None = None, mem_per_cpu: str | None = None,
    partition: str | None = None, account: str | None = None, output: str | None = None, error: str | None = None,
    sbatch: Sequence[str] | None = None, setup: Sequence[str] | None = None, env: Sequence[str] | None = None,
    launcher_options: Sequence[str] = (), python: str = "python",
) -> str:  # fmt: skip
    """Return a batch script for sbatch: a launcher on every node, and a new place in the queue at the time limit.

    Args:
        command: script.py args..., or -m module args...
        nodes, gpus_per_node: how many; GPUs also as type:number, `None`: no GPUs.
        time: the limit in sbatch's format, such as 08:00:00; `None`: the cluster's.
        job_name: also begins the name of the output file.
        cpus_per_task: CPU cores of each node; `None`: the cluster's default.
        mem, mem_per_cpu: memory of each node, such as 64G, or of each core; `None`: the cluster's default.
        partition, account: as the cluster names them.
        output, error: output files, in sbatch's patterns; `None`: job_name-number.out for both.
        sbatch: further options of sbatch.
        setup: shell commands that prepare the environment on the first node.
        env: NAME=VALUE each, set after that.
        launcher_options: options of the launcher.
        python: the interpreter.

    Raises:
        ValueError: a value is not allowed; the message says why.
    """
    for name, number in (("nodes", nodes), ("cpus-per-task", cpus_per_task)):
        if number is not None and number < 1:
            raise ValueError(f"--{name} {number}: give a number, 1 or more")
    if gpus_per_node is not None and not re.fullmatch(r"([\w.+-]+:)?[1-9][0-9]*", str(gpus_per_node), re.ASCII):
        raise ValueError(f"--gpus-per-node {gpus_per_node}: give a number, 1 or more, or a type with it, as in v100:4")
    if time is not None:
        _check_time(time)
    if mem is not None and mem_per_cpu is not None:
        raise ValueError("--mem does not go with --mem-per-cpu; leave one of them out")
    for name, size, whole in (("mem", mem, " (of each node; 0 is all of it)"), ("mem-per-cpu", mem_per_cpu, "")):
        if size is not None and not re.fullmatch("[0-9]+[KMGT]?", size):
            raise ValueError(f"--{name} {size!r}: give a size such as 64G{whole}")
    for name, text in (("job-name", job_name), ("partition", partition), ("account", account)):
        if text is not None and not re.fullmatch(r"[\w.,:@+][\w.,:@+-]*", text, re.ASCII):
            raise ValueError(f"--{name} {text!r}: give a name of letters, digits and . , : @ + - _")
    for name, file in (("output", output), ("error", error)):
        _check_line(name, file, "a file, such as logs/%x-%j.out")
    choices = {"partition": partition, "account": account, "gpus-per-node": gpus_per_node,
               "cpus-per-task": cpus_per_task, "mem": mem, "mem-per-cpu": mem_per_cpu}  # fmt: skip
    asked = [f"--{name}={value}" for name, value in choices.items() if value is not None]
    asked += map(_sbatch_option, sbatch or ())
    return _SCRIPT.format(
        job_name=job_name,
        nodes=nodes,
        choices="".join(f"#SBATCH {option}\n" for option in asked),
        time="" if time is None else f"#SBATCH --time={time}\n",
        notice=NOTICE_SECONDS,
        output=shlex.quote(output or "%x-%j.out"),
        error="" if error is None else f"#SBATCH --error={shlex.quote(error)}\n",
        cpus="" if cpus_per_task is None else _CPUS,
        setup=_setup_section(setup) if setup else "",
        env="".join(["# Variables of the training.\n", *map(_export, env), "\n"]) if env else "",
        launcher=shlex.join([python, "-m", "learnerkit.launch", *launcher_options]),
        command=shlex.join(command),
    )


def _check_line(name: str, text: str | None, wanted: str) -> None:
    """Raise a ValueError if this is empty, or holds a line break or another control character."""
    if text is not None and not (text.strip() and text.isprintable()):
        raise ValueError(f"--{name} {text!r}: give {wanted}, without line breaks and control characters")


def _sbatch_option(text: str) -> str:
    """Return an option of sbatch for a line of the script: with its dashes, and quoted where needed.

    Raises:
        ValueError: the text is not one option, or an option that is given elsewhere.
    """
    try:
        option, *value = shlex.split(text) if text.isprintable() else []
    except ValueError:  # nothing, or a quote that is not closed
        option, value = "", []
    name, equals, attached = (option if option.startswith("-") else f"--{option}").partition("=")
    named = re.fullmatch(r"--[a-z][a-z-]*[a-z]|-[A-Za-z][\w.:,+-]*", name, re.ASCII)
    if not named or len(value) > 1 or (value and (equals or value[0].startswith("-"))):
        raise ValueError(f"--sbatch {text!r}: give one option of sbatch, such as --exclusive or --comment='two words'")
    if name[1] != "-":
        taken = _SHORT.get(name[1])
    else:  # sbatch accepts the beginning of a name for the whole
        taken = next((full for full in _TAKEN if full.startswith(name[2:]) and name != "--gpus"), None)
    if taken and _TAKEN[taken]:
        raise ValueError(f"--sbatch {text!r}: leave --{taken} out, the script relies on its own --{_TAKEN[taken]}")
    if taken:
        raise ValueError(f"--sbatch {text!r}: give --{taken} by itself, without --sbatch")
    return " ".join([name + (equals and equals + shlex.quote(attached)), *map(shlex.quote, value)])


def _setup_section(commands: Sequence[str]) -> str:
    """Return the section of a script that runs the commands, and checks after each how it has ended."""
    lines, missing = [], {r"(module|ml)\b": _MODULE, r"conda\s+activate\b": _CONDA}
    for command in commands:
        _check_command(command)
        lines += [missing.pop(start) for start in [*missing] if re.match(start, command)]
        lines.append(f"{command}\nend_if_failed\n")
    return f"{_SETUP}{''.join(lines)}{_SETUP_END}"


def _check_command(text: str) -> None:
    """Raise a ValueError if this is not a whole command: the script's next lines would become a part of it."""
    wanted = "a shell command, such as 'source ~/venv/bin/activate'"
    _check_line("setup", text, wanted)
    env = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
    try:
        checked = subprocess.run(["bash", "-n", "-c", text], env=env, stderr=subprocess.PIPE)
    except FileNotFoundError:  # This machine has no bash, but that of the job has.
        return
    said = checked.stderr.decode(errors="replace")
    if said or text.endswith("\\"):
        why = re.sub("^(bash: )?(-c: )?(line [0-9]+: )?|\n.*", "", said, flags=re.DOTALL)
        raise ValueError(f"--setup {text!r}: give {wanted} ({why or 'nothing follows its last character'})")


def _export(text: str) -> str:
    """Return the line of a script that sets a variable to exactly this value."""
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise ValueError(f"--env {text!r}: give NAME=VALUE, with a name of letters, digits and _")
    _check_line("env", text, "NAME=VALUE")
    return f"export {name}={shlex.quote(value)}\n"


def _check_time(text: str) -> None:
    """Raise a ValueError if this is not a time limit of sbatch, or one that is too short."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return
    with_days = re.fullmatch("([0-9]+)-([0-9]+)(?::([0-9]+))?(?::([0-9]+))?", text)  # days-hours[:minutes[:seconds]]
    without = re.fullmatch("(?:([0-9]+):(?=[0-9]+:))?([0-9]+)(?::([0-9]+))?", text)  # [hours:]minutes[:seconds]
    if not (match := with_days or without):
        raise ValueError(f"--time {text!r}: give minutes, hours:minutes:seconds or days-hours, such as 08:00:00")
    units = (86400, 3600, 60, 1) if with_days else (3600, 60, 1)
    if sum(int(number or 0) * unit for number, unit in zip(match.groups(), units, strict=True)) < LEAST_SECONDS:
        raise ValueError(f"--time {text!r}: give {LEAST_SECONDS // 60} minutes or more, {NOTICE_SECONDS} s are to save")


_TAKEN = {  # not allowed with --sbatch, because the script relies on its own value, or has an option for it
    "signal": f"signal=B:USR1@{NOTICE_SECONDS}", "requeue": "requeue", "no-requeue": "requeue",
    "open-mode": "open-mode=append", "ntasks": "ntasks-per-node=1", "ntasks-per-node": "ntasks-per-node=1",
    "tasks-per-node": "ntasks-per-node=1", "job-name": "", "nodes": "", "gpus-per-node": "", "cpus-per-task": "",
    "mem": "", "mem-per-cpu": "", "time": "", "partition": "", "account": "", "output": "", "error": "",
}  # fmt: skip
_SHORT = {"J": "job-name", "N": "nodes", "c": "cpus-per-task", "t": "time", "p": "partition", "A": "account",
          "o": "output", "e": "error", "n": "ntasks"}  # fmt: skip

_SETUP = """\
# The environment of the training, made once, on the first node; srun passes it on to all nodes.
# If a command fails the job ends with its exit code, rather than train in another environment.
end_if_failed() {
    local code=$?
    if [ "$code" -ne 0 ]; then
        echo "line $((BASH_LINENO[0] - 1)) of the batch script failed with exit code $code: the job ends" >&2
        exit "$code"
    fi
}

"""

_MODULE = """\
# `module` is a function of login shells, which this script has only if the shell that submits it passes it on.
if ! type module >/dev/null 2>&1; then
    submitted_path=$PATH
    . /etc/profile
    PATH="$submitted_path:$PATH"
fi
"""

_CONDA = """\
# `conda activate` needs shell functions of conda, which a batch script does not have by itself.
[ "$(type -t conda)" = function ] || eval "$(conda shell.bash hook)"
"""

_SETUP_END = """\
set +eu  # if a command has set them: the rest of this script must go on after errors, and checks them itself

"""

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
#SBATCH --output={output}
{error}
{setup}{env}\
# On USR1 the training is to save and stop. SLURM sends a signal to every process of the step, and TERM or USR1 would
# kill those that load the data, too. URG kills none; the launchers take it for TERM, and send that to the ranks alone.
stopping=no
stop() {{
    echo "$(date): the time is nearly over: stopping the training, to go on with it later"
    stopping=yes
    scancel --signal=URG "$SLURM_JOB_ID"
}}
trap stop USR1

{cpus}# In the background, since bash runs no trap before a command in the foreground has ended.
# If the launcher of one node fails, SLURM ends the others. All get the environment of this script.
srun --kill-on-bad-exit=1 --export=ALL \\
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
# In its next run the training script starts again, and goes on from the checkpoint that it finds.
if [ "$stopping" = yes ] && [ "$code" -gt 128 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
