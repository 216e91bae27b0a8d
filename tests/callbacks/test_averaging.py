"""EMA and SWA: what they average, where the average is, and what is back afterwards."""

from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import (
    Unsized,
    make_data,
    make_dls,
    make_learner,
    make_model,
    mostly_slow,
    raises,
    raising,
    results_of,
    same_weights,
    weights,
)
from resume_jobs import Shuffling, Teacher
from torch import nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader

from learnerkit import (
    EMA,
    SWA,
    Callback,
    CancelBatchException,
    CancelFitException,
    CancelStepException,
    CheckpointCallback,
    DataLoaders,
    GradientAccumulation,
    Learner,
    MixedPrecision,
    SaveModelCallback,
    ValidateEvery,
    distributed,
    set_seed,
)
from learnerkit.callbacks.averaging import _Statistics
from learnerkit.callbacks.lr_find import minimum
from learnerkit.parallel import DriftCheck


def norm_model(dropout=0.0):
    """A network with BatchNorm."""
    set_seed(2)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 1)).double()


def dls(n=22, shuffle=False):
    """Loaders in double precision, of which the last training batch is small."""
    train, valid = make_data(n), make_data(8, seed=1)
    for data in (train, valid):
        data.tensors = tuple(t.double() for t in data.tensors)
    return DataLoaders.from_datasets(train, valid, bs=4, shuffle=shuffle, device="cpu")


def learner(*cbs, model=None, data=None, **kwargs):
    """A learner with BatchNorm and momentum."""
    opt_func = partial(torch.optim.SGD, momentum=0.9)
    model = norm_model(kwargs.pop("dropout", 0.0)) if model is None else model
    return make_learner(data or dls(), model, cbs=list(cbs), opt_func=opt_func, **kwargs)


class Raw(Callback):
    """The weights after each optimizer step, and at the end of each epoch's training."""

    order = 30
    run_valid = False

    def __init__(self):
        super().__init__()
        self.steps, self.epochs = [], []

    def after_step(self):
        self.steps.append(weights(self.learn.model))

    def after_train(self):
        self.epochs.append(weights(self.learn.model))


class Saves(Callback):
    """Saves after each epoch."""

    order = 90

    def after_epoch(self):
        self.learn.save(f"epoch{self.epoch}", with_opt=False)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


# What is averaged


def test_without_memory_ema_is_the_plain_fit():
    data = dls(shuffle=True)
    plain = learner(data=data, dropout=0.5)
    plain.fit(2)
    averaged = learner(EMA(decay=0), data=dls(shuffle=True), dropout=0.5)
    averaged.fit(2)
    assert same_weights(plain.model, averaged.model)
    assert plain.recorder.values == averaged.recorder.values


@pytest.mark.parametrize("warmup", [True, False])
def test_ema_is_the_mean_that_it_says(warmup):
    ema, raw = EMA(0.6, warmup=warmup), Raw()
    learn = learner(ema, raw)
    expected = weights(learn.model)
    learn.fit(2)
    for n, now in enumerate(raw.steps):
        d = min(0.6, (1 + n) / (10 + n)) if warmup else 0.6
        expected = {k: d * v + (1 - d) * now[k] if v.is_floating_point() else now[k] for k, v in expected.items()}
    close(weights(learn.model), expected)
    assert ema.n_averaged == len(raw.steps) == 12


def of_parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("to_module", [False, True])
@pytest.mark.parametrize(
    ("decay", "every", "start"),
    [(0.6, 1, 0), (0.6, 2, 3), (lambda share: 0.9 * share, 1, 0), (0.0, 5, 0), (0.5, 3, 12)],
)
def test_steps_and_decays_are_those_that_it_was_given(decay, every, start, to_module):
    raw, model = Raw(), norm_model()
    target = deepcopy(model) if to_module else None
    expected = of_parameters(model)
    ema = EMA(decay, warmup=False, every=every, start=start, module=target)
    learn = learner(ema, raw, model=model)
    learn.fit(2)
    assert len(raw.steps) == 12
    for k, now in enumerate(raw.steps, 1):
        d = 0.0 if k <= start else decay((k - 1) / 12) if callable(decay) else decay
        if k <= start or k % every == 0:
            expected = {name: d * value + (1 - d) * now[name] for name, value in expected.items()}
    close(of_parameters(target if to_module else learn.model), expected)
    assert ema.n_averaged == sum(k > start and k % every == 0 for k in range(1, 13))
    if to_module:
        assert same_weights(learn.model, raw.steps[-1])


