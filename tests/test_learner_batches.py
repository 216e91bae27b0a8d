"""Batches of all shapes: nested, mappings, single tensors, any iterable as a loader."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    Unsized,
    by_hand,
    fused_sgd,
    make_classes,
    make_data,
    make_dls,
    make_learner,
    make_model,
    same_weights,
    weights,
)
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, IterableDataset

from learnerkit import Callback, DataLoaders, Learner, accuracy, mae


def test_nested_batches_reach_the_model_whole():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, parts):
            return self.linear(parts["a"][0] + parts["a"][1] + parts["b"])

    class Nesting(Dataset):
        def __init__(self):
            self.x, self.y = torch.randn(8, 3, 4), torch.randn(8, 1)

        def __len__(self):
            return 8

        def __getitem__(self, i):
            return {"a": (self.x[i, 0], self.x[i, 1]), "b": self.x[i, 2]}, self.y[i]

    sizes, data = [], Nesting()
    dls = DataLoaders(DataLoader(data, 3), DataLoader(data, 3), device="cpu")
    torch.manual_seed(1)
    learn = make_learner(dls, Nested(), metrics=mae, cbs=Callback(after_batch=lambda cb: sizes.append(cb.batch_size)))
    learn.fit(1)
    torch.manual_seed(1)
    model = Nested()
    by_hand(model, DataLoader(data, 3), 1, fused_sgd(model.parameters(), lr=0.1))
    assert same_weights(learn.model, model)
    assert sizes == [3, 3, 2] * 2
    preds, targets = learn.get_preds()
    assert preds.shape == (8, 1)
    assert torch.equal(targets, data.y)


def mapping_batches(n=8, bs=4):
    x, y = make_classes(n).tensors
    return [{"inputs": a, "labels": b} for a, b in zip(x.split(bs), y.split(bs), strict=True)]


class Transformer(nn.Module):
    "A model in the manner of transformers: keywords in, an object with logits and a loss out."

    def __init__(self, as_dict=False):
        super().__init__()
        self.as_dict = as_dict
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs, labels=None):
        logits = self.linear(inputs)
        found = {"logits": logits}
        if labels is not None:
            found["loss"] = F.cross_entropy(logits, labels) * 2
        return found if self.as_dict else SimpleNamespace(**found)


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("own_loss", [False, True])
def test_mapping_batches_go_to_the_model_as_keywords(as_dict, own_loss):
    seen = []

    def look(cb):
        seen.append((cb.batch_size, isinstance(cb.output, dict), tuple(cb.pred.shape), len(cb.yb), "labels" in cb.x))

    batches = mapping_batches()
    learn = Learner(
        DataLoaders(batches, batches, device="cpu"),
        Transformer(as_dict),
        None if own_loss else F.cross_entropy,
        opt_func=SGD,
        lr=0.1,
        metrics=accuracy,
        cbs=Callback(after_loss=look),
    )
    learn.fit(1)
    model = Transformer()
    opt = fused_sgd(model.parameters(), lr=0.1)
    for batch in batches:
        loss = F.cross_entropy(model.linear(batch["inputs"]), batch["labels"]) * (2 if own_loss else 1)
        loss.backward()
        opt.step()
        opt.zero_grad()
    assert same_weights(learn.model, model)
    assert seen == [(4, as_dict, (4, 3), 1, own_loss)] * 4
    preds, targets = learn.get_preds()
    assert torch.equal(targets, make_classes().tensors[1])
    torch.testing.assert_close(preds, model.linear(make_classes().tensors[0]).detach())
    assert learn.validate()[1] == pytest.approx(accuracy(preds, targets).item())


def test_target_keys_say_which_entries_are_targets():
    batches = [{"x": b["inputs"], "cls": b["labels"]} for b in mapping_batches()]

    class Keyed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            return self.linear(x)

    for keys in ("cls", ("cls",)):
        dls = DataLoaders(batches, batches, target_keys=keys, device="cpu")
        learn = Learner(dls, Keyed(), nn.CrossEntropyLoss())
        learn.fit(1)
        assert torch.equal(learn.get_preds()[1], make_classes().tensors[1])


class Named(torch.utils.data.Dataset):
    """Samples with a name and an id, which no argument of the model takes."""

    def __init__(self, n):
        self.data = make_classes(n)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return {"inputs": self.data[i][0], "name": f"{i}.png", "id": i, "labels": self.data[i][1]}


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs):
        return self.linear(inputs)


@pytest.mark.parametrize("own_loss", [False, True])
def test_entries_of_a_mapping_can_be_left_out(own_loss):
    names = []
    dls = DataLoaders.from_datasets(
        Named(10), Named(6), bs=4, shuffle=False, device="cpu", ignore_keys=("name", "id"),
    )  # fmt: skip
    model = Transformer() if own_loss else Bare()
    learn = Learner(dls, model, None if own_loss else nn.CrossEntropyLoss())
    learn.fit(1, cbs=Callback(after_batch=lambda cb: names.append((cb.batch["name"], cb.batch_size))))
    assert names[2] == (["8.png", "9.png"], 2)
    preds, targets = learn.get_preds()
    assert torch.equal(targets, make_classes(6).tensors[1])
    item = Named(6)[3]
    torch.testing.assert_close(learn.predict(item).pred, preds[3])
    torch.testing.assert_close(learn.get_preds(dl=dls.test_dl([item, item]))[0][1], preds[3])


def test_one_entry_is_left_out_by_its_name_as_text():
    dls = DataLoaders(mapping_batches(), ignore_keys="labels", device="cpu")
    assert dls.ignore_keys == ("labels",)
    assert dls.split({"inputs": 1, "labels": 2}, []) == (({"inputs": 1},), (2,))  # it is still the target


def test_single_tensors_get_their_target_from_a_callback():
    class SelfSupervised(Callback):
        def before_batch(self):
            self.learn.yb = (self.x[:, :1],)

    x = make_data().tensors[0]
    dls = DataLoaders(DataLoader(x, 4), DataLoader(x, 4), device="cpu")
    learn = make_learner(dls, cbs=SelfSupervised(), metrics=mae)
    learn.fit(1)
    model = make_model()
    by_hand(model, [(b, b[:, :1]) for b in x.split(4)], 1, fused_sgd(model.parameters(), lr=0.1))
    assert same_weights(learn.model, model)


def test_single_tensors_can_be_predicted():
    x = make_data().tensors[0]
    learn = make_learner(DataLoaders(DataLoader(x, 4), DataLoader(x, 3), device="cpu"))
    preds, targets = learn.get_preds()
    torch.testing.assert_close(preds, learn.model(x).detach())
    assert targets is None


def test_a_callback_may_change_inputs_predictions_and_loss():
    class Change(Callback):
        run_valid = False

        def before_batch(self):
            self.learn.xb = (self.x + 1,)

        def after_pred(self):
            self.learn.pred = self.pred * 2

        def after_loss(self):
            self.learn.loss_grad = self.learn.loss_grad * 3
            self.learn.loss = self.learn.loss + 7

    learn, model = make_learner(make_dls(valid=None), cbs=Change()), make_model()
    learn.fit(1)
    losses = by_hand(
        model,
        [(x + 1, y) for x, y in DataLoader(make_data(), 4)],
        1,
        fused_sgd(model.parameters(), lr=0.1),
        lambda pred, y: F.mse_loss(pred * 2, y) * 3,
    )
    assert same_weights(learn.model, model)
    assert learn.recorder.values[0][0] == pytest.approx(sum(losses) / 6 + 7)


@pytest.mark.parametrize("differentiated", [False, True])
def test_a_penalty_on_the_recorded_loss_alone_is_told(differentiated):
    class Penalty(Callback):
        def after_loss(self):
            penalty = sum(p.square().sum() for p in self.model.parameters())
            self.learn.loss = self.loss + penalty
            if differentiated:
                self.learn.loss_grad += penalty  # in place

    learn = make_learner(make_dls(), cbs=Penalty)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        learn.fit(2)
    assert ["and not learn.loss_grad, which is differentiated" in str(w.message) for w in said] == [True] * (
        not differentiated
    )


def test_loaders_may_be_any_iterables():
    batches = [tuple(b) for b in DataLoader(make_data(), 4)]

    class Streaming(IterableDataset):
        def __iter__(self):
            return iter(make_data())

    expected = make_model()
    by_hand(expected, batches, 2, fused_sgd(expected.parameters(), lr=0.1))
    for loader in (batches, tuple(batches), Unsized(batches), DataLoader(Streaming(), 4)):
        learn = make_learner(DataLoaders(loader, device="cpu"))
        seen = []
        learn.fit(2, cbs=Callback(after_batch=lambda cb, seen=seen: seen.append((cb.n_iter, cb.pct_train)), order=1))
        assert same_weights(learn.model, expected)
        sized = hasattr(loader, "__len__") and not isinstance(loader, DataLoader)
        assert [pct for _, pct in seen] == ([0.25, 0.5, 0.75, 1.0] if sized else [0.0, 0.0, 0.5, 0.5])
        assert {n for n, _ in seen} == {2 if sized else None}


def test_start_epoch_runs_the_later_epochs_alone():
    whole = make_learner(DataLoaders.from_datasets(make_data(12), make_data(4, seed=1), bs=4, device="cpu"))
    torch.manual_seed(3)
    whole.fit(2)
    orders = {}

    def note(cb):
        orders.setdefault(cb.n_epoch, []).append((cb.epoch, cb.pct_train, cb.y.clone()))

    learn = make_learner(
        DataLoaders.from_datasets(make_data(12), make_data(4, seed=1), bs=4, device="cpu"),
        cbs=Callback(before_batch=lambda cb: cb.training and note(cb)),
    )
    torch.manual_seed(3)
    learn.fit(4)
    torch.manual_seed(3)
    full = orders.pop(4)
    learn.fit(4, start_epoch=2)
    part = orders.pop(4)
    assert [row[:2] for row in part] == [row[:2] for row in full[6:]]
    assert all(torch.equal(a[2], b[2]) for a, b in zip(part, full[6:], strict=True))
    assert [row for row in learn.recorder.values if len(row) == 2] == learn.recorder.values
    assert len(learn.recorder.values) == 2
    assert learn.recorder.log[0] == 3


def test_start_epoch_beyond_the_end_trains_nothing():
    learn = make_learner()
    before = weights(learn.model)
    learn.fit(2, start_epoch=2)
    assert same_weights(before, weights(learn.model))
    assert learn.recorder.values == []


class ByPosition(DataLoaders):
    "Takes the input out of a dict, under whose name the model does not know it."

    def split(self, batch, arguments=None):
        return (batch["past"],), (batch["future"],)


class WithMask(DataLoaders):
    "Gives the model a mapping, and a tensor beside it."

    def split(self, batch, arguments=None):
        return ({"x": batch["x"]}, batch["mask"]), (batch["y"],)


class Masked(nn.Linear):
    def forward(self, inputs, mask):
        return super().forward(inputs["x"] * mask)


def test_a_split_of_a_mapping_into_several_inputs_gives_the_model_all_of_them():
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    learn = Learner(WithMask([{"x": x, "mask": x > 0, "y": y}]), Masked(4, 1), nn.MSELoss())
    by_hand = nn.MSELoss()(learn.model({"x": x}, x > 0), y).item()
    learn.fit(1)
    assert learn.recorder.values[0][0] == pytest.approx(by_hand)


def test_a_split_may_take_the_input_out_of_a_mapping():
    batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(3)]
    learners = [
        Learner(dls, nn.Linear(4, 1), nn.MSELoss())
        for dls in (DataLoaders(batches), ByPosition([{"past": x, "future": y} for x, y in batches]))
    ]
    learners[1].model.load_state_dict(learners[0].model.state_dict())
    for learn in learners:
        learn.fit(2)
    assert torch.equal(learners[0].model.weight, learners[1].model.weight)
    learners[1].model.forward = lambda: None
    with pytest.raises(TypeError, match="takes 0 positional arguments"):
        learners[1].fit(1)
