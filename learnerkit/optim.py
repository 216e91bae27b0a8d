"""Parameter groups, their hyper-parameters and their optimizers.

Lists of learning rates have an entry for each of the splitter's groups. When a weight decay is given, each of them is
split in the optimizer into parts of one decay, such as weights, and norms and biases. Each part has the index of its
splitter's group as `splitter_group`. If `create_opt` or `opt_func` makes other groups, lists have an entry for each of
these.

The base rate of a group is the rate that it was made with, times its `lr_scale` if it has one. The group has this rate
if none is named. A single named rate is that of the groups for which the splitter gives none; without such groups, of
the one with the highest base rate. All others keep their ratio to it, but a rate of the Learner does not apply to
groups with a rate from the splitter.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from inspect import signature
from itertools import chain
from numbers import Real
from typing import Any, TypeGuard
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from learnerkit.shards import is_shard, rows_of
from learnerkit.state import Learner
from learnerkit.text import did_you_mean, first_few, in_one_line, printable
from learnerkit.torch_internals import StatisticsNorm
from learnerkit.utils import library_of, owner_of, restorer, unbound, unwrap
from learnerkit.values import describe

GROUP = "splitter_group"
COUNT = "splitter_groups"
"""Group key: the number of groups that the splitter returned (empty ones are not in the optimizer)."""
WHOLE = "whole_group"
"""Group key: the index of the group when the optimizer was made, which all parts of it share."""
PLACES = "splitter_places"
"""Group key: for a part of a group, made by `set_decay`, the position of each of its parameters in the whole group."""
OPTIONS = "splitter_options"
"""Group key: the options that the splitter gave for the group."""
BASE = "base_lr"
"""Group key: the rate that the group was made with, which its `lr_scale` multiplies."""
DECAY = "base_weight_decay"
"""Group key: the decay that the group had before `set_decay`, for a fit for which none is given."""
NOTES = (GROUP, COUNT, WHOLE, PLACES, OPTIONS, BASE, DECAY)
"""The keys above, which no optimizer reads."""

_NORMS = (StatisticsNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)


def split(model: nn.Module, splitter: Callable[[nn.Module], Iterable] | None) -> list[dict[str, Any]]:
    """Return the splitter's groups, each as a dict of its `params` and options; one group without a splitter.

    Raises:
        TypeError: a group contains an object that is not a parameter.
        ValueError: a dict without `params`, a rate or decay that is not a number of 0 or more, or a parameter in two
            places.
    """
    returned: Any = splitter(model) if splitter else [model.parameters()]
    is_one = isinstance(returned, Mapping) or not isinstance(returned, Iterable)
    groups = [returned] if is_one else list(returned)
    if groups and isinstance(groups[0], Tensor):
        groups = [groups]
    whole, owners = list[dict[str, Any]](), dict[int, int]()
    for i, group in enumerate(groups):
        options = dict(group) if isinstance(group, Mapping) else {"params": group}
        if "params" not in options:
            raise ValueError(
                f"group {i} of the splitter is a dict of {first_few(map(repr, options))}; a group has its parameters "
                "as 'params', the other keys are options of the optimizer, and several groups are a list of dicts"
                " (errors.html#parameter-groups)"
            )
        for name in options.keys() & {"lr", "lr_scale", "weight_decay"}:
            _check_amount(f"group {i} of the splitter has {name}", options[name])
        params = options["params"]
        options["params"] = [params] if isinstance(params, Tensor) or not isinstance(params, Iterable) else list(params)
        for p in options["params"]:
            if not isinstance(p, Tensor):
                raise TypeError(
                    f"group {i} of the splitter has a {describe(p)} in it; a group is a list of parameters, such as "
                    "model.head.parameters(), or a dict with these as 'params' (errors.html#parameter-groups)"
                )
            if id(p) in owners:
                name = next((name for name, other in model.named_parameters() if other is p), describe(p))
                raise ValueError(
                    f"the splitter gives {name} twice, in group {owners[id(p)]} and in group {i}; a parameter has one "
                    "group, also one that two modules share (errors.html#parameter-groups)"
                )
            owners[id(p)] = i
        whole.append(options)
    return whole


def _check_amount(name: str, value: Any) -> None:
    if not _is_number(value) or not float(value) >= 0:
        raise ValueError(f"{name}={value!r}; it is a number, 0 or more")


def parameters_of(opts: Iterable[Optimizer]) -> Iterator[Any]:
    """Return the parameters that optimizers hold."""
    return (p for opt in opts for group in opt.param_groups for p in group["params"])


def parameters_beside(model: nn.Module, loss_func: Any, opts: Iterable[Optimizer]) -> list[nn.Parameter]:
    """Return the trainable parameters that are not the model's: those of the loss, and others of the optimizers."""
    loss, known = owner_of(loss_func), {*model.parameters()}
    held = chain(loss.parameters() if isinstance(loss, nn.Module) else (), parameters_of(opts))
    return list(dict.fromkeys(p for p in held if p.requires_grad and p not in known))


_WITH_KERNEL = Adam, torch.optim.AdamW, SGD, torch.optim.Adagrad


def resized(opts: Iterable[Optimizer]) -> list[Any]:
    """Return the parameters that have got another shape, by `p.data = ...`, since a fused kernel began their state.

    Such a kernel reads and writes as far as the parameter goes, also beyond the end of its state.
    """
    groups = [(opt, g) for opt in opts if isinstance(opt, _WITH_KERNEL) for g in opt.param_groups if g.get("fused")]
    states = ((p, opt.state.get(p, {})) for opt, g in groups for p in g["params"])
    return [p for p, state in states if any(getattr(x, "ndim", 0) and x.shape != p.shape for x in state.values())]


def unsaved_inside(opts: Iterable[Optimizer]) -> list[str]:
    """Return the names of the optimizers inside of others whose `state_dict` leaves their state out."""
    opts, found = list(opts), list[str]()
    for opt in opts:
        kind = type(opt)
        if "state_dict" in vars(opt) or kind.state_dict is not Optimizer.state_dict:
            continue
        # A state that both share is saved. When it is loaded, torch's method gives the outer one alone a new state.
        is_parted = kind.load_state_dict is Optimizer.load_state_dict
        for name, x in vars(opt).items():
            if isinstance(x, Optimizer) and x not in opts and (is_parted or x.state is not opt.state):
                found.append(f"{kind.__name__}.{name}")
    return found


