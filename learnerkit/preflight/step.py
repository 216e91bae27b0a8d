"""A check of one step of training and one of validation, before a long run."""

import copy
import math
from collections.abc import Iterable
from contextlib import ExitStack
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from learnerkit import arguments, world
from learnerkit.callback import Callback
from learnerkit.callbacks.debugging import ShortLoader
from learnerkit.data.batches import tensors_in
from learnerkit.events import CancelFitException, CancelValidException
from learnerkit.losses import is_cross_entropy, is_one_of, loss_name, loss_option
from learnerkit.metrics import make_meters
from learnerkit.parallel.watch import PeerError
from learnerkit.preflight.report import HINT, NOTHING, OK, WRONG, verdict
from learnerkit.snapshot import unchanged
from learnerkit.text import first_few
from learnerkit.utils import describe, unwrap

if TYPE_CHECKING:
    from learnerkit.learner import Learner


def check(learn: "Learner") -> bool:
    """Take one training step and one of validation, and print what is right and what is wrong with them on rank 0.

    The learner's callbacks take part, but those that are `only_fit`; nothing stays behind, but that callbacks of your
    own have seen one more epoch, of one step. Under DDP every rank must reach this. Waits for the device.

    In the report `ok` is fine, `??` a hint that may be meant so, `!!` a problem, and `--` has not been looked at.

    Returns:
        Whether there is no problem, on any rank.

    Raises:
        RuntimeError: called while something runs.
    """
    if learn.task is not None:
        raise RuntimeError(f"check was called during {learn.task!r}; call it before a fit")
    look, sharded = StepCheck(), False
    try:
        arguments.check_fit(learn, n_epoch=1)
        look.check_loaders(learn)
        with learn.no_bar(), learn._running("check", look), unchanged(learn):
            sharded = learn._sharded
            look.stage = "optimizer"
            learn._prepare_opt()
            look.stage = "inputs"
            learn.n_epoch, learn.n_steps, learn._start_epoch = 1, None, 0
            learn._level("fit", learn._fit, CancelFitException)
    except Exception as e:
        look.failed(e, unwrap(learn.model))
    everyone = world.all_gather(look.findings) if sharded else [look.findings]  # every rank must reach this
    lines, well = report(everyone)
    if world.is_main():
        print("\n".join(lines), flush=True)
    return well


class Finding(NamedTuple):
    """A line of the report.

    Attributes:
        mark: `OK`, `HINT`, `WRONG` or `NOTHING`.
        topic: one of `TOPICS`.
        text: what was found, and what to do.
    """

    mark: str
    topic: str
    text: str


TOPICS = (
    "inputs", "targets", "prediction", "loss", "gradients", "optimizer", "batchnorm", "validation", "metrics",
    "callbacks", "other ranks",
)  # fmt: skip
_ALWAYS = [*TOPICS[:6], "validation"]  # those that every check should come to


def report(everyone: list[list[Finding]]) -> tuple[list[str], bool]:
    """The lines to print, and whether all is well, from the findings of every rank."""
    told = [f for found in everyone for f in found if f.mark == WRONG and f.topic != "other ranks"]
    lines = []
    for topic in TOPICS:
        by_rank: dict[Finding, list[int]] = {}
        for rank, found in enumerate(everyone):
            for finding in found:
                if finding.topic == topic and not (told and topic == "other ranks"):
                    by_rank.setdefault(finding, []).append(rank)
        notable = {f: ranks for f, ranks in by_rank.items() if f.mark in (HINT, WRONG)}
        for finding, ranks in notable.items():
            some = "" if len(ranks) == len(everyone) else f" (rank {', '.join(map(str, ranks))})"
            lines.append(_line(finding) + some)
        if not notable and by_rank:
            lines.append(_line(next(iter(by_rank))))
        elif not by_rank and topic in _ALWAYS:
            lines.append(_line(Finding(NOTHING, topic, "not reached")))
    problems = sum(line.startswith(WRONG) for line in lines)
    lines.append(verdict(problems))
    return lines, not problems


def _line(finding: Finding) -> str:
    return f"{finding.mark}  {finding.topic:<12}{finding.text}"


