"""Training on shards of a model: N processes equal one, what cannot be is refused, and cancels and errors end all."""

import copy
import os
import pickle
import shutil
import signal
from functools import partial

import one_rank
import pytest
import shard_jobs
import torch
from helpers import mostly_soak
from one_rank import Do, throw
from shard_jobs import JOBS, Block, Net, learner
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import learnerkit
from learnerkit import Callback, DataLoaders, GradientAccumulation, GradientClip, Learner, distributed
from learnerkit.distributed import PeerError
from learnerkit.events import INNER_EVENTS, Event

on_ranks = pytest.mark.ranks(2, slow=[3])
slow_on_ranks = pytest.mark.ranks(slow=[2], soak=[3])
soak_on_ranks = pytest.mark.ranks(soak=[2, 3])
pytestmark = pytest.mark.filterwarnings(
    "ignore:find_unused_parameters=True was chosen",
    "ignore:the last fit failed when the ranks had taken",
    "ignore:The .grad attribute of a Tensor that is not a leaf",  # torch's, of a compiled model
    "ignore:mixed precision with float16 is some 30 times slower",
)

RANK, N = distributed.rank(), distributed.world_size()
LAST = N - 1
fit = partial(one_rank.fit, shard=True, split_batches=True, timeout=60, sync_bn=False)
SOON = 15  # seconds; a second on an idle machine


# Equality with one process

QUICK = [
    "plain", "tied weights and shared modules", "parts that one rank alone uses", "a first batch that counts nothing",
]  # fmt: skip
SLOW = [
    "blocks frozen in before_epoch, by parameters that are held", "EMA of a module",
    "a loss with parameters, clipped each and accumulated, with a scaler", "a part left out later",
    "validate and get_preds in a fit",
    "a method that calls the units differently often on each rank", "check",
]  # fmt: skip


@pytest.mark.ranks(2, soak=[3])
def test_training_on_shards_equals_one_process():
    for name in QUICK:
        shard_jobs.check(name)


@slow_on_ranks
@pytest.mark.parametrize("name", mostly_soak(SLOW, "EMA of a module", "a part left out later", "check"))
def test_a_job_on_shards_equals_one_process(name):
    shard_jobs.check(name)


@soak_on_ranks
@pytest.mark.parametrize("name", [name for name in JOBS if name not in (*QUICK, *SLOW)])
def test_any_job_on_shards_equals_one_process(name):
    shard_jobs.check(name)


def test_every_quick_job_is_there():
    assert {*QUICK, *SLOW} < set(JOBS)


# Cancels and errors on one rank: all leave together, and the next fit goes on

EVENTS = [str(e) for e in Event if e.startswith(("before_", "after_")) and "cancel" not in e and e != "after_create"]
TRAINING_ONLY = ("before_backward", "after_backward", "before_step", "after_step")
WHEN = [(event, True) for event in EVENTS] + [
    (event, False) for event in EVENTS if event in INNER_EVENTS and event not in TRAINING_ONLY
]


def do(event, action, training):
    """Something at an event; the last of three ranks has one batch of validation."""
    return Do(event, action, training=training, at=1 if training or N < 3 else 0)


def weights(learn):
    return {k: v.clone() for k, v in learn.model.state_dict().items()}


def check_after(learn, took, where, alike=True):
    """The ranks agree on everything, and can go on."""
    assert took < SOON, (where, took)
    assert learn.n_ranks == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if alike:
        assert learn.shards is None, where
        facts = (str(weights(learn)), learn.recorder.values, learn.recorder.losses, learn.train_iter)
        assert distributed.same_everywhere(facts), (where, facts)
    learn.remove_cbs(Do)
    error, _ = fit(learn, 1)
    assert error is None, (where, repr(error))
    assert learn.shards is None
    assert distributed.same_everywhere(str(weights(learn))), where
    assert all(p.isfinite().all() for p in weights(learn).values())


