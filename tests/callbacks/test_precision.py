"""Mixed precision, clipping, memory format and compiling: what they compute, and that nothing of them stays."""

import operator
import shutil

import pytest
import torch
from helpers import (
    KeepsGradients,
    make_classes,
    make_data,
    make_dls,
    make_learner,
    make_model,
    mostly_soak,
    raises,
    raising,
    same_weights,
    spy,
    weights,
)
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import (
    EMA,
    AccumMetric,
    Callback,
    CancelBackwardException,
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelStepException,
    CancelTrainException,
    ChannelsLast,
    Compile,
    DataLoaders,
    DataParallelCallback,
    EarlyStoppingCallback,
    GradientAccumulation,
    GradientClip,
    Learner,
    MixedPrecision,
    SaveModelCallback,
    mae,
)
from learnerkit.distributed import facts

pytestmark = pytest.mark.filterwarnings("ignore:mixed precision with float16 is some 30 times slower on a CPU")

LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}
SCALE = {"fp16": {"init_scale": 1024.0}, "bf16": {}}  # with which no step overflows
IN_BATCH = (
    "before_batch",
    "after_pred",
    "after_loss",
    "before_backward",
    "after_backward",
    "before_step",
    "after_step",
)
IN_BATCH += ("after_batch",)


class Spy(nn.Module):
    """A network that notes in which type it computes."""

    def __init__(self, n_out=1):
        super().__init__()
        self.inner, self.seen = make_model(n_out=n_out), set()

    def forward(self, x):
        out = self.inner(x)
        self.seen.add(out.dtype)
        return out


def in_training(order=0, **hooks):
    """A callback of functions that is not heard in validation."""
    cb = Callback(order=order, **hooks)
    cb.run_valid = False
    return cb


def close(a, b, atol):
    """Whether two models have nearly the same parameters."""
    return all(torch.allclose(p, q, atol=atol, rtol=0) for p, q in zip(a.parameters(), b.parameters(), strict=True))


# Mixed precision


@pytest.mark.parametrize("mode", LOW)
def test_the_model_computes_in_half_precision_and_all_else_does_not(mode):
    model, preds, losses = Spy(), set(), set()
    note = Callback(after_loss=lambda cb: (preds.add(cb.pred.dtype), losses.add(cb.loss.dtype)), order=11)
    learn = make_learner(
        model=model, cbs=MixedPrecision(mode, **SCALE[mode]), metrics=lambda p, t: (p - t).abs().mean()
    )
    before = learn.validate(0)[0]
    model.seen.clear()
    learn.fit(20, cbs=note)
    assert model.seen == {LOW[mode]}
    assert preds | losses | {p.dtype for p in model.parameters()} == {torch.float32}
    assert learn.validate(0)[0] < before
    assert learn.get_preds()[0].dtype == torch.float32
    assert model.seen == {LOW[mode]}
    plain = make_learner()
    plain.fit(20)
    assert close(plain.model, model, 0.02)
    assert not close(plain.model, model, 1e-6)


