"""Trying something out on a learner: training that leaves no trace."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from learnerkit.data import keep_seeds
from learnerkit.utils import unwrap

if TYPE_CHECKING:
    from learnerkit.learner import Learner


@contextmanager
def unchanged(learn: "Learner") -> Iterator[None]:
    """Give a learner everything that training changes back at the end, exactly and however it ends.

    That is: weights, buffers, gradients and what requires them, also those of the loss; the optimizer, its groups and
    its state; the random streams of this process and of the loaders. Copies are kept on the host, so that the device's
    memory holds what it would without.
    """
    device, opt, opts = learn.dls.device, learn.opt, learn.opts
    with ExitStack() as stack:
        for dl in learn.dls.loaders:
            stack.enter_context(keep_seeds(dl))
        if device.type != "cpu":
            stack.enter_context(torch.random.fork_rng([device.index or 0], device_type=device.type))
        for module in (unwrap(learn.model), learn.loss_func):
            if isinstance(module, nn.Module):
                stack.callback(_put_back_module(module))
        stack.callback(setattr, learn, "opt", opt)
        for each in opts:
            stack.callback(_put_back_optimizer(each))
        yield


def _put_back_module(module: nn.Module) -> Callable[[], None]:
    """What gives every parameter and buffer back its values, its gradient and whether it requires one."""
    kept = [
        (part, name, t, _kept(t), t.requires_grad, _kept(t.grad))
        for part in module.modules()
        for named in (part.named_parameters(recurse=False), part.named_buffers(recurse=False))
        for name, t in named
    ]

    def put_back() -> None:
        for part, name, tensor, values, requires_grad, grad in kept:
            values()
            setattr(part, name, tensor)  # it may be another one by now
            tensor.requires_grad_(requires_grad)
            tensor.grad = grad()

    return put_back


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
        values = x.detach().to("cpu", copy=True)  # waits for the device

        def put_back() -> Tensor:
            with torch.no_grad():
                return x.copy_(values)

        return put_back
    if isinstance(x, dict):
        entries = {k: _kept(v) for k, v in x.items()}
        return lambda: {k: entry() for k, entry in entries.items()}
    if type(x) in (list, tuple):
        items = [_kept(v) for v in x]
        return lambda: type(x)(item() for item in items)
    value = copy.deepcopy(x)
    return lambda: value
