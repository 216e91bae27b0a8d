"""Checks of arguments and data, whose errors say what was given, what is allowed and what to do."""

import reprlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import isroutine, signature
from numbers import Integral, Real
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from learnerkit import distributed
from learnerkit.callback import Callback, check_hooks, is_ours
from learnerkit.data.batches import loader_len
from learnerkit.data.loaders import DataLoaders
from learnerkit.data.order import why_empty
from learnerkit.explain.mends import NOT_ALONE
from learnerkit.losses import loss_name, unwrap_partial
from learnerkit.optim import not_among, parameters_of, resized
from learnerkit.state import Learner
from learnerkit.text import did_you_mean, first_few
from learnerkit.torch_internals import BatchNorm, version_of
from learnerkit.utils import library_of, overrides, owner_of, restorer
from learnerkit.values import describe


def check_count(name: str, value: Any, what: str = "a whole number", least: int = 1) -> None:
    """Refuse a value that is not a whole number of at least `least`; `what` describes it."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        given = describe(value) if isinstance(value, Tensor) else reprlib.repr(value)
        is_other = isinstance(value, Integral) and not isinstance(value, int)  # as numpy's
        hint = f": write int({name})" if is_other and int(value) >= least else ""
        raise ValueError(f"got {name}={given}; it is {what}, {least} or more{hint}")


def check_number(name: str, value: Any, is_allowed: Callable[[Any], bool], what: str) -> None:
    """Refuse a value that is not a number, or that `is_allowed` refuses; `what` describes those that are allowed."""
    if not isinstance(value, Real) or isinstance(value, bool) or not is_allowed(value):
        raise ValueError(f"got {name}={value!r}; it is {what}")


def check_positive(name: str, value: Any) -> None:
    """Refuse a value that is not a number above 0."""
    check_number(name, value, lambda number: number > 0, "a number above 0")


_SEAMS = {
    "_forward, _loss, _backward, _step, _zero_grad, or a callback": ("one_batch", "_do_one_batch", "_do_grad_opt"),
    "a callback that puts another loader into `learn.dl` in before_train or before_validate": ("all_batches",),
    "a callback at before_epoch, before_train, before_validate or after_epoch, and the Cancel...Exceptions": (
        "_do_fit", "_do_epoch", "_do_epoch_train", "_do_epoch_validate", "_with_events", "_call_one", "ordered_cbs",
        "__call__",
    ),
    "a callback's cleanup_fit": ("_end_cleanup",),
    "DataLoaders(n_inp=..., target_keys=...), or a callback that sets learn.xb and learn.yb in before_batch": (
        "_split",
    ),
    "DataLoaders(device=...)": ("_set_device",),
    "wd_bn_bias, or create_opt": ("_bn_bias_state",),
    "get_preds(with_loss=True), or a callback": ("to_detach", "loss_not_reduced", "validation_context"),
}  # fmt: skip
"""Methods of fastai's Learner that a subclass overrides there, by the text of what replaces them here."""


def check_subclass(kind: type, base: type) -> None:
    """Refuse a subclass of the Learner (`base`) with methods that fastai calls, but this library does not."""
    # Those of the Learner itself, too: a program may put a method of its own into it.
    own = {name: cls for cls in kind.__mro__ if cls is base or cls not in base.__mro__ for name in vars(cls)}
    for seam, names in _SEAMS.items():
        for name in names:
            if name in own:
                raise TypeError(
                    f"{own[name].__name__}.{name} would never be called: it is a method of fastai's Learner. Here use "
                    f"{seam}"
                )


def check_loaders(dls: Any) -> None:
    """Refuse what is no `DataLoaders`."""
    if isinstance(dls, DataLoaders):
        return
    library, loaders = library_of(dls), "DataLoaders(train, valid) or DataLoaders.from_datasets"
    of = f" of {library}, another library" if library else ""
    if library == "fastai":
        loaders = "learnerkit.DataLoaders(dls.train, dls.valid)"
    elif hasattr(dls, "dataloaders"):  # ImageData and its kind
        loaders = "what its dataloaders() returns"
    raise TypeError(f"dls is a {type(dls).__name__}{of}; pass {loaders}")


