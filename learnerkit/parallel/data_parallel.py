"""The `nn.DataParallel` of a fit, with the loss computed where the predictions are."""

import copy
import inspect
from collections.abc import Callable, MutableMapping
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from learnerkit import distributed
from learnerkit.callback import Callback, readers_of_predictions
from learnerkit.data.batches import in_float32, rows_of, to_device
from learnerkit.events import Event
from learnerkit.losses import (
    LossWeight,
    check_shapes,
    counts_predictions,
    is_scalar,
    loss_option,
    loss_parts,
    no_scalar,
    own_loss,
    pred_of,
    unwrap_partial,
)
from learnerkit.text import first_few
from learnerkit.utils import add_note_once, overrides, spanned_devices, unwrap
from learnerkit.values import describe, map_batch, tensors_in


class DataParallelCallback(Callback):
    """Splits every batch over several GPUs of this process; the model is wrapped only while something runs.

    `ParallelCallback` is another name of it.

    With fewer than two GPUs it says so once and leaves the model on its device.

    In training each replica computes the loss of its own part, and the exact mean (or sum) over the batch is computed
    from those losses. Predictions then stay on the replicas, and `learn.pred` and `learn.output` are `None`, unless
    something may read them: metrics on training batches, or a callback of your own with a hook for an event of the
    batch after `before_batch`. Validation and `get_preds` always gather them.

    The loss is computed from gathered predictions, on the first GPU, where it cannot be split: where a callback has a
    hook for `after_pred` and so may change predictions or targets, in a Learner that overrides `_forward` or `_loss`,
    with targets that are not tensors of one entry per sample, with class weights of zero, where the loss asks for
    attributes of the learner, and where it uses tensors that do not move with it (it is a bound method or an object, or
    it refers to a tensor or to a module with weights).

    Args:
        device_ids: the GPUs to use; by default all.
        loss_on_replicas: set it to False for a loss that is not a mean or sum of items (one that compares the samples
            of a batch with each other, say), or that keeps its own state.

    Raises:
        ValueError: a GPU that is not there, or one twice; when a fit begins, a model that spans several devices, or a
            `loss_weight` for each of several losses.
    """

    def __init__(self, device_ids: list[int] | None = None, loss_on_replicas: bool = True) -> None:
        if device_ids is not None and len(set(device_ids)) < len(device_ids):
            raise ValueError(f"got device_ids={device_ids}; each GPU can be used once")
        self.device_ids, self.loss_on_replicas = device_ids, loss_on_replicas
        self._whole: Any = None
        # Targets for the loss on the replicas; whether the output is kept.
        self._asked: tuple[tuple | None, bool] | None = None

    @property
    def name(self) -> str:
        """The attribute of the learner, which `to_parallel` and `parallel_ctx` are named like."""
        return "parallel"

    def before_fit(self) -> None:
        learn = self.learn
        if devices := spanned_devices(learn.model):
            raise ValueError(
                f"the model spans {first_few(devices)}, and DataParallel would put a whole copy of it on each GPU; "
                "train it as it is, or by distrib_ctx, where each process has such a model on devices of its own"
            )
        count = torch.cuda.device_count()
        ids = list(range(count) if self.device_ids is None else self.device_ids)
        if count >= 2 and max(ids, default=0) >= count:
            raise ValueError(f"got device_ids={ids}; this machine has the GPUs 0 to {count - 1}")
        if not can_split(learn.dls.device, ids):
            distributed.warn_once(
                f"DataParallel needs two GPUs and there {'is' if count == 1 else 'are'} {count}: "
                f"training on {learn.dls.device} alone"
            )
            return
        weighting = learn._loss_weighting
        if weighting.parts:
            raise ValueError(
                "DataParallelCallback cannot weigh the parts of a loss each by itself, as loss_weight= says: give one "
                "loss_weight for the whole loss, or use distrib_ctx"
            )
        # The model's own device must come first: DataParallel gathers there.
        ids.sort(key=lambda i: i != (learn.dls.device.index or 0))
        self._whole, model = learn.model, unwrap(learn.model)
        own_seams = overrides(learn, "_forward", "_loss")
        # The attributes that a loss asks for exist once, not for each replica.
        takes = self.loss_on_replicas and not (own_seams or weighting.asks) and can_replicate(learn.loss_func)
        self._loss_func = learn.loss_func if takes else None
        replicas = nn.DataParallel(_Replica(model, self._loss_func), device_ids=ids)
        learn.model = look_through(model, partial(self._call, replicas), ids)
        if not own_seams:
            vars(learn).update(_forward=self._forward, _loss=self._loss)

    def cleanup_fit(self) -> None:
        if self._whole is not None:
            self.learn.model, self._whole = self._whole, None
            for seam in ("_forward", "_loss"):
                vars(self.learn).pop(seam, None)

    def _call(self, replicas: nn.DataParallel, *args: Any, **kwargs: Any) -> Any:
        """Call the model on all devices: for a batch of the loop as `_ask` has chosen, else for the output alone."""
        learn, (targets, keep) = self.learn, self._asked or (None, True)
        kind = learn.dls.device.type
        autocast = kind, torch.get_autocast_dtype(kind)
        weighting = learn._loss_weighting
        losses, counts, output = replicas(args, kwargs, targets, keep, weighting, autocast)
        if losses is None:
            return output
        if counts is not None:
            shares = (counts / counts.sum()).to(losses.dtype)
            losses = torch.where(shares > 0, losses, 0.0) * shares  # the loss of a part that counts nothing may be NaN
        if keep and learn.loss_func is None:
            entries = dict.fromkeys(weighting.entries, None if counts is None else counts.sum())
            return _with(output, losses.sum(), entries)  # a callback may change it before `_loss` reads it
        self._taken: Tensor | None = losses.sum()
        return output

    # Replacements of two methods of the Learner's loop

    def _forward(self) -> None:
        learn = self.learn
        self._taken = None
        try:
            if isinstance(learn.model, nn.DataParallel):  # otherwise a callback has replaced the model
                self._ask()
            type(learn)._forward(learn)
        finally:
            self._asked = None

    def _ask(self) -> None:
        """Choose what the replicas compute for the batch: the loss if they can, the output if something reads it."""
        learn = self.learn
        if any(t.ndim and len(t) != learn.batch_size for t in tensors_in(learn.xb)):
            raise ValueError(
                f"DataParallel cuts every input along its first dimension, and those of this batch of "
                f"{learn.batch_size} samples are {describe(learn.xb)}; give each a row for each sample, keep what all "
                "samples share in the model, or use distrib_ctx, where every process collates its own samples"
            )
        read = readers_of_predictions(learn)
        takes = (
            learn.loss_func is None
            or (
                learn.training
                and learn.loss_func is self._loss_func  # a callback may have replaced it
                and Event.after_pred not in read  # such a callback may change predictions or targets
                and learn.yb
                and all(isinstance(y, Tensor) and y.shape[:1] == (learn.batch_size,) for y in learn.yb)
            )
        )
        keeps = not (takes and learn.training) or counts_predictions(learn) or bool(read)
        self._asked = learn.yb if takes else None, keeps

    def _loss(self) -> None:
        learn = self.learn
        if self._taken is None:
            type(learn)._loss(learn)
        else:
            learn.loss_grad, learn.loss = self._taken, self._taken.detach()


