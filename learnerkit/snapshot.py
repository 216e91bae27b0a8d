"""Undoing what a trial changes: training, or running a model, that leaves no trace on a learner."""

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from learnerkit import world
from learnerkit.callback import Callback
from learnerkit.data.batches import rows_of, to_device
from learnerkit.data.order import (
    GENERATORS,
    first_batch,
    generator_state,
    has_state,
    keep_seeds,
    samplers_of,
    set_generator_state,
    with_batches,
)
from learnerkit.explain import explain, explanation
from learnerkit.torch_internals import uncompiled
from learnerkit.utils import own_loss_arguments, training_modes, unbound, unwrap

if TYPE_CHECKING:
    from learnerkit.learner import Learner


@contextmanager
def unchanged(learn: "Learner", but: Callback | None = None) -> Iterator[None]:
    """Restore at the end everything that training changes on a learner, exactly, also after an error.

    That is: model and loss, with weights, buffers, gradients, `requires_grad` and the attributes of their modules; the
    optimizer, its groups and its state; the random states of this process, its devices and the loaders; the attributes
    of samplers; and the state of callbacks, loaders and datasets that have a `state_dict`. The copies are on the host,
    so the device needs no more memory.

    Args:
        learn: the learner.
        but: a callback that keeps what it has seen.

    Raises:
        ValueError: the model has parameters that get their shape from the first batch.
    """
    device, opt, opts, loaders = learn.dls.device, learn.opt, learn.opts, learn.dls.loaders
    owners = unwrap(learn.model), unbound(learn.loss_func)[0]
    check_shaped([owner for owner in owners if isinstance(owner, nn.Module)])
    with ExitStack() as stack:
        for dl in loaders:
            stack.enter_context(keep_seeds(dl))
            for sampler in samplers_of(dl):
                _put_back_sampler(sampler, stack)
            for part in (dl, getattr(dl, "dataset", None), *samplers_of(dl)):
                if has_state(part):
                    _put_back_state(part, stack)
        stack.callback(loaders.__setitem__, slice(None), list(loaders))
        stack.callback(setattr, learn.dls, "_twins", learn.dls._twins)  # workers of copies made in here end
        for i, dl in enumerate(loaders):
            if isinstance(dl, DataLoader) and dl.persistent_workers:
                loaders[i] = with_batches(dl)  # a copy, with other workers: theirs have random states out of reach
        for cb in learn.cbs:
            if type(cb).state_dict is not Callback.state_dict and not cb.only_fit and cb is not but:
                _put_back_state(cb, stack)
        stack.enter_context(world.device_streams_kept(device))
        for owner in owners:
            _put_back_modules(owner, stack, _on_host)
        stack.callback(setattr, learn, "opt", opt)
        for each in opts:
            stack.callback(_put_back_optimizer(each))
        yield


_TRIED = ("model", "batch", "batch_size", "xb", "yb", "pred", "output", "loss", "loss_grad")


@contextmanager
def trial(learn: "Learner", model: nn.Module) -> Iterator[None]:
    """Restore model and loss, random states and the learner's batch after running a model on a batch.

    For as long as it lasts it takes the memory of the weights once more, on their device, and the time to copy them
    twice: a forward pass may change any of them, frozen ones too.

    Args:
        learn: the learner.
        model: its unwrapped model; in the context it is `learn.model`.
    """
    before = {name: getattr(learn, name) for name in _TRIED}
    # Uncompiled, as to compile a model would take longer than the trial.
    with keep_seeds(device=learn.dls.device), training_modes(model), uncompiled(), ExitStack() as stack:
        for owner in (model, unbound(learn.loss_func)[0]):
            _put_back_modules(owner, stack, torch.clone)
        try:
            learn.model = model
            yield
        finally:
            torch.clear_autocast_cache()  # it may have weights that were cast in the graph of this trial
            for name, value in before.items():
                setattr(learn, name, value)


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
        with torch.no_grad(), training_modes(model), ExitStack() as stack:
            _put_back_modules(model, stack, torch.clone)
            learn.model = model.eval()
            predict(learn, batch)
    except Exception as error:
        mend = next(iter(explanation(learn, error)), "")
        explain(learn, error)
        raise ValueError(
            f"{lazy} has no shape until the model has seen a batch, and it cannot run on the first training batch as "
            f"the loader gives it ({type(error).__name__}: {error}); {mend or advice}"
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


def put_back_attributes(owner: Any, stack: ExitStack) -> None:
    """Register on `stack` what restores an object's attributes: which they are, what is in containers, generators."""
    for x in (getattr(owner, "__dict__", {}), *_held(owner)):
        if type(x) in _CONTAINERS:
            stack.callback(_refill, x, dict(x) if isinstance(x, dict) else list(x))
        elif isinstance(x, GENERATORS):
            stack.callback(set_generator_state, x, generator_state(x))


_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)


