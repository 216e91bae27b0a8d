"""Batches that run out of memory, which are taken in parts of one optimizer step."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from learnerkit import arguments, distributed, optim
from learnerkit.callback import Callback, readers_of_predictions, running
from learnerkit.callbacks.batch_parts import Batches, Part
from learnerkit.callbacks.carried import CarriedState
from learnerkit.callbacks.sharded_parts import ShardedBatches
from learnerkit.data.batches import in_float32
from learnerkit.data.order import keep_seeds
from learnerkit.losses import counts_predictions, doubtful_count, is_of_torch, loss_name, pass_kept
from learnerkit.marks import collective
from learnerkit.state import State
from learnerkit.text import first_few
from learnerkit.torch_internals import BatchNorm, Dropout
from learnerkit.utils import overrides, unwrap

_CAREFUL_STEPS = 2
"""The first steps of a training, in which any batch may run out of memory: the optimizer's state comes with one."""


class SplitBatch(Callback):
    """Takes a batch that runs out of memory again in several parts, with the same loss, gradient and step.

    A batch whose forward pass, loss or backward pass runs out of memory is computed again in more parts, until each
    part fits, and one optimizer step follows as if it had not been cut. What the failed try has changed is put back:
    random states, buffers and gradients. The number of parts stays for batches of that size, in later fits, too, and
    checkpoints have it. Several processes take the largest number that any of them needs. Callbacks see the events of
    the batch once, with the predictions and the loss of all its parts. Batches of validation and prediction are cut in
    the same way.

    The loss is the mean over what the losses of the parts count (`loss_weight=`), so that loss and gradient differ from
    those of the whole batch by rounding alone. What cannot be equal is said once: statistics of BatchNorm, and random
    numbers such as those of dropout, which are drawn for each part. A loss function that compares the samples of a
    batch with each other is refused. If a callback makes the loss depend on the predictions in another way, as MixUp
    does, the gradient is exact, too, and the parts are computed twice.

    Args:
        parts: the number of parts of a training batch; `None`: 1, and more where a batch runs out of memory.

    Attributes:
        parts: the number of parts in which training batches are taken now.

    Raises:
        ValueError: a number of parts below 1; in a fit, what cannot be cut exactly: backward passes or closures of the
            learner's own, a state that is carried from batch to batch, a loss_weight for each of several losses, or a
            loss that compares samples with each other.
        torch.OutOfMemoryError: one sample alone does not fit; or memory ran out where a batch cannot be taken again: in
            the optimizer's step, late in a fit in the backward pass of an accumulated or distributed step, or with
            `shard=True` late in a fit in a batch of a size that has fitted.
    """

    order = 13  # behind what gives a batch without data its forward pass

    def __init__(self, parts: int | None = None) -> None:
        if parts is not None:
            arguments.check_count("parts", parts)
        self.parts = parts or 1
        self._fits = 0  # the largest size of a training batch that is known to fit as it is
        self._evaluated = (1, 0)  # the same two numbers for evaluation
        self._open: list[Batches] = []  # a callback may evaluate in the middle of a training
        self._batches = 0  # batches of the current training, equal on all ranks
        self._said = 0  # the number of parts that was printed last
        self._checked = False  # whether the loss of a whole batch was equal to that of its parts

    def before_fit(self) -> None:
        learn, why = self.learn, ""
        self._batches = 0
        if learn.task in ("validate", "predict"):
            return
        if overrides(learn, "_backward", "_step"):  # an optimizer that needs a closure takes the place of `_step`
            who = type(learn.opts[0] if learn._by_closure else learn).__name__
            why = f"{who} makes backward passes or steps of its own, for which it needs the whole batch"
        elif carries := running(learn.cbs, CarriedState):
            why = f"{carries[0]!r} carries a state for the rows of the whole batch"
        elif isinstance(learn.loss_weight, Mapping):
            why = "loss_weight= has a count for each of several losses, which are known after the last part alone"
        elif any(getattr(cb, "ddp_kwargs", {}).get("static_graph") for cb in learn.cbs if cb.run):
            why = "with static_graph=True DDP counts backward passes, of which each part has one"
        if why:
            raise ValueError(
                f"SplitBatch cannot take a batch in parts: {why}. Leave SplitBatch out, and take smaller batches"
                " (errors.html#split-batch)"
            )

    @collective
    def before_train(self) -> None:
        learn = self.learn
        beside = optim.parameters_beside(learn.model, learn.loss_func, learn.opts)
        params: list[Tensor] = [*learn.model.parameters(), *beside]
        if learn.n_ranks > 1:
            self._batches = 0  # Ranks agree on the parts in the first batches of each epoch.
        if learn.shards is not None:
            self._open.append(ShardedBatches(self, params))
            return
        self._open.append(Batches(self, params))
        if learn.n_ranks > 1:
            step: Any = next(cb for cb in learn.cbs if cb.name == "left_batch")
            step.step.agree = self._agree

    def before_validate(self) -> None:
        self._open.append(Batches(self, []))

    def before_batch(self) -> None:
        self._open[-1].begin()

    def after_batch(self) -> None:
        self._open[-1].end()
        if self.learn.training and self.learn.n_ranks == 1:
            self._batches += 1

    def cleanup_train(self) -> None:
        self._open.pop().end()  # A batch may have been left before its end.

    cleanup_validate = cleanup_train

    # The number of parts

    @property
    def parts(self) -> int:
        # It may differ between ranks when a fit begins, where attributes that are named as arguments may not.
        return self._parts

    @parts.setter
    def parts(self, parts: int) -> None:
        self._parts = parts

    @property
    def is_careful(self) -> bool:
        """Tell whether any batch may run out of memory, and not only one that is larger than those before."""
        return self.learn.training and self._batches < _CAREFUL_STEPS * self.learn.step_batches

    @property
    def limits(self) -> tuple[int, int]:
        """The number of parts, and the largest size of a batch that fits as it is."""
        return (self.parts, self._fits) if self.learn.training else self._evaluated

    def parts_of(self, rows: int, parts: int) -> int:
        """Return the number of parts in which a batch of so many samples is taken if others are taken in `parts`.

        For a BatchNorm that trains each of them has two samples, as one has no variance, unless two do not fit.
        """
        # With more rows each part has two samples anyway.
        trains = 2 * parts > rows and any(isinstance(m, BatchNorm) and m.training for m in self.learn.model.modules())
        return min(parts, rows // 2 or rows if trains else rows)

    def note_fit(self, batch: "Batches") -> None:
        """Note that a batch has fitted in its number of parts."""
        parts, fits = self.limits
        if batch.parts > 1:
            size_of_part = -(-batch.size * max(part.rows for part in batch.cut) // batch.rows)
            parts, fits = max(parts, batch.parts), max(min(fits, batch.size - 1), size_of_part)
        elif not self.is_careful:
            fits = max(fits, batch.size)
        if self.learn.training:
            self.parts, self._fits = parts, fits
        else:
            self._evaluated = parts, fits
        if self.learn.training and batch.parts > 1 and parts > self._said:
            self._said = parts
            unequal = _unequal(unwrap(self.learn.model), batch.cut, batch.buffers.changed())
            but = f". Not equal to the whole batch: {unequal}" if unequal else ""
            self.learn.say(f"SplitBatch takes batches of {batch.rows} samples in {batch.parts} parts{but}")

    @collective
    def _agree(self) -> None:
        """Take the largest number of parts that any rank needs; every rank must reach this before its backward pass."""
        careful = self.is_careful
        self._batches += 1
        if not careful:
            return
        batch = self._open[-1] if self.learn.batch_size else None  # This rank may have no data.
        while True:
            mine = (batch.parts, batch.rows) if batch else (0, 0)
            everyone = distributed.all_gather((*mine, self.parts), among="votes")
            of_batch, rows, known = zip(*everyone, strict=True)
            most, self.parts = max(of_batch), max(known)
            if all(parts >= self.parts_of(n, most) for parts, n in zip(of_batch, rows, strict=True)):
                break
            if batch is not None and batch.parts < (wanted := self.parts_of(batch.rows, most)):
                batch.compute(wanted)

    # The loss

    def keeps_predictions(self) -> bool:
        """Tell whether the predictions of a training batch are read after the forward pass."""
        learn = self.learn
        is_known = self._checked or is_of_torch(learn.loss_func)
        return not is_known or bool(readers_of_predictions(learn)) or counts_predictions(learn)

    def check_count(self) -> None:
        """Refuse a model's own loss if it is not known over how much it is a mean. A host-device sync, once."""
        if self._checked or self.learn.loss_func is not None:
            return
        if why := doubtful_count(self.learn):
            raise ValueError(
                f"{why}. Until then SplitBatch cannot take a batch in parts. If the loss compares the samples of a "
                "batch with each other, as that of CLIP does, take smaller batches (errors.html#split-batch)"
            )
        self._checked = True

    def check_loss(self, loss: Callable[[], None], found: Tensor | None) -> None:
        """Refuse a loss that is not that of the parts: it compares samples with each other. A host-device sync, once.

        Args:
            loss: computes the loss of the whole batch.
            found: the loss that was computed from the parts.
        """
        learn = self.learn
        if self._checked or found is None or is_of_torch(learn.loss_func):
            return
        with torch.no_grad(), pass_kept(learn), keep_seeds(device=learn.dls.device):
            before = torch.get_rng_state()
            loss()
            whole, draws = in_float32(learn.loss), not torch.equal(before, torch.get_rng_state())
        if not draws and not torch.isclose(whole, found, rtol=1e-3, atol=1e-6, equal_nan=True):
            raise ValueError(
                f"the loss of a batch is {float(whole):.6g}, and that of its {self.parts} parts together "
                f"{float(found):.6g}: {loss_name(learn.loss_func)} compares the samples of a batch with each other, or "
                "averages over something else than loss_weight= says. SplitBatch cannot take it in parts: take smaller "
                "batches, or say by loss_weight= what the loss averages over (errors.html#split-batch)"
            )
        self._checked = True

    def state_dict(self) -> State:
        """Return the numbers of parts of this rank, and the sizes that fit."""
        batches = {"batches": self._batches} if self._batches else {}
        return {"own": {"train": (self.parts, self._fits), "evaluation": self._evaluated} | batches}

    def load_state_dict(self, state: State) -> None:
        """Restore the numbers of parts; on another number of ranks, take the most parts and the smallest sizes."""
        ranks = state["ranks"] if "ranks" in state else [state["own"]]

        def joined(name: str) -> tuple[int, int]:
            parts, fits = zip(*(each[name] for each in ranks), strict=True)
            return max(parts), min(fits)

        (self.parts, self._fits), self._evaluated = joined("train"), joined("evaluation")
        # The first batches are computed in another way, with other rounding. (Older checkpoints do not have the count.)
        self._batches = min(each.get("batches", 0) for each in ranks)


# In words


def _unequal(model: nn.Module, parts: list[Part], changed: list[dict[str, Any]]) -> str:
    """Name what differs from computing the whole batch; `changed`: tables of buffers that the passes have changed."""
    named = [(_called(name, m), m) for name, m in model.named_modules() if m.training]
    norms = [name for name, m in named if isinstance(m, BatchNorm)]
    others = [name for name, m in named if any(m._buffers is b for b in changed) and name not in norms]
    drops = [name for name, m in named if isinstance(m, Dropout) and m.p]
    drawn = first_few(drops) or ("the model" if _draws(parts) else "")
    texts = [f"the statistics of {first_few(norms)}"] * bool(norms)
    texts += [f"the buffers of {first_few(others)}"] * bool(others)
    texts += [f"the random numbers of {drawn} (equal in law)"] * bool(drawn)
    return " and ".join(texts)


def _called(name: str, module: nn.Module) -> str:
    """Name a module, with its type if the name is a number, as in `nn.Sequential`."""
    kind = type(module).__name__
    return f"{name} ({kind})" if name.rpartition(".")[2].isdigit() else name or kind


def _draws(parts: list[Part]) -> bool:
    (first, first_device), (second, second_device) = (part.streams for part in parts[:2])
    return not all(map(torch.equal, (first[0], *first_device), (second[0], *second_device)))
