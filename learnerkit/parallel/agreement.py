"""Ranks leave together: what one of them raises, all of them raise, at the same place of the loop.

Outside the batches every event ends in a vote, a collective of a few bytes. In training the rank that raises goes on
taking part in the collectives, with batches of zero weight (`left_batch.py`), until the flag that it puts into the
gradients' reduction has reached all (`rank_step.py`); in validation it calls the others to a vote. An error that is not
a cancel cannot wait for that: `watch.py` tells the others and frees those that are blocked.
"""

import math
import os
import signal
import threading
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

import torch

from learnerkit import world
from learnerkit.callback import Callback, Dispatch
from learnerkit.endings import Ending, ending_of, mark, may_follow, raised_in
from learnerkit.events import (
    INNER_EVENTS,
    CancelEpochException,
    CancelException,
    CancelFitException,
    CancelTrainException,
    CancelValidException,
    Event,
)
from learnerkit.parallel.watch import Watch
from learnerkit.text import in_one_line
from learnerkit.world import PeerError

if TYPE_CHECKING:
    from learnerkit.learner import Learner

LEAVING = (KeyboardInterrupt, CancelFitException, CancelEpochException, CancelValidException, CancelTrainException)
"""What ranks raise together; if they raise several at once, the first of these counts."""

SAVE, INTERRUPT, END = 1, 2, 3


class Request:
    """What is asked of a run from outside: to save, to save and raise KeyboardInterrupt, or to save and leave.

    Attributes:
        mine: of this rank: 0, `SAVE`, `INTERRUPT` or `END`.
        agreed: what all ranks know of, at the same place of the loop.
        since: when this rank was asked for `mine`, on the monotonic clock.
        heard: somebody acts on it, so Ctrl-C can wait.
        failed: a rank has failed, so that nothing can be saved any more: SIGTERM ends this one at once.
        ends_validation: a validation is left by `CancelFitException` rather than read to its end.
    """

    def __init__(self) -> None:
        self.mine = self.agreed = 0
        self.since = 0.0
        self.heard = self.failed = self.ends_validation = False

    def ask(self, what: int) -> None:
        """Ask for something, unless more is asked for already."""
        self.mine = max(self.mine, what)

    def done(self) -> None:
        """Note that it has been done."""
        self.mine = self.agreed = 0


