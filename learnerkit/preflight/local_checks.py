"""The doctor's checks for which each rank looks by itself: a function that looks, and one that judges what all saw."""

import os
import platform
import resource
import socket
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from learnerkit import __version__, distributed
from learnerkit.launch.addresses import interface_of, own_address
from learnerkit.preflight.facts import Facts, Judge, Ranks, by_machine, hosts, per_machine, places
from learnerkit.preflight.report import HINT, WRONG, Finding, doubtful, fine, problem, unchecked
from learnerkit.processes.machine import LOOPBACK_INTERFACE
from learnerkit.text import first_few, in_units


def look_at_versions() -> Facts:
    """Return the versions that two ranks should have in common."""
    driver = Path("/sys/module/nvidia/version")
    nccl = torch.cuda.is_available() and dist.is_nccl_available()
    return {
        "python": platform.python_version(), "torch": torch.__version__, "learnerkit": __version__,
        "CUDA": torch.version.cuda, "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
        "driver": driver.read_text().strip() if driver.exists() else None,
    }  # fmt: skip


def judge_versions(everyone: Ranks) -> list[Finding]:
    """Compare all versions with those of rank 0."""
    first, findings = everyone[0]["versions"], []
    for name, version in first.items():
        for other in sorted({f["versions"][name] for f in everyone} - {version}, key=str):
            ranks = [f for f in everyone if f["versions"][name] == other]
            text = f"{name} {other} on {places(ranks)}, {version} on {places(everyone[:1])}"
            mark = HINT if name in ("python", "driver") else WRONG  # these two may differ a little
            findings.append(Finding(mark, text, f"install the same {name} on all machines"))
    return findings or [fine(", ".join(f"{name} {version}" for name, version in first.items() if version))]


def look_at_device() -> Facts:
    """Return the device that training would use here."""
    device = distributed.default_device()
    if device.type != "cuda":
        return {"type": device.type, "name": device.type.upper(), "id": None}
    properties, (free, memory) = torch.cuda.get_device_properties(device), torch.cuda.mem_get_info(device)
    others = set(range(torch.cuda.device_count())) - {device.index}
    return {
        "type": "cuda", "name": properties.name, "index": device.index, "id": str(properties.uuid), "memory": memory,
        "free": free, "peers": [j for j in others if torch.cuda.can_device_access_peer(device.index, j)],
    }  # fmt: skip


def judge_devices(everyone: Ranks) -> list[Finding]:
    """Judge the devices: of one kind, one for each process, and used by no other program."""
    findings, first = [], everyone[0]["devices"]
    if unlike := [f for f in everyone if f["devices"]["name"] != first["name"]]:
        mark, advice = HINT, "every step waits for the slowest: use GPUs of one kind if you can"
        if any(f["devices"]["type"] != first["type"] for f in unlike):
            mark, advice = WRONG, "is torch built for the GPU there, and what does CUDA_VISIBLE_DEVICES say?"
        text = f"{unlike[0]['devices']['name']} on {places(unlike)}, {first['name']} on {places(everyone[:1])}"
        findings.append(Finding(mark, text, advice))
    for group in by_machine(everyone):
        for device_id in sorted({f["devices"]["id"] for f in group} - {None}):
            ranks = [f for f in group if f["devices"]["id"] == device_id]
            if len(ranks) > 1:
                advice = "start one process per GPU (--nproc, --gpus), each with a LOCAL_RANK of its own"
                findings.append(problem(f"one GPU for {places(ranks)}, which NCCL refuses", advice))
    if findings or first["type"] != "cuda":
        return findings or [fine(f"{len(everyone)} x {first['name']}")]
    least = min(everyone, key=lambda f: f["devices"]["free"] / f["devices"]["memory"])
    free, memory = least["devices"]["free"], least["devices"]["memory"]
    text = f"{in_units(free)} of {in_units(memory)} free"
    if free < 0.8 * memory:
        return [doubtful(f"{text} on {places([least])}", "nvidia-smi shows which program uses it")]
    return [fine(f"{len(everyone)} x {first['name']}, {text}")]


@per_machine
def judge_peers(group: Ranks, everyone: Ranks) -> Finding:
    """Judge whether the GPUs of a machine read each other's memory directly."""
    if "peers" not in group[0]["devices"]:
        return unchecked("no GPUs")
    gpus = [(f["rank"], f["devices"]) for f in group]
    if apart := [f"{i}-{j}" for i, a in gpus for j, b in gpus if i < j and b["index"] not in a["peers"]]:
        text = f"none between ranks {first_few(apart)}: what they exchange goes through the host's memory"
        return doubtful(text, "nvidia-smi topo -m shows the links; if NCCL hangs, export NCCL_P2P_DISABLE=1")
    return fine("between all GPUs") if len(gpus) > 1 else unchecked("one GPU")


