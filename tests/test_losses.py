"""What a loss averages over."""

import re
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import make_learner, make_model, read_report
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import Callback, DataLoaders, Learner, world
from learnerkit.losses import (
    LossWeight,
    check_shapes,
    is_cross_entropy,
    loss_option,
    loss_parts,
    out_of_range,
    own_loss,
    own_loss_of,
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
@pytest.mark.parametrize("shape", [(), (5,), (3, 2)])
@pytest.mark.parametrize("sizes", [(4, 4, 3), (1, 10), (2, 2, 2, 2, 2, 1)])
def test_cross_entropy_of_parts_joins_to_that_of_the_whole(loss_func, shape, sizes):
    pred, target = torch.randn(11, 3, *shape, dtype=torch.float64), torch.randint(3, (11, *shape))
    ignored = loss_option(loss_func, "ignore_index", -100)
    target.view(-1)[::3] = ignored
    if loss_option(loss_func, "weight") is not None:
        loss_func = _double(loss_func)
    expected = float(loss_func(pred, target))
    assert split_and_join(loss_func, pred, target, sizes) == pytest.approx(expected, rel=1e-9)


def _double(loss_func):
    if isinstance(loss_func, nn.Module):
        return nn.CrossEntropyLoss(weight=CLASS_WEIGHTS.double(), ignore_index=loss_func.ignore_index)
    return partial(loss_func, weight=CLASS_WEIGHTS.double())


@pytest.mark.parametrize("loss_func", [nn.MSELoss(), nn.L1Loss(), F.mse_loss, nn.BCEWithLogitsLoss(), nn.MSELoss(reduction="sum")])  # fmt: skip  # noqa: E501
def test_means_over_samples_join_by_samples(loss_func):
    pred, target = torch.randn(11, 2, dtype=torch.float64), torch.rand(11, 2, dtype=torch.float64)
    expected = float(loss_func(pred, target))
    assert split_and_join(loss_func, pred, target, (4, 4, 3)) == pytest.approx(expected, rel=1e-9)


def test_nll_loss_is_a_cross_entropy_too():
    loss_func = nn.NLLLoss(weight=CLASS_WEIGHTS.double(), ignore_index=1)
    pred, target = torch.randn(11, 3, dtype=torch.float64).log_softmax(1), torch.randint(3, (11,))
    assert split_and_join(loss_func, pred, target, (4, 7)) == pytest.approx(float(loss_func(pred, target)), rel=1e-9)


def test_class_probabilities_are_averaged_over_samples():
    loss_func = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS.double())
    pred = torch.randn(11, 3, dtype=torch.float64)
    target = torch.randn(11, 3, dtype=torch.float64).softmax(1)
    assert split_and_join(loss_func, pred, target, (4, 7)) == pytest.approx(float(loss_func(pred, target)), rel=1e-9)


def test_the_common_case_costs_no_tensor():
    for loss_func in (nn.CrossEntropyLoss(), nn.MSELoss(), lambda p, t: p.sum()):
        assert LossWeight(loss_func).count((torch.zeros(4).long(),), 4) == 4
        assert type(LossWeight(loss_func).count((torch.zeros(4).long(),), 4)) is int


def test_a_count_of_ones_own():
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
def test_whether_a_loss_sums(loss_func, loss_weight, sums):
    assert LossWeight(loss_func, loss_weight).sums is sums


@pytest.mark.parametrize("wrong", ["mean", 3, True, ""])
def test_another_loss_weight_is_refused(wrong):
    with pytest.raises(ValueError, match="it takes None, 'sum', or a function of the targets"):
        LossWeight(nn.MSELoss(), wrong)


@pytest.mark.parametrize("loss_func", [nn.MSELoss(reduction="none"), partial(F.mse_loss, reduction="none")])
def test_a_loss_without_reduction_is_refused(loss_func):
    with pytest.raises(ValueError, match="reduction='none', so the loss is not a scalar"):
        LossWeight(loss_func)
    LossWeight(loss_func, lambda y: len(y))  # who gives a count knows better


def test_options_are_found_on_modules_and_through_partials():
    assert loss_option(nn.CrossEntropyLoss(ignore_index=3), "ignore_index") == 3
    assert loss_option(partial(F.cross_entropy, ignore_index=3), "ignore_index") == 3
    assert loss_option(partial(partial(F.cross_entropy, ignore_index=3), weight=None), "ignore_index") == 3
    assert loss_option(partial(nn.CrossEntropyLoss(ignore_index=3)), "ignore_index") == 3
    assert loss_option(F.mse_loss, "ignore_index", 7) == 7
    assert loss_option(None, "reduction") is None


def test_what_is_a_cross_entropy():
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
    monkeypatch.setattr(world, "_warned", set())
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


@pytest.mark.parametrize("loss_func", ELEMENTWISE)
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(("pred", "target"), [((32, 1), (32,)), ((32,), (32, 1)), ((32, 3), (32, 1)), ((4, 2), (2, 4))])
def test_shapes_that_an_elementwise_loss_would_broadcast(loss_func, wrapped, pred, target):
    loss = partial(loss_func, reduction="mean") if wrapped and not isinstance(loss_func, nn.Module) else loss_func
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
    for output in ({}, {"a": one, "rows": rows}, {"loss": None, "a": one}, [{"a": one}], rows, (one, two)):
        assert own_loss(output) is None, output
    assert loss_parts({"a": one, "b": two}) == {"a": one, "b": two}
    assert loss_parts({"loss": one, "b": two}) == {}


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
    monkeypatch.setattr(world, "_warned", set())
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
    monkeypatch.setattr(world, "_warned", set())

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
