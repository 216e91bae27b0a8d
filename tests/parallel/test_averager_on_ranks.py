"""The two ways to average: which is chosen by what, what is said of it, and that both equal one process."""

import time
import warnings
from functools import partial
from unittest.mock import patch

import pytest
import torch
from helpers import KeepsGradients, mostly_slow, raises, step_gradient
from helpers import weights_on_ranks as weights
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from learnerkit import (
    Callback,
    CancelBatchException,
    CancelStepException,
    DataLoaders,
    GradientAccumulation,
    Learner,
    MixedPrecision,
    SplitBatch,
    distributed,
)
from learnerkit.parallel.watch import Watch

pytestmark = pytest.mark.ranks(2, soak=[3])

TOLD = ".* each train a whole copy|find_unused_parameters=True was chosen|comm_hook=.* rounds the gradients"
SAID = "gradients are averaged after the backward pass, as "


class Net(nn.Module):
    """Counts its forward passes; it cannot run on nothing."""

    def __init__(self, norm=False):
        super().__init__()
        layers = [nn.Linear(4, 6), nn.BatchNorm1d(6) if norm else nn.Tanh(), nn.Linear(6, 2)]
        self.body, self.spare, self.calls = nn.Sequential(*layers), nn.Linear(4, 2), []

    @staticmethod
    def cut(x):
        return x.view(len(x), 2, -1).flatten(1)

    def forward(self, x):
        self.calls.append((self.training, len(x)))
        return self.body(self.cut(x)) + self.spare(x)


def whole(x):
    return x


def setattr_of(model, name, value):
    setattr(model, name, value)


def trained(
    cls=Learner, cbs=None, alone=False, n=17, epochs=2, change=None, lr=0.1, norm=False, model=None, reduction="mean",
    loss=None, **options,
):  # fmt: skip
    """A learner after a fit, what it has said, and the ways that its batches were averaged in."""
    torch.manual_seed(3)
    x = torch.randn(n, 4, dtype=torch.float64)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    dls = DataLoaders.from_datasets(data, bs=8, shuffle=False, device="cpu")
    model, said, ways = model or Net(norm).double(), [], []
    if change is not None:
        change(model)
    learn = cls(dls, model, loss or nn.CrossEntropyLoss(reduction=reduction), opt_func=torch.optim.SGD, lr=lr, cbs=cbs)
    learn.say = said.append
    learn.add_cb(Callback(before_backward=lambda cb: ways.append(type(step_gradient(cb.learn)).__name__), order=90))
    with learn.no_logging(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=TOLD)
        if alone:
            learn.fit(epochs)
        else:
            with learn.distrib_ctx(split_batches=True, **options):
                learn.fit(epochs)
    return learn, [text for text in said if SAID in text], ways


def check_equals_one(way, said="", **job):
    """A job is averaged in a way from its second batch on, says so once, and equals one process."""
    learn, told, ways = trained(**job)
    assert ways[0] == "Deferred"  # which finds out
    assert set(ways[1:]) == {way}, ways
    assert told == ([SAID + said] if said and distributed.is_main() else []), told
    alone, _, _ = trained(**job | {"alone": True})
    torch.testing.assert_close(weights(learn), weights(alone), rtol=1e-10, atol=1e-12)


def test_what_ddp_can_do_is_left_to_it_and_nothing_is_said():
    check_equals_one("Overlapped")
    check_equals_one("Overlapped", cbs=GradientAccumulation(n_batches=2))


class Backward(Learner):
    def _backward(self):
        (self.loss_grad * 0.5).backward(retain_graph=True)
        (self.loss_grad * 0.5).backward()


class Clips(Learner):
    """Clips inside its `_backward`, by the norm that one process sees, and steps there."""

    def _backward(self):
        self.loss_grad.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        self.opt.step()

    def _step(self):
        pass


class Assigns(Learner):
    """Puts gradients that it has computed into place, in a `_step` that then steps twice."""

    def _step(self):
        params = list(self.model.parameters())
        for scale in (1.0, 0.5):
            self._forward()
            self._loss()
            for p, grad in zip(params, torch.autograd.grad(self.loss_grad * scale, params), strict=True):
                p.grad = grad
            self.opt.step()


