"""The doctor's checks that all ranks make together, in this order: files, connections, clocks, the all-reduce.

Every rank must reach each of them.
"""

import os
import secrets
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from learnerkit import distributed
from learnerkit.marks import collective
from learnerkit.preflight.facts import Board, Facts, Judge, Ranks, places
from learnerkit.preflight.report import Finding, doubtful, fine, problem
from learnerkit.text import in_one_line, in_units

SLOW_LINK = (
    "NCCL_DEBUG=INFO shows the way NCCL takes: set NCCL_SOCKET_IFNAME to the interface, NCCL_IB_HCA to the adapters; "
    "NCCL_IB_DISABLE=1 and NCCL_P2P_DISABLE=1 avoid a faulty link"
)


def look_at_files(board: Board) -> Facts:
    """Write a file into the current directory on rank 0, and look for it on all ranks; it is removed in any case."""
    path, refused = Path(f".learnerkit-doctor-{secrets.token_hex(8)}"), ""
    try:
        if board.rank == 0:
            try:
                path.write_text("made by learnerkit.doctor for a moment; may be removed\n")
            except OSError as error:
                refused = in_one_line(error)
        seen = os.path.exists(board.announce("file", path.name))
        board.gather("looked", True, 10.0)  # seconds for all to look
    finally:
        if board.rank == 0:
            with suppress(OSError):  # it could not be written
                path.unlink()
    return {"folder": os.getcwd(), "seen": seen, "refused": refused}


def judge_files(everyone: Ranks) -> list[Finding]:
    """Judge whether the ranks share a file system."""
    files = everyone[0]["file system"]
    if files["refused"]:
        advice = "start in another directory, or give what is saved a path elsewhere"
        return [doubtful(f"rank 0 cannot write to {files['folder']}: {files['refused']}", advice)]
    if not (blind := [f for f in everyone if not f["file system"]["seen"]]):
        return [fine(f"{files['folder']} can be written{', and all see it' * (len(everyone) > 1)}")]
    advice = (
        "if machines have files of their own, data and scripts must be on each (rank0_first(..., per_node=True) "
        f"downloads once per machine), and checkpoints lie on {everyone[0]['host']}"
    )
    if any(f["machine"] == everyone[0]["machine"] for f in blind):
        advice = f"start all in one directory, not in {blind[0]['file system']['folder']}"
    return [doubtful(f"what rank 0 writes to {files['folder']} is not seen by {places(blind)}", advice)]


@collective
def connect(board: Board) -> Facts:
    """Make the process group as a run would."""
    distributed.join(timeout=60.0)  # torch's own limit must come after the board's: NCCL's aborts the process
    distributed.barrier()
    return {"config": dist.get_backend_config()}


def judge_backend(everyone: Ranks) -> list[Finding]:
    """Name the library that carries the data of each device."""
    libraries = dict(part.split(":") for part in everyone[0]["backend"]["config"].split(","))
    used = dict.fromkeys([everyone[0]["devices"].get("type", "cpu"), "cpu"])
    return [fine(", ".join(f"{libraries[d]} for {d}" for d in used if d in libraries) + "; all are connected")]


@collective
def compare_clocks(board: Board) -> Facts:
    """Measure on rank 0 by how many seconds the clock of each rank is ahead of its own.

    Half the round trip is taken off; the quickest of three counts (F. Cristian, "Probabilistic clock synchronization",
    1989).
    """
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


def judge_clocks(everyone: Ranks) -> list[Finding]:
    """Judge whether the clocks agree within a second."""
    ahead = everyone[0]["clock"]["ahead"]
    if not (off := [f for f, seconds in zip(everyone, ahead, strict=True) if abs(seconds) >= 1]):
        return [fine(f"within {1000 * (max(ahead) - min(ahead)):.1f} ms of each other")]
    worst = max(ahead, key=abs)
    text = f"up to {abs(worst):.1f} s {'ahead of' if worst > 0 else 'behind'} rank 0's on {places(off)}"
    advice = "times of logs and files will mislead; run an NTP service there (chrony, or timedatectl set-ntp true)"
    return [doubtful(text, advice)]


@collective
def measure_all_reduce(board: Board) -> Facts:
    """Measure the seconds of an all-reduce of three sizes in bytes (the median of five), and check its sums."""
    device = distributed.default_device()
    medians = []
    right = True
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
        medians.append([n_bytes, statistics.median(seconds[1:])])  # the first one makes connections
    return {"seconds": medians, "right": right}


def judge_all_reduce(everyone: Ranks) -> list[Finding]:
    """Report latency, and bandwidth as that of a link: bytes/s times 2(n - 1)/n (nccl-tests, doc/PERFORMANCE.md)."""
    n = len(everyone)
    parts = []
    speed = 0.0
    if wrong := [f for f in everyone if not f["all-reduce"]["right"]]:
        advice = "do not train like this; export NCCL_P2P_DISABLE=1, then NCCL_IB_DISABLE=1, to find the faulty link"
        return [problem(f"the sum is wrong on {places(wrong)}", advice)]
    for n_bytes, seconds in everyone[0]["all-reduce"]["seconds"]:
        speed = n_bytes / seconds * 2 * (n - 1) / n / 1e9
        parts.append(f"{in_units(n_bytes)} {1000 * seconds:.3g} ms, {speed:.2g} GB/s")
    text = "; ".join(parts)
    if everyone[0]["devices"].get("type") == "cuda" and speed < 1:
        return [doubtful(f"slow for GPUs: {text}", SLOW_LINK)]
    return [fine(text)]


JOINT: dict[str, tuple[Callable[[Board], Facts], Judge, str]] = {
    "file system": (look_at_files, judge_files, "does the current directory answer on every machine (df .)?"),
    "backend": (
        connect,
        judge_backend,
        "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that leads to the other machines; a firewall "
        "must let the ports above through",
    ),
    "clock": (compare_clocks, judge_clocks, "does a firewall cut connections between the machines?"),
    "all-reduce": (measure_all_reduce, judge_all_reduce, SLOW_LINK),
}
"""The checks by topic, in the order of the report: what the ranks do together, the judge, and advice if it fails."""
