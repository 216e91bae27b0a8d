"""DistributedDataParallel for as long as a fit lasts: what it compares, wraps and shares out, and puts back."""

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

from learnerkit import optim, world
from learnerkit.callback import Callback, Dispatch, is_ours
from learnerkit.data.batches import loader_len, map_batch, on_host, tensors_in
from learnerkit.data.order import draws_globally, states_at_start
from learnerkit.parallel import model_checks
from learnerkit.parallel.agreement import Agreement, RankDispatch
from learnerkit.parallel.averager import Averager
from learnerkit.parallel.drift import digests, give_values
from learnerkit.parallel.left_batch import LeftBatch
from learnerkit.parallel.loaders import RankLoader, rank_loader
from learnerkit.parallel.rank_step import COMM_HOOKS, RankStep
from learnerkit.text import did_you_mean
from learnerkit.utils import listify, spanned_devices, warn

if TYPE_CHECKING:
    from learnerkit.learner import Learner

OWN_DEVICE = "each process takes the device of its local rank by itself, so leave the device out"


class DistributedCallback(Callback):
    """Trains with one process per device: each rank reads its share of every global batch, gradients are averaged.

    The gradient of a step is the exact mean over the samples of all ranks (or over what `loss_weight` counts), also
    where they have different numbers of them. Validation and prediction read each sample once, on the plain module.
    What one rank leaves for (a cancel, Ctrl-C, an error), all leave for.

    Gradients are averaged by DDP during the backward pass where it can, else after it, which a line says: where the
    learner has a `_backward` or `_step` of its own, or the first batch leaves parameters without a gradient, or gives
    them sparse gradients, or several. Nothing is wrapped around the model.

    Buffers, BatchNorm's statistics among them, are rank 0's: they are sent before each step (not with
    broadcast_buffers=False), and once more before validation and at the end of training.

    A model that spans several devices, as by transformers' `device_map`, is trained by processes that have devices of
    their own each. It must be whole on each of them: what is divided among processes is not DDP's work.

    On one process it does nothing.

    Args:
        sync_bn: let BatchNorm see the global batch; False: that of its own rank. By default it does wherever torch can,
            which is not on the CPU; True warns there.
        split_batches: cut each batch of the loader into one piece per rank, so that the numbers are those of one
            process; by default every rank takes whole batches, and the global batch is that much larger.
        find_unused_parameters: True for losses that leave parameters out in some batches, but not in the first of a
            fit: gradients are averaged after the backward pass rather than during it, whichever there are. `None` goes
            by the first batch; False refuses parameters that take no part in it.
        timeout: seconds (or a timedelta) without anything moving after which a rank that waits for others ends the
            run and says where each of them is; default 5 minutes, or what the launcher's `--timeout` says.
        wrap: names of the networks that are trained; none may be forgotten.
        sharded: the dataset of an iterable loader gives each rank its own part by itself.
        uneven: where iterable datasets end at different steps: 'stop' all with the first, and warn; or 'join': the
            ranks that have ended take the others' steps along without data.
        comm_hook: compress the gradients on their way: 'bf16', 'fp16' or 'powersgd'. The numbers are then no longer
            those of one process. Only for gradients that DDP averages.
        ddp_kwargs: further arguments of `DistributedDataParallel`.

    Raises:
        TypeError, ValueError: an argument that is unknown, or has no such value.
    """

    order = 11

    def __init__(
        self,
        sync_bn: bool | None = None,
        split_batches: bool = False,
        find_unused_parameters: bool | None = None,
        timeout: float | timedelta | None = None,
        wrap: tuple[str, ...] | None = None,
        *,
        sharded: bool = False,
        uneven: str = "stop",
        comm_hook: str | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        super().__init__()
        self.sync_bn, self.split_batches, self.find_unused_parameters = sync_bn, split_batches, find_unused_parameters
        if timeout is None:
            timeout = float(os.environ.get("LEARNERKIT_TIMEOUT", 300))
        self.timeout = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        self.wrap_names = tuple(listify(wrap))
        self.dataset_is_sharded, self.uneven, self.comm_hook = sharded, uneven, comm_hook
        if uneven not in ("stop", "join"):
            raise ValueError(f"got uneven={uneven!r}; it takes 'stop' or 'join'")
        if comm_hook not in (None, *COMM_HOOKS):
            raise ValueError(f"got comm_hook={comm_hook!r}; it takes None, {', '.join(map(repr, COMM_HOOKS))}")
        if self.timeout <= 0:
            raise ValueError(f"got timeout={timeout}; it is a number of seconds greater than 0")
        allowed = set(signature(DistributedDataParallel).parameters) - {"module", "device_ids", "output_device"}
        for name in ddp_kwargs:
            if name not in allowed:
                near = did_you_mean(name, [*allowed, *signature(DistributedCallback).parameters])
                near = near if name != "cuda_id" else f": {OWN_DEVICE}"
                raise TypeError(f"got the argument {name!r}, which neither DistributedCallback nor DDP takes{near}")
        self.ddp_kwargs = ddp_kwargs
        self._told: set[str] = set()
        self._forget()

    def _forget(self) -> None:
        self._averager: Averager | None = None  # of the fit, once it trains
        self._loaders: dict[tuple, tuple[Any, RankLoader]] = {}
        self._undo: list[Callable[[], object]] = []
        self._outside: list[tuple] = []

    def tell_once(self, message: str, by: Callable[[str], object] = warn) -> None:
        """Say something on rank 0, once for this learner; of another one the same may be true."""
        if world.is_main() and message not in self._told:
            self._told.add(message)
            by(message)

    # A fit

    def before_fit(self) -> None:
        learn = self.learn
        if world.world_size() == 1:
            return
        if not world.is_main():
            self._undo.append(partial(setattr, learn, "logger", learn.logger))
            learn.logger = lambda row: None
        with world.grouped_collectives():
            if learn.task in ("validate", "predict"):
                self._prepare_evaluation()
            else:
                self._compare()

    def _prepare_evaluation(self) -> None:
        """Give all ranks rank 0's weights where they differ, and random streams of their own where they share one."""
        give_values([*self.learn.model.parameters(), *self.learn.model.buffers()])
        world.spread_seeds(world.all_gather(world.seed_digest()))

    def _compare(self) -> None:
        """Refuse a fit that differs between ranks, and give all of them rank 0's optimizer state and sample order."""
        learn = self.learn
        facts = {
            "epochs": learn.n_epoch,
            "steps": learn.n_steps,
            "first epoch": learn._start_epoch,
            "batches of training": None if self.dataset_is_sharded else loader_len(learn.dls.train),
            "batches of validation": None if self.dataset_is_sharded else loader_len(learn.dls.valid),
            "learning rates": [float(g["lr"]) for opt in learn.opts for g in opt.param_groups],
            "parameters": sum(p.numel() for p in learn.model.parameters()),
            **_settings(learn.cbs),
        }
        order = None if learn._position is None else learn._position.order.generator
        optimizers = [_digest(opt.state_dict()) for opt in learn.opts]
        placed = socket.gethostname(), list(map(str, spanned_devices(learn.model)))
        mine = facts, optimizers, world.seed_digest(), order and order.get_state(), placed
        everyone, others, seeds, orders, places = zip(*world.all_gather(mine), strict=True)
        model_checks.check_devices(places)
        for name in dict.fromkeys(name for other in everyone for name in other):
            found = {r: other[name] for r, other in enumerate(everyone) if name in other}  # a callback may be on some
            if any(value != next(iter(found.values())) for value in found.values()):
                by_rank = ", ".join(f"rank {r}: {value}" for r, value in found.items())
                raise ValueError(
                    f"fit differs between ranks in its {name} ({by_rank}); every rank must make the same call"
                )
        if any(other != others[0] for other in others):
            for opt in learn.opts:
                optim.load_state(opt, world.broadcast(on_host(opt.state_dict())), learn.model)
        world.spread_seeds(seeds)
        if order is not None:
            order.set_state(orders[0])

    def cleanup_fit(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._forget()

    # Training

    def before_train(self) -> None:
        if world.world_size() == 1:
            return
        learn = self.learn
        if self._averager is None:
            step = RankStep(learn, cast(Agreement, learn._agreement))
            left_batch = step.agreement.left_batch = LeftBatch(learn, step)
            for cb in (left_batch.stand_in, _BatchHook(left_batch)):
                learn.add_cb(cb)
                self._undo.append(partial(learn.remove_cb, cb))
            self._averager = Averager(self, step)
            self._undo.append(self._averager.end)
        self._averager.begin()
        self._enter(training=True)
        learn._gradient = self._averager.way

    def after_train(self) -> None:
        self._send_buffers()

    def _share_out(self, dl: Any, training: bool) -> RankLoader:
        learn, key = self.learn, (id(dl), training)
        drawn = draws_globally(dl) or isinstance(getattr(dl, "dataset", None), IterableDataset)
        position = learn._position if training else None
        seed = since = None if position is None else position.states  # known, if a run goes on in mid-epoch
        if seed is None:
            seed = world.broadcast(states_at_start(dl)) if drawn else 0  # the order is the one that rank 0 would draw
        if key not in self._loaders:
            name, dataset = "the training loader" if training else "the loader", getattr(dl, "dataset", None)
            if training and isinstance(dataset, Sized) and len(dataset) < world.world_size():
                some = f"{len(dataset)} sample{'s' if len(dataset) > 1 else ''} for {world.world_size()} ranks"
                self.tell_once(f"the training data has {some}: some of them have nothing to do")
            # With statistics per rank, BatchNorm needs two samples on a rank, or none.
            alone = training and any(
                not isinstance(m, nn.SyncBatchNorm) for m in model_checks.batch_norms(self.learn.model)
            )
            least = 2 if alone else 1
            step = self._averager.step if training and self._averager is not None else None
            shared = rank_loader(
                dl, name, training=training, split=self.split_batches, least=least, seed=seed,
                sharded=self.dataset_is_sharded, join=self.uneven == "join", rank_step=step,
            )  # fmt: skip
            if learn.dls.keeps(dl):  # else it is made for this reading alone
                self._loaders[key] = dl, shared  # with the loader itself, so that its id stays its own
        else:
            shared = self._loaders[key][1]
        shared.reseed(seed, since)
        if position is not None:
            position.states = seed if drawn else None
            learn._first_batch = position.share(shared)
        return shared

    # Evaluation, without collectives in the forward pass

    def before_validate(self) -> None:
        if world.world_size() == 1:
            return
        self._enter(training=False)
        self._send_buffers()

    def _send_buffers(self) -> None:
        """Give every rank rank 0's buffers; every rank must reach this."""
        if self._averager is not None and self._averager.model is not None:
            world.broadcast_into(list(self._averager.model.buffers()))

    # What training and evaluation swap and put back; evaluation may be called in the middle of training

    def _enter(self, training: bool) -> None:
        learn = self.learn
        self._outside.append((learn.dl, None if training else learn._gradient))
        learn.dl = self._share_out(learn.dl, training)

    def cleanup_train(self) -> None:
        if self._outside:
            self.learn.dl, self.learn._gradient = self._outside.pop()

    cleanup_validate = cleanup_train


class _BatchHook(Callback):
    """The part of `DistributedCallback` that runs at each training batch, for as long as a fit lasts.

    Args:
        left_batch: finishes what this rank leaves; its step prepares the batch.
    """

    order = DistributedCallback.order
    run_valid = False

    def __init__(self, left_batch: LeftBatch) -> None:
        super().__init__()
        # Attributes rather than keywords, which refer to the callback: nothing of a run is left to garbage collection.
        self.before_batch = left_batch.step.before_batch
        self.after_cancel_backward = left_batch.finish_backward
        self.after_cancel_step = left_batch.step_unless_all_skip
        self.after_cancel_batch = left_batch.finish_batch
        if left_batch.learn._overrides("_step"):  # which may step without the optimizer's `step`
            self.after_step = left_batch.step.note_optimizer_step

    def __repr__(self) -> str:
        return "DistributedCallback"


def member_of(cbs: Iterable[Callback]) -> DistributedCallback | None:
    """Return the callback by which a learner is one of several ranks, if there is one."""
    return next((cb for cb in cbs if isinstance(cb, DistributedCallback)), None)


def warn_outside_context(learn: "Learner") -> None:
    """Warn, once for a learner, that several processes are about to train the same thing, each for itself."""
    distributed = member_of(learn.cbs) is not None
    if world.world_size() > 1 and world.is_main() and not distributed and not learn._told_outside:
        learn._told_outside = True
        warn(
            f"{world.world_size()} processes each train a whole copy of the model on all the data; "
            "to train one together write `with learn.distrib_ctx(): learn.fit(...)`"
        )


@contextmanager
def agreement_for(learn: "Learner", what: str) -> Iterator[None]:
    """Enter an `Agreement` for the call `what`, where a run is one of several ranks and not inside another."""
    member = member_of(learn.cbs)
    if member is None or world.world_size() == 1 or learn._agreement is not None:
        yield
        return
    what = "get_preds" if what == "predict" else what
    try:
        with Agreement(learn).run(what, member.timeout) as learn._agreement:
            yield
    finally:
        learn._agreement = None


def dispatch(learn: "Learner", fitting: bool) -> Dispatch:
    """The dispatch of a run."""
    if learn._agreement is None:
        return Dispatch(learn.cbs, fitting)
    return RankDispatch(learn.cbs, fitting, learn._agreement)


def _settings(cbs: Iterable[Callback]) -> dict[str, str]:
    """The plain arguments of the library's callbacks that run on every rank: many say when ranks communicate.

    A callback that is derived from one of these has those of its base. The user's own may differ by rank.
    """
    found: dict[str, str] = {}
    for cb in cbs:
        base = next(kind for kind in type(cb).__mro__ if is_ours(kind))
        if base is Callback or cb.rank0_only or not cb.run:
            continue
        for name, value in vars(cb).items():
            if name in signature(base).parameters and isinstance(value, int | float | str | None):
                key = f"{base.__name__}({name}=)"
                found[key] = f"{found[key]}, {value!r}" if key in found else repr(value)
    return found


def _digest(state: dict) -> tuple:
    """Fingerprint of the state of an optimizer. A host-device sync."""
    return digests(list(tensors_in(state))), repr(map_batch(lambda t: (t.shape, t.dtype), state))
