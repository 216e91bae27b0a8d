"""Look at the machines of a run before it: ``python -m learnerkit.doctor``, or the launcher's ``--check``.

The launcher starts this module on every rank, over the same machines and processes as the real run. Each rank collects
facts by itself and leaves them in the store where all meet, which needs no connections between ranks: so those that
cannot connect are told of, too. Then they try together what a run needs: files, connections, the all-reduce. Rank 0
prints what is right, what is wrong, and what to do.

The file reads downwards: the command line, what every rank does, the checks, and words. A check is a function that
looks, and one that judges what all ranks have seen, which is pure.
"""

import argparse
import json
import os
import platform
import secrets
import signal
import socket
import statistics
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from learnerkit import __version__
from learnerkit.launch import cli
from learnerkit.launch.addresses import interface_of, own_address
from learnerkit.launch.environment import LOOPBACK_INTERFACE
from learnerkit.preflight.report import HINT, NOTHING, OK, WRONG, verdict
from learnerkit.text import escaped

__all__ = ["main"]

REACH_SECONDS = 25.0  # for a rank to reach the store
MEET_SECONDS = 30.0  # for all ranks to come, and for each thing that they do together
GROUP_SECONDS = 60.0  # torch's own limit, which must not come before ours: NCCL's aborts the process
LOOK_SECONDS = 10.0  # for all ranks to look for a file
WIDTH, INDENT = 98, 16

Facts = dict[str, Any]  # of one rank: 'rank', 'size', 'host', 'machine'; and by topic what it has seen, or 'error'
Judge = Callable[[list[Facts]], "list[Finding]"]


class Finding(NamedTuple):
    """What a check has found.

    Attributes:
        mark: `OK`, `HINT` (it may be meant so), `WRONG` (a problem) or `NOTHING` (not looked at).
        text: what was found.
        advice: what to do.
    """

    mark: str
    text: str
    advice: str = ""


# The command line


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0 if there is no problem, 1 if there is one."""
    argv = sys.argv[1:] if argv is None else list(argv)
    # The first is how the launcher starts its ranks; the second is what torchrun sets.
    if argv == cli.DOCTOR[2:] or "TORCHELASTIC_RUN_ID" in os.environ:
        return examine()
    parser = argparse.ArgumentParser(
        "learnerkit.doctor",
        usage="python -m learnerkit.doctor [options of the launcher]",
        description="Look at the machines and processes of a run before it: versions, devices, network, shared\n"
        "memory, limits, files, clocks, and how fast gradients travel. Start it as you would start the run.",
        epilog="examples:\n"
        "  python -m learnerkit.doctor                 every GPU of this machine\n"
        "  python -m learnerkit.doctor --nproc 2       two processes, also without a GPU\n"
        "  srun python -m learnerkit.doctor            the machines of a SLURM job\n\n"
        "Lines begin with ok, ?? (it may be meant so), !! (a problem) or -- (not looked at).\n"
        "The exit code is 0 if there is no problem, and 1 if there is one.\n"
        "All options: python -m learnerkit.launch --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--nproc", metavar="N", help="number of processes (default: one per GPU)")
    parser.add_argument("--gpus", metavar="0,1", help="the GPUs to use, by index, with one process each")
    parser.parse_known_args(argv)  # for --help; the launcher reads the options
    return cli.main(["--check", *argv])


# What every rank does


class Board:
    """Notes that the ranks leave each other in the store where they meet."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size

    def gather(self, topic: str, note: Any, seconds: float = MEET_SECONDS) -> list:
        """On rank 0 the notes of all ranks, `None` for one that has not come in time; elsewhere nothing."""
        self.store.set(f"{topic}/{self.rank}", json.dumps(note))
        if self.rank != 0:
            return []
        deadline = time.monotonic() + seconds
        return [self.read(f"{topic}/{rank}", deadline - time.monotonic()) for rank in range(self.size)]

    def announce(self, topic: str, note: Any = None) -> Any:
        """Rank 0's note, on every rank."""
        if self.rank == 0:
            self.store.set(topic, json.dumps(note))
            return note
        found = self.read(topic, 2 * MEET_SECONDS)
        if found is None:  # rank 0 has given up, and said why, or is gone
            sys.exit(1)
        return found

    def read(self, key: str, seconds: float = 0) -> Any:
        """A note, if it is there in time."""
        deadline = time.monotonic() + seconds
        # Asked often rather than waited for: signals are heard only between calls of torch.
        while not self.store.check([key]):
            if time.monotonic() >= deadline or (self.rank != 0 and self.store.check(["end"])):
                return None
            time.sleep(0.005)
        return json.loads(self.store.get(key))


