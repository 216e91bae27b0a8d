"""DistributedDataParallel for as long as a fit lasts: wrapping, shared-out loaders, exact weights, rank 0's voice."""

from collections.abc import Callable
from datetime import timedelta
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from learnerkit import optim, world
from learnerkit.callback import Callback
from learnerkit.data import loader_len, map_batch
from learnerkit.parallel.loaders import RankLoader, rank_loader
from learnerkit.utils import did_you_mean, warn

if TYPE_CHECKING:
    from learnerkit.learner import Learner


class DistributedCallback(Callback):
    """Trains with one process per device: each rank reads its share of every global batch, gradients are averaged.

    The gradient of a step is the exact mean over the samples of all ranks (or over what `loss_weight` counts), also
    where they have different numbers of them. Validation and prediction read each sample once, on the plain module.
    Buffers, BatchNorm's statistics among them, are rank 0's: DDP sends them before each forward pass, and this
    callback once more before validation.

    On one process it does nothing.

    Args:
        sync_bn: let BatchNorm see the global batch (not on the CPU, where torch cannot).
        split_batches: cut each batch of the loader into one piece per rank, so that the numbers are those of one
            process; by default every rank takes whole batches, and the global batch is that much larger.
        find_unused_parameters: DDP's; `None` is `False`.
        timeout: seconds a collective may wait, if the process group is yet to be made.
        wrap: names of sub-modules to wrap each by itself, for several networks; by default the whole model.
        ddp_kwargs: further arguments of `DistributedDataParallel`.
    """

    order = 11

    def __init__(
        self,
        sync_bn: bool = True,
        split_batches: bool = False,
        find_unused_parameters: bool | None = None,
        timeout: float | timedelta | None = None,
        wrap: tuple[str, ...] | None = None,
        **ddp_kwargs: Any,
    ):
        super().__init__()
        self.sync_bn, self.split_batches, self.timeout = sync_bn, split_batches, timeout
        self.wrap_names = (wrap,) if isinstance(wrap, str) else tuple(wrap or ())
        allowed = set(signature(DistributedDataParallel).parameters) - {
            "module",
            "device_ids",
            "output_device",
        }
        for name in ddp_kwargs:
            if name not in allowed:
                near = did_you_mean(name, [*allowed, *signature(DistributedCallback).parameters])
                raise TypeError(f"got the argument {name!r}, which neither DistributedCallback nor DDP takes{near}")
        self.ddp_kwargs = {"find_unused_parameters": bool(find_unused_parameters), **ddp_kwargs}
        self._warned = False
        self._forget()

    def _forget(self) -> None:
        self._plain: nn.Module | None = None
        self._wrapped: nn.Module | None = None
        self._loaders: dict[tuple, tuple[Any, RankLoader]] = {}
        self._undo: list[Callable[[], None]] = []
        self._outside: list[tuple] = []
        self._logger: Callable | None = None

    # A fit

    def before_fit(self):
        learn = self.learn
        world.join(self.timeout)
        if world.world_size() == 1:
            return
        if not world.is_main():
            self._logger, learn.logger = learn.logger, _say_nothing
        if learn.task != "fit":
            return
        self._compare()
        world.spread_seeds()
        if hasattr(learn, "train_eval"):  # the seeds of the sample order are rank 0's
            generator = learn.train_eval.sample_order.generator
            generator.set_state(world.broadcast(generator.get_state()))

    def _compare(self) -> None:
        """Refuse a fit that differs between ranks, and give all of them rank 0's optimizer state."""
        learn = self.learn
        facts = {
            "epochs": learn.n_epoch,
            "first epoch": learn._start_epoch,
            "batches of training": loader_len(learn.dls.train),
            "batches of validation": loader_len(learn.dls.valid),
            "learning rates": [float(g["lr"]) for opt in learn.opts for g in opt.param_groups],
            "parameters": sum(p.numel() for p in learn.model.parameters()),
        }
        everyone = world.all_gather(facts)
        for name, fact in facts.items():
            found = [other[name] for other in everyone]
            if any(other != fact for other in found):
                by_rank = ", ".join(f"rank {r}: {value}" for r, value in enumerate(found))
                raise ValueError(
                    f"fit differs between ranks in its {name} ({by_rank}); every rank must make the same call"
                )
        for opt in learn.opts:
            if not world.same_everywhere(_digest(opt.state_dict())):
                optim.load_state(opt, world.broadcast(map_batch(lambda t: t.cpu(), opt.state_dict())), learn.model)

    def cleanup_fit(self):
        if self._logger is not None:
            self.learn.logger = self._logger
        for undo in reversed(self._undo):
            undo()
        self._forget()

    # Training

    def before_train(self):
        if world.world_size() == 1:
            return
        if self._wrapped is None:
            self._plain = self.learn.model
            self._wrapped = self._wrap_up(self._plain)
        self._enter(self._wrapped, training=True)

    def cleanup_train(self):
        self._leave()

    def _wrap_up(self, model: nn.Module) -> nn.Module:
        """`model` in DDP, which sends rank 0's parameters and buffers to the others; every rank must reach this."""
        if self.sync_bn and _batch_norms(model):
            if self.learn.dls.device.type == "cpu":
                self._warn_sync_bn()
            else:
                self._undo.append(_synchronise_batch_norm(model))
        if not self.wrap_names:
            return self._ddp(model)
        for name in self.wrap_names:
            if not isinstance(getattr(model, name, None), nn.Module):
                names = [n for n, _ in model.named_children()]
                raise ValueError(f"wrap={self.wrap_names} names {name!r}; {type(model).__name__} has {names}")
            inner = getattr(model, name)
            setattr(model, name, self._ddp(inner))
            self._undo.append(lambda name=name, inner=inner: setattr(model, name, inner))
        return model

    def _ddp(self, module: nn.Module) -> DistributedDataParallel:
        device = self.learn.dls.device
        return DistributedDataParallel(module, [device] if device.type != "cpu" else None, **self.ddp_kwargs)

    def _warn_sync_bn(self) -> None:
        if world.is_main() and not self._warned:
            self._warned = True
            warn(
                "sync_bn: torch has no SyncBatchNorm on the CPU, so each rank's BatchNorm sees its own samples alone "
                "(sync_bn=False says that this is meant)",
            )

    def _share_out(self, dl: Any, training: bool) -> RankLoader:
        key = (id(dl), training)
        order = getattr(getattr(self.learn, "train_eval", None), "sample_order", None)
        seed = order.seed(self.learn.epoch) if order and training else 0
        if key not in self._loaders:
            name = "the training loader" if training else "the loader"
            # With statistics per rank, BatchNorm needs two samples on a rank, or none.
            alone = training and any(not isinstance(m, nn.SyncBatchNorm) for m in _batch_norms(self.learn.model))
            least = 2 if alone else 1
            shared = rank_loader(dl, name, training=training, split=self.split_batches, least=least, seed=seed)
            self._loaders[key] = dl, shared  # with the loader itself, so that its id stays its own
        shared = self._loaders[key][1]
        shared.reseed(seed)
        return shared

    # A batch

    def before_batch(self):
        if self.learn.sharded:
            self.learn.batch_index = self.learn.dl.share.place

    def after_loss(self):
        learn = self.learn
        if learn.sharded and learn.training:
            learn.grad_weight = self._weight(learn.loss_count)
            if isinstance(learn.grad_weight, Tensor):
                # The mean of nothing is NaN, and NaN times a weight of 0 would be too.
                learn.loss_grad = torch.where(learn.grad_weight > 0, learn.loss_grad, 0.0)

    def _weight(self, count: int | Tensor) -> float | Tensor | None:
        """What makes DDP's average of the ranks' gradients the gradient of the global loss.

        DDP divides by the number of ranks W; the global mean weighs this rank's mean by its count / the total count.
        """
        ranks = world.world_size()
        if self.learn.loss_weighting.sums:
            return ranks
        total = self.learn.dl.share.total
        if isinstance(count, Tensor) or total is None:
            # Counted on the device: the one collective beside DDP's own. It does not make the host wait either.
            count = torch.as_tensor(count, device=self.learn.dls.device).double()
            return (count * ranks / world.reduce(count).clamp(min=torch.finfo().tiny)).to(self.learn.loss_grad.dtype)
        weight = count * ranks / total
        return None if weight == 1 else weight

    # Evaluation: on the plain module, without collectives in its forward pass

    def before_validate(self):
        if world.world_size() == 1:
            return
        self._enter(self._plain or self.learn.model, training=False)
        if self._wrapped is not None:
            with torch.no_grad():
                for buffer in self.learn.model.buffers():  # every rank must reach this
                    buffer.copy_(world.broadcast(buffer))

    def cleanup_validate(self):
        self._leave()

    # What training and evaluation swap and put back; evaluation may be called in the middle of training

    def _enter(self, model: nn.Module, training: bool) -> None:
        learn = self.learn
        self._outside.append((learn.model, learn.dl, learn.sharded))
        learn.model = model
        learn.dl, learn.sharded = self._share_out(learn.dl, training), True

    def _leave(self) -> None:
        if self._outside:
            learn = self.learn
            learn.model, learn.dl, learn.sharded = self._outside.pop()
            learn.grad_weight = None


