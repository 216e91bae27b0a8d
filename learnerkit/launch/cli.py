"""The command line of ``python -m learnerkit.launch``, and the attempts to run what it asks for."""

import argparse
import os
import re
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn
from zipfile import is_zipfile

from learnerkit import clusters
from learnerkit.clusters.place import PORT
from learnerkit.launch import jobs, supervise
from learnerkit.launch.addresses import NodeError, parse_endpoint
from learnerkit.launch.events import LaunchEvents
from learnerkit.launch.gpus import choose_gpus, gpu_names
from learnerkit.launch.nodes import begin_alone, begin_with_others
from learnerkit.launch.rendezvous import Elastic, Rendezvous, Static
from learnerkit.launch.report import Outcome, say
from learnerkit.launch.supervise import Attempt, Interrupted, Job
from learnerkit.processes.event_file import check_file
from learnerkit.processes.machine import LOOPBACK
from learnerkit.text import did_you_mean, escaped_line, printable, signal_name

COUNTS = ("--nproc", "--nproc-per-node", "--nnodes")  # options that a script should not need
DOCTOR = ["-m", "learnerkit.doctor", "--rank"]
ALONE = clusters.Place("", "")  # no cluster says anything


@dataclass(frozen=True)
class Plan:
    """A job on this machine, how often it may be restarted, and which other machines take part."""

    job: Job
    restarts: int = 0
    nodes: Static | Elastic | None = None
    port: int = 0  # the port on one machine; 0: any
    told: bool = False  # whether the user was told where options of the launcher stand
    attempt: int = 0  # how often a cluster has started the run again


def main(argv: Sequence[str] | None = None, prog: str = "learnerkit.launch") -> int:
    """Run the command line and return the exit code; its errors begin with the name of the program."""
    open_standard_files()
    try:
        plan = parse(argv, prog)
        return run(plan) if isinstance(plan, Plan) else plan
    except KeyboardInterrupt:  # This happens only before `run` watches the signals.
        return 128 + signal.SIGINT


