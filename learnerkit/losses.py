"""The count behind a loss, that is, the number of items in its mean, for combining batches and ranks exactly.

Means over samples are combined weighted by the number of samples; means over other items (tokens that are not padding,
samples weighted by class) are weighted by the number of those; sums are added. Each part of a loss of several parts may
have its own count.
"""

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from learnerkit import distributed
from learnerkit.data.batches import rows_of
from learnerkit.data.cuts import cut_rows
from learnerkit.data.loaders import unknown_keys
from learnerkit.events import CancelBackwardException
from learnerkit.gradient_mean import counts_something, host_count, zero_loss
from learnerkit.marks import collective
from learnerkit.state import Learner
from learnerkit.text import did_you_mean
from learnerkit.torch_internals import nodes_of
from learnerkit.utils import itself, library_of, overrides, replaced, unbound, unwrap
from learnerkit.values import TensorFunction, describe, get_field, tensors_in


def loss_option(loss_func: Any, name: str, default: Any = None) -> Any:
    """Return an option of a loss: an attribute of a module, or a keyword of a partial."""
    inner, keywords = unbound(loss_func)
    return keywords.get(name, getattr(inner, name, default))


def unwrap_partial(loss_func: Any) -> Any:
    """Return the function inside partials."""
    return unbound(loss_func)[0]


def is_one_of(loss_func: Any, losses: tuple) -> bool:
    """Tell whether a loss is one of these functions, or of these classes of modules."""
    inner = unwrap_partial(loss_func)
    return isinstance(inner, tuple(x for x in losses if isinstance(x, type))) or any(inner is x for x in losses)


def loss_name(loss_func: Any) -> str:
    """Return the name of a function or class inside partials, or of an object's class."""
    inner = unwrap_partial(loss_func)
    return "the model's own loss" if inner is None else getattr(inner, "__name__", type(inner).__name__)


def is_cross_entropy(loss_func: Any) -> bool:
    """Tell whether the targets are classes, so that `argmax` over dimension 1 decodes a prediction."""
    return is_one_of(loss_func, (nn.CrossEntropyLoss, F.cross_entropy, *NLL))


_WITH_LAYER = tuple(filter(None, [getattr(nn, "LinearCrossEntropyLoss", None)]))  # newer versions of torch have it
"""Torch's cross-entropies with a linear layer of their own, which makes the scores."""


def averages_over_targets(loss_func: Any) -> bool:
    """Tell whether a loss is a cross-entropy, whose mean is over the targets that it does not ignore."""
    return is_cross_entropy(loss_func) or is_one_of(loss_func, _WITH_LAYER)


def has_classes_in_dim_1(loss_func: Any) -> bool:
    """Tell whether a loss takes scores with the classes in dimension 1; of another `forward` this is not known."""
    forward = getattr(type(unwrap_partial(loss_func)), "forward", None)  # a function has none
    return is_cross_entropy(loss_func) and forward in (None, nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)


ELEMENTWISE = (
    nn.MSELoss, F.mse_loss, nn.L1Loss, F.l1_loss, nn.SmoothL1Loss, F.smooth_l1_loss, nn.HuberLoss, F.huber_loss,
)  # fmt: skip
"""Losses that compare predictions and targets element by element."""

_BROADCAST = (
    *ELEMENTWISE, nn.PoissonNLLLoss, F.poisson_nll_loss, nn.KLDivLoss, F.kl_div, nn.HingeEmbeddingLoss,
    F.hinge_embedding_loss, nn.MultiLabelSoftMarginLoss, F.multilabel_soft_margin_loss,
)  # fmt: skip
"""Losses that torch broadcasts when predictions and targets have different shapes."""

NLL = (nn.NLLLoss, F.nll_loss)
"""Losses that take logarithms of probabilities."""

BINARY_LOGITS = (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits)
BINARY_SHARES = (nn.BCELoss, F.binary_cross_entropy)


def _of_rows(function: Callable, pred: Any, name: str = "the loss") -> Tensor:
    """Call a function of predictions (n, classes); of others it is not known which dimension has the classes."""
    if not isinstance(pred, Tensor) or pred.ndim > 2:
        raise ValueError(
            f"got predictions that are {describe(pred)}, and {name} has a forward of its own: which dimension has the "
            "classes is not known. Give it the methods decode(pred) and activation(pred) (errors.html#decode)"
        )
    made: Tensor = function(pred)
    return made


_argmax, _softmax = partial(torch.argmax, dim=1), partial(torch.softmax, dim=1)

DECODINGS: dict[str, TensorFunction] = {
    "argmax": _argmax, "argmax of rows": partial(_of_rows, _argmax), "itself": itself,
    "above 0": partial(torch.gt, other=0), "above 0.5": partial(torch.gt, other=0.5),
}  # fmt: skip
"""The functions that decode predictions, by name: into classes, numbers, or a yes or no for each class."""

ACTIVATIONS: dict[str, TensorFunction] = {
    "softmax": _softmax, "softmax of rows": partial(_of_rows, _softmax), "exp": torch.exp, "sigmoid": torch.sigmoid,
    "itself": itself,
}  # fmt: skip
"""The functions that turn predictions into probabilities, by name."""

_KNOWN: tuple[tuple[tuple, str, str | None], ...] = (
    ((nn.CrossEntropyLoss, F.cross_entropy), "argmax", "softmax"),
    (NLL, "argmax", "exp"),
    (ELEMENTWISE, "itself", None),
    (BINARY_LOGITS, "above 0", "sigmoid"),
    (BINARY_SHARES, "above 0.5", "itself"),
)  # torch's losses, with the names of their entries in `DECODINGS` and in `ACTIVATIONS`


def _known(loss_func: Any) -> tuple[str | None, str | None]:
    names = ((decodes, activates) for losses, decodes, activates in _KNOWN if is_one_of(loss_func, losses))
    return next(names, (None, None))


def decoding(loss_func: Any) -> str | None:
    """Return the name in `DECODINGS` for predictions of one of torch's losses, or `None` for other losses."""
    return _known(loss_func)[0]


def own_decode(loss_func: Any) -> Any:
    """Return a loss's own `decode`, or `decodes` as in fastai; `None` if it has neither."""
    decodes, activation = loss_option(loss_func, "decodes"), loss_option(loss_func, "activation")
    if callable(decodes) and callable(activation):  # fastai decodes what the activation returned
        return loss_option(loss_func, "decode", lambda pred: decodes(activation(pred)))
    return loss_option(loss_func, "decode", decodes)


