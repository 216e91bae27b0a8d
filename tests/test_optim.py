"""Parameter groups, rates and weight decay, as a Learner uses them."""

import copy
import pickle
from collections import defaultdict, namedtuple
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import torch
from fastcore.foundation import L
from helpers import (
    TwoAndOne,
    by_hand,
    halves,
    make_data,
    make_dls,
    make_learner,
    make_model,
    raises,
    same_weights,
    weights,
)
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer, Rprop
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import (
    Callback,
    CheckpointCallback,
    DataLoaders,
    Learner,
    ParamScheduler,
    TorchScheduler,
    linear_warmup,
    optim,
    scaled_lr,
)
from learnerkit.callbacks.schedule import SchedNo


def thirds(model):
    return [[model[0].weight], [model[0].bias], list(model[3].parameters())]


def norm_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.LayerNorm(6), nn.Linear(6, 1))


def by_name(learn, key):
    """A hyper-parameter of every parameter, by the parameter's name."""
    found = {id(p): group[key] for group in learn.opt.param_groups for p in group["params"]}
    return {name: found[id(p)] for name, p in learn.model.named_parameters()}


# Rates


@pytest.mark.parametrize(
    ("lr", "count", "expected"),
    [
        (0.1, 1, [0.1]),
        (0.1, 3, [0.1] * 3),
        (1, 2, [1.0, 1.0]),
        (torch.tensor(0.5), 2, [0.5, 0.5]),
        (slice(1e-2), 3, [1e-3, 1e-3, 1e-2]),
        (slice(1e-2), 1, [1e-2]),
        (slice(1e-5, 1e-3), 3, [1e-5, 1e-4, 1e-3]),
        (slice(1e-5, 1e-3), 1, [1e-3]),
        (slice(1e-4, 1e-2), 2, [1e-4, 1e-2]),
        ([0.1, 0.2], 2, [0.1, 0.2]),
        ((0.1, 0.2, 0.3), 3, [0.1, 0.2, 0.3]),
        (np.float32(0.5), 2, [0.5, 0.5]),
        ([torch.tensor(0.5), np.float32(0.25)], 2, [0.5, 0.25]),
        (L(0.1, 0.2), 2, [0.1, 0.2]),
        (np.array([0.1, 0.2]), 2, [0.1, 0.2]),
        (torch.tensor([0.5, 0.25]), 2, [0.5, 0.25]),
        (np.array(0.5), 2, [0.5, 0.5]),
        ({0.5}, 1, [0.5]),
        (slice(torch.tensor(0.5)), 2, [0.05, 0.5]),
    ],
)
def test_rates_are_fastais(lr, count, expected):
    assert optim.rates(lr, count) == pytest.approx(expected)


def test_all_suggestions_of_the_rate_finder_are_no_rates_of_groups():
    found = namedtuple("SuggestedLRs", ["valley", "steep"])(0.1, 0.2)
    for groups in (None, halves):
        learn = make_learner(splitter=groups)
        with raises(TypeError, "lr_find returns", "`.valley`"):
            learn.fit_one_cycle(1, found)
    learn.fit(1, namedtuple("Rates", ["body", "head"])(0.1, 0.2))


@pytest.mark.parametrize(
    ("lr", "error", "match"),
    [
        ([0.1], ValueError, "got 1 learning rates for 2 parameter groups"),
        (slice(None), ValueError, r"write slice\(hi\) or slice\(lo, hi\)"),
        (slice(1, 2, 3), ValueError, r"write slice\(hi\)"),
        (-0.1, ValueError, "must not be negative"),
        (float("nan"), ValueError, "must not be negative"),
        ("fast", TypeError, "a learning rate is a number, a slice, or a list"),
        ({}, TypeError, "a learning rate is"),
        ([0.1, "fast"], TypeError, "got lr='fast'; a learning rate is"),
        ({0.1, 0.2}, TypeError, r"or a list with one number per group \(a set has no order\)"),
        (np.array([0.1]), ValueError, "got 1 learning rates for 2 parameter groups"),
        (np.zeros((2, 2)), TypeError, "a learning rate is a number, a slice, or a list"),
        (slice(0, 0.1), ValueError, r"slice\(lo, hi\) is a geometric sequence of rates, so both are above 0"),
        (slice(-0.1, 0.1), ValueError, "both are above 0"),
    ],
)
def test_other_rates_are_refused(lr, error, match):
    with pytest.raises(error, match=match):
        optim.rates(lr, 2)
    with pytest.raises(error):
        make_learner(splitter=halves).fit(1, lr)


@pytest.mark.parametrize("given_to", ["learner", "fit"])
@pytest.mark.parametrize("wd", [None, 0.1])
@pytest.mark.parametrize(
    ("lr", "first", "second", "third"),
    [(0.1, 0.1, 0.1, 0.1), (slice(0.1), 0.01, 0.01, 0.1), (slice(0.001, 0.1), 0.001, 0.01, 0.1), ([3, 2, 1], 3, 2, 1)],
)
def test_rates_count_the_splitters_groups(given_to, wd, lr, first, second, third):
    learn = make_learner(splitter=thirds, wd=wd, **({"lr": lr} if given_to == "learner" else {}))
    learn.fit(0, *([lr] if given_to == "fit" else []))
    expected = {"0.weight": first, "0.bias": second, "3.weight": third, "3.bias": third}
    assert by_name(learn, "lr") == pytest.approx(expected)
    assert optim.n_groups(learn.opt) == 3


def test_a_group_that_is_added_between_fits_is_one_more_however_the_others_are_split(tmp_path):
    def learner():
        learn = make_learner(splitter=halves, wd=0.1, path=tmp_path)
        learn.create_opt()
        return learn

    learn = learner()
    learn.fit(1)  # the decay splits both groups
    added = nn.Parameter(torch.ones(1))
    learn.opt.add_param_group({"params": [added]})
    learn.fit(1, slice(0.001, 0.1))
    assert [group["lr"] for group in learn.opt.param_groups] == pytest.approx([0.001] * 2 + [0.01] * 2 + [0.1])
    learn.fit(1, [0.1, 0.2, 0.3])
    assert [group["lr"] for group in learn.opt.param_groups] == [0.1, 0.1, 0.2, 0.2, 0.3]
    learn.save("added")
    other = learner()
    other.opt.add_param_group({"params": [added]})
    other.load("added")
    assert len(other.opt.param_groups) == 5


@pytest.mark.parametrize("kind", [tuple, L, iter, np.array, torch.tensor])
def test_rates_come_in_any_row(kind):
    lrs = pytest.approx({"0.weight": 0.1, "0.bias": 0.2, "3.weight": 0.3, "3.bias": 0.3})
    learn = make_learner(splitter=thirds, lr=kind([0.1, 0.2, 0.3]))
    for _ in range(2):
        learn.fit(0)
        assert by_name(learn, "lr") == lrs
    learn = make_learner(splitter=thirds)
    learn.fit(0, kind([0.1, 0.2, 0.3]))
    assert by_name(learn, "lr") == lrs
    learn.fit_one_cycle(1, kind([0.1, 0.2, 0.3]), div=1.0, div_final=1.0)
    assert by_name(learn, "lr") == lrs
    learn.moms = kind([0.95, 0.85, 0.95])
    learn.fit_one_cycle(1, 0.1)


@pytest.mark.parametrize(
    ("opt_func", "lr", "expected"),
    [
        (partial(SGD, lr=0.25), None, 0.25),
        (partial(partial(SGD, lr=0.5, momentum=0.9), lr=0.25), None, 0.25),
        (partial(SGD, lr=0.25), 0.125, 0.125),
        (partial(SGD, lr=0.25), 1e-3, 1e-3),
        (partial(SGD, momentum=0.9), None, 1e-3),
        (partial(SGD, lr=None), None, 1e-3),
        (SGD, None, 1e-3),
        (lambda params, lr=0.25: SGD(params, lr), None, 1e-3),
    ],
)
def test_a_rate_that_is_bound_in_the_optimizer_is_the_learners_default(opt_func, lr, expected):
    learn, model = Learner(make_dls(), make_model(), F.mse_loss, opt_func=opt_func, lr=lr), make_model()
    assert learn.lr == expected
    opt = opt_func(model.parameters(), lr=expected)
    learn.fit(2)
    assert {g["lr"] for g in learn.opt.param_groups} == {expected}
    by_hand(model, make_dls().train, 2, opt)
    for found, p in zip(learn.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, p)
    learn.fit(1, 0.5)
    assert {g["lr"] for g in learn.opt.param_groups} == {0.5}


def test_a_splitter_may_return_parameters_alone():
    learn = make_learner(splitter=lambda model: model[3].parameters())
    before = weights(learn.model)
    learn.fit(1)
    changed = {name for name, p in learn.model.state_dict().items() if not torch.equal(p, before[name])}
    assert changed == {"3.weight", "3.bias"}
    assert optim.n_groups(learn.opt) == 1


def test_rates_act_on_their_groups():
    learn = make_learner(make_dls(train=4), splitter=halves)
    model = make_model()
    learn.fit(1, [0.0, 0.5])
    x, y = make_data(4).tensors
    F.mse_loss(model(x), y).backward()
    for rate, group in zip((0.0, 0.5), halves(model), strict=True):
        for p in group:
            p.data -= rate * p.grad
    for name, value in model.state_dict().items():
        torch.testing.assert_close(learn.model.state_dict()[name], value)


