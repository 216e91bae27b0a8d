"""The callback that trains a fit on several ranks: it compares them, shares out the data, and restores the learner."""

import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from inspect import signature
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset, Subset, TensorDataset

from learnerkit import distributed, optim
from learnerkit.arguments import check_number
from learnerkit.callback import Callback, Dispatch, is_ours, running
from learnerkit.data.batches import loader_len, on_host
from learnerkit.data.order import generators_of, put_states, states_at_start, states_of
from learnerkit.large.mapped import check_values
from learnerkit.large.units import outermost, units
from learnerkit.marks import collective
from learnerkit.metrics.meters import metric_names
from learnerkit.parallel.agreement import Agreement, RankDispatch
from learnerkit.parallel.averager import Averager
from learnerkit.parallel.left_batch import LeftBatch, StandIn
from learnerkit.parallel.loaders import RankLoader, rank_loader
from learnerkit.parallel.model_checks import check_devices, rank_norms
from learnerkit.parallel.rank_step import COMM_HOOKS, RankStep
from learnerkit.parallel.watch import followed
from learnerkit.processes.event_file import facts_of_launch
from learnerkit.text import did_you_mean
from learnerkit.utils import listify, spanned_devices
from learnerkit.values import describe, digests, map_batch, tensors_in

if TYPE_CHECKING:
    from learnerkit.learner import Learner
    from learnerkit.parallel.sharded import Shards

_DEVICES = {"device_ids", "output_device"}
OWN_DEVICE = "each process takes the device of its local rank by itself, so leave the device out"


