"""The loaders of a Learner, and the split of a batch into inputs and targets."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from learnerkit import distributed
from learnerkit.data.batches import lengths_in, likely_sizes, loader_len, to_device
from learnerkit.data.cuts import Dims, check_dims, parted, row_counts, rows_first
from learnerkit.data.iterable import LoaderView
from learnerkit.data.order import first_batch, has_index, keep_seeds, with_batches
from learnerkit.data.rows import IndexBatches, RowsLoader
from learnerkit.data.stream import (
    PerSample,
    begin_worker,
    check_socket_path,
    draws_globally,
    handles_signals,
    replaced_sampler,
    starts_workers,
    stream_of,
)
from learnerkit.data.weights import count_classes, labels_of, sample_weights
from learnerkit.state import State
from learnerkit.text import did_you_mean, first_few
from learnerkit.utils import check_keywords, suggests_keywords, with_index
from learnerkit.values import describe

_WITHOUT_WORKERS: dict[str, Any] = {"timeout": 0, "prefetch_factor": None, "multiprocessing_context": None}
_READING = ("num_workers", "collate_fn", "pin_memory", "worker_init_fn", *_WITHOUT_WORKERS)  # the options for reading
_FIXED = "the loaders of DataLoaders stay as they are; for others write learn.dls = DataLoaders(train, valid)"
_TRAIN_ONLY = ("sampler", "batch_sampler", "drop_last")


class DataLoaders:
    """The training loader, the validation loader and any further loaders of a Learner.

    Args:
        train: a torch `DataLoader`, or on one process any iterable of batches.
        valid: the same for validation; without it validation is skipped.
        more: further loaders, read as `dls[2]`, ...
        device: the device of batches and model; by default the accelerator of this local rank, else the CPU.
        n_inp: the number of inputs in a tuple batch; by default all entries except the last.
        target_keys: the entries of a mapping batch that are targets. A model that computes its own loss gets them, too:
            from a mapping always; from a tuple if its `forward` has parameters of these names, or 'targets', at their
            positions, and if `n_inp` does not say otherwise.
        ignore_keys: the entries of a mapping batch that are neither inputs nor targets, such as an id or a file's name;
            callbacks find them in `learn.batch`.
        batch_size: a function that returns the number of samples of a batch. By default this is the number that the
            loader has drawn, else the number of rows; the function is needed where neither is known.
        batch_dim: the dimension of the samples in the tensors of a batch, 1 for time-major batches, (T, B). Rows are
            counted along it, and ready-made batches are cut along it for several processes. Where it differs, give one
            for each entry of the batch: (1, 0), or {'tokens': 1, 'label': 0}; `None` is for an entry that belongs to
            the whole batch.
        classes: the names of the classes for plots and tables; by default the training set's `classes`.
        decode: a function of a sample's inputs that returns what `show_batch` shows: an image, a str, or a mapping.

    Attributes:
        preprocessing: the steps that turned raw data into the datasets' inputs, as a mapping that JSON can hold, or
            `None`: `Learner.export` stores it and `load_learner` restores it.
        targets: for pictures, the kind of their targets, as in `ImageData(targets=)`, or `None`.
        cbs: callbacks that every Learner with these loaders gets, such as an augmentation of its batches. Loaders that
            are assigned to `learn.dls` exchange them when the next run begins.
        inputs: the names of the inputs in an exported program, each with the names of its axes after that of the batch;
            by default the arguments of the model's `forward`, or the keys of a mapping batch.
        aligned: each target is at the position of its prediction, also for a language model that shifts its labels.

    Raises:
        TypeError: a loader that cannot be iterated over.
        ValueError: `n_inp` is below 1, `batch_size` is not a function, or `batch_dim` is not a dimension.
    """

    preprocessing: Mapping[str, Any] | None = None
    targets: str | None = None
    cbs: Sequence[Any] = ()
    inputs: Mapping[str, Sequence[str]] = {}
    aligned = False
    # If another process has read the data of the last fit: the training loader, the fit's last place, and this rank's
    # part of it. The next fit of any learner with these loaders begins there.
    unread: tuple[Any, State, State] | None = None

    @suggests_keywords
    def __init__(
        self,
        train: Iterable[Any],
        valid: Iterable[Any] | None = None,
        *more: Iterable[Any] | None,
        device: torch.device | str | int | None = None,
        n_inp: int | None = None,
        target_keys: tuple[str, ...] = ("labels",),
        ignore_keys: tuple[str, ...] = (),
        batch_size: Callable[[Any], int] | None = None,
        batch_dim: Dims = 0,
        classes: Iterable[str] | None = None,
        decode: Callable[..., Any] | None = None,
    ) -> None:
        self.loaders: list[Any] = [train, valid, *more]
        for i, dl in enumerate(self.loaders):
            if i != 1 or dl is not None:
                check_loader(dl, ("training", "validation")[i] if i < 2 else f"{i}.")
        if n_inp is not None and n_inp < 1:
            raise ValueError(f"got n_inp={n_inp}; a batch has at least one input")
        self.n_inp = n_inp
        self.target_keys, self.ignore_keys = (
            (keys,) if isinstance(keys, str) else tuple(keys) for keys in (target_keys, ignore_keys)
        )
        if batch_size is not None and not callable(batch_size):
            raise ValueError(
                f"got batch_size={batch_size!r}; it is a function that counts the samples of a batch, such as "
                "lambda batch: len(batch['image']). How many a batch shall have is for the loader to say "
                "(from_datasets has bs)"
                " (errors.html#batch-samples)"
            )
        check_dims(batch_dim)
        self.batch_size, self.batch_dim = batch_size, batch_dim
        self.decode, self._classes = decode, None if classes is None else list(classes)
        if classes is None:
            check_classes(*(getattr(dl, "dataset", None) for dl in self.loaders))
        try:
            self._device = torch.device(device) if device is not None else None
        except RuntimeError:
            raise ValueError(f"got device={device!r}; torch has 'cpu', 'cuda', 'cuda:1', 'mps' and others") from None
        self._pins = False  # use pinned memory on a CUDA device
        self._said = False  # the user was warned of a doubtful number of samples
        self._inputs: tuple[Any, partial] | None = None  # a loader, and the collate function for its inputs
        self._twins: dict[tuple, tuple[Any, DataLoader]] = {}  # loaders with their copies, by id and use

    @classmethod
    def from_datasets(
        cls,
        train_ds: Dataset[Any],
        valid_ds: Dataset[Any] | None = None,
        *more: Dataset[Any],
        bs: int = 64,
        valid_bs: int | None = None,
        shuffle: bool = True,
        weights: str | Mapping[Any, float] | Sequence[float] | Tensor | None = None,
        num_workers: int = 0,
        device: torch.device | str | int | None = None,
        n_inp: int | None = None,
        target_keys: tuple[str, ...] = ("labels",),
        ignore_keys: tuple[str, ...] = (),
        batch_size: Callable[[Any], int] | None = None,
        batch_dim: Dims = 0,
        classes: Iterable[str] | None = None,
        decode: Callable[..., Any] | None = None,
        **loader_kwargs: Any,
    ) -> "DataLoaders":
        """Make the loaders from datasets; a `TensorDataset`, or a `Subset` of one, is read in whole batches.

        Args:
            train_ds, valid_ds, more: map-style or iterable datasets.
            bs: the number of samples in a training batch.
            valid_bs: the number of samples in a batch of the other loaders; by default `bs`.
            shuffle: draw training samples in random order (map-style datasets).
            weights: draw training samples with replacement, as many as there are, in proportion to these weights:
                'balanced' draws each class equally often; a mapping gives the weight of the samples of each class by
                its name; or give one weight for each sample.
            num_workers: worker processes of each loader; reading whole batches needs none and starts none. On Linux
                they are forked, unless the program has chosen 'spawn', or `multiprocessing_context=` says otherwise.
            device, n_inp, target_keys, ignore_keys, batch_size, batch_dim, classes, decode: as for `DataLoaders`.
            loader_kwargs: for `torch.utils.data.DataLoader`; `sampler`, `batch_sampler` and `drop_last` are for the
                training loader only. Pinned memory is used by default if the device is a CUDA device.

        Raises:
            TypeError: tensors or arrays instead of datasets, or an unknown keyword.
            ValueError: a training set without samples, an invalid batch size, or `weights` that do not fit the training
                set.
        """
        check_keywords(f"{cls.__name__}.from_datasets", loader_kwargs, _KEYWORDS)
        _check_datasets(train_ds, valid_ds)
        for name, size in (("bs", bs), ("valid_bs", valid_bs)):
            if size is not None and (not isinstance(size, int) or size < 1):
                raise ValueError(
                    f"got {name}={size!r} ({type(size).__name__}); it is a whole number of samples, 1 or more"
                )
        classes = None if classes is None else list(classes)  # a generator gives them once
        train_only = {k: loader_kwargs.pop(k) for k in _TRAIN_ONLY if k in loader_kwargs}
        loader_kwargs["num_workers"] = num_workers
        if weights is not None:
            if isinstance(train_ds, IterableDataset) or not shuffle or {"sampler", "batch_sampler"} & {*train_only}:
                raise ValueError(
                    "weights= draws samples at random from a dataset with a length; leave out shuffle=False, sampler= "
                    "and batch_sampler="
                )
            drawn = sample_weights(weights, train_ds, class_names(train_ds, classes))
            train_only["sampler"] = WeightedRandomSampler(drawn, len(drawn))  # type: ignore[arg-type]  # a tensor will do
        if "batch_sampler" not in train_only:
            train_only["batch_size"] = bs
            if "sampler" not in train_only and not isinstance(train_ds, IterableDataset):
                train_only["shuffle"] = shuffle
        train = RowsLoader(train_ds, **train_only, **loader_kwargs)
        others = [
            None if ds is None else RowsLoader(ds, batch_size=valid_bs or bs, **loader_kwargs)
            for ds in (valid_ds, *more)
        ]
        dls = cls(
            train, *others, device=device, n_inp=n_inp, target_keys=target_keys, ignore_keys=ignore_keys,
            batch_size=batch_size, batch_dim=batch_dim, classes=classes, decode=decode,
        )  # fmt: skip
        dls._pins = "pin_memory" not in loader_kwargs
        return dls

    @property
    def device(self) -> torch.device:
        """The device for batches and model; chosen at first use."""
        if self._device is None:
            self._device = distributed.default_device()
        if self._pins and self._device.type == "cuda":
            for dl in self.loaders:
                if dl is not None:
                    dl.pin_memory = True
        return self._device

    def prefer(self, device: torch.device) -> None:
        """Use this device, unless one was given or has been chosen."""
        if self._device is None:
            self._device = device

    @property
    def train(self) -> Any:
        """The training loader."""
        return self.loaders[0]

    @train.setter
    def train(self, loader: Any) -> None:
        raise AttributeError(_FIXED)

    @property
    def valid(self) -> Any:
        """The validation loader, or `None`."""
        return self.loaders[1]

    @valid.setter
    def valid(self, loader: Any) -> None:
        raise AttributeError(_FIXED)

    def __getitem__(self, i: int) -> Any:
        if not isinstance(i, int):
            raise TypeError(
                f"got {describe(i)} as the number of a loader, which is 0 (training), 1 (validation), 2, ...; a loader "
                "is given as dl=, and new inputs as dl=dls.test_dl(inputs)"
            )
        try:
            loader = self.loaders[i]
        except IndexError:
            loader = None
        if loader is None:
            there = [k for k, dl in enumerate(self.loaders) if dl is not None]
            raise IndexError(
                f"there is no loader {i}; there are {there} (0 is that of training, 1 of validation): ds_idx= takes "
                "one, and dl= a new one"
            )
        return loader

    @property
    def train_ds(self) -> Any:
        """The training set, if the loader has one."""
        return getattr(self.train, "dataset", None)

    @property
    def valid_ds(self) -> Any:
        """The validation set, if there is one."""
        return getattr(self.valid, "dataset", None)

    def __repr__(self) -> str:
        names = ["train", "valid", *map(str, range(2, len(self.loaders)))]
        parts = [f"{name}: {_described(dl)}" for name, dl in zip(names, self.loaders, strict=True) if dl is not None]
        device = "chosen at first use" if self._device is None else self._device
        return f"{type(self).__name__}({', '.join([*parts, f'device: {device}'])})"

    def test_dl(self, items: Any, bs: int | None = None, **loader_kwargs: Any) -> DataLoader[Any]:
        """Return a loader over inputs without targets, in their order, for `learn.get_preds(dl=...)`.

        Args:
            items: a dataset or a sequence. Each item has the form of the input of these loaders' datasets: one value, a
                tuple if there are several, or a mapping, with or without its targets.
            bs: the number of samples in a batch.
            loader_kwargs: options of `torch.utils.data.DataLoader`. Missing options, and a missing `bs`, are taken from
                the validation loader, or from the training loader if there is none.

        Raises:
            TypeError: `items` cannot be indexed.
            ValueError: while the loader is read, if the `collate_fn` of the original loader needs targets.
        """
        is_pandas = hasattr(items, "iloc")
        no_sequence = isinstance(items, Mapping | str) or not hasattr(items, "__getitem__")
        is_frame = is_pandas and items.ndim > 1
        if (no_sequence or is_frame) and not isinstance(items, IterableDataset):
            raise TypeError(
                f"got items of the type {type(items).__name__}; test_dl takes a dataset, or a sequence of inputs such "
                "as a list (learn.predict takes one input)"
            )
        if is_pandas:  # A Series finds its entries by their labels, not by their places.
            items = list(items)
        like: Any = self.train if self.valid is None else self.valid
        kwargs, size = loader_kwargs, None
        if isinstance(like, DataLoader):
            _ = self.device  # this sets pin_memory
            kwargs = {name: getattr(like, name) for name in _READING} | loader_kwargs
            if not kwargs["num_workers"]:
                kwargs |= {name: value for name, value in _WITHOUT_WORKERS.items() if name not in loader_kwargs}
            size = getattr(like.batch_sampler, "batch_size", None)
            if "collate_fn" not in loader_kwargs:
                kwargs["collate_fn"] = self._joins_inputs(like)
                if kwargs["collate_fn"] is default_collate and type(items) is Tensor:
                    items = TensorDataset(items)  # it is read in whole batches
        if bs is not None or not {"batch_size", "batch_sampler"} & {*kwargs}:
            kwargs["batch_size"] = size or 64 if bs is None else bs
        dl = RowsLoader(items, **kwargs)
        dl.only_inputs = True
        return dl

    def input_batch(self, *items: Any) -> tuple[Any, Any]:
        """Return a batch of some inputs, as `test_dl` gives it, and its loader or `ONLY_INPUTS` in its place.

        No random stream moves. A loader is made only for a class that overrides `test_dl` and not `input_batch`: making
        one takes longer than running a small model.
        """
        if type(self).test_dl is DataLoaders.test_dl:
            return self._joins_inputs(self.train if self.valid is None else self.valid)([*items]), ONLY_INPUTS
        # A generator, because the loader would otherwise draw a seed from the global one.
        dl = self.test_dl([*items], bs=len(items), num_workers=0, generator=torch.Generator())
        return next(iter(dl)), dl

    def _joins_inputs(self, like: Any) -> Callable[[list], Any]:
        """Return the function that collates a loader's inputs without targets; the default one if it collates none."""
        collate = like.collate_fn if getattr(like, "batch_sampler", None) is not None else default_collate
        if not isinstance(like, DataLoader) or collate is default_collate:
            return default_collate
        if self._inputs is None or self._inputs[0] is not like or self._inputs[1].args[0] is not collate:
            self._inputs = like, partial(_collate_inputs, collate, _yields_tuples(like))
        return self._inputs[1]

    def one_batch(self) -> Any:
        """Return the first batch of the training loader, on the device."""
        return to_device(first_batch(self.train), self.device)

    @property
    def classes(self) -> list[Any] | None:
        """The names of the classes: those given, else `classes` of the training set; `None` if it has none."""
        return class_names(self.train_ds, self._classes)

    @classes.setter
    def classes(self, names: Iterable[Any] | None) -> None:
        self._classes = None if names is None else list(names)

    @property
    def class_counts(self) -> dict[Any, int] | None:
        """The number of training samples of each class, by its name, or by its index where `classes` has no names.

        No sample is read. The value is `None` if the training set does not list its targets, or they are not classes.
        """
        labels = labels_of(self.train_ds)
        return None if labels is None else count_classes(labels, self.classes)

    @property
    def target_names(self) -> Sequence[Any] | Callable[[Tensor], str] | None:
        """The names of targets and decoded predictions in plots and tables: `classes`, or a function of one of them."""
        return self.classes

    @suggests_keywords
    def show_batch(self, n: int = 9, ds_idx: int = 0) -> Any:
        """Show samples of the first batch of a loader, with their targets.

        Images are tensors or arrays of shape (C, H, W), (H, W, C) or (H, W), or PIL's; normalised images are rescaled
        to the range 0 to 1. Anything else becomes a row of a table: text, a mapping with a value for each column, a
        vector; `decode` turns token ids into text.

        Args:
            n: the number of samples.
            ds_idx: the index of the loader.

        Returns:
            A matplotlib figure or a table, which a notebook displays if it is the value of a cell (or by `display`);
            `None` on ranks other than 0.

        Raises:
            ImportError: the samples are images, and matplotlib is not installed.
            ValueError: the loader can be read only once.
        """
        if not distributed.is_main():
            return None
        from learnerkit.data.show import note, samples_of, show  # here, as most scripts never need it

        samples = samples_of(self, first_batch(self[ds_idx]), n)
        targets = {"target": [note(y, self) for _, y in samples]} if any(y for _, y in samples) else {}
        return show(self, [x for x, _ in samples], targets)

    def twin(self, dl: Any, training: bool, always: bool = False) -> Any:
        """Return `dl`, or an instrumented copy of it to be read instead.

        The copy has a `SampleStream`, which counts the samples that the user's own batch sampler draws, and seeds the
        loader's workers. It is kept, with its persistent workers, as long as `dl` is one of these loaders.

        Args:
            training: the copy is for training; a loader may be read for training and evaluation at the same time.
            always: return a copy in any case.
        """
        if not isinstance(dl, DataLoader) or stream_of(dl) is not None:
            return dl
        indexed = has_index(dl)
        if not indexed and callable(getattr(dl, "state_dict", None)):
            return dl  # its workers report their state in their own way
        counts = indexed and dl.batch_sampler is not None and not _drawn_by(dl)[1]
        per_sample = torch.are_deterministic_algorithms_enabled() and indexed and not getattr(dl, "reads_rows", False)
        if not (counts or draws_globally(dl) or per_sample or always or starts_workers(dl)):
            return dl
        self._twins = {key: pair for key, pair in self._twins.items() if self._owns(pair[0])}
        key = (id(dl), training, per_sample)
        _, copied = self._twins.get(key, (dl, None))
        if copied is None or copied.collate_fn is not dl.collate_fn:  # torch lets a user set another
            dataset = PerSample(dl.dataset) if per_sample else dl.dataset
            copied = with_batches(dl, dataset=dataset, **replaced_sampler(dl))
            if self._owns(dl):
                self._twins[key] = dl, copied
        if starts_workers(dl):
            check_socket_path()
        if per_sample or starts_workers(dl):  # set again, as this process may handle signals by now
            copied.worker_init_fn = partial(begin_worker, dl.worker_init_fn, per_sample, handles_signals())
        return copied

    def keeps(self, dl: Any) -> bool:
        """Tell whether `dl` is one of these loaders, or a copy that is kept for one."""
        return self._owns(dl) or any(dl is twin for _, twin in self._twins.values())

    def _owns(self, dl: Any) -> bool:
        return any(dl is known for known in self.loaders)

    def count(self, batch: Any) -> int | None:
        """Return the number of samples of a batch that its data tell; `None` if they do not.

        Raises:
            ValueError: the function `batch_size` returned something else than a number of samples.
        """
        if self.batch_size is not None:
            n: Any = self.batch_size(batch)
            if isinstance(n, bool) or not hasattr(n, "__index__") or int(n) < 0:
                raise ValueError(
                    f"the function batch_size of DataLoaders returned {n!r}; it returns a number of samples"
                )
            return int(n)
        sizes = likely_sizes(batch) if self.batch_dim == 0 else set(row_counts(batch, self.batch_dim).values())
        return sizes.pop() if len(sizes) == 1 else None

    def dims_of(self, xb: tuple[Any, ...], yb: tuple[Any, ...]) -> tuple[Any, Any, int | None]:
        """Return the parts of `batch_dim` for these inputs, for these targets, and for predictions."""
        return parted(self.batch_dim, self.target_keys, len(xb), len(yb))

    def rows_of_pass(self, xb: tuple[Any, ...], yb: tuple[Any, ...], others: Callable[[Any], Any]) -> set[int]:
        """Return the numbers of rows of the parts of inputs and targets; `others`: as in `map_rows`."""
        inputs, targets, _ = self.dims_of(xb, yb)
        return {*row_counts(xb, inputs, others).values(), *row_counts(yb, targets, others).values()}

    def samples_first(self, pred: Any, xb: tuple[Any, ...], yb: tuple[Any, ...], n: int) -> tuple[Any, Any, Any]:
        """Return predictions, inputs and targets of a batch of `n` samples with the samples in the first dimension.

        Raises:
            ValueError: the predictions do not have their samples in the dimension of the last target's.
        """
        inputs, targets, dim = self.dims_of(xb, yb)
        if {*row_counts(pred, dim).values()} != {n}:
            raise ValueError(
                f"the predictions of a batch of {n} samples are {describe(pred)}, and do not have these in dimension "
                f"{dim}, as batch_dim={self.batch_dim!r} says of the targets: they cannot be joined with those of "
                "other batches. Let the model return them so, or name the dimension for the last entry of a batch"
                " (errors.html#batch-samples)"
            )
        return rows_first(pred, dim), rows_first(xb, inputs), rows_first(yb, targets)

    def split(self, batch: Any, arguments: Sequence[str] | None = None) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Split a batch into (xb, yb): inputs and targets.

        Args:
            batch: a tuple or list, a mapping, or any other object, which is the only input, as is a list of texts.
            arguments: for a model that computes its own loss, the names of its positional arguments: targets among them
                are inputs, too.

        Raises:
            ValueError: the batch is an empty tuple, or shorter than `n_inp`.
        """
        if _are_texts(batch):
            return (batch,), ()
        if isinstance(batch, tuple | list):
            cut = self.n_inp or max(1, len(batch) - 1)
            if len(batch) < cut or not batch:
                raise ValueError(f"got a batch of {len(batch)} entries; n_inp={self.n_inp} asks for that many inputs")
            takes = self.takes_targets(arguments, cut, len(batch))
            return tuple(batch if takes else batch[:cut]), tuple(batch[cut:])
        if isinstance(batch, Mapping):
            targets = tuple(batch[k] for k in self.target_keys if k in batch)
            left_out = {*self.ignore_keys, *(self.target_keys if arguments is None else ())}
            return ({k: v for k, v in batch.items() if k not in left_out},), targets
        return (batch,), ()

    def takes_targets(self, arguments: Sequence[str] | None, cut: int, end: int) -> bool:
        """Tell whether the model takes the entries from `cut` to `end` of a tuple batch as targets."""
        if arguments is None or self.n_inp is not None:
            return False
        names = arguments[cut:end]
        return len(names) == end - cut and set(names) <= {*self.target_keys, "targets"}


def _are_texts(batch: Any) -> bool:
    """Tell whether a batch is a list of texts, as torch's collate function leaves samples that are a text each."""
    return isinstance(batch, list) and bool(batch) and all(isinstance(x, str | bytes) for x in batch)


