"""Metrics that are functions: means over samples."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from learnerkit.data.batches import in_float32
from learnerkit.losses import LossFacts, class_axes, class_numbers
from learnerkit.values import describe


def accuracy(pred: Tensor, target: Tensor, axis: int | None = None, loss_func: Any = None) -> Tensor:
    """Compute the share of targets that are predicted right; a sample may have several (tokens, pixels).

    Predictions are decoded as `Learner.predict` does it: the class with the largest score, or for a binary
    cross-entropy yes or no. Targets that the loss ignores, and negative ones such as -100, do not count.

    Args:
        pred: scores of shape (n, classes, ...), or of a language model (n, t, vocabulary); for a binary cross-entropy
            of the shape of the targets; whatever the `decode` of the loss takes.
        target: classes of shape (n, ...) or (n, 1, ...).
        axis: the dimension of the classes; by default the loss's, else 1 or the last, whichever fits the targets.
        loss_func: the loss, which says how predictions are decoded; a Learner gives its own.

    Raises:
        ValueError: predictions that have no classes, such as those of a regression, or one score for each sample and no
            loss that says how it is decoded; or both dimension 1 and the last may be the classes.
    """
    return _accuracy(pred, target, axis, facts=LossFacts(loss_func))[0]


def accuracy_multi(pred: Tensor, target: Tensor, thresh: float = 0.5, sigmoid: bool = True) -> Tensor:
    """Compute the share of right answers over all labels of all samples, where each label is a yes or no by itself.

    Args:
        pred: a score for each label.
        target: as many, 1 or True for yes, 0 or False for no.
        thresh: above which a probability, or with `sigmoid=False` a score, is a yes.
        sigmoid: make probabilities of the scores first.

    Raises:
        ValueError: another number of targets.
    """
    if target.numel() != pred.numel():
        raise ValueError(
            f"accuracy_multi needs a yes or no for each score, and got {describe(pred)} and {describe(target)} for the "
            "targets; where each sample has one class, take accuracy"
        )
    scores = pred.sigmoid() if sigmoid else pred
    right = (scores > thresh) == target.reshape(pred.shape).bool()  # (n, 1) and (n,) would make n x n answers
    return wide(right).mean()


def error_rate(pred: Tensor, target: Tensor, axis: int | None = None, loss_func: Any = None) -> Tensor:
    """Compute 1 - `accuracy`."""
    return _error_rate(pred, target, axis, facts=LossFacts(loss_func))[0]


def top_k_accuracy(pred: Tensor, target: Tensor, k: int = 5, axis: int | None = None, loss_func: Any = None) -> Tensor:
    """Compute the share of targets that are among the `k` largest scores.

    Args:
        pred, target, axis, loss_func: as in `accuracy`, except the binary cross-entropy.
        k: how many scores; for another number use `partial(top_k_accuracy, k=3)` as the metric.

    Raises:
        ValueError: as in `accuracy`.
    """
    return _top_k(pred, target, k, axis, facts=LossFacts(loss_func))[0]


def _accuracy(pred: Any, target: Any, axis: int | None = None, *, facts: LossFacts) -> tuple[Tensor, Tensor]:
    decoded, classes = decoded_pair(pred, target, axis, facts, "accuracy")
    return _share(decoded.flatten() == classes.flatten(), classes, facts)


def decoded_pair(pred: Any, target: Tensor, axis: int | None, facts: LossFacts, metric: str) -> tuple[Tensor, Tensor]:
    "Return predictions and targets as class numbers, or both as booleans."
    decoded = _decoded(pred, target, facts) if axis is None else None
    if decoded is None:
        dim = _class_dim(pred, target, axis, facts, metric)
        return pred.argmax(dim), target
    # The targets of a binary cross-entropy are floats.
    return decoded, target > 0.5 if decoded.dtype == torch.bool else target


def _error_rate(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    share, count = _accuracy(*args, **kwargs)
    return 1 - share, count


def _top_k(pred: Any, target: Any, k: int = 5, axis: int | None = None, *, facts: LossFacts) -> tuple[Tensor, Tensor]:
    dim = _class_dim(pred, target, axis, facts, "top_k_accuracy")
    best = pred.topk(min(k, pred.shape[dim]), dim=dim).indices.movedim(dim, -1)
    return _share((best == target.reshape(*best.shape[:-1], 1)).any(-1).flatten(), target, facts)


SHARES: dict[Callable, Callable[..., tuple[Tensor, Tensor]]] = {
    accuracy: _accuracy,
    error_rate: _error_rate,
    top_k_accuracy: _top_k,
}
"""The metrics that are shares of the targets that count, each with a function that returns the share and the count."""


def _share(right: Tensor, target: Tensor, facts: LossFacts) -> tuple[Tensor, Tensor]:
    "Return the share of right ones among the targets that count, and the number of these, on the device."
    counted = counts(target, facts.ignored).flatten()
    count = counted.sum()
    return wide((right & counted).sum()) / count, count


def counts(target: Tensor, ignored: Any) -> Tensor:
    "Return a mask of the targets that count: those that are not negative and that the loss does not ignore."
    target = class_numbers(target)
    counted = target >= 0
    if ignored is not None and not (isinstance(ignored, int) and ignored < 0):  # as torch's -100 is
        counted &= target != ignored
    return counted


def _decoded(pred: Any, target: Tensor, facts: LossFacts) -> Tensor | None:
    "Decode predictions as the loss does; `None` unless that gives one class, or yes or no, for each target."
    decode, is_tensor = facts.decode, isinstance(pred, Tensor)
    if decode is None or not (is_tensor or facts.own):
        return None
    if is_tensor and pred.ndim < 2 and facts.of_classes:
        return None
    if is_tensor and pred.ndim > 2 and facts.hides:  # The shapes say which dimension.
        return None
    decoded = decode(pred)
    if not isinstance(decoded, Tensor) or decoded.is_floating_point() or decoded.numel() != target.numel():
        return None
    return decoded


def _class_dim(pred: Any, target: Tensor, axis: int | None, facts: LossFacts, metric: str) -> int:
    "Return the dimension of the classes in scores; refuse predictions without classes, as far as that is known."
    known = facts.known
    scores = isinstance(pred, Tensor) and pred.ndim > 1 and known != "itself"
    dim = 1 if axis is None else axis
    if scores and axis is None and not facts.in_dim_1:
        dim = class_axis(pred, target, metric)
    if not scores or (pred.shape[dim] == 1 and known != "argmax") or pred.numel() != target.numel() * pred.shape[dim]:
        raise ValueError(
            f"{metric} needs classes, and got predictions: {describe(pred)}; targets: {describe(target)}. It takes "
            "scores of shape (n, classes) for targets of shape (n,). One score for each target is decoded where the "
            "loss says how: nn.BCEWithLogitsLoss() for yes or no, or a loss with a method `decode(pred)`. For numbers "
            "use mae, mse or rmse"
            " (errors.html#decode)"
        )
    return dim


def class_axis(pred: Tensor, target: Tensor, metric: str) -> int:
    """Return the dimension of the classes in scores: 1 or -1."""
    axes = class_axes(pred, target)
    if len(axes) > 1 and pred.shape[1] > 1:
        raise ValueError(
            f"{metric} got scores of shape {tuple(pred.shape)} and targets of shape {tuple(target.shape)}: the classes "
            "may be dimension 1 or the last; say which by the argument axis, 1 or -1, or where the metric has none "
            "(Dice, IoU, those of torchmetrics by name) write an AccumMetric"
        )
    return axes[0] if axes else 1


def mse(pred: Tensor, target: Tensor) -> Tensor:
    """Compute the mean squared error over all elements; both tensors must have the same number of elements."""
    return F.mse_loss(*numbers(pred, target))


def mae(pred: Tensor, target: Tensor) -> Tensor:
    """Compute the mean absolute error over all elements; both tensors must have the same number of elements."""
    return F.l1_loss(*numbers(pred, target))


def numbers(pred: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    "Return both in one shape and type, of at least 32 bits: squares and sums leave the range of half precision."
    pred = in_float32(pred)
    return pred, target.reshape(pred.shape).to(pred.dtype)


def wide(x: Tensor) -> Tensor:
    "Convert to float64 (float32 on MPS, which has no float64), so that a mean does not depend on the batching."
    return x.float() if x.device.type == "mps" else x.double()
