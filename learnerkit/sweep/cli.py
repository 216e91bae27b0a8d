"""The command line of ``python -m learnerkit.sweep``."""

import argparse
import json
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from io import TextIOWrapper
from pathlib import Path

from learnerkit.launch.cli import Parser, choose_command, open_standard_files, say_where_options_stand
from learnerkit.launch.gpus import choose_gpus, gpu_names
from learnerkit.sweep.config import Config, ConfigError, changes, read_config
from learnerkit.sweep.results import importances
from learnerkit.sweep.screen import Screen, number, parameter
from learnerkit.sweep.script import PARAMS, READ
from learnerkit.sweep.study import FileLock, JournalError, Row, Study, best_of, open_study, read_plan
from learnerkit.sweep.workers import Command, Workers, share_out
from learnerkit.text import escaped_line, printable, signal_name


def make_parser() -> Parser:
    """Return the parser with its options."""
    parser = Parser(
        prog="learnerkit.sweep",
        usage="python -m learnerkit.sweep [options] config.json script.py [arguments of the script]\n"
        "       python -m learnerkit.sweep [options] config.json -m package.module [arguments of the module]\n"
        "       python -m learnerkit.sweep --join DIR [-j N] [--gpus 0,1]",
        description="Search for hyper-parameters: run a script many times, with other values each time.",
        epilog="The same command, given again, goes on with the search. Ctrl-C stops all trials and keeps everything.\n"
        "The exit code is 0 when the search is complete, 1 if no trial has a value or the search's files are damaged,\n"
        "2 for a command or a config that cannot be used, 128 + n if signal n stopped it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-j", type=int, metavar="N", dest="trials", help="trials at a time (default: as many as the GPUs allow, or 1)")
    add("--nproc", type=int, metavar="K", help="ranks of each trial, on a GPU each (default: 1)")
    add("--gpus", metavar="0,1", help="the GPUs to use, by index (default: all)")
    add("--dir", type=Path, metavar="DIR", help="directory of the search (default: sweeps/, and the config's name)")
    add("--join", type=Path, metavar="DIR", help="take part in a search that was begun, on this machine or another")
    add("--as-arguments", action="store_true", help="give the values to the script as --name value")
    add("--here", action="store_true", help="run trials in this folder, not each in one of its own (DIR/trials/N)")
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    open_standard_files()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # values may have letters that the terminal does not
    parser = make_parser()
    options = parser.parse_args(argv)
    try:
        folder, config, command = joined(options) if options.join else asked(options)
        names = gpu_names(os.environ)
        names = choose_gpus(options.gpus, names) if options.gpus is not None else names
        for name, value in (("-j", options.trials), ("--nproc", options.nproc)):
            if value is not None and value < 1:
                raise ValueError(f"{name} {value}: give a number, 1 or more")
        gpus = share_out(names, options.trials, command.nproc)
        if not options.join:
            command = begin(folder, config, command)
            say_own_options(options)
    except (ValueError, ImportError, OSError) as error:
        parser.error(str(error))
    try:
        return search(folder, config, command, gpus)
    except KeyboardInterrupt:  # only before the workers watch the signals
        return 128 + signal.SIGINT
    except OSError as error:
        parser.error(f"a file of the search cannot be used: {error}", code=1)
    except (ConfigError, JournalError) as error:
        parser.error(str(error), code=1)


def asked(options: argparse.Namespace) -> tuple[Path, Config, Command]:
    """Read the search that the command line asks for."""
    if len(options.command) < 2:
        raise ValueError("name a config and a script: python -m learnerkit.sweep -j 2 config.json train.py")
    path, *words = options.command
    is_module = words[0] == "-m"
    words = choose_command(is_module, words[1:] if is_module else words)
    if not is_module:
        words[0] = os.path.abspath(words[0])
    config = read_config(Path(path))
    folder = (options.dir or Path("sweeps") / Path(path).stem).absolute()
    search = uuid.uuid4().hex
    return folder, config, Command(words, options.nproc or 1, options.as_arguments, os.getcwd(), options.here, search)


def say_own_options(options: argparse.Namespace) -> None:
    """Say so where the script has got an option of the search which the search itself has not got.

    A script that reads no arguments would say nothing, and the search would not be the one that was meant.
    """
    own = {
        "-j": options.trials,
        "--nproc": options.nproc,
        "--as-arguments": options.as_arguments,
        "--here": options.here,
    }
    path, *command = options.command
    say_where_options_stand(
        command, [name for name, value in own.items() if not value],
        lambda text: print(f"learnerkit.sweep: {escaped_line(text)}", file=sys.stderr), "search", f"{path} ",
    )  # fmt: skip