@pytest.mark.parametrize("reduction", ["mean", pytest.param("sum", marks=pytest.mark.slow)])
@pytest.mark.parametrize("cls", mostly_slow([Backward, Clips, Assigns], Backward))
def test_a_learner_with_passes_of_its_own_says_so_and_equals_one_process(cls, reduction):
    seam, lr = "_step" if cls is Assigns else "_backward", 0.1 if reduction == "mean" else 0.01
    check_equals_one("Deferred", f"{cls.__name__} has a {seam} of its own", cls=cls, reduction=reduction, lr=lr)


@pytest.mark.slow
def test_accumulation_is_refused_with_passes_of_the_learners_own_unless_it_is_switched_off():
    accumulate = GradientAccumulation(n_batches=2)
    with raises(ValueError, "cannot weigh the batches of a learner with a _backward of its own"):
        trained(Backward, accumulate)
    accumulate.run = False
    check_equals_one("Deferred", "Backward has a _backward of its own", cls=Backward, cbs=accumulate)


@pytest.mark.slow
def test_gradients_that_are_set_to_zero_are_averaged_in_each_step():
    check_equals_one("Overlapped", cls=KeepsGradients)
    check_equals_one("Deferred", cls=KeepsGradients, find_unused_parameters=True)


class Plain(Learner):
    """Has a `_step` without the optimizer's."""

    def _step(self):
        with torch.no_grad():
            for p in self.model.parameters():
                p -= 0.1 * p.grad


def test_a_step_without_the_optimizers_is_taken_also_where_a_rank_leaves_the_batch():
    def leave(cb):
        if cb.training and cb.train_iter == 1 and distributed.is_main():
            raise CancelBatchException

    by_itself, _, _ = trained(Plain, Callback(before_batch=leave))
    stepped, _, _ = trained(cbs=Callback(before_batch=leave))
    torch.testing.assert_close(weights(by_itself), weights(stepped), rtol=1e-12, atol=1e-12)


class Apart(nn.Module):
    """Rank 0 uses a part that no other rank uses."""

    def __init__(self):
        super().__init__()
        self.first, self.other = nn.Linear(4, 2).double(), nn.Linear(4, 2).double()

    def forward(self, x):
        return (self.first if distributed.is_main() else self.other)(x)


def test_what_a_rank_alone_has_of_a_batch_that_it_leaves_is_left_out():
    class Leave(Callback):
        kept = None

        def before_batch(self):
            if self.training and self.train_iter == 1:
                self.kept = self.model.first.weight.detach().clone()
                if distributed.is_main():
                    raise CancelBatchException

        def after_batch(self):
            if self.kept is not None:
                assert torch.equal(self.model.first.weight, self.kept)
                self.kept = None

    learn, _, _ = trained(Backward, Leave(), model=Apart(), n=24, epochs=1)
    weights(learn)


def early(cb):
    (cb.model(cb.x * 1.1) ** 2).sum(1).mean().backward()


def late(cb):
    """Accumulates a penalty that every process computes of the data, and clips what all have."""
    early(cb)
    nn.utils.clip_grad_norm_(cb.model.parameters(), 0.05)


def now_and_then(cb):
    if cb.train_iter % 3 == 2:  # the uneven batch
        early(cb)


@pytest.mark.slow
@pytest.mark.parametrize("when", mostly_slow([early, now_and_then], now_and_then))
def test_a_pass_of_a_callback_before_the_losss_has_its_weight(when):
    """Also on a rank without data, where it is of a sample, or of nothing: the mean of nothing is a NaN."""
    for cut in (Net.cut, whole):
        change = partial(setattr_of, name="cut", value=cut)
        check_equals_one("Overlapped", cbs=Callback(before_backward=when), change=change)


def test_a_pass_of_a_callback_after_the_losss_is_averaged_before_it_clips():
    check_equals_one("Overlapped", cbs=Callback(before_step=late))


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"before_step": late}], ids=["plain", "with a callback's pass"])
def test_layers_that_are_frozen_in_an_epoch_are_averaged_after_the_pass_from_then_on(more):
    held = []

    def freeze(cb):
        if cb.training and cb.train_iter == 2:
            held.append(getattr(step_gradient(cb.learn), "ddp", None))
        if cb.training and cb.train_iter in (2, 4):
            cb.model.spare.requires_grad_(cb.train_iter == 4)
            assert cb.train_iter == 2 or not hasattr(held[0], "reducer")  # whose buckets are as large as the gradients

    job = {"cbs": Callback(before_batch=freeze, **more), "n": 40, "epochs": 1}
    learn, told, ways = trained(**job)
    assert ways == ["Deferred", "Overlapped", "Overlapped", "Deferred", "Deferred"]
    assert told == ([f"{SAID}parameters were frozen or unfrozen during an epoch"] if distributed.is_main() else [])
    alone, _, _ = trained(**job, alone=True)
    torch.testing.assert_close(weights(learn), weights(alone), rtol=1e-10, atol=1e-12)