class Report:
    """Prints findings, on rank 0 alone, as soon as they are there.

    Attributes:
        problems: how many there are.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.problems = rank, 0

    def add(self, topic: str, findings: list[Finding]) -> None:
        """Print the findings of a topic."""
        for finding in findings:
            self.problems += finding.mark == WRONG
            if self.rank == 0:
                print("\n".join(lines(topic, finding)), flush=True)

    def close(self) -> None:
        """Print the last line."""
        if self.rank == 0:
            print(verdict(self.problems), flush=True)

    @contextmanager
    def within(self, topic: str, board: Board | None = None) -> Iterator[None]:
        """Say so and end the process if something hangs: no exception gets out of a call of NCCL or the kernel.

        It may hang because another rank has failed, which leaves a note on the board.
        """
        over = threading.Event()

        def watch() -> None:
            # The others wait a little longer, so that rank 0 can speak before their end becomes its error.
            deadline, error = time.monotonic() + MEET_SECONDS + (5 if self.rank else 0), None
            while time.monotonic() < deadline and not error:
                if over.wait(0.2):
                    return
                error = board.read(f"{topic} error") if board and self.rank == 0 else None
            if over.wait(1):
                return
            text = error or f"has not ended after {MEET_SECONDS:.0f} s"
            self.add(topic, [Finding(WRONG, text, ADVICE[topic])])
            self.close()
            if board and self.rank == 0:
                board.store.set("end", "")
                time.sleep(0.5)  # for the others to read it
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            over.set()


def examine() -> int:
    """What every rank does; the exit code is the same on all."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that files are removed
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # the errors are told here, without the stacks of C++
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    report = Report(rank)
    import_torch(rank)  # which may take long where its files are far
    with report.within("ranks"):
        facts = collect(rank)
        board = Board(meet(rank, size), rank, size)
    everyone = board.gather("facts", facts)
    missing = [number for number, found in enumerate(everyone) if found is None]
    if everyone := [found for found in everyone if found is not None]:  # on rank 0
        report.add("ranks", judge_ranks(everyone, missing))
    for topic, (_, judge) in ALONE.items():
        report.add(topic, judged(topic, judge, everyone))
    stop = board.announce("stop", bool(missing))
    for topic, (do, judge) in TOGETHER.items():
        if stop or (size == 1 and topic != "file system"):
            break
        with report.within(topic, board):
            note = attempt(do, board)
            if "error" in note:
                board.store.set(f"{topic} error", json.dumps(f"failed on {places([facts])}: {note['error']}"))
        for found, note in zip(everyone, board.gather(topic, note), strict=True):
            found[topic] = {"error": f"no answer in {MEET_SECONDS:.0f} s"} if note is None else note
        report.add(topic, judged(topic, judge, everyone, WRONG))
        stop = board.announce(f"{topic} failed", any("error" in found[topic] for found in everyone))
    report.close()
    well = board.announce("well", report.problems == 0)
    board.gather("read", True, seconds=5)  # rank 0 leaves last: the store may go with it
    return 0 if well else 1


def import_torch(rank: int) -> None:
    """Import it, or say why that does not work, which no check could do without it."""
    try:
        import torch.distributed  # noqa: F401
    except Exception as error:
        sys.exit(
            f"learnerkit.doctor: rank {rank} ({socket.gethostname()}) cannot import torch with {sys.executable}:\n"
            f"    {sentence(error)}\n    install torch there, or start the launcher with the Python that has it"
        )


