"""Parameter groups, their hyper-parameters and their optimizer.

A splitter's group is what a list of learning rates counts. The optimizer may hold it as two of its own groups, weights
and norms-and-biases, once a weight decay was given; each carries its splitter's group as `splitter_group`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from inspect import signature
from numbers import Real
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from learnerkit.text import did_you_mean
from learnerkit.torch_internals import StatisticsNorm
from learnerkit.utils import library_of

GROUP = "splitter_group"
COUNT = "splitter_groups"
"""In a group that the splitter made, how many it made: the last may be empty, and the optimizer has none of that."""
PLACES = "splitter_places"
"""In a group that was parted, where in the whole group each of its parameters stood."""

_NORMS = (StatisticsNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)


def split(model: nn.Module, splitter: Callable[[nn.Module], Iterable] | None) -> list[list[nn.Parameter]]:
    """The parameters in the splitter's groups; without a splitter in one group."""
    groups = list(splitter(model)) if splitter else [list(model.parameters())]
    if groups and isinstance(groups[0], Tensor):
        groups = [groups]
    return [list(group) for group in groups]


def freeze_to(groups: list[list[nn.Parameter]], n: int, kept: Iterable[nn.Parameter] = ()) -> None:
    """Let the groups before the `n`-th have no gradients, and the others have them.

    Args:
        groups: those of `split`.
        n: a place in the list; a negative one counts from its end.
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
        for p in group:
            if p.is_floating_point() or p.is_complex():  # others, such as quantised weights, have no gradients
                p.requires_grad_(i >= n % len(groups) or id(p) in kept_ids)


def make_groups(model: nn.Module, splitter: Callable[[nn.Module], Iterable] | None) -> list[dict]:
    """The parameter groups for an optimizer: those of `splitter`, or one with every parameter.

    Frozen parameters are included: optimizers pass over parameters without gradients, so they can be unfrozen later.

    Raises:
        ValueError: no parameter requires a gradient.
    """
    groups = split(model, splitter)
    if not any(p.requires_grad for group in groups for p in group):
        count = sum(len(group) for group in groups)
        raise ValueError(
            f"{type(model).__name__} has no trainable parameters ({count} parameters, all frozen); unfreeze some with "
            "`p.requires_grad_(True)`, or check the splitter"
        )
    return [{"params": group, GROUP: i, COUNT: len(groups)} for i, group in enumerate(groups) if group]


def make_optimizer(opt_func: Callable[..., Any], groups: list[dict], lr: float, model: nn.Module) -> Any:
    """An optimizer of `groups`: of torch's own classes the fused implementation, where there is one for these.

    It does the whole step in one kernel (or one per type of parameter), with the same result up to rounding. An
    `opt_func` that chooses an implementation itself (`partial(AdamW, foreach=True)`) is left alone, and models with
    sparse gradients are, which only the plain implementations know.
    """
    kind, options = _unbound(opt_func)
    known = isinstance(kind, type) and kind.__module__.startswith("torch.optim")
    sparse = any(getattr(module, "sparse", None) is True for module in model.modules())
    real = all(p.is_floating_point() for p in model.parameters())
    if (
        known
        and real
        and not sparse
        and "fused" in signature(kind).parameters
        and not options.keys() & _IMPLEMENTATIONS
    ):
        try:
            return opt_func([dict(group) for group in groups], lr=lr, fused=True)
        except RuntimeError:  # no fused kernel for this device, or these types
            pass
    return opt_func(groups, lr=lr)


def bound_rate(opt_func: Callable[..., Any]) -> float:
    """The learning rate that is bound in an `opt_func` (`partial(SGD, lr=0.1)`), or 0.001."""
    bound = _unbound(opt_func)[1].get("lr")
    return 1e-3 if bound is None else bound


def _unbound(opt_func: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function inside partials, and the keywords that they bind."""
    options: dict[str, Any] = {}
    while isinstance(opt_func, partial):
        options = {**opt_func.keywords, **options}
        opt_func = opt_func.func
    return opt_func, options


_IMPLEMENTATIONS = {"fused", "foreach", "capturable", "differentiable"}


