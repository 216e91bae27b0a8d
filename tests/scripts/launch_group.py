"""Plain torch.distributed code, as it would be written for any launcher; prints what it has seen."""

import json
import os

os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"  # read while torch is imported: must act on every rank alike

import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


class Squares:
    """A dataset that lives in the script, so that spawned workers must import the script to use it."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([float(index**2)])


def listeners():
    """Return the addresses on which the launcher and all it has started listen."""
    launcher = psutil.Process(os.getppid())
    family = [launcher, *launcher.children(recursive=True)]
    return [c.laddr.ip for p in family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    model(total).sum().backward()
    facts = {"rank": rank, "size": size, "total": total.item(), "listeners": listeners()}
    facts["debug"] = dist.get_debug_level().name
    if size == 1:
        loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context="spawn")
        facts["squares"] = next(iter(loader)).sum().item()
    dist.barrier()
    os.write(1, json.dumps(facts).encode() + b"\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
