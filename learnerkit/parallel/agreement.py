"""Agreement of the ranks on when to leave: what one rank raises, all ranks raise, at the same place of the loop.

Outside the batches, every event ends in a vote, a collective of a few bytes. In training, the rank that raises keeps
taking part in the collectives, with batches of zero weight (`left_batch.py`), until its flag, which travels with the
gradients' reduction, has reached all ranks (`rank_step.py`). In validation it calls the others to a vote. An error that
is not a cancel cannot wait for that: `watch.py` tells the others and frees those that are blocked.
"""

import math
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from time import monotonic
from typing import Any
from zlib import crc32

import torch

from learnerkit import distributed
from learnerkit.callback import Callback, Dispatch
from learnerkit.endings import ending_of, mark, may_follow, raised_in
from learnerkit.events import (
    INNER_EVENTS,
    CancelBackwardException,
    CancelBatchException,
    CancelEpochException,
    CancelException,
    CancelFitException,
    CancelStepException,
    CancelTrainException,
    CancelValidException,
    Event,
)
from learnerkit.marks import collective
from learnerkit.parallel.watch import Watch
from learnerkit.processes.rank_main import end_at_once
from learnerkit.processes.requests import END, INTERRUPT, SAVE, Request
from learnerkit.state import Learner
from learnerkit.text import in_one_line
from learnerkit.utils import replaced

LEAVING = (KeyboardInterrupt, CancelFitException, CancelEpochException, CancelValidException, CancelTrainException)
"""The exceptions that ranks raise together, the strongest first; if ranks have several, the strongest is raised."""


TOLD: tuple[Any, ...] = (SAVE, INTERRUPT, END, *LEAVING)
"""The requests and reasons to leave that ranks tell each other, by a flag for each."""


BACKWARD, STEP, AFTER_BATCH, NEXT_BATCH = 1, 10**6, 10**6 + 1, 10**6 + 2
"""The points of a batch that a rank may skip while other ranks wait there.

Those between the first two are the collectives of callbacks in `after_backward` and `before_step` of a step that is
due.
"""

_PLACES: dict[str, int] = {
    event: i for i, event in enumerate(INNER_EVENTS) if not event.startswith(("after_cancel_", "cleanup_"))
}
"""The index of each event of a batch, in the order in which they take place."""


