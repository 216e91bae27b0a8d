"""The parts of a batch: their forward and backward passes, and what is made of them for the whole."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from learnerkit.callback import running
from learnerkit.callbacks.precision import MixedPrecision, predictions_in_float32
from learnerkit.data.batches import Rows, in_float32, with_rows
from learnerkit.data.cuts import cut_rows, even_spans, row_counts
from learnerkit.distributed import seeds
from learnerkit.explain import is_out_of_memory
from learnerkit.gradient_mean import GradientMean, gradients_aside, host_count, scale_each
from learnerkit.losses import loss_parts, loss_sums, output_of, pass_kept, take_loss, wants_loss, weighting_of
from learnerkit.processes.rank_main import forget_frames
from learnerkit.text import in_units
from learnerkit.torch_internals import BuffersKept, hooks_left_out, leaves_of, version_of
from learnerkit.utils import free_memory, synced_norms, unwrap
from learnerkit.values import describe, get_field, map_batch, tensors_in

if TYPE_CHECKING:
    from learnerkit.callbacks.splitting import SplitBatch
    from learnerkit.learner import Learner

_SEAMS = ("_forward", "_loss", "_backward")


class Batches:
    """Computes batches whole or in parts, in place of the learner's methods for forward pass, loss and backward pass.

    All three are over for a part before the next part begins. The loop then sees the loss of the whole batch as a
    function of the parameters and of the predictions, whose gradients are known already.

    Args:
        cb: the callback, which knows the number of parts.
        params: the parameters that get gradients; none in evaluation.

    Attributes:
        parts: the number of parts in which the current batch was computed; 0: not yet.
        cut: those parts.
        size: the number of elements in its inputs; a smaller batch fits if this one does.
        rows: its number of samples.
        buffers: the buffers that a try may change; none in evaluation.
    """

    def __init__(self, cb: "SplitBatch", params: list[Tensor]) -> None:
        self.cb = cb
        self.learn = cb.learn
        self.params = params
        self._is_open = False
        beside = [loss] if isinstance(loss := self.learn.loss_func, nn.Module) else []
        self.buffers = BuffersKept([unwrap(self.learn.model), *beside] if params else [])
        attributes = vars(self.learn)
        # An outer batch may have replaced methods, too.
        self._replaced = {name: attributes[name] for name in _SEAMS if name in attributes}
        outer = cb._open[-1] if cb._open else None  # a callback evaluates in the middle of one of its batches
        inner: Any = outer._own if outer is not None and outer._is_open else {}
        self._own: dict[str, Callable[[], None]] = {name: inner.get(name, getattr(self.learn, name)) for name in _SEAMS}
        self._wanted = ""  # torch's last message about memory
        self._streams: tuple[Any, list[Tensor]] = (None, [])  # the random states before a try
        self._forget()

    def _forget(self) -> None:
        self.parts = self.size = self.rows = 0
        self.cut: list[Part] = []
        self._is_computed = self._is_computing = False
        self._given: Any = None  # the ids and versions of the predictions' tensors
        self._root: Any = None  # the loss that the loop differentiates; it refers to this object
        self._total: Any = None  # the loss of the whole batch, without a graph
        self._gradients: dict[Tensor, Tensor] = {}  # its gradients, by parameter, times the scale of the loss
        self._reached: list[Tensor] = []  # parameters on which the predictions depend, but not the loss
        self._shares: list = []  # the share of each part in the batch's count
        self._numbers: list[dict[Any, Tensor]] = []  # the model's losses of each part, if its output is not kept
        self._outputs: list[tuple[Any, Any]] = []  # the predictions and the output of each part
        self._shown: Any = None  # the loss that the learner has got
        self._ways: list[tuple[Tensor, _Way]] = []  # predictions, with how they are joined
        self._linked: list[Tensor] = []  # the parameters on which the loop's loss depends
        self._linked_by_outputs: list[Tensor] = []  # the parameters on which its predictions depend
        self._inputs: Any = (None, [])  # the batch's inputs, and their versions
        self._targets: Any = (None, [])
        self._leaves: dict[Tensor, Tensor] = {}  # leaves in place of inputs and targets that need gradients

    def begin(self) -> None:
        """Replace the learner's methods for a batch, if this rank has data in it."""
        if self.learn.batch_size:
            self._is_open = True
            vars(self.learn).update(_forward=self._forward, _loss=self._loss)

    def end(self) -> None:
        """Give the learner its own methods back."""
        if self._is_open:
            self._is_open = False
            attributes = vars(self.learn)
            for name in _SEAMS:
                attributes.pop(name, None)
            attributes.update(self._replaced)
            if any(self._numbers) and self.learn.output is None:
                names = self._numbers[0]
                self.learn.output = {n: _weighed([each[n] for each in self._numbers], self._shares) for n in names}
            self._forget()

    # The learner's methods

    def _forward(self) -> None:
        learn, cb = self.learn, self.cb
        if self.parts or self._is_computing:  # A callback runs another forward pass.
            self._own["_forward"]()
            return
        self.size = self._size()
        self._note_batch()
        parts, fits = cb.limits
        parts = 1 if self.size <= fits else cb.parts_of(self.rows, parts)
        careful = learn.training and (self.size > fits or cb.is_careful)
        self._note(careful or parts > 1)
        if parts == 1 and not careful:
            if self._tried(self._own["_forward"]):
                self.parts, self._given = 1, _versions(learn.pred)
                if learn.training and learn.n_ranks == 1:  # Other ranks may have reduced gradients.
                    vars(learn)["_backward"] = self._backward
                return
            parts = self._more(1)
        self.compute(parts)

    def _size(self) -> int:
        xb = self.learn.xb
        x = xb[0]  # There is mostly only one.
        return x.numel() if type(x) is Tensor else sum(t.numel() for t in tensors_in(xb)) or self.learn.batch_size

    def _note_batch(self) -> None:
        learn = self.learn
        self.rows = learn.batch_size
        self._inputs, self._targets = ((x, _versions(x)) for x in (learn.xb, learn.yb))

    def _loss(self) -> None:
        learn, own = self.learn, self._own["_loss"]
        if self._is_computing or (self._is_computed and self._is_changed()):
            own()  # It is the loss of a part, or a callback has changed predictions or targets.
            return
        if not self._is_computed:
            if self._tried(own, lambda: not self._is_changed()):
                self._root = learn.loss_grad if self._root is None else self._root
                return
            self.compute(self._more(1))
        learn.loss_grad, learn.loss = self._root, self._total

    def _is_changed(self) -> bool:
        """Tell whether a callback has changed the predictions, or the targets."""
        learn, (yb, versions) = self.learn, self._targets
        return _versions(learn.pred) != self._given or learn.yb is not yb or _versions(yb) != versions

    def _backward(self) -> None:
        learn = self.learn
        if self._is_computed or learn.loss_grad is not self._root or any(p.grad is not None for p in self.params):
            self._own["_backward"]()
        elif not self._tried(self._own["_backward"]):
            for p in self.params:
                p.grad = None
            self.compute(self._more(1))
            learn.loss = self._total
            self._root.backward()

    # Trying

    def _note(self, everything: bool) -> None:
        """Save the state that a try changes; with `everything` also the random states of Python and numpy (slower)."""
        self.buffers.keep()
        host: Any = seeds.seed_states() if everything else torch.get_rng_state()
        self._streams = host, seeds.device_states(self.learn.dls.device)

    def _put_back(self) -> None:
        """Restore the state that `_note` has saved."""
        host, of_device = self._streams
        (seeds.set_seed_states if isinstance(host, tuple) else torch.set_rng_state)(host)
        seeds.set_device_states(self.learn.dls.device, of_device)
        self.buffers.put_back()
        xb, versions = self._inputs
        if _versions(xb) != versions:
            raise self._error(
                RuntimeError,
                "SplitBatch cannot take the batch again, as its inputs have been changed in place: make new tensors of "
                "them (x = x / 255 rather than x /= 255)",
            )

    def _error(self, kind: type[Exception], why: str) -> Exception:
        """Return the error that a batch cannot be taken in parts; if memory ran out before, it begins with that."""
        text = f"{why} (errors.html#split-batch)"
        return torch.OutOfMemoryError(f"{self._wanted}: {text}") if self._wanted else kind(text)

    def _tried(self, run: Callable[[], None], may_try_again: Callable[[], bool] = lambda: True) -> bool:
        """Run a function, and tell whether there was memory for it; if not, restore the state from before."""
        learn = self.learn
        try:
            run()
            return True
        except RuntimeError as error:
            if not (is_out_of_memory(error) and may_try_again()):
                raise
            self._wanted = str(error).partition("\n")[0]
            forget_frames(error)  # Frames hold what was computed.
        learn.pred = learn.output = learn.loss = learn.loss_grad = None
        if learn.shards is not None:
            learn.shards.reset()
        self._put_back()
        gc.collect()
        if learn.dls.device.type != "cpu":
            torch.get_device_module(learn.dls.device).empty_cache()
        return False

    def _more(self, parts: int) -> int:
        """Return the number of parts to try after so many have failed."""
        if parts >= self.rows:
            learn = self.learn
            free = in_units(free_memory(learn.dls.device))
            raise torch.OutOfMemoryError(
                f"one sample alone does not fit: {self._wanted} ({free} are free; the largest "
                f"tensors are {_largest(learn)}). ActivationCheckpointing(), to_bf16(), a smaller model, or "
                "distrib_ctx(shard=True) on several processes take less memory (errors.html#split-batch)"
            )
        return self._next(parts)

    def _next(self, parts: int) -> int:
        """Return a larger number of parts, whose largest part is smaller; at most one for each sample."""
        largest = -(-self.rows // parts)
        return max(min(self.rows, parts * 5 // 4), -(-self.rows // max(1, largest - 1)))

    # In parts

    def compute(self, parts: int) -> None:
        """Compute the batch in so many parts, or in more if these do not fit."""
        self._fit(parts)
        self.cb.note_fit(self)
        self._put_on()

    def _fit(self, parts: int) -> None:
        learn, given = self.learn, (self.learn.xb, self.learn.yb)
        needs = [t for t in tensors_in(given) if t.requires_grad] if self.params else []
        self._leaves = {t: t.detach().requires_grad_() for t in needs}
        self._is_computing = True
        if needs:  # Their graph is kept for the one backward pass of the whole batch.
            learn.xb, learn.yb = map_batch(lambda t: self._leaves.get(t, t), given)
        if self._is_computed:  # other ranks need more parts, and this one begins again
            self._put_back()
        try:
            while True:
                self.cut = self._cut(parts)
                if self._tried(self._run):
                    break
                parts = self._more(parts)
        finally:
            self._is_computing = False
            learn.xb, learn.yb = given
        self.parts = len(self.cut)

    def _cut(self, parts: int) -> "list[Part]":
        learn = self.learn
        if parts == 1:
            return [Part(self.rows, {"xb": learn.xb, "yb": learn.yb})]
        if self.params and learn.n_ranks > 1 and synced_norms(unwrap(learn.model)):
            raise self._error(
                ValueError,
                "SplitBatch cannot take a batch in parts: its SyncBatchNorms would wait for as many parts on the other "
                "ranks; distrib_ctx(sync_bn=False) lets each rank's norms see its own samples",
            )
        if not can_be_cut(learn, learn.xb, learn.yb, self.rows):
            raise self._error(
                ValueError,
                f"SplitBatch cannot cut a batch of {self.rows} samples whose inputs are {describe(learn.xb)} and whose "
                f"targets are {describe(learn.yb)}: say where the samples are by DataLoaders(batch_dim=...), or take "
                "smaller batches",
            )
        dim, batch = learn.dls.batch_dim, learn.batch
        is_cut = {*row_counts(batch, dim).values()} == {self.rows}

        def part(start: int, stop: int) -> Part:
            xb, yb = samples_between(learn, learn.xb, learn.yb, start, stop)
            whole = {"batch": cut_rows(batch, dim, start, stop)} if is_cut else {}
            return Part(stop - start, {"xb": xb, "yb": yb, "batch_size": stop - start} | whole)

        return [part(start, stop) for start, stop in even_spans(self.rows, min(parts, self.rows), 1)]

    def _trained(self) -> list[Tensor]:
        return [*(p for p in self.params if p.requires_grad), *self._leaves.values()]

    @contextmanager
    def _passes(self) -> Iterator[dict[Tensor, Tensor]]:
        """Return a context for passes over the parts; yields a dict that has the gradients at its end."""
        learn, gradients = self.learn, dict[Tensor, Tensor]()
        params, batch = self._trained(), learn.batch
        try:
            with pass_kept(learn), hooks_left_out(params), gradients_aside(params):
                yield gradients
                gradients.update((p, p.grad) for p in params if p.grad is not None)
        finally:
            learn.batch = batch

    def _enter(self, part: "Part") -> None:
        """Run the model on a part."""
        learn = self.learn
        vars(learn).update(part.attributes)
        learn.pred = learn.output = learn.loss = learn.loss_grad = None
        self._own["_forward"]()
        if self._precision is not None:
            predictions_in_float32(learn)

    def _run(self) -> None:
        """Compute predictions and loss of all parts, and in training the gradients."""
        learn, kind = self.learn, self.learn.dls.device.type
        self._precision = next(iter(running(learn.cbs, MixedPrecision)), None)
        scaler = self._precision.scaler if self._precision and learn.training else None
        self._scale = scaler.scale(torch.ones((), device=learn.dls.device)) if scaler else 1.0
        self._autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        mean = GradientMean(loss_sums(learn))
        losses = list[tuple[Any, Any]]()
        seen = list[tuple[Any, Any]]()
        self._numbers = []
        reached = set[Tensor]()  # A callback may make a loss of the predictions.
        keeps = len(self.cut) == 1 or not learn.training or self.cb.keeps_predictions()
        with self._passes() as gradients:
            for part in self.cut:
                part.streams = seeds.seed_states(), seeds.device_states(learn.dls.device)
                self._enter(part)
                if wants_loss(learn):
                    take_loss(learn)
                    if len(self.cut) > 1:
                        self.cb.check_count()
                    count = self._backward_of(part, mean) if learn.training else host_count(learn.loss_count)
                    losses.append((learn.loss, count))
                seen.append(_detached((learn.pred, learn.output)) if keeps else (None, None))
                if not keeps:  # the recorder logs the losses of the model
                    numbers = loss_parts(learn.output, weighting_of(learn).entries)
                    self._numbers.append({name: t.detach() for name, t in numbers.items()})
                elif learn.training:
                    rest = [p for p in self._trained() if p.grad is None]
                    reached |= leaves_of([*tensors_in((learn.pred, learn.output))]) & {*rest} if rest else set()
        factor = mean.correction()
        if isinstance(factor, Tensor) or factor != 1:
            scale_each(gradients.values(), factor)
        self._shares = _shares([count for _, count in losses], mean.sums)
        values = [in_float32(loss) for loss, _ in losses if loss is not None]
        self._reached = [p for p in self._trained() if p in reached and p not in gradients]
        self._total = _weighed(values, self._shares) if values else None
        self._gradients, self._outputs = gradients, seen

    def _backward_of(self, part: "Part", mean: GradientMean) -> Any:
        """Compute the gradients of a part, and return what its loss counts."""
        learn, count = self.learn, host_count(self.learn.loss_count)
        if learn.loss_grad is None:
            return count
        if not mean.begun:  # a count on the device is not read, to avoid a host-device sync
            of_all = learn.batch_size if isinstance(count, Tensor) else count
            mean.begin(of_all * self.rows / part.rows or 1.0)
        mean.counted = mean.counted + count
        loss = mean.weigh(in_float32(learn.loss_grad), count, output_of(learn)) * self._scale
        if loss.requires_grad:
            with torch.autocast(learn.dls.device.type, enabled=False):
                loss.backward()
        return count

    def _put_on(self) -> None:
        """Set the learner's predictions for the whole batch; in training they have a graph."""
        learn = self.learn
        last = self._shown
        dim = learn.dls.dims_of(learn.xb, learn.yb)[2]
        counts = [get_field(self._outputs[0][1], name) for name in weighting_of(learn).entries]
        whole, ways = _joined(self._outputs, self.cut, self._shares, dim, counts)
        self._shown, self._outputs = self._total, []
        if self._is_computed:  # other ranks need more parts; the events have taken place
            learn.loss = self._total if learn.loss is last else learn.loss
            by_place = {way.place: way for _, way in ways}
            self._ways = [(t, by_place.get(way.place, way)) for t, way in self._ways]
            return
        self._is_computed = True
        self._ways = ways
        self._root = self._total
        outputs = [t for t, _ in ways]
        if learn.training:
            self._root, linked = self._linked_to(outputs)
            new = dict(zip(outputs, linked, strict=True))
            whole = map_batch(lambda t: new.get(t, t), whole)
        learn.pred, learn.output = whole
        if learn.output is not None and _versions(learn.pred) == _versions(learn.output):
            learn.output = learn.pred
        self._given = _versions(learn.pred)
        if len(self.cut) > 1:
            self.cb.check_loss(self._own["_loss"], self._total)

    def _linked_to(self, outputs: Sequence[Tensor]) -> tuple[Any, Sequence[Tensor]]:
        """Return the loss, and these outputs, as functions of the parameters."""
        root = self._total
        inputs = {leaf: t for t, leaf in self._leaves.items()}
        self._linked = list(self._gradients)
        linked = [inputs.get(p, p) for p in self._linked]
        if linked:
            (root,) = _OfParts.apply(self.of_loss, 1, root, *linked)
        self._linked_by_outputs = [*self._linked, *self._reached]
        if outputs and self._linked_by_outputs:
            linked += [inputs.get(p, p) for p in self._reached]
            outputs = _OfParts.apply(self.of_outputs, len(outputs), *outputs, *linked)
        return root, outputs

    def of_loss(self, factor: Tensor | None) -> list[Tensor | None]:
        """Return, once for each batch, the linked parameters' gradients times `factor`, that of the batch's loss."""
        if not self._gradients:
            raise RuntimeError(
                "the gradients of a batch that SplitBatch has taken in parts were given already: call backward once for"
                " a batch, or leave SplitBatch out (errors.html#split-batch)"
            )
        gradients, self._gradients = self._gradients, {}
        if factor is None:
            return [None] * len(self._linked)
        if not (factor.is_cpu and factor == self._scale):  # A factor on a device is not read.
            scale_each(gradients.values(), factor / self._scale)
        return [gradients.get(p) for p in self._linked]

    def of_outputs(self, *grads: Tensor | None) -> list[Tensor | None]:
        """Return the gradients of linked parameters for these gradients of the predictions, which callbacks may use."""
        gradients = self._again(grads) if any(grad is not None for grad in grads) else {}
        return [gradients.get(p) for p in self._linked_by_outputs]

    @torch.enable_grad()
    def _again(self, of_outputs: Sequence[Tensor | None]) -> dict[Tensor, Tensor]:
        """Run the parts again, and return the gradients of the parameters for these gradients of the outputs."""
        learn = self.learn
        self._note(everything=True)
        in_ddp = hasattr(learn._gradient, "ddp")  # DDP's own backward pass is running, with hooks on the leaves.
        with self._passes() as gradients:
            for i, part in enumerate(self.cut):
                part.draw_again(learn.dls.device)
                with self._autocast:
                    self._enter(part)
                made = distinct((learn.pred, learn.output))
                given = {
                    made[way.place]: way.of_part(grad, i)
                    for (_, way), grad in zip(self._ways, of_outputs, strict=True)
                    if grad is not None and made[way.place].requires_grad
                }
                if in_ddp:
                    _add_gradients(given, self._trained())
                else:
                    torch.autograd.backward(list(given), list(given.values()))
        self._put_back()
        return gradients


@dataclass
class Part:
    """A part of a batch: some of its samples.

    Attributes:
        rows: its number of samples.
        attributes: the learner's attributes for this part, such as `xb`, `yb` and `batch_size`.
        streams: the states of the random number generators when its forward pass began.
    """

    rows: int
    attributes: dict[str, Any]
    streams: tuple[Any, list[Tensor]] = ((), [])

    def draw_again(self, device: torch.device) -> None:
        """Restore the random states with which this part began."""
        seeds.set_seed_states(self.streams[0])
        seeds.set_device_states(device, self.streams[1])


class _Way(NamedTuple):
    """The way in which a tensor of the whole batch's output is made from the tensors of the parts.

    Attributes:
        place: the index of the tensor in a part's output.
        dim: the dimension along which the parts' tensors are concatenated; `None`: they are summed, with weights.
        ends: the boundaries of the parts along `dim`.
        shares: the weight of each part in the sum.
    """

    place: int
    dim: int | None
    ends: list[int]
    shares: list[Any]

    def of_part(self, grad: Tensor, i: int) -> Tensor:
        """Return the gradient of part `i`'s tensor, given the gradient of the whole tensor."""
        if self.dim is None:
            return grad * self.shares[i]
        return grad.narrow(self.dim, self.ends[i], self.ends[i + 1] - self.ends[i])


class _OfParts(torch.autograd.Function):
    """The autograd function from parameters to the loss or the predictions of a batch; `give` returns the gradients."""

    @staticmethod
    def forward(ctx: Any, give: Callable[..., list[Tensor | None]], n: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.give, ctx.n = give, n
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in tensors[:n])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        if torch.is_grad_enabled():  # torch's `create_graph`
            raise RuntimeError(
                "create_graph=True asks for a graph of the gradients of a batch, and SplitBatch keeps none: leave "
                "SplitBatch out, and take smaller batches (errors.html#split-batch)"
            )
        return (None,) * (2 + ctx.n) + tuple(ctx.give(*grads))


def _add_gradients(given: dict[Tensor, Tensor], leaves: list[Tensor]) -> None:
    """Add to the gradients of leaves as a backward pass does, but without their hooks; it takes more memory.

    Args:
        given: the tensors at which the backward pass starts, with their gradients.
        leaves: the tensors that may get a gradient.
    """
    if not given:
        return
    grads = torch.autograd.grad(list(given), leaves, list(given.values()), allow_unused=True)
    for p, grad in zip(leaves, grads, strict=True):
        if grad is not None:
            p.grad = grad if p.grad is None else p.grad + grad


# Outputs of the parts


def _detached(x: Any) -> Any:
    same: dict[Tensor, Tensor] = {}  # a tensor in two places stays one
    return map_batch(lambda t: same.setdefault(t, t.detach()), x)


def _versions(x: Any) -> list[tuple[int, int]]:
    """Return the id and the version of each tensor in `x`, by which one sees whether it is replaced or changed."""
    if type(x) is tuple and len(x) == 1:
        x = x[0]
    if type(x) is Tensor:  # This is the usual case, and faster.
        return [(id(x), version_of(x))]
    return [(id(t), version_of(t)) for t in tensors_in(x)]


def can_be_cut(learn: "Learner", xb: tuple, yb: tuple, rows: int) -> bool:
    """Tell whether all parts of inputs and targets have an entry for each of so many samples."""
    unknown: list = []
    return learn.dls.rows_of_pass(xb, yb, unknown.append) == {rows} and not unknown


def samples_between(learn: "Learner", xb: tuple, yb: tuple, start: int, stop: int) -> tuple[Any, Any]:
    """Return the samples of inputs and targets from `start` to `stop`."""
    inputs, targets, _ = learn.dls.dims_of(xb, yb)
    return cut_rows(xb, inputs, start, stop), cut_rows(yb, targets, start, stop)


def distinct(x: Any) -> list[Tensor]:
    """Return the tensors in `x`, in order, each once."""
    return list(dict.fromkeys(tensors_in(x)))


def _shares(counts: list, sums: bool) -> list:
    """Return the share of each part in the batch's count; 1 for losses that are sums."""
    total = sum(counts)
    if sums or (not isinstance(total, Tensor) and not total):
        return [1.0 if sums else 1 / max(1, len(counts))] * len(counts)
    return [count / total for count in counts]


def _weighed(values: list[Tensor], shares: list) -> Tensor:
    """Return the sum of the values times their shares; a value with share 0 may be NaN, and is left out."""
    weighed = [
        torch.where(share > 0, value, 0.0) * share if isinstance(share, Tensor) else value * share if share else 0.0
        for value, share in zip(values, shares, strict=True)
    ]
    return torch.as_tensor(sum(weighed)).to(values[0])


def _joined(
    pieces: list[tuple[Any, Any]], parts: list[Part], shares: list, dim: Any, summed: list
) -> tuple[tuple[Any, Any], list[tuple[Tensor, _Way]]]:
    """Join the outputs of the parts; a tensor that has no row for each sample becomes `None`.

    Returns:
        The output of the whole batch, and its floating-point tensors, each with how it is made.
    """
    lists = [_listed(outputs, parts) for outputs in zip(*pieces, strict=True)]
    pieces = [(pred if lists[0] is None else None, out if lists[1] is None else None) for pred, out in pieces]
    columns = list(zip(*map(distinct, pieces), strict=True))
    n_pred = len(distinct(pieces[0][0]))  # Predictions may have several rows for each sample.
    ways, made = list[tuple[Tensor, _Way]](), dict[Tensor, Any]()
    for place, column in enumerate(columns):
        first = column[0]
        if len(pieces) == 1:
            way, whole = _Way(place, 0, [0, len(first)], []) if first.ndim else _Way(place, None, [], [1.0]), first
        elif not first.ndim:
            kept = [1.0] * len(parts) if not first.is_floating_point() or any(first is t for t in summed) else shares
            way, whole = _Way(place, None, [], kept), _weighed(list(column), kept)
        elif (at := _dim_of_rows(column, parts, dim, place < n_pred)) is None:
            made[first] = None
            continue
        else:
            way = _Way(place, at, [0, *accumulate(t.shape[at] for t in column)], [])
            whole = torch.cat(column, at)
        made[first] = whole
        if whole.is_floating_point():
            ways.append((whole, way))
    pred, output = map_batch(lambda t: made[t], pieces[0])
    return (pred if lists[0] is None else lists[0], output if lists[1] is None else lists[1]), ways


def _listed(outputs: Sequence, parts: list[Part]) -> list | None:
    """Join lists that have an entry for each sample; `None`: the outputs are no such lists."""
    lists = [with_rows(output, part.rows, True) for output, part in zip(outputs, parts, strict=True)]
    return list(chain(*lists)) if len(parts) > 1 and all(isinstance(x, Rows) for x in lists) else None


def _dim_of_rows(column: Sequence[Tensor], parts: list[Part], dim: Any, several: bool) -> int | None:
    """Return the dimension in which each part's tensor has its samples, or `several` rows for each of them."""
    for at in (dim if isinstance(dim, int) else 0, 0):
        pairs = [(t.shape[at] if at < t.ndim else -1, part.rows) for t, part in zip(column, parts, strict=True)]
        if all(n == rows or (several and n > 0 and n % rows == 0) for n, rows in pairs):
            return at if len({n // rows for n, rows in pairs}) == 1 else None
    return None


# Errors


def _largest(learn: "Learner") -> str:
    """Name the largest tensors that are alive."""
    names: dict[Tensor, str] = {p: name for name, p in unwrap(learn.model).named_parameters()}
    names |= {p.grad: f"the gradient of {name}" for name, p in learn.model.named_parameters() if p.grad is not None}
    kinds = (Tensor, nn.Parameter)  # Subclasses may have no memory.
    alive = [t for t in gc.get_objects() if type(t) in kinds and t.layout is torch.strided]
    places = {t.untyped_storage().data_ptr(): t for t in sorted(alive, key=lambda t: t in names)}
    first = sorted(places.values(), key=lambda t: -t.untyped_storage().nbytes())[:3]
    return ", ".join(f"{names.get(t, describe(t))} {in_units(t.untyped_storage().nbytes())}" for t in first)
