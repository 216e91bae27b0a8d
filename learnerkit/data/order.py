"""The order in which samples are drawn, and the random streams that decide it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from learnerkit import world
from learnerkit.data.batches import loader_len
from learnerkit.data.lengths import LengthBatches
from learnerkit.data.rows import IndexBatches
from learnerkit.data.streams import Numbered
from learnerkit.torch_internals import has_iterator, loader_attributes

HOST = torch.device("cpu")


class SampleOrder:
    """Seeds for the sample order of each epoch of a fit.

    The seed of an epoch is the one that torch's own loader would draw from the global generator if nothing else had
    used the generator since the fit began. So the order is that of a plain torch loop with the same seed, and dropout,
    augmentation, validation and the number of ranks do not change it.
    """

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.generator.set_state(torch.get_rng_state())
        self._seeds: list[int] = []
        self._start: Tensor | None = None

    @property
    def start(self) -> Tensor:
        """The generator's state before the first seed; setting it begins anew."""
        return self.generator.get_state() if self._start is None else self._start

    @start.setter
    def start(self, state: Tensor) -> None:
        self.generator.set_state(state)
        self._seeds, self._start = [], None

    def seed(self, epoch: int) -> int:
        """Return the seed of an epoch (counted from 0)."""
        if self._start is None:
            self._start = self.generator.get_state()
        while len(self._seeds) <= epoch:
            # The first of the two draws is the one that torch's loader makes for its workers.
            _, seed = (draw_seed(self.generator) for _ in range(2))
            self._seeds.append(seed)
        return self._seeds[epoch]


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Draw a number as torch's loaders and samplers draw their seeds, from the global generator or another."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def samplers_of(dl: Any) -> list:
    """The sampler objects behind a loader, from the batch sampler inwards."""
    samplers: list[Any] = []
    inner = dl
    while True:
        # Compared with None, because the truth of a sampler is its length, which it may not have.
        names = ("batches",) if isinstance(inner, Numbered) else ("batch_sampler", "sampler")
        parts = [getattr(inner, name, None) for name in names]
        inner = next((part for part in parts if part is not None), None)
        if inner is None or any(inner is s for s in samplers):
            return samplers
        samplers.append(inner)


@contextmanager
def seeded_samplers(dl: Any, seed: int) -> Iterator[None]:
    """Give the samplers behind `dl` that have no generator one with this seed, inside the context."""
    without = [s for s in samplers_of(dl) if getattr(s, "generator", seed) is None]
    for sampler in without:
        sampler.generator = torch.Generator().manual_seed(seed)
    if without:  # make the draw that they would have made, so that the next fit gets another order
        draw_seed()
    try:
        yield
    finally:
        for sampler in without:
            sampler.generator = None


# Samplers that never draw from the global generators once `seeded_samplers` has given them a generator.
_SEEDED = (BatchSampler, IndexBatches, SequentialSampler, DistributedSampler)
# Those that `seeded_samplers` gives one.
_LENT = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler, LengthBatches)


def draws_globally(dl: Any, seeded: bool = False) -> bool:
    """Tell whether a sampler behind a map-style loader may draw from the global generators.

    Args:
        seeded: when it is read, it will be inside `seeded_samplers`.
    """
    if not isinstance(dl, DataLoader) or isinstance(dl.dataset, IterableDataset):
        return False
    own = (*_SEEDED, *_LENT) if seeded else _SEEDED
    samplers = (s for s in samplers_of(dl) if not isinstance(s, Numbered))
    return any(type(s) not in own and getattr(s, "generator", None) is None for s in samplers)


def states_at_start(dl: Any) -> tuple:
    """The states that the global generators will have when the samplers of `dl` draw, if an epoch begins now."""
    with keep_seeds():
        if getattr(dl, "generator", None) is None and not has_iterator(dl):
            draw_seed()  # torch's loader first draws one for its workers
        return world.seed_states()


@contextmanager
def keep_seeds(dl: Any = None, device: torch.device = HOST) -> Iterator[None]:
    """Restore random generators at the end: those of the host (torch, python, numpy), of `dl` and of its samplers.

    Args:
        device: if it is not the host, restore the generators of this type of device too.
    """
    states = world.seed_states()
    generators = [getattr(x, "generator", None) for x in (dl, *samplers_of(dl))]
    own_states = [(g, g.get_state()) for g in generators if isinstance(g, torch.Generator)]
    try:
        with world.device_streams_kept(device):
            yield
    finally:
        world.set_seed_states(states)
        for generator, state in own_states:
            generator.set_state(state)


def first_batch(dl: Any) -> Any:
    """The first batch of a loader, read in this process and without moving a random stream.

    Raises:
        ValueError: an iterator, which could not give the batch again, or a loader that has none.
    """
    if hasattr(dl, "__next__"):
        raise ValueError(
            f"the loader is an iterator ({type(dl).__name__}), which can be read only once, so that a batch of it "
            "would be lost for training; pass a list, a DataLoader or a class with __iter__"
        )
    read = dl
    if isinstance(dl, DataLoader):  # for one batch no workers need to start
        read = with_batches(dl, num_workers=0, timeout=0, persistent_workers=False)
    with keep_seeds(read):
        for batch in read:
            return batch
    raise ValueError(f"the loader is empty{why_empty(dl)}")


def why_empty(dl: Any) -> str:
    """Say why a loader gives no batch, to be put behind 'is empty'."""
    if hasattr(dl, "why_empty"):
        return f": {dl.why_empty}"
    size, bs = loader_len(getattr(dl, "dataset", None)), getattr(dl, "batch_size", None)
    if size and getattr(dl, "drop_last", False):
        return f": {size} samples are less than a batch of {bs}, and drop_last=True; use a smaller batch size"
    return f": its dataset has {size} samples" if size is not None else ": it has no batches"


def in_order(dl: Any, name: str) -> Any:
    """Return a copy of `dl` that reads its whole dataset once, in dataset order; other iterables as they are.

    Raises:
        ValueError: a loader without batches whose sampler is neither sequential nor random.
    """
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
    if isinstance(dl.batch_sampler, LengthBatches):
        return with_batches(dl, batch_sampler=dl.batch_sampler.in_order())
    size = getattr(dl.batch_sampler, "batch_size", None) or 64
    kind = IndexBatches if getattr(dl, "reads_rows", False) else BatchSampler
    return with_batches(dl, batch_sampler=kind(sampler, size, False))


def with_batches(dl: DataLoader, **samplers: Any) -> DataLoader:
    """Return a copy of `dl` with another `sampler` or `batch_sampler`; everything else, of a subclass too, is kept."""
    twin = DataLoader.__new__(type(dl))
    # Not by assignment, which torch's loader forbids to protect a loader in use.
    twin.__dict__.update(loader_attributes(dl) | samplers)
    return twin
