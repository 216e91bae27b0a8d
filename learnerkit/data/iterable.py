"""Data without an index: streams and loaders of other kinds, with their states, and reading them on from a place."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from learnerkit import world
from learnerkit.data.order import draw_seed, has_state, keep_seeds
from learnerkit.utils import warn


class LoaderView:
    """A loader in the place of another one, whose other attributes it has.

    Args:
        loader: the other one.
        read: returns an iterator over the batches of the view, given the other loader.
    """

    def __init__(self, loader: Any, read: Callable[[Any], Iterator] = iter) -> None:
        self.loader, self._read = loader, read

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator:
        return self._read(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def read_nothing(loader: Any) -> Iterator:
    """Return no batches: the epoch was over."""
    return iter(())


def read_on(
    loader: Any, skip: int = 0, source: Any = None, state: Any = None, at_end: bool = False, quiet: bool = True,
    states: Any = None,
) -> Iterator:  # fmt: skip
    """Iterate over a loader from a place on.

    Args:
        loader: the user's, or a copy of it.
        skip: batches to read and drop.
        source: what has the state of the data.
        state: its state, which makes skipping needless.
        at_end: the state is that after an epoch. Some sources then begin the next one, others first end the last.
        quiet: in the run without a break the loader drew nothing from the global generators here.
        states: of the global generators when the epoch began, with which what is dropped is read.
    """
    if state is None and not skip:
        yield from loader
        return
    if state is not None:
        source.load_state_dict(deepcopy(state))  # the source may go on to change what it got
    if at_end:
        before = world.seed_states()
        for _ in range(2):  # once more, if the source has only ended the epoch before
            world.set_seed_states(before)
            with _workers_seeded_apart(loader, quiet):
                batches = iter(loader)
                first = list(islice(batches, 1))
            if first:
                break
    else:
        with keep_seeds():
            if states is not None:
                world.set_seed_states(states)
            with _workers_seeded_apart(loader):
                batches = iter(loader)
            deque(islice(batches, skip), 0)
            # What workers draw does not count here; without them the first batch is for the generators as they are.
            first = list(islice(batches, int(getattr(loader, "num_workers", 0) > 0)))
    yield from first
    yield from batches


@contextmanager
def _workers_seeded_apart(loader: Any, quiet: bool = True) -> Iterator[None]:
    """Let a loader that begins here draw its workers' seed from a copy of the global generator.

    Some loaders draw it twice, or not when an iterator is made but later.

    Args:
        quiet: else one seed is drawn from the global generator itself, as by torch's loader.
    """
    if not isinstance(loader, DataLoader) or loader.generator is not None:
        yield
        return
    loader.generator = torch.Generator()
    loader.generator.set_state(torch.get_rng_state())
    if not quiet:
        draw_seed()
    try:
        yield
    finally:
        loader.generator = None


def say_read_forward(dl: Any, batches: int, advice: str = "") -> None:
    """Warn that the data have to be read again up to their place.

    Args:
        dl: the loader.
        batches: how many.
        advice: what to do; by default to give it a state.
    """
    if batches and world.is_main():
        dataset = getattr(dl, "dataset", dl)
        advice = advice or (
            f"give the {type(dataset).__name__} (with num_workers=0) or its loader state_dict and load_state_dict, as "
            "torchdata's StatefulDataLoader has"
        )
        warn(
            f"{batches} batches of this epoch are read again and dropped, up to the place where training goes on: the "
            f"data cannot be begun at a place. To avoid it, {advice}"
        )


def source_of(dl: Any) -> Any:
    """What has the state of an iterable dataset or of a loader of another kind, if something has."""
    if isinstance(dl, DataLoader):
        if not isinstance(dl.dataset, IterableDataset):
            return None
        if not has_state(dl):
            return dl.dataset if has_state(dl.dataset) and not dl.num_workers else None
    return dl if has_state(dl) else None
