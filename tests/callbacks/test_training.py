"""The course of training: fits by steps, validation in mid-epoch, frozen statistics."""

from contextlib import nullcontext

import pytest
import torch
from helpers import make_classes, make_data, make_dls, make_learner, make_model, raising, same_weights, spy, weights
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from learnerkit import (
    Callback,
    CancelBatchException,
    CancelFitException,
    CancelStepException,
    CancelTrainException,
    DataLoaders,
    EarlyStoppingCallback,
    GradientAccumulation,
    Learner,
    Recorder,
    SaveModelCallback,
    ValidateEvery,
    accuracy,
    mae,
)
from learnerkit.callbacks.recorder import format_row
from learnerkit.callbacks.schedule import SchedLin
from learnerkit.callbacks.training import BnFreeze
from learnerkit.distributed import facts


class Stream(IterableDataset):
    """Twelve samples; its loader does not say so."""

    def __iter__(self):
        yield from zip(*make_data(12).tensors, strict=True)


def learner(train=20, valid=6, **kwargs):
    return make_learner(make_dls(train, valid), metrics=mae, **kwargs)


# Fits by steps


@pytest.mark.parametrize(("n_steps", "ends"), [(0, []), (1, [1]), (5, [5]), (7, [5, 7]), (15, [5, 10, 15])])
@pytest.mark.parametrize("method", ["fit", "fit_one_cycle", "fit_flat_cos"])
def test_a_fit_takes_so_many_steps(method, n_steps, ends):
    steps = []
    learn = learner(cbs=Callback(after_step=lambda cb: steps.append(cb.pct_train)))
    getattr(learn, method)(n_steps=n_steps)
    assert steps == pytest.approx([i / n_steps for i in range(n_steps)])
    assert learn.recorder.iters == ends
    assert [len(row) for row in learn.recorder.values] == [3] * len(ends)  # each epoch has its validation
    assert (learn.n_steps, learn.n_epoch) == (n_steps, None)
    assert not steps or learn.pct_train == 1.0


def test_an_epoch_without_a_step_is_told():
    def cancel(cb):
        if cb.epoch < first:
            raise CancelTrainException

    for first in (1, 2):  # an epoch that only validates is usual before the others
        learn = learner(cbs=Callback(before_train=cancel))
        told = pytest.warns(UserWarning, match=r"epoch 1 took no step: fit\(n_steps=3\) goes on until")
        with nullcontext() if first == 1 else told:
            learn.fit(n_steps=3)
        assert len(learn.recorder.values) == first + 1


def test_it_equals_a_fit_of_as_many_epochs():
    a, b = learner(), learner()
    a.fit_one_cycle(3, 0.1)
    b.fit_one_cycle(n_steps=15, lr_max=0.1)
    assert a.recorder.values == b.recorder.values
    assert a.recorder.lrs == pytest.approx(b.recorder.lrs)
    a, b = learner(), learner()
    a.fit(3)
    b.fit(n_steps=15)
    assert same_weights(a.model, b.model)


def test_steps_of_several_batches_count_once():
    for cb, ends in ((GradientAccumulation(n_batches=2), [5, 7]), (GradientAccumulation(n_samples=8), [5, 7])):
        learn = learner()
        learn.fit(n_steps=4, cbs=cb)  # the third step of an epoch has one batch
        assert learn.recorder.iters == ends


def test_a_batch_without_a_step_counts_as_its_step():
    for cancel, count in ((CancelStepException, 7), (CancelBatchException, 7)):
        batches = []
        cbs = [
            raising("before_step", cancel(), lambda cb: cb.train_iter == 2),
            Callback(after_batch=lambda cb, batches=batches: batches.append(1) if cb.training else None),
        ]
        learner(cbs=cbs).fit(n_steps=7)
        assert len(batches) == count