def open_standard_files() -> None:
    """Open those of the standard files that the caller has closed: other files would get their numbers."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115


def run(plan: Plan) -> int:
    """Run attempts until one succeeds, or none is left, and return the exit code; write this for other programs."""
    events = LaunchEvents(plan.job.events, plan.job.heartbeat)
    return events.ended(run_attempts(plan, events))


def run_attempts(plan: Plan, events: LaunchEvents) -> int:
    """Run attempts until one succeeds, or none is left, and return the exit code."""
    job = plan.job
    restarts = plan.restarts + plan.attempt
    number = plan.attempt
    rendezvous = Rendezvous(plan.nodes, job.timeout or 300.0, say) if plan.nodes else None
    attempt = None

    def begin() -> Attempt:
        if rendezvous is None:
            return begin_alone(number, job.nproc, restarts, plan.port)
        return begin_with_others(number, job.nproc, restarts, rendezvous, job.command)

    with supervise.received_signals() as signals:
        try:
            while True:
                attempt = supervise.wait_interruptibly(begin, events.hearing(signals))
                attempt.events = events
                events.started(attempt.topology, job.command)
                number, restarts = attempt.topology.attempt, attempt.topology.restarts  # another node may be further
                if number:
                    say(f"attempt {number + 1} of {restarts + 1}")
                outcome = supervise.run_attempt(job, attempt, signals)
                attempt.stop()
                events.outcome(outcome)
                # For the ranks this is a restart, after which they go on, though no failure counts for it.
                is_free = outcome.kind in ("joined", "left")
                if outcome.kind in ("done", "stopped") or (number >= restarts and not is_free):
                    # argparse fails with this code, but so do other programs.
                    if outcome.kind == "failed" and outcome.code == 2 and not plan.told:
                        own = [name for name in make_parser()._option_string_actions if name.startswith("--")]
                        say_where_options_stand(job.command, own)
                    return outcome.code
                number, restarts = number + 1, restarts + is_free
                if attempt.asked is not None:  # This signal came while the ranks were being stopped after a failure.
                    raise Interrupted(attempt.asked)
        except Interrupted as interrupted:
            say(f"{signal_name(interrupted.signum)} received")
            return 128 + interrupted.signum
        except (NodeError, OSError) as error:  # The folder of the logs may have gone, or the disk may be full.
            say(str(error))
            events.outcome(Outcome("failed", text=str(error)))
            return 1
        finally:
            if attempt is not None:
                attempt.leave()
            if rendezvous is not None:
                rendezvous.leave()


# The command line


def say_where_options_stand(
    command: list[str],
    options: Iterable[str],
    tell: Callable[[str], None] = say,
    of: str = "launcher",
    before: str = "",
) -> bool:
    """Tell whether the script has got an option of the launcher, and say so to the user.

    Args:
        command: the script, or -m and a module, and its arguments.
        options: of the launcher, or of another command that runs scripts.
        tell: says it.
        of: the name of the other command, and `before`, what its users write in front of the script.
    """
    n_words = 2 if command[0] == "-m" else 1
    script, given = " ".join(command[:n_words]), {word.partition("=")[0] for word in command[n_words:]}
    for option in options:
        if option in given:
            tell(
                f"{option} stands behind the script, so the script has got it; "
                f"options of the {of} stand before it: {option} ... {before}{script}"
            )
            return True
    return False


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments that have an option; as with torchrun, underscores may stand for the dashes in its name.

        Returns:
            The options, and the arguments without one.
        """
        args = sys.argv[1:] if args is None else args
        options, unknown = super().parse_known_args(args, namespace)
        for word in unknown:
            name, equals, value = word.partition("=")
            dashed = name.replace("_", "-")
            if dashed != name and dashed in self._option_string_actions:
                at = args.index(word)  # the first one, as all behind the script belongs to it
                return self.parse_known_args([*args[:at], dashed + equals + value, *args[at + 1 :]], namespace)
        return options, unknown

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments; for an unknown option, name the nearest one, and say where those of a script stand."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            hint = did_you_mean(name, self._option_string_actions, cutoff=0.75)  # The dashes make all names alike.
            if getattr(options, "command", None) and not getattr(options, "check", False):
                hint += f"; arguments of the script stand behind it, as in: script.py {name}"
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return options

    def error(self, message: str, code: int = 2) -> NoReturn:
        """Print the message and leave."""
        self.exit(code, f"{self.prog}: error: {printable(message, 2000)}\n")


