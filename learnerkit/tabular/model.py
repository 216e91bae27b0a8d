"""A network for tables, and the Learner that trains it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from learnerkit.data.weights import class_loss
from learnerkit.learner import Learner
from learnerkit.tabular.columns import Numbers
from learnerkit.tabular.data import TabularDataLoaders
from learnerkit.text import first_few
from learnerkit.utils import listify


class TabularModel(nn.Module):
    """Embeddings of the categories beside the numbers, then linear layers with ReLU.

    The idea is that of Guo and Berkhahn, "Entity Embeddings of Categorical Variables",
    https://arxiv.org/abs/1604.06737.

    Args:
        embeddings: for each column of categories how many entries it has (one more than categories, since entry 0 is
            for the rest) and the size of their embeddings.
        n_cont: the numbers of a row.
        n_out: outputs.
        layers: the size of the hidden layer, or the sizes of several.
        dropout: after each hidden layer.
        embed_dropout: of the embeddings.
        bn: have BatchNorm in the hidden layers. On standardised numbers it seldom helps, and with it the numbers of
            several processes are not those of one.
        scale: (mean, std) by which outputs are moved and multiplied, those of a target in its own units, so that how
            well it is learned does not depend on them. A std below about 1e-4 is too small for the `eps` of AdamW.
        y_range: (low, high) between which outputs are kept by a sigmoid, instead of `scale`.
    """

    shift: Tensor
    factor: Tensor

    def __init__(
        self,
        embeddings: Sequence[tuple[int, int]],
        n_cont: int,
        n_out: int,
        layers: int | Sequence[int] = (200, 100),
        *,
        dropout: float = 0.0,
        embed_dropout: float = 0.0,
        bn: bool = False,
        scale: tuple[float, float] = (0.0, 1.0),
        y_range: tuple[float, float] | None = None,
    ) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(_embedding(n, size) for n, size in embeddings)
        self.embed_dropout = nn.Dropout(embed_dropout)
        sizes = [sum(size for _, size in embeddings) + n_cont, *listify(layers)]
        parts: list[nn.Module] = []
        for n_in, n in zip(sizes, sizes[1:], strict=False):
            parts += [nn.Linear(n_in, n, bias=not bn), *([nn.BatchNorm1d(n)] if bn else []), nn.ReLU()]
            parts += [nn.Dropout(dropout)] if dropout else []
        self.layers = nn.Sequential(*parts, nn.Linear(sizes[-1], n_out))
        self.bounded = y_range is not None
        low, factor = scale if y_range is None else (y_range[0], y_range[1] - y_range[0])
        self.register_buffer("shift", torch.tensor([low], dtype=torch.get_default_dtype()))
        self.register_buffer("factor", torch.tensor([factor], dtype=torch.get_default_dtype()))

    def forward(self, cats: Tensor, conts: Tensor) -> Tensor:
        """Predict from categories (n, columns), int64, and numbers (n, `n_cont`): (n, `n_out`)."""
        embedded = [embedding(cats[:, i]) for i, embedding in enumerate(self.embeddings)]
        parts = [self.embed_dropout(torch.cat(embedded, 1))] if embedded else []
        out = self.layers(torch.cat([*parts, conts], 1))
        return self.shift + self.factor * (out.sigmoid() if self.bounded else out)


def embedding_size(n: int) -> int:
    """Return the size of the embeddings of `n` entries by fastai's rule, min(600, 1.6 n^0.56)."""
    return min(600, round(1.6 * n**0.56))


def _embedding(n: int, size: int) -> nn.Embedding:
    layer = nn.Embedding(n, size)
    nn.init.trunc_normal_(layer.weight, std=0.01)
    with torch.no_grad():
        layer.weight[0] = 0  # It stays 0, without effect, if nothing is missing in training.
    return layer


def tabular_learner(
    dls: TabularDataLoaders,
    layers: int | Sequence[int] = (200, 100),
    metrics: Any = None,
    *,
    loss_func: Callable[..., Tensor] | None = None,
    embedding_sizes: dict[Any, int] | None = None,
    y_range: tuple[float, float] | None = None,
    dropout: float = 0.0,
    embed_dropout: float = 0.0,
    bn: bool = False,
    class_weights: Any = None,
    **learner_kwargs: Any,
) -> Learner:
    """Make a Learner for a table, whose model is a `TabularModel`.

    Args:
        dls: from `TabularData.dataloaders`.
        layers, dropout, embed_dropout, bn: as for `TabularModel`.
        metrics: as for `Learner`.
        loss_func: default `nn.CrossEntropyLoss()` for classes, `nn.MSELoss()` for a number.
        embedding_sizes: of some columns, by name; by default `embedding_size` of their categories and one more.
        y_range: the least and the largest number that is predicted.
        class_weights: what each class weighs in the default loss of classes: 'balanced', in inverse proportion to its
            rows; a mapping by class; or a sequence in the order of the classes.
        learner_kwargs: for `Learner`.

    Raises:
        TypeError, ValueError: other loaders, a size for a column that is not one of categories, `y_range` for classes,
            or `class_weights` that do not fit.
    """
    if not isinstance(dls, TabularDataLoaders):
        raise TypeError(f"got a {type(dls).__name__}; tabular_learner takes what TabularData's dataloaders() returns")
    data, sizes = dls.data, embedding_sizes or {}
    entries = {column.name: len(column.values) + 1 for column in data.cats}
    if unknown := set(sizes) - set(entries):
        raise ValueError(
            f"embedding_sizes has {first_few(unknown)}; the columns of categories are {first_few(entries)}"
        )
    if y_range is not None and data.classes is not None:
        raise ValueError(
            f"got y_range={y_range}; it is for a number, and the scores of the classes of {data.target.name!r} have no "
            "bounds: leave it out"
        )
    embeddings = [(n, sizes.get(name, embedding_size(n))) for name, n in entries.items()]
    loss: nn.Module = nn.MSELoss() if data.classes is None else nn.CrossEntropyLoss()
    scale = (data.target.mean, data.target.std) if isinstance(data.target, Numbers) else (0.0, 1.0)
    n_out = 1 if data.classes is None else len(data.classes)
    model = TabularModel(
        embeddings, data.n_numbers, n_out, layers, dropout=dropout, embed_dropout=embed_dropout, bn=bn, scale=scale,
        y_range=y_range,
    )  # fmt: skip
    loss_func = class_loss(dls, loss_func, loss, class_weights)
    return Learner(dls, model, loss_func, metrics=metrics, **learner_kwargs)
