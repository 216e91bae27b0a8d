"""Gradients that are weighed on their way, bucket by bucket, for learners whose losses cannot be weighed."""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from learnerkit.torch_internals import call_after_backward, expect_another_backward


class BucketWeights:
    """Multiplies what this rank puts into each bucket of DDP's by one factor.

    Attributes:
        factor: what this rank's gradients are multiplied by, a number or a 0-dim tensor; 0 leaves them out.
        seen: the wrappers whose gradients have been reduced in this batch.
    """

    def __init__(self) -> None:
        self.factor: float | Tensor = 1.0
        self.seen: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    def attach(self, wrapper: DistributedDataParallel, comm_hook: Any, state: Any) -> None:
        """Have the gradients of `wrapper` weighed, and then reduced by `comm_hook` with its `state`."""

        def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            buffer, factor = bucket.buffer(), self.factor
            if bucket.is_last() and (wrapper := this()) is not None:
                self.seen.add(wrapper)
            if isinstance(factor, Tensor):
                buffer.copy_(torch.where(factor > 0, buffer * factor, 0.0))  # of nothing there may be a NaN
            elif factor == 0:
                buffer.zero_()
            elif factor != 1:
                buffer.mul_(factor)
            if bucket.is_last() and not find_unused:
                # Once DDP, which asks for this after us, has finished with the pass. It reduces in one backward pass
                # after each forward pass: of two losses' passes that reach this network it would leave out the second.
                call_after_backward(lambda: call_after_backward(again))
            return comm_hook(state, bucket)

        def again() -> None:
            if (wrapper := this()) is not None:
                expect_another_backward(wrapper)

        this, find_unused = weakref.ref(wrapper), wrapper.find_unused_parameters  # the wrapper itself holds the hook
        wrapper.register_comm_hook(state, hook)
