"""Ranks, world size, collectives and seeds: every function answers on any number of processes, also on one.

Facts are read when asked, never at import: from the process group, else from the environment a launcher made
(`RANK`, `LOCAL_RANK`, `WORLD_SIZE`), else 0, 0 and 1. The process group is made at first need and lives until the
process ends. On one process a collective is the identity.
"""

import atexit
import functools
import gc
import hashlib
import json
import math
import os
import random
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from datetime import timedelta
from itertools import accumulate, groupby
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from learnerkit.endings import mark, may_follow
from learnerkit.launch.ping import NotAStore, has_closed, store_answers
from learnerkit.torch_internals import (
    CollectiveRefusal,
    await_thread_list_lock,
    compare_calls,
    default_store,
    default_timeout,
)
from learnerkit.utils import digests, warn

T = TypeVar("T")

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


JOIN_SECONDS = 35.0
"""How long a process waits for the others of its run to meet it; a launcher's store is there at once."""


# Facts


def is_joined() -> bool:
    """Tell whether this process is in a process group (it is meant to be if `world_size() > 1`)."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's number among all processes of the run."""
    return dist.get_rank() if is_joined() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    """The number of processes of the run."""
    if _alone.get():
        return 1
    return dist.get_world_size() if is_joined() else int(os.environ.get("WORLD_SIZE", 1))