def test_nested_predictions_become_float32_and_integers_stay():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 1)

        def forward(self, x):
            out = self.inner(x)
            return {"a": out, "b": [out, out.argmax(1)]}

    def loss(pred, y):
        assert [pred["a"].dtype, *(t.dtype for t in pred["b"])] == [torch.float32, torch.float32, torch.int64]
        return nn.functional.mse_loss(pred["a"], y)

    make_learner(model=Two(), loss_func=loss, cbs=MixedPrecision("bf16")).fit(1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", mostly_soak(LOW, "fp16"))
@pytest.mark.parametrize("event", IN_BATCH)
@pytest.mark.parametrize("order", mostly_soak([-5, 50], -5))
def test_a_batch_that_was_cut_short_leaves_no_autocast(mode, event, order):
    learn, between = make_learner(cbs=MixedPrecision(mode)), []
    watch = Callback(
        before_validate=lambda cb: between.append(torch.is_autocast_enabled("cpu")),
        before_step=lambda cb: between.append(torch.is_autocast_enabled("cpu")),
        order=60,
    )
    for error in (
        CancelBatchException, CancelBackwardException, CancelStepException, CancelTrainException, CancelEpochException,
        CancelFitException, ZeroDivisionError, KeyboardInterrupt,
    ):  # fmt: skip
        try:
            learn.fit(1, cbs=[watch, raising(event, error(), order=order)])
        except error:  # a cancel of the step, say, has no meaning at other events
            pass
        assert not torch.is_autocast_enabled("cpu"), error
        assert not any(between), error
        assert learn.mixed_precision._open == [], error
        assert learn.mixed_precision.scaler is None, error
        learn.fit(1)


def test_validation_inside_a_batch_has_its_own_autocast():
    seen = []

    def look(cb):
        cb.learn.validate()
        seen.append(torch.is_autocast_enabled("cpu"))

    learn = make_learner(cbs=MixedPrecision("bf16"))
    learn.fit(1, cbs=[in_training(after_pred=look, order=50), in_training(after_step=look, order=50)])
    assert seen == [True, False] * 2
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("place", ["gradient", "loss"])
def test_a_step_that_overflows_is_skipped_and_halves_the_scale(place):
    scales, events, at = [], [], []

    def spoil(cb):
        if cb.train_iter == 1:
            if place == "gradient":
                next(cb.model.parameters()).grad[0, 0] = torch.inf
            else:
                cb.learn.loss_grad = cb.loss_grad * 1e38

    def note(cb):
        scales.append(cb.mixed_precision.scaler.get_scale())
        at.append(weights(cb.model))

    spoiler = Callback(**{"after_backward" if place == "gradient" else "before_backward": spoil})
    learn = make_learner(cbs=[MixedPrecision("fp16", init_scale=1024.0), spoiler])
    first = weights(learn.model)
    names = ("before_step", "after_cancel_step", "after_step")
    learn.fit(2, cbs=[in_training(after_batch=note, order=50), spy(events, events=names, order=50)])
    assert scales == [1024.0, 512.0, 512.0, 512.0]
    taken, skipped = ["before_step", "after_step"], ["after_cancel_step", "after_step"]
    assert events == taken + skipped + taken * 2
    assert not same_weights(first, at[0])
    assert same_weights(at[0], at[1])
    assert not same_weights(at[1], at[-1])
    assert learn.mixed_precision.skipped == 1


def test_the_scale_grows_again():
    scales = []
    cb = in_training(after_batch=lambda cb: scales.append(cb.mixed_precision.scaler.get_scale()), order=11)
    learn = make_learner(cbs=MixedPrecision("fp16", init_scale=8.0, growth_interval=2))
    learn.fit(2, cbs=cb)
    assert scales == [8.0, 16.0, 16.0, 32.0]
    learn.fit(1, cbs=cb)
    assert scales[4:] == [32.0, 64.0]  # it goes on where the last fit has left it


def fp16_learner(**kwargs):
    return make_learner(cbs=MixedPrecision("fp16", init_scale=8.0, growth_interval=2), **kwargs)


def test_the_scale_survives_a_fit_and_travels_in_files():
    learn, other = fp16_learner(), fp16_learner(model=make_model(seed=3))
    assert learn.state_dict()["scaler"] == {}
    learn.fit(3)
    state = learn.state_dict()["scaler"]
    assert (state["scale"], state["_growth_tracker"]) == (64.0, 0)
    assert torch.load(learn.save("full"), weights_only=True)["scaler"] == state
    other.load("full")
    assert other.state_dict()["scaler"] == state
    plain = make_learner().load("full")  # a learner without a scaler has no use for the state
    plain.fit(1)
    scales = []
    note = in_training(before_batch=lambda cb: scales.append(cb.mixed_precision.scaler.get_scale()), order=11)
    for each in (learn, other):
        each.fit(1, cbs=note)
    assert scales == [64.0, 64.0] * 2
    assert same_weights(learn.model, other.model)
    fp16_learner().load("full", with_opt=False).fit(1, cbs=note)
    assert scales[4:] == [8.0, 8.0]
    assert set(torch.load(learn.save("bare", with_opt=False), weights_only=True)) == set(learn.model.state_dict())


def scales_of(learn, cbs=()):
    """The scale at each step of an epoch."""
    scales = []
    note = in_training(before_batch=lambda cb: scales.append(cb.mixed_precision.scaler.get_scale()), order=11)
    learn.fit(1, cbs=[note, *cbs])
    return scales


def test_the_scale_belongs_to_the_learner_whichever_callback_trains():
    saved = fp16_learner()
    saved.fit(3)
    saved.save("full")
    assert scales_of(make_learner().load("full").to_fp16(growth_interval=50))[0] == 64.0
    assert scales_of(saved.to_fp16(init_scale=2.0))[0] == 64.0
    fresh = make_learner()
    for scale in (8.0, 16.0, 32.0):  # two steps each
        assert scales_of(fresh, cbs=[MixedPrecision(init_scale=8.0, growth_interval=2)])[0] == scale
    assert torch.load(fresh.save("fresh"), weights_only=True)["scaler"]["scale"] == 64.0
    # A file gives the scale, not how it grows; of good steps never more than the interval asks for.
    state = torch.load("models/full.pth", weights_only=True)
    state["scaler"] |= {"_growth_tracker": 1000, "growth_factor": 8.0}
    torch.save(state, "models/odd.pth")
    assert scales_of(fp16_learner().load("odd")) == [64.0, 128.0]


def test_a_scaler_that_is_switched_off_leaves_the_scale_alone():
    learn = fp16_learner()
    learn.fit(3)
    state = learn.state_dict()["scaler"]
    learn.to_fp16(enabled=False).fit(1)
    assert learn.state_dict()["scaler"] == state


def test_a_save_in_mid_fit_has_the_scale_of_the_moment():
    learn = fp16_learner(dls=make_dls(train=16))
    found = []

    def save(cb):
        cb.learn.save("now")
        found.append(torch.load("models/now.pth", weights_only=True)["scaler"]["scale"])

    learn.fit(1, cbs=in_training(after_batch=save, order=20))
    assert found == [8.0, 16.0, 16.0, 32.0]
    before = []
    look = in_training(after_batch=lambda cb: before.append(cb.mixed_precision.scaler.get_scale()), order=20)
    learn.fit(1, cbs=[look, in_training(before_batch=lambda cb: cb.iter == 2 and cb.learn.load("now"), order=20)])
    assert before == [32.0, 64.0, 32.0, 64.0]


def test_what_only_tries_something_out_leaves_the_scale_alone():
    learn = fp16_learner()
    learn.fit(2)
    state = learn.state_dict()["scaler"]
    learn.lr_find(num_it=10, show_plot=False, stop_div=False)
    learn.check()
    learn.validate()
    assert learn.state_dict()["scaler"] == state
    with pytest.raises(ZeroDivisionError):
        learn.fit(1, cbs=Callback(before_validate=lambda cb: 1 / 0))
    assert learn.state_dict()["scaler"]["scale"] == 2 * state["scale"]


@pytest.mark.filterwarnings("error")
def test_float16_on_a_cpu_says_what_is_faster(monkeypatch):
    monkeypatch.setattr(facts, "_warned", set())
    with pytest.warns(UserWarning, match=r"30 times slower on a CPU.*use bf16 there \(learn.to_bf16\(\)"):
        make_learner().to_fp16().fit(1)
    make_learner().to_fp16().fit(1)  # once a process
    make_learner().to_bf16().fit(1)


def test_a_step_without_gradients_or_cancelled_by_others_is_no_matter():
    for event, error in (("before_backward", CancelBackwardException), ("before_step", CancelStepException)):
        learn = make_learner(cbs=[MixedPrecision("fp16"), in_training(**{event: _raise(error)})])
        before = weights(learn.model)
        learn.fit(1)
        assert same_weights(before, learn.model)


def _raise(error):
    def hook(cb):
        raise error

    return hook


def test_two_optimizers_and_a_parameter_in_both():
    class Both(Callback):
        order = 20

        def before_step(self):
            self.norms = [p.grad.norm().item() for p in self.learn.model.parameters()]

    def learner(cbs):
        learn = make_learner(cbs=cbs)

        def create():
            first, *rest = learn.model.parameters()
            learn.opt = {"a": torch.optim.SGD([first, *rest[:2]], 0.1), "b": torch.optim.SGD(rest, 0.1)}

        learn.create_opt = create
        return learn

    plain, mixed = learner([Both()]), learner([MixedPrecision("fp16", init_scale=1024.0), Both()])
    plain.fit(1)
    mixed.fit(1)
    assert mixed.both.norms == pytest.approx(plain.both.norms, rel=0.02)


def test_mixed_precision_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="mode='fp61'.*did you mean 'fp16'"):
        MixedPrecision("fp61")
    with pytest.raises(TypeError, match="init_scael.*did you mean 'init_scale'"):
        MixedPrecision(init_scael=1.0)
    with pytest.raises(TypeError, match="init_scale with mode='bf16'"):
        MixedPrecision("bf16", init_scale=1.0)
    with pytest.raises(ValueError, match="growth factor must be > 1"):
        MixedPrecision(growth_factor=0.5)
    learn = make_learner(model=make_model().half(), cbs=MixedPrecision("fp16"))
    with pytest.raises(ValueError, match=r"float16 parameters \(0.weight and 3 more\)"):
        learn.fit(1)


