"""Trials with the first batch of a rank, which leave no trace: can the model run without samples, what is unused."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from learnerkit.parallel.drift import digests
from learnerkit.parallel.loaders import emptied
from learnerkit.snapshot import trial
from learnerkit.torch_internals import BatchNorm

if TYPE_CHECKING:
    from learnerkit.learner import Learner


class Trial(NamedTuple):
    """What a batch of this rank has shown.

    Attributes:
        unused: names of the trainable parameters that the loss does not depend on; `None`: it could not be found out,
            or there are sparse gradients, which DDP cannot take from a rank without samples.
        buffers: fingerprints of the buffers after it, by name, without those of BatchNorm.
    """

    unused: list[str] | None
    buffers: dict[str, str]


def name_beside(p: nn.Parameter) -> str:
    """What to call a trained parameter that the model does not have."""
    return f"a parameter beside the model {tuple(p.shape)}"


def runs_on_nothing(learn: "Learner", model: nn.Module) -> bool:
    """Tell whether the model can train on a batch without samples (a `view(len(x), -1)` cannot)."""
    with trial(learn, model), torch.enable_grad():
        for module in model.modules():
            if isinstance(module, BatchNorm):
                module.eval()  # in which it asks no other ranks
        learn.xb = emptied(learn.xb)
        try:
            learn._forward()
        except Exception:
            return False
    return True


def try_batch(learn: "Learner", model: nn.Module, beside: Sequence[nn.Parameter]) -> Trial:
    """Run the batch forward and backward, and leave no trace.

    Args:
        learn: the learner.
        model: its model, without DDP.
        beside: parameters that are trained with the model's.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    named += [(name_beside(p), p) for p in beside]
    found = Trial([], {})
    loss = learn.loss_func if isinstance(learn.loss_func, nn.Module) else nn.Module()
    with trial(learn, model):
        try:
            learn._forward()  # without data, too: the model may ask other ranks, as SyncBatchNorm does
            if learn.batch_size:
                learn._loss()
                found = found._replace(buffers=_fingerprints(model, loss))
                grads = torch.autograd.grad(learn.loss_grad, [p for _, p in named], allow_unused=True)
                unused = [name for (name, _), grad in zip(named, grads, strict=True) if grad is None]
                dense = all(grad is None or grad.layout is torch.strided for grad in grads)
                found = found._replace(unused=unused if dense else None)
        except Exception:  # the loop will run into it, too, and say what is wrong, unless it is of this trial alone
            found = found._replace(unused=None)
    return found


def _fingerprints(model: nn.Module, loss: nn.Module) -> dict[str, str]:
    """The contents of buffers by name; a host-device sync."""
    named: dict[str, Tensor] = {}
    for prefix, module in (("", model), ("the loss's ", loss)):
        norms = {id(b) for m in module.modules() if isinstance(m, BatchNorm) for b in m.buffers()}
        named |= {prefix + name: b for name, b in module.named_buffers() if id(b) not in norms}
    return dict(zip(named, map(str, digests(list(named.values()))), strict=True))
