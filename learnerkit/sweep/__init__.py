"""The search for hyper-parameters, ``python -m learnerkit.sweep``: many trials of a script, side by side on the GPUs.

Optuna, which it imports where it is used, draws the values and decides what to prune. The files, in the order of a
search:

- cli.py reads the command line, and config.py the search: Comet's JSON or Optuna's words.
- study.py keeps the trials in a file that all processes and machines share, and assigns them.
- workers.py runs them, each by the functions of `learnerkit.launch`; screen.py shows them.
- script.py and callback.py are what a trial's script uses; results.py reads what has come out.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from learnerkit.sweep.script import params as params

if TYPE_CHECKING:
    from learnerkit.sweep.callback import Report
    from learnerkit.sweep.results import Sweep

__all__ = ["load", "params", "report"]


def report(metric: str) -> "Report":
    """Return a callback that reports a column of the table after every epoch, and ends a trial that is pruned.

    On several processes all end at the same place. In a script that runs by itself it does nothing.

    Args:
        metric: the column that the search optimizes, such as 'valid_loss' or a metric. Its last value counts.

    Raises:
        ValueError: the search optimizes another one.
    """
    from learnerkit.sweep.callback import Report  # This import needs torch.

    return Report(metric)


def load(folder: str | Path) -> "Sweep":
    """Read what a search has come to, also while it runs.

    Args:
        folder: the search's directory.

    Raises:
        FileNotFoundError: there is no search in it.
        ImportError: Optuna is not installed.
    """
    from learnerkit.sweep.results import Sweep

    return Sweep(folder)
