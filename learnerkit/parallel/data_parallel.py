"""`nn.DataParallel` for as long as a fit lasts."""

import torch
from torch import nn

from learnerkit.callback import Callback
from learnerkit.utils import unwrap, warn


class ParallelCallback(Callback):
    """Splits every batch over several GPUs of this process; the model is wrapped only while something runs.

    With fewer than two GPUs it says so once and leaves the model on the device there is.

    Args:
        device_ids: the GPUs to use; by default all.

    Raises:
        ValueError: a GPU that is not there, or one twice.
    """

    def __init__(self, device_ids: list[int] | None = None):
        super().__init__()
        if device_ids is not None and len(set(device_ids)) < len(device_ids):
            raise ValueError(f"got device_ids={device_ids}; each GPU can be used once")
        self.device_ids = device_ids
        self._said = False
        self._whole: nn.Module | None = None

    def before_fit(self):
        learn = self.learn
        count = torch.cuda.device_count()
        ids = list(range(count)) if self.device_ids is None else list(self.device_ids)
        if count >= 2 and any(i >= count for i in ids):
            raise ValueError(f"got device_ids={ids}; this machine has the GPUs 0 to {count - 1}")
        if not can_split(learn.dls.device, ids):
            if not self._said:
                self._said = True
                warn(
                    f"DataParallel needs two GPUs and there {'is' if count == 1 else 'are'} {count}: "
                    f"training on {learn.dls.device} alone",
                )
            return
        # The model's own device must come first: DataParallel gathers there.
        ids.sort(key=lambda i: i != (learn.dls.device.index or 0))
        self._whole = learn.model
        learn.model = nn.DataParallel(unwrap(learn.model), device_ids=ids)

    def cleanup_fit(self):
        if self._whole is not None:
            self.learn.model, self._whole = self._whole, None


def can_split(device: torch.device, ids: list[int]) -> bool:
    """Whether a batch on `device` can be split over the GPUs `ids`."""
    return device.type == "cuda" and min(torch.cuda.device_count(), len(ids)) >= 2
