"""Batches that are made already, on several ranks: cut along their samples, or given to the ranks in turn."""

import warnings

import pytest
import torch
from helpers import Unsized, mostly_slow
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from learnerkit import AccumMetric, Callback, DataLoaders, GradientAccumulation, Learner, distributed, mae

pytestmark = pytest.mark.ranks(2, soak=[3])

N = distributed.world_size()


class Sums(nn.Module):
    """A model of time-major inputs (T, B, 3): a number for each step of each sample, from all steps before it."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 1)

    def forward(self, x):
        return self.body(x.cumsum(0)).squeeze(-1)


class Whole(nn.Module):
    """A number for each sample of time-major inputs."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 1)

    def forward(self, x, scale):
        return self.body(x.sum(0)).squeeze(-1) * scale


class Items(Dataset):
    """A dataset whose items are batches."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, i):
        return self.batches[i]


class Stream(IterableDataset):
    """The same, one after the other."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def draw(sizes, dim):
    generator = torch.Generator().manual_seed(1)

    def one(n):
        x = torch.randn(5, n, 3, generator=generator, dtype=torch.float64)
        y = torch.randn(5, n, generator=generator, dtype=torch.float64)
        return (x, y) if dim == 1 else (x, 0.5, y[0])

    return [one(n) for n in sizes]


SIZES, VALID = [6, 6, 5, 6, 1], [4, 3, 4]
KINDS = {"list": lambda b: b, "items": lambda b: DataLoader(Items(b), batch_size=None, shuffle=len(b) == len(SIZES)),
         "stream": lambda b: DataLoader(Stream(b), batch_size=None)}  # fmt: skip


def make(kind, dims=1, cbs=None):
    torch.manual_seed(3)
    model = (Sums() if dims == 1 else Whole()).double()
    loaders = [KINDS[kind](draw(sizes, dims)) for sizes in (SIZES, VALID)]
    dls = DataLoaders(*loaders, device="cpu", batch_dim=dims)
    joined = AccumMetric(lambda pred, y: (pred.flatten() * torch.arange(pred.numel())).sum() - y.sum(), "joined")
    return Learner(dls, model, nn.MSELoss(), opt_func=torch.optim.SGD, lr=0.05, metrics=[mae, joined], cbs=cbs)


def run(learn, **options):
    torch.manual_seed(5)  # of the order
    with learn.no_logging(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* processes each train a whole copy")
        if not options:
            learn.fit(2)
            return learn.get_preds(with_loss=True)
        with learn.distrib_ctx(**options):
            learn.fit(2)
            return learn.get_preds(with_loss=True)


def same(alone, learn):
    for a, b in zip(alone.model.parameters(), learn.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    a, b = (torch.tensor(each.recorder.values) for each in (alone, learn))
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "items"))
@pytest.mark.parametrize("dims", mostly_slow([1, (1, None, 0)], (1, None, 0)))
def test_batches_that_are_cut_train_as_on_one_process(kind, dims):
    """Weights, losses, metrics and predictions; a batch of one sample, too."""
    alone, learn = make(kind, dims), make(kind, dims)
    expected, found = run(alone), run(learn, split_batches=True)
    same(alone, learn)
    assert len(found[0]) == sum(VALID)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    wanted = draw(VALID, dims)
    targets = torch.cat([batch[-1].movedim(1, 0) if dims == 1 else batch[-1] for batch in wanted])
    assert torch.equal(found[1], targets)  # each sample once, in order


class Steps(Callback):
    """The samples of all ranks in each step, as the ranks know them beforehand."""

    only_fit = True

    def before_fit(self):
        self.totals, self.open = [], 0

    def before_batch(self):
        if self.training:
            total = self.dl.share.total if self.n_ranks > 1 else self.batch_size
            self.open += total

    def before_step(self):
        self.totals.append(self.open)
        self.open = 0


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "stream"))
def test_a_step_of_so_many_samples_has_those_of_all_ranks(kind):
    totals = []
    for options in ({}, {"split_batches": True}):
        cbs = [Steps(), GradientAccumulation(n_samples=11)]
        learn = make(kind, cbs=cbs)
        run(learn, **options)
        totals.append((cbs[0].totals, learn))
    (one, alone), (several, learn) = totals
    assert one == several
    assert sum(one) == 2 * sum(SIZES)
    same(alone, learn)


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_slow(["list", "stream"], "stream"))
def test_batches_in_turn_are_counted_where_all_ranks_know_them(kind):
    steps = Steps()
    learn = make(kind, cbs=[steps, GradientAccumulation(n_samples=11)])
    run(learn, uneven="join")
    assert sum(steps.totals) == 2 * sum(SIZES)
    together = [sum(SIZES[i : i + N]) for i in range(0, len(SIZES), N)]
    found, have = [], 0
    for i, total in enumerate(together):
        have += total
        if have >= 11 or i == len(together) - 1:
            found.append(have)
            have = 0
    assert steps.totals == 2 * found


def test_batches_of_a_dataset_in_turn_are_not_known():
    learn = make("items", cbs=GradientAccumulation(n_samples=11))
    with pytest.raises(ValueError, match="makes this rank's alone; use split_batches=True"):
        run(learn, split_batches=False)


def test_a_list_in_turn_gives_each_rank_the_next_batch():
    seen = []
    learn = make("list", cbs=Callback(before_batch=lambda cb: seen.append(cb.batch_size if cb.training else None)))
    run(learn, split_batches=False)
    mine = [size for size in seen if size is not None]
    wanted = [*SIZES, *[0] * (-len(SIZES) % N)][distributed.rank() :: N]
    assert mine == 2 * wanted


def test_what_cannot_be_cut_says_what_to_do():
    batches = [(torch.randn(4, 3), torch.randn(5, 1))]
    learn = Learner(DataLoaders(batches, device="cpu"), nn.Linear(3, 1), nn.MSELoss())
    with pytest.raises(ValueError, match=r"the training loader cannot be cut.*\(0: 4, 1: 5\)"):
        run(learn, split_batches=True)
    learn = Learner(DataLoaders(Unsized(batches), device="cpu"), nn.Linear(3, 1), nn.MSELoss())
    with pytest.raises(TypeError, match=r"is a Unsized; .*or a list of batches"):
        run(learn, split_batches=True)


class Flat(nn.Module):
    reduction = "mean"

    def forward(self, pred, y):
        return nn.functional.mse_loss(pred, y.flatten(), reduction=self.reduction)


def test_flat_predictions_of_time_major_batches_are_not_joined():
    learn = make("list")
    learn.metrics, learn.loss_func = [], Flat()
    learn.model = nn.Sequential(learn.model, nn.Flatten(0))
    with pytest.raises(ValueError, match="do not have these in dimension 1"):
        run(learn, split_batches=True)
