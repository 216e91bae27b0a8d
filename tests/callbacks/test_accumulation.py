"""GradientAccumulation on one process: several batches make the step that one large batch would."""

import pytest
import torch
from helpers import (
    make_classes,
    make_data,
    make_dls,
    make_learner,
    make_model,
    mostly_slow,
    raises,
    raising,
    same_weights,
    step_gradient,
    weights,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import Callback, DataLoaders, GradientAccumulation, Learner, MixedPrecision
from learnerkit.distributed import facts
from learnerkit.events import (
    CancelBackwardException,
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelStepException,
    CancelTrainException,
)

LOSSES = {
    "mean": nn.CrossEntropyLoss(),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "class weights": nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]).double()),
    "ignore_index": nn.CrossEntropyLoss(ignore_index=1),
}
WAYS = {
    "4 x 4": (4, {"n_batches": 4}),
    "16 x 1": (16, {"n_batches": 1}),
    "1 x 16": (1, {"n_batches": 16}),
    "16 samples": (4, {"n_samples": 16}),
    "13 samples": (4, {"n_samples": 13}),
    "more than 15 samples": (8, {"n_samples": 9}),
}


class OwnLoss(nn.Module):
    """Makes its own loss over tokens: their mean cross-entropy, or that with something added."""

    def __init__(self, more=0.0):
        super().__init__()
        self.body, self.more = make_model(n_out=3), more

    def forward(self, x, labels):
        logits = self.body(x)
        return {"logits": logits, "loss": F.cross_entropy(logits.mT, labels) + self.more * logits.square().mean()}


def padded(bs):
    """Sentences of 1 to 5 tokens."""
    x, labels = torch.randn(16, 5, 4), torch.randint(3, (16, 5))
    for i, row in enumerate(labels):
        row[1 + i % 5 :] = -100
    return DataLoaders([{"x": x[i : i + bs], "labels": labels[i : i + bs]} for i in range(0, 16, bs)], device="cpu")


@pytest.mark.filterwarnings("ignore:the model makes its own loss:UserWarning")
def test_a_models_own_loss_over_tokens_is_accumulated_by_what_it_counts():
    models = []
    for bs, cbs in ((16, None), (4, GradientAccumulation(n_batches=4)), (3, GradientAccumulation(n_samples=16))):
        torch.manual_seed(0)
        learn = Learner(padded(bs), OwnLoss(), opt_func=torch.optim.SGD, lr=0.5)
        learn.fit(3, cbs=cbs)
        models.append(learn.model)
    for model in models[1:]:
        for p, q in zip(models[0].parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p, q)


def test_a_loss_of_the_models_own_is_told_at_once(monkeypatch):
    monkeypatch.setattr(facts, "_warned", set())
    learn = Learner(padded(4), OwnLoss())
    with pytest.warns(UserWarning, match="the mean over the 10 of 20 targets that are not -100.*loss_weight="):
        learn.fit(2)
    said = Learner(padded(4), OwnLoss(), loss_weight=lambda y: (y != -100).sum())
    said.fit(1, cbs=GradientAccumulation(n_batches=2))


