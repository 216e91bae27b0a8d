"""Texts made ready: parts, batches, padding, language models, files."""

import json

import pytest
import torch
from helpers import raises
from text_jobs import WORDS, Bag, Next, OwnNext, count_next, make_data, make_stream, make_texts
from torch import nn
from torch.nn import functional as F

from learnerkit import Callback, ClassificationInterpretation, Learner, accuracy, load_learner, perplexity, set_seed
from learnerkit.language.codec import train_tokenizer
from learnerkit.language.data import TextData


def test_texts_have_labels_parts_and_classes():
    texts, labels = make_texts()
    data = make_data(valid=[0, 1, 2])
    assert data.classes == ["animal", "food"]
    assert [data.decode(sample) for sample in data.valid_ds] == texts[:3]
    assert [data.decode(sample) for sample in data.train_ds] == texts[3:]
    assert [data.classes[i] for i in data.train_ds.labels] == labels[3:]
    assert repr(data) == (
        f"TextData(57 texts to train on, 3 texts to validate on, {data.vocab_size} different tokens, "
        "2 classes: animal, food)"
    )
    assert len(make_data(valid=0.25).valid_ds) == 16
    numbers = TextData.from_texts(texts, [label == "food" for label in labels], tokenizer=train_tokenizer(texts, 300))
    assert numbers.classes == [False, True]
    with raises(ValueError, "got labels of type <U6 and shape (59,) for 60 texts"):
        TextData.from_texts(texts, labels[1:])
    with raises(ValueError, "got labels of type object and shape (60,), ['a'] among them,", "one for each"):
        TextData.from_texts(texts, [["a"], ["a", "b"]] * 30)
    with raises(ValueError, "got labels of type float64"):
        TextData.from_texts(texts, [0.5] * 60)
    with raises(ValueError, "nan among them", "text, whole numbers or truth values"):
        TextData.from_texts(texts, [float("nan"), *labels[1:]])
    for given in (labels, [label == "food" for label in labels]):
        with raises(ValueError, "got labels of type object and shape (60,), None among them, for 60 texts"):
            TextData.from_texts(texts, [*given[1:], None])
    with raises(TypeError, "2 of 60 texts are no str, such as nan, at the places 0, 3 (from 0)", "put ''"):
        TextData.from_texts([float("nan"), *texts[1:3], None, *texts[4:]], labels)
    with raises(ValueError, "all texts have the class 1; there is nothing to learn"):
        TextData.from_texts(texts, [1] * 60)
    with raises(ValueError, "validated on, but not trained on: the classes mineral", "another valid="):
        TextData.from_texts(texts, ["mineral", *labels[1:]], valid=[0, 1])


def test_batches_are_padded_masked_and_within_the_budget():
    dls = make_data().dataloaders(tokens=64, device="cpu")
    pad = dls.data.codec.pad
    for dl, ds in ((dls.train, dls.data.train_ds), (dls.valid, dls.data.valid_ds)):
        texts = []
        for batch in dl:
            ids, mask = batch["input_ids"], batch["attention_mask"]
            assert ids.shape == mask.shape
            assert ids.numel() <= 64
            assert (ids[mask == 0] == pad).all()
            assert (mask.diff(dim=1) <= 0).all()  # padding is at the end
            assert mask.any(0).all()  # and no longer than the longest
            rows = [{name: part[i] for name, part in batch.items()} for i in range(len(ids))]
            texts += [(dls.data.decode(row), int(row["labels"])) for row in rows]
        assert sorted(texts) == sorted((dls.data.decode(sample), int(sample["labels"])) for sample in ds)


def test_batches_of_texts_are_not_said_by_the_options_of_torchs_loader():
    for name, value in {"batch_size": 4, "batch_sampler": [[0]], "collate_fn": list}.items():
        with raises(TypeError, f"TextData.dataloaders() got {name}=", "tokens= says how large they are"):
            make_data().dataloaders(**{name: value})
    assert len(make_stream().dataloaders(batch_size=2).train.dataset) > 0


