"""The order in which samples are drawn, and the random streams that decide it."""

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy, deepcopy
from inspect import getclosurevars, isfunction
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from learnerkit.data.batches import loader_len
from learnerkit.data.lengths import LengthBatches
from learnerkit.data.rows import IndexBatches, draw_seed
from learnerkit.distributed import seeds
from learnerkit.torch_internals import loader_attributes
from learnerkit.utils import accepts

HOST = torch.device("cpu")


def has_index(dl: Any) -> bool:
    """Tell whether an object is a torch `DataLoader` that reads its samples by index."""
    return isinstance(dl, DataLoader) and not isinstance(dl.dataset, IterableDataset)


def epoch_seed(start: Tensor, epoch: int) -> int:
    """Return the seed for the sample order of an epoch (counted from 0) of a fit.

    This is the seed that torch's own loader would draw from the global generator if nothing else had used the generator
    since the fit began. So the order is that of a plain torch loop with the same seed, and dropout, augmentation,
    validation and the number of ranks do not change it.

    Args:
        start: the generator's state when the fit began.
        epoch: the index of the epoch.
    """
    generator = torch.Generator()
    generator.set_state(start)
    # Each epoch makes two draws; torch's loader makes the first of them for its workers.
    return int(torch.empty(2 * epoch + 2, dtype=torch.int64).random_(generator=generator)[-1])


def samplers_of(dl: Any) -> list:
    """Return the sampler objects behind a loader, from the batch sampler inwards."""
    samplers: list = []
    inner = dl
    while True:
        # A sampler is compared with None, because its truth is its length, which it may not have.
        parts = [getattr(inner, name, None) for name in ("batch_sampler", "sampler")]
        inner = next((part for part in parts if part is not None), None)
        if inner is None or any(inner is s for s in samplers):
            return samplers
        samplers.append(inner)


def set_epoch(dl: Any, epoch: int) -> None:
    """Call `set_epoch(epoch)` of a loader, its samplers and its dataset, of those that have it.

    Samplers such as torch's `DistributedSampler`, and iterable datasets of Hugging Face, draw another order by it.
    """
    for part in (dl, *samplers_of(dl), getattr(dl, "dataset", None)):
        if callable(hears := getattr(part, "set_epoch", None)):
            hears(epoch)


GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def has_state(x: Any) -> bool:
    """Tell whether an object has `load_state_dict`, and a `state_dict` that can be called without arguments.

    The datasets of litdata and of mosaicml-streaming have one for their own loaders, which give it arguments.
    """
    methods = [getattr(x, name, None) for name in ("state_dict", "load_state_dict")]
    return all(map(callable, methods)) and accepts(methods[0]) is not False


def order_sources(dl: Any) -> list[Any]:
    """Return the objects that decide the order of a loader's next epoch.

    These are the generators that the loader and its samplers hold, and the samplers that have a state.
    """
    samplers = samplers_of(dl)
    held = [getattr(dl, "generator", None), *(x for s in samplers for x in getattr(s, "__dict__", {}).values())]
    sources = [*(x for x in held if isinstance(x, GENERATORS)), *filter(has_state, samplers)]
    return list({id(x): x for x in sources}.values())


def generators_of(dl: Any) -> list[Any]:
    """Return the random generators among the `order_sources`."""
    return [x for x in order_sources(dl) if isinstance(x, GENERATORS)]


def states_of(sources: Sequence[Any]) -> list[Any]:
    """Return the states of `order_sources`, for `put_states`."""
    return [generator_state(x) if isinstance(x, GENERATORS) else deepcopy(x.state_dict()) for x in sources]


def put_states(sources: Sequence[Any], states: Sequence[Any]) -> None:
    """Restore the states that `states_of` returned.

    Raises:
        ValueError: the states are of a loader with other generators or samplers.
    """
    if len(sources) != len(states):
        raise ValueError(
            f"the training loader and its samplers have {len(sources)} random generators and states, and had "
            f"{len(states)} when they were saved; give them the same ones"
        )
    pairs = sorted(zip(sources, states, strict=True), key=lambda pair: isinstance(pair[0], GENERATORS))
    for source, state in pairs:  # the generators last, because samplers may draw from them here
        if isinstance(source, GENERATORS):
            set_generator_state(source, state)
        else:
            _put_sampler_state(source, state)


