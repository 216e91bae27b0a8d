"""Ranks, world size and collectives: every function answers on any number of processes, also on one.

Facts are read when asked, never at import: from the process group, else from the environment that a launcher made
(`RANK`, `LOCAL_RANK`, `WORLD_SIZE`) or the scheduler of a cluster (`learnerkit.clusters`), else 0, 0 and 1. The process
group is made at first need and lives until the process ends. On one process a collective is the identity.
"""

from learnerkit.distributed.collectives import (
    GATHERED,
    MISMATCH,
    SAME_CALLS,
    all_gather,
    around_collectives,
    barrier,
    before_collective,
    broadcast,
    broadcast_into,
    follow_rank0,
    gather_pieces,
    give_values,
    grouped_collectives,
    mean_into,
    meet,
    no_collectives,
    noticing_standstills,
    on_rank0,
    rank0_first,
    reduce,
    same_everywhere,
    spread_seeds,
)
from learnerkit.distributed.facts import (
    PeerError,
    alone,
    default_device,
    is_joined,
    is_main,
    local_rank,
    place,
    rank,
    warn,
    warn_once,
    world_size,
)
from learnerkit.distributed.meeting import (
    await_all,
    compare_calls_of_users,
    count_call,
    group,
    hear,
    join,
    not_together,
    store,
    store_port,
    tell,
)
from learnerkit.distributed.seeds import set_seed

__all__ = [
    "GATHERED", "MISMATCH", "PeerError", "SAME_CALLS", "all_gather", "alone", "around_collectives", "await_all",
    "barrier", "before_collective", "broadcast", "broadcast_into", "compare_calls_of_users", "count_call",
    "default_device", "follow_rank0", "gather_pieces", "give_values", "group", "grouped_collectives", "hear",
    "is_joined", "is_main", "join", "local_rank", "mean_into", "meet", "no_collectives", "not_together",
    "noticing_standstills", "on_rank0", "place", "rank", "rank0_first", "reduce", "same_everywhere", "set_seed",
    "spread_seeds", "store", "store_port", "tell", "warn", "warn_once", "world_size",
]  # fmt: skip