def named_inputs(batch: Any, xb: tuple[Any, ...]) -> Mapping[str, Any] | None:
    """Return the named inputs of a mapping batch; `None` if a split of one's own has taken other inputs out of it."""
    return xb[0] if isinstance(batch, Mapping) and isinstance(xb[0], Mapping) and len(xb) == 1 else None


def unknown_keys(dls: DataLoaders, batch: Any) -> str:
    """Return a text that names the `target_keys` and `ignore_keys` that a mapping batch lacks; '' if it lacks none."""
    given = {"target_keys": dls.target_keys, "ignore_keys": dls.ignore_keys} if isinstance(batch, Mapping) else {}
    return "".join(
        f" (the batch has no {name!r}, which {which}= names{did_you_mean(str(name), batch)})"
        for which, names in given.items()
        for name in names
        if name not in batch
    )


class Unpacker:
    """Moves each batch of a loader to the device, splits it into inputs and targets, and counts its samples.

    Args:
        dls: decides how a batch is split and, perhaps, counted.
        dl: the loader, as it is read.
        device: the device of the batches.
        arguments: as in `DataLoaders.split`.
        sharded: several ranks read a part each, so that a guessed count is not enough.

    Attributes:
        dl: the loader to read.
    """

    def __init__(
        self, dls: DataLoaders, dl: Any, device: torch.device, arguments: Sequence[str] | None, sharded: bool
    ) -> None:
        self.dls, self.device = dls, with_index(device)
        self.arguments, self.sharded = arguments, sharded
        self.dl = dl
        self._stream = stream_of(dl)
        self._size, self._total = _drawn_by(dl)
        self._shares: Any = None  # the shares of the stream, as it is read
        self._only_inputs = getattr(dl, "only_inputs", False)
        plain = dls.batch_dim == 0 and not self._only_inputs and not dls.takes_targets(arguments, 1, 2)
        usual = type(dls).split is DataLoaders.split  # a subclass may override it
        self._pairs = plain and usual and dls.n_inp in (None, 1) and dls.batch_size is None
        self._places: list[tuple] = []  # the parts whose length is the number of samples in a full batch

    def __call__(self, batch: Any, index: int) -> tuple[Any, tuple[Any, ...], tuple[Any, ...], int]:
        """Return (batch on the device, inputs, targets, number of samples) of the loader's batch of index `index`.

        Raises:
            ValueError: on several ranks, if the number of samples is unknown.
        """
        drawn = self.dl.share.size if self.sharded else self._drawn(index)
        # This runs at every step, so the usual batch, a pair of tensors already on the device, gets a fast path.
        if self._pairs and type(batch) in (tuple, list) and len(batch) == 2:
            x, y = batch
            if type(x) is type(y) is Tensor and x.device == self.device == y.device and x.ndim:
                rows = x.shape[0]  # len() takes four times as long
                if rows == drawn or (drawn is None and y.ndim and rows == y.shape[0]):
                    return batch, (x,), (y,), rows
        batch, inputs, targets = self.split(batch)
        return batch, inputs, targets, self._count(batch, drawn)

    def split(self, batch: Any) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
        """Return (batch on the device, inputs, targets)."""
        batch = to_device(batch, self.device)
        if self._only_inputs and isinstance(batch, tuple | list) and not _are_texts(batch):
            # A collate function for samples with targets may have left their place empty.
            inputs = tuple(x for x in batch[: self.dls.n_inp] if x is not None)
            if len(inputs) != 1 or not isinstance(inputs[0], Tensor):
                return batch, inputs, ()
            return batch, *self.dls.split(inputs[0], self.arguments)  # loaders of pictures make floats of them
        return batch, *self.dls.split(batch, self.arguments)

    def _drawn(self, index: int) -> int | None:
        """Return the number of samples that a loader on one process has drawn for a batch, if it is known."""
        if self._stream is None:
            left = self._total - index * self._size
            return min(self._size, left) if left > 0 else None
        if self._shares is None:  # a nested reading has its own shares
            self._shares = self._stream.shares
        return self._shares.popleft().size if self._shares else None

    def _count(self, batch: Any, drawn: int | None) -> int:
        """Return the number of samples of a batch; `drawn` is the number that the loader has drawn, if it is known."""
        if drawn == 0:  # a rank without data has an empty batch
            return 0
        counts_rows = self.dls.batch_size is None
        if (
            drawn
            and counts_rows
            and self.dls.batch_dim == 0
            and isinstance(batch, tuple | list)
            and all(type(t) is Tensor and t.shape[:1] == (drawn,) for t in batch)
        ):
            return drawn  # the same result as below, in less time
        rows = self.dls.count(batch)
        if rows is None:
            return self._infer(batch) if drawn is None else drawn
        if counts_rows and drawn not in (None, rows):
            if drawn in row_counts(batch, self.dls.batch_dim).values():
                return drawn  # a list of texts tells what the tensors do not, which agree by chance
            self._say(
                f"the loader drew {drawn} samples for a batch whose parts have {rows} rows; the rows are counted as "
                f"samples. If they are not, {_ADVICE}"
                " (errors.html#batch-samples)"
            )
        return rows

    def _infer(self, batch: Any) -> int:
        """Guess the number of samples of a batch whose parts have several lengths, by comparison with a full batch."""
        dims = self.dls.batch_dim
        lengths_by_place = dict(lengths_in(batch)) if dims == 0 else row_counts(batch, dims)
        if not self._places:
            size = getattr(self.dl, "batch_size", None)
            self._places = [place for place, length in lengths_by_place.items() if length == size]
        here = [lengths_by_place[place] for place in self._places if place in lengths_by_place]
        if here:
            return min(here)  # in the last batch, a part shared by all samples may be as long as a full batch
        lengths = ", ".join(f"{'.'.join(map(str, place))}: {length}" for place, length in lengths_by_place.items())
        message = (
            "it is not known how many samples a batch has, as its parts have different lengths or none "
            f"({lengths or describe(batch)}); {_ADVICE}"
        )
        if self.sharded:
            raise ValueError(message + " (errors.html#batch-samples)")
        guess = next(iter(lengths_by_place.values()), 1)
        self._say(message + f". Until then the first length is taken, {guess} (errors.html#batch-samples)")
        return guess

    def _say(self, message: str) -> None:
        """Warn once for these loaders, even if the numbers in the message change."""
        if not self.dls._said:
            self.dls._said = True
            distributed.warn(message)


