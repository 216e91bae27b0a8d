"""The largest batch that fits into the memory, found by steps of training that leave no trace."""

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from learnerkit import arguments, distributed, parallel
from learnerkit.callback import Callback, running
from learnerkit.callbacks.accumulation import GradientAccumulation
from learnerkit.callbacks.debugging import ShortLoader
from learnerkit.callbacks.training import StepBudget
from learnerkit.data.batches import loader_len
from learnerkit.data.lengths import LengthBatches
from learnerkit.data.order import keep_seeds, put_back_attributes, refuse_iterator, with_batches
from learnerkit.explain import is_out_of_memory
from learnerkit.inspection.undoing import held_tensors, state_tensors
from learnerkit.marks import collective, not_collective
from learnerkit.parallel.distributed import DistributedCallback
from learnerkit.parallel.model_checks import rank_norms
from learnerkit.processes.rank_main import forget_frames
from learnerkit.scaling.rate import plain_rates, ranks_of, step_of
from learnerkit.scaling.trials import attempt, training_ranks, trying
from learnerkit.state import Learner
from learnerkit.text import in_units
from learnerkit.torch_internals import LiveBytes, uncompiled
from learnerkit.utils import memory_of, replaced, unwrap
from learnerkit.values import entries

_T = TypeVar("_T")

STEPS = 2
"""The optimizer steps of a try: its state is there in the second."""

READ = 256
"""The samples that are read, at most, where nothing tells which ones are large."""


@dataclass(frozen=True)
class BatchSize:
    """The largest batch of a process that fits into the memory, and what goes with it.

    Attributes:
        batch_size: samples of a batch of one process; with `split_batches=True` those of a batch of the loader are as
            many for each process.
        tried: for each size that was tried the most bytes that it took, on any process; `None`: out of memory.
        limit: the bytes that a step may take.
        n_batches: the `n_batches` of `GradientAccumulation` for the wanted effective batch; `None`: none was wanted.
        effective: samples of an optimizer step then, of all processes and batches; `None`: it is not known.
        lr: the learner's rate as `scaled_lr` scales it to these, or a list for groups with several; `None`: it is
            scaled by itself, there is no rule for the optimizer, or `effective` is not known.
        samples: which samples the batches had.
        tokens: the budget of tokens that allows as many of the longest samples; `None`: batches have no budget.
    """

    batch_size: int
    tried: dict[int, int | None]
    limit: int
    n_batches: int | None
    effective: int | None
    lr: float | list[float] | None
    samples: str
    tokens: int | None = None

    def __str__(self) -> str:
        peak, many = self.tried[self.batch_size] or 0, "samples fit" if self.batch_size > 1 else "sample fits"
        text = f"{self.batch_size} {many} ({in_units(peak)} of {in_units(self.limit)})"
        if self.tokens is not None:
            text += f"; tokens={self.tokens} allows as many of the longest"
        if (self.n_batches or 1) > 1:
            text += f"; GradientAccumulation(n_batches={self.n_batches}) makes {self.effective} of them"
        elif self.effective is not None:
            text += f"; {self.effective} a step"
        if self.lr is not None:
            rates = self.lr if isinstance(self.lr, list) else [self.lr]
            text += f", lr {', '.join(f'{rate:.3g}' for rate in rates)}"
        return text


@collective
def find_batch_size(learn: "Learner", share: float = 0.9, bs: int | None = None) -> BatchSize:
    """Do what `Learner.find_batch_size` says."""
    arguments.check_fit(learn, n_epoch=None, n_steps=STEPS, who="find_batch_size")
    arguments.check_positive("share", share)
    if share > 1:
        raise ValueError(f"got share={share}; it is the share of the memory that a step may take, at most 1")
    if bs is not None:
        arguments.check_count("bs", bs, "a number of samples, of a step on all ranks together")
    if parallel.will_shard(learn) or learn.shards is not None or learn.mapped is not None:
        raise ValueError(
            "find_batch_size tries each size on each rank alone, which a sharded model cannot be trained on: "
            "learn.check(memory=...) says what a step of it takes (errors.html#out-of-memory)"
        )
    with training_ranks(learn):
        result = _Search(learn, share, bs).run()
    learn.say(str(result))
    return result


