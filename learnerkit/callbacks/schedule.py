"""Schedules of hyper-parameters: functions of the share of training done, from 0 to 1, counted in optimizer steps."""

import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from inspect import signature
from itertools import accumulate, chain
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau as TorchPlateau

from learnerkit import arguments, distributed, optim
from learnerkit.callback import Callback, running
from learnerkit.callbacks.recorder import check_monitor, monitored
from learnerkit.run_state import filled
from learnerkit.state import State
from learnerkit.text import did_you_mean, first_few
from learnerkit.torch_internals import OF_SCHEDULERS
from learnerkit.utils import accepts, listify, restorer

Schedule = Callable[[float], float]
"""A hyper-parameter as a function of the share of training done, from 0 to 1."""


class SchedNo:
    """A constant schedule of the value `start`, and the base of the others.

    Raises:
        TypeError: a value that is not a single number.
    """

    def __init__(self, start: float, end: float) -> None:
        for value in (start, end):
            if not isinstance(value, Real) and getattr(value, "ndim", None) != 0:
                raise TypeError(
                    f"got {type(self).__name__}({start!r}, {end!r}); a schedule goes from one number to another. For "
                    "parameter groups give a list with a schedule for each, such as "
                    "{'lr': [combined_cos(0.25, lr / 25, lr, lr / 1e5) for lr in rates]}"
                )
        self.start, self.end = start, end

    def __call__(self, position: float) -> float:
        return self.start

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, vars(self).values()))})"


class SchedLin(SchedNo):
    """A schedule along a straight line, from `start` at 0 to `end` at 1."""

    def __call__(self, position: float) -> float:
        return self.start + position * (self.end - self.start)


class SchedCos(SchedNo):
    """A schedule along half a cosine, from `start` at 0 to `end` at 1, flat at both ends.

    Loshchilov and Hutter, https://arxiv.org/abs/1608.03983.
    """

    def __call__(self, position: float) -> float:
        return self.start + (1 + math.cos(math.pi * (1 - position))) * (self.end - self.start) / 2


class SchedExp(SchedNo):
    """An exponential schedule, from `start` at 0 to `end` at 1.

    Raises:
        ValueError: one of them is 0, or they differ in sign.
    """

    def __init__(self, start: float, end: float) -> None:
        super().__init__(start, end)
        if not start * end > 0:
            raise ValueError(f"got SchedExp({start}, {end}); both must be above 0, or both below")

    def __call__(self, position: float) -> float:
        return self.start * (self.end / self.start) ** position


class SchedPoly(SchedNo):
    """A schedule along a power of the share of training done, from `start` at 0 to `end` at 1.

    Args:
        power: 1 is a straight line; a higher power starts slower, a lower one faster.
    """

    def __init__(self, start: float, end: float, power: float) -> None:
        super().__init__(start, end)
        self.power = power

    def __call__(self, position: float) -> float:
        return self.start + (self.end - self.start) * position**self.power


def combine_scheds(pcts: Sequence[float], scheds: Sequence[Schedule]) -> Schedule:
    """Run several schedules one after the other.

    Args:
        pcts: the share of training for each schedule; their sum is 1.
        scheds: the schedules; each runs from 0 to 1 in its share.

    Raises:
        ValueError: shares that are negative or do not sum to 1, or not one share for each schedule.
    """
    pcts, scheds = list(map(float, pcts)), listify(scheds)
    if len(pcts) != len(scheds) or not pcts:
        raise ValueError(f"got {len(pcts)} shares for {len(scheds)} schedules; give one share for each")
    if min(pcts) < 0 or abs(sum(pcts) - 1) > 1e-6:
        raise ValueError(f"got the shares {pcts}, whose sum is {sum(pcts)}; each is 0 or more, and their sum is 1")
    bounds = list(accumulate(pcts, initial=0.0))
    last = max(i for i, pct in enumerate(pcts) if pct > 0)
    bounds[last + 1 :] = [1.0] * (len(bounds) - last - 1)  # exactly 1, without the sum's rounding error

    def schedule(position: float) -> float:
        # At a bound the next schedule starts, even if rounding has put the bound slightly above the position.
        i = min(bisect_right(bounds, position + 1e-9) - 1, last)
        start, end = bounds[i : i + 2]
        return scheds[i](max(0.0, (position - start) / (end - start)))

    return schedule


