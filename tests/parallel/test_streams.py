"""Iterable datasets: what scripts/streams.py finds on several ranks."""

import pytest
from launching import run_script


@pytest.mark.parametrize("nproc", [2, 3])
def test_iterable_datasets(nproc):
    assert run_script("streams.py", nproc=nproc).rstrip().endswith("all well")