def test_layers_that_are_frozen_between_epochs_are_averaged_during_the_pass_again():
    def ask_late(watch, point):
        time.sleep(0.3 * distributed.rank())  # the other rank has its answer meanwhile
        return all_skip(watch, point)

    all_skip = Watch.all_skip
    freeze = Callback(before_epoch=lambda cb: cb.model.spare.requires_grad_(cb.epoch == 0))
    with patch.object(Watch, "all_skip", ask_late):
        _, told, ways = trained(cbs=freeze)
    assert ways == ["Deferred", "Overlapped", "Overlapped"] * 2
    assert not told


class Later(Callback):
    """Trains a parameter beside the model from the second epoch on."""

    def before_epoch(self):
        if self.epoch == 1:
            self.scale = nn.Parameter(torch.ones(2, dtype=torch.float64))
            self.learn.opt.add_param_group({"params": [self.scale], "lr": 0.1})

    def before_backward(self):
        if self.epoch == 1:
            self.learn.loss_grad = self.loss_grad + (self.pred * self.scale).sum(1).mean()


def test_a_parameter_that_comes_beside_the_model_between_epochs_is_averaged():
    found = []
    for alone in (False, True):
        learn, _, _ = trained(cbs=Later(), alone=alone)
        scale = learn.opt.param_groups[-1]["params"][0].detach()
        assert distributed.same_everywhere(scale.tolist())
        found.append(torch.cat([weights(learn), scale]))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


class Renewed(Callback):
    """Gives the model a new last layer in the second epoch."""

    def before_epoch(self):
        if self.epoch == 1:
            self.model.spare = nn.Linear(4, 2).double()
            with torch.no_grad():
                for p in self.model.spare.parameters():
                    p.fill_(0.1)
            self.learn.opt.param_groups[0]["params"] = list(self.model.parameters())


def test_a_part_that_is_replaced_between_epochs_is_averaged():
    found = [weights(trained(cbs=Renewed(), alone=alone)[0]) for alone in (False, True)]
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def test_a_part_that_is_replaced_in_the_middle_of_an_epoch_is_an_error_that_says_when_to_replace_it():
    def renew(cb):
        if cb.training and cb.train_iter == 1:
            cb.model.spare = nn.Linear(4, 2).double()

    with raises(RuntimeError, "new parameters in the middle of an epoch, spare.weight, spare.bias", "in after_epoch"):
        trained(cbs=Callback(before_batch=renew))


def test_a_first_batch_that_all_ranks_leave_has_shown_nothing():
    def leave(cb):
        if cb.training and cb.train_iter == cb.iter == 0 and cb.epoch == 0:
            raise CancelBatchException

    _, _, ways = trained(cbs=Callback(before_batch=leave), n=40, epochs=1)
    assert ways[0] == "Deferred"
    assert set(ways[1:]) == {"Overlapped"}


def test_a_static_graph_may_have_a_part_that_nothing_uses():
    def spare(model):
        model.unused = nn.Linear(2, 2).double()

    check_equals_one("Overlapped", change=spare, n=24, static_graph=True)


def test_an_optimizer_of_what_the_loss_does_not_depend_on_is_a_callbacks_own_affair():
    cb = Callback()
    cb.its_opt = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    check_equals_one("Overlapped", cbs=cb)


def leave_out(cb):
    """Leaves a part out of the first batch of each epoch."""
    if cb.training:
        vars(cb.model.spare).pop("forward", None)
        if cb.iter == 0:
            cb.model.spare.forward = lambda x: 0.0


def test_what_the_first_batch_has_shown_counts_for_the_whole_fit():
    check_equals_one("Deferred", cbs=Callback(before_batch=leave_out))