def decode_of(loss_func: Any) -> Callable[[Any], Any] | None:
    """Return the function that decodes predictions for a loss: its own `decode` or `decodes`, else as in `decoding`."""
    own = own_decode(loss_func)
    if callable(own):
        return own
    return _listed(DECODINGS, decoding(loss_func), loss_func)


def hides_classes(loss_func: Any) -> bool:
    """Tell whether a cross-entropy has another `forward` and no `decode`: the classes may be in any dimension."""
    return is_cross_entropy(loss_func) and not has_classes_in_dim_1(loss_func) and not own_decode(loss_func)


class LossFacts:
    """The facts about a loss by which metrics decode predictions and count targets, found once for many batches.

    Args:
        loss_func: the loss.

    Attributes:
        decode, own, known: as `decode_of`, `own_decode` and `decoding` return them.
        of_classes, in_dim_1, hides: as `is_cross_entropy`, `has_classes_in_dim_1` and `hides_classes` return them.
        ignored: the target that the loss ignores; `None` if there is none.
    """

    def __init__(self, loss_func: Any) -> None:
        self.decode, self.own, self.known = decode_of(loss_func), own_decode(loss_func), decoding(loss_func)
        self.of_classes, self.in_dim_1 = is_cross_entropy(loss_func), has_classes_in_dim_1(loss_func)
        self.hides = hides_classes(loss_func)
        self.ignored = loss_option(loss_func, "ignore_index")


def name_for(loss_func: Any, name: str | None, functions: Mapping[str, Callable]) -> str | None:
    """Return the name of the function that refuses what hides the classes, if there is one for this name and loss."""
    of_rows = f"{name} of rows"
    return of_rows if of_rows in functions and hides_classes(loss_func) else name


def _listed(functions: dict[str, Callable], name: str | None, loss_func: Any) -> Any:
    found = str(name_for(loss_func, name, functions))
    function = functions.get(found)
    return partial(function, name=loss_name(loss_func)) if function and found != str(name) else function


def rules(loss_func: Any) -> tuple[str | None, str | None]:
    """Return the names of the entries in `DECODINGS` and `ACTIVATIONS` for a loss.

    A name is `None` if it is unknown or the loss has its own function; with its own decoding, both are `None`.
    """
    if own_decode(loss_func) is not None:
        return None, None
    decodes, activates = _known(loss_func)
    return decodes, None if callable(loss_option(loss_func, "activation")) else activates


def activation_of(loss_func: Any) -> Callable[[Any], Any] | None:
    """Return the function that turns predictions into probabilities: the loss's `activation`, else as in `rules`."""
    own = loss_option(loss_func, "activation")
    if callable(own):
        return own
    return _listed(ACTIVATIONS, rules(loss_func)[1], loss_func)


@dataclass(frozen=True)
class OwnLoss:
    """The facts about the loss that a model computes itself, from its code and modules: the same on every rank.

    Attributes:
        ignore_index: the target value that the loss leaves out, under the name that torch's losses have for it.
        shifts: the loss leaves out the first target of each row, for which a language model has no prediction.
        takes_count: `forward` takes `num_items_in_batch`, the number of items in the mean.
        dims: the loss is known to be the mean over the integer targets if they have at most this many dimensions.
        takes_numbers: the loss is known to be the mean over samples if targets are numbers.
    """

    ignore_index: int = -100
    shifts: bool = False
    takes_count: bool = False
    dims: int = 1
    takes_numbers: bool = False

    def count(self, *yb: Any) -> Tensor | None:
        """Return the number of targets in the loss's mean, or `None` if the targets are not one tensor of integers."""
        return (self.used(yb[0]) != self.ignore_index).sum() if len(yb) == 1 and _are_integers(yb[0]) else None

    def is_known(self, yb: tuple) -> bool:
        """Tell whether the loss is known to average over the number of `count`, or over samples. A host-device sync."""
        if len(yb) != 1 or not isinstance(yb[0], Tensor):
            return False
        if not _are_integers(yb[0]):
            return self.takes_numbers
        return (self.takes_count or yb[0].ndim <= self.dims) and not self.counts_negative(yb[0])

    def counts_negative(self, target: Tensor) -> bool:
        """Tell whether negative targets are counted, which most models leave out. A host-device sync."""
        return bool(((target < 0) & (target != self.ignore_index)).any())

    def described(self, target: Tensor) -> str:
        """Describe the targets that are counted. A host-device sync."""
        used = self.used(target)
        which = (
            f"the {int((used != self.ignore_index).sum())} of {used.numel()} targets that are not {self.ignore_index}"
        )
        return which + (", negative ones among them" if self.counts_negative(target) else "")

    def used(self, target: Tensor) -> Tensor:
        """Return the targets that have predictions."""
        return target[..., 1:] if self.shifts and target.ndim > 1 else target

    def paired(self, pred: Any, yb: tuple) -> tuple[Any, tuple]:
        """Return the scores that have targets, and the targets that have predictions."""
        are_tokens = self.shifts and len(yb) == 1 and _are_integers(yb[0]) and yb[0].ndim > 1
        if are_tokens and isinstance(pred, Tensor) and pred.ndim == yb[0].ndim + 1:
            return pred[..., :-1, :], (self.used(yb[0]),)
        return pred, yb


_OF_SAMPLES = tuple(f"For{what}Classification" for what in ("Sequence", "Image", "Video", "Audio"))
# The kinds of loss that shift; `None` is the default kind.
_OF_LATER = (None, "ForCausalLM", "ForConditionalGeneration")
_OVER_TOKENS = ("ForCausalLMLoss", "ForMaskedLMLoss", "ForTokenClassification", "ForSemanticSegmentationLoss")


