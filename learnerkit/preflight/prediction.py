"""The memory that a training step needs, predicted from steps on fake tensors, which have shapes and no values."""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from learnerkit import distributed
from learnerkit.callback import Callback
from learnerkit.callbacks.precision import MODES, MixedPrecision, predictions_in_float32
from learnerkit.callbacks.recomputing import ActivationCheckpointing
from learnerkit.data.batches import to_device
from learnerkit.data.cuts import map_rows
from learnerkit.data.order import first_batch, keep_seeds
from learnerkit.inspection.undoing import held_tensors, state_tensors, unchanged
from learnerkit.losses import new_weighting
from learnerkit.parallel import DataParallelCallback, will_shard
from learnerkit.state import Learner
from learnerkit.text import in_one_line
from learnerkit.torch_internals import AllocatedBytes, LiveBytes, fake_mode, hook_tables, uncompiled
from learnerkit.utils import itself, overrides, own_loss_arguments, replaced, spanned_devices, training_modes, unwrap
from learnerkit.values import TensorFunction, describe, map_batch, n_bytes

MARGIN = 0.08
"""The share of the memory that is left for what is not seen: blocks between tensors, and what kernels take."""

_KEEPERS = ("gradient_accumulation", "split_batch")
"""Names of the callbacks with which gradients are alive during the forward pass."""

_MANY = 10**9

_SEAMS = {"_forward", "_loss", "_backward", "_step", "_zero_grad"}


class Seen(NamedTuple):
    """A batch as the model gets it, after callbacks have changed it.

    Attributes:
        batch: as the loader gave it.
        xb, yb: inputs and targets.
    """

    batch: Any
    xb: tuple
    yb: tuple


class Prediction(NamedTuple):
    """The memory that a training step needs, in bytes of live tensors.

    Attributes:
        parameters, gradients, optimizer: bytes of each.
        per_sample: bytes that each further sample adds to a large batch.
        base: bytes of a step on a large batch that do not depend on the number of samples.
        peak: the most bytes alive at a time in a step on the batch.
        batch_size: the number of samples of the batch.
        lines: (base, per_sample) of several lines over the batch size, of each part of a step, whose maximum is the
            peak; the last is that of large batches.
    """

    parameters: int
    gradients: int
    optimizer: int
    per_sample: float
    base: float
    peak: int
    batch_size: int
    lines: tuple[tuple[float, float], ...]

    def with_more(self, size: int) -> "Prediction":
        """Return the prediction with `size` bytes added for every batch size."""
        lines = tuple((base + size, slope) for base, slope in self.lines)
        return self._replace(base=self.base + size, peak=self.peak + size, lines=lines)

    def at(self, n: int) -> int:
        """Return the peak of a batch of `n` samples, in bytes."""
        return self.peak if n == self.batch_size else round(max(base + slope * n for base, slope in self.lines))

    def largest(self, memory: float) -> int:
        """Return how many samples fit into so many bytes, of which the margin is left free; 0 if none does."""
        room = memory * (1 - MARGIN)
        fits = [(room - base) / slope if slope > 0 else _MANY * (room >= base) for base, slope in self.lines]
        return max(0, int(min(*fits, _MANY)))

    def fits(self, memory: float, n: int) -> bool:
        """Tell whether a batch of `n` samples fits into so many bytes, with the margin."""
        return self.at(n) <= memory * (1 - MARGIN)


