"""Ranks that do not make the same calls; the argument names the case, and each rank prints what came of it."""

import os
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import Callback, DataLoaders, Learner, distributed

RANK, TIMEOUT = int(os.environ["RANK"]), 3.0


def train(learn: Learner, epochs: int = 1) -> None:
    """Train in the context."""
    with learn.distrib_ctx(timeout=TIMEOUT, split_batches=True):
        learn.fit(epochs)


def mid_fit(call) -> Callback:
    """Make a call at the end of the third batch, on rank 1 alone."""

    def hook(cb):
        if RANK == 1 and cb.training and cb.train_iter == 3:
            call()

    return Callback(after_batch=hook)


def alone(who: int, then=lambda: None) -> None:
    """One rank trains, the others do something else."""
    began = time.monotonic()
    try:
        train(learn) if who == RANK else then()
    finally:
        print(f"rank {RANK} took {time.monotonic() - began:.1f} s", flush=True)


def own_group() -> None:
    """Ranks that joined by themselves train, and one makes calls of its own."""
    dist.init_process_group("gloo")
    distributed.barrier()
    train(learn)
    learn.add_cb(mid_fit(lambda: dist.all_reduce(torch.ones(100_000))))
    train(learn)


def waiting_at_the_end() -> None:
    """The process group still waits, in a thread, when the interpreter ends."""
    train(learn)
    if RANK == 0:
        threading.Thread(target=lambda: dist.all_reduce(torch.ones(3)), daemon=True).start()


def shapes() -> None:
    """In a collective of the user's ranks have tensors of different sizes; no rank catches its error."""
    learn.add_cb(Callback(after_batch=lambda cb: dist.all_reduce(torch.ones(1 + 5000 * RANK))))
    train(learn)


def leaves(how) -> None:
    """A rank ends while the others wait for it."""
    learn.add_cb(mid_fit(how))
    learn.add_cb(Callback(after_batch=lambda cb: dist.barrier(), order=1))
    train(learn)


def second_alone(who: int) -> None:
    """After a fit of all one rank trains again."""
    train(learn)
    alone(who)


CASES = {
    "alone-0": lambda: alone(0),
    "alone-1": lambda: alone(1, lambda: time.sleep(1.5)),  # so that rank 1 comes before rank 0 ends
    "alone-0-sleep": lambda: alone(0, lambda: time.sleep(600)),
    "alone-1-sleep": lambda: alone(1, lambda: time.sleep(600)),
    "alone-0-elsewhere": lambda: alone(0, distributed.barrier),
    "second-0": lambda: second_alone(0),
    "second-1": lambda: second_alone(1),
    "own-group": own_group,
    "waiting-at-the-end": waiting_at_the_end,
    "shapes": shapes,
    "exit": lambda: leaves(lambda: sys.exit(3)),
    "_exit": lambda: leaves(lambda: os._exit(3)),
}

torch.set_num_threads(1)
x = torch.randn(32, 4)
data = TensorDataset(x, (x.sum(1) > 0).long())
learn = Learner(DataLoaders.from_datasets(data, data, bs=4, device="cpu"), nn.Linear(4, 2), nn.CrossEntropyLoss())
learn.create_opt()  # with the first optimizer torch imports its compiler
if not sys.argv[1].startswith(("alone", "own")):
    distributed.barrier()  # so that no rank is late for the fit, however long the imports have taken on a busy machine
CASES[sys.argv[1]]()
print(f"rank {RANK} is through", flush=True)