ParallelCallback = DataParallelCallback  # a second name, which stays


class _Replica(nn.Module):
    """The module that DataParallel replicates: the model and the loss, called on one part of a batch."""

    def __init__(self, model: nn.Module, loss_func: Any) -> None:
        super().__init__()
        self.model = model
        self.loss_func: Any = unwrap(loss_func)  # replicas of a compiled module would call the compiled original

    def forward(
        self, args: tuple, kwargs: dict, targets: tuple | None, keep: bool, weighting: LossWeight, autocast: tuple
    ) -> tuple[Tensor | None, Tensor | None, Any]:
        """Return the loss and its count, both of shape (1,), and the output; `None` stands for what is not needed."""
        # DataParallel's threads start with the default dtype, not with the caller's.
        torch.set_autocast_dtype(*autocast)
        output = self.model(*args, **weighting.passed(targets or ()) | kwargs)
        if targets is None:
            return None, None, output
        own, entries = self.loss_func is None, weighting.entries
        pred = pred_of(output, own)
        loss = own_loss(output, entries) if own else self._loss(pred, targets)
        if own and loss is None:
            return None, None, output
        if not isinstance(loss, Tensor) or loss.ndim:
            raise no_scalar(loss)
        counts = None
        if not weighting.sums:
            count = weighting.count(targets, rows_of((args, kwargs)), pred, output)
            # A product is used because copying a number to the device would make the host wait.
            counts = loss.new_ones(1, dtype=torch.float64) * count
        if own and keep:
            # Entries of a part of the batch are useless: DataParallel would concatenate them into vectors.
            output = _with({} if loss_parts(output, entries) else output, None, dict.fromkeys(entries))
        return loss.reshape(1), counts, output if keep else None

    def _loss(self, pred: Any, targets: tuple) -> Any:
        pred = map_batch(in_float32, pred)  # MixedPrecision does the same
        check_shapes(self.loss_func, pred, targets)
        loss_func = self.loss_func
        if isinstance(loss_func, partial):  # its tensors do not move with the module
            args, keywords = to_device((loss_func.args, loss_func.keywords), targets[0].device)
            loss_func = partial(loss_func.func, *args, **keywords)
        try:
            return loss_func(pred, *targets)
        except Exception as e:
            got = f"the loss got predictions: {describe(pred)}; targets: {describe(targets)}"
            add_note_once(
                e, f"{got} (on a replica; DataParallelCallback(loss_on_replicas=False) computes it on one GPU)"
            )
            raise


