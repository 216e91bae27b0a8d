"""A check that all ranks hold the same state, bit by bit, which names what differs and on which ranks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from learnerkit import optim, world
from learnerkit.callback import Callback
from learnerkit.text import first_few
from learnerkit.torch_internals import StatisticsNorm
from learnerkit.utils import describe, digests, unwrap

if TYPE_CHECKING:
    from learnerkit.learner import Learner

_WEIGHTS = 2**16
_COUNTERS = ("epoch", "iter", "train_iter")


class DriftCheck(Callback):
    """Stops a distributed fit when ranks no longer hold the same state, naming the first difference and its ranks.

    Compared are hyper-parameters (learning rates among them), counters, parameters, buffers and optimizer state: bit
    by bit, as DDP keeps them, by a digest of each tensor. It runs after steps, at the end of each epoch's training and
    before validation. Every rank must reach each check. It does nothing on one process, and outside of `distrib_ctx`,
    where each process trains for itself.

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

    def __init__(self, *, every: int = 100) -> None:
        super().__init__()
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"DriftCheck got every={every!r}; it is a whole number of optimizer steps, 1 or more")
        self.every = every
        self._steps = 0

    def before_fit(self) -> None:
        self._steps = 0

    def after_step(self) -> None:
        self._steps += 1
        if self._steps % self.every == 0:
            self._check(training=True)

    def after_train(self) -> None:
        self._check(training=True)

    def before_validate(self) -> None:
        self._check(training=False)

    def _check(self, training: bool) -> None:
        learn = self.learn
        if not learn._sharded:
            return
        table = state_table(learn, training)
        # Without an order, which a dict of optimizer state may owe to where it was loaded from.
        if not world.same_everywhere(sorted(table.items())):
            raise RuntimeError(
                f"DriftCheck: ranks differ after step {self._steps} (epoch {learn.epoch}): "
                f"{describe_drift(world.all_gather(table))}. Ranks drift apart when something changes state on one "
                "rank alone, such as a callback or code under `if world.is_main()`: do it on every rank, or give all "
                "ranks rank 0's value with world.broadcast"
                " (errors.html#drift)"
            )


def state_table(learn: "Learner", training: bool) -> dict[str, str]:
    """Return what must be the same on all ranks: digests of tensors and the `repr` of anything else, by name.

    A host-device sync.

    Args:
        learn: whose state.
        training: leave out the buffers that may differ between two forward passes.
    """
    # Rates and counters first: where they differ, they are the cause of what differs in the weights.
    found = dict(_hyper_parameters(learn))
    found |= {f"counter {name}": getattr(learn, name) for name in _COUNTERS}
    model = unwrap(learn.model)
    found |= {f"parameter {name}": p for name, p in model.named_parameters()}
    apart = _rank_statistics(model) if training else set()
    found |= {f"buffer {name}": b for name, b in model.named_buffers() if id(b) not in apart}
    found |= dict(_optimizer_state(learn, model))
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    marks = dict(zip(tensors, digests(tensors.values()), strict=True))
    return {
        name: f"{describe(value)} with digest {marks[name]:016x}" if name in marks else repr(value)
        for name, value in found.items()
    }


def _rank_statistics(model: nn.Module) -> set[int]:
    norms = [m for m in model.modules() if isinstance(m, StatisticsNorm) and not isinstance(m, nn.SyncBatchNorm)]
    return {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}


def _named_opts(learn: "Learner") -> list[tuple[str, torch.optim.Optimizer]]:
    if isinstance(learn.opt, dict):
        return [(f"optimizer {name!r}", opt) for name, opt in learn.opt.items()]
    return [("optimizer", opt) for opt in learn.opts]


def _hyper_parameters(learn: "Learner") -> Iterator[tuple[str, Any]]:
    for whose, opt in _named_opts(learn):
        of = f" of {whose}" if len(learn.opts) > 1 else ""
        for i, group in enumerate(opt.param_groups):
            options = {k: v for k, v in group.items() if k not in ("params", optim.GROUP, optim.COUNT, optim.PLACES)}
            for key, value in options.items():
                for name, leaf in _leaves("learning rate" if key == "lr" else key, value):
                    yield f"{name} of group {i}{of}", leaf


def _optimizer_state(learn: "Learner", model: nn.Module) -> Iterator[tuple[str, Any]]:
    names = {id(p): name for name, p in model.named_parameters()}
    for whose, opt in _named_opts(learn):
        for i, group in enumerate(opt.param_groups):
            for place, p in enumerate(group["params"]):
                for name, leaf in _leaves("", opt.state.get(p, {})):
                    yield f"{whose} {name} of {names.get(id(p), f'parameter {place} of group {i}')}", leaf


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The tensors and plain values inside nested containers; objects, whose `repr` may be an address, are left out."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _leaves(f"{name}[{i}]", inner)
    elif isinstance(value, Tensor | int | float | complex | str | None):
        yield name, value


def describe_drift(tables: Sequence[Mapping[str, str]]) -> str:
    """Describe the first entry at which the ranks differ, and say how many more there are.

    Args:
        tables: the `state_table` of every rank, in rank order; not all the same.
    """
    names = dict.fromkeys(name for table in tables for name in table)
    first, *others = [name for name in names if len({table.get(name) for table in tables}) > 1]
    ranks: dict[str, list[int]] = {}
    for rank, table in enumerate(tables):
        ranks.setdefault(table.get(first, "missing"), []).append(rank)
    found = [f"{value} on rank{'s' * (len(on) > 1)} {first_few(on, n=8)}" for value, on in ranks.items()]
    more = f" ({first_few(others, n=8)})" if others else ""
    return f"{first} is {first_few(found, ' and ', n=8)}; {1 + len(others)} of {len(names)} entries differ{more}"