def process_count(text: str) -> int:
    """Return the number of processes that an option gives; torchrun has words for it, too, which are refused."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"invalid int value: {text!r}; give a number, or leave it out for one per GPU"
        ) from None


def make_parser(prog: str = "learnerkit.launch") -> Parser:
    """Return the parser with its options."""
    parser = Parser(
        prog=prog,
        usage="python -m learnerkit.launch [options] script.py [arguments of the script]\n"
        "       python -m learnerkit.launch [options] -m package.module [arguments of the module]",
        description="Run a training script once per GPU of this machine, or of several; without GPUs, once.",
        epilog="examples:\n"
        "  python -m learnerkit.launch train.py --epochs 5        every GPU\n"
        "  python -m learnerkit.launch --gpus 0,2 train.py        two of them\n"
        "  python -m learnerkit.launch --nproc 2 -m pkg.train     two processes, also without a GPU\n"
        "  srun python -m learnerkit.launch train.py              every GPU of a SLURM job\n"
        "  python -m learnerkit.launch --check                    look at the machine first\n"
        "  python -m learnerkit.launch --report train.py          where would its time go?\n\n"
        "The exit code is the script's, or 128 + n if signal n ended it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    grace = f"{supervise.GRACE_SECONDS:.0f} after a failure or Ctrl-C, {supervise.LONG_GRACE_SECONDS:.0f} after SIGTERM"
    add = parser.add_argument
    add(
        "-n",
        "--nproc",
        "--nproc-per-node",
        type=process_count,
        metavar="N",
        help="number of processes (default: one per GPU)",
    )
    add("--gpus", metavar="0,1", help="the GPUs to use, by index, with one process each")
    add("--max-restarts", type=int, metavar="N", help="restart all processes after a failure, N times")
    add("--timeout", type=float, metavar="S", help="seconds to wait for a rank or a node before giving up (300)")
    add("--grace", type=float, metavar="S", help=f"seconds to stop in before being killed (default: {grace})")
    add("--log-dir", type=Path, metavar="D", help="append output and whole tracebacks to D/attempt-0/rank-0.log ...")
    add("--tee", action="store_true", help="show the output line by line with the number of its rank, logged or not")
    add("--events", metavar="F", help="append a JSON line to F for each state of the run, for other programs")
    add("--heartbeat", metavar="F", help="set the time of F to that of the last movement, for liveness probes")
    add("--check", action="store_true", help="run the preflight check in place of the script")
    add("--report", action="store_true", help="print a scaling report in place of the script's first fit, and end")
    add("-u", dest="unbuffered", action="store_true", help="do not buffer the output of the processes")
    add("-m", dest="as_module", action="store_true", help="run a module, as python -m does")
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    same = "run the same command on each; on a cluster none of these is needed"
    add = parser.add_argument_group("several machines", same).add_argument
    add("--nnodes", metavar="N|MIN:MAX", help="number of machines (nodes), or the least and the most of them")
    add("--node-rank", type=int, metavar="R", help="which of N nodes this is, from 0")
    add("--master-addr", metavar="A", help="address of node 0")
    add("--master-port", type=int, metavar="P", help=f"port at which node 0 listens (default: {PORT})")
    add("--rdzv-endpoint", metavar="H:P", help="for nodes that may come and go, or have no numbers: host:port of one")
    add_job_options(parser)
    return parser


JOB_OPTIONS = {
    "--nodes": ("N", "machines (1)"),
    "--gpus-per-node": ("[TYPE:]N", "GPUs of each, such as 4; for slurm also v100:4, for skypilot H100:8"),
    "--time": ("T", "time limit, such as 08:00:00 (slurm, kubeflow, sagemaker)"),
    "--job-name": ("X", "default: the script's name"),
    "--image": ("X", "the container's image (kubeflow, skypilot, sagemaker)"),
    "--instance-type": ("X", "the kind of machine, such as ml.p4d.24xlarge (sagemaker)"),
    "--partition": ("X", "where to queue (this and all that follow: slurm)"),
    "--account": ("X", "who pays"),
    "--cpus-per-task": ("N", "CPU cores of each machine"),
    "--mem": ("M", "memory of each machine, such as 64G"),
    "--mem-per-cpu": ("M", "or memory for each of its CPU cores, such as 4G"),
    "--output": ("F", "file of what is printed (%%x-%%j.out: the job's name and number)"),
    "--error": ("F", "file of the error messages alone (default: they go to --output)"),
}


def add_job_options(parser: Parser) -> None:
    """Add the options that write a job file."""
    writes = "write a file that has a scheduler run this command, and again where it continues; run nothing"
    add = parser.add_argument_group("a job file", writes).add_argument
    add("--write-job", choices=jobs.KINDS, help="for which scheduler")
    add("--job-file", metavar="F", help="the file (default: named after script and scheduler); - prints it")
    add("--write-sbatch", metavar="F", help="the same as --write-job slurm --job-file F")
    setup = 'such as "source ~/venv/bin/activate" or "conda activate x"'
    add("--setup", action="append", metavar='"..."', help=f"first run a shell command, {setup}; repeatable")
    module = "load a module, such as cuda/12.4, in its order among the --setup commands; repeatable"
    add("--module", dest="setup", type="module load {}".format, action="append", metavar="NAME", help=module)
    add("--env", action="append", metavar="NAME=VALUE", help="set a variable to exactly this value; repeatable")
    for option, (metavar, meaning) in JOB_OPTIONS.items():
        add(option, metavar=metavar, help=meaning)
    other = "any other option of sbatch, such as --exclusive; repeatable"
    add("--sbatch", type=str.strip, action="append", metavar='"..."', help=other)  # see protect_sbatch_values


def parse(argv: Sequence[str] | None, prog: str = "learnerkit.launch") -> Plan | int:
    """Turn the command line into a Plan; what follows the script or module belongs to it, untouched.

    Returns:
        The plan, or the exit code if nothing is to be run.
    """
    parser = make_parser(prog)
    words = list(sys.argv[1:] if argv is None else argv)
    protected = protect_sbatch_values(words)
    options = parser.parse_args(protected)
    count = len(words) - len(options.command)
    own = words[count:]
    try:
        script = choose_command(options.as_module, own) if own or not options.check else DOCTOR
        command = DOCTOR if options.check else script
        check_numbers(options)
        if options.check and options.report:
            raise ValueError("--check does not go with --report, which runs the script; leave one of them out")
        if options.write_job or options.write_sbatch is not None:
            return write_job(options, command, protected[:count])
        if unused := [name for name in ("job_file", *jobs.USES) if getattr(options, name) is not None]:
            name = "--module or --setup" if unused[0] == "setup" else jobs.flag(unused[0])
            raise ValueError(f"{name} goes with --write-job, which writes a job file")
        if options.log_dir:
            make_log_dir(options.log_dir)
        nodes, place = choose_nodes(options, os.environ)
        nproc, gpus = choose_processes(options.nproc, options.gpus, os.environ, place)
        port = 0 if nodes else free_port(options.master_port or 0)
        events = None if options.events is None else check_file("--events", options.events)
        heartbeat = None if options.heartbeat is None else check_file("--heartbeat", options.heartbeat)
    except ValueError as error:
        parser.error(str(error))
    job = Job(
        command, nproc, gpus, options.grace, options.unbuffered, options.timeout, options.log_dir, options.tee,
        explains_failure=options.check, reports=options.report, events=events, heartbeat=heartbeat,
        env={name: value for name, value in place.shared().items() if name not in os.environ},
    )  # fmt: skip
    # A script that reads no arguments would say nothing, and run on another number of processes than was meant.
    counts = () if options.nproc or options.gpus or options.nnodes else COUNTS
    restarts = place.restarts if options.max_restarts is None else options.max_restarts
    restarts = 0 if options.check else restarts  # Another check would say the same.
    return Plan(job, restarts, nodes, port, say_where_options_stand(script, counts), place.attempt)


def protect_sbatch_values(words: list[str]) -> list[str]:
    """Put a space before what follows --sbatch, so that argparse does not take it for one of its options."""
    return [f" {word}" if before == "--sbatch" else word for before, word in zip(["", *words], words, strict=False)]


def make_log_dir(folder: Path) -> None:
    """Make the folder of the ranks' output, if it is not there; refuse one that cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"--log-dir {folder}: {error.strerror}; name a folder that can be made") from error


