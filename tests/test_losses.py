"""What a loss averages over."""

import re
import warnings
from collections import namedtuple
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import make_classes, make_data, make_dls, make_learner, make_model, raises, read_report
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import Callback, DataLoaders, GradientAccumulation, Learner, MixUp
from learnerkit.callbacks.recorder import LossMeter
from learnerkit.distributed import facts
from learnerkit.losses import (
    LossWeight,
    OwnLoss,
    check_shapes,
    is_cross_entropy,
    loss_option,
    loss_parts,
    out_of_range,
    own_loss,
    own_loss_of,
    pred_of,
    unwrap_partial,
)


def split_and_join(loss_func, pred, target, sizes, loss_weight=None):
    """The loss of the whole, put together from the losses of its parts."""
    weight = LossWeight(loss_func, loss_weight)
    parts = list(zip(pred.split(sizes), target.split(sizes), strict=True))
    counts = [float(weight.count((t,), len(t))) for _, t in parts]
    losses = [float(loss_func(p, t)) for p, t in parts]
    if weight.sums:
        return sum(losses)
    return sum(loss * n for loss, n in zip(losses, counts, strict=True) if n) / sum(counts)


CLASS_WEIGHTS = torch.tensor([0.3, 1.0, 2.5])
CROSS_ENTROPIES = [
    nn.CrossEntropyLoss(),
    nn.CrossEntropyLoss(weight=CLASS_WEIGHTS),
    nn.CrossEntropyLoss(ignore_index=1),
    nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, ignore_index=2),
    nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, ignore_index=255),
    nn.CrossEntropyLoss(label_smoothing=0.1),
    nn.CrossEntropyLoss(reduction="sum"),
    F.cross_entropy,
    partial(F.cross_entropy, weight=CLASS_WEIGHTS),
    partial(partial(F.cross_entropy, ignore_index=0), weight=CLASS_WEIGHTS),
    partial(F.cross_entropy, reduction="sum"),
]


@pytest.mark.parametrize("loss_func", CROSS_ENTROPIES, ids=lambda f: re.sub(r" at 0x\w+", "", str(f)))
def test_cross_entropy_of_parts_joins_to_that_of_the_whole(loss_func):
    ignored = loss_option(loss_func, "ignore_index", -100)
    if loss_option(loss_func, "weight") is not None:
        loss_func = _double(loss_func)
    for shape in ((), (5,), (3, 2)):
        pred, target = torch.randn(11, 3, *shape, dtype=torch.float64), torch.randint(3, (11, *shape))
        target.view(-1)[::3] = ignored
        expected = pytest.approx(float(loss_func(pred, target)), rel=1e-9)
        for sizes in ((4, 4, 3), (1, 10), (2, 2, 2, 2, 2, 1)):
            assert split_and_join(loss_func, pred, target, sizes) == expected, (shape, sizes)


def _double(loss_func):
    if isinstance(loss_func, nn.Module):
        return nn.CrossEntropyLoss(weight=CLASS_WEIGHTS.double(), ignore_index=loss_func.ignore_index)
    return partial(loss_func, weight=CLASS_WEIGHTS.double())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("loss_func", [nn.CrossEntropyLoss(CLASS_WEIGHTS.double()), F.cross_entropy], ids=type)
def test_a_compiled_loss_averages_over_what_the_loss_in_it_does(loss_func):
    compiled = torch.compile(loss_func, backend="eager", dynamic=True)
    assert unwrap_partial(partial(compiled)) is loss_func
    x, y = torch.randn(11, 3, dtype=torch.float64), torch.randint(3, (11,))
    y[::3] = -100
    assert split_and_join(compiled, x, y, (4, 7)) == pytest.approx(float(loss_func(x, y)), rel=1e-9)
    dls = DataLoaders(DataLoader(TensorDataset(x, y), 4), device="cpu")
    items = {"with_loss": True, "with_decoded": True}
    found, expected = (Learner(dls, nn.Identity(), f).get_preds(0, **items) for f in (compiled, loss_func))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("loss_func", [nn.MSELoss(), nn.L1Loss(), F.mse_loss, nn.BCEWithLogitsLoss(), nn.MSELoss(reduction="sum")])  # fmt: skip  # noqa: E501
def test_means_over_samples_join_by_samples(loss_func):
    pred, target = torch.randn(11, 2, dtype=torch.float64), torch.rand(11, 2, dtype=torch.float64)
    expected = float(loss_func(pred, target))
    assert split_and_join(loss_func, pred, target, (4, 4, 3)) == pytest.approx(expected, rel=1e-9)


def test_nll_loss_is_a_cross_entropy_too():
    loss_func = nn.NLLLoss(weight=CLASS_WEIGHTS.double(), ignore_index=1)
    pred, target = torch.randn(11, 3, dtype=torch.float64).log_softmax(1), torch.randint(3, (11,))
    assert split_and_join(loss_func, pred, target, (4, 7)) == pytest.approx(float(loss_func(pred, target)), rel=1e-9)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="this torch does not have it")
@pytest.mark.parametrize(
    "options",
    [{}, {"weight": CLASS_WEIGHTS.double()}, {"ignore_index": 0}, {"out_features": (5,)}, {"reduction": "sum"}],
)
def test_a_cross_entropy_with_a_layer_of_its_own_averages_over_targets(options):
    loss_func = nn.LinearCrossEntropyLoss(4, 3, dtype=torch.float64, **options).requires_grad_(False)
    shape = options.get("out_features", ())
    pred, target = torch.randn(11, 4, dtype=torch.float64), torch.randint(3, (11, *shape))
    target.view(-1)[::3] = options.get("ignore_index", -100)
    assert split_and_join(loss_func, pred, target, (4, 7)) == pytest.approx(float(loss_func(pred, target)), rel=1e-9)
    if shape:
        dls = DataLoaders(DataLoader(TensorDataset(pred, target), 4), device="cpu")
        *_, losses = Learner(dls, nn.Identity(), loss_func).get_preds(0, with_loss=True)
        each = torch.stack([loss_func(x[None], y[None]) for x, y in zip(pred, target, strict=True)])
        torch.testing.assert_close(losses, each)


def test_classes_may_be_uint8_where_156_is_one_of_them_and_not_minus_100():
    loss_func = nn.CrossEntropyLoss(weight=torch.rand(200, dtype=torch.float64) + 0.1)
    pred, target = torch.randn(11, 200, dtype=torch.float64), torch.arange(150, 161, dtype=torch.uint8)
    expected = float(loss_func(pred, target.long()))
    assert split_and_join(loss_func, pred, target, (4, 7)) == pytest.approx(expected, rel=1e-9)
    assert (
        out_of_range(loss_func, pred[:, :150], target[6:7])[1]
        == "let the model have 157 outputs, or correct the targets"
    )


