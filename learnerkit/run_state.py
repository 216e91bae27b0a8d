"""The state of a run: all on which the rest of the run depends, taken from a learner and put back into one.

Other modules use the state as a whole: checkpoints write it, a notebook's workers send it back, trials take and restore
it, `DriftCheck` compares it between ranks, and `check_distributed` copies it.
"""

import copy
import inspect
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from io import IOBase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from learnerkit import distributed, optim
from learnerkit.callback import RUN_FLAGS, Callback, is_ours
from learnerkit.data.batches import to_device
from learnerkit.data.iterable import source_of
from learnerkit.data.order import (
    GENERATORS,
    generator_state,
    has_state,
    order_sources,
    put_generator,
    put_states,
    set_generator_state,
    states_of,
)
from learnerkit.data.position import (
    evaluated_state_dict,
    generators_state_dict,
    load_evaluated_state_dict,
    load_generators_state_dict,
)
from learnerkit.distributed import seeds
from learnerkit.events import CancelTrainException
from learnerkit.files import CheckpointError, Saved, fitted, why_not
from learnerkit.shards import is_shard, put, rows_for
from learnerkit.state import COUNTERS, Learner, State
from learnerkit.text import in_one_line
from learnerkit.torch_internals import StatisticsNorm, version_of
from learnerkit.utils import owner_of, unexpanded, unwrap
from learnerkit.values import describe, digests, entries, map_batch, same, tensors_in

TRAIN, TRAINED = "train", "trained"
EPOCH, FIT = "epoch", "fit"
"""The places in a fit where a state is taken: in an epoch's training, after it, between two epochs, at the end."""

_APART = (
    "CheckpointCallback", "DataParallelCallback", "DistributedCallback", "LeftBatch", "ProgressCallback", "StandIn",
)  # fmt: skip
"""Callbacks that do not change the run, so that it may continue with or without them."""


# Taking a state


def state_dict(learn: "Learner", first: Mapping[str, Mapping[str, Any]] | None = None) -> State:
    """Return the state of a learner; see `Learner.state_dict`. A host-device sync.

    Args:
        learn: the learner.
        first: the result of `first_attributes`; attributes of callbacks that have not changed since are left out.
    """
    first = first or {}
    model, opt = unwrap(learn.model), learn.opt
    position, loaders = learn._position, learn.dls.loaders
    cbs = taking_part(learn)
    states = {key: state_of(cb, first.get(key)) for key, cb in cbs if not cb.rank0_only}
    own = {key: state.pop("own") for key, state in states.items() if "own" in state}
    alone = {key: state_of(cb, first.get(key)) for key, cb in cbs if cb.rank0_only and distributed.is_main()}
    mine = {
        "random": [*map(seeds.without_arrays, seeds.seed_states()), seeds.device_states(learn.dls.device)],
        "seed": torch.initial_seed(),
        "data": generators_state_dict(loaders, position),
        "position": {} if position is None else position.own_state_dict(),
        "callbacks": own,
        "alone": alone,
    }
    return {
        "model": model.state_dict(),
        "opt": opt and optim.state_dict_of(opt),
        "scaler": learn._scaler_state,
        "beside": values_beside(learn),
        "eval": in_eval(model),
        "frozen": [name for name, p in model.named_parameters() if not p.requires_grad],
        "callbacks": {key: state for key, state in states.items() if state},
        "order": [key for key, _ in keys(learn.cbs)],
        "flags": {key: flags for key, cb in keys(learn.cbs) if (flags := _changed_flags(learn, cb))},
        "counters": {name: getattr(learn, name) for name in COUNTERS},
        "place": None if position is None else position.stage,
        "position": None if position is None else position.state_dict(),
        "loaders": [_loader_state(dl) for dl in loaders] if position is None else evaluated_state_dict(loaders),
        "rank": mine,
    }


