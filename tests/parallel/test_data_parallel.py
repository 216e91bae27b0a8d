"""DataParallelCallback: on fewer than two GPUs, on a stand-in for several, and on several where a machine has them."""

import ast
import copy
import importlib
import io
import warnings
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, Wrapped, make_classes, make_data, make_dls, make_learner, make_model, notes, raises
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import scatter_gather
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import Callback, CancelBatchException, DataLoaders, DataParallelCallback, Learner, Recorder, accuracy
from learnerkit.losses import LossWeight
from learnerkit.parallel.data_parallel import _Replica, can_replicate, look_through
from learnerkit.utils import unwrap


def test_with_fewer_than_two_gpus_it_says_so_once_and_trains(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    learn, alone = make_learner(), make_learner()
    alone.fit(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with learn.parallel_ctx() as inner:
            assert inner is learn
            learn.fit(1)
            learn.fit(1)
    assert len([w for w in caught if "DataParallel needs two GPUs" in str(w.message)]) == 1
    assert not any(isinstance(cb, DataParallelCallback) for cb in learn.cbs)
    assert learn.recorder.history


def test_a_model_that_spans_devices_is_refused():
    learn = make_learner()
    learn.model.hf_device_map = {"0": "cpu", "2": "disk"}
    with learn.parallel_ctx(), raises(ValueError, "the model spans cpu, meta, and DataParallel", "distrib_ctx"):
        learn.fit(1)
    learn.fit(1)


def test_to_parallel_adds_the_callback_and_detach_removes_it():
    learn = make_learner()
    assert any(isinstance(cb, DataParallelCallback) for cb in learn.to_parallel([0, 1]).cbs)
    assert not any(isinstance(cb, DataParallelCallback) for cb in learn.detach_parallel().cbs)


def test_a_gpu_twice_is_refused():
    with pytest.raises(ValueError, match=r"device_ids=\[0, 0\]"):
        DataParallelCallback([0, 0])


def test_the_model_is_wrapped_for_the_fit_and_saved_plain(two_gpus, tmp_path):
    learn, seen = make_learner(path=tmp_path), []
    model = learn.model

    def look(cb):
        seen.append(isinstance(cb.model, Wrapped))
        cb.learn.save("inside")

    with learn.parallel_ctx():
        learn.fit(1, cbs=Callback(after_batch=look))
        assert learn.model is model
        learn.save("after")
    assert set(seen) == {True}
    for name in ("inside", "after"):
        weights = torch.load(tmp_path / "models" / f"{name}.pth", weights_only=True)["model"]
        assert weights.keys() == model.state_dict().keys()
    make_learner(path=tmp_path).load("inside")
    assert unwrap(Wrapped(model)) is model


def test_the_model_is_unwrapped_after_an_error(two_gpus):
    def fail(cb):
        raise KeyboardInterrupt

    learn = make_learner()
    model = learn.model
    with learn.parallel_ctx(), pytest.raises(KeyboardInterrupt):
        learn.fit(1, cbs=Callback(after_pred=fail))
    assert learn.model is model
    assert not {"_forward", "_loss"} & learn.__dict__.keys()
    learn.fit(1)


# The wrapper looks like the module inside


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.factor, self._kept = nn.Linear(2, 3), 2.0, None

    def forward(self, x):
        return self.body(x) * self.factor

    def score(self, x):
        return self(x).sum()


def wrapped(model):
    return look_through(model, nn.DataParallel(model), [])


def test_attributes_and_methods_are_the_modules():
    model, calls = Scorer(), []
    parallel = nn.DataParallel(model)
    parallel.register_forward_hook(lambda *_: calls.append(1))
    wrapper = look_through(model, parallel, [3])
    assert isinstance(wrapper, nn.DataParallel)
    assert isinstance(wrapper, Scorer)
    assert not isinstance(wrapper, nn.Sequential)
    assert unwrap(wrapper) is model
    x = torch.ones(1, 2)
    assert torch.equal(wrapper.score(x), model.score(x))
    assert calls == []  # a method's calls are those of the module
    wrapper.factor = wrapper._kept = 3.0
    assert (model.factor, model._kept) == (3.0, 3.0)
    assert torch.equal(wrapper(x), model(x))
    assert calls == [1]
    assert wrapper.device_ids == [3]  # the wrapper's own
    assert not hasattr(model, "device_ids")
    del wrapper.factor
    assert not hasattr(model, "factor")
    with pytest.raises(AttributeError, match="'Scorer' object has no attribute 'scroe'"):
        wrapper.scroe(x)


def test_names_and_states_are_the_modules():
    model = Scorer()
    wrapper = wrapped(model)
    assert list(wrapper.state_dict()) == list(model.state_dict())
    wrapper.load_state_dict({"body.weight": torch.ones(3, 2), "body.bias": torch.zeros(3)})
    assert model.body.weight.sum() == 6
    assert [name for name, _ in wrapper.named_parameters()] == ["body.weight", "body.bias"]
    assert list(wrapper.parameters())[0] is model.body.weight
    assert list(wrapper.children()) == [model.body]
    assert list(wrapper.modules()) == [model, model.body]
    assert wrapper.get_submodule("body") is model.body
    assert wrapper.eval() is wrapper
    assert (wrapper.training, model.training, model.body.training) == (False, False, False)
    assert wrapper.double() is wrapper
    assert model.body.weight.dtype is torch.float64
    calls = []
    wrapper.register_forward_hook(lambda *_: calls.append(1))
    wrapper(torch.ones(1, 2).double())
    assert calls == [1]


def test_items_are_the_modules_where_it_has_any():
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    wrapper = wrapped(model)
    assert len(wrapper) == 2
    assert wrapper[0] is model[0]
    assert list(wrapper) == list(model)
    wrapper[1] = nn.ReLU()
    assert type(model[1]) is nn.ReLU
    alone = wrapped(Scorer())
    assert alone
    with pytest.raises(TypeError, match="has no len"):
        len(alone)


def test_a_copy_is_one_of_the_module():
    model = Scorer()
    wrapper = wrapped(model)
    twin, again = copy.deepcopy((wrapper, model))
    assert type(twin) is Scorer
    assert twin is again
    assert twin.body.weight is not model.body.weight
    file = io.BytesIO()
    torch.save(wrapper, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is Scorer


def test_the_wrapper_is_named_after_torchs(two_gpus):
    assert type(wrapped(Scorer())).__name__ == "DataParallel"


# The loss on the replicas: on the CPU torch's own scattering, replicas and gathering, with copies instead of transfers


class Cut(nn.DataParallel):
    """DataParallel over as many pretended GPUs as asked for: each replica runs in a thread of its own."""

    def __init__(self, module, device_ids=None):
        nn.Module.__init__(self)
        self.module, self.device_ids = module, device_ids

    def forward(self, *args, **kwargs):
        inputs, keywords = scatter_gather.scatter_kwargs(args, kwargs, self.device_ids)
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        replicas = nn.parallel.replicate(self.module, self.device_ids[: len(inputs)], detach=not modes[0])

        def run(replica, args, kwargs):
            torch.set_grad_enabled(modes[0])
            with torch.autocast("cpu", enabled=modes[1]):
                return replica(*args, **kwargs)

        with ThreadPoolExecutor(len(replicas)) as threads:  # at the same time, as torch's are
            outputs = list(threads.map(run, replicas, inputs, keywords))
        return scatter_gather.gather(outputs, "cpu")


@pytest.fixture
def three_gpus(monkeypatch):
    """As if there were three GPUs. Notes the size of every tensor gathered in training."""
    gathered = []

    def gather(device, dim, *parts):
        assert all(part.ndim for part in parts), "torch would warn that it makes a vector of scalars"
        whole = torch.cat(parts, dim)
        if torch.is_grad_enabled():
            gathered.append(whole.numel())
        return whole

    def broadcast(tensors, devices, detach=False):
        # The first replica shares its buffers with the whole, the others have copies.
        return [[t if detach and i == 0 else t.clone() for t in tensors] for i in range(len(devices))]

    def scatter(devices, sizes, dim, tensor):
        return tensor.chunk(len(devices), dim)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr("learnerkit.parallel.data_parallel.can_split", lambda device, ids: True)
    monkeypatch.setattr(nn, "DataParallel", Cut)
    monkeypatch.setattr(scatter_gather, "Scatter", SimpleNamespace(apply=scatter))
    monkeypatch.setattr(scatter_gather, "Gather", SimpleNamespace(apply=gather))
    replicate = importlib.import_module("torch.nn.parallel.replicate")  # where torch.nn.parallel has the function
    monkeypatch.setattr(replicate, "_broadcast_coalesced_reshape", broadcast)
    return gathered


def loaders(data, bs=10, **kwargs):
    """Loaders of float64 data whose last batch is a single sample; validation in batches of 4."""
    columns = [t.double() if t.is_floating_point() else t for t in data.tensors]
    data = TensorDataset(*columns)
    valid = TensorDataset(*[t[-9:] for t in columns])
    return DataLoaders(DataLoader(data, bs), DataLoader(valid, 4), device="cpu", **kwargs)


def class_loaders(**kwargs):
    return loaders(make_classes(21), **kwargs)


def ignoring_loaders():
    data = make_classes(21)
    data.tensors[1][:5] = -100  # the whole part of the first replica, too
    return loaders(data)


def token_loaders():
    """Rows of 5 tokens of 3 classes; the parts of a batch have very different numbers that are not padding."""
    tokens = torch.randint(3, (21, 5))
    tokens[torch.arange(5) >= torch.arange(21)[:, None] % 5] = -100
    tokens[10:14] = -100
    return loaders(TensorDataset(torch.randn(21, 4), tokens))


def mapping_loaders(get=token_loaders):
    dls = get()
    train, valid = ([dict(zip(("x", "labels"), batch, strict=True)) for batch in dl] for dl in (dls.train, dls.valid))
    return DataLoaders(train, valid, device="cpu")


class Tokens(nn.Module):
    """Predictions of shape (samples, 3 classes, 5 tokens)."""

    def __init__(self):
        super().__init__()
        self.inner = make_model(4, 15)

    def forward(self, x):
        return self.inner(x).reshape(-1, 3, 5)


class OwnLoss(Tokens):
    """Tokens that return their own loss in an output of some kind."""

    def __init__(self, kind=dict):
        super().__init__()
        self.kind = kind

    def forward(self, x, labels=None):
        logits = super().forward(x)
        loss = F.cross_entropy(logits, labels) if labels is not None else None
        return self.kind(loss=loss, logits=logits)


class Counted(Tokens):
    """Tokens that return their own loss, of which they must be told the count."""

    def forward(self, x, labels=None, num_items_in_batch=None):
        logits = super().forward(x)
        return {"logits": logits, "loss": F.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch}


def masked(pred, target):
    """A loss that is the mean over the tokens that are not padding, unknown to the library."""
    keep = target != -100
    loss = F.cross_entropy(pred, target.clamp(min=0), reduction="none")
    return (loss * keep).sum() / keep.sum().clamp(min=1)


def count_tokens(target):
    samples, length = target.shape  # those of a batch or of a part of one
    return samples * length - (target == -100).sum()


class Scaled(nn.Module):
    """A loss with a parameter, a buffer and a mode."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("shift", torch.tensor(0.5))

    def forward(self, pred, target):
        return self.scale * F.mse_loss(pred, target) + self.shift * self.training


def scaled():
    loss = Scaled()
    loss.eval()
    return loss


WEIGHT = torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)

# what: (loss, loaders, model, further arguments of the Learner)
CASES = {
    "mean": (nn.CrossEntropyLoss, class_loaders, partial(make_model, 4, 3), {}),
    "function": (lambda: F.cross_entropy, class_loaders, partial(make_model, 4, 3), {}),
    "class weights": (partial(nn.CrossEntropyLoss, WEIGHT), class_loaders, partial(make_model, 4, 3), {}),
    "class weights in a partial": (
        lambda: partial(F.cross_entropy, weight=WEIGHT), class_loaders, partial(make_model, 4, 3), {},
    ),
    "smoothed class weights": (
        partial(nn.CrossEntropyLoss, WEIGHT, label_smoothing=0.1), class_loaders, partial(make_model, 4, 3), {},
    ),
    "some ignored": (nn.CrossEntropyLoss, ignoring_loaders, partial(make_model, 4, 3), {}),
    "tokens": (partial(nn.CrossEntropyLoss, ignore_index=-100), token_loaders, Tokens, {}),
    "sum": (partial(nn.CrossEntropyLoss, reduction="sum"), class_loaders, partial(make_model, 4, 3), {"lr": 0.01}),
    "said to sum": (
        lambda: lambda pred, target: (pred - target).square().sum(), lambda: loaders(make_data(21)), make_model,
        {"loss_weight": "sum", "lr": 0.01},
    ),
    "loss_weight": (lambda: masked, token_loaders, Tokens, {"loss_weight": count_tokens}),
    "mse": (nn.MSELoss, lambda: loaders(make_data(21)), make_model, {}),
    "mse of two outputs": (nn.MSELoss, lambda: loaders(make_data(21, 4, 2)), partial(make_model, 4, 2), {}),
    "a loss with weights": (scaled, lambda: loaders(make_data(21)), make_model, {}),
    "even batches": (nn.MSELoss, lambda: loaders(make_data(18), bs=9), make_model, {}),
    "batches of one": (nn.MSELoss, lambda: loaders(make_data(3), bs=1), make_model, {}),
    "mapping": (partial(nn.CrossEntropyLoss, ignore_index=-100), mapping_loaders, Tokens, {}),
    "own loss": (lambda: None, mapping_loaders, OwnLoss, {"loss_weight": count_tokens}),
    "own loss that takes the count": (lambda: None, mapping_loaders, Counted, {}),
    "own loss in a tuple": (
        lambda: None, mapping_loaders, partial(OwnLoss, namedtuple("Output", "loss logits")),
        {"loss_weight": count_tokens},
    ),
    "own loss in an object": (
        lambda: None, mapping_loaders, partial(OwnLoss, SimpleNamespace), {"loss_weight": count_tokens},
    ),
    "own loss by place": (
        lambda: None, mapping_loaders, partial(OwnLoss, lambda loss, logits: (logits, loss)),
        {"loss_weight": count_tokens},
    ),
}  # fmt: skip


def learner(case, on_replicas=None, **more):
    """A learner for a case; `on_replicas`: on the stand-in, with this `loss_on_replicas`."""
    loss_func, dls, model, kwargs = CASES[case]
    torch.manual_seed(1)
    kwargs = {"opt_func": torch.optim.SGD, "lr": 0.1} | kwargs | more
    loss_func = loss_func()
    if isinstance(loss_func, nn.Module):
        loss_func.double()
    learn = Learner(dls(), model().double(), loss_func, **kwargs)
    if on_replicas is not None:
        learn.add_cb(DataParallelCallback(loss_on_replicas=on_replicas))
    return learn


def equal(a, b):
    """Whether two learners have the same losses, weights and predictions."""
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    close(a.recorder.values, b.recorder.values)
    close(a.recorder.losses, b.recorder.losses)
    close(a.model.state_dict(), b.model.state_dict())
    close(a.validate(), b.validate())
    close(a.get_preds(), b.get_preds())


@pytest.mark.parametrize("on_replicas", [True, pytest.param(False, marks=pytest.mark.soak)])
@pytest.mark.parametrize("case", CASES)
def test_several_devices_equal_one(three_gpus, case, on_replicas):
    one, several = learner(case), learner(case, on_replicas)
    one.fit(2)
    several.fit(2)
    if on_replicas:
        assert set(three_gpus) <= {1, 2, 3}  # losses and counts alone, one for each replica
        assert len(three_gpus) == 2 * len(several.dls.train) * (1 if several._loss_weighting.sums else 2)
    else:
        assert max(three_gpus) > 1 or case == "batches of one"
    equal(several, one)
    if case == "a loss with weights":
        assert not several.loss_func.training


@pytest.mark.parametrize(("on_replicas", "sizes"), [(True, [4, 4, 2, 4, 4, 2, 1]), (False, [10, 10, 1])])
def test_the_loss_is_computed_where_it_is_asked_for(three_gpus, on_replicas, sizes):
    def loss(pred, target):
        seen.append(len(target))
        return F.mse_loss(pred, target)

    seen = []
    cbs = DataParallelCallback(loss_on_replicas=on_replicas)
    make_learner(loaders(make_data(21)), make_model().double(), loss, cbs=cbs).fit(1)
    # The replicas run at the same time, in any order; in validation predictions are gathered anyway.
    assert sorted(seen) == sorted([*sizes, 4, 4, 1])


@pytest.mark.parametrize("case", ["class weights", "own loss"])
def test_predictions_come_where_something_reads_them(three_gpus, case):
    def read(cb):
        if cb.training:
            seen.append((len(cb.pred), cb.pred.detach(), float(cb.loss)))

    one, several, seen = learner(case), learner(case, True), []
    for event in ("after_loss", "before_step", "after_batch", "cleanup_batch"):
        one.fit(1, cbs=Callback(**{event: read}))
        several.fit(1, cbs=Callback(**{event: read}))
        assert [n for n, *_ in seen] == [10, 10, 1, 10, 10, 1]
        torch.testing.assert_close(seen[3:], seen[:3], equal_nan=True)  # a batch of padding alone: NaN, as on one
        seen.clear()


def test_metrics_on_training_batches_get_predictions(three_gpus):
    one, several = learner("mean", metrics=accuracy), learner("mean", True, metrics=accuracy)
    for learn in (one, several):
        learn.remove_cb(Recorder)
        learn.add_cb(Recorder(train_metrics=True))
        learn.fit(2)
    assert "train_accuracy" in several.recorder.metric_names
    equal(several, one)
    assert max(three_gpus) == 30


def test_without_a_reader_there_are_no_predictions_in_training(three_gpus):
    def noting_sgd(params, lr):
        opt = torch.optim.SGD(params, lr)
        opt.register_step_post_hook(lambda *_: seen.append((learn.pred, learn.output)))
        return opt

    seen = []
    learn = learner("mean", True, opt_func=noting_sgd)
    learn.fit(1)
    assert seen == [(None, None)] * 3
    assert learn.get_preds()[0].shape == (9, 3)


class SquaredLoss(Learner):
    """A Learner with a loss of its own."""

    def _loss(self):
        self.loss_grad = (self.pred - self.yb[0]).square().mean()
        self.loss = self.loss_grad.detach()


class Double(Learner):
    """A Learner with a forward pass of its own."""

    def _forward(self):
        self.output = self.pred = self.model(*self.xb) + self.model(*self.xb)


def shift(cb):
    """Changes predictions and targets before the loss is taken."""
    cb.learn.pred, cb.learn.yb = cb.pred * 2, (cb.yb[0] + 1,)


def swap(cb):
    """Puts another loss there."""
    if cb.learn.loss_func is not F.l1_loss:
        cb.learn.loss_func = F.l1_loss


class Object:
    """A loss that is an object with a tensor."""

    def __init__(self):
        self.scale = torch.tensor(2.0)

    def __call__(self, pred, target):
        return self.scale * F.mse_loss(pred, target)


class Attribute(nn.Module):
    """A loss with a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.scale = torch.tensor(2.0)

    def forward(self, pred, target):
        return self.scale * F.mse_loss(pred, target)


class Bound(nn.Module):
    """A module with a method that is used as a loss."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def loss(self, pred, target):
        return self.scale * F.mse_loss(pred, target)


def closing_over(thing):
    """A loss that refers to `thing`."""
    return lambda pred, target: thing(pred, target) if callable(thing) else F.mse_loss(pred, target) * thing


def test_losses_that_hold_no_other_state_move_to_replicas():
    for loss in (
        nn.MSELoss(), nn.CrossEntropyLoss(WEIGHT), Scaled(), F.cross_entropy, F.mse_loss, masked,
        partial(F.cross_entropy, weight=WEIGHT), closing_over(nn.MSELoss()), closing_over(2.0),
    ):  # fmt: skip
        assert can_replicate(loss), loss
    zero = torch.tensor([0.0, 1.0, 1.0])
    for loss in (
        Object(), Attribute(), Bound().loss, partial(Bound().loss), closing_over(Scaled()), closing_over(WEIGHT),
        nn.CrossEntropyLoss(zero), partial(F.cross_entropy, weight=zero), partial(nn.MSELoss()), None,
    ):  # fmt: skip
        assert not can_replicate(loss), loss


def test_a_partial_moves_to_the_replica():
    def loss(pred, target, scale, shift):
        devices.extend(t.device.type for t in (pred, target, scale, shift["by"]))
        return pred.mean()

    devices = []
    loss = partial(loss, scale=torch.ones(()), shift={"by": torch.zeros(())})
    replica = _Replica(nn.Identity(), loss)
    batch = torch.ones(2, 3, device="meta")
    replica((batch,), {}, (batch,), False, LossWeight(loss), ("cpu", torch.bfloat16))
    assert devices == ["meta"] * 4


def test_a_compiled_loss_is_replicated_uncompiled():
    loss = nn.MSELoss()
    replica = _Replica(make_model(), torch.compile(loss, backend="eager"))
    assert replica.loss_func is loss  # compiled, it would call the whole


def near_inputs(pred, target, *, x, model):
    return (pred - target).square().mean() + (model(x) - x[:, :1]).square().mean()


@pytest.mark.parametrize(
    ("kwargs", "cbs"),
    [
        ({"cls": SquaredLoss}, None),
        ({"cls": Double}, None),
        ({}, partial(Callback, after_pred=shift)),
        ({}, partial(Callback, before_batch=swap)),
        ({"loss_func": Object()}, None),
        ({"loss_func": closing_over(torch.tensor(3.0))}, None),
        ({"loss_func": near_inputs}, None),
    ],
    ids=["own _loss", "own _forward", "after_pred", "another loss", "object", "closure", "asks the learner"],
)
def test_a_loss_that_cannot_be_cut_up_is_computed_on_one_device(three_gpus, kwargs, cbs):
    one, several = (make_learner(loaders(make_data(21)), make_model().double(), **kwargs) for _ in range(2))
    several.add_cb(DataParallelCallback())
    for learn in (one, several):
        learn.fit(2, cbs=cbs and cbs())
        learn.loss_func = one.loss_func
    equal(several, one)
    assert max(three_gpus) == 10


def test_class_weights_of_zero_change_no_number_on_replicas(three_gpus):
    def made(*cbs):
        data = make_classes(21)
        data.tensors[1][:4], data.tensors[1][-9:] = 0, 1  # the first replica's part of the first batch weighs nothing
        loss_func = nn.CrossEntropyLoss(torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64))
        return make_learner(loaders(data), make_model(4, 3).double(), loss_func, cbs=list(cbs))

    one, several = made(), made(DataParallelCallback())
    one.fit(2)
    several.fit(2)
    equal(several, one)


class Kinds(Tokens):
    """Makes the mean loss over its tokens; `kind` makes the output of it and their number."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x, labels=None):
        return self.kind(F.cross_entropy(super().forward(x), labels), (labels != -100).sum())


KINDS = {  # what the model returns, and the weight
    "in a dict of losses": (lambda loss, n: {"tokens": loss, "n": n}, "n"),
    "beside the loss": (lambda loss, n: {"loss": loss, "n": n}, "n"),
    "not, of a loss alone": (lambda loss, n: loss, count_tokens),
}


@pytest.mark.parametrize("kind", KINDS)
def test_counts_that_the_model_returns_weigh_the_replicas(three_gpus, kind):
    output, weight = KINDS[kind]

    def train(*cbs):
        torch.manual_seed(1)
        dls = mapping_loaders()
        learn = Learner(dls, Kinds(output).double(), opt_func=torch.optim.SGD, lr=0.1, loss_weight=weight, cbs=cbs)
        with learn.no_logging():
            learn.fit(2, cbs=Callback(after_pred=lambda cb: cb.learn.output))  # who may read it
        return learn

    one, several = train(), train(DataParallelCallback())
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    close(several.recorder.values[-1][:2], one.recorder.values[-1][:2])
    close(several.recorder.losses, one.recorder.losses)
    close(several.model.state_dict(), one.model.state_dict())


def test_a_weight_for_each_loss_is_refused(three_gpus):
    model = Kinds(lambda loss, n: {"tokens": loss, "n": n}).double()
    learn = Learner(mapping_loaders(), model, loss_weight={"tokens": "n"}, cbs=DataParallelCallback())
    with pytest.raises(ValueError, match="DataParallelCallback cannot weigh the parts"):
        learn.fit(1)


def test_targets_that_are_not_one_per_sample_stay_whole(three_gpus):
    batches = [[x.double(), y.double(), torch.tensor(0.5)] for x, y in DataLoader(make_data(12), 6)]

    def loss(pred, target, share):
        return share * F.mse_loss(pred, target)

    one, several = (make_learner(DataLoaders(batches, device="cpu", n_inp=1), make_model().double(), loss)
                    for _ in range(2))  # fmt: skip
    several.add_cb(DataParallelCallback())
    for learn in (one, several):
        learn.fit(2)
    torch.testing.assert_close(several.recorder.values, one.recorder.values, rtol=1e-12, atol=1e-12)


def test_a_penalty_on_the_predictions_counts_as_on_one_device(three_gpus):
    def punish(cb):
        cb.learn.loss_grad = cb.loss_grad + cb.pred.square().mean()

    one, several = learner("mse"), learner("mse", True)
    for learn in (one, several):
        learn.fit(2, cbs=Callback(before_backward=punish))
    equal(several, one)


def test_a_callback_may_call_the_model_itself(three_gpus):
    seen = []
    learn = learner("mean", True)
    learn.fit(1, cbs=Callback(before_batch=lambda cb: seen.append(cb.model(*cb.xb).shape)))
    assert seen[:3] == [(10, 3), (10, 3), (1, 3)]
    assert three_gpus == [30, 3, 3, 30, 3, 3, 3, 1, 1]  # the callback's predictions; the losses, and what they count


def test_a_callbacks_call_after_a_forward_pass_that_was_cancelled(three_gpus):
    class Cancels(nn.Linear):
        def forward(self, x):
            if cancels:
                raise CancelBatchException
            return super().forward(x)

    def call(cb):
        cancels.clear()
        seen.append(cb.model(*cb.xb).shape)
        if cb.training and cb.iter == 0:
            cancels.append(True)

    cancels, seen = [], []
    learn = make_learner(loaders(make_data(21)), Cancels(4, 1).double(), cbs=DataParallelCallback())
    learn.fit(1, cbs=Callback(before_batch=call))
    assert seen[:3] == [(10, 1), (10, 1), (1, 1)]


def test_another_model_put_there_by_a_callback_is_the_one_used(three_gpus):
    other = make_model(4, 3, seed=5).double()

    def put(cb):
        cb.learn.model, cb.kept = other, cb.learn.model

    def back(cb):
        cb.learn.model = cb.kept

    one, several = learner("mean"), learner("mean", True)
    one.model = other
    several.fit(1, cbs=Callback(before_validate=put, cleanup_validate=back))
    assert several.recorder.values[0][1] == pytest.approx(one.validate()[0], abs=1e-12)


def test_validating_in_mid_training_changes_no_number(three_gpus):
    def validate(cb):
        if cb.training:
            seen.append(cb.learn.validate())

    one, several, seen = learner("class weights"), learner("class weights", True), []
    for learn in (one, several):
        learn.fit(1, cbs=Callback(after_loss=validate))
    torch.testing.assert_close(seen[3:], seen[:3], rtol=1e-12, atol=1e-12)
    equal(several, one)


def test_saved_weights_have_plain_names(three_gpus, tmp_path):
    learn = learner("a loss with weights", True, path=tmp_path)
    learn.fit(1, cbs=Callback(after_step=lambda cb: cb.learn.save("inside")))
    weights = torch.load(tmp_path / "models" / "inside.pth", weights_only=True)["model"]
    assert weights.keys() == learn.model.state_dict().keys() == make_model().state_dict().keys()


def test_a_last_batch_too_small_for_batch_norm_is_found_on_the_replicas(three_gpus):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    learn = make_learner(loaders(make_data(21)), model, cbs=DataParallelCallback())
    with pytest.raises(ValueError, match="its last batch has 1 of its 21 samples"):
        learn.fit(1)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_the_first_replica_keeps_the_batch_statistics(three_gpus):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    learn = make_learner(loaders(make_data(18), bs=9), model, cbs=DataParallelCallback())
    learn.fit(2)
    assert model[1].num_batches_tracked == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_reaches_the_replicas_with_its_type(three_gpus, dtype):
    seen = set()

    class Look(nn.Module):
        """Notes the type of its input."""

        def forward(self, x):
            seen.add(x.dtype)
            return x.float()

    learn = make_learner(make_dls(), nn.Sequential(nn.Linear(4, 1), Look()), cbs=DataParallelCallback())
    with torch.autocast("cpu", dtype=dtype):
        learn.fit(1)
        learn.validate()
    assert seen == {dtype}


# Errors


def test_an_error_of_the_loss_on_a_replica_says_what_it_got(three_gpus):
    learn = make_learner(make_dls(data=make_classes), make_model(4, 3), nn.BCELoss(), cbs=DataParallelCallback())
    with pytest.raises(Exception) as e:
        learn.fit(1)
    (note,) = [n for n in notes(e.value) if n.startswith("the loss got")]
    assert "shape (2, 3)" in note
    assert "loss_on_replicas=False" in note
    assert not {"_forward", "_loss"} & learn.__dict__.keys()


@pytest.mark.parametrize("loss_func", [lambda p, y: (p - y).square(), lambda p, y: 1.0, lambda p, y: None])
def test_a_loss_that_is_no_scalar_is_refused(three_gpus, loss_func):
    learn = make_learner(make_dls(train=4, bs=2), loss_func=loss_func, cbs=DataParallelCallback())
    with pytest.raises(ValueError, match="the loss is not a scalar"):
        learn.fit(1)


def test_shapes_that_would_broadcast_are_refused(three_gpus):
    data = TensorDataset(torch.randn(6, 4), torch.randn(6))
    learn = make_learner(DataLoaders(DataLoader(data, 6), device="cpu"), cbs=DataParallelCallback())
    with pytest.raises(ValueError, match="compares them element by element"):
        learn.fit(1)


def test_a_model_without_its_loss_is_refused(three_gpus):
    batches = [{"x": torch.randn(6, 4).double()}]
    learn = Learner(DataLoaders(batches, device="cpu"), OwnLoss().double(), cbs=DataParallelCallback())
    with pytest.raises(ValueError, match="there is no loss"):
        learn.fit(1)
    assert learn.get_preds(dl=batches)[0].shape == (6, 3, 5)


def test_which_of_our_callbacks_read_predictions():
    # DataParallelCallback takes it that in training none but the recorder does, and that for train_metrics alone, and
    # what says so by `reads_predictions`; MixedPrecision has nothing to do where there are none, and
    # GradientAccumulation reads them where a count on the host is 0, which on several GPUs is on the device. SplitBatch
    # joins those of the parts, if there are any.
    readers = set()
    for path in (ROOT / "learnerkit" / "callbacks").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if getattr(node, "attr", "") in ("pred", "output") or getattr(node, "id", "") == "output_of":
                readers.add(path.stem)
    known = {"prediction", "recorder", "precision", "accumulation", "batch_parts", "sharded_parts"}
    assert readers == known, "a new reader: have DataParallelCallback._wanted know it"


def test_what_all_samples_share_cannot_be_cut(three_gpus):
    class Shifted(nn.Linear):
        def forward(self, shift, x):
            return super().forward(x + shift)

    dls = DataLoaders([(torch.ones(3), torch.ones(6, 3), torch.ones(6, 1))], batch_size=lambda batch: len(batch[1]))
    learn = Learner(dls, Shifted(3, 1), nn.MSELoss(), cbs=DataParallelCallback())
    with pytest.raises(ValueError, match="cuts every input along its first dimension.*keep what all samples share in"):
        learn.fit(1)


# Several GPUs


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("on_replicas", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_gpus_equal_one(case, on_replicas):
    one, several = learner(case), learner(case, on_replicas)
    for learn in (one, several):
        learn.dls._device = torch.device("cuda:0")
        learn.fit(2)
    close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
    close(several.recorder.values, one.recorder.values)
    close(several.model.state_dict(), one.model.state_dict())
