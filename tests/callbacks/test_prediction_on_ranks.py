"""Predictions for inputs without targets, and for one input, on several ranks."""

import pytest
import torch
from helpers import make_data, make_learner, make_model
from torch import nn
from torch.utils.data import DataLoader

from learnerkit import Callback, DataLoaders, Learner, distributed
from learnerkit.values import map_batch

N = 7


class Named(nn.Module):
    """Takes its inputs by name or by place."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1))

    def forward(self, x, z=None):
        return self.body(x if z is None else x + z)


def items(kind):
    """Inputs without targets, as loaders of users give them."""
    x = make_data(N).tensors[0]
    return {
        "tensors": list(x), "tuples": [(t,) for t in x], "mappings": [{"x": t} for t in x],
        "two inputs": [(t, -2 * t) for t in x],
    }[kind]  # fmt: skip


@pytest.mark.ranks(2, soak=[3])
def test_every_input_is_predicted_once_in_order():
    predict_without_targets()


def test_every_input_is_predicted_once_in_order_on_one_process():
    predict_without_targets()


class OfNested(nn.Module):
    """Takes a nested tensor."""

    def forward(self, x):
        return torch.stack([row.sum(0) for row in x.unbind()])


def collate_nested(samples):
    rows, targets = zip(*samples, strict=True)
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged), torch.stack(targets).to_sparse()


@pytest.mark.ranks(2, soak=[3])
def test_sparse_and_nested_tensors_are_gathered_as_on_one_process():
    samples = [(torch.full((1 + i % 3, 2), float(i)), torch.tensor([0.0, i])) for i in range(N)]
    loader = DataLoader(samples, 2, collate_fn=collate_nested)
    learn = make_learner(DataLoaders(loader, loader, device="cpu"), OfNested())
    with learn.distrib_ctx():
        inputs, preds, targets = learn.get_preds(with_input=True)
    for found, (x, y), pred, target in zip(inputs, samples, preds, targets.to_dense(), strict=True):
        assert torch.equal(found, x)
        assert torch.equal(pred, x.sum(0))
        assert torch.equal(target, y)


def predict_without_targets():
    """Compare with the model itself, for each kind of inputs and each kind of loader."""
    for kind in ("tensors", "tuples", "mappings", "two inputs"):
        found = items(kind)
        dls = DataLoaders(DataLoader(make_data(8), 2), device="cpu", n_inp=2 if kind == "two inputs" else None)
        learn = Learner(dls, Named(), nn.MSELoss())
        with learn.distrib_ctx():
            for dl in (DataLoader(found, 2), dls.test_dl(found)):
                preds, targets = learn.get_preds(dl=dl)
                whole = torch.utils.data.default_collate(found)
                x, *z = whole.values() if kind == "mappings" else whole if isinstance(whole, list) else [whole]
                with torch.no_grad():
                    torch.testing.assert_close(preds, learn.model(x, *z))
                assert targets is None


class Asks(Callback):
    """Predicts on one rank alone, between the collectives of a step."""

    order = 20

    def __init__(self):
        super().__init__()
        self.found = []

    def ask(self):
        if self.task == "fit" and distributed.rank() == self.train_iter % distributed.world_size():
            self.found.append(self.learn.predict(make_data().tensors[0][0]).pred)

    def after_step(self):
        self.ask()

    def before_validate(self):
        if self.task == "fit" and distributed.is_main():
            self.found.append(self.learn.predict(make_data().tensors[0][0]).pred)

    def after_pred(self):
        self.ask()


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:sync_bn")
def test_one_rank_may_predict_alone_in_a_fit_and_outside():
    models = []
    for cb in (None, Asks()):
        torch.manual_seed(1)
        model = nn.Sequential(make_model(dropout=0.5), nn.BatchNorm1d(1))
        learn = make_learner(DataLoaders.from_datasets(make_data(12), make_data(5), bs=3, device="cpu"), model)
        with learn.distrib_ctx():
            learn.fit(2, cbs=cb)
            if distributed.is_main():
                learn.predict(make_data().tensors[0][0])
            learn.validate()
        models.append(learn.model.state_dict())
        assert cb is None or cb.found
    assert map_batch(lambda t: t.tolist(), models[0]) == map_batch(lambda t: t.tolist(), models[1])
