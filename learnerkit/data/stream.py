"""The index stream of a loader, from a position on and for one rank, and its random numbers."""

import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from math import inf
from multiprocessing.connection import arbitrary_address  # type: ignore[attr-defined]  # typeshed lacks it
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from learnerkit import distributed
from learnerkit.data.batches import loader_len
from learnerkit.data.cuts import BatchCount, Share, even_spans
from learnerkit.data.lengths import LengthBatches
from learnerkit.data.order import has_index, samplers_of
from learnerkit.data.rows import IndexBatches, draw_seed
from learnerkit.distributed import seeds
from learnerkit.marks import collective
from learnerkit.state import Learner
from learnerkit.text import printable
from learnerkit.torch_internals import keep_queues, set_worker_dataset
from learnerkit.values import same


class SampleStream:
    """A batch sampler, or the sampler of a loader without batches, that replaces the user's.

    It draws the user's items from a position on, alike on every rank, and yields the share of this rank.

    Args:
        sampler: the user's sampler.
        rank, ranks: the rank, and the number of ranks.
        split, least: as in `distribute`.
        training: every rank takes every step, if need be with a sample that does not count; in evaluation, steps
            without samples are left out, and batches are never spread.
        opaque: the items do not tell how many samples a batch has, because each stands for a whole batch. If batches
            are to be split, every rank then takes each item whole.
        count: returns the number of samples of such an item, where it is known.

    Attributes:
        place: the number of items that were read before; they are drawn and dropped. If it is infinite, nothing is
            drawn.
        first: the number of the first step.
        seed: the seed of the host's generators while the sampler draws; `None`: it draws from their present states.
        fetching: (seed, per sample): the seed of the processes that fetch the items, and whether each sample has its
            own seed; `None`: they are not seeded.
        shares: the shares of the yielded items, until the loader's reader removes them; a new queue in each iteration,
            as one may run inside another.
    """

    place: float = 0
    first = 0
    seed: int | None = None
    fetching: tuple[int, bool] | None = None

    def __init__(
        self, sampler: Any, rank: int = 0, ranks: int = 1, *, split: bool = False, least: int = 1,
        training: bool = True, opaque: bool = False, count: BatchCount | None = None,
    ) -> None:  # fmt: skip
        self.sampler, self.rank = sampler, rank
        self.ranks, self.split = ranks, split
        self.training = training
        self.least = 1 if opaque else least  # a rank can take no less than one such item
        self.opaque, self.count = opaque, count
        self.shares: deque[Share] = deque()

    def __len__(self) -> int:
        n = len(self.sampler)
        if self.split:
            return n
        return -(-n // self.ranks) if self.training else len(range(self.rank, n, self.ranks))

    def __iter__(self) -> Iterator:
        # Loaders with workers draw ahead of the batches that they yield, in the same order: the shares wait in a queue.
        self.shares = deque()
        return self._given(self.shares)

    def _given(self, shares: deque[Share]) -> Iterator:
        """Yield this rank's items, with a seed if fetching is seeded."""
        fetching = self.fetching
        for number, (share, item) in enumerate(self._mine(), self.first):
            shares.append(share)
            if fetching is None:
                yield item
            else:
                seed, per_sample = fetching
                yield Seeded(seed if per_sample else seeds.mixed_seed(seed, number), item, per_sample)

    def _mine(self) -> Iterator[tuple[Share, Any]]:
        if self.place == inf:
            return
        drawn = self.sampler if self.seed is None else same_stream(self.sampler, self.seed)
        items = islice(drawn, int(self.place), None)
        if self.ranks == 1 or (self.opaque and self.split):
            for step, item in enumerate(items, self.first):
                size = None if self.opaque else loader_len(item)
                yield Share(step * self.ranks + self.rank, size, size), item
            return
        for step, pieces in enumerate(self._steps(items), self.first):
            mine, place = len(pieces[self.rank]), step * self.ranks + self.rank
            if not mine and not self.training:
                continue
            # A rank without samples gets real ones: their empty slice has the right shapes and types.
            piece = pieces[self.rank] if mine else pieces[0][: self.least]
            if self.opaque:
                total = self._samples_in(chain(*pieces)) if self.training else None
                yield Share(place, None if mine else 0, total), piece[0]
            else:
                yield Share(place, mine, sum(map(len, pieces))), piece

    def _steps(self, items: Iterable) -> Iterator[list]:
        """Yield for each step the pieces of all ranks; a piece of opaque items is a list of one."""
        batches = ([item] for item in items) if self.opaque else items
        # Joined batches would be padded to their longest sample, which may need too much memory.
        join, n = not isinstance(self.sampler, LengthBatches), loader_len(self.sampler)
        left = None if n is None else n - int(self.place)
        return distribute(batches, self.ranks, self.split, self.least, join, left, spread=self.training)

    def _samples_in(self, items: Iterable) -> int | None:
        counts = [None if self.count is None else self.count(item) for item in items]
        return None if None in counts else sum(cast(list[int], counts))


def stream_of(dl: Any) -> SampleStream | None:
    """Return the `SampleStream` of a copy of a loader, or of a view of one."""
    return next((sampler for sampler in samplers_of(dl) if isinstance(sampler, SampleStream)), None)


def replaced_sampler(dl: DataLoader, **kwargs: Any) -> dict[str, SampleStream]:
    """Return the arguments of `with_batches` that put a `SampleStream` with these arguments into a copy of a loader."""
    name = "sampler" if dl.batch_sampler is None else "batch_sampler"
    stream, sampler = stream_of(dl), getattr(dl, name)
    whole = dl.batch_sampler is None and not isinstance(sampler, BatchSampler)
    opaque = whole or not has_index(dl) or (dl.num_workers > 0 and not dl.in_order)
    return {name: SampleStream(sampler if stream is None else stream.sampler, **{"opaque": opaque} | kwargs)}


# The sharing of batches among ranks


def split_evenly(batch: Any, parts: int, least: int) -> list:
    """Cut `batch` into `parts` consecutive pieces, as even as possible; the last ones are empty if it is too short.

    Args:
        batch: a list or tensor of indices.
        parts: the number of pieces.
        least: the least size of a piece; other pieces become empty to reach it.
    """
    return [batch[start:stop] for start, stop in even_spans(len(batch), parts, least)]


def distribute(
    batches: Iterable, ranks: int, split: bool, least: int, join: bool = True, n: int | None = None,
    spread: bool = True,
) -> Iterator[list]:  # fmt: skip
    """Distribute a stream of index batches over ranks: yield for each step a list with a piece for each rank.

    No batch is drawn before its step, as a sampler may depend on the model's training so far.

    Args:
        batches: the user's stream, the same on every rank.
        ranks: the number of ranks.
        split: cut each batch into a piece for each rank; otherwise a step takes a batch for each rank, and the last,
            uneven step is spread over all of them.
        least: the least number of samples of a rank in a batch that is cut or spread; whole batches are not changed.
        join: whether the batches of an uneven step may be joined; otherwise each is cut separately.
        n: the number of batches, if it is known; otherwise a last step with a batch for each rank is not spread.
        spread: whether an uneven step is spread; otherwise some ranks have an empty piece in it.
    """
    if split:
        yield from (split_evenly(batch, ranks, least) for batch in batches)
        return
    batches, drawn = iter(batches), 0
    while group := list(islice(batches, ranks if n is None or drawn >= n else min(ranks, n - drawn))):
        drawn += len(group)
        is_uneven = len(group) < ranks or (join and drawn == n and len(set(map(len, group))) > 1)
        if not is_uneven or not spread:
            yield group + [[]] * (ranks - len(group))
        elif join:
            tensors = all(isinstance(batch, Tensor) for batch in group)
            yield split_evenly(torch.cat(group) if tensors else list(chain(*group)), ranks, least)
        else:  # each batch goes to some of the ranks
            some = split_evenly(range(ranks), len(group), 1)
            yield [
                piece for batch, of in zip(group, some, strict=True) for piece in split_evenly(batch, len(of), least)
            ]


# The random numbers of samplers


def same_stream(
    batches: Iterable, seed: int | tuple | None, advance: bool = False, since: tuple | None = None
) -> Iterator:
    """Iterate with a private copy of the global random state; neither side sees the other's draws.

    Args:
        seed: the start of the copy: a seed, states as from `seeds.seed_states`, or `None` for the current states.
        advance: at the end, set the global generators to the final states of the private copy, if it started with
            theirs and they have not been used since.
        since: the global states at the start; by default the current ones.
    """
    first, inside = since, seed
    stream = None
    while True:
        outside = seeds.seed_states()
        first = first or outside
        if isinstance(inside, int):
            seeds.seed_host(inside)
        else:
            seeds.set_seed_states(inside or outside)
        try:
            stream = iter(batches) if stream is None else stream
            batch = next(stream)
            inside = seeds.seed_states()
        except StopIteration:
            # A state that was loaded has no arrays.
            if advance and not isinstance(seed, int) and same(*map(seeds.without_arrays, (first, outside))):
                outside = seeds.seed_states()
            return
        finally:
            seeds.set_seed_states(outside)
        yield batch


# These never draw from the global generators once `seeded_samplers` has lent them a generator.
_SEEDED = (
    BatchSampler, IndexBatches, SequentialSampler, DistributedSampler, RandomSampler, SubsetRandomSampler,
    WeightedRandomSampler, LengthBatches, list, tuple, range,
)  # fmt: skip


def draws_globally(dl: Any) -> bool:
    """Tell whether a user-defined sampler behind a loader may draw from the global generators."""
    if not has_index(dl):
        return False
    own = (s for s in samplers_of(dl) if type(s) not in (SampleStream, *_SEEDED))
    return any(getattr(s, "generator", None) is None for s in own)


@contextmanager
def seeded_samplers(dl: Any, seed: int) -> Iterator[None]:
    """Let the samplers behind `dl` draw with this seed, inside the context.

    Torch's samplers without a generator are lent one, with which they draw as in a plain loop. Samplers of other
    classes may use the global generators: a `SampleStream` reads them with a private copy of these.
    """
    stream, lent = stream_of(dl), [s for s in samplers_of(dl) if getattr(s, "generator", seed) is None]
    if stream is not None and draws_globally(dl):
        stream.seed = seed
    for sampler in lent:
        sampler.generator = torch.Generator().manual_seed(seed)
    try:
        yield
    finally:
        for sampler in lent:
            sampler.generator = None
        if stream is not None:
            stream.seed = None


# The random numbers of the processes that fetch samples


@dataclass(eq=False)
class Seeded:
    """The items that a loader fetches next, with the seed of the random numbers that are drawn for them.

    When it is unpickled in a worker, it seeds the worker's generators and becomes the items. So these random numbers do
    not depend on the worker, the number of workers, or the items that the worker has fetched before.

    Args:
        seed: the seed.
        items: the items of the sampler.
        per_sample: each sample has its own seed: a `PerSample` takes this object as it is.
    """

    seed: int
    items: Any
    per_sample: bool = False

    def __reduce__(self) -> tuple:
        return Seeded if self.per_sample else _arrive, (self.seed, self.items, self.per_sample)


def _arrive(seed: int, items: Any, per_sample: bool) -> Any:
    seeds.seed_host(seed)
    return items


class PerSample(Dataset):
    """The user's dataset, read by `Seeded` items, with a seed for each sample by its index; see `distributed.set_seed`.

    The generators of the reading process are restored.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, seeded: Seeded) -> Any:
        return self._fetched(seeded.seed, [seeded.items])[0]

    def __getitems__(self, seeded: Seeded) -> list:
        return self._fetched(seeded.seed, seeded.items)

    def _fetched(self, seed: int, indices: Iterable) -> list:
        states, samples = seeds.seed_states(), []
        several: Any = getattr(self.dataset, "__getitems__", None)
        try:
            for index in indices:
                number = int(index) if hasattr(index, "__index__") else index
                seeds.seed_host(seeds.mixed_seed(seed, number))
                whole = several is None or not isinstance(number, int)
                samples.append(self.dataset[index] if whole else several([index])[0])
        finally:
            seeds.set_seed_states(states)
        return samples


def begin_worker(init: Callable[[int], object] | None, per_sample: bool, leaves_signals: bool, worker: int) -> None:
    """Run a loader worker's start: the `worker_init_fn` of the loader, once the first arguments are bound.

    Args:
        init: the user's `worker_init_fn`.
        per_sample: show the worker the user's dataset rather than the `PerSample`.
        leaves_signals: ignore signals, because the reading process handles them and needs its workers in order to save.
        worker: the index of the worker.
    """
    if leaves_signals:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # A second SIGTERM may come from torch or Python, at the end of the reading process.
        signal.signal(signal.SIGTERM, lambda signum, frame: signal.signal(signum, signal.SIG_DFL))
    if per_sample:
        set_worker_dataset(cast(Any, get_worker_info()).dataset.dataset)
    if init is not None:
        init(worker)


def handles_signals() -> bool:
    """Tell whether this process handles SIGTERM."""
    return callable(signal.getsignal(signal.SIGTERM))


def starts_workers(dl: DataLoader) -> bool:
    """Tell whether a loader reads in worker processes."""
    return dl.num_workers > 0 and not getattr(dl, "reads_rows", False)


def check_socket_path() -> None:
    """Check that loader workers can make the sockets in the temporary directory by which they hand tensors over.

    A worker that cannot would drop each batch, and the reading process would wait for it without end.

    Raises:
        OSError: nothing can be made in the temporary directory.
        ValueError: its path is too long for sockets.
    """
    path, limit = arbitrary_address("AF_UNIX"), 103 if sys.platform == "darwin" else 107
    if (over := len(os.fsencode(path)) - limit) > 0:
        raise ValueError(
            f"the path of the temporary directory is too long for the sockets of loader workers, by {over} bytes "
            f"({printable(path)}): let TMPDIR name a directory with a short path, such as /tmp, or give num_workers=0"
        )


# The context of a reading


@contextmanager
@collective
def reading(learn: "Learner") -> Iterator[None]:
    """Seed the drawing and the fetching of samples while the learner's loader is read in this context.

    In a fit the seeds are those of the epoch, for training and for evaluation. The numbers that torch's loader and
    sampler would draw are drawn from the global generators, so that readings outside of a fit differ, and so do fits.
    Training that continues in mid-epoch draws none, because the generators were saved after those draws.
    """
    position, training = learn._position if learn._in_fit else None, learn.training
    loader: Any = learn.dl
    while not isinstance(loader, DataLoader) and (inner := getattr(loader, "loader", None)) is not None:
        loader = inner
    indexed = has_index(loader)
    stream = stream_of(loader)
    goes_on = training and position is not None and position.goes_on
    if goes_on and learn.n_ranks == 1 and stream is None and indexed and loader is learn.dl:
        # A callback has put another loader in the place of the one that begins at the position.
        learn.dl = loader = learn.dls.twin(loader, training=True, always=True)
        stream = stream_of(loader)
    draws = any(getattr(s, "generator", s) is None for s in samplers_of(loader)) or draws_globally(loader)
    seeds_loader, generator = indexed or stream is not None, getattr(loader, "generator", None)
    base = draw_seed(generator) if seeds_loader and not goes_on else 0
    seed = draw_seed() if draws and not goes_on else 0
    alike = learn.n_ranks == 1 or getattr(learn.dl, "alike", False)  # no other rank reads other samples
    if position is not None:
        seed, base = position.seed() if training else position.seed(False), position.seed(training)
    elif learn.n_ranks > 1 and (draws or alike):
        seed, base = distributed.broadcast((seed, base))  # every rank must reach this
    try:
        if seeds_loader:
            loader.generator = torch.Generator().manual_seed(base)  # the loader's own draw has been made above
        if stream is not None:
            # The steps that are read a second time.
            again = position.data.again if position is not None and training else 0
            stream.place, stream.first = 0, learn.first_iter - again
            per_sample = isinstance(loader.dataset, PerSample)
            if per_sample or starts_workers(loader):
                rank = 0 if per_sample or alike else distributed.rank()
                stream.fetching = seeds.mixed_seed(base, rank), per_sample
            if position is not None and indexed and goes_on:
                stream.place = inf if position.over else position.read
        if position is not None and training:
            position.note_start(loader)
        with seeded_samplers(loader, seed):
            yield
    finally:
        learn._batch_index = -1
        if seeds_loader:
            loader.generator = generator
        if stream is not None:
            stream.fetching = None
        keep_queues(loader)
