"""learn.check(): wrong set-ups are named before a long run, and nothing of it stays behind."""

import copy
import random
import threading

import numpy as np
import psutil
import pytest
import torch
from helpers import (
    OwnLoss,
    Seen,
    end_workers,
    make_classes,
    make_data,
    make_dls,
    make_learner,
    make_model,
    read_report,
    same_weights,
    weights,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from learnerkit import Callback, DataLoaders, GradientAccumulation, Learner, accuracy
from learnerkit.callbacks.debugging import OverfitBatch, ShortEpochCallback
from learnerkit.events import CancelBatchException, CancelFitException, CancelStepException
from learnerkit.preflight.step import check

pytestmark = pytest.mark.filterwarnings("ignore:mixed precision with float16 is some 30 times slower on a CPU")


class Stream(IterableDataset):
    def __init__(self, n=40):
        self.n = n

    def __iter__(self):
        yield from zip(*make_data(self.n).tensors, strict=True)


def classes(n_out=3, loss=None, data=make_classes, **kwargs):
    model = kwargs.pop("model", None) or make_model(n_out=n_out)
    dls = kwargs.pop("dls", None) or make_dls(8, 4, 4, data=data)
    return make_learner(dls, model, loss or nn.CrossEntropyLoss(), **kwargs)


def mapped(change_x=lambda x: x, change_y=lambda y: y, of=make_classes):
    def data(n, seed=0):
        x, y = of(n, seed=seed).tensors
        return TensorDataset(change_x(x), change_y(y))

    return data


@pytest.fixture
def without_memory(monkeypatch):
    """The memory of a step is not predicted, which takes longer than all else; for healthy learners it is."""
    monkeypatch.setattr("learnerkit.preflight.step.judge_memory", lambda *args: [])


def checked(capsys, learn, well):
    assert learn.check() is well
    return read_report(capsys.readouterr().out)


class Half(nn.Module):
    """A part of it takes no part in the loss."""

    def __init__(self, use=False):
        super().__init__()
        self.used, self.spare, self.use = nn.Linear(4, 1), nn.Linear(4, 1), use

    def forward(self, x):
        return self.used(x) + (self.spare(x) if self.use else 0)


HEALTHY = {
    "regression": make_learner,
    "classes": lambda: classes(metrics=accuracy),
    "class probabilities": lambda: classes(data=mapped(change_y=lambda y: nn.functional.one_hot(y, 3).float())),
    "ignore_index": lambda: classes(
        loss=nn.CrossEntropyLoss(ignore_index=-1), data=mapped(change_y=lambda y: torch.where(y == 2, -1, y))
    ),
    "bytes as classes": lambda: classes(data=mapped(change_y=lambda y: y.byte())),
    "log probabilities": lambda: classes(
        loss=nn.NLLLoss(), model=nn.Sequential(make_model(n_out=3), nn.LogSoftmax(1))
    ),
    "binary": lambda: make_learner(make_dls(data=mapped(change_y=lambda y: (y > 0).float(), of=make_data)),
                                   loss_func=nn.BCEWithLogitsLoss()),
    "own loss": lambda: Learner(
        DataLoaders([{"x": torch.randn(2, 4), "labels": torch.zeros(2, 1)}] * 2, device="cpu"), OwnLoss()
    ),
    "no validation": lambda: make_learner(make_dls(valid=None)),
    "a stream": lambda: make_learner(DataLoaders(DataLoader(Stream(), 4), device="cpu")),
    "a list": lambda: make_learner(DataLoaders([make_data(4).tensors] * 3, device="cpu")),
    "accumulation": lambda: make_learner(cbs=GradientAccumulation(n_batches=4)),
    "accumulation over a stream": lambda: make_learner(
        DataLoaders(DataLoader(Stream(), 4), device="cpu"), cbs=GradientAccumulation(n_samples=100)
    ),
    "frozen": lambda: make_learner(model=frozen(make_model())),
    "half precision": lambda: make_learner().to_bf16(),
    "a gradient scaler": lambda: make_learner().to_fp16(),
    "no default callbacks": lambda: make_learner(default_cbs=False),
    "weight decay": lambda: make_learner(wd=0.1, lr=slice(1e-3)),
    "a zero weight before the last": lambda: make_learner(model=zeroed()),
    "a bias that norms undo": lambda: make_learner(
        model=nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), dls=make_dls(64, 4, 32)
    ),
    "only_fit": lambda: make_learner(cbs=[ShortEpochCallback(n=1), OverfitBatch()]),
    "sparse gradients without entries": lambda: make_learner(
        make_dls(data=mapped(change_x=lambda x: x.long() * 0, of=make_data)),
        nn.Sequential(nn.Embedding(3, 2, padding_idx=0, sparse=True), nn.Flatten(), nn.Linear(8, 1)),
    ),
}  # fmt: skip


