"""Predictions: collecting them for `Learner.get_preds` and `Learner.predict`, averaging them for `Learner.tta`."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import SubsetRandomSampler

from learnerkit import distributed
from learnerkit.callback import Callback
from learnerkit.data.batches import Rows, concat, gather_batches, on_host, with_rows
from learnerkit.data.order import in_order, samplers_of
from learnerkit.losses import (
    activation_of,
    arguments_of,
    averages_over_targets,
    check_predictions,
    decode_of,
    loss_arguments,
    loss_name,
    loss_option,
    unwrap_partial,
    weighting_of,
)
from learnerkit.marks import collective
from learnerkit.metrics.functions import counts
from learnerkit.state import Learner
from learnerkit.utils import replaced
from learnerkit.values import TensorFunction, describe, entries, is_nested, map_batch, same, with_entries


def whole_dataset(learn: "Learner", ds_idx: int) -> Any:
    """Return a loader of the whole dataset of a learner's loader, in its order; warn if its sampler takes a part."""
    dl: Any = learn.dls[ds_idx]
    for sampler in samplers_of(dl):
        if isinstance(sampler, SubsetRandomSampler) and len(sampler) < len(dl.dataset):
            distributed.warn_once(
                f"all {len(dl.dataset)} samples of the dataset of loader {ds_idx} are predicted, and its "
                f"SubsetRandomSampler takes {len(sampler)} of them: dl=learn.dls[{ds_idx}] predicts those; or give the "
                "loader a torch Subset, which all calls read"
            )
    return in_order(dl, str(ds_idx))


class GatherPredictions(Callback):
    """Keeps the requested items of every batch on the host, and joins them at the end, in dataset order.

    Args:
        with_input, with_loss, with_decoded, act, on: as in `Learner.get_preds`.

    Raises:
        ValueError: another `on`.
    """

    order = 50
    run_train = False
    name = "gather_preds"  # fastai's name: other loggers and trackers look for it, and do nothing in `get_preds`
    of_one_evaluation = True

    def __init__(
        self, with_input: bool, with_loss: bool, with_decoded: bool, act: TensorFunction | None, on: str
    ) -> None:
        if on not in ("all", "rank0"):
            raise ValueError(f"got on={on!r}; predictions come on='all' ranks or on='rank0'")
        self.with_input = with_input
        self.with_loss = with_loss
        self.with_decoded = with_decoded
        self.act, self._on = act, on
        self.items: tuple = ()
        self._batches: list[tuple[int, dict]] = []

    def before_validate(self) -> None:
        # Errors are raised here, before the data are read.
        if self.with_loss:
            self._loss_func = per_sample(self.learn.loss_func)
        if self.with_decoded:
            self._decode = decoder(self.learn.loss_func, self.learn.dls.target_names)

    def after_batch(self) -> None:
        learn = self.learn
        if not learn.batch_size:
            return
        check_predictions(learn)
        pred = learn.pred
        if pred is None:  # the batch was cancelled
            return
        xb = learn.xb
        yb = learn.yb
        if learn.dls.batch_dim != 0:
            pred, xb, yb = learn.dls.samples_first(pred, xb, yb, learn.batch_size)
        items = {"preds": with_rows(pred, learn.batch_size, True)}
        if self.with_input:
            items["inputs"] = tuple(with_rows(x, learn.batch_size) for x in xb)
        if yb:
            items["targets"] = tuple(with_rows(y, learn.batch_size) for y in yb)
        if self.with_loss:
            items["losses"] = self._losses()
        if learn.n_ranks > 1:
            for name, item in items.items():
                _check_rows(name, item, learn.batch_size)
        self._batches.append((learn._batch_index, on_host(items)))

    def _losses(self) -> Tensor:
        learn = self.learn
        if not learn.yb and not weighting_of(learn).alone:
            raise ValueError("with_loss=True, but the batches have no targets")
        yb = learn.yb
        loss = self._loss_func(learn.pred, *yb, **loss_arguments(learn))
        if learn.dls.batch_dim != 0 and loss.shape != (learn.batch_size,):
            loss, _, yb = learn.dls.samples_first(loss, (), yb, learn.batch_size)
        if loss.ndim == 1 and len(loss) == learn.batch_size:
            return loss
        if loss.numel() < learn.batch_size:
            raise _without_reduction(learn.loss_func)
        # A sample that has several losses has their sum, or the mean over the targets that the loss does not ignore.
        rows, y = loss.reshape(learn.batch_size, -1), yb[0] if yb else None
        if loss_option(learn.loss_func, "reduction") in ("sum", "batchmean"):
            return rows.sum(1)
        if averages_over_targets(learn.loss_func) and isinstance(y, Tensor) and y.shape == loss.shape:
            counted = counts(y, loss_option(learn.loss_func, "ignore_index")).reshape(rows.shape)
            return rows.sum(1) / counted.sum(1).clamp(min=1)
        return rows.mean(1)

    @collective
    def after_validate(self) -> None:
        batches = gather_batches(self._batches, self.learn.n_ranks > 1, self._on)
        self._batches = []
        if batches is not None and not batches:
            raise ValueError("there is nothing to predict: the loader gave no batches, or a callback cancelled them")
        joined: dict[str, Any] = concat(batches) if batches else {}  # Without batches, this rank asked for nothing.
        preds = joined.get("preds")
        items = [_single(joined.get("inputs"))] if self.with_input else []
        # Where batches differ in length, there is a tensor for each sample.
        by_row = batches is not None and isinstance(preds, list) and isinstance(batches[0]["preds"], Tensor)
        items += [_applied(self.act, preds, by_row) if self.act else preds, _single(joined.get("targets"))]
        if self.with_decoded:
            items.append(_applied(self._decode, preds, by_row))
        if self.with_loss:
            items.append(joined.get("losses"))
        self.items = tuple(items)


