"""Exported models: whoever loads one predicts as the learner did that exported it."""

import json
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
from checkpoint_files import largest_file
from helpers import (
    assert_same_state,
    make_classes,
    make_data,
    make_dls,
    make_learner,
    make_model,
    mostly_soak,
    raises,
    same_weights,
    state_of,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from learnerkit import (
    Callback,
    CheckpointError,
    Compile,
    DataLoaders,
    MixedPrecision,
    SplitBatch,
    distributed,
    load_learner,
)


class Pair(nn.Module):
    """A small network of two inputs, with what differs between training and prediction."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))

    def forward(self, a, b):
        return self.body(torch.cat([a, 2 * b], 1))


class Named(Pair):
    """The same, with what a model of transformers takes and returns."""

    def forward(self, a, b=None, labels=None):
        logits = super().forward(a, a if b is None else b)
        return {"logits": logits, "loss": None if labels is None else F.cross_entropy(logits, labels)}


def make_cnn():
    """A convolutional network with BatchNorm and dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(16, 3),
    )  # fmt: skip


class Data(Dataset):
    """Samples of one of the kinds."""

    def __init__(self, kind, n=8):
        generator = torch.Generator().manual_seed(5)
        shape = (n, 1, 8, 8) if kind == "cnn" else (n, 4)
        self.kind, (self.a, self.b) = kind, torch.randn(2, *shape, generator=generator)
        self.y = torch.randint(3, (n,), generator=generator)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        a, b, y = self.a[i], self.b[i], self.y[i]
        return {"cnn": (a, y), "pair": (a, b, y), "mapping": {"a": a, "b": b, "labels": y}}[self.kind]

    def inputs(self):
        """Those of all samples, without targets."""
        return [{"a": self.a[i], "b": self.b[i]} if self.kind == "mapping" else self[i][0] if self.kind == "cnn"
                else self[i][:2] for i in range(len(self))]  # fmt: skip


MODELS = {"cnn": make_cnn, "pair": Pair, "mapping": Named}


def trained(kind):
    data = Data(kind)
    dls = DataLoaders.from_datasets(data, data, bs=3, device="cpu")
    dls.classes, dls.preprocessing = ["ant", "bee", "cow"], {"mean": [0.5], "names": {"a": 1}}
    learn = make_learner(dls, MODELS[kind](), nn.CrossEntropyLoss())
    if kind == "mapping":
        learn.loss_func = None  # the model's own
    learn.fit(1)
    return learn, data.inputs()


def assert_predicts_as(other, learn, items):
    dl = other.dls.test_dl(items, bs=4)
    preds, targets = other.get_preds(dl=dl)
    torch.testing.assert_close(preds, learn.get_preds()[0], atol=1e-6, rtol=0)
    assert targets is None
    for item in items[:2]:
        (label, decoded, pred), expected = other.predict(item), learn.predict(item)
        assert (label, decoded) == (expected.label, expected.decoded)
        torch.testing.assert_close(pred, expected.pred, atol=1e-6, rtol=0)
    assert (other.dls.classes, other.dls.preprocessing) == (learn.dls.classes, learn.dls.preprocessing)


@pytest.mark.parametrize("kind", MODELS)
def test_weights_and_the_users_constructor_make_the_learner_again(kind):
    learn, items = trained(kind)
    learn.model.train()
    before = state_of(learn)
    assert learn.export(kind) == Path(f"models/{kind}.safetensors")
    assert_same_state(learn, before)
    for model in (MODELS[kind], MODELS[kind]()):
        other = load_learner(kind, model, device="cpu")
        assert not any(module.training for module in other.model.modules())
        assert_predicts_as(other, learn, items)
    other = load_learner(kind, MODELS[kind], dls=learn.dls, loss_func=learn.loss_func)
    assert other.validate() == learn.validate()
    other.fit(1)  # it is a learner like any other


