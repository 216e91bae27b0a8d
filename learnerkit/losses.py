"""What a loss averages over: needed to combine losses of batches and ranks exactly.

A loss that is the mean over samples combines weighted by samples; one that is the mean over other items (tokens that
are not padding, samples weighted by class) by the number of those; a sum just adds.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from learnerkit.data.batches import tensors_in

IGNORED = -100
"""The class of targets that torch's cross-entropy leaves out by default."""


def loss_option(loss_func: Any, name: str, default: Any = None) -> Any:
    """An option of a loss: an attribute of a module, or a keyword of a partial."""
    if isinstance(loss_func, partial):
        return loss_func.keywords.get(name, loss_option(loss_func.func, name, default))
    return getattr(loss_func, name, default)


def unwrap_partial(loss_func: Any) -> Any:
    """The function inside partials."""
    while isinstance(loss_func, partial):
        loss_func = loss_func.func
    return loss_func


def is_one_of(loss_func: Any, losses: tuple) -> bool:
    """Whether a loss is one of these classes of modules, or functions."""
    found = unwrap_partial(loss_func)
    return isinstance(found, tuple(x for x in losses if isinstance(x, type))) or any(found is x for x in losses)


def loss_name(loss_func: Any) -> str:
    """What a loss is called."""
    return name_of(unwrap_partial(loss_func))


def name_of(x: Any) -> str:
    """The name of a function or class, or that of an object's class."""
    return getattr(x, "__name__", type(x).__name__)


def is_cross_entropy(loss_func: Any) -> bool:
    """Whether the targets are classes and `argmax` over dimension 1 decodes a prediction."""
    return is_one_of(loss_func, (nn.CrossEntropyLoss, nn.NLLLoss, F.cross_entropy, F.nll_loss))


_LOOKS = 8
"""In how many batches to look. The first one tells nearly always; some later ones may contradict it."""


class LossWeight:
    """How one value of the loss counts beside others.

    Args:
        loss_func: one of torch's losses counts as its `reduction`, `weight` and `ignore_index` say; `None` is for a
            model that makes its own loss, of which the first batches show what it averages over.
        loss_weight: `None`, 'sum', or a function of the targets that returns the number of items averaged over.

    Attributes:
        sums: the loss is a sum.
        unknown: the model's own loss is not a mean that is known here, so that what it counts is a guess.
        found_alone: this rank has found that out by itself; the others may not know.

    Raises:
        ValueError: another `loss_weight`, or a loss made with reduction='none'.
    """

    def __init__(self, loss_func: Any, loss_weight: str | Callable[..., Tensor] | None = None) -> None:
        if loss_weight not in (None, "sum") and not callable(loss_weight):
            raise ValueError(
                f"got loss_weight={loss_weight!r}; it takes None, 'sum', or a function of the targets that returns the "
                "number of items the loss averages over"
            )
        if loss_weight is None and loss_option(loss_func, "reduction") == "none":
            raise ValueError(f"{loss_func} has reduction='none', so the loss is no scalar; use 'mean' or 'sum'")
        self.sums = loss_weight == "sum" or (loss_weight is None and loss_option(loss_func, "reduction") == "sum")
        self._given = callable(loss_weight)
        self._count: Callable[..., Any] | None = loss_weight if callable(loss_weight) else None
        if self._count is None and not self.sums and is_cross_entropy(loss_func):
            ignored = loss_option(loss_func, "ignore_index", IGNORED)
            self._count = partial(_count_classes, loss_option(loss_func, "weight"), ignored)
        self.unknown = self.found_alone = False
        self._looks = self._votes = 0
        if loss_func is None and loss_weight is None:
            self._looks = self._votes = _LOOKS
            self._count = _count_targets
        self._means = set(MEANS)  # those that all batches so far allow

    @property
    def votes(self) -> bool:
        """Whether the ranks find out together, by the next batch, what the model's own loss averages over.

        It is the same on all ranks, as only `agree` changes it.
        """
        return self._votes > 0

    def count(self, yb: tuple, batch_size: int, pred: Any = None, loss: Any = None, xb: tuple = ()) -> int | Tensor:
        """The number of items behind a batch's loss; a 0-dim tensor, on every rank alike, where it is counted.

        Args:
            yb: the targets.
            batch_size: the number of samples.
            pred, loss, xb: the predictions, the loss and the inputs, if the model makes its own loss; without
                predictions the batch shows nothing.
        """
        if self._looks and batch_size and pred is not None:
            self._looks -= 1
            self._look(possible_means(yb, pred, loss, xb))
        if self._count is None or not yb:
            return batch_size
        found = self._count(*yb) if batch_size or not self._given else 0
        if found is None:
            return batch_size
        return found if isinstance(found, Tensor) else torch.tensor(found)

    def _look(self, found: list[str]) -> None:
        agreed = self._votes < _LOOKS
        if self._means.isdisjoint(found):
            self.unknown, self.found_alone, self._looks = True, True, 0  # the count stays what it has been so far
        elif not agreed:
            self._allow(found)

    def agree(self, found: list[list[str]]) -> None:
        """Decide by one batch of each rank; what a rank sees in later batches may only contradict that.

        Args:
            found: what `possible_means` has found on each of the ranks.
        """
        together = self._means.intersection(*found)
        self._votes -= 1
        if not together:
            self.unknown, self._looks, self._votes = True, 0, 0
            return
        self._allow([name for name in found[0] if name in together])
        if len(together) == 1:
            self._votes = 0
        elif not self._votes and len(together) == len(MEANS):
            self.unknown = True  # none of these batches has shown anything

    def _allow(self, found: list[str]) -> None:
        left = [name for name in found if name in self._means]
        self._means, self._count = set(left), MEANS[left[0]]


