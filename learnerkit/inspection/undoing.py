"""Undoing what a trial changes: training, or running a model, that leaves no trace on a learner."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from learnerkit import run_state
from learnerkit.callback import Callback
from learnerkit.data.batches import rows_of, to_device
from learnerkit.data.iterable import source_of
from learnerkit.data.order import (
    attribute_values,
    first_batch,
    has_state,
    keep_seeds,
    put_back_attributes,
    samplers_of,
    with_batches,
)
from learnerkit.explain import explain, explanation
from learnerkit.marks import not_collective
from learnerkit.optim import group_restorer, state_to_params
from learnerkit.parallel import will_shard
from learnerkit.state import TRANSIENT, Learner
from learnerkit.torch_internals import own_tensors, uncompiled
from learnerkit.utils import (
    host_copy,
    own_loss_arguments,
    owner_of,
    restorer,
    spanned_devices,
    training_modes,
    unbound,
    unexpanded,
    unwrap,
)
from learnerkit.values import TensorFunction, tensors_in


@contextmanager
@not_collective("it takes no values of other ranks: `gather=False`")
def unchanged(learn: "Learner", but: Collection[Callback] = ()) -> Iterator[None]:
    """Restore at the end everything that training changes on a learner, exactly, also after an error.

    That is the state of a run, as `Learner.state_dict` returns it, and what a step may change that is no part of it:
    gradients, `requires_grad`, and the attributes of modules, callbacks and data with a state. Tensors are restored in
    place. The copies are on the host, so the device needs no more memory.

    Args:
        learn: the learner.
        but: callbacks that keep what they have seen.

    Raises:
        ValueError: the model has parameters that get their shape from the first batch.
    """
    loaders, keep = learn.dls.loaders, cache(host_copy)
    owners = unwrap(learn.model), owner_of(learn.loss_func)
    check_shaped([owner for owner in owners if isinstance(owner, nn.Module)])
    saved = run_state.state_dict(learn)
    del saved["model"]  # The model is restored tensor by tensor, as some buffers cannot be loaded.
    state = restorer(saved, keep)
    held = chain(learn.opts, *map(attribute_values, learn.opts))  # An optimizer may be inside another one.
    optimizers = [x for x in held if isinstance(x, Optimizer)]
    opts = [_put_back_optimizer(x, keep) for x in optimizers]

    def put_back() -> None:
        values = state()
        run_state.put_trained(learn, values)
        run_state.put_place(learn, values)
        run_state.put_rest(learn, values)

    shards = learn.shards

    def make_whole() -> None:
        if learn.shards is not shards and learn.shards is not None:  # An error has left it sharded.
            learn.shards.restore(gather=False)
            learn.shards = shards

    with ExitStack() as stack:  # What is registered last is restored first.
        samplers = [sampler for dl in loaders for sampler in samplers_of(dl) if not has_state(sampler)]
        for part in (*map(source_of, loaders), *samplers):
            # This runs after the part's state is restored: from a state at its end, some would not begin again.
            put_back_attributes(part, stack)
        for call in (*opts, put_back, *opts):  # Loading gives optimizers other groups and tensors.
            stack.callback(call)
        for x in optimizers:
            _put_back_modules(x, stack, keep)  # its attributes, before its state
        # A callback may set the learner's own attributes, in `before_fit` for example.
        own = ("dls", "model", "opt", "_left_out", "loss_func", "_loss_weighting", "metrics", "logger", "wd", "path")
        stack.callback(vars(learn).update, {name: vars(learn)[name] for name in own})
        for cb in learn.cbs:
            if not cb.only_fit and cb not in but:
                put_back_attributes(cb, stack)
        stack.callback(loaders.__setitem__, slice(None), list(loaders))
        stack.callback(setattr, learn.dls, "_twins", learn.dls._twins)  # Workers of copies made in here end.
        stack.callback(setattr, learn.dls, "unread", learn.dls.unread)
        for i, dl in enumerate(loaders):
            if isinstance(dl, DataLoader) and dl.persistent_workers:
                loaders[i] = with_batches(dl)  # The copy has other workers, as their random states are out of reach.
        for owner in owners:
            _put_back_modules(owner, stack, keep)
        stack.callback(make_whole)
        yield


@contextmanager
def trial(learn: "Learner", model: nn.Module) -> Iterator[None]:
    """Restore model and loss, random states and the learner's batch after running a model on a batch.

    For as long as it lasts it takes the memory of the weights once more, on their device, and the time to copy them
    twice: a forward pass may change any of them, frozen ones too.

    Args:
        learn: the learner.
        model: its unwrapped model; in the context it is `learn.model`.
    """
    # Uncompiled, as to compile a model would take longer than the trial.
    with keep_seeds(device=learn.dls.device), training_modes(model), uncompiled(), _run_kept(learn) as stack:
        for owner in (model, owner_of(learn.loss_func)):
            _put_back_modules(owner, stack, _clone)
        stack.callback(torch.clear_autocast_cache)  # it may have weights that were cast in the graph of this trial
        learn.model = model
        yield


def _run_kept(learn: "Learner") -> ExitStack:
    """Return a context that restores the learner's attributes: model, batch, and what a subclass notes of a step."""
    stack = ExitStack()
    stack.callback(vars(learn).update, vars(learn) | {name: getattr(learn, name) for name in TRANSIENT})
    return stack