_alone: ContextVar[bool] = ContextVar("alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Let this process be the only one in here: collectives of this module do nothing, and no other rank need come."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def local_rank() -> int:
    """This process's number among those of its machine: the index of its accelerator.

    Without `LOCAL_RANK` (processes started by `mp.spawn`, say) all ranks are taken to share one machine.
    """
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    return rank() % max(1, torch.accelerator.device_count()) if is_joined() else 0


def is_main() -> bool:
    """Tell whether this is rank 0, the one process that prints, plots and saves."""
    return rank() == 0


_warned: set[str] = set()


def warn_once(message: str, on_all: bool = False) -> None:
    """Warn on rank 0, and only the first time in this process.

    Args:
        message: what to say.
        on_all: on other ranks than 0, too.
    """
    if (on_all or is_main()) and message not in _warned:
        _warned.add(message)
        warn(message)


def default_device() -> torch.device:
    """The accelerator of this local rank, else the CPU.

    Raises:
        RuntimeError: there are fewer accelerators than local ranks.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    index, count = local_rank(), torch.accelerator.device_count()
    if count == 1 and os.environ.get("SLURM_LOCALID") == str(index):
        index = 0  # srun has started a task for this very rank, and shows it a GPU of its own (--gpus-per-task)
    if index >= count:
        raise RuntimeError(
            f"local rank {index} has no accelerator: this machine shows {count} ({accelerator.type}); "
            f"start at most {count} processes, or train on the CPU with device='cpu'"
        )
    return torch.device(accelerator.type, index)


# The process group


class PeerError(RuntimeError):
    """Another rank failed, came to a standstill or did not come; the message says which, where and why."""

    def __init__(self, *args: object, standstill: bool = False) -> None:
        super().__init__(*args)
        mark(self, follows=True, standstill=standstill)


def join(timeout: float | timedelta | None = None, what: str = "", wait: float | None = None) -> None:
    """Make the process group of this run unless there is one or the run is one process; every rank must reach this.

    Args:
        timeout: seconds (or a timedelta) a collective may wait; `None` is torch's own default.
        what: the call for which the ranks meet, such as 'fit'.
        wait: seconds in which the other ranks must come; by default `timeout`.

    Raises:
        RuntimeError: nobody is at rank 0's address within `JOIN_SECONDS`, or something else listens there.
        PeerError: some ranks do not come in time.
    """
    if is_joined() and not group_is_dead and _compared() is dist.group.WORLD:
        return
    if world_size() == 1:
        return
    if timeout is not None and not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)
    limit = timeout or timedelta(seconds=float(os.environ.get("LEARNERKIT_TIMEOUT", 0))) or default_timeout()
    wait = limit.total_seconds() if wait is None else wait
    if not is_joined():
        _init(timeout, what, wait)
    else:
        await_all(dist.PrefixStore("learnerkit/next" if group_is_dead else "learnerkit/first", store()), what, wait)
        if group_is_dead:
            _join_again(timeout)
    compare_calls_of_users(limit)


def _init(timeout: timedelta | None, what: str, wait: float) -> None:
    """Make the process group."""
    device = default_device()
    if device.type == "cpu":
        backend = "gloo"
    else:
        torch.accelerator.set_device_index(device.index)
        # CPU tensors (predictions, counts) are sent by gloo, so they need no memory of the accelerator.
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    here, size = rank(), world_size()
    found = _meet_in_store(timeout, what, wait)
    await_all(dist.PrefixStore("learnerkit/first", found), what, wait)
    dist.init_process_group(backend, store=found, rank=here, world_size=size, timeout=timeout)
    atexit.register(_leave)


_compared: Callable[[], Any] = lambda: None  # noqa: E731
"""The process group whose calls are compared, if it is still there."""

_groups: dict[str, Callable[[], Any]] = {}


def compare_calls_of_users(timeout: timedelta) -> None:
    """Keep what users call apart from what this package sends; every rank must reach this.

    gloo ends the process, or mixes the numbers up, where ranks pair collectives that differ. So torch compares those of
    the default group before each call, which costs about a millisecond; gradients and votes, whose order and sizes
    this package knows, have groups of their own.
    """
    global _compared
    _prepare_forks()
    _groups.clear()
    if "gloo" in dist.get_backend_config():
        compare_calls(timeout)
        patience = timeout + timedelta(minutes=1)  # a run's watch, which says more, comes first
        for name in ("gradients", "votes"):
            _groups[name] = weakref.ref(dist.new_group(backend="gloo", timeout=patience))
    _compared = weakref.ref(dist.group.WORLD)


def group(name: str, device: str = "cpu") -> Any:
    """The process group for the 'gradients' or the 'votes' of this run; `None` stands for the default group."""
    return _groups[name]() if name in _groups and device == "cpu" else None


@functools.cache
def _prepare_forks() -> None:
    """Prepare this process for children that are forked, such as a loader's workers."""
    if sys.version_info < (3, 12):
        os.register_at_fork(before=_let_threads_settle)
    # A child must not collect what its parent has left, such as a process group: it would wait for its threads.
    os.register_at_fork(after_in_child=gc.freeze)


def await_all(keys: dist.Store, what: str, timeout: float, none_moves: Callable[[], bool] | None = None) -> list[str]:
    """Wait until every rank is here, and return what each calls: by the store, which tells who is missing.

    Args:
        keys: for this meeting alone.
        what: the call for which this rank is here; '' for any.
        timeout: seconds to wait.
        none_moves: tells whether all other ranks wait, too, so that nobody can come any more.

    Raises:
        PeerError: some ranks did not come.
    """
    here, names = rank(), [f"here/{number}" for number in range(world_size())]
    me = f"rank {here} called {what}" if what else f"rank {here}"
    ended = f"{me}, but rank 0 has ended"
    end, pause, root = time.monotonic() + timeout, 0.002, _root(keys)
    asked, stood = time.monotonic(), 0
    port = getattr(root, "port", 0)
    if here and port and has_closed(port):
        raise not_together(ended)
    # Rank 0, which may host the store, tells those that wait that it ends: of a store that goes torch prints a lot.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    ends, waiting = f"learnerkit/ended/{attempt}", f"learnerkit/waiting/{attempt}"  # set in launch/rank_main.py
    try:
        keys.set(names[here], json.dumps(what))
        root.add(waiting, 1)
        while not keys.check(names):
            if here and root.check([ends]):
                raise not_together(ended)
            if none_moves is not None and time.monotonic() > asked + 1:
                stood, asked = stood + 1 if none_moves() else 0, time.monotonic()
            stands = stood > 1 and not keys.check(names)  # twice, a second apart
            if stands or time.monotonic() > end:
                missing = [str(number) for number, name in enumerate(names) if not keys.check([name])]
                ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
                keys.delete_key(names[here])  # so that a late rank does not take this one for there
                if stands:
                    raise not_together(f"{me}, and {ranks} {'wait' if len(missing) > 1 else 'waits'} in another call")
                raise not_together(f"{me}{' and' if what else ''} waited {timeout:.0f} s for {ranks}")
            time.sleep(pause)
            pause = min(1.1 * pause, 0.05)
            if here and port and has_closed(port):
                raise not_together(ended)
        calls = [json.loads(keys.get(name)) for name in names]
    except dist.DistNetworkError:
        raise not_together(ended) from None
    finally:
        with suppress(RuntimeError):
            if not (port and has_closed(port)):
                root.add(waiting, -1)
    return calls


def not_together(text: str) -> PeerError:
    """The error of a rank that has made a call which others have not made."""
    return PeerError(
        f"{text}; every rank must make the same calls of fit, validate, get_preds and the like, in the same order "
        "(errors.html#peers)",
        standstill=True,  # nothing else will follow
    )


def tell(key: str, text: str) -> None:
    """Leave a text for ranks that `hear` it: by the store, so that threads may do it while others use collectives.

    Raises:
        PeerError: rank 0 has ended.
    """
    try:
        store().set(f"learnerkit/told/{key}", text)
    except dist.DistNetworkError:
        raise PeerError(f"rank {rank()} could not leave its message on {key}: rank 0 has ended") from None


def hear(key: str, timeout: float) -> str:
    """Wait for what another rank tells under a key.

    Args:
        key: which nobody uses twice.
        timeout: seconds to wait.

    Raises:
        PeerError: nobody has told it in time, or rank 0 has ended.
    """
    keys, end, pause = store(), time.monotonic() + timeout, 0.001
    root = _root(keys)
    port, waiting = getattr(root, "port", 0), f"learnerkit/waiting/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        root.add(waiting, 1)  # so that rank 0, which may host the store, stays until this is heard
        while not keys.check([f"learnerkit/told/{key}"]):
            if time.monotonic() > end:
                raise PeerError(f"rank {rank()} waited {timeout:.0f} s for another rank's message on {key}")
            time.sleep(pause)
            pause = min(1.2 * pause, 0.05)
        return keys.get(f"learnerkit/told/{key}").decode()
    except dist.DistNetworkError:
        raise PeerError(f"rank {rank()} waited for another rank's message on {key}, but rank 0 has ended") from None
    finally:
        with suppress(RuntimeError):
            if not (port and has_closed(port)):
                root.add(waiting, -1)


def store_port(keys: dist.Store) -> int | None:
    """The port by which the ranks reach a store, if it has one."""
    return getattr(_root(keys), "port", None)


def _root(keys: Any) -> Any:
    """A store without prefixes."""
    while isinstance(keys, dist.PrefixStore):
        keys = keys.underlying_store
    return keys


def _meet_in_store(timeout: timedelta | None, what: str = "", wait: float = JOIN_SECONDS) -> dist.Store:
    """The store at the address in the environment, where torch alone would wait for half an hour."""
    promised = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    wait = min(wait, JOIN_SECONDS) if promised else JOIN_SECONDS
    me = f"rank {rank()} called {what}, but " if what else ""
    try:
        if rank() or promised:
            _await_host(promised, wait)
        found, _, _ = next(dist.rendezvous("env://", rank(), world_size(), timeout=timedelta(seconds=max(wait, 1.0))))
    except NotAStore as e:
        said = f"what listens at the address of rank 0 does not answer like a process of this run ({e})"
        raise _not_met(me + said) from None
    except (RuntimeError, TimeoutError) as e:
        raise _not_met(f"{me}the other processes of this run did not come within {wait:.0f} s") from e
    found.set_timeout(timeout or default_timeout())
    return found


def _not_met(what: str) -> RuntimeError:
    """The error of a process that could not join the others."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    said = " ".join(f"{name}={os.environ.get(name)}" for name in names)
    return RuntimeError(
        f"{what}; the environment says that there are others ({said}). Start them all, best with "
        "`python -m learnerkit.launch`; if these are left over from another run, unset them (errors.html#ranks-not-met)"
    )


def _await_host(promised: bool, wait: float) -> None:
    """Wait until the store answers at its address; torch's own client would print many lines, or wait for ever.

    Args:
        promised: a launcher listens there from the beginning; the store answers once rank 0 has imported torch.
        wait: seconds to wait for somebody who listens.

    Raises:
        TimeoutError: nobody listens there.
        NotAStore: something else does.
    """
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        return  # which torch says better
    end = time.monotonic() + wait
    while not store_answers(host, int(port), math.inf if promised else end - time.monotonic()):
        if time.monotonic() > end:
            raise TimeoutError(f"nobody listens at {host}:{port}")
        time.sleep(0.1)


def _let_threads_settle() -> None:
    """Keep a child that is about to be forked (a loader's worker, for one) from waiting for ever.

    The interpreter's lock around its list of threads is held for a moment by gloo's threads when they let go of a
    collective's tensors. A child forked in that moment finds it locked: CPython 3.11 takes it once before making it
    again (`PyOS_AfterFork_Child`; 3.12 makes it again first).
    """
    time.sleep(0.002)  # what the last collective has left to do
    await_thread_list_lock()


group_is_dead = False
"""Tells that the connections of torch's process group are closed: the next `join` makes another group."""


def _join_again(timeout: timedelta | None) -> None:
    global group_is_dead
    # Keys of their own: those in the old group's place tell of its dead connections.
    fresh = dist.PrefixStore("learnerkit/next", store())
    backend, here, size = dist.get_backend_config(), rank(), world_size()
    dist.destroy_process_group()
    dist.init_process_group(backend, store=fresh, rank=here, world_size=size, timeout=timeout)
    group_is_dead = False


def _leave() -> None:
    if is_joined():
        dist.destroy_process_group()


def store() -> dist.Store:
    """The key-value store behind the process group, for messages that no collective should carry."""
    return default_store()


def _wire(x: Tensor) -> Tensor:
    """`x` where the process group can take it: as it is, or on the accelerator for a group that knows no CPU."""
    backends = dist.get_backend_config() if x.device.type == "cpu" else ""
    return x.to(default_device()) if backends and "cpu" not in backends else x


# Collectives: every rank must reach each of them, in the same order

_refused_in: ContextVar[tuple[str, str] | None] = ContextVar("silent", default=None)


@contextmanager
def no_collectives(where: str, why: str = "") -> Iterator[None]:
    """Refuse collectives in here, naming `where`.

    Args:
        where: what runs in here.
        why: by default that the other ranks may not come, and this one would wait for ever.
    """
    token = _refused_in.set((where, why))
    try:
        with CollectiveRefusal(functools.partial(_refusal, (where, why))) if is_joined() else nullcontext():
            yield
    finally:
        _refused_in.reset(token)


def _refusal(refused: tuple[str, str], what: str) -> RuntimeError:
    where, why = refused
    why = why or (
        "the other ranks may not come here (after a failure, or because it runs on rank 0 alone), so it would wait for "
        "ever; communicate in an event that all ranks reach"
    )
    return RuntimeError(f"{where} called {what}: {why} (errors.html#collective-refused)")


@contextmanager
def _within(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Give a context variable a value in here."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


_before_collective: ContextVar[Callable[[], None] | None] = ContextVar("before_collective", default=None)


def before_collective(call: Callable[[], None] | None) -> AbstractContextManager[None]:
    """Call `call()` before each collective in here; it can keep this rank from entering by an exception."""
    return _within(_before_collective, call)


_none_moves: ContextVar[Callable[[], bool] | None] = ContextVar("none_moves", default=None)


def noticing_standstills(none_moves: Callable[[], bool]) -> AbstractContextManager[None]:
    """End the wait in `meet` in here where `none_moves()` tells that all other ranks wait, too."""
    return _within(_none_moves, none_moves)


_around_collective: ContextVar[Callable[[], AbstractContextManager]] = ContextVar("around", default=nullcontext)


def around_collectives(context: Callable[[], AbstractContextManager]) -> AbstractContextManager[None]:
    """Enter `context()` for each collective of this module in here, to measure how long this rank waits in it."""
    return _within(_around_collective, context)


@contextmanager
def grouped_collectives() -> Iterator[None]:
    """Make several collectives one group: whether all ranks come is asked once, before the first."""
    call = _before_collective.get()
    if call is not None and world_size() > 1 and not _refused_in.get():
        call()
    with before_collective(None):
        yield


def _has_peers(what: str, waits: bool = True) -> bool:
    """Tell whether there are other ranks for a collective; join them first.

    Args:
        what: the collective's name.
        waits: whether every rank waits for the others in it.

    Raises:
        RuntimeError: inside `no_collectives`.
    """
    if world_size() == 1:
        return False
    if refused := _refused_in.get():
        raise _refusal(refused, f"world.{what}")
    join(what=f"world.{what}")
    if waits and (call := _before_collective.get()) is not None:
        call()
    return True


MISMATCH = "mismatch between collectives"  # in torch's error
SAME_CALLS = "every rank must make the same calls, with tensors of one shape and type, in the same order"


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Say of an error of torch.distributed's what it means: torch tells of connections and fingerprints."""
    try:
        with _around_collective.get()():
            yield
    except RuntimeError as e:
        text = str(e)
        if MISMATCH in text:
            e.add_note(SAME_CALLS)
        if may_follow(e):
            raise PeerError(
                f"rank {rank()} called world.{what}, but another rank has ended, failed, or did not come; every rank "
                f"must make the same calls, in the same order ({text}) (errors.html#peers)"
            ) from e
        raise


def meet(what: str, timeout: float = 60.0) -> None:
    """Wait until every rank has made the same call.

    Args:
        what: the call.
        timeout: seconds to wait.

    Raises:
        PeerError: some ranks did not come; the text names them.
    """
    if _has_peers(what):
        counter = f"learnerkit/meet/{what}/{rank()}"
        met = store().add(counter, 0)  # a call to which others did not come does not count
        await_all(dist.PrefixStore(f"learnerkit/met/{what}/{met}", store()), what, timeout, _none_moves.get())
        store().add(counter, 1)


def barrier() -> None:
    """Wait until every rank is here."""
    if _has_peers("barrier"):
        with _explained("barrier"):
            dist.barrier()


def reduce(x: T, op: str = "sum", among: str = "") -> T:
    """`x` combined over all ranks, on every rank; `x` itself is left as it is.

    Args:
        x: a tensor of the same shape on every rank, or a number.
        op: 'sum', 'mean', 'max' or 'min'.
        among: for this package: what kind of message it is, as in `group`.

    Raises:
        ValueError: an unknown `op`.
    """
    if op not in (*_OPS, "mean"):
        raise ValueError(f"reduce got op={op!r}; it takes 'sum', 'mean', 'max' or 'min'")
    if not _has_peers("reduce"):
        return x
    local = x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None)
    total: Any = _wire(local.detach()).clone()
    with _explained("reduce"):
        dist.all_reduce(total, _OPS.get(op, dist.ReduceOp.SUM), group(among, total.device.type))
    total = total / world_size() if op == "mean" else total
    return total.to(local.device) if isinstance(x, Tensor) else total.item()


def broadcast(x: T, src: int = 0, among: str = "") -> T:
    """Rank `src`'s `x`, on every rank: a tensor of the same shape everywhere, or any object that can be pickled.

    Args:
        x: of this rank.
        src: whose.
        among: for this package, as in `reduce`.
    """
    if not _has_peers("broadcast"):
        return x
    with _explained("broadcast"):
        if isinstance(x, Tensor):
            copy: Any = _wire(x.detach()).clone()
            dist.broadcast(copy, src, group(among, copy.device.type))
            return copy.to(x.device)
        box = [x]
        dist.broadcast_object_list(box, src, group(among))
        return box[0]


_ROW_BYTES = 25 * 2**20  # of tensors that are sent together, so that the copy stays small


@torch.no_grad()
def broadcast_into(tensors: Sequence[Tensor], among: str = "") -> None:
    """Give every rank rank 0's values of these, in place, by few collectives."""
    _replace_together(tensors, functools.partial(broadcast, among=among))


@torch.no_grad()
def mean_into(tensors: Sequence[Tensor], among: str = "") -> None:
    """Put the mean over the ranks into each of these, in place, by few collectives; divided first, as DDP does."""
    _replace_together(tensors, lambda row: reduce(row.mul_(1 / world_size()), among=among))


def _replace_together(tensors: Sequence[Tensor], call: Callable[[Tensor], Tensor]) -> None:
    """Replace the values of tensors by what `call` makes of rows of them, each of one type and not too long."""
    for kind in dict.fromkeys((t.dtype, t.device) for t in tensors):
        alike = [t for t in tensors if (t.dtype, t.device) == kind]
        ends = accumulate(t.nbytes for t in alike)
        for _, pairs in groupby(zip(alike, ends, strict=True), key=lambda pair: pair[1] // _ROW_BYTES):
            row = [t for t, _ in pairs]
            values = call(torch.cat([t.reshape(-1) for t in row])).split([t.numel() for t in row])
            for t, value in zip(row, values, strict=True):
                t.copy_(value.view_as(t))


def give_values(tensors: Sequence[Tensor]) -> None:
    """Give all ranks rank 0's values where they differ; every rank must reach this. A host-device sync.

    Raises:
        ValueError: the shapes differ.
    """
    shapes, values = zip(*all_gather(([t.shape for t in tensors], digests(tensors))), strict=True)
    if any(other != shapes[0] for other in shapes):
        raise ValueError("the model differs between ranks in its parameters' shapes; every rank must make the same")
    if any(other != values[0] for other in values):
        broadcast_into(tensors)  # else different models would be mixed


def all_gather(x: T, among: str = "") -> list[T]:
    """The `x` of every rank, in rank order: tensors of one shape, or any objects that can be pickled.

    Args:
        x: of this rank.
        among: for this package, as in `reduce`.
    """
    if not _has_peers("all_gather"):
        return [x]
    with _explained("all_gather"):
        if isinstance(x, Tensor):
            local = _wire(x.detach()).contiguous()
            parts: list[Any] = [torch.empty_like(local) for _ in range(world_size())]
            dist.all_gather(parts, local)
            return [p.to(x.device) for p in parts]
        everyone: list[Any] = [None] * world_size()
        dist.all_gather_object(everyone, x, group(among))
        return everyone


def gather_pieces(pieces: Iterable[tuple[Any, Tensor]], on: str = "all") -> list[Tensor] | None:
    """The pieces of all ranks, in the order of their places.

    Ranks may hold different numbers of pieces, of any shapes and types, or none.

    Args:
        pieces: (place, tensor) pairs of this rank; a place is a number or a tuple, unique over all ranks.
        on: 'all', or 'rank0' where the other ranks need nothing: they get `None`.
    """
    pieces = sorted(pieces, key=lambda piece: piece[0])
    if not _has_peers("gather_pieces"):
        return [tensor for _, tensor in pieces]
    # Cloned: a row cut from a matrix may be "contiguous" with strides that cannot be viewed as bytes.
    tensors = [tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for _, tensor in pieces]
    # Bytes are sent, so that one exchange serves every type; shorter ranks pad to the longest.
    load = torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors]) if tensors else torch.empty(0).byte()
    labels = all_gather([(place, t.shape, t.dtype) for (place, _), t in zip(pieces, tensors, strict=True)])
    sizes = [sum(shape.numel() * dtype.itemsize for _, shape, dtype in label) for label in labels]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(load)] = load
    padded = _wire(padded)
    loads = [torch.empty_like(padded) for _ in sizes]
    if on == "all":
        dist.all_gather(loads, padded)
    else:
        dist.gather(padded, loads if is_main() else None, dst=0)
        if not is_main():
            return None
    found = []
    for label, part in zip(labels, loads, strict=True):
        part, start = part.cpu(), 0
        for place, shape, dtype in label:
            stop = start + shape.numel() * dtype.itemsize
            # A clone: a slice of bytes need not be aligned for its type.
            found.append((place, part[start:stop].clone().view(dtype).reshape(shape)))
            start = stop
    return [tensor for _, tensor in sorted(found, key=lambda piece: piece[0])]


