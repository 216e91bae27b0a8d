"""Which modules of a model are its units: of models of many kinds, by structure, by names and by classes."""

import re

import pytest
import torch
import torchvision
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from learnerkit.large.units import units


class Block(nn.Module):
    """A block of a transformer; with experts, of which a batch may need some alone."""

    def __init__(self, dim=8, experts=0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, 2)
        make = [MLP(dim) for _ in range(max(1, experts))]
        self.mlp = nn.ModuleList(make) if experts else make[0]

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class MLP(nn.Module):
    """Two layers."""

    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return self.down(self.up(x).relu())


class GPT(nn.Module):
    """A small GPT; `tied`: the head has the weight of the embedding."""

    def __init__(self, n=3, vocabulary=50, tied=False, **kwargs):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, 8), nn.Embedding(16, 8)
        self.body = nn.ModuleDict({"blocks": nn.ModuleList([Block(**kwargs) for _ in range(n)])})
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


class Holder(nn.Module):
    """A model with these parts."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return x


def numbered(name, n):
    return [f"{name}.{i}" for i in range(n)]


def mlp(*sizes):
    layers = [layer for pair in zip(sizes[:-1], sizes[1:], strict=True) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def transformers_model(name, config, **kwargs):
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, name)(getattr(transformers, config)(**kwargs))


def timm_model(name, **kwargs):
    return pytest.importorskip("timm").create_model(name, **kwargs)


STAGES = [f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)]
BLOCKS = {1: 3, 3: 3, 5: 9, 7: 3}  # of ConvNeXt
BERT = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
T5 = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_heads": 2, "vocab_size": 100}

MODELS = {
    "a GPT": (GPT, numbered("body.blocks", 3)),
    "a GPT with tied weights": (lambda: GPT(tied=True), numbered("body.blocks", 3)),
    "one block": (lambda: GPT(1), ["body.blocks.0"]),
    "a large vocabulary": (lambda: GPT(vocabulary=5000), numbered("body.blocks", 3)),
    "a very large vocabulary": (lambda: GPT(2, vocabulary=50_000, tied=True), numbered("body.blocks", 2)),
    "experts": (lambda: GPT(2, experts=4), numbered("body.blocks", 2)),
    "nn.Transformer": (
        lambda: nn.Transformer(8, 2, 2, 3, 16, batch_first=True),
        numbered("encoder.layers", 2) + numbered("decoder.layers", 3),
    ),
    "resnet18": (torchvision.models.resnet18, STAGES),
    "vit_b_16": (torchvision.models.vit_b_16, [f"encoder.layers.encoder_layer_{i}" for i in range(12)]),
    "convnext_tiny": (
        torchvision.models.convnext_tiny,
        [f"features.{i}.{j}" for i, n in BLOCKS.items() for j in range(n)],
    ),
    "timm's vit": (lambda: timm_model("vit_tiny_patch16_224", depth=3), numbered("blocks", 3)),
    "timm's convnext": (
        lambda: timm_model("convnext_atto"),
        [f"stages.{i}.blocks.{j}" for i, n in enumerate((2, 2, 6, 2)) for j in range(n)],
    ),
    "GPT-2": (
        lambda: transformers_model("GPT2LMHeadModel", "GPT2Config", n_embd=8, n_layer=2, n_head=2),
        numbered("transformer.h", 2),
    ),
    "BERT": (lambda: transformers_model("BertForMaskedLM", "BertConfig", **BERT), numbered("bert.encoder.layer", 2)),
    "T5": (
        lambda: transformers_model("T5ForConditionalGeneration", "T5Config", num_layers=2, **T5),
        numbered("encoder.block", 2) + numbered("decoder.block", 2),
    ),
    "T5 of one block": (
        lambda: transformers_model("T5ForConditionalGeneration", "T5Config", num_layers=1, **T5),
        ["encoder.block.0", "decoder.block.0"],
    ),
    "an MLP": (lambda: mlp(4, 64, 64, 2), ["0", "2", "4"]),
    "convolutions and an MLP": (
        lambda: Holder(body=nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), head=mlp(8, 32, 2)),
        ["body.0", "body.2", "head.0", "head.2"],
    ),
    "an MLP of parametrized layers": (
        lambda: nn.Sequential(*(weight_norm(nn.Linear(8, 8)) for _ in range(3))),
        ["0", "1", "2"],
    ),
    "attributes": (lambda: Holder(first=MLP(8), second=MLP(8), head=nn.Linear(8, 2)), ["first", "second"]),
    "two stacks": (
        lambda: Holder(encoder=nn.Sequential(*map(MLP, [8] * 3)), decoder=nn.Sequential(*map(MLP, [8] * 3))),
        numbered("encoder", 3) + numbered("decoder", 3),
    ),
    "two attentions": (lambda: Holder(a=nn.MultiheadAttention(8, 2), b=nn.MultiheadAttention(8, 2)), ["a", "b"]),
    "one attention": (
        lambda: Holder(attention=nn.MultiheadAttention(8, 2), head=nn.Linear(8, 8)),
        ["attention", "head"],
    ),
    "one parametrized layer": (
        lambda: Holder(body=weight_norm(nn.Linear(16, 16)), head=nn.Bilinear(4, 4, 4)),
        ["body", "head"],
    ),
    "nothing repeated": (
        lambda: nn.Sequential(nn.Embedding(100, 8), nn.LSTM(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 40)),
        ["0", "1", "3"],
    ),
    "nothing repeated, inside": (
        lambda: Holder(body=nn.Sequential(nn.LSTM(8, 8), nn.Linear(8, 40)), head=nn.Bilinear(4, 4, 9)),
        ["body.0", "body.1", "head"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_units_of_models_are_their_blocks(name):
    make, expected = MODELS[name]
    with torch.device("cpu" if name == "experts" else "meta"):
        model = make()
    found = units(model)
    assert list(found) == expected
    assert all(model.get_submodule(name) is unit for name, unit in found.items())


def test_a_block_with_a_weight_of_another_module_stays_with_the_model():
    model = GPT(4)
    model.body.blocks[1].mlp.up.weight = model.body.blocks[3].mlp.up.weight
    assert list(units(model)) == ["body.blocks.0", "body.blocks.2"]
    model = GPT(3)
    model.extra = model.body.blocks[1].mlp  # which would be called outside its block
    assert list(units(model)) == ["body.blocks.0", "body.blocks.2"]


def test_a_module_at_two_places_is_one_unit():
    block = Block()
    model = Holder(blocks=nn.ModuleList([block, Block(), block]))
    assert units(model) == {"blocks.0": block, "blocks.1": model.blocks[1]}
    shared = MLP(8)
    assert list(units(Holder(first=shared, body=nn.Sequential(shared, MLP(8))))) == ["first", "body.1"]


def test_a_huge_parameter_of_the_model_itself_is_no_unit():
    model = Holder(table=nn.Parameter(torch.zeros(1000, 1000)), norm=nn.LayerNorm(8), head=nn.Linear(8, 2))
    with pytest.raises(ValueError, match="Holder has no list of equal modules and no sizable parts") as error:
        units(model, argument="modules")
    table = ["  (the model)  Holder  3.81 MB", "  head  Linear  72 bytes", "  norm  LayerNorm  64 bytes"]
    assert str(error.value).splitlines()[1:] == [*table, " (errors.html#units)"]
    assert "say by modules=[...]" in str(error.value)


@pytest.mark.parametrize("model", [nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 2)), nn.ReLU()], ids=repr)
def test_a_model_of_one_layer_has_no_units(model):
    with pytest.raises(ValueError, match=r"say by shard=\[\.\.\.\]"):
        units(model)


CHOSEN = {
    "a name": ("head", ["head"]),
    "names, in the model's order": (["head", "body.blocks.1"], ["body.blocks.1", "head"]),
    "a class": (MLP, [f"body.blocks.{i}.mlp" for i in range(3)]),
    "one inside another": ([Block, MLP], [f"body.blocks.{i}{inner}" for i in range(3) for inner in ("", ".mlp")]),
    "a pattern": (["body.blocks.*"], numbered("body.blocks", 3)),
    "a pattern of what is inside": (["*.attention"], [f"body.blocks.{i}.attention" for i in range(3)]),
    "a generator": ((name for name in ["tokens"]), ["tokens"]),
    "a base class": (nn.Embedding, ["tokens", "positions"]),
    "none": (False, []),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_units_are_chosen_by_names_and_classes(name):
    chosen, expected = CHOSEN[name]
    assert list(units(GPT(), chosen)) == expected


WRONG = {
    "a name": ("heat", "GPT has no module 'heat', which modules= names; did you mean 'head'?; there are tokens, "),
    "a pattern": ("block.*", "GPT has no module 'block.*', which modules= names"),
    "a class": (nn.Conv2d, "GPT has no module 'Conv2d', which modules= names; there are Embedding, ModuleDict, "),
    "a class with a near name": (type("Blocks", (nn.Module,), {}), "; did you mean 'Block'?; there are "),
    "a list": ("body.blocks", "modules= names 'body.blocks', which is no unit: a unit is a module that has a forward"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_in_the_model_is_told(name):
    chosen, message = WRONG[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        units(GPT(), [chosen], argument="modules")


def test_tied_modules_cannot_be_chosen_and_entries_are_names_or_classes():
    with pytest.raises(ValueError, match="shares no parameter with modules outside itself"):
        units(GPT(tied=True), ["head"])
    with pytest.raises(TypeError, match=r"got 3 in shard=; it takes names of modules, patterns of names, and classes"):
        units(GPT(), [3])