def combined_cos(pct: float, start: float, middle: float, end: float) -> Schedule:
    """Return a schedule along two half cosines: from `start` to `middle` until `pct`, then to `end`.

    Args:
        pct: share of training at which `middle` is reached, between 0 and 1.
        start, middle, end: the values at 0, at `pct` and at 1.

    Raises:
        ValueError: `pct` outside 0 to 1.
    """
    return _in_two_parts(pct, SchedCos(start, middle), SchedCos(middle, end))


def linear_warmup(pct: float, then: Schedule | float | optim.Later, start: float = 0.0) -> Any:
    """Return a schedule with a linear warm-up before another schedule (Goyal et al., https://arxiv.org/abs/1706.02677).

    `learn.fit(5, linear_warmup(0.1, scaled_lr(0.1, at=64)))` trains with it.

    Args:
        pct: share of training for the warm-up, between 0 and 1.
        then: the schedule, or the constant, for the rest of training; the warm-up ends at its first value. With
            `scaled_lr(...)` it is made when the fit begins.
        start: the value at 0.

    Raises:
        ValueError: `pct` outside 0 to 1.
    """
    if isinstance(then, optim.Later):
        return then.into(partial(_warmed_up, pct, start))
    return _warmed_up(pct, start, then)


def _warmed_up(pct: float, start: float, then: Schedule | float) -> Schedule:
    rest = then if callable(then) else SchedNo(then, then)
    return _in_two_parts(pct, SchedLin(start, rest(0.0)), rest)


def _in_two_parts(pct: float, first: Schedule, second: Schedule) -> Schedule:
    arguments.check_number("pct", pct, lambda share: 0 <= share <= 1, "a share of training, between 0 and 1")
    return combine_scheds([pct, 1 - pct], [first, second])


