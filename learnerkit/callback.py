"""The base of all callbacks, the check of their hooks, and the dispatch that calls them.

A callback is a class with methods named after events (`learnerkit.events.Event`). It reads the learner's attributes
as its own, and writes them as `self.learn.x = ...`.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fastcore.basics import camel2snake

from learnerkit import distributed
from learnerkit.endings import ending_of, raised_in
from learnerkit.events import INNER_EVENTS, LOOP, CancelException, Event
from learnerkit.text import did_you_mean
from learnerkit.utils import accepts

if TYPE_CHECKING:
    from torch import nn

    from learnerkit.callbacks.recorder import Recorder
    from learnerkit.data.loaders import DataLoaders
    from learnerkit.learner import Learner
    from learnerkit.state import PublicState, State

    class _Read(PublicState):
        """The learner's attributes that a callback reads, for type checkers; `Any`: a callback may reuse the name."""

        n_epoch: int | Any
        n_steps: int | Any
        n_iter: int | Any
        dls: DataLoaders
        model: nn.Module
        recorder: Recorder
        final_record: list[float]
        effective_batch_size: int | Any
        x: Any
        y: Any
        opt: Any
        opts: Any
        cbs: Any
        n_ranks: int
        loss_func: Any
        loss_weight: Any
        metrics: Any
        logger: Any
        lr_finds: Any
        shards: Any
        mapped: Any
        path: Any
        model_dir: Any
        opt_func: Any
        splitter: Any
        lr: Any
        wd: Any
        wd_bn_bias: Any
        moms: Any
        train_bn: Any

        @property
        def smooth_loss(self) -> float | None: ...
else:
    _Read = object

LEVELS = ("fit", "epoch", "train", "validate", "batch")
"""The levels of the loop that have a cleanup event."""

RUN_FLAGS = ("run", "run_train", "run_valid")

_FREE = ("check", "n_fits", "n_ranks")
"""Names of learner attributes that a callback may use for its own: they are never assigned to a learner."""