def look_at_threads() -> Facts:
    """Return the number of threads that torch computes with, and the cores for them."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return {"threads": torch.get_num_threads(), "cores": list(cores)}


@per_machine
def judge_threads(group: Ranks, everyone: Ranks) -> Finding:
    """Judge whether a machine has a core for each thread of its processes."""
    threads = sum(f["threads"]["threads"] for f in group)
    cores = len({core for f in group for core in f["threads"]["cores"]})
    text = f"{threads} on {cores} core{'s' * (cores > 1)}"
    if threads <= cores:
        return fine(text)
    advice = "start fewer processes" if cores < len(group) else f"export OMP_NUM_THREADS={cores // len(group)}"
    return doubtful(f"{text}, where they wait for each other", advice)


def look_at_network() -> Facts:
    """Return the addresses where gloo and NCCL would listen, and the route to rank 0."""
    try:
        resolved = socket.gethostbyname(socket.gethostname())
    except OSError:
        resolved = None
    route = own_address(os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", 1)))
    return {
        "set": {v: os.environ[v] for v in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if os.environ.get(v)},
        "names": [name for _, name in socket.if_nameindex()],
        "resolved": resolved, "resolved_at": resolved and interface_of(resolved),
        "route": route, "route_at": interface_of(route),
    }  # fmt: skip


@per_machine
def judge_network(group: Ranks, everyone: Ranks) -> Finding:
    """Judge whether others would find a machine at the address where it listens.

    Gloo listens on the interface in GLOO_SOCKET_IFNAME, else at the address of the host's name if the machine has it,
    else on loopback (torch's ProcessGroupGloo.cpp). NCCL leaves loopback and docker* out unless NCCL_SOCKET_IFNAME
    names them (NCCL user guide, "Environment Variables").
    """
    net, several = group[0]["interface"], len(by_machine(everyone)) > 1
    gloo = net["set"].get("GLOO_SOCKET_IFNAME")
    resolved = net["resolved"]
    at = net["resolved_at"]
    lead = next((n for n in [net["route_at"], *net["names"]] if n and not n.startswith(("lo", "docker"))), "eth0")
    advice = f"export GLOO_SOCKET_IFNAME={lead} NCCL_SOCKET_IFNAME={lead}"
    if not several:  # Any interface of another name may be down.
        advice = "unset GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, which one machine does not need"
    loops = [name for name, value in net["set"].items() if value == LOOPBACK_INTERFACE]
    if gloo and not set(gloo.split(",")) <= {*net["names"]}:
        return problem(f"GLOO_SOCKET_IFNAME={gloo}, but there are only {first_few(net['names'])}", advice)
    if several and loops:
        return problem(f"{' and '.join(loops)} set to loopback, which no other machine can reach", advice)
    if gloo:
        return fine(f"{gloo} ({net['route']})" if gloo == net["route_at"] else gloo)
    if several and (not at or resolved.startswith("127.")):
        text = f"the host's name resolves to {resolved or 'nothing'}: gloo listens where no other machine can reach it"
        return problem(text, f"{advice}; or give the name its address in /etc/hosts")
    if several and (twins := [f for f in everyone if f not in group and f["interface"]["resolved"] == resolved]):
        text = f"the host's name resolves to {resolved}, as does that of {hosts(twins)}"
        return problem(text, f"{advice}; and correct /etc/hosts")
    return fine(f"{at} ({resolved})" if at else LOOPBACK_INTERFACE)


def look_at_infiniband() -> Facts:
    """Return the adapters whose link is up, and what may keep NCCL from them."""
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    devices = {p.parts[-3]: (p / "rate").read_text().strip() for p in ports if "ACTIVE" in (p / "state").read_text()}
    lockable = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "devices": devices, "opens": os.path.isdir("/dev/infiniband"), "disabled": os.environ.get("NCCL_IB_DISABLE"),
        "lockable": None if lockable == resource.RLIM_INFINITY else lockable,
    }  # fmt: skip


@per_machine
def judge_infiniband(group: Ranks, everyone: Ranks) -> Finding:
    """Judge whether NCCL can use InfiniBand between machines."""
    own = group[0]["infiniband"]
    adapters = ",".join(own["devices"])
    if len(by_machine(everyone)) == 1:
        return unchecked("not needed on one machine")
    if group[0]["devices"].get("type") != "cuda":
        return unchecked("gloo does not use it")
    if not adapters and any(f["infiniband"].get("devices") for f in everyone):
        advice = "bring the link up, or export NCCL_IB_DISABLE=1 on all machines"
        return problem("no link is up, unlike elsewhere", advice)
    if not adapters:
        return fine("none: NCCL uses the interface above")
    if own["disabled"] not in (None, "", "0"):
        advice = f"unset it; NCCL_IB_HCA={adapters} picks adapters"
        return doubtful(f"{adapters}, but NCCL_IB_DISABLE is set", advice)
    if not own["opens"]:
        advice = "for a container: --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1"
        return doubtful(f"{adapters}, but there is no /dev/infiniband to open", advice)
    if own["lockable"] is not None:
        advice = "ulimit -l unlimited; for a container --ulimit memlock=-1"
        return doubtful(f"{adapters}, for which NCCL may lock only {in_units(own['lockable'])} of memory", advice)
    return fine(", ".join(f"{name} {rate}" for name, rate in own["devices"].items()))


def look_at_ports() -> Facts:
    """Return the port where the ranks meet, and those that gloo and NCCL would listen on."""
    socket.create_server(("", 0)).close()  # an error says that this process may not listen
    file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    picked = list(map(int, file.read_text().split())) if file.exists() else None
    return {"meet": f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}", "picked": picked}


@per_machine
def judge_ports(group: Ranks, everyone: Ranks) -> Finding:
    """Name the ports that a firewall must open; the first is open, as the ranks have met there."""
    ports = group[0]["ports"]
    low, high = ports["picked"] or (1024, 65535)
    if high - low < 1000:
        advice = "widen net.ipv4.ip_local_port_range (sysctl)"
        return doubtful(f"few for gloo and NCCL to pick from: {low} to {high}", advice)
    return fine(f"met at {ports['meet']}; gloo and NCCL pick theirs from {low} to {high}")


def look_at_shared_memory() -> Facts:
    """Return the memory in which loader workers pass on batches."""
    if not os.path.isdir("/dev/shm"):
        return {"size": None}
    disk = os.statvfs("/dev/shm")
    return {"size": disk.f_frsize * disk.f_blocks, "free": disk.f_frsize * disk.f_bavail}


@per_machine
def judge_shared_memory(group: Ranks, everyone: Ranks) -> Finding:
    """Judge the memory for each process: 1 GB is enough, less than 128 MB a problem (Docker gives 64 MB to all)."""
    memory = group[0]["/dev/shm"]
    if memory["size"] is None:
        return unchecked("this system has none")
    text, share = f"{in_units(memory['free'])} free of {in_units(memory['size'])}", memory["free"] / len(group)
    if share >= 2**30:
        return fine(text)
    text += ": DataLoader workers pass batches on in it, and die of a 'bus error' when it is full"
    full = "look for old files in it; " if memory["free"] < memory["size"] / 2 else ""
    advice = f"{full}start the container with --ipc=host or --shm-size=16g, or use num_workers=0"
    return Finding(HINT if share >= 2**27 else WRONG, text, advice)


def look_at_limits() -> Facts:
    """Return the number of files that a process may have open."""
    soft, hard = (2**20 if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    return {"soft": soft, "hard": hard, "sharing": torch.multiprocessing.get_sharing_strategy()}


@per_machine
def judge_limits(group: Ranks, everyone: Ranks) -> Finding:
    """Judge the number: some hundreds for workers and the tensors they pass on, and some for each connection."""
    limit, needed = group[0]["open files"], 512 + 32 * len(everyone)
    if limit["soft"] >= needed:
        return fine(f"{limit['soft']} at once; tensors are shared by {limit['sharing']}")
    most = min(limit["hard"], 65536)
    advice = f"ulimit -n {most} before the start" if most >= needed else "raise it (limits.conf, --ulimit nofile=65536)"
    return problem(f"{limit['soft']} at once, {needed} may be needed: 'Too many open files'", advice)


LOCAL: dict[str, tuple[Callable[[], Facts], Judge]] = {
    "versions": (look_at_versions, judge_versions),
    "devices": (look_at_device, judge_devices),
    "peer access": (dict, judge_peers),
    "threads": (look_at_threads, judge_threads),
    "interface": (look_at_network, judge_network),
    "infiniband": (look_at_infiniband, judge_infiniband),
    "ports": (look_at_ports, judge_ports),
    "/dev/shm": (look_at_shared_memory, judge_shared_memory),
    "open files": (look_at_limits, judge_limits),
}
"""The checks by topic, in the order of the report: a look on each rank, and the judge of what all have seen."""