def test_a_ddp_that_lives_on_after_an_error_in_its_pass_averages_nothing():
    held = []

    def fail(cb):
        if cb.train_iter == 2:
            held.append(step_gradient(cb.learn).ddp)
            held.append(cb.model)
            cb.model.body[0].weight.register_hook(lambda grad: 1 / 0)

    with raises(ZeroDivisionError, "division by zero"):
        trained(cbs=Callback(before_backward=fail))
    ddp, model = held
    model.body[0].weight._backward_hooks.clear()
    x = torch.full((3, 4), float(distributed.rank() + 1), dtype=torch.float64)
    params = list(model.parameters())
    model.zero_grad()
    expected = torch.autograd.grad(model(x).pow(2).sum(), params)
    model(x).pow(2).sum().backward()
    for p, grad in zip(params, expected, strict=True):
        torch.testing.assert_close(p.grad, grad)
    assert len(list(ddp.parameters())) == len(params) + 1


def in_pieces(model, x):
    """The forward pass with a layer that two reentrant checkpoints run."""
    x = x.clone().requires_grad_()
    return sum(checkpoint(model.spare, each, use_reentrant=True) for each in (x, x * 2)) + model.body(x)


def test_options_of_ddp_are_refused_where_it_does_not_average():
    for options in ({"comm_hook": "bf16"}, {"static_graph": True}):
        with raises(ValueError, f"{next(iter(options))} is for gradients that DDP averages during the backward pass"):
            trained(Backward, **options)
    with raises(ValueError, "which it cannot do, as gradients come in pieces"):
        trained(comm_hook="bf16", change=lambda model: setattr(model, "forward", partial(in_pieces, model)))


@pytest.mark.slow
def test_a_compressed_network_with_an_unused_part_is_refused_until_that_is_frozen():
    def spare(model, frozen=True):
        unused = nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=not frozen)
        model.register_parameter("unused", unused)

    with raises(ValueError, "as the loss does not depend on unused (which could be frozen): leave comm_hook out"):
        trained(comm_hook="bf16", change=partial(spare, frozen=False))
    learn, _, ways = trained(comm_hook="bf16", change=spare)
    assert set(ways[1:]) == {"Overlapped"}
    alone, _, _ = trained(alone=True, change=spare)
    assert 1e-9 < (weights(learn) - weights(alone)).abs().max() < 0.02


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_a_part_that_a_later_batch_leaves_out_is_an_error_on_all_ranks(view):
    def drop(cb):
        if cb.training and cb.train_iter == 3:
            cb.learn.model.spare.forward = lambda x: 0.0

    with raises(RuntimeError, "parameters that took no part in the loss of batch 0", "spare.weight, spare.bias"):
        trained(cbs=Callback(before_batch=drop), n=24, gradient_as_bucket_view=view)


# Forward passes


@pytest.mark.parametrize("cls", mostly_slow([Learner, Backward], Backward))
def test_the_model_runs_once_for_each_batch(cls):
    """Also on a rank without data, and nothing is tried out before."""
    for cut, of_none in ((whole, [0]), (Net.cut, [0, 1])):  # one that cannot run on nothing gets a sample
        learn, _, ways = trained(cls, change=partial(setattr_of, name="cut", value=cut))
        calls = [rows for training, rows in learn.model.calls if training]
        mine = [4, 4] if distributed.world_size() == 2 else [3 if distributed.rank() < 2 else 2] * 2
        of_none = [1] if cls is Backward else of_none  # and so does what may make anything of it
        assert calls == (mine + ([1] if distributed.is_main() else of_none)) * 2
        assert len(ways) == 6


def test_a_rank_that_leaves_a_batch_before_its_forward_pass_makes_none():
    def leave(cb):
        if cb.training and cb.train_iter in (0, 3) and distributed.is_main():
            raise CancelBatchException

    learn, _, ways = trained(cbs=Callback(before_batch=leave), n=24)
    assert len([1 for training, _ in learn.model.calls if training]) == 6 - 2 * distributed.is_main()
    weights(learn)


def test_a_rank_without_data_that_leaves_before_its_forward_pass_leaves_nothing_on_the_learner():
    def leave(cb):
        if cb.training and not cb.batch_size:
            raise CancelBatchException

    learn, _, _ = trained(cbs=Callback(before_batch=leave, order=50))
    assert "_forward" not in vars(learn)
    assert len(weights(learn))


def test_a_step_that_all_ranks_leave_out_is_so_also_where_one_has_no_data():
    def leave(cb):
        if cb.iter == 2:
            raise CancelStepException

    check_equals_one("Overlapped", cbs=Callback(before_step=leave))


