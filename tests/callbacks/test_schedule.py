"""Schedules: their numbers are fastai's, step by step; what schedulers change is put back."""

import json
import math
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from fastcore.foundation import L
from helpers import ROOT, TwoAndOne, halves, make_data, make_learner, raising, same_weights, weights
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, RMSprop, lr_scheduler
from torch.utils.data import DataLoader

from learnerkit import (
    Callback,
    CancelFitException,
    CancelStepException,
    DataLoaders,
    GradientAccumulation,
    Learner,
    ParamScheduler,
    SaveModelCallback,
    TorchScheduler,
    linear_warmup,
)
from learnerkit.callbacks.schedule import SchedCos, SchedExp, SchedLin, SchedNo, SchedPoly, combine_scheds, combined_cos

TABLES = json.loads((ROOT / "tests" / "fastai_tables.json").read_text())
"""Numbers computed by fastai itself; `fastai_tables.py` says how, and by which command."""


def one_cycle(pos, pct_start, start, middle, end):
    """The formula of the 1cycle policy, written out once more."""
    a, b, at = (
        (start, middle, pos / pct_start) if pos < pct_start else (middle, end, (pos - pct_start) / (1 - pct_start))
    )
    return a + (1 + math.cos(math.pi * (1 - at))) * (b - a) / 2


def learner(opt_func=AdamW, batches=10, **kwargs):
    dls = DataLoaders(DataLoader(make_data(4 * batches), 4), DataLoader(make_data(4), 4), device="cpu")
    return make_learner(dls, opt_func=opt_func, lr=1e-3, **kwargs)


class Watch(Callback):
    "Notes what the optimizer has when it steps."

    order = 1000

    def __init__(self):
        super().__init__()
        self.seen = []

    def before_step(self):
        self.seen.append([dict(group) for group in self.learn.opts[0].param_groups])


@pytest.mark.parametrize("opt_func", [AdamW, lambda params, lr: SGD(params, lr, momentum=0.9)])
@pytest.mark.parametrize(
    "options", [{}, {"div": 10.0, "div_final": 100.0, "pct_start": 0.4}, {"moms": (0.9, 0.7, 0.8)}, {"pct_start": 0.3}]
)
@pytest.mark.parametrize("epochs", [1, 3])
def test_one_cycle_is_fastais_formula(opt_func, options, epochs):
    watch = Watch()
    learn = learner(opt_func, cbs=watch)
    learn.fit_one_cycle(epochs, 0.02, **options)
    o = {"div": 25.0, "div_final": 1e5, "pct_start": 0.25, "moms": (0.95, 0.85, 0.95)} | options
    steps = 10 * epochs
    assert len(watch.seen) == steps
    for i, (group,) in enumerate(watch.seen):
        lr = one_cycle(i / steps, o["pct_start"], 0.02 / o["div"], 0.02, 0.02 / o["div_final"])
        mom = one_cycle(i / steps, o["pct_start"], *o["moms"])
        assert group["lr"] == pytest.approx(lr, rel=1e-9)
        found = group["betas"][0] if "betas" in group else group["momentum"]
        assert found == pytest.approx(mom, rel=1e-9)
        assert group.get("betas", (0, 0.999))[1] == 0.999
    assert watch.seen[0][0]["lr"] == pytest.approx(0.02 / o["div"])
    assert max(g["lr"] for (g,) in watch.seen) <= 0.02 * (1 + 1e-12)
    assert watch.seen[-1][0]["lr"] > 0.02 / o["div_final"]


def test_the_learners_rate_and_momenta_are_the_defaults():
    watch = Watch()
    learn = learner(cbs=watch, moms=iter((0.5, 0.4, 0.3)))
    for _ in range(2):
        watch.seen.clear()
        learn.fit_one_cycle(1)
        assert watch.seen[0][0]["lr"] == pytest.approx(1e-3 / 25)
        assert watch.seen[0][0]["betas"][0] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("lr", "peaks"),
    [(slice(0.1), (0.01, 0.1)), (slice(0.001, 0.1), (0.001, 0.1)), ([0.3, 0.2], (0.3, 0.2)), (0.1, (0.1, 0.1))],
)
@pytest.mark.parametrize("wd", [None, 0.1])
def test_each_group_has_a_cycle_of_its_own(lr, peaks, wd):
    watch = Watch()
    learn = learner(splitter=halves, cbs=watch)
    learn.fit_one_cycle(2, lr, wd=wd)
    for i, groups in enumerate(watch.seen):
        by_group = {g["splitter_group"]: g["lr"] for g in groups}
        assert len(groups) == (2 if wd is None else 4)
        for k, peak in enumerate(peaks):
            assert by_group[k] == pytest.approx(one_cycle(i / 20, 0.25, peak / 25, peak, peak / 1e5), rel=1e-9)


def test_an_optimizer_without_momentum_is_scheduled_by_rate_alone():
    learn = learner(Adagrad)
    learn.fit_one_cycle(1, 0.1)
    assert set(learn.recorder.hps) == {"lr"}


