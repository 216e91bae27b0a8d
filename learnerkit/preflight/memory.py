"""What a step needs of the memory: parameters, gradients and the optimizer's state, on this rank and as a whole."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from learnerkit.data.batches import tensors_in
from learnerkit.preflight.report import HINT, OK, Finding
from learnerkit.shards import local
from learnerkit.text import in_units
from learnerkit.utils import memory_of, unwrap

if TYPE_CHECKING:
    from learnerkit.learner import Learner

_MUCH = 0.5
"""The share of the device's memory from which on it is worth a hint: activations need some, too."""


def judge_memory(learn: "Learner") -> list[Finding]:
    """Count the bytes on this rank, after a step and before its gradients are cleared.

    It says so of a sharded model, and of another one that takes much of the memory of its device.
    """
    params = list(unwrap(learn.model).parameters())
    kinds: dict[str, list[Tensor]] = {
        "parameters": list(params),
        "gradients": [p.grad for p in params if p.grad is not None],
        "optimizer": [t for opt in learn.opts for state in opt.state.values() for t in tensors_in(state)],
    }
    here = {kind: _bytes(tensors, lambda t: local(t).nbytes) for kind, tensors in kinds.items()}
    text = ", ".join(f"{kind} {in_units(size)}" for kind, size in here.items())
    if learn.shards is not None:
        whole = {kind: _bytes(tensors, lambda t: t.numel() * t.itemsize) for kind, tensors in kinds.items()}
        all_of = ", ".join(map(in_units, whole.values()))
        return [Finding(OK, f"{text} on this rank, of {all_of} that are divided among {learn.n_ranks} ranks")]
    room = memory_of(learn.dls.device)
    if sum(here.values()) < _MUCH * room:
        return []
    advice = "with learn.distrib_ctx(shard=True): each of several ranks then has its rows alone"
    return [Finding(HINT, f"{text}: {sum(here.values()) / room:.0%} of the {in_units(room)} that there are", advice)]


def _bytes(tensors: list[Tensor], size: Callable[[Tensor], int]) -> int:
    return sum(map(size, tensors))