def _put_sampler_state(sampler: Any, state: Any) -> None:
    """Load a sampler's state, also one from the end of a pass, so that its next pass has items.

    The state of torchdata's `StatefulDistributedSampler`, for one, is a place in a pass: loaded from the end of a pass,
    it first ends this pass, without an item.
    """
    sampler.load_state_dict(deepcopy(state))
    with keep_seeds():
        for _ in sampler:
            sampler.load_state_dict(deepcopy(state))  # take the item back
            break


def data_generators(loaders: Iterable) -> Iterator[tuple[str, Any, str]]:
    """Yield the attributes of datasets and collate functions that are random generators, or may become one.

    Yields:
        A name of the attribute among all of these, its owner, and its own name.
    """
    for i, dl in enumerate(loaders):
        data = getattr(dl, "dataset", None)
        inner = getattr(data, "__dict__", {}).get("dataset")  # a property may open a file
        for part, x in (("dataset", data), ("inner", inner), ("collate_fn", getattr(dl, "collate_fn", None))):
            for name, value in getattr(x, "__dict__", {}).items():
                if value is None or isinstance(value, GENERATORS):
                    yield f"{i}.{part}.{name}", x, name


def data_states(loaders: Iterable) -> dict[str, Any]:
    """Return the states of the `data_generators` by their names, with `None` for those that are not made yet."""
    return {
        place: (value := vars(part)[name]) and generator_state(value) for place, part, name in data_generators(loaders)
    }


def generator_state(generator: Any) -> Any:
    """Return the state of a random generator, one of `GENERATORS`."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return seeds.without_arrays(generator.bit_generator.state)
    return seeds.without_arrays(generator.get_state())  # torch's generator, or numpy's legacy one


def set_generator_state(generator: Any, state: Any) -> None:
    """Set the state of a random generator to one that `generator_state` returned."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def put_generator(owner: Any, name: str, state: Any) -> None:
    """Set the state of an attribute that is a random generator, or that its owner makes when it is first used."""
    generator = vars(owner).get(name)
    if generator is None:
        if isinstance(state, Tensor):
            generator = torch.Generator()
        elif isinstance(state, Mapping):
            generator = np.random.Generator(getattr(np.random, state["bit_generator"])())
        else:
            generator = np.random.RandomState() if isinstance(state[0], str) else random.Random()
    set_generator_state(generator, state)
    object.__setattr__(owner, name, generator)


def put_back_attributes(owner: Any, stack: ExitStack) -> None:
    """Register on `stack` what restores an object's attributes, the content of its containers, and its generators.

    Of a function these are also what it uses of the scopes around it, such as a list in which a loss keeps a queue.
    """
    around: list = []
    if isfunction(owner):
        with suppress(ValueError):  # a variable around it has no value yet
            outer = getclosurevars(owner)
            around = [*outer.nonlocals.values(), *outer.globals.values()]
    for x in (getattr(owner, "__dict__", {}), *attribute_values(owner), *around):
        if type(x) in _CONTAINERS:
            stack.callback(_refill, x, copy(x))
        elif isinstance(x, GENERATORS):
            stack.callback(set_generator_state, x, generator_state(x))


_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)


def _refill(x: Any, content: Any) -> None:
    x.clear()
    (x.update if isinstance(x, dict | set) else x.extend)(content)


def attribute_values(owner: Any) -> list[Any]:
    """Return the attributes of an object, and the items of those that are containers, but nothing deeper."""
    values = list(getattr(owner, "__dict__", {}).values())
    inside = [x.values() if isinstance(x, dict) else x for x in values if type(x) in (tuple, *_CONTAINERS)]
    return [*values, *(item for items in inside for item in items)]


def states_at_start(dl: Any) -> tuple:
    """Return the states that the global generators will have when the samplers of `dl` draw, if an epoch begins now."""
    with keep_seeds():
        if getattr(dl, "generator", None) is None:
            draw_seed()  # torch's loader first draws a seed for its workers
        return seeds.seed_states()


