"""Pictures with torchvision's networks, transforms, and mixed images."""

from functools import partial

import pytest
import torch
from torch import nn
from torchvision import models
from torchvision.transforms import v2

from learnerkit import CutMix, ImageData, MixUp, accuracy, set_seed
from learnerkit.vision import vision_learner

small_resnet = partial(models.ResNet, models.resnet.BasicBlock, [1, 1, 1, 1])


def bars(n=48, size=32):
    """Pictures with a bright bar on noise, upright or level, and the name of each."""
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(100, (n, 3, size, size), generator=generator, dtype=torch.uint8)
    places = torch.randint(2, size - 6, (n,), generator=generator).tolist()
    for i, place in enumerate(places):
        picture = pictures[i] if i % 2 else pictures[i].transpose(1, 2)
        picture[:, :, place : place + 4] = 250
    return list(pictures), ["upright" if i % 2 else "level" for i in range(n)]


@pytest.mark.parametrize("channels", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_network_learns_from_mixed_and_augmented_pictures(channels, capsys):
    set_seed(0)
    data = ImageData.from_items(*bars(), 0.25, size=32, channels=channels)
    augment = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()])
    dls = data.dataloaders(6, augment=augment, device="cpu", drop_last=True)
    learn = vision_learner(dls, small_resnet, metrics=accuracy, hidden=(), cbs=[MixUp(), CutMix()])
    assert learn.model.head[-1].out_features == 2
    with learn.no_logging():
        learn.fit_one_cycle(5, 3e-3)
    assert learn.recorder.final_record[-1] > 0.6
    assert learn.predict(data.valid_ds.samples[0][0]).label in data.classes
    assert isinstance(learn.model[0], nn.Module)
