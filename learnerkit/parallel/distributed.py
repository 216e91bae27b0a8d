"""DistributedDataParallel for as long as a fit lasts: wrapping, shared-out loaders, exact weights, rank 0's voice."""

import os
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from datetime import timedelta
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

from learnerkit import optim, world
from learnerkit.callback import Callback, Dispatch
from learnerkit.data.batches import loader_len, map_batch, tensors_in
from learnerkit.data.order import draws_globally, states_at_start
from learnerkit.gradient_mean import nothing_of
from learnerkit.losses import MEANS, possible_means
from learnerkit.parallel.agreement import Agreement, RankDispatch
from learnerkit.parallel.drift import digests
from learnerkit.parallel.loaders import RankLoader, emptied, rank_loader
from learnerkit.parallel.rank_step import Steps
from learnerkit.snapshot import trial
from learnerkit.text import did_you_mean, first_few
from learnerkit.utils import listify, warn

if TYPE_CHECKING:
    from learnerkit.learner import Learner


COMM_HOOKS = ("bf16", "fp16", "powersgd")


OWN_DEVICE = "each process takes the device of its local rank by itself, so leave the device out"


class DistributedCallback(Callback):
    """Trains with one process per device: each rank reads its share of every global batch, gradients are averaged.

    The gradient of a step is the exact mean over the samples of all ranks (or over what `loss_weight` counts), also
    where they have different numbers of them. Validation and prediction read each sample once, on the plain module.
    What one rank leaves for (a cancel, Ctrl-C, an error), all leave for.

    Buffers, BatchNorm's statistics among them, are rank 0's: DDP sends them before each forward pass (not with `wrap`,
    and not with broadcast_buffers=False), and this callback once more before validation and at the end of training.

    On one process it does nothing.

    Args:
        sync_bn: let BatchNorm see the global batch (not on the CPU, where torch cannot).
        split_batches: cut each batch of the loader into one piece per rank, so that the numbers are those of one
            process; by default every rank takes whole batches, and the global batch is that much larger.
        find_unused_parameters: DDP's; `None` finds out with the first batch of each fit.
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
        sync_bn: bool = True,
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
        allowed = set(signature(DistributedDataParallel).parameters) - {
            "module",
            "device_ids",
            "output_device",
        }
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
        self._plain: nn.Module | None = None
        self._wrapped: nn.Module | None = None
        self._trainable: list[bool] = []
        self._parts: dict[str, nn.Module] = {}
        self._steps: Steps | None = None
        self._probed = False
        self._loaders: dict[tuple, tuple[Any, RankLoader]] = {}
        self._undo: list[Callable[[], None]] = []
        self._outside: list[tuple] = []
        self._logger: Callable | None = None

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
            self._logger, learn.logger = learn.logger, _say_nothing
        with world.one_meeting():
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
            _send(tensors)  # else different models would be mixed
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
        }
        order = learn.train_eval.sample_order.generator if hasattr(learn, "train_eval") else None
        optimizers = [_digest(opt.state_dict()) for opt in learn.opts]
        mine = facts, optimizers, world.seed_digest(), order and order.get_state()
        everyone, others, seeds, orders = zip(*world.all_gather(mine), strict=True)
        for name, fact in facts.items():
            found = [other[name] for other in everyone]
            if any(other != fact for other in found):
                by_rank = ", ".join(f"rank {r}: {value}" for r, value in enumerate(found))
                raise ValueError(
                    f"fit differs between ranks in its {name} ({by_rank}); every rank must make the same call"
                )
        if any(other != others[0] for other in others):
            for opt in learn.opts:
                optim.load_state(opt, world.broadcast(map_batch(lambda t: t.cpu(), opt.state_dict())), learn.model)
        world.spread_seeds(seeds)
        if order is not None:
            order.set_state(orders[0])

    def cleanup_fit(self) -> None:
        if self._logger is not None:
            self.learn.logger = self._logger
        for undo in reversed(self._undo):
            undo()
        if self._steps is not None:
            self._steps.unwrap()
        self._forget()

    # Training

    def before_train(self) -> None:
        if world.world_size() == 1:
            return
        learn = self.learn
        if self._steps is None:
            self._plain = learn.model
            self._steps = Steps(learn, learn.together)
            self._check_options()
            for opt in learn.opts:
                self._undo.append(opt.register_step_post_hook(self._steps.stepped).remove)
        trainable = [p.requires_grad for p in self._plain.parameters()]
        # Of several networks some may be frozen just for the moment.
        if self._wrapped is None or (trainable != self._trainable and not self.wrap_names):
            learn.together.vote()  # wrapping talks to the other ranks, and one of them may have left this event
            self._wrapped, self._trainable, self._probed = self._wrap_up(self._plain), trainable, False
        self._enter(self._wrapped, training=True)
        self._steps.start()
        learn.weights = self._steps

    def after_train(self) -> None:
        if world.world_size() > 1:
            self._send_buffers()

    def cleanup_train(self) -> None:
        self._leave()

    def _check_options(self) -> None:
        learn, steps = self.learn, self._steps
        steps.by_bucket = bool(self.wrap_names) or type(learn)._backward is not _learner_backward(learn)
        if not hasattr(learn, "gradient_accumulation"):
            return
        if steps.by_bucket:
            raise ValueError(
                "GradientAccumulation cannot weigh the batches of a learner with wrap= or a _backward of its own "
                "exactly; accumulate in that _backward, or train the whole model by one loss"
            )
        if self.ddp_kwargs.get("static_graph"):
            raise ValueError(
                "static_graph=True and GradientAccumulation do not go together: DDP's first iteration must reduce the "
                "gradients, and accumulation does not; leave static_graph out"
            )

    def _wrap_up(self, model: nn.Module) -> nn.Module:
        """`model` in DDP, which sends rank 0's parameters and buffers to the others; every rank must reach this."""
        if self.sync_bn and _batch_norms(model):
            if self.learn.dls.device.type != "cpu":
                self._undo.append(_synchronise_batch_norm(model))
            else:
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
        for name in self.wrap_names:
            if not isinstance(getattr(model, name, None), nn.Module):
                names = [n for n, _ in model.named_children()]
                raise ValueError(f"wrap={self.wrap_names} names {name!r}; {type(model).__name__} has {names}")
        inside = {id(p) for name in self.wrap_names for p in getattr(model, name).parameters()}
        outside = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in inside]
        if outside:
            raise ValueError(
                f"wrap={self.wrap_names} leaves out {first_few(outside)}, which each rank would train by itself; name "
                "their modules too, or freeze them"
            )
        for name in self.wrap_names:
            wrapper = self._ddp(getattr(model, name), bool(self.find_unused_parameters))
            wrapper.register_state_dict_post_hook(_without_module)
            self._parts[name] = wrapper
        return model

    def _ddp(self, module: nn.Module, find_unused: bool) -> DistributedDataParallel:
        """`module` wrapped; the parameter that carries counts and flags is a part of it for this moment only."""
        device, steps = self.learn.dls.device, self._steps
        options = {"find_unused_parameters": find_unused, **self.ddp_kwargs}
        # In DDP's search for unused parameters the carrier would count as one of them.
        rides = not (steps.by_bucket or find_unused or self.comm_hook)
        steps.carrier = steps.make_carrier(module) if rides else None
        # If DDP's search finds no unused parameter, torch warns on each rank. This one is never used, so it finds one.
        extra = _unused_like(module, device) if find_unused else steps.carrier
        if extra is not None:
            module.register_parameter(_CARRIER, extra)
        try:
            wrapper = DistributedDataParallel(module, [device] if device.type != "cpu" else None, **options)
        finally:
            if extra is not None:
                del module._parameters[_CARRIER]
        hook, state = _comm_hook(self.comm_hook)
        if steps.by_bucket:
            steps.weigh_buckets(wrapper, hook or default_hooks.allreduce_hook, state)
        elif hook is not None:
            wrapper.register_comm_hook(state, hook)
        if not self.wrap_names:
            steps.unwrap()  # it may have been wrapped otherwise before
        steps.wrappers.append(wrapper)
        return wrapper

    def _find_unused(self, names: list[str]) -> None:
        """Wrap anew if the first batch shows that some parameters take no part in the loss of some rank.

        Args:
            names: of this rank; every rank must reach this.
        """
        if not world.reduce(len(names)):
            return
        found = dict.fromkeys(name for rank in world.all_gather(names) for name in rank)
        shown = first_few(found)
        if self.find_unused_parameters is False:
            raise RuntimeError(
                f"parameters that take no part in the loss: {shown}. DDP waits for the gradient of each: freeze them, "
                "use them, or leave find_unused_parameters=False out"
            )
        self._warn_once(f"find_unused_parameters=True was chosen: the loss does not depend on {shown}")
        self._wrapped = self.learn.model = self._ddp(self._plain, find_unused=True)

    def _share_out(self, dl: Any, training: bool) -> RankLoader:
        key = (id(dl), training)
        drawn = draws_globally(dl) or isinstance(getattr(dl, "dataset", None), IterableDataset)
        seed = world.broadcast(states_at_start(dl)) if drawn else 0  # the order is the one that rank 0 would draw
        if key not in self._loaders:
            name = "the training loader" if training else "the loader"
            if training:
                self._warn_of_few(getattr(dl, "dataset", None))
            # With statistics per rank, BatchNorm needs two samples on a rank, or none.
            alone = training and any(not isinstance(m, nn.SyncBatchNorm) for m in _batch_norms(self.learn.model))
            least = 2 if alone else 1
            shared = rank_loader(
                dl, name, training=training, split=self.split_batches, least=least, seed=seed,
                sharded=self.dataset_is_sharded, join=self.uneven == "join",
            )  # fmt: skip
            if not any(dl is known for known in self.learn.dls.loaders):
                return shared  # made for this reading alone
            self._loaders[key] = dl, shared  # with the loader itself, so that its id stays its own
        shared = self._loaders[key][1]
        shared.reseed(seed)
        return shared

    def _warn_of_few(self, dataset: Any) -> None:
        if isinstance(dataset, Sized) and len(dataset) < world.world_size():
            some = f"{len(dataset)} sample{'s' if len(dataset) > 1 else ''} for {world.world_size()} ranks"
            self._warn_once(f"the training data has {some}: some of them have nothing to do")

    # A batch

    def before_batch(self) -> None:
        learn = self.learn
        if not learn.sharded:
            return
        share = learn.dl.share
        learn.batch_index = share.place
        if not learn.training:
            return
        steps = self._steps
        first, self._probed = not self._probed, True
        if first:
            steps.takes_nothing = not steps.by_bucket and _runs_on_nothing(learn, self._plain)
        if not share.size:
            learn.batch_size = 0
            if not steps.takes_nothing:
                unpacked = learn.dls.unpack(learn.dl.sample, learn.dls.device, learn.loss_func is None)
                learn.batch, learn.xb, learn.yb, _ = unpacked
        votes, searches = learn.loss_weighting.votes, first and not self.find_unused_parameters
        if (votes or searches) and not steps.by_bucket:  # on all ranks alike
            unused, means = _tried(learn, self._plain)
            if votes:
                learn.loss_weighting.agree(world.all_gather(means))
            if searches:
                self._find_unused(unused)
        steps.synchronise()

    def after_cancel_backward(self) -> None:
        if self.learn.training and self._steps is not None:
            self._steps.backward_cancelled()

    def after_cancel_step(self) -> None:
        if self._steps is not None:
            self._steps.step_unless_all_skip()

    def after_cancel_batch(self) -> None:
        if self.learn.training and self._steps is not None:
            self._steps.complete()

    # Evaluation: on the plain module, without collectives in its forward pass

    def before_validate(self) -> None:
        if world.world_size() == 1:
            return
        self._enter(self.learn.model if self._plain is None else self._plain, training=False)
        self._send_buffers()

    def cleanup_validate(self) -> None:
        self._leave()

    def _send_buffers(self) -> None:
        """Give every rank rank 0's buffers; every rank must reach this."""
        if self._wrapped is not None:
            _send(list(self._plain.buffers()))

    # What training and evaluation swap and put back; evaluation may be called in the middle of training

    def _enter(self, model: nn.Module, training: bool) -> None:
        learn = self.learn
        parts = {name: getattr(self._plain, name) for name in self._parts}
        self._outside.append((learn.model, learn.dl, learn.weights, parts))
        learn.model = model
        for name, wrapper in self._parts.items():
            setattr(self._plain, name, wrapper if training else wrapper.module)
        learn.dl = self._share_out(learn.dl, training)

    def _leave(self) -> None:
        if self._outside:
            learn = self.learn
            learn.model, learn.dl, learn.weights, parts = self._outside.pop()
            for name, part in parts.items():
                setattr(self._plain, name, part)