def test_a_rate_may_be_a_tensor_in_the_optimizer():
    learn = make_learner(opt_func=lambda groups, lr: Adam(groups, lr=torch.tensor(lr), capturable=False, foreach=False))
    learn.fit(1, 0.25)
    assert float(learn.opt.param_groups[0]["lr"]) == 0.25


def test_a_group_without_a_rate_is_refused():
    class Chooses(torch.optim.Optimizer):
        def __init__(self, groups, lr):
            super().__init__(groups, {"lr": None})

    with pytest.raises(ValueError, match="lr=None in group 0 of Chooses.*set one after it is made, in opt_func"):
        make_learner(opt_func=Chooses).fit(1)


def test_groups_of_a_factory_count_as_its_own():
    def factory(groups, lr):
        params = [p for group in groups for p in group["params"]]
        return SGD([{"params": params[:1]}, {"params": params[1:]}], lr=lr)

    learn = make_learner(opt_func=factory)
    learn.fit(1, [0.1, 0.2])
    assert [group["lr"] for group in learn.opt.param_groups] == [0.1, 0.2]


# Rates of groups that the user made


OWN = [1e-4, 2e-4, 1e-4, 0.1]


def own_groups(groups, lr):
    """Ignores the groups that it gets, and the rate."""
    params = [p for group in groups for p in group["params"]]
    return SGD([{"params": [p], "lr": rate, "weight_decay": rate} for p, rate in zip(params, OWN, strict=True)])


class Own(Learner):
    def create_opt(self):
        self.opt = own_groups([{"params": list(self.model.parameters())}], self.lr)


class Listens(Callback):
    """Has the rates of each batch, in a list that is no attribute: `lr_find` would put it back."""

    run_valid = False

    def __init__(self):
        super().__init__()
        rates = []
        self.get = lambda: rates

    @property
    def rates(self):
        return self.get()

    def before_fit(self):
        self.rates.clear()

    def after_step(self):
        self.rates.append([float(group["lr"]) for opt in self.opts for group in opt.param_groups])


def own_learner(way="create_opt", **kwargs):
    ways = {"create_opt": {"cls": Own}, "opt_func": {"opt_func": own_groups}}
    return make_learner(lr=kwargs.pop("lr", None), cbs=[Listens(), *kwargs.pop("cbs", [])], **ways[way], **kwargs)


def group_values(learn, key="lr"):
    return [group[key] for opt in learn.opts for group in opt.param_groups]


@pytest.mark.parametrize("way", ["create_opt", "opt_func"])
def test_rates_that_the_user_gave_to_groups_stay(way):
    learn, model = own_learner(way), make_model()
    learn.fit(2)
    opt = own_groups([{"params": list(model.parameters())}], None)
    by_hand(model, make_dls().train, 2, opt)
    for found, p in zip(learn.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, p)
    assert group_values(learn) == group_values(learn, "weight_decay") == OWN
    learn.fit_one_cycle(1, div=10.0)
    assert learn.listens.rates[0] == pytest.approx([rate / 10 for rate in OWN])
    assert learn.recorder.hps["lr"][0] == pytest.approx(OWN[-1] / 10)
    for _ in range(2):  # neither what a schedule nor what a rate for one fit has left is the beginning of the next one
        learn.fit(1)
        assert learn.listens.rates == [OWN, OWN]
        learn.fit(1, 0.5)
    learn.fit(1, reset_opt=True)
    assert group_values(learn) == OWN
    learn.fit_flat_cos(1)
    assert learn.listens.rates[0] == OWN
    learn.fit_sgdr(1, 1)
    assert learn.listens.rates[0] == OWN


@pytest.mark.parametrize("way", ["create_opt", "opt_func"])
@pytest.mark.parametrize("lr", [0.2, slice(0.2), scaled_lr(0.1, at=2), lambda position: 0.2, linear_warmup(0, 0.2)])
def test_one_rate_is_that_of_the_highest_group_and_the_others_keep_their_ratio(way, lr):
    learn, doubled = own_learner(way), pytest.approx([2 * rate for rate in OWN])
    learn.fit(1, lr)
    assert learn.listens.rates == [doubled, doubled]
    if not callable(lr) and not getattr(lr, "is_schedule", False):
        learn.fit_one_cycle(1, lr, div=1.0)
        assert learn.listens.rates[0] == doubled
        learn.lr = lr
        learn.fit(1)
        assert learn.listens.rates[0] == doubled
        named = own_learner(way, lr=lr)
        named.fit(1)
        assert named.listens.rates[0] == doubled
    learn.lr = None
    learn.fit(1)
    assert learn.listens.rates[0] == OWN
    learn.fit(1, cbs=ParamScheduler({"lr": SchedNo(0.2, 0.2)}))
    assert learn.listens.rates[0] == doubled
    learn.fit(1, cbs=TorchScheduler(lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)))
    assert learn.listens.rates == [OWN, pytest.approx([rate / 2 for rate in OWN])]


def test_a_rate_that_is_bound_is_that_of_the_highest_group():
    learn = make_learner(lr=None, opt_func=partial(own_groups, lr=0.2))
    learn.fit(0)
    assert group_values(learn) == pytest.approx([2 * rate for rate in OWN])


def test_a_list_or_two_ends_replace_the_rates_of_groups_that_the_user_made():
    learn = own_learner()
    learn.fit(1, [4, 3, 2, 1])
    assert group_values(learn) == [4, 3, 2, 1]
    learn.fit(1, slice(1e-4, 1e-1))
    assert group_values(learn) == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1])
    with raises(ValueError, "got 2 learning rates for 4 parameter groups (those that the optimizer was made with)"):
        learn.fit(1, [0.1, 0.2])
    with raises(ValueError, "got 2 schedules of 'lr' for 4 parameter groups (those that the optimizer was made with)"):
        learn.fit(1, [SchedNo(1, 1)] * 2)
    learn.fit(1, wd=0.125)  # which parts no group, since each has one parameter
    assert group_values(learn) == OWN
    assert by_name(learn, "weight_decay") == {"0.weight": 0.125, "0.bias": 0.0, "3.weight": 0.125, "3.bias": 0.0}


def test_splitter_groups_that_are_parted_by_rate_count_by_themselves():
    def parted(groups, lr):
        made = [{**g, "params": [p], "lr": lr / (i + 1)} for g in groups for i, p in enumerate(g["params"])]
        return SGD(made, lr)

    learn = make_learner(lr=None, opt_func=parted, splitter=halves, wd=0.1)
    learn.fit(1)
    assert group_values(learn) == [1e-3, 5e-4, 1e-3, 5e-4]
    learn.fit(1, [1, 2, 3, 4])
    assert group_values(learn) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"2 learning rates for 4 parameter groups \(those that the optimizer was"):
        learn.fit(1, [1, 2])


def test_a_timm_group_has_the_scale_of_its_rate():
    def scaled(groups, lr):
        params = [p for group in groups for p in group["params"]]
        return SGD([{"params": [p], "lr_scale": 0.5**i} for i, p in enumerate(params)], lr)

    learn = make_learner(lr=None, opt_func=scaled)
    for lr, first in ((None, 1e-3), (0.1, 0.1)):
        learn.fit(1, lr)
        assert group_values(learn) == pytest.approx([first, first / 2, first / 4, first / 8])
        assert group_values(learn, "initial_lr") == pytest.approx([first] * 4)  # from which timm's schedulers begin


def test_each_optimizer_keeps_its_own_rate():
    class Gan(Learner):
        def create_opt(self):
            d, g = SGD(self.model[0].parameters(), lr=4e-4), Adam(self.model[3].parameters(), lr=1e-4)
            self.opt = {"d": d, "g": g}

    learn = make_learner(cls=Gan, lr=None)
    assert "  optimizer  of create_opt\n" in repr(learn)
    for args in ((), ({"d": 0.1},)):
        learn.fit(1, *args)
        assert group_values(learn) == [*(args[0].values() if args else [4e-4]), 1e-4]
    assert "optimizer  SGD, Adam, lr 0.0001, 0.0004" in repr(learn)
    learn.lr = {"g": 0.5}
    learn.fit(1)
    assert group_values(learn) == [4e-4, 0.5]


class Around(SGD):
    """Has another optimizer inside it, which loads the state of both, as timm's Lookahead has."""

    def __init__(self, params, lr):
        super().__init__(params, lr, momentum=0.9)
        self.inner, self.state = SGD(self.param_groups, lr, momentum=0.9), defaultdict(dict)
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        self.inner.step()

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups


def test_groups_that_were_split_are_split_in_an_optimizer_inside_another_too():
    first, second = (make_learner(opt_func=Around, wd=0.1) for _ in range(2))
    first.fit(1)
    assert len(first.opt.param_groups) == 2
    second.load(first.save("around"))
    assert second.opt.inner.param_groups is second.opt.param_groups
    assert [group["weight_decay"] for group in second.opt.param_groups] == [0.1, 0.0]


def test_rates_are_those_of_the_script_after_a_file_is_loaded():
    first, second = own_learner(), own_learner()
    first.fit(1)
    for group in first.opt.param_groups:
        group["lr"] = group["base_lr"] = 0.7  # as another script had them
    first.save("other")
    second.load("other").fit(1)
    assert second.listens.rates[0] == OWN
    state = first.opt.state_dict()
    for group in state["param_groups"]:
        del group["base_lr"]  # as torch alone saves it
    optim.load_state(second.opt, state)
    second.fit(1)
    assert second.listens.rates[0] == OWN


