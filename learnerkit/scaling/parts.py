"""The parts of a training step on this rank, and which rank the others wait for.

All ranks leave a reduction of gradients together, so that no clocks need to agree: a step lasts from the end of one
reduction to the end of the next, on every rank alike. What a rank does before its last bucket is ready, a slow backward
pass too, is its own time; the longest over the ranks less one's own is waiting for a slow rank, and what is left is
communication. Other collectives of `learnerkit.distributed` in a step are waiting, too. Those that a callback or a
module makes by itself count as its own time.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import mean, median, stdev
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from learnerkit.callback import Callback
from learnerkit.callbacks.training import StepBudget
from learnerkit.data.iterable import LoaderView
from learnerkit.events import INNER_EVENTS
from learnerkit.state import Learner
from learnerkit.torch_internals import call_after_backward, time_collectives

INPUT, COPY, FORWARD, BACKWARD = "waiting for input", "copying to the device", "forward", "backward"
REDUCE, OPTIMIZER, REST = "exposed all-reduce", "optimizer", "the rest"
GATHER, SCATTER = "all-gather", "reduce-scatter"  # the collectives of a sharded model

PARTS = (INPUT, COPY, FORWARD, BACKWARD, REDUCE, OPTIMIZER, REST)
"""The parts of every step, without the callbacks, each of which is a part by its name."""

_SENT = (REDUCE, GATHER, SCATTER)

SKIPPED = 3
"""Steps at the start that do not count: the first is averaged after its pass, and then DDP arranges its buckets."""

_EDGE = 1_000_000  # the orders of what runs before and after all callbacks


def waiter(device: torch.device) -> Callable[[], None]:
    """Return a function that waits until the device has done what it was given: a host-device sync."""
    if device.type == "cpu":
        return lambda: None
    if device.type == "mps":
        return torch.accelerator.synchronize
    # Wait for this stream only: collectives have other streams, whose time must not count for what came before.
    return lambda: torch.accelerator.current_stream(device).synchronize()


class Clock:
    """Notes the seconds and the samples of each step of a trial, and waits for the device only where it must.

    Args:
        learn: the learner.
        n_steps: steps to note, after `SKIPPED`. The first of an epoch is left out, with the start of the loader.

    Attributes:
        seconds, samples: of each step, on this rank.
        parts: the seconds of each part, for each step; a plain clock knows none.
        due: steps that the trial has to take in all.
    """

    def __init__(self, learn: "Learner", n_steps: int) -> None:
        self.learn, self.due = learn, n_steps + SKIPPED + 1
        self.seconds: list[float] = []
        self.samples: list[int] = []
        self.parts: list[dict[str, float]] = []
        self.wait = waiter(learn.dls.device)
        self._since: float | None = None
        self._count = self._samples = 0
        self._found: dict[str, float] = {}  # the parts of the present step

    def callbacks(self) -> list[Callback]:
        """Return the callbacks that time the trial."""
        return [Callback(order=-_EDGE, before_train=lambda cb: self.begin(), after_backward=lambda cb: self.reduced())]

    def begin(self) -> None:
        """Begin an epoch."""
        self._since, self._samples = None, 0

    def reduced(self) -> None:
        """Note that gradients have been reduced; end the step if this was its last backward pass."""
        learn = self.learn
        self._samples += learn.batch_size
        if not learn.step_due:
            return
        self._count += 1
        if self._since is None or self._count in (SKIPPED + 1, self.due) or learn.iter + 1 == learn.n_iter:
            self.wait()
        now = self._now()
        if self._since is not None and self._count > SKIPPED + 1:
            self.seconds.append(now - self._since)
            self.samples.append(self._samples)
            self.parts.append(self._found)
        self._since, self._samples = now, 0
        self._found = {}

    def _now(self) -> float:
        return perf_counter()


class Stopwatch(Clock):
    """Divides each step into its parts, which add up to its seconds: at each time one of them is running.

    It waits for the device at the end of each part, so that a step may take longer than it does without.
    """

    def __init__(self, learn: "Learner", n_steps: int) -> None:
        super().__init__(learn, n_steps)
        self._running, self._start = REST, perf_counter()
        self._undo: Callable[[], None] | None = None  # undoes the timing of the shards' collectives

    def enter(self, part: str) -> str:
        """Begin a part, and return the one that was running."""
        self.wait()
        now, before = perf_counter(), self._running
        self._found[before] = self._found.get(before, 0.0) + now - self._start
        self._running, self._start = part, now
        return before

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Time the body of the context as a separate part, inside the one that is running."""
        before = self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def callbacks(self) -> list[Callback]:
        first: dict[str, Callable] = {
            event: lambda cb: self.enter(REST) for event in INNER_EVENTS if event != "cleanup_batch"
        }
        first |= {"before_train": lambda cb: self.begin(), "after_backward": lambda cb: self.reduced()}
        last: dict[str, Callable] = {
            "before_train": lambda cb: self._attach(),
            "before_batch": lambda cb: self.enter(FORWARD),
            "after_pred": lambda cb: self.enter(FORWARD),  # the loss
            "before_backward": lambda cb: self._begin_backward(),
            "before_step": lambda cb: self.enter(OPTIMIZER),
            "after_step": lambda cb: self.enter(OPTIMIZER),  # the gradients are cleared
        }
        return [Callback(order=-_EDGE, **first), Callback(order=_EDGE, **last)]

    def reduced(self) -> None:
        self.enter(REST)
        super().reduced()

    def _now(self) -> float:
        return self._start

    def watch_hooks(self) -> Callable[[], None]:
        """Time each callback's hooks in a batch as a part of its name; return the function that undoes this."""
        learn = self.learn
        dispatch: Any = learn._dispatch
        make = dispatch._hook

        def hook(cb: Callback, event: str) -> Callable[[], None]:
            made = make(cb, event)
            if event not in INNER_EVENTS or abs(cb.order) == _EDGE or isinstance(cb, StepBudget):  # the trial's own
                return made
            # DistributedCallback sends buffers there, in which ranks wait for rank 0.
            sends = event == "before_batch" and repr(cb) == "DistributedCallback"
            return self.within(REDUCE if sends else f"callback {name_of(cb, event)}")(made)

        def undo() -> None:
            del dispatch._hook
            if self._undo is not None and learn.shards is not None:
                self._undo()

        dispatch._hook = hook
        dispatch.changed()
        return undo

    def _attach(self) -> None:
        learn = self.learn
        input_begins, input_is_there = partial(self.enter, INPUT), partial(self.enter, COPY)
        learn.dl = LoaderView(learn.dl, partial(watched, before=input_begins, after=input_is_there))
        if learn.shards is not None and self._undo is None:
            self._undo = time_collectives(
                learn.shards.divided, partial(self.within, GATHER), partial(self.within, SCATTER)
            )

    def _begin_backward(self) -> None:
        self.enter(BACKWARD)
        call_when_ready(self.learn, partial(self.enter, REDUCE), begins=partial(self.enter, BACKWARD))


