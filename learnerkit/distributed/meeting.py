"""How the ranks of a run meet: in the store at rank 0's address, and in the process group that is made of it."""

import atexit
import functools
import gc
import json
import math
import os
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from learnerkit.distributed.facts import PeerError, default_device, is_joined, rank, world_size
from learnerkit.processes.sockets import NotAStore, has_closed, store_answers
from learnerkit.torch_internals import await_thread_list_lock, compare_calls, default_store, default_timeout

JOIN_SECONDS = 35.0
"""How long a process waits for the others of its run to meet it; a launcher's store is there at once."""


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
    if is_joined() and not _group_is_dead and _compared() is dist.group.WORLD:
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
        await_all(dist.PrefixStore("learnerkit/next" if _group_is_dead else "learnerkit/first", store()), what, wait)
        if _group_is_dead:
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
    ends, waiting = f"learnerkit/ended/{attempt}", f"learnerkit/waiting/{attempt}"  # set in processes/rank_main.py
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
        "`python -m learnerkit.launch`; if these are left over from another run, unset them (errors.html#launch-meet)"
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


_group_is_dead = False


def give_group_up() -> None:
    """Note that the connections of torch's process group are closed: the next `join` makes another group."""
    global _group_is_dead
    _group_is_dead = True


def _join_again(timeout: timedelta | None) -> None:
    global _group_is_dead
    # Keys of their own: those in the old group's place tell of its dead connections.
    fresh = dist.PrefixStore("learnerkit/next", store())
    backend, here, size = dist.get_backend_config(), rank(), world_size()
    dist.destroy_process_group()
    dist.init_process_group(backend, store=fresh, rank=here, world_size=size, timeout=timeout)
    _group_is_dead = False


def _leave() -> None:
    if is_joined():
        dist.destroy_process_group()


def store() -> dist.Store:
    """The key-value store behind the process group, for messages that no collective should carry."""
    return default_store()


def count_call(name: str) -> int:
    """Count the calls of `name` on this rank, this one included: ranks that run one program count alike."""
    return store().add(f"learnerkit/{name}/calls/{rank()}", 1)
