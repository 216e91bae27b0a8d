"""Mixed precision, gradient clipping, channels-last memory format and compilation, for the time of a run."""

import math
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor

from learnerkit import arguments, distributed, optim
from learnerkit.callback import Callback
from learnerkit.data.batches import in_float32
from learnerkit.events import CancelStepException
from learnerkit.gradient_mean import over_ranks, total_norm
from learnerkit.marks import collective
from learnerkit.shards import is_shard, local, local_or_zero
from learnerkit.state import Learner, State
from learnerkit.text import did_you_mean, first_few
from learnerkit.torch_internals import (
    clip_elements,
    compiled_call,
    norms_of_each,
    plain_call,
    scale_down_each,
    scale_together,
    set_compiled_call,
)
from learnerkit.utils import itself, unwrap
from learnerkit.values import map_batch

MODES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def predictions_in_float32(learn: "Learner") -> None:
    """Cast `learn.pred` to float32; not in training if it is a part of the output of a model with its own loss."""
    is_part = learn.output is not None and learn.output is not learn.pred
    if not (is_part and learn.loss_func is None and learn.training):
        learn.pred = map_batch(in_float32, learn.pred)
    if not is_part:
        learn.output = learn.pred  # The half-precision copy need not live through the backward pass.


class MixedPrecision(Callback):
    """Computes predictions in half precision where that is safe; weights, losses and metrics stay in float32.

    The forward pass and the loss run under `torch.autocast`, in training, validation and prediction; `learn.pred` is
    float32 from `after_pred` on. If a model returns `logits` with its own loss, these stay in half precision in
    training, because a float32 copy of a language model's takes gigabytes; metrics get float32. With 'fp16' the loss is
    scaled in `before_backward`, so that small gradients do not vanish (Micikevicius et al.,
    https://arxiv.org/abs/1710.03740). Gradients are unscaled before the step; if they overflow, the step is skipped by
    `CancelStepException` and the scale is halved. So a callback that adds to `loss_grad` must do so in `after_loss`,
    and one that uses gradients in `before_step` with an order above 10. All ranks of a distributed run skip the same
    steps, because their gradients are equal. A learner keeps the scale from one fit to the next, also with another
    MixedPrecision; `Learner.save` and `Learner.load` keep it with the optimizer's state.

    Args:
        mode: 'fp16', or 'bf16', which needs no scaling.
        scaler_kwargs: for 'fp16', the arguments of `torch.amp.GradScaler`, such as `init_scale`.

    Attributes:
        scaler: the `torch.amp.GradScaler` of the current run.
        skipped: how many steps of the last fit overflowed; a few at its start are usual.

    Raises:
        TypeError, ValueError: another mode, or an argument that GradScaler does not take.
    """

    order = 10

    def __init__(self, mode: str = "fp16", **scaler_kwargs: Any) -> None:
        if mode not in MODES:
            near = did_you_mean(mode, MODES)
            raise ValueError(f"got mode={mode!r}; MixedPrecision has {' and '.join(map(repr, MODES))}{near}")
        if mode != "fp16" and scaler_kwargs:
            raise TypeError(f"got {', '.join(scaler_kwargs)} with mode={mode!r}; only 'fp16' scales its gradients")
        _check_arguments("GradScaler", scaler_kwargs, torch.amp.GradScaler, "device")
        try:
            torch.amp.GradScaler("cpu", **scaler_kwargs)
        except AssertionError as e:
            raise ValueError(f"GradScaler refuses {scaler_kwargs}: {e}") from None
        self.mode, self.scaler_kwargs = mode, scaler_kwargs
        self.scaler: torch.amp.GradScaler | None = None
        self.skipped = 0
        self._open: list[ExitStack] = []  # autocast of each open batch: a callback may validate during a batch
        self._gates: list[_StepGate] = []

    @collective
    def before_fit(self) -> None:
        learn, kind = self.learn, self.learn.dls.device.type
        _check_autocast(kind, self.mode)
        if self.mode != "fp16" or learn.task in ("validate", "predict"):
            return
        halves = [n for n, p in learn.model.named_parameters() if p.requires_grad and p.dtype == torch.float16]
        if halves:
            raise ValueError(
                f"the model has float16 parameters ({first_few(halves, n=1)}), whose gradients cannot be unscaled; "
                "give MixedPrecision a float32 model (`model.float()`), it casts by itself"
            )
        if kind == "cpu":
            distributed.warn_once(
                "mixed precision with float16 is some 30 times slower on a CPU than float32: use bf16 there "
                "(learn.to_bf16(), or MixedPrecision('bf16'))"
            )
        self.scaler = torch.amp.GradScaler(kind, **self.scaler_kwargs)
        self.take_scale(distributed.broadcast if learn.n_ranks > 1 else itself)  # every rank must reach this
        self.scaler.scale(torch.zeros((), device=learn.dls.device))  # a rank may take a step before it has a loss
        self.skipped, self._gates = 0, []

    def before_batch(self) -> None:
        self._open.append(ExitStack())
        self._open[-1].enter_context(torch.autocast(self.learn.dls.device.type, MODES[self.mode]))

    def after_pred(self) -> None:
        predictions_in_float32(self.learn)

    def after_loss(self) -> None:
        self._leave_autocast()
        learn = self.learn  # a model that makes its own loss may do so in half precision
        learn.loss, learn.loss_grad = map_batch(in_float32, (learn.loss, learn.loss_grad))

    def before_backward(self) -> None:
        if self.scaler is not None and isinstance(self.learn.loss_grad, Tensor):
            self.learn.loss_grad = self.scaler.scale(self.learn.loss_grad)

    def before_step(self) -> None:
        self._leave_autocast()  # It is still on if this rank has left its batch and takes the step with the others.
        if self.scaler is not None and not self._unscale(self.scaler):
            self.skipped += 1
            raise CancelStepException

    @collective
    def after_step(self) -> None:
        "Update the scale after a step, taken or skipped."
        if self.scaler is None:
            return
        if not self._gates and self.learn.n_ranks > 1 and self._overflows():
            # This rank left the step before unscaling, and the others skip it: all ranks must keep the same scale.
            self.skipped += 1
            self._unscale(self.scaler)
            self.learn._zero_grad()
        if self._gates:
            self.scaler.update()
            self._gates = []

    @collective
    def after_batch(self) -> None:
        if self.learn.training and self.learn.step_due:
            self.after_step()  # This is for a batch cancelled before after_step; otherwise it does nothing.

    def _unscale(self, scaler: torch.amp.GradScaler) -> bool:
        "Unscale the gradients, if there are any, and tell whether all of them are finite."
        kinds = [_parameters(self.learn)]
        if self.learn.shards is not None:  # The scaler cannot mix shards and whole tensors, such as those of a loss.
            kinds = [[p for p in kinds[0] if is_shard(p) is shard] for shard in (True, False)]
        # They are kept until the update, because the scaler identifies them by their ids.
        self._gates = [_StepGate(params) for params in kinds if params]
        for gate in cast(list[Any], self._gates):
            scaler.step(gate)  # the only host-device sync of a step: the host must know whether to take it
        return all(gate.opened for gate in self._gates)

    @collective
    def _overflows(self) -> bool:
        "Tell whether a gradient is not finite. A host-device sync, but only if a rank has left a step."
        grads = [p.grad for p in _parameters(self.learn) if p.grad is not None]
        return bool(grads) and not total_norm(grads, torch.inf).isfinite()

    def _leave_autocast(self) -> None:
        if self._open:
            self._open[-1].close()

    def cleanup_batch(self) -> None:
        self._open.pop().close()

    def cleanup_fit(self) -> None:
        # lr_find must not change the scale.
        if self.learn.task == "fit" and self.scaler is not None and self.scaler.is_enabled():
            self.learn._scaler_state = self.scaler.state_dict()  # plain numbers: a host-device sync
        self.scaler, self._gates = None, []

    def state_dict(self) -> State:
        """Return the scale. A host-device sync."""
        return {"skipped": self.skipped, "scaler": self.scaler.state_dict() if self.scaler is not None else {}}

    def load_state_dict(self, state: State) -> None:
        """Restore the scale."""
        self.skipped = state["skipped"]
        if self.scaler is not None and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])

    def take_scale(self, shared: Callable[[dict[str, Any]], dict[str, Any]] = itself) -> None:
        """Continue with the scale of the learner's last fit, or of the file it has loaded.

        Args:
            shared: a function that makes the scaler's state the same on all ranks.
        """
        last, scaler = shared(self.learn._scaler_state), self.scaler
        if last and scaler is not None and scaler.is_enabled():
            state = scaler.state_dict()
            # The scale grows when the count equals the interval: a larger count would never do so.
            steps = min(last["_growth_tracker"], state["growth_interval"] - 1)
            scaler.load_state_dict(state | {"scale": last["scale"], "_growth_tracker": steps})


