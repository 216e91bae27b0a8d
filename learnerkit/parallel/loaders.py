"""The loaders of the ranks: each rank reads its share of the batches of the user's own loader."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import isgeneratorfunction
from itertools import chain, islice
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from learnerkit import distributed
from learnerkit.data.batches import loader_len, pinned
from learnerkit.data.cuts import BatchCount, Dims, Share, cut_rows, cut_share, no_rows
from learnerkit.data.iterable import LoaderView, read_on, say_read_forward, source_of
from learnerkit.data.order import has_index, has_state, samplers_of, states_at_start, with_batches
from learnerkit.data.stream import replaced_sampler, same_stream, split_evenly
from learnerkit.distributed import seeds
from learnerkit.marks import collective
from learnerkit.state import State
from learnerkit.text import first_few
from learnerkit.utils import itself, library_of, warn
from learnerkit.values import digests, tensors_in

if TYPE_CHECKING:
    from learnerkit.parallel.rank_step import RankStep


class RankLoader(LoaderView):
    """A rank's loader, which replaces the user's and has its other attributes.

    Args:
        loader: a copy of the user's loader, which draws from `indices`.
        indices: the `SampleStream` of this rank's share.
        dims: where the samples of a batch are, as `DataLoaders.batch_dim`.
        cut: takes this rank's piece of ready-made batches; `None`: the batches are this rank's alone.
        rank_step: the step that ranks take together in training; `None` in evaluation.

    Attributes:
        share: this rank's share of the last batch; without samples, the batch is empty.
        sample: if the batch is empty, the samples from which it was made, for models that cannot run on an empty batch.
        step_size: samples of all ranks in a full step; `None` where the loader does not know it.
        seed, since: the states of the global generators for data without an index, as in `same_stream`; data with one
            get the epoch's seed.
        is_last: the loader has no length, and this is the last batch, on all ranks alike: an empty one, which exists
            only if a step of several batches is still to be taken.
        source: the object with the state of data that every rank reads alike.
        stream: the states of the generators with which the ranks read the `source`, at the present position.
        alike: every rank reads all batches and takes its part of each.
    """

    source: Any = None
    is_last = False
    seed: tuple | None = None
    since: tuple | None = None
    # The number of parts of an iterable dataset, and the number of workers that read each.
    parts: tuple[int, int] | None = None
    stream: Any = None
    alike = False

    def __init__(
        self, loader: DataLoader, indices: Any, dims: Dims = 0, cut: "Callable[[Any], Share] | None" = None,
        rank_step: "RankStep | None" = None,
    ) -> None:  # fmt: skip
        super().__init__(loader)
        self.indices, self.dims = indices, dims
        self.cut, self.rank_step = cut, rank_step
        self.split = getattr(indices, "split", False)
        self.share: Share | None = None
        self.sample: Any = None

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def step_size(self) -> int | None:
        size = self.loader.batch_size
        return size and size * self.per_step

    def __iter__(self) -> Iterator:
        shares, self.is_last = None, False
        for batch in self.loader:
            if shares is None:  # kept for this iteration; another one may run inside it
                shares = self.indices.shares
            share = shares.popleft()._replace(batch=batch)
            if self.cut is not None:
                share = self.cut(batch)._replace(place=share.place)
            if share.size != 0 or self.indices.training:
                yield self._given(share, share.place)
        in_step = self.rank_step is not None and self.rank_step.mean.begun
        if self.share is not None and in_step and loader_len(self) is None:
            self.is_last = True
            yield self._given(Share(0, 0, 0), self.share.place + distributed.world_size())

    def _given(self, share: Share, place: int) -> Any:
        """Note a share and its place, and return its batch; without samples `no_rows` of the last one."""
        if share.batch is not None:
            self.sample = share.batch
        self.share = share._replace(place=place, batch=None)
        return no_rows(self.sample, self.dims) if share.size == 0 else share.batch

    @property
    def per_step(self) -> int:
        """The number of batches of the user's loader in a step of all ranks."""
        return 1 if self.split else distributed.world_size()


# Iterable datasets

_NOTHING = Share(0, 0, None)


def collated_share(collate: Callable[[list], Any], rank: int, ranks: int, least: int, samples: list) -> Share:
    """Collate the samples of a batch, or this rank's part of them.

    Args:
        collate: the collate function of the loader.
        rank, ranks: the part to take, and the number of parts; with 1 the batch is not cut.
        least: as in `split_evenly`.
        samples: the samples of the batch.
    """
    mine = split_evenly(samples, ranks, least)[rank]
    # An empty part is collated from real samples, for its shapes.
    return Share(0, len(mine), len(samples), collate(mine or samples[:least]))


