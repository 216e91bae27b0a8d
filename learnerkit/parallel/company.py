"""The rest of a batch that this rank has left: it joins, with zero weight, what the other ranks wait in."""

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from learnerkit import world
from learnerkit.events import CancelException
from learnerkit.gradient_mean import zero_loss
from learnerkit.parallel.loaders import emptied
from learnerkit.parallel.rank_step import RankStep
from learnerkit.parallel.wrapping import explain

if TYPE_CHECKING:
    from learnerkit.learner import Learner


class Company:
    """Takes part for this rank in the collectives of a batch that it does not finish by itself.

    Args:
        learn: the learner.
        step: what reduces the gradients.
    """

    def __init__(self, learn: "Learner", step: RankStep) -> None:
        self.learn, self.step = learn, step

    def finish_batch(self, *_: Any) -> None:
        """Do, with zero weight, what the other ranks wait for in this batch, if this rank has not done it."""
        learn, step, dispatch = self.learn, self.step, self.step.agreement.dispatch
        self.finish_backward()
        if learn._step_due and not step.stepped:
            if float(step.counted):  # a host-device sync; only where a rank has left a batch
                self.step_unless_all_skip()
                if not step.skipped:
                    dispatch.resume("after_step")
                    learn._zero_grad()
        elif dispatch.stopped_in("after_step"):
            dispatch.resume("after_step")
            learn._zero_grad()  # as the others do

    def finish_backward(self, *_: Any) -> None:
        """Take part in the reduction of the gradients without data, if this rank has left its backward pass out."""
        learn, step = self.learn, self.step
        if step.reduced:
            return
        step.left_out = True
        if step.agreement.dispatch.to_come("before_batch"):
            step.agreement.dispatch.resume("before_batch")  # schedules, for one: the step will be taken here, too
        step.synchronise()
        batch = {name: getattr(learn, name) for name in ("xb", "pred", "output", "loss", "loss_grad", "batch_size")}
        learn.batch_size = 0
        clean = all(p.grad is None for p in learn.model.parameters())
        try:
            with torch.enable_grad():
                if step.by_bucket:
                    self._repeat_batch()
                else:
                    self._run_empty_batch()
        finally:
            for name, value in batch.items():
                setattr(learn, name, value)
        step.finish_reduction()
        if learn._step_due and clean and float(step.counted) == 0:  # no rank had data: as if it had not been
            learn._zero_grad()

    def _run_empty_batch(self) -> None:
        learn, step = self.learn, self.step
        communicates = any(isinstance(m, nn.SyncBatchNorm) for m in learn.model.modules())
        asks = not step.entered and (step.takes_nothing or communicates)  # the model may ask other ranks
        if asks or step.needs_output:
            if step.takes_nothing:
                learn.xb = emptied(learn.xb)
            with suppress(CancelException):  # that of a hook of the model, again
                learn._forward()
        step.take_count(0)
        step.leave_out()
        if learn._step_due:
            learn.loss_grad = zero_loss(learn._model_output)
            step.differentiate(0)

    def _repeat_batch(self) -> None:
        "The whole batch, whose gradients are then left out."
        learn, step = self.learn, self.step
        learn._forward()
        learn._loss()
        if step.vector is None:
            step.reduce_counts(step.take_count(0))
        step.buckets.factor = 0.0
        step.differentiate(0)

    def explain(self, error: RuntimeError) -> None:
        """Add to an error of DDP's what it does not say itself."""
        explain(error)

    def step_unless_all_skip(self, *_: Any) -> None:
        """Take the optimizer step that this rank would have left out, unless all ranks leave it out."""
        learn, step, dispatch = self.learn, self.step, self.step.agreement.dispatch
        if step.stepped or step.skipped:
            return
        events = ["after_backward", "before_step"]
        if step.all_skip("step"):
            # Where all have cancelled the last batch of an accumulated step, the step is taken with the others.
            step.skipped = bool(world.reduce(int(not step.left_out), "max", among="votes"))
            if step.skipped:
                return
            del events[0]
        for event in events:
            if dispatch.to_come(event):
                dispatch.resume(event)  # what clips here has clipped there
        learn._step()
