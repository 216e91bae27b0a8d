"""Checkpoints that several ranks write and read together."""

import os
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from checkpoint_files import largest_file, state_of

from learnerkit import CheckpointError, distributed
from learnerkit.checkpoints import storage
from learnerkit.checkpoints.storage import Storage, read_checkpoint

pytestmark = pytest.mark.ranks(2, slow=[3], soak=["torchrun"])

LARGE = 40_000  # numbers, which are shared out


def large_state(number):
    weights, state, own, info = state_of(number, LARGE)
    state["opt"]["more"] = [torch.full((LARGE,), float(number + i)) for i in range(4)]
    return weights, state, own | {"rank": distributed.rank()}, info


def save(found, number):
    found.save(f"step{number}", *large_state(number))


def is_state(checkpoint, number):
    weights, state, _, info = large_state(number)
    read, opt = checkpoint.weights(), checkpoint.state()["opt"]
    owns = [checkpoint.own(rank) for rank in range(checkpoint.n_ranks)]
    return (
        checkpoint.info == info
        and all(torch.equal(read[name], weights[name]) for name in weights)
        and all(torch.equal(a, b) for a, b in zip(opt["more"], state["opt"]["more"], strict=True))
        and torch.equal(opt["state"][0]["exp_avg"], state["opt"]["state"][0]["exp_avg"])
        and [own["rank"] for own in owns] == list(range(len(owns)))
        and checkpoint.own(len(owns)) is None
    )


def names(path):
    distributed.barrier()
    found = sorted(os.listdir(path))
    distributed.barrier()
    return found


def raises_alike(call, *says):
    """The call raises the same text on all ranks, with these in it."""
    with pytest.raises(CheckpointError) as caught:
        call()
    text = str(caught.value)
    assert distributed.same_everywhere(text), text
    assert all(each in text for each in says), text


@pytest.mark.parametrize("background", [False, True])
def test_the_ranks_share_the_work_and_any_number_reads_it(background):
    found = Storage(Path("run"), keep=2, background=background)
    found.check_writable()
    assert names("run") == []
    for number in (1, 2, 3):
        save(found, number)
    checkpoint = found.newest()
    assert is_state(checkpoint, 3)  # newest has waited until old ones were gone
    assert names("run") == ["latest", "step2", "step3"]
    n = distributed.world_size()
    assert checkpoint.n_ranks == n
    files = {path.name: path.stat().st_size for path in checkpoint.path.iterdir()}
    assert len(files) == 3 + 2 * n
    sizes = [files[f"rank{rank}.safetensors"] + (files["model.safetensors"] if rank == 0 else 0) for rank in range(n)]
    assert max(sizes) < (3.0 if n == 2 else 2.0) * 4 * LARGE + 12_000  # of six tensors, each somebody's
    read, hashed = [], storage._sha256
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "_sha256", lambda path: (read.append(path.name), hashed(path))[1])
        found.newest()
    shares = distributed.all_gather(read)
    assert sorted(name for share in shares for name in share) == sorted(files.keys() - {"manifest.json"})
    assert is_state(read_checkpoint(checkpoint.path), 3)


@pytest.mark.parametrize("background", [False, True])
def test_r29_an_error_on_one_rank_is_raised_on_all(background):
    found = Storage(Path("run"), background=background)
    save(found, 1)
    found.wait()
    last = distributed.world_size() - 1

    def full(rank):
        with largest_file(1000 if distributed.rank() == rank else 10**9):
            save(found, 2)
            found.wait()

    def odd(rank):
        weights, state, own, info = large_state(2)
        found.save("step2", weights, state, own | ({"odd": {1}} if distributed.rank() == rank else {}), info)

    for rank in (0, last):
        raises_alike(lambda r=rank: full(r), "cannot be saved", f"rank {rank}: [Errno 27] File too large", "step2")
        raises_alike(lambda r=rank: odd(r), f"rank {rank}: own.odd is a set")
        assert names("run") == ["latest", "step1"]
        assert is_state(found.newest(), 1)
    for name in ("../x", "a\0"):
        raises_alike(lambda n=name: found.save(n, *large_state(2)), f"rank 0, {'1' if last == 1 else '1, 2'}: got the")
    save(found, 3)
    assert is_state(found.newest(), 3)