def test_the_recorder_has_the_values_of_every_step():
    watch = Watch()
    learn = learner(cbs=watch, splitter=halves)
    learn.fit_one_cycle(2, slice(0.01, 0.1))
    assert set(learn.recorder.hps) == {"lr", "momentum"}
    assert learn.recorder.hps["lr"] == learn.recorder.lrs == [groups[-1]["lr"] for groups in watch.seen]
    assert learn.recorder.hps["momentum"] == [groups[-1]["betas"][0] for groups in watch.seen]
    learn.fit(1)
    assert learn.recorder.hps == {}


@pytest.mark.parametrize("start_epoch", [0, 1, 2])
def test_a_cycle_can_start_at_a_later_epoch(start_epoch):
    whole, part = learner(), learner()
    whole.fit_one_cycle(3, 0.1)
    part.fit_one_cycle(3, 0.1, start_epoch=start_epoch)
    assert part.recorder.lrs == whole.recorder.lrs[10 * start_epoch :]
    assert len(part.recorder.values) == 3 - start_epoch
    assert [len(row) for row in part.recorder.values] == [2] * (3 - start_epoch)


def test_the_cycle_goes_when_it_is_over():
    learn = learner()
    before = list(learn.cbs)
    learn.fit_one_cycle(1, 0.1)
    assert learn.cbs == before
    learn.fit(1, 0.25)
    assert set(learn.recorder.lrs) == {0.25}


@pytest.mark.parametrize("error", [None, ValueError])
def test_the_optimizer_gets_its_momentum_back(error):
    learn = learner()
    cbs = raising("before_step", error, lambda cb: cb.iter == 5) if error else None
    with pytest.raises(error) if error else nullcontext():
        learn.fit_one_cycle(1, 0.1, cbs=cbs)
    (group,) = learn.opt.param_groups
    assert group["betas"] == AdamW(learn.model.parameters()).defaults["betas"]


def test_one_cycle_takes_callbacks_decay_and_a_new_optimizer():
    heard = []
    learn = learner()
    learn.fit(1)
    opt = learn.opt
    learn.fit_one_cycle(1, 0.1, wd=0.25, cbs=Callback(after_fit=lambda cb: heard.append(1)), reset_opt=True)
    assert heard == [1]
    assert learn.opt is not opt
    assert {g["weight_decay"] for g in learn.opt.param_groups} == {0.25, 0.0}
    assert {float(s["step"]) for s in learn.opt.state.values()} == {10.0}


def test_no_epochs_change_nothing():
    learn = learner()
    before = weights(learn.model)
    learn.fit_one_cycle(0)
    assert same_weights(learn.model, before)


@pytest.mark.parametrize("pct", [0.0, 0.25, 1.0])
def test_combined_cos_meets_its_points_and_stays_between(pct):
    sched = combined_cos(pct, 1.0, 3.0, 0.5)
    if pct > 0:
        assert sched(0.0) == pytest.approx(1.0)
    assert sched(pct) == pytest.approx(3.0)
    if pct < 1:
        assert sched(1.0) == pytest.approx(0.5)
    values = [sched(i / 100) for i in range(101)]
    assert all(0.5 <= v <= 3.0 for v in values)
    rising = [b >= a for a, b in zip(values, values[1:], strict=False)]
    assert rising == sorted(rising, reverse=True)


@pytest.mark.parametrize("pct", [-0.1, 1.1, float("nan"), "a"])
def test_a_share_outside_0_to_1_is_refused(pct):
    with pytest.raises(ValueError, match="it is a share of training, between 0 and 1"):
        combined_cos(pct, 1, 2, 3)
    with pytest.raises(ValueError, match="between 0 and 1"):
        learner().fit_one_cycle(1, pct_start=pct)


def test_any_hyper_parameter_can_be_scheduled():
    watch = Watch()
    sched = ParamScheduler({"weight_decay": lambda at: at, "lr": [lambda at: 0.1, lambda at: 0.2 + at]})
    learn = learner(cbs=[watch, sched], splitter=halves)
    learn.fit(1)
    assert [[g["lr"] for g in groups] for groups in watch.seen] == [[0.1, 0.2 + i / 10] for i in range(10)]
    assert [groups[0]["weight_decay"] for groups in watch.seen] == [i / 10 for i in range(10)]
    assert learn.recorder.hps == {"weight_decay": [i / 10 for i in range(10)], "lr": [0.2 + i / 10 for i in range(10)]}


def test_a_schedule_for_what_is_not_there_says_so():
    with pytest.raises(ValueError, match="AdamW has no hyper-parameter 'speed'"):
        learner(cbs=ParamScheduler({"speed": lambda at: at})).fit(1)