def check_moment(learn: "Learner") -> None:
    """Refuse to take a state in a validation, in a batch, or in a step, since a run could not continue from it.

    Raises:
        RuntimeError: the present moment is in a validation, a batch, or a step of several batches.
    """
    position, where = learn._position, ""
    if learn.task in ("validate", "predict") or (
        learn.dl is not None and position is not None and position.over and not learn.training
    ):
        where = "during a validation, which gives weights and random states back at its end"
    elif position is not None and position.stage == TRAIN:
        if learn.iter < position.first_step:
            where = "in before_train"
        elif position.steps <= learn.iter:  # this includes `before_batch`, when the batch has been read
            where = "in the middle of a batch"
        elif not learn.step_due:
            where = "in the middle of an optimizer step of several batches, whose gradients are not part of the state"
    if where:
        raise RuntimeError(
            f"learn.state_dict() was called {where}; call it between two fits, or in before_fit, after_batch (if "
            "self.step_due), after_train or after_epoch, in a callback after all others (order=1000)"
            " (errors.html#learner-state)"
        )


def keys(cbs: Iterable[Callback]) -> Iterator[tuple[str, Callback]]:
    """Yield callbacks with their names in a state: those of their classes, with a number from the second of a name on.

    Classes whose name begins with an underscore are left out.
    """
    seen: dict[str, int] = {}
    for cb in cbs:
        name = type(cb).__name__
        if name.startswith("_") or name in _APART:
            continue
        seen[name] = seen.get(name, 0) + 1
        yield name if seen[name] == 1 else f"{name}_{seen[name]}", cb


def taking_part(learn: "Learner") -> list[tuple[str, Callback]]:
    """Return the callbacks whose state counts now, with their names; in a trial, none that is only for fits.

    Those count, too, that were switched off in this run.
    """
    fitting = learn.task in (None, "fit")
    named = [(key, cb) for key, cb in keys(learn.cbs) if fitting or not cb.only_fit]
    return [(key, cb) for key, cb in named if cb.run or "run" in _changed_flags(learn, cb)]


def _changed_flags(learn: "Learner", cb: Callback) -> dict[str, bool]:
    """Return the `run` flags of a callback that have changed since the start of the fit."""
    dispatch = learn._dispatch
    first = {} if dispatch is None else dispatch.were_off.get(id(cb), {})
    return {name: was_off for name, was_off in first.items() if bool(getattr(cb, name)) is was_off}


def state_of(cb: Callback, first: Mapping[str, Any] | None = None) -> State:
    """Return the state of a callback: the result of its `state_dict`, or the attributes of a user's without one.

    Attributes may differ by rank, so they are under the key 'own'. Attributes equal to those in `first` are left out.
    """
    if type(cb).state_dict is Callback.state_dict:
        own = own_attributes(cb, first)
        return {"own": own} if own else {}
    try:
        state = cb.state_dict()
    except Exception:
        if cb.learn.task == "fit":
            raise
        return {}  # a callback may have no state before its first run
    if not isinstance(state, dict):
        raise CheckpointError(f"{cb!r}.state_dict() returned a {type(state).__name__}; it returns a dict")
    return dict(state)


def first_attributes(learn: "Learner") -> dict[str, State]:
    """Return the attributes of the users' callbacks without `state_dict`, for `state_dict` to compare with.

    Large ones that are no arguments are left out, as they are saved anyway.
    """
    return {
        key: {
            name: _noted(value)
            for name, value in savable(cb).items()
            if name.lstrip("_") in _arguments(cb) or _bytes_of(value, set()) <= _SMALL
        }
        for key, cb in keys(learn.cbs)
        if type(cb).state_dict is Callback.state_dict and not is_ours(type(cb))
    }


