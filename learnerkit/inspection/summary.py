"""A summary of a model: its layers in the order of the forward pass, their outputs, parameters, and memory."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from learnerkit.callback import running
from learnerkit.callbacks.carried import CarriedState
from learnerkit.callbacks.precision import MODES, MixedPrecision
from learnerkit.data.order import first_batch
from learnerkit.data.show import WIDTH, Table
from learnerkit.inspection.undoing import give_shapes, predict, state_tensors, trial
from learnerkit.losses import loss_name
from learnerkit.shards import local
from learnerkit.state import Learner
from learnerkit.text import in_units
from learnerkit.utils import count_parameters, overrides, replaced, unwrap
from learnerkit.values import entries, n_bytes


class Layer(NamedTuple):
    """A row of the summary: a module without others inside it, or one that has parameters itself."""

    name: str
    kind: str
    output: str
    """The shape of its output at the first call; empty if the module itself was not called."""
    calls: int
    parameters: int
    """The number of its own parameters that no layer above has."""
    trained: str
    """'yes', 'no', 'partly', or 'shared' if the layers above have all of them."""


@dataclass
class Summary:
    """The result of `Learner.summary`; `str(summary)` is a table.

    Attributes:
        model: its class, parameters, and how many of them are frozen.
        inputs: the shapes of the batch.
        layers: in the order in which they were called first.
        total, trainable: numbers of parameters, each counted once.
        weights: bytes of the parameters and buffers.
        gradients: bytes of the gradients.
        state: bytes of the optimizer's state; before its first step an estimate, `None` if there is none.
        optimizer: its name.
        kept: bytes that the forward pass of this batch keeps for the backward pass, besides the weights. An estimate:
            in eval mode, without the loss, and without what kernels need for a moment.
    """

    model: str
    inputs: str
    layers: list[Layer]
    total: int
    trainable: int
    weights: int
    gradients: int
    state: int | None
    optimizer: str
    kept: int

    def __repr__(self) -> str:
        names = ["class", "output", "parameters", "trained"]
        rows: list[list[str]] = []
        for x in self.layers:
            kind = x.kind + (f" (x{x.calls})" if x.calls > 1 else "")
            output = x.output or "not called"
            rows.append([_shortened(kind, 24), _shortened(output, 26), f"{x.parameters:,}", x.trained])
        header = repr(Table(names, rows)).partition("\n")[0]
        room = WIDTH - len(header) - 2  # for the names of the layers
        for x, row in zip(self.layers, rows, strict=True):
            row.insert(0, _shortened(x.name or "(the model)", room))
        table = repr(Table(["layer", *names], rows)).split("\n")
        rule = "-" * max(map(len, table))
        state = "not known before the first step" if self.state is None else in_units(self.state)
        return "\n".join([
            f"{self.model}; input {self.inputs}",
            rule, table[0], rule, *table[1:], rule,
            f"parameters: {self.total:,}, of which {self.trainable:,} are trained",
            f"memory: weights {in_units(self.weights)}, gradients {in_units(self.gradients)}, "
            f"{self.optimizer}'s state {state};",
            f"        about {in_units(self.kept)} that the forward pass of this batch keeps for the backward pass",
        ])  # fmt: skip


def summary(learn: "Learner") -> Summary:
    """Do what `Learner.summary` says. It communicates with no other rank."""
    give_shapes(learn)
    model, batch = unwrap(learn.model), first_batch(learn.dls.train)
    with trial(learn, model), _state_begun(learn), _watched(model) as calls, counting_kept(learn) as kept:
        model.eval()
        predict(learn, batch)
        inputs = _shape(learn.xb if len(learn.xb) > 1 else learn.xb[0])
    trained = [p for p in model.parameters() if p.requires_grad]
    return Summary(
        model=count_parameters(model),
        inputs=inputs,
        layers=list(_layers(model, calls)),
        total=sum(p.numel() for p in model.parameters()),
        trainable=sum(p.numel() for p in trained),
        weights=n_bytes((*model.parameters(), *model.buffers())),
        gradients=n_bytes(trained),
        state=_state_bytes(learn, trained),
        optimizer=", ".join(type(opt).__name__ for opt in learn.opts) or loss_name(learn.opt_func),
        kept=bytes_beside(model, kept),
    )


@contextmanager
def _state_begun(learn: "Learner") -> Iterator[None]:
    """Give the model the state with which rows begin, if a callback carries one from batch to batch in a fit."""
    with ExitStack() as stack:
        for cb in running(learn.cbs, CarriedState):
            stack.enter_context(replaced(cb, _state=None, _new=[]))
            if not learn._in_fit:  # in a fit the callback has begun
                stack.callback(cb.cleanup_fit)
                cb.before_fit()
        yield


@contextmanager
def _watched(model: nn.Module) -> Iterator[dict[nn.Module, list[str]]]:
    """Note the shapes that each module's calls put out."""
    calls = dict[nn.Module, list[str]]()

    def begin(module: nn.Module, inputs: Any) -> None:
        calls.setdefault(module, [])  # here, so that a module stands before those inside it

    def end(module: nn.Module, inputs: Any, output: Any) -> None:
        calls[module].append(_shape(output))

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it takes no hooks
            stack.callback(module.register_forward_pre_hook(begin).remove)
            stack.callback(module.register_forward_hook(end).remove)
        yield calls


