"""ShortEpochCallback, OverfitBatch and learn.check() on two processes; ends with 'all well'."""

import contextlib
import io
import warnings

import torch
from checking import all_checks, leave, run
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from learnerkit import Callback, DataLoaders, GradientAccumulation, Learner, accuracy, world
from learnerkit.callbacks.debugging import OverfitBatch, ShortEpochCallback
from learnerkit.metrics import AccumMetric

N = 2
warnings.filterwarnings("ignore", message=".*each train a whole copy")  # that is what is compared with


class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(4)
        for _ in range(24):
            yield torch.randn(4, generator=generator, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)


def loaders(stream=False):
    torch.manual_seed(3)
    if stream:
        return DataLoaders(DataLoader(Stream(), 6), DataLoader(Stream(), 6), device="cpu")
    x = torch.randn(45, 4, dtype=torch.float64)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    return DataLoaders.from_datasets(data, data, bs=7, device="cpu")


def trained(cbs, alone, epochs=2, verb="fit", stream=False, **kwargs):
    """What a fit came to: weights, values, and what its training steps saw of the first input."""
    dls = loaders(stream)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    learn = Learner(dls, model, nn.MSELoss(), opt_func=lambda p, lr: torch.optim.SGD(p, lr, 0.9), lr=0.05, **kwargs)
    context = contextlib.nullcontext() if alone else learn.distrib_ctx(split_batches=True)
    with learn.no_logging(), context:
        getattr(learn, verb)(epochs, cbs=cbs)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return flat, torch.tensor(learn.recorder.values, dtype=torch.float64), torch.tensor(learn.recorder.losses)


def equals_one_process(make_cbs, **kwargs):
    together = trained(make_cbs(), alone=False, **kwargs)
    alone = trained(make_cbs(), alone=True, **kwargs)
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def check_short_epochs():
    equals_one_process(lambda: [ShortEpochCallback(n=3)])
    equals_one_process(lambda: [ShortEpochCallback(0.5)], verb="fit_one_cycle")
    equals_one_process(lambda: [ShortEpochCallback(n=5), GradientAccumulation(n_batches=2)])
    equals_one_process(lambda: [ShortEpochCallback(n=2)], stream=True)
    equals_one_process(lambda: [ShortEpochCallback(n=99)])


def check_one_batch():
    equals_one_process(lambda: [OverfitBatch()])
    equals_one_process(lambda: [OverfitBatch(2)], verb="fit_one_cycle")
    equals_one_process(lambda: [OverfitBatch(3), GradientAccumulation(n_batches=2)])
    equals_one_process(lambda: [OverfitBatch(7)])  # the last batch has 3 samples, 2 and 1 on the ranks
    equals_one_process(lambda: [OverfitBatch(7), GradientAccumulation(n_samples=12)])  # by the shares' totals
    equals_one_process(lambda: [OverfitBatch(), ShortEpochCallback(n=4)])
    equals_one_process(lambda: [OverfitBatch()], stream=True)


def check_places_stay_unique():
    """A metric of training batches gets predictions and targets in order, though a batch comes again and again."""
    found = []

    def take(pred, target):
        found.append(target)
        return 0.0

    for alone in (True, False):
        learn = Learner(loaders(), nn.Linear(4, 1).double(), nn.MSELoss(), metrics=AccumMetric(take))
        learn.recorder.train_metrics = True
        torch.manual_seed(5)
        with learn.no_logging(), contextlib.nullcontext() if alone else learn.distrib_ctx(split_batches=True):
            learn.fit(1, cbs=OverfitBatch())
    assert torch.equal(found[0], found[2]), (found[0].shape, found[2].shape)


def check_ranks_keep_their_shares():
    seen = []
    note = Callback(before_batch=lambda cb: seen.append(cb.xb[0].clone()) if cb.training else None, order=20)
    trained([OverfitBatch(), note], alone=False)
    assert all(torch.equal(x, seen[0]) for x in seen)
    assert len(seen) == 14
    a, b = world.all_gather([x.tolist() for x in seen])
    assert len(a[0]) + len(b[0]) == 7
    assert a[0] != b[0]


