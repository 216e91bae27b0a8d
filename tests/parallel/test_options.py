"""What DistributedCallback's options do, on two processes."""

from launching import run_script


def test_options():
    printed = run_script("options.py", nproc=2)
    assert printed.rstrip().endswith("all well")
    assert "find_unused_parameters=True was specified in DDP constructor" not in printed  # torch's warning, in C++
