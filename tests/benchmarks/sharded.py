"""Microseconds and memory of a step with shards on two processes: a loop by hand against a Learner; see run.py."""

import gc
import json
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from run import take_turns
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.utils.data import TensorDataset

from learnerkit import Callback, DataLoaders, Learner, distributed
from learnerkit.optim import parameters_of

BATCH, STEPS, EPOCHS = 16, 250, 2
WIDTH, BLOCKS = 316, 4
LOSS = nn.CrossEntropyLoss()
OPTIMIZER = partial(torch.optim.AdamW, fused=True)


class Block(nn.Module):
    """A unit, of which the model has several."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return x + self.layers(x)


def make_model():
    "1.06 million parameters."
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, WIDTH), *[Block() for _ in range(BLOCKS)], nn.Linear(WIDTH, 40))


def by_hand(dataset, group):
    "A loop with a process group of its own, as a plain script has: on learnerkit's default one calls are compared."
    model, mesh = make_model(), DeviceMesh.from_group(group, "cpu")
    for block in model[1:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    opt = OPTIMIZER(model.parameters(), lr=1e-3)
    images, labels = dataset.tensors
    mine = slice(distributed.rank(), None, distributed.world_size())  # every rank takes its own of the row of batches
    for _ in range(EPOCHS):
        losses = []
        for x, y in list(zip(images.split(BATCH), labels.split(BATCH), strict=True))[mine]:
            loss = LOSS(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.detach())
        torch.stack(losses).mean().item()
    return [p.full_tensor() for p in model.parameters()]


def by_learner(dataset, shard=True, **kwargs):
    dls = DataLoaders.from_datasets(dataset, bs=BATCH, shuffle=False)
    learn = Learner(dls, make_model(), LOSS, opt_func=OPTIMIZER, **kwargs)
    with learn.distrib_ctx(shard=shard):
        learn.fit(EPOCHS, 1e-3)
    return list(learn.model.parameters())


class Memory(Callback):
    """Bytes on this rank: of what lasts, in the 10th step, and of all parameters, while the blocks are run in it."""

    def before_fit(self):
        self.bytes = {}
        self.most = 0

    def before_batch(self):
        if self.train_iter == 9:
            layers = [m for m in self.model.modules() if isinstance(m, nn.Linear)]
            self.hooks = [m.register_forward_hook(self.watch) for m in layers]

    def watch(self, module, args, output):
        self.note()
        output.register_hook(self.note)  # in the backward pass

    def note(self, *_):
        self.most = max(self.most, sum(storages(live_parameters(self.model)).values()))

    def after_step(self):
        if self.train_iter == 9:
            for hook in self.hooks:
                hook.remove()
            params = list(self.model.parameters())
            kinds = {
                "parameters": params,
                "gradients": [p.grad for p in params],
                "optimizer state": [s for p in parameters_of(self.learn.opts) for s in self.opt.state[p].values()],
            }
            self.bytes = {kind: sum(storages(tensors).values()) for kind, tensors in kinds.items()}


def storages(tensors):
    "The bytes of the memory of some tensors, by its address: of a shard those of this rank."
    plain = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in plain}


def live_parameters(model):
    "The tensors with the parameters of a model: the rows of this rank, and what is gathered."
    yield from model.parameters()
    modules = set(model.modules())
    for x in gc.get_objects():
        if type(x) is FSDPParam and x._module_info.module in modules:
            yield from [x._sharded_param_data, *x.all_gather_outputs]


def memory(dataset, shard):
    found = Memory()
    short = TensorDataset(*(t[: 20 * BATCH * distributed.world_size()] for t in dataset.tensors))
    by_learner(short, shard, cbs=found)
    return found.bytes | {"most": found.most}


def main(rounds, file):
    torch.set_num_threads(1)
    distributed.join()
    torch.manual_seed(0)
    n = BATCH * STEPS * distributed.world_size()
    dataset = TensorDataset(torch.randn(n, 784), torch.randint(40, (n,)))
    trained = {}

    def timed(train):
        dist.barrier()
        start, worked = time.perf_counter(), time.process_time()
        trained[train] = train(dataset)
        processor[train].append((time.process_time() - worked) / EPOCHS / STEPS * 1e6)
        dist.barrier()
        return (time.perf_counter() - start) / EPOCHS / STEPS * 1e6

    contestants = partial(by_hand, group=dist.new_group()), by_learner
    processor = {train: [] for train in contestants}
    found = take_turns(rounds, *(partial(timed, train) for train in contestants))
    for one, other in zip(*trained.values(), strict=True):
        assert torch.allclose(one, other, atol=1e-6), "they did not do the same"
    found = {
        "times": found,
        "processor": list(zip(*(times[1:] for times in processor.values()), strict=True)),
        "ddp": distributed.all_gather(memory(dataset, shard=False)),
        "sharded": distributed.all_gather(memory(dataset, shard=True)),
    }
    if distributed.is_main():
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