def test_class_probabilities_are_averaged_over_samples():
    loss_func = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS.double())
    pred = torch.randn(11, 3, dtype=torch.float64)
    target = torch.randn(11, 3, dtype=torch.float64).softmax(1)
    assert split_and_join(loss_func, pred, target, (4, 7)) == pytest.approx(float(loss_func(pred, target)), rel=1e-9)


def test_the_common_case_costs_no_tensor():
    for loss_func in (nn.CrossEntropyLoss(), nn.MSELoss(), lambda p, t: p.sum()):
        assert LossWeight(loss_func).count((torch.zeros(4).long(),), 4) == 4
        assert type(LossWeight(loss_func).count((torch.zeros(4).long(),), 4)) is int


def test_rows_of_predictions_count_where_each_has_a_target():
    weight, pred = LossWeight(lambda pred, y: pred.mean()), torch.zeros(10)
    assert [weight.count((torch.zeros(n),), 4, pred) for n in (10, 4)] == [10, 4]


def test_a_count_of_ones_own_weighs_the_batches():
    weight = LossWeight(F.mse_loss, lambda a, b: (a > b).sum())
    assert int(weight.count((torch.tensor([1, 5]), torch.tensor([2, 3])), 2)) == 1
    assert not weight.sums
    assert isinstance(LossWeight(F.mse_loss, lambda y: 3).count((torch.zeros(2),), 2), torch.Tensor)
    assert int(weight.count((torch.zeros(0), torch.zeros(0)), 0)) == 0
    assert weight.count((), 5) == 5


@pytest.mark.parametrize(
    ("loss_func", "loss_weight", "sums"),
    [
        (nn.MSELoss(), None, False),
        (nn.MSELoss(reduction="sum"), None, True),
        (partial(F.mse_loss, reduction="sum"), None, True),
        (lambda p, t: p.sum(), "sum", True),
        (lambda p, t: p.sum(), None, False),
        (None, None, False),
    ],
)
def test_a_loss_is_known_to_sum_or_to_average(loss_func, loss_weight, sums):
    assert LossWeight(loss_func, loss_weight).sums is sums


@pytest.mark.parametrize("wrong", ["mean", 3, True, "", {}])
def test_another_loss_weight_is_refused(wrong):
    with pytest.raises(ValueError, match="it takes None, 'sum', or a function of the targets"):
        LossWeight(nn.MSELoss(), wrong)


@pytest.mark.parametrize("loss_func", [nn.MSELoss(reduction="none"), partial(F.mse_loss, reduction="none")])
def test_a_loss_without_reduction_is_refused(loss_func):
    with pytest.raises(ValueError, match="reduction='none', so the loss is not a scalar"):
        LossWeight(loss_func)
    LossWeight(loss_func, lambda y: len(y))  # who gives a count knows better


class FocalLoss(nn.CrossEntropyLoss):
    """Takes the mean itself, of losses that it weighs."""

    def __init__(self):
        super().__init__(reduction="none")

    def forward(self, pred, target):
        losses = super().forward(pred, target)
        return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def test_a_loss_that_takes_the_mean_itself_may_be_made_without_reduction():
    learn = make_learner(make_dls(data=make_classes), make_model(n_out=3), FocalLoss())
    learn.fit(1)
    expected = [FocalLoss()(learn.model(x), y).item() for x, y in learn.dls.valid]
    assert learn.validate() == pytest.approx(expected)


@pytest.mark.parametrize(
    "options", [{"weight": torch.tensor([1.0, 5.0, 0.2])}, {"reduction": "sum"}], ids=["weights", "sum"]
)
@pytest.mark.parametrize("event", ["before_fit", "before_epoch", "before_train"])
def test_the_counts_are_those_of_a_loss_that_a_callback_puts_in_its_place(options, event):
    found = []
    for bs, n in ((4, 3), (12, 1)):

        def replace(cb):
            cb.learn.loss_func = nn.CrossEntropyLoss(**options)

        learn = make_learner(make_dls(22, bs=bs, data=make_classes), make_model(n_out=3), nn.CrossEntropyLoss())
        learn.fit(2, 0.05, cbs=[Callback(**{event: replace}), GradientAccumulation(n_batches=n)])
        found.append(learn)
    torch.testing.assert_close(*(learn.recorder.values for learn in found), rtol=1e-5, atol=0)
    torch.testing.assert_close(*(learn.model.state_dict() for learn in found), rtol=1e-5, atol=1e-6)


def test_options_are_found_on_modules_and_through_partials():
    assert loss_option(nn.CrossEntropyLoss(ignore_index=3), "ignore_index") == 3
    assert loss_option(partial(F.cross_entropy, ignore_index=3), "ignore_index") == 3
    assert loss_option(partial(partial(F.cross_entropy, ignore_index=3), weight=None), "ignore_index") == 3
    assert loss_option(partial(nn.CrossEntropyLoss(ignore_index=3)), "ignore_index") == 3
    assert loss_option(F.mse_loss, "ignore_index", 7) == 7
    assert loss_option(None, "reduction") is None


def test_cross_entropies_are_told_from_other_losses():
    assert all(map(is_cross_entropy, (*CROSS_ENTROPIES, nn.NLLLoss(), F.nll_loss, partial(nn.NLLLoss()))))
    assert not any(map(is_cross_entropy, (nn.MSELoss(), F.mse_loss, nn.BCELoss(), None, print)))
    assert unwrap_partial(partial(partial(F.mse_loss, a=1), b=2)) is F.mse_loss


# Losses that a model makes itself


