"""Metrics of every kind; scripts/parity.py has them on several processes."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from helpers import make_classes, make_data, make_dls, make_learner, make_model, raises
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from learnerkit import (
    AccumMetric,
    DataLoaders,
    Dice,
    IoU,
    Learner,
    Metric,
    accuracy,
    error_rate,
    mae,
    mse,
    perplexity,
    rmse,
    top_k_accuracy,
)
from learnerkit.callbacks.tracking import TrackerCallback, ValidateEvery
from learnerkit.losses import decode_of
from learnerkit.metrics import make_meters, metric_names
from learnerkit.values import map_batch, tensors_in

PRED = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0], [1.0, 3.0, 2.0], [0.5, 0.1, 0.2]])
TARGET = torch.tensor([0, 1, 1, 2])


def test_metric_functions_have_the_values_of_their_formulas():
    assert accuracy(PRED, TARGET) == 0.5
    assert accuracy(PRED, TARGET.reshape(-1, 1)) == 0.5
    assert error_rate(PRED, TARGET) == 0.5
    assert top_k_accuracy(PRED, TARGET, k=2) == 1.0
    assert top_k_accuracy(PRED, TARGET) == 1.0  # k=5 of three classes
    assert mse(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 1.0])) == 2.5
    assert mae(torch.tensor([1.0, 3.0]), torch.tensor([0, 1])) == 1.5
    image = torch.randn(2, 3, 4, 4)
    assert accuracy(image, image.argmax(1)) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_errors_of_predictions_in_half_precision_are_computed_in_float32(dtype):
    pred, target = (torch.randn(2, 500) * 40).to(dtype), torch.randn(2, 500) * 300
    assert mse(pred, target) == F.mse_loss(pred.float(), target)
    assert mae(pred, target) == F.l1_loss(pred.float(), target)
    scores, classes = (torch.randn(4000, 9) * 15).to(dtype), torch.randint(9, (4000,))
    for metric, *batch in ((rmse, pred, target), (perplexity, scores, classes)):
        half, full = (evaluate(metric, (len(x),), x, batch[1]) for x in (batch[0], batch[0].float()))
        assert half == full
    shares = torch.rand(4000, 9).softmax(1).to(dtype)
    expected = F.cross_entropy(scores.float(), shares.float()).exp()
    assert evaluate(perplexity, (4000,), scores, shares)["perplexity"] == pytest.approx(float(expected), rel=1e-5)


def test_errors_take_as_many_predictions_as_targets():
    for metric in (mse, mae, rmse().update):
        with pytest.raises(RuntimeError, match=r"shape '\[1, 3\]' is invalid for input of size 1"):
            metric(torch.zeros(1, 3), torch.ones(1))


def test_scores_of_a_language_model_have_their_classes_last():
    scores, target = torch.randn(4, 5, 7), torch.randint(7, (4, 5))
    target[1, 2:] = -100
    expected = F.cross_entropy(scores.movedim(-1, 1), target).exp()
    for pred, metric in ((scores, perplexity), (scores.movedim(-1, 1), perplexity), (scores, perplexity(axis=-1))):
        assert evaluate(metric, (3, 1), pred, target)["perplexity"] == pytest.approx(float(expected))
    best = scores.argmax(-1)
    assert accuracy(scores, best) == accuracy(scores.movedim(-1, 1), best) == 1
    assert error_rate(scores, best) == 0


def test_where_the_classes_may_be_either_dimension_metrics_ask():
    scores, target = torch.randn(2, 5, 5), torch.randint(5, (2, 5))
    for metric in (perplexity().update, accuracy, error_rate):
        with pytest.raises(
            ValueError, match=r"scores of shape \(2, 5, 5\) and targets of shape \(2, 5\).*axis, 1 or -1"
        ):
            metric(scores, target)
    with pytest.raises(ValueError, match=r"the metric has none \(Dice, IoU, .*write an AccumMetric"):
        Dice().update(scores, target)
    for axis in (1, -1):
        expected = float(F.cross_entropy(scores.movedim(axis, 1), target).exp())
        assert evaluate(perplexity(axis=axis), (1, 1), scores, target)["perplexity"] == pytest.approx(expected)
        assert accuracy(scores, scores.argmax(axis), axis=axis) == 1
    expected = float(F.cross_entropy(scores, target).exp())
    found = evaluate(perplexity(), (1, 1), scores, target, nn.CrossEntropyLoss())  # which takes dimension 1 alone
    assert found["perplexity"] == pytest.approx(expected)
    shares = torch.rand(2, 5, 3).softmax(1)
    expected = float(F.cross_entropy(scores[..., :3], shares).exp())
    found = evaluate(perplexity(), (1, 1), scores[..., :3], shares, nn.CrossEntropyLoss())
    assert found["perplexity"] == pytest.approx(expected)


def evaluate(metrics, sizes=(3, 1), pred=PRED, target=TARGET, loss_func=None):
    """Each metric over batches of those sizes."""
    meters = make_meters(metrics, loss_func)
    for meter in meters:
        meter.reset()
        for i, (p, t) in enumerate(zip(pred.split(sizes), target.split(sizes), strict=True)):
            meter.update(i, len(p), p, (t,))
    return {meter.name: meter.result(sharded=False) for meter in meters}


def overlaps(found, actual, classes):
    """Dice and IoU by sets of pixels."""
    dice, iou = [], []
    for number in classes:
        a, b = (set((x == number).nonzero().flatten().tolist()) for x in (found.flatten(), actual.flatten()))
        if a | b:
            dice.append(2 * len(a & b) / (len(a) + len(b)))
            iou.append(len(a & b) / len(a | b))
    return {"dice": sum(dice) / len(dice), "iou": sum(iou) / len(iou)}


def test_dice_and_iou_of_masks_count_overlaps():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 4, 6, 7, generator=generator)
    scores[:, 3] -= 100  # a class that is nowhere
    target = torch.randint(3, (5, 6, 7), generator=generator)
    found = scores.argmax(1)
    expected = overlaps(found, target, range(4))
    assert 0.2 < expected["iou"] < expected["dice"] < 0.5
    for sizes in ((5,), (3, 2)):
        assert evaluate([Dice, IoU], sizes, scores, target) == pytest.approx(expected, abs=1e-12)
    some = evaluate([Dice(np.array([1, 3])), IoU(classes=[1, 3])], (3, 2), scores, target)
    assert some == pytest.approx(overlaps(found, target, [1]), abs=1e-12)
    torchmetrics = pytest.importorskip("torchmetrics.classification")
    theirs = torchmetrics.MulticlassJaccardIndex(4)(scores, target)
    assert float(theirs) == pytest.approx(expected["iou"], abs=1e-6)


def test_pixels_that_do_not_count_are_left_out():
    scores, target = torch.randn(4, 3, 6, 7), torch.randint(3, (4, 6, 7))
    expected = overlaps(scores.argmax(1)[:, 2:], target[:, 2:], range(3))
    ignores = nn.CrossEntropyLoss(ignore_index=255)
    for number, options, loss in ((-100, {}, None), (255, {"ignore_index": 255}, None), (255, {}, ignores)):
        target[:, :2] = number
        found = evaluate([Dice(**options), IoU(**options)], (3, 1), scores, target, loss)
        assert found == pytest.approx(expected, abs=1e-12)
    target[:] = 255
    assert math.isnan(evaluate(Dice, (4,), scores, target, ignores)["dice"])
    assert math.isnan(Dice().compute())
    for wrong in (-1, [0, 1.5], "a"):
        with pytest.raises(ValueError, match="they are the numbers of classes, from 0"):
            Dice(wrong)
    with pytest.raises(ValueError, match=r"iou is of the classes \[7\], and the predictions have 3"):
        IoU(7).update(torch.zeros(1, 3, 2, 2), torch.zeros(1, 2, 2, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="out of bounds"):  # class 3 of three, which was left out without a word
        Dice().update(torch.zeros(1, 3, 2, 2), torch.full((1, 2, 2), 3))


def test_dice_takes_one_logit_for_each_pixel():
    scores = torch.randn(4, 1, 6, 7)
    target = (torch.rand(4, 1, 6, 7) > 0.7).float()
    expected = overlaps(scores > 0, target, [True])
    assert evaluate([Dice, IoU], (3, 1), scores, target, nn.BCEWithLogitsLoss()) == pytest.approx(expected, abs=1e-12)
    with pytest.raises(ValueError, match="dice needs classes"):
        evaluate(Dice, (3, 1), scores, target, nn.MSELoss())


class Flat(nn.CrossEntropyLoss):
    """Takes the scores of tokens with their classes last."""

    def forward(self, pred, y):
        return super().forward(pred.flatten(0, 1), y.flatten())


def test_a_loss_with_a_forward_of_its_own_does_not_say_where_the_classes_are():
    g = torch.Generator().manual_seed(1)
    for t in (6, 4):
        pred, target = torch.randn(5, t, 4, generator=g), torch.randint(4, (5, t), generator=g)
        flat = pred.flatten(0, 1), target.flatten()
        expected = (flat[0].argmax(1) == flat[1]).float().mean().item()
        found = dict.fromkeys(("accuracy", "perplexity", "f1"))
        for name in found:
            metric = {"accuracy": accuracy, "perplexity": perplexity(), "f1": "f1"}[name]
            meter = make_meters(metric, Flat(), list("abcd"))[0]
            meter.reset()
            if t == 4:
                with raises(ValueError, "the classes may be dimension 1 or the last"):
                    meter.update(5, 5, pred, (target,))
            else:
                meter.update(5, 5, pred, (target,))
                found[name] = meter.result(sharded=False)
        if t == 6:
            assert found["accuracy"] == pytest.approx(expected)
            assert found["perplexity"] == pytest.approx(F.cross_entropy(*flat).exp().item())
        with raises(ValueError, "Flat has a forward of its own: which dimension has the classes is not known"):
            decode_of(Flat())(pred)
    assert decode_of(Flat())(pred[0]).shape == (4,)


def test_a_loss_with_a_forward_and_a_decode_of_its_own_says_how_tokens_are_decoded():
    class Decodes(Flat):
        def decode(self, pred):
            return pred.argmax(-1)

    pred, target = torch.randn(5, 4, 4), torch.randint(4, (5, 4))  # as many tokens as classes
    assert accuracy(pred, target, loss_func=Decodes()) == (pred.argmax(-1) == target).double().mean()


class OwnLossOfMasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.loss = nn.Conv2d(3, 3, 1), nn.CrossEntropyLoss(ignore_index=255)

    def forward(self, x, labels=None):
        pred = self.net(x)
        return pred if labels is None else (pred, self.loss(pred, labels))


def test_metrics_leave_out_what_a_models_own_loss_ignores():
    x, y = torch.randn(8, 3, 4, 5), torch.randint(0, 3, (8, 4, 5))
    y[:, :2] = 255
    model, dls = (
        OwnLossOfMasks(),
        DataLoaders.from_datasets(TensorDataset(x, y), TensorDataset(x, y), bs=3, device="cpu"),
    )
    metrics = [accuracy, Dice(), perplexity()]
    own = Learner(dls, model, metrics=metrics).validate()
    assert own == pytest.approx(Learner(dls, model.net, model.loss, metrics=metrics).validate(), rel=1e-5)


def test_a_vector_of_numpy_is_a_column_for_each_number():
    found = evaluate(AccumMetric(lambda pred, target: np.array([1.0, 2.5]), name="f"))
    assert found == {"f": {"f_0": 1.0, "f_1": 2.5}}


class Classes(Metric):
    """How many classes were predicted: no mean."""

    def __init__(self):
        super().__init__()
        self.add_state("seen", torch.zeros(3), "max")

    def update(self, pred, target):
        self.seen = torch.maximum(self.seen, F.one_hot(pred.argmax(1), 3).amax(0))

    def compute(self):
        return self.seen.sum()


class Bare(Metric):
    """Keeps what it likes, without declared states."""

    def reset(self):
        self.n = 0

    def update(self, pred, target):
        self.n += len(pred)

    def compute(self):
        return self.n


def test_a_class_of_metrics_may_have_a_name():
    class Made(Bare):
        @property
        def name(self):
            return "f1 (made)"

    class Named(Bare):
        name = "F1"

    assert evaluate([Made(), Named(), Named("other"), Bare()]) == {"f1 (made)": 4, "F1": 4, "other": 4, "bare": 4}


def test_a_metric_with_the_methods_of_fastai_is_refused_with_those_that_it_has_here():
    class Fastais(Metric):
        def reset(self):
            self.n = 0

        def accumulate(self, learn):
            self.n += len(learn.y)

        @property
        def value(self):
            return self.n

    for kind in (Fastais, type("Half", (Fastais,), {"update": Bare.update})):
        with raises(TypeError, "update(self, pred, *targets)", "compute(self)", "accumulate(self, learn)"):
            evaluate([kind()])


@pytest.mark.parametrize("sizes", [(4,), (3, 1), (1, 1, 2)])
def test_batches_make_no_difference(sizes):
    found = evaluate(
        {
            "acc": accuracy,
            "top2": partial(top_k_accuracy, k=2),
            "accum": AccumMetric(lambda p, t: (p.argmax(1).float() - t.float()).std()),
            "classes": Classes(),
            "bare": Bare(),
            "perplexity": perplexity(),
        },
        sizes,
    )
    expected = {
        "acc": 0.5,
        "top2": 1.0,
        "accum": (PRED.argmax(1).float() - TARGET.float()).std().item(),
        "classes": 3.0,
        "bare": 4.0,
        "perplexity": F.cross_entropy(PRED, TARGET).exp().item(),
    }
    assert found == pytest.approx(expected, rel=1e-6)


class MeanOfMeans(Metric):
    """The mean over batches, which have different numbers of samples."""

    def __init__(self):
        super().__init__()
        self.add_state("total", 0.0)
        self.add_state("batches", 0)

    def update(self, pred, target):
        self.total = self.total + accuracy(pred, target)
        self.batches = self.batches + 1

    def compute(self):
        return self.total / self.batches


def f1_of_batch(pred, target):
    found, true = pred.argmax(1) == 1, target == 1
    return 2 * (found & true).sum() / (found.sum() + true.sum())


@pytest.mark.parametrize(
    ("metric", "depends"),
    [
        (accuracy, False),
        (partial(top_k_accuracy, k=2), False),
        (perplexity(), False),
        (AccumMetric(f1_of_batch), False),
        (Classes(), False),
        (f1_of_batch, True),
        (lambda pred, target: F.cross_entropy(pred, target).exp(), True),
        (MeanOfMeans(), True),
    ],
    ids=["mean", "partial", "states", "all", "counts", "f1 of a batch", "function of a mean", "mean of means"],
)
def test_a_metric_that_depends_on_how_samples_are_cut_into_batches_is_found(metric, depends):
    generator = torch.Generator().manual_seed(0)
    pred, target = torch.rand(16, 3, generator=generator), torch.randint(3, (16,), generator=generator)
    meter = make_meters({"m": metric})[0]
    meter.reset()
    meter.update(0, 16, pred, (target,))
    before = meter.result(False)
    assert meter.depends_on_cut(16, pred, (target,)) is depends
    assert not meter.depends_on_cut(1, pred[:1], (target[:1],))
    assert meter.result(False) == before


def test_a_metric_gets_all_predictions_of_lists_with_an_entry_for_each_sample():
    def count(preds, targets):
        assert all(len(p["boxes"]) == t for p, t in zip(preds, targets, strict=True))
        return len(preds)

    (meter,) = make_meters(AccumMetric(count))
    meter.reset()
    for place, sizes in enumerate([[1, 2], [3, 0], [4]]):
        preds = [{"boxes": torch.ones(n, 4)} for n in sizes]
        meter.update(place, len(sizes), preds, (torch.tensor(sizes),))
    assert meter.result(False) == 5


def test_root_of_the_mean_is_not_the_mean_of_roots():
    pred, target = torch.tensor([1.0, 2.0, 10.0]), torch.zeros(3)
    found = evaluate(rmse, (2, 1), pred, target)
    assert found["rmse"] == pytest.approx((105 / 3) ** 0.5)


def test_a_share_of_one_target_says_so_where_there_are_two():
    data = TensorDataset(torch.randn(8, 4), torch.arange(8) % 3, torch.arange(8) % 2)
    dls = DataLoaders.from_datasets(data, data, n_inp=1, device="cpu")
    learn = make_learner(dls, make_model(n_out=3), lambda pred, y, z: F.cross_entropy(pred, y), metrics=accuracy)
    with pytest.raises(ValueError, match="accuracy takes one target, and the batch has 2: choose one in a function"):
        learn.validate()


def test_perplexity_leaves_ignored_targets_out():
    target = torch.tensor([0, -100, 1, -100])
    assert evaluate(perplexity, target=target)["perplexity"] == pytest.approx(
        F.cross_entropy(PRED, target).exp().item()
    )


def test_class_156_counts_in_uint8_too_though_it_has_the_bits_of_minus_100():
    pred, target = torch.randn(6, 200), torch.arange(153, 159)
    pred[:4].scatter_(1, target[:4, None], 9.0)  # these four are right, 156 among them
    metrics = [accuracy, error_rate, perplexity, Dice]
    assert evaluate(metrics, (4, 2), pred, target.byte()) == evaluate(metrics, (4, 2), pred, target)
    pytest.importorskip("torchmetrics")
    found = []
    for y in (target, target.byte()):
        (meter,) = make_meters("f1", nn.CrossEntropyLoss(), range(200))
        meter.reset()
        meter.update(0, 6, pred, (y,))
        found.append(meter.result(False))
    assert found[0] == found[1]


@pytest.mark.parametrize("metric", [perplexity, "perplexity"])
def test_perplexity_leaves_out_what_the_loss_ignores(metric):
    target, loss = torch.tensor([0, 2, 1, 2]), nn.CrossEntropyLoss(ignore_index=2)
    expected = loss(PRED, target).exp().item()
    assert evaluate(metric, target=target, loss_func=loss)["perplexity"] == pytest.approx(expected)
    given = evaluate(perplexity(ignore_index=0), target=target, loss_func=loss)["perplexity"]
    assert given == pytest.approx(F.cross_entropy(PRED, target, ignore_index=0).exp().item())


def test_a_partial_of_a_class_is_an_object_with_these_options():
    (meter,) = make_meters({"second": partial(IoU, classes=[1])}, nn.CrossEntropyLoss())
    meter.reset()
    meter.update(0, 2, torch.eye(2), (torch.tensor([0, 1]),))
    assert (meter.name, meter.result(sharded=False), meter.metric.classes) == ("second", 1.0, [1])
    ignites = type("Accuracy", (), {"__module__": "ignite.metrics.accuracy", "__getattr__": lambda self, name: print})
    with raises(TypeError, "got Accuracy of ignite as a metric", "take a metric of torchmetrics"):
        make_meters(ignites(), nn.CrossEntropyLoss())
    with raises(TypeError, "got the class Linear as a metric; pass an object of it: Linear"):
        make_meters(partial(nn.Linear, 2))


def test_meters_have_the_names_of_their_metrics():
    def my_metric(pred, target):
        return 1.0

    metrics = [my_metric, partial(top_k_accuracy, k=2), rmse, AccumMetric(my_metric, name="all"), Classes()]
    assert [m.name for m in make_meters(metrics)] == ["my_metric", "top_k_accuracy", "rmse", "all", "classes"]
    assert [m.name for m in make_meters({"a": accuracy, "b": accuracy})] == ["a", "b"]
    assert metric_names([partial(rmse, name="a"), partial(rmse), partial(perplexity, axis=1)]) == [
        "a", "rmse", "perplexity"
    ]  # fmt: skip
    assert make_meters(None) == []
    with pytest.raises(ValueError, match="two metrics are named \\['accuracy'\\]"):
        make_meters([accuracy, accuracy])
    for name in ("valid_loss", "train_loss", "epoch", "time"):
        with pytest.raises(ValueError, match=f"a metric is named '{name}', a column of the table; name it: metrics="):
            make_meters({name: accuracy})
    with pytest.raises(TypeError, match="got the metric 3"):
        make_meters(3)
    with pytest.raises(TypeError, match="got the class Linear as a metric; pass an object of it: Linear"):
        make_meters(nn.Linear)


@pytest.mark.parametrize("value", [torch.tensor(0.5), 0.5, 1, np.float64(0.5), torch.tensor([0.5])])
def test_single_numbers_are_taken(value):
    assert evaluate({"m": lambda p, t: value})["m"] == float(value)


@pytest.mark.parametrize("value", [torch.ones(3), [1.0], None, "1"])
def test_anything_else_is_refused_with_the_metrics_name(value):
    with pytest.raises(ValueError, match="metric 'm' returned"):
        evaluate({"m": lambda p, t: value})


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="reduce='mean'"):
        Metric().add_state("x", 0, "mean")
    with pytest.raises(NotImplementedError, match="update"):
        Metric().update(1)
    with pytest.raises(NotImplementedError, match="compute"):
        Metric().compute()
    with pytest.raises(TypeError, match=r"got AccumMetric\(3\); pass a function of all predictions"):
        AccumMetric(3)


def test_reset_forgets():
    metric = Classes()
    metric.update(PRED, TARGET)
    metric.reset()
    assert metric.compute() == 0


def test_torchmetrics_and_like_objects_are_metrics():
    from torchmetrics.classification import MulticlassAccuracy

    assert evaluate({"acc": MulticlassAccuracy(3, average="micro")}) == {"acc": 0.5}

    class Merging:
        """As torcheval's."""

        def reset(self):
            self.n = 0
            return self

        def update(self, pred, target):
            self.n += len(pred)
            return self

        def compute(self):
            return torch.tensor(self.n)

        def merge_state(self, others):
            self.n += sum(o.n for o in others)
            return self

    assert evaluate({"n": Merging()}) == {"n": 4}


