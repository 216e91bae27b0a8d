"""Private names of torch, CPython and IPython that are needed, each as one named function."""

from typing import TypeGuard

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def is_batch_norm(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Tell whether a module is a BatchNorm of any kind: those of other libraries share only this private base class."""
    return isinstance(module, _BatchNorm)