def warn_outside_context(learn: "Learner") -> None:
    """Warn, once for a learner, that several processes are about to train the same thing, each for itself."""
    distributed = any(isinstance(cb, DistributedCallback) for cb in learn.cbs)
    if world.world_size() > 1 and world.is_main() and not distributed and not learn._told_outside:
        learn._told_outside = True
        warn(
            f"{world.world_size()} processes each train a whole copy of the model on all the data; "
            "to train one together write `with learn.distrib_ctx(): learn.fit(...)`",
        )


@contextmanager
def together(learn: "Learner") -> Iterator[None]:
    """Keep the ranks of a run together, where it is one of several ranks and not inside another."""
    member = next((cb for cb in learn.cbs if isinstance(cb, DistributedCallback)), None)
    if member is None or world.world_size() == 1 or learn.together is not None:
        yield
        return
    try:
        with Agreement(learn, member.timeout) as learn.together:
            yield
    finally:
        learn.together = None


def dispatch(learn: "Learner", fitting: bool) -> Dispatch:
    """The dispatch of a run."""
    if learn.together is None:
        return Dispatch(learn.cbs, fitting)
    return RankDispatch(learn.cbs, fitting, learn.together)


_CARRIER = "_learnerkit_carrier"


def _unused_like(module: nn.Module, device: torch.device) -> nn.Parameter:
    """A parameter of the module's type, so that it shares a bucket with others, in which no loss takes part."""
    kind = next((p.dtype for p in module.parameters() if p.requires_grad), None)
    return nn.Parameter(torch.zeros(1, dtype=kind, device=device))