def same_everywhere(x: object) -> bool:
    """Tell whether `x` is equal on every rank (compared by `repr`: numbers and plain containers)."""
    digest = hashlib.sha256(repr(x).encode()).hexdigest()
    return len(set(all_gather(digest))) == 1


# Rank 0 first, rank 0 alone


def rank0_first(f: Callable[..., T] | None = None, *args: Any, per_node: bool = False) -> T | Callable:
    """Call `f(*args)` on rank 0, and only then on the others: `rank0_first(download, url)`; or `@rank0_first()`.

    The others wait as long as rank 0 needs. Every rank must reach this. If `f` fails on rank 0 it is not tried on
    the others.

    Args:
        f: what to call; without it a decorator is returned, so that each call of the function goes rank 0 first.
        args: its arguments.
        per_node: the first rank of each machine goes first, for files that machines do not share.

    Returns:
        What `f` returned on this rank.

    Raises:
        RuntimeError: on the waiting ranks, when the first one failed.
    """
    if f is None:
        return lambda func: functools.wraps(func)(
            lambda *args, **kwargs: rank0_first(functools.partial(func, **kwargs), *args, per_node=per_node)
        )
    if not _has_peers("rank0_first"):
        return f(*args)
    node = int(os.environ.get("GROUP_RANK", 0)) if per_node else 0
    key = f"learnerkit/rank0_first/{_count_call('rank0_first')}/{node}"
    if (local_rank() if per_node else rank()) == 0:
        try:
            result = f(*args)
        except BaseException as e:
            store().set(key, f"{type(e).__name__}: {e}")
            raise
        store().set(key, "")
        return result
    # By the store, not a barrier: a long download must not run into a collective's timeout.
    store().wait([key], timedelta(days=7))
    failure = store().get(key).decode()
    if failure:
        raise RuntimeError(f"rank 0 failed in rank0_first({getattr(f, '__name__', f)}): {failure}")
    return f(*args)


