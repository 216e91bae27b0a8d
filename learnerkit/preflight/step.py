"""A check of one training step and one validation step, before a long run."""

import copy
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from fastcore.basics import groupby
from torch import Tensor, nn

from learnerkit import arguments, distributed, losses, optim
from learnerkit.callback import Callback
from learnerkit.callbacks.debugging import ShortLoader
from learnerkit.callbacks.recorder import Evaluation, meters_of
from learnerkit.data.batches import likely_sizes
from learnerkit.data.order import refuse_iterator
from learnerkit.distributed import PeerError, seeds
from learnerkit.endings import ending_of
from learnerkit.events import CancelFitException, CancelValidException
from learnerkit.inspection.undoing import trial
from learnerkit.marks import collective, not_collective
from learnerkit.preflight.activations import judge_activations
from learnerkit.preflight.memory import bytes_of, judge_memory, judge_shards
from learnerkit.preflight.prediction import Seen
from learnerkit.preflight.report import HINT, WRONG, Finding, Report, doubtful, fine, notable, problem, unchecked
from learnerkit.shards import gathered
from learnerkit.state import Learner
from learnerkit.text import first_few, in_one_line
from learnerkit.utils import host_copy, overrides, owner_of, unwrap
from learnerkit.values import describe, map_batch, tensors_in


@collective
def check(learn: "Learner", memory: str | int | None = None) -> bool:
    """Do what `Learner.check` says. Every rank must reach this, and it waits for the device.

    The learner's callbacks take part, except those that are `only_fit`. In the report `ok` is fine, `??` a hint that
    may be intended, `!!` a problem, and `--` has not been checked.

    Raises:
        RuntimeError: called while something runs.
        TypeError, ValueError: another `memory` than `Learner.check` takes.
    """
    if learn.task is not None:
        raise RuntimeError(f"check was called during {learn.task!r}; call it before a fit")
    bytes_of(memory)
    step, sharded = StepCheck(memory), False
    try:
        arguments.check_fit(learn, n_epoch=1)
        for dl in learn.dls.loaders[:2]:
            refuse_iterator(dl)
        if learn.dls.valid is None:
            step.found["validation"].append(unchecked("there is no validation loader"))
        with learn.no_bar(), learn._trying("check", [step, step.first]) as train:
            sharded = learn.n_ranks > 1
            step.stage = "optimizer"
            train(n_epoch=1)
            step.stage = "memory"
            if step.seen is not None and not step.found["memory"]:
                step.found["memory"] += judge_memory(learn, step.seen, memory)
            step.stage = "activations"
            step.found[step.stage] += judge_activations(learn, step.seen)
    except Exception as e:
        step.failed(e, unwrap(learn.model))
    everyone = distributed.all_gather(step.found) if sharded else [step.found]  # every rank must reach this
    report = Report(shown=distributed.is_main())
    for topic, findings in of_all_ranks(everyone).items():
        report.add(topic, findings)
    return report.close()


TOPICS = (
    "inputs", "targets", "prediction", "loss", "gradients", "optimizer", "memory", "batchnorm", "activations",
    "validation", "metrics", "callbacks", "other ranks",
)  # fmt: skip
"""The topics, in the order of the report."""

Named = list[tuple[str, nn.Parameter]]
"""Parameters with their names."""

_ALWAYS = {*TOPICS[:6], "validation"}  # the topics that every check should reach
_NOT_REACHED = [unchecked("not reached")]