class Agreement:
    """Lets all ranks of one run leave it at the same place.

    Args:
        learn: the learner.

    Attributes:
        alone_from: each rank trains by itself from this training batch on; outside of batches the ranks still vote.
    """

    def __init__(self, learn: "Learner") -> None:
        self.learn = learn
        self.pending: BaseException | None = None  # this rank's reason to leave, until all ranks know it
        self.presses = 0  # how often Ctrl-C was pressed
        self.request = Request()
        self.votes = 0
        self.event = "before_fit"  # the last event that has begun
        self.phase = ""  # 'training' or 'evaluation'; before the first pass over the data empty
        self.left_batch: Any = None  # this rank's `LeftBatch`, with its `RankStep`, once it trains
        self.some_stay = False  # some rank had no reason to leave in the last vote
        self.leaves: BaseException | None = None  # raised in place of the next collective, as on the other ranks
        self.alone_from = math.inf

    @contextmanager
    @collective
    def run(self, what: str, timeout: float) -> Iterator[None]:
        """Meet the other ranks for a run, and leave it with them.

        Args:
            what: the call that makes the run, such as 'fit'.
            timeout: seconds without progress after which a rank that waits counts as stuck.

        Raises:
            PeerError: another rank has failed, has not come, or is at another place.
        """
        device = self.learn.dls.device
        if device.type != "cpu":  # NCCL's object collectives use the current device
            of_rank = device if device.index is not None else distributed.default_device()
            torch.accelerator.set_device_index(of_rank.index)
        # A collective must not give up before the watch can tell what it waits for.
        distributed.join(timeout + 60, what, wait=timeout)
        with ExitStack() as stack:
            self.watch = stack.enter_context(Watch(what, timeout))
            stack.enter_context(distributed.before_collective(self._before_collective))
            stack.enter_context(distributed.noticing_standstills(self.watch.none_moves))
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # otherwise the user has a handler
                with suppress(ValueError):  # only the main thread may set signal handlers
                    stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, self._interrupt))
            self.learn._agreement = self
            try:
                yield
                self.vote("the end of the run")  # another rank may have failed in a cleanup
                self.make_whole()  # a cancel may have skipped `after_fit`
            except BaseException as error:
                if self.learn.shards is not None:
                    self.learn.shards.explain(error)
                self.failed(error)
                if may_follow(error) and ending_of(error).rank < 0:  # this rank has told no other rank of the error
                    self.watch.check()
                if ending_of(error).agreed:  # all ranks are here, as with Ctrl-C
                    self.make_whole()
                raise
            finally:
                self.pending = self.left_batch = self.learn._agreement = None

    @collective
    def make_whole(self) -> None:
        """Gather a sharded model, unless it is too large for that."""
        shards = self.learn.shards
        if shards is not None and not shards.stays:
            shards.restore()
            self.learn.shards = None

    def _interrupt(self, *_: object) -> None:
        """Handle Ctrl-C: have all ranks leave together, or, if it is pressed again, raise at once."""
        self.presses += 1
        if self.presses > 1:
            raise KeyboardInterrupt
        if self.request.heard:
            self.request.ask(INTERRUPT)
        else:
            self.pending = KeyboardInterrupt()

    def failed(self, error: BaseException) -> None:
        """Tell the others of an error that is about to end this rank's run, before its cleanups run."""
        known = ending_of(error)
        if self.request.failed or known.agreed:
            return
        self.request.failed = True
        if self.learn.shards is not None:
            self.learn.shards.failed = True
        if may_follow(error):
            if self.request.mine == END:
                end_at_once()  # the launcher has sent SIGTERM because another rank is dead
            # This rank only repeats that failure.
            if self.watch.first_failure(patience=0.0 if known.standstill else 2.0):
                return
        mark(
            error, rank=self.watch.rank, event=known.event or f"the loop, after {self.event}",
            phase=self.phase, epoch=self.learn.epoch, step=max(self.learn.iter, 0),
            cause=in_one_line(error),
        )  # fmt: skip
        self.watch.fail(ending_of(error))

    # Cancels

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Catch an exception of `LEAVING` and keep it for the next vote, unless a stronger one is already kept.

        An exception that ends the run at once is raised again: all ranks raise it, or Ctrl-C was pressed twice.
        """
        try:
            yield
        except LEAVING as error:
            if ending_of(error).agreed or (isinstance(error, KeyboardInterrupt) and self.presses > 1):
                raise
            self.pending = min(self.pending or error, error, key=strength)

    def flags(self) -> list[float]:
        """Return this rank's flags: for each item of `TOLD` 1 if this rank asks for it or leaves with it, else 0."""
        own, asked = self.pending, self.request.mine
        return [what == asked if isinstance(what, int) else isinstance(own, what) for what in TOLD]

    def obey(self, flags: list[float]) -> None:
        """Record the strongest request of any rank, and raise the strongest reason to leave that any rank has flagged.

        Args:
            flags: the sum, mean or maximum of the flags of all ranks.
        """
        for told, flag in zip(TOLD, flags, strict=True):
            if flag and isinstance(told, int):
                self.request.agreed = max(self.request.agreed, told)
            elif flag:
                raise self._agreed(told)

    def _agreed(self, kind: type[BaseException]) -> BaseException:
        """Return the reason to raise: this rank's own if it is of that kind, else a new one.

        A weaker reason of this rank is kept for the next vote. The caller raises the exception: raised here, its
        traceback would hold this frame, which holds the exception.
        """
        reason, own = kind(), self.pending
        if strength(own) >= strength(reason):
            self.pending = None
        return mark(own if isinstance(own, kind) else reason, agreed=True)

    @collective
    def vote(self, where: str = "") -> None:
        """Raise on every rank the strongest reason to leave that any rank has.

        Args:
            where: the place of this rank in the loop; '' before a collective.

        Raises:
            PeerError: the ranks vote at different places, and none of them has a reason to leave.
        """
        learn = self.learn
        if learn.shards is not None:
            learn.shards.help()  # other ranks may still evaluate
        self.votes += 1
        where = where or f"a collective in {self.event}"
        if learn._dispatch is not None:
            where += f" ({learn.task})"
        step = self.left_batch and self.left_batch.step
        # Numbers take one collective, where objects take two: their lengths, and then they themselves.
        counters = learn.train_iter, step.number if step else 0
        own = torch.tensor([*self.flags(), *counters, crc32(where.encode())], dtype=torch.float64)
        with distributed.before_collective(None):
            everyone = torch.stack(distributed.all_gather(own, among="votes"))
            *flags, train_iter, number, place = everyone.amax(0).tolist()
            self.some_stay = bool((everyone[:, : len(TOLD)].amax(1) == 0).any())
            # A rank that has left a batch or the training early has not counted it; its counters must not stay behind.
            learn.train_iter = int(train_iter)
            if step:
                step.number = int(number)
            self.obey(flags)
            if (everyone[:, -1] == place).all():
                return
            places = distributed.all_gather(where, among="votes")
            by_rank = ", ".join(f"rank {rank} is at {place}" for rank, place in enumerate(places))
            raise distributed.not_together(f"the ranks have come to different places: {by_rank}")

    @collective
    def _before_collective(self) -> None:
        if self.leaves is not None:
            raise self.leaves
        # A rank that has left an event by a cancel goes straight to the vote after it, so the other ranks must vote
        # here, too. In a training batch, the rank takes part in the collective instead.
        if not (self.learn.training and self.event in INNER_EVENTS):
            self.vote()
            return
        if self.event in ("after_backward", "before_step"):
            self.left_batch.step.come_to_collective(self.event)
        if self.learn.shards is not None:
            self.learn.shards.help()

    # The loop

    @collective
    def run_batch(self, one_batch: Any) -> None:
        """Run a batch; if this rank leaves it early, take part in the collectives that the others still wait for."""
        learn = self.learn
        learn._batch_index = learn.dl.share.place
        if not learn.training:
            dispatch: Any = learn._dispatch  # the dispatch of the run, or of an evaluation inside it
            dispatch.begin()
            with self.keeping():
                one_batch()
            if "after_batch" in dispatch.stopped:
                dispatch.resume("after_batch")  # on one process the event's other callbacks run, too
            if self.pending is not None:
                self.watch.tell("leaving", (self.votes, learn.iter))
            # A slower rank first comes to the same batch, at which it may leave by itself.
            if self.pending is not None or learn.iter >= self.watch.called.get(self.votes, math.inf):
                self.vote()
            return
        if learn.train_iter >= self.alone_from:
            learn._gradient = None
            with distributed.alone():
                one_batch()
            return
        step = self.left_batch.step
        step.begin()
        with self.keeping():
            one_batch()  # a pending reason to leave is reduced with this batch's gradients
        if step.is_open():
            self.left_batch.finish_batch()
        if not step.dispatch.has_passed("after_batch"):
            self._leave_if_all_do(AFTER_BATCH)
        step.dispatch.resume("after_batch")  # the other ranks have run it, and it may contain a collective
        self._leave_if_all_do(NEXT_BATCH)

    @collective
    def _leave_if_all_do(self, point: int) -> None:
        """Leave at once, as one process would, if all ranks have a reason to leave before they reach this point."""
        if self.pending is not None and self.left_batch.step.all_skip(point):
            self.vote()

    @collective
    def end_batches(self) -> None:
        """Vote after the last batch, whose flags no later step may have read."""
        if self.learn.training:
            self.left_batch.step.number += 1
        self.vote("the end of the batches")