def _learner_backward(learn: "Learner") -> Callable:
    """The loop's own `_backward`."""
    return next(cls for cls in type(learn).__mro__ if cls.__module__ == "learnerkit.learner")._backward


def _without_module(wrapper: nn.Module, state: dict, prefix: str, *_: Any) -> None:
    """A hook of `state_dict` that leaves the wrapper's own name out of the keys."""
    for key in [key for key in state if key.startswith(f"{prefix}module.")]:
        state[prefix + key.removeprefix(f"{prefix}module.")] = state.pop(key)


def _comm_hook(name: str | None) -> tuple[Callable | None, Any]:
    """One of torch's communication hooks and its state."""
    if name is None:
        return None, None
    if name == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        return powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=10)
    return getattr(default_hooks, f"{name}_compress_hook"), None


def _runs_on_nothing(learn: "Learner", model: nn.Module) -> bool:
    """Whether the model can run on a batch without samples (a `view(len(x), -1)` cannot)."""
    with trial(learn, model), torch.no_grad():
        model.eval()  # in which no BatchNorm asks other ranks
        learn.xb = emptied(learn.xb)
        try:
            learn._forward()
        except Exception:
            return False
    return True


def _tried(learn: "Learner", model: nn.Module) -> tuple[list[str], list[str]]:
    """What the loss of this rank's batch shows.

    Returns:
        The names of the trainable parameters that the loss does not depend on; and what a loss of the model's own may
        be the mean over, which is all that is possible where there are no data. Nothing is shown if the model fails.
    """
    named, means = [(name, p) for name, p in model.named_parameters() if p.requires_grad], list(MEANS)
    with trial(learn, model):
        try:
            learn._forward()  # without data, too: the model may ask other ranks, as SyncBatchNorm does
            if learn.batch_size:
                learn._loss()
                if learn.loss_weighting.votes:
                    means = possible_means(learn.yb, learn.pred, learn.loss, learn.xb)
            else:
                learn.loss_grad = nothing_of(learn)
            grads = torch.autograd.grad(learn.loss_grad, [p for _, p in named], allow_unused=True)
        except Exception:  # the loop will run into it, too, and say what is wrong
            return [], means
    return [name for (name, _), grad in zip(named, grads, strict=True) if grad is None], means