def collect(rank: int) -> Facts:
    """What a rank finds by itself."""
    host = socket.gethostname()
    boot = Path("/proc/sys/kernel/random/boot_id")  # two machines may have one name
    machine = f"{host} {boot.read_text().strip() if boot.exists() else ''}"
    found = {topic: attempt(look) for topic, (look, _) in ALONE.items()}
    return {"rank": rank, "host": host, "machine": machine} | found


def meet(rank: int, size: int) -> Any:
    """The store in which the ranks meet; waits for none of them."""
    from torch.distributed import HashStore, PrefixStore, TCPStore

    if size == 1:
        return HashStore()
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(
            address, int(port), size, serves, timedelta(seconds=REACH_SECONDS), wait_for_workers=False,
            multi_tenant=True,
        )  # fmt: skip
        return PrefixStore("learnerkit/doctor", store)
    except Exception as error:
        sys.exit(
            f"learnerkit.doctor: rank {rank} ({socket.gethostname()}) could not reach the others at {address}:{port}:\n"
            f"    {sentence(error)}\n    rank 0's machine must have that address, rank 0 must run, and no firewall may "
            f"close the port;\n    from here, try: nc -vz {address} {port}"
        )


def attempt(look: Callable[..., Facts], *args: Any) -> Facts:
    """What `look` returns, or its error: a check that fails is a finding."""
    try:
        return look(*args)
    except Exception as error:
        return {"error": sentence(error)}


def judged(topic: str, judge: Judge, everyone: list[Facts], mark: str = NOTHING) -> list[Finding]:
    """The findings of a topic, or with `mark` why there are none."""
    failed = [f for f in everyone if "error" in f[topic]]
    try:
        if not failed:
            return judge(everyone) if everyone else []
        where, error = places(failed), failed[0][topic]["error"]
    except Exception as e:
        where, error = "rank 0", sentence(e)
    what = "failed" if mark == WRONG else "could not be looked at"
    return [Finding(mark, f"{what} on {where}: {error}", ADVICE[topic] if mark == WRONG else "")]


def per_machine(judge: Callable[[list[Facts], list[Facts]], Finding]) -> Judge:
    """A judge of all ranks, from one of the ranks of a machine, which sees all ranks beside; it names machines."""

    def judge_all(everyone: list[Facts]) -> list[Finding]:
        found: dict[Finding, list[Facts]] = {}
        for group in machines(everyone):
            found.setdefault(judge(group, everyone), []).append(group[0])
        if len(found) == 1:
            return list(found)
        notable = {finding: who for finding, who in found.items() if finding.mark in (HINT, WRONG)}
        some_fine = dict([next(iter(found.items()))])
        return [f._replace(text=f"{f.text} (on {hosts(who)})") for f, who in (notable or some_fine).items()]

    return judge_all


# The checks that a rank makes alone


def judge_ranks(everyone: list[Facts], missing: Sequence[int]) -> list[Finding]:
    """Who has come, and who has not."""
    total, groups = len(everyone) + len(missing), machines(everyone)
    where = some([f"{group[0]['host']} ({len(group)})" for group in groups])
    if missing:
        who = f"rank{'s' if len(missing) > 1 else ''} {some(missing)}"
        text = f"{who} of {total} did not come within {MEET_SECONDS:.0f} s; here are {where}"
        return [Finding(WRONG, text, "does every launcher run, and what have those ranks printed?")]
    if total == 1:
        text = f"1 on {groups[0][0]['host']}: nothing between processes could be looked at (--nproc 2)"
        return [Finding(NOTHING, text)]
    return [Finding(OK, f"{total} on {len(groups)} machine{'s' if len(groups) > 1 else ''}: {where}")]


def look_at_versions() -> Facts:
    """What two ranks should have in common."""
    import torch
    import torch.distributed as dist

    driver = Path("/sys/module/nvidia/version")
    nccl = torch.cuda.is_available() and dist.is_nccl_available()
    return {
        "python": platform.python_version(), "torch": torch.__version__, "learnerkit": __version__,
        "CUDA": torch.version.cuda, "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
        "driver": driver.read_text().strip() if driver.exists() else None,
    }  # fmt: skip


