"""Image classifiers made of pretrained networks: a pretrained body and a new head.

`vision_learner` takes torchvision's builders, or any module. The model is a plain `nn.Sequential` of `normalize`,
`body` and `head`, and the Learner a plain Learner.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import takewhile
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from learnerkit import distributed
from learnerkit.arguments import check_loaders
from learnerkit.data.loaders import DataLoaders
from learnerkit.data.weights import class_loss
from learnerkit.learner import Learner
from learnerkit.marks import collective
from learnerkit.metrics import accuracy, mae
from learnerkit.text import did_you_mean
from learnerkit.utils import listify, training_modes, unwrap
from learnerkit.values import describe

IMAGENET_STATS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation of each channel over ImageNet, for images from 0 to 1."""


@collective
def vision_learner(
    dls: DataLoaders,
    model_fn: Callable[..., nn.Module] | str | nn.Module,
    n_out: int | None = None,
    weights: Any = None,
    metrics: Any = None,
    cut: int | Callable[[nn.Module], nn.Module] | None = None,
    concat_pool: bool = True,
    *,
    loss_func: Callable[..., Tensor] | None = None,
    normalize: bool | tuple[Sequence[float], Sequence[float]] = True,
    n_in: int = 3,
    hidden: int | Sequence[int] = (512,),
    dropout: float = 0.5,
    custom_head: nn.Module | None = None,
    splitter: Callable[[nn.Module], Iterable[Any]] | None = None,
    pretrained: bool | None = None,
    model_kwargs: dict[str, Any] | None = None,
    class_weights: Any = None,
    **learner_kwargs: Any,
) -> Learner:
    """Make a Learner for images, whose model is the body of a known network with a new head.

    A pretrained body starts frozen except for its norm layers, so `learn.fit` trains the head; `learn.fine_tune` trains
    first the head and then both. If weights are downloaded, every rank must reach this.

    Args:
        dls: batches of images (batch, channels, height, width), floats from 0 to 1 or uint8, and targets.
        model_fn: a builder of torchvision (`resnet18`), its name (`"resnet18"`), the name of a network of timm, or a
            module, which is copied. A name that both know is torchvision's; `"timm:resnet18"` is timm's. A line that is
            printed says whose network it is, and whether it is pretrained.
        n_out: outputs; by default the number of `classes` of the training set, or the `num_classes` of a metric; for
            numbers and points as many as a target has.
        weights: the weights to load, as torchvision takes them ('DEFAULT', 'IMAGENET1K_V1', a member of the enum); of a
            network of timm 'DEFAULT', with the tag in its name ("resnet18.a1_in1k") or timm's own choice; `None`: a new
            network.
        metrics: as for `Learner`; by default `accuracy` for several classes, and `mae` for numbers and points.
        cut: the body: a number of the network's first children, or a function of the network that returns it; by
            default everything before its pooling and its classifier.
        concat_pool: pool the body's feature maps by average and maximum, concatenated, instead of by average only. For
            points they are averaged in each of 4 x 4 parts of the picture.
        loss_func: default `nn.CrossEntropyLoss()`; for several classes (`ImageData(targets="classes")`)
            `nn.BCEWithLogitsLoss()`, and for numbers and points `nn.MSELoss()`, of outputs that begin at their mean and
            have their standard deviation (`Scaled`).
        normalize: (mean, std) of each channel for the model's first layer (`Normalize`); `True`: those that the weights
            were trained with, for a module or a new network of torchvision ImageNet's; `False`: no such layer.
        n_in: channels of the images. Unless it is 3 the first convolution is changed: one channel gets the sum of the
            three channels' weights, two get the first two times 1.5, and those beyond three start at zero; `normalize`
            then uses the average of its numbers. With 3, gray images of one channel are repeated.
        hidden: the size of the head's hidden layer, or the sizes of several.
        dropout: before the head's last layer; half of it before each hidden layer.
        custom_head: a module that takes the body's output, feature maps or vectors, instead of the default head.
        splitter: parameter groups; default `split_layers`.
        pretrained: whether the body is pretrained, so that it starts frozen; by default it is with `weights` and for
            a module.
        model_kwargs: for the builder, such as `{"image_size": 64}` of torchvision's vision transformers.
        class_weights: as for `tabular_learner`.
        learner_kwargs: for `Learner`.

    Raises:
        TypeError, ValueError: arguments that cannot work, a network whose classifier is not found, no `n_out`.
        RuntimeError: the weights cannot be downloaded.
    """
    check_loaders(dls)
    if dls.targets in ("boxes", "masks"):
        raise ValueError(
            f"got loaders with {dls.targets}; vision_learner predicts classes, numbers and points. Masks are for "
            "unet_learner, boxes for a detector such as torchvision's"
        )
    body, out, stats, is_pretrained = known_body(
        model_fn, weights, cut, normalize, n_in, pretrained, model_kwargs or {}
    )
    if custom_head is None:
        scaled = _scaled(dls, n_out)
        if n_out is None:
            n_out = count_classes(dls, metrics) if scaled is None else scaled.mean.numel()
        n_features = out.shape[1]
        pool: nn.Module | None = None
        if out.ndim == 4 and dls.targets == "points":
            n_features *= _GRID**2
            pool = nn.AdaptiveAvgPool2d(_GRID)
        elif out.ndim == 4:
            pool = ConcatPool() if concat_pool else nn.AdaptiveAvgPool2d(1)
        custom_head = create_head(n_features, n_out, hidden, dropout, pool)
        if scaled is not None:
            custom_head.append(scaled)
        custom_head.to(out.dtype)
    parts = {} if stats is None else {"normalize": stats.to(out.dtype)}
    model = nn.Sequential(OrderedDict(parts | {"body": body, "head": custom_head}))
    loss, metric = _BY_TARGETS.get(dls.targets, (nn.CrossEntropyLoss, None))
    loss_func = class_loss(dls, loss_func, loss(), class_weights)
    n_weights = None if class_weights is None else len(getattr(loss_func, "weight", ()))
    if n_weights is not None and n_out not in (None, n_weights):
        raise ValueError(
            f"got class_weights= for {n_weights} classes and n_out={n_out}; leave n_out out, or name "
            "all classes by DataLoaders(classes=[...])"
        )
    metrics = metric if metrics is None else metrics
    learn = Learner(dls, model, loss_func, splitter=splitter or split_layers, metrics=metrics, **learner_kwargs)
    if is_pretrained:
        learn.freeze()
    return learn


