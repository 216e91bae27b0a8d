"""Activation checkpointing: activations are recomputed in the backward pass instead of being kept for it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from learnerkit import distributed
from learnerkit.callback import Callback
from learnerkit.large.units import units
from learnerkit.utils import listify, unwrap


class ActivationCheckpointing(Callback):
    """Keeps only the inputs of each unit of the model for the backward pass, which recomputes the unit.

    Activations then need much less memory, and a step takes longer by about a forward pass (Chen et al. 2016,
    https://arxiv.org/abs/1604.06174). All numbers stay the same, bit by bit: the unit is computed again with the same
    dropout, autocast, buffers and attributes, and what it changes then, such as the statistics of BatchNorm, is
    dropped. The model keeps its modules and their names; afterwards it is as it was. `learn.check()` says how much is
    kept, and how much time it takes.

    A unit that draws random numbers from anywhere but torch, or appends to one of its lists, does so a second time,
    and hooks on modules inside a unit are called again. torch refuses a unit that changes its inputs in place, or that
    computes something else the second time, as one of transformers does that has filled a cache (set
    `model.config.use_cache = False`).

    Args:
        modules: names of modules, patterns of names (`"layers.*"`), or classes. `None`: the blocks of which the model
            is made, or, where there are none, its sizable parts.

    Raises:
        TypeError: an entry of `modules` that is neither a str nor a class.
        ValueError: no module has such a name or class, or the model has no such parts.
    """

    order = 2  # before DistributedCallback wraps the model

    def __init__(self, modules: str | type[nn.Module] | Iterable[str | type[nn.Module]] | None = None) -> None:
        self.modules = None if modules is None else listify(modules)
        self._recomputed = ExitStack()
        self._forwards: dict[nn.Module, partial] = {}

    def before_fit(self) -> None:
        learn = self.learn
        if isinstance(learn.model, nn.DataParallel):
            distributed.warn_once(
                "ActivationCheckpointing leaves the model as it is: DataParallel makes copies of it for each batch"
            )
        elif learn.task not in ("validate", "predict"):
            self._recomputed.enter_context(self.recomputed(learn.model))

    def cleanup_fit(self) -> None:
        self._recomputed.close()

    @contextmanager
    def recomputed(self, model: nn.Module) -> Iterator[None]:
        """Have the units of a model computed again in each backward pass."""
        with ExitStack() as stack:
            chosen = True if self.modules is None else self.modules
            for module in units(unwrap(model), chosen, "modules").values():
                # Sharding hooks the call, so `forward` is replaced, and on the object, so that its class stays.
                attributes = vars(module)
                own = {"forward": attributes["forward"]} if "forward" in attributes else {}
                again = partial(_recomputed, module, module.forward)
                if module in self._forwards and self._forwards[module].args == again.args:
                    again = self._forwards[module]  # Compiled code may exist for it.
                attributes["forward"] = self._forwards[module] = again
                stack.callback(attributes.update, own)
                stack.callback(attributes.pop, "forward", None)
            yield


def _recomputed(module: nn.Module, forward: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Run a module's forward, and have the backward pass run it again.

    The module is an argument, so that a copy of the model runs its own.
    """
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)

    def run(*values: Any) -> Any:
        named = zip(kwargs, values[len(args) :], strict=True)
        return forward(*values[: len(args)], **dict(named))

    # Keywords are passed by position, since torch must see their tensors, and `checkpoint` has keywords itself.
    values = (*args, *kwargs.values())
    if torch.compiler.is_compiling():  # It recomputes what has no side effects, and takes no contexts.
        return checkpoint(run, *values, use_reentrant=False)
    then, times = [None if isinstance(value, Tensor) else _copied(value) for value in values], count()

    def again(*values: Any) -> Any:
        # A list of tensors may have grown since: that of a DenseNet has.
        first = next(times) == 0
        return run(*(v if first or isinstance(v, Tensor) else _copied(x) for v, x in zip(values, then, strict=True)))

    return checkpoint(again, *values, use_reentrant=False, context_fn=lambda: (nullcontext(), _AsBefore(module)))


def _copied(x: Any) -> Any:
    """Copy lists, and dicts, inside each other."""
    if type(x) is dict:
        return {key: _copied(value) for key, value in x.items()}
    return type(x)(map(_copied, x)) if type(x) in (list, tuple) else x


class _AsBefore:
    """A context that gives a module the attributes and buffers that it had when this was made, and restores them."""

    def __init__(self, module: nn.Module) -> None:
        self.buffers = {b: b.detach().clone() for b in module.buffers()}
        self.then = {m: vars(m) | {"_buffers": dict(m._buffers)} for m in module.modules()}
        self.now: list[dict[nn.Module, dict[str, Any]]] = []

    def __enter__(self) -> None:
        self.now.append({m: dict(vars(m)) for m in self.then})
        copies = {b: kept.clone() for b, kept in self.buffers.items()}  # the graph may be used again
        for m, attributes in self.then.items():
            named = {name: b if b is None else copies[b] for name, b in attributes["_buffers"].items()}
            _put(m, attributes | {"_buffers": named})

    def __exit__(self, *error: object) -> None:
        for m, attributes in self.now.pop().items():
            _put(m, attributes)


def _put(module: nn.Module, attributes: dict[str, Any]) -> None:
    vars(module).clear()
    vars(module).update(attributes)
