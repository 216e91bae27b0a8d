"""Several devices and processes: `nn.DataParallel`, DistributedDataParallel, and the sampler swap."""

from learnerkit.parallel.data_parallel import ParallelCallback
from learnerkit.parallel.distributed import DistributedCallback, distrib_ctx, warn_outside_context

__all__ = ["DistributedCallback", "ParallelCallback", "distrib_ctx", "warn_outside_context"]