class Optimizers(dict):
    """Several optimizers by name, which step and clear together."""

    def step(self) -> None:
        """Let each step."""
        for opt in self.values():
            opt.step()

    def zero_grad(self) -> None:
        """Clear the gradients of each."""
        for opt in self.values():
            clear_gradients(opt)


_ZERO_GRAD = Optimizer.zero_grad


def clear_gradients(opt: Optimizer | Optimizers) -> None:
    """Do what `opt.zero_grad()` does, in a tenth of the time where that is torch's own.

    Around its loop torch's opens and closes a range for the profiler, for some 5 to 10 microseconds: as much as all the
    rest that a Learner's step costs beside torch's work.
    """
    if isinstance(opt, dict) or getattr(opt.zero_grad, "__func__", None) is not _ZERO_GRAD:
        opt.zero_grad()
        return
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = None


def as_one(made: Any) -> Optimizer | Optimizers:
    """What `create_opt` made: an optimizer, or several that can be used as one.

    Raises:
        TypeError: something else.
    """
    found = list(made.values()) if isinstance(made, dict) else [made]
    if not found or not all(isinstance(opt, Optimizer) for opt in found):
        library = library_of(next(iter(found), None))
        of = f", made for {library}, another library" if library else ""
        raise TypeError(
            f"opt_func or create_opt made {made!r}{of}; it must be a torch optimizer, or a dict of them by name"
        )
    return Optimizers(made) if isinstance(made, dict) else made


def for_each(made: Optimizer | Optimizers, value: Any) -> list[Any]:
    """What is given for each optimizer: of several, a mapping has it by name; anything else is for all of them.

    Raises:
        ValueError: a name that no optimizer has.
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
    """What `for_each` takes apart: one value for each optimizer, by name if there are several."""
    return dict(zip(made, values, strict=True)) if isinstance(made, dict) else values[0]


def n_groups(opt: Optimizer) -> int:
    """The number of the splitter's groups in `opt`."""
    return max(max(1 + _group_of(i, g), g.get(COUNT, 0)) for i, g in enumerate(opt.param_groups))


def _group_of(i: int, group: dict) -> int:
    # A factory that makes its own groups loses the mark: each is then a group of its own.
    return group.get(GROUP, i)


def set_hyper(opt: Optimizer, name: str, values: float | Sequence[float], exempt: Set[int] = frozenset()) -> None:
    """Set a hyper-parameter: one value for all of the splitter's groups, or one for each.

    Args:
        name: an entry of the optimizer's groups; 'momentum' also means the first of `betas`.
        exempt: the ids of parameters whose groups are left alone, where `split_decay` has parted them from others.

    Raises:
        ValueError: the optimizer has no such hyper-parameter.
    """
    for i, group in enumerate(opt.param_groups):
        key = _key(opt, group, name)
        if exempt and PLACES in group and id(group["params"][0]) in exempt:
            continue
        value = values if isinstance(values, int | float) else values[_group_of(i, group)]
        if key != name:
            group[key] = (value, *group[key][1:])
        elif isinstance(group[key], Tensor):
            group[key].fill_(value)
        else:
            group[key] = value


def _key(opt: Optimizer, group: dict, name: str) -> str:
    "Where a group has a hyper-parameter."
    if name in group:
        return name
    if name == "momentum" and "betas" in group:
        return "betas"
    known = sorted(k for k in group if k not in ("params", GROUP, COUNT, PLACES))
    near = did_you_mean(name, [*known, *(["momentum"] if "betas" in group else [])], cutoff=0.5)
    raise ValueError(f"{type(opt).__name__} has no hyper-parameter {name!r}; it has {known}{near}")


def get_hypers(opt: Optimizer, names: Iterable[str]) -> list[dict]:
    """Of each of the optimizer's groups, the entries that `set_hyper` would change, to be put back later.

    Raises:
        ValueError: the optimizer has no such hyper-parameter.
    """
    keys = [{_key(opt, group, name) for name in names} for group in opt.param_groups]
    return [
        {k: group[k].clone() if isinstance(group[k], Tensor) else group[k] for k in found}
        for group, found in zip(opt.param_groups, keys, strict=True)
    ]


