"""How a script of several ranks runs its checks, and ends."""

import os
import sys
from collections.abc import Callable, Iterable

import torch.distributed as dist

from learnerkit import world


def run(checks: Iterable[Callable[[], None]]) -> None:
    """Run the checks on every rank; an error says which of them it was. Rank 0 prints that all is well."""
    for check in checks:
        try:
            check()
        except BaseException as error:
            error.add_note(f"in {check.__name__} on rank {world.rank()}")
            raise
    world.barrier()
    if world.is_main():
        print("all well")


def all_checks(names: dict) -> list[Callable[[], None]]:
    """The functions of a script that are called check_*, in its order."""
    return [check for name, check in names.items() if name.startswith("check_")]


def leave() -> None:
    """End this process without torch's teardown.

    torch 2.15 now and then aborts when the interpreter of a process that used DDP is taken down (under torchrun too;
    our launcher's processes end without that).
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
