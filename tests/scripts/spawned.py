"""DDP in processes started by torch.multiprocessing.spawn, with a process group of the script's own.

The second training runs in a thread, as in a worker of Ray: one rank fails, and then both train on.
"""

import os
import sys
import tempfile
import threading
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import Callback, DataLoaders, Learner, distributed


def make_learner() -> Learner:
    torch.manual_seed(3)
    x = torch.randn(23, 4)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    dls = DataLoaders.from_datasets(data, data, bs=4, device="cpu")
    return Learner(dls, nn.Linear(4, 2), nn.CrossEntropyLoss(), lr=0.05)


def train_on(rank: int) -> None:
    def fail(cb: Callback) -> None:
        if rank == 1 and cb.train_iter == 2:
            raise ValueError("the first cause")

    learn = make_learner()
    with learn.distrib_ctx(), learn.no_logging():
        said = ""
        try:
            learn.fit(1, cbs=Callback(before_batch=fail))
        except (ValueError, distributed.PeerError) as error:
            said = str(error)
        assert ("the first cause" if rank else "rank 1 failed in before_batch") in said
        learn.fit(1)
        preds, _ = learn.get_preds()
    assert distributed.same_everywhere([p.tolist() for p in learn.model.parameters()])
    assert len(preds) == 23


def work(rank: int, n: int, file: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_learner().distrib_ctx()
    (told,) = (str(w.message) for w in caught)
    assert "this process trains a model of its own" in told
    assert "python -m learnerkit.launch --nproc N script.py" in told
    warnings.simplefilter("error")
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=n)
    assert (distributed.rank(), distributed.world_size(), distributed.local_rank()) == (
        rank,
        n,
        rank % max(1, torch.cuda.device_count()),
    )
    learn = make_learner()
    with learn.distrib_ctx(), learn.no_logging():
        learn.fit(1)
        preds, _ = learn.get_preds()
    assert distributed.same_everywhere([p.tolist() for p in learn.model.parameters()])
    assert len(preds) == 23
    done: list[None] = []
    thread = threading.Thread(target=lambda: done.append(train_on(rank)))
    thread.start()
    thread.join()
    if done and distributed.is_main():
        print("spawned well")
    dist.barrier()  # nobody leaves while another still reads
    dist.destroy_process_group()
    # torch 2.15 now and then aborts when the interpreter of a process that used DDP is taken down.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (2, f"{folder}/group"), nprocs=2)
    sys.exit(0)
