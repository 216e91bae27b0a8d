"""A process group of one rank with NCCL, as the library makes no group for one; prints what came of it as JSON."""

import copy
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from learnerkit import DataLoaders, Learner, set_seed
from learnerkit.torch_internals import abort_nccl

DEVICE = "cuda"


def trained(wrap=None, context=False):
    """The weights after two epochs."""
    set_seed(0)
    x = torch.randn(48, 6, dtype=torch.float64)
    data = TensorDataset(x, (x[:, :3]).argmax(1))
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double().to(DEVICE)
    of_one = copy.deepcopy(model) if wrap is None else wrap(model)
    dls = DataLoaders.from_datasets(data, data, bs=8, device=DEVICE)
    learn = Learner(dls, of_one, nn.CrossEntropyLoss(), opt_func=torch.optim.SGD, lr=0.1)
    with learn.no_bar(), learn.no_logging():
        if context:
            with learn.distrib_ctx():
                learn.fit(2)
        else:
            learn.fit(2)
    values = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in of_one.parameters())
    return torch.cat([p.detach().flatten() for p in values])


def sharded(model):
    """FSDP2 by hand."""
    fully_shard(model[0])
    return fully_shard(model)


torch.cuda.set_device(0)
alone = trained()
dist.init_process_group("cpu:gloo,cuda:nccl")
found = {"backends": dist.get_backend_config()}
ways = {
    "distrib_ctx": trained(context=True),
    "DDP of the user": trained(lambda model: DistributedDataParallel(model, device_ids=[0])),
    "FSDP2 of the user": trained(sharded),
}
found |= {name: (of - alone).abs().max().item() for name, of in ways.items()}
ones = torch.ones(3, device=DEVICE)
dist.all_reduce(ones)
assert ones.tolist() == [1.0] * 3
abort_nccl()
try:
    dist.all_reduce(ones)
    torch.cuda.synchronize()
    found["aborted"] = "a collective after the abort does something"
except Exception:
    found["aborted"] = "a collective after the abort raises"
print(json.dumps(found), flush=True)
dist.destroy_process_group()