def frozen(model):
    model[0].requires_grad_(False)
    return model


def zeroed():
    model = make_model()
    nn.init.zeros_(model[-1].weight)
    return model


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_learner_is_found_well(kind, capsys):
    found, last = checked(capsys, HEALTHY[kind](), True)
    assert last == "all is well"
    assert not any(mark == "!!" for mark, _ in found.values())
    assert {"inputs", "targets", "prediction", "loss", "gradients", "optimizer", "validation"} <= found.keys()
    assert not any("not reached" in text for _, text in found.values())


class Segmenter(nn.Module):
    """Makes its loss of lists of images and of dicts with masks, as torchvision's detectors do."""

    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(1, 1, 1)

    def forward(self, images, targets=None):
        preds = [self.body(image) for image in images]
        if not self.training:
            return preds
        masks = torch.stack([target["mask"] for target in targets])
        return {"mask": (torch.stack(preds) - masks).square().mean()}


def test_targets_that_a_model_gets_for_its_loss_are_no_inputs(capsys):
    images = [torch.rand(1, 8, 8) for _ in range(8)]
    batch = images, [{"mask": (image > 0.5).byte()} for image in images]
    dls = DataLoaders([batch], [batch], device="cpu", batch_size=lambda batch: len(batch[0]))
    found, _ = checked(capsys, Learner(dls, Segmenter(), lr=0.01), True)
    assert found["inputs"][0] == "ok"
    assert found["inputs"][1].count("(1, 8, 8)") == 5
    assert found["inputs"][1].endswith("and 3 more")
    assert found["targets"][1].startswith("uint8 (1, 8, 8) on cpu, values 0 .. 1;")


def test_inputs_that_are_also_the_targets_are_judged(capsys):
    x = torch.rand(4, 4)
    found, _ = checked(capsys, Learner(DataLoaders([(x, x)], device="cpu"), make_model(4, 4), nn.MSELoss()), True)
    assert found["inputs"][1].startswith("float32 (4, 4) on cpu, values 0")


def test_a_healthy_report_says_what_was_found(capsys):
    found, _ = checked(capsys, classes(metrics=accuracy), True)
    assert {mark for mark, _ in found.values()} == {"ok"}
    assert found["inputs"][1].startswith("float32 (4, 4) on cpu, values -")
    assert found["targets"][1] == "int64 (4,) on cpu, values 0 .. 2"
    assert "(guessing: 1.1)" in found["loss"][1]
    assert found["gradients"][1] == "4 of 4 trainable parameters"
    assert found["optimizer"][1] == "SGD, lr 0.1"
    assert found["metrics"][1].startswith("accuracy 0")
    found, _ = checked(capsys, HEALTHY["frozen"](), True)
    assert found["gradients"][1] == "2 of 2 trainable parameters, 2 frozen"
    found, _ = checked(capsys, HEALTHY["no validation"](), True)
    assert found["validation"] == ("--", "there is no validation loader")


def broken_metric(pred, target):
    raise IndexError("no such thing")


def nan(module, args, out):
    return out * float("nan")


def hooked(hook, model=None):
    model = model or make_model()
    model.register_forward_hook(hook)
    return model


class DiesInEval(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 1)

    def forward(self, x):
        if not self.training:
            raise RuntimeError("not in eval")
        return self.body(x)


def short_loss(pred, target):
    return (pred - target[:2]).sum()


def no_scalar(pred, target):
    return pred - target


class Still(torch.optim.SGD):
    def step(self, closure=None):
        return None


