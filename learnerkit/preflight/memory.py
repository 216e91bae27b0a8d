"""The memory that a step needs: its parts and its peak, whether a batch fits, and what would make it fit."""

import re

from torch import Tensor

from learnerkit.callback import Callback
from learnerkit.callbacks.accumulation import GradientAccumulation
from learnerkit.callbacks.precision import MixedPrecision
from learnerkit.callbacks.recomputing import ActivationCheckpointing
from learnerkit.inspection.undoing import state_tensors
from learnerkit.preflight.prediction import MARGIN, Prediction, Seen, fake_steps, predict_memory
from learnerkit.preflight.report import HINT, WRONG, Finding, fine, unchecked
from learnerkit.processes.rank_main import forget_frames
from learnerkit.shards import local
from learnerkit.state import Learner
from learnerkit.text import counted, in_units
from learnerkit.utils import memory_of, unwrap
from learnerkit.values import n_bytes

_UNITS = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6}

_NOTE = "the memory:"
"""The beginning of the note that an error gets."""


def bytes_of(memory: str | int | None) -> int | None:
    """Convert the `memory` of `Learner.check` to a number of bytes.

    Raises:
        TypeError, ValueError: it is neither such a text, nor a number above 0.
    """
    if memory is None:
        return None
    if isinstance(memory, bool) or not isinstance(memory, str | int):
        raise TypeError(f"got memory={memory!r}; it is a text such as '24GiB', or a number of bytes as an int")
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|MB)\s*", str(memory))
    size = round(float(match[1]) * _UNITS[match[2]]) if match else memory
    if isinstance(size, int) and size > 0:
        return size
    raise ValueError(
        f"got memory={memory!r}; it is a number above 0 with one of the units {', '.join(_UNITS)}, such as '24GiB', or "
        "a number of bytes"
    )


def judge_shards(learn: "Learner", memory: str | int | None) -> list[Finding]:
    """Count the bytes of a sharded model on this rank, after a step and before its gradients are cleared.

    Args:
        learn: the learner.
        memory: as for `judge_memory`.
    """
    if learn.shards is None:
        return []
    whole = ", ".join(in_units(sum(t.numel() * t.itemsize for t in part)) for part in _kinds(learn).values())
    text = f"{_held(learn)} on this rank, of {whole} that are divided among {learn.n_ranks} ranks"
    if memory is None:
        return [fine(text)]
    return [unchecked(f"{text}; what a step needs beside these is not predicted for a sharded model")]


