"""The classes of a training set: their sizes, and the weights of samples in the draw and in the loss."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from learnerkit import distributed
from learnerkit.data.batches import loader_len
from learnerkit.data.order import samplers_of
from learnerkit.text import first_few
from learnerkit.values import describe

_RARE = 0.1
"""The share of the samples below which a class is reported, if it is also below half of an equal share."""


def labels_of(dataset: Any) -> Tensor | None:
    """Return the class index of each sample, int64 (n,), where a dataset lists them; no sample is read.

    The class indices are the last tensor of a `TensorDataset`, the second entries of a list of pairs, or `labels` or
    `targets` as in torchvision's datasets.
    """
    if isinstance(dataset, Subset):
        labels = labels_of(dataset.dataset)
        return None if labels is None else labels[torch.as_tensor(dataset.indices, dtype=torch.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [labels_of(part) for part in dataset.datasets]
        return None if any(part is None for part in parts) else torch.cat(cast(list[Tensor], parts))
    if isinstance(dataset, TensorDataset):
        listed: Any = dataset.tensors[-1] if len(dataset.tensors) > 1 else None
    elif isinstance(dataset, list):
        listed = [sample[1] for sample in dataset if isinstance(sample, tuple) and len(sample) == 2]
    else:
        listed = getattr(dataset, "labels", getattr(dataset, "targets", None))
        listed = listed.to_list() if hasattr(listed, "to_list") else listed  # a column of a frame
    try:
        labels = torch.as_tensor(listed)
    except (TypeError, ValueError, RuntimeError):  # there may be none; or texts, or lists of several lengths
        return None
    are_classes = labels.ndim == 1 and not labels.is_floating_point() and len(labels) and int(labels.long().min()) >= 0
    return labels.long().cpu() if are_classes and len(labels) == loader_len(dataset) else None


def count_classes(labels: Tensor, names: Sequence | None) -> dict[Any, int]:
    """Return the number of samples of each class, by its name, or by its index if some class has no name of its own."""
    counts = labels.bincount(minlength=len(names or ())).tolist()
    if names is None or len(names) < len(counts) or len(set(names)) < len(names):
        names = range(len(counts))
    return dict(zip(names, counts, strict=True))


def sample_weights(weights: Any, dataset: Any, names: Sequence | None) -> Tensor:
    """Return the weight of each training sample in a random draw, float64 (n,).

    Args:
        weights: 'balanced', a mapping from the name of each class to the weight of its samples, or one for each sample.
        dataset: the training set.
        names: the names of the classes.

    Raises:
        ValueError: the weights are invalid, or the classes are not known.
    """
    # Targets that are counted for nothing may be times or prices, with billions of numbers below the largest.
    labels = labels_of(dataset) if isinstance(weights, str | Mapping) else None
    counts = None if labels is None else count_classes(labels, names)
    given = _numbers("weights", weights, counts, len(dataset), "training samples")
    return given if labels is None else given[labels]


def class_loss(dls: Any, given: Callable | None, default: nn.Module, class_weights: Any) -> Any:
    """Return the loss of a new learner, and report on rank 0 if a class is rare for the default loss.

    Args:
        dls: the learner's loaders.
        given: the user's loss, if there is one.
        default: the loss otherwise.
        class_weights: the weight of each class, as in `sample_weights`, or a sequence in the order of the classes.

    Raises:
        ValueError: the weights do not fit the loss or the loaders.
    """
    is_weighted = any(getattr(sampler, "weights", None) is not None for sampler in samplers_of(dls.train))
    of_classes = given is None and isinstance(default, nn.CrossEntropyLoss)
    counts = dls.class_counts if of_classes else None
    if class_weights is None:
        if counts and not is_weighted:
            _say_rare(counts)
        return given or default
    if not of_classes:
        raise ValueError(
            f"got class_weights= and the loss {describe(given or default)}; class_weights= are those of the default "
            "loss of samples with one class each, nn.CrossEntropyLoss(); give another loss its weights itself"
            " (errors.html#class-weights)"
        )
    if is_weighted and isinstance(class_weights, str):
        raise ValueError(
            "got class_weights='balanced' for loaders that draw by weights= already; take one of them, as both would "
            "count a rare class twice"
        )
    names = dls.classes if counts is None else counts
    numbers = _numbers("class_weights", class_weights, counts, None if names is None else len(names), "classes")
    return nn.CrossEntropyLoss(weight=numbers.to(torch.get_default_dtype()))


def _numbers(name: str, given: Any, counts: dict[Any, int] | None, n: int | None, what: str) -> Tensor:
    """Return the weights of the classes if they are given by class, else `n` weights; float64.

    'balanced' is n_samples / (n_classes * count), as in scikit-learn (King and Zeng, "Logistic Regression in Rare
    Events Data", 2001).
    """
    if isinstance(given, str | Mapping):
        if counts is None:
            raise ValueError(
                f"got {name}={given!r}, and the classes of the training samples are not known, as their dataset lists "
                "no whole numbers as targets; give a dataset of your own an attribute `targets` (or `labels`), the "
                f"number of each sample's class, or give {name}= one number for each of the {what}"
                " (errors.html#class-weights)"
            )
        if isinstance(given, Mapping) and given.keys() != counts.keys():
            raise ValueError(
                f"got {name}= for the classes {first_few(map(repr, given)) or 'none'}; give one weight for each of: "
                f"{first_few(map(repr, counts), n=20)}"
            )
        if given == "balanced":
            given = [sum(counts.values()) / (len(counts) * max(count, 1)) for count in counts.values()]
        elif isinstance(given, Mapping):
            given = [given[key] for key in counts]
        n, what = len(counts), "classes"
    try:
        numbers = torch.as_tensor(given, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.empty(0)
    fits = numbers.ndim == 1 and len(numbers) and n in (None, len(numbers))
    if not fits or not numbers.isfinite().all() or (numbers < 0).any() or not numbers.any():
        raise ValueError(
            f"got {name}={given if isinstance(given, str) else describe(given)}; it is 'balanced', a mapping with a "
            f"weight for each class, or one number for each of the {'' if n is None else f'{n:,} '}{what}, 0 or more, "
            "and not 0 for all"
            " (errors.html#class-weights)"
        )
    return numbers


def _say_rare(counts: dict[Any, int]) -> None:
    total = sum(counts.values())
    rare = [name for name, n in counts.items() if n < total * min(_RARE, 0.5 / len(counts))]
    if not rare or not distributed.is_main():
        return
    name = min(rare, key=counts.__getitem__)
    others = f", and {len(rare) - 1} more below 10 %" if len(rare) > 1 else ""
    print(
        f"class {name!r}: {100 * counts[name] / total:.2g} % of {total:,} samples{others}. weights='balanced' in "
        "dataloaders() draws each class equally often, class_weights='balanced' weighs the loss; metrics='f1' shows "
        "more than accuracy"
    )
