"""What a classifier confuses, top losses, and results."""

import pytest
import torch
from helpers import make_classes, make_data, make_dls, make_learner, padded
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, TensorDataset, default_collate

from learnerkit import ClassificationInterpretation as Interpretation
from learnerkit import DataLoaders, Learner
from learnerkit.data.show import Table

NAMES = ["cat", "dog", "eel"]


def learner(n=40, loss=None, **kwargs):
    """Scores are the inputs, so that a sample's class is known."""
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    y = torch.randint(3, (n,), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, y)
    dls = DataLoaders(DataLoader(data, 8, shuffle=True), DataLoader(data, 8, shuffle=True), device="cpu", **kwargs)
    model = nn.Linear(3, 3)
    model.load_state_dict({"weight": torch.eye(3), "bias": torch.zeros(3)})
    return Learner(dls, model, loss or nn.CrossEntropyLoss()), x, y


def test_the_confusion_matrix_counts(plt):
    learn, x, y = learner(classes=NAMES)
    found = Interpretation.from_learner(learn)
    expected = torch.zeros(3, 3, dtype=torch.int64)
    for actual, scores in zip(y, x, strict=True):
        expected[actual, scores.argmax()] += 1
    assert torch.equal(found.confusion_matrix(), expected)
    triples = [(NAMES[i], NAMES[j], int(expected[i, j])) for i in range(3) for j in range(3) if i != j]
    assert sorted(found.most_confused()) == sorted(t for t in triples if t[2])
    assert [n for *_, n in found.most_confused(4)] == sorted((n for *_, n in triples if n >= 4), reverse=True)
    ax = found.plot_confusion_matrix()
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("predicted", "actual")
    assert [text.get_text() for text in ax.get_xticklabels()] == NAMES
    assert [int(text.get_text()) for text in ax.texts] == expected[expected > 0].tolist()
    shares = [float(text.get_text()) for text in found.plot_confusion_matrix(normalize=True).texts]
    assert shares == pytest.approx((expected / expected.sum(1, keepdim=True))[expected > 0].tolist(), abs=0.0051)


def test_what_the_loss_ignores_does_not_count():
    plain, _, y = learner(classes=NAMES)
    counts = Interpretation.from_learner(plain).confusion_matrix()
    for ignored in (2, 255):
        learn, _, _ = learner(classes=NAMES, loss=nn.CrossEntropyLoss(ignore_index=ignored))
        dataset = learn.dls.valid.dataset
        dataset.tensors = (dataset.tensors[0], y.masked_fill(y == 2, ignored))
        found = Interpretation.from_learner(learn)
        assert found.classes == NAMES
        assert torch.equal(found.confusion_matrix(), counts * torch.tensor([[1], [1], [0]]))
        losses, places = found.top_losses(largest=False)
        assert torch.equal(places.sort().values, (y != 2).nonzero().flatten())
        assert torch.equal(losses, found.losses[places])
    dataset.tensors = (dataset.tensors[0], torch.full_like(y, 255))
    nothing = Interpretation.from_learner(learn).classification_report()
    assert {value for row in nothing.rows for value in row[1:]} == {"0.00", 0}  # as the docstring says of nothing


