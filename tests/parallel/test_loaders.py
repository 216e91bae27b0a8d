"""The sampler swap: what all ranks together read, without processes and, in the last test, with three."""

import random
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from learnerkit.data.batches import loader_len
from learnerkit.data.loaders import DataLoaders
from learnerkit.data.stream import SampleStream, distribute, seeded_samplers, split_evenly
from learnerkit.distributed import seeds
from learnerkit.parallel.loaders import rank_loader

# World-size invariance as a property: drawn cases, read through real loaders, each rank's after the other


class Case(NamedTuple):
    """One drawn case; a failed assertion shows it."""

    kind: str
    n: int  # items of the dataset
    bs: int
    ranks: int
    drop_last: bool
    split: bool
    least: int  # 2: a model with a BatchNorm for each rank
    accumulated: int  # micro-batches in an optimizer step


class Indices(Dataset):
    """Every item is its index; a list of indices gives them all."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.as_tensor(i)


class Batches(Indices):
    """Every item is a whole batch of its own size."""

    def __getitem__(self, i):
        return 10 * i + torch.arange(i % 3 + 1)


class Shuffle:
    """A custom sampler, without a length if need be, that draws from torch's global generator."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(torch.randperm(self.n).tolist())


class SizedShuffle(Shuffle):
    def __len__(self):
        return self.n


class Buckets:
    """A custom batch sampler with batches of many sizes and types, drawn from python's and numpy's generators."""

    def __init__(self, n, bs=5):
        self.n, self.bs = n, bs

    def __len__(self):
        return len(list(self.cuts()))

    def cuts(self):
        start, size = 0, 1
        while start < self.n:
            yield start, size
            start, size = start + size, size % self.bs + 1

    def __iter__(self):
        order = list(range(self.n))
        random.shuffle(order)
        for start, size in self.cuts():
            yield random.choice([list, tuple, torch.tensor, np.array])(order[start : start + size])
            order[start + size :] = np.random.permutation(order[start + size :]).tolist()


class ShuffledBatches(BatchSampler):
    """A custom batch sampler around torch's own: batches of neighbours in random order."""

    def __iter__(self):
        batches = list(super().__iter__())
        random.shuffle(batches)
        return iter(batches)


def make_loader(case, plain=False, **kwargs):
    """A fresh loader of the kind, as each process makes it; `plain`: torch's class, where ours has one of its own."""
    n, size = case.n, {"batch_size": case.bs, "drop_last": case.drop_last}
    data, rows = Indices(n), TensorDataset(torch.arange(n))
    # The draws that torch's loaders make for their workers come from here, not from the global generator.
    kwargs["generator"] = torch.Generator().manual_seed(n)
    own = {"generator": torch.Generator().manual_seed(n + 1)}
    drawn = 1 + n * case.bs % 150  # samples that a sampler with replacement draws: fewer than there are, or more
    match case.kind:
        case "sequential":
            return DataLoader(data, **size, **kwargs)
        case "random":
            return DataLoader(data, sampler=RandomSampler(data), **size, **kwargs)
        case "random, own generator":
            return DataLoader(data, shuffle=True, **size, **kwargs)
        case "replacement":
            return DataLoader(data, sampler=RandomSampler(data, True, drawn), **size, **kwargs)
        case "weighted":
            weights = torch.linspace(0.1, 2, n)
            return DataLoader(data, sampler=WeightedRandomSampler(weights, drawn), **size, **kwargs)
        case "subset":
            return DataLoader(data, sampler=SubsetRandomSampler(range(0, n, 2), **own), **size, **kwargs)
        case "sampler":
            return DataLoader(data, sampler=SizedShuffle(n), **size, **kwargs)
        case "sampler without length":
            return DataLoader(data, sampler=Shuffle(n), **size, **kwargs)
        case "batch sampler":
            return DataLoader(data, batch_sampler=Buckets(n, case.bs), **kwargs)
        case "shuffled batches":
            batches = ShuffledBatches(SequentialSampler(data), case.bs, case.drop_last)
            return DataLoader(data, batch_sampler=batches, **kwargs)
        case "rows":
            if plain:
                return DataLoader(rows, shuffle=True, **size, **kwargs)
            return DataLoaders.from_datasets(rows, bs=case.bs, drop_last=case.drop_last, **kwargs).train
        case "rows of a subset":
            part = Subset(rows, range(n)[::-1])
            if plain:
                return DataLoader(part, sampler=RandomSampler(part), **size, **kwargs)
            kwargs |= {"sampler": RandomSampler(part), "bs": case.bs, "drop_last": case.drop_last}
            return DataLoaders.from_datasets(part, **kwargs).train
        case "batch_size=None, batches of indices":
            batches = BatchSampler(RandomSampler(data, **own), case.bs, case.drop_last)
            return DataLoader(data, batch_size=None, sampler=batches, **kwargs)
        case "batch_size=None":
            return DataLoader(Batches(n), batch_size=None, shuffle=True, **kwargs)