class GradientClip(Callback):
    """Scales the gradient down if its norm is above a bound (Pascanu et al., arXiv:1211.5063).

    It takes the norm over all parameters of all optimizers together, after unscaling and averaging over the ranks. With
    `each` the gradient of each parameter is clipped by its own norm, as by Keras' `clipnorm` and in DINO. With
    `max_value` each element is bounded, and no norm.

    Args:
        max_norm: the bound; `float('inf')` does not clip.
        norm_type: the p of the p-norm; `float('inf')` for the largest absolute value.
        log: add the norm over all parameters before clipping to the table as the column `grad_norm`.
        max_value: clip each element to the range from -max_value to max_value instead; of a complex one, both parts.
        each: clip the gradient of each parameter by itself.

    Raises:
        ValueError: `max_norm`, `norm_type` or `max_value` is not a number above 0, or `max_value` is given with `each`
            or with another `max_norm` than 1.
    """

    order = MixedPrecision.order + 1
    run_valid = False

    def __init__(
        self,
        max_norm: float = 1.0,
        norm_type: float = 2.0,
        log: bool = False,
        *,
        max_value: float | None = None,
        each: bool = False,
    ) -> None:
        arguments.check_positive("max_norm", max_norm)
        arguments.check_positive("norm_type", norm_type)
        if max_value is not None:
            arguments.check_positive("max_value", max_value)
            if each or max_norm != 1:
                raise ValueError(
                    f"got max_value={max_value} with max_norm={max_norm} and each={each}; max_value clips elements and "
                    "no norm: leave the others out, or take two callbacks GradientClip"
                )
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.max_value = max_value
        self.each = each
        self.logs = ("grad_norm",) if log else ()

    @collective
    def before_step(self) -> None:
        params = _parameters(self.learn)
        if not params:
            return
        # All of it stays on the device: no host-device sync.
        grads = [_values(p) for p in params]
        of_all = not self.each and self.max_value is None
        if of_all or self.logs:
            norm = total_norm(grads, self.norm_type)
            if self.logs:
                self.learn.log_metric("grad_norm", norm)
        if self.max_value is not None:
            clip_elements(list(map(local, grads)), self.max_value)
        elif self.max_norm < math.inf:  # otherwise an infinite norm would make all gradients NaN
            if not of_all:
                scale_down_each(list(map(local, grads)), self._norms_of_each(grads), self.max_norm)
            elif self.learn.shards is None:
                torch.nn.utils.clip_grads_with_norm_(params, self.max_norm, norm)
            else:  # torch's function does the same, but cannot mix shards and whole tensors.
                scale_together(list(map(local, grads)), torch.clamp(self.max_norm / (norm + 1e-6), max=1.0))

    @collective
    def _norms_of_each(self, grads: list[Tensor]) -> list[Tensor]:
        "Return the norm of each gradient."
        norms = norms_of_each(list(map(local_or_zero, grads)), self.norm_type)
        if shards := [i for i, grad in enumerate(grads) if is_shard(grad)]:
            row = over_ranks(torch.stack([norms[i] for i in shards]), self.norm_type)
            for i, norm in zip(shards, row.unbind(), strict=True):
                norms[i] = norm
        return norms


