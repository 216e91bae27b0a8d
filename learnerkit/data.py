"""Data: the loaders of a Learner, how a batch is split and moved, and the order in which samples are drawn."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from learnerkit import world
from learnerkit.utils import library_of

HOST = torch.device("cpu")

# Batches


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor in it on `device`, however it is nested; copies from pinned memory do not block."""
    return map_batch(lambda t: _untyped(t).to(device, non_blocking=True), batch)


def _untyped(t: Tensor) -> Tensor:
    """A typed tensor of fastai as a plain one: torch's functions refuse two of them whose types differ."""
    return t.as_subclass(Tensor) if type(t) is not Tensor and library_of(t) == "fastai" else t


def map_batch(f: Callable[[Tensor], Any], batch: Any) -> Any:
    """`batch` with `f` applied to every tensor in tuples, lists, named tuples and mappings."""
    if isinstance(batch, Tensor):
        return f(batch)
    if isinstance(batch, tuple | list):
        found = [f(b) if isinstance(b, Tensor) else map_batch(f, b) for b in batch]
        return type(batch)(*found) if hasattr(batch, "_fields") else type(batch)(found)
    if isinstance(batch, Mapping):
        return {k: map_batch(f, v) for k, v in batch.items()}
    return batch


def in_float32(t: Tensor) -> Tensor:
    """A tensor of a lower floating precision as float32; others as they are."""
    return t.float() if t.is_floating_point() and t.itemsize < 4 else t


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Every tensor in a nested batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        yield from chain.from_iterable(map(tensors_in, batch.values()))
    elif isinstance(batch, tuple | list):
        yield from chain.from_iterable(map(tensors_in, batch))


def entry(output: Any, name: str, default: Any = None) -> Any:
    """An entry of a model's output, be it an attribute or a key."""
    if isinstance(output, Mapping):
        return output.get(name, default)
    return getattr(output, name, default)


def batch_size(batch: Any) -> int:
    """The number of samples in a batch: the length of its first tensor."""
    first = batch[0] if isinstance(batch, tuple) and batch else batch
    if not isinstance(first, Tensor):
        first = next(tensors_in(batch), first)
    if isinstance(first, Tensor):
        return first.shape[0] if first.ndim else 1
    try:
        return len(first)
    except TypeError:
        return 1


