"""The verbs of a learner on two ranks: schedules, rate finder, freezing, steps and predictions of one process."""

import copy
import math
import signal
import warnings

import pytest
import torch
from helpers import alone_and_together, mostly_slow, raises
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import TensorDataset

from learnerkit import (
    Callback,
    DataLoaders,
    EarlyStoppingCallback,
    GradientAccumulation,
    Learner,
    TorchScheduler,
    ValidateEvery,
    distributed,
    mae,
)
from learnerkit.callbacks.training import BnFreeze

pytestmark = pytest.mark.ranks(2)


def thirds(model):
    return [list(model[i].parameters()) for i in (0, 2, 4)]


def make_learner(n=30, bs=4, model=None, **kwargs):
    torch.manual_seed(3)
    x = torch.randn(n + 9, 4, dtype=torch.float64)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    train, valid = torch.utils.data.random_split(data, [n, 9], torch.Generator().manual_seed(1))
    dls = DataLoaders.from_datasets(train, valid, bs=bs, device="cpu")
    model = model or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))
    with torch.no_grad():
        for p in model.double().parameters():
            p.normal_(0, 0.4)
    kwargs = {"splitter": thirds, "lr": 0.01} | kwargs
    return Learner(dls, model, nn.MSELoss(), metrics=mae, **kwargs)


def both(use, **kwargs):
    return alone_and_together(lambda: make_learner(**copy.deepcopy(kwargs)), use)


def weights(learn):
    return torch.cat([p.detach().reshape(-1) for p in learn.model.parameters()])


def close(a, b):
    a, b = (torch.as_tensor(v, dtype=torch.float64) for v in (a, b))
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-11)


def equal_to_one_process(use, **kwargs):
    """Weights, rates and rows of all ranks together are those of one process."""
    (alone, _), (learn, _) = both(use, **kwargs)
    assert close(weights(alone), weights(learn)), (weights(alone) - weights(learn)).abs().max()
    assert alone.recorder.lrs == learn.recorder.lrs
    assert alone.recorder.iters == learn.recorder.iters
    assert close(alone.recorder.values, learn.recorder.values), (alone.recorder.values, learn.recorder.values)
    assert alone.recorder.hps == learn.recorder.hps
    assert all(torch.equal(weights(learn), other) for other in distributed.all_gather(weights(learn)))
    return alone, learn


class Named(torch.utils.data.Dataset):
    def __init__(self, n):
        self.x = torch.randn(n, 4, generator=torch.Generator().manual_seed(n), dtype=torch.float64)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"input": self.x[i], "name": f"{i}.png", "labels": self.x[i].sum().reshape(1)}


def test_names_in_batches_are_left_out_on_every_rank():
    def with_names(learn):
        loaders = (torch.utils.data.DataLoader(Named(n), 4, shuffle=n == 30) for n in (30, 9))
        learn.dls = DataLoaders(*loaders, device="cpu", ignore_keys="name")
        learn.fit(2)

    equal_to_one_process(with_names)


SCHEDULES = {
    "one cycle": lambda learn: learn.fit_one_cycle(2, slice(1e-3, 2e-2)),
    "flat, then a cosine": lambda learn: learn.fit_flat_cos(2, [0.01, 0.02, 0.03], pct_start=0.4, wd=0.1),
    "restarts": lambda learn: learn.fit_sgdr(2, 1, 0.02),
    "one cycle of groups": lambda learn: learn.fit_one_cycle(2, 0.02, cbs=GradientAccumulation(n_batches=3)),
}


@pytest.mark.parametrize("name", mostly_slow(SCHEDULES, "one cycle of groups", slow=["one cycle"]))
def test_schedules_on_ranks_equal_those_on_one_process(name):
    equal_to_one_process(SCHEDULES[name])


def with_options(model):
    first = {"params": model[0].parameters(), "lr_scale": 0.3, "betas": (0.8, 0.9)}
    return [first, {"params": model[2].parameters(), "lr": 0.02, "weight_decay": 0.3}, model[4].parameters()]


def test_groups_with_options_and_decays_by_name():
    def in_turn(learn):
        learn.fit_one_cycle(1, wd={"*bias": 0, "0.*": 0.2})
        learn.fit(1, 0.02, wd=0.1)

    _, learn = equal_to_one_process(in_turn, splitter=with_options)
    found = {id(p): (group["lr"], group["weight_decay"]) for group in learn.opt.param_groups for p in group["params"]}
    expected = {"0.weight": (0.006, 0.1), "0.bias": (0.006, 0), "2.weight": (0.04, 0.3), "2.bias": (0.04, 0.3)}
    for name, p in learn.model.named_parameters():
        assert found[id(p)] == pytest.approx(expected.get(name, (0.02, 0.1 if name == "4.weight" else 0))), name