@contextmanager
def keep_seeds(dl: Any = None, device: torch.device = HOST) -> Iterator[None]:
    """Restore random generators at the end: those of the host (torch, python, numpy), of `dl` and of its samplers.

    The states of samplers that have `state_dict` are not among them.

    Args:
        device: if it is not the host, restore the generators of this type of device too.
    """
    states = seeds.seed_states()
    generators = generators_of(dl)
    own_states = states_of(generators)
    try:
        with seeds.device_streams_kept(device):
            yield
    finally:
        seeds.set_seed_states(states)
        put_states(generators, own_states)


def refuse_iterator(dl: Any, which: str = "") -> None:
    """Refuse a loader that is an iterator, of which a look at its batches would take them from the fit."""
    if hasattr(dl, "__next__"):
        raise ValueError(
            f"the {which}loader is an iterator ({type(dl).__name__}), which can be read only once, so that its batches "
            "would be lost for the fit; pass a list, a DataLoader or a class with __iter__"
            " (errors.html#loader-iterator)"
        )


def first_batch(dl: Any) -> Any:
    """Return the first batch of a loader, read in this process; random streams, samplers and data with a state stay.

    Raises:
        ValueError: the loader is an iterator, which cannot give the batch again, or it has no batch.
    """
    refuse_iterator(dl)
    read = source = dl
    if isinstance(dl, DataLoader):  # one batch needs no workers
        read, source = with_batches(dl, num_workers=0, timeout=0, persistent_workers=False), dl.dataset
    with ExitStack() as stack, keep_seeds(read):
        for sampler in samplers_of(read):
            put_back_attributes(sampler, stack)
        if has_state(source):
            # This runs after the state is restored: from a state at its end, some sources would not begin again.
            put_back_attributes(source, stack)
            stack.callback(source.load_state_dict, deepcopy(source.state_dict()))
        for batch in read:
            return batch
    raise ValueError(f"the loader is empty{why_empty(dl)}")


def why_empty(dl: Any) -> str:
    """Return the reason why a loader gives no batch, as a text to follow 'is empty'."""
    if hasattr(dl, "why_empty"):
        return f": {dl.why_empty}"
    size, bs = loader_len(getattr(dl, "dataset", None)), getattr(dl, "batch_size", None)
    if size and getattr(dl, "drop_last", False):
        return f": {size} samples are less than a batch of {bs}, and drop_last=True; use a smaller batch size"
    return f": its dataset has {size} samples" if size is not None else ": it has no batches"


def in_order(dl: Any, name: str) -> Any:
    """Return a copy of `dl` that reads its whole dataset once, in dataset order; other iterables as they are.

    Raises:
        ValueError: a loader without batches whose sampler is neither sequential nor random, nor one of batches.
    """
    if not has_index(dl):
        return dl
    sampler: SequentialSampler = SequentialSampler(dl.dataset)
    where = "sampler" if dl.batch_sampler is None else "batch_sampler"
    batches = getattr(dl, where)
    if isinstance(batches, LengthBatches):
        return with_batches(dl, **{where: batches.in_order()})
    if dl.batch_sampler is not None or isinstance(batches, BatchSampler):
        size = getattr(batches, "batch_size", None) or 64
        kind = IndexBatches if getattr(dl, "reads_rows", False) else BatchSampler
        return with_batches(dl, **{where: kind(sampler, size, False)})
    if type(batches) in (SequentialSampler, RandomSampler):
        return with_batches(dl, sampler=sampler)
    raise ValueError(
        f"loader {name} has batch_size=None and a {type(batches).__name__}, so its dataset cannot be read in "
        "order; pass get_preds a loader of your own as dl="
    )


def with_batches(dl: DataLoader, **samplers: Any) -> DataLoader:
    """Return a copy of `dl`, of the same class, with another `sampler` or `batch_sampler`."""
    twin = DataLoader.__new__(type(dl))
    # Assignment would fail, as torch's loader forbids it to protect a loader in use.
    twin.__dict__.update(loader_attributes(dl) | samplers)
    if isinstance(inner := vars(twin).get("base_dataloader"), DataLoader):  # accelerate's loaders read this one
        vars(twin)["base_dataloader"] = with_batches(inner, **samplers)
    return twin