def test_a_model_learns_the_classes_and_predicts_texts_in_their_order():
    set_seed(1)
    dls = make_data().dataloaders(tokens=64, device="cpu")
    learn = Learner(dls, Bag(dls.data.vocab_size), nn.CrossEntropyLoss(), lr=0.1, metrics=accuracy)
    learn.fit(4)
    assert learn.recorder.values[-1][-1] > 0.95
    assert learn.effective_batch_size is None
    texts = ["cat dog", "rice", "horse fish bird cat", "soup " * 20]
    preds, targets = learn.get_preds(dl=dls.test_dl(texts))
    assert targets is None
    assert [dls.classes[i] for i in preds.argmax(1)] == ["animal", "food", "animal", "food"]
    assert [len(batch["input_ids"]) for batch in dls.test_dl(texts, batch_size=3)] == [3, 1]
    assert learn.predict("bird fish")[:2] == ("animal", 0)
    for wrong in ("cat", {"text": "cat"}):
        with raises(TypeError, f"got a {type(wrong).__name__}; test_dl takes a list of texts"):
            dls.test_dl(wrong)
    with raises(ValueError, "there is nothing to predict"):
        dls.test_dl([])
    preds, targets = learn.get_preds()  # in the order of the dataset, which the batches are not
    assert targets.tolist() == dls.data.valid_ds.labels.tolist()
    assert (preds.argmax(1) == targets).double().mean() > 0.95


def test_the_loss_does_not_depend_on_the_padding():
    data = make_data()
    values, model = [], Bag(data.vocab_size).double()
    for tokens in (16, 64, 4096):
        dls = data.dataloaders(tokens=tokens, device="cpu")
        learn = Learner(dls, model, nn.CrossEntropyLoss(), metrics=accuracy)
        values.append(learn.validate())
    torch.testing.assert_close(values, [values[0]] * 3, rtol=1e-12, atol=0)


# Language models


def test_blocks_are_contiguous_and_each_token_is_predicted_once():
    data = make_stream(valid=[59])
    ids = data.train_ds.long()
    assert ids.tolist().count(data.codec.end) == 59
    dls = data.dataloaders(tokens=64, seq_len=16, device="cpu")
    pairs = []
    for batch in dls.train:
        assert batch["input_ids"].shape[0] <= 4
        (inputs,), (targets,) = dls.split(batch)
        assert inputs["input_ids"].shape == targets.shape
        counted = targets >= 0
        pairs += zip(inputs["input_ids"][counted].tolist(), targets[counted].tolist(), strict=True)
    assert sorted(pairs) == sorted(zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True))


def test_of_a_single_long_text_the_end_is_validated_on():
    text = " ".join(make_texts()[0])
    data = TextData.from_texts(text, valid=0.1, vocab_size=300)
    whole = [data.codec.decode(part.tolist()) for part in (data.train_ds, data.valid_ds)]
    assert "".join(whole).replace(" ", "") == text.replace(" ", "")
    assert 0.05 < len(whole[1]) / len(text) < 0.15
    with raises(ValueError, "got valid=1.5; it is a share between 0 and 1"):
        TextData.from_texts(text, valid=1.5)
    assert make_stream(valid=None).valid_ds is None
    with raises(ValueError, "got 1 tokens and seq_len=128"):
        make_stream(valid=None).__class__(data.codec, None, data.train_ds[:1]).dataloaders()
    with raises(ValueError, "seq_len=0; there must be two tokens, and seq_len is 1 or more"):
        data.dataloaders(seq_len=0)


def test_a_loss_function_and_a_models_own_loss_come_to_the_same_by_exact_counts():
    data = make_stream()
    found = []
    for model, loss in ((OwnNext, None), (Next, F.cross_entropy)):
        set_seed(1)
        dls = data.dataloaders(tokens=48, seq_len=16, device="cpu")
        counted = {"loss_weight": count_next} if loss is None else {}
        metric = perplexity(axis=-1 if loss is None else 1)
        learn = Learner(dls, model(data.vocab_size).double(), loss, metrics=metric, **counted)
        learn.fit(2, 0.1)
        found.append((learn.recorder.values, list(learn.model.parameters())[0].detach()))
        train, valid, measured = learn.recorder.values[-1]
        assert measured == pytest.approx(torch.tensor(valid).exp().item())
        assert train < 0.8 * learn.recorder.values[0][0]
        pred = learn.predict("cat dog").pred
        assert sorted(pred.shape) == sorted([data.vocab_size, len(data.codec.encode(["cat dog"])[0])])
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)
    ids = data.valid_ds.long()
    exact = F.cross_entropy(found[0][1][ids[:-1]], ids[1:])
    assert found[0][0][-1][1] == pytest.approx(exact.item(), rel=1e-9)


