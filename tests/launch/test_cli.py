"""The launcher, with real processes wherever processes are the point."""

import ctypes
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import termios
import textwrap
import time
import uuid
import zipfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from launching import in_time

from learnerkit import clusters
from learnerkit.clusters import Place
from learnerkit.endings import is_collective_error
from learnerkit.launch import cli, gpus
from learnerkit.launch.cli import Plan, choose_processes, parse
from learnerkit.launch.environment import Topology, rank_environment
from learnerkit.launch.gpus import gpu_names, listed_gpus
from learnerkit.launch.rendezvous import Elastic, Static
from learnerkit.launch.report import Outcome
from learnerkit.launch.supervise import CAUSE_SECONDS, KILL_SECONDS, Job

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "scripts"
LIMIT = 120  # seconds for any one run


class Run(subprocess.Popen):
    """A process of a test; a mark in the environment shows what it has started."""

    def __init__(self, *command, mark, env, **options):
        cleared = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        base = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "LAUNCH_TEST": mark}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.PIPE, "text": True}
        super().__init__([sys.executable, *map(str, command)], env=cleared | base | env, **pipes | options)

    def wait_for(self, line, times=2):
        """Read the standard output until a line has come up so many times."""
        while times:
            times -= next(self.stdout).strip() == line

    def finish(self):
        """Wait for the end and return exit code, standard output and standard error."""
        out, err = self.communicate(timeout=LIMIT)
        return self.returncode, out, err


@pytest.fixture
def run():
    """Start processes; at the end of the test nothing they have started may be left."""
    mark = uuid.uuid4().hex
    # If pytest itself runs in the background of a shell, SIGINT is ignored there, and so it would be in a child.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    runs = []

    def start(*command, env=None, **options):
        runs.append(Run(*command, mark=mark, env=env or {}, **options))
        return runs[-1]

    yield start
    signal.signal(signal.SIGINT, before)
    left = marked(mark)
    for process in left:
        process.kill()
    for process in runs:
        process.communicate()
    assert not left


@pytest.fixture
def launched(run):
    """Start the launcher."""
    return lambda *arguments, **options: run("-m", "learnerkit.launch", *arguments, **options)