class _Search:
    """Tries sizes on all ranks, each training alone, so that none waits in a collective for one that has failed.

    Args:
        learn: the learner.
        share: the share of the memory that a step may take.
        bs: the wanted number of samples of a step.
    """

    def __init__(self, learn: "Learner", share: float, bs: int | None) -> None:
        self.learn = learn
        self.share = share
        self.bs = bs
        self.ranks, self.split, _ = ranks_of(learn, learn.cbs)
        self.at = step_of(learn).samples
        self.tried: dict[int, int | None] = {}
        self.train: _Source
        self.valid: _Source | Any = None
        self._limit = self._wanted = 0
        self._rates: list[tuple[float, Callable[[float], float]]] | None = None

    @collective
    def run(self) -> BatchSize:
        """Find the largest size: double, then bisect."""
        agreed = _on_all_ranks(self._prepare)
        start, most, limit = (min(each) for each in zip(*agreed, strict=True))
        least = min(2 if rank_norms(unwrap(self.learn.model)) else 1, most)  # BatchNorm cannot train on one sample
        fitting = least - 1
        size = max(start, least)
        above = most + 1
        while fitting + 1 < above:
            if self._fits(size):
                fitting = size
            else:
                above = size
            size = min(2 * size, most) if above > most else (fitting + above) // 2
        if fitting < least:
            raise torch.OutOfMemoryError(
                f"a batch of {least} does not fit: its step takes {in_units(self._wanted)} or more, and may take "
                f"{in_units(limit)}, {self.share:.0%} of the memory; take ActivationCheckpointing(), to_bf16(), an "
                "optimizer with less state, or a smaller model, or divide it among several ranks by "
                "distrib_ctx(shard=True) (errors.html#out-of-memory)"
            )
        return self._result(fitting, limit)

    def _prepare(self) -> tuple[int, int, int]:
        "Return this rank's first size, its largest size, and the bytes that a step may take."
        dls, ranks = self.learn.dls, self.ranks
        if reason := _why_fixed(dls.train):
            raise ValueError(
                f"the training loader {reason}, so find_batch_size cannot change how many samples a batch has; give a "
                "DataLoader with batch_size= of a dataset with an index and a length"
            )
        self.train = _Source(dls.train)
        if self.bs is not None:
            if self.train.longest:
                raise ValueError(
                    f"got bs={self.bs}, and the batches of the training loader have a budget of tokens, so how many "
                    "samples they have differs: leave bs= out, and take GradientAccumulation(n_samples=...)"
                )
            self.bs = min(self.bs, self.train.n)  # accumulation ends with the epoch
        refuse_iterator(dls.valid, "validation ")
        if dls.valid is not None:
            self.valid = ShortLoader(dls.valid, 1) if _why_fixed(dls.valid) else _Source(dls.valid)
        start = -(-self.train.size // (ranks if self.split else 1))
        most = -(-(self.bs or self.train.n) // ranks)
        self._limit = int(self.share * memory_of(dls.device))
        return min(start, most), most, self._limit

    @collective
    def _fits(self, size: int) -> bool:
        "Tell whether batches of this size fit on all ranks."
        peaks, outs, fits = zip(*_on_all_ranks(partial(self._try, size)), strict=True)
        self.tried[size] = None if any(outs) else max(peaks)
        if not all(fits):
            self._wanted = max(peaks)
        return all(fits)

    def _try(self, size: int) -> tuple[int, bool, bool]:
        "Return the peak of bytes in steps of this size, whether the memory ran out, and whether the steps fit."
        learn, device = self.learn, self.learn.dls.device
        # DDP keeps the gradients once more, in its buckets.
        params = unwrap(learn.model).parameters() if self.ranks > 1 else ()
        beside = sum(p.nbytes for p in params if p.requires_grad)
        live = None if device.type == "cuda" else _LimitedBytes(self._limit - beside)
        if live is None:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        out = False
        try:
            self._train(size, live)
        except Exception as error:
            if not is_out_of_memory(error):
                if self.bs is not None and (n := self._n_batches(size)) > 1:
                    error.add_note(
                        f"find_batch_size(bs={self.bs}) has tried {n} batches of {size} a step, by "
                        "GradientAccumulation; without bs= it takes one batch a step"
                    )
                raise
            out = True
            forget_frames(error)
        if out:  # its tensors may be in cycles; the next try begins with an empty cache
            gc.collect()
        # What the device's allocator keeps counts, too: others cannot have it.
        peak = beside + (torch.cuda.max_memory_reserved(device) if live is None else live.peak)
        return peak, out, not out and peak <= self._limit

    @not_collective("it trains in `distributed.alone()`")
    def _train(self, size: int, live: LiveBytes | None) -> None:
        "Take some steps, and validate, in this process alone; restore everything at the end."
        learn, accumulates = self.learn, self._n_batches(size) > 1
        cbs: list[Callback] = [StepBudget(STEPS)]
        if accumulates:
            cbs.append(GradientAccumulation(n_batches=2))  # From the second batch on, gradients are in the memory.
        with ExitStack() as stack:
            enter = stack.enter_context
            if self.ranks > 1:
                enter(distributed.alone())
                # A collective would wait for ranks that do not come.
                enter(distributed.no_collectives("a step in one process"))
            enter(learn.removed_cbs([DistributedCallback, GradientAccumulation]))
            train = enter(trying(learn, "find_batch_size", cbs))
            enter(replaced(learn.dls, loaders=self._loaders(size, 2 * STEPS if accumulates else STEPS)))
            if live is not None:
                enter(uncompiled())  # The memory of compiled code cannot be seen.
                enter(live)
                live.note(_held(learn))
            train(n_steps=STEPS)
            self._rates = plain_rates(learn)

    def _n_batches(self, size: int) -> int:
        "Return how many batches of this size make a step, for the wanted effective batch or the learner's own."
        own = next(iter(running(self.learn.cbs, GradientAccumulation)), None)
        wanted = self.bs if self.bs is not None or own is None else own.n_samples
        if wanted is not None:
            return -(-wanted // (size * self.ranks))
        return 1 if own is None else own.n_batches or 1

    def _loaders(self, size: int, n: int) -> list:
        "Make loaders of `n` batches of this size, and of one batch for validation, whose size is scaled alike."
        valid = self.valid
        if isinstance(valid, _Source):
            valid = valid.batches(min(-(-size * valid.size // self.train.size), valid.n), 1)
        return [self.train.batches(size, n), valid, *self.learn.dls.loaders[2:]]

    @collective
    def _result(self, size: int, limit: int) -> BatchSize:
        learn = self.learn
        n = None
        cbs: list[Callback] = []
        if self.bs is not None:
            n = self._n_batches(size)
            even = -(-self.bs // (n * self.ranks))
            if even in self.tried or self._fits(even):
                size = even
            cbs.append(GradientAccumulation(n_batches=n))
        whole = size * self.ranks if self.split else size
        plain = BatchSampler(range(self.train.n), whole, False)
        loaders = [with_batches(learn.dls.train, batch_sampler=plain, batch_size=whole), *learn.dls.loaders[1:]]
        with learn.removed_cbs(GradientAccumulation if cbs else []), replaced(learn.dls, loaders=loaders):
            effective = None if self.train.longest else step_of(learn, cbs).samples
        lr: Any = None
        if self._rates is not None and effective is not None and self.at is not None:
            rates = [rate * rule(effective / self.at) for rate, rule in self._rates]
            lr = rates[0] if len({*rates}) == 1 else rates
        tokens = self.train.longest and size * self.train.longest
        return BatchSize(size, self.tried, limit, n, effective, lr, self.train.what, tokens)


class _LimitedBytes(LiveBytes):
    """Ends a try whose tensors take more than a limit, before it takes the host's last memory."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit: float = limit

    def changed(self) -> None:
        if self.now > self.limit:
            self.limit = float("inf")  # It is raised once, as cleaning up makes tensors, too.
            raise torch.OutOfMemoryError(f"{self.now}")


class _Source:
    """A loader, the samples that it may draw, and which of them are large.

    Attributes:
        n: how many samples a pass over it has.
        size: samples of a batch as it is.
        order: the indices of samples, from the largest on.
        what: which they are, in words.
        longest: the length of the longest, if a budget of tokens decides how many samples a batch has.
    """

    def __init__(self, dl: DataLoader) -> None:
        batches: Any = dl.batch_sampler
        sampler = getattr(batches, "sampler", None)
        rows: Sequence[int] = range(loader_len(dl.dataset) or 0)
        if isinstance(sampler, SubsetRandomSampler):
            rows = sampler.indices
        elif isinstance(sampler, Sequence):
            rows = sampler
        elif sampler is not None and type(sampler) not in (SequentialSampler, RandomSampler, WeightedRandomSampler):
            with ExitStack() as stack, keep_seeds(dl):  # what it draws may be other keys than numbers
                put_back_attributes(sampler, stack)
                rows = [*islice(sampler, loader_len(sampler) or len(rows))]
        self.dl, self.n = dl, min(len(rows), loader_len(sampler) or len(rows))
        self.longest: int | None = None
        lengths = _lengths(dl.dataset)
        if isinstance(batches, LengthBatches):
            lengths = batches.lengths
            self.longest = max(1, int(lengths.max()))
        self.size = batches.batch_size if self.longest is None else max(1, batches.tokens // self.longest)
        self.order = rows
        self.what = "samples of one size"
        if lengths is not None:
            largest = lengths[torch.as_tensor(rows)].argsort(descending=True, stable=True).tolist()
            self.order, self.what = [rows[i] for i in largest], "the longest samples"
        elif not getattr(dl, "reads_rows", False):
            places = torch.linspace(0, len(rows) - 1, min(READ, len(rows)), dtype=torch.float64).long().tolist()
            read = [rows[i] for i in places]
            with keep_seeds(dl):
                sizes = [_size(dl.dataset[i]) for i in read]
            if len({*sizes}) > 1:
                self.order = [read[k] for k in sorted(range(len(read)), key=lambda k: -sizes[k])]
                some = "all" if len(read) == len(rows) else f"{len(read)} of"
                self.what = f"the largest of {some} {len(rows)} samples"

    def batches(self, size: int, n: int) -> DataLoader:
        """Return a copy of the loader with `n` batches of the largest samples; they repeat where fewer are known."""
        rows = list(islice(cycle(self.order), size))
        one_process = {"num_workers": 0, "timeout": 0, "persistent_workers": False}
        whole: Any = {"batch_sampler": [rows] * n, "batch_size": size, "drop_last": True}
        return with_batches(self.dl, **whole, **one_process)


def _why_fixed(dl: Any) -> str:
    """Say why the size of a loader's batches cannot be changed; '' if it can."""
    if not isinstance(dl, DataLoader):
        return f"is a {type(dl).__name__}, whose batches are made already"
    if isinstance(dl.dataset, IterableDataset) or loader_len(dl.dataset) is None:
        return f"reads a {type(dl.dataset).__name__}, an iterable dataset or one without a length"
    batches = dl.batch_sampler
    known = isinstance(batches, LengthBatches) or isinstance(getattr(batches, "batch_size", None), int)
    return "" if known else "has batch_size=None, or a batch sampler that does not tell how many samples a batch has"


def _lengths(ds: Any) -> Tensor | None:
    """Return the lengths of a dataset's samples, if it tells them by an attribute `lengths`."""
    if isinstance(ds, Subset):
        inner = _lengths(ds.dataset)
        return None if inner is None else inner[torch.as_tensor(ds.indices)]
    lengths: Any = getattr(ds, "lengths", None)
    is_row = isinstance(lengths, Tensor | Sequence) or hasattr(lengths, "__array_interface__")
    return torch.as_tensor(lengths) if is_row and len(lengths) == loader_len(ds) else None


def _size(part: Any) -> int:
    """Count the numbers, or characters, in a sample."""
    if isinstance(part, str | bytes):
        return len(part)
    if inside := entries(part):
        return sum(_size(value) for _, value in inside)
    shape = getattr(part, "shape", getattr(part, "size", ()))  # PIL's images have a size alone.
    return prod(shape) if isinstance(shape, tuple) else 1


def _held(learn: "Learner") -> list[Tensor]:
    """Return the tensors that a learner has before a step: weights, buffers, gradients, the optimizer's state."""
    model = unwrap(learn.model)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [*held_tensors(model, learn.loss_func), *grads, *state_tensors(learn.opts)]


@collective
def _on_all_ranks(call: Callable[[], _T]) -> list[_T]:
    """Return what `call()` gives on each rank; an error on one is an error on all."""
    results, reason, error = attempt(call)
    if error is not None:
        raise error
    if reason:
        raise distributed.PeerError(f"no batch size was found, as {reason}")
    return results