def of_all_ranks(everyone: Sequence[Mapping[str, list[Finding]]]) -> dict[str, list[Finding]]:
    """Merge the findings of all ranks by topic; a finding of only some ranks names them."""
    merged: dict[str, list[Finding]] = {}
    for topic in TOPICS:
        seen = ((finding, rank) for rank, found in enumerate(everyone) for finding in found.get(topic, []))
        ranks = groupby(seen, 0, 1)
        merged[topic] = [
            f._replace(text=f"{f.text} (rank {first_few(ranks[f])})")
            if f.mark in (HINT, WRONG) and len(ranks[f]) < len(everyone)
            else f
            for f in notable(ranks) or _NOT_REACHED * (topic in _ALWAYS)
        ]
    if any(f.mark == WRONG for topic in TOPICS[:-1] for f in merged[topic]):
        del merged["other ranks"]  # The others have only followed.
    elif merged["optimizer"] == _NOT_REACHED and not merged["other ranks"]:
        mark = WRONG if merged["loss"] == _NOT_REACHED else HINT  # some callbacks accumulate gradients by cancels
        text = "no step was taken: a callback, or the learner, has cancelled the batch or the training before it"
        merged["optimizer"] = [Finding(mark, text)]
    return merged


class OneBatch(ShortLoader):
    """The first batch of a loader as a whole epoch, so that accumulation takes its step."""

    def __len__(self) -> int:
        return 1


