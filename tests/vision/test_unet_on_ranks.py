"""A U-Net on several ranks: the weights, the losses, Dice and IoU of one process."""

import pytest
import torch
from helpers import results_of
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import DataLoaders, Dice, IoU, set_seed, unet_learner


def train(name):
    """Without batch statistics, and with numbers of samples that no batch and no number of ranks divides."""
    set_seed(1)
    x = torch.rand(41, 3, 8, 8, dtype=torch.float64)
    y = (x[:, 0] > 0.5).long() + (x[:, 1] > 0.9)
    y[:, :2] = 255
    parts = [TensorDataset(x[part], y[part]) for part in (slice(0, 28), slice(28, 41))]
    dls = DataLoaders.from_datasets(*parts, bs=6, valid_bs=5, device="cpu")
    encoder = nn.Sequential(
        *[nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Sequential(nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.ReLU())],
        *[nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)],
    )
    loss = nn.CrossEntropyLoss(ignore_index=255)
    options = {"normalize": False, "norm": None, "pretrained": False, "loss_func": loss}
    learn = unet_learner(dls, encoder.double(), 3, metrics=[Dice, IoU(classes=[1, 2])], **options)
    with learn.distrib_ctx(split_batches=True, shard=name == "sharded"), learn.no_logging():
        learn.fit(2, 0.01)
        preds, _ = learn.get_preds()
    return learn.recorder.values, [w.tolist() for w in learn.model.state_dict().values()], preds.tolist()


results = results_of(train)


@pytest.mark.parametrize("name", ["whole", "sharded"])  # the nested nn.Sequential is a unit, and called as one
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_ranks_learn_what_one_process_learns(results, n, name):
    (expected,) = results[1, name]
    assert 0.2 < expected[0][-1][2] < 0.9
    for found in results[n, name]:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
