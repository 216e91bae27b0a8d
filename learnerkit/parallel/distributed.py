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
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from learnerkit import optim, world
from learnerkit.callback import Callback, Dispatch, is_ours
from learnerkit.data.batches import loader_len, map_batch, on_host, tensors_in
from learnerkit.data.order import draws_globally, states_at_start
from learnerkit.parallel import wrapping
from learnerkit.parallel.agreement import Agreement, RankDispatch
from learnerkit.parallel.company import Company
from learnerkit.parallel.drift import digests
from learnerkit.parallel.first_batch import Trial
from learnerkit.parallel.loaders import RankLoader, rank_loader
from learnerkit.parallel.rank_step import RankStep
from learnerkit.parallel.wrapping import COMM_HOOKS
from learnerkit.text import did_you_mean, first_few
from learnerkit.utils import listify, spanned_devices, warn

if TYPE_CHECKING:
    from learnerkit.learner import Learner

OWN_DEVICE = "each process takes the device of its local rank by itself, so leave the device out"


class DistributedCallback(Callback):
    """Trains with one process per device: each rank reads its share of every global batch, gradients are averaged.

    The gradient of a step is the exact mean over the samples of all ranks (or over what `loss_weight` counts), also
    where they have different numbers of them. Validation and prediction read each sample once, on the plain module.
    What one rank leaves for (a cancel, Ctrl-C, an error), all leave for.

    Buffers, BatchNorm's statistics among them, are rank 0's: DDP sends them before each forward pass (not with `wrap`,
    and not with broadcast_buffers=False), and this callback once more before validation and at the end of training.

    A model that spans several devices, as by transformers' `device_map`, is trained by processes that have devices of
    their own each. It must be whole on each of them: what is divided among processes is not DDP's work.

    On one process it does nothing.

    Args:
        sync_bn: let BatchNorm see the global batch; False: that of its own rank. By default it does wherever torch can,
            which is not on the CPU; True warns there.
        split_batches: cut each batch of the loader into one piece per rank, so that the numbers are those of one
            process; by default every rank takes whole batches, and the global batch is that much larger.
        find_unused_parameters: True for losses that leave parameters out in some batches, or callbacks with backward
            passes of their own: gradients are averaged after the backward passes rather than during the loss's,
            whichever there are. `None` finds out with the first batch of each fit.
        timeout: seconds (or a timedelta) without anything moving after which a rank that waits for others ends the
            run and says where each of them is; default 5 minutes, or what the launcher's `--timeout` says.
        wrap: names of sub-modules to wrap each by itself, for several networks; by default the whole model. Costs one
            small collective a step. Several backward passes of a step may reach a network, but with
            find_unused_parameters=True only one for each of its forward passes.
        sharded: the dataset of an iterable loader gives each rank its own part by itself.
        uneven: where iterable datasets end at different steps: 'stop' all with the first, and warn; or 'join': the
            ranks that have ended take the others' steps along without data.
        comm_hook: compress the gradients on their way: 'bf16', 'fp16' or 'powersgd'. The numbers are then no longer
            those of one process.
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
        # Sent again by a second forward pass, as in a GAN, buffers would change under the first one's graph.
        sends_buffers = "forward_sync_buffers" if "forward_sync_buffers" in allowed else "broadcast_buffers"
        self.ddp_kwargs = ({sends_buffers: False} if self.wrap_names else {}) | ddp_kwargs
        self._warned: set[str] = set()
        self._forget()

    def _forget(self) -> None:
        self._plain: Any = None  # the model of the fit, without DDP
        self._wrapped: nn.Module | None = None
        self._trainable: list[bool] = []
        self._parts: dict[str, nn.Module] = {}
        self._step: Any = None  # its `RankStep`
        self._loaders: dict[tuple, tuple[Any, RankLoader]] = {}
        self._undo: list[Callable[[], object]] = []
        self._heard: list[Optimizer] = []  # whose steps are heard of
        self._outside: list[tuple] = []

    def _warn_once(self, message: str) -> None:
        "Once for this learner; of another one the same may be true."
        if world.is_main() and message not in self._warned:
            self._warned.add(message)
            warn(message)

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
        tensors = [*self.learn.model.parameters(), *self.learn.model.buffers()]
        mine = [t.shape for t in tensors], digests(tensors), world.seed_digest()
        shapes, values, seeds = zip(*world.all_gather(mine), strict=True)
        if any(other != shapes[0] for other in shapes):
            raise ValueError("the model differs between ranks in its parameters' shapes; every rank must make the same")
        if any(other != values[0] for other in values):
            world.broadcast_into(tensors)  # else different models would be mixed
        world.spread_seeds(seeds)

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
        wrapping.check_devices(places)
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
        if self._step is None:
            self._start()
        elif learn.model is not self._plain:  # a callback has put another one there
            self._plain, self._wrapped = self._step.replace_model(learn.model), None
        self._hear_of_steps()
        beside = self._beside()
        trainable = [*(p.requires_grad for p in self._plain.parameters()), *map(id, beside)]
        # Of several networks some may be frozen just for the moment.
        if self._wrapped is None or (trainable != self._trainable and not self.wrap_names):
            self._step.agreement.vote()  # wrapping talks to the other ranks, and one of them may have left this event
            self._step.take_parameters(self._plain, beside)
            self._wrapped, self._trainable, self._step.first = self._wrap(self._plain), trainable, True
            self._step.watch_later_passes()
        self._enter(self._wrapped, training=True)
        self._step.start()
        learn._gradient = self._step

    def _start(self) -> None:
        learn, self._plain = self.learn, self.learn.model
        agreement = cast(Agreement, learn._agreement)
        by_bucket = bool(self.wrap_names) or learn._overrides("_backward")
        self._check_accumulation(by_bucket)
        step = self._step = RankStep(learn, agreement, self._note_trial, by_bucket)
        step.parts = bool(self.wrap_names)
        agreement.company = Company(learn, step)
        hook = _BatchHook(agreement.company)
        learn.add_cb(hook)
        self._undo += [partial(learn.remove_cb, hook), partial(wrapping.unwrap_all, step), step.ignore_later_passes]

    def _hear_of_steps(self) -> None:
        """Hear of the steps of each optimizer, also of one that a callback has put there since the last epoch."""
        for opt in self.learn.opts:
            if any(opt is known for known in self._heard):
                continue
            self._heard.append(opt)
            self._undo.append(opt.register_step_post_hook(self._step.note_optimizer_step).remove)
            if self.learn._overrides("_step"):
                self._undo.append(opt.register_step_pre_hook(self._step.share_closure).remove)

    def after_train(self) -> None:
        self._send_buffers()

    def _check_accumulation(self, by_bucket: bool) -> None:
        if not hasattr(self.learn, "gradient_accumulation"):
            return
        if by_bucket:
            raise ValueError(
                "GradientAccumulation cannot weigh the batches of a learner with wrap= or a _backward of its own "
                "exactly; accumulate in that _backward, or train the whole model by one loss"
                " (errors.html#accumulation)"
            )
        if self.ddp_kwargs.get("static_graph"):
            raise ValueError(
                "static_graph=True and GradientAccumulation do not go together: DDP's first iteration must reduce the "
                "gradients, and accumulation does not; leave static_graph out"
                " (errors.html#accumulation)"
            )

    def _wrap(self, model: nn.Module) -> nn.Module:
        """Return `model` in DDP, or with its parts in DDP; every rank must reach this."""
        if self.sync_bn is not False and wrapping.batch_norms(model):
            if self.learn.dls.device.type != "cpu":
                self._undo.append(wrapping.synchronise_batch_norms(model))
            elif self.sync_bn:
                world.warn_once(
                    "sync_bn: torch has no SyncBatchNorm on the CPU, so each rank's BatchNorm sees its own samples "
                    "alone (sync_bn=False says that this is meant)"
                )
        if self.comm_hook is not None:
            self._warn_once(
                f"comm_hook={self.comm_hook!r} rounds the gradients: the numbers are not those of one process any more"
            )
        if not self.wrap_names:
            return self._ddp(model, bool(self.find_unused_parameters))
        wrapping.check_parts(model, self.wrap_names)
        for name in self.wrap_names:
            wrapper = self._ddp(getattr(model, name), bool(self.find_unused_parameters))
            self._parts[name] = wrapper
        return model

    def _ddp(self, module: nn.Module, find_unused: bool) -> DistributedDataParallel:
        options = {"find_unused_parameters": find_unused, **self.ddp_kwargs}
        wrapper = wrapping.wrap_module(module, self._step, self.learn.dls.device, self.comm_hook, options)
        if not self.wrap_names:
            wrapping.unwrap_all(self._step)  # it may have been wrapped otherwise before
        self._step.wrappers.append(wrapper)
        self._step.late = find_unused and self._step.can_be_late
        return wrapper

    def _beside(self) -> list[nn.Parameter]:
        """The parameters that are trained with the model's; note those that each rank would train by itself."""
        learn = self.learn
        beside = optim.parameters_beside(self._plain, learn.loss_func, learn.opts)
        known = {id(p) for p in (*self._plain.parameters(), *beside)}
        self._step.foreign = [
            (f"{type(owner).__name__}.{name}", p)
            for owner in (learn, *learn.cbs)
            for name, opt in vars(owner).items()
            if isinstance(opt, Optimizer)
            for group in opt.param_groups
            for p in group["params"]
            if p.requires_grad and id(p) not in known
        ]
        if beside and self.wrap_names:
            raise ValueError(
                f"the loss or the optimizer has {len(beside)} trainable parameters that are not the model's, and "
                f"wrap={self.wrap_names} leaves them out: put them into the model, in one of these parts"
            )
        return beside

    def _note_trial(self, trial: Trial) -> None:
        """Act on what the first batch of all ranks shows; every rank must reach this.

        Args:
            trial: this rank's.
        """
        trials = world.all_gather(trial)
        self._compare_buffers([each.buffers for each in trials if each.buffers])
        if self.find_unused_parameters:
            return
        found = dict.fromkeys(name for each in trials for name in each.unused or ())
        of_model = found.keys() & dict(self._plain.named_parameters())
        if not of_model and self.find_unused_parameters is None and self._step.can_be_late:
            # Those beside the model may be for a callback's own loss.
            if found or any(each.unused is None for each in trials):
                self._step.average_late()
            return
        if not found:
            return
        shown = first_few(found)
        if self.find_unused_parameters is False:
            raise RuntimeError(
                f"parameters that take no part in the loss: {shown}. DDP waits for the gradient of each: freeze them, "
                "use them, or leave find_unused_parameters=False out"
            )
        self._warn_once(f"find_unused_parameters=True was chosen: the loss does not depend on {shown}")
        self._wrapped = self.learn.model = self._ddp(self._plain, find_unused=True)
        self._step.watch_later_passes()

    def _compare_buffers(self, ranks: list[dict[str, str]]) -> None:
        """Warn of buffers that each rank makes of its own samples."""
        apart = [name for name in (ranks[0] if ranks else ()) if any(r.get(name) != ranks[0][name] for r in ranks)]
        if apart:
            self._warn_once(
                f"each rank makes {first_few(apart)} (buffers that change in the forward pass) of its own samples, so "
                "the numbers are not those of one process; make them of all ranks' samples: learnerkit.world.reduce or "
                "all_gather, in the forward pass"
                " (errors.html#rank-statistics)"
            )

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
                self._warn_once(f"the training data has {some}: some of them have nothing to do")
            # With statistics per rank, BatchNorm needs two samples on a rank, or none.
            alone = training and any(
                not isinstance(m, nn.SyncBatchNorm) for m in wrapping.batch_norms(self.learn.model)
            )
            least = 2 if alone else 1
            shared = rank_loader(
                dl, name, training=training, split=self.split_batches, least=least, seed=seed,
                sharded=self.dataset_is_sharded, join=self.uneven == "join", rank_step=self._step if training else None,
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

    # Evaluation: on the plain module, without collectives in its forward pass

    def before_validate(self) -> None:
        if world.world_size() == 1:
            return
        model = self.learn.model  # perhaps another one than is trained, as an average of its weights
        self._enter(self._plain if model is self._wrapped else model, training=False)
        self._send_buffers()

    def _send_buffers(self) -> None:
        """Give every rank rank 0's buffers; every rank must reach this."""
        if self._wrapped is not None:
            world.broadcast_into(list(self._plain.buffers()))

    # What training and evaluation swap and put back; evaluation may be called in the middle of training

    def _enter(self, model: nn.Module, training: bool) -> None:
        learn = self.learn
        parts = {name: getattr(self._plain, name) for name in self._parts}
        self._outside.append((learn.model, model, learn.dl, learn._gradient, parts))
        learn.model = model
        for name, wrapper in self._parts.items():
            setattr(self._plain, name, wrapper if training else wrapper.module)
        learn.dl = self._share_out(learn.dl, training)

    def cleanup_train(self) -> None:
        if self._outside:
            learn = self.learn
            before, entered, learn.dl, learn._gradient, parts = self._outside.pop()
            if learn.model is entered or learn.model is self._wrapped:  # else a callback has put another one there
                learn.model = before
            for name, part in parts.items():
                setattr(self._plain, name, part)

    cleanup_validate = cleanup_train


class _BatchHook(Callback):
    """The part of `DistributedCallback` that runs at each training batch, for as long as a fit lasts.

    Args:
        company: prepares the batch with its step, and finishes what this rank leaves.
    """

    order = DistributedCallback.order
    run_valid = False

    def __init__(self, company: Company) -> None:
        super().__init__()
        # Attributes rather than keywords, which refer to the callback: nothing of a run is left to garbage collection.
        self.before_batch = company.step.before_batch
        self.after_cancel_backward = company.finish_backward
        self.after_cancel_step = company.step_unless_all_skip
        self.after_cancel_batch = company.finish_batch
        for event, hook in company.step.own_hooks().items():
            setattr(self, event, hook)

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
        with Agreement(learn, what, member.timeout) as learn._agreement:
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
