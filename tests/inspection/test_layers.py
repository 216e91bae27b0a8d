"""Rates that fall from the last layer of a model to the first: of timm, of transformers, and plain ones."""

from functools import partial

import pytest
import torch
from helpers import by_hand, make_dls, make_learner, make_model, same_weights
from torch import nn
from torch.optim import AdamW

from learnerkit import Learner, layer_decay


def scales(model, groups):
    """The scale of each parameter, by name; each has one."""
    found = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    assert len(found) == sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert [group["lr_scale"] for group in groups] == sorted(group["lr_scale"] for group in groups)
    assert groups[-1]["lr_scale"] == 1
    return {name: found[id(p)] for name, p in model.named_parameters()}


class Net(nn.Module):
    """Blocks in a list, with something before, and a norm and a head behind."""

    def __init__(self, kind=nn.ModuleList):
        super().__init__()
        self.cls_token, self.embed = nn.Parameter(torch.zeros(1)), nn.Linear(4, 4)
        entries = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh()) for _ in range(3)]
        self.blocks = kind(entries) if kind is nn.ModuleList else kind(*entries)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 1)


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.Sequential])
def test_blocks_what_is_before_them_and_the_head_are_layers(kind):
    model = Net(kind)
    found = scales(model, layer_decay(model, 0.5))
    expected = {"cls_token": 4, "embed": 4, "blocks.0": 3, "blocks.1": 2, "blocks.2": 1, "norm": 0, "head": 0}
    for name, scale in found.items():
        (power,) = [power for start, power in expected.items() if name.startswith(start)]
        assert scale == 0.5**power, name


def test_layers_of_a_sequential_are_its_entries_and_a_norm_belongs_to_the_one_before():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 1))
    assert [len(group["params"]) for group in layer_decay(model)] == [4, 2, 2]
    assert [group["lr_scale"] for group in layer_decay(model)] == [0.75**2, 0.75, 1]


def test_a_weight_that_blocks_share_is_in_the_layer_of_the_first():
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    model[2].weight = model[0].weight
    found = scales(model, layer_decay(model, 0.5))
    assert found == {"0.weight": 0.25, "0.bias": 0.25, "1.weight": 0.5, "1.bias": 0.5, "2.bias": 1}


def test_sequentials_inside_each_other_are_opened_and_other_modules_are_blocks():
    stages = [nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 1, 4)), nn.Sequential(nn.Linear(4, 1))]
    model = nn.Sequential(*stages)
    assert [len(group["params"]) for group in layer_decay(model)] == [2, 12, 2]
    assert [len(group["params"]) for group in layer_decay(model, blocks="0")] == [2, 12, 2]


def test_blocks_of_a_resnet_of_torchvision_are_layers():
    from torchvision.models import resnet18

    model = resnet18(num_classes=2)
    groups = layer_decay(model, 0.5)
    found = scales(model, groups)
    assert len(groups) == 10  # the stem, two blocks in each of four stages, the head
    assert found["conv1.weight"] == found["bn1.bias"] == 0.5**9
    assert found["layer1.1.bn2.weight"] == 0.5**7
    assert found["layer2.0.downsample.0.weight"] == found["layer2.0.conv1.weight"] == 0.5**6


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "resnet10t", "convnext_atto", "swin_tiny_patch4_window7_224"],
)  # fmt: skip
def test_scales_of_timms_models_are_those_of_timm(name):
    timm = pytest.importorskip("timm")
    from timm.optim import param_groups_layer_decay

    model = timm.create_model(name, num_classes=2)
    theirs = param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.7)
    expected = {id(p): group["lr_scale"] for group in theirs for p in group["params"]}
    named = dict(model.named_parameters())
    found = scales(model, layer_decay(model, 0.7))
    assert found == pytest.approx({name: expected[id(p)] for name, p in named.items()})