def check_learner(dls: Any, model: Any, loss_func: Any, opt_func: Any, splitter: Any) -> None:
    """Refuse arguments of the wrong type."""
    check_loaders(dls)
    if not isinstance(model, nn.Module):
        hint = ", not the class" if isinstance(model, type) else ""
        raise TypeError(f"model is {model!r}; pass an nn.Module{hint}")
    if loss_func is not None and (not callable(loss_func) or isinstance(loss_func, type)):
        raise TypeError(f"loss_func is {loss_func!r}; pass a function or a module, such as nn.CrossEntropyLoss()")
    if splitter is not None and not callable(splitter):
        raise TypeError(f"splitter is {splitter!r}; pass a function of the model that returns lists of parameters")
    if isinstance(opt_func, Optimizer):
        name = type(opt_func).__name__
        raise TypeError(
            f"opt_func is an optimizer that is made already; pass what makes it: opt_func={name}, or "
            f"opt_func=partial({name}, lr=...) with its options"
        )
    if not callable(opt_func):
        raise TypeError(f"opt_func is {opt_func!r}; pass an optimizer class, or a function of (param_groups, lr)")
    if library_of(unwrap_partial(opt_func)) == "fastai":  # the optimizers of other libraries are torch optimizers
        raise TypeError(
            f"opt_func is {unwrap_partial(opt_func).__name__} of fastai, another library; pass a torch optimizer "
            "class, such as torch.optim.Adam, or a function of (param_groups, lr) that returns one"
        )


_ONE_PROCESS = (
    "call it after the fit; of a model that stays divided save the weights (learn.save('name.safetensors')), and load "
    "them in one process"
)


def check_whole(learn: "Learner", what: str, instead: str = _ONE_PROCESS) -> None:
    """Refuse a call that needs the whole model on one rank.

    Raises:
        RuntimeError: the model is divided among the ranks.
    """
    if learn.shards is not None:
        raise RuntimeError(
            f"{what} needs a whole model, and this one is divided among {distributed.world_size()} ranks: {instead}"
            " (errors.html#sharded)"
        )


def check_loss(learn: "Learner") -> None:
    """Refuse a loss function that asks for missing attributes, and weights of the parts of an unknown loss."""
    weighting = learn._loss_weighting
    if weighting.parts and overrides(learn, "_loss"):
        raise ValueError(
            f"loss_weight= has a weight for each of several losses, and {type(learn).__name__} has a `_loss` of its "
            "own, of whose parts nothing is known: give one loss_weight for the whole, or let the model return the "
            "losses (errors.html#loss-weight)"
        )
    asks = [name for name in weighting.asks if name != "learn"]
    has = [n for n in dir(learn) if n[0] != "_" and not isroutine(getattr(type(learn), n, None))] if asks else []
    for name in asks:
        if name not in has:
            raise TypeError(
                f"the loss {loss_name(learn.loss_func)} asks for {name!r}, a keyword-only parameter without a default, "
                f"and the learner has no such attribute{did_you_mean(name, ['learn', *has])}; give the parameter a "
                f"default, or an object of yours: partial(loss, {name}=...)"
            )


def check_callback(learn: "Learner", cb: Any) -> None:
    """Refuse an object that is not a callback, or a callback that cannot be added to this learner, or not now."""
    if not isinstance(cb, Callback):
        library, is_scheduler = library_of(cb), isinstance(cb, LRScheduler)
        raise TypeError(
            f"got the callback {cb!r}; a callback is a learnerkit.Callback, its class, or Callback(after_batch=f)"
            + (f". For a scheduler: TorchScheduler(lambda opt: {type(cb).__name__}(opt, ...))" if is_scheduler else "")
            + (f". This one was made for {library}, another library: {_advice_for(library)}" if library else "")
        )
    check_hooks(cb)
    if cb in learn.cbs:
        raise ValueError(f"{cb} was added to this learner already; make another one, or remove it with remove_cb")
    check_free(learn, cb)
    hook = getattr(type(cb), "before_fit", None)
    if learn.task == "fit" and cb.learn is None and hook and is_ours(hook):
        raise RuntimeError(
            f"{cb} was added in the middle of a fit, and it prepares in before_fit, which is over: give it to the "
            "Learner, or to fit(cbs=...)"
        )
    if not isinstance(getattr(type(learn), cb.name, learn.__dict__.get(cb.name, cb)), Callback):
        raise ValueError(f"{cb} would hide learn.{cb.name}: give its class another name, or a `name` of its own")


