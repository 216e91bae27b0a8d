"""The state of a run as it is read from a checkpoint, and what is compared with the present run before it is used."""

import inspect
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from learnerkit import world
from learnerkit.callback import Callback, is_ours
from learnerkit.checkpoints.storage import Checkpoint
from learnerkit.data.batches import entries, loader_len
from learnerkit.data.order import samplers_of
from learnerkit.files import CheckpointError
from learnerkit.losses import loss_name
from learnerkit.metrics import metric_names
from learnerkit.run_state import fitting, keys, own_attributes
from learnerkit.text import first_few, printable
from learnerkit.utils import unwrap

if TYPE_CHECKING:
    from learnerkit.learner import Learner


def read(found: Checkpoint, learn: "Learner", now: Mapping[str, Any]) -> dict[str, Any]:
    """Read a state as `run_state.state_dict` returned it; every rank reads what is alike, and what is its own.

    With another number of ranks callbacks get what all of them had, under 'ranks'.

    Args:
        found: where to read it.
        learn: the learner.
        now: its present state, whose types the values must have. What callbacks of others have is theirs: their
            `load_state_dict` may take anything.

    Raises:
        CheckpointError: a value is of another type.
    """
    state, rank = found.state(), world.rank()
    mine, first = found.own(rank), found.own(0) or {}
    theirs = ("TorchScheduler",)  # has the state of a scheduler, which may be anybody's
    ours = {key for key, cb in keys(learn.cbs) if is_ours(type(cb)) and type(cb).__name__ not in theirs}
    expected = {
        "opt": {}, "scaler": {}, "beside": now["beside"], "eval": [""], "frozen": [""], "order": [""], "counters": {},
        "callbacks": {key: value for key, value in now["callbacks"].items() if key in ours},
        "config": {"fit": {}, "optimizer": [""]},
    }  # fmt: skip
    check_types(state, expected, f"{found.path}/state.json: state")
    if now["position"] is not None and "TrainEvalCallback" in state["order"]:
        place = {key: now["position"][key] for key in ("epoch", "batches", "samples", "over", "order")}
        place["samplers"] = {"generators": [], "attributes": []}
        check_types(state["position"], place, f"{found.path}/state.json: state.position")
    if mine is not None:
        own = {
            part: {key: value for key, value in now["rank"][part].items() if key in ours}
            for part in ("callbacks", "alone")
        }
        check_types(mine, {"random": [], "position": {}} | own, f"{found.path}/rank{rank}.json: own")
    if found.n_ranks != world.world_size():
        with fitting(str(found.path)):
            ranks = [(found.own(each) or {})["callbacks"] for each in range(found.n_ranks)]
            for key in {key: None for each in ranks for key in each}:
                state["callbacks"].setdefault(key, {})["ranks"] = [each[key] for each in ranks if key in each]
            mine = (mine or {"seed": first["seed"]}) | {"callbacks": {}}
    # A budget counts what the checkpoint counts, also where there was none.
    state["callbacks"][BUDGET] = {"steps": found.info["step"], "open": False}
    return state | {"model": found.weights(), "rank": mine, "place": found.info["place"]}


BUDGET = "StepBudget"
"""The callback with which, and without which, a fit may go on."""


# What was configured