def cancel(kind, when, **options):
    kind = KeyboardInterrupt if kind == "KeyboardInterrupt" else getattr(learnerkit, kind)
    action = (lambda: os.kill(os.getpid(), signal.SIGINT)) if kind is KeyboardInterrupt else throw(kind)
    for event, training in when:
        where = (kind.__name__, event, training)
        learn = learner(cbs=do(event, action, training), opt_func=optim.AdamW)
        error, took = fit(learn, **options)
        errors = distributed.all_gather(type(error).__name__)
        assert len(set(errors)) == 1, (where, errors, error)
        assert errors[0] in ("NoneType", kind.__name__), (where, errors, error)
        check_after(learn, took, where, alike=error is None)


@soak_on_ranks
def test_a_cancel_on_one_rank_ends_all():
    cancel("CancelFitException", [("before_batch", True), ("after_pred", False)])


CANCELS = ["CancelFitException", "CancelEpochException", "CancelTrainException", "CancelValidException",
           "KeyboardInterrupt"]  # fmt: skip


@soak_on_ranks
def test_ctrl_c_at_some_events_ends_all():
    cancel("KeyboardInterrupt", WHEN[::4])


@soak_on_ranks
@pytest.mark.parametrize("kind", CANCELS)
@pytest.mark.parametrize("reshard", [True, False])
def test_a_cancel_at_any_event_ends_all(kind, reshard):
    cancel(kind, WHEN, reshard_after_forward=reshard)


def fail(when, error=ValueError, make=learner, **kwargs):
    for event, training in when:
        where = (event, training)
        learn = make(cbs=do(event, throw(error("boom")), training), **kwargs)
        found, took = fit(learn)
        assert type(found) is (error if RANK == LAST else PeerError), (where, repr(found))
        assert RANK == LAST or f"{error.__name__}: boom" in str(found), (where, found)
        check_after(learn, took, where, alike=False)


@pytest.mark.ranks(2, soak=[3])
def test_an_error_on_one_rank_ends_all():
    fail([("after_loss", True)])


@pytest.mark.soak
@slow_on_ranks
def test_an_error_at_some_events_ends_all():
    fail(WHEN[::6])


@soak_on_ranks
def test_an_error_at_any_event_ends_all():
    fail(WHEN)


class Broken(nn.Module):
    """Fails on the last rank in the forward or backward pass."""

    def __init__(self, inner, what, training=True):
        super().__init__()
        self.inner, self.what, self.mode, self.calls = inner, what, training, 0

    def forward(self, x):
        y = self.inner(x)
        if self.training is self.mode and RANK == LAST:
            self.calls += 1
            if self.calls == 2 and self.what == "forward":
                raise ZeroDivisionError("boom")
            if self.calls == 2 and self.what == "backward":
                y.register_hook(lambda grad: throw(ZeroDivisionError("boom"))())
        return y


class BrokenStep(optim.AdamW):
    def step(self, closure=None):
        if RANK == LAST and not getattr(self, "done", False) and self.state:
            self.done = True
            raise ZeroDivisionError("boom")
        return super().step(closure)


@slow_on_ranks
@pytest.mark.parametrize(
    "what", mostly_soak(["forward", "backward", "validation", "optimizer", "hook"], "backward", "optimizer")
)
def test_an_error_inside_the_model_or_the_optimizer_ends_all(what):
    model = Net(n=3)
    if what in ("forward", "backward"):
        model.blocks[1] = Broken(model.blocks[1], what)
    elif what == "validation":
        model.blocks[1] = Broken(model.blocks[1], "forward", training=False)
    elif what == "hook":
        calls = []

        def hook(*_):
            calls.append(1)
            if RANK == LAST and len(calls) == 2:
                raise ZeroDivisionError("boom")

        model.blocks[1].register_forward_hook(hook)
    learn = learner(model, opt_func=BrokenStep if what == "optimizer" else optim.AdamW)
    found, took = fit(learn)
    assert type(found) is (ZeroDivisionError if RANK == LAST else PeerError), repr(found)
    check_after(learn, took, what, alike=False)