def pixels(n, seed=0):
    return TensorDataset(
        torch.randint(256, (n, 1, 2, 2), generator=torch.Generator().manual_seed(seed)).float(), torch.zeros(n, 1)
    )


def mse(change_y, **kwargs):
    return make_learner(make_dls(data=mapped(change_y=change_y, of=make_data)), **kwargs)


def bce(change_y, loss=None, **kwargs):
    return mse(change_y, loss_func=loss or nn.BCEWithLogitsLoss(), **kwargs)


PROBLEMS = {
    "uint8": (lambda: classes(data=mapped(change_x=lambda x: x.byte())), "inputs", ["uint8", "float32", ".float()"]),
    "float64": (lambda: classes(data=mapped(change_x=lambda x: x.double())), "inputs", ["float64", "float32"]),
    "NaN inputs": (lambda: classes(data=mapped(change_x=lambda x: x / 0 * 0)), "inputs", ["16 of 16", "NaN"]),
    "shape": (lambda: classes(model=make_model(n_in=5, n_out=3)), "prediction",
              ["in 0 (Linear)", "the model got (float32 tensor of shape (4, 4))", "RuntimeError"]),
    "too few outputs": (lambda: classes(2), "targets", ["values 0 .. 2", "classes 0 .. 1", "3 outputs"]),
    "classes from 1": (lambda: classes(data=mapped(change_y=lambda y: y + 1)), "targets", ["1 .. 3", "subtract 1"]),
    "negative classes": (lambda: classes(data=mapped(change_y=lambda y: y - 1)), "targets", ["values -1"]),
    "int32 classes": (lambda: classes(data=mapped(change_y=lambda y: y.int())), "targets", ["int32", ".long()"]),
    "float classes": (lambda: classes(data=mapped(change_y=lambda y: y.float())), "targets", ["float32", ".long()"]),
    "a column of classes": (lambda: classes(data=mapped(change_y=lambda y: y[:, None])), "targets",
                            ["(4, 1)", "takes (4,)", ".squeeze(1)"]),
    "all ignored": (lambda: classes(data=mapped(change_y=lambda y: y * 0 - 100)), "targets", ["ignore_index"]),
    "integers for MSE": (lambda: mse(lambda y: y.long()), "targets", ["int64", "MSELoss", ".float()"]),
    "shapes for MSE": (lambda: mse(lambda y: y[:, 0]), "targets", ["(4, 1)", "(4,)", "squeeze"]),
    "integers for BCE": (lambda: bce(lambda y: (y > 0).long()), "targets", ["int64", ".float()"]),
    "shapes for BCE": (lambda: bce(lambda y: (y > 0).float()[:, 0]), "targets", ["(4,)", "(4, 1)"]),
    "range for BCE": (lambda: bce(lambda y: y * 9), "targets", ["from 0 to 1"]),
    "scores for BCE": (lambda: bce(lambda y: (y > 0).float(), nn.BCELoss()), "targets",
                       ["BCEWithLogitsLoss", "sigmoid"]),
    "NaN targets": (lambda: mse(lambda y: y / 0 * 0), "targets", ["NaN"]),
    "NaN predictions": (lambda: make_learner(model=hooked(nan)), "prediction", ["4 of 4", "NaN"]),
    "a loss that fails": (lambda: make_learner(loss_func=short_loss), "loss",
                          ["must match", "predictions: float32 tensor of shape (4, 1); targets: (float32"]),
    "no scalar": (lambda: make_learner(loss_func=no_scalar), "loss", ["not a scalar", "(4, 1)"]),
    "infinite loss": (lambda: make_learner(loss_func=lambda p, y: (p - y).sum() / 0), "loss", ["not a finite number"]),
    "no gradients": (lambda: make_learner(model=Half()), "gradients", ["spare.weight, spare.bias", "freeze"]),
    "zero gradients": (lambda: make_learner(loss_func=lambda p, y: (p * 0).sum()), "gradients", ["all zero"]),
    "NaN gradients": (lambda: make_learner(loss_func=lambda p, y: (p * 0).sum().abs().sqrt()), "gradients", ["NaN"]),
    "one number": (lambda: classes(model=nn.Sequential(make_model(n_out=3), OneNumber())), "targets",
                   ["IndexError", "tensor of shape ()"]),
    "detached": (lambda: make_learner(loss_func=lambda p, y: (p.detach() - y).sum()), "gradients",
                 ["does not require grad"]),
    "forgotten": (lambda: make_learner(splitter=lambda m: [list(m[0].parameters())]), "optimizer",
                  ["3.weight, 3.bias", "splitter"]),
    "stuck": (lambda: make_learner(opt_func=Still), "optimizer", ["0.weight", "did not change"]),
    "a rate of 0": (lambda: make_learner(lr=0.0), "optimizer", ["did not change", "lr 0"]),
    "nothing to train": (lambda: make_learner(model=make_model().requires_grad_(False)), "optimizer",
                         ["no trainable parameters"]),
    "validation": (lambda: make_learner(model=DiesInEval()), "validation", ["not in eval"]),
    "classes of validation": (
        lambda: classes(2, dls=make_dls(data=lambda n, seed=0: mapped(change_y=lambda y: y % (2 + seed))(n))),
        "validation", ["classes 0 .. 1"],
    ),
    "a metric": (lambda: make_learner(metrics=[nn.functional.mse_loss, broken_metric]), "metrics",
                 ["broken_metric", "no such thing", "(4, 1)"]),
    "two of a name": (lambda: make_learner(metrics=[accuracy, accuracy]), "metrics", ["two metrics are named"]),
    "no metric": (lambda: make_learner(metrics=3), "metrics", ["got the metric 3"]),
    "a callback": (lambda: make_learner(cbs=Fails()), "callbacks", ["KeyError", "gone", "Fails.after_loss"]),
    "the data": (lambda: make_learner(DataLoaders(DataLoader(Broken(), 2), device="cpu")), "inputs",
                 ["OSError", "file 0"]),
    "an iterator": (lambda: make_learner(DataLoaders(iter([make_data(4).tensors]), device="cpu")), "inputs",
                    ["only once"]),
    "empty": (lambda: make_learner(DataLoaders([], device="cpu")), "inputs", ["is empty"]),
}  # fmt: skip