def begin(folder: Path, config: Config, command: Command) -> Command:
    """Begin a search, or go on with it; return the command with the id that the search was begun with."""
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if (folder / "sweep.json").exists():
            before, given = read_plan(folder)
            names = {"words": "command", "nproc": "--nproc", "as_arguments": "--as-arguments", "here": "--here"}
            own = [name for key, name in names.items() if given.get(key) != getattr(command, key)]
            if changed := [*changes(before.data, config.data), *own]:
                raise ValueError(
                    f"{folder} has a search in which {changed[0]} was different: give --dir for a new one, or remove "
                    "that directory"
                )
            command = replace(command, search=given.get("search") or command.search)
        plan = {"config": config.data, "command": asdict(command)}
        temporary = folder / f"sweep.json.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(plan, indent=1), encoding="utf-8")
        os.replace(temporary, folder / "sweep.json")
    return command


def joined(options: argparse.Namespace) -> tuple[Path, Config, Command]:
    """Read the search that `--join` names."""
    if options.command or options.dir or options.nproc or options.as_arguments or options.here:
        raise ValueError("--join goes with -j and --gpus alone; all else is as the search was begun")
    folder = options.join.absolute()
    config, given = read_plan(folder)
    if not given:
        raise ValueError(f"{folder / 'sweep.json'}: there is no command to run")
    try:
        command = Command(**given)
    except TypeError as error:  # its text names the entry
        raise ValueError(f"{folder / 'sweep.json'}: another version of learnerkit has begun this ({error})") from error
    if command.words[0] != "-m" and not os.path.isfile(command.words[0]):
        raise ValueError(f"the search's script {command.words[0]} is not there on this machine")
    return folder, config, command


def search(folder: Path, config: Config, command: Command, gpus: list[str | None]) -> int:
    """Run the search to its end, show it, and return the exit code."""
    study = Study(folder, config)
    screen = Screen(config, with_gpus=gpus[0] is not None)
    rows = study.rows()
    screen.seen(rows)
    at_once = f"{len(gpus)} at a time" + (f", each on {command.nproc} processes" if command.nproc > 1 else "")
    screen.say(f"learnerkit.sweep: {config.total or 'any number of'} trials, {at_once}, in {shown(folder)}")
    if rows:
        screen.say(f"going on: {screen.summary(rows)}")
    workers = Workers(study, command, gpus)
    stopped_by, old_failures = 0, {row.number for row in rows if row.state == "failed"}
    has_failed = has_completed = False

    def show() -> None:
        nonlocal stopped_by, has_failed, has_completed
        if stopped_by != workers.stopped_by:
            stopped_by = workers.stopped_by
            screen.say(f"{signal_name(stopped_by)} received, waiting for the trials to stop (Ctrl-C kills them)")
        rows = study.rows()
        screen.update(rows)
        failed = [row for row in rows if row.state == "failed" and row.number not in old_failures]
        if failed and not has_failed:  # the others have often failed for the same reason
            has_failed = True
            screen.say(f"  {output_of(folder, failed[0], command.nproc)}")
        if not has_completed and any(row.state == "complete" for row in rows):
            has_completed = True
            if not command.as_arguments and not (folder / READ).exists():
                screen.say(
                    f"  the script has not called sweep.params: unless it reads {PARAMS} itself, all trials have the "
                    "same values; --as-arguments gives them to it as arguments"
                )

    try:
        workers.run(show)
    except Exception as error:
        if not isinstance(error, OSError):
            open_study(folder, config)  # This raises an error if the journal is damaged.
        raise
    finally:
        screen.close()
    rows = study.rows()
    screen.say(screen.summary(rows))
    best = best_of(rows, config.maximize)
    if best is not None:
        values = " ".join(f"{name}={parameter(value)}" for name, value in best.values.items())
        screen.say(f"best: trial {best.number}, {config.metric} {number(best.value)}, {values}")
        screen.say(f"  {command.line(best.values)}")
        screen.say(f"  its files: {shown(folder / 'trials' / str(best.number))}")
        if found := importances(study.study):
            screen.say("importance: " + ", ".join(f"{name} {share:.0%}" for name, share in found.items()))
    if study.is_over():
        return 0 if best else 1
    if workers.stopped_by:
        screen.say("stopped; the same command goes on with the search")
        return 128 + workers.stopped_by
    return 1


def output_of(folder: Path, row: Row, nproc: int) -> str:
    """Say where the output of a trial is and, where nothing else says why it has failed, its last line."""
    logs = folder / "trials" / str(row.number) / f"attempt-{row.attempt}"
    if nproc > 1:
        return f"its output: {shown(logs)}/rank-*.log"
    log, last = logs / "rank-0.log", ""
    if ": " not in row.cause:  # else the error is in the table
        # A script may remove its folder, and another machine's file may come late.
        with suppress(OSError), log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 10_000))
            last = file.read().decode(errors="replace").rstrip().rpartition("\n")[2]
    return f"{shown(log)} ends with: {printable(last.strip(), 400)}" if last else f"its output: {shown(log)}"


def shown(path: Path) -> Path:
    """Return a path as seen from the present directory, where it lies below that."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
