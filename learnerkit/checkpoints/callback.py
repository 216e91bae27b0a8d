"""The callback that saves a whole run at intervals, and continues it in another process."""

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from learnerkit import arguments, distributed, optim
from learnerkit.callback import is_ours, running
from learnerkit.callbacks.training import StepCounter
from learnerkit.checkpoints import state
from learnerkit.checkpoints.storage import (
    Checkpoint,
    Lock,
    Storage,
    StoreLock,
    StoreUnreachable,
    began,
    candidates,
    check_types,
    manifest_of,
)
from learnerkit.endings import mark
from learnerkit.events import CancelEpochException, CancelFitException, CancelTrainException, FitDone
from learnerkit.files import MANIFEST, CheckpointError, followed, remove
from learnerkit.marks import collective, not_collective
from learnerkit.processes.rank_main import end_at_once
from learnerkit.processes.requests import END, SAVE, Request
from learnerkit.run_state import (
    EPOCH,
    FIT,
    TRAIN,
    TRAINED,
    Resumption,
    first_attributes,
    fitting,
    in_eval,
    keys,
    state_dict,
)
from learnerkit.shards import local
from learnerkit.state import State
from learnerkit.stores.paths import AnyPath, StorePath, any_path, of_home
from learnerkit.text import first_few, format_time, printable
from learnerkit.utils import unwrap

_ENDS = "ends"  # the directory of the states at the end of each fit
_FITS = 10  # the number of such states that are kept
_AGAIN = 1.0  # in seconds: a scheduler may signal both the ranks and the launcher, which passes the signal on

_ends_here: set[AnyPath] = set()
"""The directories in which this process has saved the ends of fits."""

_SUFFIXES = {TRAIN: "", TRAINED: "-trained", EPOCH: "-done", FIT: "-end"}  # the suffixes of checkpoints' names
_NUMBERS = ("fit", "step", "epoch", "n_epoch", "n_steps", "time")
_INFO = dict.fromkeys(_NUMBERS, 0) | {"place": "", "lr_finds": [{}], "launchers": [""]}