def died_and_whole(folder, make, train):
    """The learners of a run that died and was resumed, and of one that did not, which end alike."""

    def run(name, dies=False):
        kills = Callback(before_step=lambda cb: cb.train_iter == 5 and dies and 1 / 0)
        saves = [] if name == "whole" else [CheckpointCallback(folder, every=5, resume=True)]
        learn = make(dls=make_dls(12), cbs=[*saves, kills])
        with suppress(ZeroDivisionError):
            train(learn)
        return learn

    run("died", True)
    whole, resumed = run("whole"), run("died")
    assert same_weights(whole.model, resumed.model)
    return resumed, whole


def test_resumed_groups_end_as_those_of_a_whole_run(tmp_path):
    def train(learn):
        learn.fit_one_cycle(2, 0.05)
        learn.fit(1)

    resumed, whole = died_and_whole(tmp_path, own_learner, train)
    assert whole.listens.rates == resumed.listens.rates == [OWN] * 3


def test_rates_of_groups_are_shown(capsys):
    learn = own_learner()
    learn.check()
    assert "ok  optimizer   SGD, lr 0.0001, 0.0002, 0.1" in capsys.readouterr().out
    learn.fit(0)
    assert "optimizer  SGD, lr 0.0001, 0.0002, 0.1" in repr(learn)
    learn.lr = 1.0
    assert "optimizer  SGD, lr 0.001, 0.002, 1" in repr(learn)
    learn.lr = slice(1e-5, 1e-3)
    assert "optimizer  SGD, lr slice(1e-05, 0.001, None)" in repr(learn)
    assert optim.rates_text([1e-5, 1e-4, 1e-4, 1e-3, 1e-2]) == "1e-05 .. 0.01 in 5 groups"


@pytest.mark.filterwarnings("ignore:there is a single group")
def test_a_slice_over_one_group_is_refused():
    for fit in ("fit", "fit_one_cycle"):
        with pytest.raises(ValueError, match="for 1 parameter group, which would get 0.001 alone; give that rate, or"):
            getattr(make_learner(), fit)(1, slice(1e-5, 1e-3))
    learn = make_learner()
    learn.fit(1, slice(1e-3))
    learn.fine_tune(1)
    make_learner(splitter=lambda model: [list(model.parameters())]).fine_tune(1)


@pytest.mark.filterwarnings("ignore:there is a single group")
def test_fine_tuning_keeps_the_ratio_of_rates_that_the_user_gave_to_groups():
    learn = own_learner()
    learn.fine_tune(1, 0.2, pct_start=0.0)
    assert learn.listens.rates[0] == pytest.approx(OWN)


# Groups with options, from the splitter


def with_options(model):
    body = {"params": model[0].parameters(), "lr": 0.01, "momentum": 0.5, "weight_decay": 0.2, "nesterov": True}
    return [body, list(model[3].parameters())]


def groups_with(*options):
    """A splitter that gives these options for the two layers."""
    return lambda model: [
        {"params": part.parameters(), **each} for part, each in zip((model[0], model[3]), options, strict=True)
    ]


def layer_values(learn, key="lr"):
    """A hyper-parameter of each of the two layers."""
    found = by_name(learn, key)
    assert (found["0.weight"], found["3.weight"]) == (found["0.bias"], found["3.bias"])
    return [found["0.weight"], found["3.weight"]]


def test_options_of_a_splitters_groups_are_the_optimizers():
    learn, model = make_learner(splitter=with_options), make_model()
    learn.fit(2)
    opt = SGD(with_options(model)[:1] + [{"params": model[3].parameters()}], lr=0.1, fused=True)
    by_hand(model, make_dls().train, 2, opt)
    assert same_weights(learn.model, model)
    assert layer_values(learn, "momentum") == [0.5, 0]
    learn.fit(1, wd=0.05)
    assert by_name(learn, "weight_decay") == {"0.weight": 0.2, "0.bias": 0.2, "3.weight": 0.05, "3.bias": 0.0}


SCALES, OWN_RATE, OWN_RATES = [{"lr_scale": 0.1}, {}], [{"lr": 1.0}, {}], [{"lr": 1e-4}, {"lr": 1e-2}]


@pytest.mark.parametrize(
    ("options", "learners", "fits", "expected"),
    [
        (SCALES, None, None, [1e-4, 1e-3]),
        (SCALES, 0.2, None, [0.02, 0.2]),
        (SCALES, None, 0.5, [0.05, 0.5]),
        (SCALES, 0.2, 0.5, [0.05, 0.5]),
        (SCALES, None, slice(0.5), [0.05, 0.5]),
        ([{}, {"lr_scale": 10}], None, 0.5, [0.5, 5]),
        ([{"lr_scale": 0.5}, {"lr_scale": 0.25}], 0.2, None, [0.1, 0.05]),
        ([{"lr_scale": 0}, {}], 0.2, None, [0, 0.2]),
        (OWN_RATE, 0.1, None, [1.0, 0.1]),
        (OWN_RATE, 0.1, 0.2, [2.0, 0.2]),
        (OWN_RATES, None, None, [1e-4, 1e-2]),
        (OWN_RATES, 0.5, None, [1e-4, 1e-2]),
        (OWN_RATES, None, 0.1, [1e-3, 0.1]),
        (OWN_RATES, None, [0.3, 0.4], [0.3, 0.4]),
        (OWN_RATES, None, slice(0.3, 0.4), [0.3, 0.4]),
        ([{"lr": 0.5, "lr_scale": 0.1}, {}], 0.2, None, [0.05, 0.2]),
    ],
)
def test_rates_of_a_splitters_groups_are_kept_or_scaled(options, learners, fits, expected):
    learn = make_learner(splitter=groups_with(*options), lr=learners, cbs=Listens())
    learn.fit(1, fits)
    assert learn.listens.rates == [pytest.approx(expected)] * 2
    learn.fit_one_cycle(1, fits, div=1.0)
    assert learn.listens.rates[0] == pytest.approx(expected)
    if not isinstance(fits, list | slice):
        rate = fits or (max(expected) if options is OWN_RATES else learners or max(expected))
        for schedule in (lambda at: rate, SchedNo(rate, rate)):
            learn.fit(1, schedule)
            assert learn.listens.rates[0] == pytest.approx(expected)
    learn.fit(1)
    plain = make_learner(splitter=groups_with(*options), lr=learners, cbs=Listens())
    plain.fit(1)
    assert learn.listens.rates == plain.listens.rates


@pytest.mark.parametrize(
    ("make", "first"),
    [
        (own_learner, [rate / 100 for rate in OWN]),
        (lambda: make_learner(splitter=groups_with(*SCALES), cbs=Listens()), [1e-4, 1e-3]),
    ],
)
def test_the_finder_keeps_the_ratios_of_rates(make, first):
    learn = make()
    learn.lr_find(1e-3, 1.0, num_it=10, stop_div=False, show_plot=False)
    found = learn.listens.rates
    assert found[0] == pytest.approx(first)
    assert found[-1][-1] > 0.4
    assert all(rates == pytest.approx([rates[-1] * rate / first[-1] for rate in first]) for rates in found)


@pytest.mark.parametrize(("options", "ratio"), [(SCALES, 0.1), (OWN_RATES, 0.01), ([{}, {}], 0.05)])
def test_fine_tuning_keeps_the_ratio_of_rates_that_a_splitter_gives(options, ratio):
    learn = make_learner(splitter=groups_with(*options), lr=None, train_bn=False, cbs=Listens())
    before = weights(learn.model)
    learn.freeze()
    learn.fit(1)
    assert torch.equal(learn.model[0].weight, before["0.weight"])
    learn.fine_tune(1, 0.2, lr_mult=20.0, pct_start=0.0)
    assert learn.listens.rates[0] == pytest.approx([0.1 * ratio, 0.1])
    assert trained(learn.model) == {0, 3}


def test_a_schedule_for_all_leaves_what_a_splitter_gives_and_a_list_does_not():
    options = [{"betas": (0.5, 0.9), "weight_decay": 0.3, "eps": 1e-3}, {}]
    learn = make_learner(splitter=groups_with(*options), opt_func=AdamW)
    seen = []

    def look(cb):
        seen.append([layer_values(learn, key) for key in ("betas", "weight_decay")])

    watch = Callback(before_batch=look, order=100)
    learn.fit_one_cycle(1, 0.1, moms=(0.7, 0.7, 0.7), cbs=[watch, ParamScheduler({"weight_decay": SchedNo(0.1, 0.1)})])
    assert seen[0] == [[(0.5, 0.9), (0.7, 0.999)], [0.3, 0.1]]
    learn.fit(1, cbs=[watch, ParamScheduler({"weight_decay": [SchedNo(0.7, 0.7), SchedNo(0.8, 0.8)]})])
    assert seen[-1][1] == [0.7, 0.8]
    assert layer_values(learn, "eps") == [1e-3, 1e-8]
    assert layer_values(learn, "weight_decay") == [0.3, 0.01]