def end_at_once() -> None:
    """End this process as SIGTERM does where nobody handles it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def packed(request: int, ranks: int) -> float:
    """A request as a number, of which the mean over the ranks tells the greatest."""
    return float((ranks + 1) ** (request - 1)) if request else 0.0


def unpacked(mean: float, ranks: int) -> int:
    """The greatest request of all ranks."""
    bounds = {request: packed(request, ranks) - packed(request - 1, ranks) / 2 for request in (END, INTERRUPT, SAVE)}
    return next((request for request, bound in bounds.items() if mean * ranks >= bound), 0)


_OUTER_EVENTS = [event for event in Event if event not in INNER_EVENTS and not event.startswith("cleanup_")]

_PLACES: dict[str, int] = {
    event: i for i, event in enumerate(Event) if event in INNER_EVENTS and event.startswith(("before_", "after_"))
    and not event.startswith("after_cancel_")
}  # fmt: skip
"""The events of a batch in their order."""

_runs = [0]  # how many all ranks have begun: every rank makes the same


class Agreement:
    """Lets all ranks of one run leave it at the same place; enter it on every rank.

    Args:
        learn: the learner.
        what: the call that makes the run, such as 'fit'.
        timeout: seconds after which a rank that waits without anything moving counts as stuck.
    """

    def __init__(self, learn: "Learner", what: str, timeout: float) -> None:
        self.learn, self.what, self.timeout = learn, what, timeout
        self.pending: BaseException | None = None  # this rank's reason to leave, until all ranks know of it
        self.presses = 0  # of Ctrl-C
        self.request = Request()
        self.between_events = True
        self.votes = self.dispatches = 0
        self.left_batch: Any = None  # this rank's `LeftBatch` once it trains, with its `RankStep`
        self._alone_from = math.inf  # the training batch from which on each rank is alone in its batches
        self.place = b"before_fit/"  # where the run is: 'event/callback'
        self._failing: BaseException | None = None
        self._stack = ExitStack()

    @property
    def dispatch(self) -> "RankDispatch":
        """The dispatch of the run, or of the evaluation that goes on inside it."""
        return cast(RankDispatch, self.learn._dispatch)

    def __enter__(self) -> "Agreement":
        if self.learn.dls.device.type != "cpu":  # NCCL's object collectives go by the current device
            torch.accelerator.set_device_index(self.learn.dls.device.index or 0)
        # A collective must not give up before the watch can tell what it waits for.
        world.join(self.timeout + 60, self.what, wait=self.timeout)
        self.watch = Watch(f"run-{_runs[0]}", self.what, self.timeout)
        try:
            self._stack.enter_context(self.watch)
        finally:
            _runs[0] += self.watch.met
        self._stack.enter_context(world.before_collective(self._before_collective))
        self._stack.enter_context(self._deferred_interrupts())
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> None:
        own = error
        if error is None:
            try:
                self.vote()  # another rank may have failed in a cleanup
            except BaseException as e:
                error = e
        if error is not None and not ending_of(error).agreed:
            self.failed(error)
        if error is not None and error is not self._failing and self.watch.failure and may_follow(error):
            error = self.watch.peer_error()
        self._stack.close()
        self._failing = self.pending = self.left_batch = None
        if error is not None and error is not own:
            try:
                raise error from None
            finally:
                error = None  # its traceback has this frame: nothing is left to the garbage collector

    @contextmanager
    def _deferred_interrupts(self) -> Iterator[None]:
        """Ctrl-C takes effect where all ranks can leave together; pressed again, at once."""

        def interrupt(*_: object) -> None:
            self.presses += 1
            if self.presses > 1:
                raise KeyboardInterrupt
            if self.request.heard:
                self.request.ask(INTERRUPT)
            else:
                self.pending = KeyboardInterrupt()

        in_main = threading.current_thread() is threading.main_thread()
        if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # the user has a handler
            yield
            return
        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    # Errors

    def failed(self, error: BaseException) -> None:
        """Tell the others of an error that is about to end this rank's run, before its cleanups run."""
        if self._failing is not None:
            return
        self.request.failed = True
        if self.request.mine == END and may_follow(error):
            end_at_once()  # the launcher has sent SIGTERM since another rank is dead
        known = ending_of(error)
        patience = 0.0 if known.standstill else 2.0  # no other rank will say more
        if may_follow(error) and self.watch.first_failure(patience):
            return
        event = known.event or f"the loop, after {self.place.decode().partition('/')[0]}"
        facts: dict[str, Any] = {"rank": self.watch.rank, "event": event, "callback": known.callback}
        facts |= {"epoch": self.learn.epoch, "step": max(self.learn.iter, 0), "cause": in_one_line(error)}
        self._failing = mark(error, **facts)
        self.watch.fail(Ending(**facts))

    def check(self) -> None:
        """Leave if another rank has failed.

        Raises:
            PeerError: it has.
        """
        if self.watch.failure is not None:
            raise self.watch.peer_error()

    # Cancels

    def keeps(self, error: BaseException) -> bool:
        """Keep one of `LEAVING` for the next vote, unless a stronger one is kept.

        Returns:
            False for what ends the run at once: all ranks raise it, or the user has pressed Ctrl-C again.
        """
        if ending_of(error).agreed or (isinstance(error, KeyboardInterrupt) and self.presses > 1):
            return False
        if self.pending is None or strength(error) < strength(self.pending):
            self.pending = error
        return True

    def vote(self, flags: list[float] | None = None, where: str = "the end of") -> None:
        """Raise on every rank the strongest reason that any of them has to leave; every rank must reach this.

        Args:
            flags: those of other ranks that are known already, as in `flags_of`.
            where: in the event or the batches that this rank is at.

        Raises:
            PeerError: the ranks vote at different places, and none of them has a reason to.
        """
        mine = [max(pair) for pair in zip(flags_of(self.pending), flags or flags_of(None), strict=True)]
        self.votes += 1
        dispatch = self.dispatch if self.learn._dispatch else None
        number, event = (dispatch.number, dispatch.event) if dispatch else (0, "the run")
        place = zlib.crc32(f"{number} {where} {event}".encode())
        with world.before_collective(None):
            # A rank that has left a batch early has not counted it; the counter must not stay behind the others'.
            request, iterations = self.request.mine, self.learn.train_iter
            counts = torch.tensor([*mine, request, iterations, place, -place], dtype=torch.float64)
            *flags, request, iterations, last, first = world.reduce(counts, "max", among="votes").tolist()
            if last != -first and not any(flags):
                task = f" ({self.learn.task})" if dispatch else ""
                raise self._parted(world.all_gather(f"{where} {event}{task}", among="votes"))
        self.learn.train_iter = int(iterations)
        self.request.agreed = max(self.request.agreed, int(request))
        self.leave(flags)
        if self.request.ends_validation and self.request.agreed > SAVE:
            self.request.ends_validation = False
            raise CancelFitException(agreed=True)

    def _parted(self, places: list[str]) -> PeerError:
        found = ", ".join(f"rank {rank} is at {place}" for rank, place in enumerate(places))
        return world.not_together(f"the ranks have come to different places: {found}")

    def leave(self, flags: list[float]) -> None:
        """Raise what the flags of all ranks say, if any is set."""
        kind = next((kind for kind, flag in zip(LEAVING, flags, strict=True) if flag > 0), None)
        if kind is None:
            return
        raise self._agreed(kind)

    def _agreed(self, kind: type[BaseException]) -> BaseException:
        """What all ranks raise: this rank's own reason, if it is of that kind."""
        mine, self.pending = self.pending, None
        return mark(mine if isinstance(mine, kind) else kind(), agreed=True)

    def _before_collective(self) -> None:
        # A rank that has left an event by a cancel goes on to the vote after it, which would be paired with this
        # collective of the others.
        if self.between_events:
            self.vote(where="a collective in")

    # The loop

    def run_batch(self, one_batch: Any) -> None:
        """Run a batch, and take part in the others' collectives if this rank leaves it before its end."""
        learn = self.learn
        self.dispatch.event = "the batches"
        learn._batch_index = learn.dl.share.place
        if not learn.training:
            self._run_validation_batch(one_batch)
            return
        if learn.train_iter >= self._alone_from:
            learn._gradient = None
            with world.alone():
                one_batch()
            return
        step = self.left_batch.step
        outer, self.between_events = self.between_events, False
        try:
            step.begin()
            try:
                one_batch()  # also with a reason to leave, which is reduced with its gradients
            except LEAVING as error:
                if not self.keeps(error):
                    raise
            if step.is_open():
                self.left_batch.finish_batch()
            if self.dispatch.last != "after_batch":
                self._leave_if_all_do("after_batch")
            if self.dispatch.to_come("after_batch"):  # the others have it, and it may hold a collective
                self.dispatch.resume("after_batch")
            self._leave_if_all_do("next batch")
        finally:
            self.between_events = outer

    def separate(self, after: int) -> None:
        """Let each rank train by itself after so many batches; outside of batches the ranks vote as ever."""
        self._alone_from = after

    def _leave_if_all_do(self, point: str) -> None:
        """Leave at once, as one process would, if all ranks have a reason to before they come to this point."""
        if self.pending is not None and self.left_batch.step.all_skip(point):
            self.vote()

    def _run_validation_batch(self, one_batch: Any) -> None:
        try:
            one_batch()
        except LEAVING as error:
            if not self.keeps(error):
                raise
        leaves = self.pending is not None or (self.request.ends_validation and self.request.mine > SAVE)
        if leaves:
            self.watch.tell_others("leaving", self.votes)
        if leaves or self.watch.called == self.votes:
            self.vote()

    def end_batches(self) -> None:
        """Vote after the last batch, whose flags no step has read; every rank must reach this."""
        self.dispatch.event = "the batches"
        flags = None
        if self.learn.training:
            self.left_batch.step.end()
            flags = self.left_batch.step.message.exchange_flags(None)
        if flags:
            self.request.ask(unpacked(flags[-1], world.world_size()))
        self.vote(flags and flags[: len(LEAVING)])