def judge_versions(everyone: list[Facts]) -> list[Finding]:
    """Whether all have those of rank 0."""
    first, found = everyone[0]["versions"], []
    for name, version in first.items():
        for other in sorted({f["versions"][name] for f in everyone} - {version}, key=str):
            who = [f for f in everyone if f["versions"][name] == other]
            text = f"{name} {other} on {places(who)}, {version} on {places(everyone[:1])}"
            mark = HINT if name in ("python", "driver") else WRONG  # these two may differ a little
            found.append(Finding(mark, text, f"install the same {name} on all machines"))
    return found or [Finding(OK, ", ".join(f"{name} {version}" for name, version in first.items() if version))]


def look_at_device() -> Facts:
    """The device that training would use here."""
    import torch

    from learnerkit import world

    device = world.default_device()
    if device.type != "cuda":
        return {"type": device.type, "name": device.type.upper(), "id": None}
    about, (free, memory) = torch.cuda.get_device_properties(device), torch.cuda.mem_get_info(device)
    others = [j for j in range(torch.cuda.device_count()) if j != device.index]
    return {
        "type": "cuda", "name": about.name, "index": device.index, "id": str(about.uuid), "memory": memory,
        "free": free, "peers": [j for j in others if torch.cuda.can_device_access_peer(device.index, j)],
    }  # fmt: skip


def judge_devices(everyone: list[Facts]) -> list[Finding]:
    """Of one kind, one for each process, and used by no one else."""
    found, first = [], everyone[0]["devices"]
    if unlike := [f for f in everyone if f["devices"]["name"] != first["name"]]:
        other = unlike[0]["devices"]
        text = f"{other['name']} on {places(unlike)}, {first['name']} on {places(everyone[:1])}"
        if any(f["devices"]["type"] != first["type"] for f in unlike):
            advice = "is torch built for the GPU there, and what does CUDA_VISIBLE_DEVICES say?"
            found.append(Finding(WRONG, text, advice))
        else:
            found.append(Finding(HINT, text, "every step waits for the slowest: use GPUs of one kind if you can"))
    for group in machines(everyone):
        for number in sorted({f["devices"]["id"] for f in group} - {None}):
            who = [f for f in group if f["devices"]["id"] == number]
            if len(who) > 1:
                advice = "start one process per GPU (--nproc, --gpus), each with a LOCAL_RANK of its own"
                found.append(Finding(WRONG, f"one GPU for {places(who)}, which NCCL refuses", advice))
    if first["type"] == "cuda" and not found:
        least = min(everyone, key=lambda f: f["devices"]["free"] / f["devices"]["memory"])
        memory = f"{in_units(least['devices']['free'])} of {in_units(least['devices']['memory'])} free"
        if least["devices"]["free"] < 0.8 * least["devices"]["memory"]:
            advice = "nvidia-smi shows which program uses it"
            return [Finding(HINT, f"{memory} on {places([least])}", advice)]
        return [Finding(OK, f"{len(everyone)} x {first['name']}, {memory}")]
    return found or [Finding(OK, f"{len(everyone)} x {first['name']}")]


@per_machine
def judge_peers(group: list[Facts], everyone: list[Facts]) -> Finding:
    """Whether the GPUs of a machine read each other's memory directly."""
    if "peers" not in group[0]["devices"]:
        return Finding(NOTHING, "no GPUs")
    gpus = [(f["rank"], f["devices"]) for f in group]
    apart = [f"{i}-{j}" for i, a in gpus for j, b in gpus if i < j and b["index"] not in a["peers"]]
    if apart:
        text = f"none between ranks {some(apart)}: what they exchange goes through the host's memory"
        advice = "nvidia-smi topo -m shows the links; if NCCL hangs, export NCCL_P2P_DISABLE=1"
        return Finding(HINT, text, advice)
    return Finding(OK, "between all GPUs") if len(gpus) > 1 else Finding(NOTHING, "one GPU")


def look_at_threads() -> Facts:
    """How many threads torch computes with, and the cores for them."""
    import torch

    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return {"threads": torch.get_num_threads(), "cores": list(cores)}