@pytest.mark.parametrize(
    ("found", "error", "match"),
    [
        (lambda m: [{"params": m[0].parameters(), "weight_deacy": 0}, m[3].parameters()], ValueError,
         "group 0 of the splitter has the option 'weight_deacy'; SGD has .*; did you mean 'weight_decay'"),
        (lambda m: [{"params": m[3].parameters(), "wd": 0}], ValueError, "did you mean 'weight_decay'"),
        (lambda m: [{"params": m[3].parameters(), "betas": (0.9, 0.99)}], ValueError, "option 'betas'; SGD has"),
        (lambda m: [m[0].parameters(), {"lr": 0.1}], ValueError, "group 1 of the splitter is a dict of 'lr'; a group"),
        (lambda m: {"body": m[0].parameters(), "head": []}, ValueError, "0 .* a dict of 'body', 'head'; .* list"),
        (lambda m: [{"params": m[0].parameters(), "lr": "fast"}], ValueError, "has lr='fast'; it is a number, 0 or"),
        (lambda m: [{"params": m[0].parameters(), "lr_scale": -1}], ValueError, "lr_scale=-1; it is a number, 0 or"),
        (lambda m: [{"params": m[0].parameters(), "weight_decay": None}], ValueError, "weight_decay=None; it is a"),
        (lambda m: [m[0].parameters(), {"params": [m[0].bias, m[3].bias]}], ValueError,
         "the splitter gives 0.bias twice, in group 0 and in group 1; a parameter has one group"),
        (lambda m: [[m[3].bias, m[3].bias]], ValueError, "gives 3.bias twice, in group 0 and in group 0"),
        (lambda m: [m[0], m[3]], TypeError, "group 0 of the splitter has a Linear in it; a group is a list of"),
        (lambda m: [{"params": m}], TypeError, "group 0 of the splitter has a Linear in it"),
        (lambda m: [m[0].parameters(), m[3]], TypeError, "group 1 of the splitter has a Linear in it"),
        (lambda m: None, TypeError, "group 0 of the splitter has a NoneType in it"),
        (lambda m: [m.named_parameters()], TypeError, "group 0 of the splitter has a .*str.* in it"),
    ],
)  # fmt: skip
def test_groups_that_cannot_be_are_refused(found, error, match):
    with pytest.raises(error, match=match):
        make_learner(splitter=found).fit(1)


def test_a_group_may_have_a_name_and_an_optimizer_of_ones_own_any_option():
    class Own(SGD):
        def step(self, closure=None):
            seen.append([group["kind"] for group in self.param_groups])

    seen = []
    make_learner(splitter=groups_with({"name": "body"}, {"name": "head"})).fit(1)
    make_learner(splitter=groups_with({"kind": 1}, {"kind": 2}), opt_func=Own).fit(1)
    assert seen == [[1, 2]] * 2


def test_one_dict_is_one_group_and_the_users_dicts_stay_as_they_are():
    model = make_model()
    own = {"params": list(model[3].parameters()), "lr": 0.5}
    learn = make_learner(model=model, splitter=lambda model: own, lr=None)
    learn.fit(1)
    assert own.keys() == {"params", "lr"}
    assert group_values(learn) == [0.5]
    assert optim.n_groups(learn.opt) == 1


def test_options_are_those_of_the_script_after_a_file_is_loaded():
    def make(*options):
        return make_learner(splitter=groups_with(*options), opt_func=AdamW, lr=0.1)

    first, second = make({"lr_scale": 0.5, "weight_decay": 0.3}, {}), make({}, {"lr_scale": 0.1, "weight_decay": 0.2})
    first.fit(1, wd=0.1)
    first.save("other")
    second.load("other").fit(1, wd=0.05)
    assert layer_values(second) == pytest.approx([0.1, 0.01])
    assert by_name(second, "weight_decay") == {"0.weight": 0.05, "0.bias": 0.0, "3.weight": 0.2, "3.bias": 0.2}


def test_a_resumed_run_with_options_ends_as_a_whole_one(tmp_path):
    splitter = groups_with({"lr_scale": 0.5, "weight_decay": 0.3}, {"lr": 0.02})

    def train(learn):
        learn.fit_one_cycle(2, 0.05, wd={"*bias": 0.01, "*": 0.2})
        learn.fit(1, wd=0.1)

    make = partial(make_learner, splitter=splitter, opt_func=AdamW, lr=0.01)
    resumed, whole = died_and_whole(tmp_path, make, train)
    assert layer_values(whole) == layer_values(resumed) == [0.005, 0.02]


def test_several_optimizers_take_decays_by_the_models_names():
    learn = make_learner(cls=TwoAndOne, wd={"3.bias": 0.4, "*.weight": 0.2})
    learn.fit(1)
    decays = {name: [group["weight_decay"] for group in opt.param_groups] for name, opt in learn.opt.items()}
    assert decays == {"a": [0.2, 0], "b": [0.2, 0.4]}


def test_options_of_groups_are_shown(capsys):
    learn = make_learner(splitter=groups_with({"lr_scale": 0.5, "weight_decay": 0.3}, {}), wd=0.05)
    assert "optimizer  SGD, lr 0.1, weight decay 0.05" in repr(learn)
    learn.check()
    assert "ok  optimizer   SGD, lr 0.05, 0.1, weight decay 0, 0.05, 0.3\n" in capsys.readouterr().out
    learn.fit(0)
    assert "optimizer  SGD, lr 0.05, 0.1, weight decay 0, 0.05, 0.3\n" in repr(learn)


# The optimizer


def test_the_optimizer_is_plain_torch():
    learn = make_learner(opt_func=AdamW)
    assert learn.opt is None
    learn.fit(1)
    assert type(learn.opt) is AdamW
    params = [p for group in learn.opt.param_groups for p in group["params"]]
    assert [id(p) for p in params] == [id(p) for p in learn.model.parameters()]


def test_optimizer_state_survives_unless_reset():
    def run(reset):
        learn = make_learner(opt_func=AdamW, lr=0.01)
        learn.fit(1)
        opt = learn.opt
        learn.fit(1, reset_opt=reset)
        assert (learn.opt is opt) is not reset
        steps = {float(state["step"]) for state in learn.opt.state.values()}
        assert steps == {2.0 if reset else 4.0}
        return learn

    kept, reset = run(False), run(True)
    assert not same_weights(kept.model, reset.model)
    for fit in ("fit", "fit_one_cycle"):
        opt = kept.opt
        getattr(kept, fit)(1, reset_opt=True)
        assert kept.opt is not opt


def test_layers_that_are_replaced_between_fits_train_with_a_new_optimizer(capsys):
    learn = make_learner()
    for name, new in (("3.weight, 3.bias", nn.Linear(6, 1)), ("0.weight, 0.bias", nn.Linear(4, 6))):
        learn.fit(1)
        learn.model[int(name[0])] = new
        before, opt = weights(learn.model), learn.opt
        capsys.readouterr()
        learn.fit_one_cycle(1)
        assert capsys.readouterr().out.startswith(f"the model has new parameters ({name}): a new optimizer")
        assert not torch.equal(new.weight, before[f"{name[0]}.weight"])
        assert learn.opt is not opt
    learn.model = make_model(seed=5)
    learn.lr_find(num_it=10, show_plot=False)
    before = weights(learn.model)
    learn.fit(1)
    assert not same_weights(before, learn.model)


def test_layers_that_are_replaced_after_create_opt_is_called_are_trained_too(capsys):
    learn = make_learner()
    learn.create_opt()
    learn.fit(1)
    learn.model[3] = nn.Linear(6, 1)
    before = weights(learn.model)
    learn.fit(1)
    assert "the model has new parameters (3.weight, 3.bias): a new optimizer is made" in capsys.readouterr().out
    assert not torch.equal(learn.model[3].weight, before["3.weight"])


def resize(layer, rows):
    """Give a layer more outputs in place, as `resize_token_embeddings` of transformers does."""
    for p in layer.parameters():
        p.data = torch.cat([p.data, p.data.new_zeros(rows - len(p), *p.shape[1:])])


def test_parameters_that_get_another_shape_between_fits_train_with_a_new_optimizer(capsys):
    def train(model, fit):
        for rows in (6, 200, 5000):  # Beyond the end of a smaller state torch's fused kernel would write elsewhere.
            resize(model[0], rows)
            model[3].weight.data = torch.ones(1, rows) / rows
            fit()

    learn, model = make_learner(opt_func=AdamW, lr=0.01), make_model()

    def loop():
        opt = AdamW(model.parameters(), lr=0.01, fused=True)
        for x, y in learn.dls.train:
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
            opt.step()

    train(learn.model, lambda: learn.fit(1))
    train(model, loop)
    assert same_weights(learn.model, model)
    assert capsys.readouterr().out.count("the model has new parameters (0.weight, 0.bias, 3.weight)") == 2


def test_a_parameter_that_gets_another_shape_in_a_fit_needs_its_state_removed():
    class Grow(Callback):
        def __init__(self, removes):
            super().__init__()
            self.removes = removes

        def before_epoch(self):
            if self.epoch == 1:
                resize(self.model[0], 50)
                self.model[3].weight.data = torch.ones(1, 50) / 50
                for p in self.model.parameters():
                    if self.removes:
                        self.opt.state.pop(p)

    learn = make_learner(opt_func=AdamW)
    with raises(ValueError, "another shape than their state in the optimizer, such as float32 tensor of shape (50, "):
        learn.fit(2, cbs=Grow(False))
    learn = make_learner(opt_func=AdamW)
    learn.fit(2, cbs=Grow(True))
    assert learn.model[0].weight[:, 0].abs().min() > 0


