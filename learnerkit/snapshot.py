"""Undoing what a trial changes: training, or running a model, that leaves no trace on a learner."""

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
from learnerkit.data.batches import rows_of, to_device
from learnerkit.data.order import first_batch, keep_seeds, samplers_of, with_batches
from learnerkit.torch_internals import uncompiled
from learnerkit.utils import own_loss_arguments, training_modes, unwrap

if TYPE_CHECKING:
    from learnerkit.learner import Learner


@contextmanager
def unchanged(learn: "Learner") -> Iterator[None]:
    """Restore at the end everything that training changes on a learner, exactly, also after an error.

    That is: weights, buffers, gradients and `requires_grad` of the model and of the loss; the optimizer, its groups and
    its state; the random states of this process, its devices and the loaders; the attributes of samplers. The copies
    are on the host, so the device needs no more memory.

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
        stack.callback(setattr, learn.dls, "_twins", learn.dls._twins)  # workers of copies made in here end
        for i, dl in enumerate(loaders):
            if isinstance(dl, DataLoader) and dl.persistent_workers:
                loaders[i] = with_batches(dl)  # a copy, with other workers: theirs have random states out of reach
        stack.enter_context(world.device_streams_kept(device))
        for module in modules:
            _put_back_module(module, stack)
        stack.callback(setattr, learn, "opt", opt)
        for each in opts:
            stack.callback(_put_back_optimizer(each))
        yield


_TRIED = ("model", "batch", "batch_size", "xb", "yb", "pred", "output", "loss", "loss_grad")


@contextmanager
def trial(learn: "Learner", model: nn.Module) -> Iterator[None]:
    """Restore random states, buffers, modes and the learner's batch after running a model on a batch.

    Args:
        learn: the learner.
        model: its unwrapped model; in the context it is `learn.model`.
    """
    before, restore_buffers = {name: getattr(learn, name) for name in _TRIED}, restorer(list(model.buffers()))
    # Uncompiled, as to compile a model would take longer than the trial.
    with keep_seeds(device=learn.dls.device), training_modes(model), uncompiled():
        try:
            learn.model = model
            yield
        finally:
            torch.clear_autocast_cache()  # it may have weights that were cast in the graph of this trial
            for name, value in before.items():
                setattr(learn, name, value)
            restore_buffers()


def give_shapes(learn: "Learner") -> None:
    """Give lazy layers their shapes and first weights, by a training batch and alike on every rank.

    Raises:
        ValueError: the model cannot run on the batch as the loader gives it, or the batch could not be read again.
    """
    model, dl = unwrap(learn.model), learn.dls.train
    lazy = next((name for name, t in (*model.named_parameters(), *model.named_buffers()) if is_lazy(t)), None)
    if lazy is None:
        return
    advice = "run the model on a batch before the fit: learn.model(x)"
    if hasattr(dl, "__next__"):
        raise ValueError(
            f"{lazy} has no shape until the model has seen a batch, and the loader can be read only once; {advice}"
        )
    before, batch = {name: getattr(learn, name) for name in _TRIED}, first_batch(dl)
    try:
        with torch.no_grad(), training_modes(model):
            learn.model = model.eval()
            predict(learn, batch)
    except Exception as error:
        raise ValueError(
            f"{lazy} has no shape until the model has seen a batch, and it cannot run on the first training batch as "
            f"the loader gives it ({type(error).__name__}: {error}); {advice}"
        ) from error
    finally:
        for name, value in before.items():
            setattr(learn, name, value)


def predict(learn: "Learner", batch: Any) -> None:
    """Run `learn.model` on a batch of the training loader; it becomes the learner's batch."""
    learn.batch = to_device(batch, learn.dls.device)
    learn.xb, learn.yb = learn.dls.split(learn.batch, own_loss_arguments(learn.loss_func, learn.model))
    learn.batch_size = rows_of(learn.xb)
    learn._forward()


