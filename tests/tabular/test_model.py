"""Networks for tables: their parts, targets in units of their own, learners, loaders."""

import numpy as np
import pytest
import torch
from helpers import raises
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import DataLoaders, Learner, accuracy, load_learner, mae, set_seed
from learnerkit.data.rows import RowsLoader
from learnerkit.tabular.data import TabularData
from learnerkit.tabular.model import TabularModel, embedding_size, tabular_learner

pd = pytest.importorskip("pandas")


def table(n=240):
    """Classes and a price that follow from a category and a number, with gaps."""
    rng = np.random.default_rng(0)
    town, area = rng.choice(["Oslo", "Bonn", "Rome"], n), rng.normal(90, 30, n)
    price = 1e6 + 4e3 * area + 1e5 * (town == "Oslo")
    frame = pd.DataFrame({"town": town, "area": area, "price": price, "dear": price > 1.4e6})
    frame.loc[rng.random(n) < 0.1, "town"] = None
    return frame


def loaders(y, bs=32, cats=("town",), conts=("area",)):
    return TabularData.from_df(table(), y, cats, conts).dataloaders(bs=bs, device="cpu")


def test_a_model_is_embeddings_beside_numbers():
    model = TabularModel([(4, 3), (10, 6)], 2, 5, (8, 7), dropout=0.1, bn=True)
    assert [(e.num_embeddings, e.embedding_dim) for e in model.embeddings] == [(4, 3), (10, 6)]
    assert [m.in_features for m in model.modules() if isinstance(m, nn.Linear)] == [3 + 6 + 2, 8, 7]
    assert sum(isinstance(m, nn.BatchNorm1d) for m in model.modules()) == 2
    assert not any(e.weight[0].any() for e in model.embeddings)  # nothing is known of what was not in training
    assert all(e.weight[1:].all() for e in model.embeddings)
    cats, conts = torch.tensor([[1, 2], [3, 0]]), torch.randn(2, 2)
    assert model(cats, conts).shape == (2, 5)
    for n_cats, n_cont in ((0, 2), (2, 0)):
        part = TabularModel([(4, 3)] * n_cats, n_cont, 1, (), y_range=(2, 3))
        assert sum(p.numel() for p in part.layers.parameters()) == 3 * n_cats + n_cont + 1
        pred = part(cats[:, :n_cats], 1e3 * conts[:, :n_cont])
        assert ((pred >= 2) & (pred <= 3)).all()
    assert repr(TabularModel([], 2, 5, 8)) == repr(TabularModel([], 2, 5, (8,)))
    assert [embedding_size(n) for n in (2, 3, 17, 10**5)] == [2, 3, 8, 600]


def test_units_of_the_target_do_not_matter():
    losses = []
    for scale in (1, 1e-4):
        frame = table().assign(price=lambda frame, scale=scale: frame["price"] * scale)
        set_seed(1)
        dls = TabularData.from_df(frame, "price", ["town"], ["area"]).dataloaders(bs=32, device="cpu")
        learn = tabular_learner(dls, (20,), metrics=mae)
        with learn.no_logging(), learn.no_bar():
            learn.fit(8, 3e-2)
        losses.append(learn.final_record[-1] / scale)
        preds, targets = learn.get_preds()
        assert preds.shape == targets.shape == (48, 1)
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0] < 6e4  # the mean alone is off by 1e5


def test_classes_are_learned_and_batches_are_read_whole():
    dls = loaders("dear")
    assert all(isinstance(dl, RowsLoader) and dl.reads_rows for dl in (dls.train, dls.valid))
    learn = tabular_learner(dls, (20,), metrics=accuracy)
    assert isinstance(learn.loss_func, nn.CrossEntropyLoss)
    with learn.no_logging(), learn.no_bar():
        learn.fit(8, 3e-2)
        assert learn.final_record[-1] > 0.9
        preds, targets = learn.get_preds(dl=dls.test_dl(table().drop(columns=["dear", "price"])))
    assert (preds.shape, targets) == ((240, 2), None)
    assert (preds.argmax(1).numpy() == table()["dear"]).mean() > 0.9
    for item in ({"town": "Paris", "area": None}, table().iloc[3]):
        label, number, pred = learn.predict(item)
        assert torch.equal(pred, learn.get_preds(dl=dls.test_dl(item))[0][0])
        assert label is dls.classes[number] is bool(pred.argmax())


