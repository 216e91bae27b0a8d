"""Job files for schedulers: each is one of the templates, with the values of the command line in it.

A template is a file of the folder `templates`. In a line, ``<<name>>`` becomes the value of that name; several values
become lines of the same indentation. A line without a value is left out.

A scheduler checks most values when the job is submitted, and the templates name its manual. This module refuses what
would give another file than was meant, or a job that fails without a word.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from learnerkit.text import escaped_line

TEMPLATES = Path(__file__).with_name("templates")
LEAST_SECONDS = 300  # the least time limit: a job that is signalled as soon as it begins would be requeued for ever

_MOST_GRACE = 100  # seconds; SLURM ends a job 120 s after its signal

# What each kind of file is called behind the script's name, and what to do with it.
KINDS = {
    "slurm": ("sbatch", "submit it with: sbatch {0}"),
    "kubeflow": ("kubeflow.yaml", "start it with: kubectl create -f {0}"),
    "skypilot": ("skypilot.yaml", "start it with: sky jobs launch {0}\nor, without restarts, with: sky launch {0}"),
    "sagemaker": ("sagemaker.py", "submit it with: python {0}"),
}
# The options that become a line of a batch script each, in this order.
PASSED_ON = ("job_name", "nodes", "partition", "account", "gpus_per_node", "cpus_per_task", "mem", "mem_per_cpu",
             "time", "output", "error")  # fmt: skip
# The kinds for which an option means something.
USES = {
    **dict.fromkeys((*PASSED_ON, "sbatch"), ("slurm",)),
    **dict.fromkeys(("nodes", "job_name", "setup", "env"), tuple(KINDS)),
    "gpus_per_node": ("slurm", "kubeflow", "skypilot"),
    "time": ("slurm", "kubeflow", "sagemaker"),
    "image": ("kubeflow", "skypilot", "sagemaker"),
    "instance_type": ("sagemaker",),
}
TO_FILL_IN = {"image": "IMAGE", "instance_type": "INSTANCE_TYPE"}  # what stands in a file that needs the value
DEFAULTS: dict[str, dict[str, Any]] = {
    "slurm": {"output": "%x-%j.out"}, "kubeflow": {"image": "IMAGE"}, "skypilot": {},
    "sagemaker": {"time": "1-0", **TO_FILL_IN},
}  # fmt: skip
LIMITS = {"slurm": "has the time limit of the cluster or of the partition", "sagemaker": "ends after a day"}
RELIED_ON = {  # what the batch script sets itself, for each option of sbatch that would change it
    "signal": "signal=B:USR1@120", "open-mode": "open-mode=append", "requeue": "requeue",
    **dict.fromkeys(("ntasks", "ntasks-per-node", "tasks-per-node"), "ntasks-per-node=1"), "no-requeue": "requeue",
}  # fmt: skip
# `module` and `conda activate` are functions of login shells, which the shell of a job may not have.
FUNCTIONS = {
    r"(module|ml)\b": 'type module >/dev/null 2>&1 || { before=$PATH; . /etc/profile; PATH="$before:$PATH"; }',
    r"conda\s+activate\b": '[ "$(type -t conda)" = function ] || eval "$(conda shell.bash hook)"',
}


def job_text(
    kind: str, command: Sequence[str], options: Mapping[str, Any], launcher: Sequence[str] = (), *,
    nproc: int | None = None, grace: float = 30.0,
) -> str:  # fmt: skip
    """Return the text of a job file.

    Args:
        kind: a key of `KINDS`.
        command: script.py args..., or -m module args...
        options: the values of the options in `USES`; `None` for one that is not used.
        launcher: options of the launcher.
        nproc: the number of processes on each machine; `None`: one per GPU.
        grace: the seconds that the launcher gives the ranks to save.

    Raises:
        ValueError: a value is not allowed; the message says why.
    """
    values = {"nodes": 1, **DEFAULTS[kind]} | {name: value for name, value in options.items() if value is not None}
    _check(kind, values)
    if kind == "slurm" and grace > _MOST_GRACE:
        raise ValueError(f"--grace {grace:g}: SLURM ends a job 120 s after its signal; give {_MOST_GRACE} or less")
    gpus, seconds = values.get("gpus_per_node"), _seconds(kind, values.get("time"))
    gpus = None if gpus == "0" else gpus
    env = dict(map(_variable, values.get("env", ())))
    setup = _setup(values.get("setup", ()))
    start, run = shlex.join(["python", "-m", "learnerkit.launch", *launcher]), shlex.join(command)
    script = [*setup, f"exec {start} \\", f"    {run}"]
    fields: dict[str, Any] = {
        name: _json(values[name])[1:-1] for name in ("job_name", "image", "instance_type") if name in values
    }
    fields |= {
        "nodes": values["nodes"], "gpus": gpus, "nproc": nproc or gpus or 1, "seconds": seconds,
        "grace": int(grace) + 30, "env": _json(env),
        "env_list": _json([{"name": name, "value": value} for name, value in env.items()]),
        "exports": [f"export {name}={shlex.quote(value)}" for name, value in env.items()],
        "setup": setup, "launcher": start, "command": run, "script": script,
        "script_list": [f"{_json(line)}," for line in script], "options": _sbatch_lines(values),
    }  # fmt: skip
    (template,) = TEMPLATES.glob(f"{kind}.*")
    text = _filled(template.read_text(encoding="utf-8"), fields)
    # Kubernetes replaces $(NAME) by a variable, and $$ by $.
    return re.sub(r"\$(?=[$(])", "$$", text) if kind == "kubeflow" else text


def _filled(template: str, fields: Mapping[str, Any]) -> str:
    """Return the template with the values in the places of their names."""
    text = ""
    for line in template.splitlines(keepends=True):
        indent = " " * (len(line) - len(line.lstrip()))
        for name in re.findall(r"<<(\w+)>>", line):
            value = fields.get(name)
            if isinstance(value, list):
                # A line break in one of several values stands in quotes; YAML removes the indentation behind it.
                value = "\n".join(value).replace("\n", f"\n{indent}")
            line = line.replace(f"<<{name}>>", str(value)) if value else ""
        text += line
    return text


def default_name(kind: str, command: Sequence[str]) -> str:
    """Return a name for a job, made of its script's or module's name so that the scheduler takes it."""
    name = script_name(command)
    made = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-").lstrip("0123456789-")
    return name if kind == "slurm" else made or "job"


def script_name(command: Sequence[str]) -> str:
    """Return the name of a module, or that of a script's file without its ending."""
    return command[1] if command[0] == "-m" else Path(command[0]).stem


