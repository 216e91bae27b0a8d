"""The trials behind a scaling report: the steps that are run, their order, and the changes that are tried."""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from learnerkit import arguments, distributed, parallel
from learnerkit.callback import running
from learnerkit.callbacks.accumulation import GradientAccumulation
from learnerkit.data.order import refuse_iterator
from learnerkit.marks import collective
from learnerkit.parallel.distributed import member_of
from learnerkit.processes.machine import usable_cores
from learnerkit.scaling.forecast import cost_in_forks, cost_on_ranks, sent_bytes
from learnerkit.scaling.noise import GradientNoiseScale
from learnerkit.scaling.parts import Stopwatch, mean_parts, slowest, waiting
from learnerkit.scaling.report import GAIN, ScalingReport
from learnerkit.scaling.trials import (
    Pace,
    attempt,
    pace,
    pace_alone,
    run_trial,
    training_ranks,
    with_larger_batches,
    with_workers,
)
from learnerkit.state import Learner
from learnerkit.text import first_few
from learnerkit.torch_internals import BatchNorm
from learnerkit.utils import replaced, unwrap


@collective
def scaling_report(
    learn: "Learner", n_steps: int = 20, *, advice: bool = True, forecast: bool = True, seconds: float = 120.0,
    show: bool = True,
) -> ScalingReport:  # fmt: skip
    """Do what `Learner.scaling_report` says.

    Raises:
        RuntimeError: called while something runs.
        ValueError: `n_steps` below 2, or a loader that can be read only once.
    """
    arguments.check_fit(learn, n_epoch=None, n_steps=n_steps, who="scaling_report")
    arguments.check_count("n_steps", n_steps, "a number of steps", least=2)
    arguments.check_positive("seconds", seconds)
    refuse_iterator(learn.dls.train, "training ")
    with training_ranks(learn):
        making = Making(learn, n_steps, seconds)
        report = making.measure_parts()
        making.run_without(report)
        if advice:
            making.try_advice(report)
    if forecast:
        making.measure_cost(report)
    if show and distributed.is_main():
        print(report, flush=True)
    return report


