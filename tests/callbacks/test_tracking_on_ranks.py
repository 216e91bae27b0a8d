"""Trackers, and a NaN on one rank: several ranks decide as one process does."""

from pathlib import Path

import pytest
import torch
from helpers import mostly_slow, results_of, same_weights
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from learnerkit import (
    Callback,
    DataLoaders,
    GradientAccumulation,
    GradientClip,
    Learner,
    ValidateEvery,
    distributed,
    set_seed,
)
from learnerkit.callbacks.tracking import (
    EarlyStoppingCallback,
    ReduceLROnPlateau,
    SaveModelCallback,
    TerminateOnNaNCallback,
    TrackerCallback,
)


def make_data(n: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x[:, :1].sin() + torch.randn(n, 1, generator=generator, dtype=torch.float64))


def make_learner() -> Learner:
    """Few noisy samples for a large network: it soon learns them by heart."""
    set_seed(1)
    model = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    dls = DataLoaders.from_datasets(make_data(23, 0), make_data(11, 1), bs=4, valid_bs=4, device="cpu")
    return Learner(dls, model, nn.MSELoss(), opt_func=torch.optim.SGD, path=str(distributed.world_size()))


class Facts(Callback):
    """What ranks may disagree about."""

    order = 70

    def __init__(self, tracker: TrackerCallback):
        super().__init__()
        self.tracker, self.rates, self.bests = tracker, [], []

    def after_epoch(self):
        self.rates.append(self.opt.param_groups[0]["lr"])
        self.bests.append(self.tracker.best)


class Share(Callback):
    """Logs a column of its own; by the values of one rank alone each would decide otherwise."""

    logs = ("share",)

    def before_backward(self):
        others = (distributed.rank() - (distributed.world_size() - 1) / 2) * (-1) ** self.epoch
        # A value has the weight of its batch, and the ranks' batches may differ by a sample.
        value = (1.0, 3.0, 2.0, 4.0, 3.0, 0.0)[self.epoch] + 10 * others / self.batch_size
        self.learn.log_metric("share", value)


class Middle(Callback):
    """Adds a row in mid-epoch."""

    order = 90
    run_valid = False

    def after_batch(self):
        if self.iter == 2:
            self.learn.recorder.add_row(self.learn.validate())
            for cb in sorted(self.learn.cbs, key=lambda cb: cb.order):
                if isinstance(cb, TrackerCallback):
                    cb.take_row()


class Spoil(Callback):
    """A NaN on one rank alone, whichever is the last."""

    run_valid = False

    def after_loss(self):
        if (self.epoch, self.iter) == (1, 2) and distributed.rank() == distributed.world_size() - 1:
            self.learn.loss = self.loss * float("nan")
            self.learn.loss_grad = self.loss_grad * float("nan")


class Stream(IterableDataset):
    """Samples without a known number."""

    def __iter__(self):
        yield from make_data(10, 0)


def fit(epochs: int, *cbs: Callback, stream: bool = False) -> dict:
    learn, facts = make_learner(), Facts(next(cb for cb in cbs if isinstance(cb, TrackerCallback)))
    if stream:
        learn.dls = DataLoaders(DataLoader(Stream(), 4), learn.dls.valid, device="cpu")
    with learn.distrib_ctx(split_batches=True), learn.no_logging():
        learn.fit(epochs, 0.2, cbs=[facts, *cbs])
    return {
        "weights": {k: v.clone() for k, v in learn.model.state_dict().items()},
        "values": learn.recorder.values,
        "rates": facts.rates,
        "bests": facts.bests,
    }


def elsewhere() -> dict:
    """The best model, where each rank has a file system of its own, the last one with a stale file."""
    learn, save = make_learner(), SaveModelCallback(with_opt=True)
    learn.path = Path(f"machine-{distributed.rank()}").absolute()
    if distributed.rank() == distributed.world_size() - 1 > 0:
        (learn.path / "models").mkdir(parents=True)
        torch.save(make_learner().model.state_dict(), learn.path / "models" / "model.pth")
    with learn.distrib_ctx(split_batches=True), learn.no_logging():
        learn.fit(8, 0.2, cbs=[save, EarlyStoppingCallback(patience=3)])
    return {"weights": {k: v.clone() for k, v in learn.model.state_dict().items()}, "opt": learn.opt.state_dict()}