def test_parameters_that_the_splitter_leaves_out_are_no_new_ones(capsys):
    learn = make_learner(splitter=lambda model: [model[3].parameters()])
    learn.model[0].requires_grad_(False)
    learn.fit(1)
    opt = learn.opt
    learn.model[0].requires_grad_(True)
    learn.fit(1)
    assert learn.opt is opt
    assert "new parameters" not in capsys.readouterr().out
    for _ in range(2):  # a part that is replaced, and left out again: the optimizer keeps its state
        learn.model[0] = nn.Linear(4, 6)
        learn.fit(1)
        assert learn.opt is opt
    assert "new" not in capsys.readouterr().out
    learn.model[0], learn.opt = nn.Linear(4, 6), SGD(learn.model[3].parameters(), 0.1)  # the user's own
    opt = learn.opt
    learn.fit(1)
    assert learn.opt is opt


def test_frozen_parameters_wait_in_the_optimizer():
    learn = make_learner()
    learn.model[0].requires_grad_(False)
    before = weights(learn.model)
    learn.fit(1)
    assert torch.equal(learn.model[0].weight, before["0.weight"])
    assert not torch.equal(learn.model[3].weight, before["3.weight"])
    learn.model[0].requires_grad_(True)
    learn.fit(1)
    assert not torch.equal(learn.model[0].weight, before["0.weight"])


# Weight decay


@pytest.mark.parametrize("opt_func", [SGD, AdamW])
def test_without_wd_the_optimizers_own_stays(opt_func):
    learn = make_learner(model=norm_model(), opt_func=opt_func)
    learn.fit(1)
    assert set(by_name(learn, "weight_decay").values()) == {opt_func([torch.ones(1)]).defaults["weight_decay"]}
    assert len(learn.opt.param_groups) == 1


@pytest.mark.parametrize("given_to", ["learner", "fit"])
@pytest.mark.parametrize("wd_bn_bias", [False, True])
@pytest.mark.parametrize("splitter", [None, lambda m: [list(m[:2].parameters()), list(m[2:].parameters())]])
@pytest.mark.parametrize("wd", [0.3, 0.0])
def test_wd_goes_to_weights_unless_told_otherwise(given_to, wd_bn_bias, splitter, wd):
    own, later = ({"wd": wd}, {}) if given_to == "learner" else ({"wd": 0.9}, {"wd": wd})
    learn = make_learner(model=norm_model(), opt_func=AdamW, wd_bn_bias=wd_bn_bias, splitter=splitter, **own)
    learn.fit(1, **later)
    for name, decay in by_name(learn, "weight_decay").items():
        assert decay == (wd if wd_bn_bias or name in ("0.weight", "3.weight") else 0.0), name
    assert optim.n_groups(learn.opt) == (2 if splitter else 1)


def test_wd_of_a_later_fit_keeps_the_optimizers_state():
    learn = make_learner(opt_func=AdamW, lr=0.01)
    learn.fit(1)
    opt, state = learn.opt, {id(p): s for p, s in learn.opt.state.items()}
    learn.fit(0, wd=0.5)
    assert learn.opt is opt
    assert {id(p): s for p, s in opt.state.items()} == state
    assert by_name(learn, "weight_decay") == {"0.weight": 0.5, "0.bias": 0.0, "3.weight": 0.5, "3.bias": 0.0}
    learn.fit(1, wd=0.1)
    assert by_name(learn, "weight_decay")["3.weight"] == 0.1
    assert len(opt.param_groups) == 2
    assert {float(s["step"]) for s in opt.state.values()} == {4.0}


def test_splitting_the_groups_changes_no_number():
    plain, split = (make_learner(opt_func=partial(AdamW, weight_decay=0.0), lr=0.01) for _ in range(2))
    for learn in (plain, split):
        learn.fit(1)
    optim.set_decay(split.opt, split.model, 0.0, wd_bn_bias=False)
    assert len(split.opt.param_groups) == 2
    for learn in (plain, split):
        learn.fit(2)
    assert same_weights(plain.model, split.model)


BY_NAME = {"*bias": 0, "2.*": 0.01, "*": 0.3}


def test_wd_is_given_by_patterns_of_names():
    learn = make_learner(model=norm_model(), opt_func=AdamW, lr=0.01, wd=BY_NAME)
    learn.fit(1)
    expected = {name: 0 if name.endswith("bias") else 0.3 for name, _ in learn.model.named_parameters()}
    assert by_name(learn, "weight_decay") == expected | {"2.weight": 0.01}
    assert len(learn.opt.param_groups) == 3
    opt, state = learn.opt, {id(p): s for p, s in learn.opt.state.items()}
    learn.fit(0, wd={"3.weight": 0.5})  # the others keep what they have
    assert by_name(learn, "weight_decay") == expected | {"2.weight": 0.01, "3.weight": 0.5}
    learn.fit(0, wd={"*": 0.1})
    assert len(opt.param_groups) == 1
    assert [id(p) for p in opt.param_groups[0]["params"]] == [id(p) for p in learn.model.parameters()]
    learn.fit(1, wd=0.2)
    assert {name for name, decay in by_name(learn, "weight_decay").items() if decay} == {"0.weight", "3.weight"}
    assert learn.opt is opt
    assert {id(p): s for p, s in opt.state.items()} == state
    assert {float(s["step"]) for s in opt.state.values()} == {4.0}


@pytest.mark.parametrize("wd", [None, 0.1, {"*bias": 0.0}])
def test_a_decay_for_one_fit_leaves_later_fits_the_learners(wd):
    learn = make_learner(model=norm_model(), opt_func=AdamW, lr=0.01, wd=wd)
    learn.fit(1)
    before = by_name(learn, "weight_decay")
    for other in (0.5, {"*": 0.3}, {"3.weight": 0.2}):
        learn.fit(1, wd=other)
        assert by_name(learn, "weight_decay")["3.weight"] in (0.5, 0.3, 0.2)
        learn.fit(1)
        assert by_name(learn, "weight_decay") == before


@pytest.mark.parametrize(
    ("wd", "groups"),
    [
        (0.5, {"0.weight 3.weight": 0.5, "0.bias 3.bias": 0.0}),
        ({"*bias": 0.2, "0.*": 0.5}, {"0.weight": 0.5, "0.bias 3.bias": 0.2, "3.weight": 0.01}),
    ],
)
def test_decay_does_what_torch_does_with_such_groups(wd, groups):
    learn, model = make_learner(opt_func=AdamW, lr=0.01, wd=wd), make_model()
    learn.fit(2)
    parts = [(list(map(model.get_parameter, names.split())), decay) for names, decay in groups.items()]
    opt = AdamW([{"params": params, "weight_decay": decay} for params, decay in parts], lr=0.01, fused=True)
    by_hand(model, DataLoader(make_data(), 4), 2, opt)
    assert same_weights(learn.model, model)


def test_names_win_over_what_a_splitter_gives_and_a_later_number_does_not():
    learn = make_learner(splitter=groups_with({"weight_decay": 0.3}, {}))
    learn.fit(1, wd={"0.weight": 0.1})
    assert by_name(learn, "weight_decay") == {"0.weight": 0.1, "0.bias": 0.3, "3.weight": 0, "3.bias": 0}
    learn.fit(1, wd=0.2)
    assert by_name(learn, "weight_decay") == {"0.weight": 0.3, "0.bias": 0.3, "3.weight": 0.2, "3.bias": 0}


@pytest.mark.parametrize(
    ("wd", "error", "match"),
    [
        ({"*wieght": 0.1}, ValueError, "'\\*wieght', and Sequential has no parameter of such a name; it has 0.weight, "
         ".*; did you mean 'weight'"),
        ({"*": 0.1, "*bias": 0}, ValueError,
         r"got wd with '\*bias' after patterns that match the same parameters \(0.bias"),
        ({"*": -0.1}, ValueError, "got wd with '\\*'=-0.1; it is a number, 0 or more"),
        ({"*": None}, ValueError, "got wd with '\\*'=None; it is a number"),
        (-0.1, ValueError, "got wd=-0.1; it is a number, 0 or more"),
        ("0.1", ValueError, "got wd='0.1'; it is a number, 0 or more"),
    ],
)  # fmt: skip
def test_other_decays_are_refused(wd, error, match):
    for learn, given in ((make_learner(), {"wd": wd}), (make_learner(wd=wd), {})):
        with pytest.raises(error, match=match):
            learn.fit(1, **given)


def test_a_weight_that_two_modules_share_has_both_names():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    model[1].weight = model[0].weight
    learn = make_learner(model=model, wd={"1.weight": 0, "*": 0.1})
    learn.fit(1)
    assert by_name(learn, "weight_decay")["0.weight"] == 0


DECAYS = [None, 0.2, {"*bias": 0.1, "*": 0.3}, {"3.*": 0.0}]


@pytest.mark.slow
@pytest.mark.parametrize("before", DECAYS)
@pytest.mark.parametrize("after", DECAYS)
def test_state_goes_from_any_groups_of_decays_to_any_others(before, after, tmp_path):
    def make():
        return make_learner(opt_func=AdamW, lr=0.01, splitter=halves, path=tmp_path)

    whole, first, second = make(), make(), make()
    for learn in (whole, first):
        learn.fit(1, wd=before)
    first.save("model")
    second.fit(1, wd=after)  # so that its groups are split otherwise
    second.load("model")
    for learn in (whole, second):
        learn.fit(1, wd=after)
    assert by_name(whole, "weight_decay") == by_name(second, "weight_decay")
    assert same_weights(whole.model, second.model)