@soak_on_ranks
@pytest.mark.parametrize("accumulated", [False, True])
def test_a_batch_that_one_rank_leaves_anywhere_weighs_nothing_of_it(accumulated):
    leave_one(("before_batch", "after_pred", "after_loss", "before_backward", "after_backward"), accumulated)


@soak_on_ranks
def test_a_batch_that_one_rank_leaves_weighs_nothing_of_it():
    leave_one(("before_batch", "after_loss"), accumulated=True)


def leave_one(events, accumulated):
    """The gradients are those of the other ranks' samples, also if a rank leaves the first batch."""
    for event in events:
        for at in (0, 1):

            def make(event=event, at=at):
                # Other ranks wait for this one in the norm of the gradients.
                cbs = [Do(event, throw(learnerkit.CancelBatchException()), at=at), GradientClip(0.05)]
                return learner(cbs=[*cbs, *([GradientAccumulation(n_batches=2)] if accumulated else [])], n=24)

            found = []
            for shard in (False, True):
                learn = make()
                learn.remove_cbs(shard_jobs.Checks)
                error, took = fit(learn, shard=shard)
                assert error is None, (event, at, error)
                found.append((weights(learn), learn.recorder.values))
                check_after(learn, took, (event, at))
            torch.testing.assert_close(*found, rtol=1e-9, atol=1e-10)


@slow_on_ranks
def test_a_cancel_in_the_middle_of_the_forward_pass_is_refused():
    model = Net()
    calls = []

    def leave(*_):
        calls.append(1)
        if len(calls) == 2 and RANK == LAST:
            raise learnerkit.CancelBatchException

    model.blocks[0].register_forward_hook(leave)
    learn = learner(model)
    error, took = fit(learn)
    assert took < SOON
    assert "a cancel in the middle of the model's forward pass" in str(error)
    check_after(learn, took, "", alike=False)


# What cannot be trained on shards is refused, with what to do


def refused(make, *words, **options):
    error, took = fit(make(), **options)
    assert error is not None, words
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    assert all(word in text for word in words), (words, text)
    assert took < SOON


class Sparse(Net):
    def __init__(self):
        super().__init__()
        self.bag = nn.Embedding(5, 29, sparse=True, dtype=torch.float64)

    def forward(self, x):
        return super().forward(x) + self.bag(torch.zeros(len(x), dtype=torch.long))[:, :3]


class Bounded(Net):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 29, max_norm=0.5, dtype=torch.float64)


def penalty(cb):
    x = cb.x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(cb.model(x).sum(), x, create_graph=True)
    return slope.square().sum()


class Spans(Net):
    hf_device_map = {"first": 2 * RANK, "head": 2 * RANK + 1}


def passes(event, loss):
    return learner(cbs=Callback(**{event: lambda cb: loss(cb).backward() if cb.training else None}))


class ByInputs(Learner):
    def _backward(self):
        self.loss_grad.backward(inputs=list(self.model.blocks.parameters()))


def by_inputs():
    learn = learner(cls=ByInputs)
    learn.remove_cbs(shard_jobs.Checks)
    return learn


