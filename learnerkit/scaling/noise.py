"""The gradient noise scale: the batch size beyond which further samples bring little."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from learnerkit import arguments, distributed, optim
from learnerkit.callback import Callback, running
from learnerkit.callbacks.accumulation import GradientAccumulation
from learnerkit.callbacks.batch_parts import can_be_cut, samples_between
from learnerkit.callbacks.carried import CarriedState
from learnerkit.callbacks.precision import MixedPrecision, predictions_in_float32
from learnerkit.callbacks.splitting import SplitBatch
from learnerkit.data.batches import in_float32
from learnerkit.events import CancelBatchException, CancelException
from learnerkit.gradient_mean import counts_something, host_count, total_norm
from learnerkit.host_scalars import HostScalars
from learnerkit.inspection.undoing import trial
from learnerkit.losses import batch_count, loss_sums
from learnerkit.marks import collective, not_collective
from learnerkit.parallel import will_shard
from learnerkit.parallel.distributed import member_of
from learnerkit.shards import local
from learnerkit.state import State
from learnerkit.torch_internals import BatchNorm, remove_hooks
from learnerkit.utils import add_note_once, overrides, unwrap

_LEAST = 20  # the least number of measured steps for a value of the table, if there are so many
_OTHERWISE = "accumulate (GradientAccumulation(n_batches=2)), or train on several ranks, where no batch is cut"


class Measured(NamedTuple):
    """The sums that estimate the noise from one step's gradients and those of its parts; of one rank, or of several.

    Args:
        step: the number of the step, from 0.
        squares: the sum over the parts of each part's count times the squared norm of its mean gradient.
        parts: the number of parts that counted anything.
        taken: the sum of their counts, if the step's gradient is their mean; 0 if `squares` are of differences from
            their own mean already.
        counted: the count of the step: over how much its loss is a mean.
        samples: its number of samples.
        whole: the squared norm of its mean gradient.
    """

    step: int
    squares: float
    parts: float
    taken: float
    counted: float
    samples: float
    whole: float

    @property
    def spread(self) -> float:
        """The sum over the parts of what each counts times its squared distance from their mean gradient."""
        return self.squares - self.taken * self.whole

    def is_known(self) -> bool:
        """Tell whether the step says something: it had two parts or more, and no gradient overflowed."""
        return self.parts > 1 and all(map(math.isfinite, self))


def together(rows: Iterable[Measured]) -> list[Measured]:
    """Add up the measurements of several ranks, step by step; they have the same gradient of the whole step."""
    steps: dict[int, Measured] = {}
    for row in rows:
        if (other := steps.get(row.step)) is not None:
            whole = other.whole if row.whole != row.whole else row.whole  # A rank that has left the step has NaN.
            row = Measured._make([row.step, *(a + b for a, b in zip(row[1:-1], other[1:-1], strict=True)), whole])
        steps[row.step] = row
    return list(steps.values())


def estimate(rows: Sequence[Measured]) -> tuple[float, float]:
    """Return the simple noise scale tr(S) / |G|^2 in samples, and its standard error.

    S is the covariance of the gradients of single samples, G their mean (McCandlish et al. 2018,
    https://arxiv.org/abs/1812.06162, appendix A.1). tr(S) is estimated from the spread of the gradients of parts of a
    step around their mean, which does not need parts of one size; |G|^2 from the norm of the step's gradient, less what
    the noise adds to it. Both are averaged over the steps before the quotient is taken. The error is the jackknife's.

    Args:
        rows: the steps that are known.

    Returns:
        NaN without steps; infinity where the mean gradient cannot be told from the noise.
    """
    table = torch.tensor(
        [(r.spread, r.parts - 1, 1 / r.counted, r.whole, r.counted, r.samples, 1.0) for r in rows], dtype=torch.float64
    ).reshape(-1, 7)
    n, sums = len(rows), table.sum(0)
    without_each = _quotient(sums - table)
    error = without_each.std(correction=0).item() * math.sqrt(n - 1) if n > 1 else math.nan
    return _quotient(sums).item(), error if math.isfinite(error) else math.nan


def _quotient(sums: Tensor) -> Tensor:
    spread, free, inverse, whole, count, samples, steps = sums.unbind(-1)
    noise = spread / free
    signal = (whole - noise * inverse) / steps
    return torch.where(signal <= 0, math.inf, noise / signal * samples / count)


class GradientNoiseScale(Callback):
    """Estimates the gradient noise scale: about the batch size beyond which a larger batch brings little.

    With steps of that many samples a fit needs twice as many samples as with very small steps, and twice as many steps
    as with very large ones (McCandlish et al. 2018, https://arxiv.org/abs/1812.06162). It is the simple noise scale
    tr(S) / |G|^2, in samples, over the parameters that the optimizers train. It depends on the rate, and grows as the
    loss falls, so it is a column of the table, `noise_scale`: of the epoch's measured steps, or of the last 20 if the
    epoch has fewer. After the fit a sentence sums it up.

    It compares the gradients of parts of a step with the step's own:

    - Several ranks, accumulation, or both: the parts are the batches of the ranks. Their gradients are seen on their
      way, in the backward pass; nothing is computed twice, nothing is sent until the epoch ends, and the host does not
      wait for the device.
    - One process without accumulation has one gradient a step, and from one gradient nothing can be told. There two
      quarters of the batch are run forward and backward once more in measured steps, before the batch itself; random
      states, the model and the loss are put back, so training goes on as without. It costs a step or two each time,
      and for as long the memory of the weights once more.

    Noise of dropout counts as noise, and BatchNorm has the statistics of a part. Hooks of the model's own modules hear
    of the further passes, and a compiled model runs them without its compiler.

    Args:
        every: optimizer steps between two measured ones; by default 20, or 200 where batches must be cut: about
            a hundredth of the time or less. For a short fit take fewer, as an estimate needs some 20 measured steps.

    Attributes:
        value: the newest estimate, in samples; infinity: the mean gradient is lost in the noise; NaN: not measured.
        error: its standard error.

    Raises:
        ValueError: `every` below 1; at the start of a fit, a learner of which it cannot see the gradients of one loss
            (a `_backward` of its own, `wrap=`), or comm_hook='powersgd', after which the step's gradient is not the
            mean, or a CarriedState where batches must be cut; in its first step, a batch that cannot be cut.
        RuntimeError: in the first step, a parameter that gets its gradient in several pieces.
    """

    order = -5  # sees gradients before others change them, and leaves a batch before others do
    run_valid = False
    only_fit = True
    logs = ("noise_scale",)

    def __init__(self, every: int | None = None) -> None:
        if every is not None:
            arguments.check_count("every", every, "a number of optimizer steps")
        self.every = every
        self._watch: _Watch | None = None
        self._forget()

    def _forget(self) -> None:
        self.value = self.error = math.nan
        self._steps = 0
        self._rows: list[Measured] = []  # the rows of all ranks, in the order of their steps
        self._own = HostScalars()  # this rank's newer rows, one number after the other
        self._row: dict[str, Any] | None = None  # the step that is being measured
        self._norms: dict[int, Tensor] = {}  # norms of the gradients in the current backward pass
        self._heard: list[Tensor] = []  # the parameters with hooks
        self._hooks: list = []

    def before_fit(self) -> None:
        learn = self.learn
        self._check()
        self._forget()
        accumulates = any(cb.n_batches != 1 for cb in running(learn.cbs, GradientAccumulation))
        self._cuts = not (learn.n_ranks > 1 or accumulates)
        if self._cuts and (carries := running(learn.cbs, CarriedState)):
            raise ValueError(
                f"GradientNoiseScale would run the model on parts of a batch, and {carries[0]!r} carries a state for "
                f"the rows of the whole batch: leave one of them out, {_OTHERWISE}"
            )
        self._period = self.every or (200 if self._cuts else 20)
        self._watch = _Watch(self)
        learn.add_cb(self._watch)

    def _check(self) -> None:
        learn = self.learn
        ranks = member_of(learn.cbs) if learn.n_ranks > 1 else None
        several = "a _backward of its own" if overrides(learn, "_backward") else ""
        if ranks is not None and ranks.wrap_names:
            several = f"wrap={ranks.wrap_names}"
        if several:
            raise ValueError(
                f"GradientNoiseScale compares the gradients of one loss, and this learner has {several}: leave it out, "
                "or train the whole model by one loss"
            )
        if will_shard(learn) and running(learn.cbs, SplitBatch):
            raise ValueError(
                "GradientNoiseScale needs the whole gradient of a batch at once, and SplitBatch computes that of a "
                "sharded model in several passes: leave one of them out"
            )
        if ranks is not None and ranks.comm_hook == "powersgd":
            raise ValueError(
                "GradientNoiseScale compares the ranks' gradients with their mean, which comm_hook='powersgd' does not "
                "give: take 'bf16' or no comm_hook"
            )

    # A step

    def before_batch(self) -> None:
        if self._has_begun():
            return
        self._close()
        if self._steps % self._period == 0:
            self._row = {"step": self._steps, "squares": 0.0, "parts": 0, "taken": 0.0, "counted": 0.0, "samples": 0}
        self._steps += 1

    def _has_begun(self) -> bool:
        """Tell whether the current step has had a batch before this one."""
        gradient = self.learn._gradient
        return gradient is not None and gradient.mean.begun

    @not_collective("it looks at this rank's rows alone")
    def _listen(self) -> None:
        """Register hooks that note the norms of the gradients in the backward pass that follows."""
        learn = self.learn
        if self._row is None:
            return
        params = self._params()
        if not self._has_begun():
            left = [p.grad for p in params if p.grad is not None]  # left by skipped steps
            if left:
                self._row["left"] = _square(map(local, left))
        if learn.batch_size and not self._cuts:
            self._norms = {}
            gathered = learn.shards.gathered if learn.shards is not None else {}
            self._heard = [gathered.get(p, p) for p in params]
            self._hooks = [p.register_hook(partial(self._note, i)) for i, p in enumerate(self._heard)]

    def _note(self, number: int, grad: Tensor) -> None:
        if number in self._norms:
            raise RuntimeError(
                "GradientNoiseScale needs the whole gradient of a parameter at once, and one came in several pieces: "
                "give torch.utils.checkpoint use_reentrant=False, or leave GradientNoiseScale out"
            )
        self._norms[number] = torch.linalg.vector_norm(_readable(grad))

    @collective
    def after_backward(self) -> None:
        if self._row is not None:
            self._take_part(self._row)
            if self.learn.step_due:
                self._take_whole(self._row)

    def _take_part(self, row: dict[str, Any]) -> None:
        """Add this rank's batch to the row of the step, after its backward pass."""
        learn, gradient = self.learn, self.learn._gradient
        norms, ran = list(self._norms.values()), bool(self._hooks)
        self._stop_listening()
        if not ran:
            return
        row["samples"] += learn.batch_size
        count = host_count(learn.loss_count)
        if gradient is None or not norms or not counts_something(count):
            return
        first = norms[0].device
        factor = gradient.mean.to_sum / self._scale()
        square = torch.stack([norm.to(first) for norm in norms]).square().sum() * factor**2
        if isinstance(count, Tensor):  # It is on the device; a loss that counts nothing may be NaN.
            square = torch.where(count > 0, square, 0.0) / count.clamp(min=1e-30)
        else:
            square = square / count
        row["squares"] = row["squares"] + square
        row["parts"] = row["parts"] + (count > 0)
        row["taken"] = row["counted"] = row["counted"] + count

    @collective
    def _take_whole(self, row: dict[str, Any]) -> None:
        """Add the gradient of the whole step to its row, and end the row."""
        grads = [p.grad for p in self._params() if p.grad is not None]
        if not grads:
            return
        whole = _square(grads) / self._scale() ** 2
        if self._cuts:
            row |= {"counted": host_count(self.learn.loss_count), "samples": self.learn.batch_size}
        row["whole"] = torch.where(row["left"] > 0, math.nan, whole) if "left" in row else whole
        self._close()

    def _close(self) -> None:
        """Store the row of the measured step, if there is one."""
        row, self._row = self._row, None
        if row is not None:
            for name in Measured._fields:
                self._own.append(row.get(name, math.nan))
            self._own.poll()

    def _stop_listening(self) -> None:
        remove_hooks(self._hooks, self._heard)
        self._hooks = []
        self._heard = []
        self._norms = {}

    # The pass that is left out counts nothing, and its rank may go on with gradients of zero.
    after_cancel_backward = after_cancel_batch = cleanup_train = _stop_listening

    # One process without accumulation

    @not_collective("it is for one process")
    def _cut_batch(self) -> None:
        """Measure the spread of the gradients of two quarters of the batch, and leave no other trace."""
        learn, row = self.learn, self._row
        if row is None or not self._cuts:
            return
        model = unwrap(learn.model)
        batch, whole = (learn.xb, learn.yb), learn.batch_size
        size = max(whole // 4, 1 + any(isinstance(m, BatchNorm) for m in model.modules()))
        if 2 * size > whole:
            self._row = None
            return
        try:
            with trial(learn, model):
                (first, one), (second, other) = (self._gradient_of(batch, i * size, size, whole) for i in range(2))
        except CancelException:  # A hook of the model raised it, and will in the batch itself; or nothing counts.
            self._row = None
            return
        apart = [a if b is None else b if a is None else a - b for a, b in zip(first, second, strict=True)]
        square = _square([t for t in apart if t is not None]) / self._scale() ** 2
        row |= {"squares": square * (one * other / (one + other)), "parts": 2}

    def _gradient_of(self, batch: tuple[Any, Any], start: int, size: int, whole: int) -> tuple[list, Any]:
        """Return the gradient of the mean loss of some samples of a batch, and what they count; inside a `trial`."""
        learn = self.learn
        try:
            if not can_be_cut(learn, *batch, whole):
                raise ValueError(f"GradientNoiseScale cannot cut a batch whose parts are not {whole} rows each")
            learn.xb, learn.yb = samples_between(learn, *batch, start, start + size)
            learn.batch_size = size
            learn._forward()
            if torch.is_autocast_enabled(learn.dls.device.type):
                predictions_in_float32(learn)
            learn._loss()
            count = host_count(batch_count(learn))
            if not counts_something(count):
                raise CancelBatchException  # there is no mean loss
            loss = learn.loss_grad * self._scale() / (count if loss_sums(learn) else 1)
            return list(torch.autograd.grad(loss, self._params(), allow_unused=True)), count
        except CancelException:
            raise
        except Exception as e:
            add_note_once(
                e, f"GradientNoiseScale ran the model on {size} of the {whole} samples of a batch; instead {_OTHERWISE}"
            )
            raise

    # Gradients

    def _params(self) -> list[nn.Parameter]:
        """Return the parameters that are trained."""
        return [p for p in dict.fromkeys(optim.parameters_of(self.learn.opts)) if p.requires_grad]

    def _scale(self) -> float | Tensor:
        """Return the loss scale of mixed precision, or 1; it stays on the device."""
        for cb in running(self.learn.cbs, MixedPrecision):
            if cb.scaler is not None:
                return cb.scaler.scale(torch.ones((), device=self.learn.dls.device))
        return 1.0

    # Summing up

    @collective
    def after_epoch(self) -> None:
        self._estimate()
        self.learn.log_metric("noise_scale", self.value)

    @collective
    def _estimate(self) -> None:
        """Update the estimate from the measurements of all ranks; every rank must reach this. A host-device sync."""
        self._close()
        own = _rows_of(self._own)
        ranks = distributed.all_gather(own) if self.learn.n_ranks > 1 else [own]
        self._own = HostScalars()
        rows = together(row for rank in ranks for row in rank)
        if loss_sums(self.learn):  # the step's gradient is a sum, too
            rows = [row._replace(whole=row.whole / max(row.counted, 1) ** 2) for row in rows]
        known = [row for row in rows if row.is_known()]
        if known:
            self._rows += known
            self.value, self.error = estimate(self._rows[-max(len(known), _LEAST) :])

    @collective
    def after_fit(self) -> None:
        self._estimate()  # The last epoch may have been cancelled.
        self.learn.say(self._sentence())

    def _sentence(self) -> str:
        rows = self._rows
        if not rows:
            more = "without accumulation a batch of one sample cannot be cut, and with BatchNorm none of less than four"
            if not self._cuts:
                more = "the parts are the batches of a step, and with too small an n_samples= it has a single one"
            return f"gradient noise scale: not measured, as no step had two parts with finite gradients ({more})"
        step = f"a step has {sum(row.samples for row in rows) / len(rows):.0f} samples, {len(rows)} were measured"
        if not math.isfinite(self.value):
            return f"gradient noise scale: too large to be told from these steps, so batches may grow; {step}"
        about = f"{float(f'{self.value:.2g}'):.0f}" if self.value >= 1 else "1"
        error = f" (give or take {self.error:.2g})" if math.isfinite(self.error) else ""
        return f"gradient noise scale: batches beyond about {about} samples{error} bring little; {step}"

    def cleanup_fit(self) -> None:
        if self._watch is not None:
            self.learn.remove_cb(self._watch)
            self._watch = None
        self._stop_listening()

    def state_dict(self) -> State:
        """Return the measurements of all ranks so far, and this rank's own of the current epoch. A host-device sync."""
        self._close()
        own = [list(row) for row in _rows_of(self._own)]
        rows = [list(row) for row in self._rows]
        return {"steps": self._steps, "value": self.value, "error": self.error, "rows": rows, "own": own}

    def load_state_dict(self, state: State) -> None:
        """Restore the measurements; on another number of ranks, rank 0 gets those of all ranks."""
        self._steps = state["steps"]
        self.value = state["value"]
        self.error = state["error"]
        self._rows = [Measured(*row) for row in state["rows"]]
        ranks = [state["own"]] if "own" in state else state["ranks"] if distributed.is_main() else []
        self._own, self._row = HostScalars(value for rank in ranks for row in rank for value in row), None


class _Watch(Callback):
    """The part of `GradientNoiseScale` that sees batches and losses as they come to the model.

    Args:
        scale: the callback of which this is a part.
    """

    order = 49
    run_valid = False
    only_fit = True

    def __init__(self, scale: GradientNoiseScale) -> None:
        self.before_batch, self.before_backward = scale._cut_batch, scale._listen

    def __repr__(self) -> str:
        return "GradientNoiseScale"


def _rows_of(numbers: HostScalars) -> list[Measured]:
    width = len(Measured._fields)
    flat = numbers.all()
    return [Measured._make(flat[i : i + width]) for i in range(0, len(flat), width)]


def _readable(grad: Tensor) -> Tensor:
    """Return the values of a gradient, in float32 or better: a norm in half precision would have three digits."""
    return in_float32(grad.coalesce().values() if grad.layout is torch.sparse_coo else grad)


@torch.no_grad()
@collective
def _square(grads: Iterable[Tensor]) -> Tensor:
    """Return the squared norm of several tensors together; if they are shards, every rank must reach this."""
    return total_norm([_readable(grad) for grad in grads], 2.0).square()
