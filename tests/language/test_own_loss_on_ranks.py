"""What the losses of transformers' models average over: they get it, and steps of several ranks are those of one."""

import math

import pytest
import torch
from helpers import mostly_soak
from text_jobs import make_stream
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from learnerkit import Callback, DataLoaders, Dice, Learner, accuracy, distributed, perplexity
from learnerkit.losses import own_loss_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of transformers, as it is imported
    pytest.mark.filterwarnings("ignore:.*each train a whole copy"),  # that is what is compared with
]

SPECIAL = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
BART = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2}  # fmt: skip


def gpt2(hf, n=20):
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=n, n_embd=8, n_layer=1, n_head=2, **none, **SPECIAL))


def llama(hf, n=20):
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=n, **SMALL, **SPECIAL))


def bert(hf):
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hf.BertForMaskedLM(hf.BertConfig(vocab_size=20, **none, **SMALL))


def t5(hf):
    small = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=20, decoder_start_token_id=0, **small))


def bart(hf):
    config = hf.BartConfig(vocab_size=20, d_model=8, dropout=0.0, decoder_start_token_id=1, **BART, **SPECIAL)
    config.forced_eos_token_id = None
    return hf.BartForConditionalGeneration(config)


MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5, "bart": bart}
SHIFTED = ("gpt2", "llama")  # which take the count, too


def in_float64(logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
    """The loss of transformers' causal models, which itself rounds to float32."""
    reduction = "mean" if num_items_in_batch is None else "sum"
    total = F.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction=reduction)
    return total if num_items_in_batch is None else total / num_items_in_batch


def make_model(name):
    hf = pytest.importorskip("transformers")
    torch.manual_seed(2)
    model = MODELS[name](hf).double()
    if name in SHIFTED:
        model.loss_function = in_float64
    return model


def rows(n=14, length=9):
    """Texts of 1 to 9 tokens: those that one rank gets are much longer than those of the others."""
    torch.manual_seed(1)
    found = []
    for i in range(n):
        ids = torch.randint(2, 20, (length,))
        labels = ids.masked_fill(torch.arange(length) >= (length if i % 2 else 1 + i % 4), -100)
        labels[0] = -100 if i % 3 else labels[0]  # of which a loss that shifts makes no use
        found.append({"input_ids": ids, "labels": labels})
    return found


def make_learner(name, **kwargs):
    dl = DataLoader(rows(), 6)
    return Learner(DataLoaders(dl, dl, device="cpu"), make_model(name), opt_func=torch.optim.SGD, lr=0.5, **kwargs)


@pytest.mark.parametrize("name", MODELS)
def test_the_count_is_what_the_models_own_mean_divides_by(name):
    hf = pytest.importorskip("transformers")
    model = MODELS[name](hf).double().eval()  # with its own loss
    own, batch = own_loss_of(model), next(iter(DataLoader(rows(), 14)))
    with torch.no_grad():
        whole = model(**batch).loss
        assert own.is_known((batch["labels"],))
        assert own.takes_count is (name in SHIFTED)
        parts = [{k: v[i : i + 1] for k, v in batch.items()} for i in range(14)]
        counts = [int(own.count(part["labels"])) for part in parts]
        total = sum(float(model(**part).loss) * n for part, n in zip(parts, counts, strict=True) if n)
        assert total / sum(counts) == pytest.approx(float(whole), rel=1e-6)  # transformers computes in float32
        if name in SHIFTED:
            given = model(**batch, num_items_in_batch=own.count(batch["labels"])).loss
            assert float(given) == pytest.approx(float(whole), rel=1e-6)


def test_what_is_known_of_other_models():
    hf = pytest.importorskip("transformers")
    bert, gpt = hf.BertConfig(vocab_size=20, **SMALL), hf.GPT2Config(n_embd=8, n_layer=1, n_head=2, **SPECIAL)
    audio = hf.Wav2Vec2Config(
        **SMALL,
        conv_dim=(8,),
        conv_stride=(5,),
        conv_kernel=(10,),
        num_feat_extract_layers=1,
        num_conv_pos_embedding_groups=2,
    )
    speech = hf.MoonshineConfig(
        vocab_size=20,
        pad_token_id=0,
        hidden_size=8,
        intermediate_size=8,
        encoder_num_hidden_layers=1,
        decoder_num_hidden_layers=1,
        encoder_num_attention_heads=2,
        decoder_num_attention_heads=2,
    )
    rows, numbers, maps = torch.ones(3, 4).long(), torch.rand(3, 4), torch.full((2, 4, 4), 255)
    for model, target, known in (
        (hf.BertForTokenClassification(bert), rows, True),
        (hf.BertForSequenceClassification(bert), numbers, True),
        (hf.BertForTokenClassification(bert), numbers, False),
        (hf.ElectraForPreTraining(hf.ElectraConfig(**SMALL)), rows, False),  # a binary cross-entropy, masked
        (hf.GPT2DoubleHeadsModel(gpt), rows, False),  # shifts by itself
        (hf.BertForPreTraining(bert), rows, False),  # adds a mean over samples to that over tokens
        (hf.MoonshineForConditionalGeneration(speech), rows, True),  # by a loss that shifts, which is told not to
        (hf.Wav2Vec2ForCTC(audio), rows, False),  # a sum over samples
        (hf.SegformerForSemanticSegmentation(hf.SegformerConfig()), maps, True),
        (nn.Sequential(hf.BertForTokenClassification(bert)), rows, False),  # in a model of one's own
    ):
        own = own_loss_of(model)
        assert own.is_known((target,)) is known, type(model)
        assert not own.shifts
    assert own_loss_of(hf.SegformerForSemanticSegmentation(hf.SegformerConfig())).count(maps) == 0


