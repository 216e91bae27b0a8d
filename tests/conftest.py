"""Fixtures of the tests, and the guard that no test leaves anything behind."""

import os
import random
import signal

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, Wrapped
from torch import nn


def pytest_runtest_setup(item):
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


# The guards


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Fail a test that leaves environment variables, processes, a process group or a global setting behind."""
    before = _globals()
    children = set(psutil.Process().children(recursive=True))
    yield
    left = [p for p in psutil.Process().children(recursive=True) if p not in children and _is_running(p)]
    names = [_command(p) for p in left]
    for process in left:
        process.kill()
    joined = dist.is_initialized()
    if joined:
        dist.destroy_process_group()
    after = _globals()
    _put_back(before)
    changed = {
        name: (before.get(name), after.get(name)) for name in before | after if before.get(name) != after.get(name)
    }
    assert not changed, f"the test left these changed (before, after): {changed}"
    assert not names, f"the test left these processes: {names}"
    assert not joined, "the test left a process group"


# torch notes the place of its cache when a compiler is first asked for.
_NOT_OURS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")


def _globals():
    env = {f"${name}": value for name, value in os.environ.items() if name not in _NOT_OURS}
    return env | {
        "gradients": torch.is_grad_enabled(),
        "default type": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "Ctrl-C": signal.getsignal(signal.SIGINT),
    }


def _put_back(before):
    for name in list(os.environ):
        if f"${name}" not in before and name not in _NOT_OURS:
            del os.environ[name]
    os.environ.update({name[1:]: value for name, value in before.items() if name.startswith("$")})
    torch.set_grad_enabled(before["gradients"])
    torch.set_default_dtype(before["default type"])
    torch.use_deterministic_algorithms(before["deterministic"])
    if before["Ctrl-C"] is not None:
        signal.signal(signal.SIGINT, before["Ctrl-C"])


def _is_running(process):
    try:
        # Python's own helper for shared memory lives as long as the process that made it.
        return process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in _command(process)
    except psutil.Error:
        return False


def _command(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture(autouse=True)
def in_tmp_path(nothing_left_behind, tmp_path, monkeypatch):
    """Every test has a working directory of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts with the same random numbers."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Small tensors gain nothing from threads, and other processes share this machine."""
    torch.set_num_threads(1)


@pytest.fixture
def ctrl_c():
    """Have SIGINT raise KeyboardInterrupt, also where the tests were started in the background; press it by a call."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def script_env():
    """The environment for a Python script that imports this learnerkit."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


@pytest.fixture
def plt():
    """matplotlib without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


# Several GPUs, pretended


@pytest.fixture
def two_gpus(monkeypatch):
    """As if there were two GPUs, for the wrapping alone."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("learnerkit.parallel.data_parallel.can_split", lambda device, ids: True)
    monkeypatch.setattr(nn, "DataParallel", Wrapped)
