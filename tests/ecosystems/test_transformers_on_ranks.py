"""Models of transformers with their tokenizer's batches: they make their own loss; two processes equal one."""

import pytest
import torch
from helpers import raises, results_of
from torch.utils.data import DataLoader

from learnerkit import DataLoaders, Learner, accuracy, set_seed

WORDS = ["[PAD]", "[UNK]", "the", "a", "good", "bad", "film", "book", "was", "not", "very"]
PLEASANT, UNPLEASANT = ["the film was very good", "a good book"], ["the book was bad", "a very bad film", "not good"]


def make_tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


def classifier():
    from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding

    tokenizer = make_tokenizer()
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
    )  # fmt: skip
    texts = (PLEASANT + UNPLEASANT) * 2
    samples = [{**tokenizer(text), "label": int(text in PLEASANT)} for text in texts]
    return BertForSequenceClassification(config), samples, DataCollatorWithPadding(tokenizer), accuracy


def language_model():
    from transformers import DataCollatorForLanguageModeling, GPT2Config, GPT2LMHeadModel

    tokenizer = make_tokenizer()
    config = GPT2Config(
        vocab_size=len(WORDS), n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    samples = [dict(tokenizer(text)) for text in (PLEASANT + UNPLEASANT) * 2]
    return GPT2LMHeadModel(config), samples, DataCollatorForLanguageModeling(tokenizer, mlm=False), None


JOBS = {"classifier": classifier, "language model": language_model}


def make_learner(name):
    set_seed(1)
    model, samples, collate, metrics = JOBS[name]()
    dls = DataLoaders.from_datasets(samples, samples[3:], bs=4, collate_fn=collate, device="cpu")
    return Learner(dls, model.double(), metrics=metrics, lr=0.02)


def fit(name):
    learn = make_learner(name)
    with learn.distrib_ctx(split_batches=True), learn.no_logging(), learn.no_bar():
        learn.fit(4)
        preds, targets = learn.get_preds()
        validation = learn.validate()
    return {
        "values": learn.recorder.values,
        "losses": learn.recorder.losses,
        "validation": validation,
        "preds": [pred[target >= 0] if target.ndim else pred for pred, target in zip(preds, targets, strict=True)],
        "targets": [target[target >= 0] for target in targets],  # a process pads only as far as its own samples need
        "weights": {k: v.clone() for k, v in learn.model.state_dict().items()},
    }


found = results_of(fit)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_a_model_learns_by_its_own_loss(found, name):
    run = found[1, name][0]
    assert run["values"][-1][0] < 0.95 * run["values"][0][0]
    assert run["validation"] == pytest.approx(run["values"][-1][1:])
    assert len(run["preds"]) == len(run["targets"]) == 7
    if name == "classifier":
        right = [pred.argmax() == target for pred, target in zip(run["preds"], run["targets"], strict=True)]
        assert run["validation"][1] == pytest.approx(sum(right) / 7)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, id=f"2-ranks-{name}") for name in JOBS])
def test_a_model_on_ranks_equals_one_process(found, name):
    for rank in found[2, name]:  # transformers computes losses in float32
        torch.testing.assert_close(rank, found[1, name][0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_samples_without_labels_are_predicted_and_cannot_be_validated():
    learn = make_learner("classifier")
    samples = [{k: v for k, v in sample.items() if k != "label"} for sample in learn.dls.valid_ds]
    dl = DataLoader(samples, 4, collate_fn=learn.dls.valid.collate_fn)
    preds, targets = learn.get_preds(dl=dl)
    assert (tuple(preds.shape), targets) == ((7, 2), None)
    with raises(ValueError, "there is no loss"):
        learn.validate(dl=dl)
