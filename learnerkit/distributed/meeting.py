"""The meeting of a run's ranks: in the store at rank 0's address, and in the process group made from it."""

import atexit
import functools
import gc
import json
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from learnerkit.clusters import check_script
from learnerkit.distributed.facts import PeerError, default_device, is_joined, place, rank, world_size
from learnerkit.marks import collective
from learnerkit.processes.sockets import NotAStore, has_closed, store_answers
from learnerkit.torch_internals import await_thread_list_lock, compare_calls, default_store, default_timeout

JOIN_SECONDS = 35.0
"""Seconds that a process waits for the others of its run; a launcher's store is there at once."""


@collective
def join(timeout: float | timedelta | None = None, what: str = "", wait: float | None = None) -> None:
    """Join the process group of this run, unless this is done or the run is one process; every rank must reach this.

    Args:
        timeout: seconds (or a timedelta) that a collective may wait; `None` is torch's default.
        what: the call for which the ranks meet, such as 'fit'.
        wait: seconds within which the other ranks must come; by default `timeout`.

    Raises:
        RuntimeError: no process listens at rank 0's address within `JOIN_SECONDS`, or another program does.
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


@collective
def _init(timeout: timedelta | None, what: str, wait: float) -> None:
    """Make the process group, and set a launcher's variables if this process knows its place by others."""
    script = sys.modules.get("__mp_main__", sys.modules["__main__"])
    # By another name it is the script of this process, whose place a program that runs it, such as marimo, has taken.
    if script.__name__ == "__mp_main__" and script is not sys.modules["__main__"]:
        raise RuntimeError(
            "a process that multiprocessing has started, such as a loader's worker, imports the script and would join "
            "the run as a rank. Put the script's work below `if __name__ == '__main__':`"
        )
    here = place()
    check_script(here, os.environ, torch.accelerator.device_count())
    if here.by_scheduler:
        if not (here.is_rank and here.node):
            print(f"learnerkit: {here}", file=sys.stderr, flush=True)
        for name, value in here.variables().items():
            os.environ.setdefault(name, value)
    device, backend = default_device(), "gloo"
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
        # CPU tensors (predictions, counts) are sent by gloo, so they need no memory of the accelerator.
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    keys = _meet_in_store(timeout, what, wait, here.by_scheduler)
    await_all(dist.PrefixStore("learnerkit/first", keys), what, wait)
    dist.init_process_group(backend, store=keys, rank=rank(), world_size=world_size(), timeout=timeout)
    atexit.register(_leave, os.getpid())


_compared: Callable[[], Any] = lambda: None  # noqa: E731
"""A weak reference to the process group whose calls are compared."""

_groups: dict[str, Callable[[], Any]] = {}


@collective
def compare_calls_of_users(timeout: timedelta) -> None:
    """Separate the collectives of users from those of this package; every rank must reach this.

    gloo ends the process, or mixes up the numbers, where ranks pair different collectives. So torch compares those of
    the default group before each call, which costs about a millisecond. Gradients and votes, whose order and sizes this
    package knows, have their own groups.
    """
    global _compared
    _prepare_forks()
    _groups.clear()
    if "gloo" in dist.get_backend_config():
        compare_calls(timeout)
        for name in ("gradients", "votes"):
            # A run's watch, whose error says more, comes first.
            _groups[name] = weakref.ref(dist.new_group(backend="gloo", timeout=timeout + timedelta(minutes=1)))
    _compared = weakref.ref(dist.group.WORLD)


def group(name: str, device: str = "cpu") -> Any:
    """Return the process group for the 'gradients' or the 'votes' of this run; `None` stands for the default group."""
    return _groups[name]() if name in _groups and device == "cpu" else None


@functools.cache
def _prepare_forks() -> None:
    """Prepare this process for children that are forked, such as a loader's workers."""
    if sys.version_info < (3, 12):
        os.register_at_fork(before=_let_threads_settle)
    # A child must not collect its parent's garbage, such as a process group: it would wait for the group's threads.
    os.register_at_fork(after_in_child=gc.freeze)


