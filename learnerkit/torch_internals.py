"""Private names of torch, CPython and IPython that are needed, each as one named function."""

from torch.nn.modules.batchnorm import _BatchNorm

BatchNorm = _BatchNorm
"""The base of BatchNorm in every number of dimensions, SyncBatchNorm too; those of other libraries share no other."""
