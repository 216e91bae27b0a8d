"""What a loader draws: its index batches, from a place on, and the random streams of those who draw and fetch them."""

import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from math import inf
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from learnerkit import world
from learnerkit.torch_internals import set_worker_dataset


def same_stream(
    batches: Iterable, seed: int | tuple | None, advance: bool = False, since: tuple | None = None
) -> Iterator:
    """Iterate with a private copy of the global random state; neither side sees the other's draws.

    Args:
        seed: what to start with: a seed, states as from `world.seed_states`, or `None` for the current states.
        advance: at the end leave the global generators in the final states of the private copy, if it started with
            theirs and nothing else has used them since.
        since: the global states when it started; by default those of now.
    """
    first, inside, stream = since, None, None
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


class Seeded:
    """What a loader's worker fetches next: when it arrives there, the worker's random generators are seeded.

    So its random numbers do not depend on which worker it is, how many there are, and what it has fetched before.
    """

    def __init__(self, seed: int, items: Any) -> None:
        self.seed, self.items = seed, items

    def __reduce__(self) -> tuple:
        return _arrive, (self.seed, self.items)


def _arrive(seed: int, items: Any) -> Any:
    world.seed_host(seed)
    return items


class PerSample(Dataset):
    """The user's dataset, with the random generators seeded for each sample by its index; see `world.set_seed`.

    It is read by `Lot`s. The generators of the process that reads are put back.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not yet, while it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, lot: "Lot") -> Any:
        states = world.seed_states()
        try:
            return self._get(lot.seed, lot.items)
        finally:
            world.set_seed_states(states)

    def __getitems__(self, lot: "Lot") -> list:
        states = world.seed_states()
        try:
            return [self._get(lot.seed, index) for index in lot.items]
        finally:
            world.set_seed_states(states)

    def _get(self, seed: int, index: Any) -> Any:
        number = int(index) if hasattr(index, "__index__") else index
        world.seed_host(world.mixed_seed(seed, number))
        several = getattr(self.dataset, "__getitems__", None)
        return self.dataset[index] if several is None or not isinstance(number, int) else several([index])[0]


class InitWorker:
    """Begins a loader's worker, and calls the user's `worker_init_fn`.

    A worker leaves signals to the process that reads, if that one handles them: it needs its workers in order to save.

    Args:
        worker_init_fn: the user's.
        per_sample: show the worker the user's dataset rather than the `PerSample`.
    """

    def __init__(self, worker_init_fn: Callable[[int], object] | None, per_sample: bool) -> None:
        self.worker_init_fn, self.per_sample = worker_init_fn, per_sample
        self.leaves: bool | None = None  # signals to the process that reads; `None`: ask in a fork of it

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"leaves": _handles_term()}  # a worker that is spawned is a fresh interpreter

    def __call__(self, worker: int) -> None:
        if _handles_term() if self.leaves is None else self.leaves:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            # The second one may be torch's or Python's, at the end of the process that reads.
            signal.signal(signal.SIGTERM, lambda signum, frame: signal.signal(signum, signal.SIG_DFL))
        if self.per_sample:
            set_worker_dataset(cast(Any, get_worker_info()).dataset.dataset)
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker)


def _handles_term() -> bool:
    return callable(signal.getsignal(signal.SIGTERM))


class Lot(NamedTuple):
    """What a `PerSample` fetches, with the seed of the epoch."""

    seed: int
    items: Any


class Share(NamedTuple):
    """The place of one batch of a rank in the whole.

    Attributes:
        place: of the batch in the order of all ranks' batches.
        size: samples of it that count; 0 for a rank that only takes part in the others' collectives; `None` where only
            the data tell.
        total: samples of all ranks in this step; `None` where only the data tell.
    """

    place: int
    size: int | None
    total: int | None


def starts_workers(dl: DataLoader) -> bool:
    """Tell whether a loader reads in worker processes."""
    return dl.num_workers > 0 and not getattr(dl, "reads_rows", False)


class Numbered:
    """A batch sampler (or a sampler, of a loader without batches) in the place of the user's.

    Attributes:
        batches: where its items come from.
        first: the number of the first item.
        seed: for the random numbers of those who fetch the items; `None`: they are not seeded.
        per_sample: they are seeded for each sample.
    """

    first: int = 0
    seed: int | None = None
    per_sample = False

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def _given(self, items: Iterable) -> Iterator:
        "The items as those who fetch them need them."
        seed = self.seed
        if seed is None:
            yield from items
        elif self.per_sample:
            yield from (Lot(seed, item) for item in items)
        else:
            yield from (Seeded(world.mixed_seed(seed, number), item) for number, item in enumerate(items, self.first))


class Draws(Numbered):
    """The user's batch sampler or sampler, read from a place on.

    Args:
        batches: the user's.
        counts: whether to note in `sizes` how many samples each batch has.

    Attributes:
        skip: how many items are drawn and dropped; if infinite, nothing is drawn at all.
        own: draw with a private copy of the global random states.
        states: what the copy starts with, as in `same_stream`; by default the states of then, which it notes here.
        advance, since: as in `same_stream`.
        sizes: a new queue in each iteration, as one may run inside another.
    """

    skip: float = 0
    own = False
    states: int | tuple | None = None
    advance = True
    since: tuple | None = None

    def __init__(self, batches: Any, counts: bool = False) -> None:
        super().__init__(batches)
        self.counts = counts
        self.sizes: deque[int] = deque()

    def __iter__(self) -> Iterator:
        return self._given(self.drawn())

    def drawn(self) -> Iterator:
        """The items, without what those who fetch them need."""
        sizes = self.sizes = deque()
        if self.skip == inf:
            return
        stream = self.batches
        if self.own:
            if self.states is None:
                self.states = world.seed_states()
            stream = same_stream(stream, self.states, self.advance, self.since)
        items = islice(stream, int(self.skip), None)
        if not self.counts:
            yield from items
            return
        for item in items:
            sizes.append(len(item))
            yield item