def on_meta():
    """A batch of predictions and targets that are not on the CPU."""
    return torch.randn(4, 3, device="meta"), (torch.zeros(4, 3, dtype=torch.long, device="meta"),)


def meter_of(name):
    """A meter of Dice or of an object of torchmetrics."""
    if name == "Dice":
        return make_meters(Dice(), nn.BCEWithLogitsLoss())[0]
    kind = getattr(pytest.importorskip("torchmetrics.classification"), name)
    return make_meters(kind(3, validate_args=False))[0]


def devices_of(meter):
    """The kinds of devices of a meter's states."""
    return {t.device.type for t in tensors_in(meter.state_dict()["state"])}


@pytest.mark.parametrize("name", ["MultilabelAccuracy", "MultilabelAUROC"])
def test_torchmetrics_objects_go_to_the_device_of_the_predictions(name):
    meter = meter_of(name)
    for _ in range(2):
        meter.reset()
        for place in range(2):
            meter.update(place, 4, *on_meta())
        assert devices_of(meter) == {"meta"}
        assert meter.metric._update_count == 2


@pytest.mark.parametrize("name", ["Dice", "MultilabelAccuracy", "MultilabelAUROC"])
def test_states_of_a_file_go_to_the_device_where_they_were(name):
    meter, twin = meter_of(name), meter_of(name)
    meter.reset()
    meter.update(0, 4, *on_meta())
    state = meter.state_dict()
    twin.reset()
    twin.load_state_dict(map_batch(lambda t: torch.zeros_like(t, device="cpu"), state))
    twin.update(1, 4, *on_meta())
    assert devices_of(twin) == {"meta"}
    older = state | {"state": state["state"][:2]}  # of a file that an older version has written
    twin.reset()
    twin.load_state_dict(older)
    assert devices_of(twin) == {"meta"}


