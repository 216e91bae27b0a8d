"""The environment of the processes that form a run, as torch and its users read it, and what else they share.

It uses the standard library only, so that the launcher starts without importing torch.
"""

import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True)
class Place:
    """Where in a run the ranks of one launcher are; by default they are all of it.

    Args:
        nproc: how many ranks they are.
        port, address: where the store of this attempt listens, in which all ranks meet.
        interface: the network interface by which they reach each other; `None`: as it is set.
        first, world_size: the number of the first of them, of how many in all.
        local_first, local_world_size: the same on this machine, which may have several launchers.
        node, nodes: which launcher of how many.
        machine, machines: on which machine of how many.
        attempt, restarts: how often the ranks have been started anew, and how often they may.
    """

    nproc: int
    port: int
    address: str = LOOPBACK
    interface: str | None = LOOPBACK_INTERFACE
    first: int = 0
    world_size: int = 0
    local_first: int = 0
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


def rank_environment(environ: Mapping[str, str], place: Place, number: int, gpus: str | None = None) -> dict[str, str]:
    """Return the environment of one rank: a copy without what another launcher may have left in it.

    Args:
        environ: what it is a copy of.
        place: where the ranks of this launcher are.
        number: which of them it is, from 0.
        gpus: CUDA_VISIBLE_DEVICES; `None`: as it is.
    """
    stale = r"TORCHELASTIC_|GROUP_(RANK|WORLD_SIZE)|ROLE_(RANK|WORLD_SIZE|NAME)|NODE_RANK|LEARNERKIT_HEARTBEAT"
    env = {name: value for name, value in environ.items() if not re.match(stale, name)}
    if place.interface:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
            env.setdefault(name, place.interface)
    if place.local_world_size > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpus
    return env | {
        "RANK": str(place.first + number),
        "LOCAL_RANK": str(place.local_first + number),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.machine),
        "GROUP_WORLD_SIZE": str(place.machines),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is served already: rank 0 too only connects to it
        "TORCHELASTIC_RESTART_COUNT": str(place.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(place.restarts),
    }


def shared_file(size: int = 0) -> tuple[Any, str]:
    """A file of `size` bytes for the other processes of the machine, and the path by which they find it.

    It goes with this process, and is in memory where the system allows it.
    """
    if hasattr(os, "memfd_create"):
        file = os.fdopen(os.memfd_create("learnerkit"), "r+b")
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
    else:
        file = tempfile.NamedTemporaryFile(prefix="learnerkit-")  # noqa: SIM115 - it stays open while it is wanted
        path = file.name
    file.truncate(size)
    return file, path