def remarks(kind: str, options: Mapping[str, Any]) -> list[str]:
    """Return what the user should know of a job file: what it does not ask for, and what it needs."""
    said = []
    if kind in USES["gpus_per_node"] and options["gpus_per_node"] is None:
        said.append("without --gpus-per-node the job asks for no GPUs")
    if kind in LIMITS and options["time"] is None:
        said.append(f"without --time the job {LIMITS[kind]}")
    for name, text in TO_FILL_IN.items():
        if name in DEFAULTS[kind] and options[name] is None:
            said.append(f"without {flag(name)} the file is not complete: write yours in the place of {text}")
    if kind != "slurm":
        said.append("checkpoints need a place that outlives the job's machines; comments in the file say how")
    for folder in {Path(file).parent: None for file in (options["output"], options["error"]) if file}:
        if "%" not in str(folder) and not folder.is_dir():
            name = escaped_line(str(folder))
            said.append(f"first make the folder {name}: SLURM does not, and without it the job fails and says nothing")
    return said


def _json(value: object) -> str:
    """Return a value as JSON, which YAML and Python read, too."""
    return json.dumps(value, ensure_ascii=False)


def flag(name: str) -> str:
    """Return an option of the launcher by the name of its value."""
    return f"--{name.replace('_', '-')}"