def test_new_texts_for_a_language_model_are_whole_and_nothing_is_added_to_them():
    from tokenizers.processors import TemplateProcessing

    texts = make_texts()[0]
    tokenizer = train_tokenizer(texts, 300)
    tokenizer.post_processor = TemplateProcessing(single="[END] $A [END]", special_tokens=[("[END]", 1)])
    dls = TextData.from_texts(texts, tokenizer=tokenizer, max_len=8).dataloaders(48, 16, device="cpu")
    (*ids, end) = dls.data.codec.encode_stream([" ".join(texts)]).tolist()
    assert end == dls.data.codec.end
    assert len(ids) > 8
    for batch in (dls.input_batch(" ".join(texts))[0], *dls.test_dl([" ".join(texts)])):
        assert batch["input_ids"].tolist() == [ids]
    assert dls.input_batch("")[0]["input_ids"].tolist() == [[dls.data.codec.pad]]


# Frames, folders, files


def test_folders_are_classes(tmp_path):
    texts, labels = make_texts(12)
    for i, (text, label) in enumerate(zip(texts, labels, strict=True)):
        folder = tmp_path / ("train" if i < 8 else "test") / label
        folder.mkdir(parents=True, exist_ok=True)
        # Editors of Windows put a mark before the text.
        (folder / f"{i}.txt").write_text(text, encoding="utf-8-sig" if i % 2 else "utf-8")
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / ".ipynb_checkpoints" / "0.txt").write_text("hidden", encoding="utf-8")
    data = TextData.from_folder(tmp_path, valid="test", vocab_size=300)
    assert data.classes == ["animal", "food"]
    for ds, rows in ((data.train_ds, range(8)), (data.valid_ds, range(8, 12))):
        found = {(data.decode(sample), data.classes[sample["labels"]]) for sample in ds}
        assert found == {(texts[i], labels[i]) for i in rows}
    food = TextData.from_folder(tmp_path, None, ["food"], label=None, vocab_size=300)
    assert sorted(food.codec.decode(food.train_ds).split()) == sorted(
        " ".join(texts[i] for i in range(12) if labels[i] == "food").split()
    )
    with raises(ValueError, "there are no .txt files in folders of", "among foot"):
        TextData.from_folder(tmp_path, classes=["foot"])
    with raises(ValueError, "got valid='dev'", "but in: test, train"):
        TextData.from_folder(tmp_path, valid="dev")
    stream = TextData.from_folder(tmp_path, valid="test", label=None, vocab_size=300)
    assert stream.classes is None
    assert [stream.codec.decode(ids) for ids in (stream.train_ds, stream.valid_ds)] == [
        " ".join(texts[i] for i in sorted(part, key=lambda i: (labels[i], str(i)))) for part in (range(8), range(8, 12))
    ]
    (tmp_path / "train" / "notes.txt").write_text("no text to classify")
    with raises(ValueError, "1 files lie beside folders of classes, such as", "notes.txt", "'animal', 'food'"):
        TextData.from_folder(tmp_path, valid="test")
    assert TextData.from_folder(tmp_path, "test", classes=["animal", "food"], vocab_size=300).classes == data.classes
    (tmp_path / "train" / "food" / "0.txt").write_bytes(b"caf\xe9")
    with raises(ValueError, "0.txt is not UTF-8"):
        TextData.from_folder(tmp_path, valid="test", classes=["animal", "food"])


def test_linked_folders_are_read_whatever_the_case_of_a_suffix(tmp_path):
    for name in ("texts/animal/0.txt", "texts/animal/1.TXT", "elsewhere/0.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("some words")
    (tmp_path / "texts" / "food").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "texts" / "animal" / "up").symlink_to(tmp_path / "texts")
    (tmp_path / "texts" / "animal" / "folder.txt").mkdir()
    data = TextData.from_folder(tmp_path / "texts", None, vocab_size=300)
    assert [data.classes[i] for i in data.train_ds.labels] == ["animal", "animal", "food"]


@pytest.mark.slow
def test_texts_come_from_the_columns_of_a_frame():
    pandas = pytest.importorskip("pandas")
    texts, labels = make_texts()
    df = pandas.DataFrame({"said": texts, "kind": labels}, index=range(100, 160))
    data = TextData.from_df(df, "said", "kind", vocab_size=300)
    expected = make_data()
    assert data.to_json() == expected.to_json()
    assert torch.equal(data.train_ds.ids, expected.train_ds.ids)
    assert torch.equal(data.valid_ds.labels, expected.valid_ds.labels)
    assert TextData.from_df(df, "said", None, vocab_size=300).classes is None
    with raises(ValueError, "there is no column 'text'; the frame has said, kind"):
        TextData.from_df(df)
    with raises(TypeError, "got ['kind'] as a column; it is the name of one column"):
        TextData.from_df(df, "said", ["kind"])


