"""A collection of torchmetrics, as Lightning's users have it: a column for each of its metrics, exact on any ranks."""

import pytest
import torch
from helpers import make_classes, make_model, results_of
from torch import nn

from learnerkit import DataLoaders, Learner, Recorder, set_seed

CLASSES = 3


def make_collection(**kwargs):
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score, MulticlassRecall

    inner = MetricCollection([MulticlassF1Score(CLASSES), MulticlassRecall(CLASSES)], prefix="macro_")
    by_name = {"acc": MulticlassAccuracy(CLASSES, average="micro"), "auc": MulticlassAUROC(CLASSES), "of": inner}
    return MetricCollection(by_name, prefix="my_", **kwargs)


def log_loss(pred, target):
    return nn.functional.nll_loss(pred.log(), target)


def fit(name):
    set_seed(1)
    dls = DataLoaders.from_datasets(make_classes(22), make_classes(17, seed=1), bs=5, valid_bs=5, device="cpu")
    collection = make_collection()
    metrics = {"plain": collection, "named": {"last": collection}, "used": collection}[name]
    if name == "used":  # by the user, so that metrics of a group share their states
        for _ in range(2):
            collection.update(torch.randn(4, CLASSES), torch.randint(CLASSES, (4,)))
        collection.compute()
    # Probabilities: of batches with other numbers torchmetrics would make some, each by what is in it.
    model = nn.Sequential(make_model(n_out=CLASSES), nn.Softmax(1))
    learn = Learner(dls, model, log_loss, lr=0.05, metrics=metrics)
    learn.remove_cb(Recorder)
    learn.add_cb(Recorder(train_metrics=True, add_time=False))
    with learn.distrib_ctx(split_batches=True), learn.no_logging(), learn.no_bar():
        learn.fit(2)
        validation = learn.validate()
        of_user = {key: float(value) for key, value in collection.compute().items()}
        preds, targets = learn.get_preds()
    return {
        "names": learn.recorder.metric_names,
        "values": learn.recorder.values,
        "validation": validation,
        "of the user": of_user,
        "expected": {key: float(value) for key, value in make_collection()(preds, targets).items()},
    }


found = results_of(fit)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "named", "used"])
def test_a_collection_has_a_column_for_each_of_its_metrics(found, name):
    run, start = found[1, name][0], "last_" if name == "named" else ""
    columns = [start + key for key in run["expected"]]
    assert set(run["expected"]) == {"my_acc", "my_auc", "my_of_macro_MulticlassF1Score", "my_of_macro_MulticlassRecall"}
    train, valid = ([f"{phase}_{name}" for name in columns] for phase in ("train", "valid"))
    assert run["names"] == ["epoch", "train_loss", *train, "valid_loss", *valid]
    assert run["validation"][1:] == pytest.approx(list(run["expected"].values()))
    assert run["values"][-1][-len(columns) :] == pytest.approx(list(run["expected"].values()))
    assert run["of the user"] == pytest.approx(run["expected"])


@pytest.mark.soak
@pytest.mark.parametrize(
    ("n", "name"),
    [
        pytest.param(2, "plain", id="2-ranks-plain"),
        pytest.param(2, "used", id="2-ranks-used"),
        pytest.param(3, "named", id="3-ranks-named"),
    ],
)
def test_a_collection_on_ranks_equals_one_process(found, n, name):
    alone = found[1, name][0]
    for rank in found[n, name]:
        assert rank.pop("names") == alone["names"]
        expected = {key: value for key, value in alone.items() if key != "names"}
        torch.testing.assert_close(rank, expected, rtol=1e-5, atol=1e-6)