def test_a_rank_that_leaves_a_batch_has_its_data_until_it_is_over():
    seen = []

    def leave(cb):
        if cb.training and cb.train_iter == 1 and distributed.is_main():
            seen.append((cb.pred, cb.loss, cb.batch_size))
            raise CancelBatchException

    def look(cb):
        if len(seen) == 1:
            seen.append((cb.pred, cb.loss, cb.batch_size))

    trained(cbs=Callback(after_loss=leave, after_batch=look), epochs=1)
    assert len(seen) == 2 * distributed.is_main()
    assert all(a is b for a, b in zip(*seen, strict=True))


@pytest.mark.parametrize(("cut", "rows"), [(Net.cut, 1), (whole, 0)], ids=["with a sample", "on nothing"])
def test_a_rank_without_data_runs_an_empty_batch(cut, rows):
    """A model that cannot do that gets a sample, which callbacks may call it on until the batch is over."""
    seen = []

    def look(cb):
        if cb.training and not cb.batch_size:
            seen.append([len(each) for each in (*cb.xb, *cb.yb)])

    cbs = [Callback(before_batch=look, order=50), Callback(after_loss=look), Callback(after_batch=look)]
    trained(cbs=cbs, change=partial(setattr_of, name="cut", value=cut))
    assert seen == [[0, 0], [rows, rows], [0, 0]] * 2 * (not distributed.is_main())


def differ(model):
    model.body[1].running_mean += distributed.rank()


def test_buffers_come_from_rank_0_at_the_start_and_before_each_step():
    found = []
    for options, alike in (({}, True), ({"broadcast_buffers": False}, False)):
        found.clear()
        before = Callback(
            before_batch=lambda cb: cb.training and found.append(cb.model.body[1].running_mean.clone()), order=12
        )
        trained(cbs=before, n=24, norm=True, sync_bn=False, change=differ, **options)
        same = [all(torch.equal(each, other) for other in distributed.all_gather(each)) for each in found]
        assert same[0]
        assert all(same) == alike


# Norms over all ranks, whose forward and backward passes need every rank


class SumOfRanks(torch.autograd.Function):
    """The sum of a tensor over the ranks, in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return SumOfRanks.summed(x)

    @staticmethod
    def backward(ctx, gradient):
        return SumOfRanks.summed(gradient)

    @staticmethod
    def summed(x):
        x = x.clone()
        if distributed.world_size() > 1:
            torch.distributed.all_reduce(x)
        return x


class RankNorm(nn.SyncBatchNorm):
    """Does on the CPU what torch's does on a GPU: an empty batch sends zeros of its type, and moves the statistics."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        rows = x.mT.flatten(0, 1)
        sums = torch.cat([rows.sum(0), (rows * rows).sum(0), x.new_tensor([len(rows)])])
        sums = SumOfRanks.apply(sums.float() if len(x) and x.itemsize < 4 else sums)
        mean, square = (sums[:-1] / sums[-1].clamp(min=1)).chunk(2)
        var = square - mean**2
        self.num_batches_tracked.add_(1)
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean), self.momentum)
            self.running_var.lerp_(var.to(self.running_var), self.momentum)
        mean, scale, weight, bias = (
            t[:, None].to(x.dtype) for t in (mean, (var + self.eps).rsqrt(), self.weight, self.bias)
        )
        return (x - mean) * scale * weight + bias


class FrozenNorm(RankNorm):
    """Normalizes by its running statistics also in training."""

    def train(self, mode=True):
        return super().train(False)


class Halves(nn.Module):
    """Cannot run on an empty batch."""

    def forward(self, x):
        return x.view(len(x), 3, -1)


class Floats(nn.Module):
    def forward(self, x):
        return x.float()


class TwoBranches(nn.Module):
    """Has an output, with a norm of its own, on which the loss does not depend."""

    def __init__(self):
        super().__init__()
        halves = (nn.Sequential(nn.Unflatten(1, (3, 2)), RankNorm(3), nn.Flatten(), nn.Linear(6, 2)) for _ in range(2))
        self.first, self.branches = nn.Linear(4, 6), nn.ModuleList(halves)

    def forward(self, x):
        x = self.first(x)
        return [branch(x) for branch in self.branches]


