"""The state of a run: every attribute of the Learner that a callback may read while it trains or evaluates."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from learnerkit.callback import Callback, Dispatch
    from learnerkit.data.position import Position
    from learnerkit.gradient_mean import StepGradient
    from learnerkit.large.mapped import Mapped
    from learnerkit.learner import Learner as Learner
    from learnerkit.losses import LossWeight
    from learnerkit.notebook.kernel import Workers
    from learnerkit.parallel.agreement import Agreement
    from learnerkit.parallel.sharded import Shards
else:
    Learner = Any  # for annotations alone, as the Learner's module imports this one

State = dict[str, Any]
"""The state of an object, as checkpoints keep it."""


class PublicState:
    """The attributes that a run sets, with their values when nothing runs.

    A callback reads these as its own (`self.loss`), and assigns them as `self.learn.pred = ...`.
    """

    task: str | None = None
    """'fit', 'validate', 'predict' or 'lr_find'; `None` if nothing runs."""
    training: bool = False
    """True while the loop trains, rather than validates or predicts."""

    # The progress of the last fit

    n_fits: int = 0
    """The number of fits that have ended."""
    n_epoch: int | None = 0
    """The epoch before which the fit ends; `None` if `n_steps` limits it."""
    n_steps: int | None = None
    """The number of optimizer steps of the fit, if it is limited by them."""
    start_epoch: int = 0
    """The first epoch of the fit, or of its part in this process."""
    epoch: int = 0
    """The present epoch, from 0."""
    train_iter: int = 0
    """The number of training batches since the fit began."""
    pct_train: float = 0.0
    """The share of the fit's training that is done, from 0 to 1."""

    # The batch

    dl: Any = None
    """The loader that is read."""
    n_iter: int | None = None
    """The number of its batches; `None` if it does not say."""
    first_iter: int = 0
    """The index of the first batch that is read; it is not 0 if an epoch is continued in its middle."""
    iter: int = 0
    """The index of the batch among those that this process reads."""
    batch: Any = None
    """The batch as the loader gave it, on the device."""
    batch_size: int = 0
    """Its number of samples; 0 on a rank that has none in this step."""
    xb: tuple = ()
    """Its inputs."""
    yb: tuple = ()
    """Its targets."""
    pred: Any = None
    """The predictions: the model's output, or its `logits`."""
    output: Any = None
    """The whole output of the model."""
    loss: Tensor | Any = None
    """The recorded loss, detached: a tensor, or `None` without targets. Changing it does not affect training."""
    loss_grad: Tensor | Any = None
    """The loss that is differentiated."""
    loss_count: float | Tensor = 0
    """The number of items in the mean of the batch's loss: of samples, tokens, or the like."""

    as_validated: Any = nullcontext
    """A context, `with learn.as_validated():`, in which the model has the validated weights, such as an average."""

    # The optimizer step

    step_batches: int = 1
    """The number of batches of a step on this process, more than one with `GradientAccumulation`."""
    step_due: bool = True
    """True if an optimizer step follows this batch."""


class RunState(PublicState):
    """The attributes that a run sets, with the private ones of this package, whose names begin with an underscore."""

    _dispatch: "Dispatch" = None  # type: ignore[assignment]  # calls the callbacks at each event; None: nothing runs
    _in_fit: bool = False  # a fit is going on, whose random streams an evaluation restores
    _unpack: Any = None  # the `Unpacker` of the loader that is read
    _batch_index: int = -1  # the index of the batch among those of all ranks; -1: none is read
    _position: "Position" = None  # type: ignore[assignment]  # the position in the training data of a fit
    _gradient: "StepGradient | None" = None  # computes a step's gradient; None: it is that of the step's only batch

    # Attributes that last from run to run, and private methods of the Learner that other modules call.
    if TYPE_CHECKING:
        shards: "Shards | None"  # the division of the model among the ranks; None: it is whole
        mapped: "Mapped | None"  # the files of the parameters of a model that is too large for a process
        _agreement: "Agreement | None"  # the agreement of several ranks; None: this process trains by itself
        _loss_weighting: "LossWeight"  # counts the items in the mean of a batch's loss
        _scaler_state: dict[str, Any]  # the state of fp16's gradient scaler, between fits
        _number: int  # the index of the learner among those of this process, in the order in which they are made
        _workers: "Workers | None"  # the processes of a notebook that carry out the calls

        # Runs, and levels of the loop

        _evaluate: Callable[[str, Any, Any], None]  # (task, loader, callbacks): a run without training
        _trying: Callable[[str, list["Callback"]], AbstractContextManager[Callable[..., None]]]  # a run without trace
        _events: Callable[[str, Callable[[], None], type[Exception]], None]  # (name, body, cancel)

        @property
        def _by_closure(self) -> bool: ...  # `_step` gives the optimizer a closure

        # Methods of the loop that a subclass may override
        _forward: Callable[[], None]
        _loss: Callable[[], None]
        _backward: Callable[[], None]
        _step: Callable[[], None]
        _zero_grad: Callable[[], None]

    def __init__(self) -> None:
        for name in _NAMES:  # they are in the learner's own `__dict__`, with its other attributes
            setattr(self, name, getattr(RunState, name))


_NAMES = (*PublicState.__annotations__, *RunState.__annotations__)

COUNTERS = ("n_fits", "n_epoch", "n_steps", "epoch", "train_iter", "pct_train", "start_epoch")
"""The attributes that stay after a fit, and that an evaluation restores."""

TRANSIENT = tuple(name for name in _NAMES if name not in COUNTERS)
"""The attributes that every run restores at its end."""