@pytest.mark.parametrize("kind", ["cnn", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("pair", "mapping"))])
def test_a_program_needs_no_code(kind):
    learn, items = trained(kind)
    learn.model.train()
    before = state_of(learn)
    path = learn.export(f"{kind}.pt2")
    assert_same_state(learn, before)
    other = load_learner(path, device="cpu")
    assert_predicts_as(other, learn, items)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert_predicts_as(load_learner(path, dls=learn.dls), learn, items)
    with pytest.raises(ValueError, match="predicts as it was exported, and cannot be trained"):
        load_learner(path, dls=learn.dls, loss_func=nn.CrossEntropyLoss()).fit(1)
    if kind == "cnn":
        x = torch.stack(items[:1])
        torch.testing.assert_close(torch.export.load(path).module()(x), other.model(x))  # without this package
        larger = torch.randn(5, 1, 12, 9)
        with torch.no_grad():
            torch.testing.assert_close(other.model(larger), learn.model.eval()(larger))


SCRIPT = """
import sys, torch
from pathlib import Path
from learnerkit import load_learner
learn = load_learner(Path(sys.argv[1]), device="cpu")
items = torch.load("items.pth", weights_only=True)
torch.save([learn.predict(item).pred for item in items], "preds.pth")
print(learn.predict(items[0]).label)
"""


@pytest.mark.slow
def test_a_fresh_process_loads_a_program_without_the_models_class(script_env):
    learn, items = trained("pair")
    path = learn.export("pair.pt2")
    torch.save(items, "items.pth")
    done = subprocess.run([sys.executable, "-c", SCRIPT, path], capture_output=True, text=True, env=script_env)
    assert (done.returncode, done.stderr) == (0, "")
    preds = torch.stack(torch.load("preds.pth", weights_only=True))
    torch.testing.assert_close(preds, learn.get_preds()[0], atol=1e-6, rtol=0)
    assert done.stdout.strip() == learn.predict(items[0]).label


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_soak(MODELS, "mapping"))
def test_onnx_runs_on_batches_of_any_size(kind):
    onnxruntime = pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    learn, items = trained(kind)
    path = learn.export(f"{kind}.onnx")
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = {"cnn": ["input"], "pair": ["a", "b"], "mapping": ["a", "b"]}[kind]  # of `forward`
    axes = {name: [1, "input_2", "input_3"] if kind == "cnn" else [f"{name}_1"] for name in names}
    assert {each.name: each.shape[1:] for each in session.get_inputs()} == axes
    assert {each.shape[0] for each in session.get_inputs()} == {"batch"}
    assert [each.shape for each in session.get_outputs()] == [["batch", 3]]
    for n in (1, 8):
        columns = torch.utils.data.default_collate(items[:n])
        columns = list(columns.values()) if kind == "mapping" else columns if kind == "pair" else [columns]
        (found,) = session.run(["pred"], {name: x.numpy() for name, x in zip(names, columns, strict=True)})
        torch.testing.assert_close(torch.from_numpy(found), learn.get_preds()[0][:n], atol=1e-5, rtol=0)
    (note,) = (each.value for each in onnx.load(str(path)).metadata_props if each.key == "learnerkit.export")
    assert json.loads(note)["classes"] == learn.dls.classes
    with pytest.raises(ValueError, match=r"is for onnxruntime and the like; load_learner reads"):
        load_learner(path)


@pytest.mark.slow
@pytest.mark.soak
def test_outputs_of_onnx_have_the_names_of_the_models_entries():
    onnxruntime = pytest.importorskip("onnxruntime")

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 1)

        def forward(self, x):
            return {"classes": self.one(x), "number": self.two(x)}

    learn = make_learner(model=Heads(), loss_func=lambda pred, y: (pred["number"] - y).square().mean())
    session = onnxruntime.InferenceSession(str(learn.export("heads.onnx")), providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_outputs()] == ["classes", "number"]


def test_onnx_without_its_packages_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setattr("learnerkit.export.writing.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs onnx and onnxscript: pip install 'learnerkit\[onnx\]'"):
        make_learner().export("a.onnx")