class OneBatch(ShortLoader):
    """The first batch of a loader: a whole epoch, so that accumulation takes its step."""

    def __init__(self, dl: Iterable) -> None:
        super().__init__(dl, 1)

    def __len__(self) -> int:
        return 1


class StepCheck(Callback):
    """Looks at one step of training and of validation.

    Attributes:
        findings: what was found.
        stage: the topic to which an error would belong now.
    """

    order = 1000  # what it sees is what the others have made of it
    reads_predictions = True  # in training too: ParallelCallback gathers them

    def __init__(self) -> None:
        super().__init__()
        self.findings: list[Finding] = []
        self.stage = "inputs"
        self._named: list[tuple[str, nn.Parameter]] = []
        self._before: list[Tensor] = []
        self._moving: list[str] = []
        self._xb: Any = None
        self._running_model = False
        self._watch = ExitStack()

    def check_loaders(self, learn: "Learner") -> None:
        """Refuse loaders of which the first batch could not be given back."""
        for dl in learn.dls.loaders[:2]:
            if hasattr(dl, "__next__"):
                raise ValueError(
                    f"a loader is an iterator ({type(dl).__name__}), which can be read only once, so that the check "
                    "would take its first batch from the fit; pass a list, a DataLoader or a class with __iter__"
                )
        if learn.dls.valid is None:
            self.findings.append(Finding(NOTHING, "validation", "there is no validation loader"))

    # Events

    def before_fit(self) -> None:
        self._named = list(unwrap(self.learn.model).named_parameters())

    def before_train(self) -> None:
        lone = arguments.lone_last_batch(self.learn)
        if lone is not None:
            self._watch.enter_context(arguments.watched_norms(self.learn, lambda: self._find_lone(lone)))
        self.learn.dl = OneBatch(self.learn.dl)

    def _find_lone(self, text: str) -> None:
        finding = Finding(WRONG, "batchnorm", text)
        if finding not in self.findings:  # each BatchNorm finds it
            self.findings.append(finding)

    def cleanup_train(self) -> None:
        self._watch.close()

    def before_validate(self) -> None:
        self.stage = "validation"
        self.learn.dl = OneBatch(self.learn.dl)

    def before_batch(self) -> None:
        self._xb, self._running_model = self.learn.xb, True
        if self.learn.training:
            self.stage = "prediction"

    def after_pred(self) -> None:
        learn, self._running_model = self.learn, False
        if not learn.batch_size:  # a rank without data
            return
        targets = judge_targets(learn.loss_func, learn.pred, learn.yb)
        if learn.training:
            self.findings += judge_inputs(self._xb, unwrap(learn.model), ran=True)
            self.findings += judge_prediction(learn.loss_func, learn.pred)
            self.findings += targets
            self.stage = "loss"
        else:
            self.findings += [Finding(f.mark, "validation", f"targets: {f.text}") for f in targets if f.mark == WRONG]
        if any(f.mark == WRONG for f in targets):  # on CUDA the loss could end the process's use of the device
            raise CancelFitException if learn.training else CancelValidException

    def after_loss(self) -> None:
        learn = self.learn
        if learn.training and learn.batch_size and learn.loss_grad is not None:
            unknown = arguments.unknown_count(learn) if learn._loss_weighting.unknown else ""
            self.findings += judge_loss(learn.loss_func, learn.pred, learn.loss_grad, unknown)
            self.stage = "gradients"

    def before_step(self) -> None:
        learn = self.learn
        self._look_at_gradients()
        # Copies on the host, so that the device's memory holds what it would without.
        self._before = [p.detach().to("cpu", copy=True) for _, p in self._named]
        self._moving = _should_move(self._named, learn.opts)

    def after_step(self) -> None:
        learn = self.learn
        if not self._before:  # it was cancelled
            return
        now = dict(self._named)
        stuck = [
            name
            for (name, _), before in zip(self._named, self._before, strict=True)
            if name in self._moving and torch.equal(now[name].detach().cpu(), before)
        ]
        self.findings += judge_optimizer(self._named, stuck, learn.opts)

    def after_cancel_step(self) -> None:
        if self.stage != "optimizer":  # it was cancelled before it came here
            self._look_at_gradients()
        self._before = []
        self.findings.append(Finding(HINT, "optimizer", "a callback cancelled the step, as a gradient scaler may"))
        self.findings += [f for f in judge_optimizer(self._named, [], self.learn.opts) if f.mark == WRONG]

    def _look_at_gradients(self) -> None:
        learn, self.stage = self.learn, "optimizer"
        self.findings += judge_gradients(self._named, _has_scaler(learn.cbs), _own_loop(learn))

    def after_batch(self) -> None:
        learn = self.learn
        if learn.training or not learn.batch_size or learn.loss is None:
            return
        value = float(learn.loss)
        mark = OK if math.isfinite(value) else WRONG
        wrong = "" if mark == OK else ", which is no finite number; look at the model in eval mode"
        self.findings.append(Finding(mark, "validation", f"loss {value:.4g}{wrong}"))
        self.stage = "metrics"
        self.findings += judge_metrics(learn)

    # Errors

    def failed(self, error: Exception, model: nn.Module) -> None:
        """Note the error of `model`, or of what is around it, that ended the check."""
        if isinstance(error, PeerError):
            self.findings.append(Finding(WRONG, "other ranks", _words(error)))
            return
        notes = getattr(error, "__notes__", [])
        raised = next((n for n in notes if n.startswith("raised in ") and not n.startswith(f"raised in {self!r}.")), "")
        text = [_words(error), *(n for n in notes if n.startswith("the loss got"))]
        if raised:
            text.append(raised)
        elif self._running_model:
            text += [_place(error.__traceback__, model), f"the model got {describe(self._xb)}"]
            if self.stage == "prediction":
                self.findings += judge_inputs(self._xb, model, ran=False)
        topic = "callbacks" if raised else self.stage
        self.findings.append(Finding(WRONG, topic, "; ".join(filter(None, text))))