@pytest.mark.parametrize("option", ["betas", "weight_decay"])
def test_parts_that_the_user_made_of_a_group_stay_apart(option, tmp_path):
    values = {"betas": [(0.5, 0.9), (0.6, 0.9)], "weight_decay": [0.1, 0.2]}[option]

    def parted(groups, lr):
        pairs = [(group, pair) for group in groups for pair in zip(group["params"], values, strict=True)]
        return AdamW([{**group, "params": [p], option: value} for group, (p, value) in pairs])

    learn, other = (make_learner(opt_func=parted, splitter=halves, path=tmp_path) for _ in range(2))
    for wd in (0.4, {"*": 0.5}, {"0.*": 0.1}):
        learn.fit(1, wd=wd)
        assert len(learn.opt.param_groups) == 4
        if option == "betas":
            assert list(by_name(learn, "betas").values()) == values * 2
    learn.save("model")
    other.load("model")
    for each in (learn, other):
        each.fit(1)
    assert same_weights(learn.model, other.model)


def test_a_state_of_places_that_cannot_be_is_refused():
    learn = make_learner(opt_func=AdamW, wd=0.1)
    learn.fit(1)
    for places in ([0, 1], [0, 7], "ab", 3):
        state = copy.deepcopy(learn.opt.state_dict())
        state["param_groups"][1]["splitter_places"] = places
        with pytest.raises(ValueError, match="its optimizer has groups of|its optimizer's state is damaged"):
            optim.load_state(learn.opt, state)


def test_files_of_before_whole_groups_were_numbered_are_read():
    def splitter(model):
        return [[], *halves(model)]

    first, second = (make_learner(opt_func=AdamW, lr=0.01, wd=0.1, splitter=splitter) for _ in range(2))
    for learn in (first, second):
        learn.fit(1)
    state = copy.deepcopy(first.opt.state_dict())
    for group in state["param_groups"]:
        del group["whole_group"]
    optim.load_state(second.opt, state)
    for learn in (first, second):
        learn.fit(1)
    assert same_weights(first.model, second.model)


def test_a_scheduled_decay_leaves_those_without():
    learn, seen = make_learner(wd={"3.weight": 0.2, "*": 0}), []
    watch = Callback(before_batch=lambda cb: seen.append(by_name(learn, "weight_decay")), order=100)
    for wd, scheduled in ((None, {"3.weight"}), (0.0, {"0.weight", "3.weight"})):
        learn.fit(1, wd=wd, cbs=[watch, ParamScheduler({"weight_decay": SchedNo(0.5, 0.5)})])
        assert {name for name, decay in seen[-1].items() if decay == 0.5} == scheduled
        assert set(seen[-1].values()) == {0.5, 0}
    assert set(by_name(learn, "weight_decay").values()) == {0.0}


def test_what_a_model_itself_names_gets_no_decay():
    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.pos_embed, self.table = nn.Parameter(torch.zeros(4)), nn.Linear(4, 4, bias=False)
            self.body = make_model()

        def forward(self, x):
            return self.body(self.table(x + self.pos_embed))

        def no_weight_decay(self):
            return {"pos_embed", "table.*"}

    learn = make_learner(model=nn.Sequential(Embedded()), wd=0.1)
    learn.fit(1)
    decays = by_name(learn, "weight_decay")
    assert {name for name, decay in decays.items() if decay} == {"0.body.0.weight", "0.body.3.weight"}


def test_norms_and_biases_are_found_in_every_norm():
    norms = [nn.BatchNorm1d(3), nn.BatchNorm2d(3), nn.LayerNorm(3), nn.GroupNorm(1, 3), nn.RMSNorm(3)]
    norms.append(nn.InstanceNorm1d(3, affine=True))
    model = nn.Sequential(*norms, nn.Linear(3, 3), nn.LSTM(3, 3), nn.Embedding(3, 3), nn.Conv1d(3, 3, 1))
    found = optim.without_decay(model)
    for i, module in enumerate(model):
        for name, p in module.named_parameters():
            assert (id(p) in found) is (i < len(norms) or name.startswith("bias") or name.endswith("_bias")), (
                module,
                name,
            )


def test_an_optimizer_without_decay_says_so():
    class Plain(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        def step(self):
            pass

    make_learner(opt_func=Plain).fit(1)
    with pytest.raises(ValueError, match=r"Plain has no hyper-parameter 'weight_decay'; it has \['lr'\]"):
        make_learner(opt_func=Plain, wd=0.1).fit(1)


def test_several_optimizers_each_get_rate_and_decay():
    class Both(Learner):
        def create_opt(self):
            self.opt = {"a": SGD(self.model[0].parameters(), lr=1.0), "b": AdamW(self.model[3].parameters(), lr=2.0)}

    learn = make_learner(cls=Both)
    learn.fit(1, 0.25, wd=0.125)
    for opt, layer in zip(learn.opt.values(), (learn.model[0], learn.model[3]), strict=True):
        assert [(g["lr"], g["weight_decay"]) for g in opt.param_groups] == [(0.25, 0.125), (0.25, 0.0)]
        assert opt.param_groups[0]["params"] == [layer.weight]


def rates_of(learn):
    return {name: [group["lr"] for group in opt.param_groups] for name, opt in learn.opt.items()}


def test_rates_by_the_names_of_optimizers():
    learn = make_learner(cls=TwoAndOne, lr={"a": 0.5, "b": [0.1, 0.2]})
    learn.fit(1)
    assert rates_of(learn) == {"a": [0.5], "b": [0.1, 0.2]}
    learn.fit(1, {"b": slice(0.01)})  # what is left out has the Learner's
    assert rates_of(learn) == {"a": [0.5], "b": [0.001, 0.01]}
    learn.fit(1, 0.25)
    assert rates_of(learn) == {"a": [0.25], "b": [0.25, 0.25]}
    with pytest.raises(ValueError, match="got 'beta' as an optimizer's name; the learner has 'a', 'b'"):
        learn.fit(1, {"beta": 0.1})


# Hyper-parameters


def test_momentum_means_the_first_of_betas_too():
    params = [torch.ones(1, requires_grad=True)]
    adam, sgd, plain = Adam(params, betas=(0.9, 0.99)), SGD(params, momentum=0.5), torch.optim.Adagrad(params)
    for opt in (adam, sgd):
        optim.set_hyper(opt, "momentum", 0.8)
    assert adam.param_groups[0]["betas"] == (0.8, 0.99)
    assert sgd.param_groups[0]["momentum"] == 0.8
    assert [optim.has_momentum(opt) for opt in (adam, sgd, plain, SGD(params))] == [True, True, False, True]
    assert not optim.has_momentum(torch.optim.RMSprop(params))
    with pytest.raises(ValueError, match="no hyper-parameter 'mom'.*did you mean 'momentum'"):
        optim.set_hyper(adam, "mom", 0.8)
    with pytest.raises(ValueError, match="Adagrad has no hyper-parameter 'momentum'"):
        optim.set_hyper(plain, "momentum", 0.8)
    with pytest.raises(ValueError, match=r"Adam has no hyper-parameter 'betas'; it has \[.*'momentum'\]"):
        optim.set_hyper(adam, "betas", 0.8)


# Freezing


def normed():
    return nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def three_parts(model):
    return [[*model[:2].parameters()], [*model[2:4].parameters()], [*model[4].parameters()]]


def trained(model):
    """The modules with trainable parameters, by place."""
    return {int(name[0]) for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("n", "bare", "with_norms"),
    [
        (0, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}),
        (1, {2, 3, 4}, {1, 2, 3, 4}),
        (2, {4}, {1, 3, 4}),
        (-1, {4}, {1, 3, 4}),
        (-3, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}),
    ],
)
def test_groups_are_frozen(n, bare, with_norms):
    for train_bn, expected in ((False, bare), (True, with_norms)):
        learn = make_learner(model=normed(), splitter=three_parts, train_bn=train_bn)
        learn.freeze_to(n)
        assert trained(learn.model) == expected
        learn.unfreeze()
        assert trained(learn.model) == {0, 1, 2, 3, 4}
        learn.freeze()
        assert trained(learn.model) == ({4} if not train_bn else {1, 3, 4})


@pytest.mark.parametrize("n", [3, -4, 1.0, None])
def test_a_group_that_is_not_there_cannot_be_frozen_to(n):
    learn = make_learner(model=normed(), splitter=three_parts)
    with pytest.raises(ValueError, match=r"3 parameter groups \(the splitter's groups\); it takes -3 to 2"):
        learn.freeze_to(n)


def test_frozen_groups_stay_and_the_others_learn():
    data = DataLoaders(DataLoader(make_data(8, n_in=2), 4), device="cpu")
    learn = make_learner(data, normed(), splitter=three_parts, train_bn=False, opt_func=AdamW, wd=0.1)
    learn.fit(1)
    assert len(learn.opt.state) == 10
    learn.freeze_to(1)
    assert not learn.opt.state  # it belongs to what was trained before
    before = weights(learn.model)
    learn.fit(1, slice(1e-3, 1e-1))
    changed = {name[0] for name, p in learn.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"2", "3", "4"}
    assert len(learn.opt.state) == 6
    learn.unfreeze()
    learn.fit(1)
    assert len(learn.opt.state) == 10


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_an_empty_group_counts(empty):
    def splitter(model):
        found = halves(model)
        found.insert(empty, [])
        return found

    learn = make_learner(splitter=splitter)
    learn.fit(1, [0.1, 0.2, 0.3])
    assert [g["lr"] for g in learn.opt.param_groups] == [rate for i, rate in enumerate([0.1, 0.2, 0.3]) if i != empty]


