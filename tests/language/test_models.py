"""The learner of texts: what it takes from the loaders, and what it asks for."""

import pytest
import torch
from helpers import raises
from text_jobs import Bag, Next, OwnNext, make_data, make_stream
from torch import nn
from torch.nn import functional as F

from learnerkit import DataLoaders, TextClassifier, TextData, accuracy, load_learner, set_seed, text_learner
from learnerkit.losses import loss_name


def test_a_classifier_of_the_loaders_vocabulary_and_classes_learns_and_is_loaded_again():
    set_seed(1)
    data = make_data()
    learn = text_learner(data.dataloaders(tokens=128, device="cpu"), metrics=accuracy, size=8, pairs=0, dropout=0.0)
    assert isinstance(learn.model, TextClassifier)
    assert (learn.model.tokens.weight.shape, learn.model.pairs) == ((data.vocab_size, 8), None)
    assert loss_name(learn.loss_func) == "CrossEntropyLoss"
    with learn.no_logging(), learn.no_bar():
        learn.fit(4, 3e-2)
    assert learn.final_record[-1] > 0.9
    path = learn.export("texts")
    again = load_learner(path, lambda: TextClassifier(data.vocab_size, 2, 8, 0), data=TextData)
    assert again.predict("cat dog bird").label == learn.predict("cat dog bird").label == "animal"


def test_a_program_takes_texts_of_any_length():
    data = make_data()
    learn = text_learner(data.dataloaders(tokens=128, device="cpu"), size=8, pairs=16)
    program = load_learner(learn.export("texts.pt2"), data=TextData, device="cpu")
    for text in ("", "cat", "cat dog", "cat dog bird"):
        torch.testing.assert_close(program.predict(text).pred, learn.predict(text).pred)


@pytest.mark.slow
def test_a_program_that_is_traced_from_single_tokens_takes_texts_of_any_length():
    data = TextData.from_texts(["cat", "dog bird", "", ""], ["a", "b", "a", "b"], valid=[2, 3])
    stream = make_stream()
    model = Next(stream.vocab_size)
    for learn in (
        text_learner(data.dataloaders(device="cpu"), size=8, pairs=16),
        text_learner(stream.dataloaders(seq_len=1, device="cpu"), model, loss_func=nn.CrossEntropyLoss()),
    ):
        program = load_learner(learn.export("texts.pt2"), data=TextData, device="cpu")
        for text in ("cat", "cat dog bird"):
            torch.testing.assert_close(program.predict(text).pred, learn.predict(text).pred)


def test_a_language_model_becomes_a_program():
    dls = make_stream().dataloaders(tokens=64, seq_len=16, device="cpu")
    learn = text_learner(dls, Next(dls.data.vocab_size), loss_func=nn.CrossEntropyLoss())
    path = learn.export("texts.pt2")
    program = load_learner(path, data=TextData, device="cpu")
    for text in ("cat dog", "cat dog bird"):
        torch.testing.assert_close(program.predict(text).pred, learn.predict(text).pred)
    again = load_learner(path, dls=dls, loss_func=nn.CrossEntropyLoss())
    assert again.validate() == pytest.approx(learn.validate())


def test_any_module_will_do_and_the_rest_goes_to_the_learner():
    data = make_data()
    model = Bag(data.vocab_size)
    splitter = lambda m: [list(m.embedding.parameters()), list(m.head.parameters())]  # noqa: E731
    learn = text_learner(data.dataloaders(device="cpu"), model, splitter=splitter, lr=0.5, class_weights="balanced")
    assert (learn.model, learn.splitter, learn.lr) == (model, splitter, 0.5)
    assert learn.loss_func.weight.tolist() == [1, 1]
    own = text_learner(data.dataloaders(device="cpu"), model, loss_func=F.cross_entropy)
    assert own.loss_func is F.cross_entropy


def test_a_language_model_is_given_and_makes_its_own_loss():
    data = make_stream()
    dls = data.dataloaders(tokens=64, seq_len=16, device="cpu")
    learn = text_learner(dls, OwnNext(data.vocab_size))
    assert learn.loss_func is None
    with raises(ValueError, "the texts have no classes; give model="):
        text_learner(dls)
    with raises(ValueError, "the classes of the training samples are not known"):
        text_learner(dls, OwnNext(data.vocab_size), class_weights="balanced")
    with raises(ValueError, "got weights= for a language model"):
        data.dataloaders(weights=torch.ones(3))


def test_loaders_of_another_kind_lack_what_the_classifier_needs():
    with raises(TypeError, "got a DataLoaders; text_learner takes what TextData's dataloaders() returns", "vocab_size"):
        text_learner(DataLoaders([1]))


@pytest.mark.parametrize("weights", ["balanced", {"animal": 1, "food": 1}])
def test_each_class_is_drawn_equally_often(weights):
    texts, labels = ["cat dog"] * 90 + ["bread soup apple rice cheese"] * 10, ["animal"] * 90 + ["food"] * 10
    data = TextData.from_texts(texts, labels, None, vocab_size=300)
    torch.manual_seed(1)
    train = data.dataloaders(tokens=64, weights=weights, device="cpu").train
    found = torch.cat([torch.cat([batch["labels"] for batch in train]) for _ in range(10)]).double().mean().item()
    assert found == pytest.approx(0.5 if weights == "balanced" else 0.1, abs=0.03)


def test_the_loss_is_a_module_that_moves_with_the_learner():
    learn = text_learner(make_data().dataloaders(device="cpu"), class_weights={"animal": 1, "food": 2})
    assert isinstance(learn.loss_func, nn.CrossEntropyLoss)
    with learn.no_logging(), learn.no_bar():
        learn.fit(1)