# Judgements: plain functions of facts


def judge_inputs(xb: Any, model: nn.Module, ran: bool) -> list[Finding]:
    """Types, values and devices of a batch's inputs.

    Args:
        xb: the inputs.
        model: what they go into.
        ran: whether it could take them; a type that is odd is a problem only if not.
    """
    tensors = list(tensors_in(xb))
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    devices = {p.device for p in model.parameters()}
    found, into = [], " and ".join(sorted(_kind(k) for k in kinds))
    for t in tensors:
        if kinds and t.dtype == torch.uint8:
            text = f"{_about(t)}, into a model of {into}: make them x.float() / 255 in the dataset"
            found.append(Finding(HINT if ran else WRONG, "inputs", text))
        elif kinds and t.is_floating_point() and t.dtype not in kinds:
            text = f"{_about(t)}, into a model of {into}: convert them in the dataset, or the model"
            found.append(Finding(HINT if ran else WRONG, "inputs", text))
        elif _looks_like_pixels(t):
            found.append(Finding(HINT, "inputs", f"{_about(t)}: pixels of 0 .. 255? Scale them, x / 255"))
        if not _is_finite(t):
            found.append(Finding(WRONG, "inputs", f"{_about(t)}, of which {_not_finite(t)}: look into the dataset"))
        if devices and t.device not in devices:
            where = ", ".join(sorted(map(str, devices)))
            text = f"{_about(t)}, but the model is on {where}: leave both to the Learner, or move them there"
            found.append(Finding(WRONG, "inputs", text))
    return found or [Finding(OK, "inputs", _all_about(tensors) or describe(xb))]


def judge_targets(loss_func: Any, pred: Any, yb: tuple) -> list[Finding]:
    """Whether the loss can take these targets; to be asked before it is computed."""
    tensors = list(tensors_in(yb))
    wrong = [f"{_about(t)}, of which {_not_finite(t)}: look into the dataset" for t in tensors if not _is_finite(t)]
    if len(yb) == 1 and isinstance(yb[0], Tensor) and isinstance(pred, Tensor):
        if is_cross_entropy(loss_func):
            wrong += _wrong_classes(loss_func, pred, yb[0])
        elif is_one_of(loss_func, _BINARY):
            wrong += _wrong_chances(loss_func, pred, yb[0])
        elif is_one_of(loss_func, arguments.ELEMENTWISE):
            wrong += _wrong_values(loss_func, pred, yb[0])
    if wrong:
        return [Finding(WRONG, "targets", text) for text in wrong]
    about = _all_about(tensors) or ("none; the model makes its own loss" if loss_func is None else "none")
    return [Finding(OK, "targets", about)]