def _applied(function: Callable[[Any], Any], preds: Any, by_row: bool) -> Any:
    """Apply a function of a batch to predictions, or to those of each sample; `None` stays as it is."""
    if by_row:
        return [without_batch(function(row[None])) for row in preds]
    return None if preds is None else function(preds)


def _check_rows(name: str, item: Any, size: int) -> None:
    """Refuse an item with parts that belong to a batch rather than to its samples: other ranks have other batches."""
    lengths = set(_lengths(item))
    if len(lengths) > 1 or 0 in lengths:
        shown = " and ".join(str(n or "no") for n in sorted(lengths))
        raise ValueError(
            f"the {name} of a batch of {size} samples have parts of {shown} rows, and on several ranks only what has "
            "as many rows in all its parts can be joined; "
            + ("leave with_input out" if name == "inputs" else "let the model return only what belongs to samples")
            + " (errors.html#batch-samples)"
        )


def _lengths(item: Any) -> Iterator[int]:
    if isinstance(item, Tensor | Rows):
        yield 0 if isinstance(item, Tensor) and not item.ndim else len(item)
    for _, part in () if isinstance(item, Rows) else entries(item):
        yield from _lengths(part)


class _Fields(NamedTuple):
    label: Any
    decoded: Any
    pred: Any


class Prediction(_Fields):
    """The prediction for one input, without the batch axis, on the host: `label, decoded, pred = ...`.

    Args:
        label: the class's name, or those of several, where the loaders have `classes`; a single number as Python's;
            else `decoded`.
        decoded: the class's number, or a number that is predicted, by the loss; `None` where it is not known how to
            decode.
        pred: the model's raw output, or what `act` or `probs` made of it.
    """

    _raw: Any = None
    _rule: Callable[[Any], Any] | ValueError  # turns the raw output into probabilities; or the error

    @property
    def probs(self) -> Any:
        """The probabilities, as the loss says, whatever `act` was: of each class, or of yes for each score.

        Raises:
            ValueError: the loss does not say how to make them.
        """
        if isinstance(self._rule, ValueError):
            raise self._rule
        return without_batch(self._rule(self._raw))


class KeepPredictions(Callback):
    """Keeps the predictions for a batch of some samples.

    Args:
        n: how many samples.
        act: as in `Learner.predict`.
    """

    order = GatherPredictions.order
    run_train = False
    name = GatherPredictions.name
    of_one_evaluation = True

    def __init__(self, n: int, act: TensorFunction | None) -> None:
        self.n, self.act = n, act
        self.found: list[Prediction] | None = None

    def after_batch(self) -> None:
        check_predictions(self.learn)
        if self.learn.pred is not None:  # The batch may have been cancelled.
            self.found = predicted(self.learn, self.n, self.act)