def test_a_device_without_such_an_autocast_is_refused():
    from learnerkit.callbacks.precision import _check_autocast

    with pytest.raises(ValueError, match="'meta' has no mixed precision with 'fp16'.*try 'bf16'"):
        _check_autocast("meta", "fp16")


class OwnLoss(nn.Module):
    """A model that makes its own loss, of what autocast has made half."""

    def __init__(self):
        super().__init__()
        self.inner = make_model()

    def forward(self, x, labels):
        pred = self.inner(x)
        return {"logits": pred, "loss": (pred - labels.to(pred.dtype)).abs().mean()}


def learner_of_its_own_loss(mode, **kwargs):
    x, y = make_data(8).tensors
    dl = DataLoader([{"x": a, "labels": b} for a, b in zip(x, y, strict=True)], 4)
    cbs = [*kwargs.pop("cbs", []), MixedPrecision(mode, **SCALE[mode])]
    return Learner(DataLoaders(dl, dl, device="cpu"), OwnLoss(), cbs=cbs, loss_weight="samples", **kwargs)


@pytest.mark.parametrize("mode", LOW)
def test_a_loss_of_the_models_own_is_float32(mode):
    kinds = set()
    look = Callback(after_batch=lambda cb: kinds.update((cb.loss.dtype, cb.training and cb.loss_grad.dtype)))
    learner_of_its_own_loss(mode, cbs=[look]).fit(1)
    assert kinds == {torch.float32, False}