@pytest.mark.parametrize("name", SHIFTED)
def test_metrics_compare_scores_with_the_tokens_of_which_they_are(name):
    learn = make_learner(name)
    pytest.importorskip("torchmetrics")
    learn.metrics, learn.dls.classes = [accuracy, perplexity, Dice, "f1"], range(20)
    loss, share, perplexed, overlap, f1 = learn.validate()
    assert perplexed == pytest.approx(math.exp(loss), rel=1e-6)
    rows = list(learn.dls.valid)
    pairs = [(learn.model(**batch).logits[:, :-1].argmax(-1), batch["labels"][:, 1:]) for batch in rows]
    right = sum(int((said == y)[y >= 0].sum()) for said, y in pairs)
    assert share == pytest.approx(right / sum(int((y >= 0).sum()) for _, y in pairs))
    dice = Dice()
    for said, y in pairs:
        dice.update(F.one_hot(said.flatten(), 20), y.flatten())
    assert (overlap, f1) == (pytest.approx(float(dice.compute())), pytest.approx(overlap))


@pytest.mark.parametrize("name", SHIFTED)
def test_results_show_predictions_beside_the_tokens_of_which_they_are(name):
    learn = make_learner(name)
    learn.dls.loaders[1] = DataLoader([{"input_ids": ids, "labels": ids} for ids in torch.arange(2, 16).view(2, 7)], 2)
    table = learn.show_results(2)
    for row, batch in zip(table.rows, DataLoader(learn.dls.valid.dataset, 1), strict=True):
        said = learn.model(**batch).logits[0, :-1].argmax(-1)
        assert row[1] == " ".join(map(str, batch["labels"][0, 1:].tolist()))
        assert row[2] == "wrong: " + " ".join(map(str, said.tolist()))


@pytest.mark.parametrize("name", MODELS)
def test_one_process_is_the_plain_loop(name):
    learn, plain = make_learner(name), make_model(name).train()
    learn.dls.loaders[1] = None
    if name in SHIFTED:
        assert learn.model(**learn.dls.one_batch(), num_items_in_batch=1).loss > 10  # it is passed on
    opt = torch.optim.SGD(plain.parameters(), lr=0.5)
    for batch in learn.dls.train:
        plain(**batch).loss.backward()
        opt.step()
        opt.zero_grad()
    learn.fit(1)
    for (key, p), q in zip(plain.named_parameters(), learn.model.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-12, atol=1e-12, msg=key)


@pytest.mark.parametrize("name", SHIFTED)
def test_targets_that_are_aligned_already_count_all(name):
    hf = pytest.importorskip("transformers")
    data = make_stream()
    dls = data.dataloaders(tokens=48, seq_len=12, device="cpu")
    torch.manual_seed(2)
    learn, losses = Learner(dls, MODELS[name](hf, data.vocab_size), lr=0.0), []
    learn.fit(1, cbs=Callback(after_loss=lambda cb: losses.append((cb.loss, cb.model(**cb.batch).loss))))
    for found, expected in losses:
        torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=0)


@pytest.mark.ranks(2, soak=[3])
@pytest.mark.parametrize("name", mostly_soak(MODELS, "gpt2", "t5"))
def test_ranks_of_unlike_padding_equal_one_process(name):
    alone, together = make_learner(name), make_learner(name)
    alone.fit(2)
    with together.distrib_ctx(split_batches=True):
        together.fit(2)
        counts = together.validate()
    assert distributed.world_size() > 1
    tolerance = 1e-6 if name in ("llama", "t5") else 1e-9  # whose norms round to float32
    for (key, p), q in zip(alone.model.named_parameters(), together.model.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=tolerance, msg=key)
    torch.testing.assert_close(together.recorder.values, alone.recorder.values, rtol=tolerance, atol=0)
    torch.testing.assert_close(counts, alone.validate(), rtol=tolerance, atol=0)