def judge_memory(learn: "Learner", seen: Seen, memory: str | int | None) -> list[Finding]:
    """Predict whether a training batch fits into the memory, and how large a batch would.

    Args:
        learn: the learner, after a step.
        seen: the batch.
        memory: that of the device that the fit is meant for, as in `Learner.check`; `None`: of the loaders' device.
    """
    prediction, room = predict_memory(learn, seen), bytes_of(memory) or memory_of(learn.dls.device)
    if isinstance(prediction, str):
        return [unchecked(f"not checked, as what a step needs cannot be predicted: {prediction}")]
    has = memory if isinstance(memory, str) else in_units(room)
    has = f"{has} ({100 * MARGIN:.0f} % assumed for fragmentation)"
    if prediction.fits(room, prediction.batch_size):
        return [fine(f"{_needs(prediction)}; up to {prediction.largest(room):,} fit in {has}")]
    if "split_batch" in _names(learn) and (most := prediction.largest(room)) > 0:
        parts = -(-prediction.batch_size // most)
        return [fine(f"{_needs(prediction)}; in {has} SplitBatch takes them in {parts} parts")]
    mark = HINT if memory is None else WRONG
    return [Finding(mark, f"{_needs(prediction)}; that does not fit in {has}", _ways(learn, seen, prediction, room))]


def explain_memory(learn: "Learner", error: Exception) -> None:
    """Add a note to an out-of-memory error: what a step needs, and what would make it fit.

    The tensors of the failed step are released first; the prediction itself takes no memory.
    """
    if any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
        return
    learn.pred = learn.output = learn.loss = learn.loss_grad = None
    forget_frames(error)
    try:
        error.add_note(f"{_NOTE} {_explained(learn)} (errors.html#out-of-memory)")
    except Exception:  # code of the user's, such as a `__repr__`; the error itself must get through
        return


def _explained(learn: "Learner") -> str:
    room, seen = memory_of(learn.dls.device), Seen(learn.batch, learn.xb, learn.yb)
    if not learn.training:
        ways = "" if "split_batch" in _names(learn) else "take SplitBatch(), or "
        return f"{_held(learn)}, of {in_units(room)}; in evaluation {ways}give the loader smaller batches"
    step = predict_memory(learn, seen, on=[fake_steps])
    if isinstance(step, str):
        return (
            f"{_held(learn)}, of {in_units(room)}; what a step needs cannot be predicted ({step}). "
            f"Try {', '.join(_less(learn))}, or learn.distrib_ctx(shard=True)"
        )
    if not step.fits(room, step.batch_size):
        return f"{_needs(step)}, of {in_units(room)}; {_ways(learn, seen, step, room, learn.n_ranks > 1)}"
    return (
        f"{_needs(step)}, which fits in {in_units(room)} unless other programs, callbacks or code of your own hold a "
        f"part of it. Less is needed with {' or '.join(_less(learn))}"
    )


def _names(learn: "Learner") -> set[str]:
    return {cb.name for cb in learn.cbs if cb.run}


def _less(learn: "Learner") -> list[str]:
    """Return the ways to save memory that the learner does not use yet."""
    ways = {
        "split_batch": "SplitBatch()",
        "activation_checkpointing": "ActivationCheckpointing()",
        "mixed_precision": "learn.to_bf16()",
    }
    return [*(way for name, way in ways.items() if name not in _names(learn)), "a smaller batch"]


def _kinds(learn: "Learner") -> dict[str, list[Tensor]]:
    params = list(unwrap(learn.model).parameters())
    return {
        "parameters": list[Tensor](params),
        "gradients": [p.grad for p in params if p.grad is not None],
        "optimizer": state_tensors(learn.opts),
    }


def _held(learn: "Learner") -> str:
    """Describe the bytes that parameters, gradients and optimizer state take on this rank now."""
    return ", ".join(f"{kind} {in_units(n_bytes(map(local, part)))}" for kind, part in _kinds(learn).items())


def _needs(step: Prediction) -> str:
    """Describe the memory that a step on a batch needs."""
    return (
        f"{counted(step.batch_size, 'sample')} take{'s' if step.batch_size == 1 else ''} {in_units(step.peak)}: "
        f"parameters {in_units(step.parameters)}, gradients {in_units(step.gradients)}, optimizer "
        f"{in_units(step.optimizer)}, activations {in_units(step.per_sample)} a sample"
    )


def _ways(learn: "Learner", seen: Seen, prediction: Prediction, room: float, waits: bool = False) -> str:
    """Name changes that would make a batch fit, by fake steps; if other ranks wait, by `prediction` alone."""

    def predicted(*cbs: Callback) -> Prediction | None:
        added = "" if waits else predict_memory(learn, seen, cbs, [fake_steps])
        return None if isinstance(added, str) else added

    n, ways = prediction.batch_size, dict[str, float]()
    # The gradients of a part are kept while the next one is computed, as in an accumulation.
    split = predicted(GradientAccumulation(n_batches=2)) or prediction.with_more(prediction.gradients)
    if 0 < (most := split.largest(room)) < n:
        parts = -(-n // most)
        ways[f"SplitBatch({parts})"] = split.at(-(-n // parts))
    again, half = ActivationCheckpointing(), MixedPrecision("bf16")
    tries: dict[str, list[Callback]] = {
        "ActivationCheckpointing()": [again],
        "learn.to_bf16()": [half],
        "ActivationCheckpointing() and learn.to_bf16()": [again, half],  # if neither is enough
    }
    has = {type(cb) for cb in learn.cbs if cb.run}
    for name, cbs in tries.items():
        if not has & set(map(type, cbs)) and (len(cbs) == 1 or not ways):
            with_these = predicted(*cbs)
            if with_these and with_these.fits(room, n):
                ways[name] = with_these.peak
    if most := prediction.largest(room):
        ways[f"batches of at most {most}"] = prediction.at(most)
    divided = prediction.parameters + prediction.optimizer  # Not all gradients may be there at the peak.
    shares = {ranks: prediction.peak - divided * (1 - 1 / ranks) for ranks in (2, 4, 8, 16, 32, 64)}
    if few := next((ranks for ranks, size in shares.items() if size <= room * (1 - MARGIN)), 0):
        ways[f"learn.distrib_ctx(shard=True) on {few} ranks"] = shares[few]
    text = ", or ".join(f"{name} (about {in_units(size)})" for name, size in ways.items())
    return f"it fits with {text}" if ways else "nothing that is known makes it fit: take a smaller model or samples"