def test_in_a_fit_each_sample_counts_once():
    """Uneven batches: 7 samples of validation in batches of 4."""
    dls = make_dls(8, 7, 4, make_classes)
    metrics = [accuracy, AccumMetric(mean_class)]
    learn = make_learner(dls, make_model(n_out=3), torch.nn.CrossEntropyLoss(), metrics=metrics)
    learn.fit(1)
    x, y = dls.valid_ds.tensors
    with torch.no_grad():
        pred = learn.model.eval()(x)
    expected = [F.cross_entropy(pred, y).item(), accuracy(pred, y).item(), mean_class(pred, y).item()]
    assert learn.recorder.final_record[1:] == pytest.approx(expected, rel=1e-6)
    assert learn.validate() == pytest.approx(expected, rel=1e-6)


def mean_class(pred, target):
    return (pred.argmax(1) * target).float().mean()


class Extremes(Metric):
    """Computes several numbers, and something else."""

    def __init__(self):
        super().__init__()
        self.add_state("low", torch.inf, "min")
        self.add_state("high", -torch.inf, "max")

    def update(self, pred, target):
        self.low, self.high = torch.minimum(self.low, target.min()), torch.maximum(self.high, target.max())

    def compute(self) -> dict:
        return {"low": self.low, "high": self.high, "both": [self.low, self.high]}


