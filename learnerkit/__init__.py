"""learnerkit: a small training library on PyTorch, right by default on any number of processes.

Public names are resolved on first use (PEP 562), so that `python -m learnerkit.launch` starts without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"
