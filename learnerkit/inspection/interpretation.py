"""Views of what a model predicts, and of what it gets wrong."""

import sys
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from learnerkit import arguments, distributed
from learnerkit.callbacks.prediction import decoder, per_sample, whole_dataset
from learnerkit.data.batches import loader_len, with_rows
from learnerkit.data.lengths import InOrder
from learnerkit.data.loaders import DataLoaders
from learnerkit.data.order import first_batch, keep_seeds
from learnerkit.data.show import DRAWN, WRONG, Table, label, note, nth, pyplot, samples_of, show
from learnerkit.losses import loss_option, weighting_of
from learnerkit.marks import collective
from learnerkit.state import Learner
from learnerkit.utils import itself
from learnerkit.values import describe


def decode(loss_func: Any, preds: Any, targets: Any) -> Tensor | None:
    """Return the classes that were predicted, by the loss and else by the shapes; `None` if these are no classes."""
    try:
        if (decodes := decoder(loss_func)) is not itself:
            return decodes(preds)
    except ValueError:
        pass
    if not isinstance(preds, Tensor) or not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    if loss_func is None and targets.ndim > 1 and preds.shape[:-1] == targets.shape:  # It is a loss over tokens.
        return preds.argmax(-1).where(targets >= 0, targets)
    return preds.argmax(1) if targets.ndim == 1 and preds.ndim == 2 and preds.shape[1] > 1 else None