class Fails(Callback):
    def after_loss(self):
        raise KeyError("gone")


class OneNumber(nn.Module):
    def forward(self, x):
        return x.mean()


class Broken(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        raise OSError(f"no file {i}")


@pytest.mark.usefixtures("without_memory")
@pytest.mark.parametrize("kind", PROBLEMS)
def test_what_is_wrong_is_named(kind, capsys):
    make, topic, words = PROBLEMS[kind]
    learn = make()
    before = weights(learn.model)
    found, last = checked(capsys, learn, False)
    mark, text = found[topic]
    assert mark == "!!", found
    assert all(word in text for word in words), text
    assert last.endswith(("problem (errors.html#check-findings)", "problems (errors.html#check-findings)"))
    assert learn.opt is None
    assert learn.task is None
    assert learn.dl is None
    same = {k: v.nan_to_num() for k, v in before.items()}
    assert same_weights(same, {k: v.nan_to_num() for k, v in weights(learn.model).items()})


class OwnTokens(nn.Module):
    """Makes its own loss over tokens, of which one is padding."""

    def __init__(self, padding):
        super().__init__()
        self.body, self.padding = nn.Linear(4, 3), padding

    def forward(self, x, labels):
        logits = self.body(x)
        loss = nn.functional.cross_entropy(logits.mT, labels, ignore_index=self.padding)
        return {"logits": nn.functional.dropout(logits, training=self.training), "loss": loss}


def tokens(n=6, padding=0, **kwargs):
    x, labels = torch.randn(n, 5, 4), torch.randint(1, 3, (n, 5))
    labels[0, 1:] = labels[1:3, 3:] = padding
    return Learner(DataLoaders([{"x": x, "labels": labels}], device="cpu"), OwnTokens(padding), **kwargs)


class KeepsLoss(Learner):
    """Differentiates what its `_loss` has kept, as a GAN with two losses does."""

    def _loss(self):
        super()._loss()
        self.kept = self.loss_grad

    def _backward(self):
        self.kept.backward()


@pytest.mark.usefixtures("without_memory")
def test_what_a_subclass_keeps_of_its_loss_is_still_there_for_the_backward_pass(capsys):
    learn = KeepsLoss(make_dls(8, 4, 4), OwnLoss())
    assert checked(capsys, learn, True)[0]["gradients"][0] == "ok"


@pytest.mark.usefixtures("without_memory")
def test_the_count_of_a_models_own_loss_is_compared_on_two_parts_of_the_batch(capsys):
    assert checked(capsys, tokens(padding=-100), True)[0]["loss"][0] == "ok"
    assert checked(capsys, tokens(loss_weight=lambda y: (y != 0).sum()), True)[0]["loss"][0] == "ok"
    mark, text = checked(capsys, tokens(loss_weight="samples"), True)[0]["loss"]
    assert mark == "??"
    assert "two parts of the batch, weighed by the 2 and 4 that they count, make" in text
    mark, text = checked(capsys, tokens(), True)[0]["loss"]
    assert mark == "??"
    assert "two parts of the batch, weighed by the 10 and 20 that they count, make" in text
    mark, text = checked(capsys, tokens(2), True)[0]["loss"]  # which cannot be cut: what is not known is said
    assert mark == "??"
    assert "it is taken for the mean over the 10 of 10 targets that are not -100" in text


class Summed(OwnTokens):
    """Sums over its tokens, as the CTC loss of transformers' speech models does by default."""

    def forward(self, x, labels):
        output = super().forward(x, labels)
        return output | {"loss": output["loss"] * (labels != self.padding).sum()}


class Noisy(OwnTokens):
    """Draws noise in its loss, in eval mode, too, as diffusion models do."""

    def forward(self, x, labels):
        return super().forward(x + torch.randn_like(x), labels)


@pytest.mark.usefixtures("without_memory")
@pytest.mark.parametrize(("kind", "weight"), [(Summed, "sum"), (Noisy, lambda y: (y != -100).sum())])
def test_the_parts_of_a_sum_are_added_up_and_those_of_a_loss_that_draws_are_not_compared(capsys, kind, weight):
    learn = tokens(padding=-100, loss_weight=weight)
    learn.model = kind(-100)
    assert checked(capsys, learn, True)[0]["loss"][0] == "ok"


def test_the_comparison_leaves_no_trace():
    calls = []
    learn = tokens()
    learn.model.register_forward_pre_hook(lambda model, args: calls.append((model.training, torch.is_grad_enabled())))
    before, weight = torch.get_rng_state(), learn.model.body.weight.detach().clone()
    learn.check()
    assert calls == [(True, True)] + [(False, False)] * 3
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(learn.model.body.weight, weight)
    assert learn.model.training
    learn.loss_weight = "samples"
    learn.fit(1)
    assert len(calls) == 5  # nowhere else


HINTS = {
    "a loss of the model's own": (tokens, "loss", "say by loss_weight="),
    "pixels": (lambda: make_learner(make_dls(data=pixels), nn.Sequential(nn.Flatten(), make_model())), "inputs",
               "0 .. 255"),
    "softmax": (lambda: classes(model=nn.Sequential(make_model(n_out=3), nn.Softmax(1))), "prediction", "softmax"),
    "not logarithms": (lambda: classes(loss=nn.NLLLoss()), "prediction", "LogSoftmax"),
    "a large loss": (lambda: classes(model=hooked(lambda m, a, out: out * 100, make_model(n_out=3))), "loss",
                     "far above the 1.1"),
    "uint8 that the model takes": (
        lambda: classes(data=mapped(change_x=lambda x: x.byte()), model=nn.Sequential(Scale(), make_model(n_out=3))),
        "inputs", "uint8",
    ),
    "some zero gradients": (lambda: make_learner(model=zeroed()), "gradients", "0.weight, 0.bias: all zero"),
    "dropped gradients": (lambda: make_learner(cbs=Callback(after_backward=drop_bias)), "gradients",
                          "0.bias: a callback has dropped theirs"),
    "cleared gradients": (lambda: make_learner(cbs=Callback(after_backward=lambda cb: cb.opt.zero_grad())), "gradients",
                          "0.weight, 0.bias, 3.weight, 3.bias: a callback has dropped theirs"),
    "parameters of the loss": (lambda: make_learner(loss_func=Scaled()), "optimizer", "scale of the loss: trainable"),
    "a method of the loss": (lambda: make_learner(loss_func=Scaled().forward), "optimizer", "scale of the loss"),
    "a cancelled step": (lambda: make_learner(cbs=Callback(before_step=cancel_step)), "optimizer", "cancelled"),
}  # fmt: skip


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, pred, y):
        return (self.scale * pred - y).square().mean()


