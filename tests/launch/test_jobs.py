"""Job files: what is in them, and that the training in each runs under a stand-in for its scheduler."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from learnerkit.launch import cli, jobs
from learnerkit.launch.jobs import KINDS, job_text
from learnerkit.launch.supervise import LONG_GRACE_SECONDS

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "tests" / "scripts" / "job_train.py"
LIMIT = 240  # seconds for one run

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
    for nproc, expected in ((None, 1), (3, 3)):
        jobset, job = read_kubeflow(text_of("kubeflow", nproc=nproc))
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
        ("kubeflow", {"image": None}, "--write-job kubeflow needs --image$"),
        ("sagemaker", {"image": None, "instance_type": None}, "needs --image and --instance-type$"),
        ("kubeflow", {"image": "a\nb"}, "--image 'a.nb': give a text without line breaks and control characters"),
        ("skypilot", {"env": ["A=\x1b"]}, "--env .*: give a text without line breaks and control characters"),
        ("sagemaker", {"time": "soon"}, "--time 'soon': give minutes"),
        ("kubeflow", {"time": "UNLIMITED"}, "--time 'UNLIMITED': give minutes"),
    ],
)
def test_an_option_that_a_kind_cannot_use_is_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        text_of(kind, **options)


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


def test_a_template_is_short_and_names_its_manual():
    for kind in KINDS:
        (template,) = jobs.TEMPLATES.glob(f"{kind}.*")
        text = template.read_text()
        assert "https://" in text
        assert len(text.splitlines()) <= 62
        assert max(map(len, text.splitlines())) <= 120