def check_shaped(modules: Iterable[nn.Module]) -> None:
    """Refuse parameters that get their shape from the first batch, since they cannot be copied before it."""
    for module in modules:
        for name, t in (*module.named_parameters(), *module.named_buffers()):
            if is_lazy(t):
                raise ValueError(
                    f"{name} of {type(module).__name__} has no shape until the model has seen a batch (a lazy module): "
                    "run it on one first, with learn.validate() or learn.model(x)"
                )


def _put_back_sampler(sampler: Any, stack: ExitStack) -> None:
    """Register on `stack` what restores a sampler: its attributes, random states, and the order of its index lists.

    Other data are not copied, as a sampler may have a reference to a large dataset.
    """
    attributes = getattr(sampler, "__dict__", {})
    stack.callback(attributes.update, dict(attributes))
    stack.callback(attributes.clear)  # before that: the last one is called first
    for x in list(attributes.values()):
        if isinstance(x, list):
            stack.callback(x.__setitem__, slice(None), list(x))
        elif isinstance(x, np.ndarray | Tensor) and x.ndim == 1:
            stack.callback(x.__setitem__, slice(None), copy.deepcopy(x))  # type: ignore[arg-type]
        elif isinstance(x, np.random.Generator):
            stack.callback(setattr, x.bit_generator, "state", x.bit_generator.state)
        for get, put in (("getstate", "setstate"), ("get_state", "set_state")):
            if hasattr(x, get) and hasattr(x, put):
                stack.callback(getattr(x, put), getattr(x, get)())


def _put_back_module(module: nn.Module, stack: ExitStack) -> None:
    """Register on `stack` what restores each parameter and buffer: values, gradient and `requires_grad`."""

    def put_back(part: nn.Module, name: str, values: Callable, requires_grad: bool, grad: Callable) -> None:
        t = values()
        setattr(part, name, t)  # it may have been replaced
        t.requires_grad_(requires_grad)
        t.grad = grad()

    for part in module.modules():
        for name, t in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            stack.callback(put_back, part, name, restorer(t), t.requires_grad, restorer(t.grad))


def _put_back_optimizer(opt: Optimizer) -> Callable[[], None]:
    """Return a function that restores an optimizer's groups, their hyper-parameters, and its state."""
    groups, state = group_restorer(opt), restorer(opt.state)

    def put_back() -> None:
        groups()
        opt.state.clear()
        opt.state.update(state())

    return put_back


def group_restorer(opt: Optimizer) -> Callable[[], None]:
    """Return a function that restores an optimizer's groups with the hyper-parameters they have now."""
    groups = [(g, g["params"], restorer({k: v for k, v in g.items() if k != "params"})) for g in opt.param_groups]

    def put_back() -> None:
        for group, params, options in groups:
            group.clear()
            group.update(params=params, **options())
        opt.param_groups[:] = [group for group, _, _ in groups]

    return put_back


def restorer(x: Any) -> Callable[[], Any]:
    """Return a function that returns `x` as it is now; it gives the tensors in it, in place, their present values."""
    if isinstance(x, Tensor):
        values = _unexpanded(x).detach().to("cpu", copy=True)  # a host-device sync

        def put_back() -> Tensor:
            with torch.no_grad():
                _unexpanded(x).copy_(values)
            return x

        return put_back
    if isinstance(x, dict):
        entries = {k: restorer(v) for k, v in x.items()}
        return lambda: {k: entry() for k, entry in entries.items()}
    if type(x) in (list, tuple):
        items = [restorer(v) for v in x]
        return lambda: type(x)(item() for item in items)
    value = copy.deepcopy(x)
    return lambda: value


def _unexpanded(x: Tensor) -> Tensor:
    """Return `x` without its expanded (stride 0) dimensions, so that it can be written in place."""
    if x.layout is torch.strided:
        for dim in range(x.ndim):
            if x.stride(dim) == 0 and x.shape[dim] > 1:
                x = x.narrow(dim, 0, 1)
    return x