def move_to_device(learn: "Learner") -> None:
    """Move model and loss to the loaders' device, unless they span several, and the optimizers' state to theirs.

    A model that is divided among ranks, or is about to be, stays where it is.
    """
    if learn.mapped is not None and not will_shard(learn):
        learn.mapped.read(learn.model)  # It is now as any other model.
        learn.mapped = None
    stays = learn.mapped is not None or learn.shards is not None
    for module in (None if stays else learn.model, owner_of(learn.loss_func)):
        if isinstance(module, nn.Module):
            if devices := spanned_devices(module):
                learn.dls.prefer(devices[0])
            else:
                module.to(learn.dls.device)
    for opt in learn.opts:
        state_to_params(opt)


def give_shapes(learn: "Learner") -> None:
    """Move the model to its device, and give lazy layers their shapes and first weights, alike on every rank.

    These come from a training batch.

    Raises:
        ValueError: the model cannot run on the batch as the loader gives it, or the batch could not be read again.
    """
    move_to_device(learn)
    model, dl = unwrap(learn.model), learn.dls.train
    lazy = _without_shape(model)
    if not lazy:
        return
    advice = "run the model on a batch before the fit: learn.model(x)"
    if hasattr(dl, "__next__"):
        raise ValueError(
            f"{lazy} has no shape until the model has seen a batch, and the loader can be read only once; {advice}"
        )
    with _run_kept(learn):
        batch = first_batch(dl)
        try:
            with torch.no_grad(), training_modes(model), ExitStack() as stack:
                _put_back_modules(model, stack, _clone)
                learn.model = model.eval()
                predict(learn, batch)
        except Exception as error:
            mend = next(iter(explanation(learn, error)), "")
            explain(learn, error)
            raise ValueError(
                f"{lazy} has no shape until the model has seen a batch, and it cannot run on the first training batch "
                f"as the loader gives it ({type(error).__name__}: {error}); {mend or advice}"
            ) from error


def predict(learn: "Learner", batch: Any) -> None:
    """Run `learn.model` on a batch of the training loader; it becomes the learner's batch."""
    learn.batch = to_device(batch, learn.dls.device)
    learn.xb, learn.yb = learn.dls.split(learn.batch, own_loss_arguments(learn.loss_func, learn.model))
    told = learn.dls.count(learn.batch)
    learn.batch_size = rows_of(learn.xb) if told is None else told
    learn._forward()