def test_texts_are_shown_as_texts():
    dls = make_data().dataloaders(tokens=64, device="cpu")
    lines = str(dls.show_batch(3)).splitlines()
    assert lines[0].split() == ["text", "target"]
    batch = dls.one_batch()
    rows = [{name: part[i] for name, part in batch.items()} for i in range(3)]
    assert [line.split() for line in lines[1:]] == [
        [*dls.data.decode(row).split(), dls.classes[row["labels"]]] for row in rows
    ]
    learn = Learner(dls, Bag(dls.data.vocab_size), nn.CrossEntropyLoss())
    assert str(learn.show_results(3)).splitlines()[0].split() == ["text", "target", "prediction"]
    top = ClassificationInterpretation.from_learner(learn).plot_top_losses(2)
    assert str(top).splitlines()[0].split() == ["text", "target", "prediction", "loss"]


def test_next_tokens_are_shown_as_text():
    dls = make_stream().dataloaders(tokens=64, seq_len=8, device="cpu")
    text, target = (cell.split() for cell in dls.show_batch(1).rows[0])
    assert set(text + target) <= set(" ".join(WORDS.values()).split())
    assert "".join(target).startswith("".join(text[1:]))  # one token later
    for model, loss in ((OwnNext, None), (Next, F.cross_entropy)):
        learn = Learner(dls, model(dls.data.vocab_size), loss)
        shown = learn.show_results(2)
        assert shown.names == ["text", "target", "prediction"]
        assert not any("tensor" in cell or "wrong" in cell for row in shown.rows for cell in row)
        label, ids, pred = learn.predict("cat dog")
        assert label == dls.data.codec.decode(ids)
        assert ids.tolist() == pred.argmax(0 if loss else 1).tolist()


@pytest.mark.slow
def test_an_exported_classifier_takes_texts_again():
    dls = make_data().dataloaders(tokens=64, device="cpu")
    learn = Learner(dls, Bag(dls.data.vocab_size), nn.CrossEntropyLoss(), lr=0.1)
    learn.fit(2)
    texts = ["cat dog", "rice apple rice", ""]
    preds = learn.get_preds(dl=dls.test_dl(texts))[0]
    for name, model in (("bag.pt2", None), ("bag", Bag(dls.data.vocab_size))):
        learn.export(name)
        again = load_learner(name, model, data=TextData, device="cpu")
        torch.testing.assert_close(again.get_preds(dl=again.dls.test_dl(texts))[0], preds)
        assert again.predict("cat dog")[:2] == ("animal", 0)
    again.export("again")  # and passes it on
    assert load_learner("again", Bag(dls.data.vocab_size), data=TextData).predict("rice").label == "food"
    with raises(ValueError, "got dls= and data="):
        load_learner("bag", model, data=TextData, dls=dls)
    dls.preprocessing = None
    learn.export("other")
    with raises(ValueError, "has nothing of data="):
        load_learner("other", Bag(dls.data.vocab_size), data=TextData)


def test_the_tokenizer_and_the_classes_are_kept_as_json():
    data = make_data(max_len=5)
    again = TextData.from_json(data.to_json())
    assert again.classes == data.classes
    assert again.codec.to_json() == data.codec.to_json()
    assert json.loads(data.to_json())["classes"] == ["animal", "food"]
    assert len(again.dataloaders(device="cpu").train) == 0


# On several ranks and after a break


def batches_seen(learn):
    """The batches of two epochs of training."""
    seen = []
    learn.fit(2, cbs=Callback(before_batch=lambda cb: cb.training and seen.append(ids(cb))))
    return seen


def ids(cb):
    return cb.x["input_ids"].tolist()


def test_each_epoch_has_another_order_which_the_seed_decides():
    data = make_data()
    runs = []
    for seed in (1, 1, 2):
        set_seed(seed)
        dls = data.dataloaders(tokens=64, device="cpu")
        runs.append(batches_seen(Learner(dls, Bag(data.vocab_size), nn.CrossEntropyLoss())))
    half = len(runs[0]) // 2
    assert runs[0] == runs[1] != runs[2]
    assert sorted(runs[0][:half]) != sorted(runs[0][half:])
