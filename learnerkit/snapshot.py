"""Trying something out on a learner: training that leaves no trace."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from learnerkit import world
from learnerkit.data.order import keep_seeds, samplers_of, with_batches
from learnerkit.utils import training_modes, unwrap

if TYPE_CHECKING:
    from learnerkit.learner import Learner


@contextmanager
def unchanged(learn: "Learner") -> Iterator[None]:
    """Give a learner everything that training changes back at the end, exactly and however it ends.

    That is: weights, buffers, gradients and what requires them, also those of the loss; the optimizer, its groups and
    its state; the random streams of this process and its devices, and of the loaders; samplers with what they remember.
    Copies are kept on the host, so that the device's memory holds what it would without.

    Raises:
        ValueError: the model has parameters that get their shape from the first batch.
    """
    device, opt, opts, loaders = learn.dls.device, learn.opt, learn.opts, learn.dls.loaders
    modules = [m for m in (unwrap(learn.model), learn.loss_func) if isinstance(m, nn.Module)]
    check_shaped(modules)
    with ExitStack() as stack:
        for dl in loaders:
            stack.enter_context(keep_seeds(dl))
            for sampler in samplers_of(dl):
                _put_back_sampler(sampler, stack)
        stack.callback(loaders.__setitem__, slice(None), list(loaders))
        for i, dl in enumerate(loaders):
            if isinstance(dl, DataLoader) and dl.persistent_workers:  # nobody can give their random streams back
                loaders[i] = with_batches(dl)  # with workers of its own
        stack.enter_context(world.device_streams_kept(device))
        for module in modules:
            _put_back_module(module, stack)
        stack.callback(setattr, learn, "opt", opt)
        for each in opts:
            stack.callback(_put_back_optimizer(each))
        yield


_TRIED = ("model", "xb", "pred", "output", "loss", "loss_grad")


@contextmanager
def trial(learn: "Learner", model: nn.Module) -> Iterator[None]:
    """Run a model on a batch without leaving a trace in random streams, buffers, modes or the learner.

    Args:
        learn: the learner.
        model: its own, without what wraps it; it is `learn.model` meanwhile.
    """
    kept = {name: getattr(learn, name) for name in _TRIED}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    eager = torch.compiler.set_stance  # a compiled model runs as it is: to compile takes longer than the trial
    with keep_seeds(device=learn.dls.device), training_modes(model), eager("force_eager"):
        try:
            learn.model = model
            yield
        finally:
            torch.clear_autocast_cache()  # weights cast here hang on this trial's graph, or on none
            for name, value in kept.items():
                setattr(learn, name, value)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def check_shaped(modules: Iterable[nn.Module]) -> None:
    """Refuse parameters that get their shape from the first batch, before which nothing can be kept of them."""
    for module in modules:
        for name, t in (*module.named_parameters(), *module.named_buffers()):
            if is_lazy(t):
                raise ValueError(
                    f"{name} of {type(module).__name__} has no shape until the model has seen a batch (a lazy module): "
                    "show it one first, with learn.validate() or learn.model(x)"
                )


def _put_back_sampler(sampler: Any, stack: ExitStack) -> None:
    """Let a stack give a sampler what it has back: its attributes, random states, and the order in its rows.

    Data are not copied, as a sampler may know a large dataset.
    """
    attributes = getattr(sampler, "__dict__", {})
    before = dict(attributes)

    def put_back() -> None:
        attributes.clear()
        attributes.update(before)

    def refill(rows: Any, values: Any) -> None:
        rows[:] = values

    stack.callback(put_back)
    for x in before.values():
        if isinstance(x, list):
            stack.callback(refill, x, list(x))
        elif isinstance(x, np.ndarray | Tensor) and x.ndim == 1:
            stack.callback(refill, x, copy.deepcopy(x))
        elif isinstance(x, np.random.Generator):
            stack.callback(setattr, x.bit_generator, "state", x.bit_generator.state)
        for get, put in (("getstate", "setstate"), ("get_state", "set_state")):
            if hasattr(x, get) and hasattr(x, put):
                stack.callback(getattr(x, put), getattr(x, get)())


def _put_back_module(module: nn.Module, stack: ExitStack) -> None:
    """Let a stack give every parameter and buffer back its values, its gradient and whether it requires one."""

    def put_back(part: nn.Module, name: str, t: Tensor, values: Callable, requires_grad: bool, grad: Callable) -> None:
        values()
        setattr(part, name, t)  # it may be another one by now
        t.requires_grad_(requires_grad)
        t.grad = grad()

    for part in module.modules():
        for named in (part.named_parameters(recurse=False), part.named_buffers(recurse=False)):
            for name, t in named:
                stack.callback(put_back, part, name, t, _kept(t), t.requires_grad, _kept(t.grad))


def _put_back_optimizer(opt: Optimizer) -> Callable[[], None]:
    """What gives an optimizer back its groups, what they hold, and its state."""
    groups = groups_put_back(opt)
    state = {p: _kept(values) for p, values in opt.state.items()}

    def put_back() -> None:
        groups()
        opt.state.clear()
        opt.state.update({p: values() for p, values in state.items()})

    return put_back


def groups_put_back(opt: Optimizer) -> Callable[[], None]:
    """What gives an optimizer back its groups as they are now, with every hyper-parameter, when it is called."""
    groups = [(g, g["params"], _kept({k: v for k, v in g.items() if k != "params"})) for g in opt.param_groups]

    def put_back() -> None:
        for group, params, options in groups:
            group.clear()
            group.update(params=params, **options())
        opt.param_groups[:] = [group for group, _, _ in groups]

    return put_back


def _kept(x: Any) -> Callable[[], Any]:
    """What returns `x` as it is now: the tensors in it are the same ones then, with today's values."""
    if isinstance(x, Tensor):
        values = _once(x).detach().to("cpu", copy=True)  # waits for the device

        def put_back() -> Tensor:
            with torch.no_grad():
                _once(x).copy_(values)
            return x

        return put_back
    if isinstance(x, dict):
        entries = {k: _kept(v) for k, v in x.items()}
        return lambda: {k: entry() for k, entry in entries.items()}
    if type(x) in (list, tuple):
        items = [_kept(v) for v in x]
        return lambda: type(x)(item() for item in items)
    value = copy.deepcopy(x)
    return lambda: value


def _once(x: Tensor) -> Tensor:
    """`x` with each of its numbers once: an expanded tensor, which cannot be written to, shows the same ones again."""
    if x.layout is torch.strided:
        for dim in range(x.ndim):
            if x.stride(dim) == 0 and x.shape[dim] > 1:
                x = x.narrow(dim, 0, 1)
    return x
