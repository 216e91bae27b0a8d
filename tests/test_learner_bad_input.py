"""Bad input is refused with what is wrong and what to do."""

import contextlib
from traceback import walk_tb

import numpy as np
import pytest
import torch
from helpers import (
    VALID_BATCH,
    Unsized,
    assert_same_state,
    make_classes,
    make_data,
    make_dls,
    make_learner,
    make_model,
    notes,
    same_weights,
    spy,
    state_of,
    weights,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import (
    AccumMetric,
    Callback,
    DataLoaders,
    GradientAccumulation,
    Learner,
    OverfitBatch,
    ShortEpochCallback,
    mae,
)


@pytest.mark.parametrize("wrong", [None, 3, make_data(), [1, 2]])
def test_learner_refuses_what_are_no_dataloaders(wrong):
    with pytest.raises(TypeError, match=r"dls is a \w+; pass DataLoaders\(train, valid\)"):
        Learner(wrong, make_model())


@pytest.mark.parametrize("wrong", [nn.Linear, None, "model", torch.sin])
def test_learner_refuses_what_is_no_model(wrong):
    with pytest.raises(TypeError, match="pass an nn.Module"):
        Learner(make_dls(), wrong)
    if isinstance(wrong, type):
        with pytest.raises(TypeError, match="not the class"):
            Learner(make_dls(), wrong)


@pytest.mark.parametrize("wrong", [nn.MSELoss, "mse", 3])
def test_learner_refuses_what_is_no_loss(wrong):
    with pytest.raises(TypeError, match=r"loss_func is .*; pass a function or a module"):
        Learner(make_dls(), make_model(), wrong)


def test_learner_refuses_a_splitter_that_is_no_function():
    with pytest.raises(TypeError, match="splitter is 3; pass a function of the model"):
        Learner(make_dls(), make_model(), nn.MSELoss(), splitter=3)


@pytest.mark.parametrize("wrong", ["adam", None, 1e-3])
def test_learner_refuses_what_makes_no_optimizer(wrong):
    with pytest.raises(TypeError, match="opt_func is .*; pass an optimizer class"):
        Learner(make_dls(), make_model(), nn.MSELoss(), opt_func=wrong)


@pytest.mark.parametrize("wrong", [3, object(), torch.sin])
def test_dataloaders_refuse_what_cannot_be_read(wrong):
    with pytest.raises(TypeError, match="the training loader is a .*; pass a DataLoader or another iterable") as e:
        DataLoaders(wrong)
    assert type(wrong).__name__ in str(e.value)
    with pytest.raises(TypeError, match="the validation loader is a "):
        DataLoaders([], wrong)


def test_dataloaders_refuse_a_dataset():
    with pytest.raises(
        TypeError, match=r"the training loader is a dataset \(TensorDataset\); use DataLoaders.from_datasets"
    ):
        DataLoaders(make_data())


def norm_model():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def lone(n=9, bs=4, model=None, **kwargs):
    """A learner whose last training batch has a single sample."""
    dls = DataLoaders(DataLoader(make_data(n), bs, **kwargs), DataLoader(make_data(4), 4), device="cpu")
    return make_learner(dls, model or norm_model())


LONE = (
    r"the training loader: its last batch has 1 of its 9 samples \(batches of 4\), .* \(BatchNorm\); .* drop_last=True"
)


@pytest.mark.parametrize("shuffle", [False, True])
def test_r38_a_last_batch_too_small_for_batch_norm_is_found_before_training(shuffle):
    learn = lone(shuffle=shuffle)
    before, state, log = weights(learn.model), torch.get_rng_state(), []
    with pytest.raises(ValueError, match=LONE):
        learn.fit(1, cbs=spy(log, events=["after_pred"]))
    assert log == []  # within the first forward pass
    assert same_weights(before, learn.model)  # statistics too
    assert learn.model.training
    with pytest.raises(ValueError, match=LONE):
        learn.lr_find(num_it=10, show_plot=False)
    with pytest.raises(ValueError, match=LONE):
        learn.fit(n_steps=3)
    with pytest.raises(ValueError, match=r"each of its batches has 1 sample.* larger batch size"):
        lone(bs=1).fit(1)
    torch.set_rng_state(state)
    with pytest.raises(ValueError, match=LONE):
        lone(shuffle=shuffle).fit(1, cbs=GradientAccumulation(n_batches=2))


class Pooled(nn.Module):
    """BatchNorm of images, and behind their pooling of single values."""

    def __init__(self, pooled):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3), nn.Linear(3, 1)
        self.pooled = nn.BatchNorm2d(3) if pooled else nn.Identity()

    def forward(self, x):
        return self.head(self.pooled(self.norm(self.conv(x[:, None, None])).mean((2, 3), keepdim=True)).flatten(1))