class RankDispatch(Dispatch):
    """The dispatch of a run on several ranks: it writes the heartbeat, and votes after each event outside batches.

    Args:
        cbs, fitting: as in `Dispatch`.
        agreement: of the run.
    """

    def __init__(self, cbs: list[Callback], fitting: bool, agreement: Agreement) -> None:
        self.agreement = agreement
        self.stopped: tuple[str, Any] = ("", ())  # the event that an error has stopped, and its hooks to come
        self.last: str | None = None
        agreement.dispatches += 1
        self.number = agreement.dispatches  # of the run or the evaluation inside it
        self.event = "the run"  # outside the batches, or the batches
        super().__init__(cbs, fitting)

    def _resolve(self) -> dict[str, list]:
        "The table, each entry with the place that the heartbeat is to show."
        table = super()._resolve()
        for event in _OUTER_EVENTS:
            # The event takes place on all ranks, also where nobody listens to it.
            table[event] = table[event] or [(None, _nothing)]
        for event in Event:
            table[event] = [
                (cb, hook, f"{event}/{'' if cb is None else repr(cb)}".encode()) for cb, hook in table[event]
            ]
        return table

    def fire(self, event: str) -> None:
        """Call everyone who listens; after an event outside the batches, vote."""
        agreement = self.agreement
        if event in INNER_EVENTS:
            self._call(event, self.table[event])
            return
        self.event = event
        try:
            self._call(event, self.table[event])
        except LEAVING as error:
            if not agreement.keeps(error):
                raise
        agreement.vote()

    def begin(self) -> None:
        """Begin a batch: none of its events has taken place."""
        self.last, self.stopped = None, ("", ())

    def to_come(self, event: str) -> bool:
        """Tell whether an event of this batch is still to take place, or a cancel has stopped it half-way."""
        return self.last is None or self.stopped_in(event) or _PLACES[event] > _PLACES[self.last]

    def stopped_in(self, event: str) -> bool:
        """Tell whether an error or a cancel has stopped this event."""
        return self.stopped[0] == event

    def resume(self, event: str) -> None:
        """Go on with an event after the callback that stopped it, or fire it as a whole. Cancels are kept for later."""
        hooks = self.table[event]
        if self.stopped_in(event):
            hooks, self.stopped = self.stopped[1], ("", ())
        try:
            self._call(event, hooks)
        except LEAVING as error:
            if not self.agreement.keeps(error):
                raise
        except CancelException:
            pass

    def _call(self, event: str, hooks: list) -> None:
        if event in _PLACES:
            self.last = event
        agreement = self.agreement
        learn, beat = agreement.learn, agreement.watch.heartbeat.beat
        for i, (_, hook, place) in enumerate(hooks):
            agreement.place = place
            beat(monotonic(), learn.epoch, learn.iter, place)
            agreement.check()
            try:
                hook()
            except BaseException as error:
                self.stopped = event, hooks[i + 1 :]
                raised_in(error, event, place.decode().partition("/")[2])
                raise

    def close(self) -> None:
        """Forget the hooks, and what they have raised."""
        super().close()
        self.stopped = "", ()

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        try:
            cancels = isinstance(error, CancelException | KeyboardInterrupt)
            if error is not None and not (cancels or ending_of(error).agreed):
                self.agreement.failed(error)
        finally:
            try:
                super().__exit__(kind, error, traceback)
            except LEAVING as cancel:  # raised in a cleanup, which must not communicate: the next vote does
                if not self.agreement.keeps(cancel):
                    raise


def strength(error: BaseException) -> int:
    """Return the place of an error among `LEAVING`: the lower, the stronger."""
    return next(i for i, kind in enumerate(LEAVING) if isinstance(error, kind))


def flags_of(error: BaseException | None) -> list[float]:
    """Return a number for each of `LEAVING`: 1 in the place of the error, else 0."""
    place = None if error is None else strength(error)
    return [float(i == place) for i in range(len(LEAVING))]


def _nothing() -> None:
    """The hook of an event that nobody listens to."""
