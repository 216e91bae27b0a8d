"""Data without an index, such as streams: their states, and how to continue reading from a position."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from learnerkit import distributed
from learnerkit.data.batches import loader_len
from learnerkit.data.order import data_states, has_index, has_state, keep_seeds, states_at_start
from learnerkit.data.rows import draw_seed
from learnerkit.distributed import seeds
from learnerkit.state import State
from learnerkit.utils import replaced

if TYPE_CHECKING:
    from learnerkit.data.position import Position


class LoaderView:
    """A loader that replaces another one, and has its other attributes.

    Args:
        loader: the loader that it replaces.
        read: returns an iterator over the batches of the view, given the other loader.
    """

    def __init__(self, loader: Any, read: Callable[[Any], Iterator] = iter) -> None:
        self.loader, self._read = loader, read

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator:
        return self._read(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # a copy has no attributes yet when it is asked for its methods
            raise AttributeError(name)
        return getattr(self.loader, name)


def read_on(
    loader: Any, skip: float = 0, source: Any = None, state: Any = None, at_end: bool = False, quiet: bool = True,
    states: Any = None,
) -> Iterator:  # fmt: skip
    """Iterate over a loader from a position on.

    Args:
        loader: the user's loader, or a copy of it.
        skip: the number of batches to read and drop; if infinite, nothing is read.
        source: the object that has the state of the data.
        state: the state of the source; with it no batches are skipped.
        at_end: the state was saved after an epoch. Some sources then begin the next epoch, others first end the last
            one.
        quiet: an uninterrupted run would draw no number from the global generators here.
        states: the states of the global generators at the start of the epoch, with which the dropped batches are read.
    """
    if skip == inf:
        return
    if state is None and not skip:
        yield from loader
        return
    if state is not None:
        source.load_state_dict(deepcopy(state))  # the source may change the object that it gets
    if at_end:
        before = seeds.seed_states()
        for _ in range(2):  # the second time is needed if the source has only ended the last epoch
            seeds.set_seed_states(before)
            with _workers_seeded_apart(loader, quiet):
                batches = iter(loader)
                first = list(islice(batches, 1))
            if first:
                break
    else:
        with keep_seeds():
            if states is not None:
                seeds.set_seed_states(states)
            with _workers_seeded_apart(loader):
                batches = iter(loader)
            deque(islice(batches, int(skip)), 0)
            # Draws of workers do not count here. Without workers, the first batch is read with the generators' present
            # states.
            first = list(islice(batches, int(getattr(loader, "num_workers", 0) > 0)))
    yield from first
    yield from batches


@contextmanager
def _workers_seeded_apart(loader: Any, quiet: bool = True) -> Iterator[None]:
    """Let a loader that begins here draw its workers' seed from a copy of the global generator.

    Some loaders draw this seed twice, or draw it later than when the iterator is made.

    Args:
        quiet: draw no seed from the global generator itself; otherwise one is drawn, as by torch's loader.
    """
    if not isinstance(loader, DataLoader) or loader.generator is not None:
        yield
        return
    with replaced(loader, generator=torch.Generator().set_state(torch.get_rng_state())):
        if not quiet:
            draw_seed()
        yield


def say_read_forward(dl: Any, batches: int) -> None:
    """Warn that a number of batches is read again, up to the present position."""
    if batches:
        distributed.warn(
            f"{batches} batches of this epoch are read again and dropped, up to the place where training goes on: the "
            f"data cannot be begun at a place. To avoid it, give the {type(getattr(dl, 'dataset', dl)).__name__} (with "
            "num_workers=0) state_dict and load_state_dict, or, on one process and with sharded=True, its loader, as "
            "torchdata's StatefulDataLoader has"
        )


def source_of(dl: Any) -> Any:
    """Return the object that has the state of an iterable dataset or of another kind of loader, or `None`."""
    if has_index(dl):
        return None
    if isinstance(dl, DataLoader) and not has_state(dl):
        return dl.dataset if has_state(dl.dataset) and not dl.num_workers else None
    return dl if has_state(dl) else None


class IterablePlace:
    """The position in data without an index: the state of their source, or the facts needed to read them again.

    Attributes:
        source: the object that has the state of the data, if there is one.
        found: the state of the source at the position, or after an epoch, until it is used.
        states: the states of the global generators at the start of this epoch, on all ranks alike; data without a state
            are read again with them.
        stream: the states, at the position, of the generators with which all ranks read a source alike.
        generators: the states, at the start of this epoch, of the generators that data without a state hold; such data
            are read again with them.
        parts: for an iterable dataset, the number of its parts, and the number of workers that read each.
        shared: the rank's loader, on several ranks.
        own: the state of the data that only this rank reads.
        again: the number of steps that are read again up to the position.
        length: the number of batches according to the loader, on one process.
    """

    states: Any = None
    stream: Any = None
    again = 0

    def __init__(self) -> None:
        self.source: Any = None
        self.found: Any = None
        self.shared: Any = None
        self.own: State = {}
        self.parts: tuple[int, int] | None = None
        self.length: int | None = None
        self._reads_again = False  # true only on one process

    def clear(self) -> None:
        """Forget the position in the last epoch."""
        self.states, self.stream = None, None
        self.generators: State = {}
        self.again = 0

    def state(self, place: "Position") -> State:
        """Return the state for `load`, which also says if the epoch is over."""
        source, over = (None, place.over) if self.source is None else self._source_state(place)
        reading = place.begun and not over
        return {
            "over": over,
            "states": seeds.without_arrays(self.states) if reading else None,
            "stream": seeds.without_arrays(self.shared.stream) if reading and self.shared is not None else None,
            "parts": self.parts,
            "source": source,
        }

    def _source_state(self, place: "Position") -> tuple[Any, bool]:
        """Return the state of the source, and whether it has come to the end of the epoch.

        After the last batch, many sources are already at the start of the next epoch.
        """
        if self.found is not None:
            return self.found, True
        # Without workers, torch's loader gives a short batch only at the end of its dataset, so the dataset has ended.
        short = not isinstance(self.source, DataLoader) and place.lacks_samples
        last = short or place.batches >= (self.length or inf)
        return self.source.state_dict(), place.over or (place.begun and last)

    def begin(self, dl: Any, again: bool) -> None:
        """Set the loader of this epoch; `again`: if it has no state, it is read again up to the position."""
        self.source, self.shared = source_of(dl), None
        self.length = loader_len(dl)
        self._reads_again = again and self.source is None

    def load(self, dl: Any, state: State, ranks: int) -> None:
        """Continue from a state; called after `begin`.

        Raises:
            ValueError: the epoch cannot be read again as it was.
        """
        self._check(dl, state, ranks)
        self.states, self.stream, self.found, self.parts = (state[k] for k in ("states", "stream", "source", "parts"))

    def _check(self, dl: Any, state: State, ranks: int) -> None:
        """Refuse to continue in an epoch that an iterable dataset with a state cannot read again."""
        epoch = state["epoch"]
        if not epoch or not isinstance(dl, DataLoader) or has_index(dl):
            return
        if self.source is None and has_state(dl.dataset) and dl.persistent_workers:
            why = (
                "its state is in loader workers that stay (persistent_workers=True) and is not saved; if its epochs "
                "are all alike, go on with persistent_workers=False, else begin anew with num_workers=0"
            )
        elif ranks > 1 and state["source"] is not None and self.source is dl:
            why = f"the state that was saved is that of the {type(dl).__name__} of one process; go on on one process"
        else:
            return
        raise ValueError(
            f"epoch {epoch} of the {type(dl.dataset).__name__} cannot be read again as it was, so some samples "
            f"would come twice and others not at all: {why}"
            " (errors.html#resume)"
        )

    def _note_parts(self, now: tuple[int, int] | None, place: "Position") -> None:
        """Store the number of parts of an iterable dataset; refuse another number than when the state was saved."""
        then, self.parts = self.parts, now
        if place.goes_on and not place.over and then and now and then != now:
            before, after = (f"{r} part{'s' * (r > 1)} by {w} worker{'s' * (w > 1)} each" for r, w in (then, now))
            raise ValueError(
                f"the iterable dataset was read in {before} and is read in {after} now, so the place in it cannot be "
                "found again: some samples would come twice and others not at all. Go on with as many ranks and loader "
                "workers, or from the end of an epoch"
                " (errors.html#resume)"
            )

    def read_on(self, dl: Any, place: "Position") -> Any:
        """Return a loader that reads `dl` from the position on, on one process."""
        self._note_parts((1, max(1, dl.num_workers)) if isinstance(dl, DataLoader) else None, place)
        if place.over:  # the next epoch needs the state
            return LoaderView(dl, partial(read_on, skip=inf))
        state, self.found = self.found, None
        if state is not None:
            options = {"source": self.source, "state": state, "at_end": not place.goes_on, "quiet": place.goes_on}
            return LoaderView(dl, partial(read_on, **options))
        if not place.read:
            return dl
        if not isinstance(dl, Sequence):  # the batches of a sequence are in memory: nothing is read
            self.again = place.read
            say_read_forward(dl, place.read)
        return LoaderView(dl, partial(read_on, skip=place.read, states=self.states))

    def share(self, shared: Any, place: "Position") -> None:
        """Let a rank's loader begin at the position."""
        self._note_parts(shared.parts, place)
        if shared.parts is None:  # data with an index
            return
        # A stream has ended after a short batch, or when it gives none.
        self.shared, self.source = shared, shared.source
        self.length = None
        own: State = {}
        ended = place.over or (place.goes_on and self.own.get("ended", False))
        if not ended:  # otherwise the next epoch needs the states
            own = self.own if self.source is None else {"source": self.found, "stream": self.stream}
            self.own, self.found = {}, None
        self.again = shared.begin(inf if ended else place.read, place.first_step, own, place.goes_on)

    def note_start(self, loader: Any) -> None:
        """Save the states of the generators at the start of an epoch, if `loader` may be read again."""
        if not has_index(loader) and source_of(loader) is None:
            self.generators = data_states([loader])  # The training loader is the first of all loaders.
        if self._reads_again and self.states is None:
            self.states = states_at_start(loader) if isinstance(loader, DataLoader) else seeds.seed_states()
