"""The advice for the commonest mistakes, by the error, the failing module and its inputs; '' if there is none."""

import re
from collections.abc import Iterator, Mapping
from inspect import Parameter, signature
from math import prod
from traceback import walk_tb
from types import FrameType
from typing import Any

from torch import Tensor, autograd, float64, int64, is_grad_enabled, nn, uint8
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from learnerkit import distributed
from learnerkit.data.loaders import DataLoaders, named_inputs, unknown_keys
from learnerkit.data.order import keep_seeds
from learnerkit.state import Learner
from learnerkit.text import first_few
from learnerkit.utils import unwrap
from learnerkit.values import describe, entries, tensors_in

NOT_ALONE = "choose another batch size, or leave the last batch out: DataLoaders.from_datasets(..., drop_last=True)"
SECOND_TIME = (
    "a block computed something else the second time: it depends on more than its inputs, such as a cache; in a model "
    "of transformers set model.config.use_cache = False"
)
_FASTAIS = ("set_hyper", "set_hypers", "hypers", "set_freeze")  # methods that only fastai's optimizers have
_OF_LOADERS = {  # attributes of fastai's loaders, with what has the same value here
    "one_batch": "learn.dls.one_batch(), or next(iter(learn.dls.valid))", "bs": "learn.dls.train.batch_size",
    "n": "len(learn.dls.train.dataset)", "c": "len(learn.dls.classes)", "vocab": "learn.dls.classes",
}  # fmt: skip
_BY_CLASS = ("cross_entropy", "nll_loss", "multi_margin_loss")  # losses whose targets are the numbers of classes
_ALONE = "Expected more than 1 value per channel"  # the beginning of torch's message
_REST = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_OF_A_TYPE = "dtype|Input type|scalar type|Double|Byte"  # words of errors about types
_OF_A_LIST = r"not (list|tuple)|'(list|tuple)' object"
_OF_A_DEVICE = "(same|expected) device"
_NO_SAMPLE = r"found <class '([\w.]+)'>|(NoneType)"  # words of torch's default_collate


def _of_attribute(learn: "Learner", obj: Any, name: str) -> str:
    """Advise about an attribute that an object does not have, and the one in its place in fastai has."""
    if isinstance(obj, Optimizer) and name in _FASTAIS:
        return (
            "learn.opt is a plain torch optimizer: `for group in self.opt.param_groups: group['lr'] = 0.1`; a schedule "
            "of any hyper-parameter is ParamScheduler({'lr': SchedCos(0.1, 0)})"
        )
    if isinstance(obj, Optimizer) and name.endswith("_hooks"):
        return (
            f"{type(obj).__name__} has not called Optimizer.__init__, so it lacks the hooks by which others hear of "
            "its steps: after it is made call torch.optim.Optimizer.__setstate__(opt, {}), which makes them"
        )
    if isinstance(obj, DataLoader | DataLoaders) and name in _OF_LOADERS:
        return f"these are torch's loaders: write {_OF_LOADERS[name]}"
    if type(obj) is float and hasattr(Tensor, name):
        return f"it is a plain float, as learn.smooth_loss and all numbers of learn.recorder are: leave .{name}() out"
    if obj is learn.pred and hasattr(learn.output, name):
        return f"learn.pred is the logits alone; learn.output is the whole output of the model: self.output.{name}"
    metrics = learn.metrics
    if any(obj is metric for metric in (metrics.values() if isinstance(metrics, Mapping) else metrics)):
        return (
            "learn.metrics are as the Learner got them, and the Recorder resets and computes them: their columns are "
            "learn.recorder.metric_names, and learn.recorder.log has the values"
        )
    return ""


