"""What a learner tells of itself, during a fit and after, and that evaluation in mid-fit leaves it as it was."""

from functools import partial

import pytest
import torch
from fastcore.foundation import L
from helpers import make_data, make_dls, make_learner, make_model, mostly_slow, same_weights, words
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import Callback, DataLoaders, Learner, mae, mse, perplexity, rmse


def test_attributes_tell_the_place_during_a_fit():
    rows = []

    class Look(Callback):
        order = 1000

        def after_batch(self):
            learn = self.learn
            rows.append(
                (learn.task, learn.training, learn.n_epoch, learn.epoch, learn.n_iter, learn.iter, learn.batch_size)
            )
            assert learn.dl is learn.dls.loaders[0 if learn.training else 1]
            assert learn.xb == (learn.x,)
            assert learn.yb == (learn.y,)
            assert [t is b for t, b in zip((*learn.xb, *learn.yb), learn.batch, strict=True)] == [True, True]
            assert learn.output is learn.pred
            assert torch.equal(learn.loss, learn.loss_grad.detach())
            assert not learn.loss.requires_grad
            assert learn.loss_grad.requires_grad is learn.training
            assert learn.model.training is learn.training
            if learn.training:
                done = learn.epoch * 3 + learn.iter + 1
                assert learn.train_iter == done
                assert learn.pct_train == pytest.approx(done / 6)
                assert learn.smooth_loss == learn.recorder.losses[-1]

    learn = make_learner(make_dls(train=10, valid=4), cbs=Look())
    learn.fit(2)
    train = [("fit", True, 2, e, 3, i, size) for e in range(2) for i, size in enumerate((4, 4, 2))]
    valid = [("fit", False, 2, e, 1, 0, 4) for e in range(2)]
    assert rows == [*train[:3], valid[0], *train[3:], valid[1]]
    for name in ("dl", "batch", "pred", "output", "loss", "loss_grad", "task"):
        assert getattr(learn, name) is None
    assert (learn.xb, learn.yb) == ((), ())


def test_the_final_record_is_the_last_row():
    learn = make_learner(metrics=mae)
    assert learn.final_record == []
    learn.fit(2)
    assert learn.final_record == learn.recorder.values[-1]
    assert len(learn.final_record) == 3


def test_a_learner_and_its_data_tell_what_is_in_them():
    learn = make_learner(make_dls(train=10), metrics=[mae, perplexity], opt_func=partial(AdamW, lr=0.5), lr=None)
    learn.model[0].requires_grad_(False)
    data = "train: 10 samples in 3 batches of 4, valid: 4 samples in 1 batch of 4, device: cpu"
    assert repr(learn.dls) == f"DataLoaders({data})"
    assert repr(learn).splitlines() == [
        "Learner",
        "  model      Sequential, 37 parameters, 30 of them frozen",
        f"  data       DataLoaders({data})",
        "  loss       MSELoss",
        "  optimizer  AdamW, lr 0.5",
        "  metrics    mae, perplexity",
        "  callbacks  TrainEvalCallback, Recorder, ProgressCallback",
    ]


def test_what_tells_little_of_itself_is_told_too():
    class Own(nn.Module):
        pass

    class Unsized:
        def __iter__(self):
            return iter([])

    learn = Learner(DataLoaders(Unsized(), None, [1, 2]), Own(), opt_func=lambda params, lr: None, default_cbs=False)
    assert repr(learn.dls) == "DataLoaders(train: Unsized, 2: 2 batches, device: chosen at first use)"
    assert "loss       the model's own" in repr(learn)
    assert "optimizer  <lambda>, lr 0.001" in repr(learn)
    assert "metrics    none" in repr(learn)
    assert "callbacks  none" in repr(learn)
    assert "metrics    a, b" in repr(make_learner(metrics={"a": mae, "b": mae}))
    assert "loss       function" not in repr(make_learner(loss_func=F.mse_loss))


def test_metrics_come_in_any_collection():
    for kind in (list, tuple, L, iter):
        learn = make_learner(metrics=kind([mae, mse]))
        for _ in range(2):
            learn.fit(1)
            assert learn.recorder.metric_names[3:5] == ["mae", "mse"]
        assert len(learn.validate()) == 3
    learn = make_learner(metrics=mae)
    learn.metrics.append(mse)
    assert len(learn.validate()) == 3
    learn.metrics = rmse
    assert len(learn.validate()) == 2
    assert "metrics    rmse" in repr(learn)


def test_tasks_have_names():
    tasks = set()
    learn = make_learner(cbs=Callback(after_pred=lambda cb: tasks.add(cb.task)))
    learn.fit(1)
    learn.validate()
    learn.get_preds()
    assert tasks == {"fit", "validate", "predict"}


