"""Metrics by name, of jobs drawn from a seed: batches and ranks have the values of scikit-learn for all at once."""

import math
import random
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import DataLoaders, Dice, IoU, Learner

TASKS = ("classes", "log probabilities", "pixels", "tokens", "yes or no", "labels", "numbers")
seeds = pytest.mark.parametrize("seed", [pytest.param(i, marks=[] if i < 8 else pytest.mark.soak) for i in range(200)])


class Given(nn.Module):
    """Returns its inputs, the predictions."""

    def __init__(self):
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + self.zero


def draw(seed):
    """The loss, names of classes, predictions and targets of a job; a class may be absent, and scores may be equal."""
    drawn = random.Random(seed)
    torch.manual_seed(seed)
    task, n, c = TASKS[seed % len(TASKS)], drawn.choice([1, 3, 20, 41]), drawn.choice([3, 4, 7])
    shape = {"pixels": (3, 4), "tokens": (5,)}.get(task, ())
    scores = torch.randn(n, c, *shape) * drawn.choice([1, 1, 20])
    if task in ("yes or no", "labels") and drawn.random() < 0.5:
        scores = scores.round()
    if task == "numbers":
        unit = drawn.choice([1, 1e-6, 1e6])
        return nn.MSELoss(), None, scores[:, 0] * unit, torch.randn(n) * unit
    if task == "yes or no":
        return nn.BCEWithLogitsLoss(), None, scores[:, 0], torch.randint(2, (n,)).float()
    if task == "labels":
        return nn.BCEWithLogitsLoss(), "abcdefg"[:c], scores, torch.randint(2, (n, c)).float()
    targets = torch.randint(c - drawn.choice([0, 1]), (n, *shape))
    ignored = drawn.choice([-100, 0, 255])
    targets[torch.rand(targets.shape) < drawn.choice([0, 0.3])] = ignored
    if task == "log probabilities":
        return nn.NLLLoss(ignore_index=ignored), "abcdefg"[:c], scores.log_softmax(1), targets
    return nn.CrossEntropyLoss(ignore_index=ignored), "abcdefg"[:c], scores, targets


def area(columns):
    """The mean of the areas under the curves of (answers, scores) in which both answers occur."""
    from sklearn import metrics as reference  # here, as its import takes seconds

    areas = [reference.roc_auc_score(y, p) for y, p in columns if 0 < y.sum() < len(y)]
    return sum(areas) / len(areas) if areas else math.nan


def shares(found, actual, **options):
    from sklearn import metrics as reference

    names = ("f1", "precision", "recall")
    functions = (reference.f1_score, reference.precision_score, reference.recall_score)
    return {name: f(actual, found, zero_division=0, **options) for name, f in zip(names, functions, strict=True)}


def expected(loss, preds, targets):
    """The metrics of all predictions at once, by scikit-learn and by hand."""
    from sklearn import metrics as reference

    preds = preds.double()
    if isinstance(loss, nn.MSELoss):
        off = preds - targets
        share = reference.r2_score(targets, preds) if len(preds) > 1 else math.nan
        return {"mse": off.square().mean(), "mae": off.abs().mean(), "rmse": off.square().mean().sqrt(), "r2": share}
    if isinstance(loss, nn.BCEWithLogitsLoss):
        found, options = preds > 0, {"average": "macro"} if preds.ndim > 1 else {}
        columns = zip(targets.reshape(len(preds), -1).T, preds.sigmoid().reshape(len(preds), -1).T, strict=True)
        right = (found == targets.bool()).double().mean()
        return {"accuracy": right, "auc": area(columns)} | shares(found, targets.bool(), **options)
    counted = (targets >= 0) & (targets != loss.ignore_index)
    scores, y = preds.movedim(1, -1)[counted], targets[counted]
    found, c = scores.argmax(1), scores.shape[1]
    probs = scores.exp() if isinstance(loss, nn.NLLLoss) else scores.softmax(1)
    if not len(y):
        return dict.fromkeys(("accuracy", "error_rate", "perplexity", "auc", "f1", "dice", "iou"), math.nan)
    pairs = [(int(((found == i) & (y == i)).sum()), int((found == i).sum() + (y == i).sum())) for i in range(c)]
    dice = [2 * both / total for both, total in pairs if total]
    top = (scores.topk(min(5, c), 1).indices == y[:, None]).any(1).double().mean()
    right = (found == y).double().mean()
    return {
        "accuracy": right, "error_rate": 1 - right, "top_k_accuracy": top,
        "perplexity": F.cross_entropy(scores, y).exp(), "auc": area([(y == i, probs[:, i]) for i in range(c)]),
        "dice": sum(dice) / len(dice), "iou": sum(share / (2 - share) for share in dice) / len(dice),
    } | shares(found, y, average="macro")  # fmt: skip


@seeds
@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore")
def test_values_are_those_of_all_predictions_at_once(seed):
    loss, names, preds, targets = draw(seed)
    wanted, n = expected(loss, preds, targets), len(preds)
    own = {"dice": Dice(), "iou": IoU()}
    data = TensorDataset(preds, targets)
    cuts = sorted({0, n, *random.Random(seed).choices(range(n + 1), k=4)})
    uneven = DataLoader(data, batch_sampler=[[*range(i, j)] for i, j in zip(cuts, cuts[1:], strict=False)])
    dls = DataLoaders(uneven, DataLoader(data, 3), device="cpu", classes=names)
    dls.targets = "classes" if targets.ndim == 2 and targets.is_floating_point() else None
    learn = Learner(dls, Given(), loss, metrics=[own.get(name, name) for name in wanted])
    for together in (False, True):
        for i in (0, 1):
            with learn.distrib_ctx() if together else nullcontext():
                found = dict(zip(wanted, learn.validate(i)[1:], strict=True))
            assert found == pytest.approx({k: float(x) for k, x in wanted.items()}, rel=2e-5, abs=1e-9, nan_ok=True)
