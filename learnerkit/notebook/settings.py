"""The settings of a notebook's process, for its workers: directory, environment, options of torch, random states."""

import logging
import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from learnerkit import distributed
from learnerkit.distributed import seeds
from learnerkit.launch.environment import Topology, rank_environment


def get_surroundings() -> tuple[str, list[str], dict[str, str]]:
    """Return the working directory, the search path of modules and the environment variables."""
    return os.getcwd(), [p for p in sys.path if isinstance(p, str)], dict(os.environ)


def set_surroundings(folder: str, path: list[str], environ: Mapping[str, str]) -> None:
    """Apply the kernel's `get_surroundings` in a worker, except the variables that make it a rank."""
    os.chdir(folder)
    sys.path[:] = path
    topology = Topology(distributed.world_size(), int(os.environ["MASTER_PORT"]))
    os.environ.update(rank_environment(environ, topology, distributed.rank(), os.environ.get("CUDA_VISIBLE_DEVICES")))


def get_options() -> dict[str, Any]:
    """Return the options of Python and torch that change training or its output."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return {
        "warnings": list(warnings.filters),
        "logging": logging.getLogger().level,
        "dtype": torch.get_default_dtype(),
        "deterministic": (deterministic, torch.is_deterministic_algorithms_warn_only_enabled()),
        "matmul": torch.get_float32_matmul_precision(),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "cudnn": {name: getattr(torch.backends.cudnn, name) for name in ("benchmark", "deterministic", "allow_tf32")},
    }


def set_options(options: Mapping[str, Any]) -> None:
    """Apply the result of `get_options`."""
    warnings.filters[:] = options["warnings"]  # type: ignore[index]  # a list, which typeshed calls a Sequence
    logging.getLogger().setLevel(options["logging"])
    torch.set_default_dtype(options["dtype"])
    # Only if it changes, as the call takes seconds.
    if (chosen := options["deterministic"]) != get_options()["deterministic"]:
        torch.use_deterministic_algorithms(chosen[0], warn_only=chosen[1])
    torch.set_float32_matmul_precision(options["matmul"])
    torch.set_anomaly_enabled(*options["anomaly"])
    for name, value in options["cudnn"].items():
        setattr(torch.backends.cudnn, name, value)


def get_random_states() -> tuple:
    """Return the states of this process's random generators: the host's, and CUDA's if CUDA has been used."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return *seeds.seed_states(), cuda


def set_random_states(states: tuple) -> None:
    """Apply the result of `get_random_states`. If it has no state for CUDA, torch's seed is used there."""
    *host, cuda = states
    seeds.set_seed_states(tuple(host))
    if not torch.cuda.is_available():
        return
    if cuda is None:
        torch.cuda.manual_seed(torch.initial_seed())
    else:
        torch.cuda.set_rng_state(cuda)