def test_the_mean_of_swa_and_its_statistics_are_torchs():
    raw = Raw()
    learn = learner(SWA(start=1), raw)
    learn.fit(3)
    model = deepcopy(learn.model)
    for name, p in model.named_parameters():
        p.data = (raw.epochs[1][name] + raw.epochs[2][name]) / 2
    update_bn((x for x, _ in learn.dls.train), model)
    close(weights(learn.model), weights(model))
    assert not torch.allclose(raw.epochs[-1]["1.running_mean"], learn.model[1].running_mean)
    assert learn.model[1].momentum == 0.1


def test_swa_says_that_a_cancelled_epoch_does_not_count():
    def cancel(cb):
        raise CancelFitException

    learn = learner(SWA(0), Callback(after_batch=cancel), data=make_dls(4, 4), model=make_model())
    with pytest.warns(UserWarning, match="at start=0 or later and was trained to its end"):
        learn.fit(1)


@pytest.mark.parametrize(("start", "n"), [(0, 4), (3, 1), (0.0, 4), (0.5, 2), (0.75, 1), (0.9, 0)])
def test_swa_starts_where_it_is_told_to(start, n):
    swa = SWA(start)
    learn = learner(swa, data=make_dls(4, 4), model=make_model())
    if n:
        learn.fit(4)
    else:
        with pytest.warns(UserWarning, match="averaged nothing: no epoch of this fit began at start=0.9"):
            learn.fit(4)
    assert swa.n_averaged == n


@pytest.mark.parametrize("sampler", [None, Shuffling])
@pytest.mark.parametrize("average", [EMA(0.7), SWA(0)])
def test_training_goes_on_as_without(average, sampler):
    """Losses, sample order, random numbers, raw weights and statistics."""
    found = []
    for cbs in ([], [average]):
        set_seed(3)
        raw, data = Raw(), dls(shuffle=True)
        if sampler is not None:
            train = DataLoader(data.train_ds, 4, sampler=sampler(22))
            data = DataLoaders(train, data.valid, device="cpu")
        learn = learner(raw, *cbs, data=data, dropout=0.5)
        learn.fit(2)
        found.append((raw, [row[0] for row in learn.recorder.values], torch.rand(3).tolist()))
    (one, losses, drawn), (other, *same) = found
    assert same == [losses, drawn]
    assert all(map(same_weights, one.steps + one.epochs, other.steps + other.epochs))


def test_a_buffer_that_is_expanded_has_an_average():
    model = norm_model()
    model.register_buffer("scale", torch.ones(1, 3).expand(2, 3))  # torch refuses to write to it as a whole
    learner(EMA(0.5, False), Callback(after_step=lambda cb: model.scale[0].add_(1)), model=model).fit(1)
    average = 1.0
    for step in range(1, 7):
        average = (average + 1 + step) / 2
    assert torch.equal(model.scale, torch.full((2, 3), average))