class ClassificationInterpretation:
    """A view of the classes that a classifier confuses, and of its largest losses. `from_learner` makes one.

    Args:
        dls: the loaders, whose `classes` name the classes, and whose `decode` shows inputs.
        dl: the loader of the predictions, from whose dataset inputs are shown.
        preds: predictions of shape (n, classes), or of two classes (n,) or (n, 1); or others, such as a tuple.
        targets, decoded: actual and predicted classes, of shape (n,).
        losses: the loss of each sample, or `None`.

    Attributes:
        classes: their names, or numbers.
    """

    def __init__(
        self, dls: "DataLoaders", dl: Any, preds: Any, targets: Tensor, decoded: Tensor, losses: Tensor | None
    ) -> None:
        self.dls, self.dl = dls, dl
        self.preds = preds
        self.targets = targets
        self.decoded = decoded
        self.losses = losses
        scored = preds.shape[1] if isinstance(preds, Tensor) and preds.ndim == 2 else 0
        most = max(scored, 2, int(targets.max()) + 1, int(decoded.max()) + 1)
        names = list(map(str, dls.classes or []))
        self.classes = [*names, *map(str, range(len(names), most))]

    @classmethod
    @collective
    def from_learner(
        cls, learn: "Learner", ds_idx: int = 1, dl: Iterable | None = None
    ) -> "ClassificationInterpretation":
        """Predict a dataset, and interpret that. Under DDP every rank must reach this.

        Args:
            learn: with a model that scores classes.
            ds_idx: the dataset, by its loader.
            dl: a loader instead, read in its own order; `top_losses` then returns places in this reading.

        Raises:
            ValueError: predictions and targets that are not of one class for each sample.
        """
        try:
            per_sample(learn.loss_func)
            with_loss = True
        except ValueError:
            with_loss = False
        dl = whole_dataset(learn, ds_idx) if dl is None else dl
        preds, targets, *losses = learn.get_preds(dl=dl, with_loss=with_loss)
        decoded = decode(learn.loss_func, preds, targets)
        found, actual = (_classes(x) for x in (decoded, targets))
        if found is None or actual is None or len(found) != len(actual):
            raise ValueError(
                f"got predictions: {describe(preds)}; targets: {describe(targets)}; a classification has one class for "
                "each sample: scores (n, classes) and integers (n,), or one logit for each sample and "
                "BCEWithLogitsLoss. Of other outputs a loss with a method `decode(pred)` makes classes"
                " (errors.html#decode)"
            )
        ignored = loss_option(weighting_of(learn).own or learn.loss_func, "ignore_index", -100)
        actual = actual.masked_fill(actual == ignored, -1)
        return cls(learn.dls, dl, preds, actual, found, losses[0] if losses else None)

    def confusion_matrix(self) -> Tensor:
        """Count the samples of each actual class (row) that were predicted as each class (column).

        Samples that the loss ignores (`ignore_index`), and those with a negative target, do not count.
        """
        n, counted = len(self.classes), self.targets >= 0
        pairs = self.targets[counted] * n + self.decoded[counted]
        return torch.bincount(pairs, minlength=n * n).view(n, n)

    @distributed.on_rank0
    def plot_confusion_matrix(self, normalize: bool = False, ax: Any = None) -> Any:
        """Plot the confusion matrix.

        Args:
            normalize: show the share of each actual class instead of the number.
            ax: the matplotlib axes to draw on; by default new ones.

        Returns:
            The axes; `None` on ranks other than 0.

        Raises:
            ImportError: matplotlib is not installed.
        """
        counts, names = self.confusion_matrix(), self.classes
        shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
        if ax is None:
            side = min(12.0, 2.5 + 0.45 * len(names))
            ax = pyplot("plot_confusion_matrix").subplots(figsize=(side, side), layout="constrained")[1]
        ax.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
        if len(names) <= 25:  # There is room for texts.
            for i, j in counts.nonzero().tolist():
                text = f"{shares[i, j]:.2f}" if normalize else f"{counts[i, j]}"
                color = "white" if shares[i, j] > 0.5 else "black"
                ax.text(j, i, text, ha="center", va="center", fontsize=8, color=color)
            ax.set_xticks(range(len(names)), names, rotation=45, ha="right")
            ax.set_yticks(range(len(names)), names)
        title = "Share of each actual class" if normalize else "Confusion matrix"
        ax.set(xlabel="predicted", ylabel="actual", title=title)
        return ax

    def most_confused(self, min_val: int = 1) -> list[tuple[str, str, int]]:
        """Return the classes that were taken for others as (actual, predicted, how often), the most frequent first.

        Args:
            min_val: leave out what happened less often.
        """
        counts, names = self.confusion_matrix(), self.classes
        counts.fill_diagonal_(0)
        pairs = [(names[i], names[j], int(counts[i, j])) for i, j in counts.nonzero().tolist()]
        return sorted((each for each in pairs if each[2] >= min_val), key=lambda each: -each[2])

    def classification_report(self) -> Table:
        """Return precision, recall, F1 score (their harmonic mean) and number of samples of each class, and the means.

        A share of nothing counts as 0, as in scikit-learn.
        """
        counts = self.confusion_matrix().double()
        hits = counts.diag()
        support = counts.sum(1)
        said = counts.sum(0)
        precision, recall = hits / said.clamp(min=1), hits / support.clamp(min=1)
        scores = torch.stack([precision, recall, 2 * hits / (support + said).clamp(min=1)], dim=1)
        total, shares = int(support.sum()), support / support.sum().clamp(min=1)
        occurs = support + said > 0  # as in scikit-learn, a class that no sample has and none is taken for is left out
        rows = [
            *zip(self.classes, scores, support.long().tolist(), strict=True),
            ("mean of the classes", scores[occurs].sum(0) / occurs.sum().clamp(min=1), total),
            ("mean of the samples", shares @ scores, total),
        ]
        return Table(
            ["class", "precision", "recall", "f1", "samples"],
            [[name, *(f"{x:.2f}" for x in found.tolist()), n] for name, found, n in rows],
        )

    @distributed.on_rank0
    def print_classification_report(self) -> None:
        """Print the classification report, on rank 0."""
        print(self.classification_report())

    def top_losses(self, k: int | None = None, largest: bool = True) -> tuple[Tensor, Tensor]:
        """Return the largest losses, and the places of their samples in the dataset.

        Samples that do not count in the confusion matrix are left out: their loss is 0 because it is ignored.

        Args:
            k: how many; by default all.
            largest: else the smallest.

        Raises:
            ValueError: the loss gives none for each sample.
        """
        if self.losses is None:
            raise ValueError(
                "there is no loss for each sample: that needs a loss with an argument `reduction`, as torch's"
            )
        arguments.check_count("k", 1 if k is None else k, "a number of samples")
        counted = (self.targets >= 0).nonzero().flatten()
        n = len(counted)
        top = self.losses[counted].topk(min(k or n, n), largest=largest)
        return top.values, counted[top.indices]

    def plot_top_losses(self, k: int = 9, largest: bool = True) -> Any:
        """Show the samples with the largest losses, with target, prediction and loss.

        The inputs are read from the dataset again. A dataset that augments gives others than those of the predictions.

        Args:
            k, largest: as in `top_losses`.

        Returns:
            What `DataLoaders.show_batch` returns.

        Raises:
            ImportError: images, and matplotlib is not installed.
            ValueError: the loss gives none for each sample, or the dataset has no sample for each prediction.
        """
        losses, places = self.top_losses(k, largest)
        if not distributed.is_main():
            return None
        dataset = getattr(self.dl, "dataset", None)
        batches = getattr(self.dl, "batch_sampler", None)
        sampler = getattr(self.dl if batches is None else batches, "sampler", None)
        is_in_order = isinstance(sampler, SequentialSampler) or isinstance(batches, InOrder)
        if not is_in_order or loader_len(dataset) != len(self.targets):
            raise ValueError(
                "the inputs cannot be found: the loader does not read a dataset with lengths and indices in its own "
                "order; learn.get_preds(dl=..., with_input=True) returns them, and top_losses their places"
            )
        with keep_seeds(self.dl):
            inputs = [self.dls.split(dataset[i])[0] for i in places.tolist()]  # type: ignore[index]  # not None
        notes = _notes(self.targets[places], self.decoded[places], self.classes)
        notes["loss"] = [f"loss {loss:.3g}" for loss in losses.tolist()]
        return show(self.dls, inputs, notes, "target, prediction and loss")


