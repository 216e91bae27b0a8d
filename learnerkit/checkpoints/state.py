"""The state of a run: taken from a learner between two steps, and put back into one in another process."""

import inspect
import platform
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from learnerkit import optim, world
from learnerkit.callback import Callback
from learnerkit.callbacks.training import StepBudget
from learnerkit.checkpoints.storage import Checkpoint
from learnerkit.data.batches import entries, loader_len, map_batch
from learnerkit.data.order import order_sources, put_states, samplers_of
from learnerkit.files import CheckpointError, Saved, fitted
from learnerkit.losses import loss_name
from learnerkit.metrics import metric_names
from learnerkit.text import first_few, in_one_line, printable
from learnerkit.utils import itself, unbound, unwrap

if TYPE_CHECKING:
    from learnerkit.learner import Learner


class RunImage(NamedTuple):
    """What a checkpoint has of a run, apart from the weights; its tensors are those of the run, not copies.

    Attributes:
        state: alike on all ranks.
        own: this rank's.
    """

    state: dict[str, Any]
    own: dict[str, Any]


# Taking it


def image(learn: "Learner") -> RunImage:
    """The state of a run between two steps, but for its weights. A host-device sync.

    Args:
        learn: in a fit.
    """
    model = unwrap(learn.model)
    states = {key: _state_of(cb) for key, cb in keys(learn.cbs) if cb.run and not cb.rank0_only}
    own = {key: state.pop("own") for key, state in states.items() if "own" in state}
    alone = {key: _state_of(cb) for key, cb in keys(learn.cbs) if cb.run and cb.rank0_only and world.is_main()}
    opt, position = learn.opt, learn._position
    state = {
        "opt": opt.state_dict() if isinstance(opt, Optimizer) else {k: o.state_dict() for k, o in opt.items()},
        "scaler": learn._scaler_state,
        "beside": _values_beside(learn),
        "eval": [name for name, module in model.named_modules() if not module.training],
        "frozen": [name for name, p in model.named_parameters() if not p.requires_grad],
        "callbacks": {key: state for key, state in states.items() if state},
        "order": [key for key, _ in keys(learn.cbs)],
        "position": None if position is None else position.state_dict(),
    }
    mine = {
        "random": [*world.seed_states(), world.device_states(learn.dls.device)],
        "seed": torch.initial_seed(),
        "position": {} if position is None else position.own_state_dict(),
        "callbacks": own,
        "alone": alone,
    }
    return RunImage(state, mine)


def _state_of(cb: Callback) -> dict[str, Any]:
    state = cb.state_dict()
    if not isinstance(state, dict):
        raise CheckpointError(f"{cb!r}.state_dict() returned a {type(state).__name__}; it returns a dict")
    return dict(state)


def weights(learn: "Learner") -> dict[str, Any]:
    """The model's state dict, with the names that it has without wrappers."""
    return unwrap(learn.model).state_dict()


def _values_beside(learn: "Learner") -> list[Tensor]:
    """Parameters that are trained beside the model, and the buffers of the loss: the same on every rank."""
    loss = unbound(learn.loss_func)[0]
    buffers = list(loss.buffers()) if isinstance(loss, nn.Module) else []
    return [t.detach() for t in (*optim.parameters_beside(unwrap(learn.model), learn.loss_func, learn.opts), *buffers)]


def keys(cbs: list[Callback]) -> Iterator[tuple[str, Callback]]:
    """The names of callbacks in a checkpoint: those of their classes, with a number from the second of a name on."""
    seen: dict[str, int] = {}
    for cb in cbs:
        name = type(cb).__name__
        if name.startswith("_") or name in _APART:
            continue
        seen[name] = seen.get(name, 0) + 1
        yield name if seen[name] == 1 else f"{name}_{seen[name]}", cb


_APART = ("CheckpointCallback", "DistributedCallback", "ParallelCallback", "ProgressCallback", "StepBudget")
"""Callbacks with which, and without which, the same run goes on; `StepBudget` counts what the checkpoint counts."""


# Putting it back