def test_torch_schedulers_by_the_batch_equal_those_on_one_process():
    make = TorchScheduler(lambda opt: OneCycleLR(opt, 0.03, total_steps=16))
    _, learn = equal_to_one_process(lambda learn: learn.fit(2, cbs=make))
    assert len(set(learn.recorder.lrs)) > 10


@pytest.mark.slow
@pytest.mark.parametrize("split", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("n_batches", [1, 3])
def test_the_steps_that_the_warning_tells_bring_a_torch_scheduler_to_its_end(split, n_batches):
    def make(opt):
        return OneCycleLR(opt, 0.03, 2 * math.ceil(len(learn.dls.train_ds) / learn.effective_batch_size))

    learn = make_learner()
    with warnings.catch_warnings(record=True) as caught, learn.no_logging(), learn.distrib_ctx(split_batches=split):
        warnings.simplefilter("always")
        learn.fit(2, cbs=[TorchScheduler(make), GradientAccumulation(n_batches=n_batches)])
        assert learn.recorder.lrs[-1] < 1e-5
        learn.fit(4, cbs=TorchScheduler(lambda opt: OneCycleLR(opt, 0.03, 1000)))
    assert ["/ learn.effective_batch_size" in str(w.message) for w in caught] == [True] * distributed.is_main()


def test_what_is_the_same_on_all_ranks_is_warned_of_on_one():
    class Penalty(Callback):
        def after_loss(self):
            self.learn.loss = self.loss_grad + 1

    learn = make_learner(splitter=None, cbs=Penalty)
    with warnings.catch_warnings(record=True) as caught, learn.no_logging(), learn.distrib_ctx():
        warnings.simplefilter("always")
        learn.fine_tune(1)
    told = [str(w.message) for w in caught]
    assert [any(words in text for text in told) for words in ("single group", "learn.loss_grad")] == [
        distributed.is_main()
    ] * 2


@pytest.mark.slow
def test_torch_schedulers_by_the_validation_loss_equal_those_on_one_process():
    def plateau(learn):
        make = TorchScheduler(lambda opt: ReduceLROnPlateau(opt, patience=0, threshold=0.5), "epoch", "valid_loss")
        learn.fit(4, 0.02, cbs=make)

    _, learn = equal_to_one_process(plateau)
    assert len(set(learn.recorder.lrs)) > 1


def test_fits_of_so_many_steps_equal_those_on_one_process():
    _, learn = equal_to_one_process(lambda learn: learn.fit(n_steps=11))
    assert learn.recorder.iters == [8, 11]
    _, learn = equal_to_one_process(lambda learn: learn.fit_one_cycle(n_steps=11, lr_max=0.02))
    _, learn = equal_to_one_process(lambda learn: learn.fit(n_steps=5, cbs=GradientAccumulation(n_batches=2)))
    assert learn.recorder.iters == [8, 10]


def test_with_whole_batches_for_every_rank_an_epoch_has_half_the_steps():
    learn = make_learner()
    with learn.no_logging(), learn.distrib_ctx():
        learn.fit(n_steps=11)
    assert learn.recorder.iters == [4, 8, 11]


class OwnLoss(Callback):
    """The loss is computed by the callback: the loop finds no targets until then."""

    def before_batch(self):
        self.target, self.learn.yb = self.y, ()

    def after_pred(self):
        self.learn.loss_grad = (self.pred - self.target).square().mean()
        self.learn.loss = self.loss_grad.detach()

    def after_loss(self):
        self.learn.yb = (self.target,)


@pytest.mark.slow
def test_a_loss_that_a_callback_sets_counts_its_samples():
    def fit(learn):
        learn.fit(1, cbs=[OwnLoss(), GradientAccumulation(n_batches=2)])
        learn.fit(1, cbs=OwnLoss())

    alone, _ = equal_to_one_process(fit)
    plain = make_learner()
    plain.fit(1, cbs=GradientAccumulation(n_batches=2))
    plain.fit(1)
    assert close(alone.recorder.values, plain.recorder.values)


@pytest.mark.slow
def test_validations_every_so_many_steps_equal_those_on_one_process():
    _, learn = equal_to_one_process(lambda learn: learn.fit(2, cbs=ValidateEvery(3)))
    assert learn.recorder.iters == [3, 6, 8, 9, 12, 15, 16]


def test_a_validation_in_mid_epoch_stops_all_ranks_early():
    cbs = [ValidateEvery(2), EarlyStoppingCallback(patience=1, min_delta=0.02)]
    _, learn = equal_to_one_process(lambda learn: learn.fit(9, 0.02, cbs=copy.deepcopy(cbs)))
    assert len(learn.recorder.values) < 9 * 4
    assert len(learn.recorder.lrs) % 8


def test_fine_tuning_on_ranks_equals_that_on_one_process():
    _, learn = equal_to_one_process(lambda learn: learn.fine_tune(2, 0.02))
    assert all(p.requires_grad for p in learn.model.parameters())


def test_frozen_groups_keep_their_weights():
    def last(learn):
        learn.freeze()
        learn.fit(1)

    before = weights(make_learner())
    _, learn = equal_to_one_process(last)
    kept = sum(p.numel() for group in thirds(learn.model)[:2] for p in group)
    assert torch.equal(weights(learn)[:kept], before[:kept])
    assert not torch.equal(weights(learn)[kept:], before[kept:])


def test_frozen_batch_norm_keeps_its_statistics():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))
    learn = make_learner(model=model, train_bn=False, cbs=BnFreeze)
    learn.splitter = lambda model: [[*model[0].parameters(), *model[1].parameters()], [*model[2:].parameters()]]
    learn.freeze()
    before = learn.model[1].running_mean.clone()
    with learn.no_logging(), learn.distrib_ctx(split_batches=True, sync_bn=False):
        learn.fit(1)
    assert torch.equal(before, learn.model[1].running_mean)