KINDS = [
    "sequential", "random", "random, own generator", "replacement", "weighted", "subset", "sampler",
    "sampler without length", "batch sampler", "shuffled batches", "rows", "rows of a subset",
    "batch_size=None, batches of indices", "batch_size=None",
]  # fmt: skip
OPAQUE, UNSIZED = "batch_size=None", "sampler without length"


def draw_cases(count, seed):
    rng = random.Random(seed)
    for i in range(count):
        kind = KINDS[i % len(KINDS)]
        yield Case(
            kind,
            n=rng.randint(1, rng.choice([12, 200])),
            bs=rng.randint(1, rng.choice([3, 20, 60])),
            ranks=rng.randint(1, 4),
            drop_last=rng.random() < 0.5,
            split=kind != OPAQUE and rng.random() < 0.5,
            least=rng.randint(1, 2),
            accumulated=rng.randint(1, 4),
        )


EPOCH_SEEDS = (7, 8)


def indices(batch):
    return (batch[0] if isinstance(batch, list) else batch).tolist()


def flat(batches):
    return [i for batch in batches for i in batch]


def read_alone(case, training=True, **kwargs):
    """What one process reads: a list of batches for each epoch, each a list of indices."""
    dl, epochs = make_loader(case, plain=True, **kwargs), []
    for seed in EPOCH_SEEDS:
        seeds.seed_host(seed)
        with seeded_samplers(dl, seed):  # as a fit does
            epochs.append([indices(batch) for batch in dl])
    return epochs


def read_on_ranks(case, monkeypatch, training=True, **kwargs):
    """What each rank reads: for each epoch and rank a list of (share, indices); and the loaders' lengths."""
    monkeypatch.setenv("WORLD_SIZE", str(case.ranks))
    epochs, lengths = [[] for _ in EPOCH_SEEDS], []
    for rank in range(case.ranks):
        monkeypatch.setenv("RANK", str(rank))
        seeds.seed_host(100 + rank)  # ranks whose own random streams differ
        dl, shared = make_loader(case, **kwargs), None
        for seed, epoch in zip(EPOCH_SEEDS, epochs, strict=True):
            if shared is None:
                least = case.least if training else 1
                shared = rank_loader(dl, "it", training=training, split=case.split, least=least)
            with seeded_samplers(shared.loader, seed):
                epoch.append([(shared.share, indices(batch)) for batch in shared])
        lengths.append(loader_len(shared))
    return epochs, lengths


def check_training(case, alone, by_rank, lengths):
    """An epoch of training on all ranks against that of one process."""
    taken = {len(found) for found in by_rank}
    assert len(taken) == 1, case  # every rank takes every step
    assert set(lengths) == ({None} if case.kind == UNSIZED else taken), case
    steps = list(zip(*by_rank, strict=True))
    width = 1 if case.split else case.ranks  # batches of one process in a step of all ranks
    groups = [alone[i : i + width] for i in range(0, len(alone), width)]
    assert [flat(mine for _, mine in step) for step in steps] == [flat(group) for group in groups], case
    for i, (step, group) in enumerate(zip(steps, groups, strict=True)):
        check_step(case, step, group, last=i == len(groups) - 1)
        assert [share.place for share, _ in step] == list(range(i * case.ranks, (i + 1) * case.ranks)), case
    # An optimizer step of several micro-batches: the same samples, and their number known beforehand.
    for i in range(0, len(steps), case.accumulated):
        together, whole = steps[i : i + case.accumulated], alone[i * width : (i + case.accumulated) * width]
        assert flat(mine for step in together for _, mine in step) == flat(whole), case
        if case.kind != OPAQUE:
            assert {sum(step[r][0].total for step in together) for r in range(case.ranks)} == {len(flat(whole))}, case