def test_a_loader_without_length_is_trained_for_so_many_steps():
    learn = make_learner(DataLoaders(DataLoader(Stream(), 4), DataLoader(make_data(4), 4), device="cpu"))
    learn.fit_one_cycle(n_steps=8, lr_max=0.1)
    assert learn.recorder.iters == [3, 6, 8]
    assert len(set(learn.recorder.lrs)) == 8


class Measured(Stream):
    """Says that it has a batch of 4 samples."""

    def __len__(self):
        return 4


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
def test_a_loader_with_more_batches_than_it_says_leaves_a_schedule_at_its_end():
    """A straight line would go on to rates below 0, and back at the next epoch."""
    learn = make_learner(DataLoaders(DataLoader(Measured(), 4), device="cpu"))
    learn.fit(2, SchedLin(1e-2, 0.0))
    assert learn.recorder.lrs == pytest.approx([1e-2, 5e-3, 5e-3, 5e-3, 0.0, 0.0])


@pytest.mark.parametrize("method", ["fit", "fit_one_cycle"])
def test_a_group_left_over_at_the_end_counts_too(method):
    """Without a length accumulation learns only at the end that a batch was the last: three steps an epoch."""
    steps = []
    dls = DataLoaders(DataLoader(Stream(), 3), DataLoader(make_data(4), 4), device="cpu")  # of four batches
    cbs = [GradientAccumulation(n_batches=3), Callback(after_step=lambda cb: steps.append(cb.pct_train))]
    learn = make_learner(dls, cbs=cbs)
    getattr(learn, method)(n_steps=6)
    assert steps == pytest.approx([i / 6 for i in range(6)])
    assert learn.recorder.iters == [4, 8, 12]
    with learn.added_cbs(Callback(after_batch=cut_short, order=200)):
        learn.fit(n_steps=2)  # what was begun is left out, and is no step
    assert len(steps) == 8
    rows = ValidateEvery(3)
    learn.fit(2, cbs=rows)  # steps 1, 2 | 3, 4
    assert learn.recorder.iters == [4, 7, 8]


def cut_short(cb):
    if cb.training and cb.iter == 3:
        raise CancelTrainException


def test_fits_of_steps_need_no_default_callbacks():
    steps = []
    learn = learner(default_cbs=False, cbs=Callback(after_step=lambda cb: steps.append(1)))
    for total in (7, 14):
        learn.fit(n_steps=7)
        assert len(steps) == total


def test_a_fit_takes_epochs_or_steps():
    learn = learner()
    for args in ({}, {"n_epoch": 1, "n_steps": 1}):
        for fit in (learn.fit, learn.fit_one_cycle, learn.fit_flat_cos):
            with pytest.raises(ValueError, match="give one of them: how long to train"):
                fit(**args)
    with pytest.raises(ValueError, match="start_epoch=1 and n_steps=3; they cannot be combined"):
        learn.fit(n_steps=3, start_epoch=1)


def test_the_next_fit_counts_epochs_again():
    learn = learner()
    learn.fit(n_steps=3)
    learn.fit(2)
    assert (learn.n_steps, learn.n_epoch, learn.recorder.iters) == (None, 2, [5, 10])


# Validation in mid-epoch


def test_rows_are_added_every_n_steps():
    learn = learner()
    rows = []
    learn.logger = rows.append
    learn.fit(2, cbs=ValidateEvery(2))
    assert [row[0] for row in rows] == ["0 40%", "0 80%", 0, "1 20%", "1 60%", 1]  # 2, 4, 5, 6, 8, 10 steps
    assert learn.recorder.iters == [2, 4, 5, 6, 8, 10]
    assert [len(row) for row in rows] == [5] * 6
    assert learn.recorder.metric_names == ["epoch", "train_loss", "valid_loss", "mae", "time"]
    assert learn.recorder.values == [row[1:-1] for row in rows]
    text = format_row(learn.recorder.metric_names, rows[0])
    assert text.startswith("0 40%  ")