def test_layers_without_a_shape_are_frozen_and_unfrozen():
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(1))
    learn = make_learner(model=model, splitter=lambda m: [[*m[0].parameters()], [*m[1].parameters()]])
    learn.freeze()
    learn.fit(1)
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]


def test_parameters_of_whole_numbers_cannot_be_trained():
    model = normed()
    model.scale = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    learn = make_learner(model=model, splitter=lambda m: [[m.scale, *m[:2].parameters()], [*m[2:].parameters()]])
    learn.freeze()
    learn.unfreeze()
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["scale"]


def test_without_a_splitter_there_is_one_group():
    learn = make_learner(model=normed())
    with pytest.warns(UserWarning, match="there is a single group of parameters, so freezing leaves all") as said:
        learn.freeze()
    assert len(said) == 1
    assert trained(learn.model) == {0, 1, 2, 3, 4}


# The implementation


@pytest.mark.parametrize("opt_func", [AdamW, SGD, partial(AdamW, betas=(0.8, 0.9)), partial(SGD, momentum=0.9)])
def test_torchs_optimizers_are_fused(opt_func):
    learn = make_learner(opt_func=opt_func)
    learn.create_opt()
    assert all(group["fused"] for group in learn.opt.param_groups)
    by_hand = make_learner(opt_func=partial(opt_func, fused=False))
    learn.fit(2)
    by_hand.fit(2)
    # Over 12 seeds and any of torch's vector instructions they were 2e-7 apart at most.
    torch.testing.assert_close(weights(learn.model), weights(by_hand.model), rtol=1e-5, atol=1e-6)


class SetsWeights(Callback):
    """Sets the weights of a layer in the middle of a fit, as a spline layer of a KAN does that gets a new grid."""

    run_valid = False

    def __init__(self, lay_out):
        super().__init__()
        self.lay_out = lay_out

    def before_batch(self):
        if self.train_iter == 2:
            weight = self.model[0].weight
            weight.data = self.lay_out(weight.data)


def by_columns(x):
    return x.T.contiguous().T


def with_gaps(x):
    return torch.cat([x, x], 1)[:, : x.shape[1]]


class SetsGradients(Learner):
    """Sets gradients whose memory layout is another one than that of the weights."""

    def _backward(self):
        params = list(self.model.parameters())
        for p, g in zip(params, torch.autograd.grad(self.loss_grad, params), strict=True):
            p.grad = by_columns(g) if g.ndim == 2 else g


@pytest.mark.parametrize("lay_out", [None, by_columns, with_gaps])
@pytest.mark.parametrize("opt_func", [Adam, AdamW, partial(torch.optim.SGD, momentum=0.9), SGD, torch.optim.Adagrad])
def test_fused_optimizers_take_weights_and_gradients_of_any_memory_layout(lay_out, opt_func):
    def trained(**options):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
        kind, cbs = (Learner, SetsWeights(lay_out)) if lay_out else (SetsGradients, None)
        learn = kind(make_dls(), model, nn.MSELoss(), opt_func=partial(opt_func, **options), lr=0.1, cbs=cbs)
        learn.fit(2)
        assert learn.opt.param_groups[0]["fused"] is (not options and lay_out is not with_gaps)
        return model.state_dict()

    torch.testing.assert_close(trained(), trained(fused=False), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("option", [{"fused": False}, {"foreach": True}, {"differentiable": True}])
def test_an_implementation_that_was_chosen_is_left(option):
    learn = make_learner(opt_func=partial(partial(AdamW, **option), weight_decay=0.1))
    learn.create_opt()
    assert not learn.opt.param_groups[0]["fused"]
    assert all(learn.opt.param_groups[0][name] == value for name, value in option.items())


def test_what_has_no_fused_implementation_is_as_it_was():
    class Mine(AdamW):
        """Somebody's own optimizer may not know `fused` in its step."""

    complex_model = nn.Linear(4, 1, dtype=torch.complex64)
    sparse = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    cases = [(Rprop, None), (Mine, None), (lambda params, lr: SGD(params, lr), None)]
    for opt_func, model in [*cases, (AdamW, complex_model), (SGD, sparse)]:
        learn = make_learner(model=model, opt_func=opt_func)
        learn.create_opt()
        assert not learn.opt.param_groups[0].get("fused")
        assert learn.opt.param_groups[0]["splitter_group"] == 0


# Where its state lies


def images():
    data = TensorDataset(torch.randn(8, 3, 6, 6), torch.randint(3, (8,)))
    return DataLoaders(DataLoader(data, 4), device="cpu")


def network():
    conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    return nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


@pytest.mark.parametrize("way", ["moved", "loaded"])
def test_state_lies_in_memory_as_its_parameter_does(way, tmp_path):
    torch.manual_seed(0)
    dls, model = images(), network()
    plain, other = (
        make_learner(dls, m, nn.CrossEntropyLoss(), opt_func=AdamW, lr=0.01, path=tmp_path)
        for m in (model, copy.deepcopy(model))
    )
    plain.fit(1)
    if way == "moved":
        other.fit(1)
        other.model.to(memory_format=torch.channels_last)
    else:
        other.model.to(memory_format=torch.channels_last)
        plain.save("plain")
        other.load("plain")
        assert other.opt.state[other.model[0][2].weight]["exp_avg"].stride() == other.model[0][2].weight.stride()
    for learn in (plain, other):
        learn.fit(2)
    for a, b in zip(plain.model.parameters(), other.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize(("option", "there"), [({}, False), ({"fused": True}, True), ({"capturable": True}, True)])
def test_state_comes_to_the_device_of_its_parameter(option, there):
    for shape in ((2,), ()):
        p = nn.Parameter(torch.ones(shape, device="meta"))
        opt = AdamW([p])
        opt.param_groups[0].update(option)
        opt.state[p] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(shape)}
        optim.state_to_params(opt)
        assert opt.state[p]["exp_avg"].is_meta
        assert opt.state[p]["step"].is_meta == there


class MasterWeights(Optimizer):
    """SGD of bfloat16 parameters, on copies in float32."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(master=p.float(), steps=torch.zeros((), dtype=torch.int64))
            state["steps"] += 1
            p.copy_(state["master"].sub_(p.grad.float(), alpha=self.param_groups[0]["lr"]))


@pytest.mark.parametrize("way", ["resumed", "loaded"])
@pytest.mark.parametrize(("opt_func", "dtype"), [(MasterWeights, torch.bfloat16), (torch.optim.NAdam, torch.float64)])
def test_loaded_state_has_the_type_that_the_optimizer_keeps(opt_func, dtype, way):
    def make():
        data = TensorDataset(*(t.to(dtype) for t in make_data(32).tensors))
        return make_learner(DataLoaders(DataLoader(data, 4), device="cpu"), make_model().to(dtype), opt_func=opt_func)

    learn, other = make(), make()
    if way == "resumed":
        make().fit(1, cbs=CheckpointCallback("run"))
        learn.fit(2)
        other.fit(2, cbs=CheckpointCallback("run", resume=True))
    else:
        learn.fit(1)
        learn.save("one")
        other.load("one")
    for a, b in zip(learn.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
        kept, loaded = learn.opt.state[a], other.opt.state[b]
        assert kept.keys() == loaded.keys() != set()
        for name, value in kept.items():
            assert loaded[name].dtype == value.dtype
            assert torch.equal(loaded[name], value)


def test_state_of_another_type_of_parameters_is_cast():
    class Mean(Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_(mean.lerp_(p.grad, 0.1), alpha=self.param_groups[0]["lr"])

    def make(dtype):
        data = TensorDataset(*(t.to(dtype) for t in make_data(8).tensors))
        return make_learner(DataLoaders(DataLoader(data, 4), device="cpu"), make_model().to(dtype), opt_func=Mean)

    learn, other = make(torch.float32), make(torch.bfloat16)
    learn.fit(1)
    learn.save("one")
    other.load("one")
    assert {state["mean"].dtype for state in other.opt.state.values()} == {torch.bfloat16}
    other.fit(1)


# Gradients


def with_gradients(opt_class=SGD):
    model = make_model()
    model(torch.ones(4, 4)).sum().backward()
    return list(model.parameters()), opt_class(model.parameters(), lr=0.1)


def test_gradients_are_dropped_as_torch_drops_them():
    params, opt = with_gradients()
    optim.clear_gradients(opt)
    assert [p.grad for p in params] == [None] * len(params)
    first, second = with_gradients(), with_gradients()
    optim.clear_gradients(optim.Optimizers(a=first[1], b=second[1]))
    assert {p.grad for p in (*first[0], *second[0])} == {None}


def test_a_zero_grad_of_the_users_own_is_called(monkeypatch):
    class Zeros(SGD):
        def zero_grad(self, set_to_none=False):
            super().zero_grad(set_to_none)

    params, opt = with_gradients(Zeros)
    optim.clear_gradients(opt)
    assert all(p.grad is not None and not p.grad.any() for p in params)
    params, opt = with_gradients()
    opt.zero_grad = lambda: None
    optim.clear_gradients(opt)
    assert all(p.grad is not None for p in params)
    del opt.zero_grad
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", lambda self: None)
    optim.clear_gradients(opt)
    assert all(p.grad is not None for p in params)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_parameter_may_get_its_first_gradient_later_than_others(momentum):
    """torch's fused SGD with momentum alone fails."""
    found = []
    for options in ({}, {"fused": False}):
        torch.manual_seed(0)
        net = nn.ModuleList(nn.Linear(2, 1) for _ in range(3)).double()
        opt_func = partial(SGD, momentum=momentum, **options)
        opt = optim.make_optimizer(opt_func, optim.make_groups(net, None), 0.1, net)
        for used in ([0], [0, 1], [1], [0, 1], [0, 2], [0, 1, 2], [0, 1, 2]):
            sum((net[i](torch.ones(3, 2).double()) ** 2).sum() for i in used).backward()
            opt.step()
            optim.clear_gradients(opt)
        found.append([p.detach().clone() for p in net.parameters()])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("again", ["cleared", "loaded"])
def test_a_parameter_may_get_its_first_gradient_later_after_a_state_is_lost(again):
    """All parameters have had a momentum before; then a part of them is trained, and then all."""
    found = []
    for options in ({}, {"fused": False}):
        learn = make_learner(opt_func=partial(SGD, momentum=0.9, **options))
        learn.model[0].requires_grad_(False)
        learn.fit(1)
        of_head = copy.deepcopy(learn.opt.state_dict())
        learn.model[0].requires_grad_(True)
        learn.fit(1)
        if again == "loaded":
            learn.opt.load_state_dict(of_head)
        else:
            learn.freeze_to(0)
            learn.model[0].requires_grad_(False)
            learn.fit(1)
            learn.model[0].requires_grad_(True)
        learn.fit(1)
        found.append(weights(learn.model))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("n_fits", [0, 1])
def test_the_rate_in_an_opt_func_that_is_set_later_counts(n_fits):
    learn = make_learner(opt_func=partial(Adam, lr=0.5), lr=None)
    for _ in range(n_fits):
        learn.fit(1)
    learn.opt_func = partial(SGD, lr=0.125)
    learn.fit(1, reset_opt=True)
    assert [group["lr"] for group in learn.opt.param_groups] == [learn.lr] == [0.125]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda learn: pickle.loads(pickle.dumps(learn))])