def _collate_inputs(collate: Callable[[list], Any], as_tuples: bool, items: list) -> Any:
    """Collate inputs alone by a function for samples with targets.

    Args:
        collate: the function.
        as_tuples: samples are tuples, so each input is wrapped in one.
        items: the inputs.
    """
    given = [(item,) if as_tuples and not isinstance(item, tuple | list) else item for item in items]
    try:
        return collate(given)
    except Exception as e:
        name = getattr(collate, "__name__", type(collate).__name__)
        raise ValueError(
            f"the loader's collate_fn, {name}, cannot join {describe(given[:1])}, inputs without targets "
            f"({type(e).__name__}: {e}); give it one that can: DataLoaders.test_dl(items, collate_fn=...)"
        ) from e


def _yields_tuples(dl: DataLoader) -> bool:
    """Tell from its first sample whether a loader's dataset yields tuples."""
    if not has_index(dl) or loader_len(dl.dataset) == 0:
        return False
    with keep_seeds():
        return isinstance(dl.dataset[0], tuple | list)


ONLY_INPUTS = SimpleNamespace(only_inputs=True)
"""A stand-in for the loader of a batch without targets that was made without a loader."""

_ADVICE = "give DataLoaders(..., batch_size=lambda batch: ...), a function that counts the samples of a batch"