def test_a_number_is_predicted_in_the_unit_of_the_frame():
    learn, row = tabular_learner(loaders("price"), (5,)), {"town": "Oslo", "area": 120.5}
    learn.export("price")
    for predicting in (learn, load_learner("price", learn.model, data=TabularData, device="cpu")):
        label, decoded, pred = predicting.predict(row)
        assert type(label) is float
        assert label == decoded.item() == pred.item()
        assert label == pytest.approx(table()["price"].mean(), rel=0.3)


def test_rows_are_shown_in_the_units_of_the_frame():
    for y, classes in (("dear", True), ("price", False)):
        dls = loaders(y)
        learn = tabular_learner(dls, (5,))
        for shown, names in ((dls.show_batch(ds_idx=1), ["target"]), (learn.show_results(), ["target", "prediction"])):
            assert shown.names == ["town", "area", *names]
            assert len(shown.rows) == 9
            for town, area, target, *_ in shown.rows:
                row = table().iloc[(table()["area"] - float(area)).abs().argmin()]
                assert town == (row["town"] if isinstance(row["town"], str) else "")
                assert target == str(row["dear"]) if classes else float(target) == pytest.approx(row["price"])
        assert any(row[0] == "" for row in loaders(y, bs=240).show_batch(240).rows)


@pytest.mark.slow
def test_what_was_learned_of_columns_goes_along_with_an_export():
    learn = tabular_learner(loaders("dear"), (5,))
    row = {"town": "Oslo", "area": 120.5}
    before = learn.predict(row)
    for file, model in (("a.pt2", None), ("a.safetensors", learn.model)):
        learn.export(file)
        again = load_learner(file, model, data=TabularData, device="cpu")
        label, number, pred = again.predict(row)
        assert (label, number) == before[:2]
        assert torch.allclose(pred, before.pred, atol=1e-4)
        assert len(again.get_preds(dl=again.dls.test_dl(table()))[0]) == 240
        with raises(ValueError, "loaded without data"):
            again.fit(1)
    with raises(ValueError, "got dls= and data="):
        load_learner("a.pt2", data=TabularData, dls=learn.dls)
    Learner(DataLoaders([]), nn.Linear(1, 1), nn.MSELoss()).export("b")
    with raises(ValueError, "models/b.safetensors has nothing of data=", "TabularData"):
        load_learner("b", nn.Linear(1, 1), data=TabularData)


@pytest.mark.slow
def test_a_table_of_numbers_alone_becomes_a_program():
    learn, row = tabular_learner(loaders("dear", cats=[]), (5,)), {"area": 120.5}
    again = load_learner(learn.export("a.pt2"), data=TabularData, device="cpu")
    assert torch.allclose(again.predict(row).pred, learn.predict(row).pred, atol=1e-4)


def test_tabular_learners_take_the_options_of_a_learner():
    dls = loaders("price")
    learn = tabular_learner(dls, y_range=(0, 2e6), embedding_sizes={"town": 7}, loss_func=nn.L1Loss(), lr=0.5)
    assert type(learn) is Learner
    assert learn.model.embeddings[0].num_embeddings == 1 + 3  # of what is not known, and of three towns
    assert (learn.model.embeddings[0].embedding_dim, learn.lr, type(learn.loss_func)) == (7, 0.5, nn.L1Loss)
    assert not any(isinstance(m, nn.BatchNorm1d) for m in learn.model.modules())
    with raises(ValueError, "embedding_sizes has area", "are town"):
        tabular_learner(dls, embedding_sizes={"area": 3})
    with raises(ValueError, "got y_range=(0, 1)", "classes of 'dear'"):
        tabular_learner(loaders("dear"), y_range=(0, 1))
    with raises(TypeError, "got a DataLoaders", "dataloaders()"):
        tabular_learner(DataLoaders.from_datasets(TensorDataset(torch.rand(4, 1), torch.rand(4, 1))))


@pytest.mark.parametrize("columns", [{"cats": []}, {"conts": []}])
def test_columns_of_one_sort_are_enough(columns):
    learn = tabular_learner(loaders("dear", **columns), (5,))
    with learn.no_logging(), learn.no_bar():
        learn.fit(1)
    assert learn.get_preds()[0].shape == (48, 2)