def _check(kind: str, values: Mapping[str, Any]) -> None:
    """Raise a ValueError for an option that means nothing, or a value that would break the file."""
    for name, value in values.items():
        if kind not in USES[name]:
            uses = " or ".join(USES[name])
            raise ValueError(f"{flag(name)} means nothing for {kind}; it goes with --write-job {uses}")
        for text in value if isinstance(value, list) else [str(value)]:
            if not (text.strip() and text.isprintable()):
                raise ValueError(f"{flag(name)} {text!r}: give a text without line breaks and control characters")
    gpus = str(values.get("gpus_per_node", ""))
    if kind == "skypilot" and gpus.isdecimal():
        raise ValueError(f"--gpus-per-node {gpus}: SkyPilot needs the kind of GPU, too, such as H100:{gpus}")
    if kind == "kubeflow" and gpus and not gpus.isdecimal():
        raise ValueError(f"--gpus-per-node {gpus}: Kubeflow takes a number; the kind is a label of nodes")


def _seconds(kind: str, text: str | None) -> int | None:
    """Return a time limit in seconds; `None`: the scheduler's.

    Raises:
        ValueError: it does not have sbatch's format, or is too short.
    """
    if text is None or (kind == "slurm" and text.upper() in ("UNLIMITED", "INFINITE")):
        return None
    days, dash, rest = text.rpartition("-")
    rest = rest if dash or rest.count(":") == 2 else f"0:{rest}"  # Without days and hours it is minutes[:seconds].
    try:
        hours, minutes, secs = map(int, (rest + ":0" * (2 - rest.count(":"))).split(":"))
        seconds = int(days if dash else 0) * 86400 + hours * 3600 + minutes * 60 + secs
    except ValueError:
        raise ValueError(
            f"--time {text!r}: give minutes, hours:minutes:seconds or days-hours, such as 08:00:00"
        ) from None
    if seconds < LEAST_SECONDS:
        raise ValueError(f"--time {text!r}: give {LEAST_SECONDS // 60} minutes or more, two of them are to save")
    return seconds


def _sbatch_lines(values: Mapping[str, Any]) -> list[str]:
    """Return the lines of a batch script that ask for something."""
    words = [f"{flag(name)}={shlex.quote(str(values[name]))}" for name in PASSED_ON if name in values]
    return [f"#SBATCH {word}" for word in [*words, *map(_sbatch_option, values.get("sbatch", ()))]]


def _sbatch_option(text: str) -> str:
    """Return options of sbatch with their dashes.

    Raises:
        ValueError: the script relies on its own value of one.
    """
    option = text if text.startswith("-") else f"--{text}"
    for dashes, name in re.findall(r"(?:^|\s)(--?)([a-z][a-z-]*)", option):
        # sbatch accepts the beginning of a name for the whole; of single letters, the script relies on -n, --ntasks.
        taken = [full for full in RELIED_ON if full.startswith(name) and (dashes == "--" or name[0] == "n")]
        if taken:
            own = RELIED_ON[taken[0]]
            raise ValueError(f"--sbatch {text!r}: leave --{taken[0]} out, the script relies on its own --{own}")
    return option


def _setup(commands: Sequence[str]) -> list[str]:
    """Return lines that run the commands, and end the job if one fails."""
    lines, missing = [], dict(FUNCTIONS)
    for command in map(str.strip, commands):
        lines += [missing.pop(start) for start in [*missing] if re.match(start, command)]
        lines += [command, "(exit $?) || exit  # If that has failed, the job ends."]
    if not lines or not shutil.which("bash"):
        return lines
    # The next lines of the script would become a part of a command that is not whole. bash would warn of a locale that
    # is not installed here.
    options: dict[str, Any] = {"capture_output": True, "text": True, "env": {**os.environ, "LC_ALL": "C"}}
    if said := subprocess.run(["bash", "-n"], input="\n".join(lines), **options).stderr:
        raise ValueError(f"--setup: give whole shell commands; bash says {said.strip()!r}")
    return lines


def _variable(text: str) -> tuple[str, str]:
    """Return the name and the value of a variable."""
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise ValueError(f"--env {text!r}: give NAME=VALUE, with a name of letters, digits and _")
    return name, value
