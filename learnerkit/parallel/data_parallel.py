"""`nn.DataParallel` for as long as a fit lasts, with the loss computed where the predictions are."""

import inspect
from collections.abc import Iterable, Mapping, MutableMapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from learnerkit.callback import Callback, is_ours
from learnerkit.data.batches import get_field, in_float32, map_batch, rows_of, tensors_in
from learnerkit.events import INNER_EVENTS, Event
from learnerkit.losses import (
    LossWeight,
    check_shapes,
    is_cross_entropy,
    loss_option,
    no_scalar,
    own_loss,
    unwrap_partial,
)
from learnerkit.parallel.transparent import wrapped
from learnerkit.text import first_few
from learnerkit.utils import add_note_once, describe, spanned_devices, unwrap, warn

_AFTER_PRED = [e for e in INNER_EVENTS if e != Event.before_batch]


class ParallelCallback(Callback):
    """Splits every batch over several GPUs of this process; the model is wrapped only while something runs.

    With fewer than two GPUs it says so once and leaves the model on the device there is.

    In training each replica computes the loss of its own part, and the exact mean (or sum) over the batch is made of
    those numbers. Predictions then stay where they are, and `learn.pred` and `learn.output` are `None`, unless
    something may read them: metrics on training batches, or a callback of your own with a hook for an event of the
    batch after `before_batch`. Validation and `get_preds` always gather them.

    The loss is computed from gathered predictions, on the first GPU, where it cannot be cut up: where a callback has a
    hook for `after_pred` and so may change predictions or targets, in a Learner with a `_forward` or `_loss` of its
    own, with targets that are not tensors of one entry per sample, with class weights of zero, and where the loss uses
    tensors that do not move with it (it is a bound method or an object, or it refers to a tensor or to a module with
    weights).

    Args:
        device_ids: the GPUs to use; by default all.
        loss_on_replicas: set it to False for a loss that is not a mean or sum of items (one that compares the samples
            of a batch with each other, say), or that keeps a state of its own.

    Raises:
        ValueError: a GPU that is not there, or one twice; when a fit begins, a model that spans several devices.
    """

    def __init__(self, device_ids: list[int] | None = None, loss_on_replicas: bool = True) -> None:
        super().__init__()
        if device_ids is not None and len(set(device_ids)) < len(device_ids):
            raise ValueError(f"got device_ids={device_ids}; each GPU can be used once")
        self.device_ids, self.loss_on_replicas = device_ids, loss_on_replicas
        self._said = False
        self._whole: nn.Module | None = None
        self._split: nn.Module | None = None
        self._replicas: Any = None

    def before_fit(self) -> None:
        learn = self.learn
        if devices := spanned_devices(learn.model):
            raise ValueError(
                f"the model spans {first_few(devices)}, and DataParallel would put a whole copy of it on each GPU; "
                "train it as it is, or by distrib_ctx, where each process has such a model on devices of its own"
                " (errors.html#data-parallel)"
            )
        count = torch.cuda.device_count()
        ids = list(range(count)) if self.device_ids is None else list(self.device_ids)
        if count >= 2 and any(i >= count for i in ids):
            raise ValueError(f"got device_ids={ids}; this machine has the GPUs 0 to {count - 1}")
        if not can_split(learn.dls.device, ids):
            if not self._said:
                self._said = True
                warn(
                    f"DataParallel needs two GPUs and there {'is' if count == 1 else 'are'} {count}: "
                    f"training on {learn.dls.device} alone"
                )
            return
        # The model's own device must come first: DataParallel gathers there.
        ids.sort(key=lambda i: i != (learn.dls.device.index or 0))
        self._whole, model = learn.model, unwrap(learn.model)
        learn.model = self._split = wrapped(nn.DataParallel, model, device_ids=ids)
        if not learn._overrides("_forward", "_loss"):
            self._loss_func = learn.loss_func if self.loss_on_replicas and can_replicate(learn.loss_func) else None
            self._replicas = nn.DataParallel(_Replica(model, self._loss_func), device_ids=ids)
            vars(learn).update(_forward=self._forward, _loss=self._loss)

    def cleanup_fit(self) -> None:
        if self._whole is not None:
            learn = self.learn
            learn.model, self._whole = self._whole, None
            for seam in ("_forward", "_loss"):
                learn.__dict__.pop(seam, None)
            self._split = self._replicas = self._loss_func = None

    # In the place of two seams of the Learner's loop

    def _forward(self) -> None:
        learn, self._taken = self.learn, None
        if learn.model is not self._split:  # a callback has put another model there
            type(learn)._forward(learn)
            return
        if any(t.ndim and len(t) != learn.batch_size for t in tensors_in(learn.xb)):
            raise ValueError(
                f"DataParallel cuts every input along its first dimension, and those of this batch of "
                f"{learn.batch_size} samples are {describe(learn.xb)}; give each a row for each sample, keep what all "
                "samples share in the model, or use distrib_ctx, where every process collates its own samples"
                " (errors.html#data-parallel)"
            )
        own = learn.loss_func is None
        take = own or self._can_take()
        keep = not (take and learn.training) or self._wanted()
        inputs: Any = learn.xb
        if type(learn.batch) not in (tuple, list) and isinstance(learn.batch, Mapping):
            inputs = dict(inputs[0])
        kind = learn.dls.device.type
        autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        options = take, keep, learn._loss_weighting, autocast
        losses, counts, output = self._replicas(inputs, learn.yb if take else (), *options)
        loss = None if losses is None else _combine(losses, counts)
        if not own:
            self._taken = loss
        elif loss is not None:
            output = _with_loss(output, loss)
        learn.output = output if keep or own else None
        learn.pred = _pred(output) if keep else None

    def _loss(self) -> None:
        learn = self.learn
        if self._taken is None:
            type(learn)._loss(learn)
        else:
            learn.loss_grad, learn.loss = self._taken, self._taken.detach()

    def _can_take(self) -> bool:
        """Tell whether the replicas can compute the loss: no callback may change predictions or targets before it."""
        learn = self.learn
        return (
            learn.training
            and self._loss_func is not None
            and learn.loss_func is self._loss_func  # a callback may have put another one there
            and all(is_ours(hook) and not _reads(cb) for cb, hook, *_ in learn._dispatch.table["after_pred"])
            and bool(learn.yb)
            and all(isinstance(y, Tensor) and y.ndim > 0 and len(y) == learn.batch_size for y in learn.yb)
        )

    def _wanted(self) -> bool:
        """Tell whether something may read the predictions of this training batch.

        This library's own callbacks say so themselves.
        """
        hooks = [hook for event in _AFTER_PRED for hook in self.learn._dispatch.table[event]]
        counted = self.learn._loss_weighting.takes_output(self.learn.yb)
        return counted or any(not is_ours(hook) or _reads(cb) for cb, hook, *_ in hooks)