_BY_TARGETS: dict[str | None, tuple[Callable[..., nn.Module], Any]] = {
    "classes": (nn.BCEWithLogitsLoss, accuracy), "numbers": (nn.MSELoss, mae), "points": (nn.MSELoss, mae),
}  # fmt: skip
"""The loss and the metric for the targets of `ImageData`."""

_GRID = 4
"""The side of the grid to which a head for points pools feature maps; one value for all would lose their place."""


@collective
def known_body(
    model_fn: Any, weights: Any, cut: Any, normalize: Any, n_in: int, pretrained: bool | None, model_kwargs: dict
) -> tuple[nn.Module, Tensor, "Normalize | None", bool]:
    """Return a known network's body, its output for a small image, the normalizing layer, and if it is pretrained.

    Args:
        model_fn, weights, cut, normalize, n_in, pretrained, model_kwargs: as for `vision_learner`.
    """
    if not isinstance(model_fn, nn.Module):
        network, weights = _build(model_fn, weights, model_kwargs, pretrained)
    elif weights is not None or model_kwargs:
        raise TypeError("weights= and model_kwargs= are for a builder; the given module has its weights already")
    else:
        network = copy.deepcopy(model_fn)
    body, out = _make_body(network, cut, n_in)
    _adapt_channels(body, n_in)
    layer = _normalizing(normalize, weights, network, n_in)
    if pretrained is None:
        pretrained = isinstance(model_fn, nn.Module) or weights is not None
    return body, out, layer, pretrained


# The parts of the model


class Normalize(nn.Module):
    """Subtracts the mean of each channel and divides by its standard deviation; uint8 images are first scaled to 0..1.

    Gray images of one channel are repeated to as many channels as there are means.

    Args:
        mean, std: a number for each channel.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).reshape(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).reshape(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize images (batch, channels, height, width)."""
        if x.dtype == torch.uint8:
            x = x.to(self.mean.dtype) / 255
        return (x - self.mean) / self.std


