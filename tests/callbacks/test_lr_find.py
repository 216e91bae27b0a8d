"""The rate finder: its losses and suggestions are fastai's; nothing of it stays behind."""

import copy
import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ROOT, make_data, make_dls, make_learner, mostly_slow, raising, same_weights, weights
from torch import nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, AdamW
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from learnerkit import (
    Callback,
    CancelBatchException,
    CancelFitException,
    DataLoaders,
    EarlyStoppingCallback,
    GradientAccumulation,
    SaveModelCallback,
    mae,
    set_seed,
)
from learnerkit.callbacks.lr_find import SuggestionMethod, choice, minimum, slide, steep, valley

TABLES = json.loads((ROOT / "tests" / "fastai_tables.json").read_text())
FUNCTIONS = {"valley": valley, "slide": slide, "minimum": minimum, "steep": steep}


@pytest.fixture(autouse=True)
def _figures_are_closed(plt):
    pass


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("curve", TABLES["suggestions"])
def test_a_suggestion_is_fastais(curve, name):
    table = TABLES["suggestions"][curve]
    lrs, losses = np.array(table["lrs"]), np.array(table["losses"])
    found = FUNCTIONS[name](lrs, losses, 100)
    if (curve, name) == ("diverges_early", "steep"):  # nearly straight where it begins: float32 chooses otherwise
        slopes = np.diff(losses) / np.diff(np.log(lrs))
        near = [slopes[np.abs(lrs - rate).argmin()] for rate in (found, table[name])]
        assert near[0] == pytest.approx(near[1], rel=1e-5)
    elif isinstance(table[name], dict):  # where fastai's raises an IndexError
        assert found in table["lrs"]
    else:
        assert found == pytest.approx(table[name], rel=1e-6)


def test_a_fall_of_the_first_step_alone_suggests_no_rate_of_the_end():
    assert valley([0.1, 0.2, 0.4, 0.8], [3.0, 2.0, 5.0, 6.0], 4) == 0.1  # fastai's is 0.8


@pytest.mark.parametrize("name", TABLES["lr_find"])
def test_a_run_is_fastais(name, plt):
    table = TABLES["lr_find"][name]
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor(table["weight"]))
        model.bias.copy_(torch.tensor(table["bias"]))
    data = TensorDataset(torch.tensor(table["x"]), torch.tensor(table["y"]))
    dls = DataLoaders(DataLoader(data, table["bs"]), DataLoader(data, 8), device="cpu")
    learn = make_learner(dls, model, lambda pred, y: (pred - y).square().mean(), opt_func=SGD)
    args = {k: v for k, v in table["args"].items() if k != "method"}
    found = learn.lr_find(**args)
    line = plt.gca().lines[0]
    lrs, losses = table["lrs"][10:-5], table["losses"][10:-5]
    assert list(line.get_xdata()) == pytest.approx(lrs, rel=1e-6)
    assert list(line.get_ydata()) == pytest.approx(losses, rel=1e-5)
    assert list(found) == pytest.approx([table[name] for name in FUNCTIONS], rel=1e-5)
    assert model.weight.tolist() == table["weight"]


def learner(opt_func=AdamW, cbs=None, bs=10, n=40, **kwargs):
    """A learner with shuffled data and dropout, that draws from every random stream."""
    dls = DataLoaders(DataLoader(make_data(n), bs, shuffle=True), DataLoader(make_data(8, seed=1), 4), device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 1))
    return make_learner(dls, model, opt_func=opt_func, cbs=cbs, metrics=mae, **kwargs)


def test_the_suggestions_have_names():
    found = learner().lr_find(num_it=30, show_plot=False)
    assert found._fields == ("valley", "slide", "minimum", "steep")
    assert type(found).__name__ == "SuggestedLRs"
    assert all(1e-8 <= rate <= 10 for rate in found)
    assert found == learner().lr_find(num_it=30, show_plot=False)  # the random streams are what they were


def test_suggestions_of_ones_own_are_taken():
    def first(lrs, losses, num_it):
        return lrs[0]

    def fastais(lrs, losses, num_it):
        return lrs[1], (lrs[1], losses[1])

    learn = learner()
    assert learn.lr_find(num_it=30, suggest_funcs=SuggestionMethod.Valley)._fields == ("valley",)
    assert learn.lr_find(num_it=30, suggest_funcs=(minimum, steep))._fields == ("minimum", "steep")

    def tensors(lrs, losses, num_it):
        return 10 ** lrs.log10()[losses.argmin().item()]

    found = learn.lr_find(1e-5, 1.0, num_it=20, suggest_funcs=(f for f in [first, fastais, tensors, minimum]))
    assert found.tensors / 10 == pytest.approx(found.minimum)
    assert found.first == pytest.approx(1e-5 * 1e5 ** (2 / 20))
    assert found.fastais == pytest.approx(1e-5 * 1e5 ** (3 / 20))