@pytest.mark.parametrize(
    ("scheds", "match"),
    [
        ({"mom": lambda at: at}, "no hyper-parameter 'mom'.*did you mean 'momentum'"),
        ({"lr": [lambda at: at]}, "got 1 schedules of 'lr' for 2 parameter groups"),
        ({"lr": [lambda at: at] * 3}, "got 3 schedules of 'lr' for 2 parameter groups"),
        ({"lr": 0.1}, "got 0.1 for 'lr'; it is a schedule"),
        ({"weight_decay": lambda at: at}, "two schedules of weight_decay in one fit"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_before_anything_changes(scheds, match):
    learn = learner(splitter=halves)
    before = weights(learn.model)
    with pytest.raises((TypeError, ValueError), match=match) as error:
        learn.fit(1, cbs=[ParamScheduler({"weight_decay": lambda at: at}), ParamScheduler(scheds)])
    assert same_weights(before, learn.model)
    assert "raised in ParamScheduler.before_fit" in error.value.__notes__


@pytest.mark.parametrize("kind", [tuple, L, iter])
def test_schedules_of_groups_come_in_any_row(kind):
    learn = learner(splitter=halves, batches=2)
    cb = ParamScheduler({"lr": kind([lambda at: 0.1 + at, lambda at: 0.2 + at])})
    for _ in range(2):
        learn.fit(1, cbs=cb)
        assert learn.recorder.hps == {"lr": [0.2, 0.7]}
    sched = combine_scheds(kind([0.5, 0.5]), kind([SchedLin(0.0, 1.0), SchedNo(2.0, 2.0)]))
    assert [sched(at) for at in (0.25, 0.75)] == [0.5, 2.0]


@pytest.mark.parametrize("peak", [np.array([0.1, 0.2]), torch.tensor([0.1, 0.2]), [0.1, 0.2], "0.1", None])
def test_a_schedule_of_several_numbers_says_how_groups_have_theirs(peak):
    with pytest.raises(
        TypeError, match=r"a schedule goes from one number to another. For parameter groups give a list"
    ):
        combined_cos(0.25, peak, peak, peak)


def test_schedules_are_given_by_the_name_of_what_they_set():
    with pytest.raises(TypeError, match=r"got SchedLin\(.*; it is a dict by hyper-parameter, such as {'lr': "):
        ParamScheduler(SchedLin(1.0, 0.0))


@pytest.mark.parametrize("kind", [np.float32, torch.tensor])
def test_a_schedule_may_return_any_kind_of_number(kind):
    learn = learner(
        batches=2, cbs=ParamScheduler({"lr": lambda at: kind(0.5), "weight_decay": [lambda at: kind(0.25)]})
    )
    learn.fit(1)
    assert learn.recorder.hps == {"lr": [0.5, 0.5], "weight_decay": [0.25, 0.25]}


def test_two_schedulers_and_what_they_set_until_a_fit_is_broken_off():
    learn = learner(cbs=raising("after_step", KeyboardInterrupt(), lambda cb: cb.epoch == 1))
    with pytest.raises(KeyboardInterrupt):
        learn.fit_one_cycle(2, cbs=ParamScheduler({"weight_decay": lambda at: at}))
    assert {name: len(values) for name, values in learn.recorder.hps.items()} == {
        "lr": 11, "momentum": 11, "weight_decay": 11,
    }  # fmt: skip
    learn.fit(1)
    assert learn.recorder.hps == {}


def test_a_group_that_is_added_under_a_schedule_is_refused():
    def add(cb):
        if not cb.train_iter:
            cb.opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    learn = learner(cbs=Callback(before_step=add))
    with pytest.raises(ValueError, match="the optimizer has a group 1, and there are values of 'lr' for 1: a group"):
        learn.fit_one_cycle(1)


@pytest.mark.parametrize("way", ["schedule", "torch"])
def test_a_group_that_is_added_under_one_schedule_stays_and_gets_its_rate_back(way):
    def add(cb):
        if cb.train_iter == 1:
            cb.opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.25})

    cbs = [TorchScheduler(lambda opt: lr_scheduler.ExponentialLR(opt, 0.5))] if way == "torch" else []
    learn = learner(cbs=[Callback(before_step=add), *cbs])
    learn.fit(1, (lambda at: 1 - at) if way == "schedule" else 0.5)
    assert [group["lr"] for group in learn.opt.param_groups][1:] == [0.25]


@pytest.mark.parametrize("wd_bn_bias", [False, True])
def test_a_scheduled_decay_spares_norms_and_biases(wd_bn_bias):
    watch = Watch()
    learn = learner(cbs=[watch, ParamScheduler({"weight_decay": lambda at: 0.5})], wd=0.1, wd_bn_bias=wd_bn_bias)
    learn.fit(1)
    assert [g["weight_decay"] for g in watch.seen[-1]] == ([0.5] if wd_bn_bias else [0.5, 0.0])
    watch, learn = Watch(), learner(batches=2)
    learn.fit(1, cbs=[watch, ParamScheduler({"weight_decay": lambda at: 0.5})])  # one group, of which all decays
    assert [g["weight_decay"] for g in watch.seen[-1]] == [0.5]


def test_a_momentum_of_0_is_scheduled_where_the_optimizer_can_begin_with_one():
    for opt_func, names in ((SGD, ["lr", "momentum"]), (RMSprop, ["lr"])):
        learn = learner(opt_func, batches=3)
        learn.fit(1)
        learn.fit_one_cycle(1, 1e-3)
        assert list(learn.recorder.hps) == names
        assert [g["momentum"] for g in learn.opt.param_groups] == [0]  # again


class WatchBoth(Callback):
    order = 1000

    def __init__(self):
        super().__init__()
        self.seen = []

    def before_step(self):
        self.seen.append({name: [g["lr"] for g in opt.param_groups] for name, opt in self.learn.opt.items()})


def test_several_optimizers_are_scheduled_by_name():
    watch = WatchBoth()
    learn = make_learner(cls=TwoAndOne, cbs=watch)
    learn.fit_flat_cos(1, {"a": 0.5, "b": slice(0.2)})
    assert watch.seen[0] == {"a": [0.5], "b": pytest.approx([0.02, 0.2])}
    learn.fit_one_cycle(1, 0.5, div=5.0)
    assert watch.seen[2] == {"a": [0.1], "b": [0.1, 0.1]}
    assert list(learn.recorder.hps) == ["lr", "momentum"]  # of those that have one
    own = ParamScheduler({"lr": {"b": [lambda at: 0.1, lambda at: 0.2]}, "weight_decay": lambda at: 0.3})
    learn.fit(1, 0.4, cbs=own)
    assert watch.seen[-1] == {"a": [0.4], "b": [0.1, 0.2]}
    assert learn.recorder.hps == {"lr": [0.2, 0.2], "weight_decay": [0.3, 0.3]}
    assert [opt.param_groups[0]["lr"] for opt in learn.opts] == [0.4, 0.4]
    with pytest.raises(ValueError, match="got 'c' as an optimizer's name; the learner has 'a', 'b'"):
        learn.fit(1, cbs=ParamScheduler({"lr": {"c": lambda at: at}}))


def test_validation_moves_no_schedule():
    calls = []
    learn = learner(cbs=ParamScheduler({"lr": lambda at: calls.append(at) or 0.1}))
    learn.fit(1)
    learn.validate()
    learn.get_preds()
    assert calls == [i / 10 for i in range(10)]


# fastai's numbers

NAMED = {"lin": SchedLin, "cos": SchedCos, "exp": SchedExp, "no": SchedNo}


@pytest.mark.parametrize("name", TABLES["schedules"])
def test_a_schedule_is_fastais(name):
    table, (kind, _, power) = TABLES["schedules"][name], name.partition("_")
    sched = SchedPoly(1e-3, 1e-1, float(power)) if kind == "poly" else NAMED[kind](1e-3, 1e-1)
    assert [sched(at) for at in table["positions"]] == pytest.approx(table["values"], rel=1e-12)


COMBINED = {
    "combine_scheds": combine_scheds(
        [0.3, 0.5, 0.2], [SchedCos(1e-3, 1e-1), SchedLin(1e-1, 5e-2), SchedExp(5e-2, 1e-4)]
    ),
    "combined_cos": combined_cos(0.3, 1e-3, 1e-1, 1e-5),
}


@pytest.mark.parametrize("name", COMBINED)
def test_schedules_in_a_row_are_fastais(name):
    table = TABLES["combined"][name]
    found = [COMBINED[name](at) for at in table["positions"]]
    assert found == pytest.approx(table["values"], rel=1e-6, abs=1e-7)  # fastai computes positions in float32


def rates_of(table):
    """What `fit` and the like were called with, of a table's arguments."""
    args = dict(table["args"])
    method, positional = args.pop("method"), args.pop("positional")
    return method, positional, {k: slice(*v) if isinstance(v, list) else v for k, v in args.items()}


def fastais(table, **kwargs):
    """A learner that has trained as fastai did, and its rates and momenta at every step, by group."""
    watch = Watch()
    groups = table["groups"]
    count = groups if isinstance(groups, int) else len(groups)
    data = DataLoaders(DataLoader(make_data(4 * table["n_iter"]), 4), device="cpu")

    def splitter(model):
        params = list(model.parameters())
        return [params[i::count] for i in range(count)]

    learn = make_learner(data, opt_func=AdamW, splitter=splitter, cbs=watch, **kwargs)
    method, positional, args = rates_of(table)
    getattr(learn, method)(*positional, **args)
    return learn, [[g["lr"] for g in groups] for groups in watch.seen], [g[0]["betas"][0] for g in watch.seen]


@pytest.mark.parametrize("name", TABLES["fits"])
def test_a_fit_sets_fastais_rates_at_every_step(name):
    table = TABLES["fits"][name]
    _, rates, momenta = fastais(table)
    assert len(rates) == len(table["steps"]["lr"])
    peak = max(max(step) for step in table["steps"]["lr"])
    wrong = {}
    for i, (found, expected) in enumerate(zip(rates, table["steps"]["lr"], strict=True)):
        if found != pytest.approx(expected, rel=1e-5, abs=2e-7 * peak):
            wrong[i] = found, expected
    # Where a rounding error puts fastai at the end of one cycle rather than the start of the next, its rate is 0.
    assert list(wrong) == {"sgdr": [18], "sgdr_joint": [9]}.get(name, [])
    assert all(found == [peak] and expected == [pytest.approx(0, abs=1e-9)] for found, expected in wrong.values())
    if "one_cycle" in name:
        assert momenta == pytest.approx([step[0] for step in table["steps"]["mom"]], rel=1e-6)
    else:
        assert set(momenta) == {0.9}  # of torch's AdamW; nothing was scheduled


def test_fine_tuning_is_fastais():
    table = TABLES["fine_tune"]
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
    watch, trains = Watch(), []

    def note(cb):
        by_name = dict(cb.model.named_parameters())
        trains.append([[by_name[name].requires_grad for name in group] for group in table["groups"]])

    data = DataLoaders(DataLoader(make_data(4 * table["n_iter"]), 4), device="cpu")
    learn = make_learner(
        data,
        model,
        opt_func=AdamW,
        cbs=[watch, Callback(before_step=note)],
        splitter=lambda m: [[dict(m.named_parameters())[name] for name in group] for group in table["groups"]],
    )
    _, positional, args = rates_of(table)
    learn.fine_tune(*positional, **args)
    steps = table["steps"]
    for found, expected in zip(watch.seen, steps["lr"], strict=True):
        assert [g["lr"] for g in found] == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert [g[0]["betas"][0] for g in watch.seen] == pytest.approx([m[0] for m in steps["mom"]], rel=1e-6)
    assert trains == steps["trains"]
    assert len(learn.recorder.history) == 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"n_steps": 4}, "give one of them"),
        ({"epochs": None}, "give one of them"),
        ({"freeze_steps": -1}, "n_steps=-1"),
        ({"divv": 4}, "unexpected keyword argument 'divv'"),
        ({"lr_max": 4}, "lr_max"),
        ({"lr_mult": 0}, "got lr_mult=0; it is a number above 0"),
        ({"base_lr": "x"}, "got base_lr='x'; it is one rate"),
        ({"base_lr": slice(1e-3)}, "from which lr_mult makes those of the groups"),
        ({"base_lr": -1.0}, "above 0|not be negative"),
        ({"pct_start": 2}, "between 0 and 1"),
        ({"moms": "123"}, r"got moms='123'; it is three numbers"),
        ({"moms": (0.9,)}, r"got moms=\(0.9,\); it is three numbers"),
        ({"div": 0}, "got div=0"),
        ({"epochs": 1.5}, "n_epoch=1.5"),
        ({"freeze_epochs": -1}, "n_epoch=-1"),
    ],
)
def test_fine_tuning_refuses_before_it_freezes(options, match):
    learn = learner(splitter=halves)
    learn.model[3].requires_grad_(False)
    before = [p.requires_grad for p in learn.model.parameters()]
    with pytest.raises((TypeError, ValueError), match=match):
        learn.fine_tune(**{"epochs": 1} | options)
    assert [p.requires_grad for p in learn.model.parameters()] == before