def test_a_batch_norm_of_images_takes_a_single_one():
    lone(model=Pooled(pooled=False)).fit(1)
    learn = lone(model=Pooled(pooled=True))
    before = weights(learn.model)
    with pytest.raises(ValueError, match=LONE):
        learn.fit(1)
    assert same_weights(before, learn.model)


@pytest.mark.parametrize(
    "fit",
    [
        lambda learn: learn.fit(n_steps=2),
        lambda learn: learn.fit(2, cbs=ShortEpochCallback(n=2)),
        lambda learn: learn.fit(2, cbs=OverfitBatch()),
        lambda learn: learn.fit(n_steps=1, cbs=GradientAccumulation(n_batches=2)),
        lambda learn: (learn.model[1].eval(), learn.fit(2)),
        lambda learn: learn.get_preds(0),
    ],
)
def test_a_last_batch_that_is_not_trained_on_does_no_harm(fit):
    fit(lone())


def test_a_batch_too_small_for_batch_norm_says_what_to_do_where_its_size_is_not_known():
    batches = [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    learn = make_learner(DataLoaders(DataLoader(make_data(9), batch_sampler=batches), device="cpu"), norm_model())
    with pytest.raises(ValueError, match="Expected more than 1 value") as caught:
        learn.fit(1)
    assert "batch 2 of the training loader has one sample" in str(notes(caught.value))
    assert "drop_last=True" in str(notes(caught.value))


def test_a_last_batch_too_small_is_found_in_inputs_that_callbacks_convert():
    learn = lone(n=9, model=norm_model().double())
    model = learn.model

    def convert(cb):
        cb.learn.xb = (cb.x.double(),)

    with pytest.raises(ValueError, match=LONE):
        learn.fit(1, cbs=Callback(before_batch=convert))
    assert not model[1]._forward_pre_hooks
    lone(n=10).fit(1)


def test_a_loss_without_reduction_is_refused_at_once():
    with pytest.raises(ValueError, match="reduction='none'"):
        make_learner(loss_func=nn.MSELoss(reduction="none"))


@pytest.mark.parametrize("n_epoch", [-1, 1.5, "3"])
def test_n_epoch_must_be_a_whole_number(n_epoch):
    learn = make_learner()
    for fit in (learn.fit, learn.fit_one_cycle, learn.fit_flat_cos):
        with pytest.raises(ValueError, match="got n_steps=.*; it is a whole number, 0 or more"):
            fit(n_steps=n_epoch)
    for fit in (learn.fit, learn.fit_one_cycle):
        with pytest.raises(ValueError, match="got n_epoch=.*; it is a whole number, 0 or more"):
            fit(n_epoch)
    with pytest.raises(ValueError, match="got start_epoch="):
        learn.fit(1, start_epoch=n_epoch)


def empty(**kwargs):
    return DataLoader(make_data(3), 4, **kwargs)


@pytest.mark.parametrize(
    ("loader", "match"),
    [
        ([], "the training loader is empty: it has no batches"),
        (DataLoader(make_data(0), 4), "the training loader is empty: its dataset has 0 samples"),
        (empty(drop_last=True), "3 samples are less than a batch of 4, and drop_last=True; use a smaller batch size"),
    ],
)
def test_an_empty_training_loader_is_refused(loader, match):
    learn = make_learner(DataLoaders(loader, device="cpu"))
    with pytest.raises(ValueError, match=match):
        learn.fit(1)
    assert learn.opt is None


def test_an_empty_validation_loader_is_refused():
    learn = make_learner(DataLoaders(DataLoader(make_data(), 4), empty(drop_last=True), device="cpu"))
    with pytest.raises(ValueError, match="the validation loader is empty: 3 samples are less"):
        learn.fit(1)
    for verb in (learn.validate,):
        with pytest.raises(ValueError, match="the loader is empty"):
            verb()
    with pytest.raises(ValueError, match="the loader is empty"):
        learn.get_preds(dl=[])


def test_a_missing_validation_loader_is_told():
    learn = make_learner(make_dls(valid=None))
    for verb in (learn.validate, learn.get_preds):
        with pytest.raises(IndexError, match=r"there is no loader 1; there are \[0\]"):
            verb()


def test_a_generator_is_exhausted_after_an_epoch():
    learn = make_learner(DataLoaders((b for b in list(DataLoader(make_data(), 4))), device="cpu"))
    with pytest.raises(
        ValueError, match="the training loader gave no batches in epoch 1; an iterator can be read only once"
    ):
        learn.fit(2)


@pytest.mark.parametrize("made", [lambda p, y: (p - y).pow(2), lambda p, y: 3.0, lambda p, y: (p.sum(), y.sum())])
def test_a_loss_must_be_a_scalar(made):
    with pytest.raises(ValueError, match="the loss is not a scalar: loss_func returned .*; return a 0-dim tensor"):
        make_learner(loss_func=made).fit(1)


@pytest.mark.parametrize("made", [lambda p, y: {"error": (p - y).abs().mean()}, lambda p, y: (p.sum(), y.sum())])
def test_several_losses_of_a_function_are_to_be_added(made):
    with pytest.raises(ValueError, match=r"return a 0-dim tensor, such as the sum of its parts, .* learn\.log_metric"):
        make_learner(loss_func=made).fit(1)


def test_a_loss_function_without_return_is_told_so():
    def forgetful(pred, target):
        F.mse_loss(pred, target)

    with pytest.raises(ValueError, match="there is no loss: forgetful returned None; its `return` may be missing"):
        make_learner(loss_func=forgetful).fit(1)
    forget = Callback(after_loss=lambda cb: vars(cb.learn).update(loss_grad=None))
    with pytest.raises(ValueError, match="learn.loss is set, and learn.loss_grad is None, which a callback"):
        make_learner(cbs=forget).fit(1)


def test_a_batch_without_targets_and_loss_is_refused():
    single = DataLoaders(DataLoader(make_data().tensors[0], 4), device="cpu")
    with pytest.raises(ValueError, match=r"there is no loss: the batch .* has no targets; let the dataset return"):
        make_learner(single).fit(1)
    with pytest.raises(
        ValueError, match="there is no loss: loss_func is None and the model returned float32 tensor of shape"
    ):
        Learner(make_dls(), make_model()).fit(1)
    with pytest.raises(ValueError, match="there is no loss"):
        make_learner(single).validate(0)


def test_targets_under_a_mistyped_name_are_told():
    class Any(nn.Linear):
        def forward(self, x, **others):
            return super().forward(x)

    batches = [{"x": torch.zeros(4, 3), "label": torch.zeros(4, 1)}]
    learn = Learner(DataLoaders(batches, target_keys="lable", device="cpu"), Any(3, 1), nn.MSELoss())
    with pytest.raises(ValueError, match="has no targets .*no 'lable', which target_keys= names; did you mean 'label'"):
        learn.fit(1)


def test_a_model_without_trainable_parameters_is_refused():
    model = make_model()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"Sequential has no trainable parameters \(4 parameters, all frozen\)"):
        make_learner(model=model).fit(1)
    with pytest.raises(ValueError, match="no trainable parameters"):
        make_learner(model=nn.Flatten()).fit(1)
    for none in ([[]], []):
        with pytest.raises(ValueError, match=r"\(0 parameters"):
            make_learner(splitter=lambda model, groups=none: groups).fit(1)


