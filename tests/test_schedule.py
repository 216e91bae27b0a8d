"""Schedules: the numbers of the 1cycle policy, by fastai's formula, written out once more here."""

import math
from contextlib import nullcontext

import pytest
from conftest import make_data, make_learner, raising, same_weights, weights
from torch.optim import SGD, Adagrad, AdamW
from torch.utils.data import DataLoader

from learnerkit import Callback, DataLoaders, ParamScheduler, combined_cos


def sched_cos(start, end, pos):
    """fastai's SchedCos."""
    return start + (1 + math.cos(math.pi * (1 - pos))) * (end - start) / 2


def one_cycle(pos, pct_start, start, middle, end):
    """fastai's combined_cos."""
    if pos < pct_start:
        return sched_cos(start, middle, pos / pct_start)
    return sched_cos(middle, end, (pos - pct_start) / (1 - pct_start))


def learner(opt_func=AdamW, batches=10, **kwargs):
    dls = DataLoaders(DataLoader(make_data(4 * batches), 4), DataLoader(make_data(4), 4), device="cpu")
    return make_learner(dls, opt_func=opt_func, lr=1e-3, **kwargs)


def halves(model):
    return [list(model[0].parameters()), list(model[3].parameters())]


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
    learner(cbs=watch, moms=(0.5, 0.4, 0.3)).fit_one_cycle(1)
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


@pytest.mark.parametrize("pct", [-0.1, 1.1, float("nan")])
def test_a_share_outside_0_to_1_is_refused(pct):
    with pytest.raises(ValueError, match="the share of training before the peak is between 0 and 1"):
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


def test_validation_moves_no_schedule():
    calls = []
    learn = learner(cbs=ParamScheduler({"lr": lambda at: calls.append(at) or 0.1}))
    learn.fit(1)
    learn.validate()
    learn.get_preds()
    assert calls == [i / 10 for i in range(10)]
