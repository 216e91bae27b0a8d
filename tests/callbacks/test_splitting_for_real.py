"""SplitBatch where the host's memory is really full: torch's allocator fails, in a process of its own."""

import re
import sys

import pytest
from launching import run_script

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the address space has no limit"),
]


def test_r41_the_hosts_memory_is_really_full():
    printed = run_script("full_memory.py", way="python", timeout=280)
    line = r"^(\w+): (\d+) failures, parts (\d+) and (\d+), (\S+) \| the memory: .*SplitBatch"
    found = {where: numbers for where, *numbers in re.findall(line, printed, re.MULTILINE)}
    assert list(found) == ["activations", "forward", "backward", "evaluation"], printed
    for where, (failures, training, evaluation, far) in found.items():
        assert float(far) < 1e-9, printed
        assert (int(training) > 1, int(evaluation) > 1) == (where != "evaluation", where == "evaluation"), printed
        assert (int(failures) > 0) == (where != "activations"), printed
    assert len(re.findall(r"^SplitBatch takes batches of 64 samples in \d+ parts$", printed, re.MULTILINE)) >= 3
