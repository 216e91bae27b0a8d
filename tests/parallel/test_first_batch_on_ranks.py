"""The trials with the first batch leave nothing behind: two processes train as one, whatever a forward pass changes."""

import pytest
import torch
from helpers import mostly_slow
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from learnerkit import Callback, CheckpointCallback, DataLoaders, Learner, distributed

pytestmark = pytest.mark.ranks(2)


class Moving(nn.Module):
    """With all that a forward pass may change, and on which the next one depends."""

    def __init__(self):
        super().__init__()
        self.query, self.key, hidden = (nn.Linear(4, 3) for _ in range(3))
        self.key.requires_grad_(False)
        self.hidden = [hidden.requires_grad_(False)]  # in a list, where torch does not look for modules
        self.register_buffer("written", torch.zeros(3))
        self.register_buffer("assigned", torch.zeros(3))
        self.register_buffer("anew", torch.zeros(3))
        self.rows, self.replaced, self.counts = torch.zeros(2, 3), torch.zeros(3), {"at": [0]}
        self.pointer = 0

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                for own, followed in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    own.data = own.data * 0.5 + followed.data * 0.5
                self.hidden[0].weight.mul_(0.9)
                self.query.weight.data.mul_(0.9)  # trained
                self.rows[self.pointer] += 1
            self.written += 1
            self.assigned = self.assigned * 0.9 + 1
            changed = self.anew + 0.3
            del self.anew
            self.register_buffer("anew", changed)
            self.replaced = self.replaced + 0.1
            self.counts["at"].append(self.counts["at"][-1] + 1)
            self.counts["newest"] = len(self.counts["at"])
            self.pointer = 1 - self.pointer
        moved = self.written + self.assigned + self.anew + self.rows[0] + self.replaced + self.counts["at"][-1]
        return self.query(x) * moved + self.key(x) + self.hidden[0](x) * self.pointer


class Centred(nn.Module):
    """A loss with a centre, as DINO's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))
        self.calls = 0

    def forward(self, pred, target):
        if torch.is_grad_enabled():
            self.centre, self.calls = self.centre * 0.9 + 0.1, self.calls + 1
        return F.mse_loss(pred - self.centre, target * self.calls)


class _Break(Callback):
    def before_batch(self):
        assert self.train_iter < 3, "broken off"


def learner(**kwargs):
    torch.manual_seed(3)
    x = torch.randn(32, 4)
    dls = DataLoaders.from_datasets(TensorDataset(x, x[:, :3]), bs=8, device="cpu")
    return Learner(dls, Moving(), Centred(), opt_func=torch.optim.SGD, lr=1e-3, **kwargs)


def trained(how, name, company):
    """What is there after training in two fits, or in two processes, or neither."""
    kept = {"cbs": CheckpointCallback(name, every=1, resume=True)} if how == "resumed" else {}
    learn = learner(**kept)

    def fit(**kwargs):
        with learn.no_logging(), company(learn):
            learn.fit(2, **kwargs)

    if how == "a second fit":
        fit()
    if how == "resumed":
        with pytest.raises(AssertionError, match="broken off"):
            fit(cbs=_Break())
        learn = learner(**kept)
    fit()
    model, loss = learn.model, learn.loss_func
    tensors = [*model.parameters(), *model.hidden[0].parameters(), *model.buffers(), *loss.buffers()]
    names = [name for name, _ in model.named_buffers()]
    return [*tensors, model.rows, model.replaced], (model.counts, model.pointer, loss.calls, names)


@pytest.mark.parametrize("how", mostly_slow(["fresh", "a second fit", "resumed"], "resumed"))
def test_two_processes_equal_one(how):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        alone = trained(how, "alone", lambda learn: distributed.alone()) if distributed.is_main() else None
        found, counted = trained(how, "together", lambda learn: learn.distrib_ctx(split_batches=True))
    finally:
        torch.set_default_dtype(before)
    if alone is not None:
        for one, two in zip(alone[0], found, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-10, atol=1e-12)
        assert counted == alone[1]
