"""Another name of `learnerkit.distributed`, which is the same module."""

import sys

from learnerkit import distributed

sys.modules[__name__] = distributed
