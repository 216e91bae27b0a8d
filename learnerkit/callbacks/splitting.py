"""Batches that run out of memory, which are taken in parts of one optimizer step."""

import gc
import os
import resource
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from learnerkit import arguments, optim, world
from learnerkit.callback import Callback, readers_of_predictions
from learnerkit.callbacks.carried import CarriedState
from learnerkit.callbacks.precision import MixedPrecision, predictions_in_float32
from learnerkit.data.batches import get_field, in_float32, map_batch, tensors_in
from learnerkit.data.cuts import cut_rows, even_sizes, parted, row_counts
from learnerkit.data.order import keep_seeds
from learnerkit.gradient_mean import GradientMean, host_count, scale_each
from learnerkit.losses import (
    counts_predictions,
    is_of_torch,
    loss_name,
    loss_sums,
    output_of,
    pass_kept,
    take_loss,
    wants_loss,
    weighting_of,
)
from learnerkit.text import first_few, in_units
from learnerkit.torch_internals import BatchNorm, BuffersKept, Dropout, hooks_left_out, version_of
from learnerkit.utils import describe, is_out_of_memory, overrides, unwrap

if TYPE_CHECKING:
    from learnerkit.learner import Learner

_CAREFUL_STEPS = 2
"""The first steps of a training, in which any batch may run out of memory: the optimizer's state comes with one."""

_SEAMS = ("_forward", "_loss", "_backward")


