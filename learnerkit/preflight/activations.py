"""The memory that a batch keeps for its backward pass, and what recomputing activations saves and costs."""

import time

import torch

from learnerkit.callback import running
from learnerkit.callbacks.recomputing import ActivationCheckpointing
from learnerkit.data.batches import rows_of
from learnerkit.inspection.summary import bytes_beside, counting_kept
from learnerkit.inspection.undoing import trial
from learnerkit.marks import collective
from learnerkit.parallel import will_shard
from learnerkit.preflight.prediction import Seen
from learnerkit.preflight.report import Finding, fine
from learnerkit.state import Learner
from learnerkit.text import in_units
from learnerkit.utils import unwrap
from learnerkit.values import tensors_in

_RUNS = 4
"""The fastest of these counts; the first one is slower."""


@collective
def judge_activations(learn: "Learner", seen: Seen | None) -> list[Finding]:
    """Measure on a training batch what ActivationCheckpointing saves and costs, or what a sharded model keeps.

    It waits for the device. Every rank of a sharded model must reach this.

    Args:
        learn: the learner.
        seen: this rank's batch; `None`: it has no data.
    """
    cb = next(iter(running(learn.cbs, ActivationCheckpointing)), None)
    if cb is None and will_shard(learn):
        return [fine(f"a batch keeps {in_units(_kept(learn, seen))} for its backward pass")]
    if cb is None or seen is None:
        return []
    with cb.recomputed(learn.model):
        kept, seconds = _measured(learn, seen)
    text = f"{in_units(kept)} are kept for the backward pass"
    try:
        whole, least = _measured(learn, seen)
    except torch.OutOfMemoryError:
        return [fine(f"{text}; all of them are more than the device holds")]
    longer = max(0.0, seconds / least - 1)
    return [fine(f"{text} instead of {in_units(whole)}; it takes {longer:.0%} more time than to keep them")]


@collective
def _kept(learn: "Learner", seen: Seen | None) -> int:
    """Return the bytes that a batch keeps; the forward pass of each rank gathers what it needs."""
    model = unwrap(learn.model)
    shards = learn.shards
    size = 0
    if shards is not None:
        shards.begin_votes()
    if seen is not None:
        with trial(learn, model.train()), counting_kept(learn) as kept:
            _forward(learn, seen)
            size = bytes_beside(model, kept)  # Gathered parameters are the model's own.
    if shards is not None:
        shards.help()
        shards.end_votes()
    return size


def _measured(learn: "Learner", seen: Seen) -> tuple[int, float]:
    """Return the bytes that a batch keeps, and the seconds of its forward and backward pass."""
    from learnerkit.scaling.parts import waiter  # Most fits do not need it.

    model = unwrap(learn.model)
    wait = waiter(learn.dls.device)
    seconds = list[float]()
    with trial(learn, model.train()):
        for _ in range(_RUNS):
            with counting_kept(learn) as kept:
                wait()
                start = time.perf_counter()
                _forward(learn, seen)
                torch.stack([t.float().sum() for t in tensors_in(learn.output) if t.requires_grad]).sum().backward()
                wait()
                seconds.append(time.perf_counter() - start)
    return bytes_beside(model, kept), min(seconds)


def _forward(learn: "Learner", seen: Seen) -> None:
    """Run the model on a batch as it was when callbacks had changed it."""
    learn.batch, learn.xb, learn.yb = seen
    learn.batch_size = rows_of(learn.xb)
    learn._forward()