def check_numbers(options: argparse.Namespace) -> None:
    """Refuse numbers that are out of range."""
    if options.grace is not None and not 0 <= options.grace < float("inf"):
        raise ValueError(f"--grace {options.grace}: give seconds, 0 or more")
    if options.timeout is not None and not 0 < options.timeout < float("inf"):
        raise ValueError(f"--timeout {options.timeout}: give seconds, more than 0")
    if options.master_port is not None and not 0 < options.master_port < 65536:
        raise ValueError(f"--master-port {options.master_port}: give a port from 1 to 65535")
    if options.max_restarts is not None and options.max_restarts < 0:
        raise ValueError(f"--max-restarts {options.max_restarts}: give a number, 0 or more")


def choose_command(module: bool, command: list[str]) -> list[str]:
    """Return what each process is to run: a script or ``-m`` and a module, with its arguments."""
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise ValueError("nothing to run: name a script (train.py) or a module (-m package.module)")
    if module:
        return ["-m", *command]
    script = command[0]
    if os.path.abspath(script).startswith(("/dev/stdin", "/dev/fd/", "/proc/self/fd/")):
        raise ValueError(f"{script!r} cannot be run, as each process would have to read it: give the script's file")
    if not os.path.isfile(script):
        raise ValueError(f"{script!r} is not a file (in {os.getcwd()}); name a Python script, or use -m")
    if script.endswith(".pyc") or is_zipfile(script):
        raise ValueError(f"{script!r} is compiled, or an archive; name a Python script, or use -m with PYTHONPATH")
    return command