def of_run(learn: "Learner", error: Exception, text: str) -> str:
    """Advise about an error whose text, or what a callback has set, alone says where it came from."""
    for name in ("xb", "yb"):
        if isinstance(value := getattr(learn, name), Tensor):
            return f"learn.{name} is a tuple, and a callback set {describe(value)}: write learn.{name} = (value,)"
    if not isinstance(learn.dls, DataLoaders):
        return (
            f"a callback has set learn.dls to a {type(learn.dls).__name__}: write learn.dls = DataLoaders(train, valid)"
        )
    if isinstance(error, ValueError) and text.startswith(_ALONE):
        if learn.batch_size != 1:
            return ""
        which = "training" if learn.training else "validation"
        return (
            f"batch {learn.iter} of the {which} loader has one sample, which is too few for the statistics of "
            f"BatchNorm; {NOT_ALONE}"
        )
    if isinstance(error, AttributeError) and error.name and (advice := _of_attribute(learn, error.obj, error.name)):
        return advice
    if isinstance(error, TypeError) and text in [
        f"{type(x).__name__!r} object is not callable" for x in (learn, *learn.cbs)
    ]:
        return (
            "the loop fires the events by itself, and the name of one cannot be given to the Learner or to a callback: "
            "leave the call out, or call the callback's method"
        )
    model = unwrap(learn.model)
    if isinstance(error, TypeError) and f"{type(model).__name__}.train()" in text:
        return (
            f"the Learner calls model.train(True) and model.eval(), as nn.Module has them: give the method `train` of "
            f"{type(model).__name__} another name"
        )
    if isinstance(error, RuntimeError) and distributed.MISMATCH in text:
        return distributed.SAME_CALLS
    if isinstance(error, RuntimeError) and "require grad" in text:
        if not learn.training:
            return (
                "an evaluation computes no gradients: compute what needs them in `with torch.enable_grad():`, or leave "
                "it out, as a loss that takes the keyword `training` can: def loss(pred, target, *, training)"
            )
        if "differentiated" in text:  # by the user's own torch.autograd.grad
            return ""
        if any(frame.f_code is autograd.grad.__code__ for frame, _ in walk_tb(error.__traceback__)):
            return (
                "this is what torch.autograd.grad was given, not the loss; if an optimizer differentiates gradients, "
                "such as AdaHessian, let `_backward` call self.loss_grad.backward(create_graph=True)"
            )
        if not any(p.requires_grad for p in learn.model.parameters()):
            return "all parameters of the model are frozen: learn.unfreeze(), or p.requires_grad_(True) of some of them"
        if not is_grad_enabled():
            return "fit was called where gradients are switched off, as in `with torch.no_grad():`: call it outside"
        return (
            "the loss does not depend on the model's parameters: look for no_grad, detach, .data, .item() or .numpy() "
            "in forward and in the loss"
        )
    names = {cb.name for cb in learn.cbs}
    if "through the graph a second time" in text and "split_batch" in names:
        return (
            "SplitBatch has made the backward pass of the batch already, and the loss depends on tensors that a hook "
            "or the model keeps, of this batch or an earlier one: let the model return them, or detach them"
        )
    recomputes = "activation_checkpointing" in names
    if recomputes and "utils.checkpoint" in text:
        return SECOND_TIME
    if recomputes and "inplace operation" in text:
        return (
            "a block that changes its inputs in place cannot be computed again: write inplace=False in it, or name "
            "others by ActivationCheckpointing(modules=[...])"
        )
    return ""


def of_device(text: str) -> str:
    """Advise about an index that is out of range on a GPU, which cannot be used any more."""
    if "side assert" not in text:
        return ""
    return (
        "an index is out of range on the GPU, most often the number of a class or an id; on the CPU the error says "
        "which: DataLoaders(..., device='cpu')"
    )