class Rates(Callback):
    """The rates of all groups at every step, and what else is seen from inside.

    They are in an object, as a callback's own lists are afterwards what they were.
    """

    order = 1000

    def __init__(self):
        super().__init__()
        self.seen = SimpleNamespace(rates=[], losses=[], tasks=set())

    def before_step(self):
        self.seen.rates.append([g["lr"] for opt in self.opts for g in opt.param_groups])
        self.seen.tasks.add(self.task)

    def after_loss(self):
        self.seen.losses.append(self.loss.item())


def test_the_rate_grows_by_the_same_factor_at_every_step_in_every_group():
    watch = Rates()
    learn = learner(cbs=watch, splitter=lambda m: [m[:2].parameters(), m[2:].parameters()], wd=0.1)
    learn.lr_find(1e-4, 1e-2, num_it=20, stop_div=False)
    assert watch.seen.rates == [pytest.approx([1e-4 * 100 ** (i / 20)] * 4) for i in range(20)]
    assert watch.seen.tasks == {"lr_find"}


def test_it_stops_when_the_loss_diverges_and_only_then():
    for stop_div, count in ((True, range(20, 90)), (False, [100])):
        watch = Rates()
        learn = learner(SGD, cbs=watch)
        learn.lr_find(end_lr=1e4, stop_div=stop_div)
        assert len(watch.seen.rates) in count
    smooth, average = [], 0.0
    watch = Rates()
    learner(SGD, cbs=watch).lr_find(end_lr=1e4)
    for i, loss in enumerate(watch.seen.losses):
        average = 0.98 * average + 0.02 * loss
        smooth.append(average / (1 - 0.98 ** (i + 1)))
    assert smooth[-1] > 4 * min(smooth)
    assert all(value <= 4 * min(smooth[: i + 1]) for i, value in enumerate(smooth[:-1]))


def test_losses_below_0_suggest_the_same_rate():
    rates = []
    for shift in (0, 20):
        set_seed(0)
        x = torch.randn(512, 4)
        dls = DataLoaders.from_datasets(TensorDataset(x, x.sum(1, keepdim=True)), bs=32, device="cpu")
        learn = make_learner(dls, loss_func=lambda pred, y, shift=shift: F.mse_loss(pred, y) - shift)
        rates.append(learn.lr_find(show_plot=False).valley)
    assert rates[0] == pytest.approx(rates[1], rel=0.2)


def test_a_loss_that_is_no_number_ends_it():
    watch = Rates()

    def spoil(cb):
        if cb.train_iter == 40:
            cb.learn.loss = cb.learn.loss * math.nan

    learner(cbs=[watch, Callback(after_loss=spoil)]).lr_find()
    assert len(watch.seen.rates) == 41


def test_ranges_and_numbers_that_cannot_work_are_refused():
    learn = learner()
    for start, end in ((0, 1), (-1, 1), (1, 1), (2, 1), (1e-7, math.inf)):
        with pytest.raises(ValueError, match="the rate must grow, from above 0"):
            learn.lr_find(start, end)
    for num_it in (9, 1.5, 50.0):
        with pytest.raises(
            ValueError, match=f"got num_it={num_it}; it is a number of steps to suggest a rate by, 10 or"
        ):
            learn.lr_find(num_it=num_it)
    for functions in (lambda lrs, losses, num_it: 1.0, [valley, valley]):
        with pytest.raises(ValueError, match="got suggest_funcs named .* give each a name of its own"):
            learn.lr_find(suggest_funcs=functions)
    for name in ("valley", ["valley", "steep"]):
        with pytest.raises(TypeError, match="got suggest_funcs='valley'; it takes functions of .rates, losses, num_it"):
            learn.lr_find(suggest_funcs=name)
    assert learn.opt is None
    make_learner(opt_func=LBFGS).lr_find(num_it=10)
    with pytest.raises(ValueError, match="diverged after .* begin with a lower start_lr"):
        learner(SGD).lr_find(1e6, 1e9)


# Nothing stays behind