class Positives(nn.Module):
    """Makes losses that are means over the positives of a batch, as some detectors do."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 1).double()

    def forward(self, x, targets):
        there = targets > 0
        losses = (self.body(x)[:, 0] - targets).square()[there]
        return {"loss": losses.sum() / there.sum().clamp(min=1), "positives": there.sum()}


def test_a_count_of_the_models_output_makes_the_steps_of_one_batch(monkeypatch):
    monkeypatch.setattr(facts, "_warned", set())
    x = torch.randn(32, 4, dtype=torch.float64)

    def train(bs, n, **kwargs):
        torch.manual_seed(0)
        dls = DataLoaders.from_datasets(TensorDataset(x, x[:, 0]), bs=bs, shuffle=False, device="cpu")
        learn = Learner(dls, Positives(), opt_func=torch.optim.SGD, lr=0.1, **kwargs)
        learn.fit(2, cbs=GradientAccumulation(n_batches=n))
        return learn.model.body.weight.detach()

    def count(output, targets):
        return output["positives"]

    torch.testing.assert_close(train(4, 4, loss_weight=count), train(16, 1, loss_weight=count))
    with pytest.warns(
        UserWarning, match="it is taken for a mean over samples. If it is one, say loss_weight='samples'"
    ):
        guessed = train(4, 4)
    assert (guessed - train(4, 4, loss_weight=count)).abs().max() > 1e-4
    train(4, 4, loss_weight="samples")  # without a warning


def test_targets_under_another_name_are_told(monkeypatch):
    monkeypatch.setattr(facts, "_warned", set())
    words = [{"ids": torch.randint(9, (4, 5)), "answers": torch.randint(9, (4, 5))} for _ in range(2)]

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Embedding(9, 9)

        def forward(self, ids, answers):
            logits = self.body(ids)
            return {"logits": logits, "loss": F.cross_entropy(logits.mT, answers)}

    with pytest.warns(UserWarning, match="mean over samples.*targets with names of their own: .*target_keys="):
        Learner(DataLoaders(words, device="cpu"), Words()).fit(1)
    dls = DataLoaders(words, device="cpu", target_keys="answers")
    with pytest.warns(UserWarning, match="the mean over the 20 of 20 targets that are not -100"):
        Learner(dls, Words()).fit(1)


class Steps(Callback):
    """The rate, the momentum and the gradient at every step."""

    order = 70

    def __init__(self):
        super().__init__()
        self.rates, self.grads, self.done = [], [], []

    def before_batch(self):
        if self.training:
            self.done.append(self.pct_train)

    def before_step(self):
        group = self.opt.param_groups[0]
        self.rates.append((group["lr"], group["momentum"]))
        self.grads.append(torch.cat([p.grad.reshape(-1) for p in self.model.parameters()]))


def sgd(params, lr):
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def double(data):
    data.tensors = tuple(t.double() if t.is_floating_point() else t for t in data.tensors)
    return data


def learner(loss="mean", bs=16, n=103, **kwargs):
    """103 samples: with 16 in a step the last step has 7, with 4 in a batch the last batch has 3."""
    train, valid = double(make_classes(n)), double(make_classes(17, seed=1))
    dls = DataLoaders.from_datasets(train, valid, bs=bs, shuffle=True, device="cpu")
    return make_learner(dls, make_model(n_out=3).double(), LOSSES[loss], opt_func=sgd, lr=0.01, **kwargs)


def fit(learn, *cbs, epochs=2, verb="fit"):
    steps = Steps()
    torch.manual_seed(5)
    getattr(learn, verb)(epochs, 0.01, cbs=[steps, *cbs])
    assert all(p.grad is None for p in learn.model.parameters())
    assert step_gradient(learn) is None
    return steps


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@pytest.fixture(scope="module")
def whole():
    """Fits in batches of 16, each done once."""
    done = {}

    def get(loss, verb="fit"):
        if (loss, verb) not in done:
            learn = learner(loss)
            done[loss, verb] = learn, fit(learn, verb=verb)
        return done[loss, verb]

    return get


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("verb", mostly_slow(["fit", "fit_one_cycle"], "fit_one_cycle"))
def test_small_batches_make_the_steps_of_large_ones(whole, loss, way, verb):
    expected, steps = whole(loss, verb)
    bs, size = WAYS[way]
    learn = learner(loss, bs)
    found = fit(learn, GradientAccumulation(**size), verb=verb)
    assert len(found.grads) == len(steps.grads) == 2 * 7
    close(found.grads, steps.grads)
    close(found.rates, steps.rates)
    close(weights(learn.model), weights(expected.model))
    close(learn.recorder.values, expected.recorder.values)


def test_schedules_advance_by_steps():
    learn = learner(bs=4)
    steps = fit(learn, GradientAccumulation(n_batches=4), verb="fit_one_cycle")
    assert steps.done == [i // 4 / 7 / 2 for i in range(26)] + [0.5 + i // 4 / 7 / 2 for i in range(26)]
    assert learn.pct_train == 1


def test_batches_of_all_sizes_make_groups_by_samples():
    x, y = double(make_classes(40)).tensors
    sizes = [1, 7, 2, 2, 9, 1, 1, 1, 12, 4]
    batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
    learn = make_learner(DataLoaders(batches, device="cpu"), make_model(n_out=3).double(), LOSSES["mean"], opt_func=sgd)
    found = fit(learn, GradientAccumulation(n_samples=10), epochs=1)
    groups = [[1, 7, 2], [2, 9], [1, 1, 1, 12], [4]]
    batches = list(zip(x.split(list(map(sum, groups))), y.split(list(map(sum, groups))), strict=True))
    other = make_learner(DataLoaders(batches, device="cpu"), make_model(n_out=3).double(), LOSSES["mean"], opt_func=sgd)
    close(found.grads, fit(other, epochs=1).grads)
    close(weights(learn.model), weights(other.model))


class Unsized:
    """A loader that does not say how many batches it has."""

    def __init__(self, dl):
        self.dl = dl

    def __iter__(self):
        return iter(self.dl)


def test_a_loader_without_length_has_its_last_incomplete_group_stepped(whole):
    expected, steps = whole("class weights")
    learn = learner("class weights", 4)
    learn.dls.loaders[0] = Unsized(DataLoader(learn.dls.train_ds, 4))
    plain = learner("class weights", 16)
    plain.dls.loaders[0] = DataLoader(plain.dls.train_ds, 16)
    found, steps = fit(learn, GradientAccumulation(n_batches=4)), fit(plain)
    close(found.grads, steps.grads)
    close(weights(learn.model), weights(plain.model))
    close(learn.recorder.values, plain.recorder.values)


def test_what_takes_place_in_a_group():
    log = []
    names = ["before_batch", "after_backward", "before_step", "after_step", "after_cancel_batch", "after_batch"]
    spy = Callback(**{name: (lambda cb, name=name: log.append(name)) for name in names})
    make_learner(make_dls(12, None)).fit(1, cbs=[spy, GradientAccumulation(n_batches=2)])
    waits = ["before_batch", "after_backward", "after_cancel_batch", "after_batch"]
    steps = ["before_batch", "after_backward", "before_step", "after_step", "after_batch"]
    assert log == [*waits, *steps, *steps]


def test_a_penalty_counts_once():
    class Penalty(Callback):
        def after_loss(self):
            self.learn.loss_grad += 0.1 * sum(p.square().sum() for p in self.model.parameters())

    whole, learn = learner(), learner(bs=4)
    fit(whole, Penalty())
    fit(learn, Penalty(), GradientAccumulation(n_batches=4))
    close(weights(learn.model), weights(whole.model))


def test_validation_in_the_middle_of_a_group_changes_no_step():
    def validate(cb):
        if cb.training and cb.train_iter == 2:
            before = step_gradient(cb.learn), cb.learn.step_batches, cb.learn.step_due
            cb.learn.validate()
            assert before == (step_gradient(cb.learn), cb.learn.step_batches, cb.learn.step_due)

    whole, learn = learner(), learner(bs=4)
    fit(whole)
    fit(learn, GradientAccumulation(n_batches=4), Callback(after_pred=validate))
    close(weights(learn.model), weights(whole.model))


def test_the_next_fit_without_it_is_as_ever():
    whole, learn = learner(bs=4), learner(bs=4)
    fit(whole)
    fit(learn, raising("after_pred", CancelFitException(), lambda cb: cb.iter == 2), GradientAccumulation(n_batches=4))
    assert same_weights(learn.model, make_model(n_out=3).double())
    learn.opt = None
    fit(learn)
    assert same_weights(learn.model, whole.model)


# Batches and groups that are left


def batches(bs=4, n=26, shift=0.0, **kwargs):
    """A learner on plain batches, and the batches themselves."""
    x, y = double(make_data(n)).tensors
    batches = list(zip(x.split(bs), (y + shift).split(bs), strict=True))
    dls = DataLoaders(batches, device="cpu")
    return make_learner(dls, make_model().double(), opt_func=sgd, lr=0.05, **kwargs), batches


def expected_after(groups, **kwargs):
    """The weights after steps of the given batches."""
    learn, batches_ = batches(**kwargs)
    joined = [tuple(torch.cat(t) for t in zip(*(batches_[i] for i in group), strict=True)) for group in groups]
    learn.dls.loaders[0] = joined
    learn.fit(1)
    return weights(learn.model)


@pytest.mark.parametrize("order", mostly_slow([0, 20], 0))  # before and after GradientAccumulation
@pytest.mark.parametrize(("left", "groups"), [
    (0, [[1, 2], [3, 4, 5], [6]]),
    (1, [[0, 2], [3, 4, 5], [6]]),
    (2, [[0, 1], [3, 4, 5], [6]]),
    (3, [[0, 1, 2], [4, 5], [6]]),
    (5, [[0, 1, 2], [3, 4], [6]]),
    (6, [[0, 1, 2], [3, 4, 5]]),
])  # fmt: skip
def test_a_cancelled_batch_counts_nothing_in_its_group(order, left, groups):
    expected = expected_after(groups)
    for error, event in (
        (CancelBatchException, "before_batch"),
        (CancelBatchException, "after_pred"),
        (CancelBatchException, "before_backward"),
        (CancelBackwardException, "before_backward"),
    ):
        progress = []
        leave = raising(event, error(), lambda cb: cb.training and cb.iter == left, order=order)
        look = Callback(after_batch=lambda cb, seen=progress: seen.append(round(cb.pct_train * 3)), order=70)
        learn, _ = batches()
        learn.fit(1, cbs=[leave, look, GradientAccumulation(n_batches=3)])
        close(weights(learn.model), expected)
        assert progress == [0, 0, 1, 1, 1, 2, 3], (error, event)
        assert all(p.grad is None for p in learn.model.parameters())


def test_a_cancelled_step_leaves_out_its_group():
    learn, _ = batches()
    skip = raising("before_step", CancelStepException(), lambda cb: cb.iter == 5)
    learn.fit(1, cbs=[skip, GradientAccumulation(n_batches=3)])
    close(weights(learn.model), expected_after([[0, 1, 2], [6]]))


@pytest.mark.parametrize(
    ("error", "then"), [(CancelTrainException, True), (CancelEpochException, True), (CancelFitException, False)]
)
def test_the_group_in_which_training_is_left_is_left_out(error, then):
    learn, _ = batches()
    leave = raising("after_batch", error(), lambda cb: cb.iter == 4, order=70)
    learn.fit(2, cbs=[leave, GradientAccumulation(n_batches=3)])
    groups = [[0, 1, 2], *([[0, 1, 2], [3, 4, 5], [6]] if then else [])]
    close(weights(learn.model), expected_after(groups))
    assert all(p.grad is None for p in learn.model.parameters())


def test_an_error_leaves_no_gradients_and_no_weights():
    learn, _ = batches()
    with pytest.raises(ZeroDivisionError):
        learn.fit(1, cbs=[raising("after_pred", ZeroDivisionError(), lambda cb: cb.iter == 4),
                          GradientAccumulation(n_batches=3)])  # fmt: skip
    assert all(p.grad is None for p in learn.model.parameters())
    assert (step_gradient(learn), learn.step_batches, learn.step_due) == (None, 1, True)


# Arguments


def test_arguments_of_fastai_are_refused_with_the_names_that_they_have_here():
    with raises(TypeError, "takes 1 positional argument but 2 were given", "by name: n_batches=, n_samples="):
        GradientAccumulation(32)
    with raises(TypeError, "'n_acc'", "n_batches, n_samples"):
        GradientAccumulation(n_acc=32)
    with raises(TypeError, "takes 4 positional arguments but 5 were given", "by name: opt_func=, lr="):
        Learner(make_dls(), make_model(), F.mse_loss, torch.optim.SGD)


def test_one_of_both_sizes_is_given():
    for sizes in ({}, {"n_batches": 2, "n_samples": 8}):
        with pytest.raises(TypeError, match="give one of them"):
            GradientAccumulation(**sizes)
    for size in (0, -1, 2.0, "3", True):
        with pytest.raises(ValueError, match=f"got n_batches={size!r}; it is a whole number, 1 or more"):
            GradientAccumulation(n_batches=size)
    with pytest.raises(ValueError, match="got n_samples=0"):
        GradientAccumulation(n_samples=0)
    with pytest.raises(TypeError, match="positional"):
        GradientAccumulation(4)
    with pytest.raises(ValueError, match="two GradientAccumulation callbacks in one fit, which differ"):
        make_learner().fit(1, cbs=[GradientAccumulation(n_batches=2), GradientAccumulation(n_samples=8)])


def test_a_loss_that_sums_by_its_own_word():
    def summed(pred, y):
        return F.mse_loss(pred, y, reduction="sum")

    found = []
    for bs, cbs in ((12, []), (4, [GradientAccumulation(n_batches=3)])):
        learn, _ = batches(bs)
        learn.loss_func, learn.loss_weight = summed, "sum"
        learn.fit(1, 0.01, cbs=cbs)
        found.append(weights(learn.model))
    close(*found)


@pytest.mark.filterwarnings("ignore:mixed precision with float16 is some 30 times slower")
def test_a_first_batch_that_counts_nothing_does_not_overflow_half_precision():
    x, y = torch.randn(8, 4, 64, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 64, dtype=torch.long)
    y[:4] = -100

    def trained(*cbs):
        torch.manual_seed(0)
        dls = DataLoaders(DataLoader(TensorDataset(x, y), 4), device="cpu")
        cbs = [GradientAccumulation(n_batches=2), *cbs]
        learn = Learner(dls, nn.Conv1d(4, 3, 1), nn.CrossEntropyLoss(), opt_func=torch.optim.SGD, lr=0.1, cbs=cbs)
        with learn.no_logging(), learn.no_bar():
            learn.fit(1)
        return learn

    half = trained(MixedPrecision("fp16", init_scale=2.0**12))
    assert half.mixed_precision.skipped == 0
    torch.testing.assert_close(half.model.weight, trained().model.weight, rtol=0, atol=1e-3)