def _advice_for(library: str) -> str:
    if library == "fastai":
        return (
            "derive its class from learnerkit.Callback; it then runs unchanged if it uses only events, cancels, order "
            "and attributes of the learner"
        )
    return "write its hooks as methods named after our events (learn.show_training_loop() prints them)"


def check_free(learn: "Learner", cb: Callback) -> None:
    """Refuse a callback that a run of another learner is using."""
    if cb.learn not in (None, learn) and cb.learn.task is not None:
        raise ValueError(
            f"{cb} is used in {cb.learn.task!r} of another learner; make another one, or wait until that is over"
        )


def check_thread(learn: "Learner", thread: int | None, who: str) -> None:
    """Refuse a run, or a prediction, while another thread runs the learner; `who` is the called method."""
    if thread not in (None, threading.get_ident()):
        raise RuntimeError(
            f"{who} was called while {learn.task or 'a run'!r} of the same learner goes on in another thread, whose "
            "model and callbacks it would disturb: call it afterwards, or of a learner of its own, such as "
            "load_learner(learn.export('model'), make_model)"
        )


def check_fit(learn: "Learner", n_epoch: Any, start_epoch: Any = 0, n_steps: Any = None, who: str = "fit") -> None:
    """Refuse a fit that cannot run; `who` is the called method."""
    if learn.task is not None:
        raise RuntimeError(
            f"{who} was called during {learn.task!r}, whose training it would disturb: call it before or after; a "
            "callback may call validate and get_preds"
        )
    if (n_epoch is None) == (n_steps is None):
        raise ValueError(f"got n_epoch={n_epoch!r} and n_steps={n_steps!r}; give one of them: how long to train")
    for name, value in (("n_epoch", n_epoch), ("start_epoch", start_epoch), ("n_steps", n_steps)):
        if value is not None:
            check_count(name, value, least=0)
    if n_steps is not None and start_epoch:
        raise ValueError(f"got start_epoch={start_epoch} and n_steps={n_steps}; they cannot be combined")
    check_not_empty(learn.dls.train, "the training loader")
    if learn.dls.valid is not None:
        check_not_empty(learn.dls.valid, "the validation loader")


