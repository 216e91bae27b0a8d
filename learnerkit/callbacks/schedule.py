"""Hyper-parameters that change while training goes on."""

import math
from collections.abc import Callable, Mapping, Sequence

from learnerkit import checks, optim
from learnerkit.callback import Callback

Schedule = Callable[[float], float]
"""A value as a function of the share of training done, from 0 to 1."""


def combined_cos(pct: float, start: float, middle: float, end: float) -> Schedule:
    """A schedule along two half cosines: from `start` to `middle` until `pct`, then to `end`.

    Args:
        pct: share of training at which `middle` is reached, between 0 and 1.
        start, middle, end: the values there.

    Raises:
        ValueError: `pct` outside 0 to 1.
    """
    if not 0 <= pct <= 1:
        raise ValueError(f"got pct={pct}; the share of training before the peak is between 0 and 1")

    def cos(a: float, b: float, position: float) -> float:
        return a + (1 + math.cos(math.pi * (1 - position))) * (b - a) / 2

    def schedule(position: float) -> float:
        if position < pct:
            return cos(start, middle, position / pct)
        return cos(middle, end, min(1.0, (position - pct) / (1 - pct)) if pct < 1 else 0.0)

    return schedule


class ParamScheduler(Callback):
    """Sets hyper-parameters before every training batch.

    Args:
        scheds: by name ('lr', 'momentum', 'weight_decay'), a schedule, or a list of them, one for each of the
            splitter's groups.

    After a fit `recorder.hps` has the values of every step; of several groups, the last one's. The optimizer gets back
    the values it had before.
    """

    order = 60
    run_valid = False
    only_fit = True

    def __init__(self, scheds: Mapping[str, Schedule | Sequence[Schedule]]):
        super().__init__()
        self.scheds = dict(scheds)
        self.hps: dict[str, list[float]] = {}
        self._before: list[tuple[dict, dict]] = []

    def before_fit(self):
        checks.check_length(self.dls.train, "a schedule")
        self._before = [(g, optim.get_hypers(g, self.scheds)) for opt in self.learn.opts for g in opt.param_groups]
        self.hps = {name: [] for name in self.scheds}

    def before_batch(self):
        for name, sched in self.scheds.items():
            at = self.learn.pct_train
            values = sched(at) if callable(sched) else [s(at) for s in sched]
            for opt in self.learn.opts:
                optim.set_hyper(opt, name, values)
            self.hps[name].append(values if callable(sched) else values[-1])

    def after_fit(self):
        if hasattr(self.learn, "recorder"):
            self.learn.recorder.hps = self.hps

    def cleanup_fit(self):
        for group, values in self._before:
            group.update(values)
        self._before = []