@pytest.mark.parametrize("freeze", [{"freeze_steps": 3}, {"freeze_epochs": 2}, {}])
def test_both_parts_of_fine_tuning_may_be_counted_in_steps(freeze):
    steps, watch = [], Callback(before_step=lambda cb: steps.append(cb.model[0].weight.requires_grad))
    learn = learner(splitter=halves, cbs=watch)
    per_epoch = len(learn.dls.train)
    rates = []
    learn.add_cb(Callback(before_step=lambda cb: rates.append(cb.opt.param_groups[-1]["lr"])))
    learn.fine_tune(n_steps=per_epoch + 1, base_lr=0.1, **freeze)
    first = 3 if "freeze_steps" in freeze else per_epoch * freeze.get("freeze_epochs", 1)
    assert steps == [False] * first + [True] * (per_epoch + 1)
    assert rates[first] == pytest.approx(0.05 / 5)  # the second cycle begins at a fifth of its peak
    assert rates[-1] < 0.05 / 5  # and ends with its last step


@pytest.mark.filterwarnings("ignore:there is a single group")
def test_fine_tuning_by_steps_needs_no_length():
    class Endless:
        def __iter__(self):
            yield from batches

    batches = [(torch.randn(2, 4), torch.randn(2, 1)) for _ in range(4)]
    learn = make_learner(DataLoaders(Endless(), device="cpu"), nn.Linear(4, 1))
    learn.fine_tune(n_steps=6, freeze_steps=3)
    with pytest.raises(ValueError, match="fine_tune needs to know how many batches"):
        learn.fine_tune(n_steps=6)