@torch.no_grad()
def _send(tensors: list[Tensor]) -> None:
    """Give every rank rank 0's values of these, by one collective for each type; every rank must reach this."""
    for kind in dict.fromkeys((t.dtype, t.device) for t in tensors):
        alike = [t for t in tensors if (t.dtype, t.device) == kind]
        sent = world.broadcast(torch.cat([t.reshape(-1) for t in alike]))
        for t, values in zip(alike, sent.split([t.numel() for t in alike]), strict=True):
            t.copy_(values.view_as(t))


def _say_nothing(row: list) -> None:
    """The logger of ranks other than 0."""


def _digest(state: dict) -> tuple:
    """What tells whether two ranks' states of an optimizer are alike. Waits for the device."""
    return digests(list(tensors_in(state))), repr(map_batch(lambda t: (t.shape, t.dtype), state))


def _batch_norms(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, _BatchNorm)]


def _synchronise_batch_norm(model: nn.Module) -> Callable[[], None]:
    """Put `SyncBatchNorm` in the place of each BatchNorm, sharing its parameters; returns what takes it out again."""
    swapped = []
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if isinstance(norm, _BatchNorm) and not isinstance(norm, nn.SyncBatchNorm):
                synced = nn.SyncBatchNorm.convert_sync_batchnorm(norm)
                setattr(parent, name, synced)
                swapped.append((parent, name, norm, synced))

    def undo() -> None:
        for parent, name, norm, synced in swapped:
            norm.load_state_dict(synced.state_dict())
            setattr(parent, name, norm)

    return undo
