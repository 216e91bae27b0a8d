"""Jobs whose batches do not begin with a tensor of samples, for test_sample_jobs.py."""

import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from learnerkit import AccumMetric, DataLoaders, GradientAccumulation, Learner, distributed, mae, set_seed

N, SIZE = 23, 6  # samples and those of a batch: the last batch has five, which no world size divides
WIDTH = 4


class Samples(Dataset):
    """Sample i: i + 1 vectors (at most 5), their number, and a value to predict."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple:
        if not 0 <= i < N:
            raise IndexError(i)
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(1 + i % 5, WIDTH, generator=generator, dtype=torch.float64)
        return x, x.sum() / 3 + 0.1


class Stream(IterableDataset):
    """The same samples without indices."""

    def __iter__(self):
        return iter([Samples()[i] for i in range(N)])


class WholeBatches(IterableDataset):
    """A dataset that makes the batches itself."""

    def __init__(self, collate: Callable):
        self.collate = collate

    def __iter__(self):
        return (self.collate([Samples()[i] for i in range(start, start + 4)]) for start in range(0, 20, 4))


class UnevenBatches(Sampler):
    """Batches of several sizes, which only the sampler knows."""

    def __iter__(self):
        yield from (list(range(start, end)) for start, end in ((0, 7), (7, 9), (9, 17), (17, 18), (18, N)))

    def __len__(self) -> int:
        return 5


class Pooled(nn.Module):
    """Predicts a value from the mean of a sample's vectors."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    def pooled(self, xs) -> torch.Tensor:
        return self.body(torch.stack([x.mean(0) for x in xs])).squeeze(1)


# Kinds of batches: how samples are collated, and a model that takes them


@dataclass
class Batch:
    positions: torch.Tensor  # of the vectors, shared by all samples
    xs: torch.Tensor
    sizes: torch.Tensor
    y: torch.Tensor


def padded(samples: list) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    xs = torch.zeros(len(samples), 5, WIDTH, dtype=torch.float64)
    for row, (x, _) in zip(xs, samples, strict=True):
        row[: len(x)] = x
    return xs, torch.tensor([len(x) for x, _ in samples]), torch.stack([y for _, y in samples])


class OverPositions(Pooled):
    def forward(self, positions, xs, sizes):
        mask = positions < sizes[:, None]
        mean = (xs * mask[..., None]).sum(1) / sizes[:, None]
        return self.body(mean).squeeze(1)


class OfBatch(OverPositions):
    "Takes a dataclass, and makes its own loss."

    def forward(self, batch: Batch):
        pred = super().forward(batch.positions, batch.xs, batch.sizes)
        return OrderedDict(loss=F.mse_loss(pred, batch.y), logits=pred)


def as_dataclass(samples: list) -> Batch:
    xs, sizes, y = padded(samples)
    return Batch(torch.arange(5), xs, sizes, y)


def positions_first(samples: list) -> tuple:
    xs, sizes, y = padded(samples)
    return torch.arange(5), xs, sizes, y


def in_a_mapping(samples: list) -> dict:
    xs, sizes, y = padded(samples)
    return {"positions": torch.arange(5), "xs": xs, "sizes": sizes, "labels": y}


class Inputs(NamedTuple):
    scale: torch.Tensor
    xs: torch.Tensor
    sizes: torch.Tensor


class OfInputs(OverPositions):
    def forward(self, inputs: Inputs):
        return super().forward(torch.arange(5), inputs.xs * inputs.scale, inputs.sizes)


def scalar_first(samples: list) -> tuple:
    xs, sizes, y = padded(samples)
    return Inputs(torch.tensor(1.5, dtype=torch.float64), xs, sizes), y


def detection(samples: list) -> tuple:
    """Tuples with an entry for each sample: inputs of different sizes, and mappings as targets."""
    return tuple(zip(*((x, {"value": y, "boxes": x[:, :2]}) for x, y in samples), strict=True))


