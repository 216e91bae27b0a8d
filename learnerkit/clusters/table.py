"""The table of clusters: for each, a function from the environment to the place of this process, or `None`.

A function knows its cluster by one variable, and returns `None` without it, since all are asked at every launch. It
raises a ValueError, in words, where the variables of its cluster are incomplete or contradict each other.
"""

import functools
import glob
import json
import re
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from learnerkit.clusters import slurm
from learnerkit.clusters.place import ENVIRONMENT, PORT, Place, integer, own_port, parse_endpoint, variable

Environ = Mapping[str, str]

LOCALHOST = ("localhost", "127.0.0.1", "::1")

# The variables of ranks that programs of MPI start: rank, size, and the same on the machine.
MPI = {
    # https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                 "OMPI_COMM_WORLD_LOCAL_SIZE"),
    # https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=jsrun
    "jsrun": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
    # MPICH and Intel MPI (Hydra), and what srun --mpi=pmi2 sets
    "MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}  # fmt: skip
LOCAL_RANKS = ("PALS_LOCAL_RANKID", "MV2_COMM_WORLD_LOCAL_RANK", "FLUX_TASK_LOCAL_ID")
"""The variables with the rank on its machine of programs that otherwise set those of MPICH: Cray's, MVAPICH, Flux."""


def launched(environ: Environ) -> Place | None:
    """Ranks of torchrun, of this launcher and of Ray Train, and of scripts that set the same variables.

    https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    """
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= environ.keys():
        return None
    names = {"TORCHELASTIC_RUN_ID": "torchrun", "TORCHELASTIC_USE_AGENT_STORE": "learnerkit.launch",
             "RAY_JOB_ID": "Ray Train"}  # fmt: skip
    by = next((name for name in names if name in environ), "")
    return Place(
        names.get(by, ENVIRONMENT), ", ".join(filter(None, ("RANK", "WORLD_SIZE", "LOCAL_RANK", by))),
        integer(environ, "RANK"), integer(environ, "WORLD_SIZE", least=1), environ.get("MASTER_ADDR", ""),
        integer(environ, "MASTER_PORT", PORT), is_rank=True, launched=True, local_rank=integer(environ, "LOCAL_RANK"),
        local_world_size=integer(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else None,
        attempt=integer(environ, "TORCHELASTIC_RESTART_COUNT", 0),
    )  # fmt: skip


def mpi(environ: Environ) -> Place | None:
    """Open MPI, MPICH and Intel MPI: of the processes of mpirun, several on a machine are ranks, and one is a node."""
    cluster = next((name for name, (rank, *_) in MPI.items() if rank in environ), None)
    in_step = {"SLURM_STEP_ID", "SLURM_PROCID"} <= environ.keys()
    if cluster is None:
        if "PMIX_RANK" in environ and not in_step:
            raise ValueError("PMIX_RANK is set, and no variable says of how many ranks")
        return None
    rank, size, own, local_size = MPI[cluster]
    if in_step and rank == "PMI_RANK" and environ[rank] == environ["SLURM_PROCID"]:
        return None  # srun has set them, and SLURM's own variables say more
    local_rank = next((name for name in (own, *LOCAL_RANKS) if name in environ), None)
    count, here = integer(environ, size, least=1), integer(environ, local_size, 0)
    if count == 1:
        return None
    if named := environ.get("MASTER_ADDR") or environ.get("SM_MASTER_ADDR"):
        address = named
    elif "SLURM_JOB_NODELIST" in environ:
        address = slurm.expand_nodes(environ["SLURM_JOB_NODELIST"])[0]
    elif "PBS_NODEFILE" in environ:
        address = _pbs_hosts(environ["PBS_NODEFILE"])[0]
    elif here == count:
        address = "127.0.0.1"
    else:
        raise ValueError(f"{size} says {count} ranks on several machines, and nothing says where rank 0 is; give it as "
                         "--master-addr, or as MASTER_ADDR")  # fmt: skip
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID", "PBS_JOBID")
    job = next((environ[name] for name in names if name in environ), "")
    return Place(
        cluster, ", ".join(MPI[cluster][:2]), integer(environ, rank), count, address, own_port(environ, job),
        nproc=None if here == 1 else 1, is_rank=here != 1,
        local_rank=integer(environ, local_rank) if local_rank else None, local_world_size=here or None,
    )  # fmt: skip


def kubeflow(environ: Environ) -> Place | None:
    """Kubeflow: the pods of a TrainJob or of a PyTorchJob, which have torchrun's options as variables.

    https://www.kubeflow.org/docs/components/trainer/user-guides/pytorch/
    """
    if "PET_NNODES" not in environ:
        return None
    nproc = environ.get("PET_NPROC_PER_NODE", "auto")
    per_node = None if nproc in ("auto", "gpu", "cpu") else integer(environ, "PET_NPROC_PER_NODE", least=1)
    restarts = integer(environ, "PET_MAX_RESTARTS", 0)
    least, _, most = environ["PET_NNODES"].partition(":")
    if most or "PET_RDZV_ENDPOINT" in environ:
        if environ.get("PET_RDZV_BACKEND", "c10d") != "c10d":
            raise ValueError(f"PET_RDZV_BACKEND={environ['PET_RDZV_BACKEND']}: nodes can only meet by c10d")
        endpoint = variable(environ, "PET_RDZV_ENDPOINT")
        try:
            address, port = parse_endpoint(endpoint, PORT)
        except ValueError as error:
            raise ValueError(f"PET_RDZV_ENDPOINT={error}") from None
        least_and_most = {"least": least, "most": most or least}
        numbers = {name: integer(least_and_most, name, least=1) for name in least_and_most}
        return Place("Kubeflow", "PET_NNODES, PET_RDZV_ENDPOINT", 0, numbers["most"], address, port,
                     nproc=per_node, least=numbers["least"], restarts=restarts)  # fmt: skip
    count = integer(environ, "PET_NNODES", least=1)
    if count == 1:
        return Place("Kubeflow", "PET_NNODES", nproc=per_node, restarts=restarts)
    return Place(
        "Kubeflow", "PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR", integer(environ, "PET_NODE_RANK"), count,
        variable(environ, "PET_MASTER_ADDR"), integer(environ, "PET_MASTER_PORT", PORT, least=1), nproc=per_node,
        restarts=restarts,
    )  # fmt: skip


def pai_dlc(environ: Environ) -> Place | None:
    """Alibaba PAI-DLC, where RANK and WORLD_SIZE count nodes.

    https://www.alibabacloud.com/help/en/pai/general-environment-variables
    """
    at_master = re.match(r"dlc\w+-(master|worker)-\d", environ.get("MASTER_ADDR", ""))
    if not ("DLC_JOB_ID" in environ or at_master) or "WORLD_SIZE" not in environ:
        return None
    sign = "MASTER_ADDR" if at_master else "DLC_JOB_ID"
    return _counted("PAI-DLC", f"RANK, WORLD_SIZE, {sign}", environ)


def vertex(environ: Environ) -> Place | None:
    """Vertex AI, whose CLUSTER_SPEC has the machines of each pool; pools 2 and 3 do not train.

    https://cloud.google.com/vertex-ai/docs/training/distributed-training#cluster-variables
    """
    if "CLUSTER_SPEC" not in environ:
        return None
    spec = _json(environ, "CLUSTER_SPEC", dict)
    try:
        pools = [spec["cluster"].get(f"workerpool{pool}", []) for pool in (0, 1)]
        pool, index = int(spec["task"]["type"].removeprefix("workerpool")), int(spec["task"]["index"])
        address, _, port = pools[0][0].rpartition(":")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise ValueError(f"CLUSTER_SPEC={environ['CLUSTER_SPEC']}: this is not a specification of Vertex AI") from None
    if pool > 1:  # a parameter server or an evaluator
        return None
    count = sum(map(len, pools))
    return Place("Vertex AI", "CLUSTER_SPEC", pool * len(pools[0]) + index, count, address,
                 integer(environ, "MASTER_PORT", int(port), least=1))  # fmt: skip


def sagemaker(environ: Environ) -> Place | None:
    """Amazon SageMaker; the names of its machines resolve only some time after the start.

    https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md
    """
    if "SM_HOSTS" not in environ:
        return None
    hosts, here = _json(environ, "SM_HOSTS", list), variable(environ, "SM_CURRENT_HOST")
    if here not in hosts:
        raise ValueError(f"SM_CURRENT_HOST={here} is not one of SM_HOSTS={environ['SM_HOSTS']}")
    return Place("SageMaker", "SM_HOSTS, SM_CURRENT_HOST", hosts.index(here), len(hosts), hosts[0],
                 integer(environ, "SM_MASTER_PORT", PORT, least=1), nproc=integer(environ, "SM_NUM_GPUS", 0) or None,
                 interface=environ.get("SM_NETWORK_INTERFACE_NAME"))  # fmt: skip


def skypilot(environ: Environ) -> Place | None:
    """SkyPilot; the first address is that of node 0.

    https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html
    """
    if "SKYPILOT_NODE_IPS" not in environ:
        return None
    addresses = environ["SKYPILOT_NODE_IPS"].split()
    count, node = integer(environ, "SKYPILOT_NUM_NODES", least=1), integer(environ, "SKYPILOT_NODE_RANK")
    if count != len(addresses):
        raise ValueError(f"SKYPILOT_NUM_NODES={count}, and SKYPILOT_NODE_IPS has {len(addresses)} addresses")
    return Place("SkyPilot", "SKYPILOT_NODE_RANK, SKYPILOT_NODE_IPS", node, count, addresses[0],
                 own_port(environ, environ.get("SKYPILOT_TASK_ID", "")),
                 nproc=integer(environ, "SKYPILOT_NUM_GPUS_PER_NODE", 0) or None)  # fmt: skip


def lepton(environ: Environ) -> Place | None:
    """Lepton (NVIDIA DGX Cloud): jobs of several workers, and how often they have failed before.

    https://docs.nvidia.com/dgx-cloud/lepton/features/batch-jobs/predefined-env-vars/
    """
    if "LEPTON_JOB_TOTAL_WORKERS" not in environ:
        return None
    name = environ.get("LEPTON_JOB_NAME", "")
    prefix = environ.get("LEPTON_JOB_SERVICE_PREFIX", name)
    domain = environ.get("LEPTON_SUBDOMAIN", f"{name}-job-svc")
    count = integer(environ, "LEPTON_JOB_TOTAL_WORKERS", least=1)
    if count > 1 and not prefix:
        raise ValueError("neither LEPTON_JOB_SERVICE_PREFIX nor LEPTON_JOB_NAME says where worker 0 is")
    return Place("Lepton", "LEPTON_JOB_WORKER_INDEX, LEPTON_JOB_TOTAL_WORKERS, LEPTON_JOB_FAILURE_COUNT",
                 integer(environ, "LEPTON_JOB_WORKER_INDEX", 0 if count == 1 else None), count,
                 f"{prefix}-0.{domain}", own_port(environ),
                 attempt=integer(environ, "LEPTON_JOB_FAILURE_COUNT", 0), job=name or prefix)  # fmt: skip


def pbs(environ: Environ) -> Place | None:
    """PBS Pro, OpenPBS and Torque: pbsdsh starts a process on each node; the job's own shell is task 1 of PBS Pro.

    Manual of PBS Professional, User's Guide, "Environment Variables": PBS_NODEFILE has a line for each slot.
    """
    if "PBS_NODEFILE" not in environ or environ.get("PBS_TASKNUM", "").lstrip("0") == "1":
        return None
    hosts = _pbs_hosts(environ["PBS_NODEFILE"])
    if len(hosts) == 1:
        return None
    here = socket.gethostname().partition(".")[0]
    nodes = [node for node, host in enumerate(hosts) if host.partition(".")[0] == here]
    if not nodes and "PBS_NODENUM" not in environ:
        raise ValueError(f"{here} is not one of the hosts in PBS_NODEFILE ({', '.join(hosts)}), and PBS_NODENUM is not "
                         "set")  # fmt: skip
    node = nodes[0] if nodes else integer(environ, "PBS_NODENUM")
    why = "PBS_NODEFILE, the host's name" if nodes else "PBS_NODEFILE, PBS_NODENUM"
    return Place("PBS", why, node, len(hosts), hosts[0], own_port(environ, environ.get("PBS_JOBID", "")))


def counted(environ: Environ) -> Place | None:
    """No cluster: RANK and WORLD_SIZE stand alone, and nothing says whether these count ranks or nodes.

    At a loopback address they are ranks of this machine.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environ.keys():
        return None
    return _counted(ENVIRONMENT, "RANK, WORLD_SIZE, MASTER_ADDR", environ)


def _counted(cluster: str, why: str, environ: Environ) -> Place:
    """Return the place that RANK, WORLD_SIZE and NPROC_PER_NODE tell."""
    address, node = variable(environ, "MASTER_ADDR"), integer(environ, "RANK")
    local = address in LOCALHOST
    return Place(cluster, why, node, integer(environ, "WORLD_SIZE", least=1), address,
                 own_port(environ), integer(environ, "NPROC_PER_NODE", 0) or None, is_rank=local, launched=local,
                 local_rank=node if local else None)  # fmt: skip


CLUSTERS: tuple[Callable[[Environ], Place | None], ...] = (
    slurm.current_task, kubeflow, pai_dlc, vertex, sagemaker, skypilot, lepton, pbs,
)  # fmt: skip
"""The function of each cluster whose scheduler starts a process on each node, or for each rank."""


def find(environ: Environ) -> Place | None:
    """Return the place of this process among others, as the program says that has started it; `None` if there is none.

    A launcher or MPI is asked first, since it may run in the job of a cluster, and then it knows the ranks. Next come
    all clusters, then those of other packages, and last `RANK` and `WORLD_SIZE` alone.

    Raises:
        ValueError: variables are incomplete or wrong, or two clusters disagree.
    """
    place = launched(environ) or mpi(environ)
    places = [place] if place else [place for read in CLUSTERS if (place := read(environ))]
    places = places or [place for read in _plugins() if (place := read(environ))]
    for other in places[1:]:
        first = places[0]
        if (other.node, other.nodes) != (first.node, first.nodes):
            raise ValueError(f"{first}, but {other}")
    place = places[0] if places else counted(environ)
    if place and place.node >= place.nodes > 1:
        raise ValueError(f"{place.cluster} says number {place.node} of {place.nodes} ({place.why}), counted from 0")
    return place


def advice(environ: Environ) -> str:
    """Return a hint if a launcher would not use all machines of the job of this shell, else an empty string."""
    if hint := slurm.advice(environ):
        return hint
    count = len(_pbs_hosts(environ["PBS_NODEFILE"])) if "PBS_NODEFILE" in environ else 1
    return f"this job has {count} nodes; `pbsdsh -- python -m learnerkit.launch ...` uses them all" if count > 1 else ""


@functools.cache
def _plugins() -> list[Callable[[Environ], Place | None]]:
    """Return the functions of other packages, by their entry points in the group 'learnerkit.clusters'.

    importlib.metadata reads the files of all packages, which takes longer than the rest of `find`; so the group's name
    is looked for first.
    """
    files = [file for folder in sys.path for file in glob.glob(f"{glob.escape(folder)}/*-info/entry_points.txt")]
    if not any(b"[learnerkit.clusters]" in Path(file).read_bytes() for file in files):
        return []
    from importlib.metadata import entry_points

    return [entry.load() for entry in entry_points(group="learnerkit.clusters")]


@functools.cache
def _pbs_hosts(file: str) -> list[str]:
    """Return the hosts of a job of PBS, each once, in their order."""
    try:
        hosts = list(dict.fromkeys(Path(file).read_text().split()))
    except OSError as error:
        raise ValueError(f"PBS_NODEFILE={file} cannot be read ({error.strerror})") from error
    if not hosts:
        raise ValueError(f"PBS_NODEFILE={file} names no host")
    return hosts


def _json(environ: Environ, name: str, kind: type) -> Any:
    try:
        value = json.loads(environ[name])
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, kind):
        raise ValueError(f"{name}={environ[name]}: this must be a JSON {kind.__name__}")
    return value
