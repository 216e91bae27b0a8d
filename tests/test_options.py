"""Options of DistributedCallback and what a step costs: scripts/options.py on two processes."""

from launching import run_script


def test_options():
    assert "all well" in run_script("options.py", nproc=2)