class Scaled(nn.Module):
    """Gives outputs the shape and the scale of numbers: mean + std * x.

    Args:
        mean, std: of the numbers, of the shape of one target, such as (k, 2) for k points.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean.clone())
        self.register_buffer("std", std.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs (batch, n) as numbers (batch, ...)."""
        return self.mean + self.std * x.reshape(-1, *self.mean.shape)


class ConcatPool(nn.Module):
    """Pools feature maps by average and maximum: (batch, n, height, width) to (batch, 2 n, 1, 1)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.adaptive_avg_pool2d(x, 1), F.adaptive_max_pool2d(x, 1)], dim=1)


def create_head(
    n_features: int,
    n_out: int,
    hidden: int | Sequence[int] = (512,),
    dropout: float = 0.5,
    pool: nn.Module | None = None,
) -> nn.Sequential:
    """Make a head: pooling, then blocks of BatchNorm, dropout and a linear layer, with ReLU between them.

    The linear layers have Kaiming normal initialization (He et al. 2015, https://arxiv.org/abs/1502.01852) and no bias,
    since the BatchNorm before each has one.

    Args:
        n_features: the number of the body's feature maps, or the length of its vectors.
        n_out: outputs.
        hidden: the size of the hidden layer, or the sizes of several.
        dropout: before the last layer; half of it before the others.
        pool: the pooling, for a body that returns feature maps.
    """
    layers = [] if pool is None else [pool, nn.Flatten()]
    size = n_features * (2 if isinstance(pool, ConcatPool) else 1)
    for next_size in listify(hidden):
        layers += [nn.BatchNorm1d(size), nn.Dropout(dropout / 2), _linear(size, next_size), nn.ReLU()]
        size = next_size
    return nn.Sequential(*layers, nn.BatchNorm1d(size), nn.Dropout(dropout), _linear(size, n_out))


def _linear(n_in: int, n_out: int) -> nn.Linear:
    layer = nn.Linear(n_in, n_out, bias=False)
    nn.init.kaiming_normal_(layer.weight)
    return layer


def split_layers(model: nn.Module) -> list[list[nn.Parameter]]:
    """Return the parameters of the early body, the late body and the head of a model made by `vision_learner`.

    The late body of a ResNet begins with its third stage, that of another network with the second half of its blocks.
    """
    model = unwrap(model)
    network = model.get_submodule("body")
    body = dict.fromkeys(network.parameters())
    stages = dict(network.named_children())
    if "layer3" in stages:
        units = [list(stages["layer3"].parameters())]
    else:
        units = list(_units(network, _n_params(network) / 2))
    first = units[len(units) // 2][0] if units else None
    early = list(takewhile(lambda p: p is not first, body))
    return [early, list(body)[len(early) :], [p for p in model.parameters() if p not in body]]


def _units(module: nn.Module, limit: float) -> Iterator[list[nn.Parameter]]:
    "Yield the parameters of each block; containers, and modules with more than `limit` parameters, are divided."
    own, whole = list(module.parameters(recurse=False)), list(module.parameters())
    container = type(module) in (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    is_block = not container and _n_params(module) <= limit
    if params := whole if is_block else own:
        yield params
    for part in () if is_block else module.children():
        yield from _units(part, limit)


# The network


@collective
def _build(builder: Any, weights: Any, model_kwargs: dict, pretrained: bool | None) -> tuple[nn.Module, Any]:
    "Return the network, and the member of torchvision's enum for `weights`."
    builder = _named(builder) if isinstance(builder, str) else builder
    if not callable(builder):
        raise TypeError(f"got model_fn={builder!r}; it is a builder of torchvision, its name, or an nn.Module")
    source = None  # A user's own builder may load weights by itself.
    if isinstance(builder, _OfTimm):
        source = "timm"
    elif (getattr(builder, "__module__", None) or "").startswith("torchvision."):
        source = "torchvision"
    if weights is None:
        if pretrained and model_kwargs.get("weights") is None and source:
            raise ValueError(
                f"got pretrained=True and no weights: {_name(builder)} would be a new network with random weights, "
                "which would stay frozen; say which to load, such as weights='DEFAULT'"
            )
        network = builder(**model_kwargs)
    else:
        weights = _find_weights(builder, weights)
        # One process on each machine downloads, then the others read its file; every rank must reach this.
        network = distributed.rank0_first(_load, builder, weights, model_kwargs, per_node=True)
    if not isinstance(network, nn.Module):
        raise TypeError(f"model_fn made a {type(network).__name__}; it must make an nn.Module")
    if source and distributed.is_main():
        loaded = weights or model_kwargs.get("weights")
        if weights and source == "timm":
            loaded = cast(dict, network.pretrained_cfg)["tag"]
        said = f"pretrained weights: {loaded}" if loaded else "random weights; weights='DEFAULT' loads pretrained ones"
        print(f"{_name(builder)} of {source} has {said}")
    return network, weights


def _named(name: str) -> Callable:
    "Return the builder of torchvision, or else of timm, that has this name."
    from torchvision import models

    names = models.list_models(module=models)
    of_timm = name.removeprefix("timm:")
    if of_timm == name and name in names:
        return models.get_model_builder(name)
    if find_spec("timm"):
        import timm

        if timm.is_model(of_timm):
            return _OfTimm(of_timm)
        names += timm.list_models()
    near = did_you_mean(of_timm, names)
    raise ValueError(
        f"no classifier {name!r}{near}; there are torchvision.models.list_models() and, where timm "
        "is installed, timm.list_models()"
    )


class _OfTimm:
    "A builder of timm, called as one of torchvision."

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, weights: Any = None, **model_kwargs: Any) -> nn.Module:
        import timm

        return timm.create_model(self.__name__, pretrained=weights is not None, **model_kwargs)


def _find_weights(builder: Callable, weights: Any) -> Any:
    from torchvision import models

    if isinstance(builder, _OfTimm):
        if weights != "DEFAULT":
            raise ValueError(
                f"got weights={weights!r}; of timm they are 'DEFAULT', and a tag belongs to the name: "
                f"'{_name(builder).partition('.')[0]}.{weights}'"
            )
        return weights
    try:
        known = models.get_model_weights(builder)
    except ValueError:
        return weights  # a user's own builder checks them itself
    try:
        return known.verify(weights)
    except (KeyError, TypeError):
        names = list(known.__members__)
        near = did_you_mean(weights, names)
        raise ValueError(f"got weights={weights!r}{near}; {_name(builder)} has {', '.join(names)}") from None


def _load(builder: Callable, weights: Any, model_kwargs: dict) -> nn.Module:
    try:
        return builder(weights=weights, **model_kwargs)
    except OSError as e:  # such as errors of the connection
        put = f"put the file {getattr(weights, 'url', weights)} into {torch.hub.get_dir()}/checkpoints"
        if isinstance(builder, _OfTimm):
            put = "say where the file is by model_kwargs={'pretrained_cfg_overlay': {'file': ...}}"
        raise RuntimeError(
            f"the weights of {_name(builder)} could not be downloaded ({e}). Without a connection, {put}, pass a "
            "module that has its weights, or train a new network with weights=None"
        ) from e


def _name(builder: Callable) -> str:
    return getattr(builder, "__name__", repr(builder))


# The body: everything before the classifier

_FEATURES = ("forward_features", "extract_features")
"""Methods of other libraries' networks that return their feature maps."""

_NOT_IN_BODY = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.AvgPool2d, nn.Flatten, nn.Dropout, nn.Identity)