def predicted(learn: "Learner", n: int, act: TensorFunction | None) -> list[Prediction]:
    """Split `learn.pred` of a batch of `n` samples into a `Prediction` for each; `act`: as in `Learner.predict`."""
    check_predictions(learn)
    names = learn.dls.target_names
    rule = _rule(learn)
    raw = on_host(learn.pred)
    parts = (_decoded(learn.loss_func, raw, names), act(raw) if act else raw, raw)
    predictions = []
    for decoded, pred, one in zip(*(_each(part, n) for part in parts), strict=True):
        decoded = without_batch(decoded)
        prediction = Prediction(labelled(decoded, names), decoded, without_batch(pred))
        prediction._raw, prediction._rule = one, rule
        predictions.append(prediction)
    return predictions


def _each(part: Any, n: int) -> Sequence:
    "Split a model's output for a batch of `n` samples into an output for a batch of one for each sample."
    if isinstance(part, np.ndarray) and part.ndim:  # as a function of the user's may return
        part = Rows(part) if part.dtype.kind in "OSU" else torch.from_numpy(part)
    return _split(with_rows(part, n, True), n)


def _split(part: Any, n: int) -> Sequence:
    "Split a part of an output as `_each` does; what has no entry for each sample belongs to all of them."
    if isinstance(part, Tensor) and part.ndim and len(part) == n:
        return part.split(1)
    if isinstance(part, Rows):
        return [[entry] for entry in part]
    if is_nested(part) and not isinstance(part, PackedSequence):
        columns = {key: _split(value, n) for key, value in entries(part)}
        return [with_entries(part, {key: column[i] for key, column in columns.items()}) for i in range(n)]
    return [part] * n


def activation_for(learn: "Learner", act: TensorFunction | None, probs: bool) -> Callable[[Any], Any] | None:
    """Return the function to apply to predictions: `act`, or with `probs` the one that turns them into probabilities.

    Raises:
        ValueError: both are asked for, or nothing says how to make probabilities.
    """
    if not probs:
        return act
    if act is not None:
        raise ValueError(
            f"got act={act!r} and probs=True, which stands for the loss's own activation; give one of them"
        )
    rule = _rule(learn)
    if isinstance(rule, ValueError):
        raise rule
    return rule


def _rule(learn: "Learner") -> Callable[[Any], Any] | ValueError:
    "Return the function that turns a learner's predictions into probabilities, or the error if there is none."
    loss_func, names = learn.loss_func, learn.dls.target_names
    if loss_func is None and names is not None:
        return partial(_of_own_loss, names=names)
    return activation_of(loss_func) or _refusal(loss_func)


def _of_own_loss(pred: Any, names: Any) -> Tensor:
    dim = _class_dim(pred, names)
    if dim is None:
        raise _refusal(None)
    return torch.softmax(pred, dim)


def _refusal(loss_func: Any) -> ValueError:
    loss = "the model's" if loss_func is None else loss_name(loss_func)
    return ValueError(
        f"it is not known how to make probabilities of predictions for this loss ({loss}); say act=, such as "
        "torch.sigmoid or partial(torch.softmax, dim=1), or give the loss a method `activation(pred)`"
        " (errors.html#decode)"
    )


def _class_dim(pred: Any, names: Any) -> int | None:
    "Return the dimension of the classes in predictions of a model that makes its own loss; `None` where it has none."
    if not isinstance(pred, Tensor) or pred.ndim < 2 or names is None:
        return None
    if callable(names):
        return -1  # These are tokens, whose scores models of transformers have in the last dimension.
    # The loss is over classes if a dimension has their number; the classes of tokens are in the last one.
    dims = [dim for dim in {1, pred.ndim - 1} if pred.shape[dim] == len(names)]
    return dims[0] if len(dims) == 1 else None


def _decoded(loss_func: Any, pred: Any, names: Any) -> Any:
    if loss_func is None:
        dim = _class_dim(pred, names)
        return None if dim is None else pred.argmax(dim)
    decode = decode_of(loss_func)
    return None if decode is None else decode(pred)


def without_batch(part: Any) -> Any:
    """Remove the batch axis from a model's output for a batch of one sample."""
    if isinstance(part, list) and len(part) == 1 and not isinstance(part[0], Tensor):
        return part[0]  # Detectors return a list with an entry for each sample.
    return map_batch(lambda t: t[0] if t.ndim and len(t) == 1 else t, part)


