"""The table of clusters: environments as schedulers document them, what they mean, and which are refused."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from learnerkit import distributed
from learnerkit.clusters import Place, advice, check_launcher, check_script, find, table

# Trainer v2: https://www.kubeflow.org/docs/components/trainer/user-guides/pytorch/ (a JobSet's names)
TRAINJOB = {
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1", "PET_MASTER_PORT": "29400",
    "PET_MASTER_ADDR": "llama-node-0-0.llama", "JOB_COMPLETION_INDEX": "1", "KUBERNETES_SERVICE_HOST": "10.96.0.1",
}  # fmt: skip
# Training operator v1, since #1840 (2023), where WORLD_SIZE is replicas times processes, and RANK is that of the pod
PYTORCHJOB = {
    "PYTHONUNBUFFERED": "1", "MASTER_PORT": "23456", "PET_MASTER_PORT": "23456", "MASTER_ADDR": "mnist-master-0",
    "PET_MASTER_ADDR": "mnist-master-0", "WORLD_SIZE": "24", "RANK": "2", "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "8", "PET_NNODES": "3",
}  # fmt: skip
# The same with nprocPerNode: auto, and before #1840 without PET_*
PYTORCHJOB_AUTO = PYTORCHJOB | {"WORLD_SIZE": "3", "PET_NPROC_PER_NODE": "auto"}
PYTORCHJOB_2022 = {"MASTER_PORT": "23456", "MASTER_ADDR": "mnist-master-0", "WORLD_SIZE": "2", "RANK": "1"}
# PyTorchJob with an elasticPolicy
ELASTIC = {
    "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "elastic-worker-0:23456", "PET_RDZV_ID": "elastic",
    "PET_NNODES": "1:4", "PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "3",
}  # fmt: skip
# https://www.alibabacloud.com/help/en/pai/general-environment-variables
PAI = {
    "MASTER_ADDR": "dlc18isgeayd2k7x-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "2", "RANK": "1",
    "NPROC_PER_NODE": "8",
}  # fmt: skip
# https://cloud.google.com/vertex-ai/docs/training/distributed-training#cluster-variables
SPEC = {
    "cluster": {
        "workerpool0": ["cmle-training-workerpool0-f03a-0:2222"],
        "workerpool1": ["cmle-training-workerpool1-f03a-0:2222", "cmle-training-workerpool1-f03a-1:2222"],
        "workerpool3": ["cmle-training-workerpool3-f03a-0:2222"],
    },
    "environment": "cloud",
    "task": {"type": "workerpool1", "index": 1},
}
VERTEX = {
    "CLUSTER_SPEC": json.dumps(SPEC), "MASTER_ADDR": "cmle-training-workerpool0-f03a-0", "MASTER_PORT": "3333",
    "RANK": "2", "WORLD_SIZE": "3",
}  # fmt: skip
# https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md
SAGEMAKER = {
    "SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "4", "SM_NUM_CPUS": "48",
    "SM_NETWORK_INTERFACE_NAME": "eth0", "SM_MASTER_ADDR": "algo-1", "SM_MASTER_PORT": "7777",
}  # fmt: skip
# https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.1.5\n10.0.1.7\n10.0.1.8", "SKYPILOT_NUM_NODES": "3",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_TASK_ID": "sky-2026-11-27-10-00-00-000000_train_1",
}  # fmt: skip
# https://docs.nvidia.com/dgx-cloud/lepton/features/batch-jobs/predefined-env-vars/
LEPTON = {
    "LEPTON_JOB_NAME": "train-x7", "LEPTON_JOB_WORKER_INDEX": "1", "LEPTON_JOB_TOTAL_WORKERS": "2",
    "LEPTON_JOB_SERVICE_PREFIX": "train-x7", "LEPTON_SUBDOMAIN": "train-x7-job-svc", "LEPTON_JOB_FAILURE_COUNT": "2",
    "LEPTON_RESOURCE_ACCELERATOR_NUM": "8",
}  # fmt: skip
# srun -N2 --ntasks-per-node=1 and =4; captured from SLURM 22.05, as in tests/launch/test_slurm.py
SLURM = {
    "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2",
    "SLURM_JOB_NODELIST": "gpu[01-02]", "SLURM_STEP_NODELIST": "gpu[01-02]", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURMD_NODENAME": "gpu02",
}  # fmt: skip
SLURM_RANKS = SLURM | {
    "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_TASKS_PER_NODE": "4(x2)", "PMIX_RANK": "5",
}  # fmt: skip
# What srun --mpi=pmi2 adds
SLURM_PMI2 = SLURM_RANKS | {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "13"}
# https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-host-4242@1",
}  # fmt: skip
# mpirun in a batch script of SLURM: the variables of the step are those of its daemon
MPIRUN_IN_SLURM = SLURM | MPIRUN | {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
# Hydra's mpiexec (MPICH, Intel MPI) with one process on each machine, where the user names the first
HYDRA = {
    "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", "MASTER_ADDR": "n1",
}  # fmt: skip
# torchrun: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables, in a job of SLURM
TORCHRUN = SLURM | {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "gpu01",
    "MASTER_PORT": "29501", "GROUP_RANK": "1", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1",
}  # fmt: skip
# The worker of Ray Train: ray/train/torch/config.py
RAY = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0",
    "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "51515", "RAY_JOB_ID": "01000000",
}  # fmt: skip
LOOPBACK = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}

# environment: (cluster, node, nodes, address, port; `...` is any port, nproc, a rank, made by a launcher)
TOPOLOGIES = [
    (TRAINJOB, ("Kubeflow", 1, 2, "llama-node-0-0.llama", 29400, 4, False, False)),
    (TRAINJOB | {"PET_NNODES": "1", "PET_NODE_RANK": "0"}, ("Kubeflow", 0, 1, "", 29500, 4, False, False)),
    (PYTORCHJOB, ("Kubeflow", 2, 3, "mnist-master-0", 23456, 8, False, False)),
    (PYTORCHJOB_AUTO, ("Kubeflow", 2, 3, "mnist-master-0", 23456, None, False, False)),
    (PYTORCHJOB_2022, ("the environment", 1, 2, "mnist-master-0", 23456, None, False, False)),
    (ELASTIC, ("Kubeflow", 0, 4, "elastic-worker-0", 23456, 2, False, False)),
    (PAI, ("PAI-DLC", 1, 2, "dlc18isgeayd2k7x-master-0", 23456, 8, False, False)),
    (PAI | {"MASTER_ADDR": "10.1.2.3", "DLC_JOB_ID": "dlc18isg"},
     ("PAI-DLC", 1, 2, "10.1.2.3", 23456, 8, False, False)),
    (VERTEX, ("Vertex AI", 2, 3, "cmle-training-workerpool0-f03a-0", 3333, None, False, False)),
    (SAGEMAKER, ("SageMaker", 1, 2, "algo-1", 7777, 4, False, False)),
    (SAGEMAKER | {"SM_HOSTS": '["algo-2"]', "SM_NUM_GPUS": "0"},
     ("SageMaker", 0, 1, "algo-2", 7777, None, False, False)),
    (SKYPILOT, ("SkyPilot", 1, 3, "10.0.1.5", ..., 8, False, False)),
    (LEPTON, ("Lepton", 1, 2, "train-x7-0.train-x7-job-svc", 29500, None, False, False)),
    (SLURM, ("SLURM", 1, 2, "gpu01", ..., None, False, False)),
    (SLURM_RANKS, ("SLURM", 5, 8, "gpu01", ..., 1, True, False)),
    (SLURM_PMI2, ("SLURM", 5, 8, "gpu01", ..., 1, True, False)),
    (MPIRUN, ("Open MPI", 3, 4, "127.0.0.1", ..., 1, True, False)),
    (MPIRUN_IN_SLURM, ("Open MPI", 3, 4, "gpu01", ..., 1, True, False)),
    (HYDRA, ("MPI", 1, 2, "n1", 29500, None, False, False)),
    (TORCHRUN, ("torchrun", 5, 8, "gpu01", 29501, None, True, True)),
    (RAY, ("Ray Train", 1, 2, "10.0.0.9", 51515, None, True, True)),
    (LOOPBACK, ("the environment", 1, 2, "localhost", 29500, None, True, True)),
    (SKYPILOT | SLURM | {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.1.5\n10.0.1.7"},
     ("SLURM", 1, 2, "gpu01", ..., None, False, False)),
]  # fmt: skip


@pytest.mark.parametrize(("environ", "topology"), TOPOLOGIES)
def test_an_environment_says_which_node_or_rank_a_process_is(environ, topology):
    place = find(environ)
    _, _, _, _, port, *_ = topology
    told = (place.cluster, place.node, place.nodes, place.address, port if port is ... else place.port, place.nproc)
    assert (*told, place.is_rank, place.launched) == topology
    assert 1024 < place.port < 65536
    for name in place.why.split(", "):  # the line says by which variables it is believed
        assert name in environ
    if not place.launched and place.cluster != "the environment":
        check_launcher(place, environ, gpus=place.nproc or 0)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PATH": "/usr/bin", "KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": "pod-0"},
        {"RANK": "3", "WORLD_SIZE": "9", "MASTER_PORT": "1"},  # nobody can meet at no address
        {
            "SLURM_JOB_ID": "6",
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "1",
            "SLURMD_NODENAME": "gpu01",
        },  # the shell of a batch script
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        VERTEX | {"CLUSTER_SPEC": json.dumps(SPEC | {"task": {"type": "workerpool3", "index": 0}}), "RANK": ""},
    ],
)
def test_a_process_that_is_alone_has_no_place(environ):
    assert find({name: value for name, value in environ.items() if value}) is None
    assert advice(environ) == ""


def test_a_place_knows_what_else_its_cluster_says():
    assert (find(ELASTIC).least, find(ELASTIC).restarts, find(TRAINJOB).restarts) == (1, 3, 0)
    assert find(TRAINJOB | {"PET_MAX_RESTARTS": "2"}).restarts == 2
    assert (find(ELASTIC | {"PET_RDZV_ENDPOINT": "a"}).address, find(ELASTIC | {"PET_RDZV_ENDPOINT": "a"}).port) == (
        "a",
        29500,
    )
    assert find(ELASTIC | {"PET_RDZV_ENDPOINT": "[::1]:7"}).address == "::1"
    assert find(LEPTON).attempt == 2
    assert find(TORCHRUN).attempt == 1
    assert find(SAGEMAKER).shared() == dict.fromkeys(
        ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), "eth0"
    )
    assert (find(SLURM_RANKS).local_rank, find(SLURM_RANKS).local_world_size) == (1, 4)
    assert (find(MPIRUN).local_rank, find(MPIRUN).local_world_size) == (3, 4)
    assert find(LOOPBACK).local_rank == 1


def test_processes_of_one_job_derive_one_port_and_other_jobs_another():
    ports = {find(MPIRUN | {"OMPI_COMM_WORLD_RANK": str(rank)}).port for rank in range(4)}
    assert len(ports) == 1
    assert {find(MPIRUN | {"PMIX_NAMESPACE": "prterun-host-4243@1"}).port} != ports
    assert find(MPIRUN | {"MASTER_PORT": "7000"}).port == 7000


def test_the_line_names_the_cluster_the_numbers_and_the_variables():
    assert str(find(TRAINJOB)) == (
        "Kubeflow says node 1 of 2, with node 0 at llama-node-0-0.llama:29400 "
        "(PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR)"
    )
    assert str(find(TRAINJOB | {"PET_NNODES": "1"})) == "Kubeflow says one node (PET_NNODES)"
    assert str(find(ELASTIC)).startswith("Kubeflow says 1 to 4 nodes, which meet at elastic-worker-0:23456 (")
    assert str(find(MPIRUN)).startswith("Open MPI says rank 3 of 4, with rank 0 at 127.0.0.1:")
    assert ", attempt 3 (" in str(find(LEPTON))


# PBS


@pytest.fixture
def pbs(tmp_path, monkeypatch):
    """A job of PBS on three hosts with two slots each; this is n2."""
    file = tmp_path / "1234.pbs"
    file.write_text("n1.cluster\nn1.cluster\nn2.cluster\nn2.cluster\nn3.cluster\nn3.cluster\n")
    monkeypatch.setattr(table.socket, "gethostname", lambda: "n2")
    # PBS Professional User's Guide, "Environment Variables"
    return {"PBS_NODEFILE": str(file), "PBS_JOBID": "1234.pbs", "PBS_TASKNUM": "00000002", "PBS_NODENUM": "1"}


def test_pbs_numbers_nodes_by_its_file(pbs, monkeypatch):
    place = find(pbs)
    assert (place.cluster, place.node, place.nodes, place.address) == ("PBS", 1, 3, "n1.cluster")
    assert advice(pbs | {"PBS_TASKNUM": "00000001"}).startswith("this job has 3 nodes; `pbsdsh -- python -m")
    assert find(pbs | {"PBS_TASKNUM": "00000001"}) is None  # the shell of the job
    monkeypatch.setattr(table.socket, "gethostname", lambda: "ib-n2")
    assert find(pbs).node == 1
    with pytest.raises(ValueError, match=r"ib-n2 is not one of the hosts in PBS_NODEFILE \(n1.cluster, n2.cluster, n3"):
        find({name: value for name, value in pbs.items() if name != "PBS_NODENUM"})


def test_mpirun_under_pbs_meets_at_the_first_host(pbs):
    environ = pbs | MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert (find(environ).address, find(environ).is_rank) == ("n1.cluster", True)


@pytest.mark.parametrize("name", ["PALS_LOCAL_RANKID", "MV2_COMM_WORLD_LOCAL_RANK", "FLUX_TASK_LOCAL_ID", None])
def test_ranks_of_other_launchers_know_their_gpu_or_leave_it_open(name, monkeypatch):
    environ = {"PMI_RANK": "2", "PMI_SIZE": "4", "MASTER_ADDR": "n1"} | ({name: "1"} if name else {})
    assert find(environ).local_rank == (1 if name else None)
    assert find(environ).variables().get("LOCAL_RANK") == ("1" if name else None)
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert distributed.local_rank() == (1 if name else 0)  # it follows from the GPUs


def test_jsrun_says_of_how_many_ranks():
    environ = {f"JSM_NAMESPACE_{name}": n for name, n in (("RANK", "3"), ("SIZE", "4"), ("LOCAL_RANK", "1"))}
    place = find(environ | {"PMIX_RANK": "3", "JSM_NAMESPACE_LOCAL_SIZE": "2", "MASTER_ADDR": "n1"})
    assert (place.cluster, place.node, place.nodes, place.local_rank) == ("jsrun", 3, 4, 1)


# Contradictions

CONTRADICTIONS = [
    (PYTORCHJOB | {"RANK": "1"}, 8, "Kubeflow says node 2 of 3, .*, but RANK=1 and WORLD_SIZE=24; give --nnodes, "),
    (PYTORCHJOB | {"WORLD_SIZE": "16"}, 8, "Kubeflow says node 2 of 3, .* but RANK=2 and WORLD_SIZE=16"),
    (TRAINJOB, 2, "Kubeflow says node 1 of 2, .* and 4 processes on each, but 2 GPUs can be used here; give --nproc"),
    (SAGEMAKER, 1, "SageMaker .* and 4 processes on each, but 1 GPU can be used here; give --nproc"),
    (PAI | {"NPROC_PER_NODE": "8", "MASTER_ADDR": "10.1.2.3"}, 8,
     "WORLD_SIZE=2, 8 GPUs, NPROC_PER_NODE=8: does WORLD_SIZE count ranks or nodes?.* give --nproc, or --nnodes 2 "
     "--node-rank 1 --master-addr 10.1.2.3"),
    (PYTORCHJOB_2022, 4, "WORLD_SIZE=2, 4 GPUs: does WORLD_SIZE count ranks or nodes?"),
    (VERTEX | {"RANK": "1"}, 0, "Vertex AI says node 2 of 3, .* but RANK=1 and WORLD_SIZE=3"),
    (VERTEX | {"CLUSTER_SPEC": "{}"}, 0, "CLUSTER_SPEC={}: this is not a specification of Vertex AI"),
    (SAGEMAKER | {"SM_CURRENT_HOST": "algo-3"}, 4, "SM_CURRENT_HOST=algo-3 is not one of SM_HOSTS="),
    (SKYPILOT | {"SKYPILOT_NUM_NODES": "2"}, 8, "SKYPILOT_NUM_NODES=2, and SKYPILOT_NODE_IPS has 3 addresses"),
    (SKYPILOT | SLURM, 8, "SLURM says node 1 of 2, .* but SkyPilot says node 1 of 3, "),
    (LEPTON | {"LEPTON_JOB_WORKER_INDEX": "2"}, 8, "Lepton says number 2 of 2 .*, counted from 0"),
    (SLURM_RANKS | {"RANK": "0", "WORLD_SIZE": "8"}, 4, "SLURM says rank 5 of 8, .* but RANK=0 and WORLD_SIZE=8"),
    (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2, "says 4 ranks on several machines, and nothing says where"),
    ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "x"}, 0, "PMIX_RANK is set, and no variable says of how many ranks"),
    (ELASTIC | {"PET_RDZV_BACKEND": "etcd-v2"}, 0, "PET_RDZV_BACKEND=etcd-v2: nodes can only meet by c10d"),
    (ELASTIC | {"PET_RDZV_ENDPOINT": "a:x"}, 0, "PET_RDZV_ENDPOINT='a:x': give host:port, such as node1:29500"),
    (TRAINJOB | {"PET_NODE_RANK": "one"}, 4, "PET_NODE_RANK=one: this must be a number"),
    (TORCHRUN, 4, "torchrun says rank 5 of 8, .* this process is a rank already, which a launcher started; run "),
    (TORCHRUN | {"RANK": "8"}, 4, "torchrun says number 8 of 8 .*, counted from 0"),
    (MPIRUN | {"OMPI_COMM_WORLD_RANK": "4"}, 4, "Open MPI says number 4 of 4 .*, counted from 0"),
    (RAY, 2, "Ray Train says rank 1 of 2, .* is a rank already"),
    (LOOPBACK, 2, "the environment says rank 1 of 2, .* is a rank already"),
]  # fmt: skip


@pytest.mark.parametrize(("environ", "gpus", "message"), CONTRADICTIONS)
def test_a_launcher_refuses_a_contradiction_in_words(environ, gpus, message):
    with pytest.raises(ValueError, match=message):
        check_launcher(find(environ), environ, gpus)


def test_nproc_settles_how_many_ranks_a_launcher_starts():
    check_launcher(find(TRAINJOB), TRAINJOB, gpus=2, nproc=2)
    check_launcher(find(PYTORCHJOB_2022), PYTORCHJOB_2022, gpus=4, nproc=4)
    check_launcher(find(PYTORCHJOB_2022), PYTORCHJOB_2022, gpus=1)


@pytest.mark.parametrize(
    ("environ", "gpus", "message"),
    [
        (PAI, 8, "PAI-DLC says node 1 of 2, .* one process was started here, where 8 ranks belong"),
        (SLURM, 4, "SLURM says node 1 of 2, .* where 4 ranks belong .* start the script with `python -m lear"),
        (PYTORCHJOB_2022, 4, "where 4 ranks belong .GPUs: 4.: does WORLD_SIZE count ranks or nodes?"),
        (ELASTIC | {"PET_NPROC_PER_NODE": "1"}, 0, "1 to 4 nodes, .* start the script with"),
        (SLURM_RANKS | {"RANK": "0"}, 4, "SLURM says rank 5 of 8, .* but RANK=0 and WORLD_SIZE=8; start the "),
    ],
)
def test_a_script_that_cannot_be_one_rank_is_refused_in_words(environ, gpus, message):
    with pytest.raises(ValueError, match=message):
        check_script(find(environ), environ, gpus)


def test_a_script_of_one_rank_for_each_node_or_gpu_is_not_refused():
    for environ, gpus in [
        (PYTORCHJOB_2022, 1), (PYTORCHJOB_2022, 0), (SLURM_RANKS, 4), (MPIRUN, 4), (HYDRA, 1), (TORCHRUN, 4), (RAY, 1),
        (LOOPBACK, 2), (SLURM, 0), (PAI | {"NPROC_PER_NODE": "1"}, 1),
    ]:  # fmt: skip
        check_script(find(environ), environ, gpus)


# Clusters of other packages


def test_another_package_adds_a_cluster_by_an_entry_point(tmp_path):
    info = tmp_path / "my_cluster-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-cluster\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[learnerkit.clusters]\nlsf = my_cluster:lsf\n")
    (tmp_path / "my_cluster.py").write_text(
        "from learnerkit.clusters import Place\n"
        "def lsf(environ):\n"
        "    if 'LSB_JOBID' in environ:\n"
        "        return Place('LSF', 'LSB_JOBID', 1, 2, 'n1')\n"
    )
    code = "import sys; from learnerkit.clusters import find; print(find({'LSB_JOBID': '7'})); print(find({})); "
    code += "print('importlib.metadata' in sys.modules)"
    for path, lines in [
        (str(tmp_path), ["LSF says node 1 of 2, with node 0 at n1:29500 (LSB_JOBID)", "None", "True"]),
        ("", ["None", "None", "False"]),  # and then the packages are not read
    ]:
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [path, *sys.path]))}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100)
        assert done.stdout.splitlines() == lines, done.stderr


def test_the_table_is_read_without_torch_and_numpy():
    code = "import sys, learnerkit.clusters; print({'torch', 'numpy', 'importlib.metadata'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout == "set()\n", done.stderr


def test_a_place_is_a_value():
    assert Place("x", "X") == Place("x", "X", 0, 1)
    assert re.fullmatch(r"x says one node \(X\)", str(Place("x", "X")))