def marked(mark):
    """Return the living processes with this mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("LAUNCH_TEST") == mark:
                found.append(process)
        except psutil.Error:
            pass
    return found


def says(err):
    """Return what the launcher itself has printed."""
    return [line for line in err.splitlines() if line.startswith("learnerkit.launch: ")]


# The command line


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize(
    ("options", "nproc"),
    [
        ([], 1),
        (["--nproc", "3"], 3),
        (["--nproc-per-node", "2"], 2),
        (["-n", "4"], 4),
        (["--max_restarts=0", "--nproc_per_node", "2"], 2),
    ],
)
@pytest.mark.parametrize("separator", [[], ["--"]])
def test_what_follows_the_script_is_its_own(no_gpu, options, nproc, separator):
    own = ["--nproc", "5", "-m", "x", "--", "--gpus", "-u", "-h", "--max_restarts", "--np=1", ""]
    told = not options
    assert parse([*options, *separator, __file__, *own]) == Plan(Job([__file__, *own], nproc), told=told)
    assert parse([*options, "-u", "--grace", "1.5", "-m", "pkg.mod", *own]) == Plan(
        Job(["-m", "pkg.mod", *own], nproc, grace=1.5, unbuffered=True), told=told
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to run"),
        (["-m"], "nothing to run"),
        (["no_such_script.py"], "'no_such_script.py' is not a file"),
        (["--nproc", "0", __file__], "--nproc 0: give"),
        (["--nproc", "two", __file__], "invalid int value: 'two'; give a number, or leave it out for one per GPU"),
        (["--nproc", "2", "--gpus", "0", __file__], "--nproc does not go with --gpus"),
        (["--gpus", "0", __file__], "no GPU can be used here"),
        (["--grace", "-1", __file__], "--grace -1.0: give seconds"),
        (["--grace", "nan", __file__], "--grace nan: give seconds"),
        (["--npro", "2", __file__], "unrecognized arguments: --npro"),
        (
            ["--nproc", "2", "--epochs", "3", __file__],
            "unrecognized arguments: --epochs; arguments of the script stand behind it, as in: script.py --epochs",
        ),
        (["--timeout", "0", __file__], "--timeout 0.0: give seconds, more than 0"),
        (["--max-restarts", "-1", __file__], "--max-restarts -1: give a number"),
        (["--write-sbatch", "", __file__], ".: Is a directory"),
        (["--write-job", "slurm", "--job-file", "", __file__], ".: Is a directory"),
        (["--events", "", __file__], "--events : No such file or directory; name a regular file"),
        (["--heartbeat", "", __file__], "--heartbeat : No such file or directory; name a regular file"),
        (["--master-port", "0", __file__], "--master-port 0: give a port from 1 to 65535"),
        (["--log-dir", __file__, __file__], "test_cli.py: File exists; name a folder that can be made"),
        (["--log-dir", "/proc", __file__], "--log-dir /proc: No such file or directory; name a folder"),
        (["/dev/stdin"], "'/dev/stdin' cannot be run, as each process would have to read it"),
        (["--nnodes", "3:2", __file__], "--nnodes 3:2: give a number of machines"),
        (["--nnodes", "1:4", "--node-rank", "0", "--master-addr", "a", __file__], "1:4 needs --rdzv-endpoint"),
        (["--nnodes", "2", "--node-rank", "0", __file__], "need --nnodes, --node-rank and --master-addr"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "a", __file__], "--node-rank 2: give 0 to 1"),
        (["--rdzv-endpoint", "a:1", __file__], "--rdzv-endpoint needs --nnodes"),
        (["--nnodes", "2", "--rdzv-endpoint", "a:x", __file__], "'a:x': give host:port"),
        (["--nnodes", "2", "--rdzv-endpoint", "a:1", "--node-rank", "0", __file__], "does not go with --node-rank"),
        (["--nodes", "2", __file__], "--nodes goes with --write-job"),
        (["--sbatch", "--exclusive", __file__], "--sbatch goes with --write-job"),
        (["--setup", "true", __file__], "--module or --setup goes with --write-job"),
        (["--env", "A=1", __file__], "--env goes with --write-job"),
        (["--nprocs=2", __file__], "unrecognized arguments: --nprocs=2; did you mean '--nproc'?"),
        (["--\x1b[2J\n" + "x" * 10_000, __file__], "unrecognized arguments: --\\x1b[2J\\nxxx"),
        (["--mem-per-cpu", "1G", __file__], "--mem-per-cpu goes with --write-job"),
        (["--write-sbatch", "job.sh", "--sbatch"], "argument --sbatch: expected one argument"),
        (["--write-sbatch", "job.sh", "--sbatch", "--requeue", __file__], "--sbatch '--requeue': leave --requeue out"),
        (["--write-sbatch", "a", "--write-job", "slurm", __file__], "leave one of them out"),
        (["--write-job", "pbs", __file__], "invalid choice: 'pbs'"),
        (["--write-job", "slurm", "--nnodes", "2", __file__], "leave --nnodes out: --nodes says how many"),
        (["--job-file", "job.sh", __file__], "--job-file goes with --write-job"),
        (["--write-sbatch", "/no/such/folder/job.sh", __file__], "job.sh: No such file or directory"),
    ],
)
def test_bad_values_are_one_line_and_code_2(no_gpu, capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (2, "")
    assert message in err
    assert (err.count("\n"), len(err) < 3000) == (1, True)


# GPUs


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("0,2", ["0", "2"]),
        (" 1 , 0", ["1", "0"]),
        ("GPU-8932f937,MIG-GPU-8932f937/1/0", ["GPU-8932f937", "MIG-GPU-8932f937/1/0"]),
        ("0,-1,2", ["0"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_listed_gpus_keep_their_names_and_order(visible, names):
    assert listed_gpus(visible) == names
    assert gpu_names({"CUDA_VISIBLE_DEVICES": visible}) == names


@pytest.mark.parametrize(
    ("nvml", "device_file", "expected"), [(4, True, 4), (0, True, 0), (None, True, 7), (None, False, 0)]
)
def test_gpus_are_counted_by_nvml_then_torch(monkeypatch, tmp_path, nvml, device_file, expected):
    device = tmp_path / "device"
    if device_file:
        device.touch()
    monkeypatch.setattr(gpus, "GPU_DEVICE_FILES", ("/no/such/device", str(device)))
    monkeypatch.setattr(gpus, "count_with_nvml", lambda: nvml)
    monkeypatch.setattr(gpus, "count_with_torch", lambda: 7)
    assert gpu_names({}) == [str(index) for index in range(expected)]


@pytest.mark.parametrize(("started", "answer", "count"), [(0, 0, 3), (9, 0, None), (0, 9, None)])
def test_nvml_is_asked_through_ctypes(monkeypatch, started, answer, count):
    def device_count(pointer):
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint))[0] = 3
        return answer

    library = SimpleNamespace(nvmlInit_v2=lambda: started, nvmlDeviceGetCount_v2=device_count, nvmlShutdown=lambda: 0)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert gpus.count_with_nvml() == count


def test_a_missing_nvml_library_counts_no_gpus(monkeypatch):
    def missing(name):
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert gpus.count_with_nvml() is None


@pytest.mark.parametrize(("answer", "count"), [("print(2)", 2), ("import no_such_module", 0)])
def test_torch_is_asked_in_another_process(monkeypatch, answer, count):
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **options: run([*command[:2], answer], stderr=-3, **options))
    assert gpus.count_with_torch() == count


def test_the_number_of_processes_is_that_of_the_gpus():
    four, none = {"CUDA_VISIBLE_DEVICES": "4,5,GPU-a,7"}, {"CUDA_VISIBLE_DEVICES": ""}
    assert choose_processes(None, None, four) == (4, None)
    assert choose_processes(3, None, four) == (3, None)
    assert choose_processes(None, "2,0", four) == (2, "GPU-a,4")
    assert choose_processes(None, None, none) == (1, None)
    assert choose_processes(8, None, none) == (8, None)
    with pytest.raises(ValueError, match="--nproc 5: every process needs a GPU of its own, and 4 can be used"):
        choose_processes(5, None, four)
    for bad in ("4", "0,0", "x", "", "-1"):
        with pytest.raises(ValueError, match="give indices from 0 to 3, each once"):
            choose_processes(None, bad, four)


# Several machines


@pytest.mark.parametrize(
    ("options", "nodes", "nproc"),
    [
        ([], None, 3),
        (["--nnodes", "1"], None, 3),
        (["--nnodes", "2", "--node-rank", "1", "--master-addr", "a"], Static(1, 2, "a", 29500), 3),
        (["--nnodes=2", "--node-rank=0", "--master-addr=a", "--master-port=7"], Static(0, 2, "a", 7), 3),
        (["--nnodes", "1:4", "--rdzv-endpoint", "b:8"], Elastic(1, 4, "b", 8), 3),
        (["--nnodes", "2", "--rdzv-endpoint", "b"], Elastic(2, 2, "b", 29500), 3),
    ],
)
def test_options_say_how_machines_meet(no_gpu, options, nodes, nproc):
    plan = parse([*options, "--nproc", "3", "--max-restarts", "2", __file__])
    assert plan == Plan(Job([__file__], nproc), 2, nodes)


def test_ranks_start_again_with_a_node_that_joins_as_after_a_failure_that_does_not_count(monkeypatch):
    outcomes, found = [Outcome("joined"), Outcome("failed", code=3)], []

    def run_attempt(job, attempt, signals):
        found.append((attempt.topology.attempt, attempt.topology.restarts))
        attempt.close_listener()
        return outcomes.pop(0)

    monkeypatch.setattr(cli.supervise, "run_attempt", run_attempt)
    assert cli.run(Plan(Job(["train.py"], 1))) == 3
    assert found == [(0, 0), (1, 1)]


def test_slurm_says_how_machines_meet(no_gpu, monkeypatch):
    for task in (Place("SLURM", "", 1, 2, "gpu1", 21000), Place("SLURM", "", 5, 8, "gpu1", 21000, 1, is_rank=True)):
        monkeypatch.setattr(clusters, "find", lambda environ, task=task: task)
        plan = parse([__file__])
        assert plan.nodes == Static(task.node, task.nodes, "gpu1", 21000)
        assert plan.job.nproc == 1
        options = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "a"]
        assert parse([*options, __file__]).nodes.address == "a"  # what is said goes before what is found
    assert parse(["--nproc", "3", __file__]).job.nproc == 1  # one GPU for each


KUBEFLOW = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "llama-0.llama"}
SAGEMAKER = {
    "SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-1", "SM_NUM_GPUS": "0",
    "SM_NETWORK_INTERFACE_NAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0",
}  # fmt: skip
LEPTON = {"LEPTON_JOB_NAME": "x", "LEPTON_JOB_TOTAL_WORKERS": "1", "LEPTON_JOB_FAILURE_COUNT": "2"}
ELASTIC = {"PET_MAX_RESTARTS": "3", "PET_NNODES": "1:4", "PET_NPROC_PER_NODE": "2", "PET_RDZV_ENDPOINT": "w-0:7"}
MPI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}


@pytest.mark.parametrize(
    ("environ", "options", "nodes", "nproc", "said"),
    [
        (KUBEFLOW, [], Static(1, 2, "llama-0.llama", 29500), 4, "Kubeflow says node 1 of 2, with node 0 at llama-0."),
        (KUBEFLOW, ["--nproc", "3"], Static(1, 2, "llama-0.llama", 29500), 3, "Kubeflow says node 1 of 2"),
        (KUBEFLOW, ["--master-port", "7"], Static(1, 2, "llama-0.llama", 7), 4, "Kubeflow says node 1 of 2"),
        (KUBEFLOW, ["--nnodes", "2", "--master-addr", "b"], Static(1, 2, "b", 29500), 4, "Kubeflow says node 1 of 2"),
        (KUBEFLOW, ["--nnodes", "1"], None, 1, ""),
        (KUBEFLOW, ["--nnodes=3", "--node-rank=2", "--master-addr=a"], Static(2, 3, "a", 29500), 1, ""),
        (KUBEFLOW, ["--nnodes", "2", "--rdzv-endpoint", "b:8"], Elastic(2, 2, "b", 8), 1, ""),
        (KUBEFLOW | {"PET_NNODES": "1"}, [], None, 4, "Kubeflow says one node (PET_NNODES)"),
        (ELASTIC, [], Elastic(1, 4, "w-0", 7), 2, "Kubeflow says 1 to 4 nodes, which meet at w-0:7"),
        (SAGEMAKER, [], Static(0, 2, "algo-1", 29500), 1, "SageMaker says node 0 of 2"),
        (MPI, ["--master-addr", "n1"], Static(1, 2, "n1", 29500), 1, "MPI says node 1 of 2, with node 0 at n1:29500"),
        (SAGEMAKER | {"SM_HOSTS": '["algo-1"]'}, [], None, 1, "SageMaker says one node (SM_HOSTS"),
        (
            KUBEFLOW | {"PET_MAX_RESTARTS": "2"},
            ["--max-restarts", "0"],
            Static(1, 2, "llama-0.llama", 29500),
            4,
            "Kubeflow",
        ),
        (LEPTON, ["--max-restarts", "1"], None, 1, "Lepton says one node, attempt 3 ("),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, [], None, 1, ""),  # a launcher's only rank
        ({}, [], None, 1, ""),
    ],
)
def test_a_cluster_says_how_machines_meet_unless_options_do(no_gpu, monkeypatch, capsys, environ, options, nodes, nproc,
                                                            said):  # fmt: skip
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    plan = parse([*options, __file__])
    assert (plan.nodes, plan.job.nproc, plan.attempt) == (nodes, nproc, 2 if environ is LEPTON else 0)
    assert plan.restarts == (1 if environ is LEPTON else 3 if environ is ELASTIC else 0)
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", bool(said))
    assert err.startswith(f"learnerkit.launch: {said}" if said else "")
    of_network = {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}  # the user has chosen that of NCCL
    of_run = {"LEARNERKIT_LAUNCHER": "Lepton x"} if environ is LEPTON else {}
    assert plan.job.env == (of_network if environ is SAGEMAKER else of_run)


@pytest.mark.parametrize(
    ("environ", "options", "message"),
    [
        (KUBEFLOW, ["--nnodes", "3"], "--nnodes 3, but Kubeflow says node 1 of 2, with"),
        (KUBEFLOW | {"RANK": "0", "WORLD_SIZE": "2"}, [], "but RANK=0 and WORLD_SIZE=2; give --nnodes, --node-rank"),
        (MPI, [], "nothing says where rank 0 is; give it as --master-addr"),
        (
            MPI | {"MPI_LOCALNRANKS": "2"}, ["--gpus", "0"],
            "--gpus 0, but MPI says rank 1 of 2, with rank 0 at 127.0.0.1:29500 (PMI_RANK, PMI_SIZE); it starts a",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, [], "run the script itself here, or --nnodes 1 starts"),
    ],
)  # fmt: skip
def test_a_contradiction_is_one_line_with_the_option_that_settles_it(
    no_gpu, monkeypatch, capsys, environ, options, message
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        parse([*options, __file__])
    err = capsys.readouterr().err
    assert (ended.value.code, err.count("\n"), message in err) == (2, 1, True), err


def test_a_batch_script_gets_the_launchers_options(no_gpu, tmp_path, capsys):
    job = tmp_path / "job.sh"
    options = ["--nodes", "2", "--gpus-per-node", "4", "--time", "08:00:00", "--grace", "0"]
    options += ["--max-restarts=1", "--tee"]
    assert cli.main(["--write-sbatch", str(job), *options, "-m", "pkg.train", "--nodes", "9"]) == 0
    text = job.read_text()
    assert "#SBATCH --nodes=2\n" in text
    assert "#SBATCH --job-name=pkg.train\n" in text
    assert "python -m learnerkit.launch --grace 0 --max-restarts=1 --tee \\\n    -m pkg.train --nodes 9 &\n" in text
    assert capsys.readouterr().out == f"wrote {job}; submit it with: sbatch {job}\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--gpus_per_node", "4", "--max_restarts=1", __file__], f"--max_restarts=1 \\\n    {__file__}"),
        (["-um", "pkg.train"], "-u \\\n    -m pkg.train"),
        (["-mn2", "pkg.train"], "-n2 \\\n    -m pkg.train"),
    ],
)
def test_a_batch_script_gets_no_option_that_writes_it_and_one_m(no_gpu, capsys, words, line):
    assert cli.main(["--write_job", "slurm", "--job_file", "-", *words]) == 0
    assert f"python -m learnerkit.launch {line} &\n" in capsys.readouterr().out


def test_a_batch_script_that_was_edited_is_not_overwritten(no_gpu, tmp_path, capsys):
    job, words = tmp_path / "job.sh", ["--time", "08:00:00", __file__]
    for _ in range(2):  # the same is written again
        assert cli.main(["--write-sbatch", str(job), *words]) == 0
    job.write_text(edited := job.read_text() + "# edited\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["--write-sbatch", str(job), *words])
    assert (ended.value.code, job.read_text()) == (2, edited)
    assert f"{job}: the file is there, with other content; remove it" in capsys.readouterr().err


def test_what_a_batch_script_does_not_ask_for_is_said(no_gpu, tmp_path, capsys):
    for number, (options, said) in enumerate(
        [
            ([], ["without --gpus-per-node the job asks for no GPUs", "without --time the job has the time limit"]),
            (["--gpus-per-node", "2"], ["without --time the job has the time limit"]),
            (["--time", "10"], ["without --gpus-per-node the job asks for no GPUs"]),
        ]
    ):
        assert cli.main(["--write-sbatch", f"{number}.sh", *options, __file__]) == 0
        _, *lines = capsys.readouterr().out.splitlines()
        assert [line.startswith(start) for line, start in zip(lines, said, strict=True)] == [True] * len(said)


def test_a_batch_script_gets_what_it_is_told_of_the_cluster(no_gpu, tmp_path, capsys):
    job, own = tmp_path / "job.sh", ["--sbatch", "--exclusive", "--env", "x", "--module"]
    Path("train.py").touch()
    Path("logs").mkdir()
    options = ["--gpus-per-node", "v100:4", "--mem-per-cpu", "4G", "--output", "logs/%j.out", "--error", "no/%j.err"]
    options += ["--sbatch", "--exclusive", "--sbatch=--qos=high", "--sbatch", "nice 3", "--setup", "module purge"]
    options += ["--module", "gcc/12", "--env", "A=1", "--setup", "source it", "--module", "a@1", "--env", "B=a b"]
    assert cli.main(["--write-sbatch", str(job), *options, "train.py", *own]) == 0
    text = job.read_text()
    asked = ["gpus-per-node=v100:4", "mem-per-cpu=4G", "output=logs/%j.out", "error=no/%j.err"]
    asked += ["exclusive", "qos=high", "nice 3"]
    assert "".join(f"#SBATCH --{option}\n" for option in asked) in text
    order = ["module purge", "module load gcc/12", "source it", "module load a@1", "export A=1", "export B='a b'"]
    assert [line for line in text.split("\n") if line in order] == order
    assert "\n    train.py --sbatch --exclusive --env x --module &\n" in text
    said = capsys.readouterr().out
    assert "first make the folder no: " in said
    assert "folder logs" not in said


# The processes


def test_the_launcher_needs_the_standard_library_only(run):
    code, out, err = run(
        "-c",
        "import sys; before = set(sys.modules); import learnerkit.launch\n"
        "print({name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))",
    ).finish()
    assert (code, out, err) == (0, "{'learnerkit'}\n", "")


def test_no_command_has_a_library_open_a_file_before_the_standard_files_are_open(run):
    # On some machines ctypes opens a file, which would get the number of a standard file that is closed.
    commands = "learnerkit.__main__, learnerkit.doctor, learnerkit.sweep.cli"
    code, out, err = run("-c", f"import sys, {commands}; print('ctypes' in sys.modules)").finish()
    assert (code, out, err) == (0, "False\n", "")


def test_help_shows_all_options(launched):
    code, out, err = launched("--help", env={"COLUMNS": "80"}).finish()
    assert (code, err) == (0, "")
    assert re.search("--nproc( N)?, --nproc-per-node N", out)  # from Python 3.13 on the value is shown once
    for option in ("--job-file", "--sbatch", "--module", "--setup", "--env", "--output", "--error", "--mem-per-cpu"):
        assert f"\n  {option} " in out
    assert "(%x-%j.out: " in out
    assert max(map(len, out.split("\n"))) <= 100
    assert "examples:" in out


@pytest.mark.parametrize("form", ["script", "link", "module"])
def test_the_script_sees_what_python_would_show_it(run, launched, tmp_path, form):
    (tmp_path / "link.py").symlink_to(SCRIPTS / "launch_facts.py")
    target = {
        "script": ["scripts/launch_facts.py"],
        "link": [tmp_path / "link.py"],
        "module": ["-m", "scripts.launch_facts"],
    }[form]
    own = ["--nproc", "5", "-m", "x", "--", "--gpus", "a b", "$HOME", ""]
    stale = {"RANK": "3", "WORLD_SIZE": "9", "MASTER_PORT": "1"}
    plain = run(*target, *own, cwd=ROOT / "tests", stdin=subprocess.DEVNULL)
    both = launched("--nproc", 2, *target, *own, cwd=ROOT / "tests", env=stale)
    both.stdin.write("meant for the launcher")
    code, out, err = both.finish()
    assert (code, err) == (0, "")
    expected = json.loads(plain.finish()[1])
    seen = sorted(map(json.loads, out.splitlines()), key=lambda facts: facts["env"]["RANK"])
    port = seen[0]["env"]["MASTER_PORT"]
    for number, facts in enumerate(seen):
        env = expected["env"] | stale
        assert facts["env"].pop("LEARNERKIT_HEARTBEAT").endswith(tuple("0123456789"))
        assert facts.pop("env") == rank_environment(env, Topology(2, int(port)), number)
        assert facts == {name: value for name, value in expected.items() if name != "env"}
    assert len(seen) == 2


def test_options_of_the_interpreter_reach_the_ranks(run, tmp_path):
    (tmp_path / "job.py").write_text("import sys\nprint(sys.flags.optimize, sys.warnoptions)")
    code, out, err = run("-O", "-W", "error", "-m", "learnerkit.launch", "job.py", cwd=tmp_path).finish()
    assert (code, out, err) == (0, "1 ['error']\n", "")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pack", "the package runs\n"),
        ("no_such.module", "-m no_such.module: there is no such module"),
        ("pack.no_such", "-m pack.no_such: there is no such module"),
        ("pack.inner", "or it is a package without __main__"),
        ("script.py", "; try script instead of script.py"),
        ("./pack", "-m ./pack: there is no such module"),
        ("broken.part", "ModuleNotFoundError: No module named 'missing_here'"),
    ],
)
def test_what_can_be_run_as_a_module(launched, tmp_path, name, said):
    for folder in ("pack/inner", "broken"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "pack" / "__main__.py").write_text("print('the package runs')")
    (tmp_path / "script.py").touch()
    (tmp_path / "broken" / "__init__.py").write_text("import missing_here")
    code, out, err = launched("--nproc", 1, "-m", name, cwd=tmp_path).finish()
    assert said in out + err
    assert code == (name != "pack")
    assert ("Traceback" in err) == (name == "broken.part")


@pytest.mark.parametrize(
    ("how", "code", "first"),
    [
        ("exit", 3, "rank 1 failed (exit code 3)"),
        pytest.param("text", 1, "rank 1 failed (exit code 1)", marks=pytest.mark.slow),
        pytest.param("abrupt", 5, "rank 1 failed (exit code 5)", marks=pytest.mark.slow),
        pytest.param("interrupted", 130, "rank 1 failed (exit code 130)", marks=pytest.mark.slow),
        ("crash", 139, "rank 1 was killed by signal 11 (SIGSEGV)"),
        pytest.param("killed", 137, "rank 1 was killed by signal 9 (SIGKILL)", marks=pytest.mark.slow),
        pytest.param("syntax", 1, "rank 1 failed (exit code 1)", marks=pytest.mark.slow),
    ],
)
def test_the_exit_code_is_the_scripts(launched, tmp_path, how, code, first):
    command = ["-u", "--nproc", 2, SCRIPTS / "launch_end.py", how]
    ended, out, err = launched(*command, cwd=tmp_path, env={"TMPDIR": str(tmp_path)}).finish()
    lines = says(err)
    assert ended == code
    assert lines[0].startswith(f"learnerkit.launch: {first}")
    assert lines[1].startswith("learnerkit.launch: rank 0 was stopped by the launcher after ")
    assert len(lines) == 2
    assert [file.read_text() for file in tmp_path.iterdir()] == (["last line"] if how == "exit" else [])
    extra = {"text": "a last word\n", "crash": "Current thread", "syntax": "SyntaxError: invalid syntax"}
    assert extra.get(how, "") in err
    assert ("Traceback" in err) == (how == "syntax")
    assert out == {"exit": "exit hook ran after exit\n", "abrupt": "printed before the end\n"}.get(how, "")


def test_the_hook_for_uncaught_errors_is_called_and_the_error_shown_once(launched, tmp_path):
    (tmp_path / "hooked.py").write_text(
        "import sys, traceback\n"
        "def hook(kind, error, trace):\n"
        "    print(kind.__name__, error, trace.tb_lineno)\n"
        "    traceback.print_exception(error)\n"
        "    sys.exit(3)\n"
        "sys.excepthook = hook\n"
        "raise ValueError('a failure')\n"
    )
    code, out, err = launched("hooked.py", cwd=tmp_path).finish()
    assert (code, out) == (1, "ValueError a failure 7\n")
    assert err.count("ValueError: a failure") == 1


def test_what_is_compiled_or_an_archive_is_refused(no_gpu, tmp_path, capsys):
    (tmp_path / "job.pyc").touch()
    with zipfile.ZipFile(tmp_path / "job.zip", "w") as archive:
        archive.writestr("__main__.py", "print('ran')")
    for name in ("job.pyc", "job.zip"):
        with pytest.raises(SystemExit):
            parse([str(tmp_path / name)])
        assert f"{name}' is compiled, or an archive; name a Python script" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--timeout=2"], ["--epochs", "2"]])
def test_where_options_stand_is_said_if_the_script_does_not_know_one(launched, tmp_path, given):
    (tmp_path / "job.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()")
    code, out, err = launched("job.py", *given, cwd=tmp_path).finish()
    assert (code, out) == (2, "")
    expected = (
        "learnerkit.launch: --timeout stands behind the script, so the script has got it; "
        "options of the launcher stand before it: --timeout ... job.py"
    )
    assert says(err)[1:] == ([expected] if "timeout" in given[0] else [])


def test_a_number_of_processes_behind_the_script_is_told_of_where_the_script_reads_no_arguments(launched, tmp_path):
    (tmp_path / "job.py").write_text("print('it ran')")
    code, out, err = launched("job.py", "--nproc", "2", cwd=tmp_path).finish()
    assert (code, out) == (0, "it ran\n")
    (line,) = says(err)
    assert line.startswith("learnerkit.launch: --nproc stands behind the script, so the script has got it; ")


def test_a_check_that_leaves_the_number_of_processes_to_the_script_says_so(no_gpu, capsys):
    assert parse(["--check", __file__, "--nproc", "2"]).job.nproc == 1
    assert says(capsys.readouterr().err)[0].endswith(f"stand before it: --nproc ... {__file__}")


def test_a_check_is_not_repeated_after_a_problem(no_gpu):
    assert parse(["--check", "--max-restarts", "2", __file__]).restarts == 0


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_what_ranks_have_left_does_not_hold_up_the_first_process_of_a_container(run, tmp_path):
    (tmp_path / "job.py").write_text("import os, subprocess\nsubprocess.Popen(['sleep', '60'])\nos._exit(0)\n")
    # With PR_SET_CHILD_SUBREAPER it is the parent of processes whose own has ended, as the first process is.
    main = "import ctypes, sys; ctypes.CDLL(None).prctl(36, 1); from learnerkit.launch.cli import main; "
    began = time.monotonic()
    assert run("-c", main + "sys.exit(main(['job.py']))", cwd=tmp_path).finish() == (0, "", "")
    assert time.monotonic() - began < KILL_SECONDS


@pytest.mark.slow
def test_a_thread_without_end_does_not_hold_up_a_failure(launched):
    began = time.monotonic()
    code, out, err = launched("--nproc", 2, SCRIPTS / "launch_end.py", "stuck").finish()
    assert (code, out) == (1, "printed before the end\n")
    assert says(err)[0].startswith("learnerkit.launch: rank 1 failed (exit code 1) after ")
    assert "KeyError: 'stuck'" in err
    assert "in wait_to_be_stopped" in err  # the stack of what was waited for
    assert time.monotonic() - began < 15


def test_a_rank_may_end_early(launched):
    assert launched("--nproc", 2, SCRIPTS / "launch_end.py", "early").finish() == (0, "rank 1 done\nrank 0 done\n", "")


@pytest.mark.parametrize(
    ("how", "code", "cause", "last", "echo"),
    [
        ("raises", 1, "rank 1 failed (exit code 1)", "ValueError: the cause", "Follower: rank 1 failed in before_step"),
        pytest.param(
            "exits", 3, "rank 1 failed (exit code 3)", "", "Follower: rank 1 failed in before_step",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "killed", 137, "rank 1 was killed by signal 9 (SIGKILL)", "", "RuntimeError: Connection closed by peer",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_the_cause_is_shown_first_even_if_it_ends_last(launched, tmp_path, how, code, cause, last, echo):
    ended, out, err = launched("--nproc", 2, SCRIPTS / "launch_echo.py", how, cwd=tmp_path).finish()
    first, *traceback, follower = err.splitlines()
    assert ended == code
    assert first.startswith(f"learnerkit.launch: {cause}")
    traceback = [line.removeprefix("  ") for line in traceback]
    assert (traceback[0], traceback[-1]) == ("Traceback (most recent call last):", last) if last else traceback == []
    assert follower == f"learnerkit.launch: rank 0 then failed: {echo}"


@pytest.mark.slow
def test_a_cause_that_does_not_end_is_stopped(launched, tmp_path):
    began = time.monotonic()
    code, out, err = launched("--nproc", 2, "--grace", 0.5, SCRIPTS / "launch_echo.py", "stuck", cwd=tmp_path).finish()
    first, message, cause = err.splitlines()
    assert code == 1
    assert first.startswith("learnerkit.launch: rank 0 failed (exit code 1), following another rank, after ")
    assert message == "  Follower: rank 1 failed in before_step"
    assert cause.startswith("learnerkit.launch: rank 1 did not stop in time and was killed after ")
    assert CAUSE_SECONDS < time.monotonic() - began < CAUSE_SECONDS + 5


@pytest.mark.slow
def test_what_a_rank_leaves_running_is_killed(launched):
    code, out, err = launched("--nproc", 2, SCRIPTS / "launch_end.py", "straggler").finish()
    assert code == 0  # the forked child's error is its own, and `run` sees that nothing is left
    assert says(err) == []
    assert err.count("RuntimeError: only a forked child") == 2


@pytest.mark.soak
def test_the_end_of_a_forked_child_is_not_that_of_its_rank(launched, tmp_path):
    (tmp_path / "forks.py").write_text(
        "import os, time, warnings\n"
        "from learnerkit import distributed\n"
        "warnings.simplefilter('ignore')  # newer versions of Python warn of forks\n"
        "for part in range(2):\n"
        "    child = os.fork() if distributed.rank() == 0 else -1\n"
        "    if child == 0:\n"
        "        break\n"
        "    if child > 0:\n"
        "        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0\n"
        "        time.sleep(1)  # the other rank waits by then\n"
        "    distributed.join()\n"
    )
    code, _, err = launched("--nproc", 2, "forks.py", cwd=tmp_path).finish()  # older versions of torch print lines
    assert (code, err) == (0, "")


def test_a_rank_that_does_not_stop_is_killed_after_the_grace_time(launched):
    began = time.monotonic()
    code, out, err = launched("--nproc", 2, "--grace", 0.5, SCRIPTS / "launch_end.py", "stubborn").finish()
    assert code == 3
    assert "rank 0 did not stop in time and was killed" in says(err)[1]
    assert time.monotonic() - began < 5


# Signals


def test_ctrl_c_waits_for_the_ranks_to_stop(launched):
    process = launched("--nproc", 2, SCRIPTS / "launch_wait.py", "plain")
    process.wait_for("ready")
    process.send_signal(signal.SIGINT)
    code, out, err = process.finish()
    assert code == 130
    assert err == "learnerkit.launch: SIGINT received, waiting for the ranks to stop (Ctrl-C kills them)\n"


def test_a_second_ctrl_c_kills_at_once(launched):
    process = launched("--nproc", 2, SCRIPTS / "launch_wait.py", "deaf")
    process.wait_for("ready")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    code, out, err = process.finish()
    assert time.monotonic() - began < 2
    assert code == 130
    assert [line for line in says(err) if "was killed" in line] == says(err)[1:]
    assert len(says(err)) == 3


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_no_attempt_follows_a_signal_that_comes_while_the_ranks_are_stopped(launched, tmp_path, signum):
    (tmp_path / "lingers.py").write_text(
        "import os, signal, sys, time\n"
        "def stop(*_):\n"
        "    print('stops', flush=True)\n"
        "    time.sleep(2)\n"
        "    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('ready', flush=True)\n"
        "if os.environ['RANK'] == '0':\n"
        "    time.sleep(60)\n"
        "time.sleep(1)\n"
        "raise ValueError('a failure')\n"
    )
    process = launched("--nproc", 2, "--max-restarts", 1, "--events", "events", "lingers.py", cwd=tmp_path)
    process.wait_for("ready")
    process.wait_for("stops", times=1)
    process.send_signal(signum)
    code, out, err = process.finish()
    assert code == 128 + signum
    assert says(err)[-1] == f"learnerkit.launch: {signum.name} received"
    assert "ValueError: a failure" in err
    lines = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["started", "signal", "failed", "ended"]


def test_ctrl_c_ends_the_wait_for_a_thread(launched, tmp_path):
    process = launched("--nproc", 2, SCRIPTS / "launch_end.py", "lingers", cwd=tmp_path)
    process.wait_for("waits for a thread")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    code, out, err = process.finish()
    assert code == 130
    assert len(says(err)) == 1  # neither rank had to be killed
    assert time.monotonic() - began < 5


def test_each_rank_and_attempt_has_a_file_of_its_own(launched, tmp_path):
    (tmp_path / "talk.py").write_text(
        "import os, pathlib, sys, time\n"
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "said = pathlib.Path(f'rank 0 has said it {os.getppid()} {attempt}')\n"
        "print('out of', os.environ['RANK'], flush=True)\n"
        "print('no line end', end='', file=sys.stderr, flush=True)\n"
        "if os.environ['RANK'] == '0':\n"
        "    said.touch()\n"
        "while not said.exists():\n"
        "    time.sleep(0.01)\n"
        "if os.environ['RANK'] > attempt:\n"
        "    raise ValueError('\\x1b[2J')\n"
    )
    for logs, *tee in (["logs"], ["shown", "--tee"]):
        options = ["--nproc", 2, "--max-restarts", 1, "--log-dir", logs, *tee]
        code, out, err = launched(*options, "talk.py", cwd=tmp_path).finish()
        assert code == 0
        lines = says(err)
        if not tee:
            goes = [f"learnerkit.launch: output goes to {Path(logs, f'attempt-{k}', 'rank-*.log')}" for k in (0, 1)]
            assert [lines.pop(0), lines.pop()] == goes
        assert lines[0].endswith(f" s ({Path(logs, 'attempt-0', 'rank-1.log')}):")
        assert lines[-1] == "learnerkit.launch: attempt 2 of 2"
        expected = [f"[rank {n}] {line}" for n in "01" for line in (f"out of {n}", "no line end")] * 2 if tee else []
        assert sorted(out.splitlines()) == sorted(expected)
        said = {str(p.relative_to(tmp_path / logs)): p.read_text() for p in (tmp_path / logs).glob("*/*")}
        assert said.pop("attempt-0/rank-1.log").endswith("ValueError: \\x1b[2J\n")
        expected = {f"attempt-{k}/rank-{n}.log": f"out of {n}\nno line end" for k, n in ((0, 0), (1, 0), (1, 1))}
        assert said == expected


def test_a_log_that_cannot_be_written_is_one_line_and_the_launch_ends(launched, tmp_path):
    (tmp_path / "ok.py").touch()
    (tmp_path / "attempt-0").touch()
    code, out, err = launched("--log-dir", ".", "--events", "events", "ok.py", cwd=tmp_path).finish()
    assert (code, err) == (1, "learnerkit.launch: [Errno 17] File exists: 'attempt-0'\n")
    lines = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["started", "failed", "ended"]


TALK = "import os\nfor i in range(2000):\n    print(os.environ['RANK'], i, 'x' * 100)\n"  # more than a pipe holds


UNGUARDED = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from learnerkit import DataLoaders, Learner

data = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
dl = DataLoader(data, 2, num_workers=1, multiprocessing_context="spawn")
learn = Learner(DataLoaders(dl, device="cpu"), torch.nn.Linear(2, 1), torch.nn.functional.mse_loss)
with learn.distrib_ctx():
    learn.fit(1)
"""