def test_a_row_has_the_loss_so_far_and_what_validate_gives():
    found, losses = [], []

    def look(cb):
        losses.append(cb.loss.item())
        if cb.train_iter == 2:
            found.append(cb.learn.validate())

    learn = learner()
    learn.fit(1, cbs=[ValidateEvery(2), Callback(after_step=lambda cb: look(cb))])
    learn2 = learner()
    learn2.fit(1, cbs=Callback(after_batch=lambda cb: look(cb) if cb.training else None))
    assert learn.recorder.values[0][1:] == found[-1]
    assert learn.recorder.values[0][0] == pytest.approx(sum(losses[:2]) / 2)
    assert learn.recorder.values[-1] == learn2.recorder.values[-1]  # an epoch's own row is what it is without
    assert learn.recorder.losses == learn2.recorder.losses


def test_training_goes_on_as_without():
    for cbs in ([], [GradientAccumulation(n_batches=2)]):
        with_rows, without = (learner(model=make_model(dropout=0.3)) for _ in range(2))
        torch.manual_seed(1)
        with_rows.fit_one_cycle(2, 0.1, cbs=[ValidateEvery(1), *cbs])
        torch.manual_seed(1)
        without.fit_one_cycle(2, 0.1, cbs=[GradientAccumulation(n_batches=2)] if cbs else None)
        assert same_weights(with_rows.model, without.model)
        assert with_rows.recorder.lrs == without.recorder.lrs


def test_accumulation_counts_steps():
    learn = learner()
    learn.fit(2, cbs=[ValidateEvery(2), GradientAccumulation(n_batches=2)])
    assert learn.recorder.iters == [4, 5, 7, 10]  # steps end after batches 2, 4, 5 of an epoch


def test_trackers_heed_every_row(tmp_path):
    scores = iter([5.0, 3.0, 4.0, 6.0, 7.0, 8.0])
    saved = []

    def score(pred, target):
        return torch.tensor(next(scores))

    score.__name__ = "score_error"
    learn = make_learner(make_dls(20, 4), metrics=score, path=tmp_path)
    cbs = [SaveModelCallback("score_error"), EarlyStoppingCallback("score_error", patience=2), ValidateEvery(2)]
    learn.fit(3, cbs=[*cbs, Callback(after_step=lambda cb: saved.append(weights(cb.learn.model)))])
    assert learn.recorder.iters == [2, 4, 5, 6]  # 3.0 is the best; two worse ones after it
    assert len(saved) == 6
    assert same_weights(learn.model, saved[3])


def test_the_last_step_is_followed_by_the_epochs_own_validation():
    learn = learner()
    learn.fit(n_steps=4, cbs=ValidateEvery(2))
    assert learn.recorder.iters == [2, 4]
    assert learn.recorder.log[0] == 0


def test_logged_values_and_train_metrics_are_those_so_far():
    learn = make_learner(make_dls(20, 4, data=make_classes), make_model(4, 3), nn.CrossEntropyLoss(), metrics=accuracy)
    learn.remove_cb(Recorder).add_cb(Recorder(train_metrics=True))
    learn.fit(1, cbs=[ValidateEvery(2), Callback(after_step=lambda cb: cb.learn.log_metric("step", cb.train_iter))])
    names = learn.recorder.metric_names
    assert names == ["epoch", "train_loss", "train_accuracy", "valid_loss", "valid_accuracy", "step", "time"]
    assert [row[-1] for row in learn.recorder.values] == [0.5, 1.5, 2.0]


def test_without_valid_metrics_a_row_has_none():
    learn = learner()
    learn.remove_cb(Recorder).add_cb(Recorder(valid_metrics=False))
    learn.fit(1, cbs=ValidateEvery(2))
    assert [len(row) for row in learn.recorder.values] == [2, 2, 2]


def test_a_stream_has_no_shares():
    learn = make_learner(DataLoaders(DataLoader(Stream(), 4), DataLoader(make_data(4), 4), device="cpu"))
    rows = []
    learn.logger = rows.append
    learn.fit(n_steps=5, cbs=ValidateEvery(2))
    assert [row[0] for row in rows] == [0, 0, 1, 1]


