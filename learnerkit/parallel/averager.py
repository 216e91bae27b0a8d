"""How the gradients of a fit are averaged: chosen by what is known, put on the model, and taken off."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from learnerkit import optim, world
from learnerkit.callback import is_ours
from learnerkit.gradient_mean import StepGradient
from learnerkit.parallel import model_checks
from learnerkit.parallel.deferred import Deferred, First
from learnerkit.parallel.rank_step import Overlapped, RankStep
from learnerkit.text import first_few

if TYPE_CHECKING:
    from learnerkit.parallel.distributed import DistributedCallback

_LATER = ("after_backward", "before_step")  # where a callback may make a backward pass that counts

_OF_BUFFERS = ("broadcast_buffers", "forward_sync_buffers")  # options of DDP's that this package acts on itself


class Averager:
    """Averages the gradients of a fit: during the backward pass where DDP can, else after it.

    The first batch of a model is averaged after its backward pass. It shows, on all ranks, whether DDP can do it.

    Args:
        cb: whose options say what the user wants.
        step: of the ranks.

    Attributes:
        model: the one that is trained.
        way: how its gradients are averaged: `Deferred` or `Overlapped`.
    """

    def __init__(self, cb: "DistributedCallback", step: RankStep) -> None:
        self.cb, self.step, self.learn = cb, step, step.learn
        self.model: nn.Module | None = None
        self.way: StepGradient | None = None
        self._undo: list[Callable[[], object]] = []
        self._heard: list[Optimizer] = []  # whose steps are heard of
        self._check_options()

    def _check_options(self) -> None:
        """Refuse options of DDP that a learner with steps or backward passes of its own cannot have."""
        learn, own = self.learn, self._own_seam()
        if hasattr(learn, "gradient_accumulation"):
            if own == "_backward":
                raise ValueError(
                    "GradientAccumulation cannot weigh the batches of a learner with a _backward of its own exactly; "
                    "accumulate in that _backward, or train the whole model by one loss"
                    " (errors.html#accumulation)"
                )
            if self.cb.ddp_kwargs.get("static_graph"):
                raise ValueError(
                    "static_graph=True and GradientAccumulation do not go together: DDP's first iteration must reduce "
                    "the gradients, and accumulation does not; leave static_graph out"
                    " (errors.html#accumulation)"
                )
        if own and self._engine:
            raise ValueError(
                f"{self._engine} is for gradients that DDP averages during the backward pass, and those of a learner "
                f"with a {own} of its own are averaged after it: leave {self._engine} out"
                " (errors.html#one-pass)"
            )

    @property
    def _engine(self) -> str:
        """The option that only DDP itself can serve, if one is given."""
        return "comm_hook" if self.cb.comm_hook else "static_graph" if self.cb.ddp_kwargs.get("static_graph") else ""

    def _own_seam(self) -> str:
        """The seam of the learner's own that may make backward passes."""
        return next((seam for seam in ("_backward", "_step") if self.learn._overrides(seam)), "")

    def begin(self) -> None:
        """Begin to train, perhaps another model than before; every rank must reach this."""
        step, learn = self.step, self.learn
        self._hear_of_steps()
        named = self._named_parameters()
        if learn.model is not self.model or step.is_changed() or named.keys() != step.named.keys():
            step.agreement.vote()  # what follows talks to the other ranks, and one may have left this event
            self._prepare(named)
        step.start()

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters by name: the model's, and those that are trained with it."""
        learn = self.learn
        beside = optim.parameters_beside(learn.model, learn.loss_func, learn.opts)
        if beside and self.cb.wrap_names:
            raise ValueError(
                f"the loss or the optimizer has {len(beside)} trainable parameters that are not the model's, and "
                f"wrap={self.cb.wrap_names} leaves them out: put them into the model, in one of these parts"
            )
        found = dict(learn.model.named_parameters())
        return found | {f"parameter {i} beside the model {tuple(p.shape)}": p for i, p in enumerate(beside)}

    def _prepare(self, named: dict[str, nn.Parameter]) -> None:
        """Get ready to train a model; every rank must reach this."""
        step, learn = self.step, self.learn
        self._detach()
        model = self.model = learn.model
        step.sends_buffers = next(model.buffers(), None) is not None and all(
            self.cb.ddp_kwargs.get(name, True) for name in _OF_BUFFERS
        )
        if self.cb.wrap_names:
            model_checks.check_parts(model, self.cb.wrap_names)
        if self.cb.sync_bn is not False and model_checks.batch_norms(model):
            if learn.dls.device.type != "cpu":
                self._undo.append(model_checks.synchronise_batch_norms(model))
            elif self.cb.sync_bn:
                world.warn_once(
                    "sync_bn: torch has no SyncBatchNorm on the CPU, so each rank's BatchNorm sees its own samples "
                    "alone (sync_bn=False says that this is meant)"
                )
        if self.cb.comm_hook is not None:
            self.cb.tell_once(
                f"comm_hook={self.cb.comm_hook!r} rounds the gradients: the numbers are not those of one process any "
                "more"
            )
        world.give_values([*named.values(), *model.buffers()])
        own, table = self._own_seam(), learn._dispatch.table
        theirs = any(not (is_ours(hook) or cb.rank0_only) for event in _LATER for cb, hook, *_ in table[event])
        step.take_parameters(named, watches=bool(own) or theirs)
        self.way = Deferred(step, own == "_backward", self._settle)

    def _settle(self, first: First | None) -> bool:
        """Choose how gradients are averaged, by the first batch of all ranks; every rank must reach this.

        Args:
            first: what this rank's has shown.

        Returns:
            Whether any rank had data.
        """
        self._check_foreign()
        learn, own, given = self.learn, self._own_seam(), self.cb.find_unused_parameters
        buffers = {} if first is None else model_checks.buffer_marks(learn.model, learn.loss_func)
        everyone = [(found, marks) for found, marks in world.all_gather((first, buffers)) if found is not None]
        if not everyone:
            return False
        self._compare_buffers([marks for _, marks in everyone])
        reasons = list(dict.fromkeys(reason for found, _ in everyone for reason in found.reasons))
        unused = dict.fromkeys(name for found, _ in everyone for name in found.unused)
        if own:
            self._say_deferred(f"{type(learn).__name__} has a {own} of its own")
            return True
        if unused and given is False:
            raise RuntimeError(
                f"parameters that take no part in the loss: {first_few(unused)}. DDP waits for the gradient of each: "
                "freeze them, use them, or leave find_unused_parameters=False out"
            )
        if self._engine == "comm_hook":
            reasons += [f"the loss does not depend on {first_few(unused)} (which could be frozen)"] if unused else []
            reasons += ["find_unused_parameters=True asks for the other way"] if given else []
            if reasons:
                raise ValueError(
                    f"{self._engine} is for gradients that DDP averages during the backward pass, which it cannot do, "
                    f"as {', and '.join(reasons)}: leave {self._engine} out"
                    " (errors.html#one-pass)"
                )
        of_model = unused.keys() & dict(learn.model.named_parameters())
        if of_model and not given:  # those beside the model may be for a callback's own loss
            self.cb.tell_once(
                f"find_unused_parameters=True was chosen: the loss does not depend on {first_few(unused)}"
            )
        if self._engine or not (reasons or unused or given):
            options = {name: value for name, value in self.cb.ddp_kwargs.items() if name not in _OF_BUFFERS}
            self._take(Overlapped(self.step, self.cb.comm_hook, options, self._give_up))
        elif reasons:
            self._say_deferred(", and ".join(reasons))
        return True

    def _check_foreign(self) -> None:
        """Refuse parameters of an optimizer that this package does not know, if they get gradients of the loss."""
        known = set(self.step.named.values())
        for owner in (self.learn, *self.learn.cbs):
            for name, opt in vars(owner).items():
                groups = opt.param_groups if isinstance(opt, Optimizer) else ()
                if any(p.grad is not None and p not in known for group in groups for p in group["params"]):
                    holder = f"{type(owner).__name__}.{name}"
                    raise ValueError(
                        f"{holder} trains parameters that are neither the model's nor in learn.opt, and the loss "
                        "depends on them, so each rank would train its own: put them into the model, or into learn.opt "
                        "(add_param_group)"
                        " (errors.html#foreign-parameters)"
                    )

    def _compare_buffers(self, ranks: list[dict[str, str]]) -> None:
        """Warn of buffers that each rank makes of its own samples."""
        apart = [name for name in ranks[0] if any(r.get(name) != ranks[0][name] for r in ranks)]
        if apart:
            self.cb.tell_once(
                f"each rank makes {first_few(apart)} (buffers that change in the forward pass) of its own samples, so "
                "the numbers are not those of one process; make them of all ranks' samples: learnerkit.world.reduce or "
                "all_gather, in the forward pass"
                " (errors.html#rank-statistics)"
            )

    def _take(self, way: StepGradient) -> StepGradient:
        """Average gradients in another way from the next backward pass on; every rank must reach this."""
        if self.way is not None:
            self.way.detach()
        self.way = self.learn._gradient = way
        return way

    def _give_up(self) -> StepGradient:
        """Average after the backward pass from here on, as parameters were frozen or unfrozen."""
        self._say_deferred("parameters were frozen or unfrozen during an epoch")
        return self._take(Deferred(self.step, own=False))

    def _say_deferred(self, why: str) -> None:
        self.cb.tell_once(f"gradients are averaged after the backward pass, as {why}", by=self.learn.say)

    def end(self) -> None:
        """End the fit."""
        self._detach()
        self.way = None  # it refers to this one: nothing of a run is left to garbage collection
        for undo in reversed(self._undo):
            undo()

    def _detach(self) -> None:
        """Take off the parameters what was put on them."""
        if self.way is not None:
            self.way.detach()
        self.step.take_parameters({}, watches=False)

    def _hear_of_steps(self) -> None:
        """Hear of the steps of each optimizer, also of one that a callback has put there since the last epoch."""
        for opt in self.learn.opts:
            if any(opt is known for known in self._heard):
                continue
            self._heard.append(opt)
            self._undo.append(opt.register_step_post_hook(self.step.note_optimizer_step).remove)
            if self._own_seam():
                self._undo.append(opt.register_step_pre_hook(self._before_optimizer).remove)

    def _before_optimizer(self, opt: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        self.step.note_optimizer_step()  # first: a rank that has left asks if any has come here, and then comes, too
        return self.step.passes.before_optimizer(args, kwargs)
