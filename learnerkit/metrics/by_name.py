"""Metrics by name: those of this package, and those of torchmetrics that fit the learner's loss and classes."""

import math
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from learnerkit.losses import (
    ACTIVATIONS,
    DECODINGS,
    OwnLoss,
    class_numbers,
    has_classes_in_dim_1,
    loss_name,
    loss_option,
    rules,
)
from learnerkit.metrics.functions import (
    accuracy,
    accuracy_multi,
    class_axis,
    error_rate,
    mae,
    mse,
    top_k_accuracy,
    wide,
)
from learnerkit.metrics.objects import perplexity, rmse
from learnerkit.text import did_you_mean
from learnerkit.utils import listify
from learnerkit.values import describe

_FUNCTIONS = (accuracy, accuracy_multi, error_rate, mae, mse, perplexity, rmse, top_k_accuracy)
OWN: dict[str, Any] = {metric.__name__: metric for metric in _FUNCTIONS}
"""The metrics of this package by name."""

_CLASSES = {"auc": "AUROC", "f1": "F1Score", "precision": "Precision", "r2": "R2Score", "recall": "Recall"}
"""The classes of torchmetrics by name; before that of a class there stands its task."""

_OF_PROBABILITIES = ("auc",)  # all others take decoded predictions

_TASKS = {"argmax": "Multiclass", "above 0": "Binary", "above 0.5": "Binary", "itself": ""}
"""The names of tasks in torchmetrics, by how predictions are decoded."""


def _of_classes_that_occur(kind: Any) -> Any:
    """Return a class of torchmetrics' whose value is the mean over the classes that have positive and negative samples.

    Others have no curve. torchmetrics warns of each, and counts the area under it as 0.
    """

    class OfClassesThatOccur(kind):
        def compute(self) -> Tensor:
            if not any(target.numel() for target in listify(self.target)):
                return torch.tensor(math.nan)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="No (positive|negative) samples in targets")
                values: Tensor = super().compute()
            target = torch.cat(listify(self.target))
            by_class = target.ndim > 1 or not values.ndim  # Yes or no has one curve.
            is_class = target == 1 if by_class else F.one_hot(target, len(values)) == 1
            return values[is_class.any(0) & ~is_class.all(0)].mean()

    return OfClassesThatOccur


def _of_targets_that_count(kind: Any) -> Any:
    """Return a class of torchmetrics' whose value is NaN, rather than 0, where all targets are ignored."""

    class OfTargetsThatCount(kind):
        def compute(self) -> Tensor:
            counted = (self.tp + self.fp + self.tn + self.fn).any()
            return super().compute() if counted else torch.tensor(math.nan)

    return OfTargetsThatCount


def _of_any_unit(kind: Any) -> Any:
    """Return torchmetrics' R2Score with a value that does not depend on the unit of the targets; NaN of fewer than two.

    torchmetrics takes sums of squares up to 1e-4 for 0, and would call every prediction of small numbers perfect.
    """

    class OfAnyUnit(kind):
        def compute(self) -> Tensor:
            if self.total < 2:
                return torch.tensor(math.nan)
            spread = self.sum_squared_error - self.sum_error * (self.sum_error / self.total)
            # The spread of equal targets is no more than rounding. Their value is that of scikit-learn.
            is_constant = spread <= 100 * torch.finfo(spread.dtype).eps * self.sum_squared_error
            missed = torch.where(is_constant, (self.residual > 0).to(spread.dtype), self.residual / spread)
            return 1 - missed.mean()

    return OfAnyUnit