def has_momentum(opt: Optimizer) -> bool:
    """Whether it works with momentum, or can begin to: RMSprop with a momentum of 0 keeps no state for it."""
    begins = isinstance(opt, SGD)
    return all("betas" in g or g.get("momentum") or (begins and "momentum" in g) for g in opt.param_groups)


def rates(lr: float | slice | Iterable[float], count: int) -> list[float]:
    """Learning rates for `count` groups.

    A number is for all; `slice(hi)` is `hi` for the last and a tenth of it for the others; `slice(lo, hi)` is a
    geometric row; a list or an array has one for each.

    Raises:
        TypeError: another type; or a set of several, which has no order.
        ValueError: a list of another length, a slice with a step, or a rate that is no positive number.
    """
    if isinstance(lr, slice):
        if lr.stop is None or lr.step is not None:
            raise ValueError(f"got lr={lr}; write slice(hi) or slice(lo, hi)")
        high = _rate(lr.stop)
        low = high / 10 if lr.start is None else _rate(lr.start)
        if lr.start is not None and not (low > 0 and high > 0):
            raise ValueError(f"got lr={lr}; slice(lo, hi) is a row of rates by a factor, so both are above 0")
        if count == 1 or lr.start is None:
            found = [low] * (count - 1) + [high]
        else:
            step = (high / low) ** (1 / (count - 1))
            found = [low * step**i for i in range(count)]
    elif is_row(lr):
        found = list(map(_rate, lr))
        if len(found) != count:
            raise ValueError(f"got {len(found)} learning rates for {count} parameter groups (the splitter's groups)")
    else:
        found = [_rate(lr)] * count
    if not all(rate >= 0 for rate in found):
        raise ValueError(f"got the learning rates {found}; they must not be negative")
    return found


def is_row(lr: Any) -> TypeGuard[Iterable]:
    """Whether learning rates are given one by one: in a list, a tuple, an array, a generator, or a set of one."""
    if isinstance(lr, str | Mapping) or callable(lr) or (isinstance(lr, Set) and len(lr) > 1):
        return False
    return lr.ndim == 1 if hasattr(lr, "ndim") else isinstance(lr, Iterable)


def listed(lr: Any) -> Any:
    """Learning rates with every row of them as a list, since a generator can be read only once."""
    if isinstance(lr, Mapping):
        return {name: listed(each) for name, each in lr.items()}
    return list(lr) if is_row(lr) else lr


def _rate(lr: Any) -> float:
    if isinstance(lr, Real) or getattr(lr, "ndim", None) == 0:
        return float(lr)
    unordered = " (a set has no order)" if isinstance(lr, Set) else ""
    raise TypeError(
        f"got lr={lr!r}; a learning rate is a number, a slice, or a list with one number per group{unordered}; for "
        "several optimizers it may be a dict of these by their names"
    )


def group_rates(made: Optimizer | Optimizers, lr: Any, default: Any) -> list[list[float]]:
    """Of each optimizer the learning rates of its groups.

    Args:
        lr: as in `rates`; of several optimizers maybe a mapping by name.
        default: the same, for where `lr` is `None` or leaves an optimizer out.
    """
    opts = made.values() if isinstance(made, dict) else [made]
    given = zip(opts, for_each(made, listed(lr)), for_each(made, listed(default)), strict=True)
    return [rates(default if lr is None else lr, n_groups(opt)) for opt, lr, default in given]


def set_decay(opt: Optimizer, model: nn.Module, wd: float, wd_bn_bias: bool) -> None:
    """Give weights the decay `wd`, and norms and biases 0 unless `wd_bn_bias`; optimizer state is kept.

    Raises:
        ValueError: the optimizer has no weight decay.
    """
    if not wd_bn_bias:
        split_decay(opt, model)
    set_hyper(opt, "weight_decay", wd)
    if not wd_bn_bias:
        bare = norms_and_biases(model)
        for group in opt.param_groups:
            if all(id(p) in bare for p in group["params"]):
                group["weight_decay"] = 0.0


def split_decay(opt: Optimizer, model: nn.Module) -> None:
    """Part each group of `opt` into weights, then norms and biases, keeping its options and the optimizer's state."""
    opt.param_groups[:] = _parted(opt.param_groups, model)