class StepCheck(Callback):
    """Looks at one training step and one validation step.

    Attributes:
        found: the findings by topic.
        stage: the topic of an error that is raised now.
        first: a callback that sees the gradients before others may drop them.
        rates: the learning rates before a schedule or a callback changes them, as `_rates` returns them.
        seen: the training batch of this rank, with its inputs and targets as the model has got them; `None` until then,
            and of a rank without data.
    """

    order = 1000  # after all others, to see what they have changed
    reads_predictions = True  # DataParallelCallback gathers them in training, too.

    @not_collective("it only hands on what every rank calls after a backward pass")
    def __init__(self, memory: str | int | None) -> None:
        self._memory = memory
        self.found: dict[str, list[Finding]] = defaultdict(list)
        self.stage = "inputs"
        self.first = Callback(order=-1000, before_fit=self._note_rates, after_backward=self._note_gradients)
        self.rates: dict[Tensor, float] = {}
        self._made: set[str] = set()  # names of the parameters that get gradients from the backward pass
        self._named: Named = []
        # The parameters that the step should change, each with its name and a copy.
        self._before: list[tuple[str, nn.Parameter, Tensor]] | None = None
        self._xb: Any = None
        self.seen: Seen | None = None
        self._running_model = False
        self._norm_hooks = ExitStack()

    # Events

    def before_train(self) -> None:
        learn = self.learn
        self._named = list(unwrap(learn.model).named_parameters())  # a sharded model has others than before the fit
        if lone := arguments.lone_last_batch(learn.dl, learn.model):
            hooks = arguments.watched_norms(learn, lambda: self.found.update(batchnorm=[problem(lone)]))
            self._norm_hooks.enter_context(hooks)
        learn.dl = OneBatch(learn.dl, 1)

    def cleanup_train(self) -> None:
        self._norm_hooks.close()

    def before_validate(self) -> None:
        self.stage = "validation"
        self.learn.dl = OneBatch(self.learn.dl, 1)

    def before_batch(self) -> None:
        learn, self._running_model = self.learn, True
        # A model that makes its loss gets the targets, too.
        makes_loss = learn.loss_func is None
        self._xb = tuple(x for x in learn.xb if not (makes_loss and any(x is y for y in learn.yb)))
        if learn.training:
            self.stage = "prediction"

    def after_pred(self) -> None:
        learn, self._running_model = self.learn, False
        if not learn.batch_size:  # a rank without data
            return
        targets = judge_targets(learn.loss_func, learn.pred, learn.yb)
        wrong = [finding for finding in targets if finding.mark == WRONG]
        if learn.training:
            self.seen = Seen(learn.batch, learn.xb, learn.yb)
            self.found["inputs"] += judge_inputs(self._xb, unwrap(learn.model), ran=True)
            self.found["prediction"] += judge_prediction(learn.loss_func, learn.pred)
            self.found["targets"] += targets
            # What torch's own losses refuse is what they get; the predictions were judged.
            self.stage = "targets" if learn.loss_func is not None and losses.is_of_torch(learn.loss_func) else "loss"
        else:
            self.found["validation"] += [f._replace(text=f"targets: {f.text}") for f in wrong]
        if wrong:  # On CUDA, computing the loss could make the device unusable for this process.
            raise CancelFitException if learn.training else CancelValidException

    def after_loss(self) -> None:
        learn = self.learn
        if learn.training and learn.batch_size and learn.loss_grad is not None:
            self.found["loss"] += judge_loss(learn.loss_func, learn.pred, learn.loss_grad, judge_count(learn))
            self.stage = "gradients"

    def _note_rates(self, first: Callback) -> None:
        self.rates, self.stage = _rates(first.learn.opts, "initial_lr"), "inputs"

    @collective
    def _note_gradients(self, first: Callback) -> None:
        self._made = {name for name, p in self._named if p.grad is not None and _values(p.grad).any()}

    @collective
    def before_step(self) -> None:
        self._judge_gradients()
        # Copies on the host, so that the device's memory holds what it would without.
        moving = _should_move(self._named, self.learn.opts, self.rates)
        self._before = [(name, p, host_copy(gathered(p.detach()))) for name, p in moving]

    @collective
    def after_step(self) -> None:
        if self._before is not None:  # the step was not cancelled
            stuck = [name for name, p, before in self._before if torch.equal(gathered(p.detach()).cpu(), before)]
            self.found["optimizer"] += judge_optimizer(self._named, stuck, self.learn.opts, self.learn.loss_func)
        self.found["memory"] += judge_shards(self.learn, self._memory)

    @collective
    def after_cancel_step(self) -> None:
        if self.stage != "optimizer":  # cancelled before this callback's before_step
            self._judge_gradients()
        self._before = None
        self.found["optimizer"] += [
            doubtful("a callback cancelled the step, as a gradient scaler may"),
            *(f for f in judge_optimizer(self._named, [], self.learn.opts, None) if f.mark == WRONG),
        ]

    @collective
    def _judge_gradients(self) -> None:
        learn, self.stage = self.learn, "optimizer"
        held = [value for cb in learn.cbs for value in vars(cb).values()]
        scaled = any(isinstance(x, torch.amp.GradScaler) and x.is_enabled() for x in held)
        own_loop = overrides(learn, "_backward", "_step")
        self.found["gradients"] += judge_gradients(self._named, scaled, own_loop, self._made)

    def after_batch(self) -> None:
        learn = self.learn
        absent = learn._loss_weighting.absent
        if learn.training or not learn.batch_size or (learn.loss is None and not absent):
            return
        if absent:
            finding = fine("no loss, as the model makes its own in training alone")
        elif math.isfinite(value := float(learn.loss)):
            finding = fine(f"loss {value:.4g}")
        else:
            finding = problem(f"loss {value}, which is not a finite number", "look at the model in eval mode")
        self.found["validation"].append(finding)
        self.stage = "metrics"
        self.found["metrics"] += judge_metrics(learn)

    # Errors

    def failed(self, error: Exception, model: nn.Module) -> None:
        """Note the error that ended the check, raised by `model`, a callback or the loop around them."""
        if isinstance(error, PeerError):
            self.found["other ranks"].append(problem(in_one_line(error)))
            return
        text = [in_one_line(error), *(note.replace("\n", "; ") for note in getattr(error, "__notes__", []))]
        if ending_of(error).callback not in ("", repr(self)):
            self.stage = "callbacks"
        elif self._running_model and self.stage == "prediction":
            self.found["inputs"] += judge_inputs(self._xb, model, ran=False)
        self.found[self.stage].append(problem("; ".join(filter(None, text))))


# Judgements: functions of facts