REFUSED = {
    "inputs of a backward pass": (by_inputs, "leave inputs= out"),
    "p18 LBFGS": (lambda: learner(opt_func=partial(optim.LBFGS, max_iter=2)), "LBFGS cannot step on shards"),
    "Adafactor": (lambda: learner(opt_func=optim.Adafactor), "Adafactor cannot step on shards"),
    "Rprop": (lambda: learner(opt_func=optim.Rprop), "Rprop cannot step on shards"),
    "SparseAdam": (lambda: learner(opt_func=optim.SparseAdam), "SparseAdam cannot step on shards"),
    "p17 sparse gradients": (lambda: learner(Sparse(), opt_func=optim.SGD), "bag makes sparse gradients"),
    "an embedding of bounded norm": (lambda: learner(Bounded()), "words has a max_norm"),
    "the gradient of a gradient": (lambda: passes("after_backward", penalty), "as that of a gradient's gradient does"),
    "ChannelsLast": (lambda: learner(cbs=learnerkit.ChannelsLast()), "ChannelsLast needs the whole model"),
    "EMA of a module beside the model": (
        lambda: learner(cbs=learnerkit.EMA(0.5, module=Net())), "put that module into the learner's model"),
    "a backward pass before the loss's": (
        lambda: passes("before_backward", lambda cb: cb.model(cb.x).square().mean()), "before the backward pass of"),
    "a part that is replaced in a fit": (
        lambda: learner(cbs=Callback(before_epoch=lambda cb: cb.epoch and setattr(cb.model, "head", nn.Linear(29, 3)))),
        "between two fits"),
    "p08 another type": (
        lambda: learner(cbs=Callback(before_epoch=lambda cb: cb.epoch == 1 and cb.model.float())),
        "convert it before the fit"),
    "p09 a copy of the model": (
        lambda: learner(cbs=Callback(before_epoch=lambda cb: copy.deepcopy(cb.model))), "rows of this rank"),
    "p09 a pickled model": (
        lambda: learner(cbs=Callback(before_epoch=lambda cb: pickle.dumps(cb.model))), "rows of this rank"),
    "p16 a model on several devices": (lambda: learner(Spans()), "spans several devices"),
    "p16 DataParallel": (lambda: learner(nn.DataParallel(Net())), "spans several devices"),
    "a part of a unit that is called by itself": (
        lambda: learner(cbs=Callback(before_batch=lambda cb: cb.model.blocks[0].norm(cb.model.first(cb.x)))),
        "Name the modules that are"),
}  # fmt: skip
QUICK_REFUSED = ["p18 LBFGS", "p17 sparse gradients"]


@on_ranks
def test_what_cannot_be_sharded_is_refused():
    for name in QUICK_REFUSED:
        refused(*REFUSED[name])


OTHER_REFUSED = [name for name in REFUSED if name not in QUICK_REFUSED]


@slow_on_ranks
@pytest.mark.parametrize("name", mostly_soak(OTHER_REFUSED, *OTHER_REFUSED[::2]))
def test_other_things_that_cannot_be_sharded_are_refused(name):
    refused(*REFUSED[name])


class Experts(Net):
    """Each rank calls what its samples want."""

    def forward(self, x):
        h = self.first(x)
        for i, block in enumerate(self.blocks):
            if i == 0 or distributed.rank() == 0:
                h = block(h)
        return self.head(h)


@slow_on_ranks
def test_ranks_that_call_different_units_are_told_so():
    refused(lambda: learner(Experts()), "in a batch rank 0 calls the units")


class LeavesOut(Net):
    calls = 0

    def forward(self, x):
        self.calls += self.training
        h = self.first(x)
        h = self.blocks[0](h) + (
            0 if self.training and self.calls == 3 and RANK == 0 else self.blocks[1](h).detach() * 0
        )
        used = self.blocks[1](h)
        return self.head(h if self.training and self.calls == 2 and RANK == LAST else used)


@slow_on_ranks
def test_a_unit_that_a_later_batch_leaves_out_is_told_of():
    refused(lambda: learner(LeavesOut(), n=24), "took no part in the loss of batch 1")


class Reentrant(Net):
    def forward(self, x):
        h = self.first(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=True) if self.training else block(h)
        return self.head(h)