class Centred(nn.Module):
    """Takes the mean of its inputs off, and averages it in place, or puts a new buffer in the place of the old one."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place, self.layer, self.scales = in_place, nn.Linear(4, 1), set()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x):
        if self.training:
            mean = 0.8 * self.mean + 0.2 * x.detach().mean(0)
            self.mean = self.mean.copy_(mean) if self.in_place else mean
            self.scale = torch.full_like(self.scale, 2)  # as the frequencies of longer positions are made anew
        else:
            self.scales.add(self.scale.item())
        return self.layer((x - self.mean) / self.scale)


def test_a_buffer_that_is_replaced_has_the_average_of_one_that_is_changed_in_place(tmp_path):
    """One that is not saved stays as the model has made it."""
    learners = []
    for in_place in (True, False):
        set_seed(2)
        model = Centred(in_place).double()
        learners.append(learner(EMA(0.6), Saves(), GradientAccumulation(n_batches=2), model=model, path=tmp_path))
        learners[-1].fit(2)
    expected, found = learners
    assert found.recorder.values == expected.recorder.values
    assert same_weights(expected.model, found.model)
    assert torch.load(tmp_path / "models" / "epoch1.pth")["mean"].equal(found.model.mean)
    assert found.model.scales == {2.0}


def test_a_sparse_buffer_stays_beside_an_average():
    model = norm_model()
    model.register_buffer("edges", torch.eye(3).to_sparse())
    learn = learner(EMA(0.5), model=model)
    learn.fit(1)
    assert learn.ema.n_averaged
    assert torch.equal(model.edges.to_dense(), torch.eye(3))


def test_the_average_of_buffers_is_saved_before_the_first_step_that_counts():
    def skip(cb):
        if cb.train_iter < 2:
            raise CancelStepException

    def run(*cbs):
        set_seed(3)
        learn = learner(EMA(0.9), Callback(before_step=skip), *cbs, data=dls())
        learn.fit(1)
        return learn

    def ends(when):
        return raising("after_batch", ZeroDivisionError, when, order=999)

    whole = run()
    with pytest.raises(ZeroDivisionError):
        run(CheckpointCallback("run", every=1), ends(lambda cb: cb.train_iter == 2))
    again = run(CheckpointCallback("run", resume=True), ends(lambda cb: False))
    assert same_weights(again.model, whole.model)


class Leaves(Callback):
    """Leaves some steps out, and some batches after their step."""

    order = -20
    run_valid = False

    def before_step(self):
        if self.train_iter == 1:
            raise CancelStepException

    def after_step(self):
        if self.train_iter == 2:
            raise CancelBatchException
        if self.train_iter == 4:
            raise CancelFitException


@pytest.mark.filterwarnings("ignore:mixed precision with float16")
def test_an_update_for_each_step_that_is_taken():
    for cbs, epochs, n in (
        ([Leaves()], 3, 4),
        ([GradientAccumulation(n_batches=4)], 2, 4),  # six batches an epoch, which the loader does not say
        ([MixedPrecision("fp16", init_scale=2.0**120)], 1, 0),
    ):
        ema, data = EMA(), make_dls(22, 8)
        data = DataLoaders(Unsized(list(data.train)), data.valid, device="cpu")
        learn = make_learner(data, norm_model().float(), cbs=[ema, *cbs])
        learn.fit(epochs)
        assert ema.n_averaged == n
        assert all(not opt._optimizer_step_post_hooks for opt in learn.opts)


def test_low_precision_is_averaged_in_float32():
    ema = EMA(0.9999, warmup=False)
    learn = make_learner(make_dls(400, None, data=lambda n, seed=0: to_bf16(make_data(n))),
                         make_model().bfloat16(), cbs=ema)  # fmt: skip
    start = weights(learn.model)
    learn.opt_func = Shift
    learn.fit(1)
    moved = learn.model[0].weight - start["0.weight"]
    assert (moved > 0).all()  # a hundredth of a step is below what bfloat16 can tell


def to_bf16(data):
    data.tensors = tuple(t.bfloat16() for t in data.tensors)
    return data


class Shift(torch.optim.SGD):
    """Adds 1 to all weights in the first step, and nothing in the others."""

    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if not self.state[p]):
            self.state[p]["done"] = True
            p.data += 1


# Another module that has the average


class Pair(nn.Module):
    """Queries, and keys that follow them."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.head = make_model().double(), make_model().double(), make_model(1).double()

    def forward(self, x):
        return self.head(self.query(x)) + 0.1 * self.key(x)


def test_a_module_that_follows_changes_nothing_else():
    found = []
    for cbs in ([], [EMA(0.7, module=norm_model())]):
        learn = learner(*cbs, Saves(), data=dls(shuffle=True), dropout=0.5)
        learn.fit(2)
        found.append((learn.recorder.values, weights(learn.model), torch.load("models/epoch1.pth", weights_only=True)))
    assert found[0][0] == found[1][0]
    assert all(map(same_weights, found[0][1:], found[1][1:]))