def judge_inputs(xb: Any, model: nn.Module, ran: bool) -> list[Finding]:
    """Judge types, values and devices of inputs; an unusual type is a problem unless the model `ran` on it."""
    tensors = list(tensors_in(xb))
    types = {p.dtype for p in model.parameters() if p.is_floating_point()}
    devices = {p.device for p in model.parameters()}
    findings, into = [], f"into a model of {' and '.join(sorted(map(_type_name, types)))}"
    for t in tensors:
        raw = t.dtype == torch.uint8
        if types and (raw or (t.is_floating_point() and t.dtype not in types)):
            how = "make them x.float() / 255 in the dataset" if raw else "convert them in the dataset, or the model"
            findings.append(Finding(HINT if ran else WRONG, f"{_about(t)}, {into}", how))
        elif _looks_like_pixels(t):
            findings.append(doubtful(f"{_about(t)}: pixels of 0 .. 255?", "scale them, x / 255"))
        if devices and t.device not in devices:
            where = ", ".join(sorted(map(str, devices)))
            advice = "leave both to the Learner, or move them there"
            findings.append(problem(f"{_about(t)}, but the model is on {where}", advice))
    findings += _not_finite(tensors, "the dataset")
    if losses.is_constant(xb):
        findings.append(doubtful(f"{_all_about(tensors)}: all values are the same", "look into the dataset"))
    return findings or [fine(_all_about(tensors) or describe(xb))]


def judge_targets(loss_func: Any, pred: Any, yb: tuple) -> list[Finding]:
    """Judge the values of the targets, before the loss is computed: a GPU may be unusable after wrong ones.

    Wrong types and shapes are errors of the loss itself, with a note that explains them.
    """
    tensors = list(tensors_in(yb))
    findings = [*_not_finite(tensors, "the dataset")]
    if len(yb) == 1 and isinstance(yb[0], Tensor) and isinstance(pred, Tensor):
        findings += _judge_values(loss_func, pred, yb[0])
    about = _all_about(tensors) or ("none; the model makes its own loss" if loss_func is None else "none")
    return findings or [fine(about)]


def _judge_values(loss_func: Any, pred: Tensor, target: Tensor) -> Iterator[Finding]:
    name, about = losses.loss_name(loss_func), _about(target)
    if pred.is_complex() or target.is_complex():
        return  # The loss has its own words for these.
    if losses.is_cross_entropy(loss_func) and pred.ndim and not target.is_floating_point():
        target = losses.class_numbers(target)
        is_mean = losses.loss_option(loss_func, "reduction", "mean") == "mean"
        if is_mean and target.numel() and (target == losses.loss_option(loss_func, "ignore_index", -100)).all():
            yield problem(f"{about}: all of them are ignore_index, so that the loss is the mean of nothing")
        text, advice = losses.out_of_range(loss_func, pred, target)
        if text:
            yield problem(f"{about}: {text}", advice)
    elif losses.is_one_of(loss_func, (*losses.BINARY_LOGITS, *losses.BINARY_SHARES)):
        if not _are_shares(target):
            yield problem(f"{about}: {name} takes values from 0 to 1")
        if losses.is_one_of(loss_func, losses.BINARY_SHARES) and not _are_shares(pred):
            text = f"{name} takes predictions from 0 to 1 and got {_about(pred)}"
            yield problem(text, "use BCEWithLogitsLoss, or end the model with a sigmoid")
    elif target.is_floating_point() or not pred.is_floating_point():
        return
    elif losses.is_one_of(loss_func, losses.ELEMENTWISE):
        yield problem(f"{about}: {name} compares floats", "use .float()")


def _are_shares(t: Tensor) -> bool:
    return bool(((t >= 0) & (t <= 1)).all())