def test_what_the_models_own_loss_ignores_does_not_count():
    class Own(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.loss = nn.CrossEntropyLoss(ignore_index=2)

        def forward(self, x, labels=None):
            scores = super().forward(x)
            return scores if labels is None else (self.loss(scores, labels), scores)

    _, x, y = learner()
    data = [{"x": each, "labels": label} for each, label in zip(x, y, strict=True)]
    own = Learner(DataLoaders(DataLoader(data, 8), DataLoader(data, 8), device="cpu"), Own())
    counts = Interpretation.from_learner(own).confusion_matrix()
    assert counts.sum(1).tolist() == [int((y == 0).sum()), int((y == 1).sum()), 0]


def test_the_report_is_precision_recall_and_f1(capsys):
    learn, x, y = learner(classes=NAMES)
    found = Interpretation.from_learner(learn)
    said = x.argmax(1)
    hits, made, there = (
        [int(((a == k) & (b == k)).sum()) for k in range(3)] for a, b in ((y, said), (said, said), (y, y))
    )
    rows = found.classification_report().rows
    for k, (name, precision, recall, f1, samples) in enumerate(rows[:3]):
        p, r = hits[k] / made[k], hits[k] / there[k]
        assert (name, samples) == (NAMES[k], there[k])
        assert [precision, recall, f1] == [f"{v:.2f}" for v in (p, r, 2 * p * r / (p + r))]
    assert rows[-1][2] == f"{sum(hits) / 40:.2f}"  # the mean recall of the samples is the accuracy
    found.print_classification_report()
    assert "mean of the classes" in capsys.readouterr().out


def test_the_mean_of_the_classes_leaves_out_those_that_do_not_occur():
    learn, x, y = learner(classes=NAMES)
    learn.dls.valid.dataset.tensors = (x[:, :2].clone().repeat(1, 2)[:, :3], (y > 0).long())
    with torch.no_grad():
        learn.model.bias[2] = -100.0  # the last class is never predicted, and no sample has it
    rows = Interpretation.from_learner(learn).classification_report().rows
    assert rows[2][-1] == 0
    recalls = [float(row[2]) for row in rows[:2]]
    assert float(rows[3][2]) == pytest.approx(sum(recalls) / 2, abs=0.011)


def test_top_losses_are_shown_with_their_inputs(plt):
    learn, x, y = learner(classes=NAMES)
    found = Interpretation.from_learner(learn)
    losses, places = found.top_losses(4)
    expected = F.cross_entropy(x, y, reduction="none").topk(4)
    assert torch.allclose(losses, expected.values)
    assert torch.equal(places, expected.indices)
    table = found.plot_top_losses(2)
    assert table.names == ["0", "1", "2", "target", "prediction", "loss"]
    assert [row[:3] for row in table.rows] == x[places[:2]].tolist()
    assert table.rows[0][3:] == [
        NAMES[y[places[0]]], f"wrong: {NAMES[x[places[0]].argmax()]}", f"loss {losses[0]:.3g}",
    ]  # fmt: skip
    other = Interpretation.from_learner(learn, dl=DataLoader(TensorDataset(x, y), 8, shuffle=True))
    with pytest.raises(ValueError, match="inputs cannot be found"):
        other.plot_top_losses()


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_logit_tells_two_classes(shape):
    x = torch.randn(20, 1)
    y = (torch.arange(20) % 2).float().view(-1, *shape)
    dls = DataLoaders(DataLoader(TensorDataset(x, y), 8), DataLoader(TensorDataset(x, y), 8), device="cpu")
    model = nn.Identity() if shape else nn.Flatten(0)
    model.register_parameter("w", nn.Parameter(torch.zeros(1)))
    learn = Learner(dls, model, nn.BCEWithLogitsLoss())
    found = Interpretation.from_learner(learn)
    said = (x[:, 0] > 0).long()
    assert found.confusion_matrix()[1, 0] == ((y.flatten() == 1) & (said == 0)).sum()
    assert found.classes == ["0", "1"]
    rows = learn.show_results(20).rows
    assert [row[-1].startswith("wrong: ") for row in rows] == (said != y.flatten().long()).tolist()


def test_a_loss_with_a_decode_of_its_own_makes_classes_of_a_tuple():
    class OfTheSecond(nn.CrossEntropyLoss):
        def decode(self, pred):
            return pred[1].argmax(1)

        def forward(self, pred, target):
            return super().forward(pred[1], target)

    class Two(nn.Linear):
        def forward(self, x):
            return x.sum(1), super().forward(x)

    plain, _, _ = learner()
    learn, x, _ = learner(loss=OfTheSecond())
    two = Two(3, 3)
    two.load_state_dict(learn.model.state_dict())
    learn.model = two
    found, expected = Interpretation.from_learner(learn), Interpretation.from_learner(plain)
    assert found.classes == ["0", "1", "2"]
    assert torch.equal(found.confusion_matrix(), expected.confusion_matrix())
    assert found.plot_top_losses(2).rows[0][:3] == x[expected.top_losses(1)[1][0]].tolist()


@pytest.mark.parametrize("n", [0, "3", True])
def test_results_are_shown_of_a_number_of_samples(n):
    with pytest.raises(ValueError, match=f"got n={n!r}; it is a number of samples, 1 or more"):
        learner()[0].show_results(n)


def test_what_is_no_classification_is_refused():
    for learn in (
        make_learner(),
        make_learner(make_dls(data=lambda n, seed=0: make_data(n, n_out=2)), nn.Linear(4, 2), nn.BCEWithLogitsLoss()),
    ):
        with pytest.raises(ValueError, match=r"got predictions: float32 tensor.*one class for each sample"):
            Interpretation.from_learner(learn)

    def own(pred, target):
        return F.cross_entropy(pred, target)

    learn, _, _ = learner(loss=own)
    found = Interpretation.from_learner(learn)  # by the shapes
    assert found.confusion_matrix().sum() == 40
    with pytest.raises(ValueError, match="no loss for each sample"):
        found.top_losses()


@pytest.mark.ranks(2, soak=[3])
def test_ranks_interpret_the_whole():
    learn, x, y = learner(classes=NAMES)
    with learn.distrib_ctx():
        found = Interpretation.from_learner(learn)
        shown = learn.show_results(3)
    counts = torch.zeros(3, 3, dtype=torch.int64)
    counts.index_put_((y, x.argmax(1)), torch.tensor(1), accumulate=True)
    assert torch.equal(found.confusion_matrix(), counts)
    from learnerkit import ActivationStats, distributed

    with learn.distrib_ctx():
        learn.fit(1, cbs=ActivationStats(), lr=0.0)
        if distributed.is_main():
            learn.summary()  # alone
    assert (shown is None) == (found.plot_top_losses(1) is None) == (distributed.rank() > 0)


def test_results_of_whole_batches_are_of_the_first_samples():
    learn, x, y = learner(classes=NAMES)
    batches = [(x[:8], y[:8]), (x[8:], y[8:])]
    made_whole = DataLoader(TensorDataset(x, y), sampler=BatchSampler(range(len(x)), 8, False), batch_size=None)
    for loader in (batches, made_whole):
        learn.dls = DataLoaders(loader, loader, device="cpu", classes=NAMES)
        for n, shown in ((3, 3), (8, 8), (9, 8)):
            said = [NAMES[i] for i in x[:shown].argmax(1)]
            rows = learn.show_results(n).rows
            assert [row[-1].removeprefix("wrong: ") for row in rows] == said


@pytest.mark.filterwarnings("ignore:the loader drew")
def test_results_are_of_the_samples_that_a_collate_function_makes():
    learn, x, y = learner(classes=NAMES)
    data = [None if i % 7 == 0 else (x[i], y[i]) for i in range(len(x))]

    def without_broken(items):
        return default_collate([item for item in items if item is not None])

    def both_ways(items):
        x, y = default_collate([item for item in items if item is not None])
        return torch.cat([x, -x]), torch.cat([y, y])

    for collate in (without_broken, both_ways):
        loader = DataLoader(data, 8, collate_fn=collate)
        learn.dls = DataLoaders(loader, loader, device="cpu", classes=NAMES)
        rows = learn.show_results(4).rows
        assert [row[:3] for row in rows] == x[1:5].tolist()
        assert [row[-1].removeprefix("wrong: ") for row in rows] == [NAMES[i] for i in x[1:5].argmax(1)]


def test_results_come_from_all_over_the_dataset():
    learn, x, y = learner(classes=NAMES)
    table = learn.show_results(n=4)
    assert isinstance(table, Table)
    assert [row[:3] for row in table.rows] == x[::10].tolist()
    for row, actual, scores in zip(table.rows, y[::10], x[::10], strict=True):
        said = NAMES[scores.argmax()]
        assert row[3:] == [NAMES[actual], said if said == NAMES[actual] else f"wrong: {said}"]
    data = [{"x": row, "label": label} for row, label in zip(x, y.tolist(), strict=True)]

    def collate(batch):
        return {"x": torch.stack([s["x"] for s in batch]), "labels": torch.tensor([s["label"] for s in batch])}

    class Scores(nn.Module):
        def forward(self, x):
            return x

    class Tokens(nn.Embedding):
        def __init__(self):
            super().__init__(12, 3)

        def forward(self, x):
            return super().forward(x).transpose(1, 2)

    dls = DataLoaders.from_datasets(data, data, bs=8, collate_fn=collate, device="cpu", classes=NAMES)
    made = make_learner(dls, Scores(), nn.CrossEntropyLoss()).show_results(n=4)
    assert [row[-2:] for row in made.rows] == [row[-2:] for row in table.rows]
    tokens = TensorDataset(torch.arange(12).view(4, 3), torch.tensor([[0, 1, 2], [2, 2, 0], [1, 1, 1], [0, 0, 0]]))
    dls = DataLoaders.from_datasets(tokens, tokens, bs=4, device="cpu", classes=NAMES)
    shown = make_learner(dls, Tokens(), nn.CrossEntropyLoss()).show_results(n=2)  # as many tokens as classes
    assert [row[-2] for row in shown.rows] == ["0 1 2", "1 1 1"]
    rows = [(torch.arange(n), torch.arange(n) % 3) for n in (2, 4)]

    dls = DataLoaders.from_datasets(rows, rows, bs=4, collate_fn=padded, device="cpu")
    shown = make_learner(dls, Tokens(), nn.CrossEntropyLoss()).show_results(n=2)
    assert [len(row[-1].removeprefix("wrong: ").split()) for row in shown.rows] == [2, 4]
    regression = make_learner().show_results(n=2)
    assert regression.names == ["0", "1", "2", "3", "target", "prediction"]
    assert not any("wrong" in row[-1] for row in regression.rows)
    assert (
        len(make_learner(make_dls(data=make_classes), nn.Linear(4, 3), nn.CrossEntropyLoss()).show_results(50).rows)
        == 4
    )