@pytest.mark.parametrize("mode", LOW)
def test_no_second_copy_of_the_predictions_is_kept_for_the_backward_pass(mode):
    kept, measured = set(), set()
    look = Callback(before_backward=lambda cb: kept.add((cb.pred.dtype, cb.output is cb.pred)))
    make_learner(cbs=[look, MixedPrecision(mode, **SCALE[mode])]).fit(1)
    assert kept == {(torch.float32, True)}

    def metric(pred, target):
        measured.add(pred.dtype)
        return (pred - target).abs().mean()

    kept.clear()
    look = Callback(before_backward=lambda cb: kept.add(cb.pred.dtype))
    learn = learner_of_its_own_loss(mode, cbs=[look], metrics=metric)
    learn.recorder.train_metrics = True
    learn.fit(1)
    assert kept == {LOW[mode]}
    assert measured == {torch.float32}
    assert learn.get_preds()[0].dtype == torch.float32


def test_the_verbs_of_the_learner_replace_each_other():
    learn = make_learner().to_fp16(init_scale=4.0).to_bf16()
    assert [cb.mode for cb in learn.cbs if isinstance(cb, MixedPrecision)] == ["bf16"]
    learn.fit(1)
    with pytest.raises(TypeError, match="got the argument 'bad'"):
        learn.to_fp16(bad=1)
    assert [cb.mode for cb in learn.cbs if isinstance(cb, MixedPrecision)] == ["bf16"]
    assert not any(isinstance(cb, MixedPrecision) for cb in learn.to_fp32().cbs)


def test_loss_on_replicas_goes_with_mixed_precision(two_gpus):
    taken, learn = [], make_learner(cbs=[MixedPrecision("bf16"), GradientClip()])

    class Look(DataParallelCallback):
        def _loss(self):
            taken.append((self.learn.training, self._taken is not None, self.learn.pred is None))
            super()._loss()

    learn.add_cb(Look())
    learn.fit(1)
    assert taken == [(True, True, True)] * 2 + [(False, False, False)]


# Clipping


def by_hand(max_norm, epochs=3, batches=2, norm_type=2.0):
    """A plain float32 loop with clipping: its network and its norms."""
    model, found = make_model(), []
    opt = torch.optim.SGD(model.parameters(), 0.1, fused=True)  # as the learner's, to be equal bit by bit
    x, y = make_data(8).tensors
    for _ in range(epochs):
        for part in torch.arange(8).chunk(batches):
            nn.functional.mse_loss(model(x[part]), y[part]).backward()
            found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type).item())
            opt.step()
            opt.zero_grad()
    return model, found


class Norms(GradientClip):
    """Also keeps the norms."""

    def __init__(self, max_norm, norm_type=2.0):
        super().__init__(max_norm, norm_type, log=True)

    def before_fit(self):
        self.found = []

    def before_step(self):
        log = self.learn.log_metric
        self.learn.log_metric = lambda name, value: (self.found.append(value.item()), log(name, value))
        try:
            super().before_step()
        finally:
            del self.learn.log_metric


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_is_that_of_a_hand_written_loop(norm_type):
    clip = Norms(0.05, norm_type)
    learn = make_learner(cbs=clip)
    learn.fit(3)
    model, norms = by_hand(0.05, norm_type=norm_type)
    assert clip.found == norms
    assert same_weights(model, learn.model)
    place = learn.recorder.metric_names.index("grad_norm")
    assert learn.recorder.values[-1][place - 1] == pytest.approx(sum(norms[-2:]) / 2)