def test_names_say_what_is_written(tmp_path):
    learn = make_learner(path=tmp_path)
    assert learn.export("v1.2") == tmp_path / "models" / "v1.2.safetensors"
    assert learn.export(Path("a.safetensors")) == Path("a.safetensors")
    assert load_learner("v1.2", make_model, path=tmp_path).path == tmp_path
    for name in ("export.pkl", "a.pth"):
        with pytest.raises(ValueError, match="are pickles, which can run any code .* end the name in"):
            learn.export(name)
        with pytest.raises(ValueError, match="are pickles"):
            load_learner(name)
    with pytest.raises(ValueError, match="whose end says no format"):
        learn.export(Path("a"))
    assert load_learner(str(learn.export(f"{tmp_path}/there/a.safetensors")), make_model).path == Path(".")
    assert load_learner(learn.export("memory://there/a.safetensors"), make_model).path == Path(".")
    with pytest.raises(ValueError, match="got 'net.onxx', whose end is none of .*; did you mean '.onnx'"):
        learn.export("net.onxx")
    with pytest.raises(ValueError, match="has no '..'"):
        learn.export("../a.pt2")
    with pytest.raises(ValueError, match="a plain name inside"):
        learn.export("..")
    with pytest.raises(TypeError, match="it is a name, a path or a URL"):
        learn.export(None)


class Odd(nn.Module):
    """Cannot be traced; or only wrongly."""

    def __init__(self, what):
        super().__init__()
        self.body, self.what, self.calls = nn.Linear(4, 1), what, 0

    def forward(self, x):
        self.calls += 1
        if self.what == "values":
            return self.body(x) if float(x.sum()) > 0 else -self.body(x)
        if self.what == "calls":
            return self.body(x) + self.calls
        if self.what == "complex":
            return torch.complex(self.body(x), self.body(x) + self.calls)
        if self.what == "masked":
            return torch.cat([self.body(x) + self.calls, torch.full_like(x, -1e9)], 1)
        if self.what == "length":
            return self.body(x).view(len(x), 1)
        return self.body(x).reshape(4, 1)


@pytest.mark.parametrize(
    ("what", "message"),
    [("values", "torch.export cannot take Odd: its code asks for values of tensors"),
     ("size", "torch.export cannot take Odd: "),
     ("length", r"torch.export cannot take Odd: its code makes a constant of .* as len\(x\).*; x.shape\[0\] does not"),
     ("masked", r"the exported program does not predict as the model does \(other values\)"),
     ("complex", r"the exported program does not predict as the model does \(other values\)"),
     pytest.param("calls", r"the exported program does not predict as the model does \(other values\)")],
)  # fmt: skip
def test_what_torch_cannot_export_is_said_first_and_an_old_file_stays(what, message, capsys):
    learn = make_learner(model=Odd(what))
    Path("models").mkdir()
    Path("models/odd.pt2").write_text("old")
    before = state_of(learn)
    with pytest.raises(CheckpointError, match=rf"^{message}.*learn\.export\('odd\.safetensors'\)"):
        learn.export("odd.pt2")
    assert capsys.readouterr() == ("", "")  # torch would print the whole graph
    assert_same_state(learn, before)
    assert Path("models/odd.pt2").read_text() == "old"
    assert len(list(Path("models").iterdir())) == 1
    learn.export("odd.safetensors")


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [("a-b", torch.ones(2), "its input 'a-b' has a name that is none of an argument in Python"),
     ("class", torch.ones(2), "its input 'class' has a name that is none of an argument in Python"),
     ("note", "x", "its input 'note' is a list of texts, one for each sample")],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 3])
def test_inputs_that_a_program_cannot_have_are_named(name, value, why, size):
    class Takes(nn.Linear):
        def forward(self, x, **others):
            return super().forward(x)

    data = [{"x": torch.ones(4), name: value, "labels": 0} for _ in range(4)]
    learn = make_learner(DataLoaders(DataLoader(data, size), device="cpu"), Takes(4, 2), nn.CrossEntropyLoss())
    with raises(CheckpointError, f"torch.export cannot take Takes: {why}", "learn.export('a.safetensors')"):
        learn.export("a.pt2")


