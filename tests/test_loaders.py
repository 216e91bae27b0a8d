"""The sampler swap, without processes: what all ranks together read."""

import random

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from learnerkit.data import DataLoaders
from learnerkit.parallel.loaders import RankBatches, deal, rank_loader, split_evenly


class Buckets:
    """A custom batch sampler with batches of many sizes, shuffled by python's global generator."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return len(list(self.cuts()))

    def cuts(self):
        start, size = 0, 1
        while start < self.n:
            yield start, size
            start, size = start + size, size % 5 + 1

    def __iter__(self):
        order = list(range(self.n))
        random.shuffle(order)
        for start, size in self.cuts():
            yield order[start : start + size]


def draw_cases(count=300):
    rng = random.Random(0)
    for _ in range(count):
        yield (
            rng.randint(1, 200),
            rng.randint(1, 20),
            rng.randint(1, 4),
            rng.random() < 0.5,
            rng.random() < 0.5,
            rng.choice([SequentialSampler, RandomSampler, "buckets", "tensor"]),
            rng.choice([1, 2]),
        )


def batch_sampler(kind, n, bs, drop_last):
    if kind == "buckets":
        return Buckets(n), 3  # it draws from the global generators: seeded alike on every rank
    if kind == "tensor":
        return DataLoaders.from_datasets(
            TensorDataset(torch.arange(n)), bs=bs, drop_last=drop_last
        ).train.batch_sampler, 3
    sampler = kind(range(n), generator=torch.Generator().manual_seed(5)) if kind is RandomSampler else kind(range(n))
    return BatchSampler(sampler, bs, drop_last), None


def read(kind, n, bs, drop_last, rank, ranks, **kwargs):
    batches, seed = batch_sampler(kind, n, bs, drop_last)
    torch.manual_seed(100 + rank), random.seed(100 + rank)  # ranks whose own streams differ
    mine = RankBatches(batches, rank, ranks, seed=seed, **kwargs)
    found = [(list(map(int, batch)), share) for batch, share in zip(mine, iter_shares(mine), strict=False)]
    return found, mine


def iter_shares(batches):
    while True:
        yield batches.shares.popleft()


def test_ranks_together_read_the_stream_of_one_process_in_order():
    for n, bs, ranks, drop_last, split, kind, least in draw_cases():
        alone, _ = read(kind, n, bs, drop_last, 0, 1)
        alone = [batch for batch, _ in alone]
        by_rank, samplers = zip(
            *(read(kind, n, bs, drop_last, r, ranks, split=split, least=least) for r in range(ranks)), strict=True
        )
        assert {len(found) for found in by_rank} == {len(samplers[0])}  # every rank takes every step
        steps = list(zip(*by_rank, strict=True))
        counted = [[i for batch, share in step for i in batch[: share.size]] for step in steps]
        case = (n, bs, ranks, drop_last, split, kind)
        if split:
            assert counted == alone, case
        else:
            groups = [sum(alone[i : i + ranks], []) for i in range(0, len(alone), ranks)]
            assert counted == groups, case
        for step, indices in zip(steps, counted, strict=True):
            sizes = [share.size for _, share in step]
            assert {share.total for _, share in step} == {len(indices)}
            assert all(len(batch) >= 1 for batch, _ in step)  # a rank without samples gets a real one to slice
            uneven = split or len({len(b) for b in alone}) > 1
            assert max(sizes) - min(s for s in sizes if s) <= 1 or not split, case
            if least == 2 and len(indices) >= 2 and (split or not uneven):
                assert not any(size == 1 for size in sizes) or bs == 1, case


def test_evaluation_reads_every_batch_once_and_as_it_is():
    for n, bs, ranks, drop_last, split, kind, _ in draw_cases(150):
        alone, _ = read(kind, n, bs, drop_last, 0, 1)
        everyone = [read(kind, n, bs, drop_last, r, ranks, split=split, training=False)[0] for r in range(ranks)]
        placed = sorted((share.place, batch) for found in everyone for batch, share in found)
        assert sum((batch for _, batch in placed), []) == sum((batch for batch, _ in alone), [])
        if not split:
            assert [batch for _, batch in placed] == [batch for batch, _ in alone]
            assert [len(found) for found in everyone] == [
                len(RankBatches(batch_sampler(kind, n, bs, drop_last)[0], r, ranks, training=False))
                for r in range(ranks)
            ]


def test_the_rank_generators_are_left_alone():
    torch.manual_seed(1), random.seed(1)
    before = torch.get_rng_state(), random.getstate()
    list(RankBatches(Buckets(30), 0, 2, seed=9))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


@pytest.mark.parametrize(
    ("n", "parts", "least", "sizes"),
    [(7, 3, 1, [3, 2, 2]), (2, 4, 1, [1, 1, 0, 0]), (7, 4, 2, [3, 2, 2, 0]), (1, 3, 2, [1, 0, 0]), (8, 4, 2, [2] * 4)],
)
def test_split_evenly(n, parts, least, sizes):
    pieces = split_evenly(list(range(n)), parts, least)
    assert [len(p) for p in pieces] == sizes
    assert sum(pieces, []) == list(range(n))


def test_a_last_group_of_equal_batches_is_not_spread():
    assert list(deal([[1, 2], [3, 4], [5, 6], [7, 8]], 2, False, 1)) == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    assert list(deal([[1, 2], [3, 4], [5, 6]], 2, False, 1)) == [[[1, 2], [3, 4]], [[5], [6]]]


# Loaders


def share_out(dl, **kwargs):
    return rank_loader(dl, "the loader", **({"training": True, "split": True, "least": 1, "seed": 0} | kwargs))


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
    assert twin.batches.batches is dl.batch_sampler
    assert type(dl.batch_sampler) is BatchSampler  # the user's own loader is as it was


def test_what_cannot_be_shared_out_is_refused_with_the_reason():
    data = TensorDataset(torch.arange(10.0))
    with pytest.raises(TypeError, match="must be a torch DataLoader"):
        share_out([1, 2])
    with pytest.raises(TypeError, match="iterable dataset Stream"):
        share_out(DataLoader(Stream()))
    with pytest.raises(ValueError, match="in_order=False"):
        share_out(DataLoader(data, num_workers=1, in_order=False))
    with pytest.raises(ValueError, match="DistributedSampler"):
        share_out(DataLoader(data, sampler=DistributedSampler(data, 2, 0)))
    with pytest.raises(ValueError, match="batch_size=None"):
        share_out(DataLoader(data, batch_size=None))


def test_batches_made_by_the_dataset_are_dealt_whole():
    batches = RankBatches(SequentialSampler(range(5)), 1, 2, opaque=True)
    found = [(item, share) for item, share in zip(batches, iter_shares(batches), strict=False)]
    assert [item for item, share in found if share.size] == [1, 3]
    assert all(share.total is None for _, share in found)
    assert len(batches) == 3