def possible_means(yb: tuple, pred: Any, loss: Any, xb: tuple = ()) -> list[str]:
    """What the loss that a model makes may be the mean over, as its value shows. A host-device sync.

    Args:
        yb, pred, loss, xb: targets, predictions, loss and inputs of a batch.

    Returns:
        Some of 'targets' (the mean cross-entropy over those that are not negative), 'shifted' (over those one place
        later than the predictions) and 'samples', the likeliest first; all of them if the batch does not tell, and none
        if the loss is another one over tokens.
    """
    if not isinstance(loss, Tensor) or loss.ndim or len(yb) > 1:
        return ["samples"]
    if not yb:
        return [] if _over_tokens(xb, pred) else ["samples"]
    target = yb[0]
    if not _are_integers(target) or not _may_be_classes(target):
        return ["samples"]
    scores = [t for t in tensors_in(pred) if _may_be_scores(t, target)]
    by_sample = target.ndim == 1 and not (target < 0).any()
    if not scores:
        return ["samples"] if by_sample or isinstance(pred, Tensor) else []
    value = float(loss.detach())
    if not math.isfinite(value):  # the mean over no targets, say; then 'shifted' counts none, too
        return list(MEANS)
    ways = [(1, "shifted"), (0, "targets")][-min(target.ndim, 2) :]
    gaps = [
        (abs(_mean_cross_entropy(t.detach().movedim(axis, -1), target, shift) - value), name)
        for t in scores
        for axis in class_axes(t, target)
        for shift, name in ways
    ]
    gaps = sorted((gap, name) for gap, name in gaps if not math.isnan(gap))
    least = gaps[0][0] if gaps else math.inf
    rounding = torch.finfo(loss.dtype).eps * abs(value)
    if least > max(1e-4 * abs(value), 4 * rounding) + 1e-6:
        return ["samples"] if by_sample else []
    # Several are as close where predictions are all alike, or the loss has few digits.
    near = 2 * (least + rounding) + 1e-9
    return list(dict.fromkeys(name for gap, name in gaps if gap <= near))


def _are_integers(target: Any) -> bool:
    return isinstance(target, Tensor) and target.ndim > 0 and not target.is_floating_point() and not target.is_complex()