def state_dict_of(opt: Any) -> dict[str, Any]:
    """Return an optimizer's `state_dict`, or those of several in a dict by name.

    Raises:
        ValueError: one keeps a state for parameters that are in none of its groups, which torch cannot number.
    """
    if isinstance(opt, dict):
        return {name: state_dict_of(each) for name, each in opt.items()}
    try:
        return opt.state_dict()
    except KeyError as e:
        grouped = {p for group in getattr(opt, "param_groups", ()) for p in group["params"]}
        if not (left := [p for p in getattr(opt, "state", ()) if p not in grouped]):
            raise
        raise ValueError(
            f"{type(opt).__name__} keeps a state for {len(left)} parameter(s) that are no longer in any of its groups, "
            "and cannot be saved: to freeze parameters during a fit leave them in their group, and set "
            "p.requires_grad_(False), so that they are not trained"
        ) from e


def check_states(opts: Iterable[Optimizer]) -> None:
    """Refuse optimizers with a state of another form than torch's, from which `load_state` could not go on."""
    for opt in opts:
        state = opt.state_dict()
        if lacks := [name for name in ("param_groups", "state") if name not in state]:
            raise ValueError(
                f"{type(opt).__name__}.state_dict() has {first_few(map(repr, state))}, but no {lacks[0]!r}, so a "
                "run could not go on from its checkpoints: give the optimizer a state_dict and a load_state_dict in "
                "the form of torch's, or leave CheckpointCallback out"
            )


