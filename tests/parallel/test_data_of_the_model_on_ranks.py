"""Data that the model makes, or that are chosen by what it has learned: nothing is read before its step."""

import warnings

import pytest
import torch
from helpers import mostly_slow, mostly_soak, raises
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from learnerkit import Callback, DataLoaders, GradientAccumulation, Learner, distributed

pytestmark = pytest.mark.ranks(2, soak=[3])

N = distributed.world_size()
STEPS, BS, LAST = 7, 3, 2  # batches, samples of each, and of the last one


class Log:
    """When batches and samples were drawn and read: by how many optimizer steps had been taken."""

    def __init__(self):
        self.steps, self.drawn, self.read = 0, [], []


def sample(i, batch):
    x = torch.full((BS, 1) if batch else (1,), float(i), dtype=torch.float64)
    return x + torch.arange(BS)[:, None] / BS if batch else x


class Drawn:
    """A sampler, or a batch sampler, that draws each item when it is asked for it."""

    def __init__(self, log, items):
        self.log, self.items = log, items

    def __iter__(self):
        for item in self.items:
            self.log.drawn.append(self.log.steps)
            yield item


class Sized(Drawn):
    def __len__(self):
        return len(self.items)


class Rows(Dataset):
    def __init__(self, log, batch=False):
        self.log, self.batch = log, batch

    def __len__(self):
        return STEPS * BS

    def __getitem__(self, i):
        self.log.read.append(self.log.steps)
        x = sample(i, self.batch)
        return x, x.sin()


class Played(IterableDataset):
    """A stream that notes when each of its samples, or batches, is made."""

    def __init__(self, log, batch):
        self.log, self.batch = log, batch

    def __iter__(self):
        for i in range(STEPS if self.batch else (STEPS - 1) * BS + LAST):
            self.log.drawn.append(self.log.steps)
            x = sample(i, self.batch)
            yield x, x.sin()


CUTS = [*([i * BS + j for j in range(BS)] for i in range(STEPS - 1)), [0, 1]]
FLAT = [i for cut in CUTS for i in cut]
KINDS = {  # (the loader, items of it in a batch)
    "batch sampler": (lambda log: DataLoader(Rows(log), batch_sampler=Sized(log, CUTS)), 1),
    "batch sampler without length": (lambda log: DataLoader(Rows(log), batch_sampler=Drawn(log, CUTS)), 1),
    "sampler": (lambda log: DataLoader(Rows(log), BS, sampler=Sized(log, FLAT)), BS),
    "sampler without length": (lambda log: DataLoader(Rows(log), BS, sampler=Drawn(log, FLAT)), BS),
    "items": (lambda log: DataLoader(Rows(log, True), None, sampler=Sized(log, range(STEPS))), 1),
    "items without length": (lambda log: DataLoader(Rows(log, True), None, sampler=Drawn(log, range(STEPS))), 1),
    "stream": (lambda log: DataLoader(Played(log, False), BS), BS),
    "stream of batches": (lambda log: DataLoader(Played(log, True), None), 1),
}  # fmt: skip


def learner(dl, cbs=None, model=None):
    torch.manual_seed(0)
    model = (model or nn.Linear(1, 1)).double()
    return Learner(DataLoaders(dl, device="cpu"), model, nn.MSELoss(), opt_func=torch.optim.SGD, lr=1e-3, cbs=cbs)