class Tempered(nn.Module):
    """A loss with a trained parameter, which the predictions do not depend on."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, pred, y):
        return nn.functional.cross_entropy(pred * self.scale, y)


class Leaves(Callback):
    """Some ranks count nothing in a batch, or leave it before or after the forward pass."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def is_due(self):
        if self.way == "all leave":
            return self.training and self.iter == 0
        return self.training and self.iter == 1 and distributed.rank() == 1

    def before_batch(self):
        if self.way == "one counts nothing" and self.is_due():
            self.learn.yb = (torch.full_like(self.yb[0], -100),)
        if self.way in ("one leaves before", "all leave") and self.is_due():
            raise CancelBatchException

    def after_pred(self):
        if self.way == "one leaves after" and self.is_due():
            raise CancelBatchException


DEFERRED = ["after the pass", "two branches"]
EQUAL = [*DEFERRED, "overlapped", "accumulated", "a view", "frozen", "a loss with a weight", "all leave"]
UNEQUAL = ["in bf16", "one counts nothing", "one leaves before", "one leaves after"]  # one process has no such rank


QUICK = "overlapped", "all leave"


@pytest.mark.slow
@pytest.mark.parametrize("way", mostly_slow(EQUAL + UNEQUAL, *QUICK, slow=["one leaves before", "in bf16"]))
def test_a_rank_without_samples_takes_part_in_norms_over_all_ranks(way):
    def made(alone):
        torch.manual_seed(4)
        halves = Halves() if way == "a view" else nn.Unflatten(1, (3, 2))
        norm = (FrozenNorm if way == "frozen" else RankNorm)(3)
        layers = [nn.Linear(4, 6), halves, norm, nn.Flatten(), nn.Tanh(), nn.Linear(6, 2)]
        model = nn.Sequential(*layers).double()
        if way == "in bf16":
            model = nn.Sequential(Floats(), *layers).float()
        cbs = [Leaves(way)]
        if way == "accumulated":
            cbs.append(GradientAccumulation(n_batches=2))
        if way == "in bf16":
            cbs.append(MixedPrecision("bf16"))
        loss = Tempered() if way == "a loss with a weight" else None
        if way == "two branches":
            model, loss = TwoBranches().double(), lambda pred, y: nn.functional.cross_entropy(pred[0], y)
        options = {"find_unused_parameters": True} if way in DEFERRED else {}
        return trained(cbs=cbs, alone=alone, model=model, loss=loss, **options)

    learn, _, ways = made(False)
    assert ("Overlapped" in ways) is (way not in DEFERRED)
    found = weights(learn)
    assert found.isfinite().all()
    assert all("forward" not in vars(m) for m in learn.model.modules())
    if way in EQUAL:
        with distributed.alone():
            one = made(True)[0]
        torch.testing.assert_close(found, weights(one), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(learn.model.state_dict(), one.model.state_dict(), rtol=1e-9, atol=1e-9)


@pytest.mark.ranks(2)  # of three ranks each has at most three of eight samples, which are not cut for norms
def test_parts_of_a_batch_and_norms_over_all_ranks_are_refused_before_a_rank_waits():
    model = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (3, 2)), RankNorm(3), nn.Flatten(), nn.Linear(6, 2)).double()
    with raises(ValueError, "SyncBatchNorms would wait", "sync_bn=False"):
        trained(cbs=SplitBatch(parts=2), model=model)


class Some(IterableDataset):
    """Ends early on rank 0."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(distributed.rank())
        for _ in range(4 if distributed.is_main() else 20):
            x = torch.randn(4, generator=generator, dtype=torch.float64) + 1
            yield x, (x.sum() > 4).long()


@pytest.mark.slow
def test_the_statistics_move_on_where_rank_0_has_no_samples_and_a_norm_keeps_its_own_forward():
    layers = [nn.Linear(4, 6), nn.Unflatten(1, (3, 2)), RankNorm(3), nn.Flatten(), nn.Linear(6, 2)]
    norm, seen = layers[2], []
    norm.forward = partial(RankNorm.forward, norm)
    own = norm.forward
    learn = Learner(
        DataLoaders(DataLoader(Some(), 2), device="cpu"), nn.Sequential(*layers).double(), nn.CrossEntropyLoss(),
        opt_func=torch.optim.SGD, lr=0.1, cbs=Callback(after_step=lambda cb: seen.append(norm.running_mean.tolist())),
    )  # fmt: skip
    with learn.no_logging(), learn.distrib_ctx(sharded=True, uneven="join"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        learn.fit(1)
    assert len({str(mean) for mean in seen}) == len(seen) == 10
    assert norm.num_batches_tracked == 10
    assert norm.forward is own
