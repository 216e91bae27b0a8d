"""Facts, collectives and seeds on one process and on several."""

import os
import random
import re
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import mostly_slow, raises
from servers import FOREIGN, serving

from learnerkit import on_rank0, rank0_first, set_seed, world
from learnerkit.launch.environment import LOOPBACK


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


# On several ranks

on_ranks = pytest.mark.ranks(2, slow=[3, "torchrun"])


@on_ranks
def test_collectives_on_several_ranks():
    rank, n = world.rank(), world.world_size()
    assert world.all_gather(rank) == list(range(n))
    assert [int(t) for t in world.all_gather(torch.tensor(rank))] == list(range(n))
    assert world.reduce(rank + 1) == n * (n + 1) // 2
    assert world.reduce(float(rank), "mean") == (n - 1) / 2
    assert world.reduce(torch.tensor([rank, -rank]), "max").tolist() == [n - 1, 0]
    assert world.reduce(rank, "min") == 0
    assert world.broadcast({"from": rank}) == {"from": 0}
    assert world.broadcast(torch.tensor(rank)).item() == 0
    pieces = [(i, torch.full((i % 3, 2), i)) for i in range(7) if i % n == rank]
    whole = world.gather_pieces(pieces)
    assert [t.shape[0] for t in whole] == [i % 3 for i in range(7)]
    assert (world.gather_pieces(pieces, "rank0") is not None) == (rank == 0)
    assert not world.same_everywhere(rank)
    assert world.same_everywhere([1, 2])
    world.barrier()
    with world.no_collectives("the test"), raises(RuntimeError, "the test called world.reduce"):
        world.reduce(1)


@on_ranks
def test_rank_0_goes_first_and_its_error_reaches_the_others():
    file = Path("first")
    was_there = rank0_first(lambda: (file.exists(), file.touch())[0])
    assert was_there == (world.rank() > 0)

    @rank0_first(per_node=True)
    def second(name, suffix=""):
        path = Path(name + suffix)
        found = path.exists()
        path.touch()
        return found

    assert second("second", suffix="!") == (world.rank() > 0)

    def fails():
        raise OSError("no such host")

    with raises(OSError if world.is_main() else RuntimeError, "no such host"):
        rank0_first(fails)
    assert on_rank0(lambda: world.rank())() == (0 if world.is_main() else None)


# Where the processes meet


@pytest.fixture
def second_of_two(monkeypatch):
    """The environment of rank 1 of 2, whose rank 0 is at a port."""

    def set_port(port):
        facts = {"RANK": 1, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}
        for name, value in facts.items():
            monkeypatch.setenv(name, str(value))

    monkeypatch.setattr(world, "JOIN_SECONDS", 0.5)
    return set_port


@pytest.mark.parametrize("name", mostly_slow(FOREIGN, "http", "speaks first", "closes", slow=["silent"]))
def test_something_else_at_the_address_of_rank_0_is_one_error(second_of_two, capfd, name):
    serve, answer = FOREIGN[name]
    with serving(serve) as port:
        second_of_two(port)
        facts = f"RANK=1 WORLD_SIZE=2 MASTER_ADDR={LOOPBACK} MASTER_PORT={port}"
        said = rf"does not answer like a process of this run \({answer}.*\).* others \({re.escape(facts)}\)\. Start"
        with pytest.raises(RuntimeError, match=said) as caught:
            world.join()
    assert caught.value.__suppress_context__  # the message says it all
    assert capfd.readouterr() == ("", "")


def test_nobody_at_the_address_of_rank_0(second_of_two, capfd):
    with socket.create_server((LOOPBACK, 0)) as listener:
        second_of_two(listener.getsockname()[1])
    with pytest.raises(RuntimeError, match="the other processes of this run did not come within 0 s; the environment"):
        world.join()
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_ranks_wait_for_a_launchers_store_however_late_rank_0_imports_torch(monkeypatch, second_of_two):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    listener, stores = socket.create_server((LOOPBACK, 0)), []
    port = listener.getsockname()[1]
    second_of_two(port)

    def serve():
        found = torch.distributed.TCPStore(
            LOOPBACK, port, is_master=True, master_listen_fd=listener.detach(), wait_for_workers=False
        )
        found.set("there", "now")
        stores.append(found)

    late = threading.Timer(4 * world.JOIN_SECONDS, serve)
    late.start()
    found = world._meet_in_store(None)
    late.join()
    assert stores
    assert found.get("there") == b"now"


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_set_seed_repeats_every_generator():
    set_seed(7)
    first = draw()
    set_seed(7)
    assert draw() == first
    set_seed(8)
    assert draw() != first


def test_set_seed_reproducible_asks_for_deterministic_algorithms(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    set_seed(1, reproducible=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    torch.use_deterministic_algorithms(False)


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


@on_ranks
@pytest.mark.parametrize("children", [10, pytest.param(1000, marks=pytest.mark.soak)])
def test_children_forked_after_collectives_come_to_life(children):
    """As the workers of a loader must."""
    for number in range(children):
        for _ in range(3):
            world.all_gather({"a": number})
        child = os.fork()
        if child == 0:
            os._exit(0)
        end = time.monotonic() + 10
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                raise AssertionError(f"child {number} did not start")
            time.sleep(0.0002)


@pytest.mark.filterwarnings("error")
def test_a_warning_that_comes_once_and_from_rank_0(monkeypatch):
    monkeypatch.setattr(world, "_warned", set())
    with pytest.warns(UserWarning, match="^said once in test_world$") as told:
        world.warn_once("said once in test_world")
    assert told[0].filename == __file__
    world.warn_once("said once in test_world")
    monkeypatch.setattr(world, "rank", lambda: 1)
    world.warn_once("said by rank 0 alone")
    with pytest.warns(UserWarning, match="^said on any rank$"):
        world.warn_once("said on any rank", on_all=True)