class DistributedCallback(Callback):
    """Trains with one process per device: each rank reads its share of every global batch, gradients are averaged.

    The gradient of a step is the exact mean over the samples of all ranks (or over what `loss_weight` counts), also
    where the ranks have different numbers of samples. Validation and prediction read each sample once, on the plain
    module. When one rank leaves the loop (by a cancel, Ctrl-C or an error), all ranks leave it. After each epoch of a
    fit the ranks compare their weights, and a warning says if they have drifted apart.

    DDP averages gradients during the backward pass where it can. Otherwise they are averaged after it, and a line says
    so: where the learner overrides `_backward` or `_step`, or where the first batch leaves parameters without a
    gradient, or gives them sparse gradients, or several. The model itself is not wrapped.

    Rank 0's buffers, BatchNorm's statistics among them, are sent to all ranks before each step (not with
    broadcast_buffers=False), and once more before validation and at the end of training.

    A model that spans several devices, as with transformers' `device_map`, is trained by processes that each have their
    own devices. Each process must have the whole model: DDP does not handle a model divided among processes.

    On one process it does nothing.

    Args:
        sync_bn: let BatchNorm see the global batch; False lets it see its own rank's batch. By default it sees the
            global batch wherever torch can do that, which is not on the CPU; True warns there.
        split_batches: cut each batch of the loader into one piece per rank, so that the numbers are those of one
            process; by default every rank takes whole batches, and the global batch is that much larger.
        find_unused_parameters: True for losses that leave parameters out in some batches, but not in the first one of a
            fit: all gradients are averaged after the backward pass rather than during it. `None` decides by the first
            batch, that of a resumed run by its own; False refuses parameters that take no part in it.
        timeout: seconds (or a timedelta) without progress after which a rank that waits for others ends the run and
            says where each rank is; default 5 minutes, or the launcher's `--timeout`.
        wrap: names of the sub-modules that are trained; every trainable parameter must be in one of them.
        sharded: the dataset of an iterable loader gives each rank its own part by itself.
        uneven: where the ranks' iterable datasets end at different steps: 'stop' stops all ranks with the first that
            ends, and warns; 'join' lets ranks without data take part in the others' steps.
        comm_hook: compress the gradients on their way: 'bf16', 'fp16' or 'powersgd'. The numbers are then no longer
            those of one process. Only for gradients that DDP averages.
        shard: divide the parameters, gradients and optimizer state of the model among the ranks while it trains, by
            FSDP2. True chooses its units, the parts that are gathered for their forward and backward passes, by its
            structure; or they are named: names in the model, patterns of names, or classes.
        reshard_after_forward: free a unit after its forward pass, and gather it again for its backward pass; False
            keeps it gathered, which takes memory and saves time.
        offload: with `shard`, keep each rank's rows, their gradients and the optimizer's state on the host, where the
            optimizer then steps; the accelerator holds only the units that are in use.
        sync: with `shard` and GradientAccumulation, reduce the gradients of each batch; False reduces those of the
            whole step at once, which saves time and needs memory for the gradients of the whole model. The results are
            the same.
        ddp_kwargs: further arguments of `DistributedDataParallel`.

    Attributes:
        ends: the functions that undo the changes at the end of a run.

    Raises:
        TypeError, ValueError: an argument that is unknown, or has an unsupported value.
    """

    order = 11
    run_valid = False  # the hooks for events of batches belong to callbacks that are added for the fit

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
        shard: bool | Iterable[str | type[nn.Module]] = False,
        reshard_after_forward: bool = True,
        offload: bool = False,
        sync: bool = True,
        **ddp_kwargs: Any,
    ) -> None:
        self.sync_bn, self.split_batches = sync_bn, split_batches
        self.find_unused_parameters = find_unused_parameters
        if timeout is None:
            timeout = float(os.environ.get("LEARNERKIT_TIMEOUT", 300))
        self.timeout = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        self.wrap_names = tuple(listify(wrap))
        self.dataset_is_sharded, self.uneven = sharded, uneven
        self.comm_hook = comm_hook
        self.shard = shard if isinstance(shard, bool) else listify(shard)
        self.reshard_after_forward, self.offload = reshard_after_forward, offload
        self.sync = sync
        flags = {
            "sync_bn": sync_bn, "split_batches": split_batches, "find_unused_parameters": find_unused_parameters,
            "sharded": sharded, "reshard_after_forward": reshard_after_forward, "offload": offload, "sync": sync,
        }  # fmt: skip
        for name, flag in flags.items():
            if flag not in (None, True, False):  # the truth of a text such as "no" is True
                raise ValueError(f"got {name}={flag!r}; it is True or False")
        if self.shard == []:
            raise ValueError("got shard=[], and no unit to shard; it is True, False, or names and classes of modules")
        if uneven not in ("stop", "join"):
            raise ValueError(f"got uneven={uneven!r}; it takes 'stop' or 'join'")
        if comm_hook not in (None, *COMM_HOOKS):
            raise ValueError(f"got comm_hook={comm_hook!r}; it takes None, {', '.join(map(repr, COMM_HOOKS))}")
        check_number("timeout", self.timeout, lambda seconds: 0 < seconds < inf, "a number of seconds greater than 0")
        allowed = set(signature(DistributedDataParallel).parameters) - {"module", *_DEVICES}
        for name in ddp_kwargs:
            if name not in allowed:
                known = [*allowed, *signature(DistributedCallback).parameters]
                near = f": {OWN_DEVICE}" if name in {"cuda_id", *_DEVICES} else did_you_mean(name, known)
                raise TypeError(f"got the argument {name!r}, which neither DistributedCallback nor DDP takes{near}")
        # DDP holds only the parameters, so these two of its options decide whether this package sends the buffers.
        sends = [ddp_kwargs.pop(name, None) for name in ("broadcast_buffers", "forward_sync_buffers")]
        self.sends_buffers = False not in sends
        self.ddp_kwargs = ddp_kwargs
        refused = ["comm_hook"] * (comm_hook is not None) + ["wrap"] * bool(self.wrap_names) + [*ddp_kwargs]
        if shard and refused:
            raise ValueError(f"{refused[0]} is for DistributedDataParallel, and shard= trains without it: leave it out")
        if not shard and (offload or not sync):
            name = "offload" if offload else "sync"
            raise ValueError(f"{name} is for sharded models: give shard=True, or leave it out")
        self._told = set[str]()
        self._loaders: dict[tuple, tuple[Any, RankLoader]] = {}
        self._averager: Averager | None = None  # the averager of a fit that trains
        self.ends = ExitStack()

    def tell_once(self, message: str, by: Callable[[str], object] = distributed.warn) -> None:
        """Say something on rank 0, once for this callback; another callback may say the same."""
        if distributed.is_main() and message not in self._told:
            self._told.add(message)
            by(message)

    # A fit

    @collective
    def before_fit(self) -> None:
        learn, agreement = self.learn, self.learn._agreement
        if member_of(learn.cbs) is not self:
            raise ValueError(
                "the learner has two DistributedCallbacks, as after to_distributed() twice: keep one of them, or call "
                "detach_distributed(), which removes both"
            )
        if agreement is None:  # there is one process
            return
        if not distributed.is_main():
            self.ends.enter_context(learn.no_logging())
        with distributed.grouped_collectives():
            if learn.task in ("validate", "predict"):
                if learn.shards is None:
                    distributed.give_values([*learn.model.parameters(), *learn.model.buffers()])
            else:
                self._compare()
                self._take_over()
                # This rank takes part in all batches of the fit, including those that it leaves early.
                step = RankStep(learn, agreement)
                agreement.left_batch = LeftBatch(step)
                self._averager = Averager(self, step)
                self.ends.callback(step.joined.close)
                parts = [agreement.left_batch, StandIn(step), *([_MakeWhole()] if self.shard else [])]
                self.ends.enter_context(learn.added_cbs(parts))
            distributed.spread_seeds(learn.dls.device)

    @collective
    def _compare(self) -> None:
        """Refuse a fit that differs between ranks, and warn of other data."""
        learn = self.learn
        train, valid = (None, None) if self.dataset_is_sharded else learn.dls.loaders[:2]
        facts = {
            "epochs": learn.n_epoch,
            "steps": learn.n_steps,
            "first epoch": learn.start_epoch,
            "batches of training": loader_len(train),
            "batches of validation": loader_len(valid),
            "learning rates": [float(g["lr"]) for opt in learn.opts for g in opt.param_groups],
            "parameters": sum(p.numel() for p in learn.model.parameters()),
            "metrics": ", ".join(metric_names(learn.metrics)),
            **_settings(learn.cbs),
        }
        place = socket.gethostname(), list(map(str, spanned_devices(learn.model)))
        own = [list(_content(getattr(dl, "dataset", dl))) for dl in (train, valid)]
        kinds = {type(cb).__name__ for cb in _everywhere(learn.cbs) if is_ours(type(cb)) and not cb.only_fit}
        told = distributed.all_gather((place, facts, own, kinds))
        if not all(isinstance(each, tuple) for each in told):
            raise distributed.not_together("a rank gathers something else where a fit begins")
        places, everyone, contents, acting = zip(*told, strict=True)
        check_devices(places)
        for name in dict.fromkeys(name for other in everyone for name in other):
            # Some ranks may lack a callback.
            values = {r: other[name] for r, other in enumerate(everyone) if name in other}
            if len(set(map(repr, values.values()))) > 1:
                by_rank = ", ".join(f"rank {r}: {value}" for r, value in values.items())
                raise ValueError(
                    f"fit differs between ranks in its {name} ({by_rank}); every rank must make the same call"
                )
        if alone := set().union(*acting).difference(set.intersection(*acting)):
            self.tell_once(
                f"{', '.join(sorted(alone))}: some ranks are without it, so values of different kinds are mixed, or "
                "ranks wait for each other for ever. Give all ranks the same callbacks; those that save, log or print "
                "do so on rank 0 by themselves (errors.html#peers)",
                by=learn.say,
            )
        if any(other != own for other in contents):
            self.tell_once(
                "the datasets are not the same on all ranks, so samples are read twice or never, and validation may "
                "have samples that others train on: call set_seed before data are drawn or split at random, on every "
                "rank alike (errors.html#rank-loader)"
            )

    @collective
    def _take_over(self) -> None:
        """Take over rank 0's optimizer state and sample order."""
        learn = self.learn
        opts = learn.opts if learn.shards is None else []  # Each rank has its own state of shards.
        states = [optim.state_dict_of(opt) for opt in opts]
        if not distributed.same_everywhere((map_batch(describe, states), digests(tensors_in(states)))):
            for opt, state in zip(opts, distributed.broadcast(on_host(states)), strict=True):
                optim.load_state(opt, state)
        if (position := learn._position) is not None:
            position.order = distributed.broadcast(position.order)

    @collective
    def take_model(self) -> None:
        """Repair a model that a failed run has left divided, and divide one that is too large to be whole.

        Every rank must reach this.
        """
        learn, shards = self.learn, self.learn.shards
        if shards is not None and (shards.failed or not shards.stays):
            steps = distributed.all_gather(shards.steps)
            if len(set(steps)) > 1:
                self.tell_once(
                    f"the last fit failed when the ranks had taken {', '.join(map(str, steps))} optimizer steps, and "
                    "each has rows of the model, so these are of different steps now: load a checkpoint"
                    " (errors.html#sharded)"
                )
            if shards.stays:
                shards.take_optimizers(learn.opts)
                shards.renew()
            else:
                shards.restore()
                learn.shards = None
        if learn.mapped is not None:
            self.divide()

    @collective
    def divide(self) -> "Shards":
        """Divide the model among the ranks, if it is whole; every rank must reach this."""
        # The import is here because torch's part of it takes half a second.
        from learnerkit.parallel.sharded import Shards

        learn = self.learn
        if learn.shards is not None:
            learn.shards.check_parameters()
        else:
            model, mapped = learn.model, learn.mapped
            parts = units(model, self.shard)
            outer = set(outermost([*parts.values()]))  # a unit is gathered as a whole, so that none is inside another
            parts = {name: m for name, m in parts.items() if m in outer}
            if mapped is not None:
                check_values(model)
                for part in (*parts.values(), model):  # comparing the whole model at once would take too much memory
                    distributed.give_values([*part.parameters()])
                    mapped.release()
                distributed.give_values([*model.buffers()])
            learn.shards = Shards(
                model, parts, learn.opts, learn.dls.device, self.reshard_after_forward, self.offload,
                stays=mapped is not None,
            )  # fmt: skip
            learn.mapped = None
            if learn.task in (None, "fit"):  # otherwise each step that is tried out would say so
                self.tell_once(learn.shards.text(parts), by=learn.say)
        return learn.shards

    def cleanup_fit(self) -> None:
        if self.learn.shards is not None:  # after an error
            self.learn.shards.put_away()
        self.ends.close()
        self._averager = None
        self._loaders.clear()

    # Training and evaluation: an evaluation has no collectives in the forward pass, and may take place in the middle of
    # training; the run itself restores its loader.

    @collective
    def before_train(self) -> None:
        if self._averager is not None:
            self._averager.begin()
            self._share_out(self._averager.step)

    @collective
    def before_validate(self) -> None:
        if distributed.world_size() > 1:
            self._share_out(None)
            self._send_buffers()

    def cleanup_validate(self) -> None:
        if self.learn.shards is not None:
            self.learn.shards.end_votes()

    @collective
    def _send_buffers(self) -> None:
        """Send rank 0's buffers to every rank."""
        if self._averager is not None:
            try:
                distributed.broadcast_into(list(self.learn.model.buffers()))
            except RuntimeError as e:
                if distributed.MISMATCH in str(e):
                    e.add_note(
                        "the model's buffers go from rank 0 to all ranks, and have one shape everywhere: keep what "
                        "grows by the samples of a rank in a plain attribute, or make it of those of all ranks by "
                        "all_gather (errors.html#rank-statistics)"
                    )
                raise

    after_train = _send_buffers

    @collective
    def after_epoch(self) -> None:
        """Warn once if the ranks no longer have the same weights; this reads them once, a host-device sync."""
        if self._averager is None or self.learn._gradient is None or self.learn.shards is not None:
            return  # `_gradient` is None where the ranks train by themselves
        if not distributed.same_everywhere(digests(self._averager.step.named.values())):
            self.tell_once(
                "the ranks no longer have the same weights: something changes weights, gradients or a learning rate on "
                "one rank alone, or by the samples or random numbers of each rank. "
                "learnerkit.parallel.DriftCheck(every=1) stops at the first difference and names it (errors.html#drift)"
            )

    @collective
    def _share_out(self, step: RankStep | None) -> None:
        """Replace the learner's loader by one that reads this rank's share.

        Args:
            step: the step of the ranks in training; `None` in evaluation.
        """
        learn, dl = self.learn, self.learn.dl
        if generators := generators_of(dl):
            # Those of the user may be seeded differently on each rank, and all must draw the same order.
            put_states(generators, distributed.broadcast(states_of(generators)))
        position = None if step is None else learn._position
        # The position is known if a run continues in mid-epoch.
        seed = since = None if position is None else position.data.states
        if seed is None and isinstance(getattr(dl, "dataset", None), IterableDataset):
            seed = distributed.broadcast(states_at_start(dl))  # all ranks read in the order that rank 0 would draw
        shared = self._shared(dl, step)
        shared.seed, shared.since = seed, since
        if position is not None:
            position.data.states = seed
            learn.first_iter = position.share(shared, dl)
        learn.dl = shared

    def _shared(self, dl: Any, step: RankStep | None) -> RankLoader:
        """Return the loader of this rank's share of `dl`, which is made once for training and once for evaluation."""
        learn, training = self.learn, step is not None
        key = (id(dl), training)
        if key in self._loaders:
            return self._loaders[key][1]
        made = self.split_batches and getattr(dl, "batch_sampler", None) is None  # ready-made batches are cut
        n = None if made else loader_len(getattr(dl, "dataset", None))
        if training and n is not None and n < distributed.world_size():
            self.tell_once(
                f"the training data has {n} sample{'s' if n > 1 else ''} for {distributed.world_size()} ranks: "
                "some of them have nothing to do"
            )
        # With statistics per rank, BatchNorm needs two samples on a rank, or none.
        shared = rank_loader(
            dl, "the training loader" if training else "the loader", training=training, split=self.split_batches,
            least=2 if training and rank_norms(learn.model) else 1, sharded=self.dataset_is_sharded,
            join=self.uneven == "join", rank_step=step, dims=learn.dls.batch_dim, count=learn.dls.count,
        )  # fmt: skip
        if learn.dls.keeps(dl):  # otherwise the loader is made for this reading alone
            self._loaders[key] = dl, shared  # keeping the loader keeps its id unique
        return shared