class Detector(Pooled):
    """Returns losses in training and otherwise a mapping for each sample, as torchvision's detectors do."""

    def forward(self, xs, targets=None):
        values = self.pooled(xs)
        if targets is not None:
            return {"loss": F.mse_loss(values, torch.stack([t["value"] for t in targets]))}
        return [{"value": v.reshape(1), "boxes": x[:, :2] * 2} for v, x in zip(values, xs, strict=True)]


class Adjacent(Pooled):
    """Mixes features by a matrix that all samples share."""

    def forward(self, adjacency, xs, sizes):
        return self.body(xs.sum(1) / sizes[:, None] @ adjacency).squeeze(1)


def adjacency_first(samples: list) -> tuple:
    xs, sizes, y = padded(samples)
    return torch.eye(WIDTH, dtype=torch.float64) + 0.1, xs, sizes, y


def graphs(samples: list, of_nodes: bool = False) -> tuple:
    """All vectors of a batch in one tensor, with the sample of each; targets for samples, or for vectors."""
    nodes = torch.cat([x for x, _ in samples])
    owner = torch.cat([torch.full((len(x),), i) for i, (x, _) in enumerate(samples)])
    edges = torch.stack([torch.arange(len(nodes)), torch.arange(len(nodes)).flip(0)])
    y = nodes.sum(1) if of_nodes else torch.stack([y for _, y in samples])
    return nodes, edges, owner, y


class Graphs(Pooled):
    def forward(self, nodes, edges, owner):
        n = int(owner.max()) + 1 if len(owner) else 0
        sums = torch.zeros(n, WIDTH, dtype=nodes.dtype).index_add(0, owner, nodes)
        return self.body(sums / owner.bincount(minlength=n)[:, None]).squeeze(1)


class Nodes(Pooled):
    def forward(self, nodes, edges, owner):
        return self.body(nodes).squeeze(1)


def packed(samples: list) -> tuple:
    return pack_sequence([x for x, _ in samples], enforce_sorted=False), torch.stack([y for _, y in samples])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.rnn, self.head = nn.GRU(WIDTH, 3).double(), nn.Linear(3, 1).double()

    def forward(self, x: PackedSequence):
        return self.head(self.rnn(x)[1][0]).squeeze(1)


def classes_of_nodes(samples: list) -> tuple:
    nodes, edges, owner, y = graphs(samples, of_nodes=True)
    return nodes, edges, owner, (y > 0).long()


class NodeScores(Nodes):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 2)).double()

    def forward(self, nodes, edges, owner):
        return self.body(nodes)


def in_lists(samples: list) -> list:
    """A list of several inputs, as torch's collate function makes of samples with lists."""
    xs, sizes, y = padded(samples)
    return [[xs, sizes], y]


class OfList(OverPositions):
    def forward(self, parts):
        return super().forward(torch.arange(5), *parts)


def without_a_sample(samples: list) -> tuple:
    """Leaves a sample out, as a collate function does with broken files."""
    xs, sizes, y = padded([s for s in samples if s[1] != Samples()[7][1]])
    return xs, sizes, y


class Sized(OverPositions):
    def forward(self, xs, sizes):
        return super().forward(torch.arange(5), xs, sizes)


def sgd(params, lr):
    return torch.optim.SGD(params, lr=lr)


def error_of(preds, *targets) -> float:
    """A metric of all predictions at once, and one that tells their order."""
    place = torch.arange(len(preds), dtype=torch.float64)
    return float(((preds - targets[0]).abs() * place).sum())


class Job(NamedTuple):
    """Batches and a model, and what is said of the number of samples."""

    collate: Callable
    model: Callable[[], nn.Module]
    loss: Any = F.mse_loss
    count: Callable[[Any], int] | None = None
    metrics: tuple = (mae, AccumMetric(error_of))
    loader: str = "indices"
    n_inp: int | None = None
    accumulate: bool = False
    inputs: bool = False  # whether all parts of the inputs belong to samples
    warns: str | None = None


