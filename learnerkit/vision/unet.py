"""Segmentation: a U-Net on the body of a known network, which gives each pixel of an image scores of the classes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from learnerkit.arguments import check_loaders
from learnerkit.data.loaders import DataLoaders
from learnerkit.learner import Learner
from learnerkit.marks import collective
from learnerkit.vision.classifier import count_classes, known_body, run_on_image, split_layers

_LEAST_CHANNELS = 16
"""The least channels of a block of the decoder, however few the encoder has at its size."""


@collective
def unet_learner(
    dls: DataLoaders,
    model_fn: Callable[..., nn.Module] | str | nn.Module,
    n_out: int | None = None,
    weights: Any = None,
    metrics: Any = None,
    cut: int | Callable[[nn.Module], nn.Module] | None = None,
    *,
    loss_func: Callable[..., Tensor] | None = None,
    normalize: bool | tuple[Sequence[float], Sequence[float]] = True,
    n_in: int = 3,
    norm: Callable[[int], nn.Module] | None = nn.BatchNorm2d,
    splitter: Callable[[nn.Module], Iterable[Any]] | None = None,
    pretrained: bool | None = None,
    model_kwargs: dict[str, Any] | None = None,
    **learner_kwargs: Any,
) -> Learner:
    """Make a Learner for segmentation, whose model is a U-Net with a known network as its encoder.

    Freezing, pretrained weights and `learn.fine_tune` are as in `vision_learner`; the decoder takes the head's place.
    Images may have any size. Method: Ronneberger et al. 2015, https://arxiv.org/abs/1505.04597.

    Args:
        dls: batches of images (batch, channels, height, width), floats from 0 to 1 or uint8, and masks (batch, height,
            width), int64: the number of each pixel's class.
        n_out: scores of each pixel; by default the number of `dls.classes`.
        cut: the encoder, which is a chain of layers; by default everything before the pooling and the classifier.
        loss_func: default `nn.CrossEntropyLoss()`, which ignores pixels of the class -100;
            `nn.CrossEntropyLoss(ignore_index=255)` ignores those of 255.
        norm: makes a norm layer of the decoder for a number of channels; `None`: the decoder has none.
        model_fn, weights, metrics, normalize, n_in, splitter, pretrained, model_kwargs, learner_kwargs: as for
            `vision_learner`.

    Raises:
        TypeError, ValueError: as in `vision_learner`, other targets, and an encoder that is no chain of layers.
        RuntimeError: the weights cannot be downloaded.
    """
    check_loaders(dls)
    if dls.targets not in (None, "masks"):
        raise ValueError(f"got loaders with {dls.targets}; unet_learner predicts masks: ImageData(targets='masks')")
    body, out, stats, is_pretrained = known_body(
        model_fn, weights, cut, normalize, n_in, pretrained, model_kwargs or {}
    )
    n_out = count_classes(dls, metrics) if n_out is None else n_out
    _, maps = run_on_image(_AllMaps(body), n_in, body)
    _check_maps(maps, model_fn)
    model = UNet(body, maps, n_out, stats, norm).to(out.dtype)
    loss_func, splitter = loss_func or nn.CrossEntropyLoss(), splitter or split_layers
    learn = Learner(dls, model, loss_func, splitter=splitter, metrics=metrics, **learner_kwargs)
    if is_pretrained:
        learn.freeze()
    return learn


class UNet(nn.Module):
    """A U-Net: the encoder's feature maps of each size go to the decoder's block for that size.

    Before the encoder halves the size its maps are kept. The decoder goes back from the last maps: each block enlarges
    them (nearest neighbours) to the size of the maps that were kept, joins both, and has two 3 x 3 convolutions with
    ReLU (He et al. 2015 for their initialization). An encoder that begins by halving keeps the image itself.

    Args:
        body: the encoder: `nn.Sequential`s, one inside the other, of layers that are called one after the other.
        maps: a small image, and the output of each layer of the encoder for it.
        n_out: scores of each pixel.
        normalize: a layer for the images, or `None`.
        norm: makes a norm layer for a number of channels, or `None`.
    """

    def __init__(
        self,
        body: nn.Module,
        maps: Sequence[Tensor],
        n_out: int,
        normalize: nn.Module | None = None,
        norm: Callable[[int], nn.Module] | None = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        self.normalize, self.body = normalize or nn.Identity(), body
        self.kept = [i for i, (one, two) in enumerate(pairwise(maps)) if round(one.shape[-1] / two.shape[-1]) > 1]
        width, blocks = maps[-1].shape[1], []
        for i in reversed(self.kept):
            joined = width + maps[i].shape[1]
            width = max(_LEAST_CHANNELS, maps[i].shape[1])
            blocks.append(nn.Sequential(*_convolution(joined, width, norm), *_convolution(width, width, norm)))
        self.decoder = nn.ModuleList([*blocks, nn.Conv2d(width, n_out, 1)])

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (n, classes, height, width) for the pixels of images (n, channels, height, width)."""
        size, x = x.shape[-2:], self.normalize(x)
        skips = []
        for i, part in _uncut(self.body, self.kept):
            if i in self.kept:
                skips.append(x)
            x = part(x)
        *blocks, last = self.decoder
        for block in blocks:
            skip = skips.pop()
            x = block(torch.cat([F.interpolate(x, skip.shape[-2:]), skip], 1))
        x = last(x)
        return x if x.shape[-2:] == size else F.interpolate(x, size)


def _convolution(n_in: int, n_out: int, norm: Callable[[int], nn.Module] | None) -> list[nn.Module]:
    convolution = nn.Conv2d(n_in, n_out, 3, padding=1, bias=norm is None)
    nn.init.kaiming_normal_(convolution.weight)
    return [convolution, *([] if norm is None else [norm(n_out)]), nn.ReLU()]


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    "Yield the layers that a chain calls one after the other."
    if type(module).forward is nn.Sequential.forward:
        for part in module.children():
            yield from _layers(part)
    else:
        yield module


def _uncut(module: nn.Module, cuts: Sequence[int], start: int = 0) -> Iterator[tuple[int, nn.Module]]:
    """Yield the largest parts of a chain that have no cut inside, with the number of the first layer of each.

    They are called as a whole, as a unit of a sharded model has to be.
    """
    n = len([*_layers(module)])
    if n and not any(start < cut < start + n for cut in cuts):
        yield start, module
    elif n:
        for part in module.children():
            yield from _uncut(part, cuts, start)
            start += len([*_layers(part)])


class _AllMaps(nn.Module):
    "Returns an image, and the output of each layer of the encoder for it."

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = [x]
        for layer in _layers(self.body):
            maps.append(layer(maps[-1]))
        return maps


def _check_maps(maps: Sequence[Tensor], model_fn: Any) -> None:
    "Refuse an encoder that is no chain of layers which make feature maps smaller."
    are_maps = all(isinstance(x, Tensor) and x.ndim == 4 for x in maps)
    widths = [x.shape[-1] for x in maps] if are_maps else [0]
    if len(maps) < 3 or any(one < two for one, two in pairwise(widths)) or widths[-1] * 2 > widths[0]:
        raise ValueError(
            f"unet_learner cannot take {getattr(model_fn, '__name__', model_fn)!r} apart: the encoder has to be a "
            "chain (nn.Sequential) of layers that make feature maps (n, channels, height, width) smaller and smaller, "
            "as ResNet, ConvNeXt, EfficientNet, DenseNet, MobileNet, RegNet and VGG do; choose it with cut=, a "
            "function of the network that returns such a chain (errors.html#vision-model)"
        )