def test_a_rank_without_memory_for_its_copies_is_an_error_on_all():
    found = Storage(Path("run"), background=True)

    def fail(*args):
        raise MemoryError("no more")

    with pytest.MonkeyPatch.context() as patch:
        if distributed.rank() == 1:
            patch.setattr(storage.HostMemory, "copies", fail)
        raises_alike(lambda: save(found, 1), "rank 1: MemoryError: no more")
    assert names("run") == []


def test_damage_in_any_ranks_file_is_seen_by_all():
    found = Storage(Path("run"))
    for number in (1, 2, 3):
        save(found, number)
    for rank in range(distributed.world_size()):
        path = Path("run", "step3", f"rank{rank}.safetensors")
        content = path.read_bytes()
        distributed.barrier()
        if distributed.is_main():
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        distributed.barrier()
        with warnings.catch_warnings(record=True, action="always") as caught:
            assert is_state(found.newest(), 2)
        texts = [str(warning.message) for warning in caught]
        assert [path.name in text for text in texts] == ([True] if distributed.is_main() else []), texts
        if distributed.is_main():
            path.write_bytes(content)
        distributed.barrier()
        assert is_state(found.newest(), 3)
        distributed.barrier()
    if distributed.is_main():
        for number in (1, 2, 3):
            Path("run", f"step{number}", "state.json").write_text("")
    distributed.barrier()
    with warnings.catch_warnings(action="ignore"):
        raises_alike(found.newest, "no checkpoint in run is whole")


def test_r30_machines_that_see_another_directory_are_told_so():
    mine = Path("run") if distributed.is_main() else Path("elsewhere")
    mine.mkdir(exist_ok=True)
    says = "rank 1", "is not the directory that rank 0 sees", "all machines share"
    raises_alike(Storage(mine).check_writable, *says)
    if distributed.is_main():
        Path("file").write_text("")
    distributed.barrier()
    raises_alike(Storage(Path("file", "run")).check_writable, "rank 0: ", "Not a directory")
    assert names("run") == []


def test_states_that_differ_are_rank_0s():
    weights, state, own, info = large_state(1)
    state["opt"]["more"] = [torch.full((LARGE,), float(distributed.rank())) for _ in range(1 + distributed.rank())]
    found = Storage(Path("run"))
    found.save("one", weights, state | {"rank": distributed.rank()}, own, info)
    checkpoint = found.newest()
    assert checkpoint.state()["rank"] == 0
    assert [float(t[0]) for t in checkpoint.state()["opt"]["more"]] == [0.0]
    assert checkpoint.own(1)["rank"] == 1


def test_training_communicates_while_the_ranks_write():
    held, write = threading.Event(), storage.write_new

    def wait(path, pieces):
        assert held.wait(60)
        return write(path, pieces)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "write_new", wait)
        found = Storage(Path("run"), background=True)
        save(found, 1)
        for i in range(50):
            assert distributed.reduce(i) == i * distributed.world_size()
        assert not any(distributed.all_gather(found._writing.done()))
        if distributed.rank() == 0:
            held.set()  # it writes its part, and waits for the others'
        for i in range(50):
            assert distributed.reduce(i) == i * distributed.world_size()
        assert not any(distributed.all_gather(found._writing.done()))
        assert "step1" not in names("run")
        held.set()
        found.wait()
    assert is_state(found.newest(), 1)


def test_a_rank_that_does_not_come_is_an_error_in_time():
    write = storage.write_new

    def late(path, pieces):
        time.sleep(1.0 if distributed.rank() == 1 else 0)
        return write(path, pieces)

    found = Storage(Path("run"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("learnerkit.checkpoints.storage._PATIENCE", 0.2)
        patch.setattr(storage, "write_new", late)
        with pytest.raises(
            (CheckpointError, distributed.PeerError), match="rank 0 waited 0 s for another rank's message on checkpoint"
        ):
            save(found, 1)
    save(found, 2)
    assert is_state(found.newest(), 2)
