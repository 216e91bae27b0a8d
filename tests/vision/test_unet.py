"""U-Nets: encoders of every family, what the decoder gets, freezing, files, and what is refused."""

from functools import partial

import pytest
import torch
from helpers import raises, same_weights
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torchvision import models

from learnerkit import DataLoaders, load_learner, unet_learner
from learnerkit.vision import split_layers

CLASSES = ["background", "circle", "square"]

small_resnet = partial(models.ResNet, models.resnet.BasicBlock, [1, 1, 1, 1])


def encoder(width=4):
    """A chain that halves twice, and a classifier behind it."""
    halve = {"kernel_size": 3, "stride": 2, "padding": 1}
    return nn.Sequential(
        *[nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 2 * width, **halve), nn.ReLU()],
        *[nn.Conv2d(2 * width, 2 * width, **halve), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()],
        nn.Linear(2 * width, 7),
    )


def mask_dls(n=6, size=(20, 28), classes=CLASSES):
    x = torch.rand(n, 3, *size, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x[:, 0] > 0.5).long() + (x[:, 1] > 0.7))
    return DataLoaders.from_datasets(data, data, bs=3, device="cpu", classes=classes)


FAMILIES = ["mobilenet_v3_small", "efficientnet_b0", "densenet121", "resnet18", "convnext_tiny", "regnet_y_400mf",
            "vgg11_bn", "squeezenet1_1", "shufflenet_v2_x0_5", "mnasnet0_5", "mobilenet_v2"]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "small",
        *(pytest.param(name, marks=pytest.mark.soak if i > 1 else pytest.mark.slow) for i, name in enumerate(FAMILIES)),
    ],
)
def test_families_of_torchvision_become_unets(name):
    model = unet_learner(mask_dls(), small_resnet if name == "small" else name).model
    scores = model(torch.rand(2, 3, 71, 90))
    assert scores.shape == (2, 3, 71, 90)
    F.cross_entropy(scores, torch.zeros(2, 71, 90).long()).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    groups = split_layers(model)
    assert sorted(id(p) for group in groups for p in group) == sorted(map(id, model.parameters()))
    assert [id(p) for p in groups[2]] == [id(p) for p in model.decoder.parameters()]
    assert all(groups)


def test_the_decoder_gets_what_the_encoder_had_before_each_halving():
    model = unet_learner(mask_dls(), small_resnet).model
    sizes, channels = [], []
    for block in model.decoder[:-1]:
        block.register_forward_pre_hook(lambda _, x: sizes.append(x[0].shape[-1]) or channels.append(x[0].shape[1]))
    model(torch.rand(2, 3, 64, 64))
    assert sizes == [4, 8, 16, 32, 64]
    assert channels == [512 + 256, 256 + 128, 128 + 64, 64 + 64, 64 + 3]
    assert [model.decoder[i][0].out_channels for i in range(5)] == [256, 128, 64, 64, 16]


def test_an_encoder_that_is_trained_is_frozen_at_first_and_stays_what_it_is():
    given = encoder()
    learn = unet_learner(mask_dls(), given, norm=partial(nn.GroupNorm, 4))
    assert learn.model.body[0] is not given[0]
    assert same_weights(learn.model.body[0], given[0])
    assert {p.requires_grad for p in learn.model.body.parameters()} == {False}
    assert {p.requires_grad for p in learn.model.decoder.parameters()} == {True}
    with learn.no_logging():
        learn.fit(1)
        assert same_weights(learn.model.body[0], given[0])
        learn.fine_tune(1)
    assert not same_weights(learn.model.body[0], given[0])
    assert any(isinstance(m, nn.GroupNorm) for m in learn.model.decoder.modules())
    assert not any(isinstance(m, nn.BatchNorm2d) for m in learn.model.modules())


@pytest.mark.parametrize(
    "end", [pytest.param("pt2", marks=pytest.mark.slow), pytest.param("onnx", marks=pytest.mark.soak)]
)
def test_a_mask_is_predicted_and_the_model_goes_into_a_file(end):
    dls = mask_dls()
    learn = unet_learner(dls, encoder(), normalize=False, norm=None)
    image = dls.valid_ds[0][0]
    label, decoded, pred = learn.predict(image)
    assert (label.shape, label.dtype, pred.shape) == ((20, 28), torch.int64, (3, 20, 28))
    assert torch.equal(label, decoded)
    assert torch.equal(label, pred.argmax(0))
    preds, targets, classes = learn.get_preds(with_decoded=True)
    assert torch.equal(classes, preds.argmax(1))
    assert targets.shape == classes.shape == (6, 20, 28)
    path = learn.export(f"shapes.{end}")
    if end == "pt2":
        assert torch.equal(load_learner(path).predict(image).label, label)
    else:
        session = pytest.importorskip("onnxruntime").InferenceSession(path)
        (found,) = session.run(None, {session.get_inputs()[0].name: dls.valid_ds.tensors[0].numpy()})
        torch.testing.assert_close(torch.from_numpy(found), preds, rtol=1e-4, atol=1e-4)


def test_what_is_not_counted_in_the_loss():
    dls = mask_dls()
    for part in (dls.train_ds, dls.valid_ds):
        part.tensors[1][:, :5] = 255
    learn = unet_learner(dls, encoder(), loss_func=nn.CrossEntropyLoss(ignore_index=255), norm=None)
    with learn.no_logging():
        learn.fit(1)
    preds, targets = learn.get_preds()
    expected = F.cross_entropy(preds[:, :, 5:], targets[:, 5:])
    assert learn.validate()[0] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("network", ["swin_t", "vit"])
def test_an_encoder_that_is_no_chain_is_refused(network):
    kwargs = {"image_size": 32, "patch_size": 8, "num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
    given = models.VisionTransformer(**kwargs) if network == "vit" else network
    if network == "swin_t":
        given = models.SwinTransformer([2, 2], 16, [1, 1], [1, 1], [7, 7])
    with raises(ValueError, "the encoder has to be a chain (nn.Sequential) of layers"):
        unet_learner(mask_dls(), given)


def test_other_targets_are_refused():
    dls = mask_dls()
    dls.targets = "points"
    with raises(ValueError, "got loaders with points; unet_learner predicts masks"):
        unet_learner(dls, encoder())


def test_a_unet_takes_gray_images_and_the_number_of_classes():
    assert unet_learner(mask_dls(), encoder(), n_in=1).model(torch.rand(1, 1, 8, 8)).shape == (1, 3, 8, 8)
    with raises(ValueError, "pass n_out="):
        unet_learner(mask_dls(classes=None), encoder())
    assert unet_learner(mask_dls(classes=None), encoder(), 4).model(torch.rand(1, 3, 8, 8)).shape[1] == 4
