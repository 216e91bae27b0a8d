"""The place in the training data that a fit has come to."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from learnerkit import distributed
from learnerkit.data.batches import loader_len
from learnerkit.data.iterable import IterablePlace
from learnerkit.data.order import epoch_seed, order_sources, put_states, states_of
from learnerkit.data.stream import starts_workers
from learnerkit.distributed import seeds

if TYPE_CHECKING:
    from learnerkit.data.loaders import DataLoaders
    from learnerkit.learner import Learner


class Position:
    """The place in the training data that a fit has come to.

    What training has not seen does not count, such as what loader workers have fetched ahead. The order of an epoch is
    a function of its seed, and of the states of generators and samplers at its start. These are kept, and up to the
    place the order is drawn again, without loading a sample. Data without an index have an `IterablePlace`.

    Attributes:
        order: the state of torch's global generator when the fit began, which decides the epochs' sample order.
        epoch: the epoch, or after its end the next one.
        steps: batches of this epoch that training has read on this rank.
        samples: samples of this epoch that it has read, on all ranks together.
        over: training of this epoch has ended, perhaps by a cancel.
        begun: training of this epoch has begun.
        goes_on: it began in another process or an earlier fit, and is read on from there.
        read: batches of the user's loader that were read there, on all ranks together.
        first_step: the first of this epoch's steps in this process.
        data: the place in data without an index.
    """

    def __init__(self) -> None:
        self.order = torch.get_rng_state()
        self.data = IterablePlace()
        self._loaded: dict[str, Any] | None = None  # a state, until its epoch begins
        self._per_step = 1  # batches of the user's loader in a step of all ranks
        self._total: int | None = None  # batches of the user's loader in an epoch
        self._batch_size: int | None = None
        self._order_sources: list[Any] | None = None  # of the user's loader
        self._start: list[Any] = []  # their states when the index stream of this epoch began
        self._begin_epoch(0)

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch, self._per_step = epoch, 1
        self.steps = self.samples = self.first_step = self.read = 0
        self.over = self.begun = self.goes_on = False
        self.data.clear()

    @property
    def batches(self) -> int:
        """Batches of the user's loader that training has read in this epoch, on all ranks together."""
        found = self.read + max(0, self.steps - self.first_step) * self._per_step
        return found if self._total is None or self._per_step == 1 else min(found, max(self.read, self._total))

    @property
    def stage(self) -> str:
        """Where in a fit it is: 'train', in an epoch's training; 'trained', after it; 'epoch', between two epochs."""
        return "trained" if self.over else "train" if self.begun else "epoch"

    def seed(self, *use: Any) -> int:
        """The seed of this epoch's sample order; with arguments, the one for another use."""
        seed = epoch_seed(self.order, self.epoch)
        return seeds.mixed_seed(seed, *use) if use else seed

    def of_all_ranks(self, learn: "Learner") -> int:
        """The samples of all ranks in the batch; where only the data tell, those of a full one."""
        share = getattr(learn.dl, "share", None)  # a loader that is no rank's has none
        if share is None:
            return learn.batch_size
        total = share.total
        return self._per_step * (self._batch_size or 1) if total is None else total

    @property
    def lacks_samples(self) -> bool:
        """A batch that was read was not a full one."""
        return self.samples < self.batches * (self._batch_size or 1)

    def end_epoch(self) -> None:
        """Take note that the next epoch follows."""
        self._begin_epoch(self.epoch + 1)

    # Saving and restoring

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes: plain values, tensors and random states; alike on every rank.

        Valid after a step, after training and after an epoch.
        """
        if self._loaded is not None:
            return self._loaded
        found = self.data.state(self)
        reading = self.begun and not found["over"]
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "samples": self.samples,
            "begun": self.begun,
            "order": self.order,
            "samplers": self._start if reading else self._order_sources and states_of(self._order_sources),
            "batch_size": self._batch_size,
            **found,
        }

    def own_state_dict(self) -> dict[str, Any]:
        """What `load_own_state_dict` takes: the part of the state that is this rank's alone."""
        return self.data.own or getattr(self.data.shared, "own_state", {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the epoch of the state begin behind what was read of it; called before it begins."""
        self._begin_epoch(state["epoch"])
        self._loaded, self.order = state, state["order"]
        self.read, self.samples, self.over = state["batches"], state["samples"], state["over"]

    def load_own_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take what `own_state_dict` returned on this rank."""
        self.data.own = state or {}

    @property
    def is_unread(self) -> bool:
        """The data of the epoch were read in another process, so what has their state is not at their end."""
        return self.data.found is not None or bool(self.data.own)

    def follow(self, state: dict[str, Any], own: dict[str, Any]) -> None:
        """Go on behind an earlier fit.

        Args:
            state: what `state_dict` returned at its end.
            own: what `own_state_dict` returned then on this rank.
        """
        self.data.found, self.data.own = state["source"], own

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
        self._begin_epoch(epoch)
        self.begun = True
        indexed = isinstance(dl, DataLoader) and not isinstance(dl.dataset, IterableDataset)
        self._total = loader_len(dl) if indexed or isinstance(dl, Sequence) else None
        self._batch_size = getattr(dl, "batch_size", None)
        self._order_sources = order_sources(dl)  # before samplers are lent generators
        self.data.begin(dl, again=not indexed and ranks == 1)
        if state is not None and state["epoch"] == epoch:
            self._go_on(dl, state, ranks)
        if ranks > 1:  # `share` does the rest
            return dl
        if not indexed:
            return self.data.read_on(dl, self)
        return dls.twin(dl, training=True, always=True) if self.goes_on else dl

    def _go_on(self, dl: Any, state: dict[str, Any], ranks: int) -> None:
        self.samples, self.over = state["samples"], state["over"]
        self.read = self._in_batches(state)
        self.steps = self.first_step = max(self.read, self.over)
        self.goes_on = bool(self.read or self.over or state["begun"])
        self.data.load(dl, state, ranks)
        if state["samplers"] is not None:  # else it was taken before the first epoch
            self._start = state["samplers"]
            put_states(order_sources(dl), self._start)
        if self.read and not getattr(dl, "in_order", True) and starts_workers(dl):
            distributed.warn_once(
                "the training loader has in_order=False, so it is not known which batches of this epoch training has "
                f"seen: the first {self.read} are left out"
            )

    def _in_batches(self, state: dict[str, Any]) -> int:
        """The batches of now that hold the samples which were read."""
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

    def share(self, shared: Any) -> int:
        """Have a rank's loader begin at the place; return the first step.

        Args:
            shared: the `RankLoader`.
        """
        self._per_step = shared.per_step
        if self.goes_on:
            first = -(-self.read // self._per_step)
            if self._total is not None:  # the last step is the last also if the steps are other ones than before
                first = len(shared) - -(-max(0, self._total - self.read) // self._per_step)
            self.steps = self.first_step = max(first, self.over)
        self.data.share(shared, self)
        return self.first_step

    def note_start(self, loader: Any) -> None:
        """Note the states that decide this epoch's data, as they are when reading of `loader` begins."""
        self.data.note_start(loader)
        if not self.goes_on:
            self._start = states_of(self._order_sources or [])