def drop_bias(cb):
    cb.model[0].bias.grad = None


class Scale(nn.Module):
    def forward(self, x):
        return x.float() / 255


def cancel_step(cb):
    raise CancelStepException


@pytest.mark.usefixtures("without_memory")
@pytest.mark.parametrize("kind", HINTS)
def test_what_may_be_meant_is_a_hint(kind, capsys):
    make, topic, words = HINTS[kind]
    found, _ = checked(capsys, make(), True)
    mark, text = found[topic]
    assert mark == "??", found
    assert words in text


@pytest.mark.usefixtures("without_memory")
def test_a_parameter_without_elements_is_well(capsys):
    model = make_model()
    model[3].none = nn.Parameter(torch.zeros(0, 2))
    model[3].register_forward_hook(lambda m, args, out: out + m.none.sum())
    assert checked(capsys, make_learner(model=model), True)[0]["gradients"][0] == "ok"


@pytest.mark.usefixtures("without_memory")
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_last_batch_of_one_sample_is_a_problem_of_batch_norm(drop_last, capsys):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    dls = DataLoaders(DataLoader(make_data(9), 4, drop_last=drop_last), device="cpu")
    found, _ = checked(capsys, make_learner(dls, model), drop_last)
    assert ("batchnorm" in found) == (not drop_last)
    if not drop_last:
        mark, text = found["batchnorm"]
        assert mark == "!!"
        assert "its last batch has 1 of its 9 samples (batches of 4)" in text