@pytest.mark.soak
def test_a_script_that_a_loaders_worker_would_run_again_is_told_of_its_guard(launched, tmp_path):
    (tmp_path / "train.py").write_text(UNGUARDED)
    code, out, err = launched("--nproc", 2, "train.py", cwd=tmp_path).finish()
    assert code != 0
    assert "a loader's worker, imports the script and would join the run as a rank" in err
    assert "the workers of this loader start by 'spawn', so each of them imports the script" in err


@pytest.mark.slow
def test_a_program_may_put_a_main_module_of_its_own_in_the_place_of_the_scripts_as_marimo_does(launched, tmp_path):
    (tmp_path / "train.py").write_text(
        "from learnerkit import distributed\nprint('sum', sum(distributed.all_gather(1)))\n"
    )
    runner = "import multiprocessing, runpy\nrunpy.run_path('train.py', run_name='__main__')\n"
    (tmp_path / "runner.py").write_text(runner)
    code, out, err = launched("--nproc", 2, "runner.py", cwd=tmp_path).finish()
    assert (code, err) == (0, "")
    assert out.count("sum 2\n") == 2  # gloo of torch 2.10 also writes to stdout


@pytest.mark.parametrize("options", [["--log-dir", "logs"], pytest.param([], marks=pytest.mark.slow)], ids=["log", ""])
def test_a_terminal_that_stands_still_loses_no_line(launched, tmp_path, options):
    (tmp_path / "talk.py").write_text(TALK)
    process = launched("--nproc", 2, "--tee", *options, "talk.py", cwd=tmp_path)
    logs, end = [tmp_path / f"logs/attempt-0/rank-{n}.log" for n in "01"], time.monotonic() + LIMIT
    while options and not all(log.exists() and log.read_text().count("\n") == 2000 for log in logs):
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(KILL_SECONDS + 1)
    code, out, err = process.finish()
    assert (code, says(err)) == (0, [])
    expected = [f"[rank {n}] {n} {i} {'x' * 100}" for n in "01" for i in range(2000)]
    assert sorted(out.splitlines()) == sorted(expected)


