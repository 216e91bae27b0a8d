"""Whoever takes a run's state has all of it: a new callback, a new kind of optimizer and a new kind of loader."""

import copy
from functools import partial

import pytest
import torch
from helpers import make_data, make_learner, make_model, mostly_slow, same_weights, weights
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, IterableDataset

from learnerkit import Callback, CheckpointCallback, DataLoaders, Learner, distributed
from learnerkit.notebook import transfer
from learnerkit.parallel import DriftCheck
from learnerkit.scaling.parts import Clock
from learnerkit.scaling.trials import run_trial


class Pull(Callback):
    """Draws the predictions towards a mean of the first bias, of which it alone knows."""

    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(6)

    def after_loss(self):
        if self.training:
            self.learn.loss_grad = self.learn.loss_grad + self.pred.mean() * self.mean.mean()

    def after_step(self):
        first = next(p for name, p in self.model.named_parameters() if name.endswith("0.bias"))
        self.mean.lerp_(first.detach(), 0.5)  # which takes no two types

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]


class Lookahead(Optimizer):
    """Goes around another optimizer, and keeps slow weights of its own (Zhang et al., arXiv:1907.08610)."""

    def __init__(self, params, lr):
        self.inner = SGD(params, lr, momentum=0.9)
        super().__init__(self.inner.param_groups, {})
        self._share()
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def __getstate__(self):  # torch's has but the groups and the state
        return vars(self).copy()

    def _share(self):
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        for p, slow in zip((p for group in self.param_groups for p in group["params"]), self.slow, strict=True):
            slow.lerp_(p, 0.5)
            p.copy_(slow)

    def state_dict(self):
        return self.inner.state_dict() | {"slow": self.slow}

    def load_state_dict(self, state):
        self.inner.param_groups = self.param_groups
        self.inner.load_state_dict({"state": state["state"], "param_groups": state["param_groups"]})
        self._share()
        self.slow = [t.clone() for t in state["slow"]]


class Stream(IterableDataset):
    """Goes on in each epoch where the one before has ended."""

    def __init__(self):
        self.data, self.at = make_data(40), 0

    def __iter__(self):
        while True:
            self.at += 1
            yield self.data[self.at % 40]
            if not self.at % 16:
                return


class Loader(DataLoader):
    def state_dict(self):
        return {"at": self.dataset.at}

    def load_state_dict(self, state):
        self.dataset.at = state["at"]


def make(cbs=()):
    dls = DataLoaders(Loader(Stream(), 4), DataLoader(make_data(8, seed=1), 4), device="cpu")
    return make_learner(dls, make_model(), opt_func=Lookahead, cbs=[Pull(), *cbs], lr=0.02)


def facts(learn):
    """What the three have, and what training makes of it."""
    return copy.deepcopy((learn.pull.mean, learn.opt.slow, learn.dls.train.dataset.at, weights(learn.model)))


def same(a, b):
    (mean, slow, at, model), (mean_b, slow_b, at_b, model_b) = a, b
    return at == at_b and all(map(torch.equal, [mean, *slow], [mean_b, *slow_b])) and same_weights(model, model_b)


def through_state(learn):
    state = copy.deepcopy(learn.state_dict())
    learn.fit(1)
    learn.load_state_dict(state)


WAYS = {
    "state_dict": through_state,
    "check": lambda learn: learn.check(),
    "lr_find": lambda learn: learn.lr_find(num_it=10, stop_div=False, show_plot=False, suggest_funcs=()),
    "scaling": lambda learn: run_trial(learn, Clock(learn, 2)),
}


@pytest.mark.parametrize("way", mostly_slow(WAYS, "state_dict", "check"))
def test_all_of_it_is_put_back(way):
    learn = make()
    with learn.no_logging():
        learn.fit(1)
        before, groups = facts(learn), learn.opt.param_groups
        WAYS[way](learn)
        assert same(before, facts(learn))
        if way != "state_dict":
            assert learn.opt.inner.param_groups is learn.opt.param_groups is groups
        learn.fit(1)
        straight = make()
        for _ in range(2):
            straight.fit(1)
    assert same(facts(straight), facts(learn))


def straight(epochs):
    learn = make()
    learn.fit(epochs)
    return facts(learn)


def test_a_checkpoint_has_all_of_it(tmp_path):
    def kill(cb):
        if cb.training and cb.train_iter == 6:
            raise KeyboardInterrupt

    saving = partial(CheckpointCallback, tmp_path, every=1, resume=True)
    with pytest.raises(KeyboardInterrupt):
        make([Callback(before_batch=kill)]).fit(3, cbs=saving())
    again = make([Callback(before_batch=lambda cb: None)])
    again.fit(3, cbs=saving())
    assert same(straight(3), facts(again))


def test_a_notebooks_workers_hand_all_of_it_back(monkeypatch):
    monkeypatch.setattr(transfer, "set_options", lambda options: None)  # those of this process
    learn = make()
    learn.fit(1)
    opt = learn.opt
    file, path, shared = transfer.send(transfer.Call(learn, Learner.fit, (2,), {}, {}), None)
    with file:
        received = transfer.receive(path, print)
        received.call.method(received.call.learn, *received.call.args)
        file, path, _ = transfer.send_back(received, None)
        with file:
            transfer.bring_back(path, learn, shared)
    assert learn.opt is opt
    whole = make()
    for epochs in (1, 2):
        whole.fit(epochs)
    assert same(facts(whole), facts(learn))


@pytest.mark.slow
def test_processes_that_are_forked_have_all_of_it(capsys):
    """They compute in float64, which none of it could that had stayed as it was."""
    learn = make()
    with learn.no_logging():
        learn.fit(1)
        before = facts(learn)
        capsys.readouterr()
        assert learn.check_distributed(steps=2)
    out = capsys.readouterr().out
    assert same(before, facts(learn))
    assert "float64" not in out
    assert "rounding of float32" not in out


CHANGES = {
    "callback Pull mean": lambda learn: learn.pull.mean.add_(1),
    "optimizer slow[1]": lambda learn: learn.opt.slow[1].add_(1),
    "": lambda learn: None,
}


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CHANGES)
def test_a_difference_between_ranks_is_found(name):
    def hook(cb):
        if distributed.rank() and cb.train_iter == 1:
            CHANGES[name](cb.learn)

    learn, found = make([Callback(after_step=hook, order=20), DriftCheck(every=1)]), ""
    with learn.distrib_ctx(), learn.no_logging():
        try:
            learn.fit(1)
        except RuntimeError as e:
            found = str(e)
    assert (f": {name} is float32 tensor of shape (6,)" in found) if name else not found, found
