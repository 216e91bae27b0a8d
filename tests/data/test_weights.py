"""Weights of samples and of classes: where labels are found, how often each class is drawn, and what is refused."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import raises
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

from learnerkit import DataLoaders, ImageData, TabularData, TextData, tabular_learner, text_learner, vision_learner
from learnerkit.data import weights as room
from learnerkit.data.weights import class_loss, labels_of

LABELS = [0] * 180 + [1] * 20
X = torch.zeros(200, 2)


class Listed:
    """A dataset that lists its targets, and refuses to be read."""

    def __init__(self, **lists):
        vars(self).update(lists)

    def __len__(self):
        return 200

    def __getitem__(self, i):
        raise AssertionError("a sample was read")


class Stream(IterableDataset):
    def __iter__(self):
        yield from X


def rows(labels=LABELS):
    return TensorDataset(X, torch.tensor(labels))


KNOWN = {
    "an array of 16 bits": Listed(targets=np.array(LABELS, np.uint16)),
    "tensors": rows(),
    "list of pairs": [("a.png", y) for y in LABELS],
    "targets": Listed(targets=LABELS),
    "targets as a tensor": Listed(targets=torch.tensor(LABELS, dtype=torch.uint8)),
    "a column of a frame": Listed(targets=pd.Series(LABELS, index=range(200, 400))),
    "labels": Listed(labels=torch.tensor(LABELS).numpy()),
    "parts": ConcatDataset([Subset(rows(), range(150)), Subset(Listed(targets=LABELS), range(150, 200))]),
}


@pytest.mark.parametrize("name", KNOWN)
def test_labels_are_found_without_reading_a_sample(name):
    found = labels_of(KNOWN[name])
    assert found.dtype == torch.int64
    assert found.tolist() == LABELS


UNKNOWN = {
    "nothing listed": Listed(),
    "numbers to predict": TensorDataset(X, X[:, 0]),
    "several labels a sample": TensorDataset(X, X.long()),
    "texts": Listed(targets=["a"] * 200),
    "lists of several lengths": Listed(targets=[[0], [0, 1]] * 100),
    "boxes": Listed(targets=[{"boxes": X}] * 200),
    "another number of them": Listed(targets=LABELS[1:]),
    "inputs alone": TensorDataset(X.long()[:, 0]),
    "masks": [("a.png", "b.png")] * 200,
    "one part of two": ConcatDataset([rows(), Listed()]),
    "left out ones": rows([-100, *LABELS[1:]]),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_where_no_classes_are_listed_one_weight_for_each_sample_is_asked_for(name):
    ds = UNKNOWN[name]
    assert DataLoaders.from_datasets(ds).class_counts is None
    with raises(
        ValueError, "the classes of the training samples are not known", "one number for each of the training samples"
    ):
        DataLoaders.from_datasets(ds, weights="balanced")
    assert len(DataLoaders.from_datasets(ds, weights=torch.ones(len(ds))).train) == -(-len(ds) // 64)


def test_classes_are_counted_by_name_or_number():
    make = DataLoaders.from_datasets
    assert make(rows()).class_counts == {0: 180, 1: 20}
    assert make(rows(), classes=["no", "yes", "perhaps"]).class_counts == {"no": 180, "yes": 20, "perhaps": 0}
    assert make(rows(), classes=["no"]).class_counts == {0: 180, 1: 20}  # not the names of these
    assert make(rows(), classes=["no", "no", "yes"]).class_counts == {0: 180, 1: 20, 2: 0}
    balanced = make(rows(), classes=["no", "no", "yes"], weights="balanced").train.sampler.weights
    assert balanced.unique().tolist() == pytest.approx([200 / 3 / 180, 200 / 3 / 20])
    assert make(Listed(targets=LABELS, classes=("no", "yes"))).class_counts == {"no": 180, "yes": 20}
    assert DataLoaders([1, 2]).class_counts is None
    stream = Stream()
    stream.labels = LABELS
    assert make(stream).class_counts is None
    assert DataLoaders(DataLoader(Subset(rows(), []))).class_counts == {}


def drawn(weights, **options):
    torch.manual_seed(1)
    dls = DataLoaders.from_datasets(rows(), weights=weights, bs=32, **options)
    epochs = [torch.cat([y for _, y in dls.train]) for _ in range(20)]
    assert {len(each) for each in epochs} == {200}
    return torch.cat(epochs).double().mean().item()


def test_classes_are_drawn_by_weight_and_an_epoch_has_as_many_samples_as_before():
    assert drawn(None) == 0.1
    assert drawn("balanced") == pytest.approx(0.5, abs=0.03)
    assert drawn("balanced", classes=["no", "yes", "perhaps"]) == pytest.approx(0.5, abs=0.03)
    assert drawn({"no": 1, "yes": 3}, classes=["no", "yes"]) == pytest.approx(0.25, abs=0.03)
    assert drawn([1.0] * 180 + [0.0] * 20) == 0


def test_weights_of_samples_do_not_count_targets_that_are_no_classes(monkeypatch):
    monkeypatch.setattr(room, "count_classes", lambda *_: pytest.fail("times would fill the memory"))
    times = rows([1_700_000_000 + y for y in LABELS])
    assert DataLoaders.from_datasets(times, weights=[1.0] * 200).train.sampler.weights.tolist() == [1.0] * 200


@pytest.mark.parametrize(
    ("weights", "parts"),
    [
        ("balance", ["got weights=balance; it is 'balanced', a mapping"]),
        ({0: 1}, ["got weights= for the classes 0; give one weight for each of: 0, 1"]),
        ({0: 1, 1: "two"}, ["or one number for each of the 2 classes"]),
        ([1.0] * 199, ["one number for each of the 200 training samples"]),
        ([-1.0] + [1.0] * 199, ["0 or more"]),
        ([float("nan")] + [1.0] * 199, ["0 or more"]),
        ([0.0] * 200, ["and not 0 for all"]),
        (torch.ones(200, 1), ["float32 tensor of shape (200, 1)"]),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, parts):
    with raises(ValueError, *parts):
        DataLoaders.from_datasets(rows(), weights=weights)


def test_weights_decide_the_draw_alone():
    for ds, options in [
        (Stream(), {}),
        (rows(), {"shuffle": False}),
        (rows(), {"sampler": range(200)}),
        (rows(), {"batch_sampler": [[0, 1]]}),
    ]:
        with raises(
            ValueError, "weights= draws samples at random from a dataset with a length; leave out shuffle=False"
        ):
            DataLoaders.from_datasets(ds, weights="balanced", **options)


def kinds():
    """Loaders of pictures, texts and a table with the same classes, and their Learners."""
    names = ["no" if y == 0 else "yes" for y in LABELS]
    pictures = [(torch.full((3, 4, 4), 7, dtype=torch.uint8), y) for y in LABELS]
    network = nn.Sequential(nn.Conv2d(3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 5))
    frame = pd.DataFrame({"x": torch.arange(200.0).numpy(), "y": names})
    return {
        "pictures": (ImageData(pictures, None, ["no", "yes"], size=4), partial(vision_learner, model_fn=network)),
        "texts": (TextData.from_texts(["a", *map(str, range(199))], names, None, vocab_size=300), text_learner),
        "tables": (TabularData.from_df(frame, "y", [], ["x"], None), tabular_learner),
    }


def test_the_three_kinds_of_data_take_the_same_two_words(capsys):
    for name, (data, make) in kinds().items():
        dls = data.dataloaders(device="cpu")
        assert dls.class_counts == {"no": 180, "yes": 20}, name
        torch.testing.assert_close(make(dls, class_weights="balanced").loss_func.weight, torch.tensor([5 / 9, 5]))
        torch.manual_seed(1)
        train = data.dataloaders(weights="balanced", device="cpu").train
        batches = [batch for _ in range(5) for batch in train]
        found = torch.cat([batch["labels"] if isinstance(batch, dict) else batch[-1] for batch in batches])
        assert len(found) == 1000, name
        assert found.double().mean().item() == pytest.approx(0.5, abs=0.05), name


def test_a_dataset_of_ones_own_is_told_the_attribute_that_lists_its_classes():
    with raises(ValueError, "classes of the training samples are not known", "an attribute `targets` (or `labels`)"):
        DataLoaders.from_datasets(Listed(), weights="balanced")
    for name in ("targets", "labels"):
        dls = DataLoaders.from_datasets(Listed(**{name: LABELS}), weights="balanced")
        assert dls.class_counts == {0: 180, 1: 20}


# The loss


def loss_of(class_weights, given=None, default=None, **options):
    dls = DataLoaders.from_datasets(rows(), **options)
    return class_loss(dls, given, default or nn.CrossEntropyLoss(), class_weights)


def test_the_loss_gets_the_weights_of_scikit_learn():
    torch.testing.assert_close(loss_of("balanced").weight, torch.tensor([200 / (2 * 180), 200 / (2 * 20)]))
    assert loss_of({"yes": 3, "no": 1}, classes=["no", "yes"]).weight.tolist() == [1, 3]
    assert loss_of([1, 2]).weight.tolist() == [1, 2]
    assert loss_of(torch.tensor([1, 2])).weight.tolist() == [1, 2]


def test_class_weights_that_do_not_fit_the_loss_or_the_loaders_are_refused():
    for given, default in ((nn.CrossEntropyLoss(), None), (None, nn.MSELoss()), (None, nn.BCEWithLogitsLoss())):
        name = type(given or default).__name__
        with raises(ValueError, f"got class_weights= and the loss {name}", "give another loss its weights itself"):
            loss_of("balanced", given, default)
    with raises(ValueError, "loaders that draw by weights= already"):
        loss_of("balanced", weights="balanced")
    with raises(ValueError, "one number for each of the 2 classes"):
        loss_of([1, 2, 3])
    with raises(ValueError, "got class_weights= for the classes 'no'"):
        loss_of({"no": 1})
    with raises(ValueError, "got class_weights='balanced', and the classes of the training samples are not known"):
        class_loss(DataLoaders([1]), None, nn.CrossEntropyLoss(), "balanced")
    data, make = kinds()["pictures"]
    with raises(ValueError, "got class_weights= for 2 classes and n_out=5; leave n_out out"):
        make(data.dataloaders(device="cpu"), n_out=5, class_weights="balanced")
    assert class_loss(DataLoaders([1]), None, nn.CrossEntropyLoss(), [1, 2, 3]).weight.tolist() == [1, 2, 3]


def test_one_line_tells_of_a_rare_class_that_nothing_weighs(capsys):
    few = TensorDataset(X, torch.tensor([0] * 185 + [1] * 15))

    def said(ds=few, default=None, given=None, class_weights=None, **options):
        class_loss(DataLoaders.from_datasets(ds, **options), given, default or nn.CrossEntropyLoss(), class_weights)
        return capsys.readouterr().out

    line = said(classes=["no", "yes"])
    assert line.startswith("class 'yes': 7.5 % of 200 samples. weights='balanced'")
    assert line.count("\n") == 1
    many = TensorDataset(X, torch.tensor([0] * 191 + [1] * 6 + [2] * 3))
    assert said(many).startswith("class 2: 1.5 % of 200 samples, and 1 more below 10 %. ")
    assert said(rows()) == ""  # a tenth
    assert said(TensorDataset(X, torch.arange(200) % 20)) == ""  # twenty classes, a twentieth each
    assert said(class_weights="balanced") == said(weights="balanced") == said(given=nn.CrossEntropyLoss()) == ""
    assert said(default=nn.MSELoss()) == said(Listed()) == ""