def concat(batches: list) -> Any:
    """Batches of one structure joined along their first dimension.

    Tensors whose other dimensions differ from batch to batch come as a list, one tensor for each sample.
    """
    first = batches[0]
    if isinstance(first, Tensor):
        if len({(t.shape[1:], t.ndim) for t in batches}) > 1:
            return [row for t in batches for row in t]
        return torch.cat(batches) if first.ndim else torch.stack(batches)
    if isinstance(first, Mapping):
        return {k: concat([b[k] for b in batches]) for k in first}
    if isinstance(first, tuple | list):
        columns = [concat(list(column)) for column in zip(*batches, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    return list(chain.from_iterable(batches)) if isinstance(first, list) else list(batches)


def gather_batches(batches: list[tuple[Any, Any]], sharded: bool, on: str = "all") -> list | None:
    """The batches of all ranks in the order of their places; every rank must reach this if `sharded`.

    Args:
        batches: (place, batch) pairs; the tensors of a batch may be nested, all batches have one structure.
        sharded: whether ranks hold different batches; if not, this rank's are the answer.
        on: 'all', or 'rank0': the other ranks get `None`.
    """
    if not sharded:
        return [batch for _, batch in batches]
    # A rank without data learns the structure from the others.
    mine = map_batch(lambda t: torch.empty(0), batches[0][1]) if batches else None
    structure = next((s for s in world.all_gather(mine) if s is not None), None)
    pieces = [((place, i), t) for place, batch in batches for i, t in enumerate(tensors_in(batch))]
    tensors = world.gather_pieces(pieces, on)
    if tensors is None or structure is None:
        return None if tensors is None else []
    found = iter(tensors)
    count = len(tensors) // max(1, sum(1 for _ in tensors_in(structure)))
    return [map_batch(lambda _: next(found), structure) for _ in range(count)]


# Loaders


class DataLoaders:
    """The training loader, the validation loader and any more of a Learner.

    Args:
        train: a torch `DataLoader`, or on one process any iterable of batches.
        valid: the same for validation; without it validation is skipped.
        more: further loaders, read as `dls[2]`, ...
        device: where batches and model go; by default the accelerator of this local rank, else the CPU.
        n_inp: how many entries of a tuple batch are inputs; by default all but the last.
        target_keys: which entries of a mapping batch are targets.

    Raises:
        TypeError: a loader that cannot be iterated over.
        ValueError: `n_inp` below 1.
    """

    def __init__(
        self,
        train: Iterable,
        valid: Iterable | None = None,
        *more: Iterable,
        device: torch.device | str | int | None = None,
        n_inp: int | None = None,
        target_keys: tuple[str, ...] = ("labels",),
    ):
        self.loaders = [train, valid, *more]
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
            shuffle: whether training draws in random order (map-style datasets).
            num_workers: worker processes of each loader; whole-batch reading needs none and starts none.
            loader_kwargs: for `torch.utils.data.DataLoader`; `sampler`, `batch_sampler` and `drop_last` concern the
                training loader alone. Pinned memory is on where there is a CUDA device.
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
        """Where batches and model go; found at first use."""
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
            found = self.loaders[i]
        except IndexError:
            found = None
        if found is None:
            raise IndexError(
                f"there is no loader {i}; there are {[i for i, dl in enumerate(self.loaders) if dl is not None]}"
            )
        return found

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
        """(batch on `device`, inputs, targets, number of samples); the rest as in `split`."""
        # Once per step: what most batches are, a pair of tensors that are there already, takes a short way.
        if type(batch) in (tuple, list) and len(batch) == 2 and self.n_inp in (None, 1):
            x, y = batch
            if type(x) is type(y) is Tensor and x.device == device == y.device and x.ndim:
                return batch, (x,), (y,), x.shape[0]
        batch = to_device(batch, device)
        inputs, targets = self.split(batch, keep_targets)
        return batch, inputs, targets, batch_size(inputs)

    def split(self, batch: Any, keep_targets: bool = False) -> tuple[tuple, tuple]:
        """A batch as (xb, yb): inputs and targets.

        Args:
            batch: a tuple or list, a mapping, or anything else, which is the only input.
            keep_targets: leave the targets of a mapping among its inputs too, for a model that makes its own loss.

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


_TRAIN_ONLY = ("sampler", "batch_sampler", "drop_last")


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
    """How many samples and batches a loader has, as far as it says."""
    samples, batches = loader_len(getattr(dl, "dataset", None)), loader_len(dl)
    size = getattr(dl, "batch_size", None)
    found = [
        "" if samples is None else f"{samples:,} sample{'' if samples == 1 else 's'}",
        "" if batches is None else f"{batches:,} batch{'' if batches == 1 else 'es'}" + (f" of {size}" if size else ""),
    ]
    return " in ".join(filter(None, found)) or type(dl).__name__


def loader_len(dl: Iterable) -> int | None:
    """The number of batches of a loader, or `None` if it does not say."""
    try:
        return len(dl)
    except TypeError:
        return None


# Whole-batch reading


def _rows(dataset: Dataset) -> tuple[tuple[Tensor, ...], Tensor | None] | None:
    """(tensors, index into them or None) of a TensorDataset or of nested Subsets of one; else `None`."""
    if type(dataset) is TensorDataset:
        return dataset.tensors, None
    if type(dataset) is Subset:
        inner = _rows(dataset.dataset)
        if inner is not None:
            tensors, index = inner
            chosen = torch.as_tensor(dataset.indices, dtype=torch.long)
            return tensors, chosen if index is None else index[chosen]
    return None


class RowsLoader(DataLoader):
    """A torch `DataLoader` that reads a batch of a `TensorDataset` by one `index_select` for each tensor.

    That is about eight times as fast as fetching and collating samples one by one, and no worker can be faster, so
    none is started. For other datasets, or a `collate_fn` of one's own, it is torch's loader unchanged.
    """

    def __init__(self, dataset: Dataset, **kwargs: Any):
        super().__init__(dataset, **kwargs)
        batched = self.batch_sampler is not None and self.collate_fn is default_collate
        self._by_rows = batched and _rows(dataset) is not None
        if self._by_rows and self.batch_size is not None:  # it made the batch sampler itself
            # torch's loader forbids the assignment to protect its own invariants, which hold here.
            self.__dict__["batch_sampler"] = IndexBatches(self.sampler, self.batch_size, self.drop_last)

    def __iter__(self) -> Iterator:
        return self._read_rows() if self._by_rows else super().__iter__()

    def _read_rows(self) -> Iterator[list[Tensor]]:
        tensors, index = _rows(self.dataset)
        pin = self.pin_memory and torch.accelerator.is_available()
        # torch's loader draws a seed for its workers here; the same draw keeps random streams the same.
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        for rows in self.batch_sampler:
            rows = torch.as_tensor(rows, dtype=torch.long)
            if index is not None:
                rows = index.index_select(0, rows)
            batch = [t.index_select(0, rows) for t in tensors]
            yield [t.pin_memory() for t in batch] if pin else batch


class IndexBatches(BatchSampler):
    """torch's `BatchSampler`, but batches of a plain random or sequential sampler are slices of one index tensor."""

    def __iter__(self) -> Iterator:
        order = self._order()
        if order is None:
            yield from super().__iter__()
            return
        whole = len(order) // self.batch_size
        yield from order.split(self.batch_size)[: whole if self.drop_last else None]
        generator = getattr(self.sampler, "generator", None)
        if generator is not None:  # at its end torch's RandomSampler draws another order, and uses none of it
            torch.randperm(len(order), generator=generator)

    def _order(self) -> Tensor | None:
        sampler = self.sampler
        if type(sampler) is SequentialSampler:
            return torch.arange(len(sampler.data_source))
        whole = type(sampler) is RandomSampler and not sampler.replacement
        if not whole or sampler.num_samples != len(sampler.data_source):
            return None
        generator = sampler.generator
        if generator is None:  # as torch's RandomSampler does
            generator = torch.Generator()
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        return torch.randperm(sampler.num_samples, generator=generator)


# The order of samples


class SampleOrder:
    """Seeds for the sample order of each epoch of a fit.

    Epoch e is drawn with the seed that torch's own loader would have drawn from the global generator, had nothing else
    used that since the fit began. So a fit sees the order of a plain torch loop with the same seed, and no dropout,
    augmentation or validation, on any number of ranks, can change it.
    """

    def __init__(self):
        self.generator = torch.Generator()
        self.generator.set_state(torch.get_rng_state())
        self._seeds: list[int] = []

    def seed(self, epoch: int) -> int:
        """The seed of an epoch (counted from 0)."""
        while len(self._seeds) <= epoch:
            # The first draw is the one that torch's loader makes for its workers.
            _, seed = (int(torch.empty((), dtype=torch.int64).random_(generator=self.generator)) for _ in range(2))
            self._seeds.append(seed)
        return self._seeds[epoch]


def samplers_of(dl: Any) -> list:
    """The sampler objects behind a loader, from the batch sampler inwards."""
    found, inner = [], dl
    while True:
        # Asked for None, not for truth: a sampler may have no length.
        parts = [getattr(inner, name, None) for name in ("batch_sampler", "sampler")]
        inner = next((part for part in parts if part is not None), None)
        if inner is None or any(inner is s for s in found):
            return found
        found.append(inner)


@contextmanager
def seeded_samplers(dl: Any, seed: int) -> Iterator[None]:
    """Give the samplers behind `dl` that would use the global generator one with `seed`, for as long as this lasts."""
    lent = [s for s in samplers_of(dl) if getattr(s, "generator", seed) is None]
    for sampler in lent:
        sampler.generator = torch.Generator().manual_seed(seed)
    if lent:  # the draw they would have made, so that the next fit starts elsewhere in the global stream
        torch.empty((), dtype=torch.int64).random_()
    try:
        yield
    finally:
        for sampler in lent:
            sampler.generator = None


# Samplers that draw from nothing but the generator they were lent (`seeded_samplers`), or have, or from none.
_SEEDED = (BatchSampler, IndexBatches, SequentialSampler, DistributedSampler)


def draws_globally(dl: Any) -> bool:
    """Whether a sampler behind a map-style loader may draw from the global generators."""
    if not isinstance(dl, DataLoader) or isinstance(dl.dataset, IterableDataset):
        return False
    return any(type(s) not in _SEEDED and getattr(s, "generator", None) is None for s in samplers_of(dl))


def same_stream(batches: Iterable, seed: int | tuple | None, advance: bool = False) -> Iterator:
    """Iterate with global generators of its own: what others draw meanwhile does not change it, nor it theirs.

    Args:
        batches: what to iterate over.
        seed: a seed to begin with; or states, as those of `world.seed_states`; or `None`: the present ones.
        advance: leave the global generators at its end as it would have left them, if nobody else has used them, and
            it began with their states.
    """
    first = inside = None
    stream = None
    while True:
        outside = world.seed_states()
        if inside is not None:
            world.set_seed_states(inside)
        elif isinstance(seed, int):
            world.seed_host(seed)
        elif seed is not None:
            world.set_seed_states(seed)
        first = first or outside
        try:
            stream = iter(batches) if stream is None else stream
            batch = next(stream)
            inside = world.seed_states()
        except StopIteration:
            if advance and not isinstance(seed, int) and _same_states(first, outside):
                outside = world.seed_states()
            return
        finally:
            world.set_seed_states(outside)
        yield batch


def _same_states(a: tuple, b: tuple) -> bool:
    numpy = a[2] is b[2] is None or (a[2][2:] == b[2][2:] and (a[2][1] == b[2][1]).all())
    return torch.equal(a[0], b[0]) and a[1] == b[1] and bool(numpy)


class OwnStream:
    """Batches (or indices) drawn as a `same_stream`.

    Args:
        batches: the user's sampler or batch sampler.
    """

    def __init__(self, batches: Iterable):
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator:
        return same_stream(self.batches, None, advance=True)


def with_own_stream(dl: DataLoader) -> DataLoader:
    """A copy of `dl` whose samplers draw as an `OwnStream`."""
    name = "sampler" if dl.batch_sampler is None else "batch_sampler"
    return with_batches(dl, **{name: OwnStream(getattr(dl, name))})


def states_at_start(dl: Any) -> tuple:
    """The states of the global generators that the samplers of `dl` will find when an epoch begins now."""
    with keep_seeds():
        if getattr(dl, "generator", None) is None:  # torch's loader first draws a seed for its workers
            torch.empty((), dtype=torch.int64).random_()
        return world.seed_states()


@contextmanager
def keep_seeds(dl: Any = None, device: torch.device = HOST) -> Iterator[None]:
    """Give random generators their state back at the end: the host's (torch, python, numpy), and those behind `dl`.

    Args:
        dl: a loader.
        device: of another device than the host, its generators too.
    """
    states = world.seed_states()
    generators = [getattr(x, "generator", None) for x in (dl, *samplers_of(dl))]
    own = [(g, g.get_state()) for g in generators if isinstance(g, torch.Generator)]
    try:
        with world.device_streams_kept(device):
            yield
    finally:
        world.set_seed_states(states)
        for generator, state in own:
            generator.set_state(state)


def in_order(dl: Any, name: str) -> Any:
    """`dl` reading its whole dataset once, in dataset order, whatever its sampler; other iterables as they are."""
    if not isinstance(dl, DataLoader) or isinstance(dl.dataset, IterableDataset):
        return dl
    sampler = SequentialSampler(dl.dataset)
    if dl.batch_sampler is None:
        if type(dl.sampler) in (SequentialSampler, RandomSampler):
            return with_batches(dl, sampler=sampler)
        raise ValueError(
            f"loader {name} has batch_size=None and a {type(dl.sampler).__name__}, so its dataset cannot be read in "
            "order; pass get_preds a loader of your own as dl="
        )
    size = getattr(dl.batch_sampler, "batch_size", None) or 64
    return with_batches(
        dl,
        batch_sampler=IndexBatches(sampler, size, False) if _reads_rows(dl) else BatchSampler(sampler, size, False),
    )


def _reads_rows(dl: DataLoader) -> bool:
    return getattr(dl, "_by_rows", False)


def with_batches(dl: DataLoader, **samplers: Any) -> DataLoader:
    """A copy of `dl` that draws from another `sampler` or `batch_sampler`; all else, also of a subclass, is kept."""
    twin = DataLoader.__new__(type(dl))
    # torch's loader forbids assigning samplers once made; the copy is a loader being made.
    twin.__dict__.update(dl.__dict__ | samplers | {"_iterator": None})
    return twin