def distrib_ctx(learn: "Learner", nproc: int | None = None, **kwargs: Any) -> Any:
    """What `Learner.distrib_ctx` returns.

    Raises:
        ValueError: `nproc` in a script, whose processes a launcher starts; or the learner is distributed already.
    """
    if nproc is not None:
        raise ValueError(
            f"got nproc={nproc}: distrib_ctx starts no processes in a script; start them with "
            f"`python -m learnerkit.launch --nproc {nproc} script.py` and write distrib_ctx() without nproc"
        )
    if any(isinstance(cb, DistributedCallback) for cb in learn.cbs):
        raise ValueError("the learner is distributed already (to_distributed or an outer distrib_ctx)")
    callback = DistributedCallback(**kwargs)
    return learn.added_cbs(callback if world.world_size() > 1 else None)


def warn_outside_context(learn: "Learner") -> None:
    """Warn, once for a learner, that several processes are about to train the same thing, each for itself."""
    distributed = any(isinstance(cb, DistributedCallback) for cb in learn.cbs)
    if world.world_size() > 1 and world.is_main() and not distributed and not learn._told_outside:
        learn._told_outside = True
        warn(
            f"{world.world_size()} processes each train a whole copy of the model on all the data; "
            "to train one together write `with learn.distrib_ctx(): learn.fit(...)`",
        )


def _say_nothing(row: list) -> None:
    """The logger of ranks other than 0."""


def _digest(state: Any) -> Any:
    """A state with each tensor replaced by its shape, type and two sums. Waits for the device."""
    return map_batch(
        lambda t: (tuple(t.shape), t.dtype, t.double().sum().item(), t.double().square().sum().item()), state
    )


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
