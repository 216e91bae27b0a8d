"""Collectives, which every rank must reach in the same order; on one process each is the identity."""

import functools
import hashlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from datetime import timedelta
from itertools import accumulate, groupby
from numbers import Number
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from learnerkit.distributed import seeds
from learnerkit.distributed.facts import (
    PeerError,
    default_device,
    is_joined,
    is_main,
    local_rank,
    rank,
    warn_once,
    within,
    world_size,
)
from learnerkit.distributed.meeting import await_all, count_call, group, join, store
from learnerkit.endings import may_follow
from learnerkit.marks import collective
from learnerkit.torch_internals import CollectiveRefusal
from learnerkit.utils import unbound, unexpanded
from learnerkit.values import TensorFunction, dense_parts, describe, digests, in_a_row, map_batch, tensors_in

P = ParamSpec("P")
T = TypeVar("T")

# The mean is the sum, divided at the end.
_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

_NOT_IN_GLOO = {torch.int16, torch.uint16, torch.uint32, torch.uint64}
"""Types of numbers that gloo does not reduce."""


def _wire(x: Tensor) -> Tensor:
    """Return `x` on a device of the process group: unchanged, or on the accelerator if the group has no CPU."""
    backends = dist.get_backend_config() if x.device.type == "cpu" else ""
    return x.to(default_device()) if backends and "cpu" not in backends else x


def _own_copy(x: Tensor) -> Tensor:
    """Return a copy of `x` to send, in a row: the ranks pair memory, in which a transposed tensor has another order."""
    copy = _wire(x.detach()).clone()
    return copy.contiguous() if copy.layout is torch.strided else copy


