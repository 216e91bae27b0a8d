"""What was tried out leaves no trace: weights, optimizer, gradients and random streams are exactly what they were."""

import copy
import random

import numpy as np
import pytest
import torch
from conftest import make_classes, make_learner
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader

from learnerkit import DataLoaders
from learnerkit.snapshot import unchanged


class Network(nn.Module):
    """With every kind of tensor that a module can have."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.tied = self.head
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.hidden = self.hidden + 1  # another tensor each time
        self.count += 1
        return self.tied(torch.relu(self.norm(self.body(x))))


def learner(opt_func=AdamW, fitted=True, **kwargs):
    dls = DataLoaders(DataLoader(make_classes(16), 4, shuffle=True), DataLoader(make_classes(8), 4), device="cpu")
    learn = make_learner(dls, Network(), nn.CrossEntropyLoss(), opt_func=opt_func, lr=0.05, **kwargs)
    if fitted:
        learn.fit(1)
    return learn


def facts(learn):
    """Everything that training changes."""
    opt = learn.opt and learn.opt.state_dict()
    grads = {name: p.grad for name, p in learn.model.named_parameters()}
    needs = {name: p.requires_grad for name, p in learn.model.named_parameters()}
    tensors = dict(learn.model.named_parameters()) | dict(learn.model.named_buffers())
    seeds = torch.get_rng_state(), random.getstate(), np.random.get_state()
    loss = dict(learn.loss_func.named_buffers())
    return copy.deepcopy((tensors, opt, grads, needs, seeds, loss))


def same(a, b):
    if isinstance(a, torch.Tensor | np.ndarray):
        return a.dtype == b.dtype and bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def disturb(learn):
    """Train, and change what training alone would not."""
    with learn.no_logging():
        learn.fit(2, 0.3)
    learn.model.head.weight.grad = torch.ones_like(learn.model.head.weight)
    learn.model.body.requires_grad_(False)
    learn.opt.param_groups[0]["extra"] = 1
    random.random()
    np.random.rand()
    torch.rand(1)


@pytest.mark.parametrize("error", [None, ValueError])
@pytest.mark.parametrize("fitted", [True, False])
@pytest.mark.parametrize("opt_func", [AdamW, lambda params, lr: SGD(params, lr, momentum=0.9)])
@pytest.mark.parametrize("wd", [None, 0.1])
def test_nothing_changes(opt_func, fitted, wd, error):
    learn = learner(opt_func, fitted, wd=wd)
    learn.model.body.weight.grad = torch.full_like(learn.model.body.weight, 0.5)
    tensors = [id(t) for t in (*learn.model.parameters(), *learn.model.buffers())]
    groups, opt, before = learn.opt and learn.opt.param_groups, learn.opt, facts(learn)
    try:
        with unchanged(learn):
            disturb(learn)
            assert not same(before, facts(learn))
            if error:
                raise error
    except ValueError:
        assert error
    assert same(before, facts(learn))
    assert learn.opt is opt
    assert groups is None or groups is learn.opt.param_groups
    assert [id(t) for t in (*learn.model.parameters(), *learn.model.buffers())] == tensors


def test_training_goes_on_as_if_nothing_had_been():
    losses = []
    for tried in (False, True):
        torch.manual_seed(4)
        learn = learner()
        if tried:
            with unchanged(learn):
                disturb(learn)
        learn.fit(2)
        losses.append((learn.recorder.losses, learn.recorder.values))
    assert losses[0] == losses[1]


def test_a_loss_with_weights_is_put_back_too():
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    learn = make_learner(
        DataLoaders(DataLoader(make_classes(8), 4), device="cpu"), nn.Sequential(nn.Linear(4, 3)), loss
    )
    with unchanged(learn):
        loss.weight.mul_(2)
    assert loss.weight.tolist() == [1, 1, 1]