def test_several_modules_follow_beside_an_average_of_the_weights():
    model, later = Pair(), make_model().double()
    key, average = EMA(0.9, module=model.key, of=model.query), EMA(0.5, warmup=False)
    other, raw = EMA(0.0, every=4, module=later, of=model.query), Raw()
    seen = Callback(before_backward=lambda cb: frozen.append([p.requires_grad for p in model.key.parameters()]))
    frozen, start = [], weights(model)
    learn = learner(key, average, other, raw, seen, model=model)
    assert (learn.ema, learn.ema_target) == (average, other)
    learn.fit(2)
    expected, mean = {k.removeprefix("key."): v for k, v in start.items() if k.startswith("key.")}, start
    for now in raw.steps:  # noted before the averages, which are made after the batch
        queries = {k.removeprefix("query."): v for k, v in now.items() if k.startswith("query.")}
        expected = {k: 0.9 * v + 0.1 * queries[k] for k, v in expected.items()}
        followed = now | {f"key.{k}": v for k, v in expected.items()}
        mean = {k: 0.5 * v + 0.5 * followed[k] for k, v in mean.items()}
    close(weights(learn.model), mean)
    close(weights(later), {k.removeprefix("query."): v for k, v in raw.steps[-1].items() if k.startswith("query.")})
    assert not any(map(any, frozen))
    assert all(p.requires_grad for p in [*model.parameters(), *later.parameters()])
    learn.remove_cb(other)
    assert learn.ema_target is key


def test_a_frozen_module_stays_frozen_and_its_buffers_are_its_own():
    model, target = norm_model(), norm_model().requires_grad_(False)
    target[1].running_mean.fill_(7.0)
    learner(EMA(0.5, module=target), model=model).fit(1)
    assert not any(p.requires_grad for p in target.parameters())
    assert (target[1].running_mean == 7).all()


def test_a_parameter_that_is_in_both_modules_is_trained_as_without():
    model, plain = make_model(), make_learner()
    target = deepcopy(model)
    target[0].weight = model[0].weight
    make_learner(model=model, cbs=EMA(0.5, module=target)).fit(1)
    plain.fit(1)
    assert same_weights(model, plain.model)
    assert target[0].weight is model[0].weight


def test_a_module_in_low_precision_gets_an_average_of_float32():
    model, target = make_model(), make_model().bfloat16()
    ema = EMA(0.999, module=target)
    learn = make_learner(make_dls(400, None), model, cbs=ema)
    learn.opt_func = Shift
    start = weights(target)
    learn.fit(1)
    moved = target[0].weight.float() - start["0.weight"].float()
    assert (moved > 0.05).all()


class Ratio(Learner):
    """Trains the last layer with every third batch."""

    def create_opt(self):
        return {n: torch.optim.SGD(self.model[i].parameters(), 0.1) for n, i in (("first", 0), ("last", -1))}

    def _step(self):
        self.opt["first"].step()
        if self.iter % 3 == 2:
            self.opt["last"].step()


def test_the_steps_are_those_of_the_optimizer_that_trains_what_is_averaged():
    model = make_model()
    counts = [EMA(0.5, module=make_model()[0], of=model[0]), EMA(0.5, of=model[-1])]
    make_learner(make_dls(24), model, cls=Ratio, cbs=counts).fit(2)
    assert [ema.n_averaged for ema in counts] == [12, 4]


def test_a_module_is_put_back_where_nothing_is_fitted():
    target = norm_model()
    ema = EMA(0.5, module=target)
    learn = learner(ema, Callback(after_pred=lambda cb: target(cb.xb[0])))
    before = weights(target)
    learn.lr_find(num_it=10, show_plot=False, suggest_funcs=minimum)
    assert ema.n_averaged == 0
    assert same_weights(before, target)
    learn.check()
    assert same_weights(before, target)


# Where the average is


