"""Closures: optimizers that evaluate the loss several times in a step, and backward passes in a `_step`."""

import copy
import inspect
from functools import partial

import pytest
import torch
from helpers import make_data, make_learner, make_model, raises, raising, same_weights, spy, weights
from model_jobs import ByClosure, ClosureSAM
from torch import nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, Adam
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import (
    Callback,
    CancelStepException,
    CheckpointCallback,
    DataLoaders,
    GradientAccumulation,
    GradientClip,
    Learner,
    MixedPrecision,
    MixUp,
    distributed,
    mae,
)


def doubles(n=18, seed=0):
    data = make_data(n, seed=seed)
    return TensorDataset(*(t.double() for t in data.tensors))


def learner(opt_func, cls=Learner, model=None, **kwargs):
    """A learner in double precision, whose last batch has two samples."""
    dls = DataLoaders(DataLoader(doubles(), 4), DataLoader(doubles(6, 1), 4), device="cpu")
    kwargs = {"lr": 0.1} | kwargs
    return cls(dls, (model or make_model()).double(), nn.MSELoss(), opt_func=opt_func, **kwargs)


def by_hand(opt_func, epochs=2):
    """The model and the first loss of each step of a plain loop."""
    model, first = make_model().double(), []
    opt = opt_func(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for x, y in DataLoader(doubles(), 4):
            losses = []

            @torch.enable_grad()
            def closure(x=x, y=y, losses=losses):
                opt.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                losses.append(loss.item())
                return loss

            opt.step(closure)
            first.append(losses[0])
    return model, first


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


lbfgs = partial(LBFGS, max_iter=4)
searching = partial(LBFGS, max_iter=4, line_search_fn="strong_wolfe")


@pytest.mark.parametrize("opt_func", [lbfgs, searching, ClosureSAM])
@pytest.mark.parametrize("cls", [Learner, ByClosure])
def test_a_step_with_a_closure_is_that_of_a_plain_loop(opt_func, cls):
    learn, (model, first) = learner(opt_func, cls, metrics=mae), by_hand(opt_func)
    learn.fit(2)
    close(weights(learn.model), weights(model))
    close(learn.recorder.step_losses, first)  # and so each batch has counted once
    close(learn.validate()[0], F.mse_loss(model(doubles(6, 1).tensors[0]), doubles(6, 1).tensors[1]).item())


def test_the_history_of_lbfgs_is_loaded_into_one_that_has_stepped(tmp_path):
    learn = learner(searching, path=tmp_path)
    learn.fit(1)
    learn.save("one")
    saved = copy.deepcopy(learn.opt.state_dict()["state"])
    learn.fit(2)
    learn.load("one")
    (found,), (expected,) = learn.opt.state_dict()["state"].values(), saved.values()
    assert len(found["old_dirs"]) == len(expected["old_dirs"])
    close(found["old_dirs"], expected["old_dirs"])


def test_the_first_evaluation_is_the_loops_own():
    passes = []
    learn = learner(searching)
    learn.model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    learn.fit(2)
    evaluations = learn.opt.state_dict()["state"][0]["func_evals"]
    assert sum(passes) == evaluations
    assert evaluations > 10


def test_what_the_batch_has_stays_that_of_the_loops_pass():
    seen = []
    names = ("xb", "yb", "pred", "output", "loss", "loss_grad")
    look = lambda cb: seen.append([getattr(cb, name) for name in names])  # noqa: E731
    learn = learner(lbfgs, cbs=[Callback(before_step=look), Callback(after_step=look)])
    learn.fit(1)
    assert len(seen) == 10
    for before, after in zip(seen[::2], seen[1::2], strict=True):
        assert all(a is b for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("cbs", [[], [MixUp(1.0)], [MixedPrecision("bf16")], [MixUp(), MixedPrecision("bf16")]])
def test_callbacks_change_the_loss_in_each_evaluation(cbs):
    found = []

    class Compares(Learner):
        def _step(self):
            grads = [p.grad.clone() for p in self.model.parameters()]
            loss = self.closure()()
            found.append((loss, self.loss_grad.detach()))
            found.extend(zip([p.grad for p in self.model.parameters()], grads, strict=True))

    def penalise(cb):
        cb.learn.loss_grad = cb.loss_grad + cb.model[0].weight.square().sum()

    penalty = Callback(after_loss=penalise)
    learn = make_learner(cls=Compares, cbs=[*cbs, penalty]) if cbs else learner(SGD, Compares, cbs=[penalty])
    learn.fit(1)
    assert len(found) > 5
    for again, first in found:
        assert torch.equal(again, first)


@pytest.mark.parametrize(
    "cb", [GradientAccumulation(n_batches=2), GradientClip(), MixedPrecision(), MixedPrecision("bf16")], ids=repr
)
def test_a_callback_that_is_switched_off_has_no_part_in_a_closure(cb):
    cb.run = False
    plain, learn = make_learner(opt_func=lbfgs), make_learner(opt_func=lbfgs, cbs=cb)
    plain.fit(2)
    learn.fit(2)
    assert learn.recorder.values == plain.recorder.values


def test_events_take_place_in_each_evaluation_and_those_of_the_batch_once():
    log = []
    learn = learner(ClosureSAM, cbs=spy(log))
    learn.dls.loaders[1] = None
    learn.fit(1)
    for event, n in {"before_batch": 5, "after_pred": 10, "after_loss": 10, "before_backward": 10,
                     "after_backward": 10, "before_step": 5, "after_step": 5, "after_batch": 5}.items():  # fmt: skip
        assert log.count(event) == n, event


def test_an_error_in_a_closure_step_leaves_nothing():
    learn = learner(lbfgs)
    learn.fit(1)
    learn.add_cb(raising("after_step", KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        learn.fit(1)
    assert "_step" not in vars(learn)
    learn.remove_cb(learn.cbs[-1])
    learn.opt_func = SGD
    learn.fit(1, reset_opt=True)
    assert type(learn.opt) is SGD
    assert learn.check()
    assert learner(lbfgs).check()
    vars(learn)["_step"] = step = partial(learn._step)
    learn.fit(1)
    assert learn._step is step


class Both(ByClosure):
    def create_opt(self):
        first, last = self.model[0].parameters(), self.model[-1].parameters()
        return {"first": LBFGS(first), "last": SGD(last, 0.1)}


class BothPlain(Learner):
    create_opt = Both.create_opt


class Early(Learner):
    def _backward(self):
        self.closure()


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: learner(lbfgs).closure(), RuntimeError, "closure() was called outside of a step"),
        (lambda: learner(SGD, Early).fit(1), RuntimeError, "closure() was called outside of a step"),
        (lambda: learner(SGD, cbs=Callback(after_batch=lambda cb: cb.learn.closure())).fit(1), RuntimeError, "outside"),
        (lambda: learner(SGD, BothPlain).fit(1), TypeError, "one of several optimizers; override `_step`"),
        *(
            (partial(lambda opt, cls, cb: learner(opt, cls, cbs=cb()).fit(1), opt, cls, cb), ValueError, said)
            for opt, cls in ((lbfgs, Learner), (SGD, ByClosure))
            for cb, said in (
                (lambda: GradientAccumulation(n_batches=2), "a closure has the last one alone"),
                (lambda: GradientClip(), "the gradients of the first evaluation alone are clipped"),
                (lambda: MixedPrecision("fp16"), "fp16 scales the loss and its gradients; take to_bf16()"),
            )
        ),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:mixed precision with float16")
def test_closures_outside_of_their_step_are_refused(make, error, said):
    with raises(error, said):
        make()


# Several optimizers in turn


class WGAN(nn.Module):
    """A Wasserstein GAN with gradient penalty (Gulrajani et al., arXiv:1704.00028)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.generator = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 5)).double()
        self.critic = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)).double()

    def forward(self, real, noise, share):
        fake = self.generator(noise).detach()
        mixed = torch.lerp(fake, real, share).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        return {"critic": (self.critic(fake) - self.critic(real)).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()}


class WGANLearner(Learner):
    def create_opt(self):
        return {name: Adam(part.parameters(), betas=(0.0, 0.9)) for name, part in self.model.named_children()}

    def _step(self):
        self.opt["critic"].step()
        if self.iter % 3 == 2:
            self._zero_grad()
            (-self.model.critic(self.model.generator(self.xb[1])).mean()).backward()
            self.opt["generator"].step()


def plain_wgan(model, loader, lr):
    opts = {name: Adam(part.parameters(), lr, (0.0, 0.9)) for name, part in model.named_children()}
    for _ in range(2):
        for i, (real, noise, share) in enumerate(loader):
            fake = model.generator(noise).detach()
            mixed = torch.lerp(fake, real, share).requires_grad_()
            (slope,) = torch.autograd.grad(model.critic(mixed).sum(), mixed, create_graph=True)
            penalty = 10 * (slope.norm(dim=1) - 1).square().mean()
            loss = (model.critic(fake) - model.critic(real)).mean() + penalty
            opts["critic"].zero_grad()
            loss.backward()
            opts["critic"].step()
            if i % 3 == 2:
                opts["generator"].zero_grad()
                (-model.critic(model.generator(noise)).mean()).backward()
                opts["generator"].step()
    return model


def wgan_loaders():
    """Batches of 8, of which the last has a single row: one of two ranks has none."""
    generator = torch.Generator().manual_seed(0)
    real, noise, share = (torch.randn(49, n, generator=generator, dtype=torch.float64) for n in (5, 2, 1))
    data = TensorDataset(real, noise, share.sigmoid())
    return DataLoaders.from_datasets(data, bs=8, shuffle=False, device="cpu", n_inp=3)


def wgan():
    learn = WGANLearner(wgan_loaders(), WGAN(), lr=0.01, loss_weight="samples")
    with learn.no_logging(), learn.distrib_ctx(split_batches=True):
        learn.fit(2)
    return learn


def test_critic_steps_in_a_ratio_are_those_of_a_plain_loop():
    model = plain_wgan(WGAN(), wgan_loaders().train, 0.01)
    close(weights(wgan().model), weights(model))
    lines = [len(inspect.getsource(part).split("\n")) for part in (WGAN.forward, WGANLearner)]
    assert sum(lines) <= 18  # of the training


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_critic_steps_in_a_ratio_on_ranks_are_those_of_a_plain_loop():
    close(weights(wgan().model), weights(plain_wgan(WGAN(), wgan_loaders().train, 0.01)))


class LeavesLater(Learner):
    """Leaves the step on one rank, after it has evaluated the loss again; the others take it."""

    left = False

    def _step(self):
        if not self.left:
            self.closure()()
            if distributed.rank() == 1:
                self.left = True
                raise CancelStepException
        self.opt.step()
        self.left = False


@pytest.mark.ranks(2)
def test_events_of_an_evaluation_do_not_begin_the_batch_anew():
    log = []
    learn = learner(SGD, LeavesLater, cbs=spy(log, events=("before_step", "after_batch")))
    learn.dls.loaders[1] = None
    with learn.no_logging(), learn.distrib_ctx(split_batches=True):
        learn.fit(1)
    assert log == ["before_step", "after_batch"] * 5


@pytest.mark.ranks(soak=[2])
def test_ranks_with_a_closure_stay_equal_after_a_resume(tmp_path):
    found = []
    for n in (1, 2):
        learn = learner(searching, cbs=CheckpointCallback(tmp_path / "run", every=1, resume=True))
        with learn.no_logging(), learn.distrib_ctx(split_batches=True):
            learn.fit(n)
        found.append(weights(learn.model))
    close(found[1], weights(by_hand(searching)[0]))
    assert all(map(same_weights, [found[1]] * distributed.world_size(), distributed.all_gather(found[1])))


class TwoLosses(nn.Module):
    """A model that returns a dict of losses in training."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 1)

    def forward(self, x, targets):
        error = self.body(x) - targets
        return {"square": error.square().mean(), "absolute": error.abs().mean()}


def test_a_closure_is_refused_where_each_of_several_losses_has_a_count():
    dls = DataLoaders(DataLoader(doubles(), 4), device="cpu")
    counts = {"square": "samples", "absolute": "samples"}
    learn = Learner(dls, TwoLosses().double(), opt_func=LBFGS, loss_weight=counts)
    with raises(ValueError, "a loss_weight= for each of several losses", "give one loss_weight"):
        learn.fit(1, 0.1)
