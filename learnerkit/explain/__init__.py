"""Explanations of errors inside the model, the loss, a loader or a metric: a note with advice and with the inputs.

They are made from the traceback of an error that has been raised and from the learner's batch: types and shapes, and
the values of tensors on the CPU. A device is not touched, as it may be out of order, and nothing is run again.
"""

import dis
from inspect import getdoc
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
from torch import nn

from learnerkit.endings import ending_of
from learnerkit.events import CancelException
from learnerkit.explain import mends
from learnerkit.explain.workers import lost_worker, worker_without_fork
from learnerkit.state import Learner
from learnerkit.text import escaped_line
from learnerkit.utils import unwrap
from learnerkit.values import describe

_LOADING = "torch.utils.data."
LONGEST = 500  # characters of a line


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that the memory of a device, or of the host, is full; no other error counts."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    full = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in full)


class Explanation(str):
    """A note that explains an error; an error gets one."""


def explain(learn: "Learner", error: Exception) -> None:
    """Add a note to an error of a run: what to do about it, if that is known, and what the part that failed got."""
    _note(error, explanation(learn, error))


def explain_metric(error: Exception, name: str, pred: Any, yb: tuple) -> None:
    """Add a note to an error of a metric."""
    got = f"metric {name!r} got predictions: {describe(pred)}; targets: {describe(yb)}"
    _note(error, [mends.of_metric(_frames(error)), got])


def explanation(learn: "Learner", error: Exception) -> list[str]:
    """Return the lines of an error's note; what to do comes first. An error that has a note gets no other."""
    notes = getattr(error, "__notes__", ())
    known = any(isinstance(note, Explanation) or note.startswith("the loss got") for note in notes)
    if known or ending_of(error).follows:
        return []
    try:
        return _lines(learn, error)
    except Exception:  # code of the user's, such as a `__repr__`; the error itself must get through
        return []


def _note(error: Exception, lines: list[str]) -> None:
    cut = (line if len(line) <= LONGEST else f"{line[:LONGEST]} ..." for line in lines if line)
    if text := "\n".join(map(escaped_line, cut)):
        error.add_note(Explanation(text))


def _frames(error: Exception) -> list[FrameType]:
    return [frame for frame, _ in walk_tb(error.__traceback__)]


def _lines(learn: "Learner", error: Exception) -> list[str]:
    frames, text = _frames(error), str(error)
    names = {frame.f_code.co_name for frame in frames}
    loads = any(frame.f_globals.get("__name__", "").startswith(_LOADING) for frame in frames)
    if loads and (lost := lost_worker(error, frames) or worker_without_fork(learn, error, frames)):
        return [lost]
    if isinstance(error, CancelException):
        return [f"this event is outside of what {type(error).__name__} ends; what it does: {getdoc(error)}"]
    if _speaks_for_itself(error):
        return []
    if alone := mends.of_run(learn, error, text):
        return [alone]
    mend = mends.of_device(text) or mends.of_predict(learn, frames)
    if loads:
        samples = mends.samples_of(frames)
        first = describe(next(iter(samples.values()), None))
        collates = any("_utils.collate" in frame.f_globals.get("__name__", "") for frame in frames)
        if collates or "_utils/collate.py" in text:  # the text of a worker has its traceback
            mend = mend or mends.of_samples(samples, text)
        return [mend, f"the samples are such as {first}" if samples else ""]
    if "take_loss" in names:
        got = f"the loss got predictions: {describe(learn.pred)}; targets: {describe(learn.yb)}"
        return [mend or mends.of_loss(learn, frames, text), got]
    model = unwrap(learn.model)
    name, layer, given = _innermost(frames, model)
    in_checkpoint = any(frame.f_globals.get("__name__") == "torch.utils.checkpoint" for frame in frames)
    if in_checkpoint and "_weighted_backward" in names and "_forward" not in names and not is_out_of_memory(error):
        mend = mend or mends.SECOND_TIME
    mend = mend or ("" if name else mends.of_call(learn, text)) or mends.of_comparison(frames, text)
    lines = [mend or (mends.of_layer(layer, given, text) if layer is not None else "")]
    if name:
        settings = layer.extra_repr()
        what = f"in {name} ({type(layer).__name__})" + (f": {settings}" if settings else "")
        lines.append(f"{what}; it got {describe(given[0] if len(given) == 1 else given)}")
    if "_forward" in names:
        lines.append(f"the model got {describe(learn.xb)}" + (f"; targets: {describe(learn.yb)}" if learn.yb else ""))
    return lines


def _speaks_for_itself(error: Exception) -> bool:
    """Tell whether an error comes from a `raise` or an `assert` outside torch: whoever wrote it says what is wrong."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_globals.get("__name__", "").startswith("torch."):
        return False
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def _innermost(frames: list[FrameType], model: nn.Module) -> tuple[str, Any, tuple]:
    """Return the innermost module of a model that was running: its name, the module, and its inputs."""
    names, innermost = {id(module): name for name, module in model.named_modules()}, None
    for frame in reversed(frames):
        own = frame.f_locals
        module = own.get("self")
        if id(module) not in names or (innermost is not None and module is not innermost):
            continue
        innermost = module
        if isinstance(own.get("args"), tuple) and isinstance(own.get("kwargs"), dict):  # where torch calls it
            return names[id(module)], module, (*own["args"], *own["kwargs"].values())
    return names.get(id(innermost), ""), innermost, ()