def tokens(n=6, t=7, classes=5, padding=-100):
    target = torch.randint(classes, (n, t))
    for i in range(n):
        target[i, t - i :] = padding
        target[i, : i // 2] = padding  # a prompt
    return target


class Own(nn.Module):
    """Has what a model may show of its own loss."""

    def __init__(self, *losses):
        super().__init__()
        self.losses = nn.ModuleList(losses)

    def forward(self, x, labels):
        return x


class TakesCount(Own):
    """Takes what the loss is to average over."""

    def forward(self, x, labels, *, num_items_in_batch=None):
        return x


class TakesAny(Own):
    """Says, as models of transformers do, whether it takes the same among other keywords."""

    def __init__(self, accepts):
        super().__init__()
        self.accepts_loss_kwargs = accepts

    def forward(self, x, labels, **kwargs):
        return x


@pytest.mark.parametrize(
    ("model", "ignored"),
    [
        (Own(), -100),
        (Own(nn.CrossEntropyLoss(ignore_index=0)), 0),
        (Own(nn.CrossEntropyLoss(ignore_index=-1), nn.NLLLoss(ignore_index=-1), nn.MSELoss()), -1),
        (Own(nn.CrossEntropyLoss(ignore_index=0), nn.NLLLoss(ignore_index=1)), -100),
    ],
)
def test_targets_that_the_models_own_loss_does_not_ignore_are_counted(model, ignored):
    target = tokens(padding=ignored)
    count = LossWeight(None, None, model).count((target,), 6)
    assert (count.ndim, int(count)) == (0, int((target != ignored).sum()))
    assert LossWeight(None, None, model).count((target[:, 0],), 6) == (target[:, 0] != ignored).sum()


def test_a_loss_that_shifts_leaves_the_first_target_of_each_row_out():
    target = torch.tensor([[-100, 1, 2, 3], [4, 5, 6, 7]])
    assert OwnLoss(shifts=True).count(target) == 3 + 3
    scores = torch.randn(2, 4, 9)
    given, (targets,) = OwnLoss(shifts=True).paired(scores, (target,))
    assert torch.equal(given, scores[:, :-1])
    assert torch.equal(targets, target[:, 1:])
    assert OwnLoss().paired(scores, (target,)) == (scores, (target,))


def test_what_is_no_tensor_of_integers_counts_by_samples():
    classes = torch.randint(3, (9,))
    for yb in ((torch.rand(9),), (classes, classes), (), ([{"boxes": classes}],), (torch.tensor(3),)):
        assert LossWeight(None, None, Own()).count(yb, 9, torch.randn(9, 3)) == 9


def test_nothing_is_read_of_predictions_and_loss_and_targets_are_not_waited_for():
    target = torch.empty(6, 7, dtype=torch.long, device="meta")
    count = LossWeight(None, None, TakesCount()).count((target,), 6, torch.empty(6, 7, 5, device="meta"))
    assert count.device.type == "meta"
    assert LossWeight(None, None, TakesCount()).passed((target,))["num_items_in_batch"].device.type == "meta"


def test_the_count_is_passed_to_models_that_take_it():
    target = tokens()
    for model, takes in ((Own(), False), (TakesCount(), True), (TakesAny(True), True), (TakesAny(False), False)):
        weight = LossWeight(None, None, nn.DataParallel(model))
        assert weight.passed((target,)) == ({"num_items_in_batch": (target != -100).sum()} if takes else {})
        assert weight.passed(()) == weight.passed((target, target)) == weight.passed((target.float(),)) == {}
    nothing = torch.full_like(target, -100)  # of which the mean would be a NaN
    assert LossWeight(None, None, TakesCount()).passed((nothing,)) == {"num_items_in_batch": 1}
    assert LossWeight(None, "samples", TakesCount()).passed((target,)) == {}
    assert LossWeight(F.mse_loss, None, TakesCount()).passed((target,)) == {}


def test_what_is_known_of_a_models_own_loss():
    target, classes = tokens(), torch.arange(9) % 3
    unlabelled = torch.where(classes == 0, -1, classes)
    for model, yb, known in (
        (Own(), (classes,), True),
        (Own(), (torch.where(classes == 0, -100, classes),), True),
        (Own(), (unlabelled,), False),
        (Own(nn.CrossEntropyLoss(ignore_index=-1)), (unlabelled,), True),
        (Own(), (target,), False),
        (Own(), (classes, classes), False),
        (Own(), (torch.rand(9),), False),
        (Own(), (), False),
        (TakesCount(), (target,), True),
        (TakesCount(), (tokens(padding=-1),), False),
        (TakesCount(), (target.float(),), False),
        (TakesAny(True), (target,), True),
        (TakesAny(False), (target,), False),
    ):
        assert own_loss_of(model).is_known(yb) is known, (model, yb)


class Adapted(nn.Module):
    """Adds adapters to another model, as peft's `PeftModel` does."""

    def __init__(self, base, is_prompt_learning):
        super().__init__()
        self.base, self.active_peft_config = base, SimpleNamespace(is_prompt_learning=is_prompt_learning)

    def get_base_model(self):
        return self.base

    def forward(self, *args, **kwargs):
        return self.base(*args, **kwargs)


def test_a_model_with_adapters_makes_the_loss_of_the_one_inside_it():
    target = tokens()
    assert LossWeight(None, None, Adapted(TakesCount(), False)).passed((target,)) == {
        "num_items_in_batch": (target != -100).sum()
    }
    assert LossWeight(None, None, Adapted(TakesCount(), True)).passed((target,)) == {}  # prompts lengthen the rows
    assert own_loss_of(Adapted(Own(nn.CrossEntropyLoss(ignore_index=-1)), False)).ignore_index == -1


class Counted(nn.Module):
    """Sums over its tokens what it divides by the count that it gets, else by their number; 0 is padding for it."""

    def __init__(self):
        super().__init__()
        self.body, self.got = nn.Embedding(5, 5).double(), []

    def forward(self, ids, labels, num_items_in_batch=None):
        self.got.append(num_items_in_batch)
        total = F.cross_entropy(self.body(ids).mT, labels, reduction="sum", ignore_index=0)
        return {"loss": total / num_items_in_batch}


@pytest.mark.parametrize("batch", [dict, tuple])
def test_a_model_gets_the_count_of_the_targets_there_are(batch):
    target = tokens(padding=0)
    rows = [{"ids": row, "labels": row} if batch is dict else (row, row) for row in target]
    dl, model = DataLoader(rows, 4), Counted()
    dls = DataLoaders(dl, dl, device="cpu")

    def lose(cb):
        cb.learn.yb = (cb.learn.yb[0].where(torch.arange(7) > 1, -100),)

    learn = Learner(dls, model, lr=0.0, cbs=Callback(before_batch=lose))
    learn.fit(1)
    assert model.got == [20, 10] * 2  # in validation, too
    model.got.clear()
    learn.get_preds()
    assert model.got == [20, 10]


def test_a_count_in_the_batch_is_left_alone():
    target, model = tokens(padding=0), Counted()
    batch = {"ids": target, "labels": target, "num_items_in_batch": torch.tensor(3)}
    Learner(DataLoaders([batch], device="cpu"), model).fit(1)
    assert model.got == [3]


def test_who_says_what_the_loss_averages_over_is_believed():
    target = tokens()
    assert LossWeight(None, lambda y: y.numel()).count((target,), 6) == target.numel()
    assert LossWeight(None, "sum").count((target,), 6) == 6
    assert LossWeight(None, "sum").sums
    # Rows that are compared are no samples to who has said so.
    assert LossWeight(None, "samples").count((torch.rand(20),), 9, torch.rand(20)) == 9
    for said in ("samples", "sum", len):
        assert LossWeight(None, said, Own()).own is None


class Doubtful(nn.Module):
    """Makes a loss of each kind of batch that a test gives it."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(1, 1)

    def forward(self, x, **targets):
        loss = self.body(x).square().mean()
        return {"first": loss, "second": loss} if "boxes" in targets else {"loss": loss}


DOUBTFUL = {  # what is in the batch beside the inputs: (targets, what is told)
    "tokens": ({"labels": tokens()}, "it is taken for the mean over the 21 of 42 targets that are not -100"),
    "numbers": ({"labels": torch.rand(6)}, "it is taken for a mean over samples. If it is one, say loss_weight='sam"),
    "two": ({"labels": torch.ones(6), "targets": torch.ones(6)}, "it is taken for a mean over samples"),
    "none": ({}, "it is taken for a mean over samples.*targets with names of their own: DataLoaders"),
    "losses": ({"boxes": torch.ones(6)}, "first . second is taken for a mean over samples"),
    "unlabelled": (
        {"labels": torch.tensor([0, 1, -1, 1, 0, -1])},
        "it is taken for .* 6 of 6 .* not -100, negative ones among them",
    ),
}


@pytest.mark.parametrize("kind", DOUBTFUL)
def test_what_is_not_known_is_told_in_the_first_batch_of_a_fit_and_once(kind, monkeypatch):
    monkeypatch.setattr(facts, "_warned", set())
    targets, words = DOUBTFUL[kind]
    batch, told = {"x": torch.randn(6, 1), **targets}, []
    part = {key: t[:3] for key, t in batch.items()}  # of which the same would be said with other numbers
    learn = Learner(DataLoaders([batch, part, batch], [batch], device="cpu"), Doubtful())
    learn.add_cb(Callback(after_loss=lambda cb: told.append(len(caught))))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learn.validate()
        learn.fit(2)
    messages = [str(w.message) for w in caught]
    assert len(messages) == 1, messages
    assert re.search(f"^the model makes its own loss, and it is not known .*: {words}", messages[0]), messages
    assert told[:2] == [0, 1]  # not in the validation before
    learn.loss_weight = "samples"
    learn.fit(1)  # without a warning, which would be an error


def test_a_learner_that_makes_the_loss_itself_is_not_asked():
    class Mine(Learner):
        def _loss(self):
            self.loss_grad = self.pred["loss"]
            self.loss = self.loss_grad.detach()

    Mine(DataLoaders([{"x": torch.randn(6, 1), "labels": torch.rand(6)}], device="cpu"), Doubtful()).fit(1)


@pytest.mark.parametrize(
    ("function", "n", "got"),
    [
        (lambda y: y, 1, "y"),
        (lambda out, y: out, 1, "out"),
        (lambda out: out, 0, "out"),
        (lambda a, b: a, 2, "y"),
        (lambda out, a, b: out, 2, "out"),
        (lambda *yb: yb[0], 1, "y"),
        (lambda out, *yb: out, 1, "out"),
        (lambda out, *yb: out, 2, "out"),
        (lambda a, pad=0: a, 1, "y"),
        (lambda out, y, pad=0: out, 1, "out"),
        (partial(lambda out, y, pad: out, pad=0), 1, "out"),
        (torch.mean, 1, "y"),  # which Python knows no signature of
    ],
)
def test_a_function_gets_the_output_if_it_takes_an_argument_more_than_there_are_targets(function, n, got):
    found = {"y": torch.tensor(3), "out": torch.tensor(7)}
    found |= {"y": found["y"].float()} if function is torch.mean else {}
    weight = LossWeight(None, function)
    assert weight.count((found["y"],) * n, 9, output=found["out"]) == found[got]
    assert weight.takes_output((0,) * n) == (got == "out")


def test_a_function_that_takes_other_arguments_or_returns_no_number_is_refused():
    for function, takes in ((lambda: 1, "takes 0 arguments"), (lambda a, b, c: a, "takes 3 arguments")):
        with pytest.raises(ValueError, match=f"{takes} by position, and a batch has 1 targets"):
            LossWeight(None, function).count((torch.ones(2),), 2, output=1)
    for wrong in (lambda y: y != -100, lambda y: None, lambda y: "12"):
        with pytest.raises(ValueError, match="loss_weight returned .*; it returns one number"):
            LossWeight(F.mse_loss, wrong).count((torch.ones(2),), 2)


def test_no_gradient_flows_through_a_count():
    shares = torch.rand(4, requires_grad=True)
    assert not LossWeight(None, lambda out, y: out.sum()).count((0,), 4, output=shares).requires_grad


# Shapes that would be broadcast

ELEMENTWISE = [nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss(), F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss]  # fmt: skip  # noqa: E501


@pytest.mark.parametrize(
    "loss_func",
    [
        *ELEMENTWISE,
        nn.PoissonNLLLoss(),
        F.kl_div,
        nn.HingeEmbeddingLoss(),
        F.hinge_embedding_loss,
        nn.MultiLabelSoftMarginLoss(),
        F.multilabel_soft_margin_loss,
    ],
)
def test_shapes_that_an_elementwise_loss_would_broadcast(loss_func):
    wrapped = [] if isinstance(loss_func, nn.Module) else [partial(loss_func, reduction="mean")]
    for loss in (loss_func, *wrapped):
        for pred, target in (((32, 1), (32,)), ((32,), (32, 1)), ((32, 3), (32, 1)), ((4, 2), (2, 4))):
            with pytest.raises(ValueError, match="they must be the same") as e:
                check_shapes(loss, torch.zeros(pred), (torch.zeros(target),))
            assert str(pred) in str(e.value)
            assert str(target) in str(e.value)


@pytest.mark.parametrize("loss_func", [*ELEMENTWISE, nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss(), torch.dist])
def test_equal_shapes_pass_and_other_losses_are_left_alone(loss_func):
    check_shapes(loss_func, torch.zeros(4, 2), (torch.zeros(4, 2),))
    check_shapes(nn.CrossEntropyLoss(), torch.zeros(4, 2), (torch.zeros(4),))
    check_shapes(loss_func, torch.zeros(4, 2), (torch.zeros(4), torch.zeros(3)))
    check_shapes(loss_func, {"a": 1}, (torch.zeros(4),))


def test_the_loss_of_a_model_is_its_loss_or_the_sum_of_a_dict_of_scalars():
    one, two, rows = torch.tensor(1.0), torch.tensor(2.0), torch.ones(3)
    assert own_loss({"a": one, "b": two}) == 3
    assert own_loss({"loss": one, "b": two}) == 1
    assert own_loss(SimpleNamespace(loss=two)) == 2
    for output in ({}, {"a": one, "rows": rows}, {"loss": None, "a": one}, [{"a": one}], rows, (rows, None)):
        assert own_loss(output) is None, output
    assert own_loss({"a": one, "b": two, "n": 7}, but=["n"]) == 3
    assert loss_parts({"a": one, "b": two}) == {"a": one, "b": two}
    assert loss_parts({"a": one, "b": two}, but={"b"}) == {"a": one}
    assert loss_parts({"a": one, "n": torch.tensor(3)}) == {"a": one}  # a number of something is no loss
    assert loss_parts({"loss": one, "b": two}) == {}


Named = namedtuple("Named", ["loss", "scores"])


def test_what_a_model_returns_by_place_is_its_predictions_and_the_one_scalar():
    loss, scores, hidden, n = torch.tensor(1.0), torch.ones(3), torch.zeros(2), torch.tensor(4)
    for output, pred, found in (
        ((scores, loss), scores, loss),
        ([loss, scores, hidden], scores, loss),
        ((scores, None, hidden), scores, None),
        ((scores, loss, None), scores, loss),
        ((n, loss), n, loss),  # a number of something is no loss
        ((loss,), None, loss),
        (loss, None, loss),
        (n, n, None),
        (scores, scores, None),
    ):
        assert pred_of(output, True) is pred, output
        assert own_loss(output) is found, output
        assert pred_of(output, False) is output
    for output in ((scores, hidden), [{"boxes": scores}], [], {"a": loss}, Named(loss, scores)):
        assert pred_of(output, True) is output  # as nothing of it has the place of a loss
    assert own_loss(Named(loss, scores)) is loss
    assert pred_of({"logits": scores, "loss": loss}, True) is scores
    assert pred_of({"starts": scores, "loss": loss, "ends": hidden}, True) == {"starts": scores, "ends": hidden}
    assert pred_of({"loss": loss}, True) == {"loss": loss}
    for find in (own_loss, partial(pred_of, is_own=True)):
        with raises(ValueError, "scalars in the places 0, 2", "not known which", "return {'loss': ..., 'logits': ...}"):
            find((loss, scores, loss))


# The forms of a loss function


class Margin(nn.Module):
    """A loss that needs the inputs, and says so in `forward`."""

    def __init__(self, reduction="mean"):
        super().__init__()
        self.reduction = reduction

    def forward(self, pred, target, *, x, scale=1.0):
        losses = scale * (pred - target - x[:, :1]).square()
        return losses.mean() if self.reduction == "mean" else losses


def margin(pred, target, *, x, teacher, reduction="mean"):
    losses = (pred - target - x[:, :1]).square() + 0 * teacher(x)
    return losses.mean() if reduction == "mean" else losses


@pytest.mark.parametrize(
    ("loss", "asks", "alone"),
    [
        (nn.CrossEntropyLoss(), (), False),
        (F.mse_loss, (), False),
        (Margin(), ("x",), False),
        (torch.compile(Margin(), backend="eager"), ("x",), False),
        (partial(Margin(), scale=2.0), ("x",), False),
        (partial(Margin(), x=torch.ones(1)), (), False),
        (margin, ("x", "teacher"), False),
        (partial(partial(margin, teacher=abs), reduction="none"), ("x",), False),
        (lambda pred: pred.mean(), (), True),
        (lambda pred, target=None, *, learn: pred.mean(), ("learn",), True),
        (lambda pred, *targets: pred.mean(), (), True),
        (partial(F.mse_loss, target=torch.ones(1)), (), True),
        (lambda *args: F.mse_loss(*args), (), False),  # which does not say how many
        (lambda: 1, (), False),
        (torch.numel, (), False),  # which Python knows no signature of
        (None, (), False),
    ],
)
def test_what_a_loss_function_asks_for_and_if_predictions_are_enough(loss, asks, alone):
    weight = LossWeight(loss, "samples")
    assert (weight.asks, weight.alone) == (asks, alone)


def pairs(n=8, **kwargs):
    """Batches of two inputs without targets."""
    data = TensorDataset(torch.randn(n, 4, generator=torch.Generator().manual_seed(2)), torch.ones(n, 4))
    return DataLoaders(DataLoader(data, 4), DataLoader(data, 4), device="cpu", **{"n_inp": 2} | kwargs)


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)

    def forward(self, a, b):
        return self.body(a), self.body(b)


def apart(pred):
    a, b = pred
    return (a - b).square().mean()


def test_a_loss_without_targets_is_computed_in_training_and_validation_and_not_in_prediction(capsys):
    calls = []

    def loss(pred, target=None):
        calls.append(target)
        return apart(pred)

    learn = make_learner(pairs(), Pairs(), loss)
    learn.fit(2)
    assert calls == [None] * 8
    (train, valid), (_, last) = (row[:2] for row in learn.recorder.values)
    assert train > valid > last > 0
    assert learn.validate() == [last]
    calls.clear()
    (a, _), targets = learn.get_preds()
    learn.predict((torch.ones(4), torch.ones(4)))
    assert (a.shape, targets, calls) == ((8, 3), None, [])
    learn.check()
    assert "all is well" in capsys.readouterr().out


@pytest.mark.parametrize("loss", [nn.MSELoss(), lambda *args: F.mse_loss(*args)])
def test_a_loss_that_needs_targets_is_not_called_without(loss):
    learn = make_learner(pairs(), Pairs(), loss)
    for run in (partial(learn.fit, 1), learn.validate):
        with pytest.raises(ValueError, match="there is no loss: the batch .* has no targets"):
            run()


def test_a_loss_without_targets_has_a_value_for_each_sample():
    def loss(pred, reduction="mean"):
        losses = (pred[0] - pred[1]).square().mean(1)
        return losses.mean() if reduction == "mean" else losses

    learn = make_learner(pairs(), Pairs(), loss)
    *_, losses = learn.get_preds(with_loss=True)
    assert losses.mean().item() == pytest.approx(learn.validate()[0])


def test_a_count_of_a_loss_without_targets_gets_the_predictions():
    weight = LossWeight(apart, lambda pred: (pred > 0).sum())
    assert weight.count((), 3, torch.tensor([1, -1, 2]), "output") == 2


def test_a_loss_gets_the_attributes_of_the_learner_that_it_asks_for():
    found = []

    def loss(pred, target, *, learn, x, xb, batch, model, output, epoch, pct_train, training, mixed=None):
        assert learn.xb is xb
        assert (xb[0] is x, batch[0] is x, model is learn.model, output is learn.output, mixed) == (True,) * 4 + (None,)
        found.append((epoch, pct_train, training))
        return F.mse_loss(pred, target)

    learn = make_learner(loss_func=loss)
    learn.fit(2)
    assert found == [(0, 0, True), (0, 0.25, True), (0, 0.5, False), (1, 0.5, True), (1, 0.75, True), (1, 1, False)]
    plain = make_learner(loss_func=nn.MSELoss())
    plain.fit(2)
    assert plain.recorder.values == learn.recorder.values


@pytest.mark.parametrize("loss", [Margin(), partial(margin, teacher=lambda x: x[:, :1])])
def test_a_loss_that_needs_the_inputs_gives_the_loss_of_each_sample_too(loss, capsys):
    learn = make_learner(loss_func=loss)
    learn.fit(1)
    *_, losses = learn.get_preds(with_loss=True)
    assert losses.shape == (4,)
    assert losses.mean().item() == pytest.approx(learn.validate()[0])
    learn.check()
    assert "all is well" in capsys.readouterr().out


def test_mixed_inputs_are_what_the_loss_gets():
    seen = []

    def loss(pred, target, *, x):
        seen.append(x)
        return F.mse_loss(pred, target)

    learn = make_learner(make_dls(valid=None), loss_func=loss, cbs=MixUp())
    learn.fit(1, cbs=Callback(before_batch=lambda cb: seen.append(cb.x), order=-10))
    plain, *mixed = seen[:3]
    assert mixed[0] is mixed[1]
    assert not torch.equal(plain, mixed[0])


def test_a_loss_that_asks_for_what_is_not_there_is_refused():
    def loss(pred, target, *, xs):
        return 0

    with raises(TypeError, "the loss loss asks for 'xs'", "did you mean 'x'", "partial(loss, xs=...)"):
        make_learner(loss_func=loss)
    for name in ("_in_fit", "fit"):
        with raises(TypeError, f"asks for {name!r}"):
            make_learner(loss_func=eval(f"lambda pred, target, *, {name}: 0"))
    learn = make_learner()
    learn.loss_func = loss
    with raises(TypeError, "asks for 'xs'"):
        learn.fit(1)
    learn.loss_func = lambda pred, target, *, mix_up: F.mse_loss(pred, target)
    learn.add_cb(MixUp())
    learn.validate()  # callbacks are attributes, too


# Models that return their loss by place


class Language(nn.Module):
    """Returns (logits, loss), in the manner of nanoGPT; `alone`: the loss alone, in the manner of diffusion models."""

    def __init__(self, alone=False):
        super().__init__()
        self.body, self.alone = nn.Embedding(5, 5), alone

    def forward(self, ids, targets=None):
        logits = self.body(ids)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss if self.alone else (logits, loss)


def ids(n=8):
    rows = torch.arange(n * 7).view(n, 7) % 5
    data = TensorDataset(rows[:, :-1], rows[:, 1:])
    return DataLoaders(DataLoader(data, 4), DataLoader(data, 4), device="cpu")


def last_right(pred, target):
    return (pred[:, -1].argmax(1) == target[:, -1]).float().mean()


def everywhere(target):
    return target.numel()


def test_a_model_that_returns_predictions_and_loss(capsys):
    outputs = []
    model = Language()
    learn = Learner(ids(), model, opt_func=torch.optim.SGD, lr=5.0, metrics=last_right, loss_weight=everywhere)
    learn.fit(3, cbs=Callback(after_pred=lambda cb: outputs.append((cb.output, cb.pred))))
    assert all(len(output) == 2 and output[0] is pred for output, pred in outputs)
    (first, *_), *_, (last, valid, right) = learn.recorder.values
    assert first > last
    assert right == 1
    with torch.no_grad():
        x, y = learn.dls.valid.dataset.tensors
        assert valid == pytest.approx(model(x, y)[1].item(), rel=1e-6)
        preds, targets = learn.get_preds()
        assert torch.equal(preds, model(x)[0])
        assert torch.equal(targets, y)
        assert torch.equal(learn.predict(x[0]).pred, model(x[:1])[0][0])
    capsys.readouterr()
    learn.check()
    assert "!!" not in capsys.readouterr().out
    with raises(ValueError, "there is no loss"):
        learn.validate(dl=learn.dls.test_dl(list(x)))


def test_a_model_that_returns_its_loss_alone(capsys):
    learn = Learner(ids(), Language(alone=True), loss_weight=everywhere, lr=0.1)
    learn.fit(2)
    assert learn.recorder.values[1][1] < learn.recorder.values[0][1]
    capsys.readouterr()
    learn.check()
    assert "all is well" in capsys.readouterr().out
    learn.metrics = [last_right]
    for run in (learn.get_preds, learn.validate, partial(learn.fit, 1)):
        with raises(ValueError, "there are no predictions: the model returned float32 tensor of shape ()"):
            run()
    with raises(ValueError, "there are no predictions"):
        Learner(ids(), LossOfInputs()).predict(torch.ones(4))


class LossOfInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x):
        return (self.body(x) - x).square().mean()


def test_what_a_learner_with_a_loss_of_its_own_gets_is_the_whole_output():
    class Mine(Learner):
        def _loss(self):
            a, b, c = self.pred
            self.loss_grad = a + b + c.sum()
            self.loss = self.loss_grad.detach()

    class Three(LossOfInputs):
        def forward(self, x):
            return super().forward(x), super().forward(x), self.body(x)

    Mine(make_dls(valid=None), Three()).fit(1)


# Counts that the model returns


class Counts(nn.Module):
    """Returns two losses as a dict, means over what each counts, and the counts; `whole`: their sum as `loss`."""

    def __init__(self, whole=False):
        super().__init__()
        self.body, self.whole = nn.Linear(4, 2), whole

    def forward(self, x, targets=None):
        first, second = self.body(x).square().unbind(1)
        kept = x[:, 0] > 0
        losses = {"first": first[kept].mean(), "second": second.mean()}
        losses = {"loss": sum(losses.values())} if self.whole else losses
        return losses | {"n_kept": kept.sum(), "n": len(x)}


@pytest.mark.parametrize("whole", [True, False])
def test_a_count_that_the_model_returns_is_no_loss_and_has_no_column(whole):
    class WithTwo(Counts):
        def forward(self, x, targets=None):
            return {k: v for k, v in super().forward(x).items() if k != "n"}

    learn = Learner(make_dls(valid=None), WithTwo(whole), loss_weight="n_kept", lr=0.1)
    counts, losses = [], []
    learn.fit(1, cbs=Callback(after_batch=lambda cb: [counts.append(cb.learn.loss_count), losses.append(cb.loss)]))
    x, _ = learn.dls.train.dataset.tensors
    assert [int(count) for count in counts] == [(part[:, 0] > 0).sum() for part in x.split(4)]
    names = learn.recorder.metric_names
    assert names == ["epoch", "train_loss", *([] if whole else ["first", "second"]), "time"]
    mean = sum(loss * n for loss, n in zip(losses, counts, strict=True)) / sum(counts)
    assert learn.recorder.values[0][0] == pytest.approx(mean.item())


def test_a_name_that_the_output_does_not_have_is_told_at_the_first_batch():
    outputs = {"loss": 1, "positives": 3}, Named(1, 2), torch.ones(2)
    for output, near in zip(outputs, ("did you mean 'positives'", "", "float32 tensor"), strict=True):
        with raises(ValueError, "loss_weight='positive' is the name", near, "let it return the count under that name"):
            LossWeight(None, "positive").count((), 3, output=output)
    assert LossWeight(None, "scores").count((), 3, output=Named(1, 2)) == 2
    assert LossWeight(None, "scores").count((), 0, output=Named(1, 2)) == 0  # of no samples
    assert LossWeight(F.mse_loss, "n").count((1,), 3, torch.ones(3), {"logits": torch.ones(3), "n": 2}) == 2


# A weight for each of several losses


def test_a_weight_for_each_loss_counts_each_by_itself():
    weight = LossWeight(None, {"a": "samples", "b": "n", "c": lambda out, y: out["n"] + len(y), "d": "sum"})
    losses = {name: torch.tensor(2.0) for name in "abcd"}
    output = losses | {"n": torch.tensor(5)}
    assert (weight.entries, weight.sums, weight.own) == ({"n"}, False, None)
    assert weight.count((torch.ones(3),), 3, output=output) == 3
    found = weight.counts_of((torch.ones(3),), 3, output)
    assert {name: int(count) for name, (_, count) in found.items()} == {"a": 3, "b": 5, "c": 8, "d": 3}
    assert own_loss(output, weight.entries) == 8


def test_weights_of_other_losses_than_there_are_are_refused():
    with raises(ValueError, "a weight for each of several losses", "without a loss_func"):
        LossWeight(F.mse_loss, {"a": "sum"})
    for wrong in (None, {"b": "sum"}, ""):
        with raises(ValueError, "each weight is a function, a name, 'samples' or 'sum'"):
            LossWeight(None, {"a": wrong})
    one, weight = torch.tensor(1.0), LossWeight(None, {"boxes": "samples", "classes": "samples"})
    for output, words in (
        ({"box": one, "classes": one}, "returned are box, classes; did you mean 'box'"),
        ({"boxes": one}, "returned are boxes"),
        ({"boxes": one, "classes": one, "more": one}, "returned are boxes, classes, more"),
        ({"loss": one}, "returned are {'loss': float32 tensor"),
    ):
        with raises(ValueError, "loss_weight= has a weight for each of boxes, classes", words):
            weight.counts_of((), 2, output)


def test_weights_of_the_parts_of_a_loss_that_the_learner_makes_are_refused():
    class Mine(Learner):
        def _loss(self):
            self.loss_grad = self.loss = self.output["first"]

    with raises(ValueError, "Mine has a `_loss` of its own"):
        Mine(make_dls(), Counts(), loss_weight=BY_PARTS)


BY_PARTS = {"first": "n_kept", "second": "n"}


def test_the_table_has_the_mean_of_each_loss_over_what_it_counts_and_their_sum():
    dls = make_dls(data=lambda n, seed=0: make_data(n + 2, seed=seed))  # the last batches are smaller
    learn = Learner(dls, Counts(), loss_weight=BY_PARTS, lr=0.0)
    learn.fit(1)
    train, valid, first, second = learn.recorder.values[0]
    with torch.no_grad():
        for loss, dl in ((train, learn.dls.train), (valid, learn.dls.valid)):
            whole = learn.model(dl.dataset.tensors[0])
            assert loss == pytest.approx(float(whole["first"] + whole["second"]), rel=1e-6)
        whole = learn.model(learn.dls.train.dataset.tensors[0])
    assert (first, second) == pytest.approx((float(whole["first"]), float(whole["second"])), rel=1e-6)
    assert learn.recorder.metric_names == ["epoch", "train_loss", "valid_loss", "first", "second", "time"]
    assert learn.validate() == [pytest.approx(valid)]


def test_what_was_recorded_of_parts_goes_on_after_a_break_and_on_one_rank_after_two():
    ranks = []
    for values in ([1.0, 2.0], [3.0]):
        meter = LossMeter(["a", "b"])
        for value in values:
            meter.parts["a"].append(value, 2 * value)
        ranks.append(meter.state_dict())

    def restored(states):
        meter = LossMeter(["a", "b"])
        meter.load_ranks(states, sums=False, counted=True)
        return meter

    one = restored(ranks[:1])
    assert one.state_dict() == ranks[0]
    assert one.mean(False, False) == (1 * 2 + 2 * 4) / 6  # of `b` there is nothing
    assert restored(ranks).mean(False, False) == pytest.approx((1 * 2 + 2 * 4 + 3 * 6) / 12)


def test_a_part_that_counts_nothing_is_left_out():
    data = TensorDataset(-torch.rand(4, 4), torch.ones(4, 1))
    learn = Learner(DataLoaders(DataLoader(data, 2), device="cpu"), Counts(), loss_weight=BY_PARTS, lr=0.1)
    learn.fit(1)
    assert all(p.isfinite().all() for p in learn.model.parameters())
    assert all(loss > 0 for loss in learn.recorder.losses)


def test_accumulation_of_parts_is_refused():
    learn = Learner(make_dls(), Counts(), loss_weight=BY_PARTS, cbs=GradientAccumulation(n_batches=2))
    with raises(ValueError, "GradientAccumulation cannot weigh the parts", "larger batches"):
        learn.fit(1)


# The first batch of a fit


class Ends(nn.Module):
    """A linear layer, and what it ends with."""

    def __init__(self, end, n_out=3):
        super().__init__()
        self.body, self.end = nn.Linear(4, n_out), end

    def forward(self, x):
        return self.end(self.body(x))


@pytest.mark.parametrize(
    ("end", "loss", "doubt"),
    [
        (nn.Softmax(1), nn.CrossEntropyLoss(), "a softmax before CrossEntropyLoss"),
        (lambda x: x.softmax(-1), F.cross_entropy, "a softmax before cross_entropy"),
        (lambda x: x.softmax(1).unsqueeze(2).squeeze(2), partial(F.cross_entropy), "a softmax before cross_entropy"),
        (nn.Softmax(1), nn.NLLLoss(), "a softmax before NLLLoss. It takes logarithms"),
        (nn.Sigmoid(), nn.BCEWithLogitsLoss(), "a sigmoid before BCEWithLogitsLoss"),
        (lambda x: x.sigmoid().view(-1), lambda p, y: F.binary_cross_entropy_with_logits(p, y.view(-1)), ""),  # unknown
        (nn.LogSoftmax(1), nn.CrossEntropyLoss(), ""),  # the same twice is the same
        (nn.LogSoftmax(1), nn.NLLLoss(), ""),
        (nn.Sigmoid(), nn.CrossEntropyLoss(), ""),
        (nn.Softmax(0), nn.CrossEntropyLoss(), ""),  # over the samples
        (nn.Softmax(1), nn.BCELoss(), ""),
        (nn.Sigmoid(), nn.BCELoss(), ""),
        (nn.Identity(), nn.CrossEntropyLoss(), ""),
        (lambda x: x.sigmoid() * 2 - 1, nn.BCEWithLogitsLoss(), ""),
        (lambda x: x * 0 + 0.4, nn.BCEWithLogitsLoss(), ""),  # such values alone prove nothing
        (lambda x: {"logits": x.softmax(1)}, nn.CrossEntropyLoss(), "a softmax before CrossEntropyLoss"),
    ],
)
def test_what_the_loss_does_again_is_warned_of_at_the_first_batch(end, loss, doubt, monkeypatch, capsys):
    monkeypatch.setattr(facts, "_warned", set())
    monkeypatch.setattr("learnerkit.preflight.step.judge_memory", lambda *args: [])  # which takes longest
    x, target = torch.randn(8, 4), torch.arange(8) % 3
    if not is_cross_entropy(loss):
        target = F.one_hot(target, 3).float()
    learn = make_learner(DataLoaders(DataLoader(TensorDataset(x, target), 4), device="cpu"), Ends(end), loss)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        learn.fit(2)
        learn.fit(1)
    assert [re.search(doubt, str(each.message)) is not None for each in found] == [True] * bool(doubt)
    capsys.readouterr()
    learn.check()
    mark, text = read_report(capsys.readouterr().out)[0]["prediction"]
    assert (mark, bool(re.search(doubt, text))) == ("??" if doubt else "ok", True)


@pytest.mark.parametrize(
    ("x", "keeps", "told"),
    [
        (torch.ones(8, 4), True, "all values of the inputs are the same number"),
        (torch.randn(8, 4).index_fill(0, torch.tensor(1), torch.nan), True, "inputs are NaN or infinite, and so are"),
        (torch.randn(8, 4).index_fill(0, torch.tensor(1), torch.nan), False, ""),  # the model knows what to do with it
        (torch.randn(8, 4), True, ""),
        (torch.zeros(8, 4, dtype=torch.long), False, ""),  # ids, or a mask
    ],
)
def test_inputs_that_tell_nothing_are_warned_of_at_the_first_batch(x, keeps, told, monkeypatch):
    monkeypatch.setattr(facts, "_warned", set())

    class Model(nn.Linear):
        def forward(self, x):
            return super().forward(x if keeps else x.float().nan_to_num())

    dls = DataLoaders(DataLoader(TensorDataset(x, torch.randn(8, 1)), 4), device="cpu")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        make_learner(dls, Model(4, 1), nn.MSELoss()).fit(2)
    assert [told in str(each.message) for each in found] == [True] * bool(told)


def test_classes_that_the_loss_does_not_have_are_told_with_the_mend():
    pred, loss = torch.randn(6, 4), nn.CrossEntropyLoss()
    assert out_of_range(loss, pred, torch.tensor([0, 3, -100])) == ("", "")
    assert out_of_range(loss, pred, torch.tensor([-100])) == ("", "")
    assert "the loss takes classes 0 .. 3" in out_of_range(loss, pred, torch.tensor([1, 4, 2]))[0]
    assert "subtract 1" in out_of_range(loss, pred, torch.tensor([1, 4, 2]))[1]
    assert out_of_range(loss, pred, torch.tensor([0, 7]))[1] == "let the model have 8 outputs, or correct the targets"
    assert out_of_range(nn.CrossEntropyLoss(ignore_index=255), pred, torch.tensor([0, 255])) == ("", "")


@pytest.mark.gpu
def test_on_a_gpu_classes_out_of_range_are_an_error_before_the_device_asserts():
    data = TensorDataset(torch.randn(8, 4), torch.arange(8) % 4 + 1)
    learn = make_learner(DataLoaders(DataLoader(data, 8), device="cuda"), make_model(n_out=4), nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match="targets from 1 to 4: the loss takes classes 0 .. 3, .* subtract 1"):
        learn.fit(1)
    torch.zeros(1, device="cuda").item()  # the device still works


def test_weights_of_classes_in_a_forward_of_its_own_are_asked_about():
    class Focal(nn.CrossEntropyLoss):
        def forward(self, pred, y):
            losses = F.cross_entropy(pred, y, weight=self.weight, reduction="none")
            return ((1 - torch.exp(-losses)) ** 2 * losses).mean()

    weights = torch.tensor([0.2, 3.0, 1.0])
    data = make_classes(10)
    for bs in (10, 4):
        dls = DataLoaders.from_datasets(data, data, bs=bs, device="cpu")
        learn = make_learner(dls, make_model(n_out=3), Focal(weights), loss_weight="samples")
        assert learn.validate()[0] == pytest.approx(
            Focal(weights)(learn.model(data.tensors[0]), data.tensors[1]).item()
        )
    with pytest.warns(UserWarning, match="Focal has a forward of its own, and is taken for a mean over the weights"):
        make_learner(dls, make_model(n_out=3), Focal(weights)).validate()