class Locked:
    """A metric that cannot be copied."""

    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, pred, target):
        return 1.0


@pytest.mark.usefixtures("without_memory")
def test_metrics_that_cannot_be_copied_are_not_checked(capsys):
    found, _ = checked(capsys, make_learner(metrics=Locked()), True)
    assert found["metrics"] == ("--", "not checked, as they cannot be copied: TypeError: cannot pickle "
                                "'_thread.lock' object")  # fmt: skip


@pytest.mark.usefixtures("without_memory")
def test_metrics_of_a_causal_language_model_are_those_of_a_validation(capsys):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_positions": 6, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=7, **sizes))
    rows = [{"input_ids": x, "labels": x} for x in (torch.arange(6) + torch.arange(4)[:, None]) % 7]
    dl = DataLoader(rows, 4)
    learn = Learner(DataLoaders(dl, dl), model, metrics=accuracy, lr=0.03)
    with learn.no_logging():
        learn.fit(20)
    assert learn.validate()[1] == 1  # Each token says which is the next, and the loss compares these.
    found, _ = checked(capsys, learn, True)
    assert found["metrics"] == ("ok", "accuracy 1")


@pytest.mark.usefixtures("without_memory")
def test_a_sum_over_ignored_targets_is_0(capsys):
    learn = classes(loss=nn.CrossEntropyLoss(reduction="sum"), data=mapped(change_y=lambda y: y * 0 - 100))
    found, _ = checked(capsys, learn, False)
    assert found["targets"] == ("ok", "int64 (4,) on cpu, values -100 .. -100")
    assert found["loss"][1].startswith("0 ")
    assert "all zero" in found["gradients"][1]


@pytest.mark.usefixtures("without_memory")
def test_one_class_alone_is_told(capsys):
    found, _ = checked(capsys, classes(1, data=mapped(change_y=lambda y: y * 0)), False)
    mark, text = found["prediction"]
    assert mark == "??"
    assert "BCEWithLogitsLoss" in text
    assert "all zero" in found["gradients"][1]


@pytest.mark.usefixtures("without_memory")
def test_several_problems_are_all_told(capsys):
    learn = make_learner(model=Half(), splitter=lambda m: [[m.used.weight]], metrics=broken_metric)
    found, last = checked(capsys, learn, False)
    assert last == "3 problems (errors.html#check-findings)"
    assert {topic for topic, (mark, _) in found.items() if mark == "!!"} == {"gradients", "optimizer", "metrics"}


