"""Hooks on modules, and a callback that records the statistics of activations with them."""

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from learnerkit import arguments, distributed
from learnerkit.callback import Callback
from learnerkit.data.batches import on_host
from learnerkit.data.show import label_steps, panels, pyplot
from learnerkit.host_scalars import HostScalars
from learnerkit.state import State
from learnerkit.text import did_you_mean, first_few
from learnerkit.torch_internals import uncompiled
from learnerkit.utils import listify, unwrap
from learnerkit.values import map_batch, tensors_in

Layers = int | str | Iterable[int | str] | None
"""Layers, as the plots take them."""


class Hook:
    """Keeps something of each forward or backward pass of a module, until it is removed, or the `with` block ends.

    Args:
        module: the module.
        func: f(module, inputs, output) whose result is kept; by default the output. For a backward pass inputs and
            output are the gradients of the inputs and of the output, each a tuple.
        is_forward: whether it is for the forward pass.
        detach: give `func` tensors without graph.
        cpu: copy them to the host, which is a host-device sync.

    Attributes:
        stored: the result of the last pass; `None` before the first. An output shares its memory with the model's: a
            later layer that works in place, such as `nn.ReLU(inplace=True)`, changes it. `lambda module, inputs,
            output: output.clone()` as `func` keeps it as it was.
    """

    def __init__(
        self, module: nn.Module, func: Callable[[nn.Module, Any, Any], Any] | None = None, is_forward: bool = True,
        detach: bool = True, cpu: bool = False,
    ) -> None:  # fmt: skip
        self.func = func
        self.detach = detach
        self.cpu = cpu
        self.stored = None
        register = module.register_forward_hook if is_forward else module.register_full_backward_hook
        self._handle = register(self._call)

    def _call(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.detach:
            inputs, output = map_batch(Tensor.detach, (inputs, output))
        if self.cpu:
            inputs, output = map_batch(Tensor.cpu, (inputs, output))
        self.stored = output if self.func is None else self.func(module, inputs, output)

    def remove(self) -> None:
        """Take the hook off the module; what is stored stays."""
        self._handle.remove()

    def __enter__(self) -> "Hook":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


class Hooks:
    """A `Hook` for each of several modules.

    Args:
        modules: the modules.
        func, is_forward, detach, cpu: as for `Hook`.

    Attributes:
        hooks: the hooks, in the order of the modules.
    """

    def __init__(self, modules: Iterable[nn.Module], func: Callable | None = None, **kwargs: Any) -> None:
        with ExitStack() as stack:  # A module that takes no hooks leaves none on those before it.
            self.hooks = [stack.enter_context(Hook(module, func, **kwargs)) for module in modules]
            stack.pop_all()

    @property
    def stored(self) -> list:
        """The stored values of each hook."""
        return [hook.stored for hook in self.hooks]

    def remove(self) -> None:
        """Take all of them off."""
        for hook in self.hooks:
            hook.remove()

    def __len__(self) -> int:
        return len(self.hooks)

    def __getitem__(self, i: int) -> Hook:
        return self.hooks[i]

    def __enter__(self) -> "Hooks":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


NEAR_ZERO = 0.05
"""Activations up to this magnitude count as near zero, as in fastai."""

_STATS = {"mean": "Mean", "std": "Standard deviation", "near_zero": f"Share within {NEAR_ZERO} of zero"}
_LOW, _HIGH, _PER_DECADE = -4, 2, 8  # powers of ten, and bins, of the histograms of magnitudes
_BINS = (_HIGH - _LOW) * _PER_DECADE


class ActivationStats(Callback):
    """Records the mean, the standard deviation, and the share near zero, of what layers put out while they train.

    Nothing waits for the device during a step. On several ranks these are the activations of rank 0. A step that is
    recorded runs without `torch.compile`. Of a batch that `SplitBatch` divides, the first part is recorded.

    Args:
        modules: modules, or classes of them such as `nn.ReLU`; by default all layers that have parameters themselves.
        every: record at every so many training batches; by default at each.
        with_hist: also count how many activations have which magnitude; the counts are on the device until the end of
            the fit, some 200 bytes for each layer and batch.

    Attributes:
        layers: their names.
        steps: the training batches, counted from 0, that were recorded.

    Raises:
        ValueError: `every` below 1; in `before_train`, modules that the model does not have.
    """

    order = 14
    run_valid = False
    only_fit = True
    rank0_only = True

    def __init__(self, modules: Any = None, every: int | None = None, with_hist: bool = False) -> None:
        arguments.check_count("every", 1 if every is None else every, "a number of training batches")
        self.modules = listify(modules)
        self.every = every or 1
        self.with_hist = with_hist
        self._off = ExitStack()
        self._hooked: list[tuple[str, nn.Module]] = []
        self._begin()

    def _begin(self) -> None:
        self.layers: list[str] = []
        self.steps: list[int] = []
        self._values, self._counts = HostScalars(), list[Tensor]()
        # What a layer without an output has: no statistics, and no counts.
        self._nothing = torch.full((len(_STATS),), math.nan), torch.zeros(_BINS, dtype=torch.int32)
        self._now: list[tuple[Tensor, Tensor]] = []

    def before_fit(self) -> None:
        self._begin()

    def before_train(self) -> None:
        # Not earlier: DDP may have put other modules in their places.
        self._hooked = self._chosen(unwrap(self.learn.model))
        self.layers = [name for name, _ in self._hooked]

    def _chosen(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        named = {name or "(the model)": module for name, module in model.named_modules()}
        if not self.modules:
            return [(name, m) for name, m in named.items() if list(m.parameters(recurse=False))]
        kinds = tuple(x for x in self.modules if isinstance(x, type))
        chosen = [(name, m) for name, m in named.items() if isinstance(m, kinds) or m in self.modules]
        missing = [x for x in self.modules if x not in kinds and x not in named.values()]
        if missing or not chosen:
            kind = first_few(sorted({type(m).__name__ for m in named.values()}))
            raise ValueError(
                f"ActivationStats got modules that the model does not have: {first_few(missing or kinds)}; give it "
                f"modules of learn.model, or classes such as it has ({kind})"
            )
        return chosen

    def before_batch(self) -> None:
        learn = self.learn
        if learn.train_iter % self.every or not learn.batch_size:
            return
        self._now = [self._nothing] * len(self._hooked)
        for i, (_, module) in enumerate(self._hooked):
            self._off.enter_context(Hook(module, partial(self._note, i)))
        self._off.enter_context(uncompiled())  # compiled code would not call hooks that it was not made with

    def _note(self, i: int, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._now[i] is self._nothing:  # The first call of a layer counts.
            tensor = next((t.float() for t in tensors_in(output) if t.is_floating_point() and t.numel()), None)
            if tensor is not None:
                self._now[i] = _statistics(tensor), _histogram(tensor) if self.with_hist else self._nothing[1]

    def after_pred(self) -> None:
        self._off.close()
        if not self._now:
            return
        for statistics, counts in self._now:
            for value in statistics.unbind():
                self._values.append(value)
            if self.with_hist:
                self._counts.append(counts)
        self._now = []
        self.steps.append(self.learn.train_iter)
        if not len(self.steps) % 64:  # otherwise they would pile up on the device
            self._values.poll()

    def cleanup_batch(self) -> None:
        self._off.close()
        self._now = []

    def cleanup_fit(self) -> None:
        self._hooked = []
        self._values.all()  # a host-device sync: tensors on a device cannot be sent to another process
        self._counts = on_host(self._counts)

    @property
    def stats(self) -> dict[str, dict[str, list[float]]]:
        """The 'mean', 'std' and 'near_zero' of each layer at each of `steps`. In a fit this is a host-device sync."""
        shape = len(self.steps), len(self.layers), len(_STATS)
        values = torch.tensor(self._values.all(), dtype=torch.float64).view(shape)
        return {layer: dict(zip(_STATS, values[:, i].T.tolist(), strict=True)) for i, layer in enumerate(self.layers)}

    def state_dict(self) -> State:
        """Return the recorded statistics. A host-device sync."""
        self._counts = on_host(self._counts)
        counts = torch.stack(self._counts) if self._counts else None
        return {
            "layers": list(self.layers), "steps": list(self.steps), "values": list(self._values.all()),
            "counts": counts,
        }  # fmt: skip

    def load_state_dict(self, state: State) -> None:
        """Restore the recorded statistics."""
        self.layers, self.steps = list(state["layers"]), list(state["steps"])
        self._values = HostScalars(state["values"])
        self._counts = [] if state["counts"] is None else list(state["counts"].unbind())

    # Plots

    @distributed.on_rank0
    def plot_layer_stats(self, layers: Layers = None) -> Any:
        """Plot the statistics over the steps: mean, standard deviation, and the share near zero.

        Args:
            layers: one or several, by name or by place in `layers`; by default all. The first ones are dark.

        Returns:
            An array of three axes; `None` on ranks other than 0.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: nothing was recorded, or no such layer.
        """
        indices, stats = self._selected(layers), self.stats
        plt = pyplot("plot_layer_stats")
        figure, axes = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
        colors = plt.get_cmap("viridis")(torch.linspace(0, 0.9, len(indices)).tolist())
        for ax, (stat, title) in zip(axes, _STATS.items(), strict=True):
            for i, color in zip(indices, colors, strict=True):
                ax.plot(self.steps, stats[self.layers[i]][stat], color=color, label=self.layers[i], linewidth=1.2)
            label_steps(ax, title=title)
        lines = axes[0].lines
        shown = lines if len(lines) <= 12 else [lines[0], lines[len(lines) // 2], lines[-1]]
        figure.legend(handles=list(shown), loc="outside right center", title="layer", fontsize=9, frameon=False)
        return axes

    @distributed.on_rank0
    def plot_hist(self, layers: Layers = None) -> Any:
        """Show how the magnitudes of the activations are distributed at each step; needs `with_hist=True`.

        A column is a step, and the brighter a spot, the more activations have that magnitude (by the logarithm of their
        number). What is dead is at the bottom.

        Args:
            layers: as in `plot_layer_stats`.

        Returns:
            An array of axes, one for each layer; `None` on ranks other than 0.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: nothing was recorded, no such layer, or no histograms.
        """
        indices = self._selected(layers)
        if not self.with_hist:
            raise ValueError("there are no histograms: ActivationStats(with_hist=True) records them")
        counts = torch.stack(on_host(self._counts)).view(len(self.steps), len(self.layers), -1)
        axes = panels("plot_hist", len(indices), height=2.4)
        for ax, i in zip(axes, indices, strict=True):
            extent = (self.steps[0] - 0.5, self.steps[-1] + 0.5, _LOW, _HIGH)
            ax.imshow(counts[:, i].T.log1p().numpy(), origin="lower", aspect="auto", extent=extent)
            powers = range(_LOW, _HIGH + 1, 2)
            ax.set_yticks(powers, [f"$10^{{{power}}}$" for power in powers])
            label_steps(ax, ylabel="magnitude", title=f"layer {self.layers[i]}")
        return axes

    color_dim = plot_hist  # fastai's name

    def _selected(self, layers: Layers) -> list[int]:
        "Return the indices of these layers."
        if not self.steps:
            raise ValueError("nothing was recorded yet: fit(..., cbs=ActivationStats()) does that")
        indices = []
        for layer in range(len(self.layers)) if layers is None else listify(layers):
            if isinstance(layer, str) and layer in self.layers:
                layer = self.layers.index(layer)
            if not isinstance(layer, int) or not -len(self.layers) <= layer < len(self.layers):
                near = did_you_mean(str(layer), self.layers)
                raise ValueError(f"got layer {layer!r}; there are {first_few(map(repr, self.layers), n=20)}{near}")
            indices.append(layer)
        return indices


def _statistics(x: Tensor) -> Tensor:
    """Return the three statistics of a float32 tensor, on its device."""
    std, mean = torch.std_mean(x, correction=0)
    return torch.stack([mean, std, (x.abs() <= NEAR_ZERO).float().mean()])


def _histogram(x: Tensor) -> Tensor:
    """Return how many numbers of a float32 tensor have which magnitude, on its device."""
    power = x.abs().nan_to_num(nan=math.inf).clamp(10.0**_LOW, 10.0**_HIGH).log10()
    place = ((power - _LOW) * _PER_DECADE).long().clamp(0, _BINS - 1).flatten()
    counts = torch.zeros(_BINS, dtype=torch.int32, device=x.device)
    return counts.scatter_add_(0, place, torch.ones_like(place, dtype=torch.int32))