class ParamScheduler(Callback):
    """Sets hyper-parameters before every training batch; at the end of the fit they get their old values back.

    `recorder.hps` has the values at every batch; of several groups, the last one's. Parameters without weight decay,
    such as norms and biases, stay without. One schedule of the weight decay, or of the momentum, leaves the groups for
    which the splitter gives a value.

    Args:
        scheds: for each hyper-parameter ('lr', 'momentum', 'weight_decay') a schedule, or a list with one for each of
            the splitter's groups. If groups were made with different rates, they keep their ratio under one schedule of
            'lr', which has the values that one rate of `Learner.fit` would have. With several optimizers it may be a
            dict of these by the optimizer's name; optimizers that are not in it keep their values.

    Raises:
        ValueError: in `before_fit`, no such hyper-parameter, a list of the wrong length, or another callback that has
            a schedule of the same one.
    """

    order = 60
    run_valid = False
    only_fit = True

    def __init__(self, scheds: Mapping[str, Schedule | Sequence[Schedule] | Mapping[Any, Any]]) -> None:
        if not isinstance(scheds, Mapping):
            raise TypeError(f"got {scheds!r}; it is a dict by hyper-parameter, such as {{'lr': SchedCos(1e-3, 0)}}")
        self.scheds = {name: optim.listed(sched) for name, sched in scheds.items()}
        self.hps: dict[str, list[float]] = {}
        self._by_opt: list[dict[str, Any]] = []
        self._before: list[list[dict[str, Any]]] = []
        self._kept: list[dict[str, set[tuple]]] = []

    def before_fit(self) -> None:
        learn = self.learn
        if learn.n_steps is None:
            arguments.check_length(learn.dls.train, "a schedule")
        by_name = {name: optim.for_each(learn.opt, sched) for name, sched in self.scheds.items()}
        if "lr" in by_name:
            by_name["lr"] = optim.settled(learn, by_name["lr"])
        self._by_opt = [
            {name: scheds[i] for name, scheds in by_name.items() if scheds[i] is not None}
            for i in range(len(learn.opts))
        ]
        for other in (cb for cb in learn.cbs if isinstance(cb, ParamScheduler) and cb._before):
            for mine, theirs in zip(self._by_opt, other._by_opt, strict=True):
                if twice := sorted(mine.keys() & theirs.keys()):
                    raise ValueError(
                        f"two schedules of {first_few(twice)} in one fit, and the later one would replace the other's "
                        "values before every batch: leave one of them out, or join them by combine_scheds"
                    )
        bare, self._kept = set() if learn.wd_bn_bias else optim.without_decay(learn.model), []
        for opt, scheds in zip(learn.opts, self._by_opt, strict=True):
            for name, sched in scheds.items():
                _check_schedule(name, sched, opt)
            self._kept.append({name: optim.keeping(opt, name, bare, callable(sched)) for name, sched in scheds.items()})
            if callable(sched := scheds.get("lr")) and {*(shares := optim.shares(opt))} != {1.0}:
                scheds["lr"] = [partial(_share_of, sched, share) for share in shares]
        self._before = [optim.get_hypers(opt, scheds) for opt, scheds in zip(learn.opts, self._by_opt, strict=True)]
        self.hps = {name: [] for name in self.scheds}
        if hasattr(learn, "recorder"):
            learn.recorder.hps |= self.hps  # it may have those of another ParamScheduler already

    def before_batch(self) -> None:
        position, last = self.learn.pct_train, dict[str, float]()
        for opt, scheds, kept, before in zip(self.learn.opts, self._by_opt, self._kept, self._before, strict=True):
            if len(before) < len(opt.param_groups):  # a callback has added some
                before += optim.get_hypers(opt, scheds)[len(before) :]
            for name, sched in scheds.items():
                values = [float(s(position)) for s in ([sched] if callable(sched) else sched)]
                optim.set_hyper(opt, name, values[0] if callable(sched) else values, kept[name])
                last[name] = values[-1]
        for name, value in last.items():
            self.hps[name].append(value)

    def state_dict(self) -> State:
        """Return the values at every batch so far, and those that hyper-parameters get back at the end."""
        before = [[dict(values) for values in groups] for groups in self._before]
        return {"hps": {name: list(values) for name, values in self.hps.items()}, "before": before}

    def load_state_dict(self, state: State) -> None:
        """Restore the values: those at every batch in the lists that the recorder shares."""
        for name, values in state["hps"].items():
            if name in self.hps:
                self.hps[name][:] = values
        # The optimizer may have been loaded before `before_fit`, with the values of the middle of a schedule.
        for mine, before in zip(chain(*self._before), chain(*state.get("before", ())), strict=False):
            mine.update({key: filled(mine[key], value) for key, value in before.items() if key in mine})

    def cleanup_fit(self) -> None:
        for opt, before in zip(self.learn.opts, self._before, strict=False):
            # Groups are matched by position, since a load may have replaced them by other dicts.
            for group, values in zip(opt.param_groups, before, strict=False):
                group.update(values)
        self._before = []


def _share_of(sched: Schedule, share: float, position: float) -> float:
    return share * float(sched(position))


def _check_schedule(name: str, sched: Any, opt: Optimizer) -> None:
    if callable(sched):
        return
    if not isinstance(sched, list) or not all(map(callable, sched)):
        raise TypeError(f"got {sched!r} for {name!r}; it is a schedule, f(share of training done) -> value, or a list")
    if len(sched) != (count := optim.n_groups(opt)):
        raise ValueError(
            f"got {len(sched)} schedules of {name!r} for {count} parameter groups ({optim.whose_groups(opt)})"
        )


def check_nobody_schedules(learn: Any, who: str) -> None:
    """Refuse the callback `who`, which changes learning rates, if a schedule sets them before every batch anyway.

    Raises:
        ValueError: there is such a schedule.
    """
    if any("lr" in cb.scheds for cb in running(learn.cbs, ParamScheduler)):
        raise ValueError(
            f"{who} cannot be combined with a schedule of 'lr' (fit_one_cycle and the like have one), which sets the "
            "rate before every batch: train with fit at a constant rate, or leave one of them out"
        )