def _wrong_classes(loss_func: Any, pred: Tensor, target: Tensor) -> list[str]:
    about, dim = _about(target), min(1, pred.ndim - 1)
    classes = pred.shape[dim]
    if target.is_floating_point():
        if is_nll(loss_func) or target.shape != pred.shape:
            return [f"{about}: classes are int64; use .long() (probabilities have the shape of the prediction)"]
        return []
    if target.dtype not in (torch.int64, torch.uint8):  # torch takes these two
        return [f"{about}: classes are int64; use .long()"]
    wanted = (*pred.shape[:dim], *pred.shape[dim + 1 :])
    if tuple(target.shape) != wanted:
        squeeze = "; use .squeeze(1)" if target.ndim > 1 and target.shape[1] == 1 else ""
        return [f"{about}, but predictions of {tuple(pred.shape)} ask for targets of shape {wanted}{squeeze}"]
    counted = target[target != loss_option(loss_func, "ignore_index", -100)]
    if not target.numel():
        return []
    if not counted.numel():
        return [f"{about}: all of them are ignore_index, so that the loss is the mean of nothing"]
    low, high = int(counted.min()), int(counted.max())
    if low < 0 or high >= classes:
        from_one = "; if they count from 1, subtract 1" if low == 1 and high == classes else ""
        return [
            f"{about}: the loss takes classes 0 .. {classes - 1}, because dimension {dim} of the prediction "
            f"{tuple(pred.shape)} is {classes}; let the model have {high + 1} outputs, or mend the targets{from_one}"
        ]
    return []


def _wrong_chances(loss_func: Any, pred: Tensor, target: Tensor) -> list[str]:
    name, about, wrong = loss_name(loss_func), _about(target), []
    if not target.is_floating_point():
        wrong.append(f"{about}: {name} takes floats; use .float()")
    if target.shape != pred.shape:
        wrong.append(f"{about}, but {name} takes the shape of the prediction, {tuple(pred.shape)}; reshape one of them")
    if target.numel() and not (target.min() >= 0 and target.max() <= 1):
        wrong.append(f"{about}: {name} takes values from 0 to 1")
    logits = is_one_of(loss_func, (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits))
    if not logits and pred.numel() and not (pred.min() >= 0 and pred.max() <= 1):
        wrong.append(
            f"{name} takes predictions from 0 to 1 and got {_about(pred)}: use BCEWithLogitsLoss, or end the model "
            "with a sigmoid"
        )
    return wrong


def _wrong_values(loss_func: Any, pred: Tensor, target: Tensor) -> list[str]:
    wrong = []
    try:
        arguments.check_shapes(SimpleNamespace(loss_func=loss_func, pred=pred, yb=(target,)))
    except ValueError as e:
        wrong.append(str(e))
    if pred.is_floating_point() and not target.is_floating_point():
        wrong.append(f"{_about(target)}: {loss_name(loss_func)} compares floats; use .float()")
    return wrong


def judge_prediction(loss_func: Any, pred: Any) -> list[Finding]:
    """Values of the predictions, and whether they are what the loss means them to be."""
    if pred is None:
        return [Finding(OK, "prediction", "left on the GPUs where it was made")]
    tensors = list(tensors_in(pred))
    wrong = [f"{_about(t)}, of which {_not_finite(t)}: look into the model" for t in tensors if not _is_finite(t)]
    if wrong:
        return [Finding(WRONG, "prediction", text) for text in wrong]
    hint = ""
    if isinstance(pred, Tensor) and pred.is_floating_point() and pred.ndim > 1 and is_cross_entropy(loss_func):
        if pred.shape[1] == 1:
            hint = "one class alone, of which the loss is always 0; for two classes use BCEWithLogitsLoss"
        elif is_nll(loss_func) and not _sum_to_one(pred.exp()):
            hint = "no logarithms of probabilities: end the model with LogSoftmax(1), or use CrossEntropyLoss"
        elif not is_nll(loss_func) and _sum_to_one(pred):
            hint = "a softmax before CrossEntropyLoss? It takes raw scores and does that itself; leave the softmax out"
    if hint:
        return [Finding(HINT, "prediction", f"{_about(pred)}: {hint}")]
    return [Finding(OK, "prediction", _all_about(tensors) or describe(pred))]


