"""The callback that saves a whole run now and then, and goes on from there in another process."""

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
from learnerkit.callback import is_ours
from learnerkit.callbacks.training import StepCounter
from learnerkit.checkpoints import state
from learnerkit.checkpoints.storage import Checkpoint, Lock, Storage, candidates, check_types, manifest_of
from learnerkit.endings import mark
from learnerkit.events import CancelFitException, FitDone
from learnerkit.files import CheckpointError, remove
from learnerkit.parallel.agreement import END, SAVE, Request
from learnerkit.processes.ends import end_at_once
from learnerkit.run_state import EPOCH, FIT, TRAIN, TRAINED, Resumption, first_attributes, fitting, keys, state_dict
from learnerkit.shards import local
from learnerkit.text import first_few, format_time, printable
from learnerkit.utils import unwrap, warn

_ENDS = "ends"  # the directory of the states at the end of each fit
_FITS = 10  # so many of them are kept
_AGAIN = 1.0  # seconds: a scheduler may send a signal to the launcher, which passes it on, and to the ranks

_ends_here: set[Path] = set()
"""The directories of the ends of fits that this process has saved."""

_SUFFIXES = {TRAIN: "", TRAINED: "-trained", EPOCH: "-done", FIT: "-end"}  # of the names of checkpoints
_NUMBERS = ("fit", "step", "epoch", "n_epoch", "n_steps", "time")
_INFO = dict.fromkeys(_NUMBERS, 0) | {"place": "", "lr_finds": [{}], "launchers": [""]}


