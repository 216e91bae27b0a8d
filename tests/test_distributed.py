"""Facts, collectives and seeds on one process and on several."""

import math
import os
import random
import re
import signal
import socket
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import mostly_soak, raises
from servers import FOREIGN, serving

from learnerkit import distributed, on_rank0, rank0_first, set_seed
from learnerkit.distributed import facts, meeting, seeds
from learnerkit.distributed.collectives import _explained
from learnerkit.processes.machine import LOOPBACK


def test_facts_come_from_the_environment_when_asked(monkeypatch):
    assert (distributed.rank(), distributed.world_size(), distributed.local_rank(), distributed.is_main()) == (
        0,
        1,
        0,
        True,
    )
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert (distributed.rank(), distributed.world_size(), distributed.local_rank(), distributed.is_main()) == (
        3,
        8,
        1,
        False,
    )


def test_variables_that_are_empty_or_no_numbers(monkeypatch):
    # A container may pass on variables that are empty where it was started.
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")
    assert (distributed.rank(), distributed.world_size(), distributed.local_rank()) == (0, 1, 0)
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(ValueError, match="RANK=two: this must be a number, 0 or more"):
        distributed.rank()
    monkeypatch.setenv("LOCAL_RANK", "-1")
    with pytest.raises(ValueError, match="LOCAL_RANK=-1: this must be a number, 0 or more"):
        distributed.local_rank()


def test_a_collective_inside_another_one_tells_of_a_lost_rank_once():
    with pytest.raises(distributed.PeerError) as caught, _explained("all_gather"), _explained("broadcast"):
        raise RuntimeError("Connection closed by peer")
    assert str(caught.value).startswith("rank 0 called distributed.broadcast, but another rank has ended")
    assert str(caught.value).count("rank 0 called") == 1


def test_facts_come_from_the_variables_of_a_cluster_without_a_launcher(monkeypatch):
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    for name, value in zip(names, "5812", strict=True):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", "n1")
    assert (distributed.rank(), distributed.world_size(), distributed.local_rank()) == (5, 8, 1)
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "2"}.items():
        monkeypatch.setenv(name, value)  # a launcher's own come first
    assert (distributed.rank(), distributed.world_size(), distributed.local_rank()) == (3, 8, 2)


def test_a_cluster_that_other_variables_contradict_is_refused_when_ranks_are_to_meet(monkeypatch):
    pod = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a", "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in pod.items():
        monkeypatch.setenv(name, value)
    assert (distributed.rank(), distributed.world_size()) == (1, 2)
    with pytest.raises(ValueError, match="Kubeflow says node 1 of 2, .* but RANK=0 and WORLD_SIZE=2; start the script"):
        distributed.join(1.0)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PET_NPROC_PER_NODE", "8")
    with pytest.raises(ValueError, match="one process was started here, where 8 ranks belong"):
        distributed.join(1.0)


def test_on_one_process_collectives_are_the_identity():
    x = torch.arange(3)
    assert distributed.reduce(x) is x
    assert distributed.reduce(2, "mean") == 2
    assert distributed.broadcast(x) is x
    assert distributed.all_gather("a") == ["a"]
    assert [int(t) for t in distributed.gather_pieces([(2, torch.tensor(2)), (1, torch.tensor(1))])] == [1, 2]
    assert distributed.same_everywhere(object())
    distributed.barrier()
    distributed.follow_rank0("nothing")
    with distributed.no_collectives("here"):
        assert distributed.reduce(1) == 1


def test_an_unknown_operation_is_named():
    with pytest.raises(ValueError, match="op='product'"):
        distributed.reduce(1, "product")


def test_rank0_first_and_on_rank0_are_functions_and_decorators():
    assert rank0_first(max, 1, 2) == 2
    assert rank0_first(sorted, [1, 2], reverse=True) == [2, 1]
    with pytest.raises(TypeError, match="rank0_first got pernode; as a decorator it takes per_node alone"):
        rank0_first(pernode=True)

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
        distributed.default_device()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert distributed.default_device() == torch.device("cuda", 1)


# On several ranks

on_ranks = pytest.mark.ranks(2, slow=[3], soak=["torchrun"])


