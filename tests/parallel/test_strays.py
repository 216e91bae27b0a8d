"""Ranks that do not make the same calls, in processes of their own: how those end, how soon, and with what words."""

import re
import subprocess
import time

import pytest
from launching import SCRIPTS, WAYS, environment, in_time

SAME = "every rank must make the same calls of fit, validate, get_preds and the like, in the same order"

ENDS = {
    # The exit code, and what is said.
    "alone-0": (1, f"PeerError: rank 0 called fit and waited 3 s for rank 1; {SAME}"),
    "alone-1": (1, f"PeerError: rank 1 called fit, but rank 0 has ended; {SAME}"),
    "alone-0-sleep": (1, f"PeerError: rank 0 called fit and waited 3 s for rank 1; {SAME}"),
    "alone-1-sleep": (1, f"PeerError: rank 1 called fit and waited 3 s for rank 0; {SAME}"),
    "alone-0-elsewhere": (1, f"PeerError: rank 0 called fit and waited 3 s for rank 1; {SAME}"),
    "second-0": (1, f"PeerError: rank 0 called fit and waited 3 s for rank 1; {SAME}"),
    "second-1": (1, f"PeerError: rank 1 called fit, but rank 0 has ended; {SAME}"),
    "own-group": (1, "all ranks wait, in different calls"),
    "waiting-at-the-end": (0, "rank 1 is through"),
    "shapes": (1, "every rank must make the same calls, with tensors of one shape and type, in the same order"),
    "exit": (3, "rank 1 failed in after_batch of Callback (epoch 0, step 2): SystemExit: 3"),
    "_exit": (3, "rank 1 failed (exit code 3)"),
}


def end_of(case, way):
    """(exit code, seconds, what was printed) of a run; no process of it may be left."""
    start = time.monotonic()
    done = subprocess.run(
        [*WAYS[way](2), str(SCRIPTS / "strays.py"), case],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.returncode, time.monotonic() - start, done.stdout + done.stderr


# torchrun's own agent stops the other ranks with the first that fails.
WITH_TORCHRUN = [(case, "torchrun") for case in ("alone-0-sleep", "own-group", "shapes", "second-0")]


@pytest.mark.soak
@pytest.mark.parametrize(("case", "way"), [*((case, "launch") for case in ENDS), *WITH_TORCHRUN])
def test_ranks_that_make_different_calls_end_by_themselves(case, way):
    code, seconds, printed = end_of(case, way)
    expected, said = ENDS[case]
    assert code == (expected if way == "launch" else min(expected, 1)), printed
    assert said in printed
    assert in_time(seconds, 40)
    assert not re.search("terminate called|SIGABRT|core dumped|Fatal Python error", printed), printed
    if way == "launch" and case.startswith(("alone", "second")):
        assert "TCPStore" not in printed, printed  # the store's own words
        assert all(float(took) < 30 for took in re.findall(r"took ([\d.]+) s", printed)), printed
