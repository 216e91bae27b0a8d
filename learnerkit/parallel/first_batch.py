"""Trials with the first batch of a rank, which leave no trace: can the model run without samples, what is unused."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from learnerkit.gradient_mean import zero_loss
from learnerkit.losses import MEANS, possible_means
from learnerkit.parallel.loaders import emptied
from learnerkit.snapshot import trial

if TYPE_CHECKING:
    from learnerkit.learner import Learner


def runs_on_nothing(learn: "Learner", model: nn.Module) -> bool:
    """Tell whether the model can run on a batch without samples (a `view(len(x), -1)` cannot)."""
    with trial(learn, model), torch.no_grad():
        model.eval()  # in which no BatchNorm asks other ranks
        learn.xb = emptied(learn.xb)
        try:
            learn._forward()
        except Exception:
            return False
    return True


def try_batch(learn: "Learner", model: nn.Module) -> tuple[list[str], list[str]]:
    """Run the batch forward and backward, and leave no trace.

    Returns:
        The names of the trainable parameters that the loss does not depend on; and what a loss of the model's own may
        be the mean over (all that is possible, if there are no data). No names if the model fails.
    """
    named, means = [(name, p) for name, p in model.named_parameters() if p.requires_grad], list(MEANS)
    with trial(learn, model):
        try:
            learn._forward()  # without data, too: the model may ask other ranks, as SyncBatchNorm does
            if learn.batch_size:
                learn._loss()
                if learn._loss_weighting.votes:
                    means = possible_means(learn.yb, learn.pred, learn.loss, learn.xb)
            else:
                learn.loss_grad = zero_loss(learn._model_output)
            grads = torch.autograd.grad(learn.loss_grad, [p for _, p in named], allow_unused=True)
        except Exception:  # the loop will run into it, too, and say what is wrong
            return [], means
    return [name for (name, _), grad in zip(named, grads, strict=True) if grad is None], means
