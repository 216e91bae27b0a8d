"""A detector of torchvision: losses as a dict in training, detections in evaluation; two processes equal one."""

import math

import pytest
import torch
from helpers import raises
from rank_pool import Results
from torch import nn
from torch.utils.data import DataLoader, Dataset

from learnerkit import AccumMetric, DataLoaders, Learner, SaveModelCallback, set_seed

CLASSES, SIZE = 3, 32


class Squares(Dataset):
    """Bright and dark squares, each of a class, on grey; every third image has none."""

    def __init__(self, n, seed):
        generator = torch.Generator().manual_seed(seed)
        self.items = [self._make(i % 3, generator) for i in range(n)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]

    @staticmethod
    def _make(n, generator):
        image = 0.1 * torch.randn(1, SIZE, SIZE, generator=generator, dtype=torch.float64)
        corners = torch.randint(SIZE - 8, (n, 2), generator=generator)
        labels = torch.randint(1, CLASSES, (n,), generator=generator)
        for (x, y), label in zip(corners.tolist(), labels.tolist(), strict=True):
            image[:, y : y + 8, x : x + 8] = 2 * label - 3
        return image, {"boxes": torch.cat([corners, corners + 8], 1).double(), "labels": labels}


def make_model():
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    backbone = nn.Sequential(nn.Conv2d(1, 8, 4, stride=4), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
    backbone.out_channels = 8
    anchors = AnchorGenerator(sizes=((8,),), aspect_ratios=((1.0,),))
    return RetinaNet(
        backbone, CLASSES, min_size=SIZE, max_size=SIZE, image_mean=[0.0], image_std=[1.0], anchor_generator=anchors,
        detections_per_img=4, score_thresh=0.005,
    ).double()  # fmt: skip


def boxes_per_image(pred, targets):
    return sum(len(each["boxes"]) for each in pred) / len(pred)


def mean_overlap(preds, targets):
    from torchvision.ops import box_iou

    pairs = zip(preds, targets, strict=True)  # each box with the detection that is nearest
    best = [box_iou(t["boxes"], p["boxes"]).amax(1) for p, t in pairs if len(t["boxes"]) and len(p["boxes"])]
    return torch.cat(best).mean() if best else math.nan


COLLATES = {
    "pairs": lambda samples: tuple(zip(*samples, strict=True)),
    "mappings": lambda samples: dict(zip(("images", "targets"), map(list, zip(*samples, strict=True)), strict=True)),
}


def make_learner(collate, **kwargs):
    set_seed(1)
    train, valid = (DataLoader(Squares(n, n), 3, collate_fn=collate) for n in (10, 7))
    metrics = [boxes_per_image, AccumMetric(mean_overlap)]
    return Learner(
        DataLoaders(train, valid, device="cpu", target_keys=("targets",)),
        make_model(),
        metrics=metrics,
        lr=3e-3,
        **kwargs,
    )


def detect(name):
    learn = make_learner(COLLATES[name])
    with learn.distrib_ctx(split_batches=True), learn.no_logging(), learn.no_bar():
        learn.fit(2)
        preds, targets = learn.get_preds()
        validation = learn.validate()
    return {
        "names": learn.recorder.metric_names,
        "values": learn.recorder.values,
        "losses": learn.recorder.losses,
        "preds": list(preds),
        "targets": list(targets),
        "validation": validation,
        "weights": {k: v.clone() for k, v in learn.model.state_dict().items()},
    }


@pytest.fixture(scope="module")
def found(rank_pools):
    return Results(rank_pools, detect)


@pytest.mark.parametrize("collate", COLLATES)
def test_a_detector_trains_by_the_sum_of_its_losses_and_is_validated_by_metrics(found, collate):
    run = found[1, collate][0]
    assert run["names"] == [
        "epoch", "train_loss", "boxes_per_image", "mean_overlap", "classification", "bbox_regression", "time",
    ]  # fmt: skip
    for train_loss, *_, classification, regression in run["values"]:
        assert train_loss == pytest.approx(classification + regression, rel=1e-9)
    assert run["values"][1][0] < run["values"][0][0]
    assert math.isnan(run["validation"][0])
    assert run["validation"][1:] == run["values"][-1][1:3]
    assert [len(t["boxes"]) for t in run["targets"]] == [0, 1, 2, 0, 1, 2, 0]
    assert run["validation"][1] == pytest.approx(boxes_per_image(run["preds"], None))
    assert run["validation"][2] == pytest.approx(float(mean_overlap(run["preds"], run["targets"])))


@pytest.mark.parametrize(
    ("n", "collate"),
    [
        pytest.param(2, "pairs", id="2-ranks-pairs"),
        pytest.param(2, "mappings", id="2-ranks-mappings", marks=pytest.mark.slow),
        pytest.param(3, "pairs", id="3-ranks-pairs", marks=pytest.mark.slow),
    ],
)
def test_a_detector_on_ranks_equals_one_process(found, n, collate):
    alone = found[1, collate][0]
    for rank in found[n, collate]:  # in the last step one has no images
        assert rank.pop("names") == alone["names"]
        expected = {key: value for key, value in alone.items() if key != "names"}
        torch.testing.assert_close(rank, expected, rtol=1e-8, atol=1e-9, equal_nan=True)


def test_a_column_that_detectors_do_not_have_is_not_monitored_in_silence():
    learn = make_learner(COLLATES["pairs"], cbs=SaveModelCallback())
    with pytest.warns(UserWarning, match="none of the fit's 1 rows has a column 'valid_loss'"), learn.no_logging():
        learn.fit(1)


def test_validation_without_targets_is_refused():
    learn = make_learner(lambda samples: {"images": [image for image, _ in samples]})
    with raises(ValueError, "there is no loss", "target_keys"):
        learn.validate()
