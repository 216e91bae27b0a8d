"""Job files: what is in them, and that the training in each runs under a stand-in for its scheduler."""

import ast
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest
import yaml
from helpers import ROOT
from launching import environment

from learnerkit.launch import cli, jobs
from learnerkit.launch.jobs import KINDS, job_text
from learnerkit.launch.supervise import LONG_GRACE_SECONDS

TRAIN = [str(ROOT / "tests" / "scripts" / "checkpoint_run.py"), "--resume"]
LIMIT = 240  # seconds for one run, on a busy machine

IMAGE = {"image": "reg.example/me/train:1"}
OPTIONS = {"slurm": {}, "kubeflow": IMAGE, "skypilot": {}, "sagemaker": IMAGE | {"instance_type": "ml.p4d.24xlarge"}}


def text_of(kind, command=("train.py",), launcher=(), nproc=None, grace=LONG_GRACE_SECONDS, **options):
    values = {"job_name": "train"} | OPTIONS[kind] | options
    return job_text(kind, command, values, launcher, nproc=nproc, grace=grace)


def read_kubeflow(text):
    """The pod's specification and the TrainJob's in a file."""
    runtime, job = yaml.safe_load_all(text)
    assert [thing["kind"] for thing in (runtime, job)] == ["TrainingRuntime", "TrainJob"]
    assert {thing["apiVersion"] for thing in (runtime, job)} == {"trainer.kubeflow.org/v1alpha1"}
    assert job["spec"]["runtimeRef"] == {"kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    return runtime["spec"]["template"]["spec"], job["spec"]


def expanded(text):
    """A command or the value of a variable as Kubernetes hands it to a container whose variables are all unknown."""
    return text.replace("$$", "$")


def submitted(folder, file):
    """What the SDK is told when the file runs in a folder: the arguments of ModelTrainer, with those in them."""
    sdk = folder / "sdk" / "sagemaker"
    for name in ("", "train/", "core/", "core/helper/"):
        (sdk / name).mkdir(parents=True, exist_ok=True)
        (sdk / name / "__init__.py").touch()
    (sdk / "core" / "helper" / "session_helper.py").write_text(
        "class Session:\n    def default_bucket(self):\n        return 'bucket'\n"
    )
    configs = "".join(f"{name} = dict\n" for name in ("CheckpointConfig", "Compute", "SourceCode", "StoppingCondition"))
    (sdk / "train" / "configs.py").write_text(configs)
    (sdk / "train" / "__init__.py").write_text(
        "import json\n\nclass ModelTrainer:\n    def __init__(self, **values):\n        self.values = values\n\n"
        "    def train(self):\n        print(json.dumps(self.values))\n"
    )
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SM_")}
    done = subprocess.run([sys.executable, file], cwd=folder, capture_output=True, text=True, timeout=LIMIT,
                          env=outside | {"PYTHONPATH": str(folder / "sdk")})  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# What is in a file


def test_a_trainjob_has_what_was_asked_for():
    command, env = ["train.py", "a b", "$HOME $(x) $$", 'it\'s "x"\nand y'], ["A=$(B) $$", "NO=no", "E=é"]
    text = text_of("kubeflow", command, ["--tee"], nodes=2, gpus_per_node="8", time="8:00:00", grace=100, env=env)
    jobset, job = read_kubeflow(text)
    (node,) = jobset["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert (node["name"], pod["containers"][0]["name"]) == ("node", "node")
    # One pod that fails leads to new pods for all, which meet again.
    assert jobset["failurePolicy"]["maxRestarts"] > 0
    assert (node["template"]["spec"]["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    assert pod["terminationGracePeriodSeconds"] > 100
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts["/dev/shm"] in [volume["name"] for volume in pod["volumes"]]
    assert job["activeDeadlineSeconds"] == 8 * 3600
    trainer = job["trainer"]
    assert (trainer["image"], trainer["numNodes"], trainer["numProcPerNode"]) == (IMAGE["image"], 2, 8)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 8}}
    assert [f"{entry['name']}={expanded(entry['value'])}" for entry in trainer["env"]] == env
    assert trainer["command"] == ["bash", "-c"]
    assert words_of(expanded(trainer["args"][0])) == ["-m", "learnerkit.launch", "--tee", *command]


def words_of(script):
    """The arguments of `python` in a script of bash."""
    stand_in = 'python() { printf "%s\\0" "$@"; }; exec() { "$@"; }\n'
    done = subprocess.run(["bash", "-c", stand_in + script], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def test_a_trainjob_without_gpus_starts_the_processes_that_the_launcher_starts():
    for nproc, gpus, expected in ((None, None, 1), (3, None, 3), (None, "0", 1)):
        jobset, job = read_kubeflow(text_of("kubeflow", nproc=nproc, gpus_per_node=gpus))
        assert job["trainer"]["numProcPerNode"] == expected
        assert {"resourcesPerNode", "activeDeadlineSeconds"}.isdisjoint({*job, *job["trainer"]})
    pod = jobset["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > LONG_GRACE_SECONDS


def test_a_task_of_skypilot_has_what_was_asked_for():
    command = ["-m", "pkg.train", "two\nlines", "$HOME", "é"]
    text = text_of("skypilot", command, ["-u"], nodes=3, gpus_per_node="4090:8", env=["NO=1", 'A="b"'], **IMAGE)
    task = yaml.safe_load(text)
    assert (task["name"], task["num_nodes"], task["workdir"]) == ("train", 3, ".")
    assert task["envs"] == {"NO": "1", "A": '"b"'}
    assert task["resources"].pop("job_recovery")["max_restarts_on_errors"] > 0
    assert task["resources"] == {"accelerators": "4090:8", "image_id": f"docker:{IMAGE['image']}"}
    assert words_of(task["run"]) == ["-m", "learnerkit.launch", "-u", *command]
    assert yaml.safe_load(text_of("skypilot"))["resources"].keys() == {"job_recovery"}


def test_a_job_of_sagemaker_is_submitted_with_what_was_asked_for(tmp_path):
    text = text_of("sagemaker", ["train.py", 'a "b"', "$HOME\n"], nodes=2, time="1-0", env=["A=b 'c'"])
    (tmp_path / "job's.py").write_text(text)
    told = submitted(tmp_path, "job's.py")
    assert (told["base_job_name"], told["training_image"]) == ("train", IMAGE["image"])
    assert told["compute"] == {
        "instance_type": "ml.p4d.24xlarge", "instance_count": 2, "enable_managed_spot_training": False
    }  # fmt: skip
    assert told["environment"] == {"A": "b 'c'"}
    assert told["stopping_condition"] == {"max_runtime_in_seconds": 86400}
    assert told["checkpoint_config"] == {
        "s3_uri": "s3://bucket/train/checkpoints", "local_path": "/opt/ml/checkpoints"
    }  # fmt: skip
    assert told["source_code"]["source_dir"] == "."
    # On a machine of the job
    (tmp_path / "python").write_text(f'#!/bin/bash\n[ "$1" = "job\'s.py" ] && exec {sys.executable} "$@"\n'
                                     'printf "%s\\0" "$@"\n')  # fmt: skip
    (tmp_path / "python").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SM_CURRENT_HOST": "algo-1"}
    done = subprocess.run(["bash", "-c", told["source_code"]["command"]], cwd=tmp_path, env=env, capture_output=True,
                          text=True, check=True)  # fmt: skip
    assert done.stdout.split("\0")[:-1] == ["-m", "learnerkit.launch", "train.py", 'a "b"', "$HOME\n"]
    (tmp_path / "spot.py").write_text(text.replace("SPOT = False", "SPOT = True"))
    spot = submitted(tmp_path, "spot.py")
    assert spot["compute"]["enable_managed_spot_training"]
    assert spot["stopping_condition"]["max_wait_time_in_seconds"] > 86400


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kubeflow", "skypilot", "sagemaker"])
def test_a_command_of_setup_that_fails_ends_the_job(kind):
    def script(**options):
        text = text_of(kind, **options)
        if kind == "kubeflow":
            return expanded(read_kubeflow(text)[1]["trainer"]["args"][0])
        if kind == "skypilot":
            return yaml.safe_load(text)["run"]
        (lines,) = (node.value for node in ast.parse(text).body if ast.unparse(node).startswith("SCRIPT"))
        return "\n".join(ast.literal_eval(lines))

    assert words_of(script(setup=["cd .", 'x="$(echo a)"; true # it is']))[-1] == "train.py"
    done = subprocess.run(["bash", "-c", script(setup=["cd /nowhere && true"])], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_does_not_leave_its_place(kind):
    """Names of places, quotes and the ends of strings in values change nothing around them."""
    odd = "<<nodes>> \"'}]) # $x \\"
    wide = {"job_name": odd, "env": [f"A={odd}"]} | ({"image": odd} if "image" in OPTIONS[kind] else {})
    text = text_of(kind, ["train.py", odd], **wide)
    if kind == "kubeflow":
        _, job = read_kubeflow(text)
        assert (job["trainer"]["image"], job["runtimeRef"]["name"]) == (odd, odd)
        assert words_of(job["trainer"]["args"][0])[-1] == odd
    elif kind == "skypilot":
        assert yaml.safe_load(text)["name"] == odd
        assert words_of(yaml.safe_load(text)["run"])[-1] == odd
    elif kind == "sagemaker":
        tree = ast.unparse(ast.parse(text))
        assert tree.count(repr(odd)) == 3
    else:
        assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("kubeflow", {"partition": "gpu"}, "--partition means nothing for kubeflow; it goes with --write-job slurm$"),
        ("skypilot", {"time": "8:00:00"}, "--time means nothing for skypilot; .*slurm or kubeflow or sagemaker$"),
        ("sagemaker", {"gpus_per_node": "8"}, "--gpus-per-node means nothing for sagemaker"),
        ("slurm", {"image": "x"}, "--image means nothing for slurm; .* kubeflow or skypilot or sagemaker$"),
        ("kubeflow", {"image": "a\nb"}, "--image 'a.nb': give a text without line breaks and control characters"),
        ("skypilot", {"env": ["A=\x1b"]}, "--env .*: give a text without line breaks and control characters"),
        ("skypilot", {"gpus_per_node": "4"}, "--gpus-per-node 4: SkyPilot needs the kind of GPU, too, such as H100:4"),
        ("kubeflow", {"gpus_per_node": "a100:4"}, "--gpus-per-node a100:4: Kubeflow takes a number"),
        ("slurm", {"grace": 600}, "--grace 600: SLURM ends a job 120 s after its signal; give 100 or less"),
        ("sagemaker", {"time": "soon"}, "--time 'soon': give minutes"),
        ("kubeflow", {"time": "UNLIMITED"}, "--time 'UNLIMITED': give minutes"),
    ],
)
def test_an_option_that_a_kind_cannot_use_is_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        text_of(kind, **options)


def test_a_file_that_lacks_a_value_says_where_to_write_it():
    options = dict.fromkeys(jobs.USES)
    assert 'image: "IMAGE"' in text_of("kubeflow", image=None)
    assert 'training_image="IMAGE"' in text_of("sagemaker", image=None)
    assert 'instance_type="INSTANCE_TYPE"' in text_of("sagemaker", instance_type=None)
    lacks = "without --{} the file is not complete: write yours in the place of {}".format
    assert lacks("image", "IMAGE") in jobs.remarks("kubeflow", options)
    assert lacks("instance-type", "INSTANCE_TYPE") in jobs.remarks("sagemaker", options)
    assert not any("complete" in said for said in jobs.remarks("skypilot", options))
    assert not any("complete" in said for said in jobs.remarks("kubeflow", options | {"image": "x"}))


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("5", 300), ("5:30", 330), ("1:02:03", 3723), ("1-0", 86400), ("2-03:04", 183840), ("2-03:04:05", 183845)],
)
def test_a_time_limit_is_one_of_sbatch(limit, seconds):
    assert read_kubeflow(text_of("kubeflow", time=limit))[1]["activeDeadlineSeconds"] == seconds


@pytest.mark.parametrize(
    ("script", "name"),
    [("train.py", "train"), ("My_Train 2.py", "my-train-2"), ("2d.py", "d"), ("été.py", "t"), ("3.py", "job")],
)
def test_a_job_has_a_name_that_a_cluster_takes(script, name):
    assert jobs.default_name("kubeflow", [script]) == name
    assert jobs.default_name("slurm", [script]) == Path(script).stem


def test_a_file_is_named_after_script_and_scheduler(capsys):
    Path("my train.py").touch()
    said = {
        "slurm": ["wrote 'my train.sbatch'; submit it with: sbatch 'my train.sbatch'",
                  "without --gpus-per-node the job asks for no GPUs",
                  "without --time the job has the time limit of the cluster or of the partition"],
        "kubeflow": ["wrote 'my train.kubeflow.yaml'; start it with: kubectl create -f 'my train.kubeflow.yaml'",
                     "without --gpus-per-node the job asks for no GPUs"],
        "skypilot": ["wrote 'my train.skypilot.yaml'; start it with: sky jobs launch 'my train.skypilot.yaml'",
                     "or, without restarts, with: sky launch 'my train.skypilot.yaml'",
                     "without --gpus-per-node the job asks for no GPUs"],
        "sagemaker": ["wrote 'my train.sagemaker.py'; submit it with: python 'my train.sagemaker.py'",
                      "without --time the job ends after a day"],
    }  # fmt: skip
    for kind in KINDS:
        options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS[kind].items()]
        assert cli.main(["--write-job", kind, *options, "my train.py"]) == 0
        printed = capsys.readouterr().out.splitlines()
        if kind != "slurm":
            assert printed.pop().startswith("checkpoints need a place that outlives the job's machines")
        assert printed == said[kind]
        assert cli.main(["--write-job", kind, *options, "--job-file", "-", "my train.py"]) == 0
        assert capsys.readouterr().out == Path(f"my train.{KINDS[kind][0]}").read_text()


