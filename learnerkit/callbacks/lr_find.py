"""The learning rate finder: train while the rate grows, and suggest rates from the curve of the loss."""

import math
from collections import namedtuple
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learnerkit import arguments, distributed, optim
from learnerkit.callbacks.recorder import Smoother, plot_lr_find
from learnerkit.callbacks.schedule import SchedExp
from learnerkit.callbacks.training import StepBudget
from learnerkit.events import CancelEpochException, CancelFitException
from learnerkit.losses import loss_sums, unwrap_partial
from learnerkit.marks import collective

_DIVERGED = 4.0  # training has diverged when the smoothed loss is more than this many times its lowest value
_BETA = 0.98  # smoothing, as in the recorder
_LEAST_FALL = 0.05  # the least fall of the smoothed loss, as a share of its first value, that says something
_LAST = 5  # losses ignored at the end, where training diverges


class SuggestedLRs(tuple[float, ...]):
    """The result of `Learner.lr_find`, as type checkers see it: a named tuple of rates by their functions' names."""

    valley: float
    slide: float
    minimum: float
    steep: float


class LRFinder(StepBudget):
    """Raises the learning rate exponentially from step to step and records the losses, for `Learner.lr_find`.

    Args:
        start_lr, end_lr, num_it, stop_div, suggest_funcs: as in `Learner.lr_find`.

    Attributes:
        lrs: the rate of every step; of several groups, the highest one.
        losses: the smoothed loss of every step, over all ranks.
        curve: the rates and losses that suggestions are made from, and these by name.

    Raises:
        ValueError: rates that do not grow from above 0, less than 10 steps, or functions without different names.
    """

    def __init__(
        self, start_lr: float, end_lr: float, num_it: int, stop_div: bool, suggest_funcs: Sequence[Callable[..., Any]]
    ) -> None:
        arguments.check_count("num_it", num_it, "a number of steps to suggest a rate by", least=2 * _LAST)
        super().__init__(num_it)
        if not 0 < start_lr < end_lr < math.inf:
            raise ValueError(
                f"got start_lr={start_lr} and end_lr={end_lr}; the rate must grow, from above 0 to a finite one"
            )
        self.stop_div, self.suggest_funcs = stop_div, suggest_funcs
        for function in suggest_funcs:
            if not callable(function):
                raise TypeError(
                    f"got suggest_funcs={function!r}; it takes functions of (rates, losses, num_it), such as "
                    "SuggestionMethod.Valley"
                )
        names = [getattr(unwrap_partial(function), "__name__", type(function).__name__) for function in suggest_funcs]
        try:
            self._result: Any = namedtuple("SuggestedLRs", names)  # type: ignore[misc]  # the fields are known only now
        except ValueError as e:
            raise ValueError(
                f"got suggest_funcs named {', '.join(names)} ({e}); the result has a field for each, so give each a "
                "name of its own with `def`"
            ) from None
        self._sched = SchedExp(start_lr, end_lr)
        self.lrs: list[float] = []
        self._smooth = Smoother(_BETA)
        self._diverged = False
        self.curve: tuple[list[float], list[float], dict[str, float]] | None = None

    @property
    def losses(self) -> list[float]:
        return self._smooth.values

    def before_train(self) -> None:
        super().before_train()
        self._sums = torch.zeros(2, dtype=torch.float64)  # the sums of losses and of counts over the step's batches

    def before_batch(self) -> None:
        self._rate = self._sched(self.learn.pct_train)
        for opt in self.learn.opts:
            optim.set_hyper(opt, "lr", [self._rate * share for share in optim.shares(opt)])

    @collective
    def after_batch(self) -> None:
        learn = self.learn
        if learn.loss is not None and learn.loss_count:
            # Host-device syncs: to stop in time, the host must know the loss of every step.
            count = float(learn.loss_count)
            self._sums += torch.tensor([float(learn.loss) * (1.0 if loss_sums(learn) else count), count])
        if learn.step_due:
            self._close_step()
        super().after_batch()

    @collective
    def after_train(self) -> None:
        if self._step_open:
            self._close_step()
        super().after_train()
        raise CancelEpochException  # There is no validation.

    @collective
    def _close_step(self) -> None:
        "Record the step's loss, and end the run if it diverges."
        learn = self.learn
        # Every rank must reach this, and does: all ranks take the same steps. So all see the same loss.
        total, count = (distributed.reduce(self._sums) if learn.n_ranks > 1 else self._sums).tolist()
        self._sums = torch.zeros(2, dtype=torch.float64)
        if not count:
            return
        self.lrs.append(self._rate)
        # Also of losses that sum: those of steps with fewer samples would be smaller.
        self._smooth.add(total / count)
        # The first losses may vary much by chance, and are not used for suggestions either.
        bound = math.inf
        if len(self.losses) > self.n_steps // 10:
            least = min(self.losses)
            size = least if least > 0 else max(-least, self.losses[0] - least)  # some losses are negative
            bound = least + (_DIVERGED - 1) * size
        self._diverged = not self.losses[-1] <= bound  # true for NaN too
        if self.stop_div and self._diverged:
            raise CancelFitException(agreed=True)

    def recorded(self, rates: dict[str, float]) -> Any:
        """Return earlier suggestions as `suggest` does; `None` if other functions have made them."""
        return self._result(**rates) if rates.keys() == {*self._result._fields} else None

    def suggest(self, show_plot: bool) -> tuple[Any, ...]:
        """Return the rate that each function suggests, as a named tuple; rank 0 plots them.

        Raises:
            ValueError: too few losses, because training diverged too soon or a callback cancelled it.
        """
        num_it, finite = self.n_steps, [math.isfinite(loss) for loss in self.losses]
        end = finite.index(False) if False in finite else len(finite) - _LAST
        used = slice(num_it // 10, end)
        # Tensors, because functions written for fastai take them; numpy's functions do too.
        lrs, losses = (torch.tensor(values[used], dtype=torch.float64) for values in (self.lrs, self.losses))
        if len(lrs) < 2:
            too_soon = f"after {len(finite)} of {num_it} steps, too soon to suggest a rate by"
            if self._diverged or False in finite:
                raise ValueError(f"the loss diverged {too_soon}; begin with a lower start_lr")
            raise ValueError(f"a callback cancelled the fit, or batches of it, {too_soon}")
        rates = [function(lrs, losses, num_it) for function in self.suggest_funcs]
        # A function written for fastai returns a tuple of the rate and its point on the curve.
        suggested = self._result(*(float(rate[0] if isinstance(rate, tuple) else rate) for rate in rates))
        self.curve = lrs.tolist(), losses.tolist(), suggested._asdict()
        if show_plot and distributed.is_main():
            with suppress(ImportError):  # the suggestions do not need matplotlib
                plot_lr_find(*self.curve)
        return suggested


def choice(lrs: Sequence[float], losses: Sequence[float], rates: dict[str, float]) -> str:
    """Return the line that says which of the suggested rates to take, and why; nothing without `valley` among them.

    It is `valley`, as in fastai, while the loss has come down, and while the rate lies below that of the lowest loss.
    """
    if "valley" not in rates:
        return ""
    at = int(np.argmin(losses))
    fall, first = losses[0] - losses[at], abs(losses[0])
    if fall < _LEAST_FALL * first:
        return f"lr_find: the loss fell by {fall / first:.1%} only, too little to choose a rate: raise num_it"
    if rates["valley"] < lrs[at]:
        return f"lr_find: take valley, {rates['valley']:.1e}: there the loss was in the middle of its longest fall"
    return (
        f"lr_find: take {lrs[at] / 10:.1e}, a tenth of the rate at which the loss was lowest (minimum): "
        f"valley, {rates['valley']:.1e}, is above that rate"
    )


# Suggestions: functions of (rates, losses, num_it), as in fastai

Values = Tensor | np.ndarray


def valley(lrs: Values, losses: Values, num_it: int) -> float:
    """Return the rate half-way down the longest valley: the longest decreasing subsequence of the losses.

    It is the rate in the middle of the valley's middle third, as in fastai, which took it from arcgis.learn.
    """
    losses = np.asarray(losses)
    lengths = np.ones(len(losses), dtype=int)  # lengths of the longest decreasing subsequences by their ends
    for i in range(1, len(losses)):
        higher = lengths[:i][losses[:i] > losses[i]]
        lengths[i] = 1 + higher.max(initial=0)
    end = int(lengths.argmax())
    start = end - int(lengths[end]) if end else 0
    third = (end - start) / 3
    # A valley of the first two losses alone starts before them, as in fastai, whose index then counts from the end.
    return float(lrs[max(0, start + int(third) + int(third / 2))])


def slide(
    lrs: Values, losses: Values, num_it: int, lr_diff: int = 15, thresh: float = 0.005, adjust_value: float = 1.0
) -> float:
    """Return the rate left of a window that slides from the right until the slopes at its ends are similar.

    The method is AdaptNLP's interval slide rule (https://novetta.github.io/adaptnlp).

    Args:
        lrs, losses, num_it: the curve.
        lr_diff: width of the window, in steps.
        thresh: the largest difference of similar slopes.
        adjust_value: a factor for the rate.
    """
    slopes, count = np.gradient(np.asarray(losses)), len(losses)
    width = min(lr_diff, count - 1)
    left = count - 1 - width
    rate = lrs[left]
    while left >= 0 and abs(slopes[left + width] - slopes[left]) > thresh:
        rate = lrs[left]
        left -= 1
    return float(rate) * adjust_value


def minimum(lrs: Values, losses: Values, num_it: int) -> float:
    """Return a tenth of the rate with the lowest loss."""
    return float(lrs[losses.argmin()]) / 10


def steep(lrs: Values, losses: Values, num_it: int) -> float:
    """Return the rate at which the loss falls fastest as a function of the logarithm of the rate."""
    lrs, losses = np.asarray(lrs), np.asarray(losses)
    return float(lrs[:-1][(np.diff(losses) / np.diff(np.log(lrs))).argmin()])


SUGGESTIONS = (valley, slide, minimum, steep)


class SuggestionMethod:
    """The functions by which `lr_find` suggests a rate, under fastai's names."""

    Valley, Slide, Minimum, Steep = map(staticmethod, SUGGESTIONS)
