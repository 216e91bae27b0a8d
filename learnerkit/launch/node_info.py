"""The facts about a node that the others must know, the check that nodes fit together, and which ranks each one has."""

import hashlib
import platform
import socket
from pathlib import Path
from typing import Any

from learnerkit.launch.addresses import NodeError, interface_of
from learnerkit.launch.environment import Topology


def node_info(node: int, address: str, nproc: int, attempt: int, restarts: int, command: list[str]) -> dict[str, Any]:
    """Describe this node: who it is, how many ranks it starts, which versions it has and which script it runs."""
    return {
        "node": node, "host": socket.gethostname(), "address": address, "nproc": nproc, "attempt": attempt,
        "restarts": restarts, "versions": versions(), "script": fingerprint(command),
    }  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all nodes."""
    from importlib.metadata import PackageNotFoundError, version  # A launcher that is alone does not need it.

    by_package = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for package in ("torch", "learnerkit"):
        try:
            by_package[package] = version(package)
        except PackageNotFoundError:  # it runs from its sources
            by_package[package] = "none"
    return by_package


def fingerprint(command: list[str]) -> str:
    """Identify a script by its name and a digest of its text, a module by its name."""
    path = Path(command[0])
    if command[0] == "-m" or not path.is_file():
        return " ".join(command[:2])
    return f"{path.name} ({hashlib.sha256(path.read_bytes()).hexdigest()[:8]})"


def name_of(info: dict[str, Any]) -> str:
    """Name a node in a message."""
    return f"node {info['node']} ({info['host']}, {info['address']})"


def check_that_nodes_match(infos: list[dict[str, Any]]) -> None:
    """Refuse nodes with different versions or scripts.

    Raises:
        NodeError: says which nodes differ, and in what.
    """
    first, first_name = infos[0], name_of(infos[0])
    for info in infos[1:]:
        name = name_of(info)
        for package, there in info["versions"].items():
            here = first["versions"][package]
            if there != here:
                raise NodeError(f"{name} has {package} {there}, {first_name} has {here}; install the same on all nodes")
        if info["script"] != first["script"]:
            what = f"{name} runs {info['script']}, {first_name} {first['script']}"
            raise NodeError(f"{what}; the scripts must be the same")


def topology_of(node: int, infos: list[dict[str, Any]]) -> Topology:
    """Return the numbers of one node's ranks, which are counted node by node."""
    machines = [(info["host"], info["address"]) for info in infos]
    distinct = list(dict.fromkeys(machines))
    ranks = [info["nproc"] for info in infos]  # the ranks of each node; `here` has 0 for nodes on other machines
    here = [n if machine == machines[node] else 0 for n, machine in zip(ranks, machines, strict=True)]
    return Topology(
        ranks[node], infos[0]["port"], infos[0]["address"], interface_of(infos[node]["address"]),
        first_rank=sum(ranks[:node]), world_size=sum(ranks),
        first_local_rank=sum(here[:node]), local_world_size=sum(here),
        node=node, nodes=len(infos), machine=distinct.index(machines[node]), machines=len(distinct),
        attempt=max(info["attempt"] for info in infos), restarts=max(info["restarts"] for info in infos),
    )  # fmt: skip