@collective
def await_all(keys: dist.Store, what: str, timeout: float, none_moves: Callable[[], bool] | None = None) -> list[str]:
    """Wait until every rank is here, and return the call of each; the store tells which ranks are missing.

    Args:
        keys: the store, with keys for this meeting alone.
        what: the call for which this rank is here; '' for any.
        timeout: seconds to wait.
        none_moves: tells whether all other ranks wait, too, so that none of them can come any more.

    Raises:
        PeerError: some ranks did not come.
    """
    here, names = rank(), [f"here/{number}" for number in range(world_size())]
    me = f"rank {here} called {what}" if what else f"rank {here}"
    ended = not_together(f"{me}, but rank 0 has ended")
    end, pause = time.monotonic() + timeout, 0.002
    asked, stood = time.monotonic(), 0
    port = here and store_port(keys)  # rank 0 need not look at its own store
    if port and has_closed(port):
        raise ended
    # Rank 0, which may host the store, tells the waiting ranks before it ends: torch prints a lot if a store goes away.
    ends = f"learnerkit/ended/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"  # set in processes/rank_main.py
    with _waiting(keys, ended) as root:
        keys.set(names[here], json.dumps(what))
        while not keys.check(names):
            if here and root.check([ends]):
                raise ended
            if none_moves is not None and time.monotonic() > asked + 1:
                stood, asked = stood + 1 if none_moves() else 0, time.monotonic()
            stands = stood > 1 and not keys.check(names)  # asked twice, a second apart
            if stands or time.monotonic() > end:
                missing = [str(number) for number, name in enumerate(names) if not keys.check([name])]
                ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
                keys.delete_key(names[here])  # otherwise a late rank would think that this one is here
                if stands:
                    raise not_together(f"{me}, and {ranks} {'wait' if len(missing) > 1 else 'waits'} in another call")
                longer = "; where it only needs longer, raise --timeout, or distrib_ctx(timeout=...)"
                raise not_together(f"{me}{' and' if what else ''} waited {timeout:.0f} s for {ranks}", longer)
            time.sleep(pause)
            pause = min(1.1 * pause, 0.05)
            if port and has_closed(port):
                raise ended
        return [json.loads(keys.get(name)) for name in names]


@contextmanager
def _waiting(keys: dist.Store, ended: PeerError) -> Iterator:
    """Count this rank as one that waits, for which rank 0 stays; give the store, and raise `ended` if it goes away."""
    root, port = _root(keys), store_port(keys)
    waiting = f"learnerkit/waiting/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        root.add(waiting, 1)
        yield root
    except dist.DistNetworkError:
        raise ended from None
    finally:
        with suppress(RuntimeError):
            if not (port and has_closed(port)):
                root.add(waiting, -1)


def not_together(text: str, more: str = "") -> PeerError:
    """Return the error of a rank that has made a call which others have not made; `more`: the end of its message."""
    return PeerError(
        f"{text}; every rank must make the same calls of fit, validate, get_preds and the like, in the same order"
        f"{more} (errors.html#peers)",
        standstill=True,  # no other error will follow
    )


def tell(key: str, text: str) -> None:
    """Leave a text for ranks that `hear` it, in the store, so that threads may do it while others use collectives.

    Raises:
        PeerError: rank 0 has ended.
    """
    try:
        store().set(f"learnerkit/told/{key}", text)
    except dist.DistNetworkError:
        raise PeerError(f"rank {rank()} could not leave its message on {key}: rank 0 has ended") from None


def hear(key: str, timeout: float) -> str:
    """Wait for the text that another rank leaves under a key, and return it.

    Args:
        key: a key that is used only once.
        timeout: seconds to wait.

    Raises:
        PeerError: no rank has left the text in time, or rank 0 has ended.
    """
    keys, end = store(), time.monotonic() + timeout
    pause = 0.001
    ended = PeerError(f"rank {rank()} waited for another rank's message on {key}, but rank 0 has ended")
    with _waiting(keys, ended):
        while not keys.check([f"learnerkit/told/{key}"]):
            if time.monotonic() > end:
                raise PeerError(f"rank {rank()} waited {timeout:.0f} s for another rank's message on {key}")
            time.sleep(pause)
            pause = min(1.2 * pause, 0.05)
        return keys.get(f"learnerkit/told/{key}").decode()


