"""A check that all ranks hold the same state, bit by bit, which names what differs and on which ranks."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from learnerkit import optim, run_state, world
from learnerkit.arguments import check_count
from learnerkit.callback import Callback, is_ours
from learnerkit.text import first_few
from learnerkit.torch_internals import StatisticsNorm
from learnerkit.utils import describe, digests, unwrap

if TYPE_CHECKING:
    from learnerkit.learner import Learner


class DriftCheck(Callback):
    """Stops a distributed fit when ranks no longer hold the same state, naming the first difference and its ranks.

    Compared are hyper-parameters (learning rates among them), counters, parameters, buffers, the state of the
    optimizers, and that of callbacks with a `state_dict`, but for what is under its key 'own': bit by bit, as DDP keeps
    them, by a digest of each tensor. It runs after steps, at the end of each epoch's training and
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
    _steps = 0

    def __init__(self, *, every: int = 100) -> None:
        super().__init__()
        check_count("every", every, "a whole number of optimizer steps")
        self.every = every

    def before_fit(self) -> None:
        self._steps = 0

    def after_step(self) -> None:
        self._steps += 1
        if self._steps % self.every == 0:
            self._check()

    def _check(self) -> None:
        learn = self.learn
        if learn.n_ranks == 1:
            return
        table = state_table(learn)
        # Without an order, which a dict of optimizer state may owe to where it was loaded from.
        if world.same_everywhere(sorted(table.items())):
            return
        if apart := describe_drift(world.all_gather(table)):
            raise RuntimeError(
                f"DriftCheck: ranks differ after step {self._steps} (epoch {learn.epoch}): {apart}. Ranks drift apart "
                "when something changes state on one rank alone, such as a callback or code under `if "
                "world.is_main()`: do it on every rank, or give all ranks rank 0's value with world.broadcast"
                " (errors.html#drift)"
            )

    after_train = before_validate = _check


def state_table(learn: "Learner") -> dict[str, str]:
    """Return what must be the same on all ranks: digests of tensors and the `repr` of anything else, by name.

    In training it leaves out the buffers that may differ between two forward passes. A host-device sync.
    """
    model = unwrap(learn.model)
    names = {id(p): name for name, p in model.named_parameters()}
    rates, states, beside = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    opts = [f"optimizer {key!r}" for key in learn.opt] if isinstance(learn.opt, dict) else ["optimizer"]
    for whose, opt in zip(opts, learn.opts, strict=False):  # there may be none
        of = f" of {whose}" if len(opts) > 1 else ""
        saved, owners = dict(opt.state_dict()), dict[Any, str]()
        for i, (group, own) in enumerate(zip(saved.pop("param_groups"), opt.param_groups, strict=True)):
            options = {"learning rate" if k == "lr" else k: v for k, v in group.items() if k not in _NO_OPTIONS}
            rates |= {f"{name} of group {i}{of}": leaf for name, leaf in _leaves(options)}
            for place, (number, p) in enumerate(zip(group["params"], own["params"], strict=True)):
                owners[number] = names.get(id(p)) or f"parameter {place} of group {i}"
                if id(p) not in names:
                    beside[owners[number] + of] = p
        for number, state in saved.pop("state").items():
            states |= {f"{whose} {name} of {owners.get(number, number)}": leaf for name, leaf in _leaves(state)}
        states |= {f"{whose} {name}": leaf for name, leaf in _leaves(saved)}  # what one around another has
    for key, cb in run_state.taking_part(learn):
        method = type(cb).state_dict
        # Recorders, trackers and loggers of this library have a clock and the like in theirs.
        if method is not Callback.state_dict and not cb.rank0_only and not (cb.only_fit and is_ours(method)):
            state = {name: value for name, value in run_state.state_of(cb).items() if name != "own"}
            states |= {f"{_CALLBACK}{key} {name}": leaf for name, leaf in _leaves(state)}
    norms = [m for m in model.modules() if isinstance(m, StatisticsNorm) and not isinstance(m, nn.SyncBatchNorm)]
    apart = {id(buffer) for norm in norms if learn.training for buffer in norm.buffers(recurse=False)}
    # Rates and counters first: where they differ, they are the cause of what differs in the weights.
    found = rates | {f"counter {name}": getattr(learn, name) for name in ("epoch", "iter", "train_iter")}
    found |= {f"parameter {name}": p for name, p in model.named_parameters()} | beside
    found |= {f"buffer {name}": b for name, b in model.named_buffers() if id(b) not in apart}
    found |= states
    marks = iter(digests(value for value in found.values() if isinstance(value, Tensor)))
    return {
        name: f"{describe(value)} with digest {next(marks):016x}" if isinstance(value, Tensor) else repr(value)
        for name, value in found.items()
    }


_NO_OPTIONS = ("params", optim.GROUP, optim.COUNT, optim.WHOLE, optim.PLACES, optim.OPTIONS)
_CALLBACK = "callback "


def _leaves(named: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors and plain values inside nested containers; objects, whose `repr` may be an address, are left out."""
    for name, value in named.items():
        if isinstance(value, Mapping):
            yield from _leaves({f"{name}.{key}": inner for key, inner in value.items()})
        elif isinstance(value, list | tuple):
            yield from _leaves({f"{name}[{i}]": inner for i, inner in enumerate(value)})
        elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
            yield str(name), torch.as_tensor(value)
        elif isinstance(value, Tensor | int | float | complex | str | None):
            yield str(name), value


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
    found = [f"{value} on rank{'s' * (len(on) > 1)} {first_few(on, n=8)}" for value, on in ranks.items()]
    more = f" ({first_few(others, n=8)})" if others else ""
    return f"{first} is {first_few(found, ' and ', n=8)}; {1 + len(others)} of {len(names)} entries differ{more}"


def _callback_in(name: str) -> str | None:
    return name.split(" ")[1] if name.startswith(_CALLBACK) else None
