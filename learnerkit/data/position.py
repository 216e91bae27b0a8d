"""The place in the training data that a fit has come to, and reading on from it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from learnerkit import world
from learnerkit.data.batches import loader_len
from learnerkit.data.iterable import LoaderView, has_state, read_on, say_read_forward, source_of
from learnerkit.data.order import SampleOrder, draw_seed, draws_globally, keep_seeds, samplers_of, states_at_start
from learnerkit.data.streams import Draws, Numbered, PerSample, starts_workers
from learnerkit.torch_internals import has_iterator

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
        order: the seeds of the epochs' sample order.
        epoch: the epoch, or after its end the next one.
        steps: batches of this epoch that training has read on this rank.
        samples: samples of this epoch that it has read, on all ranks together.
        over: training of this epoch has ended, perhaps by a cancel.
        first_step: the first of this epoch's steps in this process.
        states: of the global generators when samplers that draw from them, or what is read forward, began this epoch;
            on all ranks alike.
    """

    def __init__(self) -> None:
        self.order = SampleOrder()
        self.epoch = self.steps = self.samples = self.first_step = 0
        self.over = False
        self.states: Any = None
        self._loaded: dict[str, Any] | None = None  # a state, until its epoch begins
        self._own: dict[str, Any] = {}  # this rank's part of it
        self._found: Any = None  # the source's state at the place or after an epoch, until it is read from there
        self._stream: Any = None  # the states at the place of the generators by which ranks read a source alike
        self._begun = self._resumed = self._quiet = False
        self._forward = False  # to go on, the data are read again up to the place, on one process
        self._running = False  # the fit goes on where workers ran already, for which the loader draws no seed again
        self._read = 0  # batches that were read before `first_step`
        self._again = 0  # steps that are read again before it
        self._ranks = 1  # that share the data
        self._per_step = 1  # batches of the user's loader in a step of all ranks
        self._total: int | None = None  # batches of the user's loader in an epoch
        self._length: int | None = None  # of the user's loader, as it says
        self._batch_size: int | None = None
        self._parts: tuple[int, int] | None = None  # of an iterable dataset: how many parts, and workers of each
        self._source: Any = None  # what has the state of the data
        self._shared: Any = None  # the rank's loader
        self._loader: Any = None  # the DataLoader that is read
        self._draws: Draws | None = None
        self._samplers: Any = None  # the `SamplerStates` of the user's loader
        self._start: dict[str, list] = {}  # their states when the index stream of this epoch began

    @property
    def batches(self) -> int:
        """Batches of the user's loader that training has read in this epoch, on all ranks together."""
        found = self._read + max(0, self.steps - self.first_step) * self._per_step
        return found if self._total is None or self._per_step == 1 else min(found, max(self._read, self._total))

    @property
    def stage(self) -> str:
        """Where in a fit it is: 'train', in an epoch's training; 'trained', after it; 'epoch', between two epochs."""
        return "trained" if self.over else "train" if self._begun else "epoch"

    def seed(self, training: bool) -> int:
        """The seed of this epoch for those who fetch samples."""
        return world.mixed_seed(self.order.seed(self.epoch), training)

    def of_all_ranks(self, learn: "Learner") -> int:
        """The samples of all ranks in the batch; where only the data tell, those of a full one."""
        total = learn.dl.share.total
        return self._per_step * (self._batch_size or 1) if total is None else total

    def end_epoch(self) -> None:
        """Take note that the next epoch follows."""
        self.epoch += 1
        self._clear()

    def _clear(self) -> None:
        self.steps = self.samples = self.first_step = self._read = self._again = 0
        self.over = self._begun = self._resumed = self._quiet = False
        self.states, self._stream, self._per_step = None, None, 1

    # Saving and restoring

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes: plain values, tensors and random states; alike on every rank.

        Valid after a step, after training and after an epoch.
        """
        if self._loaded is not None:
            return self._loaded
        found, over = (None, self.over) if self._source is None else self._source_state()
        reading = self._begun and not over
        states = self._draws.states if self.states is None and self._draws is not None else self.states
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "samples": self.samples,
            "over": over,
            "begun": self._begun,
            "order": self.order.start,
            "samplers": self._start if reading else self._samplers and self._samplers.state(),
            "states": states if reading else None,
            "stream": self._shared.stream if reading and self._shared is not None else None,
            "running": has_iterator(self._loader),
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
        self.order.start = state["order"]
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
        self._found, self._own, self._running = state["source"], own, state["running"]

    def load_own_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take what `own_state_dict` returned on this rank."""
        self._own = state or {}

    # Reading an epoch

    def begin(self, dl: Any, epoch: int, dls: "DataLoaders", ranks: int) -> Any:
        """Return what to read as the training loader in this epoch.

        Args:
            dl: the user's loader, or a copy of it.
            epoch: which one.
            dls: keep copies of loaders, and know the samplers.
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
        self._samplers = dls.sampler_states(dl)  # before they are lent generators
        self._source, self._shared, self._draws = source_of(dl), None, None
        if state is not None and state["epoch"] == epoch:
            self._resume(dl, state)
        self._forward = not drawn and self._source is None and ranks == 1
        self._quiet = self._resumed or self._running  # else the loader draws as it did before
        if ranks > 1:  # `share` does the rest
            return dl
        if not drawn:
            return self._go_on(dl)
        own = draws_globally(dl, seeded=True)
        if own or self._quiet:
            dl = dls.twin(dl, training=True, always=True)
        self._draws = next((s for s in samplers_of(dl) if isinstance(s, Draws)), None)
        if self._draws is not None:
            self._draws.own, self._draws.skip = own, inf if self.over else self._read
            self._draws.states = self._draws.since = self.states
        return dl

    def _resume(self, dl: Any, state: dict[str, Any]) -> None:
        self.samples, self.over, self.states = state["samples"], state["over"], state["states"]
        self._read = self._in_batches(state)
        self.steps = self.first_step = max(self._read, self.over)
        self._resumed = bool(self._read or self.over or state["begun"])
        self._check_source(dl, state)
        self._found, self._stream = state["source"], state.get("stream")
        self._running, self._parts = state["running"], state["parts"]
        if state["samplers"] is not None:  # else it was taken before the first epoch
            self._samplers.load(state["samplers"])
        if self._read and not getattr(dl, "in_order", True) and starts_workers(dl):
            world.warn_once(
                "the training loader has in_order=False, so it is not known which batches of this epoch training has "
                f"seen: the first {self._read} are left out"
            )

    def _note_parts(self, now: tuple[int, int] | None) -> None:
        """Note in how many parts an iterable dataset is read; refuse other ones than when the state was saved."""
        then, self._parts = self._parts, now
        if self._resumed and not self.over and None is not then != now is not None:
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
            return LoaderView(dl, partial(read_on, skip=inf))
        if (found := self._take_found()) is not None:
            at_end = not self._resumed
            return LoaderView(dl, partial(read_on, source=self._source, state=found, at_end=at_end, quiet=self._quiet))
        if not self._read:
            return dl
        if not isinstance(dl, Sequence):  # whose batches are in memory: nothing is read
            self._again = self._read
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
        self._length = None  # a stream's end is known at a short batch, or when it gives none
        self._note_parts(shared.parts)
        if self._resumed:
            first = -(-self._read // self._per_step)
            if self._total is not None:  # the last step is the last also if the steps are other ones than before
                first = len(shared) - -(-max(0, self._total - self._read) // self._per_step)
            self.steps = self.first_step = max(first, self.over)
        own: dict[str, Any] = {}
        ended = self.over or (self._resumed and self._own.get("ended", False))
        if not ended:  # else the next epoch needs it
            own, self._own = self._own if self._resumed else {k: self._own.get(k) for k in ("source", "left")}, {}
        if self._source is not None:
            own = {"source": None if self.over else self._take_found(), "stream": self._stream}
        self._again = shared.begin(inf if ended else self._read, self.first_step, own, self._quiet)
        return self.first_step

    def _note_start(self, loader: Any) -> None:
        """Note the states of the user's generators as they are when the index stream of `loader` begins."""
        self._loader = loader
        if self._forward and self.states is None:
            self.states = states_at_start(loader) if isinstance(loader, DataLoader) else world.seed_states()
        generator = getattr(loader, "generator", None)
        pending = any(generator is g for g in self._samplers.generators) and not has_iterator(loader)
        with keep_seeds(loader) if pending else nullcontext():
            if pending:
                draw_seed(generator)  # as the loader is about to do
            self._start = self._samplers.state()