@per_machine
def judge_threads(group: list[Facts], everyone: list[Facts]) -> Finding:
    """Whether the processes of a machine have a core for each of their threads."""
    threads = sum(f["threads"]["threads"] for f in group)
    cores = len({core for f in group for core in f["threads"]["cores"]})
    text = f"{threads} on {cores} core{'s' if cores > 1 else ''}"
    if threads <= cores:
        return Finding(OK, text)
    few = cores < len(group)
    advice = "start fewer processes" if few else f"export OMP_NUM_THREADS={cores // len(group)}"
    return Finding(HINT, f"{text}, where they wait for each other", advice)


def look_at_network() -> Facts:
    """Where gloo and NCCL would listen, and the way to rank 0."""
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
def judge_network(group: list[Facts], everyone: list[Facts]) -> Finding:
    """Whether a machine would be found where it says it is.

    Gloo listens on the interface in GLOO_SOCKET_IFNAME, else at the address of the host's name if the machine has it,
    else on loopback (torch's ProcessGroupGloo.cpp). NCCL leaves loopback and docker* out unless NCCL_SOCKET_IFNAME
    names them (NCCL user guide, "Environment Variables").
    """
    net, several = group[0]["interface"], len(machines(everyone)) > 1
    gloo, resolved, at = net["set"].get("GLOO_SOCKET_IFNAME"), net["resolved"], net["resolved_at"]
    lead = next((n for n in [net["route_at"], *net["names"]] if n and not n.startswith(("lo", "docker"))), "eth0")
    advice = f"export GLOO_SOCKET_IFNAME={lead} NCCL_SOCKET_IFNAME={lead}"
    loops = [name for name, value in net["set"].items() if value == LOOPBACK_INTERFACE]
    if gloo and not set(gloo.split(",")) <= {*net["names"]}:
        return Finding(WRONG, f"GLOO_SOCKET_IFNAME={gloo}, but there are only {some(net['names'])}", advice)
    if several and loops:
        return Finding(WRONG, f"{' and '.join(loops)} set to loopback, where no other machine comes", advice)
    if gloo:
        return Finding(OK, f"{gloo} ({net['route']})" if gloo == net["route_at"] else gloo)
    if several and (not at or resolved.startswith("127.")):
        text = f"the host's name resolves to {resolved or 'nothing'}: gloo listens where no other machine comes"
        return Finding(WRONG, text, f"{advice}; or give the name its address in /etc/hosts")
    if several and (twins := [f for f in everyone if f not in group and f["interface"]["resolved"] == resolved]):
        text = f"the host's name resolves to {resolved}, as does that of {hosts(twins)}"
        return Finding(WRONG, text, f"{advice}; and mend /etc/hosts")
    return Finding(OK, f"{at} ({resolved})" if at else LOOPBACK_INTERFACE)


def look_at_infiniband() -> Facts:
    """The adapters whose link is up, and what may keep NCCL from them."""
    import resource

    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    devices = {p.parts[-3]: (p / "rate").read_text().strip() for p in ports if "ACTIVE" in (p / "state").read_text()}
    lockable = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "devices": devices, "opens": os.path.isdir("/dev/infiniband"), "disabled": os.environ.get("NCCL_IB_DISABLE"),
        "lockable": None if lockable == resource.RLIM_INFINITY else lockable,
    }  # fmt: skip


@per_machine
def judge_infiniband(group: list[Facts], everyone: list[Facts]) -> Finding:
    """Whether NCCL can use it between machines."""
    own, hca = group[0]["infiniband"], ",".join(group[0]["infiniband"]["devices"])
    if len(machines(everyone)) == 1:
        return Finding(NOTHING, "not needed on one machine")
    if group[0]["devices"].get("type") != "cuda":
        return Finding(NOTHING, "gloo does not use it")
    if not hca and any(f["infiniband"].get("devices") for f in everyone):
        advice = "bring the link up, or export NCCL_IB_DISABLE=1 on all machines"
        return Finding(WRONG, "no link is up, unlike elsewhere", advice)
    if not hca:
        return Finding(OK, "none: NCCL uses the interface above")
    if own["disabled"] not in (None, "", "0"):
        return Finding(HINT, f"{hca}, but NCCL_IB_DISABLE is set", f"unset it; NCCL_IB_HCA={hca} picks adapters")
    if not own["opens"]:
        advice = "for a container: --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1"
        return Finding(HINT, f"{hca}, but there is no /dev/infiniband to open", advice)
    if own["lockable"] is not None:
        advice = "ulimit -l unlimited; for a container --ulimit memlock=-1"
        return Finding(HINT, f"{hca}, for which NCCL may lock {in_units(own['lockable'])} of memory only", advice)
    return Finding(OK, ", ".join(f"{name} {rate}" for name, rate in own["devices"].items()))


