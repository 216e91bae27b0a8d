"""After a fit of several processes no hook is left on the model, whichever way its gradients went."""

import copy

import pytest
import torch
from helpers import OwnBackward, mostly_slow
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import Callback, DataLoaders, GradientAccumulation, GradientNoiseScale, Learner, distributed

pytestmark = pytest.mark.ranks(2)


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last, self.unused = (
            nn.Linear(4, 6),
            nn.BatchNorm1d(6),
            nn.Linear(6, 3),
            nn.Linear(2, 2),
        )

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def twice(cb):
    cb.model(cb.x).square().mean().backward()


FITS = {
    "plain": {}, "unused": {"find_unused_parameters": True}, "static": {"static_graph": True},
    "parts": {"wrap": ("first", "norm", "last")},
    "parts, unused": {"wrap": ("first", "norm", "last"), "find_unused_parameters": True},
    "passes of a callback": {"cbs": [Callback(after_backward=twice)], "find_unused_parameters": True},
    "a backward pass of its own": {"cls": OwnBackward}, "accumulation": {"cbs": [GradientAccumulation(n_batches=2)]},
    "noise": {"cbs": [GradientNoiseScale(every=1)]},
}  # fmt: skip


def hooks(model):
    """Everything that would run with a module or its parameters, and where torch would keep more of it."""
    of_modules = {
        (name, key): dict(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key.endswith("hooks")
    }
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return of_modules, {(name, kind): getattr(p, kind) for name, p in model.named_parameters() for kind in kinds}


@pytest.mark.parametrize(
    "kind", mostly_slow(FITS, "plain", "parts, unused", "passes of a callback", "accumulation", "noise")
)
def test_no_hook_stays(kind):
    torch.manual_seed(3)
    options = dict(FITS[kind])
    x, model = torch.randn(32, 4), Wide()
    model.unused.requires_grad_("unused" in kind and "parts" not in kind)
    dls = DataLoaders.from_datasets(TensorDataset(x, x[:, :3]), bs=8, device="cpu")
    made = {"cbs": options.pop("cbs", None)}
    learn, before = options.pop("cls", Learner)(dls, model, nn.MSELoss(), **made), hooks(model)
    with learn.no_logging(), learn.distrib_ctx(sync_bn=False, **options):
        learn.fit(1)
    assert hooks(model) == before
    plain = copy.deepcopy(model)
    for each in (model, plain) * 2 if distributed.is_main() else ():  # of DDP's hooks autograd shows nothing
        each.train()
        each(x).square().sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(a.grad is b.grad is None or torch.equal(a.grad, b.grad) for a, b in pairs)