def on_rank0(f: Callable[..., T]) -> Callable[..., T | None]:
    """`f` as a function that runs on rank 0 and returns `None`, at once, on every other rank."""

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> T | None:
        return f(*args, **kwargs) if is_main() else None

    return run


def follow_rank0(name: str, timeout: float = 300.0) -> None:
    """Return on every rank only after rank 0 has made the same call; rank 0 itself never waits.

    Args:
        name: what the call is about; the k-th call of that name on a rank waits for rank 0's k-th.
        timeout: seconds the other ranks wait.

    Raises:
        TimeoutError: rank 0 did not come.
    """
    if not _has_peers(name, waits=False):
        return
    key = f"learnerkit/{name}/{_count_call(name)}"
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


def _count_call(name: str) -> int:
    """Count the calls of `name` on this rank, this one included: ranks that run one program count alike."""
    return store().add(f"learnerkit/{name}/calls/{rank()}", 1)


# Seeds


def set_seed(seed: int, reproducible: bool = False) -> None:
    """Seed python, numpy and torch: one model initialisation and one sample order on any number of ranks.

    Under DDP dropout and augmentation still differ by rank and by worker: ranks other than 0 move on to streams of
    their own when a fit or an evaluation starts.

    Args:
        seed: the same number on every rank.
        reproducible: also ask torch for deterministic algorithms, which can be slower; and what datasets draw for a
            sample, such as its augmentation, then depends on the seed, the epoch and the sample alone, not on loader
            workers and ranks. Iterable datasets do not tell their samples apart.
    """
    torch.manual_seed(seed)
    _seed_others(seed)
    if reproducible:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # asked for by torch's reproducibility notes
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False


