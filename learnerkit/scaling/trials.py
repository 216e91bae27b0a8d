"""Steps that are run for a report and leave no trace: as they are, without something that costs time, or alone."""

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from learnerkit import distributed
from learnerkit.callback import Callback
from learnerkit.callbacks.debugging import OverfitBatch
from learnerkit.callbacks.training import StepBudget
from learnerkit.data.batches import loader_len
from learnerkit.data.iterable import LoaderView
from learnerkit.data.order import has_index, with_batches
from learnerkit.data.rows import IndexBatches
from learnerkit.events import CancelEpochException
from learnerkit.marks import collective
from learnerkit.parallel.distributed import DistributedCallback, member_of, warn_outside_context
from learnerkit.scaling.parts import REDUCE, Clock, Stopwatch
from learnerkit.state import Learner
from learnerkit.text import in_one_line
from learnerkit.utils import replaced

_T = TypeVar("_T")


class Pace(NamedTuple):
    """The speed of the steps of a trial.

    Attributes:
        seconds: the mean seconds of a step on the slowest rank.
        samples: the mean samples of a step on all ranks together.
    """

    seconds: float
    samples: float

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds


class TrialSteps(StepBudget):
    """Ends a trial after its steps, without validation."""

    def after_train(self) -> None:
        super().after_train()
        raise CancelEpochException


@collective
def training_ranks(learn: "Learner") -> AbstractContextManager:
    """Return a context for trials: of all ranks if they train together, else of this process alone, with a warning."""
    warn_outside_context(learn)
    return distributed.alone() if distributed.world_size() == 1 or member_of(learn.cbs) is None else nullcontext()


@collective
def run_trial(learn: "Learner", clock: Clock, *, network: bool = True, loader: bool = True, quiet: bool = True) -> None:
    """Take steps of training, and put everything back.

    Callbacks that are `only_fit` take no part, as they record, log and save.

    Args:
        learn: the learner.
        clock: notes the steps.
        network: whether gradients and buffers travel between ranks; if not, each rank trains by itself from its second
            batch on.
        loader: whether batches are read; if not, the first is repeated.
        quiet: give no warnings.
    """
    cbs = [TrialSteps(clock.due), *([] if loader else [_SameBatch()]), *clock.callbacks()]
    with ExitStack() as stack:
        train = stack.enter_context(trying(learn, "scaling", cbs, quiet))
        if isinstance(clock, Stopwatch):
            stack.callback(clock.watch_hooks())
            stack.enter_context(distributed.around_collectives(partial(clock.within, REDUCE)))
        if not network and (agreement := learn._agreement) is not None:
            agreement.alone_from = 1  # In the first batch the ranks learn about the model together.
        train(n_steps=clock.due)
    if not clock.seconds:
        raise ValueError(
            "no step could be timed, as the first of each epoch is left out with the start of the loader: an epoch "
            "must have 2 steps or more; if it has, callbacks cancel batches: give a larger n_steps, or leave them out"
        )


@contextmanager
@collective
def trying(learn: "Learner", task: str, cbs: list[Callback], quiet: bool = True) -> Iterator[Callable[..., None]]:
    """Yield a function that trains for some steps, without a bar; restore everything at the end.

    Args:
        learn: the learner.
        task: the learner's task meanwhile.
        cbs: callbacks for the trial alone.
        quiet: give no warnings.
    """
    with ExitStack() as stack:
        if quiet:
            stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(learn.no_bar())
        stack.enter_context(replaced(learn.dls, _said=True))  # The loader views of trials do not tell sizes.
        yield stack.enter_context(learn._trying(task, cbs))


@collective
def pace(learn: "Learner", n_steps: int, **kwargs: Any) -> Pace:
    """Run a trial, and return the pace of all ranks."""
    clock = Clock(learn, n_steps)
    run_trial(learn, clock, **kwargs)
    ranks = distributed.all_gather((sum(clock.seconds), sum(clock.samples), len(clock.seconds)))
    return Pace(max(s / n for s, _, n in ranks), sum(samples / n for _, samples, n in ranks))


@collective
def pace_alone(learn: "Learner", n_steps: int, threads: int) -> Pace | str:
    """Run a trial in rank 0's process alone, without DDP; the others wait.

    Args:
        learn: the learner.
        n_steps: to time.
        threads: of the trial.

    Returns:
        The pace; or, on every rank, the reason why the trial could not be run.
    """
    key = f"scaling/{distributed.count_call('scaling')}"
    if not distributed.is_main():
        result = json.loads(distributed.hear(key, 600.0))
        return result if isinstance(result, str) else Pace(*result)
    answer: Any = "rank 0 was interrupted"
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with distributed.alone(), learn.removed_cbs(DistributedCallback):
            first = Clock(learn, 1)
            with distributed.no_collectives("a step in one process"):  # The others take no step.
                run_trial(learn, first)
            answer = pace(learn, n_steps)
    except Exception as error:
        answer = in_one_line(error)
    finally:
        torch.set_num_threads(before)
        distributed.tell(key, json.dumps(answer))
    return answer


@collective
def attempt(run: Callable[[], _T]) -> tuple[list[_T], str, Exception | None]:
    """Return the results of all ranks, the rank that has failed and why ('' if none has), and this rank's error."""
    result: Any = None
    error: Exception | None = None
    try:
        result = run()
    except Exception as e:
        error = e
    failed = "" if error is None else f"rank {distributed.rank()} failed: {in_one_line(error)}"
    everyone = distributed.all_gather((result, failed))
    return [each for each, _ in everyone], next((failed for _, failed in everyone if failed), ""), error


class _SameBatch(OverfitBatch):
    """Repeats the first batch, from the device's memory; without end if the loader has no length."""

    only_fit = False

    def before_train(self) -> None:
        if loader_len(self.learn.dl) is None:
            self.learn.dl = LoaderView(self.learn.dl, lambda dl: cycle(islice(dl, 1)))  # The trial ends it.
        super().before_train()


# Other loaders


def with_workers(dl: Any, workers: int) -> Any:
    """Return a copy of a loader with this many workers; `None` if that cannot help."""
    if not isinstance(dl, DataLoader) or getattr(dl, "reads_rows", False):
        return None
    if isinstance(dl.dataset, IterableDataset) and dl.num_workers < 2:
        return None  # Each worker might read all samples.
    return with_batches(dl, num_workers=workers, prefetch_factor=dl.prefetch_factor or 2, persistent_workers=False)


def with_larger_batches(dl: Any) -> Any:
    """Return a loader with batches twice as large; `None` if its batches are not known to be plain."""
    batches: Any = getattr(dl, "batch_sampler", None)
    if not (has_index(dl) and type(batches) in (BatchSampler, IndexBatches)):
        return None
    size = 2 * batches.batch_size
    made = type(batches)(batches.sampler, size, batches.drop_last)
    return with_batches(dl, batch_sampler=made, batch_size=size)