@on_ranks
def test_collectives_combine_the_values_of_all_ranks():
    rank, n = distributed.rank(), distributed.world_size()
    assert distributed.all_gather(rank) == list(range(n))
    assert [int(t) for t in distributed.all_gather(torch.tensor(rank))] == list(range(n))
    assert distributed.reduce(rank + 1) == n * (n + 1) // 2
    assert distributed.reduce(float(rank), "mean") == (n - 1) / 2
    assert distributed.reduce(torch.tensor([rank, -rank]), "max").tolist() == [n - 1, 0]
    assert distributed.reduce(rank, "min") == 0
    assert (distributed.reduce(True), distributed.reduce(rank == 0, "mean")) == (n, 1 / n)
    assert distributed.reduce(torch.tensor([True, rank == 0]), "mean").tolist() == pytest.approx([1, 1 / n])
    with raises(TypeError, "reduce got a list; it takes a tensor or a number"):
        distributed.reduce([1, 2])
    with raises(TypeError, "reduce got op='max' and a sparse tensor; it takes 'sum' or 'mean' of these"):
        distributed.reduce(torch.eye(2).to_sparse(), "max")
    for src in (n, -1):
        with raises(ValueError, f"broadcast got src={src}; the ranks are 0 to {n - 1}"):
            distributed.broadcast(1, src)
    assert distributed.broadcast({"from": rank}) == {"from": 0}
    assert distributed.broadcast(torch.tensor(rank)).item() == 0
    # Only memory is sent, in whatever order the values lie there, and of the types that gloo knows.
    square = torch.arange(4.0).reshape(2, 2)
    turned = square.t().contiguous().t() if rank else square
    assert torch.equal(distributed.broadcast(turned + rank), square)
    assert torch.equal(distributed.reduce(turned), n * square)
    for values in (torch.tensor([-3, 7], dtype=torch.int16), torch.ones(2).to(torch.float8_e5m2)):
        assert distributed.broadcast(values).tolist() == values.tolist()
        assert [t.tolist() for t in distributed.all_gather(values)] == [values.tolist()] * n
    assert torch.equal(distributed.all_gather(torch.tensor([1 + 2j]).conj())[0], torch.tensor([1 - 2j]))
    for most in (torch.tensor(200, dtype=torch.uint8), torch.tensor(60000.0, dtype=torch.float16)):
        assert distributed.reduce(most, "mean").item() == most.item()
    for whole in (torch.int16, torch.uint16, torch.uint32, torch.uint64):
        numbers = torch.tensor([rank, 7]).to(whole)
        found = [distributed.reduce(numbers, op) for op in ("sum", "max", "min")]
        assert {t.dtype for t in found} == {whole}
        assert [t.tolist() for t in found] == [[n * (n - 1) // 2, 7 * n], [n - 1, 7], [0, 7]]
    large = torch.tensor(2**63 + 1 if rank == 0 else 5, dtype=torch.uint64)
    assert [distributed.reduce(large, op).item() for op in ("max", "min")] == [2**63 + 1, 5]
    for with_nan in range(n):
        value = math.nan if rank == with_nan else 1.0
        for op in ("max", "min"):
            assert math.isnan(distributed.reduce(value, op))
            torch.testing.assert_close(
                distributed.reduce(torch.tensor([[value, rank]]).bfloat16(), op),
                torch.tensor([[math.nan, n - 1 if op == "max" else 0]]).bfloat16(),
                equal_nan=True,
            )
    assert distributed.reduce(0.1 + 0.2j, "mean") == pytest.approx(0.1 + 0.2j, rel=1e-15)
    pieces = [(i, torch.full((i % 3, 2), i)) for i in range(7) if i % n == rank]
    whole = distributed.gather_pieces(pieces)
    assert [t.shape[0] for t in whole] == [i % 3 for i in range(7)]
    assert (distributed.gather_pieces(pieces, "rank0") is not None) == (rank == 0)
    named = distributed.gather_pieces([(rank, torch.full((1, 2), rank).as_subclass(Named))])
    assert [(type(t), t.tolist()) for t in named] == [(torch.Tensor, [[i, i]]) for i in range(n)]
    entered = []
    with distributed.around_collectives(lambda: nullcontext(entered.append("once"))):
        distributed.gather_pieces(pieces)
    assert len(entered) == 2  # the shapes, and the bytes
    assert not distributed.same_everywhere(rank)
    assert distributed.same_everywhere([1, 2])
    distributed.barrier()
    with distributed.no_collectives("the test"), raises(RuntimeError, "the test called distributed.reduce"):
        distributed.reduce(1)


class Named(torch.Tensor):
    """A tensor with a name for each row, which it cannot tell of another shape, as MONAI's with their files."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.view:
            raise ValueError("the names of the rows are lost")
        return super().__torch_function__(func, types, args, kwargs or {})


@on_ranks
def test_rank_0_goes_first_and_its_error_reaches_the_others():
    file = Path("first")
    was_there = rank0_first(lambda: (file.exists(), file.touch())[0])
    assert was_there == (distributed.rank() > 0)

    @rank0_first(per_node=True)
    def second(name, suffix=""):
        path = Path(name + suffix)
        found = path.exists()
        path.touch()
        return found

    assert second("second", suffix="!") == (distributed.rank() > 0)

    def fails(suffix=""):
        raise OSError("no such host")

    for call, who in (
        (lambda: rank0_first(fails), "rank 0"),
        (lambda: rank0_first(per_node=True)(fails)(suffix="!"), "local rank 0"),
    ):
        said = "no such host" if distributed.is_main() else f"{who} failed in rank0_first(fails): OSError: no such host"
        with raises(OSError if distributed.is_main() else RuntimeError, said):
            call()
    assert on_rank0(lambda: distributed.rank())() == (0 if distributed.is_main() else None)


# Where the processes meet


@pytest.fixture
def second_of_two(monkeypatch):
    """The environment of rank 1 of 2, whose rank 0 is at a port."""

    def set_port(port):
        facts = {"RANK": 1, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}
        for name, value in facts.items():
            monkeypatch.setenv(name, str(value))

    monkeypatch.setattr(meeting, "JOIN_SECONDS", 0.5)
    return set_port


@pytest.mark.parametrize("name", mostly_soak(FOREIGN, "http", "speaks first", "closes"))
def test_something_else_at_the_address_of_rank_0_is_one_error(second_of_two, capfd, name):
    serve, answer = FOREIGN[name]
    with serving(serve) as port:
        second_of_two(port)
        facts = f"RANK=1 WORLD_SIZE=2 MASTER_ADDR={LOOPBACK} MASTER_PORT={port}"
        said = rf"does not answer like a process of this run \({answer}.*\).* others \({re.escape(facts)}\)\. Start"
        with pytest.raises(RuntimeError, match=said) as caught:
            distributed.join()
    assert caught.value.__suppress_context__  # the message says it all
    assert capfd.readouterr() == ("", "")


def test_an_address_where_rank_0_is_not_is_an_error(second_of_two, capfd):
    with socket.create_server((LOOPBACK, 0)) as listener:
        second_of_two(listener.getsockname()[1])
    with pytest.raises(RuntimeError, match="the other processes of this run did not come within 0 s; the environment"):
        distributed.join()
    assert capfd.readouterr() == ("", "")


def test_variables_of_another_run_without_an_address_are_told(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="address of the other processes is not known .*MASTER_ADDR.* unset them"):
        distributed.join()


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

    late = threading.Timer(4 * meeting.JOIN_SECONDS, serve)
    late.start()
    found = meeting._meet_in_store(None)
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


@pytest.mark.parametrize("seed", ["1", 1.5, None])
def test_a_seed_is_a_whole_number(seed):
    before = torch.get_rng_state()
    with raises(TypeError, f"got seed={seed!r}; it is a whole number"):
        set_seed(seed)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_a_seed_has_at_most_64_bits(seed):
    with raises(ValueError, f"got seed={seed}; it is a whole number of at most 64 bits"):
        set_seed(seed)


def test_set_seed_reproducible_asks_for_deterministic_algorithms(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    set_seed(1, reproducible=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    torch.use_deterministic_algorithms(False)


def test_seed_states_go_round():
    states = seeds.seed_states()
    first = draw()
    seeds.set_seed_states(states)
    assert draw() == first


def test_streams_of_one_seed_are_far_apart():
    numbers = [seeds.stream_seed(42, i) for i in range(100)]
    assert numbers[0] == 42
    assert len(set(numbers)) == 100
    assert all(0 <= number < 2**63 for number in numbers)


@on_ranks
def test_a_gathered_list_says_that_it_passes_no_gradients_back():
    embedding, label = torch.ones(2, requires_grad=True) * 2, torch.ones(1)
    said = "all_gather got (float32 tensor of shape (2,), float32 tensor of shape (1,)), in which tensors have grad"
    with pytest.warns(match=re.escape(said)) if distributed.is_main() else nullcontext():
        everyone = distributed.all_gather((embedding, label))
    assert [[t.tolist() for t in pair] for pair in everyone] == [[[2, 2], [1]]] * distributed.world_size()
    assert not any(t.requires_grad for pair in everyone for t in pair)
    with torch.no_grad():
        distributed.all_gather((embedding, label))
    distributed.all_gather((embedding.detach(), label))


@on_ranks
@pytest.mark.parametrize("children", [10, pytest.param(1000, marks=pytest.mark.soak)])
@pytest.mark.slow
def test_children_forked_after_collectives_come_to_life(children):
    """As the workers of a loader must."""
    for number in range(children):
        for _ in range(3):
            distributed.all_gather({"a": number})
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
    monkeypatch.setattr(facts, "_warned", set())
    with pytest.warns(UserWarning, match="^said once in test_distributed$") as told:
        distributed.warn_once("said once in test_distributed")
    assert told[0].filename == __file__
    distributed.warn_once("said once in test_distributed")
    monkeypatch.setattr(facts, "rank", lambda: 1)
    distributed.warn_once("said by rank 0 alone")
    with pytest.warns(UserWarning, match="^said on any rank$"):
        distributed.warn_once("said on any rank", on_all=True)


def test_world_is_another_name_of_the_same_module():
    from learnerkit import world
    from learnerkit.world import is_main

    assert world is distributed
    assert is_main is distributed.is_main