@pytest.mark.parametrize(
    "options", [{"div": 0}, {"div_final": 0.0}, {"moms": 0.9}, {"moms": (0.9, 0.8)}, {"moms": (2, 2, 2)}]
)
def test_a_cycle_that_cannot_be_is_refused(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"got {name}="):
        learner().fit_one_cycle(1, **options)


@pytest.mark.parametrize("div_final", [0, -1])
def test_a_flat_fit_ends_at_no_rate_of_0_or_below(div_final):
    with pytest.raises(ValueError, match=f"got div_final={div_final}; it is a number above 0"):
        learner().fit_flat_cos(1, div_final=div_final)


# Schedules of one's own


def test_a_schedule_says_what_it_is():
    assert repr(SchedPoly(0, 1, 2)) == "SchedPoly(0, 1, 2)"


def test_schedules_in_a_row_meet_where_they_should():
    sched = combine_scheds([0.1] * 10, [SchedNo(i, i) for i in range(10)])
    assert [sched(i / 10) for i in range(11)] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9]
    assert combine_scheds([0, 0.5, 0, 0.5, 0], [SchedNo(i, i) for i in range(5)])(1.0) == 3
    assert combine_scheds([0, 1], [SchedNo(1, 1), SchedNo(2, 2)])(0.0) == 2
    assert combine_scheds(torch.tensor([0.25, 0.75]), [SchedNo(1, 1), SchedNo(2, 2)])(0.5) == 2