def test_a_metric_that_computes_a_dict_has_a_column_for_each_number_in_it():
    target = make_data(4, seed=1).tensors[1]
    low, high = target.min().item(), target.max().item()
    learn = make_learner(metrics={"mae": mae, "of": Extremes()})
    tracker = TrackerCallback("of_high")
    with learn.no_logging():
        learn.fit(1, cbs=[tracker, ValidateEvery(1)])
    names = ["epoch", "train_loss", "valid_loss", "mae", "of_low", "of_high", "time"]
    assert learn.recorder.metric_names == names
    assert [row[3:] for row in learn.recorder.values] == [[pytest.approx(low), pytest.approx(high)]] * 2
    assert tracker.best == pytest.approx(high)
    assert learn.validate()[2:] == [pytest.approx(low), pytest.approx(high)]
    with pytest.raises(ValueError, match=r"two metrics are named \['high', 'low'\]"), learn.no_logging():
        make_learner(metrics=[Extremes(), type("Others", (Extremes,), {})()]).fit(1)


class Both(Extremes):
    def compute(self):
        return torch.stack([self.low, self.high])


def test_an_error_of_compute_names_the_metric():
    class Fails(Extremes):
        def compute(self):
            raise ZeroDivisionError("no samples")

    with raises(ZeroDivisionError, "raised by the metric 'second'"):
        make_learner(metrics={"first": mae, "second": Fails()}).fit(1)