@pytest.mark.parametrize("average", [EMA(0.7), SWA(1)])
def test_what_is_validated_is_what_is_saved(average):
    learn = learner(average, Saves(), ValidateEvery(4), SaveModelCallback(at_end=True, fname="last"))
    learn.fit(3)
    rows = {int(i): row[1] for i, row in zip(learn.recorder.iters, learn.recorder.values, strict=True)}
    other = learner()
    for epoch in range(3):
        close(other.load(f"epoch{epoch}", with_opt=False).validate(), [rows[6 * epoch + 6]])
    close(learn.validate(), [rows[18]])
    assert same_weights(other.load("last", with_opt=False).model, learn.model)
    assert learn.as_validated is type(learn).as_validated
    assert average._average == {}  # nothing of it stays in memory


@pytest.mark.parametrize("average", [EMA(0.7), SWA(1)])
def test_after_a_fit_no_average_is_made_for_a_validation(average):
    learn = learner(average)
    learn.fit(3)
    seen = []
    look = Callback(before_batch=lambda cb: seen.append((dict(average._own), average._copies)))
    learn.add_cb(look)
    learn.validate()
    assert seen
    assert all(each == ({}, []) for each in seen)


def test_the_best_model_is_an_average():
    later = Callback(order=90, after_fit=lambda cb: cb.learn.save("later"))
    later.only_fit = True
    learn = learner(EMA(0.7), SaveModelCallback(), later)
    learn.fit(3, 0.5)
    best, last = min(row[1] for row in learn.recorder.values), learn.recorder.values[-1][1]
    assert best < last - 1e-3
    close(learn.validate(), [best])
    close(learn.load("later").validate(), [best])


def test_predictions_in_mid_fit_are_the_averages_too():
    found = []
    look = Callback(order=80, after_epoch=lambda cb: found.append(cb.learn.validate()[0]))
    learn = learner(EMA(0.7), look)
    learn.fit(2)
    close(found, [row[1] for row in learn.recorder.values])
    inside = Callback(order=20, after_validate=lambda cb: cb.task == "fit" and found.append(cb.learn.get_preds()))
    learn = learner(EMA(0.7), inside)
    learn.fit(1)
    close(found[-1], learn.get_preds())


@pytest.mark.parametrize("average", [partial(EMA, 0.7), partial(SWA, 0)])
@pytest.mark.parametrize("event", ["after_pred", "before_backward"])
def test_the_average_may_be_validated_between_the_forward_and_the_backward_pass(average, event):
    look = Callback(**{event: lambda cb: cb.training and cb.learn.validate()})
    learners = [learner(average(), *cbs) for cbs in ([], [look])]
    for learn in learners:
        learn.fit(2)
    assert same_weights(*(learn.model for learn in learners))
    assert learners[0].recorder.values == learners[1].recorder.values


def test_within_a_batch_the_casts_of_autocast_are_those_of_the_weights_in_the_model():
    found, losses = {}, []
    for event in ("before_batch", "after_pred", "before_backward"):
        set_seed(0)
        values = found[event] = []

        def look(cb, values=values):
            if cb.training and cb.iter == 2:
                values.append(cb.learn.validate()[0])

        learn = make_learner(make_dls(20, bs=4), cbs=[EMA(0.9, warmup=False), Callback(order=50, **{event: look})])
        learn.to_bf16().fit(1, 0.1)
        losses.append(learn.recorder.values[0][0])
    assert found["after_pred"] == found["before_backward"]
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("average", [EMA(0.7), SWA(0)])
@pytest.mark.parametrize("event", ["before_validate", "after_pred", "after_validate", "after_step", "after_epoch"])
def test_after_an_error_the_weights_are_back(average, event):
    raw = Raw()
    error = raising(event, KeyboardInterrupt(), lambda cb: cb.epoch == 1, order=40)
    error.run_train = event == "after_step"
    learn = learner(raw, average, error)
    with pytest.raises(KeyboardInterrupt):
        learn.fit(3)
    assert same_weights(learn.model, raw.steps[-1])
    assert learn.model[1].momentum == 0.1
    learn.remove_cbs([error])
    learn.fit(1)  # and the next fit works