class Stopped(SystemExit):
    """Leaves the process after it was asked to end by a signal, and has saved."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)
        mark(self, agreed=True, signal=int(signal.SIGTERM))


class CheckpointCallback(StepCounter):
    """Saves the whole run in regular intervals, and continues it exactly in another process.

    A checkpoint is a directory in `path`: the weights as `model.safetensors`, and all else that the rest of the run
    depends on: optimizers, schedules, what callbacks remember (`Callback.state_dict`), the recorder's history, the
    random states of every rank, and the place in the data. The run that continues has the same sample order, losses and
    weights, bit by bit on CPU, as one that was not interrupted; with another number of ranks up to rounding.

    A script is continued by running it again. Its fits that were done return at once, with the model and the record as
    they were then, and so does `lr_find`; the fit that was interrupted goes on where it was saved last. After a
    restart by the launcher (`--max-restarts`), or by a search, this happens by itself.

    SIGTERM saves after the present step, on all ranks, and ends the process with exit code 143; another one, a second
    later, ends it at once. SIGUSR1 saves and goes on. On several ranks Ctrl-C, and Stop in a notebook, save before they
    interrupt.

    Args:
        path: a directory for this run alone, which all machines share; for `resume="run:ID"` also one above it.
        every: 'epoch', a number of optimizer steps, or minutes such as '10min'. The last epoch's end is always saved.
        keep: how many checkpoints stay, the newest. The states at the end of fits are kept beside them.
        resume: go on from the newest whole checkpoint, if there is one. "run:ID", with the `run_id` of a tracker, goes
            on with the checkpoints of that run, which are looked for in `path` and the directories below it.
        save_on_signal: whether signals save. They are seen only where the fit runs in the main thread; between fits,
            when the last one is saved, they do what they do without this callback.
        async_save: copy what is saved to the host's memory, and write it while training goes on.
        strict: refuse to resume where the configuration or the callbacks have changed, rather than warn.
        per_learner: give each Learner of the script a directory of its own in `path`, by the order in which they are
            made: `learner0`, `learner1`, ... A script that is resumed must make them in the same order.

    Raises:
        TypeError, ValueError: arguments that cannot work.
        CheckpointError: there are no checkpoints of the tracker's run, or several directories of them; in
            `before_fit`: the directory cannot be written, has another run's checkpoints, or what is there does not fit.
    """

    order = 10_000
    run_valid = True
    only_fit = True

    def __init__(
        self, path: str | Path, every: str | int = "epoch", keep: int = 3, resume: bool | str = False,
        save_on_signal: bool = True, async_save: bool = False, strict: bool = False, per_learner: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if not isinstance(path, str | Path) or "\0" in str(path):
            raise TypeError(f"got path={path!r}; it is the directory for the checkpoints of this run, such as 'runs/1'")
        arguments.check_count("keep", keep, "a number of checkpoints")
        # Absolute, as the script may change its directory between two checkpoints.
        self.path, self.keep, self.resume, self.strict = Path(path).expanduser().absolute(), keep, bool(resume), strict
        self.every, self.save_on_signal, self.async_save = every, save_on_signal, async_save
        if any("\ud800" <= c <= "\udfff" for c in str(self.path)):  # bytes of a name that are none of UTF-8
            raise ValueError(
                f"the path {printable(str(self.path))} is no UTF-8, so that what is saved there could not be read again"
            )
        if isinstance(resume, str):
            if per_learner:
                raise ValueError(f"got resume={resume!r}, which is one Learner's run, and per_learner=True; give one")
            self.path = _of_run(self.path, resume)
        self.per_learner, self._above = per_learner, self.path
        self._every_steps, self._seconds = _interval(every)
        self._found: Checkpoint | None = None  # where the run is to go on
        self._looked = False  # for it, and what was found holds
        self._fit = -1  # its number
        self._carried: tuple[dict, dict] | None = None  # the place after the fit before, if its data are unread here
        self._forget()

    def _forget(self) -> None:
        self._storage = Storage(self.path, self.keep, self.async_save)  # of the checkpoints that are no ends of fits
        self._ends = ExitStack()  # what the end of the fit puts back
        self._request = Request()
        self._resumption: Resumption | None = None  # until all of it is put back
        self._trained: Mapping[str, Any] | None = None  # the state before validation
        self._saved_at = -1  # the step after which the last one was taken
        self._config: dict[str, Any] = {}
        self._first: dict[str, dict[str, Any]] = {}  # attributes of callbacks when the fit began
        self._infinite: dict[str, Tensor] = {}  # where values were infinite, or NaN, when the fit began, as in a mask

    # The beginning of a fit

    def before_fit(self) -> None:
        super().before_fit()
        learn = self.learn
        if sum(isinstance(cb, CheckpointCallback) for cb in learn.cbs) > 1:
            raise ValueError("two callbacks CheckpointCallback: a run is saved in one directory, by one of them")
        self._enter()
        self._looked = self._looked and learn.n_fits > self._fit  # else this is another learner
        follows, self._fit = learn.n_fits == self._fit + 1, learn.n_fits
        if (agreement := learn._agreement) is not None:
            self._request = agreement.request
        lock = Lock(self.path)
        self._ends.callback(lock.release)
        self._ends.callback(lambda: self._storage.wait())  # it may be another one by then
        with distributed.grouped_collectives():
            lock.acquire()
            found = self._look()
            self._looked = False  # until the fit has ended: one that fails may be tried again, from what was saved
            self._config = state.configuration(learn)
            carried, self._carried = self._carried, None
            position = learn._position
            if found is None and follows and carried is not None and position is not None:
                position.follow(*carried)
            self._first = first_attributes(learn)
            now, storage = state_dict(learn), self._storage
            storage.check_values(*_parts(now))
            if found is not None:
                self._take_up(found, now)
            storage.check_writable()
        trained = {name for name, p in unwrap(learn.model).named_parameters() if p.requires_grad}
        self._infinite = {k: where for k, where in _not_finite(_values(now)).items() if k not in trained}
        self._deadline = time.monotonic() + self._seconds
        self._listen()

    def _enter(self) -> None:
        """Choose the learner's own directory, if each has one."""
        path = self._above / f"learner{self.learn._number}" if self.per_learner else self._above
        if path != self.path:
            self.path, self._looked, self._fit = path, False, -1
            self._storage = Storage(path, self.keep, self.async_save)

    def _look(self) -> Checkpoint | None:
        """What this fit goes on from; every rank must reach this."""
        fit = self.learn.n_fits
        found = self._newest()
        if found is None or found.info["fit"] < fit:
            self._found = None
            return None
        end = self._end_of(fit)
        if found.info["fit"] > fit and end is None:
            distributed.warn_once(
                f"fit {fit} of this script was done before, and its end is not kept any more in {self.path / _ENDS}: "
                f"weights and table are not what they were after it, until fit {found.info['fit']} goes on"
            )
            self._end()
        unit = "n_steps" if self.learn.n_epoch is None else "n_epoch"
        if found.info["fit"] > fit or (end and getattr(self.learn, unit) <= end.info[unit]):  # not to train for longer
            return end
        # The newest from before the end of the fit, where others change things.
        last = _newest_of(self._storage) if found.info["place"] == FIT else None
        return found if last is None or last.info["fit"] != fit else last

    def _end(self) -> NoReturn:
        self._looked = True
        raise FitDone(agreed=True)

    def _newest(self) -> Checkpoint | None:
        """The newest checkpoint of the run, looked for once; every rank must reach this."""
        if self._looked:
            return self._found
        used, launchers = distributed.broadcast(_is_used(self.path)), distributed.all_gather(_launcher())
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
        goes_on = (self.path / _ENDS / str(self.learn.n_fits - 1)).resolve() in _ends_here  # after a fit of this script
        if not used or (goes_on and not self.resume):
            self._looked = True
            return None
        if not self.resume and not restarted:
            raise self._used()
        try:
            found, damage = _newest_of(self._storage), None
        except CheckpointError as e:  # all of them are damaged; the end of a fit may be whole
            found, damage = None, e
        for fit in distributed.broadcast(sorted(_numbers(self.path / _ENDS), reverse=True)):
            if found is not None and (found.info["place"] == FIT or found.info["fit"] > fit):
                break
            found = self._end_of(fit) or found
        if found is None and damage is not None:
            raise damage
        # A trial of a search has a result of its own, so that resume=True continues its own checkpoints alone.
        continues_any = self.resume and not _is_trial()
        if found is not None and not continues_any and not {*launchers} & {*found.info["launchers"]}:
            raise self._used()
        self._looked, self._found = True, found
        return found

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

    def _end_of(self, fit: int) -> Checkpoint | None:
        """The state at the end of a fit; every rank must reach this."""
        path = self.path / _ENDS / str(fit)
        try:
            return _newest_of(Storage(path)) if distributed.broadcast(path.is_dir()) else None
        except CheckpointError:  # damaged, as was warned of; the fit goes on from an earlier one
            return None

    def _take_up(self, found: Checkpoint, now: dict[str, Any]) -> None:
        """Put the state of a checkpoint into the learner, and end the fit if it was done."""
        learn, info, path = self.learn, found.info, str(found.path)
        found.in_place = learn.shards is not None  # each rank takes its rows
        then = _read_state(found, learn, now)
        self._resumption = resumption = Resumption(then, self._compare(then), path)
        self._carried = resumption.begin(learn)
        if info["place"] == FIT:
            by = ""
            if found.path.parent.resolve() in _ends_here:
                by = ", by another Learner of this process (each may have its own directory: per_learner=True)"
            learn.say(f"fit {info['fit']} was done before{by}: its end is loaded from {_shown(found.path)}")
            self._end()
        if info["place"] != EPOCH and learn._position is None:
            warn(f"without TrainEvalCallback the place in the data is not known: epoch {info['epoch']} is read anew")
        self._steps = self._saved_at = info["step"]
        self._tell(found)

    def _compare(self, then: dict[str, Any]) -> bool:
        """Warn of what has changed, or refuse it; tell whether the optimizer is of the same kind."""
        before, now = then["config"], self._config
        fit = dict(now["fit"])
        for name in ("n_epoch", "n_steps"):
            was, wanted = before["fit"].pop(name), fit.pop(name)
            if was != wanted:
                self.learn.say(
                    f"{name} was {printable(repr(was))} and is {wanted}: schedules, which go by the share of training "
                    "done, are those of the new length"
                )
        lines = state.differences(before, now | {"fit": fit})
        order = state.callback_changes(then["order"], [key for key, _ in keys(self.learn.cbs)])
        found = [f"callbacks: {line}" for line in order] + ([first_few(lines, "; ", n=12)] if lines else [])
        if found and self.strict:
            raise CheckpointError(f"strict=True, and the run is not the one that was saved: {'; '.join(found)}")
        for line in found if distributed.is_main() else ():
            warn(f"not as in the checkpoint: {line}")
        lost = [key for key in state.forgetful(self.learn) if key in then["order"]]
        if lost and distributed.is_main():
            warn(
                f"the tensors or modules of {first_few(lost)} are not in the checkpoint and begin anew: give the "
                "callback state_dict and load_state_dict"
            )
        return before["optimizer"] == now["optimizer"]

    def _tell(self, found: Checkpoint) -> None:
        info, ranks = found.info, distributed.world_size()
        when = {TRAIN: "in", TRAINED: "at the validation of", EPOCH: "after"}[info["place"]]
        ago, other = format_time(max(0.0, time.time() - info["time"])), ""
        if found.n_ranks != ranks:
            other = f"; it had {found.n_ranks} rank{'s' * (found.n_ranks > 1)} and has {ranks}"
            other += ", of which the new ones have fresh random streams" if ranks > found.n_ranks else ""
        where = f"{when} epoch {info['epoch']}, step {info['step']}, from {_shown(found.path)}"
        self.learn.say(f"resumed fit {info['fit']} {where} ({ago} old{other})")

    def before_train(self) -> None:
        super().before_train()
        if self._resumption is not None:
            self._resumption.enter(self.learn)
            if self._resumption.state["place"] == TRAINED:
                self._trained = self._resumption.state
            self._resumption = None

    # Saving

    def after_batch(self) -> None:
        learn = self.learn
        if not learn.training:
            if self._request.mine > SAVE and self._trained is not None:
                raise CancelFitException  # `after_cancel_fit` saves what was before the validation
            return
        if not learn.step_due:
            self._step_open = True
            return
        if self._step_open:
            self._step_open = False
        vars(self)["_steps"] = steps = self._steps + 1  # at every step: an assignment to a callback takes longer
        every = self._every_steps
        is_due = bool(every) and steps // every > max(self._saved_at, 0) // every
        if time.monotonic() > self._deadline and (learn.n_ranks == 1 or distributed.is_main()):
            self._request.ask(SAVE)
        asked = self._asked()
        if not is_due and not asked:
            return
        # Gradients may also be kept as zeros, and those of parameters beside the optimizer are never cleared.
        grads = [local(p.grad) for p in optim.parameters_of(learn.opts) if p.grad is not None]
        kept = any(bool(grad.to_dense().any()) for grad in grads)
        if distributed.reduce(int(kept), "max"):
            return  # a callback accumulates gradients over several batches: at the end of that step
        if self._saved_at < steps - (asked == SAVE and learn.n_ranks > 1 and not is_due):
            self._save(TRAIN)
        self._serve(asked)

    def _asked(self) -> int:
        """What was asked for from outside; on several ranks, what all of them know of."""
        return self._request.mine if self.learn.n_ranks == 1 else self._request.agreed

    def _serve(self, asked: int) -> None:
        """Do what else was asked for, once the run is saved."""
        if not asked:
            return
        self._request.done()
        if asked > SAVE:
            self._storage.wait()
            raise Stopped if asked == END else mark(KeyboardInterrupt(), agreed=True)

    def after_train(self) -> None:
        super().after_train()
        learn = self.learn
        if learn.n_steps:  # a budget has ended the last batch before this callback
            self._steps = round(learn.pct_train * learn.n_steps)
        if self._request.heard and learn.dls.valid is not None:
            # Model and optimizer stay as they are until `after_epoch`, so no copy is needed.
            self._trained = state_dict(learn, self._first)

    def after_cancel_fit(self) -> None:
        """Save what was the state before a validation that a signal has cut short."""
        asked = self._asked()
        if asked > SAVE and self._trained is not None:
            self._save(TRAINED, self._trained)
            self._serve(asked)

    def after_epoch(self) -> None:
        learn = self.learn
        self._trained = None
        asked = distributed.reduce(self._request.mine, "max")
        is_last = learn.epoch + 1 == learn.n_epoch if learn.n_steps is None else learn.pct_train >= 1
        if asked or is_last or self.every == "epoch":
            self._save(EPOCH)
        self._serve(asked)

    def after_fit(self) -> None:
        learn = self.learn
        self._looked, position = True, learn._position
        self._save(FIT)
        if position is not None and position.is_unread:
            self._carried = position.state_dict(), position.own_state_dict()
        for number in sorted(_numbers(self.path / _ENDS))[:-_FITS] if distributed.is_main() else ():
            remove(self.path / _ENDS / str(number))
        self._serve(distributed.reduce(self._request.mine, "max"))

    def _save(self, place: str, now: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint unless values became NaN or infinite in this fit; every rank must reach this.

        Args:
            place: where in the fit the state is from.
            now: the state; by default the present one.
        """
        learn, now = self.learn, now or state_dict(self.learn, self._first)
        found = _not_finite(_values(now))
        bad = [name for name, where in found.items() if bool((where & ~self._infinite.get(name, _NOWHERE)).any())]
        if distributed.reduce(int(bool(bad)), "max"):
            everywhere = dict.fromkeys(chain(*distributed.all_gather(bad)))  # of shards each rank has its rows
            if distributed.is_main():
                warn(f"no checkpoint is written: {first_few(everywhere)} are not finite; the last one stays")
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
            self._storage = Storage(self.path / _ENDS / str(learn.n_fits), 1, self.async_save)
            _ends_here.add(self._storage.path.resolve())
        name = f"fit{learn.n_fits}-epoch{learn.epoch}-step{self._steps}{_SUFFIXES[place]}"
        self._storage.save(name, *_parts({**now, "config": self._config}), info)
        self._saved_at = self._steps
        self._deadline = time.monotonic() + self._seconds

    def to_dcp(self, path: str | Path) -> Path:
        """Write the newest checkpoint for other tools, in the format of `torch.distributed.checkpoint`, on rank 0.

        It has 'model', the state dict of the model, and 'optimizer', that of the optimizer with the names of parameters
        in the place of their numbers, as `torch.distributed.checkpoint.state_dict` has it; of several optimizers one
        under each name. `torch.distributed.checkpoint.load` reads them on any number of ranks, sharded or not. Call it
        between fits; no other rank need come.

        Args:
            path: a directory, which is made.

        Returns:
            The directory.

        Raises:
            CheckpointError: there is no whole checkpoint.
        """
        from torch.distributed import checkpoint as dcp

        path = Path(path)
        if not distributed.is_main():
            return path
        with distributed.alone():
            self._storage.wait()
            storages = [Storage(self.path), *(Storage(self.path / _ENDS / str(n)) for n in _numbers(self.path / _ENDS))]
            found = max((c for c in map(_newest_of, storages) if c is not None), key=_age, default=None)
        if found is None:
            raise CheckpointError(f"{self.path} has no checkpoint; to_dcp writes the newest one for other tools")
        found.in_place = True  # values are read as they are written
        state, opt = {"model": dict(found.weights())}, found.state()["opt"]
        if opt is not None:
            state["optimizer"] = _by_name(self.learn.opt, opt, unwrap(self.learn.model))
        dcp.save(state, checkpoint_id=path, no_dist=True)
        return path

    # Signals

    def _listen(self) -> None:
        """See SIGTERM and SIGUSR1 until the end of the fit."""
        if not self.save_on_signal:
            return
        if threading.current_thread() is not threading.main_thread():
            distributed.warn_once(
                "CheckpointCallback: the fit does not run in the main thread, where alone Python sees signals: none "
                "saves"
            )
            return
        self._request.heard = True
        self._ends.callback(setattr, self._request, "heard", False)
        for name, asked in (("SIGTERM", END), ("SIGUSR1", SAVE)):
            signum = getattr(signal, name, None)
            if signum is not None and signal.getsignal(signum) not in (None, signal.SIG_IGN):
                before = signal.signal(signum, partial(_note, self._request, asked))
                self._ends.callback(signal.signal, signum, before)

    def cleanup_fit(self) -> None:
        try:
            self._ends.close()
        finally:
            self._forget()

    # Earlier calls of lr_find

    def recorded_lr_find(self, number: int) -> dict[str, float] | None:
        """The rates that an earlier process has found; every rank must reach this.

        Args:
            number: of the call of `lr_find`, from 0.
        """
        self._enter()
        found = self._newest()
        recorded = [] if found is None else found.info["lr_finds"]
        return recorded[number] if number < len(recorded) else None


def _read_state(found: Checkpoint, learn: Any, now: dict[str, Any]) -> dict[str, Any]:
    """Read a state as `run_state.state_dict` returned it; every rank reads what is alike, and what is its own.

    Its values have the types of those of the present state, `now`, except what callbacks of others have: their
    `load_state_dict` may take anything. With another number of ranks callbacks get what all had, under 'ranks'.

    Raises:
        CheckpointError: a value is of another type.
    """
    then, rank = found.state(), distributed.rank()
    mine, file = found.own(rank), f"{found.path}/state.json: state"
    theirs = ("TorchScheduler",)  # has the state of a scheduler, which may be anybody's
    ours = {key for key, cb in keys(learn.cbs) if is_ours(type(cb)) and type(cb).__name__ not in theirs}

    def of_ours(states: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in states.items() if key in ours}

    more = {
        "counters": now["counters"] | {"n_epoch": None, "n_steps": None},
        "opt": {},
        "config": {"fit": {}, "optimizer": [""]},
        "order": [""],
        "position": None,
    }
    check_types(then, now | more | {"callbacks": of_ours(now["callbacks"])}, file)
    if now["position"] is not None and "TrainEvalCallback" in then["order"]:
        place = now["position"] | {"samplers": []}
        check_types(then["position"], place, f"{file}.position")
    if mine is not None:
        own = {part: of_ours(now["rank"][part]) for part in ("callbacks", "alone")}
        check_types(mine, now["rank"] | own, f"{found.path}/rank{rank}.json: own")
    with fitting(str(found.path)):
        if found.n_ranks != distributed.world_size():
            owns = [found.own(each) or {} for each in range(found.n_ranks)]
            ranks = [each["callbacks"] for each in owns]
            for key in (key for each in ranks for key in each):
                then["callbacks"].setdefault(key, {})["ranks"] = [each[key] for each in ranks if key in each]
            mine = (mine or {"seed": owns[0]["seed"]}) | {"callbacks": {}}
        then["callbacks"][state.BUDGET] = {"steps": found.info["step"], "open": False}  # it counts what is counted here
    return then | {"model": found.weights(), "rank": mine, "place": found.info["place"]}


def _age(found: Checkpoint) -> tuple[int, float]:
    return found.info["fit"], found.info["time"]


def _by_name(made: Any, state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the state of optimizers with the names of parameters in the place of their numbers."""
    if isinstance(made, dict):
        return {name: _by_name(opt, state[name], model) for name, opt in made.items()}
    names = {p: name for name, p in model.named_parameters()}
    order = [names.get(p, f"beside the model {i}") for i, p in enumerate(optim.parameters_of([made]))]
    groups = [group | {"params": [order[i] for i in group["params"]]} for group in state["param_groups"]]
    return {"state": {order[i]: value for i, value in state["state"].items()}, "param_groups": groups}


def _parts(now: Mapping[str, Any]) -> tuple[Any, dict[str, Any], Any]:
    """The weights of a state, what else is alike on all ranks, and what is this rank's."""
    return now["model"], {name: part for name, part in now.items() if name not in ("model", "rank")}, now["rank"]


def _values(now: Mapping[str, Any]) -> dict[str, Any]:
    """The weights and buffers of the model, and what is trained beside it, by names."""
    return now["model"] | {f"value {i} beside the model": t for i, t in enumerate(now["beside"])}


def _note(request: Request, asked: int, signum: int, frame: object) -> None:
    """The handler of a signal, which only notes it; a second SIGTERM ends the process."""
    now = time.monotonic()
    if asked == END and (request.failed or (request.mine == END and now > request.since + _AGAIN)):
        end_at_once()
    if asked > request.mine:
        request.since = now
    request.ask(asked)


def _interval(every: Any) -> tuple[int, float]:
    """The steps and the seconds of `every`; 0 and infinite where it does not say them."""
    if every == "epoch":
        return 0, inf
    if type(every) is int and every > 0:
        return every, inf
    minutes = re.fullmatch(r"(\d+(?:\.\d+)?)\s*min", every) if isinstance(every, str) else None
    if minutes is None or not float(minutes[1]):
        raise ValueError(f"got every={every!r}; it is 'epoch', a number of optimizer steps, or minutes such as '10min'")
    return 0, 60 * float(minutes[1])


def _newest_of(storage: Storage) -> Checkpoint | None:
    """The newest whole checkpoint, with an info of the right types; every rank must reach this.

    Raises:
        CheckpointError: on all ranks: there are checkpoints, and all are damaged; or the newest is not one of a run.
    """
    found = storage.newest()
    if found is not None:
        info, name = found.info, f"{found.path}/manifest.json: info"
        check_types(info, _INFO, name)
        if not info.keys() >= _INFO.keys() or info["place"] not in _SUFFIXES:
            raise CheckpointError(f"{name} is damaged: it does not say where in the run the checkpoint was taken")
    return found


def _of_run(path: Path, resume: str) -> Path:
    """The directory with the checkpoints of a tracker's run, at `path` or below it.

    Raises:
        CheckpointError: there is none, or more than one.
        ValueError: `resume` is not 'run:ID'.
    """
    kind, _, run = resume.partition(":")
    if kind != "run" or not run:
        raise ValueError(f"got resume={resume!r}; it is True, False, or 'run:ID' with the run_id of a tracker")
    found: dict[str, set[str]] = {}
    for one in (each for folder in (path, *path.rglob("*/")) for each in candidates(folder)):
        with suppress(CheckpointError):  # a damaged one; the others say the same
            folder = one.parents[2] if one.parents[1].name == _ENDS else one.parent
            for each in manifest_of(one)["info"].get("runs", []):
                found.setdefault(str(each), set()).add(str(folder))
    if len(found.get(run, ())) != 1:
        said = "these do" if run in found else "the runs of the checkpoints there"
        raise CheckpointError(
            f"{resume!r}: one directory in {path} or below it has to have checkpoints of this run; {said}: "
            f"{first_few(sorted(found.get(run, found))) or 'none'}"
        )
    return Path(*found[run])


def _is_used(path: Path) -> bool:
    """Tell whether there are checkpoints, perhaps damaged ones."""
    return any(candidates(folder) for folder in (path, *(path / _ENDS).glob("*")))


def _shown(path: Path) -> str:
    """A path as seen from the present directory, where it lies below that, and safe to print."""
    here = Path.cwd()
    return printable(str(path.relative_to(here) if path.is_relative_to(here) else path), 1000)


def _numbers(path: Path) -> list[int]:
    """The numbers that the directories in here have for names."""
    return [int(p.name) for p in path.iterdir() if p.name.isdecimal()] if path.is_dir() else []


def _is_trial() -> bool:
    """Tell whether this process runs a trial of a search."""
    return "LEARNERKIT_TRIAL" in os.environ


def _launcher() -> str:
    """Tell what has started this process from all others, also of earlier boots and other machines."""
    if named := os.environ.get("LEARNERKIT_LAUNCHER"):
        return named  # by a search, which is the same one when it has been started again
    parent, began = os.getppid(), ""
    with suppress(OSError, IndexError):
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{socket.gethostname()} {parent} {began}"


@torch.no_grad()
def _not_finite(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Where tensors have a NaN or an infinite value, by their names. A host-device sync."""
    tensors = {name: local(t) for name, t in values.items() if isinstance(t, Tensor)}
    found = {name: t for name, t in tensors.items() if t.dtype in _FLOATS and t.numel()}
    sums = [t.sum(dtype=torch.float32 if t.itemsize < 4 else None).abs().double() for t in found.values()]
    finite = torch.stack([each.to(sums[0].device) for each in sums]).isfinite().tolist() if sums else []
    # A sum may overflow by itself: then the mask is empty.
    return {name: ~t.isfinite() for (name, t), is_finite in zip(found.items(), finite, strict=True) if not is_finite}


_NOWHERE = torch.tensor(False)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