def look_at_ports() -> Facts:
    """The port where the ranks meet, and those they would listen on."""
    socket.create_server(("", 0)).close()  # whether it may
    file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    picked = list(map(int, file.read_text().split())) if file.exists() else None
    return {"meet": f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}", "picked": picked}


@per_machine
def judge_ports(group: list[Facts], everyone: list[Facts]) -> Finding:
    """What a firewall must let through; that all have met shows that the first is open."""
    ports = group[0]["ports"]
    low, high = ports["picked"] or (1024, 65535)
    if high - low < 1000:
        advice = "widen net.ipv4.ip_local_port_range (sysctl)"
        return Finding(HINT, f"few for gloo and NCCL to pick from: {low} to {high}", advice)
    return Finding(OK, f"met at {ports['meet']}; gloo and NCCL pick theirs from {low} to {high}")


def look_at_shared_memory() -> Facts:
    """The memory through which loader workers hand over batches."""
    if not os.path.isdir("/dev/shm"):
        return {"size": None}
    disk = os.statvfs("/dev/shm")
    return {"size": disk.f_frsize * disk.f_blocks, "free": disk.f_frsize * disk.f_bavail}


@per_machine
def judge_shared_memory(group: list[Facts], everyone: list[Facts]) -> Finding:
    """Whether there is enough for every process: 1 GB, and 128 MB at least (Docker gives 64 MB to all)."""
    memory = group[0]["/dev/shm"]
    if memory["size"] is None:
        return Finding(NOTHING, "this system has none")
    text, share = f"{in_units(memory['free'])} free of {in_units(memory['size'])}", memory["free"] / len(group)
    if share >= 2**30:
        return Finding(OK, text)
    text += ": DataLoader workers hand batches over in it, and die of a 'bus error' when it is full"
    full = "look for old files in it; " if memory["free"] < memory["size"] / 2 else ""
    advice = f"{full}start the container with --ipc=host or --shm-size=16g, or use num_workers=0"
    return Finding(HINT if share >= 2**27 else WRONG, text, advice)


