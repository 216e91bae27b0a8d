"""Detectors of torchvision: losses as a dict in training, detections in evaluation; two processes equal one."""

import math
import warnings

import pytest
import torch
from helpers import raises, results_of
from torch import nn
from torch.utils.data import DataLoader, Dataset

from learnerkit import AccumMetric, DataLoaders, Learner, SaveModelCallback, set_seed
from learnerkit.distributed import facts

CLASSES, SIZE = 3, 32


class Squares(Dataset):
    """Bright and dark squares, each of a class, on grey; every third image has none unless there are `more`."""

    def __init__(self, n, seed, more=0):
        generator = torch.Generator().manual_seed(seed)
        self.items = [self._make(i % 3 + more, generator) for i in range(n)]

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


def make_backbone(channels):
    convs = nn.Conv2d(1, 8, 4, stride=4), nn.ReLU(), nn.Conv2d(8, channels, 3, padding=1), nn.ReLU()
    backbone = nn.Sequential(*convs)
    backbone.out_channels = channels
    return backbone


def make_model():
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    backbone = make_backbone(8)
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
        **{"loss_weight": "samples"} | kwargs,
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


found = results_of(detect)


@pytest.mark.parametrize("collate", COLLATES)
@pytest.mark.slow
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
        pytest.param(2, "pairs", id="2-ranks-pairs", marks=pytest.mark.slow),
        pytest.param(2, "mappings", id="2-ranks-mappings", marks=pytest.mark.soak),
        pytest.param(3, "pairs", id="3-ranks-pairs", marks=pytest.mark.soak),
    ],
)
def test_a_detector_on_ranks_equals_one_process(found, n, collate):
    alone = found[1, collate][0]
    for rank in found[n, collate]:  # in the last step one has no images
        assert rank.pop("names") == alone["names"]
        expected = {key: value for key, value in alone.items() if key != "names"}
        torch.testing.assert_close(rank, expected, rtol=1e-8, atol=1e-9, equal_nan=True)


def make_fcos():
    """FCOS, whose losses are means over the positives of the batch, which its head counts here."""
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.fcos import FCOS, FCOSHead

    class Head(FCOSHead):
        def compute_loss(self, targets, head_outputs, anchors, matched_idxs):
            losses = super().compute_loss(targets, head_outputs, anchors, matched_idxs)
            return {**losses, "positives": (torch.stack(matched_idxs) >= 0).sum()}

    anchors = AnchorGenerator(sizes=((8,),), aspect_ratios=((1.0,),))
    return FCOS(
        make_backbone(32), CLASSES, SIZE, SIZE, [0.0], [1.0], anchors, Head(32, 1, CLASSES, 1)
    ).double()  # fmt: skip


def make_faster_rcnn():
    """Faster R-CNN with samplers that keep all anchors and all proposals, so that nothing is drawn.

    Two of its losses are means over the anchors, of which each image has as many, and two over the proposals.
    """
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.ops import MultiScaleRoIAlign

    class Predictor(FastRCNNPredictor):
        def forward(self, x):
            self.proposals = len(x)
            return super().forward(x)

    return FasterRCNN(
        make_backbone(8), None, SIZE, SIZE, [0.0], [1.0], AnchorGenerator(sizes=((8,),), aspect_ratios=((1.0,),)),
        rpn_bg_iou_thresh=0.5, rpn_fg_iou_thresh=0.5, rpn_nms_thresh=1.0, rpn_batch_size_per_image=1000,
        box_roi_pool=MultiScaleRoIAlign(["0"], 3, 2), box_head=TwoMLPHead(8 * 9, 16),
        box_predictor=Predictor(16, CLASSES), box_batch_size_per_image=1000,
    ).double()  # fmt: skip


def train_detector(name):
    facts._warned.clear()
    set_seed(1)
    model = {"retinanet": make_model, "faster_rcnn": make_faster_rcnn}.get(name, make_fcos)()

    def proposals(targets):
        return model.roi_heads.box_predictor.proposals

    weights = {
        "retinanet": "samples",
        "fcos": "positives",
        "faster_rcnn": {
            "loss_objectness": "samples", "loss_rpn_box_reg": "samples",
            "loss_classifier": proposals, "loss_box_reg": proposals,
        },
    }  # fmt: skip
    dls = DataLoaders(DataLoader(Squares(9, 9, more=1), 3, collate_fn=COLLATES["pairs"]), device="cpu")
    learn = Learner(dls, model, lr=0.1, opt_func=torch.optim.SGD, loss_weight=weights.get(name))
    with warnings.catch_warnings(record=True) as caught, learn.no_logging(), learn.no_bar():
        warnings.simplefilter("always")
        with learn.distrib_ctx(split_batches=True):
            learn.fit(2)
    found = [p.detach().clone() for p in model.parameters()], learn.recorder.values
    return found, learn.recorder.metric_names, [str(w.message) for w in caught]


trained = results_of(train_detector)


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("retinanet", 1e-9),
        ("fcos", 1e-9),
        ("faster_rcnn", 1e-7),  # torchvision makes its `loss_objectness` in float32, whatever the model has
    ],
)
@pytest.mark.slow
def test_detectors_on_ranks_equal_one_process_by_what_their_losses_average_over(trained, name, tolerance):
    alone, columns, told = trained[1, name][0]
    assert not told
    for rank, names, told in trained[2, name]:
        torch.testing.assert_close(rank, alone, rtol=tolerance, atol=tolerance)
        assert names == columns
        assert not told
    assert "positives" not in columns


@pytest.mark.slow
def test_losses_that_are_means_over_positives_are_told_where_nothing_is_said(trained):
    (guess, *_, told), *others = trained[2, "nothing"]
    assert "classification + bbox_regression + bbox_ctrness is taken for a mean over samples" in told[0]
    assert len(told) == 1
    assert not any(told for *_, told in others)
    alone = trained[1, "fcos"][0][0]
    assert max((a - b).abs().max() for a, b in zip(alone[0], guess[0], strict=True)) > 1e-5


def test_a_column_that_detectors_do_not_have_is_not_monitored_in_silence():
    learn = make_learner(COLLATES["pairs"], cbs=SaveModelCallback())
    with pytest.warns(UserWarning, match="none of the fit's 1 rows has a column 'valid_loss'"), learn.no_logging():
        learn.fit(1)


def test_validation_without_targets_is_refused():
    learn = make_learner(lambda samples: {"images": [image for image, _ in samples]})
    with raises(ValueError, "there is no loss", "target_keys"):
        learn.validate()