class Callback(_Read):
    """Code that runs during training: subclass it, or pass functions: `Callback(after_batch=f, order=0)`.

    Attributes:
        order: callbacks run in ascending order at every event, cleanups in descending order; ties as added.
        run: False switches the callback off; a change made during a fit is undone at its end.
        run_train: whether it runs at the events of a batch in training.
        run_valid: whether it runs at the events of a batch in validation and prediction.
        rank0_only: run only on rank 0.
        only_fit: do not run in `validate`, `get_preds` and `lr_find`: for callbacks that record, log, track or save a
            fit.
        logs: the columns that it adds to the table with `log_metric`; a tracker can monitor only declared columns.
        learn: the learner, once added to one.

    Args:
        order: overrides the class's `order`.
        hooks: functions by event name; each gets the callback as its only argument.

    Raises:
        TypeError: a keyword that is neither `order` nor an event, or a hook that does not take the callback.
    """

    order: int = 0
    run: bool = True
    run_train: bool = True
    run_valid: bool = True
    rank0_only: bool = False
    only_fit: bool = False
    logs: tuple[str, ...] = ()
    learn: "Learner" = None  # type: ignore[assignment]  # None until it is added to a learner

    def __init__(self, *, order: int | None = None, **hooks: Callable[["Callback"], None]) -> None:
        if order is not None:
            self.order = order
        for event, hook in hooks.items():
            if event not in list(Event):
                now = _FORMER_EVENTS.get(event)
                near = f"; here it is {now}" if now else did_you_mean(event, [*Event, "order"])
                raise TypeError(f"{type(self).__name__} got the keyword {event!r}, which is not an event{near}")
            if not (callable(hook) and accepts(hook, self)):
                raise TypeError(
                    f"got {event}={hook!r}; it is a function that takes the callback, and no more: lambda cb: ..."
                )
            setattr(self, event, partial(hook, self))

    @classmethod
    def on(cls, event: str, order: int = 0) -> Callable[[Callable[["Callback"], None]], "Callback"]:
        """Make a callback from one function: `@Callback.on('after_batch')`."""
        return lambda hook: cls(order=order, **{event: hook})

    @property
    def name(self) -> str:
        """The name of the learner's attribute that holds this callback: `Recorder` is `learn.recorder`."""
        return camel2snake(type(self).__name__.removesuffix("Callback")) or "callback"

    if not TYPE_CHECKING:  # type checkers report names that are not in `_Read`

        def __getattr__(self, name: str) -> Any:
            # This is reached only if the callback itself has no such attribute.
            learn = self.__dict__.get("learn")
            if learn is not None and not name.startswith("__"):
                try:
                    return getattr(learn, name)
                except AttributeError:
                    pass
            where = "nor has its learner" if learn is not None else "and it is not added to a learner"
            if learn is not None and hasattr(learn.model, name):
                where += f"; the model has it: self.model.{name}"
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}, {where}")

    def __setattr__(self, name: str, value: Any) -> None:
        learn = self.__dict__.get("learn")
        dispatch = learn and learn._dispatch
        is_free = not dispatch or name in _FREE or name[0] == "_" or self._owns(name)
        if not is_free and getattr(learn, name, self) is not self:  # a class `Average` may set `self.average`
            to = f"self.learn.{name}b = (...,)" if name in ("x", "y") else f"self.learn.{name} = ..."
            raise AttributeError(
                f"{type(self).__name__} assigned self.{name}, but {name!r} belongs to the learner: write "
                f"`{to}`, or set self.{name} in __init__ to make it the callback's own"
            )
        object.__setattr__(self, name, value)
        if dispatch and name in RUN_FLAGS:
            dispatch.changed()

    def _owns(self, name: str) -> bool:
        return name in self.__dict__ or hasattr(type(self), name)

    def state_dict(self) -> "State":
        """Return the values that the callback needs to continue an interrupted fit, for `CheckpointCallback`.

        It is called after a training step, after an epoch's training, and after an epoch. Values are numbers, strings,
        tensors, arrays, and lists, tuples and dicts of these; values that change in validation must be copied. On
        several ranks rank 0's result is kept, and `DriftCheck` compares it with the others; values that differ by rank
        go under the key 'own'.

        For a user's callback without this method, each rank keeps the attributes that are such values, or random
        generators, sets or deques. A checkpoint has those that have changed since the end of `before_fit`, arguments of
        its class among them. Parts of the model, and attributes of more than 256 MB, are left out.

        Outside of a fit `check`, `lr_find` and `scaling_report` call it, and give the result to `load_state_dict` at
        their end.
        """
        return {}

    def load_state_dict(self, state: "State") -> None:
        """Restore the result of `state_dict`. It is called once, after the hooks that the resumed fit runs again.

        These hooks are `before_fit`, and in mid-epoch `before_epoch` and `before_train`, in which the callback does not
        yet have its state. An `after_train` that had run is not called again.

        Args:
            state: the result; if the number of ranks has changed, 'ranks', a list of all ranks' parts, replaces 'own'.
        """

    def __repr__(self) -> str:
        return type(self).__name__


_FORMER_EVENTS = {f"begin_{level}": f"before_{level}" for level in LEVELS} | {
    "on_train_begin": "before_fit", "on_epoch_begin": "before_epoch", "on_batch_begin": "before_batch",
    "on_loss_begin": "after_pred", "on_backward_begin": "after_loss (or before_backward)",
    "on_backward_end": "after_backward (or before_step)", "on_step_end": "after_step", "on_batch_end": "after_batch",
    "on_epoch_end": "after_epoch", "on_train_end": "after_fit (or cleanup_fit, which runs after an error too)",
    "after_fit_exception": "cleanup_fit", "jump_to_epoch": "fit(..., start_epoch=n)",
}  # fmt: skip
"""The events of fastai 1 and of the first versions of fastai 2, with their present names."""


_C = TypeVar("_C", bound=Callback)


def is_of(cb: Callback, kind: type) -> bool:
    """Tell whether a callback is of a class, or of one that a cell of a notebook defined when it ran before."""
    names = [(base.__module__, base.__qualname__) for base in type(cb).__mro__]
    is_in_module = "<" not in kind.__qualname__  # classes that a function makes may share one name
    return isinstance(cb, kind) or (is_in_module and (kind.__module__, kind.__qualname__) in names)


def is_ours(hook: Any) -> bool:
    """Tell whether a function or method belongs to this library; a partial, as in `Callback(...)`, never does."""
    return str(hook.__module__).split(".")[0] == __name__.split(".")[0]