def _bytes(x: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes, because gloo cannot send every type; a sparse one as it is."""
    return in_a_row(x).view(torch.uint8) if x.layout is torch.strided else x


_refusal: ContextVar[Callable[[str], RuntimeError] | None] = ContextVar("refusal", default=None)


@contextmanager
def no_collectives(where: str, why: str = "") -> Iterator[None]:
    """Refuse collectives in this context, with an error that names `where`.

    Args:
        where: the code that runs in the context.
        why: the reason; by default that the other ranks may not come, and this one would wait for ever.
    """
    why = why or (
        "the other ranks may not come here (after a failure, or because it runs on rank 0 alone), so it would wait for "
        "ever; communicate in an event that all ranks reach"
    )

    def refuse(what: str) -> RuntimeError:
        return RuntimeError(f"{where} called {what}: {why} (errors.html#peers)")

    with within(_refusal, refuse), CollectiveRefusal(refuse) if is_joined() else nullcontext():
        yield


_before_collective: ContextVar[Callable[[], None] | None] = ContextVar("before_collective", default=None)


def before_collective(call: Callable[[], None] | None) -> AbstractContextManager[None]:
    """Call `call()` before each collective in this context; an exception of it keeps this rank from entering."""
    return within(_before_collective, call)


_none_moves: ContextVar[Callable[[], bool] | None] = ContextVar("none_moves", default=None)


def noticing_standstills(none_moves: Callable[[], bool]) -> AbstractContextManager[None]:
    """End the wait in `meet` within this context when `none_moves()` tells that all other ranks wait, too."""
    return within(_none_moves, none_moves)


_around_collective: ContextVar[Callable[[], AbstractContextManager]] = ContextVar("around", default=nullcontext)


def around_collectives(context: Callable[[], AbstractContextManager]) -> AbstractContextManager[None]:
    """Enter `context()` for each collective of this module in this context, to measure this rank's waits."""
    return within(_around_collective, context)


@contextmanager
@collective
def grouped_collectives() -> Iterator[None]:
    """Group several collectives: the ranks are asked only once, before the first, if all of them come."""
    call = _before_collective.get()
    if call is not None and world_size() > 1 and not _refusal.get():
        call()
    with before_collective(None):
        yield


@collective
def _has_peers(what: str, waits: bool = True) -> bool:
    """Tell whether there are other ranks for a collective, and join them first.

    Args:
        what: the collective's name; with a dot that of another function that users call.
        waits: every rank waits for the others in it.

    Raises:
        RuntimeError: inside `no_collectives`.
    """
    if world_size() == 1:
        return False
    name = what if "." in what else f"distributed.{what}"
    if refuse := _refusal.get():
        raise refuse(name)
    join(what=name)
    if waits and (call := _before_collective.get()) is not None:
        call()
    return True


MISMATCH = "mismatch between collectives"  # a text in torch's error

SAME_CALLS = "every rank must make the same calls, with tensors of one shape and type, in the same order"


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Add the meaning to an error of torch.distributed, which only mentions connections and fingerprints."""
    try:
        with _around_collective.get()():
            yield
    except RuntimeError as e:
        text = str(e)
        if MISMATCH in text:
            e.add_note(SAME_CALLS)
        if may_follow(e) and not isinstance(e, PeerError):  # a collective inside another one has told it
            raise PeerError(
                f"rank {rank()} called distributed.{what}, but another rank has ended, failed, or did not come; every "
                f"rank must make the same calls, in the same order ({text}) (errors.html#peers)"
            ) from e
        raise


@collective
def meet(what: str, timeout: float = 60.0) -> None:
    """Wait until every rank has made the same call.

    Args:
        what: the name of the call.
        timeout: seconds to wait.

    Raises:
        PeerError: some ranks did not come; the text names them.
    """
    if _has_peers(what):
        counter = f"learnerkit/meet/{what}/{rank()}"
        met = store().add(counter, 0)  # a call to which other ranks did not come does not count
        await_all(dist.PrefixStore(f"learnerkit/met/{what}/{met}", store()), what, timeout, _none_moves.get())
        store().add(counter, 1)


@collective
def barrier() -> None:
    """Wait until every rank is here."""
    if _has_peers("barrier"):
        with _explained("barrier"):
            dist.barrier()


@collective
def reduce(x: T, op: str = "sum", among: str = "") -> T:
    """Return `x` combined over all ranks, on every rank; `x` itself is not changed.

    Args:
        x: a tensor of the same shape on every rank, or a number. True counts as 1 in a sum and a mean.
        op: 'sum', 'mean', 'max' or 'min'.
        among: used by this package: the kind of the message, as in `group`.

    Raises:
        TypeError: neither a tensor nor a number; or the maximum or minimum of a sparse tensor.
        ValueError: an unknown `op`.
    """
    if not isinstance(x, Tensor | Number) and getattr(x, "ndim", None) != 0:  # numpy's bool is no `Number`
        raise TypeError(f"reduce got a {type(x).__name__}; it takes a tensor or a number (all_gather takes anything)")
    if op not in _OPS:
        raise ValueError(f"reduce got op={op!r}; it takes 'sum', 'mean', 'max' or 'min'")
    if op in ("max", "min") and isinstance(x, Tensor) and x.layout != torch.strided:
        raise TypeError(f"reduce got op={op!r} and a sparse tensor; it takes 'sum' or 'mean' of these: x.to_dense()")
    if not _has_peers("reduce"):
        return x
    wide = torch.float64 if isinstance(x, float) else torch.complex128 if isinstance(x, complex) else None
    local = x if isinstance(x, Tensor) else torch.tensor(x, dtype=wide)
    total: Any = _own_copy(local)
    if op == "mean" and total.itemsize < 4:
        total = total.float() if total.is_floating_point() else total.long()  # A sum may be too large for the type.
    elif total.dtype == torch.bool and op == "sum":
        total = total.long()  # The sum of truth values is their "or".
    kind = total.dtype
    # As signed numbers, those from 2**63 on would be less than all others, which a sum does not see.
    top = -(2**63) if kind == torch.uint64 and op in ("max", "min") else 0
    if kind in _NOT_IN_GLOO:
        total = total.long() ^ top
    with _explained("reduce"):
        if total.is_floating_point() and op in ("max", "min"):
            # The ranks' own maximum would be NaN or a number, by which of them has the NaN.
            parts = [torch.empty_like(total) for _ in range(world_size())]
            dist.all_gather(parts, total, group(among, total.device.type))
            total = getattr(torch.stack(parts), f"a{op}")(0)
        else:
            dist.all_reduce(total, _OPS[op], group(among, total.device.type))
    total = (total ^ top).to(kind) if top else total.to(kind)
    result = total.to(local.device) if isinstance(x, Tensor) else total.item()
    if op != "mean":
        return result
    mean = result / world_size()
    return mean.to(x.dtype) if isinstance(x, Tensor) and x.is_floating_point() else mean


@collective
def broadcast(x: T, src: int = 0, among: str = "") -> T:
    """Return rank `src`'s `x` on every rank: a tensor of the same shape everywhere, or any object that can be pickled.

    Args:
        x: this rank's object.
        src: the rank whose object is returned.
        among: used by this package, as in `reduce`.

    Raises:
        ValueError: there is no rank `src`.
    """
    if src not in range(world_size()):
        raise ValueError(f"broadcast got src={src!r}; the ranks are 0 to {world_size() - 1}")
    if not _has_peers("broadcast"):
        return x
    with _explained("broadcast"):
        if isinstance(x, Tensor):
            copy: Any = _own_copy(x)
            dist.broadcast(_bytes(copy), src, group(among, copy.device.type))
            return copy.to(x.device)
        box = [x]
        dist.broadcast_object_list(box, src, group(among))
        return box[0]


_ROW_BYTES = 25 * 2**20  # the size of tensors that are sent together, so that the copy stays small


@torch.no_grad()
@collective
def broadcast_into(tensors: Sequence[Tensor], among: str = "") -> None:
    """Copy rank 0's values of these tensors to every rank, in place, with few collectives."""
    _replace_together(tensors, functools.partial(broadcast, among=among))


@torch.no_grad()
@collective
def mean_into(tensors: Sequence[Tensor], among: str = "") -> None:
    """Replace each tensor by its mean over the ranks, in place, with few collectives; as in DDP, it divides first."""
    _replace_together(tensors, lambda row: reduce(row.mul_(1 / world_size()), among=among))


def _replace_together(tensors: Sequence[Tensor], call: TensorFunction) -> None:
    """Replace the values of tensors by `call` of their concatenations, each of one type and limited size."""
    # An expanded tensor, such as a mask that is one row, cannot be written in place.
    tensors = [unexpanded(part) for t in tensors for part in dense_parts(t)]
    for kind in dict.fromkeys((t.dtype, t.device) for t in tensors):
        alike = [t for t in tensors if (t.dtype, t.device) == kind]
        ends = accumulate(t.nbytes for t in alike)
        for _, pairs in groupby(zip(alike, ends, strict=True), key=lambda pair: pair[1] // _ROW_BYTES):
            row = [t for t, _ in pairs]
            values = call(torch.cat([t.reshape(-1) for t in row])).split([t.numel() for t in row])
            for t, value in zip(row, values, strict=True):
                t.copy_(value.view_as(t))


@collective
def give_values(tensors: Sequence[Tensor]) -> None:
    """Copy rank 0's values to all ranks where they differ; every rank must reach this. A host-device sync.

    Raises:
        ValueError: the shapes differ.
    """
    own = [part.shape for t in tensors for part in dense_parts(t)]
    shapes, values = zip(*all_gather((own, digests(tensors))), strict=True)
    if any(other != shapes[0] for other in shapes):
        raise ValueError("the model differs between ranks in its parameters' shapes; every rank must make the same")
    if any(other != values[0] for other in values):
        broadcast_into(tensors)  # otherwise ranks would train different models


@collective
def all_gather(x: T, among: str = "") -> list[T]:
    """Return the `x` of every rank, in rank order: tensors of one shape, or any objects that can be pickled.

    A tensor with a gradient, such as an embedding in a contrastive loss, gets the gradients of all ranks back, so that
    a loss over `torch.cat(all_gather(x))` trains as on one process. Such tensors may differ in their first dimension.
    Every rank must reach the backward pass, too. Tensors in a list, a tuple or a dict come without gradients.

    Args:
        x: this rank's object.
        among: used by this package, as in `reduce`.
    """
    if not _has_peers("all_gather"):
        return [x]
    with _explained("all_gather"):
        if isinstance(x, Tensor):
            if x.requires_grad and torch.is_grad_enabled():
                return list(_Gathered.apply(x)) if x.ndim else [part[0] for part in _Gathered.apply(x[None])]
            local = _wire(x.detach()).resolve_conj().resolve_neg().contiguous()
            parts: list = [torch.empty_like(local) for _ in range(world_size())]
            dist.all_gather([*map(_bytes, parts)], _bytes(local), group(among, local.device.type))
            return [p.to(x.device) for p in parts]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(x)):
            warn_once(
                f"all_gather got {describe(x)}, in which tensors have gradients: it passes gradients back to a tensor "
                "that it gets by itself, not to those in another object. Gather each by itself, or .detach() those of "
                "which only the values are needed"
            )
            x = map_batch(Tensor.detach, x)  # unpickled, they would take gradients, and pass none back
        everyone: list = [None] * world_size()
        dist.all_gather_object(everyone, x, group(among))
        return everyone


class _Gathered(torch.autograd.Function):
    """The tensors of all ranks; the gradient of each is the sum of those that the ranks have for it."""

    @staticmethod
    @collective
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        ctx.rows = all_gather(len(x))  # a host-device sync
        return tuple(part[:n] for part, n in zip(all_gather(_padded(x, ctx.rows)), ctx.rows, strict=True))

    @staticmethod
    @once_differentiable
    @collective
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        sums = reduce(torch.stack([_padded(gradient, ctx.rows) for gradient in gradients]))
        return sums[rank(), : ctx.rows[rank()]]


GATHERED = f"{_Gathered.__name__}Backward"
"""The name of the nodes in whose backward pass each rank waits for the others."""


def _padded(x: Tensor, rows: Sequence[int]) -> Tensor:
    return torch.cat([x, x.new_zeros(max(rows) - len(x), *x.shape[1:])])


@collective
def gather_pieces(pieces: Iterable[tuple[Any, Tensor]], on: str = "all") -> list[Tensor] | None:
    """Return the pieces of all ranks, in the order of their places.

    Ranks may hold different numbers of pieces, of any shapes and types, or none.

    Args:
        pieces: (place, tensor) pairs of this rank; a place is a number or a tuple, unique over all ranks.
        on: 'all', or 'rank0' if the other ranks need no result: they get `None`.
    """
    pieces = sorted(pieces, key=lambda piece: piece[0])
    if not _has_peers("gather_pieces"):
        return [tensor for _, tensor in pieces]
    # The pieces are cloned: a row cut from a matrix may be "contiguous" with strides that cannot be viewed as bytes. A
    # tensor of a subclass may have facts for each row (MONAI's), which its bytes do not have.
    plain = [(place, t.detach().as_subclass(Tensor).cpu()) for place, t in pieces]
    pieces = [(place, t.clone(memory_format=torch.contiguous_format)) for place, t in plain]
    # Bytes are sent, so that one exchange serves every type; shorter ranks pad to the longest.
    load = torch.cat([torch.empty(0).byte(), *(t.reshape(-1).view(torch.uint8) for _, t in pieces)])
    labels = all_gather([(place, t.shape, t.dtype, t.nbytes) for place, t in pieces])
    sizes = [[size for *_, size in label] for label in labels]
    padded = _wire(_padded(load, list(map(sum, sizes))))
    loads = [torch.empty_like(padded) for _ in sizes]
    with _explained("gather_pieces"):
        if on == "all":
            dist.all_gather(loads, padded)
        else:
            dist.gather(padded, loads if is_main() else None, dst=0)
    if on != "all" and not is_main():
        return None
    gathered = []
    for label, lengths, received in zip(labels, sizes, loads, strict=True):
        parts = received[: sum(lengths)].cpu().split(lengths)
        for (place, shape, dtype, _), part in zip(label, parts, strict=True):
            # The part is cloned, as a part of a row of bytes need not be aligned for its type.
            gathered.append((place, part.clone().view(dtype).reshape(shape)))
    return [tensor for _, tensor in sorted(gathered, key=lambda piece: piece[0])]


@collective
def same_everywhere(x: object) -> bool:
    """Tell whether `x` is equal on every rank (compared by `repr`: numbers and plain containers)."""
    first, *others = _digests(x)
    return all(other == first for other in others)


@collective
def _digests(x: object) -> list[list[int]]:
    """Return a digest of the `repr` of every rank's `x`."""
    # It is sent as a tensor, because an object takes two collectives: its length, and then it itself.
    return [digest.tolist() for digest in all_gather(torch.tensor([*hashlib.sha256(repr(x).encode()).digest()]))]


@collective
def rank0_first(f: Callable[..., T] | None = None, *args: Any, per_node: bool = False, **kwargs: Any) -> T | Callable:
    """Call `f` on rank 0, and only then on the others: `rank0_first(download, url)`; or `@rank0_first()`.

    The others wait as long as rank 0 needs. Every rank must reach this. If `f` fails on rank 0 it is not tried on
    the others.

    Args:
        f: the function; without it a decorator is returned, so that each call of the function goes rank 0 first.
        args, kwargs: its arguments.
        per_node: let the first rank of each machine go first, for files that machines do not share.

    Returns:
        The result of `f` on this rank.

    Raises:
        RuntimeError: on the waiting ranks, if `f` failed on the first one.
    """
    if f is None:
        if kwargs:
            raise TypeError(f"rank0_first got {', '.join(kwargs)}; as a decorator it takes per_node alone")
        return lambda func: functools.wraps(func)(
            lambda *args, **kwargs: rank0_first(functools.partial(func, **kwargs), *args, per_node=per_node)
        )
    if not _has_peers("rank0_first"):
        return f(*args, **kwargs)
    node = os.environ.get("GROUP_RANK") or socket.gethostname() if per_node else ""
    key = f"learnerkit/rank0_first/{count_call('rank0_first')}/{node}"
    if (local_rank() if per_node else rank()) == 0:
        try:
            result = f(*args, **kwargs)
        except BaseException as e:
            store().set(key, f"{type(e).__name__}: {e}")
            raise
        store().set(key, "")
        return result
    # The ranks wait on the store, not at a barrier: a long download must not exceed a collective's timeout.
    store().wait([key], timedelta(days=7))
    if failure := store().get(key).decode():
        name = getattr(unbound(f)[0], "__name__", f)
        raise RuntimeError(f"{'local ' if per_node else ''}rank 0 failed in rank0_first({name}): {failure}")
    return f(*args, **kwargs)


def on_rank0(f: Callable[P, T]) -> Callable[P, T | None]:
    """Return `f` as a function that runs on rank 0 and returns `None`, at once, on every other rank."""

    @functools.wraps(f)
    def run(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return f(*args, **kwargs) if is_main() else None

    return run


@collective
def follow_rank0(name: str, timeout: float = 300.0) -> None:
    """Return on every rank only after rank 0 has made the same call; rank 0 itself never waits.

    Args:
        name: the name of the call; the k-th call of that name on a rank waits for rank 0's k-th.
        timeout: seconds the other ranks wait.

    Raises:
        TimeoutError: rank 0 did not come.
    """
    if not _has_peers(name, waits=False):
        return
    key = f"learnerkit/{name}/{count_call(name)}"
    if is_main():
        store().set(key, "")
        return
    try:
        store().wait([key], timedelta(seconds=timeout))
    except dist.DistStoreError:
        raise TimeoutError(
            f"rank {rank()} waited {timeout:.0f} s for rank 0 in {name!r}; "
            "every rank, rank 0 among them, must make this call"
        ) from None


@collective
def spread_seeds(device: torch.device) -> None:
    """Move each rank that shares a random stream with one before it to another stream; every rank must reach this.

    Args:
        device: the device on which dropout and the like draw; its stream may be shared where the host's is not.
    """
    seed, here = seeds.stream_seed(torch.initial_seed(), rank()), rank()
    if device.type != "cpu":
        module = torch.get_device_module(device)
        *before, own = _digests(module.get_rng_state().numpy().tobytes())[: here + 1]
        if own in before:
            module.manual_seed(seed)
    # The seeds are compared rather than the states: a rank that has drawn alone is only at another place of the stream.
    *before, own = _digests(torch.initial_seed())[: here + 1]
    if own in before:
        seeds.set_seed(seed)