def test_the_plot_has_a_point_for_each_row(plt):
    learn = learner()
    learn.fit(1, cbs=ValidateEvery(2))
    valid = learn.recorder.plot_loss().lines[1]
    assert list(valid.get_xdata()) == [2, 4, 5]


def test_bad_steps_between_validations_are_refused():
    for n in (0, 1.5, None):
        with pytest.raises(ValueError, match="a number of optimizer steps, 1 or more"):
            ValidateEvery(n)
    with pytest.raises(ValueError, match="ValidateEvery needs a validation loader"):
        make_learner(make_dls(valid=None)).fit(1, cbs=ValidateEvery(1))


def test_it_sits_out_what_is_no_fit():
    log = []
    learn = learner(cbs=[ValidateEvery(1), spy(log, events=["before_validate"])])
    learn.lr_find(num_it=10, show_plot=False, stop_div=False)
    assert log == []


def test_fits_of_steps_are_the_same_with_data_parallel(two_gpus):
    split, alone = learner(), learner()
    with split.parallel_ctx():
        split.fit(n_steps=7, cbs=ValidateEvery(2))
    alone.fit(n_steps=7, cbs=ValidateEvery(2))
    assert split.recorder.values == alone.recorder.values


# Frozen statistics


def norm_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))


def halves(model):
    return [[*model[:2].parameters()], [*model[2:].parameters()]]


@pytest.mark.parametrize("cbs", [[], [BnFreeze]])
def test_statistics_of_frozen_layers_stay(cbs):
    learn = make_learner(model=norm_model(), splitter=halves, train_bn=False, cbs=cbs)
    learn.freeze()
    before = weights(learn.model)
    learn.fit(2)
    after = weights(learn.model)
    assert torch.equal(before["1.running_mean"], after["1.running_mean"]) == bool(cbs)
    assert not torch.equal(before["3.running_mean"], after["3.running_mean"])
    assert torch.equal(before["1.weight"], after["1.weight"])
    assert not any(module.training for module in learn.model.modules())
    learn.unfreeze()
    learn.fit(1)
    assert not torch.equal(after["1.running_mean"], weights(learn.model)["1.running_mean"])


# Train and eval mode


def modes(model):
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("verb", [lambda learn: learn.fit(2), Learner.validate, Learner.get_preds])
def test_a_run_that_ends_well_leaves_the_model_in_eval_mode(verb):
    learn = make_learner(model=nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 1)))
    verb(learn)
    assert not any(modes(learn.model))
    before, x = weights(learn.model), torch.randn(9, 4)
    assert torch.equal(learn.model(x), learn.model(x))
    assert torch.equal(before["1.running_mean"], learn.model[1].running_mean)
    trained = []
    learn.fit(1, cbs=Callback(before_batch=lambda cb: trained.append((cb.training, {*modes(cb.model)}))))
    assert trained == [(True, {True})] * 2 + [(False, {False})]


def test_a_fit_without_validation_or_cancelled_ends_well_too():
    for cbs in ([], raising("after_step", CancelFitException)):
        learn = make_learner(make_dls(valid=None), cbs=cbs)
        learn.fit(2)
        assert not any(modes(learn.model))


def test_after_an_error_modules_have_the_modes_they_had():
    learn = make_learner(cbs=raising("after_step", KeyError("x")))
    learn.model[2].eval()
    before = modes(learn.model)
    with pytest.raises(KeyError):
        learn.fit(1)
    assert modes(learn.model) == before


def test_what_tries_something_out_leaves_the_modes_alone():
    learn = make_learner()
    learn.model[2].eval()
    before = modes(learn.model)
    learn.lr_find(num_it=10, show_plot=False, stop_div=False)
    learn.check()
    assert modes(learn.model) == before