def own_attributes(cb: Callback, first: Mapping[str, Any] | None = None) -> State:
    """Return copies of the attributes that can be saved, which a callback has counted and collected in a run.

    Attributes equal to those in `first` are left out. So are attributes with the name of an argument of its class, also
    after underscores, that are not in `first`: the script sets them.

    Returns:
        The attributes as 'values', the names of those with tensors on an accelerator as 'on_device', the classes of
        sets, deques, dicts of other classes, bytes and complex numbers as 'containers', the states of random generators
        as 'generators', and the names of attributes that seem to be state and cannot be saved as 'lost'; an empty dict
        if there are none.
    """
    if is_ours(type(cb)):
        return {}
    first, arguments = first or {}, _arguments(cb)
    kept = savable(cb)
    values = {
        name: _copied(value)
        for name, value in kept.items()
        if not (same(_noted(value), first[name], depth=1000) if name in first else name.lstrip("_") in arguments)
    }
    generators = {name: generator_state(value) for name, value in _attributes(cb) if isinstance(value, GENERATORS)}
    kinds = {name: type(getattr(cb, name)) for name in values}
    containers = {name: kind.__name__ for name, kind in kinds.items() if kind is not type(values[name])}
    on_device = [name for name, value in values.items() if any(t.device.type != "cpu" for t in tensors_in(value))]
    apart, others = _of_model(cb), {name: value for name, value in _attributes(cb) if name not in kept}
    lost = [name for name, x in others.items() if name.lstrip("_") not in arguments and _is_state(x, apart)]
    parts = {
        "values": values, "on_device": on_device, "containers": containers, "generators": generators, "lost": lost,
    }  # fmt: skip
    return {part: content for part, content in parts.items() if content}


def _of_model(cb: Callback) -> set[int]:
    """Return the ids of the modules, parameters and buffers of the model."""
    modules = unwrap(cb.learn.model).modules() if cb.learn is not None else ()
    return {id(t) for m in modules for t in (m, *m.parameters(False), *m.buffers(False))}


_DEEP = 4  # the depth to which containers are searched for state


def _is_state(value: Any, apart: set[int], depth: int = _DEEP) -> bool:
    """Tell whether a value that cannot be saved seems to be state.

    Sets, deques, dataclass objects, named tuples, iterators other than files, and tensors and modules that are not the
    model's are, also in containers; and in containers dicts of other classes of the standard library, bytes and complex
    numbers.
    """
    if isinstance(value, Tensor | nn.Module):
        return id(value) not in apart
    if isinstance(value, set | deque) or (isinstance(value, Iterator) and not isinstance(value, IOBase)):
        return True
    inner = (defaultdict, Counter, OrderedDict, bytes, complex)
    if hasattr(type(value), "_fields") or (depth < _DEEP and isinstance(value, inner)):
        return True
    if is_dataclass(value):
        return not isinstance(value, type)
    return depth > 0 and any(_is_state(part, apart, depth - 1) for _, part in entries(value))


def savable(cb: Callback) -> State:
    """Return the attributes of a callback that can be saved, by their names, in the form in which they are saved.

    Tensors of the model, which are in the state already, and attributes of more than 256 MB are left out.
    """
    apart, found = _of_model(cb), State()
    for name, value in _attributes(cb):
        if isinstance(value, set | frozenset | deque):
            value = list(value)
        elif isinstance(value, dict):
            value = dict(value)
        elif type(value) in (bytes, complex):  # files have neither, but arrays and numbers of numpy
            value = np.frombuffer(value, np.uint8) if type(value) is bytes else np.complex128(value)
        with suppress(RecursionError):  # a list may contain itself
            if _bytes_of(value, apart) <= _LARGEST:
                found[name] = value
    return found


def _attributes(cb: Callback) -> list[tuple[str, Any]]:
    """Return the attributes of a user's callback; of a subclass of one of this library's not the private ones."""
    is_derived = any(is_ours(kind) for kind in type(cb).__mro__ if issubclass(kind, Callback) and kind is not Callback)
    named = [(name, value) for name, value in vars(cb).items() if name not in _NOT_STATE]
    return [(name, value) for name, value in named if not (is_derived and name.startswith("_"))]


def _arguments(cb: Callback) -> Mapping[str, Any]:
    return inspect.signature(type(cb).__init__).parameters


def _copied(value: Any) -> Any:
    return map_batch(torch.clone, value, copy.copy)


def _noted(value: Any) -> Any:
    """Return a copy of a value, with digests in place of large tensors and arrays, to compare it with a later one."""

    def of_tensor(t: Tensor) -> Any:
        return (t.shape, t.dtype, *digests([t])) if t.nbytes > _SMALL else t.clone()

    def of_other(x: Any) -> Any:
        if not isinstance(x, np.ndarray) or x.nbytes <= _SMALL:
            return copy.copy(x)
        row = np.array(x, order="C").reshape(-1).view(np.uint8)
        return x.shape, x.dtype, of_tensor(torch.from_numpy(row))

    return map_batch(of_tensor, value, of_other)