def free_port(port: int) -> int:
    """Return the port asked for on one machine, where 0 is any; refuse one that is taken."""
    try:
        socket.create_server((LOOPBACK, port)).close()
    except OSError as error:
        raise ValueError(f"--master-port {port}: {error.strerror}; give another one, or none for a free one") from error
    return port


# Several machines


def choose_nodes(
    options: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[Static | Elastic | None, clusters.Place]:
    """Return how the machines of the run find each other, if there are several, and the place that a cluster tells.

    What the options say goes before what the cluster says.
    """
    least, most = node_counts(options.nnodes)
    missing = [options.node_rank, options.master_addr].count(None)
    if options.rdzv_endpoint is not None:
        if missing < 2 or options.master_port is not None:
            raise ValueError("--rdzv-endpoint does not go with --node-rank, --master-addr or --master-port")
        if options.nnodes is None:
            raise ValueError("--rdzv-endpoint needs --nnodes: how many nodes, such as 2, or 1:4")
        return Elastic(least, most, *parse_endpoint(options.rdzv_endpoint, PORT)), ALONE
    if least < most:
        raise ValueError(f"--nnodes {options.nnodes} needs --rdzv-endpoint host:port, as nodes may come and go")
    if options.nnodes is not None and most == 1:
        return None, ALONE
    if missing:
        place = find_place(options, environ)
        if place is not None:
            return nodes_of(place), place
        if options.nnodes is None and missing == 2:
            return None, ALONE
    if options.nnodes is None or missing:
        raise ValueError("several machines need --nnodes, --node-rank and --master-addr, or --rdzv-endpoint")
    if not 0 <= options.node_rank < most:
        raise ValueError(f"--node-rank {options.node_rank}: give 0 to {most - 1}, another one on each node")
    return Static(options.node_rank, most, options.master_addr, options.master_port or PORT), ALONE


def find_place(options: argparse.Namespace, environ: Mapping[str, str]) -> clusters.Place | None:
    """Return the place that a cluster tells, with what the options say of it, and say which cluster it is."""
    address, port = options.master_addr, options.master_port
    place = clusters.find(environ if address is None else {**environ, "MASTER_ADDR": address})
    if place is None:
        if hint := clusters.advice(environ):
            say(hint)
        return None
    if place.launched and place.nodes == 1:
        return None
    if options.nnodes not in (None, str(place.nodes)):
        raise ValueError(f"--nnodes {options.nnodes}, but {place}; give --node-rank and --master-addr, too")
    clusters.check_launcher(place, environ, len(gpu_names(environ)), options.nproc)
    node = place.node if options.node_rank is None else options.node_rank
    place = replace(place, node=node, address=address or place.address, port=port or place.port)
    if not place.is_rank or place.node == 0:
        say(str(place))
    return place


def nodes_of(place: clusters.Place) -> Static | Elastic | None:
    """Return how the machines of a cluster find each other, if there are several."""
    if place.least is not None:
        return Elastic(place.least, place.nodes, place.address, place.port)
    return Static(place.node, place.nodes, place.address, place.port) if place.nodes > 1 else None


def node_counts(text: str | None) -> tuple[int, int]:
    """Turn 'N' or 'MIN:MAX' into two numbers."""
    if text is None:
        return 1, 1
    least, _, most = text.partition(":")
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", text) or int(most or least) < int(least):
        raise ValueError(f"--nnodes {text}: give a number of machines, such as 2, or the least and the most, as 1:4")
    return int(least), int(most or least)


def write_job(options: argparse.Namespace, command: list[str], words: list[str]) -> int:
    """Write a job file, say what to do with it, and return the exit code.

    Args:
        options: the values of all options.
        command: the script or module, with its arguments.
        words: the command line before the script; the options in it that write no job file go into the job.
    """
    if options.write_job and options.write_sbatch is not None:
        raise ValueError("--write-sbatch F is --write-job slurm --job-file F; leave one of them out")
    for name in ("nnodes", "node_rank", "master_addr", "master_port", "rdzv_endpoint"):
        if getattr(options, name) is not None:
            raise ValueError(f"leave {jobs.flag(name)} out: --nodes says how many, and the scheduler the rest")
    kind = options.write_job or "slurm"
    ending, instruction = jobs.KINDS[kind]
    values = {name: getattr(options, name) for name in jobs.USES}
    values["job_name"] = values["job_name"] or jobs.default_name(kind, command)
    add_job_options(parser := Parser(add_help=False, allow_abbrev=False))
    # Without -m, which stands before the module, and which may share its dash with -u.
    others = parser.parse_known_args(words)[1]
    launcher = [re.sub("^-([um]+)", lambda short: short[0].replace("m", ""), word) for word in others]
    launcher = [word for word in launcher if word not in ("-", "--")]
    grace = supervise.LONG_GRACE_SECONDS if options.grace is None else options.grace
    text = jobs.job_text(kind, command, values, launcher, nproc=options.nproc, grace=grace)
    file = options.job_file if options.write_sbatch is None else options.write_sbatch
    file = f"{jobs.script_name(command)}.{ending}" if file is None else file
    if file == "-":
        print(text, end="")
        return 0
    path = Path(file)
    try:
        if path.exists() and path.read_bytes() != text.encode():  # somebody may have edited it
            raise ValueError(f"{path}: the file is there, with other content; remove it, or give another --job-file")
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    name = shlex.quote(escaped_line(file))
    print(f"wrote {name}; {instruction.format(name)}", *jobs.remarks(kind, values), sep="\n")
    return 0


# GPUs, found without torch


def choose_processes(
    nproc: int | None, gpus: str | None, environ: Mapping[str, str], place: clusters.Place = ALONE
) -> tuple[int, str | None]:
    """Return the number of processes and, if `gpus` picks some, the CUDA_VISIBLE_DEVICES for them."""
    if place.is_rank and gpus is not None:
        raise ValueError(f"--gpus {gpus}, but {place}; it starts a process for each rank, so leave --gpus out")
    if place.is_rank or (nproc is None and gpus is None):
        nproc = place.nproc
    if nproc is not None and gpus is not None:
        raise ValueError("--nproc does not go with --gpus, which starts one process per GPU; leave one of them out")
    if nproc is not None and nproc < 1:
        raise ValueError(f"--nproc {nproc}: give the number of processes, 1 or more")
    names = gpu_names(environ)
    if gpus is not None:
        chosen = choose_gpus(gpus, names)
        return len(chosen), ",".join(chosen)
    if nproc and nproc > len(names) > 0:
        raise ValueError(
            f"--nproc {nproc}: every process needs a GPU of its own, and {len(names)} can be used; "
            "ask for fewer, or set CUDA_VISIBLE_DEVICES= (to nothing) to run on the CPU"
        )
    return nproc or max(len(names), 1), None