class Recomputed(Net):
    def forward(self, x):
        h = self.first(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.training else block(h)
        return self.head(h)


shard_jobs.job("a checkpoint of units")(lambda: learner(Recomputed()))


class Normed(Net):
    """Cannot run on nothing, and has a BatchNorm that sees the samples of its rank."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(29, dtype=torch.float64)

    def forward(self, x):
        h = self.blocks[0](self.norm(self.first(x)))
        return self.head(self.blocks[1](h * (x.flatten()[0].item() < 1e9)))


@slow_on_ranks
def test_a_rank_without_data_of_a_model_with_batchnorm_runs_on_samples():
    learn = learner(Normed(), n=18)
    error, took = fit(learn)
    assert error is None, error
    check_after(learn, took, "")


# The pitfalls, by their numbers; those that are not here are jobs among the others


@slow_on_ranks
def test_p14_activations_are_computed_again_without_reentrance():
    shard_jobs.check("a checkpoint of units")
    refused(lambda: learner(Reentrant()), "use_reentrant=False")


RARE = (
    "p04_buffers_that_are_in_no_state", "p06_unfrozen_later", "p08_moved_in_a_fit", "p10_compiled",
    "p13_hooks_of_parameters",
)  # fmt: skip
PITFALLS = {
    "p03_the_norm_is_of_all_ranks": ["clip by norm", "clip each", "clip by another norm", "clip by the greatest"],
    "p04_buffers_that_are_in_no_state": ["buffers"],
    "p05_a_rank_without_data": ["a model that cannot run on nothing"],
    "p06_unfrozen_later": ["fine_tune", "frozen and unfrozen between fits", "blocks unfrozen in before_batch"],
    "p08_moved_in_a_fit": ["moved to where it is"],
    "p10_compiled": ["Compile"],
    "p13_hooks_of_parameters": ["a hook of a parameter", "a hook of a parameter after accumulation"],
    "p23_offload_of_a_model_on_the_host": ["offload"],
}


@slow_on_ranks
@pytest.mark.parametrize("pitfall", [pytest.param(p, marks=pytest.mark.soak) if p in RARE else p for p in PITFALLS])
def test_each_pitfall_of_sharding_is_avoided(pitfall):
    for name in PITFALLS[pitfall]:
        shard_jobs.check(name)


@slow_on_ranks
def test_p07_a_save_of_rank_0_alone_is_an_error_that_says_so():
    def save(cb):
        if distributed.is_main():
            cb.learn.save("model")

    error, took = fit(learner(cbs=Callback(after_step=save)))
    assert "rank 0 called learn.save, and rank" in str(error)
    assert "in another call; every rank must make the same calls" in str(error)
    assert took < SOON


@pytest.mark.ranks(soak=[2])
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler for the CPU needs one for C++")
def test_p10_blocks_that_torch_compiles():
    def compiled():
        model = Net()
        for block in model.blocks:
            block.compile()
        return learner(model)

    shard_jobs.job("compiled blocks")(compiled)
    shard_jobs.check("compiled blocks")
    os.environ.pop("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", None)  # which the compiler leaves behind


@slow_on_ranks
def test_p12_validation_by_rank_0_alone_ends_in_an_error():
    error, _ = fit(
        learner(cbs=Callback(after_epoch=lambda cb: distributed.is_main() and cb.learn.validate())), timeout=8
    )
    assert error is not None


@soak_on_ranks
def test_p22_dropout_and_half_precision_are_those_of_ddp():
    class Dropped(Block):
        def forward(self, x):
            return F.dropout(super().forward(x), 0.5, self.training)

    def trained(shard, precision):
        learnerkit.set_seed(7)
        model = Net(Dropped).float()
        data = [
            torch.utils.data.TensorDataset(d.tensors[0].float(), d.tensors[1]) for d in (shard_jobs.make_data(24),) * 2
        ]
        cbs = [learnerkit.MixedPrecision(precision)] if precision else []
        learn = learner(model, dls=DataLoaders.from_datasets(*data, bs=8, device="cpu"), cbs=cbs, opt_func=optim.SGD)
        learn.remove_cbs(shard_jobs.Checks)
        error, _ = fit(learn, shard=shard)
        assert error is None, error
        return weights(learn)

    for precision in (None, "bf16", "fp16"):
        one, other = (trained(shard, precision) for shard in (False, True))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@slow_on_ranks
def test_iterable_data_of_unequal_lengths_trains_the_same_with_shards():
    def trained(shard):
        learn = learner(dls=DataLoaders(DataLoader(shard_jobs.Stream(), 3), device="cpu"))
        learn.remove_cbs(shard_jobs.Checks)
        error, _ = fit(learn, shard=shard, sharded=True, uneven="join", split_batches=False)
        assert error is None, error
        return weights(learn)

    torch.testing.assert_close(trained(False), trained(True), rtol=1e-9, atol=1e-10)