def own_loss_of(model: nn.Module) -> OwnLoss:
    """Return the known facts about the loss that a model computes itself; no value is read.

    The models of transformers name their loss by `loss_type` and `loss_function`. Those that do not call it have a
    cross-entropy of torch's in their `forward`. A model of peft makes the loss of the one inside it, unless its prompts
    lengthen the rows of targets.
    """
    model = unwrap(model)
    adapters: Any = getattr(model, "active_peft_config", None)
    if adapters is not None and not adapters.is_prompt_learning:
        model = model.get_base_model()  # type: ignore[operator]
    method: Any = getattr(type(model), "forward", None)  # the class of a scripted model has none
    forward = inspect.unwrap(method)
    parameters, code = arguments_of(forward), getattr(forward, "__code__", None)
    takes_count = _COUNT in parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    indices = {m.ignore_index for m in model.modules() if isinstance(m, nn.CrossEntropyLoss | nn.NLLLoss)}
    own = OwnLoss(*(indices if len(indices) == 1 else ()))
    if code is None or not forward.__module__.startswith("transformers."):
        return replace(own, takes_count=takes_count or (takes_any and getattr(model, "accepts_loss_kwargs", False)))
    kind, config = getattr(model, "loss_type", None), getattr(model, "config", None)
    segments = kind == "ForSemanticSegmentation"
    if segments:
        own = replace(own, ignore_index=getattr(config, "semantic_loss_ignore_index", 255))
    loss_func: Any = model.loss_function if "loss_function" in code.co_names else None
    # Other targets, as the `next_sentence_label` of `BertForPreTraining`, have a loss with another mean.
    several = any(name.endswith(("_label", "_labels")) and name != "shift_labels" for name in parameters)
    if loss_func is None:
        shifts, plain = False, "CrossEntropyLoss" in code.co_names and "shift_labels" not in code.co_varnames
    else:
        shifts = kind in _OF_LATER and not getattr(config, "is_encoder_decoder", False)
        plain = loss_name(loss_func) in _OVER_TOKENS and library_of(loss_func) == "transformers"
        takes_count |= _COUNT in arguments_of(loss_func) and takes_any and getattr(model, "accepts_loss_kwargs", True)
    return replace(
        own,
        shifts=shifts,
        takes_count=takes_count,
        dims=2 + segments if plain and not several else 1,
        takes_numbers=kind in _OF_SAMPLES,
    )


_COUNT = "num_items_in_batch"


def arguments_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function, or of a module's `forward`, without those that partials bind."""
    try:
        return inspect.signature(_called(function)).parameters
    except (TypeError, ValueError):  # a function in C, such as torch.numel
        return {}


def _called(function: Any) -> Any:
    if isinstance(function, partial):
        return partial(_called(function.func), *function.args, **function.keywords)
    return unwrap(function).forward if isinstance(function, nn.Module) else function


def count_passed(learn: "Learner") -> dict[str, Tensor]:
    """Return `LossWeight.passed` for the present batch; {} if the model is replicated or the batch has the count."""
    if learn.loss_func is not None or isinstance(learn.model, nn.DataParallel):
        return {}
    passed = weighting_of(learn).passed(learn.yb)
    return {} if passed and isinstance(learn.xb[0], Mapping) and _COUNT in learn.xb[0] else passed