def _held(owner: Any) -> list[Any]:
    """The attributes of an object, and what those that are containers hold: no deeper, as that may be anything."""
    values = list(getattr(owner, "__dict__", {}).values())
    inside = [x.values() if isinstance(x, dict) else x for x in values if type(x) in (tuple, *_CONTAINERS)]
    return [*values, *(item for items in inside for item in items)]


def _refill(x: Any, content: Any) -> None:
    x.clear()
    (x.update if isinstance(x, dict | set) else x.extend)(content)


def _put_back_sampler(sampler: Any, stack: ExitStack) -> None:
    """Register on `stack` what restores a sampler: its attributes, random states, and the order of its index lists.

    Other data are not copied, as a sampler may have a reference to a large dataset.
    """
    for x in getattr(sampler, "__dict__", {}).values():
        if isinstance(x, np.ndarray | Tensor) and x.ndim == 1:
            stack.callback(x.__setitem__, slice(None), copy.deepcopy(x))  # type: ignore[arg-type]
    put_back_attributes(sampler, stack)


def _put_back_state(owner: Any, stack: ExitStack) -> None:
    """Register on `stack` what restores an object by its `load_state_dict`, and then its attributes."""
    put_back_attributes(owner, stack)
    with suppress(Exception):  # before a run there may be no state yet; then the attributes are all there is
        if found := owner.state_dict():
            state = restorer(found)
            stack.callback(lambda: owner.load_state_dict(state()))


def _put_back_modules(owner: Any, stack: ExitStack, keep: Callable[[Tensor], Tensor]) -> None:
    """Register on `stack` what restores a module, or another object, whole.

    That is, of each module in it: parameters and buffers with values, gradient and `requires_grad`, and attributes,
    tensors among them; also if they have been replaced, removed or added. What other objects that are attributes hold
    is not restored. A module that gets its shape meanwhile keeps what it gets.

    Args:
        owner: the module; of another object the attributes are restored.
        stack: where to register it.
        keep: copies a tensor.
    """
    parts = list(owner.modules()) if isinstance(owner, nn.Module) else [owner]
    seen, held = set(map(id, parts)), list[Any]()
    for part in parts:  # which grows
        entries = (*part._parameters.values(), *part._buffers.values()) if isinstance(part, nn.Module) else ()
        own = [t for t in entries if t is not None]
        if any(map(is_lazy, own)):
            continue
        put_back_attributes(part, stack)
        for t in own:
            if t.is_leaf and id(t) not in seen:  # a buffer may be the result of a computation
                seen.add(id(t))
                stack.callback(_put_back_tensor, restorer(t, keep), t.requires_grad, restorer(t.grad, keep))
        for x in _held(part):
            if isinstance(x, nn.Module) and id(x) not in seen:  # in a list, where torch does not look for modules
                seen.add(id(x))
                parts.append(x)
            held.append(x)
    for x in held:
        if isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested and id(x) not in seen:
            seen.add(id(x))
            stack.callback(_put_back_values, x, keep(x.detach()))


def _put_back_tensor(values: Callable[[], Tensor], requires_grad: bool, grad: Callable[[], Tensor | None]) -> None:
    t = values()
    t.requires_grad_(requires_grad)
    t.grad = grad()


def _put_back_values(x: Tensor, values: Tensor) -> None:
    values = values.to(x.device)
    if not torch.equal(x, values):  # a host-device sync; what has not changed may be memory that cannot be written
        x.detach().copy_(values)


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


def _on_host(x: Tensor) -> Tensor:
    return x.to("cpu", copy=True)  # a host-device sync


def restorer(x: Any, keep: Callable[[Tensor], Tensor] = _on_host) -> Callable[[], Any]:
    """Return a function that returns `x` as it is now; it gives the tensors in it, in place, their present values.

    Args:
        x: nested containers of tensors and other values.
        keep: copies a tensor.
    """
    if isinstance(x, Tensor):
        values = keep(_unexpanded(x).detach())

        def put_back() -> Tensor:
            with torch.no_grad():
                _unexpanded(x).copy_(values)
            return x

        return put_back
    if isinstance(x, dict):
        entries = {k: restorer(v, keep) for k, v in x.items()}
        return lambda: {k: entry() for k, entry in entries.items()}
    if type(x) in (list, tuple):
        items = [restorer(v, keep) for v in x]
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
