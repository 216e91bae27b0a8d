"""Fixtures of the tests, and the guard that no test leaves anything behind."""

import gc
import inspect
import os
import re
import signal
import tempfile
from functools import cache
from pathlib import Path

import guards
import pytest
import torch
from helpers import ROOT, Wrapped
from rank_pool import RankPools, Ranks
from torch import nn

if hasattr(os, "SCHED_BATCH"):
    # Woken threads of gloo, here and in all processes of the tests, do not interrupt each other on few cores: tests on
    # ranks use a fifth less of the processor.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


gc.disable()  # until all is collected: what has been imported stays, and need not be looked through again and again


def pytest_runtestloop():
    """Collect garbage while tests run."""
    gc.enable()


def pytest_runtest_setup(item):
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """A run of all tests uses a process for each core; one of some files or tests is sooner done in this one."""
    whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    return min(os.cpu_count() or 1, 4) if whole else 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give each file to one process of tests, and all tests that run on ranks to one, which starts those once."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return "ranks" if runs_on_ranks(nodeid) else super()._split_scope(nodeid)

    if config.option.markexpr == "slow":
        config.option.loadscopereorder = False  # in the order of the tests, rather than by how many a file has
    return Scheduling(config, log)


LONG = ("checkpoints/test_faults.py", "docs/test_*.py", "notebook/test_kernel.py", "launch/test_*.py", "test_strays.py")


def place_of(item):
    """Where a test stands: with several processes of tests, what takes long must not begin last."""
    place = place_of_file(item.path)
    return 1 if place and runs_on_ranks(item.nodeid) else place


@cache
def place_of_file(path):
    """Where the tests of a file stand that do not run on ranks."""
    if path.match("preflight/test_ranks.py"):
        return 0  # a process in which torch's compiler has trained cannot be forked, as check_distributed does
    return 2 if any(path.match(name) for name in LONG) else 3


def runs_on_ranks(nodeid):
    """Tell whether a test runs on ranks, by its name."""
    return re.search(r"-ranks|on_ranks", nodeid) is not None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Order the tests; what is slow twice over, by its parameters and by its number of ranks, is for `-m soak`.

    What is marked `soak` is not for `pytest -m slow`, even if it is in a slow file, or one of its parameters is slow.
    """
    items.sort(key=place_of)
    for item in items:
        if len(list(item.iter_markers("slow"))) > 1:
            item.add_marker("soak")
    if config.option.markexpr == "slow":
        items[:] = [item for item in items if not item.get_closest_marker("soak")]


# Several processes


@pytest.fixture(scope="session")
def rank_pools():
    """The processes in which tests marked `ranks` run."""
    pools = RankPools()
    yield pools
    pools.end()


@pytest.fixture(autouse=True)
def ranks(request):
    """Which processes a test marked `ranks` runs on."""
    return getattr(request, "param", None)


def pytest_generate_tests(metafunc):
    """Make an item of a test marked `ranks` for each group of processes; on GPUs where there are as many."""
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is None:
        return
    found = [pytest.param(RANKS.get(n) or Ranks(n)) for n in mark.args]
    for later in ("slow", "soak"):
        marks = getattr(pytest.mark, later)
        found += [pytest.param(RANKS.get(n) or Ranks(n), marks=marks) for n in mark.kwargs.get(later, ())]
    if torch.cuda.device_count() < 2:
        found = [each for each in found if not each.values[0].gpus]
    metafunc.parametrize("ranks", found, indirect=True, ids=str)


RANKS = {"torchrun": Ranks(2, launcher="torchrun"), "gpus": Ranks(2, gpus=True)}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Call a test marked `ranks` on all of them, not here."""
    __tracebackhide__ = True
    if pyfuncitem.get_closest_marker("ranks") is None:
        return None
    values = pyfuncitem.funcargs
    values["rank_pools"].run(
        values["ranks"],
        pyfuncitem.function,
        filters=[text for mark in pyfuncitem.iter_markers("filterwarnings") for text in mark.args],
        **{name: values[name] for name in inspect.signature(pyfuncitem.function).parameters},
    )
    return True


# The guards


@pytest.fixture(autouse=True)
def older_objects_are_frozen():
    """Let a collection of garbage in a test look through the test's objects alone; it takes a second otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_behind(rank_pools):
    """Fail a test that leaves environment variables, processes, a process group or a global setting behind."""
    with guards.nothing_left_behind(allowed=rank_pools.processes):
        yield


@pytest.fixture
def short_path():
    """A folder with a short name, for sockets, whose paths may have 108 characters."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


@pytest.fixture(autouse=True)
def in_tmp_path(nothing_left_behind, tmp_path, monkeypatch):
    """Every test has a working directory of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts with the same random numbers."""
    guards.seed()


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