def test_decays_of_a_vit_of_timm_are_those_of_timm_too():
    timm = pytest.importorskip("timm")
    from timm.optim import param_groups_layer_decay

    size = {"img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 3, "num_heads": 2, "num_classes": 1}
    model = timm.create_model("vit_tiny_patch16_224", **size)
    learn = make_learner(model=model, opt_func=AdamW, splitter=partial(layer_decay, decay=0.7), lr=None, wd=0.05)
    learn.fit(0)
    theirs = param_groups_layer_decay(
        model, weight_decay=0.05, layer_decay=0.7, no_weight_decay_list=model.no_weight_decay()
    )
    wanted, found = (
        {id(p): (key(group), group["weight_decay"]) for group in groups for p in group["params"]}
        for groups, key in ((theirs, lambda g: g["lr_scale"] * 1e-3), (learn.opt.param_groups, lambda g: g["lr"]))
    )
    for name, p in model.named_parameters():
        assert found[id(p)] == pytest.approx(wanted[id(p)]), name


SMALL = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 8}
AT_ENDS = {
    "Bert": ["bert.embeddings", "bert.encoder.layer.{}", "classifier"],
    "ViT": ["vit.embeddings", "vit.encoder.layer.{}", "classifier"],
    "Llama": ["model.embed_tokens", "model.layers.{}", "score"],
}


@pytest.mark.slow  # to import transformers
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers, as it is imported
@pytest.mark.parametrize("kind", AT_ENDS)
def test_layers_of_transformers_decay_by_depth(kind):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(**SMALL)
    ends = {"Bert": "ForSequenceClassification", "ViT": "ForImageClassification", "Llama": "ForSequenceClassification"}
    model = getattr(transformers, f"{kind}{ends[kind]}")(config)
    first, block, last = AT_ENDS[kind]
    groups = layer_decay(model, 0.5)
    assert len(groups) == 5
    for name, scale in scales(model, groups).items():
        if name.startswith(first):
            assert scale == 0.5**4
        elif name.startswith(last):
            assert scale == 1
        for i in range(3):
            if name.startswith(block.format(i)):
                assert scale == 0.5 ** (3 - i)


def test_several_lists_ask_for_the_name_of_one_or_for_a_sum():
    model = nn.Transformer(8, 2, 2, 3, 8, batch_first=True)
    with pytest.raises(ValueError, match=r"several lists of blocks: encoder.layers, decoder.layers. Say by blocks="):
        layer_decay(model)
    assert [group["lr_scale"] for group in layer_decay(model, 0.5, "decoder.layers")] == [0.5**3, 0.5**2, 0.5, 1]
    parts = layer_decay(model.encoder, 0.5) + layer_decay(model.decoder, 0.5)
    assert [group["lr_scale"] for group in parts] == [0.5, 1, 0.25, 0.5, 1]
    with pytest.raises(ValueError, match="of Transformer are encoder.layers, decoder.layers; did you mean 'encoder"):
        layer_decay(model, blocks="encoder.layer")
    with pytest.raises(ValueError, match=r"the lists of Sequential are '' \(the model itself\), 0$"):
        layer_decay(nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)), blocks="layer")
    with pytest.raises(ValueError, match="the lists of Linear are none$"):
        layer_decay(nn.Linear(2, 2), blocks="layer")


@pytest.mark.parametrize("decay", [0, 1.5, -0.5, "0.5", None, True])
def test_another_decay_is_refused(decay):
    with pytest.raises(ValueError, match="it is a number above 0 and at most 1"):
        layer_decay(make_model(), decay)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match="Linear has no nn.ModuleList and no nn.Sequential of several blocks"):
        layer_decay(nn.Linear(2, 1))


def test_a_fit_with_layer_decay_is_that_of_a_loop_with_such_groups():
    learn, model = (make_learner(opt_func=AdamW, lr=0.01, splitter=layer_decay), make_model())
    assert type(learn) is Learner
    learn.fit(2)
    first, last = [*model[0].parameters()], [*model[3].parameters()]
    opt = AdamW([{"params": first, "lr": 0.01 * 0.75}, {"params": last}], lr=0.01, fused=True)
    by_hand(model, make_dls().train, 2, opt)
    assert same_weights(learn.model, model)
    learn.freeze()
    assert [p.requires_grad for p in learn.model.parameters()] == [False, False, True, True]