_EXAMPLE = "TorchScheduler(lambda opt: StepLR(opt, 10))"
_COUNT = (
    "count the steps in the function of TorchScheduler: an epoch has math.ceil(len(learn.dls.train_ds) / "
    "learn.effective_batch_size) of them"
)
_SCHEDULED = {
    "lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "momentum", "betas", "max_momentum", "base_momentum",
    "weight_decay",
}  # fmt: skip
"""The entries of an optimizer's groups that schedulers set; an optimizer may keep others, such as a count of steps."""
_LEAST_OF_PLAN = 0.9
"""The share of a scheduler's `total_steps` that a whole fit takes; fp16 may skip a few."""


class TorchScheduler(Callback):
    """Sets learning rates with a scheduler of `torch.optim.lr_scheduler`.

    Each fit makes a new scheduler, one for each optimizer, and gives the optimizer its old rates back at the end. In a
    fit with `start_epoch`, a scheduler that steps once an epoch without a monitored column first takes the steps of the
    skipped epochs; any other scheduler starts at its beginning.

    Args:
        make: a function of the optimizer that returns the scheduler: `lambda opt: StepLR(opt, 10)`.
        step: when the scheduler steps: after each optimizer step, also one that a callback cancels ('batch'), or after
            each epoch ('epoch').
        monitor: the column of the table given to its `step`, as `torch.optim.lr_scheduler.ReduceLROnPlateau` needs it.

    Raises:
        TypeError: `make` is a scheduler rather than a function that makes one, or makes something else; in `before_fit`
            also a scheduler whose `step` needs other arguments, such as those of timm.
        ValueError: another `step`; a `monitor` with step='batch'; in `before_fit` also a schedule of the rate.
    """

    order = 60
    run_valid = False
    only_fit = True

    def __init__(self, make: Callable[[Optimizer], Any], step: str = "batch", monitor: str | None = None) -> None:
        if not callable(make):
            raise TypeError(f"got {make!r}; pass a function that makes the scheduler when a fit begins: {_EXAMPLE}")
        if step not in ("batch", "epoch"):
            raise ValueError(f"got step={step!r}; it takes 'batch' or 'epoch'{did_you_mean(step, ['batch', 'epoch'])}")
        if monitor is not None and step == "batch":
            raise ValueError(f"monitor={monitor!r} is a column of the table, which has rows for epochs: step='epoch'")
        self.make = make
        self.step = step
        self.monitor = monitor
        self._schedulers: list = []
        self._attributes: list[tuple[Optimizer, set[str]]] = []  # the names that the optimizers had before
        self._options: list[list[Callable[[], dict[str, Any]]]] = []  # for each optimizer, those of its groups
        self._stepped = False

    def before_fit(self) -> None:
        learn = self.learn
        check_nobody_schedules(learn, "TorchScheduler")
        if self.monitor is not None:
            check_monitor(learn, self.monitor)
        self._options = [[] for _ in learn.opts]
        self._note_groups()
        for opt in learn.opts:
            self._attributes.append((opt, {*vars(opt)}))
            for group in opt.param_groups:
                group.pop("initial_lr", None)  # An earlier scheduler left it; this one starts with this fit's rates.
        self._schedulers, self._advanced = [self.make(opt) for opt in learn.opts], False
        for made in self._schedulers:
            if not hasattr(made, "step"):
                raise TypeError(f"TorchScheduler's function made {made!r}; it returns a scheduler: {_EXAMPLE}")
        if self.monitor is None and any(isinstance(scheduler, TorchPlateau) for scheduler in self._schedulers):
            raise ValueError(
                "torch's ReduceLROnPlateau steps by a value: TorchScheduler(..., step='epoch', monitor='valid_loss')"
            )
        values = [] if self.monitor is None else [0.0]
        for scheduler in self._schedulers:
            if not accepts(scheduler.step, *values):
                raise TypeError(
                    f"TorchScheduler calls step() of a scheduler, with one value if it has monitor=, and got "
                    f"{type(scheduler).__name__}.step{signature(scheduler.step)}: let a callback of your own call it, "
                    "in before_epoch or in after_step"
                )
        if self.step == "epoch" and self.monitor is None:
            for _ in range(learn.start_epoch):
                self._advance()

    def _note_groups(self) -> None:
        "Note what schedulers may set in the groups, and later in groups that a callback has added."
        for opt, noted in zip(self.learn.opts, self._options, strict=True):
            for group in opt.param_groups[len(noted) :]:
                noted.append(restorer({name: value for name, value in group.items() if name in _SCHEDULED}))

    def after_step(self) -> None:
        self._stepped = True

    def after_batch(self) -> None:
        # Not in after_step: the recorder (order 50) must first record the rate of this step in its after_batch.
        if self._stepped and self.step == "batch":
            self._advance()
        self._stepped = False

    def after_train(self) -> None:
        self.after_batch()  # Accumulation may have taken its last step after the last batch.

    def after_epoch(self) -> None:
        if self.step == "epoch":
            self._advance()

    def after_fit(self) -> None:
        for scheduler in self._schedulers if self.learn.pct_train >= 1 else ():
            planned = getattr(scheduler, "total_steps", None)
            if planned and (taken := scheduler.last_epoch) < _LEAST_OF_PLAN * planned:
                distributed.warn(
                    f"the {type(scheduler).__name__} was made for {planned} steps and this fit has taken {taken}, so "
                    f"the rate has not come to its end; {_COUNT}"
                )

    def _advance(self) -> None:
        values = [] if self.monitor is None else [monitored(self.learn, self.monitor)]
        if values == [None]:
            return  # the newest row does not have the column
        self._note_groups()
        with ExitStack() as stack:
            if not self._advanced:  # each such context makes Python forget which warnings were shown
                stack.enter_context(warnings.catch_warnings())
                # If an optimizer step was skipped, torch's first call warns of a wrong order of calls.
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            for scheduler in self._schedulers:
                if (planned := getattr(scheduler, "total_steps", None)) and scheduler.last_epoch >= planned:
                    raise ValueError(
                        f"the {type(scheduler).__name__} was made for {planned} steps, and this fit takes more; "
                        f"{_COUNT}"
                    )
                scheduler.step(*values)
        self._advanced = True

    def state_dict(self) -> State:
        """Return the schedulers' states, without functions and other values that are not plain."""
        return {"schedulers": [plain_part(scheduler.state_dict()) for scheduler in self._schedulers]}

    def load_state_dict(self, state: State) -> None:
        """Restore the schedulers."""
        for scheduler, saved in zip(self._schedulers, state["schedulers"], strict=False):
            scheduler.load_state_dict(_completed(saved, scheduler.state_dict()))

    def cleanup_fit(self) -> None:
        for opt, names in self._attributes:
            for name in OF_SCHEDULERS & vars(opt).keys() - names:  # What the optimizer itself has set stays.
                delattr(opt, name)
        for opt, noted in zip(self.learn.opts, self._options, strict=False):
            # Groups are matched by position, since a load may have replaced them by other dicts.
            for group, options in zip(opt.param_groups, noted, strict=False):
                for name in _SCHEDULED & group.keys():
                    del group[name]
                group.update(options())
        self._attributes, self._schedulers, self._options = [], [], []


def plain_part(state: Any) -> Any:
    """Return the part of a scheduler's state that is numbers, strings, tensors, and lists and dicts of these."""
    if type(state) is dict:
        return {name: plain_part(value) for name, value in state.items() if _is_plain(value)}
    return list(map(plain_part, state)) if type(state) is list else state


def _completed(saved: Any, own: Any) -> Any:
    """Complete a saved state by the parts that `plain_part` has left out, from the state of an equal scheduler."""
    if type(saved) is dict and type(own) is dict:
        return own | {name: _completed(value, own.get(name)) for name, value in saved.items()}
    if type(saved) is list and type(own) is list and len(saved) == len(own):
        return [_completed(*pair) for pair in zip(saved, own, strict=True)]
    return saved


def _is_plain(x: Any) -> bool:
    if type(x) in (list, tuple):
        return all(map(_is_plain, x))
    return x is None or type(x) is dict or isinstance(x, int | float | str | Tensor)