def of_call(learn: "Learner", text: str) -> str:
    """Advise about a batch whose entries are not what `forward` takes."""
    model = unwrap(learn.model)
    if f"{type(model).forward.__qualname__}()" not in text or "argument" not in text:
        return ""
    parameters = signature(model.forward).parameters
    takes = f"forward takes {first_few(parameters)}"
    given = named_inputs(learn.batch, learn.xb)
    if given is None:
        which = "all but the last, or as many as DataLoaders(n_inp=...) says"
        if getattr(learn.dl, "only_inputs", False):
            which = "all, as test_dl and predict take inputs without targets; data that have them go into a DataLoader"
        return f"{takes}, and gets {len(learn.xb)} of the batch's entries: {which}"
    extra = tuple(name for name in given if name not in parameters)
    needed = [name for name, p in parameters.items() if p.default is p.empty and p.kind not in _REST]
    if not extra:
        others = first_few(name for name in learn.batch if name not in given)
        return (
            f"{takes}, and of the batch, a dict, it gets {first_few(given) or 'nothing'}; target_keys= and "
            f"ignore_keys= take out {others or 'nothing'}"
        )
    unknown, any_of = unknown_keys(learn.dls, learn.batch), first_few(extra, " or ")
    if lacking := first_few(name for name in needed if name not in given):
        return (
            f"{takes}, and a batch that is a dict gives it each entry by its name, but none is called {lacking}: "
            f"rename {any_of} in the dataset, or put the model into a module whose forward takes {any_of}{unknown}"
        )
    return (
        f"{takes}, and a batch that is a dict gives it each entry by its name, {first_few(extra)} too: "
        f"DataLoaders(target_keys=...) says which are targets, and ignore_keys={extra} leaves entries out{unknown}"
    )


def of_layer(layer: nn.Module, given: tuple, text: str) -> str:
    """Advise about a module that has failed, by its inputs."""
    x = next(tensors_in(given), None)
    if "NoneType" in text and any(part is None for part in given):
        return "a layer got None: has the forward of the layer before it a `return`?"
    if re.search(_OF_A_LIST, text) and any(isinstance(part, list | tuple) for part in given):
        return (
            "the inputs are lists or text, as the dataset yields them: let it yield a tensor for each sample, such as "
            "torch.tensor(x)"
        )
    weight = next((p for p in layer.parameters() if p.is_floating_point()), None)
    apart = x is not None and weight is not None and x.device != weight.device and "Input type" in text
    if apart or re.search(_OF_A_DEVICE, text):
        return (
            "a tensor is on another device than the batch: make it with device=x.device, or by register_buffer, and "
            "keep layers in nn.ModuleList or nn.ModuleDict"
        )
    if x is None:
        return ""
    shape = tuple(x.shape)
    if isinstance(layer, nn.Embedding):
        return _of_ids(layer, x)
    to_weights = x.dtype == float64 or not any(layer.children())  # ids of a module with layers are meant as they are
    if weight is not None and x.dtype != weight.dtype and to_weights and re.search(_OF_A_TYPE, text):
        return _of_type(x, weight)
    if isinstance(layer, nn.Linear) and shape and shape[-1] != layer.in_features:
        size, out = prod(shape[1:]), layer.out_features
        if len(shape) > 2 and size == layer.in_features:
            return f"put nn.Flatten() before the layer, so that it gets (n, {size})"
        flat = f"; after nn.Flatten() it would get {size}" if len(shape) > 2 else ""
        return (
            f"the layer takes {layer.in_features} features and got {shape[-1]}: make it nn.Linear({shape[-1]}, {out}), "
            f"or change what comes before it{flat}"
        )
    channels = getattr(layer, "in_channels", 0)  # a convolution has them
    if not channels or weight is None:
        return ""
    axes = weight.ndim
    if len(shape) == axes - 1:
        return f"the inputs {shape} have no axis of channels: x.unsqueeze(0) in the dataset makes one"
    if len(shape) == axes and shape[1] != channels:
        if shape[-1] == channels:
            order = ", ".join(map(str, (axes - 2, *range(axes - 2))))
            return f"the channels of the inputs {shape} are last, torch's are first: x.permute({order}) in the dataset"
        return f"the layer takes {channels} channels and got {shape[1]}: change its in_channels, or the inputs"
    return ""


def _of_ids(layer: nn.Embedding, x: Tensor) -> str:
    if x.is_floating_point():
        return "an nn.Embedding takes ids, which are whole numbers: x.long() in the dataset"
    rows, (low, high) = layer.num_embeddings, _range(x) or (0, 0)
    if low >= 0 and high < rows:
        return ""
    return (
        f"the ids go from {low} to {high}, and the nn.Embedding has {rows} rows, for ids from 0 to {rows - 1}: give it "
        "more, or number the ids from 0"
    )