def check_step(case, step, group, last):
    """How one step is shared out; `group` is what one process reads for it."""
    mine = [batch for _, batch in step]
    if case.kind == OPAQUE:  # whole batches, which only their data know the sizes of
        assert mine == group + [[]] * (case.ranks - len(group)), case
        assert [share[1:3] for share, _ in step] == [(None if batch else 0, None) for batch in mine], case
        return
    sizes, total = [len(batch) for batch in mine], len(flat(group))
    assert [share.size for share, _ in step] == sizes, case
    assert {share.total for share, _ in step} == {total}, case
    unequal = case.kind != UNSIZED and len({len(batch) for batch in group}) > 1  # nobody knows that it is the last
    uneven = last and (len(group) < case.ranks or unequal)
    if not case.split and not uneven:
        assert mine == group, case  # rank r takes the r-th batch as it is
    else:  # spread over as many ranks as can be, none of them left with a single sample if `least` is 2
        used = sizes[: max(1, min(case.ranks, total // case.least))]
        assert min(used) >= min(case.least, total), case
        assert max(used) - min(used) <= 1, case


@pytest.mark.slow
def test_ranks_together_train_on_the_batches_of_one_process_in_order(monkeypatch):
    compared = 0
    for case in draw_cases(90, seed=0):
        alone = read_alone(case)
        epochs, lengths = read_on_ranks(case, monkeypatch)
        for one, by_rank in zip(alone, epochs, strict=True):
            check_training(case, one, by_rank, lengths)
        if case.kind != "sequential" and len(alone[0]) >= 20:
            first, second = ([mine for found in by_rank for _, mine in found] for by_rank in epochs)
            assert flat(first) != flat(second), case  # each epoch is drawn anew
            compared += 1
    assert compared > 8


def test_ranks_together_evaluate_every_sample_once_and_in_order(monkeypatch):
    for case in draw_cases(140, seed=1):
        alone = read_alone(case, training=False)
        epochs, lengths = read_on_ranks(case, monkeypatch, training=False)
        for one, by_rank in zip(alone, epochs, strict=True):
            found = sorted((share.place, mine, share) for rank in by_rank for share, mine in rank)
            assert flat(mine for _, mine, _ in found) == flat(one), case
            assert all(mine for _, mine, _ in found), case  # no step without samples
            assert len({place for place, _, _ in found}) == len(found), case
            taken = [len(rank) for rank in by_rank]
            if not case.split:
                assert [(place, mine) for place, mine, _ in found] == list(enumerate(one)), case
            if case.kind == UNSIZED:
                assert set(lengths) == {None}, case
            elif case.split:  # rank 0, which shows the progress, has a piece of every batch
                assert lengths[0] == taken[0] == max(taken), case
            else:
                assert lengths == taken, case
            if case.kind != OPAQUE:
                assert all(share.size == len(mine) for _, mine, share in found), case


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", pytest.param("batch sampler", marks=pytest.mark.soak), OPAQUE])
@pytest.mark.parametrize("persistent", [pytest.param(False, marks=pytest.mark.soak), True])
def test_ranks_with_loader_workers_read_the_same_batches(kind, persistent, monkeypatch):
    case = Case(kind, n=37, bs=5, ranks=3, drop_last=False, split=kind == "random", least=2, accumulated=2)
    workers = {"num_workers": 1, "persistent_workers": persistent}
    alone = read_alone(case, **workers)
    epochs, lengths = read_on_ranks(case, monkeypatch, **workers)
    for one, by_rank in zip(alone, epochs, strict=True):
        check_training(case, one, by_rank, lengths)


def iter_shares(batches):
    while True:
        yield batches.shares.popleft()


def test_the_rank_generators_are_left_alone():
    torch.manual_seed(1), random.seed(1)
    before = torch.get_rng_state(), random.getstate()
    stream = SampleStream(Buckets(30), 0, 2)
    stream.seed = 9
    assert list(stream)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


@pytest.mark.parametrize(
    ("n", "parts", "least", "sizes"),
    [(7, 3, 1, [3, 2, 2]), (2, 4, 1, [1, 1, 0, 0]), (7, 4, 2, [3, 2, 2, 0]), (1, 3, 2, [1, 0, 0]), (8, 4, 2, [2] * 4)],
)
def test_split_evenly_makes_parts_of_like_size(n, parts, least, sizes):
    pieces = split_evenly(list(range(n)), parts, least)
    assert [len(p) for p in pieces] == sizes
    assert sum(pieces, []) == list(range(n))


def test_a_last_group_of_equal_batches_is_not_spread():
    assert list(distribute([[1, 2], [3, 4], [5, 6], [7, 8]], 2, False, 1)) == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    assert list(distribute([[1, 2], [3, 4], [5, 6]], 2, False, 1)) == [[[1, 2], [3, 4]], [[5], [6]]]


def test_a_last_group_is_not_awaited_where_nobody_knows_how_many_batches_there_are():
    stream = iter([[1, 2], [3, 4], [5, 6], [7]])
    steps = distribute(stream, 2, False, 2)
    assert next(steps) == [[1, 2], [3, 4]]
    assert next(stream) == [5, 6]  # it has not been drawn
    assert list(steps) == [[[7], []]]
    assert list(distribute([[1], [2, 3]], 2, False, 2)) == [[[1], [2, 3]]]


def test_no_rank_is_left_with_a_single_sample_of_what_is_spread():
    assert list(distribute([[1, 2], [3, 4], [5, 6], [7]], 2, False, 2, n=4)) == [[[1, 2], [3, 4]], [[5, 6, 7], []]]
    # A batch of one is the user's own wish: it is as large as a rank's memory may allow.
    assert list(distribute([[1], [2], [3], [4]], 2, False, 2)) == [[[1], [2]], [[3], [4]]]


# Loaders


def share_out(dl, **kwargs):
    return rank_loader(dl, "the loader", **({"training": True, "split": True, "least": 1} | kwargs))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class Fancy(DataLoader):
    """A loader class of the user's own."""

    def __init__(self, data, flavour, **kwargs):
        super().__init__(data, **kwargs)
        self.flavour = flavour


def double(samples):
    return torch.stack([s[0] for s in samples]) * 2


def test_the_swap_keeps_what_the_user_set():
    data, generator = TensorDataset(torch.arange(10.0)), torch.Generator()
    init = print
    dl = Fancy(
        data, "mint", batch_size=4, num_workers=1, collate_fn=double, pin_memory=True, generator=generator,
        worker_init_fn=init, prefetch_factor=3, timeout=9, persistent_workers=True, shuffle=True,
    )  # fmt: skip
    twin = share_out(dl)
    kept = "flavour collate_fn num_workers pin_memory generator worker_init_fn prefetch_factor timeout dataset sampler"
    for name in [*kept.split(), "persistent_workers", "batch_size", "drop_last", "multiprocessing_context"]:
        assert getattr(twin, name) is getattr(dl, name), name
    assert type(twin.loader) is Fancy
    assert twin.indices.sampler is dl.batch_sampler
    assert type(dl.batch_sampler) is BatchSampler  # the user's own loader is as it was


def test_what_cannot_be_shared_out_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    data = TensorDataset(torch.arange(10.0))
    with pytest.raises(TypeError, match="must be a torch DataLoader.*, or a list of batches"):
        share_out(iter([1, 2]))
    with pytest.raises(ValueError, match="cannot be cut into a piece for each of 2 ranks"):
        share_out(DataLoader(Stream(), batch_size=1))
    with pytest.raises(ValueError, match="in_order=False"):
        share_out(DataLoader(data, num_workers=1, in_order=False))
    with pytest.raises(ValueError, match="DistributedSampler"):
        share_out(DataLoader(data, sampler=DistributedSampler(data, 2, 0)))
    prepared = BatchSampler(SequentialSampler(data), 2, False)
    prepared.num_processes = 2  # as accelerate's batch samplers say it
    with pytest.raises(ValueError, match="a BatchSampler, which shares the data out a second time.*before prepare"):
        share_out(DataLoader(data, batch_sampler=prepared))


def test_batches_made_by_the_dataset_are_dealt_whole():
    batches = SampleStream(SequentialSampler(range(5)), 1, 2, opaque=True)
    found = [(item, share) for item, share in zip(batches, iter_shares(batches), strict=False)]
    assert [item for item, share in found if share.size is None] == [1, 3]
    assert all(share.total is None for _, share in found)
    assert len(batches) == 3


def test_a_loader_can_be_read_in_the_middle_of_itself_and_again_after_a_break(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    shared = share_out(DataLoader(Indices(10), batch_size=3, num_workers=1), training=False)  # a worker draws ahead

    def read(middle=lambda: None):
        found = []
        for batch in shared:
            found.append((shared.share.place, shared.share.size, batch.tolist()))
            middle()
        return found

    whole = [(0, 2, [0, 1]), (2, 2, [3, 4]), (4, 2, [6, 7]), (6, 1, [9])]
    inner = []
    assert read(lambda: inner or inner.extend(read())) == whole
    assert inner == whole
    next(iter(shared))
    assert read() == whole


class Range(IterableDataset):
    def __init__(self, end):
        self.end = end

    def __iter__(self):
        return iter(range(self.end))


class Strided(Range):
    """Its samples are shared out one by one among the loader's workers."""

    def __iter__(self):
        info = get_worker_info()
        return iter(range(info.id, self.end, info.num_workers) if info else range(self.end))


class Uneven(Range):
    """The first worker has most of the samples."""

    def __iter__(self):
        info = get_worker_info()
        share = range(self.end) if info is None else (range(self.end - 1), range(self.end - 1, self.end))[info.id % 2]
        return iter(share)


class Shuffled(Strided):
    """The order is drawn in the worker."""

    def __iter__(self):
        share = list(super().__iter__())
        random.shuffle(share)
        return iter(share)


def take_a_part(worker_id):
    """As torch's documentation does."""
    info = get_worker_info()
    n, of = info.dataset.end, info.num_workers
    info.dataset.part = range(n * worker_id // of, n * (worker_id + 1) // of)


class Parted(Range):
    part = None

    def __iter__(self):
        return iter(range(self.end) if self.part is None else self.part)


@pytest.fixture
def pieces_of_ranks(monkeypatch):
    """A function that returns for each step what each rank gets of it: (size, samples)."""

    def pieces(loader, ranks, split, skip=0):
        found = []
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        for rank in range(ranks):
            monkeypatch.setenv("RANK", str(rank))
            shared = share_out(loader, split=split, training=False)
            shared.seed, shared.loader.generator = 3, torch.Generator().manual_seed(3)
            shared.begin(skip, 0, {}, quiet=False)
            found.append([(piece.size, [] if piece.batch is None else piece.batch) for piece in shared._pieces()])
        return list(zip_longest(*found, fillvalue=(0, [])))

    return pieces


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than the machine has cores
@pytest.mark.parametrize("drop_last", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "init", "workers"),
    [
        (Strided, None, 0),
        *(
            pytest.param(*case, marks=pytest.mark.slow if case[0] is Uneven else pytest.mark.soak)
            for case in [(Strided, None, 2), (Uneven, None, 3), (Parted, take_a_part, 2), (Range, None, 2)]
        ),
    ],
)
def test_ranks_read_a_stream_in_the_batches_of_one_process(kind, init, workers, ranks, drop_last, pieces_of_ranks):
    def loader():
        return DataLoader(kind(22), 4, num_workers=workers, collate_fn=list, drop_last=drop_last, worker_init_fn=init)

    alone = list(loader())  # of a `Range` each worker gives the whole
    together = pieces_of_ranks(loader(), ranks, split=True)
    assert [[i for n, samples in step for i in samples[:n]] for step in together] == alone
    assert all(samples for step in together for _, samples in step)
    for skip in (0, 1, 3):
        turns = pieces_of_ranks(loader(), ranks, split=False, skip=skip)
        assert [samples for step in turns for n, samples in step if n] == alone[skip:]


@pytest.mark.parametrize("workers", [0, 1])  # two would have a rank each
def test_an_order_that_a_stream_draws_is_the_same_on_every_rank(workers, pieces_of_ranks):
    random.seed(workers)
    turns = pieces_of_ranks(DataLoader(Shuffled(22), 4, num_workers=workers, collate_fn=list), 2, split=False)
    found = [i for step in turns for _, samples in step for i in samples]
    assert sorted(found) == list(range(22))
    assert found != list(range(22))


def test_batches_of_other_ranks_are_not_joined(pieces_of_ranks):
    joined = []

    def collate(samples):
        joined.append(samples)
        return samples

    pieces_of_ranks(DataLoader(Range(22), 4, collate_fn=collate), 2, split=False)
    assert sorted(joined) == [list(range(22))[i : i + 4] for i in range(0, 22, 4)]
    joined.clear()
    pieces_of_ranks(DataLoader(Range(22), 4, collate_fn=collate), 2, split=True)
    assert sorted(sum(joined, [])) == list(range(22))


def test_batches_that_a_dataset_makes_itself_are_taken_in_turns(pieces_of_ranks):
    turns = pieces_of_ranks(DataLoader(Range(5), None), 2, split=False)
    assert [[samples for _, samples in step] for step in turns] == [[0, 1], [2, 3], [4, []]]
    assert all(n is None for step in turns[:2] for n, _ in step)