def _sum_to_one(pred: Tensor) -> bool:
    sums = pred.float().sum(1)
    return bool((pred >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-2)


def judge_loss(loss_func: Any, pred: Any, loss: Tensor, unknown: str = "") -> list[Finding]:
    """The loss before any training; that of guessing among n classes is log(n).

    Args:
        loss_func, pred, loss: of the step.
        unknown: what is not known of the model's own loss, if anything.
    """
    value = float(loss.detach())
    if not math.isfinite(value):
        return [Finding(WRONG, "loss", f"{value}: no finite number; look at the predictions, the targets and the loss")]
    if unknown:
        return [Finding(HINT, "loss", f"{value:.4g}; for steps of several batches or ranks: {unknown}")]
    if is_cross_entropy(loss_func) and isinstance(pred, Tensor) and pred.ndim > 1 and pred.shape[1] > 1:
        guess = math.log(pred.shape[1])
        if loss_option(loss_func, "reduction", "mean") == "mean" and value > 4 * guess + 1:
            text = f"{value:.4g}, far above the {guess:.3g} of guessing: are inputs and first weights of a fit size?"
            return [Finding(HINT, "loss", text)]
        return [Finding(OK, "loss", f"{value:.4g} (guessing: {guess:.3g})")]
    return [Finding(OK, "loss", f"{value:.4g}")]


def judge_gradients(named: list[tuple[str, nn.Parameter]], scaled: bool, own_loop: bool) -> list[Finding]:
    """The gradients before the step.

    Args:
        named: the parameters.
        scaled: a gradient scaler takes part, whose first steps may overflow.
        own_loop: the learner has a backward pass or a step of its own, which may use and clear gradients by itself.
    """
    trained = [(name, p) for name, p in named if p.requires_grad]
    grads = [(name, p.grad) for name, p in trained if p.grad is not None]
    none = [name for name, p in trained if p.grad is None]
    broken = [name for name, g in grads if not _is_finite(g)]
    zero = [name for name, g in grads if not bool(_values(g).any())]
    found = []
    if none:
        text = f"{first_few(none)} got none: the loss does not depend on them; use them, or freeze them"
        found.append(Finding(HINT if own_loop else WRONG, "gradients", text))
    if broken:
        text = f"{first_few(broken)}: NaN or infinite" + (
            "; the first steps of a gradient scaler may be" if scaled else ""
        )
        found.append(Finding(HINT if scaled else WRONG, "gradients", text))
    if zero:
        mark = WRONG if len(zero) == len(grads) else HINT
        found.append(
            Finding(mark, "gradients", f"{first_few(zero)}: all zero, so that they do not learn from this batch")
        )
    frozen = len(named) - len(trained)
    counts = f"{len(grads)} of {len(trained)} trainable parameters" + (f", {frozen} frozen" if frozen else "")
    return found or [Finding(OK, "gradients", counts)]


def judge_optimizer(named: list[tuple[str, nn.Parameter]], stuck: list[str], opts: list) -> list[Finding]:
    """What the optimizer holds, and what it has moved.

    Args:
        named: the parameters.
        stuck: the names of those that should have changed in the step, and have not.
        opts: the optimizers.
    """
    held = _rates(opts)
    forgotten = [name for name, p in named if p.requires_grad and id(p) not in held]
    found = []
    if forgotten:
        text = f"{first_few(forgotten)}: trainable, but no optimizer holds them; let the splitter (or opt_func)"
        found.append(Finding(WRONG, "optimizer", f"{text} return them"))
    if stuck:
        text = f"{first_few(stuck)}: have gradients, and the step did not change them (lr {_rate_text(held)})"
        found.append(Finding(WRONG, "optimizer", text))
    names = ", ".join(type(opt).__name__ for opt in opts)
    return found or [Finding(OK, "optimizer", f"{names}, lr {_rate_text(held)}")]


def _rates(opts: list) -> dict[int, float]:
    """The learning rate by which each parameter, known by its id, is moved."""
    return {id(p): float(g.get("lr", 1.0)) for opt in opts for g in opt.param_groups for p in g["params"]}


def _rate_text(rates: dict[int, float]) -> str:
    return ", ".join(f"{rate:g}" for rate in sorted(set(rates.values()))) or "none"


def _should_move(named: list[tuple[str, nn.Parameter]], opts: list) -> list[str]:
    """The parameters that even the simplest optimizer would change, for all that rounding takes away."""
    rates, found = _rates(opts), []
    for name, p in named:
        if p.grad is None or id(p) not in rates or not p.numel() or not _is_finite(p.grad):
            continue
        step = float(_values(p.grad).abs().max()) * (rates[id(p)] or 1.0)
        if step > 2 * torch.finfo(p.dtype).eps * float(p.detach().abs().max()):
            found.append(name)
    return found


def judge_metrics(learn: "Learner") -> list[Finding]:
    """Each metric on the present batch; on this rank alone, so that one that fails keeps no other rank waiting."""
    try:
        meters = make_meters(copy.deepcopy(learn.metrics))
    except Exception as e:
        return [Finding(WRONG, "metrics", _words(e))]
    values, found = [], []
    for meter in meters:
        try:
            meter.reset()
            meter.update(learn._batch_index, learn.batch_size, learn.pred, learn.yb)
            values.append(f"{meter.name} {meter.result(sharded=False):.4g}")
        except Exception as e:
            got = f"predictions: {describe(learn.pred)}; targets: {describe(learn.yb)}"
            found.append(Finding(WRONG, "metrics", f"{meter.name}: {_words(e)}; it got {got}"))
    if values and not found:
        found.append(Finding(OK, "metrics", ", ".join(values)))
    return found


# Words and small questions

_BINARY = (nn.BCELoss, nn.BCEWithLogitsLoss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits)


def is_nll(loss_func: Any) -> bool:
    """Whether a loss takes logarithms of probabilities."""
    return is_one_of(loss_func, (nn.NLLLoss, F.nll_loss))


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _values(t: Tensor) -> Tensor:
    return t.detach().coalesce().values() if t.is_sparse else t.detach()


def _is_finite(t: Tensor) -> bool:
    values = _values(t)
    return not values.is_floating_point() or bool(values.isfinite().all())


def _not_finite(t: Tensor) -> str:
    return f"{int((~t.isfinite()).sum())} of {t.numel()} values are NaN or infinite"


def _looks_like_pixels(t: Tensor) -> bool:
    if not t.is_floating_point() or t.ndim < 3 or not t.numel():
        return False
    return bool(t.min() >= 0) and 128 < float(t.max()) <= 255


def _about(t: Tensor) -> str:
    """A tensor's type, shape, device and range."""
    text = f"{_kind(t.dtype)} {tuple(t.shape)} on {t.device}"
    seen = t.detach()
    if seen.is_floating_point():
        seen = seen[seen.isfinite()]
    if not seen.numel() or seen.is_complex():
        return text
    low, high = (x.item() for x in seen.aminmax())
    return f"{text}, values {low:.4g} .. {high:.4g}"


def _all_about(tensors: list[Tensor]) -> str:
    return "; ".join(map(_about, tensors))


def _words(error: Exception) -> str:
    """An error in a line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__


def _place(traceback: TracebackType | None, model: nn.Module) -> str:
    """The innermost sub-module in which an error arose."""
    names, found = {id(module): name for name, module in model.named_modules()}, ""
    while traceback is not None:
        module = traceback.tb_frame.f_locals.get("self")
        if names.get(id(module)):
            found = f"in {names[id(module)]} ({type(module).__name__})"
        traceback = traceback.tb_next
    return found


def _has_scaler(cbs: list[Callback]) -> bool:
    held = [value for cb in cbs for value in vars(cb).values()]
    return any(isinstance(x, torch.amp.GradScaler) and x.is_enabled() for x in held)


def _own_loop(learn: "Learner") -> bool:
    return any(seam.__module__ != "learnerkit.learner" for seam in (type(learn)._backward, type(learn)._step))
