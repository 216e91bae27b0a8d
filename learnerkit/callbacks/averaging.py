"""Averages of the weights over the course of training, with which the model is validated and saved."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from learnerkit import arguments, distributed, optim
from learnerkit.callback import Callback, running
from learnerkit.data.iterable import source_of
from learnerkit.data.order import order_sources, put_states, states_of
from learnerkit.marks import collective
from learnerkit.shards import is_shard, local, put
from learnerkit.state import State
from learnerkit.text import first_few
from learnerkit.torch_internals import BatchNorm
from learnerkit.utils import spanned_devices, unexpanded, unwrap


class _Averaging(Callback):
    """Keeps an average of some of the model's tensors, and puts it into the model for validation and saving.

    Training continues with the weights themselves, also in a run that is resumed from a checkpoint.

    Attributes:
        n_averaged: how often the average has been updated in this or the last fit.
        module: another module that holds the average; `None`: the model holds it while it is validated or saved.
    """

    order = 15  # after DistributedCallback, which moves and wraps the model
    run_valid = False
    module: nn.Module | None = None

    def __init__(self) -> None:
        self.n_averaged = 0
        self._forget()

    def _forget(self) -> None:
        self._own: dict[str, Tensor] = {}  # the tensors to average, once training has begun
        self._average: dict[str, Tensor] = {}  # their averages
        self._loaded: dict[str, Tensor] = {}  # averages of a checkpoint that was loaded before that
        self._groups: dict[tuple, tuple[list[Tensor], list[Tensor]]] = {}  # (averages, tensors) by device and dtype
        self._copies: list[tuple[Tensor, Tensor]] = []  # (tensor, average) if they do not share memory
        self._places: list[tuple[dict, str, str]] = []  # (a module's buffers, a name there, the name in `_own`)
        self._kept: list[tuple[Tensor, Tensor]] | None = None  # the weights, while the model has the average
        self._users = 0  # how many nested validations and saves use the average in the model

    def before_fit(self) -> None:
        learn = self.learn
        self._forget()
        if learn.task != "fit":
            return
        if any(cb.module is None and cb is not self for cb in running(learn.cbs, _Averaging)):
            raise ValueError(
                f"two callbacks average the weights, {self!r} among them, and the model can be validated with one "
                "average: use one of them"
            )
        self.n_averaged = 0
        learn.as_validated = self._in_model

    def _chosen(self) -> dict[str, tuple[Tensor, Tensor]]:
        "Return the tensors to average by name, each with the tensor that gets the average: mostly itself."
        raise NotImplementedError

    def before_train(self) -> None:
        if self.learn.task == "fit" or self.module is not None:
            self._begin()  # By now the model is wrapped or sharded, and rank 0's weights are broadcast.

    def _begin(self) -> None:
        "Begin with the values of the tensors, or with those of a checkpoint."
        for name, (t, home) in {} if self._own else self._chosen().items():
            self._own[name] = t
            # In half precision small changes of an average would be lost.
            exact = torch.float32 if home.is_floating_point() and home.itemsize < 4 else home.dtype
            average = self._average[name] = home.detach().to(exact, copy=home is t)
            if local(average).data_ptr() != local(home).data_ptr():
                self._copies.append((local(home), local(average)))
            if t.is_floating_point() or t.is_complex():
                kinds = (average.device, average.dtype), (t.device, t.dtype)
                averages, own = self._groups.setdefault(kinds, ([], []))
                averages.append(local(average))
                own.append(local(t))
        for name, value in self._loaded.items():
            put(self._average[name], value)
        self._loaded = {}

    def _begin_loaded(self) -> None:
        "Begin if a checkpoint was loaded and training has not begun; outside of a fit there is no average."
        if self._loaded:
            self._begin()

    def _follow(self) -> None:
        "Take the buffers that the model has put in the place of others, as `self.mean = ...` in a forward pass does."
        new = dict[Tensor, Tensor]()
        for buffers, key, name in self._places:
            t, now = self._own[name], buffers.get(key)
            if now is not None and now is not t and (now.shape, now.dtype, now.device) == (t.shape, t.dtype, t.device):
                new[t] = self._own[name] = now
        if new:
            self._copies = [(new.get(t, t), average) for t, average in self._copies]
            for _, own in self._groups.values():
                own[:] = [new.get(t, t) for t in own]

    @torch.no_grad()
    def _update(self, average: Callable) -> None:
        "Update the average with the current weights. No host-device sync."
        self._follow()
        for (kind, own_kind), (averages, own) in self._groups.items():
            average(averages, own if own_kind == kind else [t.to(*kind) for t in own], self.n_averaged)
        self.n_averaged += 1

    # Where the average is used

    @contextmanager
    def _in_model(self) -> Iterator[None]:
        try:
            self._put()
            yield
        finally:
            self._put_back()

    @torch.no_grad()
    def _put(self) -> None:
        "Put the average into the model's tensors, in place: optimizers, DDP and compiled code refer to them."
        self._users += 1
        if self._users == 1 and self.n_averaged and self.module is None:
            self._begin_loaded()
            self._follow()
            self._kept = [(t, t.clone()) for t, _ in self._copies]
            self._write()

    @torch.no_grad()
    def _put_back(self) -> None:
        self._users = max(0, self._users - 1)
        if not self._users:
            for t, value in self._kept or ():
                t.data.copy_(value)
            if self._kept is not None:
                torch.clear_autocast_cache()
            self._kept = None

    before_validate, cleanup_validate = _put, _put_back

    def _write(self) -> None:
        for t, average in self._copies:
            # By `data`, as autograd refuses a backward pass after a change in place. Where a callback validates before
            # the backward pass, the weights are put back.
            t.data.copy_(average)
        torch.clear_autocast_cache()  # Within a batch it has the weights of before, in low precision.

    @torch.no_grad()
    def after_fit(self) -> None:
        if self.n_averaged and self.module is None:
            self._begin_loaded()
            self._follow()
            self._write()
        self._forget()  # A file that is saved from now on has the model's own weights.

    def cleanup_fit(self) -> None:
        self._forget()

    def state_dict(self) -> State:
        """Return the average, and how often it was updated."""
        return {"n": self.n_averaged, "average": dict(self._average or self._loaded) if self.n_averaged else {}}

    def load_state_dict(self, state: State) -> None:
        """Restore the average: if training has not begun, when it does."""
        self.n_averaged, self._loaded = state["n"], state["average"]
        if self._own:
            self._begin()


class EMA(_Averaging):
    """Keeps an exponential moving average of the weights (Polyak and Juditsky 1992), to validate and save it.

    After each optimizer step average = d * average + (1 - d) * weights, also of the float buffers, such as BatchNorm's
    statistics. With `warmup` d is min(decay, (1 + n) / (10 + n)) after n updates, as in TensorFlow's
    ExponentialMovingAverage, so that the first weights are soon forgotten. Training itself goes on with the weights.

    The average is in the model in each validation during the fit, in what `learn.save` and `SaveModelCallback` write,
    and at the end of a fit that ended well. After an error the weights are there. `CheckpointCallback` keeps both. On
    several ranks the buffers' average is rank 0's.

    With `module` the average is that module's parameters: a teacher (Tarvainen and Valpola, arXiv:1703.01780; DINO), a
    target network (DQN, BYOL) or a momentum encoder (MoCo). It goes on from the values that these have, so make the
    module by `copy.deepcopy`, or call its `load_state_dict`. The module's buffers, such as BatchNorm's statistics, and
    its mode are its own. Its parameters are frozen during a fit (`requires_grad` is False), as they would be trained
    otherwise, and DDP would wait for their gradients. If the module is no part of `learn.model`, it moves to the
    loaders' device, has rank 0's values when a fit begins, and is kept in checkpoints. Validation and saving then use
    the model as it is. There may be several such callbacks, beside one that averages the weights; they are
    `learn.ema_target` (the last one) and `learn.ema`.

    Args:
        decay: the weight of the past in each update, from 0 to below 1: about 1 / (1 - decay) updates are averaged. Or
            a function that returns it, up to 1, for the share of training that is done, from 0 to 1, such as
            `SchedCos(0.996, 1)`.
        warmup: begin with a smaller decay; by default if there is no `module`.
        every: update once in this many optimizer steps of this fit. Steps that accumulation or a gradient scaler
            leaves out do not count; all steps in one batch count once.
        start: for this many optimizer steps the average is just the weights.
        module: the module that has the average.
        of: the module that is averaged; by default the model. If several optimizers train the model, the steps are
            those of the optimizers that have its parameters.

    Raises:
        TypeError: `module` or `of` is no module.
        ValueError: another decay, `every` or `start`; in `before_fit`, another callback that averages the weights, or a
            `module` whose parameters have other names or shapes than those that are averaged.
    """

    def __init__(
        self,
        decay: float | Callable[[float], float] = 0.999,
        warmup: bool | None = None,
        *,
        every: int = 1,
        start: int = 0,
        module: nn.Module | None = None,
        of: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if not callable(decay):
            _check_decay(decay)
        arguments.check_count("every", every)
        arguments.check_count("start", start, "a number of optimizer steps", least=0)
        for name, value in (("module", module), ("of", of)):
            if not isinstance(value, nn.Module | None):
                raise TypeError(f"got {name}={value!r}; it is a module, such as learn.model or a part of it")
        self.decay = decay
        self.every = every
        self.start = start
        self.module = module
        self.of = of
        self.warmup = module is None if warmup is None else warmup
        self._steps = 0  # optimizer steps of this fit
        self._share: float | None = None  # the share of training at a step whose update is still to come
        self._hooks = ExitStack()
        self._frozen = ExitStack()

    @property
    def name(self) -> str:
        """The attribute of the learner: `ema`, or with a `module` `ema_target`."""
        return super().name + ("" if self.module is None else "_target")

    @collective
    def before_fit(self) -> None:
        self._steps = 0
        if self.module is None:
            super().before_fit()
            return
        self._forget()
        if self.learn.task in ("validate", "predict"):
            return
        self.n_averaged = 0
        source, target = self._source(), unwrap(self.module)
        ours, theirs = ({name: p.shape for name, p in m.named_parameters()} for m in (source, target))
        apart = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
        if apart or source is target:
            how = f"differ in {first_few(apart)}" if apart else "are one module's"
            raise ValueError(
                "EMA(module=...) writes averages into parameters of the same names and shapes, and those of "
                f"{type(source).__name__} and {type(target).__name__} {how}: of= says which module is averaged"
            )
        for _, home in self._chosen().values():
            if home.requires_grad:
                home.requires_grad_(False)
                self._frozen.callback(home.requires_grad_, True)
        if beside := self._beside():
            if not spanned_devices(target):
                target.to(self.learn.dls.device)
            if self.learn.n_ranks > 1:
                distributed.give_values([*beside.values()])  # every rank must reach this

    def _source(self) -> nn.Module:
        "Return the module that is averaged."
        return unwrap(self.learn.model if self.of is None else self.of)

    def _beside(self) -> dict[str, Tensor]:
        "Return the module's tensors that the learner's model does not have; checkpoints save the model's anyway."
        if self.module is None:
            return {}
        module, model = unwrap(self.module), unwrap(self.learn.model)
        known = {*model.parameters(), *model.buffers()}
        named = (*module.named_parameters(), *module.named_buffers())
        return {name: t.detach() for name, t in named if t not in known}

    def _chosen(self) -> dict[str, tuple[Tensor, Tensor]]:
        source = self._source()
        named: dict[str, Tensor] = dict(source.named_parameters())
        if self.module is None:
            named |= dict(source.named_buffers())
        # A sparse buffer, such as the edges of a graph, stays as it is; what is expanded cannot be written as a whole.
        dense = {name: unexpanded(t) for name, t in named.items() if t.layout is torch.strided}
        floats = {name: t for name, t in dense.items() if t.is_floating_point() or t.is_complex()}
        if self.module is None:
            saved = source.state_dict()  # Other buffers are made anew from arguments, as the frequencies of positions.
            named_in = ((m._buffers, key, f"{path}.{key}") for path, m in source.named_modules() for key in m._buffers)
            places = ((buffers, key, name.removeprefix(".")) for buffers, key, name in named_in)
            self._places = [place for place in places if place[2] in floats and place[2] in saved]
            return {name: (t, t) for name, t in floats.items()}
        homes: dict[str, Tensor] = dict(unwrap(self.module).named_parameters())
        pairs = {name: (t, homes[name]) for name, t in floats.items() if homes[name] is not t}
        if apart := [name for name, (t, home) in pairs.items() if is_shard(t) is not is_shard(home)]:
            raise ValueError(
                "EMA(module=...) averages a model that is divided among the ranks into a module that is not: "
                f"{first_few(apart)}; put that module into the learner's model, or use EMA() without module="
                " (errors.html#sharded)"
            )
        return pairs

    def before_train(self) -> None:
        super().before_train()
        if self._own:
            self._share = None
            opts, mine = self.learn.opts, {*self._own.values()}
            # If no optimizer has these tensors, it may train copies in another precision: then all count.
            theirs = [opt for opt in opts if not mine.isdisjoint(optim.parameters_of([opt]))] or opts
            # The optimizers report their steps: one may be skipped, cancelled, or taken after a cancelled batch.
            for opt in theirs:
                self._hooks.callback(opt.register_step_post_hook(self._note_step).remove)

    def _note_step(self, *_: Any) -> None:
        self._share = self.learn.pct_train  # The schedules of the step see this value, too.

    @torch.no_grad()
    def after_batch(self) -> None:
        share, self._share = self._share, None
        if share is None:
            return
        self._steps += 1
        if self._steps <= self.start:
            self._update(get_ema_multi_avg_fn(0.0))
            self.n_averaged = 0
        elif self._steps % self.every == 0:
            n, decay = self.n_averaged, self.decay
            if callable(decay):
                decay = decay(share)
                _check_decay(decay, at=f"({share})")
            self._update(get_ema_multi_avg_fn(min(decay, (1 + n) / (10 + n)) if self.warmup else decay))
        if self.module is not None:
            self._write()

    def after_train(self) -> None:
        self.after_batch()  # Accumulation may take a step at the end of its data.

    def cleanup_train(self) -> None:
        self._hooks.close()
        self.after_batch()  # A batch may have been left after its step, without `after_batch`.

    @collective
    def before_validate(self) -> None:
        self._give_buffers()
        super().before_validate()

    @collective
    def after_fit(self) -> None:
        self._give_buffers()
        super().after_fit()

    def cleanup_fit(self) -> None:
        super().cleanup_fit()
        self._frozen.close()

    @collective
    def _give_buffers(self) -> None:
        "Broadcast rank 0's average of the buffers, which differ between ranks."
        if self.learn.n_ranks > 1 and not self._users:
            buffers = [self._average[name] for name, t in self._own.items() if not isinstance(t, nn.Parameter)]
            distributed.broadcast_into(buffers if self._average else [])

    def state_dict(self) -> State:
        """Return the average, the counts of updates and steps, and the tensors of `module` that the model lacks.

        The averages of buffers are this rank's own, as each rank computes its buffers from its own data.
        """
        parameters = dict((self._source() if self.module is None else unwrap(self.module)).named_parameters())
        if self.module is None:
            begun = self._steps > self.start  # Until then only buffers have an average of their own.
            average = {n: t for n, t in (self._average or self._loaded).items() if begun or n not in parameters}
        else:
            copies = {id(average) for _, average in self._copies}
            average = {name: t for name, t in self._average.items() if id(local(t)) in copies}
        state: State = {"n": self.n_averaged, "steps": self._steps, "own": {}}
        for part, tensors in (("average", average), ("module", self._beside())):
            for name, t in tensors.items():
                (state if name in parameters else state["own"]).setdefault(part, {})[name] = t
        return state

    def load_state_dict(self, state: State) -> None:
        """Restore the average; on another number of ranks, all get the buffers of rank 0."""
        own = state["own"] if "own" in state else state["ranks"][0]
        average, beside = (state.get(part, {}) | own.get(part, {}) for part in ("average", "module"))
        mine = self._beside()
        for name, value in beside.items():
            put(mine[name], value)
        super().load_state_dict({"n": state["n"], "average": average})
        self._steps = state["steps"]


def _check_decay(decay: Any, at: str = "") -> None:
    """Refuse a decay below 0, or of 1 or more; a function may return 1 `at` some share of training."""
    most = "1 at most" if at else "less than 1"
    arguments.check_number(
        f"decay{at}",
        decay,
        lambda share: 0 <= share < 1 or (at != "" and share == 1),
        f"the weight of the past, 0 or more and {most}",
    )


class SWA(_Averaging):
    """Validates and saves the mean of the weights at the end of each epoch from `start` on (arXiv:1803.05407).

    Stochastic Weight Averaging (Izmailov et al. 2018) wants a rate that stays high, or goes up and down, from there on:
    `fit`, `fit_sgdr`, or torch's `SWALR` with `TorchScheduler`. BatchNorm's statistics are recomputed for the mean,
    over the training data, before the validation of each of these epochs, which costs a forward pass over them. All
    other modules are in eval mode then. Layers in eval mode keep their statistics.

    The mean is used where `EMA` uses its average. Before `start` the weights themselves are validated.

    Args:
        start: the first epoch (from 0) that counts, or the share of the fit after which epochs count.
        bn_dl: a loader of training data for BatchNorm's statistics; by default the training loader.

    Raises:
        ValueError: another `start`; in `before_fit`, one that the fit does not come to, another callback that averages
            the weights, or a training loader that cannot be read once more.
    """

    def __init__(self, start: int | float = 0.75, bn_dl: Iterable | None = None) -> None:
        super().__init__()
        whole = isinstance(start, int) and not isinstance(start, bool)
        if not ((whole and start >= 0) or (isinstance(start, float) and 0 <= start < 1)):
            raise ValueError(
                f"got start={start!r}; it is an epoch (a whole number from 0), or a share of the fit (a float of 0 or "
                "more and less than 1)"
            )
        self.start, self.bn_dl = start, bn_dl
        self._counts = False  # whether this epoch counts

    def _chosen(self) -> dict[str, tuple[Tensor, Tensor]]:
        model = unwrap(self.learn.model)
        statistics = {t for norm in _tracking(model) for t in norm.buffers(recurse=False)}
        named = [(name, t) for name, t in model.named_buffers() if t in statistics]
        return {name: (t, t) for name, t in (*model.named_parameters(), *named)}

    def before_fit(self) -> None:
        super().before_fit()
        learn, n_epoch = self.learn, self.learn.n_epoch
        if learn.task != "fit":
            return
        if n_epoch is not None and self.start >= n_epoch and isinstance(self.start, int):
            raise ValueError(f"SWA(start={self.start}) would average nothing: the fit ends before epoch {n_epoch}")
        dl: Any = learn.dls.train if self.bn_dl is None else self.bn_dl
        if (hasattr(dl, "__next__") or source_of(dl) is not None) and any(_tracking(learn.model)):
            raise ValueError(
                f"SWA reads training data anew for BatchNorm's statistics, in each epoch, and this {type(dl).__name__} "
                "cannot be read from its start each time: it is an iterator, or it keeps its place in the data. Give "
                "SWA(bn_dl=...) another loader"
            )

    def before_train(self) -> None:
        super().before_train()
        learn = self.learn
        self._counts = (learn.epoch if isinstance(self.start, int) else learn.pct_train) >= self.start

    @collective
    def after_train(self) -> None:
        if self._own and self._counts:
            self._update(get_swa_multi_avg_fn())
            self._take_statistics()

    @torch.no_grad()
    @collective
    def _take_statistics(self) -> None:
        """Compute the statistics of BatchNorm with the mean of the weights."""
        learn, names = self.learn, {t: name for name, t in self._own.items()}
        norms = list(_tracking(learn.model))
        for norm in norms:
            for t in norm.buffers(recurse=False):
                self._average[names[t]].copy_(t)  # Layers in eval mode keep these.
        norms = [norm for norm in norms if norm.training]
        if not norms:
            return
        measure, dl = _Statistics(norms), learn.dls.train if self.bn_dl is None else self.bn_dl
        order = order_sources(dl)
        before = states_of(order)
        try:
            # This evaluation in mid-fit keeps random states and the data position; the model has the mean in it.
            learn._evaluate("predict", dl, measure)
        finally:
            put_states(order, before)
        for norm, found in zip(norms, measure.found, strict=True):
            for kind, value in found.items():
                self._average[names[getattr(norm, kind)]].copy_(value)

    def after_fit(self) -> None:
        if self._own and not self.n_averaged:
            distributed.warn(
                f"SWA averaged nothing: no epoch of this fit began at start={self.start} or later and was trained to "
                "its end"
            )
        super().after_fit()

    def state_dict(self) -> State:
        """Return the average, how often it was updated, and whether this epoch counts."""
        return super().state_dict() | {"counts": self._counts}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._counts = state["counts"]


class _Statistics(Callback):
    """Recomputes BatchNorm's running statistics in one evaluation: the means of the statistics of all batches.

    They equal those of `torch.optim.swa_utils.update_bn`; on several ranks they are means over the batches of all.

    Args:
        norms: the modules.

    Attributes:
        found: the new buffers of each module, by name; empty for a module that has seen no batch.
    """

    order = _Averaging.order + 1
    of_one_evaluation = True

    def __init__(self, norms: list) -> None:
        self.norms, self.found = norms, list[dict[str, Tensor]]()
        self._changes = ExitStack()

    def before_validate(self) -> None:
        undo_by = self._changes.callback
        for norm in self.norms:
            undo_by(norm.register_forward_pre_hook(_leave_out_single_values).remove)
            undo_by(setattr, norm, "momentum", norm.momentum)
            norm.train()
            norm.reset_running_stats()
            norm.momentum = None  # BatchNorm then takes a plain mean over the batches.
            if isinstance(norm, nn.SyncBatchNorm):  # its `forward` would wait for ranks with fewer batches
                vars(norm)["forward"] = partial(BatchNorm.forward, norm)
                undo_by(vars(norm).pop, "forward")

    @collective
    def after_validate(self) -> None:
        counts = [norm.num_batches_tracked for norm in self.norms]
        means = [torch.stack((norm.running_mean, norm.running_var)) for norm in self.norms]
        if self.learn.n_ranks > 1:
            sums = [mean.double().flatten() * count for mean, count in zip(means, counts, strict=True)]
            total = distributed.reduce(torch.cat([*sums, torch.stack(counts).double()]))
            *parts, totals = total.split([*map(len, sums), len(counts)])
            counts = [count.to(torch.long) for count in totals]
            means = [(part / count).view(2, -1) for part, count in zip(parts, counts, strict=True)]
        self.found = [
            {"running_mean": mean, "running_var": var, "num_batches_tracked": count.clone()} if count else {}
            for (mean, var), count in zip(means, counts, strict=True)
        ]

    def cleanup_validate(self) -> None:
        self._changes.close()


def _leave_out_single_values(norm: nn.Module, args: tuple) -> None:
    """Leave a batch with one value for each channel, which has no variance, out: a single sample without positions.

    Its forward pass goes on, as other ranks may wait in theirs for this one to gather the next unit of the model.
    """
    norm.training = not args or args[0].numel() > args[0].shape[1]


def _tracking(model: nn.Module) -> Iterator:
    """Return the BatchNorms of a model that have running statistics."""
    return (m for m in unwrap(model).modules() if isinstance(m, BatchNorm) and m.running_mean is not None)
