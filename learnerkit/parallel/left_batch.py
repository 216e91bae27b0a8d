"""A batch of which this rank has no data, or that it has left: with weight 0 it joins what the others wait for."""

from contextlib import suppress
from typing import cast

from torch import nn

from learnerkit import distributed
from learnerkit.callback import Callback
from learnerkit.events import CancelException
from learnerkit.gradient_mean import StepGradient, counts_something
from learnerkit.losses import output_of, pass_kept
from learnerkit.parallel.agreement import STEP
from learnerkit.parallel.loaders import first_rows
from learnerkit.parallel.model_checks import rank_norms
from learnerkit.parallel.rank_step import RankStep
from learnerkit.utils import overrides


class LeftBatch(Callback):
    """Takes part for this rank in the collectives of a batch that it does not finish by itself.

    It is the part of `DistributedCallback` that runs at each training batch, for as long as a fit lasts.

    Args:
        step: of the ranks.
    """

    order = 11
    run_valid = False

    def __init__(self, step: RankStep) -> None:
        super().__init__()
        self.step = step
        # An attribute rather than a method, so that a batch passes one file less on its way.
        self.before_batch = step.before_batch
        if overrides(step.learn, "_step"):  # which may step without the optimizer's `step`
            self.after_step = step.note_optimizer_step

    def __repr__(self) -> str:
        return "DistributedCallback"

    def begin(self) -> None:
        """Begin a batch without data, on which the model runs as on any other.

        A learner with a `_backward` of its own, which may make anything of it, gets a real sample, which weighs
        nothing, and so does a model that cannot run on nothing. A model that asks the ranks would count it.
        """
        learn = self.learn
        learn.batch_size = 0
        if asks_ranks(learn.model):
            return
        if overrides(learn, "_backward") or learn.shards is not None:
            # Of a sharded model a pass that fails cannot be followed by another: other ranks gather the next unit.
            self._take_sample()
        else:
            vars(learn)["_forward"] = self._forward

    def _take_sample(self) -> None:
        learn = self.learn
        learn.batch, learn.xb, learn.yb = learn._unpack.split(learn.dl.sample)

    def _forward(self) -> None:
        """Run the model on no samples, and if it cannot do that, on a real one."""
        learn = self.learn
        del vars(learn)["_forward"]
        try:
            learn._forward()
        except CancelException:
            raise
        except Exception:
            self._take_sample()
            learn._forward()

    def finish_batch(self) -> None:
        """Do, with weight 0, what the other ranks wait for in this batch, if this rank has not done it."""
        learn, step = self.learn, self.step
        self.finish_backward()
        if learn.step_due and float(step.mean.counted):  # a host-device sync; only where a rank has left a batch
            self.step_unless_all_skip()
        if step.stepped and step.dispatch.resume("after_step"):
            learn._zero_grad()  # as the others do

    def finish_backward(self) -> None:
        """Take part in the reduction of the gradients without data, if this rank has left its backward pass out."""
        learn, step, dispatch = self.learn, self.step, self.step.dispatch
        if step.reduced:
            return
        dispatch.resume("before_batch")  # schedules, for one: the step will be taken here, too
        vars(learn).pop("_forward", None)
        with pass_kept(learn):
            learn.batch_size = 0
            if overrides(learn, "_backward"):  # whose passes, and the steps in it, this rank must make, too
                learn._forward()
                learn._loss()
            elif output_of(learn) is None and (learn.shards is not None or asks_ranks(learn.model)):
                if getattr(learn._gradient, "is_inside", False):
                    raise RuntimeError(
                        f"a cancel in the middle of the model's forward pass on rank {distributed.rank()}, where the "
                        "other ranks wait for it to gather the next unit of the sharded model: raise it in an event of "
                        "a callback, such as after_pred"
                        " (errors.html#sharded)"
                    )
                learn.xb = first_rows(learn.xb, 0, int(learn.shards is not None and not rank_norms(learn.model)))
                with suppress(CancelException):  # that of a hook of the model, again
                    learn._forward()
            cast(StepGradient, learn._gradient).backward()
        if learn.step_due and not (step.kept or float(step.mean.counted)):  # no rank had data: as if it had not been
            learn._zero_grad()

    def step_unless_all_skip(self) -> None:
        """Take the optimizer step that this rank would have left out, unless all ranks leave it out."""
        step, dispatch = self.step, self.step.dispatch
        if step.stepped is not None:
            return
        events = ["after_backward", "before_step"]
        if step.all_skip(STEP):
            # Where all have cancelled the last batch of an accumulated step, the step is taken with the others.
            if distributed.reduce(int(counts_something(step.count)), "max", among="votes"):
                step.stepped = False
                return
            del events[0]
        for event in events:
            dispatch.resume(event)  # what clips here has clipped there
        self.learn._step()
        step.note_optimizer_step()

    after_cancel_backward, after_cancel_step, after_cancel_batch = finish_backward, step_unless_all_skip, finish_batch


class StandIn(Callback):
    """Takes a rank's sample away once the step is over, so that nothing counts it after the batch."""

    order = -20
    run_valid = False

    def after_batch(self) -> None:
        learn = self.learn
        if not learn.batch_size:
            for name in ("batch", "xb", "yb", "pred", "output"):
                setattr(learn, name, first_rows(getattr(learn, name), 0, 0))


def asks_ranks(model: nn.Module) -> bool:
    """Tell whether a model's forward pass has collectives of torch's, which run on nothing, too."""
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