class LossWeight:
    """Counts the items in the mean of a batch's loss, the weight of the batch among several.

    Args:
        loss_func: for torch's losses, `reduction`, `weight` and `ignore_index` decide what is counted; `None` is for a
            model that computes its own loss.
        loss_weight: `None`, 'sum', 'samples', the name of an entry of the model's output that has the number of items
            in the mean, or a function that returns it. The function is called as f(*targets) if it takes that many
            positional arguments, else as f(pred, *targets); for a model that computes its own loss, `pred` is the whole
            output. For a model that returns a dict of losses, a mapping with one of these for each.
        model: the model, which may compute its own loss.
        aligned: each target is at the position of its prediction.
        by_rows: the rows of predictions are samples, rather than the steps of time-major batches.

    Attributes:
        sums: the loss is a sum.
        loss_func: the loss function.
        own: the facts about the model's own loss; `None` for another loss, or if `loss_weight` gives the count.
        told: the user was warned of an unknown count, or no warning is needed.
        absent: the model has computed no loss in evaluation, although there were targets.
        gathers: in training the loss depends on tensors of other ranks, by `distributed.all_gather`.
        meets: in training the loss calls collectives of `distributed`, so that every rank must compute it.
        asks: the learner's attributes that the loss function gets by keyword.
        alone: the loss function can be called with predictions alone.
        entries: the entries of the model's output that are counts, not losses.
        parts: the weights of the losses that have their own count, by name.
        counted: for the present batch, each loss and the count of its mean, by name, as set by `take_parts`.
        factors: for the present batch on several ranks, the factors of the gradients of these losses.

    Raises:
        ValueError: an invalid `loss_weight`, or a loss of torch's made with reduction='none'.
    """

    def __init__(
        self, loss_func: Any, loss_weight: "Weight | None" = None, model: nn.Module | None = None,
        aligned: bool = False, by_rows: bool = True,
    ) -> None:  # fmt: skip
        # These are not counts.
        is_named = isinstance(loss_weight, str | Mapping) and loss_weight not in ("", "mean", {})
        if loss_weight is not None and not callable(loss_weight) and not is_named:
            raise ValueError(
                f"got loss_weight={loss_weight!r}; it takes None, 'sum', or a function of the targets that returns the "
                "number of items the loss averages over (or of what the model returns and the targets), or the name "
                "of an entry of the model's output that has it; 'samples' says that it is a mean over samples; and of "
                "a dict of losses it takes one of these for each (errors.html#loss-weight)"
            )
        given = dict(loss_weight) if isinstance(loss_weight, Mapping) else {}
        if given and (loss_func is not None or any(not x or isinstance(x, Mapping) for x in given.values())):
            raise ValueError(
                f"got loss_weight={loss_weight!r}, with a weight for each of several losses: that is for a model which "
                "returns them as a dict, without a loss_func, and each weight is a function, a name, 'samples' or 'sum'"
                " (errors.html#loss-weight)"
            )
        # A loss of the user's may be made with reduction='none', and take the mean itself.
        reduction = loss_option(loss_func, "reduction") if loss_weight is None else None
        if reduction == "none" and is_of_torch(loss_func):
            raise ValueError(f"{loss_func} has reduction='none', so the loss is not a scalar; use 'mean' or 'sum'")
        self._given, self._is_own = loss_weight, loss_func is None
        self.loss_func = loss_func
        self.by_rows = by_rows
        parameters = list(arguments_of(loss_func).values())
        self.asks = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty)
        by_position = [p for p in parameters if p.kind in _BY_POSITION]
        self.alone = bool(by_position) and all(p.default is not p.empty for p in by_position[1:])
        # What is counted: by the user's function, by entries of the output, by torch's loss, or by the model itself.
        self.sums: bool = "sum" in (loss_weight, reduction)
        if callable(loss_weight):
            self._takes = _arguments_by_position(loss_weight)
        self.parts = {name: LossWeight(None, weight) for name, weight in given.items()}
        self.entries: set[str] = {entry for part in self.parts.values() for entry in part.entries}
        if isinstance(loss_weight, str) and loss_weight not in ("sum", "samples"):
            self.entries = {loss_weight}
        self._count: Callable | None = None
        if loss_weight is None and not self.sums and averages_over_targets(loss_func):
            weight, ignored = loss_option(loss_func, "weight"), loss_option(loss_func, "ignore_index")
            self._count = partial(_count_classes, weight, -100 if ignored is None else ignored)  # as in torch
            if is_cross_entropy(loss_func) and not has_classes_in_dim_1(loss_func) and weight is not None:
                distributed.warn_once(
                    f"{loss_name(loss_func)} has a forward of its own, and is taken for a mean over the weights of "
                    "classes, as torch's losses are. If it is one, say loss_weight=lambda y: weight[y].sum(); if it is "
                    "a mean over samples, say loss_weight='samples'"
                    " (errors.html#loss-weight)"
                )
        self.own: OwnLoss | None = None
        if loss_func is None and loss_weight is None:
            self.own = OwnLoss() if model is None else own_loss_of(model)
            self.own = replace(self.own, shifts=self.own.shifts and not aligned)
            self._count = self.own.count
        # What is found out while batches are read
        self.told = self.own is None
        self.absent = self.gathers = self.meets = False
        self.counted: dict[str, tuple[Tensor, float | Tensor]] = {}
        self.factors: dict[str, float | Tensor] = {}

    def passed(self, yb: tuple) -> dict[str, Tensor]:
        """Return the keyword argument that gives a model with its own loss the number of items in the mean.

        The number is at least 1: an empty mean is NaN, whose gradient would reach the other batches of the step.
        """
        count = self.own.count(*yb) if self.own is not None and self.own.takes_count else None
        return {} if count is None else {_COUNT: count.clamp(min=1)}

    def takes_output(self, yb: tuple) -> bool:
        """Tell whether the function `loss_weight` takes the model's output before the targets.

        Raises:
            ValueError: it takes neither the targets alone nor the output and the targets.
        """
        if not callable(self._given):
            return False
        (least, most), n = self._takes, len(yb)
        if not (least <= n <= most or least <= n + 1 <= most):
            takes = f"{least}" if least == most else f"{least} to {most}"
            raise ValueError(
                f"loss_weight={loss_name(self._given)} takes {takes} arguments by position, and a batch has {n} "
                f"targets: let it take these {n}, or what the model returns and these {n}"
                " (errors.html#loss-weight)"
            )
        return (least > 0 and most == math.inf) or not least <= n <= most  # the first for f(pred, *targets)

    def count(self, yb: tuple, batch_size: int, pred: Any = None, output: Any = None) -> int | Tensor:
        """Return the number of items in the mean of a batch's loss: a 0-dim tensor if they are counted, on every rank.

        Args:
            yb: the targets.
            batch_size: the number of samples.
            pred: the predictions, if there are any.
            output: the whole output of the model.

        Raises:
            ValueError: the function takes other arguments, or its result or the output's entry is not a number.
        """
        given, made_of = self._given, output if self._is_own else pred
        if given == "samples" or self.parts:
            return batch_size
        if isinstance(given, str) and self.entries:
            return _checked_count(_entry(output, given) if batch_size else 0)
        if callable(given) and (yb or made_of is not None):
            arguments = (made_of, *yb) if self.takes_output(yb) else yb
            return _checked_count(given(*arguments) if batch_size else 0)
        count = self._count(*yb) if yb and self._count is not None else None
        return self.rows(pred, yb, batch_size) if count is None else count

    def rows(self, pred: Any, yb: tuple, batch_size: int) -> int:
        """Return the number of rows of predictions that are compared with targets, each with its own value."""
        return rows_compared(pred, yb, batch_size) if self.by_rows else batch_size

    # Losses of several parts, each with its own count

    def counts_of(self, yb: tuple, batch_size: int, output: Any) -> dict[str, tuple[Tensor, int | Tensor]]:
        """Return each part of a model's loss, and the number of items in its mean.

        Raises:
            ValueError: the model has returned parts that have no weight, or not all that have one.
        """
        parts = loss_parts(output, self.entries)
        for name in (*self.parts, *parts):
            if name not in parts or name not in self.parts:
                near = did_you_mean(name, parts.keys() ^ self.parts.keys() - {name})
                raise ValueError(
                    f"loss_weight= has a weight for each of {', '.join(self.parts)}, and the losses that the model "
                    f"returned are {', '.join(parts) or describe(output)}{near}; give it one for each, and no others"
                    " (errors.html#loss-weight)"
                )
        return {name: (parts[name], part.count(yb, batch_size, None, output)) for name, part in self.parts.items()}

    def note_meeting(self) -> AbstractContextManager:
        """Note that the loss calls a collective; return the context in which it is called."""
        self.meets = True
        return nullcontext()

    def take_parts(self, learn: "Learner") -> None:
        """Set the loss to the sum of the parts that count anything, with hooks that weigh their gradients."""
        self.counted, self.factors = {}, {}
        total = zero_loss(learn.output)
        for name, (part, counted) in self.counts_of(learn.yb, learn.batch_size, learn.output).items():
            count = host_count(counted)
            if not counts_something(count):
                continue  # the mean of no samples is NaN
            if isinstance(count, Tensor):
                part = torch.where(count > 0, part, 0.0)
            if part.requires_grad and learn.n_ranks > 1:
                part = part.view_as(part)  # a view, so that the hook gets only this gradient
                part.register_hook(partial(self._weigh, name))
            total = total + part
            self.counted[name] = (part.detach() / count, count) if self.parts[name].sums else (part.detach(), count)
        learn.loss_grad, learn.loss = total, total.detach()

    def _weigh(self, name: str, grad: Tensor) -> Tensor:
        return (grad * self.factors.get(name, 1.0)).to(grad.dtype)

    @collective
    def share(self, learn: "Learner") -> None:
        """Weigh the parts of a rank's loss by the counts of all ranks.

        The gradient of the step is the mean over samples of the ranks' gradients. So the gradient of a part is
        multiplied by this rank's share of the part's count, divided by this rank's share of the samples.
        """
        counted = self.counted if learn.batch_size else {}
        own = torch.zeros(1 + len(self.parts), dtype=torch.float64, device=learn.dls.device)
        own[0] = learn.batch_size
        for i, name in enumerate(self.parts, 1):
            own[i] = counted[name][1] if name in counted else 0  # written on the device, without a sync
        shares = (own / distributed.reduce(own, among="gradients")).nan_to_num()
        for i, (name, part) in enumerate(self.parts.items(), 1):
            if name in counted:
                self.factors[name] = factor = (1 if part.sums else shares[i]) / shares[0]
                value, count = counted[name]
                learn.loss = learn.loss + (factor - 1) * (value * count if part.sums else value)


