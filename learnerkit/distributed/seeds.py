"""Seeds, and the states of random generators."""

import hashlib
import operator
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def set_seed(seed: int, reproducible: bool = False) -> None:
    """Seed python, numpy and torch: one model initialisation and one sample order on any number of ranks.

    Under DDP, dropout and augmentation still differ by rank and by worker: ranks other than 0 move on to separate
    streams when a fit or an evaluation starts.

    Args:
        seed: the same number on every rank.
        reproducible: also ask torch for deterministic algorithms, which can be slower. The random numbers that a
            dataset draws for a sample, such as its augmentation, then depend only on the seed, the epoch and the
            sample, not on loader workers and ranks. Iterable datasets do not tell their samples apart.

    Raises:
        TypeError, ValueError: `seed` is not a whole number of at most 64 bits.
    """
    try:
        seed = operator.index(seed)
    except TypeError:
        raise TypeError(f"got seed={seed!r}; it is a whole number") from None
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"got seed={seed}; it is a whole number of at most 64 bits, as torch takes it")
    torch.manual_seed(seed)
    _seed_others(seed)
    if reproducible:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's notes on reproducibility ask for it
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False


def stream_seed(seed: int, number: int) -> int:
    """Return the seed of stream `number` of those that belong to `seed`; stream 0 has `seed` itself."""
    # An odd constant (2**64 over the golden ratio) keeps neighbouring numbers' seeds far apart.
    return (seed + 0x9E3779B97F4A7C15 * number) % 2**63


def mixed_seed(*parts: Any) -> int:
    """Return one seed made from several numbers, such as those of an epoch, a batch and a rank."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


def seed_host(seed: int) -> None:
    """Seed only the host's generators: torch's CPU generator, python's and numpy's."""
    torch.default_generator.manual_seed(seed)
    _seed_others(seed)


def _seed_others(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def seed_states() -> tuple:
    """Return the states of the host's random generators: torch's, python's and, if it is imported, numpy's."""
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None


def without_arrays(state: Any) -> Any:
    """Return a random state with lists instead of numpy's arrays, which torch would not load by default."""
    if type(state) is dict:
        return {name: without_arrays(part) for name, part in state.items()}
    if type(state) is tuple:
        return tuple(map(without_arrays, state))
    return state.tolist() if type(state).__name__ == "ndarray" else state


@contextmanager
def device_streams_kept(device: torch.device) -> Iterator[None]:
    """Restore the random generators of all devices of this device's type at the end of the context.

    All devices are restored, as DataParallel uses several. The states are on the host, so nothing waits for a device.
    """
    states = device_states(device)
    try:
        yield
    finally:
        set_device_states(device, states)


@contextmanager
def own_stream(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from a separate stream within this context: torch's generators of the host and of the device get this seed.

    Their states are restored at the end. The states are on the host, so that nothing waits for a device.
    """
    with torch.random.fork_rng(devices=()), device_streams_kept(device):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes a hundred times as long
        if device.type != "cpu":
            module = torch.get_device_module(device)
            getattr(module, "manual_seed_all", module.manual_seed)(seed)
        yield


def device_states(device: torch.device) -> list[Tensor]:
    """Return the states, on the host, of the random generators of all devices of this type; none for the host."""
    return [torch.get_device_module(device).get_rng_state(*place) for place in _places(device)]


def set_device_states(device: torch.device, states: Sequence[Tensor]) -> None:
    """Restore `device_states`, on as many devices as there are."""
    for state, place in zip(states, _places(device), strict=False):
        torch.get_device_module(device).set_rng_state(state, *place)


def _places(device: torch.device) -> list[tuple]:
    """Return the arguments by which torch finds each device of a type: none for the host, and one device for MPS."""
    if device.type == "cpu":
        return []
    return [()] if device.type == "mps" else [(i,) for i in range(torch.get_device_module(device).device_count())]


def set_seed_states(states: tuple) -> None:
    """Restore `seed_states`."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if states[2] is not None:
        sys.modules["numpy"].random.set_state(states[2])