class SplitBatch(Callback):
    """Takes a batch that runs out of memory again in several parts, with the same loss, gradient and step.

    A batch whose forward pass, loss or backward pass runs out of memory is computed again in more parts, until each
    part fits, and one optimizer step follows as if it had not been cut. What the failed try has changed is put back:
    random states, buffers and gradients. The number of parts stays for batches of that size, in later fits, too, and
    checkpoints have it. Several processes take the largest number that any of them needs. Callbacks see the events of
    the batch once, with the predictions and the loss of all its parts. Batches of validation and prediction are cut in
    the same way.

    The loss is the mean over what the losses of the parts count (`loss_weight=`), so that loss and gradient differ from
    those of the whole batch by rounding alone. What cannot be equal is said once: statistics of BatchNorm, and random
    numbers such as those of dropout, which are drawn for each part. A loss that compares the samples of a batch with
    each other is refused. If a callback makes the loss depend on the predictions in another way, as MixUp does, the
    gradient is exact, too, and the parts are computed twice.

    Args:
        parts: the number of parts of a training batch; `None`: 1, and more where a batch runs out of memory.

    Attributes:
        parts: the number of parts in which training batches are taken now.

    Raises:
        ValueError: a number of parts below 1; in a fit, what cannot be cut exactly: backward passes or closures of the
            learner's own, a state that is carried from batch to batch, a loss_weight for each of several losses, or a
            loss that compares samples with each other.
        torch.OutOfMemoryError: one sample alone does not fit; or memory ran out where a batch cannot be taken again: in
            the optimizer's step, or late in a fit in the backward pass of an accumulated or distributed step.
    """

    order = 13  # behind what gives a batch without data its forward pass

    def __init__(self, parts: int | None = None) -> None:
        super().__init__()
        if parts is not None:
            arguments.check_count("parts", parts)
        self.parts = parts or 1
        self._fits = 0  # the largest size of a training batch that is known to fit as it is
        self._evaluated = (1, 0)  # the same two numbers for evaluation
        self._open: list[Batches] = []  # a callback may evaluate in the middle of a training
        self._batches = 0  # of the present training, on every rank alike
        self._said = 0  # the number of parts that was said last
        self._checked = False  # the loss of the whole batch was that of its parts

    def before_fit(self) -> None:
        learn, why = self.learn, ""
        self._batches = 0
        if learn.task in ("validate", "predict"):
            return
        if overrides(learn, "_backward", "_step") or learn._by_closure:
            why = (
                f"{type(learn).__name__} makes backward passes or steps of its own, for which it needs the whole batch"
            )
        elif carries := [cb for cb in learn.cbs if isinstance(cb, CarriedState)]:
            why = f"{carries[0]!r} carries a state for the rows of the whole batch"
        elif learn.loss_weight is not None and isinstance(learn.loss_weight, dict):
            why = "loss_weight= has a count for each of several losses, which are known after the last part alone"
        if why:
            raise ValueError(
                f"SplitBatch cannot take a batch in parts: {why}. Leave SplitBatch out, and take smaller batches"
                " (errors.html#split-batch)"
            )

    def before_train(self) -> None:
        learn = self.learn
        beside = optim.parameters_beside(learn.model, learn.loss_func, learn.opts)
        params: list[Tensor] = [*learn.model.parameters(), *beside]
        if learn.n_ranks > 1:
            self._batches = 0  # as ranks agree in these batches, they do so in each epoch
        if learn.shards is not None:
            from learnerkit.callbacks.splitting_shards import ShardedBatches  # which few fits need

            self._open.append(ShardedBatches(self, params))
            return
        self._open.append(Batches(self, params))
        if learn.n_ranks > 1:
            step: Any = next(cb for cb in learn.cbs if cb.name == "left_batch")
            step.step.agree = self._agree

    def before_validate(self) -> None:
        self._open.append(Batches(self, []))

    def before_batch(self) -> None:
        self._open[-1].begin()

    def after_batch(self) -> None:
        self._open[-1].end()
        if self.learn.training and self.learn.n_ranks == 1:
            self._batches += 1

    def cleanup_train(self) -> None:
        self._open.pop().end()  # of a batch that was left before its end

    cleanup_validate = cleanup_train

    # The number of parts

    @property
    def is_careful(self) -> bool:
        """Tell whether any batch may be the first that runs out of memory, and not only one that is larger."""
        return self.learn.training and self._batches < _CAREFUL_STEPS * self.learn.step_batches

    @property
    def limits(self) -> tuple[int, int]:
        """The number of parts, and the largest size of a batch that fits as it is."""
        return (self.parts, self._fits) if self.learn.training else self._evaluated

    def note_fit(self, batch: "Batches") -> None:
        """Note that a batch has fitted in its number of parts."""
        parts, fits = self.limits
        if batch.parts > 1:
            parts, fits = max(parts, batch.parts), max(min(fits, batch.size - 1), batch.size_of_part)
        elif not self.is_careful:
            fits = max(fits, batch.size)
        if self.learn.training:
            self.parts, self._fits = parts, fits
        else:
            self._evaluated = parts, fits
        if self.learn.training and batch.parts > 1 and parts > self._said:
            self._said = parts
            unequal = _unequal(unwrap(self.learn.model), batch.cut)
            but = f". Not equal to the whole batch: {unequal}" if unequal else ""
            self.learn.say(f"SplitBatch takes batches of {batch.rows} samples in {parts} parts{but}")

    def count_batch(self) -> None:
        """Count a batch of training, on every rank."""
        self._batches += 1

    def _agree(self) -> None:
        """Take the largest number of parts that any rank needs; every rank must reach this before its backward pass."""
        careful = self.is_careful
        self.count_batch()
        if not careful:
            return
        batch = self._open[-1] if self.learn.batch_size else None  # else there are no data here
        while True:
            everyone = world.all_gather((batch.parts if batch else 0, self.parts), among="votes")
            of_batch, known = zip(*everyone, strict=True)
            most, self.parts = max(of_batch), max(known)
            if all(parts in (0, most) for parts in of_batch):
                break
            if batch is not None and batch.parts < most:
                batch.compute(most)

    # The loss

    def keeps_predictions(self) -> bool:
        """Tell whether somebody reads the predictions of a training batch behind the forward pass."""
        learn = self.learn
        is_known = self._checked or is_of_torch(learn.loss_func)
        return not is_known or bool(readers_of_predictions(learn)) or counts_predictions(learn)

    def check_loss(self, loss: Callable[[], None], found: Tensor | None) -> None:
        """Refuse a loss that is not that of the parts: it compares samples with each other. A host-device sync, once.

        Args:
            loss: computes it of the whole batch.
            found: by the parts.
        """
        learn = self.learn
        if self._checked or found is None or is_of_torch(learn.loss_func):
            return
        with torch.no_grad(), pass_kept(learn), keep_seeds(device=learn.dls.device):
            before = world.seed_states()[0]
            loss()
            whole, draws = in_float32(learn.loss), not torch.equal(before, torch.get_rng_state())
        if not draws and not torch.isclose(whole, found, rtol=1e-3, atol=1e-6, equal_nan=True):
            raise ValueError(
                f"the loss of a batch is {float(whole):.6g}, and that of its {self.parts} parts together "
                f"{float(found):.6g}: {loss_name(learn.loss_func)} compares the samples of a batch with each other, or "
                "averages over something else than loss_weight= says. SplitBatch cannot take it in parts: take smaller "
                "batches, or say by loss_weight= what the loss averages over"
                " (errors.html#split-batch)"
            )
        self._checked = True

    def state_dict(self) -> dict[str, Any]:
        """The numbers of parts of this rank, and the sizes that fit."""
        return {"own": {"train": (self.parts, self._fits), "evaluation": self._evaluated}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the numbers of parts; of another number of ranks the most parts, and the smallest sizes."""
        found = state["ranks"] if "ranks" in state else [state["own"]]

        def joined(name: str) -> tuple[int, int]:
            parts, fits = zip(*(each[name] for each in found), strict=True)
            return max(parts), min(fits)

        (self.parts, self._fits), self._evaluated = joined("train"), joined("evaluation")


class Batches:
    """Computes the batches of a training or an evaluation as they are, or in parts: in three seams of the loop.

    In parts, forward pass, loss and backward pass of each are over before the next begins. What the loop then sees is
    the loss of all parts as a function of the parameters and of the predictions, whose gradients are known.

    Args:
        cb: says in how many parts.
        params: those that get gradients.

    Attributes:
        parts: the number of parts in which the present batch was computed; 0: not yet.
        cut: those parts.
        size: the numbers in its first input, or in all of several; a smaller batch fits where this one does.
        rows: its samples.
    """

    def __init__(self, cb: SplitBatch, params: list[Tensor]) -> None:
        self.cb, self.learn, self.params = cb, cb.learn, params
        self._buffers = BuffersKept(unwrap(self.learn.model)) if params else None
        self._seams = {"_forward": self._forward, "_loss": self._loss}
        found = vars(self.learn)
        self._replaced = {name: found[name] for name in _SEAMS if name in found}  # those of an outer batch, too
        self._own: dict[str, Callable[[], None]] = {name: getattr(self.learn, name) for name in _SEAMS}
        self._is_open = False
        self._wanted = ""  # what torch has said of the memory
        self._streams: tuple[Any, list[Tensor]] = (None, [])  # random states before a try
        self._forget()

    def _forget(self) -> None:
        self.parts = self.size = self.rows = 0
        self.cut: list[Part] = []
        self._is_computed = self._is_computing = False
        self._given: Any = None  # the tensors of the predictions, and their versions
        self._root: Any = None  # the loss that is differentiated, as the loop got it; it refers to this object
        self._total: Any = None  # its value
        self._total_shown: Any = None  # as the learner got it last
        self._ways: list[tuple[Tensor, _Way]] = []  # the predictions, each with how it is made of those of the parts
        self._gradients: dict[Tensor, Tensor] = {}

    def begin(self) -> None:
        """Stand in the seams for a batch; a rank without data in this step has none."""
        if self.learn.batch_size:
            self._is_open = True
            vars(self.learn).update(self._seams)

    def end(self) -> None:
        """Give the learner its seams back."""
        if self._is_open:
            self._is_open = False
            found = vars(self.learn)
            for name in _SEAMS:
                found.pop(name, None)
            if self._replaced:
                found.update(self._replaced)
            self._forget()

    @property
    def size_of_part(self) -> int:
        """The size of the largest part."""
        return -(-self.size * max(part.rows for part in self.cut) // self.rows)

    # The seams

    def _forward(self) -> None:
        learn, cb = self.learn, self.cb
        if self.parts or self._is_computing:  # another forward pass, of a callback
            self._own["_forward"]()
            return
        x = learn.xb[0]  # mostly the only one
        self.size = x.numel() if type(x) is Tensor else sum(t.numel() for t in tensors_in(learn.xb)) or learn.batch_size
        self.rows, self._yb = learn.batch_size, learn.yb
        parts, fits = cb.limits
        parts = 1 if self.size <= fits else parts
        careful = learn.training and (self.size > fits or cb.is_careful)
        self._note(careful or parts > 1)
        if parts == 1 and not careful:
            if self._tried(self._own["_forward"]):
                self.parts, self._given = 1, _versions(learn.pred)
                if learn.training and learn.n_ranks == 1:  # of several, others may have reduced gradients
                    vars(learn)["_backward"] = self._backward
                return
            parts = self._more(1)
        self.compute(parts)

    def _loss(self) -> None:
        learn = self.learn
        if self._is_computing or _versions(learn.pred) != self._given or learn.yb is not self._yb:
            self._own["_loss"]()  # of a part, or of predictions that a callback has changed
            return
        if not self._is_computed:
            if self._tried(self._own["_loss"]):
                self._root = learn.loss_grad
                return
            self.compute(self._more(1))
        learn.loss_grad, learn.loss = self._root, self._total

    def _backward(self) -> None:
        learn = self.learn
        if self._is_computed or learn.loss_grad is not self._root or any(p.grad is not None for p in self.params):
            self._own["_backward"]()
        elif not self._tried(self._own["_backward"]):
            for p in self.params:
                p.grad = None
            self.compute(self._more(1))
            learn.loss = self._total
            self._root.backward()

    # Trying

    def _note(self, everything: bool) -> None:
        """Note what a try changes; with `everything` also the streams of python and numpy, which take longer."""
        learn = self.learn
        if self._buffers is not None:
            self._buffers.keep()
        host: Any = world.seed_states() if everything else torch.get_rng_state()
        self._streams = host, world.device_states(learn.dls.device)

    def _put_back(self) -> None:
        """Put back what `_note` has noted."""
        host, of_device = self._streams
        (world.set_seed_states if isinstance(host, tuple) else torch.set_rng_state)(host)
        world.set_device_states(self.learn.dls.device, of_device)
        if self._buffers is not None:
            self._buffers.put_back()

    def _tried(self, run: Callable[[], None]) -> bool:
        """Run something, and tell whether there was memory for it. If not, everything is as before."""
        learn = self.learn
        try:
            run()
            return True
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._wanted = str(error).partition("\n")[0]
            traceback.clear_frames(error.__traceback__)  # which hold what has been computed
        learn.pred = learn.output = learn.loss = learn.loss_grad = None
        if learn.shards is not None:
            learn.shards.reset()
        self._put_back()
        gc.collect()
        if learn.dls.device.type != "cpu":
            torch.get_device_module(learn.dls.device).empty_cache()
        return False

    def _more(self, parts: int) -> int:
        """Return the number of parts to try after so many have failed."""
        if parts >= self.rows:
            learn = self.learn
            raise torch.OutOfMemoryError(
                f"one sample alone does not fit: {self._wanted} ({_free(learn.dls.device)} are free; the largest "
                f"tensors are {_largest(learn)}). ActivationCheckpointing(), to_bf16(), a smaller model, or "
                "distrib_ctx(shard=True) on several processes take less memory"
                " (errors.html#split-batch)"
            )
        largest = -(-self.rows // parts)
        return max(min(self.rows, parts * 5 // 4), -(-self.rows // (largest - 1)))  # whose largest part is smaller

    # In parts

    def compute(self, parts: int) -> None:
        """Compute the batch in so many parts, or in more if these do not fit."""
        self._fit(parts)
        self.cb.note_fit(self)
        self._put_on()

    def _fit(self, parts: int) -> None:
        self._is_computing = True
        try:
            while True:
                self.cut = self._cut(parts)
                if self._tried(self._run):
                    break
                parts = self._more(parts)
        finally:
            self._is_computing = False
        self.parts = len(self.cut)

    def _cut(self, parts: int) -> "list[Part]":
        learn = self.learn
        if parts == 1:
            return [Part(0, self.rows, {})]
        dls = learn.dls
        inputs, targets, _ = parted(dls.batch_dim, dls.target_keys, len(learn.xb), len(learn.yb))
        unknown: list[Any] = []
        counts = {**row_counts(learn.xb, inputs, unknown.append), **row_counts((learn.yb,), [targets], unknown.append)}
        if unknown or {*counts.values()} != {self.rows}:
            text = (
                f"a batch of {self.rows} samples whose inputs are {describe(learn.xb)} and whose targets are "
                f"{describe(learn.yb)}"
            )
            if self._wanted:
                raise torch.OutOfMemoryError(
                    f"{self._wanted}: SplitBatch cannot cut {text}; say where the samples are by "
                    "DataLoaders(batch_dim=...), or take smaller batches"
                    " (errors.html#split-batch)"
                )
            raise ValueError(
                f"SplitBatch cannot cut {text}: say where the samples are by DataLoaders(batch_dim=...)"
                " (errors.html#split-batch)"
            )
        ends = [0, *accumulate(even_sizes(self.rows, parts, 1))]

        def part(start: int, stop: int) -> Part:
            cut = {"xb": cut_rows(learn.xb, inputs, start, stop), "yb": cut_rows(learn.yb, targets, start, stop)}
            if {*row_counts(learn.batch, dls.batch_dim).values()} == {self.rows}:
                cut["batch"] = cut_rows(learn.batch, dls.batch_dim, start, stop)
            return Part(start, stop, {**cut, "batch_size": stop - start})

        return [part(start, stop) for start, stop in pairwise(ends) if start < stop]

    @contextmanager
    def _passes(self) -> Iterator[dict[Tensor, Tensor]]:
        """A context for passes over the parts; yields a dict that has the gradients at its end."""
        learn, found = self.learn, dict[Tensor, Tensor]()
        params = [p for p in self.params if p.requires_grad]
        before, batch = [p.grad for p in params], learn.batch
        try:
            with pass_kept(learn), hooks_left_out(params):
                for p in params:
                    p.grad = None
                yield found
                found.update((p, p.grad) for p in params if p.grad is not None)
        finally:
            learn.batch = batch
            for p, grad in zip(params, before, strict=True):
                p.grad = grad

    def _enter(self, part: "Part") -> None:
        """Run the model on a part."""
        learn = self.learn
        vars(learn).update(part.attributes)
        learn.pred = learn.output = learn.loss = learn.loss_grad = None
        self._own["_forward"]()
        if self._precision is not None:
            predictions_in_float32(learn)

    def _run(self) -> None:
        """Compute predictions and loss of all parts, and in training the gradients."""
        learn, kind = self.learn, self.learn.dls.device.type
        self._precision = next((cb for cb in learn.cbs if isinstance(cb, MixedPrecision) and cb.run), None)
        scaler = self._precision.scaler if self._precision and learn.training else None
        self._scale = scaler.scale(torch.ones((), device=learn.dls.device)) if scaler else 1.0
        self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        mean, losses, seen = GradientMean(loss_sums(learn)), list[tuple[Any, Any]](), list[tuple[Any, Any]]()
        keeps = len(self.cut) == 1 or not learn.training or self.cb.keeps_predictions()
        with self._passes() as found:
            for part in self.cut:
                part.streams = world.seed_states(), world.device_states(learn.dls.device)
                self._enter(part)
                if wants_loss(learn):
                    take_loss(learn)
                    losses.append((learn.loss, self._backward_of(part, mean) if learn.training else self._count()))
                seen.append(_detached((learn.pred, learn.output)) if keeps else (None, None))
        factor = mean.correction()
        if isinstance(factor, Tensor) or factor != 1:
            scale_each(found.values(), factor)
        self._gradients = found
        self._shares = _shares([count for _, count in losses], mean.sums)
        values = [in_float32(loss) for loss, _ in losses if loss is not None]
        self._total = _weighed(values, self._shares) if values else None
        self._seen = seen
        self._dim = parted(learn.dls.batch_dim, learn.dls.target_keys, len(learn.xb), len(learn.yb))[2]

    def _count(self) -> Any:
        return host_count(self.learn.loss_count)

    def _backward_of(self, part: "Part", mean: GradientMean) -> Any:
        """Compute the gradients of a part, and return what its loss counts."""
        learn, count = self.learn, self._count()
        if learn.loss_grad is None:
            return count
        if not mean.begun:  # a count on the device is not read, to avoid a host-device sync
            of_all = learn.batch_size if isinstance(count, Tensor) else count
            mean.begin(of_all * self.rows / part.rows or 1.0)
        mean.counted = mean.counted + count
        loss = mean.weigh(in_float32(learn.loss_grad), count, output_of(learn)) * self._scale
        if loss.requires_grad:
            with torch.autocast(learn.dls.device.type, enabled=False):
                loss.backward()
        return count

    def _put_on(self) -> None:
        """Give the learner the predictions of the whole batch; in training they are a part of its graph."""
        learn, last = self.learn, self._total_shown
        self._total_shown = self._total
        whole, self._ways = _joined(self._seen, self.cut, self._shares, self._dim, self._summed())
        self._seen = []
        if self._is_computed:  # other ranks need more parts; the events have taken place
            learn.loss = self._total if learn.loss is last else learn.loss
            return
        self._is_computed = True
        self._root, outputs = self._total, [t for t, _ in self._ways]
        if learn.training:
            self._root, found = self._linked_to(outputs)
            new = {id(t): made for t, made in zip(outputs, found, strict=True)}
            whole = map_batch(lambda t: new.get(id(t), t), whole)
        learn.pred, learn.output = whole
        if learn.output is not None and _versions(learn.pred) == _versions(learn.output):
            learn.output = learn.pred
        self._given = _versions(learn.pred)
        if len(self.cut) > 1 and learn.training:
            self.cb.check_loss(self._own["_loss"], self._total)

    def _linked_to(self, outputs: list[Tensor]) -> tuple[Any, Sequence[Tensor]]:
        """Return the loss, and these outputs, as functions of the parameters."""
        self._linked = list(self._gradients)
        if not self._linked:
            return self._total, outputs
        root, *found = _OfParts.apply(self, len(outputs), self._total, *outputs, *self._linked)
        return root, found

    def _summed(self) -> list[Any]:
        """Return the entries of the first part's output that are counts."""
        return [get_field(self._seen[0][1], name) for name in weighting_of(self.learn).entries]

    def gradients(self, factor: Tensor | None, of_outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradient of each linked parameter, once.

        Args:
            factor: of the batch's loss; `None`: nothing depends on it.
            of_outputs: the gradients of the predictions, where something beside the loss depends on them.
        """
        if not self._gradients:
            raise RuntimeError(
                "the gradients of a batch that SplitBatch has taken in parts were given already: call backward once for"
                " a batch, or leave SplitBatch out"
                " (errors.html#split-batch)"
            )
        found, self._gradients = self._gradients, {}
        if factor is None:
            found = {}
        elif not (factor.is_cpu and factor == self._scale):  # on a device it is not read
            scale_each(found.values(), factor / self._scale)
        if any(grad is not None for grad in of_outputs):
            for p, grad in self._again(of_outputs).items():
                found[p] = found[p] + grad if p in found else grad
        return [found.get(p) for p in self._linked]

    @torch.enable_grad()
    def _again(self, of_outputs: Sequence[Tensor | None]) -> dict[Tensor, Tensor]:
        """Compute the parts once more, and return the gradients of what depends on the predictions."""
        learn, kind = self.learn, self.learn.dls.device.type
        enabled, dtype = self._autocast
        self._note(everything=True)
        with self._passes() as found:
            for i, part in enumerate(self.cut):
                part.draw_again(learn.dls.device)
                with torch.autocast(kind, dtype, enabled=enabled):
                    self._enter(part)
                made = [t for t, _ in distinct((learn.pred, learn.output))]
                given = {
                    made[way.place]: way.of_part(grad, i)
                    for (_, way), grad in zip(self._ways, of_outputs, strict=True)
                    if grad is not None and made[way.place].requires_grad
                }
                torch.autograd.backward(list(given), list(given.values()))
        self._put_back()
        return found


class Part:
    """The samples of a batch from `start` to `stop`.

    Attributes:
        attributes: those of the learner for this part.
        streams: the random states with which its forward pass begins.
    """

    def __init__(self, start: int, stop: int, attributes: dict[str, Any]) -> None:
        self.start, self.stop, self.attributes = start, stop, attributes
        self.rows = stop - start
        self.streams: tuple[Any, list[Tensor]] = ((), [])

    def draw_again(self, device: torch.device) -> None:
        """Give the generators the states with which this part began."""
        world.set_seed_states(self.streams[0])
        world.set_device_states(device, self.streams[1])


class _Way(NamedTuple):
    """How a tensor of the whole output is made of those of the parts.

    Attributes:
        place: of the tensor in the output of a part.
        dim: along which those of the parts are joined; `None`: it is the sum of them, with shares.
        ends: where each part begins and ends along it.
        shares: of the parts.
    """

    place: int
    dim: int | None
    ends: list[int]
    shares: list[Any]

    def of_part(self, grad: Tensor, i: int) -> Tensor:
        """Return the gradient of a part's tensor by that of the whole."""
        if self.dim is None:
            return grad * self.shares[i]
        return grad.narrow(self.dim, self.ends[i], self.ends[i + 1] - self.ends[i])


class _OfParts(torch.autograd.Function):
    """The loss and the predictions of a batch as a function of parameters whose gradients are computed already."""

    @staticmethod
    def forward(ctx: Any, batch: Batches, n: int, loss: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.batch, ctx.n = batch, n
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in (loss, *tensors[:n]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor | None, *of_outputs: Tensor | None) -> tuple[Any, ...]:
        return (None,) * (3 + ctx.n) + tuple(ctx.batch.gradients(factor, of_outputs))


# Outputs of the parts


def _detached(x: Any) -> Any:
    same: dict[int, Tensor] = {}  # a tensor in two places stays one
    return map_batch(lambda t: same.setdefault(id(t), t.detach()), x)


def _versions(x: Any) -> list[tuple[int, int]]:
    """Return what tells whether the tensors in something are replaced or changed."""
    if type(x) is Tensor:  # as usual, in less time
        return [(id(x), version_of(x))]
    return [(id(t), version_of(t)) for t in tensors_in(x)]


def distinct(x: Any) -> list[tuple[Tensor, int]]:
    """Return the tensors in something, each once, with their places."""
    return [(t, i) for i, t in enumerate({id(t): t for t in tensors_in(x)}.values())]


def _shares(counts: list[Any], sums: bool) -> list[Any]:
    """Return the shares of the parts in what the batch counts; of losses that are sums they are 1."""
    total = sum(counts)
    if sums or (not isinstance(total, Tensor) and not total):
        return [1.0 if sums else 1 / max(1, len(counts))] * len(counts)
    return [count / total for count in counts]


def _weighed(values: list[Tensor], shares: list[Any]) -> Tensor:
    """Return the sum of values with their shares; what has none may be the mean of nothing, a NaN."""
    weighed = [
        torch.where(share > 0, value, 0.0) * share if isinstance(share, Tensor) else value * share if share else 0.0
        for value, share in zip(values, shares, strict=True)
    ]
    return torch.as_tensor(sum(weighed)).to(values[0])


def _joined(
    pieces: list[tuple[Any, Any]], parts: list[Part], shares: list[Any], dim: Any, summed: list[Any]
) -> tuple[tuple[Any, Any], list[tuple[Tensor, _Way]]]:
    """Join the outputs of the parts; what has no row for each sample is `None`.

    Returns:
        The output of the whole batch, and its floating-point tensors, each with how it is made.
    """
    columns = list(zip(*([t for t, _ in distinct(piece)] for piece in pieces), strict=True))
    ways, made = list[tuple[Tensor, _Way]](), dict[int, Any]()
    for place, column in enumerate(columns):
        first = column[0]
        if len(pieces) == 1:
            way, whole = _Way(place, 0, [0, len(first)], []) if first.ndim else _Way(place, None, [], [1.0]), first
        elif not first.ndim:
            kept = [1.0] * len(parts) if not first.is_floating_point() or any(first is t for t in summed) else shares
            way, whole = _Way(place, None, [], kept), _weighed(list(column), kept)
        elif (at := _dim_of_rows(column, parts, dim)) is None:
            made[id(first)] = None
            continue
        else:
            way = _Way(place, at, [0, *accumulate(t.shape[at] for t in column)], [])
            whole = torch.cat(column, at)
        made[id(first)] = whole
        if whole.is_floating_point():
            ways.append((whole, way))
    return map_batch(lambda t: made[id(t)], pieces[0]), ways


def _dim_of_rows(column: Sequence[Tensor], parts: list[Part], dim: Any) -> int | None:
    """Return the dimension in which each part's tensor has its samples, or so many rows for each of them."""
    for at in (dim if isinstance(dim, int) else 0, 0):
        fits = all(at < t.ndim and t.shape[at] % part.rows == 0 for t, part in zip(column, parts, strict=True))
        if fits and len({t.shape[at] // part.rows for t, part in zip(column, parts, strict=True)}) == 1:
            return at
    return None


# In words


def _unequal(model: nn.Module, parts: list[Part]) -> str:
    """Name what is not as in the whole batch."""
    named = [(_called(name, m), m) for name, m in model.named_modules() if m.training]
    norms = [name for name, m in named if isinstance(m, BatchNorm)]
    drops = [name for name, m in named if isinstance(m, Dropout) and m.p]
    drawn = first_few(drops) if drops else "the model" if _draws(parts) else ""
    found = [f"the statistics of {first_few(norms)}"] * bool(norms)
    return " and ".join([*found, *[f"the random numbers of {drawn} (equal in law)"] * bool(drawn)])


def _called(name: str, module: nn.Module) -> str:
    """Name a module; a number, as in `nn.Sequential`, says nothing without its type."""
    kind = type(module).__name__
    return f"{name} ({kind})" if name.rpartition(".")[2].isdigit() else name or kind


def _draws(parts: list[Part]) -> bool:
    (first, first_device), (second, second_device) = (part.streams for part in parts[:2])
    return not all(map(torch.equal, (first[0], *first_device), (second[0], *second_device)))


def _free(device: torch.device) -> str:
    if device.type == "cuda":
        return in_units(torch.cuda.mem_get_info(device)[0])
    found = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)  # as `ulimit -v` and some clusters set it
    if limit != resource.RLIM_INFINITY:
        with suppress(OSError):  # it is Linux's
            taken = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
            found.append(max(0, limit - taken))
    return in_units(min(found))


def _largest(learn: "Learner", n: int = 3) -> str:
    """Name the largest tensors that are alive."""
    names = {id(p): name for name, p in unwrap(learn.model).named_parameters()}
    names |= {id(p.grad): f"the gradient of {name}" for name, p in learn.model.named_parameters() if p.grad is not None}
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]  # not isinstance, which asks proxies
    alive = [t for t in tensors if t.layout is torch.strided]
    places = {t.untyped_storage().data_ptr(): t for t in sorted(alive, key=lambda t: id(t) in names)}
    first = sorted(places.values(), key=lambda t: -t.untyped_storage().nbytes())[:n]
    return ", ".join(f"{names.get(id(t), describe(t))} {in_units(t.untyped_storage().nbytes())}" for t in first)
