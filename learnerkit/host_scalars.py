"""Numbers that are computed on a device and read on the host, without a wait for each."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor's values to the host, which may still be in progress.

    Args:
        values: a one-dimensional tensor on any device.
    """

    def __init__(self, values: Tensor) -> None:
        self._values, self._done = values, None
        if values.device.type != "cpu":
            cuda = values.is_cuda
            self._values = torch.empty(len(values), dtype=values.dtype, pin_memory=cuda)
            self._values.copy_(values, non_blocking=cuda)
            self._done = torch.Event(values.device)
            # Without a stream it would be recorded on the current device, and be over at once.
            self._done.record(torch.accelerator.current_stream(values.device))

    def __len__(self) -> int:
        return len(self._values)

    def is_done(self) -> bool:
        """Tell whether the values are on the host."""
        return self._done is None or self._done.query()

    def numbers(self) -> list[float]:
        """Return the values. It is a host-device sync if the copy is still in progress."""
        if self._done is not None:
            self._done.synchronize()
        return self._values.tolist()


class HostScalars:
    """A growing row of numbers; those given as 0-dim tensors stay on the device until they are copied in batches.

    `append(value)` adds a number, or a 0-dim tensor without gradient, and never waits. `poll` takes the values that
    have arrived and starts to copy the rest; it should be called regularly, so that few small tensors stay on the
    device. `all` waits once, for all values.

    Args:
        values: numbers to begin with, such as those of a `state_dict`.
    """

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._host = list(values)
        self._pending: list[float | Tensor] = []
        self._copy: HostCopy | None = None
        self.append = self._pending.append  # the list's own method: this runs every step

    def __len__(self) -> int:
        return len(self._host) + len(self._pending) + (len(self._copy) if self._copy else 0)

    def poll(self) -> list[float]:
        """Return the numbers that are on the host so far, and start to copy the others."""
        if self._copy and self._copy.is_done():
            self._finish(self._copy)
        if self._pending and not self._copy:
            self._start()
        return self._host

    def all(self) -> list[float]:
        """Return all numbers. A host-device sync."""
        while self._copy or self._pending:
            if self._copy:
                self._finish(self._copy)
            else:
                self._start()
        return self._host

    def _start(self) -> None:
        pending = list(self._pending)
        self._pending.clear()
        device = next((v.device for v in pending if isinstance(v, Tensor) and v.device.type != "cpu"), None)
        if device is None:
            self._host.extend(_to_floats(pending))
        else:
            # `full` gives its number to a kernel; to copy a tensor that is made of it would wait for the device.
            made = (v.to(device) if isinstance(v, Tensor) else torch.full((), v, device=device) for v in pending)
            self._copy = HostCopy(torch.stack(list(made)))

    def _finish(self, copy: HostCopy) -> None:
        self._host.extend(copy.numbers())
        self._copy = None


class WeighedScalars:
    """Numbers with their weights, for a weighted mean; nothing waits for the device until they are read.

    Attributes:
        values, weights: the numbers and the weights.
    """

    def __init__(self) -> None:
        self.values, self.weights = HostScalars(), HostScalars()

    def append(self, value: float | Tensor, weight: float | Tensor) -> None:
        """Add a number with its weight: as for `HostScalars`, tensors without gradient."""
        self.values.append(value)
        self.weights.append(weight)
        if not len(self.weights) % 1024:  # otherwise they would pile up on the device
            self.poll()

    def poll(self) -> None:
        """Take what has arrived on the host, and start to copy the rest."""
        self.values.poll()
        self.weights.poll()

    def extend(self, values: Iterable[float], weights: Iterable[float]) -> None:
        """Add the numbers and weights of a `state_dict`.

        Raises:
            TypeError, ValueError: they are not as many numbers as weights.
        """
        for value, weight in zip(values, weights, strict=True):
            self.append(float(value), float(weight))

    def pairs(self) -> list[tuple[float, float]]:
        """Return each number with its weight. A host-device sync."""
        return list(zip(self.values.all(), self.weights.all(), strict=True))

    def sums(self) -> tuple[float, float]:
        """Return the sum of the numbers times their weights, and the sum of the weights. A host-device sync."""
        # Where the weight is 0, the number may be the mean of nothing, a NaN.
        counted = [(value, weight) for value, weight in self.pairs() if weight]
        return sum(value * weight for value, weight in counted), sum(weight for _, weight in counted)

    def state_dict(self) -> dict[str, list[float]]:
        """Return the numbers and weights, as `extend` takes them. A host-device sync."""
        return {"values": list(self.values.all()), "weights": list(self.weights.all())}


def _to_floats(values: Sequence[float | Tensor]) -> list[float]:
    tensors = [v for v in values if isinstance(v, Tensor)]
    if tensors and len(tensors) == len(values):
        return torch.stack(tensors).tolist()  # several times as fast as one by one
    return [float(v) for v in values]
