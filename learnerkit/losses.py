"""What a loss averages over: needed to combine losses of batches and ranks exactly.

A loss that is the mean over samples combines weighted by samples; one that is the mean over other items (tokens that
are not padding, samples weighted by class) by the number of those; a sum just adds.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
    found = kernel(loss_func)
    return type(found).__name__ if isinstance(found, nn.Module) else found.__name__


def is_cross_entropy(loss_func: Any) -> bool:
    """Whether the targets are classes and `argmax` over dimension 1 decodes a prediction."""
    return is_one_of(loss_func, (nn.CrossEntropyLoss, nn.NLLLoss, F.cross_entropy, F.nll_loss))


class LossWeight:
    """How one value of the loss counts beside others.

    Args:
        loss_func: its `reduction`, `weight` and `ignore_index` are heeded where it is one of torch's losses.
        loss_weight: `None`, 'sum', or a function of the targets that returns the number of items averaged over.

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
            self._count = partial(_count_classes, option(loss_func, "weight"), option(loss_func, "ignore_index", -100))

    def count(self, yb: tuple, batch_size: int) -> int | Tensor:
        """The number of items behind a batch's loss; a 0-dim tensor, on every rank alike, where it is counted."""
        if self._count is None or not yb:
            return batch_size
        found = self._count(*yb) if batch_size or not self._given else 0
        if found is None:
            return batch_size
        return found if isinstance(found, Tensor) else torch.tensor(found)


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
