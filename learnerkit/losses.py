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

IGNORED = -100
"""The class of targets that torch's cross-entropy, and the models of transformers, leave out by default."""


def option(loss_func: Any, name: str, default: Any = None) -> Any:
    """An option of a loss: an attribute of a module, or a keyword of a partial."""
    if isinstance(loss_func, partial):
        return loss_func.keywords.get(name, option(loss_func.func, name, default))
    return getattr(loss_func, name, default)


def kernel(loss_func: Any) -> Any:
    """The function inside partials."""
    while isinstance(loss_func, partial):
        loss_func = loss_func.func
    return loss_func


def is_one_of(loss_func: Any, losses: tuple) -> bool:
    """Whether a loss is one of these classes of modules, or functions."""
    found = kernel(loss_func)
    return isinstance(found, tuple(x for x in losses if isinstance(x, type))) or any(found is x for x in losses)


def loss_name(loss_func: Any) -> str:
    """What a loss is called."""
    return name_of(kernel(loss_func))


def name_of(x: Any) -> str:
    """The name of a function or class, or that of an object's class."""
    return getattr(x, "__name__", type(x).__name__)


def is_cross_entropy(loss_func: Any) -> bool:
    """Whether the targets are classes and `argmax` over dimension 1 decodes a prediction."""
    return is_one_of(loss_func, (nn.CrossEntropyLoss, nn.NLLLoss, F.cross_entropy, F.nll_loss))


class LossWeight:
    """How one value of the loss counts beside others.

    Args:
        loss_func: its `reduction`, `weight` and `ignore_index` are heeded where it is one of torch's losses; `None` for
            a model that makes its own loss, of which the first batch shows what it averages over.
        loss_weight: `None`, 'sum', or a function of the targets that returns the number of items averaged over.

    Attributes:
        unknown: the model's own loss is not a mean that is known here, and its batches count by their samples.

    Raises:
        ValueError: another `loss_weight`, or a loss made with reduction='none'.
    """

    def __init__(self, loss_func: Any, loss_weight: str | Callable[..., Tensor] | None = None):
        if loss_weight not in (None, "sum") and not callable(loss_weight):
            raise ValueError(
                f"got loss_weight={loss_weight!r}; it takes None, 'sum', or a function of the targets that returns the "
                "number of items the loss averages over"
            )
        if loss_weight is None and option(loss_func, "reduction") == "none":
            raise ValueError(f"{loss_func} has reduction='none', so the loss is no scalar; use 'mean' or 'sum'")
        self.sums = loss_weight == "sum" or (loss_weight is None and option(loss_func, "reduction") == "sum")
        self._given = callable(loss_weight)
        self._count = loss_weight if self._given else None
        if self._count is None and not self.sums and is_cross_entropy(loss_func):
            ignored = option(loss_func, "ignore_index", IGNORED)
            self._count = partial(_count_classes, option(loss_func, "weight"), ignored)
        self.unknown = False
        # In how many batches to look for what the model's own loss averages over: nearly always the first one tells.
        self._looks = 8 if loss_func is None and loss_weight is None else 0

    def count(self, yb: tuple, batch_size: int, pred: Any = None, loss: Any = None) -> int | Tensor:
        """The number of items behind a batch's loss; a 0-dim tensor, on every rank alike, where it is counted.

        Args:
            yb: the targets.
            batch_size: the number of samples.
            pred, loss: the predictions and the loss that the model made of them, if it makes its own.
        """
        if self._looks and batch_size:
            self._look(yb, pred, loss)
        if self._count is None or not yb:
            return batch_size
        found = self._count(*yb) if batch_size or not self._given else 0
        if found is None:
            return batch_size
        return found if isinstance(found, Tensor) else torch.tensor(found)

    def _look(self, yb: tuple, pred: Any, loss: Any) -> None:
        """Find what the model's own loss averages over. A host-device sync, in the first batch of a run."""
        looks, self._looks = self._looks, 0
        target = yb[0] if len(yb) == 1 else None
        if not isinstance(target, Tensor) or not isinstance(pred, Tensor) or not isinstance(loss, Tensor) or loss.ndim:
            return
        if target.is_floating_point() or target.is_complex() or pred.ndim != target.ndim + 1:
            return
        value, gaps = float(loss.detach()), []
        all_targets = partial(_count_classes, None, IGNORED)
        if not math.isfinite(value):  # the mean of nothing, say, which both count as nothing
            self._count, self._looks = _count_shifted if target.ndim > 1 else all_targets, looks
            return
        for axis in class_axes(pred, target):
            for shift in (0, 1) if target.ndim > 1 else (0,):
                mean = _mean_cross_entropy(pred.detach().movedim(axis, -1), target, shift)
                gaps.append((abs(mean - value), shift))
        allowed = max(1e-4, 4 * torch.finfo(loss.dtype).eps) * abs(value) + 1e-6
        close = sorted((gap, shift) for gap, shift in gaps if gap <= allowed)
        if close:
            shift = close[0][1]
            self._count = _count_shifted if shift else all_targets
            others = [gap for gap, other in close if other != shift]
            if others and others[0] < 2 * close[0][0] + 1e-9:  # as with predictions that are all alike
                self._looks = looks - 1
        else:
            self.unknown = target.ndim > 1 or bool((target == IGNORED).any())


def class_axes(pred: Tensor, target: Tensor) -> list[int]:
    """The dimensions of scores that may be the classes: those without which scores have the shape of the targets."""
    if pred.ndim < 3:
        return [1]
    return [axis for axis in (1, -1) if pred.select(axis, 0).shape == target.shape]


def _mean_cross_entropy(scores: Tensor, target: Tensor, shift: int) -> float:
    """The mean cross-entropy of scores (n, ..., classes) over targets (n, ...) that are not ignored.

    NaN where there is none, or the targets are not classes. A host-device sync.

    Args:
        shift: how many places later in dimension 1 the target of a prediction stands: 1 in language models that are
            given their inputs as labels.
    """
    if shift:
        scores, target = scores[:, :-shift], target[:, shift:]
    counted = target != IGNORED
    if not (counted & (target >= 0) & (target < scores.shape[-1]) == counted).all():
        return math.nan  # which would be the end of this process's use of a CUDA device
    total = 0.0
    # In pieces: the scores of a large vocabulary in float32 would fill the device's memory a second time.
    rows = max(1, 2**24 // max(1, scores[:1].numel()))
    for some, classes in zip(scores.split(rows), target.split(rows), strict=True):
        flat = some.reshape(-1, scores.shape[-1]).float()
        total += F.cross_entropy(flat, classes.reshape(-1).long(), ignore_index=IGNORED, reduction="sum")
    return float(total / counted.sum())


def _count_shifted(target: Tensor, *rest: Any) -> Tensor:
    """How many targets are not ignored, of those that predictions shifted by one place have."""
    return (target[:, 1:] != IGNORED).sum()


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