def vector(pred, target):
    return (pred - target).abs().mean(1)


def test_a_metric_must_return_a_number():
    learn = make_learner(metrics=vector)
    with pytest.raises(
        ValueError, match="metric 'vector' returned float32 tensor of shape .*; a metric returns a number"
    ) as e:
        learn.fit(1)
    assert any(n.startswith("metric 'vector' got predictions: float32 tensor of shape (4, 1)") for n in notes(e.value))


def test_an_array_of_numpy_is_a_number_if_it_has_one_element():
    learn = make_learner(metrics=lambda pred, target: vector(pred, target).numpy())
    with pytest.raises(ValueError, match=r"metric '<lambda>' returned float32 tensor of shape .*; a metric returns"):
        learn.fit(1)
    learn = make_learner(metrics=lambda pred, target: np.array([len(pred)]))
    assert learn.validate()[1] == 4


def waves(pred, target):
    return torch.fft.fft(pred - target, dim=0).mean()


def test_losses_and_metrics_are_real_numbers():
    with pytest.raises(ValueError, match=r"loss_func returned complex64 tensor .* such as \(pred - y\)\.abs"):
        make_learner(loss_func=waves).validate()
    for metric, name in ((waves, "waves"), (AccumMetric(waves, "all"), "all")):
        with pytest.raises(ValueError, match=f"metric '{name}' returned complex64 tensor .*; a metric returns"):
            make_learner(metrics=metric).validate()
    with pytest.raises(ValueError, match=r"log_metric\('z'\) got complex64 tensor"):
        make_learner(cbs=Callback(after_loss=lambda cb: cb.learn.log_metric("z", waves(cb.pred, cb.y)))).fit(1)


def test_a_failing_metric_says_what_it_got():
    learn = make_learner(metrics=lambda pred, target: pred.missing)
    with pytest.raises(AttributeError, match="missing") as e:
        learn.fit(1)
    assert any("predictions: float32 tensor of shape (4, 1); targets: (float32" in n for n in notes(e.value))


def test_a_metric_that_is_none_is_refused():
    with pytest.raises(TypeError, match="metric"):
        make_learner(metrics=3).fit(1)
    with pytest.raises(ValueError, match=r"two metrics are named \['mae'\]"):
        make_learner(metrics=[mae, mae]).fit(1)