@pytest.mark.parametrize("average", [EMA(0), SWA(0)])
def test_where_nothing_is_fitted_nothing_is_averaged(average):
    learn = learner(average)
    before = weights(learn.model)
    learn.validate()
    learn.lr_find(num_it=10, show_plot=False, suggest_funcs=minimum)
    learn.check()
    assert same_weights(before, learn.model)
    assert average.n_averaged == 0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: EMA(1.0), "decay=1.0"),
        (lambda: EMA(None), "got decay=None; it is the weight of the past"),
        (lambda: EMA(every=0), "every=0"),
        (lambda: EMA(start=-1), "start=-1"),
        (lambda: learner(EMA(lambda share: 1.5)).fit(1), "got decay(0.0)=1.5; it is the weight of the past"),
        (lambda: learner(EMA(module=make_model())).fit(1), "of Sequential and Sequential differ in 1.weight"),
        (lambda: learner(EMA(module=(m := norm_model())), model=m).fit(1), "are one module's: of= says"),
        (lambda: SWA(-1), "start=-1"),
        (lambda: SWA(1.0), "start=1.0"),
        (lambda: learner(EMA(), SWA()).fit(2), "two callbacks average the weights"),
        (lambda: learner(SWA(2)).fit(2), "would average nothing"),
        (lambda: learner(SWA(), data=DataLoaders(iter(dls().train), device="cpu")).fit(2), "it is an iterator"),
    ],
)
def test_bad_decays_and_steps_of_averages_are_refused(make, said):
    with raises(ValueError, said):
        make()


def test_statistics_may_come_from_another_loader():
    batches = [torch.rand(4, 4).double() for _ in range(3)]
    learn = learner(SWA(0, bn_dl=batches), data=DataLoaders(list(dls().train), device="cpu"))
    learn.fit(1)
    model = deepcopy(learn.model)
    update_bn(batches, model)
    close(weights(learn.model), weights(model))


def test_a_single_sample_counts_where_it_has_several_values_for_a_channel():
    images = [(torch.rand(n, 3, 2, 2), torch.rand(n, 1)) for n in (1, 4, 1)]
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    learn = make_learner(DataLoaders(images[1:2], device="cpu"), model, cbs=SWA(0, bn_dl=images))
    learn.fit(1)
    assert (model[0].num_batches_tracked, model[3].num_batches_tracked) == (3, 1)
    means = [x.mean((0, 2, 3)) for x, _ in images]
    torch.testing.assert_close(model[0].running_mean, sum(means) / 3)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_layers_in_eval_mode_keep_their_statistics():
    model = norm_model()
    model.train()
    model[1].eval()
    before = weights(model[1])
    learner(SWA(0), model=model).fit(2)
    assert torch.equal(model[1].running_mean, before["running_mean"])


def test_swa_leaves_buffers_that_are_no_statistics_as_they_are():
    model = norm_model()
    model.register_buffer("position_ids", torch.arange(4).expand(2, -1))  # nothing can be written to it
    model.register_buffer("n_steps", torch.tensor(0))
    learner(SWA(1), Callback(after_step=lambda cb: model.n_steps.add_(1)), model=model).fit(3)
    assert model.n_steps == 18
    assert torch.equal(model.position_ids, torch.arange(4).expand(2, -1))


# Several ranks


class Seen(Callback):
    """What each rank has in its model in validation."""

    order = 80

    def __init__(self):
        super().__init__()
        self.found = []

    def before_validate(self):
        if self.task == "fit":
            self.found.append(weights(self.learn.model))


def fit(*cbs, model=None, epochs=3):
    learn, seen = learner(*cbs, Saves(), model=model, data=dls(shuffle=True)), Seen()
    learn.path = Path(str(distributed.world_size()))
    learn.add_cb(seen)
    with learn.distrib_ctx(split_batches=True, sync_bn=False), learn.no_logging():
        learn.fit(epochs, 0.05)
    files = sorted(learn.path.glob("models/*")) if distributed.is_main() else []
    return {
        "seen": seen.found, "end": weights(learn.model), "values": learn.recorder.values, "n": cbs[0].n_averaged,
        "saved": [torch.load(file, weights_only=True) for file in files],
    }  # fmt: skip