def _drawn_by(dl: Any) -> tuple[int, int]:
    """Return the numbers of samples in a full batch and in all batches; (0, 0) if a loader does not draw by index."""
    while isinstance(dl, LoaderView) and getattr(dl, "batch_sampler", None) is not None:
        dl = dl.loader  # a short epoch, for one, has the first batches of its loader
    if not has_index(dl):
        return 0, 0
    batches: Any = dl.batch_sampler
    total = loader_len(batches.sampler) if type(batches) in (BatchSampler, IndexBatches) else None
    return (0, 0) if total is None else (batches.batch_size, total)


_KEYWORDS = [*signature(DataLoaders.from_datasets).parameters, *signature(DataLoader).parameters]


def class_names(ds: Any, given: Iterable[Any] | None) -> list[Any] | None:
    """Return the names of the classes: the given ones, else `classes` of a dataset, or of the dataset inside it."""
    while given is None and ds is not None:
        given, parts = getattr(ds, "classes", None), getattr(ds, "datasets", None)
        # A ConcatDataset has a list of datasets, a StackDataset may have a dict; a Subset has one dataset.
        ds = parts[0] if parts and isinstance(parts, list | tuple) else getattr(ds, "dataset", None)
    return list(given) if isinstance(given, Iterable) else None


def check_classes(train_ds: Any, *others: Any) -> None:
    """Check that each number stands for the same class in all datasets.

    Raises:
        ValueError: the names of classes differ.
    """
    names = class_names(train_ds, None)
    for ds in others:
        theirs = class_names(ds, None)
        if names and theirs and any(name != other for name, other in zip(names, theirs, strict=False)):
            raise ValueError(
                f"the datasets have other classes: {first_few(names)}, and {first_few(theirs)}; a number has to stand "
                "for the same class in all of them. If it does, say their names by classes="
            )