class RankStreamLoader(RankLoader):
    """A `RankLoader` of an iterable dataset, whose end is unknown.

    In training a batch is read when its step begins, as on one process, since the model may make the data. The ranks
    then count those among them that have a batch, so that all end together. Unless the dataset is sharded, every rank
    reads all batches, alike.

    Args:
        dl, name, split, least, dims, count: as in `rank_loader`.
        rank_step: as in `RankLoader`.
        sharded: the dataset gives each rank and worker its own part by itself.
        join: go on, with empty batches, until the data of all ranks have ended, rather than those of the first rank.
        cut: takes a piece of ready-made batches.

    Raises:
        ValueError: batches that cannot be cut into a piece for each rank.
    """

    def __init__(
        self, dl: DataLoader, name: str, *, rank_step: "RankStep | None", split: bool, least: int, sharded: bool,
        join: bool, dims: Dims, cut: Callable[[Any], Share], count: BatchCount | None,
    ) -> None:  # fmt: skip
        ranks, size = distributed.world_size(), dl.batch_size
        made = dl.batch_sampler is None
        split = split and not sharded
        if split and size is not None and size < ranks:
            raise ValueError(
                f"{name} has batch_size={size}, which cannot be cut into a piece for each of {ranks} ranks; "
                "use split_batches=False or larger batches"
            )
        self.steps = loader_len(dl)
        if not split and not sharded and self.steps is not None:
            self.steps = -(-self.steps // ranks) if join or rank_step is None else self.steps // ranks
        replaced: dict[str, Any] = {} if sharded and has_state(dl) else dict(replaced_sampler(dl))
        self._finish, collate = itself, dl.collate_fn
        if not sharded and not dl.num_workers:  # samples of other ranks need not be collated
            self._finish, collate = partial(_joined, dl), itself
            replaced["pin_memory"] = False
        # Such an `__iter__` may look at the batches, as that of mosaicml-streaming does, which counts their samples.
        self._as_is = made or (sharded and isgeneratorfunction(type(dl).__iter__))
        if not self._as_is:
            collate = partial(collated_share, collate, *((distributed.rank(), ranks) if split else (0, 1)), least)
        loader = with_batches(dl, collate_fn=collate, **replaced)
        super().__init__(loader, None, dims, cut if made and split else None, rank_step)
        self.join, self.sharded = join, sharded
        self.split, self.alike = split, not sharded
        self._count = None if split or sharded else count
        self.parts = (ranks if sharded else 1, max(1, dl.num_workers))
        self._source = source_of(loader) if sharded and rank_step is not None else None
        known = not sharded and rank_step is not None and not dl.num_workers and has_state(dl.dataset)
        self.source = dl.dataset if known else None
        self._ended = False  # this rank has no more data, while others have
        self._left = False  # all ranks have stopped before this rank's data ended
        # The states of the global generators at the start of the epoch, with which a part of its own is read again
        self._states: Any = None
        self.begin(0, 0, {}, quiet=False)

    @property
    def own_state(self) -> State:
        """The state of this rank's own part of the data as training has read it."""
        if not self.sharded:
            return {}
        source = None if self._source is None else self._source.state_dict()
        # The state of a dataset that has ended with a short batch may already be that of the next epoch.
        size = None if self.share is None or isinstance(self._source, DataLoader) else self.share.size
        short = size is not None and size * distributed.world_size() < (self.step_size or 0)
        states = seeds.without_arrays(self._states)
        return {"source": source, "states": states, "ended": self._ended or short, "left": self._left}

    def begin(self, skip: float, first: int, own: State, quiet: bool) -> int:
        """Let the next epoch begin at a position; return the number of steps that are read again.

        Args:
            skip: the number of the user's batches before the position; infinite at the end of an epoch.
            first: the number of the first step.
            own: the `own_state` of a part of the data that is this rank's alone, or the states of the `source` and the
                `stream`.
            quiet: as in `read_on`.
        """
        self._first, state = first, own.get("source")
        self._states = own.get("states") if first else None  # else they are of the epoch before
        if state is not None and not first and own.get("left"):
            warn(
                f"the data of rank {distributed.rank()} had not been read to their end when all stopped with the first "
                "(uneven='stop'), so this rank goes on with the rest of them; a run without a break leaves them out if "
                "the dataset begins each epoch anew. uneven='join' uses all data (errors.html#resume)"
            )
        self.stream, self._skip = own.get("stream"), 0  # the number of batches to read and drop
        self._place: dict[str, Any] = {}  # the arguments of `read_on`
        if skip == inf:
            self._place = {"skip": skip}
        elif state is not None:
            # Data that all ranks read alike are read with their own generators, which draw nothing for workers.
            source, quiet = (self._source, quiet) if self.sharded else (self.source, True)
            self._place = {"source": source, "state": state, "at_end": not first, "quiet": quiet}
        else:
            if self.sharded:
                self._place = {"skip": first, "states": self._states}
            else:
                self._skip = int(skip)
            say_read_forward(self.loader, first)
            return first
        return 0

    def __len__(self) -> int:
        if self.steps is None:
            raise TypeError(f"{type(self.loader.dataset).__name__} has no length")
        return self.steps

    @collective
    def __iter__(self) -> Iterator:
        return self._alone() if self.rank_step is None else self._together(self.rank_step)

    @collective
    def _alone(self) -> Iterator:
        pieces = self._pieces()
        first = next(pieces, _NOTHING)  # the first piece
        if self.sharded:
            self._compare(first.batch)
        for step, piece in enumerate(chain([first], pieces)):
            if piece.size != 0:
                yield self._given(piece, self._place_of(step))

    def _pieces(self) -> Iterator[Share]:
        """Yield this rank's pieces of the steps, with their numbers of samples if they come with these."""
        batches = islice(self._batches(), self._skip, None)
        ranks, mine = (1, 0) if self.sharded or self.split else (distributed.world_size(), distributed.rank())
        self._marks: list[int] | None = None
        # All batches of a step are read before it: the model may make them, and the step changes the model.
        for group in iter(lambda: list(islice(batches, ranks)), []):
            if self._as_is:
                group = [Share(0, None, self._count and self._count(batch), batch) for batch in group]
            elif self.source is not None and group[-1].total < self.loader.batch_size:
                deque(batches, 0)  # the data have ended; reading on moves the generators to where they are at the end
            if self._marks is None and (self.sharded or self.rank_step):  # only these are compared
                # Ranks that read alike do so from the first sample on; parts of ranks may begin with equal samples.
                firsts = (
                    t if self.sharded or not t.ndim else t[:1]
                    for t in tensors_in(group[0].batch) if t.layout is torch.strided and not t.is_nested
                )  # fmt: skip
                # With pieces that the loader has cut, each rank has other samples of the batch.
                self._marks = [] if self.split and self.cut is None else digests(firsts)
            totals = [piece.total for piece in group]
            total = None if self.sharded or None in totals else sum(totals)
            if mine >= len(group):
                yield Share(0, 0, total)
            else:
                batch = self._finish(group[mine].batch)
                yield Share(0, group[mine].size, total, batch) if self.cut is None else self.cut(batch)

    def _batches(self) -> Iterator:
        """Return the batches from the position on; where all ranks read them, with the same random numbers on each."""
        batches = read_on(self.loader, **self._place)
        if self.sharded or self.loader.num_workers or self._place.get("skip"):
            return batches
        return same_stream(self._noting(batches), self.stream or self.seed, distributed.rank() == 0, self.since)

    def _noting(self, batches: Iterator) -> Iterator:
        for batch in batches:
            self.stream = None if self.source is None else seeds.seed_states()
            yield batch

    @collective
    def _compare(self, first: Any) -> list[bool]:
        """Return for each rank if it has data; warn if some have the same and should not, or have not and should."""
        everyone = distributed.all_gather(None if first is None else self._marks)
        alike = [rank for rank, marks in enumerate(everyone) if marks and everyone.count(marks) > 1]
        name = type(self.loader.dataset).__name__
        if not self.sharded and len({tuple(marks) for marks in everyone if marks is not None}) > 1:
            distributed.warn_once(
                f"each rank reads the whole {name} and takes its part of it, but the first batches that they have read "
                "are not the same, so that samples may be left out or count several times; if it gives each rank a "
                "part of its own, write distrib_ctx(sharded=True), and if it draws an order by itself, seed it alike"
                " (errors.html#rank-loader)"
            )
        elif self.sharded and alike:
            distributed.warn_once(
                f"sharded=True says that the {name} gives each rank a part of its own, but "
                f"the first batches of ranks {first_few(alike)} are the same, so that samples count several times; "
                "if it shares itself out only among the workers of a loader, leave sharded=True out"
                " (errors.html#rank-loader)"
            )
        return [marks is not None for marks in everyone]

    def _place_of(self, step: int) -> int:
        return step * distributed.world_size() + distributed.rank()

    @collective
    def _together(self, rank_step: "RankStep") -> Iterator:
        pieces, step = self._pieces(), self._first
        if self.sharded and self._source is None and self._states is None:
            self._states = states_at_start(self.loader)
        piece = next(pieces, _NOTHING)
        self.sample, self.is_last = piece.batch, False
        self._left = False
        having = sum(self._compare(piece.batch))
        if not having:
            if self._first:
                return  # the epoch had already ended
            raise ValueError("the training loader gave no batches on any rank; its iterable dataset is empty")
        least = 1 if self.join else distributed.world_size()
        if least <= having < distributed.world_size():  # ranks without data need the shapes of a batch
            rows = distributed.all_gather(None if piece.batch is None else cut_rows(piece.batch, self.dims, 0, 1))
            self.sample = next(b for b in (piece.batch, *rows) if b is not None)
        while having >= least:
            self._ended = piece.batch is None
            yield self._given(piece, self._place_of(step))
            piece = _NOTHING if self._ended else next(pieces, _NOTHING)
            having, step = rank_step.count_ranks(piece.batch is not None), step + 1
        if rank_step.mean.begun:  # a step of several batches is still to be taken
            self.is_last = True
            yield self._given(Share(0, 0, 0), self._place_of(step))
            rank_step.number += 1  # a rank that leaves this batch need not wait for this one, as in `count_ranks`
        self.share, self._ended = None, False
        self._left = piece.batch is not None
        if self.source is not None:
            deque(pieces, 0)  # the rest of the last step is read so that the next epoch begins alike on all ranks
        self._tell(step, piece.batch is not None)

    @collective
    def _tell(self, step: int, has_more: bool) -> None:
        left = distributed.all_gather(has_more)
        if any(left):
            over = [r for r, more in enumerate(left) if not more]
            distributed.warn(
                f"the data of {'rank' if len(over) == 1 else 'ranks'} {', '.join(map(str, over))} ended after step "
                f"{step}, and all ranks stopped with it, although others had more; uneven='join' uses all of it"
            )


def _joined(dl: DataLoader, samples: Any) -> Any:
    batch = dl.collate_fn(samples)
    return pinned(batch) if dl.pin_memory and torch.cuda.is_available() else batch


def rank_loader(
    dl: Any, name: str, *, training: bool, split: bool, least: int, sharded: bool = False, join: bool = False,
    rank_step: "RankStep | None" = None, dims: Dims = 0, count: BatchCount | None = None,
) -> RankLoader:  # fmt: skip
    """Return a loader of this rank's share of `dl`, with the user's samplers, collate function, workers and pinning.

    Args:
        dl: the user's loader, or a list of batches.
        name: the loader's name in errors.
        training, split, least: as in `SampleStream`.
        sharded, join: for iterable datasets, as in `RankStreamLoader`.
        rank_step, dims: as in `RankLoader`.
        count: returns the number of samples of a ready-made batch, where it is known.

    Raises:
        TypeError: a loader whose batches cannot be shared out.
        ValueError: one that shares them out itself, or gives them in no fixed order.
    """
    sizes: BatchCount | None = None
    if isinstance(dl, Sequence) and not isinstance(dl, str):
        if count is not None and isinstance(dl, list | tuple):  # other sequences may read a file for each batch
            batches, of_batch = dl, count

            def sizes(item: int) -> int | None:
                return of_batch(batches[item])

        # Without a generator here, torch's loader would draw from the global one.
        dl = DataLoader(dl, batch_size=None, collate_fn=itself, generator=torch.Generator())  # type: ignore[arg-type]
    if not isinstance(dl, DataLoader):
        library = library_of(type(dl))
        advice = "; its dataset may do in one: DataLoader(dls.train_ds, 64, shuffle=True)"
        if library != "fastai":
            advice = (
                ", or a list of batches; of an IterableDataset that yields them make DataLoader(..., batch_size=None)"
            )
        raise TypeError(
            f"{name} is a {type(dl).__name__}{f' of {library}' if library else ''}; under DDP it must be a torch "
            f"DataLoader, whose sampler tells what each rank reads{advice}"
        )
    if not dl.in_order and dl.num_workers:
        raise ValueError(f"{name} has in_order=False; sharing batches out among ranks needs their order")
    rank, ranks = distributed.rank(), distributed.world_size()
    cut = partial(cut_share, rank=rank, ranks=ranks, dims=dims, least=least, name=name, count=count)
    if not has_index(dl):
        return RankStreamLoader(
            dl, name, rank_step=rank_step, split=split, least=least, sharded=sharded, join=join, dims=dims, cut=cut,
            count=count,
        )  # fmt: skip
    for sampler in samplers_of(dl):
        # The batch sampler of a loader that accelerate has prepared is of no known class, but says how many share it.
        if isinstance(sampler, DistributedSampler) or getattr(sampler, "num_processes", 1) > 1:
            kind = type(sampler).__name__
            raise ValueError(
                f"{name} has a {kind}, which shares the data out a second time; give the loader the sampler of one "
                "process (or shuffle=True; for accelerate, the loader before prepare), and every rank gets its part of "
                "it (errors.html#rank-loader)"
            )
    replaced = replaced_sampler(dl, rank=rank, ranks=ranks, split=split, least=least, training=training, count=sizes)
    stream = next(iter(replaced.values()))
    return RankLoader(with_batches(dl, **replaced), stream, dims, cut if stream.opaque and split else None, rank_step)