@pytest.mark.parametrize(
    ("pcts", "error"),
    [
        ([0.5, 0.4], "their sum is 1"),
        ([1.5, -0.5], "0 or more"),
        ([1.0], "one share for each"),
        ([], "one share for each"),
    ],
)
def test_shares_that_cannot_be_are_refused(pcts, error):
    with pytest.raises(ValueError, match=error):
        combine_scheds(pcts, [SchedNo(1, 1)] * 2)


def test_an_exponential_schedule_through_0_is_refused():
    for ends in ((0, 1), (1, 0), (-1, 1)):
        with pytest.raises(ValueError, match=r"SchedExp\(.*above 0"):
            SchedExp(*ends)


def test_warm_up_leads_to_the_schedule_that_follows():
    sched = linear_warmup(0.2, SchedCos(0.1, 0.0))
    assert [sched(at) for at in (0, 0.1, 0.2, 0.6, 1.0)] == pytest.approx([0, 0.05, 0.1, 0.05, 0.0])
    assert [linear_warmup(0.5, 3.0, start=1.0)(at) for at in (0, 0.25, 0.5, 1)] == [1, 2, 3, 3]
    with pytest.raises(ValueError, match="it is a share of training, between 0 and 1"):
        linear_warmup(1.5, 0.1)


@pytest.mark.parametrize("cycles", [{"n_cycles": 0}, {"cycle_len": 1.5}, {"cycle_mult": 0}])
def test_cycles_are_whole_numbers(cycles):
    with pytest.raises(ValueError, match=f"got {next(iter(cycles))}="):
        learner().fit_sgdr(**{"n_cycles": 1, "cycle_len": 1, **cycles})


def test_restarts_of_equal_length_repeat_the_cycle():
    learn = learner(batches=2)
    learn.fit_sgdr(3, 1, 0.1, cycle_mult=1)
    assert learn.recorder.lrs == pytest.approx([0.1, 0.05] * 3)


def test_a_flat_fit_can_start_at_a_later_epoch():
    whole, part = learner(), learner()
    whole.fit_flat_cos(3, 0.1)
    part.fit_flat_cos(3, 0.1, start_epoch=2)
    assert part.recorder.lrs == whole.recorder.lrs[20:]


def test_a_load_in_mid_fit_leaves_the_optimizer_with_its_own_hyper_parameters(tmp_path):
    learn = learner(path=tmp_path)
    learn.fit(1)
    learn.fit_one_cycle(2, 0.1, cbs=SaveModelCallback(with_opt=True))
    (group,) = learn.opt.param_groups
    assert (group["lr"], group["betas"]) == (0.1, (0.9, 0.999))


# What is counted in steps


def test_schedules_are_counted_in_optimizer_steps():
    learn, plain = learner(batches=12), learner(batches=4)
    learn.fit_one_cycle(2, 0.1, cbs=GradientAccumulation(n_batches=3))
    plain.fit_one_cycle(2, 0.1)
    assert learn.recorder.lrs[::3] == plain.recorder.lrs


def test_a_schedule_of_steps_needs_no_length():
    class Endless:
        def __iter__(self):
            while True:
                yield from DataLoader(make_data(8), 4)

    learn, sized = make_learner(DataLoaders(Endless(), device="cpu")), learner()
    learn.fit_one_cycle(n_steps=30, lr_max=0.1)
    sized.fit_one_cycle(3, 0.1)
    assert learn.recorder.lrs == pytest.approx(sized.recorder.lrs)
    with pytest.raises(ValueError, match="n_steps"):
        learn.fit_one_cycle(1)


# torch's schedulers


def test_a_scheduler_that_was_made_for_a_longer_fit_is_told():
    learn = learner(batches=10)
    with pytest.warns(UserWarning, match="OneCycleLR was made for 40 steps and this fit has taken 20") as said:
        learn.fit(2, cbs=TorchScheduler(lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=40)))
    assert len(said) == 1
    make = TorchScheduler(lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, 2 * len(learn.dls.train)))
    learn.fit(2, cbs=make)
    stop = raising("before_batch", CancelFitException, when=lambda cb: cb.training and cb.train_iter == 15)
    learn.fit(2, cbs=[make, stop])  # cut short, as asked for