class Restorer:
    """Puts the state of a checkpoint into a learner, in pieces.

    Args:
        checkpoint: what to read; every rank reads all that is alike.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.state = checkpoint, checkpoint.state()
        self.same_ranks = checkpoint.n_ranks == world.world_size()
        self.own = checkpoint.own(world.rank()) or {}

    def check(self, learn: "Learner") -> None:
        """Compare the types of all values with those of the present run, before anything is put back.

        What callbacks of others have is theirs: their `load_state_dict` may take anything.

        Raises:
            CheckpointError: a value is of another type.
        """
        now, path = image(learn), self.checkpoint.path
        theirs = ("TorchScheduler",)  # has the state of a scheduler, which may be anybody's
        ours = {
            key for key, cb in keys(learn.cbs)
            if type(cb).__module__.startswith("learnerkit.") and type(cb).__name__ not in theirs
        }  # fmt: skip
        expected = {
            "opt": {}, "scaler": {}, "beside": now.state["beside"], "eval": [""], "frozen": [""], "order": [""],
            "callbacks": {key: state for key, state in now.state["callbacks"].items() if key in ours},
            "config": {"fit": {}, "optimizer": [""]},
        }  # fmt: skip
        check_types(self.state, expected, f"{path}/state.json: state")
        if now.state["position"] is not None and "TrainEvalCallback" in self.state["order"]:
            place = {key: now.state["position"][key] for key in ("epoch", "batches", "samples", "over", "order")}
            place["samplers"] = []
            check_types(self.state["position"], place, f"{path}/state.json: state.position")
        if self.own:
            mine = {
                part: {key: state for key, state in now.own[part].items() if key in ours}
                for part in ("callbacks", "alone")
            }
            check_types(self.own, {"random": [], "position": {}} | mine, f"{path}/rank{world.rank()}.json: own")

    def put_model(self, learn: "Learner", with_opt: bool) -> None:
        """Load the weights and the optimizer's state; nothing is changed if something does not fit.

        Args:
            learn: in a fit.
            with_opt: also the optimizer's state; not if it is of another optimizer.

        Raises:
            CheckpointError, ValueError: weights or parameter groups are others.
        """
        model, state = unwrap(learn.model), self.state
        saved = fitted(Saved(str(self.checkpoint.path), self.checkpoint.weights()), model, strict=True)
        if with_opt:
            optim.load_state(learn.opt, state.pop("opt"))
        model.load_state_dict(saved.weights)
        with torch.no_grad():
            for t, value in zip(_values_beside(learn), state["beside"], strict=True):
                t.copy_(value)
        frozen = set(state["frozen"])
        for name, p in model.named_parameters():
            if p.is_floating_point() or p.is_complex():
                p.requires_grad_(name not in frozen)
        learn._scaler_state = dict(state["scaler"])
        self.put_modes(learn)

    def put_position(self, learn: "Learner") -> None:
        """Have the data be read on from where they were."""
        if learn._position is not None and self.state["position"] is not None:
            learn._position.load_state_dict(self.state["position"])
            learn._position.load_own_state_dict(self.own.get("position"))

    def put_samplers(self, learn: "Learner") -> tuple[dict, dict] | None:
        """Leave the training loader's samplers as they were; return what the next fit's `Position.follow` takes."""
        position = self.state["position"]
        if position is None or position["samplers"] is None:
            return None
        put_states(order_sources(learn.dls.train), position["samplers"])
        return position, self.own.get("position") or {}

    def put_modes(self, learn: "Learner") -> None:
        """Put the modules into the modes that they had."""
        evaluating = set(self.state["eval"])
        for name, module in unwrap(learn.model).named_modules():
            module.training = name not in evaluating

    def put_rest(self, learn: "Learner") -> None:
        """Give callbacks and random generators what they had."""
        info = self.checkpoint.info
        learn.train_iter = info["train_iter"]
        if learn.n_epoch and info["n_epoch"]:  # a budget of steps counts for itself
            same = learn.n_epoch == info["n_epoch"]  # then exactly what it was, without a rounding
            learn.pct_train = info["pct_train"] * (1 if same else info["n_epoch"] / learn.n_epoch)
        for cb in learn.cbs:
            if isinstance(cb, StepBudget):
                cb.load_state_dict({"steps": info["step"], "open": False})
        for key, cb in keys(learn.cbs):
            if cb.rank0_only:
                state = self.own.get("alone", {}).get(key)
            else:
                state = self.state["callbacks"].get(key, {}) | self._own_of(key)
            if state and cb.run:
                try:
                    cb.load_state_dict(map_batch(itself, state))  # a copy, as torch's own methods take things out
                except Exception as e:
                    raise CheckpointError(
                        f"{cb!r}.load_state_dict() did not take what its state_dict() had returned, from "
                        f"{self.checkpoint.path}: {in_one_line(e)}"
                    ) from e
        self._put_random(learn)

    def _own_of(self, key: str) -> dict[str, Any]:
        if self.same_ranks:
            owns = self.own["callbacks"]
            return {"own": owns[key]} if key in owns else {}
        ranks = [(self.checkpoint.own(rank) or {})["callbacks"] for rank in range(self.checkpoint.n_ranks)]
        found = [own[key] for own in ranks if key in own]
        return {"ranks": found} if found else {}

    def _put_random(self, learn: "Learner") -> None:
        if self.own:
            *states, devices = self.own["random"]
            world.set_seed_states(tuple(states))
            world.set_device_states(learn.dls.device, devices)
        else:  # a rank that there was not
            seed = world.stream_seed((self.checkpoint.own(0) or {})["seed"], world.rank())
            world.set_seed(world.stream_seed(seed, self.checkpoint.info["train_iter"]))


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
        "callbacks": {key: _arguments(cb) for key, cb in keys(learn.cbs)},
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
    """The callbacks of users that hold tensors or modules of their own, and have no `state_dict`."""
    parts = {id(t) for m in unwrap(learn.model).modules() for t in (m, *m.parameters(False), *m.buffers(False))}
    return [
        key
        for key, cb in keys(learn.cbs)
        if type(cb).state_dict is Callback.state_dict
        and type(cb).__module__.partition(".")[0] != __name__.partition(".")[0]
        and any(
            isinstance(held, Tensor | nn.Module) and id(held) not in parts
            for value in vars(cb).values()
            for held in (value, *(part for _, part in entries(value)))
        )
    ]


def callback_changes(then: list[str], now: list[str]) -> list[str]:
    """What differs between the callbacks of a checkpoint and those of now."""
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