def fit(learn, epochs=1, **options):
    with learn.no_logging(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* processes each train a whole copy")
        warnings.filterwarnings("ignore", message="the data of rank")
        if not options:
            learn.fit(epochs)
            return
        with learn.distrib_ctx(**options):
            learn.fit(epochs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_soak(KINDS, *list(KINDS)[1::2]))
@pytest.mark.parametrize(
    "options", [{}, {"split_batches": True}, pytest.param({"split_batches": False}, marks=pytest.mark.slow)],
    ids=["1", "cut", "turns"],
)  # fmt: skip
def test_nothing_is_drawn_or_read_before_its_step(kind, options):
    make, items = KINDS[kind]
    log = Log()

    def stepped(cb):
        log.steps += 1

    fit(learner(make(log), Callback(after_step=stepped)), 1, **options)
    width = N if options.get("split_batches") is False else 1
    n = STEPS if items == 1 else len(FLAT)
    found = log.drawn[:n]
    if kind.startswith("stream") and width > 1:  # the last step may be left out: then it is read once more
        found, n = found[: width * items * log.steps], min(n, width * items * log.steps)
    assert found == [i // items // width for i in range(n)]
    assert log.read == sorted(log.read)
    if not kind.startswith("stream"):
        assert set(log.read) == set(range(-(-STEPS // width)))
        assert log.steps == -(-STEPS // width)


@pytest.mark.parametrize(
    "kind", mostly_slow(["stream", *(k for k in KINDS if "without" in k)], "sampler without length")
)
def test_a_last_step_of_fewer_batches_is_taken_where_no_length_is_known(kind):
    """It is known only when there is no further batch that the one before was the last of its step."""
    found = []
    for options in ({}, {"split_batches": True}):
        learn = learner(KINDS[kind][0](Log()), GradientAccumulation(n_batches=3))
        fit(learn, 2, **options)
        found.append(torch.cat([p.detach().flatten() for p in learn.model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


class Hardest:
    """A batch sampler that draws the samples which have the highest losses."""

    def __init__(self, n, steps):
        self.losses, self.steps = torch.linspace(2, 1, n, dtype=torch.float64), steps

    def __len__(self):
        return self.steps

    def __iter__(self):
        for _ in range(self.steps):
            yield self.losses.topk(4).indices.tolist()


class NoteLosses(Callback):
    """Gives the sampler the losses of all ranks."""

    def __init__(self, sampler):
        super().__init__()
        self.sampler, self.drawn = sampler, []

    def after_batch(self):
        losses = (self.pred - self.y).square().mean(1).detach()
        mine = self.xb[0][:, 0].long(), losses
        for places, found in distributed.all_gather(mine) if self.n_ranks > 1 else [mine]:
            self.sampler.losses[places] = found
            self.drawn.append(places.tolist())


@pytest.mark.slow
def test_a_sampler_that_goes_by_the_losses_draws_as_on_one_process():
    found = []
    for options in ({}, {"split_batches": True}):
        hardest = Hardest(STEPS * BS, 12)
        note = NoteLosses(hardest)
        learn = learner(DataLoader(Rows(Log()), batch_sampler=hardest), note)
        fit(learn, 2, **options)
        found.append((hardest.losses, sum(note.drawn, []), learn.model.weight.detach()))
    assert found[0][1] == found[1][1]
    assert len(set(found[0][1])) > 8
    for i in (0, 2):
        torch.testing.assert_close(found[0][i], found[1][i], rtol=1e-9, atol=1e-12)


class Keeps(nn.Linear):
    """Keeps the samples that it has seen in a buffer."""

    def __init__(self):
        super().__init__(1, 1)
        self.register_buffer("seen", torch.zeros(0, 1))

    def forward(self, x):
        if self.training:
            self.seen = torch.cat([self.seen, x.detach()])
        return super().forward(x)


def test_a_buffer_that_grows_by_the_samples_of_a_rank_is_told():
    x = torch.randn(N + 1, 1)
    learn = Learner(DataLoaders.from_datasets(TensorDataset(x, x), bs=N + 1, device="cpu"), Keeps(), nn.MSELoss())
    told = "the model's buffers go from rank 0 to all ranks, and have one shape everywhere"
    with warnings.catch_warnings(), raises(RuntimeError, told), learn.distrib_ctx(split_batches=True):
        warnings.simplefilter("ignore")
        learn.fit(1)
