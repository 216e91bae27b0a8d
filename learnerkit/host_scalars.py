"""Scalars that are made on a device and read on the host, without making the host wait for each."""

from collections.abc import Sequence

import torch
from torch import Tensor


class HostScalars:
    """A growing row of numbers; those given as 0-dim tensors stay on the device until they are fetched in batches.

    `append(value)` adds a number, or a 0-dim tensor that carries no gradient, and never waits. `poll` takes over what
    has arrived and sends the rest on its way; call it now and then, so that not too many small tensors stay on the
    device. `all` waits once, for everything.
    """

    def __init__(self) -> None:
        self._host: list[float] = []
        self._pending: list[float | Tensor] = []
        self._flying: tuple[Tensor, object] | None = None
        self.append = self._pending.append  # the list's own method: this runs every step

    def __len__(self) -> int:
        return len(self._host) + len(self._pending) + (len(self._flying[0]) if self._flying else 0)

    def poll(self) -> list[float]:
        """The numbers that are on the host by now; starts the copy of those that are not."""
        if self._flying and self._flying[1].query():
            self._land()
        if self._pending and not self._flying:
            self._take_off()
        return self._host

    def all(self) -> list[float]:
        """Every number so far. Waits for the device: a host-device sync."""
        while self._flying or self._pending:
            if self._flying:
                self._flying[1].synchronize()
                self._land()
            else:
                self._take_off()
        return self._host

    def _take_off(self) -> None:
        pending = list(self._pending)
        self._pending.clear()
        device = next((v.device for v in pending if isinstance(v, Tensor) and v.device.type != "cpu"), None)
        if device is None:
            self._host.extend(_to_floats(pending))
            return
        values = torch.stack([torch.as_tensor(v, device=device) for v in pending])
        landing = torch.empty(len(values), dtype=values.dtype, pin_memory=device.type == "cuda")
        landing.copy_(values, non_blocking=device.type == "cuda")
        event = torch.Event(device)
        event.record()
        self._flying = landing, event

    def _land(self) -> None:
        self._host.extend(self._flying[0].tolist())
        self._flying = None


def _to_floats(values: Sequence[float | Tensor]) -> list[float]:
    if values and all(isinstance(v, Tensor) for v in values):
        return torch.stack(values).tolist()  # several times as fast as one by one
    return [float(v) for v in values]
