"""Metrics that are functions: means over samples."""

from torch import Tensor
from torch.nn import functional as F

from learnerkit.losses import class_axes


def accuracy(pred: Tensor, target: Tensor, axis: int | None = None) -> Tensor:
    """Share of samples whose class with the largest score is the target.

    Args:
        pred: scores of shape (n, classes, ...), or of a language model (n, t, vocabulary).
        target: classes of shape (n, ...) or (n, 1, ...).
        axis: the dimension of the classes; by default 1 or the last, whichever fits the shape of the targets.

    Raises:
        ValueError: no `axis`, and both dimension 1 and the last may be the classes.
    """
    axis = class_axis(pred, target, "accuracy") if axis is None else axis
    return wide(pred.argmax(dim=axis).flatten() == target.flatten()).mean()


def error_rate(pred: Tensor, target: Tensor, axis: int | None = None) -> Tensor:
    """1 - `accuracy`."""
    return 1 - accuracy(pred, target, axis)


def class_axis(pred: Tensor, target: Tensor, metric: str) -> int:
    """Return the dimension of the classes in scores: 1 or -1."""
    axes = class_axes(pred, target)
    if len(axes) > 1 and pred.shape[1] > 1:
        raise ValueError(
            f"{metric} got scores of shape {tuple(pred.shape)} and targets of shape {tuple(target.shape)}: the classes "
            "may be dimension 1 or the last; say which by the argument axis, 1 or -1"
        )
    return axes[0] if axes else 1


def top_k_accuracy(pred: Tensor, target: Tensor, k: int = 5) -> Tensor:
    """Share of samples whose target is among the `k` largest scores.

    Args:
        pred: scores of shape (n, classes).
        target: classes of shape (n,).
        k: how many scores; for another number use `partial(top_k_accuracy, k=3)` as the metric.
    """
    best = pred.topk(min(k, pred.shape[1]), dim=1).indices
    return wide((best == target.reshape(-1, 1)).any(dim=1)).mean()


def mse(pred: Tensor, target: Tensor) -> Tensor:
    """Mean squared error over all elements; both tensors must have the same number of elements."""
    return F.mse_loss(pred.flatten(), target.flatten().to(pred.dtype))


def mae(pred: Tensor, target: Tensor) -> Tensor:
    """Mean absolute error over all elements; both tensors must have the same number of elements."""
    return F.l1_loss(pred.flatten(), target.flatten().to(pred.dtype))


def wide(x: Tensor) -> Tensor:
    "Convert to float64 (float32 on MPS, which has no float64), so that a mean does not depend on the batching."
    return x.float() if x.device.type == "mps" else x.double()
