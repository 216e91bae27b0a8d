"""What a step sees, and the rates that go with it, on one process."""

import pickle
from functools import partial

import pytest
import torch
from helpers import Unsized, halves, make_data, make_dls, make_learner, raises
from torch import nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, RMSprop
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

import learnerkit.learner
from learnerkit import DataLoaders, GradientAccumulation, Learner, ParamScheduler, linear_warmup, scaled_lr
from learnerkit.callbacks.lr_find import SuggestionMethod
from learnerkit.callbacks.schedule import SchedCos
from learnerkit.notebook.kernel import Workers

DATA = make_data(100)


class Stream(IterableDataset):
    def __iter__(self):
        yield from DATA


class Whole(Dataset):
    """Makes batches, by their indices."""

    def __getitem__(self, i):
        return DATA[i]


class Buckets:
    """A batch sampler of its own kind."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __iter__(self):
        return (range(size) for size in self.sizes)


class Sized(Buckets):
    batch_size = 16


LOADERS = {
    "a torch loader": (lambda: DataLoader(DATA, 16), 16),
    "of rows": (lambda: DataLoaders.from_datasets(DATA, bs=16).train, 16),
    "with a batch sampler of torch's": (
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 16, True)), 16,
    ),
    "with one of its own": (lambda: DataLoader(DATA, batch_sampler=Buckets([9, 16])), None),
    "which says": (lambda: DataLoader(DATA, batch_sampler=Sized([9, 16])), 16),
    "of a stream": (lambda: DataLoader(Stream(), 16), 16),
    "of batches that the dataset makes": (
        lambda: DataLoader(Whole(), sampler=BatchSampler(SequentialSampler(DATA), 16, False), batch_size=None),
        16,
    ),
    "of batches from a stream": (lambda: DataLoader(Stream(), batch_size=None), None),
    "a list": (lambda: [DATA[:16], DATA[16:32]], 16),
    "an iterable": (lambda: Unsized([DATA[:16]]), None),
    "with more than there is": (lambda: DataLoader(DATA, 128), 100),
    "with weights": (lambda: DataLoader(DATA, 128, sampler=RandomSampler(DATA, True, 120)), 120),
    "that drops its last batch": (lambda: DataLoader(DATA, 64, drop_last=True), 64),
}  # fmt: skip


def learner(loader, **kwargs):
    return make_learner(DataLoaders(loader, device="cpu"), **kwargs)


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_tells_its_samples(name):
    make, expected = LOADERS[name]
    assert learner(make()).effective_batch_size == expected


ACCUMULATED = [
    ("a torch loader", {"n_batches": 4}, 64, "16 x 4 batches = 64 samples a step"),
    ("a torch loader", {"n_batches": 9}, 100, "16 x 9 batches, but no more than an epoch has = 100 samples a step"),
    ("a torch loader", {"n_samples": 40}, 48, "16 x 3 batches = 48 samples a step"),
    ("a torch loader", {"n_samples": 7}, 16, ""),
    ("a list", {"n_batches": 4}, 32, "16 x 4 batches, but no more than an epoch has = 32 samples a step"),
    ("that drops its last batch", {"n_batches": 2}, 64,
     "64 x 2 batches, but no more than an epoch has = 64 samples a step"),
    ("an iterable", {"n_batches": 4}, None,
     "4 batches a step; the training loader does not tell how many samples they have"),
    ("an iterable", {"n_samples": 40}, 40, "batches of unknown size = 40 samples a step"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "group", "expected", "said"), ACCUMULATED)
def test_accumulated_batches_count_and_are_said_once(name, group, expected, said, capsys):
    learn, seen = learner(LOADERS[name][0](), cbs=GradientAccumulation(**group)), []
    assert learn.effective_batch_size == expected
    learn.add_cb(learnerkit.Callback(after_batch=lambda cb: seen.append(cb.learn.effective_batch_size)))
    with learn.no_logging():
        learn.fit(1)
        learn.fit_one_cycle(1) if name != "an iterable" else learn.fit(1)
    assert set(seen) == {expected}
    assert capsys.readouterr().out == (f"{said}\n" if said else "")


def test_accumulation_that_is_switched_off_does_not_count():
    accumulate = GradientAccumulation(n_batches=4)
    accumulate.run = False
    assert learner(DataLoader(DATA, 16), cbs=accumulate).effective_batch_size == 16


def test_another_step_is_said_again(capsys):
    learn = learner(DataLoader(DATA, 16))
    with learn.no_logging():
        for n in (2, 2, 3):
            learn.fit(1, cbs=GradientAccumulation(n_batches=n))
    assert capsys.readouterr().out.splitlines() == [f"16 x {n} batches = {16 * n} samples a step" for n in (2, 3)]
    assert learn.effective_batch_size == 16  # that was the fit's


def test_a_plain_fit_says_nothing_and_imports_nothing(capsys, monkeypatch):
    monkeypatch.setattr(learnerkit.learner, "scaling_rate", lambda: pytest.fail("imported"))
    learn = make_learner(splitter=lambda model: [list(part.parameters()) for part in (model[:2], model[2:])])
    with learn.no_logging():
        learn.fit(1)
        learn.fit_one_cycle(1, slice(1e-3, 1e-2))
    assert capsys.readouterr().out == ""


# Rates

KINDS = {
    "SGD": (SGD, 2.0, "linear"),
    "SGD of its own kind": (type("Own", (SGD,), {}), 2.0, "linear"),
    "Adam": (Adam, 2**0.5, "sqrt"),
    "AdamW": (AdamW, 2**0.5, "sqrt"),
    "RMSprop": (RMSprop, 2**0.5, "sqrt"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_optimizer_has_its_rule(kind, capsys):
    opt_func, factor, rule = KINDS[kind]
    learn = learner(DataLoader(DATA, 32), opt_func=opt_func)
    with learn.no_logging():
        learn.fit(1, scaled_lr(0.01, at=16))
        assert learn.recorder.lrs == [pytest.approx(0.01 * factor)] * 4
        said = f"learning rate 0.01 x {factor:.3g} = {0.01 * factor:.3g}: 32 samples a step, rather than 16 "
        assert capsys.readouterr().out == f"{said}({rule} rule, {opt_func.__name__})\n"
        for given, factor in (("linear", 0.5), ("sqrt", 0.5**0.5)):
            learn.fit(1, scaled_lr(0.01, at=64, rule=given))
            assert learn.recorder.lrs[-1] == pytest.approx(0.01 * factor)


def rates(learn):
    return [group["lr"] for opt in learn.opts for group in opt.param_groups]


def test_it_goes_wherever_a_rate_goes(capsys):
    make = partial(learner, DataLoader(DATA, 32), splitter=halves)
    low, high = (scaled_lr(lr, at=16) for lr in (0.01, 0.04))
    for given, expected in (
        (high, [0.08, 0.08]),
        (slice(high), [0.008, 0.08]),
        (slice(low, high), [0.02, 0.08]),
        (scaled_lr(slice(0.01, 0.04), at=16), [0.02, 0.08]),
        (scaled_lr(slice(0.04), at=16), [0.008, 0.08]),
        (scaled_lr([0.01, 0.04], at=16), [0.02, 0.08]),
        ([low, 0.5], [0.02, 0.5]),
        ((lr for lr in (low, high)), [0.02, 0.08]),
    ):
        learn = make()
        with learn.no_logging():
            learn.fit(1, given)
        assert rates(learn) == pytest.approx(expected)
    assert capsys.readouterr().out.splitlines()[2] == (
        "learning rates 0.01, 0.04 x 2 = 0.02, 0.08: 32 samples a step, rather than 16 (linear rule, SGD)"
    )
    learn = make(lr=high)
    assert "lr scaled_lr(0.04, at=16)" in repr(learn)
    with learn.no_logging():
        learn.fit(1)
        assert rates(learn) == [0.08, 0.08]
        learn.fit_one_cycle(2, low, cbs=GradientAccumulation(n_batches=2))
        assert max(learn.recorder.lrs) == pytest.approx(0.04)
        learn.fit_flat_cos(1)
        assert learn.recorder.lrs[0] == pytest.approx(0.08)
        capsys.readouterr()
        learn.fine_tune(1, low)
    lines = capsys.readouterr().out.splitlines()
    assert [line[: line.index(":")] for line in lines] == [
        "learning rate 0.01 x 2 = 0.02", "learning rates 5e-05, 0.005 x 2 = 0.0001, 0.01",
    ]  # fmt: skip


class Two(Learner):
    def create_opt(self):
        self.opt = {"a": SGD(self.model[0].parameters(), 0.1), "b": AdamW(self.model[3].parameters(), 0.1)}


def test_each_of_several_optimizers_has_its_own_rule():
    learn = learner(DataLoader(DATA, 64), cls=Two, lr=0.3)
    for given, expected in (
        (scaled_lr(0.01, at=16), [0.04, 0.02]),
        (scaled_lr({"a": 0.01, "b": 0.02}, at=16), [0.04, 0.04]),
        ({"b": scaled_lr(0.02, at=16)}, [0.3, 0.04]),
    ):
        with learn.no_logging():
            learn.fit(1, given)
        assert rates(learn) == pytest.approx(expected)


def test_scaled_rates_go_with_a_warm_up():
    learn = learner(DataLoader(DATA, 25), splitter=halves)
    scaled = scaled_lr(0.1, at=5)
    for given, expected in (
        (linear_warmup(0.5, 0.5), [0, 0.25, 0.5, 0.5]),  # a schedule as it is
        (linear_warmup(0.5, scaled), [0, 0.25, 0.5, 0.5]),
        (linear_warmup(0.5, scaled, start=0.1), [0.1, 0.3, 0.5, 0.5]),
        (linear_warmup(0.5, scaled_lr(SchedCos(0.1, 0), at=5)), [0, 0.25, 0.5, 0.25]),
        (scaled_lr(linear_warmup(0.5, 0.1), at=5), [0, 0.25, 0.5, 0.5]),
        ([linear_warmup(0.5, lr) for lr in scaled_lr([0.01, 0.1], at=5)], [0, 0.25, 0.5, 0.5]),
    ):
        for fit in (
            partial(learn.fit, 1, given),
            partial(learn.fit, n_steps=4, lr=given),
            partial(learn.fit, 1, cbs=ParamScheduler({"lr": given})),
        ):
            with learn.no_logging():
                fit()
            assert learn.recorder.lrs == pytest.approx(expected)
            assert rates(learn) == [0.1, 0.1]  # the learner's own, as always after a schedule


def test_bad_arguments_of_scaled_rates_are_refused():
    make = partial(learner, DataLoader(DATA, 32))
    for at in (0, -1, 2.5, True, None):
        with raises(ValueError, f"got at={at!r}; it is the samples of a step at which the rate is right, 1 or more"):
            scaled_lr(0.1, at=at)
    with raises(ValueError, "got rule='squrt'; it takes 'linear', 'sqrt', or None for the optimizer's own", "'sqrt'?"):
        scaled_lr(0.1, at=64, rule="squrt")
    with raises(TypeError, "got lr='fast'; a learning rate is a number"):
        scaled_lr("fast", at=64)
    with raises(TypeError, "got scaled_lr(0.1, at=64) as a rate to be scaled; it is scaled already"):
        scaled_lr([0.2, scaled_lr(0.1, at=64)], at=64)
    with raises(ValueError, "got pct=1.5"):
        linear_warmup(1.5, scaled_lr(0.1, at=64))
    for kind in (Adagrad, LBFGS):
        learn = make(opt_func=kind) if kind is Adagrad else make(cls=Closing, opt_func=kind)
        with raises(
            ValueError, f"scaled_lr(0.1, at=64) has no rule for {kind.__name__}", "Say which: scaled_lr(..., rule="
        ):
            learn.fit(1, scaled_lr(0.1, at=64))
    with raises(ValueError, "the training loader (Unsized) does not tell how many", "an attribute `batch_size`"):
        learner(Unsized([DATA[:16]])).fit(1, scaled_lr(0.1, at=64))
    with raises(TypeError, "a list with one number per group (fit alone takes a schedule)"):  # where a peak is meant
        make().fit_one_cycle(1, linear_warmup(0.1, scaled_lr(0.1, at=64)))


class Closing(Learner):
    def _step(self):
        pass


def test_lr_find_says_where_its_rates_hold(capsys):
    def find(bs=4, **kwargs):
        learn = make_learner(make_dls(40, bs=bs), lr=scaled_lr(0.1, at=8), **kwargs)
        learn.no_bar().__enter__()
        learn.lr_find(num_it=12, show_plot=False, suggest_funcs=SuggestionMethod.Minimum)
        return capsys.readouterr().out

    assert find() == "these rates hold at 4 samples a step; elsewhere train with scaled_lr(rate, at=4)\n"
    assert find(bs=1) == "these rates hold at 1 sample a step; elsewhere train with scaled_lr(rate, at=1)\n"
    said = "these rates hold at 12 samples a step, 4 x 3 batches; elsewhere train with scaled_lr(rate, at=12)\n"
    assert find(cbs=GradientAccumulation(n_batches=3)) == said


def test_the_model_learns_as_with_the_rate_itself():
    found = []
    for lr in (0.02, scaled_lr(0.01, at=16)):
        torch.manual_seed(0)
        learn = learner(DataLoader(DATA, 32), model=nn.Linear(4, 1))
        with learn.no_logging():
            learn.fit_one_cycle(2, lr)
        found.append(learn.model.weight)
    assert torch.equal(*found)


def test_the_processes_of_a_notebook_count():
    learn = learner(DataLoader(DATA, 16), cbs=GradientAccumulation(n_batches=2))
    for options, expected in (({}, 96), ({"split_batches": True}, 32), ({"sharded": True}, 96)):
        learn._workers = Workers(learn, 3, options, "prompt")  # which start with the first call
        assert learn.effective_batch_size == expected
    lr = pickle.loads(pickle.dumps(linear_warmup(0.5, scaled_lr(0.01, at=16), start=0.01)))  # as they travel there
    assert [lr.scaled(2.0)(position) for position in (0, 0.25, 1)] == pytest.approx([0.01, 0.015, 0.02])