class Making:
    """Runs the trials of a report.

    Args:
        learn: the learner.
        n_steps: the steps of each trial.
        seconds: the time after which no further change is tried.
    """

    def __init__(self, learn: "Learner", n_steps: int, seconds: float) -> None:
        self.learn = learn
        self.n_steps = n_steps
        self.ranks = distributed.world_size()
        self.member = member_of(learn.cbs) if self.ranks > 1 else None
        self.shards = self.member is not None and bool(self.member.shard)
        self.seconds, self._end = seconds, time.monotonic() + seconds

    @collective
    def measure_parts(self) -> ScalingReport:
        """Measure the parts of steps, and the pace of steps that are not divided into parts."""
        learn = self.learn
        steps, walls = self._timed_steps(quiet=False)
        base = pace(learn, self.n_steps)
        slow = slowest(steps)
        if slow is not None:
            # Measure twice: a slowdown that another program caused is unlikely to repeat.
            again = slowest(self._timed_steps()[0])
            slow = slow if again is not None and again[:2] == slow[:2] else None
        means = [mean_parts(each) for each in steps]
        names = dict.fromkeys(name for each in means for name in each)
        waits, communication = waiting(steps)
        left_out = [repr(cb) for cb in learn.cbs if cb.only_fit]
        notes = [f"not timed, as they run in a fit only: {first_few(dict.fromkeys(left_out))}"] if left_out else []
        if self._synchronizes_batch_norm():
            notes.append(
                "with SyncBatchNorm ranks wait for each other in forward and backward: who is slow may be hidden"
            )
        return ScalingReport(
            ranks=self.ranks, device=str(learn.dls.device.type), seconds=base.seconds, samples=base.samples,
            parts={name: [each.get(name, 0.0) for each in means] for name in names},
            walls=walls, slowest=slow, waits=waits,
            communication=communication, gradient_bytes=sent_bytes(learn), notes=notes,
        )  # fmt: skip

    def _synchronizes_batch_norm(self) -> bool:
        if self.member is None:
            return False
        converts = self.member.sync_bn is not False and self.learn.dls.device.type != "cpu"
        kind = BatchNorm if converts else nn.SyncBatchNorm
        return any(isinstance(module, kind) for module in unwrap(self.learn.model).modules())

    @collective
    def _timed_steps(self, quiet: bool = True) -> tuple[list[list[dict[str, float]]], list[float]]:
        "Time the parts of steps; return for each rank the parts of its steps, and the mean seconds of a step."
        watch = Stopwatch(self.learn, self.n_steps)
        run_trial(self.learn, watch, quiet=quiet)
        return distributed.all_gather(watch.parts), distributed.all_gather(sum(watch.seconds) / len(watch.seconds))

    @collective
    def run_without(self, report: ScalingReport) -> None:
        """Time steps without the network, without input, and without both."""
        trials = {"input": {"loader": False}}
        if self.shards:
            report.notes.append("a sharded step cannot be run without the network, so there is no forecast")
        elif self.ranks > 1:
            trials |= {"network": {"network": False}, "both": {"network": False, "loader": False}}
        for name, options in trials.items():
            paces, reason, _ = attempt(partial(pace, self.learn, self.n_steps, **options))
            if reason:
                report.notes.append(f"steps without {name} could not be run: {reason}")
            else:
                report.without[name] = paces[0].seconds
        if self.ranks > 1:
            self.run_alone(report)

    @collective
    def run_alone(self, report: ScalingReport) -> None:
        """Run steps in one process alone: with the threads of a rank, and with all that it could have."""
        if self.learn.shards is not None:
            report.notes.append("steps in one process alone could not be run: the model stays divided among the ranks")
            return
        first, cores = distributed.broadcast((torch.get_num_threads(), usable_cores()))  # every rank must try the same
        more = first == 1 and self.learn.dls.device.type == "cpu"
        for threads in dict.fromkeys([first, cores if more else first]):
            alone = pace_alone(self.learn, self.n_steps, threads)
            if isinstance(alone, str):
                report.notes.append(f"steps in one process alone could not be run: {alone}")
                return
            if report.alone is None or alone.rate > report.alone[1] / report.alone[0]:
                report.alone, report.threads = (alone.seconds, alone.samples), threads

    @collective
    def measure_cost(self, report: ScalingReport) -> None:
        """Measure the cost from which steps on other numbers of ranks are forecast."""
        learn, step = self.learn, Pace(report.seconds, report.samples)
        scales = (cb.value for cb in learn.cbs if isinstance(cb, GradientNoiseScale))
        report.noise = next(filter(math.isfinite, scales), None)
        n = distributed.world_size()
        if self.shards:
            return  # A note says so already.
        if int(os.environ.get("LOCAL_WORLD_SIZE", n)) < n:
            report.notes.append("no forecast: the processes are on several machines, and it is for one")
        elif self.ranks > 1 and "network" in report.without:
            alone = None if report.alone is None else Pace(*report.alone)
            report.cost = cost_on_ranks(learn, step, report.without["network"], alone)
        elif n > 1:
            report.notes.append("no forecast: it needs steps of ranks that train together, without the network too")
        elif learn.dls.device.type != "cpu":
            report.notes.append("no forecast: one process has no all-reduce to measure; make the report on several")
        else:
            try:
                report.cost = cost_in_forks(learn, self.n_steps, step)
            except RuntimeError as error:
                report.notes.append(f"no forecast, as two processes could not be tried: {error}")

    @collective
    def try_advice(self, report: ScalingReport) -> None:
        """Try changes that may help, and note those that help twice, as once may be chance."""
        base = report.rate  # the best rate without a change, which a change must exceed
        for what, change, batches in self._advice(report):
            # Every rank must come to the same end.
            if distributed.broadcast(time.monotonic() > self._end):
                report.notes.append(
                    f"not tried any more after {self.seconds:g} s: {what}, and what would have followed"
                )
                break
            rate, reason = self._changed_rate(change, batches)
            if reason:
                report.notes.append(f"{what} could not be tried: {reason}")
                continue
            report.tried.append(what)
            if rate > (1 + GAIN) * base:
                base = max(base, pace(self.learn, self.n_steps).rate)
                again, _ = self._changed_rate(change, batches)
                gain = min(rate, again) / base - 1
                if gain > GAIN:
                    report.helps.append((what, gain))
        report.helps.sort(key=lambda each: -each[1])

    @collective
    def _changed_rate(self, change: Callable[[], AbstractContextManager], batches: int) -> tuple[float, str]:
        """Return the rate with a change; or 0, and why the change could not be tried."""

        def run() -> Pace:
            with change():
                return pace(self.learn, max(2, self.n_steps // batches))

        paces, reason, _ = attempt(run)
        return (0.0, reason) if reason else (paces[0].rate, "")

    def _advice(self, report: ScalingReport) -> Iterator[tuple[str, Callable, int]]:
        """Yield changes to try as (name, change, batches of a step); `change()` returns a context with the change."""
        dls = self.learn.dls

        def training_on(dl: Any) -> Callable:
            return partial(replaced, dls, loaders=[dl, *dls.loaders[1:]])

        # All ranks have the same report, so they try the same.
        saves = {name: 1 - seconds / report.seconds for name, seconds in report.without.items()}
        if saves.get("input", 0.0) > GAIN:
            cores = max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
            for n in (2, 4, 8):
                new = n != getattr(dls.train, "num_workers", n) and n <= max(2, cores)
                if new and (dl := with_workers(dls.train, n)) is not None:
                    yield f"num_workers={n}", training_on(dl), 1
        member = self.member
        if member is not None and self.shards:
            if member.reshard_after_forward and self.learn.shards is None:
                yield "reshard_after_forward=False", partial(replaced, member, reshard_after_forward=False), 1
        elif member is not None and saves.get("network", 0.0) > GAIN:
            yield from self._network_advice(member)
        if (dl := with_larger_batches(dls.train)) is not None:
            yield f"batches of {dl.batch_size}", training_on(dl), 1

    def _network_advice(self, member: parallel.DistributedCallback) -> Iterator[tuple[str, Callable, int]]:
        learn = self.learn
        gradient_bytes = sum(p.nbytes for p in unwrap(learn.model).parameters() if p.requires_grad)
        if not running(learn.cbs, GradientAccumulation):
            for n in (2, 4):
                added = partial(learn.added_cbs, GradientAccumulation(n_batches=n))
                yield f"GradientAccumulation(n_batches={n})", added, n
        if member.comm_hook is None:
            yield "comm_hook='bf16'", partial(replaced, member, comm_hook="bf16"), 1
        for size in (5, 100):
            if "bucket_cap_mb" not in member.ddp_kwargs and gradient_bytes > min(size, 25) * 2**20:
                options = {**member.ddp_kwargs, "bucket_cap_mb": size}
                yield f"bucket_cap_mb={size}", partial(replaced, member, ddp_kwargs=options), 1