# The check


def learner(model=None, targets=None, cbs=None, **kwargs):
    torch.manual_seed(3)
    x, y = torch.randn(40, 4), torch.randint(3, (40,)) if targets is None else targets
    dls = DataLoaders.from_datasets(TensorDataset(x, y), TensorDataset(x, y), bs=4, device="cpu")
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 3)) if model is None else model
    return Learner(dls, model, nn.CrossEntropyLoss(), metrics=accuracy, cbs=cbs, **kwargs)


def checked(learn, well, *words):
    """Every rank has this verdict; rank 0 says why."""
    with contextlib.redirect_stdout(io.StringIO()) as text, learn.distrib_ctx():
        found = learn.check()
    assert world.all_gather(found) == [well] * N, text.getvalue()
    texts = world.all_gather(text.getvalue())
    assert texts[1] == ""
    assert all(word in texts[0] for word in words), texts[0]
    assert type(learn.model) is nn.Sequential
    assert learn.together is None


def check_a_healthy_learner():
    checked(learner(), True, "all is well", "accuracy", "guessing")
    few = learner()
    few.dls.loaders[1] = DataLoader(few.dls.valid.dataset, 40)  # one batch: the other rank has none
    checked(few, True, "all is well")
    checked(learner(cbs=GradientAccumulation(n_batches=3)), True, "all is well", "4 of 4 trainable")


def on_rank_1(right, wrong):
    return wrong if world.rank() == 1 else right


class Picky(nn.Module):
    """Fails on one rank."""

    def __init__(self, fails):
        super().__init__()
        self.fails = fails

    def forward(self, x):
        if self.fails:
            raise ValueError("this input is not for me")
        return x


class Fails(Callback):
    def after_loss(self):
        if world.rank() == 1:
            raise KeyError("gone")


def fits(learn):
    """The ranks work together afterwards."""
    with learn.no_logging(), learn.distrib_ctx():
        learn.fit(1)
    assert world.same_everywhere([p.sum().item() for p in learn.model.parameters()])


def check_a_problem_of_one_rank():
    good = torch.randint(3, (40,), generator=torch.Generator().manual_seed(1))
    checked(learner(targets=on_rank_1(good, good + 5)), False, "classes 0 .. 2", "(rank 1)", "1 problem\n")
    learn = learner(targets=good)
    checked(learn, True)
    fits(learn)

    def broken(pred, target):
        if world.rank() == 1:
            raise IndexError("no such thing")
        return accuracy(pred, target)

    learn = learner()
    learn.metrics = broken
    checked(learn, False, "broken: IndexError", "(rank 1)", "1 problem\n")

    x = torch.randn(40, 4)
    x[:] = on_rank_1(1.0, float("nan"))
    learn = learner()
    learn.dls = DataLoaders.from_datasets(TensorDataset(x, good), bs=4, device="cpu")
    checked(learn, False, "NaN", "(rank 1)")

    checked(learner(cbs=Fails()), False, "KeyError", "Fails.after_loss", "(rank 1)", "1 problem\n")
    learn = learner(nn.Sequential(nn.Linear(4, 3), Picky(world.rank() == 1)))
    checked(learn, False, "this input is not for me", "(rank 1)", "1 problem\n")
    learn.model[1].fails = False
    checked(learn, True, "all is well")
    fits(learn)


def check_a_problem_of_all_ranks():
    learn = learner(nn.Sequential(nn.Linear(5, 3)))
    checked(learn, False, "cannot be multiplied", "the model got", "1 problem\n")
    learn = learner(nn.Sequential(nn.Linear(4, 2)))
    checked(learn, False, "classes 0 .. 1")


def check_nothing_stays_behind():
    found = []
    for first in (False, True):
        torch.manual_seed(world.rank())
        learn = learner()
        if first:
            checked(learn, True)
            assert learn.opt is None
        with learn.no_logging(), learn.distrib_ctx():
            learn.fit(2)
        found.append([p.detach().clone() for p in learn.model.parameters()])
    assert all(map(torch.equal, *found))


if __name__ == "__main__":
    run(all_checks(globals()))
    leave()