def test_a_model_whose_batch_is_one_graph_has_no_program():
    class Graph(nn.Linear):
        def forward(self, x, adjacency):
            return adjacency @ super().forward(x)

    graph = [(torch.ones(6, 4), torch.eye(6), torch.arange(6) % 2)]
    learn = make_learner(DataLoaders(graph, device="cpu"), Graph(4, 2), nn.CrossEntropyLoss())
    why = "torch.export cannot take Graph: it fails on the first sample of a batch by itself"
    with raises(CheckpointError, why, "learn.export('a.safetensors')"):
        learn.export("a.pt2")


class Pairs(nn.Module):
    """Takes steps in pairs: of an odd number it leaves out the last."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return Scores(self.head((x[:, :-1] if x.shape[1] % 2 else x).mean(1)), x.sum(1))


Scores = namedtuple("Scores", ["classes", "sums"])


def test_a_program_refuses_sizes_for_which_the_model_takes_another_branch():
    data = TensorDataset(torch.randn(4, 6, 4), torch.arange(4) % 2)
    dls = DataLoaders.from_datasets(data, data, bs=4, device="cpu")
    learn = make_learner(dls, Pairs(), lambda pred, y: F.cross_entropy(pred.classes, y))
    other = load_learner(learn.export("pairs.pt2"), device="cpu")
    for n in (2, 6, 8):
        x = torch.randn(n, 4)
        torch.testing.assert_close(other.predict(x).pred, tuple(learn.predict(x).pred))
    with pytest.raises(RuntimeError, match="the program may not hold for these inputs: the model, or an op"):
        other.predict(torch.randn(7, 4))


def test_a_loaded_model_does_not_decode_where_the_classes_may_be_in_any_dimension():
    class Tokens(nn.CrossEntropyLoss):
        def forward(self, pred, y):
            return super().forward(pred if pred.ndim == 2 else pred.transpose(1, 2), y)

    for shape in ((), (5,)):
        data = TensorDataset(torch.randn(4, *shape, 4), torch.zeros(4, *shape, dtype=torch.long))
        dls = DataLoaders.from_datasets(data, data, bs=4, device="cpu")
        learn = make_learner(dls, nn.Linear(4, 3), Tokens())
        other = load_learner(learn.export("tokens.pt2"), device="cpu")
        if shape:
            for each in (learn, other):
                with pytest.raises(ValueError, match="which dimension has the classes is not known"):
                    each.predict(data[0][0])
        else:
            assert other.predict(data[0][0]).decoded == learn.predict(data[0][0]).decoded


def test_a_program_that_torch_cannot_write_is_an_error_in_words():
    class Either(nn.Conv1d):
        def forward(self, x):
            parts = [
                lambda t: super(Either, self).forward(t).relu().mean(2),
                lambda t: super(Either, self).forward(t).mean(2),
            ]
            return torch.cond(x.sum() > 0, *parts, (x.transpose(1, 2),))

    data = TensorDataset(torch.randn(4, 9, 4), torch.arange(4) % 2)
    dls = DataLoaders.from_datasets(data, data, bs=4, device="cpu")
    with pytest.raises(CheckpointError, match="torch.export cannot write Either: SerializeError"):
        make_learner(dls, Either(4, 2, 3, stride=2), nn.CrossEntropyLoss()).export("either.pt2")


@pytest.mark.slow
def test_what_onnx_cannot_take_is_said_with_its_reason():
    pytest.importorskip("onnxruntime")
    data = TensorDataset(torch.randn(4, 4).bfloat16(), torch.arange(4) % 2)
    dls = DataLoaders.from_datasets(data, data, bs=4, device="cpu")
    with pytest.raises(CheckpointError, match=r"onnxruntime fails on a batch of 4 where the model does not \(NotImpl"):
        make_learner(dls, nn.Linear(4, 2).bfloat16(), nn.CrossEntropyLoss()).export("halves.onnx")

    class Values(nn.Linear):
        def forward(self, x):
            return torch.linalg.svdvals(x.unsqueeze(1)) + super().forward(x)

    with pytest.raises(CheckpointError, match=r"cannot take Values: DispatchError: .*svd.*export\('v\.safetensors'\)"):
        make_learner(model=Values(4, 1)).export("v.onnx")


def test_a_program_needs_a_batch_to_be_traced_from():
    learn = make_learner(DataLoaders(iter([make_data().tensors]), device="cpu"))
    with pytest.raises(ValueError, match="has a loader that can be read only once"):
        learn.export("a.pt2")
    learn.export("a")
    with pytest.raises(ValueError, match="has no data: give it a DataLoader, or export the weights"):
        load_learner("a", make_model).export("b.pt2")
    assert same_weights(load_learner(load_learner("a", make_model).export("b"), make_model).model, learn.model)


def test_callbacks_that_change_predictions_are_warned_of():
    class Double(Callback):
        def before_batch(self):
            self.learn.xb = (2 * self.xb[0],)

    learn = make_learner(cbs=Double())
    x = make_data().tensors[0][0]
    with pytest.warns(UserWarning, match="Double may change batches or predictions, and only the model is exported"):
        path = learn.export("a")
    other = load_learner(path, make_model, device=learn.dls.device)
    assert not torch.equal(other.predict(x).pred, learn.predict(x).pred)
    assert torch.equal(other.add_cb(Double()).predict(x).pred, learn.predict(x).pred)
    for cb in (MixedPrecision("bf16"), SplitBatch(2), Compile(backend="eager")):  # which do not
        make_learner(cbs=cb).export("b")
    learn.double.run = False
    learn.export("c")  # of one that is switched off there is no warning


def test_what_cannot_be_stored_is_an_error():
    learn = make_learner()
    learn.dls.preprocessing = {"vocabulary": {1, 2}}
    with pytest.raises(TypeError, match=r"dls\.preprocessing is stored as JSON"):
        learn.export("a")
    assert not Path("models").exists()


def test_classes_that_are_no_text_are_stored_as_text_or_number():
    learn = make_learner(make_dls(data=make_classes), make_model(n_out=3), nn.CrossEntropyLoss())
    learn.dls.classes = [1, None, Path("c")]
    assert load_learner(learn.export("a"), lambda: make_model(n_out=3)).dls.classes == [1, None, "c"]
    learn.dls.classes = [*np.array([3, 4]), torch.tensor(5)]
    assert load_learner(learn.export("b"), lambda: make_model(n_out=3)).dls.classes == [3, 4, 5]
    with safetensors.safe_open("models/a.safetensors", "pt") as file:
        assert json.loads(file.metadata()["learnerkit.export"])["model"] == "Sequential"


class Exports(Callback):
    """Exports after each epoch, on rank 0 alone."""

    rank0_only = True

    def __init__(self, fname):
        super().__init__()
        self.fname = fname

    def after_step(self):
        self.learn.export(self.fname)


@pytest.mark.ranks(2)
def test_rank_0_writes_one_file_and_waits_for_nobody():
    export_on_ranks("alone.safetensors")


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_rank_0_writes_a_program_in_the_middle_of_a_fit():
    export_on_ranks("alone.pt2")


def export_on_ranks(fname):
    """Export on rank 0 in a fit, and on all ranks after it, and compare with a fit without."""
    models = []
    for cbs in ([], [Exports(fname)]):
        torch.manual_seed(0)
        learn = make_learner(DataLoaders(DataLoader(make_data(), 2), device="cpu"), make_model(dropout=0.5))
        with learn.distrib_ctx():
            learn.fit(2, cbs=cbs)
            path = learn.export("both")
            other = load_learner(path, lambda: make_model(dropout=0.5), device="cpu")
            assert same_weights(other.model, learn.model)
            learn.path = Path(f"of rank {distributed.rank()}")
            assert learn.export("own").exists() == distributed.is_main()
        models.append(learn.model)
    assert same_weights(*models)
    assert sorted(each.name for each in path.parent.iterdir()) == [fname, "both.safetensors"]


def test_a_full_disk_is_an_error_with_the_path(tmp_path):
    learn = make_learner(model=nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 300), nn.Linear(300, 1)))
    with largest_file(100_000), pytest.raises(CheckpointError, match="one.pt2 cannot be written"):
        learn.export(tmp_path / "one.pt2")
    assert list(tmp_path.iterdir()) == []
