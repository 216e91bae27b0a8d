"""The results of a search: its trials as a table, plots, the best one and its weights."""

import warnings
from pathlib import Path
from typing import Any

from learnerkit.sweep.config import optuna
from learnerkit.sweep.study import Row, best_of, open_study, read_plan, rows_of


class Sweep:
    """A search, as its directory has it now.

    Args:
        folder: the search's directory.

    Attributes:
        study: Optuna's own study, in which each run of a trial is a trial.
        config: what was searched.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()
        self.config, self._command = read_plan(self.folder)
        self.study = open_study(self.folder, self.config)

    @property
    def trials(self) -> list[Row]:
        """The trials; one that was run again counts once."""
        return rows_of(self.study)

    @property
    def best(self) -> Row:
        """The complete trial with the best value.

        Raises:
            ValueError: no trial is complete.
        """
        best = best_of(self.trials, self.config.maximize)
        if best is None:
            raise ValueError(f"no trial in {self.folder} is complete")
        return best

    @property
    def command(self) -> str:
        """The line that runs the best trial by hand."""
        from learnerkit.sweep.workers import Command

        return Command(**self._command).line(self.best.values)

    def frame(self) -> Any:
        """Return a pandas DataFrame with a row for each trial.

        The column of a parameter that has the name of another column, such as 'epochs', is 'param_epochs'.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("frame needs pandas: pip install 'learnerkit[sweep]'") from error
        rows = []
        for row in self.trials:
            own = {self.config.metric: row.value, "epochs": row.epoch, "state": row.state, "seconds": row.seconds}
            own |= {"attempts": row.attempt + 1, "place": row.place, "cause": row.cause, self.config.metric: row.value}
            taken = {"trial", *own}
            values = {f"param_{name}" if name in taken else name: value for name, value in row.values.items()}
            rows.append({"trial": row.number, **values, **own})
        return pd.DataFrame(rows).set_index("trial") if rows else pd.DataFrame()

    def importances(self) -> dict[str, float]:
        """Return which share of the differences each parameter explains, the largest first."""
        return importances(self.study)

    def weights(self) -> Path:
        """Return the file of weights that the best trial has saved last, for `learn.load`.

        Raises:
            FileNotFoundError: it has saved none.
        """
        folder = self.folder / "trials" / str(self.best.number)
        files = []
        named = (*folder.rglob("*.pth"), *folder.rglob("*.pt"), *folder.rglob("*.safetensors"))
        for path in filter(Path.is_file, named):  # a link may lead nowhere
            is_checkpoint = (path.parent / "manifest.json").exists()
            if not is_checkpoint or path.name == "model.safetensors":  # beside it is the rest of the run
                files.append((not is_checkpoint, path.stat().st_mtime, path))
        if not files:
            raise FileNotFoundError(f"the best trial has saved no weights in {folder}")
        return max(files)[-1]  # A file saved by name counts more than one of a checkpoint.

    def plot(self) -> Any:
        """Plot the values of all trials, how important each parameter is, and the value over each parameter.

        Returns:
            The matplotlib figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from learnerkit.data.show import pyplot  # This import needs torch.

        rows = [row for row in self.trials if row.value is not None]
        parameters, metric = self.config.parameters, self.config.metric
        figure = pyplot("plot").figure(figsize=(3.2 * max(2, len(parameters)), 6), layout="constrained")
        top, bottom = figure.subfigures(2, 1)
        history, shares = top.subplots(1, 2)
        for state, marker in (("complete", "o"), ("pruned", "x")):
            kept = [row for row in rows if row.state == state]
            history.plot([row.number for row in kept], [row.value for row in kept], marker, label=state)
        history.set(xlabel="trial", ylabel=metric, title="Trials")
        history.legend()
        by_name = self.importances()
        shares.barh(list(by_name)[::-1], list(by_name.values())[::-1])
        shares.set(title="Importance")
        complete = [row for row in rows if row.state == "complete"]
        axes = bottom.subplots(1, len(parameters), sharey=True, squeeze=False)[0]
        for (name, parameter), ax in zip(parameters.items(), axes, strict=True):
            is_named = any(isinstance(choice, str | bool | None) for choice in getattr(parameter, "choices", ()))
            values = [str(row.values[name]) if is_named else row.values[name] for row in complete]
            ax.plot(values, [row.value for row in complete], "o")
            ax.set(xlabel=name, ylabel=metric)
            if getattr(parameter, "log", False):
                ax.set_xscale("log")
        return figure


def importances(study: Any) -> dict[str, float]:
    """Return the importance of each parameter; empty where too few trials tell it.

    By PED-ANOVA (Watanabe et al., "PED-ANOVA: Efficiently Quantifying Hyperparameter Importance in Arbitrary
    Subspaces", 2023), which needs no scikit-learn.
    """
    importance = optuna().importance
    try:
        with warnings.catch_warnings(action="ignore"):
            return dict(importance.get_param_importances(study, evaluator=importance.PedAnovaImportanceEvaluator()))
    except (ValueError, RuntimeError):
        return {}