def test_several_inputs_and_targets_reach_model_and_loss():
    seen = []

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, a, b):
            return self.linear(a + b)

    data = TensorDataset(*(torch.randn(8, 4) for _ in range(2)), *(torch.randn(8, 1) for _ in range(2)))
    dls = DataLoaders(DataLoader(data, 4), n_inp=2, device="cpu")
    look = Callback(after_pred=lambda cb: seen.append((len(cb.x), len(cb.y), cb.x is cb.xb, cb.y is cb.yb)))
    learn = make_learner(dls, Two(), lambda pred, a, b: F.mse_loss(pred, a) + F.mse_loss(pred, b), cbs=look)
    learn.fit(1)
    assert seen == [(2, 2, True, True)] * 2


# Evaluation in mid-fit

NAMES = words("dl batch batch_size xb yb pred output loss loss_grad iter n_iter training task epoch n_epoch train_iter")


@pytest.mark.parametrize("verb", mostly_slow(["validate", "get_preds"], "get_preds"))
@pytest.mark.parametrize(
    ("event", "training"),
    [("before_batch", True), ("after_pred", True), ("before_step", True), ("after_batch", True), ("after_pred", False),
     ("after_batch", False), ("before_validate", None), ("after_epoch", None), ("before_train", None)],
)  # fmt: skip
def test_evaluation_in_mid_fit_changes_nothing(verb, event, training):
    def run(ask):
        def hook(cb):
            if cb.task == "fit" and training in (None, cb.training):
                learn = cb.learn
                before = {name: getattr(learn, name) for name in NAMES}
                modes = [m.training for m in learn.model.modules()]
                for ds_idx in (0, 1):
                    if ask:
                        getattr(learn, verb)(ds_idx)
                assert [name for name in NAMES if getattr(learn, name) is not before[name]] == []
                assert [m.training for m in learn.model.modules()] == modes

        torch.manual_seed(1)
        data, valid = make_data(12), make_data(4, seed=1)
        dls = DataLoaders(
            DataLoader(data, 4, shuffle=True), DataLoader(valid, 2, shuffle=verb == "validate"), device="cpu"
        )
        learn = make_learner(dls, make_model(dropout=0.3), metrics=mae, opt_func=AdamW, cbs=Callback(**{event: hook}))
        learn.fit(2)
        return learn

    asked, plain = run(True), run(False)
    assert same_weights(asked.model, plain.model)
    assert asked.recorder.values == plain.recorder.values
    assert asked.recorder.losses == plain.recorder.losses
    assert asked.recorder.lrs == plain.recorder.lrs


@pytest.mark.parametrize("part", ["whole", "within", "around"])
@pytest.mark.parametrize("verb", ["validate", "get_preds", "fit"])
def test_a_run_of_another_learner_in_mid_fit_leaves_the_modes_of_what_they_share(verb, part):
    def hook(cb):
        modes = [m.training for m in cb.model.modules()]
        getattr(other, verb)(*[1][: verb == "fit"])
        assert [m.training for m in cb.model.modules()] == modes

    model = nn.Sequential(make_model(n_out=2, dropout=0.3), nn.Linear(2, 1))
    models = {"whole": model, "within": nn.Sequential(model[0], nn.Linear(2, 1)), "around": nn.Sequential(model)}
    other = make_learner(model=models[part])
    learn = make_learner(model=model, cbs=Callback(after_step=hook))
    learn.fit(1)
    assert not any(m.training for m in learn.model.modules())
    other.model.train()
    getattr(other, verb)(*[1][: verb == "fit"])
    assert not any(m.training for m in other.model.modules())


def test_evaluation_in_mid_fit_is_what_it_is_outside():
    found = {}

    def hook(cb):
        found["validate"], found["preds"] = cb.learn.validate(), cb.learn.get_preds()[0]

    learn = make_learner(make_dls(train=4), metrics=mae, cbs=Callback(after_step=hook))
    learn.fit(1)
    assert found["validate"] == learn.validate() == pytest.approx(learn.recorder.final_record[1:])
    assert torch.equal(found["preds"], learn.get_preds()[0])


def test_evaluation_leaves_the_recorder_alone():
    learn = make_learner(metrics=mae)
    learn.fit(2)
    kept = [list(getattr(learn.recorder, n)) for n in ("values", "losses", "lrs", "iters", "log", "history")]
    learn.validate()
    learn.get_preds()
    learn.validate(0)
    assert [list(getattr(learn.recorder, n)) for n in ("values", "losses", "lrs", "iters", "log", "history")] == kept
