"""Texts as token ids, and back; tokenizers of the library tokenizers, and of transformers."""

import pickle
import sys
from threading import Thread

import pytest
import torch
from helpers import raises

from learnerkit.language.codec import TextCodec, train_tokenizer

TEXTS = ["Where are you from?", "Wo kommst du her, und wohin gehst du?", "", "naïve café 数学 😀", "where where where"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS * 3, vocab_size=320)


def parts(codec, texts=TEXTS):
    """The ids of each text."""
    ids, lengths = codec.encode(texts)
    assert ids.dtype == torch.int32
    return [part.tolist() for part in ids.split(lengths.tolist())]


def test_every_text_comes_back_and_frequent_words_are_one_token(tokenizer):
    codec = TextCodec(tokenizer)
    found = parts(codec)
    assert [codec.decode(ids) for ids in found] == TEXTS
    assert found[2] == [codec.pad]  # a batch needs something
    assert len(found[4]) == 3
    assert codec.decode(parts(codec, ["数 Ω"])[0]) == "数 Ω"  # not seen in training
    assert codec.vocab_size <= 320
    assert (codec.pad, codec.end) == (0, 1)


def test_two_trainings_come_to_the_same_on_every_process():
    texts = [f"{a} {b}" for a in "abcdefghijkl" for b in "mnopqrstuvwx"]  # many pairs are equally frequent
    assert train_tokenizer(texts, 400).to_str() == train_tokenizer(texts, 400).to_str()


def test_a_long_text_is_cut_with_room_for_what_the_tokenizer_adds(tokenizer):
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    adding = Tokenizer.from_str(tokenizer.to_str())
    adding.post_processor = TemplateProcessing(single="[END] $A [END]", special_tokens=[("[END]", 1)])
    codec = TextCodec(adding, max_len=4)
    assert [len(ids) for ids in parts(codec)] == [4, 4, 2, 4, 4]
    assert all(ids[0] == ids[-1] == 1 for ids in parts(codec))
    assert TEXTS[1].startswith(codec.decode(parts(codec)[1]))
    stream = codec.encode_stream(TEXTS)
    assert stream.tolist().count(1) == len(TEXTS)  # one after each text, which is whole
    assert codec.decode(stream.tolist()).replace(" ", "").startswith("".join(TEXTS[:2]).replace(" ", ""))
    with raises(ValueError, "got max_len=2; the tokenizer adds 2 tokens"):
        TextCodec(adding, max_len=2)


def test_the_users_tokenizer_is_left_as_it_is_and_its_own_padding_and_truncation_do_not_matter(tokenizer):
    plain = parts(TextCodec(tokenizer))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(pad_id=7, length=50)
    try:
        codec = TextCodec(tokenizer)
        assert parts(codec) == [ids if ids != [0] else [7] for ids in plain]
        assert codec.pad == 7
        assert (tokenizer.truncation["max_length"], tokenizer.padding["length"]) == (2, 50)
    finally:
        tokenizer.no_truncation()
        tokenizer.no_padding()


def test_json_and_pickle_keep_all_of_it(tokenizer):
    codec = TextCodec(tokenizer, max_len=5, pad=3, end=4)
    for again in (TextCodec.from_json(codec.to_json()), pickle.loads(pickle.dumps(codec))):
        assert parts(again) == parts(codec)
        assert again.to_json() == codec.to_json()
        assert (again.max_len, again.pad, again.end) == (5, 3, 4)


def test_a_codec_may_be_stored_in_one_thread_while_another_one_encodes(tokenizer):
    codec = TextCodec(tokenizer, max_len=3)
    expected, inner = parts(codec), codec._tokenizer

    class Interrupted:
        def __getattr__(self, name):
            return getattr(inner, name)

        def encode_batch_fast(self, *args, **kwargs):
            thread = Thread(target=codec.to_json)
            thread.start()
            thread.join(0.2)
            return inner.encode_batch_fast(*args, **kwargs)

    codec._tokenizer = Interrupted()
    assert parts(codec) == expected
    assert max(map(len, expected)) == 3


def test_what_is_no_text_and_no_tokenizer(tokenizer):
    with raises(TypeError, "1 of 2 texts are no str, such as nan, at the places 1 (from 0)"):
        TextCodec(tokenizer).encode(["a", float("nan")])
    with raises(TypeError, "got a tokenizer str; it must be a tokenizers.Tokenizer, or one of transformers"):
        TextCodec("bert-base-uncased")


def test_half_a_character_is_refused_by_its_place(tokenizer):
    codec = TextCodec(tokenizer)
    for encode in (codec.encode, codec.encode_stream):
        with raises(ValueError, "the text at place 1 (from 0) has half a character, '\\ud800', at its place 2"):
            encode(["cat", "a \ud800"])


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with raises(ImportError, "pip install 'learnerkit[text]'"):
        train_tokenizer(TEXTS)


def test_the_size_of_a_vocabulary_is_that_of_a_first_layer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    codec = TextCodec(Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "b": 7}, unk_token="[UNK]")))
    assert codec.vocab_size == 8


@pytest.mark.slow
def test_ids_are_those_of_a_tokenizer_of_transformers(tokenizer):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    adding = Tokenizer.from_str(tokenizer.to_str())
    adding.post_processor = TemplateProcessing(single="[END] $A [END]", special_tokens=[("[END]", 1)])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=adding, pad_token="[PAD]", eos_token="[END]")
    codec = TextCodec(theirs, max_len=6)
    assert parts(codec) == theirs(TEXTS, truncation=True, max_length=6)["input_ids"]
    assert (codec.pad, codec.end) == (theirs.pad_token_id, theirs.eos_token_id)
    assert codec.vocab_size == len(theirs)
