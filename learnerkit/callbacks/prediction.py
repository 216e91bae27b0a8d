"""Collects predictions: what `Learner.get_preds` returns."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from learnerkit.callback import Callback
from learnerkit.data.batches import concat, gather_batches, map_batch
from learnerkit.losses import is_cross_entropy, loss_option, unwrap_partial
from learnerkit.utils import describe


class GatherPredictions(Callback):
    """Keeps what is asked for of every batch on the host, and puts it together at the end, in order.

    Args:
        with_input, with_loss, with_decoded, act, on: as in `Learner.get_preds`.

    Raises:
        ValueError: another `on`.
    """

    order = 50
    run_train = False
    name = "gather_preds"  # as in fastai: loggers and trackers of others ask for it, and let `get_preds` pass

    def __init__(
        self,
        with_input: bool,
        with_loss: bool,
        with_decoded: bool,
        act: Callable[[Tensor], Tensor] | None,
        on: str,
    ) -> None:
        super().__init__()
        if on not in ("all", "rank0"):
            raise ValueError(f"got on={on!r}; predictions come on='all' ranks or on='rank0'")
        self.with_input, self.with_loss, self.with_decoded = with_input, with_loss, with_decoded
        self.act, self._on = act, on
        self.items: tuple = ()
        self._batches: list[tuple[int, dict]] = []

    def before_validate(self) -> None:
        # Refused before the data are read rather than after.
        if self.with_loss:
            self._loss_func = per_sample(self.learn.loss_func)
        if self.with_decoded:
            self._decode = decoder(self.learn.loss_func)

    def after_batch(self) -> None:
        learn = self.learn
        if not learn.batch_size:
            return
        _check_rows(learn.pred, learn.batch_size)
        found = {"preds": learn.pred}
        if self.with_input:
            found["inputs"] = learn.xb
        if learn.yb:
            found["targets"] = learn.yb
        if self.with_loss:
            found["losses"] = self._losses()
        self._batches.append((learn._batch_index, map_batch(lambda t: t.detach().cpu(), found)))

    def _losses(self) -> Tensor:
        learn = self.learn
        if not learn.yb:
            raise ValueError("with_loss=True, but the batches have no targets")
        loss = self._loss_func(learn.pred, *learn.yb)
        # Losses of several elements of a sample are averaged to the sample's.
        return loss if loss.ndim == 1 and len(loss) == learn.batch_size else loss.reshape(learn.batch_size, -1).mean(1)

    def after_validate(self) -> None:
        batches = gather_batches(self._batches, self.learn._sharded, self._on)
        self._batches = []
        if batches is None:
            whole: dict[str, Any] = {}
        elif not batches:
            raise ValueError("there is nothing to predict: the loader gave no batches")
        else:
            whole = concat(batches)
        preds = whole.get("preds")
        wanted = {
            "inputs": _single(whole.get("inputs")) if self.with_input else ...,
            "preds": self.act(preds) if self.act and preds is not None else preds,
            "targets": _single(whole.get("targets")),
            "decoded": (self._decode(preds) if preds is not None else None) if self.with_decoded else ...,
            "losses": whole.get("losses") if self.with_loss else ...,
        }
        self.items = tuple(item for item in wanted.values() if item is not ...)


def _check_rows(pred: Any, size: int) -> None:
    """Refuse a list with an entry for each sample: on several ranks, entry k of all batches would be put together."""
    each = type(pred) is list and len(pred) == size > 1 and all(isinstance(t, Tensor) and t.ndim for t in pred)
    if each and all(len(t) != size for t in pred):
        raise ValueError(
            f"the model returned a list of {size} tensors for {size} samples, and none of them has a row for each; "
            "predictions are a tensor with a row for each sample, or a tuple or dict of such: pad them to one length, "
            "or stack them"
        )


class Augment(Callback):
    """Applies an augmentation to the inputs of every batch; of several inputs, to the first."""

    run_train = False

    def __init__(self, batch_tfms: Callable[[Any], Any]) -> None:
        super().__init__()
        self.batch_tfms = batch_tfms

    def before_batch(self) -> None:
        first, *rest = self.learn.xb
        self.learn.xb = (self.batch_tfms(first), *rest)


def averaged(plain: Tensor, augmented: list[Tensor], beta: float | None, use_max: bool) -> Any:
    """Predictions of one kind (without `beta` of two) out of plain and augmented ones, as `Learner.tta` describes."""
    if not all(isinstance(p, Tensor) for p in (plain, *augmented)):
        raise ValueError(f"tta can average predictions that are tensors; the model's are {describe(plain)}")
    if use_max:
        return torch.stack([plain, *augmented]).amax(0)
    mean = torch.stack(augmented).mean(0)
    return (mean, plain) if beta is None else torch.lerp(mean, plain, beta)


def _single(items: tuple | None) -> Any:
    return items[0] if items is not None and len(items) == 1 else items


def per_sample(loss_func: Any) -> Callable[..., Tensor]:
    """`loss_func` without its reduction.

    Raises:
        ValueError: it takes no `reduction`.
    """
    if hasattr(unwrap_partial(loss_func), "reduction"):

        def losses(*args: Any) -> Tensor:
            module = unwrap_partial(loss_func)
            with ExitStack() as stack:
                stack.callback(setattr, module, "reduction", module.reduction)
                module.reduction = "none"
                return loss_func(*args)

        return losses
    try:
        takes = "reduction" in signature(unwrap_partial(loss_func)).parameters
    except (TypeError, ValueError):
        takes = False
    if not takes:
        raise ValueError(
            f"with_loss=True needs a loss that takes `reduction`, as torch's do; {loss_func!r} does not. "
            "Compute the losses from the predictions and targets instead"
        )
    return partial(loss_func, reduction="none")


def decoder(loss_func: Any) -> Callable[[Tensor], Tensor]:
    """How predictions made for `loss_func` are decoded.

    Raises:
        ValueError: it is not a cross-entropy, and has neither `decode` nor fastai's `decodes`.
    """
    own = loss_option(loss_func, "decode", loss_option(loss_func, "decodes"))
    if callable(own):
        return own
    if is_cross_entropy(loss_func):
        return partial(torch.argmax, dim=1)
    raise ValueError(
        f"with_decoded=True: there is no telling how predictions for {loss_func!r} are decoded; give the loss a "
        "`decode(pred)`, or decode the predictions yourself"
    )
