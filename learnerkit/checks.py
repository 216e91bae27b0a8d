"""Checks at the rim: bad input gets an error that says what was got, what is allowed and what to do."""

import re
import signal
import time
import warnings
from collections.abc import Iterable, Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import UninitializedTensorMixin
from torch.optim import Optimizer

from learnerkit.callback import Callback, check_hooks
from learnerkit.data import DataLoaders, loader_len
from learnerkit.environment import killed_by
from learnerkit.losses import is_one_of, loss_name
from learnerkit.utils import add_note_once, describe

if TYPE_CHECKING:
    from learnerkit.learner import Learner

ELEMENTWISE = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss,
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
)  # fmt: skip
"""Losses that compare predictions and targets element by element."""


def check_count(name: str, value: Any, what: str = "a whole number", least: int = 1) -> None:
    """Refuse what is no whole number, or less than `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"got {name}={value!r}; it is {what}, {least} or more")


def check_positive(name: str, value: Any) -> None:
    """Refuse what is no number above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"got {name}={value!r}; it is a number above 0")


def check_learner(dls: Any, model: Any, loss_func: Any, opt_func: Any) -> None:
    """Refuse arguments of the wrong kind."""
    if not isinstance(dls, DataLoaders):
        raise TypeError(f"dls is a {type(dls).__name__}; pass DataLoaders(train, valid) or DataLoaders.from_datasets")
    if not isinstance(model, nn.Module):
        made = ", not the class" if isinstance(model, type) else ""
        raise TypeError(f"model is {model!r}; pass an nn.Module{made}")
    if loss_func is not None and (not callable(loss_func) or isinstance(loss_func, type)):
        raise TypeError(f"loss_func is {loss_func!r}; pass a function or a module, such as nn.CrossEntropyLoss()")
    if not callable(opt_func):
        raise TypeError(f"opt_func is {opt_func!r}; pass an optimizer class, or a function of (param_groups, lr)")


def check_callback(learn: "Learner", cb: Any) -> None:
    """Refuse what is no callback, or cannot be this learner's."""
    if not isinstance(cb, Callback):
        raise TypeError(f"got the callback {cb!r}; a callback is a Callback, its class, or Callback(after_batch=f)")
    check_hooks(cb)
    if cb in learn.cbs or cb.learn not in (None, learn):
        owner = "this learner already" if cb.learn is learn else "another learner"
        raise ValueError(f"{cb} belongs to {owner}; make another one, or remove it there with remove_cb")
    if not isinstance(getattr(type(learn), cb.name, learn.__dict__.get(cb.name, cb)), Callback):
        raise ValueError(f"{cb} would hide learn.{cb.name}: give its class another name, or a `name` of its own")


def check_fit(learn: "Learner", n_epoch: Any, start_epoch: Any = 0, n_steps: Any = None, who: str = "fit") -> None:
    """Refuse a fit, or what trains as `who`, that cannot run."""
    if learn.task is not None:
        raise RuntimeError(
            f"{who} was called during {learn.task!r}, with whose training its own would mix; a callback may call "
            f"validate, get_preds or lr_find, and {who} can be called before and after"
        )
    if (n_epoch is None) == (n_steps is None):
        raise ValueError(f"got n_epoch={n_epoch!r} and n_steps={n_steps!r}; give one of them: how long to train")
    for name, value in (("n_epoch", n_epoch), ("start_epoch", start_epoch), ("n_steps", n_steps)):
        if value is not None:
            check_count(name, value, least=0)
    if n_steps is not None and start_epoch:
        raise ValueError(f"got start_epoch={start_epoch} and n_steps={n_steps}; they do not go together")
    check_not_empty(learn.dls.train, "the training loader")
    if learn.dls.valid is not None:
        check_not_empty(learn.dls.valid, "the validation loader")