def spoil() -> dict:
    learn = make_learner()
    with learn.distrib_ctx(split_batches=True), learn.no_logging():
        learn.fit(3, 0.05, cbs=[Spoil(), TerminateOnNaNCallback()])
    return {
        "weights": {k: v.clone() for k, v in learn.model.state_dict().items()},
        "at": (learn.epoch, learn.train_iter),
        "rows": len(learn.recorder.values),
    }


JOBS = {
    "stop": lambda: fit(30, EarlyStoppingCallback(patience=3)),
    "save": lambda: fit(8, SaveModelCallback(), EarlyStoppingCallback(patience=3)),
    "reduce": lambda: fit(20, ReduceLROnPlateau(patience=2, factor=2)),
    "own column": lambda: fit(6, Share(), SaveModelCallback("share", fname="share")),
    "in mid-epoch": lambda: fit(8, Middle(), SaveModelCallback(fname="middle"), EarlyStoppingCallback(patience=4)),
    "rows of steps": lambda: fit(
        6,
        GradientAccumulation(n_batches=2),
        GradientClip(0.5, log=True),
        ValidateEvery(1),
        EarlyStoppingCallback(patience=2),
        stream=True,
    ),  # fmt: skip
    "elsewhere": elsewhere,
    "nan": spoil,
}


def do(name: str) -> dict:
    return JOBS[name]()


found = results_of(do)


DECIDE = ["stop", "save", "reduce", "own column", "in mid-epoch", "rows of steps"]


@pytest.mark.parametrize("job", mostly_slow(DECIDE, "stop", "rows of steps"))
def test_ranks_decide_as_one_process(found, job):
    (alone,), ranks = found[1, job], found[2, job]
    for rank in ranks:
        torch.testing.assert_close(rank, alone, rtol=1e-11, atol=1e-12)
    assert same_weights(*(rank["weights"] for rank in ranks))


@pytest.mark.slow
def test_the_best_reaches_machines_without_the_file(found):
    """A file system for each rank: one has no such file, or an older one of the same name."""
    (alone,), ranks = found[1, "elsewhere"], found[2, "elsewhere"]
    for rank in ranks:
        torch.testing.assert_close(rank, alone, rtol=1e-11, atol=1e-12)
    assert same_weights(*(rank["weights"] for rank in ranks))
    assert same_weights(ranks[0]["weights"], found[2, "save"][0]["weights"])


def test_what_ranks_decide_depends_on_all_of_them(found):
    assert 2 < len(found[1, "stop"][0]["values"]) < 30
    assert len(set(found[1, "reduce"][0]["rates"])) > 2


def test_one_ranks_nan_ends_all(found):
    ranks, printed = found[2, "nan"], found.printed[2, "nan"]
    for rank in ranks:
        assert rank["at"] == (1, 6 + 2)
        assert rank["rows"] == 1
    assert same_weights(ranks[0]["weights"], ranks[1]["weights"])
    assert all(w.isfinite().all() for w in ranks[0]["weights"].values())
    assert printed.count("the training loss of step") == 1
    assert "epoch 1: the training loss of step 2 on rank 1 is nan: stopping" in printed.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "job"),
    [("no better valid_loss", "stop"), ("loaded the best model", "save"), ("loaded the best model", "elsewhere")],
)
def test_ranks_say_it_once(found, said, job):
    for n in (1, 2):
        assert found[n, job]
        assert found.printed[n, job].count(said) == 1


class Told(list):
    """A logger that keeps what is said."""

    def __call__(self, row):
        pass

    def say(self, text):
        self.append(text)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("terminates", [False, True])
def test_rank_0_tells_of_a_global_loss_that_is_no_number(terminates):
    def spoil(cb):
        if cb.training and distributed.rank() == 1 and (cb.epoch, cb.iter) == (0, 1):
            cb.learn.loss = cb.learn.loss * float("nan")

    learn = make_learner()
    learn.add_cbs([Callback(after_loss=spoil), *([TerminateOnNaNCallback()] if terminates else [])])
    learn.logger = told = Told()
    with learn.distrib_ctx(), learn.no_bar():
        learn.fit(2)
    expected = "rank 1 is nan: stopping" if terminates else "the training loss of step 1 is nan, the first"
    assert [expected in text for text in told if "loss" in text] == [True] * distributed.is_main()