class _Replica(nn.Module):
    """The module that DataParallel replicates: the model and the loss, called on one part of a batch."""

    def __init__(self, model: nn.Module, loss_func: Any) -> None:
        super().__init__()
        self.model = model
        # A compiled module's replicas would call the compiled original.
        self.loss_func = unwrap(loss_func) if isinstance(loss_func, nn.Module) else loss_func

    def forward(
        self, inputs: tuple | dict, targets: tuple, take: bool, keep: bool, weighting: LossWeight, autocast: tuple
    ) -> tuple[Tensor | None, Tensor | None, Any]:
        """(loss, what it counts, output): the first two of shape (1,), and `None` for what is not needed."""
        # DataParallel's threads start with autocast's default type, not with the caller's.
        with torch.autocast(*autocast):
            passed = weighting.passed(targets)
            output = self.model(**{**passed, **inputs}) if isinstance(inputs, dict) else self.model(*inputs, **passed)
            loss = self._loss(output, targets) if take else None
        own = self.loss_func is None
        if not take or (own and loss is None):
            return None, None, output
        if not isinstance(loss, Tensor) or loss.ndim:
            raise no_scalar(loss)
        counts = None if weighting.sums else _count(weighting, rows_of(inputs), targets, output, loss, own)
        if own and keep:
            output = _with_loss(output, None)  # the vector of the parts' losses is of no use
        return loss.reshape(1), counts, output if keep else None

    def _loss(self, output: Any, targets: tuple) -> Tensor | None:
        if self.loss_func is None:
            return own_loss(output)
        pred = map_batch(in_float32, _pred(output))  # as MixedPrecision has them
        check_shapes(self.loss_func, pred, targets)
        try:
            return _moved(self.loss_func, targets[0].device)(pred, *targets)
        except Exception as e:
            got = f"the loss got predictions: {describe(pred)}; targets: {describe(targets)}"
            add_note_once(e, f"{got} (on a replica; ParallelCallback(loss_on_replicas=False) computes it on one GPU)")
            raise