def look_at_limits() -> Facts:
    """How many files a process may have open."""
    import resource

    from torch import multiprocessing

    soft, hard = (2**20 if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    return {"soft": soft, "hard": hard, "sharing": multiprocessing.get_sharing_strategy()}


@per_machine
def judge_limits(group: list[Facts], everyone: list[Facts]) -> Finding:
    """Whether that will do: some hundreds for workers and the tensors they hand over, and some for each connection."""
    limit, needed = group[0]["open files"], 512 + 32 * len(everyone)
    if limit["soft"] >= needed:
        return Finding(OK, f"{limit['soft']} at once; tensors are shared by {limit['sharing']}")
    most = min(limit["hard"], 65536)
    advice = f"ulimit -n {most} before the start" if most >= needed else "raise it (limits.conf, --ulimit nofile=65536)"
    return Finding(WRONG, f"{limit['soft']} at once, {needed} may be needed: 'Too many open files'", advice)


# The checks that all ranks make together; every rank must reach them


def look_at_files(board: Board) -> Facts:
    """Whether all ranks see a file that rank 0 writes into the current directory; it is removed in any case."""
    path, refused = Path(f".learnerkit-doctor-{secrets.token_hex(8)}"), ""
    try:
        if board.rank == 0:
            try:
                path.write_text("made by learnerkit.doctor for a moment; may be removed\n")
            except OSError as error:
                refused = sentence(error)
        seen = os.path.exists(board.announce("file", path.name))
        board.gather("looked", True, LOOK_SECONDS)
    finally:
        if board.rank == 0:
            with suppress(OSError):  # it could not be written
                path.unlink()
    return {"folder": os.getcwd(), "seen": seen, "refused": refused}


def judge_files(everyone: list[Facts]) -> list[Finding]:
    """One file system for all, or one each."""
    files = everyone[0]["file system"]
    if files["refused"]:
        advice = "start in another directory, or give what is saved a path elsewhere"
        return [Finding(HINT, f"rank 0 cannot write to {files['folder']}: {files['refused']}", advice)]
    if not (blind := [f for f in everyone if not f["file system"]["seen"]]):
        return [Finding(OK, f"{files['folder']} can be written{', and all see it' if len(everyone) > 1 else ''}")]
    advice = (
        "if machines have files of their own, data and scripts must be on each (rank0_first(..., per_node=True) "
        f"downloads once per machine), and checkpoints lie on {everyone[0]['host']}"
    )
    if any(f["machine"] == everyone[0]["machine"] for f in blind):
        advice = f"start all in one directory, not in {blind[0]['file system']['folder']}"
    return [Finding(HINT, f"what rank 0 writes to {files['folder']} is not seen by {places(blind)}", advice)]


def connect(board: Board) -> Facts:
    """Make the process group as a run would."""
    import torch.distributed as dist

    from learnerkit import world

    world.join(timeout=GROUP_SECONDS)
    world.barrier()
    return {"config": dist.get_backend_config()}


def judge_backend(everyone: list[Facts]) -> list[Finding]:
    """Which library carries what."""
    libraries = dict(part.split(":") for part in everyone[0]["backend"]["config"].split(","))
    used = dict.fromkeys([everyone[0]["devices"].get("type", "cpu"), "cpu"])
    return [Finding(OK, ", ".join(f"{libraries[d]} for {d}" for d in used if d in libraries) + "; all are connected")]


def compare_clocks(board: Board) -> Facts:
    """On rank 0, by how many seconds the clock of each rank is ahead of its own.

    Half the round trip is taken off; the quickest of three counts (F. Cristian, "Probabilistic clock synchronization",
    1989).
    """
    import torch
    import torch.distributed as dist

    note, ahead = torch.zeros(1, dtype=torch.float64), [0.0]
    for other in range(1, board.size):
        trips = []
        for _ in range(3):
            if board.rank == 0:
                start = time.time()
                dist.send(note, other)
                dist.recv(note, other)
                end = time.time()
                trips.append((end - start, note.item() - (start + end) / 2))
            elif board.rank == other:
                dist.recv(note, 0)
                note[0] = time.time()
                dist.send(note, 0)
        ahead += [min(trips)[1]] if trips else []
    return {"ahead": ahead}


def judge_clocks(everyone: list[Facts]) -> list[Finding]:
    """Whether they agree."""
    ahead = everyone[0]["clock"]["ahead"]
    off = [f for f, seconds in zip(everyone, ahead, strict=True) if abs(seconds) >= 1]
    if not off:
        return [Finding(OK, f"within {1000 * (max(ahead) - min(ahead)):.1f} ms of each other")]
    worst = max(ahead, key=abs)
    text = f"up to {abs(worst):.1f} s {'ahead of' if worst > 0 else 'behind'} rank 0's on {places(off)}"
    advice = "times of logs and files will mislead; run an NTP service there (chrony, or timedatectl set-ntp true)"
    return [Finding(HINT, text, advice)]


def measure_all_reduce(board: Board) -> Facts:
    """Seconds that an all-reduce takes, for three sizes in bytes (the median of five), and whether it is right."""
    import torch
    import torch.distributed as dist

    from learnerkit import world

    device, found, right = world.default_device(), [], True
    wait = (lambda: None) if device.type == "cpu" else torch.accelerator.synchronize
    for n_bytes in (2**12, 2**20, 2**24 if device.type == "cpu" else 2**26):
        x, seconds = torch.empty(n_bytes // 4, device=device), []
        for _ in range(6):
            x.fill_(board.rank + 1)
            wait()
            start = time.perf_counter()
            dist.all_reduce(x)
            wait()
            seconds.append(time.perf_counter() - start)
            right = right and bool((x == board.size * (board.size + 1) / 2).all())
        found.append([n_bytes, statistics.median(seconds[1:])])  # the first one makes connections
    return {"seconds": found, "right": right}


def judge_all_reduce(everyone: list[Facts]) -> list[Finding]:
    """Latency, and bandwidth as that of a link: bytes/s times 2(n - 1)/n (nccl-tests, doc/PERFORMANCE.md)."""
    n, parts, speed = len(everyone), [], 0.0
    if wrong := [f for f in everyone if not f["all-reduce"]["right"]]:
        advice = "do not train like this; export NCCL_P2P_DISABLE=1, then NCCL_IB_DISABLE=1, to find the faulty link"
        return [Finding(WRONG, f"the sum is wrong on {places(wrong)}", advice)]
    for n_bytes, seconds in everyone[0]["all-reduce"]["seconds"]:
        speed = n_bytes / seconds * 2 * (n - 1) / n / 1e9
        parts.append(f"{in_units(n_bytes)} {1000 * seconds:.3g} ms, {speed:.2g} GB/s")
    text = "; ".join(parts)
    if everyone[0]["devices"].get("type") == "cuda" and speed < 1:
        return [Finding(HINT, f"slow for GPUs: {text}", ADVICE["all-reduce"])]
    return [Finding(OK, text)]


ALONE: dict[str, tuple[Callable[[], Facts], Judge]] = {
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
TOGETHER: dict[str, tuple[Callable[[Board], Facts], Judge]] = {
    "file system": (look_at_files, judge_files),
    "backend": (connect, judge_backend),
    "clock": (compare_clocks, judge_clocks),
    "all-reduce": (measure_all_reduce, judge_all_reduce),
}
_WAYS = "NCCL_DEBUG=INFO shows the way NCCL takes: set NCCL_SOCKET_IFNAME to the interface, NCCL_IB_HCA to the adapters"
ADVICE = {  # for what hangs, or all ranks fail to do
    "ranks": "does the disk that torch is on, or the name server, answer?",
    "file system": "does the current directory answer on every machine (df .)?",
    "backend": "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that leads to the other machines; "
    "a firewall must let the ports above through",
    "clock": "does a firewall cut connections between the machines?",
    "all-reduce": f"{_WAYS}; NCCL_IB_DISABLE=1 and NCCL_P2P_DISABLE=1 avoid a faulty link",
}


# Words


def machines(everyone: list[Facts]) -> list[list[Facts]]:
    """The ranks of each machine."""
    found: dict[str, list[Facts]] = {}
    for f in everyone:
        found.setdefault(f["machine"], []).append(f)
    return list(found.values())


def hosts(who: list[Facts]) -> str:
    """The names of the machines of some ranks."""
    return some([group[0]["host"] for group in machines(who)])


def places(who: list[Facts]) -> str:
    """Some ranks, and where they are."""
    return f"rank{'s' if len(who) > 1 else ''} {some([f['rank'] for f in who])} ({hosts(who)})"


def some(items: Sequence[object]) -> str:
    """The first few, and how many more there are."""
    more = [f"{len(items) - 4} more"] if len(items) > 4 else []
    return ", ".join([*map(str, items[:4]), *more])


def in_units(n_bytes: float) -> str:
    """Bytes in words: 64 MB."""
    power = next((power for power in (4, 3, 2, 1) if n_bytes >= 1024**power), 0)
    return f"{n_bytes / 1024**power:.3g} {('bytes', 'KB', 'MB', 'GB', 'TB')[power]}"


def sentence(error: BaseException) -> str:
    """An error in a line."""
    text = escaped(" ".join(str(error).split()))[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def lines(topic: str, finding: Finding) -> list[str]:
    """A finding as it is printed."""
    text = textwrap.wrap(escaped(" ".join(finding.text.split())), WIDTH - INDENT)
    advice = textwrap.wrap(escaped(" ".join(finding.advice.split())), WIDTH - INDENT - 3)
    rest = text[1:] + [("   " if i else "-> ") + line for i, line in enumerate(advice)]
    return [f"{finding.mark}  {topic:<{INDENT - 4}}{text[0]}", *(" " * INDENT + line for line in rest)]
