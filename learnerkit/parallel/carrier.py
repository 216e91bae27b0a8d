"""A small vector that is summed over the ranks together with the gradients: what their losses count, and flags.

It is the gradient of one more parameter in DDP's own reduction, so that it costs no collective of its own.
"""

from typing import cast

import torch
from torch import Tensor, nn

from learnerkit import world
from learnerkit.host_scalars import HostCopy
from learnerkit.parallel.agreement import LEAVING

FLAGS = len(LEAVING) + 1  # one for each reason to leave, and what is asked of the rank
_SLOTS = 8  # so many that the gradients that follow in DDP's bucket stay aligned for vector instructions


class Carrier:
    """The vector of this rank, and its mean over the ranks.

    Args:
        device: of the gradients.

    Attributes:
        parameter: the one whose gradient is the vector; `None`: the vector is reduced by a collective of its own.
        reads_late: read the flags of a step after the next one, at the same place on every rank, so that the host need
            not wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parameter: nn.Parameter | None = None
        self.reads_late = device.type != "cpu"
        self._plain: dict[int | None, Tensor] = {}  # the vectors without flags, by their count
        self._last_flags: HostCopy | None = None

    def make_parameter(self, module: nn.Module) -> nn.Parameter:
        """Make the parameter, of the type of those of `module` where it is fit, so that it joins their bucket."""
        kinds = {p.dtype for p in module.parameters() if p.requires_grad}
        # Counts need more digits than half precision has.
        kind = torch.float64 if kinds == {torch.float64} else torch.float32
        self._plain.clear()
        self.parameter = nn.Parameter(torch.zeros(_SLOTS, dtype=kind, device=self.device))
        return self.parameter

    def clear(self) -> None:
        """Forget the flags of the last step, and what a training that was cut short has left."""
        self._last_flags = None
        if self.parameter is not None:
            self.parameter.grad = None

    def vector(self, count: float | Tensor, flags: list[float] | None) -> Tensor:
        """Return this rank's vector.

        Args:
            count: what its batch counts.
            flags: each 1 or 0, but for the last, a `packed` request; `None`: all are 0.
        """
        plain = count if flags is None and isinstance(count, int) else None
        if plain in self._plain:
            return self._plain[plain]
        kind = torch.float64 if self.parameter is None else self.parameter.dtype
        vector = torch.zeros(_SLOTS, dtype=kind, device=self.device)
        vector[0] = count  # filled on the device, without a sync
        for i, flag in enumerate(flags or []):
            if flag:
                vector[1 + i] = flag
        if plain is not None:
            self._plain[plain] = vector
        return vector

    def reduced(self, count: float | Tensor, flags: list[float] | None) -> Tensor:
        """Return the vector's mean over the ranks, after a backward pass; every rank must reach this."""
        if self.parameter is not None:
            vector, self.parameter.grad = cast(Tensor, self.parameter.grad), None
            return vector.clone() if self.reads_late else vector  # it may be a piece of DDP's bucket
        # By the same way on all ranks, also on one that counts nothing and so has nothing on the device.
        return world.reduce(self.vector(count, flags), "mean", among="gradients")

    def exchange_flags(self, vector: Tensor | None) -> list[float] | None:
        """Start to copy the flags of this step, and return those of the last; `None`: there are none.

        A host-device sync, but with an earlier step: the device has work meanwhile.

        Args:
            vector: of this step; `None` after the last step of an epoch.
        """
        last, self._last_flags = self._last_flags, None if vector is None else HostCopy(vector[1 : 1 + FLAGS])
        return None if last is None else last.numbers()
