"""Gradients that are averaged after a backward pass, by one function, whichever of them a rank has."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from learnerkit import world
from learnerkit.gradient_mean import counts_something
from learnerkit.torch_internals import call_after_backward, forget_removed_hooks

if TYPE_CHECKING:
    from learnerkit.parallel.rank_step import RankStep

_DENSE, _SPARSE = 1, 1000  # what a rank that gives a gradient adds: so many ranks can be told apart
_CHUNK = 25 * 2**20  # bytes of gradients that are sent together, so that the copy stays small


class Passes:
    """Averages, at its end, each backward pass that DDP does not: those of a `_backward`, a `_step` or a callback.

    What is averaged already stays what it is, since it is the same on all ranks, and their weights have a mean of 1.

    Args:
        step: of the ranks, whose parameters these are.

    Attributes:
        averaged: the gradients that are averaged, by their parameters.
    """

    def __init__(self, step: "RankStep") -> None:
        self.step, self.params = step, list(step.params.values())
        self.averaged: dict[nn.Parameter, Tensor] = {}
        self._open = False
        self._touched: set[nn.Parameter] = set()  # in the pass that is running
        self._before: dict[nn.Parameter, Tensor] = {}  # what the pass of a loss that sums adds to
        self._hooks = [p.register_post_accumulate_grad_hook(self._note) for p in self.params]
        if step.mean.sums:
            self._hooks += [p.register_hook(self._keep) for p in self.params]

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        for p in self.params:
            forget_removed_hooks(p)
        self.close()

    def open_now(self) -> None:
        """Average the passes from here on; the gradients that are there are averaged."""
        self._open = True
        if self.step.progress.reduced:
            self.averaged = {p: p.grad for p in self.params if p.grad is not None}

    def close(self) -> None:
        """Leave the passes alone from here on."""
        self._open = False
        self.averaged.clear()

    def _keep(self, grad: Tensor) -> None:
        if self._open and not self._touched and not self._before:  # the first gradient of a pass is not in its place
            self._before = {p: p.grad.clone() for p in self.params if p.grad is not None}

    def _note(self, p: Tensor) -> None:
        if self._open:
            if not self._touched:
                call_after_backward(self._end)
            self._touched.add(p)  # type: ignore[arg-type]

    def _end(self) -> None:
        touched, before = self._touched, self._before
        self._touched, self._before = set(), {}
        for p, grad in before.items():
            if p.grad is not None:
                p.grad -= grad
        self._average([p in touched for p in self.params])
        for p, grad in before.items():
            self.averaged[p] = p.grad = grad if p.grad is None else p.grad + grad

    def _average(self, new: list[bool]) -> None:
        step, count = self.step, self.step.count
        vector = step.message.vector(count, None)
        average_gradients(self.params, new, vector, step.weight, counts_something(count), averaged=self.averaged)

    def before_optimizer(self, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Average what has been put into `p.grad`, and let a closure return the loss of all ranks.

        It is a hook of the `step` of the optimizers of a learner that overrides `_backward` or `_step`.
        """
        if not self._open:
            return None
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._together(args[1]), *args[2:]), kwargs
        closure = kwargs.get("closure")
        if closure is not None:
            return args, {**kwargs, "closure": self._together(closure)}
        if not self.step.mean.sums:  # of a sum it could not be told what is averaged in it
            self._average(not_averaged(self.params, self.averaged))
        return None

    def _together(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that returns the loss of all ranks, so that they all go on alike."""

        def together() -> Any:
            with torch.enable_grad():
                loss = closure()
            if loss is None:
                return None
            step, loss = self.step, torch.as_tensor(loss).detach()
            count = torch.as_tensor(1.0 if step.mean.sums else step.count, dtype=torch.float64, device=loss.device)
            mine = count if counts_something(step.count) else torch.zeros_like(count)
            # A host-device sync comes with the optimizer's own look at the loss.
            weighed = torch.where(mine > 0, loss.double() * mine, 0.0)  # of nothing there may be a NaN
            total, counted = world.reduce(torch.stack([weighed, mine]), "sum").unbind()
            return (total if step.mean.sums else total / counted).to(loss)

        return together


def not_averaged(params: Sequence[nn.Parameter], averaged: dict[nn.Parameter, Tensor]) -> list[bool]:
    """Tell of each parameter whether it has a gradient that is not the one that was averaged."""
    return [p.grad is not None and averaged.get(p) is not p.grad for p in params]


@torch.no_grad()
def average_gradients(
    params: Sequence[nn.Parameter],
    new: Sequence[bool],
    vector: Tensor,
    weight: Callable[[float], float | Tensor] | None,
    counts: bool,
    among: str = "",
    averaged: dict[nn.Parameter, Tensor] | None = None,
) -> Tensor:
    """Put the mean over the ranks into gradients, whichever of them each rank has; every rank must reach this.

    A parameter to which no rank gives a gradient keeps what it has. A host-device sync.

    Args:
        params: the same on every rank.
        new: of which of them this rank has a gradient that is not averaged yet.
        vector: of this rank, reduced on the way.
        weight: returns what this rank's gradients are multiplied by, from the mean of the vectors' first entries;
            `None`: they are weighed already.
        counts: whether this rank counts anything; if not, what `weight` would weigh is left out.
        among: as in `world.reduce`.
        averaged: gets the gradients that are averaged, by their parameters.

    Returns:
        The mean of the vectors.
    """
    gives = counts or weight is None
    kinds = [_mark(p.grad) if gives and is_new else 0 for p, is_new in zip(params, new, strict=True)]
    mine = torch.tensor(kinds, dtype=torch.float64, device=vector.device)
    total = world.reduce(torch.cat([vector.double(), mine]), "mean", among)
    first, *numbers = total.tolist()
    factor = 1.0 if weight is None else weight(first) if counts else 0.0
    marks = [round(number * world.world_size()) for number in numbers[len(vector) - 1 :]]
    chunk: list[tuple[nn.Parameter, Tensor]] = []
    size = 0
    for p, is_new, found in zip(params, new, marks, strict=True):
        if not found:
            p.grad = None if is_new else p.grad  # left out, and nobody else has any
            continue
        grad = _scaled(p.grad, factor)
        if found >= _SPARSE:
            p.grad = _reduce_sparse(p, grad)
            continue
        pair = p, torch.zeros_like(p) if grad is None else grad
        if chunk and (_kind(pair[1]) != _kind(chunk[0][1]) or size > _CHUNK):
            _reduce_dense(chunk, among)
            chunk, size = [], 0
        chunk.append(pair)
        size += pair[1].nbytes
    _reduce_dense(chunk, among)
    if averaged is not None:
        averaged |= {p: p.grad for p, found in zip(params, marks, strict=True) if found and p.grad is not None}
    return total[: len(vector)].to(vector.dtype)


def _mark(grad: Tensor | None) -> int:
    return 0 if grad is None else _DENSE if grad.layout is torch.strided else _SPARSE


def _kind(grad: Tensor) -> tuple:
    return grad.dtype, grad.device


def _scaled(grad: Tensor | None, factor: float | Tensor) -> Tensor | None:
    if grad is None or (not isinstance(factor, Tensor) and factor == 1):
        return grad
    if isinstance(factor, Tensor) and grad.layout is torch.strided:
        return torch.where(factor > 0, grad * factor, 0.0).to(grad.dtype)  # of nothing there may be a NaN
    return grad * factor if isinstance(factor, Tensor) or factor else None


def _reduce_dense(pairs: list[tuple[nn.Parameter, Tensor]], among: str) -> None:
    """Put the mean over the ranks into the gradients of parameters of one type; divided first, as DDP does."""
    if not pairs:
        return
    sent = torch.cat([grad.reshape(-1) for _, grad in pairs]).mul_(1 / world.world_size())
    mean = world.reduce(sent, "sum", among)
    for (p, _), piece in zip(pairs, mean.split([p.numel() for p, _ in pairs]), strict=True):
        if p.grad is None or p.grad.layout is not torch.strided:
            p.grad = piece.view_as(p).clone()
        else:
            p.grad.copy_(piece.view_as(p))


def _reduce_sparse(p: nn.Parameter, grad: Tensor | None) -> Tensor:
    if grad is None:
        size = (0, *p.shape[1:])
        grad = torch.sparse_coo_tensor(
            torch.zeros(1, 0, dtype=torch.long), p.new_zeros(size), p.shape, device=p.device,
            check_invariants=False,
        )  # fmt: skip
    grad = (grad if grad.layout is torch.sparse_coo else grad.to_sparse(1)).coalesce().clone()
    dist.all_reduce(grad, group=world.group("gradients", grad.device.type))
    return (grad / world.world_size()).coalesce()
