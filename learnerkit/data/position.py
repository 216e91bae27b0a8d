"""The place in the training data that a fit has come to, and reading on from it."""

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from learnerkit import world
from learnerkit.data.batches import loader_len
from learnerkit.data.iterable import LoaderView, read_nothing, read_on, say_read_forward, source_of
from learnerkit.data.order import epoch_seed, has_state, order_sources, put_states, states_at_start, states_of
from learnerkit.data.stream import starts_workers

if TYPE_CHECKING:
    from learnerkit.data.loaders import DataLoaders
    from learnerkit.learner import Learner


class Position:
    """The place in the training data that a fit has come to.

    What training has not seen does not count, such as what loader workers have fetched ahead. The index stream of an
    epoch is a function of the random states at its start; these are kept, and up to the place the stream is drawn
    again, without loading a sample. Iterable datasets and loaders with `state_dict` and `load_state_dict` are restored
    by these; what has neither is read again up to the place.

    Attributes:
        order: the state of torch's global generator when the fit began, which decides the epochs' sample order.
        epoch: the epoch, or after its end the next one.
        steps: batches of this epoch that training has read on this rank.
        samples: samples of this epoch that it has read, on all ranks together.
        over: training of this epoch has ended, perhaps by a cancel.
        first_step: the first of this epoch's steps in this process.
        again: steps before it that are read again.
        goes_on: training of this epoch began in another process, or before an earlier end of this one.
        states: of the global generators when data without an index began this epoch; on all ranks alike.
    """

    def __init__(self) -> None:
        self.order = torch.get_rng_state()
        self.epoch = self.steps = self.samples = self.first_step = self.again = 0
        self.over = False
        self.states: Any = None
        self._loaded: dict[str, Any] | None = None  # a state, until its epoch begins
        self._own: dict[str, Any] = {}  # this rank's part of it
        self._found: Any = None  # the source's state at the place or after an epoch, until it is read from there
        self._stream: Any = None  # the states at the place of the generators by which ranks read a source alike
        self._begun = self.goes_on = False
        self._forward = False  # to go on, the data are read again up to the place, on one process
        self._read = 0  # batches that were read before `first_step`
        self._ranks = 1  # that share the data
        self._per_step = 1  # batches of the user's loader in a step of all ranks
        self._total: int | None = None  # batches of the user's loader in an epoch
        self._length: int | None = None  # of the user's loader, as it says
        self._batch_size: int | None = None
        self._parts: tuple[int, int] | None = None  # of an iterable dataset: how many parts, and workers of each
        self._source: Any = None  # what has the state of the data
        self._shared: Any = None  # the rank's loader
        self._order_sources: list[Any] | None = None  # of the user's loader
        self._start: list[Any] = []  # their states when the index stream of this epoch began

    @property
    def batches(self) -> int:
        """Batches of the user's loader that training has read in this epoch, on all ranks together."""
        found = self._read + max(0, self.steps - self.first_step) * self._per_step
        return found if self._total is None or self._per_step == 1 else min(found, max(self._read, self._total))

    @property
    def place(self) -> float:
        """Batches of the user's loader that were read before `first_step`; infinite at the end of an epoch."""
        return inf if self.over else self._read

    @property
    def stage(self) -> str:
        """Where in a fit it is: 'train', in an epoch's training; 'trained', after it; 'epoch', between two epochs."""
        return "trained" if self.over else "train" if self._begun else "epoch"

    @property
    def epoch_seed(self) -> int:
        """The seed of this epoch's sample order."""
        return epoch_seed(self.order, self.epoch)

    def seed(self, training: bool) -> int:
        """The seed of this epoch for those who fetch samples."""
        return world.mixed_seed(self.epoch_seed, training)

    def of_all_ranks(self, learn: "Learner") -> int:
        """The samples of all ranks in the batch; where only the data tell, those of a full one."""
        total = learn.dl.share.total
        return self._per_step * (self._batch_size or 1) if total is None else total

    def end_epoch(self) -> None:
        """Take note that the next epoch follows."""
        self.epoch += 1
        self._clear()

    def _clear(self) -> None:
        self.steps = self.samples = self.first_step = self._read = self.again = 0
        self.over = self._begun = self.goes_on = False
        self.states, self._stream, self._per_step = None, None, 1

    # Saving and restoring

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes: plain values, tensors and random states; alike on every rank.

        Valid after a step, after training and after an epoch.
        """
        if self._loaded is not None:
            return self._loaded
        found, over = (None, self.over) if self._source is None else self._source_state()
        reading = self._begun and not self.over
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "samples": self.samples,
            "over": over,
            "begun": self._begun,
            "order": self.order,
            "samplers": self._start if reading and not over else self._order_sources and states_of(self._order_sources),
            "states": self.states if reading else None,
            "stream": getattr(self._shared, "stream", None) if reading else None,
            "batch_size": self._batch_size,
            "parts": self._parts,
            "source": found,
        }

    def _source_state(self) -> tuple[Any, bool]:
        """The state of the source, and whether it has come to the end of the epoch.

        Behind the last batch many sources are already where the next epoch begins.
        """
        if self._found is not None:
            return self._found, True
        # Without workers torch's loader gives a short batch only at the end of its dataset, of which it then knows.
        short = not isinstance(self._source, DataLoader) and self.samples < self.batches * (self._batch_size or 1)
        last = short or self.batches >= (self._length or inf)
        return self._source.state_dict(), self.over or (self._begun and last)

    def own_state_dict(self) -> dict[str, Any]:
        """What `load_own_state_dict` takes: the part of the state that is this rank's alone."""
        return self._own or getattr(self._shared, "own_state", {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the epoch of the state begin behind what was read of it; called before it begins."""
        self._loaded = state
        self._clear()
        self.order = state["order"]
        self.epoch, self._read, self.samples, self.over = (state[k] for k in ("epoch", "batches", "samples", "over"))

    @property
    def is_unread(self) -> bool:
        """The data of the epoch were read in another process, so what has their state is not at their end."""
        return self._found is not None or bool(self._own)

    def follow(self, state: dict[str, Any], own: dict[str, Any]) -> None:
        """Go on behind an earlier fit.

        Args:
            state: what `state_dict` returned at its end.
            own: what `own_state_dict` returned then on this rank.
        """
        self._found, self._own = state["source"], own

    def load_own_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take what `own_state_dict` returned on this rank."""
        self._own = state or {}

    # Reading an epoch

    def begin(self, dl: Any, epoch: int, dls: "DataLoaders", ranks: int) -> Any:
        """Return what to read as the training loader in this epoch.

        Args:
            dl: the user's loader, or a copy of it.
            epoch: which one.
            dls: keep copies of loaders.
            ranks: how many share the data.

        Raises:
            ValueError: a state of other data.
        """
        state, self._loaded = self._loaded, None
        self._clear()
        self._begun, self.epoch, self._ranks = True, epoch, ranks
        drawn = isinstance(dl, DataLoader) and not isinstance(dl.dataset, IterableDataset)  # by an index stream
        self._length, self._batch_size = loader_len(dl), getattr(dl, "batch_size", None)
        self._total = self._length if drawn or isinstance(dl, Sequence) else None
        self._order_sources = order_sources(dl)  # before samplers are lent generators
        self._source, self._shared = source_of(dl), None
        if state is not None and state["epoch"] == epoch:
            self._resume(dl, state)
        self._forward = not drawn and self._source is None and ranks == 1
        if ranks > 1:  # `share` does the rest
            return dl
        if not drawn:
            return self._go_on(dl)
        return dls.twin(dl, training=True, always=True) if self.goes_on else dl

    def _resume(self, dl: Any, state: dict[str, Any]) -> None:
        self.samples, self.over, self.states = state["samples"], state["over"], state["states"]
        self._read = self._in_batches(state)
        self.steps = self.first_step = max(self._read, self.over)
        self.goes_on = bool(self._read or self.over or state["begun"])
        self._check_source(dl, state)
        self._found, self._stream, self._parts = state["source"], state.get("stream"), state["parts"]
        if state["samplers"] is not None:  # else it was taken before the first epoch
            self._start = state["samplers"]
            put_states(order_sources(dl), self._start)
        if self._read and not getattr(dl, "in_order", True) and starts_workers(dl):
            world.warn_once(
                "the training loader has in_order=False, so it is not known which batches of this epoch training has "
                f"seen: the first {self._read} are left out"
            )

    def _note_parts(self, now: tuple[int, int] | None) -> None:
        """Note in how many parts an iterable dataset is read; refuse other ones than when the state was saved."""
        then, self._parts = self._parts, now
        if self.goes_on and not self.over and None is not then != now is not None:
            before, after = (f"{r} part{'s' * (r > 1)} by {w} worker{'s' * (w > 1)} each" for r, w in (then, now))
            raise ValueError(
                f"the iterable dataset was read in {before} and is read in {after} now, so the place in it cannot be "
                "found again: some samples would come twice and others not at all. Go on with as many ranks and loader "
                "workers, or from the end of an epoch"
                " (errors.html#dataset-parts)"
            )

    def _check_source(self, dl: Any, state: dict[str, Any]) -> None:
        """Refuse to go on in an epoch that an iterable dataset with a state cannot begin again."""
        if not self.epoch or not isinstance(dl, DataLoader) or not isinstance(dl.dataset, IterableDataset):
            return
        if self._source is None and has_state(dl.dataset) and dl.persistent_workers:
            why = (
                "its state is in loader workers that stay (persistent_workers=True) and is not saved; if its epochs "
                "are all alike, go on with persistent_workers=False, else begin anew with num_workers=0"
            )
        elif self._ranks > 1 and state["source"] is not None and self._source is dl:
            why = f"the state that was saved is that of the {type(dl).__name__} of one process; go on on one process"
        else:
            return
        raise ValueError(
            f"epoch {self.epoch} of the {type(dl.dataset).__name__} cannot be read again as it was, so some samples "
            f"would come twice and others not at all: {why}"
            " (errors.html#dataset-parts)"
        )

    def _in_batches(self, state: dict[str, Any]) -> int:
        """The batches of now that hold the samples which were read."""
        then, now = state["batch_size"], self._batch_size
        if not then or not now or then == now:
            return state["batches"]
        batches, rest = divmod(state["samples"], now)
        self.samples = batches * now
        if rest:
            world.warn_once(
                f"the place in the data is {state['samples']} samples, which is no whole number of the present batches "
                f"of {now} (they were of {then}): {rest} samples are read a second time"
            )
        return batches

    def _go_on(self, dl: Any) -> Any:
        """Return `dl`, whose batches no index stream decides, from the place on."""
        self._note_parts((1, max(1, dl.num_workers)) if isinstance(dl, DataLoader) else None)
        if self.over:
            return LoaderView(dl, read_nothing)
        if (found := self._take_found()) is not None:
            options = {"source": self._source, "state": found, "at_end": not self.goes_on, "quiet": self.goes_on}
            return LoaderView(dl, partial(read_on, **options))
        if not self._read:
            return dl
        if not isinstance(dl, Sequence):  # whose batches are in memory: nothing is read
            self.again = self._read
            say_read_forward(dl, self._read)
        return LoaderView(dl, partial(read_on, skip=self._read, states=self.states))

    def _take_found(self) -> Any:
        """Return the state to load into the source; `None`: it is where the epoch begins, or has no state."""
        found, self._found = self._found, None
        return found

    def share(self, shared: Any) -> int:
        """Have a rank's loader begin at the place; return the first step.

        Args:
            shared: the `RankLoader`.
        """
        self._shared, self._per_step, self._source = shared, shared.per_step, shared.source
        self._note_parts(shared.parts)
        if self.goes_on:
            first = -(-self._read // self._per_step)
            if self._total is not None:  # the last step is the last also if the steps are other ones than before
                first = len(shared) - -(-max(0, self._total - self._read) // self._per_step)
            self.steps = self.first_step = max(first, self.over)
        own: dict[str, Any] = {}
        ended = self.over or (self.goes_on and self._own.get("ended", False))
        if not ended:  # else the next epoch needs it
            own, self._own = self._own if self.goes_on else {k: self._own.get(k) for k in ("source", "left")}, {}
        if self._source is not None:
            own = {"source": None if self.over else self._take_found(), "stream": self._stream}
        self.again = shared.begin(inf if ended else self._read, self.first_step, own, self.goes_on)
        return self.first_step

    def note_start(self, loader: Any) -> None:
        """Note the states that decide this epoch's data, as they are when reading of `loader` begins."""
        if self._forward and self.states is None:
            self.states = states_at_start(loader) if isinstance(loader, DataLoader) else world.seed_states()
        if not self.goes_on:
            self._start = states_of(self._order_sources or [])
