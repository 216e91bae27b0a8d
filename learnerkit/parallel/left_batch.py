"""A batch for which a rank has no data, or which it has left: with weight 0, it joins the others' collectives."""

from contextlib import suppress
from typing import cast

import torch

from learnerkit import distributed
from learnerkit.callback import Callback
from learnerkit.data.cuts import cut_rows
from learnerkit.events import CancelException, CancelStepException
from learnerkit.gradient_mean import StepGradient, counts_something
from learnerkit.losses import output_of, pass_kept
from learnerkit.marks import collective
from learnerkit.parallel.agreement import BACKWARD, STEP
from learnerkit.parallel.model_checks import joined_norms, rank_norms
from learnerkit.parallel.rank_step import RankStep
from learnerkit.utils import overrides, synced_norms


class LeftBatch(Callback):
    """Joins, with weight 0, the collectives of a batch for which this rank has no data, or which it has left.

    It is the part of `DistributedCallback` that runs at each training batch while a fit lasts.

    Args:
        step: of the ranks.
    """

    order = 11
    run_valid = False

    def __init__(self, step: RankStep) -> None:
        self.step = step
        # An attribute rather than a method spares each batch a call.
        self.before_batch = step.before_batch
        if overrides(step.learn, "_step"):  # the learner may step without the optimizer's `step`
            self.after_step = step.note_optimizer_step

    def __repr__(self) -> str:
        return "DistributedCallback"

    def begin(self) -> None:
        """Begin a batch for which this rank has no data.

        The model runs on an empty batch. It runs on a real sample of weight 0 if it is sharded, fails on an empty
        batch, or has norms that wait for other ranks, and if the learner overrides `_backward`.
        """
        learn = self.learn
        learn.batch_size = 0
        waits = bool(synced_norms(learn.model))
        if waits:
            self.step.joined.enter_context(joined_norms(learn.model, moves=learn.dl.share.total != 0))
        if waits or overrides(learn, "_backward") or learn.shards is not None:
            # After a failed pass of such a model there cannot be another one: other ranks are in the next collective.
            self._take_sample()
        else:
            vars(learn)["_forward"] = self._forward

    def _take_sample(self) -> None:
        learn = self.learn
        learn.batch, learn.xb, learn.yb = learn._unpack.split(learn.dl.sample)

    def _forward(self) -> None:
        """Run the model on an empty batch; if it fails, run it on a real sample."""
        learn = self.learn
        del vars(learn)["_forward"]
        try:
            learn._forward()
        except CancelException:
            raise
        except Exception:
            self._take_sample()
            learn._forward()

    @collective
    def finish_batch(self) -> None:
        """Join, with weight 0, the collectives of this batch in which this rank has not taken part."""
        learn, step = self.learn, self.step
        if self._is_alone():
            return
        self.finish_backward()
        if learn.step_due:
            self.step_unless_all_skip(clears=False)
        elif step.is_open():  # GradientAccumulation ends such a batch on all ranks alike
            self.finish_after_backward()
        if step.stepped and step.dispatch.resume("after_step") is not None:
            step.clear()  # the other ranks clear their gradients, too
        step.joined.close()

    def _is_alone(self) -> bool:
        """Tell whether this rank trains by itself at the moment: then no other rank waits for it."""
        return self.learn._gradient is None

    def finish_backward(self) -> None:
        """Take part in the reduction of the gradients without data, if this rank has skipped its backward pass."""
        learn, step = self.learn, self.step
        if step.reduced:
            return
        step.dispatch.resume("before_batch")  # schedules, for example, must run: the step is taken here, too
        way = cast(StepGradient, learn._gradient)
        vars(learn).pop("_forward", None)
        with pass_kept(learn):
            learn.batch_size = 0
            # These last until the batch is over, as its backward pass and an optimizer may run the model again. All
            # ranks may have left the batch.
            joined = joined_norms(learn.model, moves=False)
            if overrides(learn, "_backward"):  # the rank must make its passes, and the steps in them, too
                step.joined.enter_context(joined)
                learn._forward()
                learn._loss()
            elif output_of(learn) is None and (learn.shards is not None or synced_norms(learn.model)):
                if getattr(way, "is_inside", False):
                    raise RuntimeError(
                        f"a cancel in the middle of the model's forward pass on rank {distributed.rank()}, where the "
                        "other ranks wait for it to gather the next unit of the sharded model: raise it in an event of "
                        "a callback, such as after_pred (errors.html#sharded)"
                    )
                learn.xb = cut_rows(learn.xb, 0, 0, int(not rank_norms(learn.model)))
                step.joined.enter_context(joined)
                with suppress(CancelException):  # a hook of the model raises it again
                    learn._forward()
            way.backward()

    @collective
    def finish_after_backward(self) -> bool:
        """Run the hooks of `after_backward` that this rank has skipped, unless all skip them; tell whether all do."""
        step = self.step
        if not step.hooks_skipped:
            next_point = max(step.point, BACKWARD) + 1
            step.hooks_skipped = step.all_skip(next_point)
            if step.hooks_skipped:
                step.point = next_point
            else:
                step.dispatch.resume("after_backward")  # another rank waits in such a hook, or has passed them
        return step.hooks_skipped

    @collective
    def step_unless_all_skip(self, clears: bool = True) -> None:
        """Take the optimizer step that this rank would have skipped, unless all ranks skip it.

        Args:
            clears: the loop clears this rank's gradients afterwards. Then all ranks do so, if all skip.
        """
        step, dispatch = self.step, self.step.dispatch
        if step.stepped is not None or self._is_alone():
            return
        # A rank that has skipped these hooks by a CancelBackwardException takes the step all the same.
        all_skip = self.finish_after_backward() and step.all_skip(step.point + 1)
        # Clipping, for example, must run as on the other ranks.
        cancels = [] if all_skip else dispatch.resume("before_step") or []
        if not all_skip:
            step.point = STEP - 1
            all_skip = step.all_skip(STEP)
        if all_skip:
            mine = torch.tensor([clears or counts_something(step.count), clears], dtype=torch.int32)
            counts, one_clears = distributed.reduce(mine, "max", among="votes").tolist()
            if counts or not float(step.mean.counted):  # a host-device sync
                step.stepped, step.clears = False, bool(one_clears)
                return
            # All ranks have cancelled the last batch of an accumulated step, which is taken from the other batches,
            # unless hooks cancel it on every rank, as after an overflow.
            cancels += dispatch.resume("before_step") or []
            cancelled = any(isinstance(cancel, CancelStepException) for cancel in cancels)
            if distributed.reduce(int(cancelled), "min", among="votes"):  # every rank must reach this
                step.stepped = False
                dispatch.resume("after_step")
                step.clear()
                return
        dispatch.resume("before_step")
        self.learn._step()
        step.note_optimizer_step()

    @collective
    def after_cancel_backward(self) -> None:
        step = self.step
        if self._is_alone():
            return
        if not (step.kept or step.mean.begun) and any(p.grad is not None for p in step.params.values()):
            raise RuntimeError(
                "a callback made a backward pass of its own and raised CancelBackwardException: on several processes a "
                "batch whose backward pass is cancelled counts nothing, so that these gradients would be lost. Change "
                "`learn.loss_grad` in before_backward instead, of which the loop makes the pass, or override _backward"
            )
        self.finish_backward()

    after_cancel_step, after_cancel_batch = step_unless_all_skip, finish_batch


class StandIn(Callback):
    """Removes the stand-in sample of a rank without data after the step, so that nothing counts it.

    Args:
        step: of the ranks.
    """

    order = -20
    run_valid = False
    __repr__ = LeftBatch.__repr__

    def __init__(self, step: RankStep) -> None:
        self.step = step

    def after_batch(self) -> None:
        learn = self.learn
        self.step.joined.close()
        if not learn.batch_size:
            for name in ("batch", "xb", "yb", "pred", "output"):
                setattr(learn, name, cut_rows(getattr(learn, name), 0, 0, 0))