def spread_seeds() -> None:
    """Move ranks other than 0 to random streams of their own if all still share one; every rank must reach this."""
    if same_everywhere(torch.get_rng_state().numpy().tobytes()) and not is_main():
        set_seed(stream_seed(torch.initial_seed(), rank()))


def stream_seed(seed: int, number: int) -> int:
    """The seed of stream `number` of those that belong to `seed`; stream 0 is `seed` itself."""
    # An odd constant (2**64 over the golden ratio) keeps neighbouring numbers' seeds far apart.
    return (seed + 0x9E3779B97F4A7C15 * number) % 2**63


def mixed_seed(*parts: Any) -> int:
    """One seed of several numbers, such as those of an epoch, a batch and a rank."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


def seed_host(seed: int) -> None:
    """Seed the host's generators alone: torch's CPU one, python's and numpy's."""
    torch.default_generator.manual_seed(seed)
    _seed_others(seed)


def _seed_others(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def seed_states() -> tuple:
    """The states of the host's random generators: torch's, python's and, where it is used, numpy's."""
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None


@contextmanager
def device_streams_kept(device: torch.device) -> Iterator[None]:
    """Give the random generators of all devices of this one's type their states back at the end.

    All of them, because DataParallel uses several. The states are on the host, so that nothing waits for a device.
    """
    states = device_states(device)
    try:
        yield
    finally:
        set_device_states(device, states)


@contextmanager
def own_stream(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from a stream of its own in here: torch's generators of the host and of the device begin with this seed.

    At the end they get their states back. The states are on the host, so that nothing waits for a device.
    """
    state = torch.get_rng_state()
    with device_streams_kept(device):
        try:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed takes a hundred times as long
            if device.type != "cpu":
                module = torch.get_device_module(device)
                getattr(module, "manual_seed_all", module.manual_seed)(seed)
            yield
        finally:
            torch.set_rng_state(state)


def device_states(device: torch.device) -> list[Tensor]:
    """The states of the random generators of all devices of this one's type, on the host; of the host itself none."""
    return [torch.get_device_module(device).get_rng_state(*place) for place in _places(device)]


def set_device_states(device: torch.device, states: Sequence[Tensor]) -> None:
    """Put `device_states` back, on as many devices as there are."""
    for state, place in zip(states, _places(device), strict=False):
        torch.get_device_module(device).set_rng_state(state, *place)


def _places(device: torch.device) -> list[tuple]:
    """The arguments by which torch finds each device of a type: of the host none, and MPS is one device."""
    if device.type == "cpu":
        return []
    return [()] if device.type == "mps" else [(i,) for i in range(torch.get_device_module(device).device_count())]


def set_seed_states(states: tuple) -> None:
    """Put `seed_states` back."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if states[2] is not None:
        sys.modules["numpy"].random.set_state(states[2])
