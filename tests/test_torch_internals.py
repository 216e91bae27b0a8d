"""Private names that the package needs: if a release takes one away, the test of this name fails."""

import importlib

import pytest
from torch import nn

from learnerkit.torch_internals import BatchNorm

NAMES = ["torch.nn.modules.batchnorm._BatchNorm"]


@pytest.mark.parametrize("name", NAMES)
def test_the_name_is_there(name):
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)


def test_batch_norms():
    for norm in (nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2), nn.LazyBatchNorm2d()):
        assert isinstance(norm, BatchNorm)
    for other in (nn.InstanceNorm1d(2), nn.LayerNorm(2), nn.Linear(2, 2)):
        assert not isinstance(other, BatchNorm)