class _MakeWhole(Callback):
    """Gathers a sharded model at the end of a fit: the part of `DistributedCallback` that runs after the averages."""

    order = 16  # after EMA and SWA, whose averages are sharded, too; before all that saves or loads files
    run_valid = False

    @collective
    def after_fit(self) -> None:
        if (agreement := self.learn._agreement) is not None:
            with distributed.grouped_collectives():
                agreement.make_whole()


def member_of(cbs: Iterable[Callback]) -> DistributedCallback | None:
    """Return the learner's `DistributedCallback`, if it has one that is not switched off."""
    return next(iter(running(cbs, DistributedCallback)), None)


def will_shard(learn: "Learner") -> bool:
    """Tell whether the model of a learner will be divided among several ranks when it trains next."""
    member = member_of(learn.cbs)
    return member is not None and bool(member.shard) and distributed.world_size() > 1


def warn_outside_context(learn: "Learner") -> None:
    """Warn once that several processes are about to train the same model independently."""
    # Divided models are refused elsewhere.
    if distributed.world_size() > 1 and not member_of(learn.cbs) and learn.shards is None:
        distributed.warn_once(
            f"{distributed.world_size()} processes each train a whole copy of the model on all the data; "
            "to train one together write `with learn.distrib_ctx(): learn.fit(...)`"
        )


