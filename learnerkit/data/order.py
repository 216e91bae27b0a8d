"""The order in which samples are drawn, and the random streams it comes from."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from learnerkit import world
from learnerkit.data.batches import HOST
from learnerkit.data.rows import IndexBatches, _reads_rows

# The order of samples


class SampleOrder:
    """Seeds for the sample order of each epoch of a fit.

    Epoch e is drawn with the seed that torch's own loader would have drawn from the global generator, had nothing else
    used that since the fit began. So a fit sees the order of a plain torch loop with the same seed, and no dropout,
    augmentation or validation, on any number of ranks, can change it.
    """

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.generator.set_state(torch.get_rng_state())
        self._seeds: list[int] = []

    def seed(self, epoch: int) -> int:
        """The seed of an epoch (counted from 0)."""
        while len(self._seeds) <= epoch:
            # The first draw is the one that torch's loader makes for its workers.
            _, seed = (int(torch.empty((), dtype=torch.int64).random_(generator=self.generator)) for _ in range(2))
            self._seeds.append(seed)
        return self._seeds[epoch]


def samplers_of(dl: Any) -> list:
    """The sampler objects behind a loader, from the batch sampler inwards."""
    found: list[Any] = []
    inner = dl
    while True:
        # Asked for None, not for truth: a sampler may have no length.
        parts = [getattr(inner, name, None) for name in ("batch_sampler", "sampler")]
        inner = next((part for part in parts if part is not None), None)
        if inner is None or any(inner is s for s in found):
            return found
        found.append(inner)


@contextmanager
def seeded_samplers(dl: Any, seed: int) -> Iterator[None]:
    """Give the samplers behind `dl` that would use the global generator one with `seed`, for as long as this lasts."""
    lent = [s for s in samplers_of(dl) if getattr(s, "generator", seed) is None]
    for sampler in lent:
        sampler.generator = torch.Generator().manual_seed(seed)
    if lent:  # the draw they would have made, so that the next fit starts elsewhere in the global stream
        torch.empty((), dtype=torch.int64).random_()
    try:
        yield
    finally:
        for sampler in lent:
            sampler.generator = None


# Samplers that draw from nothing but the generator they were lent (`seeded_samplers`), or have, or from none.
_SEEDED = (BatchSampler, IndexBatches, SequentialSampler, DistributedSampler)


def draws_globally(dl: Any) -> bool:
    """Whether a sampler behind a map-style loader may draw from the global generators."""
    if not isinstance(dl, DataLoader) or isinstance(dl.dataset, IterableDataset):
        return False
    return any(type(s) not in _SEEDED and getattr(s, "generator", None) is None for s in samplers_of(dl))


def same_stream(batches: Iterable, seed: int | tuple | None, advance: bool = False) -> Iterator:
    """Iterate with global generators of its own: what others draw meanwhile does not change it, nor it theirs.

    Args:
        batches: what to iterate over.
        seed: a seed to begin with; or states, as those of `world.seed_states`; or `None`: the present ones.
        advance: leave the global generators at its end as it would have left them, if nobody else has used them, and
            it began with their states.
    """
    first = inside = None
    stream = None
    while True:
        outside = world.seed_states()
        if inside is not None:
            world.set_seed_states(inside)
        elif isinstance(seed, int):
            world.seed_host(seed)
        elif seed is not None:
            world.set_seed_states(seed)
        first = first or outside
        try:
            stream = iter(batches) if stream is None else stream
            batch = next(stream)
            inside = world.seed_states()
        except StopIteration:
            if advance and not isinstance(seed, int) and _same_states(first, outside):
                outside = world.seed_states()
            return
        finally:
            world.set_seed_states(outside)
        yield batch


def _same_states(a: tuple, b: tuple) -> bool:
    numpy = a[2] is b[2] is None or (a[2][2:] == b[2][2:] and (a[2][1] == b[2][1]).all())
    return torch.equal(a[0], b[0]) and a[1] == b[1] and bool(numpy)


class OwnStream:
    """Batches (or indices) drawn as a `same_stream`.

    Args:
        batches: the user's sampler or batch sampler.
    """

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator:
        return same_stream(self.batches, None, advance=True)


def with_own_stream(dl: DataLoader) -> DataLoader:
    """A copy of `dl` whose samplers draw as an `OwnStream`."""
    name = "sampler" if dl.batch_sampler is None else "batch_sampler"
    return with_batches(dl, **{name: OwnStream(getattr(dl, name))})


def states_at_start(dl: Any) -> tuple:
    """The states of the global generators that the samplers of `dl` will find when an epoch begins now."""
    with keep_seeds():
        if getattr(dl, "generator", None) is None:  # torch's loader first draws a seed for its workers
            torch.empty((), dtype=torch.int64).random_()
        return world.seed_states()


@contextmanager
def keep_seeds(dl: Any = None, device: torch.device = HOST) -> Iterator[None]:
    """Give random generators their state back at the end: the host's (torch, python, numpy), and those behind `dl`.

    Args:
        dl: a loader.
        device: of another device than the host, its generators too.
    """
    states = world.seed_states()
    generators = [getattr(x, "generator", None) for x in (dl, *samplers_of(dl))]
    own = [(g, g.get_state()) for g in generators if isinstance(g, torch.Generator)]
    try:
        with world.device_streams_kept(device):
            yield
    finally:
        world.set_seed_states(states)
        for generator, state in own:
            generator.set_state(state)


def in_order(dl: Any, name: str) -> Any:
    """`dl` reading its whole dataset once, in dataset order, whatever its sampler; other iterables as they are."""
    if not isinstance(dl, DataLoader) or isinstance(dl.dataset, IterableDataset):
        return dl
    sampler: SequentialSampler = SequentialSampler(dl.dataset)  # type: ignore[arg-type]  # of any with a length
    if dl.batch_sampler is None:
        if type(dl.sampler) in (SequentialSampler, RandomSampler):
            return with_batches(dl, sampler=sampler)
        raise ValueError(
            f"loader {name} has batch_size=None and a {type(dl.sampler).__name__}, so its dataset cannot be read in "
            "order; pass get_preds a loader of your own as dl="
        )
    size = getattr(dl.batch_sampler, "batch_size", None) or 64
    return with_batches(
        dl,
        batch_sampler=IndexBatches(sampler, size, False) if _reads_rows(dl) else BatchSampler(sampler, size, False),
    )


def with_batches(dl: DataLoader, **samplers: Any) -> DataLoader:
    """A copy of `dl` that draws from another `sampler` or `batch_sampler`; all else, also of a subclass, is kept."""
    twin = DataLoader.__new__(type(dl))
    # torch's loader forbids assigning samplers once made; the copy is a loader being made.
    twin.__dict__.update(dl.__dict__ | samplers | {"_iterator": None})
    return twin
