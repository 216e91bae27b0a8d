"""Debugging aids: short epochs, overfitting one batch, and traces of some steps."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, schedule

from learnerkit import arguments, distributed
from learnerkit.callback import Callback
from learnerkit.data.batches import loader_len, to_device
from learnerkit.data.cuts import Share
from learnerkit.data.iterable import LoaderView
from learnerkit.data.stream import stream_of
from learnerkit.state import State
from learnerkit.torch_internals import is_profiling
from learnerkit.values import map_batch


class ShortLoader(LoaderView):
    """The first `n` batches of a loader, which begins at the batch `first`."""

    def __init__(self, dl: Any, n: int, first: int = 0) -> None:
        super().__init__(dl)
        self.n, self.first = n, first

    def __len__(self) -> int:
        return min(self.n, len(self.loader))

    def __iter__(self) -> Iterator:
        left, stream = max(0, self.n - self.first), stream_of(self.loader)
        if not left and stream is not None and 0 < stream.place < inf:
            # The batches were read in another process. They are drawn, as a generator of the user's decides by its
            # state which batches the next epoch has.
            deque(islice(stream.sampler, int(stream.place)), maxlen=0)
        # islice releases the loader's iterator after the last batch, which ends its workers.
        return islice(self.loader, left)


class RepeatingLoader(LoaderView):
    """The first batches of a loader, repeated until there are as many as the loader has.

    A loader without length is read to its end each time, to count its batches.

    Args:
        n: how many batches to keep.
        device: where to keep them.
        kept: the batches read in an earlier epoch, each with its `share` and `sample` (see `RankLoader`); new ones are
            added to this list.
        first: the step that the epoch begins with.
    """

    step_size = batch_sampler = None  # only the loader's first batches are read, whatever it draws

    def __init__(self, dl: Any, n: int, device: torch.device, kept: list[tuple[Any, dict]], first: int) -> None:
        super().__init__(dl)
        self.n = n
        self.device = device
        self.kept = kept
        self.first = first

    def __iter__(self) -> Iterator:
        length, step = loader_len(self.loader), self.first - 1
        wanted = None if length is None else min(self.n, length) - len(self.kept)
        if wanted is None or wanted > 0:
            for step, batch in enumerate(islice(self.loader, wanted), self.first):
                if len(self.kept) < self.n:
                    facts = {name: getattr(self.loader, name, None) for name in ("share", "sample")}
                    # A loader may refill the tensors of a batch for the next one.
                    self.kept.append(to_device((map_batch(torch.clone, batch), facts), self.device))
                yield self._repeat(step)
        for step in range(step + 1, (length or 0) if self.kept else 0):
            yield self._repeat(step)

    def _repeat(self, step: int) -> Any:
        index = step % len(self.kept)
        batch, facts = self.kept[index]
        share = facts["share"]
        if share is not None:  # every batch needs its own place, a repeated one too
            share = share._replace(place=share.place + (step - index) * distributed.world_size())
        self.share, self.sample = share, facts["sample"]
        return map_batch(torch.clone, batch)  # a copy, since a callback may change it in place


class ShortEpochCallback(Callback):
    """Reads only part of each epoch of a fit, to try out a script; schedules adapt to the short epoch.

    Args:
        pct: share of the batches to read, above 0 and at most 1; rounded, at least one batch.
        n: the number of batches to read, on each rank, instead of `pct`.
        short_valid: shorten validation too.

    Raises:
        TypeError, ValueError: neither or both of pct and n, or a number out of range; during a fit, pct and a loader
            without length.
    """

    order = 12  # after DistributedCallback, whose loader gives the rank its share
    only_fit = True

    def __init__(self, pct: float | None = None, n: int | None = None, short_valid: bool = True) -> None:
        if (pct is None) == (n is None):
            raise TypeError(f"got pct={pct} and n={n}; give one of them")
        if pct is not None:
            what = "a share of the batches, above 0 and at most 1"
            arguments.check_number("pct", pct, lambda share: 0 < share <= 1, what)
        if n is not None:
            arguments.check_count("n", n, "a number of batches")
        self.pct = pct
        self.n = n
        self.short_valid = short_valid

    def before_train(self) -> None:
        self.learn.dl = ShortLoader(self.learn.dl, self._batches(), self.learn.first_iter)

    def before_validate(self) -> None:
        if self.short_valid:
            self.before_train()

    def _batches(self) -> int:
        if self.n is not None:
            return self.n
        dl = self.learn.dl
        length = loader_len(dl)
        if length is None:
            raise ValueError(
                f"ShortEpochCallback(pct={self.pct}) needs to know how many batches an epoch has, but the loader "
                f"({type(dl).__name__}) has no length; say how many to read by n=..., or give it a __len__"
            )
        return max(1, round((self.pct or 0) * length))


class OverfitBatch(Callback):
    """Trains only on the first batch of the fit, to see whether model and loss can learn at all.

    The batch is kept as it was read, with its random augmentation. Under DDP each rank keeps its share of the first
    global batch. Validation reads all its data.

    Args:
        n: how many batches to keep.

    Raises:
        ValueError: `n` below 1.
    """

    order = ShortEpochCallback.order
    only_fit = True

    def __init__(self, n: int = 1) -> None:
        arguments.check_count("n", n, "a number of batches")
        self.n = n
        self._kept: list[tuple[Any, dict]] = []

    def before_train(self) -> None:
        learn = self.learn
        learn.dl = RepeatingLoader(learn.dl, self.n, learn.dls.device, self._kept, learn.first_iter)

    def cleanup_fit(self) -> None:
        self._kept = []

    def state_dict(self) -> State:
        kept = [(batch, facts | {"share": facts["share"] and tuple(facts["share"])}) for batch, facts in self._kept]
        return {"n": self.n, "own": kept}

    def load_state_dict(self, state: State) -> None:
        if "own" not in state:
            distributed.warn_once(
                f"OverfitBatch: {len(state['ranks'])} ranks have kept batches that {distributed.world_size()} cannot "
                "divide, so the run goes on with other batches"
            )
        kept = to_device(state.get("own", []), self.learn.dls.device)
        # In place: the loader of the epoch has the list.
        self._kept[:] = [(batch, facts | {"share": facts["share"] and Share(*facts["share"])}) for batch, facts in kept]


class Profiler(Callback):
    """Records some training steps of each fit by `torch.profiler`, on every rank, and writes a trace file.

    The file is Chrome's JSON: open it at https://ui.perfetto.dev, in chrome://tracing, or with TensorBoard's profiler
    plugin. A line says where it is. A fit that ends in between, also by an error, leaves what was recorded.

    Args:
        folder: for the files, one for each rank: a path, taken as it is.
        steps: the first and the last step to record, both included: training batches that this fit reads, counted
            from 0 over all its epochs; the first is 1 or later, as the profiler starts in the step before. A step
            begins with the loading of its batch.
        options: for `torch.profiler.profile`: `record_shapes=True`, `profile_memory=True`, `with_stack=True`.

    Attributes:
        path: the last file of this rank, or `None`.

    Raises:
        TypeError, ValueError: arguments that cannot work; in `before_fit`, another profiler of torch in the same fit.
    """

    order = 1000  # a step ends after what all others do in it
    only_fit = True
    run_valid = False
    _profiler: Any = None

    def __init__(self, folder: str | Path = "profile", steps: tuple[int, int] = (10, 15), **options: Any) -> None:
        if not isinstance(steps, Sequence) or len(steps) != 2:
            raise TypeError(f"got steps={steps!r}; it is the first and the last step to record, such as (10, 15)")
        first, last = steps
        arguments.check_count("steps[0]", first, "the first step to record", least=1)
        arguments.check_count("steps[1]", last, "the last step to record", least=first)
        self.folder = Path(folder)
        self.steps = (first, last)
        self.options = options
        self.path: Path | None = None

    def before_fit(self) -> None:
        if is_profiling() or any(isinstance(cb, Profiler) and cb._profiler is not None for cb in self.learn.cbs):
            raise ValueError(
                f"{self!r} cannot record while another profiler of torch does, which would lose its trace: use one of "
                "them, or a fit for each"
            )
        first, last = self.steps
        # One step before the first is for the profiler's own start.
        when = schedule(wait=first - 1, warmup=1, active=last - first + 1, repeat=1)
        self.path = None
        profiler = profile(schedule=when, on_trace_ready=self._write, **self.options)
        profiler.start()
        self._profiler = profiler

    def after_batch(self) -> None:
        self._profiler.step()

    def _write(self, profiler: profile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"fit{self.learn.n_fits}-rank{distributed.rank()}.pt.trace.json"
        profiler.export_chrome_trace(str(path))
        self.path = path
        first, last = self.steps
        end = "the end of the fit" if self._profiler is None else f"{last}, counted from 0,"
        self.learn.say(f"the trace of the steps from {first} to {end} is in {path}")

    def cleanup_fit(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
            if self.path is None:
                distributed.warn(
                    f"no step was recorded: the fit has read fewer than {self.steps[0] + 1} training batches"
                )