def predict_memory(
    learn: "Learner", seen: Seen | None = None, cbs: Sequence[Callback] = (), on: "Sequence[Trial] | None" = None
) -> Prediction | str:
    """Predict what a training step of this process needs of the memory. It communicates with no other rank.

    Steps are taken on a copy of model, loss and optimizer that has fake tensors. Where their code cannot do with these,
    a few are taken on themselves, and what they change is put back.

    Args:
        learn: the learner.
        seen: the batch; `None`: the learner's own while something runs, else the first one of training.
        cbs: callbacks that are to take part beside the learner's.
        on: `[fake_steps]`: without steps on the model itself, which need the memory that is predicted.

    Returns:
        The prediction, or why there is none.
    """
    every = [cb for cb in (*learn.cbs, *cbs) if cb.run]
    if why := _not_predicted(learn, every):
        return why
    reason, several = "", learn.n_ranks > 1
    try:
        seen = seen or _seen(learn)
        n = _samples(learn, seen)
    except Exception as error:  # The loader, or its batch, has raised it.
        return in_one_line(error)
    for trial in on or ((fake_steps,) if several else (fake_steps, real_steps)):
        try:
            with distributed.alone(), trial(learn) as (one, like):
                others = (4 * n, 8 * n) if trial is fake_steps else (n // 2 if n > 3 else 2 * n,)
                live: Any = LiveBytes()
                beside = 0  # the bytes of others
                if trial is real_steps and learn.dls.device.type == "cuda":
                    live = AllocatedBytes(learn.dls.device)
                    beside = live.now - n_bytes((*held_tensors(one.model, one.loss_func), *state_tensors(one.opts)))
                prediction = _measured(one, map_batch(like, seen), n, every, others, live)
                return prediction.with_more(prediction.gradients * several - beside)  # DDP has copies of gradients
        except Exception as error:  # User code may need values, or another batch size.
            reason = reason or in_one_line(error)
    return reason


def _not_predicted(learn: "Learner", cbs: Sequence[Callback]) -> str:
    """Return the reason why a learner's steps are not those that would be tried; '' for most learners."""
    if will_shard(learn):
        return "the model is divided among the ranks"
    if any(isinstance(cb, DataParallelCallback) for cb in cbs):
        return "DataParallel divides each batch among devices"
    if devices := spanned_devices(unwrap(learn.model)):
        return f"the model spans {', '.join(map(str, devices))}"
    if _SEAMS & vars(learn).keys():
        return "the optimizer evaluates the loss several times, or a step of your own is assigned"
    return ""


def _seen(learn: "Learner") -> Seen:
    """Return the learner's batch while something runs, else the first one of training."""
    if learn.task is not None and learn.xb:
        return Seen(learn.batch, learn.xb, learn.yb)
    batch = to_device(first_batch(learn.dls.train), learn.dls.device)
    return Seen(batch, *learn.dls.split(batch, own_loss_arguments(learn.loss_func, learn.model)))


def _samples(learn: "Learner", seen: Seen) -> int:
    """Return the number of samples of a batch; refuse a batch whose parts differ in it."""
    counts = learn.dls.rows_of_pass(seen.xb, seen.yb, _refuse)
    if len(counts) != 1 or 0 in counts:
        _refuse(seen.batch)
    return counts.pop()


def _refuse(part: Any) -> None:
    raise ValueError(f"it is not known where the samples of {describe(part)} are")


def _resized(learn: "Learner", seen: Seen, n: int) -> Seen:
    """Make a batch of `n` samples by repeating those of another batch."""
    made = dict[int, Any]()  # by part, as inputs and targets are parts of the batch, too

    def sized(rows: Any, dim: int, place: tuple) -> Any:
        if isinstance(rows, tuple | list):
            new = type(rows)(rows[i % len(rows)] for i in range(n))
        else:  # a tensor or an array
            new = rows[(slice(None),) * dim + ([i % rows.shape[dim] for i in range(n)],)]
        return made.setdefault(id(rows), new)

    inputs, targets, _ = learn.dls.dims_of(seen.xb, seen.yb)
    dims = (learn.dls.batch_dim, inputs, targets)
    return Seen(*(map_rows(sized, part, dim, itself) for part, dim in zip(seen, dims, strict=True)))


Trial = Callable[["Learner"], AbstractContextManager[tuple["Learner", TensorFunction]]]
"""A context that yields a copy of a learner for steps, and a function that converts tensors for the copy."""


@contextmanager
def fake_steps(learn: "Learner") -> Iterator[tuple["Learner", TensorFunction]]:
    """Copy a learner, with fake tensors in model and loss, and with a new optimizer.

    Only torch's own hooks are copied, such as that of `weight_norm`: others may keep tensors.

    Raises:
        ValueError: the steps do not show what is needed, or may leave tensors without values behind.
    """
    one, owners = copy.copy(learn), (unwrap(learn.model), learn.loss_func)
    kind = nn.LSTM if learn.dls.device.type == "cpu" else nn.RNNBase
    if any(isinstance(m, kind) for m in owners[0].modules()):
        raise ValueError("kernels of recurrent layers keep what tensors without values do not show")
    if overrides(learn, "_backward", "_step"):  # such as a GAN, with a pool of the images that it has made
        raise ValueError("a step of its own may keep tensors, which a fit could not use if they had no values")
    mode, logger = fake_mode(), logging.getLogger("torch._subclasses.fake_tensor")
    memo: dict[int, Any] = {id(x): x for x in (learn.dls, *learn.cbs)} | {id(learn): one}  # hooks copy none of these
    for t in held_tensors(*owners):
        memo[id(t)] = fake = mode.from_tensor(t)
        fake.grad = None
    for m in (m for x in owners if isinstance(x, nn.Module) for m in x.modules()):
        memo |= {id(hooks): type(hooks)(_torchs_own(hooks)) for hooks in hook_tables(m)}
    # The logger prints errors, which are dealt with here.
    with replaced(logger, disabled=True), keep_seeds(device=learn.dls.device), uncompiled(), mode:
        one.model, one.loss_func = copy.deepcopy(owners, memo)
        one._loss_weighting = new_weighting(one)
        one.opt = None
        one._new_opt()
        yield one, mode.from_tensor


def _torchs_own(hooks: dict[int, Any]) -> dict[int, Any]:
    return {key: hook for key, hook in hooks.items() if (getattr(hook, "__module__", "") or "").startswith("torch.")}


@contextmanager
def real_steps(learn: "Learner") -> Iterator[tuple["Learner", TensorFunction]]:
    """Copy a learner, but not its model and optimizer, which are restored at the end."""
    one = copy.copy(learn)
    one.model = unwrap(learn.model)
    with unchanged(learn), training_modes(one.model), keep_seeds(device=learn.dls.device), uncompiled():
        if one.opt is None:
            one._new_opt()
        yield one, itself


def _measured(
    one: "Learner", seen: Seen, n: int, cbs: Sequence[Callback], others: Sequence[int], live: Any
) -> Prediction:
    """Measure the peaks of a step on `n` samples and of passes on other numbers of samples."""
    model, one.training = one.model.train(), True  # a loss, or a step of its own, may ask for it
    peaks = dict[int, tuple[int, ...]]()  # in the forward pass, in the backward pass, and in the optimizer's step
    mode = next((cb.mode for cb in cbs if isinstance(cb, MixedPrecision)), None)
    again = [cb.modules for cb in cbs if isinstance(cb, ActivationCheckpointing)]
    keeps = any(cb.name in _KEEPERS for cb in cbs)
    state = state_tensors(one.opts)
    with ExitStack() as stack:
        stack.callback(torch.clear_autocast_cache)
        for modules in again:
            stack.enter_context(ActivationCheckpointing(modules).recomputed(model))
        stack.enter_context(torch.enable_grad())
        live.note((*held_tensors(model, one.loss_func), *state))
        stack.enter_context(live)
        for i, size in enumerate((n, *[n] * keeps, *others)):  # Kept gradients come from earlier passes.
            forward, backward = _peaks_of_passes(one, seen, size, mode, live)
            if not i:
                live.peak = after = live.now
                gradients = n_bytes(p.grad for p in model.parameters() if p.grad is not None)
                one._step()
                optimizer = n_bytes(state_tensors(one.opts))
                made = optimizer - n_bytes(state)  # The step has made this state, which is there in all later passes.
                extra = live.peak - after - made
                peaks[size] = forward + made, backward + made, live.peak
            else:
                peaks[size] = forward, backward, live.now + extra
            if not keeps:
                one._zero_grad()
            one.batch = one.pred = one.output = one.loss = one.loss_grad = None
            one.xb = one.yb = ()
    # Each part of the step has lines of its own: in one that is the highest for few samples, others hide.
    lines = list[tuple[float, float]]()
    for (few, lows), (many, highs) in pairwise(sorted(peaks.items())):
        for low, high in zip(lows, highs, strict=True):
            slope = (high - low) / (many - few)
            lines.append((low - slope * few, slope))
    lines.sort(key=lambda line: line[1])
    base, per_sample = lines[-1]
    peak = max(peaks[n])
    return Prediction(n_bytes(model.parameters()), gradients, optimizer, per_sample, base, peak, n, tuple(lines))


def _peaks_of_passes(one: "Learner", seen: Seen, size: int, mode: str | None, live: Any) -> tuple[int, int]:
    """Return the peaks of a forward and of a backward pass on `size` samples."""
    live.peak = live.now
    one.batch, one.xb, one.yb = _resized(one, seen, size)
    one.batch_size = size
    with nullcontext() if mode is None else torch.autocast(one.dls.device.type, MODES[mode]):
        one._forward()
        if mode is not None:
            predictions_in_float32(one)
        one._loss()
    forward = live.peak
    live.peak = live.now
    one._backward()
    return forward, live.peak