def check_hooks(cb: Callback) -> None:
    """Refuse a callback with a method that looks like a hook but is none.

    Raises:
        TypeError: a method has a name similar to an event's, or that of an event in earlier versions of fastai, or a
            hook needs arguments; or there is a `__call__`, by which fastai calls its callbacks.
    """
    if is_ours(type(cb)) and type(cb) is not Callback:
        return  # a test has checked it
    if any("__call__" in vars(kind) for kind in type(cb).__mro__ if issubclass(kind, Callback)):
        raise TypeError(
            f"{type(cb).__name__} defines __call__, which fastai calls at every event; here only the hooks are called: "
            "define those of the events it is for (learn.show_training_loop() prints them), and give a function for "
            "other uses another name"
        )
    for name in dir(type(cb)):
        if name in Callback.__dict__ or name.startswith("_") or not callable(getattr(type(cb), name, None)):
            continue
        now = _FORMER_EVENTS.get(name)
        if now is not None:
            raise TypeError(
                f"{cb}.{name} is an event of an earlier fastai or of another library; here it is never called: "
                f"use {now}"
            )
        if name not in list(Event):
            prefixed = name.startswith(("before_", "after_", "cleanup_"))
            near = did_you_mean(name, Event, cutoff=0.6 if prefixed else 0.9)
            if prefixed or near:
                raise TypeError(
                    f"{cb}.{name} is not an event{near} (a helper method may be named otherwise, or _{name})"
                )
    for event in Event:
        hook = getattr(cb, event, None) if cb._owns(event) else None
        if hook is not None and not accepts(hook):
            raise TypeError(
                f"{cb}.{event}{inspect.signature(hook)} takes arguments; a hook takes none but self: "
                "it finds everything on self and self.learn"
            )


_BEHIND_FORWARD = [event for event in INNER_EVENTS if event != Event.before_batch]


def readers_of_predictions(learn: "Learner") -> set[str]:
    """Return the events of the present kind of batch at which a callback may read or change predictions.

    This library's callbacks declare by `reads_predictions` or `train_metrics` that they do.
    """
    return {
        event
        for event in _BEHIND_FORWARD
        for cb, hook, *_ in learn._dispatch.table[event]
        if not is_ours(hook) or getattr(cb, "train_metrics", False) or getattr(cb, "reads_predictions", False)
    }


_IN_EVALUATION = [e for e in Event if not any(part in e for part in ("create", "train", "backward", "step"))]


def running(cbs: Iterable[Callback], kind: type[_C]) -> list[_C]:
    """Return the callbacks of class `kind` that are not switched off, in their order."""
    return [cb for cb in cbs if isinstance(cb, kind) and cb.run]


def acts_in_evaluation(cb: Callback) -> bool:
    """Tell whether a callback has a hook that an evaluation would call."""
    if not cb.run or cb.only_fit:
        return False
    return any(cb._owns(e) for e in _IN_EVALUATION if cb.run_valid or e not in INNER_EVENTS)