def test_without_the_callback_modes_are_the_users_own():
    learn = make_learner(default_cbs=False)
    learn.model[2].eval()
    before = modes(learn.model)
    learn.fit(2)
    assert modes(learn.model) == before


class Wrap(Callback):
    """Puts the model into a module of its own for the time of a run."""

    order = -20

    def before_fit(self):
        self.plain, self.learn.model = self.learn.model, nn.Sequential(self.learn.model)

    def cleanup_fit(self):
        self.learn.model = self.plain

    def __init__(self):
        super().__init__()
        self.plain = None


@pytest.mark.parametrize("wrap", [[], [Wrap], [Callback(order=-5)]])
def test_modules_that_the_user_has_put_into_eval_mode_stay_so(wrap):
    learn = make_learner(model=norm_model(), cbs=wrap)
    learn.model[1].eval()
    before, seen = weights(learn.model), []
    look = Callback(before_batch=lambda cb: cb.training and seen.append([m.training for m in cb.learn.unwrapped]))
    learn.unwrapped = list(learn.model)
    for verb in (learn.fit, learn.get_preds, learn.fit):
        verb(*([2] if verb == learn.fit else []), cbs=look)
        assert not any(modes(learn.model))
    assert seen == [[True, False, True, True, True]] * 8
    assert torch.equal(before["1.running_mean"], learn.model[1].running_mean)
    assert not torch.equal(before["3.running_mean"], learn.model[3].running_mean)
    learn.model.train()  # all of it takes part again
    learn.fit(1, cbs=look)
    assert seen[-1] == [True] * 5
    assert not torch.equal(before["1.running_mean"], learn.model[1].running_mean)


def test_a_model_that_comes_in_eval_mode_is_trained_as_a_whole():
    learn = make_learner(model=norm_model().eval())
    seen = []
    learn.fit(1, cbs=Callback(before_batch=lambda cb: cb.training and seen.append({*modes(cb.model)})))
    assert seen == [{True}] * 2


def test_dropout_in_a_part_that_is_trained_in_eval_mode_is_told(monkeypatch):
    monkeypatch.setattr(facts, "_warned", set())

    def part(frozen=False, p=0.5, in_eval=True):
        body = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Dropout(p))).requires_grad_(not frozen)
        return nn.Sequential(body.eval() if in_eval else body, nn.Linear(6, 1))

    for quiet in (part(frozen=True), part(p=0.0), part(in_eval=False), part().eval()):
        make_learner(model=quiet).fit(1)
    learn = make_learner(model=part())
    learn.validate()
    with pytest.warns(UserWarning, match=r"^0 \(Sequential\) is in eval mode and stays so.*from_pretrained") as found:
        learn.fit(1)
    assert len(found) == 1


class Stateful(nn.Module):
    """Remembers what it has seen, as recurrent networks do."""

    def __init__(self):
        super().__init__()
        self.inner, self.resets, self.seen = nn.Linear(4, 1), 0, 0

    def forward(self, x):
        self.seen += 1
        return self.inner(x)

    def reset(self):
        self.resets, self.seen = self.resets + 1, 0


def test_a_model_that_can_be_reset_is_as_a_run_begins(two_gpus):
    learn = make_learner(model=Stateful())
    learn.fit(1)
    assert (learn.model.resets, learn.model.seen) == (1, 3)
    learn.validate()
    learn.get_preds()
    assert learn.model.resets == 3
    with learn.parallel_ctx():
        learn.fit(2, cbs=Callback(after_step=lambda cb: cb.learn.validate()))  # not in the middle of a run
    assert learn.model.resets == 4


def test_a_model_whose_reset_takes_arguments_is_left_alone():
    class Sized(Stateful):
        def reset(self, batch_size):
            raise AssertionError(f"got {batch_size}")

    learn = make_learner(model=Sized())
    learn.fit(1)
    learn.predict(torch.zeros(4))
    assert learn.model.seen == 4