class ChannelsLast(Callback):
    """Keeps images and the weights of convolutions in channels-last memory format for the time of a run.

    This makes convolutions in half precision faster on GPUs
    (https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html). Shapes and values do not change.
    """

    order = -1

    def __init__(self) -> None:
        self._strides: list[tuple[Tensor, tuple[int, ...]]] = []

    def before_fit(self) -> None:
        model = unwrap(self.learn.model)
        for t in [*model.parameters(), *model.buffers()]:
            if _is_image(t) and not t.is_contiguous(memory_format=torch.channels_last):
                self._strides.append((t, t.stride()))
                t.data = _channels_last(t.data)
        self._match_layouts()

    def before_batch(self) -> None:
        self.learn.xb = map_batch(_channels_last, self.learn.xb)

    def cleanup_fit(self) -> None:
        for t, strides in self._strides:
            t.data = torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t.data)
        self._match_layouts()
        self._strides.clear()

    def _match_layouts(self) -> None:
        "Give gradients and optimizer state the memory layout of their parameters, as fused kernels need it."
        for t, _ in self._strides:
            if t.grad is not None:
                t.grad = optim.laid_out_as(t, t.grad)
        for opt in self.learn.opts:
            optim.state_to_params(opt)


class Compile(Callback):
    """Compiles the model for the time of a run: a fit with its validation, or a `validate` or `get_preds` alone.

    The module is compiled in place (`nn.Module.compile`), so `learn.model` stays the same object and its weights keep
    their names; afterwards it is not compiled any more. Later runs reuse the compiled code. A model that is already
    wrapped is not compiled, with a warning: replicas of `nn.DataParallel` would all call the one compiled original.

    Args:
        kwargs: the arguments of `torch.compile`: `backend`, `mode`, `dynamic`, ...

    Raises:
        TypeError: an argument that `torch.compile` does not take.
    """

    order = 1  # after DataParallel (0) has wrapped the model; DDP (11, before_train) wraps the compiled module

    def __init__(self, **kwargs: Any) -> None:
        _check_arguments("torch.compile", kwargs, torch.compile, "model")
        self.kwargs = kwargs
        graphs = (kwargs.get("options") or {}).get("triton.cudagraphs") or kwargs.get("backend") == "cudagraphs"
        self._has_graphs = bool(graphs) or kwargs.get("mode") in ("reduce-overhead", "max-autotune")
        self._compiled = ExitStack()

    def before_fit(self) -> None:
        model = self.learn.model
        if unwrap(model) is model:
            self._compiled.callback(set_compiled_call, model, compiled_call(model))
            # For the same module torch reuses the code of an earlier run.
            set_compiled_call(model, torch.compile(plain_call(model), **self.kwargs))
        else:
            distributed.warn_once(f"Compile leaves the model as it is: it is wrapped in {type(model).__name__}")

    # A CUDA graph writes its results to the same place at each batch, and others keep the predictions and the loss.

    def after_pred(self) -> None:
        if self._has_graphs and not self.learn.training:
            self.learn.pred = map_batch(Tensor.clone, self.learn.pred)

    def after_loss(self) -> None:
        learn = self.learn
        if self._has_graphs and learn.loss_func is None and isinstance(learn.loss, Tensor):
            learn.loss = learn.loss.clone()

    def cleanup_fit(self) -> None:
        self._compiled.close()