def check_closure(opts: Iterable[Optimizer], own_step: bool) -> None:
    """Refuse an optimizer that evaluates the loss several times in a step, unless the learner has a step of its own."""
    for opt in opts:
        closure = signature(type(opt).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty and not own_step:
            raise TypeError(
                f"{type(opt).__name__} takes a closure that computes loss and gradients anew; override `_step` in a "
                "subclass of Learner, which calls self.opt.step(closure)"
            )


def three(name: str, value: Any) -> tuple[float, float, float]:
    """Three numbers; anything else is refused."""
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise ValueError(f"got {name}={value!r}; it is three numbers: at the start, the peak and the end")
    return tuple(map(float, value))


def check_not_empty(dl: Iterable, name: str) -> None:
    """Refuse a loader that says it has no batches."""
    if loader_len(dl) == 0:
        raise ValueError(f"{name} is empty{_why_empty(dl)}")


def _why_empty(dl: Any) -> str:
    size, bs = loader_len(getattr(dl, "dataset", None)), getattr(dl, "batch_size", None)
    if size and getattr(dl, "drop_last", False):
        return f": {size} samples are less than a batch of {bs}, and drop_last=True; use a smaller batch size"
    return f": its dataset has {size} samples" if size is not None else ": it has no batches"


def explain_lost_worker(error: RuntimeError | OSError | EOFError) -> None:
    """Say by which signal a loader's worker was killed.

    Torch's error has the signal's name, or no more than that the worker is gone; where it was killed while it handed a
    tensor over, the error is just that of the broken connection.
    """
    if isinstance(error, RuntimeError) and not str(error).startswith("DataLoader worker"):
        return
    named = re.search(r"is killed by signal: ([^.]+)\.", str(error))
    found = [s for s in signal.valid_signals() if named and signal.strsignal(s) == named[1]]
    trace = error.__traceback__
    while trace is not None and not found:  # else the loader knows
        found = _killed(getattr(trace.tb_frame.f_locals.get("self"), "_workers", ()))
        trace = trace.tb_next
    if found:
        add_note_once(error, f"the loader worker {killed_by(found[0]).rstrip(',')}")


def _killed(workers: Sequence[Any]) -> list[int]:
    """The signals by which workers were killed, which may be news that arrive a moment after the error."""
    end = time.monotonic() + 0.5
    while True:
        found = [-worker.exitcode for worker in workers if (worker.exitcode or 0) < 0]
        if found or not workers or time.monotonic() > end:
            return found
        time.sleep(0.01)


def explain_lone_sample(learn: "Learner", error: ValueError) -> None:
    """Say why BatchNorm refuses a batch, and what to do."""
    if learn.batch_size == 1 and str(error).startswith("Expected more than 1 value per channel"):
        which = "training" if learn.training else "validation"
        add_note_once(
            error,
            f"batch {learn.iter} of the {which} loader has one sample, of which BatchNorm can make no statistics; "
            "choose another batch size, or leave the last batch out: DataLoaders.from_datasets(..., drop_last=True)",
        )


def check_read(learn: "Learner") -> None:
    """Refuse a loader that turned out to have no batches."""
    if learn.iter < 0 and not learn.sharded:
        name = "training" if learn.training else "validation"
        once = "; an iterator can be read only once: pass a list, a DataLoader or a class with __iter__"
        raise ValueError(
            f"the {name} loader gave no batches in epoch {learn.epoch}{once if not _again(learn.dl) else ''}"
        )


def _again(dl: Any) -> bool:
    return not hasattr(dl, "__next__")


def check_shaped(modules: Iterable[nn.Module]) -> None:
    """Refuse parameters that get their shape from the first batch, before which nothing can be kept of them."""
    for module in modules:
        for name, t in (*module.named_parameters(), *module.named_buffers()):
            if isinstance(t, UninitializedTensorMixin):
                raise ValueError(
                    f"{name} of {type(module).__name__} has no shape until the model has seen a batch (a lazy module): "
                    "show it one first, with learn.validate() or learn.model(x)"
                )


def check_length(dl: Iterable, who: str) -> int:
    """The number of batches, which `who` needs to know."""
    length = loader_len(dl)
    if length is None:
        raise ValueError(
            f"{who} needs to know how many batches an epoch has, but the training loader ({type(dl).__name__}) has no "
            "length; give it a __len__, say how long to train by n_steps, or train with fit at a constant rate"
        )
    return length


def check_shapes(learn: "Learner") -> None:
    """Refuse, on the first batch, predictions and targets that an elementwise loss would silently broadcast."""
    if len(learn.yb) != 1:
        return
    loss, pred, target = learn.loss_func, learn.pred, learn.yb[0]
    if not is_one_of(loss, ELEMENTWISE):
        return
    if isinstance(pred, Tensor) and isinstance(target, Tensor) and pred.shape != target.shape:
        raise ValueError(
            f"the model's predictions have the shape {tuple(pred.shape)}, the targets {tuple(target.shape)}, and "
            f"{loss_name(loss)} compares them element by element: "
            "they must be the same (reshape one of them, for instance with .squeeze(1) or .unsqueeze(1))"
        )


def no_scalar(learn: "Learner") -> ValueError:
    """The error for a loss that cannot be differentiated."""
    return ValueError(
        f"the loss is no scalar: loss_func returned {describe(learn.loss_grad)}; return a 0-dim tensor, for instance "
        "its .mean() (reduction='mean')"
    )


def no_loss(learn: "Learner") -> ValueError:
    """The error for a batch without a loss."""
    if learn.loss_func is None:
        return ValueError(
            f"there is no loss: loss_func is None and the model returned {describe(learn.output)} without a `loss`; "
            "give the Learner a loss_func, or let the model return its own"
        )
    return ValueError(
        f"there is no loss: the batch {describe(learn.batch)} has no targets; let the dataset return "
        "(input, target), set DataLoaders(n_inp=..., target_keys=...), or set learn.yb in a callback's before_batch"
    )


def read_state(path: Path, device: Any) -> dict:
    """A saved file's content; damage and foreign content are errors that name the file."""
    if not path.is_file():
        there = sorted(p.stem for p in path.parent.glob("*.pth")) if path.parent.is_dir() else []
        raise FileNotFoundError(f"there is no file {path}; saved there: {', '.join(there) or 'nothing'}")
    try:
        with warnings.catch_warnings(action="ignore"):  # what is odd about a damaged file is no news
            state = torch.load(path, map_location=device, weights_only=True)
    except Exception as e:  # random bytes bring out a dozen types, from AssertionError to struct.error
        raise ValueError(
            f"{path} is damaged, or not made by Learner.save: {str(e).splitlines()[0] if str(e) else e!r}"
        ) from e
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__}, not the weights of a model")
    return state


def check_state(model: nn.Module, weights: dict, strict: bool, path: Path) -> None:
    """Refuse weights that do not fit before any is loaded, so that a failure changes nothing."""
    own = model.state_dict()
    shapes = [
        f"{k}: {tuple(v.shape)} in the file, {tuple(own[k].shape)} in the model"
        for k, v in weights.items()
        if isinstance(v, Tensor) and isinstance(own.get(k), Tensor) and v.shape != own[k].shape
    ]
    missing = [k for k in own if k not in weights] if strict else []
    surplus = [k for k in weights if k not in own] if strict else []
    for what, found in (
        ("differ in shape", shapes),
        ("are not in the file", missing),
        ("are not in the model", surplus),
    ):
        if found:
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            raise ValueError(
                f"{path} does not fit {type(model).__name__}: these {what}: {'; '.join(map(str, found[:5]))}{more}"
            )
