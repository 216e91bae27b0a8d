"""The callback that reports a trial's metric after every epoch, and ends a trial that is pruned."""

from pathlib import Path
from typing import Any

from learnerkit import distributed
from learnerkit.callback import Callback
from learnerkit.callbacks.recorder import check_monitor, monitored
from learnerkit.endings import mark
from learnerkit.marks import collective
from learnerkit.state import State
from learnerkit.sweep.config import optuna
from learnerkit.sweep.script import place
from learnerkit.sweep.study import open_study, read_plan


class Pruned(SystemExit):
    """The exit of a trial's process, raised because the trial was pruned."""


class Report(Callback):
    """Reports a column of the table after each epoch to the search; ends the process if it is pruned, on all ranks.

    The epochs of several fits in one script are counted on, by one callback or by several. In a script that runs by
    itself it does nothing.

    Args:
        metric: the column that the search optimizes.

    Raises:
        ValueError: the search optimizes another one; in `before_fit`, there is no such column.
    """

    order = 64
    only_fit = True

    def __init__(self, metric: str) -> None:
        self.metric, self.place = metric, place()
        wanted = self.place["metric"] if self.place else metric
        if wanted != metric:
            raise ValueError(
                f"got report({metric!r}), and the search's config has the metric {wanted!r}: both need the same name"
            )
        self.reported: list[float] = []
        self._n_told = 0  # how many of them the journal has
        self._trial: Any = None  # Optuna's; rank 0 alone opens it
        self._step = 0  # the number of values in the journal, with those of other callbacks of the script

    def before_fit(self) -> None:
        check_monitor(self.learn, self.metric)

    @collective
    def after_epoch(self) -> None:
        value = monitored(self.learn, self.metric)
        if value is None or self.place is None:
            return
        self.reported.append(value)
        self._tell()
        ends = self._trial is not None and self._trial.should_prune()
        if ends:
            self._trial.set_user_attr("pruned", self._step)
        if distributed.broadcast(ends) if self.learn.n_ranks > 1 else ends:  # every rank must reach this
            raise mark(Pruned(), agreed=True)

    def _tell(self) -> None:
        if self.place is None or not distributed.is_main():
            return
        if self._trial is None:
            folder = Path(self.place["folder"])
            study = open_study(folder, read_plan(folder)[0])
            self._trial = optuna().trial.Trial(study, self.place["trial"])
            self._step = 1 + max(study._storage.get_trial(self.place["trial"]).intermediate_values, default=-1)
        for value in self.reported[self._n_told :]:
            self._trial.report(value, self._step)
            self._step += 1
        self._n_told = max(self._n_told, len(self.reported))

    def state_dict(self) -> State:
        """Return what was reported so far, for a trial that goes on from a checkpoint."""
        return {"reported": list(self.reported)}

    def load_state_dict(self, state: State) -> None:
        """Restore the reported values, and report them again: a trial that goes on is a new run in the journal.

        They are reported at once, since a finished fit has no further epoch.
        """
        self.reported = list(state["reported"])
        self._tell()