def configuration(learn: "Learner") -> dict[str, Any]:
    """What the numbers of a fit depend on, as far as it can be told by plain values; at the end of `before_fit`."""
    model, (train, valid) = unwrap(learn.model), learn.dls.loaders[:2]
    return {
        "model": type(model).__name__,
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


def _loader(dl: Any) -> dict[str, Any] | None:
    if dl is None:
        return None
    size = getattr(dl, "batch_size", None) or getattr(getattr(dl, "batch_sampler", None), "batch_size", None)
    return {
        "batch_size": size, "batches": loader_len(dl), "samples": loader_len(getattr(dl, "dataset", None)),
        "sampler": next((type(sampler).__name__ for sampler in reversed(samplers_of(dl))), None),
    }  # fmt: skip


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that can be compared and written."""
    found = {name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
             for name, value in values.items() if name != "params"}  # fmt: skip
    simple = str | int | float | bool | None
    return {
        name: list(value) if isinstance(value, list | tuple) else value
        for name, value in found.items()
        if isinstance(value, simple)
        or (isinstance(value, list | tuple) and all(isinstance(item, simple) for item in value))
    }


def _arguments(cb: Callback) -> dict[str, Any]:
    """What a callback was made with, as far as it has attributes of these names; of schedules some values."""
    names = inspect.signature(type(cb).__init__).parameters
    found = _plain({name: value for name, value in vars(cb).items() if name in names})
    for name, sched in getattr(cb, "scheds", {}).items():
        for i, each in enumerate(sched if isinstance(sched, list) else [sched]):
            if callable(each):
                found[f"{name}.{i}"] = [float(each(position / 4)) for position in range(5)]
    return found


def differences(then: Any, now: Any, name: str = "") -> list[str]:
    """What differs between two configurations: 'name: before, now after'."""
    if isinstance(then, dict) and isinstance(now, dict):
        return [
            line
            for key in {**then, **now}
            if not (name == "callbacks" and (key not in then or key not in now))  # these have messages of their own
            for line in differences(then.get(key), now.get(key), f"{name}.{key}".lstrip("."))
        ]
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now) and name == "groups":
        return [
            line for i, pair in enumerate(zip(then, now, strict=True)) for line in differences(*pair, f"{name}.{i}")
        ]
    return [] if then == now or (then != then and now != now) else [f"{name}: {then!r}, now {now!r}"]


def forgetful(learn: "Learner") -> list[str]:
    """The callbacks of users without `state_dict` that hold modules, or tensors which cannot be saved."""
    parts = {id(t) for m in unwrap(learn.model).modules() for t in (m, *m.parameters(False), *m.buffers(False))}
    return [
        key
        for key, cb in keys(learn.cbs)
        if type(cb).state_dict is Callback.state_dict
        and not is_ours(type(cb))
        and any(
            isinstance(held, Tensor | nn.Module) and id(held) not in parts
            for name, value in vars(cb).items()
            if name not in own_attributes(cb).get("values", {})
            for held in (value, *(part for _, part in entries(value)))
        )
    ]


def callback_changes(then: list[str], now: list[str]) -> list[str]:
    """What differs between the callbacks of a checkpoint and those of now."""
    then, now = ([key for key in each if key != BUDGET] for each in (then, now))
    gone, new = [key for key in then if key not in now], [key for key in now if key not in then]
    kept, here = [key for key in then if key in now], [key for key in now if key in then]
    moved = [key for key, other in zip(here, kept, strict=True) if key != other]
    lines = [f"{first_few(gone)} removed (their state is dropped)"] if gone else []
    lines += [f"{first_few(new)} added (they begin anew)"] if new else []
    return lines + ([f"{first_few(moved)} reordered"] if moved else [])


# What types there are


def check_types(found: Any, now: Any, name: str) -> None:
    """Refuse values of other types than those of another state; what is `None` there may be anything.

    Numbers are of one type, and tensors of one shape; of lists the items are compared that both have.

    Args:
        found: what is checked.
        now: the other state.
        name: of the value, for the error.

    Raises:
        CheckpointError: the text names the value.
    """
    if now is None:
        return
    kind = (int, float) if type(now) in (int, float) else Tensor if isinstance(now, Tensor) else type(now)
    is_kind = isinstance(found, kind) and isinstance(found, bool) == isinstance(now, bool)
    if is_kind and isinstance(now, Tensor | np.ndarray):
        is_kind = (found.shape, found.dtype) == (now.shape, now.dtype)
    if not is_kind or (isinstance(now, tuple) and len(found) != len(now)):
        raise CheckpointError(
            f"{name} is damaged: {printable(repr(found))} is not of the type of {printable(repr(now))}"
        )
    pairs: dict[Any, tuple] = {}
    if isinstance(now, dict):
        pairs = {key: (found[key], value) for key, value in now.items() if key in found}
    elif isinstance(now, list | tuple):
        pairs = dict(enumerate(zip(found, now, strict=False)))
    for key, (value, expected) in pairs.items():
        check_types(value, expected, f"{name}.{key}")