class MethodBody(nn.Module):
    """A network without its classifier, whose feature maps are returned by the method of this name."""

    def __init__(self, network: nn.Module, method: str) -> None:
        super().__init__()
        self.network, self.method = network, method

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self.network, self.method)(x)


def _make_body(network: nn.Module, cut: int | Callable | None, n_in: int) -> tuple[nn.Module, Tensor]:
    "Return the body, and its output for a small image."
    if cut is None:
        body, out = _without_classifier(network, n_in)
    else:
        if isinstance(cut, int):
            body = _chain(network, [name for name, _ in network.named_children()][:cut])
        elif callable(cut):
            body = cut(network)
        else:
            raise TypeError(f"got cut={cut!r}; it is a number of children, or a function of the network")
        if not isinstance(body, nn.Module) or not any(True for _ in body.parameters()):
            raise ValueError(f"cut={cut!r} left {describe(body)} without parameters; {_children(network)}")
        _, out = run_on_image(body, n_in, network)
    if not isinstance(out, Tensor) or out.ndim not in (2, 4):
        raise ValueError(
            f"the body of {type(network).__name__} returns a {describe(out)}; it must return feature maps (batch, n, "
            f"height, width) or vectors (batch, n); {_hint(network)}"
        )
    return body, out


def _without_classifier(network: nn.Module, n_in: int) -> tuple[nn.Module, Any]:
    """Return the part of a network that makes its classifier's input, if possible as feature maps, and its output.

    The classifier is the last child with parameters that the network calls. The output of a candidate for the body
    must be, after pooling, the classifier's input; if none fits, the body is the network without its classifier.
    """
    children = dict(network.named_children())
    calls: list[tuple[str, tuple]] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: calls.append((name, args)))
        for name, module in network.named_modules()
        if name
    ]
    hooks.append(network.register_forward_pre_hook(lambda *_: calls.clear()))  # an image may have been too small
    try:
        image, _ = run_on_image(network, n_in, network)
    finally:
        for hook in hooks:
            hook.remove()
    called = [(name, args) for name, args in calls if name in children and _n_params(children[name])]
    classifier, args = called[-1] if called else ("", ())
    if not args or _n_params(children[classifier]) == _n_params(network):
        raise ValueError(f"found no classifier among the children of {type(network).__name__}; {_hint(network)}")
    features = args[0]
    before = [name for name, _ in calls if name in children]
    for body, rest in _candidates(network, before[: before.index(classifier)]):
        try:
            out = _run(body, image)
            fits = out.ndim == 4 and any(_equal(x, features) for x in (out, out.mean((2, 3)), _run(rest, out)))
        except Exception:  # any error, since the candidate's calls may not fit each other
            continue
        if fits:
            if isinstance(body, MethodBody):
                setattr(network, classifier, nn.Identity())
            return body, out
    used = {name.split(".")[0] for name, _ in calls}
    unused = [name for name, child in children.items() if _n_params(child) and name not in used]
    if unused:  # such as the auxiliary classifiers of GoogLeNet, which are used only in training
        raise ValueError(
            f"{type(network).__name__} does not use {', '.join(unused)} in evaluation (if those are auxiliary "
            f"classifiers, build it without: model_kwargs={{'aux_logits': False}}); {_hint(network)}"
        )
    setattr(network, classifier, nn.Identity())
    return network, _run(network, image)


