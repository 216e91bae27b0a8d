"""Metrics by name: those of torchmetrics for the loss and the classes, compared with their definitions."""

import math
from contextlib import nullcontext

import pytest
import torch
from helpers import make_classes, make_data, make_learner, make_model
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import DataLoaders, accuracy, accuracy_multi, mae, set_seed
from learnerkit.metrics import make_meters

OF_CLASSES = ["f1", "precision", "recall", "auc"]


class Labels(nn.BCEWithLogitsLoss):
    """Takes whole numbers as targets."""

    def forward(self, pred, target):
        return super().forward(pred, target.reshape(pred.shape).float())


def one_loader(data, classes):
    return DataLoaders.from_datasets(data, data, bs=4, device="cpu", classes=classes)


def several_classes():
    return make_learner(one_loader(make_classes(19), "abc"), make_model(n_out=3), nn.CrossEntropyLoss())


def yes_or_no():
    x, y = make_classes(19, classes=2).tensors
    return make_learner(one_loader(TensorDataset(x, y), None), make_model(), Labels())


def several_labels():
    x, y = make_data(19).tensors[0], torch.randint(2, (19, 3), generator=torch.Generator().manual_seed(3))
    return make_learner(one_loader(TensorDataset(x, y), "abc"), make_model(n_out=3), Labels())


def share(part, whole):
    return part / whole if whole else 0.0


def by_hand(found, actual, scores):
    """F1, precision, recall and area under the ROC curve of one class, whose samples are told by masks."""
    hits = int((found & actual).sum())
    pairs = scores[actual][:, None] - scores[~actual]  # the area: how many pairs are in their order
    area = float((pairs > 0).double().mean() + (pairs == 0).double().mean() / 2)
    precision, recall = share(hits, int(found.sum())), share(hits, int(actual.sum()))
    return [share(2 * hits, int(found.sum() + actual.sum())), precision, recall, area]


def expected(learn):
    """The means over the classes, or the labels."""
    preds, targets = learn.get_preds()
    if preds.shape[1] == 1:
        columns = [(preds[:, 0] > 0, targets == 1, preds[:, 0])]
    elif targets.ndim == 1:
        columns = [(preds.argmax(1) == i, targets == i, preds.softmax(1)[:, i]) for i in range(3)]
    else:
        columns = [(preds[:, i] > 0, targets[:, i] == 1, preds[:, i]) for i in range(3)]
    return torch.tensor([by_hand(*column) for column in columns]).mean(0).tolist()


@pytest.mark.parametrize("make", [several_classes, yes_or_no, several_labels])
def test_values_are_those_of_the_definitions(make):
    learn = make()
    learn.metrics = OF_CLASSES
    assert learn.validate()[1:] == pytest.approx(expected(learn), rel=1e-5)


def test_log_probabilities_and_ignored_targets_change_no_metric():
    learn = several_classes()
    learn.metrics = OF_CLASSES
    plain = learn.validate()[1:]
    learn.model, learn.loss_func = nn.Sequential(learn.model, nn.LogSoftmax(1)), nn.NLLLoss(ignore_index=9)
    assert learn.validate()[1:] == pytest.approx(plain)
    x, y = learn.dls.valid_ds.tensors
    more = TensorDataset(torch.cat([x, x[:5]]), torch.cat([y, torch.full((5,), 9)])[:, None])
    learn.dls = one_loader(more, "abc")
    learn.loss_func.forward = lambda pred, target: pred.mean()  # which would not take targets of shape (n, 1)
    assert learn.validate()[1:] == pytest.approx(plain)


def test_r2_of_numbers_of_two_shapes():
    x, y = make_data(19).tensors
    found = []
    for target in (y, y[:, 0]):
        learn = make_learner(one_loader(TensorDataset(x, target), None), metrics={"share": "r2", "plain": mae})
        learn.loss_func = nn.HuberLoss() if target is y else nn.L1Loss(reduction="sum")
        if target is not y:
            learn.model = nn.Sequential(learn.model, nn.Flatten(0))
        found.append(learn.validate()[1:])
    preds = learn.get_preds()[0]
    assert found[0] == pytest.approx(found[1])
    assert found[0][0] == pytest.approx(1 - float(((preds - y[:, 0]) ** 2).sum() / ((y - y.mean()) ** 2).sum()))


def test_r2_of_several_outputs_is_the_mean_of_theirs():
    x, y = make_data(19).tensors
    learn = make_learner(one_loader(TensorDataset(x, torch.cat([y, 5 + 100 * y.square()], 1)), None), metrics="r2")
    learn.model, learn.loss_func = nn.Linear(x.shape[1], 2), nn.MSELoss()
    preds, targets = learn.get_preds()
    shares = 1 - (preds - targets).square().sum(0) / (targets - targets.mean(0)).square().sum(0)
    assert learn.validate()[1] == pytest.approx(float(shares.mean()), rel=1e-4)


