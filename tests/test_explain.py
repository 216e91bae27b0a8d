"""Errors inside the model, the loss, a loader or a metric are explained: what to do, and what there was."""

import contextlib
import gc
import math
import weakref

import pytest
import torch
from helpers import make_learner, notes, same_weights
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset

from learnerkit import EMA, AccumMetric, Callback, DataLoaders, Learner, distributed
from learnerkit.distributed import PeerError
from learnerkit.explain import mends


class Samples(Dataset):
    """What a function makes of a number."""

    def __init__(self, make, n=8):
        self.make, self.n = make, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i >= self.n:
            raise IndexError
        return self.make(i)


def images(*shape, dtype=torch.float32, labels=None, n=8):
    """Images of some shape with labels from 0 to 2."""
    pixels = torch.arange(n * math.prod(shape)).reshape(n, *shape) % 2
    return TensorDataset(pixels.to(dtype), torch.arange(n) % 3 if labels is None else labels)


def learner(data=None, model=None, loss_func=None, **kwargs):
    data = images(1, 4, 4) if data is None else data
    dls = data if isinstance(data, DataLoaders) else DataLoaders(DataLoader(data, 4), device="cpu")
    return Learner(dls, model or flat(), loss_func or nn.CrossEntropyLoss(), **kwargs)


def flat(n_in=16, n_out=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(n_in, n_out))


def conv(n_in):
    return nn.Sequential(nn.Conv2d(n_in, 2, 3))


class Net(nn.Module):
    """A layer, and a forward that is given."""

    def __init__(self, forward, layer=None):
        super().__init__()
        self.layer, self.call = layer or flat(), forward

    def forward(self, x):
        return self.call(self.layer, x)


class OfTwo(Net):
    def forward(self, image, mask):
        return self.layer(image) * mask