def facts(learn):
    opt = learn.opt and copy.deepcopy(learn.opt.state_dict())
    counters = {
        name: getattr(learn, name) for name in ("epoch", "n_epoch", "n_steps", "train_iter", "pct_train", "task")
    }
    modes = [m.training for m in learn.model.modules()]
    recorded = copy.deepcopy(
        {k: getattr(learn.recorder, k) for k in ("values", "losses", "lrs", "iters", "hps", "log")}
    )
    return weights(learn.model), opt, counters, modes, recorded, list(learn.cbs), len(learn.recorder.history)


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("fitted", [False, True])
def test_everything_is_what_it_was_and_the_next_fit_too(fitted, error, tmp_path):
    rows = []
    for tried in (False, True):
        set_seed(3)
        learn = learner(path=tmp_path)
        if fitted:
            learn.fit_one_cycle(1, 0.1)
        if tried:
            before = facts(learn)
            cbs = raising("after_backward", error("here"), lambda cb: cb.train_iter == 13) if error else None
            with learn.added_cbs(cbs), pytest.raises(error) if error else nullcontext():
                learn.lr_find()
            assert equal(before, facts(learn))
        learn.fit(2, 0.05)
        rows.append((learn.recorder.values, weights(learn.model)))
    assert rows[0][0] == rows[1][0]
    assert same_weights(rows[0][1], rows[1][1])


@pytest.mark.parametrize("workers", mostly_slow([0, 2], 0))
def test_the_order_of_the_data_is_what_it_was(workers):
    seen = []
    for tried in (False, True):
        set_seed(3)
        generator = torch.Generator().manual_seed(7)
        loader = DataLoader(make_data(12), 4, shuffle=True, generator=generator, num_workers=workers)
        order = []
        look = Callback(before_batch=lambda cb, order=order: order.append(cb.x.tolist()))
        learn = make_learner(DataLoaders(loader, device="cpu"), cbs=look)
        if tried:
            learn.lr_find(num_it=10, show_plot=False, stop_div=False, suggest_funcs=valley)
            assert len(order) == 10
            order.clear()
        learn.fit(2)
        seen.append(order)
    assert seen[0] == seen[1]


def test_trackers_loggers_and_validation_have_no_part_in_it(tmp_path):
    heard = []
    cbs = [SaveModelCallback(), EarlyStoppingCallback(), Callback(before_validate=lambda cb: heard.append(1))]
    learn = learner(cbs=cbs, path=tmp_path)
    learn.logger = heard.append
    learn.lr_find(num_it=30)
    assert heard == []
    assert list(tmp_path.iterdir()) == []


# In mid-fit


@pytest.mark.parametrize("event", ["before_fit", "before_batch", "after_step", "after_epoch", "cleanup_epoch"])
def test_in_mid_fit_it_is_refused(event):
    learn = learner(cbs=Callback(**{event: lambda cb: cb.learn.lr_find(num_it=20)}))
    with pytest.raises(RuntimeError, match="lr_find was called during 'fit', .*: call it before or after"):
        learn.fit(1)
    with pytest.raises(RuntimeError, match="during 'validate'" if event != "after_step" else "during 'lr_find'"):
        (learn.validate if event != "after_step" else learn.lr_find)()


# Data and callbacks of all kinds


def test_steps_of_several_batches_are_one_loss():
    halves, whole = make_learner(make_dls(40, bs=2)), make_learner(make_dls(40, bs=4))
    watch = Rates()
    with halves.added_cbs([watch, GradientAccumulation(n_batches=2)]):
        found = halves.lr_find(num_it=20, stop_div=False)
    assert len(watch.seen.rates) == 20
    assert list(found) == pytest.approx(list(whole.lr_find(num_it=20, stop_div=False)), rel=1e-4)


def test_a_group_left_over_at_the_end_is_a_step():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(make_data(10))

    watch, rates = Rates(), []

    def suggestion(lrs, losses, num_it):
        rates.extend(lrs)
        return 1.0

    learn = make_learner(DataLoaders(DataLoader(Stream(), 2), device="cpu"))  # five batches
    with learn.added_cbs([watch, GradientAccumulation(n_batches=2)]):
        learn.lr_find(1e-5, 1e-3, num_it=20, stop_div=False, suggest_funcs=suggestion)
    expected = [1e-5 * 100 ** (i / 20) for i in range(20)]
    assert [rate for (rate,) in watch.seen.rates] == pytest.approx(expected)
    assert rates == pytest.approx(expected[2:-5])