def test_a_rank_that_asks_the_terminal_fails_and_is_not_halted(script_env, tmp_path):
    (tmp_path / "job.py").write_text("import getpass\ngetpass.getpass()")
    terminal, end = os.openpty()
    # The launcher has the terminal, as in a shell.
    process = subprocess.Popen(
        [sys.executable, "-m", "learnerkit.launch", "job.py"], cwd=tmp_path, env=script_env, start_new_session=True,
        stdin=end, stdout=end, stderr=end, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(end)
    try:
        assert process.wait(60) == 1
        assert "OSError: [Errno 5] Input/output error" in os.read(terminal, 10_000).decode()
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_pipe_that_does_not_block_gets_every_line(launched, tmp_path, unbuffered):
    (tmp_path / "talk.py").write_text(TALK)
    read, write = os.pipe()
    os.set_blocking(write, False)
    process = launched("--tee", "talk.py", cwd=tmp_path, stdout=write, env={"PYTHONUNBUFFERED": unbuffered})
    os.close(write)
    time.sleep(1)  # until the pipe is full
    with open(read) as out:
        assert out.read().splitlines() == [f"[rank 0] 0 {i} {'x' * 100}" for i in range(2000)]
    assert process.finish() == (0, None, "")


@pytest.mark.slow
def test_a_program_that_goes_on_printing_does_not_hold_up_the_end(launched, tmp_path):
    (tmp_path / "leaves.py").write_text(
        "import subprocess\n"
        "loop = 'for i in $(seq 100); do echo tick || exit; sleep 0.2; done'\n"
        "subprocess.Popen(['sh', '-c', loop], start_new_session=True)\n"
        "print('done')\n"
    )
    began = time.monotonic()
    code, out, err = launched("--tee", "leaves.py", cwd=tmp_path).finish()
    assert time.monotonic() - began < 15
    assert (code, err) == (0, "")
    assert {*out.splitlines()} == {"[rank 0] done", "[rank 0] tick"}
    time.sleep(1)  # the program finds that nobody reads what it prints


def test_a_terminal_that_is_gone_ends_ranks_without_a_log_only(launched, tmp_path):
    (tmp_path / "talk.py").write_text(TALK.replace("2000", "20000"))  # from Python 3.14 on buffers hold 128 kB
    for options in (["--log-dir", "logs"], []):
        process = launched("--nproc", 2, "--tee", *options, "talk.py", cwd=tmp_path, stdout=subprocess.PIPE)
        process.stdout.readline()
        process.stdout.close()
        err, code = process.stderr.read(), process.wait(LIMIT)
        assert says(err)[0] == "learnerkit.launch: the output of the ranks is shown no more: Broken pipe"
        assert "Exception in thread" not in err
        assert (code == 0) == bool(options), err
    assert [log.read_text().count("\n") for log in (tmp_path / "logs/attempt-0").iterdir()] == [20000, 20000]
    assert launched("--log-dir", "logs", "talk.py", cwd=tmp_path).finish()[0] == 0
    assert (tmp_path / "logs/attempt-0/rank-0.log").read_text().count("\n") == 40000  # nothing is overwritten


def test_usr1_is_passed_on_and_term_lets_the_script_save(launched):
    process = launched("--nproc", 2, SCRIPTS / "launch_wait.py", "save")
    process.wait_for("ready")
    process.send_signal(signal.SIGUSR1)
    process.wait_for("saved, going on")
    process.send_signal(signal.SIGTERM)
    process.wait_for("heard SIGUSR1 saved SIGTERM")
    code, out, err = process.finish()
    assert code == 143
    assert len(says(err)) == 1


def test_usr1_without_a_handler_is_a_failure_of_the_script(launched):
    process = launched("--nproc", 2, SCRIPTS / "launch_wait.py", "plain")
    process.wait_for("ready")
    process.send_signal(signal.SIGUSR1)
    code, out, err = process.finish()
    assert code == 128 + signal.SIGUSR1
    assert "was killed by signal 10 (SIGUSR1)" in says(err)[0]


def test_a_job_under_nohup_outlives_the_terminal(launched):
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = launched("--nproc", 2, SCRIPTS / "launch_wait.py", "brief")
    finally:
        signal.signal(signal.SIGHUP, old)
    process.wait_for("ready")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    Path("enough").touch()
    assert process.finish() == (0, "heard\nheard\n", "")


@pytest.mark.slow
def test_nothing_outlives_a_launcher_that_is_killed(launched):
    process = launched("--nproc", 2, SCRIPTS / "launch_orphans.py")
    process.wait_for("ready")
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 6  # two ranks, a forked child, a DataLoader worker, another program, the guard
    process.kill()
    gone, alive = psutil.wait_procs(family, timeout=5)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


# torch.distributed


@pytest.mark.soak
def test_two_jobs_at_once_do_not_meet(launched):
    two = launched("--nproc", 2, SCRIPTS / "launch_group.py", env={"MASTER_PORT": "29500"})
    one = launched(SCRIPTS / "launch_group.py")
    for process, size in ((two, 2), (one, 1)):
        code, out, err = process.finish()
        assert (code, says(err)) == (0, []), err
        lines = re.findall(r"\{.*\}", out)  # torch 2.10's gloo writes among them
        facts = sorted(map(json.loads, lines), key=lambda each: each["rank"])
        assert [each["rank"] for each in facts] == list(range(size))
        assert {each["size"] for each in facts} == {size}
        assert {each["total"] for each in facts} == {size * (size + 1) / 2}
        assert {each["debug"] for each in facts} == {"INFO"}
        assert {address for each in facts for address in each["listeners"]} == {"127.0.0.1"}
    assert facts[0]["squares"] == 0 + 1 + 4 + 9


@pytest.mark.slow
def test_the_user_sees_the_error_and_not_its_echo(launched):
    began = time.monotonic()
    code, out, err = launched("--nproc", 2, SCRIPTS / "launch_fail.py").finish()
    lines = err[err.index("learnerkit.launch: ") :].splitlines()
    assert code == 1
    assert lines[0].startswith("learnerkit.launch: rank 1 failed (exit code 1) after ")
    failed_after = float(lines[0].split()[-2])
    assert in_time(time.monotonic() - began - failed_after, 6)
    # Indented: the second line of the script's message cannot pass for one of the launcher's.
    first = textwrap.dedent("\n".join(lines[1 : lines.index("  in batch 7") + 1]))
    assert first.startswith(f'Traceback (most recent call last):\n  File "{SCRIPTS}/launch_fail.py", line ')
    assert "KeyError: 'the cause'\n\nThe above exception was the direct cause" in first
    assert "ValueError: bad \\x1b[2J sample\nlearnerkit.launch: \\x9b31m second line" in first
    assert "rank_main.py" not in err
    assert "runpy" not in err
    (follower,) = lines[lines.index("  in batch 7") + 1 :]
    assert follower.startswith("learnerkit.launch: rank 0 then failed: RuntimeError: ")
    assert is_collective_error(follower.partition("then failed: ")[2])
    assert "exit hook ran\n" in out  # the follower may be stopped before it comes to its own


@pytest.mark.soak
@pytest.mark.timeout(120)
@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_standard_files_that_are_closed_are_no_obstacle(closed, tmp_path, script_env):
    script = tmp_path / "own.py"
    script.write_text(
        "import os, torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
        "print('out', flush=True)\nopen(os.environ['RANK'], 'w')"
    )
    command = f'exec "$0" -m learnerkit.launch --nproc 2 --timeout 20 "$1" {closed}'
    done = subprocess.run(["sh", "-c", command, sys.executable, script], cwd=tmp_path, env=script_env, timeout=100)
    assert done.returncode == 0
    assert (tmp_path / "0").exists()
    assert (tmp_path / "1").exists()