@pytest.mark.parametrize("scale", [2.0**-4, 2.0**12])
def test_clipping_sees_unscaled_gradients(scale):
    clip = Norms(0.05)
    learn = make_learner(cbs=[clip, MixedPrecision("fp16", init_scale=scale)])
    learn.fit(3)
    model, norms = by_hand(0.05)
    assert clip.found == pytest.approx(norms, rel=0.02)
    assert close(model, learn.model, 2e-3)


def test_clipping_comes_after_unscaling_and_not_in_a_skipped_step():
    clip = Norms(0.05)
    spoil = Callback(after_backward=lambda cb: next(cb.model.parameters()).grad.fill_(torch.nan))
    learn = make_learner(cbs=[clip, MixedPrecision("fp16"), spoil])
    learn.fit(1)
    assert clip.found == []
    assert learn.mixed_precision.skipped == 2


def test_accumulated_batches_are_clipped_and_scaled_as_one():
    clips, models = [], []
    for bs, cbs in ((8, []), (2, [GradientAccumulation(n_batches=4)]), (3, [GradientAccumulation(n_samples=8)])):
        clip = Norms(0.05)
        learn = make_learner(make_dls(bs=bs), cbs=[clip, MixedPrecision("fp16", init_scale=256.0), *cbs])
        learn.fit(4)
        clips.append(clip.found)
        models.append(learn.model)
    for norms, model in zip(clips[1:], models[1:], strict=True):
        assert norms == pytest.approx(clips[0], rel=0.01)
        assert close(models[0], model, 1e-3)


def test_without_a_bound_the_gradients_are_left_alone():
    def spoil(cb):
        cb.model[0].bias.grad.fill_(float("inf"))

    clip = GradientClip(float("inf"), log=True)
    learn, plain = (make_learner(cbs=[Callback(before_step=spoil), *cbs]) for cbs in ([clip], []))
    for each in (learn, plain):
        each.fit(1)
    assert same_weights(learn.model[3], plain.model[3])
    assert learn.recorder.metric_names[3] == "grad_norm"
    assert learn.recorder.values[0][2] == float("inf")


def test_the_norm_has_a_column_only_when_asked():
    learn = make_learner(cbs=GradientClip(0.05), metrics=mae)
    learn.fit(1)
    assert learn.recorder.metric_names == ["epoch", "train_loss", "valid_loss", "mae", "time"]
    with pytest.raises(ValueError, match="got monitor='grad_norm'; this fit's columns are train_loss, valid_loss, mae"):
        learn.fit(1, cbs=EarlyStoppingCallback("grad_norm"))
    watch = EarlyStoppingCallback("grad_norm", comp=operator.lt)
    make_learner(cbs=[GradientClip(0.05, log=True), watch]).fit(1)
    assert watch.best > 0.05


def clip_alone(max_norm, norm_type=2.0):
    """Clip the gradient of each parameter by torch's function."""
    return lambda params: [torch.nn.utils.clip_grad_norm_([p], max_norm, norm_type) for p in params]


CLIPS = {
    "elements": ({"max_value": 0.02}, lambda params: torch.nn.utils.clip_grad_value_(params, 0.02)),
    "each": ({"max_norm": 0.03, "each": True}, clip_alone(0.03)),
    "each, largest": ({"max_norm": 0.02, "norm_type": float("inf"), "each": True}, clip_alone(0.02, float("inf"))),
    "each, no bound": ({"max_norm": float("inf"), "each": True}, lambda params: None),
    "all": ({"max_norm": 0.03}, lambda params: torch.nn.utils.clip_grad_norm_(params, 0.03)),
}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", CLIPS)
def test_clipping_elements_or_each_parameter_is_as_by_torchs_functions(name, scaled):
    kwargs, clip = CLIPS[name]
    by_torch = Callback(order=11, before_step=lambda cb: clip(list(cb.model.parameters())))
    models, norms = [], []
    for cbs in ([GradientClip(**kwargs, log=True)], [by_torch], [GradientClip(float("inf"), log=True)]):
        learn = make_learner(cbs=[*cbs, *([MixedPrecision("fp16", init_scale=2.0**8)] if scaled else [])])
        learn.fit(1)
        models.append(learn.model)
        norms.append(learn.recorder.values[0])
    assert close(models[0], models[1], 1e-6)
    assert close(models[0], models[2], 1e-6) == (name == "each, no bound")
    assert len(norms[0]) == len(norms[2]) == len(norms[1]) + 1