JOBS = {
    "dataclass": Job(as_dataclass, OfBatch, None, metrics=()),
    "positions first": Job(positions_first, OverPositions),
    "positions first, accumulated": Job(positions_first, OverPositions, accumulate=True),
    "positions first, sizes of the sampler": Job(positions_first, OverPositions, loader="sampler"),
    "mapping": Job(in_a_mapping, OverPositions),
    "mapping, stream": Job(in_a_mapping, OverPositions, loader="stream"),
    "mapping, told": Job(in_a_mapping, OverPositions, loader="stream", count=lambda batch: len(batch["xs"])),
    "scalar first": Job(scalar_first, OfInputs),
    "adjacency": Job(adjacency_first, Adjacent),
    "adjacency, accumulated": Job(adjacency_first, Adjacent, accumulate=True),
    "detection": Job(detection, Detector, None, metrics=(), n_inp=2),
    "graphs": Job(graphs, Graphs),
    "graphs, stream": Job(graphs, Graphs, loader="stream"),
    "graphs, accumulated": Job(graphs, Graphs, accumulate=True),
    "nodes": Job(partial(graphs, of_nodes=True), Nodes),
    "nodes, stream": Job(partial(graphs, of_nodes=True), Nodes, loader="stream"),
    "nodes, accumulated": Job(partial(graphs, of_nodes=True), Nodes, accumulate=True),
    "nodes, classes": Job(classes_of_nodes, NodeScores, F.cross_entropy, metrics=(), accumulate=True),
    "nodes, sum": Job(partial(graphs, of_nodes=True), Nodes, nn.MSELoss(reduction="sum"), metrics=(), accumulate=True),
    "packed": Job(packed, Recurrent),
    "packed, stream": Job(packed, Recurrent, loader="stream"),
    "lists": Job(in_lists, OfList, inputs=True),
    "lists, stream": Job(in_lists, OfList, loader="stream", inputs=True),
    "left out": Job(without_a_sample, Sized, inputs=True, warns="the loader drew"),
}

REFUSED = {
    "nodes, whole batches": (
        Job(partial(graphs, of_nodes=True), Nodes, loader="whole"),
        "it is not known how many samples a batch has, as its parts have different lengths or none (0: ",
    ),
    "no number": (Job(graphs, Graphs, count=lambda batch: None), "returned None"),
}


def loaders(job: Job) -> DataLoaders:
    options = {"collate_fn": job.collate}
    if job.loader == "sampler":
        found = [DataLoader(Samples(), batch_sampler=UnevenBatches(), **options) for _ in range(2)]
    elif job.loader == "whole":
        found = [DataLoader(WholeBatches(job.collate), None) for _ in range(2)]
    else:
        data = Stream() if job.loader == "stream" else Samples()
        found = [DataLoader(data, SIZE, **options) for _ in range(2)]
    return DataLoaders(*found, n_inp=job.n_inp, batch_size=job.count)


def do(name: str) -> dict:
    """What a job comes to on this rank."""
    set_seed(42)
    job = JOBS.get(name) or REFUSED[name][0]
    cbs = GradientAccumulation(n_batches=2) if job.accumulate else None
    options = {} if job.loss else {"loss_weight": "samples"}  # those of models are means over samples
    learn = Learner(
        loaders(job), job.model(), job.loss, opt_func=sgd, lr=0.05, metrics=list(job.metrics), cbs=cbs, **options
    )
    with learn.distrib_ctx(split_batches=job.loader != "whole"):
        if name in REFUSED:
            try:
                learn.fit(1)
            except Exception as e:
                return {"refused": str(e)}
            return {"refused": None}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            learn.fit(2)
        found = {
            "said": [str(w.message) for w in caught],
            "weights": {k: v.clone() for k, v in learn.model.state_dict().items()},
            "losses": list(learn.recorder.losses), "values": list(learn.recorder.values),
        }  # fmt: skip
        if job.loss is not None:
            found["validation"] = learn.validate(ds_idx=0)
            found["predictions"] = learn.get_preds(with_input=job.inputs)
            if not job.inputs and distributed.world_size() > 1:
                with pytest.raises(ValueError, match="leave with_input out|packed sequences"):
                    learn.get_preds(with_input=True)
        elif name == "detection":
            learn.dls.n_inp = 1
            found["predictions"] = learn.get_preds(with_input=True)
    return found