@pytest.mark.parametrize("change", ["thawed", "laid out anew"])
def test_a_copy_of_a_learner_trains_as_the_learner_does(copied, change):
    """torch leaves the hooks of an optimizer out of its copies."""

    def turn(cb):
        weight = cb.model[0].weight
        weight.data = weight.data.T.contiguous().T

    found = []
    for options in ({}, {"fused": False}):
        learn = make_learner(opt_func=partial(SGD, momentum=0.9, **options))
        learn.model[0].requires_grad_(change != "thawed")
        learn.fit(1)
        learn = copied(learn)
        learn.model[0].requires_grad_(True)
        learn.fit(1, cbs=Callback(before_step=turn) if change != "thawed" else None)
        found.append(weights(learn.model))
    torch.testing.assert_close(*found)


def test_a_dict_of_optimizers_may_be_assigned(tmp_path):
    made, assigned = make_learner(cls=TwoAndOne, path=tmp_path), make_learner(path=tmp_path)
    first, last = assigned.model[0], assigned.model[3]
    groups = [{"params": [last.weight]}, {"params": [last.bias]}]
    assigned.opt = {"a": SGD(first.parameters(), 1.0), "b": AdamW(groups)}
    for learn in (made, assigned):
        learn.fit(1, 0.1)
        learn.save("both")
        learn.load("both")
        learn.fit_one_cycle(1, {"a": 0.1, "b": [0.01, 0.02]})
    assert same_weights(made.model, assigned.model)


def test_a_state_of_parameters_that_a_callback_took_out_of_their_group_is_refused_in_words(tmp_path):
    def freeze(cb):
        first = set(cb.model[0].parameters())
        for group in cb.opt.param_groups:
            group["params"] = [p for p in group["params"] if p not in first]

    learn = make_learner(opt_func=partial(SGD, momentum=0.9))
    with raises(ValueError, "SGD keeps a state for 2 parameter(s) that are no longer in any of its groups"):
        learn.fit(2, cbs=[Callback(after_epoch=freeze), CheckpointCallback(tmp_path / "run")])
    with raises(ValueError, "leave them in their group, and set p.requires_grad_(False)"):
        learn.save(tmp_path / "with_its_optimizer.pth")


def test_parameters_beside_the_model_are_found():
    net, loss, other = nn.Linear(2, 1), nn.Bilinear(1, 1, 1), nn.Parameter(torch.zeros(2))
    loss.bias.requires_grad_(False)
    opts = [SGD([*net.parameters(), other, loss.weight], 0.1)]
    found = optim.parameters_beside(net, partial(loss), opts)
    assert list(map(id, found)) == [id(loss.weight), id(other)]
    assert optim.parameters_beside(net, nn.functional.mse_loss, []) == []


# States from files


def stepped(kind, **options):
    """A model with matrices alone, as Muon wants them, and an optimizer that has taken two steps."""
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
    opt = kind(model.parameters(), lr=0.01, **options)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
    return model, opt


KINDS = [
    *((kind, {}) for kind in vars(torch.optim).values()
      if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
      and kind.__name__ not in ("Optimizer", "LBFGS", "SparseAdam")),
    (AdamW, {"fused": True, "amsgrad": True}), (SGD, {"momentum": 0.9, "fused": True}),
    (torch.optim.Adagrad, {"fused": True}), (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "of"), [(torch.optim.Adam, torch.optim.SGD), (torch.optim.SGD, AdamW)])
def test_the_state_of_another_class_of_optimizer_is_refused(kind, of):
    _, saved = stepped(of)
    _, opt = stepped(kind)
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError, match=f"group 0 of its optimizer has no .*, which {kind.__name__} needs"):
        optim.load_state(opt, saved.state_dict())
    assert opt.state_dict()["param_groups"] == before["param_groups"]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda x: x.__name__ if isinstance(x, type) else "-".join(x))
def test_a_state_is_compared_with_what_a_fresh_optimizer_keeps(kind, options):
    model, opt = stepped(kind, **options)
    saved = copy.deepcopy(opt.state_dict())
    other, fresh = stepped(kind, **options)
    optim.load_state(fresh, saved)
    assert [*map(dict.keys, fresh.state.values())] == [*map(dict.keys, opt.state.values())]
    before = copy.deepcopy(fresh.state_dict())
    for name, value in saved["state"].get(0, {}).items():
        for wrong in (torch.zeros(2), torch.zeros(value.shape, dtype=torch.int64), "text", [1.0]):
            state = saved["state"] | {0: saved["state"][0] | {name: wrong}}
            with pytest.raises(ValueError, match=f"its optimizer keeps as '{name}' for parameter 0"):
                optim.load_state(fresh, saved | {"state": state})
    after = fresh.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(torch.equal(value, after["state"][0][name]) for name, value in before["state"].get(0, {}).items())


@pytest.mark.parametrize(
    ("name", "wrong"), [("lr", "fast"), ("lr", None), ("lr", torch.ones(2)), ("betas", (0.9,)), ("betas", 0.9),
                        ("betas", (0.9, "x")), ("amsgrad", "no"), ("amsgrad", None), ("eps", True), ("foreach", "yes")],
)  # fmt: skip
def test_options_of_another_type_are_refused(name, wrong):
    model, opt = stepped(Adam)
    saved = opt.state_dict()
    with pytest.raises(ValueError, match=f"group 0 of its optimizer has {name}="):
        optim.load_state(opt, saved | {"param_groups": [saved["param_groups"][0] | {name: wrong}]})


def test_numbers_may_stand_for_tensors_of_one_and_flags_for_none():
    model, opt = stepped(Adam)
    saved = opt.state_dict()
    states = {i: state | {"step": 2} for i, state in saved["state"].items()}
    group = saved["param_groups"][0] | {"foreach": True, "lr": torch.tensor(0.01)}
    optim.load_state(opt, {"state": states, "param_groups": [group]})
    assert [float(state["step"]) for state in opt.state.values()] == [2, 2]


@pytest.mark.parametrize(
    "damage", [{"state": []}, {"state": {0: 3}}, {"state": {None: {}}}, {"state": {True: {}}}, {"state": {"x": {}}},
               {"param_groups": [3]},
               {"param_groups": [{"params": [0, 0]}]}, {"param_groups": [{"params": ["0", "1"]}]}],
)  # fmt: skip
def test_a_state_of_another_form_is_refused(damage):
    model, opt = stepped(Adam)
    with pytest.raises(ValueError, match="its optimizer"):
        optim.load_state(opt, opt.state_dict() | damage)


def test_a_state_of_lists_within_lists_is_refused_in_time(monkeypatch):
    monkeypatch.setattr(optim, "_MOST_VALUES", 10_000)
    model, opt = stepped(SGD)
    lists = [1.0]
    for _ in range(40):
        lists = [lists, lists]
    with pytest.raises(ValueError, match="more than 10,000 values"):
        optim.load_state(opt, opt.state_dict() | {"state": {0: {"own": lists}}})


def test_what_others_keep_is_not_known_and_an_error_of_theirs_leaves_the_optimizer_as_it_was():
    class Own(SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["factors"] = torch.eye(len(p))

        def load_state_dict(self, state_dict):
            super().load_state_dict(state_dict)
            if "stop" in state_dict:
                raise OSError("no")

    model, opt = stepped(Own)
    opt.state["all"]["n"] = 1
    saved = copy.deepcopy(opt.state_dict())
    optim.load_state(opt, saved)
    with pytest.raises(ValueError, match="its optimizer's state is not taken: OSError: no"):
        optim.load_state(opt, saved | {"state": {}, "stop": True})
    assert [state["factors"].shape for key, state in opt.state.items() if key != "all"] == [(3, 3), (2, 2)]