@pytest.mark.parametrize("name", CLIPS)
def test_sparse_gradients_are_clipped_as_dense_ones(name):
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 3, sparse=sparse), nn.Flatten(), nn.Linear(12, 1)).double()
        x = torch.tensor([[0, 1, 1, 2], [1, 1, 4, 4]])
        dls = DataLoaders([(x, torch.ones(2, 1).double())] * 3, device="cpu")
        learn = make_learner(dls, model, cbs=GradientClip(**CLIPS[name][0]))
        learn.fit(1)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


class Phases(nn.Module):
    """A complex weight, or the two real ones of which it is made."""

    def __init__(self, is_complex):
        super().__init__()
        parts = make_model()[0].weight.detach().clone()
        self.weight = nn.Parameter(torch.complex(parts[:3], parts[3:6]) if is_complex else parts[:6])

    def forward(self, x):
        w = torch.view_as_real(self.weight) if self.weight.is_complex() else self.weight.view(2, 3, 4).movedim(0, -1)
        return (torch.einsum("ni,kir->nkr", x, w) ** 2).sum((1, 2))[:, None]


def test_of_complex_gradients_both_parts_are_clipped():
    found = []
    for is_complex in (True, False):
        learn = make_learner(model=Phases(is_complex), cbs=GradientClip(max_value=0.02))
        learn.fit(1)
        weight = learn.model.weight.detach()
        found.append(torch.cat([weight.real, weight.imag]) if is_complex else weight)
    torch.testing.assert_close(*found)


class Conjugated(nn.Module):
    """A complex weight, whose gradient comes as a conjugate if the model conjugates it."""

    def __init__(self, conjugates):
        super().__init__()
        self.weight, self.conjugates = nn.Parameter(torch.tensor([[1 + 2j], [-1j], [0.5 + 0j], [2 - 1j]])), conjugates

    def forward(self, x):
        return (x.cfloat() @ (self.weight.conj() if self.conjugates else self.weight)).abs()


@pytest.mark.parametrize("name", CLIPS)
def test_a_gradient_that_is_a_conjugate_is_clipped_and_accumulated_as_others(name):
    found = []
    for conjugates in (True, False):
        cbs = [GradientClip(**CLIPS[name][0]), GradientAccumulation(n_batches=3)]
        learn = make_learner(model=Conjugated(conjugates), cbs=cbs)
        learn.fit(1)
        found.append(learn.model.weight.detach())
    torch.testing.assert_close(*found)


def test_clipping_refuses_what_it_cannot_do():
    for wrong in ({"max_norm": 2.0}, {"each": True}):
        with raises(ValueError, "max_value clips elements and no norm"):
            GradientClip(max_value=1.0, **wrong)
    with raises(ValueError, "got max_value=-1.0; it is a number above 0"):
        GradientClip(max_value=-1.0)
    for bad in (0, -1.0, float("nan"), "1", None):
        with pytest.raises(ValueError, match="got max_norm="):
            GradientClip(bad)
        with pytest.raises(ValueError, match="got norm_type="):
            GradientClip(1.0, bad)


# Memory format


class Images(nn.Module):
    """A network of convolutions that notes how its inputs and weights lie."""

    def __init__(self, deep=False):
        super().__init__()
        self.conv, self.head, self.seen = nn.Conv2d(3, 4, 3), nn.Linear(4, 2), set()
        self.register_buffer("volume", torch.zeros(1, 1, 2, 2, 2))

    def forward(self, x, *others):
        layout = [t.is_contiguous(memory_format=torch.channels_last) for t in (x, self.conv.weight)]
        self.seen.add((*layout, x.is_contiguous()))
        return self.head(self.conv(x).mean((2, 3)))


def images(error=None, **kwargs):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8, 3, 6, 6), torch.randint(2, (8,)))
    dls = DataLoaders(DataLoader(data, 4), DataLoader(data, 4), device="cpu")
    return make_learner(dls, Images(), nn.CrossEntropyLoss(), **kwargs)


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_channels_last_lasts_as_long_as_a_run(error):
    learn = images(cbs=[ChannelsLast(), *([raising("after_loss", error())] if error else [])])
    strides = [p.stride() for p in learn.model.parameters()]
    if error:
        with pytest.raises(error):
            learn.fit(2)
    else:
        learn.fit(2)
        plain = images()
        plain.fit(2)
        assert close(plain.model, learn.model, 1e-6)
    assert learn.model.seen == {(True, True, False)}
    assert [p.stride() for p in learn.model.parameters()] == strides
    learn.model.seen.clear()
    learn.get_preds()
    assert learn.model.seen == {(True, True, False)}