class _StepGate:
    """Stands for one optimizer of all parameters in GradScaler.step, and notes whether it was allowed to step."""

    def __init__(self, params: list[Tensor]) -> None:
        self.param_groups = [{"params": params}]
        self.opened = False

    def step(self) -> None:
        self.opened = True


def _parameters(learn: "Learner") -> list[Tensor]:
    """Return the parameters of all optimizers that have gradients, each once."""
    return [p for p in dict.fromkeys(optim.parameters_of(learn.opts)) if p.grad is not None]


def _values(p: Tensor) -> Tensor:
    """Return the gradient of a parameter; coalesce a sparse one in place, and return its values."""
    grad: Any = p.grad
    if grad.is_conj():  # no kernel for many tensors takes it
        p.grad = grad = grad.resolve_conj()
    if grad.layout is torch.strided:
        return grad
    p.grad = grad = grad.coalesce()
    return grad.values()


def _check_arguments(target: str, given: dict[str, Any], function: Callable, positional: str) -> None:
    allowed = [name for name in signature(function).parameters if name != positional]
    for name in given:
        if name not in allowed:
            raise TypeError(
                f"got the argument {name!r}; {target} takes {', '.join(allowed)}{did_you_mean(name, allowed)}"
            )


def _check_autocast(kind: str, mode: str) -> None:
    """Refuse a device whose autocast does not have this precision; torch itself may only warn and do nothing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.autocast(kind, MODES[mode])
    except (RuntimeError, UserWarning) as e:
        other = next(name for name in MODES if name != mode)
        raise ValueError(
            f"the device {kind!r} has no mixed precision with {mode!r}: {e}; try {other!r}, or train in float32"
        ) from None


def _is_image(t: Tensor) -> bool:
    return t.ndim == 4 and t.is_floating_point()


def _channels_last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last) if _is_image(t) else t