def labelled(decoded: Any, classes: Any) -> Any:
    """Return the class names of a decoded prediction; without names, a Python number or `decoded` itself.

    Args:
        decoded: of one sample: the number of a class, a mask over all of them, or yes or no where there are two.
        classes: the names, or a function of `decoded` that returns one, or `None`.
    """
    if not isinstance(decoded, Tensor):
        return decoded
    if callable(classes):
        return classes(decoded)
    if classes is None or decoded.is_floating_point():
        return decoded.item() if decoded.numel() == 1 else decoded
    if decoded.dtype == torch.bool:
        if decoded.shape == (len(classes),):
            return [name for name, is_there in zip(classes, decoded, strict=True) if is_there]
        return classes[int(decoded)] if decoded.numel() == 1 and len(classes) == 2 else decoded
    if decoded.ndim:
        return decoded
    if int(decoded) < 0:
        return int(decoded)  # A loss's own `decode` may say so that there is no class.
    if int(decoded) >= len(classes):
        raise ValueError(
            f"the model predicts class {int(decoded)}, and there are {len(classes)} names: give "
            "DataLoaders(classes=[...]) one for each of its outputs"
        )
    return classes[int(decoded)]


def averaged(plain_reading: tuple, readings: list[tuple], beta: float | None, use_max: bool) -> Any:
    """Combine plain and augmented predictions as `Learner.tta` describes; without `beta` return a pair.

    Args:
        plain_reading: the predictions and targets of the dataset.
        readings: those of each augmented reading.
        beta, use_max: as in `Learner.tta`.

    Raises:
        ValueError: predictions that are not tensors or have no mean, or readings with other targets.
    """
    (plain, targets), augmented = plain_reading, [preds for preds, _ in readings]
    if not all(same(targets, others) for _, others in readings):
        raise ValueError(
            "tta averages readings of the same samples in the same order, and the targets of one differ: give dl= a "
            "loader of that dataset that does not shuffle; other samples need batch_tfms= beside dl="
        )
    if not all(isinstance(p, Tensor) for p in (plain, *augmented)):
        raise ValueError(f"tta can average predictions that are tensors; the model's are {describe(plain)}")
    if not (use_max or plain.is_floating_point() or plain.is_complex()):
        raise ValueError(
            f"tta can average scores, and act= returns {describe(plain)}: let it return scores or probabilities, and "
            "decode their average"
        )
    if use_max:
        return torch.stack([plain, *augmented]).amax(0)
    mean = torch.stack(augmented).mean(0)
    return (mean, plain) if beta is None else torch.lerp(mean, plain, beta)


def _single(items: tuple | None) -> Any:
    return items[0] if items is not None and len(items) == 1 else items


def per_sample(loss_func: Any) -> Callable[..., Tensor]:
    """Return `loss_func` with reduction='none'.

    Raises:
        ValueError: it does not take `reduction`.
    """
    inner = unwrap_partial(loss_func)
    if hasattr(inner, "reduction"):

        def losses(*args: Any, **kwargs: Any) -> Tensor:
            with replaced(inner, reduction="none"):
                return loss_func(*args, **kwargs)

        return losses
    if "reduction" not in arguments_of(inner):
        raise _without_reduction(loss_func)
    return partial(loss_func, reduction="none")


def _without_reduction(loss_func: Any) -> ValueError:
    return ValueError(
        f"with_loss=True needs a loss that takes `reduction`, as torch's do; {loss_name(loss_func)} does not. "
        "Compute the losses from the predictions and targets instead"
    )


def decoder(loss_func: Any, names: Any = None) -> Callable[[Any], Any]:
    """Return the function that decodes predictions made for `loss_func`.

    Args:
        loss_func: the loss; `None`: the model's own.
        names: the names of the classes, or `None`; their number shows where the classes of a model's own loss are.

    Raises:
        ValueError: the loss is none of torch's for classes or numbers, and has neither `decode` nor fastai's `decodes`.
            So does the function, of predictions in which it cannot tell the classes of a model's own loss.
    """
    if (decode := decode_of(loss_func)) is not None:
        return decode
    unknown = ValueError(
        f"with_decoded=True: it is not known how to decode predictions for {loss_name(loss_func)}; give the loss a "
        "method `decode(pred)`, or decode the predictions yourself"
    )
    if loss_func is not None or names is None:
        raise unknown

    def by_names(pred: Any) -> Any:
        decoded = _decoded(None, pred, names)
        if decoded is None:
            raise unknown
        return decoded

    return by_names