@contextmanager
def counting_kept(learn: "Learner") -> Iterator[dict[int, torch.UntypedStorage]]:
    """Compute in the learner's precision, and note the memory that autograd keeps for the backward pass."""
    kept = dict[int, torch.UntypedStorage]()

    def pack(t: Tensor) -> Tensor:
        if t.layout is torch.strided:
            storage = t.untyped_storage()  # held until the end, so that its address is not used again
            kept.setdefault(storage.data_ptr(), storage)
        return t.detach()  # a saved output that is returned itself would keep its own graph alive

    with ExitStack() as stack:
        for cb in running(learn.cbs, MixedPrecision):
            stack.enter_context(torch.autocast(learn.dls.device.type, MODES[cb.mode]))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t))
        yield kept


def bytes_beside(model: nn.Module, kept: dict[int, torch.UntypedStorage]) -> int:
    """Count the bytes of what is kept, without those of the model's own tensors."""
    tensors = [local(t) for t in (*model.parameters(), *model.buffers())]
    own = {t.untyped_storage().data_ptr() for t in tensors if t.layout is torch.strided}
    return sum(storage.nbytes() for place, storage in kept.items() if place not in own)


def _layers(model: nn.Module, calls: dict[nn.Module, list[str]]) -> Iterator[Layer]:
    """Yield the rows in the order of the first calls; modules that were not called follow the one before them."""
    order, place = {module: i for i, module in enumerate(calls)}, -1
    placed = []
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        place = order.get(module, place)
        if own or (module in calls and not list(module.children())):
            placed.append((place, module not in calls, name, module, own))
    seen: set[Tensor] = set()
    for _, _, name, module, own in sorted(placed, key=lambda row: row[:2]):
        new = [p for p in own if p not in seen]
        seen.update(new)
        flags = {p.requires_grad for p in new}
        if len(flags) > 1:
            trained = "partly"
        elif flags:
            trained = "yes" if True in flags else "no"
        else:
            trained = "shared" if own else ""
        outputs = calls.get(module, [])
        numbers = sum(p.numel() for p in new)
        yield Layer(name, type(module).__name__, outputs[0] if outputs else "", len(outputs), numbers, trained)


def _shape(x: Any) -> str:
    """Return the shapes of a nested value, or its class."""
    if isinstance(x, Tensor):
        return " x ".join(map(str, x.shape)) or "scalar"
    parts = [_shape(part) for _, part in entries(x) if isinstance(part, Tensor) or entries(part)]
    return ", ".join(parts) or type(x).__name__


def _shortened(text: str, width: int) -> str:
    """Leave out the middle of a text that is too long."""
    half = (width - 3) // 2
    return text if len(text) <= width else f"{text[:half]}...{text[-half:]}"


def _state_bytes(learn: "Learner", trained: list[nn.Parameter]) -> int | None:
    """Return the bytes of the optimizer's state; before its first step, those of a step on meta tensors."""
    tensors = state_tensors(learn.opts)
    if tensors or overrides(learn, "create_opt"):
        return n_bytes(tensors) if tensors else None
    copies = [nn.Parameter(torch.empty_like(p, device="meta")) for p in trained]
    for p in copies:
        p.grad = torch.empty_like(p)
    try:
        opt = learn.opt_func([{"params": copies}], lr=1e-3)
        opt.step()
    except Exception:  # An optimizer may need a closure, or values.
        return None
    return n_bytes(state_tensors([opt]))