_MADE: dict[str, Callable[[Any], Any]] = {
    kind.__name__: kind for kind in (set, frozenset, deque, Counter, OrderedDict, bytes, complex)
}  # fmt: skip
_NOT_STATE = ("learn", "order", "run", "run_train", "run_valid")
_LARGEST = 2**28  # the size of the largest attribute that is saved, in bytes
_SMALL = 2**16  # the size of the largest attribute that is compared by value, in bytes


def _bytes_of(x: Any, apart: set[int]) -> float:
    """Return the approximate size of a value in a file, in bytes; infinity if it cannot be saved."""
    if isinstance(x, Tensor):
        return math.inf if why_not(x) or x.requires_grad or id(x) in apart else x.nbytes
    if isinstance(x, np.ndarray | np.generic):
        return x.nbytes if x.dtype.kind in "biufc" else math.inf
    if type(x) in (list, tuple):
        return sum(_bytes_of(item, apart) for item in x)
    if type(x) is dict:
        plain = all(_is_plain(key) for key in x)
        return sum(_bytes_of(value, apart) for value in x.values()) if plain else math.inf
    if type(x) is str:
        return len(x)
    return 8 if type(x) in (type(None), bool, int, float) else math.inf


def _is_plain(key: Any) -> bool:
    """Tell whether the key of a dict can be saved."""
    return all(map(_is_plain, key)) if type(key) is tuple else type(key) in (type(None), str, int, float, bool)


def in_eval(model: nn.Module) -> list[str]:
    """Return the names of the modules that are in eval mode."""
    return [name for name, module in model.named_modules() if not module.training]


def values_beside(learn: "Learner") -> list[Tensor]:
    """Return the parameters that are trained beside the model, and the buffers of the loss; the same on every rank."""
    loss = owner_of(learn.loss_func)
    buffers = list(loss.buffers()) if isinstance(loss, nn.Module) else []
    return [t.detach() for t in (*optim.parameters_beside(unwrap(learn.model), learn.loss_func, learn.opts), *buffers)]


def _loader_state(dl: Any) -> State | None:
    if dl is None:
        return None
    source = _source_of(dl)
    return {
        "samplers": states_of(order_sources(dl)),
        "source": None if source is None else copy.deepcopy(source.state_dict()),
    }


def _source_of(dl: Any) -> Any:
    """Return the object that has the state of the data: between fits this may be a dataset with an index, too."""
    dataset = getattr(dl, "dataset", None)
    return dataset if has_state(dataset) and not isinstance(dataset, IterableDataset) else source_of(dl)


# Comparing states between ranks


def state_table(learn: "Learner") -> dict[str, str]:
    """Return the facts that must be the same on all ranks: digests of tensors and the `repr` of other values, by name.

    In training, buffers that may differ between two forward passes are left out. A host-device sync.
    """
    model = unwrap(learn.model)
    options, states, beside = _of_optimizers(learn, model)
    for key, cb in taking_part(learn):
        method = type(cb).state_dict
        # The states of this library's recorders, trackers and loggers contain times and the like.
        if method is not Callback.state_dict and not cb.rank0_only and not (cb.only_fit and is_ours(method)):
            state = {name: value for name, value in state_of(cb).items() if name != "own"}
            states |= {f"{CALLBACK}{key} {name}": leaf for name, leaf in _leaves(state)}
    norms = [m for m in model.modules() if isinstance(m, StatisticsNorm) and not isinstance(m, nn.SyncBatchNorm)]
    apart = {buffer for norm in norms if learn.training for buffer in norm.buffers(recurse=False)}
    # Options and counters come first: where they differ, they cause the differences in the weights.
    entries = options | {f"counter {name}": getattr(learn, name) for name in ("epoch", "iter", "train_iter")}
    entries |= {f"parameter {name}": p for name, p in model.named_parameters()} | beside
    entries |= {f"buffer {name}": b for name, b in model.named_buffers() if b not in apart}
    # Shards are left out, as every rank has other rows.
    entries = {name: value for name, value in (entries | states).items() if not is_shard(value)}
    marks = iter(digests(value for value in entries.values() if isinstance(value, Tensor)))
    return {
        name: f"{describe(value)} with digest {next(marks):016x}" if isinstance(value, Tensor) else repr(value)
        for name, value in entries.items()
    }


