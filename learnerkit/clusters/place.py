"""The place of a process in its run, as the variables of a cluster tell it, and how such variables are read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from zlib import crc32

PORT = 29500  # the port of node 0 unless the cluster or the user names another one, as with torchrun
ENVIRONMENT = "the environment"  # in place of a cluster's name, where RANK and WORLD_SIZE stand alone
PORTS = range(20000, 30000)  # below those that the kernel picks


@dataclass(frozen=True)
class Place:
    """The place of a process among those that the scheduler of a cluster has started.

    Args:
        cluster: the name of the cluster, for messages.
        why: the variables that say so, for messages.
        node: the number of this process, from 0.
        nodes: how many such processes there are; of a run that may shrink, the most.
        address, port: where process 0 listens; the address may be '' if there is one process.
        nproc: how many ranks a launcher is to start in this place; `None`: one for each GPU.
        is_rank: the scheduler has started one process for each rank, and this is one of them.
        launched: a launcher has made this rank, so that there is no place for another launcher.
        local_rank, local_world_size: of a rank, its number on its machine, and how many there are; `None`: unknown.
        interface: the network interface by which the machines reach each other; `None`: it is found by the address.
        attempt: how often the cluster has started the run again; after the first time it is to resume.
        job: the cluster's name for the run, the same in each attempt; '' if the cluster counts no attempts.
        least: the nodes have no numbers, and so many are enough; `None`: they are numbered.
        restarts: how often a launcher is to start all ranks again after a failure.
    """

    cluster: str
    why: str
    node: int = 0
    nodes: int = 1
    address: str = ""
    port: int = PORT
    nproc: int | None = None
    is_rank: bool = False
    launched: bool = False
    local_rank: int | None = None
    local_world_size: int | None = None
    interface: str | None = None
    attempt: int = 0
    job: str = ""
    least: int | None = None
    restarts: int = 0

    def __str__(self) -> str:
        what = "rank" if self.is_rank else "node"
        if self.least is not None:
            number = f"{self.least} to {self.nodes} nodes, which meet at {self.address}:{self.port}"
        elif self.nodes == 1:
            number = "one node"
        else:
            number = f"{what} {self.node} of {self.nodes}"
            number += f", with {what} 0 at {self.address}:{self.port}" if self.address else ""
        again = f", attempt {self.attempt + 1}" if self.attempt else ""
        return f"{self.cluster} says {number}{again} ({self.why})"

    @property
    def by_scheduler(self) -> bool:
        """Tell whether the scheduler of a cluster, rather than a launcher or a user, has started this process."""
        return bool(self.cluster) and not self.launched and self.cluster != ENVIRONMENT

    def variables(self) -> dict[str, str]:
        """Return the variables that a launcher would set for this rank, which a scheduler has started without one."""
        told = {"RANK": self.node, "WORLD_SIZE": self.nodes, "MASTER_ADDR": self.address, "MASTER_PORT": self.port,
                "TORCHELASTIC_RESTART_COUNT": self.attempt, "LOCAL_RANK": self.local_rank,
                "LOCAL_WORLD_SIZE": self.local_world_size}  # fmt: skip
        return {name: str(value) for name, value in told.items() if value is not None} | self.shared()

    def shared(self) -> dict[str, str]:
        """Return the variables that are alike for all ranks.

        gloo, NCCL and TensorPipe take the cluster's network interface, and the name of the run tells that checkpoints
        of an earlier attempt belong to it.
        """
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
        network = dict.fromkeys(names, self.interface) if self.interface and self.nodes > 1 else {}
        return network | ({"LEARNERKIT_LAUNCHER": f"{self.cluster} {self.job}"} if self.job else {})


def variable(environ: Mapping[str, str], name: str) -> str:
    """Return the value of a variable that the cluster must have set.

    Raises:
        ValueError: it is not set, or empty.
    """
    if not environ.get(name):
        raise ValueError(f"{name} is not set, though the other variables of its cluster are")
    return environ[name]


def integer(environ: Mapping[str, str], name: str, default: int | None = None, least: int = 0) -> int:
    """Return the value of a variable as a number.

    Raises:
        ValueError: it is not set and has no default, or is not a number, or less than `least`.
    """
    value = variable(environ, name) if default is None else environ.get(name) or str(default)
    if not re.fullmatch("[0-9]+", value) or int(value) < least:
        raise ValueError(f"{name}={value}: this must be a number, {least} or more")
    return int(value)


def parse_endpoint(text: str, default_port: int) -> tuple[str, int]:
    """Turn 'host', 'host:port' or '[::1]:port' into its parts.

    Raises:
        ValueError: it is none of these.
    """
    parts = re.fullmatch(r"(?:\[([^\]]+)\]|([^\s:\[\]]+))(?::(\d+))?", text)
    port = int(parts[3] or default_port) if parts else 0
    if parts is None or not 0 < port < 65536:
        raise ValueError(f"{text!r}: give host:port, such as node1:{default_port}")
    return parts[1] or parts[2], port


def own_port(environ: Mapping[str, str], job: str = "") -> int:
    """Return MASTER_PORT, else a port that the processes of a job derive from its name, so that other jobs differ."""
    return integer(environ, "MASTER_PORT", PORTS[crc32(job.encode()) % len(PORTS)] if job else PORT, least=1)