def _candidates(network: nn.Module, before: list[str]) -> Iterator[tuple[nn.Module, nn.Module]]:
    "Yield pairs of a body and the modules between it and the classifier; `before` names those before the classifier."
    kept = list(dict.fromkeys(before))
    rest: list[str] = []
    while kept and isinstance(network.get_submodule(kept[-1]), _NOT_IN_BODY):
        rest.insert(0, kept.pop())
    after = _chain(network, rest)
    if kept:
        yield _chain(network, kept), after
        chain = _chain(network, kept)
        chain.add_module("last_relu", nn.ReLU())  # DenseNet has it in `forward`.
        yield chain, after
    for method in _FEATURES:
        if hasattr(network, method):
            yield MethodBody(network, method), after


def _chain(network: nn.Module, names: list[str]) -> nn.Sequential:
    "Chain some children of a network, under their own names."
    return nn.Sequential(OrderedDict((name, network.get_submodule(name)) for name in names))


def _equal(x: Tensor, features: Tensor) -> bool:
    x, features = x.flatten(1), features.flatten(1)
    return x.shape == features.shape and torch.allclose(x, features, 1e-3, 1e-4 * float(features.abs().max()))


def _run(module: nn.Module, x: Tensor) -> Any:
    "Return a module's output in evaluation; its modes and statistics and the random state do not change."
    gpus = {p.device for p in module.parameters() if p.device.type == "cuda"}
    with training_modes(module), torch.no_grad(), torch.random.fork_rng(gpus):
        return module.eval()(x)


