"""Memory that is limited on purpose: a hook raises torch's error where a batch has too many rows."""

import warnings

import torch
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import Callback, DataLoaders, Learner, SplitBatch, distributed

FAILURE = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Limit:
    """Memory that holds so many rows of a model's batches, in the forward or in the backward pass.

    Args:
        rows: above which a pass fails.
        where: 'forward' or 'backward'.
        begins: the number of the forward pass from which the limit holds.
        trains: it is for training; else for evaluation.
    """

    def __init__(self, rows, where="forward", begins=0, trains=True, error=None):
        self.rows, self.where, self.begins, self.trains = rows, where, begins, trains
        self.error = error or torch.OutOfMemoryError(FAILURE)
        self.seen, self.failures = [], 0

    def put_on(self, model):
        """Watch a model."""
        first, *_, last = (m for m in model.modules() if isinstance(m, nn.Linear))
        first.register_forward_pre_hook(lambda _, given: self.seen.append(len(given[0])))
        if self.where == "forward":
            last.register_forward_pre_hook(lambda m, given: self._check(m, given[0]))
        else:
            first = next(m for m in model.modules() if isinstance(m, nn.Tanh))
            first.register_full_backward_hook(lambda m, _, given: self._check(m, given[0]))

    def _check(self, module, rows):
        if len(self.seen) > self.begins and len(rows) > self.rows and module.training == self.trains:
            self.failures += 1
            raise type(self.error)(*self.error.args)


class Cancels(Callback):
    """Cancels a batch of training, or its step, on one rank.

    Args:
        event: at which.
        error: that is raised.
        at: the number of the batch.
        rank: which one.
    """

    def __init__(self, event, error, at, rank):
        super().__init__(**{event: lambda cb: cb.cancel()})
        self.error, self.at, self.which = error, at, rank

    def cancel(self):
        """Raise the error where it is due."""
        if self.learn.training and self.learn.train_iter == self.at and self.which == distributed.rank():
            raise self.error


def far(a, b):
    """How far the weights and the tables of two learners are from each other."""
    parts = [[p.detach() for p in x.model.parameters()] for x in (a, b)]
    tables = [torch.tensor(x.recorder.values, dtype=torch.float64) for x in (a, b)]
    first, second = (torch.cat([t.flatten() for t in (*p, t)]) for p, t in zip(parts, tables, strict=True))
    return (first - second).abs().max().item()


def fit(limit=None, cbs=(), together=True, *, model, epochs=2, n=76, loss=None, shard=False, options=None, **kwargs):
    """A learner that all ranks have trained together, or one process by itself."""
    torch.manual_seed(3)
    x, y = torch.randn(n, 4, dtype=torch.float64), torch.randint(3, (n,))
    dls = DataLoaders.from_datasets(TensorDataset(x, y), TensorDataset(x[:30], y[:30]), bs=12, device="cpu")
    net = model().double()
    learn = Learner(dls, net, loss or nn.CrossEntropyLoss(), opt_func=torch.optim.AdamW, lr=0.01, cbs=cbs, **kwargs)
    if limit is not None:
        limit.put_on(net)
    with learn.no_logging(), learn.no_bar(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* processes each train a whole copy")
        if together:
            with learn.distrib_ctx(split_batches=True, **({"shard": shard} | (options or {}))):
                learn.fit(epochs)
        else:
            learn.fit(epochs)
    return learn


def check_parts(fitted, limit, which):
    """All ranks take the parts that a limit on one rank, or with -1 on all, makes necessary, and no number changes."""
    split = fitted(limit, [SplitBatch()])
    assert bool(limit.failures) == (which in (-1, distributed.rank()))
    found = distributed.all_gather(split.split_batch.parts)
    assert len({*found}) == 1
    assert found[0] > 1
    assert far(fitted(together=False), split) < 1e-9
    assert far(fitted(cbs=[SplitBatch(parts=found[0])]), split) == 0
