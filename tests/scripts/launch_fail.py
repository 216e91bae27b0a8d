"""Rank 1 raises while rank 0 waits for it in a collective; both leave a group and a DDP model behind."""

import atexit

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(1, 1))
model(torch.ones(1)).sum().backward()
atexit.register(print, "exit hook ran")
atexit.register(dist.destroy_process_group)  # as many libraries do; it may not block the end either
if dist.get_rank() == 1:
    try:
        raise KeyError("the cause")
    except KeyError as error:
        pending = dist.all_reduce(torch.ones(2), async_op=True)
        failure = ValueError("bad \x1b[2J sample\nlearnerkit.launch: \x9b31m second line")
        failure.add_note("in batch 7")
        raise failure from error
dist.all_reduce(torch.ones(2))
dist.all_reduce(torch.ones(1))