def test_a_metric_that_computes_a_vector_has_a_column_for_each_number_in_it():
    target = make_data(4, seed=1).tensors[1]
    learn = make_learner(metrics=[Both(), mae])
    with learn.no_logging():
        learn.fit(2)
        learn.fit(1, cbs=TrackerCallback("both_1"))
    assert learn.recorder.metric_names[3:] == ["both_0", "both_1", "mae", "time"]
    assert learn.recorder.values[0][2:4] == [pytest.approx(target.min().item()), pytest.approx(target.max().item())]
    with pytest.raises(ValueError, match="got monitor='both_high'; this fit's columns are"):
        learn.fit(1, cbs=TrackerCallback("both_high"))


# Shares of targets: what is decoded, and what counts

SCORES = torch.tensor([[2.0], [-1.0], [0.5], [-3.0]])
YES = torch.tensor([[1.0], [0.0], [1.0], [0.0]])


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), F.binary_cross_entropy_with_logits, nn.BCELoss()])
@pytest.mark.parametrize("flat", [False, True])
def test_yes_or_no_is_decoded_as_the_loss_says(loss, flat):
    pred = SCORES.sigmoid() if isinstance(loss, nn.BCELoss) else SCORES
    pred, target = (pred.flatten(), YES.flatten()) if flat else (pred, YES)
    assert accuracy(pred, target, loss_func=loss) == 1
    assert error_rate(pred, target, loss_func=loss) == 0
    assert accuracy(pred, 1 - target, loss_func=loss) == 0
    assert accuracy(pred.roll(1, 0), target.bool(), loss_func=loss) == 0
    assert accuracy(torch.stack([pred, -pred + 1]), torch.stack([target, target]), loss_func=loss) < 1
    dls = DataLoaders([(torch.ones(4, 1), target)] * 2, [(torch.ones(4, 1), target)], device="cpu")

    class Fixed(nn.Linear):
        def forward(self, x):
            return pred + 0 * self.weight.sum()

    learn = Learner(dls, Fixed(1, 1), loss, metrics=[accuracy, error_rate])
    assert learn.validate()[1:] == [1, 0]