class Stopped(SystemExit):
    """The exit of a process that a signal has asked to end, after it has saved."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)
        mark(self, agreed=True, signal=int(signal.SIGTERM))


class CheckpointCallback(StepCounter):
    """Saves the whole run in regular intervals, and continues it exactly in another process.

    A checkpoint is a directory in `path`: the weights as `model.safetensors`, and all else on which the rest of the run
    depends: optimizers, schedules, the state of callbacks (`Callback.state_dict`), the recorder's history, the random
    states of every rank, and the position in the data. The continued run has the same sample order, losses and weights,
    bit by bit on CPU, as an uninterrupted one; with another number of ranks they differ by rounding.

    A script is continued by running it again. Its finished fits, and `lr_find`, return at once, with the model and the
    record as they were then; the interrupted fit continues from its last checkpoint. After a restart by the launcher
    (`--max-restarts`), or by a search, this happens without `resume`.

    SIGTERM saves after the present step, on all ranks, and ends the process with exit code 143; another one, a second
    later, ends it at once. SIGUSR1 saves and continues. On several ranks Ctrl-C, and Stop in a notebook, save before
    they interrupt.

    Args:
        path: a directory for this run alone, which all machines share; or the URL of one in an object store, such as
            's3://bucket/run', which fsspec opens. For `resume="run:ID"`, it may also be a parent of that directory.
        every: 'epoch', a number of optimizer steps, or minutes such as '10min'. The last epoch's end is always saved.
        keep: the number of newest checkpoints that are kept. The states at the end of fits are kept beside them.
        resume: continue from the newest whole checkpoint, if there is one. "run:ID", with the `run_id` of a tracker,
            continues from the checkpoints of that run, which are searched in `path` and the directories below it.
        save_on_signal: save on signals. They are seen only if the fit runs in the main thread; between fits, signals
            act as without this callback.
        async_save: copy the state to the host's memory, and write it while training continues.
        strict: refuse to resume if the configuration or the callbacks have changed, rather than warn.
        per_learner: give each Learner of the script its own directory in `path`, in the order in which they are made:
            `learner0`, `learner1`, ... A resumed script must make them in the same order.

    Raises:
        TypeError, ValueError: invalid arguments.
        CheckpointError: there are no checkpoints of the tracker's run, or several directories of them; in `before_fit`:
            the directory cannot be written, has another run's checkpoints, or its checkpoints do not fit.
    """

    order = 10_000
    run_valid = True
    only_fit = True

    def __init__(
        self, path: str | Path, every: str | int = "epoch", keep: int = 3, resume: bool | str = False,
        save_on_signal: bool = True, async_save: bool = False, strict: bool = False, per_learner: bool = False,
    ) -> None:  # fmt: skip
        if not isinstance(path, str | Path) or "\0" in str(path) or path == "":
            raise TypeError(f"got path={path!r}; it is the directory for the checkpoints of this run, such as 'runs/1'")
        arguments.check_count("keep", keep, "a number of checkpoints")
        # The path is absolute, because the script may change its directory between two checkpoints.
        self.path: AnyPath = any_path(path)
        if isinstance(self.path, Path):
            self.path = of_home(self.path).absolute()
            followed(self.path)  # This refuses a link that leads to itself.
        self.keep = keep
        self.resume, self.strict = bool(resume), strict
        self.every, self.save_on_signal = every, save_on_signal
        self.async_save = async_save
        if any("\ud800" <= c <= "\udfff" for c in str(self.path)):  # the name has bytes that are not UTF-8
            raise ValueError(
                f"the path {printable(str(self.path))} is no UTF-8, so that what is saved there could not be read again"
            )
        if isinstance(resume, str):
            if per_learner:
                raise ValueError(f"got resume={resume!r}, which is one Learner's run, and per_learner=True; give one")
            self.path = _of_run(self.path, resume)
        self.per_learner, self._above = per_learner, self.path
        self._every_steps, self._seconds = _interval(every)
        self._found: Checkpoint | None = None  # the checkpoint from which the run continues
        self._looked = False  # `_found` is up to date
        self._fit = -1  # the number of the fit
        self._forget()

    def _forget(self) -> None:
        self._storage = Storage(self.path, self.keep, self.async_save)  # the storage of checkpoints inside fits
        self._ends = ExitStack()  # the functions that undo changes at the end of the fit
        self._request = Request()
        self._resumption: Resumption | None = None  # kept until all of the state is restored
        self._trained: Mapping[str, Any] | None = None  # the state before validation
        # The place at which a fit of more steps continues in an epoch that a budget has ended; this rank's part.
        self._within: tuple[State | None, State] = None, {}
        self._saved_at = -1  # the step after which the last checkpoint was taken
        self._config: dict[str, Any] = {}
        self._first: dict[str, State] = {}  # the attributes of callbacks at the start of the fit
        # Masks of values that were not finite at the start of the fit, as in an attention mask.
        self._infinite: dict[str, Tensor] = {}

    # The beginning of a fit

    @collective
    def before_fit(self) -> None:
        super().before_fit()
        learn = self.learn
        if len(running(learn.cbs, CheckpointCallback)) > 1:
            raise ValueError("two callbacks CheckpointCallback: a run is saved in one directory, by one of them")
        optim.check_states(learn.opts)
        self._enter()
        self._looked = self._looked and learn.n_fits > self._fit  # otherwise this is another learner
        self._fit = learn.n_fits
        if (agreement := learn._agreement) is not None:
            self._request = agreement.request
        lock = StoreLock(self.path) if isinstance(self.path, StorePath) else Lock(self.path)
        self._storage.lock = lock
        self._ends.callback(lock.release)
        self._ends.callback(lambda: self._storage.wait())  # the storage is looked up then, as `_save` may replace it
        with distributed.grouped_collectives():
            lock.acquire()
            checkpoint = self._look()
            self._looked = False  # a fit that fails may be tried again, from its checkpoints
            self._config = state.configuration(learn)
            self._first = first_attributes(learn)
            now = state_dict(learn)
            self._storage.check_values(*_parts(now))
            if checkpoint is not None:
                self._take_up(checkpoint, now)
            self._storage.check_writable()
        if inside := optim.unsaved_inside(learn.opts):
            distributed.warn_once(
                f"a resumed run begins with a new state of {first_few(inside)}, as checkpoints have what the "
                "state_dict of an optimizer returns: give the outer one methods that include the inner one"
            )
        trained = {name for name, p in unwrap(learn.model).named_parameters() if p.requires_grad}
        self._infinite = {k: where for k, where in _not_finite(_values(now)).items() if k not in trained}
        self._deadline = time.monotonic() + self._seconds
        self._listen()

    def _enter(self) -> None:
        """Choose the learner's own directory, if each has one."""
        path = self._above / f"learner{self.learn._number}" if self.per_learner else self._above
        if path != self.path:
            self.path, self._looked = path, False
            self._fit = -1
            self._storage = Storage(path, self.keep, self.async_save)

    @collective
    def _look(self) -> Checkpoint | None:
        """Return the checkpoint from which this fit continues."""
        fit = self.learn.n_fits
        newest = self._newest()
        if newest is None or newest.info["fit"] < fit:
            self._found = None
            return None
        is_later, is_end = newest.info["fit"] > fit, newest.info["place"] == FIT
        end = newest if is_end and not is_later else self._end_of(fit)
        if is_later and end is None:
            distributed.warn_once(
                f"fit {fit} of this script was done before, and its end is not kept any more in {self.path / _ENDS}: "
                f"weights and table are not what they were after it, until fit {newest.info['fit']} goes on"
            )
            self._end()
        unit = "n_steps" if self.learn.n_epoch is None else "n_epoch"
        # The fit is not to train for longer.
        if is_later or (end and getattr(self.learn, unit) <= end.info[unit]):
            return end
        # The fit is to train for longer: it continues from the newest checkpoint before its end.
        last = _newest_of(self._storage) if is_end else None
        return newest if last is None or last.info["fit"] != fit else last

    def _end(self) -> NoReturn:
        self._looked = True
        raise FitDone(agreed=True)

    @collective
    def _newest(self) -> Checkpoint | None:
        """Return the newest checkpoint of the run, searched for once."""
        if self._looked:
            return self._found
        used, launchers = distributed.broadcast(_is_used(self.path)), distributed.all_gather(_launcher())
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or distributed.place().attempt) > 0
        # This script has done a fit here.
        goes_on = (self.path / _ENDS / str(self.learn.n_fits - 1)).resolve() in _ends_here
        if not used or (goes_on and not self.resume):
            self._looked = True
            return None
        if not self.resume and not restarted:
            raise self._used()
        try:
            newest, damage = _newest_of(self._storage), None
        except StoreUnreachable:
            raise
        except CheckpointError as e:  # all checkpoints inside the fit are damaged; the end of a fit may be whole
            newest, damage = None, e
        for fit in distributed.broadcast(sorted(_end_folders(self.path), reverse=True)):
            if newest is not None and (newest.info["place"] == FIT or newest.info["fit"] > fit):
                break
            newest = self._end_of(fit) or newest
        if newest is None and damage is not None:
            raise damage
        # A trial of a search has its own result, so resume=True continues only its own checkpoints.
        continues_any = self.resume and not _is_trial()
        if newest is not None and not continues_any and not {*launchers} & {*newest.info["launchers"]}:
            raise self._used()
        self._looked, self._found = True, newest
        return newest

    def _used(self) -> CheckpointError:
        if _is_trial():
            return CheckpointError(
                f"{self.path} has checkpoints of another trial or run, and a trial of a search continues its own "
                "alone: give a relative path, and leave --here out"
            )
        return CheckpointError(
            f"{self.path} has checkpoints of another run: CheckpointCallback(..., resume=True) continues it; to begin "
            "anew give another directory, or remove this one"
        )

    @collective
    def _end_of(self, fit: int) -> Checkpoint | None:
        """Return the checkpoint at the end of a fit."""
        path = self.path / _ENDS / str(fit)
        try:
            return _newest_of(Storage(path)) if distributed.broadcast(path.is_dir()) else None
        except StoreUnreachable:
            raise
        except CheckpointError:  # it is damaged, as a warning has said; the fit continues from an earlier one
            return None

    @collective
    def _take_up(self, checkpoint: Checkpoint, now: State) -> None:
        """Load the state of a checkpoint into the learner, and end the fit if it was done."""
        learn, info = self.learn, checkpoint.info
        path = str(checkpoint.path)
        checkpoint.in_place = learn.shards is not None  # each rank reads its rows
        then = _read_state(checkpoint, learn, now)
        checkpoint.drop_copy()
        self._resumption = resumption = Resumption(then, self._compare(then, info["place"] == FIT), path)
        resumption.begin(learn)
        if info["place"] == FIT:
            by = ""
            if checkpoint.path.parent.resolve() in _ends_here:
                by = ", by another Learner of this process (each may have its own directory: per_learner=True)"
            learn.say(
                f"fit {info['fit']} was done before{by}: its end is loaded from {_shown(checkpoint.path)}, and nothing "
                f"is trained; to train anew give another directory, or remove {_shown(self.path)}"
            )
            self._end()
        if then["place"] != EPOCH and now["position"] is None:
            distributed.warn(
                f"without TrainEvalCallback the place in the data is not known: epoch {info['epoch']} is read anew"
            )
        self._steps = self._saved_at = info["step"]
        self._tell(checkpoint, then["place"])

    def _compare(self, then: State, is_done: bool) -> bool:
        """Warn about changes since the checkpoint, or refuse them; return whether the optimizer is of the same kind.

        Args:
            then: the state in the checkpoint.
            is_done: the fit is not trained any further.
        """
        before, now, learn = then["config"], dict(self._config), self.learn
        now["fit"] = dict(now["fit"])
        for name in ("n_epoch", "n_steps"):
            was, wanted = before["fit"].pop(name), now["fit"].pop(name)
            if was != wanted:
                if is_done:
                    what = "this fit was done before, and is not trained any further"
                else:
                    what = "schedules, which go by the share of training done, are those of the new length"
                learn.say(f"{name} was {printable(repr(was))} and is {wanted}: {what}")
        order = [key for key, _ in keys(learn.cbs)]
        changes = [f"callbacks: {line}" for line in state.callback_changes(then["order"], order)]
        if is_same := before["optimizer"] == now["optimizer"]:
            # A schedule sets its hyper-parameters at each step; its values are compared as arguments of a callback.
            scheduled = {name for cb in learn.cbs for name in getattr(cb, "scheds", ())}
            saved, new = (
                [{k: v for k, v in group.items() if k not in scheduled} for group in config.pop("groups")]
                for config in (before, now)
            )
            if kept := state.differences(saved, new, "groups"):
                changes.append(
                    "the optimizer keeps its saved options, and a callback may set others in before_train: "
                    + first_few(kept, "; ", n=12)
                )
        if lines := state.differences(before, now):
            changes.append(first_few(lines, "; ", n=12))
        if changes and self.strict:
            raise CheckpointError(f"strict=True, and the run is not the one that was saved: {'; '.join(changes)}")
        for line in changes:
            distributed.warn(f"not as in the checkpoint: {line}")
        if lost := _lost(then):
            distributed.warn(
                f"attributes of callbacks that cannot be saved begin anew: {first_few(lost)}; give the callback "
                "state_dict and load_state_dict"
            )
        return is_same

    def _tell(self, checkpoint: Checkpoint, place: str) -> None:
        info, ranks = checkpoint.info, distributed.world_size()
        when = {TRAIN: "in", TRAINED: "at the validation of", EPOCH: "after"}[place]
        ago, other = format_time(max(0.0, time.time() - info["time"])), ""
        if checkpoint.n_ranks != ranks:
            other = f"; it had {checkpoint.n_ranks} rank{'s' * (checkpoint.n_ranks > 1)} and has {ranks}"
            other += ", of which the new ones have fresh random streams" if ranks > checkpoint.n_ranks else ""
        where = f"{when} epoch {info['epoch']}, step {info['step']}, from {_shown(checkpoint.path)}"
        self.learn.say(f"resumed fit {info['fit']} {where} ({ago} old{other})")

    def before_train(self) -> None:
        super().before_train()
        if self._resumption is not None:
            self._resumption.enter(self.learn)
            if self._resumption.state["place"] == TRAINED:
                self._trained = then = self._resumption.state
                self._within = then.get("within"), then["rank"].get("within", {})
            self._resumption = None

    # Saving

    @collective
    def after_batch(self) -> None:
        learn = self.learn
        if not learn.training:
            if self._request.mine > SAVE and self._trained is not None:
                raise CancelFitException  # `after_cancel_fit` saves the state before the validation
            return
        if not learn.step_due:
            self._step_open = True
            return
        if self._step_open:
            self._step_open = False
        # At every step: an assignment to a callback's attribute takes longer.
        vars(self)["_steps"] = steps = self._steps + 1
        every = self._every_steps
        is_due = bool(every) and steps // every > max(self._saved_at, 0) // every
        if time.monotonic() > self._deadline and (learn.n_ranks == 1 or distributed.is_main()):
            self._request.ask(SAVE)
        asked = self._asked()
        if not is_due and not asked:
            return
        kept = self._keeps_gradients()
        agreement, dispatch = learn._agreement, learn._dispatch
        cancel = dispatch.cancel if agreement is None else agreement.pending
        ends = isinstance(cancel, CancelTrainException | CancelEpochException)
        if distributed.reduce(int(kept or ends), "max"):
            # A callback accumulates gradients over several batches: the checkpoint waits for the end of that step. Or
            # one ends the training after this batch, and a run that goes on here would train on the next.
            return
        if self._saved_at < steps - (asked == SAVE and learn.n_ranks > 1 and not is_due):
            self._save(TRAIN)
        self._serve(asked)

    def _keeps_gradients(self) -> bool:
        """Tell whether gradients wait for a later step. A host-device sync."""
        # Gradients may also be kept as zeros, and those of parameters beside the optimizer are never cleared.
        grads = [local(p.grad) for p in optim.parameters_of(self.learn.opts) if p.grad is not None]
        return any(bool(grad.to_dense().any()) for grad in grads)

    def _warn_of_gradients(self) -> None:
        if self._keeps_gradients():
            distributed.warn_once(
                "a callback keeps gradients beyond the end of an epoch's training, and checkpoints do not have them: a "
                "run that is resumed there goes on without them. Take the step, or clear them, in after_train"
            )

    def _asked(self) -> int:
        """Return the request from outside; on several ranks, the request that all of them know."""
        return self._request.mine if self.learn.n_ranks == 1 else self._request.agreed

    def _serve(self, asked: int) -> None:
        """Serve the rest of a request, once the run is saved."""
        if not asked:
            return
        self._request.clear()
        if asked > SAVE:
            self._storage.wait()
            if self._saved_at == self._steps:
                self.learn.say(f"saved after step {self._steps} in {_shown(self.path)}; resume=True goes on there")
            raise Stopped if asked == END else mark(KeyboardInterrupt(), agreed=True)

    def after_cancel_train(self) -> None:
        super().after_cancel_train()
        learn, position = self.learn, self.learn._position
        if learn.n_steps and learn.pct_train >= 1 and position is not None and learn.iter + 1 != learn.n_iter:
            common = {"position": position.state_dict(), "eval": in_eval(unwrap(learn.model))}
            self._within = common, position.own_state_dict()

    def _state(self) -> State:
        """Return the state, with the place where a fit of more steps continues."""
        now, (within, own) = state_dict(self.learn, self._first), self._within
        return {**now, "within": within, "rank": now["rank"] | {"within": own}}

    def after_train(self) -> None:
        super().after_train()
        learn = self.learn
        if learn.n_steps:  # a budget of steps has ended the last batch before this callback ran
            self._steps = round(learn.pct_train * learn.n_steps)
        if self._request.heard and learn.dls.valid is not None:
            # Model and optimizer do not change until `after_epoch`, so no copy is needed.
            self._trained = self._state()

    @collective
    def after_cancel_fit(self) -> None:
        """Save the state before a validation that a signal has cut short."""
        asked = self._asked()
        if asked > SAVE and self._trained is not None:
            self._warn_of_gradients()
            self._save(TRAINED, self._trained)
            self._serve(asked)

    @collective
    def after_epoch(self) -> None:
        learn = self.learn
        self._trained = None
        asked = distributed.reduce(self._request.mine, "max")
        is_last = learn.epoch + 1 == learn.n_epoch if learn.n_steps is None else learn.pct_train >= 1
        if asked or is_last or self.every == "epoch":
            if not is_last:
                self._warn_of_gradients()
            self._save(EPOCH, self._state())
        self._serve(asked)

    @collective
    def after_fit(self) -> None:
        self._looked = True
        self._save(FIT)
        ends = _end_folders(self.path) if distributed.is_main() else {}
        for number in sorted(ends)[:-_FITS]:
            remove(ends[number])
        self._serve(distributed.reduce(self._request.mine, "max"))

    @collective
    def _save(self, place: str, now: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint unless values became NaN or infinite in this fit.

        Args:
            place: the place in the fit at which the state was taken.
            now: the state; by default the present one.
        """
        learn, now = self.learn, now or state_dict(self.learn, self._first)
        masks = _not_finite(_values(now))
        bad = [name for name, where in masks.items() if bool((where & ~self._infinite.get(name, _NOWHERE)).any())]
        if distributed.reduce(int(bool(bad)), "max"):
            everywhere = dict.fromkeys(chain(*distributed.all_gather(bad)))  # each rank has its rows of shards
            distributed.warn(f"no checkpoint is written: {first_few(everywhere)} are not finite; the last one stays")
            return
        info = {
            "fit": learn.n_fits, "place": place, "step": self._steps, "time": time.time(),
            "epoch": learn.epoch, "lr_finds": list(learn.lr_finds),
            "n_epoch": learn.epoch + 1 if learn.n_epoch is None else learn.n_epoch,
            "n_steps": self._steps if learn.n_steps is None else learn.n_steps,
            "runs": [run for cb in learn.cbs if isinstance(run := getattr(cb, "run_id", None), str)],
            "launchers": sorted({*distributed.all_gather(_launcher())}),
        }  # fmt: skip
        if place == FIT:
            self._storage.wait()
            self._storage = Storage(self.path / _ENDS / str(learn.n_fits), 1, self.async_save, self._storage.lock)
            _ends_here.add(self._storage.path.resolve())
        name = f"fit{learn.n_fits}-epoch{learn.epoch}-step{self._steps}{_SUFFIXES[place]}"
        self._storage.save(name, *_parts({**now, "config": self._config}), info)
        self._saved_at = self._steps
        self._deadline = time.monotonic() + self._seconds

    @not_collective("it runs in `distributed.alone()`")
    def to_dcp(self, path: str | Path) -> AnyPath:
        """Write the newest checkpoint in the format of `torch.distributed.checkpoint`, for other tools, on rank 0.

        It has 'model', the state dict of the model, and 'optimizer', that of the optimizer by the names of parameters,
        as in `torch.distributed.checkpoint.state_dict`; for several optimizers, one under each name.
        `torch.distributed.checkpoint.load` reads them on any number of ranks, sharded or not. Call it between fits;
        other ranks need not call it.

        Args:
            path: the directory to make, or its URL in an object store.

        Returns:
            The directory.

        Raises:
            CheckpointError: there is no whole checkpoint, the learner has no optimizer yet, or the directory cannot be
                made.
        """
        from torch.distributed import checkpoint as dcp

        to = any_path(path)
        if not distributed.is_main():
            return to
        if isinstance(to, Path):
            to = of_home(to)
        with distributed.alone():
            self._storage.wait()
            storages = [Storage(folder) for folder in (self.path, *_end_folders(self.path).values())]
            newest = max((c for c in map(_newest_of, storages) if c is not None), key=_age, default=None)
        if newest is None:
            raise CheckpointError(f"{self.path} has no checkpoint; to_dcp writes the newest one for other tools")
        newest.in_place = True  # values are read only when they are written
        state, opt = {"model": dict(newest.weights())}, newest.state()["opt"]
        if opt is not None:
            if getattr(self.learn, "opt", None) is None:
                raise CheckpointError("to_dcp needs the learner's optimizer, which a fit makes: call it after one")
            state["optimizer"] = _by_name(self.learn.opt, opt, unwrap(self.learn.model))
        if isinstance(to, Path):
            try:
                to.mkdir(parents=True, exist_ok=True)
            except OSError as e:  # torch would raise it as a text with many lines of its own
                raise CheckpointError(f"{to} is no directory that can be written to: {e}") from e
        dcp.save(state, checkpoint_id=str(to), no_dist=True)
        return to

    # Signals

    def _listen(self) -> None:
        """Handle SIGTERM and SIGUSR1 until the end of the fit."""
        if not self.save_on_signal:
            return
        if threading.current_thread() is not threading.main_thread():
            distributed.warn_once(
                "CheckpointCallback: the fit does not run in the main thread, where alone Python sees signals: none "
                "saves. Choose `every` by how much may be lost, and give save_on_signal=False"
            )
            return
        self._request.heard = True
        self._ends.callback(setattr, self._request, "heard", False)
        for signum, asked in ((signal.SIGTERM, END), (signal.SIGUSR1, SAVE)):
            if signal.getsignal(signum) not in (None, signal.SIG_IGN):
                before = signal.signal(signum, partial(_note, self._request, asked))
                self._ends.callback(signal.signal, signum, before)

    def cleanup_fit(self) -> None:
        try:
            self._ends.close()
        finally:
            self._forget()

    # Earlier calls of lr_find

    @collective
    def recorded_lr_find(self, number: int) -> dict[str, float] | None:
        """Return the rates that an earlier process has found; every rank must reach this.

        Args:
            number: the index of the call of `lr_find`.
        """
        self._enter()
        newest = self._newest()
        recorded = [] if newest is None else newest.info["lr_finds"]
        return recorded[number] if number < len(recorded) else None


def _lost(state: State) -> list[str]:
    """Return which attributes of users' callbacks could not be saved, on this rank or else on the first one."""
    owns = {key: each.get("ranks", [{}])[0] for key, each in state["callbacks"].items()} | state["rank"]["callbacks"]
    return [f"{key}.{name}" for key, own in owns.items() if isinstance(own, dict) for name in own.get("lost", ())]


def _read_state(saved: Checkpoint, learn: Any, now: State) -> State:
    """Read a state as `run_state.state_dict` returned it; every rank reads the common part and its own part.

    Its values must have the types of those of the present state, `now`, except the states of other people's callbacks:
    their `load_state_dict` may take anything. With another number of ranks, callbacks get the states of all ranks under
    'ranks'.

    Raises:
        CheckpointError: a value is of another type.
    """
    then, rank = saved.state(), distributed.rank()
    mine, file = saved.own(rank), f"{saved.path}/state.json: state"
    # TorchScheduler has the state of a scheduler of any library.
    ours = {key for key, cb in keys(learn.cbs) if is_ours(type(cb)) and type(cb).__name__ != "TorchScheduler"}

    def of_ours(states: State) -> State:
        return {key: value for key, value in states.items() if key in ours}

    # These may have been saved with other types.
    others = {
        "counters": now["counters"] | {"n_epoch": None, "n_steps": None},
        "opt": {},
        "config": {"fit": {}, "optimizer": [""], "groups": [{}] * 99},  # Lists are compared as far as both have items.
        "order": [""],
        "position": None,
        "loaders": None,  # The validation loader may be another one.
    }
    check_types(then, now | others | {"callbacks": of_ours(now["callbacks"])}, file)
    if now["position"] is not None and "TrainEvalCallback" in then["order"]:
        given = then["position"]
        reads = not isinstance(given, dict) or given.get("samplers") is not None  # otherwise no epoch has read data
        check_types(given, now["position"] | {"samplers": [] if reads else None}, f"{file}.position")
    if mine is not None:
        own = {part: of_ours(now["rank"][part]) for part in ("callbacks", "alone")}
        check_types(mine, now["rank"] | own, f"{saved.path}/rank{rank}.json: own")
    with fitting(str(saved.path)):
        if saved.n_ranks != distributed.world_size():
            owns = [saved.own(each) or {} for each in range(saved.n_ranks)]
            ranks = [each["callbacks"] for each in owns]
            for key in chain(*ranks):
                then["callbacks"].setdefault(key, {})["ranks"] = [each[key] for each in ranks if key in each]
            mine = (mine or {"seed": owns[0]["seed"]}) | {"callbacks": {}}
        # It starts from the steps of this fit.
        then["callbacks"][state.BUDGET] = {"_steps": saved.info["step"], "_step_open": False}
    place, within = saved.info["place"], then.get("within")
    if within is not None and learn.n_steps and saved.info["step"] < learn.n_steps:
        place, then = TRAIN, then | within
        mine = mine and {**mine, "position": mine.get("within")}
    return then | {"model": saved.weights(), "rank": mine, "place": place}


def _age(checkpoint: Checkpoint) -> tuple[int, float]:
    return checkpoint.info["fit"], checkpoint.info["time"]


def _by_name(made: Any, state: State, model: nn.Module) -> State:
    """Return the state of optimizers by the names of parameters instead of their indices."""
    if isinstance(made, dict):
        return {name: _by_name(opt, state[name], model) for name, opt in made.items()}
    names = {p: name for name, p in model.named_parameters()}
    order = [names.get(p, f"beside the model {i}") for i, p in enumerate(optim.parameters_of([made]))]
    groups = [group | {"params": [order[i] for i in group["params"]]} for group in state["param_groups"]]
    return {"state": {order[i]: value for i, value in state["state"].items()}, "param_groups": groups}


def _parts(now: Mapping[str, Any]) -> tuple[Any, State, Any]:
    """Return the weights of a state, the rest that is the same on all ranks, and this rank's own part."""
    return now["model"], {name: part for name, part in now.items() if name not in ("model", "rank")}, now["rank"]


def _values(now: Mapping[str, Any]) -> State:
    """Return the weights and buffers of the model, and the values that are trained beside it, by name."""
    return now["model"] | {f"value {i} beside the model": t for i, t in enumerate(now["beside"])}


def _note(request: Request, asked: int, signum: int, frame: object) -> None:
    """Handle a signal by recording it; end the process at a second SIGTERM."""
    now = time.monotonic()
    if asked == END and (request.failed or (request.mine == END and now > request.since + _AGAIN)):
        end_at_once()
    if asked > request.mine:
        request.since = now
    request.ask(asked)


def _interval(every: Any) -> tuple[int, float]:
    """Return the steps and the seconds of `every`; 0 and infinity where it does not give them."""
    if every == "epoch":
        return 0, inf
    if type(every) is int and every > 0:
        return every, inf
    minutes = re.fullmatch(r"(\d+(?:\.\d+)?)\s*min", every) if isinstance(every, str) else None
    if minutes is None or not float(minutes[1]):
        raise ValueError(f"got every={every!r}; it is 'epoch', a number of optimizer steps, or minutes such as '10min'")
    return 0, 60 * float(minutes[1])


@collective
def _newest_of(storage: Storage) -> Checkpoint | None:
    """Return the newest whole checkpoint, with an info of the right types.

    Raises:
        CheckpointError: on all ranks: there are checkpoints, and all are damaged; or the newest one is not of a run.
    """
    newest = storage.newest()
    if newest is not None:
        info, name = newest.info, f"{newest.path}/manifest.json: info"
        check_types(info, _INFO, name)
        if not info.keys() >= _INFO.keys() or info["place"] not in _SUFFIXES:
            raise CheckpointError(f"{name} is damaged: it does not say where in the run the checkpoint was taken")
    return newest


def _of_run(path: AnyPath, resume: str) -> AnyPath:
    """Return the directory with the checkpoints of a tracker's run, at `path` or below it.

    Raises:
        CheckpointError: there is none, or more than one.
        ValueError: `resume` is not 'run:ID'.
    """
    kind, _, run = resume.partition(":")
    if kind != "run" or not run:
        raise ValueError(f"got resume={resume!r}; it is True, False, or 'run:ID' with the run_id of a tracker")
    folders: dict[str, set[str]] = {}
    there: Any
    if isinstance(path, StorePath):
        there = [manifest.parent for manifest in path.rglob(MANIFEST)]
    else:
        there = (each for folder in (path, *path.rglob("*/")) for each in candidates(folder))
    for one in there:
        with suppress(CheckpointError):  # a damaged checkpoint is skipped; the others name the same run
            folder = one.parent.parent.parent if one.parent.parent.name == _ENDS else one.parent
            for each in manifest_of(one)["info"].get("runs", []):
                folders.setdefault(str(each), set()).add(str(folder))
    if len(folders.get(run, ())) != 1:
        said = "these do" if run in folders else "the runs of the checkpoints there"
        raise CheckpointError(
            f"{resume!r}: one directory in {path} or below it has to have checkpoints of this run; {said}: "
            f"{first_few(sorted(folders.get(run, folders))) or 'none'}"
        )
    return any_path(*folders[run])


def _is_used(path: AnyPath) -> bool:
    """Tell whether there are checkpoints, perhaps damaged ones."""
    return any(candidates(folder) for folder in (path, *_end_folders(path).values()))


def _shown(path: AnyPath) -> str:
    """Return a path in printable form, relative to the present directory if it lies below that."""
    with suppress(OSError):  # the present directory may have been removed
        here = Path.cwd()
        if isinstance(path, Path) and path.is_relative_to(here):
            path = path.relative_to(here)
    return printable(str(path), 1000)


def _end_folders(path: AnyPath) -> dict[int, AnyPath]:
    """Return the directories of the states at the end of fits, by the number of the fit."""
    ends = path / _ENDS
    return {int(p.name): p for p in ends.iterdir() if p.name.isdecimal()} if ends.is_dir() else {}


def _is_trial() -> bool:
    """Tell whether this process runs a trial of a search."""
    return "LEARNERKIT_TRIAL" in os.environ


def _launcher() -> str:
    """Return a text that identifies the launcher of this process, also among earlier boots and other machines."""
    name = "LEARNERKIT_LAUNCHER"
    if named := os.environ.get(name) or distributed.place().shared().get(name):
        return named  # A search or a cluster gives it; it is the same after a restart.
    parent = os.getppid()
    return f"{socket.gethostname()} {parent} {began(parent)}"


@torch.no_grad()
def _not_finite(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return masks of the NaN or infinite values of tensors that have some, by name. A host-device sync."""
    tensors = {name: local(t) for name, t in values.items() if isinstance(t, Tensor)}
    floats = {name: t for name, t in tensors.items() if t.dtype in _FLOATS and t.numel()}
    sums = [t.sum(dtype=torch.float32 if t.itemsize < 4 else None).abs() for t in floats.values()]
    # In float32, as MPS has no float64. A sum of finite values may overflow: then the mask is empty.
    finite = torch.stack([each.to(sums[0].device, torch.float32) for each in sums]).isfinite().tolist() if sums else []
    return {name: ~t.isfinite() for (name, t), is_finite in zip(floats.items(), finite, strict=True) if not is_finite}


_NOWHERE = torch.tensor(False)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