class OfTorchmetrics:
    """A metric of torchmetrics by its name. Several classes or labels have the mean of their values ("macro").

    Args:
        name: its name.
        loss_func: the loss, which says how predictions are decoded; `None`: the model's own, over the classes.
        classes: the names of the classes or labels, or `None`.
        targets: "classes" if a sample may have several labels, as `DataLoaders.targets` has it.

    Attributes:
        metric: the object.

    Raises:
        ImportError: torchmetrics is not installed.
        ValueError: there is no such metric, or loss and classes do not say what it must know.
    """

    def __init__(self, name: str, loss_func: Any, classes: Any, targets: str | None = None) -> None:
        if name not in _CLASSES:
            names = sorted([*OWN, *_CLASSES])
            near = did_you_mean(name, names) or f"; the names are {', '.join(names)}"
            raise ValueError(f"got the metric {name!r}{near}")
        try:
            from torchmetrics import classification, regression
        except ImportError as e:
            raise ImportError(f"the metric {name!r} is one of torchmetrics: pip install torchmetrics") from e
        n = len(classes or ())
        is_of_model = isinstance(loss_func, OwnLoss | None)
        decodes, activates = ("argmax", "softmax") if is_of_model and n else rules(loss_func)
        task = _TASKS.get(str(decodes))
        if task == "Binary" and (n > 2 or targets == "classes"):
            task = "Multilabel"
        if task is None or (task == "Multiclass" and not n) or (task == "") != (name == "r2"):
            loss = "the model's loss" if is_of_model else loss_name(loss_func)
            named = "give DataLoaders(classes=[...]) the names, or " if name != "r2" and not n else ""
            of_classes = f"classification.Multiclass{_CLASSES[name]}(num_classes=10)"
            line = "regression.R2Score()" if name == "r2" else of_classes
            raise ValueError(
                f"the metric {name!r} does not know its task by {loss} and {n or 'no'} names of classes: {named}take "
                f"an object of torchmetrics, such as torchmetrics.{line}"
            )
        options = {
            "Multiclass": {
                "num_classes": n,
                "average": "macro",
                "ignore_index": loss_option(loss_func, "ignore_index", -100),
            },
            "Multilabel": {"num_labels": n, "average": "macro"},
        }
        self._name, self._task, self._n = name, task, n
        self._is_in_dim_1 = has_classes_in_dim_1(loss_func)
        self._rule = ACTIVATIONS[str(activates)] if name in _OF_PROBABILITIES else DECODINGS[str(decodes)]
        kind = getattr(classification if task else regression, task + _CLASSES[name])
        if name == "auc":
            kind = _of_classes_that_occur(kind)
            options.get(task, {})["average"] = "none"
        else:
            kind = _of_targets_that_count(kind) if task else _of_any_unit(kind)
        self.metric = kind(**options.get(task, {}))

    def given(self, pred: Tensor, target: Tensor) -> tuple[Tensor, tuple[Tensor]]:
        """Turn a batch's predictions and targets into the arguments of the metric's `update`.

        Raises:
            ValueError: several scores for each sample, and no names of what they are, or fewer; or targets that are not
                one class for each.
        """
        if self._task == "Binary" and pred.ndim > 1 and pred.shape[1] > 1:
            raise ValueError(
                f"the metric {self._name!r} takes one score for each sample, its yes or no, and got {describe(pred)}: "
                "give DataLoaders(classes=[...]) the names of the labels, if there are three or more, or take "
                f"torchmetrics.classification.Multilabel{_CLASSES[self._name]}(num_labels=...)"
            )
        self.metric.to(pred.device)
        if self._task == "Multiclass" and not self._is_in_dim_1:
            pred = pred.movedim(class_axis(pred, target, self._name), 1)
        pred = pred.detach()
        # In float32 all probabilities of scores above 17 are 1, and their order, which the area is about, is lost.
        made = self._rule(wide(pred) if self._name in _OF_PROBABILITIES else pred)
        if self._task == "Multiclass":
            if pred.shape[1] > self._n:  # torchmetrics would count one pair of classes as another
                raise ValueError(
                    f"the metric {self._name!r} is of the {self._n} classes that DataLoaders(classes=[...]) names, and "
                    f"the predictions have {pred.shape[1]}: name all of them"
                )
            if target.numel() * pred.shape[1] != pred.numel():
                raise ValueError(
                    f"the metric {self._name!r} takes the number of a class for each sample, and got targets that are "
                    f"{describe(target)}; of one value for each class argmax(1) makes the number"
                )
            return made, (class_numbers(target).reshape(len(pred), *pred.shape[2:]),)
        if self._task == "":  # the columns of a table are several outputs, each with its own mean
            n_outputs, made = made.shape[1] if made.ndim == 2 else 1, wide(made)
            self.metric.set_dtype(made.dtype)  # It takes the difference of sums of squares.
            return made.reshape(-1, n_outputs), (wide(target).reshape(-1, n_outputs),)
        return made, ((target > 0.5).long().reshape(pred.shape),)