def test_the_rate_finder_finds_the_same_and_leaves_no_trace():
    def find(learn):
        learn.fit(1)
        state = copy.deepcopy((learn.opt.state_dict(), learn.recorder.values, torch.get_rng_state()))
        before = weights(learn).clone()
        found = learn.lr_find(num_it=24, show_plot=False)
        assert torch.equal(before, weights(learn))
        assert repr(state[0]) == repr(learn.opt.state_dict())
        assert state[1] == learn.recorder.values
        assert torch.equal(state[2], torch.get_rng_state())
        learn.fit(1)
        return found

    (alone, here), (learn, there) = both(find)
    assert close(list(here), list(there)), (here, there)
    assert close(weights(alone), weights(learn))
    assert all(tuple(there) == other for other in distributed.all_gather(tuple(there)))


@pytest.mark.slow
def test_the_rate_finder_finds_the_same_with_accumulation():
    (_, here), (_, there) = both(lambda learn: learn.lr_find(num_it=40), cbs=GradientAccumulation(n_batches=2))
    assert close(list(here), list(there)), (here, there)


@pytest.mark.slow
def test_an_error_on_one_rank_in_the_rate_finder_leaves_no_trace():
    def fail(cb):
        if distributed.rank() == 1 and cb.task == "lr_find" and cb.train_iter == 20:
            raise ZeroDivisionError("of rank 1")

    learn = make_learner()
    before = weights(learn).clone()
    with learn.no_logging(), learn.distrib_ctx(), learn.added_cbs(Callback(after_pred=fail)):
        with raises(Exception, "of rank 1"):
            learn.lr_find()
        assert torch.equal(before, weights(learn))
        assert learn.opt is None
        learn.fit(1)


def test_ctrl_c_on_one_rank_ends_the_rate_finder():
    steps = []

    def press(cb):
        if cb.task == "lr_find":
            steps.append(cb.train_iter)
            if distributed.is_main() and cb.train_iter == 5:
                signal.raise_signal(signal.SIGINT)

    learn = make_learner()
    with learn.no_logging(), learn.distrib_ctx(), learn.added_cbs(Callback(after_pred=press)):
        with pytest.raises(KeyboardInterrupt):
            learn.lr_find()
        assert steps[-1] <= 6, steps
        learn.fit(1)


def test_models_that_differ_are_rank_0s():
    learn, alone = make_learner(), make_learner()
    with torch.no_grad():
        for p in learn.model.parameters():
            p.add_(distributed.rank())
    with learn.no_logging(), learn.distrib_ctx():
        assert close(learn.get_preds()[0], alone.get_preds()[0])
    assert torch.equal(weights(learn), weights(alone))


def test_models_that_differ_in_their_shapes_are_refused():
    learn = make_learner(
        model=nn.Sequential(nn.Linear(4, 8 + distributed.rank()), nn.Tanh(), nn.Linear(8 + distributed.rank(), 1))
    )
    with learn.distrib_ctx(), raises(ValueError, "differs between ranks in its parameters' shapes"):
        learn.validate()


def test_augmented_predictions_are_those_of_one_process():
    (_, (here, _)), (_, (there, _)) = both(lambda learn: learn.tta(batch_tfms=lambda x: 2 * x, n=2))
    assert close(here, there)


def test_predictions_augmented_by_chance_are_the_same_on_all_ranks():
    _, (_, (by_chance, _)) = both(lambda learn: learn.tta(batch_tfms=lambda x: x + torch.rand_like(x)))
    assert all(torch.equal(by_chance, other) for other in distributed.all_gather(by_chance))