_SPECIAL = ("__len__", "__getitem__", "__setitem__", "__iter__", "__contains__", "__bool__")
"""Methods that Python looks up on the class; the wrapper gets those that the wrapped module has."""


def look_through(module: nn.Module, call: Callable[..., Any], device_ids: list[int]) -> Any:
    """Return a `DataParallel` that is called through `call` and otherwise behaves like the wrapped module.

    Callbacks so see the same model as on one device. A method that returns the module returns the wrapper.
    """
    own = {"module": module, "device_ids": device_ids, "__deepcopy__": partial(copy.deepcopy, module)}

    def get(wrapper: nn.DataParallel, name: str) -> Any:
        attribute = own[name] if name in own else getattr(module, name)
        if not inspect.ismethod(attribute):
            return attribute

        @wraps(attribute)
        def method(*args: Any, **kwargs: Any) -> Any:
            result = attribute(*args, **kwargs)
            return wrapper if result is module else result

        return method

    special = {name: getattr(module, name) for name in _SPECIAL if hasattr(type(module), name)}
    special |= {
        "__getattribute__": get, "__getattr__": get, "__setattr__": module.__setattr__,
        "__delattr__": module.__delattr__, "__call__": staticmethod(call),
    }  # fmt: skip
    return object.__new__(type("DataParallel", (nn.DataParallel,), special))  # it needs no attributes


def can_split(device: torch.device, ids: list[int]) -> bool:
    """Tell whether a batch on `device` can be split over the GPUs `ids`."""
    return device.type == "cuda" and min(torch.cuda.device_count(), len(ids)) >= 2


def can_replicate(loss_func: Any) -> bool:
    """Tell whether a loss can be computed on parts of a batch, each on its own device.

    A module moves with its tensors, and so do the arguments of a partial; other tensors that a loss refers to stay
    where they are. A part whose class weights are all zero has an empty mean, whose gradient is NaN.
    """
    inner = unwrap_partial(loss_func)
    if isinstance(loss_func, nn.Module):
        held = [value for module in loss_func.modules() for value in vars(module).values()]
    elif inspect.isfunction(inner):
        variables = inspect.getclosurevars(inner)
        held = [*variables.nonlocals.values(), *variables.globals.values()]
    else:
        return False
    stays = [x for x in held if isinstance(x, Tensor) or (isinstance(x, nn.Module) and [*x.parameters(), *x.buffers()])]
    weight = loss_option(loss_func, "weight")
    return not stays and not (isinstance(weight, Tensor) and (weight == 0).any())


def _with(output: Any, loss: Tensor | None, entries: dict[str, Any]) -> Any:
    """Return a model's output with another loss and other entries by name; an object becomes a dict with them."""
    if output is None or isinstance(output, Tensor):
        return loss
    named = {"loss": loss, **entries}
    if hasattr(output, "_replace"):
        return output._replace(**named)
    if isinstance(output, tuple | list):
        places = [i for i, x in enumerate(output) if is_scalar(x)] or [i for i, x in enumerate(output) if x is None]
        return type(output)(loss if i == places[0] else x for i, x in enumerate(output))
    if isinstance(output, MutableMapping):
        output.update(named)
        return output
    return vars(output) | named  # an object without entries cannot be gathered by DataParallel