@pytest.mark.slow
@pytest.mark.parametrize("lasts", [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("loaded", [False, True])
def test_channels_last_may_come_and_go_between_fits(lasts, loaded, tmp_path):
    """Of torch's fused optimizers, which take for granted that weights, gradients and state lie alike."""

    learn, plain = (images(cls=KeepsGradients, opt_func=AdamW, lr=0.01, path=tmp_path) for _ in range(2))
    for last in lasts:
        learn.fit(2, cbs=ChannelsLast() if last else None)
        plain.fit(2)
        if loaded:
            learn.save("both")
            learn.load("both")
    assert learn.opt.param_groups[0]["fused"]
    assert close(plain.model, learn.model, 1e-6)


def test_a_load_in_a_run_with_channels_last(tmp_path):
    best = images(opt_func=AdamW, lr=0.01, path=tmp_path, cbs=[ChannelsLast(), SaveModelCallback(with_opt=True)])
    best.fit(2)
    plain = images(opt_func=AdamW, lr=0.01, path=tmp_path)
    plain.load("model")
    assert close(plain.model, best.model, 0)
    for learn in (plain, best):
        learn.fit(1, cbs=learn.remove_cb(SaveModelCallback) and None)
    assert close(plain.model, best.model, 1e-6)


def test_channels_last_leaves_what_lies_so_already():
    learn = images(cbs=ChannelsLast())
    learn.model.conv.weight.data = learn.model.conv.weight.data.contiguous(memory_format=torch.channels_last)
    learn.fit(1)
    assert learn.model.conv.weight.is_contiguous(memory_format=torch.channels_last)


# Compiling


class Counter:
    """A backend that compiles nothing, and counts graphs and their calls."""

    def __init__(self):
        self.graphs = self.calls = 0

    def __call__(self, graph, inputs):
        self.graphs += 1

        def call(*args):
            self.calls += 1
            return graph(*args)

        return call


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def inductor(fresh_compiler, monkeypatch, tmp_path):
    """Torch's own compiler, with a cache of its own and no further processes."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")  # inductor sets it, and this takes it away again
    with torch._inductor.config.patch(compile_threads=1):
        yield


class OfOnesOwn(nn.Module):
    """A network whose `forward` is not torch's."""

    def __init__(self):
        super().__init__()
        self.inner = make_model()

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("make", [make_model, OfOnesOwn])
def test_a_fit_runs_compiled_code_and_a_second_one_compiles_nothing(make, fresh_compiler, tmp_path):
    backend, seen = Counter(), []
    learn = make_learner(make_dls(valid=8), make(), cbs=Compile(backend=backend), path=tmp_path)
    model, keys = learn.model, list(learn.model.state_dict())
    learn.fit(1, cbs=Callback(after_step=lambda cb: (seen.append(cb.model is model), cb.learn.save("inside"))))
    once = backend.graphs
    assert (once, backend.calls) == (2, 4)  # training and validation; two batches each
    assert model._compiled_call_impl is None
    assert all(seen)
    assert list(torch.load(tmp_path / "models" / "inside.pth", weights_only=True)["model"]) == keys
    learn.model(torch.ones(4, 4))
    assert backend.calls == 4
    learn.fit(2)
    learn.validate()
    learn.get_preds()
    assert backend.graphs == once
    assert backend.calls == 4 + 8 + 2 + 2
    plain = make_learner(make_dls(valid=8), make())
    plain.fit(1)
    plain.fit(2)
    assert same_weights(plain.model, model)


@pytest.mark.parametrize("backend", mostly_soak(["eager", "aot_eager"], "eager"))
def test_compiled_training_is_the_same(backend, fresh_compiler):
    models = []
    for cbs in ([], [Compile(backend=backend)]):
        learn = make_learner(
            make_dls(data=_double), make_model().double(), cbs=[*cbs, GradientAccumulation(n_batches=2)]
        )
        learn.fit(2)
        models.append(learn.model)
    assert close(*models, 1e-12)


def _double(n, seed=0):
    return TensorDataset(*(t.double() for t in make_data(n, seed=seed).tensors))


@pytest.mark.soak  # the first compilation on a machine takes half a minute
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_training_compiled_by_inductor_is_the_same(inductor):
    learn, plain = make_learner(make_dls(valid=None), cbs=Compile()), make_learner(make_dls(valid=None))
    learn.fit(2)
    plain.fit(2)
    assert close(plain.model, learn.model, 1e-5)


def test_the_plain_model_is_back_after_an_error(fresh_compiler):
    learn = make_learner(cbs=[Compile(backend="eager"), raising("after_loss", ZeroDivisionError())])
    with pytest.raises(ZeroDivisionError):
        learn.fit(1)
    assert learn.model._compiled_call_impl is None


@pytest.mark.slow
def test_compiling_goes_together_with_mixed_precision(fresh_compiler):
    learn = make_learner(cbs=[Compile(backend="aot_eager"), MixedPrecision("bf16"), GradientClip()])
    plain = make_learner(cbs=[MixedPrecision("bf16"), GradientClip()])
    learn.fit(2)
    plain.fit(2)
    assert close(plain.model, learn.model, 1e-2)


def test_a_wrapped_model_is_left_alone(two_gpus):
    backend = Counter()
    learn = make_learner(cbs=Compile(backend=backend))
    with learn.parallel_ctx(), pytest.warns(UserWarning, match="wrapped in DataParallel"):
        learn.fit(1)
    with learn.parallel_ctx():
        learn.fit(1)  # said once
    assert backend.graphs == 0


def test_compile_refuses_what_it_cannot_do():
    with pytest.raises(TypeError, match="'bakend'.*did you mean 'backend'"):
        Compile(bakend="eager")
    learn = make_learner(cbs=Compile(backend="indutor"))
    with pytest.raises(RuntimeError, match="indutor"):
        learn.fit(1)
    assert learn.model._compiled_call_impl is None


# With a GPU


def on_gpu(**kwargs):
    data = make_classes(64, 8)
    dls = DataLoaders.from_datasets(data, data, bs=16, device="cuda")
    return make_learner(dls, make_model(8, 3), nn.CrossEntropyLoss(), **kwargs)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", LOW)
def test_mixed_precision_trains_on_a_gpu(mode):
    learn = on_gpu(cbs=[MixedPrecision(mode), GradientClip()])
    before = learn.validate()[0]
    learn.fit(5)
    assert learn.validate()[0] < before
    assert not torch.is_autocast_enabled("cuda")


@pytest.mark.gpu
def test_a_step_in_bf16_waits_for_nothing():
    def strict(cb):
        torch.cuda.set_sync_debug_mode("error" if cb.iter else "default")

    def lax(cb):
        torch.cuda.set_sync_debug_mode("default")

    learn = on_gpu(cbs=[MixedPrecision("bf16"), GradientClip()])
    watch = Callback(before_batch=strict, after_step=lax)
    watch.run_valid = False
    try:
        with learn.no_bar():
            learn.fit(1, cbs=watch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_channels_last_reaches_the_model_on_a_gpu():
    learn = images(cbs=[ChannelsLast(), MixedPrecision("bf16")])
    learn.dls = DataLoaders(learn.dls.train, learn.dls.valid, device="cuda")
    learn.fit(1)
    assert learn.model.seen == {(True, True, False)}
    assert learn.model.conv.weight.is_contiguous()


class OwnClasses(nn.Module):
    """Computes its loss, which is then a tensor of the compiled code."""

    def __init__(self):
        super().__init__()
        self.body = make_model(8, 3)

    def forward(self, x, targets):
        logits = self.body(x)
        return {"loss": nn.functional.cross_entropy(logits, targets), "logits": logits}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler has many
@pytest.mark.parametrize("options", [{}, {"mode": "reduce-overhead"}], ids=str)
@pytest.mark.parametrize("own", [False, True])
def test_training_compiled_for_a_gpu_is_the_same(own, options, inductor):
    def trained(cbs):
        batches = [tuple(t.cuda() for t in batch) for batch in DataLoader(make_classes(64, 8), 16)]
        if own:
            batches = [{"x": x, "targets": y} for x, y in batches]
        model, loss = (OwnClasses(), None) if own else (make_model(8, 3), nn.CrossEntropyLoss())
        learn = Learner(
            DataLoaders(batches, batches, device="cuda", target_keys="targets" if own else ()), model, loss,
            metrics=AccumMetric(lambda pred, y: (pred.argmax(1) == y).float().mean()), cbs=[*cbs, EMA(0.9)],
            loss_weight="samples",
        )  # fmt: skip
        learn.fit(3, 0.01)
        return learn, learn.validate(), learn.get_preds()[0]

    (compiled, *seen), (plain, *expected) = trained([Compile(**options)]), trained([])
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(compiled.recorder.losses, plain.recorder.losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(compiled.recorder.values, plain.recorder.values, rtol=1e-4, atol=1e-5)
    assert close(plain.model, compiled.model, 1e-4)