Weight = str | Callable[..., Tensor] | Mapping[str, str | Callable[..., Tensor]]
"""The number of items in a loss's mean, as `Learner` takes it."""

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _entry(output: Any, name: str) -> Any:
    """Return the entry of a model's output that has the count."""
    entry = None if isinstance(output, Tensor) else get_field(output, name)
    if entry is None:
        names = output if isinstance(output, Mapping) else getattr(output, "_fields", getattr(output, "__dict__", ()))
        raise ValueError(
            f"loss_weight={name!r} is the name of an entry of the model's output, which has the count, and the model "
            f"returned {describe(output)}{did_you_mean(name, names)}; let it return the count under that name, or "
            "count by a function (errors.html#loss-weight)"
        )
    return entry


def _arguments_by_position(function: Callable) -> tuple[int, float]:
    """Return the number of positional arguments that a function needs, and the number that it takes."""
    try:
        parameters = inspect.signature(_called(function)).parameters.values()
    except (TypeError, ValueError):  # a function in C, such as torch.numel
        return 0, math.inf
    by_position = [p for p in parameters if p.kind in _BY_POSITION]
    most = math.inf if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(by_position)
    return sum(p.default is p.empty for p in by_position), most


def _checked_count(count: Any) -> Tensor:
    """Return the result of the function `loss_weight` as a tensor without gradient."""
    number = torch.as_tensor(count).detach() if hasattr(count, "__float__") else None
    if number is None or number.ndim:
        raise ValueError(
            f"loss_weight returned {describe(count)}; it returns one number, what the loss averages over in the whole "
            "batch: for instance .sum() of a mask"
        )
    return number


def rows_compared(pred: Any, yb: tuple, batch_size: int) -> int:
    """Return the number of rows of predictions that are compared with targets: a sample may have several, or none."""
    if not (isinstance(pred, Tensor) and pred.ndim) or pred.shape[0] == batch_size or not batch_size or not yb:
        return batch_size
    return len(pred) if all(isinstance(y, Tensor) and y.ndim and len(y) == len(pred) for y in yb) else batch_size


def _are_integers(target: Any) -> bool:
    return isinstance(target, Tensor) and target.ndim > 0 and not target.is_floating_point() and not target.is_complex()


def class_numbers(target: Tensor) -> Tensor:
    """Return targets of uint8 as int64, and others as they are: torch compares uint8 to -100 as to 156."""
    return target.long() if target.dtype == torch.uint8 else target


def class_axes(pred: Tensor, target: Tensor) -> list[int]:
    """Return the dimensions of the scores that may be the classes: the others have the shape of the targets."""
    if pred.ndim < 3:
        return [1]
    return [axis for axis in (1, -1) if pred.select(axis, 0).shape == target.shape]


def _count_classes(weight: Tensor | None, ignore_index: int, target: Any, *rest: Any) -> Tensor | None:
    """Return the divisor of torch's cross-entropy mean, or `None` if that is the number of samples.

    The divisor is the sum of the class weights of the targets that are not ignored. With class probabilities as targets
    it is the number of samples.
    """
    if not isinstance(target, Tensor) or target.is_floating_point():
        return None
    target = class_numbers(target)
    if weight is None:
        if target.ndim == 1 and ignore_index < 0 and target.is_cpu and target.numel() and target.min().item() >= 0:
            return None  # the usual case; this check takes a few microseconds
        return (target != ignore_index).sum()
    counted = target != ignore_index
    return (weight.to(target.device)[target.clamp(min=0, max=len(weight) - 1)] * counted).sum()


# The first batch of a fit

_ONLY_SHAPE = ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Transpose", "Permute", "T", "ToCopy",
               "Clone", "Alias")  # fmt: skip


