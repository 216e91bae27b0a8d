"""The command ``python -m learnerkit``, or ``learnerkit``: it prints the versions, and runs the library's commands."""

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from importlib import import_module

from learnerkit import __version__
from learnerkit.launch.cli import Parser
from learnerkit.launch.gpus import gpu_names
from learnerkit.launch.node_info import versions
from learnerkit.processes.machine import usable_cores
from learnerkit.text import did_you_mean

COMMANDS = {
    "launch": "learnerkit.launch.cli", "sweep": "learnerkit.sweep.cli", "doctor": "learnerkit.preflight.machines"
}  # fmt: skip
"""The modules whose `main` carries out each command."""


def make_parser() -> Parser:
    """Return the parser with its options."""
    parser = Parser(
        prog="learnerkit",
        usage="learnerkit [--version] [command] [options and arguments of the command]",
        description="Without a command, print the versions, the machine and this help.",
        epilog="commands:\n"
        "  learnerkit launch train.py                 run a script once per GPU of this machine, or of several\n"
        "  learnerkit sweep config.json train.py      search for hyper-parameters\n"
        "  learnerkit doctor                          look at the machine before a run\n\n"
        "Each has a --help of its own. `python -m learnerkit.launch` is the same as `learnerkit launch`, and so on.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"learnerkit {__version__}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out the command line and return the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words and words[0] in COMMANDS:
        return import_module(COMMANDS[words[0]]).main(words[1:])
    parser = make_parser()
    if words and not words[0].startswith("-"):
        near = did_you_mean(words[0], COMMANDS) or f"; the commands are {', '.join(COMMANDS)}"
        parser.error(f"there is no command {words[0]!r}{near}")
    parser.parse_args(words)
    print(f"learnerkit {__version__}\nPython {platform.python_version()}, torch {versions()['torch']}\n{machine()}\n")
    parser.print_help()
    return 0


def machine() -> str:
    """Describe the system, and the number of cores and GPUs that a process may use."""
    gpus = len(gpu_names(os.environ))
    gpu_text = f"{gpus} GPU{'s' * (gpus > 1)}" if gpus else "no GPU of NVIDIA or AMD"
    return f"{platform.system()} {platform.machine()}, {usable_cores()} CPU cores, {gpu_text}"


if __name__ == "__main__":
    sys.exit(main())