def _of_optimizers(learn: "Learner", model: nn.Module) -> tuple[dict, dict, dict]:
    """Return the optimizers' options, their states, and the parameters that they train beside the model, by name."""
    options: dict = {}
    states: dict = {}
    beside: dict = {}
    names = {p: name for name, p in model.named_parameters()}
    opts = [f"optimizer {key!r}" for key in learn.opt] if isinstance(learn.opt, dict) else ["optimizer"]
    for whose, opt in zip(opts, learn.opts, strict=False):  # there may be no optimizer
        of = f" of {whose}" if len(opts) > 1 else ""
        saved, owners = dict(optim.state_dict_of(opt)), dict[Any, str]()
        for i, (group, own) in enumerate(zip(saved.pop("param_groups"), opt.param_groups, strict=True)):
            named = {"learning rate" if k == "lr" else k: v for k, v in group.items() if k not in _NO_OPTIONS}
            options |= {f"{name} of group {i}{of}": leaf for name, leaf in _leaves(named)}
            for place, (number, p) in enumerate(zip(group["params"], own["params"], strict=True)):
                owners[number] = names.get(p) or f"parameter {place} of group {i}"
                if p not in names:
                    beside[owners[number] + of] = p
        for number, state in saved.pop("state").items():
            states |= {f"{whose} {name} of {owners.get(number, number)}": leaf for name, leaf in _leaves(state)}
        # An optimizer that wraps another one has more entries.
        states |= {f"{whose} {name}": leaf for name, leaf in _leaves(saved)}
    return options, states, beside


_NO_OPTIONS = ("params", optim.GROUP, optim.COUNT, optim.WHOLE, optim.PLACES, optim.OPTIONS)
CALLBACK = "callback "
"""The beginning of the names of callbacks' entries in a `state_table`."""


def _leaves(named: Mapping) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values inside nested containers, but no objects, whose `repr` may be an address."""
    for name, value in named.items():
        if isinstance(value, Mapping):
            yield from _leaves({f"{name}.{key}": inner for key, inner in value.items()})
        elif isinstance(value, list | tuple):
            yield from _leaves({f"{name}[{i}]": inner for i, inner in enumerate(value)})
        elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
            yield str(name), torch.as_tensor(value)
        elif isinstance(value, Tensor | int | float | complex | str | None):
            yield str(name), value


# Restoring a state


def load_state_dict(learn: "Learner", state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Restore a state of a learner; see `Learner.load_state_dict`.

    Returns:
        The state from which the next fit continues, if it was taken in a fit: the next fit restores the rest of it.
    """
    state = {**state, "opt": copy.deepcopy(state["opt"])}  # optimizers keep the tensors that they are given
    put_model(learn, state)
    if learn.task is None:
        put_place(learn, state)
        if state["place"]:
            return state
    put_rest(learn, state)
    return None


def put_place(learn: "Learner", state: Mapping[str, Any]) -> None:
    """Set the counters, and between fits also the positions of the loaders."""
    for name, value in state["counters"].items():
        setattr(learn, name, value)
    of_loaders = state["loaders"] if state["position"] is None else None
    for dl, loader_state in zip(learn.dls.loaders, of_loaders or (), strict=False):
        if loader_state is not None:
            put_states(order_sources(dl), loader_state["samplers"])
            if loader_state["source"] is not None:
                _source_of(dl).load_state_dict(copy.deepcopy(loader_state["source"]))