@pytest.mark.usefixtures("without_memory")
@pytest.mark.parametrize(
    ("event", "error", "well"),
    [
        ("before_batch", CancelBatchException, False),
        ("before_fit", CancelFitException, False),
        ("after_backward", CancelBatchException, True),  # gradients may be accumulated so
    ],
)
def test_a_step_that_is_not_taken_is_told(event, error, well, capsys):
    def leave(cb):
        if cb.training or event == "before_fit":
            raise error

    found, _ = checked(capsys, make_learner(cbs=Callback(**{event: leave})), well)
    mark, text = found["optimizer"]
    assert mark == ("??" if well else "!!")
    assert text.startswith("no step was taken: a callback, or the learner, has cancelled the batch")


def test_a_check_in_mid_run_is_refused():
    def inside(cb):
        with pytest.raises(RuntimeError, match="check was called during 'fit'"):
            check(cb.learn)

    make_learner().fit(1, cbs=Callback(after_batch=inside))


# Nothing stays behind


class Shuffled(Dataset):
    """Augments by every random stream there is."""

    def __init__(self, n=12):
        self.x, self.y = make_data(n).tensors

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        noise = torch.rand(4) + random.random() + np.random.rand()
        return self.x[i] + 0.1 * noise, self.y[i]


class Custom(RandomSampler):
    """Draws from python's global stream."""

    def __iter__(self):
        order = list(range(len(self.data_source)))
        random.shuffle(order)
        return iter(order)


def loader(kind):
    data = Shuffled()
    if kind == "custom":
        return DataLoader(data, 4, sampler=Custom(data))
    if kind == "generator":
        return DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(9))
    workers = {"num_workers": 1, "persistent_workers": True} if kind == "workers" else {}
    return DataLoader(data, 4, shuffle=True, **workers)


def norms():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1))


@pytest.mark.parametrize("kind", ["plain", "generator", "custom", "workers"])
def test_the_fit_after_it_equals_the_fit_without(kind):
    found = []
    for checked in (False, True):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        dls = DataLoaders(loader(kind), DataLoader(make_data(8, seed=1), 4), device="cpu")
        learn = make_learner(dls, norms(), opt_func=torch.optim.AdamW, wd=0.01)
        for _ in range(1 if kind == "workers" else 2):  # before the first fit, and between two
            if checked:
                before = copy.deepcopy((vars(learn.recorder), learn.train_iter, learn.pct_train, learn.n_epoch))
                children = psutil.Process().children()
                assert learn.check()
                assert psutil.Process().children() == children
                names = ("values", "lrs", "iters", "history", "final_record", "metric_names")
                assert all(vars(learn.recorder)[name] == before[0][name] for name in names)
                assert (learn.train_iter, learn.pct_train, learn.n_epoch) == before[1:]
            learn.fit(1)
        found.append((weights(learn.model), learn.recorder.values, learn.opt.state_dict()["state"]))
        if kind == "workers":
            end_workers(dls)
    (a, values, state), (b, values_b, state_b) = found
    assert same_weights(a, b)
    assert values == values_b
    assert all(torch.equal(state[i]["exp_avg"], state_b[i]["exp_avg"]) for i in state)


def test_gradients_modes_callbacks_and_metrics_are_what_they_were():
    class Counts:
        def __init__(self):
            self.seen = 0

        def reset(self):
            self.seen = 0

        def update(self, pred, target):
            self.seen += 1

        def compute(self):
            return self.seen

    metric = Counts()
    learn = make_learner(metrics=metric)
    learn.model[0].weight.grad = torch.ones_like(learn.model[0].weight)
    learn.model[1].eval()
    metric.seen, cbs, logger = 7, list(learn.cbs), learn.logger
    assert learn.check()
    assert (learn.model[0].weight.grad == 1).all()
    assert learn.model[3].weight.grad is None
    assert not learn.model[1].training
    assert learn.model[0].training
    assert metric.seen == 7
    assert learn.cbs == cbs
    assert learn.logger is logger
    assert all(cb.learn is learn for cb in cbs)