def _check_datasets(train_ds: Any, valid_ds: Any) -> None:
    """Refuse an empty training set, and what is no dataset, such as a loader, or tensors of inputs and of targets."""
    if all(hasattr(ds, "__array__") for ds in (train_ds, valid_ds)):
        raise TypeError(
            f"got {describe(train_ds)} as the training set and {describe(valid_ds)} as the validation set; inputs and "
            "targets are one dataset: from_datasets(TensorDataset(X, y)); inputs alone are TensorDataset(X)"
        )
    for ds in (train_ds, valid_ds):
        if isinstance(ds, DataLoader) or not (ds is None or hasattr(ds, "__getitem__") or hasattr(ds, "__iter__")):
            raise TypeError(f"got a {type(ds).__name__} as a dataset; loaders go into DataLoaders(train, valid)")
        if isinstance(ds, tuple) and all(hasattr(x, "__array__") for x in ds):
            raise TypeError(f"got a tuple as a dataset: {describe(ds)}; inputs and targets are TensorDataset(X, y)")
        if isinstance(ds, Mapping) and ds and all(isinstance(key, str) for key in ds):
            raise TypeError(
                f"got a {type(ds).__name__} of {first_few(ds)} as a dataset, whose samples have no numbers; the parts "
                "of a DatasetDict are given one by one, and columns of tensors are TensorDataset(X, y)"
            )
    if loader_len(train_ds) == 0:
        raise ValueError("the training set is empty: it has 0 samples")


