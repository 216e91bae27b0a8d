"""Rank, world size and device of this process, read at each call and never at import."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
import torch.distributed as dist

from learnerkit import utils
from learnerkit.clusters import Place, find
from learnerkit.clusters.place import integer
from learnerkit.endings import mark

T = TypeVar("T")


def is_joined() -> bool:
    """Tell whether this process is in a process group (it should be if `world_size() > 1`)."""
    return dist.is_available() and dist.is_initialized()


def place() -> Place:
    """Return the place of this process in its run, by the variables of a launcher or of a cluster.

    Raises:
        ValueError: the variables are incomplete or wrong, or two clusters disagree.
    """
    if found := find(os.environ):
        return found
    number, size = integer(os.environ, "RANK", 0), integer(os.environ, "WORLD_SIZE", 1, least=1)
    return Place("", "RANK, WORLD_SIZE", number, size, is_rank=True)


def rank() -> int:
    """Return this process's number among all processes of the run."""
    return dist.get_rank() if is_joined() else place().node


def world_size() -> int:
    """Return the number of processes of the run."""
    if _alone.get():
        return 1
    return dist.get_world_size() if is_joined() else place().nodes


_alone: ContextVar[bool] = ContextVar("alone", default=False)


@contextmanager
def within(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable within this context."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def alone() -> AbstractContextManager[None]:
    """Treat this process as the only one within this context, so that collectives of this room do nothing."""
    return within(_alone, True)


def local_rank() -> int:
    """Return this process's number among those of its machine: the index of its accelerator.

    Ranks that do not know it (processes started by `mp.spawn`, say) take it from their rank and the number of devices.
    """
    if os.environ.get("LOCAL_RANK"):
        return integer(os.environ, "LOCAL_RANK")
    if not is_joined():
        here = place()
        if here.local_rank is not None or not here.is_rank:
            return here.local_rank or 0
    return rank() % max(1, torch.accelerator.device_count())


def is_main() -> bool:
    """Tell whether this is rank 0, the one process that prints, plots and saves."""
    return rank() == 0


def warn(message: str) -> None:
    """Warn on rank 0."""
    if is_main():
        utils.warn(message)


_warned: set[str] = set()


def warn_once(message: str, on_all: bool = False) -> None:
    """Warn on rank 0, and only the first time in this process.

    Args:
        message: the text of the warning.
        on_all: warn on the other ranks, too.
    """
    if (on_all or is_main()) and message not in _warned:
        _warned.add(message)
        utils.warn(message)


def default_device() -> torch.device:
    """Return the accelerator of this local rank, else the CPU.

    Raises:
        RuntimeError: there are fewer accelerators than local ranks.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    index, count = local_rank(), torch.accelerator.device_count()
    if count == 1 and os.environ.get("SLURM_LOCALID") == str(index):
        index = 0  # srun has started a task for this rank, and shows it only its own GPU (--gpus-per-task)
    if index >= count:
        raise RuntimeError(
            f"local rank {index} has no accelerator: this machine shows {count} ({accelerator.type}); "
            f"start at most {count} processes, or train on the CPU with device='cpu'"
        )
    return torch.device(accelerator.type, index)


class PeerError(RuntimeError):
    """An error that follows from another rank, which failed, stopped or did not come; it says which, where and why."""

    def __init__(self, *args: object, standstill: bool = False) -> None:
        super().__init__(*args)
        mark(self, follows=True, standstill=standstill)
