"""The samples of an optimizer step, and the learning rate that goes with them."""

from collections.abc import Callable
from math import sqrt
from typing import Any, NamedTuple

from torch.optim import SGD, Optimizer, RMSprop
from torch.utils.data import IterableDataset

from learnerkit import arguments, distributed, optim
from learnerkit.callback import running
from learnerkit.callbacks.accumulation import GradientAccumulation
from learnerkit.data.batches import loader_len
from learnerkit.data.loaders import DataLoaders
from learnerkit.data.order import samplers_of
from learnerkit.parallel.distributed import member_of
from learnerkit.state import Learner
from learnerkit.text import counted, did_you_mean, first_few
from learnerkit.utils import listify

RULES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": sqrt}
"""The factor of the rate as a function of the factor of the batch size, by rule."""


# What a step sees


class Step(NamedTuple):
    """The batch of one optimizer step.

    Attributes:
        samples: the samples of a full step, over all ranks and batches; `None` if the loader does not tell.
        parts: a text that says how they add up, such as '64 x 2 processes x 4 batches'.
        combined: whether the step has more than one batch of one process.
    """

    samples: int | None
    parts: str
    combined: bool

    def __str__(self) -> str:
        if self.samples is None:
            return f"{self.parts} a step; the training loader does not tell how many samples they have"
        return f"{f'{self.parts} = ' if self.combined else ''}{counted(self.samples, 'sample')} a step"


def step_of(learn: "Learner", cbs: Any = None) -> Step:
    """Return the batch of an optimizer step of `learn`, fitted with these callbacks, too. Needs no communication."""
    cbs = [*learn.cbs, *listify(cbs)]
    ranks, split, has_parts = ranks_of(learn, cbs)
    group = next(iter(running(cbs, GradientAccumulation)), None)
    batches, least = (1, None) if group is None else (group.n_batches or 1, group.n_samples)
    size, taken = batch_samples(learn.dls), 1 if split else ranks
    if size is None and least is None:
        return Step(None, f"{batches * taken} batches", batches * taken > 1)
    if size is None:
        return Step(least, "batches of unknown size", True)
    batches = batches if least is None else -(-least // (size * taken))
    samples, epoch = size * taken * batches, None if has_parts else _epoch_samples(learn.dls.train, size)
    text = f"{size}"
    if split:
        text += f" (cut for {ranks} processes)"
    elif ranks > 1:
        text += f" x {ranks} processes"
    text += f" x {batches} batches" if batches > 1 else ""
    if epoch is not None and epoch < samples:
        text, samples = f"{text}, but no more than an epoch has", epoch
    return Step(samples, text, ranks > 1 or batches > 1)


def ranks_of(learn: "Learner", cbs: list) -> tuple[int, bool, bool]:
    """Return how many ranks train together, whether they cut batches, and whether each has separate data."""
    if (workers := learn._workers) is not None:  # A notebook has workers.
        options = workers.options
        return workers.nproc, options.get("split_batches", False), options.get("sharded", False)
    member = member_of(cbs)
    if member is None or distributed.world_size() == 1:
        return 1, False, False
    return distributed.world_size(), member.split_batches, member.dataset_is_sharded


def batch_samples(dls: DataLoaders) -> int | None:
    """Return the samples in a full batch of the training loader; `None` if it does not tell without being read."""
    dl: Any = dls.train
    if isinstance(dl, list | tuple) and dl:  # It is a list of batches.
        return dls.count(dl[0])
    places = (dl, *samplers_of(dl)[:1])  # a loader without a size has a sampler that gives whole batches
    sizes = [getattr(place, "batch_size", None) for place in places]
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)


def _epoch_samples(dl: Any, size: int) -> int | None:
    """Return the samples that one process reads in an epoch, at most; `None` if it is not known."""
    samplers = samplers_of(dl)
    source = samplers[1] if len(samplers) > 1 else None
    if isinstance(getattr(dl, "dataset", None), IterableDataset):
        source = dl.dataset
    drawn = loader_len(source)
    batches = loader_len(dl)
    known = [count for count in (drawn, None if batches is None else batches * size) if count is not None]
    return min(known, default=None)


def say_held(learn: "Learner") -> None:
    """Say for which steps the rates of `lr_find` hold."""
    step = step_of(learn)
    if step.samples is not None:
        parts = f", {step.parts}" if step.combined else ""
        n = step.samples
        learn.say(
            f"these rates hold at {counted(n, 'sample')} a step{parts}; elsewhere train with scaled_lr(rate, at={n})"
        )


# The rate that goes with it


