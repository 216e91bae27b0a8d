"""Memory that is limited on purpose: a hook raises torch's error where a batch has too many rows."""

import torch
from torch import nn

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