def sum_to_one(pred: Tensor) -> bool:
    """Tell whether predictions are probabilities of classes. A host-device sync."""
    sums = pred.detach().float().sum(1)
    return bool((pred >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-2)


def made_by(pred: Any) -> str:
    """Return the operation that made a prediction, as autograd names it ('Softmax'), or '' if it is unknown."""
    node = pred.grad_fn if isinstance(pred, Tensor) else None
    while node is not None and (name := node.name().partition("Backward")[0]) in _ONLY_SHAPE:
        node = node.next_functions[0][0]
    return "" if node is None else name


def repeated(loss_func: Any, pred: Any) -> tuple[str, str]:
    """Return an operation that both the model and the loss do, and advice; two empty texts if there is none.

    It needs the graph of the forward pass. It is a host-device sync only if the model ends with a softmax.
    """
    made = made_by(pred)
    name = loss_name(loss_func)
    if made == "Sigmoid" and is_one_of(loss_func, BINARY_LOGITS):
        return f"a sigmoid before {name}? It takes raw scores and does that itself", "leave the sigmoid out"
    if made == "Softmax" and is_cross_entropy(loss_func) and pred.ndim > 1 and sum_to_one(pred):
        if is_one_of(loss_func, NLL):
            return f"a softmax before {name}? It takes logarithms", "end the model with LogSoftmax(1)"
        return f"a softmax before {name}? It takes raw scores and does that itself", "leave the softmax out"
    return "", ""


def out_of_range(loss_func: Any, pred: Tensor, target: Tensor) -> tuple[str, str]:
    """Describe the classes that a cross-entropy takes, with advice, if targets are out of range. A host-device sync.

    If all targets are in range, both texts are empty.
    """
    dim, target = min(1, pred.ndim - 1), class_numbers(target)
    classes, counted = pred.shape[dim], target[target != loss_option(loss_func, "ignore_index", -100)]
    low, high = (int(x) for x in counted.aminmax()) if counted.numel() else (0, 0)
    if low >= 0 and high < classes:
        return "", ""
    from_one = "; if they count from 1, subtract 1" if low == 1 and high == classes else ""
    return (
        f"the loss takes classes 0 .. {classes - 1}, as dimension {dim} of the prediction {tuple(pred.shape)} says",
        f"let the model have {high + 1} outputs, or correct the targets{from_one}",
    )


def is_constant(xb: Any) -> bool:
    """Tell whether the inputs of several samples are all one and the same number. A host-device sync."""
    tensors = list(tensors_in(xb))
    if not tensors or not all(map(_is_plain, tensors)):
        return False
    return all(t.ndim and len(t) > 1 and bool((t == t.flatten()[0]).all()) for t in tensors)


def _is_plain(t: Tensor) -> bool:
    return t.is_floating_point() and t.layout is torch.strided and t.numel() > 0


def _has_nan(part: Any) -> bool:
    return any(not t.isfinite().all() for t in filter(_is_plain, tensors_in(part)))


def look_at_first_batch(learn: "Learner") -> None:
    """Warn of likely mistakes, before the loss of a fit's first batch. A host-device sync, once in a fit.

    Raises:
        ValueError: classes that the loss does not have, which would make a CUDA device unusable for this process.
    """
    loss_func, pred = learn.loss_func, learn.pred
    target: Any = learn.yb[0] if len(learn.yb) == 1 else None
    classes = isinstance(target, Tensor) and not target.is_floating_point() and is_cross_entropy(loss_func)
    if classes and isinstance(pred, Tensor) and pred.ndim and not target.is_cpu:
        wrong, advice = out_of_range(loss_func, pred, target)
        if wrong:
            low, high = (int(x) for x in target.aminmax())
            raise ValueError(f"the first batch has targets from {low} to {high}: {wrong}; {advice}")
    doubt, advice = repeated(loss_func, pred)
    if doubt:
        distributed.warn_once(f"the first batch: {doubt}; {advice}")
    if is_constant(learn.xb):
        distributed.warn_once("the first batch: all values of the inputs are the same number; look into the dataset")
    elif _has_nan(learn.xb) and _has_nan(pred):
        distributed.warn_once(
            "the first batch: inputs are NaN or infinite, and so are predictions; look into the dataset"
        )


# The loss of a batch


def fire_after_loss(learn: "Learner") -> None:
    """Fire `after_loss`, and in a fit's first batch check the callbacks' changes of the loss.

    A warning says so if a callback has changed the recorded loss but not the differentiated one.
    """
    loss, graph = learn.loss, getattr(learn.loss_grad, "grad_fn", None)
    learn._dispatch.fire("after_loss")
    if learn.iter or not learn.training or learn.task != "fit" or learn.epoch != learn.start_epoch:
        return
    is_changed = learn.loss is not loss and getattr(learn.loss, "requires_grad", False)
    is_same = graph is not None and getattr(learn.loss_grad, "grad_fn", None) is graph
    if is_changed and is_same:
        distributed.warn(
            "a callback has changed learn.loss, which is recorded, and not learn.loss_grad, which is differentiated, "
            "so training does not see the change; write self.learn.loss_grad = self.loss_grad + ..."
            " (errors.html#callback-attributes)"
        )


def take_loss(learn: "Learner") -> None:
    """Set `loss` and `loss_grad` of a batch, and the count of the loss.

    Raises:
        ValueError: the loss is not a scalar, or would silently broadcast predictions and targets.
    """
    weighting = weighting_of(learn)
    first = learn.iter == learn.first_iter and learn.training and learn.n_ranks > 1
    if learn.batch_size == 0 and weighting.meets and learn.training and learn.loss_func is not None:
        # The other ranks wait for this one in the loss. A sample that stands for none is no part of it.
        learn.pred, learn.yb = cut_rows((learn.pred, learn.yb), 0, 0, 0)
        learn._loss()
        if not weighting.gathers:
            learn.loss_grad = zero_loss((output_of(learn), learn.loss_grad))  # it may have called parts of the model
        learn.loss = torch.zeros_like(learn.loss)  # an empty mean would be NaN
    elif learn.batch_size == 0 and not rows_of(learn.xb):
        # A rank without data has gradients of zero, since an empty mean would be NaN.
        learn.loss_grad = zero_loss(output_of(learn))
        learn.loss = learn.loss_grad.detach()
    else:
        if not learn.iter and learn.training and learn.task == "fit" and learn.epoch == learn.start_epoch:
            look_at_first_batch(learn)
        with distributed.around_collectives(weighting.note_meeting) if first else nullcontext():
            learn._loss()
    if learn.loss_grad is None:
        return
    if not isinstance(learn.loss_grad, Tensor) or learn.loss_grad.ndim or learn.loss_grad.is_complex():
        raise no_scalar(learn.loss_grad)
    if first and learn.batch_size:
        weighting.gathers = any(node.name() == distributed.GATHERED for node in nodes_of([learn.loss_grad]))
    table = learn._dispatch.table
    learn.loss_count = count = batch_count(learn) if learn.batch_size else 0  # a rank's stand-in sample is none
    if weighting.parts and learn.batch_size:
        weighting.take_parts(learn)
    if (table["after_loss"] or table["before_backward"]) and isinstance(learn.loss, Tensor):
        learn.loss = learn.loss.clone()  # a callback's `self.learn.loss_grad += penalty` must not change it
    if not weighting.told and learn.training and learn.task == "fit":
        weighting.told = True
        if why := doubtful_count(learn):
            distributed.warn_once(f"{why}. {_UNTIL_THEN} (errors.html#loss-weight)")
    several = learn.task == "fit" and learn._gradient is not None
    if several and isinstance(count, int) and count != learn.batch_size and not is_of_torch(learn.loss_func):
        distributed.warn_once(
            f"the loss compares {count} rows of a batch of {learn.batch_size} samples, and is taken for their mean; if "
            f"it is another one, say so by loss_weight=. {_UNTIL_THEN} (errors.html#loss-weight)"
        )


_UNTIL_THEN = "Until then it may be that steps of several batches or ranks are not exactly those of one batch"

_OF_PASS = ("batch_size", "xb", "yb", "pred", "output", "loss", "loss_grad", "loss_count")


def pass_kept(learn: "Learner") -> AbstractContextManager[None]:
    """Return a context that restores the attributes that the loop's own pass over the present batch has set."""
    return replaced(learn, **{name: getattr(learn, name) for name in _OF_PASS})


@collective
def evaluate_again(learn: "Learner") -> Tensor:
    """Compute the loss of the present batch and its gradients again, and return the loss; the batch is not changed.

    Callbacks may change the loss as in the loop. On several ranks the gradients are averaged at the end of the backward
    pass; every rank must reach this.
    """
    dispatch = learn._dispatch
    precision: Any = next((cb for cb in learn.cbs if cb.name == "mixed_precision" and cb.run), None)
    learn._zero_grad()
    if precision is not None:
        precision.before_batch()  # this enters autocast, which `after_loss` leaves
    try:
        with pass_kept(learn), torch.enable_grad():
            learn._forward()
            dispatch.fire("after_pred")
            take_loss(learn)
            dispatch.fire("after_loss")
            learn._events("backward", learn._backward, CancelBackwardException)
            return learn.loss_grad
    finally:
        if precision is not None:
            precision.cleanup_batch()


def output_of(learn: "Learner") -> Any:
    """Return the whole output of the model, or the predictions if a subclass sets no `output`."""
    return learn.pred if learn.output is None else learn.output


def weighting_of(learn: "Learner") -> LossWeight:
    """Return the `LossWeight` of the learner's losses."""
    weighting = learn._loss_weighting
    if weighting.loss_func is not learn.loss_func:  # A callback has replaced it in the middle of a run.
        vars(weighting).update(vars(new_weighting(learn)))
    return weighting


def new_weighting(learn: "Learner") -> LossWeight:
    """Make the `LossWeight` of the learner's present loss."""
    return LossWeight(learn.loss_func, learn.loss_weight, learn.model, learn.dls.aligned, learn.dls.batch_dim == 0)


def batch_count(learn: "Learner") -> int | Tensor:
    """Return the number of items in the mean of the present batch's loss."""
    return weighting_of(learn).count(learn.yb, learn.batch_size, learn.pred, output_of(learn))


def counts_predictions(learn: "Learner") -> bool:
    """Tell whether the count of the loss needs the model's output."""
    weighting = weighting_of(learn)
    return weighting.takes_output(learn.yb) or bool(weighting.entries)


def loss_without_targets(learn: "Learner") -> bool:
    """Tell whether a batch without targets may have a loss."""
    return learn.loss_func is None or overrides(learn, "_loss") or weighting_of(learn).alone


def wants_loss(learn: "Learner") -> bool:
    """Tell whether the present batch has a loss."""
    return (bool(learn.yb) or loss_without_targets(learn)) and learn.task != "predict"


def loss_sums(learn: "Learner") -> bool:
    """Tell whether the loss of a batch is a sum rather than a mean."""
    return weighting_of(learn).sums


def loss_arguments(learn: "Learner") -> dict[str, Any]:
    """Return the keyword arguments of the learner's loss function: attributes of the learner, or the learner itself."""
    return {name: learn if name == "learn" else getattr(learn, name) for name in weighting_of(learn).asks}


def found_loss(learn: "Learner") -> Any:
    """Return the model's own loss, or the result of a loss function that takes attributes of the learner."""
    if learn.loss_func is None:
        return own_loss(learn.output, weighting_of(learn).entries)
    return learn.loss_func(learn.pred, *learn.yb, **loss_arguments(learn))


def makes_loss(learn: "Learner") -> bool:
    """Tell whether the model computes the loss, rather than a loss function or the learner."""
    return learn.loss_func is None and not overrides(learn, "_loss")


def own_loss(output: Any, but: Collection[str] = ()) -> Any:
    """Return the loss that a model has computed itself.

    It is the sum of `loss_parts`, or the `loss` of the output; of a tuple or list the one scalar, or a 0-dim output.

    Args:
        output: the model's output.
        but: the entries of the output that are counts.
    """
    parts = loss_parts(output, but)
    if parts:
        return sum(parts.values())
    return _by_place(output)[1] if _has_places(output) else get_field(output, "loss")


def loss_parts(output: Any, but: Collection[str] = ()) -> dict[str, Tensor]:
    """Return the losses of a model that computes several, as detectors do: its output is a mapping of scalars.

    Integers among them are counts, not losses.
    """
    if not isinstance(output, Mapping) or "loss" in output:
        return {}
    parts = {name: part for name, part in output.items() if name not in but}
    if not all(isinstance(part, Tensor) and not part.ndim for part in parts.values()):
        return {}
    return {name: part for name, part in parts.items() if is_scalar(part)}


def counted_parts(learn: "Learner") -> dict[str, tuple[Tensor, float | Tensor]]:
    """Return the parts of the model's loss for the present batch, each with the number of items in its mean."""
    weighting = weighting_of(learn)
    if learn.loss is None or not learn.batch_size:
        return {}
    if weighting.parts:
        return weighting.counted
    return {name: (part, learn.loss_count) for name, part in loss_parts(learn.output, weighting.entries).items()}


def pred_of(output: Any, is_own: bool) -> Any:
    """Return the predictions in a model's output: its `logits`, or the whole output.

    Args:
        output: the model's output.
        is_own: the model computes its own loss. The predictions are then the first other entry of a tuple or list with
            the loss, or with `None` in its place, or all other entries of a mapping; an output that is only the loss
            has none, unless it is a mapping.

    Raises:
        ValueError: there are several scalars, any of which may be the loss.
    """
    if is_own and _has_places(output):
        return _by_place(output)[0]
    if isinstance(output, Tensor):
        return output
    if is_own and isinstance(output, Mapping) and "logits" not in output:
        others = {name: entry for name, entry in output.items() if name != "loss"}
        if others and len(others) < len(output):
            return type(output)(**{**output, "loss": None}) if is_dataclass(output) else others
    return get_field(output, "logits", output)


def _has_places(output: Any) -> bool:
    return isinstance(output, Tensor | tuple | list) and not hasattr(output, "_fields")


def is_scalar(entry: Any) -> bool:
    """Tell whether an entry of a model's output can be its loss."""
    return isinstance(entry, Tensor) and not entry.ndim and entry.is_floating_point()


def _by_place(output: Any) -> tuple[Any, Any]:
    """Return the predictions and the loss, or `None`, of an output whose entries have no names."""
    if isinstance(output, Tensor):
        return (None, output) if is_scalar(output) else (output, None)
    places = [i for i, entry in enumerate(output) if is_scalar(entry)]
    if len(places) > 1:
        raise ValueError(
            f"the model returned {describe(output)}, with scalars in the places {', '.join(map(str, places))}, and it "
            "is not known which of them is the loss: return {'loss': ..., 'logits': ...}, or a dict of losses, whose "
            "sum is the loss (errors.html#loss-missing)"
        )
    others = [entry for entry in output if entry is not None and not is_scalar(entry)]
    if len(others) == len(output):
        return output, None
    return others[0] if others else None, output[places[0]] if places else None


def check_predictions(learn: "Learner") -> None:
    """Refuse to go on without predictions where the model has returned something else.

    Raises:
        ValueError: the model has returned only a loss.
    """
    if learn.pred is None and learn.output is not None:
        raise ValueError(
            f"there are no predictions: the model returned {describe(learn.output)}, which is its loss. Let it return "
            "(predictions, loss), or without targets the predictions (of a batch of one sample, too, with its batch "
            "axis: .squeeze(1) rather than .squeeze()) (errors.html#loss-missing)"
        )


def check_shapes(loss_func: Any, pred: Any, yb: tuple) -> None:
    """Refuse predictions and targets that an elementwise loss would silently broadcast."""
    if len(yb) != 1 or not is_one_of(loss_func, _BROADCAST):
        return
    target = yb[0]
    if isinstance(pred, Tensor) and isinstance(target, Tensor) and pred.shape != target.shape:
        raise ValueError(
            f"the model's predictions have the shape {tuple(pred.shape)}, the targets {tuple(target.shape)}, and "
            f"{loss_name(loss_func)} compares them element by element: "
            "they must be the same (reshape one of them, for instance with .squeeze(1) or .unsqueeze(1))"
            " (errors.html#first-batch)"
        )


UNKNOWN_COUNT = "the model makes its own loss, and it is not known what that averages over: "
SAY_COUNT = (
    "loss_weight=, a function of the targets, or of what the model returns and the targets, that counts what the loss "
    "averages over, or 'sum'"
)


def doubtful_count(learn: "Learner") -> str:
    """Describe the doubt about the count of the present loss, with advice; return '' if there is no doubt.

    This is a host-device sync.
    """
    own, yb = weighting_of(learn).own, learn.yb
    if own is None or own.is_known(yb):
        return ""
    if own.count(*yb) is not None:
        y = "y" if own.used(yb[0]) is yb[0] else "y[..., 1:]"
        return (
            f"{UNKNOWN_COUNT}it is taken for the mean over {own.described(yb[0])}. If it is one, say "
            f"loss_weight=lambda y: ({y} != {own.ignore_index}).sum(); else give the Learner {SAY_COUNT}"
        )
    if overrides(learn, "_loss"):
        return ""
    parts = " + ".join(loss_parts(learn.output)) or "it"
    return (
        f"{UNKNOWN_COUNT}{parts} is taken for a mean over samples. If it is one, say loss_weight='samples'; else give "
        f"the Learner {SAY_COUNT} (targets with names of their own: DataLoaders(target_keys=...))"
    )


def is_of_torch(loss_func: Any) -> bool:
    """Tell whether a loss is one of torch's, or the model's own, whose doubts `doubtful_count` describes."""
    inner = unwrap_partial(loss_func)
    module = getattr(inner if hasattr(inner, "__qualname__") else type(inner), "__module__", "")
    return loss_func is None or module.startswith("torch.nn.")


def no_scalar(loss: Any) -> ValueError:
    """Return the error for a loss that is not a scalar."""
    advice = "for instance its .mean() (reduction='mean')"
    if isinstance(loss, Mapping | list | tuple):
        advice = "such as the sum of its parts, each of which a callback can give to learn.log_metric(name, value)"
    elif isinstance(loss, Tensor) and loss.is_complex():
        advice = "a real one, such as (pred - y).abs().square().mean()"
    return ValueError(f"the loss is not a scalar: loss_func returned {describe(loss)}; return a 0-dim tensor, {advice}")


def accept_no_loss(learn: "Learner") -> None:
    """Accept an evaluation batch without a loss if the model computes its own: detectors do so only in training.

    Raises:
        ValueError: there is a loss function, or there are no targets, without which no model computes a loss.
    """
    if learn.loss_func is not None or not learn.yb:
        raise no_loss(learn)
    weighting_of(learn).absent = True


def no_loss(learn: "Learner") -> ValueError:
    """Return the error for a batch without a loss."""
    if learn.loss is not None:
        return ValueError(
            "there is no loss to differentiate: learn.loss is set, and learn.loss_grad is None, which a callback or "
            "_loss of a subclass sets"
        )
    if learn.loss_func is None:
        message = (
            f"there is no loss: loss_func is None and the model returned {describe(learn.output)} without a `loss`; "
            "give the Learner a loss_func, or let the model return its own"
        )
        only = "" if learn.training else ". If it makes one in training alone, name the targets, which metrics need: "
        only = only and f"{only}DataLoaders(target_keys=..., n_inp=...)"
        return ValueError(message + f"{only} (errors.html#loss-missing)")
    if learn.yb:
        return ValueError(
            f"there is no loss: {loss_name(learn.loss_func)} returned None; its `return` may be missing"
            " (errors.html#loss-missing)"
        )
    return ValueError(
        f"there is no loss: the batch {describe(learn.batch)} has no targets{unknown_keys(learn.dls, learn.batch)}; "
        "let the dataset return (input, target), set DataLoaders(n_inp=..., target_keys=...), or set learn.yb in a "
        "callback's before_batch"
        " (errors.html#loss-missing)"
    )