class RankDispatch(Dispatch):
    """The dispatch of a run on several ranks: it writes the heartbeat, and votes after each event outside batches.

    Args:
        cbs, fitting: as in `Dispatch`.
        agreement: the agreement of the run.
    """

    def __init__(self, cbs: list[Callback], fitting: bool, agreement: Agreement) -> None:
        self.agreement = agreement
        self.begin()
        super().__init__(cbs, fitting)

    def begin(self) -> None:
        """Begin a batch, of which no event has taken place."""
        self._place = -1  # the index of the last event that has begun
        self.calls = False  # whether a hook of this event runs now
        self.stopped: dict[str, list] = {}  # the event that an error has stopped, with its remaining hooks

    def phase(self, training: bool) -> None:
        """Change to training or to evaluation, and write it to the heartbeat."""
        agreement = self.agreement
        if agreement.event != "before_fit":  # before the first pass over the data it is only the default
            agreement.phase = "training" if training else "evaluation"
            agreement.watch.heartbeat.phase(1 + training)
        super().phase(training)

    def _resolve(self) -> dict[str, list]:
        """Return the table of hooks, each with the place that the heartbeat shows for it."""
        table = super()._resolve()
        for event in Event:
            table[event] = [(cb, hook, f"{event}/{cb!r}".encode()) for cb, hook in table[event]]
            if not table[event] and event not in INNER_EVENTS:  # all ranks vote after it, even without hooks
                table[event] = [(None, self.agreement.watch.check, f"{event}/".encode())]
        return table

    @collective
    def fire(self, event: str) -> None:
        """Call the hooks of an event, and vote after an event outside the batches."""
        if event in INNER_EVENTS:
            try:
                self._call(event, self.table[event])
            except CancelBackwardException:
                # The step follows, for which the other ranks come from the hooks that this rank has skipped.
                if event == "after_backward" and distributed.world_size() > 1:
                    all_skip = self.agreement.left_batch.finish_after_backward()
                    if not (all_skip or self.agreement.learn.step_due):
                        raise CancelBatchException(agreed=True) from None  # as GradientAccumulation does
                raise
            return
        agreement = self.agreement
        if (shards := agreement.learn.shards) is not None:
            shards.free()
        self.stopped.pop(event, None)  # which an earlier epoch may have left
        with agreement.keeping():
            self._call(event, self.table[event])
        try:
            agreement.vote(f"the end of {event}")
        except LEAVING as error:
            # The others have run these hooks, up to their first collective. A sharded model in a hook would wait for
            # them. A cancel in a hook is dropped, as this event has had its vote.
            if agreement.some_stay and shards is None:
                with replaced(agreement, leaves=error, pending=agreement.pending):
                    self.resume(event)
            raise
        shards = agreement.learn.shards
        if event == "before_validate" and shards is not None:
            shards.begin_votes()  # outside the event, which a rank may leave before the others begin

    def has_passed(self, event: str) -> bool:
        """Tell whether an event of this batch has begun."""
        return _PLACES.get(event, -1) <= self._place

    def resume(self, event: str) -> list[CancelException] | None:
        """Run the hooks of an event that are left after the one that stopped it, or fire the event if it has not begun.

        Cancels that concern all ranks are kept for the next vote; those that concern this rank alone are dropped.

        Returns:
            The cancels that were dropped, or `None` if there was nothing to run.
        """
        if self.has_passed(event) and event not in self.stopped:
            return None
        dropped: list[CancelException] = []
        hooks = self.stopped.pop(event, self.table[event])
        while hooks:  # a hook may cancel again
            with self.agreement.keeping():
                try:
                    self._call(event, hooks)
                except (CancelBatchException, CancelBackwardException, CancelStepException) as cancel:
                    dropped.append(cancel)
            hooks = self.stopped.pop(event, [])
        return dropped

    def _call(self, event: str, hooks: list) -> None:
        self._place = max(self._place, _PLACES.get(event, -1))  # a closure repeats earlier events
        self.agreement.event = event
        learn, watch = self.agreement.learn, self.agreement.watch
        rest, self.calls = iter(hooks), True
        for _, hook, place in rest:
            watch.heartbeat.beat(monotonic(), learn.epoch, learn.iter, place)
            if watch.failure is not None:
                watch.check()
            try:
                hook()
            except BaseException as error:
                if not (isinstance(error, CancelBatchException) and ending_of(error).agreed):
                    self.stopped = {event: list(rest)}
                raised_in(error, event, place.decode().partition("/")[2])
                raise
        self.calls = False

    def close(self) -> None:
        """Forget the hooks and the exceptions that they have raised."""
        super().close()
        self.begin()

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        try:
            if not isinstance(error, CancelException | KeyboardInterrupt | None):
                self.agreement.failed(error)
        finally:
            with self.agreement.keeping():  # a cleanup must not communicate: what it raises is kept for the next vote
                super().__exit__(kind, error, traceback)


def strength(error: BaseException | None) -> int:
    """Return the index of an error in `LEAVING`: the lower, the stronger. Without an error it is the largest."""
    return next((i for i, kind in enumerate(LEAVING) if isinstance(error, kind)), len(LEAVING))