def test_a_cancel_is_no_divergence():
    stop = raising("after_batch", CancelFitException(), lambda cb: cb.train_iter == 6)
    with pytest.raises(ValueError, match="a callback cancelled the fit, or batches of it, after . of 30 steps"):
        learner(cbs=stop).lr_find(num_it=30)


def test_a_cancelled_batch_counts_nothing():
    cancel = raising("before_batch", CancelBatchException(), lambda cb: cb.train_iter == 7)
    watch = Rates()
    learner(cbs=[cancel, watch]).lr_find(num_it=30, stop_div=False)
    assert len(watch.seen.rates) == 29


def test_a_loss_that_sums_moves_the_suggestion_by_the_batch_size():
    dls = make_dls(40)
    learn = make_learner(dls, loss_func=nn.MSELoss(reduction="sum"))
    mean = make_learner(dls)
    run = {"num_it": 20, "suggest_funcs": minimum, "stop_div": False}
    a = learn.lr_find(1e-6, 1e-1, **run)
    b = mean.lr_find(4e-6, 4e-1, **run)  # four samples in each batch
    assert a.minimum * 4 == pytest.approx(b.minimum)


def test_steps_of_fewer_samples_do_not_look_better_by_a_loss_that_sums():
    """The last batch of an epoch has one sample."""
    losses = []
    for reduction in ("sum", "mean"):
        learn = make_learner(make_dls(9), loss_func=nn.MSELoss(reduction=reduction))
        learn.lr_find(1e-12, 1e-10, num_it=20, suggest_funcs=minimum)  # rates that do not change the weights
        losses.append(learn.recorder.lr_find_curve[1])
    assert losses[0] == pytest.approx(losses[1])


def test_the_finder_takes_an_iterable_without_length_and_validation():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(make_data(9))

    learn = make_learner(DataLoaders(DataLoader(Stream(), 3), device="cpu"))
    assert learn.lr_find(num_it=20).valley > 0


def test_the_finder_needs_no_default_callbacks():
    learn = learner(default_cbs=False)
    assert learn.lr_find(num_it=20).valley > 0
    assert learn.pct_train == 0.0


# Several devices and processes


def test_data_parallel_finds_the_same_rate(two_gpus):
    learn = learner()
    before = weights(learn.model)
    with learn.parallel_ctx():
        found = learn.lr_find(num_it=30)
    assert found == learner().lr_find(num_it=30)
    assert same_weights(before, learn.model)


# Which rate to take


def curve(losses):
    return list(np.geomspace(1e-6, 10, len(losses))), losses


def said(losses, **rates):
    return choice(*curve(losses), rates)


def test_it_says_which_rate_to_take_and_why():
    falls = [2.0] * 10 + list(np.linspace(2, 1, 30)) + [1.5, 3.0]
    assert said(falls, valley=1e-3, slide=1e-6) == (
        "lr_find: take valley, 1.0e-03: there the loss was in the middle of its longest fall"
    )
    lowest = curve(falls)[0][39]
    above = said(falls, valley=9.0)
    assert above.startswith(f"lr_find: take {lowest / 10:.1e}, a tenth of the rate at which the loss was lowest")
    assert above.endswith("valley, 9.0e+00, is above that rate")
    flat = said([2.0] * 20 + [1.98] + [3.0] * 5, valley=1e-3)
    assert flat == "lr_find: the loss fell by 1.0% only, too little to choose a rate: raise num_it"
    assert said([-1.0] * 20 + [-2.0] * 20, valley=1e-3).startswith("lr_find: take valley")
    assert said(falls, steep=1e-3) == ""


def test_the_line_is_printed_once(capsys):
    learner().lr_find(num_it=20, show_plot=False)
    assert [line[:9] for line in capsys.readouterr().out.splitlines() if "lr_find" in line] == ["lr_find: "]
    learner().lr_find(num_it=20, show_plot=False, suggest_funcs=steep)
    assert "lr_find" not in capsys.readouterr().out


# The plot


def test_the_plot_marks_the_suggestions(plt):
    found = learner().lr_find()
    ax = plt.gca()
    assert ax.get_xscale() == "log"
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        f"{name} {rate:.1e}" for name, rate in found._asdict().items()
    ]
    for line, rate in zip(ax.lines[1:], found, strict=True):
        assert list(line.get_xdata()) == [rate]


def test_without_matplotlib_there_is_no_plot_but_suggestions(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.pyplot", None)
    assert learner().lr_find(num_it=20).valley > 0
