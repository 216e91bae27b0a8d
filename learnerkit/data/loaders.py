"""The loaders of a Learner, and the split of a batch into inputs and targets."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from learnerkit import world
from learnerkit.data.batches import batch_size, loader_len, to_device
from learnerkit.data.order import keep_seeds
from learnerkit.data.rows import RowsLoader

_TRAIN_ONLY = ("sampler", "batch_sampler", "drop_last")


class DataLoaders:
    """The training loader, the validation loader and any further loaders of a Learner.

    Args:
        train: a torch `DataLoader`, or on one process any iterable of batches.
        valid: the same for validation; without it validation is skipped.
        more: further loaders, read as `dls[2]`, ...
        device: where batches and model go; by default the accelerator of this local rank, else the CPU.
        n_inp: the number of inputs in a tuple batch; by default all entries except the last.
        target_keys: the entries of a mapping batch that are targets.

    Raises:
        TypeError: a loader that cannot be iterated over.
        ValueError: `n_inp` below 1.
    """

    def __init__(
        self,
        train: Iterable,
        valid: Iterable | None = None,
        *more: Iterable | None,
        device: torch.device | str | int | None = None,
        n_inp: int | None = None,
        target_keys: tuple[str, ...] = ("labels",),
    ) -> None:
        self.loaders: list[Any] = [train, valid, *more]
        for i, dl in enumerate(self.loaders):
            _check_loader(dl, i)
        if n_inp is not None and n_inp < 1:
            raise ValueError(f"got n_inp={n_inp}; a batch has at least one input")
        self.n_inp = n_inp
        self.target_keys = (target_keys,) if isinstance(target_keys, str) else tuple(target_keys)
        self._device = torch.device(device) if device is not None else None

    @classmethod
    def from_datasets(
        cls,
        train_ds: Dataset,
        valid_ds: Dataset | None = None,
        *more: Dataset,
        bs: int = 64,
        valid_bs: int | None = None,
        shuffle: bool = True,
        num_workers: int = 0,
        device: torch.device | str | int | None = None,
        n_inp: int | None = None,
        target_keys: tuple[str, ...] = ("labels",),
        **loader_kwargs: Any,
    ) -> "DataLoaders":
        """Make the loaders from datasets; a `TensorDataset`, or a `Subset` of one, is read in whole batches.

        Args:
            train_ds, valid_ds, more: map-style or iterable datasets.
            bs: samples in a training batch.
            valid_bs: samples in a batch of the other loaders; by default `bs`.
            shuffle: draw training samples in random order (map-style datasets).
            num_workers: worker processes of each loader; reading whole batches needs none and starts none.
            device, n_inp, target_keys: as for `DataLoaders`.
            loader_kwargs: for `torch.utils.data.DataLoader`; `sampler`, `batch_sampler` and `drop_last` are for the
                training loader only. Pinned memory is used by default if the device is a CUDA device.
        """
        train_only = {k: loader_kwargs.pop(k) for k in _TRAIN_ONLY if k in loader_kwargs}
        loader_kwargs["num_workers"] = num_workers
        if "batch_sampler" not in train_only:
            train_only["batch_size"] = bs
            if "sampler" not in train_only and not isinstance(train_ds, IterableDataset):
                train_only["shuffle"] = shuffle
        train = RowsLoader(train_ds, **train_only, **loader_kwargs)
        others = [
            None if ds is None else RowsLoader(ds, batch_size=valid_bs or bs, **loader_kwargs)
            for ds in (valid_ds, *more)
        ]
        dls = cls(train, *others, device=device, n_inp=n_inp, target_keys=target_keys)
        dls._pins = "pin_memory" not in loader_kwargs
        return dls

    _pins = False

    @property
    def device(self) -> torch.device:
        """The device for batches and model; chosen at first use."""
        if self._device is None:
            self._device = world.default_device()
        if self._pins and self._device.type == "cuda":
            for dl in self.loaders:
                if dl is not None:
                    dl.pin_memory = True
        return self._device

    @property
    def train(self) -> Iterable:
        return self.loaders[0]

    @property
    def valid(self) -> Iterable | None:
        return self.loaders[1]

    def __getitem__(self, i: int) -> Iterable:
        try:
            loader = self.loaders[i]
        except IndexError:
            loader = None
        if loader is None:
            there = [k for k, dl in enumerate(self.loaders) if dl is not None]
            raise IndexError(f"there is no loader {i}; there are {there}")
        return loader

    @property
    def train_ds(self) -> Dataset | None:
        return getattr(self.train, "dataset", None)

    @property
    def valid_ds(self) -> Dataset | None:
        return getattr(self.valid, "dataset", None)

    def __repr__(self) -> str:
        names = ["train", "valid", *map(str, range(2, len(self.loaders)))]
        parts = [f"{name}: {_described(dl)}" for name, dl in zip(names, self.loaders, strict=True) if dl is not None]
        device = "chosen at first use" if self._device is None else self._device
        return f"{type(self).__name__}({', '.join([*parts, f'device: {device}'])})"

    def one_batch(self) -> Any:
        """The first batch of the training loader, on the device."""
        with keep_seeds(self.train):
            return to_device(next(iter(self.train)), self.device)

    def unpack(self, batch: Any, device: torch.device, keep_targets: bool) -> tuple[Any, tuple, tuple, int]:
        """Return (batch on `device`, inputs, targets, number of samples); arguments as in `split`."""
        # This runs at every step, so the usual batch, a pair of tensors on the device already, gets a fast path.
        if type(batch) in (tuple, list) and len(batch) == 2 and self.n_inp in (None, 1):
            x, y = batch
            if type(x) is type(y) is Tensor and x.device == device == y.device and x.ndim:
                return batch, (x,), (y,), x.shape[0]
        batch = to_device(batch, device)
        inputs, targets = self.split(batch, keep_targets)
        return batch, inputs, targets, batch_size(inputs)

    def split(self, batch: Any, keep_targets: bool = False) -> tuple[tuple, tuple]:
        """Split a batch into (xb, yb): inputs and targets.

        Args:
            batch: a tuple or list, a mapping, or anything else, which is the only input.
            keep_targets: keep the targets of a mapping among its inputs too, for a model that makes its own loss.

        Raises:
            ValueError: a tuple batch that is empty or shorter than `n_inp`.
        """
        if isinstance(batch, tuple | list):
            cut = self.n_inp or max(1, len(batch) - 1)
            if len(batch) < cut or not batch:
                raise ValueError(f"got a batch of {len(batch)} entries; n_inp={self.n_inp} asks for that many inputs")
            return tuple(batch[:cut]), tuple(batch[cut:])
        if isinstance(batch, Mapping):
            targets = tuple(batch[k] for k in self.target_keys if k in batch)
            inputs = batch if keep_targets else {k: v for k, v in batch.items() if k not in self.target_keys}
            return (inputs,), targets
        return (batch,), ()


def _check_loader(dl: Any, i: int) -> None:
    name = ("training", "validation")[i] if i < 2 else f"{i}."
    if i == 1 and dl is None:
        return
    if not hasattr(dl, "__iter__") and not hasattr(dl, "__getitem__"):
        raise TypeError(
            f"the {name} loader is a {type(dl).__name__}, which cannot be iterated over; "
            "pass a DataLoader or another iterable of batches"
        )
    if isinstance(dl, Dataset) and not isinstance(dl, IterableDataset):
        raise TypeError(
            f"the {name} loader is a dataset ({type(dl).__name__}); use DataLoaders.from_datasets, or put it into a "
            "DataLoader"
        )


def _described(dl: Iterable) -> str:
    """The number of samples and batches of a loader, as far as they are known, or its class."""
    samples, batches = loader_len(getattr(dl, "dataset", None)), loader_len(dl)
    size = getattr(dl, "batch_size", None)
    parts = [
        "" if samples is None else f"{samples:,} sample{'' if samples == 1 else 's'}",
        "" if batches is None else f"{batches:,} batch{'' if batches == 1 else 'es'}" + (f" of {size}" if size else ""),
    ]
    return " in ".join(filter(None, parts)) or type(dl).__name__