def test_targets_of_one_value_for_each_class_are_refused():
    learn = several_classes()
    x, y = learn.dls.valid_ds.tensors
    learn.dls, learn.metrics = one_loader(TensorDataset(x, nn.functional.one_hot(y, 3).float()), "abc"), "f1"
    with pytest.raises(ValueError, match=r"'f1' takes the number of a class for each sample, and got .*shape \(4, 3\)"):
        learn.validate()


def test_names_stand_beside_functions_and_are_the_columns():
    learn = several_classes()
    learn.metrics = ["f1", accuracy, "error_rate"]
    learn.fit(1)
    assert learn.recorder.metric_names[3:-1] == ["f1", "accuracy", "error_rate"]
    f1, right, wrong = learn.validate()[1:]
    assert right + wrong == pytest.approx(1)
    assert learn.final_record[2:] == [f1, right, wrong]
    learn.metrics = "f1"
    assert learn.validate()[1:] == [f1]
    assert "metrics    f1" in repr(learn)


def test_metrics_know_the_classes_of_a_models_own_loss():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = make_model(n_out=3)

        def forward(self, x, labels):
            logits = self.body(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    data = [{"x": x, "labels": y} for x, y in make_classes(19)]
    learn = make_learner(one_loader(data, "abc"), Own())
    learn.loss_func, learn.metrics = None, OF_CLASSES
    assert learn.validate()[1:] == pytest.approx(expected(several_classes()), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "loss", "classes", "message"),
    [
        ("f2", None, "abc", "got the metric 'f2'; the names are accuracy, accuracy_multi, auc, "),
        ("recal", None, "abc", "got the metric 'recal'; did you mean 'recall'"),
        ("f1", None, None, r"by CrossEntropyLoss and no names .*classes=.*MulticlassF1Score\(num_classes=10\)"),
        ("f1", nn.MSELoss(), "abc", "'f1' does not know its task by MSELoss and 3 names of classes"),
        (
            "r2",
            None,
            "abc",
            r"'r2' does not know its task by CrossEntropyLoss .* classes: take an .*regression.R2Score\(\)",
        ),
        ("f1", None, "ab", r"of the 2 classes that DataLoaders\(classes=.*names, and the predictions have 3: name all"),
        ("auc", lambda pred, target: pred.mean(), "abc", "'auc' does not know its task by <lambda>"),
        ("f1", Labels(), None, r"one score for each sample, .*float32 tensor of shape \(4, 3\).*MultilabelF1Score"),
    ],
)
def test_what_is_not_known_is_told(name, loss, classes, message):
    dls = one_loader(make_classes(8), classes)
    learn = make_learner(dls, make_model(n_out=3), loss or nn.CrossEntropyLoss(), metrics=name)
    if isinstance(loss, Labels):
        learn.dls = one_loader(TensorDataset(torch.randn(8, 4), torch.ones(8, 3)), classes)
    with pytest.raises(ValueError, match=message):
        learn.validate()


