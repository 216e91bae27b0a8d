"""The functions for the script of a trial: its values, and its reports. Only a report needs more than Python itself."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from learnerkit.text import did_you_mean

PARAMS, TRIAL = "LEARNERKIT_PARAMS", "LEARNERKIT_TRIAL"
"""The variables with the values, and with the place of the trial."""


def params(**defaults: Any) -> SimpleNamespace:
    """Return the values of this trial, or the defaults where the script runs by itself.

    Args:
        defaults: every parameter that the search may vary, with its value outside of a search. With `--as-arguments`
            some or all may be missing here: the script gets them as its arguments.

    Returns:
        An object with an attribute for each: `p.lr`. A name with hyphens has underscores here.

    Raises:
        ValueError: the search varies a parameter that is not among them.
    """
    values = {name.replace("-", "_"): value for name, value in json.loads(os.environ.get(PARAMS, "{}")).items()}
    if (place() or {}).get("as_arguments"):
        values = {name: value for name, value in values.items() if name in defaults}
    for name in values:
        if name not in defaults:
            raise ValueError(
                f"the search varies {name!r}, and params has {', '.join(defaults) or 'nothing'}: both need the same "
                f"names, or --as-arguments gives the values as arguments{did_you_mean(name, defaults)}"
            )
    return SimpleNamespace(**{**defaults, **values})


class Trial:
    """The trial that this process runs, in the journal; rank 0 alone opens it.

    Args:
        place: the value of the variable `TRIAL`.
    """

    def __init__(self, place: dict[str, Any]) -> None:
        from learnerkit.sweep.config import optuna
        from learnerkit.sweep.study import open_study, read_plan

        folder = Path(place["folder"])
        study = open_study(folder, read_plan(folder)[0], optuna().samplers.RandomSampler())  # It draws nothing here.
        self._trial = optuna().trial.Trial(study, place["trial"])
        # Another callback of the script may have reported before.
        self._step = 1 + max(study._storage.get_trial(place["trial"]).intermediate_values, default=-1)

    def report(self, value: float) -> None:
        """Report the value of the next epoch."""
        self._trial.report(value, self._step)
        self._step += 1

    def is_pruned(self) -> bool:
        """Tell whether to end now."""
        if not self._trial.should_prune():
            return False
        self._trial.set_user_attr("pruned", self._step)
        return True


def place() -> dict[str, Any] | None:
    """Return the place of the trial that this process runs; `None`: it runs none."""
    value: dict[str, Any] | None = json.loads(os.environ.get(TRIAL, "null"))
    return value
