"""The environment variables of the processes of a run, as torch and its users read them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from learnerkit.processes.machine import LOOPBACK, LOOPBACK_INTERFACE


@dataclass(frozen=True)
class Topology:
    """The ranks of a run that one launcher starts, and where all ranks connect; by default it starts all of them.

    Args:
        nproc: how many ranks it starts.
        port, address: where the store of this attempt listens, to which all ranks connect.
        interface: the network interface by which the ranks reach each other; `None`: as it is set.
        first_rank, world_size: the number of the launcher's first rank, and how many ranks there are in all.
        first_local_rank, local_world_size: the same on this machine, which may have several launchers.
        node, nodes: the number of the launcher, and how many launchers there are.
        machine, machines: the number of its machine, and how many machines there are.
        attempt, restarts: how often the ranks have been restarted, and how often they may be.
    """

    nproc: int
    port: int
    address: str = LOOPBACK
    interface: str | None = LOOPBACK_INTERFACE
    first_rank: int = 0
    world_size: int = 0
    first_local_rank: int = 0
    local_world_size: int = 0
    node: int = 0
    nodes: int = 1
    machine: int = 0
    machines: int = 1
    attempt: int = 0
    restarts: int = 0

    def __post_init__(self) -> None:
        for name in ("world_size", "local_world_size"):
            object.__setattr__(self, name, getattr(self, name) or self.nproc)


def rank_environment(
    environ: Mapping[str, str], topology: Topology, number: int, gpus: str | None = None
) -> dict[str, str]:
    """Return the environment of one rank: a copy without what another launcher may have left in it.

    Args:
        environ: the environment to copy.
        topology: the ranks of this launcher among all.
        number: which rank of this launcher it is, from 0.
        gpus: CUDA_VISIBLE_DEVICES; `None`: as it is.
    """
    stale = r"TORCHELASTIC_.*|GROUP_(RANK|WORLD_SIZE)|ROLE_(RANK|WORLD_SIZE|NAME)|NODE_RANK"
    stale += r"|LEARNERKIT_(HEARTBEAT|EVENTS|REPORT)"
    env = {name: value for name, value in environ.items() if not re.fullmatch(stale, name)}
    if topology.interface:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
            env.setdefault(name, topology.interface)
    if topology.local_world_size > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    # If another rank is gone, torch warns with twenty lines of C++. Errors, such as NCCL's, are still printed.
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpus
    told = {
        "RANK": topology.first_rank + number,
        "LOCAL_RANK": topology.first_local_rank + number,
        "WORLD_SIZE": topology.world_size,
        "LOCAL_WORLD_SIZE": topology.local_world_size,
        "GROUP_RANK": topology.machine,
        "GROUP_WORLD_SIZE": topology.machines,
        "MASTER_ADDR": topology.address,
        "MASTER_PORT": topology.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the store exists already: rank 0, too, only connects to it
        "TORCHELASTIC_RESTART_COUNT": topology.attempt,
        "TORCHELASTIC_MAX_RESTARTS": topology.restarts,
    }
    return env | {name: str(value) for name, value in told.items()}