class ScaledLR(optim.Later):
    """A learning rate, or a schedule of it, that is scaled to the batch when a fit begins; `scaled_lr` makes it."""

    def __init__(self, lr: Any, at: int, rule: str | None, then: tuple[Callable[[Any], Any], ...] = ()) -> None:
        self.lr = lr
        self.at = at
        self.rule = rule
        self.then = then
        self.is_schedule = callable(lr) or bool(then)

    def __repr__(self) -> str:
        rule = "" if self.rule is None else f", rule={self.rule!r}"
        return f"scaled_lr({self.lr!r}, at={self.at}{rule})"

    def __truediv__(self, by: float) -> "ScaledLR":
        return ScaledLR(self.lr / by, self.at, self.rule, self.then)

    def into(self, function: Callable[[Any], Any]) -> "ScaledLR":
        """Apply a function to the rate when it is known, as `Later.into` does."""
        function(self.lr)  # It refuses now what it would refuse when a fit begins.
        return ScaledLR(self.lr, self.at, self.rule, (*self.then, function))

    def settled(self, learn: "Learner", rates: list[Any], cbs: Any) -> list[Any]:
        """Return the rates scaled to this fit's batch, as `Later.settled` does, and print them."""
        step = step_of(learn, cbs)
        if step.samples is None:
            raise ValueError(
                f"scaled_lr needs to know how many samples a step has, and the training loader "
                f"({type(learn.dls.train).__name__}) does not tell how many are in a batch: give it, or its batch "
                "sampler, an attribute `batch_size`"
            )
        return [_for_optimizer(learn, value, opt, step.samples) for opt, value in zip(learn.opts, rates, strict=True)]

    def scaled(self, factor: float) -> Any:
        """Return the rate or schedule that is `factor` times as large."""
        lr = self.lr
        value = (lambda position: factor * lr(position)) if callable(lr) else factor * lr
        for function in self.then:
            value = function(value)
        return value


def scaled_lr(lr: Any, at: int, rule: str | None = None) -> Any:
    """Return a learning rate that is right at one batch size, scaled to that of the fit when it begins.

    The batch size is what an optimizer step sees: the samples of all ranks and of all accumulated batches
    (`Learner.effective_batch_size`). The fit says which rate it became. Goes wherever a rate goes:
    `learn.fit_one_cycle(5, scaled_lr(1e-3, at=64))`; with a warm-up, which large batches need with SGD,
    `learn.fit(5, linear_warmup(0.1, scaled_lr(0.1, at=64)))`.

    Both rules hold up to about the gradient noise scale (`GradientNoiseScale` measures it); beyond that a larger rate
    no longer makes up for fewer steps.

    Args:
        lr: a rate, or a schedule of it; a slice, a list or a dict of these gives one with each of them scaled.
        at: the samples of a step at which it is right, 1 or more.
        rule: 'linear', the rate grows with the batch (Goyal et al. 2017, https://arxiv.org/abs/1706.02677); 'sqrt',
            with its square root (Malladi et al. 2022, https://arxiv.org/abs/2205.10287; betas and eps, which they
            change too, stay as they are). `None`: 'linear' for SGD, 'sqrt' for RMSprop and what has `betas`, as Adam.

    Raises:
        TypeError: not a rate.
        ValueError: `at` below 1, or another rule; when a fit begins, a loader that does not tell the size of its
            batches, or an optimizer without a rule.
    """
    arguments.check_count("at", at, "the samples of a step at which the rate is right")
    if rule not in (None, *RULES):
        raise ValueError(
            f"got rule={rule!r}; it takes 'linear', 'sqrt', or None for the optimizer's own"
            f"{did_you_mean(str(rule), RULES)}"
        )

    def scale(lr: Any) -> ScaledLR:
        if isinstance(lr, optim.Later):
            raise TypeError(f"got {lr!r} as a rate to be scaled; it is scaled already")
        return ScaledLR(lr if callable(lr) else optim.rates(lr, 1)[0], at, rule)

    return optim.map_rates(scale, lr)


def _for_optimizer(learn: "Learner", value: Any, opt: Optimizer, samples: int) -> Any:
    rules: dict[tuple[int, str], list[ScaledLR]] = {}

    def scale(rate: Any) -> Any:
        if not isinstance(rate, ScaledLR):
            return rate
        rule = _rule(rate, opt)
        rules.setdefault((rate.at, rule), []).append(rate)
        return rate.scaled(RULES[rule](samples / rate.at))

    scaled = optim.map_rates(scale, value)
    for (at, rule), rates in rules.items() if learn.task in (None, "fit") else ():
        factor, before = RULES[rule](samples / at), [rate.lr for rate in rates]
        after = [f"{lr * factor:.3g}" for lr in before if not callable(lr)]
        learn.say(
            f"learning rate{'s' * (len(before) > 1)} {first_few(before)} x {factor:.3g}"
            f"{' = ' if after else ''}{first_few(after)}: {counted(samples, 'sample')} a step, rather than {at} "
            f"({rule} rule, {type(opt).__name__})"
        )
    return scaled


def _rule(rate: ScaledLR, opt: Optimizer) -> str:
    if (rule := rate.rule or rule_of(opt)) is not None:
        return rule
    raise ValueError(
        f"{rate!r} has no rule for {type(opt).__name__}: by itself it is 'linear' for SGD, and 'sqrt' for RMSprop and "
        "optimizers with betas, as Adam. Say which: scaled_lr(..., rule='linear') or rule='sqrt'"
    )


def rule_of(opt: Optimizer) -> str | None:
    """Return the rule by which the rates of an optimizer grow with the batch; `None` if none is known."""
    if isinstance(opt, SGD):
        return "linear"
    return "sqrt" if isinstance(opt, RMSprop) or all("betas" in group for group in opt.param_groups) else None


def plain_rates(learn: "Learner") -> list[tuple[float, Callable[[float], float]]] | None:
    """Return the rate of each group of the optimizer, and its factor as a function of the factor of the batch size.

    `None` if it is not one optimizer with a rule, or if its rates are scaled by themselves.
    """
    opts = learn.opts
    rule = rule_of(opts[0]) if len(opts) == 1 else None
    if rule is None or any(isinstance(each, optim.Later) for each in optim.leaves(learn.lr)):
        return None
    return [(float(group["lr"]), RULES[rule]) for group in opts[0].param_groups]
