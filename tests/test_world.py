"""Facts, collectives and seeds on one process; scripts/behaviour.py has them on several."""

import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from launching import run_script

from learnerkit import on_rank0, rank0_first, set_seed, world


def test_facts_come_from_the_environment_when_asked(monkeypatch):
    assert (world.rank(), world.world_size(), world.local_rank(), world.is_main()) == (0, 1, 0, True)
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert (world.rank(), world.world_size(), world.local_rank(), world.is_main()) == (3, 8, 1, False)


def test_on_one_process_collectives_are_the_identity():
    x = torch.arange(3)
    assert world.reduce(x) is x
    assert world.reduce(2, "mean") == 2
    assert world.broadcast(x) is x
    assert world.all_gather("a") == ["a"]
    assert [int(t) for t in world.gather_pieces([(2, torch.tensor(2)), (1, torch.tensor(1))])] == [1, 2]
    assert world.same_everywhere(object())
    world.barrier()
    world.follow_rank0("nothing")
    with world.no_collectives("here"):
        assert world.reduce(1) == 1


def test_an_unknown_operation_is_named():
    with pytest.raises(ValueError, match="op='product'"):
        world.reduce(1, "product")


def test_rank0_first_and_on_rank0_as_functions_and_decorators():
    assert rank0_first(max, 1, 2) == 2

    @rank0_first()
    def f(a, b=1):
        "Adds."
        return a + b

    @on_rank0
    def g(a):
        return a

    assert f(1, b=2) == 3
    assert (f.__name__, f.__doc__) == ("f", "Adds.")
    assert g(4) == 4


def test_on_rank0_returns_none_elsewhere(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert on_rank0(lambda: 1)() is None


def test_a_local_rank_without_an_accelerator_is_told_what_there_is(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(RuntimeError, match="start at most 2 processes"):
        world.default_device()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert world.default_device() == torch.device("cuda", 1)


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_set_seed_repeats_every_generator():
    set_seed(7)
    first = draw()
    set_seed(7)
    assert draw() == first
    set_seed(8)
    assert draw() != first


def test_set_seed_reproducible_asks_for_deterministic_algorithms(script_env):
    code = (
        "import torch, os; from learnerkit import set_seed; set_seed(1, reproducible=True); "
        "print(torch.are_deterministic_algorithms_enabled(), os.environ['CUBLAS_WORKSPACE_CONFIG'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=script_env
    )
    assert done.stdout.split() == ["True", ":4096:8"]


def test_seed_states_go_round():
    states = world.seed_states()
    first = draw()
    world.set_seed_states(states)
    assert draw() == first


def test_streams_of_one_seed_are_far_apart():
    seeds = [world.stream_seed(42, i) for i in range(100)]
    assert seeds[0] == 42
    assert len(set(seeds)) == 100
    assert all(0 <= s < 2**63 for s in seeds)


@pytest.mark.slow
def test_children_forked_after_collectives_come_to_life():
    run_script("forks.py", 1000, nproc=3)