def watched(loader: Any, before: Callable[[], object], after: Callable[[], object]) -> Iterator:
    """Iterate over a loader, and report each wait for a batch.

    Args:
        loader: the loader.
        before, after: called when the wait for a batch, or for the end, begins and when it is over.
    """
    batches = iter(loader)
    while True:
        before()
        try:
            batch = next(batches)
        except StopIteration:
            return
        finally:
            after()
        yield batch


def call_when_ready(learn: "Learner", ready: Callable[[], Any], begins: Callable[[], Any] = lambda: None) -> None:
    """Arrange before a backward pass that `ready` is called when it is over, before this rank waits for the others.

    Args:
        learn: the learner; alone, or before the last batch of a step, nothing is called.
        ready: called at the end of each backward pass.
        begins: called when one begins.
    """

    def begin(_: Tensor) -> None:
        begins()
        call_after_backward(ready)  # Such calls run in the order of registration: this one before DDP's wait.

    loss = learn.loss_grad
    if learn.n_ranks == 1 or not learn.step_due:
        return
    if not learn.batch_size:  # This rank computes nothing, and only waits.
        ready()
    elif isinstance(loss, Tensor) and loss.requires_grad:
        loss.register_hook(begin)


def name_of(cb: Callback, event: str) -> str:
    """Return the name of a callback in the report; of one that is made of functions, with that of the function."""
    hook = vars(cb).get(event) if type(cb) is Callback else None
    inner = getattr(hook, "func", hook)
    return f"{cb!r}({getattr(inner, '__name__', inner)})" if hook is not None else repr(cb)


# What the parts of all ranks say

Steps = Sequence[dict[str, float]]


def own_time(parts: dict[str, float]) -> float:
    """Return the seconds of a step in which a rank neither waits for others nor sends anything."""
    return sum(seconds for part, seconds in parts.items() if part not in _SENT)


def mean_parts(steps: Steps) -> dict[str, float]:
    """Return the mean of each part over the steps, the usual parts first."""
    names = dict.fromkeys([*PARTS[:-1], *(name for step in steps for name in step if name not in PARTS), REST])
    return {name: mean(step.get(name, 0.0) for step in steps) for name in names}


class Slowest(NamedTuple):
    """The rank that the others wait for.

    Attributes:
        rank: its number.
        part: in which of its parts the time is spent; '' if it is in most of what it computes.
        seconds: by how much this part (or all its own time) is longer than on the other ranks, in a step.
        cost: seconds of a step that would be saved if it were as fast as the next slowest.
    """

    rank: int
    part: str
    seconds: float
    cost: float


ALARM = 0.1
"""The share of a step above which waiting for a rank is reported."""


def slowest(ranks: Sequence[Steps]) -> Slowest | None:
    """Find the rank that the others wait for; `None` if there is none, or chance explains it.

    Args:
        ranks: for each rank the parts of the same steps.
    """
    n = min(map(len, ranks))
    if len(ranks) < 2 or n < 2:
        return None
    own = [[own_time(step) for step in steps[:n]] for steps in ranks]
    rank = max(range(len(ranks)), key=lambda r: sum(own[r]))
    behind = [mine - max(others) for mine, *others in zip(own[rank], *_without(own, rank), strict=True)]
    whole, cost = mean(sum(step.values()) for step in ranks[rank][:n]), mean(behind)
    if cost < ALARM * whole or cost < 4 * stdev(behind) / math.sqrt(n):
        return None
    parts = [mean_parts(steps[:n]) for steps in ranks]
    excess = {
        name: seconds - median(other.get(name, 0.0) for other in _without(parts, rank))
        for name, seconds in parts[rank].items()
        if name not in _SENT
    }
    part = max(excess, key=lambda name: excess[name])
    total = sum(x for x in excess.values() if x > 0)
    if excess[part] < 0.8 * total:  # a slower device is slower in all that it computes
        return Slowest(rank, "", total, cost)
    return Slowest(rank, part, excess[part], cost)


def _without(ranks: list[Any], rank: int) -> list[Any]:
    return ranks[:rank] + ranks[rank + 1 :]


def waiting(ranks: Sequence[Steps]) -> tuple[list[float], float]:
    """Divide the exposed time: the seconds that each rank waits for the slowest one, and those of communication."""
    exposed = [sum(mean_parts(steps).get(part, 0.0) for part in _SENT) for steps in ranks]
    alone = min(exposed)
    return [seconds - alone for seconds in exposed], alone
