"""Aids for trying a training out: epochs cut short, and a batch to overfit."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from learnerkit import arguments, world
from learnerkit.callback import Callback
from learnerkit.data.batches import loader_len, map_batch, to_device

# Loaders in the place of others


class LoaderView:
    """Stands for a loader; what it does not have itself, such as the share of a rank, is the loader's.

    Args:
        dl: the loader.
    """

    def __init__(self, dl: Any) -> None:
        self.dl = dl

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dl, name)


class ShortLoader(LoaderView):
    """The first `n` batches of a loader."""

    def __init__(self, dl: Any, n: int) -> None:
        super().__init__(dl)
        self.n = n

    def __len__(self) -> int:
        return min(self.n, len(self.dl))

    def __iter__(self) -> Iterator:
        # It lets the loader's iterator go with the last batch, and with that its workers end.
        return islice(self.dl, self.n)


class RepeatingLoader(LoaderView):
    """The first batches of a loader over and over, as many times as it has batches.

    A loader without length is read on, to know when it ends.

    Args:
        dl: the loader.
        n: how many batches are kept.
        device: where they are kept.
        kept: those that are known already, each with its share and sample (see `RankLoader`); others are added.
    """

    step_size = None  # only the loader's first batches are read

    def __init__(self, dl: Any, n: int, device: torch.device, kept: list[tuple[Any, dict]]) -> None:
        super().__init__(dl)
        self.n, self.device, self.kept = n, device, kept

    def __len__(self) -> int:
        return len(self.dl)

    def __iter__(self) -> Iterator:
        length, step = loader_len(self.dl), -1
        if length is None or not self.kept:
            for step, batch in enumerate(islice(self.dl, None if length is None else self.n)):
                if len(self.kept) < self.n:
                    about = {name: getattr(self.dl, name, None) for name in ("share", "sample")}
                    self.kept.append(to_device((batch, about), self.device))
                yield self._kept(step)
        for step in range(step + 1, length or 0):
            yield self._kept(step)

    def _kept(self, step: int) -> Any:
        which = step % len(self.kept)
        batch, about = self.kept[which]
        share = about["share"]
        if share is not None:  # places are unique, also those of one batch given out twice
            share = share._replace(place=share.place + (step - which) * world.world_size())
        self.share, self.sample = share, about["sample"]
        return map_batch(torch.clone, batch)  # what a callback does to it in place must not last


class _OtherLoader(Callback):
    """Puts a view in the place of `learn.dl`, and the loader back."""

    order = 12  # after DistributedCallback, whose loader gives the rank its share
    only_fit = True
    _whole: Any = None

    def _put(self, view: LoaderView) -> None:
        self._whole, self.learn.dl = self.learn.dl, view

    def _put_back(self) -> None:
        if self._whole is not None:
            self.learn.dl, self._whole = self._whole, None


class ShortEpochCallback(_OtherLoader):
    """Ends the reading of each epoch of a fit early, to try a script out; schedules fit themselves to the short epoch.

    Args:
        pct: share of the batches that is read, above 0 and at most 1; rounded, at least one batch.
        n: or the number of batches, on each rank.
        short_valid: shorten validation too.

    Raises:
        TypeError, ValueError: neither or both of pct and n, or a number out of range; in a fit, pct and a loader
            without length.
    """

    def __init__(self, pct: float | None = None, n: int | None = None, short_valid: bool = True) -> None:
        super().__init__()
        if (pct is None) == (n is None):
            raise TypeError(f"got pct={pct} and n={n}; give one of them")
        if pct is not None and not 0 < pct <= 1:
            raise ValueError(f"got pct={pct}; it is a share of the batches, above 0 and at most 1")
        if n is not None:
            arguments.check_count("n", n, "a number of batches")
        self.pct, self.n, self.short_valid = pct, n, short_valid

    def before_train(self) -> None:
        self._put(ShortLoader(self.learn.dl, self._batches()))

    def before_validate(self) -> None:
        if self.short_valid:
            self._put(ShortLoader(self.learn.dl, self._batches()))

    def cleanup_train(self) -> None:
        self._put_back()

    def cleanup_validate(self) -> None:
        self._put_back()

    def _batches(self) -> int:
        if self.n is not None:
            return self.n
        dl = self.learn.dl
        length = loader_len(dl)
        if length is None:
            raise ValueError(
                f"ShortEpochCallback(pct={self.pct}) needs to know how many batches an epoch has, but the loader "
                f"({type(dl).__name__}) has no length; say how many to read by n=..., or give it a __len__"
            )
        return max(1, round((self.pct or 0) * length))


class OverfitBatch(_OtherLoader):
    """Trains on the first batch of the fit alone, to see whether model and loss can learn at all.

    The batch is kept as it was read, random augmentation included. Under DDP each rank keeps its share of the first
    global batch. Validation is left alone.

    Args:
        n: how many batches to keep.

    Raises:
        ValueError: `n` below 1.
    """

    def __init__(self, n: int = 1) -> None:
        super().__init__()
        arguments.check_count("n", n, "a number of batches")
        self.n = n
        self._kept: list[tuple[Any, dict]] = []

    def before_train(self) -> None:
        self._put(RepeatingLoader(self.learn.dl, self.n, self.learn.dls.device, self._kept))

    def cleanup_train(self) -> None:
        self._put_back()

    def cleanup_fit(self) -> None:
        self._kept = []