def half(pred, target):
    return F.mse_loss(pred, target) / 2


@pytest.mark.parametrize("metric", [accuracy, error_rate, top_k_accuracy])
@pytest.mark.parametrize("loss", [None, half, nn.MSELoss(), partial(F.l1_loss)])
def test_what_has_no_classes_is_refused(metric, loss):
    one, numbers = torch.randn(4, 1), torch.randn(4, 3)
    for pred, target in ((one, one), (one, one.flatten()), (one.flatten(), one.flatten()), (numbers, numbers)):
        with pytest.raises(ValueError, match=r"needs classes, and got predictions: float32 .* For numbers use mae"):
            metric(pred, target, loss_func=loss)
    if loss is None:
        for target in (one.flatten().long(), one.long()):
            with pytest.raises(ValueError, match=r"One score for each target is decoded where the loss says how"):
                metric(one, target)
        for each in (None, nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss()):
            with pytest.raises(ValueError, match="needs classes, and got predictions: {'a'"):
                metric({"a": one}, one, loss_func=each)


def test_a_loss_with_a_decode_of_its_own_says_what_is_right():
    class Signs(nn.Module):
        def decode(self, pred):
            return (pred[:, 0] < 0).long()

    assert accuracy(SCORES, (1 - YES.flatten()).long(), loss_func=Signs()) == 1
    masks = Signs()
    masks.decode = lambda pred: pred > 0  # a mask of all classes, for targets that are one of them
    assert accuracy(PRED, TARGET, loss_func=masks) == accuracy(PRED, TARGET)
    unsure = nn.CrossEntropyLoss()
    unsure.decode = lambda pred: torch.where(pred.amax(1) > 1.5, pred.argmax(1), -1)
    assert accuracy(PRED, TARGET, loss_func=unsure) == 0.5
    assert accuracy(PRED, torch.tensor([0, 2, 1, 0]), loss_func=unsure) == 0.75
    assert accuracy(SCORES, torch.zeros(4, dtype=torch.long), loss_func=nn.CrossEntropyLoss()) == 1  # one class alone
    second = nn.CrossEntropyLoss()  # of a model with two outputs
    second.decode = lambda pred: pred[1].argmax(1)
    assert accuracy((SCORES, PRED), TARGET, loss_func=second) == accuracy(PRED, TARGET)
    dice = Dice()
    dice.use_loss(second)
    with pytest.raises(ValueError, match=r"dice takes scores in one tensor, and got predictions: \(float32 .*Accum"):
        dice.update((SCORES, PRED), TARGET)


