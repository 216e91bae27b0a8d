"""Tables on several ranks: the weights of one process."""

import pytest
import torch
from helpers import results_of
from torch.utils.data import TensorDataset

from learnerkit import accuracy, mae, set_seed
from learnerkit.datasets import penguins
from learnerkit.tabular.data import TabularData
from learnerkit.tabular.model import tabular_learner

pytest.importorskip("pandas")


def train(name):
    """The record, weights and predictions of a learner; 275 rows in batches of 18 leave an uneven one."""
    set_seed(1)
    frame = penguins().dropna(subset=[name])
    data = TabularData.from_df(frame, name)
    for part in ("train_ds", "valid_ds"):
        tensors = getattr(data, part).tensors
        setattr(data, part, TensorDataset(*(t.double() if t.is_floating_point() else t for t in tensors)))
    dls = data.dataloaders(bs=18, device="cpu")
    learn = tabular_learner(dls, (10,), metrics=accuracy if data.classes else mae)
    learn.model.double()
    with learn.distrib_ctx(split_batches=True):
        learn.fit_one_cycle(2, 1e-2)
    weights = {name: t.tolist() for name, t in learn.model.state_dict().items()}
    return learn.recorder.values, weights, learn.get_preds()[0].tolist()


results = results_of(train)


@pytest.mark.slow
@pytest.mark.parametrize("y", ["species", pytest.param("body_mass_g", marks=pytest.mark.slow)])
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_ranks_learn_what_one_process_learns(results, n, y):
    (expected,) = results[1, y]
    for values, weights, preds in results[n, y]:
        torch.testing.assert_close(values, expected[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(preds, expected[2], rtol=1e-9, atol=1e-9)
        assert weights.keys() == expected[1].keys()
        for name, weight in weights.items():
            torch.testing.assert_close(torch.tensor(weight), torch.tensor(expected[1][name]), rtol=1e-9, atol=1e-9)