def test_a_loader_without_length_has_no_one_cycle():
    learn = make_learner(DataLoaders(Unsized(list(DataLoader(make_data(), 4))), device="cpu"))
    with pytest.raises(ValueError, match=r"a schedule needs to know how many batches .* \(Unsized\) has no length"):
        learn.fit_one_cycle(1)


def test_an_elementwise_loss_does_not_broadcast_in_silence():
    x, y = make_data(32).tensors
    dls = DataLoaders(DataLoader(TensorDataset(x, y[:, 0]), 32), device="cpu")
    with pytest.raises(ValueError, match=r"predictions have the shape \(32, 1\), the targets \(32,\)") as e:
        make_learner(dls).fit(1)
    assert "squeeze" in str(e.value)


def test_a_failing_loss_says_what_it_got():
    dls = make_dls(data=lambda n, seed=0: make_classes(n, seed=seed))
    with pytest.raises((ValueError, RuntimeError, IndexError)) as e:
        make_learner(dls, make_model(n_out=2)[:2], nn.CrossEntropyLoss(), cbs=Callback(after_pred=cut)).fit(1)
    assert notes(e.value)[0].startswith("the loss got predictions: float32 tensor of shape (3, 6); targets: (int64")


def cut(cb):
    cb.learn.pred = cb.pred[:3]


@pytest.mark.parametrize("lr", [[0.1, 0.2], [], (0.1, 0.2, 0.3)])
def test_a_list_of_rates_has_one_for_each_group(lr):
    learn = make_learner()
    for fit in (learn.fit, learn.fit_one_cycle):
        with pytest.raises(ValueError, match=f"got {len(lr)} learning rates for 1 parameter groups"):
            fit(1, lr)
    assert learn.task is None
    learn.fit(1)


def test_a_bad_batch_is_refused():
    with pytest.raises(ValueError, match="n_inp=3 asks for that many inputs"):
        make_learner(make_dls(n_inp=3)).fit(1)
    with pytest.raises(ValueError, match="got n_inp=0"):
        make_dls(n_inp=0)
    with pytest.raises(ValueError, match="a batch of 0 entries"):
        make_learner(DataLoaders([()], device="cpu")).fit(1)


def test_errors_leave_the_learner_fit_to_go_on():
    learn = make_learner(make_dls(valid=8))
    for bad in (
        lambda: learn.fit(-1),
        lambda: learn.fit(1, cbs=3),
        lambda: learn.fit(1, lr="fast"),
        lambda: learn.validate(7),
    ):
        before = state_of(learn)
        with pytest.raises((ValueError, TypeError, IndexError)):
            bad()
        assert_same_state(learn, before | {"attributes": before["attributes"] | {"opt": learn.opt}})
    learn.fit(1)
    with contextlib.suppress(IndexError):
        learn.validate(5)
    assert VALID_BATCH
    learn.validate()


# Tracebacks


def frames(error):
    return [frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)]


class Fails(Callback):
    def before_batch(self):
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError as e:
            raise ValueError("a bad sample") from e


def test_a_traceback_has_the_frames_of_the_user_alone(monkeypatch):
    learn, here = make_learner(), "test_a_traceback_has_the_frames_of_the_user_alone"
    for call in (learn.fit, learn.validate):
        with pytest.raises(ValueError, match="a bad sample") as e:
            call(1, cbs=Fails())
        assert frames(e.value) == [here, "before_batch"]
        assert frames(e.value.__cause__) == ["before_batch"]
    monkeypatch.setenv("LEARNERKIT_TRACEBACK", "full")
    with pytest.raises(ValueError, match="a bad sample") as e:
        learn.fit(1, cbs=Fails())
    assert {here, "before_batch", "fit", "_all_batches"} <= set(frames(e.value))


def test_an_error_of_the_library_keeps_the_frame_that_raised_it():
    learn, here = make_learner(), "test_an_error_of_the_library_keeps_the_frame_that_raised_it"
    with pytest.raises(ValueError, match="n_epoch='3'") as e:
        learn.fit("3")
    assert frames(e.value) == [here, "check_count"]


def test_torchs_frames_stay_below_the_users_code():
    model = nn.Sequential(nn.Linear(5, 1))
    with pytest.raises(RuntimeError) as e:
        make_learner(model=model).predict(torch.zeros(4))
    assert frames(e.value)[1:] == ["forward", "forward"]  # without those that call them


def test_an_error_of_distrib_ctx_has_the_users_line_and_the_innermost_one_alone():
    with pytest.raises(TypeError, match="split_batches") as caught:
        make_learner().distrib_ctx(split_batche=True)
    assert len(caught.traceback) == 2
