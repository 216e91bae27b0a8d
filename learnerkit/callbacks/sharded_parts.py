"""Batches in parts, of a sharded model: all ranks make the same number of passes, also after an error."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from learnerkit import distributed
from learnerkit.callbacks.batch_parts import Batches, Part, distinct, samples_between
from learnerkit.data.batches import in_float32
from learnerkit.gradient_mean import host_count
from learnerkit.losses import output_of, pass_kept, take_loss, wants_loss
from learnerkit.marks import collective
from learnerkit.torch_internals import BatchNorm, CollectivesDone, leaves_of
from learnerkit.values import tensors_in

if TYPE_CHECKING:
    from learnerkit.callbacks.splitting import SplitBatch
    from learnerkit.parallel.sharded_step import Sharded


class ShardedBatches(Batches):
    """Computes the training batches of a sharded model, whole or in parts: the gradient of the learner's steps.

    The ranks gather each unit together, and so make the same passes. Before each batch they agree on the number of its
    parts. Predictions and the loss come from passes without gradients, in which each rank is free; then all ranks make
    the passes that have gradients, a part each. A rank that runs out of memory in one ends it on a few samples, with
    the collectives that it has not yet made, so that no other rank waits. Then all begin again, with more parts.

    Args:
        cb: the callback, which knows the number of parts.
        params: the parameters that get gradients.
    """

    def __init__(self, cb: "SplitBatch", params: list[Tensor]) -> None:
        super().__init__(cb, params)
        learn = self.learn
        given: Any = learn._gradient
        self._inner: Sharded = given._inner if isinstance(given, ShardedBatches) else given  # runs one pass
        learn._gradient = self
        self.mean = self._inner.mean
        self._shards = self._inner.shards
        self._is_taken = False  # whether this object computes the current batch
        self._is_careful = False  # whether the current batch may run out of memory
        self._failed = False  # whether this rank's pass has failed in the current part

    @collective
    def begin(self) -> None:
        """Agree on the number of parts of a batch; every rank must reach this, and then `backward`."""
        learn, cb = self.learn, self.cb
        self.size = self._size() if learn.batch_size else 0
        parts, fits = cb.limits
        mine = (1 if self.size <= fits else parts, cb.is_careful or self.size > fits)
        wanted, careful = zip(*distributed.all_gather(mine, among="votes"), strict=True)
        cb._batches += 1
        self._wanted_parts, self._is_careful = max(wanted), any(careful)
        self._is_taken = self._wanted_parts > 1 or self._is_careful
        if self._is_taken:
            self._shards.begin_votes()
            super().begin()

    def _forward(self) -> None:
        if self.parts or self._is_computing:
            self._own["_forward"]()
            return
        self._note_batch()
        self._note(everything=True)
        self._compute_values(self.cb.parts_of(self.rows, self._wanted_parts))

    def _compute_values(self, parts: int) -> None:
        """Compute predictions and loss in so many parts, without gradients."""
        with torch.no_grad():
            self._fit(parts)
        with torch.enable_grad():
            self._put_on()

    def _linked_to(self, outputs: Sequence[Tensor]) -> tuple[Any, Sequence[Tensor]]:
        self._ends = [t.detach().requires_grad_() for t in outputs]
        total = self._total
        return None if total is None else total.detach().clone().requires_grad_(), self._ends

    @property
    def is_inside(self) -> bool:
        """Tell whether a forward pass with gradients has begun, and not ended."""
        return self._inner.is_inside

    def detach(self) -> None:
        """Take the hooks off the units."""
        self._inner.detach()

    # The passes with gradients

    @collective
    def backward(self) -> None:
        """Compute the gradients of the batch."""
        learn, inner = self.learn, self._inner
        if not self._is_taken:
            inner.backward()
            return
        has_data, due = bool(learn.batch_size), learn.step_due
        if not has_data:
            learn.loss_count = 0  # each pass sets it, and is kept from the learner
        inner.step.of_batch = host_count(learn.loss_count)
        parts = self._agreed(self.parts if has_data else 0)
        self._shards.end_votes()
        ways = self._factors() if has_data else (None, [])
        inner.forget_calls()
        inner.compares, mean = False, self.mean
        before = mean.begun, mean.expected, mean.counted
        grads = [p.grad for p in self.params]
        try:
            while not self._made(parts, ways, due, has_data, grads):
                if not inner.sync and (parts > 1 or before[0]):
                    raise torch.OutOfMemoryError(
                        f"{self._wanted}: with sync=False the gradients of earlier batches of the step, or parts, "
                        "are lost; give SplitBatch(parts=...) the number of parts, or leave sync=False out"
                        " (errors.html#split-batch)"
                    )
                mean.begun, mean.expected, mean.counted = before
                if self._failed:
                    self._more(parts)  # This raises an error if there is no smaller part.
                self._shards.begin_votes()
                if has_data:
                    self._put_back()
                    self._compute_values(self._next(min(parts, self.rows)))
                parts = self._agreed(self.parts if has_data else 0)
                self._shards.end_votes()
        finally:
            learn.step_due, inner.compares = due, True
            inner.step.of_batch = None
        if has_data:
            self.cb.note_fit(self)
        self.cb.parts = max(self.cb.parts, parts)

    @collective
    def _agreed(self, mine: int) -> int:
        """Agree on the number of passes, and compute the values in as many parts."""
        last = 0
        while True:
            everyone = distributed.all_gather(mine, among="votes")
            most = max(1, *everyone)
            if most == last or all(parts in (0, most) for parts in everyone):
                return most
            last = most
            if 0 < mine < (wanted := self.cb.parts_of(self.rows, most)):  # Others make passes without data.
                self._put_back()
                self._compute_values(wanted)
                mine = self.parts

    def _factors(self) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return the gradients of the learner's loss with respect to the batch's own loss and to the predictions."""
        learn = self.learn
        if learn.loss_grad is None or learn.loss_grad is self._root:
            return None, []
        if not leaves_of([learn.loss_grad]) <= {self._root, *self._ends}:
            raise ValueError(
                "a callback has made the loss depend on something beside the predictions, and SplitBatch cannot take "
                "that apart for a sharded model: compute it in the loss function, or leave SplitBatch out"
                " (errors.html#split-batch)"
            )
        learn.loss_grad.backward()
        factor = torch.zeros(()) if self._root.grad is None else self._root.grad
        return factor, [t.grad for t in self._ends]

    @collective
    def _made(self, parts: int, ways: Any, due: bool, has_data: bool, grads: list[Tensor | None]) -> bool:
        """Run a pass for each part, and tell whether all ranks had the memory for it.

        Args:
            parts, ways, due, has_data: those of the batch.
            grads: the gradients of the step's earlier batches. Those of this batch are added to them before the step
                ends, which weighs and averages all of them.
        """
        learn, inner = self.learn, self._inner
        for p, grad in zip(self.params, grads, strict=True):
            # If memory runs out, the passes are made again, from the same gradients.
            p.grad = grad.clone() if grad is not None and self._is_careful else grad
        if has_data:
            self._put_back()
        for i in range(parts):
            learn.step_due, self._failed = due and i == parts - 1, False
            part = self.cut[i] if has_data and i < len(self.cut) else None
            with pass_kept(learn), CollectivesDone(self._shards.divided) if self._is_careful else nullcontext() as done:
                self._pass(part, ways, i, done)
            if self._is_careful and any(distributed.all_gather(self._failed, among="votes")):
                inner.forget_calls()
                return False
        return True

    def _pass(self, part: Part | None, ways: Any, i: int, done: Any) -> None:
        """Run forward and backward on a part; without one, on a few samples with a weight of zero."""
        learn = self.learn
        if part is None:
            self._sample()
        elif done is None:
            self._enter_again(part)
        elif not self._tried(partial(self._enter_again, part)):
            self._begin_again(done)
        if part is not None and not self._failed:
            learn.loss_grad = self._loss_of(ways, i)
        if done is not None:
            vars(learn)["_backward"] = partial(self._tried_backward, done)
        try:
            self._inner.backward()
        finally:
            vars(learn).pop("_backward", None)

    def _enter_again(self, part: Part) -> None:
        part.draw_again(self.learn.dls.device)
        with self._autocast:
            self._enter(part)
            if wants_loss(self.learn):
                take_loss(self.learn)

    def _loss_of(self, ways: Any, i: int) -> Any:
        """Return the loss of a part, changed as callbacks have changed the loss of the batch."""
        factor, of_outputs = ways
        loss = in_float32(self.learn.loss_grad)
        if factor is not None:
            loss = loss * factor
        made = distinct((self.learn.pred, self.learn.output))
        share = self._shares[i]
        for (_, way), grad in zip(self._ways, of_outputs, strict=False):
            if grad is not None and share:
                loss = loss + (made[way.place] * way.of_part(grad, i)).sum() / share
        return loss

    def _tried_backward(self, done: Any) -> None:
        if not self._tried(self._own["_backward"]):
            self._begin_again(done)
            outputs = [t.float().sum() for t in tensors_in(output_of(self.learn)) if t.requires_grad]
            self._inner.with_all(torch.stack(outputs).sum()).backward()

    def _begin_again(self, done: Any) -> None:
        """Restart a failed pass on a few samples, for the collectives that are left; its results are not used."""
        self._failed = True
        self._inner.forget_calls()
        done.begin_again()
        self._sample()

    def _sample(self) -> None:
        learn = self.learn
        n = 2 if any(isinstance(m, BatchNorm) for m in learn.model.modules()) else 1  # One sample has no variance.
        learn.xb, learn.yb = samples_between(learn, learn.xb, learn.yb, 0, n)
        learn.batch_size = 0
        learn.loss = None
        learn.loss_grad = None
        self._own["_forward"]()