def store_port(keys: dist.Store) -> int | None:
    """Return the port by which the ranks reach a store, if it has one."""
    return getattr(_root(keys), "port", None)


def _root(keys: Any) -> Any:
    """Return the store inside of prefixes."""
    while isinstance(keys, dist.PrefixStore):
        keys = keys.underlying_store
    return keys


@collective
def _meet_in_store(
    timeout: timedelta | None, what: str = "", wait: float = JOIN_SECONDS, starts_apart: bool = False
) -> dist.Store:
    """Return the store at the address in the environment, where torch alone would wait for half an hour.

    A scheduler may start the machines at different times (`starts_apart`), so that they wait as long as for a fit.
    """
    promised = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not starts_apart:
        wait = min(wait, JOIN_SECONDS) if promised else JOIN_SECONDS
    me = f"rank {rank()} called {what}, but " if what else ""
    try:
        if rank() or promised:
            _await_host(promised, wait)
        keys, _, _ = next(dist.rendezvous("env://", rank(), world_size(), timeout=timedelta(seconds=max(wait, 1.0))))
    except NotAStore as e:
        said = f"what listens at the address of rank 0 does not answer like a process of this run ({e})"
        raise _not_met(me + said) from None
    except (RuntimeError, TimeoutError) as e:
        raise _not_met(f"{me}the other processes of this run did not come within {wait:.0f} s") from e
    except ValueError as e:  # a variable is missing
        raise _not_met(f"{me}the address of the other processes is not known ({e})") from e
    keys.set_timeout(timeout or default_timeout())
    return keys


def _not_met(what: str) -> RuntimeError:
    """Return the error of a process that could not join the others."""
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
        wait: seconds to wait for a process that listens.

    Raises:
        TimeoutError: no process listens there.
        NotAStore: another program does.
    """
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        return  # torch's error says more about it
    end = time.monotonic() + wait
    while not store_answers(host, int(port), math.inf if promised else end - time.monotonic()):
        if time.monotonic() > end:
            raise TimeoutError(f"nobody listens at {host}:{port}")
        time.sleep(0.1)


def _let_threads_settle() -> None:
    """Wait until gloo's threads hold no lock that would block a child that is about to be forked.

    gloo's threads hold the lock around the interpreter's list of threads for a moment when they release a collective's
    tensors. A child forked in that moment finds it locked: CPython 3.11 acquires it once before it makes a new one
    (`PyOS_AfterFork_Child`; 3.12 makes a new one first).
    """
    time.sleep(0.002)  # the last collective needs some time to release its tensors
    await_thread_list_lock()


group_is_dead = False
"""The connections of torch's process group are closed: the next `join` makes another group."""


@collective
def _join_again(timeout: timedelta | None) -> None:
    global group_is_dead
    # The new group needs its own keys: those of the old group tell of its dead connections.
    fresh = dist.PrefixStore("learnerkit/next", store())
    backend, here, size = dist.get_backend_config(), rank(), world_size()
    dist.destroy_process_group()
    dist.init_process_group(backend, store=fresh, rank=here, world_size=size, timeout=timeout)
    group_is_dead = False


def _leave(process: int) -> None:
    if is_joined() and os.getpid() == process:  # A forked child has no threads of the group.
        dist.destroy_process_group()


def store() -> dist.Store:
    """Return the key-value store behind the process group, for messages that no collective should carry."""
    return default_store()


def count_call(name: str) -> int:
    """Count the calls of `name` on this rank, and return the number with this one: it is the same on ranks in step."""
    return store().add(f"learnerkit/{name}/calls/{rank()}", 1)