def check_parts(state: Mapping[str, Any]) -> None:
    """Refuse an object that is not a state of `state_dict`.

    Raises:
        CheckpointError: parts are missing.
    """
    missing = [name for name in _PARTS if not isinstance(state, Mapping) or name not in state]
    if missing:
        raise CheckpointError(
            f"got a state without {', '.join(missing)}; load_state_dict takes what learn.state_dict() returned, and "
            "learn.load takes files of weights"
        )


_PARTS = (
    "model", "opt", "scaler", "beside", "eval", "frozen", "callbacks", "counters", "place", "position", "loaders",
    "rank",
)  # fmt: skip


def put_model(learn: "Learner", state: Mapping[str, Any], with_opt: bool = True, name: str = "the state") -> None:
    """Load weights, the optimizers' state, and values beside the model; change nothing if something does not fit.

    Args:
        learn: the learner.
        state: as `state_dict` returns it.
        with_opt: load the optimizers' state, too; False if it is of other optimizers.
        name: the name of the state, for errors.

    Raises:
        CheckpointError, ValueError: the weights or parameter groups do not fit.
    """
    model = unwrap(learn.model)
    weights = copy.copy(state["model"])  # loading may remove prefixes of its names
    saved = fitted(Saved(name, weights), model, strict=True)
    shapes = [[tuple(t.shape) for t in tensors] for tensors in (values_beside(learn), state["beside"])]
    if shapes[0] != shapes[1]:
        raise CheckpointError(
            f"{name} has values of the shapes {shapes[1]} beside the model, such as weight= of the loss, and this "
            f"learner {shapes[0]}: make the Learner with the same loss; if a callback sets weight= later, with one "
            "that has it from the start, such as weight=torch.ones(n)"
        )
    put_trained(learn, state, with_opt)
    model.load_state_dict(rows_for(saved.weights, model))


def put_trained(learn: "Learner", state: Mapping[str, Any], with_opt: bool = True) -> None:
    """Load the optimizers' state and the values beside the model, with the arguments of `put_model`.

    Raises:
        ValueError: the parameter groups do not fit.
    """
    if with_opt and state["opt"] is not None:
        optim.load_state(learn.opt, state["opt"], optim.has_types(unwrap(learn.model), state.get("model", {})))
    with torch.no_grad():
        for t, value in zip(values_beside(learn), state["beside"], strict=True):
            put(t, value)
    frozen = set(state["frozen"])
    for name, p in unwrap(learn.model).named_parameters():
        if p.is_floating_point() or p.is_complex():
            p.requires_grad_(name not in frozen)
    learn._scaler_state = dict(state["scaler"])


def put_rest(learn: "Learner", state: Mapping[str, Any], name: str = "the state") -> None:
    """Restore the modes of modules, the states of callbacks and random generators, and in a fit what validations read.

    Args:
        learn: the learner.
        state: as `state_dict` returns it; its callbacks may have a list of all ranks' states as 'ranks'.
        name: the name of the state, for errors.

    Raises:
        CheckpointError: a callback does not accept its state.
    """
    if state["position"] is not None:
        load_evaluated_state_dict(learn.dls.loaders, state["loaders"] or ())
    evaluating, rank = set(state["eval"]), state["rank"]
    for key, module in unwrap(learn.model).named_modules():
        module.training = key not in evaluating
    for key, cb in keys(learn.cbs) if learn.task == "fit" else ():  # Otherwise they are as the script sets them.
        for flag, value in state.get("flags", {}).get(key, {}).items():
            if flag in RUN_FLAGS:
                setattr(cb, flag, bool(value))
    for key, cb in taking_part(learn):
        if cb.rank0_only:
            cb_state = rank.get("alone", {}).get(key)
        else:
            cb_state = dict(state["callbacks"].get(key, {}))
            if key in rank.get("callbacks", {}):
                cb_state["own"] = rank["callbacks"][key]
        if cb_state:
            try:
                _put_callback(cb, copy.deepcopy(cb_state))  # a copy, as torch's own methods remove entries
            except Exception as e:
                raise CheckpointError(
                    f"{cb!r}.load_state_dict() did not take what its state_dict() had returned, from {name}: "
                    f"{in_one_line(e)}"
                ) from e
    if "random" in rank:
        *states, devices = rank["random"]
        seeds.set_seed_states(tuple(states))
        seeds.set_device_states(learn.dls.device, devices)
        load_generators_state_dict(learn.dls.loaders, rank.get("data", {}))
    else:  # the state has no such rank
        seed = seeds.stream_seed(rank["seed"], distributed.rank())
        distributed.set_seed(seeds.stream_seed(seed, state["counters"]["train_iter"]))


