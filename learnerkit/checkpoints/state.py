"""The configuration of a run, and its changes since a checkpoint was written."""

import inspect
import platform
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from learnerkit.callback import Callback
from learnerkit.data.batches import loader_len
from learnerkit.data.order import samplers_of
from learnerkit.losses import loss_name
from learnerkit.metrics import metric_names
from learnerkit.run_state import keys
from learnerkit.shards import own_class
from learnerkit.state import Learner
from learnerkit.text import first_few
from learnerkit.utils import unwrap

BUDGET = "StepBudget"
"""The name of the callback that may be added or removed when a fit is resumed."""


def configuration(learn: "Learner") -> dict[str, Any]:
    """Return the plain values on which the numbers of a fit depend; called at the end of `before_fit`."""
    model, (train, valid) = unwrap(learn.model), learn.dls.loaders[:2]
    return {
        "model": own_class(model).__name__,
        "parameters": {name: _described(p) for name, p in model.named_parameters()},
        "optimizer": [type(opt).__name__ for opt in learn.opts],
        "groups": [_plain(group) for opt in learn.opts for group in opt.param_groups],
        "loss": "the model's own" if learn.loss_func is None else loss_name(learn.loss_func),
        "metrics": metric_names(learn.metrics),
        "train": _loader(train),
        "valid": _loader(valid),
        "fit": {"n_epoch": learn.n_epoch, "n_steps": learn.n_steps, "start_epoch": learn.start_epoch},
        "callbacks": {key: _arguments(cb) for key, cb in keys(learn.cbs) if key != BUDGET},
        "device": learn.dls.device.type,
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
    }


def _described(p: Tensor) -> str:
    return f"{list(p.shape)} {str(p.dtype).removeprefix('torch.')}{'' if p.requires_grad else ', frozen'}"


def _loader(dl: Any) -> dict | None:
    if dl is None:
        return None
    size = getattr(dl, "batch_size", None) or getattr(getattr(dl, "batch_sampler", None), "batch_size", None)
    return {
        "batch_size": size, "batches": loader_len(dl), "samples": loader_len(getattr(dl, "dataset", None)),
        "sampler": next((type(sampler).__name__ for sampler in reversed(samplers_of(dl))), None),
    }  # fmt: skip


def _plain(values: Mapping[str, Any]) -> dict:
    """Return the entries that can be compared and written."""
    items = {name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
             for name, value in values.items() if name != "params"}  # fmt: skip

    def is_plain(value: Any) -> bool:
        return isinstance(value, str | int | float | bool | None) and not isinstance(value, Enum)

    return {
        name: list(value) if isinstance(value, list | tuple) else value
        for name, value in items.items()
        if is_plain(value) or (isinstance(value, list | tuple) and all(map(is_plain, value)))
    }


def _arguments(cb: Callback) -> dict:
    """Return the arguments with which a callback was made, if it keeps them as attributes; some values of schedules."""
    names = inspect.signature(type(cb).__init__).parameters
    values = _plain({name: value for name, value in vars(cb).items() if name in names})
    for name, sched in getattr(cb, "scheds", {}).items():
        for i, each in enumerate(sched if isinstance(sched, list) else [sched]):
            if callable(each):
                values[f"{name}.{i}"] = [float(each(position / 4)) for position in range(5)]
    return values


def differences(then: Any, now: Any, name: str = "") -> list[str]:
    """Return the differences between two configurations: 'name: before, now after'."""
    if name == "groups" and isinstance(then, list):
        then, now = dict(enumerate(then)), dict(enumerate(now))
    if isinstance(then, dict) and isinstance(now, dict):
        return [
            line
            for key in {**then, **now}
            if not (name == "callbacks" and (key not in then or key not in now))  # these have their own messages
            for line in differences(then.get(key), now.get(key), f"{name}.{key}".lstrip("."))
        ]
    return [] if then == now or (then != then and now != now) else [f"{name}: {then!r}, now {now!r}"]


def callback_changes(then: list[str], now: list[str]) -> list[str]:
    """Return the differences between the callbacks of a checkpoint and the present ones."""
    gone, new = ([key for key in a if key not in (*b, BUDGET)] for a, b in ((then, now), (now, then)))
    kept, here = ([key for key in a if key in b] for a, b in ((then, now), (now, then)))
    moved = [key for key, other in zip(here, kept, strict=True) if key != other]
    lines = {"removed (their state is dropped)": gone, "added (they begin anew)": new, "reordered": moved}
    return [f"{first_few(found)} {what}" for what, found in lines.items() if found]
