"""A check that all ranks hold the same state, bit by bit, which names the differences and their ranks."""

from collections.abc import Mapping, Sequence
from itertools import chain

from learnerkit import distributed
from learnerkit.arguments import check_count
from learnerkit.callback import Callback
from learnerkit.marks import collective
from learnerkit.run_state import CALLBACK, state_table
from learnerkit.text import first_few


class DriftCheck(Callback):
    """Stops a distributed fit when ranks no longer hold the same state, naming the first difference and its ranks.

    Compared are hyper-parameters (learning rates among them), counters, parameters, buffers, the state of the
    optimizers, and that of callbacks with a `state_dict`, but for what is under its key 'own': bit by bit, as DDP keeps
    them, by a digest of each tensor. It runs after steps, at the end of each epoch's training and before validation.
    Every rank must reach each check. It does nothing on one process, and outside of `distrib_ctx`, where each process
    trains for itself.

    Buffers of norm layers that take their statistics from the rank's own samples (not SyncBatchNorm's) rightly differ
    until DDP sends rank 0's before the next forward pass; they are compared only before validation, where all buffers
    have just been sent. Another module that changes a buffer by its rank's own data is reported.

    Args:
        every: optimizer steps between checks. A check reads the whole state once, waits for the device and exchanges a
            few bytes.

    Raises:
        ValueError: `every` is not a whole number of 1 or more.
        RuntimeError: from a check, on every rank alike: the ranks differ.
    """

    order = 70
    only_fit = True
    _steps = 0

    def __init__(self, *, every: int = 100) -> None:
        check_count("every", every, "a whole number of optimizer steps")
        self.every = every

    def before_fit(self) -> None:
        self._steps = 0

    @collective
    def after_step(self) -> None:
        self._steps += 1
        if self._steps % self.every == 0:
            self._check()

    @collective
    def _check(self) -> None:
        learn = self.learn
        if learn.n_ranks == 1:
            return
        table = state_table(learn)
        # Sorted, because the order of an optimizer's state dict depends on where it was loaded from.
        if distributed.same_everywhere(sorted(table.items())):
            return
        if apart := describe_drift(distributed.all_gather(table)):
            raise RuntimeError(
                f"DriftCheck: ranks differ after step {self._steps} (epoch {learn.epoch}): {apart}. Ranks drift apart "
                "when something changes state on one rank alone, such as a callback or code under `if "
                "distributed.is_main()`: do it on every rank, or give all ranks rank 0's value with "
                "distributed.broadcast (errors.html#drift)"
            )

    after_train = before_validate = _check


def describe_drift(tables: Sequence[Mapping[str, str]]) -> str:
    """Describe the first entry at which the ranks differ, and say how many more there are.

    A callback that only some ranks have is no difference.

    Args:
        tables: the `state_table` of every rank, in rank order.
    """
    everywhere = set.intersection(*({_callback_in(name) for name in table} for table in tables))
    names = [name for name in dict.fromkeys(chain(*tables)) if _callback_in(name) in {None, *everywhere}]
    apart = [name for name in names if len({table.get(name) for table in tables}) > 1]
    if not apart:
        return ""
    first, *others = apart
    values = [table.get(first, "missing") for table in tables]
    ranks = {value: [rank for rank, its in enumerate(values) if its == value] for value in values}
    by_value = [f"{value} on rank{'s' * (len(on) > 1)} {first_few(on, n=8)}" for value, on in ranks.items()]
    more = f" ({first_few(others, n=8)})" if others else ""
    return f"{first} is {first_few(by_value, ' and ', n=8)}; {1 + len(others)} of {len(names)} entries differ{more}"


def _callback_in(name: str) -> str | None:
    return name.split(" ")[1] if name.startswith(CALLBACK) else None
