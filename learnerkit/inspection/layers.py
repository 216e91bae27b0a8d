"""The layers of a model in order, with rates that fall from the last of them to the first."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from torch import nn

from learnerkit import arguments, optim
from learnerkit.text import did_you_mean, first_few
from learnerkit.utils import unwrap


def layer_decay(model: nn.Module, decay: float = 0.75, blocks: str | None = None) -> list[dict[str, Any]]:
    """Return a group of parameters for each layer of a model, with rates that fall from the last one to the first.

    It is a splitter: `Learner(..., splitter=layer_decay)`, or `partial(layer_decay, decay=0.65)`. The last layer has
    the rate of the fit, and each one before it `decay` times the rate of the next. ELECTRA (Clark et al. 2020,
    https://arxiv.org/abs/2003.10555) and BEiT (Bao et al. 2021, https://arxiv.org/abs/2106.08254) are fine-tuned so.

    A model of timm says what its layers are, by `group_matcher`. In other models each block is a layer, and so are all
    parameters that are registered before the first block (embeddings), and all after the last one (the head). Blocks
    are the entries of the model's `nn.ModuleList`, as in transformers. Where there is none they are those of its
    `nn.Sequential` modules, also of one inside another; there a norm belongs to the layer before it.

    Args:
        model: any module. A part of a model has layers of its own, and lists of groups can be added: `lambda model:
            layer_decay(model.encoder) + [model.head.parameters()]`.
        decay: from the rate of a layer to that of the one before it; above 0 and at most 1.
        blocks: the name of the list of blocks, such as "encoder.layer", in a model that has several.

    Raises:
        ValueError: another `decay`, no list of that name, or a model without blocks or with several lists of them.
    """
    arguments.check_number("decay", decay, lambda d: 0 < d <= 1, "a number above 0 and at most 1")
    model = unwrap(model)
    is_timms = any(base.__module__.partition(".")[0] == "timm" for base in type(model).__mro__)
    matcher: Any = getattr(model, "group_matcher", None)
    if blocks is None and is_timms and matcher is not None:
        from timm.models import group_parameters

        named, numbered = dict(model.named_parameters()), group_parameters(model, matcher(coarse=False))
        layers = [[named[name] for name in numbered[i]] for i in sorted(numbered)]
    else:
        layers = _by_position(model, _blocks(model, blocks))
    return [{"params": layer, "lr_scale": decay ** (len(layers) - 1 - i)} for i, layer in enumerate(layers)]


def _by_position(model: nn.Module, blocks: list[nn.Module]) -> list[list[nn.Parameter]]:
    """Return the parameters of each block, and those between blocks, in the order in which they are registered."""
    # What several blocks share is the first one's, as in `model.parameters()`.
    owner = {id(p): i for i in reversed(range(len(blocks))) for p in blocks[i].parameters()}
    norms, layers = set(map(id, optim.norms(model))), list[list[nn.Parameter]]()
    for _, run in groupby(model.parameters(), key=lambda p: owner.get(id(p))):
        layer = list(run)
        if layers and all(id(p) in norms for p in layer):
            layers[-1] += layer
        else:
            layers.append(layer)
    return layers


def _blocks(model: nn.Module, name: str | None) -> list[nn.Module]:
    kind = type(model).__name__
    if name is not None:
        lists = {key: m for key, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)}
        if name not in lists:
            names = [key or "'' (the model itself)" for key in lists]
            raise ValueError(
                f"got blocks={name!r}; the lists of {kind} are {first_few(names) or 'none'}{did_you_mean(name, lists)}"
            )
        return _entries(lists[name])
    by_name = dict(_lists(model, nn.ModuleList))
    if len(by_name) > 1:
        raise ValueError(
            f"{kind} has several lists of blocks: {first_few(by_name)}. Say by blocks= which of them is divided into "
            "layers, or make groups of each part of the model: layer_decay(model.encoder) + layer_decay(model.decoder)"
            " (errors.html#parameter-groups)"
        )
    by_name = by_name or dict(_lists(model, nn.Sequential))
    if not by_name:
        raise ValueError(
            f"{kind} has no nn.ModuleList and no nn.Sequential of several blocks, whose order layer_decay could take; "
            "write a splitter that returns dicts, [{'params': ..., 'lr_scale': 0.75}, ...]"
            " (errors.html#parameter-groups)"
        )
    return [block for each in by_name.values() for block in _entries(each)]


def _lists(module: nn.Module, kind: type, name: str = "") -> Iterator[tuple[str, Any]]:
    """Return the outermost lists of this kind with several entries that have parameters, by their names."""
    if isinstance(module, kind) and sum(next(part.parameters(), None) is not None for part in module.children()) > 1:
        yield name, module
    else:
        for key, part in module.named_children():
            yield from _lists(part, kind, f"{name}.{key}".lstrip("."))


def _entries(container: nn.Module) -> list[nn.Module]:
    """Return the blocks of a list; an `nn.Sequential` in it, such as a stage of a ResNet, is replaced by its blocks."""
    parts = list(container.children())
    if not isinstance(container, nn.Sequential):
        return parts
    return [block for part in parts for block in (_entries(part) if type(part) is nn.Sequential else [part])]
