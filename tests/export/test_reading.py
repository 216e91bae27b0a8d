"""load_learner: files that do not fit, are damaged, or want to run code."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers import make_classes, make_dls, make_learner, make_model
from torch import nn

from learnerkit import CheckpointError, load_learner

KEY = "learnerkit.export"


def exported():
    """The path of an export, its weights and its record."""
    path = make_learner().export("a")
    with safetensors.safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()[KEY])
    return path, safetensors.torch.load_file(path), facts


def test_weights_need_a_model_of_the_users():
    path, *_ = exported()
    with pytest.raises(ValueError, match=r"has the weights of a 'Sequential', and no code: .*model="):
        load_learner(path)
    with pytest.raises(TypeError, match="and no name"):
        load_learner(path, "torch.nn.Sequential")
    with pytest.raises(TypeError, match="must return an nn.Module"):
        load_learner(path, dict)
    with pytest.raises(ValueError, match="the device is that of dls"):
        load_learner(path, make_model, dls=make_learner().dls, device="cpu")
    with pytest.raises(FileNotFoundError, match=r"there is no file models/b\.pt2; exported there: a\.safetensors"):
        load_learner("b.pt2")


def test_a_function_of_the_loaders_makes_the_model_for_their_classes():
    learn = make_learner(make_dls(data=make_classes), make_model(n_out=3), nn.CrossEntropyLoss())
    learn.dls.classes = ["ant", "bee", "cow"]
    path, x = learn.export("classes"), make_classes().tensors[0][0]

    def make(dls, returns):
        model = make_model(n_out=len(dls.classes))
        return model if returns == "model" else make_learner(dls, model, nn.CrossEntropyLoss())

    for returns in ("model", "learner"):
        other = load_learner(path, partial(make, returns=returns), device="cpu")
        assert other.predict(x).label == learn.predict(x).label
        assert torch.equal(other.predict(x).pred, learn.predict(x).pred)
    with pytest.raises(ValueError, match=r"such as `lambda dls: vision_learner\(dls, 'resnet18'\)`"):
        load_learner(path)


def test_weights_of_another_model_change_nothing():
    path, *_ = exported()
    model = make_model(n_out=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="does not fit Sequential: these differ in shape"):
        load_learner(path, model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_learner_without_data_or_loss_says_so():
    path, *_ = exported()
    learn = load_learner(path, make_model)
    assert "0 batches" in repr(learn)
    for call in (lambda: learn.fit(1), learn.validate, learn.get_preds):
        with pytest.raises(ValueError, match=r"is empty: the learner was loaded without data; .*dls="):
            call()
    dl = make_learner().dls.valid
    for call in (learn.validate, partial(learn.get_preds, with_loss=True)):
        with pytest.raises(ValueError, match="loaded without a loss"):
            call(dl=dl)


def test_raw_inputs_need_the_data_that_prepares_them():
    from PIL import Image

    learn = make_learner()
    learn.dls.preprocessing = {"size": 4}
    other = load_learner(learn.export("prepared"), make_model)
    for raw in ("a text", Path("cat.png"), Image.new("L", (2, 2)), {"age": 31, "sex": None}):
        for call in (lambda raw=raw: other.predict(raw), lambda raw=raw: other.dls.test_dl([raw])):
            with pytest.raises(ValueError, match=r"loaded without data=, .*ImageData, TextData or TabularData"):
                call()
    item = torch.ones(4)
    assert torch.equal(other.predict(item).pred, learn.predict(item).pred)


HEADERS = {
    "no record": (lambda facts: None, r"no record of learn\.export"),
    "no JSON": (lambda facts: "{", "is damaged"),
    "no mapping": (lambda facts: "[1]", "is damaged"),
    "a lack": (lambda facts: json.dumps({"version": 1}), "is damaged"),
    "a later version": (lambda facts: json.dumps(facts | {"version": 2}), "by a later learnerkit"),
    "another kind": (lambda facts: json.dumps(facts | {"classes": "abc"}), "is damaged"),
    "a way to decode": (lambda facts: json.dumps(facts | {"decoding": "os.system"}), "is damaged"),
    "no name": (lambda facts: json.dumps(facts | {"target_keys": [1]}), "is damaged"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_bad_record_is_an_error(name):
    path, tensors, facts = exported()
    make, message = HEADERS[name]
    text = make(facts)
    safetensors.torch.save_file(tensors, path, None if text is None else {KEY: text})
    with pytest.raises(CheckpointError, match=message):
        load_learner(path, make_model)
    for content in (b"", b"x" * 100, path.read_bytes()[:-9]):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="damaged"):
            load_learner(path, make_model)


def test_the_entries_that_are_left_out_are_in_the_record():
    learn = make_learner()
    learn.dls.ignore_keys = ("name",)
    assert load_learner(learn.export("named"), make_model).dls.ignore_keys == ("name",)
    path, tensors, facts = exported()
    del facts["ignore_keys"]  # as in files of before
    safetensors.torch.save_file(tensors, path, {KEY: json.dumps(facts)})
    assert load_learner(path, make_model).dls.ignore_keys == ()


def test_no_module_is_imported_because_a_file_names_it():
    Path("evil_module.py").write_text("open('evil', 'w')")
    path, tensors, facts = exported()
    evil = dict.fromkeys(("format", "learnerkit.versions", "learnerkit.types", "model", "module"), "evil_module")
    wanted = facts | {"model": "evil_module.Evil", "classes": ["evil_module"], "target_keys": ["evil_module"]}
    for notes in ({KEY: json.dumps(wanted)}, evil | {KEY: json.dumps(wanted)}):
        safetensors.torch.save_file(tensors, path, notes)
        sys.path.insert(0, ".")
        try:
            load_learner(path, make_model)
        except CheckpointError:
            assert notes.keys() > {KEY}
        finally:
            sys.path.remove(".")
    assert "evil_module" not in sys.modules
    assert not Path("evil").exists()


def test_loaders_of_other_classes_or_of_other_inputs_get_a_warning():
    learn = make_learner(make_dls(data=make_classes), make_model(n_out=3), nn.CrossEntropyLoss())
    learn.dls.classes, learn.dls.preprocessing = ["ant", "bee", "cow"], {"size": 4, "mean": 0.5}
    path = learn.export("classes")
    dls = make_dls(data=make_classes)
    load_learner(path, make_model(n_out=3), dls=dls)  # These loaders say neither, so they take both from the file.
    assert (dls.classes, dls.preprocessing) == (learn.dls.classes, learn.dls.preprocessing)
    dls.preprocessing = {"size": 8, "mean": 0.5}
    with pytest.warns(UserWarning, match=r"dls= prepare inputs in another way .* \(size\)"):
        load_learner(path, make_model(n_out=3), dls=dls)
    dls.classes = ["bee", "cow", "ant"]
    with pytest.warns(UserWarning, match="with the classes ant, bee, cow, and dls= have bee, cow, ant: "):
        load_learner(path, make_model(n_out=3), dls=dls)