def check_shaped(modules: Iterable[nn.Module]) -> None:
    """Refuse parameters that get their shape from the first batch, since they cannot be copied before it."""
    for module in modules:
        if lazy := _without_shape(module):
            raise ValueError(
                f"{lazy} of {type(module).__name__} has no shape until the model has seen a batch (a lazy module): "
                "run it on one first, with learn.validate() or learn.model(x)"
            )


def _without_shape(module: nn.Module) -> str:
    """Return the name of the first lazy parameter or buffer of a module; '' if there is none."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return next((name for name, t in tensors if is_lazy(t)), "")


def held_tensors(*owners: Any) -> list[Tensor]:
    """Return the plain tensors of modules (parameters, buffers, attributes), of other objects and of partials."""
    values: list = []
    for owner in owners:
        inner, keywords = unbound(owner)
        values += [*attribute_values(inner), *keywords.values()]
        for module in inner.modules() if isinstance(inner, nn.Module) else ():
            values += [*own_tensors(module), *attribute_values(module)]
    return list({id(t): t for t in values if isinstance(t, Tensor) and t.layout is torch.strided}.values())


def state_tensors(opts: Iterable[Optimizer]) -> list[Tensor]:
    """Return the tensors that optimizers keep from step to step."""
    return [t for opt in opts for state in opt.state.values() for t in tensors_in(state)]


def _put_back_modules(owner: Any, stack: ExitStack, keep: TensorFunction) -> None:
    """Register on `stack` what restores a whole module, or another object.

    This restores of each module in it parameters and buffers with values, gradient and `requires_grad`, and attributes,
    tensors among them; also if they have been replaced, removed or added. The content of other objects that are
    attributes is not restored. A module that gets its shape meanwhile keeps it.

    Args:
        owner: the module; of another object the attributes are restored.
        stack: where to register it.
        keep: copies a tensor.
    """
    parts = list(owner.modules()) if isinstance(owner, nn.Module) else [owner]
    seen = set(map(id, parts))
    for part in parts:  # The loop appends to the list.
        own = own_tensors(part) if isinstance(part, nn.Module) else []
        if any(map(is_lazy, own)):
            continue
        put_back_attributes(part, stack)
        for x in (*own, *attribute_values(part)):
            if id(x) in seen:
                continue
            seen.add(id(x))
            if isinstance(x, nn.Module):  # It is in a list, where torch does not look for modules.
                parts.append(x)
                continue
            is_own = any(x is t for t in own)
            if isinstance(x, Tensor) and x.is_meta:  # It has no values, as those of the skeleton of an ensemble.
                continue
            if is_own or (isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested):
                stack.callback(_tensor_restorer(x, keep, is_own))


def _tensor_restorer(x: Tensor, keep: TensorFunction, is_own: bool) -> Callable[[], None]:
    """Return a function that restores a tensor in place; one that `is_own` a module's is written in any case."""
    values, shape, requires_grad = keep(unexpanded(x)), x.shape, x.requires_grad
    grad = restorer(x.grad if x.is_leaf else None, keep)

    @torch.no_grad()
    def put_back() -> None:
        if x.shape != shape:
            x.resize_(shape)  # Observers of quantization resize their buffers.
        place = unexpanded(x).data  # A graph made before the trial can then still be differentiated.
        # A host-device sync. Memory that has not changed may be read-only.
        if is_own or not torch.equal(place, values.to(x.device)):
            place.copy_(values)
        if x.is_leaf:
            x.requires_grad_(requires_grad).grad = grad()

    return put_back


def _clone(x: Tensor) -> Tensor:
    return x.detach().clone()


def _put_back_optimizer(opt: Optimizer, keep: TensorFunction) -> Callable[[], None]:
    """Return a function that restores an optimizer's groups, their hyper-parameters, and its state."""
    groups = group_restorer(opt)
    held = opt.state
    state = restorer(opt.state, keep)

    def put_back() -> None:
        groups()
        held.clear()
        held.update(state())
        opt.state = held

    return put_back
