"""Ranks that leave together, on real processes: cancels, errors, standstills."""

import re
import subprocess
import sys
import time

import pytest
import torch
from launching import SCRIPTS, environment, in_time, run_script


@pytest.mark.parametrize("part", ["cancels", "numbers", "others", "late", "errors", "alone"])
def test_two_ranks_leave_together(part):
    assert run_script("agreement.py", part, nproc=2).rstrip().endswith("all well")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_three_ranks_leave_together_whatever_the_order():
    assert run_script("agreement.py", "all", nproc=3, timeout=3500).rstrip().endswith("all well")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("part", ["cancels", "late", "errors", "alone"])
def test_two_gpus_leave_together(part):
    # NCCL: not run on a machine with two GPUs so far.
    assert run_script("agreement.py", part, nproc=2, gpus=True).rstrip().endswith("all well")


CASES = {
    "stop": ("silent", "rank 1 came to a standstill in before_batch of Standstill (epoch 0, step 5): it is silent"),
    "slow": ("slow", "rank 1 came to a standstill in before_batch of Standstill (epoch 0, step 5): it is slow"),
    "wait": ("waits", "all ranks wait, in different calls"),
}


@pytest.mark.parametrize("how", ["stop", "slow", "wait"])
def test_a_standstill_is_explained_and_ends_the_run(how):
    state, error = CASES[how]
    text = standstill(how, 1)
    assert re.search(r"rank 0 waits +\d+ s since before_batch of \w+ \(epoch 0, step 5\)", text), text
    assert re.search(rf"rank 1 {state} +\d+ s since before_batch of Standstill \(epoch 0, step 5\)", text), text
    assert ("not arrived: rank 1" in text) == (how != "wait"), text
    assert "rank 0's stack:" in text
    assert ("rank 1's stack:" in text) == (how != "stop"), text
    assert "time.sleep(600)" in text or how != "slow"
    assert text.count("no rank has moved on for 4 s") == 1
    assert error in text


@pytest.mark.slow
def test_a_standstill_of_the_rank_that_hosts_the_store():
    text = standstill("stop", 0)
    assert re.search(r"rank 0 silent +\d+ s since before_batch of Standstill \(epoch 0, step 5\)", text), text
    assert "rank 0 came to a standstill in before_batch of Standstill (epoch 0, step 5): it is silent" in text


def standstill(how, who):
    """What the launcher prints of such a run, which must fail, and end soon."""
    command = [sys.executable, "-m", "learnerkit.launch", "--nproc", "2", "--grace", "0.5"]
    start = time.monotonic()
    done = subprocess.run(
        [*command, str(SCRIPTS / "standstill.py"), how, str(who)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    assert in_time(time.monotonic() - start, 40)
    return done.stderr
