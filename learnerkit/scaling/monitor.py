"""A scaling report during training: how fast all ranks are, how much they wait, and which is the slowest."""

from functools import partial
from time import perf_counter
from typing import Any

import torch

from learnerkit import arguments, distributed
from learnerkit.callback import Callback
from learnerkit.data.iterable import LoaderView
from learnerkit.marks import collective
from learnerkit.scaling.parts import call_when_ready, watched


class ScalingMonitor(Callback):
    """Logs samples per second, the share of waiting and the slowest rank, as columns of the table.

    `waiting` is the share of an epoch's steps in which a rank waits for input or for the gradients of others, as a mean
    over the ranks; `slowest_rank` the one that is busy the longest before its gradients are ready: where few wait, that
    is chance. Use `learn.scaling_report()` to find the cause. It never waits for the device: on an accelerator waiting
    for input is the host's. The time that other callbacks take in the epoch counts, too, with that of the validations
    of `ValidateEvery`.

    Args:
        every: steps between the exchanges of these numbers among the ranks.

    Raises:
        ValueError: `every` below 1.
    """

    order = 13
    only_fit = True
    run_valid = False
    logs = ("samples_per_second", "waiting", "slowest_rank")

    def __init__(self, every: int = 50) -> None:
        arguments.check_count("every", every, "a number of steps")
        self.every = every
        self._asked = 0.0
        self._ready: Any = None
        self._busy = torch.zeros(1, dtype=torch.float64)
        self._clear()

    def before_train(self) -> None:
        learn = self.learn
        learn.dl = LoaderView(learn.dl, partial(watched, before=self._ask, after=self._get))
        self._busy = torch.zeros(learn.n_ranks, dtype=torch.float64)
        self._clear()

    def before_backward(self) -> None:
        self._ready = None
        call_when_ready(self.learn, self._note_ready)

    def _note_ready(self) -> None:
        self._ready = self._stamp()

    def _stamp(self) -> Any:
        "Return the time on the host, or an event on the device, whose time is read later."
        device = self.learn.dls.device
        if device.type == "cpu":
            return perf_counter()
        event = torch.Event(device=device, enable_timing=True)
        event.record(torch.accelerator.current_stream(device))
        return event

    def after_backward(self) -> None:
        if self._ready is not None:
            self._pairs.append((self._ready, self._stamp()))
            self._ready = None

    @collective
    def after_batch(self) -> None:
        learn = self.learn
        self._samples += learn.batch_size
        self._steps += learn.step_due
        if self._steps >= self.every:
            self._exchange()

    @collective
    def after_train(self) -> None:
        if self._steps:
            self._exchange()
        self.learn.log_metric("slowest_rank", float(self._busy.argmax()))

    @collective
    def _exchange(self) -> None:
        """Log what all ranks have measured."""
        seconds = perf_counter() - self._since
        exposed = 0.0
        for start, end in self._pairs:
            if isinstance(end, float):
                exposed += end - start
            elif end.query():  # The host does not wait for events that are not over.
                exposed += start.elapsed_time(end) / 1e3
        rank = distributed.rank() if self.learn.n_ranks > 1 else 0
        sums = torch.zeros(len(self._busy) + 3, dtype=torch.float64)
        sums[rank] = seconds - exposed
        sums[-3:] = torch.tensor([self._samples, seconds, self._input + exposed])
        if self.learn.n_ranks > 1:
            sums = distributed.reduce(sums, among="votes")
        self._busy += sums[:-3]
        samples, total, waited = sums[-3:].tolist()
        if hasattr(self.learn, "recorder"):
            # The seconds are the weight, so that the row has the samples of the epoch by its seconds.
            log = self.learn.recorder.log_metric
            log("samples_per_second", samples / (total / len(self._busy)), total)
            log("waiting", waited / total, total)
        self._clear()

    def _clear(self) -> None:
        self._since = perf_counter()
        self._input = 0.0
        self._samples = self._steps = 0
        self._pairs: list[tuple[Any, Any]] = []

    def _ask(self) -> None:
        self._asked = perf_counter()

    def _get(self) -> None:
        self._input += perf_counter() - self._asked