def _may_be_classes(target: Tensor) -> bool:
    """Whether all negative targets are the same number: the one for targets that are left out. A host-device sync."""
    negative = target[target < 0]
    return not len(negative) or bool((negative == negative[0]).all())


def _may_be_scores(t: Tensor, target: Tensor) -> bool:
    """Whether these are scores of classes for each of the targets, by what can be told without their values."""
    fits = t.ndim == target.ndim + 1 and len(t) == len(target) and t.numel() > 0
    return fits and t.is_floating_point() and t.layout is torch.strided and t.device == target.device


def _over_tokens(xb: tuple, pred: Any) -> bool:
    """Whether predictions are scores for each of the tokens (n, t) in the inputs."""
    tokens = {t.shape for t in tensors_in(xb) if t.ndim == 2 and not t.is_floating_point()}
    return any(t.ndim == 3 and t.shape[:2] in tokens for t in tensors_in(pred))


def class_axes(pred: Tensor, target: Tensor) -> list[int]:
    """The dimensions of scores that may be the classes: those without which scores have the shape of the targets."""
    if pred.ndim < 3:
        return [1]
    return [axis for axis in (1, -1) if pred.select(axis, 0).shape == target.shape]


def _mean_cross_entropy(scores: Tensor, target: Tensor, shift: int) -> float:
    """The mean cross-entropy of scores (n, ..., classes) over targets (n, ...) that are not negative.

    NaN where there is none, or the targets are not classes. A host-device sync.

    Args:
        shift: how many places later in dimension 1 the target of a prediction stands: 1 in language models that are
            given their inputs as labels.
    """
    if shift:
        scores, target = scores[:, :-shift], target[:, shift:]
    counted = target >= 0
    # On a CUDA device larger ones would end in an assert, after which the process cannot use the device any more.
    if (target >= scores.shape[-1]).any():
        return math.nan
    total: float | Tensor = 0.0
    # In pieces: the scores of a large vocabulary in float32 would fill the device's memory a second time.
    rows = max(1, 2**24 // max(1, scores[:1].numel()))
    for some, classes in zip(scores.split(rows), target.split(rows), strict=True):
        flat = some.reshape(-1, scores.shape[-1]).float()
        total += F.cross_entropy(flat, classes.reshape(-1).long().clamp(min=-1), ignore_index=-1, reduction="sum")
    return float(total / counted.sum())


def _count_shifted(target: Any, *rest: Any) -> Tensor | None:
    """As `_count_targets`, of those targets that predictions shifted by one place have."""
    return _count_targets(target[:, 1:] if isinstance(target, Tensor) and target.ndim > 1 else target, *rest)


def _count_targets(target: Any, *rest: Any) -> Tensor | None:
    """How many targets are not negative; models leave negative ones out, mostly -100 or -1.

    `None` where targets cannot be classes.
    """
    return None if rest or not _are_integers(target) else (target >= 0).sum()


MEANS = {"shifted": _count_shifted, "targets": _count_targets, "samples": None}
"""What a model's own loss may be the mean over, the most frequent first, and what counts that in a batch."""


def _count_classes(weight: Tensor | None, ignore_index: int, target: Any, *rest: Any) -> Tensor | None:
    """What torch's cross-entropy divides by, or `None` where that is the number of samples.

    The mean of `torch.nn.CrossEntropyLoss` divides by the summed class weights of the targets that are not ignored;
    with class probabilities as targets, by the number of them.
    """
    if not isinstance(target, Tensor) or target.is_floating_point():
        return None
    if weight is None:
        if target.ndim == 1 and ignore_index < 0 and target.is_cpu and target.numel() and target.min().item() >= 0:
            return None  # as nearly always, and to find that out takes a few microseconds
        return (target != ignore_index).sum()
    counted = target != ignore_index
    return (weight.to(target.device)[target.clamp(min=0, max=len(weight) - 1)] * counted).sum()