def test_what_a_callback_sets_on_the_learner_is_put_back(tmp_path):
    def change(cb):
        learn = cb.learn
        learn.loss_func, learn.metrics, learn.wd, learn.path = nn.L1Loss(), [], 0.5, tmp_path

    learn = make_learner(metrics=accuracy, cbs=Callback(before_fit=change))
    names = ("loss_func", "metrics", "wd", "path", "logger")
    before = [getattr(learn, name) for name in names]
    assert learn.check()
    learn.lr_find(num_it=10, show_plot=False)
    assert all(getattr(learn, name) is value for name, value in zip(names, before, strict=True))


def test_callbacks_of_ones_own_see_one_step_and_those_of_a_fit_none():
    heard = []

    def look(event):
        return lambda cb: heard.append((event, cb.training))

    inner = Callback(before_batch=look("batch"), after_step=look("step"))
    outer = Callback(before_batch=look("outer"))
    outer.only_fit = True
    assert make_learner(make_dls(40, 20, 4), cbs=[inner, outer]).check()
    assert heard == [("batch", True), ("step", True), ("batch", False)]


def test_what_callbacks_have_counted_is_what_it_was():
    learn = make_learner(make_dls(40, 20, 4), cbs=Seen())
    train = learn.seen.train
    assert learn.check()
    assert learn.seen.train is train
    assert (train, learn.seen.steps, learn.seen.valid) == ([], 0, [])


# A GPU


@pytest.mark.gpu
def test_on_a_gpu_classes_out_of_range_are_told_before_the_device_asserts(capsys):
    dls = DataLoaders.from_datasets(make_classes(64), make_classes(64), bs=16)
    learn = make_learner(dls, make_model(n_out=2), nn.CrossEntropyLoss())
    found, _ = checked(capsys, learn, False)
    assert "classes 0 .. 1" in found["targets"][1]
    torch.cuda.synchronize()
    learn = make_learner(dls, make_model(n_out=3), nn.CrossEntropyLoss())
    for cbs in ([], [OverfitBatch()], [ShortEpochCallback(n=2)]):
        assert learn.check()
        learn.fit(1, cbs=cbs)
    assert make_learner(dls, make_model(n_out=3), nn.CrossEntropyLoss()).to_fp16().check()


class Graph(nn.Module):
    """Takes a sparse matrix beside its inputs."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 1)

    def forward(self, x, adjacent):
        return torch.sparse.mm(adjacent, self.body(x))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.uint32, torch.uint64])
def test_inputs_of_any_type_that_the_model_takes_are_well(dtype, capsys):
    model = nn.Sequential(Scale(), make_model())
    dls = make_dls(data=mapped(change_x=lambda x: (x > 0).to(dtype), of=make_data))
    found, _ = checked(capsys, make_learner(dls, model), True)
    assert found["inputs"] == ("ok", f"{str(dtype)[6:]} (4, 4) on cpu, values 0 .. 1")


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_inputs_are_well(layout, capsys):
    adjacent = torch.eye(5).to_sparse(layout=getattr(torch, layout))
    dls = DataLoaders([(torch.ones(5, 3), adjacent, torch.ones(5, 1))], device="cpu")
    found, _ = checked(capsys, Learner(dls, Graph(), nn.MSELoss()), True)
    assert f"float32 {layout} (5, 5) on cpu, values 1 .. 1" in found["inputs"][1]
    broken = [(torch.ones(5, 3), adjacent * torch.nan, torch.ones(5, 1))]
    found, _ = checked(capsys, Learner(DataLoaders(broken, device="cpu"), Graph(), nn.MSELoss()), False)
    assert "5 of 25 values are NaN" in found["inputs"][1]


class Warmed(Learner):
    def create_opt(self):
        super().create_opt()
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.opt, lambda step: step / 10)


def test_a_warm_up_may_begin_at_0(capsys):
    def begin(cb):
        for group in cb.opt.param_groups:
            group["lr"] = 0.1 * cb.train_iter

    found, _ = checked(capsys, make_learner(cbs=Callback(before_batch=begin)), True)
    assert found["optimizer"] == ("ok", "SGD, lr 0")
    checked(capsys, make_learner(cls=Warmed), True)