class Dispatch:
    """Calls the callbacks at each event. Hooks are collected once per run: an unused event costs a look-up.

    They are collected again only when a callback is added or removed, or sets one of its `run` flags.

    Args:
        cbs: the learner's own list, so that callbacks added in mid-run are seen.
        fitting: whether callbacks marked `only_fit` take part.

    Attributes:
        cancel: an exception of a hook of `after_batch` that is raised after the last hook.
        were_off: which `run` flags of the callbacks were off at the start of a fit, by the id of the callback.
    """

    def __init__(self, cbs: list[Callback], fitting: bool) -> None:
        self.cbs, self.fitting = cbs, fitting
        # A tracker's `run` is the tracker's object for its run.
        self.were_off = {id(cb): {name: not getattr(cb, name) for name in RUN_FLAGS} for cb in cbs if fitting}
        self.cancel: BaseException | None = None
        self.training = True
        self._is_main = distributed.is_main()  # asked once: outside of a process group it reads the environment
        self._owed: list[list] = []
        self.changed()

    def changed(self) -> None:
        """Collect the hooks again, because callbacks or their flags have changed."""
        self._tables: dict[bool, dict[str, list]] = {}
        self.phase(self.training)

    def phase(self, training: bool) -> None:
        """Change to training, in which `run_train` counts, or to evaluation, in which `run_valid` does."""
        self.training = training
        self.table = self._tables.get(training) or self._resolve()

    def listeners(self, event: str) -> list[Callback]:
        """Return the callbacks that run at `event` in the present phase, in order."""
        flag = "run"
        if event in INNER_EVENTS:
            flag = "run_train" if self.training else "run_valid"
        return [
            cb
            for cb in sorted(self.cbs, key=lambda cb: cb.order)
            if cb._owns(event)
            and cb.run
            and getattr(cb, flag)
            and (self.fitting or not cb.only_fit)
            and (not cb.rank0_only or self._is_main)
        ]

    def _resolve(self) -> dict[str, list]:
        table: dict[str, list] = {
            str(event): [(cb, self._hook(cb, event)) for cb in self.listeners(event)] for event in Event
        }
        for level in LEVELS:
            entering = f"before_{level}"
            owing = self.listeners(f"cleanup_{level}")
            if owing:
                heard = [cb for cb, _ in table[entering]]
                table[entering] = [
                    (cb, partial(self._enter, cb, level) if cb in owing else self._hook(cb, entering))
                    for cb in sorted(self.cbs, key=lambda cb: cb.order)
                    if cb in heard or cb in owing
                ]
            table[level] = owing
        self._tables[self.training] = table
        return table

    def _hook(self, cb: Callback, event: str) -> Callable[[], None]:
        hook = getattr(cb, event)
        guarded = cb.rank0_only and not is_ours(type(cb)) and distributed.world_size() > 1
        return distributed.no_collectives(f"{cb!r}.{event}")(hook) if guarded else hook

    def _enter(self, cb: Callback, level: str) -> None:
        # The cleanup is recorded before the hook runs: it also follows a hook that fails half-way.
        self._owed[-1].append((cb, f"cleanup_{level}"))
        if cb._owns(f"before_{level}"):
            self._hook(cb, f"before_{level}")()

    def fire(self, event: str) -> None:
        """Call the hooks of `event`; an exception gets a note with the callback and the event.

        A cancel in `after_batch` that is not known to other ranks is raised after the last hook, so that all callbacks
        get the event of a batch that was trained on.
        """
        for cb, hook in self.table[event]:
            try:
                hook()
            except BaseException as e:
                raised_in(e, event, repr(cb))
                if event != "after_batch" or not isinstance(e, CancelException) or ending_of(e).agreed:
                    raise
                self.cancel = self.cancel or e
        if self.cancel is not None:
            try:
                raise self.cancel
            finally:
                self.cancel = None  # its traceback refers to this frame

    @property
    def at_epoch(self) -> bool:
        """True inside an epoch of a fit, and outside of its training and its validation."""
        return len(self._owed) == len(("fit", "epoch"))

    def __enter__(self) -> "Dispatch":
        """Open a level; at its end, the cleanups of the callbacks that its `before_*` event has reached run."""
        self._owed.append([])
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        """Run the level's cleanups: all of them, in reverse order, even if one fails.

        An error of the level itself is raised again, with a note for each cleanup that failed, too; otherwise, also if
        the level was cancelled, the first error of a cleanup is raised.
        """
        owed = self._owed.pop()
        error = None if isinstance(error, CancelException) else error
        failed = None
        for cb, event in reversed(owed):
            try:
                with distributed.no_collectives(f"{cb!r}.{event}"):
                    getattr(cb, event)()
            except BaseException as e:
                raised_in(e, event, repr(cb))
                if (first := error or failed) is None:
                    failed = e
                else:
                    first.add_note(f"then {cb!r}.{event} failed too: {type(e).__name__}: {e}")
        if failed is not None:
            try:
                raise failed
            finally:
                failed = None  # its traceback refers to this frame: together they would wait for the garbage collector

    def close(self) -> None:
        """Forget the hooks at the end of the run: this object's own hooks refer to it, and would keep it alive."""
        self._tables, self.table = {}, {}


@contextmanager
def kept_flags(cbs: list[Callback]) -> Iterator[None]:
    """Restore every callback's own `run` flags at the end of the context."""
    before = [(cb, {k: cb.__dict__[k] for k in RUN_FLAGS if k in cb.__dict__}) for cb in cbs]
    try:
        yield
    finally:
        for cb, flags in before:
            for name in RUN_FLAGS:
                cb.__dict__.pop(name, None)
            cb.__dict__.update(flags)


def describe_loop(cbs: list[Callback]) -> str:
    """Return the text of the loop with, at each event, the callbacks that run there."""
    dispatch = Dispatch(cbs, fitting=True)
    lines = []
    for line in LOOP.strip().splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        if line.strip() == "before_validate":
            dispatch.phase(False)
        named = [word for word in line.split() if word in list(Event)]
        if not named:
            lines.append(line)
        for event in named:
            hearing = dispatch.listeners(event)
            if hearing or not event.startswith(("after_cancel_", "cleanup_")):
                lines.append(f"{indent}{event}".ljust(44) + ", ".join(map(repr, hearing)))
    return "\n".join(line.rstrip() for line in lines)