def test_without_torchmetrics_there_are_names_of_our_own(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchmetrics", None)
    with pytest.raises(ImportError, match="'f1' is one of torchmetrics: pip install torchmetrics"):
        make_meters("f1", nn.CrossEntropyLoss(), "abc")
    assert make_meters({"top": "accuracy"})[0].name == "top"


def fit_by_name(make, together):
    set_seed(1)
    learn = make()
    learn.metrics = ["f1", "auc", "recall"]
    with learn.no_logging(), learn.no_bar():
        if not together:
            learn.fit(1)
            return learn.recorder.values[-1]
        with learn.distrib_ctx(split_batches=True):
            learn.fit(1)
    return learn.recorder.values[-1]


def far_from_zero():
    """Numbers whose mean is large against their spread."""
    x, y = make_data(64).tensors
    learn = make_learner(one_loader(TensorDataset(x, 1e5 + 50 * y), None))
    with torch.no_grad():
        learn.model[-1].bias.fill_(1e5 - 10)
    return learn


def test_a_class_that_does_not_occur_has_no_part_in_the_area_under_the_curve():
    x, y = make_classes(19, classes=2).tensors
    learn = make_learner(one_loader(TensorDataset(x, y), "abc"), make_model(n_out=3), nn.CrossEntropyLoss())
    learn.metrics = "auc"
    scores = learn.get_preds(probs=True)[0]
    areas = [by_hand(y == c, y == c, scores[:, c])[3] for c in (0, 1)]
    assert learn.validate()[1] == pytest.approx(sum(areas) / 2)
    learn.dls = one_loader(TensorDataset(x, y.fill_(-100)), "abc")  # none is left
    learn.metrics = OF_CLASSES
    assert all(map(math.isnan, learn.validate()[1:]))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("answer", [0, 1])
def test_there_is_no_area_under_the_curve_where_all_answers_are_alike(answer):
    learn = yes_or_no()
    learn.metrics = "auc"
    learn.dls.valid_ds.tensors[1].fill_(answer)
    assert math.isnan(learn.validate()[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_area_under_the_curve_knows_the_order_of_sure_answers(dtype):
    x, y = torch.arange(18.0, 30)[:, None], torch.tensor([0, 1, 0, 0, 1, 0, 1, 1, 0, 1, 1, 1])
    area = by_hand(x[:, 0] > 0, y == 1, x[:, 0])[3]
    for classes, loss, weight in ((None, Labels(), [[1.0]]), ("no", nn.CrossEntropyLoss(), [[0.0], [1.0]])):
        learn = make_learner(one_loader(TensorDataset(x.to(dtype), y), classes), metrics="auc")
        learn.model, learn.loss_func = nn.Linear(1, len(weight), bias=False, dtype=dtype), loss
        learn.model.weight.data = torch.tensor(weight, dtype=dtype)
        assert learn.validate()[1] == pytest.approx(area)


def test_each_pixel_of_a_mask_may_be_a_yes_or_no():
    x, y = torch.randn(6, 2, 3, 4), torch.randint(2, (6, 1, 3, 4))
    learn = make_learner(one_loader(TensorDataset(x, y), None), nn.Conv2d(2, 1, 1), Labels(), metrics=OF_CLASSES)
    preds = learn.get_preds()[0].flatten()
    assert learn.validate()[1:] == pytest.approx(by_hand(preds > 0, y.flatten() == 1, preds), rel=1e-5)


def test_r2_is_exact_far_from_zero():
    learn = far_from_zero()
    learn.metrics = "r2"
    preds, targets = (t.double() for t in learn.get_preds())
    share = 1 - float((preds - targets).square().sum() / (targets - targets.mean()).square().sum())
    assert learn.validate()[1] == pytest.approx(share, rel=1e-6)


def test_r2_does_not_depend_on_the_unit_of_the_targets():
    x, y = make_data(19).tensors
    learn = make_learner(metrics="r2")
    found = []
    for unit in (1.0, 1e-5, 1e-12):
        learn.model = nn.Linear(x.shape[1], 1, bias=False)
        nn.init.constant_(learn.model.weight, 0.1 * unit)
        found.append(learn.validate(dl=[(x, y * unit)])[1])
    assert found == pytest.approx(found[:1] * 3)
    assert found[0] < 0.9
    # As in scikit-learn, of equal targets nothing is explained; of one target there is no value.
    assert learn.validate(dl=[(x, torch.full_like(y, 0.1))] * 2)[1] == 0
    assert math.isnan(learn.validate(dl=[(x[:1], y[:1])])[1])


@pytest.mark.ranks(2)
def test_r2_on_ranks_is_exact_far_from_zero():
    found = []
    for together in (False, True):
        learn = far_from_zero()
        learn.metrics = "r2"
        with learn.distrib_ctx() if together else nullcontext():
            found.append(learn.validate()[1])
    assert found[0] == pytest.approx(found[1], rel=1e-9)


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore")
def test_on_ranks_values_are_those_of_one_process():
    for make in (several_classes, yes_or_no, several_labels):
        one, two = (fit_by_name(make, together) for together in (False, True))
        assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize(("options", "right"), [({}, 5 / 6), ({"thresh": 0.9}, 4 / 6), ({"sigmoid": False}, 5 / 6)])
def test_accuracy_multi_counts_each_label(options, right):
    pred = torch.tensor([[2.0, -1.0, 0.2], [-3.0, 0.4, 3.0]])
    target = torch.tensor([[1, 0, 1], [0, 0, 1]])
    assert float(accuracy_multi(pred, target, **options)) == pytest.approx(right)


def test_accuracy_multi_compares_scores_and_targets_one_by_one():
    pred, target = torch.tensor([2.0, 1.0, -1.0]), torch.tensor([1.0, 0.0, 0.0])
    for one, other in ((pred[:, None], target), (pred, target[:, None])):
        assert float(accuracy_multi(one, other)) == pytest.approx(2 / 3)
    with pytest.raises(
        ValueError, match="needs a yes or no for each score, .* where each sample has one class, take acc"
    ):
        accuracy_multi(torch.zeros(3, 2), target.long())