def statistics():
    """Synchronised layers have no collectives while their statistics are computed: ranks have 3 and 2 batches."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(norm_model())
    learn, measure = learner(model=model, data=dls(20)), _Statistics([model[1]])
    with learn.distrib_ctx(sync_bn=False), learn.no_logging():
        learn.validate(dl=DataLoader(learn.dls.train_ds, 4), cbs=measure)
    return measure.found, "forward" in vars(model[1])


def divided(shard):
    """Statistics are computed with a last batch of which one rank has a single sample."""
    learn = learner(SWA(1), data=dls(23))
    with learn.distrib_ctx(split_batches=True, sync_bn=False, shard=shard, timeout=30), learn.no_logging():
        learn.fit(2, 0.05)
    return weights(learn.model)


def taught():
    """With a teacher that is another one on each rank, until they begin."""
    torch.manual_seed(distributed.rank())
    target = make_model(seed=distributed.rank()).double()
    found = fit(Teacher(target), EMA(0.9, every=3), model=make_model().double())
    return found | {"target": weights(target)}


def at_9(cb):
    return cb.train_iter == 9


JOBS = {
    "EMA": lambda: fit(EMA(0.7), Leaves(), DriftCheck(every=1), model=make_model().double()),
    "EMA, accumulated": lambda: fit(EMA(0.7), GradientAccumulation(n_batches=4), model=make_model().double()),
    "EMA, taught": taught,
    "EMA, in the model": lambda: fit(EMA(0.7, module=(pair := Pair()).key, of=pair.query), Leaves(), model=pair),
    "SWA": lambda: fit(SWA(1), model=make_model().double()),
    "EMA, norms": lambda: fit(EMA(0.7), ValidateEvery(4), DriftCheck(every=2), epochs=2),
    "EMA, ended": lambda: fit(
        EMA(0.7), raising("after_batch", CancelFitException(), at_9), SaveModelCallback(at_end=True)
    ),
    "SWA, norms": lambda: fit(SWA(0), ValidateEvery(4), DriftCheck(every=2), epochs=2),
    "SWA, whole": lambda: divided(False),
    "SWA, sharded": lambda: divided(True),
    "statistics": statistics,
}


def do(name):
    return JOBS[name]()


found = results_of(do)


@pytest.mark.parametrize(
    "job", mostly_slow(["EMA", "EMA, accumulated", "EMA, taught", "EMA, in the model", "SWA"], "EMA", "SWA")
)
def test_averages_on_ranks_are_those_of_one_process(found, job):
    (alone,) = found[1, job]
    for rank in found[2, job]:
        close(rank["end"], alone["end"])
        close(rank["seen"], alone["seen"])
        close(rank["values"], alone["values"])
        close(rank.get("target", {}), alone.get("target", {}))
        assert rank["n"] == alone["n"] > 0


@pytest.mark.parametrize("job", mostly_slow(["EMA, norms", "SWA, norms"], "SWA, norms"))
def test_statistics_on_ranks_are_validated_and_saved_alike(found, job):
    first, second = found[2, job]
    assert len(first["seen"]) == 2
    assert all(map(same_weights, first["seen"], second["seen"]))
    assert all(map(same_weights, first["seen"], first["saved"]))
    assert same_weights(first["end"], second["end"])
    assert same_weights(first["end"], first["saved"][-1])


def test_averages_on_ranks_are_the_same_in_mid_epoch(found):
    first, second = found[2, "EMA, ended"]
    assert (first["n"], len(first["seen"])) == (9, 1)
    assert same_weights(first["end"], second["end"])
    assert same_weights(first["end"], first["saved"][-1])


def test_statistics_on_ranks_are_the_means_over_all_batches(found):
    (alone, _), *ranks = found[1, "statistics"] + found[2, "statistics"]
    for rank, left in ranks:
        close(rank, alone)
        assert not left


def test_a_rank_with_a_single_sample_takes_part_in_the_statistics_of_a_sharded_model(found):
    for whole, sharded in zip(found[2, "SWA, whole"], found[2, "SWA, sharded"], strict=True):
        close(sharded, whole)
