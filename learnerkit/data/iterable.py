"""Data without an index: streams and loaders of other kinds, with their states, and reading them on from a place."""

from collections.abc import Iterator
from copy import deepcopy
from itertools import islice
from math import inf
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from learnerkit import world
from learnerkit.data.order import draw_seed, has_state, keep_seeds
from learnerkit.utils import warn


class Resumed:
    """A loader without an index stream, read on from a place; its other attributes are the loader's.

    Args:
        loader: the user's.
        skip: batches to read and drop; if infinite, nothing is read.
        source: what has the state of the data.
        state: its state, which makes skipping needless.
        at_end: the state is that after an epoch. Some sources then begin the next one, others first end the last.
        quiet: nothing is drawn from the global generators when the loader starts.
        states: of the global generators when the epoch began, with which what is dropped is read.
    """

    def __init__(
        self, loader: Any, skip: float, source: Any = None, state: Any = None, at_end: bool = False, quiet: bool = True,
        states: Any = None,
    ) -> None:  # fmt: skip
        self.loader, self.skip, self.source, self.state = loader, skip, source, state
        self.at_end, self.quiet, self.states = at_end, quiet, states

    @property
    def read_again(self) -> int:
        """The batches that were trained on before, and are read and dropped."""
        return 0 if self.skip == inf else int(self.skip)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator:
        if self.skip == inf:
            return
        if self.state is not None:
            self.source.load_state_dict(deepcopy(self.state))
        # What workers draw does not count here; without them the first batch is for the generators as they are.
        ahead = int(getattr(self.loader, "num_workers", 0) > 0)
        if not self.at_end:
            with keep_seeds():
                batches = self._begun()
                if self.read_again and next(batches, self) is self:  # the source first ended the epoch before
                    batches = self._begun()
                    next(batches, None)
                for _ in islice(batches, max(0, self.read_again - 1)):
                    pass
                first = list(islice(batches, ahead))
            yield from first
            yield from batches
            return
        before = world.seed_states()
        batches = iter(self.loader)
        first = list(islice(batches, ahead))
        if isinstance(self.loader, DataLoader):  # torchdata's makes two iterators
            world.set_seed_states(before)
            if not self.quiet and self.loader.generator is None:
                draw_seed()
        first = first or list(islice(batches, 1))
        if not first:
            world.set_seed_states(before)
            batches = iter(self.loader)
        yield from first
        yield from batches

    def _begun(self) -> Iterator:
        if self.states is None:
            return iter(self.loader)
        world.set_seed_states(self.states)
        if not isinstance(self.loader, DataLoader) or self.loader.generator is not None:
            return iter(self.loader)
        self.loader.generator = torch.Generator()  # the states are those after its draw for workers
        try:
            return iter(self.loader)
        finally:
            self.loader.generator = None


class Ahead:
    """A loader with workers and a state, of which a batch can be read ahead to see whether the epoch has ended.

    Args:
        loader: the user's, or a `Resumed`.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._batches: Iterator = iter(())
        self._ahead: list[Any] = []
        self._state: Any = None

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator:
        self._batches, self._ahead = iter(self.loader), []
        while (batch := self._ahead.pop() if self._ahead else next(self._batches, self)) is not self:
            yield batch

    def state(self, source: Any) -> tuple[Any, bool]:
        """The state of the source behind the batch that was given out last, and whether that was the last one."""
        if not self._ahead:
            self._state = source.state_dict()
            self._ahead.append(next(self._batches, self))
            if self._ahead[0] is self:
                self._state = source.state_dict()
        return self._state, self._ahead[0] is self


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