def _count(weighting: LossWeight, rows: int, targets: tuple, output: Any, loss: Tensor, own: bool) -> Tensor:
    """The count of the loss of a part of a batch, of shape (1,); `own`: the model has made the loss."""
    pred = _pred(output)
    count = weighting.count(targets, rows, pred, output if own else pred)
    # A product, because to copy a number to the device would make the host wait.
    return torch.ones(1, dtype=torch.float64, device=loss.device) * count


def can_split(device: torch.device, ids: list[int]) -> bool:
    """Tell whether a batch on `device` can be split over the GPUs `ids`."""
    return device.type == "cuda" and min(torch.cuda.device_count(), len(ids)) >= 2


def can_replicate(loss_func: Any) -> bool:
    """Tell whether a loss can be computed on parts of a batch, each on its own device.

    A module moves whole, and so do the arguments of a partial; what else a loss refers to stays where it is. A part in
    which all class weights are zero has the mean of nothing, whose gradient is NaN.
    """
    inner = unwrap_partial(loss_func)
    if isinstance(loss_func, nn.Module):
        held: Iterable = chain.from_iterable(vars(module).values() for module in loss_func.modules())
    elif inspect.isfunction(inner):
        found = inspect.getclosurevars(inner)
        held = [*found.nonlocals.values(), *found.globals.values()]
    else:
        return False
    weight = loss_option(loss_func, "weight") if is_cross_entropy(loss_func) else None
    return not any(map(_has_tensors, held)) and not (isinstance(weight, Tensor) and (weight == 0).any())


def _has_tensors(x: Any) -> bool:
    return isinstance(x, Tensor) or (isinstance(x, nn.Module) and any(True for _ in chain(x.parameters(), x.buffers())))


def _moved(loss_func: Any, device: torch.device) -> Any:
    """A partial with its tensors on `device`; anything else as it is."""
    if not isinstance(loss_func, partial):
        return loss_func
    args, keywords = map_batch(lambda t: t.to(device), (loss_func.args, loss_func.keywords))
    return partial(loss_func.func, *args, **keywords)


def _reads(cb: Callback) -> bool:
    """Tell whether one of this library's callbacks reads the predictions of training batches."""
    return getattr(cb, "train_metrics", False) or getattr(cb, "reads_predictions", False)


def _pred(output: Any) -> Any:
    return output if isinstance(output, Tensor) else get_field(output, "logits", output)


def _with_loss(output: Any, loss: Tensor | None) -> Any:
    """A model's output with another `loss`. Of an object without entries, which DataParallel cannot gather, a dict."""
    if hasattr(output, "_replace"):
        return output._replace(loss=loss)
    if isinstance(output, MutableMapping):
        output["loss"] = loss
        return output
    return {**(vars(output) if output is not None else {}), "loss": loss}


def _combine(losses: Tensor, counts: Tensor | None) -> Tensor:
    """The loss of a batch: the sum of its parts' losses, or their mean weighted by what each counts.

    A part that counts nothing may be the mean of nothing, a NaN, and is left out.
    """
    if counts is None:
        return losses.sum()
    shares = (counts / counts.sum()).to(losses.dtype)
    return (torch.where(shares > 0, losses, 0.0) * shares).sum()