def run_on_image(module: nn.Module, n_in: int, network: nn.Module) -> tuple[Tensor, Any]:
    """Return an image that the module accepts, of the network's own size or else 64 or 224 pixels, and its output."""
    conv = _first_conv(module)
    like = next(module.parameters(), torch.empty(0))
    own_size = getattr(network, "image_size", None)
    for size in (own_size,) if isinstance(own_size, int) else (64, 224):
        # Noise of both signs: two bodies could give the same output for a blank or a positive image.
        noise = torch.Generator().manual_seed(0)
        image = torch.randn(1, conv.in_channels if conv else n_in, size, size, generator=noise).to(like)
        try:
            return image, _run(module, image)
        except Exception as e:  # any error, since the image may be too small
            error = e
    raise ValueError(
        f"could not run {type(network).__name__} on a {describe(image)}: {type(error).__name__}: {error}; "
        f"{_hint(network)}"
    ) from error


def _hint(network: nn.Module) -> str:
    return f"choose the body with cut=, a number of children or a function of the network; {_children(network)}"


def _children(network: nn.Module) -> str:
    return f"its children are {', '.join(name for name, _ in network.named_children()) or 'none'}"


def _n_params(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# Channels and classes


def _first_conv(module: nn.Module) -> nn.Conv2d | None:
    return next((m for m in module.modules() if isinstance(m, nn.Conv2d)), None)


def _adapt_channels(body: nn.Module, n_in: int) -> None:
    "Make the first convolution take images of `n_in` channels."
    conv = _first_conv(body)
    if conv is None or conv.in_channels == n_in:
        return
    if conv.in_channels != 3 or conv.groups != 1 or n_in < 1:
        raise ValueError(f"the network takes images of {conv.in_channels} channels; got n_in={n_in}")
    old = conv.weight.detach()
    if n_in == 1:
        new = old.sum(1, keepdim=True)
    elif n_in == 2:
        new = old[:, :2] * 1.5
    else:
        new = torch.cat([old, old.new_zeros(len(old), n_in - 3, *old.shape[2:])], 1)
    conv.in_channels, conv.weight = n_in, nn.Parameter(new)


def _normalizing(normalize: Any, weights: Any, network: nn.Module, n_in: int) -> Normalize | None:
    "Return the layer that normalizes images of `n_in` channels, if there is to be one."
    if normalize is False:
        return None
    if normalize is True:
        transform: Any = weights.transforms() if hasattr(weights, "transforms") else None
        has_stats = hasattr(transform, "mean") and hasattr(transform, "std")
        of_timm = getattr(network, "pretrained_cfg", None) or {}
        known = (of_timm["mean"], of_timm["std"]) if "mean" in of_timm else IMAGENET_STATS
        mean, std = map(list, (transform.mean, transform.std) if has_stats else known)
        if len(mean) != n_in:
            mean, std = ([sum(numbers) / len(numbers)] * n_in for numbers in (mean, std))
        return Normalize(mean, std)
    try:
        mean, std = ([float(number) for number in numbers] for numbers in normalize)
    except (TypeError, ValueError):
        raise TypeError(f"got normalize={normalize!r}; it is True, False, or (mean, std) of each channel") from None
    if not len(mean) == len(std) == n_in or not all(number > 0 for number in std):
        raise ValueError(f"got normalize={normalize!r}; n_in={n_in} needs as many means, and stds above 0")
    return Normalize(mean, std)


def _scaled(dls: DataLoaders, n_out: int | None) -> Scaled | None:
    "Return the last layer of a head for numbers or points; `None` for other targets."
    if dls.targets not in ("numbers", "points"):
        return None
    if dls.train_ds is not None:
        mean, std = dls.train_ds.scale()
    elif n_out is None:
        raise ValueError(f"how many {dls.targets}? The learner has no data; pass n_out=")
    else:  # The weights that are loaded later have the numbers.
        mean = torch.zeros(n_out).reshape((-1, 2) if dls.targets == "points" else -1)
        std = torch.ones_like(mean)
    if n_out not in (None, mean.numel()):
        raise ValueError(f"got n_out={n_out}; the targets have {mean.numel()} numbers, of shape {tuple(mean.shape)}")
    return Scaled(mean, std)


def count_classes(dls: DataLoaders, metrics: Any) -> int:
    """Return the number of outputs that the loaders' classes, or a metric, ask for."""
    if dls.classes is not None:
        return len(dls.classes)
    for metric in metrics.values() if isinstance(metrics, dict) else listify(metrics):
        if isinstance(getattr(metric, "num_classes", None), int):
            return metric.num_classes
    raise ValueError("how many outputs? The training set has no `classes` and no metric has `num_classes`; pass n_out=")