@contextmanager
def reading(learn: "Learner") -> Iterator[None]:
    """Seed what fetches the samples of the learner's loader, which is read in here."""
    position = learn._position if learn._in_fit else None
    loader: Any = learn.dl
    while not isinstance(loader, DataLoader) and (inner := getattr(loader, "loader", None)) is not None:
        loader = inner
    rank = world.rank() if learn.n_ranks > 1 and not getattr(learn.dl, "alike", False) else 0
    if position is None:
        with _seeded(loader, rank, None, 0, training=False, quiet=False):
            yield
        return
    training, seed = learn.training, position.seed(learn.training)
    first = learn._first_batch - position._again if training else 0
    with _seeded(loader, rank, seed, first, training, training and position._quiet):
        if training:
            position._note_start(loader)
        yield


@contextmanager
def _seeded(loader: Any, rank: int, seed: int | None, first: int, training: bool, quiet: bool) -> Iterator[None]:
    """Seed what a loader fetches in here; only in copies of the user's loader that `DataLoaders.twin` has made.

    Args:
        loader: any.
        rank: whose loader it is.
        seed: of this reading; by default the one that torch's loader draws for its workers.
        first: the number of the first batch.
        training: whether it is read for training.
        quiet: whether no generator shall move when the loader starts.
    """
    numbered: Any = next(iter(samplers_of(loader)), None)
    if not isinstance(numbered, Numbered):
        yield
        return
    generator = loader.generator
    numbered.first, numbered.seed, numbered.per_sample = first, None, isinstance(loader.dataset, PerSample)
    # In training as torch's loader does; evaluation begins alike, whether its workers run already or not.
    drawn = None if quiet or (training and has_iterator(loader)) else draw_seed(generator)
    loader.generator = torch.Generator()
    if numbered.per_sample or starts_workers(loader):
        seed = drawn if seed is None else seed
        numbered.seed = world.mixed_seed(seed, 0 if numbered.per_sample else rank)
        loader.generator.manual_seed(numbered.seed)
    try:
        yield
    finally:
        loader.generator, numbered.seed = generator, None