def check_loader(dl: Any, name: str) -> None:
    """Refuse what is no loader, such as a dataset, whose samples would be taken for batches."""
    if not hasattr(dl, "__iter__") and not hasattr(dl, "__getitem__"):
        raise TypeError(
            f"the {name} loader is a {type(dl).__name__}, which cannot be iterated over; "
            "pass a DataLoader or another iterable of batches"
        )
    if isinstance(dl, Dataset | Tensor | np.ndarray) and not isinstance(dl, IterableDataset):
        raise TypeError(
            f"the {name} loader is a dataset ({type(dl).__name__}); use DataLoaders.from_datasets, or put it into a "
            "DataLoader" + (", or new inputs into dls.test_dl(inputs)" if name == "given" else "")
        )


def _described(dl: Iterable) -> str:
    """Describe a loader by its numbers of samples and batches, if they are known, or else by its class."""
    samples, batches = loader_len(getattr(dl, "dataset", None)), loader_len(dl)
    size = getattr(dl, "batch_size", None)
    parts = [
        "" if samples is None else f"{samples:,} sample{'' if samples == 1 else 's'}",
        "" if batches is None else f"{batches:,} batch{'' if batches == 1 else 'es'}" + (f" of {size}" if size else ""),
    ]
    return " in ".join(filter(None, parts)) or type(dl).__name__