def _classes(x: Any) -> Tensor | None:
    """Convert classes to integers of shape (n,); `None` if `x` has no classes."""
    if not isinstance(x, Tensor):
        return None
    x = x.squeeze(1) if x.ndim == 2 and x.shape[1] == 1 else x
    whole = x.ndim == 1 and (not x.is_floating_point() or bool((x == x.long()).all()))
    return x.long() if whole else None


def _without_padding(p: Any, y: Any) -> Any:
    """Cut a prediction for a row of tokens, which has the length of the longest of its batch, to that of its target."""
    are_rows = isinstance(p, Tensor) and isinstance(y, Tensor) and p.ndim == y.ndim == 1
    return p[: len(y)] if are_rows else p


def _notes(targets: Iterable, found: Iterable, classes: Any) -> dict[str, list[str]]:
    """Return the texts to show with samples: their targets and decoded predictions, with wrong ones marked."""
    pairs = [(label(y, classes), label(_without_padding(p, y), classes)) for y, p in zip(targets, found, strict=True)]
    mark = "" if callable(classes) else WRONG  # A text may be right in part.
    return {"target": [y for y, _ in pairs], "prediction": [p if p == y else mark + p for y, p in pairs]}


@collective
def show_results(learn: "Learner", n: int, ds_idx: int) -> Any:
    """Do what `Learner.show_results` says."""
    arguments.check_count("n", n, "a number of samples")
    dls, loader = learn.dls, learn.dls[ds_idx]
    items = _some(loader, n) if isinstance(loader, DataLoader) and loader.batch_sampler is not None else None
    if items is not None and _are_samples(items, dls, loader):
        samples = [dls.split(item) for item in items]
        dl: Any = DataLoader(items, batch_size=max(1, len(items)), collate_fn=loader.collate_fn)  # type: ignore[arg-type]
    else:  # The loader's batches cannot be made from samples here, or have others.
        batch = first_batch(loader)
        samples, dl = samples_of(dls, batch, sys.maxsize), [batch]  # all, as all are predicted
    preds, targets = learn.get_preds(dl=dl)
    if not distributed.is_main():
        return None
    own, kept = weighting_of(learn).own, targets
    if own is not None:  # A causal language model has no prediction for the first token.
        preds, (kept,) = own.paired(preds, (targets,))
    decoded, classes = decode(learn.loss_func, preds, kept), dls.target_names
    size = len(samples)
    rows, made = with_rows(preds if decoded is None else decoded, size, True), with_rows(targets, size)
    samples = samples[:n]
    answers = [nth(rows, i, size) for i in range(len(samples))]
    # A collate function or a callback may make the targets.
    given = [y or (nth(made, i, size),) for i, (_, y) in enumerate(samples)]
    if kept is not targets:
        given = [(y[1:],) for (y,) in given]
    if targets is None or decoded is None or dls.targets in DRAWN:
        notes = {} if targets is None else {"target": [note(y, dls) for y in given]}
        notes["prediction"] = [
            label(p, None) if decoded is None and dls.targets is None else note(p, dls) for p in answers
        ]
    else:
        notes = _notes((y if len(y) > 1 else y[0] for y in given), answers, classes)
    return show(dls, [x for x, _ in samples], notes, "target and prediction" if len(notes) > 1 else "prediction")


def _are_samples(items: list, dls: "DataLoaders", loader: Any) -> bool:
    """Tell whether a batch has a sample for each item: a collate function may leave out broken ones, or add others."""
    with keep_seeds(loader):
        return not items or dls.count(loader.collate_fn(items)) in (None, len(items))


def _some(loader: DataLoader, n: int) -> list:
    """Return samples from all over a dataset, at equal distances; of an iterable dataset the first ones."""
    dataset: Any = loader.dataset
    with keep_seeds(loader):
        if isinstance(dataset, IterableDataset):
            return list(islice(dataset, n))
        size = len(dataset)
        n = min(n, size)
        return [dataset[i * size // n] for i in range(n)]
