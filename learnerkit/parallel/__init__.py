"""Several devices and processes: `nn.DataParallel`, DistributedDataParallel, and what keeps the ranks together."""

from learnerkit.distributed import PeerError
from learnerkit.parallel.agreement import Agreement
from learnerkit.parallel.data_parallel import DataParallelCallback, ParallelCallback
from learnerkit.parallel.distributed import (
    DistributedCallback,
    agreement_for,
    dispatch,
    warn_outside_context,
    will_shard,
)
from learnerkit.parallel.drift import DriftCheck

__all__ = [
    "Agreement", "DataParallelCallback", "DistributedCallback", "DriftCheck", "ParallelCallback", "PeerError",
    "agreement_for", "dispatch", "warn_outside_context", "will_shard",
]  # fmt: skip