def judge_prediction(loss_func: Any, pred: Any) -> list[Finding]:
    """Judge the values of the predictions: whether they are what the loss expects."""
    if pred is None:
        return [fine("none: the model returned its loss alone, or they stay on the GPUs where they were made")]
    tensors = list(tensors_in(pred))
    if found := [*_not_finite(tensors, "the model")]:
        return found
    hint, advice = losses.repeated(loss_func, pred)
    scores = isinstance(pred, Tensor) and pred.is_floating_point() and pred.ndim > 1
    if not hint and scores and losses.is_cross_entropy(loss_func):
        if pred.shape[1] == 1:
            hint, advice = "a single class, whose loss is always 0", "for two classes use BCEWithLogitsLoss"
        elif losses.is_one_of(loss_func, losses.NLL):
            if not losses.sum_to_one(pred.exp()):
                hint = "not logarithms of probabilities"
                advice = "end the model with LogSoftmax(1), or use CrossEntropyLoss"
        elif losses.sum_to_one(pred):
            hint = "a softmax before CrossEntropyLoss? It takes raw scores and does that itself"
            advice = "leave the softmax out"
    if hint:
        return [doubtful(f"{_about(pred)}: {hint}", advice)]
    return [fine(_all_about(tensors) or describe(pred))]


def judge_loss(loss_func: Any, pred: Any, loss: Tensor, doubt: str) -> list[Finding]:
    """Judge the loss before any training, where guessing among n classes gives log(n).

    `doubt` says what is wrong with the count of a model's own loss, or not known of it, if anything.
    """
    value = float(loss.detach())
    if not math.isfinite(value):
        return [problem(f"{value}: not a finite number", "look at the predictions, the targets and the loss")]
    if doubt:
        return [doubtful(f"{value:.4g}; {doubt}")]
    if not (losses.is_cross_entropy(loss_func) and isinstance(pred, Tensor) and pred.ndim > 1 and pred.shape[1] > 1):
        return [fine(f"{value:.4g}")]
    guess = math.log(pred.shape[1])
    if losses.loss_option(loss_func, "reduction", "mean") == "mean" and value > 4 * guess + 1:
        text = f"{value:.4g}, far above the {guess:.3g} of guessing"
        return [doubtful(text, "are inputs and first weights of a suitable size?")]
    return [fine(f"{value:.4g} (guessing: {guess:.3g})")]