def _of_type(x: Tensor, weight: Tensor) -> str:
    got, wanted = _name(x), _name(weight)
    if x.dtype == uint8:
        how = "x.float() / 255 in the dataset"
    elif x.is_floating_point():
        how = f"x.to(torch.{wanted}) in the dataset"
    else:
        how = "x.float() in the dataset, or nn.Embedding if they are ids"
    return f"the layer got {got}, and its weights are {wanted}: {how}"


def of_loss(learn: "Learner", frames: list[FrameType], text: str) -> str:
    """Advise about a loss that has failed, by its inputs."""
    pred, yb = learn.pred, learn.yb
    if learn.output is None and learn.pred is None:
        return "the model returned None: has its forward a `return`?"
    if "positional argument" in text:
        return f"loss_func is called as f(pred, *targets), here with 1 + {len(yb)} arguments"
    if not isinstance(pred, Tensor) and ("be Tensor" in text or f"'{type(pred).__name__}' object has no" in text):
        return "the model returned no tensor: let forward return one, or give a loss_func that takes what it returns"
    if any(isinstance(part, str) for part in _parts(yb)):
        return "the targets are text: let the dataset yield the number of each class, classes.index(name)"
    return of_comparison(frames, text)


def of_comparison(frames: list[FrameType], text: str) -> str:
    """Advise about a loss of torch, wherever it is called, by its inputs."""
    both = (f for f in reversed(frames) if all(isinstance(f.f_locals.get(k), Tensor) for k in ("input", "target")))
    frame = next(both, None)
    if frame is None:
        return ""
    scores, target = frame.f_locals["input"], frame.f_locals["target"]
    if "Complex" in text:
        own = "lambda pred, y: (pred - y).abs().square().mean()"
        return (
            f"this loss takes no complex numbers: give it real ones, such as pred.abs(), or take one of your own: {own}"
        )
    if target.is_floating_point() and not scores.is_floating_point():
        return "loss_func is called as f(pred, target), and takes them the other way round"
    if frame.f_code.co_name in _BY_CLASS:
        return _of_classes(scores, target, text, frame.f_locals.get("ignore_index"))
    if scores.shape != target.shape:
        are_as_many = scores.numel() == target.numel()
        how = ".unsqueeze(1) or .squeeze(1) of one of them" if are_as_many else "change the last layer, or the targets"
        return (
            f"the predictions are {tuple(scores.shape)} and the targets {tuple(target.shape)}; this loss takes equal "
            f"shapes: {how}"
        )
    if not target.is_floating_point():
        return f"the targets are {_name(target)}, and this loss compares numbers: y.float() in the dataset"
    return "this loss takes probabilities: for raw scores use nn.BCEWithLogitsLoss()" if "and 1" in text else ""


def _of_classes(scores: Tensor, target: Tensor, text: str, ignored: int | None) -> str:
    """Advise about a loss that compares scores of classes with class numbers."""
    shape = tuple(target.shape)
    if target.ndim == scores.ndim and shape[1:2] == (1,):
        return f"the targets are {shape}, and this loss takes {shape[:1]}: y.squeeze(1), or a number for each sample"
    if target.ndim == scores.ndim and not target.is_floating_point():
        return f"the targets are {_name(target)} {shape}: make them the numbers of classes, y.argmax(1), or y.float()"
    if scores.ndim > 2 and scores.shape[:-1] == target.shape != scores[:, 0].shape:
        return (
            f"the predictions are {tuple(scores.shape)}, with the classes last, and this loss takes the classes in "
            "dimension 1: return pred.movedim(-1, 1) from forward"
        )
    if target.ndim != scores.ndim and target.dtype not in (int64, uint8) and re.search(_OF_A_TYPE, text):
        return f"the targets are {_name(target)}, and numbers of classes are int64: y.long() in the dataset"
    ends = _range(target if ignored is None else target[target != ignored]) if "of bounds" in text else None
    if ends is None:
        return ""
    n, (low, high) = scores.shape[1 if scores.ndim > 1 else 0], ends
    has = f"the targets go from {low} to {high}, and the model has {n} outputs, for classes 0 to {n - 1}"
    if low == 1 and high == n:
        return f"{has}: subtract 1 from the targets"
    if low < 0:
        return f"{has}: number the classes from 0, or leave targets out by the loss's ignore_index={low}"
    return f"{has}: give it {high + 1} outputs, or number the classes from 0"