def test_the_example_is_what_its_readme_writes(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    readme = Path("examples/slurm/README.md").read_text()
    command = readme.split("```sh\n")[1].split("\nsbatch ")[0].replace("\\\n", " ")
    words = shlex.split(command.removeprefix("python -m learnerkit.launch"))
    file = words[words.index("--write-sbatch") + 1]
    assert cli.main(["-" if word == file else word for word in words]) == 0
    assert capsys.readouterr().out == Path(file).read_text()


def test_a_template_is_short_and_names_its_manual():
    for kind in KINDS:
        (template,) = jobs.TEMPLATES.glob(f"{kind}.*")
        text = template.read_text()
        assert "https://" in text
        assert len(text.splitlines()) <= 62
        assert max(map(len, text.splitlines())) <= 120


# The training of each file, on two machines, under a stand-in that sets what the scheduler sets


class Job:
    """The processes that a stand-in for a scheduler starts, all in one folder."""

    def __init__(self, folder, mark):
        self.folder = folder
        self.mark = mark
        self.started = []
        (folder / "bin").mkdir()
        self.program("python", f'exec {sys.executable} "$@"')

    def program(self, name, script):
        """Put a program where the job finds it first."""
        file = self.folder / "bin" / name
        file.write_text(f"#!/bin/bash\n{script}\n")
        file.chmod(0o755)

    def start(self, command, fault="none:0:0", **variables):
        """Start a process, whose ranks have the fault of checkpoint_run.py."""
        env = environment() | {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "FAULT": fault} | variables
        with (self.folder / f"printed-{len(self.started)}").open("w") as printed:
            process = subprocess.Popen(command, cwd=self.folder, env=env | {"JOBS_TEST": self.mark},
                                       start_new_session=True, stdout=printed, stderr=printed)  # fmt: skip
        self.started.append(process)
        return process

    def ends(self, processes):
        """Their exit codes."""
        try:
            return [process.wait(LIMIT) for process in processes]
        except subprocess.TimeoutExpired:
            pytest.fail(f"this took too long:\n{self.printed()}")

    def printed(self):
        return "\n".join(self.folder.joinpath(f"printed-{i}").read_text() for i in range(len(self.started)))

    def wait_for_ranks(self):
        """Wait until both ranks stand where their fault has them wait for a signal; they do so once."""
        files = [self.folder / f"waits-{rank}" for rank in (0, 1)]
        deadline = time.monotonic() + LIMIT
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline, self.printed()
            time.sleep(0.05)

    def result(self):
        """What a rank has written at the end of the training, the same on both but for the state of random numbers."""
        return [json.loads((self.folder / f"end-{rank}").read_text()) for rank in (0, 1)]


@pytest.fixture
def job(tmp_path):
    """A job, of which nothing is left at the end of the test."""
    made = Job(tmp_path, uuid.uuid4().hex)
    yield made
    time.sleep(0.2)
    left = [process for process in psutil.process_iter() if mark_of(process) == made.mark]
    for process in left:
        process.kill()
    for process in made.started:
        process.wait()
    assert not left, left


def mark_of(process):
    try:
        return process.environ().get("JOBS_TEST") if process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The result of the training on two ranks, without a scheduler."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    done = subprocess.run([sys.executable, "-m", "learnerkit.launch", "--nproc", "2", *TRAIN], cwd=folder,
                          env=environment(), capture_output=True, text=True, timeout=LIMIT)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"end-{rank}").read_text()) for rank in (0, 1)]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