@pytest.mark.parametrize("axis", [1, -1])
def test_tokens_count_and_ignored_ones_do_not(axis):
    g = torch.Generator().manual_seed(0)
    scores, target = torch.randn(3, 5, 7, generator=g), torch.randint(7, (3, 5), generator=g)
    target[0, 1:], target[2, 4] = -100, -100
    flat, mask = scores.reshape(-1, 7), target.flatten() >= 0
    expected = (flat.argmax(1) == target.flatten())[mask].double().mean()
    best = (flat.topk(3).indices == target.reshape(-1, 1)).any(1)[mask].double().mean()
    pred = scores.movedim(-1, axis)
    loss = nn.CrossEntropyLoss() if axis == 1 else None
    assert accuracy(pred, target, loss_func=loss) == expected
    assert error_rate(pred, target, loss_func=loss) == 1 - expected
    assert top_k_accuracy(pred, target, k=3, loss_func=loss) == best
    (meter,) = make_meters(accuracy, loss)
    meter.reset()
    for i in range(3):  # each with another number of tokens that count
        meter.update(i, 1, pred[i : i + 1], (target[i : i + 1],))
    assert meter.result(sharded=False) == pytest.approx(expected.item(), abs=1e-15)
    assert not meter.depends_on_cut(3, pred, (target,))
    state, twin = meter.state_dict(), make_meters(accuracy, loss)[0]
    twin.reset()
    twin.load_state_dict(state)
    assert twin.result(sharded=False) == meter.result(sharded=False)
    padded = target.masked_fill(target < 0, 6)
    padding = nn.CrossEntropyLoss(ignore_index=6)
    real = padded.flatten() != 6
    if axis == 1:
        counted = (flat.argmax(1) == padded.flatten())[real].double().mean()
        assert accuracy(pred, padded, loss_func=padding) == counted
        square = torch.randn(2, 5, 5, generator=g)  # the loss says which dimension has the classes
        assert accuracy(square, square.argmax(1), loss_func=loss) == 1
    nothing = torch.full((2, 5), -100)
    meter.update(3, 2, pred[:2], (nothing,))
    assert meter.result(sharded=False) == twin.result(sharded=False)


def test_a_vector_may_be_a_reversed_array_or_a_column_of_a_frame():
    pandas = pytest.importorskip("pandas")
    for vector in (np.array([0.5, 0.25])[::-1], pandas.Series([0.25, 0.5], index=[3, 7])):
        (meter,) = make_meters(AccumMetric(lambda pred, target, vector=vector: vector, "share"))
        meter.reset()
        meter.update(0, len(PRED), PRED, (TARGET,))
        assert meter.row(sharded=False) == [0.25, 0.5]
        assert meter.columns == ["share_0", "share_1"]
