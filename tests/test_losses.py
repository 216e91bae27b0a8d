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

from learnerkit import DataLoaders, world
from learnerkit.losses import (
    MEANS,
    LossWeight,
    check_shapes,
    is_cross_entropy,
    loss_option,
    loss_parts,
    out_of_range,
    own_loss,
    possible_means,
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


def own_losses(scores, target):
    """Means that models take, of scores (n, t, classes), with what they count."""
    flat, classes = scores.flatten(0, 1), target.flatten()
    shifted, later = scores[:, :-1].flatten(0, 1), target[:, 1:].flatten()
    return {
        "tokens": (F.cross_entropy(flat, classes), (classes != -100).sum()),
        "shifted": (F.cross_entropy(shifted, later), (later != -100).sum()),
    }


def tokens(n=6, t=7, classes=5, dtype=torch.float64):
    target = torch.randint(classes, (n, t))
    for i in range(n):
        target[i, t - i :] = -100  # padding
        target[i, : i // 2] = -100  # a prompt
    return torch.randn(n, t, classes, dtype=dtype), target


@pytest.mark.parametrize("kind", ["tokens", "shifted"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [False, True])  # whether classes are dimension 1
@pytest.mark.parametrize("classes", [5, 7])  # 7: as many as places
def test_what_a_models_own_loss_averages_over_is_found(kind, dtype, first, classes):
    scores, target = tokens(classes=classes, dtype=dtype)
    loss, count = own_losses(scores, target)[kind]
    weight = LossWeight(None)
    assert weight.count((target,), 6, scores.movedim(-1, 1) if first else scores, loss) == count
    assert not weight.unknown
    # What the first batch has shown holds for the others, which are not looked at.
    other = tokens()[1].roll(1, 0)
    assert weight.count((other,), 6, None, None) == ((other[:, 1:] if kind == "shifted" else other) != -100).sum()


def test_scores_that_do_not_tell_are_followed_by_those_that_do():
    scores, target = tokens()
    weight = LossWeight(None)
    nothing = torch.full_like(target, -100)
    weight.count((nothing,), 6, scores, own_losses(scores, nothing)["shifted"][0])
    nothing[:, 0] = 1  # of which a shifted loss makes no use
    assert weight.count((nothing,), 6, scores, own_losses(scores, nothing)["shifted"][0]) == 0
    one_class, loss = scores[..., :1], torch.tensor(0.0)  # of one class each loss is zero, whichever tokens count
    weight.count((target.clamp(max=0),), 6, one_class, loss)
    loss, count = own_losses(scores, target)["shifted"]
    assert weight.count((target,), 6, scores, loss) == count


@pytest.mark.parametrize("loss_of", [partial(F.cross_entropy, reduction="sum"), lambda p, t: F.cross_entropy(p, t) + 1])
def test_another_loss_over_tokens_is_unknown_and_counts_its_targets(loss_of):
    scores, target = tokens()
    weight = LossWeight(None)
    found = weight.count((target,), 6, scores, loss_of(scores.flatten(0, 1), target.flatten()))
    assert found == (target != -100).sum()
    assert weight.unknown


def test_any_negative_target_is_left_out():
    scores, target = tokens()
    target[target == -100] = -1
    loss = F.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=-1)
    assert possible_means((target,), scores, loss) == ["targets"]
    assert LossWeight(None).count((target,), 6, scores, loss) == (target != -1).sum()


def test_scores_are_found_in_any_output():
    scores, target = tokens()
    loss, _ = own_losses(scores, target)["shifted"]
    assert possible_means((target,), {"loss": loss, "scores": scores, "hidden": scores[..., :1]}, loss) == ["shifted"]
    assert possible_means((target,), {"loss": loss}, loss) == []
    classes = target[:, 0].clamp(min=0)
    output = {"scores": scores[:, 0], "pairs": torch.randn(9, 5), "elsewhere": torch.randn(6, 5, device="meta")}
    output |= {"nothing": torch.randn(6, 0), "sparse": scores[:, 0].to_sparse()}
    assert possible_means((classes,), output, F.cross_entropy(scores[:, 0], classes)) == ["targets"]


def test_a_later_batch_may_contradict_the_first_whose_count_stays():
    scores, target = tokens()
    weight, full = LossWeight(None), target.clamp(min=0)
    weight.count((full,), 6, scores, own_losses(scores, full)["shifted"][0])
    assert not weight.unknown
    # 4 is padding for this loss, which does not show in a batch without it.
    padded = torch.where(target < 0, 4, target)
    loss = F.cross_entropy(scores[:, :-1].flatten(0, 1), padded[:, 1:].flatten(), ignore_index=4)
    assert weight.count((padded,), 6, scores, loss) == padded[:, 1:].numel()
    assert weight.unknown


def test_ranks_decide_together():
    scores, target = tokens()
    loss, count = own_losses(scores, target)["shifted"]
    for found, unknown in (
        ([["targets", "shifted"], ["shifted"]], False),
        ([list(MEANS), ["shifted"]], False),  # a rank without data
        ([["targets"], ["shifted"]], True),
        ([["targets"], []], True),
    ):
        weight = LossWeight(None)
        assert weight.votes
        weight.agree(found)
        assert (weight.unknown, weight.found_alone, weight.votes) == (unknown, False, False)
        expected = (target != -100).sum() if unknown else count
        assert weight.count((target,), 6, scores, loss) == expected
        assert not weight.found_alone
    assert not LossWeight(F.cross_entropy).votes


def test_ranks_that_cannot_tell_vote_again_and_none_decides_by_itself():
    scores, target = tokens()
    (shifted, count), (_, all_targets) = own_losses(scores, target)["shifted"], own_losses(scores, target)["tokens"]
    weight = LossWeight(None)
    weight.agree([list(MEANS)] * 2)
    assert weight.count((target,), 6, scores, shifted) == count
    weight.agree([["shifted", "targets"], ["targets", "shifted"]])
    assert weight.votes
    assert weight.count((target,), 6, scores, own_losses(scores, target)["tokens"][0]) == count
    weight.agree([["targets"]] * 2)
    assert (weight.count((target,), 6), weight.votes, weight.unknown) == (all_targets, False, False)
    # What contradicts that is known to the rank that has seen it.
    assert weight.count((target,), 6, scores, shifted) == all_targets
    assert (weight.unknown, weight.found_alone) == (True, True)
    # There is an end to it.
    weight = LossWeight(None)
    for _ in range(8):
        assert weight.votes
        assert not weight.unknown
        weight.agree([list(MEANS)] * 2)
    assert not weight.votes
    assert weight.unknown


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_of_few_digits_is_not_taken_for_another(dtype):
    for seed in range(20):
        torch.manual_seed(seed)
        weight = LossWeight(None)
        for _ in range(4):
            scores, target = torch.randn(8, 16, 50) / 2, torch.randint(50, (8, 16))
            loss = F.cross_entropy(scores.mT, target).to(dtype)
            weight.count((target,), 8, scores.to(dtype), loss)
        assert not weight.unknown


def test_integers_that_are_not_classes_count_by_samples():
    pred, ages = torch.randn(6, 1), torch.tensor([-3, 5, -1, 20, 7, 0])
    assert possible_means((ages,), pred, F.mse_loss(pred[:, 0], ages.float())) == ["elements"]
    assert LossWeight(None).count((ages,), 6, pred, torch.tensor(1.5)) == 6
    assert LossWeight(None).count((torch.randn(6, 1), torch.randn(6, 3)), 6) == 6


def test_predictions_for_tokens_without_targets_are_unknown():
    ids, scores, loss = torch.randint(5, (6, 7)), torch.randn(6, 7, 5), torch.tensor(1.5)
    assert possible_means((), scores, loss, ({"ids": ids},)) == []
    assert possible_means((), scores, loss, (torch.randn(6, 7),)) == ["samples"]
    assert possible_means((), scores[:, 0], loss, (ids,)) == ["samples"]
    weight = LossWeight(None)
    assert weight.count((), 6, scores, loss, (ids,)) == 6
    assert weight.unknown


def test_a_models_own_loss_over_samples_counts_them():
    scores, classes = torch.randn(9, 3), torch.randint(3, (9,))
    for pred, yb, loss in (
        (scores, (classes,), F.cross_entropy(scores, classes)),
        (scores, (classes,), torch.tensor(1.5)),  # a loss of its own, of one target for each sample
        (scores[:, :1], (classes + 5,), torch.tensor(1.5)),  # numbers that are not classes
        (scores, (torch.randn(9, 3),), torch.tensor(1.5)),
        (scores, (classes, classes), torch.tensor(1.5)),
        ({"a": scores}, (classes,), torch.tensor(1.5)),
        (scores, (classes,), None),
    ):
        weight = LossWeight(None)
        assert weight.count(yb, 9, pred, loss) == 9
        assert not weight.unknown
    classes[:4] = -100
    weight = LossWeight(None)
    assert weight.count((classes,), 9, scores, F.cross_entropy(scores, classes)) == 5


def test_who_says_what_the_loss_averages_over_is_believed():
    scores, target = tokens()
    loss, _ = own_losses(scores, target)["tokens"]
    assert LossWeight(None, lambda y: y.numel()).count((target,), 6, scores, loss) == target.numel()
    assert LossWeight(None, "sum").count((target,), 6, scores, loss) == 6
    assert LossWeight(None, "sum").sums


def test_a_mean_over_samples_that_no_batch_shows_is_an_assumption():
    pred, target, classes = torch.randn(9, 1), torch.rand(9), torch.randint(3, (9,))
    for loss, yb, assumed in (
        (F.mse_loss(pred[:, 0], target), (target,), False),
        (F.binary_cross_entropy_with_logits(pred[:, 0], target), (target,), False),
        (F.smooth_l1_loss(pred[:, 0], target).bfloat16(), (target,), False),
        (F.mse_loss(pred[:, 0], target, reduction="sum"), (target,), True),
        (F.mse_loss(pred[:4, 0], target[:4]), (target,), True),
        (torch.tensor(1.5), (target, target), True),
        (torch.tensor(1.5), ([{"boxes": target}],), True),
        (torch.tensor(1.5), (), True),
    ):
        weight = LossWeight(None)
        assert weight.count(yb, 9, pred, loss) == 9
        assert (weight.assumed, weight.unknown) == (assumed, False)
    weight = LossWeight(None)
    weight.count((classes,), 9, pred.expand(9, 3), F.cross_entropy(pred.expand(9, 3), classes))
    assert not weight.assumed
    for said in ("samples", "sum", len):
        weight = LossWeight(None, said)
        assert weight.count((target,), 9, pred, torch.tensor(1.5)) == 9
        assert not weight.assumed
    assert not LossWeight(F.mse_loss).assumed
    # Rows that are compared are no samples to who has said so.
    assert LossWeight(None, "samples").count((torch.rand(20),), 9, torch.rand(20)) == 9


def test_a_mean_that_a_later_batch_contradicts_is_unknown():
    pred, target, weight = torch.randn(9), torch.rand(9), LossWeight(None)
    weight.count((target,), 9, pred, F.mse_loss(pred, target))
    weight.count((target,), 9, pred, F.mse_loss(pred, target) + 1)
    assert weight.unknown


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