def _name(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _range(t: Tensor) -> tuple[int, int] | None:
    """Return the least and the greatest value of a tensor on the CPU; `None` for one on another device."""
    return tuple(int(end) for end in t.aminmax()) if t.is_cpu and t.numel() else None  # type: ignore[return-value]


def _parts(x: Any) -> Iterator[Any]:
    """Yield a nested value, and all that is inside it."""
    yield x
    for _, inner in entries(x):
        yield from _parts(inner)


def samples_of(frames: list[FrameType]) -> dict[Any, Any]:
    """Return the samples that a loader was about to collate, by their numbers in the dataset."""
    for frame in reversed(frames):
        own = frame.f_locals
        if isinstance(own.get("data"), list) and "possibly_batched_index" in own:  # where torch fetches them
            numbers = own["possibly_batched_index"]
            return dict(zip(map(str, numbers), own["data"], strict=False))
    return {}


def of_samples(samples: dict[Any, Any], text: str) -> str:
    """Advise about samples that cannot be collated; samples in a loader's worker are out of reach."""
    if "equal size" in text:
        kinds = [(number, describe(sample)) for number, sample in samples.items()]
        other = next((kind for kind in kinds if kind[1] != kinds[0][1]), None)
        which = f"sample {kinds[0][0]} is {kinds[0][1]}, sample {other[0]} {other[1]}" if other else "samples differ"
        return f"{which}; a batch takes one shape: pad, cut or resize them in the dataset, or pad in a collate_fn"
    match = re.search(_NO_SAMPLE, text)
    if match is None:
        return ""
    name = (match[1] or match[2]).rpartition(".")[2]
    holders = [number for number, sample in samples.items() if any(type(x).__name__ == name for x in _parts(sample))]
    which = f"sample {holders[0]}" if holders else "a sample"
    if name == "NoneType":
        return f"{which} is None or has None in it: has __getitem__ a `return` in every case?"
    if "PIL" in match[0]:
        return f"{which} is a PIL image: make tensors of them in the dataset (torchvision's ToTensor), or use ImageData"
    return (
        f"{which} has something of the type {name} in it: let the dataset yield tensors, arrays and numbers, or give "
        "the loader a collate_fn"
    )


def of_metric(frames: list[FrameType]) -> str:
    """Advise about a metric that has failed."""
    if any(frame.f_globals.get("__name__", "").startswith("sklearn.") for frame in frames):
        return (
            "metrics of scikit-learn take targets first, decoded predictions and all samples at once: "
            "AccumMetric(lambda p, y: f1_score(y, p.argmax(1), average='macro'), name='f1')"
        )
    return ""


def of_predict(learn: "Learner", frames: list[FrameType]) -> str:
    """Advise about a `predict` that got something else than one input as the dataset yields it."""
    calls = (f.f_locals["items"] for f in frames if f.f_code.co_name.startswith("_predict"))
    items: list = next(calls, [])
    dataset: Any = learn.dls.train_ds
    if not items or type(learn.dls).test_dl is not DataLoaders.test_dl or not hasattr(dataset, "__getitem__"):
        return ""
    with keep_seeds():
        inputs = learn.dls.split(dataset[0])[0]
    one = inputs[0] if len(inputs) == 1 else inputs
    if _kind(one) == _kind(items[0]):
        return ""
    return (
        f"predict takes one input as the dataset yields it, here {describe(one)}, and got {describe(items[0])}; "
        "for several: get_preds(dl=learn.dls.test_dl(items))"
    )


def _kind(x: Any) -> Any:
    return getattr(x, "ndim", type(x))