def judge_count(learn: "Learner") -> str:
    """Say what is wrong with the count of a model's own loss, or with the user's.

    Two uneven parts of the batch must combine to the whole: as sums, or as means of what they count. If they cannot be
    compared, as those of a loss that draws random numbers, say what is not known of the count; '' if all is well. The
    learner stays as it is.
    """
    if learn._loss_weighting.own is None and learn.loss_weight is None:
        return ""
    batch = (learn.xb, learn.yb)
    size = learn.batch_size
    results, states = list[tuple[float, float]](), list[list[Tensor]]()
    with trial(learn, unwrap(learn.model)), torch.no_grad(), suppress(Exception):  # it may be unable to run on a part
        learn.model.eval()
        for rows in (slice(size), slice(size // 3), slice(size // 3, size)):
            states.append([torch.get_rng_state(), *seeds.device_states(learn.dls.device)])
            learn.xb, learn.yb = map_batch(partial(_rows, rows, size), batch)
            (learn.batch_size,) = likely_sizes([*learn.xb, *learn.yb])
            learn._forward()
            learn._loss()
            results.append((float(learn.loss), 1.0 if losses.loss_sums(learn) else float(losses.batch_count(learn))))
    comparable = len(results) == 3 and all(map(torch.equal, states[0], states[-1]))
    if not comparable or not all(math.isfinite(value) and count for value, count in results):
        return losses.doubtful_count(learn)
    (whole, count), *parts = results
    joined = sum(value * n for value, n in parts) / count
    half = learn.loss_grad.dtype.itemsize < 4 or torch.is_autocast_enabled(learn.dls.device.type)
    if math.isclose(joined, whole, rel_tol=1e-2 if half else 1e-4):
        return ""
    return (
        f"in eval mode, two parts of the batch, weighed by the {parts[0][1]:g} and {parts[1][1]:g} that they count, "
        f"make {joined:.4g}, and the whole makes {whole:.4g}. For steps of several batches or ranks, say by "
        "loss_weight= what it averages over, a function of the targets"
    )


def _rows(rows: slice, size: int, t: Tensor) -> Tensor:
    return t[rows] if t.ndim and len(t) == size else t


@collective
def judge_gradients(named: Named, scaled: bool, own_loop: bool, made: Collection[str]) -> list[Finding]:
    """Judge the gradients before the step.

    Args:
        named: the parameters.
        scaled: a gradient scaler takes part, whose first steps may overflow.
        own_loop: the learner has its own backward pass or step, which may use and clear gradients.
        made: names of those that had gradients after the backward pass, before callbacks could drop them.
    """
    trained = [(name, p) for name, p in named if p.requires_grad]
    grads = {name: p.grad for name, p in trained if p.grad is not None}
    all_zero = [name for name, g in grads.items() if g.numel() and not _values(g).any()]
    dropped = [name for name, _ in trained if name in made and (name in all_zero or name not in grads)]
    none = [name for name, _ in trained if name not in made and name not in grads]
    zero = [name for name in all_zero if name not in made]
    broken = [name for name, g in grads.items() if not _is_finite(g)]
    findings = []
    if dropped:
        text = f"{first_few(dropped)}: a callback has dropped theirs, so that this step does not train them"
        findings.append(doubtful(text))
    if none:
        text = f"{first_few(none)} got none: the loss does not depend on them"
        advice = "use them, or freeze them"
        advice = f"right if a pass of your own trains them; else {advice}" if own_loop else advice
        findings.append(Finding(HINT if own_loop else WRONG, text, advice))
    if broken:
        text = f"{first_few(broken)}: NaN or infinite{', as the first steps of a gradient scaler may be' * scaled}"
        findings.append(Finding(HINT if scaled else WRONG, text))
    if zero:
        text = f"{first_few(zero)}: all zero, so that they do not learn from this batch"
        findings.append(Finding(WRONG if len(zero) == len(grads) else HINT, text))
    frozen = len(named) - len(trained)
    counts = f"{len(grads)} of {len(trained)} trainable parameters" + (f", {frozen} frozen" if frozen else "")
    return findings or [fine(counts)]


def judge_optimizer(named: Named, stuck: list[str], opts: list, loss_func: Any) -> list[Finding]:
    """Judge which of the `named` parameters, and of the loss's, the optimizers hold.

    Args:
        named: the model's parameters.
        stuck: the names of those that should have changed in the step.
        opts: the optimizers.
        loss_func: the loss.
    """
    rates = _rates(opts)
    forgotten = [name for name, p in named if p.requires_grad and p not in rates]
    shown = optim.rates_text([float(g.get("lr", 1.0)) for opt in opts for g in opt.param_groups]) or "none"
    findings = []
    if forgotten:
        text = f"{first_few(forgotten)}: trainable, but no optimizer holds them"
        findings.append(problem(text, "let the splitter (or opt_func) return them"))
    loss, known = owner_of(loss_func), {p for _, p in named}
    of_loss = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    if alone := [name for name, p in of_loss if p.requires_grad and p not in rates and p not in known]:
        text = f"{first_few(alone)} of the loss: trainable, but no optimizer holds them"
        findings.append(doubtful(text, "let the splitter return them, too, if they are to be trained"))
    if stuck:
        findings.append(problem(f"{first_few(stuck)}: have gradients, and the step did not change them (lr {shown})"))
    names = ", ".join(type(opt).__name__ for opt in opts)
    return findings or [fine(f"{names}, lr {shown}{optim.decays_text(opts)}")]


def _rates(opts: list, name: str = "lr") -> dict[Tensor, float]:
    """Return the learning rate of each parameter; `name` is its entry in a group, if the group has it."""
    return {p: float(g.get(name, g.get("lr", 1.0))) for opt in opts for g in opt.param_groups for p in g["params"]}


@collective
def _should_move(named: Named, opts: list, before: Mapping[Tensor, float]) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the parameters that even the simplest optimizer would change by more than rounding hides.

    Parameters whose rate a schedule has set to 0, as a warm-up may, are left out; `before` has the earlier rates.
    """
    rates = _rates(opts)
    for name, p in named:
        if p.grad is None or p not in rates or not (grad := _values(p.grad)).numel() or not _is_finite(p.grad):
            continue
        if not rates[p] and before.get(p):
            continue
        step = float(grad.abs().max()) * (rates[p] or 1.0)
        if step > 2 * torch.finfo(p.dtype).eps * float(_values(p).abs().max()):
            yield name, p


@not_collective("`sharded=False` asks no other rank")
def judge_metrics(learn: "Learner") -> list[Finding]:
    """Compute each metric on the present batch as a fit does, on this rank alone: no other waits for one that fails."""
    try:
        metrics = copy.deepcopy(learn.metrics)
    except Exception as e:  # A fit may need no copies.
        return [unchecked(f"not checked, as they cannot be copied: {in_one_line(e)}")]
    try:
        meters = meters_of(metrics, learn)
    except Exception as e:
        return [problem(in_one_line(e))]
    values, findings = [], []
    for meter in meters:
        try:
            alone = Evaluation([meter], learn)
            alone.sharded = False
            alone.update(learn)
            values += [f"{name} {value:.4g}" for name, value in zip(meter.columns, alone.metrics(), strict=True)]
        except Exception as e:
            got = f"predictions: {describe(learn.pred)}; targets: {describe(learn.yb)}"
            findings.append(problem(f"{meter.name}: {in_one_line(e)}; it got {got}"))
    return findings or [fine(", ".join(values))] * bool(values)


# Tensors and losses, in words


def _type_name(dtype: torch.dtype | torch.layout) -> str:
    return str(dtype).removeprefix("torch.")


@collective
def _values(t: Tensor) -> Tensor:
    """Return the numbers that a tensor stores; of a shard those of all ranks, and every rank must reach this."""
    t = gathered(t.detach())
    if t.layout is torch.strided:
        return t
    return t.coalesce().values() if t.is_sparse else t.values()


@collective
def _is_finite(t: Tensor) -> bool:
    values = _values(t)
    return not values.is_floating_point() or bool(values.isfinite().all())


@not_collective("batches and predictions are no shards")
def _not_finite(tensors: list[Tensor], source: str) -> Iterator[Finding]:
    """Return a problem for each tensor with values that are not finite, which come from `source`."""
    for t in tensors:
        if not _is_finite(t):
            n = int((~_values(t).isfinite()).sum())
            yield problem(f"{_about(t)}; {n} of {t.numel()} values are NaN or infinite", f"look into {source}")


def _looks_like_pixels(t: Tensor) -> bool:
    if not t.is_floating_point() or t.ndim < 3 or not t.numel() or t.layout is not torch.strided:
        return False
    return bool(t.min() >= 0) and 128 < float(t.max()) <= 255


_UNORDERED = (torch.uint16, torch.uint32, torch.uint64)
"""The types of which torch does not compute a minimum."""


@not_collective("what it is asked about is no shard")
def _about(t: Tensor) -> str:
    """Return a tensor's type, shape, device and range."""
    sparse = "" if t.layout is torch.strided else f" {_type_name(t.layout)}"
    text = f"{_type_name(t.dtype)}{sparse} {tuple(t.shape)} on {t.device}"
    seen = _values(t)
    if seen.is_floating_point():
        seen = seen[seen.isfinite()]
    elif seen.dtype in _UNORDERED:
        seen = seen.float()
    if not seen.numel() or seen.is_complex():
        return text
    low, high = (x.item() for x in seen.aminmax())
    return f"{text}, values {low:.4g} .. {high:.4g}"


def _all_about(tensors: list[Tensor]) -> str:
    return first_few(map(_about, tensors), "; ")
