"""Two processes meet: what launching is measured with; see run.py."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
assert one.item() == 2
dist.destroy_process_group()