@pytest.mark.soak
def test_pods_of_kubeflow_that_are_ended_or_fail_go_on(job, hosts, uninterrupted):
    """Two pods, each with a network of its own, are ended by SIGTERM, start again, lose a rank, and start again."""
    _, spec = read_kubeflow(text_of("kubeflow", TRAIN, nodes=2, env=["GREETING=$(HOME) $$"]))
    trainer = spec["trainer"]
    command = [*trainer["command"], *map(expanded, trainer["args"])]
    env = {entry["name"]: expanded(entry["value"]) for entry in trainer["env"]}
    assert env == {"GREETING": "$(HOME) $$"}
    env |= {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
    env |= {"PET_MASTER_ADDR": hosts[0][1], "PET_MASTER_PORT": "29400"}

    def pods(fault):
        return [job.start([*prefix, *command], fault, **env, PET_NODE_RANK=str(node))
                for node, (prefix, _) in enumerate(hosts[: trainer["numNodes"]])]  # fmt: skip

    ended = pods("await:-1:13")
    job.wait_for_ranks()
    for pod in ended:  # as Kubernetes does, long before it kills
        pod.send_signal(signal.SIGTERM)
    assert job.ends(ended) == [143, 143], job.printed()
    assert all(code > 0 for code in job.ends(pods("kill:1:25"))), job.printed()  # JobSet then makes both again
    assert job.ends(pods("none:0:0")) == [0, 0], job.printed()
    assert job.printed().count("resumed fit 0") == 2
    assert job.result() == uninterrupted


@pytest.mark.soak
def test_machines_of_skypilot_train_together(job, hosts, uninterrupted):
    task = yaml.safe_load(text_of("skypilot", TRAIN, nodes=2))
    addresses = [address for _, address in hosts[: task["num_nodes"]]]
    env = {"SKYPILOT_NODE_IPS": "\n".join(addresses), "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
           "SKYPILOT_NUM_GPUS_PER_NODE": "0", "SKYPILOT_TASK_ID": "sky-managed-1"}  # fmt: skip
    machines = [job.start([*hosts[rank][0], "bash", "-c", task["run"]], **env, SKYPILOT_NODE_RANK=str(rank))
                for rank in range(task["num_nodes"])]  # fmt: skip
    assert job.ends(machines) == [0, 0], job.printed()
    assert "SkyPilot says node 1 of 2" in job.printed()
    assert job.result() == uninterrupted


@pytest.mark.soak  # two machines of SageMaker train in clusters/test_launched.py, too
def test_machines_of_sagemaker_train_together(job, uninterrupted):
    (job.folder / "train.sagemaker.py").write_text(text_of("sagemaker", TRAIN, nodes=2))
    told = submitted(job.folder, "train.sagemaker.py")
    names = ["localhost", "127.0.0.1"][: told["compute"]["instance_count"]]
    env = {"SM_HOSTS": json.dumps(names), "SM_NUM_GPUS": "0", "SM_NETWORK_INTERFACE_NAME": "lo"}
    env |= {"SM_MASTER_PORT": free_port()} | told["environment"]
    command = ["bash", "-c", told["source_code"]["command"]]
    assert job.ends([job.start(command, **env, SM_CURRENT_HOST=name) for name in names]) == [0, 0], job.printed()
    assert "SageMaker says node 1 of 2" in job.printed()
    assert job.result() == uninterrupted


SRUN = """\
shift 2  # the options of the batch script
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST='127.0.0.[1-2]'
export SLURM_STEP_TASKS_PER_NODE='1(x2)' SLURM_TASKS_PER_NODE='1(x2)'
for node in 0 1; do
    SLURM_PROCID=$node SLURMD_NODENAME=127.0.0.$((node + 1)) "$@" & tasks="$tasks $!"
done
echo "$tasks" > tasks
trap : URG
for task in $tasks; do
    while kill -0 "$task" 2>/dev/null; do wait "$task"; done
    wait "$task" || code=$?
done
exit $code
"""


@pytest.mark.soak
def test_a_batch_script_of_slurm_goes_on_after_its_time_limit(job, uninterrupted):
    (job.folder / "job.sh").write_text(text_of("slurm", TRAIN, nodes=2, time="8:00:00"))
    job.program("srun", SRUN)
    job.program("scancel", "kill -URG $(cat tasks)")
    job.program("scontrol", 'echo "$@" >> scontrol')
    number = str(int(free_port()) % 10000)  # from which the launchers derive their port

    def script(fault):
        return job.start(["bash", "job.sh"], fault, SLURM_JOB_ID=number)

    ended = script("await:-1:13")
    job.wait_for_ranks()
    ended.send_signal(signal.SIGUSR1)  # as sbatch --signal does, two minutes before the limit
    assert job.ends([ended]) == [143], job.printed()
    assert (job.folder / "scontrol").read_text() == f"requeue {number}\n"
    assert job.ends([script("none:0:0")]) == [0], job.printed()
    assert (job.folder / "scontrol").read_text().count("requeue") == 1
    assert job.result() == uninterrupted
