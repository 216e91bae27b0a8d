"""Pictures from files on several ranks: what one process learns, each picture read once, with targets of each kind."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import mostly_slow, results_of
from PIL import Image
from torch import nn

from learnerkit import ImageData, Learner, accuracy, distributed, mae, set_seed
from learnerkit.datasets import drawn_shapes
from learnerkit.vision.classifier import Scaled


def write_pictures():
    generator = np.random.default_rng(0)
    for i in range(43):
        path = Path(f"pictures/{'even' if i % 2 == 0 else 'odd'}/{i}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (6, 6), dtype=np.uint8)).save(path)


class InDouble(nn.Module):
    def forward(self, x):
        return x.double().flatten(1)


def train(name):
    augmented = name == "augmented"
    if distributed.is_main():
        write_pictures()
    distributed.barrier()
    set_seed(1)
    data = ImageData.from_folder("pictures", 0.3, size=6, channels=1)
    dls = data.dataloaders(8, augment=augmented, num_workers=0 if augmented else 1, device="cpu")
    model = nn.Sequential(InDouble(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    learn = Learner(dls, model, nn.CrossEntropyLoss(), metrics=accuracy)
    with learn.distrib_ctx(split_batches=True), learn.no_logging():
        learn.fit(2, 0.01)
        preds, targets = learn.get_preds()
    assert targets.tolist() == [number for _, number in data.valid_ds.samples]
    return learn.recorder.values, [w.tolist() for w in learn.model.state_dict().values()], preds.tolist()


results = results_of(train)


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.soak)])
def test_ranks_learn_what_one_process_learns(results, n):
    (expected,) = results[1, "plain"]
    for found in results[n, "plain"]:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_ranks_augment_their_own_pictures_and_keep_the_same_weights(results):
    ranks = results[2, "augmented"]
    assert ranks[0] == ranks[1]
    assert ranks[0] != results[2, "plain"][0]


class Detector(nn.Module):
    "Finds one box in each picture, and makes its own loss, as torchvision's detectors do."

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3 * 16 * 16, 4)

    def forward(self, images, targets=None):
        found = self.layer(images.flatten(1))
        if not self.training:
            return found
        boxes = torch.stack([y["boxes"][0] for y in targets])
        return {"box": nn.functional.mse_loss(found, boxes / 16)}


COLUMNS = {"classes": "shapes", "numbers": "n", "points": ["cx", "cy"], "boxes": ["x0", "y0", "x1", "y1", "largest"]}


def train_targets(name):
    targets = name
    folder = drawn_shapes("shapes", n=43, size=16)
    set_seed(1)
    table = pd.read_csv(folder / "shapes.csv")
    table["largest"] = table["shapes"].str.split().str[0]
    reading = {"targets": targets, "delim": " ", "path": folder, "size": 16}
    if targets == "boxes":
        reading["classes"] = ["circle", "square"]
    data = ImageData.from_df(table, "image", COLUMNS[targets], 0.3, **reading)
    learn = make_learner(targets, data, data.dataloaders(8, num_workers=0, device="cpu"))
    with learn.distrib_ctx(split_batches=True), learn.no_logging():
        learn.fit(2, 0.001)
        preds, y = learn.get_preds()
    expected = [data.valid_ds[i][1] for i in range(len(data.valid_ds))]
    if targets == "boxes":
        y, expected = ([each["boxes"] for each in part] for part in (y, expected))
    assert [each.tolist() for each in y] == [each.tolist() for each in expected]
    return learn.recorder.values, [w.tolist() for w in learn.model.state_dict().values()], preds.tolist()


def make_learner(targets, data, dls):
    if targets == "boxes":
        return Learner(dls, Detector(), loss_weight="samples")
    layers = [nn.Linear(3 * 16 * 16, 1 if targets == "numbers" else 2)]
    if targets != "classes":
        layers.append(Scaled(*data.train_ds.scale()))
    loss = nn.BCEWithLogitsLoss() if targets == "classes" else nn.MSELoss()
    return Learner(dls, nn.Sequential(nn.Flatten(), *layers), loss, metrics=accuracy if targets == "classes" else mae)


found = results_of(train_targets)


@pytest.mark.parametrize("targets", mostly_slow(["classes", "numbers", "boxes", "points"], "boxes"))
def test_ranks_learn_several_classes_numbers_points_and_boxes_as_one_process_does(found, targets):
    (expected,) = found[1, targets]
    for each in found[2, targets]:
        torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-4)
