"""The averaging of a fit's gradients: the choice between DDP's way and the deferred one, and its set-up and removal."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from learnerkit import distributed, optim
from learnerkit.callback import is_ours
from learnerkit.gradient_mean import StepGradient
from learnerkit.marks import collective
from learnerkit.parallel.deferred import Deferred
from learnerkit.parallel.model_checks import buffer_marks, check_parts, check_shardable, rank_norms, synchronised
from learnerkit.parallel.rank_step import Overlapped, RankStep
from learnerkit.text import first_few
from learnerkit.utils import overrides

if TYPE_CHECKING:
    from learnerkit.parallel.distributed import DistributedCallback
    from learnerkit.parallel.sharded_step import Sharded

_LATER = ("after_backward", "before_step")  # events in which a callback may run a backward pass whose gradients count


class Averager:
    """Averages the gradients of a fit: during the backward pass where DDP can, else after the pass.

    The first batch of a model is averaged after its backward pass, which shows, on all ranks, whether DDP can average
    the gradients. The learner's `_gradient` is the way that is taken, `Deferred` or `Overlapped`, until the run ends.

    Args:
        cb: the callback with the user's options; its `ends` gets the functions that undo the set-up after the fit.
        step: the step that the ranks take together.

    Attributes:
        model: the model that is trained.

    Raises:
        ValueError: options of DDP that a learner with its own steps or backward passes cannot have.
    """

    def __init__(self, cb: "DistributedCallback", step: RankStep) -> None:
        self.cb, self.step = cb, step
        self.learn = step.learn
        self.model = nn.Module()  # a placeholder until the first `begin`
        self._heard: list[Optimizer] = []  # the optimizers that have a hook on `step`
        # `_own` is the method that the learner overrides and that may run backward passes; `_engine` is the option that
        # only DDP itself can serve.
        self._own = own = next((seam for seam in ("_backward", "_step") if overrides(self.learn, seam)), "")
        is_static = cb.ddp_kwargs.get("static_graph")
        self._engine = engine = "comm_hook" if cb.comm_hook else "static_graph" if is_static else ""
        cb.ends.callback(step.take_parameters, {}, watches=False)
        if any(other.name == "gradient_accumulation" and other.run for other in self.learn.cbs):
            if own == "_backward":
                raise ValueError(
                    "GradientAccumulation cannot weigh the batches of a learner with a _backward of its own exactly; "
                    "accumulate in that _backward, or train the whole model by one loss (errors.html#loss-weight)"
                )
            if is_static:
                raise ValueError(
                    "static_graph=True and GradientAccumulation do not go together: DDP's first iteration must reduce "
                    "the gradients, and accumulation does not; leave static_graph out (errors.html#unused-parameters)"
                )
        if cb.shard:
            check_shardable(self.learn, cb.offload)
        if own and engine:
            raise ValueError(
                f"{engine} is for gradients that DDP averages during the backward pass, and those of a learner "
                f"with a {own} of its own are averaged after it: leave {engine} out (errors.html#unused-parameters)"
            )

    @collective
    def begin(self) -> None:
        """Begin training, perhaps of another model than before."""
        step, learn = self.step, self.learn
        step.begin()
        if learn.shards is not None:
            learn.shards.take_optimizers(learn.opts)
        for opt in learn.opts:
            if opt not in self._heard:  # a callback may have added it since the last epoch
                self._heard.append(opt)
                # `step.passes` is looked up when the hook runs, because it may be replaced.
                own = (lambda _, *given: step.passes.before_optimizer(*given)) if self._own else None
                self.cb.ends.callback(opt.register_step_pre_hook(own or step.note_optimizer_step).remove)
        beside = optim.parameters_beside(learn.model, learn.loss_func, learn.opts)
        if self.cb.wrap_names:
            check_parts(learn.model, self.cb.wrap_names, beside)
        named = dict(learn.model.named_parameters())
        named |= {f"parameter {i} beside the model {tuple(p.shape)}": p for i, p in enumerate(beside)}
        is_other = learn.model is not self.model or named.keys() != step.named.keys()
        # A part may have been replaced by one whose parameters have the same names.
        if is_other or step.is_changed() or any(p is not step.named[name] for name, p in named.items()):
            self._prepare(named)
        step.start()

    @collective
    def _prepare(self, named: dict[str, nn.Parameter]) -> None:
        """Prepare the training of a model.

        Args:
            named: all parameters by name: the model's, and those trained beside it.
        """
        step, learn, cb = self.step, self.learn, self.cb
        model = self.model = learn.model
        with distributed.grouped_collectives():
            frozen = distributed.all_gather([name for name, p in named.items() if not p.requires_grad])
            if apart := [name for name, count in Counter(chain(*frozen)).items() if count < len(frozen)]:
                raise RuntimeError(
                    f"only some ranks train {first_few(apart)}: freeze the same parameters on every rank"
                    " (errors.html#unused-parameters)"
                )
            if learn.shards is None:
                distributed.give_values([*named.values(), *model.buffers()])
        step.sends = model if cb.sends_buffers and list(model.buffers()) else None
        if cb.sync_bn is not False and rank_norms(model):
            if learn.dls.device.type != "cpu":
                cb.ends.enter_context(synchronised(model))
            elif cb.sync_bn:
                distributed.warn_once(
                    "sync_bn: torch has no SyncBatchNorm on the CPU, so each rank's BatchNorm sees its own samples "
                    "alone (sync_bn=False says that this is meant)"
                )
        if cb.comm_hook is not None:
            cb.tell_once(
                f"comm_hook={cb.comm_hook!r} rounds the gradients: the numbers are not those of one process any more"
            )
        if cb.shard:
            self._take_shards(named)
            return
        step.take_parameters(named, self._watches())
        self._take(Deferred(step, self._own == "_backward", self._settle))

    def _watches(self) -> bool:
        """Tell whether the learner or a callback may run backward passes after that of the loss."""
        heard = [heard for event in _LATER for heard in self.learn._dispatch.table[event]]
        return bool(self._own) or any(not (is_ours(hook) or other.rank0_only) for other, hook, *_ in heard)

    @collective
    def _take_shards(self, named: dict[str, nn.Parameter]) -> None:
        """Train on shards of the model, and divide the model if it is whole."""
        # The import is here because torch's part of it takes half a second.
        from learnerkit.parallel.sharded_step import Sharded

        step, learn = self.step, self.learn
        shards = self.cb.divide()
        of_model = dict(learn.model.named_parameters())
        step.take_parameters({name: of_model.get(name, p) for name, p in named.items()}, self._watches())
        votes, own = bool(self.cb.find_unused_parameters), self._own == "_backward"
        way = Sharded(step, shards, own, self._settle_shards, self._check_foreign, votes, self.cb.sync)
        self._take(way)
        if own:
            self.cb.ends.callback(self._tell_silent, way)

    @collective
    def _settle_shards(self, unused: list[str] | None) -> bool | None:
        """Return whether the loss may leave parameters out; `None`: no rank had data.

        Args:
            unused: the parameters that this rank's first batch leaves out; `None` if the rank has no data.
        """
        if not (facts := self._of_all_ranks(None if unused is None else (unused,))):
            return None
        return bool(self._unused(facts[0]) or self.cb.find_unused_parameters)

    @collective
    def _of_all_ranks(self, first: tuple | None) -> list:
        """Return each of the facts about the first batch, of all ranks with data; an empty list if no rank has any."""
        mine = first and (*first, buffer_marks(self.learn.model, self.learn.loss_func))
        everyone = [facts for facts in distributed.all_gather(mine) if facts is not None]
        if not everyone:
            return []
        *facts, marks = zip(*everyone, strict=True)
        if apart := [name for name in marks[0] if any(other.get(name) != marks[0][name] for other in marks)]:
            self.cb.tell_once(
                f"each rank makes {first_few(apart)} (buffers that change in the forward pass) of its own samples, so "
                "the numbers are not those of one process; make them of all ranks' samples: learnerkit.distributed"
                ".reduce or all_gather, in the forward pass (errors.html#rank-statistics)"
            )
        return facts

    def _unused(self, names: Iterable[list[str]]) -> dict[str, None]:
        """Return the parameters that some rank's loss leaves out; refuse them, or say that this is allowed."""
        unused, given = dict.fromkeys(chain(*names)), self.cb.find_unused_parameters
        if unused and given is False:
            raise RuntimeError(
                f"parameters that take no part in the loss: {first_few(unused)}. DDP waits for the gradient of each: "
                "freeze them, use them, or leave find_unused_parameters=False out"
            )
        of_model = dict(self.learn.model.named_parameters())  # a callback's own loss may use those beside the model
        if not (given or self.cb.comm_hook) and unused.keys() & of_model:
            self.cb.tell_once(
                f"find_unused_parameters=True was chosen: the loss does not depend on {first_few(unused)}"
            )
        return unused

    @collective
    def _settle(self, first: tuple[list[str], list[str]] | None) -> bool:
        """Choose how gradients are averaged from the first batch of all ranks.

        Args:
            first: the facts about this rank's first batch, as `Deferred` passes them.

        Returns:
            Whether any rank had data.
        """
        self._check_foreign()
        learn, given = self.learn, self.cb.find_unused_parameters
        engine = self._engine
        if not (facts := self._of_all_ranks(first)):
            return False
        if self._own:
            several = f"{type(learn.opt).__name__} evaluates the loss several times in a step"
            self._say_deferred(several if learn._by_closure else f"{type(learn).__name__} has a {self._own} of its own")
            return True
        unused, reasons = self._unused(facts[0]), list(dict.fromkeys(chain(*facts[1])))
        against = [*reasons]
        against += [f"the loss does not depend on {first_few(unused)} (which could be frozen)"] if unused else []
        against += ["find_unused_parameters=True asks for the other way"] if given else []
        if engine == "comm_hook" and against:
            raise ValueError(
                f"{engine} is for gradients that DDP averages during the backward pass, which it cannot do, as "
                f"{', and '.join(against)}: leave {engine} out (errors.html#unused-parameters)"
            )
        if engine or not against:
            self._take(Overlapped(self.step, self.cb.comm_hook, self.cb.ddp_kwargs, self._give_up))
        elif reasons:
            self._say_deferred(", and ".join(reasons))
        return True

    def _tell_silent(self, way: "Sharded") -> None:
        """Warn about shards that got no gradient in the fit from the learner's own backward passes."""
        if way.silent and self.learn.train_iter:
            self.cb.tell_once(
                f"no backward pass of {type(self.learn).__name__} gave a gradient to {first_few(sorted(way.silent))}. "
                "If it names parameters in backward(inputs=...): those of a sharded model are no part of the graph; "
                "leave inputs= out, and clear the gradients that are not wanted (errors.html#sharded)"
            )

    def _check_foreign(self) -> None:
        """Refuse parameters that get gradients of the loss and belong to an optimizer that is not in `learn.opts`."""
        known = set(self.step.named.values())
        for owner in (self.learn, *self.learn.cbs):
            for name, opt in vars(owner).items():
                trained = optim.parameters_of([opt]) if isinstance(opt, Optimizer) else ()
                if any(p.grad is not None and p not in known for p in trained):
                    holder = f"{type(owner).__name__}.{name}"
                    raise ValueError(
                        f"{holder} trains parameters that are neither the model's nor in learn.opt, and the loss "
                        "depends on them, so each rank would train its own: put them into the model, or into learn.opt "
                        "(add_param_group) (errors.html#unused-parameters)"
                    )

    @collective
    def _take(self, way: StepGradient) -> StepGradient:
        """Average gradients in the given way from the next backward pass on."""
        if (last := self.learn._gradient) is not None:
            last.detach()
        self.learn._gradient = way
        self.cb.ends.callback(way.detach)
        return way

    @collective
    def _give_up(self) -> StepGradient:
        """Average after the backward pass from here on, because parameters were frozen or unfrozen."""
        self._say_deferred("parameters were frozen or unfrozen during an epoch")
        return self._take(Deferred(self.step, own=False))

    def _say_deferred(self, why: str) -> None:
        self.cb.tell_once(f"gradients are averaged after the backward pass, as {why}", by=self.learn.say)