@collective
def agreement_for(learn: "Learner", what: str) -> AbstractContextManager:
    """Return the context of an `Agreement` for the call `what`.

    Without one (one process, or no `DistributedCallback`) it is `followed` if other programs follow this launch. Inside
    another run it is a null context.
    """
    member = member_of(learn.cbs)
    if member is None or distributed.world_size() == 1 or learn._agreement is not None:
        return followed(learn) if learn._dispatch is None and facts_of_launch() else nullcontext()
    return _together(learn, member, "get_preds" if what == "predict" else what)


@contextmanager
@collective
def _together(learn: "Learner", member: DistributedCallback, what: str) -> Iterator[None]:
    with Agreement(learn).run(what, member.timeout):
        member.take_model()
        yield


def dispatch(learn: "Learner", fitting: bool) -> Dispatch:
    """Return the dispatch of a run."""
    if learn._agreement is None:
        return Dispatch(learn.cbs, fitting)
    return RankDispatch(learn.cbs, fitting, learn._agreement)


def _content(data: Any) -> Iterator[list]:
    """Yield what ranks compare of a dataset: indices of a `Subset`, digests of tensors of a `TensorDataset` or a list.

    It takes a few items at equal distances, so that large data cost little. Other datasets yield nothing.
    """
    if isinstance(data, Subset):
        yield list(map(str, _some(data.indices)))
        yield from _content(data.dataset)
    elif isinstance(data, TensorDataset | list):
        tensors = data.tensors if isinstance(data, TensorDataset) else tensors_in(_some(data))
        plain = (t for t in tensors if t.ndim and t.layout is torch.strided)
        yield digests(_some(t) for t in plain if not (t.is_nested or t.is_quantized or t.is_meta))


def _some(x: Any, most: int = 20) -> Any:
    return x[:: len(x) // most + 1]


def _everywhere(cbs: Iterable[Callback]) -> list[Callback]:
    "Return the callbacks that run on every rank that has them."
    return [cb for cb in cbs if cb.run and not cb.rank0_only]


def _settings(cbs: Iterable[Callback]) -> dict[str, str]:
    """Return the plain arguments of the library's callbacks that run on every rank: many decide when ranks communicate.

    A user's subclass is listed with the arguments of its base; the user's own arguments may differ by rank.
    """
    settings: dict[str, str] = {}
    for cb in _everywhere(cbs):
        base = next(kind for kind in type(cb).__mro__ if is_ours(kind))
        if base is Callback:
            continue
        for name, value in vars(cb).items():
            if name in signature(base).parameters and isinstance(value, int | float | str | None):
                key = f"{base.__name__}({name}=)"
                settings[key] = f"{settings[key]}, {value!r}" if key in settings else repr(value)
    return settings