def _parted(groups: list[dict], model: nn.Module) -> list[dict]:
    bare = norms_and_biases(model)
    parted = []
    for i, group in enumerate(groups):
        places = group.get(PLACES) or range(len(group["params"]))
        for is_bare in (False, True):
            kept = [(place, p) for place, p in zip(places, group["params"], strict=True) if (id(p) in bare) == is_bare]
            if kept:
                own = {"params": [p for _, p in kept], PLACES: [place for place, _ in kept], GROUP: _group_of(i, group)}
                parted.append({**group, **own})
    return parted


def _joined(groups: list[dict]) -> list[dict]:
    "Undo `_parted`."
    whole: dict[int, list[dict]] = {}
    for i, group in enumerate(groups):
        whole.setdefault(_group_of(i, group), []).append(group)
    joined = []
    for parts in whole.values():
        if len(parts) == 1 or not all(PLACES in part for part in parts):
            joined += parts
            continue
        pairs = [pair for part in parts for pair in zip(part[PLACES], part["params"], strict=True)]
        options = {k: v for k, v in parts[0].items() if k != PLACES}
        joined.append({**options, "params": [p for _, p in sorted(pairs, key=lambda pair: pair[0])]})
    return joined


def norms(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of normalisation layers."""
    return [p for module in model.modules() if isinstance(module, _NORMS) for p in module.parameters(recurse=False)]


def norms_and_biases(model: nn.Module) -> set[int]:
    """The ids of the parameters that weight decay leaves alone: those of normalisation layers, and every bias."""
    named = [(name.rpartition(".")[2], p) for name, p in model.named_parameters()]
    biases = [p for name, p in named if name.startswith("bias") or name.endswith("bias")]
    return {id(p) for p in (*norms(model), *biases)}


def state_to_params(opt: Optimizer) -> None:
    """Bring optimizer state to the device of its parameter and into its memory layout, which may have changed.

    torch's fused kernels take for granted that a parameter and its state lie in memory alike.
    """
    for group in opt.param_groups:
        # As torch's own loading has it: the step counter stays on the host unless the kernel reads it on the device.
        counter_too = group.get("fused") or group.get("capturable")
        for p in group["params"]:
            state = opt.state.get(p, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and (key != "step" or counter_too):
                    state[key] = laid_out_as(p, value)


def laid_out_as(p: Tensor, value: Tensor) -> Tensor:
    """`value` on the device of `p`, and in its memory layout if it has its shape."""
    strided = p.layout is value.layout is torch.strided
    if strided and value.shape == p.shape and value.stride() != p.stride():
        return torch.empty_like(p, dtype=value.dtype, requires_grad=False).copy_(value)
    return value.to(p.device)


def load_state(made: Optimizer | Optimizers, saved: dict, model: nn.Module) -> None:
    """Load the state of one optimizer, or of several by name; parted for weight decay or not, on either side.

    Raises:
        ValueError: the state is of other optimizers or other parameter groups; none is loaded.
    """
    opts = made if isinstance(made, dict) else {"": made}
    states = {"": saved} if "param_groups" in saved else saved
    if opts.keys() != states.keys():
        raise ValueError(f"it has the optimizers {_names(states)}, the learner has {_names(opts)}")
    fitting = {name: _groups_like(states[name], opt, model) for name, opt in opts.items()}
    for name, opt in opts.items():
        opt.param_groups[:] = fitting[name]
        with torch.no_grad():
            opt.load_state_dict(states[name])
        state_to_params(opt)


def _names(opts: dict) -> str:
    return ", ".join(map(repr, opts)) if opts.keys() != {""} else "(a single one)"


def _groups_like(state: dict, opt: Optimizer, model: nn.Module) -> list[dict]:
    "The groups of `opt`, parted or joined as those of a saved state are."
    saved = state["param_groups"]
    groups = _joined(opt.param_groups)
    if any(PLACES in group for group in saved):
        groups = _parted(groups, model)
    sizes = [[(_group_of(i, g), len(g["params"])) for i, g in enumerate(each)] for each in (saved, groups)]
    if sizes[0] != sizes[1]:
        found = [[size for _, size in each] for each in sizes]
        raise ValueError(f"its optimizer has groups of {found[0]} parameters, the learner's of {found[1]}")
    return groups