class OfImage(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = flat()

    def forward(self, image):
        return self.layer(image)


class ForwardForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = flat()

    def train(self, x_pos, x_neg):
        return x_pos - x_neg

    def forward(self, x):
        return self.layer(x)


def entry(i):
    return {"image": torch.zeros(1, 4, 4), "name": f"{i}.png", "label": i % 3}


def dicts(make=entry, **kwargs):
    return DataLoaders(DataLoader(Samples(make), 4), device="cpu", **kwargs)


def ids(n):
    return TensorDataset(torch.arange(8)[:, None].expand(8, 5) * n, torch.arange(8) % 3)


def words(rows):
    return nn.Sequential(nn.Embedding(rows, 4), nn.Flatten(), nn.Linear(20, 3))


LABELS = torch.arange(8) % 3
MSE, BCE = nn.MSELoss(), nn.BCEWithLogitsLoss()
ROWS = {
    "labels from 1": (lambda: learner(images(1, 4, 4, labels=LABELS + 1)),
        ["from 1 to 3", "3 outputs, for classes 0 to 2", "subtract 1"]),
    "too few outputs": (lambda: learner(model=flat(16, 2)), ["from 0 to 2", "2 outputs", "give it 3 outputs"]),
    "labels from -1": (lambda: learner(images(1, 4, 4, labels=LABELS - 1)), ["from -1 to 1", "ignore_index=-1"]),
    "a label beyond the ignored one": (
        lambda: learner(images(1, 4, 4, labels=torch.where(LABELS == 1, 255, 7)),
                        loss_func=nn.CrossEntropyLoss(ignore_index=255)), ["from 7 to 7", "give it 8 outputs"]),
    "labels as floats for a margin": (
        lambda: learner(images(1, 4, 4, labels=LABELS.float()), loss_func=nn.MultiMarginLoss()),
        ["float32", "y.long()"]),
    "a column of labels": (lambda: learner(images(1, 4, 4, labels=LABELS[:, None])), ["(4, 1)", "y.squeeze(1)"]),
    "one-hot labels": (lambda: learner(images(1, 4, 4, labels=F.one_hot(LABELS))), ["int64 (4, 3)", "y.argmax(1)"]),
    "classes last": (
        lambda: learner(TensorDataset(torch.randn(8, 5, 4), LABELS[:, None].expand(8, 5)), nn.Linear(4, 3)),
        ["(4, 5, 3), with the classes last", "pred.movedim(-1, 1)"]),
    "labels as floats": (lambda: learner(images(1, 4, 4, labels=LABELS.float())), ["float32", "y.long()"]),
    "labels as int32": (lambda: learner(images(1, 4, 4, labels=LABELS.int())), ["int32", "y.long()"]),
    "whole numbers for BCE": (lambda: learner(images(1, 4, 4, labels=LABELS[:, None] % 2), flat(16, 1), BCE),
        ["int64", "y.float()"]),
    "shapes for BCE": (lambda: learner(images(1, 4, 4, labels=(LABELS % 2).float()), flat(16, 1), BCE),
        ["(4, 1)", "(4,)", "unsqueeze(1)"]),
    "outputs for BCE": (lambda: learner(images(1, 4, 4, labels=(LABELS % 2).float()), flat(16, 3), BCE),
        ["(4, 3)", "(4,)", "equal shapes: change the last layer"]),
    "scores for BCELoss": (lambda: learner(images(1, 4, 4, labels=LABELS[:, None] % 2 * 1.0),
                                           Net(lambda layer, x: layer(x) + 5, flat(16, 1)), nn.BCELoss()),
        ["probabilities", "BCEWithLogitsLoss"]),
    "float64": (lambda: learner(images(1, 4, 4, dtype=torch.float64)),
        ["got float64, and its weights are float32", "x.to(torch.float32)", "in 1 (Linear): in_features=16"]),
    "float64 into a convolution": (lambda: learner(images(1, 4, 4, dtype=torch.float64), conv(1)),
        ["x.to(torch.float32)"]),
    "bytes": (lambda: learner(images(1, 4, 4, dtype=torch.uint8)), ["uint8", "x.float() / 255"]),
    "whole numbers": (lambda: learner(images(1, 4, 4, dtype=torch.int64)), ["int64", "x.float()", "nn.Embedding"]),
    "no Flatten": (lambda: learner(model=nn.Sequential(nn.Linear(16, 3))),
        ["put nn.Flatten() before", "(n, 16)", "in 0 (Linear): in_features=16, out_features=3",
         "it got float32 tensor of shape (4, 1, 4, 4)", "the model got (float32 tensor of shape (4, 1, 4, 4))"]),
    "wrong sizes": (lambda: learner(model=nn.Sequential(flat(16, 10), nn.ReLU(), nn.Linear(12, 3))),
        ["takes 12 features and got 10", "nn.Linear(10, 3)", "in 2 (Linear)"]),
    "channels last": (lambda: learner(images(4, 4, 3), conv(3)),
        ["channels of the inputs (4, 4, 4, 3) are last", "x.permute(2, 0, 1)"]),
    "channels last, lazy": (lambda: learner(images(4, 4, 3), nn.Sequential(nn.Conv2d(3, 2, 3), nn.LazyLinear(3))),
        ["x.permute(2, 0, 1)"]),
    "no channel axis": (lambda: learner(images(4, 4), conv(1)), ["x.unsqueeze(0)"]),
    "one channel of three": (lambda: learner(model=conv(3)), ["takes 3 channels and got 1"]),
    "forward without return": (lambda: learner(model=Net(lambda layer, x: None)), ["returned None", "`return`"]),
    "a block without return": (lambda: learner(model=nn.Sequential(Net(lambda layer, x: None), nn.Linear(3, 3))),
        ["got None", "`return`", "in 1 (Linear)"]),
    "forward of a mapping": (lambda: learner(images(16), Net(lambda layer, x: {"sample": layer(x)}), MSE),
        ["returned no tensor"]),
    "forward of two": (lambda: learner(model=Net(lambda layer, x: (layer(x), x))), ["returned no tensor"]),
    "no_grad": (lambda: learner(model=Net(lambda layer, x: layer(x).detach())), ["does not depend", "detach"]),
    "ragged": (lambda: learner(Samples(lambda i: (torch.zeros(3 + (i == 2)), 0))),
        ["sample 0 is (float32 tensor of shape (3,), int), sample 2 (float32 tensor of shape (4,), int)", "pad"]),
    "ragged lists": (lambda: learner(Samples(lambda i: ([0.0] * (2 + (i == 1)), 0))), ["sample 0", "sample 1", "pad"]),
    "None in a sample": (lambda: learner(Samples(lambda i: (torch.zeros(3), None if i == 1 else 0))),
        ["sample 1 is None or has None in it"]),
    "another object": (lambda: learner(Samples(lambda i: (object(), 0))),
        ["sample 0 has something of the type object in it", "collate_fn"]),
    "lists": (lambda: learner(Samples(lambda i: ([0.0] * 16, 0))), ["lists or text", "torch.tensor(x)"]),
    "text": (lambda: learner(Samples(lambda i: ("a word", 0))), ["lists or text"]),
    "targets as text": (lambda: learner(Samples(lambda i: (torch.zeros(16), "cat"))),
        ["targets are text", "classes.index"]),
    "swapped arguments": (lambda: learner(loss_func=lambda target, pred: F.cross_entropy(pred, target)),
        ["f(pred, target)", "the other way round"]),
    "complex predictions": (lambda: learner(Samples(lambda i: (torch.arange(16.0), torch.zeros(3))),
        Net(lambda layer, x: torch.fft.fft(layer(x))), nn.MSELoss()), ["takes no complex numbers", "pred.abs()"]),
    "a loss of three arguments": (lambda: learner(loss_func=lambda pred: pred.sum()), ["f(pred, *targets)"]),
    "a dict with a name": (lambda: learner(dicts(target_keys="label"), OfImage()),
        ["forward takes image", "ignore_keys=('name',)"]),
    "a dict into Sequential": (lambda: learner(dicts(target_keys="label", ignore_keys="name")),
        ["forward takes input", "by its name, but none is called input: rename image in the dataset, or put the "
         "model into a module whose forward takes image\n"]),
    "a dict with a name into Sequential": (lambda: learner(dicts(target_keys="label")),
        ["none is called input: rename image or name in the dataset"]),
    "a dict of which nothing is left": (lambda: learner(dicts(target_keys="label", ignore_keys=("name", "image"))),
        ["a dict, it gets nothing; target_keys= and ignore_keys= take out image, name, label"]),
    "mistyped target_keys": (lambda: learner(dicts(target_keys="lable", ignore_keys="name"), OfImage()),
        ["the batch has no 'lable', which target_keys= names; did you mean 'label'?"]),
    "mistyped ignore_keys": (lambda: learner(dicts(target_keys="label", ignore_keys="names")),
        ["the batch has no 'names', which ignore_keys= names; did you mean 'name'?"]),
    "a dict without target_keys": (lambda: learner(dicts(ignore_keys="name"), OfImage()),
        ["('label',)", "target_keys"]),
    "a dict that lacks an entry": (lambda: learner(dicts(target_keys="label", ignore_keys="name"), OfTwo(None)),
        ["forward takes image, mask", "it gets image; ", "take out name, label"]),
    "forward with a further argument": (lambda: learner(model=OfTwo(None)), ["forward takes image, mask", "n_inp"]),
    "too many inputs": (lambda: learner(TensorDataset(torch.zeros(8, 16), torch.zeros(8, 2), LABELS)),
        ["gets 2 of", "n_inp"]),
    "ids": (lambda: learner(ids(50), words(2)),
        ["from 0 to 150", "2 rows, for ids from 0 to 1", "in 0 (Embedding): 2, 4"]),
    "ids as floats": (lambda: learner(images(5), words(2)), ["x.long()"]),
    "another device": (lambda: learner(model=Net(lambda layer, x: layer(x) + torch.ones(3, device="meta"))),
        ["on another device than the batch", "device=x.device"]),
    "no samples": (lambda: learner(Samples(lambda i: (torch.zeros(3), 0) if i != 2 else None)),
        ["sample 2 is None or has None in it", "`return`"]),
    "targets that are a tensor": (lambda: learner(cbs=Callback(before_batch=lambda cb: replace(cb, "yb", cb.y))),
        ["learn.yb is a tuple, and a callback set int64 tensor of shape (4,): write learn.yb = (value,)"]),
    "inputs that are a tensor": (lambda: learner(cbs=Callback(before_batch=lambda cb: replace(cb, "xb", cb.x))),
        ["learn.xb is a tuple, and a callback set float32 tensor of shape (4, 1, 4, 4)"]),
    "a loader in place of loaders": (lambda: learner(cbs=Callback(before_epoch=lambda cb: replace(cb, "dls", [1]))),
        ["a callback has set learn.dls to a list: write learn.dls = DataLoaders(train, valid)"]),
    "its own train": (lambda: learner(model=ForwardForward()), ["model.train(True)", "another name"]),
}  # fmt: skip


def replace(cb, name, value):
    setattr(cb.learn, name, value)


def failed(learn, call="fit", *args):
    with pytest.raises(Exception) as e:
        getattr(learn, call)(*(args or (1,)))
    return e.value


@pytest.mark.parametrize("name", ROWS)
def test_a_mistake_is_explained(name):
    make, parts = ROWS[name]
    error = failed(make())
    (note,) = (n for n in notes(error.__cause__ if "lazy" in name else error) if not n.startswith("raised in"))
    assert [part for part in parts if part not in note] == []


class Missing(Dataset):
    """As a picture that cannot be read."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.ones(None.shape), i


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten())

    def forward(self, x):
        return self.body(x, x)


class Penalized(Net):
    def forward(self, x):
        y = self.layer(x)
        return y + torch.autograd.grad(y.sum(), x)[0].sum()


WRONG_ADVICE = {
    "a sample": (lambda: learner(Missing()), "has None in it"),
    "a part called with two": (lambda: learner(model=nn.Sequential(Twice(), nn.Linear(16, 3))), "forward takes"),
    "the user's own gradient": (lambda: learner(model=Penalized(None)), "the loss does not depend"),
    "weights of classes": (
        lambda: learner(loss_func=nn.CrossEntropyLoss(weight=torch.ones(3).double())), "the targets are"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_ADVICE)
def test_an_error_of_another_kind_gets_no_advice_for_this_one(name):
    make, advice = WRONG_ADVICE[name]
    assert not any(advice in note for note in notes(failed(make())))


def test_a_validation_whose_loss_needs_gradients_is_explained():
    def penalized(pred, target):
        loss = F.cross_entropy(pred, target)
        return loss + torch.autograd.grad(loss, pred, create_graph=True)[0].square().sum()

    learn = learner(loss_func=penalized)
    learn.fit(1)
    said = "\n".join(notes(failed(learn, "validate", 0)))
    assert "an evaluation computes no gradients" in said
    assert "torch.enable_grad()" in said
    assert "def loss(pred, target, *, training)" in said
    assert "does not depend" not in said


class SecondOrder(SGD):
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        torch.autograd.grad([p.grad.sum() for p in params], params)


def test_an_optimizer_that_differentiates_gradients_is_explained():
    said = "\n".join(notes(failed(learner(opt_func=SecondOrder))))
    assert "let `_backward` call self.loss_grad.backward(create_graph=True)" in said
    assert "does not depend" not in said


def test_a_lazy_layer_is_given_the_advice_itself():
    error = failed(ROWS["channels last, lazy"][0]())
    assert str(error).endswith("x.permute(2, 0, 1) in the dataset")
    learn = learner(model=nn.Sequential(nn.LazyLinear(3), Net(lambda layer, x: x.missing)))
    assert str(failed(learn)).endswith("run the model on a batch before the fit: learn.model(x)")


class Picture:
    __module__, __name__ = "PIL.Image", "Image"


@pytest.mark.parametrize(
    ("item", "got"),
    [
        (torch.zeros(2, 1, 4, 4), "float32 tensor of shape (2, 1, 4, 4)"),
        ("cat.jpg", "str"),
        (Picture(), "Picture"),
        ((torch.zeros(1, 4, 4), 1), "(float32 tensor of shape (1, 4, 4), int)"),
    ],
)
def test_predict_says_what_it_takes(item, got):
    error = failed(learner(), "predict", item)
    (note,) = notes(error)
    assert note.startswith(
        f"predict takes one input as the dataset yields it, here float32 tensor of shape (1, 4, 4), and got {got}; for "
        "several: get_preds(dl=learn.dls.test_dl(items))"
    )


def test_targets_in_test_dl_are_told():
    learn = Learner(DataLoaders.from_datasets(images(2), bs=4, device="cpu"), nn.Linear(2, 3), nn.CrossEntropyLoss())
    with pytest.raises(TypeError) as caught:
        learn.get_preds(dl=learn.dls.test_dl(images(2)))
    assert "gets 2 of the batch's entries: all, as test_dl and predict take inputs without targets" in str(
        notes(caught.value)
    )


def test_predict_with_such_an_input_says_what_is_wrong_with_the_model():
    (note,) = notes(failed(learner(model=flat(17)), "predict", torch.zeros(1, 4, 4)))
    assert note.startswith("the layer takes 17 features and got 16")


def test_a_loss_inside_the_model_is_explained():
    class OwnLoss(Net):
        def forward(self, x, labels):
            return {"loss": F.cross_entropy(self.layer(x), labels)}

    data = DataLoaders(DataLoader(images(1, 4, 4, labels=LABELS + 1), 4), device="cpu")
    learn = Learner(data, OwnLoss(None))
    learn.dls.n_inp = 2
    (note,) = notes(failed(learn))
    assert note.startswith("the targets go from 1 to 3")


def test_a_metric_of_scikit_learn_is_explained():
    metrics = pytest.importorskip("sklearn.metrics")
    data = DataLoader(images(1, 4, 4), 4)
    learn = learner(DataLoaders(data, data, device="cpu"), metrics=metrics.f1_score)
    note, _ = notes(failed(learn))  # the other says which callback
    assert note.startswith("metrics of scikit-learn take targets first")
    assert "AccumMetric(lambda p, y: f1_score(y, p.argmax(1), average='macro'), name='f1')" in note
    f1 = AccumMetric(lambda p, y: metrics.f1_score(y, p.argmax(1), average="macro"), name="f1")
    learner(DataLoaders(data, data, device="cpu"), metrics=f1).validate()  # so it is done
    assert "metric 'f1_score' got predictions: float32 tensor of shape (4, 3)" in note


def test_a_loaders_worker_has_no_samples_to_show():
    text = "Caught RuntimeError in DataLoader worker process 0.\nstack expects each tensor to be equal size"
    assert mends.of_samples({}, text).startswith("samples differ; a batch takes one shape")
    text = "default_collate: batch must contain tensors, dicts or lists; found <class 'PIL.Image.Image'>"
    assert "a sample is a PIL image" in mends.of_samples({}, text)


@pytest.mark.filterwarnings("ignore:Got pickle error")  # torch names the default of Python 3.14
def test_what_workers_need_that_are_not_forked_is_said_where_one_cannot_start():
    dl = DataLoader(images(1, 4, 4), num_workers=1, collate_fn=lambda batch: batch, multiprocessing_context="spawn")
    said = "the workers of this loader start by 'spawn', so each of them imports the script"
    assert said in "\n".join(notes(failed(learner(DataLoaders(dl, device="cpu")))))  # pickle has notes, too


def test_an_index_that_is_out_of_range_on_a_gpu_is_looked_for_on_the_cpu():
    assert "DataLoaders(..., device='cpu')" in mends.of_device("CUDA error: device-side assert triggered")


def test_no_values_of_a_device_are_read():
    class OnDevice(torch.Tensor):
        is_cpu = False

    assert mends._range(torch.ones(3).as_subclass(OnDevice)) is None


class Around(SGD):
    """Goes around another optimizer without a call of Optimizer.__init__, as optimizers of some packages do."""

    def __init__(self, params, lr):
        self.inner = SGD(params, lr)
        self.defaults, self.param_groups, self.state = self.inner.defaults, self.inner.param_groups, self.inner.state

    def step(self, closure=None):
        return self.inner.step()


def hooked(params, lr):
    opt = Around(params, lr)
    Optimizer.__setstate__(opt, {})
    return opt


def test_an_optimizer_without_the_hooks_of_torchs_gets_them_by_the_advice():
    with pytest.raises(AttributeError, match="hooks") as e:
        make_learner(opt_func=Around).fit(1, cbs=EMA())
    assert any("call torch.optim.Optimizer.__setstate__(opt, {})" in note for note in notes(e.value))
    learn, plain = (make_learner(opt_func=opt_func, lr=0.1) for opt_func in (hooked, SGD))
    learn.fit(1, cbs=EMA())
    plain.fit(1, cbs=EMA())
    assert same_weights(learn.model, plain.model)


def test_an_error_that_the_user_raises_speaks_for_itself():
    def refuse(layer, x):
        raise ValueError("the sizes must be even")

    assert notes(failed(learner(model=Net(refuse)))) == []


def test_an_error_is_explained_once_also_in_a_run_within_a_run():
    learn = learner(model=Net(lambda layer, x: layer(x) if learn.task == "fit" else layer(x[:, :, 1:])))
    error = failed(learn, "fit", 1, None, None, Callback(before_step=lambda cb: learn.validate(0)))
    assert [note.partition(":")[0] for note in notes(error)] == [
        "the layer takes 16 features and got 12", "raised in Callback.before_step",
    ]  # fmt: skip


def test_what_cannot_be_described_does_not_hide_the_error():
    class Mute(nn.Linear):
        def extra_repr(self):
            raise KeyError("no text")

    error = failed(learner(model=nn.Sequential(nn.Flatten(), Mute(17, 3))))
    assert isinstance(error, RuntimeError)
    assert notes(error) == []


def test_long_values_are_cut_and_cannot_change_the_terminal():
    def make(i):
        return {"image": torch.zeros(1, 4, 4), "label": 0} | {f"{n}\x1b[2J" + "x" * 90: 0 for n in range(30)}

    (note,) = notes(failed(learner(dicts(make), OfImage())))
    assert max(map(len, note.splitlines())) < 700
    assert "\x1b" not in note


def test_no_frame_outlives_the_error():
    def remember(layer, x):
        local = Picture()
        seen.append(weakref.ref(local))
        return layer(x[:, :, 1:])

    seen, learn = [], learner(model=Net(remember))
    gc.disable()
    try:
        with contextlib.suppress(RuntimeError):
            learn.fit(1)
        assert [ref() for ref in seen] == [None]
    finally:
        gc.enable()


def test_a_model_without_a_registered_layer_says_so():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [flat()]

        def forward(self, x):
            return self.layers[0](x)

    with pytest.raises(ValueError, match=r"Listed has no trainable parameters.*no layer is registered.*nn\.ModuleList"):
        learner(model=Listed()).fit(1)


@pytest.mark.parametrize(
    ("frozen", "told"), [(True, "all parameters of the model are frozen"), (False, "gradients are switched off")]
)
def test_a_later_fit_without_gradients_says_what_takes_them(frozen, told):
    learn = make_learner()
    learn.fit(1)
    learn.model.requires_grad_(not frozen)
    with torch.set_grad_enabled(frozen), pytest.raises(RuntimeError) as e:
        learn.fit(1)
    assert [note for note in notes(e.value) if told in note] == notes(e.value)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:the datasets are not the same on all ranks")
def test_a_mistake_is_explained_on_the_rank_that_fails():
    labels = torch.arange(16) % 3
    labels[8:] += distributed.rank() * 9  # rank 1 fails alone
    learn = learner(DataLoaders.from_datasets(images(1, 4, 4, labels=labels, n=16), bs=4, shuffle=False, device="cpu"))
    with learn.no_logging(), learn.distrib_ctx(), pytest.raises((IndexError, PeerError)) as e:
        learn.fit(1)
    rank1 = distributed.rank() == 1
    assert isinstance(e.value, IndexError if rank1 else PeerError)
    assert [note for note in notes(e.value) if "outputs, for classes 0 to 2" in note] == notes(e.value)[:rank1]