def needs_closure(opts: list[Optimizer]) -> bool:
    """Tell whether an optimizer's step needs a closure; refuse it if it is one of several.

    Args:
        opts: the optimizers of a learner that does not override `_step`.
    """
    for opt in opts:
        closure = signature(type(opt).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            if len(opts) > 1:
                raise TypeError(
                    f"{type(opt).__name__} needs a closure, and is one of several optimizers; override `_step`, so "
                    "that it calls self.opt[...].step(self.closure()) of the one, and step() of the others"
                )
            return True
    return False


def check_closure(learn: "Learner") -> None:
    """Refuse settings with which an optimizer's closure would not compute the loss that is to be minimised."""
    if learn._loss_weighting.parts:  # on several ranks each evaluation would need the counts of all
        raise ValueError(
            "a loss_weight= for each of several losses does not go with an optimizer that evaluates the loss several "
            "times in a step: give one loss_weight for the whole loss"
        )
    against = {
        "gradient_accumulation": "a step has several batches, and a closure has the last one alone",
        "gradient_clip": "the gradients of the first evaluation alone are clipped; clip in a `_step` of your own",
        "mixed_precision": "fp16 scales the loss and its gradients; take to_bf16()",
    }
    for cb in learn.cbs:
        if cb.run and cb.name in against and getattr(cb, "mode", "") != "bf16":
            raise ValueError(
                f"{cb!r} does not go with an optimizer that evaluates the loss several times in a step: "
                f"{against[cb.name]}"
            )


def check_in_step(learn: "Learner") -> None:
    """Refuse a closure outside of a step, where its gradients would be added to those of the next step."""
    if not (learn.training and any(p.grad is not None for p in parameters_of(learn.opts))):
        raise RuntimeError(
            "closure() was called outside of a step; call it in `_step`, after the backward pass of a training batch"
        )


def momenta(value: Any) -> tuple[float, float, float]:
    """Return a cycle's momentum at the start, the peak and the end; refuse what is not three numbers from 0 to 1."""
    try:
        start, peak, end = map(float, () if isinstance(value, str) else value)
        if all(0 <= momentum < 1 for momentum in (start, peak, end)):
            return start, peak, end
    except (TypeError, ValueError):
        pass
    raise ValueError(
        f"got moms={value!r}; it is three numbers, 0 or more and less than 1: at the start, the peak and the end"
    )


def check_not_empty(dl: Iterable, name: str) -> None:
    """Refuse a loader of length 0."""
    if loader_len(dl) == 0:
        raise ValueError(f"{name} is empty{why_empty(dl)}")


@contextmanager
def pass_checked(learn: "Learner", made: tuple[Any, list[nn.Parameter]]) -> Iterator[None]:
    """Check a loader, its length, and parameters that no optimizer has, before and after it is read in this context.

    Args:
        learn: the learner.
        made: the optimizer that it has made, and the model's parameters that this one left out when it was made.
    """
    if learn.training and (changed := resized(learn.opts)):
        raise ValueError(
            f"parameters have another shape than their state in the optimizer, such as {describe(changed[0])}: where a "
            "callback sets p.data to a tensor of another shape, it has to remove the state, self.opt.state.pop(p)"
        )
    with _last_batch_checked(learn), _untrained_loss_told(learn), _new_parameters_told(learn, *made):
        yield
    if learn.n_ranks == 1:
        _check_length(learn, "training" if learn.training else "validation")


def _check_length(learn: "Learner", name: str) -> None:
    """Refuse a loader that gave no batches, and say that one gave more or fewer than its length.

    A fit says it once for each of its loaders. Several ranks do not say it, as they may leave out the end of a stream.
    """
    got, n = learn.iter + 1, learn.n_iter
    if not got:
        once = "; an iterator can be read only once: pass a list, a DataLoader or a class with __iter__"
        is_iterator = hasattr(learn.dl, "__next__")
        raise ValueError(f"the {name} loader gave no batches in epoch {learn.epoch}{once if is_iterator else ''}")
    is_first = not learn._in_fit or learn.epoch == learn.start_epoch
    if is_first and n not in (None, got):
        learn.say(
            f"the {name} loader gave {got} batches, and its length, by which schedules go, is {n}: is the __len__ of "
            "the dataset or the sampler right? (A StopIteration in __getitem__ ends a loader, too.)"
        )


@contextmanager
def _last_batch_checked(learn: "Learner") -> Iterator[None]:
    """Refuse training at its first batch if its last batch is a single sample, too few for the model's BatchNorm."""
    text = lone_last_batch(learn.dl, learn.model) if learn.training and not learn.train_iter else None
    if text is None or (learn.n_steps is not None and learn.n_steps * learn.step_batches < (learn.n_iter or 0)):
        yield
        return
    restore_statistics = restorer(list(learn.model.buffers()))

    def refuse() -> None:
        if not learn.train_iter:
            restore_statistics()  # other norms may already have updated theirs
        raise ValueError(text)

    with watched_norms(learn, refuse):
        yield


def _untrained(named: dict[str, nn.Parameter]) -> Callable[[], list[str]]:
    """Return a function that names those that have got gradients since now, and that no step has changed."""
    before = {name: version_of(p) for name, p in named.items() if p.requires_grad}
    return lambda: [name for name, v in before.items() if named[name].grad is not None and version_of(named[name]) == v]


@contextmanager
def _untrained_loss_told(learn: "Learner") -> Iterator[None]:
    """Tell after the first epoch of a fit of the loss's parameters that got gradients, and that no step has changed.

    That no optimizer of the learner has them is not enough: a callback may train them by another one.
    """
    loss, others = owner_of(learn.loss_func), dict[str, nn.Parameter]()
    if isinstance(loss, nn.Module) and learn.training and learn.task == "fit" and learn.epoch == learn.start_epoch:
        others = not_among([*learn.model.parameters(), *parameters_of(learn.opts)], loss)
    untrained = _untrained(others)
    yield
    if names := untrained():
        learn.say(
            f"{loss_name(loss)} has parameters that no optimizer trains ({first_few(names)}), so they keep their "
            "values: let splitter= return them with the model's, or freeze them by requires_grad_(False)"
        )


@contextmanager
def _new_parameters_told(learn: "Learner", opt: Any, left_out: list[nn.Parameter]) -> Iterator[None]:
    """Warn after training of parameters that a callback has put into the model, and that no step has changed."""
    others = dict[str, nn.Parameter]()
    if learn.training and learn.task == "fit" and learn.opt is opt and opt is not None and learn.shards is None:
        others = not_among([*parameters_of(learn.opts), *left_out], learn.model)
    untrained = _untrained(others)
    yield
    if names := untrained():
        distributed.warn_once(
            f"a callback has put parameters into the model that no optimizer trains ({first_few(names)}), as it was "
            "made before: change the model before fit or in after_create, or give the optimizer the new parameters, "
            "self.opt.add_param_group({'params': parameters})"
        )


def lone_last_batch(dl: Any, model: nn.Module) -> str | None:
    """Describe the problem if the last batch of `dl` is one sample and the model has a BatchNorm in training mode.

    A BatchNorm of images accepts one sample, since it has many values for each channel: `watched_norms` checks that.
    For loaders that do not know the sizes of their batches the result is `None`.
    """
    batches, samples = loader_len(dl), loader_len(getattr(dl, "sampler", None))
    size = getattr(dl, "step_size", getattr(dl, "batch_size", None))
    if not size or not samples or batches != -(-samples // size) or getattr(dl, "drop_last", False):
        return None
    norm = next((name for name, m in model.named_modules() if isinstance(m, BatchNorm) and m.training), None)
    if samples % size != 1 % size or norm is None:  # 1 % size, as the remainder is 0 with batches of one sample
        return None
    if size == 1:
        which, advice = "each of its batches has 1 sample", "choose a larger batch size"
    else:
        which, advice = f"its last batch has 1 of its {samples} samples (batches of {size})", NOT_ALONE
    norm = norm or "the model"
    return f"the training loader: {which}, which is too few for the statistics of {norm} (BatchNorm); {advice}"


@contextmanager
def watched_norms(learn: "Learner", note: Callable[[], None]) -> Iterator[None]:
    """Call `note` before a BatchNorm in training mode that gets only one value for each sample and channel."""
    replicas = len(learn.model.device_ids) if isinstance(learn.model, nn.DataParallel) else 1

    def check(norm: nn.Module, args: tuple) -> None:
        samples = -(-learn.batch_size // replicas)
        if norm.training and args and samples and args[0].numel() == args[0].shape[1] * samples:
            note()

    with ExitStack() as stack:
        for norm in learn.model.modules():
            if isinstance(norm, BatchNorm):
                stack.callback(norm.register_forward_pre_hook(check).remove)
        yield


def check_length(dl: Iterable, who: str) -> int:
    """Return the number of batches, which `who` needs to know; refuse a loader without length."""
    length = loader_len(dl)
    if length is None:
        raise ValueError(
            f"{who} needs to know how many batches an epoch has, but the training loader ({type(dl).__name__}) has no "
            "length; give it a __len__, say how long to train by n_steps, or train with fit at a constant rate"
        )
    return length