def test_a_scheduler_that_was_made_for_a_shorter_fit_is_an_error_in_words():
    with pytest.raises(ValueError, match="the OneCycleLR was made for 8 steps, and this fit takes more; count the"):
        learner(batches=10).fit(1, cbs=TorchScheduler(lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=8)))


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_torch_scheduler_steps_after_each_optimizer_step(accumulated):
    learn = learner(batches=10 * accumulated)
    cb = TorchScheduler(lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=20))
    learn.fit(2, 0.03, cbs=[cb, GradientAccumulation(n_batches=accumulated)])
    opt = AdamW([nn.Parameter(torch.zeros(1))], lr=0.03)
    by_hand, expected = lr_scheduler.OneCycleLR(opt, 0.1, total_steps=20), []
    for _ in range(20):
        expected.append(opt.param_groups[0]["lr"])
        opt.step()
        by_hand.step() if len(expected) < 20 else None
    assert learn.recorder.lrs[::accumulated] == expected


def test_a_torch_scheduler_can_step_after_each_epoch():
    learn = learner(batches=2)
    learn.fit(4, 1.0, cbs=TorchScheduler(lambda opt: lr_scheduler.StepLR(opt, 1, 0.5), step="epoch"))
    assert learn.recorder.lrs == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]


def test_a_torch_scheduler_of_epochs_finds_its_place_in_a_later_one():
    rates = []
    for start in (0, 2):
        learn = learner(batches=2)
        make = TorchScheduler(lambda opt: lr_scheduler.StepLR(opt, 1, 0.5), step="epoch")
        learn.fit(4, 1.0, start_epoch=start, cbs=make)
        rates.append(learn.recorder.lrs)
    assert rates[1] == rates[0][4:]


def test_a_torch_scheduler_can_watch_a_column():
    values = iter([1.0, 2.0, 0.5, 3.0, 4.0, 4.0])
    log = Callback(after_train=lambda cb: cb.learn.log_metric("mine", next(values)))
    log.logs = ("mine",)
    make = TorchScheduler(lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.1), "epoch", "mine")
    learn = learner(batches=1)
    learn.fit(6, 1.0, cbs=[log, make])
    assert learn.recorder.lrs == pytest.approx([1.0, 1.0, 0.1, 0.1, 0.01, 0.001])


def test_a_torch_scheduler_waits_for_a_row_with_its_column():
    log = Callback(after_train=lambda cb: cb.epoch % 2 == 0 and cb.learn.log_metric("mine", 1.0))
    log.logs = ("mine",)
    make = TorchScheduler(lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.1), "epoch", "mine")
    learn = learner(batches=1)
    learn.fit(5, 1.0, cbs=[log, make])
    assert learn.recorder.lrs == pytest.approx([1.0, 1.0, 1.0, 0.1, 0.1])


@pytest.mark.parametrize("error", [None, ValueError])
def test_a_torch_scheduler_leaves_nothing_behind(error):
    learn = learner()
    learn.fit(1, 0.2)
    (group,), attributes = learn.opt.param_groups, set(vars(learn.opt))
    before = {k: v for k, v in group.items() if k != "params"}
    cb = TorchScheduler(lambda opt: lr_scheduler.CyclicLR(opt, 0.1, 1.0))
    cbs = [cb, raising("before_step", error, lambda cb: cb.iter == 5)] if error else [cb]
    with pytest.raises(error) if error else nullcontext():
        learn.fit(1, 0.2, cbs=cbs)
    assert learn.opt.param_groups == [group]
    assert {k: v for k, v in group.items() if k != "params"} == before
    assert set(vars(learn.opt)) == attributes
    learn.fit(1, 0.3, cbs=TorchScheduler(lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1.0)))
    assert set(learn.recorder.lrs) == {0.3}


def test_a_skipped_step_advances_a_torch_scheduler_without_a_warning():
    learn = learner(batches=3)
    skip = raising("before_step", CancelStepException())
    learn.fit(1, 1.0, cbs=[skip, TorchScheduler(lambda opt: lr_scheduler.ExponentialLR(opt, 0.5))])
    assert learn.recorder.lrs == [1.0, 0.5, 0.25]


def test_a_torch_scheduler_goes_with_a_schedule_that_is_switched_off():
    off = ParamScheduler({"lr": SchedLin(1.0, 0.0)})
    off.run = False
    learn = learner(batches=3, cbs=off)
    learn.fit(1, 1.0, cbs=TorchScheduler(lambda opt: lr_scheduler.ExponentialLR(opt, 0.5)))
    assert learn.recorder.lrs == [1.0, 0.5, 0.25]


