"""The position in the training data that a fit has reached."""

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from learnerkit import distributed
from learnerkit.data.batches import loader_len
from learnerkit.data.iterable import IterablePlace
from learnerkit.data.order import (
    data_generators,
    data_states,
    epoch_seed,
    has_index,
    has_state,
    order_sources,
    put_generator,
    put_states,
    states_of,
)
from learnerkit.data.stream import starts_workers
from learnerkit.distributed import seeds
from learnerkit.state import State

if TYPE_CHECKING:
    from learnerkit.data.loaders import DataLoaders
    from learnerkit.learner import Learner


class Position:
    """The position in the training data that a fit has reached.

    Batches that loader workers have fetched ahead do not count until training has seen them. The order of an epoch is a
    function of its seed, and of the states of generators and samplers at its start. These are kept, and the order is
    drawn again up to the position, without loading a sample. Data without an index have an `IterablePlace`.

    Attributes:
        order: the state of torch's global generator when the fit began, which decides the epochs' sample order.
        epoch: the epoch, or after its end the next one.
        steps: the number of batches of this epoch that training has read on this rank.
        samples: the number of samples of this epoch that training has read, on all ranks together.
        over: training of this epoch has ended, perhaps by a cancel.
        begun: training of this epoch has begun.
        goes_on: this epoch began in another process or an earlier fit, and is continued.
        read: the number of batches of the user's loader that were read there, on all ranks together.
        first_step: the first step of this epoch in this process.
        data: the position in data without an index.
    """

    def __init__(self) -> None:
        self.order = torch.get_rng_state()
        self.data = IterablePlace()
        self._loaded: State | None = None  # a loaded state, until its epoch begins
        self._per_step = 1  # the number of batches of the user's loader in a step of all ranks
        self._total: int | None = None  # the number of batches of the user's loader in an epoch
        self._batch_size: int | None = None
        self._order_sources: list | None = None  # the order sources of the user's loader
        self._start: list = []  # their states when the index stream of this epoch began
        self._begin_epoch(0)

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch, self._per_step = epoch, 1
        self.steps = self.samples = self.first_step = self.read = 0
        self.over = self.begun = self.goes_on = False
        self.data.clear()

    @property
    def batches(self) -> int:
        """The number of batches of the user's loader that training has read in this epoch, on all ranks together."""
        n = self.read + max(0, self.steps - self.first_step) * self._per_step
        return n if self._total is None or self._per_step == 1 else min(n, max(self.read, self._total))

    @property
    def stage(self) -> str:
        """The stage of the fit: 'train', in an epoch's training; 'trained', after it; 'epoch', between two epochs."""
        if self.over:
            return "trained"
        return "train" if self.begun else "epoch"

    def seed(self, *use: Any) -> int:
        """Return the seed of this epoch's sample order; with arguments, the seed for another use."""
        seed = epoch_seed(self.order, self.epoch)
        return seeds.mixed_seed(seed, *use) if use else seed

    def of_all_ranks(self, learn: "Learner") -> int:
        """Return the number of samples of all ranks in the batch; where only the data tell, that of a full batch."""
        share = getattr(learn.dl, "share", None)  # only a rank's loader has a share
        if share is None:
            return learn.batch_size
        total = share.total
        return self._per_step * (self._batch_size or 1) if total is None else total

    @property
    def lacks_samples(self) -> bool:
        """A flag that is True if a batch that was read was not full."""
        return self.samples < self.batches * (self._batch_size or 1)

    def end_epoch(self) -> None:
        """Move to the start of the next epoch."""
        self._begin_epoch(self.epoch + 1)

    # Saving and restoring

    def state_dict(self) -> State:
        """Return the state for `load_state_dict`: plain values, tensors and random states, the same on every rank.

        It is valid after a step, after training and after an epoch.
        """
        if self._loaded is not None:
            return self._loaded
        data = self.data.state(self)
        reading = self.begun and not data["over"]
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "samples": self.samples,
            "begun": self.begun,
            "order": self.order,
            "samplers": self._start if reading else self._order_sources and states_of(self._order_sources),
            "batch_size": self._batch_size,
            **data,
        }

    def own_state_dict(self) -> State:
        """Return the state for `load_own_state_dict`: the part of the state that is this rank's alone."""
        return self.data.own or getattr(self.data.shared, "own_state", {})

    def note_loader(self, dl: Any) -> None:
        """Set the user's loader before the first epoch, for a state that is taken there."""
        if self._order_sources is None:
            self._order_sources = order_sources(dl)
            self.data.begin(dl, again=False)

    def load_state_dict(self, state: State) -> None:
        """Continue the epoch of the state after the batches that were read of it; called before it begins."""
        self._begin_epoch(state["epoch"])
        self._loaded, self.order = state, state["order"]
        self.read, self.samples = state["batches"], state["samples"]
        self.over = state["over"]

    def load_own_state_dict(self, state: State | None) -> None:
        """Restore the state that `own_state_dict` returned on this rank."""
        self.data.own = state or {}

    @property
    def is_unread(self) -> bool:
        """A flag that is True if another process has read the epoch's data, so that their source is not at its end."""
        return self._loaded is not None or self.data.found is not None or bool(self.data.own)

    def follow(self, state: State, own: State) -> None:
        """Continue after an earlier fit.

        Args:
            state: the result of `state_dict` at its end.
            own: the result of `own_state_dict` at its end, on this rank.
        """
        self.data.found, self.data.own = state["source"], own

    # Reading an epoch

    def begin(self, dl: Any, epoch: int, dls: "DataLoaders", ranks: int) -> Any:
        """Return the training loader to read in this epoch.

        Args:
            dl: the user's loader, or a copy of it.
            epoch: the index of the epoch.
            dls: the `DataLoaders`, which keep copies of loaders.
            ranks: the number of ranks that share the data.

        Raises:
            ValueError: the state is that of other data.
        """
        state, self._loaded = self._loaded, None
        self._begin_epoch(epoch)
        self.begun = True
        indexed = has_index(dl)
        self._total = _length(dl)
        self._batch_size = getattr(dl, "batch_size", None)
        self._order_sources = order_sources(dl)  # taken before samplers are lent generators
        self.data.begin(dl, again=not indexed and ranks == 1)
        if state is not None and state["epoch"] == epoch:
            self._go_on(dl, state, ranks)
        if ranks > 1:  # `share` does the rest
            return dl
        if not indexed:
            return self.data.read_on(dl, self)
        return dls.twin(dl, training=True, always=True) if self.goes_on else dl

    def _go_on(self, dl: Any, state: State, ranks: int) -> None:
        self.samples, self.over = state["samples"], state["over"]
        self.read = self._in_batches(state)
        self.steps = self.first_step = max(self.read, self.over)
        self.goes_on = bool(self.read or self.over or state["begun"])
        self.data.load(dl, state, ranks)
        if state["samplers"] is not None:  # a state from before the first epoch has none
            self._start = state["samplers"]
            put_states(order_sources(dl), self._start)
        if self.read and not getattr(dl, "in_order", True) and starts_workers(dl):
            distributed.warn_once(
                "the training loader has in_order=False, so it is not known which batches of this epoch training has "
                f"seen: the first {self.read} are left out"
            )

    def _in_batches(self, state: State) -> int:
        """Return the number of batches, at the present batch size, that cover the samples already read."""
        then, now = state["batch_size"], self._batch_size
        if not then or not now or then == now:
            return state["batches"]
        batches, rest = divmod(state["samples"], now)
        self.samples = batches * now
        if rest:
            distributed.warn_once(
                f"the place in the data is {state['samples']} samples, which is no whole number of the present batches "
                f"of {now} (they were of {then}): {rest} samples are read a second time"
            )
        return batches

    def share(self, shared: Any, dl: Any) -> int:
        """Let a rank's loader begin at the position; return the index of its first step.

        Args:
            shared: the rank's `RankLoader`.
            dl: the loader that it shares: the user's, or one that a callback has put in its place.
        """
        self._per_step, self._total = shared.per_step, _length(dl)
        if self.goes_on:
            first = -(-self.read // self._per_step)
            if self._total is not None:  # the last step stays the last, even if the number of steps has changed
                first = len(shared) - -(-max(0, self._total - self.read) // self._per_step)
            self.steps = self.first_step = max(first, self.over)
        self.data.share(shared, self)
        return self.first_step

    def note_start(self, loader: Any) -> None:
        """Save the states that decide this epoch's data, as of the start of its index stream in `loader`."""
        self.data.note_start(loader)
        if not self.goes_on:
            self._start = states_of(self._order_sources or [])


def _length(dl: Any) -> int | None:
    """Return the number of batches of a loader that has an index or is a list; of others none is relied on."""
    return loader_len(dl) if has_index(dl) or isinstance(dl, Sequence) else None


def evaluated_state_dict(loaders: Sequence) -> list[list]:
    """Return the states of the samplers that evaluations in a fit read, for each loader but the first."""
    return [states_of(sources) for sources in _evaluated(loaders)]


def load_evaluated_state_dict(loaders: Sequence, states: Sequence[list]) -> None:
    """Restore the result of `evaluated_state_dict`; another loader than before, with other samplers, begins anew."""
    for sources, of_samplers in zip(_evaluated(loaders), states, strict=False):
        if len(sources) == len(of_samplers):
            put_states(sources, of_samplers)


def generators_state_dict(loaders: Sequence, position: Position | None) -> State:
    """Return the states of the `data_generators` that are made; of data that are read again, as at the epoch's start.

    Args:
        loaders: the user's loaders.
        position: the position of a fit.
    """
    again = position.data.generators if position is not None and position.stage == "train" else {}
    return {place: state for place, state in (data_states(loaders) | again).items() if state is not None}


def load_generators_state_dict(loaders: Sequence, states: State) -> None:
    """Restore the result of `generators_state_dict`."""
    for place, part, name in [*data_generators(loaders)]:
        if place in states:
            # It may be of another kind, or on another device, than when it was saved.
            with suppress(TypeError, ValueError, RuntimeError):
                put_generator(part, name, states[place])


def _evaluated(loaders: Sequence) -> list[list]:
    """Return what decides the order of evaluations alone, for loaders without a state of their own."""
    of_training = order_sources(loaders[0])
    found = [[] if has_state(dl) else order_sources(dl) for dl in loaders[1:]]
    return [[x for x in sources if all(x is not each for each in of_training)] for sources in found]
