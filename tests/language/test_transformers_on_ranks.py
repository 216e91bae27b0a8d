"""Models of transformers as they come, on several ranks: the numbers are those of one process."""

import pytest
import torch
from helpers import mostly_soak
from text_jobs import make_data, make_stream
from torch.nn import functional as F
from torch.optim import AdamW

from learnerkit import GradientAccumulation, GradientClip, Learner, accuracy, perplexity, set_seed

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def classifier(vocab_size):
    """BERT with a head for two classes, without dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=vocab_size, max_position_embeddings=64, **none, **SMALL)
    return BertForSequenceClassification(config)


def gpt2(vocab_size):
    """GPT-2 without dropout; its output layer shares the weights of its first."""
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    small = {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, bos_token_id=1, eos_token_id=1, **small, **none))


def llama(vocab_size):
    """A causal model of another kind, with rotary positions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    special = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **SMALL, **special))


def exact(logits, labels, vocab_size, num_items_in_batch, **kwargs):
    """The loss of transformers' causal models, which itself rounds to float32, in float64."""
    return F.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="sum") / num_items_in_batch


def make_learner(model, checkpointed=False, **kwargs):
    """A learner of a new model in float64."""
    data = make_data() if model is classifier else make_stream()
    set_seed(3)
    module = model(data.vocab_size).double().train()
    if model is not classifier:
        module.loss_function = exact
    if checkpointed:
        getattr(module, "activation_checkpointing_enable", module.gradient_checkpointing_enable)()
    metric = accuracy if model is classifier else perplexity
    dls = data.dataloaders(tokens=48, seq_len=12, device="cpu")
    return Learner(dls, module, opt_func=AdamW, lr=1e-3, metrics=metric, wd=0.1, **kwargs)


def check(model, tolerance=1e-9, **kwargs):
    """Train on all ranks together, and on each alone; compare weights, the table and predictions."""
    alone, together = make_learner(model, **kwargs), make_learner(model, **kwargs)
    set_seed(4)
    alone.fit_one_cycle(2)
    set_seed(4)
    with together.distrib_ctx(split_batches=True):
        together.fit_one_cycle(2)
        preds = together.get_preds()[0]
    weights = [learn.model.state_dict() for learn in (together, alone)]
    torch.testing.assert_close(*weights, rtol=0, atol=tolerance)
    tables = [learn.recorder.values for learn in (together, alone)]
    torch.testing.assert_close(*tables, rtol=tolerance, atol=0)
    torch.testing.assert_close(preds, alone.get_preds()[0], rtol=0, atol=100 * tolerance)
    assert tables[1][1][0] < tables[1][0][0]


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*each train a whole copy"),  # that is what is compared with
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of transformers, as it is imported
]


@pytest.mark.slow
@pytest.mark.ranks(2, soak=[3])
def test_a_classifier_trains_in_steps_of_two_batches_with_clipped_gradients():
    pytest.importorskip("transformers")
    check(classifier, cbs=[GradientAccumulation(n_batches=2), GradientClip(0.05)])


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("model", mostly_soak(["classifier", "gpt2", "llama"], "classifier", "llama"))
@pytest.mark.parametrize("saving_memory", mostly_soak([False, True], True))
def test_transformers_on_ranks_train_as_on_one_process(model, saving_memory):
    pytest.importorskip("transformers")
    cbs = [GradientClip(0.5), *([GradientAccumulation(n_batches=3)] if saving_memory else [])]
    tolerance = 1e-6 if model == "llama" else 1e-9  # its norms round to float32
    check(globals()[model], tolerance, checkpointed=saving_memory, cbs=cbs)


@pytest.mark.soak
@pytest.mark.ranks(2)
def test_training_in_bfloat16_is_the_same_up_to_its_rounding():
    pytest.importorskip("transformers")
    for model in (classifier, gpt2):
        alone, together = (make_learner(model).to_bf16() for _ in range(2))
        for learn in (alone, together):
            learn.model.float()
        set_seed(4)
        alone.fit(2)
        set_seed(4)
        with together.distrib_ctx(split_batches=True):
            together.fit(2)
        tables = [learn.recorder.values for learn in (together, alone)]
        torch.testing.assert_close(*tables, rtol=0.02, atol=0)