def not_among(params: Iterable[Any], model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model, by their names, that are not among others."""
    known = {*params}
    return {name: p for name, p in unwrap(model).named_parameters() if p not in known}


def freeze_to(groups: list[dict[str, Any]], n: int, kept: Iterable[nn.Parameter] = ()) -> None:
    """Freeze the groups before the `n`-th, and unfreeze the others.

    Args:
        groups: the groups that `split` returned.
        n: an index into the list; a negative one counts from its end.
        kept: parameters that stay trainable in frozen groups too.

    Raises:
        ValueError: there is no such group.
    """
    if not isinstance(n, int) or not -len(groups) <= n < len(groups):
        raise ValueError(
            f"got freeze_to({n!r}) and {len(groups)} parameter groups (the splitter's groups); it takes "
            f"{-len(groups)} to {len(groups) - 1}, the first group that is to be trained"
        )
    kept_ids = {id(p) for p in kept}
    for i, group in enumerate(groups):
        for p in group["params"]:
            if p.is_floating_point() or p.is_complex():  # others, such as quantised weights, cannot have gradients
                # As an attribute, it can be set before a lazy layer has a shape.
                p.requires_grad = i >= n % len(groups) or id(p) in kept_ids


def make_groups(model: nn.Module, splitter: Callable[[nn.Module], Iterable] | None) -> list[dict]:
    """Make the parameter groups for an optimizer: those of `splitter`, or one with every parameter.

    Frozen parameters are included, so that they can be unfrozen later; optimizers skip parameters without gradients.

    Raises:
        TypeError, ValueError: as in `split`, or no parameter requires a gradient.
    """
    groups = split(model, splitter)
    if not any(p.requires_grad for group in groups for p in group["params"]):
        count = sum(len(group["params"]) for group in groups)
        if not count and splitter is None:
            raise ValueError(
                f"{type(model).__name__} has no trainable parameters, and no others: no layer is registered. Keep "
                "layers in nn.ModuleList or nn.ModuleDict instead of a list or a dict"
            )
        raise ValueError(
            f"{type(model).__name__} has no trainable parameters ({count} parameters, all frozen); unfreeze some with "
            "`p.requires_grad_(True)`, or check the splitter"
        )
    made = []
    for i, group in enumerate(groups):
        if group["params"]:
            options = {name: value for name, value in group.items() if name != "params"}
            made.append({**group, GROUP: i, COUNT: len(groups)} | ({OPTIONS: options} if options else {}))
    return made


def make_optimizer(opt_func: Callable[..., Any], groups: list[dict], lr: float, model: nn.Module) -> Any:
    """Make an optimizer of `groups`, for torch's own classes with the fused implementation, if there is one.

    That does the whole step in one kernel (or one for each type of parameter), with the same result up to rounding. It
    is not used if `opt_func` chooses an implementation itself (`partial(AdamW, foreach=True)`), nor for models with
    sparse gradients, which only the plain implementations support.

    Raises:
        ValueError: a group has an option that the optimizer, one of torch's, does not have: torch would ignore it.
    """
    made = _made(opt_func, groups, lr, model)
    if isinstance(made, Optimizer) and _torchs_kind(made):
        known = {*made.defaults, "lr_scale", "name", "param_names"}
        for group, name in ((group, name) for group in groups for name in group.get(OPTIONS, ())):
            if name not in known:
                raise ValueError(
                    f"group {group[GROUP]} of the splitter has the option {name!r}; {type(made).__name__} has "
                    f"{sorted(made.defaults)}{did_you_mean(name, made.defaults)} (errors.html#parameter-groups)"
                )
    return made


def _made(opt_func: Callable, groups: list[dict], lr: float, model: nn.Module) -> Any:
    kind, options = unbound(opt_func)
    is_torchs = isinstance(kind, type) and kind.__module__.startswith("torch.optim")
    has_kernel = is_torchs and "fused" in signature(kind).parameters
    if has_kernel and any(is_shard(p) for group in groups for p in group["params"]):
        has_kernel = issubclass(kind, Adam)  # the only one of DTensor
    is_free = not options.keys() & {"fused", "foreach", "capturable", "differentiable", "dampening"}
    is_sparse = any(getattr(module, "sparse", None) is True for module in model.modules())
    if has_kernel and is_free and not is_sparse and all(p.is_floating_point() for p in model.parameters()):
        try:
            made = opt_func([dict(group) for group in groups], lr=lr, fused=True)
            mend_kernels(made)
            return made
        except RuntimeError:  # there is no fused kernel for this device, or for these types
            pass
    return opt_func(groups, lr=lr)


_mended = WeakSet[Optimizer]()


def mend_kernels(opt: Optimizer) -> None:
    """Let torch's fused kernels train what its plain implementations train, by hooks that a copy of `opt` lacks."""
    if opt in _mended or not isinstance(opt, _WITH_KERNEL) or not any(g.get("fused") for g in opt.param_groups):
        return
    _mended.add(opt)
    if isinstance(opt, SGD):
        _start_momenta_late(opt)
    if all(p.device.type == "cpu" for p in parameters_of([opt])):
        _keep_layouts(opt)


def _start_momenta_late(opt: SGD) -> None:
    """Let parameters get their first gradient later than others, which torch's fused SGD with momentum cannot do."""

    def start(opt: Any, *_: Any) -> None:
        begun = sum(state.get("momentum_buffer") is not None for state in opt.state.values())
        if begun == sum(len(group["params"]) for group in opt.param_groups):
            return  # the usual case; this check takes a microsecond for 20 parameters
        for group in opt.param_groups:
            given = [p for p in group["params"] if p.grad is not None] if group["momentum"] else []
            new = [p for p in given if opt.state[p].get("momentum_buffer") is None]
            if len(new) < len(given):
                for p in new:
                    opt.state[p]["momentum_buffer"] = torch.zeros_like(p)

    opt.register_step_pre_hook(start)


def _keep_layouts(opt: Optimizer) -> None:
    """Give gradients and state the memory layout of their parameter, which the fused kernels for the CPU do not check.

    They differ where a program sets `p.data`, or a `p.grad` that it has computed itself. Parameters with gaps in their
    memory, which no kernel takes, are trained by the plain implementation.
    """
    known = list[Any]()

    def lay_out(opt: Any, *_: Any) -> None:
        params = [p for group in opt.param_groups if group["fused"] for p in group["params"]]
        if (strides := [p.stride() for p in params]) != known:
            known[:] = strides
            state_to_params(opt)
            for group in opt.param_groups:  # a new tensor has the layout of another one, but none of its gaps
                others = (p for p in group["params"] if not p.is_contiguous())
                dense = all(torch.empty_like(p, device="meta").stride() == p.stride() for p in others)
                group["fused"] = group["fused"] and dense
        for p, own in zip(params, strides, strict=True):
            grad = p.grad
            if grad is None or grad.stride() == own or is_shard(p):
                continue
            if any(n > 1 and i != j for n, i, j in zip(grad.shape, grad.stride(), own, strict=True)):
                p.grad = laid_out_as(p, grad)

    opt.register_step_pre_hook(lay_out)


DEFAULT_RATE = 1e-3
"""The rate with which optimizers are made if none is named."""


def bound_rate(opt_func: Callable[..., Any]) -> float | None:
    """Return the learning rate that is bound in an `opt_func` (`partial(SGD, lr=0.1)`)."""
    return unbound(opt_func)[1].get("lr")


class Later:
    """A learning rate, or a schedule of one, that becomes known when a fit begins, as `scaled_lr` returns it.

    It cannot be a number where it is written, because the batch of a step depends on the ranks, and on callbacks that
    accumulate gradients; both are known when the fit begins.

    Attributes:
        lr: the rate or schedule that it is computed from; it replaces the rate outside of fits.
        is_schedule: whether it will be a schedule.
    """

    lr: Any
    is_schedule: bool

    def into(self, function: Callable[[Any], Any]) -> "Later":
        """Return a `Later` of `function(rate)`."""
        raise NotImplementedError

    def settled(self, learn: "Learner", rates: list[Any], cbs: Any) -> list[Any]:
        """Return `rates` with this fit's values for this and similar objects; see the function `settled`."""
        raise NotImplementedError


def settled(learn: "Learner", rates: list[Any], cbs: Any = None) -> list[Any]:
    """Return the rates, or schedules, of the optimizers, with each `Later` replaced by its value for this fit.

    Args:
        learn: the learner.
        rates: the rates of each of its optimizers.
        cbs: callbacks that the fit will have beside the learner's own.
    """
    later = next((each for each in leaves(rates) if isinstance(each, Later)), None)
    return rates if later is None else later.settled(learn, rates, cbs)


def map_rates(f: Callable[[Any], Any], lr: Any) -> Any:
    """Apply `f` to each of the rates, or schedules, in slices, lists and mappings of them."""
    if isinstance(lr, slice):
        start, stop = (end if end is None else map_rates(f, end) for end in (lr.start, lr.stop))
        return slice(start, stop, lr.step)
    if isinstance(lr, Mapping):
        return {name: map_rates(f, each) for name, each in lr.items()}
    return [map_rates(f, each) for each in lr] if is_row(lr) else f(lr)


def leaves(lr: Any) -> list[Any]:
    """Return the rates, or schedules, in slices, lists and mappings of them."""
    items: list = []
    map_rates(items.append, lr)
    return items


def has_schedule(lr: Any) -> bool:
    """Tell whether there are schedules among the rates."""
    return any(each.is_schedule if isinstance(each, Later) else callable(each) for each in leaves(lr))


class Optimizers(dict):
    """Several optimizers by name, with `step` and `zero_grad` for all of them."""

    def step(self) -> None:
        for opt in self.values():
            opt.step()

    def zero_grad(self) -> None:
        for opt in self.values():
            clear_gradients(opt)


_ZERO_GRAD = Optimizer.zero_grad


@contextmanager
def no_gradients_left(learn: "Learner") -> Iterator[None]:
    """Clear the gradients if a training ends with an exception: the next one must not begin with them."""
    try:
        yield
    except BaseException:
        if learn.training:
            learn._zero_grad()
        raise


def clear_gradients(opt: Optimizer | Optimizers) -> None:
    """Clear gradients as `opt.zero_grad()` does, in a tenth of the time if that is torch's own method.

    torch's method opens and closes a range for the profiler, which takes 5 to 10 microseconds: as much as everything
    else that a Learner adds to torch's work in a step.
    """
    if isinstance(opt, dict) or getattr(opt.zero_grad, "__func__", None) is not _ZERO_GRAD:
        opt.zero_grad()
        return
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = None


def as_one(made: Any) -> Optimizer | Optimizers:
    """Return the optimizer that was made or assigned; several in a dict as `Optimizers`.

    Raises:
        TypeError: it made neither.
    """
    opts = list(made.values()) if isinstance(made, dict) else [made]
    if not opts or not all(isinstance(opt, Optimizer) for opt in opts):
        library = library_of(next(iter(opts), None))
        of = f", made for {library}, another library" if library else ""
        raise TypeError(
            f"opt_func or create_opt made {describe(made)}{of}; it must be a torch optimizer, or a dict of them by name"
        )
    return Optimizers(made) if isinstance(made, dict) and not isinstance(made, Optimizers) else made


def for_each(made: Optimizer | Optimizers, value: Any) -> list[Any]:
    """Return a value for each optimizer: a mapping gives values by name; another value is for all of them.

    Raises:
        ValueError: the mapping has a name that no optimizer has.
    """
    if not isinstance(made, dict):
        return [value]
    if not isinstance(value, Mapping):
        return [value] * len(made)
    for name in value:
        if name not in made:
            known = ", ".join(map(repr, made))
            raise ValueError(f"got {name!r} as an optimizer's name; the learner has {known}{did_you_mean(name, made)}")
    return [value.get(name) for name in made]


def named(made: Optimizer | Optimizers, values: Sequence) -> Any:
    """Return one value for each optimizer, by name if there are several: the inverse of `for_each`."""
    return dict(zip(made, values, strict=True)) if isinstance(made, dict) else values[0]


def n_groups(opt: Optimizer) -> int:
    """Return the number of the splitter's groups in `opt`."""
    return _count_groups(opt.param_groups)


def _count_groups(groups: list[dict]) -> int:
    return max(max(1 + _group_of(i, g), g.get(COUNT, 0)) for i, g in enumerate(groups))


def _group_of(i: int, group: dict) -> int:
    # Groups that `opt_func` makes do not have the key; each then counts as a group of the splitter.
    return group.get(GROUP, i)


def whose_groups(opt: Optimizer) -> str:
    """Return a text for messages that tells which groups a list for `opt` counts."""
    is_split = any(COUNT in group for group in opt.param_groups)
    return "the splitter's groups" if is_split else "those that the optimizer was made with"


def keep_base_rates(opt: Optimizer) -> None:
    """Record the groups of a new optimizer, or those that were added to it, and the rates with which they were made.

    An added group follows those of the splitter, however many parts these have. If groups of the splitter were split
    into parts with different rates, lists count the parts from now on.

    Raises:
        ValueError: a group has no rate.
    """
    rates_of: dict[int, set[float]] = {}
    for i, group in enumerate(opt.param_groups):
        if group[_key(opt, group, "lr")] is None:
            raise ValueError(
                f"got lr=None in group {i} of {type(opt).__name__}; each group has a number as its rate, which is "
                "recorded and scheduled. If the optimizer chooses its steps itself and does not read the rate, as "
                "Adafactor with relative_step=True, set one after it is made, in opt_func: group['lr'] = lr"
            )
        if WHOLE not in group:
            before = opt.param_groups[:i]
            group[WHOLE] = 1 + max((each[WHOLE] for each in before), default=-1)
            if any(GROUP in each for each in before):
                group.setdefault(GROUP, _count_groups(before))
        group.setdefault(BASE, _unscaled(group))
        rates_of.setdefault(_group_of(i, group), set()).add(_base_rate(group))
    if any(len(rates) > 1 for rates in rates_of.values()):
        for group in opt.param_groups:
            group.pop(GROUP, None)
            group.pop(COUNT, None)


def _unscaled(group: dict) -> float:
    return group[BASE] if BASE in group else float(group["lr"])


def _base_rate(group: dict) -> float:
    # timm's `lr_scale` is a factor by which its schedulers multiply rates.
    return _unscaled(group) * group.get("lr_scale", 1.0)


def base_rates(opt: Optimizer) -> list[float]:
    """Return the rate with which each group was made; the highest of them for groups that are not in the optimizer."""
    rates_of = {_group_of(i, group): _base_rate(group) for i, group in enumerate(opt.param_groups)}
    return [rates_of.get(i, max(rates_of.values())) for i in range(n_groups(opt))]


def shares(opt: Optimizer) -> list[float]:
    """Return the ratio of each group's base rate to the base rate that a single named rate replaces.

    This is the rate of the groups for which the splitter gives none; without such groups, the highest rate.
    """
    free = [_unscaled(group) for group in opt.param_groups if "lr" not in group.get(OPTIONS, ())]
    single = max(free or map(_unscaled, opt.param_groups))
    return [rate / single if single else 1.0 for rate in base_rates(opt)]


def set_rates(opt: Optimizer, values: Sequence[float]) -> None:
    """Set the rate of each group at the beginning of a fit."""
    set_hyper(opt, "lr", values)
    for group in opt.param_groups:
        if group.get("lr_scale"):
            group["initial_lr"] = float(group["lr"]) / group["lr_scale"]  # timm's schedulers start from it


def rates_text(values: Sequence[float]) -> str:
    """Describe the rates of groups in a few words."""
    different = sorted(set(values))
    if len(different) > 3:
        return f"{different[0]:g} .. {different[-1]:g} in {len(values)} groups"
    return ", ".join(f"{rate:g}" for rate in different)


def decays_text(opts: Iterable[Optimizer]) -> str:
    """Describe the weight decays of groups in a few words, after a comma; an empty string if there is none."""
    decays = [float(group.get("weight_decay") or 0) for opt in opts for group in opt.param_groups]
    return f", weight decay {rates_text(decays)}" if any(decays) else ""


def set_hyper(opt: Optimizer, name: str, values: float | Sequence[float], exempt: Set[tuple] = frozenset()) -> None:
    """Set a hyper-parameter: one value for all of the splitter's groups, or one for each.

    Args:
        name: an entry of the optimizer's groups; 'momentum' also means the first of `betas`.
        values: the value, or one for each group.
        exempt: the groups that keep their value, as `keeping` returns them.

    Raises:
        ValueError: the optimizer has no such hyper-parameter.
    """
    for i, group in enumerate(opt.param_groups):
        key = _key(opt, group, name)
        if exempt and _place_of(i, group) in exempt:
            continue
        if isinstance(values, int | float):
            value = values
        elif _group_of(i, group) < len(values):
            value = values[_group_of(i, group)]
        else:
            raise ValueError(
                f"the optimizer has a group {i}, and there are values of {name!r} for {len(values)}: a group that is "
                "added in the middle of a fit has no schedule; add it between fits"
            )
        if key != name:
            group[key] = (value, *group[key][1:])
        elif isinstance(group[key], Tensor):
            group[key].fill_(value)
        else:
            group[key] = value


def keeping(opt: Optimizer, name: str, bare: Set[int], one: bool) -> set[tuple]:
    """Return the places of the groups that keep a hyper-parameter while a schedule changes that of the others.

    Args:
        name: as in `set_hyper`. Rates are never kept: a schedule sets a share of its value for each group.
        bare: the ids of parameters without decay, as `without_decay` returns them.
        one: there is one schedule for all groups. Groups then keep the values that the splitter gave for them.
    """
    groups = list(enumerate([] if name == "lr" else opt.param_groups))
    kept = [place for place in groups if one and _key(opt, place[1], name) in place[1].get(OPTIONS, ())]
    if name == "weight_decay":
        parts = [(i, group) for i, group in groups if PLACES in group and not group[name]]
        some = any(group[name] for _, group in groups)  # otherwise 0 is the decay of weights as well
        kept += [(i, group) for i, group in parts if some or id(group["params"][0]) in bare]
    return {_place_of(i, group) for i, group in kept}


def _place_of(i: int, group: dict) -> tuple[int, int]:
    """Return the index of the whole group of which a group is a part, and the place of its first parameter in that."""
    return _whole_of(i, group), group.get(PLACES, [0])[0]


def _key(opt: Optimizer, group: dict, name: str) -> str:
    """Return the name of the entry of a group that has a hyper-parameter."""
    if name in group and not isinstance(group[name], tuple):
        return name
    if name == "momentum" and "betas" in group:
        return "betas"
    known = sorted(k for k, value in group.items() if k not in ("params", *NOTES) and not isinstance(value, tuple))
    known += ["momentum"] * ("betas" in group)  # which is the first of them
    near = did_you_mean(name, known, cutoff=0.5)
    raise ValueError(f"{type(opt).__name__} has no hyper-parameter {name!r}; it has {known}{near}")


def get_hypers(opt: Optimizer, names: Iterable[str]) -> list[dict]:
    """Return, for each of the optimizer's groups, the entries that `set_hyper` would change, to restore them later.

    Raises:
        ValueError: the optimizer has no such hyper-parameter.
    """
    keys = [{_key(opt, group, name) for name in names} for group in opt.param_groups]
    return [
        {k: group[k].clone() if isinstance(group[k], Tensor) else group[k] for k in entries}
        for group, entries in zip(opt.param_groups, keys, strict=True)
    ]


def has_momentum(opt: Optimizer) -> bool:
    """Tell whether a momentum can be set; RMSprop made with momentum 0 has no state for it."""
    can_start = isinstance(opt, SGD)
    return all("betas" in g or g.get("momentum") or (can_start and "momentum" in g) for g in opt.param_groups)


def rates(lr: float | slice | Iterable[float], count: int, whose: str = "the splitter's groups") -> list[float]:
    """Return learning rates for `count` groups.

    Args:
        lr: a number for all groups; `slice(hi)` for `hi` in the last group and a tenth of it in the others;
            `slice(lo, hi)` for a geometric sequence; or a list or array with one rate for each.
        count: the number of groups.
        whose: a description of the groups, for a message.

    Raises:
        TypeError: another type, or a set of several rates, which has no order.
        ValueError: a list of another length, a slice with a step, or a negative rate.
    """
    if isinstance(lr, slice):
        if lr.stop is None or lr.step is not None:
            raise ValueError(f"got lr={lr}; write slice(hi) or slice(lo, hi)")
        high = _rate(lr.stop)
        low = high / 10 if lr.start is None else _rate(lr.start)
        if lr.start is not None and not (low > 0 and high > 0):
            raise ValueError(f"got lr={lr}; slice(lo, hi) is a geometric sequence of rates, so both are above 0")
        if count == 1 or lr.start is None:
            result = [low] * (count - 1) + [high]
        else:
            step = (high / low) ** (1 / (count - 1))
            result = [low * step**i for i in range(count)]
    elif is_row(lr):
        result = list(map(_rate, lr))
        if len(result) != count:
            raise ValueError(f"got {len(result)} learning rates for {count} parameter groups ({whose})")
    else:
        result = [_rate(lr)] * count
    if not all(rate >= 0 for rate in result):
        raise ValueError(f"got the learning rates {result}; they must not be negative")
    return result


def is_row(lr: Any) -> TypeGuard[Iterable]:
    """Tell whether a value is a list, a tuple, an array, a generator, or a set of one: a value for each group."""
    if isinstance(lr, str | Mapping) or callable(lr) or (isinstance(lr, Set) and len(lr) > 1):
        return False
    return lr.ndim == 1 if hasattr(lr, "ndim") else isinstance(lr, Iterable)


def listed(lr: Any) -> Any:
    """Turn the learning rates, or schedules, of groups into a list, also in a mapping.

    A generator can be read only once.

    Raises:
        TypeError: several suggestions of `lr_find`.
    """
    if type(lr).__name__ == "SuggestedLRs" and len(lr) > 1:
        raise TypeError(f"got {lr}, as lr_find returns its suggestions; take one of them, such as `.{lr._fields[0]}`")
    if isinstance(lr, Mapping):
        return {name: listed(each) for name, each in lr.items()}
    return list(lr) if is_row(lr) else lr


def _rate(lr: Any) -> float:
    lr = lr.lr if isinstance(lr, Later) else lr
    if isinstance(lr, Real) or getattr(lr, "ndim", None) == 0:
        return float(lr)
    hint = " (fit alone takes a schedule)" if callable(lr) else ""
    hint = " (a set has no order)" if isinstance(lr, Set) else hint
    raise TypeError(
        f"got lr={lr!r}; a learning rate is a number, a slice, or a list with one number per group{hint}; for "
        "several optimizers it may be a dict of these by their names"
    )


def group_rates(
    made: Optimizer | Optimizers, lr: Any, default: Any, settle: Callable[[list], list]
) -> list[list[float]]:
    """Return, for each optimizer, the learning rates of its groups.

    Args:
        lr: as in `rates`; for several optimizers it may be a mapping by name. A number, and `slice(hi)` if base rates
            differ, is the rate of which the groups have their `shares`.
        default: the rates, in the same form, if `lr` is `None` or lacks the optimizer. A number does not apply to
            groups with a rate from the splitter. Without a default, groups have their base rates.
        settle: gets the rates of each optimizer, and returns them without any `Later`.

    Raises:
        ValueError: as in `rates`, or `slice(lo, hi)` for one group.
    """
    opts = made.values() if isinstance(made, dict) else [made]
    pairs = list(zip(for_each(made, listed(lr)), for_each(made, listed(default)), strict=True))
    given = settle([default if lr is None else lr for lr, default in pairs])
    return [_rates_of(opt, each, lr is None) for opt, each, (lr, _) in zip(opts, given, pairs, strict=True)]


def _rates_of(opt: Optimizer, lr: Any, is_default: bool) -> list[float]:
    base = base_rates(opt)
    if lr is None:
        return base
    is_slice = isinstance(lr, slice)
    if is_slice and lr.start is not None and len(base) == 1:
        raise ValueError(
            f"got lr={lr} for 1 parameter group, which would get {lr.stop} alone; give that rate, or give the Learner "
            "a splitter=, which makes several groups of the model"
            " (errors.html#parameter-groups)"
        )
    if is_row(lr) or (is_slice and (lr.start is not None or len(set(base)) == 1)):
        return rates(lr, len(base), whose_groups(opt))
    (rate,) = rates(lr, 1)
    groups = opt.param_groups if is_default else []
    own = {_group_of(i, group) for i, group in enumerate(groups) if "lr" in group.get(OPTIONS, ())}
    return [base[i] if i in own else rate * share for i, share in enumerate(shares(opt))]


def set_decay(opt: Optimizer, model: nn.Module, wd: float | Mapping[str, float], wd_bn_bias: bool) -> None:
    """Set the weight decay of each parameter, and split the groups accordingly; optimizer state is kept.

    Args:
        model: the model without wrappers, so that parameters have the user's names.
        wd: the decay of weights, while norms and biases have 0, and groups keep the decay that the splitter gave for
            them; or decays by patterns of names, of which the first that matches counts: parameters that match none
            keep their decay.
        wd_bn_bias: a number applies to norms and biases, too.

    Raises:
        ValueError: the optimizer has no weight decay, a decay is not a number of 0 or more, or a pattern counts for no
            parameter.
    """
    for group in opt.param_groups:
        _key(opt, group, "weight_decay")
        group.setdefault(DECAY, group["weight_decay"])
    owners = {id(p): group for group in opt.param_groups for p in group["params"]}
    bare = set[int]()
    if isinstance(wd, Mapping):
        named = decays_by_name(wd, model)
        decays = {key: named.get(key, group["weight_decay"]) for key, group in owners.items()}
    else:
        _check_amount("got wd", wd)
        bare = set() if wd_bn_bias else without_decay(model)
        free = {key: 0.0 if key in bare else float(wd) for key in owners}
        decays = {key: group.get(OPTIONS, {}).get("weight_decay", free[key]) for key, group in owners.items()}
    parts = list[dict]()
    for i, group in enumerate(_join_groups(opt.param_groups)):
        places = defaultdict[Any, list[int]](list)
        for place, p in enumerate(group["params"]):
            places[id(p) in bare, -decays[id(p)]].append(place)
        parts += [_part(i, group, places[key]) | {"weight_decay": -key[1]} for key in sorted(places)]
    opt.param_groups[:] = parts


def restore_decay(opt: Optimizer) -> None:
    """Give groups the weight decay that they had before `set_decay`."""
    for group in opt.param_groups:
        if DECAY in group:
            group["weight_decay"] = group.pop(DECAY)


def decays_by_name(wd: Mapping[str, float], model: nn.Module) -> dict[int, float]:
    """Return decays by the ids of parameters, from a mapping of patterns of names in the style of `fnmatch`.

    Raises:
        ValueError: a decay is not a number of 0 or more, or a pattern is the first match of no parameter.
    """
    names = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    decays: dict[int, float] = {}
    for pattern, value in wd.items():
        _check_amount(f"got wd with {pattern!r}", value)
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            parts = dict.fromkeys(part for name in names for part in (name, *name.split(".")))
            raise ValueError(
                f"got wd with {pattern!r}, and {type(model).__name__} has no parameter of such a name; it has "
                f"{first_few(names)}{did_you_mean(pattern.strip('*.'), parts)}"
            )
        new = {names[name]: float(value) for name in matching if names[name] not in decays}
        if not new:
            raise ValueError(
                f"got wd with {pattern!r} after patterns that match the same parameters ({first_few(matching)}); the "
                "first pattern that matches counts, so put it before them, or leave it out"
            )
        decays |= new
    return decays


def _whole_of(i: int, group: dict) -> int:
    return group.get(WHOLE, _group_of(i, group))


def _part(i: int, group: dict, places: list[int]) -> dict:
    """Return the part of the `i`-th whole group with the parameters at these places."""
    params = [group["params"][place] for place in places]
    return {**group, "params": params, PLACES: places, GROUP: _group_of(i, group), WHOLE: _whole_of(i, group)}


def _join_groups(groups: list[dict]) -> list[dict]:
    """Join the parts that `set_decay` has split; a whole group has the options of its first part."""
    wholes: dict[int, list[dict]] = {}
    for i, group in enumerate(groups):
        wholes.setdefault(_whole_of(i, group), []).append(group)
    joined = []
    for parts in wholes.values():
        if not all(PLACES in part for part in parts):
            joined += parts
            continue
        pairs = [pair for part in parts for pair in zip(part[PLACES], part["params"], strict=True)]
        options = {k: v for k, v in parts[0].items() if k != PLACES}
        joined.append({**options, "params": [p for _, p in sorted(pairs, key=lambda pair: pair[0])]})
    return joined


def norms(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of normalisation layers."""
    return [p for module in model.modules() if isinstance(module, _NORMS) for p in module.parameters(recurse=False)]


def without_decay(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that get no weight decay: norms, biases, and those that the model names.

    Vision transformers, timm's and others, name their position embeddings and the like in a method `no_weight_decay`.
    """
    bare = list(norms(model))
    for module in model.modules():
        names = getattr(module, "no_weight_decay", None)
        patterns = list(names()) if callable(names) else []
        bare += [p for name, p in module.named_parameters() if any(fnmatchcase(name, each) for each in patterns)]
    last = [(name.rpartition(".")[2], p) for name, p in model.named_parameters()]
    return {id(p) for p in (*bare, *(p for name, p in last if name.startswith("bias") or name.endswith("bias")))}


def group_restorer(opt: Optimizer) -> Callable[[], None]:
    """Return a function that restores an optimizer's groups, with their present hyper-parameters."""
    held = opt.param_groups
    groups = [(g, g["params"], restorer({k: v for k, v in g.items() if k != "params"})) for g in held]

    def put_back() -> None:
        for group, params, options in groups:
            group.clear()
            group.update(params=params, **options())
        held[:] = [group for group, _, _ in groups]
        opt.param_groups = held

    return put_back


def exchange(opt: Optimizer, new: Mapping[Tensor, Tensor]) -> None:
    """Let an optimizer train other parameters instead of its present ones; their state moves along.

    The state of a parameter that becomes a shard is divided.

    Args:
        opt: the optimizer.
        new: the new parameters, by the old ones.
    """
    for group in opt.param_groups:
        group["params"] = [new.get(p, p) for p in group["params"]]
    for old, p in new.items():
        if old in opt.state:
            opt.state[p] = opt.state.pop(old)
    state_to_params(opt)


def state_to_params(opt: Optimizer) -> None:
    """Move optimizer state to the device and the memory layout of its parameter, which may have changed.

    torch's fused kernels require that a parameter and its state have the same memory layout.
    """
    for group in opt.param_groups:
        # As in torch's own loading, the step counter stays on the host unless the kernel reads it on the device.
        counter_too = group.get("fused") or group.get("capturable")
        for p in group["params"]:
            state = opt.state.get(p, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and (key != "step" or counter_too):
                    state[key] = laid_out_as(p, value)


def laid_out_as(p: Tensor, value: Tensor) -> Tensor:
    """Return `value` on the device of `p`; if the shapes are equal, also with the memory layout and sharding of `p`."""
    if value.shape == p.shape and is_shard(p):
        return rows_of(value, p)
    strided = p.layout is value.layout is torch.strided
    if strided and value.shape == p.shape and value.stride() != p.stride():
        return torch.empty_like(p, dtype=value.dtype, requires_grad=False).copy_(value)
    return value.to(p.device)


def load_state(made: Optimizer | Optimizers, saved: dict, same_types: bool = True) -> None:
    """Load the state of one optimizer, or of several by name; either side may have groups split for weight decay.

    Args:
        made, saved: the optimizers, and their states.
        same_types: the parameters had the types that they have now when the state was saved.

    Raises:
        ValueError: the state is of other optimizers, other parameter groups or other shapes; nothing is loaded.
    """
    opts = made if isinstance(made, dict) else {"": made}
    try:
        _check_extent(saved)
        states = {"": saved} if "param_groups" in saved else saved
        if opts.keys() != states.keys():
            raise ValueError(f"it has the optimizers {_names(states)}, the learner has {_names(opts)}")
        groups = {name: _groups_like(states[name], opt) for name, opt in opts.items()}
        for name, opt in opts.items():
            _check_state(states[name], opt, groups[name])
    except (TypeError, LookupError, AttributeError) as e:
        raise ValueError(f"its optimizer's state is damaged: {in_one_line(e)}") from e
    before = [(opt, opt.state, opt.param_groups, [*opt.param_groups]) for opt in opts.values()]
    try:
        for name, opt in opts.items():
            opt.param_groups[:] = groups[name]  # in place, as an optimizer inside this one may have the same list
            # The options of computation, and the base rates, are taken from the script, not from the file.
            theirs = [
                {k: v for k, v in group.items() if k not in _SCRIPTS}
                | {k: v for k, v in own.items() if k in _SCRIPTS}
                | {BASE: _unscaled(own)}
                for group, own in zip(states[name]["param_groups"], groups[name], strict=True)
            ]
            with torch.no_grad():
                opt.load_state_dict(states[name] | {"param_groups": theirs})
            if type(opt).load_state_dict is Optimizer.load_state_dict:
                _keep_types(opt, states[name], same_types)
            state_to_params(opt)
    except Exception as e:  # an optimizer's own loading may raise anything
        for opt, state, param_groups, held in before:
            param_groups[:] = held
            opt.state, opt.param_groups = state, param_groups
        raise ValueError(f"its optimizer's state is not taken: {in_one_line(e)}") from e


def has_types(model: nn.Module, weights: Mapping[str, Any]) -> bool:
    """Tell whether saved weights have the types of a model's parameters."""
    return all(w.dtype == weights[name].dtype for name, w in model.named_parameters() if name in weights)


def _keep_types(opt: Optimizer, saved: dict, same_types: bool) -> None:
    """Give state the types that the optimizer keeps, after torch's loading has cast it to those of its parameters.

    For torch's optimizers these types are known. For others they are the saved ones, unless the parameters have got
    another type since.
    """
    for group, theirs in zip(opt.param_groups, saved["param_groups"], strict=True):
        made = None
        for p, number in zip(group["params"], theirs["params"], strict=True):
            for name, value in saved["state"].get(number, {}).items():
                now = opt.state[p].get(name)
                if isinstance(value, Tensor) and isinstance(now, Tensor) and value.dtype != now.dtype:
                    made = made or _state_made(opt, group)
                    expected = made.get((p.shape, p.dtype), {}).get(name)
                    if not isinstance(expected, Tensor):
                        expected = value if same_types or not value.is_floating_point() else now
                    opt.state[p][name] = value.to(expected.dtype)


_MOST_VALUES = 1_000_000  # a hundred times as many as a large model has


def _check_extent(saved: Any) -> None:
    """Refuse lists that contain each other so often that a walk through them would not end."""
    parts, count = [saved], 0
    while parts:
        part = parts.pop()
        if isinstance(part, dict | list | tuple):
            count += len(part)
            if count > _MOST_VALUES:
                raise ValueError(f"its optimizer's state has more than {_MOST_VALUES:,} values")
            parts += part.values() if isinstance(part, dict) else part


def _check_state(saved: dict, opt: Optimizer, groups: list[dict]) -> None:
    """Refuse options and tensors that do not fit `opt`: torch's fused kernels write without checking shapes."""
    numbers = {number for group in saved["param_groups"] for number in group["params"]}
    strays = [key for key in saved["state"] if type(key) is not int or key not in numbers]
    # Other optimizers may keep more, under names.
    if not all(isinstance(key, str) and _torchs_kind(opt) is None for key in strays):
        raise ValueError(f"its optimizer has a state of parameters that it does not number: {first_few(strays)}")
    for i, (group, theirs) in enumerate(zip(groups, saved["param_groups"], strict=True)):
        _check_options(opt, f"group {i} of its optimizer", group, theirs)
        made = _state_made(opt, group)
        for p, number in zip(group["params"], theirs["params"], strict=True):
            for name, value in saved["state"].get(number, {}).items():
                expected = made.get((p.shape, p.dtype), {}).get(name)
                if not _is_kept(value, expected) and not (value is None and isinstance(opt, SGD)):
                    raise ValueError(
                        f"its optimizer keeps as {printable(repr(name))} for parameter {number} "
                        f"{_described(value)}, and {type(opt).__name__} keeps {_described(expected)}"
                    )


def _check_options(opt: Optimizer, where: str, own: dict, saved: dict) -> None:
    """Refuse the options of a saved group that do not fit the optimizer's own group."""
    # Flags, and options that torch chooses, have come with its versions, and get a default.
    needs = [name for name, value in opt.defaults.items() if not (value is None or isinstance(value, bool))]
    if lacks := [name for name in needs if name not in saved]:
        raise ValueError(f"{where} has no {first_few(lacks)}, which {type(opt).__name__} needs: it is another's")
    for name, value in saved.items():
        is_free = name in _PLAIN and value is None  # torch chooses the option then
        if name in own and name != "params" and not is_free and not _is_like(value, own[name]):
            raise ValueError(f"{where} has {name}={printable(repr(value))}, the learner's {own[name]!r}")


def _is_like(value: Any, own: Any) -> bool:
    """Tell whether a hyper-parameter may replace another: numbers replace numbers, flags replace flags."""
    if own is None or isinstance(own, bool):
        return isinstance(value, bool) or (own is None and (value is None or _is_number(value)))
    if isinstance(own, list | tuple):
        return isinstance(value, list | tuple) and len(value) == len(own) and all(map(_is_like, value, own))
    return _is_number(value) if _is_number(own) else isinstance(value, type(own))


def _is_number(x: Any) -> bool:
    if isinstance(x, Tensor):
        return x.numel() == 1 and x.is_floating_point()
    return isinstance(x, Real) and not isinstance(x, bool)


def _is_kept(value: Any, expected: Any) -> bool:
    """Tell whether a value fits the state of a parameter where a fresh optimizer has `expected`; `None`: unknown."""
    if isinstance(expected, list):  # the history of LBFGS, which grows
        return isinstance(value, list)
    if not isinstance(expected, Tensor):
        return expected is None or _is_like(value, expected)
    if not isinstance(value, Tensor):  # steps and the like were numbers in earlier versions of torch
        return _is_number(value) and expected.ndim == 0 and expected.device.type != "meta"
    return value.shape == expected.shape and all(
        getattr(value, is_kind)() == getattr(expected, is_kind)() for is_kind in ("is_floating_point", "is_complex")
    )


def _described(x: Any) -> str:
    return f"a {x.dtype} tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


# With these options torch's optimizers keep all kinds of state, and can step without values.
_ALL_STATE = {"amsgrad": True, "centered": True, "momentum": 0.9, "nesterov": False, "weight_decay": 0.0}
_PLAIN = {"fused": False, "foreach": False, "capturable": False, "differentiable": False}
_SCRIPTS = {*_PLAIN, WHOLE, OPTIONS, BASE, "lr_scale"}


def _torchs_kind(opt: Optimizer) -> type | None:
    """Return the class of torch's that takes the steps of an optimizer; `None` if another class does."""
    kind = next(base for base in type(opt).__mro__ if "step" in vars(base))
    return kind if f"{kind.__module__}.".startswith("torch.optim.") else None


def _state_made(opt: Optimizer, group: dict) -> dict[tuple, dict]:
    """Return the state that a fresh optimizer keeps for a parameter, by the parameter's shape and type.

    It comes from a step of such an optimizer on parameters without memory (on the meta device), whose shapes alone are
    computed. This works only for torch's own steps: the state of other optimizers is unknown.
    """
    kind = _torchs_kind(opt)
    if kind is None:
        return {}
    like = {(p.shape, p.dtype): p for p in group["params"]}
    metas = {key: torch.empty(p.shape, dtype=p.dtype, device="meta") for key, p in like.items()}
    for p in metas.values():
        p.grad = torch.empty_like(p)
    options = {name: value for name, value in (_ALL_STATE | _PLAIN).items() if name in group}
    fresh: Any = object.__new__(kind)
    fresh.__setstate__(
        {"defaults": {}, "state": defaultdict(dict), "param_groups": [group | options | {"params": [*metas.values()]}]}
    )
    # Adafactor reads values, after all have their state; Adagrad has its state from the beginning.
    with suppress(Exception):
        fresh.step()
    return {key: opt.state.get(like[key], {}) | fresh.state.get(p, {}) for key, p in metas.items()}


def _names(opts: dict) -> str:
    return ", ".join(map(repr, opts)) if opts.keys() != {""} else "(a single one)"


def _groups_like(state: dict, opt: Optimizer) -> list[dict]:
    """Return the groups of `opt`, split or joined like those of a saved state."""
    saved = state["param_groups"]
    numbers = [number for group in saved for number in group["params"]]
    if not all(type(number) is int for number in numbers) or len({*numbers}) < len(numbers):
        raise ValueError("its optimizer's state does not number the parameters")
    groups = _join_groups(opt.param_groups)
    if any(PLACES in group for group in saved):
        groups = _split_like(saved, groups)
    sizes = [[(_group_of(i, g), len(g["params"])) for i, g in enumerate(each)] for each in (saved, groups)]
    if sizes[0] != sizes[1]:
        theirs, ours = ([size for _, size in each] for each in sizes)
        raise ValueError(
            f"its optimizer has groups of {theirs} parameters, the learner's of {ours}; to unfreeze in a fit, "
            "give all groups by splitter= from the start, and let the callback change requires_grad alone"
        )
    return groups


def _split_like(saved: list[dict], wholes: list[dict]) -> list[dict]:
    """Split whole groups at the places of saved groups; return them unchanged if the places do not fit."""
    key = _whole_of if any(WHOLE in group for group in saved) else _group_of  # older files do not have `WHOLE`
    own = {key(i, group): (i, group) for i, group in enumerate(wholes)}
    parts = [(key(i, group), group.get(PLACES, [*range(len(group["params"]))])) for i, group in enumerate(saved)]
    by_whole = defaultdict[int, list[int]](list)
    for whole, places in parts:
        by_whole[whole] += places
    expected = {whole: [*range(len(group["params"]))] for whole, (_, group) in own.items()}
    if expected != {whole: sorted(places) for whole, places in by_whole.items()}:
        return wholes
    return [_part(*own[whole], places) for whole, places in parts]