def test_what_a_torch_scheduler_cannot_do_is_refused():
    make = lambda opt: lr_scheduler.StepLR(opt, 1)  # noqa: E731
    with pytest.raises(ValueError, match="step='epochs'.*did you mean 'epoch'"):
        TorchScheduler(make, step="epochs")
    with pytest.raises(ValueError, match="got step=1; it takes 'batch' or 'epoch'"):
        TorchScheduler(make, step=1)
    with pytest.raises(ValueError, match="step='epoch'"):
        TorchScheduler(make, monitor="valid_loss")
    with pytest.raises(TypeError, match="a function that makes the scheduler"):
        TorchScheduler(make(SGD([nn.Parameter(torch.zeros(1))], 0.1)))
    with pytest.raises(ValueError, match="monitor='valid_lost'.*did you mean 'valid_loss'"):
        learner(cbs=TorchScheduler(make, "epoch", "valid_lost")).fit(1)
    with pytest.raises(TypeError, match="TorchScheduler's function made None; it returns a scheduler"):
        learner().fit(1, cbs=TorchScheduler(lambda opt: None))
    with pytest.raises(ValueError, match="TorchScheduler cannot be combined with a schedule of 'lr'"):
        learner().fit_one_cycle(1, cbs=TorchScheduler(make))
    with pytest.raises(ValueError, match="ReduceLROnPlateau steps by a value"):
        learner(cbs=TorchScheduler(lr_scheduler.ReduceLROnPlateau, "epoch")).fit(1)


def test_a_scheduler_that_steps_by_other_arguments_is_refused_when_the_fit_begins():
    class NeedsEpoch:  # as the schedulers of timm do
        def __init__(self, opt):
            self.opt = opt

        def step(self, epoch, metric=None):
            raise NotImplementedError

    seen = []
    note = Callback(before_epoch=lambda cb: seen.append(cb.epoch))
    with pytest.raises(
        TypeError, match=r"got NeedsEpoch.step\(epoch, metric=None\): let a callback of your own call it"
    ):
        learner().fit(1, cbs=[note, TorchScheduler(NeedsEpoch, step="epoch")])
    assert not seen


def test_a_torch_scheduler_may_be_a_chain():
    def make(opt):
        return lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(opt, 1), lr_scheduler.ExponentialLR(opt, 0.5)])

    learn = learner(cbs=TorchScheduler(make, "epoch"))
    learn.fit(2, 1.0)
    assert learn.recorder.lrs[0] == 1.0
    assert learn.recorder.lrs[-1] == pytest.approx(0.1 * 0.5)


def test_several_optimizers_have_a_torch_scheduler_each():
    class Two(Learner):
        def create_opt(self):
            return {"a": SGD(self.model[0].parameters(), 0.1), "b": SGD(self.model[3].parameters(), 0.1)}

    seen = []
    learn = make_learner(
        cls=Two, cbs=Callback(before_step=lambda cb: seen.append([g["lr"] for o in cb.opts for g in o.param_groups]))
    )
    learn.fit(1, 1.0, cbs=TorchScheduler(lambda opt: lr_scheduler.ExponentialLR(opt, 0.5)))
    assert seen == [[1.0, 1.0], [0.5, 0.5]]


class Counting(SGD):
    """Has a count from its first step on, and one in each group."""

    def step(self, closure=None):
        self.count = getattr(self, "count", 0) + 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return super().step(closure)


def test_what_an_optimizer_counts_itself_stays_after_a_torch_scheduler():
    learn = learner(opt_func=Counting)
    for n in (1, 2):
        learn.fit(1, 0.1, cbs=TorchScheduler(lambda opt: lr_scheduler.CyclicLR(opt, 0.1, 1.0)))
        counts = learn.opt.count, learn.opt.param_groups[0]["step"]
        assert counts == (n * len(learn.dls.train),) * 2
    assert "step" not in vars(learn.opt)
    assert "max_momentum" not in learn.opt.param_groups[0]


def test_schedules_are_the_same_with_data_parallel(two_gpus):
    alone, split = learner(), learner()
    with split.parallel_ctx():
        split.fit_flat_cos(1, 0.1)
    alone.fit_flat_cos(1, 0.1)
    assert split.recorder.lrs == alone.recorder.lrs
    assert same_weights(split.model, alone.model)
    assert split.recorder.values == alone.recorder.values


def test_the_plot_shows_what_was_scheduled(plt):
    learn = learner()
    learn.fit_one_cycle(1, 0.1)
    rate, momentum = learn.recorder.plot_sched()
    assert [rate.get_ylabel(), momentum.get_ylabel()] == ["lr", "momentum"]
    assert list(rate.lines[0].get_ydata()) == learn.recorder.lrs
    (ax,) = learn.recorder.plot_sched("momentum")
    assert list(ax.lines[0].get_ydata()) == learn.recorder.hps["momentum"]
    with pytest.raises(ValueError, match="got 'momentm'.*did you mean 'momentum'"):
        learn.recorder.plot_sched("momentm")
    learn.fit(1, 0.5)
    (ax,) = learn.recorder.plot_sched()
    assert set(ax.lines[0].get_ydata()) == {0.5}


def test_torchs_scheduler_lets_python_show_a_warning_once(capsys):
    def remark(cb):
        warnings.warn("of the user's loss", UserWarning, stacklevel=1)

    shown = []
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("default")
        patch.setattr(warnings, "showwarning", lambda message, *args, **kwargs: shown.append(str(message)))
        cbs = [Callback(after_loss=remark), TorchScheduler(lambda opt: lr_scheduler.StepLR(opt, 5))]
        make_learner(cbs=cbs).fit(3)
    assert 1 <= shown.count("of the user's loss") <= 2