def _put_callback(cb: Callback, state: State) -> None:
    if type(cb).state_dict is not Callback.state_dict:
        if type(cb).load_state_dict is Callback.load_state_dict and cb.learn.task == "fit":
            cb.learn.say(f"{cb!r} begins anew: it has state_dict, and no load_state_dict that takes its state back")
        cb.load_state_dict(state)
        return
    ranks = [state["own"]] if "own" in state else state["ranks"]
    own = ranks[distributed.rank() if distributed.rank() < len(ranks) else 0]

    def is_data(name: str) -> bool:  # A forged file might replace methods.
        return name not in _NOT_STATE and not callable(getattr(type(cb), name, None))

    for name, value in own.get("values", {}).items():
        kind = own.get("containers", {}).get(name)
        if kind is not None and not isinstance(vars(cb).get(name), set | deque | dict):
            if kind not in _MADE:
                continue  # the script makes it later, and it begins anew
            value = _MADE[kind](value)
        if is_data(name):
            on_device = name in own.get("on_device", ())
            _put_attribute(cb, name, to_device(value, cb.learn.dls.device) if on_device else value)
    for name, value in own.get("generators", {}).items():
        here = vars(cb).get(name)
        if isinstance(here, GENERATORS) or (here is None and is_data(name)):
            put_generator(cb, name, value)


def _put_attribute(owner: Any, name: str, value: Any) -> None:
    object.__setattr__(owner, name, filled(vars(owner).get(name), value))


def filled(here: Any, value: Any) -> Any:
    """Return `here`, filled with the content of `value`, as other objects may refer to it; `value` if that fails.

    Lists, dicts, sets and random generators can be filled, and so can untrained tensors and arrays of the same shape
    and type. A list fills a set or a deque, too, and a dict fills one of another class.
    """
    if isinstance(here, set | deque) and type(value) is list:
        here.clear()
        here.extend(value) if isinstance(here, deque) else here.update(value)
        return here
    if type(here) is not type(value) and not (isinstance(here, dict) and type(value) is dict):
        return value
    if isinstance(here, GENERATORS):
        set_generator_state(here, generator_state(value))
    elif type(here) is list:
        here[:] = value
    elif isinstance(here, dict | set):
        here.clear()
        here.update(value)
    elif (
        isinstance(here, np.ndarray) and here.flags.writeable and (here.shape, here.dtype) == (value.shape, value.dtype)
    ):
        here[...] = value
    elif isinstance(here, Tensor) and unexpanded(here) is not here:
        return value  # several of its values are one
    elif isinstance(here, Tensor) and not (here.requires_grad or value.requires_grad) and _kind(here) == _kind(value):
        # A host-device sync; an equal tensor is not written, as its memory may be read-only.
        if not torch.equal(here, value.to(here.device)):
            here.copy_(value)
    else:
        return value
    return here


def _kind(t: Tensor) -> tuple:
    return t.shape, t.dtype, t.layout


class Resumption:
    """Lets a fit continue from a state that was taken inside another fit; each part of it is restored once.

    Model, optimizers, the count of batches and the position in the data are restored in `before_fit`. The states of
    callbacks and random generators are restored at its end, or, if the state was taken in an epoch, in the
    `before_train` of that epoch, when the earlier hooks have run again. If these have changed the model, an optimizer
    or the loss, as they had in the run before, all of them are restored once more. If the training of the epoch was
    over, its `after_train` has run and is skipped.

    Args:
        state: as `state_dict` returns it.
        with_opt: restore the optimizers' state, too.
        name: the name of the state, for errors.
    """

    def __init__(self, state: Mapping[str, Any], with_opt: bool = True, name: str = "the state") -> None:
        self.state, self.with_opt = state, with_opt
        self.name = name
        self._seen: Any = None  # what `_marks` returned when model and optimizers were restored

    def begin(self, learn: "Learner") -> None:
        """Restore the parts that are needed from the start; called in `before_fit`, after other callbacks.

        Raises:
            CheckpointError: the state does not fit the learner.
        """
        counters, data = self.state["counters"], self.state["position"]
        place, position = self.state["place"], learn._position
        with fitting(self.name):
            put_model(learn, self.state, self.with_opt, self.name)
            learn.train_iter, learn.epoch = counters["train_iter"], counters["epoch"]
            if data and position is not None:
                position.load_state_dict(data)
                position.load_own_state_dict(self.state["rank"].get("position"))
            if place != FIT:
                learn.start_epoch = position.epoch if data and position else counters["epoch"] + (place == EPOCH)
            # A fit without an epoch left, as it is shorter now or was about to end, has no `before_train`.
            trained = counters["pct_train"] >= 1 if learn.n_epoch is None else learn.start_epoch >= learn.n_epoch
            if (place == FIT or trained) and data and data["samplers"] is not None:
                put_states(order_sources(learn.dls.train), data["samplers"])
            self._seen = self._marks(learn)
        if place in (EPOCH, FIT) or (trained and learn.n_epoch is not None):
            self._put_rest(learn)

    def enter(self, learn: "Learner") -> None:
        """Restore the rest of a state that was taken in an epoch; called once, in `before_train`, after others.

        Raises:
            CheckpointError: the state does not fit the learner.
        """
        if self.state["place"] in (TRAIN, TRAINED):
            if not same(self._marks(learn), self._seen):  # the hooks that have run again have changed them once more
                with fitting(self.name):
                    put_model(learn, self.state, self.with_opt, self.name)
            self._put_rest(learn)
        if self.state["place"] == TRAINED and learn._position is not None:
            learn.add_cb(_Trained())

    def _marks(self, learn: "Learner") -> Any:
        """Return values that differ after a change of the model, of an optimizer, or of the loss."""
        states = [unwrap(learn.model).state_dict(), *map(optim.state_dict_of, learn.opts), values_beside(learn)]
        groups = [{k: v for k, v in group.items() if k != "params"} for opt in learn.opts for group in opt.param_groups]
        return [version_of(t) for t in tensors_in(states)], groups

    def _put_rest(self, learn: "Learner") -> None:
        counters = self.state["counters"]
        with fitting(self.name):
            before, now = counters["n_epoch"], learn.n_epoch
            if now and (before or not counters["n_steps"]):  # A budget of steps sets it by itself.
                # If the lengths are equal, the value is exact, without a rounding.
                learn.pct_train = counters["pct_train"] * (1 if now == before else before / now)
            put_rest(learn, self.state, self.name)


@contextmanager
def fitting(name: str) -> Iterator[None]:
    """Turn errors in this context, which have many types if a file was changed, into a `CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as e:
        raise CheckpointError(
            f"{name} does not fit this learner: {e if isinstance(e, ValueError) else in_one_line(e)}"
        ) from e


class _GoOn(Callback):
    """Lets a fit continue from the state that `Learner.load_state_dict` was given."""

    order = 9_999
    only_fit = True

    def __init__(self, resumption: Resumption) -> None:
        self.resumption: Resumption | None = resumption

    def before_fit(self) -> None:
        if self.resumption is not None:
            self.resumption.begin(self.learn)
            vars(self.learn)["_resumes"] = None  # only now: a fit that was refused before can be begun again

    def before_train(self) -> None:
        if self.resumption is not None:
            self.resumption.enter(self.learn)
            self.resumption = None


class _Trained(Callback):
    """Skips, once, the `after_train` of all callbacks, in an epoch for which it has run in another process."""

    order = -20_000  # the first of all

    def after_train(self) -> None:
        self.learn.remove_cb(self)
        raise CancelTrainException(agreed=True)


def going_on(state: Mapping[str, Any] | None) -> list[Callback]:
    """Return the callback that lets a fit continue from a state; no callback without a state."""
    return [] if state is None else [_GoOn(Resumption(state))]
